"""Options that several commands share, and how their words become values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deploy.calibration import DEFAULT_TRT_VERSION
from deploy.commands import sections
from deploy.commands.completion import among_those_of
from deploy.commands.methods import method_options
from deploy.commands.numbers import THREADS, Real
from deploy.commands.output import verbose_option
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.calibration.reuse import CachePolicy
    from deploy.feed.choice import Limit
    from deploy.feed.preprocess import Asked, Sides
    from deploy.feed.raw import RawFiles
    from deploy.method import Method
    from deploy.targets import Target

SOURCES = (
    "Folder, pattern, list file (path, or path and label) or COCO json of images, or of .npy, .npz"
    " or .bin files; a video; or loader.py:function"
)

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """What `image_options` and `feed_options` gather from the command line.

    Attributes:
        source: of the images, with the form of raw files where it is said; "" where a script feeds.
        script: `file.py:function` of a TensorRT calibrator; "" where images do.
        limit: which samples are used.
        skip_bad: whether to go on without unreadable images.
        until_stable: share of a range by which halves may differ; None looks at all images.
        preprocess: how images become inputs; None without an option of it.
        threads: worker threads.
    """

    source: str | RawFiles
    script: str
    limit: Limit
    skip_bad: bool
    until_stable: float | None
    preprocess: Asked
    threads: int

    def alike(self, path: str | None) -> str | RawFiles | None:
        """Images of another option, as `deploy.feed.raw.alike`."""
        from deploy.feed.raw import alike

        return path if path is None or isinstance(self.source, str) else alike(self.source, path)


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


PRESET_NAMES = (  # of `deploy.feed.presets`, said here so that --help imports nothing for it
    "raw, unit, grey-half, imagenet, minus-one-to-one, imagenet-tf, efficientnet-lite, yolo,"
    " picodet, ppocr-det, ppocr-rec or ppocr-cls"
)
PREPROCESS = (
    ("--preprocess", "preset", f"Preset: how images become inputs: {PRESET_NAMES}."),
    (
        "--size",
        "size",
        "Input size as HxW; 48x* and native leave sides to each image. The default is the model's.",
    ),
    ("--multiple", "multiple", "Round what --size leaves to the image to multiples of so many."),
    ("--resize", "resize", "Way to the size: stretch, letterbox, short-side or fit-height."),
    ("--short-side", "short_side", "Short side in pixels before the centre crop."),
    ("--interpolation", "interpolation", "OpenCV's: nearest, linear, cubic, area or lanczos."),
    ("--color", "color", "Order of the channels: rgb, bgr or grey."),
    ("--scale", "scale", "Factor of a pixel of 0..255, such as 1/255."),
    ("--mean", "mean", "Mean after scaling: one value, or one a channel: 0.5,0.5,0.5."),
    ("--std", "std", "Standard deviation after scaling, like --mean."),
    ("--pad", "pad", "Border of letterbox in pixel units."),
    ("--layout", "layout", "Order of the axes: nchw or nhwc."),
)


_NAMES = {
    "preset": among_those_of("deploy.feed.presets", "PRESETS"),
    "resize": among_those_of("deploy.feed.preprocess", "RESIZES"),
    "interpolation": among_those_of("deploy.feed.preprocess", "INTERPOLATIONS"),
    "color": among_those_of("deploy.feed.preprocess", "COLORS"),
    "layout": among_those_of("deploy.feed.preprocess", "LAYOUTS"),
}


_RAW = (
    sections.option(
        "--raw-shape",
        section=sections.IMAGES,
        metavar="DIMS",
        help="Shape of a sample in .bin and .raw files, such as 1x3x224x224; of pictures 480x640x3."
        "  [default: the input's]",
    ),
    sections.option(
        "--raw-dtype",
        section=sections.IMAGES,
        metavar="NAME",
        shell_complete=among_those_of("deploy.feed.raw", "DTYPES"),
        help="Their dtype, little-endian, such as float16; uint8 are pictures, unless the input is"
        " of uint8 and no preprocessing is asked for.  [default: the input's]",
    ),
)


def raw_options(command: Command) -> Command:
    """Add the form of files without a header; `raw_from` gathers it."""
    for option in reversed(_RAW):
        command = option(command)
    return command


def raw_from(words: dict[str, Any], source: str) -> str | RawFiles:
    """Take the words of `raw_options` out of a command's; the source in the form that they say.

    Raises:
        ConfigError: as `RawFiles`, or a shape that does not read as one.
    """
    shape, dtype = words.pop("raw_shape"), words.pop("raw_dtype")
    if shape is None and dtype is None:
        return source
    if not source:
        raise ConfigError(
            "--raw-shape and --raw-dtype are of the files of --images, which was not given; leave"
            " them away"
        )
    from deploy.feed.raw import RawFiles

    sides = None if shape is None else tuple(_whole("--raw-shape", s) for s in shape.split("x"))
    return RawFiles(source, shape=sides, dtype=dtype)


def preprocess_options(command: Command) -> Command:
    """Add the options of `preprocess`."""
    for flag, name, text in reversed(PREPROCESS):
        command = sections.option(
            flag,
            name,
            section=sections.IMAGES,
            help=text,
            shell_complete=_NAMES.get(name),
        )(command)
    return command


_CHOICE = (
    sections.option(
        "--limit",
        section=sections.IMAGES,
        type=click.IntRange(min=1),
        help="Use at most so many images, spread evenly over all.",
    ),
    sections.option(
        "--sample",
        section=sections.IMAGES,
        type=click.IntRange(min=1),
        help="Use at most so many images, drawn by lot.",
    ),
    sections.option(
        "--sample-seed",
        section=sections.IMAGES,
        type=click.IntRange(min=0),
        help="Of the lot of --sample.  [default: 0]",
    ),
    sections.option(
        "--stride",
        section=sections.IMAGES,
        type=click.IntRange(min=1),
        help="Use every so-manieth image or frame only.  [default: 1; of a video, one a second]",
    ),
)


def limit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add which of the images are used; `limit_from` gathers them."""
    return _with(command, _CHOICE)


def limit_from(words: dict[str, Any]) -> Limit:
    """Take the words of `limit_options` out of a command's.

    Raises:
        ConfigError: a seed without a lot; or as `Choice`.
    """
    from deploy.feed.choice import Choice

    seed, sample = words.pop("sample_seed"), words.pop("sample")
    if seed is not None and sample is None:
        raise ConfigError(f"--sample-seed is of --sample, got {seed} alone; give --sample too")
    most, every = words.pop("limit"), words.pop("stride")
    if most is sample is every is None:
        return None
    return Choice(most=most, sample=sample, seed=seed or 0, every=every)


_STABLE = (
    sections.option(
        "--until-stable",
        section=sections.IMAGES,
        is_flag=True,
        help="Look at 16, 32, 64 ... images, spread evenly over all, until both halves of them give"
        " the same ranges.",
    ),
    sections.option(
        "--stable-within",
        section=sections.IMAGES,
        type=Real(),
        help="Of --until-stable: the share of its range by which halves may differ."
        "  [default: 0.2]",
    ),
)


def stable_from(words: dict[str, Any]) -> float | None:
    """Take the words of `_STABLE` out of a command's.

    Raises:
        ConfigError: a share without what it is of.
    """
    from deploy.calibration.until import WITHIN

    asked, within = words.pop("until_stable", False), words.pop("stable_within", None)
    if within is not None and not asked:
        raise ConfigError(
            f"--stable-within is of --until-stable, got {within:g} alone; give --until-stable too"
        )
    return None if not asked else WITHIN if within is None else within


skip_bad_option = sections.option(
    "--skip-bad",
    section=sections.IMAGES,
    is_flag=True,
    help="Go on without unreadable images.",
)


calibrator_script_option = sections.option(
    "--calibrator-script",
    section=sections.IMAGES,
    metavar="FILE.py:FUNCTION",
    help="In place of --images: a function that gives your TensorRT calibrator (IInt8...), whose"
    " batches are taken without TensorRT and a GPU.",
)


def image_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add how images are chosen and read; the command gets them as `images`."""
    return _image_options(command, scripts=False)


def feed_options(command: Callable[..., None]) -> Callable[..., None]:
    """The same, with a calibrator's script in place of images."""
    return _image_options(command, scripts=True)


def build_options(command: Callable[..., None]) -> Callable[..., None]:
    """The same, where a model may need neither; `refuse_unfed` is asked of others."""
    return _image_options(command, scripts=True, needed=False)


def _image_options(
    command: Callable[..., None], *, scripts: bool, needed: bool = True
) -> Callable[..., None]:
    @wraps(command)
    def gathered(**words: Any) -> None:
        from deploy.machine import default_threads

        source, script = words.pop("images"), words.pop("calibrator_script", None)
        _refuse_feeds(source, script)
        if needed and not source and not script:
            refuse_unfed()
        images = ImageOptions(
            source=raw_from(words, source or ""),
            script=script or "",
            limit=limit_from(words),
            skip_bad=words.pop("skip_bad"),
            until_stable=stable_from(words),
            preprocess=preprocess_from({name: words.pop(name) for _, name, _ in PREPROCESS}),
            threads=words.pop("threads") or default_threads(),
        )
        command(images=images, **words)

    options = (
        sections.option(
            "--images",
            section=sections.IMAGES,
            required=not scripts,
            metavar="PATH",
            help=f"{SOURCES}.",
        ),
        *((calibrator_script_option,) if scripts else ()),
        preprocess_options,
        raw_options,
        limit_options,
        *(_STABLE if scripts else ()),
        skip_bad_option,
        sections.option(
            "--threads",
            section=sections.GENERAL,
            type=THREADS,
            help="Worker threads; results do not depend on it.  [default: up to 4 cores]",
        ),
    )
    return _with(gathered, options)


def _refuse_feeds(source: str | None, script: str | None) -> None:
    """Refuse two feeds."""
    if source and script:
        raise ConfigError(
            f"samples come from --images or from --calibrator-script, got {source} and {script};"
            " leave one of them away"
        )


def refuse_unfed() -> None:
    """Refuse a command that has nothing to feed."""
    raise click.UsageError("Missing option '--images' or '--calibrator-script'")


keep_float_option = sections.option(
    "--keep-float",
    section=sections.CALIBRATION,
    multiple=True,
    metavar="NODES",
    help="Nodes to keep in float: a name, a pattern such as '/model.22/*', op:Sigmoid, or @FILE"
    " with one of these a line. May be repeated.",
)


require_cache_option = sections.option(
    "--require-cache",
    section=sections.CACHE,
    is_flag=True,
    help="Fail where the cache does not fit.",
)
refresh_option = sections.option(
    "--refresh",
    section=sections.CACHE,
    is_flag=True,
    help="Calibrate even where the cache fits.",
)


resume_option = sections.option(
    "--resume",
    section=sections.CACHE,
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
        sections.option(
            "--trust-cache",
            section=sections.CACHE,
            is_flag=True,
            help="Use a cache that has no fingerprint, as it is.",
        ),
        refresh_option,
        sections.option(
            "--force",
            section=sections.CACHE,
            is_flag=True,
            help="Write over a file that calib8 did not write.",
        ),
        sections.option(
            "--trt-version",
            section=sections.CACHE,
            metavar="X.Y.Z",
            help="TensorRT that is to read the cache.  [default: the TensorRT that builds here,"
            f" else that of the cache that is there, else {DEFAULT_TRT_VERSION}]",
        ),
        verbose_option,
    )
    return _with(gathered, options)


def _with(
    command: Callable[..., None], options: Sequence[Callable[..., Any]]
) -> Callable[..., None]:
    """The command with these options, in their order."""
    for option in reversed(options):
        command = option(command)
    return command


def preprocess_from(words: dict[str, str | None]) -> Asked:
    """The preprocessing of a preset and the options that override it; None if none was given.

    Options without a preset are given alone: the rest is the model's own.

    Raises:
        ConfigError: an unknown preset, or a word that is not a value of its option.
    """
    if not any(words.values()):
        return None
    from deploy.feed.preprocess import Preprocess, with_options
    from deploy.feed.presets import preset

    given: dict[str, object] = {
        key: words[key] for key in ("resize", "interpolation", "color", "layout") if words[key]
    }
    if words["size"]:
        given["size"] = size(words["size"])
    for key in ("short_side", "multiple"):
        if text := words[key]:
            given[key] = _whole(f"--{key.replace('_', '-')}", text)
    if words["scale"]:
        given["scale"] = _number("--scale", words["scale"])
    for key in ("mean", "std", "pad"):
        if text := words[key]:
            given[key] = tuple(_number(f"--{key}", part) for part in text.split(","))
    if words["preset"]:
        return with_options(preset(words["preset"]), given)
    with_options(Preprocess(), given)  # what breaks a rule is told before a model is read
    return given


def size(text: str) -> Sides:
    """`HxW` as (height, width); `*` and `native` as None."""
    parts = ["*", "*"] if text.lower() == "native" else text.lower().split("x")
    if len(parts) != 2:
        raise ConfigError(
            f"a size reads HxW, such as 224x224, 48x* or native, got {text!r}; * leaves a side to"
            " each image"
        )
    height, width = (None if part == "*" else _whole("--size", part) for part in parts)
    return height, width


def _whole(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{flag} takes whole numbers, got {text!r}") from error


def _number(flag: str, text: str) -> float:
    """A number, or a fraction such as 1/255."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below) if below else float(above)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{flag} takes numbers such as 0.5 or 1/255, got {text!r}") from error
