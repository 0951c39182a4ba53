"""`calib8 profile`: time, FLOPs, MACs and parameters of a PyTorch model, node by node."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.commands import base
from deploy.commands.model import leaf_option, torch_inputs, torch_model, torch_options
from deploy.commands.output import html_option, json_option, put_json, quietable
from deploy.terminal import say, say_lines


@click.command(cls=base.SectionedCommand)
@quietable("--json", "--html")
@click.argument("model")
@torch_options
@leaf_option
@base.option(
    "--warm-up",
    section=base.MEASURING,
    default=5,
    show_default=True,
    type=click.IntRange(0),
    help="Runs before the clock starts.",
)
@base.option(
    "--runs",
    section=base.MEASURING,
    default=20,
    show_default=True,
    type=click.IntRange(1),
    help="Runs that are timed.",
)
@json_option
@html_option
def profile(
    model: str,
    shapes: tuple[str, ...],
    sample: Path | None,
    weights: Path | None,
    device: str,
    leaves: tuple[str, ...],
    warm_up: int,
    runs: int,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Run MODEL (file.py:factory or timm:NAME) and print what each node costs, slowest first."""
    from deploy.errors import ConfigError
    from deploy.files.atomic import write_text
    from deploy.fx.capture import graph_of
    from deploy.fx.profile import COUNTED
    from deploy.fx.profile import profile as profile_graph
    from deploy.fx.source import users_errors
    from deploy.report.profiled import profile_page

    if not shapes and not sample:
        raise ConfigError("profile runs the model and needs its --input shape, or a --sample")
    module = torch_model(model, weights, device)
    inputs = torch_inputs(module, shapes, sample)
    with users_errors(model):
        graph_module = graph_of(module, inputs, leaves=leaves)
        result = profile_graph(graph_module, inputs, warm_up=warm_up, runs=runs)
    say_lines(result.table())
    say(COUNTED)
    if device == "meta":
        say("nothing was computed on the meta device: the times are those of Python alone")
    put_json(json_path, result.to_json)
    if html_path is not None:
        ran = f"{runs} runs on {device}, of inputs {', '.join(map(_told, inputs))}"
        write_text(html_path, profile_page(result, name=model, notes=[ran, COUNTED]))
        say(f"{html_path}: written")


def _told(tensor: object) -> str:
    """Shape and dtype of a tensor, as `--input` takes them."""
    shape = "x".join(map(str, getattr(tensor, "shape", ())))
    return f"{shape}:{str(getattr(tensor, 'dtype', '')).removeprefix('torch.')}"
