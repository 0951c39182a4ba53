"""Names of a stood-in module that no calibrator needs.

A script often builds its engine in the same file: `trt.Builder` stands in a function that is not
called, `trt.ICudaEngine` in an annotation, `1 << int(trt.NetworkDefinitionCreationFlag.X)` at the
top. So every such name is there, and only calling it is refused, by a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any


class _Named(type):
    """The type of names: each has every name below it, and is flag number 0."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}")

    def __int__(cls) -> int:
        return 0

    __index__ = __int__

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if vars(cls).get("_is_absent"):
            raise NotImplementedError(
                f"{cls.__qualname__} is not to be had without a GPU; what is called here may make"
                " the calibrator and what feeds it, and no more"
            )
        return super().__call__(*given, **named)


def absent(name: str) -> Any:
    """A class of this dotted name that can be named and inherited from, but not called."""
    return _Named(name.rpartition(".")[2], (), {"__qualname__": name, "_is_absent": True})


def module(name: str, names: Mapping[str, Any]) -> ModuleType:
    """A module with these names, and every other one as an absent one."""
    made = ModuleType(name, "Stands in for the module of this name, on host memory.")
    made.__path__ = []  # so that `import a.b` looks for b and says what it did not find
    vars(made).update(names)

    def other(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
        return absent(f"{name}.{wanted}")

    vars(made)["__getattr__"] = other
    return made
