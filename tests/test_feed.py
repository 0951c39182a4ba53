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
from types import SimpleNamespace
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
from deploy.feed.images import read_list
from deploy.feed.parallel import SampleStream, prefetch
from deploy.feed.paths import RawFiles
from deploy.feed.preprocess import Preprocess, find_preset
from deploy.feed.sampling import Choice, sampling_order, spread_evenly
from deploy.feed.temporary_arrays import ItemStore
from deploy.frontends import load
from deploy.tensors import TensorSpec
from tests.models import make_model

IMAGE = TensorSpec("image", "float32", ("n", 3, 16, 20))
RAW = find_preset("raw")


def image_spec(*shape, dtype="float32"):
    return TensorSpec("image", dtype, shape)


def write_image(path, seed=0, shape=(30, 40, 3), dtype=np.uint8):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype)
    path.write_bytes(cv2.imencode(path.suffix.lower(), data)[1].tobytes())
    return data


@pytest.fixture
def photos(tmp_path):
    png_folder = tmp_path / "photos"
    for index, name in enumerate(["b.png", "a.JPG", "sub/c.jpeg", "sub/deep/d.bmp", "e f.Png"]):
        write_image(png_folder / name, index)
    (png_folder / "notes.md").write_text("not an image")
    (png_folder / ".hidden.png").write_bytes(b"")
    return png_folder


def collect(feed):
    with feed.samples() as stream:
        return list(stream)


def collect_images(source, spec=IMAGE, **options):
    """The arrays of a feed of one input."""
    return [sample[spec.name] for sample in collect(open_feed(source, [spec], **options))]


def feed_threads():
    return [t for t in threading.enumerate() if t.name.startswith("calib8-feed")]


def test_folder_is_read_recursively_and_sorted(photos):
    feed = open_feed(photos, [IMAGE])
    assert feed.names == ("a.JPG", "b.png", "e f.Png", "sub/c.jpeg", "sub/deep/d.bmp")
    assert len(feed) == 5
    samples = [sample["image"] for sample in collect(feed)]
    second_samples = [sample["image"] for sample in collect(feed)]
    assert [(s.shape, s.dtype) for s in samples] == [((1, 3, 16, 20), np.float32)] * 5
    assert [s.tobytes() for s in second_samples] == [s.tobytes() for s in samples]
    assert feed.labels is None
    assert "preset 'unit'" in feed.notes[0]


def test_linked_folders_are_read_once(photos, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    for name, target in (("b", photos / "sub"), ("c", photos), ("d", links)):  # d leads to itself
        (links / name).symlink_to(target)
    names = ("b/c.jpeg", "b/deep/d.bmp", "c/a.JPG", "c/b.png", "c/e f.Png")
    assert open_feed(links, [IMAGE]).names == names


def test_decoded_pixels_are_same_in_threads(tmp_path):
    """Intel's IPP rounds otherwise, and is switched off for one thread at a time."""
    data = write_image(tmp_path / "a" / "x.png", 3, (16, 20, 3))
    (sample,) = collect_images(tmp_path / "a", preprocess=RAW)
    assert np.array_equal(sample[0].transpose(1, 2, 0)[:, :, ::-1], data)
    write_image(tmp_path / "b" / "x.png", 5, (200, 300, 3))
    source_and_spec = (tmp_path / "b", image_spec(1, 3, 64, 97))
    runs = [
        collect_images(*source_and_spec, preprocess=find_preset("efficientnet-lite"))
        for _ in range(3)
    ]
    assert len({r[0].tobytes() for r in runs}) == 1


def test_list_file_with_labels_and_comments(photos):
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


def test_csv_lists_images_with_labels(photos):
    for header in ("", "path,label\n"):
        (photos / "list.csv").write_text(f'{header}"e f.Png",3\nsub/c.jpeg, 0\nb.png,12\n')
        feed = open_feed(photos / "list.csv", [IMAGE])
        assert feed.names == ("e f.Png", "sub/c.jpeg", "b.png")
        assert feed.labels == (3, 0, 12)
    shutil.copy(photos / "b.png", photos / "b,1")  # a line that is a file as a whole has no label
    (photos / "list.csv").write_text("b,1\n")
    assert open_feed(photos / "list.csv", [IMAGE]).names == ("b,1",)


def test_label_with_a_decimal_comma_is_refused(photos):
    (photos / "list.txt").write_text("b.png 1,5\n")
    with pytest.raises(FeedError, match=r"whole number from 0, got '1,5' on line 1 of .*list.txt;"):
        read_list(photos / "list.txt")
    shutil.copy(photos / "b.png", photos / "b.png 1")  # then the comma is the separator
    (file,) = read_list(photos / "list.txt")
    assert (file.name, file.label) == ("b.png 1", 5)


def test_first_line_with_a_label_or_of_a_plain_list_is_no_header(photos):
    (photos / "u,v").mkdir()
    for name in ("p", "q"):
        shutil.copy(photos / "b.png", photos / "u,v" / name)
    for file_name, separator in (("list.txt", " "), ("list.csv", ",")):
        (photos / file_name).write_text(f"u,v/p{separator}3\nu,v/q{separator}4\n")
        feed = open_feed(photos / file_name, [IMAGE])
        assert (feed.names, feed.labels) == (("u,v/p", "u,v/q"), (3, 4))
    for file_name, count in (("list.txt", 1), ("list.csv", 0)):
        (photos / file_name).write_text("a," + "b" * 5000 + "\nb.png\n")  # no name of a file
        assert len(read_list(photos / file_name)) == count + 1


def test_single_image_is_a_feed(photos):
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
def test_unusual_images_are_read_as_colour(tmp_path, shape, dtype, suffix):
    data = write_image(tmp_path / f"x{suffix}", 1, shape, dtype)
    if shape == (30, 40, 3):  # the upper byte of 16 bits
        (sample,) = collect_images(tmp_path, image_spec(1, 3, 30, 40), preprocess=RAW)
        assert np.abs(sample[0].transpose(1, 2, 0)[:, :, ::-1] - data / 256).max() <= 1
    (sample,) = collect_images(tmp_path)
    assert sample.shape == (1, 3, 16, 20)


def test_exif_orientation_is_applied(tmp_path):
    stored = np.zeros((16, 32, 3), np.uint8)
    stored[:, 16:] = 255
    encoded = cv2.imencode(".jpg", stored)[1].tobytes()
    rotated = b"\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"  # 90 degrees clockwise
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + rotated
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    (tmp_path / "x.jpg").write_bytes(encoded[:2] + segment + encoded[2:])
    (sample,) = collect_images(tmp_path, image_spec(1, 3, 32, 16))
    assert sample[0, 0, :14].max() < 0.1
    assert sample[0, 0, 18:].min() > 0.9


def test_image_is_converted_to_input_dtype(photos, wording):
    (raw, *_) = collect_images(photos, image_spec(1, 3, 16, 20), preprocess=RAW)
    for dtype in ("uint8", "int32"):  # pixels as they are, whatever else is asked
        spec = image_spec(1, 3, 16, 20, dtype=dtype)
        for preprocess in (None, RAW, {"interpolation": "linear"}):
            feed = open_feed(photos, [spec], preprocess=preprocess)
            (sample, *_) = collect(feed)
            assert sample["image"].dtype == dtype
            assert (sample["image"] == raw).all()
            expected_note = f"pixels as they are, for {dtype} (preset 'raw')"
            assert any(expected_note in note for note in feed.notes) == (preprocess is None)
        with pytest.raises(FeedError) as refusal:
            open_feed(photos, [spec], preprocess=find_preset("imagenet"))
        wording.check(refusal.value)
    half = image_spec(1, 3, 16, 20, dtype="float16")
    assert collect_images(photos, half)[0].dtype == np.float16
    with pytest.raises(FeedError, match="int64"):
        open_feed(photos, [image_spec(1, 3, 16, 20, dtype="int64")])


def test_broken_images_are_named_or_skipped(photos, capfd):
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


class CountedLookups(dict):
    """Counts how often it is asked for a key."""

    lookups = 0

    def __contains__(self, key):
        self.lookups += 1
        return super().__contains__(key)


@given(st.sets(st.integers(0, 39)), st.booleans())
def test_good_samples_are_counted_in_one_walk(bad, in_sampling_order):
    chosen = sampling.ChosenSamples(range(40), None, {})
    if in_sampling_order:
        chosen.use_sampling_order()
    chosen.skip_reasons = CountedLookups.fromkeys(bad, "bad")
    entries = [entry for entry, index in enumerate(chosen.indices, 1) if index not in bad]
    # as a pass counts: each sample after the one before
    assert [chosen.count_entries(number) for number in range(1, len(entries) + 1)] == entries
    assert chosen.skip_reasons.lookups <= 40
    assert [chosen.count_entries(1) for _ in entries[:1]] == entries[:1]  # a pass begins again


def test_skipped_images_are_listed_in_order(photos):
    feed = open_feed(photos, [IMAGE], skip_bad=True)
    names = sampling.digest_names(feed.names)
    for number in (2, 1):  # as two machines found it, the second one first
        share = sampling.create_share((number, 2), 5, names)
        digests = [f"{position:064x}" for position in share.positions]
        bad_position = share.positions[0]
        feed.merge_remote_pass(share, digests, {bad_position: f"bad {bad_position}"})
    assert feed.notes[-1] == "2 skipped: bad 0; bad 1"


def test_labels_follow_images_not_skipped(photos):
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
        ("path,label\na.JPG,cat\n", "whole number from 0, got 'cat' on line 2"),
        ("nothere.png\n", r"1 of 1 .*nothere\.png"),
        ("a\0b\n", "got a file that is none of these"),
        ("\xff\xfea\0", "got a file that is none of these"),
    ],
)
def test_wrong_list_file_is_refused(photos, content, message):
    (photos / "l.txt").write_bytes(content.encode("latin-1"))
    with pytest.raises(FeedError, match=message):
        open_feed(photos / "l.txt", [IMAGE])


def test_wrong_source_is_refused(tmp_path, photos, wording):
    empty = tmp_path / "empty"
    empty.mkdir()
    two_specs = [IMAGE, TensorSpec("state", "float32", (1, 4))]
    many_specs = [IMAGE, *(TensorSpec(f"w{n}", "float32", (n, 4)) for n in range(29))]
    for source, specs, message in (
        (tmp_path / "nowhere", [IMAGE], "does not exist"),
        (empty, [IMAGE], r"must hold images .*got none"),
        (photos, two_specs, r"images feed one input, the model has 2.*\.npz"),
        (photos, many_specs, r"the model has 30: .*'w3' .* and 25 more; give"),
        (photos, [], "must have an input"),
    ):
        with pytest.raises(FeedError, match=message):
            open_feed(source, specs)
    with pytest.raises(ConfigError) as refusal:
        open_feed(photos, [IMAGE], limit=0)
    wording.check(refusal.value)
    for limit in ("9", 1.5):
        with pytest.raises(ConfigError, match=f"whole number, 1 or more, got {limit!r}"):
            open_feed(photos, [IMAGE], limit=limit)
    (empty / "x.png").write_bytes(b"x")
    with pytest.raises(FeedError, match="all 1 were skipped"):
        collect(open_feed(empty, [IMAGE], skip_bad=True))


def test_pipes_and_devices_are_refused(tmp_path, wording):
    write_image(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(FeedError) as refusal:
        collect(open_feed(tmp_path, [IMAGE]))
    wording.check(refusal.value)
    with pytest.raises(FeedError, match="no regular file"):
        open_feed(tmp_path, [IMAGE]).manifest()
    assert len(collect_images(tmp_path, skip_bad=True)) == 1
    os.mkfifo(tmp_path / "list.txt")
    for source in (tmp_path / "list.txt", "/dev/zero"):
        with pytest.raises(FeedError) as refusal:
            open_feed(source, [IMAGE])
        wording.check(refusal.value)


def test_file_name_without_utf8_is_fed(tmp_path):
    write_image(tmp_path / "x.png")
    odd_path = (tmp_path / "x.png").rename(tmp_path / os.fsdecode(b"\xff\n.png"))
    feed = open_feed(tmp_path, [IMAGE])
    assert len(collect(feed)) == 1
    feed.manifest()
    odd_path.write_bytes(b"x")
    with pytest.raises(FeedError, match=r"\\xff\\n\.png"):
        collect(open_feed(tmp_path, [IMAGE]))


def test_limit_is_spread_over_folder(photos):
    feed = open_feed(photos, [IMAGE], limit=2)
    assert feed.names == ("a.JPG", "e f.Png")
    assert "2 of 5" in feed.notes[-1]
    assert len(collect(feed)) == 2


def test_fixed_batch_repeats_first_samples(photos):
    feed = open_feed(photos, [image_spec(4, 3, 16, 20)])
    batches, single = [s["image"] for s in collect(feed)], collect_images(photos)
    assert len(feed) == len(batches) == 2
    assert np.array_equal(batches[0], np.concatenate(single[:4]))
    assert np.array_equal(batches[1], np.concatenate([single[4], *single[:3]]))
    assert "first 3 samples again" in feed.notes[-1]
    (batch,) = collect_images(photos, image_spec(12, 3, 16, 20))
    assert np.array_equal(batch[10:], np.concatenate(single[:2]))
    pairs = collect_images(BATCH, image_spec(2, 3, 16, 20))
    assert [pair.shape[0] for pair in pairs] == [2, 2, 2]
    assert np.array_equal(np.concatenate(pairs), np.concatenate([BATCH, BATCH[:1]]))
    complete = BATCH[:4].reshape(2, 2, 3, 16, 20)
    assert np.array_equal(collect_images(complete, image_spec(2, 3, 16, 20)), complete)
    rows = BATCH[0, 0]
    assert np.array_equal(collect_images(rows, TensorSpec("image", "float32", (20,))), rows)


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_input_without_batch_reads_sample_files(suffix, tmp_path):
    for number, array in enumerate(BATCH):
        path = tmp_path / f"{number}.{suffix}"
        np.save(path, array) if suffix == "npy" else array.tofile(path)
    feed = open_feed(tmp_path, [TensorSpec("image", "float32", (3, 16, 20))], limit=2)
    expected_arrays = [BATCH[int(name.partition(".")[0])] for name in feed.names]
    assert np.array_equal([sample["image"] for sample in collect(feed)], expected_arrays)


def test_manifest_follows_bytes_order_and_options(photos):
    def manifest(source=photos, spec=IMAGE, **options):
        return open_feed(source, [spec], **options).manifest()

    def is_reordered(changed_manifest):
        """Return whether a feed has the same images in another order."""
        orders = [images["ordered_sha256"] for images in (changed_manifest, base)]
        return changed_manifest["sha256"] == base["sha256"] and orders[0] != orders[1]

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
    assert is_reordered(manifest())
    (photos / "z.png").rename(photos / "b.png")
    names = open_feed(photos, [IMAGE]).names
    listing = photos.parent / "list.txt"
    listing.write_text("".join(f"{photos.name}/{name}\n" for name in names[::-1]))
    assert is_reordered(manifest(listing))
    listed_order, reversed_order = (
        manifest(images, image_spec(2, 3, 16, 20))["sha256"] for images in (photos, listing)
    )
    assert listed_order != reversed_order  # the order tells which stand together


BATCH = np.random.default_rng(0).standard_normal((5, 3, 16, 20)).astype(np.float32)


def collect_values(feed):
    return np.concatenate([s["image"] for s in collect(feed)])


@pytest.mark.parametrize("form", ["npy", "npz", "compressed", "fortran", "stacked", "labelled"])
def test_array_file_forms_give_same_samples(tmp_path, form):
    path = tmp_path / ("x.npy" if form in ("npy", "fortran", "stacked") else "x.npz")
    if path.suffix == ".npy":
        array_by_form = {"fortran": np.asfortranarray(BATCH), "stacked": BATCH[:, None]}
        np.save(path, array_by_form.get(form, BATCH))
    elif form == "compressed":
        np.savez_compressed(path, image=BATCH)
    else:
        arrays_by_form = {
            "npz": {"anything": BATCH},
            "labelled": {"image": BATCH, "labels": np.arange(5)},
        }
        np.savez(path, **arrays_by_form[form])
    feed = open_feed(path, [IMAGE])
    assert np.array_equal(collect_values(feed), BATCH)
    assert feed.labels == ((0, 1, 2, 3, 4) if form == "labelled" else None)
    assert feed.manifest()["sha256"] == open_feed([BATCH], [IMAGE]).manifest()["sha256"]


def test_named_inputs_with_state_and_scalar(tmp_path):
    forms = {"x": ("float32", (None, 8)), "state": ("float32", (2, "n", 4)), "rate": ("int64", ())}
    specs = [TensorSpec(name, *form) for name, form in forms.items()]
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    state = np.ones((2, 1, 4), np.float32)
    np.savez(tmp_path / "x.npz", x=x, state=state, rate=np.int64(16000))
    samples = collect(open_feed(tmp_path / "x.npz", specs))
    assert [s["x"].shape for s in samples] == [(1, 8)] * 3
    assert all(s["state"].shape == (2, 1, 4) and s["rate"].shape == () for s in samples)
    items = [{"x": x[i], "state": state, "rate": 16000} for i in range(3)]
    item_samples = collect(open_feed(items, specs))
    assert all(
        np.array_equal(a[k], b[k]) for a, b in zip(samples, item_samples, strict=True) for k in a
    )
    np.savez(tmp_path / "y.npz", x=x, state=np.stack([state] * 3), rate=np.full(3, 16000))
    assert len(collect(open_feed(tmp_path / "y.npz", specs))) == 3


@pytest.mark.parametrize("chunks", [[5], [1, 4], [2, 2, 1]])
def test_iterables_give_same_samples_in_chunks(chunks):
    parts = np.split(BATCH, np.cumsum(chunks)[:-1])
    listed = open_feed(parts, [IMAGE])
    named = open_feed([{"image": p} for p in parts], [IMAGE])
    spooled = open_feed((p for p in parts), [IMAGE])
    for feed in (listed, named, spooled):
        assert np.array_equal(collect_values(feed), BATCH)
        assert np.array_equal(collect_values(feed), BATCH)
        assert feed.manifest()["sha256"] == listed.manifest()["sha256"]
        assert len(feed) == 5
    assert listed.notes == ()
    assert "temporary file" in spooled.notes[0]
    assert np.array_equal(collect_values(open_feed(list(BATCH), [IMAGE])), BATCH)
    assert np.array_equal(collect_values(open_feed(BATCH, [IMAGE])), BATCH)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (BATCH.astype(np.int64), r"dtype of the input .*\.astype\('float32'\)"),
        ((BATCH * 9).astype(np.uint8), "must be preprocessed first"),
        (BATCH[:, :, :8], "must fit the input 'image'"),
        (BATCH.transpose(0, 2, 1, 3), "must fit the input 'image'"),
        (BATCH.transpose(0, 2, 3, 1), r"turn it with \.transpose\(0, 3, 1, 2\)"),
        (BATCH[:0], "must give samples, got none"),
        ([None, "a string"], "array of numbers"),
        ([], "got none"),
    ],
)
def test_wrong_array_is_refused(value, message):
    with pytest.raises(FeedError, match=message):
        open_feed(value, [IMAGE])


def test_second_reading_of_generator_is_explained():
    samples = (sample for sample in BATCH)
    open_feed(samples, [IMAGE])
    with pytest.raises(FeedError, match="got none; an iterator can be read only once"):
        open_feed(samples, [IMAGE])


@pytest.mark.parametrize("preprocess", [None, Preprocess()])
@pytest.mark.parametrize("source", [[], lambda: iter([]), SimpleNamespace(get_next=lambda: None)])
def test_empty_source_that_is_no_iterator_gets_no_other_advice(source, preprocess):
    with pytest.raises(FeedError, match=r"must give samples, got none$"):
        open_feed(source, [IMAGE], preprocess=preprocess)


class Indexed:
    """A dataset as torch knows it."""

    def __len__(self):
        return len(BATCH)

    def __getitem__(self, index):
        return BATCH[index], index


@pytest.mark.parametrize("source_kind", ["file", "folder", "raw", "list", "dataset"])
@pytest.mark.parametrize("form", ["double", "half", "as it is"])
def test_unambiguous_arrays_are_converted(source_kind, form, tmp_path):
    dtype = {"double": np.float64, "half": np.float16}.get(form, np.float32)
    stored = BATCH.astype(dtype)
    expected = stored.astype(np.float32)
    source = {"list": list(stored), "dataset": Indexed()}.get(
        source_kind, tmp_path / "held" / "x.npy"
    )
    if source_kind == "dataset":
        expected = BATCH
    elif source_kind in ("file", "folder"):
        source.parent.mkdir()
        np.save(source, stored)
        source = source.parent if source_kind == "folder" else source
    elif source_kind == "raw":
        (tmp_path / "x.raw").write_bytes(stored.tobytes())
        source = RawFiles(tmp_path / "x.raw", shape=stored.shape[1:], dtype=stored.dtype.name)
    feed = open_feed(source, [IMAGE])
    assert np.array_equal(collect_values(feed), expected)
    if source_kind != "raw":
        assert feed.manifest()["sha256"] == open_feed(expected, [IMAGE]).manifest()["sha256"]


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
@pytest.mark.parametrize("scale", [1.0, 1 / 65535, 1 / 255])
def test_16_bit_grey_images_keep_depth(scale, suffix, tmp_path):
    pixels = np.random.default_rng(3).integers(7000, 8200, (16, 20), np.uint16)
    cv2.imwrite(str(tmp_path / f"x.{suffix}"), pixels)
    grey = Preprocess(scale=scale, color="grey")
    feed = open_feed(tmp_path, [image_spec("n", 1, 16, 20)], preprocess=grey)
    (batch,) = collect(feed)
    expected_pixels = pixels if scale != 1 / 255 else pixels >> 8
    assert np.array_equal(
        batch["image"][0, 0], expected_pixels.astype(np.float32) * np.float32(scale)
    )
    expected_note = "go from 0 to 65535" if scale != 1 / 255 else "cut to the upper 8"
    assert any(expected_note in note for note in feed.notes)


@pytest.mark.parametrize("suffix", ["png", "tiff", "ppm"])
def test_16_bit_colour_images_are_cut(suffix, tmp_path):
    pixels = np.random.default_rng(3).integers(0, 65535, (16, 20, 3), np.uint16)
    cv2.imwrite(str(tmp_path / f"x.{suffix}"), pixels)
    feed = open_feed(tmp_path, [IMAGE], preprocess=Preprocess(scale=1.0, color="bgr"))
    (batch,) = collect(feed)
    assert np.abs(batch["image"][0].transpose(1, 2, 0) - pixels / 257).max() < 1
    assert "1 image has 16 bits a channel and is cut" in feed.notes[-1]


def test_list_may_name_file_per_input(tmp_path, wording):
    specs = [TensorSpec(name, "float32", (None, 3)) for name in ("a", "b")]
    rows = np.arange(18, dtype=np.float32).reshape(3, 2, 1, 3)
    for number, (a, b) in enumerate(rows):
        np.save(tmp_path / f"a{number}.npy", a)
        np.save(tmp_path / f"b{number}.npy", b)
    for count in (1, 3):
        (tmp_path / "list.txt").write_text("".join(f"a{n}.npy b{n}.npy\n" for n in range(count)))
        samples = collect(open_feed(tmp_path / "list.txt", specs))
        assert len(samples) == count
        assert all(np.array_equal(s["b"], rows[n, 1]) for n, s in enumerate(samples))
    with pytest.raises(FeedError) as refusal:
        open_feed(tmp_path / "list.txt", specs[:1])
    wording.check(refusal.value)


def test_loader_without_function_is_refused(tmp_path):
    (tmp_path / "loader.py").write_text("def load():\n    return []\n")
    with pytest.raises(ConfigError, match=r"a loader is given as loader\.py:function"):
        open_feed(str(tmp_path / "loader.py"), [IMAGE])


def test_integers_are_converted_when_they_fit(wording):
    spec = TensorSpec("ids", "int32", (None, 3))
    rows = np.array([[1, 2, 3], [4, 5, 1 << 40]])
    (sample,) = collect(open_feed(rows[:1], [spec]))
    assert sample["ids"].dtype == np.int32
    assert sample["ids"].tolist() == [[1, 2, 3]]
    with pytest.raises(FeedError) as refusal:
        collect(open_feed(rows, [spec]))
    wording.check(refusal.value)


@pytest.mark.parametrize("limit", [1, 3, 5])
@pytest.mark.parametrize("stride", [None, 2])
def test_endless_iterable_needs_a_limit(limit, stride, monkeypatch, wording):
    def endless():
        while True:
            yield BATCH[:2]

    monkeypatch.setattr("deploy.feed.loaders.MAX_SAMPLES", 30)
    with pytest.raises(FeedError) as refusal:
        open_feed(endless, [IMAGE])
    wording.check(refusal.value)
    feed = open_feed(endless(), [IMAGE], limit=Choice(limit=limit, every=stride))
    rows = np.tile(BATCH[:2], (5, 1, 1, 1))[:: stride or 1][:limit]
    assert np.array_equal(collect_values(feed), rows)
    assert len(open_feed([BATCH] * 7, [IMAGE])) == 35  # a list ends


def test_nan_sample_is_named_or_skipped(wording):
    bad = BATCH.copy()
    bad[3, 0, 0, :2] = np.nan, np.inf
    with pytest.raises(FeedError) as refusal:
        collect(open_feed(bad, [IMAGE]))
    wording.check(refusal.value)
    feed = open_feed(bad, [IMAGE], skip_bad=True)
    assert np.array_equal(collect_values(feed), np.delete(BATCH, 3, 0))
    assert len(feed) == 4


def test_first_bad_file_is_skipped_with_fixed_batch(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"no array")
    np.save(tmp_path / "b.npy", BATCH[:2])
    spec = TensorSpec("x", "float32", (2, *BATCH.shape[1:]))
    (values,) = collect_images(tmp_path, spec, skip_bad=True)
    assert np.array_equal(values, BATCH[:2])


def test_preprocessing_of_arrays_is_refused(tmp_path, wording):
    with pytest.raises(FeedError) as refusal:
        open_feed(BATCH, [IMAGE], preprocess=find_preset("imagenet"))
    wording.check(refusal.value)
    np.save(tmp_path / "a.npy", BATCH)
    with pytest.raises(ConfigError) as refusal:
        open_feed(tmp_path / "a.npy", [IMAGE], preprocess=find_preset("imagenet"))
    wording.check(refusal.value)


def test_inconsistent_array_files_are_refused(tmp_path):
    np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "o.npz", image=np.array([{}], object))
    np.savez(tmp_path / "l.npz", image=BATCH, labels=np.arange(4))
    np.savez(tmp_path / "n.npz", image=BATCH, z=np.zeros((4, 2), np.float32))
    np.savez(tmp_path / "m.npz", image=BATCH)
    two_specs = [IMAGE, TensorSpec("z", "float32", (1, 2))]
    for name, specs, message in (
        ("o.npy", [IMAGE], "cannot be read as plain numpy arrays"),
        ("o.npz", [IMAGE], "cannot be read as plain numpy arrays"),
        ("l.npz", [IMAGE], "one label per sample, got 4 for 5"),
        ("n.npz", two_specs, "equally many samples, got image: 5, z: 4"),
        ("m.npz", two_specs, r"exactly the inputs \['image', 'z'\], got \['image'\]"),
    ):
        with pytest.raises(FeedError, match=message):
            open_feed(tmp_path / name, specs)


def test_workers_share_stream_without_loss():
    feed = open_feed([np.full((1, 3, 16, 20), i, np.float32) for i in range(200)], [IMAGE])

    def work(stream):
        return [int(sample["image"][0, 0, 0, 0]) for sample in stream]

    with feed.samples() as stream, ThreadPoolExecutor(4) as pool:
        numbers = [number for part in pool.map(work, [stream] * 4) for number in part]
    assert sorted(numbers) == list(range(200))


def test_stream_error_follows_good_samples(wording):
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


def test_closed_stream_ends_thread():
    produced = []
    with SampleStream(produced.append(i) or i for i in range(10_000)) as stream:
        assert next(stream) == 0
        time.sleep(0.2)
        assert len(produced) <= 6
    assert not feed_threads()
    stream.close()
    assert list(stream) == []


def test_dropped_stream_ends_thread_without_waiting():
    """The garbage collector may drop it while a thread is started, which ends no other thread."""
    gate_results, has_begun, gate = [], threading.Event(), threading.Event()

    def produce():
        yield 0
        has_begun.set()
        gate_results.append(gate.wait(300))
        yield from range(10_000)

    stream = SampleStream(produce())
    next(stream)
    has_begun.wait(300)
    del stream
    gc.collect()
    assert not gate_results
    gate.set()
    for thread in feed_threads():
        thread.join(300)
    assert not feed_threads()


def test_cached_samples_are_not_decoded_again(pictures, small_cnn):
    specs = load(small_cnn).inputs
    plain_feed, caching_feed = (
        open_feed(pictures, specs, preprocess=Preprocess(size=(16, 16))) for _ in "ab"
    )
    caching_feed.cache_samples(20)
    expected = [sample["x"] for sample in plain_feed.samples()]
    for _ in range(2):
        arrays = [sample["x"] for sample in caching_feed.samples()]
        assert all(np.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))
    assert plain_feed.decodes == 20
    assert caching_feed.decodes == 20


def test_full_disk_ends_only_sample_cache(monkeypatch):
    cache = sample_reader.SampleCache(range(4))
    cache.add(0, {"x": np.ones(3)})
    with monkeypatch.context() as patched:
        failing = Mock(side_effect=OSError(28, "No space left on device"))
        patched.setattr(ItemStore, "_write", failing)
        cache.add(1, {"x": np.ones(3)})
    cache.add(2, {"x": np.ones(3)})
    assert cache.get(1) is None
    assert cache.get(2) is None
    assert np.array_equal(cache.get(0)["x"], np.ones(3))


def test_full_disk_prints_nothing_at_exit(capfd):
    """Bytes that Python buffers for a full disk are not written again at exit."""
    handler_before = signal.getsignal(signal.SIGXFSZ)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        cache = sample_reader.SampleCache(range(2))
        cache.add(0, {"x": np.ones(3)})
        assert cache.get(0) is None
        del cache
        gc.collect()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler_before)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
@pytest.mark.parametrize("source_kind", ["npy", "npz", "compressed", "list", "generator"])
def test_arrays_of_any_byte_order(source_kind, dtype, order, tmp_path):
    x = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4) * 0.37
    stored = x.astype(dtype)
    if order == "strided":
        stored = np.repeat(stored, 2, axis=2)[:, :, ::2]
    stored = np.asfortranarray(stored) if order == "F" else stored
    source = tmp_path / ("x.npy" if source_kind == "npy" else "x.npz")
    if source_kind == "npy":
        np.save(source, stored)
    elif source_kind in ("npz", "compressed"):
        (np.savez if source_kind == "npz" else np.savez_compressed)(source, x=stored)
    else:
        source = (
            [stored] if source_kind == "list" else (array for array in (stored[:1], stored[1:]))
        )
    arrays = collect_images(source, TensorSpec("x", "float32", ("batch", 2, 4)))
    assert all(array.dtype.isnative and array.flags.c_contiguous for array in arrays)
    np.testing.assert_array_equal(np.concatenate(arrays), x)


INPUT = (TensorSpec("x", "float32", (1, 3, 16, 16)),)


@pytest.fixture
def png_folder(tmp_path):
    rng = np.random.default_rng(2)
    for number in range(24):
        pixels = rng.integers(0, 256, (16 + number, 20, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / f"{number:02}.png"), pixels)
    return tmp_path


def set_decoder_threads(monkeypatch, count):
    monkeypatch.setattr(sample_reader, "worker_threads", lambda: count)


def open_and_collect(png_folder, **options):
    feed = open_feed(png_folder, INPUT, **options)
    return feed, [sample["x"] for sample in collect(feed)]


def test_prefetch_keeps_order_and_bound():
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


def test_closed_prefetch_ends_threads_without_waiting():
    threads_before, gate_results = threading.enumerate(), []
    begun, gate = threading.Barrier(3), threading.Event()

    def work(item):
        if item:
            begun.wait(300)
            gate_results.append(gate.wait(300))

    prefetched = prefetch(range(1000), work, threads=3)
    assert next(prefetched) == (0, None)
    begun.wait(300)
    prefetched.close()
    assert not gate_results
    gate.set()
    for thread in set(threading.enumerate()) - {*threads_before}:
        thread.join(300)
    assert len(gate_results) == 2
    assert set(threading.enumerate()) <= {*threads_before}


def test_images_are_decoded_in_parallel(monkeypatch, png_folder):
    set_decoder_threads(monkeypatch, 3)
    meeting, read_sample = threading.Barrier(3), sample_reader._read_sample

    def read_after_meeting(source, index):
        meeting.wait(300)  # nobody goes on before three are there
        return read_sample(source, index)

    monkeypatch.setattr(sample_reader, "_read_sample", read_after_meeting)
    assert len(open_and_collect(png_folder)[1]) == 24


def test_samples_do_not_depend_on_threads(monkeypatch, png_folder):
    (png_folder / "05.png").write_bytes(b"no picture")
    outcomes = []
    for count in (1, 2, 4):
        set_decoder_threads(monkeypatch, count)
        feed, arrays = open_and_collect(png_folder, skip_bad=True)
        outcomes.append((feed.manifest(), feed.notes, feed.decodes, [a.tobytes() for a in arrays]))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][2] == 23


def test_bad_or_changed_image_is_named(monkeypatch, png_folder):
    set_decoder_threads(monkeypatch, 4)
    feed = open_feed(png_folder, INPUT, skip_bad=True)
    feed.manifest()
    (png_folder / "20.png").write_bytes(b"no picture")
    with pytest.raises(SampleChangedError, match=r"20\.png"):
        collect(feed)
    for name in ("07.png", "06.png"):
        (png_folder / name).write_bytes(b"no picture")
    with pytest.raises(FeedError, match=r"06\.png"):
        open_and_collect(png_folder)


@pytest.mark.slow
@given(st.integers(0, 3000))
@example(10**6)
def test_sampling_order_is_a_permutation(count):
    positions = np.arange(count)
    assert np.array_equal(np.sort(sampling_order(count)), positions)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_spread_is_even_and_nested(count, limit):
    positions = spread_evenly(range(count), limit)
    assert len(positions) == min(count, limit)
    assert positions == sorted(positions)
    assert np.diff([0, *positions, count]).max() <= 4 * count / len(positions) + 1
    assert set(spread_evenly(range(count), limit // 2)) <= set(positions)


@given(st.integers(2, 9), st.sampled_from([16, 48, 64, 100]), st.sampled_from([2, 3, 4, 8]))
def test_spread_meets_every_phase_of_period(period, limit, factor):
    positions = np.array(spread_evenly(range(factor * limit), limit))
    count_by_phase = np.bincount(positions % period, minlength=period)
    assert limit < 8 * period or count_by_phase.min() >= limit / period / 4


@given(st.integers(0, 10**6))
def test_neighbours_are_in_different_halves(number):
    assert alternate_halves(number) in (number, number ^ 1)
    assert alternate_halves(number) ^ alternate_halves(number ^ 1) == 1


@pytest.fixture
def alternating_samples(tmp_path):
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


@pytest.mark.parametrize("options", [(), ("--limit", 50), ("--until-stable",)])
def test_alternating_classes_are_both_sampled(options, run, alternating_samples):
    """By powers of two through 200, and by fours, every sample was a quiet one."""
    options += ("--method", "minmax") if options else ()
    feed = ("--images", alternating_samples / "x.npy", "--effort", 0, "--duration", 0)
    out = run.ok(
        "build", alternating_samples / "net.onnx", *feed, "--out", alternating_samples, *options
    )
    if options:
        initializers = onnx.load(alternating_samples / "net.int8.onnx").graph.initializer
        (scale,) = [
            numpy_helper.to_array(initializer)
            for initializer in initializers
            if initializer.name == "x/scale"
        ]
        assert 255 * scale > 7
    else:
        assert "gives one class" not in out
        assert "Verdict       good" in out
        report = json.loads((alternating_samples / "report.json").read_text())
        assert report["engines"][1]["accuracy"]["samples"] == 100
