"""The ranges of tensors in a report: those of the cache, whatever the threads; few bytes a page."""

import json

import pytest

from deploy.calibration import trt_cache
from deploy.report import Report, parts, to_html
from deploy.targets import TARGETS
from tests.models import run_command

QUICK = ("--effort", 0, "--duration", 0, "--accept")
ALL_TARGETS = ("--target", ",".join(TARGETS))


@pytest.fixture(scope="module")
def build_folder(small_cnn, pictures, tmp_path_factory):
    """The folder of a build for every target."""
    out = tmp_path_factory.mktemp("ranges")
    arguments = ("--images", pictures, "--out", out, *QUICK, "--threads", 2, *ALL_TARGETS)
    run_command("build", small_cnn, *arguments)
    return out


@pytest.fixture(scope="module")
def built_report(build_folder):
    """Its report as JSON."""
    return read_report(build_folder)


def read_report(out):
    return json.loads((out / "report.json").read_text())


def test_worst_tensor_shows_the_cached_range(build_folder, built_report):
    cache_file = build_folder / "small_cnn.tensorrt.cache"
    cache = trt_cache.parse(cache_file.read_bytes(), origin="test")
    (target,) = [target for target in built_report["targets"] if target["name"] == "tensorrt"]
    measured = [tensor for tensor in target["tensors"] if "sqnr_db" in tensor]
    worst = min(measured, key=lambda tensor: tensor["sqnr_db"])
    assert worst["hi"] == -worst["lo"] == worst["amax"]
    assert worst["amax"] == pytest.approx(127 * float(cache.scales()[worst["name"]]), rel=1e-6)


@pytest.mark.slow
def test_threads_and_reuse_change_no_range(run, built_report, small_cnn, pictures, tmp_path):
    arguments = ("build", small_cnn, "--images", pictures, *QUICK, *ALL_TARGETS, "--out", tmp_path)
    for is_reused in (False, True):
        run.ok(*arguments, "--threads", 1)
        report = read_report(tmp_path)
        assert report["calibration"]["reused"] == is_reused
        for target, expected_target in zip(report["targets"], built_report["targets"], strict=True):
            assert target["tensors"] == expected_target["tensors"]


def test_page_of_200_tensors_is_small():
    rows = []
    for n in range(200):
        row = parts.TensorRow(
            name=f"/backbone/stage.{n // 10}/block.{n % 10}/conv/Conv_output_0",
            observed_min=-2.0,
            observed_max=2.0,
            lo=-1.0,
            hi=1.0,
            amax=1.0,
            method="mse",
            clipped=0.001,
            sqnr_db=20.0 + n,
        )
        rows.append(row)
    target = parts.TargetPart(name="onnxruntime", tensors=tuple(rows))
    assert len(to_html(Report(targets=(target,))).encode()) < 300_000
