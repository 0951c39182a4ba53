"""Input plausibility: compare the calibration data with the training data seen by the first layer.

Wrong preprocessing raises no error: the float model fails, int8 fails alike, and their comparison
looks fine. Without labels, three checks are possible:

* samples with a single value, and images of nearly one colour;
* a BatchNormalization at the input or after the first Conv holds the training mean m and variance
  s2 of each channel. With mean m' and variance v of the calibration data, the distance is the
  median over the channels of the Kullback-Leibler divergence of two normal distributions:

      d = (v / s2 + (m' - m)^2 / s2 - 1 - ln(v / s2)) / 2

  A spread of ten times, or a mean ten deviations off, means another unit. Smaller differences may
  come from other images than in training, so images are also normalized by the usual presets;
* a first Conv with a bias but no BatchNormalization: if its products are thousands of times the
  bias, or negligible next to it, the input has another unit than in training.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ValueInfoProto, helper, numpy_helper

from deploy.calibration.observation import CalibrationSubject
from deploy.errors import BackendError
from deploy.feed.pixels import layout_of
from deploy.feed.preprocess import PRESETS, Preprocess
from deploy.feed.preview import PREVIEW_COUNT
from deploy.feed.samples import Feed
from deploy.frontends.base import read_graph
from deploy.graph.edit import copy_tensor, name_nodes
from deploy.graph.index import Graph
from deploy.graph.lowering import is_standard
from deploy.runtimes.ort import OrtSession
from deploy.tasks.rows import is_floating
from deploy.tensors import Array

Floats = NDArray[np.float64]
_PASSED = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Pad", "Sub", "Transpose"})
_MOVING = frozenset({"Reshape", "Slice", "SpaceToDepth", "Unsqueeze"})  # YOLOX slices rows
_JOINING = frozenset({"Concat"})
_LAYERS = frozenset({"BatchNormalization", "Conv", "Gemm"})
_MOST = 16  # nodes before the layer
_EXTERNAL = 1  # TensorProto.DataLocation
_FEWEST = 4  # different samples, at least; twice as many where most are copies
_FLAT = 16  # of 255; pixels of a flat image differ by less
_ANOTHER_UNIT = 10.0  # ratio of spreads, or distance of means in deviations
_FAINT = 1 / 32  # lowest plausible ratio of spreads
_FAR, _NEAR, _TIMES = 0.3, 0.1, 10.0  # distance of a misfit and of a fit, and their least ratio
_OVER_BIAS, _UNDER_BIAS = 30.0, 0.02  # docs/feeds.md lists the ratios of real models
_PIXELS = 64.0  # integers and colors with a maximum of this or more are not scaled
_EVEN, _LARGE = 1e-3, 256  # variation next to a constant, of inputs of so many values
_USUAL = ("unit", "minus-one-to-one", "imagenet", "raw")  # presets that differ in mean and std
_DEAD = 1e-6  # of the median variance; channels with less are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLayer:
    """The layer that reads the input.

    Attributes:
        tensor: output of the Conv, or input of the BatchNormalization.
        node: name of the BatchNormalization, or else of the Conv.
        mean, variance: training statistics per channel; None without a BatchNormalization.
        bias: bias per channel of a Conv without BatchNormalization, or None.
    """

    model: onnx.ModelProto
    tensor: str
    node: str
    mean: Floats | None = None
    variance: Floats | None = None
    bias: Floats | None = None


def find_first_layer(model: onnx.ModelProto, name: str) -> FirstLayer | None:
    """Return the first layer that reads input `name`; None if there is none that can be checked.

    Weights in external data are not read.
    """
    graph = Graph(model)
    way: list[onnx.NodeProto] = []
    reached = {name}
    for node in graph.nodes:
        own = [tensor for tensor in dict.fromkeys(node.input) if tensor in reached]
        if not own:
            continue
        if not is_standard(node):
            return None
        if node.op_type in _LAYERS and node.input[0] in reached:
            only = all(_read_only_by(graph, tensor, [*way, node]) for tensor in reached)
            if not only or len(way) > _MOST:
                return None
            if node.op_type == "BatchNormalization":
                return _normalised_layer(graph, model, way, name, node.input[0], node)
            return _convolved(graph, model, [*way, node], name)
        if not _passes(graph, node, own):
            return None
        way.append(node)
        reached |= set(filter(None, node.output))
    return None


def _passes(graph: Graph, node: onnx.NodeProto, own: list[str]) -> bool:
    """Whether a node only scales, shifts or moves the values of its input."""
    if node.op_type in _JOINING:
        return all(tensor in own for tensor in node.input)
    others = [tensor for tensor in node.input if tensor and tensor not in own]
    known = len(own) == 1 and all(tensor in graph.constants for tensor in others)
    moved = node.op_type in _MOVING and node.input[0] in own
    return known and (moved or node.op_type in _PASSED)


def _read_only_by(graph: Graph, tensor: str, nodes: list[onnx.NodeProto]) -> bool:
    readers = graph.readers.get(tensor, [])
    outside = tensor in graph.outputs or tensor in graph.captured
    return not outside and all(any(one is node for node in nodes) for one in readers)


def _convolved(
    graph: Graph, model: onnx.ModelProto, way: list[onnx.NodeProto], name: str
) -> FirstLayer | None:
    """Return the layer of a Conv: with the BatchNormalization after it, or with its bias."""
    conv = way[-1]
    after = graph.only_reader(conv.output[0])
    if after is not None and after.op_type == "BatchNormalization" and is_standard(after):
        return _normalised_layer(graph, model, way, name, conv.output[0], after)
    bias = _values(graph, conv.input[2]) if conv.op_type == "Conv" and conv.input[2:] else None
    part = _part(graph, model, way, name, conv.output[0])
    if part is None or bias is None:
        return None
    return FirstLayer(model=part, tensor=conv.output[0], node=conv.name, bias=bias)


def _normalised_layer(
    graph: Graph,
    model: onnx.ModelProto,
    way: list[onnx.NodeProto],
    name: str,
    tensor: str,
    norm: onnx.NodeProto,
) -> FirstLayer | None:
    mean, variance = (_values(graph, one) for one in norm.input[3:5])
    part = _part(graph, model, way, name, tensor)
    if part is None or mean is None or variance is None or mean.shape != variance.shape:
        return None
    return FirstLayer(model=part, tensor=tensor, node=norm.name, mean=mean, variance=variance)


def _part(
    graph: Graph, model: onnx.ModelProto, way: list[onnx.NodeProto], name: str, tensor: str
) -> onnx.ModelProto | None:
    """Return a model of some nodes; None if a constant is in external data."""
    read = dict.fromkeys(one for node in way for one in node.input if one in graph.constants)
    constants = [copy_tensor(graph.constants[one], one) for one in read]
    if any(one.data_location == _EXTERNAL for one in constants):
        return None
    given = [value for value in model.graph.input if value.name == name]
    body = helper.make_graph(way, "first", given, [ValueInfoProto(name=tensor)], constants)
    name_nodes(body)  # ONNX Runtime refuses duplicate names
    return helper.make_model(
        body, opset_imports=model.opset_import, ir_version=max(model.ir_version, 7)
    )


def _values(graph: Graph, name: str) -> Floats | None:
    tensor = graph.constants.get(name)
    if tensor is None or tensor.data_location == _EXTERNAL:
        return None
    return np.asarray(numpy_helper.to_array(tensor), np.float64).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Moments:
    """Mean and variance per channel."""

    mean: Floats
    variance: Floats


def check_feed_inputs(subject: CalibrationSubject, feed: Feed) -> list[str]:
    """Return `check_input_samples` of the samples that a report shows, and a doubt of few samples.

    Raises:
        FeedError: a sample cannot be read.
        ModelError: the model's file changed since it was loaded.
    """
    samples = list(feed.spread(max(1, PREVIEW_COUNT // feed.batch)))
    odd = check_input_samples(samples, feed.preprocess, _as_given(subject))
    return [*odd, *_few(feed, samples)]


def _few(feed: Feed, samples: Sequence[Mapping[str, Array]]) -> Iterator[str]:
    """Yield a doubt where too few samples are different, or some of them hardly differ."""
    different = feed.count - feed.copies
    if different < _FEWEST or (different < 2 * _FEWEST and feed.copies >= different):
        yield (
            "too few different calibration samples for ranges that hold for others"
            f" ({different} of {feed.count}); calibrate with more"
        )
    elif len(samples) > 1 and all(_nearly(samples[0], one) for one in samples[1:]):
        yield f"{len(samples)} samples that were looked at hardly differ; calibrate with others"


def _nearly(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Whether two samples are the same but for noise below a step of int8."""
    large = {n: np.float64(v) for n, v in one.items() if is_floating(v) and v.size >= _LARGE}
    return large != {} and all(
        np.square(large[n] - other[n]).mean() * 255**2 < np.ptp(large[n]) ** 2
        if n in large and value.shape == other[n].shape
        else np.array_equal(value, other[n])
        for n, value in one.items()
    )


def _as_given(subject: CalibrationSubject) -> onnx.ModelProto:
    """Return the model before cleaning, if available: cleaning folds BatchNormalizations."""
    given = subject.user_model
    if given is None or isinstance(given, str | Path):
        onnx_file = given is not None and Path(given).suffix.lower() == ".onnx"
        return read_graph(Path(str(given)), subject.loaded) if onnx_file else subject.model
    return given


def check_input_samples(
    samples: Sequence[Mapping[str, Array]], how: Preprocess | None, model: onnx.ModelProto
) -> list[str]:
    """Return a warning on the first odd input, as a list of one sentence; empty if all are fine.

    Without an image input, all inputs together are checked for content.

    `model`: the model before cleaning, with its BatchNormalizations.
    """
    first = samples[0] if samples else {}
    full = {n: a for n, a in first.items() if a.size > 1 and all(one[n].size for one in samples)}
    busy = [n for n in full if layout_of(full[n]) is not None and not _idle(samples, n)]
    flat = [] if busy else [each for each in full if _even(samples, each)]
    masks = {each for each in full if flat and _is_mask(samples, each, full[flat[0]])}
    if flat and {*flat} | masks == {*full}:
        return [_one_value(len(samples), float(np.ravel(full[flat[0]])[0]))]
    for name in full:
        values = [sample[name] for sample in samples]
        warning = _flat(values, how) if name in busy else ""
        layer = None if warning or name in flat else find_first_layer(model, name)
        if layer is not None:
            try:
                with np.errstate(all="ignore"):  # an overflow gives no warning
                    warning = _by_layer(layer, name, values, how)
            except BackendError:  # the layer cannot run alone
                continue
        if warning:
            return [warning]
    return []


def _idle(samples: Sequence[Mapping[str, Array]], name: str) -> bool:
    """Whether an input is constant while a larger one is not: an initial state."""
    size = samples[0][name].size
    larger = [each for each, array in samples[0].items() if array.size > size]
    return _even(samples, name) and not all(_even(samples, each) for each in larger)


def _is_mask(samples: Sequence[Mapping[str, Array]], name: str, tokens: Array) -> bool:
    """Whether an input says which tokens count, by 0 and 1."""
    values = [sample[name] for sample in samples]
    alike = values[0].shape == tokens.shape and tokens.dtype.kind in "iu"
    return alike and all(one.dtype.kind in "iub" and {*np.unique(one)} <= {0, 1} for one in values)


def _even(samples: Sequence[Mapping[str, Array]], name: str) -> bool:
    """Whether an input is constant in each sample."""
    return all(_is_even(sample[name]) for sample in samples)


def _is_even(values: Array) -> bool:
    """Whether an array holds one value, or many values that hardly differ from it."""
    low, high = _ends([values]) if values.size else (0.0, 0.0)
    return high - low <= (_EVEN * max(abs(low), abs(high)) if values.size >= _LARGE else 0)


def _flat(values: Sequence[Array], how: Preprocess | None) -> str:
    """Return a warning on samples without content, or ""."""
    if all(map(_is_even, values)):
        return _one_value(len(values), float(np.ravel(values[0])[0]))
    low, high = _ends(values)
    if how is None or (high - low) * max(how.std) / how.scale >= _FLAT:
        return ""
    return (
        f"the pixels of {len(values)} images that were looked at differ by less than {_FLAT} of"
        " 255, nearly one colour; check the images (of 16-bit color images only the upper byte is"
        " read)"
    )


def _one_value(count: int, value: float) -> str:
    return (
        f"each of {count} samples that were looked at holds one value alone, such as {value:g};"
        " check the images and how they were made"
    )


def _by_layer(layer: FirstLayer, name: str, values: Sequence[Array], how: Preprocess | None) -> str:
    session = OrtSession.open(layer.model, threads=1, spin=False)

    def through(arrays: Iterable[Array]) -> _Moments:
        return _moments(session.run({name: one})[layer.tensor] for one in arrays)

    if layer.mean is not None and layer.variance is not None:
        training = _Moments(layer.mean, layer.variance)
        warning = _compare_with_training(training, through, values, how)
    else:
        warning = _compare_with_bias(layer, through(values), values)
    remedy = "--preprocess, --scale, --mean and --std" if how else "how the arrays were made"
    return f"{warning} ({layer.node or layer.tensor}); check {remedy}" if warning else ""


def _compare_with_training(
    training: _Moments,
    through: Callable[[Iterable[Array]], _Moments],
    values: Sequence[Array],
    how: Preprocess | None,
) -> str:
    """Return a warning from the statistics of a BatchNormalization, or ""."""
    here = through(values)
    if here.mean.shape != training.mean.shape or not (training.variance > 0).any():
        return ""
    fed = _distance(here, training)
    for words, turned in _by_presets(values, how or _guessed(values)) if fed > _FAR else ():
        other = _distance(through(turned), training)
        if other < min(_NEAR, fed / _TIMES):
            return (
                f"the calibration data does not match the training data, but {words} would, as the"
                " first BatchNormalization shows"
            )
    alive = _alive(training)
    deviation = np.sqrt(training.variance[alive])
    off = float(np.median(np.abs(here.mean - training.mean)[alive] / deviation))
    spread = float(np.median(np.sqrt(here.variance[alive]) / deviation))
    if not np.isfinite(off + spread) or (_FAINT < spread < _ANOTHER_UNIT and off < _ANOTHER_UNIT):
        return ""
    return (
        "the calibration data has another unit than the training data: at the model's first"
        f" BatchNormalization the values spread {_round(spread)} times as far as in training, their"
        f" mean {_round(off)} deviations off"
    )


def _compare_with_bias(layer: FirstLayer, here: _Moments, values: Sequence[Array]) -> str:
    """Return a warning from the size of a Conv's bias, or ""."""
    assert layer.bias is not None
    usual = float(np.sqrt(np.mean(np.square(layer.bias))))
    made = float(np.sqrt(np.mean(here.variance)))
    if usual == 0 or not np.isfinite(made):
        return ""
    ratio = made / usual
    if ratio < _UNDER_BIAS and values[0].ndim == 4:
        return (
            "the calibration data is too small: the outputs of the model's first Conv"
            f" vary by {_round(ratio)} times the Conv's own bias"
        )
    low, high = _ends(values)
    whole = all(np.array_equal(one, np.rint(one)) for one in values)
    pixels = low >= 0 and high <= 255
    picture = layout_of(values[0]) is not None and (pixels or 3 in values[0].shape[1::2])
    if ratio > _OVER_BIAS and max(-low, high) >= _PIXELS and (whole or picture):
        what = "pixels of 0 to 255 as they are" if pixels else f"values of {low:.4g} to {high:.4g}"
        return (
            f"the calibration data are {what}; the model's first Conv makes"
            f" {_round(ratio)} times its own bias of them, like one trained on smaller values"
        )
    return ""


def _by_presets(
    values: Sequence[Array], how: Preprocess | None
) -> Iterator[tuple[str, Iterator[Array]]]:
    """Yield (mean and std as text, images normalized by them) of the usual presets."""
    if how is None or not all(np.issubdtype(one.dtype, np.floating) for one in values):
        return
    for other in (PRESETS[name] for name in _USUAL):
        if {len(other.mean), len(other.std)} <= {1, how.channels}:
            words = (
                f"pixels / 255 with mean {_listed(other.mean, other.scale)} and std"
                f" {_listed(other.std, other.scale)}"
            )
            yield words, (_normalised(one, how, other) for one in values)


def _guessed(values: Sequence[Array]) -> Preprocess | None:
    """Return the preset of the fewest values that arrays of pictures may have, if any."""
    layout, (low, high) = layout_of(values[0]), _ends(values)
    color = "rgb" if 3 in values[0].shape[1::2] else "grey"
    for one in (PRESETS[name] for name in _USUAL) if layout else ():
        sides = zip(one.mean, one.std, strict=True)
        pixels = [(end * one.scale - m) / s for m, s in sides for end in (0, 255)]
        fits = min(pixels) - _NEAR <= low and high <= max(pixels) + _NEAR
        if fits and (color == "rgb" or len(one.mean) == 1):
            return replace(one, layout=layout, color=color)
    return None


def _ends(values: Sequence[Array]) -> tuple[float, float]:
    return min(float(one.min()) for one in values), max(float(one.max()) for one in values)


def _listed(values: Sequence[float], scale: float) -> str:
    """Format values in units of pixels / 255, as for --mean and --std."""
    return " ".join(f"{value / scale / 255:.4g}" for value in values)


def _normalised(array: Array, how: Preprocess, other: Preprocess) -> Array:
    shape = (1, -1, 1, 1) if how.layout == "nchw" else (1, 1, 1, -1)

    def each(numbers: Sequence[float]) -> Floats:
        return np.asarray(numbers, np.float64).reshape(shape)

    pixels = (array * each(how.std) + each(how.mean)) / how.scale
    values: Array = (pixels * other.scale - each(other.mean)) / each(other.std)
    return values.astype(array.dtype)


def _moments(arrays: Iterable[Array]) -> _Moments:
    """Return the moments of all [1, C, ...] arrays together."""
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    for array in arrays:
        rows = np.moveaxis(array.astype(np.float64), 1, 0).reshape(array.shape[1], -1)
        count += rows.shape[1]
        total = total + rows.sum(axis=1)
        squares = squares + np.square(rows).sum(axis=1)
    mean = total / max(count, 1)
    return _Moments(mean, np.maximum(squares / max(count, 1) - np.square(mean), 0))


def _alive(training: _Moments) -> NDArray[np.bool_]:
    """Return a mask of the channels that varied in training."""
    known = training.variance > 0
    mask: NDArray[np.bool_] = training.variance > _DEAD * np.median(training.variance[known])
    return mask


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _distance(here: _Moments, training: _Moments) -> float:
    """Return the median over the channels of the Kullback-Leibler divergence."""
    alive = _alive(training)
    known = training.variance[alive]
    ratio = np.maximum(here.variance[alive] / known, 1e-12)
    off = np.square(here.mean[alive] - training.mean[alive]) / known
    return float(np.median(ratio + off - 1 - np.log(ratio)) / 2)
