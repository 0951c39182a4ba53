"""What is here: versions, what the CPU has for int8, what each target can do on this machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from calibrators.kernel import kernel, told
from deploy.errors import Calib8Error
from deploy.machine import INT8_FLAGS, this_machine
from deploy.targets import TARGETS
from deploy.version import __version__

# package -> what it is for, and what brings it
_OPTIONAL = {
    "torch": ("trace, fuse and export PyTorch models", "pip install '.[torch]'"),
    "distributed": ("calibrate on the workers of a dask scheduler", "pip install '.[dask]'"),
    "openvino": ("run models in OpenVINO beside ONNX Runtime", "pip install '.[openvino]'"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        what: its name.
        there: whether it is here and works.
        words: version or, where it is missing, what it is for and how to get it.
    """

    what: str
    there: bool
    words: str


def examine() -> tuple[Finding, ...]:
    """Look at everything; nothing is run on a device."""
    return (*_itself(), *_targets(), *_optional())


def _itself() -> Iterator[Finding]:
    machine = this_machine()
    system = f"Python {platform.python_version()}, {machine.os}"
    yield Finding("calib8", True, f"{__version__}, {system}")
    others = {n: v for n, v in machine.versions.items() if n not in ("calib8", "python")}
    quicker = "" if kernel() else "; quicker where it is installed with a C compiler at hand"
    yield Finding("counting", kernel() is not None, told() + quicker)
    yield Finding("packages", True, ", ".join(f"{n} {v}" for n, v in others.items()))
    int8 = ", ".join(machine.int8)
    words = f"{machine.cpu}, {machine.cores} cores"
    lacking = (
        f"{words}; no int8 dot products (of {', '.join(INT8_FLAGS)}): int8 gains less here, and on"
        " x86 models of other tools may saturate"
    )
    yield Finding("CPU", bool(int8), f"{words}; int8 by {int8}" if int8 else lacking)


def _targets() -> Iterator[Finding]:
    for name, target in TARGETS.items():
        try:
            yield Finding(name, True, f"builds and runs engines: {target().at_hand()}")
        except Calib8Error as error:
            yield Finding(name, False, f"writes its files, no engine: {error}")


def _optional() -> Iterator[Finding]:
    for name, (purpose, way) in _OPTIONAL.items():
        try:
            yield Finding(name, True, version(name))
        except PackageNotFoundError:
            yield Finding(name, False, f"not installed; to {purpose}: {way}")
