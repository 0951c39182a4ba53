"""The whole of `benchmarks/gpu_check.py`: with a fake TensorRT, and where a GPU is at hand."""

import json
import os
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gpu_check
from calibrators.tensorrt import CLASSES
from deploy.calibration.trt_cache import from_scales
from deploy.errors import BackendError, SdkMissingError
from deploy.feed.feed import open_feed
from deploy.frontends import load
from deploy.metrics.latency import Latency, Timing, measure
from deploy.runtimes.ort import OrtSession
from deploy.targets.tensorrt import sdk
from deploy.targets.tensorrt.builder import InputShapeRange

ROOT = Path(__file__).parents[1]


def reason():
    """Why there is nothing to check on; "" where there is."""
    try:
        sdk.find_sdk()
    except SdkMissingError as error:
        return str(error)
    return ""


NO_GPU = reason()
QUICK = partial(measure, warmup_ms=0, duration_s=0, min_iterations=1)


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
def test_tensorrt_agrees_on_this_gpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(not NO_GPU, reason="a GPU is at hand")
def test_without_a_gpu_the_check_says_so(tmp_path):
    assert gpu_check.main(["--out", str(tmp_path)]) == 77


def case():
    path = ROOT / "datasets" / "fashion" / "fashion.onnx"
    loaded = load(path, fold_batchnorm=False)
    images = str(ROOT / "datasets" / "fashion" / "calib")
    return gpu_check.Case(path, loaded, open_feed(images, loaded.inputs, limit=25), 10)


def test_tensorrt_gets_whole_batches_of_what_our_own_search_sees():
    batches = list(case().batches())
    assert [batch["image"].shape for batch in batches] == [(10, 1, 28, 28)] * 2
    with case().feed.samples() as samples:
        fed = np.concatenate([sample["image"] for sample in islice(samples, 20)])
    assert np.array_equal(np.concatenate([batch["image"] for batch in batches]), fed)
    profile = case().settings(1).profiles["image"]
    assert profile == InputShapeRange((1, 1, 28, 28), (1, 1, 28, 28), (10, 1, 28, 28))


def test_caches_are_held_against_each_other_entry_by_entry():
    mine = {f"t{i}": np.float32(i + 1) for i in range(10)} | {"dead": np.float32(0)}
    ours = from_scales(mine, version="8.5.3")
    theirs = from_scales(mine | {"constant_output": np.float32(1)}, version="8.5.3")
    finding = gpu_check.Finding("entropy2")
    gpu_check._hold(finding, theirs, ours)
    assert (finding.equal, finding.entries, finding.wrong) == (11, 11, [])
    assert (finding.median, finding.only_theirs) == (0, ["constant_output"])
    finding = gpu_check.Finding("minmax")
    stranger = from_scales({"made up": np.float32(1), "t0": np.float32(1)}, version="8.5.3")
    gpu_check._hold(finding, moved(0), stranger)
    assert finding.only_ours == ["made up"] and "made up" in finding.wrong[0]
    assert finding.entries == 1
    gpu_check._hold(finding, moved(0), from_scales({"a": np.float32(1)}, version="8.5.3"))
    assert finding.wrong[-1] == "no name is in both caches"


def moved(share, *names):
    """Eleven scales, those of `names` greater by `share`."""
    scales = {f"t{i}": np.float32(i + 1) for i in range(11)}
    made = {n: s * np.float32(1 + share * (n in names)) for n, s in scales.items()}
    return from_scales(made, version="8.5.3")


def test_the_median_is_judged_and_every_difference_printed(capsys):
    few, most = [f"t{i}" for i in range(5)], [f"t{i}" for i in range(6)]
    finding = gpu_check.Finding("entropy2")
    gpu_check._hold(finding, moved(0), moved(0.5, *few))
    assert (finding.equal, finding.entries, finding.wrong) == (6, 11, [])
    assert finding.worst.startswith("50.000% t")
    assert capsys.readouterr().out.count("50.0000%") == 5
    gpu_check._hold(finding, moved(0), moved(0.0009, *most))
    assert finding.wrong == []
    gpu_check._hold(finding, moved(0), moved(0.0011, *most))
    assert "median scale is 0.110% off" in finding.wrong[0]
    legacy = gpu_check.Finding("legacy")
    gpu_check._hold(legacy, moved(0), moved(0.5, *most))
    assert legacy.median == pytest.approx(0.5) and legacy.wrong == []


def test_what_fails_in_one_engine_leaves_the_others_their_figures(tmp_path, monkeypatch):
    """The model itself, run by ONNX Runtime, stands for an engine."""

    class Standing:
        @staticmethod
        def open(path, *, cuda_graph=False):
            return OrtSession.open(path.read_bytes(), threads=1)

    def fails(finding):
        finding.median = 0.25
        raise BackendError("TensorRT could not build it")

    def plan(finding):
        return case().path.read_bytes()

    monkeypatch.setattr(gpu_check, "TensorrtSession", Standing)
    monkeypatch.setattr(gpu_check, "measure", QUICK)
    making = {"fp32": plan, "entropy2": fails, "Q/DQ": plan}
    fp32, entropy2, qdq, graph = gpu_check.check(case(), making, tmp_path)
    for finding in (fp32, qdq, graph):
        assert finding.cosine == pytest.approx(1) and finding.same_top1 == 1
        assert finding.latency is not None and finding.wrong == []
    assert entropy2.wrong == ["BackendError: TensorRT could not build it"]
    assert "| entropy2 |  | 25.0000% |" in gpu_check.table([entropy2])
    assert json.dumps([gpu_check._json(f) for f in (fp32, entropy2)])


def test_the_table_has_a_line_for_each_engine_and_what_is_wrong():
    timing = Timing.of([1.0, 2.0, 3.0])
    latency = Latency(
        queries=3, warmup_queries=1, total_host_walltime_s=1.0, throughput_qps=3.0,
        latency=timing, host=timing, enqueue=timing, h2d=timing, gpu_compute=timing, d2h=timing,
    )  # fmt: skip
    fine = gpu_check.Finding("entropy2", equal=7, entries=7, cosine=0.999, latency=latency)
    bad = gpu_check.Finding("Q/DQ", cosine=0.5, wrong=["an output's cosine is 0.5000"])
    lines = gpu_check.table([fine, bad]).splitlines()
    assert len(lines) == 6 and lines[2].count("|") == lines[0].count("|")
    assert lines[-1] == "- Q/DQ: an output's cosine is 0.5000"


@pytest.mark.slow
def test_the_whole_check_runs_with_a_fake_tensorrt(tensorrt, tmp_path, monkeypatch, capsys):
    """The fake searches no scales: it takes the largest value, whatever calibrator asks."""
    tensorrt("8.5.3.1", "cuda-python")
    monkeypatch.setattr(gpu_check, "measure", QUICK)
    code = gpu_check.main(["--limit", "20", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line for line in said.splitlines() if line[:2] == "| "}
    assert code == 1 and said.startswith("Fake H200 sm_90, ")
    assert "CUDA 13.0, TensorRT 8.5.3.1; fashion.onnx" in said
    assert rows.keys() >= {"fp32", "fp16", *CLASSES, "Q/DQ", gpu_check.GRAPH}
    assert all(row.count("|") == 16 and row.split("|")[-2].strip() for row in rows.values())
    assert "| minmax | 23 of 28 | 0.0000% |" in rows["minmax"]  # Relus bound five of ours
    wrong = [line for line in said.splitlines() if line.startswith("- ")]
    assert len(wrong) == 1 and wrong[0].startswith("- entropy2: the median scale is")
