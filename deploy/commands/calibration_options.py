"""Options of a calibration: its method, its cache, its cluster, and what is printed about it.

`--method` and the parameters of the searches are generated from the table of searches.
"""

from __future__ import annotations

from dataclasses import Field
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrators.searches import DEFAULT_METHOD, SEARCHES, parameters, searches_with
from deploy.calibration import DEFAULT_TRT_VERSION
from deploy.commands import base
from deploy.commands.base import CommandArguments, Decorator, verbose_option
from deploy.method import Method
from deploy.terminal import is_text_suppressed, say, say_lines

if TYPE_CHECKING:
    from deploy.calibration.calibration_result import CalibrationResult


def _gather_method(arguments: CommandArguments) -> None:
    """Replace `method` and its parameters by a `Method`, or by None if none of them is given."""
    values = {name: arguments.pop(name) for name in parameters()}
    checked_method = Method.of(arguments["method"], values)
    # a method by click's default value is none that the user chose
    is_chosen = bool(given_method_flags())
    arguments["method"] = checked_method if is_chosen else None


def given_method_flags() -> list[str]:
    """Return the flags of `method_options` that the user gave to the command that runs."""
    return base.given_flags("method", *parameters())


def _parameter_option(name: str, parameter: Field[Any]) -> Decorator:
    """Return the option of a search's parameter, a field of its dataclass."""
    is_flag = isinstance(parameter.default, bool)
    return base.calibration_option(
        f"--{name.replace('_', '-')}",
        name,
        type=None if is_flag else type(parameter.default),
        is_flag=is_flag,
        default=None,
        help=f"{parameter.metadata['help']} For --method {' and '.join(searches_with(name))}."
        f"  [default: {parameter.default}]",
    )


_METHOD_HELP = "; ".join(f"{name} {search.help}" for name, search in SEARCHES.items())
# `--method` and the parameters of all searches, which a command gets as `method`
method_options = base.gathered_options(
    _gather_method,
    (
        base.calibration_option(
            "--method",
            type=click.Choice(list(SEARCHES)),
            default=DEFAULT_METHOD,
            help=f"How clip ranges are searched: {_METHOD_HELP}.",
        ),
        *starmap(_parameter_option, parameters().items()),
    ),
)

keep_float_option = base.calibration_option(
    "--keep-float",
    multiple=True,
    metavar="NODES",
    help="Nodes to keep in float: a name, a pattern such as '/model.22/*', a PyTorch module's"
    " path, op:Sigmoid, or @FILE with one of these a line. May be repeated.",
)

require_cache_option = base.cache_option(
    "--require-cache", is_flag=True, help="Fail if the cache does not fit."
)
refresh_option = base.cache_option(
    "--refresh", is_flag=True, help="Calibrate even if the cache fits. A build also searches again."
)

resume_option = base.cache_option(
    "--resume",
    is_flag=True,
    help="Continue an interrupted calibration from the checkpoint beside its cache.",
)


def _gather_calibration(arguments: CommandArguments) -> None:
    """Put a `CalibrationOptions` in as `calibration`, whose cache has no path yet."""
    from deploy.calibration.reuse import CachePolicy
    from deploy.pipeline.build_options import CalibrationOptions

    policy = CachePolicy(
        require=arguments.pop("require_cache"),
        trust=arguments.pop("trust_cache"),
        refresh=arguments.pop("refresh"),
        force=arguments.pop("force"),
        trt_version=arguments.pop("trt_version"),
    )
    arguments["calibration"] = CalibrationOptions(
        method=arguments.pop("method"), cache=policy, float_nodes=arguments.pop("keep_float")
    )


# the options of a calibration, which a command gets as `calibration`, and --verbose
calibration_options = base.gathered_options(
    _gather_calibration,
    (
        method_options,
        keep_float_option,
        require_cache_option,
        base.cache_option(
            "--trust-cache",
            is_flag=True,
            help="Use the file of --cache as it is, without a fingerprint.",
        ),
        refresh_option,
        base.cache_option(
            "--force", is_flag=True, help="Overwrite a file that calib8 did not write."
        ),
        base.cache_option(
            "--trt-version",
            metavar="X.Y.Z",
            help="TensorRT that will read the cache.  [default: the installed TensorRT, else that"
            f" of the stored cache, else {DEFAULT_TRT_VERSION}]",
        ),
        verbose_option,
    ),
)


_cluster_option = partial(base.option, section="Many machines")
# of `deploy.calibration.cluster_jobs`, repeated so that --help does not import it
SENDS = ("nothing", "model", "images", "all")


def _gather_cluster(arguments: CommandArguments) -> None:
    """Replace the address `scheduler` and its options by a `Cluster`; None for this machine."""
    values = {name: arguments.pop(name) for name in ("send", "pieces", "retries")}
    address = arguments["scheduler"]
    if address is None:
        base.refuse_given(*values, without="--scheduler")
        return

    from deploy.calibration.cluster_jobs import Cluster

    # with these, nothing is observed on the workers
    base.refuse_beside("--scheduler", "require_cache", "trust_cache", "shard")
    given_values = {name: value for name, value in values.items() if value is not None}
    # `--threads` is the number for each piece of the images
    threads = click.get_current_context().params.get("threads")
    arguments["scheduler"] = Cluster(address=address, threads=threads or 1, **given_values)


# the dask cluster, which a command gets as `scheduler`
cluster_options = base.gathered_options(
    _gather_cluster,
    (
        _cluster_option(
            "--scheduler",
            metavar="ADDRESS",
            help="Observe on the workers of this dask scheduler, such as tcp://host:8786, which"
            " must be trusted; the result is the same. Needs the extra [dask].",
        ),
        _cluster_option(
            "--send",
            type=click.Choice(SENDS),
            help="What is sent to the workers; they read the rest from the same path as here."
            "  [default: nothing]",
        ),
        _cluster_option(
            "--pieces",
            type=click.IntRange(min=1),
            help="Split the images into N pieces.  [default: 8 for each worker thread, or more]",
        ),
        _cluster_option(
            "--retries",
            type=click.IntRange(min=0),
            help="Retries of a piece whose worker failed.  [default: 2]",
        ),
    ),
)


def print_calibration(
    result: CalibrationResult,
    path: Path,
    *,
    verbose: bool,
    json_path: Path | None,
) -> None:
    """Print what was observed and how ranges were searched; exit 1 if a target failed.

    The text includes doubts and warnings. If text is suppressed, these are printed on stderr.
    """
    say_lines(result.to_screen(file=path, everything=verbose))
    if is_text_suppressed():
        for warning in (*result.doubts, *result.warnings):
            say(warning, err=True)
    base.put_json(json_path, result.to_json)
    for target, reason in result.failures.items():
        say(f"calib8: {target} failed: {reason}", err=True)
    if result.failures:
        click.get_current_context().exit(1)
