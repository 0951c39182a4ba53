"""Writer of an Ascend deployment's files: config, record, models and fusion mapping.

The fusion mapping, <model>_quant.json, lists the original nodes of each deploy node::

    original    x -> conv1 -> bn1 -> y
    deploy      x -> conv1.quant -> conv1 -> conv1.dequant -> y
                     none           conv1, bn1; y is bn1's output 0

CANN's accuracy comparison (msaccucmp and msit, `-q`) uses it to pair the tensor dumps of both
models. Its format is the JSON form of a GE graph with the attributes `_datadump_*`. Tensors that
stay in float keep their names, so the original's nodes are found by tracing back from them.
Source: MindStudio's msaccucmp, FusionRuleParser and QuantFilter.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import onnx

from deploy.graph.edit import name_nodes_by_index
from deploy.graph.index import iter_reads, map_producers, names_of, runtime_inputs
from deploy.machine import trim_memory
from deploy.runtimes.mapped_model import copy_without_initializers
from deploy.targets.ascend.atc import (
    DEFAULT_CANN,
    clear_metadata,
    lower_for_cann,
    refuse_other_domains,
)
from deploy.targets.ascend.config import write_config
from deploy.targets.ascend.deploy_model import copy_without_weights, deploy_model, modified_model
from deploy.targets.ascend.fake_quant import amct_qdq_model, can_be_pairs, fake_quant_model
from deploy.targets.ascend.float16 import to_float16
from deploy.targets.ascend.recipe import Recipe
from deploy.targets.ascend.record import write_record
from deploy.targets.base import BuildRequest


def fusion_mapping(deploy: onnx.ModelProto, original: onnx.ModelProto, *, name: str) -> str:
    """Return JSON text: each node of the deploy model with the original nodes that it stands for.

    Args:
        deploy: the deploy model, with unique node names.
        original: the user's model.
        name: name of the mapping's graph.
    """
    inputs = [value.name for value in runtime_inputs(deploy.graph)]
    # tensor -> "<node>:<output index>" of the node that makes it; an input counts as a node
    port_by_tensor = {tensor: f"{tensor}:0" for tensor in inputs}
    float_by_integer_tensor = {}  # integer output of a layer -> its AscendDequant's float output
    for node in deploy.graph.node:
        for index, tensor in enumerate(node.output):
            port_by_tensor[tensor] = f"{node.name}:{index}"
        if node.op_type == "AscendDequant":
            float_by_integer_tensor[node.input[0]] = node.output[0]

    # finds the nodes of the original that make a tensor, back to tensors that both models have
    tracer = _OriginalNodes(original, port_by_tensor)
    # tensors that both models have; an integer tensor is none of them, whatever its name
    common_tensors = tracer.producer.keys() - float_by_integer_tensor.keys()
    mapping_nodes = [
        _make_mapping_node(
            tensor, "Data", input_ports=[], original_nodes=[tensor], original_outputs=[(tensor, 0)]
        )
        for tensor in inputs
    ]
    for node in deploy.graph.node:
        if node.op_type == "Constant":
            continue
        input_ports = [port_by_tensor[tensor] for tensor in node.input if tensor in port_by_tensor]
        # the original has no integer tensors, but the float ones that AscendDequant makes of them
        float_outputs = [float_by_integer_tensor.get(tensor, tensor) for tensor in node.output]
        original_nodes = tracer.find_nodes(float_outputs)
        original_outputs = [
            tracer.find_output(tensor) for tensor in node.output if tensor in common_tensors
        ]
        mapping_nodes.append(
            _make_mapping_node(
                node.name, node.op_type, input_ports, original_nodes, original_outputs
            )
        )
    return json.dumps({"name": name, "graph": [{"name": name, "op": mapping_nodes}]}, indent=1)


def _serialize_without_metadata(model: onnx.ModelProto) -> bytes:
    """Return the bytes of a model's file, the same in every run; the model loses its metadata."""
    clear_metadata(model)
    return bytes(model.SerializeToString(deterministic=True))


def is_fusion_mapping(text: str) -> bool:
    """Whether JSON text is a fusion mapping: it has a list of graphs, which no config has."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and isinstance(document.get("graph"), list)


class _OriginalNodes:
    """Finds the original nodes that make the tensors of the deploy model.

    Attributes:
        producer: tensor of the original -> the node that makes it.
        undeployed_tensors: tensors that only the original has, and that depend on its inputs.
    """

    def __init__(self, original: onnx.ModelProto, deployed_tensors: Collection[str]) -> None:
        weights = names_of(original.graph.initializer)
        graph = copy_without_initializers(original, weights, placeholders=True).graph
        name_nodes_by_index(graph)
        self.producer = map_producers(graph.node)
        undeployed_tensors = self.producer.keys() - deployed_tensors
        self.undeployed_tensors = undeployed_tensors & _input_dependent(graph)

    def find_nodes(self, tensors: Iterable[str]) -> list[str]:
        """Return the names of the original nodes that make these tensors.

        They are traced back from the tensors, up to tensors that the deploy model has too.
        """
        names: dict[str, None] = {}
        pending = [tensor for tensor in tensors if tensor in self.producer]
        while pending:
            node = self.producer[pending.pop()]
            if node.name not in names:
                names[node.name] = None
                pending += [tensor for tensor in node.input if tensor in self.undeployed_tensors]
        return list(reversed(names))

    def find_output(self, tensor: str) -> tuple[str, int]:
        """Return (node, output index) of the original that makes a tensor of the same name."""
        node = self.producer[tensor]
        return node.name, list(node.output).index(tensor)


def _input_dependent(graph: onnx.GraphProto) -> set[str]:
    """Return the inputs of a graph, and the tensors that are computed from them."""
    tensors = names_of(runtime_inputs(graph))
    for node in graph.node:
        if tensors.intersection(iter_reads(node)):
            tensors.update(node.output)
    return tensors


def _make_mapping_node(
    name: str,
    kind: str,
    input_ports: list[str],
    original_nodes: list[str],
    original_outputs: Iterable[tuple[str, int]],
) -> dict[str, Any]:
    """Return one node of the deploy model as a JSON object of the fusion mapping.

    The object names the nodes of the original model that the deploy node stands for.

    Args:
        name: name of the deploy node.
        kind: its type; "Data" for a graph input.
        input_ports: "<node>:<output index>" of each input.
        original_nodes: names of the original nodes.
        original_outputs: (original node, output index) that makes each output that the original
            has too.
    """
    names = {"s": original_nodes} if original_nodes else {}  # "s": a list of strings, as in CANN
    return {
        "name": name,
        "type": kind,
        "input": input_ports,
        "attr": [{"key": "_datadump_original_op_names", "value": {"list": names}}],
        "output_desc": [_make_output(*output) for output in original_outputs],
    }


def _make_output(node: str, index: int) -> dict[str, Any]:
    """Return the JSON object for the output of an original node."""
    return {
        "attr": [
            {"key": "_datadump_origin_name", "value": {"s": node}},
            {"key": "_datadump_origin_output_index", "value": {"i": index}},
        ]
    }


def write_models(
    recipe: Recipe,
    request: BuildRequest,
    *,
    cann: str = DEFAULT_CANN,
    float16_tensors: Collection[str],
    weight_sharers: Collection[str],
) -> dict[str, Path]:
    """Write config, record of scales, models and fusion mapping; return role -> path.

    Each model has all weights, so one is in memory at a time.

    Args:
        recipe: the model and its scales.
        request: its model gives the files' stem. Nodes that ONNX Runtime does not know are cut off
            the recipe's model; they are put back into the models for atc and AMCT.
        cann: CANN version whose atc reads the models.
        float16_tensors: tensors that are float16 in the model's file.
        weight_sharers: layers that share their weight in the original model. If there are any, the
            modified model is written, in which each has a copy.

    Raises:
        ExportError: a file cannot be written, or a node cannot be expressed for this CANN.
    """
    refuse_other_domains(request.subject.loaded)
    files: dict[str, Path] = {}
    contents = chain(
        _make_texts(recipe, float16_tensors),
        _make_models(recipe, request, cann, float16_tensors, writes_modified=bool(weight_sharers)),
    )
    for role, ending, content in contents:
        files[role] = request.write(f"_{ending}", content)
        del content  # before the next one is made
    return files


def _make_texts(
    recipe: Recipe, float16_tensors: Collection[str]
) -> Iterator[tuple[str, str, bytes]]:
    """Yield (role, ending of the file's name, content) of the config, if any, and of the record."""
    if recipe.config is not None:
        yield "quant config", "config.json", write_config(recipe.config).encode()
    float16_layers = [
        name
        for name, quant_layer in recipe.layers.items()
        if quant_layer.layer.output in float16_tensors
    ]
    yield "record", "record.txt", write_record(recipe.records, float16_layers).encode()


def _make_models(
    recipe: Recipe,
    request: BuildRequest,
    cann: str,
    float16_tensors: Collection[str],
    *,
    writes_modified: bool,
) -> Iterator[tuple[str, str, bytes]]:
    """Yield (role, ending of the file's name, content) of each model and of the fusion mapping.

    A model is deleted before the next one is made, since each has all weights.

    Args:
        recipe: the float model, and the integers and scales of its layers.
        request: the build request.
        cann: CANN version whose atc reads the models.
        float16_tensors: tensors that are float16 in the model's file.
        writes_modified: write the modified model even if no weight has another value: layers that
            read one weight in the user's model have copies of it in this one.
    """
    model = recipe.model
    layers = recipe.layers
    subject = request.subject
    loaded = subject.loaded
    # A MatMul whose bias is in an Add makes sums of integers, which are not float16. The layer's
    # output is that of the Add.
    layer_outputs = {quant_layer.layer.output for quant_layer in layers.values()}
    node_outputs = {node.output[0] for node in model.graph.node if node.name in layers}
    sums_before_bias = node_outputs - layer_outputs
    tensors_to_be_float16 = set(float16_tensors) - sums_before_bias
    trim_memory()  # give back the memory that the quantization of the weights has freed
    fake_quant = _make_fake_quant(recipe, tensors_to_be_float16)
    yield "fake-quant model", "fake_quant_model.onnx", _serialize_without_metadata(fake_quant)
    del fake_quant
    trim_memory()

    # both the deploy model and the Q/DQ model store integers of these layers, so that neither needs
    # a copy of their float weights
    pair_layers = {
        name: quant_layer for name, quant_layer in layers.items() if can_be_pairs(quant_layer)
    }
    lowered = lower_for_cann(copy_without_weights(model, pair_layers), cann)
    deploy = deploy_model(lowered, layers)
    if tensors_to_be_float16:
        deploy = to_float16(deploy, tensors_to_be_float16)
    deploy = loaded.with_cut_off(deploy)
    yield "deploy model", "deploy_model.onnx", _serialize_without_metadata(deploy)
    original = subject.original or subject.model  # the model in the file, if there is one
    mapping = fusion_mapping(deploy, original, name=loaded.name)
    del deploy

    qdq = loaded.with_cut_off(amct_qdq_model(lowered, pair_layers))
    yield "Q/DQ model", "amct_qdq.onnx", _serialize_without_metadata(qdq)
    del qdq

    # the float model that the scales belong to, if it is not the user's: AdaRound or a repair has
    # changed weights, or layers have copies of a shared one
    has_rounding = any(record.rounded_weight is not None for record in recipe.records.values())
    if writes_modified or has_rounding or request.is_repaired:
        modified = loaded.with_cut_off(modified_model(model, layers))
        yield "modified model", "modified_model.onnx", _serialize_without_metadata(modified)
    yield "fusion mapping", "quant.json", mapping.encode()


def _make_fake_quant(recipe: Recipe, float16_tensors: Collection[str]) -> onnx.ModelProto:
    """Return the model that computes in float what the chip computes in integers."""
    fake_quant = fake_quant_model(recipe.model, recipe.layers)
    if not float16_tensors:
        return fake_quant
    # the scales of dequantization may exceed float16
    scaling_nodes = [f"{name}.fakedequant.mul" for name in recipe.layers]
    return to_float16(fake_quant, float16_tensors, float32_nodes=scaling_nodes)
