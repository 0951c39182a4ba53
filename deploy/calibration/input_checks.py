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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from deploy.calibration.observation import CalibrationSubject
from deploy.errors import BackendError, too_few
from deploy.feed.parallel import Sample
from deploy.feed.pixels import PREVIEW_COUNT, layout_of
from deploy.feed.preprocess import PRESETS, Preprocess
from deploy.feed.samples import Feed
from deploy.graph.edit import extract_output, name_nodes, replace_field
from deploy.graph.index import Graph
from deploy.graph.lowering import is_standard
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array

Floats = NDArray[np.float64]
Samples = Sequence[Sample]

# Operators between the input and the first layer that only change its unit or its layout.
_SCALING_OPS = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Pad", "Sub", "Transpose"})
_MOVING_OPS = frozenset({"Reshape", "Slice", "SpaceToDepth", "Unsqueeze"})  # YOLOX slices rows
_LAYER_OPS = frozenset({"BatchNormalization", "Conv", "Gemm"})
_EXTERNAL = onnx.TensorProto.EXTERNAL
# presets of different mean or std, the narrowest range of values first
_PRESETS = [PRESETS[name] for name in ("unit", "minus-one-to-one", "imagenet", "raw")]

# Thresholds
MAX_NODES_BEFORE_LAYER = 16  # a longer way is no preprocessing inside the model
MIN_DIFFERENT_SAMPLES = 4  # twice as many if most samples are copies
MIN_PIXEL_SPREAD = 16  # of 255; an image whose pixels differ by less shows nothing
MIN_VALUES = 256  # inputs of fewer values may be equal, or nearly constant, by chance
MAX_CONSTANT_SPREAD = 1e-3  # share of the largest |x|; a constant with noise varies by less
MAX_UNIT_RATIO = 10.0  # times the spread of training, or deviations between means: another unit
MIN_UNIT_RATIO = 1 / 32  # times the spread of training: dark images vary little as well
MIN_MISFIT = 0.3  # distance from training; below it, other presets are not tried
MAX_FIT = 0.1  # distance from training at which a preset fits
MIN_FIT_RATIO = 10.0  # a preset that fits is nearer to training than the data by this factor
MAX_BIAS_RATIO = 30.0  # times the bias; real models lie between these two
MIN_BIAS_RATIO = 0.02
MIN_PIXEL_MAXIMUM = 64.0  # integers and colors with this maximum or more are not scaled
MAX_PRESET_OVERSHOOT = 0.1  # values may exceed the range of a preset by this
MIN_CHANNEL_VARIANCE = 1e-6  # times the median; channels with less were dead in training


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance per channel.

    Attributes:
        mean, variance: values per channel [C].
    """

    mean: Floats
    variance: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLayer:
    """The layer that reads the input.

    Attributes:
        model: the nodes from the input to `tensor`.
        tensor: output of the Conv, or input of the BatchNormalization.
        node: name of the BatchNormalization, or else of the Conv.
        training: training statistics; None without a BatchNormalization.
        bias: bias per channel of a Conv without BatchNormalization, or None.
    """

    model: onnx.ModelProto
    tensor: str
    node: str
    training: Moments | None = None
    bias: Floats | None = None


def find_first_layer(model: onnx.ModelProto, input_name: str) -> FirstLayer | None:
    """Return the first layer that reads an input; None if there is none that can be checked.

    A layer is a Conv, Gemm or BatchNormalization. Between the input and the layer there may only be
    nodes that scale, shift or move values. Weights in external data are not read.
    """
    # the path holds the nodes from the input on; `path.tensors` are the input and their outputs
    path = _InputPath(model, input_name)
    for node in path.graph.nodes:
        path_inputs = [tensor for tensor in dict.fromkeys(node.input) if tensor in path.tensors]
        if not path_inputs:
            continue
        if not is_standard(node):  # what an operator outside ONNX does is unknown
            return None
        if node.op_type in _LAYER_OPS and node.input[0] in path.tensors:
            return path.read_layer(node)
        if not _keeps_content(path.graph, node, path_inputs):
            return None
        path.nodes.append(node)
        path.tensors |= set(filter(None, node.output))
    return None


def _keeps_content(graph: Graph, node: onnx.NodeProto, path_inputs: list[str]) -> bool:
    """Whether a node only scales, shifts or moves the values of its inputs on the path."""
    parameters = set(filter(None, node.input)).difference(path_inputs)
    if node.op_type == "Concat":
        return not parameters
    if len(path_inputs) != 1 or not parameters <= graph.constants.keys():
        return False
    if node.op_type in _MOVING_OPS:
        return node.input[0] in path_inputs
    return node.op_type in _SCALING_OPS


class _InputPath:
    """The nodes from an input to its first layer, and the tensors that they compute."""

    def __init__(self, model: onnx.ModelProto, input_name: str) -> None:
        self.graph = Graph(model)
        self.model = model
        self.input_name = input_name
        self.nodes: list[onnx.NodeProto] = []
        self.tensors = {input_name}

    def read_layer(self, layer: onnx.NodeProto) -> FirstLayer | None:
        """Return the statistics that training left in the layer at the end of the path.

        They are those of a BatchNormalization, which is the layer or follows it, else the bias of a
        Conv. None if there is neither, or if other nodes read the path too.

        `layer`: a node of `_LAYER_OPS` that ONNX defines (`is_standard`).
        """
        if len(self.nodes) > MAX_NODES_BEFORE_LAYER or not self._is_only_reader(layer):
            return None
        if layer.op_type == "BatchNormalization":
            return self._read_norm(layer.input[0], layer)

        norm = self.graph.only_reader(layer.output[0])
        if norm is not None and norm.op_type == "BatchNormalization" and is_standard(norm):
            return self._read_norm(layer.output[0], norm)
        return self._read_bias(layer)

    def _is_only_reader(self, layer: onnx.NodeProto) -> bool:
        """Whether nothing but the path and its layer reads the tensors of the path."""
        reader_ids = {id(node) for node in (*self.nodes, layer)}
        for tensor in self.tensors:
            if self.graph.is_read_outside(tensor):
                return False
            if not reader_ids.issuperset(map(id, self.graph.readers.get(tensor, []))):
                return False
        return True

    def _read_norm(self, tensor: str, norm: onnx.NodeProto) -> FirstLayer | None:
        """Return a layer with the statistics of a BatchNormalization; None without their values.

        `tensor`: the input of the BatchNormalization.
        """
        mean = self._read_constant(norm.input[3])
        variance = self._read_constant(norm.input[4])
        if mean is None or variance is None or mean.shape != variance.shape:
            return None
        model = self._extract_model(tensor)
        if model is None:
            return None
        training = Moments(mean, variance)
        return FirstLayer(model=model, tensor=tensor, node=norm.name, training=training)

    def _read_bias(self, conv: onnx.NodeProto) -> FirstLayer | None:
        """Return a layer with the bias of a Conv; None without its values, and for other layers."""
        if conv.op_type != "Conv" or len(conv.input) < 3:
            return None
        bias = self._read_constant(conv.input[2])
        model = self._extract_model(conv.output[0])
        if model is None or bias is None:
            return None
        return FirstLayer(model=model, tensor=conv.output[0], node=conv.name, bias=bias)

    def _read_constant(self, name: str) -> Floats | None:
        tensor = self.graph.constants.get(name)
        if tensor is None or tensor.data_location == _EXTERNAL:
            return None
        return np.asarray(numpy_helper.to_array(tensor), np.float64).reshape(-1)

    def _extract_model(self, output: str) -> onnx.ModelProto | None:
        """Return a model of the path's nodes; None if a constant is in external data."""
        model = extract_output(self.model, output)
        graph = model.graph
        if any(tensor.data_location == _EXTERNAL for tensor in graph.initializer):
            return None
        replace_field(graph.input, [v for v in graph.input if v.name == self.input_name])
        # its constants are no inputs any more; the first versions of ONNX wanted them to be
        model.ir_version = max(model.ir_version, 7)
        name_nodes(graph)  # ONNX Runtime refuses duplicate names
        return model


def check_feed_inputs(subject: CalibrationSubject, feed: Feed) -> list[str]:
    """Return doubts about the inputs: `check_input_samples` of a few, and too few different ones.

    Raises:
        FeedError: a sample cannot be read.
        ModelError: the model's file changed since it was loaded.
    """
    samples = list(feed.spread_samples(max(1, PREVIEW_COUNT // feed.batch)))
    # cleaning folds BatchNormalizations
    model = subject.read_original() or subject.model
    doubts = check_input_samples(samples, feed.preprocess, model)
    doubts.extend(_check_variety(feed))
    return doubts


def _check_variety(feed: Feed) -> Iterator[str]:
    """Yield a doubt if too few samples of a feed are different."""
    distinct_count = feed.count - feed.duplicate_count
    min_count = MIN_DIFFERENT_SAMPLES
    if feed.duplicate_count >= distinct_count:  # most are copies
        min_count *= 2
    if distinct_count < min_count:
        things = "calibration samples"
        if distinct_count < feed.count:
            things = f"different {things}"
        yield f"{too_few(distinct_count, things)}; 100 or more would do"


def check_input_samples(
    samples: Samples, preprocess: Preprocess | None, model: onnx.ModelProto
) -> list[str]:
    """Return a warning on the first odd input, as a list of one sentence; empty if all are fine.

    Constant inputs, images of one colour, and values far from those in training are odd.

    Args:
        samples: a few samples; each is input name -> array.
        preprocess: how the images were prepared; None for arrays.
        model: the model before cleaning, with its BatchNormalizations.
    """
    inputs = _inputs_with_values(samples)
    images = [name for name, values in inputs.items() if layout_of(values[0]) is not None]
    constant_inputs = [name for name, values in inputs.items() if all(map(_is_constant, values))]
    # an input may be constant, such as the initial state of a recurrent model, which is 0 in every
    # sample; all images may not, nor all inputs of a model without images
    required_inputs = images or list(inputs)
    if required_inputs and set(required_inputs) <= set(constant_inputs):
        return [_constant_warning(inputs[required_inputs[0]])]

    for name, values in inputs.items():
        if name in constant_inputs:
            continue
        warning = ""
        if name in images and preprocess is not None:
            warning = _check_spread(values, preprocess)
        if not warning:
            warning = _check_layer(model, name, values, preprocess)
        if warning:
            return [warning]
    return []


def _inputs_with_values(samples: Samples) -> dict[str, list[Array]]:
    """Return the inputs to check: name -> arrays, one a sample.

    Scalars, and inputs that are empty in a sample, show nothing.
    """
    inputs = {}
    for name in samples[0] if samples else ():
        values = [sample[name] for sample in samples]
        if values[0].size > 1 and all(array.size for array in values):
            inputs[name] = values
    return inputs


def _is_constant(values: Array) -> bool:
    """Whether an array holds one value, or many values that hardly differ from it."""
    low, high = _extremes([values])
    if values.size < MIN_VALUES:
        return high - low <= 0
    return high - low <= MAX_CONSTANT_SPREAD * max(abs(low), abs(high))


def _check_spread(values: Sequence[Array], preprocess: Preprocess) -> str:
    """Return a warning on images of nearly one colour, or ""."""
    low, high = _extremes(values)
    if (high - low) * max(preprocess.std) / preprocess.scale >= MIN_PIXEL_SPREAD:
        return ""
    return (
        f"the pixels of {len(values)} images that were looked at differ by less than"
        f" {MIN_PIXEL_SPREAD} of 255, nearly one colour; check the images (of 16-bit color images"
        " only the upper byte is read)"
    )


def _constant_warning(values: Sequence[Array]) -> str:
    count = len(values)
    subject = f"each of {count} samples that were looked at" if count > 1 else "the sample"
    return (
        f"{subject} holds one value alone, such as"
        f" {float(np.ravel(values[0])[0]):g}; check the images and how they were made"
    )


def _check_layer(
    model: onnx.ModelProto, name: str, values: Sequence[Array], preprocess: Preprocess | None
) -> str:
    """Return a warning if the values of an input are unlike those in training; or "".

    The first layer that reads the input shows it, by its statistics or its bias.

    Args:
        model: the model before cleaning, with its BatchNormalizations.
        name: name of the input.
        values: the arrays of this input, one for each sample.
        preprocess: how the images were prepared that these arrays are; None for other arrays.
    """
    layer = find_first_layer(model, name)
    if layer is None:
        return ""
    try:
        with np.errstate(all="ignore"):  # an overflow gives no warning
            warning = _compare_with_layer(layer, name, values, preprocess)
    except BackendError:  # the layer cannot run alone
        return ""
    if not warning:
        return ""
    settings = (
        "--preprocess, --scale, --mean and --std" if preprocess else "how the arrays were made"
    )
    return f"{warning} ({layer.node or layer.tensor}); check {settings}"


def _compare_with_layer(
    layer: FirstLayer, name: str, values: Sequence[Array], preprocess: Preprocess | None
) -> str:
    """Return a warning if an input is unlike that in training, by what the layer holds; or ""."""
    session = OrtSession.open(layer.model, threads=1, spin=False)

    def measure(arrays: Iterable[Array]) -> Moments:
        return _moments(session.run({name: array})[layer.tensor] for array in arrays)

    if layer.training is not None:
        return _compare_with_training(layer.training, measure, values, preprocess)
    assert layer.bias is not None  # a layer has the one or the other
    return _compare_with_bias(layer.bias, measure(values), values)


def _compare_with_training(
    training: Moments,
    measure: Callable[[Iterable[Array]], Moments],
    values: Sequence[Array],
    preprocess: Preprocess | None,
) -> str:
    """Return a warning if the data is unlike that in training, by a BatchNormalization; or "".

    Args:
        training: mean and variance of each channel that the layer stored in training.
        measure: runs the model up to this layer; returns mean and variance of the layer's input.
        values: arrays of the model's input, one for each sample.
        preprocess: how they were prepared; None for arrays.
    """
    data = measure(values)
    if data.mean.shape != training.mean.shape or not (training.variance > 0).any():
        return ""

    # if the data is far from training, see whether another usual normalization brings it close
    distance = _median_divergence(data, training)
    if distance > MIN_MISFIT:
        # a normalization that is right makes the data both near to training and much nearer
        max_distance = min(MAX_FIT, distance / MIN_FIT_RATIO)
        current_preset = preprocess or _guess_preset(values)  # by which `values` are normalized
        for description, arrays in _normalize_by_presets(values, current_preset):
            if _median_divergence(measure(arrays), training) < max_distance:
                return (
                    f"the calibration data does not match the training data, but {description}"
                    " would, as the first BatchNormalization shows"
                )
    return _compare_units(data, training)


def _compare_units(data: Moments, training: Moments) -> str:
    """Return a warning if the data has another unit than the training data, such as 0..255; or "".

    In the same unit, even images of another kind have about the mean and the spread of the training
    data. Both are measured in standard deviations of training, for the median channel.

    Args:
        data: mean and variance of the data at the input of the first BatchNormalization.
        training: the same in training.
    """
    live_channels = _live_channels(training)  # mask of those that varied in training
    training_deviations = np.sqrt(training.variance[live_channels])
    offsets = np.abs(data.mean - training.mean)[live_channels] / training_deviations
    spreads = np.sqrt(data.variance[live_channels]) / training_deviations
    offset = float(np.median(offsets))
    spread = float(np.median(spreads))
    # a wrong unit moves the mean about as far as it spreads the values: one bound for both
    has_same_unit = MIN_UNIT_RATIO < spread < MAX_UNIT_RATIO and offset < MAX_UNIT_RATIO
    if has_same_unit or not np.isfinite(offset + spread):  # the median of no channel is NaN
        return ""
    return (
        "the calibration data has another unit than the training data: at the model's first"
        f" BatchNormalization the values spread {_format_ratio(spread)} times as far as in"
        f" training, their mean {_format_ratio(offset)} deviations off"
    )


def _compare_with_bias(bias: Floats, outputs: Moments, values: Sequence[Array]) -> str:
    """Return a warning if a Conv's outputs are far smaller or larger than its bias, or "".

    The bias was learned together with inputs in the unit of training. On such inputs, the Conv's
    outputs vary about as much as the bias is large.

    Args:
        bias: bias of each channel of the model's first Conv.
        outputs: moments of that Conv's outputs for the samples.
        values: arrays of the model's input, one for each sample.
    """
    bias_size = float(np.sqrt(np.mean(np.square(bias))))
    output_deviation = float(np.sqrt(np.mean(outputs.variance)))
    if bias_size == 0 or not np.isfinite(output_deviation):
        return ""
    ratio = output_deviation / bias_size
    is_image = values[0].ndim == 4
    if ratio < MIN_BIAS_RATIO and is_image:  # inputs that are no images may well be near zero
        return (
            "the calibration data is too small: the outputs of the model's first Conv"
            f" vary by {_format_ratio(ratio)} times the Conv's own bias"
        )

    # values are called too large only if they look unscaled, such as pixels of 0 to 255, and if
    # most models get such values scaled
    low, high = _extremes(values)
    has_small_values = max(-low, high) < MIN_PIXEL_MAXIMUM
    if ratio <= MAX_BIAS_RATIO or has_small_values or not _are_usually_scaled(values):
        return ""
    return (
        f"the calibration data are values of {low:.4g} to {high:.4g}; the model's first Conv makes"
        f" {_format_ratio(ratio)} times its own bias of them, like one trained on smaller values"
    )


def _are_usually_scaled(values: Sequence[Array]) -> bool:
    """Whether most models get such values scaled: integers, and images of pixels or in color."""
    if all(np.array_equal(array, np.rint(array)) for array in values):
        return True
    low, high = _extremes(values)
    has_pixel_range = low >= 0 and high <= 255
    return layout_of(values[0]) is not None and (has_pixel_range or _has_color(values[0]))


def _has_color(image: Array) -> bool:
    """Whether an array [N, C, H, W] or [N, H, W, C] has three channels."""
    return 3 in image.shape[1::2]


def _normalize_by_presets(
    values: Sequence[Array], source: Preprocess | None
) -> Iterator[tuple[str, Iterator[Array]]]:
    """Yield (mean and std as text, the images normalized by them) for each common normalization.

    The images are an iterator, to be read before the next normalization is asked for.

    Args:
        values: images, which are normalized already.
        source: how they are normalized; None if that is unknown: then nothing is yielded.
    """
    if source is None or not all(array.dtype.kind == "f" for array in values):
        return
    for preset in _PRESETS:
        # a preset fits if it has one mean and std for all channels, or one for each of the images'
        value_counts = {len(preset.mean), len(preset.std)}
        if value_counts <= {1, source.channels}:
            mean_text = _format_as_option(preset.mean, preset.scale)
            std_text = _format_as_option(preset.std, preset.scale)
            description = f"pixels / 255 with mean {mean_text} and std {std_text}"
            yield description, (renormalize(array, source, preset) for array in values)


def _guess_preset(values: Sequence[Array]) -> Preprocess | None:
    """Return the usual normalization that images were probably made by; None if none fits.

    It is the one with the narrowest range that contains all values. `_PRESETS` begins with the
    narrowest.
    """
    layout = layout_of(values[0])  # "nchw" or "nhwc"
    if layout is None:  # the values are not images
        return None
    low, high = _extremes(values)
    color = "rgb" if _has_color(values[0]) else "grey"
    for preset in _PRESETS:
        if color == "grey" and len(preset.mean) != 1:
            continue
        limits = []  # what the preset makes of a pixel of 0 and one of 255, for each channel
        for mean, std in zip(preset.mean, preset.std, strict=True):
            limits += [-mean / std, (255 * preset.scale - mean) / std]
        margin = MAX_PRESET_OVERSHOOT
        if min(limits) - margin <= low and high <= max(limits) + margin:
            return replace(preset, layout=layout, color=color)
    return None


def _extremes(values: Sequence[Array]) -> tuple[float, float]:
    low = min(float(array.min()) for array in values)
    high = max(float(array.max()) for array in values)
    return low, high


def _format_as_option(values: Sequence[float], scale: float) -> str:
    """Format means or deviations of pixels * scale for --mean and --std: those of pixels / 255."""
    return " ".join(f"{value / scale / 255:.4g}" for value in values)


def renormalize(array: Array, source: Preprocess, preset: Preprocess) -> Array:
    """Return images that were normalized by `source` as `preset` would have normalized them.

    A normalization is (pixel * scale - mean) / std. Red and blue are swapped if one of the two has
    the order RGB and the other BGR.
    """
    channel_axis = 1 if source.layout == "nchw" else 3
    shape = [1, 1, 1, 1]
    shape[channel_axis] = -1

    def by_channel(numbers: Sequence[float]) -> Floats:
        return np.asarray(numbers, np.float64).reshape(shape)

    pixels = (array * by_channel(source.std) + by_channel(source.mean)) / source.scale
    if {source.color, preset.color} == {"rgb", "bgr"}:
        pixels = np.flip(pixels, axis=channel_axis)
    values: Array = (pixels * preset.scale - by_channel(preset.mean)) / by_channel(preset.std)
    return values.astype(array.dtype)


def _moments(arrays: Iterable[Array]) -> Moments:
    """Return the mean and variance of each channel over all [1, C, ...] arrays together."""
    count = 0
    total = np.zeros(1)  # becomes an array [C], as `squares` does
    squares = np.zeros(1)
    for array in arrays:
        rows = np.moveaxis(array.astype(np.float64), 1, 0).reshape(array.shape[1], -1)
        count += rows.shape[1]
        total = total + rows.sum(axis=1)
        squares = squares + np.square(rows).sum(axis=1)
    mean = total / max(count, 1)
    return Moments(mean, np.maximum(squares / max(count, 1) - np.square(mean), 0))


def _live_channels(training: Moments) -> NDArray[np.bool_]:
    """Return a mask of the channels that varied in training."""
    variance = training.variance
    mask: NDArray[np.bool_] = variance > MIN_CHANNEL_VARIANCE * np.median(variance[variance > 0])
    return mask


def _format_ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _median_divergence(data: Moments, training: Moments) -> float:
    """Return the median over the channels of the Kullback-Leibler divergence.

    Of two normal distributions, that of the data from that of the training (the module's formula).
    """
    live = _live_channels(training)
    variance = training.variance[live]
    ratio = np.maximum(data.variance[live] / variance, 1e-12)
    offset = np.square(data.mean[live] - training.mean[live]) / variance
    return float(np.median(ratio + offset - 1 - np.log(ratio)) / 2)
