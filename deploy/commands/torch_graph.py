"""Commands on the graph of a PyTorch model.

`calib8 trace` prints it as code or as a table, `calib8 fuse` folds BatchNorm and joins ReLU, and
`calib8 profile` prints time, FLOPs, MACs and parameters of each node.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands import base
from deploy.commands.base import html_option, json_option, put_json, quietable, shows_progress
from deploy.commands.model_options import TorchArguments, leaf_option, torch_options
from deploy.errors import ConfigError, counted
from deploy.files.atomic import write_text
from deploy.terminal import say, say_lines

if TYPE_CHECKING:
    import torch


@base.sectioned_command()
@shows_progress
@torch_options
@leaf_option
@click.option(
    "--wrap",
    "wraps",
    multiple=True,
    metavar="FUNCTION",
    help="Function not to trace into, such as len.",
)
@click.option("--only", metavar="SUBMODULE", help="Trace this submodule only.")
@click.option(
    "--replace",
    "replacements",
    multiple=True,
    metavar="OP=FUNCTION",
    help="Operation to replace, such as add=torch.mul.",
)
@click.option(
    "--code/--table", "as_code", default=False, help="Print Python code, or the IR table."
)
def trace(
    source: TorchArguments,
    leaves: tuple[str, ...],
    wraps: tuple[str, ...],
    only: str | None,
    replacements: tuple[str, ...],
    as_code: bool,
) -> None:
    """Trace MODEL (file.py:factory or timm:NAME) and print its graph, the IR table by default.

    With --input or --sample, print the shapes of all nodes too.
    """
    from deploy.fx.graph_text import format_columns, format_graph, graph_source
    from deploy.fx.operations import propagate_shapes, replace_op
    from deploy.fx.source import wrap_user_errors
    from deploy.fx.trace import find_function, submodule
    from deploy.fx.trace import trace as trace_module

    if not source.has_inputs:  # then nothing is run on a device
        base.refuse_given("device", without="--input or --sample")
    module = source.load()
    if only:
        module = submodule(module, only)
    inputs = source.inputs(module) if source.has_inputs else None
    wrapped_functions = list(map(find_function, wraps))
    graph_module = trace_module(module, leaves=leaves, wrap=wrapped_functions)
    for replacement in replacements:
        op, equals_sign, function_name = replacement.partition("=")
        if not equals_sign:
            raise ConfigError(f"--replace takes OP=FUNCTION, as add=torch.mul, got {replacement!r}")
        replace_op(graph_module, op, find_function(function_name))

    say_lines(graph_source(graph_module) if as_code else format_graph(graph_module))
    if inputs is not None:
        with wrap_user_errors(source.model):
            shape_by_node = propagate_shapes(graph_module, *inputs)
        rows = [(name, str(shape)) for name, shape in shape_by_node.items()]
        say_lines("\n" + format_columns([("name", "shape"), *rows]))


@base.sectioned_command()
@shows_progress
@torch_options
@leaf_option
@base.measuring_option(
    "--bench", is_flag=True, help="Time it before and after, and compare the outputs."
)
def fuse(
    source: TorchArguments,
    leaves: tuple[str, ...],
    bench: bool,
) -> None:
    """Fuse Conv or Linear with BN and ReLU, and branches, in MODEL (file.py:factory, timm:NAME).

    With --input or --sample the model is traced by running it, else symbolically.
    """
    from deploy.fx.comparison import check_same_outputs, compare_speed
    from deploy.fx.fuse import fuse as fuse_module
    from deploy.fx.source import wrap_user_errors
    from deploy.fx.trace import trace

    if bench:
        source.refuse_without_inputs("--bench")
        source.refuse_meta_device("a run")
    elif not source.has_inputs:  # then nothing is run on a device
        base.refuse_given("device", without="--input or --sample")

    module = source.load()
    inputs = source.inputs(module) if source.has_inputs else None
    with wrap_user_errors(source.model):
        traced_module = trace(module, leaves=leaves) if leaves else module
        fused_module, report = fuse_module(traced_module, inputs)
    say_lines(report.to_screen())
    if bench and inputs is not None:
        with wrap_user_errors(source.model):
            check_same_outputs(module, fused_module, inputs, "fusing")
            say(compare_speed(module, fused_module, inputs))


@base.sectioned_command()
@quietable("--json", "--html")
@torch_options
@leaf_option
@base.measuring_option(
    "--warm-up", default=5, type=click.IntRange(0), help="Untimed runs before the timed ones."
)
@base.measuring_option("--runs", default=20, type=click.IntRange(1), help="Timed runs.")
@json_option
@html_option
def profile(
    source: TorchArguments,
    leaves: tuple[str, ...],
    warm_up: int,
    runs: int,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Run MODEL (file.py:factory or timm:NAME) and print what each node costs, slowest first."""
    from deploy.fx.profile import FLOPS_NOTE
    from deploy.fx.profile import profile as profile_model
    from deploy.fx.source import wrap_user_errors
    from deploy.report.profile_page import profile_page

    source.refuse_without_inputs("profile")
    module = source.load()
    inputs = source.inputs(module)
    with wrap_user_errors(source.model):
        result = profile_model(module, inputs, leaves=leaves, warm_up=warm_up, runs=runs)
    say_lines(result.to_screen())
    if source.device == "meta":
        say("nothing was computed on the meta device: the times are those of Python alone")
    put_json(json_path, result.to_json)
    if html_path is not None:
        run_note = (
            f"{counted(runs, 'run')} on {source.device}, of inputs {', '.join(map(_spec, inputs))}"
        )
        page = profile_page(result, name=source.model, notes=[run_note, FLOPS_NOTE])
        write_text(html_path, page)
        say(f"{html_path}: written")


def _spec(tensor: torch.Tensor) -> str:
    """Return shape and dtype of a tensor in the syntax of `--input`."""
    return f"{'x'.join(map(str, tensor.shape))}:{str(tensor.dtype).removeprefix('torch.')}"
