"""Capture an `nn.Module` as an `fx.GraphModule` with torch.export.

Symbolic tracing (`deploy.fx.trace`) has no values and fails on any use of one: `for` over a tensor,
`list(x.chunk(2, 1))`, `forward(x, *args)`. torch.export knows shapes and fails only where control
flow depends on tensor values. It needs example inputs, so `calib8 trace`, `fuse` without `--input`,
and models with leaf modules are traced symbolically. The exported program is lifted to the graph
over modules that symbolic tracing would give (`deploy.fx.lift`).
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from deploy.errors import FeedError, ModelError, first_line
from deploy.fx.capture_errors import explain_capture_failure
from deploy.fx.device import device_of, fixed_seed, quiet
from deploy.fx.lift import _placeholders, _positional, argument_names, lift_program
from deploy.fx.model_inputs import first_item, match_arguments, split_item
from deploy.fx.plain_copy import plain_copy, unwrap
from deploy.fx.source import user_code_line
from deploy.fx.trace import trace
from deploy.terminal import phase

TOLERANCE = 1e-4  # relative to the largest output


def as_inputs(batch: Any, model: nn.Module | None = None) -> tuple[Any, ...]:
    """Return a batch as the arguments of a forward, of a loader the inputs in its first item.

    Arrays become tensors.

    `model`: takes the inputs; None if `batch` is no loader.

    Raises:
        FeedError: the loader's first item does not hold the inputs of the model's forward.
    """
    if isinstance(batch, tuple | list):
        return tuple(torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in batch)
    if model is None or isinstance(batch, torch.Tensor | Mapping):
        return (batch,)
    own = unwrap(model)
    tensors, names = split_item(own, first_item(batch)[0])
    if not names:
        return tuple(tensors)
    ordered, into = match_arguments(own, names)
    if into is not None or ordered != argument_names(own, len(names)):
        raise FeedError(
            f"example inputs are the first arguments of {type(own).__name__}'s forward, in order,"
            f" got a loader of {', '.join(names)}; give them as a list of tensors"
        )
    return tuple(tensors[names.index(name)] for name in ordered)


def select_arguments(batch: Any, model: nn.Module) -> tuple[Any, ...]:
    """Return a batch as arguments, without the values after the last one that forward takes."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return as_inputs(batch)[: None if takes_all else len(_positional(model))]


def graph_of(
    model: nn.Module, inputs: Sequence[Any] | None, *, leaves: Sequence[str | type[nn.Module]] = ()
) -> fx.GraphModule:
    """Return a graph of a copy of `model`: captured with torch.export, or else traced symbolically.

    Args:
        model: a float model, not changed; an `fx.GraphModule` is only copied.
        inputs: example inputs; None to trace symbolically.
        leaves: modules to keep as one node, see `deploy.fx.trace.trace`; tracing is symbolic then.

    Raises:
        ConfigError: a leaf matches nothing.
        ModelError: the model can be neither captured nor traced; the message names file, line and
            remedy.
    """
    if isinstance(model, fx.GraphModule):
        return copy.deepcopy(model)
    if leaves or inputs is None:
        return trace(plain_copy(model), leaves=leaves)
    inputs = as_inputs(inputs, model)
    try:
        return capture(model, inputs)
    except ModelError:
        try:
            traced = trace(plain_copy(model))
        except ModelError:
            pass
        else:
            if device_of(model).type != "meta":
                run_model(plain_copy(model).eval(), inputs)  # raises ModelError if it does not run
            return traced
        raise


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
    own = plain_copy(model)
    modes = {module: module.training for module in own.modules()}
    own.eval()
    captured = _capture(own, inputs)
    if device_of(own).type != "meta":  # meta tensors have no values to compare
        check_capture(captured, plain_copy(model).eval(), inputs)  # export may have changed `own`
    for module in captured.modules():
        module.training = modes.get(module, model.training)
    return captured


def check_capture(captured: nn.Module, model: nn.Module, inputs: Sequence[Any]) -> None:
    """Raise `ModelError` if `captured` gives other outputs than `model`."""
    expected, got = (
        [x for x in pytree.tree_leaves(run_model(own, inputs)) if isinstance(x, torch.Tensor)]
        for own in (model, captured)
    )
    for value, reference in zip(got, expected, strict=True):
        finite = reference.double().nan_to_num(0.0, 0.0, 0.0)
        bound = TOLERANCE * float(finite.abs().max()) if reference.numel() else 0.0
        if not torch.allclose(value.double(), reference.double(), 0.0, bound, equal_nan=True):
            raise ModelError(
                f"a captured model must compute what {type(model).__name__} does, and does not:"
                " its forward keeps something from one call to the next, or changes its input"
            )


def run_model(model: nn.Module, inputs: Sequence[Any]) -> Any:
    """Return the output of `model` for copies of the inputs, with a fixed random seed.

    Raises:
        ModelError: it does not run; the message names the user's file and line.
    """
    try:
        with fixed_seed(), torch.no_grad():
            return model(*copy.deepcopy(list(inputs)))
    except Exception as error:  # torch.export accepts some models that do not run
        shapes = [tuple(x.shape) for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        raise ModelError(
            f"{type(model).__name__} must run for inputs {shapes}, got {type(error).__name__}:"
            f" {first_line(error)}" + (f" at {where}" if (where := user_code_line(error)) else "")
        ) from error


def _capture(model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """Capture with a dynamic batch, else with a fixed one; report the first failure."""
    widened = pytree.tree_map(repeat_single_sample, tuple(inputs))
    try:
        program = _export(model, widened, torch.export.Dim.AUTO)
        if _is_batch_dynamic(program, inputs, widened):
            return lift_program(program, model, inputs)
    except Exception as error:  # anything from torch.export or the user's model
        first: Exception | None = error
    else:
        first = None
    try:
        return lift_program(_export(model, tuple(inputs), None), model, inputs)
    except Exception as error:
        raise ModelError(explain_capture_failure(first or error, model)) from error


def _export(model: nn.Module, inputs: tuple[Any, ...], batch: Any) -> torch.export.ExportedProgram:
    shapes = None
    if batch is not None:
        shapes = pytree.tree_map(lambda leaf: {0: batch} if has_batch(leaf) else None, inputs)
        named = len(_positional(model))
        if len(inputs) > named:  # torch.export expects those of `*args` in one tuple
            shapes = (*shapes[:named], shapes[named:])
    # copies, because the same tensor twice would become one input
    own = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
    with quiet(), torch.enable_grad():  # without grad, attention becomes one fused kernel
        return torch.export.export(model, own, dynamic_shapes=shapes, strict=False)


def has_batch(leaf: Any) -> bool:
    """Return whether a leaf of the inputs is a tensor with a batch."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def repeat_single_sample(leaf: Any) -> Any:
    """Repeat a batch of 1, which torch.export would take for a constant."""
    return torch.cat([leaf, leaf]) if has_batch(leaf) and leaf.shape[0] == 1 else leaf


def _is_batch_dynamic(program: Any, inputs: Sequence[Any], widened: Any) -> bool:
    """Return whether every input whose batch was widened has a dynamic batch."""
    signature = program.graph_signature
    state = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    state |= {*signature.inputs_to_lifted_tensor_constants}
    nodes = [n for n in _placeholders(program.graph) if n.name not in state]
    for node, given, wide in zip(
        nodes, pytree.tree_leaves(tuple(inputs)), pytree.tree_leaves(widened), strict=True
    ):
        if wide is not given and not isinstance(node.meta["val"].shape[0], torch.SymInt):
            return False
    return True
