"""TensorRT's float part: float16 and bfloat16 types, and the trtexec commands for them."""

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

from calib8 import build
from deploy.calibration.reference_outputs import open_single_thread
from deploy.errors import ExportError
from deploy.feed.preprocess import Preprocess
from deploy.pipeline import evaluate, measure
from deploy.runtimes.ort import OrtSession
from deploy.targets import TensorRT
from deploy.targets.tensorrt import trtexec
from deploy.targets.tensorrt.float_types import FIRST_OPSET_BY_TYPE, narrow_float_part, round_scales
from deploy.targets.tensorrt.trtexec import ParserRequirements, find_unsupported_option
from deploy.tuning.search_options import Tuning
from tests.models import read_target
from tests.vendor_models import build_net, parse_nodes

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
UNIT = Preprocess(size=(16, 16))


@pytest.mark.slow
@given(st.lists(st.floats(2**-17, 64, width=32), min_size=1, max_size=20))
@settings(max_examples=200)
def test_scale_rounds_up_to_representable_value(values):
    scales = np.array(values, np.float32)
    half = round_scales(scales, "fp16")
    assert (half.astype(np.float16).astype(np.float32) == half).all()
    assert (half >= scales).all()
    below = np.nextafter(half.astype(np.float16), np.float16(0)).astype(np.float32)
    assert (below < scales).all()
    brain = round_scales(scales, "bf16")
    assert not (brain.view(np.uint32) & 0xFFFF).any()
    assert (brain >= scales).all()
    assert (brain <= scales * np.float32(1 + 2**-7)).all()
    assert round_scales(scales, "fp32") is scales


def build_report(net, images, out, **options):
    """Return the report of a TensorRT build with these options; nothing is searched."""
    target = TensorRT(**options)
    quick = {"duration_s": 0, "preprocess": UNIT, "tuning": Tuning(effort=0)}
    return build(net, images, out=out, targets=[target], **quick)


@pytest.fixture(scope="module")
def quantized(small_cnn, pictures, tmp_path_factory):
    """The report of a build of the small CNN, and its folder."""
    out = tmp_path_factory.mktemp("quantized")
    return build_report(small_cnn, pictures, out), out


TYPED_NAME, PAIRS_NAME = "small_cnn.tensorrt.typed.onnx", "small_cnn.tensorrt.qdq.onnx"


def element_types(model):
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    type_by_tensor = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    type_by_tensor |= {v.name: v.type.tensor_type.elem_type for v in inferred.graph.output}
    return {node.name: type_by_tensor[node.output[0]] for node in model.graph.node}


def test_wrong_declared_output_shape_is_ignored(tmp_path, small_cnn, pictures, quantized):
    model = onnx.load(small_cnn)
    model.graph.output[0].type.tensor_type.shape.dim.add().dim_param = "steps"
    model.graph.ClearField("value_info")
    onnx.save(model, tmp_path / "small_cnn.onnx")
    build_report(tmp_path / "small_cnn.onnx", pictures, tmp_path / "out")
    model, closed_model = (
        onnx.load(folder / TYPED_NAME) for folder in (tmp_path / "out", quantized[1])
    )
    assert [*model.graph.node] == [*closed_model.graph.node]


def test_quantizer_rounds_float16_values_to_nearest_on_cpu(tmp_path):
    """Before version 1.30, ONNX Runtime's QuantizeLinear rounds float16 values towards zero."""
    nodes = parse_nodes("QuantizeLinear x s z -> q | DequantizeLinear q s z -> y", name="{op}")
    weights = {"s": np.float16(0.1), "z": np.int8(0)}
    model = half_net(nodes, weights, shape=[4])
    onnx.save(model, tmp_path / "half.onnx")
    for source in (model, tmp_path / "half.onnx"):
        session = open_single_thread(source, stand_in=True)
        y = session.run({"x": np.array([-2.85, -2.25, 2.55, 2.85], np.float16)})["y"]
        assert np.rint(y / weights["s"]).tolist() == [-29, -23, 26, 29]


def test_quantizer_reads_the_float16_value_of_the_node_before_it():
    """ONNX Runtime computes the Sigmoid in float32, whose result is rounded to float16."""
    weights = {"s": np.float16(0.001), "z": np.uint8(0)}
    sigmoid = half_net(parse_nodes("Sigmoid x -> y"), {}, shape=[4096])
    quantized_sigmoid = half_net(
        parse_nodes("Sigmoid x -> g | QuantizeLinear g s z -> q | DequantizeLinear q s z -> y"),
        weights,
        shape=[4096],
    )
    x = {"x": np.linspace(-4, -1.2, 4096).astype(np.float16)}
    y = open_single_thread(sigmoid).run(x)["y"]
    quantized_y = open_single_thread(quantized_sigmoid, stand_in=True).run(x)["y"]
    expected = np.rint(y.astype(np.float32) / np.float32(weights["s"]))
    assert np.array_equal(np.rint(quantized_y / weights["s"]), expected)


def half_net(nodes, weights, *, shape):
    """A net of float16 from x to y."""
    model = build_net(nodes, {"x": shape}, {"y": shape}, weights, opset=19, ir=9)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = HALF
    return model


def test_layers_are_float16_and_ends_float32(small_cnn, quantized):
    report, folder = quantized
    model = onnx.load(folder / TYPED_NAME)
    onnx.checker.check_model(model, full_check=True)
    types = element_types(model)
    assert {types[n.name] for n in model.graph.node if n.op_type in ("Conv", "Gemm")} == {HALF}
    ends = [*model.graph.input, *model.graph.output]
    assert {v.type.tensor_type.elem_type for v in ends} == {FLOAT}
    casts = [n for n in model.graph.node if n.op_type == "Cast"]
    assert [n.output[0] for n in casts] == ["logits"]  # the input is read by a Quantize
    x = {"x": np.random.default_rng(3).uniform(0, 1, (1, 3, 16, 16)).astype(np.float32)}
    sessions = [
        OrtSession.open(folder / file_name, int8_kernels=False)
        for file_name in (PAIRS_NAME, TYPED_NAME)
    ]
    a, b = (session.run(x)["logits"] for session in sessions)
    assert b.dtype == np.float32
    assert np.abs(a - b).max() < 0.03 * np.abs(a).max()
    assert "typed model" in {Path(r.path).name: r.role for r in report.written}[TYPED_NAME]
    typed_weights, weights = initializers(folder / TYPED_NAME), initializers(small_cnn)
    for name in ("w1", "w2", "w3"):
        scale = array(typed_weights[f"{name}/scale/fp16"]).astype(np.float32).reshape(-1, 1, 1, 1)
        nearest = np.rint(array(weights[name]) / scale)
        assert np.array_equal(array(typed_weights[f"{name}/quantized"]), nearest)


def test_typed_model_agrees_at_extreme_scales(tmp_path):
    """What float16 rounds to 0 or to infinity stays float32, the scale of its pair too."""
    rng = np.random.default_rng(0)
    nodes, constants, outputs = [], {}, {}
    for index, gain in enumerate((1e-6, 1e6, 1e9)):
        for kind in ("int8", "float"):
            a, b, y = (f"{name}{index}{kind}" for name in "aby")
            nodes.append(f"Gemm x {a} -> s{y} | Gemm s{y} {b} -> {y}")
            weights = rng.normal(size=(2, 4, 4))
            constants |= {a: gain * weights[0], b: weights[1] / gain}
            outputs[y] = [2, 4]
    model = build_net(parse_nodes(*nodes), {"x": [2, 4]}, outputs, constants)
    onnx.save(model, tmp_path / "small_cnn.onnx")
    samples = [{"x": values} for values in rng.normal(size=(8, 2, 4)).astype(np.float32)]
    build(
        tmp_path / "small_cnn.onnx",
        samples,
        out=tmp_path / "out",
        targets="tensorrt",
        float_nodes=("s*float", "y*float"),
        duration_s=0,
        effort=0,
    )
    pairs, typed = (
        OrtSession.open(tmp_path / "out" / file_name, int8_kernels=False)
        for file_name in (PAIRS_NAME, TYPED_NAME)
    )
    for sample in samples:
        expected, actual = (session.run(sample) for session in (pairs, typed))
        for name in outputs:
            largest = np.abs(expected[name]).max()
            assert np.abs(actual[name] - expected[name]).max() < 0.03 * largest, name


@pytest.mark.slow
def test_search_judges_the_models_that_are_evaluated(small_cnn, pictures, tmp_path, monkeypatch):
    """Their outputs are stored for the evaluation; those of the Q/DQ model would not fit."""
    stored_targets = set()

    def find_stored_outputs(*arguments):
        stored = evaluate.find_stored_outputs(*arguments)
        stored_targets.update(stored)
        return stored

    monkeypatch.setattr(measure, "find_stored_outputs", find_stored_outputs)
    options = {"targets": "tensorrt", "preprocess": UNIT, "duration_s": 0}
    build(small_cnn, pictures, out=tmp_path / "out", **options)
    assert stored_targets == {"tensorrt"}


def initializers(path):
    return {t.name: t for t in onnx.load(path).graph.initializer}


def array(tensor):
    return numpy_helper.to_array(tensor)


def net(text, weights, outputs="y", **attributes):
    """The model of these nodes, which are named after their operators."""
    nodes = parse_nodes(text, name="{op}", **attributes)
    ends = {name: ["n", 4] for name in outputs}
    return build_net(nodes, {"x": [2, 4]}, ends, weights)


@pytest.mark.parametrize("float_type", ["fp16", "bf16"])
def test_softmax_stays_float32_with_one_cast(float_type):
    text = "MatMul x w -> a | Softmax a -> s | Exp a -> e | Mul s e -> m | Relu m -> y"
    typed_model, float_reasons = narrow_float_part(net(text, {"w": np.eye(4)}), float_type, {})
    narrow = element_types(typed_model)
    assert not float_reasons
    assert narrow["softmax"] == narrow["exp"] == FLOAT
    assert narrow["matmul"] == narrow["mul"] != FLOAT
    casts = [n for n in typed_model.graph.node if n.op_type == "Cast"]
    assert len(casts) == len({n.input[0] for n in casts}) == 5  # x, a, s, e, y
    assert not {n.output[0] for n in casts} & {n.input[0] for n in casts}
    assert typed_model.opset_import[0].version == FIRST_OPSET_BY_TYPE[float_type]
    onnx.checker.check_model(typed_model, full_check=True)


@pytest.mark.parametrize(
    "text",
    [
        "MatMul x w -> a | Exp a -> a/fp32 | Softmax a/fp32 -> y",
        "MatMul x w -> y | Softmax y -> y/fp16",
    ],
)
def test_added_tensor_names_avoid_existing_names(text):
    model = net(text, {"w": np.eye(4)})
    typed_model, _ = narrow_float_part(model, "fp16", {})
    onnx.checker.check_model(typed_model, full_check=True)
    names = [node.name for node in typed_model.graph.node]
    assert len(names) == len({*names})


def test_values_beyond_float16_stay_float32():
    text = "MatMul x w -> a | Add a mask -> b | Relu b -> y"
    model = net(text, {"w": np.eye(4), "mask": [-1e9] * 4})
    typed_model, float_reasons = narrow_float_part(model, "fp16", {"x": 20000.0, "b": 1.0})
    assert list(float_reasons) == ["matmul", "add"]
    assert element_types(typed_model)["matmul"] == FLOAT
    assert "|x| reaches 2e+04" in float_reasons["matmul"]
    assert "|mask| reaches 1e+09" in float_reasons["add"]
    assert element_types(typed_model)["relu"] == FLOAT or "y" in {
        o.name for o in typed_model.graph.output
    }
    _, float_reasons = narrow_float_part(model, "bf16", {"x": 20000.0})
    assert not float_reasons  # bfloat16 holds all that float32 holds
    constants = {"w": np.zeros((4, 4)), "least": 1e-12, "shape": np.array([2, 4])}
    text = "MatMul x w -> a | Clip a least -> g | Expand g shape -> e | Div x e -> y"
    model = net(text, constants)
    typed_model, float_reasons = narrow_float_part(model, "fp16", {})
    assert list(float_reasons) == ["clip", "expand", "div"]
    assert element_types(typed_model)["matmul"] != FLOAT
    outputs = OrtSession.open(typed_model).run({"x": np.zeros((2, 4), np.float32)})
    assert (outputs["y"] == 0).all()


@pytest.mark.parametrize(("min_input", "expected"), [(1e-9, ["max", "div"]), (1e-3, [])])
def test_log_guard_below_float16_stays_float32(min_input, expected):
    text = "MatMul x w -> a | Relu a -> r | Max r least -> g | Log g -> l"
    model = net(f"{text} | Div x g -> d | Mul l d -> y", {"w": np.eye(4), "least": min_input})
    typed_model, float_reasons = narrow_float_part(model, "fp16", {})
    assert list(float_reasons) == expected
    assert element_types(typed_model)["relu"] != FLOAT
    lost = "least, 1e-09, which may keep a value above 0, is 0"
    assert all(lost in reason for reason in float_reasons.values())
    outputs = OrtSession.open(typed_model).run({"x": np.zeros((2, 4), np.float32)})
    assert np.isfinite(outputs["y"]).all()
    assert not narrow_float_part(model, "bf16", {})[1]


def test_integers_and_subgraphs_are_not_narrowed():
    branches = {}
    for branch, out in (("then_branch", "inner"), ("else_branch", "inner2")):
        ends = [helper.make_tensor_value_info(out, FLOAT, None)]
        body = parse_nodes(f"Identity r -> {out}")
        branches[branch] = helper.make_graph(body, branch, [], ends)
    text = "Relu x -> r | Shape r -> shape | Gather shape zero -> size | ReduceSum r -> sum"
    text += " | Greater sum limit -> more | If more -> y | Cast size -> z"
    attributes = {"sum": {"keepdims": 0}, "y": branches, "z": {"to": FLOAT}}
    model = net(text, {"limit": 0.0, "zero": np.array(0)}, "yz", **attributes)
    model.graph.output[1].type.tensor_type.ClearField("shape")
    typed_model, float_reasons = narrow_float_part(model, "fp16", {})
    assert list(float_reasons) == ["relu"]
    assert "subgraph" in float_reasons["relu"]
    assert not [n for n in typed_model.graph.node if n.op_type == "Cast" and n.name != "cast"]
    x = {"x": np.ones((2, 4), np.float32)}
    assert OrtSession.open(typed_model).run(x)["y"].tolist() == x["x"].tolist()


def test_pair_before_custom_operator_stays_float32():
    nodes = "QuantizeLinear x s z -> q | DequantizeLinear q s z -> d | Relu d -> t | Relu t -> y"
    model = net(nodes, {"s": 0.5, "z": np.int8(0)}, t={"domain": "mine"})
    model.opset_import.append(helper.make_opsetid("mine", 1))
    model.graph.value_info.append(helper.make_tensor_value_info("t", FLOAT, [2, 4]))
    typed_model, _ = narrow_float_part(model, "fp16", {})
    readers = [node.domain for node in typed_model.graph.node if "d" in node.input]
    assert readers == ["mine"]  # without a Cast in between


def test_failed_lift_leaves_no_typed_model(tmp_path, small_cnn, pictures, monkeypatch, wording):
    broken = net("Odd x -> t | Relu t -> y", {}, t={"domain": "mine"})
    with pytest.raises(ExportError, match="onnx says"):  # the domain has no version
        narrow_float_part(broken, "fp16", {})
    broken.opset_import.append(helper.make_opsetid("mine", 1))
    with pytest.raises(ExportError) as raised:
        narrow_float_part(broken, "fp16", {})
    wording.check(raised.value)

    def refused(*arguments):
        raise ExportError("it must be liftable, got this; export it again")

    monkeypatch.setattr("deploy.targets.tensorrt.cache_qdq.narrow_float_part", refused)
    (target,) = build_report(small_cnn, pictures, tmp_path, version="10.3.0").targets
    assert not (tmp_path / TYPED_NAME).exists()
    assert "no typed model" in " ".join(target.notes)
    assert Path(target.runnable).name == PAIRS_NAME


@pytest.mark.slow
def test_accuracy_uses_model_of_the_version(tmp_path, small_cnn, pictures):
    for version, name in (("8.6.1", PAIRS_NAME), ("10.3.0", TYPED_NAME), ("11.0.0", TYPED_NAME)):
        report = build_report(small_cnn, pictures, tmp_path / version, version=version)
        assert Path(report.targets[0].runnable).name == name
        (engine,) = [e for e in report.engines if not e.reference]
        assert engine.accuracy.outputs[0].sqnr_db > 20


@pytest.fixture
def lines(run, small_cnn, pictures):
    """(folder, options) -> arguments of each trtexec command in a report, and the report's text."""

    def call(out, *arguments, model=small_cnn, images=pictures):
        size = () if images.suffix else ("--size", "16x16")
        quick = ("--duration", 0, "--effort", 0, "--target", "tensorrt", "--out", out)
        run("build", model, "--images", images, *size, *quick, *arguments)
        text = (out / "report.md").read_text()
        parts = text.split(": trtexec ")[1:]
        return [shlex.split(part.split("\n")[0]) for part in parts], text

    return call


@pytest.mark.slow
def test_rest_option_sets_trtexec_types(lines, small_cnn, tmp_path):
    commands, _ = lines(tmp_path / "a")
    assert "--fp16" in commands[0]
    assert "--stronglyTyped" in commands[2]
    assert "--int8" not in commands[3]
    assert commands[3][0] == f"--onnx={TYPED_NAME}"
    commands, _ = lines(tmp_path / "b", "--rest", "fp32")
    assert not (tmp_path / "b" / TYPED_NAME).exists()
    assert {command[0] for command in commands[1:]} == {f"--onnx={PAIRS_NAME}"}
    assert "--fp16" not in commands[0]
    commands, text = lines(tmp_path / "c", "--rest", "bf16")
    assert "--bf16" in commands[0]
    assert "TensorRT from 9.0 to 10" in text
    assert "TensorRT 10 from 10.15 on" in text  # bfloat16 is of opset 22


def test_trtexec_has_no_int8_without_pairs(lines, small_cnn, tmp_path):
    """Without pairs, trtexec would invent ranges for int8."""
    names = [node.name for node in onnx.load(small_cnn).graph.node]
    keep_float = [argument for name in names for argument in ("--keep-float", name)]
    commands, _ = lines(tmp_path, *keep_float)
    assert "QuantizeLinear" not in {n.op_type for n in onnx.load(tmp_path / PAIRS_NAME).graph.node}
    (pairs_command,) = (line for line in commands if line[0] == f"--onnx={PAIRS_NAME}")
    assert "--fp16" in pairs_command
    assert "--int8" not in pairs_command
    for command in commands:
        assert "--int8" not in command or any("--calib" in argument for argument in command)


@pytest.fixture
def overflowing_model(tmp_path):
    """A Conv, and behind it what float16 makes infinite or 0; arrays to calibrate."""
    text = "Conv x w -> c | Relu c -> r | Pow r two -> p | Mul p much -> m | Sqrt m -> s"
    constants = {"w": np.ones((2, 3, 1, 1)), "two": 2.0, "much": 5000.0, "least": 1e-9}
    model = net(f"{text} | Add r least -> g | Log g -> l | Sub s l -> y", constants)
    for value in (*model.graph.input, *model.graph.output):
        shape = [1, 3 if value.name == "x" else 2, 4, 4]
        value.CopyFrom(helper.make_tensor_value_info(value.name, FLOAT, shape))
    onnx.save(model, tmp_path / "small_cnn.onnx")
    values = np.random.default_rng(0).normal(size=(8, 3, 4, 4))
    np.save(tmp_path / "x.npy", values.astype(np.float32))
    return {"model": tmp_path / "small_cnn.onnx", "images": tmp_path / "x.npy"}


WIDE = ("mul", "sqrt", "add", "log")
FLOAT_OPTIONS = ("--keep-float", "mul", "--keep-float", "relu")


@pytest.mark.parametrize(
    ("arguments", "precision_by_layer"), [((), {}), (FLOAT_OPTIONS, {"relu": "fp16"})]
)
def test_trtexec_pins_float16_overflow_to_float32(
    lines, overflowing_model, tmp_path, arguments, precision_by_layer
):
    commands, _ = lines(tmp_path / "o", *arguments, **overflowing_model)
    cache, pairs, *strong = commands
    outputs = "--layerOutputTypes=" + ",".join(f"{name}:fp32" for name in WIDE)
    for line, types in ((cache, precision_by_layer), (pairs, {})):
        option = next(argument for argument in line if argument.startswith("--layerPrecisions="))
        precisions = dict(pair.split(":") for pair in option.partition("=")[2].split(","))
        assert precisions == {**types, **dict.fromkeys(WIDE, "fp32")}
        assert outputs in line
        assert "--precisionConstraints=obey" in line
    assert not [word for line in strong for word in line if "layer" in word]
    commands, _ = lines(tmp_path / "wide", "--rest", "fp32", **overflowing_model)
    assert not [word for line in commands for word in line if "layer" in word]


@pytest.mark.parametrize(
    ("version", "files"),
    [("10.7.0", ["small_cnn.tensorrt.onnx", TYPED_NAME]), ("10.8.0", [TYPED_NAME])],
)
def test_dla_commands_match_tensorrt_versions(lines, tmp_path, version, files):
    commands, text = lines(tmp_path, "--dla", "--trt-version", version)
    assert [command[0] for command in commands] == [f"--onnx={file}" for file in files]
    for command in commands:
        assert {"--useDLACore=0", "--allowGPUFallback", "--shapes=x:1x3x16x16"} <= set(command)
    assert "--adjustForDLA" in commands[-1]
    assert "--adjustForDLA" not in commands[0] or files == [TYPED_NAME]
    assert "with TensorRT 11 from 11.4.1" in text
    assert "JetPack 7.2.2" in text
    for last_version in ("10.7 DLA", "11.4.0 have no DLA"):
        assert last_version in text
    assert ("does not support --dla" in text) == (version == "10.8.0")


@pytest.mark.parametrize(
    ("options", "supporting", "lacking"),
    [
        ({"precision": "fp8"}, ["10.2.0", "11.0.0"], ["8.6.1", "10.1.0"]),
        ({"dla": True}, ["8.6.1", "10.7.0", "11.4.1"], ["10.8.0", "11.4.0"]),
        ({"rest": "bf16"}, ["9.0.0", "11.0.0"], ["8.6.1"]),
        ({}, ["8.6.1", "10.3.0", "11.0.0"], []),
    ],
)
def test_option_that_version_lacks_is_named(options, supporting, lacking, wording):
    target = TensorRT(**options)
    for version in supporting:
        assert not [*find_unsupported_option(target, version)]
    for version in lacking:
        wording.check(next(find_unsupported_option(target, version)))


def test_trtexec_script_runs_from_any_folder(lines, small_cnn, tmp_path):
    """A stand-in program named trtexec, which finds the files where it is called."""
    tool = tmp_path / "bin" / "trtexec"
    tool.parent.mkdir()
    find = 'for a in "$@"; do case $a in --onnx=*|--calib=*) ls "${a#*=}" || exit 3;; esac; done'
    tool.write_text(f"#!/bin/sh\n{find}\n")
    tool.chmod(0o755)
    lines(tmp_path / "out", "--keep-float", "Conv_c2")
    moved_folder = (tmp_path / "out").rename(tmp_path / "it's $(moved)")
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    for folder in (moved_folder, Path("/")):
        path = os.path.relpath(moved_folder / "small_cnn_trtexec.sh", folder)
        cache_files = ["small_cnn.tensorrt.onnx", "small_cnn.tensorrt.cache"]
        files_by_choice = {"cache": cache_files, "": [TYPED_NAME], "qdq": [PAIRS_NAME]}
        files_by_choice |= {"typed": [TYPED_NAME], "11": [TYPED_NAME]}
        for choice, names in files_by_choice.items():
            run_options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
            process = subprocess.run(["sh", path, *choice.split()], **run_options)
            assert process.returncode == 0, process.stderr
            assert process.stdout.split() == names, process.stderr
        process = subprocess.run(["sh", path, "help"], cwd=folder, capture_output=True, text=True)
        assert process.returncode == 2
        assert "11: with TensorRT 11" in process.stderr


@pytest.mark.parametrize(
    ("version", "shipped_names", "line"),
    [
        ("8.6.1", ["small_cnn.tensorrt.onnx", "small_cnn.tensorrt.cache"], ""),
        ("10.3.0", [TYPED_NAME], "typed"),
        ("10.3.0 --rest bf16", ["small_cnn.tensorrt.onnx", "small_cnn.tensorrt.cache"], ""),
        ("11.2.0", [TYPED_NAME], ""),
    ],
)
def test_shipped_files_are_the_versions(
    run, small_cnn, pictures, tmp_path, version, shipped_names, line
):
    quick = ("--size", "16x16", "--duration", 0, "--effort", 0, "--target", "tensorrt")
    arguments = (*quick, "--trt-version", *version.split(), "--out", tmp_path)
    screen = " ".join(run.ok("build", small_cnn, "--images", pictures, *arguments).split())
    shipped = " with ".join(f"{tmp_path}/{name}" for name in shipped_names)
    assert f"Ship {shipped} Report" in screen
    script = tmp_path / "small_cnn_trtexec.sh"
    assert screen.endswith(f"sh {script} {line}".strip())
    assert read_target(tmp_path)["shipped"] == shipped.split(" with ")
    assert "/usr/src/tensorrt/bin" in script.read_text()  # where a Jetson has trtexec
    default_command = script.read_text().split("''|")[1].splitlines()[0]
    assert ("--stronglyTyped" in default_command) == (line == "typed")
    assert all(name in default_command for name in shipped_names)


def test_first_tensorrt_version_by_requirement(wording):
    versions = [ParserRequirements(opset).first_version() for opset in (13, 17, 18, 20, 21, 25)]
    assert versions == ["8.0.0", "8.4.0", "10.0.0", "10.0.0", "10.15.0", "11.5.0"]
    assert ParserRequirements(13).first_version("typed") == "10.0.0"
    assert ParserRequirements(19).first_version("typed", "dla") == "11.4.1"
    norm = frozenset({"LayerNormalization", "Conv"})
    assert ParserRequirements(17, norm).first_version() == "8.6.0"
    wording.check(ParserRequirements(13, frozenset({"Mish"})).unmet_reason("9.3.0"))
    assert "LayerNormalization" in trtexec.unsupported_operators("8.5.3")
    assert not trtexec.unsupported_operators("10.15.0")
    assert trtexec.features_of("8.6.1").opset == 17
    assert not trtexec.features_of("11.2.0").calibrators
    assert trtexec.features_of("7.2.2") is trtexec.FEATURES[0]
