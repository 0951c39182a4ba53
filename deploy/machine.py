"""Describe the machine of a measurement: a latency means nothing without it."""

import ctypes
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deploy.errors import ConfigError, counted
from deploy.version import __version__

# Instruction sets with an int8 dot product; without one, int8 gains little on a CPU.
# x86: AVX512-VNNI, AVX-VNNI, AMX. Arm: SDOT/UDOT ("asimddp"), I8MM.
INT8_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")

# Files with a container's memory limit, in cgroup versions 2 and 1.
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

MAX_DEFAULT_THREADS = 4
MAX_THREADS = 1024
_PACKAGES = ("numpy", "onnx", "onnxruntime", "opencv-python-headless")


# parameter of glibc's mallopt (malloc.h): blocks from this size on are mapped one by one
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 1 << 20
_MAX_MMAP_THRESHOLD = 32 << 20  # up to which glibc itself raises the threshold as blocks are freed


def trim_memory() -> None:
    """Return the memory that the C library's allocator holds to the system (glibc only)."""
    _call_glibc("malloc_trim", 0)


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Return blocks of over 1 MiB to the system as soon as they are freed (glibc only).

    For work that copies weights again and again: glibc would hold them between smaller blocks, and
    the process would take twice what is in use. Small blocks are returned at the end. Elsewhere
    blocks are better reused, since the system clears each page that it hands out.
    """
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    try:
        yield
    finally:
        _call_glibc("mallopt", _M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        trim_memory()


def _call_glibc(function: str, *arguments: int) -> None:
    """Call a function of the C library; do nothing if it has no such function."""
    with suppress(OSError, AttributeError):
        if platform.system() == "Linux":
            getattr(ctypes.CDLL(None), function)(*arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorInfo:
    """An accelerator used for a measurement; "" for what the system does not report.

    Attributes:
        name: as the driver reports it.
        runtime: the runtime with its version: "TensorRT 10.13.0.35".
        driver: version of the driver.
        cuda: the newest CUDA version that the driver supports.
    """

    name: str
    runtime: str = ""
    driver: str = ""
    cuda: str = ""

    @property
    def description(self) -> str:
        """Name and versions in one line."""
        driver = self.driver and f"driver {self.driver}"
        cuda = self.cuda and f"CUDA {self.cuda}"
        return ", ".join(filter(None, (self.name, driver, cuda, self.runtime)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """CPU, cores, system and versions.

    Attributes:
        cpu: the name that the system reports.
        cores: logical cores available to this process, perhaps fewer than the machine has.
        int8: the int8 dot-product instruction sets available, of `INT8_FLAGS`.
        os: system, release and architecture.
        versions: package name -> version used for the measurement.
        devices: accelerators that sessions ran on.
    """

    cpu: str
    cores: int
    int8: tuple[str, ...]
    os: str
    versions: dict[str, str]
    devices: tuple[AcceleratorInfo, ...] = ()

    @property
    def cpu_text(self) -> str:
        """Name and number of cores of the CPU."""
        return f"{self.cpu}, {counted(self.cores, 'core')}"

    def to_json(self) -> dict[str, object]:
        """Plain JSON types."""
        return asdict(self)


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """Describe the machine this process runs on."""
    cpu = _cpu_field("model name", "Model", "Hardware")
    flags = _cpu_field("flags", "Features").split()
    return Machine(
        cpu=cpu or platform.processor() or platform.machine() or "unknown",
        cores=usable_cores(),
        int8=tuple(flag for flag in INT8_FLAGS if flag in flags),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=_versions(),
    )


def cpu_name() -> str:
    """Return the name of this machine's CPU with its int8 instructions."""
    machine = this_machine()
    return ", ".join((machine.cpu, *machine.int8))


def usable_cores() -> int:
    """Return the number of logical cores available to this process, by affinity if possible."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_threads(requested: int | None = None) -> int:
    """Return the requested number of worker threads; for None, one per core, at most 4.

    Raises:
        ConfigError: fewer than one thread, or more than any machine has.
    """
    if requested is None:
        return min(MAX_DEFAULT_THREADS, usable_cores())
    if requested not in range(1, MAX_THREADS + 1):
        raise ConfigError(f"threads must be 1 to {MAX_THREADS}, got {requested!r}")
    return requested


def memory_bytes() -> int | None:
    """Return the limit of this process's memory in bytes; None if the system does not report it."""
    limits = [_read_bytes_limit(Path(file)) for file in _MEMORY_LIMITS]
    limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])  # below 0 for no limit
    if "SC_PHYS_PAGES" in os.sysconf_names:  # not on macOS
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min((limit for limit in limits if limit > 0), default=None)


def _read_bytes_limit(file: Path) -> int:
    """Read a number of bytes from a system file; 0 if it does not exist."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdecimal() else 0


def _cpu_field(*keys: str) -> str:
    """Return the first value of these keys in the system's report on the CPU; "" without one."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys and value.strip():
            return value.strip()
    return ""


def _versions() -> dict[str, str]:
    """Return package -> its version, for those that figures depend on."""
    versions = {"calib8": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):  # e.g. opencv-python instead of -headless
            versions[package] = version(package)
    return versions
