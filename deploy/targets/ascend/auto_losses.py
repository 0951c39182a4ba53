"""Automatic accuracy: leave the worst layers in float until the user's budget holds.

::

    similarity  0.91  0.97 | 0.985  0.99  0.999      worst first; a prefix goes back to float,
                float      | int8                    the shortest that holds, by binary search

Layers are ranked one by one, each on its own float input, so no error of another layer counts:
0.5 + 0.5 * cosine of float and fake-quantized output, averaged over the samples. Files and their
layout are AMCT's. Source: hicann/amct, common/auto_calibration.

Each layer by the search that leaves its own output nearest, before any layer is left in float.

::

    float input -+-> layer in float             what is left of the difference when the mean of
                 '-> layer in int8, a search    each channel is taken out, which its bias can hold

What a layer loses by itself has little noise, where what the model's outputs lose is decided by a
few values that tip over; so the first choice is made here, and the outputs judge it as a whole.

What a set of int8 layers loses against the float model: on all images, or on held ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from deploy.calibration.taps import Tap
from deploy.errors import ConfigError
from deploy.feed.parallel import Sample, run_in_order
from deploy.graph.edit import copy_message
from deploy.graph.index import Graph
from deploy.metrics.accuracy import compare
from deploy.metrics.output_errors import cosine
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.auto_layers import (
    Biases,
    Records,
    corrected_biases,
    is_balanced,
    with_adaround,
    with_biases,
)
from deploy.targets.ascend.config import write_config
from deploy.targets.ascend.config_keys import QuantConfig
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import LayerGraph, find_layers
from deploy.targets.ascend.quant_layer import QuantLayer, quantize_layers
from deploy.targets.ascend.record import LayerRecord
from deploy.tensors import Array
from deploy.terminal import Step, phase

if TYPE_CHECKING:
    import onnx

    from deploy.feed.samples import Feed
    from deploy.targets.ascend.auto_layers import Rounder


RANKING = "accuracy_based_auto_calibration_ranking_information.json"
HISTORY = "accuracy_based_auto_calibration_record.json"
FINAL = "accuracy_based_auto_calibration_final_config.json"

Judge = Callable[[Mapping[str, LayerRecord]], tuple[bool, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSearchResult:
    """What the search found.

    Attributes:
        ranking: (layer, similarity), worst first.
        history: one entry a trial: the layers in float, whether the budget held, the loss.
        records: the layers that stay in int8; None where only float holds the budget.
        config: the quant config with the others disabled.
        biases: layer in int8 -> its bias where it was corrected.
        notes: sentences on what that costs and where it is kept.
    """

    ranking: tuple[tuple[str, float], ...]
    history: tuple[dict[str, Any], ...]
    records: dict[str, LayerRecord] | None
    config: QuantConfig
    biases: Biases = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def files(self) -> dict[str, str]:
        """File name -> text, as AMCT writes them."""
        return {
            RANKING: json.dumps([list(entry) for entry in self.ranking], indent=4),
            HISTORY: json.dumps(list(self.history), indent=4),
            FINAL: write_config(self.config),
        }


def search_prefix(
    records: Mapping[str, LayerRecord],
    ranking: Iterable[tuple[str, float]],
    config: QuantConfig,
    judge: Judge,
) -> AutoSearchResult:
    """Roll the worst layers back to float, as few as the budget allows.

    Args:
        records: every calibrated layer.
        ranking: from `rank_layers`, worst first.
        config: the config that gave the records.
        judge: records of the int8 layers -> (the budget holds, loss against float).

    Raises:
        ConfigError: the budget does not hold for the float model against itself.
    """
    order = tuple(ranking)
    if not judge({})[0]:
        raise ConfigError(
            "the accuracy budget must hold for the float model against itself, and does not;"
            " widen the budget"
        )
    history: list[dict[str, Any]] = []

    def holds(count: int) -> bool:
        back = {name for name, _ in order[:count]}
        kept = {name: record for name, record in records.items() if name not in back}
        good, loss = judge(kept)
        rolled = {name: name in back for name, _ in order}
        history.append({"roll_back_config": rolled, "metric_eval": [bool(good), float(loss)]})
        return good

    best = 0 if holds(0) else _shortest(len(order), holds)
    back = {name for name, _ in order[:best]}
    left = {name: record for name, record in records.items() if name not in back}
    layers = {
        name: replace(layer, quant_enable=False) if name in back else layer
        for name, layer in config.layers.items()
    }
    tensors = tuple(one for one in config.tensors if one.key not in back)
    return AutoSearchResult(
        ranking=order,
        history=tuple(history),
        records=left or None,
        config=replace(config, layers=layers, tensors=tensors),
    )


def _shortest(size: int, holds: Callable[[int], bool]) -> int:
    """Shortest prefix that holds; `size` (everything in float) holds by definition."""
    left, right, best = 0, size - 1, size
    while left <= right:
        middle = (left + right) // 2
        if middle + 1 < size and not holds(middle + 1):
            left = middle + 1
        else:
            best, right = middle + 1, middle - 1
    return best


def rank_layers(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    samples: Iterable[Mapping[str, NDArray[Any]]],
) -> list[tuple[str, float]]:
    """(layer, similarity in [0, 1]) of every layer, worst first; ties in the model's order."""
    from deploy.calibration.taps import Tap

    outputs = {name: q.layer.output for name, q in layers.items()}
    names = [*outputs.values(), *(f"{name}.isolated" for name in layers)]
    tap = Tap(isolated_model(model, layers), sorted(set(names)), threads=None)
    scores: dict[str, list[float]] = {name: [] for name in layers}
    for sample in samples:
        values = dict(tap.run(sample))
        for name, output in outputs.items():
            scores[name].append(similarity(values[output], values[f"{name}.isolated"]))
    means = {name: float(np.mean(found)) for name, found in scores.items()}
    return sorted(means.items(), key=lambda entry: entry[1])


def similarity(original: NDArray[Any], fake: NDArray[Any]) -> float:
    """0.5 + 0.5 * cosine; 1 if the original is all zero, 0 if only the other is."""
    if not original.any():
        return 1.0
    return 0.5 + 0.5 * cosine(original, fake) if fake.any() else 0.0


def isolated_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """The float model with, beside each layer, its fake-quantized twin on the same float input.

    The twin's output is '<layer>.isolated'.
    """
    from deploy.targets.ascend.fake_quant import fake_quant_model

    out = copy_message(model)
    for name, q in layers.items():
        twin = _alone(model, q)
        quantized = fake_quant_model(twin, {name: q})
        for tensor in quantized.graph.initializer:
            tensor.name = f"{name}.twin.{tensor.name}"
        _prefix(quantized.graph, name, q)
        out.graph.node.extend(quantized.graph.node)
        out.graph.initializer.extend(quantized.graph.initializer)
    return out


def _alone(model: onnx.ModelProto, q: QuantLayer) -> onnx.ModelProto:
    """A model of one layer only, with the Add of a MatMul's bias."""
    from onnx import ValueInfoProto

    wanted = {q.layer.node, q.layer.bias_add} - {""}
    index = Graph(model)
    out = type(model)()
    out.opset_import.extend(model.opset_import)
    out.ir_version = model.ir_version
    out.graph.node.extend(n for n in model.graph.node if n.name in wanted)
    read = {name for node in out.graph.node for name in node.input}
    for name in sorted(read & set(index.constants)):
        tensor = out.graph.initializer.add()
        tensor.CopyFrom(index.constants[name])
        tensor.name = name
    activations = dict.fromkeys((q.layer.input, *q.layer.others))
    out.graph.input.extend(ValueInfoProto(name=tensor) for tensor in activations)
    out.graph.output.append(ValueInfoProto(name=q.layer.output))
    return out


def _prefix(graph: onnx.GraphProto, name: str, q: QuantLayer) -> None:
    """Give every tensor and node of a twin names of its own, its ends excepted."""
    read = (q.layer.input, *q.layer.others)
    ends = {**{one: one for one in read}, q.layer.output: f"{name}.isolated", "": ""}
    for node in graph.node:
        node.name = f"{name}.twin.{node.name}"
        for names in (node.input, node.output):
            for place, tensor in enumerate(names):
                names[place] = ends.get(tensor, f"{name}.twin.{tensor}")


_WORTH_A_MUL = 0.5  # DMQ is one operator more on the device: it must halve the error at least


def choose_searches(
    model: onnx.ModelProto,
    graph: LayerGraph,
    variants: Mapping[str, Records],
    samples: Sequence[Sample],
    *,
    threads: int,
) -> dict[str, str]:
    """Layer -> the search whose int8 layer is nearest to the float one, on a float input.

    Args:
        model: float model, nodes named.
        graph: its layers.
        variants: search -> records; the first holds all layers.
        samples: a few of the calibration's.
        threads: samples that run beside each other; the result does not depend on it.

    Raises:
        ExportError: a layer is outside what the hardware takes.
        BackendError: ONNX Runtime could not run the model.
    """
    errors: dict[str, dict[str, float]] = {}
    with phase("errors of layers by themselves", len(variants), "searches") as step:
        for search, records in variants.items():
            layers = quantize_layers(model, graph, records)
            for name, error in own_errors(model, layers, samples, threads=threads).items():
                errors.setdefault(name, {})[search] = error
            step()
    return {name: _best(errors[name]) for name in next(iter(variants.values()))}


def own_errors(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    samples: Sequence[Sample],
    *,
    threads: int,
) -> dict[str, float]:
    """Layer -> variance of what int8 adds to its output, summed over its channels.

    Of a layer without a place for a bias, which could hold a mean, the mean square.
    """
    ends = {name: (one.layer.output, f"{name}.isolated") for name, one in layers.items()}
    wanted = sorted({tensor for pair in ends.values() for tensor in pair})
    tap = Tap(isolated_model(model, layers), wanted)
    sums: dict[str, Array] = {}

    def work(_: int, __: int, sample: Sample) -> dict[str, Array]:
        values = dict(tap.run(sample))
        return {
            name: _moments(values[twin] - values[own], layers[name].layer.channel_axis)
            for name, (own, twin) in ends.items()
        }

    def take(_: int, found: dict[str, Array]) -> None:
        for name, moments in found.items():
            sums[name] = sums.get(name, 0) + moments / len(samples)

    run_in_order(samples, work, take, threads=threads)
    return {
        name: float((square - mean**2 * layers[name].layer.holds_bias).sum())
        for name, (mean, square) in sums.items()
    }


def _moments(difference: Array, axis: int) -> Array:
    """Mean and mean square of each channel, float64 [2, C]."""
    channels = difference if difference.ndim < 2 else np.moveaxis(difference, axis, -1)
    rows = channels.reshape(-1, channels.shape[-1]).astype(np.float64)
    return np.stack([rows.mean(axis=0), (rows * rows).mean(axis=0)])


def _best(errors: Mapping[str, float]) -> str:
    """The search of least error; a balanced one only where it is worth its operator."""
    plain = min((s for s in errors if not is_balanced(s)), key=errors.__getitem__)
    least = min(errors, key=errors.__getitem__)
    return least if errors[least] < _WORTH_A_MUL * errors[plain] else plain


Tried = Mapping[str, Records]  # search -> records of the layers that it was tried on

_CORRECTING = 16  # calibration images; every other one tells what layers lose by themselves
_MOST, _BYTES = 128, 256 * 2**20  # images that are held in memory, and what they may take there


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBudget:
    """How much may be lost, and with how many threads it is measured.

    Attributes:
        max_loss: of top-1 accuracy where the images have labels, else of the outputs' mean cosine.
        threads: inside one inference, or as many inferences beside each other.
    """

    max_loss: float = 0.01
    threads: int = 2


@dataclass(slots=True, kw_only=True)
class ModelLosses:
    """The float model beside its fake-quant forms.

    Attributes:
        model: float model, nodes named.
        graph: its layers.
        evaluation: images to judge on, with `labels` or without.
        calibration: images that biases are corrected on.
        budget: what may be lost.
        say: told of every judgement on all images.
        rounder: rounds layers by AdaRound; None where nobody asks for it.
        held: (sample, the float model's outputs) of the images that `of` looks at.
        biases: that layers have wherever they are in int8, by layer; the others keep their own.
        rounded_biases: that they have in place of those where AdaRound rounded them.
    """

    model: onnx.ModelProto
    graph: LayerGraph
    evaluation: Feed
    calibration: Feed
    budget: LossBudget
    say: Callable[[str], None]
    rounder: Rounder | None = None
    held: list[tuple[Sample, Mapping[str, Array]]] = field(default_factory=list)
    biases: Biases = field(default_factory=dict)
    rounded_biases: Biases = field(default_factory=dict)
    _reference: OrtSession = field(init=False)

    def __post_init__(self) -> None:
        self._reference = OrtSession.open(self.model, threads=self.budget.threads)

    def judge(self, records: Records) -> tuple[bool, float]:
        """(the budget holds, loss) on all images: of top-1 with labels, else of mean cosine."""
        if not records:
            return True, 0.0
        candidate = OrtSession.open(self._form(records), threads=self.budget.threads)
        count = sum(not one.tensor for one in records.values())
        what, labels = f"{count} layers in int8", self.evaluation.labels
        with (
            phase(what, len(self.evaluation), "samples") as step,
            self.evaluation.samples() as samples,
        ):
            figures = compare(self._reference, candidate, samples, labels=labels, progress=step)
        if figures.top1_reference is not None and figures.top1_candidate is not None:
            loss = figures.top1_reference - figures.top1_candidate
        else:
            loss = 1.0 - min(output.cosine_mean for output in figures.outputs)
        good = loss <= self.budget.max_loss
        word = "held" if good else "too much"
        self.say(f"{what}: loss {loss:.5f}, {word}")
        return good, loss

    def hold(self) -> None:
        """Hold images from all over the feed, and the float model's outputs, for `of`."""
        first = self.evaluation.first(1)
        size = sum(_bytes(one) + _bytes(self._reference.run(one)) for one in first)
        most = max(1, min(_MOST, _BYTES // max(size, 1), len(self.evaluation)))
        with phase("running the float model", most, "samples") as step:
            for sample in self.evaluation.spread(most):
                self.held.append((sample, self._reference.run(sample)))
                step()

    def of(self, forms: Sequence[Records]) -> list[float]:
        """Mean loss of cosine on the held images, of several forms beside each other."""
        with (
            phase("trying layers", len(forms), "trials") as step,
            ThreadPoolExecutor(self.budget.threads) as pool,
        ):
            return list(pool.map(lambda form: self._mean(form, step), forms))

    def _mean(self, records: Records, step: Step) -> float:
        if not records:
            return 0.0
        session = OrtSession.open(self._form(records), threads=1, spin=False)
        found = [_loss(wanted, session.run(sample)) for sample, wanted in self.held]
        step()
        return float(np.mean(found))

    def nearer(self, variants: Mapping[str, Records]) -> dict[str, str]:
        """Layer -> the search that leaves it nearest; from now on biases are corrected."""
        samples, threads = list(self.calibration.spread(_CORRECTING)), self.budget.threads
        chosen = choose_searches(self.model, self.graph, variants, samples[::2], threads=threads)
        self.biases = self._corrected(
            {name: variants[how][name] for name, how in chosen.items()}, samples
        )
        return chosen

    def rounded(self, chosen: Mapping[str, str], records: Records, worst: Sequence[str]) -> Tried:
        """Search with AdaRound -> records of some of these layers, and biases that go with them."""
        names = [] if self.rounder is None else self.rounder.able(worst)
        if self.rounder is None or not names:
            return {}
        began = perf_counter()
        try:
            made = self.rounder.rounded(chosen, records, names)
        except CalibrationError as error:
            self.say(f"AdaRound is left out: {error}")
            return {}
        if self.biases:
            samples = list(self.calibration.spread(_CORRECTING))
            biases = self._corrected({**records, **made}, samples)
            self.rounded_biases = {name: one for name, one in biases.items() if name in made}
        self.say(f"AdaRound of {len(made)} layers to try: {perf_counter() - began:.0f} s")
        found: dict[str, dict[str, LayerRecord]] = {}
        for name, record in made.items():
            found.setdefault(with_adaround(chosen[name]), {})[name] = record
        return found

    def _corrected(self, records: Records, samples: Sequence[Sample]) -> Biases:
        threads = self.budget.threads
        return corrected_biases(self.model, self.graph, records, samples, threads=threads)

    def plain(self) -> None:
        """Judge with the biases as they were again."""
        self.biases = {}

    def biases_of(self, records: Records) -> Biases:
        """The biases that were corrected of layers with these records."""
        by = {
            name: self.biases if record.rounded is None else self.rounded_biases
            for name, record in records.items()
        }
        return {name: own[name] for name, own in by.items() if name in own}

    def corrected(self, records: Records) -> tuple[onnx.ModelProto, LayerGraph]:
        """The float model with the biases of these layers, and its layers."""
        biases = self.biases_of(records)
        if not biases:
            return self.model, self.graph
        model = with_biases(self.model, self.graph, biases)
        return model, find_layers(model)

    def _form(self, records: Records) -> onnx.ModelProto:
        model, graph = self.corrected(records)
        return fake_quant_model(model, quantize_layers(model, graph, records))


def _bytes(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _loss(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    return 1 - min(cosine(wanted[name], found[name]) for name in wanted)
