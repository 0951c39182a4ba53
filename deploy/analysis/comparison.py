"""Compares two models in ONNX Runtime, tensor by tensor over a feed (`compare`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto, NodeProto

from deploy.calibration.reference_outputs import warn_of_random_outputs
from deploy.errors import ConfigError, counted
from deploy.feed.batch_axis import batch_inputs, mark_batch_axes
from deploy.feed.feed import Dataset, FeedSource, preprocessing_notes, to_dataset
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.samples import Feed
from deploy.feed.sampling import Limit
from deploy.feed.states import Recurrence, find_states
from deploy.frontends.metadata import read_metadata_preprocess
from deploy.frontends.onnx_file import read_source
from deploy.frontends.pairs import DQ, Q
from deploy.frontends.shapes import make_spec
from deploy.graph.edit import copy_with_outputs
from deploy.graph.index import Graph, module_scopes, runtime_inputs
from deploy.graph.tensor_pairs import pair_tensors_by_name
from deploy.metrics.accuracy import TensorComparison
from deploy.metrics.output_errors import OutputAccuracy
from deploy.pipeline.build_options import (
    ModelSource,
    check_arguments,
    find_user_model,
    open_torch_module,
)
from deploy.report.model import to_plain_object
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array, describe_inputs
from deploy.terminal import PrintedResult, join_visible, phase, with_progress

if TYPE_CHECKING:
    from torch import nn

MIN_SQNR_DB = 20.0
Tensors = Mapping[str, Array]  # name -> array


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Comparison of one tensor of both models.

    Attributes:
        tensor: its name.
        node: name of the first model's node that makes it; of its first output if it has none.
        operator: operator of that node.
        accuracy: accuracy of the second model's tensor against the first's.
        module: path of its PyTorch module; "" if the file does not say.
    """

    tensor: str
    node: str
    operator: str
    accuracy: OutputAccuracy
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelComparison(PrintedResult):
    """Result of `compare`; `repr` is its text for a screen.

    Attributes:
        first: "file in onnxruntime" of the first model.
        second: "file in onnxruntime" of the second model.
        samples: number of samples.
        min_sqnr_db: limit below which a tensor differs.
        layers: shared inner tensors, in the first model's order.
        outputs: shared outputs, in the first model's order.
        notes: how the images were read, and what could not be compared.
    """

    first: str
    second: str
    samples: int
    min_sqnr_db: float
    layers: tuple[TensorDifference, ...]
    outputs: tuple[TensorDifference, ...]
    notes: tuple[str, ...]

    @property
    def first_difference(self) -> TensorDifference | None:
        """The first tensor below the limit (NaN, Inf and another shape are); None without one."""
        for difference in (*self.layers, *self.outputs):
            if not difference.accuracy.sqnr_db >= self.min_sqnr_db:
                return difference
        return None

    def to_screen(self) -> str:
        """Return the first tensor that differs, and the tensors around it."""
        return join_visible(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield a head, a line for each inner tensor and output, the summary and the notes."""
        yield f"{self.first} against {self.second}, {counted(self.samples, 'sample')}"
        yield ""
        yield f"{'SQNR dB':>8}  {'cosine':>8}  tensor"
        yield from map(_screen_line, self.layers)
        yield "outputs"
        yield from map(_screen_line, self.outputs)
        yield ""
        yield self.summary
        yield from self.notes

    @property
    def summary(self) -> str:
        """The tensor from which the models differ, in one sentence."""
        difference = self.first_difference
        if difference is None and not self.outputs:
            return f"No tensor is below {self.min_sqnr_db:g} dB, but no output was compared."
        if difference is None:
            return f"The models agree: no tensor is below {self.min_sqnr_db:g} dB."
        return (
            f"The models differ from {difference.tensor!r} on, made by {difference.operator}"
            f" {difference.module or difference.node!r}: {difference.accuracy.sqnr_db:.1f} dB, the"
            f" first below {self.min_sqnr_db:g} dB."
        )

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types; infinite and NaN numbers become "inf" or "nan"."""
        difference = self.first_difference
        return to_plain_object(
            {
                "schema": "calib8-comparison/2",
                "first": self.first,
                "second": self.second,
                "samples": self.samples,
                "min_sqnr_db": self.min_sqnr_db,
                "parts_at": None if difference is None else difference.tensor,
                "layers": [_to_json(layer) for layer in self.layers],
                "outputs": [_to_json(output) for output in self.outputs],
                "notes": self.notes,
            }
        )


def _screen_line(difference: TensorDifference) -> str:
    """Return the SQNR and cosine of a tensor, its name, and the node or module that computes it."""
    accuracy = difference.accuracy
    return (
        f"{accuracy.sqnr_db:8.1f}  {accuracy.cosine_mean:8.5f}  {difference.tensor}"
        f"  ({difference.operator} {difference.module or difference.node})"
    )


def _to_json(difference: TensorDifference) -> dict[str, object]:
    """Return a tensor's row as plain JSON, the figures beside its name and node."""
    values = asdict(difference.accuracy)
    del values["name"], values["zeros"]
    return {
        "tensor": difference.tensor,
        "node": difference.node,
        "module": difference.module,
        "operator": difference.operator,
        **values,
    }


def _select_float_pairs(
    pairs: Mapping[str, str], first_tensors: Tensors, second_tensors: Tensors
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of float tensors that a run gave; it gives no sequences and no maps."""
    for first_name, second_name in pairs.items():
        if first_name not in first_tensors or second_name not in second_tensors:
            continue
        if np.issubdtype(first_tensors[first_name].dtype, np.floating):
            yield first_name, second_name


def _output_names(model: ModelProto) -> list[str]:
    """Return the names of a model's outputs, in their order."""
    return [value.name for value in model.graph.output]


@check_arguments
@with_progress
def compare(
    first: Path | str | ModelProto | nn.Module,
    second: Path | str | ModelProto | nn.Module,
    images: FeedSource | Dataset,
    *,
    min_sqnr_db: float = MIN_SQNR_DB,
    preprocess: PreprocessRequest = None,
    limit: Limit = None,
    skip_bad: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> ModelComparison:
    """Compare two ONNX models in ONNX Runtime, tensor by tensor, on the same samples.

    Args:
        first: the reference: a file, a model in memory, or a PyTorch module, which the first of
            the images exports.
        second: the other model.
        images: as for `build`.
        min_sqnr_db: SQNR below which two tensors differ.
        preprocess: preprocessing of images, or some of its options; the others come from the
            model's metadata, else from the shape of its input.
        limit: largest number of images, or a `Choice` of them.
        skip_bad: skip unreadable images.
        threads: threads of one inference; None uses every core.
        progress: report steps that take over two seconds on stderr.

    Raises:
        ConfigError: inputs that differ, or no shared tensor.
        ModelError: a file that is not an ONNX model.
        FeedError: images that do not fit.
        BackendError: ONNX Runtime refused a model.
    """
    dataset = to_dataset(images, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
    # exporting a PyTorch module takes the first item of the images; the dataset that comes back
    # yields it again
    first_model, dataset = _read_model(first, dataset)
    second_model, dataset = _read_model(second, dataset)
    _refuse_other_inputs(first_model, second_model)
    output_names = _output_names(first_model)
    pairs = _pair_tensors(first_model, second_model, output_names)  # first's name -> second's
    if not pairs:
        raise ConfigError(
            f"models that are compared must have tensors of the same names, got none in"
            f" {_describe(first)} and {_describe(second)}; compare a model with what was built from"
            " it"
        )

    feed = _open_feed(dataset, first_model, threads, user_model=first)
    accuracy_by_tensor = _compare_tensors(first_model, second_model, pairs, feed, threads)
    notes = [*preprocessing_notes(feed)]
    for sample in feed.first_samples(1):
        notes += warn_of_random_outputs(first_model, sample, "the first model")
        notes += warn_of_random_outputs(second_model, sample, "the second model")
    notes += _uncompared_notes(first_model, second_model, accuracy_by_tensor)
    node_by_output = Graph(first_model).producer
    layers: list[TensorDifference] = []
    outputs: list[TensorDifference] = []
    for name, accuracy in accuracy_by_tensor.items():
        differences = outputs if name in output_names else layers
        differences.append(_make_difference(name, node_by_output, accuracy))
    return ModelComparison(
        first=f"{_describe(first)} in onnxruntime",
        second=f"{_describe(second)} in onnxruntime",
        samples=feed.count,
        min_sqnr_db=min_sqnr_db,
        layers=tuple(layers),
        outputs=tuple(outputs),
        notes=tuple(notes),
    )


def _read_model(model: ModelSource | nn.Module, dataset: Dataset) -> tuple[ModelProto, Dataset]:
    """Return the model, and the dataset; a PyTorch module is exported by its first item."""
    opened_model, source = open_torch_module(model, dataset.source)
    user_model = find_user_model(opened_model)
    assert user_model is not None
    return read_source(user_model)[1], replace(dataset, source=source)


def _open_feed(
    dataset: Dataset, model: ModelProto, threads: int | None, *, user_model: object
) -> Feed:
    """Open the images or arrays as inputs of the first model, which both models are run on.

    Args:
        dataset: the images or arrays.
        model: the first model.
        threads: threads of one inference; None uses every core.
        user_model: this model as the user gave it. If it is a file, another one with the metadata
            of its preprocessing may lie beside it.
    """
    session = OrtSession.open(model, threads=threads)
    path = Path(user_model) if isinstance(user_model, str | Path) else None
    return dataset.open(
        mark_batch_axes(session.inputs, session.outputs),
        metadata_preprocess=read_metadata_preprocess(model, path),
        # a recurrent model takes states that its previous step made. Both models take those of the
        # first one, so that the errors of earlier steps do not add up
        recurrence=Recurrence(
            inputs=tuple(session.inputs),
            outputs=tuple(_output_names(model)),
            states=find_states(session.inputs, session.outputs),
            run=session.run,
        ),
    )


def _describe(model: object) -> str:
    """Return a model's path, the name of its graph, or its class."""
    if isinstance(model, ModelProto):
        return model.graph.name
    if isinstance(model, str | Path):
        return str(model)
    return type(model).__name__


def _pair_tensors(
    first_model: ModelProto, second_model: ModelProto, output_names: Sequence[str]
) -> dict[str, str]:
    """Return tensor of the first model -> tensor of the second one, the shared outputs last.

    An output is compared as the model returns it, also if a DequantizeLinear makes it.
    """
    pairs = pair_tensors_by_name(first_model, second_model)
    second_outputs = _output_names(second_model)
    for name in output_names:
        pairs.pop(name, None)
        if name in second_outputs:
            pairs[name] = name
    return pairs


def _uncompared_notes(
    first_model: ModelProto, second_model: ModelProto, compared_names: Collection[str]
) -> Iterator[str]:
    """Yield notes on the outputs that only one model has, and on those without float values."""
    first_outputs = _output_names(first_model)
    second_outputs = _output_names(second_model)
    for name in first_outputs:
        if name in second_outputs and name not in compared_names:
            yield f"not compared: {name!r}, which has no float values to compare"
    for position, names, other_names in (
        ("first", first_outputs, second_outputs),
        ("second", second_outputs, first_outputs),
    ):
        unshared = [repr(name) for name in names if name not in other_names]
        if unshared:
            yield f"not compared: {', '.join(unshared)}, which only the {position} model gives"


def _compare_tensors(
    first_model: ModelProto,
    second_model: ModelProto,
    pairs: Mapping[str, str],
    feed: Feed,
    threads: int | None,
) -> dict[str, OutputAccuracy]:
    """Compare pairs of tensors in one pass, with the tensors of one sample in memory at a time.

    Return the first model's tensor -> accuracy of the second one's. Left out are tensors that hold
    no floats, or no value in any sample.

    Args:
        first_model: the reference.
        second_model: the other model.
        pairs: name of a tensor of the first model -> name of the second one's.
        feed: the samples.
        threads: threads of one inference; None uses every core.
    """
    first_session = OrtSession.open(copy_with_outputs(first_model, pairs), threads=threads)
    second_session = OrtSession.open(
        copy_with_outputs(second_model, pairs.values()), threads=threads
    )

    comparison: TensorComparison | None = None
    with phase("comparing", len(feed), "samples") as show_progress, feed.samples() as samples:
        for sample in samples:
            first_tensors = first_session.run(sample)
            second_tensors = second_session.run(sample)
            if comparison is None:  # the first run shows which tensors hold floats
                float_pairs = dict(_select_float_pairs(pairs, first_tensors, second_tensors))
                if not float_pairs:
                    return {}
                comparison = TensorComparison(float_pairs, batch_inputs(feed.specs))
            comparison.add(sample, first_tensors, second_tensors)
            show_progress()
    if comparison is None:  # there was no sample
        return {}
    accuracies = zip(comparison.pairs, comparison.result(), strict=True)
    return {name: accuracy for name, accuracy in accuracies if not accuracy.empty}


def _make_difference(
    tensor: str, node_by_output: Mapping[str, NodeProto], accuracy: OutputAccuracy
) -> TensorDifference:
    """Return how far a tensor of two models differs, with the node that computes it.

    A QuantizeLinear or DequantizeLinear only rounds: for its output, the node upstream is named.

    Args:
        tensor: name of the tensor.
        node_by_output: tensor -> node of the first model that computes it.
        accuracy: errors of the tensor.
    """
    node = node_by_output.get(tensor)
    if node is None:  # an output of the model that is an input or a weight, too
        return TensorDifference(tensor=tensor, node=tensor, operator="input", accuracy=accuracy)
    while node.op_type in (Q, DQ) and node.input[0] in node_by_output:
        node = node_by_output[node.input[0]]
    scopes = module_scopes(node)
    return TensorDifference(
        tensor=tensor,
        node=node.name or node.output[0],
        operator=node.op_type,
        module=scopes[-1] if scopes else "",
        accuracy=accuracy,
    )


def _refuse_other_inputs(first_model: ModelProto, second_model: ModelProto) -> None:
    """Refuse models whose inputs differ in name, type or a fixed dimension."""
    first_specs = list(map(make_spec, runtime_inputs(first_model.graph)))
    second_specs = list(map(make_spec, runtime_inputs(second_model.graph)))
    first_inputs = describe_inputs(first_specs, second_specs)
    second_inputs = describe_inputs(second_specs, first_specs)
    if first_inputs != second_inputs:
        raise ConfigError(
            f"models that are compared must have the same inputs, got {first_inputs} and"
            f" {second_inputs}; compare a model with what was built from it"
        )
