"""What is installed: versions, int8 instructions of the CPU, and what each target can do here."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from calibrators.kernel import describe_kernel, kernel
from deploy.errors import Calib8Error
from deploy.machine import INT8_FLAGS, this_machine
from deploy.targets import TARGETS
from deploy.version import __version__

# package -> its purpose, and how to install it
_OPTIONAL = {
    "torch": ("trace, fuse and export PyTorch models", "pip install '.[torch]'"),
    "distributed": ("calibrate on the workers of a dask scheduler", "pip install '.[dask]'"),
    "openvino": ("run models in OpenVINO beside ONNX Runtime", "pip install '.[openvino]'"),
}


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    """Result of one check."""

    what: str
    there: bool
    words: str  # its version, or its purpose and how to get it


def doctor() -> tuple[EnvironmentCheck, ...]:
    """Check everything; nothing runs on a device."""
    return (*_own_checks(), *_target_checks(), *_package_checks())


def _own_checks() -> Iterator[EnvironmentCheck]:
    machine = this_machine()
    system = f"Python {platform.python_version()}, {machine.os}"
    yield EnvironmentCheck("calib8", True, f"{__version__}, {system}")
    others = {n: v for n, v in machine.versions.items() if n not in ("calib8", "python")}
    quicker = "" if kernel() else "; faster if it is installed with a C compiler"
    yield EnvironmentCheck("counting", kernel() is not None, describe_kernel() + quicker)
    yield EnvironmentCheck("packages", True, ", ".join(f"{n} {v}" for n, v in others.items()))
    int8 = ", ".join(machine.int8)
    words = f"{machine.cpu}, {machine.cores} cores"
    lacking = (
        f"{words}; no int8 dot products (of {', '.join(INT8_FLAGS)}): int8 gains less here, and on"
        " x86 models of other tools may saturate"
    )
    yield EnvironmentCheck("CPU", bool(int8), f"{words}; int8 by {int8}" if int8 else lacking)


def _target_checks() -> Iterator[EnvironmentCheck]:
    for name, target in TARGETS.items():
        try:
            yield EnvironmentCheck(
                name, True, f"builds and runs engines: {target().describe_sdk()}"
            )
        except Calib8Error as error:
            yield EnvironmentCheck(name, False, f"writes its files, no engine: {error}")


def _package_checks() -> Iterator[EnvironmentCheck]:
    for name, (purpose, way) in _OPTIONAL.items():
        try:
            yield EnvironmentCheck(name, True, version(name))
        except PackageNotFoundError:
            yield EnvironmentCheck(name, False, f"not installed; to {purpose}: {way}")
