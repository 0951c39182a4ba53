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
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from deploy.files import atomic
from deploy.graph.index import iter_reads, runtime_inputs
from deploy.targets.ascend.atc import DEFAULT_CANN, lower_for_cann, strip_metadata
from deploy.targets.ascend.config import write_config
from deploy.targets.ascend.deploy_model import deploy_model, modified_model
from deploy.targets.ascend.fake_quant import amct_qdq_model, fake_quant_model
from deploy.targets.ascend.float16 import to_float16
from deploy.targets.ascend.layers import name_nodes
from deploy.targets.ascend.recipe import Recipe
from deploy.targets.ascend.record import write_record
from deploy.targets.base import BuildRequest


def fusion_mapping(deploy: onnx.ModelProto, original: onnx.ModelProto, *, name: str) -> str:
    """Return JSON text: each node of the deploy model with its original nodes."""
    ends = {n.input[0]: n.output[0] for n in deploy.graph.node if n.op_type == "AscendDequant"}
    makers = {t: (n.name, k) for n in deploy.graph.node for k, t in enumerate(n.output)}
    starts = [value.name for value in runtime_inputs(deploy.graph)]
    makers |= {start: (start, 0) for start in starts}
    originals = _OriginalNodes(original, makers)
    ops = [_op(start, "Data", (), [start], [(start, 0)]) for start in starts]
    for node in deploy.graph.node:
        if node.op_type == "Constant":
            continue
        outputs = [ends.get(tensor, tensor) for tensor in node.output]
        shown = node.output if not any(t in ends for t in node.output) else ()
        ops.append(
            _op(
                node.name,
                node.op_type,
                (f"{makers[t][0]}:{makers[t][1]}" for t in node.input if t in makers),
                originals.nodes(outputs),
                [originals.output(tensor) for tensor in shown],
            )
        )
    return json.dumps({"name": name, "graph": [{"name": name, "op": ops}]}, indent=1)


def is_fusion_mapping(text: str) -> bool:
    """Whether JSON text is a fusion mapping: it has a list of graphs, which no config has."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and isinstance(data.get("graph"), list)


class _OriginalNodes:
    """Finds the original nodes that make the tensors of the deploy model."""

    def __init__(self, original: onnx.ModelProto, deployed: Collection[str]) -> None:
        named = name_nodes(original)
        self.makers = {t: n for n in named.graph.node for t in n.output if t}
        # tensors that only the original has, so that tracing goes on through them
        self.inner = _input_dependent(named.graph) & set(self.makers) - set(deployed)

    def nodes(self, tensors: Iterable[str]) -> list[str]:
        """Return the names of the nodes between these tensors and other deployed tensors."""
        names: dict[str, None] = {}
        todo = [tensor for tensor in tensors if tensor in self.makers]
        while todo:
            node = self.makers[todo.pop()]
            if node.name not in names:
                names[node.name] = None
                todo += [t for t in node.input if t in self.inner]
        return [*names][::-1]

    def output(self, tensor: str) -> tuple[str, int] | None:
        """Return (node, output index) of the original that makes a tensor of the same name."""
        node = self.makers.get(tensor)
        return None if node is None else (node.name, list(node.output).index(tensor))


def _input_dependent(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors that depend on the inputs."""
    tensors = {value.name for value in runtime_inputs(graph)}
    for node in graph.node:
        if tensors.intersection(iter_reads(node)):
            tensors.update(node.output)
    return tensors


def _op(
    name: str,
    kind: str,
    inputs: Iterable[str],
    originals: list[str],
    outputs: Iterable[tuple[str, int] | None],
) -> dict[str, Any]:
    names = {"s": originals} if originals else {}
    return {
        "name": name,
        "type": kind,
        "input": list(inputs),
        "attr": [{"key": "_datadump_original_op_names", "value": {"list": names}}],
        "output_desc": [_output(*output) for output in outputs if output is not None],
    }


def _output(origin: str, index: int) -> dict[str, Any]:
    return {
        "attr": [
            {"key": "_datadump_origin_name", "value": {"s": origin}},
            {"key": "_datadump_origin_output_index", "value": {"i": index}},
        ]
    }


def write_models(
    recipe: Recipe,
    request: BuildRequest,
    *,
    cann: str = DEFAULT_CANN,
    halves: Collection[str] = (),
    shared: Collection[str] = (),
) -> dict[str, Path]:
    """Write config, record, models and mapping, or nothing if one fails; return role -> path.

    `request`: its model has the files' stem, and the nodes that ONNX Runtime does not know, which
    are put back into the models for atc and AMCT.
    `halves`: tensors that are float16 in the model's file.
    `shared`: layers that share their weight in the original model.

    Raises:
        ExportError: a file cannot be written, or a node cannot be expressed for this CANN.
    """
    model, layers, subject = recipe.model, recipe.layers, request.subject
    loaded = subject.loaded
    contents: dict[str, tuple[str, bytes]] = {}  # role -> ending of the name, content
    if recipe.config is not None:
        contents["quant config"] = "config.json", write_config(recipe.config).encode()
    typed = {
        name: replace(one, is_float16=layers[name].layer.output in halves)
        for name, one in recipe.records.items()
    }
    contents["record"] = "record.txt", write_record(typed).encode()
    older = lower_for_cann(model, cann)
    deploy, fake = deploy_model(older, layers), fake_quant_model(model, layers)
    if halves:
        deploy = to_float16(deploy, halves)
        scaling_nodes = [f"{name}.fakedequant.mul" for name in layers]
        fake = to_float16(fake, halves, float32_nodes=scaling_nodes)
    deploy = loaded.with_cut_off(deploy)
    models = {
        "deploy model": ("deploy_model.onnx", deploy),
        "fake-quant model": ("fake_quant_model.onnx", fake),
        "Q/DQ model": ("amct_qdq.onnx", loaded.with_cut_off(amct_qdq_model(older, layers))),
    }
    if shared or any(record.rounded_weight is not None for record in recipe.records.values()):
        modified = loaded.with_cut_off(modified_model(model, layers))
        models["modified model"] = "modified_model.onnx", modified
    for role, (ending, made) in models.items():
        contents[role] = ending, strip_metadata(made).SerializeToString(deterministic=True)
    original = subject.model if subject.original is None else subject.original
    mapping = fusion_mapping(deploy, original, name=loaded.name)
    contents["fusion mapping"] = "quant.json", mapping.encode()
    return {
        role: atomic.write_bytes(request.folder / f"{loaded.name}_{ending}", data)
        for role, (ending, data) in contents.items()
    }
