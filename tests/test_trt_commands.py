"""`calib8 cache` and `calib8 calibrate --target tensorrt`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.trt_cache import parse
from deploy.cli import main

SHARED = Path(__file__).parents[1].parent / "shared" / "golden" / "tensorrt"
REAL = sorted((SHARED / "caches").glob("[!N]*.cache"))
NEEDS_SHARED = pytest.mark.skipif(not REAL, reason=f"no golden files at {SHARED}")


def run(*words: object) -> int:
    """Exit code of a command line."""
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(2)
    weights = {
        "w": rng.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "v": rng.standard_normal((4, 4, 1, 1)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "/c"),
        helper.make_node("Relu", ["c"], ["r"], "/r"),
        helper.make_node("Conv", ["r", "v"], ["y"], "/y"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 4, 4])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 13)]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    np.save(tmp_path / "x.npy", rng.standard_normal((12, 3, 6, 6)).astype(np.float32))
    return path


def calibrated(model: Path, *words: object) -> Path:
    out = model.with_suffix(".cache")
    feed = model.with_name("x.npy")
    words = ("--images", feed, "--target", "tensorrt", "-o", out, *words)
    assert run("calibrate", model, *words) == 0
    return out


@NEEDS_SHARED
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_caches_pass_show_check_and_relabel(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("cache", "show", path) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(path.read_bytes().splitlines())
    assert run("cache", "show", "--json", path) == 0
    json.loads(capsys.readouterr().out)
    assert run("cache", "check", path) == 0
    there, back = tmp_path / "there", tmp_path / "back"
    header = parse(path.read_bytes(), origin=path.name).header
    assert run("cache", "relabel", path, "--trt-version", "10.3.0", "-o", there) == 0
    assert run("cache", "check", there, "--trt-version", "10.3.0") == 0
    version = header.version or "6.0.1"
    assert run("cache", "relabel", there, "--trt-version", version, "-o", back) == 0
    assert back.read_bytes() == path.read_bytes()


@NEEDS_SHARED
@pytest.mark.parametrize("command", ["show", "check"])
def test_onnxruntimes_table_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache", command, SHARED / "caches" / "NOT_TRT_ort_resnet50.cache") == 1
    assert "onnxruntime" in capsys.readouterr().err


@NEEDS_SHARED
def test_lenet_from_the_command_line(tmp_path: Path) -> None:
    images = np.load(SHARED / "lenet" / "images.npz")["images"].astype(np.float32)[:, None]
    np.save(tmp_path / "x.npy", images / np.float32(255))
    out = tmp_path / "lenet.cache"
    words = ["--target", "tensorrt", "--trt-version", "7.2.2", "-o", out]
    words += ["--method", "entropy-tensorrt", "--batch-size", "50"]
    model = SHARED / "lenet" / "lenet.onnx"
    assert run("calibrate", model, "--images", tmp_path / "x.npy", *words) == 0
    made = parse(out.read_bytes(), origin="made")
    real = parse((SHARED / "lenet" / "table.cache").read_bytes(), origin="real")
    assert made.header == real.header
    assert [e.name for e in made.entries] == [e.name for e in real.entries]
    assert max(abs(a.bits - b.bits) for a, b in zip(made.entries, real.entries, strict=True)) <= 8


def test_a_fitting_cache_is_reused_and_a_stale_one_is_not(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = ("--method", "entropy-tensorrt")
    first = calibrated(model, *rule).read_bytes()
    assert "written" in capsys.readouterr().out
    assert calibrated(model, *rule).read_bytes() == first
    assert "reused" in capsys.readouterr().out
    calibrated(model, *rule, "--batch-size", 4)
    assert "histogram, first batch of 4" in capsys.readouterr().out
    cache = model.with_suffix(".cache")
    cache.write_bytes(cache.read_bytes().replace(b"y: ", b"z: "))
    calibrated(model, *rule, "--batch-size", 4)
    assert "was changed after" in capsys.readouterr().out


def test_calibrators_have_their_own_headers(model: Path) -> None:
    for method, header in (
        ("entropy-tensorrt", b"TRT-100300-EntropyCalibration2\n"),
        ("entropy", b"TRT-100300-EntropyCalibration2\n"),
        ("minmax", b"TRT-100300-MinMaxCalibration\n"),
        ("legacy", b"03ff00000000000003feffffde7210be9\n"),
    ):
        assert calibrated(model, "--method", method).read_bytes().startswith(header)


def test_to_qdq_and_from_qdq(model: Path, tmp_path: Path) -> None:
    cache = calibrated(model)
    qdq, plain, again = (tmp_path / name for name in ("q.onnx", "p.onnx", "p.cache"))
    assert run("cache", "to-qdq", model, cache, "-o", qdq) == 0
    as_they_are = ("--keep-batchnorm", "--own-concat-scales", "--parser", "onnx")
    assert run("cache", "to-qdq", model, cache, "-o", again, *as_they_are) == 0
    assert again.read_bytes() == qdq.read_bytes()  # it has no BatchNormalization and no Concat
    assert run("cache", "from-qdq", qdq, "-o", plain, again) == 0
    scales = parse(cache.read_bytes(), origin="").scales()
    back = parse(again.read_bytes(), origin="").scales()
    assert set(back) == {"x", "r"}
    assert all(scales[name] == scale for name, scale in back.items())
    assert run("cache", "diff", cache, again) == 1
    assert run("cache", "diff", cache, cache) == 0


@pytest.mark.parametrize(("rest", "kind"), [("fp16", 10), ("bf16", 16), ("fp32", 1)])
def test_to_qdq_gives_the_rest_a_type(rest: str, kind: int, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.onnx"
    assert run("cache", "to-qdq", model, calibrated(model), "-o", out, "--rest", rest) == 0
    made = onnx.shape_inference.infer_shapes(onnx.load(out), check_type=True, strict_mode=True)
    types = {v.name: v.type.tensor_type.elem_type for v in made.graph.value_info}
    convs = [node for node in made.graph.node if node.op_type in ("Conv", "Gemm")]
    assert convs and {types[name] for node in convs for name in node.input[:1]} == {kind}
    assert {v.type.tensor_type.elem_type for v in made.graph.output} == {1}


def test_to_qdq_refuses_a_cache_that_is_mostly_of_another_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, out = calibrated(model), tmp_path / "q.onnx"
    own = len(parse(cache.read_bytes(), origin="").scales())
    for strangers, code in ((own, 0), (own + 1, 1)):
        lines = [f"elsewhere{number}: 3c008912\n".encode() for number in range(strangers)]
        mixed = tmp_path / f"{strangers}.cache"
        mixed.write_bytes(cache.read_bytes() + b"".join(lines))
        capsys.readouterr()
        assert run("cache", "to-qdq", model, mixed, "-o", out) == code
    assert f"{own + 1} of {2 * own + 1} entries" in capsys.readouterr().err


def test_check_tells_a_wrong_version_and_a_foreign_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = calibrated(model)
    assert run("cache", "check", cache, "--model", model, "--trt-version", "10.3.0") == 0
    assert run("cache", "check", cache, "--trt-version", "8.5.3") == 1
    assert "relabel" in capsys.readouterr().out
    assert run("cache", "check", cache, "--algorithm", "MinMaxCalibration") == 1
    foreign = tmp_path / "foreign.cache"
    foreign.write_bytes(b"TRT-8503-EntropyCalibration2\nelsewhere: 3c008912\n")
    capsys.readouterr()
    assert run("cache", "check", foreign, "--model", model, "--verbose") == 1
    assert "another model" in capsys.readouterr().out


def test_merge_wants_agreement_or_a_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = b"TRT-8503-EntropyCalibration2\n"
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    a.write_bytes(head + b"x: 3c008912\ny: 3c008912\n")
    b.write_bytes(head + b"y: 3d008912\nz: 3c008912\n")
    assert run("cache", "merge", a, b, "-o", out) == 1
    assert "--on-conflict" in capsys.readouterr().err
    assert not out.exists()
    for rule, digits in (("first", b"3c"), ("last", b"3d"), ("max", b"3d")):
        assert run("cache", "merge", a, b, "-o", out, "--on-conflict", rule) == 0
        assert out.read_bytes() == head + b"x: 3c008912\ny: %b008912\nz: 3c008912\n" % digits
    b.write_bytes(b"TRT-8503-MinMaxCalibration\nz: 3c008912\n")
    assert run("cache", "merge", a, b, "-o", out) == 1


@pytest.mark.parametrize("data", [b"", b"\x00" * 64, b"TRT-8503-EntropyCalibration2\nx: 3c0"])
def test_broken_caches_end_in_one_sentence(
    data: bytes, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, out = tmp_path / "broken.cache", tmp_path / "out"
    broken.write_bytes(data)
    for words in (
        ("show", broken),
        ("check", broken),
        ("diff", broken, broken),
        ("merge", broken, "-o", out),
        ("relabel", broken, "--trt-version", "8.5.3", "-o", out),
        ("to-qdq", model, broken, "-o", out),
        ("show", tmp_path / "missing"),
        ("show", tmp_path),
        ("from-qdq", broken, "-o", out, out),
        ("from-qdq", model, "-o", out, out),
    ):
        assert run("cache", *words) == 1
        error = capsys.readouterr().err
        assert error.startswith("calib8: error: ")
        assert error.count("\n") == 1
        assert not out.exists()
