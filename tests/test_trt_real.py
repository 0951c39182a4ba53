"""The calibrators against TensorRT 8.5.3.1 itself, in the environment of scripts/trt_env.sh."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CACHE_HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
ENV = Path(os.environ.get("CALIB8_TRT_ENV", CACHE_HOME / "calib8" / "trt-8.5.3.1"))
PYTHON = ENV / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"no TensorRT 8.5.3.1 at {ENV}; scripts/trt_env.sh makes it (Python 3.10, 550 MB)",
)


@pytest.fixture(scope="module")
def seen():
    """What the driver saw, as JSON; one process for all tests."""
    command = [str(PYTHON), str(ROOT / "tests" / "drive_trt.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "number"), [("legacy", 0), ("entropy", 1), ("entropy2", 2), ("minmax", 3)]
)
def test_each_calibrator_is_tensorrts_own(seen, name, number):
    assert seen["version"] == "8.5.3.1"
    found = seen["algorithms"][name]
    assert found["is_trt"] and (found["cpp"], found["batch_size"]) == (number, 1)
    assert found["run"].startswith("ok TRT-8503-")


def test_tensorrt_reads_the_bytes_of_the_feed_or_a_known_cache(seen):
    assert seen["bytes_seen"] is True
    assert seen["whole"] == "ok TRT-8503-EntropyCalibration2\ndata: 3c008912\n"
    assert seen["longer_feed"] == seen["whole"] and seen["reused"].startswith("ok ")
    assert seen["reused_taken"] == 0 and seen["refused_but_fed"] == seen["whole"]
    assert seen["algorithms"]["legacy"]["legacy"] == [0.99, 0.5]
    assert seen["algorithms"]["legacy"]["histogram"] is None


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("short", "got 2 of 3"), ("empty", "got 0 of 3"),
        ("raises", "OSError: the disk with the images went away"),
        ("wrong_shape", "OPT shape [2, 3, 4, 4] only, got [1, 3, 4, 4] in batch 1"),
        ("wrong_dtype", "got float64 for 'data' in batch 1"),
        ("nan", "NaN or Inf in 'data' of batch 1"), ("missing_name", "without 'mask'"),
        ("no_cache_written", "wrote no cache"), ("refused", "must take the known cache"),
        ("unknown", "got 'kl'"),
    ],
)  # fmt: skip
def test_what_tensorrt_would_swallow_is_raised(seen, case, told):
    assert told in seen[case]


def test_8_5_has_all_that_is_called_here(seen):
    assert seen["lacking"] == []
    parts = seen["small_parts"]
    assert parts["dims"] == [1, -1, 3]
    assert parts["dtypes"] == ["float32", "float16", "int8", "int32", "bool"]
    assert parts["log"] == [["wrong"], ["wrong", "said"]] and parts["one_logger"]
    assert parts["stand_ins"] == ["CUBLAS", "CUBLAS_LT", "CUDNN"]
    told = seen["without_gpu"]
    failed = "could not make a builder on this machine: " in told
    assert told == "built" or (failed and "CUDA initialization failure" in told)
    version, level = seen["opencv"]
    assert version.startswith("4.") and level == 0
