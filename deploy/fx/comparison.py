"""Compare two forms of a model: their outputs and their speed.

If two float32 forms differ by more than 1/1000 of the largest output, both run in float64 and must
agree to 1/1000000.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from deploy.errors import ModelError
from deploy.fx.device import fixed_seed, map_tensors
from deploy.fx.model_inputs import cast_floats
from deploy.terminal import phase

_TIMED_RUNS, _TIMING_ROUNDS = 20, 3


def mean_seconds(model: nn.Module, inputs: Sequence[torch.Tensor]) -> float:
    """Return the mean wall-clock seconds of a run of `model`, after some untimed runs."""
    names = {"model": model, "inputs": inputs}
    timer = Timer("model(*inputs)", globals=names, num_threads=torch.get_num_threads())
    with torch.no_grad():
        return timer.timeit(_TIMED_RUNS).mean


@phase("timing")
def compare_speed(original: nn.Module, rewritten: nn.Module, inputs: Sequence[torch.Tensor]) -> str:
    """Compare two models; return one sentence with mean times, ratio and largest difference.

    They are timed alternately, and the best round of each counts, so that other load affects both.
    """
    original_seconds = rewritten_seconds = math.inf
    for _ in range(_TIMING_ROUNDS):
        original_seconds = min(original_seconds, mean_seconds(original, inputs))
        rewritten_seconds = min(rewritten_seconds, mean_seconds(rewritten, inputs))
    with torch.no_grad():
        difference = largest_difference(_run(original, inputs), _run(rewritten, inputs))
    return (
        f"before {original_seconds * 1e3:.2f} ms, after {rewritten_seconds * 1e3:.2f} ms:"
        f" {original_seconds / rewritten_seconds:.2f}x;"
        f" largest difference of the outputs {difference:.3g}"
    )


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's inputs or output, in order, also in nested containers.

    Other values in it, such as numbers, are left out.

    Raises:
        ModelError: there is an object of another class that holds tensors.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):  # also a dataclass of transformers that is a dict
        items = list(value.values())
    elif is_dataclass(value):
        items = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, list | tuple):
        items = list(value)
    else:
        attributes = getattr(value, "__dict__", {})
        if any(isinstance(attribute, torch.Tensor) for attribute in attributes.values()):
            raise ModelError(
                "a model takes and returns tensors, numbers, or tuples, lists, dicts and"
                f" dataclasses of them, got {type(value).__name__}; return its tensors"
            )
        return []
    tensors = []
    for item in items:
        tensors += tensors_of(item)
    return tensors


FLOAT32_TOLERANCE = 1e-3  # of the largest output, in float32


FLOAT64_TOLERANCE = 1e-6  # of the largest output, in float64


def check_same_outputs(
    original: nn.Module, rewritten: nn.Module, inputs: Sequence[torch.Tensor], change: str
) -> float:
    """Return the largest difference of the outputs of two forms of a model, in eval mode.

    `change`: the rewriting, such as "folding BatchNorm".

    Raises:
        ModelError: they differ by more than rounding errors.
    """
    difference, magnitude = _compare_outputs(original, rewritten, inputs)
    is_near = difference <= FLOAT32_TOLERANCE * magnitude
    if not is_near and not _is_same_in_float64(original, rewritten, inputs):
        raise ModelError(
            f"{change} must not change what the model computes, and changes its outputs by up to"
            f" {difference:.3g} (largest output {magnitude:.3g}); check whether the model's forward"
            " depends on more than its inputs, and if not, report it"
        )
    return difference


def largest_difference(first: Any, second: Any) -> float:
    """Return the largest absolute difference of two outputs: tensors, or containers of them.

    Equal infinities and two NaN count as 0.
    """
    differences = [torch.zeros(1, dtype=torch.float64)]
    for first_tensor, second_tensor in zip(tensors_of(first), tensors_of(second), strict=True):
        first_values = first_tensor.detach().cpu().double()
        second_values = second_tensor.detach().cpu().double()
        is_equal = (first_values == second_values) | (first_values.isnan() & second_values.isnan())
        differences.append((first_values - second_values).abs()[~is_equal])
    return float(torch.cat(differences).max())


def largest_magnitude(output: Any) -> float:
    """Return the largest finite absolute value of an output's tensors; 0 if there is none."""
    magnitude = 0.0
    for tensor in tensors_of(output):
        finite = tensor.detach().double().nan_to_num(0, 0, 0).abs()
        if finite.numel():
            magnitude = max(magnitude, float(finite.max()))
    return magnitude


def _compare_outputs(
    original: nn.Module, rewritten: nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Run both; return (largest difference, largest output)."""
    with eval_mode(original), eval_mode(rewritten), torch.no_grad():
        original_output = _run(original, inputs)
        rewritten_output = _run(rewritten, inputs)
    return largest_difference(original_output, rewritten_output), largest_magnitude(original_output)


def _run(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """Run the model for copies, with a fixed seed, so that both forms get the same values."""
    with fixed_seed():
        return model(*map_tensors(list(inputs), torch.clone))


def _is_same_in_float64(
    original: nn.Module, rewritten: nn.Module, inputs: Sequence[torch.Tensor]
) -> bool:
    """Return whether both agree in float64; False if one cannot run in float64."""
    try:
        difference, magnitude = _compare_outputs(
            copy.deepcopy(original).double(),
            copy.deepcopy(rewritten).double(),
            cast_floats(inputs, torch.float64),
        )
    except Exception:  # a forward with a fixed dtype may raise anything
        return False
    return difference <= FLOAT64_TOLERANCE * magnitude


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside the `with` block; restore each module's mode afterwards."""
    modules_in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in modules_in_training:
            module.training = True
