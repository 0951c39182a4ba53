"""Compare two forms of a model: their outputs and their speed.

If two float32 forms differ by more than 1/1000 of the largest output, both run in float64 and must
agree to 1/1000000.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deploy.errors import ModelError
from deploy.fx.device import fixed_seed
from deploy.terminal import phase


def mean_seconds(model: nn.Module, inputs: Sequence[torch.Tensor]) -> float:
    """Return the mean wall-clock seconds of 20 runs of `model`, after 10 untimed ones."""
    with torch.no_grad():
        for _ in range(10):
            model(*inputs)
        _wait_for_device()
        started = time.perf_counter()
        for _ in range(20):
            model(*inputs)
        _wait_for_device()
    return (time.perf_counter() - started) / 20


@phase("timing")
def compare_speed(before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor]) -> str:
    """Compare two models; return one sentence with mean times, ratio and largest difference.

    They are timed alternately, and the best round of each counts, so that other load affects both.
    """
    turns = [(mean_seconds(before, inputs), mean_seconds(after, inputs)) for _ in range(3)]
    slow, fast = (min(times) for times in zip(*turns, strict=True))
    with torch.no_grad():
        difference = largest_difference(before(*inputs), after(*inputs))
    return (
        f"before {slow * 1e3:.2f} ms, after {fast * 1e3:.2f} ms: {slow / fast:.2f}x;"
        f" largest difference of the outputs {difference:.3g}"
    )


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


FLOAT32_TOLERANCE = 1e-3  # of the largest output, in float32


FLOAT64_TOLERANCE = 1e-6  # of the largest output, in float64


def check_same_outputs(
    before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor], what: str
) -> float:
    """Return the largest difference of the outputs of two forms of a model, in eval mode.

    `what`: the rewriting, such as "folding BatchNorm".

    Raises:
        ModelError: they differ by more than rounding errors.
    """
    worst, largest = _compare_outputs(before, after, inputs)
    if not worst <= FLOAT32_TOLERANCE * largest and not _same_in_float64(before, after, inputs):
        raise ModelError(
            f"{what} must not change what the model computes, and changes its outputs by up to"
            f" {worst:.3g} (largest output {largest:.3g}); check whether the model's forward"
            " depends on more than its inputs, and if not, report it"
        )
    return worst


def largest_difference(left: Any, right: Any) -> float:
    """Return the largest absolute difference of two outputs: tensors, or containers of them.

    Equal infinities and two NaN count as 0.
    """
    differences = [torch.zeros(1, dtype=torch.float64)]
    for one, other in zip(tensors_of(left), tensors_of(right), strict=True):
        a, b = one.detach().cpu().double(), other.detach().cpu().double()
        equal = (a == b) | (a.isnan() & b.isnan())
        differences.append((a - b).abs()[~equal])
    return float(torch.cat(differences).max())


def largest_magnitude(output: Any) -> float:
    """Return the largest finite absolute value of an output's tensors; 0 if there is none."""
    values = [tensor.detach().double().nan_to_num(0, 0, 0).abs() for tensor in tensors_of(output)]
    return max((float(value.max()) for value in values if value.numel()), default=0.0)


def _compare_outputs(
    before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Run both; return (largest difference, largest output)."""
    with eval_mode(before), eval_mode(after), torch.no_grad():
        expected, got = _run(before, inputs), _run(after, inputs)
    return largest_difference(expected, got), largest_magnitude(expected)


def _run(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """Run the model with a fixed seed, so that both forms draw the same random values."""
    with fixed_seed():
        return model(*inputs)


def _same_in_float64(before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether both agree in float64; False if one cannot run in float64."""
    doubled = [x.double() if x.is_floating_point() else x for x in inputs]
    try:
        forms = [copy.deepcopy(model).double() for model in (before, after)]
        worst, largest = _compare_outputs(forms[0], forms[1], doubled)
    except Exception:  # a forward with a fixed dtype may raise anything
        return False
    return worst <= FLOAT64_TOLERANCE * largest


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside the `with` block; restore each module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
