"""Searches of a layer's range and factors, of which each layer may have its own.

All are settings of AMCT's own configuration, and all are computed from one pass over the samples::

    as configured        IFMR over 0.7 to 1.3 of the maximum, where no configuration is given
    nothing clipped      IFMR over 1.0 to 1.3
    percentile 0.9999    IFMR of that percentile in place of 0.999999
    hfmg                 HFMG
    dmq 0.2, 0.5, 0.8    as configured, the input's channels balanced with the weight's (DMQ), for
                         one multiplication more on the NPU

IFMR tries ratios of the observed maximum (its percentile) and takes the one of least squared error,
which clips rare values of the calibration images. `calib8 build` tries it without clipping too;
`Choices.searches` names any search of a layer.

Each layer by itself: its int8 twin on the float model's own input of it.

::

    float input -+-> layer in float --.
                 '-> layer in int8 ---+--> similarity, AMCT's ranking: 0.5 + 0.5 * cosine
                                      '--> error: variance of the difference, summed over channels

No error of another layer counts. The mean of a channel's difference is no error, since its bias can
hold it. Source of the ranking: hicann/amct, common/auto_calibration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto, helper

from deploy.calibration.taps import Tap
from deploy.errors import ConfigError
from deploy.feed.parallel import Sample, run_in_order
from deploy.graph.edit import copy_tensor, extract_nodes
from deploy.graph.index import Graph
from deploy.method import Choices
from deploy.metrics.output_errors import cosine
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.amct_calibration import CalibrationRecord, RecordPlan
from deploy.targets.ascend.config_keys import ActivationParams, LayerConfig, QuantConfig
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import Layer, LayerGraph
from deploy.targets.ascend.quant_layer import QuantLayer, quantize_layers
from deploy.targets.ascend.record import LayerRecord
from deploy.tensors import Array
from deploy.terminal import phase

Found = TypeVar("Found")
Records = Mapping[str, "LayerRecord"]

CONFIGURED, _UNCLIPPED = "as configured", "nothing clipped"
UNCLIPPED_METHOD = "minmax"  # name of the method without clipping in a plan
_RANGES: dict[str, Callable[[ActivationParams], ActivationParams]] = {
    CONFIGURED: lambda found: found,
    _UNCLIPPED: lambda found: replace(found, search_range=(1.0, 1.3)),
    "percentile 0.9999": lambda found: replace(found, max_percentile=0.9999, min_percentile=0.9999),
    "hfmg": lambda found: replace(ActivationParams(), act_algo="hfmg", asymmetric=found.asymmetric),
}
_BALANCED = {f"dmq {strength}": strength for strength in (0.2, 0.5, 0.8)}
_BALANCED_OVER = 32  # samples, kept in memory while they are run twice
SEARCHES = (*_RANGES, *_BALANCED)


def chosen_searches(plan: RecordPlan, choices: Choices) -> dict[str, str]:
    """Return the search of each layer that has another than the default.

    `Choices.searches` names it; a method of `Choices` is that without clipping, for IFMR.
    """
    for method in filter(None, (choices.method, *choices.methods.values())):
        if method.name != UNCLIPPED_METHOD:
            raise ConfigError(
                f"a plan for ascend takes the method {UNCLIPPED_METHOD} or none, got"
                f" {method.label!r}; delete the line, or delete the file to have it rebuilt"
            )
    entries = plan.config.entries()
    unclipped = {
        name: _UNCLIPPED
        for name, layer in plan.layers.items()
        if (choices.methods.get(layer.input) or choices.method) is not None
        and entries[name].activation.act_algo == "ifmr"
    }
    own = {name: how for name, how in choices.searches.items() if how != CONFIGURED}
    return {**unclipped, **own}


def merge_records(
    plan: RecordPlan,
    default: CalibrationRecord,
    found: Mapping[str, CalibrationRecord],
    chosen: Mapping[str, str],
) -> CalibrationRecord:
    """Return `default` with the records and ranges of the searches chosen for some layers."""
    observations = (*plan.activations.items(), *plan.second_factors.items())
    by = {o.tensor: found[chosen[name]] for name, o in observations if name in chosen}
    return replace(
        default,
        records=default.records | {name: found[how].records[name] for name, how in chosen.items()},
        ranges={t: by.get(t, default).ranges.get(t, own) for t, own in default.ranges.items()},
    )


def is_balanced(search: str) -> bool:
    """Whether a search balances channels by DMQ."""
    return search in _BALANCED


def count_dmq_samples(plan: RecordPlan) -> int:
    """Return the samples of which DMQ takes the maxima: AMCT's first batch, if it is several."""
    return (
        plan.samples_per_batch if plan.samples_per_batch > 1 else min(plan.samples, _BALANCED_OVER)
    )


def apply_searches(config: QuantConfig, chosen: Mapping[str, str]) -> QuantConfig:
    """Return the config in which the layers of `chosen` have their searches, the others none."""
    layers = {
        name: _layer(one, chosen[name]) if name in chosen else replace(one, quant_enable=False)
        for name, one in config.layers.items()
    }
    tensors = (
        replace(one, activation=_RANGES[chosen[one.key]](one.activation))
        for one in config.tensors
        if one.key in chosen
    )
    return replace(config, layers=layers, tensors=tuple(tensors))


def make_search_plan(own: RecordPlan, how: str) -> RecordPlan:
    """Return the plan by which all layers are searched so; DMQ balances those with weights."""
    if how == CONFIGURED:
        return own
    chosen = {
        name: CONFIGURED if is_balanced(how) and not layer.weight else how
        for name, layer in own.layers.items()
    }
    made = replace(own, config=apply_searches(own.config, chosen))
    over = count_dmq_samples(own)
    return replace(made, dmq_samples=over, allow_unbalanced=True) if is_balanced(how) else made


def _layer(one: LayerConfig, how: str) -> LayerConfig:
    if is_balanced(how):
        return replace(one, dmq_balancer_param=_BALANCED[how])
    return replace(one, activation=_RANGES[how](one.activation))


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


def find_best_searches(
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
            for name, error in measure_layer_errors(
                model, layers, samples, threads=threads
            ).items():
                errors.setdefault(name, {})[how] = error
            step()
    return {name: _best(errors[name]) for name in next(iter(records.values()))}


def _best(errors: Mapping[str, float]) -> str:
    """Return the search of least error; a balanced one only if it is worth its operator."""
    plain = min((how for how in errors if not is_balanced(how)), key=errors.__getitem__)
    least = min(errors, key=errors.__getitem__)
    return least if errors[least] < _WORTH_A_MUL * errors[plain] else plain


def measure_layer_errors(
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
    own = {name: q.layer for name, q in layers.items()}
    fed = {value.name for value in model.graph.input}
    read = {name: (one.input, *one.other_inputs) for name, one in own.items()}
    ends = {one.output for one in own.values()}.union(*read.values())
    index = Graph(model)
    twins = {name: _twin(model, index, q) for name, q in layers.items()}
    tap, runs = Tap(model, sorted(ends - fed)), list[dict[str, Found]]()

    def work(_: int, __: int, sample: Sample) -> dict[str, Found]:
        values = {**sample, **dict(tap.run(sample))}
        found = {}
        for name, one in own.items():
            made = twins[name].run({tensor: values[tensor] for tensor in read[name]})
            found[name] = measure(one, values[one.output], made[one.output])
        return found

    run_in_order(samples, work, lambda _, run: runs.append(run), threads=threads)
    return runs


def _twin(model: onnx.ModelProto, index: Graph, q: QuantLayer) -> OrtSession:
    """Return the int8 form of a layer by itself, with the Add of a MatMul's bias."""
    wanted = {q.layer.node, q.layer.bias_add} - {""}
    nodes = [node for node in model.graph.node if node.name in wanted]
    read = {name for node in nodes for name in node.input}
    alone = extract_nodes(
        model,
        nodes,
        (),
        inputs=[
            helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None)
            for tensor in dict.fromkeys((q.layer.input, *q.layer.other_inputs))
        ],
        outputs=[ValueInfoProto(name=q.layer.output)],
    )
    constants = sorted(read & set(index.constants))
    alone.graph.initializer.extend(copy_tensor(index.constants[name], name) for name in constants)
    return OrtSession.open(fake_quant_model(alone, {q.layer.name: q}), threads=1, spin=False)
