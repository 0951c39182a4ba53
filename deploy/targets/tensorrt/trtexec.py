"""The `trtexec` command lines that build an engine on a GPU machine from the files of a build.

What each TensorRT reads and runs: one row a version from which something is otherwise.

Sources: docs/operators.md of onnx-tensorrt (8.0 to 10.1, 10.15, 11.2) for opsets and operators,
where versions between two rows are taken to read what the older one does; its importers (8.6 to
10.0) for 9, which says opset 19 but reads neither the axes of a Reduce-18 nor the number of parts
of a Split-18; TensorRT's release notes and NvInfer.h for strong typing, calibrators and FP8 (matrix
products alone had it before 10.2).
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration.trt_cache import version_label
from deploy.frontends.checks import opset_of
from deploy.graph.index import all_nodes
from deploy.targets.tensorrt.trt_options import (
    BF16,
    CACHE,
    FLOAT,
    FP8,
    FP16,
    FP32,
    INT8,
    QDQ,
    TYPED,
)

if TYPE_CHECKING:
    import onnx

    from deploy.targets.base import BuildRequest


@dataclass(frozen=True, slots=True)
class Row:
    """TensorRT from a version on.

    Attributes:
        since: first version.
        opset: the newest that its ONNX parser reads.
        calibrators: whether it has int8 calibrators and reads their caches.
        typed: whether it has strongly typed networks.
        fp8: whether it has FP8 convolutions, in such networks.
    """

    since: str
    opset: int
    calibrators: bool
    typed: bool
    fp8: bool = False


ROWS = (
    Row("8.0.0", 13, calibrators=True, typed=False),
    Row("8.4.0", 17, calibrators=True, typed=False),
    Row("10.0.0", 20, calibrators=True, typed=True),
    Row("10.2.0", 20, calibrators=True, typed=True, fp8=True),
    Row("10.15.0", 24, calibrators=True, typed=True, fp8=True),
    Row("11.0.0", 24, calibrators=False, typed=True, fp8=True),
)
# First version -> operators of its opset, or of an older one, that none before it reads. What 10.1
# does not read is taken to be unread until 10.15, of which no list of operators was at hand.
_NEW = {
    "8.2.0": "Einsum GatherND IsNaN Round Scatter ScatterElements ScatterND Sign",
    "8.4.0": "HardSwish RandomNormal RandomNormalLike Reciprocal Shrink Xor",
    "8.5.0": "GridSample MeanVarianceNormalization Mod NonMaxSuppression NonZero OneHot RoiAlign"
    " Trilu",
    "8.6.0": "GroupNormalization IsInf LayerNormalization",
    "9.3.0": "CastLike Hardmax",
    "10.0.0": "Gelu Mish",
    "10.1.0": "DeformConv",
    "10.15.0": "AffineGrid Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor"
    " BlackmanWindow CenterCropPad Col2Im Compress ConcatFromSequence ConvInteger DFT Det"
    " DynamicQuantizeLinear HammingWindow HannWindow ImageDecoder MatMulInteger MaxRoiPool"
    " MaxUnpool MelWeightMatrix Multinomial NegativeLogLikelihoodLoss Optional OptionalGetElement"
    " OptionalHasElement QLinearConv QLinearMatMul RegexFullMatch STFT SequenceAt"
    " SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap"
    " SoftmaxCrossEntropyLoss SplitToSequence StringConcat StringNormalizer StringSplit"
    " TfIdfVectorizer Unique",
}


def row(version: str) -> Row:
    """What TensorRT X.Y.Z reads and runs; of an older one than the table has, its first row.

    Raises:
        CacheError: the version does not read X.Y.Z.
    """
    label = version_label(version)
    reached = [one for one in ROWS if version_label(one.since) <= label]
    return reached[-1] if reached else ROWS[0]


def unread(version: str) -> frozenset[str]:
    """Operators that the parser of TensorRT X.Y.Z does not read although its opset may have them.

    Raises:
        CacheError: the version does not read X.Y.Z.
    """
    label = version_label(version)
    later = (names for since, names in _NEW.items() if version_label(since) > label)
    return frozenset(name for names in later for name in names.split())


@dataclass(frozen=True, slots=True)
class Needs:
    """What a parser must know to read a model.

    Attributes:
        opset: of the default domain.
        operators: of that domain; plugins are not judged.
    """

    opset: int
    operators: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: onnx.ModelProto) -> Needs:
        """Those of a model, the graphs in its nodes included."""
        standard = (n.op_type for n in all_nodes(model.graph) if n.domain in ("", "ai.onnx"))
        return cls(opset_of(model), frozenset(standard))

    def unmet(self, version: str) -> str:
        """Why TensorRT X.Y.Z does not read the model; "" where it does."""
        most = row(version).opset
        if self.opset > most:
            return f"it reads opset {most} at most, got {self.opset}"
        missing = sorted(self.operators & unread(version))
        return f"it does not read {', '.join(missing)}" if missing else ""

    def first_reading(self, *, typed: bool = False, fp8: bool = False) -> str | None:
        """The first version whose parser reads the model, and that has what is asked; or None."""
        known: Collection[str] = {*(one.since for one in ROWS), *_NEW}
        able = (
            version
            for version in sorted(known, key=version_label)
            if (row(version).typed or not typed) and (row(version).fp8 or not fp8)
        )
        return next((version for version in able if not self.unmet(version)), None)


_LAST = "11.0.0"  # no flag of its trtexec chooses types any more
_FP8_GPU = "on a GPU of Ada, Hopper or later, "
_OLDEST = {FP16: "8.5.0", FP32: "8.5.0", BF16: "9.0.0"}  # that knows the type, and is meant here


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the engine.

    Attributes:
        name: what the script calls it.
        when: for which TensorRT it is.
        words: the command line; none where no TensorRT goes this way, and `when` says why.
    """

    name: str
    when: str
    words: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """One line for the user; shlex, since names of files and tensors must not run."""
        return f"{self.when}: {shlex.join(self.words)}" if self.words else self.when


def ways(
    request: BuildRequest,
    files: Mapping[str, Path],
    needs: Mapping[str, Needs],
    version: str,
    *,
    rest: str = FP16,
    precision: str = INT8,
    wide: Collection[str] = (),
) -> tuple[Way, ...]:
    """How the engine is built on a GPU machine with these files.

    A line that a TensorRT could not follow is not given, but why it cannot.

    Args:
        request: what was built.
        files: role -> path.
        needs: role of a model -> what its parser must know.
        version: TensorRT that the cache is for, "X.Y.Z".
        rest: type of what is not int8.
        precision: int8 or fp8.
        wide: nodes that must compute in float32, where TensorRT chooses the types.
    """
    strong = _strong(request, files, needs, precision)
    if precision == FP8 or not row(version).calibrators:
        return strong
    weak = _weak(request, files, needs[QDQ], rest, wide)
    return (_implicit(request, files, needs[FLOAT], version, rest, wide), *weak, *strong)


def on_machine(
    found: Sequence[Way], *, device: int = 0, plugins: Sequence[Path] = ()
) -> tuple[Way, ...]:
    """The same on a GPU other than the first, and with libraries of plugins.

    `--plugins` is deprecated since 8.6 and read by every trtexec, its successor by none before.
    """
    own = [f"--device={device}"] if device else []
    own += [f"--plugins={path.resolve()}" for path in plugins]
    return tuple(replace(way, words=(*way.words, *own)) if way.words else way for way in found)


def script(found: Sequence[Way]) -> str:
    """What a shell script does that goes the way which its argument names."""
    usable = [way for way in found if way.words]
    usage = "".join(f"echo '  {way.name}: {way.when}' >&2\n    " for way in usable)
    cases = "".join(f"  {way.name}) exec {shlex.join(way.words)} ;;\n" for way in usable)
    return (
        f'# Builds the engine with the trtexec on the PATH.\ncase "${{1-}}" in\n{cases}'
        f"  *) echo 'give one of these:' >&2\n    {usage}exit 2 ;;\nesac"
    )


def _implicit(
    request: BuildRequest,
    files: Mapping[str, Path],
    needs: Needs,
    version: str,
    rest: str,
    wide: Collection[str],
) -> Way:
    """From the float model and the cache."""
    unmet = needs.unmet(version)
    if unmet:
        return Way("cache", f"TensorRT {version} cannot read {files[FLOAT].name}: {unmet}")
    types = ["--int8", *_float_types(rest), f"--calib={files[CACHE].name}"]
    kept = dict.fromkeys(float_layers(request), rest)
    words = _line(request, files[FLOAT], [*types, *_precision_words(kept, wide)])
    return Way("cache", f"on a GPU machine with TensorRT {version}", words)


def _weak(
    request: BuildRequest,
    files: Mapping[str, Path],
    needs: Needs,
    rest: str,
    wide: Collection[str],
) -> tuple[Way, ...]:
    """From the Q/DQ model, in the types that TensorRT chooses."""
    since = needs.first_reading()
    if since is None or version_label(since) >= version_label(_LAST):
        return ()
    oldest = max(since, _OLDEST[rest], key=version_label)
    pairs = "QuantizeLinear" in needs.operators  # without one trtexec makes ranges up for --int8
    int8 = ["--int8"] if pairs else []
    types = [*int8, *_float_types(rest), *_precision_words({}, wide)]
    words = _line(request, files[QDQ], types)
    return (Way("qdq", _until_10(oldest), words),)


def _strong(
    request: BuildRequest, files: Mapping[str, Path], needs: Mapping[str, Needs], precision: str
) -> tuple[Way, ...]:
    """In the types of the model."""
    role, fp8 = TYPED if TYPED in files else QDQ, precision == FP8
    path, where = files[role], _FP8_GPU if fp8 else ""
    since = needs[role].first_reading(typed=True, fp8=fp8)
    if since is None:
        opset = needs[role].opset
        why = f"no TensorRT reads opset {opset} of {path.name}: export with an older one"
        return (Way("typed", why),)
    last = Way("11", f"{where}with TensorRT 11", _line(request, path, []))
    if version_label(since) >= version_label(_LAST):
        return (last,)
    words = _line(request, path, ["--stronglyTyped"])
    return Way("typed", where + _until_10(since), words), last


def _line(request: BuildRequest, model: Path, words: Sequence[str]) -> tuple[str, ...]:
    shapes, save = _shape_words(request), f"--saveEngine={request.name}.engine"
    return ("trtexec", f"--onnx={model.name}", *words, *shapes, save)


def _float_types(rest: str) -> list[str]:
    return [] if rest == FP32 else [f"--{rest}"]


def _until_10(since: str) -> str:
    """In words, every TensorRT from this one to the last that has flags for types."""
    major, minor, _ = since.split(".")
    if major != "10":
        return f"with any TensorRT from {major}.{minor} to 10"
    return "with TensorRT 10" if minor == "0" else f"with TensorRT 10 from 10.{minor} on"


def float_layers(request: BuildRequest) -> dict[str, str]:
    """Nodes to keep in float that could run in int8 otherwise -> the first tensor that each gives.

    A node of whole numbers, or one that has no int8 form, needs no word to stay as it is.
    """
    from deploy.graph.index import Graph

    graph = Graph(request.model)
    kept = set(request.float_nodes)
    return {
        node.name: node.output[0]
        for node in graph.nodes
        if node.name in kept and node.op_type != "Constant" and graph.is_float(node.output[0])
    }


def _precision_words(kept: Mapping[str, str], wide: Collection[str]) -> list[str]:
    """Types of nodes: those kept in float, and of what must be float32 that of its outputs too."""
    types = {**kept, **dict.fromkeys(wide, FP32)}
    if not types:
        return []
    words = [f"--layerPrecisions={_listed(types)}", "--precisionConstraints=obey"]
    outputs = [f"--layerOutputTypes={_listed(dict.fromkeys(wide, FP32))}"] if wide else []
    return [*words, *outputs]


def _listed(types: Mapping[str, str]) -> str:
    return ",".join(f"{name}:{kind}" for name, kind in types.items())


def _shape_words(request: BuildRequest) -> list[str]:
    """`--shapes=...` where an input is dynamic; every size of the samples where these vary."""
    from deploy.graph.index import dims, fed_inputs
    from deploy.targets.spans import span_of

    dynamic = [
        value.name
        for value in fed_inputs(request.model.graph)
        if not all(isinstance(size, int) for size in dims(value) or ())
    ]
    if not dynamic:
        return []
    span = span_of(request)
    if not span.varies:
        return [f"--shapes={_shaped(dynamic, span.usual)}"]
    sides = {"min": span.least, "opt": span.usual, "max": span.most}
    return [f"--{side}Shapes={_shaped(dynamic, shapes)}" for side, shapes in sides.items()]


def _shaped(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, shapes[name]))}" for name in names)
