"""TensorRT in fp8: its grid, the layers that it runs, files, plans and engines."""

import json
import re
import shutil

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from calib8 import build
from calibrators.grids import FP8, dequantize, fp8_codes, quantize, round_to_grid, symmetric_scale
from calibrators.histogram import Histogram
from calibrators.mse import range_errors
from calibrators.rounding import gram, round_by_output
from deploy.errors import ConfigError, ExportError, ModelError
from deploy.frontends import load
from deploy.graph.index import Graph
from deploy.graph.placement import TENSORRT_FP8
from deploy.graph.plan import analyse
from deploy.method import Method
from deploy.runtimes.ort import OrtSession
from deploy.targets import TensorRT
from deploy.targets.tensorrt.cache_qdq import from_qdq
from deploy.targets.tensorrt.float_types import at_opset
from deploy.targets.tensorrt.trtexec import ParserRequirements
from deploy.tuning.repairs.repair_layers import find_weighted_layers, read_all_quantizations
from deploy.tuning.search_options import Tuning
from tests.vendor_models import build_net, parse_nodes, tensors

FLOAT, FLOAT8 = TensorProto.FLOAT, TensorProto.FLOAT8E4M3FN


def build_report(net, images, out, *, plan=None, **options):
    """Return the report of a build in fp8 with these options; only a plan starts a search."""
    target = TensorRT(precision="fp8", **options)
    quick = {"duration_s": 0, "tuning": Tuning(plan=plan)}
    if plan is None:
        quick |= {"method": "minmax", "tuning": Tuning(effort=0)}
    return build(net, images, out=out, targets=[target], **quick)


def initializers(path):
    return {t.name: t for t in onnx.load(path).graph.initializer}


def array(tensor):
    return numpy_helper.to_array(tensor)


BYTES = np.arange(256, dtype=np.uint8)


CODES = helper.make_tensor("codes", FLOAT8, [256], BYTES.tobytes(), raw=True)


VALUES = array(CODES).astype(np.float32)  # onnx's own reading of every code


def test_fp8_codes_match_onnx():
    codes = fp8_codes(VALUES)
    assert (codes[~np.isnan(VALUES)] == BYTES[~np.isnan(VALUES)]).all()
    assert set(codes[np.isnan(VALUES)].tolist()) <= {0x7F, 0xFF}
    assert np.isnan(VALUES).sum() == 2
    assert fp8_codes(np.float32([0, -0.0, np.nan])).tolist() == [0, 0x80, 0x7F]


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
    codes = quantize(np.maximum(x, 0).astype(np.float32), step, 0, FP8)
    expected = dequantize(codes, step, 0).astype(dtype)
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


def network(text, shapes, **attributes):
    """The model of these nodes x -> y, with random weights of these shapes."""
    nodes, weights = parse_nodes(text, name="/{out}", **attributes), {}
    for name, shape in shapes.items():
        rng = np.random.default_rng(list(name.encode()))
        spread = 0.06 if shape == (32, 32, 3, 3) else 0.2
        weights[name] = rng.normal(scale=spread, size=shape)
    return build_net(nodes, {"x": ["n", 3, 8, 8]}, {"y": None}, weights)


def wide():
    """A stem, two Convs of 32 channels with a residual Add between, a classifier."""
    text = "Conv x w1 -> c1 | Relu c1 -> r1 | Conv r1 w2 b2 -> c2 | Relu c2 -> r2"
    text += " | Conv r2 w3 -> c3 | Add c3 r1 -> a | Relu a -> r3 | Conv r3 w4 -> c4"
    text += " | GlobalAveragePool c4 -> p | Flatten p -> f | Gemm f fc fb -> y"
    shapes = {"w1": (32, 3, 3, 3), "w2": (32, 32, 3, 3), "b2": (32,), "w3": (32, 32, 1, 1)}
    shapes |= {"w4": (32, 32, 1, 1), "fc": (32, 16), "fb": (16,)}
    return network(text, shapes, c1=PAD, c2=PAD)


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
    build_report(wide_net, images, out)
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
    float_constants = initializers(wide_net)
    fp8_constants = initializers(fp8_folder / "net.tensorrt.qdq.onnx")
    for name, axes in (("w2", (1, 2, 3)), ("w4", (1, 2, 3)), ("fc", (0,))):
        w = array(float_constants[name])
        scale = array(fp8_constants[f"{name}/scale"])
        assert np.array_equal(scale, (np.abs(w).max(axes).astype(np.float64) / 448).astype("f4"))
        wide_scale = np.expand_dims(scale, axes)
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
    assert ParserRequirements(19).first_version("typed", "fp8") == "10.2.0"
    assert ParserRequirements(24).first_version("typed", "fp8") == "10.15.0"
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
    assert "not run on its device" in page
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
    with pytest.raises(ModelError) as raised:
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
        (node,) = [node for node in model.graph.node if node.name == layer.name]
        stored = Graph(model).producer[node.input[1]].input
        constants = initializers(fp8_folder / "net.tensorrt.qdq.onnx")
        codes = array(constants[stored[0]]).astype(np.float32)
        assert np.array_equal(codes, round_to_grid(layer.array / quantization.weight_scale, FP8))
    arguments = command(wide_net, images, tmp_path, *FAST, "--repair", "adaround")
    code, _, _ = run(*arguments)
    page = (tmp_path / "report.md").read_text("utf-8")
    assert code == 0
    assert re.search("adaptive rounding: (nothing|[0-9]+ layer)", page)


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
        build_report(wide_net, images, tmp_path / "out", plan=tmp_path / "p.toml")
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
    build_report(wide_net, images, tmp_path, rest=float_type)
    (network,), (config,) = trt.STORY.networks, trt.STORY.configs
    assert network.typed
    assert config.int8_calibrator is None
    assert network.model == onnx.load(tmp_path / source)


def test_older_tensorrt_builds_no_fp8_engine(tensorrt, wide_net, images, tmp_path):
    trt = tensorrt("10.0.1.6")
    (target,) = build_report(wide_net, images, tmp_path).targets
    assert "10.2 or newer, got 10.0.1.6" in " / ".join(target.notes)
    assert not trt.STORY.configs
