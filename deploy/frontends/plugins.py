"""Models with nodes that ONNX Runtime does not know: TensorRT's plugins, operators of one's own.

The model is cut before them. What stands before is calibrated, quantized and judged; they and all
that reads of them is kept as it is, and put back into the files for those who know them::

    x --> Conv --> Relu --> boxes, scores --> EfficientNMS_TRT --> Cast --> kept
          '------ cut model ------'           '------- behind -------'

Constants that they read go with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.errors import ExportError, ModelError
from deploy.frontends.checks import check_valid, opset_of
from deploy.frontends.lift import other_form
from deploy.graph.edit import (
    copied,
    drop_dead,
    rename_reads,
    replace,
    replace_nodes,
    sort_nodes,
    unused,
)
from deploy.graph.index import Graph, all_nodes, reads, subgraphs
from deploy.graph.lowering import is_standard
from deploy.graph.plan import FLOAT32, Decision

if TYPE_CHECKING:
    import onnx

_KNOWN = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")


@dataclass(frozen=True, slots=True)
class Behind:
    """What was cut off a model: the nodes that ONNX Runtime does not know, and what reads of them.

    Attributes:
        nodes: as they are in the file, in their order.
        strange: the first of them that ONNX Runtime does not know.
        constants: what they read.
        inputs: of the whole model.
        outputs: of the whole model.
        opsets: of the whole model.
    """

    nodes: tuple[onnx.NodeProto, ...]
    strange: onnx.NodeProto
    constants: tuple[onnx.TensorProto, ...]
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[onnx.ValueInfoProto, ...]
    opsets: tuple[onnx.OperatorSetIdProto, ...]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The nodes, none of them in int8."""
        return tuple(
            Decision(node.name or node.output[0], node.op_type, FLOAT32, _reason(node))
            for node in self.nodes
        )

    @property
    def stranger(self) -> str:
        """The first node that ONNX Runtime does not know, in words."""
        return named(self.strange)

    def sentence(self, outputs: Iterable[str]) -> str:
        """What the user should know; `outputs` are those of the part before the cut."""
        return (
            f"Cut before {self.stranger}, which onnxruntime does not know: calibrated and"
            f" judged by {', '.join(outputs)}; {_count(self.nodes)} from there on kept as in the"
            " file, for TensorRT and Ascend."
        )

    def back(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """The whole model: what `model` made of the part before the cut, and the rest as it was.

        Raises:
            ExportError: a node behind the cut means something else in the opset of `model`.
        """
        self._refuse_opset(opset_of(model))
        made = copied(model)
        graph = made.graph
        nodes = [copied(node) for node in self.nodes]
        self._put_constants(graph, nodes)
        own = {value.name: copied(value) for value in (*graph.input, *graph.output)}
        replace_nodes(graph, [*graph.node, *nodes])
        replace(graph.input, [own.get(value.name, value) for value in self.inputs])
        replace(graph.output, [own.get(value.name, value) for value in self.outputs])
        domains = {entry.domain for entry in made.opset_import}
        made.opset_import.extend(o for o in self.opsets if o.domain not in domains)
        return made

    def _put_constants(self, graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
        """Add what the nodes read, under another name where a constant was changed meanwhile."""
        taken = {tensor.name: tensor for tensor in graph.initializer}
        names = {name for node in graph.node for name in (*node.input, *node.output)} | set(taken)
        for tensor in self.constants:
            if taken.get(tensor.name) == tensor:
                continue
            new = copied(tensor)
            if tensor.name in names:
                new.name = unused(f"{tensor.name}/kept", names)
                rename_reads(nodes, {tensor.name: new.name})
            graph.initializer.append(new)

    def _refuse_opset(self, opset: int) -> None:
        own = max((o.version for o in self.opsets if o.domain in _KNOWN[:2]), default=0)
        other = other_form(self.nodes, own, opset) if own < opset else []
        if other:
            raise ExportError(
                f"nodes behind {self.strange.op_type}, which ONNX Runtime does not know, are kept"
                f" as they are, got {', '.join(other)} of opset {own}, which opset {opset} has in"
                f" another form; export the model with opset {opset}"
            )


def cut(
    model: onnx.ModelProto, infer: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> Behind | None:
    """Cut a model before its strange nodes, in place; None where it has none.

    Args:
        model: without functions.
        infer: gives a model with the types and shapes that can be inferred.

    Raises:
        ModelError: nothing stands before them.
    """
    strange = [node for node in model.graph.node if is_strange(node)]
    if not strange:
        return None
    _declare(model, strange)
    sort_nodes(model.graph)
    index = Graph(infer(model))
    kept = _with_makers(index, _downstream(model.graph.node))
    nodes = [node for at, node in enumerate(model.graph.node) if at in kept]
    read = dict.fromkeys(name for node in nodes for name in reads(node))
    behind = Behind(
        nodes=tuple(copied(node) for node in nodes),
        strange=copied(next(node for node in nodes if is_strange(node))),
        constants=tuple(
            _named(index.constants[name], name) for name in read if name in index.constants
        ),
        inputs=tuple(copied(value) for value in model.graph.input),
        outputs=tuple(copied(value) for value in model.graph.output),
        opsets=tuple(copied(entry) for entry in model.opset_import),
    )
    before = [node for at, node in enumerate(model.graph.node) if at not in kept]
    _keep(model, before, [name for name in read if name not in index.constants], index)
    if not model.graph.output:
        raise ModelError(
            "what stands before a node that onnxruntime does not know is calibrated, got"
            f" {behind.stranger} with no node before it; export the model with standard ONNX"
            " operators"
        )
    return behind


def _declare(model: onnx.ModelProto, strange: Iterable[onnx.NodeProto]) -> None:
    """Import the domains that the file forgot to import, which inference insists on."""
    from onnx import helper

    domains = {entry.domain for entry in model.opset_import} | set(_KNOWN)
    for domain in dict.fromkeys(node.domain for node in strange if node.domain not in domains):
        model.opset_import.append(helper.make_opsetid(domain, 1))


def _downstream(nodes: Iterable[onnx.NodeProto]) -> set[int]:
    """Places of the strange nodes and of all that reads of them, of nodes in their order."""
    found: set[int] = set()
    made: set[str] = set()
    for at, node in enumerate(nodes):
        if is_strange(node) or not made.isdisjoint(reads(node)):
            found.add(at)
            made.update(node.output)
    return found


def _with_makers(index: Graph, kept: set[int]) -> set[int]:
    """With the nodes before them that make constants of constants for them alone."""
    constant = set(index.constants)
    for node in index.nodes:
        if all(name in constant for name in reads(node)):
            constant.update(node.output)
    whole = set(kept)
    wanted = {name for at in kept for name in reads(index.nodes[at])} - set(index.constants)
    elsewhere = set(index.outputs)
    for at in reversed(range(len(index.nodes))):
        node = index.nodes[at]
        alone = elsewhere.isdisjoint(node.output) and not wanted.isdisjoint(node.output)
        if at in whole or (alone and constant.issuperset(node.output)):
            whole.add(at)
            wanted.update(set(reads(node)) - set(index.constants))
        else:
            elsewhere.update(reads(node))
    return whole


def _named(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    own = copied(tensor)
    own.name = name
    return own


def _keep(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    wanted: Iterable[str],
    index: Graph,
) -> None:
    """Leave a model these nodes, with what they make of `wanted` as outputs."""
    from onnx import helper

    graph = model.graph
    made = {name for node in nodes for name in node.output if name}
    outputs = [value for value in graph.output if value.name in made]
    named_outputs = {value.name for value in outputs}
    for name in wanted:
        if name in made and name not in named_outputs:
            outputs.append(
                helper.make_tensor_value_info(
                    name, index.dtypes.get(name, 0), index.shapes.get(name)
                )
            )
    replace_nodes(graph, nodes)
    replace(graph.output, outputs)
    drop_dead(graph)
    read = {name for node in graph.node for name in reads(node)}
    replace(graph.input, [value for value in graph.input if value.name in read])
    replace(graph.value_info, [value for value in graph.value_info if value.name in made])
    domains = {node.domain for node in all_nodes(graph)} | {"", "ai.onnx"}
    replace(model.opset_import, [entry for entry in model.opset_import if entry.domain in domains])


def is_strange(node: onnx.NodeProto) -> bool:
    """Whether ONNX Runtime does not know a node, or one inside it."""
    known = node.domain in _KNOWN or node.domain.startswith("com.microsoft")
    if not known or (node.domain in _KNOWN[:2] and not is_standard(node)):
        return True
    return any(is_strange(inner) for body in subgraphs(node) for inner in body.node)


def check_part_valid(model: onnx.ModelProto) -> None:
    """`check_valid` of a model with strange nodes, of which its checker judges the names alone.

    Raises:
        ModelError: it is not valid.
    """
    from onnx import helper

    judged = copied(model)
    strange = [node for node in judged.graph.node if is_strange(node)]
    for node in strange:
        node.domain = "strange"
    if strange:
        judged.opset_import.append(helper.make_opsetid("strange", 1))
    check_valid(judged)


def named(node: onnx.NodeProto) -> str:
    """A node for a sentence: its operator, whose it is, its name."""
    of = f" of the domain '{node.domain}'" if node.domain else ""
    return f"{node.op_type}{of} ('{node.name or next(iter(node.output), '')}')"


def _reason(node: onnx.NodeProto) -> str:
    return (
        "onnxruntime does not know it"
        if is_strange(node)
        else "behind a node that onnxruntime does not know"
    )


def _count(nodes: Sequence[onnx.NodeProto]) -> str:
    return "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
