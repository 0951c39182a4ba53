"""`calib8` with a fake TensorRT: build, reuse, live calibration, bench, in 8.x, 10.x and 11.x."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EIGHT, TEN, ELEVEN = "8.5.3.1", "10.13.0.35", "11.1.0"


@pytest.fixture
def build(run, small_cnn, pictures, tmp_path):
    """(options) -> exit code, notes of a build for TensorRT, into tmp_path/out."""

    def call(*options):
        words = ["build", small_cnn, "--images", pictures, "--preprocess", "unit"]
        words += ["--target", "tensorrt", "--out", tmp_path / "out", "--effort", 0]
        code, _, err = run(*words, "--duration", 0, *options)
        assert code == 0, err
        (report,) = (tmp_path / "out").glob("report.json")
        return json.loads(report.read_text())["targets"][0]["notes"]

    return call


def engine(folder: Path) -> Path:
    (found,) = folder.glob("out/*.engine")
    return found


@pytest.mark.parametrize("version", [EIGHT, TEN, ELEVEN])
def test_an_engine_is_built_used_again_and_measured(tensorrt, build, run, tmp_path, version):
    trt = tensorrt(version)
    assert any(f"TensorRT {version} on Fake H200" in note for note in build())
    assert any("built before" in note for note in build())
    assert len(trt.STORY.configs) == 1
    code, _, _ = run("bench", engine(tmp_path), "--duration", 0, "--warmup", 0)
    assert code == 0
    assert trt.STORY.runs


def flags(config) -> set[str]:
    return {flag.name for flag in config.chosen}


@pytest.mark.parametrize("version", [EIGHT, TEN])
@pytest.mark.parametrize("calibrator", ["entropy2", "minmax"])
def test_tensorrt_calibrates_in_float32_alone(tensorrt, build, tmp_path, version, calibrator):
    trt = tensorrt(version)
    build("--calibrator", calibrator)
    calibrating, building = trt.STORY.configs
    assert flags(calibrating) == {"INT8"}
    assert flags(building) == {"INT8", "FP16", "TF32"}
    (cache,) = tmp_path.glob("out/*.gpu.cache")
    assert cache.read_text().startswith("TRT-8503-" if version == EIGHT else "TRT-101300-")
    build("--calibrator", calibrator, "--workspace", 64)
    assert len(trt.STORY.configs) == 3  # another engine of the same calibration


def test_from_11_an_engine_is_of_the_typed_model(tensorrt, build):
    trt = tensorrt(ELEVEN)
    build()
    (config,), (network,) = trt.STORY.configs, trt.STORY.networks
    assert flags(config) == {"TF32"}
    assert any(node.op_type == "DequantizeLinear" for node in network.model.graph.node)
    assert any(tensor.data_type == 10 for tensor in network.model.graph.initializer)  # float16


def test_a_calibrator_is_refused_where_there_is_none(tensorrt, run, small_cnn, pictures, tmp_path):
    tensorrt(ELEVEN)
    words = ["build", small_cnn, "--images", pictures, "--preprocess", "unit"]
    words += ["--target", "tensorrt", "--out", tmp_path, "--effort", 0, "--duration", 0]
    code, _, err = run(*words, "--calibrator", "entropy2")
    assert code == 1 and "needs a TensorRT with calibrators, got 11.1.0" in err


def test_what_the_parser_refuses_is_said_in_its_words(tensorrt, run, small_cnn, pictures, tmp_path):
    trt = tensorrt(TEN)
    trt.STORY.parser.append("In node 91 (importReduceMean): UNSUPPORTED_NODE")
    words = ["build", small_cnn, "--images", pictures, "--preprocess", "unit", "--out", tmp_path]
    words += ["--effort", 0, "--duration", 0]
    code, out, _ = run(*words, "--target", "tensorrt,onnxruntime")
    assert code == 1 and "importReduceMean" in " ".join(out.split())
    assert list(tmp_path.glob("*.int8.onnx"))  # the other target is built all the same
    code, _, err = run(*words, "--target", "tensorrt")
    assert code == 1 and "importReduceMean" in err


@pytest.mark.parametrize("options", [["--cuda-graph"], ["--streams", 2]])
def test_an_engine_runs_in_a_graph_and_in_streams(tensorrt, build, run, tmp_path, options):
    trt = tensorrt(TEN)
    build()
    plain = len(trt.STORY.runs)
    code, _, err = run("bench", engine(tmp_path), "--duration", 0, "--warmup", 0, *options)
    assert code == 0, err
    assert len(trt.STORY.runs) > plain
