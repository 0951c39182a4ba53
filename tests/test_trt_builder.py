"""The builder's order of calls, and `--target tensorrt` without a GPU."""

import ctypes
import hashlib
import json
import re
import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calib8 import build
from calibrators.errors import CalibrationError
from calibrators.tensorrt import Callbacks, HostMemory
from deploy.calibration import store
from deploy.calibration.fingerprint import Fingerprint
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.trt_cache import ENTROPY2, parse
from deploy.errors import BackendError, SdkMissingError
from deploy.files import manifest
from deploy.frontends import load
from deploy.method import Method
from deploy.targets.shape_ranges import ShapeRange
from deploy.targets.tensorrt import builder, engines, sdk
from deploy.targets.tensorrt.builder import BuilderSettings, build_engine
from deploy.targets.tensorrt.cache_tools import cache_to_qdq
from deploy.targets.tensorrt.log import LogRecorder, record_log
from deploy.targets.tensorrt.profiles import InputShapeRange, profiles_for
from deploy.targets.tensorrt.sdk import Sdk
from deploy.targets.tensorrt.target import TensorRT
from deploy.tuning.search_options import Tuning
from tests.models import save_net as save_onnx
from tests.vendor_models import scale_nodes

CACHE = b"TRT-8503-EntropyCalibration2\nx: 3c008912\n"


@pytest.fixture
def fake(tensorrt, monkeypatch):
    """A TensorRT 8.5 whose parser and builder do what a test says; keeps the last config."""
    trt = tensorrt("8.5.3.1")
    fake_sdk = types.SimpleNamespace(trt=trt, layers=[], loggers=trt.STORY.loggers)
    fake_sdk.does, fake_sdk.reads = lambda config, log: b"plan", lambda log: True

    def build(_, network, config):
        fake_sdk.config = config
        return fake_sdk.does(config, fake_sdk.loggers[-1])

    def parse(parser, path):
        parser.network.layers = fake_sdk.layers
        data_input = types.SimpleNamespace(
            name="x", shape=(3,), dtype=trt.float32, is_shape_tensor=False
        )
        parser.network.inputs = [data_input]
        return fake_sdk.reads(fake_sdk.loggers[-1])

    monkeypatch.setattr(trt.Builder, "build_serialized_network", build)
    monkeypatch.setattr(trt.OnnxParser, "parse_from_file", parse)
    return fake_sdk


def flags(config):
    return {flag.name for flag in config.chosen}


ERROR, INFO = 1, 3  # ILogger.Severity
MODEL = Path("net.onnx")


def callbacks_of(count=2, promised=2, cache=None):
    feed = [{"x": np.zeros(3, np.float32)}] * count
    callbacks = Callbacks(
        feed, batches=promised, shapes={"x": (3,)}, memory=HostMemory(), cache=cache
    )
    callbacks.expect({"x": "float32"})
    return callbacks


def says(log, *errors):
    for text in errors:
        log.log(ERROR, text)
    log.log(INFO, "by the way")


def calibrates(config, log):
    """TensorRT's part in a calibration that goes well."""
    while config.int8_calibrator.get_batch(["x"]):
        pass
    config.int8_calibrator.write_calibration_cache(memoryview(CACHE))
    return b"plan"


def test_build_flags_and_float32_calibration(fake):
    engine = build_engine(MODEL, BuilderSettings())
    assert engine.plan == b"plan"
    assert flags(fake.config) == {"INT8", "FP16", "TF32"}
    build_engine(MODEL, BuilderSettings(int8=False, fp16=False, tf32=False))
    assert flags(fake.config) == set()
    fake.does = calibrates
    assert builder.calibrate(MODEL, BuilderSettings(), callbacks_of()) == CACHE
    assert flags(fake.config) == {"INT8"}


def test_empty_addresses_end_calibration(fake, wording):
    fake.does = calibrates

    def calibrate_shapes(**shapes):
        feed = [{"x": np.zeros(3, np.float32)}] * 2
        callbacks = Callbacks(feed, batches=2, shapes=shapes, memory=HostMemory())
        return builder.calibrate(MODEL, BuilderSettings(), callbacks)

    assert calibrate_shapes(x=(3,)) == CACHE
    with pytest.raises(CalibrationError) as refusal:
        calibrate_shapes(x=(1, 3))
    wording.check(refusal.value)
    # TensorRT asks until the list is empty; what went wrong is raised by `check`.
    callbacks = callbacks_of()
    address_counts = [len(callbacks.get_batch(["x"])) for _ in range(3)]
    assert address_counts == [1, 1, 0]
    assert callbacks.get_batch(["x"]) == []
    assert callbacks_of().get_batch(["another"]) == []


def test_early_build_failure_quotes_tensorrt(fake, wording):
    def gives_up(config, log):
        says(log, "Network has dynamic inputs", "no profile")

    fake.does = gives_up
    for callbacks in (None, callbacks_of(), callbacks_of(0, cache=CACHE)):
        with pytest.raises(BackendError) as caught:
            build_engine(MODEL, BuilderSettings(), calibrator=callbacks)
        errors = "Network has dynamic inputs | no profile"
        assert str(caught.value) == f"TensorRT could not build net.onnx: {errors}"

    def cannot(log):
        says(log, "Failed to parse ONNX model from file")
        return False

    fake.reads = cannot
    with pytest.raises(BackendError) as refusal:
        build_engine(MODEL, BuilderSettings())
    wording.check(refusal.value)


def test_calibration_failure_reports_progress(fake, wording):
    def stops(config, log):
        config.int8_calibrator.get_batch(["x"])
        says(log, "out of memory")

    fake.does = stops
    with pytest.raises(BackendError) as refusal:
        build_engine(MODEL, BuilderSettings(), calibrator=callbacks_of())
    wording.check(refusal.value)
    with pytest.raises(BackendError) as refusal:
        build_engine(MODEL, BuilderSettings(), calibrator=callbacks_of(0, cache=CACHE))
    wording.check(refusal.value)

    def stumbles(config, log):
        config.int8_calibrator.get_batch(["another"])
        says(log, "Calibration failure occurred")

    fake.does = stumbles
    with pytest.raises(KeyError, match="another"):  # an error of a callback, whatever its class
        build_engine(MODEL, BuilderSettings(), calibrator=callbacks_of())

    def short(config, log):
        says(log, "skipped a tensor")
        return calibrates(config, log) or b""

    fake.does = short
    with pytest.raises(CalibrationError) as refusal:
        build_engine(MODEL, BuilderSettings(), calibrator=callbacks_of(1))
    wording.check(refusal.value)
    assert builder.calibrate(MODEL, BuilderSettings(), callbacks_of()) == CACHE


def test_builds_share_logger_but_not_messages(fake):
    def speaks(config, log):
        says(log)
        return b"plan"

    fake.does = speaks
    with record_log() as all_along:
        logs = [build_engine(MODEL, BuilderSettings()).log for _ in range(2)]
    assert logs == [("by the way",)] * 2
    assert all_along.lines == ["by the way"] * 2
    assert len({id(logger) for logger in fake.loggers}) == 1
    fake.loggers[0].log(ERROR, "to nobody")
    assert all_along.errors == []


def test_batch_has_the_network_input_types(fake, wording):
    def first(array, dtype):
        live = Callbacks([{"x": array}], batches=1, shapes={"x": array.shape}, memory=HostMemory())
        live.expect({"x": dtype})
        addresses = live.get_batch(["x"])
        if live.error is not None:
            raise live.error
        kind = np.dtype("float32" if "float" in dtype else dtype)
        return np.frombuffer(ctypes.string_at(addresses[0], array.size * kind.itemsize), kind)

    assert first(np.array([3, 4]), "int32").tolist() == [3, 4]
    assert first(np.array([3, 4], np.int32), "int64").tolist() == [3, 4]
    assert first(np.float32([1.5]), "float16").tolist() == [1.5]  # float32, as Polygraphy gives
    assert first(np.float16([1.5]), "bfloat16").tolist() == [1.5]
    with pytest.raises(CalibrationError) as refusal:
        first(np.array([1 << 32]), "int32")
    wording.check(refusal.value)
    assert first(np.float32([1e5]), "float16").tolist() == [1e5]


def add_layers(fake):
    names = {"/a": "a", "/b": "b", "(Unnamed Layer* 2) [Add]": "c"}
    nodes = [helper.make_node("Add", ["x"], [tensor], name) for name, tensor in names.items()]
    fake.layers = [fake.trt.ILayer(node) for node in nodes]


@pytest.mark.parametrize(("fp16", "precision"), [(True, "float16"), (False, "float32")])
def test_float_layers_match_name_or_output(fake, fp16, precision):
    add_layers(fake)
    settings = BuilderSettings(float_layers={"/a": "a", "/c": "c"}, fp16=fp16)
    build_engine(MODEL, settings, calibrator=callbacks_of(cache=CACHE))
    kind = getattr(fake.trt, precision)
    assert [layer.precision for layer in fake.layers] == [kind, None, kind]
    assert "OBEY_PRECISION_CONSTRAINTS" in flags(fake.config)


def test_overflowing_layers_are_pinned_to_float32(fake):
    add_layers(fake)
    wide, kind = {"/a": "a", "/c": "c", "/gone": "d"}, fake.trt.float32
    build_engine(MODEL, BuilderSettings(float_layers={"/a": "a"}, float32_layers=wide))
    assert [layer.precision for layer in fake.layers] == [kind, None, kind]
    assert [layer.types for layer in fake.layers] == [{0: kind}, {}, {0: kind}]
    assert "OBEY_PRECISION_CONSTRAINTS" in flags(fake.config)
    add_layers(fake)
    with pytest.raises(BackendError, match="'/d' is none"):
        build_engine(
            MODEL, BuilderSettings(float_layers={"/d": "d"}), calibrator=callbacks_of(cache=CACHE)
        )
    build_engine(MODEL, BuilderSettings(), calibrator=callbacks_of(cache=CACHE))
    assert [layer.precision for layer in fake.layers] == [None] * 3
    assert "OBEY_PRECISION_CONSTRAINTS" not in flags(fake.config)


HERE = Sdk(version="8.5.3.1", calibrators=True, gpu="Some GPU sm_90")


@pytest.fixture
def model(small_cnn, tmp_path):
    """The small CNN, and the index of its largest output."""
    net = onnx.load(small_cnn)
    net.graph.node.append(helper.make_node("ArgMax", ["logits"], ["best"], "best", axis=1))
    net.graph.output.append(helper.make_tensor_value_info("best", TensorProto.INT64, ["batch", 1]))
    return save_onnx(net, tmp_path / "net.onnx")


def no_engine(*args, **options):
    raise SdkMissingError("no GPU in this test")


def built_on(model, out, backend=None, **options):
    """Build on the machine at hand; gives the notes as one text."""
    samples = np.random.default_rng(5).standard_normal((4, 1, 3, 16, 16)).astype(np.float32)
    options = {"tuning": Tuning(effort=0), "targets": (backend or TensorRT(),), **options}
    report = build(model, list(samples), out=out, duration_s=0, **options)
    return " / ".join(note for part in report.targets for note in part.notes)


@pytest.fixture
def built(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sdk, "find_sdk", no_engine)  # the same on a machine that has TensorRT
    cut = Method.of("percentile", {"percent": 90})
    policy = CachePolicy(trt_version="10.3.0")
    notes = built_on(model, tmp_path / "out", targets=("tensorrt",), method=cut, cache=policy)
    assert "no engine was built: no GPU" in notes
    return tmp_path / "out"


def test_build_without_gpu_lacks_only_engine(built):
    names = {path.name for path in built.iterdir()}
    assert {"net.tensorrt.onnx", "net.tensorrt.cache", "net.tensorrt.qdq.onnx"} <= names
    assert "net.tensorrt.cache.json" in names  # says what the cache was made from
    onnx.checker.check_model(built / "net.tensorrt.qdq.onnx")
    cache = parse((built / "net.tensorrt.cache").read_bytes(), origin="made")
    assert (cache.header.version, cache.header.algorithm) == ("10.3.0", ENTROPY2)
    tensors = {"x", "c1", "r1", "c2", "a", "r2", "c3", "r3", "p", "f", "logits"}
    assert tensors <= set(cache.scales())
    assert cache.scales()["p"] == cache.scales()["r3"]
    report = (built / "report.json").read_text()
    lines = [re.sub(r'".*', "", part) for part in report.split("trtexec ")[1:]]
    assert len(lines) >= 3
    for line in lines[:3]:
        named = dict(word[2:].split("=", 1) for word in shlex.split(line) if "=" in word)
        assert (built / named["onnx"]).is_file()
        assert named["minShapes"] == named["optShapes"] == "x:1x3x16x16"
        assert named["maxShapes"] == "x:8x3x16x16"
        if "calib" in named:
            assert (built / named["calib"]).is_file()
    assert "--calib" in lines[0]
    assert not any("--int8" in line for line in lines[2:3])


def test_qdq_model_and_cache_scales_agree(built, model):
    quantized = onnx.load(built / "net.tensorrt.qdq.onnx")
    cache = parse((built / "net.tensorrt.cache").read_bytes(), origin="made")
    qdq_scales = dict(scale_nodes(quantized))
    assert set(qdq_scales) == {"x", "r1", "r2", "r3", "f"}
    assert all(cache.scales()[name] == scale for name, scale in qdq_scales.items())
    full_cache = parse((built / "calib8/net.cache").read_bytes(), origin="the calibration's own")
    assert (
        full_cache.scales()["p"] == qdq_scales["r3"]
    )  # a pool's output has the scale of its input
    for source in (built / "net.tensorrt.onnx", model):
        for source_cache in (cache, full_cache):
            quantized_again, _ = cache_to_qdq(source, source_cache)
            assert dict(scale_nodes(quantized_again)) == qdq_scales


@pytest.mark.slow
def test_float_nodes_and_version_without_tensorrt(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sdk, "find_sdk", no_engine)
    out = tmp_path / "kept"
    notes = built_on(model, out, float_nodes=("Gemm_logits",))
    assert "f" not in dict(scale_nodes(onnx.load(out / "net.tensorrt.qdq.onnx")))
    (implicit,) = (part for part in notes.split(" / ") if "--calib" in part)
    assert "--layerPrecisions=Gemm_logits:fp16 --precisionConstraints=obey" in implicit
    assert notes.count("net.tensorrt.qdq.onnx") == 1
    assert notes.count("net.tensorrt.typed.onnx") == 2
    kept_cache = tmp_path / "kept.cache"
    built_on(model, tmp_path / "a", cache=CachePolicy(path=kept_cache, trt_version="10.3.0"))
    for folder in ("a", "b"):  # the second names no version, and uses the calibration again
        data = (tmp_path / folder / "net.tensorrt.cache").read_bytes()
        assert parse(data, origin=folder).header.version == "10.3.0"
        built_on(model, tmp_path / "b", cache=CachePolicy(path=kept_cache))


@pytest.fixture
def gpu(tensorrt, monkeypatch):
    """A TensorRT 10.13 and a GPU; lists the (file, settings, known cache) of what it builds."""
    tensorrt("10.13.0.35")
    builds, original_build = [], builder.build_engine

    def engine(path, settings, *, calibrator=None, cuda=None):
        builds.append((path.name, settings, calibrator and calibrator.read_calibration_cache()))
        return original_build(path, settings, calibrator=calibrator, cuda=cuda)

    monkeypatch.setattr(builder, "build_engine", engine)
    return builds


@pytest.mark.slow
def test_float_nodes_are_pinned_in_engine(gpu, model, tmp_path, monkeypatch):
    built_on(model, tmp_path, TensorRT(form="cache"), float_nodes=("Gemm_logits",))
    (name, settings, cache) = gpu[-1]
    assert (name, settings.float_layers) == ("net.tensorrt.onnx", {"Gemm_logits": "logits"})
    assert cache == (tmp_path / "net.tensorrt.cache").read_bytes()
    # another engine, not the one that was built before
    built_on(model, tmp_path, TensorRT(form="cache"))
    assert len(gpu) == 2
    assert not gpu[-1][1].float_layers
    built_on(model, tmp_path / "qdq", TensorRT(form="qdq"), float_nodes=("Gemm_logits",))
    assert gpu[-1][0] == "net.tensorrt.typed.onnx"
    assert gpu[-1][1].typed
    assert not gpu[-1][1].float_layers
    built_on(model, tmp_path / "wide", TensorRT(form="qdq", rest="fp32"))
    assert gpu[-1][0] == "net.tensorrt.qdq.onnx"
    assert not gpu[-1][1].typed


@pytest.mark.slow
def test_float16_overflow_is_pinned_in_engines(gpu, model, tmp_path, tensorrt, monkeypatch):
    overflowing = onnx.load(model)
    output = overflowing.graph.output[0].name
    overflowing.graph.initializer.append(numpy_helper.from_array(np.float32(1e5), "much"))
    overflowing.graph.node.append(helper.make_node("Mul", [output, "much"], ["large"], "/mul"))
    overflowing.graph.output[0].name = "large"
    onnx.save(overflowing, model)
    built_on(model, tmp_path / "cache", TensorRT(form="cache"))
    assert not gpu[-1][1].typed
    assert gpu[-1][1].float32_layers == {"/mul": "large"}
    cache = tmp_path / "cache" / "net.tensorrt.cache"
    note = json.loads(cache.with_name(cache.name + ".json").read_bytes())
    assert note["float32_layers"] == {"/mul": "large"}  # for C++
    assert store.read_cache_text(cache)[0] == cache.read_bytes()
    built_on(model, tmp_path / "typed", TensorRT(form="qdq"))
    assert gpu[-1][1].typed
    assert not gpu[-1][1].float32_layers
    built_on(model, tmp_path / "wide", TensorRT(form="cache", rest="fp32"))
    assert not gpu[-1][1].float32_layers
    tensorrt("11.1.0")  # has no types to choose, nor a way to bind one
    monkeypatch.setattr(engines, "_source_role", lambda *_: engines.QDQ_MODEL)
    built_on(model, tmp_path / "eleven")
    assert gpu[-1][0] == "net.tensorrt.qdq.onnx"
    assert not gpu[-1][1].float32_layers


def test_folder_of_stubs_is_not_tensorrt(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", types.ModuleType("tensorrt"))
    with pytest.raises(SdkMissingError, match="empty package"):
        sdk.import_tensorrt()


def test_profile_varies_only_the_batch():
    shapes = {"x": ("n", 3, None, 8), "fixed": (1, 4), "m": (2, "len")}
    shapes_fed = {"x": (2, 3, 6, 8), "fixed": (1, 4), "m": (2, 7)}
    assert profiles_for(shapes, shapes_fed, max_batch=8) == {
        "x": InputShapeRange((1, 3, 6, 8), (2, 3, 6, 8), (8, 3, 6, 8)),
        "m": InputShapeRange((2, 7), (2, 7), (2, 7)),
    }
    sample_range = ShapeRange(
        min_sizes={"x": (2, 3, 4, 8), "m": (2, 7)},
        median_sample=shapes_fed,
        max_sizes={"x": (3, 3, 9, 8), "m": (2, 11)},
        largest_sample=shapes_fed,
    )
    assert profiles_for(shapes, shapes_fed, max_batch=2, sample_range=sample_range) == {
        "x": InputShapeRange((1, 3, 4, 8), (2, 3, 6, 8), (3, 3, 9, 8)),
        "m": InputShapeRange((2, 7), (2, 7), (2, 11)),
    }
    # an open first dimension that is no batch has the sizes of the samples
    no_batch = profiles_for(
        shapes, shapes_fed, max_batch=8, batch_inputs=(), sample_range=sample_range
    )
    assert no_batch["x"] == InputShapeRange((2, 3, 4, 8), (2, 3, 6, 8), (3, 3, 9, 8))


def key_of(here=HERE, model="m", cache="c", **settings):
    digests = {"model_sha256": model, "cache_sha256": cache}
    return builder.engine_key(here, BuilderSettings(**settings), **digests)


def test_engine_is_reused_for_equal_key(tmp_path):
    path, key = tmp_path / "m.engine", key_of()
    assert not manifest.read_if_made_from(path, key)
    manifest.write_made_from(path, b"plan", key)
    assert manifest.read_if_made_from(path, key)
    older = Sdk(version="8.6.1", calibrators=True, gpu=HERE.gpu)
    for other_key in (key_of(fp16=False), key_of(model="other"), key_of(cache=None), key_of(older)):
        assert not manifest.read_if_made_from(path, other_key)
    key = key_of(profiles={"x": InputShapeRange((1, 3), (2, 3), (8, 3))})
    manifest.write_made_from(path, b"plan", key)
    assert manifest.read_if_made_from(path, key)
    path.write_bytes(b"pla")
    assert not manifest.read_if_made_from(path, key)
    profiles = {"x": InputShapeRange((1,), (1,), (1,))}
    keys = [
        key_of(Sdk("8.5.3.1", True, "GPU"), tf32=tf32, profiles=profiles) for tf32 in (True, False)
    ]
    library = tmp_path / "plugin.so"
    for data in (b"one", b"other"):
        library.write_bytes(data)
        keys.append(key_of(Sdk("8.5.3.1", True, "GPU"), plugins=(library,)))
        assert keys[-1]["plugins"] == {"plugin.so": hashlib.sha256(data).hexdigest()}
    assert all(a != b for i, a in enumerate(keys) for b in keys[:i])


LOG = (
    "[W] Missing scale and zero-point for tensor {}, expect fall back to non-int8 implementation"
    " for any layer consuming or producing given tensor"
)


def test_warnings_and_missing_scales_are_notes(model):
    net = load(model).model
    names = ["b4", "b4_output", "(Unnamed Layer* 3) [Constant]_output", "best", "logits", "c1", "a"]
    names += ["x", "r1", "f", "p", "(Unnamed Layer* 7) [Shuffle]_output", "x"]
    lines = [LOG.format(name) for name in names] + ["Calibrated batch 1 in 0.01 seconds."]
    notes = engines._log_notes(lines, net)
    assert [note.split(": ")[0].split()[-1] for note in notes] == ["x", "r1", "f", "p"]
    lines = [LOG.format(name) for name in ("x", "b4_output", "logits")]
    notes = engines._log_notes(lines, net)
    assert len(notes) == 1
    assert notes[0].startswith("TensorRT has no scale for x")
    assert engines._log_notes([], net) == ()
    recorder = LogRecorder()
    for severity, message in enumerate(["internal", "error", "warning", "info", "verbose"]):
        recorder.record(severity, message)
    assert recorder.errors == ["internal", "error"]
    assert recorder.warnings == ["warning"]
    assert recorder.lines == ["internal", "error", "warning", "info"]


def test_gpu_cache_reuse_needs_equal_inputs(tmp_path):
    path = tmp_path / "m.gpu.cache"
    parts = {"model": {"graph": "a"}, "images": {"count": 3}, "versions": {"tensorrt": "8.5.3"}}
    parts |= {"program": "TensorRT", "rule": "whole batches of 8", "method": "EntropyCalibration2"}
    made_from = Fingerprint(**parts, order="", preprocess={}, decoder={}, numbers={})
    assert engines.load_gpu_cache(path, made_from) is None
    engines.store_gpu_cache(path, b"TRT-8503-EntropyCalibration2\nx: 3c008912\n", made_from)
    assert engines.load_gpu_cache(path, made_from) == path.read_bytes()
    changes = {"model": {"graph": "b"}, "images": {"count": 4}, "rule": "whole batches of 4"}
    for part, changed_part in {**changes, "versions": {"tensorrt": "8.6.1"}}.items():
        assert engines.load_gpu_cache(path, replace(made_from, **{part: changed_part})) is None
    path.write_bytes(path.read_bytes() + b"y: 3c008912\n")
    assert engines.load_gpu_cache(path, made_from) is None
    engines.store_gpu_cache(path, b"TRT", made_from)
    path.with_name("m.gpu.cache.json").write_text("{")
    assert engines.load_gpu_cache(path, made_from) is None
