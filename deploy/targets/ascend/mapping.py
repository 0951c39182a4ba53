"""<model>_quant.json: which nodes of the original model each node of the deploy model stands for.

::

    original    x -> conv1 -> bn1 -> y
    deploy      x -> conv1.quant -> conv1 -> conv1.dequant -> y
                     of nothing     of conv1, bn1; y is bn1's output 0

CANN's accuracy comparison (msaccucmp and msit, `-q`) pairs the dumps of both by it. It is laid out
as their parser reads it: the JSON form of a GE graph, with the attributes `_datadump_*`. Tensors
that calib8 leaves in float keep their names, so the original's nodes are found backwards from
them. Source: MindStudio's msaccucmp, FusionRuleParser and QuantFilter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import onnx

from deploy.graph.index import fed_inputs, reads
from deploy.targets.ascend.layers import name_nodes


def fusion_mapping(deploy: onnx.ModelProto, original: onnx.ModelProto, *, name: str) -> str:
    """JSON text: every node of the deploy model, with the original's nodes that are in it.

    Args:
        deploy: from `deploy_model`.
        original: the model as the user has it.
        name: of the graph.
    """
    ends = {n.input[0]: n.output[0] for n in deploy.graph.node if n.op_type == "AscendDequant"}
    made = {t: (n.name, k) for n in deploy.graph.node for k, t in enumerate(n.output)}
    starts = [value.name for value in fed_inputs(deploy.graph)]
    made |= {start: (start, 0) for start in starts}
    whence = _Whence(original, made)
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
                (f"{made[t][0]}:{made[t][1]}" for t in node.input if t in made),
                whence.nodes(outputs),
                [whence.output(tensor) for tensor in shown],
            )
        )
    return json.dumps({"name": name, "graph": [{"name": name, "op": ops}]}, indent=1)


def is_mapping(text: str) -> bool:
    """Whether JSON text is a mapping, of calib8 or AMCT: a list of graphs, which no config has."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("graph"), list)


class _Whence:
    """The original's nodes behind the tensors of the deploy model."""

    def __init__(self, original: onnx.ModelProto, made: Mapping[str, object]) -> None:
        named = name_nodes(original)
        self.makers = {t: n for n in named.graph.node for t in n.output if t}
        self.between = _moving(named.graph) & set(self.makers) - set(made)

    def nodes(self, tensors: Iterable[str]) -> list[str]:
        """Names of the nodes that make them from tensors that the deploy model has too."""
        found: dict[str, None] = {}
        todo = [tensor for tensor in tensors if tensor in self.makers]
        while todo:
            node = self.makers[todo.pop()]
            if node.name not in found:
                found[node.name] = None
                todo += [t for t in node.input if t in self.between]
        return [*found][::-1]

    def output(self, tensor: str) -> tuple[str, int] | None:
        """The original's node that makes a tensor of the same name, and as which output."""
        node = self.makers.get(tensor)
        return None if node is None else (node.name, list(node.output).index(tensor))


def _moving(graph: onnx.GraphProto) -> set[str]:
    """Tensors that depend on what is fed."""
    found = {value.name for value in fed_inputs(graph)}
    for node in graph.node:
        if found.intersection(reads(node)):
            found.update(node.output)
    return found


def _op(
    name: str,
    kind: str,
    inputs: Iterable[str],
    originals: list[str],
    outputs: Iterable[tuple[str, int] | None],
) -> dict[str, Any]:
    whose = {"s": originals} if originals else {}
    return {
        "name": name,
        "type": kind,
        "input": list(inputs),
        "attr": [{"key": "_datadump_original_op_names", "value": {"list": whose}}],
        "output_desc": [_output(*found) for found in outputs if found is not None],
    }


def _output(origin: str, index: int) -> dict[str, Any]:
    return {
        "attr": [
            {"key": "_datadump_origin_name", "value": {"s": origin}},
            {"key": "_datadump_origin_output_index", "value": {"i": index}},
        ]
    }
