"""Shapes that the user gives to inputs: of a PyTorch model, and in place of an ONNX file's own.

`deploy.fx.open_model` exports a PyTorch model with them. A fully convolutional ONNX file takes
another size, unless a node has the size of the file inside::

    x [1,3,64,64] -- Conv [1,8,32,32] -- Reshape to [1,8,1024]        of the file
    x [1,3,96,96] -- Conv [1,8,48,48] -- Reshape to [1,8,1024]        refused: 1024 is inside
                                         Reshape to [1,8,-1]          taken
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import onnx

from deploy.errors import BackendError, ConfigError, ModelError, did_you_mean, first_line
from deploy.files.usercode import is_library_model
from deploy.frontends import checks
from deploy.frontends.base import LoadedModel
from deploy.frontends.fold import static_shapes
from deploy.frontends.metadata import read_declaration, read_metadata_preprocess
from deploy.frontends.onnx_file import load_onnx, read_source
from deploy.frontends.shapes import infer_shapes
from deploy.graph.edit import copy_message
from deploy.graph.index import describe_node, runtime_inputs
from deploy.runtimes.ort import OrtSession

if TYPE_CHECKING:
    from torch import nn

_SHAPE = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")
DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)


def is_torch_spec(source: object) -> bool:
    """Return whether `source` is `file.py:factory`, or a named model such as timm:resnet18."""
    path, _, name = str(source).rpartition(":")
    return (path.endswith(".py") and name.isidentifier()) or is_library_model(source)


def is_torch_module(source: object) -> TypeGuard[nn.Module]:
    """Return whether `source` is a module or an exported program; torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return isinstance(source, torch.nn.Module | torch.export.ExportedProgram)


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse `1x3x224x224` to (1, 3, 224, 224).

    Raises:
        ConfigError: not positive integers joined by x.
    """
    if not _SHAPE.fullmatch(text):
        raise ConfigError(f"an input shape is like 1x3x224x224, got {text!r}")
    return tuple(map(int, text.split("x")))


class InputRequest(NamedTuple):
    """An input given by the user: dtype None for the model's own, name None for the next input."""

    shape: tuple[int, ...]
    dtype: str | None = None
    name: str | None = None


def parse_input(text: str) -> InputRequest:
    """Parse `1x3x8x8`, `1x128:int64` or `ids=1x128:int64` to shape, dtype and name.

    Raises:
        ConfigError: no shape, or no dtype of `DTYPES`.
    """
    name, equals, shape_and_dtype = text.rpartition("=")
    shape, colon, dtype = shape_and_dtype.partition(":")
    if (equals and not name) or (colon and dtype not in DTYPES):
        message = (
            "an input is like 1x3x224x224, 1x128:int64 or mask=1x128, of a dtype of"
            f" {', '.join(DTYPES)}, got {text!r}"
        )
        suggestion = did_you_mean(dtype, DTYPES)
        raise ConfigError(f"{message}; {suggestion}" if suggestion else message)
    return InputRequest(parse_shape(shape), dtype or None, name or None)


def load_torch(source: str | Path | onnx.ModelProto, fold_batchnorm: bool) -> LoadedModel:
    """Raise: a PyTorch model needs the shapes of its inputs, which FRONTENDS cannot pass.

    Raises:
        ConfigError: always; `deploy.fx.open_model.open_torch` takes the shapes.
    """
    if not is_torch_spec(source):
        raise ConfigError(f"a PyTorch model is given as file.py:factory, got {str(source)!r}")
    raise missing_shape_error(source)


def missing_shape_error(spec: object) -> ConfigError:
    """Return the error for a PyTorch model without input shapes."""
    return ConfigError(
        f"{spec} needs the shape of its input: --input 1x3x224x224, once for each input"
    )


# operators that may have sizes inside, so that their output stays as large as for another input
_SIZED = ("Expand", "Reshape", "Resize", "Slice", "Upsample")


def open_with_shapes(path: Path, inputs: Sequence[InputRequest]) -> LoadedModel:
    """Load a float ONNX file whose inputs have other shapes than the file says.

    An open first dimension stays open, as the batch of an exported PyTorch model.

    Args:
        path: of the file.
        inputs: the user's shapes. A shape without a name is for the model's input at its position.

    Raises:
        ConfigError: an input that the model does not have, or one of another rank or dtype.
        ModelError: see `load_onnx`; or it cannot run at these shapes, such as because of a Reshape
            to the size of the file.
    """
    _path, file_model, _digests = read_source(path)
    resized_model = copy_message(file_model)
    shape_texts = _set_shapes(resized_model, inputs)
    if list(resized_model.graph.input) == list(file_model.graph.input):  # the file's own shapes
        return load_onnx(path, fold_batchnorm=True)
    shapes_text = " and ".join(shape_texts)
    try:
        _refuse_fixed_sizes(file_model, resized_model)
        loaded = load_onnx(resized_model, fold_batchnorm=True)
        _refuse_failing_run(loaded)
    except ModelError as error:
        reason, _, _ = str(error).partition("; ")  # without its advice, which does not fit here
        raise type(error)(
            f"{path} must take inputs of other sizes to be given {shapes_text}"
            f" (--input): {reason}; export the model at this size"
        ) from error
    return replace(
        loaded,
        name=path.stem,
        exported=resized_model,
        resized_file=path,
        given_shapes=tuple(shape_texts),
        notes=(f"Took {shapes_text} in place of the file's shapes.", *loaded.notes),
        metadata_preprocess=read_metadata_preprocess(resized_model, path),
        declaration=read_declaration(resized_model, path),
    )


def _set_shapes(model: onnx.ModelProto, inputs: Sequence[InputRequest]) -> list[str]:
    """Set the shapes of a model's inputs, in place; return texts such as "x=1x3x96x96".

    The shapes of other tensors are removed, since they follow from those of the inputs.
    """
    model_inputs = list(runtime_inputs(model.graph))
    input_by_name = {value.name: value for value in model_inputs}
    texts = []
    for position, request in enumerate(inputs):
        name = request.name or ""
        if not name and position < len(model_inputs):
            name = model_inputs[position].name
        value = input_by_name.get(name)
        if value is None:  # no such name, or more shapes than inputs
            requested_name = name or f"{len(inputs)} of them"
            raise ConfigError(
                f"--input gives shapes of the model's inputs, {', '.join(input_by_name)}, got"
                f" {requested_name}; name these"
            )
        _set_shape(value, request)
        texts.append(f"{value.name}={'x'.join(map(str, request.shape))}")

    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return texts


def _set_shape(value: onnx.ValueInfoProto, request: InputRequest) -> None:
    """Set the shape of one input, in place; an open first dimension, the batch, stays open.

    Raises:
        ConfigError: the input has another number of dimensions or another dtype.
    """
    tensor_type = value.type.tensor_type
    if not tensor_type.HasField("shape"):  # the file leaves the number of dimensions open, too
        tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension() for _ in request.shape])
    dimensions = tensor_type.shape.dim
    dtype = checks.type_name(tensor_type.elem_type)
    if len(dimensions) != len(request.shape) or request.dtype not in (None, dtype):
        raise ConfigError(
            f"the shape of {value.name} must have {len(dimensions)} dimensions of {dtype}, got"
            f" {'x'.join(map(str, request.shape))} of {request.dtype or dtype}; give it as the file"
            " does"
        )
    for axis, (dimension, size) in enumerate(zip(dimensions, request.shape, strict=True)):
        is_open_batch = axis == 0 and dimension.dim_value < 1
        if not is_open_batch:
            dimension.dim_value = size


def _refuse_fixed_sizes(file_model: onnx.ModelProto, resized_model: onnx.ModelProto) -> None:
    """Refuse a model in which a Reshape, Resize or the like has a fixed size, that of the file.

    Such a node makes an output of the file's shape although its input has another one.

    Args:
        file_model: with the shapes of the file.
        resized_model: the same nodes with the user's input shapes.

    Raises:
        ModelError: a node's input has another shape than in the file while its output has the same,
            or a Reshape makes several samples of one.
    """
    file_shapes = _shapes_at_batch_1(file_model)
    new_shapes = _shapes_at_batch_1(resized_model)
    known_tensors = file_shapes.keys() & new_shapes.keys()
    for node in resized_model.graph.node:
        if node.op_type not in _SIZED or not node.input or not node.output:
            continue
        source = node.input[0]
        output = node.output[0]
        if not known_tensors >= {source, output}:
            continue
        input_shape = new_shapes[source]
        output_shape = new_shapes[output]
        is_fixed = input_shape != file_shapes[source] and output_shape == file_shapes[output]
        # a Reshape to [-1, 1024] makes several samples of one larger sample
        input_keeps_batch = input_shape[:1] == file_shapes[source][:1]
        output_keeps_batch = output_shape[:1] == file_shapes[output][:1]
        makes_samples = node.op_type == "Reshape" and input_keeps_batch and not output_keeps_batch
        if is_fixed or makes_samples:
            raise ModelError(
                f"the {describe_node(node)} makes {list(output_shape)} of"
                f" {list(input_shape)}, by a size of the file inside"
            )


def _refuse_failing_run(loaded: LoadedModel) -> None:
    """Refuse a model that does not run on zeros; open dimensions are 1.

    Raises:
        ModelError: it does not run.
    """
    zeros = {spec.name: spec.zeros() for spec in loaded.inputs}
    try:
        OrtSession.open(loaded.model, threads=1, optimize=False).run(zeros)
    except BackendError as error:
        raise ModelError(f"the model must run, got: {first_line(error)}") from error


def _shapes_at_batch_1(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, with a batch of 1 where it is open.

    Raises:
        ModelError: the shapes contradict each other, as where a node has others inside.
    """
    sample_model = copy_message(model)
    for value in runtime_inputs(sample_model.graph):
        dimensions = value.type.tensor_type.shape.dim
        if dimensions and dimensions[0].dim_value < 1:
            dimensions[0].dim_value = 1
    for output in sample_model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return static_shapes(infer_shapes(sample_model).graph)
