"""Load ONNX files: read, check, lift to opset 13, and clean without changing the outputs."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import inliner

from deploy.errors import (
    BackendError,
    Calib8Error,
    ExportError,
    ModelError,
    counted,
    first_line,
)
from deploy.feed.batch_axis import (
    has_open_first,
    mark_batch_axes,
    may_lack_batch,
    without_batch,
)
from deploy.feed.bench_inputs import random_feeds
from deploy.frontends import checks
from deploy.frontends.affine import NORM, fold_affine
from deploy.frontends.base import LoadedModel, model_digest
from deploy.frontends.fold import fold_constants, remove_identity, unfold_large
from deploy.frontends.lift import (
    TRAINING_NOTES,
    complete_axes,
    drop_casts,
    end_training_mode,
    lift_opset,
    restore_float_weights,
    widen_to_float32,
)
from deploy.frontends.metadata import (
    read_class_names,
    read_declaration,
    read_metadata_preprocess,
)
from deploy.frontends.onnx_reader import FileDigests, read_model_and_digests, refuse_external
from deploy.frontends.plugins import CutOffNodes, cut_unknown_nodes
from deploy.frontends.shapes import (
    clear_negative_sizes,
    infer_outputs,
    infer_shapes,
    make_spec,
)
from deploy.graph.edit import (
    copy_message,
    drop_dead,
    drop_initializer_inputs,
    drop_unused_domains,
    empty_default_domain,
    free_added_names,
    name_nodes,
    sort_nodes,
)
from deploy.graph.index import (
    ONNX_DOMAINS,
    all_nodes,
    has_subgraph,
    names_of,
    opset_of,
)
from deploy.graph.lowering import OLDEST, lower_opset
from deploy.runtimes.ort import OrtSession, runs_pairs, runtime_version
from deploy.tensors import Array, TensorSpec
from deploy.terminal import visible

_ROUNDS = 8  # folding a Shape creates new constants; real models need two rounds
_MAX_NODES = 50_000  # after inlining; a kilobyte of functions can stand for billions
_OLDEST_IR = 7  # the IR of opset 13; IR 3 still lists weights as inputs
_FIRST_IR_OF_DEFAULTS = 4  # since this IR a weight that is an input too is only its default value
_ANY_SIZE = 64  # of open dimensions whose size does not matter
_MAX_ROUNDING = 1e-4  # difference between two runs of one row in batches, relative to the largest
_MISSING_KERNEL = re.compile(r"implementation for (\w+)\(")  # as ONNX Runtime says it
_RECURRENT = ("LSTM", "GRU", "RNN")


def load_onnx(source: str | Path | onnx.ModelProto, fold_batchnorm: bool) -> LoadedModel:
    """Load and clean an ONNX file, or a copy of a model in memory.

    `fold_batchnorm`: whether to fold BatchNormalization, and Mul and Add with constants per
    channel, into the layers before them.

    Raises:
        ModelError: says what is wrong with the model and what to do.
    """
    try:
        path, model, file_digests = read_source(source)
        checks.check_fields(model)
        # of the user's model, before anything changes; this also refuses damaged weights
        digest = model_digest(model)
        metadata_preprocess = read_metadata_preprocess(model, path)
        classes = read_class_names(model)
        integer_weights_note = restore_float_weights(model)
        checks.check_opset(model)
        checks.check_float(model)
        shared_name_count = _count_shared_names(model.graph)
        # weights that are inputs too, which `_clean` takes from the inputs
        fed_weight_count = _count_fed_weights(model)
        cleaned = _clean(model, fold_batchnorm)
        # the names of tensors that calib8 adds later must be free
        renamed_tensors = free_added_names(cleaned.model.graph)
        checks.check_valid(cleaned.model)
        checks.check_values(cleaned.model)
        model, kernel_note = _decompose_without_kernel(cleaned.model)
    except ModelError as error:  # escape control characters, which names in a broken model may hold
        raise type(error)(visible(str(error))) from error.__cause__

    notes = [
        _note("Renamed {} whose name another node has.", shared_name_count, "node"),
        integer_weights_note,
        *cleaned.notes,
        kernel_note,
    ]
    if renamed_tensors:
        notes.append(f"Renamed {', '.join(renamed_tensors)}: calib8 adds tensors of such names.")
    inputs = tuple(map(make_spec, model.graph.input))
    outputs = tuple(map(make_spec, model.graph.output))
    loaded = LoadedModel(
        model=model,
        source=path,
        name=path.stem if path else model.graph.name or "model",
        digest=digest,
        notes=tuple(filter(None, notes)),
        inputs=inputs,
        outputs=outputs,
        was_float16=cleaned.was_float16,
        has_shared_names=shared_name_count > 0,
        fed_weights=fed_weight_count,
        file_digests=file_digests,
        cut_off=cleaned.cut_off,
        metadata_preprocess=metadata_preprocess,
        classes=classes,
        declaration=read_declaration(model, path),
        had_integer_weights=integer_weights_note != "",
        was_training=cleaned.was_training,
        training_notes=tuple(filter(None, cleaned.training_notes)),
        # ONNX Runtime lacks the pairs of this opset (`_clean` lowered it), or an operator's kernel
        was_newer=cleaned.was_newer or kernel_note != "",
    )
    # mark whether the first dimension of an input is a batch of samples
    return loaded.with_inputs(_mark_inputs(model, inputs, outputs))


def _mark_inputs(
    model: onnx.ModelProto, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """Return the inputs, each marked with what its first dimension is: samples, or data of one.

    If shapes alone leave it open, the model is run.
    """
    if may_lack_batch(inputs, outputs) and _mixes_rows(model, inputs):
        return without_batch(inputs)
    return mark_batch_axes(inputs, outputs)


def _mixes_rows(model: onnx.ModelProto, inputs: Sequence[TensorSpec]) -> bool:
    """Whether all rows of an input belong to one sample, and are not a batch of samples.

    The model is run on random values. If the rows belong to one sample, a change of the second row
    changes the outputs of the first row too. In a batch it does not; and a model with hard-coded
    sizes refuses a second row, or ignores it.
    """
    try:
        two_rows, first_row, changed_second_row = _row_feeds(inputs)
        session = OrtSession.open(model, threads=1)
        first_row_outputs = session.run(first_row)
        outputs = session.run(two_rows)
        repeated_outputs = session.run(two_rows)
        changed_outputs = session.run(changed_second_row)
    except Calib8Error:  # the model refuses two rows, or random values
        return False

    has_changed_output = False
    for name, values in outputs.items():
        if values.dtype.kind not in "biuf":  # no numbers
            continue
        if not np.array_equal(values, repeated_outputs[name]):
            return False  # the model draws random numbers
        changed_values = changed_outputs[name]
        if np.array_equal(values, changed_values):
            continue
        has_changed_output = True
        # alone, the first row has an output as large as its part of the output for two rows
        first_row_shape = first_row_outputs[name].shape
        if not _first_row_differs(first_row_shape, values, changed_values):
            return False  # the second row changes its own part only, as in a batch
    return has_changed_output


def _row_feeds(inputs: Sequence[TensorSpec]) -> tuple[dict[str, Array], ...]:
    """Return random feeds: (two rows, the first of them alone, the first with another second row).

    The rows are along the first dimension of each input in which it is open.
    """
    shapes = {}
    open_names = []  # of these inputs
    for spec in inputs:
        sizes = [size if isinstance(size, int) else _ANY_SIZE for size in spec.shape]
        if has_open_first(spec):
            sizes[0] = 2
            open_names.append(spec.name)
        shapes[spec.name] = tuple(sizes)

    two_rows, other_rows = random_feeds(inputs, shapes=shapes, count=2)
    first_row = dict(two_rows)
    changed_second_row = dict(two_rows)
    for name in open_names:
        first_row[name] = two_rows[name][:1]
        changed_second_row[name] = np.concatenate([two_rows[name][:1], other_rows[name][1:]])
    return two_rows, first_row, changed_second_row


def _first_row_differs(first_row_shape: Sequence[int], values: Array, changed: Array) -> bool:
    """Whether the part of an output that belongs to the first row depends on the second row.

    Args:
        first_row_shape: shape of the output for the first row alone, and so of that part.
        values: output for two rows.
        changed: output for the same first row, and another second one.
    """
    if values.shape != changed.shape or values.ndim != len(first_row_shape):
        return False
    part = tuple(map(slice, first_row_shape))
    first_row = values[part].astype(np.float64)
    changed_row = changed[part].astype(np.float64)
    difference = np.abs(first_row - changed_row).max(initial=0)
    return bool(difference > _MAX_ROUNDING * np.abs(first_row).max(initial=0))


def clean_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Clean a float model in memory like `load_onnx`, without running it; tensors keep names.

    Raises:
        ModelError: the model is not valid.
    """
    return _clean(copy_message(model), True).model


def _count_fed_weights(model: onnx.ModelProto) -> int:
    """Count the weights that are also inputs and may be fed; none in IR 3, although all are."""
    if model.ir_version < _FIRST_IR_OF_DEFAULTS:
        return 0
    return len(names_of(model.graph.initializer) & names_of(model.graph.input))


def _count_shared_names(graph: onnx.GraphProto) -> int:
    """Count the nodes whose name an earlier node has."""
    names = [node.name for node in graph.node if node.name]
    return len(names) - len(set(names))


def read_source(
    source: str | Path | onnx.ModelProto,
) -> tuple[Path | None, onnx.ModelProto, FileDigests | None]:
    """Read a model's file, or copy a model in memory.

    Returns:
        (path, model, digests of the bytes that were read); path and digests are None for a model
        in memory.
    """
    path = file_digests = None
    if isinstance(source, str | Path):
        path = Path(source)
        model, file_digests = read_model_and_digests(path)
    elif isinstance(source, onnx.ModelProto):
        refuse_external(source)
        model = copy_message(source)
    else:
        raise ModelError(
            "a model must be a path or an onnx.ModelProto, got an object of class"
            f" {type(source).__name__}; calib8.torch.export(module, [example_input]) makes one of a"
            " PyTorch module, and calib8.build(module, loader) exports it by itself"
        )
    empty_default_domain(model)
    return path, model, file_digests


@dataclass(frozen=True, slots=True, kw_only=True)
class _CleanedModel:
    """A cleaned model, and what was found in it; see `LoadedModel`.

    A note in `notes` or `training_notes` is "" if there is nothing to say.
    """

    model: onnx.ModelProto
    notes: list[str]
    was_float16: bool
    was_training: bool
    training_notes: list[str]
    was_newer: bool
    cut_off: CutOffNodes | None


def _clean(model: onnx.ModelProto, fold_batchnorm: bool) -> _CleanedModel:
    """Return the model in float32, opset 13 or newer, for inference; `model` may change."""
    model.ir_version = max(model.ir_version, _OLDEST_IR)
    removed_count = drop_initializer_inputs(model.graph)  # IR 3 lists weights as inputs
    notes = [  # "" for a step that changes nothing
        checks.check_optimized(model),  # raises, or returns a note
        _note(
            "Removed {} from the list of inputs; they are constants now.", removed_count, "weight"
        ),
    ]
    clear_negative_sizes(model.graph)

    # one operator set, no functions
    if model.functions:
        model, inlining_note = inline_functions(model)
        notes.append(inlining_note)
        checks.check_float(model)  # again: a function may hold quantized nodes
    drop_unused_domains(model)
    checks.check_ends(model)

    # what ONNX Runtime does not know, and everything downstream of it, is not calibrated
    cut_off = cut_unknown_nodes(model)
    if cut_off is not None:
        model = infer_shapes(model)  # the types of its new outputs

    # from here on: float32, sorted nodes with names, inferred types, opset 13 or newer
    float16_note = widen_to_float32(model)
    notes.append(float16_note)
    if sort_nodes(model.graph):
        notes.append("Put the nodes into the order in which they run.")
    name_nodes(model.graph)
    model = infer_outputs(model)
    checks.check_valid(model)
    if float16_note:  # casts between float16 and float32 are casts to the same type now
        drop_casts(model)
    opset_note = lift_opset(model, cut_off)
    model, lowering_note = lower_to_runtime(model)
    notes += [opset_note, lowering_note]

    # fold constants first, since a norm is folded only if its parameters are constant
    model, folding_notes = _fold(model)
    notes += folding_notes
    norm_counts = end_training_mode(model)  # what became of norms in training mode -> number
    training_notes = [
        _note(sentence, norm_counts[outcome], f"{NORM} node")
        for outcome, sentence in TRAINING_NOTES.items()
    ]
    if fold_batchnorm:
        notes += _fold_norms(model.graph)
    name_nodes(model.graph)
    model = infer_shapes(model)
    notes += _float_notes(model)
    return _CleanedModel(
        model=model,
        notes=notes,
        was_float16=float16_note != "",
        was_training=norm_counts["inference"] > 0,
        training_notes=training_notes,
        was_newer=lowering_note != "",
        cut_off=cut_off,
    )


def lower_to_runtime(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Return a model in an opset that ONNX Runtime can run in int8, and a note, "" if unchanged.

    ONNX Runtime has no kernels for the QuantizeLinear and DequantizeLinear ("pairs") of the newest
    opsets. `OLDEST` is the oldest opset that a model can be lowered to.

    Args:
        model: opset 13 or newer.

    Raises:
        ModelError: a node has no form in that opset.
    """
    opset = opset_of(model)
    runnable_opset = opset
    while runnable_opset > OLDEST and not runs_pairs(runnable_opset):
        runnable_opset -= 1
    if runnable_opset == opset:
        return model, ""
    try:
        lowered = lower_opset(model, opset=runnable_opset).model
    except ExportError as error:
        raise ModelError(str(error)) from error
    note = f"Written in opset {runnable_opset}, got {opset}, whose pairs {runtime_version()} lacks."
    return infer_shapes(lowered), note


def _decompose_without_kernel(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Return a cleaned model that ONNX Runtime loads, and a note, "" if the model is unchanged.

    An operator without a kernel is decomposed: written as the operators by which ONNX defines it.
    ONNX Runtime 1.32 has no kernel of Swish, and decomposes it itself in opset 24 alone.

    Raises:
        ModelError: an operator without a kernel cannot be written with others.
    """
    rewritten: Counter[str] = Counter()
    while (load_error := _find_load_error(model)) is not None:
        missing_kernel = _MISSING_KERNEL.search(str(load_error.__cause__))
        op_type = missing_kernel[1] if missing_kernel else ""  # "" for another error
        if not op_type or op_type in rewritten:
            raise _refusal_of(load_error) from load_error
        try:  # `lower_opset` decomposes operators, here without a change of the opset
            lowering = lower_opset(model, opset=opset_of(model), to_decompose={op_type})
        except ExportError:
            raise _refusal_of(load_error) from load_error
        # with a count for `op_type` in any case, so that the loop never decomposes it twice
        rewritten.update({op_type: 0, **lowering.rewritten})
        model, _ = _fold(infer_shapes(lowering.model))  # ONNX's definitions add Constants and Casts
    if not rewritten:
        return model, ""
    operators = checks.list_counts(rewritten)
    return model, f"Wrote {operators} with other operators: {runtime_version()} has no kernel."


def _refusal_of(load_error: BackendError) -> ModelError:
    """Return the error for the user, from that with which ONNX Runtime refuses to load a model."""
    # onnxruntime's message without its error code and file names
    text = first_line(load_error.__cause__ or load_error).removeprefix("[ONNXRuntimeError] : ")
    reason = text.split(" : ", 2)[-1]
    return ModelError(
        f"onnxruntime must load the model, got: {reason}; export it again "
        "with operators that onnxruntime has on the CPU"
    )


def _find_load_error(model: onnx.ModelProto) -> BackendError | None:
    """Return the error with which ONNX Runtime refuses to load a model, or None."""
    try:
        OrtSession.open(model, threads=1, optimize=False)
    except BackendError as error:
        return error
    return None


def inline_functions(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Return the model with its functions inlined, and a note.

    Raises:
        ModelError: the functions are not valid.
    """
    functions = {(function.domain, function.name): function for function in model.functions}
    try:
        node_count = _count_inlined(all_nodes(model.graph), functions, counts={})
    except RecursionError:  # functions nested so deeply are refused like too many nodes
        node_count = _MAX_NODES + 1
    if node_count > _MAX_NODES:
        raise ModelError(
            f"a model must have at most {_MAX_NODES:,} nodes with its functions inlined, got"
            f" {node_count:.3g} or more; export it without functions that call each other many"
            " times"
        )

    # onnx's inliner leaves out the default attributes of functions: write them into the calls
    for body in (model.graph, *model.functions):
        for node in list(all_nodes(body)):
            function = functions.get((node.domain, node.op_type))
            if function is not None:
                _write_default_attributes(node, function)
    with checks.refuse_errors("the model's functions must be valid ONNX"):
        inlined = inliner.inline_local_functions(model)
    return inlined, _note("Inlined {}.", len(model.functions), "function")


def _write_default_attributes(call: onnx.NodeProto, function: onnx.FunctionProto) -> None:
    """Give a call of a function the attributes that it leaves out."""
    names = names_of(call.attribute)
    for default in function.attribute_proto:
        if default.name not in names:
            call.attribute.add().CopyFrom(default)


def _count_inlined(
    nodes: Iterable[onnx.NodeProto],
    functions: Mapping[tuple[str, str], onnx.FunctionProto],
    *,
    counts: dict[tuple[str, str], int],
) -> int:
    """Return the number of nodes after inlining; a function that calls itself counts as none.

    Args:
        nodes: of the graph or of a function.
        functions: (domain, name) -> function.
        counts: (domain, name) -> number of a function's nodes, inlined; filled here, {} at first.
    """
    count = 0
    for node in nodes:
        key = (node.domain, node.op_type)
        if key not in functions:
            count += 1
            continue
        if key not in counts:
            counts[key] = 0  # while its nodes are counted: a call of itself adds none
            counts[key] = _count_inlined(all_nodes(functions[key]), functions, counts=counts)
        count += counts[key]
    return count


def _fold(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Return the model with constants folded and nodes that change nothing removed, and notes.

    It takes several rounds, since each change makes others possible: without a Cast, the node
    behind it reads a constant, and `complete_axes` rewrites a Pad once its axes are constant.
    """
    identity_count = cast_count = 0
    completed_counts: Counter[str] = Counter()  # operator -> nodes rewritten by `complete_axes`
    folded_by_output: dict[str, onnx.NodeProto] = {}  # tensor -> the folded node that made it
    for _ in range(_ROUNDS):
        # without the counts of `complete_axes`: it adds constants, which count as folded
        old_counts = (identity_count, len(folded_by_output), cast_count)
        completed_counts += complete_axes(model)
        model = infer_shapes(model)
        identity_count += remove_identity(model.graph)
        folded_by_output |= fold_constants(model)
        cast_count += drop_casts(model)
        if (identity_count, len(folded_by_output), cast_count) == old_counts:
            break
    folded_count = len(set(map(id, folded_by_output.values())))  # a node may have several outputs
    unfolded_count = unfold_large(model.graph, folded_by_output)
    dead_count = drop_dead(model.graph)
    completed_note = f"Wrote {checks.list_counts(completed_counts)} of some axes over all axes."
    return model, [
        completed_note if completed_counts else "",
        _note("Folded {}.", folded_count - unfolded_count, "constant node"),
        _note("Kept {}, whose stored results would be larger.", unfolded_count, "constant node"),
        _note("Removed {}.", identity_count, "Identity or Dropout node"),
        _note("Removed {} to the type that the tensor has.", cast_count, "cast"),
        _note("Removed {} that no output needs.", dead_count, "node"),
    ]


def _fold_norms(graph: onnx.GraphProto) -> list[str]:
    """Fold norms and other affine nodes into the layers before them, in place; return notes."""
    fold_counts = fold_affine(graph)
    drop_dead(graph)
    notes = [
        _note("Folded {} into the layer before.", count, f"{op_type} node")
        for op_type, count in sorted(fold_counts.items())
    ]
    norm_count = sum(node.op_type == NORM for node in graph.node)
    unfolded_note = (
        "Left {} in float: no Conv, ConvTranspose or Gemm before that has constant weights and no"
        " other reader."
    )
    return [*notes, _note(unfolded_note, norm_count, f"{NORM} node")]


def _float_notes(model: onnx.ModelProto) -> list[str]:
    """Return notes on nodes that stay float because of their kind, whatever surrounds them."""
    nodes = model.graph.node
    types_by_reason = {
        "with all nodes inside": [node.op_type for node in nodes if has_subgraph(node)],
        "recurrent": [node.op_type for node in nodes if node.op_type in _RECURRENT],
        "not of the standard operator set": [
            f"{node.domain}.{node.op_type}" for node in nodes if node.domain not in ONNX_DOMAINS
        ],
    }
    return [
        f"Left in float: {checks.list_counts(Counter(op_types))} ({reason})."
        for reason, op_types in types_by_reason.items()
        if op_types
    ]


def _note(sentence: str, count: int, noun: str) -> str:
    """Return a sentence with "1 node" or "2 nodes" in place of {}; "" for a count of 0."""
    return sentence.format(counted(count, noun)) if count else ""
