"""Explain why a model could not be captured: module, line, torch's message and a remedy."""

import os
import traceback
from pathlib import Path

import torch
from torch import nn

from deploy.fx.source import user_code_line

# with a separator at the end, since torchvision is in the same folder as torch
_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")


def explain_capture_failure(error: BaseException, model: nn.Module) -> str:
    """Return one sentence on a failure: module, file and line, torch's message, and a remedy."""
    cause = root_cause(error)
    name = innermost_module(error, model) or innermost_module(cause, model)
    description = type(model.get_submodule(name)).__name__
    if name:
        description += f" ({name})"
    if line := failing_line(cause) or failing_line(error):
        description += f" at {line}"
    message = " ".join(str(cause).split()).partition(" (unhinted")[0][:160]
    return (
        f"torch.export must be able to follow the model, and cannot follow {description}"
        f" ({type(cause).__name__}: {message}); {_remedy(cause, name)}"
    )


def root_cause(error: BaseException) -> BaseException:
    """Return the error from which `error` was raised, in however many steps."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def innermost_module(error: BaseException, model: nn.Module) -> str:
    """Return the name of the submodule in whose forward `error` was raised, "" for the model."""
    names = {id(module.__dict__): name for name, module in model.named_modules()}
    innermost_name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):  # torch.export calls copies that share __dict__
            innermost_name = names.get(id(module.__dict__), innermost_name)
    return innermost_name


def failing_line(error: BaseException) -> str:
    """Return `file:line: code` of the user's deepest frame, else of a library's, or ''."""
    user_line = user_code_line(error)
    if user_line:
        return user_line
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARIES):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _remedy(error: BaseException, name: str) -> str:
    if "DataDependent" in type(error).__name__ or "data-dependent" in str(error).lower():
        remedy = (
            "replace `if`, `while` and .item() on the values of tensors by torch.where or"
            " arithmetic"
        )
        if name:
            remedy += f"; profile can keep that module as one node with --leaf {name}"
        return remedy
    return "it must run in eval mode for inputs of the shapes given, by tensor operations alone"
