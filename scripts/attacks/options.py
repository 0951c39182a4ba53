"""Options that a command line gives as text, with changed words; their model is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click

# Words that name files to write, or code of the user's own, are not for strangers to choose.
_LEFT_OUT = {"out", "cache", "json_path", "metric", "weights", "model"}
_SAMPLES = (
    "16x16", "0.5,0.5,0.5", "1/255", "imagenet", "letterbox", "mse", "99.9", "8.5.3", "bias,all",
    "x:1x3x16x16", "op:Conv", "onnxruntime,tensorrt", "Ascend310P3", "3", "0.01", "photos/*.png",
)  # fmt: skip


def option_texts(folder: Path) -> list[bytes]:
    """Words that some option takes, each after the name of one."""
    return [f"{flag} {sample}".encode() for flag in _flags() for sample in _SAMPLES]


def _flags() -> Iterator[str]:
    from deploy.commands.build import build

    for option in build.params:
        if isinstance(option, click.Option) and not option.is_flag and option.name not in _LEFT_OUT:
            yield option.opts[0]


def with_options(folder: Path) -> Callable[[Path], list[str]]:
    """The command line of a build of a model that is not there."""
    known = set(_flags())

    def words(path: Path) -> list[str]:
        text = path.read_bytes().replace(b"\0", b"").decode("utf-8", "surrogateescape")
        flag, _, value = text.partition(" ")
        before = [flag if flag in known else "--size", value]
        model, images = str(folder / "missing.onnx"), str(folder / "missing")
        return ["build", model, "--images", images, "--out", str(folder / "out"), *before]

    return words
