"""`calib8 profile`: time, FLOPs, MACs and parameters of a PyTorch model, node by node."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.commands.output import told
from deploy.terminal import say_lines


@click.command()
@told
@click.argument("model")
@click.option(
    "--input",
    "shapes",
    multiple=True,
    required=True,
    metavar="SHAPE",
    help="Shape of an input, such as 5x3x224x224.",
)
@click.option(
    "--leaf",
    "leaves",
    multiple=True,
    metavar="NAME|CLASS",
    help="Module to keep whole, by its name or class.",
)
@click.option("--weights", type=click.Path(path_type=Path), help="State dict to load.")
@click.option(
    "--warm-up",
    default=5,
    show_default=True,
    type=click.IntRange(0),
    help="Runs before the clock starts.",
)
@click.option(
    "--runs", default=20, show_default=True, type=click.IntRange(1), help="Runs that are timed."
)
def profile(
    model: str,
    shapes: tuple[str, ...],
    leaves: tuple[str, ...],
    weights: Path | None,
    warm_up: int,
    runs: int,
) -> None:
    """Run MODEL (file.py:factory) node by node and print what each node costs, slowest first."""
    from deploy.frontends.torch import parse_shape
    from deploy.fx.capture import graph_of
    from deploy.fx.profile import profile as profile_graph
    from deploy.fx.source import example_inputs, load_module, users_errors

    inputs = example_inputs([parse_shape(shape) for shape in shapes])
    with users_errors(model):
        graph_module = graph_of(load_module(model, weights), inputs, leaves=leaves)
        result = profile_graph(graph_module, inputs, warm_up=warm_up, runs=runs)
    say_lines(result.table())
