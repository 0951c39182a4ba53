"""`calib8` with a fake TensorRT: build, reuse, live calibration, bench, in 8.x, 10.x and 11.x."""

from __future__ import annotations

import ctypes
import json
import struct
import subprocess
from pathlib import Path
from shutil import which

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.store import text_of
from deploy.targets.tensorrt.sdk import cache_reader

EIGHT, TEN, ELEVEN = "8.5.3.1", "10.13.0.35", "11.1.0"
LABELS = {EIGHT: "TRT-8503-", TEN: "TRT-101300-", ELEVEN: "TRT-100300-"}
QUICK = ["--effort", 0, "--duration", 0, "--limit", 4, "--max-batch", 2]


@pytest.fixture
def build(run, small_cnn, pictures, tmp_path):
    """(options) -> exit code, notes of a build for TensorRT, into tmp_path/out."""

    def call(*options):
        words = ["build", small_cnn, "--images", pictures, "--preprocess", "unit"]
        words += ["--target", "tensorrt", "--out", tmp_path / "out", *QUICK]
        code, _, err = run(*words, *options)
        assert code == 0, err
        (report,) = (tmp_path / "out").glob("report.json")
        return json.loads(report.read_text())["targets"][0]["notes"]

    return call


@pytest.fixture
def failing(run, small_cnn, pictures, tmp_path):
    """(options) -> the sentence that ends a build."""

    def call(*options):
        words = ["build", small_cnn, "--images", pictures, "--preprocess", "unit"]
        words += ["--target", "tensorrt", "--out", tmp_path / "failed", *QUICK]
        code, _, err = run(*words, *options)
        assert code == 1
        return err

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
    (cache,) = tmp_path.glob("out/*.tensorrt.cache")  # for the version that builds, on reuse too
    assert cache.read_text().startswith(LABELS[version])
    code, _, _ = run("bench", engine(tmp_path), "--duration", 0, "--warmup", 0)
    assert code == 0
    assert trt.STORY.runs


@pytest.mark.parametrize(("version", "reads"), [(EIGHT, "8.5.3"), (TEN, "10.13.0"), (ELEVEN, None)])
def test_caches_are_of_the_version_that_reads_them(tensorrt, version, reads):
    tensorrt(version)
    assert cache_reader() == reads


@pytest.fixture
def library(tmp_path):
    """A library with a plugin, for the fake's parser."""
    compiler = which("gcc")
    if compiler is None:
        pytest.skip("gcc is missing")
    source, path = tmp_path / "plugin.c", tmp_path / "libfancy.so"
    source.write_text("int FancyPluginCreator;\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source], check=True)
    return path


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
    assert cache.read_text().startswith(LABELS[version])
    build("--calibrator", calibrator, "--workspace", 64)
    assert len(trt.STORY.configs) == 3  # another engine of the same calibration


def test_from_11_an_engine_is_of_the_typed_model(tensorrt, build):
    trt = tensorrt(ELEVEN)
    build()
    (config,), (network,) = trt.STORY.configs, trt.STORY.networks
    assert flags(config) == {"TF32"}
    assert any(node.op_type == "DequantizeLinear" for node in network.model.graph.node)
    assert any(tensor.data_type == 10 for tensor in network.model.graph.initializer)  # float16


def test_a_calibrator_is_refused_where_there_is_none(tensorrt, failing):
    tensorrt(ELEVEN)
    err = failing("--calibrator", "entropy2")
    assert "needs a TensorRT with calibrators, got 11.1.0" in err


def test_what_the_parser_refuses_is_said_in_its_words(tensorrt, run, small_cnn, pictures, tmp_path):
    trt = tensorrt(TEN)
    trt.STORY.parser.append("In node 91 (importReduceMean): UNSUPPORTED_NODE")
    words = ["build", small_cnn, "--images", pictures, "--preprocess", "unit", "--out", tmp_path]
    words += QUICK
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


@pytest.mark.parametrize("version", [EIGHT, TEN])
@pytest.mark.parametrize("options", [[], ["--cuda-graph"]])
def test_a_profile_is_of_the_engines_layers(tensorrt, build, run, tmp_path, version, options):
    tensorrt(version)
    build()
    words = ["bench", engine(tmp_path), "--duration", 0, "--warmup", 0, "--profile", *options]
    code, out, err = run(*words, "--json", tmp_path / "r.json")
    assert code == 0, err
    ((found,),) = [json.loads((tmp_path / "r.json").read_text())["engines"]]
    times = [kernel["ms"] for kernel in found["kernels"]]
    assert times == [float(n) for n in range(len(times), 0, -1)]  # as the fake tells them
    assert "CaskConvolution" in {kernel["kind"] for kernel in found["kernels"]}
    assert "Kernels" in out


def test_batches_of_an_engine_are_those_of_its_profile(tensorrt, build, run, tmp_path):
    tensorrt(TEN)
    build()
    words = ["bench", engine(tmp_path), "--duration", 0, "--warmup", 0, "--batch"]
    code, out, err = run(*words, "1,2")
    assert code == 0 and "Batches" in out, err
    code, _, err = run(*words, "1,4")
    assert code == 1 and "with a batch of 4: an input must be within the engine's profile" in err


@pytest.mark.slow
def test_a_gpu_is_chosen_for_building_and_running(tensorrt, build, run, tmp_path):
    trt = tensorrt(TEN, "cuda-python")
    assert any("on Fake L4" in note for note in build("--device", 1))
    assert trt.STORY.devices == [1]
    assert set(trt.STORY.runs) <= {1}
    words = ["bench", engine(tmp_path), "--duration", 0, "--warmup", 0]
    code, _, err = run(*words, "--device", 1, "--streams", 2)
    assert code == 0, err
    assert set(trt.STORY.runs) == {1}
    code, _, err = run(*words)
    assert code == 1 and "incompatible device: Fake L4" in err
    assert any("on Fake H200" in note for note in build())
    assert trt.STORY.devices == [1, 0]
    assert any("built before" in note for note in build())


def test_a_gpu_that_is_not_there_is_refused_before_anything_runs(tensorrt, failing, monkeypatch):
    tensorrt(TEN)
    monkeypatch.setattr("deploy.pipeline.observing.observe", None)
    assert "one of the 2 GPUs of this machine, counted from 0, got 2" in failing("--device", 2)


def test_without_a_gpu_the_lines_say_on_which_to_build(tensorrt, build, tmp_path, library):
    tensorrt(TEN, "")
    said = " ".join(build("--device", 3, "--plugin", library))
    assert "cuda-python" in said and "pycuda" in said
    script = next(tmp_path.glob("out/*_trtexec.sh")).read_text()
    assert script.count(f"--device=3 --plugins={library}") == script.count("exec trtexec") > 2


@pytest.mark.slow
def test_libraries_of_plugins_are_loaded_and_part_of_the_engine(
    tensorrt, build, run, failing, tmp_path, library
):
    trt = tensorrt(TEN)
    build("--plugin", library)
    assert hasattr(ctypes.CDLL(None), "FancyPluginCreator")
    assert any("built before" in note for note in build("--plugin", library))
    longer = library.read_bytes() + b" "
    library.unlink()  # one that is loaded must not change under the process
    library.write_bytes(longer)
    build("--plugin", library)
    assert len(trt.STORY.configs) == 2
    words = ["bench", engine(tmp_path), "--duration", 0, "--warmup", 0, "--plugin"]
    assert run(*words, library)[0] == 0
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    code, _, err = run(*words, broken)
    assert code == 1 and "must load beside TensorRT 10.13.0.35" in err
    assert "none.so" in failing("--plugin", tmp_path / "none.so")


@pytest.mark.parametrize("options", [[], ["--calibrator", "entropy2"]])
def test_a_build_that_gives_nothing_is_told_in_tensorrts_words(tensorrt, failing, options):
    trt = tensorrt(TEN)
    trt.STORY.build.append("Internal Error: no kernel image is available")
    err = failing(*options)
    assert "could not build small_cnn.tensorrt.onnx: Internal Error: no kernel image" in err
    assert "every batch" not in err


def test_a_calibration_that_stops_halfway_says_how_far_it_came(tensorrt, failing):
    trt = tensorrt(EIGHT)
    trt.STORY.halfway.append("out of memory")
    assert "out of memory; TensorRT must see every batch, got 1 of 2" in failing(
        "--calibrator", "minmax"
    )


@pytest.mark.slow
def test_a_build_that_fails_behind_its_calibration_has_lost_nothing(
    tensorrt, failing, run, small_cnn, pictures, tmp_path
):
    trt = tensorrt(EIGHT)
    trt.STORY.behind.append("Error Code 10: no implementation found")
    assert "no implementation found" in failing("--calibrator", "entropy2")
    assert len(trt.STORY.configs) == 1 and not list((tmp_path / "failed").glob("*.gpu.cache"))
    trt.STORY.behind.clear()
    words = ["build", small_cnn, "--images", pictures, "--preprocess", "unit", "--target"]
    words += ["tensorrt", "--out", tmp_path / "failed", *QUICK, "--calibrator", "entropy2"]
    assert run(*words)[0] == 0
    assert [flags(config) for config in trt.STORY.configs[1:]] == [{"INT8", "FP16", "TF32"}]
    (cache,) = (tmp_path / "failed").glob("*.gpu.cache")
    _, known = text_of(cache)
    assert known.by == f"TensorRT {trt.__version__} by EntropyCalibration2"
    assert known.rule == "whole batches of 2" and set(known.model) == {"graph", "file"}


def test_what_has_no_scale_is_told(tensorrt, build):
    trt = tensorrt(EIGHT)
    trt.STORY.loses.extend(["r1", "w1"])
    said = build("--calibrator", "minmax")
    assert [note for note in said if "no scale for r1: an int8 layer reads it" in note]
    assert [note for note in said if "1 more tensors without a scale" in note]


def test_every_object_of_tensorrts_has_the_one_logger(tensorrt, build, run, tmp_path):
    trt = tensorrt(TEN)
    build()
    run("bench", engine(tmp_path), "--duration", 0, "--warmup", 0)
    assert len(trt.STORY.loggers) > 4 and len({id(one) for one in trt.STORY.loggers}) == 1


def test_tactics_of_empty_libraries_are_left_out(tensorrt, build, monkeypatch):
    trt = tensorrt(EIGHT)
    monkeypatch.setattr("deploy.targets.tensorrt.builder.stand_ins", lambda: ("CUBLAS", "CUDNN"))
    build()
    assert trt.STORY.configs[-1].sources == 0b11010


def sentences(folder: Path) -> tuple[Path, Path]:
    """A model of whole numbers, ids [n, 4] -> y [n, 4, 5], and eight rows for it."""
    rng = np.random.default_rng(3)
    weights = {
        "table": rng.standard_normal((9, 16)).astype(np.float32),
        "w": rng.standard_normal((16, 5)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], name="gather"),
        helper.make_node("MatMul", ["e", "w"], ["y"], name="product"),
    ]
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4, 5])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), folder / "words.onnx")
    np.save(folder / "ids.npy", rng.integers(0, 9, (8, 4)))
    return folder / "words.onnx", folder / "ids.npy"


@pytest.mark.parametrize(("version", "dtype"), [(EIGHT, "INT32"), (TEN, "INT64")])
def test_a_calibration_reads_whole_numbers_in_the_networks_type(
    tensorrt, run, tmp_path, version, dtype
):
    trt = tensorrt(version)
    model, rows = sentences(tmp_path)
    words = ["build", model, "--images", rows, "--target", "tensorrt", "--out", tmp_path / "out"]
    code, _, err = run(*words, *QUICK, "--calibrator", "minmax")
    assert code == 0, err
    assert trt.STORY.networks[0].inputs[0].dtype.name == dtype
    (cache,) = tmp_path.glob("out/*.gpu.cache")
    largest = np.abs(numpy_helper.to_array(onnx.load(model).graph.initializer[0])).max()
    scale = struct.unpack(">f", bytes.fromhex(cache.read_text().split("e: ")[1][:8]))[0]
    assert 0 < scale <= largest / 127 * 1.0001


def test_an_input_that_shapes_depend_on_is_tuned_for_its_values(tensorrt, run, tmp_path):
    trt = tensorrt(TEN)
    rng = np.random.default_rng(4)
    weight = numpy_helper.from_array(rng.standard_normal((6, 5)).astype(np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="product"),
        helper.make_node("Expand", ["h", "size"], ["y"], name="expand"),
    ]
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 6]),
        helper.make_tensor_value_info("size", TensorProto.INT64, [2]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 5]),
    ]
    graph = helper.make_graph(nodes, "sized", ends[:2], ends[2:], [weight])
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "sized.onnx")
    rows = {"x": rng.standard_normal((4, 1, 6)).astype(np.float32), "size": np.full((4, 2), [3, 5])}
    np.savez(tmp_path / "rows.npz", **rows)
    words = ["build", tmp_path / "sized.onnx", "--images", tmp_path / "rows.npz"]
    code, _, err = run(*words, "--target", "tensorrt", "--out", tmp_path / "out", *QUICK)
    assert code == 0, err
    assert trt.STORY.configs[0].profile.values == {"size": ((3, 5),) * 3}
    assert trt.STORY.networks[0].inputs[1].is_shape_tensor


def test_an_engine_takes_every_length_that_samples_had(tensorrt, run, tmp_path):
    trt = tensorrt(TEN)
    rng = np.random.default_rng(4)
    weights = {
        "table": rng.standard_normal((9, 6)).astype(np.float32),
        "w": rng.standard_normal((6, 5)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], name="look"),
        helper.make_node("MatMul", ["e", "w"], ["y"], name="product"),
    ]
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "length", 5])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "m.onnx")
    (tmp_path / "rows").mkdir()
    for number, length in enumerate((3, 11, 4, 5)):
        np.save(tmp_path / "rows" / f"{number}.npy", rng.integers(0, 9, (1, length)))
    words = ["build", tmp_path / "m.onnx", "--images", tmp_path / "rows"]
    code, _, err = run(*words, "--target", "tensorrt", "--out", tmp_path / "out", *QUICK)
    assert code == 0, err
    profile = trt.STORY.configs[0].profile.shapes
    assert profile == {"ids": ((1, 3), (1, 4), (2, 11))}
    lines = (tmp_path / "out" / "m_trtexec.sh").read_text()
    assert "--minShapes=ids:1x3 --optShapes=ids:1x4 --maxShapes=ids:1x11 " in lines
