"""Existing files of an Ascend deployment: recipes from a record or TensorRT cache, and file checks.

Weight scales depend on whether a BatchNormalization was folded into its layer when they were made.
The model is brought to the same form: folded, unless the record (skip_fusion), the configuration
(do_fusion, skip_fusion_layers) or the scales themselves show otherwise.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from calibrators.amct.arq import arq
from calibrators.grids import Float32Array
from deploy.calibration.observation import CalibrationSubject
from deploy.errors import CacheError, ConfigError, ModelError, counted, list_first
from deploy.files.reading import read_text
from deploy.frontends import load
from deploy.frontends.onnx_reader import read_model
from deploy.graph.index import Graph, attributes, describe_node
from deploy.graph.placement import ASCEND
from deploy.targets.ascend.amct_calibration import RecordPlan
from deploy.targets.ascend.config import default_config, read_config, resolve_config
from deploy.targets.ascend.config_keys import QuantConfig
from deploy.targets.ascend.deploy_model import unpack_dequant_scales
from deploy.targets.ascend.executor import malformed_as_model_error, to_standard_model
from deploy.targets.ascend.layers import Layer, LayerGraph
from deploy.targets.ascend.models import is_fusion_mapping
from deploy.targets.ascend.preparation import disable_layers, prepare_model, unfuse_batchnorms
from deploy.targets.ascend.proto import parse_text, suggest_name
from deploy.targets.ascend.quant_layer import (
    quantize_fitting_layers,
    quantize_layers,
    read_constant,
    read_weight_rows,
)
from deploy.targets.ascend.recipe import Recipe
from deploy.targets.ascend.record import (
    LayerRecord,
    Records,
    describe_ignored_entries,
    read_record,
)
from deploy.targets.ascend.simple_config import read_simple_config
from deploy.targets.tensorrt.cache_match import match_cache
from deploy.targets.tensorrt.cache_tools import read_cache

_FILE_KIND = "a text file of an Ascend deployment"


def read_any_config(path: Path, graph: LayerGraph) -> QuantConfig:
    """Read a quant config JSON or a simplified configuration; suffix or first "{" decides which.

    Raises:
        ConfigError: the file cannot be read or breaks a rule.
    """
    text = read_text(path, what=_FILE_KIND, error=ConfigError)
    if _is_json(path, text):
        if is_fusion_mapping(text):
            raise ConfigError(_mapping_message(path))
        return resolve_config(read_config(text, str(path)), graph)
    return read_simple_config(text, graph, str(path))


def _mapping_message(path: Path) -> str:
    """Return the error for a fusion mapping in place of a config; a build writes both files."""
    name = path.name.removesuffix("_quant.json")
    config = "the X_config.json of the same build"
    if name != path.name:
        config = f"{path.with_name(f'{name}_config.json')}, which the same build writes"
    return (
        f"a configuration must hold settings of layers, got a fusion mapping, {path}; give {config}"
    )


def _is_json(path: Path, text: str) -> bool:
    """Whether a configuration file is JSON: by its name or its first character."""
    return path.suffix == ".json" or text.lstrip().startswith("{")


def check_file(path: Path | str, subject: CalibrationSubject | None = None) -> str:
    """Check any file that `calib8 build --target ascend` writes; return a sentence on its content.

    `subject`: the float model that the file is for; without it names of layers are not checked.

    Raises:
        ConfigError, ModelError: the file is invalid.
        ExportError: a scale or bias of a record exceeds the limits of the hardware.
    """
    path = Path(path)
    if path.suffix == ".onnx":
        return check_deploy_model(path, subject)
    graph = None  # the layers of the float model
    if subject is not None:
        _, graph = prepare_model(subject.model)
    text = read_text(path, what=_FILE_KIND, error=ConfigError)
    if _is_json(path, text):
        if is_fusion_mapping(text):
            return "a fusion mapping, by which CANN's accuracy comparison pairs nodes"
        config = read_config(text, str(path))
        if graph is not None:
            config = resolve_config(config, graph)
        return f"a sound quant config, {_describe_config(config)}"

    # any other file is protobuf text; the first field after comments shows of which message
    first_word = re.search(r"^\s*(\w+|[^\s#])", text, re.MULTILINE)
    first_field = first_word[1] if first_word else ""
    if first_field in ("record", "prune_record"):
        return _check_record_text(text, path, subject)
    if first_field in ("aipp_op", "multi_shape_op"):
        parse_text("InsertNewOps", text, str(path))
        return "an AIPP configuration that parses; atc checks its values"
    if graph is not None:
        config = read_simple_config(text, graph, str(path))
        return f"a sound simplified configuration, {_describe_config(config)}"
    parse_text("AMCTConfig", text, str(path))
    return "a simplified configuration that parses; --model checks its layers"


def _check_record_text(text: str, path: Path, subject: CalibrationSubject | None) -> str:
    """Check a record, if the model is given by deploying it; describe it."""
    records = read_record(text, str(path))
    ignored = describe_ignored_entries(text, str(path))
    alerts = () if subject is None else recipe_from_record(subject, path).alerts
    input_count = sum(record.is_node_input for record in records.values())
    description = f"a sound record of {counted(len(records) - input_count, 'layer')}"
    if input_count:
        description += f" and {counted(input_count, 'input')} of tensor_quantize"
    if ignored:
        description += f"; calib8 does not deploy the rest: {', '.join(ignored)}"
    return ". ".join([description, *alerts])


def _describe_config(config: QuantConfig) -> str:
    """Describe how much a config quantizes, and which of its settings have no effect."""
    counts = _describe_quantized_counts(len(config.enabled_layers()), len(config.tensors), "int8")
    return ". ".join([counts, *config.notes]).rstrip(".")


def _describe_quantized_counts(layers: int, inputs: int, types: str) -> str:
    """Describe the number of quantized layers and inputs."""
    text = f"{counted(layers, 'layer')} in {types}"
    return f"{text}, {counted(inputs, 'input')} moved in int8" if inputs else text


def check_deploy_model(path: Path, subject: CalibrationSubject | None) -> str:
    """Check a deploy model's AscendQuant and AscendDequant nodes by ATC's rules; describe it.

    `subject`: the float model, which must have the layers; None if it is not known.

    Raises:
        ModelError: not an ONNX file, no quantized layer, an invalid one, or one of another model.
    """
    model = read_model(path)
    op_counts = Counter(node.op_type for node in model.graph.node)
    quant_count = op_counts["AscendQuant"]
    dequant_count = op_counts["AscendDequant"]
    anti_quant_count = op_counts["AscendAntiQuant"]
    if not quant_count or not dequant_count + anti_quant_count:
        raise ModelError(
            f"{path} must have AscendQuant and AscendDequant nodes, got {quant_count} and"
            f" {dequant_count + anti_quant_count}; give the deploy model"
        )
    constants = Graph(model).initializers
    with malformed_as_model_error():
        for node in model.graph.node:
            if node.op_type == "AscendDequant":
                _check_parameter(node, constants)
    if subject is not None:
        _refuse_other_layers(model, subject)
    to_standard_model(model)  # raises ModelError for a layer that it cannot express
    integer_types = set()
    for node in model.graph.node:
        if node.op_type == "AscendQuant":
            integer_types.add(attributes(node).get("dst_type", b"INT8").decode().lower())
    type_names = " and ".join(sorted(integer_types, key=lambda name: int(name[3:])))  # int8: 8
    counts = _describe_quantized_counts(dequant_count, anti_quant_count, type_names)
    return f"a sound deploy model, {counts}"


def _refuse_other_layers(model: onnx.ModelProto, subject: CalibrationSubject) -> None:
    """Refuse a deploy model with a layer that the float model does not have."""
    ops = prepare_model(subject.model)[1].ops
    producer = Graph(model).producer
    for node in model.graph.node:
        layer = producer.get(node.input[0]) if node.op_type == "AscendDequant" else None
        if layer is not None and layer.name not in ops:
            raise ModelError(
                f"a deploy model must have layers of its float model, got {layer.name!r} of"
                f" another model; {suggest_name(layer.name, ops)}"
            )


def _check_parameter(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> None:
    """Check the packed parameter of an AscendDequant (see `deploy_model`)."""
    parameter = constants.get(node.input[-1])
    if parameter is None or parameter.data_type != onnx.TensorProto.UINT64 or len(node.input) != 2:
        raise ModelError(f"{describe_node(node)} must have a uint64 parameter as its second input")
    values = numpy_helper.to_array(parameter)
    scales = unpack_dequant_scales(values)
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise ModelError(
            f"{describe_node(node)} must have finite scales above 0, got {scales.min()}"
        )
    if (values >> np.uint64(40)).any():
        raise ModelError(f"{describe_node(node)} must have offset_w 0, got another")


def recipe_from_record(
    subject: CalibrationSubject, path: Path, *, config: Path | None = None
) -> Recipe:
    """Return the recipe (model, scales, integers) of a build from AMCT's record file.

    Args:
        subject: the user's model, as it was loaded.
        path: the record, the text file of scales and offsets that AMCT's calibration writes.
        config: quant config or simplified configuration of that calibration; it decides which
            BatchNormalizations are folded, and is written again without the layers that the record
            lacks. None if there is none.

    Raises:
        ConfigError: a file that cannot be read, breaks a rule, or belongs to another model.
        ExportError: a scale or bias exceeds the limits of the hardware.
    """
    text = read_text(path, what="AMCT's record of scales", error=ConfigError)
    records = read_record(text, str(path))
    ignored = describe_ignored_entries(text, str(path))  # such as "2 x KV cache"
    if not records:
        raise ConfigError(
            f"a record to deploy must have a layer with its scales, got only {', '.join(ignored)}"
            f" in {path}; give the record of a calibration"
        )
    # with the same BatchNormalizations folded as when the record was made; the last result are the
    # layers into which calib8 would fold something, but by their scales nothing was folded
    model, graph, quant_config, unfolded_layers = _model_as_recorded(subject, records, config)
    layers = quantize_layers(model, graph, records)
    if quant_config is not None:
        enabled_names = quant_config.enabled_entries()
        _refuse_disabled(records, enabled_names)
        unrecorded_names = [name for name in enabled_names if name not in records]
        quant_config = disable_layers(quant_config, unrecorded_names)

    # A record made after AdaRound or a repair belongs to the modified model that was saved with it.
    # If the user gave the original model instead, the record's scales give wrong integers.
    layers_with_other_weights = _find_modified_layers(path, model, graph, records)
    unrecorded_layers = [name for name in graph.layers if name not in records]
    return Recipe(
        model=model,
        graph=graph,
        records=records,
        layers=layers,
        config=quant_config,
        method="a record",
        float_reasons=dict.fromkeys(unrecorded_layers, "the record has no scales for it"),
        notes=tuple(_record_notes(path, unfolded_layers, ignored)),
        alerts=_other_weights_alert(layers_with_other_weights),
    )


def _find_modified_layers(
    record_path: Path, model: onnx.ModelProto, graph: LayerGraph, recorded_names: Collection[str]
) -> list[str]:
    """Return the layers whose weight or bias differs in the modified model beside a record.

    The modified model is the float model that the record was made for. A build writes it if that is
    not the user's own model: AdaRound or a repair changed weights, or shared ones were copied.
    Without such a file the result is [].

    Args:
        record_path: the record's file.
        model: the model that the user gave, in which each layer has a weight of its own.
        graph: its layers.
        recorded_names: names of the layers in the record.
    """
    model_name = record_path.name.removesuffix("_record.txt")
    modified_path = record_path.with_name(f"{model_name}_modified_model.onnx")
    if not modified_path.is_file():
        return []

    modified_model, modified_graph = prepare_model(load(modified_path).model)
    index = Graph(model)
    modified_index = Graph(modified_model)
    layer_names = []
    for layer_name in recorded_names:
        layer = graph.layers.get(layer_name)
        modified_layer = modified_graph.layers.get(layer_name)
        if layer is None or modified_layer is None:
            continue
        constants = _read_layer_constants(layer, index)
        modified_constants = _read_layer_constants(modified_layer, modified_index)
        if not all(map(np.array_equal, constants, modified_constants)):
            layer_names.append(layer_name)
    return layer_names


def _read_layer_constants(layer: Layer, index: Graph) -> tuple[Float32Array, Float32Array]:
    """Return weight and flat bias of a layer, [] where it has none."""
    weight = bias = np.zeros(0, np.float32)
    if layer.weight:
        weight = read_constant(index, layer.weight)
    if layer.bias:
        bias = read_constant(index, layer.bias).reshape(-1)
    return weight, bias


def _other_weights_alert(layer_names: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence on layers whose constants were changed before a record was made."""
    if not layer_names:
        return ()
    return (
        f"Weights or biases of {counted(len(layer_names), 'layer')} ({list_first(layer_names, 3)})"
        " were changed before the record was made, by AdaRound or a repair, and the given model has"
        " its own: give the _modified_model.onnx that was written with the record",
    )


def _record_notes(
    path: Path, unfolded_layers: Collection[str], ignored: Collection[str]
) -> Iterator[str]:
    """Yield notes on a record: how it was used, and which entries could not be.

    Args:
        path: the record.
        unfolded_layers: layers into which, by their scales, nothing was folded.
        ignored: descriptions of entries that are not deployed.
    """
    yield f"Scales: {path}, unchanged; nothing was calibrated."
    if unfolded_layers:
        yield (
            "By its scales, the record was made before anything was folded into these layers, so"
            f" what follows them stays apart: {', '.join(unfolded_layers)}."
        )
    if ignored:
        yield f"Entries of the record that were not deployed: {', '.join(ignored)}."


def recipe_from_cache(subject: CalibrationSubject, path: Path) -> Recipe:
    """Return the recipe (model, scales, integers) of a build from a TensorRT calibration cache.

    The cache has symmetric scales of the activations. The weights' scales come from ARQ, AMCT's
    search that needs nothing but the weights.

    Args:
        subject: the user's model, as it was loaded.
        path: the cache.

    Raises:
        CacheError: the file cannot be read, or has no usable scale for any layer of the model.
        ConfigError: the model has no layer that Ascend quantizes.
    """
    cache = read_cache(path)
    model, graph = prepare_model(subject.model)
    # match.scales: tensor -> its scale in the cache
    match = match_cache(cache, subject.model, original=subject.original, placement=ASCEND)
    # a calibration plan only for ARQ: no sample runs through it
    config = default_config(graph, activation_offset=False)
    plan = RecordPlan(model=model, graph=graph, config=config, model_key="", samples=1)
    # the default config uses neither DMQ (factors) nor AdaRound (roundings)
    weight_scales = plan.compute_weight_scales(dmq_factors={}, roundings={})
    records = {}
    for name, layer in graph.layers.items():
        if layer.input in match.scales:
            records[name] = LayerRecord(
                scale_d=match.scales[layer.input],
                scale_w=weight_scales[name],
                has_weight=bool(layer.weight),
            )
    # refused are layers that exceed the hardware's limits
    quant_layers, reason_by_refused_layer = quantize_fitting_layers(model, graph, records)
    if not quant_layers:
        tensors = list(dict.fromkeys(layer.input for layer in graph.layers.values()))
        raise CacheError(
            f"a cache must have scales for the inputs of the model's layers, got a usable scale in"
            f" {path} for none of {len(tensors)} (such as {', '.join(tensors[:2])}); give the"
            " model's own cache (`calib8 cache check --model` tells more)"
        )

    unscaled_layers = [name for name in graph.layers if name not in records]
    float_reasons = dict.fromkeys(unscaled_layers, f"its input has no scale in {path.name}")
    return Recipe(
        model=model,
        graph=graph,
        records={name: records[name] for name in quant_layers},
        layers=quant_layers,
        method="ARQ, and a TensorRT cache",
        float_reasons=float_reasons | reason_by_refused_layer,
        notes=(
            f"Scales: {path} for {len(quant_layers)} of {counted(len(graph.layers), 'layer')},"
            " symmetric, without offset; weights by ARQ; nothing was calibrated.",
        ),
    )


def _model_as_recorded(
    subject: CalibrationSubject, records: Records, config_path: Path | None
) -> tuple[onnx.ModelProto, LayerGraph, QuantConfig | None, list[str]]:
    """Return the model with the same BatchNormalizations folded as when its record was made.

    These are all of them, unless the configuration, the record's entries or its scales show that
    one was not folded.

    Args:
        subject: the user's model, as it was loaded.
        records: layer name -> its entry in the record.
        config_path: the configuration of the calibration, or None.

    Returns:
        The float model, in which each layer has a weight of its own; its layers; the configuration,
        None without one; the layers into which, by the record's scales, nothing was folded.
    """
    model, graph = prepare_model(subject.model)
    config = None if config_path is None else read_any_config(config_path, graph)
    fusion_config = config or QuantConfig()  # by default all are folded
    unfolded_layers: list[str] = []  # layers whose scales show that nothing was folded into them
    if fusion_config.do_fusion:
        recorded_names = [name for name, record in records.items() if record.skip_fusion]
        skipped_names = (*fusion_config.skip_fusion_layers, *recorded_names)
        fusion_config = replace(fusion_config, skip_fusion_layers=skipped_names)
        unfolded_layers = _find_unfolded_layers(model, graph, subject.unfolded.model, records)
    if not fusion_config.do_fusion or fusion_config.skip_fusion_layers or unfolded_layers:
        model, graph = unfuse_batchnorms(subject, fusion_config, unfolded_layers=unfolded_layers)
        if config_path is not None:  # its checks depend on the form of the model
            config = read_any_config(config_path, graph)
    return model, graph, config, unfolded_layers


def _find_unfolded_layers(
    folded_model: onnx.ModelProto,
    folded_graph: LayerGraph,
    original_model: onnx.ModelProto,
    records: Records,
) -> list[str]:
    """Return the layers whose scales fit the weights before folding better than those after it.

    AMCT folds a BatchNormalization only into a Conv; calib8 also into ConvTranspose and Gemm, and
    constant Muls and Adds into all three. The scales show which tool made the record.

    Args:
        folded_model: the model after folding, in which each layer has a weight of its own.
        folded_graph: its layers.
        original_model: the model before folding.
        records: layer name -> its entry in the record.
    """
    unfolded_model, unfolded_graph = prepare_model(original_model)
    # the values of their constants
    folded_index = Graph(folded_model)
    unfolded_index = Graph(unfolded_model)
    names = []
    for name, record in records.items():
        # how far the record's scales are from those that ARQ finds for each model
        folded_distance = _scale_distance(folded_index, folded_graph.layers.get(name), record)
        unfolded_distance = _scale_distance(unfolded_index, unfolded_graph.layers.get(name), record)
        if folded_distance is None or unfolded_distance is None:  # not a layer of both models
            continue
        if unfolded_distance < folded_distance:
            names.append(name)
    return names


def _scale_distance(index: Graph, layer: Layer | None, record: LayerRecord) -> float | None:
    """Return how far a record's scales of a weight are from those that ARQ finds for the weight.

    That is the mean of |log2(scale / ARQ's scale)|. None if the layer has no weight, or if the
    record is for another number of channels.

    Args:
        index: lookups in the model, among them the weight's values.
        layer: the layer; None if the model has none of this name.
        record: its entry in the record.
    """
    if layer is None or not layer.weight:
        return None
    try:
        rows = read_weight_rows(index, layer, record.dmq_factors)
    except ValueError:  # DMQ factors for another number of channels
        return None
    scales = arq(rows, bits=record.weight_bits, channel_wise=record.scale_w.size > 1)
    if scales.size != record.scale_w.size:
        return None
    return float(np.abs(np.log2(record.scale_w / scales)).mean())


def _refuse_disabled(records: Iterable[str], enabled: Collection[str]) -> None:
    """Refuse a record of a layer that the configuration does not enable."""
    for name in records:
        if name not in enabled:
            raise ConfigError(
                f"a configuration must enable every layer of its record, got {name!r} disabled;"
                " take it out of the record, or enable it"
            )
