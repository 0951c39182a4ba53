"""`--precision fp8`: what is placed, written, searched, repaired, said and refused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from calibrators.grids import FP8, codes, fake_quantize, rounded, symmetric_scale
from calibrators.histogram import Histogram
from calibrators.mse import errors
from calibrators.rounding import gram, output_error, rounded_by_output
from deploy.errors import ConfigError, ExportError
from deploy.frontends import load
from deploy.graph.index import Graph
from deploy.graph.placement import TENSORRT_FP8
from deploy.graph.plan import analyse
from deploy.method import Method
from deploy.pipeline import build
from deploy.runtimes.ort import OrtSession
from deploy.targets.tensorrt import builder
from deploy.targets.tensorrt.cache_qdq import from_qdq
from deploy.targets.tensorrt.target import TensorRT
from deploy.targets.tensorrt.trtexec import Needs
from deploy.tuning.repairs.repair_layers import all_written, layers_of
from deploy.tuning.search_options import Tuning

FLOAT, FLOAT8 = TensorProto.FLOAT, TensorProto.FLOAT8E4M3FN
BYTES = np.arange(256, dtype=np.uint8)
VALUES = numpy_helper.to_array(
    helper.make_tensor("codes", FLOAT8, [256], BYTES.tobytes(), raw=True)
).astype(np.float32)  # onnx's own reading of every code


# -- the type --------------------------------------------------------------------------------------


def test_every_code_is_written_as_onnx_reads_it():
    found = codes(VALUES, FP8)
    assert (found[~np.isnan(VALUES)] == BYTES[~np.isnan(VALUES)]).all()
    assert set(found[np.isnan(VALUES)].tolist()) <= {0x7F, 0xFF} and np.isnan(VALUES).sum() == 2
    assert codes(np.float32([0, -0.0, np.nan]), FP8).tolist() == [0, 0x80, 0x7F]


@given(st.lists(st.floats(-600, 600, width=32), min_size=1))
def test_neighbours_on_the_grid_hold_the_value_and_the_nearest_is_one_of_them(values):
    x = np.array(values, np.float32).clip(-448, 448)
    below, above = rounded(x, FP8, np.floor), rounded(x, FP8, np.ceil)
    near = rounded(x, FP8)
    assert (below <= x).all() and (x <= above).all()
    assert ((near == below) | (near == above)).all()
    held = np.unique(VALUES[np.isfinite(VALUES)])
    assert np.isin(below, held).all() and np.isin(above, held).all()
    between = (held[None] > below[:, None]) & (held[None] < above[:, None])
    assert not between.any()


def pair(op: str, x: np.ndarray, scale: float, dtype: type = np.float32) -> onnx.ModelProto:
    """x -> Neg -> Relu or Clip -> Q -> DQ -> y, in fp8."""
    kind = {np.float32: FLOAT, np.float16: TensorProto.FLOAT16}[dtype]
    nodes = [
        helper.make_node("Neg", ["x"], ["n"], "neg"),
        helper.make_node(op, ["n"] if op == "Relu" else ["n", "low", "high"], ["r"], "relu"),
        helper.make_node("QuantizeLinear", ["r", "s", "z"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], "dq"),
    ]
    graph = helper.make_graph(
        nodes,
        "pair",
        [helper.make_tensor_value_info("x", kind, [x.size])],
        [helper.make_tensor_value_info("y", kind, [x.size])],
        [
            numpy_helper.from_array(np.array(scale, dtype), "s"),
            numpy_helper.from_array(np.array(0, dtype), "low"),
            numpy_helper.from_array(np.array(6e4, dtype), "high"),
            helper.make_tensor("z", FLOAT8, [], b"\0", raw=True),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


@pytest.mark.parametrize("op", ["Relu", "Clip"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("scale", [1.0, 0.0124])
def test_onnx_runtime_rounds_as_the_grid_does_and_keeps_what_cuts_off(op, dtype, scale):
    held = np.unique(VALUES[np.isfinite(VALUES)])
    middle = (held[1:] + held[:-1]) / 2
    x = np.concatenate([held, middle, np.nextafter(middle, np.float32(9)), [464, 465, 9e4]])
    x = (x * scale).clip(-6e4, 6e4).astype(dtype)
    got = OrtSession.open(pair(op, x, scale, dtype), threads=1).run({"x": -x})["y"]
    step = np.float32(dtype(scale))
    want = fake_quantize(np.maximum(x, 0).astype(np.float32), step, 0, FP8).astype(dtype)
    assert np.array_equal(got, want)


# -- ranges ----------------------------------------------------------------------------------------


def histogram() -> Histogram:
    h = Histogram()
    # values for which both grids have ranges of their own; one in five draws gives lp the same
    h.observe((np.random.default_rng(8).standard_t(3, 20000) * 0.7).astype(np.float32))
    return h


@pytest.mark.parametrize("name", ["mse", "lp"])
def test_a_search_by_error_searches_the_grid_that_is_asked(name):
    h, method = histogram(), Method.of(name)
    power = 2.0 if name == "mse" else 3.0
    counts = h.magnitudes(2048)
    centres = (np.arange(2048) + 0.5) * h.full_range / 2048
    whole, eighth = (method.search(grid)(h).amax for grid in (None, FP8))
    ends = np.array([eighth, whole])
    wrong = errors(centres[1:], counts[1:], -ends, ends, FP8, power)
    assert eighth != whole and wrong[0] < wrong[1]


@pytest.mark.parametrize("name", ["minmax", "percentile"])
def test_a_search_that_knows_no_grid_finds_the_same(name):
    h, method = histogram(), Method.of(name)
    assert not method.integer and method.search(FP8)(h) == method.search()(h)


# -- placement -------------------------------------------------------------------------------------


def weight(name: str, *shape: int, spread: float = 0.2) -> onnx.TensorProto:
    rng = np.random.default_rng(list(name.encode()))
    return numpy_helper.from_array(rng.normal(scale=spread, size=shape).astype(np.float32), name)


def node(op: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=f"/{output}", **attributes)


def network(nodes, weights, output, opset=13, **domains) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info(output, FLOAT, None)],
        weights,
    )
    known = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=known, ir_version=8)


def wide(**options) -> onnx.ModelProto:
    """A stem, two Convs of 32 channels with a residual Add between, a classifier."""
    nodes = [
        node("Conv", "x w1", "c1", pads=[1, 1, 1, 1]),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2 b2", "c2", pads=[1, 1, 1, 1]),
        node("Relu", "c2", "r2"),
        node("Conv", "r2 w3", "c3"),
        node("Add", "c3 r1", "a"),
        node("Relu", "a", "r3"),
        node("Conv", "r3 w4", "c4"),
        node("GlobalAveragePool", "c4", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f fc fb", "y"),
    ]
    weights = [
        weight("w1", 32, 3, 3, 3), weight("w2", 32, 32, 3, 3, spread=0.06), weight("b2", 32),
        weight("w3", 32, 32, 1, 1), weight("w4", 32, 32, 1, 1), weight("fc", 32, 16),
        weight("fb", 16),
    ]  # fmt: skip
    return network(nodes, weights, "y", **options)


def test_what_has_no_fast_kernel_in_fp8_stays_float_and_says_why():
    nodes = [
        node("Conv", "x w1", "stem", pads=[1, 1, 1, 1]),
        node("Conv", "stem w2", "groups", group=2),
        node("Conv", "groups w3", "window", pads=[3, 3, 3, 3]),
        node("Conv", "window w4", "narrow"),
        node("ConvTranspose", "narrow w5", "up"),
        node("Conv", "up w6", "good", pads=[1, 1, 1, 1]),
        node("MaxPool", "good", "pool", kernel_shape=[2, 2]),
        node("GlobalAveragePool", "pool", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f w7", "y"),
    ]
    weights = [
        weight("w1", 32, 3, 3, 3), weight("w2", 64, 16, 1, 1), weight("w3", 32, 64, 7, 7),
        weight("w4", 16, 32, 1, 1), weight("w5", 16, 32, 2, 2), weight("w6", 64, 32, 3, 3),
        weight("w7", 64, 10),
    ]  # fmt: skip
    plan = analyse(load(network(nodes, weights, "y")).model, TENSORRT_FP8)
    said = {d.node: d.reason for d in plan.decisions}
    assert plan.int8_nodes == ("/good",) and {d.precision for d in plan.decisions} > {"fp8"}
    assert said["/stem"] == "too few channels (3) to be faster in fp8 than in float"
    assert said["/groups"] == "a Conv with groups has no fast fp8 kernel"
    assert said["/window"] == "a window of 49 places has no fp8 kernel, which takes 32 at most"
    assert "(16)" in said["/narrow"] and "(10)" in said["/y"]
    assert said["/up"] == "ConvTranspose is not run in fp8 on tensorrt"
    assert not any("int8" in reason for reason in said.values())


# -- the files -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fp8") / "net.onnx"
    onnx.save(wide(), path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("images") / "x.npy"
    np.save(path, np.random.default_rng(9).normal(size=(12, 3, 8, 8)).astype(np.float32))
    return path


FAST = ("--effort", 0, "--duration", 0, "--method", "minmax")


def command(net: Path, images: Path, out: Path, *words: object) -> tuple[object, ...]:
    target = ("--target", "tensorrt", "--precision", "fp8")
    return "build", net, "--images", images, "--out", out, *target, *words


@pytest.fixture(scope="module")
def built(net, images, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("built") / "out"
    build(
        net, images, out=out, targets=[TensorRT(precision="fp8")], duration_s=0,
        method="minmax", tuning=Tuning(effort=0),
    )  # fmt: skip
    return out


def initializers(path: Path) -> dict[str, onnx.TensorProto]:
    return {t.name: t for t in onnx.load(path).graph.initializer}


def array(tensor: onnx.TensorProto) -> np.ndarray:
    return numpy_helper.to_array(tensor)


def test_no_cache_and_no_float_model_are_written_since_tensorrts_are_for_int8(built):
    names = {path.name for path in built.iterdir()}
    assert {"net.tensorrt.qdq.onnx", "net.tensorrt.typed.onnx", "net_trtexec.sh"} <= names
    assert not {"net.tensorrt.onnx", "net.tensorrt.cache"} & names


@pytest.mark.parametrize("name", ["net.tensorrt.qdq.onnx", "net.tensorrt.typed.onnx"])
def test_pairs_and_weights_are_of_fp8_and_onnx_finds_the_model_sound(built, name):
    model = onnx.load(built / name)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == 19 and model.ir_version >= 9
    held = initializers(built / name)
    pairs = [n for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {held[n.input[2]].data_type for n in pairs} == {FLOAT8} and len(pairs) == 12
    assert not any(codes_of(held[n.input[2]]).any() for n in pairs)
    weights = {n.input[0]: n for n in pairs if n.input[0] in held}
    assert set(weights) == {f"{w}/quantized" for w in ("w2", "w3", "w4", "fc")}
    axes = {name: n.attribute[0].i for name, n in weights.items()}
    assert axes == {"w2/quantized": 0, "w3/quantized": 0, "w4/quantized": 0, "fc/quantized": 1}


def codes_of(tensor: onnx.TensorProto) -> np.ndarray:
    return np.frombuffer(tensor.raw_data, np.uint8).reshape(tuple(tensor.dims))


def test_scales_are_amax_by_448_and_weights_their_nearest_codes(built, net):
    plain, held = initializers(net), initializers(built / "net.tensorrt.qdq.onnx")
    for name, axes in (("w2", (1, 2, 3)), ("w4", (1, 2, 3)), ("fc", (0,))):
        w = array(plain[name])
        scale = array(held[f"{name}/scale"])
        assert np.array_equal(scale, (np.abs(w).max(axes).astype(np.float64) / 448).astype("f4"))
        wide_scale = scale.reshape([1 if a in axes else -1 for a in range(w.ndim)])
        types = pytest.importorskip("ml_dtypes")
        want = (w / wide_scale).astype(types.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(codes_of(held[f"{name}/quantized"]), want)


def test_an_activations_scale_is_that_of_its_threshold(built, net, images):
    held = initializers(built / "net.tensorrt.qdq.onnx")
    model = onnx.load(net)
    model.graph.output.append(helper.make_tensor_value_info("r1", FLOAT, None))
    session = OrtSession.open(model, threads=1)
    seen = max(float(session.run({"x": x[None]})["r1"].max()) for x in np.load(images))
    assert array(held["r1/scale"]) == pytest.approx(symmetric_scale(seen, FP8), rel=1e-6)


def test_the_cpu_computes_what_the_files_say(built, images):
    from onnx.reference import ReferenceEvaluator

    x = np.load(images)[:1]
    model = onnx.load(built / "net.tensorrt.qdq.onnx")
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    got = OrtSession.open(built / "net.tensorrt.qdq.onnx", int8_kernels=False).run({"x": x})["y"]
    narrow = OrtSession.open(built / "net.tensorrt.typed.onnx", int8_kernels=False)
    assert np.abs(got - want).max() < 1e-3 * np.abs(want).max()
    assert np.abs(narrow.run({"x": x})["y"] - want).max() < 0.05 * np.abs(want).max()


def test_the_report_says_fp8_its_figures_and_the_lines_for_those_who_can(
    run, net, images, tmp_path
):
    code, out, _ = run(*command(net, images, tmp_path / "out", *FAST, "--rest", "bf16"))
    assert code == 0 and "net in fp8 for tensorrt" in out and " fp8\n" in out
    report = json.loads((tmp_path / "out/report.json").read_text("utf-8"))
    (target,) = report["targets"]
    assert target["options"] == {"--precision": "fp8", "--rest": "bf16"}
    assert {n["precision"] for n in target["nodes"]} == {"fp8", "float32"}
    engine = report["engines"][1]
    assert engine["label"] == "fp8" and engine["accuracy"]["outputs"][0]["sqnr_db"] > 20
    page = (tmp_path / "out/report.md").read_text("utf-8")
    assert "accuracy is that of its fp8 model" in page
    notes = " / ".join(target["notes"])
    assert "on a GPU of Ada, Hopper or later, with TensorRT 10 from 10.15 on: trtexec" in notes
    assert notes.count("trtexec --onnx=net.tensorrt.typed.onnx") == 2
    assert not re.search("--int8|--calib|--fp16|8[.]5", notes)


def test_tensorrt_has_fp8_convolutions_from_10_2_on(built):
    assert Needs(19).first_reading(typed=True, fp8=True) == "10.2.0"
    assert Needs(24).first_reading(typed=True, fp8=True) == "10.15.0"
    script = (built / "net_trtexec.sh").read_text("utf-8")
    assert "with TensorRT 10 from 10.2 on" in script and "cache)" not in script


def test_a_float_rest_has_one_file_and_its_lines(run, net, images, tmp_path):
    code, out, _ = run(*command(net, images, tmp_path, *FAST, "--rest", "fp32"))
    assert code == 0 and not (tmp_path / "net.tensorrt.typed.onnx").exists()
    assert "--onnx=net.tensorrt.qdq.onnx --stronglyTyped" in " ".join(out.split())


def test_a_cache_gives_the_same_model(run, built, net, tmp_path):
    made = tmp_path / "made.onnx"
    words = ("cache", "to-qdq", net, built / "net.cache", "-o", made, "--precision", "fp8")
    assert run(*words)[0] == 0
    assert made.read_bytes() == (built / "net.tensorrt.qdq.onnx").read_bytes()
    assert run(*words, "--rest", "fp16")[0] == 0
    held = initializers(made)
    assert held["w2/quantized"].data_type == FLOAT8 and "r1/scale/fp16" in held


def test_there_is_no_way_back_into_a_cache(run, built, tmp_path):
    files = (tmp_path / "plain.onnx", tmp_path / "plain.cache")
    code, _, err = run("cache", "from-qdq", built / "net.tensorrt.qdq.onnx", "-o", *files)
    assert code == 1 and "a cache is for" in err and "float8" in err
    model = onnx.load(built / "net.tensorrt.qdq.onnx")
    with pytest.raises(ExportError, match="no cache of an fp8 model"):
        from_qdq(model)


def test_inspect_tells_what_would_be_in_fp8(run, net):
    code, out, _ = run("inspect", net, "--target", "tensorrt", "--precision", "fp8")
    assert code == 0 and "7 fp8" in out and "fp8       4 Conv" not in out
    assert "too few channels (3) to be faster in fp8" in out


# -- search, plan, repairs -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_is_kept_in_the_plan_and_obeyed_on_its_own_grid(run, net, images, tmp_path):
    out = tmp_path / "out"
    words = command(net, images, out, "--duration", 0, "--method", "minmax")
    assert run(*words)[0] == 0
    plan = (out / "net.plan.toml").read_text("utf-8")
    assert 'precision = "fp8"' in plan and "all in fp8" in plan and "int8" not in plan
    assert "rounded = " in plan
    first = (out / "net.tensorrt.typed.onnx").read_bytes()
    code, _, _ = run(*words)
    assert code == 0 and (out / "net.tensorrt.typed.onnx").read_bytes() == first
    report = json.loads((out / "report.json").read_text("utf-8"))
    assert report["targets"][0]["search"]["reused"]
    shutil.copy(out / "net.plan.toml", tmp_path / "own.toml")
    words = ("--target", "tensorrt", "--plan", tmp_path / "own.toml", "--duration", 0)
    code, _, err = run("build", net, "--images", images, "--out", tmp_path / "eight", *words)
    assert code == 1 and "got one of fp8 for tensorrt in int8" in err and "--precision fp8" in err


@pytest.mark.parametrize("seed", range(4))
def test_weights_rounded_by_output_are_never_worse_than_the_nearest(seed):
    rng = np.random.default_rng(seed)
    steps = (rng.normal(size=(2, 5, 12)) * 10 ** rng.uniform(-2, 2)).clip(-448, 448)
    products = gram(rng.normal(size=(2, 12, 40)).astype(np.float32) + 0.5)
    fixed = np.zeros(steps.shape, bool)
    made = rounded_by_output(steps, products, fixed=fixed, grid=FP8)
    near, ends = rounded(steps, FP8), [rounded(steps, FP8, to) for to in (np.floor, np.ceil)]
    assert ((made == ends[0]) | (made == ends[1])).all() and (made != near).any()
    after, before = (output_error(steps, one, products).sum() for one in (made, near))
    assert after < before


def test_repairs_see_the_grid_and_each_can_be_tried(run, net, images, tmp_path, built):
    model = onnx.load(built / "net.tensorrt.qdq.onnx")
    layers = layers_of(load(net).model)
    found = all_written(model, layers)
    assert set(found) == {"/c2", "/c3", "/c4", "/y"}
    for layer, how in found.values():
        assert how.grid == FP8 and (how.low, how.high) == (-448, 448)
        stored = Graph(model).producer[Graph(model).producer[layer.output].input[1]].input
        held = initializers(built / "net.tensorrt.qdq.onnx")
        assert np.array_equal(
            how.weights(layer).astype(np.float32),
            (array(held[stored[0]]).astype(np.float32) * how.weight).astype(np.float32),
        )
    words = command(net, images, tmp_path, *FAST, "--repair", "ranges,adaround,bias")
    code, _, _ = run(*words)
    page = (tmp_path / "report.md").read_text("utf-8")
    assert code == 0
    for name in ("weight rounding by output error", "bias correction", "ranges by output error"):
        assert re.search(f"{name}: (worst part|nothing|[0-9]+ layer)", page), name


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["entropy", "entropy-tensorrt", "legacy"])
def test_tensorrts_own_searches_are_for_int8(run, net, images, tmp_path, method):
    code, _, err = run(*command(net, images, tmp_path / "out", "--method", method))
    assert code == 1 and f"got {method}, which is TensorRT's for int8" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words", [("--engine-from", "cache"), ("--calibrator", "entropy2")], ids=lambda w: w[0]
)
def test_a_calibrator_or_a_cache_beside_fp8_is_refused(run, net, images, tmp_path, words):
    code, _, err = run(*command(net, images, tmp_path / "out", *words))
    assert code == 1 and f"are for int8, got {words[0]}" in err


def test_a_plan_with_tensorrts_own_search_is_refused(net, images, tmp_path):
    (tmp_path / "p.toml").write_text(
        'schema = "calib8-plan/1"\n[tensorrt]\n[tensorrt.methods]\nr1 = "entropy"\n', "utf-8"
    )
    with pytest.raises(ConfigError, match="got entropy, which is TensorRT's for int8"):
        build(
            net, images, out=tmp_path / "out", targets=[TensorRT(precision="fp8")], duration_s=0,
            tuning=Tuning(plan=tmp_path / "p.toml"),
        )  # fmt: skip


def test_a_model_of_small_layers_alone_is_refused(run, small_cnn, pictures, tmp_path):
    words = command(small_cnn, pictures, tmp_path / "out", "--size", "16x16")
    code, _, err = run(*words)
    assert code == 1 and "must be able to run in fp8, got none in small_cnn" in err


def test_a_model_that_cannot_be_brought_to_opset_19_says_so(images, tmp_path):
    model = wide(own=True)
    model.graph.node.append(helper.make_node("Own", ["y"], ["z"], "/own", domain="own"))
    from deploy.targets.tensorrt.float_types import at_opset

    with pytest.raises(ExportError, match=r"opset 19 .* got opset 13 .* domain own"):
        at_opset(model, 19)


# -- the engine ------------------------------------------------------------------------------------


def on(tensorrt, monkeypatch, version: str) -> list[tuple[str, builder.Settings]]:
    """A machine with this TensorRT and a GPU; lists what it builds."""
    tensorrt(version)
    made, build_engine = [], builder.build_engine

    def engine(path, asked, *, calibrator=None, cuda=None):
        made.append((path.name, asked))
        assert calibrator is None
        return build_engine(path, asked, calibrator=calibrator, cuda=cuda)

    monkeypatch.setattr(builder, "build_engine", engine)
    return made


def notes_of(net, images, out, **options) -> str:
    report = build(
        net, images, out=out, targets=[TensorRT(precision="fp8", **options)], duration_s=0,
        method="minmax", tuning=Tuning(effort=0),
    )  # fmt: skip
    return " / ".join(report.targets[0].notes)


@pytest.mark.parametrize(
    ("rest", "source"),
    [("fp16", "net.tensorrt.typed.onnx"), ("fp32", "net.tensorrt.qdq.onnx")],
)
def test_an_engine_is_built_strongly_typed_and_without_a_calibrator(
    tensorrt, monkeypatch, net, images, tmp_path, rest, source
):
    made = on(tensorrt, monkeypatch, "10.13.0.35")
    notes_of(net, images, tmp_path, rest=rest)
    ((name, asked),) = made
    assert name == source and asked.typed


def test_an_older_tensorrt_gets_no_engine_and_the_reason(
    tensorrt, monkeypatch, net, images, tmp_path
):
    made = on(tensorrt, monkeypatch, "10.0.1.6")
    assert "needs TensorRT 10.2 or newer, got 10.0.1.6" in notes_of(net, images, tmp_path)
    assert not made
