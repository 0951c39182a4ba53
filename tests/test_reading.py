"""Files are read once, through one door, and are what was hashed."""

import ast
import gc
import io
import json
import os
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

import deploy.feed.feed
import deploy.pipeline
import deploy.pipeline.calibration_run
import deploy.pipeline.calibration_setup
from deploy.calibration import fingerprint, one_pass
from deploy.calibration.observation import CalibrationSubject
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.store import sidecars
from deploy.errors import ConfigError, ExportError, FeedError, ModelError
from deploy.feed import images, pixels
from deploy.feed.feed import open_feed
from deploy.feed.file_list import FileList, ImageFile, SampleChangedError, SampleDigests
from deploy.feed.preprocess import Preprocess
from deploy.feed.sampling import names_digest
from deploy.files.reading import (
    MOST_NESTING,
    add_input_files,
    array_header,
    check_archive,
    from_json,
    guard_inputs,
    is_text,
    is_too_nested,
    open_regular_file,
    read_array,
    read_bytes,
    read_json,
    read_text,
    refuse_irregular,
    refuse_output,
)
from deploy.frontends import load
from deploy.pipeline import build, calibrate
from deploy.targets.ascend.target import Ascend
from deploy.tensors import TensorSpec
from deploy.tuning.search_options import Tuning

# --- The one door through which bytes of files come in, and archives of arrays.
PLAN = {"what": "a plan", "error": ConfigError}
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("read", [read_bytes, read_text, read_json, refuse_irregular])
@pytest.mark.parametrize(
    ("kind", "said"),
    [("nothing", "nothing there"), ("folder", "got a folder"), ("pipe", "a device or pipe"),
     ("device", "a device or pipe"), ("NUL", "null"), ("long", "name too long")],
)  # fmt: skip
def test_what_is_no_regular_file_is_refused_and_never_waited_for(read, kind, said, tmp_path):
    path = {"device": "/dev/zero", "NUL": "a\0b", "long": "a" * 5000}.get(kind, tmp_path / "x")
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match="must be a plan") as caught:
        read(path, **PLAN)
    assert said in str(caught.value).lower()


def test_a_file_is_read_within_its_budget_whatever_it_claims(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_bytes(path, **PLAN, most=5) == b"12345"
    with pytest.raises(ConfigError, match="a plan of at most 4 B, got 5 B"):
        read_bytes(path, **PLAN, most=4)
    with path.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(ConfigError, match="of at most 64 MiB, got 1024 GiB"):
        read_text(path, **PLAN)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_a_file_that_tells_no_size_keeps_to_its_budget_too():
    assert b"Name" in read_bytes("/proc/self/status", **PLAN)
    with pytest.raises(ConfigError, match="of at most 3 B"):
        read_bytes("/proc/self/status", **PLAN, most=3)


def test_what_was_read_is_an_input_unless_it_is_the_runs_own(tmp_path):
    path, cache = tmp_path / "x", tmp_path / "cache"
    path.write_text("{}")
    cache.write_text("{}")
    with guard_inputs():
        read_json(path, **PLAN)
        read_json(cache, **PLAN, own=True)
        refuse_output(cache)
        with pytest.raises(ExportError, match="must not be an input"):
            refuse_output(path)


def test_an_error_of_the_disk_while_reading_is_a_sentence(tmp_path):
    (tmp_path / "x").write_bytes(b"1")
    broken = pytest.raises(ConfigError, match="that can be read, got: Input/output error")
    with broken, open_regular_file(tmp_path / "x", **PLAN):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\xed\xa0\x80"])
def test_text_is_utf_8(data, tmp_path):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ConfigError, match="a plan in UTF-8"):
        read_text(tmp_path / "x", **PLAN)
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa")
    assert read_text(tmp_path / "x", **PLAN) == "a"


DEEP = MOST_NESTING + 1


@pytest.mark.parametrize(
    "text",
    ["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, '[{"a":' * DEEP + "}]" * DEEP,
     "[" * 1_000_000, '["\\"",' * DEEP + "1" + "]" * DEEP, "[1," * DEEP + "[],{}" + "]" * DEEP],
)  # fmt: skip
def test_json_that_is_nested_deeper_than_anything_sane_is_refused(text):
    with pytest.raises(ConfigError, match="over 64 nested brackets"):
        from_json(text, rule="it must be", error=ConfigError)


@pytest.mark.parametrize(
    "value",
    ["[" * 1000, '\\"[' * 1000, [[]] * 1000, {"[": {"{": ["\\", '"[[']}}, 3,
     {str(i): [{"]": i}] for i in range(1000)}],
)  # fmt: skip
def test_brackets_side_by_side_and_in_strings_are_no_nesting(value):
    assert from_json(json.dumps(value), rule="", error=ConfigError) == value


def test_as_deep_as_is_allowed_is_read():
    text = "[" * MOST_NESTING + "]" * MOST_NESTING
    assert not is_too_nested(text) and is_too_nested(f"[{text}]")


@pytest.mark.parametrize("text", ["", "{", "]" * 1000, "1" * 5000, "nul", '"\\', "[1 2]"])
def test_what_is_no_json_is_one_sentence(text):
    with pytest.raises(ConfigError, match="it must be, got invalid JSON"):
        from_json(text, rule="it must be", error=ConfigError)


def npy(array):
    held = io.BytesIO()
    np.lib.format.write_array(held, array, allow_pickle=True)
    return held.getvalue()


def header(text):
    written = f"{text}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(written).to_bytes(2, "little") + written


@pytest.mark.parametrize(
    "data",
    [header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 9)}") + bytes(99),
     header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}") + bytes(4),
     header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}") + bytes(8),
     npy(np.array([print], object)), b"\x93NUMPY\x09\x00", b"", b"PK"],
)  # fmt: skip
def test_an_array_is_no_larger_than_its_bytes(data):
    with pytest.raises(ValueError):
        read_array(io.BytesIO(data), len(data))


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.eye(3)),
                                   np.zeros((0, 2), np.int8), np.array(3)])  # fmt: skip
def test_arrays_are_read_as_they_were_written(array):
    data = npy(array)
    found = read_array(io.BytesIO(data), len(data))
    assert found.dtype == array.dtype and np.array_equal(found, array)
    assert array_header(io.BytesIO(data), len(data))[0] == array.shape


def archive(entries, size=10, kind=zipfile.ZIP_DEFLATED):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", kind) as made:
        for number in range(entries):
            made.writestr(f"{number}.npy", bytes(size))
    held.seek(0)
    return held


def test_a_bomb_is_refused_before_it_is_unpacked():
    file = archive(3, size=1 << 20)
    assert len(file.getvalue()) < 10_000
    with pytest.raises(FeedError, match=r"x must be arrays of .* got 3 and 3 MiB"):
        check_archive(file, "x", what="arrays", error=FeedError, most=3 << 20 - 1)
    with pytest.raises(FeedError, match="at most 2 entries"):
        check_archive(file, "x", what="arrays", error=FeedError, entries=2)
    check_archive(file, "x", what="arrays", error=FeedError)
    assert file.tell() == 0


def test_a_table_of_contents_of_gigabytes_is_not_looked_at(monkeypatch):
    file = archive(3)
    monkeypatch.setattr("deploy.files.reading._MOST_LISTING", 100)
    monkeypatch.setattr("zipfile.ZipFile", None)
    with pytest.raises(FeedError, match="of names alone"):
        check_archive(file, "x", what="arrays", error=FeedError)


def test_a_path_that_is_no_text_is_told_from_one_that_is():
    assert is_text("a/b") and is_text(Path("é")) and not is_text(os.fsdecode(b"a\xff"))
    code = "import os; from deploy.files.reading import is_text;"
    code += " print(is_text(os.fsdecode(b'\\xc3\\xa9')))"
    for encoding, right in (("C", "False"), ("C.UTF-8", "True")):
        own = {**os.environ, "LC_ALL": encoding, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=own, capture_output=True, text=True, cwd=ROOT
        )
        assert done.stdout.strip() == right, done.stderr


# Where bytes of files come in by another door, and why: what the program made itself, the system's
# own, and the decoder's file (`deploy.feed.images`), which keeps its own rules.
ELSEWHERE = {
    "deploy.cli": "where what stdout did not take goes",
    "deploy.feed.array_files": "maps of what was opened, and of its own temporary files",
    "deploy.feed.images": "pictures",
    "deploy.files.atomic": "descriptors of what it writes, and those that hold locks",
    "deploy.machine": "the system's description of the processor",
    "deploy.runtimes.openvino": "its own temporary files, in its own process",
    "deploy.analysis.comparison": "its own temporary files",
    "deploy.pipeline.evaluate": "what was built a moment ago",
    "deploy.runtimes.ort": "ONNX Runtime's trace in a temporary folder",
    "deploy.files.reading": "the door itself",
    "deploy.pipeline.results": "what was built a moment ago",
    "deploy.files.staging": "its own files, as it moves them",
    "deploy.standins.memory": "the memory of this very process",
    "deploy.targets.tensorrt.engines": "what was built a moment ago",
}  # fmt: skip
DOORS = {"read_bytes", "read_text", "fromfile", "memmap"}
OPENED = {"np.load", "np.memmap", "onnx.load", "torch.load", "os.open", "io.open", "path.open"}
ENDS = DOORS | {"open", "load", "memmap"}


def doors(module):
    """Calls in a module that open files by themselves."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            last = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            called = ast.unparse(node.func) if last in ENDS else ""
            method = called.rpartition(".")[2] if "." in called else ""
            opens = called == "open" or called in OPENED
            if method in DOORS or opens:
                yield f"{called} in line {node.lineno}"


@pytest.mark.slow
def test_files_are_read_through_one_door():
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): list(doors(path))
        for path in (ROOT / "deploy").rglob("*.py")
    }
    found = {name: calls for name, calls in found.items() if calls}
    by = {"deploy.fx.source": 1}  # torch.load of a file that was opened
    wrong = {n: c for n, c in found.items() if n not in ELSEWHERE and len(c) > by.get(n, 0)}
    assert not wrong, f"read with deploy.files.reading: {wrong}"
    assert set(ELSEWHERE) <= set(found), f"excepted for nothing: {set(ELSEWHERE) - set(found)}"


@pytest.mark.parametrize("header", [b"{'descr': '<f4', (", b'{\'descr\': """', b"{" * 60, b"\\"])
def test_a_damaged_header_of_an_array_is_no_fault(header, tmp_path):
    padded = header.ljust(118) + b"\n"
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded)
    with path.open("rb") as stream, pytest.raises(ValueError):
        array_header(stream, 1 << 20)


# --- What was hashed is what was used: images read once, and the same whenever they are read
# again.
UNIT = Preprocess(size=(16, 16))
IMAGE = TensorSpec("x", "float32", ("n", 3, 16, 16))
ROWS = np.random.default_rng(3).standard_normal((20, 3, 16, 16)).astype(np.float32)


@pytest.fixture
def photos(pictures, tmp_path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(pictures, tmp_path / "photos"))


@pytest.fixture
def reads(monkeypatch) -> Counter:
    """File name -> how often it was read."""
    counted: Counter[str] = Counter()
    own = images.read_image_file

    def read(picture):
        counted[picture.path.name] += 1
        return own(picture)

    monkeypatch.setattr(images, "read_image_file", read)
    return counted


def swap(folder: Path, name: str = "11.png") -> None:
    """Another picture under the name of one."""
    shutil.copy(folder / "00.png", folder / name)


def between(monkeypatch, module, function: str, act) -> None:
    """Do something before a step of the line."""
    own = getattr(module, function)

    def step(*given, **named):
        act()
        return own(*given, **named)

    monkeypatch.setattr(module, function, step)


# ---- read once ------------------------------------------------------------------------------


def test_where_no_cache_is_judged_each_image_is_read_once(small_cnn, photos, tmp_path, reads):
    cache = tmp_path / "c"
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    assert len(reads) == 20 and set(reads.values()) == {1}
    made = [p.read_bytes() for p in (cache, *sidecars(cache))]
    reads.clear()
    calibrate(small_cnn, photos, preprocess=UNIT, cache=CachePolicy(path=cache, refresh=True))
    assert len(reads) == 20 and set(reads.values()) == {1}
    assert made == [p.read_bytes() for p in (cache, *sidecars(cache))]
    reads.clear()
    assert calibrate(small_cnn, photos, preprocess=UNIT, cache=cache).reused
    assert len(reads) == 20 and sum(reads.values()) == 24  # for their digests, and four to look at


def test_a_whole_build_reads_each_image_once(small_cnn, photos, tmp_path, reads):
    build(small_cnn, photos, preprocess=UNIT, out=tmp_path / "o", duration_s=0)
    assert len(reads) == 20 and set(reads.values()) == {1}


def test_digests_of_the_pass_are_those_of_a_reading_beforehand(photos):
    early, late = (open_feed(photos, [IMAGE], preprocess=UNIT) for _ in range(2))
    before = early.manifest()
    with late.samples() as samples:
        assert len(list(samples)) == 20
    assert late.manifest() == before


# ---- changed meanwhile ----------------------------------------------------------------------

CHANGED = r"11\.png changed while calib8 ran.*run again"


def test_an_image_changed_between_hashing_and_decoding_is_told(photos):
    feed = open_feed(photos, [IMAGE], preprocess=UNIT)
    feed.manifest()
    swap(photos)
    with pytest.raises(FeedError, match="image " + CHANGED), feed.samples() as samples:
        list(samples)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_second_pass_over_another_image_is_told(photos, skip_bad):
    feed = open_feed(photos, [IMAGE], preprocess=UNIT, skip_bad=skip_bad)
    with feed.samples() as samples:
        list(samples)
    (photos / "11.png").write_bytes(b"no picture")
    with pytest.raises(FeedError, match=CHANGED), feed.samples() as samples:
        list(samples)
    (photos / "11.png").unlink()
    with pytest.raises(FeedError, match=CHANGED):
        list(feed.spread(20))


def test_what_was_skipped_stays_skipped(photos):
    good = (photos / "11.png").read_bytes()
    (photos / "11.png").write_bytes(b"no picture")
    feed = open_feed(photos, [IMAGE], preprocess=UNIT, skip_bad=True)
    for _ in range(2):
        with feed.samples() as samples:
            assert len(list(samples)) == len(feed.names) == 19
        (photos / "11.png").write_bytes(good)
    (photos / "11.png").write_bytes(b"another one")
    other = open_feed(photos, [IMAGE], preprocess=UNIT, skip_bad=True)
    assert other.manifest()["sha256"] != feed.manifest()["sha256"]  # counts by its bytes


def test_a_cache_made_of_one_image_never_serves_another(small_cnn, photos, tmp_path, monkeypatch):
    cache = tmp_path / "c"
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    between(monkeypatch, deploy.pipeline.calibration_run, "_completed", lambda: swap(photos))
    with pytest.raises(FeedError, match=CHANGED):  # hashed to judge the cache, decoded later
        calibrate(
            small_cnn, photos, preprocess=UNIT, cache=cache, method="legacy", targets=["tensorrt"]
        )


def test_evaluation_images_are_held_to_it_too(small_cnn, photos, pictures, tmp_path, monkeypatch):
    feeds = []
    own = deploy.feed.feed.open_feed
    monkeypatch.setattr(
        deploy.feed.feed,
        "open_feed",
        lambda *a, **k: feeds.append(own(*a, **k)) or feeds[-1],
    )
    swapping = lambda: (feeds[0].manifest(), swap(photos))  # noqa: E731
    between(monkeypatch, deploy.pipeline, "search_targets", swapping)
    with pytest.raises(FeedError, match=CHANGED):
        build(
            small_cnn, pictures, preprocess=UNIT, out=tmp_path / "o", eval_images=photos,
            duration_s=0, tuning=Tuning(effort=0),
        )  # fmt: skip


def of_changed(*_, **__):
    raise SampleChangedError("image 11.png changed while calib8 ran; run again")


def test_the_search_does_not_pass_over_it(small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.tuning.search_samples.observe", of_changed)
    with pytest.raises(FeedError, match=CHANGED):
        build(small_cnn, pictures, preprocess=UNIT, out=tmp_path / "o", duration_s=0)
    assert not list((tmp_path / "o").glob("*.onnx"))


def test_it_is_no_failure_of_one_target(small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(Ascend, "build", of_changed)
    with pytest.raises(FeedError, match=CHANGED):
        build(
            small_cnn, pictures, preprocess=UNIT, out=tmp_path / "o", duration_s=0,
            targets=["onnxruntime", "ascend"], tuning=Tuning(effort=0),
        )  # fmt: skip


def test_arrays_are_copied_and_held_to_it(small_cnn):
    rows = [row.copy() for row in ROWS[:12]]
    feed = open_feed(rows, [IMAGE])
    (first,) = feed.first(1)
    rows[0][...] = 0
    assert np.array_equal(first["x"][0], ROWS[0])
    with feed.samples() as samples:
        list(samples)
    rows[11][...] = 0
    with (
        pytest.raises(FeedError, match="sample 11 of the iterable changed while calib8 ran"),
        feed.samples() as samples,
    ):
        list(samples)


# ---- order, names, folder or list -----------------------------------------------------------


@pytest.fixture
def turned(photos) -> Path:
    """A list of the same pictures under other names, in another order."""
    other = photos.parent / "others"
    other.mkdir()
    for path in photos.iterdir():
        shutil.copy(path, other / f"{99 - int(path.stem)}.png")
    listing = other / "list.txt"
    listing.write_text("".join(f"{p.name}\n" for p in sorted(other.glob("*.png"))))
    return listing


def test_order_and_names_do_not_matter_to_what_has_no_order(small_cnn, photos, turned, tmp_path):
    cache = tmp_path / "c"
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    made = [p.read_bytes() for p in (cache, *sidecars(cache))]
    again = calibrate(small_cnn, turned, preprocess=UNIT, cache=cache)
    assert again.reused and "are the same" in again.reason
    assert made == [p.read_bytes() for p in (cache, *sidecars(cache))]


def test_what_goes_by_the_order_is_observed_again(small_cnn, photos, turned, tmp_path):
    cache, both = tmp_path / "c", ("onnxruntime", "ascend")
    first = calibrate(small_cnn, photos, preprocess=UNIT, cache=cache, targets=both)
    again = calibrate(small_cnn, turned, preprocess=UNIT, cache=cache, targets=both)
    assert not again.reused and set(again.observed_now) == {
        o for o in first.observations if o.statistic.ordered
    }
    assert "the order of the images" in again.reason
    fresh = calibrate(small_cnn, turned, preprocess=UNIT, cache=tmp_path / "d", targets=both)
    for o in fresh.observations:
        mine, theirs = (c.ranges.observed.of(o).to_arrays() for c in (again, fresh))
        assert all(np.array_equal(mine[key], theirs[key]) for key in theirs), o.key
    assert calibrate(small_cnn, turned, preprocess=UNIT, cache=cache, targets=both).reused


def test_no_observation_of_another_order_is_carried_along(small_cnn, photos, turned, tmp_path):
    cache = tmp_path / "c"
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache, targets=["ascend"])
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    rule = {"method": "entropy-tensorrt", "targets": ["onnxruntime"]}
    calibrate(small_cnn, turned, preprocess=UNIT, cache=cache, **rule)  # goes by the new order
    assert calibrate(small_cnn, turned, preprocess=UNIT, cache=cache, **rule).reused
    assert calibrate(small_cnn, photos, preprocess=UNIT, cache=cache).reused  # a plain histogram
    ascend = calibrate(small_cnn, turned, preprocess=UNIT, cache=cache, targets=["ascend"])
    assert not ascend.reused  # kept of the first order alone, so no longer kept
    assert not calibrate(small_cnn, photos, preprocess=UNIT, cache=cache, **rule).reused


def test_a_cache_of_an_older_form_is_told_and_made_anew(small_cnn, photos, tmp_path):
    cache = tmp_path / "c"
    calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    side = sidecars(cache)[0]
    document = json.loads(side.read_text())
    document["schema"] = 2
    side.write_text(json.dumps(document))
    again = calibrate(small_cnn, photos, preprocess=UNIT, cache=cache)
    assert not again.reused and "not a fingerprint" in again.reason


def test_another_decoder_is_told_and_arrays_have_none(small_cnn, photos, tmp_path, monkeypatch):
    calibrate(small_cnn, photos, preprocess=UNIT, cache=tmp_path / "p")
    calibrate(small_cnn, list(ROWS), cache=tmp_path / "r")
    monkeypatch.setattr(images.opencv(), "__version__", "9.9.9")  # which gives the same pixels
    again = calibrate(small_cnn, photos, preprocess=UNIT, cache=tmp_path / "p")
    assert again.reused and "decoder OpenCV 5" in again.reason
    other = {**pixels.decoder_digests(), "webp": "0" * 16}
    monkeypatch.setattr(pixels, "decoder_digests", lambda: other)
    again = calibrate(small_cnn, photos, preprocess=UNIT, cache=tmp_path / "p")
    assert not again.reused and "the decoder changed (" in again.reason and "webp" in again.reason
    monkeypatch.setattr(fingerprint, "DECODING_VERSION", 99)
    again = calibrate(small_cnn, photos, preprocess=UNIT, cache=tmp_path / "p")
    assert not again.reused and again.reason.endswith("(decoding 1 -> 99)")
    assert calibrate(small_cnn, list(ROWS), cache=tmp_path / "r").reused


# ---- the model ------------------------------------------------------------------------------


def other_weights(path: Path) -> onnx.ModelProto:
    """The model with its weights negated."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = -onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


@pytest.fixture(params=["one file", "external data"])
def model(small_cnn, tmp_path, request) -> Path:
    path = tmp_path / "m.onnx"
    if request.param == "one file":
        shutil.copy(small_cnn, path)
    else:
        onnx.save(
            onnx.load(small_cnn), path, save_as_external_data=True, location="m.bin",
            size_threshold=0,
        )  # fmt: skip
    return path


def replaced(path: Path) -> None:
    """Other weights at the same place; the file itself stays where they are beside it."""
    beside = path.with_suffix(".bin")
    graph = path.read_bytes()
    if not beside.exists():
        return onnx.save(other_weights(path), path)
    other = other_weights(path)
    beside.unlink()
    onnx.save(other, path, save_as_external_data=True, location="m.bin", size_threshold=0)
    assert path.read_bytes() == graph
    return None


def test_a_model_replaced_while_it_is_built_is_told(model, pictures, tmp_path, monkeypatch):
    between(monkeypatch, deploy.pipeline, "build_targets", lambda: replaced(model))
    with pytest.raises(ModelError, match=r"m\.onnx changed while calib8 ran.*run again"):
        build(
            model, pictures, preprocess=UNIT, out=tmp_path / "o", duration_s=0,
            tuning=Tuning(effort=0),
        )  # fmt: skip


def test_a_model_replaced_before_it_is_read_unfolded_is_told(model, pictures, monkeypatch):
    between(monkeypatch, deploy.pipeline.calibration_setup, "_demands", lambda: replaced(model))
    with pytest.raises(ModelError, match="changed while calib8 ran"):
        calibrate(model, pictures, preprocess=UNIT, targets=["tensorrt"], method="legacy")


def test_the_graph_that_names_a_cache_is_the_one_that_was_loaded(small_cnn, tmp_path):
    path = Path(shutil.copy(small_cnn, tmp_path / "m.onnx"))
    before, after = (CalibrationSubject(loaded=load(path), given=path, samples=1) for _ in range(2))
    assert len(before.original.graph.node) == len(onnx.load(path).graph.node)
    replaced(path)
    with pytest.raises(ModelError, match="changed while calib8 ran"):
        _ = after.original


def test_the_float_model_is_the_file_with_all_its_weights(model, pictures, tmp_path):
    report = build(
        model, pictures, preprocess=UNIT, out=tmp_path / "o", duration_s=0, tuning=Tuning(effort=0)
    )
    reference, engine = report.engines
    assert reference.size_bytes > engine.size_bytes > 0
    assert engine.accuracy.outputs[0].sqnr_db > 20


# --- Names, inodes and digests of very many images, in about the bytes that they have.
MOST = 130  # bytes an image, of which the name has 12; half a kilobyte and more were taken once

names = st.lists(st.text(st.characters(), max_size=12), max_size=9)


@given(names, st.booleans())
def test_a_listing_is_the_files_that_it_was_given(given_names, labelled):
    labels = [number * 7 for number in range(len(given_names))] if labelled else None
    listing = FileList("there", given_names, labels)
    wanted = [
        ImageFile(Path("there") / name, name, None if labels is None else labels[number])
        for number, name in enumerate(given_names)
    ]
    assert list(listing) == wanted and len(listing) == len(wanted) and listing[1:] == wanted[1:]
    assert listing.labels == (tuple(labels) if labels else None if given_names else ())
    if wanted:
        assert listing[-1] == wanted[-1] and listing.path(0) == wanted[0].path


def test_a_name_that_is_no_text_comes_back():
    odd = [b"\xff\xfe.png".decode(errors="surrogateescape"), "\ud800", "/whole/path.png", ""]
    listing = FileList("there", odd)
    assert [listing.name(k) for k in range(4)] == odd and str(listing.path(2)) == odd[2]
    with pytest.raises(IndexError):
        listing[4]


def test_one_label_that_lacks_is_none_of_all():
    listing = FileList("", ["a", "b"], [3, 4])
    assert listing.labels == (3, 4)
    listing.add("c")
    assert listing.labels is None and listing[2].label is None


def test_digests_are_combined_in_their_order_and_sorted():
    """As hashing them one behind the other gave, so that a cache stays fitting."""
    import hashlib

    digests = [hashlib.sha256(bytes([n])).digest() for n in range(40)]
    digests[7] = digests[7][:-1] + b"\0"  # what numpy's strings leave out at the end
    seen, order = SampleDigests(60), [3, 7, 0, 39, 12]
    for number, digest in enumerate(digests):
        seen.note(number, digest, "it")
    for by_size, wanted in ((False, list), (True, sorted)):
        own = b"".join(wanted(digests[n] for n in order))
        assert seen.combined(order, by_size=by_size) == hashlib.sha256(own).hexdigest()
    assert list(seen.hex(order)) == [digests[n].hex() for n in order]
    assert 39 in seen and 40 not in seen


def test_names_have_one_digest_however_they_are_joined():
    import hashlib

    listed = ["a/b.png", "c.png", "b\udcff.png"]
    text = "b.png\nc.png\nb\udcff.png".encode(errors="surrogateescape")
    assert names_digest(iter(listed)) == hashlib.sha256(text).hexdigest()


def test_of_many_inputs_none_is_written_and_a_lost_one_is_none(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for path in paths[:4]:
        path.write_bytes(b"x")
    with guard_inputs():
        with guard_inputs():
            add_input_files(5, paths.__getitem__)
        (tmp_path / "link").hardlink_to(paths[2])
        for path in (paths[0], paths[3], tmp_path / "link"):
            with pytest.raises(ExportError, match="must not be an input"):
                refuse_output(path)
        refuse_output(paths[4])
        (tmp_path / "moved").hardlink_to(paths[1])
        paths[1].unlink()
        refuse_output(tmp_path / "moved")  # no input leads to it any more
    refuse_output(paths[0])


def held(model, listing, monkeypatch):
    """Bytes that Python holds at the end of the pass over the images of a list."""
    found = []
    whole = one_pass._Pass.whole

    def looked(self):
        gc.collect()
        traces = tracemalloc.take_snapshot().traces
        # the table of interned strings, which now and then is made anew as a whole
        found.append(sum(t.size for t in traces if "pathlib" not in str(t) or t.size < 1 << 17))
        return whole(self)

    with monkeypatch.context() as patched:
        patched.setattr(one_pass._Pass, "whole", looked)
        tracemalloc.start()
        try:
            calibrate(model, listing, threads=1)
        finally:
            tracemalloc.stop()
    return found[0]


@pytest.mark.slow
def test_memory_hardly_grows_with_the_images(small_cnn, tmp_path, monkeypatch):
    few, many = 100, 700
    rng = np.random.default_rng(0)
    for number in range(8):
        made = rng.integers(0, 255, (16, 16, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f"{number}.png"), made)
    for number in range(many):
        (tmp_path / f"{number:08}.png").hardlink_to(tmp_path / f"{number % 8}.png")
    lists = []
    for count in (few, many):
        lists.append(tmp_path / f"{count}.txt")
        lists[-1].write_text("".join(f"{number:08}.png\n" for number in range(count)))
    held(small_cnn, lists[0], monkeypatch)  # what is imported and cached but once
    less, more = (held(small_cnn, one, monkeypatch) for one in lists)
    assert (more - less) / (many - few) < MOST
