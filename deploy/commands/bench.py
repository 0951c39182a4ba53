"""`calib8 bench`: latency of one or two models, side by side."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Latency of one or two models, side by side.")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="A second model, run in turn with ENGINE so that noise falls on both; usually the float"
    " model that ENGINE was built from.",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Default: every core.")
@click.option(
    "--warmup",
    type=click.FloatRange(min=0),
    default=200,
    show_default=True,
    metavar="MS",
    help="Time thrown away first, in milliseconds, for each model.",
)
@click.option(
    "--duration",
    type=click.FloatRange(min=0),
    default=3,
    show_default=True,
    metavar="S",
    help="Time measured, in seconds, for each model; 10 runs at the least.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME:DIMS",
    help="Shape of an input that the model leaves open, e.g. images:1x3x224x224; may be repeated."
    " An open batch alone is taken as 1.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Of the random inputs."
)
@click.option("--cuda-graph", is_flag=True, help="Run a TensorRT engine from a CUDA graph.")
@click.option(
    "--streams",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Of a TensorRT engine, measure the throughput of N streams at once too.",
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write as JSON."
)
@click.option(
    "--html", "html_path", type=click.Path(path_type=Path), metavar="FILE", help="Write as a page."
)
def bench(
    engine: Path,
    against: Path | None,
    threads: int | None,
    warmup: float,
    duration: float,
    shapes: tuple[str, ...],
    seed: int,
    cuda_graph: bool,
    streams: int,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Measure the latency of ENGINE: an ONNX model on the CPU, or a TensorRT engine on the GPU.

    Inputs are random, made from the model's own specs. Metrics and percentiles are trtexec's.

    \b
    Examples:
      calib8 bench build/model.int8.onnx --against model.onnx
      calib8 bench model.onnx --shape images:1x3x640x640 --threads 1 --html latency.html
    """  # noqa: D301 (click reads the backspace)
    import json

    from deploy.atomic import write_text
    from deploy.benchmark import bench as run
    from deploy.report import to_html, to_json, to_screen

    report = run(
        engine,
        against=against,
        threads=threads,
        warmup_ms=warmup,
        duration_s=duration,
        shapes=dict(map(_shape, shapes)),
        seed=seed,
        cuda_graph=cuda_graph,
        streams=streams,
        progress=True,
    )
    if json_path is not None:
        write_text(json_path, json.dumps(to_json(report), indent=1) + "\n")
    if html_path is not None:
        write_text(html_path, to_html(report))
    click.echo(to_screen(report), nl=False)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Split "name:1x3x224x224" into name and dimensions; the name may itself hold colons."""
    name, _, dims = text.rpartition(":")
    parts = dims.replace(",", "x").split("x")
    if not name or not all(part.isdecimal() for part in parts):
        raise click.BadParameter(
            f"must look like name:1x3x224x224, got {text!r}", param_hint="--shape"
        )
    return name, tuple(map(int, parts))
