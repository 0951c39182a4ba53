"""The machine that measured: a latency means nothing without it."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deploy.version import __version__

# Instruction sets with an int8 dot product; without one, int8 gains little on a CPU.
# x86: AVX512-VNNI, AVX-VNNI, AMX. Arm: SDOT/UDOT ("asimddp"), I8MM.
INT8_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")

# Where a container's limit stands, in either version of Linux's control groups.
_MEMORY_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)

_PACKAGES = ("numpy", "onnx", "onnxruntime", "opencv-python-headless")


def trim_memory() -> None:
    """Give back what the C library's allocator keeps for later, where it can be told to."""
    with suppress(OSError, AttributeError):  # another C library has no such function
        if platform.system() == "Linux":
            ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator that something was measured on; "" where the system does not tell.

    Attributes:
        name: as its driver gives it.
        runtime: what ran on it, with its version: "TensorRT 10.13.0.35".
        driver: version of the driver.
        cuda: the newest CUDA that the driver has.
    """

    name: str
    runtime: str = ""
    driver: str = ""
    cuda: str = ""

    @property
    def words(self) -> str:
        """All that is known, in one line."""
        known = (("driver", self.driver), ("CUDA", self.cuda))
        versions = (f"{what} {version}" for what, version in known if version)
        return ", ".join(filter(None, (self.name, *versions, self.runtime)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """CPU, cores, system and versions.

    Attributes:
        cpu: the name the system gives it.
        cores: logical cores this process may use, which may be fewer than the machine has.
        int8: the int8 dot-product instruction sets found, of `INT8_FLAGS`.
        os: system, release and architecture.
        versions: package name -> version of what was measured with.
        devices: accelerators that a session ran on.
    """

    cpu: str
    cores: int
    int8: tuple[str, ...]
    os: str
    versions: dict[str, str]
    devices: tuple[Device, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Plain JSON types."""
        return asdict(self)


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """Describe the machine this process runs on."""
    cpu_info = _cpu_info()
    return Machine(
        cpu=_cpu_name(cpu_info),
        cores=usable_cores(),
        int8=tuple(flag for flag in INT8_FLAGS if flag in _cpu_flags(cpu_info)),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=_versions(),
    )


def usable_cores() -> int:
    """Logical cores this process may use: its affinity where the system has one."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Worker threads where the user names none: every core, but no more than 4."""
    return min(4, usable_cores())


def memory_bytes() -> int | None:
    """Bytes of memory that this process may use at most; None where the system does not say."""
    limits = [_limit(Path(file)) for file in _MEMORY_LIMITS]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        import resource

        limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    except ImportError:  # Windows
        pass
    return min((limit for limit in limits if limit > 0), default=None)


def _limit(file: Path) -> int:
    """A number of bytes in a file of the system; 0 where there is none."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdecimal() else 0


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""


def _cpu_name(cpu_info: str) -> str:
    for line in cpu_info.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def _cpu_flags(cpu_info: str) -> frozenset[str]:
    for line in cpu_info.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _versions() -> dict[str, str]:
    found = {"calib8": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # e.g. opencv-python in place of the headless one
            continue
    return found
