"""A fused model as a file: ONNX for every runtime, or a .pt2 that torch.export.load gives back."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from deploy.errors import ConfigError, ExportError, ModelError, first_line
from deploy.files.atomic import write_bytes
from deploy.fx.export import check_float, to_onnx
from deploy.fx.profile import tensors_of
from deploy.fx.quiet import quiet
from deploy.fx.same import NEAR, difference, largest_of
from deploy.fx.source import users_line

SUFFIXES = (".onnx", ".pt2")


def check_suffix(path: Path) -> None:
    """Raise `ConfigError` where a fused model cannot be written under that name."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"a fused model is written as {' or '.join(SUFFIXES)}, got {path}; weights alone are"
            " the state of another model than yours"
        )


def write_fused(
    path: Path, fused: nn.Module, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> str:
    """Write the fused form of a model, with an open batch, and say how it agrees with the model.

    Args:
        path: of one of `SUFFIXES`.
        fused: what `deploy.fx.fuse.fuse` gave.
        model: the user's.
        inputs: of one run, batch first.

    Raises:
        ModelError: torch.export cannot follow it.
        ExportError: the file computes something else than the model, or cannot be written.
    """
    if path.suffix.lower() == ".onnx":
        exported = to_onnx(fused, inputs)
        said = str(check_float(exported, model, inputs))
        write_bytes(path, exported.SerializeToString(deterministic=True))
        return said
    program = _program(fused, inputs)
    found = _difference(program, model, inputs)
    data = io.BytesIO()
    torch.export.save(program, data)
    write_bytes(path, data.getvalue())
    return f"the program against the model: largest difference {found:.3g}"


def _program(fused: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    two = tuple(x if len(x) > 1 else torch.cat([x, x]) for x in inputs)  # 1 would be a constant
    shapes = tuple({0: batch} for _ in two)
    try:
        with quiet():
            program = torch.export.export(fused, two, dynamic_shapes=shapes)
    except Exception as error:  # torch.export has no error class of its own
        where = users_line(error)
        raise ModelError(
            f"torch.export must be able to follow the model, got {type(error).__name__}:"
            f" {first_line(error)}" + (f" at {where}" if where else "") + "; write .onnx with a"
            " batch that the model does not fix, or rewrite what depends on data"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _difference(
    program: torch.export.ExportedProgram, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> float:
    with torch.no_grad():
        wanted, got = model(*inputs), program.module()(*inputs)
    pairs = zip(tensors_of(wanted), tensors_of(got), strict=True)
    found = max((difference(a, b) for a, b in pairs), default=0.0)
    if not found <= NEAR * largest_of(wanted):
        raise ExportError(
            "an exported model must compute what torch computes, got a largest difference of"
            f" {found:.3g} (largest output {largest_of(wanted):.3g}); report it with the model"
        )
    return found
