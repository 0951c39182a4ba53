"""The `trtexec` commands that build an engine on a GPU machine, and what each TensorRT supports.

`FEATURES` has one row per version in which the supported opset or features change. A version
between two rows counts as the older one.

Sources: docs/operators.md of onnx-tensorrt (8.0 to 10.1, 10.15, 11.2) for opsets and operators; its
importers (8.6 to 10.0) for 9, which claims opset 19 but supports neither the axes input of
Reduce-18 nor num_outputs of Split-18; TensorRT's release notes and NvInfer.h for strong typing,
calibrators and FP8 (before 10.2 only for matrix products).
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from deploy.calibration.trt_cache import version_label
from deploy.graph.index import Graph, all_nodes, dims, opset_of, runtime_inputs
from deploy.targets.base import BuildRequest
from deploy.targets.shape_ranges import sample_shape_range
from deploy.targets.tensorrt.builder import profiles_for
from deploy.targets.tensorrt.trt_options import (
    BF16,
    CACHE,
    FLOAT,
    FP8,
    FP16,
    FP32,
    QDQ,
    TYPED,
    TensorrtOptions,
)


@dataclass(frozen=True, slots=True)
class TensorrtFeatures:
    """Features of TensorRT from a version on."""

    since: str
    opset: int
    calibrators: bool  # whether it has int8 calibrators and reads their caches
    typed: bool
    fp8: bool = False  # whether strongly typed networks can have FP8 convolutions
    dla: bool = False  # whether strongly typed networks run on DLA


FEATURES = (
    TensorrtFeatures("8.0.0", 13, calibrators=True, typed=False),
    TensorrtFeatures("8.4.0", 17, calibrators=True, typed=False),
    TensorrtFeatures("10.0.0", 20, calibrators=True, typed=True),
    TensorrtFeatures("10.2.0", 20, calibrators=True, typed=True, fp8=True),
    TensorrtFeatures("10.15.0", 24, calibrators=True, typed=True, fp8=True),
    TensorrtFeatures("11.0.0", 24, calibrators=False, typed=True, fp8=True),
    TensorrtFeatures("11.4.1", 24, calibrators=False, typed=True, fp8=True, dla=True),
    TensorrtFeatures("11.5.0", 25, calibrators=False, typed=True, fp8=True, dla=True),
)
# Version -> operators that its parser reads and older ones do not. No list was available between
# 10.1 and 10.15, so operators that 10.1 does not read count as unsupported until 10.15.
_NEW_OPERATORS = {
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


def features_of(version: str) -> TensorrtFeatures:
    """Return the features of TensorRT X.Y.Z; the first row for versions older than the table.

    Raises:
        CacheError: the version is not of the form X.Y.Z.
    """
    label = version_label(version)
    reached = [one for one in FEATURES if version_label(one.since) <= label]
    return reached[-1] if reached else FEATURES[0]


def unsupported_operators(version: str) -> frozenset[str]:
    """Return the operators within its opset that the parser of TensorRT X.Y.Z does not read.

    Raises:
        CacheError: the version is not of the form X.Y.Z.
    """
    label = version_label(version)
    later = (names for since, names in _NEW_OPERATORS.items() if version_label(since) > label)
    return frozenset(name for names in later for name in names.split())


@dataclass(frozen=True, slots=True)
class ParserRequirements:
    """Opset and operators that a parser must support to read a model."""

    opset: int  # of the default domain
    operators: frozenset[str] = frozenset()  # operators of the default domain; plugins are ignored

    @classmethod
    def of(cls, model: onnx.ModelProto) -> ParserRequirements:
        """Return the requirements of a model, including its subgraphs."""
        standard = (n.op_type for n in all_nodes(model.graph) if n.domain in ("", "ai.onnx"))
        return cls(opset_of(model), frozenset(standard))

    def unmet(self, version: str) -> str:
        """Return why TensorRT X.Y.Z cannot read the model, or ""."""
        newest = features_of(version).opset
        if self.opset > newest:
            return f"it reads opset {newest} at most, got {self.opset}"
        missing = sorted(self.operators & unsupported_operators(version))
        return f"it does not read {', '.join(missing)}" if missing else ""

    def first_reading(self, *features: str) -> str | None:
        """Return the first version that reads the model and has these features, or None.

        `features`: boolean fields of `TensorrtFeatures`.
        """
        listed: Collection[str] = {*(one.since for one in FEATURES), *_NEW_OPERATORS}
        candidates = (
            version
            for version in sorted(listed, key=version_label)
            if all(getattr(features_of(version), name) for name in features)
        )
        return next((version for version in candidates if not self.unmet(version)), None)


_TYPED_ONLY = "11.0.0"  # first version whose trtexec has no precision flags
_WHERE = {
    "fp8": "on a GPU of Ada, Hopper or later, ",
    "dla": "on a Jetson AGX Orin (JetPack 7.2.2 or newer) ",
}
_DLA_FLAGS = ("--useDLACore=0", "--allowGPUFallback")
_NO_DLA = "10.8.0"  # first version whose DLA takes no cache: there is none again until 11.4.1
_OLDEST = {FP16: "8.5.0", FP32: "8.5.0", BF16: "9.0.0"}  # first supported version with the type


@dataclass(frozen=True, slots=True)
class TrtexecCommand:
    """One trtexec command that builds the engine."""

    name: str
    when: str  # the TensorRT versions that it is for
    # the command line; empty if no TensorRT can build it, then `when` says why
    words: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """One line for the user; quoted, so that file and tensor names cannot run as commands."""
        return f"{self.when}: {shlex.join(self.words)}" if self.words else self.when


def trtexec_commands(
    options: TensorrtOptions,
    request: BuildRequest,
    files: Mapping[str, Path],
    models: Mapping[str, onnx.ModelProto],
    version: str,
    wide: Collection[str],
) -> tuple[TrtexecCommand, ...]:
    """Return the commands that build the engine on a GPU machine with these files.

    `files`: role -> path. `models`: role -> the model in that file. `version`: TensorRT that the
    cache is for, "X.Y.Z". `wide`: nodes that must run in float32 if TensorRT chooses the types. For
    DLA the typed model runs on core 0, as does the float model with the cache up to 10.7.
    """
    needs = {role: ParserRequirements.of(model) for role, model in models.items()}
    commands, dla = _strongly_typed(files, needs, options.features), options.dla
    implicit = version_label(version) < version_label(_NO_DLA)
    if not dla:
        implicit = options.precision != FP8 and features_of(version).calibrators
    if implicit:
        weak = () if dla else _weakly_typed(files, needs[QDQ], options.rest, wide)
        own = _implicit(request, files, needs[FLOAT], version, options.rest, wide)
        commands = (own, *weak, *commands)
    timing_cache = options.timing_cache
    flags = [
        *(_DLA_FLAGS if dla else ()),
        *_shape_flags(request, options.max_batch, dla=dla),
        f"--saveEngine={request.name}.engine",
        *([f"--device={options.device}"] if options.device else []),
        # deprecated since 8.6, but every trtexec reads it, unlike its successor
        *(f"--plugins={path.resolve()}" for path in options.plugins),
        *([] if timing_cache is None else [f"--timingCacheFile={timing_cache.resolve()}"]),
        *options.trtexec_flags,
    ]
    return tuple(replace(way, words=(*way.words, *flags)) if way.words else way for way in commands)


def trtexec_script(commands: Sequence[TrtexecCommand]) -> str:
    """Return the body of a shell script that runs the command it is given, by default the first."""
    usable = [way for way in commands if way.words]
    names = [f"''|{way.name}" for way in usable[:1]] + [way.name for way in usable[1:]]
    usage = "".join(f"echo '  {way.name}: {way.when}' >&2\n    " for way in usable)
    pairs = zip(names, usable, strict=True)
    cases = "".join(f"  {name}) exec {shlex.join(way.words)} ;;\n" for name, way in pairs)
    return (
        f'# Builds the engine with the trtexec on the PATH.\ncase "${{1-}}" in\n{cases}'
        f"  *) echo 'give one of these:' >&2\n    {usage}exit 2 ;;\nesac"
    )


def _implicit(
    request: BuildRequest,
    files: Mapping[str, Path],
    needs: ParserRequirements,
    version: str,
    rest: str,
    wide: Collection[str],
) -> TrtexecCommand:
    """Build from the float model and the cache."""
    unmet = needs.unmet(version)
    if unmet:
        return TrtexecCommand(
            "cache", f"TensorRT {version} cannot read {files[FLOAT].name}: {unmet}"
        )
    types = ["--int8", *_float_types(rest), f"--calib={files[CACHE].name}"]
    float_types = dict.fromkeys(float_layers(request), rest)
    words = _command(files[FLOAT], [*types, *_precision_flags(float_types, wide)])
    return TrtexecCommand("cache", f"on a GPU machine with TensorRT {version}", words)


def _weakly_typed(
    files: Mapping[str, Path], needs: ParserRequirements, rest: str, wide: Collection[str]
) -> tuple[TrtexecCommand, ...]:
    """Build from the Q/DQ model; TensorRT chooses the types of float layers."""
    since = needs.first_reading()
    if since is None or version_label(since) >= version_label(_TYPED_ONLY):
        return ()
    oldest = max(since, _OLDEST[rest], key=version_label)
    has_pairs = "QuantizeLinear" in needs.operators  # else --int8 makes trtexec invent ranges
    int8 = ["--int8"] if has_pairs else []
    types = [*int8, *_float_types(rest), *_precision_flags({}, wide)]
    return (TrtexecCommand("qdq", _until_10(oldest), _command(files[QDQ], types)),)


def _strongly_typed(
    files: Mapping[str, Path], needs: Mapping[str, ParserRequirements], features: Collection[str]
) -> tuple[TrtexecCommand, ...]:
    """Build in the types of the model."""
    role = TYPED if TYPED in files else QDQ
    path, where = files[role], "".join(_WHERE.get(name, "") for name in features)
    since = needs[role].first_reading(*features)
    if since is None:
        opset = needs[role].opset
        why = f"no TensorRT reads opset {opset} of {path.name}: export with an older one"
        return (TrtexecCommand("typed", why),)
    first = max(since, _TYPED_ONLY, key=version_label)
    on = f" from {first.removesuffix('.0')} on" if first != _TYPED_ONLY else ""
    newest = f"TensorRT 11{on}"
    last = TrtexecCommand("11", f"{where}with {newest}", _command(path, []))
    if version_label(since) >= version_label(_TYPED_ONLY):
        return (last,)
    words = _command(path, ["--stronglyTyped"])
    return TrtexecCommand("typed", where + _until_10(since), words), last


def _command(model: Path, flags: Sequence[str]) -> tuple[str, ...]:
    return ("trtexec", f"--onnx={model.name}", *flags)


def _float_types(rest: str) -> list[str]:
    return [] if rest == FP32 else [f"--{rest}"]


def _until_10(since: str) -> str:
    """Describe the versions from `since` to 10, the last with precision flags."""
    major, minor, _ = since.split(".")
    if major != "10":
        return f"with any TensorRT from {major}.{minor} to 10"
    return "with TensorRT 10" if minor == "0" else f"with TensorRT 10 from 10.{minor} on"


def float_layers(request: BuildRequest) -> dict[str, str]:
    """Return node -> its first output, for nodes to keep in float that might run in int8.

    Nodes with integer outputs are left out: they cannot run in int8.
    """
    graph = Graph(request.model)
    float_nodes = set(request.float_nodes)
    return {
        node.name: node.output[0]
        for node in graph.nodes
        if node.name in float_nodes
        and node.op_type != "Constant"
        and graph.is_float(node.output[0])
    }


def _precision_flags(types: Mapping[str, str], wide: Collection[str]) -> list[str]:
    """Return the flags that set layer types; `wide` layers compute and output float32."""
    types = {**types, **dict.fromkeys(wide, FP32)}
    if not types:
        return []
    flags = [f"--layerPrecisions={_join_types(types)}", "--precisionConstraints=obey"]
    outputs = [f"--layerOutputTypes={_join_types(dict.fromkeys(wide, FP32))}"] if wide else []
    return [*flags, *outputs]


def _join_types(types: Mapping[str, str]) -> str:
    return ",".join(f"{name}:{kind}" for name, kind in types.items())


def _shape_flags(request: BuildRequest, max_batch: int, *, dla: bool) -> list[str]:
    """Return the shapes of dynamic inputs: min, opt and max, or `--shapes` if they are the same."""
    shapes = {value.name: dims(value) or () for value in runtime_inputs(request.model.graph)}
    if all(isinstance(size, int) for shape in shapes.values() for size in shape):
        return []
    span = sample_shape_range(request)
    profiles = profiles_for(shapes, span.median_sample, most_batch=max_batch, span=span, fixed=dla)
    sides = {
        "min": {name: profile.least for name, profile in profiles.items()},
        "opt": {name: profile.best for name, profile in profiles.items()},
        "max": {name: profile.most for name, profile in profiles.items()},
    }
    if sides["min"] == sides["max"]:
        return [f"--shapes={_join_shapes([*profiles], sides['opt'])}"]
    return [f"--{side}Shapes={_join_shapes([*profiles], own)}" for side, own in sides.items()]


def _join_shapes(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, shapes[name]))}" for name in names)
