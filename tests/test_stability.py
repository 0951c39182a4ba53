"""Enough images? What halves of them say, and a run that ends where they agree."""

import json
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deploy
from calibrators.scales import Scale
from calibrators.statistics import HistogramOf
from deploy.calibration import store
from deploy.calibration.observation import Observation, Variant
from deploy.calibration.one_pass import in_turns, observe
from deploy.calibration.stability import agreement, apart
from deploy.errors import CacheError, ConfigError
from deploy.feed.sampling import Choice, following, order, strewn
from deploy.targets import named

COUNT = 100
SCRIPT = """
import os

import numpy as np
import pycuda.autoinit
import pycuda.driver as cuda
import tensorrt as trt


class Calibrator(trt.IInt8EntropyCalibrator2):
    def __init__(self):
        trt.IInt8EntropyCalibrator2.__init__(self)
        self.rows = iter(np.load(os.path.join(os.path.dirname(__file__), "x.npy")))
        self.device = cuda.mem_alloc(3 * 16 * 16 * 4)

    def get_batch_size(self):
        return 1

    def get_batch(self, names):
        row = next(self.rows, None)
        if row is None:
            return None
        cuda.memcpy_htod(self.device, np.ascontiguousarray(row).ravel())
        return [int(self.device)]

    def read_calibration_cache(self):
        return None

    def write_calibration_cache(self, cache):
        pass
"""


@pytest.fixture(scope="module")
def arrays(tmp_path_factory) -> Path:
    """Inputs of small_cnn in the order of two classes, the second far brighter."""
    path = tmp_path_factory.mktemp("arrays") / "x.npy"
    made = np.random.default_rng(5)
    x = made.normal(size=(1, 3, 16, 16)) + 0.05 * made.normal(size=(COUNT, 3, 16, 16))
    x[COUNT // 2 :] *= 4
    np.save(path, x.astype(np.float32))
    return path


@pytest.fixture
def calibrate(run, small_cnn, arrays, tmp_path):
    """(cache's name, *words) -> exit code, stdout, stderr."""

    def call(name, *words, images=arrays, model=small_cnn):
        feed = () if images is None else ("--images", images)
        return run("calibrate", model, *feed, "-o", tmp_path / name, "--verbose", *words)

    return call


def used(cache: Path) -> int:
    """How many images a cache is of."""
    document = json.loads(cache.with_name(cache.name + ".json").read_text())
    return document["fingerprint"]["made_from"]["images"]["count"]


def statistics(cache: Path) -> list[bytes]:
    return [cache.read_bytes(), cache.with_name(cache.name + ".npz").read_bytes()]


@given(st.integers(1, 700))
def test_the_first_of_every_point_are_those_that_a_limit_takes(count):
    order = strewn(range(count))
    assert sorted(order) == list(range(count))
    point = following(0)
    while point < count:
        assert sorted(order[:point]) == Choice(most=point).of(count)[0]
        point = following(point)


def scale(lo: float, hi: float, amax: float) -> Scale:
    return Scale(lo=lo, hi=hi, amax=amax, observed_min=lo, observed_max=hi, method="x")


def test_how_far_ranges_are_apart_is_a_share_of_the_wider_one():
    one = scale(-1, 3, 3)
    assert apart(one, one) == 0 == apart(None, None)
    assert apart(one, scale(-1, 4, 3)) == pytest.approx(1 / 5) == apart(scale(-1, 4, 3), one)
    assert apart(one, scale(-2, 3, 3)) == pytest.approx(1 / 5)
    assert apart(one, scale(-1, 3, 4)) == pytest.approx(1 / 4)
    assert apart(scale(0, 0, 0), scale(0, 0, 0)) == 0
    assert apart(one, None) == 1 == apart(None, one)


def test_all_but_a_twentieth_must_agree():
    def found(count, off):
        return {("folded", f"t{n}", "h"): scale(0, 2 if n < off else 1, 1) for n in range(count)}

    for count, able in ((9, 0), (10, 1), (29, 1), (30, 2), (100, 5)):
        for off in (able, able + 1):
            told = agreement(found(count, 0), found(count, off), samples=32, within=0.2)
            assert told.enough is (off <= able) and len(told.apart) == off
            assert ("more images" in told.words) is (off > able)


def watched(small_cnn) -> list[Observation]:
    variant = Variant("folded", lambda _: onnx.load(small_cnn))
    return [Observation(variant, name, HistogramOf()) for name in ("x", "r1", "logits")]


def same(one, other) -> bool:
    held = [[recorder.to_arrays() for recorder in found.values()] for found in (one, other)]
    return one.keys() == other.keys() and all(
        np.array_equal(a[name], b[name]) for a, b in zip(*held, strict=True) for name in a
    )


def slowly(samples):
    """Samples that take their time, some longer, so that workers overtake each other."""
    lock = threading.Lock()
    for number, sample in enumerate(samples):
        with lock:
            time.sleep(0.004 * (number % 3 == 0))
        yield sample


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_halves_have_one_of_every_two_samples_each(threads, small_cnn, arrays):
    samples = [{"x": row[None]} for row in np.load(arrays)[:21]]
    wanted, halves = watched(small_cnn), []
    whole = observe(wanted, slowly(samples), threads=threads, halves=halves)
    assert same(whole, observe(wanted, samples, threads=1))
    for half, odd in zip(halves, (1, 0), strict=True):
        own = [one for number, one in enumerate(samples, 1) if in_turns(number) % 2 == odd]
        assert same(half, observe(wanted, own, threads=1))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stop", [8, 16, 32, 64])
def test_points_are_of_just_so_many_samples(threads, stop, small_cnn, arrays):
    samples = [{"x": row[None]} for row in np.load(arrays)[:40]]
    wanted, seen = watched(small_cnn), []

    def enough(count, new, whole):
        before = seen[-1] if seen else 0
        assert same(new, observe(wanted, samples[before:count], threads=1))
        assert same(whole, observe(wanted, samples[:count], threads=1))
        seen.append(count)
        return count == stop

    found = observe(wanted, slowly(samples), threads=threads, enough=enough)
    assert seen == [point for point in (8, 16, 32) if point <= stop]
    assert same(found, observe(wanted, samples[:stop], threads=1))


def test_it_stops_where_a_limit_would_have_given_the_same_bytes(calibrate, tmp_path):
    code, out, err = calibrate("until.cache", "--until-stable")
    assert code == 0, err
    assert used(tmp_path / "until.cache") == 32
    assert "32 of 100 samples are used" in out
    assert "halves of 32 samples" in out
    assert "ran 32 inferences" in out
    assert calibrate("limit.cache", "--limit", 32)[0] == 0
    assert statistics(tmp_path / "until.cache") == statistics(tmp_path / "limit.cache")
    calibrate("other.cache", "--until-stable", "--threads", 1)
    assert statistics(tmp_path / "other.cache") == statistics(tmp_path / "until.cache")


def test_the_same_command_uses_its_cache_again(calibrate, tmp_path):
    calibrate("a.cache", "--until-stable")
    made = [path.read_bytes() for path in store.files(tmp_path / "a.cache")]
    code, out, _ = calibrate("a.cache", "--until-stable", "--require-cache")
    assert code == 0 and "ran no inference" in out and "observations of 32 images" in out
    assert "within 20 % by mse" in out
    assert [path.read_bytes() for path in store.files(tmp_path / "a.cache")] == made


def test_a_cache_is_of_its_own_samples_alone(calibrate, tmp_path):
    calibrate("a.cache", "--until-stable")
    code, _, err = calibrate("a.cache", "--require-cache")
    assert code == 1 and "count 32 -> 100" in err
    for words in (("--stable-within", 0.3), ("--method", "percentile")):
        code, _, err = calibrate("a.cache", "--until-stable", *words, "--require-cache")
        assert code == 1 and "agreed within 20 % by mse, not until" in err
    code, out, _ = calibrate("a.cache", "--limit", 32, "--require-cache")  # the same samples
    assert code == 0 and "ran no inference" in out
    calibrate("b.cache", "--limit", 32)
    code, _, err = calibrate("b.cache", "--until-stable", "--require-cache")
    assert code == 1 and "chosen beforehand" in err


def test_what_a_target_lacks_is_observed_with_all_the_rest(calibrate, tmp_path):
    calibrate("a.cache", "--until-stable", "--target", "onnxruntime")
    words = ("--until-stable", "--target", "tensorrt", "--trt-version", "8.6.1")
    code, out, _ = calibrate("a.cache", *words)
    assert code == 0 and "ran 32 inferences" in out and "observed at once" in out
    calibrate("b.cache", *words)
    assert statistics(tmp_path / "a.cache") == statistics(tmp_path / "b.cache")


def test_all_are_looked_at_where_halves_never_agree(calibrate, tmp_path):
    code, out, _ = calibrate("a.cache", "--until-stable", "--stable-within", 0.0001)
    assert code == 0 and used(tmp_path / "a.cache") == COUNT
    assert "halves of 64 samples" in out and "calibrate with more images" in out
    code, out, _ = calibrate("a.cache", "--require-cache")  # the same samples
    assert code == 0 and "ran no inference" in out
    calibrate("b.cache")
    assert statistics(tmp_path / "a.cache") == statistics(tmp_path / "b.cache")


def test_few_samples_tell_nothing(calibrate):
    code, out, _ = calibrate("a.cache", "--until-stable", "--limit", 10)
    assert code == 0 and "from 16 on: there were 10" in out and "halves" not in out


def test_a_bad_picture_counts_for_nothing(calibrate, run, small_cnn, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    made = np.random.default_rng(3)
    pixels = made.integers(0, 256, (16, 16, 3))
    for number in range(50):
        noisy = (pixels + made.integers(-9, 10, pixels.shape)).clip(0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"{number:02}.png"), noisy)
    for place in order(50)[[0, -1]]:  # the first is among those that are looked at
        (folder / f"{place:02}.png").write_bytes(b"no picture")
    code, out, _ = calibrate("a.cache", "--until-stable", "--skip-bad", images=folder)
    assert code == 0 and "ran 32 inferences" in out and "1 skipped" in out
    assert used(tmp_path / "a.cache") == 33  # the bad one counts by its bytes
    words = ("--until-stable", "--skip-bad", "--require-cache")
    assert calibrate("a.cache", *words, images=folder)[0] == 0


def test_what_stands_out_is_named_as_without(calibrate, arrays, tmp_path):
    x = np.load(arrays)
    place = order(100)[4]  # the fifth that is looked at
    x[place] *= 90
    np.save(tmp_path / "x.npy", x)
    for words in ((), ("--until-stable",)):
        code, out, _ = calibrate("a.cache", "--refresh", *words, images=tmp_path / "x.npy")
        assert code == 0 and f"int8 steps: sample {place} of x.npy" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stable-within", 0.1), "give --until-stable too"),
        (("--until-stable", "--stable-within", 1.5), "over 0 and below 1, got 1.5"),
        (("--until-stable", "--shard", "1/2"), "shard 1/2"),
        (("--until-stable", "--target", "ascend"), "defined by the order of all images"),
        (
            ("--until-stable", "--target", "tensorrt", "--method", "entropy-tensorrt"),
            "defined by the order of all images",
        ),
        (("--until-stable", "--trust-cache"), "--trust-cache"),
    ],
)
def test_what_cannot_be_is_refused(words, said, calibrate):
    code, _, err = calibrate("a.cache", *words)
    assert code == 1 and said in err


def test_a_fixed_batch_is_refused(calibrate, small_cnn, tmp_path):
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, tmp_path / "four.onnx")
    code, _, err = calibrate("a.cache", "--until-stable", model=tmp_path / "four.onnx")
    assert code == 1 and "fixed batch of 4" in err


def test_a_calibrators_script_is_stopped_too(calibrate, arrays, tmp_path):
    np.save(tmp_path / "x.npy", np.load(arrays))
    (tmp_path / "old.py").write_text(SCRIPT)
    script = ("--calibrator-script", f"{tmp_path}/old.py:Calibrator", "--target", "tensorrt")
    code, out, err = calibrate("a.cache", "--until-stable", *script, images=None)
    assert code == 0, err
    count = used(tmp_path / "a.cache")
    assert count < COUNT and f"{count} of 100 samples are used" in out
    calibrate("b.cache", "--limit", count, "--target", "tensorrt", "--method", "entropy")
    assert statistics(tmp_path / "a.cache") == statistics(tmp_path / "b.cache")


def test_a_build_is_that_of_the_images_that_were_used(run, small_cnn, arrays, tmp_path):
    words = ("build", small_cnn, "--images", arrays, "--effort", 0, "--duration", 0)
    code, out, err = run(*words, "--until-stable", "--out", tmp_path / "a")
    assert code in (0, 3), err
    assert "32 samples from" in out and "enough twice in a row" in " ".join(out.split())
    assert run(*words, "--limit", 32, "--out", tmp_path / "b")[0] == code
    for name in ("small_cnn.int8.onnx", "small_cnn.cache", "small_cnn.cache.npz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in "ab"]
    one, other = (report["engines"][1]["accuracy"] for report in reports)
    assert one["samples"] == other["samples"] == 32
    figures = [outputs["outputs"][0]["sqnr_db"] for outputs in (one, other)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)  # of one float model, run in two forms
    assert reports[0]["calibration"]["agreement"]["stopped"] is True


def test_every_report_says_whether_the_images_were_enough(run, small_cnn, arrays, tmp_path):
    words = ("build", small_cnn, "--images", arrays, "--effort", 0, "--duration", 0)
    code, out, err = run(*words, "--limit", 2, "--out", tmp_path / "few")
    assert code in (0, 3), err
    said = "or more between the halves of 2 samples"
    assert said in " ".join(out.split()) and "calibrate with more images" in " ".join(out.split())
    part = json.loads((tmp_path / "few" / "report.json").read_text())["calibration"]["agreement"]
    assert part["samples"] == 2 and part["apart"] and min(part["apart"].values()) >= part["within"]
    page = (tmp_path / "few" / "report.html").read_text()
    assert said in page and "halves differ by" in page and all(n in page for n in part["apart"])
    assert said in (tmp_path / "few" / "report.md").read_text()
    code, out, _ = run(*words, "--limit", 2, "--out", tmp_path / "few")
    assert "halves" not in out  # nothing was observed, so nothing is told


def test_from_python(small_cnn, arrays):
    rows = list(np.load(arrays))
    found = deploy.calibrate(small_cnn, rows, until_stable=0.2)
    assert found.feed.count == 32 and found.agreement.stopped
    assert found.to_json()["agreement"]["samples"] == 32
    found = deploy.calibrate(small_cnn, rows)
    assert found.feed.count == COUNT and found.agreement.samples == COUNT
    with pytest.raises(ConfigError, match="such as"):
        deploy.calibrate(small_cnn, rows, until_stable=float("nan"))


def test_two_targets_are_looked_at_together(small_cnn, arrays):
    targets = ["onnxruntime", named("tensorrt")()]
    found = deploy.calibrate(small_cnn, list(np.load(arrays)), targets=targets, until_stable=0.2)
    assert found.agreement.tensors == len(found.observations)


def test_a_cache_that_does_not_say_how_is_broken(calibrate, tmp_path):
    calibrate("a.cache", "--until-stable")
    path = tmp_path / "a.cache.json"
    document = json.loads(path.read_text())
    for wrong in ({"within": 2.0, "method": "mse"}, {"within": 0.2}, [1], "x"):
        path.write_bytes(store.sealed({**document, "until": wrong}))
        with pytest.raises(CacheError, match="until when it was observed"):
            store.load(tmp_path / "a.cache")
