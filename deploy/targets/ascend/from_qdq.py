"""A Q/DQ model, trained or calibrated by any tool, as a recipe: AMCT's `convert_qat_model`.

::

    Conv --> x --> Q --> DQ --> Conv     becomes     Conv --> x ------------> Conv, in the record
                         '---> Add                           '--> Round ... --> Add

An int8 layer rounds and saturates its input by itself. What other readers of a pair get, which are
float on Ascend, goes through Div, Round, Clip and Mul, or is rounded no more where that is asked
for. A Clip stays then where a pair stands for a Relu or Clip that the quantizer took out: its codes
begin at 0, and what it reads may be negative.

Integers of weights stay what they are: the float weight is integer times scale, and its scale is in
the record. BatchNormalization behind a layer stays, since folding it would change these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deploy.errors import ExportError, ModelError
from deploy.graph.edit import copied, free_inputs, name_nodes, rebuild, rename_reads, unused
from deploy.graph.flow import MOVES, POOLS
from deploy.graph.index import Graph, all_nodes, reads
from deploy.targets.ascend.layers import TYPES
from deploy.targets.ascend.pairs import DQ, KEEPING, Q, Taken, grid_of, taken_over
from deploy.targets.ascend.recipe import Recipe
from deploy.targets.ascend.rewrite import Nodes

if TYPE_CHECKING:
    import onnx

    from deploy.frontends import LoadedModel
    from deploy.targets.ascend.layers import LayerGraph
    from deploy.targets.ascend.quant_layer import QuantLayer
    from deploy.targets.ascend.record import LayerRecord

_OLDEST = 11  # Clip has its limits as inputs from here on
_POSITIVE = frozenset({"Relu", "Sigmoid", "Softmax", "HardSigmoid"})
_ADDING = frozenset({"Add", "Mul", "Max", "Concat", "Resize"})  # of such without a sign
_TOLD = 3  # names in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What `from_qdq` gives.

    Attributes:
        loaded: the float model, cleaned; it came from no file.
        recipe: its layers and their scales.
    """

    loaded: LoadedModel
    recipe: Recipe


def from_qdq(quantized: onnx.ModelProto, path: Path, *, keep_rounding: bool = True) -> Converted:
    """Take the pairs out, and what they say into records; `quantized` is left as it is.

    Args:
        quantized: a model with QuantizeLinear and DequantizeLinear nodes.
        path: where it came from.
        keep_rounding: round what float operators read as the pairs do.

    Raises:
        ModelError: it is no valid model, or in integer operators, or in pairs that cannot be taken
            out of it.
        ExportError: Ascend can take over none of its layers.
    """
    from deploy.frontends import load

    model = _named(quantized)
    taken, why = taken_over(Graph(model))
    while True:
        plain, loose = _without_pairs(model, taken, keep_rounding=keep_rounding)
        loaded = replace(load(plain, fold_batchnorm=False), name=path.stem)
        graph, layers, rounded, unfit = _quantized(loaded.model, taken)
        if len(layers) == len(taken):
            break
        why |= {n: unfit[n] for n in taken if n in unfit}
        taken = {name: taken[name] for name in layers}  # the others read as float what they read
        if not taken:
            break
    if not layers:
        said = "; ".join(f"{name}: {reason}" for name, reason in list(why.items())[:_TOLD])
        raise ExportError(
            f"a Q/DQ model must have a layer whose pairs Ascend can take over, got none in {path}"
            f" ({said or 'no layer of a type that it has'}); give the float model to calib8 build"
        )
    recipe = Recipe(
        model=loaded.model,
        graph=graph,
        records={name: one.record for name, one in layers.items()},
        layers=layers,
        method="the Q/DQ model's own scales",
        why={name: why.get(name, "its pairs are gone") for name in graph.layers},
        notes=(
            *_notes(path, graph, layers, rounded),
            *_of_loose(loose, keep_rounding=keep_rounding),
        ),
    )
    return Converted(loaded=loaded, recipe=recipe)


def _named(quantized: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with its functions inlined and a name for each node."""
    from deploy.frontends import checks
    from deploy.frontends.fold import remove_identity
    from deploy.frontends.onnx import inlined
    from deploy.frontends.plugins import check_part_valid

    checks.check_names(quantized)
    opset = checks.opset_of(quantized)
    if opset < _OLDEST:
        raise ModelError(
            f"a Q/DQ model must use ONNX opset {_OLDEST} or newer, got {opset}; export it again"
        )
    check_part_valid(quantized)
    model = copied(quantized)
    if model.functions:
        model, _ = inlined(model)
    free_inputs(model.graph)
    if not any(node.op_type in (Q, DQ) for node in model.graph.node):
        raise ModelError(
            "a Q/DQ model must hold QuantizeLinear and DequantizeLinear nodes, got none; calib8"
            " build --target ascend quantizes a float model"
        )
    remove_identity(model.graph)
    name_nodes(model.graph)
    return model


def _quantized(
    model: onnx.ModelProto, taken: Mapping[str, Taken]
) -> tuple[LayerGraph, dict[str, QuantLayer], list[str], dict[str, str]]:
    """Layers, integers of those taken that fit, which were rounded anew, why others do not fit."""
    from deploy.targets.ascend.layers import find_layers
    from deploy.targets.ascend.quant_layer import quantize_fitting

    graph = find_layers(model)
    index = Graph(model)
    records, rounded, unfit = {}, [], {}
    for name, layer in graph.layers.items():
        one = taken.get(name)
        if one is None:
            continue
        if layer.symmetric_only and one.offset_d:
            unfit[name] = f"a 3-D convolution takes no activation offset, got {one.offset_d}"
            continue
        records[name], anew = _record(one, layer.name, graph, index)
        rounded += [name] if anew else []
    layers, outside = quantize_fitting(model, graph, records)
    return graph, layers, [name for name in rounded if name in layers], unfit | outside


def _record(one: Taken, name: str, graph: LayerGraph, index: Graph) -> tuple[LayerRecord, bool]:
    """The record of a layer, and whether its weight must be rounded to a scale of its own."""
    from calibrators.amct.arq import arq
    from deploy.targets.ascend.quant_layer import array_of, rows_of
    from deploy.targets.ascend.record import LayerRecord

    layer, scales = graph.layers[name], one.scale_w
    if not layer.channel_wise and np.all(scales == scales[0]):
        scales = scales[:1]
    anew = not layer.channel_wise and scales.size > 1
    if anew:
        scales, _ = arq(rows_of(array_of(index, layer.weight), layer), channel_wise=False)
    record = LayerRecord(
        scale_d=one.scale_d, offset_d=one.offset_d, scale_w=scales, weighted=bool(layer.weight)
    )
    return record, anew


def _notes(
    path: Path, graph: LayerGraph, layers: Mapping[str, QuantLayer], rounded: Collection[str]
) -> list[str]:
    total = len(graph.layers) + len(graph.refused)
    notes = [
        f"Scales: those of {path}, for {len(layers)} of {total} layers that Ascend could run in"
        " int8; nothing was calibrated."
    ]
    if rounded:
        notes.append(
            "Ascend has one scale for a whole matrix, the model has one a channel in"
            f" {len(rounded)}: these weights were rounded again"
            f" ({', '.join(list(rounded)[:_TOLD])}); all others keep their integers."
        )
    return notes


def _of_loose(loose: int, *, keep_rounding: bool) -> list[str]:
    """What became of the pairs that float operators read."""
    if not loose:
        return []
    what = f"Tensors that float operators read through a pair: {loose}."
    if keep_rounding:
        return [
            f"{what} They are rounded there as in the model, by four operators each;"
            " --no-keep-rounding leaves these away."
        ]
    return [f"{what} They are rounded no more, as was asked for."]


def _without_pairs(
    model: onnx.ModelProto, taken: Collection[str], *, keep_rounding: bool
) -> tuple[onnx.ModelProto, int]:
    """A float copy, and how many pairs float operators read.

    Args:
        model: of which each node has a name of its own.
        taken: the layers that round and saturate their input by themselves.
        keep_rounding: round what the others read.
    """
    from deploy.frontends.fold import fold_constants

    out = copied(model)
    work = _Stripper(out, taken, keep_rounding=keep_rounding)
    work.run()
    fold_constants(out)
    left = next((node for node in all_nodes(out.graph) if node.op_type in (Q, DQ)), None)
    if left is not None:
        raise ModelError(
            "QuantizeLinear and DequantizeLinear of ONNX's own domain must stand in pairs on float"
            f" tensors of the main graph, got {left.op_type} {left.name!r}; export the model so,"
            " with float inputs and outputs"
        )
    return out, work.loose


class _Stripper:
    """One model whose pairs on activations are taken out."""

    def __init__(
        self, model: onnx.ModelProto, taken: Collection[str], *, keep_rounding: bool
    ) -> None:
        self.graph, self.index, self.keep_rounding = model.graph, Graph(model), keep_rounding
        self.inside = _inside(self.index, taken)
        self.loose = 0
        self.fixed = set(self.index.constants)  # what is known before anything is fed
        self.positive: set[str] = set()  # tensors that cannot be negative
        self.float_of: dict[str, str] = {}  # output of a pair -> what its readers read
        self.renamed: dict[str, str] = {}  # what a node makes -> the name that it now gets
        self.names = {*self.index.producer, *self.index.constants, *self.index.inputs}

    def run(self) -> None:
        """Rewire every reader of a pair, then drop the pairs."""
        nodes: Nodes = []
        gone: set[str] = set()
        for node in self.graph.node:
            if all(name in self.fixed for name in reads(node)):
                self.fixed.update(node.output)
            elif node.op_type == Q:
                gone.add(node.output[0])
                self._refuse_integers(node)
                continue
            elif node.op_type == DQ and node.input[0] in gone:
                nodes += self._pair(node)
                continue
            elif self._cannot_be_negative(node):
                self.positive.update(node.output)
            nodes.append(node)
        rename_reads(nodes, self.float_of)
        self._name_weights()
        rename_reads(nodes, self.renamed)
        for node in nodes:
            for place, name in enumerate(node.output):
                node.output[place] = self.renamed.get(name, name)
        rebuild(self.graph, nodes)

    def _pair(self, node: onnx.NodeProto) -> Nodes:
        """What stands for a pair: nothing, what it does, or what keeps the name of an output."""
        from onnx import helper

        read, made = self.index.producer[node.input[0]].input[0], node.output[0]
        source = self.float_of.get(read, read)
        kept = made in self.index.outputs
        readers = self.index.readers.get(made, [])
        int8 = [n for n in readers if n.name in self.inside and n.input[0] == made]
        in_float = kept or made in self.index.captured or len(int8) < len(readers)
        steps = self._steps(node, source) if in_float else {}
        self.loose += in_float
        if steps:
            for reader in int8:
                reader.input[0] = source
            end = made if kept else self._own(f"{source}/{'-'.join(steps).lower()}")
            self.float_of[made] = end
            return self._chain(source, end, steps, node.name)
        if kept and not self._may_be_called(source):
            return [helper.make_node("Identity", [source], [made], name=f"{node.name}/float")]
        if kept:
            self.renamed[source] = made
        else:
            self.float_of[made] = source
        return []

    def _steps(self, node: onnx.NodeProto, source: str) -> dict[str, tuple[float, ...]]:
        """Operators, with their constants, that do to a float tensor what its readers rely on."""
        grid = grid_of(node, self.index)
        if grid is None or not grid.single:
            raise ModelError(
                "a pair on what float operators read must have one constant scale of integers, got"
                f" another on {source!r}; export the model with such"
            )
        scale, zero = float(grid.scale.reshape(-1)[0]), int(grid.zero.reshape(-1)[0])
        low, high = grid.least - zero, grid.most - zero
        lost = low == 0 and source not in self.positive
        if low == 0:
            self.positive.add(node.output[0])
        if self.keep_rounding:
            codes = (float(low), float(high))
            return {"Div": (scale,), "Round": (), "Clip": codes, "Mul": (scale,)}
        return {"Clip": (0.0, scale * high)} if lost else {}

    def _chain(
        self, start: str, end: str, steps: Mapping[str, tuple[float, ...]], name: str
    ) -> Nodes:
        from onnx import helper

        nodes: Nodes = []
        for place, (op, values) in enumerate(steps.items(), start=1):
            constants = [self._number(f"{end}/{op}", value) for value in values]
            output = end if place == len(steps) else self._own(f"{end}/{op}")
            made = helper.make_node(op, [start, *constants], [output], name=f"{name}/{op}")
            nodes.append(made)
            start = output
        return nodes

    def _name_weights(self) -> None:
        """Call a weight and bias that were quantized after their layer, not after their pair."""
        for node in self.index.nodes:
            if node.op_type not in TYPES:
                continue
            for name, word in zip(node.input[1:], ("weight", "bias"), strict=False):
                made = name in self.fixed and name not in self.index.constants
                if made and self.index.only_reader(name) is not None:
                    self.renamed[name] = self._own(f"{node.name}.{word}")

    def _may_be_called(self, source: str) -> bool:
        """Whether a tensor may get the name of an output."""
        return (
            source in self.index.producer
            and source not in self.index.outputs
            and source not in self.renamed
            and source not in self.index.captured
        )

    def _own(self, wanted: str) -> str:
        """A name that no tensor has."""
        name = unused(wanted, self.names)
        self.names.add(name)
        return name

    def _number(self, wanted: str, value: float) -> str:
        from onnx import numpy_helper

        name = self._own(wanted)
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def _cannot_be_negative(self, node: onnx.NodeProto) -> bool:
        if node.op_type in _POSITIVE:
            return True
        if node.op_type == "Clip":
            return self.index.holds_zero(node)
        if node.op_type in MOVES | POOLS:
            return node.input[0] in self.positive
        known = self.positive
        return node.op_type in _ADDING and all(n in known for n in self.index.data_inputs(node))

    def _refuse_integers(self, node: onnx.NodeProto) -> None:
        """Refuse codes that something else than a DequantizeLinear reads."""
        made = node.output[0]
        others = [n.op_type for n in self.index.readers.get(made, []) if n.op_type != DQ]
        if made in self.index.outputs:
            others.append("the user, as an output")
        if others:
            raise ModelError(
                "a Q/DQ model computes in float between QuantizeLinear and DequantizeLinear, got"
                f" {made!r} read by {others[0]}; export it in the Q/DQ form"
            )


def _inside(index: Graph, taken: Collection[str]) -> set[str]:
    """Names of int8 layers, and of what hands values on to these alone."""
    found = {node.name for node in index.nodes if node.name in taken}
    for node in reversed(index.nodes):
        if node.op_type not in KEEPING:
            continue
        made = node.output[0]
        seen = made in index.outputs or made in index.captured
        readers = index.readers.get(made, [])
        if readers and not seen and all(n.name in found and n.input[0] == made for n in readers):
            found.add(node.name)
    return found
