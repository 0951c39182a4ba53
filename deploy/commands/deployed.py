"""`calib8 ascend deploy` and `calib8 ascend convert`: Ascend's files without a calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.commands import given as given_flags
from deploy.commands import sections
from deploy.commands.inputs import Inputs, input_options, shape, shape_option
from deploy.commands.numbers import THREADS
from deploy.commands.targets import Given, own_options
from deploy.errors import ConfigError
from deploy.targets import Ascend
from deploy.targets.options import options_of
from deploy.terminal import say_lines

if TYPE_CHECKING:
    from deploy.deployment import Tried
    from deploy.report import Report

FILE = click.Path(path_type=Path)
_FILES = frozenset(option.flag for option in options_of(Ascend) if not option.observes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What both commands take beside the scales."""

    out: Path
    target: Ascend
    tried: Tried
    threads: int | None
    force: bool


def _where_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add where files go, what they are tried on, and Ascend's own options that do not calibrate.

    The command gets them as `where`.
    """

    @wraps(command)
    def gathered(given: Given, inputs: Inputs, shapes: tuple[str, ...], **words: Any) -> None:
        from deploy.deployment import Tried

        if inputs.source is not None and (idle := given_flags.typed("shapes")):
            raise ConfigError(
                f"{idle[0]} shapes made-up samples, and --images gives others; leave one of them"
                " away"
            )
        tried = Tried(
            images=inputs.source,
            preprocess=inputs.preprocess,
            limit=inputs.limit,
            skip_bad=inputs.skip_bad,
            shapes=dict(map(shape, shapes)),
        )
        where = Where(
            out=words.pop("out"),
            target=Ascend(**given.get("ascend", {})),
            tried=tried,
            threads=words.pop("threads"),
            force=words.pop("force"),
        )
        command(where=where, **words)

    wrapped: Callable[..., None] = gathered
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


_OPTIONS: Sequence[Callable[[Callable[..., None]], Callable[..., None]]] = (
    sections.option(
        "-o",
        "--out",
        section=sections.GENERAL,
        type=FILE,
        required=True,
        help="Folder of everything that is written.",
    ),
    shape_option,
    input_options("Run on these, and tell how far the outputs are from the model's"),
    own_options(lambda option: option.flag in _FILES),
    sections.option(
        "--threads",
        section=sections.GENERAL,
        type=THREADS,
        metavar="N",
        help="Worker threads; the files do not depend on it.  [default: up to 4 cores]",
    ),
    sections.option(
        "--force",
        section=sections.GENERAL,
        is_flag=True,
        help="Write over files that calib8 did not write.",
    ),
)


@click.command("deploy", cls=sections.SectionedCommand, short_help="Files by a record's scales.")
@click.argument("model", type=FILE)
@click.argument("record", type=FILE, required=False)
@sections.option(
    "--cache",
    section=sections.CALIBRATION,
    type=FILE,
    metavar="FILE",
    help="In place of RECORD: a TensorRT calibration cache, whose scales the inputs of the layers"
    " get, symmetric; weights get theirs by ARQ.",
)
@sections.option(
    "--ascend-config",
    section=sections.CALIBRATION,
    type=FILE,
    metavar="FILE",
    help="Configuration that RECORD was made with, where it kept BatchNormalization apart.",
)
@_where_options
def deploy_scales(
    model: Path, record: Path | None, cache: Path | None, ascend_config: Path | None, where: Where
) -> None:
    """Write deploy and fake-quant models of MODEL by the scales of RECORD (AMCT's save_model).

    RECORD is AMCT's or calib8's own, edited or not; layers that it lacks stay float. Nothing is
    calibrated. With --images the result is judged beside MODEL.

    \b
    Examples:
      calib8 ascend deploy model.onnx edited_record.txt -o build/ --soc Ascend310P3
      calib8 ascend deploy model.onnx record.txt -o build/ --images photos/
      calib8 ascend deploy model.onnx --cache model.cache -o build/
    """  # noqa: D301 (click reads the backspace)
    from deploy.deployment import deploy

    report = deploy(
        model,
        record,
        cache=cache,
        config=ascend_config,
        out=where.out,
        target=where.target,
        tried=where.tried,
        threads=where.threads,
        force=where.force,
        progress=True,
    )
    _said(report)


@click.command("convert", cls=sections.SectionedCommand, short_help="Files of a Q/DQ model.")
@click.argument("model", type=FILE, metavar="MODEL.QDQ.ONNX")
@sections.option(
    "--keep-rounding/--no-keep-rounding",
    section=sections.CALIBRATION,
    default=True,
    show_default=True,
    help="Round what float operators read, such as the shortcut of an Add, as the model's pairs do;"
    " without it four operators less for each such tensor, and a little farther from the model.",
)
@_where_options
def convert_pairs(model: Path, keep_rounding: bool, where: Where) -> None:
    """Write deploy and fake-quant models of a Q/DQ model by its own scales.

    The model may be of calib8 qat or export --qdq, ONNX Runtime, ModelOpt or NNCF, trained for
    int8 or calibrated. Weights keep their integers. With --images the result is run in integers
    beside the model in ONNX Runtime. (AMCT: convert_qat_model.)

    \b
    Examples:
      calib8 ascend convert net.qdq.onnx -o build/ --soc Ascend310P3
      calib8 ascend convert net.qdq.onnx -o build/ --images photos/
    """  # noqa: D301 (click reads the backspace)
    from deploy.deployment import convert

    report = convert(
        model,
        keep_rounding=keep_rounding,
        out=where.out,
        target=where.target,
        tried=where.tried,
        threads=where.threads,
        force=where.force,
        progress=True,
    )
    _said(report)


def _said(report: Report) -> None:
    from deploy.report import to_screen

    say_lines(to_screen(report))
