"""The calibration cache that TensorRT itself would write, made on any machine.

The model is run by ONNX Runtime on the CPU with its BatchNormalization nodes left alone, since
TensorRT calibrates before fusion, and every tensor that TensorRT's parser names is observed. Two
range rules::

    TensorRT's     the first calibration batch sets each tensor's range, which then only doubles:
                   the scales depend on the batch size and on the order of the images
    independent    the range is a power of two that holds all data: neither matters

What TensorRT does is established for entropy2 (tables reproduced index by index) and minmax (its
input scales); for the legacy calibrator only its format is, so its threshold is the quantile of
|x| that its header states, without the regression. The first entropy calibrator is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from calibrators import ACTIVATION
from calibrators.histogram import Histogram
from calibrators.percentile import DEFAULT_PERCENT, percentile
from calibrators.statistics import Statistics
from deploy.calibration import trt_cache
from deploy.errors import CalibrationError, ConfigError
from deploy.graph.edit import copied, replace_nodes
from deploy.targets.tensorrt.naming import CacheTensor, cache_tensors, likely_parser, scale_owners

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Array

Samples = Callable[[], Iterable[Mapping[str, "Array"]]]
QUANTILE = 0.999999  # of the legacy calibrator, as in the table that comes with TensorRT 6

# Our word -> the algorithm in the cache's header. TensorRT has no percentile or MSE calibrator; it
# takes their scales under the name of the one that `trtexec --calib` reads.
ALGORITHMS = {
    "entropy": trt_cache.ENTROPY2,
    "minmax": trt_cache.MINMAX,
    "legacy": trt_cache.LEGACY,
    "percentile": trt_cache.ENTROPY2,
    "mse": trt_cache.ENTROPY2,
}


@dataclass(frozen=True, slots=True)
class TensorrtCalibration:
    """A cache made without TensorRT, and what it was made from.

    Attributes:
        cache: ready to be written.
        statistics: the histograms, by ONNX tensor.
        notes: what the user should know, in sentences.
    """

    cache: trt_cache.CalibrationCache
    statistics: Statistics
    notes: tuple[str, ...]


def calibrate(
    model: onnx.ModelProto,
    samples: Samples,
    *,
    version: str,
    method: str = "entropy",
    batch_size: int | None,
    original: onnx.ModelProto | None = None,
    parser: str | None = None,
    percent: float = DEFAULT_PERCENT,
    threads: int = 2,
    progress: Callable[[], None] = lambda: None,
) -> TensorrtCalibration:
    """Run the model over the samples and give the cache of TensorRT `version`.

    Args:
        model: cleaned, with its BatchNormalization nodes (`load(..., fold_batchnorm=False)`).
        samples: a fresh pass over {input: array} with each call.
        version: "X.Y.Z", which decides the header and some names.
        method: one of ALGORITHMS; "entropy", "minmax" and "legacy" are TensorRT's.
        batch_size: samples in TensorRT's calibration batch, whose rule is then followed; None
            for the order-independent range.
        original: the model as TensorRT reads it (see `naming.cache_tensors`).
        parser: naming.ONNX, naming.CAFFE, or None to decide by the model.
        percent: of the method "percentile".
        threads: worker threads of the order-independent pass.
        progress: called after every sample.

    Raises:
        ConfigError: an unknown method, or a batch size below 1.
        CalibrationError, FeedError, BackendError: as `deploy.calibration.observe.observe`.
    """
    if method not in ALGORITHMS:
        raise ConfigError(
            f"a TensorRT cache is made by {', '.join(ALGORITHMS)}, got {method!r};"
            " choose one of them with --method"
        )
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"a calibration batch holds 1 sample or more, got {batch_size}")
    wanted = cache_tensors(model, version=version, parser=parser, original=original)
    tapped = split_gemms(model, wanted)
    sources = list(dict.fromkeys(t.source for t in wanted if t.shares is None))
    statistics = _observe(tapped, sources, samples, method, batch_size, threads, progress)
    cache = to_cache(wanted, statistics, version=version, method=method, percent=percent)
    used = parser or likely_parser(original if original is not None else model, version)
    return TensorrtCalibration(cache, statistics, _notes(cache, statistics, used))


def to_cache(
    wanted: Iterable[CacheTensor],
    statistics: Statistics,
    *,
    version: str,
    method: str,
    percent: float = DEFAULT_PERCENT,
) -> trt_cache.CalibrationCache:
    """Search every tensor and write its scale; the output of a pool gets that of its input."""
    found = {name: _scale(h, method, percent) for name, h in statistics.items()}
    owners = scale_owners(wanted)
    scales = {name: found[owner] for name, owner in owners.items() if owner in found}
    return trt_cache.from_scales(
        scales, version=version, algorithm=ALGORITHMS[method], quantile=QUANTILE
    )


def split_gemms(model: onnx.ModelProto, wanted: Iterable[CacheTensor]) -> onnx.ModelProto:
    """The model with each Gemm whose product is wanted as Gemm and Add; else the model itself."""
    from onnx import helper

    names = {t.source for t in wanted}
    made = {name for node in model.graph.node for name in node.output}
    inputs = {value.name for value in model.graph.input}
    missing = names - made - inputs
    if not missing:
        return model
    split = copied(model)
    nodes = []
    # `cache_tensors` lists a product right before its Gemm's output, in the network's order.
    product_of = _products(wanted, missing)
    for node in split.graph.node:
        nodes.append(node)
        product = product_of.get(node.output[0])
        if product is not None:
            bias, out = node.input.pop(), node.output[0]
            node.output[0] = product
            nodes.append(helper.make_node("Add", [product, bias], [out], name=f"{node.name}/bias"))
    replace_nodes(split.graph, nodes)
    return split


def _products(wanted: Iterable[CacheTensor], missing: set[str]) -> dict[str, str]:
    tensors = list(wanted)
    return {
        after.source: tensor.source
        for tensor, after in pairwise(tensors)
        if tensor.source in missing
    }


def _observe(
    model: onnx.ModelProto,
    sources: list[str],
    samples: Samples,
    method: str,
    batch_size: int | None,
    threads: int,
    progress: Callable[[], None],
) -> Statistics:
    from deploy.calibration.observe import observe, observe_by_batches

    if batch_size is None or method != "entropy":  # only the entropy search looks at the range
        return observe(model, sources, samples(), threads=threads, progress=progress)
    return observe_by_batches(model, sources, samples, batch_size=batch_size, progress=progress)


def _scale(histogram: Histogram, method: str, percent: float) -> np.float32:
    """Scale of one tensor; zero where it was always zero, infinite where it held infinity."""
    if histogram.infinite:
        return np.float32(np.inf)
    if histogram.total == 0:
        raise CalibrationError("a tensor without values has no scale; feed at least one sample")
    if histogram.amax == 0:
        return np.float32(0)
    if method in ("legacy", "percentile"):
        kept = QUANTILE * 100 if method == "legacy" else percent
        return percentile(histogram, percent=kept).symmetric
    return ACTIVATION[method](histogram).symmetric


def _notes(
    cache: trt_cache.CalibrationCache, statistics: Statistics, parser: str
) -> tuple[str, ...]:
    notes = []
    if parser == "caffe":
        notes.append("Tensors are named as TensorRT's Caffe parser names them.")
    infinite = [name for name, histogram in statistics.items() if histogram.infinite]
    if infinite:
        notes.append(
            f"{len(infinite)} tensors held infinity ({', '.join(infinite[:3])}); TensorRT leaves"
            " such tensors in float."
        )
    if cache.header.algorithm == trt_cache.LEGACY:
        notes.append(
            "Of the legacy calibrator the quantile is applied, its regression is not known."
        )
    return tuple(notes)
