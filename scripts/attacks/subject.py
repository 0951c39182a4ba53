"""What is attacked: a small network and two sets of pictures, and what an untouched run writes."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from scripts.attacks.children import run
from scripts.attacks.outcome import SURVIVED, judged

TARGETS = "onnxruntime,tensorrt,ascend"
METHODS = ("mse", "minmax", "entropy", "percentile")


@dataclass(frozen=True, slots=True)
class Subject:
    """A folder with `m.onnx`, pictures in `a/` and others in `b/`."""

    folder: Path

    @property
    def model(self) -> Path:
        """The network."""
        return self.folder / "m.onnx"

    def pictures(self, number: int) -> Path:
        """Set 0 or 1 of the pictures."""
        return self.folder / "ab"[number % 2]

    def build(self, job: int, out: Path, *more: str) -> list[str]:
        """Words of a build; of other jobs other pictures and methods."""
        words = ["build", str(self.model), "--images", str(self.pictures(job)), "--out", str(out)]
        words += ["--method", METHODS[job % len(METHODS)], "--target", TARGETS]
        return [*words, "--effort", "0", "--duration", "0", "--accept", "--threads", "1", *more]

    def calibrate(self, job: int, out: Path, *more: str) -> list[str]:
        """Words of a calibration to `m.cache` in a folder."""
        words = ["calibrate", str(self.model), "--images", str(self.pictures(job))]
        words += ["--method", METHODS[job % len(METHODS)], "-o", str(out / "m.cache")]
        return [*words, "--threads", "1", *more]


def made(folder: Path) -> Subject:
    """Write the network and the pictures."""
    import cv2

    from tests.conftest import save_pictures, save_small_cnn

    folder.mkdir(parents=True, exist_ok=True)
    subject = Subject(folder)
    save_small_cnn(subject.model)
    for number in range(2):
        subject.pictures(number).mkdir()
    for path in sorted(save_pictures(subject.pictures(0)).iterdir()):
        cv2.imwrite(str(subject.pictures(1) / path.name), 255 - cv2.imread(str(path)) // 2)
    return subject


def reference(words: list[str], out: Path, kept: Path | None = None) -> dict[str, bytes]:
    """What the words write into `out` where nothing goes wrong; it is moved to `kept`, or removed.

    Raises:
        RuntimeError: something did.
    """
    ended = run(words)
    if judged(ended).word != SURVIVED:
        raise RuntimeError(f"{' '.join(words)} must end well untouched, got {ended}")
    found = written(out)
    if kept is None:
        shutil.rmtree(out)
    else:
        out.rename(kept)
    return found


def written(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of the files of a folder that are the same at every run.

    Reports tell seconds, so they are not, nor is the manifest, which holds their digests; what an
    ended run left to go on from is no part of a build.
    """
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted([*folder.iterdir(), *folder.glob("calib8/*")])
        if path.is_file()
        and not path.name.startswith(("report.", "manifest.", "."))
        and not path.name.endswith(".checkpoint")
    }


def digest(folder: Path) -> str:
    """Of every file below a folder, whatever it is called."""
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        whole.update(str(path.relative_to(folder)).encode("utf-8", "surrogateescape"))
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()
