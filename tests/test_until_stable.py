"""Calibration until the ranges of two halves agree."""

import json
import shutil
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import calib8
from calibrators.scales import Scale
from calibrators.statistics import HistogramOf
from deploy.calibration import store
from deploy.calibration.observation import Observation, Variant
from deploy.calibration.one_pass import alternate_halves, observe
from deploy.calibration.stability import compare_halves, range_difference
from deploy.errors import CacheError, ConfigError
from deploy.feed.sampling import Choice, next_check, sampling_order
from deploy.targets import find_target
from tests.models import read_markdown, save_fixed_batch, save_net
from tests.test_calibrator_script import PYCUDA, written

pytestmark = pytest.mark.slow

IMAGE_COUNT = 100


@pytest.fixture(scope="module")
def arrays(tmp_path_factory) -> Path:
    """Inputs of small_cnn in the order of two classes, the second far brighter."""
    path = tmp_path_factory.mktemp("arrays") / "x.npy"
    rng = np.random.default_rng(5)
    x = rng.normal(size=(1, 3, 16, 16)) + 0.05 * rng.normal(size=(IMAGE_COUNT, 3, 16, 16))
    x[IMAGE_COUNT // 2 :] *= 4
    np.save(path, x.astype(np.float32))
    return path


@pytest.fixture
def calibrated(run, small_cnn, arrays, tmp_path):
    """(cache's name, *words) -> stdout; `fails` gives stderr of what must be refused."""

    def build_arguments(name, *build_arguments, images=arrays, model=small_cnn):
        feed = () if images is None else ("--images", images)
        return ("calibrate", model, *feed, "-o", tmp_path / name, "--verbose", *build_arguments)

    def calibrate(*arguments, **named):
        return run.ok(*build_arguments(*arguments, **named))

    calibrate.fails = lambda *arguments, **named: run.fails(*build_arguments(*arguments, **named))
    return calibrate


def count_used_images(cache: Path) -> int:
    """Return the number of images that a cache was made of."""
    sidecar = json.loads(cache.with_name(cache.name + ".json").read_text())
    return sidecar["fingerprint"]["made_from"]["images"]["count"]


def read_statistics(cache: Path) -> list[bytes]:
    return [cache.read_bytes(), cache.with_name(cache.name + ".npz").read_bytes()]


@given(st.integers(1, 700))
def test_checks_read_the_limited_samples(count):
    order = sampling_order(count).tolist()
    assert sorted(order) == list(range(count))
    point = next_check(0)
    while point < count:
        assert sorted(order[:point]) == Choice(limit=point).choose(count)[0]
        point = next_check(point)


def make_scale(lo: float, hi: float, amax: float) -> Scale:
    return Scale(lo=lo, hi=hi, amax=amax, observed_min=lo, observed_max=hi, method="x")


@pytest.mark.parametrize(
    ("range_a", "range_b", "share"),
    [
        ((-1, 3, 3), (-1, 3, 3), 0), ((0, 0, 0), (0, 0, 0), 0),
        ((-1, 3, 3), (-1, 4, 3), 1 / 5), ((-1, 3, 3), (-2, 3, 3), 1 / 5),
        ((-1, 3, 3), (-1, 3, 4), 1 / 4), ((-1, 3, 3), None, 1),
    ],
)  # fmt: skip
def test_range_difference_is_relative(range_a, range_b, share):
    pair = [ends and make_scale(*ends) for ends in (range_a, range_b)]
    assert range_difference(*pair) == range_difference(*pair[::-1]) == pytest.approx(share)


def test_halves_agree_with_one_twentieth_off():
    def make_scales(count, changed_count):
        scales = {}
        for n in range(count):
            end = 2 if n < changed_count else 1
            scales["folded", f"t{n}", "h"] = make_scale(0, end, 1)
        return scales

    for count, allowed_count in ((9, 0), (10, 1), (29, 1), (30, 2), (100, 5)):
        for changed_count in (allowed_count, allowed_count + 1):
            agreement = compare_halves(
                make_scales(count, 0),
                make_scales(count, changed_count),
                sample_count=32,
                within=0.2,
            )
            assert agreement.is_enough is (changed_count <= allowed_count)
            assert len(agreement.differences) == changed_count
            assert ("more images" in agreement.sentence) is (changed_count > allowed_count)


def make_observations(small_cnn) -> list[Observation]:
    variant = Variant("folded", lambda _: onnx.load(small_cnn))
    return [Observation(variant, name, HistogramOf()) for name in ("x", "r1", "logits")]


def are_equal(ours, theirs) -> bool:
    if ours.keys() != theirs.keys():
        return False
    for observation, recorder in ours.items():
        their_arrays = theirs[observation].to_arrays()
        for name, values in recorder.to_arrays().items():
            if not np.array_equal(values, their_arrays[name]):
                return False
    return True


def delay_samples(samples):
    """Samples that take their time, some longer, so that workers overtake each other."""
    lock = threading.Lock()
    for number, sample in enumerate(samples):
        with lock:
            time.sleep(0.004 * (number % 3 == 0))
        yield sample


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_halves_alternate_between_samples(threads, small_cnn, arrays):
    samples = [{"x": row[None]} for row in np.load(arrays)[:21]]
    observations, halves = make_observations(small_cnn), []
    all_recorders = observe(observations, delay_samples(samples), threads=threads, halves=halves)
    assert are_equal(all_recorders, observe(observations, samples, threads=1))
    for half, remainder in zip(halves, (1, 0), strict=True):
        half_samples = [
            sample
            for number, sample in enumerate(samples, 1)
            if alternate_halves(number) % 2 == remainder
        ]
        assert are_equal(half, observe(observations, half_samples, threads=1))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stop", [8, 16, 32, 64])
def test_each_check_has_exactly_its_samples(threads, stop, small_cnn, arrays):
    samples = [{"x": row[None]} for row in np.load(arrays)[:40]]
    observations, checked_counts = make_observations(small_cnn), []

    def should_stop(count, new_recorders, all_recorders):
        previous_count = checked_counts[-1] if checked_counts else 0
        assert are_equal(
            new_recorders, observe(observations, samples[previous_count:count], threads=1)
        )
        assert are_equal(all_recorders, observe(observations, samples[:count], threads=1))
        checked_counts.append(count)
        return count == stop

    recorders = observe(
        observations, delay_samples(samples), threads=threads, should_stop=should_stop
    )
    assert checked_counts == [point for point in (8, 16, 32) if point <= stop]
    assert are_equal(recorders, observe(observations, samples[:stop], threads=1))


def test_until_stable_gives_bytes_of_limit(calibrated, tmp_path):
    out = calibrated("until.cache", "--until-stable")
    assert count_used_images(tmp_path / "until.cache") == 32
    assert "32 of 100 samples are used" in out
    assert "halves of 32 samples" in out
    assert "ran 32 inferences" in out
    calibrated("limit.cache", "--limit", 32)
    calibrated("other.cache", "--until-stable", "--threads", 1)
    saved_bytes = [
        read_statistics(tmp_path / f"{name}.cache") for name in ("until", "limit", "other")
    ]
    assert saved_bytes[0] == saved_bytes[1] == saved_bytes[2]


def test_cache_reuse_needs_equal_samples(calibrated, tmp_path):
    calibrated("a.cache", "--until-stable")
    original_bytes = [path.read_bytes() for path in store.cache_files(tmp_path / "a.cache")]
    out = calibrated("a.cache", "--until-stable", "--require-cache")
    assert "ran no inference" in out
    assert "statistics of tensors from 32 images" in out
    assert "within 20 % by mse" in out
    assert [path.read_bytes() for path in store.cache_files(tmp_path / "a.cache")] == original_bytes
    assert "count 32 -> 100" in calibrated.fails("a.cache", "--require-cache")
    for options in (("--stable-within", 0.3), ("--method", "percentile")):
        err = calibrated.fails("a.cache", "--until-stable", *options, "--require-cache")
        assert "20 % by mse" in err
    out = calibrated("a.cache", "--limit", 32, "--require-cache")  # the same samples
    assert "ran no inference" in out
    calibrated("b.cache", "--limit", 32)
    err = calibrated.fails("b.cache", "--until-stable", "--require-cache")
    assert "chosen beforehand" in err


def test_missing_statistics_need_one_pass(calibrated, tmp_path):
    calibrated("a.cache", "--until-stable", "--target", "onnxruntime")
    arguments = ("--until-stable", "--target", "tensorrt", "--trt-version", "8.6.1")
    out = calibrated("a.cache", *arguments)
    assert "ran 32 inferences" in out
    assert "observed at once" in out
    calibrated("b.cache", *arguments)
    assert read_statistics(tmp_path / "a.cache") == read_statistics(tmp_path / "b.cache")


def test_unstable_ranges_read_all_images(calibrated, tmp_path):
    out = calibrated("a.cache", "--until-stable", "--stable-within", 0.0001)
    assert count_used_images(tmp_path / "a.cache") == IMAGE_COUNT
    assert "halves of 64 samples" in out
    assert "with more images" in out
    assert "ran no inference" in calibrated("a.cache", "--require-cache")  # the same samples
    calibrated("b.cache")
    assert read_statistics(tmp_path / "a.cache") == read_statistics(tmp_path / "b.cache")
    out = calibrated("c.cache", "--until-stable", "--limit", 10)
    assert "there were 10" in out
    assert "halves" not in out


def test_skipped_image_is_not_observed(calibrated, tmp_path, rng):
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels = rng.integers(0, 256, (16, 16, 3))
    for number in range(50):
        noisy = (pixels + rng.integers(-9, 10, pixels.shape)).clip(0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"{number:02}.png"), noisy)
    for position in sampling_order(50)[[0, -1]]:  # the first is among those that are looked at
        (folder / f"{position:02}.png").write_bytes(b"no picture")
    arguments = ("a.cache", "--until-stable", "--skip-bad")
    out = calibrated(*arguments, images=folder)
    assert "ran 32 inferences" in out
    assert "1 skipped" in out
    assert count_used_images(tmp_path / "a.cache") == 33  # the bad one counts by its bytes
    calibrated(*arguments, "--require-cache", images=folder)


def test_outlier_is_named_with_until_stable(calibrated, arrays, tmp_path):
    x = np.load(arrays)
    position = sampling_order(100)[4]  # the fifth that is looked at
    x[position] *= 90
    np.save(tmp_path / "x.npy", x)
    for arguments in ((), ("--until-stable",)):
        out = calibrated("a.cache", "--refresh", *arguments, images=tmp_path / "x.npy")
        assert f"int8 steps: sample {position} of x.npy" in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--stable-within 0.1", "give --until-stable too"),
        ("--until-stable --stable-within 1.5", "over 0 and below 1, got 1.5"),
        ("--until-stable --shard 1/2", "shard 1/2"),
        ("--until-stable --target ascend", "defined by the order of all images"),
        ("--until-stable --target tensorrt --method entropy-tensorrt", "the order of all images"),
        ("--until-stable --trust-cache", "--trust-cache"),
    ],
)
def test_until_stable_refuses_conflicting_options(arguments, error, calibrated):
    assert error in calibrated.fails("a.cache", *arguments.split())


def test_until_stable_refuses_fixed_batch(calibrated, small_cnn, tmp_path):
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    path = save_net(model, tmp_path / "four.onnx")
    assert "fixed batch of 4" in calibrated.fails("a.cache", "--until-stable", model=path)


def test_until_stable_stops_calibrator_script(calibrated, arrays, tmp_path):
    shutil.copy(arrays, tmp_path / "x.npy")
    script = ("--calibrator-script", written(PYCUDA, tmp_path), "--target", "tensorrt")
    out = calibrated("a.cache", "--until-stable", *script, images=None)
    count = count_used_images(tmp_path / "a.cache")
    assert count < IMAGE_COUNT
    assert f"{count} of 100 samples are used" in out
    calibrated("b.cache", "--limit", count, "--target", "tensorrt", "--method", "entropy")
    assert read_statistics(tmp_path / "a.cache") == read_statistics(tmp_path / "b.cache")


def test_build_equals_build_of_used_images(run, small_cnn, arrays, tmp_path):
    arguments = ("build", small_cnn, "--images", arrays, "--effort", 0, "--duration", 0)
    code, out, err = run(*arguments, "--until-stable", "--out", tmp_path / "a")
    assert code in (0, 3), err
    assert "32 samples from" in out
    assert "twice in a row" in read_markdown(tmp_path / "a")
    assert run(*arguments, "--limit", 32, "--out", tmp_path / "b")[0] == code
    for name in ("small_cnn.int8.onnx", "calib8/small_cnn.cache", "calib8/small_cnn.cache.npz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in "ab"]
    accuracy, limited_accuracy = (report["engines"][1]["accuracy"] for report in reports)
    assert accuracy["samples"] == limited_accuracy["samples"] == 32
    figures = [outputs["outputs"][0]["sqnr_db"] for outputs in (accuracy, limited_accuracy)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)  # of one float model, run in two forms
    assert reports[0]["calibration"]["agreement"]["stopped"] is True


def test_halves_of_a_fixed_batch_count_images(small_cnn, arrays, tmp_path):
    model = save_fixed_batch(small_cnn, tmp_path / "batch4.onnx")
    calibration = calib8.calibrate(model, arrays, limit=10)
    assert calibration.agreement.samples == 10


def test_report_names_ranges_that_disagree(command, small_cnn, arrays, tmp_path):
    arguments = ("build", small_cnn, "--images", arrays, "--effort", 0, "--duration", 0, "--accept")
    arguments += ("--limit", 2, "--out", tmp_path)
    command(*arguments)
    markdown, sentence = read_markdown(tmp_path), "or more between the halves of 2 samples"
    assert sentence in markdown
    assert "with more images" in markdown
    agreement = json.loads((tmp_path / "report.json").read_text())["calibration"]["agreement"]
    assert agreement["samples"] == 2
    assert agreement["differences"]
    assert min(agreement["differences"].values()) >= agreement["within"]
    page = (tmp_path / "report.html").read_text()
    assert sentence in page
    assert "halves differ by" in page
    assert all(n in page for n in agreement["differences"])
    command(*arguments)
    assert "halves" not in read_markdown(tmp_path)  # nothing was observed, so nothing is told


def test_calibrate_takes_until_stable_in_python(small_cnn, arrays):
    rows = list(np.load(arrays))
    calibration = calib8.calibrate(small_cnn, rows, until_stable=0.2)
    assert calibration.feed.count == 32
    assert calibration.agreement.stopped
    assert calibration.to_json()["agreement"]["samples"] == 32
    calibration = calib8.calibrate(small_cnn, rows)
    assert calibration.feed.count == IMAGE_COUNT
    assert calibration.agreement.samples == IMAGE_COUNT
    with pytest.raises(ConfigError, match="such as"):
        calib8.calibrate(small_cnn, rows, until_stable=float("nan"))
    targets = ["onnxruntime", find_target("tensorrt")()]
    calibration = calib8.calibrate(small_cnn, rows, targets=targets, until_stable=0.2)
    assert calibration.agreement.tensors == len(calibration.observations)


def test_wrong_until_entry_is_refused(calibrated, tmp_path, wording):
    calibrated("a.cache", "--until-stable")
    path = tmp_path / "a.cache.json"
    document = json.loads(path.read_text())
    for broken_entry in ({"within": 2.0, "method": "mse"}, {"within": 0.2}, [1], "x"):
        path.write_bytes(store.seal_json({**document, "until": broken_entry}))
        with pytest.raises(CacheError) as refusal:
            store.load_calibration(tmp_path / "a.cache")
        wording.check(refusal.value)
