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

The error of a search is that of each layer by itself: the int8 layer runs on the inputs that it has
in the float model, so that no error of another layer counts::

    float input -+-> layer in float --.
                 '-> layer in int8 ---+--> mean square of the difference, or
                                      '--> similarity, AMCT's ranking: 0.5 + 0.5 * cosine

Source of the ranking: hicann/amct, common/auto_calibration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto, helper

from deploy.calibration.taps import Tap
from deploy.errors import ConfigError
from deploy.feed.parallel import Sample, run_in_order
from deploy.graph.edit import copy_tensor, extract_nodes
from deploy.graph.index import Graph, names_of
from deploy.method import Choices
from deploy.metrics.output_errors import cosine
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.amct_calibration import CalibrationRecord, RecordPlan
from deploy.targets.ascend.config_keys import ActivationParams, QuantConfig
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import LayerGraph
from deploy.targets.ascend.quant_layer import (
    QuantLayer,
    QuantLayers,
    quantize_fitting_layers,
)
from deploy.targets.ascend.record import (
    Records,
)
from deploy.tensors import Array
from deploy.terminal import phase

DEFAULT_SEARCH, _UNCLIPPED_SEARCH, _HFMG = "as configured", "nothing clipped", "hfmg"
UNCLIPPED_METHOD = "minmax"  # name of the method without clipping in a plan
_IFMR_CHANGES: dict[str, dict[str, Any]] = {
    DEFAULT_SEARCH: {},
    _UNCLIPPED_SEARCH: {"search_range": (1.0, 1.3)},
    "percentile 0.9999": {"max_percentile": 0.9999, "min_percentile": 0.9999},
}
_DMQ_STRENGTHS = {f"dmq {strength}": strength for strength in (0.2, 0.5, 0.8)}
_DMQ_SAMPLES = 32  # kept in memory while they are run twice
SEARCHES = (*_IFMR_CHANGES, _HFMG, *_DMQ_STRENGTHS)

_MAX_DMQ_ERROR = 0.5  # relative to the error without DMQ, which is one operator more on the NPU


def chosen_searches(plan: RecordPlan, choices: Choices) -> dict[str, str]:
    """Return layer name -> the search chosen for it, for layers with another than the default one.

    Args:
        plan: the calibration with the default search, which has all layers.
        choices: choose searches in two ways. A range method is for the layers that read a tensor,
            or for all; Ascend has only "minmax", which is IFMR (AMCT's search) without clipping.
            The name of a search is for one layer, and counts more than a range method.

    Raises:
        ConfigError: a range method other than "minmax".
    """
    for method in (choices.method, *choices.methods.values()):
        if method is not None and method.name != UNCLIPPED_METHOD:
            raise ConfigError(
                f"a plan for ascend takes the method {UNCLIPPED_METHOD} or none, got"
                f" {method.label!r}; delete the line, or delete the file to have it rebuilt"
            )
    settings_by_layer = plan.config.enabled_entries()
    search_by_layer = {}
    for name, layer in plan.layers.items():
        has_method = choices.method is not None or layer.input in choices.methods
        uses_ifmr = settings_by_layer[name].activation.act_algo == "ifmr"  # HFMG always clips
        if has_method and uses_ifmr:
            search_by_layer[name] = _UNCLIPPED_SEARCH
    for name, search in choices.searches.items():
        if search != DEFAULT_SEARCH:
            search_by_layer[name] = search
    return search_by_layer


def merge_records(
    plan: RecordPlan,
    default_calibration: CalibrationRecord,
    calibration_by_search: Mapping[str, CalibrationRecord],
    search_by_layer: Mapping[str, str],
) -> CalibrationRecord:
    """Return the scales of all layers, by the default search or the one chosen for a layer.

    Whether a layer's input is zero is taken from the default search.

    Args:
        plan: the calibration, with all layers and the observations of their inputs.
        default_calibration: result of the default search for all layers.
        calibration_by_search: search -> its result for all layers.
        search_by_layer: name of a layer -> the search chosen for it.
    """
    records = dict(default_calibration.records)
    ranges = dict(default_calibration.ranges)
    for name, observation in (*plan.first_inputs.items(), *plan.second_inputs.items()):
        if name not in search_by_layer:
            continue
        calibration = calibration_by_search[search_by_layer[name]]
        records[name] = calibration.records[name]
        # a search with DMQ has no range of this tensor, since it observes the balanced one
        tensor = observation.tensor
        ranges[tensor] = calibration.ranges.get(tensor, ranges[tensor])
    # as in AMCT's record file, the layers that DMQ balances come first
    names = sorted(records, key=lambda name: not records[name].dmq_factors.size)
    records = {name: records[name] for name in names}
    return replace(default_calibration, records=records, ranges=ranges)


def uses_dmq(search: str) -> bool:
    """Whether a search balances channels by DMQ."""
    return search in _DMQ_STRENGTHS


def count_dmq_samples(plan: RecordPlan) -> int:
    """Return the number of samples from which DMQ's channel maxima are computed.

    That is AMCT's first batch if it has several samples, else up to `_DMQ_SAMPLES` samples.
    """
    if plan.samples_per_batch > 1:
        return plan.samples_per_batch
    return min(plan.samples, _DMQ_SAMPLES)


def apply_searches(config: QuantConfig, search_by_layer: Mapping[str, str]) -> QuantConfig:
    """Return the config that makes AMCT quantize these layers by these searches, and no others.

    A search is the name of a way to a layer's scales, one of `SEARCHES`, such as "dmq 0.5".

    `search_by_layer`: layer name, or '<node>:<index>' of a tensor_quantize input -> its search.
    """
    layers = {}
    for name, settings in config.layers.items():
        search = search_by_layer.get(name)
        if search is None:
            layers[name] = replace(settings, quant_enable=False)
        elif uses_dmq(search):
            layers[name] = replace(settings, dmq_balancer_param=_DMQ_STRENGTHS[search])
        else:
            activation = _with_search(settings.activation, search)
            layers[name] = replace(settings, activation=activation)
    tensors = {}
    for key, activation in config.tensors.items():
        if key in search_by_layer:
            tensors[key] = _with_search(activation, search_by_layer[key])
    return replace(config, layers=layers, tensors=tensors)


def _with_search(params: ActivationParams, search: str) -> ActivationParams:
    """Return activation settings in which a search replaces the algorithm or its parameters."""
    if search == _HFMG:
        return ActivationParams(act_algo="hfmg", asymmetric=params.asymmetric)
    return replace(params, **_IFMR_CHANGES[search])


def make_search_plan(default: RecordPlan, search: str) -> RecordPlan:
    """Return the calibration plan that finds the scales of all layers by one search.

    A search "dmq ..." balances an input with its weight. Layers without a weight have the default
    search in its place.

    Args:
        default: plan of the default search.
        search: one of `SEARCHES`.
    """
    if search == DEFAULT_SEARCH:
        return default
    plan = default
    search_by_layer = dict.fromkeys(default.layers, search)
    if uses_dmq(search):  # a layer that cannot be balanced gets factors of 1, no error
        plan = replace(default, dmq_samples=count_dmq_samples(default), allow_unbalanced=True)
        for name, layer in default.layers.items():
            if not layer.weight:  # DMQ moves factors from the input into the weight
                search_by_layer[name] = DEFAULT_SEARCH
    return replace(plan, config=apply_searches(default.config, search_by_layer))


def rank_layers(
    model: onnx.ModelProto, layers: QuantLayers, samples: Sequence[Sample], *, threads: int
) -> list[tuple[str, float]]:
    """Return (layer name, similarity in [0, 1]) of all layers, worst first; ties in model order.

    Raises:
        BackendError: ONNX Runtime refused a model.
    """
    similarities = compare_outputs(similarity, model, layers, samples, threads=threads)
    return sorted(similarities.items(), key=lambda entry: entry[1])


def similarity(float_output: Array, int8_output: Array) -> float:
    """Return 0.5 + 0.5 * cosine; 1 if the original is all zero, 0 if only the other is."""
    if not float_output.any():
        return 1.0
    return 0.5 + 0.5 * cosine(float_output, int8_output) if int8_output.any() else 0.0


def find_best_searches(
    model: onnx.ModelProto,
    graph: LayerGraph,
    records_by_search: Mapping[str, Records],
    samples: Sequence[Sample],
    *,
    threads: int,
) -> dict[str, str]:
    """Return layer name -> the search with the smallest error of the layer's output.

    A search is a way to a layer's scales, one of `SEARCHES`, such as "hfmg". Each int8 layer runs
    on the inputs that it has in the float model, so that errors of other layers do not count.
    Layers that do not fit the hardware with the default search are left out.

    Args:
        model: the float model.
        graph: its layers.
        records_by_search: search -> layer -> its scales. The default search has all layers.
        samples: input name -> array, for each sample.
        threads: number of samples that run at a time.

    Raises:
        BackendError: ONNX Runtime refused the model.
    """
    errors_by_layer: dict[str, dict[str, float]] = {}
    search_count = len(records_by_search)
    with phase("errors of layers by themselves", search_count, "searches") as count_search:
        for search, search_records in records_by_search.items():
            layers, _ = quantize_fitting_layers(model, graph, search_records)
            layer_errors = compare_outputs(
                mean_square_error, model, layers, samples, threads=threads
            )
            for name, error in layer_errors.items():
                errors_by_layer.setdefault(name, {})[search] = error
            count_search()
    # a layer without an error by the default search does not fit the hardware with its scales. It
    # stays in float, also if it fits with those of another search
    return {
        name: choose_search(error_by_search)
        for name, error_by_search in errors_by_layer.items()
        if DEFAULT_SEARCH in error_by_search
    }


def choose_search(error_by_search: Mapping[str, float]) -> str:
    """Return the search of least error.

    One that balances channels by DMQ costs an operator more: it is returned only if its error is
    less than half (`_MAX_DMQ_ERROR`) of the least error of the others.
    """
    unbalanced = [search for search in error_by_search if not uses_dmq(search)]
    best_unbalanced_search = min(unbalanced, key=error_by_search.__getitem__)
    best_search = min(error_by_search, key=error_by_search.__getitem__)
    if error_by_search[best_search] < _MAX_DMQ_ERROR * error_by_search[best_unbalanced_search]:
        return best_search
    return best_unbalanced_search


def mean_square_error(float_output: Array, int8_output: Array) -> float:
    """Return the mean square of the difference of two outputs."""
    difference = (int8_output - float_output).astype(np.float64)
    return float(np.mean(difference**2))


def compare_outputs(
    compare: Callable[[Array, Array], float],
    model: onnx.ModelProto,
    layers: QuantLayers,
    samples: Sequence[Sample],
    *,
    threads: int,
) -> dict[str, float]:
    """Return layer name -> the mean over samples of `compare(float output, int8 output)`.

    Each int8 layer runs alone, as a model of its own, on the inputs that the layer has in the float
    model.

    Args:
        compare: takes both outputs of a layer.
        model: the float model.
        layers: layer name -> its integers and scales.
        samples: input name -> array, for each sample.
        threads: number of samples that run at a time.

    Raises:
        BackendError: ONNX Runtime refused a model.
    """
    index = Graph(model)
    session_by_layer = {
        name: _open_int8_layer(model, index, quant_layer) for name, quant_layer in layers.items()
    }
    # a tap runs the float model and returns inner tensors: the inputs and outputs of all layers,
    # but for the model's own inputs, which are in the sample
    tapped_tensors: set[str] = set()
    for quant_layer in layers.values():
        tapped_tensors.update((quant_layer.layer.output, *quant_layer.layer.activations))
    tap = Tap(model, sorted(tapped_tensors - names_of(model.graph.input)))
    results_of_samples: list[dict[str, float]] = []

    def run_sample(_worker: int, _number: int, sample: Sample) -> dict[str, float]:
        """Return layer name -> the result of `compare` on one sample."""
        float_tensors = {**sample, **tap.run(sample)}
        sample_results = {}
        for name, quant_layer in layers.items():
            layer = quant_layer.layer
            inputs = {tensor: float_tensors[tensor] for tensor in layer.activations}
            int8_output = session_by_layer[name].run(inputs)[layer.output]
            sample_results[name] = compare(float_tensors[layer.output], int8_output)
        return sample_results

    def collect(_number: int, sample_results: dict[str, float]) -> None:
        """Add the results of a sample to those of all samples."""
        results_of_samples.append(sample_results)

    run_in_order(samples, run_sample, collect, threads=threads)
    mean_results = {}
    for name in layers:
        mean_results[name] = float(np.mean([results[name] for results in results_of_samples]))
    return mean_results


def _open_int8_layer(model: onnx.ModelProto, index: Graph, quant_layer: QuantLayer) -> OrtSession:
    """Return a session of a model that holds one int8 layer, with the Add of a MatMul's bias.

    Its inputs and outputs have the names that they have in the float model.

    Args:
        model: the float model.
        index: has its constants.
        quant_layer: the layer's integers and scales.
    """
    layer = quant_layer.layer
    nodes = [node for node in model.graph.node if node.name in (layer.node, layer.bias_add)]
    inputs = [
        helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None)
        for tensor in dict.fromkeys(layer.activations)
    ]
    outputs = [ValueInfoProto(name=layer.output)]
    float_layer = extract_nodes(model, nodes, (), inputs=inputs, outputs=outputs)
    read_tensors = {name for node in nodes for name in node.input}
    for name in sorted(read_tensors & index.constants.keys()):
        float_layer.graph.initializer.append(copy_tensor(index.constants[name], name))
    int8_layer = fake_quant_model(float_layer, {layer.name: quant_layer})
    return OrtSession.open(int8_layer, threads=1, spin=False)
