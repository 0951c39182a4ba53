"""What fills no calibration batch: left out and said, on the CPU as with TensorRT's calibrators."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from calibrators.statistics import HistogramOf
from deploy.calibration.observation import left_out, whole, whole_batches
from deploy.errors import ConfigError


def test_the_rest_is_left_out_and_said():
    samples = [{"x": np.full((1, 2), i), "k": np.float32(7)} for i in range(7)]
    batches = list(whole_batches(iter(samples), 3))
    assert [batch["x"][:, 0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
    assert batches[0]["k"] == 7
    assert (whole(7, 3), whole(6, 3)) == (6, 6)
    assert left_out(6, 3) == ()
    assert "the last 1 of 7 samples" in left_out(7, 3)[0]
    with pytest.raises(ConfigError, match="got 2 samples for batches of 3"):
        whole(2, 3)


def test_a_batch_that_the_model_fixes_and_images_do_not_fill_is_left_out():
    assert whole(3, 1, filled=1) == 2
    assert whole(5, 2, filled=1) == 4
    assert "the last 1 of 3 samples" in left_out(3, 1, filled=1)[0]
    with pytest.raises(ConfigError, match="got 0 samples for batches of 1"):
        whole(1, 1, filled=1)


@pytest.fixture
def fixed(small_cnn, tmp_path):
    """The model with a batch of 8."""
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 8
    onnx.save(model, tmp_path / "fixed.onnx")
    return tmp_path / "fixed.onnx"


def test_a_fixed_batch_calibrates_as_the_same_batch_that_is_asked_for(
    fixed, calibrate, run, listed, tmp_path
):
    scales = calibrate(20, "--batch-size", 8)[3]
    words = "calibrate", fixed, "--images", listed(20), "--preprocess", "unit"
    own = "--target", "tensorrt", "--method", "entropy-tensorrt"
    code, out, err = run(*words, *own, "--batch-size", 8, "-o", tmp_path / "own.cache")
    assert code == 0, err
    assert "the last 1 of 3 samples fill none and were left out" in " ".join(out.split())
    assert (tmp_path / "own.cache").read_bytes() == scales


@pytest.fixture
def listed(pictures, tmp_path):
    """(number) -> a list of the first pictures."""

    def call(number):
        path = tmp_path / f"{number}.txt"
        path.write_text("".join(f"{one}\n" for one in sorted(pictures.glob("*.png"))[:number]))
        return path

    return call


@pytest.fixture
def calibrate(run, small_cnn, listed, tmp_path):
    """(images, options) -> exit code, output, errors, the cache that `calib8 calibrate` wrote."""

    def call(number, *options):
        path = tmp_path / "m.cache"
        path.unlink(missing_ok=True)
        words = ["calibrate", small_cnn, "--images", listed(number), "-o", path]
        words += ["--preprocess", "unit"]
        words += ["--target", "tensorrt", "--method", "entropy-tensorrt", *options]
        return *run(*words), path.read_bytes() if path.exists() else b""

    return call


def test_on_the_cpu_whole_batches_alone_are_observed(calibrate):
    code, out, _, cache = calibrate(20, "--batch-size", 8)
    assert code == 0 and "the last 4 of 20 samples" in " ".join(out.split())
    code, out, _, fewer = calibrate(16, "--batch-size", 8)
    assert code == 0 and "fill none" not in out
    assert cache == fewer
    assert cache != calibrate(20, "--batch-size", 5)[3]
    code, _, err, _ = calibrate(20, "--batch-size", 21)
    assert code == 1 and "got 20 samples for batches of 21" in err


def test_statistics_of_whole_batches_are_not_taken_for_those_of_all():
    keys = {HistogramOf(8).key, HistogramOf(8, 16).key, HistogramOf(8, 24).key}
    assert len(keys) == 3


@pytest.mark.slow
def test_a_calibration_of_whole_batches_is_used_again(calibrate, run, small_cnn, listed, tmp_path):
    calibrate(20, "--batch-size", 8)
    words = ["calibrate", small_cnn, "--images", listed(20), "--preprocess", "unit"]
    words += ["--target", "tensorrt", "--method", "entropy-tensorrt", "--batch-size", 8]
    code, out, _ = run(*words, "-o", tmp_path / "m.cache")
    assert code == 0 and "reused" in out.lower()


@pytest.mark.slow
def test_tensorrts_calibrator_gets_the_same_batches(tensorrt, run, small_cnn, listed, tmp_path):
    trt = tensorrt("8.5.3.1")
    words = ["build", small_cnn, "--preprocess", "unit", "--effort", 0, "--duration", 0]
    words += ["--target", "tensorrt", "--calibrator", "minmax"]

    def built(number):
        out = tmp_path / f"{number}"
        code, _, err = run(*words, "--images", listed(number), "--out", out)
        assert code == 0, err
        report = json.loads((out / "report.json").read_text())
        (cache,) = out.glob("*.gpu.cache")
        return " ".join(report["targets"][0]["notes"]), cache.read_bytes()

    said, cache = built(20)
    assert "the last 4 of 20 samples" in said
    assert trt.STORY.configs[0].int8_calibrator.taken == 2
    said, fewer = built(16)
    assert "fill none" not in said
    assert cache == fewer
    code, _, err = run(*words, "--images", listed(6), "--out", tmp_path / "few")
    assert code == 1 and "got 6 samples for batches of 8" in err


def test_samples_of_several_shapes_fill_no_batch():
    samples = [{"x": np.zeros((1, width), np.float32)} for width in (2, 2, 3, 4)]
    batches = whole_batches(iter(samples), 2)
    assert next(batches)["x"].shape == (2, 2)
    with pytest.raises(ConfigError, match=r"one shape, got samples of \(1, 3\) and \(1, 4\)"):
        next(batches)
