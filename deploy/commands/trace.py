"""`calib8 trace`: the graph of a PyTorch model as code or as a table."""

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
    metavar="SHAPE",
    help="Shape of an input, such as 1x3x224x224; shows the shapes of all nodes.",
)
@click.option(
    "--leaf",
    "leaves",
    multiple=True,
    metavar="NAME|CLASS",
    help="Module to keep whole, by its name or class.",
)
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
@click.option("--weights", type=click.Path(path_type=Path), help="State dict to load.")
@click.option(
    "--code/--table", "as_code", default=False, help="Print Python code, or the IR table."
)
def trace(
    model: str,
    shapes: tuple[str, ...],
    leaves: tuple[str, ...],
    wraps: tuple[str, ...],
    only: str | None,
    replaced: tuple[str, ...],
    weights: Path | None,
    as_code: bool,
) -> None:
    """Trace MODEL (file.py:factory) and print its graph, the IR table by default."""
    from deploy.errors import ConfigError
    from deploy.frontends.torch import parse_shape
    from deploy.fx.rewrite import propagate_shapes, replace_op
    from deploy.fx.source import example_inputs, load_module, users_errors
    from deploy.fx.table import code, columns, table
    from deploy.fx.trace import submodule
    from deploy.fx.trace import trace as trace_module
    from deploy.fx.wrap import find_function

    module = load_module(model, weights)
    part = submodule(module, only) if only else module
    graph_module = trace_module(part, leaves=leaves, wrap=[find_function(name) for name in wraps])
    for change in replaced:
        op, equals, function = change.partition("=")
        if not equals:
            raise ConfigError(f"--replace takes OP=FUNCTION, as add=torch.mul, got {change!r}")
        replace_op(graph_module, op, find_function(function))
    say_lines(code(graph_module) if as_code else table(graph_module))
    if shapes:
        inputs = example_inputs([parse_shape(shape) for shape in shapes])
        with users_errors(model):
            shaped = propagate_shapes(graph_module, *inputs)
        rows = [(name, str(shape)) for name, shape in shaped.items()]
        say_lines("\n" + columns([("name", "shape"), *rows]))
