"""PyTorch models, given as `file.py:factory`. Torch is imported only when one is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import ConfigError
from deploy.frontends.base import LoadedModel
from deploy.frontends.onnx import load_onnx
from deploy.progress import phase

if TYPE_CHECKING:
    import onnx

_SHAPE = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")


def is_torch_spec(source: object) -> bool:
    """Whether `source` reads as `file.py:factory`."""
    path, _, name = str(source).rpartition(":")
    return path.endswith(".py") and name.isidentifier()


def parse_shape(text: str) -> tuple[int, ...]:
    """`1x3x224x224` -> (1, 3, 224, 224).

    Raises:
        ConfigError: not positive integers joined by x.
    """
    if not _SHAPE.fullmatch(text):
        raise ConfigError(f"an input shape is like 1x3x224x224, got {text!r}")
    return tuple(int(size) for size in text.split("x"))


@phase("exporting the PyTorch model")
def export_torch(
    spec: str,
    inputs: Sequence[tuple[int, ...]],
    *,
    weights: Path | None = None,
    dynamic_batch: bool = True,
) -> onnx.ModelProto:
    """Export the float model that `file.py:factory` makes, its branches merged, checked against it.

    Args:
        spec: the user's file and function; the code is run.
        inputs: shape of each input of forward, batch first.
        weights: a state dict to load, tensors only.
        dynamic_batch: leave the batch open.

    Raises:
        SdkMissingError: torch is not installed.
        ConfigError: the spec or a shape is none.
        ModelError: the file, the factory, the weights or the export failed.
        ExportError: onnxruntime computes something else than torch.
    """
    if not inputs:
        raise ConfigError(
            f"{spec} needs the shape of its input: --input 1x3x224x224, once for each input"
        )
    from deploy.fx.export import check_float, to_onnx
    from deploy.fx.fuse import without_branches
    from deploy.fx.source import example_inputs, load_module

    model = load_module(spec, weights)
    tensors = example_inputs(inputs)
    merged, _ = without_branches(model, tensors)
    exported = to_onnx(merged, tensors, dynamic_batch=dynamic_batch)
    check_float(exported, model, [tensors])
    return exported


def open_torch(
    spec: str, inputs: Sequence[tuple[int, ...]], *, weights: Path | None = None
) -> LoadedModel:
    """`export_torch`, cleaned and known by its digest like any other model.

    Raises:
        SdkMissingError, ConfigError, ModelError, ExportError: as `export_torch`.
    """
    file, _, factory = spec.rpartition(":")
    loaded = load_onnx(export_torch(spec, inputs, weights=weights), True)
    note = f"Exported by torch from {Path(file).name}:{factory} and checked against it."
    return replace(loaded, name=f"{Path(file).stem}-{factory}", notes=(note, *loaded.notes))


def load_torch(source: str | Path | onnx.ModelProto, fold_batchnorm: bool) -> LoadedModel:
    """The table's row: says that a PyTorch model needs the shapes of its inputs.

    Raises:
        ConfigError: always; `open_torch` takes the shapes.
    """
    if not is_torch_spec(source):
        raise ConfigError(f"a model in PyTorch is given as file.py:factory, got {str(source)!r}")
    return open_torch(str(source), ())
