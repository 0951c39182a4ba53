"""Check this machine: versions, int8 instructions of the CPU, and what each target can do here."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from calibrators.kernel import describe_kernel, kernel
from deploy.errors import Calib8Error, extra_hint
from deploy.machine import INT8_FLAGS, this_machine
from deploy.targets import TARGETS
from deploy.terminal import PrintedResult, join_visible
from deploy.version import __version__

# package -> its purpose, and the extra that installs it
_OPTIONAL_PACKAGES = {
    "torch": ("trace, fuse and export PyTorch models", "torch"),
    "distributed": ("calibrate on the workers of a dask scheduler", "dask"),
    "openvino": ("run models in OpenVINO beside ONNX Runtime", "openvino"),
}


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    """Result of one check.

    Attributes:
        name: what was checked.
        is_available: whether it is installed, or supported by the CPU.
        details: its version, or its purpose and how to get it.
    """

    name: str
    is_available: bool
    details: str

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types."""
        return {"what": self.name, "there": self.is_available, "words": self.details}


@dataclass(frozen=True, slots=True, repr=False)
class Environment(PrintedResult):
    """This machine; `repr` has a line for each check.

    Attributes:
        checks: what was checked, in the order of the lines.
    """

    checks: tuple[EnvironmentCheck, ...]

    def __iter__(self) -> Iterator[EnvironmentCheck]:
        return iter(self.checks)

    def to_screen(self) -> str:
        """Return a line for each check, with + where it is available."""
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            sign = "+" if check.is_available else "-"
            lines.append(f"{sign} {check.name:<{width}}  {check.details}")
        return join_visible(lines)


def doctor() -> Environment:
    """Check what is installed here, and what each target needs; nothing runs on a device."""
    return Environment((*_check_installation(), *_check_targets(), *_check_packages()))


def _check_installation() -> Iterator[EnvironmentCheck]:
    """Check calib8, its C kernel that counts histograms, the required packages, and the CPU."""
    machine = this_machine()
    system = f"Python {platform.python_version()}, {machine.os}"
    yield EnvironmentCheck("calib8", True, f"{__version__}, {system}")

    has_kernel = kernel() is not None
    details = describe_kernel()
    if not has_kernel:
        details += "; faster if it is installed with a C compiler"
    yield EnvironmentCheck("counting", has_kernel, details)

    packages = []
    for name, package_version in machine.versions.items():
        if name not in ("calib8", "python"):
            packages.append(f"{name} {package_version}")
    yield EnvironmentCheck("packages", True, ", ".join(packages))

    cpu = machine.cpu_text
    if machine.int8:
        yield EnvironmentCheck("CPU", True, f"{cpu}; int8 by {', '.join(machine.int8)}")
    else:
        flags = ", ".join(INT8_FLAGS)
        yield EnvironmentCheck(
            "CPU",
            False,
            f"{cpu}; no int8 dot products (of {flags}): int8 gains less here, and on x86 models of"
            " other tools may saturate",
        )


def _check_targets() -> Iterator[EnvironmentCheck]:
    """Check which targets can build and run engines here; the others still write their files."""
    for name, target in TARGETS.items():
        try:
            details = f"builds and runs engines: {target().describe_sdk()}"
            yield EnvironmentCheck(name, True, details)
        except Calib8Error as error:
            yield EnvironmentCheck(name, False, f"writes its files, no engine: {error}")


def _check_packages() -> Iterator[EnvironmentCheck]:
    """Check the optional packages."""
    for name, (purpose, extra) in _OPTIONAL_PACKAGES.items():
        try:
            yield EnvironmentCheck(name, True, version(name))
        except PackageNotFoundError:
            details = f"not installed; to {purpose}: {extra_hint(extra)}"
            yield EnvironmentCheck(name, False, details)
