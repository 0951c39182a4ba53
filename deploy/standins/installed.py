"""The stand-ins in their places, for as long as a user's code runs.

They are put there whether the real modules are installed or not: the same script gives the same
bytes on every machine, and a GPU that is at hand is left alone. Afterwards all is as it was, so
that an engine is built by the real TensorRT.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from deploy.standins import cuda_modules, cudart
from deploy.standins import modules as tensorrt
from deploy.standins.libcudart import libraries
from deploy.standins.memory import Memory

_NAMES = ("tensorrt", "pycuda", "cuda")


class StandIns:
    """The modules of one script, all on one memory."""

    def __init__(self) -> None:
        self.memory = Memory()
        self._modules = {
            **tensorrt.modules(),
            **cuda_modules.modules(self.memory),
            **cudart.modules(self.memory),
        }
        self._library = libraries(self.memory)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put them in their places; not meant for several threads at once."""
        with ExitStack() as stack:
            stack.enter_context(_replaced(self._modules))
            stack.enter_context(_libraries(self._library))
            if "torch" in sys.modules:
                from deploy.standins.torch_on_cpu import OnHost

                stack.enter_context(OnHost(self.memory))
            yield


@contextmanager
def _replaced(modules: dict[str, ModuleType]) -> Iterator[None]:
    """These in `sys.modules`, in place of all that has their names or stands below them."""
    own = {name: known for name, known in sys.modules.items() if name.split(".")[0] in _NAMES}
    for name in own:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in _NAMES]:
            del sys.modules[name]
        sys.modules.update(own)


@contextmanager
def _libraries(kind: type[ctypes.CDLL]) -> Iterator[None]:
    """This in the places of `ctypes.CDLL` and the loader that uses it."""
    own = ctypes.CDLL, ctypes.cdll
    ctypes.CDLL, ctypes.cdll = kind, ctypes.LibraryLoader(kind)  # type: ignore[misc]
    try:
        yield
    finally:
        ctypes.CDLL, ctypes.cdll = own  # type: ignore[misc]
