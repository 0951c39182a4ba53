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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from deploy.calibration.trt_cache import version_label
from deploy.graph.index import ONNX_DOMAINS, Graph, all_nodes, opset_of
from deploy.targets.base import NEWER_TRTEXEC_SCRIPT, TRTEXEC_SCRIPT, BuildRequest
from deploy.targets.shape_ranges import Shape
from deploy.targets.tensorrt.profiles import sample_profiles
from deploy.targets.tensorrt.trt_options import (
    BF16,
    CACHE_FILE,
    FLOAT_MODEL,
    FP8,
    FP16,
    FP32,
    QDQ_MODEL,
    TYPED_MODEL,
    Files,
    TensorrtOptions,
)


@dataclass(frozen=True, slots=True)
class TensorrtFeatures:
    """Features of TensorRT from a version on.

    Attributes:
        since: first version "X.Y.Z" of the row.
        opset: newest opset that its parser reads.
        calibrators: whether it has int8 calibrators and reads their caches.
        typed: whether it has strongly typed networks.
        fp8: whether strongly typed networks can have FP8 convolutions.
        dla: whether strongly typed networks run on DLA.
    """

    since: str
    opset: int
    calibrators: bool
    typed: bool
    fp8: bool = False
    dla: bool = False


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
    rows = [row for row in FEATURES if version_label(row.since) <= label]
    return rows[-1] if rows else FEATURES[0]


def unsupported_operators(version: str) -> frozenset[str]:
    """Return the operators within its opset that the parser of TensorRT X.Y.Z does not read.

    Raises:
        CacheError: the version is not of the form X.Y.Z.
    """
    label = version_label(version)
    unsupported: set[str] = set()
    for since, names in _NEW_OPERATORS.items():
        if version_label(since) > label:
            unsupported.update(names.split())
    return frozenset(unsupported)


@dataclass(frozen=True, slots=True)
class ParserRequirements:
    """Opset and operators of the default domain that a parser must support to read a model."""

    opset: int
    operators: frozenset[str] = frozenset()  # plugins are left out

    @classmethod
    def of(cls, model: onnx.ModelProto) -> ParserRequirements:
        """Return the requirements of a model, including its subgraphs."""
        nodes = all_nodes(model.graph)
        operators = {node.op_type for node in nodes if node.domain in ONNX_DOMAINS}
        return cls(opset_of(model), frozenset(operators))

    def unmet_reason(self, version: str) -> str:
        """Return why TensorRT X.Y.Z cannot read the model, or ""."""
        newest = features_of(version).opset
        if self.opset > newest:
            return f"it reads opset {newest} at most, got {self.opset}"
        unsupported_types = sorted(self.operators & unsupported_operators(version))
        return f"it does not read {', '.join(unsupported_types)}" if unsupported_types else ""

    def first_version(self, *features: str) -> str | None:
        """Return the first version that reads the model and has these features, or None.

        `features`: boolean fields of `TensorrtFeatures`.
        """
        versions = {row.since for row in FEATURES} | _NEW_OPERATORS.keys()
        for version in sorted(versions, key=version_label):
            row = features_of(version)
            if all(getattr(row, name) for name in features) and not self.unmet_reason(version):
                return version
        return None


Requirements = Mapping[str, ParserRequirements]  # role of a model -> what reading it takes
_FIRST_TYPED_ONLY = "11.0.0"  # first version without calibrators: all of its networks are typed
# feature that the typed model needs -> the machine that has it
_MACHINES = {
    "fp8": "on a GPU of Ada, Hopper or later, ",
    "dla": "on a Jetson AGX Orin (JetPack 7.2.2 or newer) ",
}
_ADJUST_FOR_DLA_FLAG = "--adjustForDLA"  # since 10.16: lets the parser rewrite layers for DLA
_DLA_FLAGS = ("--useDLACore=0", "--allowGPUFallback")
_FIRST_WITHOUT_DLA = "10.8.0"  # from it on DLA takes no cache; from 11.4.1 on it takes typed models
_FIRST_WITH_FP8, _FIRST_WITH_TYPED_DLA = "10.2.0", "11.4.1"  # as in `FEATURES`
# type -> first supported version that has it
_FIRST_WITH_TYPE = {FP16: "8.5.0", FP32: "8.5.0", BF16: "9.0.0"}


@dataclass(frozen=True, slots=True)
class TrtexecCommand:
    """One trtexec command that builds the engine.

    Attributes:
        name: short name, by which the script runs it.
        condition: the TensorRT versions and machines that it is for.
        arguments: the command line; empty if no TensorRT can build it, then `condition` says why.
    """

    name: str
    condition: str
    arguments: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """One line for the user; quoted, so that file and tensor names cannot run as commands."""
        if not self.arguments:
            return self.condition
        return f"{self.condition}: {shlex.join(self.arguments)}"


def trtexec_commands(
    options: TensorrtOptions,
    request: BuildRequest,
    files: Files,
    requirements: Requirements,
    version: str,
    float32_nodes: Collection[str],
) -> tuple[TrtexecCommand, ...]:
    """Return the commands that build the engine on a GPU machine with these files.

    There are up to three ways: from the float model and the cache, from the Q/DQ model, and from
    the typed model. Each command says for which versions of TensorRT it is. Where no cache can be
    read (by TensorRT 11, or in FP8), only the last one is left. For DLA there is no command for the
    Q/DQ model: TensorRT up to 10.7 builds from the cache, 11.4.1 and newer from the typed model.

    Args:
        options: options of the target.
        request: the build request.
        files: role of a file, such as `QDQ_MODEL` -> path.
        requirements: role -> opset and operators that a parser must know to read the model in that
            file.
        version: TensorRT that the cache is for, "X.Y.Z".
        float32_nodes: nodes that must run in float32 if TensorRT chooses the types.
    """
    if options.dla:
        reads_cache = version_label(version) < version_label(_FIRST_WITHOUT_DLA)
    else:  # TensorRT 11 reads no cache, and a cache is for int8 only
        reads_cache = features_of(version).calibrators and options.precision != FP8

    float_type = options.rest  # type of the layers that are not quantized
    commands: list[TrtexecCommand] = []
    if reads_cache:
        commands.append(
            _cache_command(request, files, requirements, version, float_type, float32_nodes)
        )
        qdq_command = None
        if not options.dla:
            # still None if no TensorRT up to 10 reads the Q/DQ model
            qdq_command = _qdq_command(files, requirements[QDQ_MODEL], float_type, float32_nodes)
        if qdq_command is not None:
            commands.append(qdq_command)
    commands += _typed_commands(files, requirements, version, options.features)

    common_flags = _common_flags(options, request)
    for index, command in enumerate(commands):
        if command.arguments:  # else it only says why no TensorRT can build the engine
            commands[index] = replace(command, arguments=(*command.arguments, *common_flags))
    return tuple(commands)


@dataclass(frozen=True, slots=True)
class UnreadModel:
    """A model that the TensorRT of its files cannot read in any form.

    Attributes:
        version: that TensorRT, "X.Y.Z".
        reason: why it cannot, such as "it does not read DFT".
        first_version: first TensorRT that reads it, None if none does.
    """

    version: str
    reason: str
    first_version: str | None

    @property
    def alert(self) -> str:
        """One sentence for the user: why the files are of no use there, and what helps."""
        reader = "no TensorRT does"
        if self.first_version is not None:
            reader = f"TensorRT {self.first_version} or newer does (--trt-version)"
        remedy = "export it with an older opset and no newer operators"
        if "opset" not in self.reason:
            remedy = "end it before such nodes and run them outside of TensorRT"
        return (
            f"TensorRT {self.version} cannot read the model: {self.reason}; {reader}. Otherwise"
            f" {remedy}"
        )

    @property
    def script_role(self) -> str:
        """Role of the script, whose commands are all for other versions, if there are any."""
        if self.first_version is None:
            return f"{TRTEXEC_SCRIPT}, without commands"
        return f"{NEWER_TRTEXEC_SCRIPT}{self.first_version}"


def find_unread_model(
    options: TensorrtOptions, requirements: Requirements, version: str
) -> UnreadModel | None:
    """Return why TensorRT `version` can read none of the models; None if it can read one.

    `requirements`: role of a model -> what a parser must know to read it; the first one gives the
    reason.
    """
    reasons = [requirement.unmet_reason(version) for requirement in requirements.values()]
    if not all(reasons):
        return None

    typed_role = TYPED_MODEL if TYPED_MODEL in requirements else QDQ_MODEL
    # the first version that reads the typed model; None if none does
    first_versions = [requirements[typed_role].first_version(*options.features)]
    if options.precision != FP8 and not options.dla:  # these have commands for the typed model only
        first_versions.append(requirements[QDQ_MODEL].first_version())
    first_version = min(filter(None, first_versions), key=version_label, default=None)
    return UnreadModel(version, reasons[0], first_version)


def find_unsupported_option(options: TensorrtOptions, version: str) -> Iterator[str]:
    """Yield a warning of each option that TensorRT `version` certainly does not support."""
    label = version_label(version)
    builds_typed = label >= version_label(_FIRST_WITHOUT_DLA)  # older ones build from the cache
    for flag, first_version, is_set in (
        ("--precision fp8", _FIRST_WITH_FP8, options.precision == FP8),
        ("--dla", _FIRST_WITH_TYPED_DLA, options.dla and builds_typed),
        ("--rest bf16", _FIRST_WITH_TYPE[BF16], options.rest == BF16),
    ):
        if is_set and label < version_label(first_version):
            yield (
                f"TensorRT {version} does not support {flag}; give --trt-version {first_version} or"
                f" newer if the device has it, else leave {flag} out"
            )


def _common_flags(options: TensorrtOptions, request: BuildRequest) -> list[str]:
    """Return the flags of every command: shapes, limits, files, device, and the user's own."""
    flags = [*_DLA_FLAGS] if options.dla else []
    flags += _shape_flags(request, options.max_batch, dla=options.dla)
    flags.append(f"--saveEngine={request.name}.engine")
    if options.workspace_mib is not None:
        flags.append(f"--memPoolSize=workspace:{options.workspace_mib}")
    if options.device:
        flags.append(f"--device={options.device}")
    # deprecated since 8.6, but every trtexec reads it, unlike its successor
    flags += [f"--plugins={path.resolve()}" for path in options.plugins]
    if options.timing_cache is not None:
        flags.append(f"--timingCacheFile={options.timing_cache.resolve()}")
    return [*flags, *options.trtexec_flags]


def shipping_command(
    commands: Sequence[TrtexecCommand], version: str, *, reads_typed: bool
) -> TrtexecCommand | None:
    """Return the command whose files are to be shipped to TensorRT `version`; None if none can be.

    It is the first command with arguments. For TensorRT 10 it is that of the typed model: TensorRT
    10 reads caches too, but they are deprecated since 10.1, and the accuracy in the report is that
    of the typed model.

    `reads_typed`: whether this version reads the typed model.
    """
    runnable = [command for command in commands if command.arguments]
    if reads_typed and features_of(version).calibrators:  # TensorRT 10
        # the command "typed" becomes the first, since False sorts before True
        runnable.sort(key=lambda command: command.name != "typed")
    return runnable[0] if runnable else None


def trtexec_script(commands: Sequence[TrtexecCommand], default: TrtexecCommand | None) -> str:
    """Return the body of a shell script that builds the engine with one of the commands.

    The script's argument is the name of the command; without one it runs the default command.
    """
    cases = ""  # lines of the shell's `case`, one for each command
    usage = ""  # lines that print the commands' names, for any other argument
    for command in commands:
        if command.arguments:  # else it only says why no TensorRT can build the engine
            pattern = f"''|{command.name}" if command == default else command.name  # '': none given
            cases += f"  {pattern}) exec {shlex.join(command.arguments)} ;;\n"
            usage += f"echo '  {command.name}: {command.condition}' >&2\n    "
    return (
        "# Builds the engine with the trtexec on the PATH, else with that of NVIDIA's packages."
        f'\nPATH="$PATH:/usr/src/tensorrt/bin"\ncase "${{1-}}" in\n{cases}'
        f"  *) echo 'give one of these:' >&2\n    {usage}exit 2 ;;\nesac"
    )


def _cache_command(
    request: BuildRequest,
    files: Files,
    requirements: Requirements,
    version: str,
    float_type: str,
    float32_nodes: Collection[str],
) -> TrtexecCommand:
    """Return the command that builds from the float model and the cache.

    Args:
        request: the build request, with the layers to keep in float.
        files: role (what a file is for) -> path.
        requirements: role -> what a parser must support to read that file.
        version: TensorRT that the cache is for, "X.Y.Z".
        float_type: type of the layers to keep in float, "fp16", "bf16" or "fp32".
        float32_nodes: nodes that must run in float32.
    """
    model = files[FLOAT_MODEL]
    unmet_reason = requirements[FLOAT_MODEL].unmet_reason(version)
    if unmet_reason:
        return TrtexecCommand(
            "cache", f"TensorRT {version} cannot read {model.name}: {unmet_reason}"
        )
    type_by_layer = dict.fromkeys(float_layers(request), float_type)
    flags = [
        "--int8",
        *_float_type_flags(float_type),
        f"--calib={files[CACHE_FILE].name}",
        *_precision_flags(type_by_layer, float32_nodes),
    ]
    condition = f"on a GPU machine with TensorRT {version}"
    return TrtexecCommand("cache", condition, _command_line(model, flags))


def _qdq_command(
    files: Files,
    requirements: ParserRequirements,
    float_type: str,
    float32_nodes: Collection[str],
) -> TrtexecCommand | None:
    """Return the command that builds from the Q/DQ model, with TensorRT up to version 10.

    TensorRT chooses the types of the float layers, which version 11 does not do. None if no version
    up to 10 reads the model.

    Args:
        files: role (what a file is for) -> path.
        requirements: opset and operators that a parser needs to read the Q/DQ model.
        float_type: narrowest type of the float layers, "fp16", "bf16" or "fp32".
        float32_nodes: nodes that must run in float32.
    """
    first_version = requirements.first_version()  # that reads the model
    if first_version is None or not features_of(first_version).calibrators:  # 11 or newer
        return None
    first_version = max(first_version, _FIRST_WITH_TYPE[float_type], key=version_label)
    flags = [*_float_type_flags(float_type), *_precision_flags({}, float32_nodes)]
    # for a model without pairs, in which no node is int8, trtexec --int8 would invent ranges
    if "QuantizeLinear" in requirements.operators:
        flags.insert(0, "--int8")
    return TrtexecCommand(
        "qdq", _versions_until_10(first_version), _command_line(files[QDQ_MODEL], flags)
    )


def _typed_commands(
    files: Files,
    requirements: Requirements,
    version: str,
    features: Collection[str],
) -> tuple[TrtexecCommand, ...]:
    """Return the commands that build in the types of the model: one for TensorRT 10, one for 11.

    TensorRT 10 has a flag for that (--stronglyTyped), and 11 builds no other way. The commands are
    named "typed" and "11". If only TensorRT 11 can read the model, there is only its command. If no
    version can, the result is a command without arguments, which says why.

    Args:
        files: role (what a file is for) -> path.
        requirements: role -> what a parser must support to read that file.
        version: TensorRT that the files are for, "X.Y.Z"; its command is the first.
        features: fields of `TensorrtFeatures` that the model needs, such as "dla".
    """
    role = TYPED_MODEL if TYPED_MODEL in files else QDQ_MODEL
    model = files[role]
    first_version = requirements[role].first_version(*features)
    if first_version is None:
        opset = requirements[role].opset
        reason = f"no TensorRT reads opset {opset} of {model.name}: export with an older one"
        return (TrtexecCommand("typed", reason),)

    # A condition is text: on which machine, and with which TensorRT a command runs.
    machine = "".join(_MACHINES.get(feature, "") for feature in features)
    needs_11 = not features_of(first_version).calibrators  # only 11 and newer have none
    condition_11 = f"{machine}with TensorRT 11"
    if needs_11 and first_version != _FIRST_TYPED_ONLY:  # a later 11
        condition_11 += f" from {first_version.removesuffix('.0')} on"
    flags_11 = [_ADJUST_FOR_DLA_FLAG] if "dla" in features else []
    command_11 = TrtexecCommand("11", condition_11, _command_line(model, flags_11))
    if needs_11:
        return (command_11,)

    condition_10 = machine + _versions_until_10(first_version)
    command_10 = TrtexecCommand("typed", condition_10, _command_line(model, ["--stronglyTyped"]))
    if features_of(version).calibrators:  # up to 10
        return command_10, command_11
    return command_11, command_10


def _command_line(model: Path, flags: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of trtexec for a model in its own folder."""
    return ("trtexec", f"--onnx={model.name}", *flags)


def _float_type_flags(float_type: str) -> list[str]:
    """Return the flag that allows float16 or bfloat16; none for float32."""
    return [] if float_type == FP32 else [f"--{float_type}"]


def _versions_until_10(since: str) -> str:
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
    float_nodes = request.float_nodes
    layers = {}
    for node in graph.nodes:
        is_layer = node.name in float_nodes and node.op_type != "Constant"
        if is_layer and graph.is_float(node.output[0]):
            layers[node.name] = node.output[0]
    return layers


def _precision_flags(type_by_layer: Mapping[str, str], float32_nodes: Collection[str]) -> list[str]:
    """Return the flags that set the types of layers, which have the names of their nodes.

    Args:
        type_by_layer: layer -> the type in which it computes.
        float32_nodes: nodes whose layers compute and output float32.
    """
    float32_types = dict.fromkeys(float32_nodes, FP32)
    compute_types = {**type_by_layer, **float32_types}
    if not compute_types:
        return []
    flags = [f"--layerPrecisions={_join_types(compute_types)}", "--precisionConstraints=obey"]
    if float32_types:
        flags.append(f"--layerOutputTypes={_join_types(float32_types)}")
    return flags


def _join_types(type_by_layer: Mapping[str, str]) -> str:
    """Return layers and their types as trtexec reads them, such as "conv1:fp32,fc:fp16"."""
    return ",".join(f"{name}:{kind}" for name, kind in type_by_layer.items())


def _shape_flags(request: BuildRequest, max_batch: int, *, dla: bool) -> list[str]:
    """Return the flags of the shapes of dynamic inputs; none if all inputs have fixed shapes.

    These are the smallest, the usual and the largest shapes, or `--shapes` if all are the same.
    """
    profiles = sample_profiles(request, max_batch=max_batch, fixed=dla, tuned_shapes={})
    if not profiles:
        return []
    # the smallest shapes of all dynamic inputs, their usual shapes, and their largest ones
    min_shapes, opt_shapes, max_shapes = zip(*profiles.values(), strict=True)
    opt_text = _join_shapes(profiles, opt_shapes)
    if min_shapes == max_shapes:
        return [f"--shapes={opt_text}"]
    min_text = _join_shapes(profiles, min_shapes)
    max_text = _join_shapes(profiles, max_shapes)
    return [f"--minShapes={min_text}", f"--optShapes={opt_text}", f"--maxShapes={max_text}"]


def _join_shapes(names: Iterable[str], shapes: Iterable[Shape]) -> str:
    """Return the shapes of inputs as trtexec reads them, such as "x:1x3x8x8,mask:1x8"."""
    pairs = zip(names, shapes, strict=True)
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in pairs)
