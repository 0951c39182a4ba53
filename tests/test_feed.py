"""Images and arrays to batches."""

import gc
import json
import os
import resource
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import cv2
import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import numpy_helper

from deploy.calibration.one_pass import alternate_halves
from deploy.errors import ConfigError, FeedError
from deploy.feed import sample_reader, sampling
from deploy.feed.feed import open_feed
from deploy.feed.file_list import SampleChangedError
from deploy.feed.parallel import SampleStream, prefetch
from deploy.feed.paths import RawFiles
from deploy.feed.preprocess import Preprocess, find_preset
from deploy.feed.sampling import Choice, sampling_order, spread_evenly
from deploy.feed.temporary_arrays import TemporaryArrays
from deploy.frontends import load
from deploy.tensors import TensorSpec
from tests.models import make_model

IMAGE = TensorSpec("image", "float32", ("n", 3, 16, 20))
RAW = find_preset("raw")


def images_of(*shape, dtype="float32"):
    return TensorSpec("image", dtype, shape)


def write_image(path, seed=0, shape=(30, 40, 3), dtype=np.uint8):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype)
    path.write_bytes(cv2.imencode(path.suffix.lower(), data)[1].tobytes())
    return data


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    for index, name in enumerate(["b.png", "a.JPG", "sub/c.jpeg", "sub/deep/d.bmp", "e f.Png"]):
        write_image(folder / name, index)
    (folder / "notes.md").write_text("not an image")
    (folder / ".hidden.png").write_bytes(b"")
    return folder


def collect(feed):
    with feed.samples() as stream:
        return list(stream)


def collected(source, spec=IMAGE, **options):
    """The arrays of a feed of one input."""
    return [sample[spec.name] for sample in collect(open_feed(source, [spec], **options))]


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("calib8-feed")]


def test_a_folder_is_read_recursively_sorted_and_any_case(photos):
    feed = open_feed(photos, [IMAGE])
    assert feed.names == ("a.JPG", "b.png", "e f.Png", "sub/c.jpeg", "sub/deep/d.bmp")
    assert len(feed) == 5
    samples, again = ([s["image"] for s in collect(feed)] for _ in range(2))
    assert [(s.shape, s.dtype) for s in samples] == [((1, 3, 16, 20), np.float32)] * 5
    assert [s.tobytes() for s in again] == [s.tobytes() for s in samples]
    assert feed.labels is None
    assert "preset 'unit'" in feed.notes[0]


def test_pixels_are_those_of_the_file_whichever_thread_decodes(tmp_path):
    """Intel's IPP rounds otherwise, and is switched off for one thread at a time."""
    data = write_image(tmp_path / "a" / "x.png", 3, (16, 20, 3))
    (sample,) = collected(tmp_path / "a", preprocess=RAW)
    assert np.array_equal(sample[0].transpose(1, 2, 0)[:, :, ::-1], data)
    write_image(tmp_path / "b" / "x.png", 5, (200, 300, 3))
    given = (tmp_path / "b", images_of(1, 3, 64, 97))
    runs = [collected(*given, preprocess=find_preset("efficientnet-lite")) for _ in range(3)]
    assert len({r[0].tobytes() for r in runs}) == 1


def test_a_list_file_with_labels_spaces_comments_bom_and_crlf(photos):
    listing = photos / "list.txt"
    lines = ["# a comment", "e f.Png 3", "", "  sub/c.jpeg\t0  ", f"{photos / 'b.png'} 12"]
    listing.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    feed = open_feed(str(listing), [IMAGE])
    assert feed.labels == (3, 0, 12)
    assert feed.names[:2] == ("e f.Png", "sub/c.jpeg")
    assert len(collect(feed)) == 3
    for name in ("shot 1", "shot"):  # a line that is a file as a whole has no label
        shutil.copy(photos / "b.png", photos / name)
    listing.write_text("shot 1\n")
    feed = open_feed(listing, [IMAGE])
    assert (feed.names, feed.labels) == (("shot 1",), None)


def test_one_image_is_a_feed_of_one(photos):
    assert len(collect(open_feed(photos / "b.png", [IMAGE]))) == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "suffix"),
    [
        ((30, 40), np.uint8, ".png"),
        ((30, 40, 4), np.uint8, ".png"),
        ((30, 40, 3), np.uint16, ".png"),
        ((30, 40), np.uint16, ".tiff"),
        ((1, 1, 3), np.uint8, ".png"),
    ],
)
def test_grey_alpha_16_bit_and_tiny_pictures_are_read_as_colour(tmp_path, shape, dtype, suffix):
    data = write_image(tmp_path / f"x{suffix}", 1, shape, dtype)
    if shape == (30, 40, 3):  # the upper byte of 16 bits
        (sample,) = collected(tmp_path, images_of(1, 3, 30, 40), preprocess=RAW)
        assert np.abs(sample[0].transpose(1, 2, 0)[:, :, ::-1] - data / 256).max() <= 1
    (sample,) = collected(tmp_path)
    assert sample.shape == (1, 3, 16, 20)


def test_exif_orientation_is_applied(tmp_path):
    stored = np.zeros((16, 32, 3), np.uint8)
    stored[:, 16:] = 255
    encoded = cv2.imencode(".jpg", stored)[1].tobytes()
    rotated = b"\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"  # 90 degrees clockwise
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + rotated
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    (tmp_path / "x.jpg").write_bytes(encoded[:2] + segment + encoded[2:])
    (sample,) = collected(tmp_path, images_of(1, 3, 32, 16))
    assert sample[0, 0, :14].max() < 0.1
    assert sample[0, 0, 18:].min() > 0.9


def test_uint8_and_float16_inputs(photos, wording):
    (raw, *_) = collected(photos, images_of(1, 3, 16, 20), preprocess=RAW)
    for dtype in ("uint8", "int32"):  # pixels as they are, whatever else is asked
        spec = images_of(1, 3, 16, 20, dtype=dtype)
        for asked in (None, RAW, {"interpolation": "linear"}):
            feed = open_feed(photos, [spec], preprocess=asked)
            (found, *_) = collect(feed)
            assert found["image"].dtype == dtype and (found["image"] == raw).all()
            told = f"pixels as they are, for {dtype} (preset 'raw')"
            assert any(told in note for note in feed.notes) == (asked is None)
        with pytest.raises(FeedError) as refusal:
            open_feed(photos, [spec], preprocess=find_preset("imagenet"))
        wording.check(refusal.value)
    half = images_of(1, 3, 16, 20, dtype="float16")
    assert collected(photos, half)[0].dtype == np.float16
    with pytest.raises(FeedError, match="int64"):
        open_feed(photos, [images_of(1, 3, 16, 20, dtype="int64")])


def test_broken_images_are_told_by_name_or_skipped_and_stderr_stays_quiet(photos, capfd):
    good, jpeg = ((photos / name).read_bytes() for name in ("b.png", "a.JPG"))
    half = len(good) // 2
    flipped = good[:half] + bytes([good[half] ^ 0xFF]) + good[half + 1 :]
    pngs = {f"bad{n}.png": data for n, data in enumerate((b"", good[:half], flipped, good[:8]))}
    jpegs = {"bad4.jpg": jpeg[: len(jpeg) // 2], "bad5.jpg": b"hello, this is no picture"}
    for name, data in (pngs | jpegs).items():
        (photos / name).write_bytes(data)
        with pytest.raises(FeedError, match=rf"{name}.*--skip-bad"):
            collect(open_feed(photos, [IMAGE]))
        feed = open_feed(photos, [IMAGE], skip_bad=True)
        assert len(collect(feed)) == len(feed) == 5
        assert name in feed.skipped[0]
        assert "1 skipped" in feed.notes[-1]
        (photos / name).unlink()
    assert capfd.readouterr() == ("", "")


def test_what_was_skipped_is_told_in_the_order_of_the_images(photos):
    feed = open_feed(photos, [IMAGE], skip_bad=True)
    names = sampling.digest_names(feed.names)
    for number in (2, 1):  # as two machines found it, the second one first
        share = sampling.create_share((number, 2), 5, names)
        digests = [f"{place:064x}" for place in share.positions]
        bad = share.positions[0]
        feed.merge_remote_pass(share, digests, {bad: f"bad {bad}"})
    assert feed.notes[-1] == "2 skipped: bad 0; bad 1"


def test_labels_follow_the_images_that_were_not_skipped(photos):
    (photos / "bad.png").write_bytes(b"x")
    (photos / "l.txt").write_text("a.JPG 1\nbad.png 2\ngone.png 4\nb.png 3\n")
    feed = open_feed(photos / "l.txt", [IMAGE], skip_bad=True)
    assert len(collect(feed)) == 2
    assert feed.labels == (1, 3)
    assert feed.names == ("a.JPG", "b.png")
    with pytest.raises(FeedError, match=r"1 of 4 .*gone\.png"):
        open_feed(photos / "l.txt", [IMAGE])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "got no line"),
        ("# only this\n", "got no line"),
        ("a.JPG 1\nb.png\n", "1 of 2 without, the first on line 2"),
        ("a.JPG cat\n", "whole number from 0, got 'cat' on line 1"),
        ("a.JPG -1\n", "whole number from 0, got '-1'"),
        ("a.JPG 1.5\n", "whole number"),
        ("nothere.png\n", r"1 of 1 .*nothere\.png"),
        ("a\0b\n", "got a file that is none of these"),
        ("\xff\xfea\0", "got a file that is none of these"),
    ],
)
def test_wrong_list_files_are_told(photos, content, message):
    (photos / "l.txt").write_bytes(content.encode("latin-1"))
    with pytest.raises(FeedError, match=message):
        open_feed(photos / "l.txt", [IMAGE])


def test_wrong_sources_are_told(tmp_path, photos, wording):
    empty = tmp_path / "empty"
    empty.mkdir()
    two = [IMAGE, TensorSpec("state", "float32", (1, 4))]
    many = [IMAGE, *(TensorSpec(f"w{n}", "float32", (n, 4)) for n in range(29))]
    for source, specs, message in (
        (tmp_path / "nowhere", [IMAGE], "does not exist"),
        (empty, [IMAGE], r"must hold images .*got none"),
        (photos, two, r"images feed one input, the model has 2.*\.npz"),
        (photos, many, r"the model has 30: .*'w3' .* and 25 more; give"),
        (photos, [], "must have an input"),
    ):
        with pytest.raises(FeedError, match=message):
            open_feed(source, specs)
    with pytest.raises(ConfigError) as refusal:
        open_feed(photos, [IMAGE], limit=0)
    wording.check(refusal.value)
    (empty / "x.png").write_bytes(b"x")
    with pytest.raises(FeedError, match="all 1 were skipped"):
        collect(open_feed(empty, [IMAGE], skip_bad=True))


def test_pipes_and_devices_are_told_and_never_waited_for(tmp_path, wording):
    write_image(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(FeedError) as refusal:
        collect(open_feed(tmp_path, [IMAGE]))
    wording.check(refusal.value)
    with pytest.raises(FeedError, match="no regular file"):
        open_feed(tmp_path, [IMAGE]).manifest()
    assert len(collected(tmp_path, skip_bad=True)) == 1
    os.mkfifo(tmp_path / "list.txt")
    for source in (tmp_path / "list.txt", "/dev/zero"):
        with pytest.raises(FeedError) as refusal:
            open_feed(source, [IMAGE])
        wording.check(refusal.value)


def test_a_file_name_that_is_no_utf8_is_shown_and_fed(tmp_path):
    write_image(tmp_path / "x.png")
    odd = (tmp_path / "x.png").rename(tmp_path / os.fsdecode(b"\xff\n.png"))
    feed = open_feed(tmp_path, [IMAGE])
    assert len(collect(feed)) == 1
    feed.manifest()
    odd.write_bytes(b"x")
    with pytest.raises(FeedError, match=r"\\xff\\n\.png"):
        collect(open_feed(tmp_path, [IMAGE]))


def test_a_limit_is_spread_over_the_folder(photos):
    feed = open_feed(photos, [IMAGE], limit=2)
    assert feed.names == ("a.JPG", "e f.Png")
    assert "2 of 5" in feed.notes[-1]
    assert len(collect(feed)) == 2


def test_a_fixed_batch_is_filled_with_the_first_samples(photos):
    feed = open_feed(photos, [images_of(4, 3, 16, 20)])
    batches, single = [s["image"] for s in collect(feed)], collected(photos)
    assert len(feed) == len(batches) == 2
    assert np.array_equal(batches[0], np.concatenate(single[:4]))
    assert np.array_equal(batches[1], np.concatenate([single[4], *single[:3]]))
    assert "first 3 samples" in feed.notes[-1]
    (batch,) = collected(photos, images_of(12, 3, 16, 20))
    assert np.array_equal(batch[10:], np.concatenate(single[:2]))
    pairs = collected(BATCH, images_of(2, 3, 16, 20))
    assert [pair.shape[0] for pair in pairs] == [2, 2, 2]
    assert np.array_equal(np.concatenate(pairs), np.concatenate([BATCH, BATCH[:1]]))
    complete = BATCH[:4].reshape(2, 2, 3, 16, 20)
    assert np.array_equal(collected(complete, images_of(2, 3, 16, 20)), complete)
    rows = BATCH[0, 0]
    assert np.array_equal(collected(rows, TensorSpec("image", "float32", (20,))), rows)


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_files_of_a_model_without_a_batch_dimension_are_one_sample_each(suffix, tmp_path):
    for number, one in enumerate(BATCH):
        path = tmp_path / f"{number}.{suffix}"
        np.save(path, one) if suffix == "npy" else one.tofile(path)
    feed = open_feed(tmp_path, [TensorSpec("image", "float32", (3, 16, 20))], limit=2)
    kept = [BATCH[int(name.partition(".")[0])] for name in feed.names]
    assert np.array_equal([sample["image"] for sample in collect(feed)], kept)


def test_the_manifest_follows_the_bytes_the_order_and_the_options(photos):
    def manifest(source=photos, spec=IMAGE, **options):
        return open_feed(source, [spec], **options).manifest()

    def moved(found):
        """Whether it is of the same images in another order."""
        orders = [one["ordered_sha256"] for one in (found, base)]
        return found["sha256"] == base["sha256"] and orders[0] != orders[1]

    base = manifest()
    assert base == manifest()
    assert base["count"] == 5
    mean = manifest(preprocess=Preprocess(mean=(0.25,)))
    assert (mean["sha256"], mean["preprocess"] != base["preprocess"]) == (base["sha256"], True)
    assert manifest(limit=4)["sha256"] != base["sha256"]
    data = (photos / "b.png").read_bytes()
    (photos / "b.png").write_bytes(data + b"\0")
    assert manifest()["sha256"] != base["sha256"]
    (photos / "b.png").write_bytes(data)
    assert manifest() == base
    (photos / "b.png").rename(photos / "b2.png")
    assert manifest() == base
    (photos / "b2.png").rename(photos / "z.png")
    assert moved(manifest())
    (photos / "z.png").rename(photos / "b.png")
    names = open_feed(photos, [IMAGE]).names
    listing = photos.parent / "list.txt"
    listing.write_text("".join(f"{photos.name}/{name}\n" for name in names[::-1]))
    assert moved(manifest(listing))
    there, back = (manifest(one, images_of(2, 3, 16, 20))["sha256"] for one in (photos, listing))
    assert there != back  # the order tells which stand together


BATCH = np.random.default_rng(0).standard_normal((5, 3, 16, 20)).astype(np.float32)


def values(feed):
    return np.concatenate([s["image"] for s in collect(feed)])


@pytest.mark.parametrize("form", ["npy", "npz", "compressed", "fortran", "stacked", "labelled"])
def test_array_files(tmp_path, form):
    path = tmp_path / ("x.npy" if form in ("npy", "fortran", "stacked") else "x.npz")
    if path.suffix == ".npy":
        made = {"fortran": np.asfortranarray(BATCH), "stacked": BATCH[:, None]}
        np.save(path, made.get(form, BATCH))
    elif form == "compressed":
        np.savez_compressed(path, image=BATCH)
    else:
        held = {"npz": {"anything": BATCH}, "labelled": {"image": BATCH, "labels": np.arange(5)}}
        np.savez(path, **held[form])
    feed = open_feed(path, [IMAGE])
    assert np.array_equal(values(feed), BATCH)
    assert feed.labels == ((0, 1, 2, 3, 4) if form == "labelled" else None)
    assert any("compressed" in n for n in feed.notes) == (form == "compressed")
    assert feed.manifest()["sha256"] == open_feed([BATCH], [IMAGE]).manifest()["sha256"]


def test_several_inputs_by_name_with_a_state_and_a_scalar(tmp_path):
    forms = {"x": ("float32", (None, 8)), "state": ("float32", (2, "n", 4)), "rate": ("int64", ())}
    specs = [TensorSpec(name, *form) for name, form in forms.items()]
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    state = np.ones((2, 1, 4), np.float32)
    np.savez(tmp_path / "x.npz", x=x, state=state, rate=np.int64(16000))
    samples = collect(open_feed(tmp_path / "x.npz", specs))
    assert [s["x"].shape for s in samples] == [(1, 8)] * 3
    assert all(s["state"].shape == (2, 1, 4) and s["rate"].shape == () for s in samples)
    items = [{"x": x[i], "state": state, "rate": 16000} for i in range(3)]
    again = collect(open_feed(items, specs))
    assert all(np.array_equal(a[k], b[k]) for a, b in zip(samples, again, strict=True) for k in a)
    np.savez(tmp_path / "y.npz", x=x, state=np.stack([state] * 3), rate=np.full(3, 16000))
    assert len(collect(open_feed(tmp_path / "y.npz", specs))) == 3


@pytest.mark.parametrize("chunks", [[5], [1, 4], [2, 2, 1]])
def test_iterables_give_the_same_samples_however_they_are_cut(chunks):
    parts = np.split(BATCH, np.cumsum(chunks)[:-1])
    listed = open_feed(parts, [IMAGE])
    named = open_feed([{"image": p} for p in parts], [IMAGE])
    spooled = open_feed((p for p in parts), [IMAGE])
    for feed in (listed, named, spooled):
        assert np.array_equal(values(feed), BATCH)
        assert np.array_equal(values(feed), BATCH)
        assert feed.manifest()["sha256"] == listed.manifest()["sha256"]
        assert len(feed) == 5
    assert listed.notes == ()
    assert "temporary file" in spooled.notes[0]
    assert np.array_equal(values(open_feed(list(BATCH), [IMAGE])), BATCH)
    assert np.array_equal(values(open_feed(BATCH, [IMAGE])), BATCH)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (BATCH.astype(np.int64), r"dtype of the input .*\.astype\('float32'\)"),
        ((BATCH * 9).astype(np.uint8), "must be preprocessed first"),
        (BATCH[:, :, :8], "must fit the input 'image'"),
        (BATCH.transpose(0, 2, 1, 3), "must fit the input 'image'"),
        (BATCH[:0], "must give samples, got none"),
        ([None, "a string"], "array of numbers"),
        ([], "got none"),
    ],
)
def test_wrong_arrays_are_told(value, message):
    with pytest.raises(FeedError, match=message):
        open_feed(value, [IMAGE])


class Indexed:
    """A dataset as torch knows it."""

    def __len__(self):
        return len(BATCH)

    def __getitem__(self, index):
        return BATCH[index], index


@pytest.mark.parametrize("way", ["file", "folder", "raw", "list", "dataset"])
@pytest.mark.parametrize("form", ["double", "half", "turned", "as it is"])
def test_arrays_are_converted_where_that_is_unambiguous(way, form, tmp_path):
    dtype = {"double": np.float64, "half": np.float16}.get(form, np.float32)
    held = BATCH.transpose(0, 2, 3, 1) if form == "turned" else BATCH.astype(dtype)
    want = BATCH.astype(dtype).astype(np.float32)
    source = {"list": list(held), "dataset": Indexed()}.get(way, tmp_path / "held" / "x.npy")
    if way == "dataset":
        want = BATCH
    elif way in ("file", "folder"):
        source.parent.mkdir()
        np.save(source, held)
        source = source.parent if way == "folder" else source
    elif way == "raw":
        (tmp_path / "x.raw").write_bytes(held.tobytes())
        source = RawFiles(tmp_path / "x.raw", shape=held.shape[1:], dtype=held.dtype.name)
    feed = open_feed(source, [IMAGE])
    assert np.array_equal(values(feed), want)
    notes = sum("are converted" in note or "are turned" in note for note in feed.notes)
    assert notes == (form != "as it is" and way != "dataset")
    if way != "raw":
        assert feed.manifest()["sha256"] == open_feed(want, [IMAGE]).manifest()["sha256"]


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
@pytest.mark.parametrize("scale", [1.0, 1 / 65535, 1 / 255])
def test_grey_images_of_16_bits_keep_them_unless_they_are_divided_by_255(scale, suffix, tmp_path):
    pixels = np.random.default_rng(3).integers(7000, 8200, (16, 20), np.uint16)
    cv2.imwrite(str(tmp_path / f"x.{suffix}"), pixels)
    grey = Preprocess(scale=scale, color="grey")
    feed = open_feed(tmp_path, [images_of("n", 1, 16, 20)], preprocess=grey)
    (batch,) = collect(feed)
    held = pixels if scale != 1 / 255 else pixels >> 8
    assert np.array_equal(batch["image"][0, 0], held.astype(np.float32) * np.float32(scale))
    said = "go from 0 to 65535" if scale != 1 / 255 else "cut to the upper 8"
    assert any(said in note for note in feed.notes)


@pytest.mark.parametrize("suffix", ["png", "tiff", "ppm"])
def test_color_images_of_16_bits_are_cut_and_that_is_said(suffix, tmp_path):
    pixels = np.random.default_rng(3).integers(0, 65535, (16, 20, 3), np.uint16)
    cv2.imwrite(str(tmp_path / f"x.{suffix}"), pixels)
    feed = open_feed(tmp_path, [IMAGE], preprocess=Preprocess(scale=1.0, color="bgr"))
    (batch,) = collect(feed)
    assert np.abs(batch["image"][0].transpose(1, 2, 0) - pixels / 257).max() < 1
    assert "1 images have 16 bits a channel and are cut" in feed.notes[-1]


def test_a_list_may_name_a_file_per_input(tmp_path, wording):
    specs = [TensorSpec(name, "float32", (None, 3)) for name in ("a", "b")]
    rows = np.arange(18, dtype=np.float32).reshape(3, 2, 1, 3)
    for number, (a, b) in enumerate(rows):
        np.save(tmp_path / f"a{number}.npy", a)
        np.save(tmp_path / f"b{number}.npy", b)
    (tmp_path / "list.txt").write_text("".join(f"a{n}.npy b{n}.npy\n" for n in range(3)))
    samples = collect(open_feed(tmp_path / "list.txt", specs))
    assert all(np.array_equal(s["b"], rows[n, 1]) for n, s in enumerate(samples))
    with pytest.raises(FeedError) as refusal:
        open_feed(tmp_path / "list.txt", specs[:1])
    wording.check(refusal.value)


def test_a_loader_with_one_function_needs_no_name(tmp_path, wording):
    file = tmp_path / "loader.py"
    code = "import numpy as np\ndef load(rows=5):\n    yield np.ones((rows, 3, 16, 20), 'f4')\n"
    file.write_text(code)
    assert len(open_feed(str(file), [IMAGE])) == 5
    file.write_text(file.read_text() + "def other():\n    pass\n")
    with pytest.raises(ConfigError) as refusal:
        open_feed(str(file), [IMAGE])
    wording.check(refusal.value)
    file.write_text("(")
    with pytest.raises(FeedError) as refusal:
        open_feed(str(file), [IMAGE])
    wording.check(refusal.value)


def test_integers_are_converted_unless_one_does_not_fit(wording):
    spec = TensorSpec("ids", "int32", (None, 3))
    rows = np.array([[1, 2, 3], [4, 5, 1 << 40]])
    (sample,) = collect(open_feed(rows[:1], [spec]))
    assert sample["ids"].dtype == np.int32 and sample["ids"].tolist() == [[1, 2, 3]]
    with pytest.raises(FeedError) as refusal:
        collect(open_feed(rows, [spec]))
    wording.check(refusal.value)


@pytest.mark.parametrize("most", [1, 3, 5])
@pytest.mark.parametrize("stride", [None, 2])
def test_what_may_never_end_is_read_to_its_limit(most, stride, monkeypatch, wording):
    def endless():
        while True:
            yield BATCH[:2]

    monkeypatch.setattr("deploy.feed.arrays.MAX_SAMPLES", 30)
    with pytest.raises(FeedError) as refusal:
        open_feed(endless, [IMAGE])
    wording.check(refusal.value)
    feed = open_feed(endless(), [IMAGE], limit=Choice(limit=most, every=stride))
    rows = np.tile(BATCH[:2], (5, 1, 1, 1))[:: stride or 1][:most]
    assert np.array_equal(values(feed), rows)
    assert len(open_feed([BATCH] * 7, [IMAGE])) == 35  # a list ends


def test_nan_is_told_by_sample_and_input_or_skipped(wording):
    bad = BATCH.copy()
    bad[3, 0, 0, :2] = np.nan, np.inf
    with pytest.raises(FeedError) as refusal:
        collect(open_feed(bad, [IMAGE]))
    wording.check(refusal.value)
    feed = open_feed(bad, [IMAGE], skip_bad=True)
    assert np.array_equal(values(feed), np.delete(BATCH, 3, 0))
    assert len(feed) == 4


def test_preprocessing_of_arrays_is_refused(tmp_path, wording):
    with pytest.raises(FeedError) as refusal:
        open_feed(BATCH, [IMAGE], preprocess=find_preset("imagenet"))
    wording.check(refusal.value)
    np.save(tmp_path / "a.npy", BATCH)
    with pytest.raises(ConfigError) as refusal:
        open_feed(tmp_path / "a.npy", [IMAGE], preprocess=find_preset("imagenet"))
    wording.check(refusal.value)


def test_arrays_that_hold_objects_or_do_not_agree_are_told(tmp_path):
    np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "o.npz", image=np.array([{}], object))
    np.savez(tmp_path / "l.npz", image=BATCH, labels=np.arange(4))
    np.savez(tmp_path / "n.npz", image=BATCH, z=np.zeros((4, 2), np.float32))
    np.savez(tmp_path / "m.npz", image=BATCH)
    both = [IMAGE, TensorSpec("z", "float32", (1, 2))]
    for name, specs, message in (
        ("o.npy", [IMAGE], "cannot be read as plain numpy arrays"),
        ("o.npz", [IMAGE], "cannot be read as plain numpy arrays"),
        ("l.npz", [IMAGE], "one label per sample, got 4 for 5"),
        ("n.npz", both, "equally many samples, got image: 5, z: 4"),
        ("m.npz", both, r"exactly the inputs \['image', 'z'\], got \['image'\]"),
    ):
        with pytest.raises(FeedError, match=message):
            open_feed(tmp_path / name, specs)


def test_several_workers_share_one_stream_and_miss_nothing():
    feed = open_feed([np.full((1, 3, 16, 20), i, np.float32) for i in range(200)], [IMAGE])

    def work(stream):
        return [int(sample["image"][0, 0, 0, 0]) for sample in stream]

    with feed.samples() as stream, ThreadPoolExecutor(4) as pool:
        seen = [number for part in pool.map(work, [stream] * 4) for number in part]
    assert sorted(seen) == list(range(200))


def test_an_exception_crosses_over_after_the_good_samples(wording):
    def produce():
        yield from (1, 2)
        raise FeedError("image x is bad")

    stream = SampleStream(produce())
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(FeedError) as refusal:
        next(stream)
    wording.check(refusal.value)
    assert list(stream) == []
    stream.close()


def test_leaving_early_ends_the_thread_and_the_queue_is_bounded():
    made = []
    with SampleStream(made.append(i) or i for i in range(10_000)) as stream:
        assert next(stream) == 0
        time.sleep(0.2)
        assert len(made) <= 6
    assert not threads()
    stream.close()
    assert list(stream) == []


def test_a_dropped_stream_ends_its_thread_and_does_not_wait_for_it():
    """The garbage collector may drop it while a thread is started, which ends no other thread."""
    passed, begun, gate = [], threading.Event(), threading.Event()

    def produce():
        yield 0
        begun.set()
        passed.append(gate.wait(300))
        yield from range(10_000)

    stream = SampleStream(produce())
    next(stream)
    begun.wait(300)
    del stream
    gc.collect()
    assert not passed
    gate.set()
    for thread in threads():
        thread.join(300)
    assert not threads()


def test_a_second_pass_over_remembered_samples_decodes_nothing(pictures, small_cnn):
    specs = load(small_cnn).inputs
    fresh, kept = (open_feed(pictures, specs, preprocess=Preprocess(size=(16, 16))) for _ in "ab")
    kept.cache_samples(20)
    wanted = [sample["x"] for sample in fresh.samples()]
    for _ in range(2):
        arrays = [sample["x"] for sample in kept.samples()]
        assert all(np.array_equal(a, b) for a, b in zip(arrays, wanted, strict=True))
    assert fresh.decodes == 20 and kept.decodes == 20


def test_a_full_disk_ends_the_keeping_alone(monkeypatch):
    cache = sample_reader.SampleCache(range(4))
    cache.add(0, {"x": np.ones(3)})
    with monkeypatch.context() as patched:
        failing = Mock(side_effect=OSError(28, "No space left on device"))
        patched.setattr(TemporaryArrays, "add", failing)
        cache.add(1, {"x": np.ones(3)})
    cache.add(2, {"x": np.ones(3)})
    assert cache.get(1) is None and cache.get(2) is None
    assert np.array_equal(cache.get(0)["x"], np.ones(3))


def test_a_disk_that_takes_no_byte_is_no_noise_at_the_end(capfd):
    """What Python holds back for the file is not tried again where the cache goes."""
    before, most = signal.getsignal(signal.SIGXFSZ), resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))
    try:
        cache = sample_reader.SampleCache(range(2))
        cache.add(0, {"x": np.ones(3)})
        assert cache.get(0) is None
        del cache
        gc.collect()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, before)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
@pytest.mark.parametrize("way", ["npy", "npz", "compressed", "list", "generator"])
def test_arrays_mean_what_they_say_in_any_byte_order_and_layout(way, dtype, order, tmp_path):
    x = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4) * 0.37
    made = x.astype(dtype)
    if order == "strided":
        made = np.repeat(made, 2, axis=2)[:, :, ::2]
    made = np.asfortranarray(made) if order == "F" else made
    source = tmp_path / ("x.npy" if way == "npy" else "x.npz")
    if way == "npy":
        np.save(source, made)
    elif way in ("npz", "compressed"):
        (np.savez if way == "npz" else np.savez_compressed)(source, x=made)
    else:
        source = [made] if way == "list" else (one for one in (made[:1], made[1:]))
    got = collected(source, TensorSpec("x", "float32", ("batch", 2, 4)))
    assert all(one.dtype.isnative and one.flags.c_contiguous for one in got)
    np.testing.assert_array_equal(np.concatenate(got), x)


INPUT = (TensorSpec("x", "float32", (1, 3, 16, 16)),)


@pytest.fixture
def folder(tmp_path):
    made = np.random.default_rng(2)
    for number in range(24):
        pixels = made.integers(0, 256, (16 + number, 20, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / f"{number:02}.png"), pixels)
    return tmp_path


def decoders(monkeypatch, count):
    monkeypatch.setattr(sample_reader, "worker_threads", lambda: count)


def decoded(folder, **options):
    feed = open_feed(folder, INPUT, **options)
    return feed, [sample["x"] for sample in collect(feed)]


def test_results_come_in_the_items_order_and_few_are_ahead():
    begun, gate = [], threading.Event()

    def work(item):
        begun.append(item)
        assert item or gate.wait(300)  # the first is the last to be done
        return item * 10

    def items():
        for item in range(20):
            if item == 3:
                assert sorted(begun) <= [0, 1, 2]
                gate.set()
            yield item

    assert list(prefetch(items(), work, threads=4)) == [(n, n * 10) for n in range(20)]


def test_leaving_early_ends_the_threads_and_does_not_wait_for_them():
    before, passed = threading.enumerate(), []
    begun, gate = threading.Barrier(3), threading.Event()

    def work(item):
        if item:
            begun.wait(300)
            passed.append(gate.wait(300))

    made = prefetch(range(1000), work, threads=3)
    assert next(made) == (0, None)
    begun.wait(300)
    made.close()
    assert not passed
    gate.set()
    for thread in set(threading.enumerate()) - {*before}:
        thread.join(300)
    assert len(passed) == 2 and set(threading.enumerate()) <= {*before}


def test_threads_that_meet_are_needed(monkeypatch, folder):
    decoders(monkeypatch, 3)
    meeting, fetched = threading.Barrier(3), sample_reader._read_sample

    def met(source, index):
        meeting.wait(300)  # nobody goes on before three are there
        return fetched(source, index)

    monkeypatch.setattr(sample_reader, "_read_sample", met)
    assert len(decoded(folder)[1]) == 24


def test_any_number_of_threads_gives_the_same(monkeypatch, folder):
    (folder / "05.png").write_bytes(b"no picture")
    found = []
    for count in (1, 2, 4):
        decoders(monkeypatch, count)
        feed, arrays = decoded(folder, skip_bad=True)
        found.append((feed.manifest(), feed.notes, feed.decodes, [a.tobytes() for a in arrays]))
    assert found[0] == found[1] == found[2] and found[0][2] == 23


def test_a_bad_or_changed_picture_is_told_in_its_turn(monkeypatch, folder):
    decoders(monkeypatch, 4)
    feed = open_feed(folder, INPUT, skip_bad=True)
    feed.manifest()
    (folder / "20.png").write_bytes(b"no picture")
    with pytest.raises(SampleChangedError, match=r"20\.png"):
        collect(feed)
    for name in ("07.png", "06.png"):
        (folder / name).write_bytes(b"no picture")
    with pytest.raises(FeedError, match=r"06\.png"):
        decoded(folder)


@pytest.mark.slow
@given(st.integers(0, 3000))
@example(10**6)
def test_every_place_comes_once(count):
    places = np.arange(count)
    assert np.array_equal(np.sort(sampling_order(count)), places)
    assert count > 3000 or np.array_equal(sorted(sampling.to_sampling_order(range(count))), places)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_some_are_from_all_over_and_hold_the_fewer(count, most):
    found = spread_evenly(range(count), most)
    assert len(found) == min(count, most) and found == sorted(found)
    assert np.diff([0, *found, count]).max() <= 4 * count / len(found) + 1
    assert set(spread_evenly(range(count), most // 2)) <= set(found)


@given(st.integers(2, 9), st.sampled_from([16, 48, 64, 100]), st.sampled_from([2, 3, 4, 8]))
def test_what_comes_round_in_a_feed_is_met_in_all_its_kinds(period, many, times):
    taken = np.array(spread_evenly(range(times * many), many))
    kinds = np.bincount(taken % period, minlength=period)
    assert many < 8 * period or kinds.min() >= many / period / 4


@given(st.integers(0, 10**6))
def test_neighbours_are_of_different_halves(number):
    assert alternate_halves(number) in (number, number ^ 1)
    assert alternate_halves(number) ^ alternate_halves(number ^ 1) == 1


@pytest.fixture
def taking_turns(tmp_path):
    """200 samples, one quiet and one eight times as loud in turns; their model tells which."""
    x = np.random.default_rng(1).uniform(0.5, 1, size=(200, 1, 8, 8)).astype(np.float32)
    x[1::2] *= 8
    np.save(tmp_path / "x.npy", x)
    weight = np.ones((2, 1, 8, 8), np.float32) / 64
    weight[0] *= -1
    nodes = [("Conv", "x w b", "c"), ("Flatten", "c", "f"), ("Softmax", "f", "y", {"axis": 1})]
    weights = {"w": weight, "b": np.array([2.5, -2.5], np.float32)}
    model = make_model(nodes, {"x": ["n", 1, 8, 8]}, {"y": ["n", 2]}, weights, opset=17)
    onnx.save(model, tmp_path / "net.onnx")
    return tmp_path


@pytest.mark.parametrize("words", [(), ("--limit", 50), ("--until-stable",)])
def test_both_classes_judge_and_fewer_samples_have_both(words, run, taking_turns):
    """By powers of two through 200, and by fours, every sample was a quiet one."""
    words += ("--method", "minmax") if words else ()
    feed = ("--images", taking_turns / "x.npy", "--effort", 0, "--duration", 0)
    out = run.ok("build", taking_turns / "net.onnx", *feed, "--out", taking_turns, *words)
    if words:
        held = onnx.load(taking_turns / "net.int8.onnx").graph.initializer
        (scale,) = [numpy_helper.to_array(one) for one in held if one.name == "x/scale"]
        assert 255 * scale > 7
    else:
        assert "gives one class" not in out and "Verdict       good" in out
        report = json.loads((taking_turns / "report.json").read_text())
        assert report["engines"][1]["accuracy"]["samples"] == 100
