"""ONNX model edits: the only module that copies messages and replaces fields of a graph.

Contract of every edit in this project:

* A function from model to model leaves its argument unchanged: it works on a copy
  (`copy_message`) with all weights, metadata, functions and opset imports.
* A function that takes a graph changes it in place and returns a count or nothing; only the owner
  of the graph calls it.
* Tensors and nodes keep their names, except for what the function's name says.
* `replace_field` copies the values before it empties the field, so they may be elements of the
  field. `replace_nodes` does not copy the nodes that stay, it only reorders them.

Wherever readers of a tensor matter, subgraphs are searched too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.errors import ModelError
from deploy.graph.index import (
    ONNX_DOMAINS,
    Nodes,
    all_graphs,
    all_nodes,
    all_outputs,
    by_name,
    count_reads,
    declared_values,
    describe_node,
    iter_reads,
    names_of,
    runtime_inputs,
    subgraphs,
)

if TYPE_CHECKING:
    import onnx

    Message = TypeVar(
        "Message", onnx.ModelProto, onnx.NodeProto, onnx.TensorProto, onnx.ValueInfoProto
    )


def copy_message(message: Message) -> Message:
    """Return a copy of a protobuf message."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def copy_tensor(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """Return a copy of a tensor under a name."""
    copy = copy_message(tensor)
    copy.name = name
    return copy


def copy_with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy with these tensors appended to the outputs, without their types."""
    tapped = copy_message(model)
    append_outputs(tapped, names)
    return tapped


def append_outputs(model: onnx.ModelProto, names: Iterable[str]) -> None:
    """Append these tensors to the outputs, without their types."""
    output_names = names_of(model.graph.output)
    for name in names:
        if name not in output_names:
            model.graph.output.add(name=name)
            output_names.add(name)


def extract_output(model: onnx.ModelProto, tensor: str) -> onnx.ModelProto:
    """Return a model with one tensor as its output and only the nodes and constants it needs."""
    from onnx import ValueInfoProto

    graph = model.graph
    nodes, tensors = _find_upstream(graph, {tensor})
    unread = names_of(graph.initializer) - tensors  # IR 3 lists initializers among the inputs too
    inputs = [value for value in graph.input if value.name not in unread]
    output = by_name(graph.output).get(tensor, ValueInfoProto(name=tensor))
    return extract_nodes(model, nodes, tensors, inputs=inputs, outputs=[output])


def _find_upstream(graph: onnx.GraphProto, outputs: set[str]) -> tuple[Nodes, set[str]]:
    """Return (nodes that compute some tensors, in order; these tensors and all that they need)."""
    tensors = set(outputs)
    nodes = []
    for node in reversed(graph.node):
        if not tensors.isdisjoint(node.output):
            tensors.update(iter_reads(node))
            nodes.append(node)
    return nodes[::-1], tensors


def extract_nodes(
    model: onnx.ModelProto,
    nodes: Iterable[onnx.NodeProto],
    needed: Collection[str],
    *,
    inputs: Iterable[onnx.ValueInfoProto],
    outputs: Iterable[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    """Return a model of some nodes, in this order, with the initializers named in `needed`."""
    graph = model.graph
    extract = type(model)(ir_version=model.ir_version)
    extract.opset_import.extend(model.opset_import)
    extract.functions.extend(model.functions)
    extract.graph.name = graph.name
    extract.graph.input.extend(inputs)
    extract.graph.node.extend(nodes)
    extract.graph.initializer.extend(t for t in graph.initializer if t.name in needed)
    extract.graph.sparse_initializer.extend(graph.sparse_initializer)
    extract.graph.output.extend(outputs)
    return extract


def replace_field(repeated: Any, values: Iterable[Any]) -> None:
    """Replace a repeated field by copies of `values`, which may be elements of the field."""
    copies = [copy_message(value) for value in values]
    del repeated[:]
    repeated.extend(copies)


def retain_named(repeated: Any, names: Collection[str]) -> None:
    """Remove the elements of a repeated field whose names are not among `names`."""
    replace_field(repeated, [value for value in repeated if value.name in names])


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Make `nodes` the nodes of a graph, in this order.

    Nodes that the graph has already are moved, not copied, so that references to them stay valid.
    Nodes from elsewhere are copied. Nodes of the graph that are not among `nodes` are removed.
    """
    new_nodes = list(nodes)
    graph_nodes = list(graph.node)
    graph_node_ids = {id(node) for node in graph_nodes}
    position_by_id = {}  # id of a node -> its position in the new order
    for position, node in enumerate(new_nodes):
        if id(node) not in graph_node_ids:
            graph.node.append(node)  # copies it
            node = graph.node[-1]
            graph_nodes.append(node)  # holds a reference: else Python could give its id again
        position_by_id[id(node)] = position
    assert len(position_by_id) == len(new_nodes), "a node can stand in one place only"

    for index in reversed(range(len(graph_nodes))):
        if id(graph_nodes[index]) not in position_by_id:
            del graph.node[index]
    graph.node.sort(key=lambda node: position_by_id[id(node)])


def rebuild(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Set the nodes of a graph and drop unread initializers and inferred types."""
    replace_nodes(graph, nodes)
    drop_unread(graph)
    del graph.value_info[:]


def make_node(
    op_type: str, inputs: Sequence[str], output: str, name: str = "", **attributes: Any
) -> onnx.NodeProto:
    """Return a node with one output."""
    from onnx import helper

    return helper.make_node(op_type, inputs, [output], name, **attributes)


def set_input(node: onnx.NodeProto, index: int, name: str) -> None:
    """Set one input of a node, whose inputs before it may be left out."""
    while len(node.input) <= index:
        node.input.append("")
    node.input[index] = name


def drop_attribute(node: onnx.NodeProto, name: str) -> None:
    """Remove an attribute of a node, if it has it."""
    for attribute in list(node.attribute):
        if attribute.name == name:
            node.attribute.remove(attribute)


def update_tensors(tensors: Any, new_tensors: Mapping[str, onnx.TensorProto]) -> None:
    """Overwrite tensors of a repeated field by those of the same name; append the others.

    Tensors of the field that have no new one stay in place: copying them would copy all weights.

    `new_tensors`: name -> tensor.
    """
    appended = dict(new_tensors)
    for tensor in tensors:
        if tensor.name in new_tensors:
            tensor.CopyFrom(new_tensors[tensor.name])
            appended.pop(tensor.name, None)
    tensors.extend(appended.values())


def drop_initializer_inputs(graph: onnx.GraphProto) -> int:
    """Remove initializers from the graph inputs (IR 3 lists them there); return their number."""
    inputs = runtime_inputs(graph)
    removed_count = len(graph.input) - len(inputs)
    if removed_count:
        replace_field(graph.input, inputs)
    return removed_count


def rename_reads(nodes: Iterable[onnx.NodeProto], new_name: Mapping[str, str]) -> None:
    """Rename the tensors that nodes read, in subgraphs too."""
    for node in nodes:
        for position, name in enumerate(node.input):
            if name in new_name:
                node.input[position] = new_name[name]
        for body in subgraphs(node):
            rename_reads(body.node, new_name)
            for value in body.output:
                value.name = new_name.get(value.name, value.name)


def rename_tensors(nodes: Iterable[onnx.NodeProto], new_name: Mapping[str, str]) -> None:
    """Rename the tensors that nodes read, in subgraphs too, and those that they produce."""
    for node in nodes:
        rename_reads([node], new_name)
        for position, name in enumerate(node.output):
            node.output[position] = new_name.get(name, name)


def bypass(graph: onnx.GraphProto, passes: Callable[[onnx.NodeProto], bool]) -> int:
    """Remove nodes that only pass their input on, in place; return their number.

    Readers of a removed node read its input instead. A node that makes a graph output stays, as the
    output's name must stay.

    Args:
        graph: the graph, its nodes in topological order.
        passes: whether a node only passes its first input on.
    """
    outputs = names_of(graph.output)
    source_by_output: dict[str, str] = {}  # output of a removed node -> what to read instead
    remaining_nodes = []
    for node in graph.node:
        if passes(node) and node.output[0] not in outputs:
            source = node.input[0]  # perhaps the output of another removed node
            source_by_output[node.output[0]] = source_by_output.get(source, source)
        else:
            remaining_nodes.append(node)
    if source_by_output:
        rename_reads(remaining_nodes, source_by_output)
        replace_nodes(graph, remaining_nodes)
    return len(source_by_output)


def adopt_runtime_nodes(graph: onnx.GraphProto, op_types: Collection[str]) -> None:
    """Move nodes from ONNX Runtime's own domain to ONNX's, in place.

    `op_types`: operators that mean the same in both.
    """
    for node in all_nodes(graph):
        if node.op_type in op_types and node.domain == "com.microsoft":
            node.domain = ""


# Norms whose output is of the type and shape of their input, which ONNX 1.23 does not infer.
_NORMS = frozenset(("GroupNormalization", "MeanVarianceNormalization"))


def infer_types(model: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
    """Return a copy with inferred types and shapes; `options` are those of ONNX's function."""
    from onnx import shape_inference

    _guard_slices()  # else a Slice of a negative size would end the process
    op_types = [node.op_type for node in all_nodes(model.graph)]
    if _NORMS.isdisjoint(op_types):
        return shape_inference.infer_shapes(model, **options)

    # in a copy, the norms that ONNX does not infer become Identity nodes during inference: their
    # output has the type and shape of their input too
    substitute = copy_message(model)
    for node in all_nodes(substitute.graph):
        if node.op_type in _NORMS:
            node.op_type = "Identity"
    inferred = shape_inference.infer_shapes(substitute, **options)
    for node, op_type in zip(all_nodes(inferred.graph), op_types, strict=True):
        node.op_type = op_type
    return inferred


@cache
def _guard_slices() -> None:
    """Have ONNX's inference refuse a Slice of a negative size, at which it would end the process.

    A size becomes negative where a kernel, a cut or a negative padding is larger than its input.
    ONNX's C++ clamps the indices to 0..size, and asserts that size is at least 0. So each version
    of Slice is registered again, with an inference function that looks at the sizes first.
    """
    from onnx import defs, shape_inference

    error = shape_inference.InferenceError  # raised to ONNX's inference, which refuses the model

    def infer_unless_negative(infer: Callable[[Any], None], context: Any) -> None:
        """Call ONNX's inference function of Slice, unless a size of the input is negative."""
        input_type = context.get_input_type(0)
        dims = () if input_type is None else input_type.tensor_type.shape.dim
        sizes = [dim.dim_value for dim in dims]
        if min(sizes, default=0) < 0:
            raise error(f"a Slice of a tensor of the shape {sizes}")
        with suppress(error):  # ONNX itself goes on without a type that it could not infer
            infer(context)

    if hasattr(defs.OpSchema, "set_type_and_shape_inference_function"):  # ONNX 1.18
        for version in (1, 10, 11, 13):
            schema = defs.get_schema("Slice", version)
            infer = schema.get_type_and_shape_inference_function()
            schema.set_type_and_shape_inference_function(partial(infer_unless_negative, infer))
            defs.deregister_schema("Slice", version, "")
            defs.register_schema(schema)


def empty_default_domain(model: onnx.ModelProto) -> None:
    """Write the domain `ai.onnx` as the empty one, which is the same in ONNX, in place."""
    for body in (model.graph, *model.functions):
        for node in all_nodes(body):
            if node.domain == "ai.onnx":
                node.domain = ""
    # a model or function may import the operator set by both names: the newer version stays
    for importer in (model, *model.functions):
        imports = importer.opset_import
        default_imports = [entry for entry in imports if entry.domain in ONNX_DOMAINS]
        if any(entry.domain for entry in default_imports):
            version = max(entry.version for entry in default_imports)
            custom_imports = [entry for entry in imports if entry not in default_imports]
            default_imports[0].version = version
            default_imports[0].domain = ""
            replace_field(imports, [default_imports[0], *custom_imports])


def drop_unused_domains(model: onnx.ModelProto) -> None:
    """Remove the imports of operator sets that no node uses, in place.

    Exporters list `ai.onnx.ml` and more in every model, and Ascend's atc reads one operator set.
    """
    domains = set(ONNX_DOMAINS)
    for body in (model.graph, *model.functions):
        domains.update(node.domain for node in all_nodes(body))
    imports = [entry for entry in model.opset_import if entry.domain in domains]
    replace_field(model.opset_import, imports)


def set_opset(model: onnx.ModelProto, version: int) -> None:
    """Set the imported version of the default operator set."""
    for entry in model.opset_import:
        if entry.domain in ONNX_DOMAINS:
            entry.version = version


def drop_dead(graph: onnx.GraphProto) -> int:
    """Remove nodes that no output needs, then unread constants; return the number of nodes."""
    needed_nodes, _ = _find_upstream(graph, names_of(graph.output))
    dropped_count = len(graph.node) - len(needed_nodes)
    if dropped_count:
        replace_nodes(graph, needed_nodes)
    drop_unread(graph)
    return dropped_count


def drop_unread(graph: onnx.GraphProto) -> None:
    """Remove initializers that no node reads and that are no graph output."""
    constants = names_of(graph.initializer)
    drop_initializers(graph, constants.difference(count_reads(graph)))


def drop_initializers(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Remove the initializers of these names."""
    dropped = [index for index, tensor in enumerate(graph.initializer) if tensor.name in names]
    for index in reversed(dropped):  # one by one: copying those that stay would copy all weights
        del graph.initializer[index]


def sort_nodes(graph: onnx.GraphProto) -> bool:
    """Sort nodes topologically, each as early as its inputs; return whether the order changed.

    Raises:
        ModelError: the graph has a cycle.
    """
    pending_tensors = all_outputs(graph.node)
    pending_nodes = list(graph.node)
    order: Nodes = []
    while pending_nodes:
        later_nodes = []
        for node in pending_nodes:
            if pending_tensors.isdisjoint(iter_reads(node)):
                order.append(node)
                pending_tensors.difference_update(node.output)
            else:
                later_nodes.append(node)
        if len(later_nodes) == len(pending_nodes):
            node = later_nodes[0]
            raise ModelError(
                f"a graph must have no cycle, got one through {describe_node(node)}; export the"
                " model again"
            )
        pending_nodes = later_nodes

    has_changed = any(a is not b for a, b in zip(order, graph.node, strict=True))
    if has_changed:
        replace_nodes(graph, order)
    return has_changed


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give each node of the main graph a unique name, in place.

    A node without a name is named after its type and first output, which do not change when other
    nodes are added or removed; a duplicate name gets a number.
    """
    names: set[str] = set()
    for node in graph.node:
        preferred = node.name or f"{node.op_type}_{next(filter(None, node.output), 'none')}"
        node.name = claim_name(preferred, names)


def name_nodes_by_index(graph: onnx.GraphProto) -> None:
    """Give each node of the main graph a unique name, in place, by the rule of Huawei's AMCT.

    A node without a name, or with that of an earlier node, becomes '<op>_<index>'. AMCT's
    configurations and records name nodes so.
    """
    names = names_of(graph.node)
    earlier_names = {""}
    for index, node in enumerate(graph.node):
        if node.name in earlier_names:
            node.name = claim_name(f"{node.op_type}_{index}", names)
        earlier_names.add(node.name)


# last words of the names that calib8 adds, after the name of a tensor or node
ADDED = frozenset((
    "Add", "Cast", "Clip", "Constant", "DQ", "Product", "Q", "Scale", "anti_quant", "apart",
    "as_it_was", "bias_quant", "cast", "centre", "centred", "cut", "data", "dequant", "dequantize",
    "dequantized", "dqscale", "dynamic", "exec", "f", "factor", "fake_antiquant", "fakedequant",
    "fakequant", "flat", "float", "gate", "gated", "half", "high", "i", "in", "in_a_row", "input",
    "int", "kept", "larger", "lifted", "low", "moved", "mul", "of_a_row", "offset", "offset_d",
    "offset_w", "ordered", "out", "output", "over", "pads", "param", "part", "pooled", "product",
    "quant", "quant_bias", "quantize", "quantized", "read", "repeated", "rounded", "rows", "scale",
    "scale_d", "scale_w", "scaled", "shape", "shape_in_a_row", "shift", "shifted", "sizes", "split",
    "sum", "tensor_balance_factor", "told", "turned", "u", "whole", "written", "wzero", "zero",
    "zero_point",
))  # fmt: skip
_JOINING_WORDS = ("weight", "bias")  # also in names of models, so one of ADDED must be there too


def free_added_names(graph: onnx.GraphProto) -> list[str]:
    """Rename, in place, the tensors and nodes of a model that have names which calib8 gives itself.

    Beside a tensor `T`, the base, calib8 adds tensors such as `T/scale`, with a suffix in `ADDED`.
    If the model has a `T/scale` of its own, that becomes `T/scale_own`. If it is an input or output
    of the model, whose name must stay, `T` is renamed instead.

    Returns:
        The names that were replaced.

    Raises:
        ModelError: both the base and the tensor beside it are inputs or outputs.
    """
    graph_and_subgraphs = list(all_graphs(graph))
    names = tensor_names(*graph_and_subgraphs)
    for body in graph_and_subgraphs:
        names |= names_of(body.node)
    names.discard("")
    interface_names = names_of((*graph.input, *graph.output))
    # every `T` beside which calib8 may add a `T/scale`: each name of the model. Also the T of each
    # `T/dequantized` and `T/float`, even if the model has no tensor `T`: code that reads Q/DQ
    # models takes such a tensor for `T`. Not of inputs and outputs, which keep their names
    base_names = set(names)
    for name in names - interface_names:
        base_names |= {name.removesuffix("/dequantized"), name.removesuffix("/float")}

    new_names = {}  # name -> its new name
    for name in sorted(names):
        base_name = _find_base_name(name, base_names)
        if base_name is None:
            continue
        name_to_replace = base_name if name in interface_names else name
        if name_to_replace in interface_names:  # the base is an input or output too
            raise ModelError(
                f"an input or output must not have a name that calib8 adds for another one, got"
                f" {name!r} beside {base_name!r}; export the model with other names"
            )
        new_names[name_to_replace] = unique_name(f"{name_to_replace}_own", names)
    if new_names:
        for body in graph_and_subgraphs:
            _rename_all(body, new_names)
    return list(new_names)


def _rename_all(graph: onnx.GraphProto, new_names: Mapping[str, str]) -> None:
    """Rename the nodes and tensors of one graph."""
    rename_tensors(graph.node, new_names)
    for item in (*graph.node, *graph.initializer, *declared_values(graph)):
        item.name = new_names.get(item.name, item.name)


def tensor_names(*graphs: onnx.GraphProto) -> set[str]:
    """Return the inputs and constants of graphs and what their own nodes make."""
    names: set[str] = set()
    for graph in graphs:
        names |= names_of((*graph.input, *graph.initializer)) | all_outputs(graph.node)
    return names


def _find_base_name(name: str, base_names: Collection[str]) -> str | None:
    """Return the base name to which words of `ADDED` are appended; None if `name` is no such name.

    Of `T/scale` this is `T`, if that is among `base_names`.
    """
    # of "a/b.c" in turn "a", "a/", "a/b", "a/b.", "a/b.c"
    for base_name in accumulate(re.split("([/.])", name)):
        if base_name not in base_names:
            continue
        # what follows the base name, without its "/" or "." and without a number at the end
        words = re.split("[/.]", name[len(base_name) + 1 :].rstrip("0123456789"))
        if not ADDED.isdisjoint(words) and all(map(_can_be_added, words)):
            return base_name
    return None


def _can_be_added(word: str) -> bool:
    """Whether a word can follow a name of the model in a name that calib8 adds."""
    return word in ADDED or word in _JOINING_WORDS or word.isdigit()


def unique_name(preferred: str, names: Collection[str]) -> str:
    """Return the first of `preferred`, `preferred_1`, `preferred_2`, ... that is not in `names`."""
    name = preferred
    number = 0
    while name in names:
        number += 1
        name = f"{preferred}_{number}"
    return name


def claim_name(preferred: str, names: set[str]) -> str:
    """Return `unique_name`, and add it to `names`."""
    name = unique_name(preferred, names)
    names.add(name)
    return name
