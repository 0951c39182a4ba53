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
from deploy.feed.evaluation import apply_labels, read_labels, to_labels
from deploy.feed.feed import Dataset, open_feed
from deploy.feed.file_list import SampleChangedError
from deploy.feed.loaders import open_iterable
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


def collect_feed(source, *specs, **options):
    feed = open_feed(source, specs or (X,), **options)
    with feed.samples() as stream:
        return feed, list(stream)


def assert_samples_equal(samples, batch=BATCH):
    assert np.array_equal(np.concatenate([sample["x"] for sample in samples]), batch)


def make_array_folder(tmp_path, kind):
    folder = tmp_path / "arrays"
    folder.mkdir()
    for number, array in enumerate(BATCH):
        path = folder / f"{number}.{kind}"
        if kind == "npy":
            np.save(path, array[None])
        elif kind == "npz":
            np.savez(path, x=array[None])
        else:
            array.astype("<f4").tofile(path)
    return folder


@pytest.fixture
def make_cache(run, small_cnn, tmp_path):
    """(images, *words) -> the bytes of a new cache that `calib8 calibrate` makes of them."""
    numbers = itertools.count()

    def calibrate(images, *options, model=small_cnn):
        path = tmp_path / f"made{next(numbers)}.cache"
        run.ok("calibrate", model, "--images", images, "--out", path, *options)
        return path.read_bytes()

    return calibrate


@pytest.fixture
def build(command, refusal, small_cnn, tmp_path):
    """(*words) -> what a quick build of small_cnn reports, on one line; `fails`: its refusal."""
    arguments = ("build", small_cnn, "--out", tmp_path / "o", *QUICK)

    def run_build(*options):
        command(*arguments, *options)
        return read_markdown(tmp_path / "o")

    run_build.fails = functools.partial(refusal, *arguments)
    return run_build


@pytest.mark.parametrize("kind", ["npy", "npz", "bin", "raw"])
@pytest.mark.parametrize("form", ["folder", "list", "pattern", "paths"])
def test_array_files_equal_stacked_file(kind, form, tmp_path, make_cache):
    folder, list_file = make_array_folder(tmp_path, kind), tmp_path / "list.txt"
    list_file.write_text("".join(f"arrays/{number}.{kind}\n" for number in range(6)))
    pattern = tmp_path / "*" / f"?.{kind}"
    forms = {"folder": folder, "list": list_file, "pattern": pattern, "paths": None}
    source = forms[form] or sorted(folder.iterdir())
    for end in ("", ".json", ".npz") if form == "folder" else ():  # what a build into it leaves
        (folder / f"m.cache{end}").touch()
    feed, samples = collect_feed(source)
    assert_samples_equal(samples)
    np.save(tmp_path / "stacked.npy", BATCH)
    stacked_manifest = open_feed(tmp_path / "stacked.npy", [X]).manifest()
    assert feed.manifest() == stacked_manifest  # so that a calibration of the one serves the other
    if form != "paths":
        assert make_cache(source) == make_cache(tmp_path / "stacked.npy")


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_array_files_may_lack_the_batch(kind, tmp_path):
    for number, array in enumerate(BATCH):
        if kind == "npy":
            np.save(tmp_path / f"{number}.npy", array)
        else:
            np.savez(tmp_path / f"{number}.npz", x=array, label=number)
    feed, samples = collect_feed(tmp_path)
    assert_samples_equal(samples)
    assert feed.labels == (tuple(range(6)) if kind == "npz" else None)


@pytest.mark.parametrize("address", ["rtsp://host:554/a b", "https://host/x.zip", "S3://bucket"])
def test_addresses_are_no_paths(address, small_cnn, tmp_path, run):
    sources = (["--images", address], ["--images", tmp_path, "--eval-images", address])
    for arguments in (*([small_cnn, *source] for source in sources), [address]):
        assert f"address {address};" in run.fails("build", *arguments)
    with pytest.raises(ConfigError, match=f"address {address};"):
        open_feed(address, [X])


def test_empty_path_is_not_the_current_folder():
    with pytest.raises(ConfigError, match="must not be empty"):
        open_feed("", [X])
    with pytest.raises(ConfigError, match="must not be empty"):
        to_labels("")


def test_foreign_data_set_is_no_list(tmp_path, wording):
    (tmp_path / "a.mat").write_bytes(b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + bytes(64))
    with pytest.raises(FeedError) as refusal:
        open_feed(tmp_path / "a.mat", [X])
    wording.check(refusal.value)


def test_list_of_stacked_files_with_labels(tmp_path):
    np.save(tmp_path / "a.npy", BATCH[:4])
    np.save(tmp_path / "b.npy", BATCH[4:])
    (tmp_path / "list.txt").write_text("a.npy 7\nb.npy 2\n")
    feed, samples = collect_feed(tmp_path / "list.txt")
    assert_samples_equal(samples)
    assert feed.labels == (7, 7, 7, 7, 2, 2)
    assert feed.names[0] == "sample 0 of a.npy"
    feed = open_feed([tmp_path / "a.npy", tmp_path / "b.npy"], [X])
    np.save(tmp_path / "a.npy", BATCH[:2])
    changed = pytest.raises(SampleChangedError, match=r"a\.npy changed while calib8 ran")
    with changed, feed.samples() as stream:
        list(stream)


def test_set_labels_replace_those_of_the_source():
    feed = open_feed([(BATCH[:1], 3), (BATCH[1:2], 4)], [X])
    assert feed.labels == (3, 4)
    feed.set_labels([1, 2])
    assert feed.labels == (1, 2)


@pytest.mark.parametrize("labels", [[1.5, 2.0], np.eye(2), ["1", "2"], [[1], [1, 2]], [-1, 0], 1.5])
def test_labels_are_whole_numbers(labels):
    with pytest.raises(FeedError, match="labels must be whole numbers"):
        to_labels(labels)


def test_labels_may_be_any_array_of_integers():
    for labels in (np.array([3, 1]), (3, 1), (label for label in (np.int8(3), 1))):
        assert to_labels(labels) == [3, 1]


def open_labelled(pictures, labels, text, limit=None):
    """Return the feed of the pictures with the labels of a text file."""
    labels.write_text(text)
    feed = open_feed(pictures, [X], preprocess=UNIT, limit=limit)
    apply_labels(read_labels(labels), feed)
    return feed


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("", "{0}"),
        ("", "class {0}"),
        ("", "{1} {0}"),
        ("", "val/{1}\t{0}"),
        ("", "{1},{0}"),
        ("name,label", "val/{1}, {0}"),
        ("image_id,label", "{1:.2},{0}"),  # without suffix, as Kaggle has it
        ("image_id\tlabel", "{1:.2}\t{0}"),
    ],
)
def test_labels_belong_to_chosen_images(header, line, limit, pictures, tmp_path):
    names = [f"{number:02}.png" for number in range(20)]
    lines = [line.format(number, name) for number, name in enumerate(names)]
    if "{1" in line:  # a line that names its image may stand anywhere
        lines.reverse()
    feed = open_labelled(pictures, tmp_path / "l.txt", "\n".join([header, *lines]), limit)
    assert feed.names == tuple(names[label] for label in feed.labels)


@pytest.mark.parametrize("line", ["{0}/{1}.png {2}", "/data/val/{0}/{1}.png,{2}", "{0}/{1} {2}"])
def test_labels_distinguish_folders_with_equal_names(line, pictures, tmp_path):
    lines = []
    for label, folder in enumerate(("cat", "dog")):
        (tmp_path / "val" / folder).mkdir(parents=True)
        for number in range(2):
            shutil.copy(pictures / "00.png", tmp_path / "val" / folder / f"{number}.png")
            lines.append(line.format(folder, number, label))
    for text_lines in (lines, [*lines[2:], *lines[:2]]):  # the dogs first, with the same file names
        feed = open_labelled(tmp_path / "val", tmp_path / "l.txt", "\n".join(text_lines))
        assert feed.labels == (0, 0, 1, 1)
    # a line without the folder would label two images
    for limit in (None, 2):  # the line may be that of an image that is not chosen
        with pytest.raises(FeedError, match=r"got 0 lines for cat/\d\.png"):
            open_labelled(tmp_path / "val", tmp_path / "l.txt", "0.png 5\n1.png 6\n", limit)


def test_only_a_table_of_labels_has_a_header(tmp_path):
    (tmp_path / "l.txt").write_text("one\n1\n2\n")  # without it, labels may fit other images
    with pytest.raises(FeedError, match="line 1 of"):
        read_labels(tmp_path / "l.txt")


@pytest.mark.parametrize("line", ["0.png 1,5", "0.png 1 5", '"0.png",1,5'])
def test_two_labels_of_a_line_are_refused(line, tmp_path):
    (tmp_path / "l.txt").write_text(f"{line}\n")
    with pytest.raises(FeedError, match="line 1 of"):
        read_labels(tmp_path / "l.txt")


def test_line_of_labels_for_each_image(pictures, tmp_path, wording):
    others = [f"val_{number}.png" for number in range(20)]  # as many as there are images
    for names in (["01.png", "00.png"], ["00.png", "00.png"], others):
        with pytest.raises(FeedError) as raised:
            open_labelled(pictures, tmp_path / "l.txt", "".join(f"{name} 1\n" for name in names))
        wording.check(raised.value)


def test_labels_are_read_from_npz_files(tmp_path):
    (tmp_path / "arrays").mkdir()
    for number, array in enumerate(BATCH):
        np.savez(tmp_path / "arrays" / f"{number}.npz", x=array[None], labels=np.array([number]))
    assert collect_feed(tmp_path / "arrays")[0].labels == tuple(range(6))


@pytest.mark.parametrize("form", ["npz", "a folder an input"])
def test_folder_feeds_several_inputs(form, tmp_path, wording):
    inputs_folder = tmp_path / "inputs"  # the message has its name
    for name in ("x", "state"):
        (inputs_folder / name).mkdir(parents=True)
    for number, (x, state) in enumerate(zip(BATCH[:, None], STATES[:, None], strict=True)):
        if form == "npz":
            np.savez(inputs_folder / "x" / f"{number}.npz", x=x, state=state)
        else:
            np.save(inputs_folder / "x" / f"{number}.npy", x)
            np.save(inputs_folder / "state" / f"{number}.npy", state)
    folder = inputs_folder / "x" if form == "npz" else inputs_folder
    _, samples = collect_feed(folder, X, STATE)
    assert_samples_equal(samples)
    assert np.array_equal(np.concatenate([sample["state"] for sample in samples]), STATES)
    if form != "npz":
        (folder / "state" / "5.bin").write_bytes(STATES[5].tobytes())
        with pytest.raises(FeedError, match=r"5\.bin and 5\.npy in state"):
            collect_feed(folder, X, STATE)
        (folder / "state" / "5.npy").unlink()
        (folder / "state" / "5.bin").unlink()
        with pytest.raises(FeedError) as raised:
            collect_feed(folder, X, STATE)
        wording.check(raised.value)


def test_broken_array_files_are_named(tmp_path, run, small_cnn, wording):
    folder = make_array_folder(tmp_path, "npy")
    (folder / "3.npy").write_bytes(b"\x93NUMPY no")
    with pytest.raises(FeedError) as raised:
        collect_feed(folder)
    wording.check(raised.value)
    feed, samples = collect_feed(folder, skip_bad=True)
    assert len(samples) == 5
    assert "3.npy" in feed.notes[0]
    arguments = "calibrate", small_cnn, "--images", folder, "--out", tmp_path / "c.cache"
    assert "3.npy" in run.fails(*arguments)
    run.ok(*arguments, "--skip-bad")


@pytest.mark.parametrize(
    ("size", "spec", "message"),
    [
        (100, X, r"complete samples of the input 'x' .*, 3,072 bytes each, got 100 bytes"),
        (0, X, "got 0 bytes"),
        (3072, TensorSpec("x", "float32", ("n", 3, "h", 16)), "must state its shape"),
    ],
)
def test_raw_bytes_must_fit_input(size, spec, message, tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(size))
    with pytest.raises(FeedError, match=message):
        collect_feed(tmp_path / "a.bin", spec)


def test_arrays_among_images_are_not_fed(tmp_path, pictures, wording):
    folder = make_array_folder(tmp_path, "npy")
    shutil.copy(pictures / "00.png", folder)
    feed, samples = collect_feed(folder)
    assert len(samples) == 1
    assert "6 files of arrays among the images of arrays are not fed" in feed.notes
    with pytest.raises(FeedError) as raised:
        collect_feed(sorted(folder.iterdir()))
    wording.check(raised.value)


def test_notes_name_the_current_folder(tmp_path, pictures, monkeypatch):
    folder = make_array_folder(tmp_path, "npy")
    shutil.copy(pictures / "00.png", folder)
    monkeypatch.chdir(folder)
    feed, _ = collect_feed(Path("."))
    assert "6 files of arrays among the images of . are not fed" in feed.notes


def test_image_pattern_equals_folder(pictures, make_cache, tmp_path, run, small_cnn, wording):
    assert make_cache(pictures) == make_cache(pictures / "*.png")
    arguments = "calibrate", small_cnn, "--out", tmp_path / "c.cache"
    wording.check(run.fails(*arguments, "--images", pictures / "*.gif"))


@pytest.mark.parametrize("images", ["5", '[{"file_name": "a\\ud800.png"}]', '[{"file_name": 5}]'])
def test_coco_images_must_be_named(images, tmp_path, wording):
    path = tmp_path / "coco.json"
    path.write_text(f'{{"images": {images}}}')
    with pytest.raises(FeedError) as raised:
        open_feed(path, [X])
    wording.check(raised.value)


def test_remote_nan_sample_keeps_its_digest():
    spec = TensorSpec("x", "float32", ("n", 3))
    source = open_iterable([np.full((1, 3), np.nan, np.float32)], (spec,), has_end=True, limit=None)
    (sample,) = read_remote_samples(source, [0])
    assert sample.digest == source.load(0).digest
    assert "NaN" in sample.content


def test_coco_annotations_name_images(pictures, tmp_path, make_cache, wording):
    shutil.copytree(pictures, tmp_path / "images")
    entries = [{"id": n, "file_name": f"{n:02}.png"} for n in range(20)]
    (tmp_path / "set.json").write_text(json.dumps({"images": entries, "annotations": []}))
    assert collect_feed(tmp_path / "set.json")[0].names == collect_feed(pictures)[0].names
    make_cache(tmp_path / "set.json")
    (tmp_path / "other.json").write_text("[1, 2]")
    with pytest.raises(FeedError) as raised:
        collect_feed(tmp_path / "other.json")
    wording.check(raised.value)


@pytest.mark.slow
def test_labels_without_evaluation_images_are_reported(pictures, tmp_path, build):
    """Nobody is to take the figures for those of labels that were never looked at."""
    labels, list_file = tmp_path / "labels.txt", tmp_path / "list.txt"
    labels.write_text("1\n" * 20)
    list_file.write_text("".join(f"{path} 1\n" for path in sorted(pictures.iterdir())))
    assert "got none; give --eval-images" in build.fails("--images", pictures, "--labels", labels)
    assert "are not used; --eval-images" in build("--images", list_file)
    assert "are not used" not in build("--images", pictures, "--eval-images", list_file)


def test_labels_follow_images_after_skipping(pictures, tmp_path, run, small_cnn):
    """Each image's own label is its best class; one off, and next to none would be right."""
    session = OrtSession.open(small_cnn, threads=1)
    preprocess = Preprocess(size=(16, 16), color="rgb", layout="nchw")
    pictures_read = [cv2.imread(str(path)) for path in sorted(pictures.iterdir())]
    best_classes = [
        int(session.run({"x": preprocess_image(p, preprocess)})["logits"].argmax())
        for p in pictures_read
    ]
    shutil.copytree(pictures, tmp_path / "val")
    (tmp_path / "val" / "03.png").write_text("broken")
    labels = tmp_path / "labels.txt"
    labels.write_text(
        "".join(
            f"{label}\n"
            for label in [*best_classes[:3], (best_classes[3] + 1) % 10, *best_classes[4:]]
        )
    )
    arguments = ("build", small_cnn, "--images", pictures, "--eval-images", tmp_path / "val")
    arguments += (*QUICK, "--labels", labels, "--skip-bad", "--out")
    out = run.ok(*arguments, tmp_path / "o")
    (line,) = [line for line in out.splitlines() if line.startswith("Top-1  ")]
    assert line.split()[1] == "100.00"
    for count in (19, 21):
        labels.write_text("1\n" * count)
        assert f"got {count} labels for 20" in run.fails(*arguments, tmp_path / "no")
        assert not (tmp_path / "no").exists()  # before anything is run


@pytest.mark.slow
def test_evaluation_images_used_twice_are_reported(pictures, tmp_path, build):
    shared_folder, separate_folder = tmp_path / "others", tmp_path / "alone"
    shared_folder.mkdir()
    for number, path in enumerate(sorted(pictures.iterdir())):
        cv2.imwrite(str(shared_folder / f"renamed{number}.png"), 255 - cv2.imread(str(path)))
        if number < 7:
            shutil.copy(path, shared_folder / f"renamed{number}.png")
    shared_count = sum(position < 7 for position in spread_evenly(range(20), 10))
    for limit, count in (((), 7), (("--limit", 10), shared_count)):
        out = build("--images", pictures, "--eval-images", shared_folder, *limit)
        assert f"{count} of the 20 evaluation images calibrated too" in out
    separate_folder.mkdir()
    cv2.imwrite(str(separate_folder / "a.png"), np.full((9, 9, 3), 99, np.uint8))
    assert "calibrated too" not in build("--images", pictures, "--eval-images", separate_folder)


@pytest.mark.slow
def test_image_copies_are_reported(pictures, tmp_path, build):
    train, val = shutil.copytree(pictures, tmp_path / "train"), tmp_path / "val"
    arguments = ("--images", train, "--eval-images", val)
    val.mkdir()
    for number, path in enumerate(sorted(train.iterdir())[:5]):
        shutil.copy(path, val / f"{number}.png")
    assert "once more" not in build(*arguments)
    original, *other_paths = sorted(train.iterdir())
    shutil.copy(original, train / "again.png")
    assert "1 of the 21 images is a copy" in build(*arguments)
    for number, path in enumerate(other_paths[:2]):
        shutil.copy(path, train / f"again{number}.png")
        shutil.copy(path, val / f"again{number}.png")
    out = build(*arguments)
    assert "3 of the 23 images are copies" in out
    assert "2 of the 7 images are copies" in out
    assert "7 of the 7 evaluation images" in out  # and not 5


def test_folders_are_labels(pictures, tmp_path, build):
    for number, path in enumerate(sorted(pictures.iterdir())):
        (tmp_path / "val" / ["cat", "dog", "owl"][number % 3]).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "val" / ["cat", "dog", "owl"][number % 3])
    (tmp_path / "val" / "cow").mkdir()  # a class without images, which torchvision numbers too
    (tmp_path / "val" / ".cache").mkdir()
    feed = Dataset(source=tmp_path / "val").open([X], labels_by_folder=True)
    assert feed.labels == (0,) * 7 + (2,) * 7 + (3,) * 6
    assert "labels by folder: 4 classes, 0 is cat" in feed.notes
    arguments = "--images", pictures, "--labels", "folders"
    assert re.search(r"\| Top-1 \| \d", build(*arguments, "--eval-images", tmp_path / "val"))
    assert "evaluation images, got none" in build.fails(*arguments)
    assert "one folder per class" in build.fails(*arguments, "--eval-images", pictures)


def test_folders_label_arrays_with_a_note(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "0.npy", np.zeros((1, 3, 16, 16), np.float32))
    feed = Dataset(source=tmp_path).open([X], labels_by_folder=True)
    assert feed.labels == (0, 1)
    assert "labels by folder: 2 classes, 0 is cat" in feed.notes


@pytest.mark.slow
def test_video_is_fed_by_frames(tmp_path, command, small_cnn, wording):
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 5, (32, 32))
    for number in range(23):
        writer.write(np.full((32, 32, 3), number * 10, np.uint8))
    writer.release()
    feed, samples = collect_feed(path, preprocess=UNIT)
    assert feed.names == tuple(f"clip.avi#{number}" for number in (0, 5, 10, 15, 20))
    shades = [float(sample["x"].mean()) * 255 for sample in samples]
    assert np.allclose(shades, [0, 50, 100, 150, 200], atol=4)
    with feed.samples() as second_stream:  # from the start once more
        assert [float(sample["x"].mean()) * 255 for sample in second_stream] == shades
    build_arguments = (
        f"build {small_cnn} --images {path} --out {tmp_path / 'b'} --effort 0 --duration 0"
    )
    command(*build_arguments.split())
    arguments = "calibrate", small_cnn, "--images", path, "--out", tmp_path / "a.cache"
    # in a process whose stderr is no test's
    subprocess.run([sys.executable, "-m", "deploy", *map(str, arguments)], check=True)
    assert "one of every 2 of 23 samples is used" in command(*arguments, "--stride", 2)
    for line in ("clip.avi\nclip.avi\n", "clip.avi 3\n"):
        (tmp_path / "list.txt").write_text(line)
        with pytest.raises(FeedError) as raised:
            collect_feed(tmp_path / "list.txt")
        wording.check(raised.value)
    _, picture = cv2.imencode(".png", np.zeros((32, 32, 3), np.uint8))
    (tmp_path / "broken1.mp4").write_bytes(picture.tobytes())  # no frame of the other file
    (tmp_path / "broken%d.mp4").write_bytes(b"no video")
    with pytest.raises(FeedError) as raised:
        collect_feed(tmp_path / "broken%d.mp4")
    wording.check(raised.value)
    assert len(collect_feed(path.rename(tmp_path / "clip\udcff.avi"), preprocess=UNIT)[1]) == 5


def test_stride_chooses_images(pictures):
    feed = open_feed(pictures, [X], limit=Choice(every=3))
    assert feed.names == tuple(f"{n:02}.png" for n in range(0, 20, 3))
    assert "one of every 3 of 20 samples is used" in feed.notes


LOADERS = {
    "arrays": "def feed():\n    return [a for a in data]",
    "generator": "def feed():\n    for a in data:\n        yield a, 3",
    "mapping": "def feed():\n    return {'x': data}",
    "reader": (
        "class Reader:\n"
        "    def __init__(self):\n        self.remaining = list(data)\n"
        "    def get_next(self):\n"
        "        return {'x': self.remaining.pop(0)[None]} if self.remaining else None\n"
        "def feed():\n    return Reader()"
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_user_loader_equals_stacked_file(kind, tmp_path, make_cache):
    np.save(tmp_path / "stacked.npy", BATCH)
    script = tmp_path / "loader.py"
    data = f"import numpy as np\ndata = np.load({str(tmp_path / 'stacked.npy')!r})\n"
    script.write_text(data + LOADERS[kind] + "\n")
    assert make_cache(f"{script}:feed") == make_cache(tmp_path / "stacked.npy")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no disk')", "got ValueError: no disk"),
        ("return None", "iterate over, got NoneType"),
        ("return 5", "something to iterate over, got int"),
        ("yield 1 / 0", "got ZeroDivisionError"),
        ("yield 1 if open('gone') else 2", "'gone' at"),
        ("raise GeneratorExit", "got GeneratorExit"),
        ("raise BaseException('gone')", "got BaseException: gone"),
        ("raise type('Odd', (Exception,), {'__str__': lambda e: 1 / 0})", "got Odd: an error with"),
        ("return iter([])", "must give samples, got none"),
    ],
)
def test_failing_loader_is_reported(body, message, tmp_path, run, small_cnn):
    (tmp_path / "loader.py").write_text(f"def feed():\n    {body}\n")
    arguments = "calibrate", small_cnn, "--out", tmp_path / "c"
    assert message in run.fails(*arguments, "--images", f"{tmp_path}/loader.py:feed")


@pytest.mark.parametrize("body", ["change()\n    return data", "yield data\n    change()"])
def test_process_state_is_restored_after_loader(body, tmp_path, run, small_cnn, monkeypatch):
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
    state_before = signal.getsignal(signal.SIGINT), np.geterr()
    arguments = ("--images", "loader.py:feed", "--duration", 0, "--effort", 0)
    assert run("build", small_cnn, *arguments)[0] in (0, 3)
    assert (signal.getsignal(signal.SIGINT), np.geterr()) == state_before
    assert {path.name for path in tmp_path.iterdir()} >= {"build", "there", "loader.py"}
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["here"]
    monkeypatch.chdir(tmp_path / "build")  # another program, which knows nothing of that folder
    with wrap_user_errors("code", error=FeedError):
        assert Path.cwd() == tmp_path / "build"


class Tensor:
    """A tensor with the methods of a framework's tensors."""

    def __init__(self, array, needs_grad=False):
        self.array, self.needs_grad = array, needs_grad
        self.shape, self.dtype = array.shape, array.dtype

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
        self.remaining = list(BATCH)

    def get_next(self):
        return {"x": self.remaining.pop(0)[None]} if self.remaining else None


class Batched:
    """A dataset that iterates like TensorFlow's: tensors with `numpy`, (inputs, labels)."""

    def __iter__(self):
        return iter([(Tensor(BATCH[:4]), LABELS[:4]), (Tensor(BATCH[4:]), LABELS[4:])])


class Rows:
    """A dataset like Hugging Face's: rows by number, and names of columns."""

    column_names = ("x", "label")

    def __len__(self):
        return len(BATCH)

    def __getitem__(self, row):
        return {"x": BATCH[row], "label": row}

    def __iter__(self):
        return (self[row] for row in range(len(self)))


class FeedDicts:
    """A loader like polygraphy's: a feed_dict an iteration."""

    def __getitem__(self, index):
        if index >= len(BATCH):
            raise IndexError
        return {"x": BATCH[index][None]}

    def __iter__(self):
        return map(self.__getitem__, range(len(BATCH)))


LABELS = np.arange(6)


@pytest.mark.parametrize(
    ("source", "labels"),
    [
        pytest.param(BATCH, "", id="an array"),
        pytest.param(Tensor(BATCH, needs_grad=True), "", id="a tensor"),
        pytest.param({"x": BATCH}, "", id="stacked by name"),
        pytest.param([(BATCH[:4], LABELS[:4]), (BATCH[4:], LABELS[4:])], "value 2", id="loader"),
        pytest.param([[Tensor(row[None])] for row in BATCH], "", id="a loader of one tensor"),
        pytest.param(
            ({"x": b[None], "y": n} for n, b in enumerate(BATCH)), "'y'", id="mappings with a label"
        ),
        pytest.param(
            [({"x": b[None]}, Tensor(np.array(n))) for n, b in zip(LABELS, BATCH, strict=True)],
            "value 2",
            id="(mapping, label)",
        ),
        pytest.param(lambda: iter(BATCH), "", id="a function"),
        pytest.param(OwnReader(), "", id="get_next"),
        pytest.param(OwnReader, "", id="a class of readers"),
        pytest.param(lambda: (yield from BATCH), "", id="a function that yields"),
        pytest.param(lambda: {"x": BATCH}, "", id="a function that gives a mapping"),
        pytest.param(Batched(), "value 2", id="a dataset of TensorFlow's"),
        pytest.param(Rows(), "'label'", id="a dataset of Hugging Face's"),
        pytest.param(FeedDicts(), "", id="a loader of polygraphy's"),
    ],
)
def test_python_sources_give_same_samples(source, labels):
    feed, samples = collect_feed(source)
    assert_samples_equal(samples)
    assert feed.labels == (tuple(range(6)) if labels else None)
    assert not any("no preprocessing" in note or "ignored" in note for note in feed.notes)
    assert [note for note in feed.notes if note.startswith("labels")] == (
        [f"labels: {labels} of each item"] if labels else []
    )


@pytest.mark.parametrize(
    ("values", "names"),
    [
        pytest.param([LABELS - 1], "value 2", id="-1 for no class"),
        pytest.param([LABELS / 2], "value 2", id="values of a regression"),
        pytest.param([LABELS[:, None].repeat(2, 1)], "value 2", id="more than one a sample"),
        pytest.param([LABELS, LABELS], "value 2, value 3", id="labels and numbers"),
        pytest.param(["a.jpg"], "value 2", id="a name"),
    ],
)
def test_values_that_are_no_labels_are_named(values, names, wording):
    feed = open_feed([(BATCH, *values)], [X])
    (note,) = feed.notes
    assert feed.labels is None and f": {names} of each" in note
    wording.check(note)


def test_pictures_in_memory_keep_their_labels():
    pictures = np.random.default_rng(1).integers(0, 256, (6, 20, 20, 3)).astype(np.uint8)
    singles = list(zip(pictures, LABELS.tolist(), strict=True))
    mappings = [{"image": picture, "label": label} for picture, label in singles]
    for source in (singles, [(pictures, LABELS)], mappings):
        feed, samples = collect_feed(source, preprocess=UNIT)
        assert feed.labels == tuple(range(6)) and len(samples) == 6
    assert open_feed([(pictures[0], "a.jpg")], [X], preprocess=UNIT).labels is None


def test_first_labels_of_an_endless_loader_are_read():
    loader = ((array[None], number % 6) for number, array in enumerate(itertools.cycle(BATCH)))
    assert open_feed(loader, [X], limit=8).labels == (0, 1, 2, 3, 4, 5, 0, 1)


def test_python_arrays_of_different_widths(wording):
    arrays = [BATCH[:2, :, :, :width] for width in (5, 16, 9)]
    _, samples = collect_feed(arrays, TensorSpec("x", "float32", ("n", 3, 16, "w")))
    assert [sample["x"].shape[3] for sample in samples] == [5, 5, 16, 16, 9, 9]
    with pytest.raises(FeedError) as raised:
        collect_feed(arrays[1:], TensorSpec("x", "float32", (4, 3, 16, "w")))
    wording.check(raised.value)


def test_lists_of_numbers_are_arrays():
    _, samples = collect_feed([[0.5, 1.0, 1.5, 2.0]], TensorSpec("x", "float64", ("n", 4)))
    assert samples[0]["x"].tolist() == [[0.5, 1.0, 1.5, 2.0]]
    _, samples = collect_feed([{"x": array.tolist(), "label": 3} for array in BATCH])
    assert np.array_equal(samples[0]["x"][0], BATCH[0])


def test_inputs_are_assigned_by_order():
    feed, samples = collect_feed([(BATCH, STATES, LABELS)], X, STATE)
    assert_samples_equal(samples)
    assert np.array_equal(np.concatenate([sample["state"] for sample in samples]), STATES)
    assert feed.labels == tuple(LABELS)


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
        (iter([Path("a.png")]), r"Path \(object\); put paths into a list"),
        (np.ones(3, complex), r"ndarray \(complex128\)"),
        ([()], "must be an array of numbers|must hold the inputs"),
    ],
)
def test_unknown_source_is_named_by_type(source, message):
    with pytest.raises(FeedError, match=message):
        collect_feed(source)


PICTURES = np.random.default_rng(9).integers(0, 256, (5, 16, 16, 3), np.uint8)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(PICTURES, id="stacked"),
        pytest.param(list(PICTURES), id="listed"),
        pytest.param([(picture, 3) for picture in PICTURES], id="with a label"),
        pytest.param(
            [{"image": picture, "label": 3} for picture in PICTURES], id="rows of a dataset"
        ),
        pytest.param(lambda: iter(PICTURES), id="a function"),
        pytest.param([Tensor(picture) for picture in PICTURES], id="tensors"),
    ],
)
def test_pictures_in_memory_equal_files(source, tmp_path):
    for number, picture in enumerate(PICTURES):
        cv2.imwrite(str(tmp_path / f"{number}.png"), picture[:, :, ::-1])
    preprocess = Preprocess(scale=1 / 255, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    _, files = collect_feed(tmp_path, preprocess=preprocess)
    feed, samples = collect_feed(source, preprocess=preprocess)
    assert_samples_equal(samples, np.concatenate([picture["x"] for picture in files]))
    assert feed.manifest()["preprocess"] == feed.preprocess.to_json()


def test_pictures_with_wrong_channels_are_refused(wording):
    with pytest.raises(FeedError) as raised:
        collect_feed([PICTURES[0].transpose(2, 0, 1)], preprocess=UNIT)
    wording.check(raised.value)


WIDE = TensorSpec("x", "float32", ("batch", 3, "h", "w"))


@pytest.fixture
def sized_pictures(tmp_path):
    """Pictures of different sizes: 20x40, 33x33, 50x21, 20x40 (height by width)."""
    folder = tmp_path / "sizes"
    folder.mkdir()
    for number, (height, width) in enumerate(((20, 40), (33, 33), (50, 21), (20, 40))):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), noise)
    return folder


@pytest.fixture
def wide_net(tmp_path):
    """A small network whose input is of any height and width."""
    weights = np.random.default_rng(5).normal(size=(8, 8, 3, 3)).astype(np.float32)
    weights = {"w": weights[:, :3], "v": weights}
    padded = {"pads": [1, 1, 1, 1]}
    nodes = [("Conv", "x w", "c", padded), ("Conv", "c v", "d", padded)]
    nodes += [("Relu", "d", "r"), ("GlobalAveragePool", "r", "y")]
    model = make_model(nodes, {"x": ["batch", 3, "h", "w"]}, {"y": ["batch", 8, 1, 1]}, weights)
    return save_net(model, tmp_path / "wide.onnx")


@pytest.mark.parametrize(
    ("options", "expected"),
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
def test_open_sides_follow_each_picture(options, expected, sized_pictures):
    _, samples = collect_feed(sized_pictures, WIDE, preprocess=options)
    assert [sample["x"].shape[2:] for sample in samples] == expected
    if options.get("resize"):  # what is over is padded, not stretched
        assert (samples[0]["x"][:, :, :, 20:] == 0).all()
        assert samples[0]["x"][..., :20].any()


@pytest.mark.slow
def test_commands_take_open_sizes(sized_pictures, wide_net, tmp_path, command):
    arguments = ("build", wide_net, "--images", sized_pictures, *QUICK, "--size")
    for name, options in (("a", ()), ("b", ("--threads", 1))):
        out = command(*arguments, "native", "--multiple", 8, "--out", tmp_path / name, *options)
        assert "rgb *x* in multiples of 8, stretch" in out
    engine, single_thread_engine = (tmp_path / name / "wide.int8.onnx" for name in "ab")
    assert engine.read_bytes() == single_thread_engine.read_bytes()
    out = command(*arguments, "24X*", "--out", tmp_path / "a")
    assert "rgb 24x*, stretch" in out
    assert "(multiple 8" in out
    command("compare", wide_net, engine, "--images", sized_pictures, "--size", "*x32")
    command("bench", engine, "--duration", 0, "--images", sized_pictures, "--size", "native")
    command("explain", tmp_path / "a", "--images", sized_pictures)  # as the report says


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--size 24x* --resize letterbox", "go with resize stretch, or with fit-height"),
        ("--size native --resize fit-height", "got fit-height to *x*; give another resize"),
        ("--size 24x24 --multiple 8", "a multiple is for sides that depend on the image, got 8"),
        ("--multiple 8", "leaves its size open; give a size, such as 224x224, or *x* for"),
        ("--size native --multiple 0", "multiple must be whole pixels, 1 to 16384, got 0"),
        ("--size 24x24x3", "a size reads HxW, such as 224x224, 224, 48x* or native, got '24x24x3'"),
        ("--size 1x* --resize stretch", None),
        ("--size 820x*", "at most 16384 pixels, got 820x16400 for 0.png of 2x40"),
    ],
)
def test_meaningless_sizes_are_refused(options, message, sized_pictures, wide_net, tmp_path, run):
    if "820x*" in options:
        cv2.imwrite(str(sized_pictures / "0.png"), np.zeros((2, 40, 3), np.uint8))
    arguments = (
        "calibrate",
        wide_net,
        "--images",
        sized_pictures,
        "--out",
        tmp_path / "c.cache",
        *options.split(),
    )
    assert message in run.fails(*arguments) if message else run(*arguments)[0] == 0


def save_with_sides(path, target_path, sides, lists=("input", "output")):
    """Give the inputs and outputs of a model these sides: numbers, or names of open ones."""
    model = onnx.load(path)
    for value in [value_info for end in lists for value_info in getattr(model.graph, end)]:
        for side, side_value in zip(value.type.tensor_type.shape.dim[2:4], sides, strict=True):
            setattr(side, "dim_param" if isinstance(side_value, str) else "dim_value", side_value)
    del model.graph.value_info[:]
    return save_net(model, target_path)


def test_advised_sizes_are_accepted(sized_pictures, wide_net, tmp_path, run, wording):
    tall = save_with_sides(wide_net, tmp_path / "tall.onnx", (24, "w"), ["input"])
    arguments = "calibrate", tall, "--images", sized_pictures, "--out", tmp_path / "c.cache"
    assert "24x224, or 24x*" in run.fails(*arguments)
    for advised in ("24x224", "24x*"):
        run.ok(*arguments, "--size", advised, "--refresh")
    assert "with 24x*" in run.fails(*arguments, "--size", "native", "--refresh")
    with pytest.raises(FeedError) as raised:
        collect_feed(sized_pictures, X, preprocess={"size": (16, None)})
    wording.check(raised.value)


def test_size_unlike_model_is_advised(sized_pictures, wide_net, tmp_path, run):
    path = save_with_sides(wide_net, tmp_path / "small.onnx", (24, 24))
    arguments = (
        "build",
        path,
        "--images",
        sized_pictures,
        "--out",
        tmp_path / "o",
        *QUICK,
        "--size",
        "32x40",
    )
    err = run.fails(*arguments)
    assert "got 32x40" in err
    assert "(--input" in err
    run.ok(*arguments, "--input", "1x3x32x40")


def test_nan_in_file_is_reported(wide_net, tmp_path, run):
    array = np.zeros((4, 3, 8, 16), np.float32)
    array[2, 0, 0, 0] = np.nan
    np.save(tmp_path / "x.npy", array)
    arguments = (
        "calibrate",
        wide_net,
        "--images",
        tmp_path / "x.npy",
        "--out",
        tmp_path / "c.cache",
    )
    assert run.fails(*arguments).endswith(
        "sample 2 of x.npy holds 1 NaN or Inf values for the input 'x'; 4 were to be fed: correct"
        " or remove it, or skip bad ones (--skip-bad)\n"
    )
    run.ok(*arguments, "--skip-bad")


def test_array_files_of_different_sizes(tmp_path, wide_net, make_cache, rng):
    folder = tmp_path / "arrays"
    folder.mkdir()
    for number, width in enumerate((16, 24, 40)):
        np.save(folder / f"{number}.npy", rng.normal(size=(2, 3, 8, width)).astype(np.float32))
    _, samples = collect_feed(folder, WIDE)
    assert [sample["x"].shape for sample in samples] == [
        (1, 3, 8, w) for w in (16, 16, 24, 24, 40, 40)
    ]
    two_targets = "--target", "onnxruntime,ascend", "--threads"
    assert make_cache(folder, *two_targets, 1, model=wide_net) == make_cache(
        folder, *two_targets, 2, model=wide_net
    )
    tensorrt_options = "--target", "tensorrt", "--method", "entropy-tensorrt", "--batch-size", 2
    make_cache(folder, *tensorrt_options, model=wide_net)  # each batch is of one shape


def make_raw_folder(tmp_path, arrays, suffix="bin"):
    folder = tmp_path / "raw"
    folder.mkdir(exist_ok=True)
    for number, array in enumerate(arrays):
        np.ascontiguousarray(array).tofile(folder / f"{number}.{suffix}")
    return folder


def test_raw_shape_fills_open_input(tmp_path, wide_net, run, make_cache):
    batch = np.random.default_rng(6).normal(size=(4, 3, 8, 12)).astype("<f4")
    folder = make_raw_folder(tmp_path, batch)
    np.save(tmp_path / "stacked.npy", batch)
    stacked_cache = make_cache(tmp_path / "stacked.npy", model=wide_net)
    for shape in ("1x3x8x12", "3x8x12"):
        assert make_cache(folder, "--raw-shape", shape, model=wide_net) == stacked_cache
    stacked = open_feed(tmp_path / "stacked.npy", [WIDE]).manifest()
    assert open_feed(RawFiles(folder, shape=(1, 3, 8, 12)), [WIDE]).manifest() == stacked
    arguments = "calibrate", wide_net, "--out", tmp_path / "d.cache", "--images", folder
    assert "--raw-shape" in run.fails(*arguments)


def test_raw_float16_is_widened_others_refused(tmp_path, wording):
    folder = make_raw_folder(tmp_path, BATCH.astype("<f2"))
    _, samples = collect_feed(RawFiles(folder, dtype="float16"))
    assert_samples_equal(samples, BATCH.astype("<f2").astype(np.float32))
    make_raw_folder(tmp_path, BATCH.astype("<i8"))
    with pytest.raises(FeedError) as raised:
        collect_feed(RawFiles(folder, dtype="int64"))
    wording.check(raised.value)
    with pytest.raises(FeedError) as raised:
        collect_feed(RawFiles(folder, shape=(3, 16, 17)), WIDE)
    wording.check(raised.value)
    with pytest.raises(FeedError) as raised:
        collect_feed(RawFiles(folder, shape=(3, 16, 8)))
    wording.check(raised.value)


@pytest.mark.parametrize("input_shape", [(2, 3, 16, 16), (3, 16, 16)])
def test_raw_files_equal_arrays(input_shape, tmp_path):
    """Also for a model that fixes its batch, or has none."""
    spec = TensorSpec("x", "float32", input_shape)
    np.save(tmp_path / "x.npy", BATCH)
    folder = make_raw_folder(tmp_path, BATCH)
    _, expected_samples = collect_feed(tmp_path / "x.npy", spec)
    for shape in (None, input_shape):
        _, samples = collect_feed(RawFiles(folder, shape=shape, dtype="float32"), spec)
        assert len(samples) == len(expected_samples)
        for sample, expected in zip(samples, expected_samples, strict=True):
            assert np.array_equal(sample["x"], expected["x"])


def test_raw_pixels_are_refused(tmp_path):
    folder = make_raw_folder(tmp_path, PICTURES, "raw")
    with pytest.raises(FeedError, match="must be preprocessed first"):
        collect_feed(RawFiles(folder, shape=(3, 16, 16), dtype="uint8"))


@pytest.mark.parametrize("shard", [3, (1,), (1, 2, 3), ("1", "2"), (1.0, 2.0), (0, 2), (3, 2)])
def test_shard_is_a_pair_of_whole_numbers(shard):
    with pytest.raises(ConfigError, match="a shard is i/n"):
        Choice(shard=shard)


def test_raw_shape_is_no_number():
    with pytest.raises(ConfigError, match="a raw shape must have 1 to 8 sides"):
        RawFiles("x.raw", shape=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--raw-shape 1x3x16x16", "a raw shape and dtype apply to .bin and .raw files, got 00.png"),
        ("--raw-dtype uint8", "which have their own; leave them out"),
        ("--raw-dtype complex64", "a raw dtype must be one of float32, float16"),
        ("--raw-shape 1x3xq", "--raw-shape takes whole numbers, got 'q'"),
        ("--raw-shape 0x3", "a raw shape must have 1 to 8 sides of 1 or more, got (0, 3)"),
    ],
)
def test_raw_options_need_raw_files(options, message, small_cnn, pictures, tmp_path, run):
    feed_arguments = "--images", pictures, "--out", tmp_path / "c"
    assert message in run.fails("calibrate", small_cnn, *feed_arguments, *options.split())
    assert "goes with --images" in run.fails("bench", small_cnn, *options.split())


def test_raw_options_need_single_plain_input(tmp_path, wording):
    folder = make_raw_folder(tmp_path, BATCH)
    with pytest.raises(ConfigError) as raised:
        collect_feed(RawFiles(folder, dtype="float32"), X, STATE)
    wording.check(raised.value)
    with pytest.raises(ConfigError) as raised:
        collect_feed(RawFiles(folder, dtype="float32"), preprocess=UNIT)
    wording.check(raised.value)
