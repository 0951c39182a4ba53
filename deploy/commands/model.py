"""How commands take a model: an ONNX file, or one of PyTorch with the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deploy.commands import base
from deploy.errors import ConfigError
from deploy.terminal import say

if TYPE_CHECKING:
    import torch
    from torch import nn

    from deploy.frontends.base import LoadedModel

Command = TypeVar("Command", bound=Callable[..., Any])


def model_options(command: Command) -> Command:
    """Add what a model in PyTorch needs besides its name: `shapes` and `weights`."""
    weights = base.option(
        "--weights",
        section=base.MODEL,
        type=click.Path(path_type=Path),
        help="State dict for a model given as file.py:factory or timm:NAME.",
    )
    shapes = base.option(
        "--input",
        "shapes",
        section=base.MODEL,
        multiple=True,
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="Input of a model given as file.py:factory or timm:NAME, such as 1x3x224x224 or"
        " ids=1x128:int64, by an argument of its forward or a key of the dict that it takes.",
    )
    return shapes(weights(command))


def model_from(model: Path, shapes: tuple[str, ...], weights: Path | None) -> Path | LoadedModel:
    """An ONNX file as it is; a PyTorch model exported, checked and loaded.

    Raises:
        ConfigError: shapes or weights for an ONNX file.
        SdkMissingError, ModelError, ExportError: as `export_torch`.
    """
    from deploy.frontends.torch_model import is_torch_spec, parse_input

    if is_torch_spec(model):
        from deploy.fx.opening import open_torch

        inputs = [parse_input(text) for text in shapes]
        return open_torch(
            str(model),
            [wanted.shape for wanted in inputs],
            dtypes=[wanted.dtype for wanted in inputs],
            names=[wanted.name for wanted in inputs],
            weights=weights,
        )
    if shapes or weights:
        raise ConfigError(
            f"--input and --weights are for a model given as file.py:factory, got {model}"
        )
    return model


def leaf_option(command: Command) -> Command:
    """Add `leaves`: modules of a PyTorch model that stay whole."""
    added = base.option(
        "--leaf",
        "leaves",
        section=base.MODEL,
        multiple=True,
        metavar="NAME|CLASS",
        help="Module to keep whole, by its name or class.",
    )
    return added(command)


def torch_options(command: Command) -> Command:
    """Add what a command for models in PyTorch alone takes: inputs, weights, a device."""
    added = (
        base.option(
            "--input",
            "shapes",
            section=base.MODEL,
            multiple=True,
            metavar="[NAME=]SHAPE[:DTYPE]",
            help="Input, batch first, such as 1x3x224x224 or ids=1x128:int64; once for each, by an"
            " argument of forward or a key of the dict that it takes.",
        ),
        base.option(
            "--sample",
            section=base.MODEL,
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Inputs of one run in place of made-up ones: .npy, or .npz with an array for each"
            " name.",
        ),
        base.option(
            "--weights",
            section=base.MODEL,
            type=click.Path(path_type=Path),
            help="State dict, or a checkpoint that holds one, to load.",
        ),
        base.option(
            "--device",
            section=base.MODEL,
            default="cpu",
            show_default=True,
            help="Where the model computes: cpu, cuda, cuda:1; meta computes nothing.",
        ),
    )
    return base.added(command, added)


def torch_model(model: str, weights: Path | None, device: str) -> nn.Module:
    """A model in PyTorch on its device; says what the user should know of it.

    Raises:
        SdkMissingError, ConfigError, ModelError: as `deploy.fx.source.load_module`.
    """
    from deploy.fx.device import find_device
    from deploy.fx.source import load_module
    from deploy.fx.zoo import note

    place = find_device(device)
    module = load_module(model, weights)
    if sentence := note(model, weights):
        say(sentence)
    return module.to(place)


def torch_inputs(
    module: nn.Module, shapes: tuple[str, ...], sample: Path | None
) -> tuple[torch.Tensor, ...]:
    """The inputs of `--input` or `--sample`, where the model is; none where neither is given.

    The model takes them in order from then on, whatever its forward takes.

    Raises:
        ConfigError, FeedError: both, no shape, or no sample or names for this model.
    """
    from deploy.frontends.torch_model import parse_input
    from deploy.fx.device import device_of, moved
    from deploy.fx.model_inputs import as_dict, take_named
    from deploy.fx.samples import example_inputs, floating_dtype, read_sample

    if shapes and sample:
        raise ConfigError("inputs are made up by --input or read by --sample, got both; give one")
    if sample:
        tensors = read_sample(sample, module)
    else:
        wanted = [parse_input(text) for text in shapes]
        sizes, dtypes = [asked.shape for asked in wanted], [asked.dtype for asked in wanted]
        made = example_inputs(sizes, dtypes, floating=floating_dtype(module))
        tensors = tuple(made[i] for i in take_named(module, [asked.name for asked in wanted]))
    if sentence := as_dict(module):
        say(sentence)
    found: tuple[torch.Tensor, ...] = moved(tensors, device_of(module))
    return found
