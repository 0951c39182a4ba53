"""What is not int8 in float16 or bfloat16: types, casts, what stays in float32, who reads it."""

import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import main
from deploy.errors import ExportError
from deploy.feed.preprocess import Preprocess
from deploy.pipeline import build
from deploy.runtimes.ort import OrtSession
from deploy.targets import TensorRT
from deploy.targets.tensorrt.float_types import OPSETS, storable, typed
from deploy.targets.tensorrt.trtexec import ROWS, Needs, row, unread
from deploy.tuning.search_options import Tuning

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
UNIT = Preprocess(size=(16, 16))


@given(st.lists(st.floats(2**-24, 60000, width=32), min_size=1, max_size=20))
@settings(max_examples=200)
def test_a_scale_is_rounded_up_to_what_the_type_holds(values):
    scales = np.array(values, np.float32)
    half = storable(scales, "fp16")
    assert (half.astype(np.float16).astype(np.float32) == half).all() and (half >= scales).all()
    below = np.nextafter(half.astype(np.float16), np.float16(0)).astype(np.float32)
    assert (below < scales).all()
    brain = storable(scales, "bf16")
    assert not (brain.view(np.uint32) & 0xFFFF).any() and (brain >= scales).all()
    assert (brain <= scales * np.float32(1 + 2**-7)).all()
    assert storable(scales, "fp32") is scales


def quantized(tmp_path, small_cnn, pictures, **options):
    report = build(
        small_cnn, pictures, preprocess=UNIT, out=tmp_path, targets=[TensorRT(**options)],
        duration_s=0, tuning=Tuning(effort=0),
    )  # fmt: skip
    return report, tmp_path / "small_cnn.tensorrt.typed.onnx"


def kinds(model):
    found = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    known = {v.name: v.type.tensor_type.elem_type for v in found.graph.value_info}
    known |= {v.name: v.type.tensor_type.elem_type for v in found.graph.output}
    return {node.name: known[node.output[0]] for node in model.graph.node}


def test_an_output_that_the_file_calls_another_shape_is_no_hindrance(tmp_path, small_cnn, pictures):
    model = onnx.load(small_cnn)
    said = model.graph.output[0].type.tensor_type
    said.shape.dim.add().dim_param = "steps"
    model.graph.ClearField("value_info")
    onnx.save(model, tmp_path / "small_cnn.onnx")
    _, path = quantized(tmp_path / "out", tmp_path / "small_cnn.onnx", pictures)
    _, right = quantized(tmp_path / "right", small_cnn, pictures)
    nodes = [[n.SerializeToString() for n in onnx.load(one).graph.node] for one in (path, right)]
    assert nodes[0] == nodes[1]


def test_layers_are_narrow_and_the_ends_as_they_were(tmp_path, small_cnn, pictures):
    report, path = quantized(tmp_path, small_cnn, pictures)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    found = kinds(model)
    assert {found[n.name] for n in model.graph.node if n.op_type in ("Conv", "Gemm")} == {HALF}
    ends = [*model.graph.input, *model.graph.output]
    assert {v.type.tensor_type.elem_type for v in ends} == {FLOAT}
    casts = [n for n in model.graph.node if n.op_type == "Cast"]
    assert [n.output[0] for n in casts] == ["logits"]  # the input is read by a Quantize
    plain = OrtSession.open(tmp_path / "small_cnn.tensorrt.qdq.onnx", int8_kernels=False)
    narrow = OrtSession.open(path, int8_kernels=False)
    x = {"x": np.random.default_rng(3).uniform(0, 1, (1, 3, 16, 16)).astype(np.float32)}
    a, b = plain.run(x)["logits"], narrow.run(x)["logits"]
    assert b.dtype == np.float32 and np.abs(a - b).max() < 0.03 * np.abs(a).max()
    assert "typed model" in {Path(r.path).name: r.role for r in report.written}[path.name]


def test_integers_are_made_with_the_scales_that_are_stored(tmp_path, small_cnn, pictures):
    _, path = quantized(tmp_path, small_cnn, pictures)
    held = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(small_cnn).graph.initializer}
    for name in ("w1", "w2", "w3"):
        scale = held[f"{name}/scale/fp16"].astype(np.float32).reshape(-1, 1, 1, 1)
        assert np.array_equal(held[f"{name}/quantized"], np.rint(weights[name] / scale))


def net(nodes, weights, outputs, opset=13):
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", FLOAT, [2, 4])],
        [helper.make_tensor_value_info(name, FLOAT, ["n", 4]) for name in outputs],
        [numpy_helper.from_array(np.asarray(a, np.float32), n) for n, a in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def node(op, inputs, output, **attributes):
    return helper.make_node(op, inputs.split(), [output], name=op.lower(), **attributes)


@pytest.mark.parametrize("rest", ["fp16", "bf16"])
def test_what_needs_float32_keeps_it_and_is_cast_once(rest):
    nodes = [
        node("MatMul", "x w", "a"),
        node("Softmax", "a", "s"),
        node("Exp", "a", "e"),
        node("Mul", "s e", "m"),
        node("Relu", "m", "y"),
    ]
    model = net(nodes, {"w": np.eye(4)}, ["y"])
    made, kept = typed(model, rest, {})
    narrow = kinds(made)
    assert not kept and narrow["softmax"] == narrow["exp"] == FLOAT
    assert narrow["matmul"] == narrow["mul"] != FLOAT
    casts = [n for n in made.graph.node if n.op_type == "Cast"]
    assert len(casts) == len({n.input[0] for n in casts}) == 5  # x, a, s, e, y
    assert not {n.output[0] for n in casts} & {n.input[0] for n in casts}
    assert made.opset_import[0].version == OPSETS[rest]
    onnx.checker.check_model(made, full_check=True)


def test_what_grows_too_large_for_float16_stays_in_float32():
    nodes = [node("MatMul", "x w", "a"), node("Add", "a mask", "b"), node("Relu", "b", "y")]
    model = net(nodes, {"w": np.eye(4), "mask": [-1e9] * 4}, ["y"])
    made, kept = typed(model, "fp16", {"x": 20000.0, "b": 1.0})
    assert list(kept) == ["matmul", "add"] and kinds(made)["matmul"] == FLOAT
    assert "|x| reaches 2e+04" in kept["matmul"] and "|mask| reaches 1e+09" in kept["add"]
    assert kinds(made)["relu"] == FLOAT or "y" in {o.name for o in made.graph.output}
    assert not typed(model, "bf16", {"x": 20000.0})[1]  # which holds all that float32 holds


@pytest.mark.parametrize(("least", "expected"), [(1e-9, ["max", "div"]), (1e-3, [])])
def test_what_float16_would_round_to_0_keeps_a_logarithm_finite(least, expected):
    nodes = [
        node("MatMul", "x w", "a"),
        node("Relu", "a", "r"),
        node("Max", "r least", "g"),
        node("Log", "g", "l"),
        node("Div", "x g", "d"),
        node("Mul", "l d", "y"),
    ]
    model = net(nodes, {"w": np.eye(4), "least": least}, ["y"])
    made, kept = typed(model, "fp16", {})
    assert list(kept) == expected and kinds(made)["relu"] != FLOAT
    assert all(
        "least, 1e-09, which may keep a value above 0, is 0" in said for said in kept.values()
    )
    found = OrtSession.open(made).run({"x": np.zeros((2, 4), np.float32)})
    assert np.isfinite(found["y"]).all()
    assert not typed(model, "bf16", {})[1]


def test_a_divisor_that_is_moved_keeps_what_keeps_it_above_0():
    nodes = [
        node("MatMul", "x w", "a"),
        node("Clip", "a least", "g"),
        node("Expand", "g shape", "e"),
        node("Div", "x e", "y"),
    ]
    model = net(nodes, {"w": np.zeros((4, 4)), "least": 1e-12}, ["y"])
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, 4]), "shape"))
    made, kept = typed(model, "fp16", {})
    assert list(kept) == ["clip", "expand", "div"] and kinds(made)["matmul"] != FLOAT
    found = OrtSession.open(made).run({"x": np.zeros((2, 4), np.float32)})
    assert (found["y"] == 0).all()


def test_whole_numbers_moves_and_subgraphs_are_left_as_they_are():
    body = helper.make_graph(
        [node("Identity", "r", "inner")], "then", [],
        [helper.make_tensor_value_info("inner", FLOAT, None)],
    )  # fmt: skip
    other = helper.make_graph(
        [node("Identity", "r", "inner2")], "else", [],
        [helper.make_tensor_value_info("inner2", FLOAT, None)],
    )  # fmt: skip
    nodes = [
        node("Relu", "x", "r"),
        node("Shape", "r", "shape"),
        node("Gather", "shape zero", "size"),
        node("ReduceSum", "r", "sum", keepdims=0),
        node("Greater", "sum limit", "more"),
        helper.make_node("If", ["more"], ["y"], "if", then_branch=body, else_branch=other),
        node("Cast", "size", "z", to=FLOAT),
    ]
    model = net(nodes, {"limit": 0.0}, ["y", "z"])
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
    model.graph.output[1].type.tensor_type.ClearField("shape")
    model.opset_import[0].version = 19  # onnx's converter does not go into subgraphs
    made, kept = typed(model, "fp16", {})
    assert kept == {"relu": "a subgraph reads it"}
    assert not [n for n in made.graph.node if n.op_type == "Cast" and n.name != "cast"]
    x = {"x": np.ones((2, 4), np.float32)}
    assert OrtSession.open(made).run(x)["y"].tolist() == x["x"].tolist()


def test_a_model_that_cannot_be_lifted_says_so_and_is_built_without(
    tmp_path, small_cnn, pictures, monkeypatch
):
    odd = helper.make_node("Odd", ["x"], ["t"], "odd", domain="mine")
    broken = net([odd, node("Relu", "t", "y")], {}, ["y"])
    with pytest.raises(ExportError, match="operators of the domain mine"):
        typed(broken, "fp16", {})
    broken.opset_import[0].version = 19
    with pytest.raises(ExportError, match="onnx says"):  # the domain has no version
        typed(broken, "fp16", {})
    broken.opset_import.append(helper.make_opsetid("mine", 1))
    with pytest.raises(ExportError, match="types of its tensors, got none of 't'"):
        typed(broken, "fp16", {})

    def refused(*words):
        raise ExportError("it must be liftable, got this; export it again")

    monkeypatch.setattr("deploy.targets.tensorrt.cache_qdq.typed", refused)
    report, path = quantized(tmp_path, small_cnn, pictures, version="10.3.0")
    assert not path.exists() and any("no typed model" in n for n in report.targets[0].notes)
    assert Path(report.targets[0].runnable).name == "small_cnn.tensorrt.qdq.onnx"


@pytest.mark.slow
def test_the_accuracy_told_is_that_of_the_model_the_version_runs(tmp_path, small_cnn, pictures):
    for version, ending in (("8.6.1", "qdq"), ("10.3.0", "typed"), ("11.0.0", "typed")):
        report, _ = quantized(tmp_path / version, small_cnn, pictures, version=version)
        assert Path(report.targets[0].runnable).name == f"small_cnn.tensorrt.{ending}.onnx"
        (engine,) = [e for e in report.engines if not e.reference]
        assert engine.accuracy.outputs[0].sqnr_db > 20


def lines(capsys, small_cnn, pictures, out, *words):
    size = [] if pictures.suffix else ["--size", "16x16"]
    main(["build", str(small_cnn), "--images", str(pictures), *size, "--duration", "0",
          "--effort", "0", "--target", "tensorrt", "--out", str(out), *words])  # fmt: skip
    capsys.readouterr()
    text = (out / "report.md").read_text()
    parts = text.split(": trtexec ")[1:]
    return [shlex.split(part.split("\n")[0]) for part in parts], text


def test_the_command_chooses_the_type(capsys, small_cnn, pictures, tmp_path):
    found, _ = lines(capsys, small_cnn, pictures, tmp_path / "a")
    assert "--fp16" in found[0] and "--stronglyTyped" in found[2] and "--int8" not in found[3]
    assert found[3][0] == "--onnx=small_cnn.tensorrt.typed.onnx"
    found, _ = lines(capsys, small_cnn, pictures, tmp_path / "b", "--rest", "fp32")
    assert not (tmp_path / "b" / "small_cnn.tensorrt.typed.onnx").exists()
    assert {words[0] for words in found[1:]} == {"--onnx=small_cnn.tensorrt.qdq.onnx"}
    assert "--fp16" not in found[0]
    found, text = lines(capsys, small_cnn, pictures, tmp_path / "c", "--rest", "bf16")
    assert "--bf16" in found[0] and "TensorRT from 9.0 to 10" in text
    assert "TensorRT 10 from 10.15 on" in text  # bfloat16 is of opset 22


def test_no_line_asks_for_int8_of_a_model_without_pairs(capsys, small_cnn, pictures, tmp_path):
    """For which trtexec would make ranges up."""
    names = [node.name for node in onnx.load(small_cnn).graph.node]
    kept = [word for name in names for word in ("--keep-float", name)]
    found, _ = lines(capsys, small_cnn, pictures, tmp_path, *kept)
    pairs = "small_cnn.tensorrt.qdq.onnx"
    assert "QuantizeLinear" not in {n.op_type for n in onnx.load(tmp_path / pairs).graph.node}
    (line,) = (words for words in found if words[0] == f"--onnx={pairs}")
    assert "--fp16" in line and "--int8" not in line
    assert all(any("--calib" in word for word in words) for words in found if "--int8" in words)


@pytest.fixture
def growing(tmp_path):
    """A Conv, and behind it what float16 makes infinite or 0; arrays to calibrate."""
    nodes = [
        node("Conv", "x w", "c"),
        node("Relu", "c", "r"),
        node("Pow", "r two", "p"),
        node("Mul", "p much", "m"),
        node("Sqrt", "m", "s"),
        node("Add", "r least", "g"),
        node("Log", "g", "l"),
        node("Sub", "s l", "y"),
    ]
    held = {"w": np.ones((2, 3, 1, 1)), "two": 2.0, "much": 5000.0, "least": 1e-9}
    model = net(nodes, held, ["y"])
    for value in (*model.graph.input, *model.graph.output):
        shape = [1, 3 if value.name == "x" else 2, 4, 4]
        value.CopyFrom(helper.make_tensor_value_info(value.name, FLOAT, shape))
    onnx.save(model, tmp_path / "small_cnn.onnx")
    values = np.random.default_rng(0).normal(size=(8, 3, 4, 4))
    np.save(tmp_path / "x.npy", values.astype(np.float32))
    return tmp_path / "small_cnn.onnx", tmp_path / "x.npy"


WIDE = ("mul", "sqrt", "add", "log")
KEPT = ("--keep-float", "mul", "--keep-float", "relu")


@pytest.mark.parametrize(("words", "kept"), [((), {}), (KEPT, {"relu": "fp16"})])
def test_where_tensorrt_chooses_types_what_float16_does_not_hold_is_bound_to_float32(
    capsys, growing, tmp_path, words, kept
):
    found, _ = lines(capsys, *growing, tmp_path / "o", *words)
    cache, pairs, *strong = found
    outputs = "--layerOutputTypes=" + ",".join(f"{name}:fp32" for name in WIDE)
    for line, types in ((cache, kept), (pairs, {})):
        given = next(word for word in line if word.startswith("--layerPrecisions="))
        listed = dict(one.split(":") for one in given.partition("=")[2].split(","))
        assert listed == {**types, **dict.fromkeys(WIDE, "fp32")}
        assert outputs in line and "--precisionConstraints=obey" in line
    assert not [word for line in strong for word in line if "layer" in word]
    found, _ = lines(capsys, *growing, tmp_path / "wide", "--rest", "fp32")
    assert not [word for line in found for word in line if "layer" in word]


def test_the_script_runs_each_line_from_any_folder(capsys, small_cnn, pictures, tmp_path):
    """A stand-in program named trtexec, which finds the files where it is called."""
    tool = tmp_path / "bin" / "trtexec"
    tool.parent.mkdir()
    find = 'for a in "$@"; do case $a in --onnx=*|--calib=*) ls "${a#*=}" || exit 3;; esac; done'
    tool.write_text(f"#!/bin/sh\n{find}\n")
    tool.chmod(0o755)
    lines(capsys, small_cnn, pictures, tmp_path / "out", "--keep-float", "Conv_c2")
    moved = (tmp_path / "out").rename(tmp_path / "it's $(moved)")
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    for folder in (moved, Path("/")):
        path = os.path.relpath(moved / "small_cnn_trtexec.sh", folder)
        for way, names in (
            ("cache", ".onnx .cache"), ("qdq", ".qdq.onnx"), ("typed", ".typed.onnx"),
            ("11", ".typed.onnx"),
        ):  # fmt: skip
            done = subprocess.run(
                ["sh", path, way], cwd=folder, env=environment, capture_output=True, text=True
            )
            expected = [f"small_cnn.tensorrt{ending}" for ending in names.split()]
            assert done.returncode == 0 and done.stdout.split() == expected, done.stderr
        done = subprocess.run(["sh", path], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 2 and "11: with TensorRT 11" in done.stderr


def test_the_table_of_versions():
    assert [Needs(opset).first_reading() for opset in (13, 17, 18, 20, 21, 25)] == [
        "8.0.0", "8.4.0", "10.0.0", "10.0.0", "10.15.0", None,
    ]  # fmt: skip
    assert Needs(13).first_reading(typed=True) == "10.0.0"
    assert Needs(17, frozenset({"LayerNormalization", "Conv"})).first_reading() == "8.6.0"
    assert Needs(13, frozenset({"Mish"})).unmet("9.3.0") == "it does not read Mish"
    assert "LayerNormalization" in unread("8.5.3") and not unread("10.15.0")
    assert row("8.6.1").opset == 17 and not row("11.2.0").calibrators
    assert row("7.2.2") is ROWS[0]
