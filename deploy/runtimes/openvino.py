"""Sessions of OpenVINO on the CPU, with the `Session` protocol.

OpenVINO is optional. No target builds for it, but it reads the same Q/DQ files as ONNX Runtime and
does not always compute the same results.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deploy.errors import BackendError, SdkMissingError, extra_hint, first_line
from deploy.machine import usable_cores
from deploy.runtimes.ort import CpuSession, Model, model_source
from deploy.tensors import Array, TensorSpec


class OpenvinoSession(CpuSession):
    """An ONNX model loaded in OpenVINO."""

    _runtime = "OpenVINO"

    def __init__(self, compiled: Any, *, threads: int) -> None:
        self.threads = threads
        self.inputs = [_spec(port) for port in compiled.inputs]
        self.outputs = [_spec(port) for port in compiled.outputs]

        def infer(feed: dict[str, Array]) -> list[Array]:
            values = compiled(feed)
            # copied: the arrays are the request's memory, which the next run overwrites
            return [np.array(values[number]) for number in range(len(self.outputs))]

        self._infer = infer

    @classmethod
    def open(
        cls,
        model: Model,
        *,
        threads: int | None = None,
    ) -> OpenvinoSession:
        """Load a model from a file or from memory.

        Float layers are computed in float32, even if the CPU has bfloat16, so that only the int8
        arithmetic differs from ONNX Runtime.

        Args:
            model: path of an ONNX file (with its external data next to it), its bytes, or a proto.
            threads: threads of one inference; None uses every core available to this process.

        Raises:
            SdkMissingError: OpenVINO is not installed.
            BackendError: OpenVINO cannot load the model; the message quotes OpenVINO.
        """
        openvino = _import_openvino()
        threads = usable_cores() if threads is None else threads
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
        }
        source = model_source(model)
        try:
            core = openvino.Core()
            compiled = core.compile_model(core.read_model(source), "CPU", settings)
        except Exception as error:  # OpenVINO documents no class of its errors
            open_error = cls._open_error(model, openvino.__version__, error)
            raise BackendError(f"{open_error}; run it in ONNX Runtime only") from error
        return cls(compiled, threads=threads)

    @staticmethod
    def _clean_message(error: Exception) -> str:
        """Return the message's last line with text; the lines before are locations in OpenVINO."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return first_line(RuntimeError(lines[-1]))


def _import_openvino() -> Any:
    """Import and return the module `openvino`.

    Raises:
        SdkMissingError: it is not installed.
    """
    try:
        import openvino
    except ImportError as error:
        raise SdkMissingError(
            "the runtime openvino must be installed on this machine, got none;"
            f" {extra_hint('openvino')}, or run the model in ONNX Runtime only"
        ) from error
    return openvino


def _spec(port: Any) -> TensorSpec:
    """Convert OpenVINO's port to a spec with a numpy dtype; open dimensions become None."""
    shape: list[int | None] = []
    for dimension in port.get_partial_shape():
        shape.append(int(dimension.get_length()) if dimension.is_static else None)
    dtype = np.dtype(port.get_element_type().to_dtype())
    return TensorSpec(str(port.get_any_name()), dtype.name, tuple(shape))
