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
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate
from operator import or_
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.errors import ModelError
from deploy.graph.index import (
    all_graphs,
    all_nodes,
    find_read_tensors,
    has_no_subgraph,
    iter_reads,
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


def copy_without_initializers(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """Return a copy of a model without the initializers of these names.

    These may be most of the model's bytes, so they are never copied.
    """
    copy = type(model)()
    for field, value in model.ListFields():
        if field.name != "graph":
            _take(copy, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name == "initializer":
            copy.graph.initializer.extend(t for t in value if t.name not in names)
        else:
            _take(copy.graph, field.name, value)
    return copy


def _take(message: Any, field: str, value: Any) -> None:
    """Copy a field's value into the empty field of another message."""
    held = getattr(message, field)
    if hasattr(held, "extend"):
        held.extend(value)
    elif hasattr(held, "CopyFrom"):
        held.CopyFrom(value)
    else:
        setattr(message, field, value)


def copy_with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy with these tensors appended to the outputs, without their types."""
    from onnx import ValueInfoProto

    tapped = copy_message(model)
    known = {output.name for output in tapped.graph.output}
    tapped.graph.output.extend(
        ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in known
    )
    return tapped


def extract_output(model: onnx.ModelProto, tensor: str) -> onnx.ModelProto:
    """Return a model with one tensor as its output and only the nodes and constants it needs."""
    from onnx import ValueInfoProto

    graph, needed, nodes = model.graph, {tensor}, []
    for node in reversed(graph.node):
        if any(name in needed for name in node.output):
            needed.update(iter_reads(node))
            nodes.append(node)
    unread = {t.name for t in graph.initializer} - needed
    own = [value for value in graph.output if value.name == tensor]
    return extract_nodes(
        model,
        reversed(nodes),
        needed,
        inputs=(v for v in graph.input if v.name not in unread),
        outputs=own or [ValueInfoProto(name=tensor)],
    )


def extract_nodes(
    model: onnx.ModelProto,
    nodes: Iterable[onnx.NodeProto],
    needed: Collection[str],
    *,
    inputs: Iterable[onnx.ValueInfoProto],
    outputs: Iterable[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    """Return a model of some nodes, in this order, with the initializers that are `needed`."""
    graph = model.graph
    short = type(model)(ir_version=model.ir_version)
    short.opset_import.extend(model.opset_import)
    short.functions.extend(model.functions)
    short.graph.name = graph.name
    short.graph.input.extend(inputs)
    short.graph.node.extend(nodes)
    short.graph.initializer.extend(t for t in graph.initializer if t.name in needed)
    short.graph.sparse_initializer.extend(graph.sparse_initializer)
    short.graph.output.extend(outputs)
    return short


def replace_field(repeated: Any, values: Iterable[Any]) -> None:
    """Replace a repeated field by copies of `values`, which may be elements of the field."""
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del repeated[:]
    repeated.extend(copies)


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Set the nodes of a graph, in this order; its own are moved, others are copied."""
    wanted, held = list(nodes), list(graph.node)
    own = {id(node) for node in held}
    place: dict[int, int] = {}
    for at, node in enumerate(wanted):
        if id(node) not in own:
            graph.node.append(node)
            node = graph.node[-1]
            held.append(node)
        place[id(node)] = at
    assert len(place) == len(wanted), "a node can stand in one place only"
    for at in range(len(held) - 1, -1, -1):
        if id(held[at]) not in place:
            del graph.node[at]
    graph.node.sort(key=lambda node: place[id(node)])


def rebuild(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Set the nodes of a graph and drop unread initializers and inferred types."""
    replace_nodes(graph, nodes)
    drop_unread(graph)
    del graph.value_info[:]


def update_tensors(tensors: Any, new: Mapping[str, onnx.TensorProto]) -> None:
    """Overwrite tensors of a repeated field by name; append those of `new` that it lacks.

    The others stay in place: copying them all would copy all weights.
    """
    left = dict(new)
    for tensor in tensors:
        if tensor.name in new:
            tensor.CopyFrom(new[tensor.name])
            left.pop(tensor.name, None)
    tensors.extend(left.values())


def drop_initializer_inputs(graph: onnx.GraphProto) -> int:
    """Remove initializers from the graph inputs (IR 3 lists them there); return their number."""
    constants = {tensor.name for tensor in graph.initializer}
    kept = [value for value in graph.input if value.name not in constants]
    taken = len(graph.input) - len(kept)
    if taken:
        replace_field(graph.input, kept)
    return taken


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
    rename_reads(nodes := list(nodes), new_name)
    for node in nodes:
        for position, name in enumerate(node.output):
            node.output[position] = new_name.get(name, name)


def bypass(graph: onnx.GraphProto, passes: Callable[[onnx.NodeProto], bool]) -> int:
    """Remove nodes that only pass their input on, in place; return their number.

    Their readers read their input instead. A node that produces a graph output stays, as the
    output's name must stay.
    """
    outputs = {value.name for value in graph.output}
    new_name: dict[str, str] = {}
    remaining = []
    for node in graph.node:
        if passes(node) and node.output[0] not in outputs:
            new_name[node.output[0]] = new_name.get(node.input[0], node.input[0])
        else:
            remaining.append(node)
    if new_name:
        rename_reads(remaining, new_name)
        replace_nodes(graph, remaining)
    return len(new_name)


# Norms whose output is of the type and shape of their input, which ONNX 1.23 does not infer.
_NORMS = frozenset(("GroupNormalization", "MeanVarianceNormalization"))


def infer_types(model: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
    """Return a copy with inferred types and shapes; `options` are those of ONNX's function."""
    from onnx import shape_inference

    _guard_slices()
    types = [node.op_type for node in all_nodes(model.graph)]
    norms = {at: op_type for at, op_type in enumerate(types) if op_type in _NORMS}
    if not norms:
        return shape_inference.infer_shapes(model, **options)
    swapped = copy_message(model)
    for at, node in enumerate(all_nodes(swapped.graph)):
        node.op_type = "Identity" if at in norms else node.op_type
    inferred = shape_inference.infer_shapes(swapped, **options)
    for at, node in enumerate(all_nodes(inferred.graph)):
        node.op_type = norms.get(at, node.op_type)
    return inferred


@cache
def _guard_slices() -> None:
    """Have ONNX's inference refuse a Slice of a negative size, at which it would end the process.

    A size becomes negative where a kernel, a cut or a negative padding is larger than its input.
    ONNX's C++ clamps the indices to 0..size, and asserts that size is at least 0.
    """
    from onnx import defs, shape_inference

    error = shape_inference.InferenceError

    def guarded(infer: Callable[[Any], None], context: Any) -> None:
        given = context.get_input_type(0)
        sizes = [] if given is None else [dim.dim_value for dim in given.tensor_type.shape.dim]
        if min(sizes, default=0) < 0:
            raise error(f"a Slice of a tensor of the shape {sizes}")
        with suppress(error):  # ONNX itself goes on without a type that it could not infer
            infer(context)

    if hasattr(defs.OpSchema, "set_type_and_shape_inference_function"):  # ONNX 1.18
        for version in (1, 10, 11, 13):
            schema = defs.get_schema("Slice", version)
            own = schema.get_type_and_shape_inference_function()
            schema.set_type_and_shape_inference_function(partial(guarded, own))
            defs.deregister_schema("Slice", version, "")
            defs.register_schema(schema)


def empty_default_domain(model: onnx.ModelProto) -> None:
    """Write the domain `ai.onnx` as the empty one, which is the same in ONNX, in place."""
    for body in (model.graph, *model.functions):
        for node in all_nodes(body):
            if node.domain == "ai.onnx":
                node.domain = ""
    for part in (model, *model.functions):
        named = [entry for entry in part.opset_import if entry.domain in ("", "ai.onnx")]
        if any(entry.domain for entry in named):
            named[0].version = max(entry.version for entry in named)
            named[0].domain = ""
            others = [entry for entry in part.opset_import if entry.domain not in ("", "ai.onnx")]
            replace_field(part.opset_import, [named[0], *others])


def set_opset(model: onnx.ModelProto, version: int) -> None:
    """Set the imported version of the default operator set."""
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = version


def drop_dead(graph: onnx.GraphProto) -> int:
    """Remove nodes that no output needs, then unread constants; return the number of nodes."""
    needed = {value.name for value in graph.output}
    alive = []
    for node in reversed(graph.node):
        if any(name in needed for name in node.output):
            needed.update(node.input if has_no_subgraph(node) else iter_reads(node))
            needed.discard("")
            alive.append(node)
    dropped = len(graph.node) - len(alive)
    if dropped:
        replace_nodes(graph, reversed(alive))
    drop_unread(graph)
    return dropped


def drop_unread(graph: onnx.GraphProto) -> None:
    """Remove initializers that no node reads and that are no graph output."""
    drop_initializers(graph, {one.name for one in graph.initializer} - find_read_tensors(graph))


def drop_initializers(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Remove the initializers of these names."""
    dropped = [at for at, tensor in enumerate(graph.initializer) if tensor.name in names]
    for at in reversed(dropped):  # one by one: copying those that stay would copy all weights
        del graph.initializer[at]


def sort_nodes(graph: onnx.GraphProto) -> bool:
    """Sort nodes topologically with few moves; return whether the order changed.

    Raises:
        ModelError: the graph has a cycle.
    """
    made = {name for node in graph.node for name in node.output if name}
    waiting = list(graph.node)
    order: list[onnx.NodeProto] = []
    ready: set[str] = set()
    while waiting:
        later = []
        for node in waiting:
            if all(name in ready or name not in made for name in iter_reads(node)):
                order.append(node)
                ready.update(node.output)
            else:
                later.append(node)
        if len(later) == len(waiting):
            raise ModelError(
                f"a graph must have no cycle, got one through {later[0].op_type}"
                f" '{later[0].name or ', '.join(later[0].output)}'; export the model again"
            )
        waiting = later
    moved = any(a is not b for a, b in zip(order, graph.node, strict=True))
    if moved:
        replace_nodes(graph, order)
    return moved


def name_nodes(graph: onnx.GraphProto) -> int:
    """Give each node of the main graph a unique name; return the number of new names.

    A node without a name is named after its type and first output, which do not change when other
    nodes are added or removed; a duplicate name gets a number.
    """
    taken: set[str] = set()
    made = 0
    for node in graph.node:
        wanted = node.name or f"{node.op_type}_{next(filter(None, node.output), 'none')}"
        name = claim_name(wanted, taken)
        made += name != node.name
        node.name = name
    return made


def name_nodes_by_index(graph: onnx.GraphProto) -> int:
    """Do as `name_nodes`, by the rule that AMCT's configurations and records follow.

    A node without a name, or with a duplicate one, becomes '<op>_<index>'.
    """
    taken = {node.name for node in graph.node if node.name}
    before: set[str] = set()
    made = 0
    for index, node in enumerate(graph.node):
        if not node.name or node.name in before:
            node.name = claim_name(f"{node.op_type}_{index}", taken)
            made += 1
        before.add(node.name)
    return made


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
_BETWEEN = ("weight", "bias")  # also in names of models, so not enough alone


def rename_added(graph: onnx.GraphProto) -> list[str]:
    """Rename tensors and nodes that have the name of another one with a word of `ADDED` behind it.

    A constant `T/scale` of the model would else be taken for the scale of its tensor `T`. Inputs
    and outputs keep their names; then `T` gets another one.

    Returns:
        The names that were replaced.

    Raises:
        ModelError: both are inputs or outputs.
    """
    bodies = list(all_graphs(graph))
    nodes = {node.name for body in bodies for node in body.node if node.name}
    tensors = {name for body in bodies for name in tensor_names(body)} - {""}
    ends = {value.name for value in (*graph.input, *graph.output)}
    taken = nodes | tensors
    ours = ("/dequantized", "/float")  # calib8 cuts these off, whatever stands before them
    stems = taken.union(name.removesuffix(end) for name in taken - ends for end in ours)
    replaced = []
    for name in sorted(taken):
        stem = _added_to(name, stems)
        if stem is None:
            continue
        replaced.append(stem if name in ends else name)
        if replaced[-1] in ends:
            raise ModelError(
                f"an input or output must not have a name that calib8 adds for another one, got"
                f" {name!r} beside {stem!r}; export the model with other names"
            )
    new_name = {name: unique_name(f"{name}_own", taken) for name in replaced}
    for body in bodies if new_name else ():
        for node in body.node:
            node.name = new_name.get(node.name, node.name)
            for names in (node.input, node.output):
                for place, name in enumerate(names):
                    names[place] = new_name.get(name, name)
        for value in (*body.input, *body.output, *body.value_info, *body.initializer):
            value.name = new_name.get(value.name, value.name)
    return replaced


def tensor_names(graph: onnx.GraphProto) -> Iterable[str]:
    """Yield the inputs, the constants and what the nodes of one graph make."""
    for value in (*graph.input, *graph.initializer):
        yield value.name
    for node in graph.node:
        yield from node.output


def _added_to(name: str, taken: Collection[str]) -> str | None:
    """Return the name that this one is with words of `ADDED` behind it; None if there is none."""
    for stem in accumulate(re.split("([/.])", name)):
        words = re.split("[/.]", name[len(stem) + 1 :].rstrip("0123456789"))
        own = [word in ADDED for word in words]
        between = [word in _BETWEEN or word.isdigit() for word in words]
        if stem in taken and any(own) and all(map(or_, own, between)):
            return stem
    return None


def unique_name(wanted: str, taken: Collection[str]) -> str:
    """Return the first of `wanted`, `wanted_1`, `wanted_2`, ... that is not in `taken`."""
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def claim_name(wanted: str, taken: set[str]) -> str:
    """Return `unique_name`, which is taken from then on."""
    name = unique_name(wanted, taken)
    taken.add(name)
    return name
