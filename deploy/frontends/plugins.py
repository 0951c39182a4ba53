"""Models with nodes unknown to ONNX Runtime: TensorRT plugins and other custom operators.

The model is cut before them. The part before the cut is calibrated, quantized and evaluated. The
unknown nodes and everything downstream of them stay as they are, with the constants they read, and
are put back into the files for the runtimes that know them::

    x --> Conv --> Relu --> boxes, scores --> EfficientNMS_TRT --> Cast --> kept
          '------ cut model ------'           '------- behind -------'
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx
from onnx import helper

from deploy.errors import ExportError, ModelError, counted
from deploy.frontends.checks import check_valid
from deploy.frontends.shapes import infer_shapes
from deploy.graph.edit import (
    copy_message,
    copy_tensor,
    drop_dead,
    drop_unused_domains,
    rename_reads,
    replace_field,
    replace_nodes,
    retain_named,
    sort_nodes,
    tensor_names,
    unique_name,
)
from deploy.graph.index import (
    ONNX_DOMAINS,
    Graph,
    Nodes,
    all_outputs,
    all_reads,
    by_name,
    iter_reads,
    names_of,
    nested_nodes,
    opset_of,
)
from deploy.graph.lowering import is_standard, lower_opset
from deploy.graph.opset_forms import find_upgrades
from deploy.graph.plan import FLOAT32, Decision


@dataclass(frozen=True, slots=True)
class CutOffNodes:
    """The part cut off a model: unknown nodes, and everything downstream of them.

    Attributes:
        model: the nodes, as in the file, in their order, and the constants that they read; its
            inputs, outputs and opsets are those of the entire model.
    """

    model: onnx.ModelProto

    @property
    def nodes(self) -> Nodes:
        """The nodes, in their order."""
        return list(self.model.graph.node)

    @property
    def first_unknown(self) -> onnx.NodeProto:
        """The first node that ONNX Runtime does not know."""
        return next(filter(is_unknown_node, self.nodes))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One decision per node; all of them stay float."""
        decisions = []
        for node in self.nodes:
            reason = "behind a node that onnxruntime does not know"
            if is_unknown_node(node):
                reason = "onnxruntime does not know it"
            name = node.name or node.output[0]
            decisions.append(Decision(name, node.op_type, FLOAT32, reason))
        return tuple(decisions)

    @property
    def first_unknown_text(self) -> str:
        """Text for the first node that ONNX Runtime does not know."""
        node = self.first_unknown
        domain = f" of the domain '{node.domain}'" if node.domain else ""
        return f"{node.op_type}{domain} ({node.name or next(iter(node.output), '')!r})"

    def note(self, outputs: Iterable[str]) -> str:
        """Return the note for the user; `outputs` are those of the part before the cut."""
        return (
            f"Cut before {self.first_unknown_text}, which onnxruntime does not know: calibrated and"
            f" evaluated on {', '.join(outputs)}; {counted(len(self.nodes), 'node')} from there on"
            " kept as in the file, for TensorRT and Ascend."
        )

    def append_to(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return the entire model: `model` (the part before the cut), and the cut-off nodes.

        Raises:
            ExportError: a cut-off node has no form in the opset of `model`.
        """
        opset = opset_of(model)
        if opset < opset_of(self.model):  # lower the cut-off nodes first
            lowered = lower_opset(self.model, opset=opset).model
            # lowering also declares the types that it infers; declare the outputs as in the file
            replace_field(lowered.graph.output, self.model.graph.output)
            return CutOffNodes(lowered).append_to(model)
        self._refuse_newer_forms(opset)
        complete = copy_message(model)
        graph = complete.graph
        file_graph = self.model.graph  # has the inputs and outputs of the file
        nodes = list(map(copy_message, self.nodes))
        self._add_constants(graph, nodes)  # those that `nodes` read, renamed there if taken
        replace_nodes(graph, [*graph.node, *nodes])

        # the file's inputs and outputs; one that `model` has too is declared as in `model`
        value_by_name = by_name(map(copy_message, (*graph.input, *graph.output)))
        inputs = [value_by_name.get(value.name, value) for value in file_graph.input]
        outputs = [value_by_name.get(value.name, value) for value in file_graph.output]
        replace_field(graph.input, inputs)
        replace_field(graph.output, outputs)

        domains = {entry.domain for entry in complete.opset_import}
        for entry in self.model.opset_import:
            if entry.domain not in domains:
                complete.opset_import.append(entry)
        return complete

    def _add_constants(self, graph: onnx.GraphProto, nodes: Nodes) -> None:
        """Add the constants that `nodes` read, under another name if one was changed in `graph`."""
        initializers = by_name(graph.initializer)
        names = tensor_names(graph)
        for tensor in self.model.graph.initializer:
            if initializers.get(tensor.name) == tensor:
                continue
            constant = copy_message(tensor)
            if tensor.name in names:
                constant.name = unique_name(f"{tensor.name}/kept", names)
                rename_reads(nodes, {tensor.name: constant.name})
            graph.initializer.append(constant)

    def _refuse_newer_forms(self, opset: int) -> None:
        """Refuse a newer opset in which the operator of a cut-off node has another form."""
        source_opset = opset_of(self.model)
        changed_types: set[str] = set()
        for node in self.nodes:
            for inner in nested_nodes(node):
                if not inner.domain and find_upgrades(inner, source_opset, opset):
                    changed_types.add(inner.op_type)
        if changed_types:
            raise ExportError(
                f"nodes after {self.first_unknown.op_type}, which ONNX Runtime does not know, are"
                f" kept unchanged, got {', '.join(sorted(changed_types))} of opset {source_opset},"
                f" which opset {opset} has in another form; export the model with opset {opset}"
            )


def cut_unknown_nodes(model: onnx.ModelProto) -> CutOffNodes | None:
    """Cut a model before the nodes that ONNX Runtime does not know, in place.

    The unknown nodes and all nodes downstream are cut off, and the nodes that compute constants for
    these alone. A tensor that a remaining node computes for them becomes an output of the model.

    Args:
        model: without functions.

    Returns:
        The nodes that were cut off; None if there are no unknown nodes, and the model stays as it
        is.

    Raises:
        ModelError: no node is left before them.
    """
    unknown_nodes = list(filter(is_unknown_node, model.graph.node))
    if not unknown_nodes:
        return None
    import_domains(model, unknown_nodes)  # without it, `infer_shapes` refuses the model
    sort_nodes(model.graph)
    complete_graph = Graph(infer_shapes(model))
    cut_indices = _find_unknown_and_downstream(model.graph.node)
    _add_constant_nodes_to(cut_indices, complete_graph)
    nodes = list(model.graph.node)
    cut_nodes = [nodes[index] for index in sorted(cut_indices)]
    remaining_nodes = [node for index, node in enumerate(nodes) if index not in cut_indices]
    cut_off = CutOffNodes(_extract_cut_model(model, complete_graph, cut_nodes))
    _reduce_to(model, remaining_nodes, cut_nodes, complete_graph)
    if not model.graph.output:
        raise ModelError(
            "calib8 calibrates the part of a model before nodes that onnxruntime does not know,"
            f" got {cut_off.first_unknown_text} with no node before it; export the model with"
            " standard ONNX operators"
        )
    return cut_off


def _extract_cut_model(model: onnx.ModelProto, graph: Graph, cut_nodes: Nodes) -> onnx.ModelProto:
    """Return a model of the nodes to cut off, with the constants that they read.

    It declares the inputs and outputs of the entire model, not those of the cut nodes, so that
    `CutOffNodes.append_to` can restore them. So it cannot run by itself.

    Args:
        model: the entire model.
        graph: its index.
        cut_nodes: the nodes, in their order.
    """
    cut_model = onnx.ModelProto(ir_version=onnx.IR_VERSION, opset_import=model.opset_import)
    cut_model.graph.node.extend(cut_nodes)
    for name in dict.fromkeys(all_reads(cut_nodes)):
        if name in graph.constants:
            cut_model.graph.initializer.append(copy_tensor(graph.constants[name], name))
    cut_model.graph.input.extend(model.graph.input)
    cut_model.graph.output.extend(model.graph.output)
    return cut_model


def import_domains(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Import the domains of nodes that the file forgot, which ONNX's checks need."""
    domains = {entry.domain for entry in model.opset_import}.union(ONNX_DOMAINS)
    for node in nodes:
        if node.domain not in domains:
            model.opset_import.append(helper.make_opsetid(node.domain, 1))
            domains.add(node.domain)


def _find_unknown_and_downstream(nodes: Iterable[onnx.NodeProto]) -> set[int]:
    """Return the indices of the unknown nodes and of all nodes downstream, given sorted nodes."""
    indices: set[int] = set()
    unknown_results: set[str] = set()
    for index, node in enumerate(nodes):
        if is_unknown_node(node) or not unknown_results.isdisjoint(iter_reads(node)):
            indices.add(index)
            unknown_results.update(node.output)
    return indices


def _add_constant_nodes_to(cut_indices: set[int], graph: Graph) -> None:
    """Add to `cut_indices` the nodes that compute constants for cut-off nodes alone.

    If such a node remained, its constant would become an output of the model. Stored constants
    (initializers and Constant nodes) need not be cut off: `_extract_cut_model` copies them.

    Args:
        cut_indices: indices of the nodes to cut off; it grows.
        graph: of the model; its nodes are sorted.
    """
    constant_tensors = set(graph.constants)  # the stored ones, then also those computed from them
    for node in graph.nodes:
        if constant_tensors.issuperset(iter_reads(node)):
            constant_tensors.update(node.output)

    # from the last node to the first, so that the readers of a node are known
    cut_reads: set[str] = set()  # tensors that the cut-off nodes read, without stored constants
    remaining_reads = set(graph.outputs)
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        is_constant = constant_tensors.issuperset(node.output)
        is_read_by_cut = not cut_reads.isdisjoint(node.output)
        is_read_by_remaining = not remaining_reads.isdisjoint(node.output)
        if is_constant and is_read_by_cut and not is_read_by_remaining:
            cut_indices.add(index)
        if index in cut_indices:
            cut_reads.update(set(iter_reads(node)).difference(graph.constants))
        else:
            remaining_reads.update(iter_reads(node))


def _reduce_to(
    model: onnx.ModelProto, remaining_nodes: Nodes, cut_nodes: Nodes, complete_graph: Graph
) -> None:
    """Reduce a model to the nodes that remain, in place.

    A tensor that a remaining node computes and a cut-off node reads becomes an output of the model.

    Args:
        model: changes.
        remaining_nodes: the nodes that stay.
        cut_nodes: the nodes that are cut off.
        complete_graph: index of the complete model, with inferred types and shapes.
    """
    graph = model.graph
    produced = all_outputs(remaining_nodes)
    retain_named(graph.output, produced)
    outputs = names_of(graph.output)
    for name in dict.fromkeys(all_reads(cut_nodes)):  # each once and in order
        if name in produced and name not in outputs and name not in complete_graph.constants:
            dtype = complete_graph.dtypes.get(name, onnx.TensorProto.UNDEFINED)
            shape = complete_graph.shapes.get(name)
            graph.output.append(helper.make_tensor_value_info(name, dtype, shape))
    replace_nodes(graph, remaining_nodes)
    drop_dead(graph)
    retain_named(graph.input, set(all_reads(graph.node)))
    retain_named(graph.value_info, produced)
    drop_unused_domains(model)


def is_unknown_node(node: onnx.NodeProto) -> bool:
    """Return whether ONNX Runtime does not know a node, or a node in its subgraphs."""
    for inner in nested_nodes(node):
        has_runtime_domain = inner.domain == "ai.onnx.ml" or inner.domain.startswith(
            "com.microsoft"
        )
        if not has_runtime_domain and not is_standard(inner):
            return True
    return False


def check_part_valid(model: onnx.ModelProto) -> None:
    """Run `check_valid` on a model with unknown nodes; only their names are checked.

    Raises:
        ModelError: the model is not valid.
    """
    checked = copy_message(model)
    unknown_nodes = list(filter(is_unknown_node, checked.graph.node))
    for node in unknown_nodes:  # of a node in a foreign domain, only the names are checked
        node.domain = "strange"
    if unknown_nodes:
        checked.opset_import.append(helper.make_opsetid("strange", 1))
    check_valid(checked)
