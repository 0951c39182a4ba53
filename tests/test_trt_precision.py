"""What is not int8: float16 and bfloat16 types, and `--precision fp8`."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from calib8 import build
from calibrators.grids import FP8, fake_quantize, fp8_codes, round_to_grid, symmetric_scale
from calibrators.histogram import Histogram
from calibrators.mse import range_errors
from calibrators.rounding import gram, round_by_output
from deploy.errors import ConfigError, ExportError
from deploy.feed.preprocess import Preprocess
from deploy.frontends import load
from deploy.graph.index import Graph
from deploy.graph.placement import TENSORRT_FP8
from deploy.graph.plan import analyse
from deploy.method import Method
from deploy.pipeline.evaluate import open_single_thread
from deploy.runtimes.ort import OrtSession
from deploy.targets import TensorRT
from deploy.targets.tensorrt import trtexec
from deploy.targets.tensorrt.cache_qdq import from_qdq
from deploy.targets.tensorrt.float_types import OPSETS, at_opset, narrow_float_part, round_scales
from deploy.targets.tensorrt.trtexec import ParserRequirements
from deploy.tuning.repairs.repair_layers import find_weighted_layers, read_all_quantizations
from deploy.tuning.search_options import Tuning
from tests.vendor_models import build_net, parse_nodes, tensors

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
UNIT = Preprocess(size=(16, 16))


@pytest.mark.slow
@given(st.lists(st.floats(2**-24, 60000, width=32), min_size=1, max_size=20))
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


def build_report(net, images, out, *, plan=None, **options):
    """Return the report of a TensorRT build with these options; only a plan starts a search."""
    method_options = (
        {"method": "minmax"} if options.get("precision") == "fp8" else {"preprocess": UNIT}
    )
    target, tuning = TensorRT(**options), Tuning(plan=plan) if plan else Tuning(effort=0)
    return build(
        net, images, out=out, targets=[target], duration_s=0, tuning=tuning, **method_options
    )


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
    models = [onnx.load(folder / TYPED_NAME) for folder in (tmp_path / "out", quantized[1])]
    nodes = [[node.SerializeToString() for node in model.graph.node] for model in models]
    assert nodes[0] == nodes[1]


@pytest.mark.parametrize("version", [onnxruntime.__version__, "1.29.0"])
def test_float16_rounds_to_nearest_on_cpu(version, tmp_path, monkeypatch):
    """Before version 1.30, ONNX Runtime's QuantizeLinear rounds float16 values towards zero."""
    monkeypatch.setattr(onnxruntime, "__version__", version)
    nodes = parse_nodes("QuantizeLinear x s z -> q | DequantizeLinear q s z -> y", name="{op}")
    weights = {"s": np.float16(0.1), "z": np.int8(0)}
    model = build_net(nodes, {"x": [4]}, {"y": [4]}, weights, opset=19, ir=9)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = HALF
    onnx.save(model, tmp_path / "half.onnx")
    for source in (model, tmp_path / "half.onnx"):
        session = open_single_thread(source, stand_in=True)
        y = session.run({"x": np.array([-2.85, -2.25, 2.55, 2.85], np.float16)})["y"]
        assert np.rint(y / weights["s"]).tolist() == [-29, -23, 26, 29]


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
    assert typed_model.opset_import[0].version == OPSETS[float_type]
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
    """For which trtexec would make ranges up."""
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
    assert "with TensorRT 11 from 11.4.1" in text
    assert "JetPack 7.2.2" in text
    for last_version in ("10.7 DLA", "11.4.0 have no DLA"):
        assert last_version in text


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
        files_by_choice = {"cache": cache_files, "": cache_files, "qdq": [PAIRS_NAME]}
        files_by_choice |= {"typed": [TYPED_NAME], "11": [TYPED_NAME]}
        for choice, names in files_by_choice.items():
            run_options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
            process = subprocess.run(["sh", path, *choice.split()], **run_options)
            assert process.returncode == 0, process.stderr
            assert process.stdout.split() == names, process.stderr
        process = subprocess.run(["sh", path, "help"], cwd=folder, capture_output=True, text=True)
        assert process.returncode == 2
        assert "11: with TensorRT 11" in process.stderr


def test_first_tensorrt_version_by_requirement(wording):
    versions = [ParserRequirements(opset).first_reading() for opset in (13, 17, 18, 20, 21, 25)]
    assert versions == ["8.0.0", "8.4.0", "10.0.0", "10.0.0", "10.15.0", "11.5.0"]
    assert ParserRequirements(13).first_reading("typed") == "10.0.0"
    assert ParserRequirements(19).first_reading("typed", "dla") == "11.4.1"
    norm = frozenset({"LayerNormalization", "Conv"})
    assert ParserRequirements(17, norm).first_reading() == "8.6.0"
    wording.check(ParserRequirements(13, frozenset({"Mish"})).unmet("9.3.0"))
    assert "LayerNormalization" in trtexec.unsupported_operators("8.5.3")
    assert not trtexec.unsupported_operators("10.15.0")
    assert trtexec.features_of("8.6.1").opset == 17
    assert not trtexec.features_of("11.2.0").calibrators
    assert trtexec.features_of("7.2.2") is trtexec.FEATURES[0]


FLOAT8 = TensorProto.FLOAT8E4M3FN

BYTES = np.arange(256, dtype=np.uint8)
CODES = helper.make_tensor("codes", FLOAT8, [256], BYTES.tobytes(), raw=True)
VALUES = array(CODES).astype(np.float32)  # onnx's own reading of every code


def test_fp8_codes_match_onnx():
    codes = fp8_codes(VALUES, FP8)
    assert (codes[~np.isnan(VALUES)] == BYTES[~np.isnan(VALUES)]).all()
    assert set(codes[np.isnan(VALUES)].tolist()) <= {0x7F, 0xFF}
    assert np.isnan(VALUES).sum() == 2
    assert fp8_codes(np.float32([0, -0.0, np.nan]), FP8).tolist() == [0, 0x80, 0x7F]


@given(st.lists(st.floats(-600, 600, width=32), min_size=1))
def test_fp8_grid_neighbours_enclose_the_value(values):
    x = np.array(values, np.float32).clip(-448, 448)
    below, above = round_to_grid(x, FP8, np.floor), round_to_grid(x, FP8, np.ceil)
    nearest = round_to_grid(x, FP8)
    assert (below <= x).all()
    assert (x <= above).all()
    assert ((nearest == below) | (nearest == above)).all()
    grid = np.unique(VALUES[np.isfinite(VALUES)])
    assert np.isin(below, grid).all()
    assert np.isin(above, grid).all()
    between = (grid[None] > below[:, None]) & (grid[None] < above[:, None])
    assert not between.any()


def pair(op, x, scale, dtype=np.float32):
    """x -> Neg -> Relu or Clip -> Q -> DQ -> y, in fp8."""
    kind = {np.float32: FLOAT, np.float16: TensorProto.FLOAT16}[dtype]
    reads = "n" if op == "Relu" else "n low high"
    pairs = "QuantizeLinear r s z -> q | DequantizeLinear q s z -> y"
    nodes = parse_nodes(f"Neg x -> n | {op} {reads} -> r | {pairs}")
    inputs = {"s": scale, "low": 0, "high": 6e4}
    zero = helper.make_tensor("z", FLOAT8, [], b"\0", raw=True)
    constants = tensors({name: np.array(value, dtype) for name, value in inputs.items()})
    ends = {"x": (kind, [x.size])}, {"y": (kind, [x.size])}
    return build_net(nodes, *ends, [*constants, zero], opset=19, ir=9)


@pytest.mark.parametrize("op", ["Relu", "Clip"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("scale", [1.0, 0.0124])
def test_onnxruntime_rounds_like_the_fp8_grid(op, dtype, scale):
    grid = np.unique(VALUES[np.isfinite(VALUES)])
    middle = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([grid, middle, np.nextafter(middle, np.float32(9)), [464, 465, 9e4]])
    x = (x * scale).clip(-6e4, 6e4).astype(dtype)
    outputs = OrtSession.open(pair(op, x, scale, dtype), threads=1).run({"x": -x})["y"]
    step = np.float32(dtype(scale))
    expected = fake_quantize(np.maximum(x, 0).astype(np.float32), step, 0, FP8).astype(dtype)
    assert np.array_equal(outputs, expected)


def histogram():
    h = Histogram()
    # values for which both grids have ranges of their own; one in five draws gives lp the same
    h.observe((np.random.default_rng(8).standard_t(3, 20000) * 0.7).astype(np.float32))
    return h


@pytest.mark.parametrize("name", ["mse", "lp"])
def test_error_search_uses_the_requested_grid(name):
    h, method = histogram(), Method.of(name)
    power = 2.0 if name == "mse" else 3.0
    counts = h.magnitudes(2048)
    centres = (np.arange(2048) + 0.5) * h.full_range / 2048
    fp8_amax = method.search(FP8)(h).amax
    int8_amax = method.search()(h).amax
    ends = np.array([fp8_amax, int8_amax])
    errors = range_errors(centres[1:], counts[1:], -ends, ends, FP8, power)
    assert fp8_amax != int8_amax
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name", ["minmax", "percentile"])
def test_minmax_and_percentile_ignore_the_grid(name):
    h, method = histogram(), Method.of(name)
    assert not method.is_int8_only
    assert method.search(FP8)(h) == method.search()(h)


PAD = {"pads": [1, 1, 1, 1]}


def network(text, shapes, *, has_own_domain=False, **attributes):
    """The model of these nodes x -> y, with random weights of these shapes."""
    nodes, weights = parse_nodes(text, name="/{out}", **attributes), {}
    for name, shape in shapes.items():
        rng = np.random.default_rng(list(name.encode()))
        spread = 0.06 if shape == (32, 32, 3, 3) else 0.2
        weights[name] = rng.normal(scale=spread, size=shape)
    opsets = {"": 13} | ({"own": 1} if has_own_domain else {})
    return build_net(nodes, {"x": ["n", 3, 8, 8]}, {"y": None}, weights, opset=opsets)


def wide(**options):
    """A stem, two Convs of 32 channels with a residual Add between, a classifier."""
    text = "Conv x w1 -> c1 | Relu c1 -> r1 | Conv r1 w2 b2 -> c2 | Relu c2 -> r2"
    text += " | Conv r2 w3 -> c3 | Add c3 r1 -> a | Relu a -> r3 | Conv r3 w4 -> c4"
    text += " | GlobalAveragePool c4 -> p | Flatten p -> f | Gemm f fc fb -> y"
    shapes = {"w1": (32, 3, 3, 3), "w2": (32, 32, 3, 3), "b2": (32,), "w3": (32, 32, 1, 1)}
    shapes |= {"w4": (32, 32, 1, 1), "fc": (32, 16), "fb": (16,)}
    return network(text, shapes, c1=PAD, c2=PAD, **options)


def test_layers_without_fp8_kernel_stay_float(wording):
    text = "Conv x w1 -> stem | Conv stem w2 -> groups | Conv groups w3 -> window"
    text += " | Conv window w4 -> narrow | ConvTranspose narrow w5 -> up | Conv up w6 -> good"
    text += " | MaxPool good -> pool | GlobalAveragePool pool -> p | Flatten p -> f"
    shapes = {"w1": (32, 3, 3, 3), "w2": (64, 16, 1, 1), "w3": (32, 64, 7, 7)}
    shapes |= {"w4": (16, 32, 1, 1), "w5": (16, 32, 2, 2), "w6": (64, 32, 3, 3), "w7": (64, 10)}
    attributes = {"window": {"pads": [3, 3, 3, 3]}, "pool": {"kernel_shape": [2, 2]}}
    attributes |= {"stem": PAD, "groups": {"group": 2}, "good": PAD}
    model = network(f"{text} | Gemm f w7 -> y", shapes, **attributes)
    plan = analyse(load(model).model, TENSORRT_FP8)
    reason_by_node = {d.node: d.reason for d in plan.decisions}
    assert plan.int8_nodes == ("/good",)
    assert {d.precision for d in plan.decisions} > {"fp8"}
    for name in ("stem", "groups", "window", "up"):
        wording.check(reason_by_node[f"/{name}"])
    assert "(3)" in reason_by_node["/stem"]
    assert "groups" in reason_by_node["/groups"]
    assert "49" in reason_by_node["/window"]
    assert "(16)" in reason_by_node["/narrow"]
    assert "(10)" in reason_by_node["/y"]
    assert "ConvTranspose" in reason_by_node["/up"]
    assert not any("int8" in reason for reason in reason_by_node.values())


@pytest.fixture(scope="module")
def wide_net(tmp_path_factory):
    path = tmp_path_factory.mktemp("fp8") / "net.onnx"
    onnx.save(wide(), path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "x.npy"
    np.save(path, np.random.default_rng(9).normal(size=(12, 3, 8, 8)).astype(np.float32))
    return path


FAST = ("--effort", 0, "--duration", 0, "--method", "minmax")


def command(net, images, out, *options):
    target = ("--target", "tensorrt", "--precision", "fp8")
    return "build", net, "--images", images, "--out", out, *target, *options


@pytest.fixture(scope="module")
def fp8_folder(wide_net, images, tmp_path_factory):
    """The folder of a build in fp8."""
    out = tmp_path_factory.mktemp("built") / "out"
    build_report(wide_net, images, out, precision="fp8")
    return out


@pytest.mark.parametrize("name", ["net.tensorrt.qdq.onnx", "net.tensorrt.typed.onnx"])
def test_fp8_models_hold_valid_fp8_pairs(fp8_folder, name):
    model = onnx.load(fp8_folder / name)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == 19
    assert model.ir_version >= 9
    constants = initializers(fp8_folder / name)
    pairs = [n for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {constants[n.input[2]].data_type for n in pairs} == {FLOAT8}
    assert len(pairs) == 12
    assert not any(codes_of(constants[n.input[2]]).any() for n in pairs)
    axes = {n.input[0]: n.attribute[0].i for n in pairs if n.input[0] in constants}
    assert axes == {"w2/quantized": 0, "w3/quantized": 0, "w4/quantized": 0, "fc/quantized": 1}


def codes_of(tensor):
    return np.frombuffer(tensor.raw_data, np.uint8).reshape(tuple(tensor.dims))


def test_fp8_scales_and_weights_are_exact(fp8_folder, wide_net, images):
    float_constants, fp8_constants = (
        initializers(wide_net),
        initializers(fp8_folder / "net.tensorrt.qdq.onnx"),
    )
    for name, axes in (("w2", (1, 2, 3)), ("w4", (1, 2, 3)), ("fc", (0,))):
        w = array(float_constants[name])
        scale = array(fp8_constants[f"{name}/scale"])
        assert np.array_equal(scale, (np.abs(w).max(axes).astype(np.float64) / 448).astype("f4"))
        wide_scale = scale.reshape([1 if a in axes else -1 for a in range(w.ndim)])
        types = pytest.importorskip("ml_dtypes")
        expected_codes = (w / wide_scale).astype(types.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(codes_of(fp8_constants[f"{name}/quantized"]), expected_codes)
    fp8_constants = initializers(fp8_folder / "net.tensorrt.qdq.onnx")
    model = onnx.load(wide_net)
    model.graph.output.append(helper.make_tensor_value_info("r1", FLOAT, None))
    session = OrtSession.open(model, threads=1)
    max_input = max(float(session.run({"x": x[None]})["r1"].max()) for x in np.load(images))
    assert array(fp8_constants["r1/scale"]) == pytest.approx(
        symmetric_scale(max_input, FP8), rel=1e-6
    )


def test_fp8_files_match_onnx_reference(fp8_folder, images):
    from onnx.reference import ReferenceEvaluator

    x = np.load(images)[:1]
    model = onnx.load(fp8_folder / "net.tensorrt.qdq.onnx")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    pairs_session = OrtSession.open(fp8_folder / "net.tensorrt.qdq.onnx", int8_kernels=False)
    outputs = pairs_session.run({"x": x})["y"]
    typed_session = OrtSession.open(fp8_folder / "net.tensorrt.typed.onnx", int8_kernels=False)
    assert np.abs(outputs - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(typed_session.run({"x": x})["y"] - expected).max() < 0.05 * np.abs(expected).max()
    names = {path.name for path in fp8_folder.iterdir()}
    assert {"net.tensorrt.qdq.onnx", "net.tensorrt.typed.onnx", "net_trtexec.sh"} <= names
    assert not {"net.tensorrt.onnx", "net.tensorrt.cache"} & names
    assert ParserRequirements(19).first_reading("typed", "fp8") == "10.2.0"
    assert ParserRequirements(24).first_reading("typed", "fp8") == "10.15.0"
    script = (fp8_folder / "net_trtexec.sh").read_text("utf-8")
    assert "TensorRT 10 from 10.2" in script
    assert "cache)" not in script


def test_fp8_report_has_accuracy_and_commands(run, wide_net, images, tmp_path):
    code, out, _ = run(*command(wide_net, images, tmp_path / "out", *FAST, "--rest", "bf16"))
    assert code == 0
    assert "net in fp8 for tensorrt" in out
    assert " fp8\n" in out
    report = json.loads((tmp_path / "out/report.json").read_text("utf-8"))
    (target,) = report["targets"]
    assert target["options"] == {"--precision": "fp8", "--rest": "bf16"}
    assert {n["precision"] for n in target["nodes"]} == {"fp8", "float32"}
    engine = report["engines"][1]
    assert engine["label"] == "fp8"
    assert engine["accuracy"]["outputs"][0]["sqnr_db"] > 20
    page = (tmp_path / "out/report.md").read_text("utf-8")
    assert "its fp8 model" in page
    notes = " / ".join(target["notes"])
    assert "Hopper" in notes
    assert "TensorRT 10 from 10.15" in notes
    assert notes.count("trtexec --onnx=net.tensorrt.typed.onnx") == 2
    assert not re.search("--int8|--calib|--fp16|8[.]5", notes)


def test_fp8_with_float32_rest_and_inspect(
    run, wide_net, images, tmp_path, refusal, small_cnn, pictures, wording
):
    code, out, _ = run(*command(wide_net, images, tmp_path, *FAST, "--rest", "fp32"))
    assert code == 0
    assert not (tmp_path / "net.tensorrt.typed.onnx").exists()
    (target,) = json.loads((tmp_path / "report.json").read_text("utf-8"))["targets"]
    assert "--onnx=net.tensorrt.qdq.onnx --stronglyTyped" in " ".join(target["notes"])
    assert f"sh {tmp_path}/net_trtexec.sh" in " ".join(out.split())
    code, out, _ = run("inspect", wide_net, "--target", "tensorrt", "--precision", "fp8")
    assert code == 0
    assert "7 fp8" in out
    assert "fp8       4 Conv" not in out
    assert "channels (3)" in out
    build_arguments = command(small_cnn, pictures, tmp_path / "out", "--size", "16x16")
    wording.check(refusal(*build_arguments))


def test_fp8_cache_converts_to_qdq_only(run, fp8_folder, wide_net, tmp_path, refusal, wording):
    converted = tmp_path / "made.onnx"
    arguments = (
        "to-qdq",
        wide_net,
        fp8_folder / "calib8/net.cache",
        "-o",
        converted,
        "--precision",
        "fp8",
    )
    arguments = ("cache", *arguments)
    assert run(*arguments)[0] == 0
    model = onnx.load(converted)
    assert model.producer_name == "calib8"  # by which the next -o knows it
    for field in ("producer_name", "producer_version"):
        model.ClearField(field)
    assert model.SerializeToString() == (fp8_folder / "net.tensorrt.qdq.onnx").read_bytes()
    assert run(*arguments, "--rest", "fp16")[0] == 0
    constants = initializers(converted)
    assert constants["w2/quantized"].data_type == FLOAT8
    assert "r1/scale/fp16" in constants
    files = (tmp_path / "plain.onnx", tmp_path / "plain.cache")
    err = refusal("cache", "from-qdq", fp8_folder / "net.tensorrt.qdq.onnx", "-o", *files)
    assert "float8" in err
    wording.check(err)
    model = onnx.load(fp8_folder / "net.tensorrt.qdq.onnx")
    with pytest.raises(ExportError) as raised:
        from_qdq(model)
    wording.check(raised.value)


@pytest.mark.slow
def test_fp8_plan_serves_only_fp8_builds(run, refusal, wide_net, images, tmp_path, wording):
    out = tmp_path / "out"
    arguments = command(wide_net, images, out, "--duration", 0, "--method", "minmax")
    assert run(*arguments)[0] == 0
    plan = (out / "calib8/net.plan.toml").read_text("utf-8")
    assert 'precision = "fp8"' in plan
    assert "all in fp8" in plan
    assert "int8" not in plan
    assert "rounded = " in plan
    first_bytes = (out / "net.tensorrt.typed.onnx").read_bytes()
    code, _, _ = run(*arguments)
    assert code == 0
    assert (out / "net.tensorrt.typed.onnx").read_bytes() == first_bytes
    report = json.loads((out / "report.json").read_text("utf-8"))
    assert report["targets"][0]["search"]["reused"]
    shutil.copy(out / "calib8/net.plan.toml", tmp_path / "mine.toml")
    arguments = ("--target", "tensorrt", "--plan", tmp_path / "mine.toml", "--duration", 0)
    err = refusal("build", wide_net, "--images", images, "--out", tmp_path / "eight", *arguments)
    assert "--precision fp8" in err
    wording.check(err)


@pytest.mark.parametrize("seed", range(4))
def test_fp8_output_rounding_beats_nearest_rounding(seed):
    rng = np.random.default_rng(seed)
    steps = (rng.normal(size=(2, 5, 12)) * 10 ** rng.uniform(-2, 2)).clip(-448, 448)
    products = gram(rng.normal(size=(2, 12, 40)).astype(np.float32) + 0.5)
    rounded = round_by_output(steps, products, fixed=np.zeros(steps.shape, bool), grid=FP8)
    nearest = round_to_grid(steps, FP8)
    ends = [round_to_grid(steps, FP8, to) for to in (np.floor, np.ceil)]
    assert ((rounded == ends[0]) | (rounded == ends[1])).all()
    assert (rounded != nearest).any()
    assert output_error(rounded - steps, products) < output_error(nearest - steps, products)


def output_error(difference, products):
    return (difference @ products * difference).sum()


def test_repairs_use_the_fp8_grid(run, wide_net, images, tmp_path, fp8_folder):
    model = onnx.load(fp8_folder / "net.tensorrt.qdq.onnx")
    quantizations = read_all_quantizations(model, find_weighted_layers(load(wide_net).model))
    assert set(quantizations) == {"/c2", "/c3", "/c4", "/y"}
    for layer, quantization in quantizations.values():
        assert quantization.grid == FP8
        assert (quantization.low, quantization.high) == (-448, 448)
        stored = Graph(model).producer[Graph(model).producer[layer.output].input[1]].input
        constants = initializers(fp8_folder / "net.tensorrt.qdq.onnx")
        weights = array(constants[stored[0]]).astype(np.float32) * quantization.weight_scale
        assert np.array_equal(
            quantization.quantize_weight(layer).astype(np.float32), weights.astype(np.float32)
        )
    arguments = command(wide_net, images, tmp_path, *FAST, "--repair", "adaround,bias")
    code, _, _ = run(*arguments)
    page = (tmp_path / "report.md").read_text("utf-8")
    assert code == 0
    for name in ("weight rounding by output error", "bias correction"):
        assert re.search(f"{name}: (worst part|nothing|[0-9]+ layer)", page), name


SEARCHES = ["entropy", "entropy-tensorrt", "legacy"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        *((("--method", name), f"got {name}, which is TensorRT's for int8") for name in SEARCHES),
        (("--engine-from", "cache"), "are for int8, got --engine-from"),
        (("--calibrator", "entropy2"), "are for int8, got --calibrator"),
    ],
    ids=lambda arguments: arguments[1] if isinstance(arguments, tuple) else "",
)
def test_int8_options_are_refused_with_fp8(refusal, wide_net, images, tmp_path, arguments, reason):
    assert reason in refusal(*command(wide_net, images, tmp_path / "out", *arguments))
    assert not (tmp_path / "out").exists()


def test_fp8_refuses_int8_plan_and_opset(wide_net, images, tmp_path, wording):
    text = 'schema = "calib8-plan/1"\n[tensorrt]\n[tensorrt.methods]\nr1 = "entropy"\n'
    (tmp_path / "p.toml").write_text(text, "utf-8")
    with pytest.raises(ConfigError) as raised:
        build_report(wide_net, images, tmp_path / "out", precision="fp8", plan=tmp_path / "p.toml")
    wording.check(raised.value)
    model = wide()
    model.graph.node.append(helper.make_node("DFT", ["y"], ["z"], "/dft", axis=1))
    with pytest.raises(ExportError) as raised:
        at_opset(model, 22)
    wording.check(raised.value)


@pytest.mark.parametrize(
    ("float_type", "source"),
    [("fp16", "net.tensorrt.typed.onnx"), ("fp32", "net.tensorrt.qdq.onnx")],
)
def test_fp8_engine_is_typed_without_calibrator(
    tensorrt, wide_net, images, tmp_path, float_type, source
):
    trt = tensorrt("10.13.0.35")
    build_report(wide_net, images, tmp_path, precision="fp8", rest=float_type)
    (network,), (config,) = trt.STORY.networks, trt.STORY.configs
    assert network.typed
    assert config.int8_calibrator is None
    assert network.model == onnx.load(tmp_path / source)


def test_older_tensorrt_builds_no_fp8_engine(tensorrt, wide_net, images, tmp_path):
    trt = tensorrt("10.0.1.6")
    (target,) = build_report(wide_net, images, tmp_path, precision="fp8").targets
    assert "10.2 or newer, got 10.0.1.6" in " / ".join(target.notes)
    assert not trt.STORY.configs
