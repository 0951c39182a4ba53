"""Whether two forms of a model compute the same: not by a tolerance alone, which proves little.

What rounding explains is found by rounding less: where two float32 forms differ by more than a
thousandth of the largest output, both are run in float64, in which they must agree to a millionth.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deploy.errors import ModelError
from deploy.fx.profile import tensors_of
from deploy.fx.randomness import seeded

NEAR = 1e-3  # of the largest output, in float32
EXACT = 1e-6  # of the largest output, in float64


def check_same(
    before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor], what: str
) -> float:
    """The largest difference of the outputs of two forms of a model, in eval mode.

    Args:
        before: the user's model.
        after: what was made of it.
        inputs: of one run.
        what: was made, as "folding BatchNorm".

    Raises:
        ModelError: they differ by more than rounding explains.
    """
    found, largest = _differ(before, after, inputs)
    if not found <= NEAR * largest and not _same_in_float64(before, after, inputs):
        raise ModelError(
            f"{what} must not change what the model computes, and changes its outputs by up to"
            f" {found:.3g} (largest output {largest:.3g}); look in the model's forward for what"
            " depends on more than its inputs, and report it where there is nothing"
        )
    return found


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference; 0 where both are NaN or the same infinity."""
    left, right = left.detach().cpu().double(), right.detach().cpu().double()
    equal = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs()[~equal]
    return float(apart.max()) if apart.numel() else 0.0


def largest_of(output: Any) -> float:
    """Largest finite absolute value of an output's tensors; 0 where there is none."""
    values = [tensor.detach().double().nan_to_num(0, 0, 0).abs() for tensor in tensors_of(output)]
    return max((float(value.max()) for value in values if value.numel()), default=0.0)


def _differ(
    before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """(largest difference, largest output) of one run of each."""
    with evaluating(before), evaluating(after), torch.no_grad():
        wanted, got = _run(before, inputs), _run(after, inputs)
    pairs = zip(tensors_of(wanted), tensors_of(got), strict=True)
    return max((difference(a, b) for a, b in pairs), default=0.0), largest_of(wanted)


def _run(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """The output, with the random values that both forms draw."""
    with seeded():
        return model(*inputs)


def _same_in_float64(before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether they agree where nothing is rounded; not where either runs in its own dtype alone."""
    doubled = [x.double() if x.is_floating_point() else x for x in inputs]
    try:
        forms = [copy.deepcopy(model).double() for model in (before, after)]
        found, largest = _differ(forms[0], forms[1], doubled)
    except Exception:  # a forward that names its dtype; what it raises is anything
        return False
    return found <= EXACT * largest


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode until the block ends, each module then in its own again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
