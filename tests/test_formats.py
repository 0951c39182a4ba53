"""What every released version wrote is read, or refused with the sentence that says it is older.

`scripts/keep_formats.py` writes the folders; the last one is of this version.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from deploy.calibration import store, trt_cache
from deploy.errors import Calib8Error
from deploy.tuning.plan_file import read_plan
from deploy.version import __version__
from tests.models import run_net

KEPT = Path(__file__).parent / "golden" / "formats"
VERSIONS = sorted(path.name for path in KEPT.iterdir() if path.is_dir())
# (version, file) -> words of the refusal, where this version no longer reads it
REFUSED: dict[tuple[str, str], str] = {}


@pytest.fixture(params=VERSIONS)
def kept_version(request, tmp_path):
    """A copy, since a reader may lock or mend a folder."""
    return Path(shutil.copytree(KEPT / request.param, tmp_path / request.param))


def read_or_refuse(kept_version, name, read):
    """Read a file, or be refused as the table says."""
    reason = REFUSED.get((kept_version.name, name))
    if reason is None:
        return read(kept_version / name)
    with pytest.raises(Calib8Error, match=reason):
        read(kept_version / name)
    return None


def test_current_version_is_kept():
    assert __version__ in VERSIONS, "python scripts/keep_formats.py"


def test_calibration_of_any_version_is_read(kept_version):
    def read(path):
        stored = store.load_calibration(path)
        return stored, stored.read_arrays(stored.keys)

    calibration = read_or_refuse(kept_version, "m.cache", read)
    if calibration is not None:
        stored, arrays = calibration
        assert stored.fingerprint.method == "mse"
        assert len(stored.keys) == len(arrays) >= 8
        assert all(
            np.isfinite(a).all()
            for arrays_by_name in arrays.values()
            for a in arrays_by_name.values()
        )
    text = (kept_version / "m.cache").read_bytes()  # TensorRT's own
    cache = trt_cache.parse(text, origin="m.cache")
    assert cache.header.version == "8.5.3"
    assert not cache.flaws()


def test_plan_of_any_version_is_read(kept_version):
    plan = read_or_refuse(kept_version, "m.plan.toml", read_plan)
    if plan is not None:
        assert set(plan.targets) == {"onnxruntime", "tensorrt"}
        assert all(target_plan.settled for target_plan in plan.targets.values())


def test_report_of_any_version_is_explained(kept_version, run):
    reason = REFUSED.get((kept_version.name, "report.json"))
    if reason is None:
        output = run.ok("explain", kept_version)
        assert "onnxruntime" in output
        assert "tensorrt" in output
    else:
        assert reason in run.fails("explain", kept_version)


def test_build_of_any_version_is_verified(kept_version, run):
    if (kept_version / "manifest.json").exists():
        assert "the build of m" in run.ok("verify", kept_version)


def test_models_of_any_version_run(kept_version):
    x = np.random.default_rng(0).normal(size=(1, 3, 16, 16)).astype(np.float32)
    for name in ("m.int8.onnx", "m.tensorrt.onnx", "m.tensorrt.qdq.onnx"):
        (outputs,) = run_net(kept_version / name, x)
        assert outputs.shape == (1, 10)
        assert np.isfinite(outputs).all()


def test_plan_of_any_version_is_obeyed(kept_version, small_cnn, pictures, tmp_path, run):
    if (kept_version.name, "m.plan.toml") in REFUSED:
        pytest.skip("it is refused, as another test says")
    model = Path(shutil.copy(small_cnn, tmp_path / "m.onnx"))
    arguments = ("--images", pictures, "--out", tmp_path / "out", "--duration", 0, "--accept")
    run.ok("build", model, *arguments, "--plan", kept_version / "m.plan.toml")
    document = json.loads((kept_version / "m.cache.json").read_bytes())
    digest = document["fingerprint"]["made_from"]["model"]["graph"]
    plan = read_plan(tmp_path / "out" / "calib8/m.plan.toml")
    assert plan.model == digest  # plans name their model
