"""Compares two models, or one model in two runtimes, tensor by tensor over a feed (`compare`).

For OpenVINO each tensor is the output of a model that is cut off after it, since an added output
would change what the runtime fuses.
"""

from __future__ import annotations

import math
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto, NodeProto

from deploy.errors import BackendError, ConfigError
from deploy.feed.feed import Dataset, FeedSource, preprocessing_notes, to_dataset
from deploy.feed.samples import Feed
from deploy.frontends.checks import type_name
from deploy.frontends.metadata import read_metadata_preprocess
from deploy.frontends.onnx_file import read_source
from deploy.graph.edit import copy_with_outputs, extract_output
from deploy.metrics.accuracy import TensorComparison
from deploy.metrics.layerwise import shared_by_name
from deploy.metrics.output_errors import OutputAccuracy
from deploy.pipeline.build_options import find_user_model, open_torch_module
from deploy.report.model import to_plain_object
from deploy.runtimes.openvino import run_in_subprocess
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array
from deploy.terminal import join_visible, phase, with_progress

if TYPE_CHECKING:
    from torch import nn

MIN_SQNR_DB = 20.0
Figures = dict[str, OutputAccuracy]  # tensor -> accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Comparison of one tensor of both models."""

    tensor: str
    node: str  # name of the first model's node that makes it
    operator: str
    figures: OutputAccuracy  # accuracy of the second model's tensor against the first's


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelComparison:
    """Result of `compare`; `repr` is its text for a screen."""

    # first, second: "file in runtime" of the two sides
    first: str
    second: str
    samples: int
    min_sqnr_db: float  # limit below which a tensor differs
    layers: tuple[TensorDifference, ...]  # shared inner tensors, in the first model's order
    outputs: tuple[TensorDifference, ...]  # shared outputs, in the first model's order
    cut: bool  # whether each tensor comes from a model cut off after it
    looked: tuple[int, int]  # number of tensors compared, and of all shared tensors
    notes: tuple[str, ...] = ()  # how the images were read, and what could not be compared

    @property
    def parts_at(self) -> TensorDifference | None:
        """The first tensor below the limit (NaN, Inf and another shape are); None without one."""
        every = (*self.layers, *self.outputs)
        return next((one for one in every if not one.figures.sqnr_db >= self.min_sqnr_db), None)

    def __repr__(self) -> str:
        return join_visible(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.first} against {self.second}, {self.samples} samples"
        if self.cut:
            looked, shared = self.looked
            yield f"each tensor by a model cut off after it; {looked} of {shared} were compared"
        yield ""
        yield f"{'SQNR dB':>8}  {'cosine':>8}  tensor"
        for one in self.layers:
            yield _screen_line(one)
        yield "outputs"
        for one in self.outputs:
            yield _screen_line(one)
        yield ""
        yield self.says
        yield from self.notes

    @property
    def says(self) -> str:
        """Where the models part, in one sentence."""
        parting = self.parts_at
        if parting is None:
            return f"They do not part: no tensor is below {self.min_sqnr_db:g} dB."
        return (
            f"They part at {parting.tensor!r}, made by {parting.operator} {parting.node!r}:"
            f" {parting.figures.sqnr_db:.1f} dB, the first below {self.min_sqnr_db:g} dB."
        )

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types; infinite and NaN numbers become "inf" or "nan"."""
        parting = self.parts_at
        return to_plain_object(
            {
                "schema": "calib8-comparison/1",
                "first": self.first,
                "second": self.second,
                "samples": self.samples,
                "min_sqnr_db": self.min_sqnr_db,
                "cut": self.cut,
                "looked": self.looked,
                "parts_at": None if parting is None else parting.tensor,
                "layers": [_json(one) for one in self.layers],
                "outputs": [_json(one) for one in self.outputs],
                "notes": self.notes,
            }
        )


def _screen_line(one: TensorDifference) -> str:
    figures = one.figures
    return (
        f"{figures.sqnr_db:8.1f}  {figures.cosine_mean:8.5f}  {one.tensor}"
        f"  ({one.operator} {one.node})"
    )


def _json(one: TensorDifference) -> dict[str, object]:
    made_by = {"tensor": one.tensor, "node": one.node, "operator": one.operator}
    measured = {key: v for key, v in asdict(one.figures).items() if key not in ("name", "zeros")}
    return {**made_by, **measured}


def _pair_errors(
    pairs: Mapping[str, str], runs: Iterable[Sequence[Mapping[str, Array]]]
) -> Figures:
    """Return the accuracy of every pair of float tensors.

    `runs`: (inputs, tensors of the first model, tensors of the second one under its own names) of
    each sample.
    """
    sums: TensorComparison | None = None
    for number, (sample, left, right) in enumerate(runs):
        if number == 0:
            pairs = {
                name: other
                for name, other in pairs.items()
                if name in left
                and other in right  # sequences and maps are in neither
                and np.issubdtype(left[name].dtype, np.floating)
            }
            sums = TensorComparison(pairs) if pairs else None
        if sums is not None:
            sums.add(sample, left, right)
    figures = {} if sums is None else dict(zip(pairs, sums.result(), strict=True))
    return {name: one for name, one in figures.items() if not one.empty}


class _Cuts:
    """Compares tensors one by one, with models cut off after each; the second runs in OpenVINO."""

    def __init__(
        self,
        first: ModelProto,
        second: ModelProto,
        samples: Sequence[Path],
        *,
        folder: Path,
        threads: int | None,
        min_sqnr_db: float,
    ) -> None:
        self._models = first, second
        self._samples = samples
        self._folder, self._threads, self._limit = folder, threads, min_sqnr_db
        self.figures: Figures = {}
        self.notes: list[str] = []

    def whole(self, outputs: Mapping[str, str]) -> bool:
        """Whether the outputs of the complete models agree.

        Raises:
            BackendError: OpenVINO cannot run the second model.
        """
        self.figures |= (figures := self._compare(*self._models, outputs))
        return self._agrees(figures)

    def agrees(self, name: str, other: str) -> bool:
        """Whether a tensor agrees; also true if it cannot be compared or holds no floats."""
        first, second = self._models
        try:
            figures = self._compare(
                extract_output(first, name), extract_output(second, other), {name: other}
            )
        except BackendError as error:
            self.notes.append(f"{name!r} could not be compared: {error}.")
            return True
        self.figures |= figures
        return self._agrees(figures)

    def close(self, outputs: Mapping[str, str]) -> None:
        """Add a note on the effect of fixing the model's open dimensions, if it has any."""
        shapes = (value.type.tensor_type.shape for value in self._models[1].graph.input)
        if all(dim.HasField("dim_value") for shape in shapes for dim in shape.dim):
            return
        try:
            figures = self._compare(*self._models, outputs, closed=True)
        except BackendError:  # the model runs with open dimensions only
            return
        worst = min((one.sqnr_db for one in figures.values()), default=math.nan)
        words = "agree" if self._agrees(figures) else "part as well"
        self.notes.append(
            f"With the input's open dimensions closed the outputs {words} ({worst:.1f} dB)."
        )

    def _agrees(self, figures: Figures) -> bool:
        return all(one.sqnr_db >= self._limit for one in figures.values())

    def _compare(
        self,
        first: ModelProto,
        second: ModelProto,
        pairs: Mapping[str, str],
        *,
        closed: bool = False,
    ) -> Figures:
        left = OrtSession.open(first, threads=self._threads)
        results = run_in_subprocess(
            second, self._samples, self._folder, threads=self._threads, fix_shapes=closed
        )
        names = [value.name for value in second.graph.output]

        def runs() -> Iterator[tuple[Mapping[str, Array], ...]]:
            for file, result in zip(self._samples, results, strict=True):
                sample, values = _arrays(file), _arrays(result).values()
                yield sample, left.run(sample), dict(zip(names, values, strict=True))

        return _pair_errors(pairs, runs())


def _arrays(file: Path) -> dict[str, Array]:
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def compare_cut_models(
    first: ModelProto,
    second: ModelProto,
    pairs: Mapping[str, str],
    feed: Feed,
    threads: int | None,
    *,
    min_sqnr_db: float,
    every: bool,
) -> tuple[Figures, list[str]]:
    """Return the accuracy by cut models, and notes on tensors that could not be compared."""
    ends = {value.name for value in first.graph.output}
    inner = [name for name in pairs if name not in ends]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        files = []
        with feed.samples() as samples:
            for number, sample in enumerate(samples):
                files.append(folder / f"sample-{number}.npz")
                with zipfile.ZipFile(files[-1], "w") as archive:  # savez keeps names of its own
                    for name, array in sample.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                            np.lib.format.write_array(file, np.asarray(array))
        cuts = _Cuts(first, second, files, folder=folder, threads=threads, min_sqnr_db=min_sqnr_db)
        outputs = {name: other for name, other in pairs.items() if name in ends}
        agree = cuts.whole(outputs)
        if not agree:
            cuts.close(outputs)
        steps = len(inner) if every else len(inner).bit_length()
        with phase("comparing", steps, "tensors") as step:

            def look(name: str) -> bool:
                step()
                return cuts.agrees(name, pairs[name])

            if every:
                for name in inner:
                    look(name)
            elif not agree:
                _bisect(inner, look)
    return {name: cuts.figures[name] for name in pairs if name in cuts.figures}, cuts.notes


def _bisect(names: Sequence[str], agrees: Callable[[str], bool]) -> None:
    """Find two neighbours of which the first agrees and the second does not, by halving.

    ::

        agrees  ?  ?  ?  ?  ?  ?  ?  parted         tensors before the first agree,
                         agrees                     tensors after the last have parted
                               parted
                            agrees ^
    """
    low, high = -1, len(names)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if agrees(names[middle]) else (low, middle)


@with_progress
def compare(
    first: Path | str | ModelProto | nn.Module,
    second: Path | str | ModelProto | nn.Module | None,
    images: FeedSource | Dataset,
    *,
    runtime: str = "onnxruntime",
    min_sqnr_db: float = MIN_SQNR_DB,
    every: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> ModelComparison:
    """Compare two ONNX models, or one model in ONNX Runtime and in another runtime.

    Args:
        first: the reference, run in ONNX Runtime; a file, a model in memory, or a PyTorch module,
            which the first of the images exports.
        second: the other model; None is the first one again.
        images: as for `deploy.pipeline.build`.
        runtime: runtime of the second model, onnxruntime or openvino.
        min_sqnr_db: SQNR below which two tensors differ.
        every: in another runtime, compare every tensor; otherwise, if the outputs differ, only as
            many as it takes to find two neighbours of which the first agrees and the second does
            not.
        threads: threads of one inference; None uses every core.
        progress: report progress on stderr, where it takes over two seconds.

    Raises:
        ConfigError: one model in one runtime, inputs that differ, or no shared tensor.
        ModelError: a file that is not an ONNX model.
        FeedError: images that do not fit.
        SdkMissingError: the runtime is not installed.
        BackendError: a runtime refused a complete model.
    """
    if second is None and runtime == "onnxruntime":
        raise ConfigError(
            f"a comparison needs two models or two runtimes, got {_named(first)} in ONNX Runtime"
            " alone; name a second model, or another runtime with --runtime"
        )
    dataset, models = to_dataset(images), list[ModelProto]()
    for given in (first,) if second is None else (first, second):
        opened, source = open_torch_module(given, dataset.source)
        dataset, model = replace(dataset, source=source), find_user_model(opened)
        assert model is not None
        models.append(read_source(model)[1])
    ours, theirs = models[0], models[-1]
    session = OrtSession.open(ours, threads=threads)
    _refuse_other_inputs(ours, theirs)
    path = Path(first) if isinstance(first, str | Path) else None
    feed = dataset.open(session.inputs, metadata_preprocess=read_metadata_preprocess(ours, path))
    outputs = [value.name for value in ours.graph.output]
    pairs = _pairs(ours, theirs, outputs)
    if not pairs:
        raise ConfigError(
            f"models that are compared must have tensors of the same names, got none in"
            f" {_named(first)} and {_named(second)}; compare a model with what was built from it"
        )
    by_cut_models = runtime != "onnxruntime"
    notes: list[str] = []
    if by_cut_models:
        figures, notes = compare_cut_models(
            ours, theirs, pairs, feed, threads, min_sqnr_db=min_sqnr_db, every=every
        )
    else:
        figures = _compare_taps(ours, theirs, pairs, feed, threads)
    makers = {name: node for node in ours.graph.node for name in node.output}
    rows = {name: _layer(name, makers, one) for name, one in figures.items()}
    return ModelComparison(
        first=f"{_named(first)} in onnxruntime",
        second=f"{_named(first if second is None else second)} in {runtime}",
        samples=feed.count,
        min_sqnr_db=min_sqnr_db,
        layers=tuple(row for name, row in rows.items() if name not in outputs),
        outputs=tuple(rows[name] for name in outputs if name in rows),
        cut=by_cut_models,
        looked=(len(figures), len(pairs)),
        notes=(*preprocessing_notes(feed), *_unshared_notes(ours, theirs), *notes),
    )


def _named(model: object) -> str:
    """Return a model's path, the name of its graph, or its class."""
    if isinstance(model, ModelProto):
        return model.graph.name
    return str(model) if isinstance(model, str | Path) else type(model).__name__


def _pairs(first: ModelProto, second: ModelProto, outputs: Sequence[str]) -> dict[str, str]:
    """Return the tensors to compare, the shared outputs last."""
    theirs = {value.name for value in second.graph.output}
    shared = shared_by_name(first, second)
    inner = {name: other for name, other in shared.items() if name not in outputs}
    return inner | {name: name for name in outputs if name in theirs}


def _unshared_notes(first: ModelProto, second: ModelProto) -> Iterator[str]:
    """Yield notes on the outputs that only one model has."""
    ours, theirs = ([value.name for value in model.graph.output] for model in (first, second))
    for which, own, others in (("first", ours, theirs), ("second", theirs, ours)):
        names = [repr(name) for name in own if name not in others]
        if names:
            yield f"not compared: {', '.join(names)}, which only the {which} model gives"


def _compare_taps(
    first: ModelProto, second: ModelProto, pairs: Mapping[str, str], feed: Feed, threads: int | None
) -> Figures:
    """Compare all tensors in one pass, with those of one sample in memory at a time."""
    left = OrtSession.open(copy_with_outputs(first, pairs), threads=threads)
    right = OrtSession.open(copy_with_outputs(second, pairs.values()), threads=threads)

    def runs() -> Iterator[tuple[Mapping[str, Array], ...]]:
        with phase("comparing", len(feed), "samples") as step, feed.samples() as samples:
            for sample in samples:
                yield sample, left.run(sample), right.run(sample)
                step()

    return _pair_errors(pairs, runs())


def _layer(name: str, makers: Mapping[str, NodeProto], figures: OutputAccuracy) -> TensorDifference:
    """Return the row of a tensor, with the node that computes it upstream of its Q/DQ nodes."""
    node = makers.get(name)
    if node is None:  # an output that is an input or a weight
        return TensorDifference(tensor=name, node=name, operator="input", figures=figures)
    while node.op_type in ("DequantizeLinear", "QuantizeLinear") and node.input[0] in makers:
        node = makers[node.input[0]]
    return TensorDifference(tensor=name, node=node.name, operator=node.op_type, figures=figures)


def _refuse_other_inputs(first: ModelProto, second: ModelProto) -> None:
    ours, theirs = (sorted(_inputs(model)) for model in (first, second))
    if ours != theirs:
        raise ConfigError(
            f"models that are compared must have the same inputs, got {', '.join(ours)} and"
            f" {', '.join(theirs)}; compare a model with what was built from it"
        )


def _inputs(model: ModelProto) -> set[str]:
    """Return name and type of the inputs without those that are weights, as in old models."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return {
        f"{value.name} ({type_name(value.type.tensor_type.elem_type)})"
        for value in model.graph.input
        if value.name not in weights
    }
