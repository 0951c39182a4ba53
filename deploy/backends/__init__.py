"""One file per runtime; `BACKENDS` is the table of targets.

New hardware is one file here that implements `deploy.backends.base.Backend`, and one row.
"""

from deploy.backends.ascend import Ascend
from deploy.backends.base import Backend
from deploy.backends.onnxruntime import OnnxRuntime
from deploy.backends.tensorrt import TensorRT

BACKENDS: dict[str, type[Backend]] = {
    "onnxruntime": OnnxRuntime,
    "tensorrt": TensorRT,
    "ascend": Ascend,
}

__all__ = ["BACKENDS", "Ascend", "Backend", "OnnxRuntime", "TensorRT"]
