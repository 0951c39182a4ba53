"""The float model that engines are compared with: the user's file, if ONNX Runtime can run it.

`check_cleaned_model` makes sure that the cleaned model, which is observed and built from, computes
what that file does.
"""

import math
from collections.abc import Iterator

import numpy as np
from onnx import ModelProto

from deploy.calibration.observation import CalibrationSubject
from deploy.calibration.reference_outputs import EvaluationSet
from deploy.errors import BackendError, ModelError
from deploy.frontends import LoadedModel
from deploy.frontends.base import read_model_file
from deploy.frontends.onnx_reader import parse_model
from deploy.graph.edit import drop_initializer_inputs, name_nodes
from deploy.graph.index import Graph, all_nodes
from deploy.graph.placement import MOVES
from deploy.metrics.output_errors import sqnr_db
from deploy.runtimes.ort import OrtSession

_MIN_CLEANED_DB = 40.0  # SQNR; a cleaned model below it computes something else than the file
_MIN_WIDENED_DB = 25.0  # the same of a float16 file, whose cleaned model computes in float32
# operators whose float32 results, up to 1, are rounded by about this much, also near 0
_BOUNDED_OPERATORS = frozenset(("Sigmoid", "Softmax", "HardSigmoid", "Tanh"))
_BOUNDED_ROUNDING = 2e-6
_PICKING_OPERATORS = frozenset(
    ("ArgMax", "ArgMin", "Ceil", "Floor", "NonMaxSuppression", "NonZero", "Round", "TopK", "Unique")
)


def read_float_model(loaded: LoadedModel) -> bytes:
    """Return the bytes of the user's file, so that int8 is compared with what the user runs today.

    Two things in it are changed. Nodes that share a name are renamed, since ONNX Runtime requires
    it. Weights are removed from the list of inputs: ONNX Runtime does not optimize weights that may
    be fed, so that int8 would look better than it is.

    Some files are replaced by the float32 model that was loaded from them: a float16 file (the CPU
    casts around each node), a file of an opset that ONNX Runtime does not run, a file with unknown
    operators (the part before them), a Q/DQ model, a model whose weights are stored as integers,
    and one in training mode.

    Raises:
        ModelError: the file changed since it was loaded.
    """
    if loaded.was_float16 or loaded.was_newer or _is_changed_on_purpose(loaded):
        return bytes(loaded.model.SerializeToString())
    return _read_user_file(loaded)


def _is_changed_on_purpose(loaded: LoadedModel) -> bool:
    """Whether loading had to change what is computed, as by removing Q/DQ pairs."""
    was_quantized = loaded.qdq is not None or loaded.had_integer_weights
    return was_quantized or loaded.was_training or loaded.cut_off is not None


def _read_user_file(loaded: LoadedModel) -> bytes:
    """Return the user's file in a form that ONNX Runtime loads and optimizes."""
    data = read_model_file(loaded)
    if not loaded.has_shared_names and not loaded.fed_weights:
        return data

    model = parse_model(data, str(loaded.source))
    if loaded.has_shared_names:
        name_nodes(model.graph)
    if loaded.fed_weights:
        drop_initializer_inputs(model.graph)
    return bytes(model.SerializeToString())


def check_cleaned_model(subject: CalibrationSubject, evaluation_set: EvaluationSet) -> str:
    """Compare the cleaned model with the user's on one sample.

    Cleaning folds constants and rewrites old operators, which must not change what is computed.

    Returns:
        "" if they are alike. "" also if they cannot be compared: the model was changed on purpose,
        or ONNX Runtime cannot run the user's. A warning if they differ and a node picks among
        values, such as a TopK: rounding alone may change what it picks.

    Raises:
        ModelError: they differ, and no node picks among values.
    """
    loaded = subject.loaded
    user_model = subject.user_model
    if _is_changed_on_purpose(loaded):
        return ""
    try:
        # a model that was given in memory, or a file
        model = user_model if isinstance(user_model, ModelProto) else _read_user_file(loaded)
        session = OrtSession.open(model, threads=1, spin=False)
        similarities = list(_compare_outputs(session, evaluation_set, Graph(loaded.model)))
    except BackendError:  # ONNX Runtime runs only the cleaned model
        return ""
    worst_db, output = min(similarities, default=(math.inf, ""))
    min_db = _MIN_WIDENED_DB if loaded.was_float16 else _MIN_CLEANED_DB
    if worst_db >= min_db:
        return ""

    message = (
        f"the model must compute what the given one does after {loaded.name} was cleaned, got"
        f" {worst_db:.1f} dB in {output}; what was done: {' '.join(loaded.notes)}"
    )
    if any(node.op_type in _PICKING_OPERATORS for node in all_nodes(loaded.model.graph)):
        return message
    raise ModelError(f"{message} Export the model again, with opset 13 or newer")


def _compare_outputs(
    session: OrtSession, evaluation_set: EvaluationSet, graph: Graph
) -> Iterator[tuple[float, str]]:
    """Yield (SQNR in dB, name) of each float output of the cleaned model against the user's.

    Only the first sample is compared, and only outputs that both models give in the same shape.

    Args:
        session: runs the user's model, before constants were folded and old operators rewritten.
        evaluation_set: samples with the outputs of the cleaned model.
        graph: graph of the cleaned model.
    """
    for sample, cleaned_outputs in evaluation_set.samples_with_outputs(1):
        inputs = {spec.name: sample[spec.name].astype(spec.dtype) for spec in session.inputs}
        for name, value in session.run(inputs).items():
            cleaned_value = cleaned_outputs.get(name)
            if value.dtype.kind != "f" or cleaned_value is None:
                continue
            if cleaned_value.shape != value.shape:  # an NMS may pick another number of boxes
                continue
            signal = np.nan_to_num(value.astype(np.float64))
            noise = np.nan_to_num(cleaned_value.astype(np.float64)) - signal
            # results of a Sigmoid have the same absolute error near 0 as near 1; differences that
            # are not larger are not counted. Nodes that only move values may follow the Sigmoid
            computing_node = graph.trace_back(name, MOVES)
            if computing_node is not None and computing_node.op_type in _BOUNDED_OPERATORS:
                noise[np.abs(noise) <= _BOUNDED_ROUNDING] = 0
            signal_power = np.vdot(signal, signal)
            noise_power = np.vdot(noise, noise)
            yield sqnr_db(float(signal_power), float(noise_power)), name
