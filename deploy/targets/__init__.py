"""One folder or file a target; `TARGETS` is the table of them.

New hardware is one file here with a class that implements `deploy.targets.base.Target`, and one
row. The classes import what is heavy inside their functions, since `--help` lists their options.
"""

from deploy.errors import ConfigError, did_you_mean
from deploy.targets.ascend.target import Ascend
from deploy.targets.base import Target
from deploy.targets.onnxruntime import OnnxRuntime
from deploy.targets.tensorrt.target import TensorRT

TARGETS: dict[str, type[Target]] = {
    "onnxruntime": OnnxRuntime,
    "tensorrt": TensorRT,
    "ascend": Ascend,
}


def named(name: str) -> type[Target]:
    """The target of a name.

    Raises:
        ConfigError: a name that is not in the table.
    """
    if name in TARGETS:
        return TARGETS[name]
    near = did_you_mean(name, TARGETS, "calib8 build --help lists them")
    raise ConfigError(f"a target is one of {', '.join(TARGETS)}, got {name!r}; {near}")


__all__ = ["TARGETS", "Ascend", "OnnxRuntime", "Target", "TensorRT", "named"]
