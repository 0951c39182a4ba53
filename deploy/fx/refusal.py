"""Why torch.export could not follow a model, in the user's own lines, and what to do about it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from deploy.fx.source import users_line

# each with what ends a folder's name: torchvision lies beside torch
_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")


def explain(error: BaseException, model: nn.Module) -> str:
    """One sentence: the module, its file and line, what torch said, and the way out."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    name = innermost(error, model) or innermost(root, model)
    whose = type(model.get_submodule(name)).__name__ + (f" ({name})" if name else "")
    where = line_of(root) or line_of(error)
    said = " ".join(str(root).split()).partition(" (unhinted")[0][:160]
    return (
        f"torch.export must be able to follow the model, and cannot follow {whose}"
        + (f" at {where}" if where else "")
        + f" ({type(root).__name__}: {said}); {_remedy(root, name)}"
    )


def innermost(error: BaseException, model: nn.Module) -> str:
    """Name of the submodule in whose forward `error` was raised; "" for the model itself."""
    names = {id(module.__dict__): name for name, module in model.named_modules()}
    found = ""
    for frame in _frames(error):
        holder = frame.f_locals.get("self")
        if isinstance(holder, nn.Module):  # torch.export calls stand-ins that share __dict__
            found = names.get(id(holder.__dict__), found)
    return found


def _frames(error: BaseException) -> Iterator[FrameType]:
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame
        at = at.tb_next


def line_of(error: BaseException) -> str:
    """`file:line: the code there` of the user's deepest frame, else of a library's, or ''."""
    own = users_line(error)
    if own:
        return own
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARIES):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _remedy(error: BaseException, name: str) -> str:
    if "DataDependent" in type(error).__name__ or "data-dependent" in str(error).lower():
        leaf = f"; profile keeps that part whole with --leaf {name}" if name else ""
        return (
            "replace `if`, `while` and .item() on the values of tensors by torch.where or"
            f" arithmetic{leaf}"
        )
    return "it must run in eval mode for inputs of the shapes given, by tensor operations alone"
