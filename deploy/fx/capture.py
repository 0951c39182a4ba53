"""`nn.Module` -> `fx.GraphModule` by torch.export, which runs the model's own Python.

Symbolic tracing (`deploy.fx.trace`) sees a model without values, so it fails on whatever looks at
one: `for` over a tensor, `list(x.chunk(2, 1))`, `forward(x, *args)`. torch.export has shapes to
look at, and fails only where Python follows the values of a tensor. It needs example inputs, so
`calib8 trace`, and `fuse` without `--input`, trace symbolically, as does what keeps modules whole.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from deploy.errors import ModelError, first_line
from deploy.fx.copied import plain_copy
from deploy.fx.device import device_of
from deploy.fx.lift import lift
from deploy.fx.quiet import quiet
from deploy.fx.refusal import explain
from deploy.fx.trace import trace
from deploy.progress import phase

TOLERANCE = 1e-4  # of the largest output


def graph_of(
    model: nn.Module,
    inputs: Sequence[Any] | None,
    *,
    leaves: Sequence[str | type[nn.Module]] = (),
) -> fx.GraphModule:
    """A graph of a copy of `model`: itself where it is one, captured where that can be, or traced.

    Args:
        model: a float model; it is not changed.
        inputs: example inputs; None where there are none, then it is traced symbolically.
        leaves: modules to keep whole, as `deploy.fx.trace.trace`, which then traces it.

    Raises:
        ConfigError: a leaf that names nothing.
        ModelError: neither way leads through the model; the message names file, line and remedy.
    """
    if isinstance(model, fx.GraphModule):
        return copy.deepcopy(model)
    if leaves or inputs is None:
        return trace(plain_copy(model), leaves=leaves)
    try:
        return capture(model, inputs)
    except ModelError:
        try:
            traced = trace(plain_copy(model))
        except ModelError:
            pass
        else:
            if device_of(model).type != "meta":
                _run(plain_copy(model).eval(), inputs)  # else it fails later, with no sentence
            return traced
        raise


@phase("capturing the model")
def capture(model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph of what a copy of `model` computes in eval mode, with its modules and parameters.

    The batch, dimension 0 of each input, stays open unless the model fixes it; all else is as in
    `inputs`. Layers that behave otherwise in train mode still do.

    Args:
        model: any module whose Python does not follow the values of tensors; it is not changed.
        inputs: positional arguments: tensors, or tuples, lists and dicts of them.

    Raises:
        ModelError: torch.export cannot follow the model, or its graph computes something else.
    """
    own = plain_copy(model)
    modes = {module: module.training for module in own.modules()}
    own.eval()
    captured = _capture(own, inputs)
    if device_of(own).type != "meta":  # which holds no values
        check_same(captured, plain_copy(model).eval(), inputs)  # exporting leaves marks in `own`
    for module in captured.modules():
        module.training = modes.get(module, model.training)
    return captured


def check_same(captured: nn.Module, model: nn.Module, inputs: Sequence[Any]) -> None:
    """Raise `ModelError` where `captured` gives other values than `model`."""
    wanted, got = (_run(module, inputs) for module in (model, captured))
    for ours, theirs in zip(got, wanted, strict=True):
        largest = float(theirs.double().abs().max()) if theirs.numel() else 0.0
        bound = TOLERANCE * largest
        if not torch.allclose(ours.double(), theirs.double(), 0.0, bound, equal_nan=True):
            raise ModelError(
                f"a captured model must compute what {type(model).__name__} does, and does not:"
                " its forward keeps something from one call to the next, or changes its input"
            )


def _run(model: nn.Module, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that `model` gives for copies of the inputs, with the same random numbers."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            found = model(*copy.deepcopy(list(inputs)))
    except Exception as error:  # torch.export computes types and shapes, and lets some pass
        shapes = [tuple(x.shape) for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        raise ModelError(
            f"{type(model).__name__} must run for inputs {shapes}, got {type(error).__name__}:"
            f" {first_line(error)}"
        ) from error
    finally:
        torch.set_rng_state(state)
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def _capture(model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """With the batch open, else with it fixed; the first failure is the one to tell."""
    widened = pytree.tree_map(_at_least_two, tuple(inputs))
    try:
        program = _export(model, widened, torch.export.Dim.AUTO)
        if _kept_open(program, inputs, widened):
            return lift(program, model, inputs)
    except Exception as error:  # torch.export raises what it likes, and what the model raises
        first: Exception | None = error
    else:
        first = None
    try:
        return lift(_export(model, tuple(inputs), None), model, inputs)
    except Exception as error:
        raise ModelError(explain(first or error, model)) from error


def _export(model: nn.Module, inputs: tuple[Any, ...], batch: Any) -> torch.export.ExportedProgram:
    shapes = None
    if batch is not None:
        shapes = pytree.tree_map(lambda leaf: {0: batch} if _has_batch(leaf) else None, inputs)
        if _is_variadic(model, len(inputs)):
            shapes = _variadic(model, shapes)
    own = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)  # one tensor twice is one input
    with quiet(), torch.enable_grad():  # without, attention is one kernel that nothing can open
        return torch.export.export(model, own, dynamic_shapes=shapes, strict=False)


def _is_variadic(model: nn.Module, count: int) -> bool:
    return count > len(_positional(model))


def _variadic(model: nn.Module, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The form that torch.export wants shapes in: those of `*args` in one tuple."""
    named = len(_positional(model))
    return (*shapes[:named], shapes[named:])


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return [p for p in parameters if p.kind in plain]


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _at_least_two(leaf: Any) -> Any:
    """A batch of one would be taken for a constant 1."""
    return torch.cat([leaf, leaf]) if _has_batch(leaf) and leaf.shape[0] == 1 else leaf


def _kept_open(program: Any, inputs: Sequence[Any], widened: Any) -> bool:
    """Whether every batch that was made larger than it is stayed open."""
    held = program.graph_signature
    fixed = {*held.inputs_to_parameters, *held.inputs_to_buffers}
    fixed |= {*held.inputs_to_lifted_tensor_constants}
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name not in fixed]
    for node, ours, wide in zip(
        nodes, pytree.tree_leaves(tuple(inputs)), pytree.tree_leaves(widened), strict=True
    ):
        if wide is not ours and not isinstance(node.meta["val"].shape[0], torch.SymInt):
            return False
    return True
