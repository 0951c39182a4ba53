"""How commands take a model: an ONNX file, or `file.py:factory` with the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deploy.commands import sections
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.frontends.base import LoadedModel

Command = TypeVar("Command", bound=Callable[..., Any])


def model_options(command: Command) -> Command:
    """Add what a model in PyTorch needs besides its name: `shapes` and `weights`."""
    weights = sections.option(
        "--weights",
        section=sections.MODEL,
        type=click.Path(path_type=Path),
        help="State dict for a model given as file.py:factory.",
    )
    shapes = sections.option(
        "--input",
        "shapes",
        section=sections.MODEL,
        multiple=True,
        metavar="SHAPE",
        help="Input shape of a model given as file.py:factory, such as 1x3x224x224.",
    )
    return shapes(weights(command))


def model_from(model: Path, shapes: tuple[str, ...], weights: Path | None) -> Path | LoadedModel:
    """An ONNX file as it is; a PyTorch model exported, checked and loaded.

    Raises:
        ConfigError: shapes or weights for an ONNX file.
        SdkMissingError, ModelError, ExportError: as `export_torch`.
    """
    from deploy.frontends.torch import is_torch_spec, open_torch, parse_shape

    if is_torch_spec(model):
        return open_torch(str(model), [parse_shape(s) for s in shapes], weights=weights)
    if shapes or weights:
        raise ConfigError(
            f"--input and --weights are for a model given as file.py:factory, got {model}"
        )
    return model
