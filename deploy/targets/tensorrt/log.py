"""TensorRT's log: the one logger of this process, and the recorders that listen to it.

TensorRT keeps the first logger as long as any of its objects lives, and its plugins keep a raw
pointer to the last. With one logger per build, messages would go to an earlier logger or to a
deleted one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from deploy.errors import BackendError

if TYPE_CHECKING:
    import tensorrt as trt


_QUOTED_WARNINGS = 3  # warnings that an error message quotes if TensorRT logged no error


class LogRecorder:
    """Records TensorRT's messages up to a severity, and all errors and warnings separately.

    Attributes:
        max_severity: number of the least severe messages in `lines`; larger is less severe.
    """

    def __init__(self, max_severity: int) -> None:
        self.max_severity = max_severity
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def record(self, severity: int, error_severity: int, message: str) -> None:
        """Record a message; `error_severity` is the number of `Severity.ERROR`."""
        if severity <= error_severity:
            self.errors.append(message)
        elif severity == error_severity + 1:
            self.warnings.append(message)
        if severity <= self.max_severity:
            self.lines.append(message)

    def summary(self) -> str:
        """Return TensorRT's errors, or else its last messages, for an error message."""
        messages = self.errors or self.warnings[-_QUOTED_WARNINGS:] or self.lines[-1:]
        return " | ".join(messages) or "its log says nothing"


_recorders: list[LogRecorder] = []


@cache
def process_logger() -> trt.ILogger:
    """Return the one logger of this process; it prints nothing and passes on to `record_log`."""
    import tensorrt as trt

    error_severity = int(trt.ILogger.Severity.ERROR)

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            for recorder in tuple(_recorders):
                recorder.record(int(severity), error_severity, msg)

    return Logger()


@contextmanager
def record_log() -> Iterator[LogRecorder]:
    """Record TensorRT's messages from all threads and objects inside the `with` block."""
    import tensorrt as trt

    recorder = LogRecorder(int(trt.ILogger.Severity.INFO))
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders.remove(recorder)


def create_with_logger(class_name: str, log: LogRecorder, purpose: str) -> Any:
    """Create TensorRT's "Builder" or "Runtime".

    Raises:
        BackendError: TensorRT could not `purpose`, as on a machine whose driver does not fit.
    """
    import tensorrt as trt

    try:
        return getattr(trt, class_name)(process_logger())
    except (TypeError, RuntimeError) as error:  # null object: the driver does not fit
        cause = log.summary() if log.lines else error
        raise BackendError(f"TensorRT could not {purpose} on this machine: {cause}") from error
