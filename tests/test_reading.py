"""Files are read once, through one door, and are what was hashed."""

import ast
import functools
import gc
import hashlib
import io
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib8 import build, calibrate
from deploy.calibration import fingerprint, one_pass
from deploy.calibration.observation import CalibrationSubject
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.store import cache_files
from deploy.errors import ConfigError, ExportError, FeedError, ModelError
from deploy.feed import images, pixels
from deploy.feed.decoding import opencv
from deploy.feed.feed import Dataset, open_feed
from deploy.feed.file_list import FileList, ImageFile, SampleChangedError, SampleDigests
from deploy.feed.preprocess import Preprocess
from deploy.feed.sampling import digest_names
from deploy.files import archives, guard, reading
from deploy.frontends import load
from deploy.targets.ascend.target import Ascend
from deploy.tensors import TensorSpec
from deploy.tuning.search_options import Tuning

PLAN = {"what": "a plan", "error": ConfigError}
ROOT = Path(__file__).parent.parent
DEEP = reading.MAX_NESTING + 1


@pytest.mark.parametrize("read", ["read_bytes", "read_text", "read_json", "refuse_irregular"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "nothing there"),
        ("folder", "got a folder"),
        ("pipe", "a device or pipe"),
        ("device", "a device or pipe"),
        ("NUL", "null"),
        ("long", "name too long"),
    ],
)
def test_irregular_files_are_refused(read, kind, message, tmp_path, wording):
    path = {"device": "/dev/zero", "NUL": "a\0b", "long": "a" * 5000}.get(kind, tmp_path / "x")
    if kind in ("folder", "pipe"):
        (os.mkdir if kind == "folder" else os.mkfifo)(path)
    with pytest.raises(ConfigError) as caught:
        getattr(reading, read)(path, **PLAN)
    if kind != "long":  # its name is the message
        wording.check(caught.value)
    assert message in str(caught.value).lower()


def test_reading_stops_at_the_budget(tmp_path, wording):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert reading.read_bytes(path, **PLAN, max_bytes=5) == b"12345"
    with pytest.raises(ConfigError) as refusal:
        reading.read_bytes(path, **PLAN, max_bytes=4)
    wording.check(refusal.value)
    with path.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(ConfigError) as refusal:
        reading.read_text(path, **PLAN)
    wording.check(refusal.value)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_sizeless_file_keeps_the_budget():
    assert b"Name" in reading.read_bytes("/proc/self/status", **PLAN)
    with pytest.raises(ConfigError, match="most 3 B, got "):
        reading.read_bytes("/proc/self/status", **PLAN, max_bytes=3)


def test_growing_file_keeps_the_budget(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"12345")

    def grow(_):
        os.truncate(path, 1 << 20)

    monkeypatch.setattr(reading, "add_input_file", grow)  # called once the size was checked
    with pytest.raises(ConfigError, match="most 5 B, got 6 B"):
        reading.read_bytes(path, **PLAN, max_bytes=5)


def test_read_files_are_protected_inputs(tmp_path, wording):
    path, cache = tmp_path / "x", tmp_path / "cache"
    path.write_text("{}")
    cache.write_text("{}")
    with guard.guard_inputs():
        reading.read_json(path, **PLAN)
        reading.read_json(cache, **PLAN, rewritable=True)
        guard.refuse_output(cache)
        with pytest.raises(ExportError) as refusal:
            guard.refuse_output(path)
        wording.check(refusal.value)


def test_disk_error_is_reported(tmp_path):
    (tmp_path / "x").write_bytes(b"1")
    broken = pytest.raises(ConfigError, match="got: Input/output error")
    with broken, reading.open_regular_file(tmp_path / "x", **PLAN):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\xed\xa0\x80"])
def test_text_is_utf_8(data, tmp_path, wording):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ConfigError) as refusal:
        reading.read_text(tmp_path / "x", **PLAN)
    wording.check(refusal.value)
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa")
    assert reading.read_text(tmp_path / "x", **PLAN) == "a"


@pytest.mark.parametrize(
    "text",
    [
        "[" * DEEP + "]" * DEEP,
        '{"a":' * DEEP + "1" + "}" * DEEP,
        '[{"a":' * DEEP + "}]" * DEEP,
        "[" * 1_000_000,
        '["\\"",' * DEEP + "1" + "]" * DEEP,
        "[1," * DEEP + "[],{}" + "]" * DEEP,
    ],
)
def test_deeply_nested_json_is_refused(text):
    with pytest.raises(ConfigError, match="over 64 nested brackets"):
        reading.from_json(text, rule="it must be", error=ConfigError)


@pytest.mark.parametrize(
    "value",
    [
        "[" * 1000,
        '\\"[' * 1000,
        [[]] * 1000,
        {"[": {"{": ["\\", '"[[']}},
        3,
        {str(i): [{"]": i}] for i in range(1000)},
        json.loads("[" * (DEEP - 1) + "]" * (DEEP - 1)),
    ],
)
def test_allowed_brackets_in_json_are_read(value):
    assert reading.from_json(json.dumps(value), rule="", error=ConfigError) == value


@pytest.mark.parametrize("text", ["", "{", "]" * 1000, "1" * 5000, "nul", '"\\', "[1 2]"])
def test_broken_json_is_reported(text, wording):
    with pytest.raises(ConfigError) as refusal:
        reading.from_json(text, rule="it must be", error=ConfigError)
    wording.check(refusal.value)


def npy(array):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def of_shape(text):
    return header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + text + b",)}\n")


@pytest.mark.parametrize(
    "data",
    [
        *(of_shape(b"1000000000000, 9") + bytes(99), of_shape(b"-1") + bytes(4)),
        *(of_shape(b"4") + bytes(8), npy(np.array([print], object))),
        *(b"\x93NUMPY\x09\x00", b"", b"PK"),
    ],
)
def test_array_larger_than_file_is_refused(data):
    with pytest.raises(ValueError):
        archives.read_array(io.BytesIO(data), len(data))


@pytest.mark.parametrize("text", [b"{'descr': '<f4', (", b'{\'descr\': """', b"{" * 60, b"\\"])
def test_damaged_array_header_is_refused(text):
    with pytest.raises(ValueError):
        archives.read_array_header(io.BytesIO(header(text.ljust(118) + b"\n")), 1 << 20)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.eye(3)),
        np.zeros((0, 2), np.int8),
        np.array(3),
    ],
)
def test_written_arrays_are_read_back(array):
    data = npy(array)
    result = archives.read_array(io.BytesIO(data), len(data))
    assert result.dtype == array.dtype
    assert np.array_equal(result, array)
    assert archives.read_array_header(io.BytesIO(data), len(data))[0] == array.shape


def test_archive_bomb_is_refused_unpacked(wording):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"{number}.npy", bytes(1 << 20))
    file.seek(0)
    assert len(file.getvalue()) < 10_000
    check = functools.partial(archives.check_archive, file, "x", what="arrays", error=FeedError)
    with pytest.raises(FeedError) as refusal:
        check(max_bytes=3 << 20 - 1)
    wording.check(refusal.value)
    with pytest.raises(FeedError, match="at most 2 entries"):
        check(max_entries=2)
    check()
    assert file.tell() == 0


def test_utf8_paths_are_recognized():
    paths = ("a/b", Path("é"), os.fsdecode(b"a\xff"))
    assert [reading.is_utf8_path(path) for path in paths] == [True, True, False]
    code = "import os; from deploy.files.reading import is_utf8_path;"
    arguments = [sys.executable, "-c", code + " print(is_utf8_path(os.fsdecode(b'\\xc3\\xa9')))"]
    for encoding, right in (("C", "False"), ("C.UTF-8", "True")):
        environment = {
            **os.environ,
            "LC_ALL": encoding,
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
        }
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.strip() == right, done.stderr


# Where bytes of files come in by another door, and why: what the program made itself, the system's
# own, and the image files (`deploy.feed.images`), which keeps its own rules.
ALLOWED_DOORS = {
    "deploy.cli": "where what stdout did not take goes",
    "deploy.feed.array_files": "maps of what was opened, and of its own temporary files",
    "deploy.feed.images": "pictures",
    "deploy.feed.temporary_arrays": "its own temporary file, which has no name",
    "deploy.files.atomic": "descriptors of what it writes, and those that hold locks",
    "deploy.machine": "the system's description of the processor",
    "deploy.runtimes.ort": "ONNX Runtime's trace in a temporary folder",
    "deploy.files.reading": "the door itself",
    "deploy.pipeline.results": "what was built a moment ago",
    "deploy.standins.memory": "the memory of this very process",
    "deploy.targets.tensorrt.engines": "what was built a moment ago",
}
DOORS = {"read_bytes", "read_text", "fromfile", "memmap"}
OPENED = {"np.load", "onnx.load", "torch.load", "open", "os.open", "io.open", "path.open"}
ENDS = DOORS | {"open", "load"}


def doors(module):
    """Calls in a module that open files by themselves."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            call_name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            called = ast.unparse(node.func) if call_name in ENDS else ""
            if called in OPENED or ("." in called and call_name in DOORS):
                yield f"{called} in line {node.lineno}"


@pytest.mark.slow
def test_files_are_read_through_one_door():
    result = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): list(doors(path))
        for path in (ROOT / "deploy").rglob("*.py")
    }
    result = {name: calls for name, calls in result.items() if calls}
    by = {"deploy.fx.weights": 1}  # torch.load of a file that was opened
    wrong = {n: c for n, c in result.items() if n not in ALLOWED_DOORS and len(c) > by.get(n, 0)}
    assert not wrong, f"read with deploy.files.reading: {wrong}"
    assert set(ALLOWED_DOORS) <= set(result), (
        f"excepted for nothing: {set(ALLOWED_DOORS) - set(result)}"
    )


# --- What was hashed is what was used: images read once, and the same whenever they are read
# again.
UNIT = Preprocess(size=(16, 16))
QUICK = {"preprocess": UNIT, "duration_s": 0, "tuning": Tuning(effort=0)}
IMAGE = TensorSpec("x", "float32", ("n", 3, 16, 16))
ROWS = np.random.default_rng(3).standard_normal((20, 3, 16, 16)).astype(np.float32)


@pytest.fixture
def photos(pictures, tmp_path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(pictures, tmp_path / "photos"))


@pytest.fixture
def reads(monkeypatch) -> Counter:
    """File name -> how often it was read."""
    counted, read_image = Counter(), images.read_image_file

    def read(picture):
        counted[picture.path.name] += 1
        return read_image(picture)

    monkeypatch.setattr(images, "read_image_file", read)
    return counted


def swap(folder: Path) -> None:
    """Another picture under the name of one."""
    shutil.copy(folder / "00.png", folder / "11.png")


def between(monkeypatch, step: str, act) -> None:
    """Do something before a step of the line, named with its module."""
    step_function = pkgutil.resolve_name(step)

    def act_after_step(*arguments, **named):
        act()
        return step_function(*arguments, **named)

    monkeypatch.setattr(step, act_after_step)


def read_whole(feed) -> list:
    with feed.samples() as samples:
        return list(samples)


def files_of(cache: Path) -> list[bytes]:
    return [path.read_bytes() for path in cache_files(cache)]


def test_calibration_reads_each_image_once(small_cnn, photos, tmp_path, reads):
    cache, calibrations = tmp_path / "c", []
    for cache_policy in (cache, CachePolicy(path=cache, refresh=True)):
        calibrate(small_cnn, photos, preprocess=UNIT, cache=cache_policy)
        assert len(reads) == 20
        assert set(reads.values()) == {1}
        reads.clear()
        calibrations.append(files_of(cache))
    assert calibrations[0] == calibrations[1]
    assert calibrate(small_cnn, photos, preprocess=UNIT, cache=cache).reused
    assert len(reads) == 20
    assert sum(reads.values()) == 24  # for their digests, and four to look at


@pytest.mark.slow
def test_build_reads_each_image_once(small_cnn, photos, tmp_path, reads):
    build(small_cnn, photos, preprocess=UNIT, out=tmp_path / "o", duration_s=0)
    assert len(reads) == 20
    assert set(reads.values()) == {1}


def test_late_digests_equal_early_digests(photos):
    early, late = (open_feed(photos, [IMAGE], preprocess=UNIT) for _ in range(2))
    early_manifest = early.manifest()
    assert len(read_whole(late)) == 20
    assert late.manifest() == early_manifest


CHANGED = r"11\.png changed while calib8 ran.*run again"


@pytest.mark.parametrize("skip_bad", [False, True])
def test_changed_image_ends_the_reading(photos, skip_bad):
    options = {"preprocess": UNIT, "skip_bad": skip_bad}
    hashed, passed_feed = (open_feed(photos, [IMAGE], **options) for _ in range(2))
    hashed.manifest()
    read_whole(passed_feed)
    swap(photos)
    with pytest.raises(FeedError, match=CHANGED):
        read_whole(hashed)
    (photos / "11.png").write_bytes(b"no picture")
    with pytest.raises(FeedError, match=CHANGED):
        read_whole(passed_feed)
    (photos / "11.png").unlink()
    with pytest.raises(FeedError, match=CHANGED):
        list(passed_feed.spread_samples(20))


def test_skipped_image_stays_skipped(photos):
    good = (photos / "11.png").read_bytes()
    (photos / "11.png").write_bytes(b"no picture")
    feed = open_feed(photos, [IMAGE], preprocess=UNIT, skip_bad=True)
    for _ in range(2):
        assert len(read_whole(feed)) == len(feed.names) == 19
        (photos / "11.png").write_bytes(good)
    (photos / "11.png").write_bytes(b"another one")
    second_feed = open_feed(photos, [IMAGE], preprocess=UNIT, skip_bad=True)
    assert second_feed.manifest()["sha256"] != feed.manifest()["sha256"]  # counts by its bytes


def test_image_swapped_during_calibration_is_refused(small_cnn, photos, tmp_path, monkeypatch):
    options = {"preprocess": UNIT, "cache": tmp_path / "c"}
    calibrate(small_cnn, photos, **options)
    step = "deploy.pipeline.calibration_run.schedule_observations"
    between(monkeypatch, step, lambda: swap(photos))
    with pytest.raises(FeedError, match=CHANGED):  # hashed to judge the cache, decoded later
        calibrate(small_cnn, photos, **options, method="legacy", targets=["tensorrt"])


def test_changed_evaluation_image_ends_the_build(
    small_cnn, photos, pictures, tmp_path, monkeypatch
):
    feeds = []
    open_dataset = Dataset.open
    opened = lambda *a, **k: feeds.append(open_dataset(*a, **k)) or feeds[-1]  # noqa: E731
    monkeypatch.setattr(Dataset, "open", opened)
    swapping = lambda: (feeds[0].manifest(), swap(photos))  # noqa: E731
    between(monkeypatch, "deploy.pipeline.build.search_targets", swapping)
    with pytest.raises(FeedError, match=CHANGED):
        build(small_cnn, pictures, out=tmp_path / "o", eval_images=photos, **QUICK)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("deploy.tuning.search_samples.observe", {"tuning": Tuning()}),
        (f"{Ascend.__module__}.Ascend.build", {"targets": ["onnxruntime", "ascend"]}),
    ],
    ids=["the search does not pass over it", "it is no failure of one target"],
)
def test_change_during_steps_ends_the_build(
    where, named, small_cnn, pictures, tmp_path, monkeypatch
):
    def of_changed(*_, **__):
        raise SampleChangedError("image 11.png changed while calib8 ran; run again")

    monkeypatch.setattr(where, of_changed)
    with pytest.raises(FeedError, match=CHANGED):
        build(small_cnn, pictures, out=tmp_path / "o", **QUICK | named)
    assert not list((tmp_path / "o").glob("*.onnx"))


def test_changed_array_ends_the_reading(small_cnn, wording):
    rows = [row.copy() for row in ROWS[:12]]
    feed = open_feed(rows, [IMAGE])
    (first_sample,) = feed.first_samples(1)
    rows[0][...] = 0
    assert np.array_equal(first_sample["x"][0], ROWS[0])
    read_whole(feed)
    rows[11][...] = 0
    with pytest.raises(FeedError) as refusal:
        read_whole(feed)
    wording.check(refusal.value)


@pytest.fixture
def reversed_photos(photos) -> Path:
    """A list of the same pictures under other names, in another order."""
    listing = photos.parent / "list.txt"
    for path in photos.iterdir():
        shutil.copy(path, photos.parent / f"{99 - int(path.stem)}.png")
    listing.write_text("".join(f"{p.name}\n" for p in sorted(photos.parent.glob("*.png"))))
    return listing


@pytest.fixture
def recalibrate(small_cnn, tmp_path):
    """(images, **options) -> a calibration into one cache, or into `cache`."""

    def call(images, *targets, cache="c", **named):
        named |= {"targets": list(targets)} if targets else {}
        named |= {"preprocess": UNIT} if isinstance(images, Path) else {}
        return calibrate(small_cnn, images, cache=tmp_path / cache, **named)

    return call


def test_order_and_names_keep_plain_histograms(recalibrate, photos, reversed_photos, tmp_path):
    recalibrate(photos)
    original_files = files_of(tmp_path / "c")
    calibration = recalibrate(reversed_photos)
    assert calibration.reused
    assert "are the same" in calibration.reason
    assert original_files == files_of(tmp_path / "c")


def test_new_order_repeats_ordered_statistics(recalibrate, photos, reversed_photos):
    two_targets = ("onnxruntime", "ascend")
    original = recalibrate(photos, *two_targets)
    reordered = recalibrate(reversed_photos, *two_targets)
    ordered = {o for o in original.observations if o.statistic.ordered}
    assert not reordered.reused
    assert set(reordered.observed_now) == ordered
    assert "order of the images" in reordered.reason
    fresh = recalibrate(reversed_photos, *two_targets, cache="d")
    for o in fresh.observations:
        mine, theirs = (c.ranges.observed.recorder(o).to_arrays() for c in (reordered, fresh))
        assert all(np.array_equal(mine[key], theirs[key]) for key in theirs), o.key
    assert recalibrate(reversed_photos, *two_targets).reused


@pytest.mark.slow
def test_observations_of_old_order_are_dropped(recalibrate, photos, reversed_photos):
    recalibrate(photos, "ascend")
    recalibrate(photos)
    rule = {"method": "entropy-tensorrt"}
    recalibrate(reversed_photos, "onnxruntime", **rule)  # goes by the new order
    assert recalibrate(reversed_photos, "onnxruntime", **rule).reused
    assert recalibrate(photos).reused  # a plain histogram
    assert not recalibrate(
        reversed_photos, "ascend"
    ).reused  # kept of the first order alone, so no longer kept
    assert not recalibrate(photos, "onnxruntime", **rule).reused


def test_cache_of_older_schema_is_remade(recalibrate, photos, tmp_path):
    recalibrate(photos)
    side = cache_files(tmp_path / "c")[1]
    side.write_text(json.dumps({**json.loads(side.read_text()), "schema": 2}))
    result = recalibrate(photos)
    assert not result.reused
    assert "not a fingerprint" in result.reason


def test_another_decoder_repeats_only_images(recalibrate, photos, monkeypatch):
    recalibrate(photos)
    recalibrate(list(ROWS), cache="r")
    monkeypatch.setattr(opencv(), "__version__", "9.9.9")  # which gives the same pixels
    calibration = recalibrate(photos)
    assert calibration.reused
    assert "decoder OpenCV 5" in calibration.reason
    other_decoders = {**pixels.decoder_digests(), "webp": "0" * 16}
    monkeypatch.setattr(fingerprint, "decoder_digests", lambda: other_decoders)
    calibration = recalibrate(photos)
    assert not calibration.reused
    assert "the decoder changed (" in calibration.reason
    assert "webp" in calibration.reason
    monkeypatch.setattr(fingerprint, "DECODING_VERSION", 99)
    calibration = recalibrate(photos)
    assert not calibration.reused
    assert calibration.reason.endswith("(decoding 1 -> 99)")
    assert recalibrate(list(ROWS), cache="r").reused


EXTERNAL_WEIGHTS = {"save_as_external_data": True, "location": "m.bin", "size_threshold": 0}


@pytest.fixture(params=["one file", "external data"])
def model(small_cnn, tmp_path, request) -> Path:
    path = tmp_path / "m.onnx"
    if request.param == "one file":
        shutil.copy(small_cnn, path)
    else:
        onnx.save(onnx.load(small_cnn), path, **EXTERNAL_WEIGHTS)
    return path


def replaced(path: Path) -> None:
    """Negated weights at the same place; the file itself stays where they are beside it."""
    model, graph, weight_file = onnx.load(path), path.read_bytes(), path.with_suffix(".bin")
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = -onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    there = weight_file.exists()
    weight_file.unlink(missing_ok=True)
    onnx.save(model, path, **(EXTERNAL_WEIGHTS if there else {}))
    assert (path.read_bytes() == graph) == there


def test_model_replaced_during_build_is_refused(model, pictures, tmp_path, monkeypatch, wording):
    between(monkeypatch, "deploy.pipeline.build.build_targets", lambda: replaced(model))
    with pytest.raises(ModelError) as refusal:
        build(model, pictures, out=tmp_path / "o", **QUICK)
    wording.check(refusal.value)


def test_model_replaced_during_calibration_is_refused(model, pictures, monkeypatch, wording):
    between(
        monkeypatch,
        "deploy.pipeline.calibration_setup._collect_observations",
        lambda: replaced(model),
    )
    with pytest.raises(ModelError) as refusal:
        calibrate(model, pictures, preprocess=UNIT, targets=["tensorrt"], method="legacy")
    wording.check(refusal.value)


def test_replaced_original_graph_is_refused(small_cnn, tmp_path, wording):
    path = Path(shutil.copy(small_cnn, tmp_path / "m.onnx"))
    model_before, model_after = (
        CalibrationSubject(loaded=load(path), user_model=path, sample_count=1) for _ in range(2)
    )
    assert len(model_before.original.graph.node) == len(onnx.load(path).graph.node)
    replaced(path)
    with pytest.raises(ModelError) as refusal:
        _ = model_after.original
    wording.check(refusal.value)


def test_float_size_includes_external_weights(model, pictures, tmp_path):
    reference, engine = build(model, pictures, out=tmp_path / "o", **QUICK).engines
    assert reference.size_bytes > engine.size_bytes > 0
    assert engine.accuracy.outputs[0].sqnr_db > 20


MAX_BYTES_PER_IMAGE = (
    190  # bytes an image, of which the name has 12; half a kilobyte and more were taken once
)


@given(st.lists(st.text(st.characters(), max_size=12), max_size=9), st.booleans())
def test_file_list_holds_its_files(given_names, labelled):
    labels = [None] * len(given_names)
    if labelled:
        labels = [number * 7 for number in range(len(given_names))]
    listing = FileList("there", given_names, labels if labelled else ())
    expected = [
        ImageFile(Path("there") / name, name, label)
        for name, label in zip(given_names, labels, strict=True)
    ]
    assert list(listing) == expected
    assert len(listing) == len(expected)
    if not given_names:
        assert listing.labels == ()
    elif labelled:
        assert listing.labels == tuple(labels)
    else:
        assert listing.labels is None
    if expected:
        assert listing[-1] == expected[-1]
        assert listing.path(0) == expected[0].path


def test_file_list_keeps_odd_names():
    odd = [b"\xff\xfe.png".decode(errors="surrogateescape"), "\ud800", "/whole/path.png", ""]
    listing = FileList("there", odd)
    assert listing.names == odd
    assert str(listing.path(2)) == odd[2]
    with pytest.raises(IndexError):
        listing[4]


def test_file_without_label_drops_all_labels():
    listing = FileList("", ["a", "b"], [3, 4])
    assert listing.labels == (3, 4)
    listing.add("c")
    assert listing.labels is None
    assert listing[2].label is None


def test_digests_combine_in_order_or_sorted():
    """The digest equals that of hashing the files in order, so that old caches stay valid."""
    digests = [hashlib.sha256(bytes([n])).digest() for n in range(40)]
    digests[7] = digests[7][:-1] + b"\0"  # what numpy's strings leave out at the end
    digests_seen, order = SampleDigests(60), [3, 7, 0, 39, 12]
    for number, digest in enumerate(digests):
        digests_seen.store_or_compare(number, digest, "it")
    for in_digest_order, arrange in ((False, list), (True, sorted)):
        joined_digests = b"".join(arrange(digests[n] for n in order))
        assert (
            digests_seen.combined(order, in_digest_order=in_digest_order)
            == hashlib.sha256(joined_digests).hexdigest()
        )
    assert list(digests_seen.hex(order)) == [digests[n].hex() for n in order]
    assert 39 in digests_seen
    assert 40 not in digests_seen
    names = ["a/b.png", "c.png", "b\udcff.png"]
    text = "b.png\nc.png\nb\udcff.png".encode(errors="surrogateescape")
    assert digest_names(iter(names)) == hashlib.sha256(text).hexdigest()


def test_names_are_hashed_in_little_memory():
    tracemalloc.start()
    try:
        digest_names(f"{number}.png" for number in range(2000))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50_000


def test_many_inputs_are_protected(tmp_path, wording):
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for path in paths[:4]:
        path.write_bytes(b"x")
    link, moved_folder = tmp_path / "link", tmp_path / "moved"
    with guard.guard_inputs():
        with guard.guard_inputs():
            guard.add_input_files(5, paths.__getitem__)
        link.hardlink_to(paths[2])
        for path in (paths[0], paths[3], link):
            with pytest.raises(ExportError) as refusal:
                guard.refuse_output(path)
            wording.check(refusal.value)
        guard.refuse_output(paths[4])
        moved_folder.hardlink_to(paths[1])
        paths[1].unlink()
        guard.refuse_output(moved_folder)  # no input leads to it any more
    guard.refuse_output(paths[0])


def measure_held_bytes(model, listing, monkeypatch):
    """Bytes that Python holds at the end of the pass over the images of a list."""
    sizes = []
    read_statistics = one_pass._PassState.statistics

    def looked(self):
        gc.collect()
        traces = tracemalloc.take_snapshot().traces
        # the table of interned strings, which now and then is made again as a whole
        sizes.append(sum(t.size for t in traces if "pathlib" not in str(t) or t.size < 1 << 17))
        return read_statistics(self)

    with monkeypatch.context() as patched:
        patched.setattr(one_pass._PassState, "statistics", looked)
        tracemalloc.start()
        try:
            calibrate(model, listing, threads=1)
        finally:
            tracemalloc.stop()
    return sizes[0]


@pytest.mark.slow
def test_memory_hardly_grows_with_images(small_cnn, tmp_path, monkeypatch, rng):
    small_count, large_count = 100, 700
    for number in range(8):
        cv2.imwrite(str(tmp_path / f"{number}.png"), rng.integers(0, 255, (16, 16, 3), np.uint8))
    for number in range(large_count):
        (tmp_path / f"{number:08}.png").hardlink_to(tmp_path / f"{number % 8}.png")
    lists = [tmp_path / f"{count}.txt" for count in (small_count, large_count)]
    for path, count in zip(lists, (small_count, large_count), strict=True):
        path.write_text("".join(f"{number:08}.png\n" for number in range(count)))
    measure_held_bytes(small_cnn, lists[0], monkeypatch)  # what is imported and cached but once
    small_size, large_size = (measure_held_bytes(small_cnn, paths, monkeypatch) for paths in lists)
    assert (large_size - small_size) / (large_count - small_count) < MAX_BYTES_PER_IMAGE
