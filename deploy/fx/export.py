"""Export a PyTorch model to ONNX, in float or with Q/DQ nodes, and compare it with torch.

Only the exporter based on torch.export is used: the older one silently keeps one branch of a
data-dependent `if`. The opset is checked afterwards, because the exporter keeps its own if it
cannot convert down. The exported model is then cleaned up: output names, metadata, one operator.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from deploy.errors import BackendError, ExportError, ModelError, check_whole_number, first_line
from deploy.fx.capture import batch_size, dynamic_shapes, has_batch, repeat_single_sample, run_model
from deploy.fx.comparison import (
    largest_difference,
    largest_magnitude,
    tensors_of,
)
from deploy.fx.device import quiet
from deploy.fx.fakequant import ExportedModule, FakeQuant, FixedQuant
from deploy.fx.model_inputs import cast_floats
from deploy.fx.plain_copy import deep_copy
from deploy.fx.trace import explain_export_failure
from deploy.graph.edit import (
    copy_message,
    drop_unread,
    drop_unused_domains,
    rename_tensors,
    replace_field,
)
from deploy.graph.index import (
    MODULE_SCOPES,
    Graph,
    all_outputs,
    attributes,
    map_producers,
    names_of,
    opset_of,
)
from deploy.graph.placement import is_global_mean
from deploy.runtimes.ort import OrtSession
from deploy.terminal import PrintedResult, phase


def clean_exported(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the exporter's metadata, and with ReduceMean as GlobalAveragePool.

    The metadata holds paths of this machine; only the nodes' paths in the module stay. Runtimes
    have no int8 kernel for ReduceMean, which the exporter writes for a global average pool.
    """
    result = copy_message(model)
    graph = result.graph
    values = (*graph.input, *graph.output, *graph.value_info)
    for message in (result, graph, *graph.initializer, *values):
        del message.metadata_props[:]
        message.ClearField("doc_string")
    for node in graph.node:
        module_paths = [entry for entry in node.metadata_props if entry.key == MODULE_SCOPES]
        replace_field(node.metadata_props, module_paths)
        node.ClearField("doc_string")

    graph_index = Graph(result)
    for node in graph.node:
        is_mean_of_pixels = node.op_type == "ReduceMean" and is_global_mean(graph_index, node)
        if is_mean_of_pixels and attributes(node).get("keepdims", 1):
            node.op_type = "GlobalAveragePool"
            del node.input[1:]
            del node.attribute[:]
    drop_unread(graph)
    drop_unused_domains(result)
    return result


def name_outputs(model: onnx.ModelProto, program: ExportedProgram | None) -> None:
    """Name outputs that forward returns in a dict by their key, in place.

    Nested keys give `outer_inner`. If an input or another output has the name already, "_out" is
    appended. Outputs in tuples and lists keep the names that the exporter gave them. An output of
    a Q/DQ pair is named after the tensor that the pair rounds, as in the float model.

    `program`: what torch.export made; without it (None), all names stay.
    """
    if program is None or program.call_spec.out_spec is None:
        return
    paths = _tensor_paths(program)  # for each output, the keys that lead to it
    outputs = [value.name for value in model.graph.output]
    if len(paths) != len(outputs) or len({*outputs}) != len(outputs):
        return  # a tensor that is returned twice has one name
    producers = map_producers(model.graph.node)
    used_names = {value.name for value in (*model.graph.input, *model.graph.output)}
    new_names: dict[str, str] = {}
    for output, path in zip(outputs, paths, strict=True):
        used_names.remove(output)
        has_key = any(isinstance(key, pytree.MappingKey | pytree.GetAttrKey) for key in path)
        joined_keys = "_".join(map(_key_name, path))
        name = joined_keys if has_key else _unrounded_name(producers, output)
        while name in used_names:
            name += "_out"
        used_names.add(name)
        new_names[output] = name
    _rename_outputs(model.graph, new_names)


def _unrounded_name(producers: Mapping[str, onnx.NodeProto], output: str) -> str:
    """Return the name of the tensor that an output's pair rounds; without a pair its own name."""
    node = producers.get(output)
    while node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear"):
        output = node.input[0]
        node = producers.get(output)
    return output


def _tensor_paths(program: ExportedProgram) -> list[Sequence[Any]]:
    """Return the path of keys to each tensor in what forward returns."""
    spec: Any = program.call_spec.out_spec
    leaf_numbers = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    leaf_paths = iter(pytree.tree_flatten_with_path(leaf_numbers)[0])
    paths = []
    for output in program.graph_signature.output_specs:
        if output.kind is OutputKind.USER_OUTPUT:  # others are buffers that forward changes
            path, _ = next(leaf_paths)
            if isinstance(output.arg, TensorArgument):
                paths.append(path)
    return paths


def _key_name(key: Any) -> str:
    """Return the text of a key of pytree: of a dict, a dataclass, or a list or tuple."""
    if isinstance(key, pytree.MappingKey):
        return str(key.key)
    if isinstance(key, pytree.GetAttrKey):
        return key.name
    return str(key.idx)


def _rename_outputs(graph: onnx.GraphProto, new_names: dict[str, str]) -> None:
    """Rename outputs; inner values and weights whose name is needed get "_inner"."""
    names = all_outputs(graph.node) | names_of(graph.initializer)
    needed_names = names.intersection(new_names.values()) - new_names.keys()
    rename_values(graph, new_names | {name: f"{name}_inner" for name in needed_names})


def rename_values(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename tensors wherever they are named, in place; inputs keep their names."""
    rename_tensors(graph.node, names)
    for value in (*graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)


OPSET = 18
FLOAT_TOLERANCE = 1e-4  # relative to the largest output: only the order of sums differs
ROUNDING_FACTOR = 16  # times the model's float32 error, if that is more
FIXED_BATCH = "export it with a fixed batch (calib8 export --static-batch) and go on from the file"
CONSTANT_OUTPUT = "the outputs do not depend on the input, so this proves nothing; load --weights"


@phase("exporting")
def to_onnx(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    opset: int = OPSET,
    dynamic_batch: bool = True,
) -> onnx.ModelProto:
    """Export a float model, or a converted one (`deploy.fx.convert.convert`) with Q/DQ nodes.

    Args:
        model: in eval mode.
        inputs: example inputs; with dynamic_batch dimension 0 is the batch.
        opset: of the default domain; all targets read 18.
        dynamic_batch: make the batch dynamic, named "batch".

    Raises:
        ConfigError: the opset is no number.
        ModelError: the model cannot be copied, it does not run for the inputs, torch.export cannot
            follow it, or it fixes the batch.
        ExportError: the exporter cannot write this opset.
    """
    check_whole_number("opset", opset, 1)
    if any(isinstance(module, FakeQuant) for module in model.modules()):
        raise ExportError("a prepared model must be converted before export: convert(prepared)")
    # copies, because the same tensor twice would become one input; channels last, which has no
    # meaning in ONNX, would be exported as nodes that permute values
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
    shapes = None
    if dynamic_batch:
        copies = [repeat_single_sample(tensor) for tensor in copies]  # a batch of 1 would be fixed
        batch = torch.export.Dim("batch")
        shapes = dynamic_shapes(model, tuple(copies), batch)
    exportable = _exportable_copy(model)
    try:
        program = run_exporter(exportable, tuple(copies), shapes, opset)
    except Exception as error:  # torch.export and the exporter share no error class
        run_model(model, inputs)  # raises, with the reason, if the model itself does not run
        fixed_batch_remedy = FIXED_BATCH if dynamic_batch else ""
        message = explain_export_failure(error, exportable, fixed_batch=fixed_batch_remedy)
        raise ModelError(message) from error

    exported = program.model_proto
    name_outputs(exported, program.exported_program)
    written_opset = opset_of(exported)
    if written_opset != opset:  # the exporter could not convert to it
        raise ExportError(
            f"this model cannot be written at opset {opset}: torch's exporter kept {written_opset};"
            f" ask for {written_opset}, or use operators that opset {opset} has"
        )
    fixed_inputs = _inputs_with_fixed_batch(exported)
    if dynamic_batch and fixed_inputs:
        raise ModelError(
            f"the batch must stay open, and the model fixes it in {', '.join(fixed_inputs)};"
            f" {FIXED_BATCH}, or take the batch from the input's shape"
        )
    return clean_exported(exported)


def _inputs_with_fixed_batch(exported: onnx.ModelProto) -> list[str]:
    """Return the names of inputs whose first dimension is not dynamic; a scalar has none."""
    names = []
    for value in exported.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].dim_param:
            names.append(value.name)
    return names


def run_exporter(
    model: nn.Module, inputs: tuple[Any, ...], shapes: Any, opset: int, *, optimize: bool = True
) -> Any:
    """Export a model to ONNX with torch's exporter, silently; return the exporter's program.

    The exporter fails at outputs that are no tensors, such as a size. So the model is changed in
    place: it returns None for these, and a dict for a dataclass. Errors are the exporter's own.

    Args:
        model: what to export; changed as said above.
        inputs: example inputs.
        shapes: their dynamic dimensions, as for torch.export; None if all are fixed.
        opset: of the default domain.
        optimize: let the exporter optimize the ONNX model.
    """
    if isinstance(model, fx.GraphModule):  # torch.export interprets its graph, without its hooks
        output_node = model.graph.output_node()
        (returned,) = output_node.args
        with model.graph.inserting_before(output_node):
            tensors = model.graph.call_function(_tensors_only, (returned,))
        output_node.args = (tensors,)
    else:
        model.register_forward_hook(lambda _module, _inputs, returned: _tensors_only(returned))
    with quiet():
        return torch.onnx.export(
            model,
            (*inputs, {}),  # a dict at the end holds the keyword arguments: none
            None,  # no file is written
            dynamo=True,
            verbose=False,
            opset_version=opset,
            dynamic_shapes=shapes,
            optimize=optimize,
        )


@dataclass(frozen=True, slots=True, repr=False)
class ExportAgreement(PrintedResult):
    """Comparison of an ONNX model's outputs with those of the torch model it was exported from.

    Attributes:
        samples: number of samples.
        max_difference: largest absolute difference of any output value.
        max_output: largest absolute value of the torch model's outputs.
        argmax: fraction of the last output's rows with the same arg-max along dimension 1; 1 if
            there is nothing to choose from, as in a mask of one channel.
        codes: max_difference in steps of the last quantized tensor; None for a float model or
            several outputs.
        batches: batch sizes.
        depends_on_input: whether an output depends on the input; if not, agreement proves nothing.
        argmax_rows: rows of `argmax`: the number of samples if each sample has one; 0 if there is
            nothing to choose from.
    """

    samples: int
    max_difference: float
    max_output: float
    argmax: float
    codes: float | None
    batches: tuple[int, ...]
    depends_on_input: bool
    argmax_rows: int

    @property
    def warning(self) -> str | None:
        """A warning if agreement proves nothing, else None."""
        return None if self.depends_on_input else CONSTANT_OUTPUT

    def to_screen(self) -> str:
        """Return one line: batches, share of equal arg-max, difference (in int8 steps: `codes`)."""
        text = f"onnxruntime against torch on {self.samples} samples"
        if self.batches:
            text += f" in batches of {' and '.join(map(str, self.batches))}"
        text += ": "
        if self.argmax_rows:
            text += f"same arg-max {100 * self.argmax:.2f}%"
            if self.argmax_rows != self.samples:
                text += f" of {self.argmax_rows} positions in the last output"
            text += ", "
        text += f"largest difference {self.max_difference:.3g}"
        if self.codes is not None:
            text += f", {self.codes:.2f} int8 steps of the last quantized tensor"
        text += f" (largest output {self.max_output:.3g})"
        if self.warning:
            text += f"; {self.warning}"
        return text


@phase("comparing with torch")
def compare_with_torch(
    exported: onnx.ModelProto,
    model: nn.Module,
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    optimized: bool = True,
    int8_kernels: bool = True,
) -> ExportAgreement:
    """Run batches in ONNX Runtime and in torch, and compare the outputs.

    Args:
        exported: `to_onnx` of `model`.
        model: the float or converted model.
        batches: each the inputs of one run, batch first.
        optimized: allow graph optimization, as in deployment; else each operator runs as ONNX
            defines it.
        int8_kernels: allow int8 kernels; set False for models of other runtimes, whose weights may
            saturate them.
    """
    session = OrtSession.open(exported, threads=1, optimize=optimized, int8_kernels=int8_kernels)
    sample_counts = []
    differences = []
    magnitudes = []
    same_argmax: list[NDArray[np.bool_]] = []  # for each row of the last output
    # for each batch, whether an output varies: between its samples, or within its only one
    varies_between_samples: list[bool] = []
    varies_within_sample: list[bool] = []
    for batch in batches:
        torch_outputs, onnx_outputs = _run_both(model, session, batch)
        sample_count = batch_size(batch)
        sample_counts.append(sample_count)
        differences.append(largest_difference(torch_outputs, onnx_outputs))
        magnitudes.append(largest_magnitude(torch_outputs))
        last_output = torch_outputs[-1].cpu().numpy()
        same_argmax.append(_same_argmax(last_output, onnx_outputs[-1].numpy()))
        varies = any(map(_varies, torch_outputs))
        if sample_count > 1:
            varies_between_samples.append(varies)
        else:
            varies_within_sample.append(varies)

    max_difference = float(np.max(differences))  # NaN if one is, which `max` may lose
    # an int8 step of the output; of several outputs it is not known which one has the last step
    step = _last_step(model) if len(torch_outputs) == 1 else None
    # outputs that vary within a sample may be constants: they count only if no batch has several
    # samples to compare
    varies_in_batch = varies_between_samples or varies_within_sample
    has_same_argmax = np.concatenate(same_argmax)
    row_count = len(has_same_argmax)
    return ExportAgreement(
        samples=sum(sample_counts),
        max_difference=max_difference,
        max_output=max(magnitudes),
        argmax=int(has_same_argmax.sum()) / row_count if row_count else 1.0,
        codes=None if step is None else max_difference / step,
        batches=tuple(sorted({*sample_counts})),
        depends_on_input=any(varies_in_batch),
        argmax_rows=row_count,
    )


def _last_step(model: nn.Module) -> float | None:
    """Return the real value of an int8 step of the last quantized tensor; None without any."""
    # in the order of the graph, in which `prepare` added them
    quantizers = [module for module in model.modules() if isinstance(module, FixedQuant)]
    return float(quantizers[-1].scale) if quantizers else None


def _run_both(
    model: nn.Module, session: OrtSession, batch: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs of torch and those of ONNX Runtime, which must have the same shapes."""
    arrays = {
        spec.name: tensor.detach().cpu().numpy()
        for spec, tensor in zip(session.inputs, batch, strict=True)
    }
    onnx_arrays = session.run(arrays).values()
    onnx_outputs = [torch.from_numpy(np.array(array)) for array in onnx_arrays]
    torch_outputs = [output.detach() for output in tensors_of(run_model(model, batch))]
    for torch_output, onnx_output in zip(torch_outputs, onnx_outputs, strict=True):
        if torch_output.shape != onnx_output.shape:
            raise ExportError(
                "an exported model must give torch's shapes for any batch, got"
                f" {tuple(onnx_output.shape)} in place of {tuple(torch_output.shape)};"
                f" {FIXED_BATCH}"
            )
    return torch_outputs, onnx_outputs


def check_float_export(
    exported: onnx.ModelProto, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> ExportAgreement:
    """Check a float export with `compare_with_torch`; a dynamic batch with two batch sizes.

    Outputs may differ by `FLOAT_TOLERANCE` of the largest, or by `ROUNDING_FACTOR` times the
    model's own float32 error, measured against float64.

    Raises:
        ExportError: they differ by more, or the file does not run with another batch size.
    """
    batches = [tuple(inputs)]
    is_batch_dynamic = not _inputs_with_fixed_batch(exported)
    if is_batch_dynamic:
        batches.append(with_more_samples(inputs))
    try:
        agreement = compare_with_torch(exported, model, batches)
    except BackendError as error:
        sizes = " and ".join(str(batch_size(batch)) for batch in batches)
        # a file that loads fails for the second batch size
        fixes_batch = is_batch_dynamic and _can_open(exported)
        remedy = FIXED_BATCH if fixes_batch else "rewrite what ONNX Runtime cannot run"
        raise ExportError(
            f"an exported model must run in onnxruntime for batches of {sizes}, got:"
            f" {first_line(error)}; {remedy}"
        ) from error

    # "not <=", since a difference may be NaN
    allowed_difference = FLOAT_TOLERANCE * agreement.max_output
    if not agreement.max_difference <= allowed_difference:
        _refuse_random(model, inputs, allowed_difference)
        rounding = max(_float32_error(model, batch) for batch in batches)
        allowed_difference = max(allowed_difference, ROUNDING_FACTOR * rounding)
    if not agreement.max_difference <= allowed_difference:
        raise ExportError(
            f"an exported model must compute what torch computes, got: {agreement}; report it with"
            " the model, or rewrite what computes otherwise there"
        )
    return agreement


def _can_open(model: onnx.ModelProto) -> bool:
    """Return whether ONNX Runtime can open a model."""
    try:
        OrtSession.open(model, threads=1)
    except BackendError:
        return False
    return True


def with_more_samples(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Append samples to a batch, to a size other than the 2 with which torch.export ran."""
    larger = []
    for tensor in inputs:
        if has_batch(tensor):
            count = 2 if len(tensor) == 1 else 1
            new_sample = tensor[:1].flip(-1)
            tensor = torch.cat([tensor, *[new_sample] * count])
        larger.append(tensor)
    return tuple(larger)


def _float32_error(model: nn.Module, inputs: Sequence[torch.Tensor]) -> float:
    """Return the largest difference from a run in float64; 0 if the model cannot run in it."""
    try:
        exact_model = copy.deepcopy(model).double()
        exact_output = run_model(exact_model, cast_floats(inputs, torch.float64))
    except ModelError:  # a forward with a fixed dtype
        return 0.0
    return largest_difference(run_model(model, inputs), exact_output)


def _refuse_random(model: nn.Module, inputs: Sequence[torch.Tensor], allowed: float) -> None:
    """Raise `ExportError` if two runs for the same inputs differ by more than `allowed`."""
    copies = copy.deepcopy(list(inputs))  # a forward may change them
    with torch.no_grad():  # unlike `run_model`, without a fixed seed
        difference = largest_difference(run_model(model, inputs), model(*copies))
    if difference > allowed:
        raise ExportError(
            "an exported model must compute the same in each run, and two runs in eval mode differ"
            f" by {difference:.3g}: its forward draws random numbers, as F.dropout does without"
            " training=self.training, or keeps something from one call to the next"
        )


def _varies(output: torch.Tensor) -> bool:
    """Return whether an output varies between samples; for one sample, between values."""
    if not output.ndim or len(output) == 1:
        output = output.reshape(-1)
    return bool((output != output[:1]).any())


def _exportable_copy(model: nn.Module) -> nn.Module:
    """Return a copy of `model` whose quantizers emit ONNX operators."""
    exportable = deep_copy(model).eval().to(memory_format=torch.contiguous_format)
    for module in exportable.modules():
        if isinstance(module, ExportedModule):
            module.exporting = True
    return exportable


def _tensors_only(returned: Any) -> Any:
    """Return an output with None for all but tensors, and dicts in place of dataclasses."""

    def tensor_or_none(leaf: Any) -> Any:
        if is_dataclass(leaf):
            return _tensors_only({field.name: getattr(leaf, field.name) for field in fields(leaf)})
        return leaf if isinstance(leaf, torch.Tensor) else None

    # also of a registered dataclass, since torch may not know the names of its fields
    return pytree.tree_map(tensor_or_none, returned, is_leaf=is_dataclass)


def _same_argmax(expected: NDArray[Any], output: NDArray[Any]) -> NDArray[np.bool_]:
    """Compare the arg-max of [N, C, ...] for each sample, or each position of a dense output."""
    if expected.ndim < 2 or expected.shape[1] < 2:  # a mask, a value a sample, or nothing
        return np.zeros(0, np.bool_)
    return np.ravel(expected.argmax(1) == output.argmax(1))
