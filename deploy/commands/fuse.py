"""`calib8 fuse`: fold BatchNorm and join ReLU in a PyTorch model, and say what it changed."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.commands.output import told
from deploy.terminal import say


@click.command()
@told
@click.argument("model")
@click.option(
    "--input",
    "shapes",
    multiple=True,
    metavar="SHAPE",
    help="Shape of an input, such as 1x3x224x224; the model is followed with it, not symbolically.",
)
@click.option("--weights", type=click.Path(path_type=Path), help="State dict to load.")
@click.option("--bench", is_flag=True, help="Time it before and after, and compare the outputs.")
def fuse(model: str, shapes: tuple[str, ...], weights: Path | None, bench: bool) -> None:
    """Fuse Conv or Linear with BN and ReLU, and branches, in MODEL (file.py:factory)."""
    from deploy.errors import ConfigError
    from deploy.frontends.torch import parse_shape
    from deploy.fx.fuse import fuse as fuse_module
    from deploy.fx.source import example_inputs, load_module, users_errors

    if bench and not shapes:
        raise ConfigError("--bench runs the model and needs its --input shape")
    inputs = example_inputs([parse_shape(shape) for shape in shapes]) if shapes else None
    module = load_module(model, weights)
    with users_errors(model):
        fused, report = fuse_module(module, inputs)
    for pattern, count in sorted(report.counts().items()):
        say(f"{pattern}: {count} fused")
    for name, reason in report.skipped:
        say(f"left alone: {name}: {reason}")
    say(f"BatchNorm left: {report.norms_left}")
    if bench and inputs:
        from deploy.fx.profile import compare_speed

        with users_errors(model):
            say(compare_speed(module, fused, inputs))
