"""One folder or file a target; `TARGETS` is the table of them.

New hardware is one file here with a class that implements `deploy.targets.base.Target`, and one
row. The classes import what is heavy inside their functions, since `--help` lists their options.
"""

from collections import Counter
from collections.abc import Sequence

from deploy.errors import ConfigError, did_you_mean
from deploy.targets.ascend.target import Ascend
from deploy.targets.base import Target
from deploy.targets.onnxruntime.target import OnnxRuntime
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


def targets_of(targets: Sequence[str | Target]) -> list[Target]:
    """Targets by name or with options of their own.

    Raises:
        ConfigError: a name that is not in the table, or two targets of one name.
    """
    found = [named(target)() if isinstance(target, str) else target for target in targets]
    if not found:
        raise ConfigError(f"at least one target is needed, of {', '.join(TARGETS)}")
    names = Counter(target.name for target in found)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise ConfigError(
            f"targets must have names of their own, got {twice[0]!r} twice, whose files would be"
            " the same; build the other one into another folder"
        )
    return found


__all__ = ["TARGETS", "Ascend", "OnnxRuntime", "Target", "TensorRT", "named", "targets_of"]
