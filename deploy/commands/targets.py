"""Options that belong to one target, and the backends they make."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.targets.base import Target

# target: option -> the click option; the name of each is that of the backend's field
_OPTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "onnxruntime": {
        "int8_stem": click.option(
            "--int8-stem",
            is_flag=True,
            default=None,
            help="onnxruntime: run the first Conv in int8 even where float is faster.",
        ),
        "weight_bits": click.option(
            "--weight-bits",
            type=click.IntRange(7, 8),
            help="onnxruntime: 7 for x86 CPUs without VNNI, whose int8 kernels can saturate.",
        ),
    },
    "tensorrt": {
        "form": click.option(
            "--engine-from",
            "form",
            type=click.Choice(["auto", "cache", "qdq"]),
            help="tensorrt: what the engine is built from.",
        ),
        "fp16": click.option(
            "--fp16/--no-fp16",
            default=None,
            help="tensorrt: let what is not int8 run in fp16.  [default: fp16]",
        ),
        "workspace_mib": click.option(
            "--workspace", "workspace_mib", type=click.IntRange(1), metavar="MIB",
            help="tensorrt: scratch memory of the builder.",
        ),
        "max_batch": click.option(
            "--max-batch", type=click.IntRange(1),
            help="tensorrt: largest batch of a dynamic engine.  [default: 8]",
        ),
        "cuda_graph": click.option(
            "--cuda-graph", is_flag=True, default=None,
            help="tensorrt: run the engine from a captured CUDA graph.",
        ),
        "calibrator": click.option(
            "--calibrator",
            type=click.Choice(["entropy2", "entropy", "minmax", "legacy"]),
            help="tensorrt: let TensorRT itself calibrate on the GPU, with the same images.",
        ),
    },
    "ascend": {
        "soc": click.option(
            "--soc",
            metavar="CHIP",
            help="ascend: chip for atc, such as Ascend310P3; without it no .om.",
        ),
        "config": click.option(
            "--ascend-config", "config", type=click.Path(path_type=Path),
            help="ascend: AMCT's simplified .cfg, or its quant config JSON.",
        ),
        "aipp": click.option(
            "--aipp/--no-aipp", default=None, help="ascend: preprocessing inside the .om (AIPP)."
        ),
        "first_layer_int8": click.option(
            "--first-layer-int8", is_flag=True, default=None,
            help="ascend: AIPP and the first convolution fused in int8; brings --aipp.",
        ),
        "atc_flags": click.option(
            "--atc-flag", "atc_flags", multiple=True, metavar="--NAME=VALUE",
            help="ascend: a further flag of atc; may be repeated.",
        ),
    },
}  # fmt: skip


def target_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--target` and every target's own options; the command gets them as `backends`."""

    @wraps(command)
    def gathered(targets: tuple[str, ...], **words: Any) -> None:
        command(backends=_backends(targets, words), **words)

    wrapped: Callable[..., None] = gathered
    for options in reversed(_OPTIONS.values()):
        for option in reversed(options.values()):
            wrapped = option(wrapped)
    return click.option(
        "--target",
        "targets",
        multiple=True,
        default=("onnxruntime",),
        show_default=True,
        help="onnxruntime, tensorrt or ascend; may be repeated: one calibration serves all.",
    )(wrapped)


def _backends(targets: tuple[str, ...], words: dict[str, Any]) -> list[Target]:
    """Take the targets' options out of a command's words and make the backends.

    Raises:
        ConfigError: an unknown target, or an option of a target that is not built.
    """
    from deploy import targets as table

    given = {
        target: {name: value for name in options if (value := words.pop(name)) not in (None, ())}
        for target, options in _OPTIONS.items()
    }
    for target in targets:
        if target not in table.TARGETS:
            raise ConfigError(f"a target is one of {', '.join(table.TARGETS)}, got {target!r}")
    for target, options in given.items():
        if options and target not in targets:
            names = ", ".join(name.replace("_", "-") for name in options)
            raise ConfigError(
                f"the option {names} belongs to --target {target}, got --target"
                f" {', '.join(targets)}"
            )
    make: dict[str, Callable[[], Target]] = {
        "onnxruntime": lambda: table.OnnxRuntime(**given["onnxruntime"]),
        "tensorrt": lambda: table.TensorRT(**given["tensorrt"]),
        "ascend": lambda: table.Ascend(**given["ascend"]),
    }
    return [make[target]() for target in dict.fromkeys(targets)]
