"""The counting kernel beside the metadata of setup.cfg: built where there is a C compiler.

It is a library of plain C without Python's headers, loaded by `calibrators/kernel.py`: one for
every Python. Nothing needs it, so where it cannot be built, installing goes on without it.
`CALIB8_COUNTING=opencv` leaves it out, for a wheel that is for every platform.
"""

import os

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNEL = Extension(
    "calibrators._count",
    ["cpp/src/kernel/count.c", "cpp/src/kernel/round.c", "cpp/src/kernel/sums.c"],
    depends=["cpp/src/kernel/count.h", "cpp/src/kernel/round.h", "cpp/src/kernel/sums.h"],
    extra_compile_args=["-std=c11", "-O3", "-g0", "-ffp-contract=off"],
    optional=True,
)
LEFT_OUT = os.name == "nt" or os.environ.get("CALIB8_COUNTING") == "opencv"


class BuildLibrary(build_ext):
    """A plain library: no Python's name in its own."""

    def get_ext_filename(self, fullname: str) -> str:
        """calibrators/_count.so."""
        return os.path.join(*fullname.split(".")) + ".so"


class BuildWheel(bdist_wheel):
    """A wheel of a platform, for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-PLATFORM."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[] if LEFT_OUT else [KERNEL],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": BuildWheel},
)
