"""`calib8 fuse`: fold BatchNorm and join ReLU in a PyTorch model, and say what it changed."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.commands import base, given
from deploy.commands.model import leaf_option, torch_inputs, torch_model, torch_options
from deploy.commands.output import told
from deploy.terminal import say


@click.command(cls=base.SectionedCommand)
@told
@click.argument("model")
@torch_options
@leaf_option
@base.option(
    "--bench",
    section=base.MEASURING,
    is_flag=True,
    help="Time it before and after, and compare the outputs.",
)
@base.option(
    "-o",
    "--out",
    section=base.GENERAL,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the fused model: .onnx, or .pt2 for torch.export.load.",
)
def fuse(
    model: str,
    shapes: tuple[str, ...],
    sample: Path | None,
    weights: Path | None,
    device: str,
    leaves: tuple[str, ...],
    bench: bool,
    out: Path | None,
) -> None:
    """Fuse Conv or Linear with BN and ReLU, and branches, in MODEL (file.py:factory, timm:NAME).

    With --input or --sample the model is followed with it, not symbolically.
    """
    from deploy.errors import ConfigError
    from deploy.fx.device import find_device, refuse_meta
    from deploy.fx.fuse import fuse as fuse_module
    from deploy.fx.same import check_same
    from deploy.fx.saved import check_suffix, write_fused
    from deploy.fx.source import users_errors
    from deploy.fx.trace import trace

    runs = bench or out is not None
    given_inputs = bool(shapes or sample)
    if runs and not given_inputs:
        raise ConfigError(
            f"{'--bench' if bench else '--out'} runs the model and needs its --input shape"
        )
    if not given_inputs:
        given.refuse_without("--input or --sample", given.typed("device"))
    if out is not None:
        check_suffix(out)
    if runs:
        refuse_meta(find_device(device), "a run")
    module = torch_model(model, weights, device)
    inputs = torch_inputs(module, shapes, sample) if given_inputs else None
    with users_errors(model):
        traced = trace(module, leaves=leaves) if leaves else module
        fused, report = fuse_module(traced, inputs)
    for pattern, count in sorted(report.counts().items()):
        say(f"{pattern}: {count} fused")
    for name, reason in report.skipped:
        say(f"left alone: {name}: {reason}")
    say(f"BatchNorm left: {report.norms_left}")
    if not runs or inputs is None:
        return
    with users_errors(model):
        check_same(module, fused, inputs, "fusing")
        if bench:
            from deploy.fx.profile import compare_speed

            say(compare_speed(module, fused, inputs))
        if out is not None:
            say(write_fused(out, fused, module, inputs))
            say(f"{out}: {out.stat().st_size} bytes")
