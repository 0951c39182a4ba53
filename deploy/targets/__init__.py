"""One file per runtime; `TARGETS` is the table of targets.

New hardware is one file here that implements `deploy.targets.base.Target`, and one row.
"""

from deploy.targets.ascend.target import Ascend
from deploy.targets.base import Target
from deploy.targets.onnxruntime import OnnxRuntime
from deploy.targets.tensorrt.target import TensorRT

TARGETS: dict[str, type[Target]] = {
    "onnxruntime": OnnxRuntime,
    "tensorrt": TensorRT,
    "ascend": Ascend,
}

__all__ = ["TARGETS", "Ascend", "OnnxRuntime", "Target", "TensorRT"]
