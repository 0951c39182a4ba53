"""Export a PyTorch model to ONNX, in float or with Q/DQ nodes, and compare it with torch.

Only the exporter based on torch.export is used: the older one silently keeps one branch of a
data-dependent `if`. The opset is checked afterwards, because the exporter keeps its own if it
cannot convert down. The exported model is then cleaned up: output names, metadata, one operator.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from deploy.errors import BackendError, ExportError, ModelError, first_line
from deploy.fx.capture import repeat_single_sample
from deploy.fx.capture_errors import failing_line, root_cause
from deploy.fx.comparison import largest_difference, largest_magnitude, tensors_of
from deploy.fx.device import quiet
from deploy.fx.fakequant import ExportedModule, FakeQuant, FixedQuant
from deploy.graph.edit import copy_message, drop_unread, rename_tensors
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import is_global_mean
from deploy.runtimes.ort import OrtSession
from deploy.terminal import phase


def clean_exported(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the exporter's metadata, and with ReduceMean as GlobalAveragePool.

    The metadata holds paths of this machine. Runtimes have no int8 kernel for ReduceMean, which the
    exporter writes for a global average pool.
    """
    result = copy_message(model)
    graph = result.graph
    for holder in (result, graph, *graph.node, *graph.initializer, *graph.value_info):
        del holder.metadata_props[:]
        holder.ClearField("doc_string")
    for value in (*graph.input, *graph.output):
        del value.metadata_props[:]
    index = Graph(result)
    for node in graph.node:
        mean = node.op_type == "ReduceMean" and is_global_mean(index, node)
        if mean and attributes(node).get("keepdims", 1):
            node.op_type = "GlobalAveragePool"
            del node.input[1:]
            del node.attribute[:]
    drop_unread(graph)
    return result


def name_outputs(model: onnx.ModelProto, program: ExportedProgram | None) -> None:
    """Name outputs returned in a dict by their key, nested ones `outer_inner`; in place.

    Outputs in tuples and lists keep the names that the exporter gave them.
    """
    if program is None or program.call_spec.out_spec is None:
        return
    arguments = [
        spec.arg
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.USER_OUTPUT  # others are buffers that forward changes
    ]
    leaves = zip(_paths(program.call_spec.out_spec), arguments, strict=True)
    paths = [path for path, argument in leaves if isinstance(argument, TensorArgument)]
    outputs = [value.name for value in model.graph.output]
    if len(paths) != len(outputs) or len({*outputs}) != len(outputs):
        return  # a tensor that is returned twice has one name
    taken = {value.name for value in model.graph.input} | {*outputs}
    new: dict[str, str] = {}
    for name, path in zip(outputs, paths, strict=True):
        if any(isinstance(key, pytree.MappingKey | pytree.GetAttrKey) for key in path):
            new[name] = _unique_name("_".join(map(_key_name, path)), taken)
    _rename(model.graph, new)


def _paths(spec: Any) -> list[Sequence[Any]]:
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [path for path, _ in pytree.tree_flatten_with_path(numbered)[0]]


def _key_name(key: Any) -> str:
    if isinstance(key, pytree.MappingKey):
        return str(key.key)
    return str(key.name if isinstance(key, pytree.GetAttrKey) else key.idx)


def _unique_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_out"
    taken.add(name)
    return name


def _rename(graph: onnx.GraphProto, new: dict[str, str]) -> None:
    """Rename values everywhere; inner values whose name is needed get "_inner"."""
    inner = {name for node in graph.node for name in node.output} - {*new}
    displaced = {name: f"{name}_inner" for name in inner & {*new.values()}}
    rename_values(graph, {**new, **displaced})


def rename_values(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename tensors wherever a node or an output names them, in place."""
    rename_tensors(graph.node, names)
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)


OPSET = 18
FLOAT_TOLERANCE = 1e-4  # relative to the largest output: only the order of sums differs
ROUNDING = 16  # times the model's float32 error, if that is more
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
        ModelError: torch.export cannot follow the model, or the model fixes the batch.
        ExportError: the exporter cannot write this opset.
    """
    if any(isinstance(module, FakeQuant) for module in model.modules()):
        raise ExportError("a prepared model must be converted before export: convert(prepared)")
    # copies, because the same tensor twice would become one input
    inputs = [repeat_single_sample(x) if dynamic_batch else x for x in map(torch.clone, inputs)]
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} for _ in inputs) if dynamic_batch else None
    try:
        program = run_exporter(_exportable(model), tuple(inputs), shapes, opset)
    except Exception as error:  # torch.export and the exporter share no error class
        raise ModelError(explain_export_failure(error, dynamic_batch)) from error
    written = program.model_proto
    name_outputs(written, program.exported_program)
    got = {entry.domain: entry.version for entry in written.opset_import}.get("", 0)
    if got != opset:
        raise ExportError(
            f"this model cannot be written at opset {opset}: torch's exporter kept {got};"
            f" ask for {got}, or use operators that opset {opset} has"
        )
    if dynamic_batch:
        for value in written.graph.input:
            first = value.type.tensor_type.shape.dim[0]
            if not first.dim_param:
                raise ModelError(
                    f"the batch must stay open, and the model fixes it to {first.dim_value} in"
                    f" {value.name!r}; {FIXED_BATCH}, or take the batch from the input's shape"
                )
    return clean_exported(written)


def run_exporter(
    model: nn.Module, inputs: tuple[Any, ...], shapes: Any, opset: int, *, optimize: bool = True
) -> Any:
    """Return the program that torch's exporter makes, which tells nothing; any error is its own.

    `model` is a copy: what it returns beside tensors, such as a size, is None from here on, as the
    exporter fails at it.
    """
    model.register_forward_hook(lambda _, __, returned: _tensors_only(returned))
    with quiet():
        return torch.onnx.export(
            model,
            inputs,
            None,
            dynamo=True,
            verbose=False,
            opset_version=opset,
            dynamic_shapes=shapes,
            optimize=optimize,
        )


@dataclass(frozen=True, slots=True)
class ExportAgreement:
    """Comparison of an ONNX model's outputs with those of the torch model it was exported from."""

    samples: int
    max_difference: float  # largest absolute difference of any output value
    max_output: float  # largest absolute value of the torch model's outputs
    argmax: float  # fraction of the last output's rows with the same arg-max along dimension 1
    # max_difference in steps of the last quantized tensor; None for a float model or several
    # outputs
    codes: float | None
    batches: tuple[int, ...] = ()
    depends_on_input: bool = True  # whether an output does; if not, agreement proves nothing
    rows: int = 0  # rows of `argmax`; 0 or the number of samples if each sample has one

    @property
    def warning(self) -> str | None:
        """A warning if agreement proves nothing, else None."""
        return None if self.depends_on_input else CONSTANT_OUTPUT

    def __str__(self) -> str:
        codes = f", {self.codes:.2f} steps of the last scale" if self.codes is not None else ""
        sizes = f" in batches of {' and '.join(map(str, self.batches))}" if self.batches else ""
        warning = f"; {self.warning}" if self.warning else ""
        dense = self.rows not in (0, self.samples)
        rows = f" of {self.rows} positions in the last output" if dense else ""
        return (
            f"onnxruntime against torch on {self.samples} samples{sizes}: same arg-max"
            f" {100 * self.argmax:.2f}%{rows}, largest difference {self.max_difference:.3g}{codes}"
            f" (largest output {self.max_output:.3g}){warning}"
        )


def compare_with_torch(
    exported: onnx.ModelProto,
    model: nn.Module,
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    optimized: bool = True,
    kernels: bool = True,
) -> ExportAgreement:
    """Run batches in ONNX Runtime and in torch, and compare the outputs.

    Args:
        exported: `to_onnx` of `model`.
        model: the float or converted model.
        batches: each the inputs of one run, batch first.
        optimized: allow graph optimization, as in deployment; else each operator runs as ONNX
            defines it.
        kernels: allow int8 kernels; set False for models of other runtimes, whose weights may
            saturate them.
    """
    session = OrtSession.open(exported, threads=1, optimize=optimized, int8_kernels=kernels)
    names = [spec.name for spec in session.inputs]
    worst = largest = 0.0
    same = samples = rows = outputs = 0
    varied: dict[bool, bool] = {}  # batch has several samples -> an output varies
    for batch in batches:
        feed = {n: x.detach().cpu().numpy() for n, x in zip(names, batch, strict=True)}
        theirs = [torch.from_numpy(np.array(value)) for value in session.run(feed).values()]
        with torch.no_grad():
            ours = tensors_of(model(*batch))
        for left, right in zip(ours, theirs, strict=True):
            if left.shape != right.shape:
                raise ExportError(
                    "an exported model must give torch's shapes for any batch, got"
                    f" {tuple(right.shape)} in place of {tuple(left.shape)}; {FIXED_BATCH}"
                )
            worst = max(worst, largest_difference(left, right))
        largest = max(largest, largest_magnitude(ours))
        several = len(batch[0]) > 1 if batch[0].ndim else False
        varied[several] = varied.get(several, False) or any(map(_varies, ours))
        hits = _same_argmax(ours[-1].cpu().numpy(), theirs[-1].numpy())
        same, rows, outputs = same + int(hits.sum()), rows + len(hits), len(ours)
        samples += len(batch[0]) if batch[0].ndim else 1
    quants = [module for module in model.modules() if isinstance(module, FixedQuant)]
    step = float(quants[-1].scale) if quants else 0.0
    codes = worst / step if step and outputs == 1 else None
    sizes = tuple(sorted({len(batch[0]) for batch in batches if batch[0].ndim}))
    depends_on_input = varied.get(True, varied.get(False, False))
    return ExportAgreement(
        samples, worst, largest, same / max(rows, 1), codes, sizes, depends_on_input, rows
    )


def check_float_export(
    exported: onnx.ModelProto, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> ExportAgreement:
    """Check a float export with `compare_with_torch`, a dynamic batch with two batch sizes.

    Outputs may differ by `FLOAT_TOLERANCE` of the largest, or by `ROUNDING` times the model's own
    float32 error, measured against float64.

    Raises:
        ExportError: they differ by more, or the file does not run with another batch size.
    """
    batches = [tuple(inputs)]
    shapes = [value.type.tensor_type.shape.dim for value in exported.graph.input]
    if all(dims and dims[0].dim_param for dims in shapes):
        batches.append(with_more_samples(inputs))
    try:
        agreement = compare_with_torch(exported, model, batches)
    except BackendError as error:
        sizes = " and ".join(str(len(batch[0])) for batch in batches)
        remedy = FIXED_BATCH if len(batches) > 1 else "rewrite what ONNX Runtime cannot run"
        raise ExportError(
            f"an exported model must run in onnxruntime for batches of {sizes}, got:"
            f" {first_line(error)}; {remedy}"
        ) from error
    allowed = FLOAT_TOLERANCE * agreement.max_output
    if not agreement.max_difference <= allowed:
        allowed = max(allowed, ROUNDING * max(_float32_error(model, batch) for batch in batches))
    if not agreement.max_difference <= allowed:
        raise ExportError(
            f"an exported model must compute what torch computes, got: {agreement}; report it with"
            " the model, or rewrite what computes otherwise there"
        )
    return agreement


def with_more_samples(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Append samples to a batch, to a size other than the 2 with which torch.export ran."""
    count = 2 if len(inputs[0]) == 1 else 1
    return tuple(torch.cat([x, x[:1].flip(-1).expand(count, *x.shape[1:])]) for x in inputs)


def _float32_error(model: nn.Module, inputs: Sequence[torch.Tensor]) -> float:
    """Return the largest difference from a run in float64; 0 if the model cannot run in it."""
    doubled = [x.double() if x.is_floating_point() else x for x in inputs]
    try:
        with torch.no_grad():
            exact, ours = copy.deepcopy(model).double()(*doubled), model(*inputs)
    except Exception:  # a forward with a fixed dtype may raise anything
        return 0.0
    return largest_difference(ours, exact)


def _varies(output: torch.Tensor) -> bool:
    """Return whether an output varies between samples; for one sample, between values."""
    if output.ndim and len(output) > 1:
        return bool((output != output[:1]).any())
    return bool((output != output.reshape(-1)[:1]).any())


def _exportable(model: nn.Module) -> nn.Module:
    """Return a copy of `model` whose quantizers emit ONNX operators."""
    exportable = copy.deepcopy(model).eval()
    for module in exportable.modules():
        if isinstance(module, ExportedModule):
            module.start_export()
    return exportable


def _tensors_only(returned: Any) -> Any:
    return pytree.tree_map(lambda x: x if isinstance(x, torch.Tensor) else None, returned)


def explain_export_failure(error: Exception, dynamic_batch: bool) -> str:
    """Return one sentence on why torch.export or the exporter failed, with the user's line."""
    root = root_cause(error)
    where = failing_line(root) or failing_line(error)
    on_data = "DataDependent" in type(root).__name__
    fixed_batch = f"{FIXED_BATCH}, or " if dynamic_batch and not on_data else ""
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    # the second line too if the first is a heading
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else first_line(root)
    return (
        f"torch.export must be able to follow the model, got {type(root).__name__}:"
        f" {text[:300]}" + (f" at {where}" if where else "") + f"; {fixed_batch}rewrite what"
        " depends on data"
    )


def _same_argmax(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_]:
    """Compare the arg-max of [N, C, ...] for each sample, or each position of a dense output."""
    if left.ndim < 2:
        return np.asarray(left.argmax() == right.argmax()).reshape(1)
    return np.asarray(left.argmax(1) == right.argmax(1)).reshape(-1)
