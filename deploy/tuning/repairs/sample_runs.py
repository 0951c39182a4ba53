"""Running a model on a few samples: inner tensors, and how near its outputs are to the float ones.

Samples run beside each other, each in one thread, and what is found is kept in their order: no
result depends on the number of threads.

What a layer's weights are multiplied with, on a few samples: patches of its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from calibrators.rounding import patches as drawn_patches
from deploy.feed.parallel import Sample, in_order
from deploy.graph.bounds import window_of
from deploy.graph.edit import with_outputs
from deploy.metrics.accuracy import Accuracy, Comparison, Said
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array
from deploy.tuning.repairs.repair_layers import FloatArray, Layer

if TYPE_CHECKING:
    import onnx


Taken = TypeVar("Taken")


def tapped(
    model: onnx.ModelProto,
    tensors: Iterable[str],
    samples: Sequence[Sample],
    take: Callable[[int, str, Array], Taken],
    *,
    threads: int,
) -> list[dict[str, Taken]]:
    """What `take` makes of (number of the sample, tensor, value), for each sample.

    A Q/DQ model is computed as it is written, in float between its pairs.

    Raises:
        BackendError: ONNX Runtime refused the model or a sample.
    """
    inputs = {value.name for value in model.graph.input}
    wanted = list(dict.fromkeys(tensors))
    fed, made = [n for n in wanted if n in inputs], [n for n in wanted if n not in inputs]
    session = OrtSession.open(
        with_outputs(model, made), threads=1, spin=False, keep=True, int8_kernels=False
    )
    found: list[dict[str, Taken]] = []

    def work(_: int, number: int, sample: Sample) -> dict[str, Taken]:
        values = session.run(sample)
        return {
            **{name: take(number, name, sample[name]) for name in fed},
            **{name: take(number, name, values[name]) for name in made},
        }

    in_order(samples, work, lambda _, one: found.append(one), threads=threads)
    return found


def channel_maxima(
    model: onnx.ModelProto, axes: Mapping[str, int], samples: Sequence[Sample], *, threads: int
) -> dict[str, NDArray[np.float64]]:
    """Tensor with its channel axis -> the greatest |x| of each channel on the samples, [C]."""

    def take(_: int, name: str, value: Array) -> NDArray[np.float64]:
        return np.asarray(np.abs(_rows(value, axes[name])).max(axis=0), np.float64)

    runs = tapped(model, axes, samples, take, threads=threads)
    return {name: np.max([run[name] for run in runs], axis=0) for name in axes}


def _rows(value: Array, axis: int) -> Array:
    """[..., C, ...] -> [values of a channel, C]."""
    return np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])


class Judge:
    """Compares models with the float one on the same few samples, which it runs once.

    Args:
        reference: the float model.
        samples: a few.
        threads: samples that run beside each other.
        said: the float model's outputs for them, where they are known.
    """

    def __init__(
        self,
        reference: onnx.ModelProto,
        samples: Sequence[Sample],
        *,
        threads: int,
        said: Sequence[Mapping[str, Array]] | None = None,
    ) -> None:
        self._samples, self._threads = samples, threads
        if said is None:
            session = OrtSession.open(reference, threads=1, spin=False, keep=True)
            said = _ran(session, samples, threads)
        self._outputs = said

    def of(self, model: onnx.ModelProto, *, kernels: bool) -> Accuracy:
        """Figures of a model; `kernels` runs ONNX Runtime's int8 kernels, where it has them.

        Raises:
            BackendError: ONNX Runtime refused the model or a sample.
        """
        session = OrtSession.open(model, threads=1, spin=False, keep=True, int8_kernels=kernels)
        comparison = Comparison(Said(self._outputs[0]), session)
        outputs = _ran(session, self._samples, self._threads)
        for sample, reference, candidate in zip(self._samples, self._outputs, outputs, strict=True):
            comparison.add(sample, reference, candidate)
        return comparison.result()


def _ran(session: OrtSession, samples: Sequence[Sample], threads: int) -> list[Mapping[str, Array]]:
    outputs: list[Mapping[str, Array]] = []
    in_order(
        samples,
        lambda _, __, sample: session.run(sample),
        lambda _, ran: outputs.append(ran),
        threads=threads,
    )
    return outputs


def figures(accuracy: Accuracy) -> dict[str, float]:
    """Part of an output -> its SQNR in dB; -inf where it cannot be told."""
    found = {part.label: part.sqnr_db for part in accuracy.parts}
    found |= {one.name: one.sqnr_db for one in accuracy.outputs if math.isnan(one.sqnr_db)}
    return {name: -math.inf if math.isnan(db) else db for name, db in found.items()}


def worst(accuracy: Accuracy) -> float:
    """SQNR in dB of the worst part of the outputs."""
    return min(figures(accuracy).values(), default=-math.inf)


GAIN_DB, _LOSS_DB = 0.1, 0.5


def helps(before: Accuracy, after: Accuracy, *, least: float = GAIN_DB) -> bool:
    """Whether the worst output gains `least` dB or more and no output loses over half a dB."""
    return worst(after) >= worst(before) + least and not harms(before, after)


def harms(before: Accuracy, after: Accuracy) -> bool:
    """Whether an output loses over half a dB."""
    old, new = figures(before), figures(after)
    return any(new.get(name, -math.inf) < old[name] - _LOSS_DB for name in old)


_PADS_GIVEN = b"NOTSET"
_HELD = 1 << 25  # values in memory at a time; more layers are another run of the model


def inputs_of(
    model: onnx.ModelProto,
    layers: Sequence[Layer],
    samples: Sequence[Sample],
    *,
    most: int,
    threads: int,
) -> Iterator[tuple[Layer, list[FloatArray]]]:
    """Each layer with patches of its input: of each sample [groups, K, P], `most` or so together.

    A ConvTranspose whose pads are not given, but found from its output's size, is left out.
    """
    able = [one for one in layers if not (one.transposed and _fitted(one))]
    each = -(-most // len(samples))
    for some in _portions(able, most):
        wanted = {layer.name: layer for layer in some}

        def take(number: int, name: str, value: Array, some: Sequence[Layer] = some) -> list[Array]:
            return [patches(one, value, number, each) for one in some if one.input == name]

        runs = tapped(model, [one.input for one in some], samples, take, threads=threads)
        by_input: dict[str, list[Layer]] = {}
        for layer in wanted.values():
            by_input.setdefault(layer.input, []).append(layer)
        for tensor, own in by_input.items():
            for place, layer in enumerate(own):
                yield layer, [run[tensor][place] for run in runs]


def _fitted(layer: Layer) -> bool:
    """Whether the pads of a ConvTranspose follow from the size of its output."""
    return "output_shape" in layer.given or layer.given.get("auto_pad", _PADS_GIVEN) != _PADS_GIVEN


def _portions(layers: Sequence[Layer], most: int) -> Iterator[list[Layer]]:
    """The layers in portions whose patches fit into memory, in their order."""
    some: list[Layer] = []
    held = 0
    for layer in layers:
        size = most * math.prod(layer.by_channel.shape) // max(layer.by_channel.shape[1], 1)
        if some and held + size > _HELD:
            yield some
            some, held = [], 0
        some.append(layer)
        held += size
    if some:
        yield some


def patches(layer: Layer, value: Array, number: int, most: int) -> FloatArray:
    """At most `most` patches of one input of a layer (`calibrators.rounding`)."""
    window = None
    if layer.kind in ("Conv", "ConvTranspose"):
        window = window_of(layer.given, layer.array.shape[2:], transposed=layer.transposed)
    return drawn_patches(value, window, number, most)
