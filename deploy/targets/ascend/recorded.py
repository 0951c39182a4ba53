"""Scales that were found before: AMCT's record, or a TensorRT calibration cache, as a recipe.

Scales of weights are those of a form of the model: with each BatchNormalization folded into the
layer before it, but where the record (skip_fusion), the configuration (do_fusion,
skip_fusion_layers) or the scales themselves say otherwise. The model is read in that form.

Files of an Ascend deployment, read from disk and told apart by what they hold.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrators.amct.arq import arq
from deploy.errors import CacheError, ConfigError, ModelError
from deploy.files.reading import read_text
from deploy.graph.index import Graph, attributes
from deploy.targets.ascend.config import read_config, settled
from deploy.targets.ascend.config_keys import QuantConfig
from deploy.targets.ascend.layers import LayerGraph
from deploy.targets.ascend.proto import parse_text
from deploy.targets.ascend.recipe import Recipe
from deploy.targets.ascend.simple_config import read_simple_config

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.observation import Subject
    from deploy.targets.ascend.record import LayerRecord


_WHAT = "a text file of an Ascend deployment"


def read_any_config(path: Path, graph: LayerGraph) -> QuantConfig:
    """Quant config JSON or simplified configuration, by its suffix or first character.

    Raises:
        ConfigError: the file cannot be read or breaks a rule.
    """
    text = read_text(path, what=_WHAT, error=ConfigError)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return settled(read_config(text, str(path)), graph)
    return read_simple_config(text, graph, str(path))


def check_file(path: Path, graph: LayerGraph | None = None) -> str:
    """Check a file of any of the kinds that `calib8 build --target ascend` writes.

    Args:
        path: record, quant config JSON, simplified .cfg, AIPP configuration or deploy model.
        graph: layers of the float model that it is for.

    Returns:
        One sentence on what it holds.

    Raises:
        ConfigError, ModelError: what is wrong with it.
    """
    from deploy.targets.ascend.models import is_mapping
    from deploy.targets.ascend.record import check_record, others, read_record

    if path.suffix == ".onnx":
        return check_deploy(path)
    text = read_text(path, what=_WHAT, error=ConfigError)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        if is_mapping(text):
            return "a fusion mapping, by which CANN's accuracy comparison pairs nodes"
        config = read_config(text, str(path))
        config = settled(config, graph) if graph else config
        return f"a sound quant config, {_wanted(config)}"
    key = _first_key(text)
    if key in ("record", "prune_record"):
        records, more = read_record(text, str(path)), others(text, str(path))
        if graph is not None:
            check_record(records, graph)
        beside = f"; beside them, which calib8 does not deploy: {', '.join(more)}" if more else ""
        inputs = sum(one.tensor for one in records.values())
        said = f" and {inputs} inputs of tensor_quantize" if inputs else ""
        return f"a sound record of {len(records) - inputs} layers{said}{beside}"
    if key in ("aipp_op", "multi_shape_op"):
        parse_text("InsertNewOps", text, str(path))
        return "a sound AIPP configuration"
    if graph is not None:
        config = read_simple_config(text, graph, str(path))
        return f"a sound simplified configuration, {_wanted(config)}"
    parse_text("AMCTConfig", text, str(path))
    return "a simplified configuration that parses; --model checks its layers"


def _wanted(config: QuantConfig) -> str:
    """How much it quantizes, and what it asks for in vain."""
    count = _count(len(config.enabled()), len(config.tensors))
    return ". ".join([count, *config.told]).rstrip(".")


def _count(layers: int, inputs: int, grid: str = "int8") -> str:
    """How much is quantized, in words."""
    return f"{layers} layers in {grid}" + (f", {inputs} inputs moved in int8" if inputs else "")


def _first_key(text: str) -> str:
    """The first key of protobuf text, behind comments; "" where there is none."""
    said = (line.partition("#")[0].strip() for line in text.splitlines())
    first = next((line for line in said if line), "")
    found = re.match(r"\w+", first)
    return found[0] if found else ""


def check_deploy(path: Path) -> str:
    """Check a deploy model: every AscendQuant and AscendDequant as ATC reads them.

    Raises:
        ModelError: not an ONNX file, no quantized layer, or one that is not as it must be.
    """
    from deploy.frontends.reader import read_model
    from deploy.targets.ascend.executor import executable, malformed

    model = read_model(path)
    ops = Counter(node.op_type for node in model.graph.node)
    back = ops["AscendDequant"] + ops["AscendAntiQuant"]
    if not ops["AscendQuant"] or not back:
        raise ModelError(
            f"{path} must hold AscendQuant and AscendDequant nodes, got {ops['AscendQuant']} and"
            f" {back}; give the deploy model"
        )
    constants = Graph(model).initializers
    with malformed():
        for node in model.graph.node:
            if node.op_type == "AscendDequant":
                _check_parameter(node, constants)
    executable(model)
    count = _count(ops["AscendDequant"], ops["AscendAntiQuant"], _grids(model))
    return f"a sound deploy model, {count}"


def _grids(model: onnx.ModelProto) -> str:
    """Types that AscendQuant makes, such as int8 or int8 and int16."""
    made = {_made_by(node) for node in model.graph.node if node.op_type == "AscendQuant"}
    return " and ".join(sorted(made, key=lambda name: int(name[3:])))


def _made_by(node: onnx.NodeProto) -> str:
    kind: bytes = attributes(node).get("dst_type", b"INT8")
    return kind.decode().lower()


def _check_parameter(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> None:
    from onnx import numpy_helper

    found = constants.get(node.input[-1])
    if len(node.input) != 2 or found is None or found.data_type != 13:
        raise ModelError(f"{node.name!r} must have a uint64 parameter as its second input")
    values = numpy_helper.to_array(found)
    scales = (values & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise ModelError(f"{node.name!r} must have finite scales above 0, got {scales.min()}")
    if (values >> np.uint64(40)).any():
        raise ModelError(f"{node.name!r} must have offset_w 0, got another")


def from_record(subject: Subject, path: Path, *, config: Path | None = None) -> Recipe:
    """What a record says of a model.

    Args:
        subject: the model.
        path: of the record.
        config: quant config or simplified configuration that the record was made with, for the
            form of the model; it is written again, with what the record lacks disabled.

    Raises:
        ConfigError: a file that cannot be read or breaks a rule, or is another model's.
        ExportError: a scale or a bias outside what the hardware takes.
    """
    from deploy.targets.ascend.deploy_model import unrounded
    from deploy.targets.ascend.quant_layer import quantize_layers
    from deploy.targets.ascend.record import adaptive_layers, others, read_record
    from deploy.targets.ascend.settled import without

    text = read_text(path, what="AMCT's record of scales", error=ConfigError)
    records = read_record(text, str(path))
    beside = others(text, str(path))
    if not records:
        raise ConfigError(
            f"a record to deploy must hold a layer with its scales, got {', '.join(beside)} alone"
            f" in {path}; give the record of a calibration"
        )
    model, graph, settled, bare = _formed(subject, records, config)
    _check_types(records, graph, subject)
    layers = quantize_layers(model, graph, records)
    lacking = tuple(name for name in graph.layers if name not in records)
    if settled is not None:
        _refuse_disabled(records, settled)
        unused = (name for name in settled.entries() if name not in records)
        settled = without(settled, (*lacking, *unused))
    notes = [f"Scales: {path}, as it stands; nothing was calibrated."]
    if bare:
        notes.append(
            "By its scales the record is of weights that nothing was folded into, so that what"
            f" follows stays apart: {', '.join(bare)}."
        )
    nearest = unrounded(model, graph, records, adaptive_layers(text))
    if nearest:
        notes.append(
            f"AdaRound rounded the weights of {len(nearest)} layers ({', '.join(nearest[:3])}). A"
            " record does not hold that, so here they are rounded to nearest; give the"
            " _modified_model.onnx that was written beside the record in place of the model."
        )
    if beside:
        notes.append(f"Beside them the record holds, and was not deployed: {', '.join(beside)}.")
    return Recipe(
        model=model,
        graph=graph,
        records=records,
        layers=layers,
        config=settled,
        method="a record",
        why=dict.fromkeys(lacking, "the record has no scales for it"),
        notes=tuple(notes),
    )


def from_cache(subject: Subject, path: Path) -> Recipe:
    """Activation scales of a TensorRT cache, symmetric and without offset; weights by ARQ.

    Raises:
        CacheError: a file that cannot be read, or no usable scale for any layer of the model.
        ConfigError: the model has no layer that Ascend quantizes.
    """
    from deploy.calibration.observation import Observed
    from deploy.graph.placement import ASCEND
    from deploy.targets.ascend.amct_calibration import RecordPlan
    from deploy.targets.ascend.config import default_config
    from deploy.targets.ascend.quant_layer import quantize_fitting
    from deploy.targets.ascend.record import LayerRecord
    from deploy.targets.ascend.settled import prepared
    from deploy.targets.tensorrt.cache_tools import read_cache
    from deploy.targets.tensorrt.match import match

    cache = read_cache(path)
    model, graph = prepared(subject.model)
    matched = match(cache, subject.model, original=subject.original, placement=ASCEND)
    config = default_config(graph, activation_offset=False)
    weights = RecordPlan(model=model, graph=graph, config=config, base="", samples=1).weights(
        Observed({})
    )
    records = {
        name: LayerRecord(
            scale_d=matched.scales[layer.input],
            scale_w=weights[name][0],
            weighted=bool(layer.weight),
        )
        for name, layer in graph.layers.items()
        if layer.input in matched.scales
    }
    layers, why = quantize_fitting(model, graph, records)
    if not layers:
        wanted = list(dict.fromkeys(layer.input for layer in graph.layers.values()))
        raise CacheError(
            f"a cache must know the inputs of the model's layers, got a usable scale in {path} for"
            f" none of {len(wanted)} (such as {', '.join(wanted[:2])}); give the model's own cache"
            " (`calib8 cache check --model` tells more)"
        )
    reasons = {cover.tensor: cover.reason for cover in matched.tensors if not cover.covered}
    lacking = {
        name: f"its input {reasons.get(layer.input) or f'has no scale in {path.name}'}"
        for name, layer in graph.layers.items()
        if name not in records
    }
    return Recipe(
        model=model,
        graph=graph,
        records={name: records[name] for name in layers},
        layers=layers,
        method="ARQ, and a TensorRT cache",
        why={**lacking, **why},
        notes=(
            f"Scales: {path} for {len(layers)} of {len(graph.layers)} layers, symmetric, without"
            " offset; weights by ARQ; nothing was calibrated.",
        ),
    )


def _formed(
    subject: Subject, records: Mapping[str, LayerRecord], path: Path | None
) -> tuple[onnx.ModelProto, LayerGraph, QuantConfig | None, tuple[str, ...]]:
    """The model as it was when the record was made, its layers, the configuration, and `_bare`."""
    from deploy.targets.ascend.settled import prepared, unfused

    model, graph = prepared(subject.model)
    config = None if path is None else read_any_config(path, graph)
    fused = config or QuantConfig()
    apart = (*fused.skip_fusion_layers, *(n for n, one in records.items() if one.skip_fusion))
    bare = _bare(subject, records) if fused.do_fusion else ()
    if not fused.do_fusion or apart or bare:
        fused = replace(fused, skip_fusion_layers=apart)
        model, graph = unfused(subject, fused, bare=bare)
        config = None if path is None else read_any_config(path, graph)
    return model, graph, config, bare


def _bare(subject: Subject, records: Mapping[str, LayerRecord]) -> tuple[str, ...]:
    """Layers whose scales are nearer to those of the weights before anything was folded into them.

    AMCT folds a BatchNormalization into a Conv alone, calib8 into ConvTranspose and Gemm too, and
    constant Muls and Adds into all three; the scales tell who made the record.
    """
    from deploy.targets.ascend.settled import prepared

    ways = [_Weights(*prepared(model)) for model in (subject.model, subject.unfolded.model)]
    found = []
    for name, record in records.items():
        folded, plain = (way.apart_from(name, record) for way in ways)
        if folded is not None and plain is not None and plain < folded:
            found.append(name)
    return tuple(found)


class _Weights:
    """The weights of one form of a model."""

    def __init__(self, model: onnx.ModelProto, graph: LayerGraph) -> None:
        self.index, self.layers = Graph(model), graph.layers

    def apart_from(self, name: str, record: LayerRecord) -> float | None:
        """How far, in octaves, a record's scales are from ARQ's; None where they cannot be."""
        from deploy.targets.ascend.quant_layer import array_of, balanced_weight, rows_of

        layer = self.layers.get(name)
        if layer is None or not layer.weight:
            return None
        weight = array_of(self.index, layer.weight)
        try:
            rows = rows_of(balanced_weight(weight, layer, record.factors), layer)
        except ValueError:  # factors of another number of channels
            return None
        scales, _ = arq(rows, bits=record.weight_bits, channel_wise=record.scale_w.size > 1)
        if scales.size != record.scale_w.size:
            return None
        return float(np.abs(np.log2(record.scale_w / scales)).mean())


def _check_types(records: Mapping[str, LayerRecord], graph: LayerGraph, subject: Subject) -> None:
    """Refuse a record that tells other types of floats than the model's."""
    from deploy.targets.ascend.half import halves_of

    told = {name: one.half for name, one in records.items() if one.half is not None}
    halves = halves_of(subject) if told else frozenset[str]()
    for name, half in told.items():
        if name in graph.layers and half != (graph.layers[name].output in halves):
            kinds = ("float16", "float32") if half else ("float32", "float16")
            raise ConfigError(
                f"op_data_type must be the layer's own, got that of {kinds[0]} for {name!r}, which"
                f" gives {kinds[1]} in the model's file; take it out"
            )


def _refuse_disabled(records: Mapping[str, LayerRecord], config: QuantConfig) -> None:
    """Refuse a record and a configuration that contradict each other."""
    enabled = config.entries()
    name = next((name for name in records if name not in enabled), None)
    if name is not None:
        raise ConfigError(
            f"a configuration must enable every layer of its record, got {name!r} disabled; take"
            " it out of the record, or enable it"
        )
