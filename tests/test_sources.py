"""Every kind of feed, through the command or as Python hands it over: the same samples, or one
sentence."""

import functools
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest

from deploy.errors import ConfigError, FeedError
from deploy.feed.arrays import open_iterable
from deploy.feed.feed import open_feed
from deploy.feed.file_list import SampleChangedError
from deploy.feed.paths import RawFiles
from deploy.feed.pixels import preprocess_image
from deploy.feed.preprocess import Preprocess
from deploy.feed.sampling import Choice, spread_evenly
from deploy.feed.sources import read_remote_samples
from deploy.files.usercode import wrap_user_errors
from deploy.runtimes.ort import OrtSession
from deploy.tensors import TensorSpec
from tests.models import make_model, read_markdown, save_net

X = TensorSpec("x", "float32", ("batch", 3, 16, 16))
STATE = TensorSpec("state", "float32", ("batch", 4))
BATCH = np.random.default_rng(3).normal(size=(6, 3, 16, 16)).astype(np.float32)
STATES = np.random.default_rng(4).normal(size=(6, 4)).astype(np.float32)
UNIT = Preprocess(scale=1 / 255)
QUICK = ("--effort", 0, "--duration", 0, "--accept")


def fed(source, *specs, **options):
    feed = open_feed(source, specs or (X,), **options)
    with feed.samples() as stream:
        return feed, list(stream)


def same(samples, batch=BATCH):
    assert np.array_equal(np.concatenate([one["x"] for one in samples]), batch)


def folder_of_arrays(tmp_path, kind):
    folder = tmp_path / "arrays"
    folder.mkdir()
    for number, one in enumerate(BATCH):
        path = folder / f"{number}.{kind}"
        if kind == "npy":
            np.save(path, one[None])
        elif kind == "npz":
            np.savez(path, x=one[None])
        else:
            one.astype("<f4").tofile(path)
    return folder


@pytest.fixture
def cached(run, small_cnn, tmp_path):
    """(images, *words) -> the bytes of a new cache that `calib8 calibrate` makes of them."""
    numbers = itertools.count()

    def call(images, *words, model=small_cnn):
        path = tmp_path / f"made{next(numbers)}.cache"
        run.ok("calibrate", model, "--images", images, "--out", path, *words)
        return path.read_bytes()

    return call


@pytest.fixture
def build(command, refusal, small_cnn, tmp_path):
    """(*words) -> what a quick build of small_cnn reports, on one line; `fails`: its refusal."""
    words = ("build", small_cnn, "--out", tmp_path / "o", *QUICK)

    def call(*more):
        command(*words, *more)
        return read_markdown(tmp_path / "o")

    call.fails = functools.partial(refusal, *words)
    return call


@pytest.mark.parametrize("kind", ["npy", "npz", "bin", "raw"])
@pytest.mark.parametrize("form", ["folder", "list", "pattern", "paths"])
def test_files_of_arrays_feed_as_one_stacked_file(kind, form, tmp_path, cached):
    folder, listed = folder_of_arrays(tmp_path, kind), tmp_path / "list.txt"
    listed.write_text("".join(f"arrays/{number}.{kind}\n" for number in range(6)))
    pattern = tmp_path / "*" / f"?.{kind}"
    forms = {"folder": folder, "list": listed, "pattern": pattern, "paths": None}
    source = forms[form] or sorted(folder.iterdir())
    for end in ("", ".json", ".npz") if form == "folder" else ():  # what a build into it leaves
        (folder / f"m.cache{end}").touch()
    feed, samples = fed(source)
    same(samples)
    np.save(tmp_path / "stacked.npy", BATCH)
    whole = open_feed(tmp_path / "stacked.npy", [X]).manifest()
    assert feed.manifest() == whole  # so that a calibration of the one serves the other
    if form != "paths":
        assert cached(source) == cached(tmp_path / "stacked.npy")


def test_a_list_of_stacked_files_with_labels_and_a_change_meanwhile(tmp_path):
    np.save(tmp_path / "a.npy", BATCH[:4])
    np.save(tmp_path / "b.npy", BATCH[4:])
    (tmp_path / "list.txt").write_text("a.npy 7\nb.npy 2\n")
    feed, samples = fed(tmp_path / "list.txt")
    same(samples)
    assert feed.labels == (7, 7, 7, 7, 2, 2) and feed.names[0] == "sample 0 of a.npy"
    feed = open_feed([tmp_path / "a.npy", tmp_path / "b.npy"], [X])
    np.save(tmp_path / "a.npy", BATCH[:2])
    changed = pytest.raises(SampleChangedError, match=r"a\.npy changed while calib8 ran")
    with changed, feed.samples() as stream:
        list(stream)


def test_labels_inside_npz_files(tmp_path):
    (tmp_path / "arrays").mkdir()
    for number, one in enumerate(BATCH):
        np.savez(tmp_path / "arrays" / f"{number}.npz", x=one[None], labels=np.array([number]))
    assert fed(tmp_path / "arrays")[0].labels == tuple(range(6))


@pytest.mark.parametrize("form", ["npz", "a folder an input"])
def test_several_inputs_in_a_folder(form, tmp_path, wording):
    for name in ("x", "state"):
        (tmp_path / name).mkdir()
    for number, (x, state) in enumerate(zip(BATCH[:, None], STATES[:, None], strict=True)):
        if form == "npz":
            np.savez(tmp_path / "x" / f"{number}.npz", x=x, state=state)
        else:
            np.save(tmp_path / "x" / f"{number}.npy", x)
            np.save(tmp_path / "state" / f"{number}.npy", state)
    folder = tmp_path / "x" if form == "npz" else tmp_path
    _, samples = fed(folder, X, STATE)
    same(samples)
    assert np.array_equal(np.concatenate([one["state"] for one in samples]), STATES)
    if form != "npz":
        (folder / "state" / "5.npy").unlink()
        with pytest.raises(FeedError) as raised:
            fed(folder, X, STATE)
        wording.check(raised.value)


def test_broken_files_of_arrays_are_told_or_skipped(tmp_path, run, small_cnn, wording):
    folder = folder_of_arrays(tmp_path, "npy")
    (folder / "3.npy").write_bytes(b"\x93NUMPY no")
    with pytest.raises(FeedError) as raised:
        fed(folder)
    wording.check(raised.value)
    feed, samples = fed(folder, skip_bad=True)
    assert len(samples) == 5 and "3.npy" in feed.notes[0]
    words = "calibrate", small_cnn, "--images", folder, "--out", tmp_path / "c.cache"
    assert "3.npy" in run.fails(*words)
    run.ok(*words, "--skip-bad")


@pytest.mark.parametrize(
    ("size", "spec", "message"),
    [
        (100, X, r"complete samples of the input 'x' .*, 3,072 bytes each, got 100 bytes"),
        (0, X, "got 0 bytes"),
        (3072, TensorSpec("x", "float32", ("n", 3, "h", 16)), "must state its shape"),
    ],
)
def test_values_without_a_header_must_fit(size, spec, message, tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(size))
    with pytest.raises(FeedError, match=message):
        fed(tmp_path / "a.bin", spec)


def test_images_and_arrays_together(tmp_path, pictures, wording):
    folder = folder_of_arrays(tmp_path, "npy")
    shutil.copy(pictures / "00.png", folder)
    feed, samples = fed(folder)
    assert len(samples) == 1
    assert "6 files of arrays among the images of arrays are not fed" in feed.notes
    with pytest.raises(FeedError) as raised:
        fed(sorted(folder.iterdir()))
    wording.check(raised.value)


def test_a_pattern_of_images_is_the_folder(pictures, cached, tmp_path, run, small_cnn, wording):
    assert cached(pictures) == cached(pictures / "*.png")
    words = "calibrate", small_cnn, "--out", tmp_path / "c.cache"
    wording.check(run.fails(*words, "--images", pictures / "*.gif"))


def test_coco_images_that_are_no_list_are_refused(tmp_path, wording):
    path = tmp_path / "coco.json"
    path.write_text('{"images": 5}')
    with pytest.raises(FeedError) as raised:
        open_feed(path, [X])
    wording.check(raised.value)


def test_a_remote_sample_with_nan_has_the_digest_of_its_values():
    spec = TensorSpec("x", "float32", ("n", 3))
    source = open_iterable([np.full((1, 3), np.nan, np.float32)], (spec,))
    (sample,) = read_remote_samples(source, [0])
    assert sample.digest == source.load(0).digest and "NaN" in sample.content


def test_coco_annotations_name_images(pictures, tmp_path, cached, wording):
    shutil.copytree(pictures, tmp_path / "images")
    listed = [{"id": n, "file_name": f"{n:02}.png"} for n in range(20)]
    (tmp_path / "set.json").write_text(json.dumps({"images": listed, "annotations": []}))
    assert fed(tmp_path / "set.json")[0].names == fed(pictures)[0].names
    cached(tmp_path / "set.json")
    (tmp_path / "other.json").write_text("[1, 2]")
    with pytest.raises(FeedError) as raised:
        fed(tmp_path / "other.json")
    wording.check(raised.value)


def test_labels_without_evaluation_images_are_refused_or_told(pictures, tmp_path, build):
    """Nobody is to take the figures for those of labels that were never looked at."""
    labels, listed = tmp_path / "labels.txt", tmp_path / "list.txt"
    labels.write_text("1\n" * 20)
    listed.write_text("".join(f"{path} 1\n" for path in sorted(pictures.iterdir())))
    assert "got none; give --eval-images" in build.fails("--images", pictures, "--labels", labels)
    assert "are not used; --eval-images" in build("--images", listed)
    assert "are not used" not in build("--images", pictures, "--eval-images", listed)


def test_labels_stay_with_their_images_if_a_bad_one_is_left_out(pictures, tmp_path, run, small_cnn):
    """Each image's own label is its best class; one off, and next to none would be right."""
    session = OrtSession.open(small_cnn, threads=1)
    how = Preprocess(size=(16, 16), color="rgb", layout="nchw")
    read = [cv2.imread(str(path)) for path in sorted(pictures.iterdir())]
    best = [int(session.run({"x": preprocess_image(p, how)})["logits"].argmax()) for p in read]
    shutil.copytree(pictures, tmp_path / "val")
    (tmp_path / "val" / "03.png").write_text("broken")
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"{one}\n" for one in [*best[:3], (best[3] + 1) % 10, *best[4:]]))
    words = ("build", small_cnn, "--images", pictures, "--eval-images", tmp_path / "val")
    words += (*QUICK, "--labels", labels, "--skip-bad", "--out")
    out = run.ok(*words, tmp_path / "o")
    (line,) = [line for line in out.splitlines() if line.startswith("Top-1  ")]
    assert line.split()[1] == "100.00"
    for count in (19, 21):
        labels.write_text("1\n" * count)
        assert f"got {count} labels for 20" in run.fails(*words, tmp_path / "no")
        assert not (tmp_path / "no").exists()  # before anything is run


def test_evaluation_images_that_calibrated_too_are_told(pictures, tmp_path, build):
    others, alone = tmp_path / "others", tmp_path / "alone"
    others.mkdir()
    for number, path in enumerate(sorted(pictures.iterdir())):
        cv2.imwrite(str(others / f"renamed{number}.png"), 255 - cv2.imread(str(path)))
        if number < 7:
            shutil.copy(path, others / f"renamed{number}.png")
    few = sum(place < 7 for place in spread_evenly(range(20), 10))
    for limit, count in (((), 7), (("--limit", 10), few)):
        out = build("--images", pictures, "--eval-images", others, *limit)
        assert f"{count} of the 20 evaluation images calibrated too" in out
    alone.mkdir()
    cv2.imwrite(str(alone / "a.png"), np.full((9, 9, 3), 99, np.uint8))
    assert "calibrated too" not in build("--images", pictures, "--eval-images", alone)


def test_copies_of_images_are_told(pictures, tmp_path, build):
    train, val = shutil.copytree(pictures, tmp_path / "train"), tmp_path / "val"
    words = ("--images", train, "--eval-images", val)
    val.mkdir()
    for number, path in enumerate(sorted(train.iterdir())[:5]):
        shutil.copy(path, val / f"{number}.png")
    assert "once more" not in build(*words)
    first, *others = sorted(train.iterdir())
    shutil.copy(first, train / "again.png")
    assert "1 of the 21 images is a copy" in build(*words)
    for number, path in enumerate(others[:2]):
        shutil.copy(path, train / f"again{number}.png")
        shutil.copy(path, val / f"again{number}.png")
    out = build(*words)
    assert "3 of the 23 images are copies" in out and "2 of the 7 images are copies" in out
    assert "7 of the 7 evaluation images" in out  # and not 5


def test_labels_by_folder(pictures, tmp_path, build):
    for number, path in enumerate(sorted(pictures.iterdir())):
        (tmp_path / "val" / ["cat", "dog", "owl"][number % 3]).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "val" / ["cat", "dog", "owl"][number % 3])
    feed = open_feed(tmp_path / "val", [X], labels_by_folder=True)
    assert feed.labels == (0,) * 7 + (1,) * 7 + (2,) * 6
    assert "labels by folder: 3 classes, 0 is cat" in feed.notes
    words = "--images", pictures, "--labels", "folders"
    assert re.search(r"\| Top-1 \| \d", build(*words, "--eval-images", tmp_path / "val"))
    assert "evaluation images, got none" in build.fails(*words)
    assert "one folder per class" in build.fails(*words, "--eval-images", pictures)


def test_a_video_is_fed_frame_by_frame(tmp_path, command, small_cnn, wording):
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 5, (32, 32))
    for number in range(23):
        writer.write(np.full((32, 32, 3), number * 10, np.uint8))
    writer.release()
    feed, samples = fed(path, preprocess=UNIT)
    assert feed.names == tuple(f"clip.avi#{number}" for number in (0, 5, 10, 15, 20))
    shades = [float(one["x"].mean()) * 255 for one in samples]
    assert np.allclose(shades, [0, 50, 100, 150, 200], atol=4)
    with feed.samples() as again:  # from the start once more
        assert [float(one["x"].mean()) * 255 for one in again] == shades
    twice = f"build {small_cnn} --images {path} --out {tmp_path / 'b'} --effort 0 --duration 0"
    command(*twice.split())
    # in a process whose stderr is no test's
    subprocess.run([sys.executable, "-m", "deploy", *twice.split()], check=True)
    words = "calibrate", small_cnn, "--images", path, "--out", tmp_path / "a.cache"
    assert "every 2nd of 23 samples is used" in command(*words, "--stride", 2)
    for line in ("clip.avi\nclip.avi\n", "clip.avi 3\n"):
        (tmp_path / "list.txt").write_text(line)
        with pytest.raises(FeedError) as raised:
            fed(tmp_path / "list.txt")
        wording.check(raised.value)
    _, picture = cv2.imencode(".png", np.zeros((32, 32, 3), np.uint8))
    (tmp_path / "broken1.mp4").write_bytes(picture.tobytes())  # no frame of the other file
    (tmp_path / "broken%d.mp4").write_bytes(b"no video")
    with pytest.raises(FeedError) as raised:
        fed(tmp_path / "broken%d.mp4")
    wording.check(raised.value)
    assert len(fed(path.rename(tmp_path / "clip\udcff.avi"), preprocess=UNIT)[1]) == 5


def test_a_lot_by_its_seed_and_every_so_manieth(pictures, tmp_path, run, small_cnn, wording):
    drawn = [open_feed(pictures, [X], limit=Choice(sample=6, seed=s)).names for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 6
    assert list(drawn[0]) == sorted(drawn[0])
    words = "calibrate", small_cnn, "--images", pictures, "--out", tmp_path / "a.cache", "--force"
    out = run.ok(*words, "--sample", 6, "--sample-seed", 1)
    assert "6 of 20 samples are used, drawn by lot (seed 1)" in out
    wording.check(run.fails(*words, "--sample-seed", 1))
    wording.check(run.fails(*words, "--sample", 3, "--limit", 3))
    feed = open_feed(pictures, [X], limit=Choice(every=3))
    assert feed.names == tuple(f"{n:02}.png" for n in range(0, 20, 3))
    assert "every 3rd of 20 samples is used" in feed.notes


LOADERS = {
    "arrays": "def feed():\n    return [a for a in data]",
    "generator": "def feed():\n    for a in data:\n        yield a, 3",
    "mapping": "def feed():\n    return {'x': data}",
    "reader": (
        "class Reader:\n"
        "    def __init__(self):\n        self.left = list(data)\n"
        "    def get_next(self):\n"
        "        return {'x': self.left.pop(0)[None]} if self.left else None\n"
        "def feed():\n    return Reader()"
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_of_the_users(kind, tmp_path, cached):
    np.save(tmp_path / "stacked.npy", BATCH)
    script = tmp_path / "loader.py"
    data = f"import numpy as np\ndata = np.load({str(tmp_path / 'stacked.npy')!r})\n"
    script.write_text(data + LOADERS[kind] + "\n")
    assert cached(f"{script}:feed") == cached(tmp_path / "stacked.npy")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no disk')", "got ValueError: no disk"),
        ("return None", "must return a feed, got None"),
        ("return 5", "something to iterate over, got int"),
        ("yield 1 / 0", "got ZeroDivisionError"),
        ("yield 1 if open('gone') else 2", "'gone' at"),
        ("raise GeneratorExit", "got GeneratorExit"),
        ("raise BaseException('gone')", "got BaseException: gone"),
        ("raise type('Odd', (Exception,), {'__str__': lambda e: 1 / 0})", "got Odd: an error with"),
        ("return iter([])", "must give samples, got none"),
    ],
)
def test_a_loader_that_fails_is_one_sentence(body, message, tmp_path, run, small_cnn):
    (tmp_path / "loader.py").write_text(f"def feed():\n    {body}\n")
    words = "calibrate", small_cnn, "--out", tmp_path / "c"
    assert message in run.fails(*words, "--images", f"{tmp_path}/loader.py:feed")


@pytest.mark.parametrize("body", ["change()\n    return data", "yield data\n    change()"])
def test_what_a_loader_changes_for_the_process_is_restored(
    body, tmp_path, run, small_cnn, monkeypatch
):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "here").touch()
    (tmp_path / "loader.py").write_text(
        "import os, signal, threading, numpy\n"
        "data = numpy.full([2, 3, 16, 16], 1e-44, 'float32')\n"
        "os.chdir(os.path.join(os.path.dirname(__file__), 'there'))\n"
        "def change():\n"
        "    open('here').close()\n"
        "    numpy.seterr(all='raise')\n"
        "    if threading.current_thread() is threading.main_thread():\n"
        "        signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"def feed():\n    {body}\n"
    )
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT), np.geterr()
    words = ("--images", "loader.py:feed", "--duration", 0, "--effort", 0)
    assert run("build", small_cnn, *words)[0] in (0, 3)
    assert (signal.getsignal(signal.SIGINT), np.geterr()) == before
    assert {path.name for path in tmp_path.iterdir()} >= {"build", "there", "loader.py"}
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["here"]
    monkeypatch.chdir(tmp_path / "build")  # another program, which knows nothing of that folder
    with wrap_user_errors("code", error=FeedError):
        assert Path.cwd() == tmp_path / "build"


class Tensor:
    """What a framework's tensor can do."""

    def __init__(self, array, needs_grad=False):
        self.array, self.needs_grad, self.shape = array, needs_grad, array.shape

    def __array__(self, dtype=None, copy=None):
        if self.needs_grad:
            raise RuntimeError("call detach first")
        return self.array

    def detach(self):
        return Tensor(self.array)

    def cpu(self):
        return self


class OwnReader:
    def __init__(self):
        self.left = list(BATCH)

    def get_next(self):
        return {"x": self.left.pop(0)[None]} if self.left else None


class Batched:
    """As a dataset of TensorFlow's iterates: tensors with `numpy`, (inputs, labels)."""

    def __iter__(self):
        return iter([(Tensor(BATCH[:4]), LABELS[:4]), (Tensor(BATCH[4:]), LABELS[4:])])


class Rows:
    """As a dataset of Hugging Face: rows by number, and names of columns."""

    column_names = ("x", "label")

    def __len__(self):
        return len(BATCH)

    def __getitem__(self, row):
        return {"x": BATCH[row], "label": row}

    def __iter__(self):
        return (self[row] for row in range(len(self)))


class FeedDicts:
    """As a loader of polygraphy's: a feed_dict an iteration."""

    def __getitem__(self, index):
        if index >= len(BATCH):
            raise IndexError
        return {"x": BATCH[index][None]}

    def __iter__(self):
        return map(self.__getitem__, range(len(BATCH)))


LABELS = np.arange(6)


@pytest.mark.parametrize(
    ("source", "left"),
    [
        pytest.param(BATCH, "", id="an array"),
        pytest.param(Tensor(BATCH, needs_grad=True), "", id="a tensor"),
        pytest.param({"x": BATCH}, "", id="stacked by name"),
        pytest.param([(BATCH[:4], LABELS[:4]), (BATCH[4:], LABELS[4:])], "number 2", id="loader"),
        pytest.param([[Tensor(one[None])] for one in BATCH], "", id="a loader of one tensor"),
        pytest.param(({"x": b[None], "y": 1} for b in BATCH), "'y'", id="mappings with a label"),
        pytest.param([({"x": b[None]}, 1) for b in BATCH], "number 2", id="(mapping, label)"),
        pytest.param(lambda: iter(BATCH), "", id="a function"),
        pytest.param(OwnReader(), "", id="get_next"),
        pytest.param(OwnReader, "", id="a class of readers"),
        pytest.param(lambda: (yield from BATCH), "", id="a function that yields"),
        pytest.param(lambda: {"x": BATCH}, "", id="a function that gives a mapping"),
        pytest.param(Batched(), "number 2", id="a dataset of TensorFlow's"),
        pytest.param(Rows(), "'label'", id="a dataset of Hugging Face's"),
        pytest.param(FeedDicts(), "", id="a loader of polygraphy's"),
    ],
)
def test_what_python_hands_over(source, left):
    feed, samples = fed(source)
    same(samples)
    assert not any(note.startswith("no preprocessing") for note in feed.notes)
    said = [note for note in feed.notes if note.startswith("left out of the items")]
    assert (f"as no input has it: {left}" in said[0]) if left else not said


def test_arrays_of_different_widths_from_python(wording):
    given = [BATCH[:2, :, :, :width] for width in (5, 16, 9)]
    _, samples = fed(given, TensorSpec("x", "float32", ("n", 3, 16, "w")))
    assert [one["x"].shape[3] for one in samples] == [5, 5, 16, 16, 9, 9]
    with pytest.raises(FeedError) as raised:
        fed(given[1:], TensorSpec("x", "float32", (4, 3, 16, "w")))
    wording.check(raised.value)


def test_lists_of_numbers_are_arrays_and_name_their_dtype():
    _, samples = fed([[0.5, 1.0, 1.5, 2.0]], TensorSpec("x", "float64", ("n", 4)))
    assert samples[0]["x"].tolist() == [[0.5, 1.0, 1.5, 2.0]]
    _, samples = fed([{"x": one.tolist(), "label": 3} for one in BATCH])
    assert np.array_equal(samples[0]["x"][0], BATCH[0])


def test_several_inputs_by_their_order():
    feed, samples = fed([(BATCH, STATES, LABELS)], X, STATE)
    same(samples)
    assert np.array_equal(np.concatenate([one["state"] for one in samples]), STATES)
    assert any("number 3" in note for note in feed.notes)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (5, "something to iterate over, got int"),
        (None, "something to iterate over, got NoneType"),
        (b"bytes", "something to iterate over, got bytes"),
        (
            type("Trt", (), {"get_batch": lambda self, names: None})(),
            "got the TensorRT calibrator Trt, which gives addresses",
        ),
        (lambda: 5, "something to iterate over, got int"),
        ([(BATCH, BATCH)], "must distinguish its inputs from its other values"),
        ([{"y": BATCH}], r"must name the inputs \['x'\], got \['y'\]"),
        ([object()], "must be an array of numbers, .* got object"),
        ([()], "must be an array of numbers|must hold the inputs"),
    ],
)
def test_what_is_not_understood_is_named_by_its_type(source, message):
    with pytest.raises(FeedError, match=message):
        fed(source)


PICTURES = np.random.default_rng(9).integers(0, 256, (5, 16, 16, 3), np.uint8)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(PICTURES, id="stacked"),
        pytest.param(list(PICTURES), id="listed"),
        pytest.param([(one, 3) for one in PICTURES], id="with a label"),
        pytest.param([{"image": one, "label": 3} for one in PICTURES], id="rows of a dataset"),
        pytest.param(lambda: iter(PICTURES), id="a function"),
        pytest.param([Tensor(one) for one in PICTURES], id="tensors"),
    ],
)
def test_pictures_in_memory_are_preprocessed_as_files(source, tmp_path):
    for number, one in enumerate(PICTURES):
        cv2.imwrite(str(tmp_path / f"{number}.png"), one[:, :, ::-1])
    how = Preprocess(scale=1 / 255, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    _, files = fed(tmp_path, preprocess=how)
    feed, samples = fed(source, preprocess=how)
    same(samples, np.concatenate([one["x"] for one in files]))
    assert feed.manifest()["preprocess"] == feed.preprocess.to_json()


def test_pictures_in_memory_of_wrong_channels_are_told(wording):
    with pytest.raises(FeedError) as raised:
        fed([PICTURES[0].transpose(2, 0, 1)], preprocess=UNIT)
    wording.check(raised.value)


WIDE = TensorSpec("x", "float32", ("batch", 3, "h", "w"))


@pytest.fixture
def sizes(tmp_path):
    """Pictures of different sizes: 20x40, 33x33, 50x21, 20x40 (height by width)."""
    folder = tmp_path / "sizes"
    folder.mkdir()
    for number, (height, width) in enumerate(((20, 40), (33, 33), (50, 21), (20, 40))):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), noise)
    return folder


@pytest.fixture
def wide(tmp_path):
    """A small network whose input is of any height and width."""
    weights = np.random.default_rng(5).normal(size=(8, 8, 3, 3)).astype(np.float32)
    weights = {"w": weights[:, :3], "v": weights}
    padded = {"pads": [1, 1, 1, 1]}
    nodes = [("Conv", "x w", "c", padded), ("Conv", "c v", "d", padded)]
    nodes += [("Relu", "d", "r"), ("GlobalAveragePool", "r", "y")]
    model = make_model(nodes, {"x": ["batch", 3, "h", "w"]}, {"y": ["batch", 8, 1, 1]}, weights)
    return save_net(model, tmp_path / "wide.onnx")


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"size": (48, None)}, [(48, 96), (48, 48), (48, 20), (48, 96)]),
        ({"size": (48, None), "multiple": 32}, [(48, 96), (48, 64), (48, 32), (48, 96)]),
        ({"size": (None, 32)}, [(16, 32), (32, 32), (76, 32), (16, 32)]),
        ({"size": (None, None)}, [(20, 40), (33, 33), (50, 21), (20, 40)]),
        ({"size": (None, None), "multiple": 16}, [(16, 48), (32, 32), (48, 16), (16, 48)]),
        (
            {"size": (10, None), "multiple": 8, "resize": "fit-height"},
            [(10, 24), (10, 16), (10, 8), (10, 24)],
        ),
    ],
)
def test_sides_are_each_pictures_own(how, wanted, sizes):
    _, samples = fed(sizes, WIDE, preprocess=how)
    assert [one["x"].shape[2:] for one in samples] == wanted
    if how.get("resize"):  # what is over is padded, not stretched
        assert (samples[0]["x"][:, :, :, 20:] == 0).all() and samples[0]["x"][..., :20].any()


def test_sizes_of_their_own_through_the_command(sizes, wide, tmp_path, command):
    words = ("build", wide, "--images", sizes, *QUICK, "--size")
    for name, more in (("a", ()), ("b", ("--threads", 1))):
        out = command(*words, "native", "--multiple", 8, "--out", tmp_path / name, *more)
        assert "rgb *x* in multiples of 8, stretch" in out
    first, second = (tmp_path / name / "wide.int8.onnx" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    out = command(*words, "24X*", "--out", tmp_path / "a")
    assert "rgb 24x*, stretch" in out and "(multiple 8" in out
    command("compare", wide, first, "--images", sizes, "--size", "*x32")
    command("bench", first, "--duration", 0, "--images", sizes, "--size", "native")
    command("explain", tmp_path / "a", "--images", sizes)  # as the report says


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--size 24x* --resize letterbox", "go with resize stretch, or with fit-height"),
        ("--size native --resize fit-height", "got fit-height to *x*; give another resize"),
        ("--size 24x24 --multiple 8", "a multiple is for sides that depend on the image, got 8"),
        ("--multiple 8", "leaves its size open; give a size, such as 224x224, or 224x* or native"),
        ("--size native --multiple 0", "multiple must be whole pixels, 1 to 16384, got 0"),
        ("--size 24", "a size reads HxW, such as 224x224, 48x* or native, got '24'"),
        ("--size 1x* --resize stretch", None),
        ("--size 820x*", "at most 16384 pixels, got 820x16400 for image 0.png of 2x40"),
    ],
)
def test_sizes_that_mean_nothing(words, message, sizes, wide, tmp_path, run):
    if "820x*" in words:
        cv2.imwrite(str(sizes / "0.png"), np.zeros((2, 40, 3), np.uint8))
    asked = ("calibrate", wide, "--images", sizes, "--out", tmp_path / "c.cache", *words.split())
    assert message in run.fails(*asked) if message else run(*asked)[0] == 0


def with_sides(path, goal, sides, ends=("input", "output")):
    """Give the inputs and outputs of a model these sides: numbers, or names of open ones."""
    model = onnx.load(path)
    for value in [one for end in ends for one in getattr(model.graph, end)]:
        for side, wanted in zip(value.type.tensor_type.shape.dim[2:4], sides, strict=True):
            setattr(side, "dim_param" if isinstance(wanted, str) else "dim_value", wanted)
    del model.graph.value_info[:]
    return save_net(model, goal)


def test_sizes_that_an_input_of_one_known_side_is_advised_are_taken(
    sizes, wide, tmp_path, run, wording
):
    tall = with_sides(wide, tmp_path / "tall.onnx", (24, "w"), ["input"])
    words = "calibrate", tall, "--images", sizes, "--out", tmp_path / "c.cache"
    assert "24x224, or 24x*" in run.fails(*words)
    for advised in ("24x224", "24x*"):
        run.ok(*words, "--size", advised, "--refresh")
    with pytest.raises(FeedError) as raised:
        fed(sizes, X, preprocess={"size": (16, None)})
    wording.check(raised.value)


def test_another_size_than_declared_is_advised_a_way_that_works(sizes, wide, tmp_path, run):
    path = with_sides(wide, tmp_path / "small.onnx", (24, 24))
    words = ("build", path, "--images", sizes, "--out", tmp_path / "o", *QUICK, "--size", "32x40")
    err = run.fails(*words)
    assert "got 32x40" in err and "(dim_param)" in err
    with_sides(path, path, ("h", "w"))  # as docs/feeds.md opens them
    run.ok(*words)


def test_nan_in_files_is_told_with_one_way_out(wide, tmp_path, run):
    array = np.zeros((4, 3, 8, 16), np.float32)
    array[2, 0, 0, 0] = np.nan
    np.save(tmp_path / "x.npy", array)
    words = ("calibrate", wide, "--images", tmp_path / "x.npy", "--out", tmp_path / "c.cache")
    assert run.fails(*words).endswith(
        "sample 2 of x.npy holds 1 NaN or Inf values for the input 'x'; 4 were to be fed: correct"
        " or remove it, or skip bad ones (--skip-bad)\n"
    )
    run.ok(*words, "--skip-bad")


def test_arrays_of_different_sizes_in_files(tmp_path, wide, cached, rng):
    folder = tmp_path / "arrays"
    folder.mkdir()
    for number, width in enumerate((16, 24, 40)):
        np.save(folder / f"{number}.npy", rng.normal(size=(2, 3, 8, width)).astype(np.float32))
    _, samples = fed(folder, WIDE)
    assert [one["x"].shape for one in samples] == [(1, 3, 8, w) for w in (16, 16, 24, 24, 40, 40)]
    both = "--target", "onnxruntime,ascend", "--threads"
    assert cached(folder, *both, 1, model=wide) == cached(folder, *both, 2, model=wide)
    each = "--target", "tensorrt", "--method", "entropy-tensorrt", "--batch-size", 2
    cached(folder, *each, model=wide)  # each batch is of one shape


def raw_folder(tmp_path, arrays, suffix="bin"):
    folder = tmp_path / "raw"
    folder.mkdir(exist_ok=True)
    for number, one in enumerate(arrays):
        np.ascontiguousarray(one).tofile(folder / f"{number}.{suffix}")
    return folder


def test_raw_files_of_an_open_input(tmp_path, wide, run, cached):
    batch = np.random.default_rng(6).normal(size=(4, 3, 8, 12)).astype("<f4")
    folder = raw_folder(tmp_path, batch)
    np.save(tmp_path / "stacked.npy", batch)
    made = cached(tmp_path / "stacked.npy", model=wide)
    for shape in ("1x3x8x12", "3x8x12"):
        assert cached(folder, "--raw-shape", shape, model=wide) == made
    stacked = open_feed(tmp_path / "stacked.npy", [WIDE]).manifest()
    assert open_feed(RawFiles(folder, shape=(1, 3, 8, 12)), [WIDE]).manifest() == stacked
    words = "calibrate", wide, "--out", tmp_path / "d.cache", "--images", folder
    assert "--raw-shape" in run.fails(*words)


def test_raw_files_of_fewer_bits_are_widened_and_of_others_refused(tmp_path, wording):
    folder = raw_folder(tmp_path, BATCH.astype("<f2"))
    _, samples = fed(RawFiles(folder, dtype="float16"))
    same(samples, BATCH.astype("<f2").astype(np.float32))
    raw_folder(tmp_path, BATCH.astype("<i8"))
    with pytest.raises(FeedError) as raised:
        fed(RawFiles(folder, dtype="int64"))
    wording.check(raised.value)
    with pytest.raises(FeedError) as raised:
        fed(RawFiles(folder, shape=(3, 16, 17)), WIDE)
    wording.check(raised.value)
    with pytest.raises(FeedError) as raised:
        fed(RawFiles(folder, shape=(3, 16, 8)))
    wording.check(raised.value)


def test_raw_pictures_are_preprocessed_as_files(tmp_path, small_cnn, command, wording):
    for number, one in enumerate(PICTURES):
        cv2.imwrite(str(tmp_path / f"{number}.png"), one[:, :, ::-1])
    _, files = fed(tmp_path, preprocess=UNIT)
    folder = raw_folder(tmp_path, PICTURES, "raw")
    for shape in ((16, 16, 3), (1, 16, 16, 3)):
        feed, samples = fed(RawFiles(folder, shape=shape, dtype="uint8"), preprocess=UNIT)
        same(samples, np.concatenate([one["x"] for one in files]))
        assert feed.manifest()["preprocess"] == feed.preprocess.to_json()
    grey = RawFiles(folder, shape=(48, 16), dtype="uint8")
    assert fed(grey)[1][0]["x"].shape == (1, 3, 16, 16)  # by default as other images
    with pytest.raises(FeedError) as raised:
        fed(RawFiles(folder, shape=(3, 16, 16), dtype="uint8"))
    wording.check(raised.value)
    raw = "--images", folder, "--raw-shape", "16x16x3", "--raw-dtype", "uint8"
    out, build = tmp_path / "o", ("build", small_cnn, *raw, *QUICK, "--out")
    said = command(*build, out, "--preprocess", "unit", "--eval-images", folder)
    assert "unit: rgb 16x16" in said
    engine = out / "small_cnn.int8.onnx"
    for words in (("compare", small_cnn, engine), ("bench", engine, "--duration", 0)):
        command(*words, *raw)
    command("explain", out, *raw)
    command(*build, tmp_path / "p", "--eval-images", tmp_path / "*.png")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--raw-shape 1x3x16x16", "a raw shape and dtype apply to .bin and .raw files, got 00.png"),
        ("--raw-dtype uint8", "which have their own; leave them out"),
        ("--raw-dtype complex64", "a raw dtype must be one of float32, float16"),
        ("--raw-shape 1x3xq", "--raw-shape takes whole numbers, got 'q'"),
        ("--raw-shape 0x3", "a raw shape must have 1 to 8 sides of 1 or more, got [0, 3]"),
    ],
)
def test_a_form_of_raw_files_for_others(words, message, small_cnn, pictures, tmp_path, run):
    feed = "--images", pictures, "--out", tmp_path / "c"
    assert message in run.fails("calibrate", small_cnn, *feed, *words.split())
    assert "goes with --images" in run.fails("bench", small_cnn, *words.split())


def test_a_form_of_raw_files_is_of_one_input_and_of_no_preprocessing(tmp_path, wording):
    folder = raw_folder(tmp_path, BATCH)
    with pytest.raises(ConfigError) as raised:
        fed(RawFiles(folder, dtype="float32"), X, STATE)
    wording.check(raised.value)
    with pytest.raises(ConfigError) as raised:
        fed(RawFiles(folder, dtype="float32"), preprocess=UNIT)
    wording.check(raised.value)
