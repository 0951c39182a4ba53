"""Models with nodes unknown to ONNX Runtime: TensorRT plugins and other custom operators.

The model is cut before them. The part before the cut is calibrated, quantized and evaluated. The
unknown nodes and everything downstream of them stay as they are, with the constants they read, and
are put back into the files for the runtimes that know them::

    x --> Conv --> Relu --> boxes, scores --> EfficientNMS_TRT --> Cast --> kept
          '------ cut model ------'           '------- behind -------'
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from deploy.errors import ExportError, ModelError
from deploy.frontends.checks import check_valid
from deploy.graph.edit import (
    copy_message,
    copy_tensor,
    drop_dead,
    rename_reads,
    replace_field,
    replace_nodes,
    sort_nodes,
    unique_name,
)
from deploy.graph.index import Graph, all_nodes, iter_reads, nested_nodes, opset_of, subgraphs
from deploy.graph.lowering import is_standard
from deploy.graph.opset_forms import find_upgrades
from deploy.graph.plan import FLOAT32, Decision

_KNOWN = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")


@dataclass(frozen=True, slots=True)
class CutOffNodes:
    """The part cut off a model: unknown nodes, and everything downstream of them.

    Attributes:
        nodes: as in the file, in their order.
        first_unknown: the first node that ONNX Runtime does not know.
        constants: that the nodes read.
        inputs: of the entire model.
        outputs: of the entire model.
        opsets: of the entire model.
    """

    nodes: tuple[onnx.NodeProto, ...]
    first_unknown: onnx.NodeProto
    constants: tuple[onnx.TensorProto, ...]
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[onnx.ValueInfoProto, ...]
    opsets: tuple[onnx.OperatorSetIdProto, ...]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One decision per node; all of them stay float."""
        return tuple(
            Decision(
                node.name or node.output[0],
                node.op_type,
                FLOAT32,
                "onnxruntime does not know it"
                if is_unknown_node(node)
                else "behind a node that onnxruntime does not know",
            )
            for node in self.nodes
        )

    @property
    def first_unknown_text(self) -> str:
        """Text for the first node that ONNX Runtime does not know."""
        node = self.first_unknown
        domain = f" of the domain '{node.domain}'" if node.domain else ""
        return f"{node.op_type}{domain} ('{node.name or next(iter(node.output), '')}')"

    def note(self, outputs: Iterable[str]) -> str:
        """Return the note for the user; `outputs` are those of the part before the cut."""
        kept = "1 node" if len(self.nodes) == 1 else f"{len(self.nodes)} nodes"
        return (
            f"Cut before {self.first_unknown_text}, which onnxruntime does not know: calibrated and"
            f" evaluated on {', '.join(outputs)}; {kept} from there on kept as in the"
            " file, for TensorRT and Ascend."
        )

    def append_to(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return the entire model: `model` (the part before the cut), and the cut-off nodes.

        Raises:
            ExportError: a cut-off node means something else in the opset of `model`.
        """
        self._refuse_opset(opset_of(model))
        whole = copy_message(model)
        graph = whole.graph
        nodes = [copy_message(node) for node in self.nodes]
        # the nodes' constants, under another name if one was changed in `graph`
        taken = {tensor.name: tensor for tensor in graph.initializer}
        names = {name for node in graph.node for name in (*node.input, *node.output)} | set(taken)
        for tensor in self.constants:
            if taken.get(tensor.name) == tensor:
                continue
            new = copy_message(tensor)
            if tensor.name in names:
                new.name = unique_name(f"{tensor.name}/kept", names)
                rename_reads(nodes, {tensor.name: new.name})
            graph.initializer.append(new)
        declared = {value.name: copy_message(value) for value in (*graph.input, *graph.output)}
        replace_nodes(graph, [*graph.node, *nodes])
        replace_field(graph.input, [declared.get(value.name, value) for value in self.inputs])
        replace_field(graph.output, [declared.get(value.name, value) for value in self.outputs])
        domains = {entry.domain for entry in whole.opset_import}
        whole.opset_import.extend(o for o in self.opsets if o.domain not in domains)
        return whole

    def _refuse_opset(self, opset: int) -> None:
        own_opset = max((o.version for o in self.opsets if o.domain in _KNOWN[:2]), default=0)
        inner = [one for node in self.nodes for one in nested_nodes(node) if not one.domain]
        other = sorted({n.op_type for n in inner if find_upgrades(n, own_opset, opset)})
        if other:
            raise ExportError(
                f"nodes after {self.first_unknown.op_type}, which ONNX Runtime does not know, are"
                f" kept unchanged, got {', '.join(other)} of opset {own_opset}, which opset"
                f" {opset} has in another form; export the model with opset {opset}"
            )


def cut_unknown_nodes(
    model: onnx.ModelProto, infer: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> CutOffNodes | None:
    """Cut a model before its unknown nodes, in place; return None if it has none.

    Args:
        model: without functions.
        infer: returns a model with inferred types and shapes.

    Raises:
        ModelError: no node is left before them.
    """
    strange = [node for node in model.graph.node if is_unknown_node(node)]
    if not strange:
        return None
    # shape inference needs the domains that the file forgot to import
    domains = {entry.domain for entry in model.opset_import} | set(_KNOWN)
    for domain in dict.fromkeys(node.domain for node in strange if node.domain not in domains):
        model.opset_import.append(helper.make_opsetid(domain, 1))
    sort_nodes(model.graph)
    index = Graph(infer(model))
    cut_places = _add_constant_nodes(index, _downstream(model.graph.node))
    nodes = [node for at, node in enumerate(model.graph.node) if at in cut_places]
    read = dict.fromkeys(name for node in nodes for name in iter_reads(node))
    behind = CutOffNodes(
        nodes=tuple(copy_message(node) for node in nodes),
        first_unknown=copy_message(next(node for node in nodes if is_unknown_node(node))),
        constants=tuple(
            copy_tensor(index.constants[name], name) for name in read if name in index.constants
        ),
        inputs=tuple(copy_message(value) for value in model.graph.input),
        outputs=tuple(copy_message(value) for value in model.graph.output),
        opsets=tuple(copy_message(entry) for entry in model.opset_import),
    )
    before = [node for at, node in enumerate(model.graph.node) if at not in cut_places]
    _reduce_to(model, before, [name for name in read if name not in index.constants], index)
    if not model.graph.output:
        raise ModelError(
            "calib8 calibrates the part of a model before nodes that onnxruntime does not know,"
            f" got {behind.first_unknown_text} with no node before it; export the model with"
            " standard ONNX operators"
        )
    return behind


def _downstream(nodes: Iterable[onnx.NodeProto]) -> set[int]:
    """Return the places of the unknown nodes and of all nodes downstream, given sorted nodes."""
    places: set[int] = set()
    tainted: set[str] = set()
    for at, node in enumerate(nodes):
        if is_unknown_node(node) or not tainted.isdisjoint(iter_reads(node)):
            places.add(at)
            tainted.update(node.output)
    return places


def _add_constant_nodes(index: Graph, cut_places: set[int]) -> set[int]:
    """Add nodes that compute constants from constants for the cut-off nodes only."""
    constant = set(index.constants)
    for node in index.nodes:
        if all(name in constant for name in iter_reads(node)):
            constant.update(node.output)
    places = set(cut_places)
    wanted = {name for at in cut_places for name in iter_reads(index.nodes[at])} - set(
        index.constants
    )
    elsewhere = set(index.outputs)
    for at in reversed(range(len(index.nodes))):
        node = index.nodes[at]
        alone = elsewhere.isdisjoint(node.output) and not wanted.isdisjoint(node.output)
        if at in places or (alone and constant.issuperset(node.output)):
            places.add(at)
            wanted.update(set(iter_reads(node)) - set(index.constants))
        else:
            elsewhere.update(iter_reads(node))
    return places


def _reduce_to(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], wanted: Iterable[str], index: Graph
) -> None:
    """Reduce a model to `nodes`; add those of `wanted` that they produce to the outputs."""
    graph = model.graph
    produced = {name for node in nodes for name in node.output if name}
    outputs = [value for value in graph.output if value.name in produced]
    output_names = {value.name for value in outputs}
    for name in wanted:
        if name in produced and name not in output_names:
            outputs.append(
                helper.make_tensor_value_info(
                    name, index.dtypes.get(name, 0), index.shapes.get(name)
                )
            )
    replace_nodes(graph, nodes)
    replace_field(graph.output, outputs)
    drop_dead(graph)
    read = {name for node in graph.node for name in iter_reads(node)}
    replace_field(graph.input, [value for value in graph.input if value.name in read])
    replace_field(graph.value_info, [value for value in graph.value_info if value.name in produced])
    domains = {node.domain for node in all_nodes(graph)} | {"", "ai.onnx"}
    replace_field(
        model.opset_import, [entry for entry in model.opset_import if entry.domain in domains]
    )


def is_unknown_node(node: onnx.NodeProto) -> bool:
    """Return whether ONNX Runtime does not know a node, or a node in its subgraphs."""
    known = node.domain in _KNOWN or node.domain.startswith("com.microsoft")
    if not known or (node.domain in _KNOWN[:2] and not is_standard(node)):
        return True
    return any(is_unknown_node(inner) for body in subgraphs(node) for inner in body.node)


def check_part_valid(model: onnx.ModelProto) -> None:
    """Run `check_valid` on a model with unknown nodes; only their names are checked.

    Raises:
        ModelError: the model is not valid.
    """
    checked = copy_message(model)
    strange = [node for node in checked.graph.node if is_unknown_node(node)]
    for node in strange:
        node.domain = "strange"
    if strange:
        checked.opset_import.append(helper.make_opsetid("strange", 1))
    check_valid(checked)
