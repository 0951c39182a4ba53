"""`calib8 qat`: train a PyTorch model for int8 and export it with Q/DQ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import base, given
from deploy.commands.methods import method_options
from deploy.commands.model_options import one_target
from deploy.commands.output import quietable
from deploy.targets import Target
from deploy.terminal import say, say_lines

if TYPE_CHECKING:
    from deploy.method import Method


@click.command(cls=base.SectionedCommand)
@quietable()
@click.argument("script")
@one_target(base.TARGETS)
@click.option(
    "--bits", default=8, show_default=True, type=int, help="Bits of weights and activations."
)
@click.option(
    "--ranges",
    type=click.Choice(["kept", "follow", "learned"]),
    help="What becomes of the ranges while training, in place of the task's own: kept as they were"
    " found, following the data, or with scales that are trained.",
)
@click.option("--epochs", type=click.IntRange(min=0), help="In place of the task's own.")
@click.option("--teacher", metavar="FILE.PY:FACTORY", help="Float model to distil from.")
@click.option(
    "--teacher-weights", type=click.Path(path_type=Path), help="State dict of the teacher."
)
@click.option(
    "--distil", multiple=True, metavar="STUDENT=TEACHER", help="Modules whose outputs are compared."
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="File that is written after each epoch, and gone on from.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Where to train: cpu, cuda or cuda:1; batches are brought there.",
)
@click.option("--amp", is_flag=True, help="Train in bfloat16 where torch.autocast does.")
@click.option("--scales", is_flag=True, help="Print every activation's scale and zero point.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="ONNX file to write."
)
@method_options
def qat(
    script: str,
    target: Target,
    bits: int,
    ranges: str | None,
    epochs: int | None,
    teacher: str | None,
    teacher_weights: Path | None,
    distil: tuple[str, ...],
    checkpoint: Path | None,
    device: str,
    amp: bool,
    scales: bool,
    out: Path,
    method: Method,
    asked: tuple[str, ...],
) -> None:
    """Train the task that SCRIPT (train.py:setup) returns for TARGET's int8, and export it.

    \b
    from deploy.fx.qat import Task
    def setup():
        return Task(model=..., inputs=[...], batches=..., loss=..., evaluate=...)

    --method and what belongs to it, --ranges and --epochs stand in place of the task's own.
    """  # noqa: D301 (click reads the backspace)
    from dataclasses import replace

    from deploy.errors import ConfigError
    from deploy.files.atomic import write_bytes
    from deploy.fx import export
    from deploy.fx.arguments import in_order
    from deploy.fx.calibrate import float_form
    from deploy.fx.coverage import coverage, refuse_float
    from deploy.fx.device import CPU, find_device, moved, refuse_meta
    from deploy.fx.fuse import norms_in_float
    from deploy.fx.model_inputs import as_dict
    from deploy.fx.modes import measure, report, scales_report
    from deploy.fx.prepare import target_of
    from deploy.fx.qat import Task, first_batches, train
    from deploy.fx.source import call_factory, load_module, users_errors

    if teacher is None:
        given.refuse_without("--teacher", given.typed("teacher_weights"))
    place = find_device(device)
    refuse_meta(place, "a training")
    task = call_factory(script)
    if not isinstance(task, Task):
        raise ConfigError(f"{script} must return a deploy.fx.qat.Task, got {type(task).__name__}")
    if asked:
        task = replace(task, method=method)
    if ranges is not None:
        task = replace(task, ranges=ranges)
    if amp:
        task = replace(task, amp=True)
    if epochs is not None:
        task = replace(task, epochs=epochs)
    if teacher is not None:
        task = replace(task, teacher=load_module(teacher, teacher_weights))
    if distil:
        task = replace(task, distil=[_pair(text) for text in distil])
    task = in_order(task)
    if told := as_dict(task.model):
        say(told)
    with users_errors(script):
        trained = train(
            task,
            target=target,
            bits=bits,
            checkpoint=checkpoint,
            device=place if given.typed("device") else None,
            report=say,
        )
        batches = first_batches(task)
    covered = coverage(trained.converted, task.model, [*(task.convert or {}).values()])
    refuse_float(covered)
    say(str(covered))
    if trained.end is not None:
        say(f"after training ({bits} bits): {trained.end:.4f}")
    exported = export.to_onnx(trained.converted, moved(list(task.inputs), CPU))
    kernels = target_of(target).runs_here
    say(str(export.compare(exported, trained.converted, batches, kernels=kernels)))
    if left := norms_in_float(trained.converted):
        say(left)
    result = measure("qat", float_form(trained.prepared), trained.converted, batches)
    say_lines(report([result]))
    say("error and SQNR are of the trained model: its int8 form against its own weights in float")
    if scales:
        say_lines(scales_report(trained.converted))
    write_bytes(out, exported.SerializeToString(deterministic=True))
    say(f"{out}: {out.stat().st_size} bytes")


def _pair(text: str) -> tuple[str, str]:
    """`student=teacher`, or one name for both."""
    student, equals, teacher = text.partition("=")
    return student, teacher if equals else student
