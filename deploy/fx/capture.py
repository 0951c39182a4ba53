"""Capture an `nn.Module` as an `fx.GraphModule` with torch.export.

Symbolic tracing (`deploy.fx.trace`) has no values and fails on any use of one: `for` over a tensor,
`list(x.chunk(2, 1))`, `forward(x, *args)`. torch.export knows shapes and fails only where control
flow depends on tensor values. It needs example inputs, so `calib8 trace`, `fuse` without `--input`,
and models with leaf modules are traced symbolically. The exported program is lifted to the graph
over modules that symbolic tracing would give (`deploy.fx.lift`).
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from deploy.errors import Calib8Error, FeedError, ModelError, first_line
from deploy.fx.comparison import largest_difference, largest_magnitude, tensors_of
from deploy.fx.device import device_of, fixed_seed, map_tensors, quiet
from deploy.fx.lift import input_placeholders, lift_program
from deploy.fx.model_inputs import (
    argument_names,
    array_to_tensor,
    cast_floats,
    first_item,
    match_arguments,
    positional_parameters,
    split_item,
    takes_variadic_inputs,
)
from deploy.fx.operations import pass_by_position
from deploy.fx.plain_copy import plain_copy, unwrap
from deploy.fx.source import user_code_line
from deploy.fx.trace import Leaves, explain_export_failure, trace
from deploy.terminal import phase

CAPTURE_TOLERANCE = 1e-4  # relative to the largest output


def as_inputs(batch: Any, model: nn.Module | None = None) -> tuple[Any, ...]:
    """Return the positional arguments of a forward from a batch, or from a loader's first item.

    A tuple or list holds the arguments, a tensor or dict is the only argument, and anything else is
    a loader. numpy arrays become tensors. Tensors are copies, as a forward may change its inputs.

    `model`: the model of the forward. Its arguments tell the inputs in a loader's item from the
    labels. None if `batch` cannot be a loader.

    Raises:
        FeedError: the loader's first item does not hold the inputs of the model's forward.
    """
    if isinstance(batch, tuple | list):
        return tuple(map(_copy_as_tensors, batch))
    if model is None or isinstance(batch, torch.Tensor | Mapping):
        return (_copy_as_tensors(batch),)

    model = unwrap(model)
    item, _all_items = first_item(batch)
    tensors, names = split_item(model, _copy_as_tensors(item))
    if not names:  # the item is no dict, so its tensors are in order
        return tuple(tensors)
    ordered_names, dict_argument = match_arguments(model, names)
    # passed by position, the tensors must be the first arguments, without one left out
    if dict_argument is not None or ordered_names != argument_names(model, len(names)):
        raise FeedError(
            f"example inputs are the first arguments of {type(model).__name__}'s forward, in order,"
            f" got a loader of {', '.join(names)}; give them as a list of tensors"
        )
    return tuple(tensors[names.index(name)] for name in ordered_names)


def example_tensors(inputs: Any, model: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return `as_inputs` in float32.

    Raises:
        FeedError: as `as_inputs`; or an input is no tensor.
    """
    inputs = as_inputs(inputs, model)
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            raise FeedError(
                "example inputs are tensors, in the order of forward's arguments, got"
                f" {type(value).__name__}; give [x, ...], or a loader"
            )
    return cast_floats(inputs, torch.float32)


def _copy_as_tensors(value: Any) -> Any:
    """Return an array as a tensor, tensors as copies, and any other value as it is."""
    if isinstance(value, np.ndarray):
        return array_to_tensor(value)
    return map_tensors(value, lambda tensor: tensor.detach().clone())


def select_arguments(batch: Any, model: nn.Module) -> tuple[Any, ...]:
    """Return a batch as float32 arguments, without those after the last one that forward takes."""
    arguments = cast_floats(as_inputs(batch), torch.float32)
    if takes_variadic_inputs(model):
        return arguments
    return arguments[: len(positional_parameters(model))]


def graph_of(
    model: nn.Module, inputs: Sequence[Any] | None, *, leaves: Leaves = ()
) -> fx.GraphModule:
    """Return a graph of a copy of `model`: captured with torch.export, or else traced symbolically.

    In the copy (`plain_copy`) all weights are parameters, and no wrappers are left.

    Args:
        model: a float model, not changed; an `fx.GraphModule` is copied, and not traced again.
        inputs: example inputs; None to trace symbolically.
        leaves: modules to keep as one node, see `deploy.fx.trace.trace`; tracing is symbolic then.

    Raises:
        ConfigError: a leaf matches nothing.
        ModelError: the model can be neither captured nor traced; the message names file, line and
            remedy.
    """
    if isinstance(model, fx.GraphModule) or leaves or inputs is None:
        graph: Any = plain_copy(model)
        if not isinstance(model, fx.GraphModule):
            graph = trace(graph, leaves=leaves)
        pass_by_position(graph)
        return graph  # type: ignore[no-any-return]

    inputs = as_inputs(inputs, model)
    try:
        return capture(model, inputs)
    except ModelError as capture_error:
        try:
            traced_graph = graph_of(model, None)
            # tracing does not run the model, and assumes that every optional argument is given, so
            # its graph may compute something else
            check_capture(copy.deepcopy(traced_graph).eval(), model, inputs)
        except ModelError:
            # the capture's error says more; `from` shows its cause, not the error of the trace
            raise capture_error from capture_error.__cause__
    return traced_graph


@phase("capturing the model")
def capture(model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """Capture a copy of `model` in eval mode with torch.export; return its checked graph.

    The batch, dimension 0 of each input, stays dynamic unless the model fixes it; other sizes are
    those of `inputs`. Dropout and norms still follow `train()` and `eval()`.

    `model`: any module whose control flow does not depend on tensor values; not changed. `inputs`:
    positional arguments: tensors, or tuples, lists and dicts of them.

    Raises:
        ModelError: torch.export cannot follow the model, or its graph gives other values.
    """
    model_copy = plain_copy(model)
    training_by_module = {module: module.training for module in model_copy.modules()}
    model_copy.eval()
    # dataclasses of the user's can be outputs of a graph only if torch.export knows them
    model_copy.register_forward_hook(
        lambda _module, _inputs, returned: _register_dataclasses(returned)
    )
    captured_graph = _export_and_lift(model_copy, inputs)
    check_capture(captured_graph, model, inputs)

    # Modules of the copy get their mode back. The graph also has modules that were functions in the
    # user's code: they get the mode of the entire model.
    for module in captured_graph.modules():
        module.training = training_by_module.get(module, model.training)
    return captured_graph


def check_capture(captured: nn.Module, model: nn.Module, inputs: Sequence[Any]) -> None:
    """Raise `ModelError` if `captured` gives other outputs than a copy of `model` in eval mode."""
    if device_of(model).type == "meta":  # there are no values to compare
        return
    references = tensors_of(run_model(plain_copy(model).eval(), inputs))
    outputs = tensors_of(run_model(captured, inputs))
    if len(outputs) != len(references) or not all(map(_is_near, outputs, references)):
        raise ModelError(
            f"a captured model must compute what {type(model).__name__} does, and does not:"
            " its forward keeps something from one call to the next, or changes its input"
        )


def _is_near(output: torch.Tensor, reference: torch.Tensor) -> bool:
    if output.shape != reference.shape:
        return False
    allowed_difference = CAPTURE_TOLERANCE * largest_magnitude(reference)
    return largest_difference(output, reference) <= allowed_difference


def run_model(model: nn.Module, inputs: Sequence[Any]) -> Any:
    """Return the output of `model` for copies of the inputs, with a fixed random seed.

    Raises:
        ModelError: it does not run; the message names the user's file and line.
    """
    try:
        # quiet, as a graph prints the traceback before it raises
        with quiet(), fixed_seed(), torch.no_grad():
            return model(*copy.deepcopy(list(inputs)))
    except Calib8Error:  # of a hook that observes the tensors
        raise
    except Exception as error:  # whatever the user's forward raises
        shapes = [tuple(tensor.shape) for tensor in tensors_of(inputs)]
        message = (
            f"{type(model).__name__} must run for inputs {shapes}, got {type(error).__name__}:"
            f" {first_line(error)}"
        )
        if line := user_code_line(error):
            message += f" at {line}"
        raise ModelError(message + _batch_hint(model, inputs)) from error


def _batch_hint(model: nn.Module, inputs: Sequence[Any]) -> str:
    """Return the end of a message if the model runs for the inputs in a batch of one, else ""."""
    batch_of_one = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[None], list(inputs))
    try:
        with fixed_seed(), torch.no_grad():
            model(*batch_of_one)
    except Exception:  # whatever a user's model raises
        return ""
    shapes = ["x".join(map(str, tensor.shape)) for tensor in tensors_of(batch_of_one)]
    return f"; the batch comes first in a shape: {' and '.join(shapes)}"


def _export_and_lift(model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """Capture a model with a dynamic batch, or with a fixed one if it allows no dynamic one.

    torch.export makes a program of single operations; it is lifted to a graph that calls the
    layers of the model.

    Raises:
        ModelError: neither works; the message is that of the dynamic batch, which says more.
    """
    dynamic_error: Exception | None = None
    # torch.export takes a batch of 1 for a constant, so it gets the sample twice
    repeated_inputs = pytree.tree_map(repeat_single_sample, tuple(inputs))
    try:
        program = _export(model, repeated_inputs, is_batch_dynamic=True)
        if _has_dynamic_batch(program, inputs):
            return lift_program(program, model, inputs)
        # The model fixed the batch to the size that it had, 2 after the repetition. So it is
        # exported again, with the batch that the user gave.
    except Exception as error:  # anything from torch.export or the user's model
        dynamic_error = error

    try:
        program = _export(model, tuple(inputs), is_batch_dynamic=False)
        return lift_program(program, model, inputs)
    except Exception as error:
        run_model(model, inputs)  # raises, with the reason, if the model itself does not run
        raise ModelError(explain_export_failure(dynamic_error or error, model)) from error


def _register_dataclasses(returned: Any) -> None:
    """Make the dataclasses in a model's output known to torch.export, as transformers does."""
    for leaf in pytree.tree_leaves(returned):
        if is_dataclass(leaf):  # of a known class it would be no leaf, but its fields
            torch.export.register_dataclass(type(leaf))
            _register_dataclasses(leaf)


def _export(
    model: nn.Module, inputs: tuple[Any, ...], *, is_batch_dynamic: bool
) -> torch.export.ExportedProgram:
    """Export a model; with a dynamic batch, torch.export may still fix it to that of the inputs."""
    shapes = dynamic_shapes(model, inputs) if is_batch_dynamic else None
    # copies, because the same tensor twice would become one input
    copies = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
    with quiet(), torch.enable_grad():  # without grad, attention becomes one fused kernel
        return torch.export.export(model, copies, dynamic_shapes=shapes, strict=False)


def dynamic_shapes(
    model: nn.Module, inputs: tuple[Any, ...], batch: Any = torch.export.Dim.AUTO
) -> Any:
    """Return the `dynamic_shapes` of torch.export for inputs whose first dimension is the batch."""
    shapes = pytree.tree_map(lambda leaf: {0: batch} if has_batch(leaf) else None, inputs)
    named_count = len(positional_parameters(model))
    if len(inputs) <= named_count:
        return shapes
    return (*shapes[:named_count], shapes[named_count:])  # those of `*args` in one tuple


def has_batch(leaf: Any) -> bool:
    """Return whether a leaf of the inputs is a tensor with a batch."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def batch_size(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of samples in the first tensor that has a batch; 1 if none has."""
    return next(map(len, filter(has_batch, tensors)), 1)


def repeat_single_sample(leaf: Any) -> Any:
    """Repeat a batch of 1, which torch.export would take for a constant."""
    if has_batch(leaf) and len(leaf) == 1:
        return torch.cat([leaf, leaf])
    return leaf


def _has_dynamic_batch(program: Any, inputs: Sequence[Any]) -> bool:
    """Return whether every input with a single sample, which was repeated, has a dynamic batch."""
    leaves = pytree.tree_leaves(tuple(inputs))
    for node, leaf in zip(input_placeholders(program), leaves, strict=True):
        is_repeated = repeat_single_sample(leaf) is not leaf
        if is_repeated and not isinstance(node.meta["val"].shape[0], torch.SymInt):
            return False
    return True
