"""A quiet ONNX Runtime session: to judge whether a model loads, and to evaluate constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx
    import onnxruntime as ort
    from numpy.typing import NDArray

_FATAL = 4  # of onnxruntime's log levels: what goes wrong is said by our own sentence


def open_session(model: onnx.ModelProto) -> ort.InferenceSession:
    """Load `model` on the CPU exactly as it is, without graph optimizations, on one thread.

    Raises:
        Exception: whatever onnxruntime raises; its errors share no base class.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    return ort.InferenceSession(
        model.SerializeToString(deterministic=True), options, providers=["CPUExecutionProvider"]
    )


def evaluate(model: onnx.ModelProto, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Outputs of `model` for `feed`, in the model's order."""
    options = _run_options()
    return list(open_session(model).run(None, dict(feed), options))


def _run_options() -> ort.RunOptions:
    import onnxruntime as ort

    options = ort.RunOptions()
    options.log_severity_level = _FATAL
    return options
