"""What a set of int8 layers loses against the float model: on all images, or on held ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrators.errors import CalibrationError
from deploy.metrics.accuracy import compare
from deploy.metrics.output_errors import cosine
from deploy.progress import Step, phase
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.auto_layers import Biases, corrected_biases, with_biases
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import LayerGraph, find_layers
from deploy.targets.ascend.nearest import nearest
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import LayerRecord
from deploy.targets.ascend.variants import Records, with_adaround

if TYPE_CHECKING:
    import onnx

    from deploy.feed.parallel import Sample
    from deploy.feed.samples import Feed
    from deploy.targets.ascend.rounder import Rounder
    from deploy.tensors import Array

Tried = Mapping[str, Records]  # search -> records of the layers that it was tried on

_CORRECTING = 16  # calibration images; every other one tells what layers lose by themselves
_MOST, _BYTES = 128, 256 * 2**20  # images that are held in memory, and what they may take there


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much may be lost, and with how many threads it is measured.

    Attributes:
        max_loss: of top-1 accuracy where the images have labels, else of the outputs' mean cosine.
        threads: inside one inference, or as many inferences beside each other.
    """

    max_loss: float = 0.01
    threads: int = 2


@dataclass(slots=True, kw_only=True)
class Losses:
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
    budget: Budget
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
        chosen = nearest(self.model, self.graph, variants, samples[::2], threads=threads)
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
