"""A PyTorch model -> ONNX, in float or with QuantizeLinear and DequantizeLinear, and the proof.

Always the exporter that stands on torch.export: the older one silently keeps one branch of an `if`
on data. The opset is read back from what was written, since the exporter keeps its own where it
cannot convert down.

What is changed in an ONNX model that torch's exporter wrote: names, notes, and one operator.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx, nn
from torch.utils import _pytree as pytree

from deploy.errors import BackendError, ExportError, ModelError, first_line
from deploy.fx.device import quiet
from deploy.fx.fakequant import DynamicQuant, FakeQuant, FixedQuant
from deploy.fx.int8_layers import IntLayer
from deploy.fx.profile import difference, largest_of, tensors_of
from deploy.fx.trace import line_of
from deploy.graph.edit import copied, drop_unread
from deploy.graph.index import attributes
from deploy.runtimes.ort import OrtSession
from deploy.terminal import phase

if TYPE_CHECKING:
    import onnx
    from torch.export import ExportedProgram


def plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the exporter's notes, and with GlobalAveragePool by its name.

    The notes hold paths of this machine. The exporter writes the pool as ReduceMean, for which
    runtimes have no int8 kernel.
    """
    copy = copied(model)
    graph = copy.graph
    for holder in (copy, graph, *graph.node, *graph.initializer, *graph.value_info):
        del holder.metadata_props[:]
        holder.ClearField("doc_string")
    for value in (*graph.input, *graph.output):
        del value.metadata_props[:]
    _name_global_pools(graph)
    return copy


def name_outputs(model: onnx.ModelProto, program: ExportedProgram | None) -> None:
    """Call what a forward returns in a dict by its key, `outer_inner` in several; in place.

    Outputs in tuples and lists keep the names that the exporter gave them.
    """
    if program is None or program.call_spec.out_spec is None:
        return
    returned = program.graph.output_node().args[0]
    leaves = zip(_paths(program.call_spec.out_spec), returned, strict=True)
    paths = [path for path, value in leaves if isinstance(value, fx.Node)]
    outputs = [value.name for value in model.graph.output]
    if len(paths) != len(outputs) or len({*outputs}) != len(outputs):
        return  # one tensor in two places has one name
    taken = {value.name for value in model.graph.input} | {*outputs}
    new: dict[str, str] = {}
    for name, path in zip(outputs, paths, strict=True):
        if any(isinstance(key, pytree.MappingKey | pytree.GetAttrKey) for key in path):
            new[name] = _free("_".join(map(_step, path)), taken)
    _rename(model.graph, new)


def _paths(spec: Any) -> list[Sequence[Any]]:
    """The way to each leaf of an output."""
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [path for path, _ in pytree.tree_flatten_with_path(numbered)[0]]


def _step(key: Any) -> str:
    if isinstance(key, pytree.MappingKey):
        return str(key.key)
    return str(key.name if isinstance(key, pytree.GetAttrKey) else key.idx)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_out"
    taken.add(name)
    return name


def _rename(graph: onnx.GraphProto, new: dict[str, str]) -> None:
    """Give values other names, wherever they are made, read or described."""
    inner = {name for node in graph.node for name in node.output} - {*new}
    away = {name: f"{name}_inner" for name in inner & {*new.values()}}
    names = {**new, **away}
    for node in graph.node:
        for held in (node.input, node.output):
            held[:] = [names.get(name, name) for name in held]
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)


def _name_global_pools(graph: onnx.GraphProto) -> None:
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in _values(graph)}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "ReduceMean" and _is_global_pool(node, ranks, constants):
            node.op_type = "GlobalAveragePool"
            del node.input[1:]
            del node.attribute[:]
    drop_unread(graph)


def _is_global_pool(
    node: onnx.NodeProto, ranks: dict[str, int], constants: dict[str, onnx.TensorProto]
) -> bool:
    """Whether it is the mean over H and W of [N, C, H, W], both kept as 1."""
    from onnx import numpy_helper

    kept = attributes(node).get("keepdims", 1)
    if len(node.input) != 2 or node.input[1] not in constants or not kept:
        return False
    axes = np.asarray(numpy_helper.to_array(constants[node.input[1]])).reshape(-1)
    return ranks.get(node.input[0]) == 4 and sorted(int(a) % 4 for a in axes) == [2, 3]


def _values(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    return [*graph.input, *graph.value_info, *graph.output]


OPSET = 18
FLOAT_TOLERANCE = 1e-4  # of the largest output: sums in another order, no more
ROUNDING = 16  # times the error of float32, where that is more
FIXED_BATCH = "export it with a fixed batch (calib8 export --static-batch) and go on from the file"
UNTOLD = "the outputs are the same whatever goes in, so this proves nothing; load --weights"


@phase("exporting")
def to_onnx(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    opset: int = OPSET,
    dynamic_batch: bool = True,
) -> onnx.ModelProto:
    """Export a float model, or a converted one (`deploy.fx.convert.convert`) with its Q/DQ.

    Args:
        model: in eval mode.
        inputs: example inputs; with dynamic_batch their first dimension is the batch.
        opset: of the default domain; 18 is what every target here reads.
        dynamic_batch: leave the batch open in the file, as "batch".

    Raises:
        ModelError: torch.export cannot follow the model, or not with an open batch.
        ExportError: the exporter did not keep the opset that was asked for.
    """
    refuse_prepared(model)
    # copies: the same tensor twice would be taken for one input
    inputs = [_at_least_two(x) if dynamic_batch else x.clone() for x in inputs]
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} for _ in inputs) if dynamic_batch else None
    exportable = _exportable(model)
    with quiet():
        try:
            program = torch.onnx.export(
                exportable,
                tuple(inputs),
                None,
                dynamo=True,
                verbose=False,
                opset_version=opset,
                dynamic_shapes=shapes,
            )
        except Exception as error:  # torch.export and the exporter share no error class
            raise ModelError(explained(error, dynamic_batch)) from error
    assert program is not None
    written = program.model_proto
    name_outputs(written, program.exported_program)
    _check_opset(written, opset)
    if dynamic_batch:
        _check_batch_is_open(written)
    return plain(written)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an ONNX model's outputs compare with those of the torch model it came from.

    Attributes:
        samples: how many were compared.
        max_difference: largest absolute difference of any output value.
        max_output: largest absolute value of the torch model's outputs.
        argmax: share of the last output's rows, along dimension 1, whose largest value is at the
            same place, 0 to 1.
        codes: max_difference in steps of the last quantized tensor; None for a float model, and
            where there are several outputs.
        batches: the sizes of batches that were run.
        telling: whether an output changes with the input, without which agreement proves nothing.
    """

    samples: int
    max_difference: float
    max_output: float
    argmax: float
    codes: float | None
    batches: tuple[int, ...] = ()
    telling: bool = True
    rows: int = 0  # of which argmax is told; 0 or as many as samples where each has one

    @property
    def untold(self) -> str | None:
        """A sentence where agreement proves nothing."""
        return None if self.telling else UNTOLD

    def __str__(self) -> str:
        codes = f", {self.codes:.2f} steps of the last scale" if self.codes is not None else ""
        sizes = f" in batches of {' and '.join(map(str, self.batches))}" if self.batches else ""
        silent = f"; {self.untold}" if self.untold else ""
        several = self.rows not in (0, self.samples)
        of = f" of {self.rows} positions in the last output" if several else ""
        return (
            f"onnxruntime against torch on {self.samples} samples{sizes}: same arg-max"
            f" {100 * self.argmax:.2f}%{of}, largest difference {self.max_difference:.3g}{codes}"
            f" (largest output {self.max_output:.3g}){silent}"
        )


def compare(
    exported: onnx.ModelProto,
    model: nn.Module,
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    optimized: bool = True,
    kernels: bool = True,
) -> Agreement:
    """Run batches through onnxruntime and through torch.

    Args:
        exported: what `to_onnx` gave for `model`.
        model: the float or converted model.
        batches: each the inputs of one run, batch first.
        optimized: let onnxruntime fuse operators, as in use; without, each runs as ONNX defines it.
        kernels: let it fuse into int8 kernels; not of a model for another runtime, whose weights
            they may saturate.
    """
    session = OrtSession.open(exported, threads=1, optimize=optimized, int8_kernels=kernels)
    names = [spec.name for spec in session.inputs]
    worst = largest = 0.0
    same = samples = rows = outputs = 0
    varied: dict[bool, bool] = {}  # by whether there is another sample to compare with
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
            worst = max(worst, difference(left, right))
        largest = max(largest, largest_of(ours))
        several = len(batch[0]) > 1 if batch[0].ndim else False
        varied[several] = varied.get(several, False) or any(map(_varies, ours))
        hits = _same_argmax(ours[-1].cpu().numpy(), theirs[-1].numpy())
        same, rows, outputs = same + int(hits.sum()), rows + len(hits), len(ours)
        samples += len(batch[0]) if batch[0].ndim else 1
    step = _last_scale(model)
    codes = worst / step if step and outputs == 1 else None
    sizes = tuple(sorted({len(batch[0]) for batch in batches if batch[0].ndim}))
    telling = varied.get(True, varied.get(False, False))
    return Agreement(samples, worst, largest, same / max(rows, 1), codes, sizes, telling, rows)


def check_float(
    exported: onnx.ModelProto, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> Agreement:
    """`compare` of a float export, where its batch is open also for another batch.

    Outputs may differ by `FLOAT_TOLERANCE` of the largest, or by some times what float32 itself
    errs in this model, which a run in float64 tells.

    Raises:
        ExportError: they differ by more, or the file does not run for another batch.
    """
    batches = [tuple(inputs)]
    if _batch_is_open(exported):
        batches.append(other_batch(inputs))
    try:
        found = compare(exported, model, batches)
    except BackendError as error:
        sizes = " and ".join(str(len(batch[0])) for batch in batches)
        raise ExportError(
            f"an exported model must run in onnxruntime for batches of {sizes}, got:"
            f" {first_line(error)}; {FIXED_BATCH}"
        ) from error
    allowed = FLOAT_TOLERANCE * found.max_output
    if not found.max_difference <= allowed:
        allowed = max(allowed, ROUNDING * max(_rounding(model, batch) for batch in batches))
    if not found.max_difference <= allowed:
        raise ExportError(
            f"an exported model must compute what torch computes, got: {found}; report it with the"
            " model, or rewrite what computes otherwise there"
        )
    return found


def other_batch(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Inputs with other samples more, of another number than the two that torch.export is shown."""
    more = 2 if len(inputs[0]) == 1 else 1
    return tuple(torch.cat([x, x[:1].flip(-1).expand(more, *x.shape[1:])]) for x in inputs)


def _rounding(model: nn.Module, inputs: Sequence[torch.Tensor]) -> float:
    """By how much the outputs of float32 differ from those of float64; 0 where it has none."""
    doubled = [x.double() if x.is_floating_point() else x for x in inputs]
    try:
        with torch.no_grad():
            exact = tensors_of(copy.deepcopy(model).double()(*doubled))
            ours = tensors_of(model(*inputs))
    except Exception:  # a forward that names its dtype; what it raises is anything
        return 0.0
    return max((difference(a, b) for a, b in zip(ours, exact, strict=True)), default=0.0)


def _varies(output: torch.Tensor) -> bool:
    """Whether an output differs from sample to sample; of one sample, from value to value."""
    if output.ndim and len(output) > 1:
        return bool((output != output[:1]).any())
    return bool((output != output.reshape(-1)[:1]).any())


def refuse_prepared(model: nn.Module) -> None:
    """Raise `ExportError` for a model that was prepared and not converted."""
    if any(isinstance(module, FakeQuant) for module in model.modules()):
        raise ExportError("a prepared model must be converted before export: convert(prepared)")


def _at_least_two(x: torch.Tensor) -> torch.Tensor:
    """A batch of one would be taken for a constant 1."""
    return x.clone() if x.shape[0] > 1 else torch.cat([x, x])


def _exportable(model: nn.Module) -> nn.Module:
    """A copy of `model` whose quantizers write ONNX operators in place of computing."""
    exportable = copy.deepcopy(model).eval()
    for module in exportable.modules():
        if isinstance(module, FixedQuant | DynamicQuant | IntLayer):
            module.start_export()
    return exportable


def explained(error: Exception, dynamic_batch: bool) -> str:
    """One sentence on why torch.export or the exporter failed, with the user's line."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    where = line_of(root) or line_of(error)
    on_data = "DataDependent" in type(root).__name__
    way = f"{FIXED_BATCH}, or " if dynamic_batch and not on_data else ""
    return (
        f"torch.export must be able to follow the model, got {type(root).__name__}: {_said(root)}"
        + (f" at {where}" if where else "")
        + f"; {way}rewrite what depends on data"
    )


def _said(error: BaseException) -> str:
    """The first line of torch's message that says something, and the next where it is a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else first_line(error)
    return said[:300]


def _batch_is_open(model: onnx.ModelProto) -> bool:
    shapes = [value.type.tensor_type.shape.dim for value in model.graph.input]
    return all(dims and dims[0].dim_param for dims in shapes)


def _check_batch_is_open(model: onnx.ModelProto) -> None:
    """Torch's exporter keeps a batch that the model fixes, and says nothing."""
    for value in model.graph.input:
        first = value.type.tensor_type.shape.dim[0]
        if not first.dim_param:
            raise ModelError(
                f"the batch must stay open, and the model fixes it to {first.dim_value} in"
                f" {value.name!r}; {FIXED_BATCH}, or take the batch from the input's shape"
            )


def _check_opset(model: onnx.ModelProto, opset: int) -> None:
    got = {entry.domain: entry.version for entry in model.opset_import}.get("", 0)
    if got != opset:
        raise ExportError(
            f"this model cannot be written at opset {opset}: torch's exporter kept {got};"
            f" ask for {got}, or use operators that opset {opset} has"
        )


def _same_argmax(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_]:
    """[N, C, ...] -> one bool for each sample, or for each position of a dense output."""
    if left.ndim < 2:
        return np.asarray(left.argmax() == right.argmax()).reshape(1)
    return np.asarray(left.argmax(1) == right.argmax(1)).reshape(-1)


def _last_scale(model: nn.Module) -> float:
    quants = [module for module in model.modules() if isinstance(module, FixedQuant)]
    return float(quants[-1].scale) if quants else 0.0
