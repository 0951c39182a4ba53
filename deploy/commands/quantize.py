"""`calib8 quantize`: quantize given values; print scale, zero point, integers and error."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import click

from deploy.commands import base
from deploy.commands.base import json_option, put_json, quietable
from deploy.commands.calibration_options import method_options
from deploy.method import Method
from deploy.terminal import say_lines

_grid_option = partial(base.option, section="Grid")
Number = TypeVar("Number", int, float)


def _numbers(kind: Callable[[str], Number], what: str) -> Callable[..., list[Number] | None]:
    """Return a click callback that reads numbers with commas between them."""

    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> list[Number] | None:
        """Return the numbers; None if the option is not given."""
        try:
            return None if text is None else list(map(kind, text.split(",")))
        except ValueError:
            raise click.BadParameter(
                f"must be {what} with commas between them, got {text!r}"
            ) from None

    return read


@base.sectioned_command()
@quietable("--json")
@click.argument("values")
@_grid_option(
    "--dtype",
    type=click.Choice(["quint8", "qint8", "qint32"]),
    default="quint8",
    help="Integers to store, by torch's name: 0..255, -128..127 or 32 bits.",
)
@_grid_option(
    "--scale",
    "scales",
    metavar="X[,X...]",
    callback=_numbers(float, "numbers"),
    help="Scale, in place of a search; one for each channel with --axis.",
)
@_grid_option(
    "--zero-point",
    "zeros",
    metavar="N[,N...]",
    callback=_numbers(int, "whole numbers"),
    help="Zero point, with --scale.  [default: 0]",
)
@_grid_option("--axis", type=int, help="Channel axis, for per-channel scales.")
@method_options
@json_option
def quantize(
    values: str,
    dtype: str,
    scales: list[float] | None,
    zeros: list[int] | None,
    axis: int | None,
    method: Method | None,
    json_path: Path | None,
) -> None:
    """Quantize VALUES: a JSON array such as '[-1, 0, 1, 2]', or an .npy file.

    Prints scale and zero point, the integer and the dequantized value of each value, and the error.
    The range is searched in the values, or given by --scale and --zero-point.
    """
    from deploy.analysis import experiment

    result = experiment.quantize(
        experiment.read_values(values),
        method=method,
        scales=scales,
        zero_points=zeros,
        axis=axis,
        dtype=dtype,
    )
    say_lines(result.to_screen())
    put_json(json_path, result.to_json)
