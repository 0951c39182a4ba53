"""The deployment targets, one package each, and `TARGETS`, the table of them.

To add hardware, write a class that implements `deploy.targets.base.Target` and add a row here.
Target classes import heavy packages inside their functions, since `--help` lists their options.
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


def find_target(name: str) -> type[Target]:
    """Return the target class of this name.

    Raises:
        ConfigError: the name is not in `TARGETS`.
    """
    if name in TARGETS:
        return TARGETS[name]
    near = did_you_mean(name, TARGETS, "calib8 build --help lists them")
    raise ConfigError(f"a target is one of {', '.join(TARGETS)}, got {name!r}; {near}")


def make_targets(targets: str | Sequence[str | Target]) -> list[Target]:
    """Return target objects; a name stands for the target with default options.

    Raises:
        ConfigError: no target, a name that is not in `TARGETS`, or two targets of one name.
    """
    given = [targets] if isinstance(targets, str) else targets
    made = [find_target(target)() if isinstance(target, str) else target for target in given]
    if not made:
        raise ConfigError(f"at least one target is needed, of {', '.join(TARGETS)}")
    names = Counter(target.name for target in made)
    repeated = [name for name, times in names.items() if times > 1]
    if repeated:
        raise ConfigError(
            f"each target may be given once, got {repeated[0]!r} twice, and both would write the"
            " same files; build the second one into another folder"
        )
    return made


__all__ = ["TARGETS", "Ascend", "OnnxRuntime", "Target", "TensorRT", "find_target", "make_targets"]
