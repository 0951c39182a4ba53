"""Signal and noise of the output slices in each sample.

Signal. The signal of a slice in one sample is its sum of squares. For one class per sample, after a
Softmax, that is greatest where the class is certain, and there int8 loses nothing whatever it does
before the Softmax: a search over such samples took four of eight layers for 109 dB, and they left
22. For these, and for a single probability after a Sigmoid, the signal is what is uncertain::

    sum p (1 - p)            0 where the class is certain

Of many steps or pixels in a sample some are always uncertain, and the sum of squares serves. Where
a Softmax is certain nearly everywhere, noise shows nothing until a class flips, and then all at
once. Such an output is measured as the Softmax of its logits divided by a temperature, the least
of a few at which it is no longer certain::

    logits   9 0 0  ->  0.9998 0.0001 0.0001      temperature 4  ->  0.83 0.09 0.09

For a number that is measured about its mean, all samples have the same signal, because a Softmax
or Tanh before it is certain in the extreme ones.

Noise. The noise of a slice is its sum of squared errors over its sum of squares. A sample with less
signal than average is measured relative to the average.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from deploy.feed.sampling import sampling_order
from deploy.metrics.output_errors import SAMPLE_MEAN
from deploy.metrics.output_form import OutputForm
from deploy.tasks.rows import Floats, Outputs, are_probabilities, is_floating
from deploy.tasks.slices import OutputSlice
from deploy.tensors import Array

_TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_MIN_PROBABILITY = 1e-30  # smaller ones are rounded to 0
_UNCERTAIN = 0.1  # mean of 1 - sum p^2 from which a Softmax is not certain
_FULL_SIGNAL = 0.25  # share of the mean power, half the amplitude: a sample with more counts fully
_ALL_NOISE = 1e6  # -60 dB, a loss of all: NaN, another shape


SliceValues = Sequence[Array]  # one array per slice, in the order of `OutputForm.parts`


def slice_signals(form: OutputForm, samples: Iterable[SliceValues]) -> Floats:
    """Return the signal of every slice in every sample, [samples, slices]; 0 where not finite."""
    # a single probability is measured only alone: next to other slices these say if it matters
    min_probabilities = 1 if len(form.parts) == 1 else 2
    rows = []
    for slices in samples:
        rows.append([_measure_signal(values, min_probabilities) for values in slices])
    # [samples, slices, 2]: sum of squares, sum p (1 - p)
    measures = np.array(rows).reshape(len(rows), len(form.parts), 2)
    squares = measures[..., 0]
    uncertainties = measures[..., 1]
    signals = np.where(np.isfinite(uncertainties).all(axis=0), uncertainties, squares)
    is_number = [part.subtracted == SAMPLE_MEAN and part.cell_scores is None for part in form.parts]
    return np.asarray(np.where(is_number, signals > 0, signals))


def _measure_signal(values: Array, min_probabilities: int) -> tuple[float, float]:
    """Return the sum of squares, and sum p (1 - p) of a row of probabilities; NaN for other values.

    `min_probabilities`: numbers that a row must have.
    """
    squares = sum_of_squares(values)
    if not math.isfinite(squares):
        squares = 0.0
    if values.size < min_probabilities or not _is_one_row(values):
        return squares, np.nan
    return squares, max(float(np.sum(values, dtype=np.float64)) - squares, 0.0)


def _is_one_row(values: Array) -> bool:
    """Whether a sample is one row of probabilities, [1, C], that sum to 1, or a single one."""
    if not is_floating(values):
        return False
    if values.size == 1:  # a wake word, the quality of a signal
        return bool(values.min() >= 0 and values.max() <= 1)
    has_one_row = values.ndim > 1 and values.size == values.shape[1]
    return has_one_row and are_probabilities(values.reshape(-1))


def rank_by_signal(signals: Floats) -> Array:
    """Return the indices of the samples by their signal, each slice normalized, greatest first.

    Samples of equal signal are in sampling order, so that they are spread over the data.
    """
    order = sampling_order(len(signals))
    largest_signals = signals.max(axis=0)
    divisors = np.where(largest_signals > 0, largest_signals, 1.0)
    normalized_signals = (signals / divisors).sum(axis=1)
    return order[np.argsort(-normalized_signals[order], kind="stable")]


def strongest_samples(form: OutputForm, samples: Sequence[SliceValues], count: int) -> list[int]:
    """Return the indices of the samples of greatest signal, each slice normalized, in order."""
    return sorted(map(int, rank_by_signal(slice_signals(form, samples))[:count]))


def sum_of_squares(values: Array) -> float:
    """Return the sum of squares, finite or not."""
    flat = np.asarray(values, np.float64).reshape(-1)
    return float(np.einsum("i,i->", flat, flat))


def find_temperatures(
    form: OutputForm, outputs: Sequence[Outputs]
) -> dict[OutputSlice, tuple[float, int]]:
    """Return output of a Softmax that is certain -> (temperature, axis of the classes).

    A Softmax is certain if one class has nearly all of the probability in most rows: the mean of
    1 - sum p^2 over all rows of all samples is below `_UNCERTAIN`. At the temperature it is not
    certain any more. The axis of the classes is 1 if its values sum to 1, else the last one.

    `outputs`: of the float model, for each sample.
    """
    temperatures = {}
    for part in form.parts:
        if part != OutputSlice(part.output):  # a part of an output is no Softmax
            continue
        arrays = [sample_outputs[part.output] for sample_outputs in outputs]
        for axis in (1, -1):
            if all(_is_softmax(values, axis) for values in arrays):
                temperature = _find_temperature(arrays, axis)
                if temperature > 1:  # 1: it is not certain as it is
                    temperatures[part] = temperature, axis
                break
    return temperatures


def _find_temperature(arrays: Sequence[Array], axis: int) -> float:
    """Return the least temperature at which a Softmax is not certain, or the largest."""
    for temperature in _TEMPERATURES:
        uncertainties = []
        for values in arrays:
            probabilities = apply_temperature(values, temperature, axis)
            uncertainties.append(1 - np.square(probabilities).sum(axis=axis).mean())
        if np.mean(uncertainties) >= _UNCERTAIN:
            break
    return temperature


def apply_temperature(probabilities: Array, temperature: float, axis: int) -> Floats:
    """Return the Softmax of logits divided by a temperature, from that of the logits."""
    with np.errstate(invalid="ignore"):
        power = np.maximum(probabilities.astype(np.float64), _MIN_PROBABILITY) ** (1 / temperature)
        return np.asarray(power / power.sum(axis=axis, keepdims=True))


def _is_softmax(values: Array, axis: int) -> bool:
    has_classes = values.ndim > 1 and values.shape[axis] > 1 and values.size > 0
    return has_classes and is_floating(values) and are_probabilities(values, axis)


def slice_powers(samples: Sequence[SliceValues]) -> Floats:
    """Return the sum of squares of every slice in every sample, [samples, slices]."""
    return np.array([[sum_of_squares(values) for values in slices] for slices in samples])


def mean_powers(powers: Floats) -> Floats:
    """Return every slice's power at the mean amplitude of the samples; 0 where it is not finite."""
    mean_amplitudes = sum(np.sqrt(powers)) / len(powers)
    return np.where(np.isfinite(mean_amplitudes), mean_amplitudes * mean_amplitudes, 0.0)


def signal_shares(powers: Floats, usual_powers: Floats) -> Floats:
    """Return every slice's share of the samples with at least half the mean amplitude.

    A sample with less counts by its power. A slice without signal in any sample gets 1.

    `powers`: of the slices, [samples, slices]. `usual_powers`: see `mean_powers`.
    """
    full_powers = _FULL_SIGNAL * usual_powers
    finite_powers = np.where(np.isfinite(powers), powers, 0.0)
    shares = np.ones_like(finite_powers)
    np.divide(
        np.minimum(finite_powers, full_powers), full_powers, out=shares, where=full_powers > 0
    )
    mean_shares = sum(shares) / len(shares)
    return np.where(mean_shares > 0, mean_shares, 1.0)


def noise_powers(
    reference: SliceValues, candidate: SliceValues, signal_powers: Floats
) -> list[float]:
    """Return the relative noise power of every slice in one sample.

    `signal_powers`: [slices], of the sample, or of an average sample where that has more.
    """
    powers = []
    for expected, actual, signal_power in zip(reference, candidate, signal_powers, strict=True):
        powers.append(_noise_power(expected, actual, float(signal_power)))
    return powers


def _noise_power(expected: Array, actual: Array, signal_power: float) -> float:
    """Return the error power over the signal power; 0 for no error, at most `_ALL_NOISE`."""
    if expected.shape != actual.shape:
        return _ALL_NOISE
    noise = sum_of_squares(np.asarray(expected, np.float64) - np.asarray(actual, np.float64))
    if noise == 0:
        return 0.0
    if signal_power == 0 or not (math.isfinite(signal_power) and math.isfinite(noise)):
        return _ALL_NOISE
    return min(noise / signal_power, _ALL_NOISE)
