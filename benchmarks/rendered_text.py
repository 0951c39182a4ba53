"""Text lines and pages drawn with Pillow, whose true text is known; and how PP-OCR spells its own.

Wants the fonts DejaVu (Debian: fonts-dejavu) in /usr/share/fonts or $CALIB8_FONTS.
"""

from __future__ import annotations

import os
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

_WORDS = """
    about again bridge button camera castle circle coffee copper corner cotton danger desert dinner
    double engine fabric finger flower forest garden ground guitar hammer harbor height jacket
    kettle kitchen ladder letter market meadow middle mirror modern monkey morning museum narrow
    number office orange pencil people pepper pocket rabbit record ribbon rocket school shadow
    signal silver simple spring square street summer ticket timber travel tunnel valley village
    violin window winter wonder yellow
"""
_FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "DejaVuSerif-Bold")


def fonts() -> list[Path]:
    """Font files to draw with.

    Raises:
        FileNotFoundError: no DejaVu font is on this machine.
    """
    root = Path(os.environ.get("CALIB8_FONTS", "/usr/share/fonts"))
    found = {path.stem: path for path in root.rglob("*.ttf")}
    chosen = [found[name] for name in _FONTS if name in found]
    if not chosen:
        raise FileNotFoundError(f"no DejaVu font under {root}; apt-get install fonts-dejavu")
    return chosen


def sentence(rng: random.Random) -> str:
    """Words, a price, a plate or a code, as on labels, receipts and signs."""
    words = rng.sample(_WORDS.split(), 2)
    return rng.choice(
        [
            f"{words[0]} {words[1]}",
            f"{words[0].title()} {rng.randrange(1000)}",
            f"{rng.randrange(100)}.{rng.randrange(100):02} {words[0]}",
            "".join(rng.choices(string.ascii_uppercase + string.digits, k=rng.randrange(6, 11))),
            "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randrange(6, 11))),
        ]
    )


def line(text: str, rng: random.Random, *, turned: bool = False) -> Image.Image:
    """The text in a random font, size, pair of colours, slight turn, blur and noise."""
    font = ImageFont.truetype(str(rng.choice(fonts())), rng.randrange(14, 40))
    left, top, right, bottom = font.getbbox(text)
    size = (right - left + rng.randrange(8, 24), bottom - top + rng.randrange(6, 16))
    ground = tuple(rng.randrange(150, 256) for _ in range(3))
    ink = tuple(rng.randrange(0, 110) for _ in range(3))
    picture = Image.new("RGB", size, ground)
    at = ((size[0] - right - left) // 2, (size[1] - bottom - top) // 2)
    ImageDraw.Draw(picture).text(at, text, fill=ink, font=font)
    angle = rng.uniform(-1.5, 1.5) + (180 if turned else 0)
    picture = picture.rotate(angle, resample=Image.Resampling.BICUBIC, fillcolor=ground)
    picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0, 1.0)))
    noise = np.random.default_rng(rng.randrange(2**32)).normal(0, 6, (size[1], size[0], 3))
    noisy = np.asarray(picture, np.float64) + noise
    return Image.fromarray(noisy.round().clip(0, 255).astype(np.uint8))


def page(rng: random.Random, size: tuple[int, int] = (640, 640)) -> Image.Image:
    """Lines of text at random places that do not overlap."""
    picture = Image.new("RGB", size, tuple(rng.randrange(170, 256) for _ in range(3)))
    y = rng.randrange(10, 60)
    while y < size[1] - 60:
        drawn = line(sentence(rng), rng)
        picture.paste(drawn, (rng.randrange(0, max(1, size[0] - drawn.width)), y))
        y += drawn.height + rng.randrange(8, 70)
    return picture


def draw_lines(
    folder: Path, count: int, *, seed: int, turn: bool = False
) -> tuple[list[Path], list[str], list[int]]:
    """Write `count` lines as PNG: (paths, their texts, 1 where turned by 180 degrees else 0)."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    paths, texts, turns = [], [], []
    for number in range(count):
        texts.append(sentence(rng))
        turns.append(number % 2 if turn else 0)
        paths.append(folder / f"{number:04d}.png")
        line(texts[-1], rng, turned=bool(turns[-1])).save(paths[-1])
    return paths, texts, turns


def draw_pages(folder: Path, count: int, *, seed: int) -> list[Path]:
    """Write `count` pages as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    paths = [folder / f"{number:04d}.png" for number in range(count)]
    for path in paths:
        page(rng).save(path)
    return paths


def spelled(probabilities: NDArray[Any], characters: Sequence[str]) -> str:
    """[T, C] scores of a CTC head, class 0 the blank -> the text of its best path."""
    best = probabilities.argmax(axis=1)
    kept = [c for c, before in zip(best, [0, *best[:-1]], strict=True) if c not in (0, before)]
    return "".join(characters[c - 1] for c in kept)


def characters_of(metadata: str) -> list[str]:
    """The model's `character` metadata, one a line, and the space that PP-OCR adds at the end."""
    return [*metadata.splitlines(), " "]
