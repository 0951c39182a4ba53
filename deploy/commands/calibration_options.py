"""Options of a calibration: its method, its cache, its cluster, and what is printed about it.

`--method` and the parameters of the searches are generated from the table of searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrators.searches import DEFAULT_METHOD, SEARCHES, parameters, searches_with
from deploy.calibration import DEFAULT_TRT_VERSION
from deploy.commands import base
from deploy.commands.base import verbose_option
from deploy.commands.image_options import ImageArguments
from deploy.errors import ConfigError
from deploy.method import Method
from deploy.terminal import is_text_suppressed, say

if TYPE_CHECKING:
    from deploy.calibration.calibration_result import CalibrationResult
    from deploy.calibration.cluster_jobs import Cluster
    from deploy.calibration.reuse import CachePolicy
    from deploy.feed.feed import Dataset
    from deploy.pipeline.build_options import CalibrationOptions
    from deploy.targets import Target

Command = Callable[..., None]


def method_options(command: Command) -> Command:
    """Add `--method` and its parameters as `method`, and the typed flags as `method_flags`."""
    known = parameters()

    @wraps(command)
    def gathered(method: str, **words: Any) -> None:
        values = {name: words.pop(name) for name in known}
        chosen = Method.of(method, {k: v for k, v in values.items() if v is not None})
        command(method=chosen, method_flags=tuple(base.given_flags("method", *values)), **words)

    wrapped: Command = gathered
    for name, parameter in known.items():  # the last search's first, as decorators are
        wrapped = _option(name, parameter)(wrapped)
    said = (f"{name} {search.help}" for name, search in SEARCHES.items())
    return base.calibration_option(
        "--method",
        type=click.Choice(list(SEARCHES)),
        default=DEFAULT_METHOD,
        help=f"How clip ranges are searched: {'; '.join(said)}.",
    )(wrapped)


def _option(name: str, parameter: Field[Any]) -> Callable[[Command], Command]:
    kind = type(parameter.default)
    return base.calibration_option(
        f"--{name.replace('_', '-')}",
        name,
        type=None if kind is bool else kind,
        is_flag=kind is bool,
        default=None,
        help=f"{parameter.metadata['help']} For --method {' and '.join(searches_with(name))}."
        f"  [default: {parameter.default}]",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationArguments:
    """How ranges are searched and stored, as a command line says it.

    Attributes:
        method_flags: flags of the search that were typed; empty for the default search.
        keep_float: nodes, patterns, `op:` types and `@` files to keep in float.
    """

    method: Method
    method_flags: tuple[str, ...]
    keep_float: tuple[str, ...]
    cache: CachePolicy
    verbose: bool

    def options(
        self,
        path: Path | None,
        method: Method | None,
        images: ImageArguments | None = None,
        **more: Any,
    ) -> CalibrationOptions:
        """The options of a calibration.

        `path`: the cache; None for the default one, or for none.
        `**more`: fields of `CalibrationOptions` that are options of one command.
        """
        from deploy.pipeline.build_options import CalibrationOptions

        return CalibrationOptions(
            method=method,
            cache=replace(self.cache, path=path),
            float_nodes=self.keep_float,
            until_stable=None if images is None else images.until_stable,
            threads=1 if images is None else images.threads,
            **more,
        )

    def refuse_ignored(self, targets: Sequence[Target]) -> None:
        """Refuse options without effect.

        Raises:
            ConfigError: a search that no target follows or that a trusted cache overrides; a cache
                that is both to be used and to be made anew.
        """
        flags = " and ".join(self.method_flags)
        if flags and all(target.own_method for target in targets):
            target = targets[0]
            raise ConfigError(
                f"{flags} must have a target that follows it, got {target.name}, whose ranges are"
                f" found by {target.own_method}"
            )
        if flags and self.cache.trust:
            raise ConfigError(
                f"{flags} chooses ranges, and --trust-cache takes those of the cache as they are;"
                " leave one of them out"
            )
        refuse_both_ways(self.cache)


def refuse_both_ways(policy: CachePolicy) -> None:
    """Refuse --refresh with an option that uses the cache."""
    if policy.refresh and (policy.require or policy.trust):
        other = "--require-cache" if policy.require else "--trust-cache"
        raise ConfigError(
            f"--refresh calibrates anew and {other} uses the cache; leave one of them out"
        )


keep_float_option = base.calibration_option(
    "--keep-float",
    multiple=True,
    metavar="NODES",
    help="Nodes to keep in float: a name, a pattern such as '/model.22/*', op:Sigmoid, or @FILE"
    " with one of these a line. May be repeated.",
)

require_cache_option = base.cache_option(
    "--require-cache", is_flag=True, help="Fail if the cache does not fit."
)
refresh_option = base.cache_option(
    "--refresh", is_flag=True, help="Calibrate even if the cache fits."
)

resume_option = base.cache_option(
    "--resume",
    is_flag=True,
    help="Continue an interrupted calibration from the checkpoint beside its cache.",
)


def calibration_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a calibration; the command gets them as `calibration`."""

    @wraps(command)
    def gathered(method: Method, method_flags: tuple[str, ...], **words: Any) -> None:
        from deploy.calibration.reuse import CachePolicy

        calibration = CalibrationArguments(
            method=method,
            method_flags=method_flags,
            keep_float=words.pop("keep_float"),
            cache=CachePolicy(
                require=words.pop("require_cache"),
                trust=words.pop("trust_cache"),
                refresh=words.pop("refresh"),
                force=words.pop("force"),
                trt_version=words.pop("trt_version"),
            ),
            verbose=words.pop("verbose"),
        )
        command(calibration=calibration, **words)

    options = (
        method_options,
        keep_float_option,
        require_cache_option,
        base.cache_option(
            "--trust-cache", is_flag=True, help="Use a cache without a fingerprint as it is."
        ),
        refresh_option,
        base.cache_option(
            "--force", is_flag=True, help="Overwrite a file that calib8 did not write."
        ),
        base.cache_option(
            "--trt-version",
            metavar="X.Y.Z",
            help="TensorRT that is to read the cache.  [default: the TensorRT that builds here,"
            f" else that of the cache that is there, else {DEFAULT_TRT_VERSION}]",
        ),
        verbose_option,
    )
    return base.add_options(gathered, options)


SECTION = "Many machines"
# of `deploy.calibration.cluster_jobs`, repeated so that --help does not import it
SENDS = ("nothing", "model", "images", "all")

_OPTIONS = (
    base.option(
        "--scheduler",
        section=SECTION,
        metavar="ADDRESS",
        help="Observe on the workers of this dask scheduler, such as tcp://host:8786, which must be"
        " trusted; the result is the same. Needs the extra [dask].",
    ),
    base.option(
        "--send",
        section=SECTION,
        type=click.Choice(SENDS),
        help="What is sent to the workers; they read the rest from the same path as here."
        "  [default: nothing]",
    ),
    base.option(
        "--pieces",
        section=SECTION,
        type=click.IntRange(min=1),
        help="Split the images into N pieces.  [default: 8 for each worker thread, or more]",
    ),
    base.option(
        "--retries",
        section=SECTION,
        type=click.IntRange(min=0),
        help="Retries of a piece whose worker failed.  [default: 2]",
    ),
)


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the dask cluster; the command gets it as `scheduler`, None for this machine."""

    @wraps(command)
    def gathered(scheduler: str | None, **words: Any) -> None:
        cluster_values = {name: words.pop(name) for name in ("send", "pieces", "retries")}
        if scheduler is None:
            base.refuse_without("--scheduler", base.given_flags(*cluster_values))
        command(
            scheduler=None if scheduler is None else _cluster(scheduler, cluster_values), **words
        )

    return base.add_options(gathered, _OPTIONS)


def _cluster(address: str, cluster_values: dict[str, Any]) -> Cluster:
    """The cluster with its options; `--threads` is the number for each piece."""
    from deploy.calibration.cluster_jobs import Cluster

    idle = base.given_flags("require_cache", "trust_cache", "shard")
    if idle:
        raise ConfigError(
            f"--scheduler has its workers observe, got {idle[0]}, which does not; leave one of them"
            " out"
        )
    threads = click.get_current_context().params.get("threads")
    known = {name: value for name, value in cluster_values.items() if value is not None}
    return Cluster(address=address, threads=threads or 1, **known)


def feed_of(
    images: ImageArguments,
    calibration: CalibrationArguments,
    targets: Sequence[Target],
    *,
    tuned: bool = False,
) -> tuple[Dataset, Method | None]:
    """(calibration samples, the method; None where none is asked for).

    A calibrator's script feeds its own batches. Its base class chooses the method, unless a
    search compares methods (`tuned`).
    """
    requested_method = calibration.method if calibration.method_flags else None
    if not images.script:
        return images.dataset, requested_method
    from deploy.feed.calibrator import CalibratorScript
    from deploy.targets.tensorrt.cache_tools import method_of_calibrator

    script = CalibratorScript(images.script)
    dataset = replace(images.dataset, source=script)
    named = method_of_calibrator(script)
    idle = all(target.own_method for target in targets) or calibration.cache.trust
    if requested_method is not None or idle or named is None:
        return dataset, requested_method
    method, why = named
    if tuned:
        script.notes = (_FREE.format(script=script, method=method.label),)
        return dataset, None
    script.notes = (why,)
    return dataset, method


_FREE = (
    "{script} feeds the images, and the search chooses the method; --effort 0 keeps {method}, that"
    " of its base class"
)


def script_cache_notes(dataset: Dataset, path: Path) -> list[str]:
    """A note on how the script's own cache and the one that was written agree."""
    from deploy.feed.calibrator import CalibratorScript

    script = dataset.source
    known = script.cache if isinstance(script, CalibratorScript) else None
    if known is None:
        return []
    from deploy.targets.tensorrt.cache_tools import compare_with_script_cache, read_cache

    return [compare_with_script_cache(known, read_cache(path))]


def print_calibration(
    found: CalibrationResult,
    path: Path,
    *,
    verbose: bool,
    json_path: Path | None,
    notes: Sequence[str] = (),
) -> None:
    """Print what was observed, how ranges were searched, and notes; exit 1 if a target failed."""
    from deploy.feed.feed import preprocessing_notes

    how = "reused" if found.reused else f"written in {found.seconds:.1f} s"
    share = found.feed.share
    why = found.reason if share is None else f"shard {share} of {share.count} samples"
    say(f"{path}: {how} ({why})")
    say(f"{len(found.ranges.observed)} observations of {found.feed.count} images")
    for name, own in found.observations_by_target.items():
        by = "" if not set(own) & set(found.searched) else f", searched by {found.method.label}"
        say(f"  {name}: {len(own)}{by}")
    if found.agreement is not None:
        say(found.agreement.sentence)
    if verbose:
        say(found.cost)
    for name, why in found.range_set.reasons.items():
        say(f"no scale for {name}: it {why}")
    for warning in (*found.doubts, *found.warnings):
        say(warning, err=is_text_suppressed())
    for note in (*found.resumed, *found.notes, *preprocessing_notes(found.feed), *notes):
        say(note)
    base.put_json(json_path, found.to_json)
    for name, why in found.failures.items():
        say(f"calib8: {name} failed: {why}", err=True)
    if found.failures:
        click.get_current_context().exit(1)
