"""The searches among which `calib8 ascend auto` chooses, a layer each.

All are settings of AMCT's own configuration, which says afterwards what was chosen, and all are
found in one pass over the images. Those of DMQ balance the channels of a layer's input with its
weight's, for one operator more in front of it; a layer that cannot be balanced has no such search.
Each may go with AdaRound, which `deploy.targets.ascend.auto_layers` tries on a few layers.

AdaRound on a few layers, in a search that has measured what each of them loses.

::

    layers that lose most, that AdaRound can round, not too large --> integers, one after the other

The models that are looked at have all layers of the search in int8 weights, so that a build with
the final configuration looks at the same. Ranges and DMQ's factors of a layer stay as they were;
only its weights and their scales are others, so that no other layer needs a pass.

Biases corrected one layer after the other: what int8 moves a channel's mean by is taken out.

::

    float      mean of a channel of layer k                 wanted
    int8       layers 1 .. k-1 corrected already            found       b_k + wanted - found

Each layer is measured behind the corrected ones, so it takes out what is its own and what it gets
from those before it. A bias is an int32 in steps of scale_w * scale_d, so this costs no time on the
device; the float model with the new biases is what all files are made of.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), appendix D (the correction on data, layer by layer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrators.weights import shrunk_mean
from deploy.calibration.observation import CalibrationSubject, Observation, ObservedStatistics
from deploy.calibration.one_pass import observe
from deploy.feed.parallel import Sample, run_in_order
from deploy.graph.edit import (
    copy_message,
    copy_with_outputs,
    drop_unread,
    extract_output,
    unique_name,
)
from deploy.graph.index import Graph, count_reads
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.amct_calibration import RecordPlan
from deploy.targets.ascend.config_keys import ActivationParams, LayerConfig, QuantConfig
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import Layer, LayerGraph, find_layers
from deploy.targets.ascend.quant_layer import (
    dequant_scales,
    quantize_bias,
    quantize_fitting,
    quantize_layers,
    read_constant,
    to_rows,
)
from deploy.targets.ascend.record import LayerRecord
from deploy.targets.ascend.target import Ascend
from deploy.targets.ascend.weight_rounding import find_padless_deconvs
from deploy.tensors import Array
from deploy.terminal import phase

if TYPE_CHECKING:
    import onnx

    from deploy.feed.samples import Feed


Records = Mapping[str, LayerRecord]

CONFIGURED = "as configured"
_OTHERS: dict[str, Callable[[ActivationParams], ActivationParams]] = {
    "nothing clipped": lambda found: replace(found, search_range=(1.0, 1.3)),
    "percentile 0.9999": lambda found: replace(found, max_percentile=0.9999, min_percentile=0.9999),
    "hfmg": lambda found: replace(ActivationParams(), act_algo="hfmg", asymmetric=found.asymmetric),
}
_BALANCED_OVER = 32  # samples, which are held while they are run twice
_BALANCED = {f"dmq {strength}": strength for strength in (0.2, 0.5, 0.8)}
_ROUNDED = ", AdaRound"
ITERATIONS = 4000  # of AdaRound; AMCT's 10000 gain little more for their time


@dataclass(frozen=True, kw_only=True)
class AscendSearching(Ascend):
    """The Ascend target, observing what every one of these searches needs."""

    def demand(self, subject: CalibrationSubject) -> tuple[Observation, ...]:
        """As `Ascend.demand`, for all of `search_plans`."""
        wanted = (o for plan in search_plans(self, subject).values() for o in plan.observations)
        return tuple({o.key: o for o in wanted}.values())


def search_plans(target: Ascend, subject: CalibrationSubject) -> dict[str, RecordPlan]:
    """Name of a search -> the plan by which every layer is searched so.

    Where nothing else was observed, or the user has a configuration, that alone says how.
    """
    own = target.record_plan(subject)
    if target.config is not None or not isinstance(target, AscendSearching):
        return {CONFIGURED: own}
    return {CONFIGURED: own, **{name: _plan(own, name) for name in (*_OTHERS, *_BALANCED)}}


def is_balanced(search: str) -> bool:
    """Whether a search balances channels by DMQ."""
    return search.removesuffix(_ROUNDED) in _BALANCED


def is_rounded(search: str) -> bool:
    """Whether a search goes with AdaRound."""
    return search.endswith(_ROUNDED)


def with_adaround(search: str) -> str:
    """The same search of ranges and factors, the weights rounded by AdaRound."""
    return search if is_rounded(search) else search + _ROUNDED


def balanced_over(plan: RecordPlan) -> int:
    """Samples on which DMQ's channels are measured: AMCT's first batch, if that is not one."""
    return plan.together if plan.together > 1 else min(plan.samples, _BALANCED_OVER)


def records_by_search(
    found: Mapping[str, RecordPlan], observed: ObservedStatistics
) -> dict[str, Records]:
    """Name of a search -> records of all layers; of DMQ's, of those that it changes."""
    records = {name: plan.record(observed).records for name, plan in found.items()}
    return {
        name: {
            layer: record
            for layer, record in own.items()
            if not is_balanced(name) or (record.factors.size and (record.factors != 1).any())
        }
        for name, own in records.items()
    }


def config_of(config: QuantConfig, chosen: Mapping[str, str]) -> QuantConfig:
    """The config in which each layer of `chosen` is searched as it says, and no other enabled."""
    layers = {
        name: _layer(one, chosen[name]) if name in chosen else replace(one, quant_enable=False)
        for name, one in config.layers.items()
    }
    tensors = (
        replace(one, activation=_activation(one.activation, chosen[one.key]))
        for one in config.tensors
        if one.key in chosen
    )
    return replace(config, layers=layers, tensors=tuple(tensors))


def _plan(own: RecordPlan, name: str) -> RecordPlan:
    weighted = [layer.name for layer in own.layers.values() if layer.weight]
    chosen = dict.fromkeys(own.layers, CONFIGURED) | dict.fromkeys(
        weighted if is_balanced(name) else own.layers, name
    )
    config = config_of(own.config, chosen)
    return replace(own, config=config, balanced_over=balanced_over(own), lenient=True)


def _layer(one: LayerConfig, name: str) -> LayerConfig:
    if is_rounded(name):
        weight = replace(one.weight, wts_algo="ada_quantize", num_iteration=ITERATIONS)
        return _layer(replace(one, weight=weight), name.removesuffix(_ROUNDED))
    if is_balanced(name):
        return replace(one, dmq_balancer_param=_BALANCED[name])
    return replace(one, activation=_activation(one.activation, name))


def _activation(one: ActivationParams, name: str) -> ActivationParams:
    return one if name == CONFIGURED else _OTHERS[name](one)


_MOST = 6  # layers
_WEIGHTS = 2**20  # of them together: some 3 minutes of a core


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounder:
    """What AdaRound needs of a calibration.

    Attributes:
        plan: the layers, as configured.
        observed: what was observed for the searches.
        calibration: the images that were observed; the first of them are looked at.
        threads: samples that run beside each other; the result does not depend on it.
    """

    plan: RecordPlan
    observed: ObservedStatistics
    calibration: Feed
    threads: int

    def able(self, names: Iterable[str]) -> list[str]:
        """The first layers that it can round, and that keep the time to a few minutes."""
        found: list[str] = []
        room = _WEIGHTS
        for name, size in self._sizes(names):
            if size <= room and len(found) < _MOST:
                found.append(name)
                room -= size
        return found

    def _sizes(self, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Those that AMCT rounds, and how many weights each has."""
        index, open_ = Graph(self.plan.model), set(find_padless_deconvs(self.plan.model))
        for name in names:
            layer = self.plan.layers[name]
            if layer.adaptive and name not in open_:
                yield name, prod(index.constants[layer.weight].dims)

    def rounded(
        self, chosen: Mapping[str, str], records: Records, names: Iterable[str]
    ) -> dict[str, LayerRecord]:
        """Layer -> its record with AdaRound's integers, of those that the hardware takes.

        Args:
            chosen: layer in int8 -> its search.
            records: of these layers.
            names: layers to round, of `able`.

        Raises:
            CalibrationError: weights or outputs that are too large.
        """
        plan = self._plan({**chosen, **{name: with_adaround(chosen[name]) for name in names}})
        wanted = [step.inputs for step in plan.adaround.values()]
        with self.calibration.samples() as samples:
            seen = observe(wanted, samples, known=self.observed, threads=self.threads)
        made = {
            name: replace(records[name], scale_w=one.scale, rounded=one.integers)
            for name, one in plan.rounded(self.observed.and_also(seen)).items()
        }
        fitting, _ = quantize_fitting(plan.model, plan.graph, made)
        return {name: made[name] for name in fitting}

    def _plan(self, chosen: Mapping[str, str]) -> RecordPlan:
        assert any(map(is_rounded, chosen.values()))
        return replace(
            self.plan,
            config=config_of(self.plan.config, chosen),
            balanced_over=balanced_over(self.plan),
            lenient=True,
        )


Biases = Mapping[str, NDArray[np.float32]]  # layer -> [C_out]


def corrected_biases(
    model: onnx.ModelProto,
    graph: LayerGraph,
    records: Mapping[str, LayerRecord],
    samples: Sequence[Sample],
    *,
    threads: int,
) -> dict[str, NDArray[np.float32]]:
    """Biases with which the int8 layers keep the means that their channels have in float.

    Args:
        model: float model, nodes named.
        graph: its layers.
        records: of the layers in int8.
        samples: a few of the calibration's.
        threads: samples that run beside each other; the result does not depend on it.

    Returns:
        Layer -> bias [C_out], of every layer in int8 that can hold one.

    Raises:
        ExportError: a layer is outside what the hardware takes.
        BackendError: ONNX Runtime could not run a form of the model.
    """
    able = {n: one for n, one in graph.layers.items() if n in records and one.holds_bias}
    index = Graph(model)
    found = {name: _bias(index, layer) for name, layer in able.items()}
    wanted = _means(model, list(able.values()), samples, threads)
    plain = with_biases(model, graph, found)
    layers = quantize_layers(plain, find_layers(plain), records)
    int8 = fake_quant_model(plain, layers)
    stored = {tensor.name: tensor for tensor in int8.graph.initializer}
    with phase("correcting biases", len(able), "layers") as step:
        for name, layer in able.items():
            means = _means(extract_output(int8, layer.output), [layer], samples, threads)
            change = shrunk_mean(wanted[name] - means[name])
            found[name] = np.asarray(found[name] + change, np.float32)
            steps = quantize_bias(found[name], dequant_scales(records[name]))
            _put(stored[layers[name].layer.bias], steps)
            step()
    return found


def with_biases(model: onnx.ModelProto, graph: LayerGraph, biases: Biases) -> onnx.ModelProto:
    """A copy of the float model whose layers have these biases, each an initializer of its own."""
    from onnx import numpy_helper

    changed = copy_message(model)
    nodes = {node.name: node for node in changed.graph.node}
    taken = {*count_reads(model.graph), *(tensor.name for tensor in model.graph.initializer)}
    for name, values in biases.items():
        layer = graph.layers[name]
        own = unique_name(f"{name}.bias", taken)
        taken.add(own)
        changed.graph.initializer.append(numpy_helper.from_array(values, own))
        if layer.bias_add:
            add = nodes[layer.bias_add]
            add.input[list(add.input).index(layer.bias)] = own
        else:
            del nodes[name].input[2:]
            nodes[name].input.append(own)
    drop_unread(changed.graph)
    return changed


def _bias(index: Graph, layer: Layer) -> NDArray[np.float32]:
    """The bias of every output channel, [C_out]; zeros where there is none."""
    if layer.bias:
        return read_constant(index, layer.bias).reshape(-1)
    rows = to_rows(read_constant(index, layer.weight), layer)
    return np.zeros(len(rows), np.float32)


def _means(
    model: onnx.ModelProto, layers: Sequence[Layer], samples: Sequence[Sample], threads: int
) -> dict[str, NDArray[np.float64]]:
    """Layer -> the means of its output's channels, a row a sample: [samples, C_out]."""
    tapped = copy_with_outputs(model, [layer.output for layer in layers])
    session = OrtSession.open(tapped, threads=1, spin=False)
    rows: list[dict[str, NDArray[np.float64]]] = []

    def work(_: int, __: int, sample: Sample) -> dict[str, NDArray[np.float64]]:
        values = session.run(sample)
        return {layer.name: _channel_means(values[layer.output], layer) for layer in layers}

    run_in_order(samples, work, lambda _, row: rows.append(row), threads=threads)
    return {layer.name: np.stack([row[layer.name] for row in rows]) for layer in layers}


def _channel_means(value: Array, layer: Layer) -> NDArray[np.float64]:
    """A layer's output -> the means of its channels, [C_out]."""
    channels = np.moveaxis(value, layer.channel_axis, -1)
    means = channels.reshape(-1, channels.shape[-1]).mean(axis=0, dtype=np.float64)
    return np.asarray(means, np.float64)


def _put(tensor: onnx.TensorProto, steps: NDArray[np.int32]) -> None:
    """Let an initializer of a fake-quant model hold these integers, as floats."""
    from onnx import numpy_helper

    tensor.CopyFrom(numpy_helper.from_array(steps.astype(np.float32), tensor.name))
