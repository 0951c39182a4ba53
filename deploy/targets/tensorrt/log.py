"""TensorRT's log: one logger a process and library, and the recorders that listen to it.

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
# numbers of trt.ILogger.Severity, the same in every version; a larger one is less severe
_ERROR, _WARNING, _INFO = 1, 2, 3


class LogRecorder:
    """Records TensorRT's messages but the verbose ones, and errors and warnings separately."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def record(self, severity: int, message: str) -> None:
        """Record a message; `severity` is the number of its trt.ILogger.Severity."""
        if severity <= _ERROR:
            self.errors.append(message)
        elif severity == _WARNING:
            self.warnings.append(message)
        if severity <= _INFO:
            self.lines.append(message)

    def summary(self) -> str:
        """Return TensorRT's errors, or else its last messages, for an error message."""
        messages = self.errors or self.warnings[-_QUOTED_WARNINGS:] or self.lines[-1:]
        return " | ".join(messages) or "its log says nothing"


_recorders: list[LogRecorder] = []


@cache
def process_logger(library: Any) -> trt.ILogger:
    """Return the one logger of a library; it prints nothing and passes on to `record_log`.

    `library`: the module `tensorrt` or `tensorrt_rtx`.
    """

    class Logger(library.ILogger):
        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            for recorder in tuple(_recorders):
                recorder.record(int(severity), msg)

    return Logger()


@contextmanager
def record_log() -> Iterator[LogRecorder]:
    """Record TensorRT's messages from all threads and objects inside the `with` block."""
    recorder = LogRecorder()
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
        return getattr(trt, class_name)(process_logger(trt))
    except (TypeError, RuntimeError) as error:  # null object: the driver does not fit
        cause = log.summary() if log.lines else error
        raise BackendError(f"TensorRT could not {purpose} on this machine: {cause}") from error
