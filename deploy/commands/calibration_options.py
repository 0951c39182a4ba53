"""Options of how ranges are found, kept and used again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from deploy.calibration import DEFAULT_TRT_VERSION
from deploy.commands import base
from deploy.commands.methods import method_options
from deploy.commands.output import verbose_option
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.calibration.reuse import CachePolicy
    from deploy.method import Method
    from deploy.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """What `calibration_options` gathers from the command line.

    Attributes:
        method: the search.
        asked: flags of the search that were typed; empty where it is the default's.
        keep_float: nodes, patterns, `op:` types and `@` files to keep in float.
        cache: when a cache is used again; without its path, which each command names its own way.
        verbose: whether to print what was counted.
    """

    method: Method
    asked: tuple[str, ...]
    keep_float: tuple[str, ...]
    cache: CachePolicy
    verbose: bool

    def refuse_ignored(self, targets: Sequence[Target]) -> None:
        """Refuse what was asked and would change nothing.

        Raises:
            ConfigError: a search that no target follows, or that a trusted cache leaves no room
                for; a cache that is to be made anew and to be used.
        """
        asked = " and ".join(self.asked)
        if asked and all(target.own_method for target in targets):
            target = targets[0]
            raise ConfigError(
                f"{asked} must have a target that follows it, got {target.name}, whose ranges are"
                f" found by {target.own_method}"
            )
        if asked and self.cache.trust:
            raise ConfigError(
                f"{asked} chooses ranges, and --trust-cache takes those of the cache as they are;"
                " leave one of them away"
            )
        refuse_both_ways(self.cache)


def refuse_both_ways(policy: CachePolicy) -> None:
    """Refuse a cache that is to be made anew and to be used.

    Raises:
        ConfigError: it is both.
    """
    if policy.refresh and (policy.require or policy.trust):
        other = "--require-cache" if policy.require else "--trust-cache"
        raise ConfigError(
            f"--refresh calibrates anew and {other} uses the cache; leave one of them away"
        )


keep_float_option = base.option(
    "--keep-float",
    section=base.CALIBRATION,
    multiple=True,
    metavar="NODES",
    help="Nodes to keep in float: a name, a pattern such as '/model.22/*', op:Sigmoid, or @FILE"
    " with one of these a line. May be repeated.",
)


require_cache_option = base.option(
    "--require-cache",
    section=base.CACHE,
    is_flag=True,
    help="Fail where the cache does not fit.",
)
refresh_option = base.option(
    "--refresh",
    section=base.CACHE,
    is_flag=True,
    help="Calibrate even where the cache fits.",
)


resume_option = base.option(
    "--resume",
    section=base.CACHE,
    is_flag=True,
    help="Go on with a calibration that was ended, from the checkpoint beside its file.",
)


def calibration_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add how ranges are found and kept; the command gets them as `calibration`."""

    @wraps(command)
    def gathered(method: Method, asked: tuple[str, ...], **words: Any) -> None:
        from deploy.calibration.reuse import CachePolicy

        calibration = CalibrationOptions(
            method=method,
            asked=asked,
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
        base.option(
            "--trust-cache",
            section=base.CACHE,
            is_flag=True,
            help="Use a cache that has no fingerprint, as it is.",
        ),
        refresh_option,
        base.option(
            "--force",
            section=base.CACHE,
            is_flag=True,
            help="Write over a file that calib8 did not write.",
        ),
        base.option(
            "--trt-version",
            section=base.CACHE,
            metavar="X.Y.Z",
            help="TensorRT that is to read the cache.  [default: the TensorRT that builds here,"
            f" else that of the cache that is there, else {DEFAULT_TRT_VERSION}]",
        ),
        verbose_option,
    )
    return base.added(gathered, options)
