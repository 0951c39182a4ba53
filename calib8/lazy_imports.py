"""Modules whose names are imported when they are first used, so that importing them is quick."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(
    module: str, import_paths: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module whose names are imported when first used.

    Args:
        module: name of the module.
        import_paths: name -> "module:attribute", or "module" for the module itself.
    """

    def import_name(name: str) -> object:
        """Import what a name stands for, and set it in the module for the next use."""
        if name not in import_paths:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        path, _, attribute = import_paths[name].partition(":")
        value: object = import_module(path)
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[module], name, value)
        return value

    # a prompt completes what `dir` lists: without this, also names that the module itself imports
    def list_names() -> list[str]:
        special_names = (name for name in vars(sys.modules[module]) if name.startswith("__"))
        return sorted({*special_names, *import_paths})

    return import_name, list_names
