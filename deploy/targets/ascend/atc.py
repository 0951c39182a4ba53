"""The `atc` command that makes the .om, with what a quantized model forbids refused first."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import ConfigError
from deploy.targets.ascend.proto import message_class, print_text

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
