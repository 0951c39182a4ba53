"""`compare`: two models, or one in two runtimes, over a feed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.comparison.cuts import by_cuts
from deploy.comparison.parting import Layer, Parting
from deploy.comparison.sums import Figures, Sums
from deploy.errors import ConfigError
from deploy.feed.choice import Limit
from deploy.feed.feed import open_feed
from deploy.feed.opening import FeedSource
from deploy.feed.preprocess import Asked
from deploy.feed.told import as_read
from deploy.frontends.checks import type_name
from deploy.frontends.metadata import carried_of
from deploy.frontends.reader import read_model
from deploy.graph.edit import with_outputs
from deploy.metrics.layerwise import shared_by_name
from deploy.metrics.output_errors import OutputAccuracy
from deploy.progress import on_request, phase
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Samples

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

RUNTIMES = ("onnxruntime", "openvino")
MIN_SQNR_DB = 20.0


@on_request
def compare(
    first: Path,
    second: Path | None,
    images: FeedSource,
    *,
    runtime: str = "onnxruntime",
    preprocess: Asked = None,
    limit: Limit = None,
    skip_bad: bool = False,
    min_sqnr_db: float = MIN_SQNR_DB,
    every: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> Parting:
    """Compare two ONNX models, or one with itself in another runtime.

    Args:
        first: the reference, which ONNX Runtime runs.
        second: the other model; None is the first one again.
        images: as `deploy.pipeline.build` takes them.
        runtime: of the second model, a name of `RUNTIMES`.
        preprocess: how images become inputs, or some options of it; the rest is what the first
            model's metadata says, else what its input tells.
        limit: use at most so many images, or a `Choice` of them.
        skip_bad: go on without unreadable images.
        min_sqnr_db: SQNR below which two tensors have parted.
        every: in another runtime, look at every tensor; else, where the outputs part, at as many
            as it takes to find two neighbours of which the first agrees and the second does not.
        threads: of an inference; None takes every core.
        progress: tell on stderr what is going on, where it takes over two seconds.

    Raises:
        ConfigError: nothing to compare: one model in one runtime, inputs that differ, or no tensor
            that both have.
        ModelError: a file that is no ONNX model.
        FeedError: images that do not fit.
        SdkMissingError: the runtime is not installed.
        BackendError: a runtime refused a whole model.
    """
    if second is None and runtime == "onnxruntime":
        raise ConfigError(
            f"a comparison needs two models or two runtimes, got {first} in ONNX Runtime alone;"
            " name a second model, or another runtime with --runtime"
        )
    ours = read_model(first)
    theirs = ours if second is None else read_model(second)
    whole = OrtSession.open(ours, threads=threads)
    _refuse_other_inputs(ours, theirs)
    feed = open_feed(
        images,
        whole.inputs,
        preprocess=preprocess,
        carried=carried_of(ours, Path(first)),
        skip_bad=skip_bad,
        limit=limit,
    )
    outputs = [value.name for value in ours.graph.output]
    pairs = _pairs(ours, theirs, outputs)
    if not pairs:
        raise ConfigError(
            f"models that are compared must have tensors of the same names, got none in {first}"
            f" and {second}; compare a model with what was built from it"
        )
    apart = runtime != "onnxruntime"
    notes: list[str] = []
    if apart:
        figures, notes = by_cuts(
            ours, theirs, pairs, feed, threads, min_sqnr_db=min_sqnr_db, every=every
        )
    else:
        figures = _taps(ours, theirs, pairs, feed, threads)
    makers = {name: node for node in ours.graph.node for name in node.output}
    rows = {name: _layer(name, makers, found) for name, found in figures.items()}
    return Parting(
        first=f"{first} in onnxruntime",
        second=f"{second or first} in {runtime}",
        samples=feed.count,
        min_sqnr_db=min_sqnr_db,
        layers=tuple(row for name, row in rows.items() if name not in outputs),
        outputs=tuple(rows[name] for name in outputs if name in rows),
        cut=apart,
        looked=(len(figures), len(pairs)),
        notes=(*as_read(feed), *_alone(ours, theirs), *notes),
    )


def _pairs(first: ModelProto, second: ModelProto, outputs: Sequence[str]) -> dict[str, str]:
    """Tensors to compare, the outputs that both have last."""
    theirs = {value.name for value in second.graph.output}
    shared = shared_by_name(first, second)
    inner = {name: other for name, other in shared.items() if name not in outputs}
    return inner | {name: name for name in outputs if name in theirs}


def _alone(first: ModelProto, second: ModelProto) -> Iterator[str]:
    """What is not compared of the outputs."""
    ours, theirs = ([value.name for value in model.graph.output] for model in (first, second))
    for which, own, others in (("first", ours, theirs), ("second", theirs, ours)):
        names = [repr(name) for name in own if name not in others]
        if names:
            yield f"not compared: {', '.join(names)}, which only the {which} model gives"


def _taps(
    first: ModelProto,
    second: ModelProto,
    pairs: Mapping[str, str],
    feed: Samples,
    threads: int | None,
) -> Figures:
    """All tensors in one walk over the samples; those of one sample are in memory at a time."""
    left = OrtSession.open(with_outputs(first, pairs), threads=threads)
    right = OrtSession.open(with_outputs(second, pairs.values()), threads=threads)
    figures = Sums(pairs)
    with phase("comparing", len(feed), "samples") as step, feed.samples() as samples:
        for sample in samples:
            figures.add(sample, left.run(sample), right.run(sample))
            step()
    return figures.result()


def _layer(name: str, makers: Mapping[str, NodeProto], figures: OutputAccuracy) -> Layer:
    """The row of a tensor, with the node behind its quantization that computes it."""
    node = makers.get(name)
    if node is None:  # an output that is an input or a weight
        return Layer(tensor=name, node=name, operator="input", figures=figures)
    while node.op_type in ("DequantizeLinear", "QuantizeLinear") and node.input[0] in makers:
        node = makers[node.input[0]]
    return Layer(tensor=name, node=node.name, operator=node.op_type, figures=figures)


def _refuse_other_inputs(first: ModelProto, second: ModelProto) -> None:
    ours, theirs = (sorted(_inputs(model)) for model in (first, second))
    if ours != theirs:
        raise ConfigError(
            f"models that are compared must have the same inputs, got {', '.join(ours)} and"
            f" {', '.join(theirs)}; compare a model with what was built from it"
        )


def _inputs(model: ModelProto) -> set[str]:
    """Name and type of what must be fed: old models list their weights among the inputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return {
        f"{value.name} ({type_name(value.type.tensor_type.elem_type)})"
        for value in model.graph.input
        if value.name not in weights
    }
