"""`calib8 trace`: the graph of a PyTorch model as code or as a table."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.commands import base, given
from deploy.commands.model import leaf_option, torch_inputs, torch_model, torch_options
from deploy.commands.output import told
from deploy.terminal import say_lines


@click.command(cls=base.SectionedCommand)
@told
@click.argument("model")
@torch_options
@leaf_option
@click.option(
    "--wrap",
    "wraps",
    multiple=True,
    metavar="FUNCTION",
    help="Function whose calls are kept as they are, such as len.",
)
@click.option("--only", metavar="SUBMODULE", help="Trace this part of the model alone.")
@click.option(
    "--replace",
    "replaced",
    multiple=True,
    metavar="OP=FUNCTION",
    help="Operation to replace, such as add=torch.mul.",
)
@click.option(
    "--code/--table", "as_code", default=False, help="Print Python code, or the IR table."
)
def trace(
    model: str,
    shapes: tuple[str, ...],
    sample: Path | None,
    weights: Path | None,
    device: str,
    leaves: tuple[str, ...],
    wraps: tuple[str, ...],
    only: str | None,
    replaced: tuple[str, ...],
    as_code: bool,
) -> None:
    """Trace MODEL (file.py:factory or timm:NAME) and print its graph, the IR table by default.

    With --input or --sample, the shapes of all nodes too.
    """
    from deploy.errors import ConfigError
    from deploy.fx.rewrite import propagate_shapes, replace_op
    from deploy.fx.source import users_errors
    from deploy.fx.table import code, columns, table
    from deploy.fx.trace import submodule
    from deploy.fx.trace import trace as trace_module
    from deploy.fx.wrap import find_function

    if not shapes and not sample:
        given.refuse_without("--input or --sample", given.typed("device"))
    module = torch_model(model, weights, device)
    part = submodule(module, only) if only else module
    inputs = torch_inputs(part, shapes, sample) if shapes or sample else None
    graph_module = trace_module(part, leaves=leaves, wrap=[find_function(name) for name in wraps])
    for change in replaced:
        op, equals, function = change.partition("=")
        if not equals:
            raise ConfigError(f"--replace takes OP=FUNCTION, as add=torch.mul, got {change!r}")
        replace_op(graph_module, op, find_function(function))
    say_lines(code(graph_module) if as_code else table(graph_module))
    if inputs is not None:
        with users_errors(model):
            shaped = propagate_shapes(graph_module, *inputs)
        rows = [(name, str(shape)) for name, shape in shaped.items()]
        say_lines("\n" + columns([("name", "shape"), *rows]))
