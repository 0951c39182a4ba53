"""The deployment targets, one package each, and `TARGETS`, the table of them.

To add hardware, write a class that derives from `deploy.targets.base.Target` and add a row here.
Target classes import heavy packages inside their functions, since `--help` lists their options.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from deploy.errors import ConfigError, did_you_mean
from deploy.targets.ascend.target import Ascend
from deploy.targets.base import Target
from deploy.targets.onnxruntime.target import OnnxRuntime
from deploy.targets.tensorrt.rtx import TensorRTForRTX
from deploy.targets.tensorrt.target import TensorRT

TARGETS: dict[str, type[Target]] = {
    "onnxruntime": OnnxRuntime,
    "tensorrt": TensorRT,
    "tensorrt-rtx": TensorRTForRTX,
    "ascend": Ascend,
}


def find_target(name: str) -> type[Target]:
    """Return the target class of this name.

    Raises:
        ConfigError: the name is not in `TARGETS`.
    """
    if name in TARGETS:
        return TARGETS[name]
    advice = did_you_mean(name, TARGETS, "calib8 build --help lists them")
    raise ConfigError(f"a target is one of {', '.join(TARGETS)}, got {name!r}; {advice}")


def make_targets(targets: str | Target | Sequence[str | Target]) -> list[Target]:
    """Return target objects, of one or several; a name stands for the target with its defaults.

    Raises:
        ConfigError: no target, a name that is not in `TARGETS`, or two targets of one name.
    """
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        targets = [targets]
    target_by_name: dict[str, Target] = {}
    for entry in targets:
        target: Any = entry if hasattr(entry, "name") else find_target(str(entry))
        if isinstance(target, type):  # a class, which `find_target` returns; the user may give one
            target = target()
        if target.name in target_by_name:
            raise ConfigError(
                f"each target may be given once, got {target.name!r} twice, and both would write"
                " the same files; build the second one into another folder"
            )
        target_by_name[target.name] = target
    if not target_by_name:
        raise ConfigError(f"at least one target is needed, of {', '.join(TARGETS)}")
    return list(target_by_name.values())


__all__ = [
    "TARGETS",
    "Ascend",
    "OnnxRuntime",
    "Target",
    "TensorRT",
    "TensorRTForRTX",
    "find_target",
    "make_targets",
]
