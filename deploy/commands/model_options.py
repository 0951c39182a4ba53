"""Options of models and targets.

A model is an ONNX file, or a PyTorch model with the shapes of its inputs. `--target` selects rows
of `TARGETS`; each target's own options are generated from the fields that its class declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.commands import base
from deploy.commands.base import CommandArguments, Decorator, Real
from deploy.errors import ConfigError
from deploy.targets import TARGETS, Target, find_target
from deploy.targets.options import Option, declared_options
from deploy.terminal import say

if TYPE_CHECKING:
    import torch
    from torch import nn

    from deploy.frontends.base import LoadedModel


# needs help=
_input_option = partial(
    base.model_option, "--input", "input_texts", multiple=True, metavar="[NAME=]SHAPE[:DTYPE]"
)
# options of a PyTorch model, which a command gets as `input_texts` and `weights`
model_options = partial(
    base.add_options,
    options=(
        _input_option(
            help="Input of a model given as file.py:factory or timm:NAME, such as 1x3x224x224 or"
            " ids=1x128:int64; the name is an argument of its forward or a key of its dict. For an"
            " ONNX file, a shape in place of the file's."
        ),
        base.model_option(
            "--weights",
            type=base.INPUT,
            help="State dict for a model given as file.py:factory or timm:NAME.",
        ),
    ),
)


def resolve_model(
    model: Path, input_texts: tuple[str, ...], weights: Path | None
) -> Path | LoadedModel:
    """Return an ONNX file as it is, or loaded with other shapes; a PyTorch model exported.

    Raises:
        ConfigError: weights for an ONNX file.
        SdkMissingError, ModelError, ExportError: as `open_torch`.
    """
    from deploy.frontends.input_shapes import is_torch_spec, open_with_shapes, parse_input

    inputs = list(map(parse_input, input_texts))
    if is_torch_spec(model):
        from deploy.fx.open_model import open_torch

        return open_torch(
            str(model),
            [spec.shape for spec in inputs],
            dtypes=[spec.dtype for spec in inputs],
            names=[spec.name for spec in inputs],
            weights=weights,
        )
    if weights:
        raise ConfigError(f"--weights is for a model given as file.py:factory, got {model}")
    return open_with_shapes(model, inputs) if inputs else model


leaf_option = base.model_option(
    "--leaf",
    "leaves",
    multiple=True,
    metavar="NAME|CLASS",
    help="Module not to trace into, by its name or class.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchArguments:
    """A PyTorch model of a command line, and the inputs of one run of it.

    Attributes:
        model: `file.py:factory` or `timm:NAME`.
        input_texts: values of --input, such as "ids=1x128:int64".
        sample: file with the inputs, in place of random ones of `input_texts`.
        weights: state dict to load.
        device: such as "cuda:1".
    """

    model: str
    input_texts: tuple[str, ...]
    sample: Path | None
    weights: Path | None
    device: str

    @property
    def has_inputs(self) -> bool:
        """Whether --input or --sample is given."""
        return bool(self.input_texts or self.sample)

    def refuse_without_inputs(self, what: str) -> None:
        """Raise `ConfigError` if there are no inputs; `what` needs them: a command or a flag."""
        if not self.has_inputs:
            raise ConfigError(f"{what} runs the model and needs its --input shape, or a --sample")

    def refuse_meta_device(self, what: str) -> None:
        """Raise `ConfigError` for the meta device, which computes nothing for `what`."""
        from deploy.fx.device import find_device, refuse_meta

        refuse_meta(find_device(self.device), what)

    def load(self) -> nn.Module:
        """Load the model on its device, and print notes on it."""
        from deploy.fx.device import find_device, move_model
        from deploy.fx.source import load_module, random_weights_note

        torch_device = find_device(self.device)
        module = load_module(self.model, self.weights)
        if note := random_weights_note(self.model, self.weights):
            say(note)
        return move_model(module, torch_device)

    def inputs(self, module: nn.Module) -> tuple[torch.Tensor, ...]:
        """Return the inputs of one run, on the model's device: random ones, or those of a file.

        If the forward of `module` takes keywords or a dict, the class of `module` is changed
        (`accept_named_inputs`, which `read_sample` calls too): it then takes inputs by position.

        Raises:
            ConfigError, FeedError: --input and --sample, or inputs that do not fit the model.
        """
        from deploy.frontends.input_shapes import parse_input
        from deploy.fx.device import device_of, move_tensors
        from deploy.fx.model_inputs import (
            accept_named_inputs,
            dict_input_note,
            example_inputs,
            floating_dtype,
            read_sample,
        )

        if self.input_texts and self.sample:
            raise ConfigError(
                "inputs are made up by --input or read by --sample, got both; give one"
            )
        if self.sample:
            tensors = read_sample(self.sample, module)
        else:
            specs = list(map(parse_input, self.input_texts))
            examples = example_inputs(
                [spec.shape for spec in specs],
                [spec.dtype for spec in specs],
                floating=floating_dtype(module),
            )
            # named inputs are typed in any order: `order` has the index in `specs` of each input
            order = accept_named_inputs(module, [spec.name for spec in specs])
            tensors = tuple(examples[index] for index in order)
        if note := dict_input_note(module):
            say(note)
        moved_tensors: tuple[torch.Tensor, ...] = move_tensors(tensors, device_of(module))
        return moved_tensors


def _gather_torch_model(arguments: CommandArguments) -> None:
    """Put a `TorchArguments`, with a field for each option, in as `source`."""
    values = {name: arguments.pop(name) for name in TorchArguments.__slots__}
    arguments["source"] = TorchArguments(**values)


# a PyTorch model, its inputs, weights and device, which a command gets as `source`
torch_options = base.gathered_options(
    _gather_torch_model,
    (
        click.argument("model"),
        _input_option(
            help="Input, batch first, such as 1x3x224x224. Repeat for several, each with its"
            " argument of forward, or key of the dict that forward takes: ids=1x128:int64."
        ),
        base.model_option(
            "--sample",
            type=base.INPUT,
            metavar="FILE",
            help="Inputs of one run in place of random ones: .npy, or .npz with one array for each"
            " input.",
        ),
        base.model_option(
            "--weights",
            type=base.INPUT,
            help="State dict, or a checkpoint that holds one, to load.",
        ),
        base.model_option(
            "--device",
            default="cpu",
            help="Device to run on: cpu, cuda, cuda:1; meta computes nothing.",
        ),
    ),
)


TargetValues = Mapping[str, Mapping[str, Any]]  # target -> field -> value on the command line


def target_options(
    is_offered: Callable[[Option], bool],
) -> Decorator:
    """Return a decorator that adds `--target` and the targets' options that are `is_offered`.

    The command gets the configured targets as `targets`.
    """
    target_option = base.target_option(
        "--target",
        "names",
        multiple=True,
        metavar="NAME,...",
        default=("onnxruntime",),
        callback=_split_names,
        help=f"Any of {', '.join(TARGETS)}, by commas or repeated; one calibration serves all.",
    )

    return base.gathered_options(_gather_targets, (target_option, target_field_options(is_offered)))


def _gather_targets(arguments: CommandArguments) -> None:
    """Put the targets of these `names`, with the values of their fields, in as `targets`."""
    target_values = arguments.pop("target_values")  # of `target_field_options`
    arguments["targets"] = _make_targets(arguments.pop("names"), target_values)


def one_target(section: str) -> Decorator:
    """Return a decorator that adds `--target`, and options that place Q/DQ in a PyTorch model.

    A pair of QuantizeLinear and DequantizeLinear stands at each quantized tensor. The command gets
    the one configured target as `target`.

    `section`: section of the help that lists `--target`.
    """
    target_option = base.option(
        "--target",
        "name",
        section=section,
        metavar="NAME",
        default="onnxruntime",
        callback=_check_name,
        help=f"Target that decides where pairs go and on which grid: {', '.join(TARGETS)}.",
    )

    # a precision has no effect on PyTorch models, which get fixed scales and integers
    field_options = target_field_options(
        lambda option: option.changes_placement and option.name != "precision"
    )
    return base.gathered_options(_gather_target, (target_option, field_options))


def _gather_target(arguments: CommandArguments) -> None:
    """Put the target of this `name`, with the values of its fields, in as `target`."""
    target_values = arguments.pop("target_values")  # of `target_field_options`
    (arguments["target"],) = _make_targets((arguments.pop("name"),), target_values)


def target_field_options(
    is_offered: Callable[[Option], bool],
) -> Decorator:
    """Return a decorator that adds the targets' options that are `is_offered`.

    The command gets those that were typed as `target_values`: target -> {field: value}.
    """
    field_by_name = {}  # argument of the command -> (target, its option)
    options = []
    for target, target_class in TARGETS.items():
        for option in filter(is_offered, declared_options(target_class)):
            name = f"{target}_{option.name}".replace("-", "_")
            field_by_name[name] = (target, option)
            options.append(_field_option(name, target, option))

    def gather(arguments: CommandArguments) -> None:
        """Put the values of targets' fields in as `target_values`."""
        target_values: dict[str, dict[str, Any]] = {}
        for name, (target, option) in field_by_name.items():
            value = arguments.pop(name)
            if value not in (None, ()):  # () is a repeatable option that was not typed
                target_values.setdefault(target, {})[option.name] = value
        arguments["target_values"] = target_values

    return base.gathered_options(gather, options)


def target_flags(target: str, fields: Mapping[str, Any]) -> str:
    """Return the flags of a target's fields, as a user types them."""
    options = [option for option in declared_options(find_target(target)) if option.name in fields]
    return " and ".join(option.flag.partition("/")[0] for option in options)


def make_target(target: str, fields: Mapping[str, Any]) -> Target:
    """Return a target with these values in its fields."""
    target_class: Callable[..., Target] = find_target(target)
    return target_class(**fields)


def _make_targets(names: tuple[str, ...], target_values: TargetValues) -> list[Target]:
    """Return the targets of these names with their options.

    Raises:
        ConfigError: an option of another target.
    """
    for target, fields in target_values.items():
        if target not in names:
            raise ConfigError(
                f"--target {target} is needed for {target_flags(target, fields)}, got --target"
                f" {','.join(names)}"
            )
    return [make_target(name, target_values.get(name, {})) for name in names]


def _check_name(context: click.Context, param: click.Parameter, name: str) -> str:
    """Return the name of a target, if there is such a target."""
    find_target(name)
    return name


def _split_names(context: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> Any:
    """Return names separated by commas or in repeated flags, each once."""
    names = dict.fromkeys(name.strip() for name in ",".join(texts).split(","))
    for name in names:
        find_target(name)
    return tuple(names)


def _field_option(name: str, target: str, option: Option) -> Decorator:
    """Return the click option of a target's field; its value is None or () if it is not given."""
    is_flag = option.kind is bool
    return base.option(
        option.flag,
        name,
        section=f"Target {target}",
        type=None if is_flag else _option_type(option),
        is_flag=is_flag,
        default=None,
        multiple=option.repeat,
        metavar=option.metavar,
        help=option.help + _help_ending(option),
    )


def _option_type(option: Option) -> click.ParamType[Any]:
    """Return click's type of a target's option, which is no flag."""
    if option.choices:
        return click.Choice(option.choices)
    if option.kind is int:
        return click.IntRange(option.minimum)
    if option.kind is float:
        return Real(option.minimum)
    if option.writes:
        return base.OutputFile(option.writes)
    return base.INPUT if option.kind is Path else click.STRING


def _help_ending(option: Option) -> str:
    """Return the end of an option's help text: its default, or that it may be repeated."""
    if option.repeat:
        return " May be repeated."
    default = option.default
    if option.kind is bool:
        on_flag, _, off_flag = option.flag.partition("/")
        if not off_flag:
            return ""
        default = (on_flag if option.default else off_flag).lstrip("-")
    return "" if default is None else f"  [default: {default}]"
