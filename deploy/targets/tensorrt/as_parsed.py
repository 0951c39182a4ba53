"""What TensorRT's own calibrators see: the model as its parser reads it, by its range rule.

The model is run by ONNX Runtime on the CPU with its BatchNormalization nodes left alone, since
TensorRT calibrates before fusion, and every tensor that TensorRT's parser names is observed. Two
methods do as it does::

    entropy-tensorrt    the first calibration batch sets each tensor's range, which then only
                        doubles: the scales depend on the batch size and the order of the images
    legacy              the quantile of |x| that the legacy form's header states

What TensorRT does is established for entropy (tables reproduced index by index); for the legacy
calibrator only its format is, so its regression is left out. Every other method looks at the
cleaned model, whose tensors keep their names, and so shares its observations with other targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from calibrators.legacy import QUANTILE
from deploy.calibration import DEFAULT_TRT_VERSION, trt_cache
from deploy.calibration.batches import left_out
from deploy.calibration.observation import Observation, Observed, Variant
from deploy.calibration.subject import Subject
from deploy.errors import ExportError
from deploy.graph.edit import copied, replace_nodes
from deploy.targets.tensorrt.naming import (
    CAFFE,
    CacheTensor,
    cache_tensors,
    likely_parser,
    scale_owners,
)

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.found import Found

# Method -> the calibrator in the cache's header. TensorRT has no percentile or MSE calibrator; it
# takes their scales under the name of the one that `trtexec --calib` reads.
ALGORITHMS = {"minmax": trt_cache.MINMAX, "legacy": trt_cache.LEGACY}
AS_PARSED = frozenset({"entropy-tensorrt", "legacy"})


def version_of(subject: Subject) -> str:
    """TensorRT that is to read the cache."""
    return subject.trt_version or DEFAULT_TRT_VERSION


def observations(subject: Subject, parser: str | None) -> tuple[Observation, ...] | None:
    """What a method of TensorRT's own observes; None for every other method.

    Raises:
        ConfigError: the model was given in memory, already cleaned.
    """
    if subject.method.name not in AS_PARSED:
        return None
    wanted = entries(subject, parser)
    apart = products(wanted, subject.unfolded.model)
    key = "as TensorRT reads it" + (", Gemm products apart" if apart else "")

    def make(_: Observed) -> onnx.ModelProto:
        return split_gemms(subject.unfolded.model, apart)

    variant = Variant(key, make)
    sources = dict.fromkeys(t.source for t in wanted if t.shares is None)
    return tuple(Observation(variant, source, subject.statistic) for source in sources)


def entries(subject: Subject, parser: str | None) -> list[CacheTensor]:
    """The entries of the cache that TensorRT would write for the file, in order."""
    own = subject.method.name in AS_PARSED
    original = subject.original
    model = subject.unfolded.model if own else subject.model
    return cache_tensors(model, version=version_of(subject), parser=parser, original=original)


def refuse_names(model: onnx.ModelProto) -> None:
    """Refuse a model that TensorRT's cache cannot tell of, before anything is observed.

    Raises:
        ExportError: a tensor's name that no line can hold.
    """
    names = [name for node in model.graph.node for name in node.output if name]
    for name in (*(value.name for value in model.graph.input), *names):
        if not trt_cache.holds(name):
            raise ExportError(
                f"TensorRT's cache holds one line a tensor, so a name has no line break, got"
                f" {name!r}; rename the tensor in the model, or leave the target away"
            )


def text(subject: Subject, found: Found, parser: str | None) -> bytes:
    """TensorRT's cache for the file; the output of a pool gets the scale of its input."""
    scales = found.symmetric
    owners = scale_owners(entries(subject, parser))
    cache = trt_cache.from_scales(
        {name: scales[owner] for name, owner in owners.items() if owner in scales},
        version=version_of(subject),
        algorithm=ALGORITHMS.get(subject.method.name, trt_cache.ENTROPY2),
        quantile=QUANTILE,
    )
    return trt_cache.dump(cache)


def notes(subject: Subject, found: Found, parser: str | None) -> tuple[str, ...]:
    """What the reader of the cache should know."""
    said = []
    original = subject.original
    if (parser or likely_parser(original or subject.model, version_of(subject))) == CAFFE:
        said.append("Tensors are named as TensorRT's Caffe parser names them.")
    if subject.statistic.first:
        said.extend(left_out(subject.samples, subject.statistic.first, filled=subject.filled))
    infinite = [name for name, trouble in found.troubles.items() if trouble.infinite]
    if infinite:
        said.append(
            f"{len(infinite)} tensors held infinity ({', '.join(infinite[:3])}); TensorRT leaves"
            " such tensors in float."
        )
    if subject.method.name == "legacy":
        said.append(
            "Of the legacy calibrator the quantile is applied, its regression is not known."
        )
    return tuple(said)


def products(wanted: Iterable[CacheTensor], model: onnx.ModelProto) -> dict[str, str]:
    """Output of a Gemm -> the name of its product before the bias, where that is wanted.

    `cache_tensors` lists a product right before its Gemm's output, in the network's order.
    """
    tensors = list(wanted)
    made = {name for node in model.graph.node for name in node.output}
    missing = {t.source for t in tensors} - made - {value.name for value in model.graph.input}
    pairs = pairwise(tensors)
    return {after.source: tensor.source for tensor, after in pairs if tensor.source in missing}


def split_gemms(model: onnx.ModelProto, apart: Mapping[str, str]) -> onnx.ModelProto:
    """The model with each Gemm of `apart` (see `products`) as Gemm and Add; else the model."""
    from onnx import helper

    if not apart:
        return model
    split = copied(model)
    nodes = []
    for node in split.graph.node:
        nodes.append(node)
        product = apart.get(node.output[0])
        if product is not None:
            bias, out = node.input.pop(), node.output[0]
            node.output[0] = product
            nodes.append(helper.make_node("Add", [product, bias], [out], name=f"{node.name}/bias"))
    replace_nodes(split.graph, nodes)
    return split
