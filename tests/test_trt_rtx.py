"""The target of TensorRT for RTX: with its own compiler where it is installed, and without it.

`scripts/trt_bindings.sh` fetches the compiler (90 MB); tests that compile are skipped without it.
"""

import json
import sys
from pathlib import Path

import pytest

from calib8 import Tuning, build
from deploy.analysis.benchmark import find_target
from deploy.errors import BackendError, ConfigError, SdkMissingError
from deploy.files import manifest
from deploy.targets import TensorRTForRTX
from deploy.targets.tensorrt import rtx
from deploy.targets.tensorrt.profiles import InputShapeRange
from tests.test_trt_real import BINDINGS, RTX

VERSION = RTX.removeprefix("rtx-")
DEMO = Path(__file__).parents[1] / "datasets" / "fashion"
QUICK = {"tuning": Tuning(effort=0), "duration_s": 0}


@pytest.fixture
def compiler(monkeypatch):
    """TensorRT for RTX, imported from the folder of `scripts/trt_bindings.sh`."""
    folder = BINDINGS / RTX
    if not folder.exists():
        pytest.skip(f"no TensorRT for RTX {VERSION}: scripts/trt_bindings.sh fetches it")
    monkeypatch.syspath_prepend(str(folder))
    import tensorrt_rtx_libs  # noqa: F401 (loads the library)
    from tensorrt_rtx_bindings import tensorrt_rtx

    tensorrt_rtx.__version__ = VERSION
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt_rtx)
    monkeypatch.setattr(rtx, "_installed_version", lambda: VERSION)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_engine_is_compiled_and_reused(precision, compiler, tmp_path, monkeypatch):
    target = TensorRTForRTX(gpus=("ada", "blackwell"), precision=precision)
    report = build(DEMO / "fashion.onnx", DEMO / "calib", out=tmp_path, targets=[target], **QUICK)
    assert not report.targets[0].error
    engine = tmp_path / f"fashion.sm89-sm120-{VERSION}.rtx.engine"
    data = engine.read_bytes()
    made_from = json.loads(manifest.note_path(engine).read_bytes())
    assert made_from["tensorrt_rtx"] == VERSION
    assert made_from["compute_capabilities"] == ["SM89", "SM120"]
    assert f"--loadEngine={engine.name}" in (tmp_path / "fashion_rtx.sh").read_text()

    monkeypatch.setattr(rtx, "compile_engine", None)
    build(DEMO / "fashion.onnx", DEMO / "calib", out=tmp_path, targets=[target], **QUICK)
    assert engine.read_bytes() == data


def test_compiler_refuses_fp8_before_ada(compiler, tmp_path):
    target = TensorRTForRTX(precision="fp8")
    build(DEMO / "fashion.onnx", DEMO / "calib", out=tmp_path, targets=[target], **QUICK)
    shape = (1, 1, 28, 28)
    profiles = {"image": InputShapeRange(shape, shape, shape)}
    with pytest.raises(BackendError, match="fp8"):
        rtx.compile_engine(tmp_path / "fashion.rtx.onnx", ["SM86"], profiles)


def test_compiler_refuses_a_broken_file(compiler, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(BackendError, match=r"broken\.onnx"):
        rtx.compile_engine(tmp_path / "broken.onnx", ["SM89"], {})


def test_typed_model_is_written_without_compiler(small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    report = build(small_cnn, pictures, out=tmp_path, targets="tensorrt-rtx", **QUICK)
    (part,) = report.targets
    assert [row.path.rpartition("/")[2] for row in part.files] == ["small_cnn.rtx.onnx"]
    assert any("pip install '.[rtx]'" in note for note in part.notes)
    assert not part.error


def test_fp8_for_ampere_is_refused():
    with pytest.raises(ConfigError, match="--rtx-gpu ampere"):
        TensorRTForRTX(gpus=("ampere",), precision="fp8")


def test_repeated_generation_counts_once():
    assert TensorRTForRTX(gpus=("ada", "blackwell", "ada")).capabilities == ("SM89", "SM120")


def test_engine_belongs_to_its_own_target(tmp_path):
    path = tmp_path / "small_cnn.sm89-1.7.1.rtx.engine"
    target = find_target(path, ())
    assert target.name == "tensorrt-rtx"
    with pytest.raises(SdkMissingError, match="loadEngine"):
        target.open(path)
