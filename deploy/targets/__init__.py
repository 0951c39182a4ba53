"""One folder or file a target; `TARGETS` is the table of them.

New hardware is one file here with a class that implements `deploy.targets.base.Target`, and one
row. The classes import what is heavy inside their functions, since `--help` lists their options.
"""

from deploy.errors import ConfigError
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
    import difflib

    if name in TARGETS:
        return TARGETS[name]
    near = difflib.get_close_matches(name, TARGETS, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ConfigError(f"a target is one of {', '.join(TARGETS)}, got {name!r}{hint}")


__all__ = ["TARGETS", "Ascend", "OnnxRuntime", "Target", "TensorRT", "named"]
