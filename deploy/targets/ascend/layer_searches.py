"""Searches of a layer's range and factors, of which each layer may have its own.

All are settings of AMCT's own configuration, and all are computed from one pass over the samples::

    as configured        IFMR over 0.7 to 1.3 of the maximum, where no configuration is given
    nothing clipped      IFMR over 1.0 to 1.3
    percentile 0.9999    IFMR of that percentile in place of 0.999999
    hfmg                 HFMG
    dmq 0.2, 0.5, 0.8    as configured, the input's channels balanced with the weight's (DMQ), for
                         one multiplication more on the NPU

`Choices.searches` names the search of each layer. With a configuration of the user there is only
what it says.

Each layer by itself: its int8 twin on the float model's own input of it.

::

    float input -+-> layer in float --.
                 '-> layer in int8 ---+--> similarity, AMCT's ranking: 0.5 + 0.5 * cosine
                                      '--> error: variance of the difference, summed over channels

No error of another layer counts. The mean of a channel's difference is no error, since its bias can
hold it. Source of the ranking: hicann/amct, common/auto_calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from deploy.calibration.taps import Tap
from deploy.feed.parallel import Sample, run_in_order
from deploy.graph.edit import copy_message
from deploy.graph.index import Graph
from deploy.metrics.output_errors import cosine
from deploy.targets.ascend.config_keys import ActivationParams, LayerConfig, QuantConfig
from deploy.targets.ascend.quant_layer import QuantLayer, quantize_layers
from deploy.targets.ascend.target import Ascend
from deploy.tensors import Array
from deploy.terminal import phase

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.observation import CalibrationSubject, Observation
    from deploy.targets.ascend.amct_calibration import CalibrationRecord, RecordPlan
    from deploy.targets.ascend.layers import Layer, LayerGraph
    from deploy.targets.ascend.record import LayerRecord
    from deploy.targets.base import BuildRequest

Found = TypeVar("Found")
Records = Mapping[str, "LayerRecord"]

CONFIGURED = "as configured"
_RANGES: dict[str, Callable[[ActivationParams], ActivationParams]] = {
    CONFIGURED: lambda found: found,
    "nothing clipped": lambda found: replace(found, search_range=(1.0, 1.3)),
    "percentile 0.9999": lambda found: replace(found, max_percentile=0.9999, min_percentile=0.9999),
    "hfmg": lambda found: replace(ActivationParams(), act_algo="hfmg", asymmetric=found.asymmetric),
}
_BALANCED = {f"dmq {strength}": strength for strength in (0.2, 0.5, 0.8)}
_BALANCED_OVER = 32  # samples, kept in memory while they are run twice


@dataclass(frozen=True, kw_only=True)
class AscendSearching(Ascend):
    """The Ascend target with a search for each layer, by `Choices.searches`."""

    several: bool = True

    def demand(self, subject: CalibrationSubject) -> tuple[Observation, ...]:
        """Return the observations of all searches."""
        wanted = (o for plan in self._plans(subject).values() for o in plan.observations)
        return tuple({o.key: o for o in wanted}.values())

    def records(self, request: BuildRequest) -> dict[str, Records]:
        """Return search -> records of all layers, the default first; DMQ's of those it changes."""
        return self._searched(request)[1]

    def _searched(self, request: BuildRequest) -> tuple[RecordPlan, dict[str, Records]]:
        def make() -> tuple[onnx.ModelProto, RecordPlan, dict[str, Records]]:
            plans, observed = self._plans(request.subject), request.ranges.observed
            found = {how: plan.record(observed).records for how, plan in plans.items()}
            changed = {how: _changed(how, own) for how, own in found.items()}
            return request.model, plans[CONFIGURED], changed

        key = self, id(request.model), "searches"  # the entry holds the model of this id
        return request.ranges.once(key, make)[1:]

    def _recorded(self, request: BuildRequest) -> tuple[RecordPlan, CalibrationRecord, QuantConfig]:
        from deploy.targets.ascend.amct_calibration import CalibrationRecord

        plan, records = self._searched(request)
        chosen = {name: request.choices.searches.get(name, CONFIGURED) for name in plan.layers}
        own = {name: records[how][name] for name, how in chosen.items()}
        return plan, CalibrationRecord(records=own), config_of(plan.config, chosen)

    def _plans(self, subject: CalibrationSubject) -> dict[str, RecordPlan]:
        own = self.record_plan(subject)
        several = self.several and self.config is None
        others = (*_RANGES, *_BALANCED) if several else ()
        return {CONFIGURED: own, **{how: _plan(own, how) for how in others if how != CONFIGURED}}


def is_balanced(search: str) -> bool:
    """Whether a search balances channels by DMQ."""
    return search in _BALANCED


def balanced_over(plan: RecordPlan) -> int:
    """Return the samples of which DMQ takes the maxima: AMCT's first batch, if it is several."""
    return plan.together if plan.together > 1 else min(plan.samples, _BALANCED_OVER)


def config_of(config: QuantConfig, chosen: Mapping[str, str]) -> QuantConfig:
    """Return the config in which the layers of `chosen` have their searches, the others none."""
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


def _plan(own: RecordPlan, how: str) -> RecordPlan:
    chosen = {
        name: CONFIGURED if is_balanced(how) and not layer.weight else how
        for name, layer in own.layers.items()
    }
    config = config_of(own.config, chosen)
    return replace(own, config=config, balanced_over=balanced_over(own), lenient=True)


def _changed(how: str, records: Records) -> Records:
    """Return the records that a search gives; of DMQ those with a factor other than 1."""
    return {
        name: record
        for name, record in records.items()
        if not is_balanced(how) or (record.factors.size and (record.factors != 1).any())
    }


def _layer(one: LayerConfig, how: str) -> LayerConfig:
    if is_balanced(how):
        return replace(one, dmq_balancer_param=_BALANCED[how])
    return replace(one, activation=_activation(one.activation, how))


def _activation(one: ActivationParams, how: str) -> ActivationParams:
    return _RANGES[how](one)


_WORTH_A_MUL = 0.5  # DMQ is one operator more on the NPU, so it must halve the error


def rank_layers(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    samples: Sequence[Sample],
    *,
    threads: int,
) -> list[tuple[str, float]]:
    """Return (layer, similarity in [0, 1]) of every layer, worst first; ties in model order."""
    runs = _compared(model, layers, samples, lambda _, a, b: similarity(a, b), threads)
    means = {name: float(np.mean([run[name] for run in runs])) for name in layers}
    return sorted(means.items(), key=lambda entry: entry[1])


def similarity(original: Array, fake: Array) -> float:
    """Return 0.5 + 0.5 * cosine; 1 if the original is all zero, 0 if only the other is."""
    if not original.any():
        return 1.0
    return 0.5 + 0.5 * cosine(original, fake) if fake.any() else 0.0


def nearest_searches(
    model: onnx.ModelProto,
    graph: LayerGraph,
    records: Mapping[str, Records],
    samples: Sequence[Sample],
    *,
    threads: int,
) -> dict[str, str]:
    """Return layer -> the search with the smallest error of the layer by itself.

    `records`: search -> records; the first has all layers.

    Raises:
        ExportError: a layer exceeds the limits of the hardware.
        BackendError: ONNX Runtime refused the model.
    """
    errors: dict[str, dict[str, float]] = {}
    with phase("errors of layers by themselves", len(records), "searches") as step:
        for how, own in records.items():
            layers = quantize_layers(model, graph, own)
            for name, error in own_errors(model, layers, samples, threads=threads).items():
                errors.setdefault(name, {})[how] = error
            step()
    return {name: _best(errors[name]) for name in next(iter(records.values()))}


def _best(errors: Mapping[str, float]) -> str:
    """Return the search of least error; a balanced one only if it is worth its operator."""
    plain = min((how for how in errors if not is_balanced(how)), key=errors.__getitem__)
    least = min(errors, key=errors.__getitem__)
    return least if errors[least] < _WORTH_A_MUL * errors[plain] else plain


def own_errors(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    samples: Sequence[Sample],
    *,
    threads: int,
) -> dict[str, float]:
    """Return layer -> variance of the error of its output, summed over its channels.

    Of a layer that has no bias, which could hold a mean, it is the mean square.
    """
    runs = _compared(model, layers, samples, _moments, threads)
    means = {name: np.mean([run[name] for run in runs], axis=0) for name in layers}
    return {
        name: float((square - mean**2 * layers[name].layer.holds_bias).sum())
        for name, (mean, square) in means.items()
    }


def _moments(layer: Layer, original: Array, fake: Array) -> Array:
    """Return mean and mean square of each channel's difference, float64 [2, C]."""
    difference = fake - original
    channels = (
        difference if difference.ndim < 2 else np.moveaxis(difference, layer.channel_axis, -1)
    )
    rows = channels.reshape(-1, channels.shape[-1]).astype(np.float64)
    return np.stack([rows.mean(axis=0), (rows * rows).mean(axis=0)])


def _compared(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    samples: Sequence[Sample],
    measure: Callable[[Layer, Array, Array], Found],
    threads: int,
) -> list[dict[str, Found]]:
    """Return layer -> measure(layer, float output, output of its int8 twin) for each sample."""
    ends = {name: (one.layer.output, f"{name}.isolated") for name, one in layers.items()}
    tap = Tap(
        isolated_model(model, layers), sorted({end for pair in ends.values() for end in pair})
    )
    runs: list[dict[str, Found]] = []

    def work(_: int, __: int, sample: Sample) -> dict[str, Found]:
        values = dict(tap.run(sample))
        return {
            name: measure(layers[name].layer, values[own], values[twin])
            for name, (own, twin) in ends.items()
        }

    run_in_order(samples, work, lambda _, run: runs.append(run), threads=threads)
    return runs


def isolated_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """Return the float model with, beside each layer, its fake-quantized twin on the same input.

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
    """Return a model of one layer only, with the Add of a MatMul's bias."""
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
