"""From the deploy model to the .om: the `atc` command, its script, <model>_README.txt, and the run.

Flags that a quantized model forbids are refused. Also here: the format of the input images of an
.om with AIPP, and the opset that the ONNX parser of each CANN version reads.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from deploy.errors import BackendError, ConfigError, ExportError, list_first
from deploy.files.usercode import refuse_foreign_code
from deploy.graph.edit import copy_message
from deploy.graph.index import ONNX_DOMAINS, describe_node, nested_nodes, opset_of
from deploy.targets.base import ATC_SCRIPT, CHIP_ATC_SCRIPT, BuildRequest
from deploy.targets.shape_ranges import ShapeRange, sample_shape_range
from deploy.terminal import phase

if TYPE_CHECKING:
    import onnx
    from google.protobuf.message import Message

    from deploy.feed.preprocess import Size
    from deploy.frontends import LoadedModel

CHIP = "<chip>"  # placeholder in the command if the chip is not known
_NEW_CHIP = re.compile(r"Ascend950(PR|DT)_\w{4}", re.ASCII)
_CHIP_ARGUMENT = '--soc_version="${1:?the chip is the argument of this script, e.g. Ascend310P3}"'
# Sources: hicann/ge, docs of atc and its tests; cannmirror/asc-devkit, the lists of each series
_CHIPS = (
    "Ascend310", "Ascend310P1", "Ascend310P3", "Ascend310P5", "Ascend310P7", "Ascend310P2",
    "Ascend310P4", "Ascend310P3Vir01", "Ascend310P3Vir02", "Ascend310P3Vir04", "Ascend310P3Vir08",
    "Ascend310B1", "Ascend310B2", "Ascend310B3", "Ascend310B4", "Ascend910A", "Ascend910B",
    "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA", "Ascend910B1", "Ascend910B2",
    "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1", "Ascend910_9391",
    "Ascend910_9392", "Ascend910_9381", "Ascend910_9382", "Ascend910_9372", "Ascend910_9362",
)  # fmt: skip

_DYNAMIC_FLAGS = ("dynamic_batch_size", "dynamic_image_size", "dynamic_dims", "dynamic_shape")
_REFUSED_VALUES = {
    "precision_mode": ("force_fp32", "must_keep_origin_dtype"),
    "precision_mode_v2": ("origin",),
    "op_select_implmode": ("high_precision", "high_precision_for_all"),
}
_BUILD_FLAGS = (  # they follow from the build
    "framework", "model", "output", "soc_version", "input_shape", "input_format", "insert_op_conf",
    "enable_small_channel", "compression_optimize_conf", "mode",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AtcOptions:
    """The user's options of `atc`.

    Attributes:
        soc: chip, 'Ascend' + the name that `npu-smi info` shows; None puts `CHIP` there.
        extra: further flags of atc, '--name=value'.
    """

    soc: str | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.soc is not None:
            object.__setattr__(self, "soc", normalize_chip(self.soc))
        for flag in self.extra:
            check_flag(flag)
            refuse_foreign_code(flag)

    @property
    def alerts(self) -> tuple[str, ...]:
        """A sentence on a chip that atc may not know, such as Ascend310P; () without one."""
        if self.soc is None or self.soc in _CHIPS or _NEW_CHIP.fullmatch(self.soc):
            return ()
        similar_chips = [chip for chip in _CHIPS if chip.startswith(self.soc)]
        similar_chips = similar_chips or get_close_matches(self.soc, _CHIPS)
        examples = f", such as {list_first(similar_chips, 4)}" if similar_chips else ""
        return (
            f"--soc {self.soc} is no chip that calib8 knows, and atc may refuse it: give the name"
            f" that `npu-smi info` shows on the device{examples}",
        )


def normalize_chip(text: str) -> str:
    """Return a chip's name as atc spells it; 'Ascend' and capitals are optional in `text`.

    A name that is not in `_CHIPS` is written in capitals, but its end after "_" in small letters:
    Ascend950PR_957c.
    """
    match = re.fullmatch(r"(?:ascend)?(\d{3}[\w-]{0,20})", text, re.IGNORECASE | re.ASCII)
    if not match:
        raise ConfigError(
            f"a chip is named like Ascend310P3 (Ascend + the name npu-smi shows), got {text!r}"
        )
    series, underscore, ending = match[1].partition("_")
    spelt = f"Ascend{series.upper()}{underscore}{ending.lower()}"
    return next((chip for chip in _CHIPS if chip.upper() == spelt.upper()), spelt)


def check_flag(flag: str) -> None:
    """Refuse a flag of atc that a quantized model forbids, or that calib8 sets itself."""
    match = re.fullmatch(r"--([a-z0-9_]+)=(\S.*)", flag)
    if not match:
        raise ConfigError(f"an atc flag reads --name=value, got {flag!r}")
    name, value = match.groups()
    if name in _DYNAMIC_FLAGS:
        raise ConfigError(
            f"a quantized model takes fixed shapes only, got {flag}; ATC has no int8 for dynamic"
            " shapes, build one .om a shape"
        )
    if value in _REFUSED_VALUES.get(name, ()):
        raise ConfigError(
            f"--{name} must leave int8 layers alone, got {value}, which a quantized model forbids"
        )
    if name in _BUILD_FLAGS:
        raise ConfigError(f"--{name} follows from the build, got {flag}; leave it out")


def atc_command(
    model: Path,
    output: Path,
    shapes: Mapping[str, Sequence[int]],
    options: AtcOptions,
    *,
    aipp: Path | None = None,
    compression: Path | None = None,
) -> list[str]:
    """Return the command line of `atc` as a list.

    Args:
        model: the deploy model.
        output: path of the .om without its suffix, which atc adds.
        shapes: input -> its shape.
        options: the user's options of atc.
        aipp: AIPP configuration; None for an .om without AIPP.
        compression: options file for int8 in the first layer; adds --enable_small_channel.

    Raises:
        ConfigError: a shape has a dimension below 1.
    """
    for name, shape in shapes.items():
        if any(side < 1 for side in shape):
            raise ConfigError(
                f"a quantized model takes fixed shapes, got {list(shape)} for {name!r}"
            )
    # the format is NCHW or ND; with AIPP atc takes only NCHW, whatever the shapes of other inputs
    is_nchw = aipp is not None or all(len(shape) == 4 for shape in shapes.values())
    # without scalars, which would be "name:": that is documented from CANN 8.0 on only
    input_shapes = [
        f"{name}:{','.join(map(str, shape))}" for name, shape in shapes.items() if shape
    ]
    command = [
        "atc",
        "--framework=5",
        f"--model={model}",
        f"--output={output}",
        f"--soc_version={options.soc or CHIP}",
    ]
    if input_shapes:
        command.append(f"--input_shape={';'.join(input_shapes)}")
    command.append(f"--input_format={'NCHW' if is_nchw else 'ND'}")
    if aipp is not None:
        command.append(f"--insert_op_conf={aipp}")
    if compression is not None:
        command += ["--enable_small_channel=1", f"--compression_optimize_conf={compression}"]
    return [*command, *options.extra]


def _with_absolute_path(flag: str) -> str:
    """Return the flag with an absolute path, since atc runs in the output folder."""
    file = _find_file(flag)
    return flag if file is None else f"{flag.partition('=')[0]}={file.resolve()}"


def _find_file(flag: str) -> Path | None:
    """Return the file that a flag's value names, or None."""
    path = Path(flag.partition("=")[2])
    return path if path.is_file() else None


def _readme_text(
    name: str, files: Mapping[str, Path], options: AtcOptions, *, cann: str, notes: Sequence[str]
) -> str:
    """Return the text of <model>_README.txt: what to do with the folder on the NPU's machine.

    `files`: role -> path of every other file.
    """
    script = shlex.quote(f"{name}_atc.sh")
    om = shlex.quote(f"{name}.om")
    chip_text = f", chip {options.soc}"
    argument = ""
    remark = ""
    if options.soc is None:  # the script takes the chip as its argument
        chip_text = ""
        argument = " Ascend310P3"
        remark = ", for the chip that `npu-smi info` names (Ascend + the name)"
    lines = [
        f"{name} in int8 for Ascend{chip_text}, CANN {cann} or newer.",
        "",
        "On a machine with CANN, in this folder (any copy of it, anywhere):",
        "",
        f"1. Compile the .om{remark}",
        f"       sh {script}{argument}",
        "2. Measure it on the NPU",
        f"       python3 -m ais_bench --model {om} --loop 100",
        "3. Compare its tensors with the float model's (MindStudio's msit)",
        f"       msit debug compare -gm MODEL.onnx -om {om} -q {shlex.quote(name + '_quant.json')}"
        " -o compare",
        "   MODEL.onnx is the model that was given to calib8.",
        "",
        *(f"Note: {note}" for note in notes),
        *([""] if notes else []),
        "Files:",
        *(f"   {path.name}: {role}" for role, path in files.items()),
    ]
    return "\n".join(lines) + "\n"


NO_ATC = "`atc` (CANN) is not on the PATH"
_ATC_TIMEOUT_S = 3600


def write_om(
    request: BuildRequest, files: dict[str, Path], options: AtcOptions
) -> tuple[Path | None, list[str], str]:
    """Write the atc script and, if atc is installed and the chip known, the .om.

    Args:
        request: gives the folder and the samples, whose largest shapes the .om takes.
        files: role -> path of the build's files so far; the script and the .om are added.
        options: the user's options of atc.

    Returns:
        (path of the .om or None, notes, why atc failed or ""); without atc, one note has the
        command.
    """
    shapes = sample_shape_range(request)
    notes = _shape_notes(shapes)
    # the script names files of the build relative to its folder, which the user may move, and
    # files of the user absolutely
    relative_paths = {role: Path(path.name) for role, path in files.items()}
    extra_flags = tuple(map(_with_absolute_path, options.extra))
    command = atc_command(
        relative_paths["deploy model"],
        Path(request.name),
        shapes.largest_sample,
        replace(options, extra=extra_flags),
        aipp=relative_paths.get("AIPP configuration"),
        compression=relative_paths.get("compression options"),
    )
    command_text = shlex.join(command)
    if options.soc is None:  # the command names `CHIP`; the script takes the chip as its argument
        chip_flag = shlex.quote(f"--soc_version={CHIP}")
        script_text = command_text.replace(chip_flag, _CHIP_ARGUMENT)
        script = request.write_script("_atc.sh", f"exec {script_text}")
        files[CHIP_ATC_SCRIPT] = script
        reason = f"name the chip with --soc, or as the argument of {script.name}"
    else:
        files[ATC_SCRIPT] = request.write_script("_atc.sh", f"exec {command_text}")
        reason = "" if which("atc") else NO_ATC
    if reason:  # why atc is not run here
        return None, [*notes, f"No .om: {reason}. The command: {command_text}"], ""
    try:
        engine = _run_atc(command, request.file(".om"))
    except BackendError as error:
        return None, notes, str(error)
    files["int8 engine"] = engine
    return engine, notes, ""


def write_readme(
    request: BuildRequest,
    files: dict[str, Path],
    options: AtcOptions,
    *,
    cann: str,
    host_notes: Sequence[str],
) -> None:
    """Write <model>_README.txt, which says what to do with the files; add it to `files`.

    Args:
        request: gives the folder and the model's name.
        files: role (what a file is for) -> path of every other file.
        options: the user's options of atc.
        cann: CANN version that the files are for.
        host_notes: sentences on the steps that the user's program has to do.
    """
    notes = list(host_notes)
    modified_model = files.get("modified model")
    if modified_model is not None:
        notes.append(
            f"the record and the configuration belong to {modified_model.name}: give AMCT, `calib8"
            " ascend deploy` and --ascend-config that model in place of the original"
        )
    for flag in options.extra:
        if _find_file(flag) is not None:
            notes.append(
                f"the flag {flag} names a file outside this folder; take it along, and set its"
                " path in the atc script"
            )
    text = _readme_text(request.name, files, options, cann=cann, notes=notes)
    files["what to do with them"] = request.write("_README.txt", text)


@phase("atc")
def _run_atc(command: list[str], engine: Path) -> Path:
    """Run atc in the folder of `engine`, the .om that it writes; return that path."""
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ATC_TIMEOUT_S,
            cwd=engine.parent,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"atc must run, got: {error}") from error
    output = " ".join((process.stdout + process.stderr).split())[-600:]  # its end has the error
    if process.returncode != 0:
        raise BackendError(f"atc failed with exit code {process.returncode}; its output: {output}")
    if not engine.exists():
        raise BackendError(f"atc must write {engine}, got nothing; its output: {output}")
    return engine


def _shape_notes(shapes: ShapeRange) -> list[str]:
    """Return a note that the .om takes one shape, if the samples' shapes differ."""
    from deploy.feed.preprocess import format_size

    ranges = []
    for name, min_shape in shapes.min_sizes.items():
        max_shape = shapes.max_sizes[name]
        if min_shape != max_shape:
            ranges.append(f"{name} of {format_size(min_shape)} to {format_size(max_shape)}")
    if not ranges:
        return []
    return [
        f"samples had {', '.join(ranges)}, and an int8 .om takes one shape: the command has the"
        " largest sample's; pad smaller samples as in training, or build one .om per shape with"
        " another --input_shape"
    ]


_YUV = ("nv12", "nv21")  # 4:2:0, a Y plane and an interleaved UV plane; in nv21 V comes first
COLORS = ("rgb", "bgr", *_YUV)
STANDARDS = ("bt601-narrow", "bt601-full", "bt709-narrow", "bt709-full")


@dataclass(frozen=True, slots=True, kw_only=True)
class AippSource:
    """Format of the input images of an .om with AIPP.

    Attributes:
        color: one of `COLORS`.
        size: (height, width) of the frames; None for the model's input size.
        standard: color standard of YUV images, one of `STANDARDS`.
    """

    color: str = "rgb"
    size: Size | None = None
    standard: str = "bt601-narrow"

    @property
    def is_yuv(self) -> bool:
        """Whether the images are YUV 4:2:0, from a camera, a video or DVPP."""
        return self.color in _YUV

    @property
    def alerts(self) -> tuple[str, ...]:
        """A sentence on a size that may have been meant as width x height; () without one."""
        if self.size is None or self.size[0] <= self.size[1]:
            return ()
        height, width = self.size
        return (
            f"the frames are {height} high, {width} wide: a camera's {height}x{width} is written"
            f" --source-size {width}x{height}",
        )


def parse_size(text: str) -> Size:
    """Return (height, width) of a text such as 720x1280."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text, re.ASCII)
    if not match:
        raise ConfigError(f"a source size reads HxW, such as 720x1280, got {text!r}")
    return int(match[1]), int(match[2])


_PRIVATE_FIELDS = ("doc_string", "metadata_props")  # exporters leave paths and stack traces there


# Sources, on hiascend.com: "ONNX operator specifications" of canncommercial/5046 (ONNX 1.8.0,
# opset 9 to 13), of 700 (ONNX 1.12.0, opset 9 to 18) and of 80RC22, 80RC3 and 910beta3 (ONNX
# 1.12.0, each operator 11 to 18); hicann/ge, atc's page on --framework (opset 11 to 18).
# CANN version -> (newest opset, newest IR version) that its parser reads; the IR version is that of
# the ONNX release that the parser was made for
PARSERS = {
    "5.0": (13, 7),
    "7.0": (18, 8),
    "8.0": (18, 8),
    "8.2": (18, 8),
    "9.1": (18, 8),
}
DEFAULT_CANN = "8.0"


def lower_for_cann(model: onnx.ModelProto, cann: str) -> onnx.ModelProto:
    """Return the float model in an opset and IR version that this CANN's parser reads.

    Convert before quantizing: ONNX infers no types through Ascend's operators, and the conversion
    of nodes downstream needs them.

    Args:
        model: float model of opset 13 or newer.
        cann: key of `PARSERS`.

    Raises:
        ExportError: a node cannot be expressed in that opset; the message names a newer CANN that
            reads the model as it is, if there is one.
    """
    from deploy.graph.lowering import lower_opset

    newest_opset, newest_ir_version = PARSERS[cann]
    try:
        lowered = copy_message(lower_opset(model, opset=newest_opset).model)
    except ExportError as error:
        model_opset = opset_of(model)
        for other_cann, (opset, _) in PARSERS.items():
            if opset >= model_opset:  # there nothing needs to be converted
                raise ExportError(
                    f"{error}, or take a CANN that reads opset {model_opset}, with --cann"
                    f" {other_cann} or newer"
                ) from error
        raise
    lowered.ir_version = min(lowered.ir_version, newest_ir_version)
    return lowered


def refuse_other_domains(loaded: LoadedModel) -> None:
    """Refuse operators outside of ONNX's own domain: atc reads models of one operator set (E16005).

    Source: Ascend/parser, onnx_parser.cc, ConstructOriType.

    Raises:
        ExportError: names the first such node.
    """
    nodes = list(loaded.model.graph.node)
    if loaded.cut_off is not None:  # nodes that ONNX Runtime does not know
        nodes += loaded.cut_off.nodes
    # each node, and the nodes in its subgraphs
    for node in chain.from_iterable(map(nested_nodes, nodes)):
        if node.domain not in ONNX_DOMAINS:
            raise ExportError(
                f"atc reads operators of one domain, ONNX's own, got {describe_node(node)}"
                f" of the domain '{node.domain}'; export the model with standard ONNX operators, or"
                " with this one in ONNX's domain if CANN has a plugin for it"
            )


def clear_metadata(model: onnx.ModelProto) -> None:
    """Remove doc strings and metadata."""
    for message in (model, *_nested_messages(model)):
        for name in _PRIVATE_FIELDS:
            if name in message.DESCRIPTOR.fields_by_name:
                message.ClearField(name)


def _nested_messages(message: Message) -> Iterator[Message]:
    """Yield the messages inside a protobuf message, at any depth."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for nested in value if hasattr(value, "__len__") else (value,):
            yield nested
            yield from _nested_messages(nested)
