"""Options of images: which are used, how they are read and prepared, and worker threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from deploy.commands import base
from deploy.commands.base import Command, CommandArguments, Decorator, Real
from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.feed.feed import Dataset
    from deploy.feed.paths import RawFiles
    from deploy.feed.preprocess import PreprocessRequest, Sides
    from deploy.feed.sampling import Limit

PRESET_NAMES = (  # of `deploy.feed.preprocess`, repeated here so that --help imports nothing
    "raw, unit, grey-half, imagenet, minus-one-to-one, imagenet-tf, efficientnet-lite, yolo,"
    " picodet, ppocr-det, ppocr-rec or ppocr-cls"
)
PREPROCESS = {
    "preset": f"Preset: how images become inputs: {PRESET_NAMES}.",
    "size": "Input size as HxW, or N for NxN; with 48x* or native, sides depend on the image."
    " Default: the model's size.",
    "multiple": "Round sides that depend on the image to multiples of N.",
    "resize": "How to resize: stretch, letterbox, short-side or fit-height.",
    "short_side": "Short side in pixels before the centre crop.",
    "interpolation": "OpenCV's: nearest, linear, cubic, area or lanczos.",
    "color": "Order of the channels: rgb, bgr or grey.",
    "scale": "Factor for pixels of 0..255, such as 1/255.",
    "mean": "Mean after scaling: one value, or one for each channel: 0.5,0.5,0.5.",
    "std": "Standard deviation after scaling, like --mean.",
    "pad": "Letterbox border as a pixel value of 0..255.",
    "layout": "Order of the axes: nchw or nhwc.",
}


def preprocess_options(command: Command) -> Command:
    """Add the options of `preprocess`."""
    for name, text in reversed(PREPROCESS.items()):
        flag = "--preprocess" if name == "preset" else f"--{name.replace('_', '-')}"
        command = base.image_option(flag, name, help=text)(command)
    return command


def parse_preprocess(texts: Mapping[str, str | None]) -> PreprocessRequest:
    """Return the preprocessing of a preset and of options that override it; None without any.

    Options without a preset are returned as a dict: the model decides the rest.

    Args:
        texts: option of `PREPROCESS` -> its text on the command line.

    Raises:
        ConfigError: an unknown preset, or a wrong value.
    """
    if not any(texts.values()):
        return None

    from deploy.feed.preprocess import Preprocess, apply_user_options, find_preset, with_options

    options = {
        name: _parse_preprocess_option(name, text)
        for name, text in texts.items()
        if text and name != "preset"
    }
    preset_name = texts["preset"]
    if preset_name:
        return apply_user_options(find_preset(preset_name), options)
    with_options(Preprocess(), options)  # check the values before a model is read
    return options


def _parse_preprocess_option(name: str, text: str) -> object:
    """Return the value of a field of `Preprocess` from its text on the command line."""
    flag = f"--{name.replace('_', '-')}"
    if name == "size":
        return parse_size_option(text)
    if name in ("short_side", "multiple"):
        return parse_integer(flag, text)
    if name == "scale":
        return _parse_number(flag, text)
    if name in ("mean", "std", "pad"):
        return tuple(_parse_number(flag, number) for number in text.split(","))
    return text


def parse_size_option(text: str) -> Sides:
    """Return (height, width) of the text HxW, or of N, a square.

    A side is None if each image decides it: it is given as *, or both by the text native.
    """
    size_text = text.lower()
    if size_text == "native":
        size_text = "*x*"
    elif size_text.isdecimal():
        size_text = f"{size_text}x{size_text}"
    height_text, separator, width_text = size_text.partition("x")
    if not separator or "x" in width_text:
        raise ConfigError(
            f"a size reads HxW, such as 224x224, 224, 48x* or native, got {text!r}; * leaves a side"
            " to each image"
        )
    sides = []
    for side_text in (height_text, width_text):
        sides.append(None if side_text == "*" else parse_integer("--size", side_text))
    return sides[0], sides[1]


def parse_integer(flag: str, text: str) -> int:
    """Parse the integer of a flag."""
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{flag} takes whole numbers, got {text!r}") from error


def _parse_number(flag: str, text: str) -> float:
    """Return the value of a number, or of a fraction such as 1/255."""
    numerator, _, denominator = text.partition("/")
    try:
        return float(numerator) / float(denominator or 1)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{flag} takes numbers such as 0.5 or 1/255, separated by commas, got {text!r}"
        ) from error


# shape and dtype of files without a header, which `pop_source` takes out
raw_options = partial(
    base.add_options,
    options=(
        base.image_option(
            "--raw-shape",
            metavar="DIMS",
            help="Shape of a sample in .bin and .raw files, such as 1x3x224x224."
            "  [default: the input's]",
        ),
        base.image_option(
            "--raw-dtype",
            metavar="NAME",
            help="Dtype of .bin and .raw files, little-endian, such as float16."
            "  [default: the input's]",
        ),
    ),
)


def pop_source(arguments: CommandArguments, source: str) -> str | RawFiles:
    """Return the source of the images, with the shape and dtype of files without a header.

    Shape and dtype, the values of `raw_options`, are taken out of `arguments`.

    Args:
        arguments: option -> its value on the command line.
        source: path of the images; "" without.

    Raises:
        ConfigError: a shape or dtype without images.
    """
    shape_text = arguments.pop("raw_shape")
    dtype = arguments.pop("raw_dtype")
    if shape_text is None and dtype is None:
        return source
    if not source:
        raise ConfigError(
            "--raw-shape and --raw-dtype are of the files of --images, which was not given; leave"
            " them out"
        )

    from deploy.feed.paths import RawFiles

    shape = None
    if shape_text is not None:
        shape = tuple(parse_integer("--raw-shape", side) for side in shape_text.split("x"))
    return RawFiles(source, shape=shape, dtype=dtype)


def pop_limit(arguments: CommandArguments) -> Limit:
    """Take --limit and --stride out of `arguments`; return them, None without any."""
    from deploy.feed.sampling import Choice

    limit = arguments.pop("limit")
    stride = arguments.pop("stride")
    return None if limit is None and stride is None else Choice(limit=limit, every=stride)


def take_stable_share(arguments: CommandArguments) -> float | None:
    """Return the share by which halves of the images may differ; None to use all images.

    --until-stable and --stable-within are taken out of `arguments`.

    Raises:
        ConfigError: --stable-within without --until-stable.
    """
    from deploy.calibration.sample_checks import STABLE_SHARE

    until_stable = arguments.pop("until_stable", False)
    share: float | None = arguments.pop("stable_within", None)
    if until_stable:
        return STABLE_SHARE if share is None else share
    if share is not None:
        raise ConfigError(
            f"--stable-within is of --until-stable, got {share:g} alone; give --until-stable too"
        )
    return None


SOURCES = (
    "Folder, pattern, list file (path, or path and label), COCO json or Ultralytics' data.yaml of"
    " images, or of .npy, .npz or .bin files; a video; or loader.py:function"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageArguments:
    """The images of a command line.

    Attributes:
        dataset: the images, and how they are read; its source is "" where none are given.
        script: `file.py:function` of a TensorRT calibrator in place of images; else "".
        until_stable: share of a range by which halves may differ; None looks at all images.
        threads: number of worker threads.
    """

    dataset: Dataset
    script: str
    until_stable: float | None
    threads: int

    def calibration(self) -> Dataset:
        """Return the calibration images, or the batches of the script's calibrator."""
        if not self.script:
            return self.dataset
        from deploy.feed.calibrator import CalibratorScript

        return replace(self.dataset, source=CalibratorScript(self.script))

    def evaluation(self, path: str | None) -> Dataset | None:
        """Return the evaluation images, read as the calibration images; None without a path.

        --limit and --stride are of calibration images, or of these if there are none.
        """
        from deploy.feed.paths import RawFiles, with_same_format

        if path is None:
            return None
        source: str | RawFiles = path
        if isinstance(self.dataset.source, RawFiles):
            source = with_same_format(self.dataset.source, path)
        has_calibration = self.dataset.source or self.script
        limit = None if has_calibration else self.dataset.limit
        return replace(self.dataset, source=source, limit=limit, split="val")


def _feed_options(*, help_text: str, required: bool = False) -> Sequence[Callable[..., Any]]:
    """Return --images with this help text, and the options on how images are read."""
    return (
        base.image_option(
            "--images", type=base.IMAGE_SOURCE, required=required, metavar="PATH", help=help_text
        ),
        preprocess_options,
        raw_options,
        base.image_option(
            "--limit",
            type=click.IntRange(min=1),
            help="Use at most N images, spread evenly over all.",
        ),
        base.image_option(
            "--stride",
            type=click.IntRange(min=1),
            help="Use every N-th image or video frame only.  [default: 1; one a second of a video]",
        ),
        base.image_option(
            "--batch-axis",
            type=click.Choice(("auto", "0", "none")),
            default="auto",
            help="Meaning of the first dimension of the inputs: 0, the batch; none, a part of each"
            " sample, such as the points of a cloud. With auto the shapes of model and samples"
            " decide.",
        ),
        base.image_option(
            "--state",
            "states",
            multiple=True,
            metavar="IN=OUT",
            help="Input IN reads the output OUT of the previous step, and zeros at the start of a"
            " sequence; may be repeated. Pairs with similar names and equal shapes need no option.",
        ),
        base.image_option("--skip-bad", is_flag=True, help="Skip unreadable images."),
        base.image_option(
            "--max-pixels",
            type=click.IntRange(1, 1 << 28),
            default=50_000_000,
            metavar="N",
            help="Pixels that an image may have; decoding takes three bytes each.",
        ),
    )


def _image_options(*, takes_script: bool, is_required: bool = True) -> Decorator:
    """Return a decorator that adds images, and how they are read.

    The command gets `images`, an `ImageArguments`.

    Args:
        takes_script: whether there is --calibrator-script, which may stand in place of --images.
        is_required: whether the samples must be given, by one of these two.
    """

    def gather(arguments: CommandArguments) -> None:
        """Put an `ImageArguments` in as `images`."""
        from deploy.machine import worker_threads

        source = arguments.pop("images") or ""
        script = arguments.pop("calibrator_script", None) or ""
        if script:
            base.refuse_beside("--calibrator-script", "images")
        if is_required and not source and not script:
            refuse_no_images()
        arguments["images"] = ImageArguments(
            dataset=_pop_dataset(arguments, source),
            script=script,
            until_stable=take_stable_share(arguments),
            threads=worker_threads(arguments.pop("threads")),
        )

    options = [*_feed_options(help_text=f"{SOURCES}.", required=not takes_script)]
    if takes_script:
        options += [
            base.image_option(
                "--calibrator-script",
                metavar="FILE.py:FUNCTION",
                help="In place of --images: a function that returns your TensorRT calibrator"
                " (IInt8...); its batches are read without TensorRT and a GPU.",
            ),
            base.image_option(
                "--until-stable",
                is_flag=True,
                help="Use 16, 32, 64 ... images, spread evenly over all, until both halves of them"
                " give the same ranges.",
            ),
            base.image_option(
                "--stable-within",
                type=Real(),
                help="For --until-stable: largest difference of the halves, as a share of a range."
                "  [default: 0.2]",
            ),
        ]
    options.append(base.threads_option(section=base.GENERAL))
    return base.gathered_options(gather, options)


# Required images and how they are read, which a command gets as `images`; the same with
# --calibrator-script as the alternative; for models that may need neither, see `refuse_no_images`.
image_options = _image_options(takes_script=False)
feed_options = _image_options(takes_script=True)
build_options = _image_options(takes_script=True, is_required=False)


def _pop_dataset(arguments: CommandArguments, source: str) -> Dataset:
    """Take the options on how images are read out of `arguments`; return them as a `Dataset`.

    `source`: path of the images; "" without.
    """
    from deploy.feed.feed import Dataset

    return Dataset(
        source=pop_source(arguments, source),
        preprocess=parse_preprocess({name: arguments.pop(name) for name in PREPROCESS}),
        skip_bad=arguments.pop("skip_bad"),
        limit=pop_limit(arguments),
        max_pixels=arguments.pop("max_pixels"),
        batch_axis=arguments.pop("batch_axis"),
        states=dict(map(_parse_state, arguments.pop("states"))),
    )


def _parse_state(text: str) -> tuple[str, str]:
    """Split "r1i=r1o" into the input and the output.

    Raises:
        BadParameter: other text.
    """
    state, _, output = text.partition("=")
    if not state or not output:
        raise click.BadParameter(f"must look like r1i=r1o, got {text!r}", param_hint="--state")
    return state, output


def refuse_no_images() -> None:
    """Refuse a command without images and without a calibrator script."""
    raise click.UsageError("Missing option '--images' or '--calibrator-script'")


def shape_option(ending: str = "") -> Decorator:
    """Add --shape, which may be repeated, as `shapes`; `ending` ends its help."""
    return base.model_option(
        "--shape",
        "shapes",
        multiple=True,
        metavar="NAME:DIMS",
        help="Shape of an input with dynamic dimensions, e.g. images:1x3x224x224; may be"
        f" repeated. If only the batch is dynamic, it is 1.{ending}",
    )


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Split "name:1x3x224x224" into name and dimensions; the name may itself hold colons.

    Raises:
        BadParameter: other text.
    """
    name, _, dims = text.rpartition(":")
    parts = dims.replace(",", "x").split("x")
    if not name or not all(part.isdecimal() for part in parts):
        raise click.BadParameter(
            f"must look like name:1x3x224x224, got {text!r}", param_hint="--shape"
        )
    return name, tuple(map(int, parts))


def input_options(purpose: str) -> Decorator:
    """Return a decorator that adds optional images, and how they are read.

    The command gets them as `dataset`, None without them.

    `purpose`: what the images are for, as the help of --images begins.
    """

    def gather(arguments: CommandArguments) -> None:
        """Put a `Dataset` in as `dataset`, or None without images."""
        source = arguments.pop("images")
        if source is None:
            base.refuse_image_flags()
        # also without images: it takes their options out of the arguments
        dataset = _pop_dataset(arguments, source or "")
        arguments["dataset"] = dataset if source else None

    return base.gathered_options(gather, _feed_options(help_text=f"{purpose}: {SOURCES}."))
