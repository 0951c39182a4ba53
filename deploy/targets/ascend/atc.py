"""The `atc` command that makes the .om, with what a quantized model forbids refused first.

<model>_README.txt: what the machine with the NPU does with the folder.

From the deploy model to the .om: its command in a script, and `atc` where it is at hand.

The pictures that an .om with AIPP gets.

What the ONNX parser of each CANN reads, and models brought to it before they travel.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from deploy.errors import BackendError, ConfigError
from deploy.files import atomic
from deploy.targets.ascend.proto import message_class, print_text
from deploy.targets.base import write_script
from deploy.targets.spans import Span, span_of
from deploy.terminal import phase

if TYPE_CHECKING:
    import onnx
    from google.protobuf.message import Message

    from deploy.targets.base import BuildRequest


CHIP = "<chip>"  # stands in the command where the chip is not known

# Names that --soc_version takes, for their spelling alone: newer ones pass as they are typed.
# Source: hicann/ge, docs of atc and its tests.
CHIPS = (
    *("Ascend310", "Ascend310B1", "Ascend310B2", "Ascend310B3", "Ascend310B4"),
    *("Ascend310P1", "Ascend310P3", "Ascend310P5", "Ascend310P7"),
    *("Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA"),
    *("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1"),
)
_DYNAMIC = ("dynamic_batch_size", "dynamic_image_size", "dynamic_dims", "dynamic_shape")
_REFUSED = {
    "precision_mode": ("force_fp32", "must_keep_origin_dtype"),
    "precision_mode_v2": ("origin",),
    "op_select_implmode": ("high_precision", "high_precision_for_all"),
}
_OURS = (
    "framework",
    "model",
    "output",
    "soc_version",
    "input_shape",
    "input_format",
    "insert_op_conf",
    "enable_small_channel",
    "compression_optimize_conf",
    "mode",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtcOptions:
    """What the user chooses about `atc`.

    Attributes:
        soc: chip, as `npu-smi info` names it behind 'Ascend'; None leaves a gap in the command.
        extra: further flags of atc, '--name=value'.
    """

    soc: str | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.soc is not None:
            object.__setattr__(self, "soc", chip(self.soc))
        names = [check_flag(flag) for flag in self.extra]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"an atc flag is given once, got --{twice} twice; leave one out")


def chip(typed: str) -> str:
    """A chip as atc spells it, from the same with or without 'Ascend', capitals or not.

    Raises:
        ConfigError: no name of a chip: three figures, then what tells its variant.
    """
    match = re.fullmatch(r"(?:ascend)?(\d{3}[\w-]{0,20})", typed, re.IGNORECASE | re.ASCII)
    if not match:
        raise ConfigError(
            f"a chip is named like Ascend310P3 (Ascend + the name npu-smi shows), got {typed!r}"
        )
    name = f"Ascend{match[1]}"
    spelt = {known.lower(): known for known in CHIPS}
    return spelt.get(name.lower(), name)


def check_flag(flag: str) -> str:
    """The name of a flag of atc, which a quantized model must stand.

    Raises:
        ConfigError: dynamic shapes, a precision mode that undoes int8, or a flag set already.
    """
    match = re.fullmatch(r"--([a-z0-9_]+)=(\S.*)", flag)
    if not match:
        raise ConfigError(f"an atc flag reads --name=value, got {flag!r}")
    name, value = match.groups()
    if name in _DYNAMIC:
        raise ConfigError(
            f"a quantized model takes fixed shapes only, got {flag}; ATC has no int8 for dynamic"
            " shapes, build one .om a shape"
        )
    if value in _REFUSED.get(name, ()):
        raise ConfigError(
            f"--{name} must leave int8 layers alone, got {value}, which a quantized model forbids"
        )
    if name in _OURS:
        raise ConfigError(f"--{name} follows from the build, got {flag}; leave it out")
    return name


def atc_command(
    model: Path,
    output: Path,
    shapes: Mapping[str, Sequence[int]],
    options: AtcOptions,
    *,
    aipp: Path | None = None,
    compression: Path | None = None,
) -> list[str]:
    """Arguments of `atc`, the program first.

    Args:
        model: deploy ONNX.
        output: the .om without its suffix, which atc adds.
        shapes: input name -> fixed shape.
        options: chip and further flags.
        aipp: AIPP configuration.
        compression: options file for int8 in the first layer; brings --enable_small_channel.
    """
    for name, shape in shapes.items():
        if any(side < 1 for side in shape):
            raise ConfigError(
                f"a quantized model takes fixed shapes, got {list(shape)} for {name!r}"
            )
    layout = "ND" if any(len(shape) != 4 for shape in shapes.values()) else "NCHW"
    # every CANN lets scalars be left out; a name without sizes is documented from 8.0 on
    words = ";".join(f"{n}:{','.join(map(str, shape))}" for n, shape in shapes.items() if shape)
    command = [
        "atc",
        "--framework=5",
        f"--model={model}",
        f"--output={output}",
        f"--soc_version={options.soc or CHIP}",
        *([f"--input_shape={words}"] if words else []),
        f"--input_format={layout}",
    ]
    if aipp is not None:
        command.append(f"--insert_op_conf={aipp}")
    if compression is not None:
        command += ["--enable_small_channel=1", f"--compression_optimize_conf={compression}"]
    return [*command, *options.extra]


def outside(flags: Sequence[str]) -> list[str]:
    """What to say of files that the flags name, which do not travel with the folder."""
    return [
        f"the flag {flag} names a file outside this folder; take it along, and set its path in the"
        " atc script"
        for flag in flags
        if _file_of(flag) is not None
    ]


def whole_path(flag: str) -> str:
    """The flag, a file in it by its whole path, since atc runs in the folder of the build."""
    file = _file_of(flag)
    return flag if file is None else f"{flag.partition('=')[0]}={file.resolve()}"


def _file_of(flag: str) -> Path | None:
    """The file that a flag names, where its value is one."""
    path = Path(flag.partition("=")[2])
    return path if path.is_file() else None


def shell(command: Sequence[str]) -> str:
    """The command as one line for a shell."""
    return shlex.join(command)


def write_compression_options(*, first_layer: bool) -> str:
    """Text of atc's --compression_optimize_conf.

    Args:
        first_layer: run AIPP and the first convolution fused in int8.
    """
    message = message_class("CompressionOptions")()
    message.enable_first_layer_quantization = first_layer
    return print_text(message)


def readme(
    name: str, files: Mapping[str, Path], options: AtcOptions, *, cann: str, notes: Sequence[str]
) -> str:
    """The text.

    Args:
        name: stem of the files.
        files: role -> path of everything else that was written.
        options: those of atc.
        cann: version whose parser the models are written for.
        notes: what the host has to do before the .om.
    """
    script, om = shlex.quote(f"{name}_atc.sh"), shlex.quote(f"{name}.om")
    chip = options.soc or f"{CHIP}: name it with --soc, or edit {name}_atc.sh"
    lines = [
        f"{name} in int8 for Ascend, chip {chip}, CANN {cann} or newer.",
        "",
        "On a machine with CANN, in this folder (any copy of it, anywhere):",
        "",
        "1. Compile the .om",
        f"       sh {script}",
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
_ATC_SECONDS = 3600


def write_om(
    request: BuildRequest, files: dict[str, Path], options: AtcOptions
) -> tuple[Path | None, list[str]]:
    """The .om, or None and a note with the command that makes it; both are added to `files`.

    Raises:
        BackendError: atc is here and failed.
    """
    span = span_of(request)
    names = {role: Path(path.name) for role, path in files.items()}  # the folder may move
    command = atc_command(
        names["deploy model"],
        Path(request.name),
        dict(span.largest),
        replace(options, extra=tuple(map(whole_path, options.extra))),
        aipp=names.get("AIPP configuration"),
        compression=names.get("compression options"),
    )
    path = request.folder / f"{request.name}_atc.sh"
    files["atc command"] = write_script(path, f"exec {shell(command)}")
    if options.soc is None:
        why = "name the chip with --soc"
    elif which("atc") is None:
        why = NO_ATC
    else:
        why = ""
    if why:
        return None, [*_one_size(span), f"No .om: {why}. The command: {shell(command)}"]
    engine = run_atc(command, request.folder / f"{request.name}.om")
    files["int8 engine"] = engine
    return engine, _one_size(span)


def write_readme(
    request: BuildRequest,
    files: dict[str, Path],
    options: AtcOptions,
    *,
    cann: str,
    host: Sequence[str],
) -> None:
    """Say what to do with the files, beside them; `host` is what the program has to do itself."""
    notes = [*host, *outside(options.extra)]
    text = readme(request.name, files, options, cann=cann, notes=notes)
    path = request.folder / f"{request.name}_README.txt"
    data = text.encode("utf-8", "surrogateescape")  # names in it keep their own bytes
    files["what to do with them"] = atomic.write_bytes(path, data)


@phase("atc")
def run_atc(command: list[str], engine: Path) -> Path:
    """Run atc in the folder of `engine`, which it writes.

    Raises:
        BackendError: atc failed, took over an hour, or wrote nothing.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ATC_SECONDS,
            cwd=engine.parent,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"atc must run, got: {error}") from error
    said = " ".join((done.stdout + done.stderr).split())[-600:]
    if done.returncode != 0:
        raise BackendError(f"atc failed with {done.returncode}, it said: {said}")
    if not engine.exists():
        raise BackendError(f"atc must write {engine}, got nothing; it said: {said}")
    return engine


def _one_size(span: Span) -> list[str]:
    """That the .om takes one size, where samples had several."""
    if not span.varies:
        return []
    said = ", ".join(
        f"{name} of {_by(span.least[name])} to {_by(span.most[name])}"
        for name in span.least
        if span.least[name] != span.most[name]
    )
    return [
        f"samples had {said}, and an int8 .om takes one shape: that of the largest sample is in"
        " the command; pad smaller ones as the model was trained with, or make one .om a shape"
        " with another --input_shape"
    ]


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


_YUV = ("nv12", "nv21")  # 4:2:0, a plane of Y and one of U and V in turn; in nv21 V comes first
COLORS = ("rgb", "bgr", *_YUV)
STANDARDS = ("bt601-narrow", "bt601-full", "bt709-narrow", "bt709-full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The pictures that the .om gets.

    Attributes:
        color: one of `COLORS`.
        size: (height, width) where AIPP is to crop the centre; None is the model's own.
        standard: of nv12 and nv21, one of `STANDARDS`.
        dynamic: the program that runs the .om sets all of it at every inference.
    """

    color: str = "rgb"
    size: tuple[int, int] | None = None
    standard: str = "bt601-narrow"
    dynamic: bool = False

    def __post_init__(self) -> None:
        for word, value, known in (
            ("source color", self.color, COLORS),
            ("csc", self.standard, STANDARDS),
        ):
            if value not in known:
                raise ConfigError(f"a {word} is one of {', '.join(known)}, got {value!r}")

    @property
    def yuv(self) -> bool:
        """Whether it is YUV 4:2:0, of a camera, a video or DVPP."""
        return self.color in _YUV


def read_size(text: str) -> tuple[int, int]:
    """Text such as 720x1280 -> (height, width).

    Raises:
        ConfigError: it reads otherwise.
    """
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text, re.ASCII)
    if not match:
        raise ConfigError(f"a source size reads HxW, such as 720x1280, got {text!r}")
    return int(match[1]), int(match[2])


_TOLD = ("doc_string", "metadata_props")  # where exporters leave paths, sources and stack traces


@dataclass(frozen=True, slots=True)
class Parser:
    """One CANN's.

    Attributes:
        opset: newest operator set, of ai.onnx.
        ir: newest version of the file format, that of the ONNX release it is made for.
    """

    opset: int
    ir: int


# Sources, on hiascend.com: "ONNX operator specifications" of canncommercial/5046 (ONNX 1.8.0,
# opset 9 to 13), of 700 (ONNX 1.12.0, opset 9 to 18) and of 80RC22, 80RC3 and 910beta3 (ONNX
# 1.12.0, each operator 11 to 18); hicann/ge, atc's page on --framework (opset 11 to 18).
PARSERS = {
    "5.0": Parser(13, 7),
    "7.0": Parser(18, 8),
    "8.0": Parser(18, 8),
    "8.2": Parser(18, 8),
    "9.1": Parser(18, 8),
}
DEFAULT = "8.0"


def readable(model: onnx.ModelProto, cann: str) -> onnx.ModelProto:
    """The float model in an opset and format that this CANN's parser reads.

    Before it is quantized: of Ascend's own operators ONNX knows no types, by which nodes behind
    them could be written otherwise.

    Args:
        model: of opset 13 to 25.
        cann: key of `PARSERS`.

    Raises:
        ExportError: a node has no form in that opset.
    """
    from deploy.graph.edit import copied
    from deploy.graph.lowering import lowered

    parser = PARSERS[cann]
    made = copied(lowered(model, opset=parser.opset).model)
    made.ir_version = min(made.ir_version, parser.ir)
    return made


def stripped(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without documentation and metadata: it computes the same."""
    from deploy.graph.edit import copied

    made = copied(model)
    for message in (made, *_inside(made)):
        for name in _TOLD:
            if name in message.DESCRIPTOR.fields_by_name:
                message.ClearField(name)
    return made


def _inside(message: Message) -> Iterator[Message]:
    """Every message in it, however deep."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for one in value if hasattr(value, "__len__") else (value,):
            yield one
            yield from _inside(one)
