"""`calib8` with a fake TensorRT: build, reuse, live calibration, bench, in 8.x, 10.x and 11.x."""

import ctypes
import json
import struct
import subprocess
from shutil import which

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from deploy.calibration.store import read_cache_text
from deploy.calibration.trt_cache import parse
from deploy.runtimes.ort import OrtSession
from deploy.targets.tensorrt import sdk
from tests.vendor_models import build_net, parse_nodes, save_net, values

EIGHT, TEN, ELEVEN = "8.5.3.1", "10.13.0.35", "11.1.0"
LABELS = {EIGHT: "TRT-8503-", TEN: "TRT-101300-", ELEVEN: "TRT-100300-"}
QUICK = ["--effort", 0, "--duration", 0, "--limit", 4, "--max-batch", 2]


@pytest.fixture
def build_arguments(small_cnn, pictures, tmp_path):
    """(folder, options) -> arguments of a quick build for TensorRT."""
    arguments = ("build", small_cnn, "--images", pictures, "--preprocess", "unit", *QUICK)
    arguments = (*arguments, "--target", "tensorrt", "--out")
    return lambda out, *options: (*arguments, tmp_path / out, *options)


@pytest.fixture
def build(command, build_arguments, tmp_path):
    """(options) -> notes of a build for TensorRT, into tmp_path/out."""

    def call(*options):
        command(*build_arguments("out", *options))
        return json.loads((tmp_path / "out/report.json").read_text())["targets"][0]["notes"]

    return call


@pytest.fixture
def failing(run, build_arguments):
    """(options) -> output of a build whose engine fails."""

    def build(*options):
        code, *streams = run(*build_arguments("failed", *options))
        assert code in (1, 2)
        return " ".join(" ".join(streams).split())

    return build


def bench(folder):
    """Return the arguments that measure the engine."""
    (engine,) = folder.glob("out/*.engine")
    return "bench", engine, "--duration", 0, "--warm-up", 0


@pytest.mark.slow
@pytest.mark.parametrize("version", [EIGHT, TEN, ELEVEN])
def test_engine_is_built_reused_and_measured(tensorrt, build, command, tmp_path, version):
    trt = tensorrt(version)
    assert any(f"TensorRT {version} on Fake H200" in note for note in build())
    assert any("built before" in note for note in build())
    assert len(trt.STORY.configs) == 1
    (cache,) = tmp_path.glob("out/*.tensorrt.cache")  # for the version that builds, on reuse too
    assert cache.read_text().startswith(LABELS[version])
    command(*bench(tmp_path))
    assert trt.STORY.runs


def test_engine_of_trtexec_runs_pictures(tensorrt, build, command, small_cnn, pictures, tmp_path):
    """As in the tutorials: `check` of an engine outside of a build, without the file beside it."""
    trt = tensorrt(TEN)
    build()
    (built_engine,) = tmp_path.glob("out/*.engine")
    engine = built_engine.rename(tmp_path / "made.engine")
    options = ("--images", pictures, "--preprocess", "unit", "--duration", 0)
    text = command("check", engine, "--against", small_cnn, *options)
    assert "top-1 class" in text or "SQNR" in text
    assert trt.STORY.runs


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


def flags(config):
    return {flag.name for flag in config.chosen}


@pytest.mark.parametrize("version", [EIGHT, TEN])
@pytest.mark.parametrize("calibrator", ["entropy2", "minmax"])
def test_tensorrt_calibrates_in_float32_only(tensorrt, build, tmp_path, version, calibrator):
    trt = tensorrt(version)
    build("--calibrator", calibrator)
    calibrating, building = trt.STORY.configs
    assert flags(calibrating) == {"INT8"}
    assert flags(building) == {"INT8", "FP16", "TF32"}
    (cache,) = tmp_path.glob("out/*.gpu.cache")
    assert cache.read_text().startswith(LABELS[version])
    build("--calibrator", calibrator, "--workspace", 64, "--rest", "fp32")
    assert len(trt.STORY.configs) == 3  # another engine of the same calibration
    assert flags(trt.STORY.configs[2]) == {"INT8", "TF32"}
    read_caches = {
        config.int8_calibrator.read_calibration_cache() for config in trt.STORY.configs[1:]
    }
    assert read_caches == {cache.read_bytes()}


@pytest.mark.slow
def test_trtexec_flags_reach_script_and_engine(tensorrt, build, failing, tmp_path):
    trt = tensorrt(TEN)
    flags_given = ["--builderOptimizationLevel=5", "--versionCompatible", "--sparsity=enable"]
    flags_given.append("--hardwareCompatibilityLevel=ampere+")
    build(*(f"--trtexec-flag={flag}" for flag in flags_given))
    config = trt.STORY.configs[0]
    assert {"VERSION_COMPATIBLE", "SPARSE_WEIGHTS"} < flags(config)
    assert config.builder_optimization_level == 5
    assert config.hardware_compatibility_level == trt.HardwareCompatibilityLevel.AMPERE_PLUS
    lines = (tmp_path / "out/small_cnn_trtexec.sh").read_text().splitlines()
    assert all(" ".join(flags_given) in line for line in lines if "exec trtexec" in line)
    for flag, reason in [
        ("--int8", "calib8 itself sets"),
        ("verbose", "must begin with --"),
        ("--foo=1", "none of --refit"),
        ("--sparsity=force", "the value 'force'"),
        ("--builderOptimizationLevel=high", "invalid literal"),
    ]:
        assert reason in failing(f"--trtexec-flag={flag}")
    assert "calib8 itself sets" in failing("--trtexec-flag=--timingCacheFile=t")
    tensorrt(EIGHT)
    assert "TensorRT 8.5.3.1 must know" in failing(f"--trtexec-flag={flags_given[0]}")


@pytest.mark.slow
def test_timing_cache_option_names_the_file(tensorrt, build, tmp_path):
    trt, path = tensorrt(TEN), tmp_path / "of all/builds"
    for float_type, file_bytes in (
        ("fp16", None),
        ("fp32", b"timing\0+"),
        ("bf16", b"another version's\0"),
    ):
        if file_bytes is not None:
            path.write_bytes(file_bytes)
        notes = build("--timing-cache", path, "--rest", float_type)
        is_readable = file_bytes is None or file_bytes.startswith(b"timing")
        assert path.read_bytes() == (file_bytes or b"timing\0")
        assert trt.STORY.configs[-1].timing.data == (
            file_bytes if file_bytes and is_readable else b"timing\0"
        )
        refusal = f"{path} is not a timing cache of TensorRT {TEN} on this GPU: it was neither used"
        assert any(note.startswith(refusal) for note in notes) != is_readable
    assert not list(tmp_path.glob("out/*.timing"))
    script = (tmp_path / "out/small_cnn_trtexec.sh").read_text()
    assert script.count(f"'--timingCacheFile={path}'") == script.count("exec trtexec") > 2


def test_calibrator_without_tensorrt_is_noted(build):
    assert any("--calibrator minmax" in note for note in build("--calibrator", "minmax"))


def test_workspace_limit_reaches_script(build, tmp_path):
    build("--workspace", 64)
    script = (tmp_path / "out/small_cnn_trtexec.sh").read_text()
    assert script.count(" --memPoolSize=workspace:64") == script.count("exec trtexec") > 2


@pytest.mark.parametrize(
    ("version", "cores", "reason"),
    [
        (TEN, 2, "a typed engine for DLA needs TensorRT 11.4.1 or newer, got 10.13.0.35"),
        ("11.4.1.5", 0, "an engine for DLA needs a DLA core, and this machine has none"),
        ("11.4.1.5", 2, ""),
    ],
)
def test_dla_engine_needs_core_and_version(
    tensorrt, build, command, tmp_path, monkeypatch, version, cores, reason
):
    trt = tensorrt(version)
    monkeypatch.setattr(trt.Builder, "num_DLA_cores", cores)
    notes = " / ".join(build("--dla"))
    if reason:
        assert "no engine was built" in notes
        assert reason in notes
    else:
        assert "no engine" not in notes
        config = trt.STORY.configs[0]
        assert config.default_device_type == trt.DeviceType.DLA
        assert config.DLA_core == 0
        assert trt.STORY.parser_flags == {"ADJUST_FOR_DLA"}
        assert flags(config) == {"TF32", "GPU_FALLBACK"}
        assert [*map(list, config.profile.shapes["x"])] == 3 * [[1, 3, 16, 16]]
        assert "nodes inside 1 DLA loadable" in (tmp_path / "out/report.md").read_text()
        assert "does not tell" in command(*bench(tmp_path))


def test_absent_calibrators_and_gpus_are_refused(tensorrt, failing, monkeypatch):
    tensorrt(ELEVEN)
    assert "calibrators, got 11.1.0" in failing("--calibrator", "entropy2")
    tensorrt(TEN)
    monkeypatch.setattr("deploy.pipeline.calibration_run.observe", None)
    output = failing("--device", 2)
    assert "of the 2 GPUs" in output
    assert "got 2" in output


@pytest.mark.slow
def test_parser_errors_are_quoted(tensorrt, run, failing, build_arguments, tmp_path):
    tensorrt(TEN).STORY.parser.append("In node 91 (importReduceMean): UNSUPPORTED_NODE")
    code, out, _ = run(*build_arguments("out", "--target", "tensorrt,onnxruntime"))
    assert code == 1
    assert "importReduceMean" in " ".join(out.split())
    assert list(tmp_path.glob("out/*.int8.onnx"))  # the other target is built all the same
    assert "importReduceMean" in failing()


@pytest.mark.parametrize("part", ["Builder", "Runtime"])
def test_failed_engine_build_keeps_other_files(tensorrt, failing, monkeypatch, tmp_path, part):
    def broken(*_):  # what the bindings raise where the driver does not fit
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(tensorrt(EIGHT), part, broken)
    output = failing()
    assert "machine: pybind11::init()" in output
    assert "larger" not in output
    file_names = [path.name.split(".", 1)[1] for path in (tmp_path / "failed").glob("small_cnn.*")]
    onnx = [f"tensorrt.{form}onnx" for form in ("", "qdq.", "typed.")]
    assert sorted(file_names) == ["tensorrt.cache", "tensorrt.cache.json", *onnx]


def test_engine_runs_in_graph(tensorrt, build, command, tmp_path):
    trt = tensorrt(TEN)
    build()
    runs_of_build = len(trt.STORY.runs)
    command(*bench(tmp_path), "--cuda-graph")
    assert len(trt.STORY.runs) > runs_of_build


@pytest.mark.parametrize("version", [EIGHT, TEN])
@pytest.mark.parametrize("options", [[], ["--cuda-graph"]])
def test_latency_profile_lists_engine_layers(tensorrt, build, command, tmp_path, version, options):
    tensorrt(version)
    build()
    out = command(*bench(tmp_path), "--profile", *options, "--json", tmp_path / "r.json")
    ((engine,),) = [json.loads((tmp_path / "r.json").read_text())["engines"]]
    times = [kernel["ms"] for kernel in engine["kernels"]]
    assert times == [float(n) for n in range(len(times), 0, -1)]  # as the fake tells them
    assert "CaskConvolution" in {kernel["kind"] for kernel in engine["kernels"]}
    assert "Kernels" in out


@pytest.mark.slow
def test_device_builds_and_runs_the_engine(tensorrt, build, command, refusal, tmp_path, wording):
    trt = tensorrt(TEN, "cuda-python")
    assert any("on Fake L4" in note for note in build("--device", 1))
    assert trt.STORY.devices == [1]
    assert set(trt.STORY.runs) <= {1}
    measure = bench(tmp_path)
    command(*measure, "--device", 1)
    wording.check(refusal(*measure))
    assert set(trt.STORY.runs) == {1}
    assert any("on Fake H200" in note for note in build())
    assert trt.STORY.devices == [1, 0]
    assert any("built before" in note for note in build())


def test_trtexec_commands_name_gpu_without_gpu(tensorrt, build, tmp_path, library):
    tensorrt(TEN, "")
    notes = " ".join(build("--device", 3, "--plugin", library))
    assert "cuda-python" in notes
    assert "pycuda" in notes
    script = next(tmp_path.glob("out/*_trtexec.sh")).read_text()
    assert script.count(f"--device=3 --plugins={library}") == script.count("exec trtexec") > 2


@pytest.mark.slow
def test_changed_plugin_rebuilds_the_engine(
    tensorrt, build, run, refusal, failing, tmp_path, library, wording
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
    measure = (*bench(tmp_path), "--plugin")
    assert run(*measure, library)[0] == 0
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    wording.check(refusal(*measure, broken))
    assert "none.so" in failing("--plugin", tmp_path / "none.so")


@pytest.mark.slow
def test_late_build_failure_keeps_gpu_cache(tensorrt, failing, command, build_arguments, tmp_path):
    trt = tensorrt(EIGHT)
    trt.STORY.late_errors.append("Error Code 10: no implementation found")
    assert "no implementation found" in failing("--calibrator", "entropy2")
    assert len(trt.STORY.configs) == 1
    assert list((tmp_path / "failed").glob("*.tensorrt.cache"))
    trt.STORY.late_errors.clear()
    command(*build_arguments("failed", "--calibrator", "entropy2"))
    assert [flags(config) for config in trt.STORY.configs[1:]] == [{"INT8", "FP16", "TF32"}]
    (cache,) = (tmp_path / "failed").glob("*.gpu.cache")
    _, fingerprint = read_cache_text(cache)
    assert fingerprint.by == f"TensorRT {trt.__version__} by EntropyCalibration2"
    assert fingerprint.rule == "whole batches of 2"
    assert set(fingerprint.model) == {"graph", "file"}


def test_missing_scales_are_reported(tensorrt, build):
    tensorrt(EIGHT).STORY.loses.extend(["r1", "w1"])
    notes = build("--calibrator", "minmax")
    assert any("no scale for r1:" in note for note in notes)
    assert not any("w1" in note for note in notes)  # a warning that costs no int8


def test_all_sessions_share_one_logger(tensorrt, build, tmp_path, command):
    trt = tensorrt(TEN)
    build()
    command(*bench(tmp_path))
    assert len(trt.STORY.loggers) > 4
    assert len({id(logger) for logger in trt.STORY.loggers}) == 1


def test_batches_must_fit_the_profile(tensorrt, build, tmp_path, command, refusal):
    tensorrt(TEN)
    build()
    measure = (*bench(tmp_path), "--batch")
    assert "Batches" in command(*measure, "1,2")
    error = refusal(*measure, "1,4")
    assert "batch of 4" in error
    assert "profile" in error


@pytest.fixture
def build_quickly(command, tmp_path):
    """(model, samples, options) -> the folder of a quick build of it for TensorRT."""

    def build(model, samples, *options):
        feed = ("--images", samples, "--target", "tensorrt", "--out", tmp_path / "out")
        command("build", model, *feed, *QUICK, *options)
        return tmp_path / "out"

    return build


def sentences(path, rng, length, width):
    """A model of whole numbers, ids [n, length] -> y [n, length, 5]."""
    weights = {"table": rng.standard_normal((9, width)), "w": rng.standard_normal((width, 5))}
    nodes = [("Gather", "table ids", "e", "gather"), ("MatMul", "e w", "y", "product")]
    ids = {"ids": (TensorProto.INT64, ["n", length])}
    return save_net(path / "words.onnx", nodes, ids, {"y": ["n", length, 5]}, weights)


@pytest.mark.parametrize(("version", "dtype"), [(EIGHT, "INT32"), (TEN, "INT64")])
def test_integer_inputs_have_the_network_type(tensorrt, build_quickly, tmp_path, version, dtype):
    trt, rng = tensorrt(version), np.random.default_rng(3)
    model = sentences(tmp_path, rng, 4, 16)
    np.save(tmp_path / "ids.npy", rng.integers(0, 9, (8, 4)))
    (cache,) = build_quickly(model, tmp_path / "ids.npy", "--calibrator", "minmax").glob(
        "*.gpu.cache"
    )
    assert trt.STORY.networks[0].inputs[0].dtype.name == dtype
    largest = np.abs(numpy_helper.to_array(onnx.load(model).graph.initializer[0])).max()
    scale = struct.unpack(">f", bytes.fromhex(cache.read_text().split("e: ")[1][:8]))[0]
    assert 0 < scale <= largest / 127 * 1.0001


def test_shape_input_profile_uses_its_values(tensorrt, build_quickly, tmp_path):
    trt, rng = tensorrt(TEN), np.random.default_rng(4)
    nodes = [("MatMul", "x w", "h", "product"), ("Expand", "h size", "y", "expand")]
    ends = {"x": [1, 6], "size": (TensorProto.INT64, [2])}
    weights = {"w": rng.standard_normal((6, 5))}
    model = save_net(tmp_path / "sized.onnx", nodes, ends, {"y": [None, 5]}, weights)
    rows = {"x": rng.standard_normal((4, 1, 6)).astype(np.float32), "size": np.full((4, 2), [3, 5])}
    np.savez(tmp_path / "rows.npz", **rows)
    build_quickly(model, tmp_path / "rows.npz")
    assert trt.STORY.configs[0].profile.values == {"size": ((3, 5),) * 3}
    assert trt.STORY.networks[0].inputs[1].is_shape_tensor


def test_engine_profile_covers_all_sample_lengths(tensorrt, build_quickly, tmp_path):
    trt, rng = tensorrt(TEN), np.random.default_rng(4)
    model = sentences(tmp_path, rng, "length", 6)
    (tmp_path / "rows").mkdir()
    for number, length in enumerate((3, 11, 4, 5)):
        np.save(tmp_path / "rows" / f"{number}.npy", rng.integers(0, 9, (1, length)))
    out = build_quickly(model, tmp_path / "rows")
    assert trt.STORY.configs[0].profile.shapes == {"ids": ((1, 3), (1, 4), (2, 11))}
    lines = (out / "words_trtexec.sh").read_text()
    assert "--minShapes=ids:1x3 --optShapes=ids:1x4 --maxShapes=ids:2x11 " in lines


def newest_model(*, smooth=False):
    """Convs between operators that opsets 17 to 20 added; `smooth`: an attribute of 18 too."""
    rng = np.random.default_rng(2)
    constants = {
        "s": np.linspace(0.5, 1.5, 16),
        "b": np.linspace(-1, 1, 16),
        "axes": np.array([2, 3]),
    }
    constants |= {"w1": rng.normal(scale=0.3, size=(8, 3, 3, 3)), "fc": rng.normal(size=(4, 5))}
    constants |= {
        "w2": rng.normal(scale=0.3, size=(4, 4, 3, 3)),
        "scales": np.array([1, 1, 0.5, 0.5]),
    }
    nodes = parse_nodes(
        "Conv x w1 -> c | Gelu c -> g | Split g -> h i | Add h i -> a",
        "LayerNormalization a s b -> n | Conv n w2 -> d",
        "Resize d _ scales -> r" if smooth else "HardSwish d -> r",
        "ReduceMean r axes -> m | MatMul m fc -> y",
        **{"Conv": {"pads": [1, 1, 1, 1]}, "Split": {"axis": 1, "num_outputs": 2}},
        **{"Resize": {"mode": "linear", "antialias": 1}, "ReduceMean": {"keepdims": 0}},
    )
    return build_net(nodes, {"x": ["n", 3, 16, 16]}, {"y": ["n", 5]}, constants, opset=20, ir=10)


@pytest.fixture
def build_newest(command, pictures, tmp_path, monkeypatch):
    """(model, options) -> folder and notes of a build; no TensorRT is installed."""
    monkeypatch.setattr(sdk, "cache_reading_version", lambda: None)

    def call(model, *options, out="out"):
        onnx.save(model, tmp_path / "net.onnx")
        feed = ("--images", pictures, "--size", "16x16", "--target", "tensorrt")
        quick = ("--effort", 0, "--duration", 0, "--out", tmp_path / out)
        command("build", tmp_path / "net.onnx", *feed, *quick, *options)
        (target,) = json.loads((tmp_path / out / "report.json").read_text())["targets"]
        return tmp_path / out, " / ".join(target["notes"])

    return call


def opset(path):
    return onnx.load(path).opset_import[0].version


def test_model_suits_the_requested_version(build_newest):
    out, notes = build_newest(newest_model(), "--trt-version", "8.5.3")
    x = {"x": np.random.default_rng(1).normal(size=(2, 3, 16, 16)).astype(np.float32)}
    expected = OrtSession.open(newest_model()).run(x)["y"]
    for name, max_error in (("net.tensorrt.onnx", 1e-4), ("net.tensorrt.qdq.onnx", 0.2)):
        model = onnx.load(out / name)
        onnx.checker.check_model(model, full_check=True)
        assert model.opset_import[0].version == 17
        assert model.ir_version == 8
        ops = {n.op_type for n in model.graph.node}
        assert not ops & {"Gelu", "LayerNormalization"}
        assert {"Erf", "HardSwish"} <= ops
        reduced = [n for n in model.graph.node if n.op_type == "ReduceMean"]
        assert all(len(n.input) == 1 for n in reduced)
        assert (
            np.abs(OrtSession.open(model).run(x)["y"] - expected).max()
            <= max_error * np.abs(expected).max()
        )
    assert "opset 17, got 20: 1 Gelu, 1 LayerNorm" in notes
    assert "TensorRT 8.5.3: trtexec --onnx=net.tensorrt.onnx" in notes
    assert "from 8.5 to 10: trtexec --onnx=net.tensorrt.qdq.onnx" in notes
    assert opset(out / "net.tensorrt.typed.onnx") == 20  # the first with typed networks reads it


@pytest.mark.slow
def test_cache_names_match_the_written_model(build_newest):
    out, _ = build_newest(newest_model(), "--trt-version", "8.6.1")
    cache = parse((out / "net.tensorrt.cache").read_bytes(), origin="made")
    model = onnx.load(out / "net.tensorrt.onnx")
    ops = {n.op_type for n in model.graph.node}
    assert "LayerNormalization" in ops
    assert "Gelu" not in ops  # 8.6 reads it, 8.5 does not
    tensors = {name for n in model.graph.node for name in n.output} | {"x"}
    assert {"x", "c", "g", "h", "i", "a", "n", "d", "r", "m", "y"} == set(cache.scales()) <= tensors
    old, _ = build_newest(newest_model(), "--trt-version", "10.3.0", out="old")
    assert opset(old / "net.tensorrt.onnx") == 20
    old_cache = parse((old / "net.tensorrt.cache").read_bytes(), origin="made")
    assert old_cache.scales() == cache.scales()


def test_unsupported_versions_get_no_command(build_newest):
    out, notes = build_newest(newest_model(smooth=True), "--trt-version", "8.5.3")
    assert "Resize 'r'," in notes
    assert "attribute antialias" in notes
    assert "8.5.3 cannot read net.tensorrt.onnx" in notes
    assert "opset 17 at most, got 20" in notes
    assert "calib=" not in notes
    assert "TensorRT 10: trtexec --onnx=net.tensorrt.qdq.onnx" in notes
    assert "cache)" not in (out / "net_trtexec.sh").read_text()
    assert opset(out / "net.tensorrt.onnx") == 20


@pytest.mark.parametrize(
    ("version", "reason"),
    [("8.6.1", "it reads opset 17 at most, got 20"), ("10.3.0", "it does not read Unique")],
)
def test_unread_model_is_a_warning(command, pictures, tmp_path, version, reason):
    """A script for a TensorRT that cannot read the model would fail on the GPU machine."""
    model = newest_model()
    model.graph.node.extend(parse_nodes("Unique m -> u"))
    model.graph.output.extend(values({"u": ["k"]}))
    onnx.save(model, tmp_path / "net.onnx")
    out = tmp_path / "out"
    feed = ("--images", pictures, "--size", "16x16", "--target", "tensorrt")
    quick = ("--effort", 0, "--duration", 0, "--out", out, "--trt-version", version)
    screen = command("build", tmp_path / "net.onnx", *feed, *quick)
    assert f"Warning tensorrt: TensorRT {version} cannot read the model: {reason};" in screen
    assert "TensorRT 10.15.0 or newer does" in screen
    assert f"calib8 build --config {out}/calib8.toml --trt-version 10.15.0" in screen
    assert "net_trtexec.sh" not in screen


@pytest.mark.slow
def test_older_installed_tensorrt_limits_the_files(build_newest, monkeypatch):
    model = newest_model()
    model.graph.node.extend(parse_nodes("Unique m -> u"))
    model.graph.output.extend(values({"u": ["k"]}))
    _, notes = build_newest(model, "--trt-version", "10.3.0")
    assert "10.3.0 cannot read net.tensorrt.onnx" in notes
    assert "not read Unique" in notes
    assert "from 10.15 on: trtexec --onnx=net.tensorrt.qdq.onnx" in notes
    monkeypatch.setattr(sdk, "cache_reading_version", lambda: "8.6.1")
    out, notes = build_newest(newest_model(), "--trt-version", "10.3.0")
    assert opset(out / "net.tensorrt.onnx") == 17
    assert "for TensorRT 8.6.1" in notes


@pytest.mark.slow
def test_reused_cache_header_follows_installed_version(build_newest, monkeypatch):
    def headers(*options):
        out, _ = build_newest(newest_model(), *options)
        names = ("calib8/net.cache", "net.tensorrt.cache")
        return {parse((out / n).read_bytes(), origin=n).header.version for n in names}

    assert headers() == {"10.3.0"}
    monkeypatch.setattr("deploy.pipeline.calibration_run.observe", None)  # nothing is run again
    monkeypatch.setattr(sdk, "cache_reading_version", lambda: "8.6.1")
    assert headers() == {"8.6.1"}
    assert headers("--trt-version", "9.2.0") == {"9.2.0"}
    assert headers() == {"8.6.1"}
    monkeypatch.setattr(sdk, "cache_reading_version", lambda: None)
    assert headers() == {"8.6.1"}  # as the cache that is used again


def test_cache_from_qdq_follows_installed_version(build_newest, command, tmp_path, monkeypatch):
    out, _ = build_newest(newest_model(), "--trt-version", "10.3.0")

    def header(*options):
        files = tmp_path / "plain.onnx", tmp_path / "plain.cache"
        command("cache", "from-qdq", out / "net.tensorrt.qdq.onnx", "-o", *files, *options)
        return parse(files[1].read_bytes(), origin="made").header.version

    assert header() == "10.3.0"
    monkeypatch.setattr(sdk, "cache_reading_version", lambda: "8.6.1")
    assert header() == "8.6.1"
    assert header("--trt-version", "9.2.0") == "9.2.0"
