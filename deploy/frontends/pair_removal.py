"""Remove the activation pairs of a Q/DQ model, which leaves its float model.

::

    Conv --> x --> Q --> DQ --> Conv     becomes     Conv --> x ------------> Conv, in the record
                         '---> Add                           '--> Round ... --> Add

An int8 layer rounds and saturates its input itself. Other readers of a pair are float on Ascend:
they get Div, Round, Clip and Mul instead, or no rounding if that is requested. Without rounding, a
Clip stays if the pair replaced a Relu or Clip that the quantizer removed: then the codes begin at 0
although the pair's input may be negative. A tensor whose name went to its pair gets it back.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from deploy.errors import ModelError
from deploy.frontends import checks
from deploy.frontends.fold import fold_constants, remove_identity
from deploy.frontends.lift import complete_axes
from deploy.frontends.onnx_file import inline_functions, lower_to_runtime
from deploy.frontends.pairs import DQ, VALUE_KEEPING, PairGrid, PairGrids, Q, find_pair_grid
from deploy.frontends.plugins import check_part_valid, import_domains
from deploy.frontends.shapes import infer_shapes
from deploy.graph.edit import (
    adopt_runtime_nodes,
    bypass,
    claim_name,
    copy_message,
    drop_initializer_inputs,
    drop_unread,
    drop_unused_domains,
    make_node,
    name_nodes,
    rebuild,
    rename_reads,
    rename_tensors,
    tensor_names,
)
from deploy.graph.index import (
    Graph,
    Nodes,
    all_nodes,
    all_reads,
    attributes,
    describe_node,
    names_of,
    opset_of,
    optional_input,
)
from deploy.graph.opset_forms import COMPLETIONS
from deploy.graph.placement import CUTS, MOVES, WEIGHTED
from deploy.graph.plan import cannot_be_negative

_OLDEST_OPSET = 11  # since this opset the limits of Clip are inputs
_MOVES_AND_CUTS = MOVES | CUTS | {"MaxPool"}
# their output is not negative if no input is
_SIGN_KEEPING = frozenset({"Add", "Mul", "Max", "Concat", "Resize"})


@dataclass(frozen=True, slots=True)
class StrippedModel:
    """The result of `remove_pairs`.

    Attributes:
        model: the float model.
        pairs_read_in_float: number of pairs that a float operator, a subgraph or the user reads.
        grids: tensor of the float model -> the grids of its pairs.
    """

    model: onnx.ModelProto
    pairs_read_in_float: int
    grids: PairGrids


def prepare_qdq_model(quantized: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a Q/DQ model in the form that `remove_pairs` reads.

    It has no functions and a name for each node. Its pairs are of ONNX's own domain, not of ONNX
    Runtime's, and each DequantizeLinear of an activation stands directly behind its QuantizeLinear.

    Raises:
        ModelError: not a valid model, an opset before 11, or no pairs.
    """
    checks.check_fields(quantized)  # first: some faults would end the process in ONNX
    opset = opset_of(quantized)
    if opset < _OLDEST_OPSET:
        raise ModelError(
            f"a Q/DQ model must use ONNX opset {_OLDEST_OPSET} or newer, got {opset}; export it"
            " again"
        )
    model = copy_message(quantized)
    # a file need not import ONNX Runtime's own domain for pairs: ONNX Runtime loads it without, but
    # ONNX's checker (`check_part_valid`) does not
    runtime_pair_nodes = [
        node
        for node in all_nodes(model.graph)
        if node.domain == "com.microsoft" and node.op_type in (Q, DQ)
    ]
    import_domains(model, runtime_pair_nodes)
    check_part_valid(model)
    if model.functions:
        model, _ = inline_functions(model)
    adopt_runtime_nodes(model.graph, (Q, DQ))
    drop_unused_domains(model)
    model, _ = lower_to_runtime(model)
    drop_initializer_inputs(model.graph)

    if not any(node.op_type in (Q, DQ) for node in model.graph.node):
        raise ModelError(
            "a Q/DQ model must hold QuantizeLinear and DequantizeLinear nodes, got none; calib8"
            " build quantizes a float model"
        )

    remove_identity(model.graph)
    name_nodes(model.graph)
    _remove_clips_of_codes(model)  # codes are the integers between the halves of a pair
    _move_quantizers(model)
    if not any(node.op_type in COMPLETIONS for node in all_nodes(model.graph)):
        return model  # it has no operator that `complete_axes` rewrites
    # `complete_axes` needs inferred shapes. If it changes nothing, return the model without them:
    # the files written from it then declare no more types than the user's file.
    typed_model = infer_shapes(copy_message(model))
    changed_counts = complete_axes(typed_model)  # in place
    return typed_model if changed_counts else model


def _remove_clips_of_codes(model: onnx.ModelProto) -> None:
    """Remove each Clip between the halves of a pair, in place, as Brevitas writes it (QCDQ).

    ::

        x --> Q --> Clip(-127, 127) --> DQ     becomes     x --> Q --> DQ

    "Codes" are the integers that a QuantizeLinear makes. A Clip on an activation is removed only if
    it lets all codes pass, or all but -128 (`_is_redundant`). Any other Clip stays: its pair has
    fewer than 8 bits, and is refused later. A Clip on a weight is folded: the clipped integers are
    stored.
    """
    graph = Graph(model)
    clips = [node for node in graph.nodes if node.op_type == "Clip" and _clips_codes(node, graph)]
    if not clips:
        return
    clip_names = names_of(clips)
    clipped_tensors = {clip.input[0] for clip in clips}

    def is_clip_or_input(node: onnx.NodeProto) -> bool:
        """Whether a node is one of the Clips, or makes the codes or the limits that one reads."""
        makes_codes = not clipped_tensors.isdisjoint(node.output)
        return node.name in clip_names or makes_codes or node.op_type == "Constant"

    # Clips of weights are folded. A Clip on an activation is no constant: only its limits are
    # folded, so that `_is_redundant` can read them.
    fold_constants(model, is_chosen=is_clip_or_input)
    folded_graph = Graph(model)
    bypass(model.graph, lambda node: node.name in clip_names and _is_redundant(node, folded_graph))
    drop_unread(model.graph)  # the limits of the removed Clips


def _clips_codes(clip: onnx.NodeProto, graph: Graph) -> bool:
    """Whether a Clip stands between the halves of a pair, or between weights and their DQ."""
    readers = graph.readers.get(clip.output[0], [])
    return any(reader.op_type == DQ and reader.input[0] == clip.output[0] for reader in readers)


def _is_redundant(clip: onnx.NodeProto, graph: Graph) -> bool:
    """Whether a Clip lets all codes of its pair pass, or all but -128."""
    quantizer = graph.find_producer(clip.input[0], Q)
    grid = None if quantizer is None else find_pair_grid(quantizer, graph)
    if grid is None or len(clip.input) != 3:
        return False
    low, high = map(graph.scalar, clip.input[1:])
    # a symmetric quantizer of int8 never makes -128
    lowest_codes = (-128, -127) if grid.dtype == "int8" else (grid.min_code,)
    return low in lowest_codes and high == grid.max_code


def _move_quantizers(model: onnx.ModelProto) -> None:
    """Move each QuantizeLinear behind the nodes that pad, cut or reorder its codes, in place.

    ::

        x --> Q --> Transpose --> DQ     becomes     x --> Transpose --> Q --> DQ

    Then a DequantizeLinear stands directly behind it, where `remove_pairs` looks for it. "Codes"
    are the integers that a QuantizeLinear makes. A QuantizeLinear with a scale per channel stays,
    since its channels might be cut or reordered.
    """
    graph = Graph(model)
    names = tensor_names(model.graph)
    quantizer_by_codes = {node.output[0]: node for node in graph.nodes if node.op_type == Q}
    nodes: Nodes = []
    replaced_codes: set[str] = set()  # outputs of the quantizers that have a moved copy
    for node in graph.nodes:
        nodes.append(node)
        if node.op_type not in _MOVES_AND_CUTS or node.input[0] not in quantizer_by_codes:
            continue
        quantizer = quantizer_by_codes[node.input[0]]
        grid = find_pair_grid(quantizer, graph)
        if grid is None or not grid.is_per_tensor:
            continue
        # a Pad is changed here: it padded codes, and is to pad floats with 0
        if node.op_type == "Pad" and not _try_to_pad_floats(node, grid, graph):
            continue  # its code stands for another value than 0: it stays between Q and DQ
        replaced_codes.add(quantizer.output[0])
        moved_quantizer = _move_behind(node, quantizer, names)
        # the next node may move it again
        quantizer_by_codes[moved_quantizer.output[0]] = moved_quantizer
        nodes.append(moved_quantizer)

    if not replaced_codes:
        return
    # remove the original quantizers; one stays if its codes have other readers or are an output
    unread_codes = replaced_codes.difference(graph.outputs, all_reads(nodes))
    rebuild(model.graph, [node for node in nodes if unread_codes.isdisjoint(node.output)])


def _move_behind(
    node: onnx.NodeProto, quantizer: onnx.NodeProto, names: set[str]
) -> onnx.NodeProto:
    """Let a node that reads codes read floats instead; return a QuantizeLinear for its output.

    "Codes" are the integers that a QuantizeLinear makes.

    Args:
        node: changes: it reads the float tensor that the quantizer reads, and makes a new one.
        quantizer: makes the codes that the node reads; it is copied.
        names: of all tensors; the name of the new float tensor is added.

    Returns:
        The copy of the quantizer; it makes the codes that the node made, under the same name.
    """
    float_source = quantizer.input[0]
    codes = node.output[0]
    float_output = claim_name(f"{float_source}/{node.op_type.lower()}", names)
    node.input[0] = float_source
    node.output[0] = float_output
    moved_quantizer = copy_message(quantizer)
    moved_quantizer.input[0] = float_output
    moved_quantizer.output[0] = codes
    moved_quantizer.name = f"{node.name}/{Q}"
    return moved_quantizer


def _try_to_pad_floats(pad: onnx.NodeProto, grid: PairGrid, graph: Graph) -> bool:
    """Let a Pad of codes pad floats with 0, in place; return whether that is possible.

    It is not if the Pad pads with another code than the zero point, which stands for 0, or with a
    code that is computed. A Pad in a mode that repeats values is unchanged.
    """
    if attributes(pad).get("mode", b"constant") != b"constant":
        return True
    code_name = optional_input(pad, 2)  # name of the tensor with the code to pad with
    code = graph.scalar(code_name) if code_name else 0
    if code != grid.zero.item():
        return False
    if code_name:
        pad.input[2] = ""  # without this input, a Pad pads with 0
    return True


def remove_pairs(
    model: onnx.ModelProto, int8_layers: Collection[str], *, keep_rounding: bool
) -> StrippedModel:
    """Return a float copy of a Q/DQ model, with the grids and the number of its removed pairs.

    The grid of a pair is its scale, zero point and integer type.

    Args:
        model: with unique node names.
        int8_layers: names of the layers that round and saturate their input themselves.
        keep_rounding: whether the other readers of a pair still get rounded and saturated values:
            Div, Round, Clip and Mul then take the place of the pair. Otherwise they read the float
            tensor that the pair quantized.

    Raises:
        ModelError: integer operators, or pairs that cannot be removed.
    """
    float_model = copy_message(model)
    stripper = _Stripper(float_model, int8_layers, keep_rounding=keep_rounding)
    stripper.run()
    fold_constants(float_model)  # also the pairs of weights, which become float weights
    for node in all_nodes(float_model.graph):
        if node.op_type in (Q, DQ):
            raise ModelError(
                "QuantizeLinear and DequantizeLinear of ONNX's own domain must form pairs on float"
                f" tensors of the main graph, got {describe_node(node)}; export the"
                " model in that form, with float inputs and outputs"
            )
    grids = {  # by the final names: `run` renamed some tensors
        stripper.new_names.get(tensor, tensor): tuple(tensor_grids)
        for tensor, tensor_grids in stripper.grids.items()
    }
    return StrippedModel(float_model, stripper.pairs_read_in_float, grids)


class _Stripper:
    """Removes the pairs of one model, in place."""

    def __init__(
        self, model: onnx.ModelProto, int8_layers: Collection[str], *, keep_rounding: bool
    ) -> None:
        self.graph = model.graph
        self.index = Graph(model)
        self.keep_rounding = keep_rounding
        # names of the int8 layers, and of nodes that only pass values on to these
        self.int8_names = self._find_int8_names(int8_layers)
        self.pairs_read_in_float = 0  # see `StrippedModel`
        self.grids: dict[str, list[PairGrid]] = {}  # float tensor -> grids of its pairs
        self.non_negative: set[str] = set()  # tensors without negative values
        self.float_by_pair_output: dict[str, str] = {}  # -> tensor that its readers read instead
        self.new_names: dict[str, str] = {}  # tensor -> its new name
        self.names = tensor_names(model.graph)  # of all tensors; it grows by those of new ones

    def _find_int8_names(self, int8_layers: Collection[str]) -> set[str]:
        """Return the names of the int8 layers, and of nodes that pass values on to these only."""
        index = self.index
        names = names_of(index.nodes).intersection(int8_layers)
        for node in reversed(index.nodes):  # a node's readers come before the node
            if node.op_type not in VALUE_KEEPING:
                continue
            output = node.output[0]
            readers = index.readers.get(output, [])
            # also left out: what the user or a subgraph reads
            if not readers or index.is_read_outside(output):
                continue
            if all(_is_data_reader(reader, output, names) for reader in readers):
                names.add(node.name)
        return names

    def run(self) -> None:
        """Remove the Q/DQ pairs of activations; their readers read float tensors instead.

        Pairs on constants, such as weights, stay: `fold_constants` turns them into float constants
        later.
        """
        nodes: Nodes = []
        removed_codes: set[str] = set()  # outputs of the QuantizeLinear nodes that are left out
        constant_outputs = self.index.computed_constants
        for node in self.graph.node:
            if constant_outputs.issuperset(node.output):  # it may be part of a weight's pair
                nodes.append(node)
            elif node.op_type == Q:
                removed_codes.add(node.output[0])
                self._refuse_readers_of_codes(node)
            elif node.op_type == DQ and node.input[0] in removed_codes:
                nodes += self._replace_pair(node)
            else:
                if self._cannot_be_negative(node):
                    self.non_negative.update(node.output)  # a later pair behind it needs no Clip
                nodes.append(node)

        # let the readers of the removed pairs read float tensors; then give tensors their new names
        rename_reads(nodes, self.float_by_pair_output)
        self._name_weights_by_layer()
        rename_tensors(nodes, self.new_names)
        rebuild(self.graph, nodes)

    def _name_weights_by_layer(self) -> None:
        """Name dequantized weights and biases after their layer, not after their Q/DQ pair."""
        computed_names = self.index.computed_constants.difference(self.index.constants)
        for node in self.index.nodes:
            if node.op_type not in WEIGHTED:
                continue
            for name, role in zip(node.input[1:], ("weight", "bias"), strict=False):
                if name in computed_names and self.index.only_reader(name) is not None:
                    self.new_names[name] = claim_name(f"{node.name}.{role}", self.names)

    def _replace_pair(self, dequantizer: onnx.NodeProto) -> Nodes:
        """Return the nodes that take the place of a Q/DQ pair, usually none.

        The source of a pair is the float tensor that it quantized. Int8 layers will read the
        source, since they round their input themselves. Float operators, subgraphs and the user
        read it too, unless they need a chain of nodes that rounds or clips as the pair did
        (`_find_chain`).
        """
        index = self.index
        output = dequantizer.output[0]
        quantizer = index.producer[dequantizer.input[0]]
        source = quantizer.input[0]
        # the source may be the output of an earlier pair, which is already replaced
        source = self.float_by_pair_output.get(source, source)
        readers = index.readers.get(output, [])
        int8_readers = [
            reader for reader in readers if _is_data_reader(reader, output, self.int8_names)
        ]
        # the user, a subgraph or a float operator reads the pair
        if index.is_read_outside(output) or len(int8_readers) < len(readers):
            self.pairs_read_in_float += 1
            chain = self._find_chain(dequantizer, source)
            if chain:
                # here int8 layers get the source; later `run` lets the other readers of the pair
                # read the result of the chain
                for reader in int8_readers:
                    reader.input[0] = source
                return self._write_chain(dequantizer, source, chain)
        return self._bypass_pair(dequantizer, source)

    def _bypass_pair(self, dequantizer: onnx.NodeProto, source: str) -> Nodes:
        """Let all readers of a pair read its source, the float tensor that it quantized.

        In two cases the source takes the name of the pair's output, if it can be renamed:

        * The pair's output is an output of the model.
        * calib8 wrote the pair. The float model has a tensor NAME; in the Q/DQ model the pair makes
          NAME, and its source is called NAME/float.

        Returns:
            []; or, if the pair makes an output of the model and the source cannot take its name,
            an Identity that makes this output.
        """
        output = dequantizer.output[0]
        self._add_grid(source, dequantizer)
        is_model_output = output in self.index.outputs
        is_pair_of_calib8 = source == f"{output}/float"
        # The readers of a model output keep reading this name: the source gets it, or an Identity
        # makes it. All other readers are redirected, by `run`, which renames tensors afterwards.
        if not is_model_output:
            self.float_by_pair_output[output] = source
        if (is_model_output or is_pair_of_calib8) and self._can_be_renamed(source):
            self.new_names[source] = output
        elif is_model_output:
            identity_name = f"{dequantizer.name}/float"
            return [make_node("Identity", [source], output, identity_name)]
        return []

    def _write_chain(
        self, dequantizer: onnx.NodeProto, source: str, chain: Mapping[str, tuple[float, ...]]
    ) -> Nodes:
        """Return the nodes that apply a chain of operators to a pair's source.

        They take the pair's place: its readers will read the result of the chain.

        Args:
            dequantizer: of the pair.
            source: the float tensor that the pair quantized.
            chain: operator -> its constants, in the order of the nodes (from `_find_chain`).
        """
        output = dequantizer.output[0]
        result = output  # an output of the model keeps its name
        if output not in self.index.outputs:  # a name such as source/div-round-clip-mul
            result = claim_name(f"{source}/{'-'.join(chain).lower()}", self.names)
        self.float_by_pair_output[output] = result
        self._add_grid(result, dequantizer)

        nodes: Nodes = []
        node_input = source
        for number, (op_type, values) in enumerate(chain.items(), 1):
            constants = [self._add_constant(f"{result}/{op_type}", value) for value in values]
            node_output = result
            if number < len(chain):  # not the last node
                node_output = claim_name(f"{result}/{op_type}", self.names)
            name = f"{dequantizer.name}/{op_type}"
            nodes.append(make_node(op_type, [node_input, *constants], node_output, name))
            node_input = node_output
        return nodes

    def _add_grid(self, tensor: str, node: onnx.NodeProto) -> None:
        """Note the scale and zero point of a Q/DQ pair for a float tensor, if they are constant."""
        grid = find_pair_grid(node, self.index)
        if grid is not None:
            self.grids.setdefault(tensor, []).append(grid)

    def _find_chain(self, dequantizer: onnx.NodeProto, source: str) -> dict[str, tuple[float, ...]]:
        """Return the operators, in order, that float readers need in place of a pair.

        With `keep_rounding`, these operators round and saturate as the pair did. Without it, only a
        pair that also did the work of a Relu needs an operator, a Clip at 0: some tools leave out a
        Relu before a pair whose lowest code stands for 0.

        The output of a pair whose lowest code stands for 0 is also added to `non_negative`.

        Returns:
            Operator -> its constants, in the order in which they run; {} if the readers can read
            the source.
        """
        grid = find_pair_grid(dequantizer, self.index)
        if grid is None or not grid.is_per_tensor:
            raise ModelError(
                "a pair read by float operators must have one constant scale and integer codes,"
                f" got another on {source!r}; export the model in that form"
            )
        scale = grid.scale.item()
        zero = grid.zero.item()
        # the values of the lowest and highest code, in multiples of the scale
        lowest_step = grid.min_code - zero
        highest_step = grid.max_code - zero
        if lowest_step == 0:
            self.non_negative.add(dequantizer.output[0])
        if self.keep_rounding:
            limits = (lowest_step, highest_step)
            return {"Div": (scale,), "Round": (), "Clip": limits, "Mul": (scale,)}
        if lowest_step == 0 and source not in self.non_negative:  # the pair did a Relu's work
            return {"Clip": (0.0, scale * highest_step)}
        return {}

    def _can_be_renamed(self, source: str) -> bool:
        """Return whether a tensor may take the name of an output."""
        if self.index.is_read_outside(source):
            return False
        return source in self.index.producer and source not in self.new_names

    def _add_constant(self, preferred: str, value: float) -> str:
        """Add a float32 scalar; return its name."""
        name = claim_name(preferred, self.names)
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def _cannot_be_negative(self, node: onnx.NodeProto) -> bool:
        """Whether no output of a node can be negative."""
        if node.op_type in _SIGN_KEEPING:
            return self.non_negative.issuperset(self.index.data_inputs(node))
        return cannot_be_negative(self.index, node, self.non_negative)

    def _refuse_readers_of_codes(self, quantizer: onnx.NodeProto) -> None:
        """Refuse a QuantizeLinear whose integers anything but a DequantizeLinear reads."""
        output = quantizer.output[0]
        readers = self.index.readers.get(output, [])
        other_readers = [reader.op_type for reader in readers if reader.op_type != DQ]
        if output in self.index.outputs:
            other_readers.append("the user, as an output")
        if other_readers:
            raise ModelError(
                "a Q/DQ model computes in float between QuantizeLinear and DequantizeLinear, but"
                f" {output!r} is read by {other_readers[0]}; export the model in the Q/DQ form"
            )


def _is_data_reader(reader: onnx.NodeProto, tensor: str, names: Collection[str]) -> bool:
    """Whether a reader of a tensor is one of the named nodes, and the tensor is its data input.

    An int8 layer rounds its data, the first input, but not its weight or bias.
    """
    return reader.name in names and reader.input[0] == tensor
