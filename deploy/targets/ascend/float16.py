"""float16 models: tensors that are float16 in the user's file stay float16, as in AMCT.

::

    file         x f16 ------------------> Conv ------------------> y f16
    deploy       x f16 -> AscendQuant ---> Conv -> AscendDequant -> y f16     dtype 1
    fake-quant   x f16 -> Cast, fakequant -> Conv -> Mul, Cast ---> y f16

Calibration and the writing of models use the float32 form (`deploy.frontends.lift`), whose tensors
keep their names; the types are restored by name. AMCT's PyTorch package writes AscendDequant with
dtype 0 (float32), because it looks the dtype up under a wrong name; 1 is meant.
"""

from collections.abc import Collection, Iterable, Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from deploy.calibration.observation import CalibrationSubject
from deploy.errors import ExportError
from deploy.graph.edit import (
    claim_name,
    copy_message,
    infer_types,
    make_node,
    rebuild,
    rename_reads,
    rename_tensors,
    update_tensors,
)
from deploy.graph.index import (
    Graph,
    Nodes,
    attributes,
    has_subgraph,
    iter_reads,
    names_of,
    opset_of,
)
from deploy.graph.lowering import find_schema, is_standard, type_variables

_FLOAT32, _FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
_MAX_FLOAT16 = 65504.0


def find_float16_tensors(subject: CalibrationSubject) -> frozenset[str]:
    """Return the names of the tensors of `subject.model` that are float16 in the model's file.

    Empty if there is no file, or if the model has subgraphs or nodes that ONNX Runtime does not
    know (`cut_off`): the written models are float32 then.
    """
    if not subject.loaded.was_float16 or subject.loaded.cut_off is not None:
        return frozenset()
    original = subject.original  # the model in the file
    if original is None or any(map(has_subgraph, subject.model.graph.node)):
        return frozenset()
    try:
        inferred = infer_types(original)
    except Exception:  # C++ errors of any type; then the written models stay float32
        return frozenset()

    names = {name for name, dtype in Graph(inferred).dtypes.items() if dtype == _FLOAT16}
    names |= {tensor.name for tensor in inferred.graph.initializer if tensor.data_type == _FLOAT16}
    for node in subject.model.graph.node:
        # `subject.model` makes a float16 output in float32 under another name, and casts it
        if _casts_to_float16(node) and node.output[0] in names:
            names.add(node.input[0])
    return frozenset(names)


def to_float16(
    model: onnx.ModelProto, float16_tensors: Collection[str], *, float32_nodes: Collection[str] = ()
) -> onnx.ModelProto:
    """Return a copy whose `float16_tensors` are float16, except for integers and their scales.

    `float32_nodes`: nodes that compute in float32 whatever the type of their output.

    Raises:
        ExportError: a constant exceeds float16.
    """
    out = copy_message(model)
    _Float16Writer(out, float16_tensors, float32_nodes).run()
    return out


class _Float16Writer:
    """Writer of a model's types.

    Attributes:
        graph: graph of the model, which is rewritten in place.
        index: its constants and the nodes that make its tensors, before it is rewritten.
        opset: its version of the standard operators.
        tensors_to_be_float16: tensors that are float16 in the user's file.
        float32_nodes: nodes that compute in float32.
        tensors_now_float16: float16 inputs, and float16 tensors that the nodes so far make.
        converted_tensors: (tensor, type) -> the tensor with its values in that type, which a
            Cast makes, or which is a constant.
        new_constants: name -> new initializer.
        tensor_names, node_names: names in use.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        tensors_to_be_float16: Collection[str],
        float32_nodes: Collection[str],
    ) -> None:
        """Start before the first node, where only inputs of the model are float16.

        The arguments are the attributes of the same names.
        """
        self.graph = model.graph
        self.index = Graph(model)
        self.opset = opset_of(model)
        self.tensors_to_be_float16 = tensors_to_be_float16
        self.float32_nodes = float32_nodes
        # `rewrite` adds the float16 tensors that each node makes
        self.tensors_now_float16 = {
            value.name
            for value in model.graph.input
            if value.type.tensor_type.elem_type == _FLOAT16
        }
        self.converted_tensors: dict[tuple[str, int], str] = {}
        self.new_constants: dict[str, onnx.TensorProto] = {}
        self.tensor_names = {*self.index.producer, *self.index.constants, *self.index.inputs}
        self.node_names = names_of(model.graph.node)

    def run(self) -> None:
        """Set the types of all nodes' tensors, then drop unused casts and constants."""
        nodes: Nodes = []
        for node in self.graph.node:
            nodes += self.rewrite(node)
        nodes = self.drop_casts(nodes)
        self.restore_constant_names(nodes)
        update_tensors(self.graph.initializer, self.new_constants)
        rebuild(self.graph, nodes)

    def drop_casts(self, nodes: Nodes) -> Nodes:
        """Return the nodes without the Casts that are not needed.

        First those go that cast float16 to float16: a tensor takes the name of the Cast's output,
        and so only the first Cast of a tensor goes. Then those go whose output no node reads.
        """
        new_name_by_tensor: dict[str, str] = {}  # input of a Cast to be removed -> its output
        for node in nodes:
            tensor = node.input[0] if _casts_to_float16(node) else ""
            # an input of the model, which no node makes, keeps its name
            if tensor in self.tensors_now_float16 and tensor in self.index.producer:
                new_name_by_tensor.setdefault(tensor, node.output[0])
        removed_outputs = set(new_name_by_tensor.values())
        remaining_nodes = [node for node in nodes if node.output[0] not in removed_outputs]
        rename_tensors(remaining_nodes, new_name_by_tensor)

        read_tensors = _read_tensors(remaining_nodes) | self.index.outputs
        return [
            node
            for node in remaining_nodes
            if node.op_type != "Cast" or node.output[0] in read_tensors
        ]

    def restore_constant_names(self, nodes: Nodes) -> None:
        """Give the float16 form of a constant the constant's own name if no node reads float32.

        `nodes`: the nodes of the model, whose inputs are renamed.
        """
        read_tensors = _read_tensors(nodes)
        restored_names = {}  # float16 form of a constant -> the name of the constant, which it gets
        # keys are (tensor, type that it is converted to), which is float16 for every constant
        for (name, _), converted in self.converted_tensors.items():
            if name in self.index.initializers and name not in read_tensors:
                restored_names[converted] = name
        rename_reads(nodes, restored_names)
        for converted, name in restored_names.items():
            constant = self.new_constants.pop(converted)
            constant.name = name
            self.new_constants[name] = constant

    def rewrite(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield a node with the types of its tensors set, in place, and the Casts that it needs.

        Casts between float16 and float32 of the model itself stay; they are only recorded here.
        `tensors_to_be_float16` are float16 in the user's file, `tensors_now_float16` as written so
        far.
        """
        if is_standard(node) and node.op_type != "Cast":
            yield from self.rewrite_standard(node)
            return
        if node.op_type == "AscendDequant":
            if node.output[0] in self.tensors_to_be_float16:
                self.set_float16_output(node)
        elif node.op_type == "AscendAntiQuant":
            # the input of an Add or MaxPool keeps the type that it had before its AscendQuant
            quant = self.index.producer[node.input[0]]
            if quant.input[0] in self.tensors_now_float16:
                self.set_float16_output(node)
        elif node.op_type == "AscendQuant":
            # an AscendQuant reads both types: float16 without the Cast to float32 before it
            tensor = node.input[0]
            node.input[0] = self.converted_tensors.get((tensor, _FLOAT16), tensor)
        elif node.op_type == "Cast":
            tensor = node.input[0]
            output = node.output[0]
            dtype = attributes(node)["to"]
            if dtype == _FLOAT16:
                self.tensors_now_float16.add(output)
            elif dtype == _FLOAT32 and tensor in self.tensors_now_float16:
                # a reader that wants float16 takes the tensor before this Cast
                self.converted_tensors[output, _FLOAT16] = tensor
        yield node

    def set_float16_output(self, node: onnx.NodeProto) -> None:
        """Set the output type of an Ascend operator to float16."""
        for attribute in node.attribute:
            if attribute.name == "dtype":
                attribute.i = 1
        self.tensors_now_float16.update(node.output)

    def rewrite_standard(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield a node of a standard operator, with a Cast for each tensor of another type.

        A schema of ONNX gives each input and output a type variable, such as "T": tensors of one
        variable have one type.
        """
        schema = find_schema(node.op_type, self.opset)
        assert schema is not None
        input_variables = type_variables(schema.inputs, len(node.input))
        output_variables = type_variables(schema.outputs, len(node.output))
        inputs = list(zip(input_variables, node.input, strict=True))
        outputs = list(zip(output_variables, node.output, strict=True))

        float16_variables = set[str]()
        if node.name not in self.float32_nodes:
            float16_variables = self.find_float16_variables(inputs, outputs)

        # an input of another type than the node computes in is read through a Cast
        for position, (variable, name) in enumerate(inputs):
            if variable in float16_variables:
                yield from self.cast_input(node, position, name, _FLOAT16)
            elif self.is_float16(name):
                yield from self.cast_input(node, position, name, _FLOAT32)
        yield node

        # an output that is to be float16, but that the node computes in float32, gets a Cast
        for position, (variable, name) in enumerate(outputs):
            if name not in self.tensors_to_be_float16:
                continue
            self.tensors_now_float16.add(name)
            if variable not in float16_variables:
                # the node makes a float32 tensor of another name, from which a Cast makes this one
                node.output[position] = claim_name(f"{name}.float32", self.tensor_names)
                yield self.make_cast(node.output[position], name, _FLOAT16)

    def find_float16_variables(
        self, inputs: Iterable[tuple[str, str]], outputs: Iterable[tuple[str, str]]
    ) -> set[str]:
        """Return the type variables that are float16 in a node.

        ONNX's schema of a node gives each input and output a type variable, such as "T". All that
        have the same variable have the same type. The outputs decide which variables are float16,
        by the types that they have in the file; if they share no variable with the inputs, as in a
        comparison, the inputs decide.

        `inputs` and `outputs`: (type variable, tensor) of each.
        """
        input_variables = {variable for variable, _ in inputs}
        output_variables = {variable for variable, _ in outputs}
        if not input_variables & output_variables:
            return {variable for variable, name in inputs if self.is_float16(name)}
        variables_of_float16_outputs = {
            variable for variable, name in outputs if name in self.tensors_to_be_float16
        }
        # a variable that only an output has, such as that of a LayerNormalization's mean, is left
        # out: its type is in an attribute
        return variables_of_float16_outputs & input_variables

    def is_float16(self, name: str) -> bool:
        """Whether a tensor is float16 now, or a constant is float16 in the file."""
        is_float16_constant = name in self.index.constants and name in self.tensors_to_be_float16
        return name in self.tensors_now_float16 or is_float16_constant

    def cast_input(
        self, node: onnx.NodeProto, position: int, name: str, wanted_type: int
    ) -> Iterator[onnx.NodeProto]:
        """Let a node's input read a tensor in the wanted type; yield the Cast if it is new.

        A tensor that is float16 already is read as it is. A constant is not cast: its float16 form
        becomes a new initializer.

        Args:
            node: the node, whose input is changed in place.
            position: index of the input.
            name: the tensor, which `is_float16` if the wanted type is float32.
            wanted_type: float16 or float32.
        """
        if not name:  # an optional input that the node does not have
            return
        if wanted_type == _FLOAT16 and name in self.tensors_now_float16:
            return
        constant = self.index.constants.get(name)
        if constant is not None and (wanted_type == _FLOAT32 or constant.data_type != _FLOAT32):
            return  # a float constant is stored in float32 already, and integers are never cast

        key = (name, wanted_type)
        if key not in self.converted_tensors:
            suffix = "float16" if wanted_type == _FLOAT16 else "float32"
            converted = claim_name(f"{name}.{suffix}", self.tensor_names)
            self.converted_tensors[key] = converted
            if constant is None:
                yield self.make_cast(name, converted, wanted_type)
            else:
                self.new_constants[converted] = _constant_to_float16(constant, converted)
        node.input[position] = self.converted_tensors[key]

    def make_cast(self, tensor: str, output: str, dtype: int) -> onnx.NodeProto:
        """Return a Cast, named after its output; a Cast of the file may already have that name."""
        name = claim_name(output, self.node_names)
        return make_node("Cast", [tensor], output, name, to=dtype)


def _constant_to_float16(constant: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """Return a constant in float16 under a new name; refuse values beyond float16."""
    values = numpy_helper.to_array(constant)
    largest = np.abs(values).max(initial=0)
    if largest > _MAX_FLOAT16:
        raise ExportError(
            f"a float16 model's constants must be within {_MAX_FLOAT16:g}, got {largest:g} in"
            f" {constant.name!r}; give the model in float32"
        )
    return numpy_helper.from_array(values.astype(np.float16), name)


def _read_tensors(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Return the tensors that nodes and their subgraphs read."""
    return {name for node in nodes for name in iter_reads(node)}


def _casts_to_float16(node: onnx.NodeProto) -> bool:
    """Whether a node is a Cast to float16."""
    return node.op_type == "Cast" and attributes(node)["to"] == _FLOAT16
