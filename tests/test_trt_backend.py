"""`--target tensorrt` on a machine without a GPU, and the parts of the builder that need none."""

from __future__ import annotations

import re
import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.fingerprint import Fingerprint
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.trt_cache import ENTROPY2, parse
from deploy.errors import ConfigError, SdkMissingError
from deploy.frontends import load
from deploy.method import Method
from deploy.pipeline import build
from deploy.targets.spans import Span
from deploy.targets.tensorrt import builder, engines, sdk, session
from deploy.targets.tensorrt.builder import (
    Engine,
    Profile,
    Settings,
    cached_engine,
    engine_key,
    keep_engine,
    profiles_for,
)
from deploy.targets.tensorrt.cache_qdq import scale_nodes
from deploy.targets.tensorrt.cache_tools import cache_to_qdq
from deploy.targets.tensorrt.sdk import KeepingLogger, Sdk, missing_tensors, sort_missing
from deploy.targets.tensorrt.target import TensorRT
from deploy.tuning.search_options import Tuning

HERE = Sdk(version="8.5.3.1", calibrators=True, gpu="Some GPU sm_90")


def residual() -> onnx.ModelProto:
    rng = np.random.default_rng(4)
    weights = {
        "a.w": rng.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "b.w": rng.standard_normal((4, 4, 1, 1)).astype(np.float32),
        "fc": rng.standard_normal((4, 5)).astype(np.float32),
        "fb": rng.standard_normal(5).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "a.w"], ["a"], "/a"),
        helper.make_node("Relu", ["a"], ["ar"], "/ar"),
        helper.make_node("Conv", ["ar", "b.w"], ["b"], "/b"),
        helper.make_node("Add", ["b", "ar"], ["sum"], "/sum"),
        helper.make_node("Relu", ["sum"], ["body"], "/body"),
        helper.make_node("MaxPool", ["body"], ["mp"], "/mp", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["mp", "b.w"], ["c"], "/c"),
        helper.make_node("GlobalAveragePool", ["c"], ["p"], "/p"),
        helper.make_node("Flatten", ["p"], ["f"], "/f"),
        helper.make_node("Gemm", ["f", "fc", "fb"], ["y"], "/fc"),
        helper.make_node("ArgMax", ["y"], ["best"], "/best", axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5]),
            helper.make_tensor_value_info("best", TensorProto.INT64, ["n", 1]),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 13)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8, producer_name="test")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(residual(), path)
    return path


def images() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.standard_normal((1, 3, 8, 8)).astype(np.float32) for _ in range(4)]


def no_engine(*args: object, **options: object) -> Sdk:
    raise SdkMissingError("no GPU in this test")


@pytest.fixture
def built(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sdk, "find", no_engine)  # the same on a machine that has TensorRT
    out = tmp_path / "out"
    policy = CachePolicy(trt_version="10.3.0")
    report = build(
        model,
        images(),
        out=out,
        targets=("tensorrt",),
        method=Method.of("percentile", {"percent": 90}),
        cache=policy,
        duration_s=0,
        tuning=Tuning(effort=0),
    )
    assert any("no engine was built: no GPU" in note for t in report.targets for note in t.notes)
    return out


def test_everything_but_the_engine_is_there(built: Path) -> None:
    names = {path.name for path in built.iterdir()}
    assert {"net.tensorrt.onnx", "net.tensorrt.cache", "net.tensorrt.qdq.onnx"} <= names
    assert "net.tensorrt.cache.json" in names  # says what the cache was made from
    onnx.checker.check_model(built / "net.tensorrt.qdq.onnx")
    cache = parse((built / "net.tensorrt.cache").read_bytes(), origin="made")
    assert (cache.header.version, cache.header.algorithm) == ("10.3.0", ENTROPY2)
    assert {"x", "a", "ar", "b", "sum", "body", "mp", "c", "p", "f", "y"} <= set(cache.scales())
    assert cache.scales()["p"] == cache.scales()["c"]


def test_the_qdq_model_and_the_cache_hold_the_same_scales(built: Path, model: Path) -> None:
    quantized = onnx.load(built / "net.tensorrt.qdq.onnx")
    cache = parse((built / "net.tensorrt.cache").read_bytes(), origin="made")
    made = dict(scale_nodes(quantized))
    assert set(made) == {"x", "ar", "body", "mp", "c", "f"}
    assert all(cache.scales()[name] == scale for name, scale in made.items())
    whole = parse((built / "net.cache").read_bytes(), origin="the calibration's own")
    assert whole.scales()["mp"] == made["mp"]  # a pool's output has the scale of its input
    for source in (built / "net.tensorrt.onnx", model):
        for given in (cache, whole):
            again, _ = cache_to_qdq(source, given)
            assert dict(scale_nodes(again)) == made


def test_the_command_lines_name_the_files_and_shapes(built: Path) -> None:
    report = (built / "report.json").read_text()
    lines = [re.sub(r'".*', "", part) for part in report.split("trtexec ")[1:]]
    assert len(lines) >= 3
    for line in lines[:3]:
        words = shlex.split(line)
        named = dict(word[2:].split("=", 1) for word in words if "=" in word)
        assert (built / named["onnx"]).is_file()
        assert named["shapes"] == "x:1x3x8x8"
        if "calib" in named:
            assert (built / named["calib"]).is_file()
    assert "--calib" in lines[0]
    assert not any("--int8" in line for line in lines[2:3])


def test_nodes_kept_in_float_get_no_pair(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk, "find", no_engine)
    out = tmp_path / "kept"
    notes = built_on(model, out, float_nodes=("/fc",))
    assert "f" not in dict(scale_nodes(onnx.load(out / "net.tensorrt.qdq.onnx")))
    (implicit,) = (part for part in notes.split(" / ") if "--calib" in part)
    assert "--layerPrecisions=/fc:fp16 --precisionConstraints=obey" in implicit
    assert notes.count("net.tensorrt.qdq.onnx") == 1
    assert notes.count("net.tensorrt.typed.onnx") == 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Settings, bytes | None]]:
    """A machine with TensorRT 10.13 and a GPU, as far as the backend asks; lists what it builds."""
    made: list[tuple[str, Settings, bytes | None]] = []
    here = Sdk("10.13.0.35", calibrators=True, gpu="Some GPU sm_90", stand_ins=("CUDNN",))

    def engine(path: Path, settings: Settings, *, calibrator: Any, cuda: Any) -> Engine:
        known = calibrator.read_calibration_cache() if calibrator is not None else None
        made.append((path.name, settings, known))
        return Engine(b"plan", (), known)

    monkeypatch.setattr(session, "find", no_engine)  # built, never opened
    monkeypatch.setattr(sdk, "find", lambda device=0: here)
    monkeypatch.setattr(engines, "gpu", lambda device: None)
    monkeypatch.setattr(builder, "build_engine", engine)
    monkeypatch.setattr(engines, "from_cache", lambda asked, known: Known(known))
    return made


class Known:
    def __init__(self, cache: bytes) -> None:
        self.cache = cache

    def read_calibration_cache(self) -> bytes:
        return self.cache


def built_on(model: Path, out: Path, backend: TensorRT | None = None, **options: Any) -> str:
    """Build on the machine at hand; gives the notes as one text."""
    backend = backend or TensorRT()
    same = np.random.default_rng(5).standard_normal((4, 1, 3, 8, 8)).astype(np.float32)
    options = {"tuning": Tuning(effort=0), **options}
    report = build(model, list(same), out=out, targets=(backend,), duration_s=0, **options)
    return " / ".join(note for part in report.targets for note in part.notes)


@pytest.mark.slow
def test_the_cache_is_for_the_tensorrt_that_builds_here(
    gpu: list[Any], model: Path, tmp_path: Path
) -> None:
    def written(folder: str) -> str | None:
        data = (tmp_path / folder / "net.tensorrt.cache").read_bytes()
        return parse(data, origin=folder).header.version

    notes = built_on(model, tmp_path / "here")
    assert written("here") == "10.13.0"
    assert gpu[-1][2] == (tmp_path / "here" / "net.tensorrt.cache").read_bytes()
    assert "TensorRT 10.13.0.35 on Some GPU sm_90" in notes
    assert "no tactics from CUDNN" in notes
    built_on(model, tmp_path / "asked", cache=CachePolicy(trt_version="8.6.1"))
    assert written("asked") == "8.6.1"
    built_on(model, tmp_path / "option", TensorRT(version="9.2.0"))
    assert written("option") == "9.2.0"


def test_without_tensorrt_the_cache_is_for_whom_the_calibration_names(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk, "find", no_engine)
    kept = tmp_path / "kept.cache"
    built_on(model, tmp_path / "a", cache=CachePolicy(path=kept, trt_version="10.3.0"))
    for folder in ("a", "b"):  # the second names no version, and uses the calibration again
        data = (tmp_path / folder / "net.tensorrt.cache").read_bytes()
        assert parse(data, origin=folder).header.version == "10.3.0"
        built_on(model, tmp_path / "b", cache=CachePolicy(path=kept))


@pytest.mark.slow
def test_nodes_kept_in_float_are_bound_in_the_engine_from_the_cache(
    gpu: list[Any], model: Path, tmp_path: Path
) -> None:
    built_on(model, tmp_path, float_nodes=("/fc",))
    assert gpu[-1][0] == "net.tensorrt.onnx" and gpu[-1][1].float_layers == {"/fc": "y"}
    built_on(model, tmp_path)  # another engine, not the one that was built before
    assert len(gpu) == 2 and not gpu[-1][1].float_layers
    built_on(model, tmp_path / "qdq", TensorRT(form="qdq"), float_nodes=("/fc",))
    assert gpu[-1][0] == "net.tensorrt.typed.onnx" and gpu[-1][1].typed
    assert not gpu[-1][1].float_layers
    built_on(model, tmp_path / "wide", TensorRT(form="qdq", rest="fp32"))
    assert gpu[-1][0] == "net.tensorrt.qdq.onnx" and not gpu[-1][1].typed


@pytest.mark.slow
def test_what_float16_does_not_hold_is_bound_in_engines_whose_types_tensorrt_chooses(
    gpu: list[Any], model: Path, tmp_path: Path
) -> None:
    held = onnx.load(model)
    output = held.graph.output[0].name
    held.graph.initializer.append(numpy_helper.from_array(np.float32(1e5), "much"))
    held.graph.node.append(helper.make_node("Mul", [output, "much"], ["large"], "/mul"))
    held.graph.output[0].name = "large"
    onnx.save(held, model)
    built_on(model, tmp_path / "cache")
    assert not gpu[-1][1].typed and gpu[-1][1].wide_layers == {"/mul": "large"}
    built_on(model, tmp_path / "typed", TensorRT(form="qdq"))
    assert gpu[-1][1].typed and not gpu[-1][1].wide_layers
    built_on(model, tmp_path / "wide", TensorRT(rest="fp32"))
    assert not gpu[-1][1].wide_layers


def test_tensorrt_calibrates_once_and_the_engine_comes_from_its_cache(
    gpu: list[Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = b"TRT-101300-EntropyCalibration2\nx: 3c008912\n"
    asked: list[Settings] = []

    def calibrates(path: Path, settings: Settings, live: object, *, cuda: object) -> bytes:
        asked.append(settings)
        return cache

    monkeypatch.setattr(builder, "calibrate", calibrates)
    monkeypatch.setattr(engines, "_live", lambda asked, request, settings, cuda, keep: keep(cache))
    for rest in ("fp16", "fp32"):  # other settings of the engine, the same calibration
        backend = TensorRT(calibrator="entropy2", max_batch=2, rest=rest)
        built_on(model, tmp_path / "out", backend)
    assert len(asked) == 1
    assert [(settings.fp16, known) for _, settings, known in gpu] == [(True, cache), (False, cache)]
    assert (tmp_path / "out" / "net.gpu.cache").read_bytes() == cache


def test_a_folder_of_stubs_is_not_taken_for_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", types.ModuleType("tensorrt"))
    with pytest.raises(SdkMissingError, match="empty package"):
        sdk.load()


def test_profiles_open_the_batch_and_fix_the_rest() -> None:
    shapes = {"x": ("n", 3, None, 8), "fixed": (1, 4), "m": (2, "len")}
    fed = {"x": (2, 3, 6, 8), "fixed": (1, 4), "m": (2, 7)}
    profiles = profiles_for(shapes, fed, most_batch=8)
    assert profiles == {
        "x": Profile((1, 3, 6, 8), (2, 3, 6, 8), (8, 3, 6, 8)),
        "m": Profile((2, 7), (2, 7), (2, 7)),
    }
    span = Span(
        least={"x": (2, 3, 4, 8), "m": (2, 7)},
        usual=fed,
        most={"x": (3, 3, 9, 8), "m": (2, 11)},
        largest=fed,
    )
    assert profiles_for(shapes, fed, most_batch=2, span=span) == {
        "x": Profile((1, 3, 4, 8), (2, 3, 6, 8), (3, 3, 9, 8)),
        "m": Profile((2, 7), (2, 7), (2, 11)),
    }
    with pytest.raises(ConfigError, match="must fit"):
        profiles_for({"x": (1, 3)}, {"x": (1, 4)}, most_batch=1)


def test_an_engine_is_used_again_only_under_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "m.engine"
    key = engine_key(HERE, Settings(), model_sha256="m", cache_sha256="c")
    assert not cached_engine(path, key)
    keep_engine(path, b"plan", key)
    assert cached_engine(path, key)
    for other in (
        engine_key(HERE, Settings(fp16=False), model_sha256="m", cache_sha256="c"),
        engine_key(HERE, Settings(), model_sha256="other", cache_sha256="c"),
        engine_key(HERE, Settings(), model_sha256="m", cache_sha256=None),
        engine_key(
            Sdk(version="8.6.1", calibrators=True, gpu=HERE.gpu),
            Settings(),
            model_sha256="m",
            cache_sha256="c",
        ),
    ):
        assert not cached_engine(path, other)
    profiled = Settings(profiles={"x": Profile((1, 3), (2, 3), (8, 3))})
    key = engine_key(HERE, profiled, model_sha256="m", cache_sha256="c")
    keep_engine(path, b"plan", key)
    assert cached_engine(path, key)
    path.write_bytes(b"pla")
    assert not cached_engine(path, key)


LOG = (
    "[W] Missing scale and zero-point for tensor {}, expect fall back to non-int8 implementation"
    " for any layer consuming or producing given tensor"
)


def test_missing_scales_are_sorted_into_harmless_and_harmful() -> None:
    names = ["fb", "fb_output", "(Unnamed Layer* 3) [Constant]_output", "best", "y", "a", "sum"]
    names += ["x", "ar", "f", "p", "(Unnamed Layer* 7) [Shuffle]_output", "x"]
    lines = [LOG.format(name) for name in names] + ["Calibrated batch 1 in 0.01 seconds."]
    found = missing_tensors(lines)
    assert found == list(dict.fromkeys(names))
    judged = sort_missing(found, load(residual()).model)
    assert {item.tensor for item in judged if item.harmful} == {"x", "ar", "f", "p"}
    assert [item.harmful for item in judged] == sorted((i.harmful for i in judged), reverse=True)
    why = {item.tensor: item.reason for item in judged}
    assert "constant" in why["fb_output"]
    assert "index" in why["best"]
    assert "output of the model" in why["y"]
    assert "fused" in why["a"]


def test_the_log_keeps_errors_apart() -> None:
    kept = KeepingLogger(least=3)
    for severity, message in enumerate(["internal", "error", "warning", "info", "verbose"]):
        kept.keep(severity, 1, message)
    assert kept.errors == ["internal", "error"]
    assert kept.warnings == ["warning"]
    assert kept.lines == ["internal", "error", "warning", "info"]


def test_warnings_become_notes() -> None:
    from deploy.targets.tensorrt.engines import _log_notes

    lines = [LOG.format(name) for name in ("x", "fb_output", "y")]
    notes = _log_notes(lines, load(residual()).model)
    assert len(notes) == 2
    assert notes[0].startswith("TensorRT has no scale for x")
    assert notes[1].startswith("TensorRT warned of 2 more")
    assert _log_notes([], load(residual()).model) == ()


def test_a_gpu_cache_is_used_again_only_for_what_it_was_made_from(tmp_path: Path) -> None:
    from deploy.targets.tensorrt.engines import fitting, store_gpu_cache

    path = tmp_path / "m.gpu.cache"
    made_from = Fingerprint(
        model={"graph": "a"},
        images={"count": 3},
        order="",
        preprocess={},
        decoder={},
        program="TensorRT",
        rule="whole batches of 8",
        method="EntropyCalibration2",
        numbers={},
        versions={"tensorrt": "8.5.3"},
    )
    assert fitting(path, made_from) is None
    store_gpu_cache(path, b"TRT-8503-EntropyCalibration2\nx: 3c008912\n", made_from)
    assert fitting(path, made_from) == path.read_bytes()
    changes: dict[str, Any] = {
        "model": {"graph": "b"},
        "images": {"count": 4},
        "rule": "whole batches of 4",
        "versions": {"tensorrt": "8.6.1"},
    }
    for part, other in changes.items():
        assert fitting(path, replace(made_from, **{part: other})) is None
    path.write_bytes(path.read_bytes() + b"y: 3c008912\n")
    assert fitting(path, made_from) is None
    store_gpu_cache(path, b"TRT", made_from)
    path.with_name("m.gpu.cache.json").write_text("{")
    assert fitting(path, made_from) is None
