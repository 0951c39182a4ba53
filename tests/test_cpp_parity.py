"""The C++ library and this one: the same batches, histograms, indices, caches and words."""

import hashlib
import json
import os
import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array

from calib8 import calibrate
from calibrators.entropy import entropy
from calibrators.entropy import search_bins as entropy_index
from calibrators.histogram import Histogram
from calibrators.searches import SEARCHES
from deploy.calibration import fingerprint, store, trt_cache
from deploy.calibration.fingerprint import Fingerprint
from deploy.errors import CacheError, Calib8Error
from deploy.feed.feed import open_feed
from deploy.feed.preprocess import PRESETS, Preprocess
from deploy.frontends.base import model_digest
from deploy.frontends.checks import check_fields
from deploy.frontends.onnx_reader import read_model_and_digests
from deploy.metrics.latency import DeviceTimes, measure
from deploy.tensors import TensorSpec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "caches"
THIRD_PARTY = ROOT.parent / "shared" / "golden" / "tensorrt"
PHOTOS = ROOT / "datasets" / "fashion" / "calib"
SPEC = TensorSpec("image", "float32", ("n", 3, 56, 64))


def outcome(make, *arguments, **options):
    """Return the result of `make`, or its error as the C++ program answers it."""
    try:
        return make(*arguments, **options)
    except Calib8Error as error:
        return {"error": type(error).__name__, "message": str(error)}


def answer_of(feed, shapes):
    """Return the C++ program's answer for this feed; it has no note on pictures of 16 bits."""
    notes = [note for note in feed.notes if "16 bits a channel" not in note]
    return {
        "shapes": shapes,
        "size": len(feed),
        "labels": list(feed.labels) if feed.labels is not None else None,
        "names": list(feed.names),
        "skipped": list(feed.skipped),
        "notes": notes,
        "manifest": feed.manifest(),
    }


@pytest.fixture(scope="module")
def photos(cpp, tmp_path_factory):
    """100 pictures of all kinds: sizes, formats, grey, alpha, 16 bits, noise and smooth."""
    if not cpp.reads_images:
        pytest.skip("this C++ library was built without OpenCV")
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(7)
    for index in range(100):
        height, width = (int(v) for v in rng.integers(8, 400, 2))
        channels = [3, 3, 3, 1, 4][index % 5]
        small = rng.integers(0, 256, (max(2, height // 9), max(2, width // 9), channels))
        image = cv2.resize(small.astype(np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
        suffix = [".jpg", ".png", ".bmp", ".PNG", ".jpeg", ".tiff"][index % 6]
        if index % 12 == 1:
            image = image.astype(np.uint16) * 257
        if suffix in (".jpg", ".jpeg", ".bmp") and image.ndim == 3 and image.shape[2] == 4:
            image = image[:, :, :3]
        name = folder / f"set {index % 3}" / f"p{index:03d}{suffix}"
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(cv2.imencode(suffix.lower(), image)[1].tobytes())
    return folder


def ask_feed(cpp, out, source, *specs, **options):
    """Return the C++ library's answer for a feed, whose samples it writes to a file."""
    spec = [{"name": s.name, "dtype": s.dtype, "shape": s.shape} for s in specs]
    feed_options = (
        dict.fromkeys(("preset", "options", "limit", "threads")) | {"skip_bad": False} | options
    )
    answer = cpp("feed", source=str(source), spec=spec, out=str(out), **feed_options)
    # C++ names its own option in front of that of the command line.
    text = json.dumps(answer).replace("(skip_bad)", "(--skip-bad)")
    return json.loads(text)


def samples_of(feed, name="image"):
    with feed.samples() as stream:
        return [sample[name] for sample in stream]


def feed_answer(listing, **options):
    feed = open_feed(listing, [SPEC], **options)
    return answer_of(feed, [list(sample.shape) for sample in samples_of(feed)])


def steps_apart(ours, theirs, preprocess):
    """Return the distances of two batches in pixel steps of 1/255 of the range; one a value."""
    step = np.float32(preprocess.scale) / np.asarray(preprocess.std, np.float32)
    axis = [1, -1, 1, 1] if preprocess.layout == "nchw" else [1, 1, 1, -1]
    return np.abs(ours.astype(np.float64) - theirs) / step.astype(np.float64).reshape(axis)


@pytest.mark.parametrize("suffix", [".png", ".pgm", ".tiff"])
def test_16_bit_grey_pictures_are_refused(cpp, photos, tmp_path, suffix):
    cv2.imwrite(str(tmp_path / f"deep{suffix}"), np.full((56, 64), 7000, np.uint16))
    spec = TensorSpec("image", "float32", ("n", 1, 56, 64))
    options = {"preset": "unit", "options": {"scale": 1.0}}
    answer = ask_feed(cpp, tmp_path / "out", tmp_path, spec, **options)
    reason = "has more than 8 bits a pixel, which only calib8 for Python feeds"
    assert reason in answer["message"]
    assert ask_feed(cpp, tmp_path / "out", tmp_path, spec, preset="unit")["size"] == 1


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_batches_agree(cpp, photos, tmp_path, name):
    chosen = PRESETS[name]
    spec = TensorSpec("image", "float32", ("n", 1 if chosen.color == "grey" else 3, 56, 64))
    feed = open_feed(photos, [spec], preprocess=chosen)
    ours = np.concatenate(samples_of(feed))
    answer = ask_feed(cpp, tmp_path / "batch.f32", photos, spec, preset=name)
    theirs = np.fromfile(tmp_path / "batch.f32", np.float32).reshape(ours.shape)
    assert answer == answer_of(feed, [[1, *ours.shape[1:]]] * 100)
    steps = steps_apart(ours, theirs, feed.preprocess)
    differ = int((ours.view(np.uint32) != theirs.view(np.uint32)).sum())
    print(f"{name}: {differ} of {ours.size} values differ, at most {steps.max():.3f} steps")
    # none between OpenCV 4.6 and 5.0; another version may round a resized pixel by one
    assert steps.max() <= 1.001, f"{differ} of {ours.size} values differ, by {steps.max()} steps"
    assert differ <= 0.001 * ours.size, f"{differ} of {ours.size} values differ"


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("color", ["rgb", "bgr", "grey"])
def test_unresized_batches_are_bit_equal(cpp, photos, tmp_path, color, layout):
    rng = np.random.default_rng(1)
    for index in range(3):
        pixels = rng.integers(0, 256, (40, 48, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f"{index}.png"), pixels)
    channels = 1 if color == "grey" else 3
    dims = (channels, 40, 48) if layout == "nchw" else (40, 48, channels)
    spec = TensorSpec("image", "float32", (2, *dims))
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
    chosen = Preprocess(color=color, layout=layout, mean=mean, std=std)
    feed = open_feed(tmp_path, [spec], preprocess=chosen)
    ours = np.concatenate(samples_of(feed))
    answer = ask_feed(cpp, tmp_path / "b.f32", tmp_path, spec, options=chosen.to_json())
    assert (tmp_path / "b.f32").read_bytes() == ours.tobytes()
    assert answer == answer_of(feed, [[2, *dims]] * 2)
    assert len(feed) == 2


def by_opencv(answer):
    """An answer without why a PNG cannot be decoded, which OpenCV says, and Python's loader."""
    text = json.dumps(answer, sort_keys=True).replace(
        ", or read the file in a loader (loader.py:function)", ""
    )
    return re.sub(r"(png cannot be decoded \(\d+ bytes), [^)]*\)", r"\1)", text)


def test_bad_lists_have_equal_messages(cpp, photos, tmp_path):
    good = sorted(p for p in photos.rglob("*") if p.suffix == ".png")[0]
    jpeg = sorted(p for p in photos.rglob("*") if p.suffix == ".jpg")[0]
    for name, data in {
        "a b.png": good.read_bytes(),
        "c.jpg": jpeg.read_bytes(),
        "cut.jpg": jpeg.read_bytes()[:-40],
        "cut.png": good.read_bytes()[:-40],
        "crc.png": good.read_bytes()[:-20] + b"x" + good.read_bytes()[-19:],
        "empty.png": b"",
        "text.png": b"hello",
    }.items():
        (tmp_path / name).write_bytes(data)
    contents = [
        b"\xef\xbb\xbfa b.png 3\r\nc.jpg 0\r\n",
        b"# nothing\n",
        b"a b.png\nc.jpg 1\n",
        b"c.jpg dog\n",
        b"nowhere.png\n  nor here.png 7\n",
        b"\xff\xfe",
        *(f"{name}\n".encode() for name in ("cut.jpg", "cut.png", "crc.png", "empty.png")),
        b"text.png\nc.jpg\n",
        "c.jpg 1\ncaf\xe9.png 2\n".encode(),
    ]
    for index, content in enumerate(contents):
        listing = tmp_path / f"list{index}.txt"
        listing.write_bytes(content)
        for skip_bad in (False, True):
            answer = ask_feed(cpp, tmp_path / "x", listing, SPEC, skip_bad=skip_bad)
            assert by_opencv(answer) == by_opencv(
                outcome(feed_answer, listing, skip_bad=skip_bad)
            ), content


def test_pictures_below_the_crop_are_skipped_alike(cpp, photos, tmp_path):
    chosen = Preprocess(resize="short-side", short_side=60)
    feed = open_feed(photos, [SPEC], preprocess=chosen, skip_bad=True)
    shapes = [list(sample.shape) for sample in samples_of(feed)]
    options = chosen.to_json()
    answer = ask_feed(cpp, tmp_path / "x", photos, SPEC, options=options, skip_bad=True)
    assert 0 < len(feed.skipped) < 100
    assert answer == answer_of(feed, shapes)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_decoding_threads_keep_the_batches(cpp, photos, tmp_path, threads):
    paths = sorted(photos.rglob("*.*"))[:40]
    for bad in (7, 8, 25):
        paths[bad] = tmp_path / f"bad{bad}.png"
        paths[bad].write_bytes(b"no picture" * bad)
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{path}\n" for path in paths))
    spec = TensorSpec("image", "float32", (4, 3, 56, 64))
    feed = open_feed(listing, [spec], preprocess=PRESETS["raw"], skip_bad=True)
    ours = np.concatenate(samples_of(feed))
    out = tmp_path / "out.f32"
    answer = ask_feed(cpp, out, listing, spec, preset="raw", skip_bad=True, threads=threads)
    theirs = np.fromfile(out, np.float32).reshape(ours.shape)
    assert steps_apart(ours, theirs, feed.preprocess).max() <= 1.001
    assert answer == answer_of(feed, [list(spec.shape)] * len(feed))
    assert ask_feed(cpp, tmp_path / "x", listing, spec, preset="raw", skip_bad=True) == answer
    assert (tmp_path / "x").read_bytes() == out.read_bytes()
    strict = ask_feed(cpp, out, listing, spec, preset="raw", threads=threads)
    assert strict["message"].startswith(f"image {tmp_path}/bad7.png cannot be decoded")


def test_presets_and_wrong_options_agree(cpp):
    ours = {name: preprocess.to_json() for name, preprocess in PRESETS.items()}
    assert cpp("presets") == ours
    options = [
        {"size": [0, 224]},
        {"size": [224]},
        {"size": "224"},
        {"short_side": 20000},
        {"short_side": 2.5},
        {"mean": [0.1, 0.2]},
        {"color": "grey", "std": [1, 1, 1]},
        {"std": [1.0, 0.0, 1.0]},
        {"std": [1e-60]},
        {"scale": "x"},
        {"scale": [1.0]},
        {"scale": 1e31},
        {"mean": [True]},
        {"mean": [0.25, 1e-7, 3]},
    ]
    for wrong_options in options:
        ours = outcome(
            lambda wrong_options: Preprocess.from_json(wrong_options).to_json(), wrong_options
        )
        assert cpp("preprocess", options=wrong_options) == ours, wrong_options


def tensors():
    rng = np.random.default_rng(3)
    normal = rng.standard_normal(200_000).astype(np.float32)
    yield "normal", [normal[:50_000], normal[50_000:]]
    yield "relu", [np.maximum(normal, 0)]
    yield "grows", [normal[:1000] * np.float32(0.01), normal, normal * np.float32(37.5)]
    yield "sparse", [np.float32([8, 16, 32, 0, 0])]
    yield "constant", [np.full(100, 2.5, np.float32)]
    yield "zeros", [np.zeros(100, np.float32)]
    yield "zeros first", [np.zeros(10, np.float32), normal[:100]]
    yield "heavy", [rng.standard_cauchy(100_000).astype(np.float32)]
    yield "tiny", [normal * np.float32(1e-38)]
    yield "huge", [normal[:5000] * np.float32(1e37)]
    yield "edges", [np.float32([-1, 1, 0.5, -0.5, np.nextafter(np.float32(1), np.float32(2))])]
    yield "infinite", [np.float32([1, np.inf, -np.inf, 0.25])]
    yield "nan", [np.float32([1, np.nan])]


def histogram_of(batches, base=None):
    histogram = Histogram(initial_range=base)
    for batch in batches:
        histogram.observe(batch)
    return histogram


@pytest.mark.parametrize("faithful", [False, True])
@pytest.mark.parametrize("case", list(tensors()), ids=lambda case: case[0])
def test_histograms_and_scales_are_identical(cpp, tmp_path, case, faithful):
    _, batches = case
    finite = batches[0][np.isfinite(batches[0])]
    base = float(np.abs(finite).max()) if faithful else None
    paths = []
    for index, batch in enumerate(batches):
        paths.append(str(tmp_path / f"{index}.f32"))
        batch.tofile(paths[-1])

    def ours():
        histogram = histogram_of(batches, base)
        scale = entropy(histogram)
        figures = {key: getattr(histogram, key) for key in ("full_range", "total", "infinite")}
        ends = ("lo", "hi", "amax", "observed_min", "observed_max", "method")
        figures["scale"] = {key: getattr(scale, key) for key in ends}
        return {"counts": histogram.counts.tolist(), **figures}

    assert cpp("histogram", base=base, batches=paths) == outcome(ours)


def test_entropy_indices_are_identical(cpp, tmp_path):
    rng = np.random.default_rng(5)
    rows = []
    for index in range(40):
        scale = rng.uniform(50, 2000)
        values = np.abs(rng.standard_normal(20_000) * scale)
        if index % 3 == 0:
            values = np.abs(rng.laplace(0, scale / 4, 20_000))
        if index % 4 == 1:
            values = values[: rng.integers(5, 200)]
        clipped = np.minimum(values, 2047).astype(int)
        rows.append(np.bincount(clipped, minlength=2048).astype(np.int64))
    if (THIRD_PARTY / "lenet" / "histograms.npz").exists():
        with np.load(THIRD_PARTY / "lenet" / "histograms.npz") as archive:
            rows += [archive[k].astype(np.int64) for k in archive if archive[k].shape == (2048,)]
    np.stack(rows).tofile(tmp_path / "rows.i64")
    indices = cpp("search", path=str(tmp_path / "rows.i64"))["found"]
    assert indices == [entropy_index(row) for row in rows]


METHODS = [
    ("mse", {}),
    ("minmax", {}),
    *(("percentile", {"percent": p}) for p in (99.99, 100, 51)),
    ("entropy", {}),
    ("entropy-tensorrt", {}),
    ("legacy", {}),
]


def scale_of(name, options, batches, base):
    """The scale by a search; `base` is TensorRT's, the largest value of its first batch."""
    search = SEARCHES[name]
    histogram = histogram_of(batches, base if name == "entropy-tensorrt" else None)
    return search.function(histogram, search.params(**options))


def values_of_all_kinds(count):
    """Tensors of 1 to 3000 values: smooth, one-sided, with heavy tails, on few values, constant."""
    rng = np.random.default_rng(17)
    kinds = [
        lambda n: rng.standard_normal(n),
        lambda n: np.maximum(rng.standard_normal(n), 0),
        lambda n: -np.abs(rng.standard_cauchy(n)),
        lambda n: rng.integers(-5, 6, n) * 0.1,
        lambda n: np.round(rng.standard_normal(n) * 4) / 4,
        lambda n: rng.uniform(-1, 1, n) ** 9,
        lambda n: rng.choice([-1.0, 0.0, 0.5, 127.0, 128.0], n),
        lambda n: np.full(n, rng.choice([-2.5, 0.0, -0.0, 1e-38, 3e38])),
        lambda n: rng.standard_normal(n) * 10.0 ** rng.uniform(-44, 36),
    ]
    for index in range(count):
        yield kinds[index % len(kinds)](int(10 ** rng.uniform(0, 3.5))).astype(np.float32)


def test_every_search_is_bit_equal(cpp, tmp_path):
    rows = list(values_of_all_kinds(int(os.environ.get("CALIB8_HISTOGRAMS", "150"))))
    np.concatenate(rows).tofile(tmp_path / "rows.f32")
    sizes, percents = [row.size for row in rows], [99.99, 100.0, 51.0]
    answer = cpp("scales", path=str(tmp_path / "rows.f32"), sizes=sizes, percents=percents)
    for row, theirs in zip(rows, answer["found"], strict=True):
        base = float(np.abs(row).max())
        for (name, params), theirs_scale in zip(METHODS, theirs, strict=True):
            scale = scale_of(name, params, [row], base)
            ours = {key: repr(getattr(scale, key)) for key in theirs_scale}
            assert {key: repr(value) for key, value in theirs_scale.items()} == ours, (
                name,
                row[:10],
            )


def python_cache(path, origin):
    data = Path(path).read_bytes()
    cache = trt_cache.parse(data, origin=origin)

    def coded(name):
        return name.encode("utf-8", "surrogateescape").hex()

    return {
        "label": cache.header.label,
        "algorithm": cache.header.algorithm,
        "round_trip": trt_cache.dump(cache) == data,
        "entries": [[coded(e.name), e.bits, e.flaw] for e in cache.entries],
        "duplicates": [coded(name) for name in cache.duplicates()],
        "unique": len(cache.scales()),
    }


def agree_on(cpp, path):
    answer = cpp("cache", path=str(path), origin="a.cache")
    assert answer == outcome(lambda: python_cache(path, "a.cache")), Path(path).read_bytes()[:300]
    return "error" not in answer


def test_golden_and_real_caches_agree(cpp):
    expected = json.loads((GOLDEN / "expected.json").read_text())
    assert set(expected) == {path.name for path in GOLDEN.glob("*.cache")}
    for name, golden in expected.items():
        answer = python_cache(GOLDEN / name, name)
        assert (answer["label"], answer["algorithm"]) == (golden["label"], golden["algorithm"])
        assert [entry[:2] for entry in answer["entries"]] == golden["entries"]
        assert answer["round_trip"]
        assert agree_on(cpp, GOLDEN / name)
    real = [*THIRD_PARTY.glob("caches/*.cache"), *THIRD_PARTY.glob("lenet/*.cache")]
    assert sum(agree_on(cpp, path) for path in real) > 0 or not real


SAMPLE = (
    "TRT-8503-EntropyCalibration2\ndata: 3c008912\nconv/Conv2D:0: 3c60dd38\n"
    "(Unnamed Layer* 4) [Shuffle]_output: 0\nn\xe4me: 7f800000\nx: ffc00000\n"
).encode()
LEGACY = b"03ff00000000000003feffffde7210be9\ndata: 3c008102\n"
SPLICES = [
    b"\n",
    b"\r\n",
    b": ",
    b":",
    b" ",
    b"0",
    b"TRT-",
    b"-",
    b"\xff",
    b"\xc3",
    b"\xe2\x82",
    b"\0",
    b"'",
    b'"',
    b"\\",
    b"{",
    b"3c008912",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\x7f",
    b"\t",
    "\u200b\u20ac\U0001f600".encode(),
    b"record {",
    b"PK\x03\x04",
    b"1.5e-3",
    b"<!DOCTYPE",
]


# CALIB8_MUTANTS=100000 tries many more
MUTANTS = int(os.environ.get("CALIB8_MUTANTS", "1500"))


def test_damaged_caches_have_equal_messages(cpp, tmp_path):
    rng = np.random.default_rng(11)
    path = tmp_path / "mutant"
    read = 0
    for index in range(MUTANTS):
        data = bytearray([SAMPLE, LEGACY, SAMPLE, b"conv1 1.25\nfc -3e-2\n"][index % 4])
        for _ in range(int(rng.integers(1, 4))):
            position = int(rng.integers(0, len(data) + 1)) if rng.random() < 0.5 else 0
            kind = rng.integers(0, 4)
            if kind == 0:
                data[position:position] = SPLICES[int(rng.integers(0, len(SPLICES)))]
            elif kind == 1:
                del data[position : position + int(rng.integers(1, 12))]
            elif kind == 2 and data:
                data[min(position, len(data) - 1)] = int(rng.integers(0, 256))
            else:
                del data[int(rng.integers(0, len(data) + 1)) :]
        path.write_bytes(data)
        read += agree_on(cpp, path)
    assert 0.03 * MUTANTS < read < 0.95 * MUTANTS


def written(scales, **header):
    cache = trt_cache.from_scales({name: np.float32(v) for name, v in scales}, **header)
    return {"text": trt_cache.dump(cache).decode()}


def relabelled(text, **header):
    changed = trt_cache.relabel(trt_cache.parse(text.encode(), origin="x"), **header)
    return {"text": trt_cache.dump(changed).decode()}


def test_written_caches_are_byte_equal(cpp):
    scales = [("data", 1 / 127), ("a b [c]:0", 0.0), ("\u00e4\n"[:1], 3.5), ("i", 1e-45)]
    bits = [(name, float(np.float32(value))) for name, value in scales]
    versions = ("7.0.0", "8.5.3", "10.14.1", "10.3", "8.10.1", "0.9.1", "x")
    algorithms = (trt_cache.ENTROPY2, trt_cache.MINMAX, trt_cache.LEGACY, "no word")
    cases = [(bits, *case) for case in product(versions, algorithms)]
    cases += [(bad, "8.5.3", "X") for bad in ([["", 1.0]], [["a\nb", 1.0]], [["a", -1.5]], [])]
    for scale_pairs, version, algorithm in cases:
        question = {"scales": scale_pairs, "version": version, "algorithm": algorithm}
        assert cpp("write", **question) == outcome(written, **question)


def test_relabelled_caches_are_byte_equal(cpp):
    texts = (SAMPLE.decode(), SAMPLE.decode().replace("\n", "\r\n"), LEGACY.decode())
    for text, algorithm in product(texts, (None, trt_cache.MINMAX, trt_cache.LEGACY)):
        question = {"text": text, "version": "10.14.1", "algorithm": algorithm}
        assert cpp("relabel", **question) == outcome(relabelled, **question)


def halves(**parts):
    made_from = {"model": {"graph": "a" * 64}, "order": "e" * 64}
    made_from["images"] = {"count": 3, "skip_bad": False, "sha256": "b" * 64}
    made_from["preprocess"] = {"mean": [0.5], "size": None, "color": "rgb"}
    made_from["decoder"] = {"decoding": 1, "library": "OpenCV 5.0.0", "jpeg": "1", "png": "2"}
    made_by = {"program": "calib8", "rule": "histogram", "method": "entropy"}
    made_by |= {"numbers": {"frontend": 1}, "versions": {"calib8": "0.1.0"}}
    for part, value in parts.items():
        (made_from if part in made_from else made_by)[part] = value
    return {"made_from": made_from, "made_by": made_by}


def test_fingerprint_changes_have_equal_messages(cpp):
    old = halves()
    decoder = old["made_from"]["decoder"]
    for part, value in [
        ("method", "minmax"),
        ("model", {"graph": "c" * 64}),
        ("model", {"file": "c" * 64}),
        ("model", {"graph": "a" * 64, "file": "c" * 64}),
        ("images", {"count": 4, "skip_bad": True, "sha256": "d" * 64}),
        ("preprocess", {"mean": [0.485, 1e-7], "size": [224, 224], "color": "bgr"}),
        ("order", "f" * 64),
        ("preprocess", {}),
        ("decoder", {}),
        ("decoder", {**decoder, "library": "libjpeg-turbo 2.1.5"}),
        ("decoder", {**decoder, "png": "3"}),
        ("versions", {"tensorrt": "10.3.0"}),
        ("decoder", {"decoding": 1, "library": "OpenCV 4.6.0"}),
        ("numbers", {"frontend": 2, "parser": "it's"}),
        ("program", "TensorRT"),
        ("rule", "whole batches of 8"),
    ]:
        now = halves(**{part: value})
        ours = Fingerprint.from_json(now).changes_since(Fingerprint.from_json(old))
        assert cpp("changes", now=now, old=old) == {"changes": ours, "same": True}
    for half in old.values():
        for part in list(half):
            value = half.pop(part)
            assert cpp("changes", now=old, old=old) == outcome(lambda: Fingerprint.from_json(old))
            half[part] = value
    older = json.loads((ROOT / "tests/golden/formats/0.1.0/m.cache.json").read_bytes())
    now = Fingerprint.from_json(older["fingerprint"]).to_json()
    assert cpp("changes", now=now, old=older["fingerprint"]) == {"changes": {}, "same": True}


def test_decoder_identities_are_equal(cpp, photos):
    ours, theirs = fingerprint.decoder_identity("images"), cpp("decoder")
    ours.pop("library"), theirs.pop("library")
    assert theirs == ours
    assert {"jpeg", "png", "webp", "resize"} < set(ours)


def test_languages_read_each_others_caches(cpp, small_cnn, pictures, tmp_path, wording):
    cache = tmp_path / "p.cache"
    calibrate(small_cnn, pictures, preprocess={"size": (16, 16)}, cache=cache)
    _, ours = store.read_cache_text(cache)
    assert set(ours.model) == {"graph", "file"}
    answer = cpp("kept", path=str(cache), now=ours.to_json())
    assert answer == {"by": ours.by, "text": cache.read_text(), "unfit": ""}
    changed_fingerprint = replace(
        ours, model={"graph": "x"}, preprocess={}, versions={}, method="x"
    )
    changed = changed_fingerprint.changes_since(ours)
    reason = cpp("kept", path=str(cache), now=changed_fingerprint.to_json())["unfit"]
    assert reason == f"{changed['model']}; {changed['preprocess']}"
    side = store.sidecars(cache)[0]
    side.write_text(side.read_text().replace('"mse"', '"mso"'))
    assert "changed after it was" in cpp("kept", path=str(cache))["message"]

    theirs = replace(ours, program="TensorRT", method="EntropyCalibration2", numbers={})
    saved = cpp("save", path=str(cache), text="TRT-8601-x\n", fingerprint=theirs.to_json())
    assert saved == {"saved": True}
    assert store.read_cache_text(cache) == (b"TRT-8601-x\n", theirs)
    for layers in ({}, {"/exp": "e", "/mul": "m"}):
        store.write_note_without_statistics(cache, b"TRT-8601-x\n", theirs, layers)
        assert cpp("kept", path=str(cache)).get("float32_layers", {}) == layers
        assert store.read_cache_text(cache) == (b"TRT-8601-x\n", theirs)
    side.write_text(side.read_text().replace("Entropy", "MinMax"))
    with pytest.raises(CacheError) as refusal:
        store.read_cache_text(cache)
    wording.check(refusal.value)


def typed(name, array):
    """A tensor whose values stand as numbers, not as bytes."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor(name, kind, array.shape, array.flatten().tolist())


def odd_model():
    """Return a model of all that a graph may hold: tensors, bodies, functions, attributes."""
    from onnx import TensorProto, helper

    rng = np.random.default_rng(4)
    kinds = ["float32", "float64", "int64", "int32", "int8", "uint8", "int16", "uint16", "uint32"]
    kinds += ["uint64", "bool", "float16"]
    weights = []
    for number, dtype in enumerate(kinds):
        array = (rng.standard_normal((3, number % 3)) * 90).astype(dtype)
        weights += [typed(f"t{number}", array), from_array(array, f"é{number}")]
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Add", ["x", "c"], ["y"], name="inner")],
        "body",
        [],
        [value("y", TensorProto.FLOAT, ["n", 3])],
        [weights[0]],
    )
    odd = helper.make_node("Odd", ["x"], ["z"], domain="my", b=-3, a=1.5, l=[1, -2, 2**40], f=[0.5])
    odd.attribute.extend(
        [
            helper.make_attribute("s", "text", doc_string="not counted"),
            helper.make_attribute("ss", ["a", "b"]),
            helper.make_attribute("t", typed("", np.ones(3, np.float32))),
            helper.make_attribute("ts", [weights[1], weights[2]]),
            helper.make_attribute("tp", helper.make_tensor_type_proto(1, [1, "q", None])),
            helper.make_attribute("none", [], attr_type=onnx.AttributeProto.INTS),
        ]
    )
    branch = helper.make_node("If", ["cond"], ["w"], then_branch=body, else_branch=body)
    nodes = [branch, odd, helper.make_node("Relu", ["z"], ["out"], domain="ai.onnx")]
    inputs = [value("x", TensorProto.FLOAT, ["n", 3, 0]), value("cond", TensorProto.BOOL, None)]
    sequence = helper.make_sequence_type_proto(inputs[0].type)
    outputs = [helper.make_value_info("out", sequence), value("t0", TensorProto.FLOAT, [3, 0])]
    inputs.append(value("t1", TensorProto.DOUBLE, [3, 1]))  # a weight, so no input
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    function = helper.make_function("my", "F", ["a"], ["b"], [odd], opsets)
    return helper.make_model(graph, opset_imports=opsets, functions=[function])


def test_narrow_scales_make_a_model_typed(cpp, tmp_path):
    from onnx import TensorProto as T
    from onnx import helper

    def is_typed(scale, zero=T.INT8, *, constant=False, weights_alone=False):
        s, z = helper.make_tensor("s", scale, [], [1.0]), helper.make_tensor("z", zero, [], [0])
        nodes = [helper.make_node("Constant", [], ["s"], value=s)] if constant else []
        if not weights_alone:
            nodes.append(helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]))
        nodes.append(helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]))
        graph = helper.make_graph(nodes, "g", [], [], [z] if constant else [s, z])
        onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
        return cpp("typed", path=str(tmp_path / "m.onnx"))["typed"]

    assert not is_typed(T.FLOAT)
    assert is_typed(T.FLOAT16)
    assert is_typed(T.BFLOAT16)
    assert is_typed(T.FLOAT, T.FLOAT8E4M3FN)
    assert is_typed(T.FLOAT16, constant=True)
    assert not is_typed(T.FLOAT, constant=True)
    assert not is_typed(T.FLOAT16, weights_alone=True)
    (tmp_path / "m.onnx").write_bytes(b"no ONNX")
    assert cpp("typed", path=str(tmp_path / "m.onnx")) == {"typed": False}


def identity_here(path):
    model, file_digests = read_model_and_digests(path)
    check_fields(model)
    return {
        "graph": model_digest(model),
        "file": file_digests.file,
        "weights": file_digests.weights,
    }


def test_model_identities_are_equal(cpp, small_cnn, tmp_path):
    demo = ROOT / "datasets" / "fashion" / "fashion.onnx"
    (tmp_path / "odd.onnx").write_bytes(odd_model().SerializeToString())
    external = tmp_path / "apart.onnx"
    sizes = {"save_as_external_data": True, "size_threshold": 64}
    onnx.save(onnx.load(demo), external, location="w.bin", **sizes)
    split = tmp_path / "many.onnx"
    sizes["size_threshold"] = 0
    onnx.save(odd_model(), split, all_tensors_to_one_file=False, **sizes)
    golden = sorted((ROOT / "tests/golden/formats/0.1.0").glob("*.onnx"))
    for path in (small_cnn, demo, tmp_path / "odd.onnx", external, split, *golden):
        assert cpp("identity", path=str(path)) == identity_here(path), path
    assert identity_here(external)["graph"] == identity_here(demo)["graph"]
    data = bytearray((tmp_path / "w.bin").read_bytes())
    data[1000] ^= 1
    (tmp_path / "w.bin").write_bytes(data)
    demo_identity = identity_here(demo)
    now = cpp("identity", path=str(external))
    assert now == identity_here(external)
    assert now["graph"] != demo_identity["graph"]
    (tmp_path / "w.bin").write_bytes(data[:-1])
    assert "within its file" in cpp("identity", path=str(external))["message"]
    (tmp_path / "w.bin").unlink()
    assert "in the model's folder" in cpp("identity", path=str(external))["message"]
    os.mkfifo(tmp_path / "w.bin")
    assert "in the model's folder" in cpp("identity", path=str(external))["message"]


def test_undigestable_model_has_a_file_identity(cpp, tmp_path):
    texts = onnx.helper.make_tensor("s", onnx.TensorProto.STRING, [1], [b"a"])
    model = odd_model()
    model.graph.initializer.append(texts)
    path = tmp_path / "m.onnx"
    for data in (model.SerializeToString(), b"no model", b"", model.SerializeToString()[:500]):
        path.write_bytes(data)
        answer = cpp("identity", path=str(path))
        assert answer == {"graph": "", "file": hashlib.sha256(data).hexdigest(), "weights": ""}


def test_damaged_models_have_another_identity(cpp, tmp_path):
    model_bytes = odd_model().SerializeToString()
    digest = model_digest(odd_model())
    rng = np.random.default_rng(8)
    path = tmp_path / "m.onnx"
    for _ in range(300):
        data = bytearray(model_bytes)
        for position in rng.integers(0, len(data), 3):
            data[position] = rng.integers(256)
        path.write_bytes(data)
        answer = cpp("identity", path=str(path))
        try:
            ours = identity_here(path)
        except Calib8Error:
            continue
        if answer.get("graph") == digest:
            assert ours["graph"] == digest, data.hex()


@pytest.mark.parametrize("count", [1, 2, 10, 1001])
def test_latency_figures_are_equal(cpp, count):
    device = np.random.default_rng(count).gamma(4.0, 0.3, (count, 4)) * [0.1, 1, 0.1, 0.3]

    class Timed:
        inputs = outputs = ()

        def __init__(self):
            self.run_count = -1

        def run(self, feed):
            self.run_count += 1
            return {}

        def device_times(self):
            h2d, compute, d2h, enqueue = device[max(self.run_count - 1, 0)].tolist()
            return DeviceTimes(h2d_ms=h2d, compute_ms=compute, d2h_ms=d2h, enqueue_ms=enqueue)

    measured = measure({"x": Timed()}, [{}], warmup_ms=0, duration_s=0, min_iterations=count)
    expected = measured["x"].to_json()
    theirs = cpp("latency", host=[1.5] * count, device=device.tolist())
    assert list(theirs) == list(expected)
    for part in ("latency", "enqueue", "h2d", "gpu_compute", "d2h"):
        assert theirs[part] == pytest.approx(expected[part], rel=1e-12), part
    assert list(theirs["host"]) == list(expected["host"])
    assert theirs["warnings"] == expected["warnings"]
    assert theirs["queries"] == expected["queries"] == count


@pytest.fixture(scope="module")
def tool(calib8_cache):
    def call(*arguments):
        command = [*calib8_cache, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    return call


def test_the_tool_calibrates_compares_and_relabels(tool, tmp_path):
    rng = np.random.default_rng(2)
    batches = [rng.standard_normal(5000).astype(np.float32) * scale for scale in (1, 3)]
    for index, batch in enumerate(batches):
        batch.tofile(tmp_path / f"{index}.f32")
    tensors = [f"--tensor=conv 1:0={tmp_path}/{index}.f32" for index in range(2)]
    base = float(abs(batches[0]).max())
    for method, params in METHODS:
        out = tmp_path / "out.cache"
        options = ["--method", method] + [f"--{key}={value}" for key, value in params.items()]
        done = tool("calibrate", *tensors, "--version", "8.6.1", *options, "-o", out)
        assert (done.returncode, done.stderr) == (0, "")
        scales = {"conv 1:0": scale_of(method, params, batches, base).symmetric}
        assert out.read_bytes() == trt_cache.dump(trt_cache.from_scales(scales, version="8.6.1"))
    default = tmp_path / "default.cache"
    assert tool("calibrate", *tensors, "--version=8.6.1", "-o", default).returncode == 0
    assert tool("calibrate", *tensors, "--version=8.6.1", "--method=mse", "-o", out).returncode == 0
    assert default.read_bytes() == out.read_bytes()
    changed = tmp_path / "new.cache"
    assert tool("relabel", out, "--version=10.3.0", "-o", changed).returncode == 0
    assert changed.read_bytes().startswith(b"TRT-100300-EntropyCalibration2\n")
    assert tool("diff", out, changed).returncode == 0
    different = tool("diff", out, GOLDEN / "minmax_7000.cache")
    assert different.returncode == 1
    assert [row["name"] for row in json.loads(different.stdout)["differ"]] == ["a", "conv 1:0", "z"]
    shown = json.loads(tool("show", out).stdout)
    assert (shown["version"], len(shown["entries"])) == ("8.6.1", 1)


def test_the_tool_writes_batches(tool, photos, tmp_path):
    feed = open_feed(photos, [SPEC], preprocess=PRESETS["imagenet"], limit=7)
    options = tmp_path / "how.json"
    options.write_text(json.dumps(feed.preprocess.to_json()))
    arguments = ("feed", photos, "--input", "image:nx3x56x64", "--limit=7")
    for preprocess_options in (("--options", options), ("--preprocess", "imagenet")):
        done = tool(*arguments, *preprocess_options, "-o", tmp_path / "b")
        assert (done.returncode, done.stderr) == (0, "")
        ours = b"".join(sample.tobytes() for sample in samples_of(feed))
        assert (tmp_path / "b").read_bytes() == ours
        assert json.loads(done.stdout)["manifest"] == feed.manifest()
    for threads in (1, 3):
        (tmp_path / "b").unlink()
        second_run = tool(
            *arguments, *preprocess_options, "--threads", threads, "-o", tmp_path / "b"
        )
        assert (second_run.returncode, second_run.stderr, second_run.stdout) == (0, "", done.stdout)
        assert (tmp_path / "b").read_bytes() == ours


def test_wrong_tool_calls_print_one_line(tool, tmp_path):
    golden = GOLDEN / "legacy.cache"
    (tmp_path / "odd.f32").write_bytes(b"abc")
    np.float32(np.inf).tofile(tmp_path / "infinite.f32")
    calibrate_infinite = [
        "calibrate",
        f"--tensor=a={tmp_path}/infinite.f32",
        "--version=8.5.3",
        "-o",
    ]
    for arguments, sentence in [
        (["frobnicate"], "is no command"),
        (["show"], "takes CACHE"),
        (["show", golden, "--frob"], "--frob is no option"),
        (["show", tmp_path / "none"], "cannot be read: No such file or directory"),
        (["relabel", golden, "-o", tmp_path / "x"], "--version must be given"),
        (["relabel", golden, "--version", "8", "-o", tmp_path / "x"], "reads X.Y.Z"),
        (["relabel", golden, "--version"], "--version needs a value"),
        (["relabel", golden, "--version=11.0.0", "-o", tmp_path / "x"], "TensorRT up to 10 reads"),
        (["calibrate", "--tensor", "a", "--version=8.5.3", "-o", "x"], "must read NAME=FILE.f32"),
        (["calibrate", f"--tensor=a={tmp_path}/odd.f32", "-o", "x"], "must hold raw float32"),
        ([*calibrate_infinite, tmp_path / "x"], "tensor 'a': a search needs finite values, got 0"),
        (["calibrate", "--version=8.5.3", "-o", tmp_path / "x"], "at least one scale, got none"),
        (["calibrate", "--method=x"], "a search is one of mse, minmax, percentile, entropy"),
        (["calibrate", "--percent=99"], "--percent is for --method percentile, got 'mse'"),
        (["calibrate", "--method=percentile", "--percent=5o"], "--percent must be a number"),
        (["calibrate", "--method=percentile", "--percent=50"], "must be over 50 and at most 100"),
        (["feed", tmp_path, "--input", "1x3"], "an input reads NAME:DIMS"),
        (["feed", tmp_path, "--input", "x:1x3x8x8", "--limit=0"], "--limit must be a whole"),
        (["feed", tmp_path, "--input=x:1x3x8x8", "--preprocess=y"], "'y' is no preset"),
        (["feed", tmp_path, "--input=x:1x3x8x8", "--threads=0"], "--threads must be a whole"),
        (["feed", PHOTOS, "--input=x:1x3x8x8", "--threads=1025"], "threads must be 1 to 1024"),
    ]:
        done = tool(*arguments)
        assert done.returncode == 2, arguments
        assert sentence in done.stderr, arguments
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()
    assert tool("--help").returncode == 0
