"""What ONNX Runtime's int8 models are rewritten to: gates, means, Softmax, Pad and MatMul."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from calibrators.grids import dequantize, quantize
from deploy.frontends import load
from deploy.graph.edit import copy_message, drop_unread, update_tensors
from deploy.graph.gates import find_gates
from deploy.graph.index import Graph
from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import analyse
from deploy.targets.onnxruntime.gate_rewrite import fuse_gates
from deploy.targets.onnxruntime.rewrite_base import RewriteContext
from deploy.targets.onnxruntime.rewrites import write_softmax
from tests.models import as_float32, build_net, make_model, parse_nodes, read_target, run_net

INT8 = "net.int8.onnx"

NUMBERS = {
    "two_and_half": 2.5,
    "three": 3.0,
    "zero": 0.0,
    "six": 6.0,
    "sixth": 1 / 6,
    "half": 0.5,
    "minus": -0.3,
    "little": 0.004,
}
PADS = {"pads": [1, 1, 1, 1]}
SQUEEZE = "HardSigmoid <alpha = 0.2, beta = 0.5>"
DOWN = "HardSigmoid <alpha = 0.25, beta = -0.25>"

# from t to y
FORMS = {
    "div last": "a = Add(t, three) c = Clip(a, zero, six) m = Mul(t, c) y = Div(m, six)",
    "constant first, times a sixth": (
        "a = Add(three, t) c = Clip(a, zero, six) m = Mul(c, t) y = Mul(sixth, m)"
    ),
    "div before the mul, then halved": (
        "a = Add(t, three) c = Clip(a, zero, six) d = Div(c, six) m = Mul(d, t) y = Mul(m, half)"
    ),
    "hard sigmoid": f"s = HardSigmoid <alpha = {1 / 6}, beta = 0.5> (t) y = Mul(t, s)",
    "hard swish": "y = HardSwish(t)",
    "slope of a fifth": "s = HardSigmoid(t) y = Mul(s, t)",
    "shifted down": f"s = {DOWN}(t) y = Mul(s, t)",
    "halved and shifted": "h = HardSwish(t) m = Mul(h, half) y = Add(half, m)",
    "shifted the other way": "h = HardSwish(t) y = Add(h, minus)",
    "squeeze-excite": f"p = GlobalAveragePool(t) g = Conv(p, v, b) s = {SQUEEZE}(g) y = Mul(t, s)",
}
# shift, top, gain and offset of the gates that have other ones than a hard swish
NUMBERS_OF = {
    "div before the mul, then halved": (3, 6, 1 / 12, 0), "slope of a fifth": (2.5, 5, 1 / 5, 0),
    "shifted down": (-1, 4, 1 / 4, 0), "halved and shifted": (3, 6, 1 / 12, 0.5),
    "shifted the other way": (3, 6, 1 / 6, -0.3), "squeeze-excite": (2.5, 5, 1 / 5, 0),
}  # fmt: skip


def network(nodes, *, ends=("Conv", "Conv"), outputs=("out",)) -> onnx.ModelProto:
    """x -> Conv -> t -> the nodes -> y -> Conv -> out; an end that is "" is float: Sin."""
    rng = np.random.default_rng(5)
    weights = {
        "w": rng.normal(scale=0.3, size=(8, 8, 3, 3)),
        "b": rng.normal(size=8),
        "v": rng.normal(scale=0.5, size=(8, 8, 1, 1)),
        **NUMBERS,
    }
    first = ("Conv", "x w b", "t", PADS) if ends[0] else ("Sin", "x", "t")
    last = ("Conv", "y w b", "out", PADS) if ends[1] else ("Sin", "y", "out")
    given = {n: ["n", 8, None, None] for n in outputs}
    nodes = [first, *parse_nodes(nodes), last]
    return make_model(nodes, {"x": ["n", 8, 12, 12]}, given, as_float32(weights), opset=14)


def gates_fused(model: onnx.ModelProto, graph: Graph | None = None) -> onnx.ModelProto:
    """A copy in which every gate is the operator that it computes."""
    fused, gates = copy_message(model), tuple(find_gates(Graph(model)))
    fuse_gates(fused, RewriteContext(float_graph=graph or Graph(model), float_gates=gates))
    return fused


def precisions(model: onnx.ModelProto, placement=ONNXRUNTIME, **given) -> dict[str, str]:
    decisions = analyse(load(model).model, placement, **given).decisions
    return {d.node: d.reason if not d.int8 else "int8" for d in decisions}


def built(model: onnx.ModelProto, folder: Path, *words: str) -> onnx.ModelProto:
    """The int8 engine that the command writes."""
    x = np.random.default_rng(6).normal(size=(6, 8, 12, 12))
    return onnx.load(build_net(model, x, folder, *words) / INT8)


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_between_int8_is_two_int8_kernels(form, tmp_path, kernels):
    engine = built(network(FORMS[form]), tmp_path, "--effort", "0")
    found = kernels(engine)
    first = {"squeeze-excite": (0, 0), "shifted down": (1, 0)}.get(form, (0, 1))  # Add, Clip
    assert (found.count("QLinearAdd"), found.count("Clip")) == first
    assert found.count("QLinearMul") == 1
    assert not {"HardSwish", "HardSigmoid", "Add", "Mul", "Div"} & set(found)
    clipped = [n.input[0] for n in engine.graph.node if n.op_type == "Clip"]
    assert clipped == ["t/quantized"] * first[1]
    assert set(precisions(network(FORMS[form])).values()) == {"int8"}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "squeeze-excite"])
def test_a_gate_computes_its_formula_in_int8(form, tmp_path):
    shift, top, gain, offset = NUMBERS_OF.get(form, (3, 6, 1 / 6, 0))
    engine = built(network(FORMS[form]), tmp_path, "--effort", "0")
    factor, got = ran(engine, [f"{name}/quantized" for name in ("t", "y")], tmp_path)
    t = dequantize(factor, *parameters(engine, "t"))
    own = (*parameters(engine, "y"), ONNXRUNTIME.grid)
    shifted = t + np.float32(shift)
    gate = quantize(shifted, np.float32(top / 255), 0, ONNXRUNTIME.grid) * (gain * top / 255)
    assert farthest(got, quantize(t * gate + offset, *own)) <= 1
    assert len(np.unique(got)) > 60  # all of this is not the same value
    exact = t * gain * np.clip(shifted, 0, top) + offset
    once = np.mean(got != quantize(exact, *own)) < 0.01
    assert once == (form != "shifted down")  # the one whose clip is rounded as well


def farthest(got, want) -> int:
    return np.abs(got.astype(int) - want.astype(int)).max()


def smaller(model: onnx.ModelProto, times: float) -> onnx.ModelProto:
    """The network with less in t."""
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    less = {n: numpy_helper.from_array(held[n] * np.float32(times), n) for n in ("w", "b")}
    update_tensors(model.graph.initializer, less)
    return model


@pytest.mark.parametrize(
    ("times", "kernel"),
    [
        (1.0, "Clip"),
        (0.25, ""),
        (0.05, "QLinearAdd"),
    ],
    ids=["clipped", "within the clip", "far from its lower end"],
)
def test_what_a_gate_reads_depends_on_the_range_of_its_source(times, kernel, tmp_path, kernels):
    model = smaller(network(FORMS["hard swish"]), times)
    engine = built(model, tmp_path, "--effort", "0")
    found = kernels(engine)
    assert [k for k in ("Clip", "QLinearAdd") if k in found] == [kernel] * bool(kernel)
    scale, zero = parameters(engine, "t")
    assert (-zero * scale == pytest.approx(-3, abs=1e-5)) == (kernel != "QLinearAdd")
    want, got = (ran(m, ["out"], tmp_path)[0] for m in (model, engine))
    assert np.abs(want - got).max() < 0.05 * np.ptp(want)


def ran(engine: onnx.ModelProto, names: list[str], folder: Path) -> list[np.ndarray]:
    return run_net(engine, np.load(folder / "x.npy"), names)


EXCITES = {
    "hard sigmoid": FORMS["squeeze-excite"],
    "without bias": FORMS["squeeze-excite"].replace(", b)", ")"),
    "halved": FORMS["squeeze-excite"].replace("y = Mul(t, s)", "h = Mul(half, s) y = Mul(h, t)"),
}


@pytest.mark.parametrize("form", EXCITES)
def test_the_shift_of_a_squeeze_excite_is_in_the_bias_before_it(form, tmp_path, kernels):
    nodes = EXCITES[form]
    engine = built(network(nodes), tmp_path, "--effort", "0")
    found = kernels(engine)
    assert found.count("QLinearConv") == 3
    assert found.count("QLinearMul") == 1
    assert not {"QLinearAdd", "Add", "HardSigmoid", "Clip"} & set(found)
    told = {row["name"] for row in read_target(tmp_path / "out")["tensors"]}
    assert {"t", "p", "y"} <= told
    assert "g" not in told  # what g has is no range that was found
    (one,) = find_gates(Graph(network(nodes)))
    names = ["t/quantized", f"{one.name}/gate/quantized", f"{one.name}/gate", "y/quantized"]
    factor, stored, gate, got = ran(engine, names, tmp_path)
    g, t = ran(network(nodes), ["g", "t"], tmp_path)
    assert np.abs(gate - one.gain * np.clip(g + one.shift, 0, one.top)).max() < 0.01
    step = np.float32(one.gain * one.top / 255)
    np.testing.assert_allclose(gate[..., :1], stored * step, rtol=1e-6)
    assert (gate == gate[..., :1]).all()
    scale, zero = parameters(engine, "t")
    own = dequantize(factor, scale, zero)  # of a Conv that has the same bias, without a shift
    assert np.abs(own - t).max() < 6 * scale < one.shift / 5
    want = quantize(own * gate, *parameters(engine, "y"), ONNXRUNTIME.grid)
    assert farthest(got, want) <= 1
    assert len(np.unique(got)) > 60


@pytest.mark.parametrize("more", ["Add(m, g)", "Conv <pads = [1, 1, 1, 1]> (m, w)"])
def test_a_source_that_others_read_keeps_its_own_values(more, tmp_path, kernels):
    nodes = FORMS["squeeze-excite"].replace("y = Mul(t, s)", f"m = Mul(t, s) y = {more}")
    engine = built(network(nodes, outputs=("out", "g")), tmp_path, "--effort", "0")
    found = kernels(engine)
    assert (found.count("Clip"), found.count("QLinearAdd")) == (1, more.startswith("Add"))
    (own,), (want,) = (ran(model, ["g"], tmp_path) for model in (engine, network(nodes)))
    assert np.abs(own - want).max() < 0.05


def parameters(engine: onnx.ModelProto, name: str) -> tuple[np.float32, int]:
    constants = {t.name: numpy_helper.to_array(t) for t in engine.graph.initializer}
    return np.float32(constants[f"{name}/scale"]), int(constants[f"{name}/zero_point"])


def test_a_gate_is_as_near_to_float_as_its_convs_alone(tmp_path):
    sqnr, model = [], network(FORMS["div last"])
    for number, options in enumerate([(), ("--keep-float", "op:Clip")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = built(model, folder, *options)
        float32, int8 = (ran(m, ["out"], folder)[0] for m in (model, engine))
        sqnr.append(10 * np.log10((float32**2).sum() / ((float32 - int8) ** 2).sum()))
    assert sqnr[0] > 30
    assert sqnr[0] > sqnr[1] - 1.5


@pytest.mark.parametrize("ends", [("", "Conv"), ("Conv", "")], ids=["float before", "float behind"])
@pytest.mark.parametrize("form", ["div last", "hard sigmoid", "hard swish"])
def test_a_gate_beside_float_stays_float(form, ends):
    found = precisions(network(FORMS[form], ends=ends))
    assert not [node for node in parse_nodes(FORMS[form]) if found[node.name] == "int8"]


@pytest.mark.parametrize("tail", ["Relu(q)", "Clip(q, zero, six)"])
def test_a_gate_before_a_relu_or_clip_stays_float(tail, tmp_path):
    model = network(FORMS["hard swish"].replace("y =", "q =") + f" y = {tail}")
    engine = built(model, tmp_path, "--effort", "0")
    want, got = (ran(m, ["out"], tmp_path)[0] for m in (model, engine))
    assert np.abs(want - got).max() < 0.05 * np.ptp(want)


@pytest.mark.parametrize("kept", ["Add_a", "Clip_c", "Mul_m", "Div_y"])
def test_one_node_kept_float_keeps_the_gate_float(kept):
    found = precisions(network(FORMS["div last"]), float_nodes=[kept])
    assert {found[node.name] for node in parse_nodes(FORMS["div last"])} == {"kept float as asked"}


def test_only_the_ends_of_a_gate_are_observed():
    model = load(network(FORMS["div before the mul, then halved"])).model
    assert analyse(model, ONNXRUNTIME).activations == ("x", "t", "y", "out")
    assert analyse(model, TENSORRT).gates == ()


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (FORMS["div last"], ("out", "c")),  # the user reads inside
        (FORMS["div last"], ("out", "m")),
        (FORMS["div last"].replace("Div(m, six)", "Add(m, c)"), ("out",)),
        ("a = Add(t, three) c = Clip(a, half, six) y = Mul(t, c)", ("out",)),  # begins not at 0
        ("s = HardSigmoid(t) y = Mul(s, s)", ("out",)),
        ("s = HardSigmoid <beta = 0.0> (t) y = Mul(t, s)", ("out",)),
    ],
)
def test_what_is_not_a_gate_is_left_alone(nodes, outputs, tmp_path):
    model = network(nodes, outputs=outputs)
    assert "y" not in {gate.output for gate in find_gates(Graph(load(model).model))}
    engine = built(model, tmp_path)
    x = np.load(tmp_path / "x.npy")
    for want, got in zip(run_net(model, x), run_net(engine, x), strict=True):
        assert np.abs(want - got).max() < 0.1 * np.abs(want).max()


@pytest.mark.parametrize(
    ("nodes", "outputs", "gates"),
    [
        (FORMS["div last"], ("out", "m"), [("m", 1.0, 0)]),  # the division is behind the gate
        ("a = Add(t, three) c = Clip(a, zero, six) d = Div(six, c) y = Mul(t, d)", ("out",), []),
        ("h = HardSwish(t) a = Add(h, minus) y = Relu(a)", ("out",), [("h", 1 / 6, 0)]),
    ],
)
def test_a_gate_ends_where_its_formula_does(nodes, outputs, gates):
    found = find_gates(Graph(network(nodes, outputs=outputs)))
    assert [(gate.output, gate.gain, gate.offset) for gate in found] == gates


def test_gates_of_one_model_share_their_numbers(tmp_path, kernels):
    again = "HardSigmoid <alpha = 0.5, beta = -0.5>"
    layer = "u = Conv <pads = [1, 1, 1, 1]> (z, w, b)"
    nodes = f"s = {DOWN}(t) z = Mul(s, t) {layer} r = {again}(u) y = Mul(r, u)"
    engine = built(network(nodes), tmp_path)
    assert kernels(engine).count("QLinearMul") == 2
    assert len([t for t in engine.graph.initializer if t.name.startswith("calib8/number/")]) == 3


@pytest.mark.parametrize(
    ("op", "value", "kernel"),
    [
        ("Add", 3.0, "QLinearAdd"),
        ("Add", -0.7, "QLinearAdd"),
        ("Mul", -1.3, "QLinearMul"),
    ],
)
def test_one_number_between_int8_is_held_exactly_in_int8(op, value, kernel, tmp_path, kernels):
    pool = "p = MaxPool <kernel_shape = [2, 2]> (t)"  # else it is folded into the Conv
    model = network(f"{pool} y = {op}(p, number)")
    model.graph.initializer.append(numpy_helper.from_array(np.float32([value]), "number"))
    engine = built(model, tmp_path)
    assert kernels(engine).count(kernel) == 1
    given, got = ran(engine, ["p/quantized", "y/quantized"], tmp_path)
    t = dequantize(given, *parameters(engine, "p"))
    y = t + np.float32(value) if op == "Add" else t * np.float32(value)
    assert farthest(got, quantize(y, *parameters(engine, "y"), ONNXRUNTIME.grid)) <= 1


def test_a_number_of_higher_rank_than_its_tensor_stays_float():
    """Broadcast, it would give its tensor another rank."""
    model = network("f = Flatten(t) y = Add(f, wide)", ends=("Conv", ""))
    model.graph.node[-1].CopyFrom(*parse_nodes("out = Conv(y, v, b)"))
    wide = np.full((1, 1, 1, 1), 2, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(wide, "wide"))
    assert "constant" in precisions(model)["Add_y"]


def test_an_offset_of_less_than_three_steps_is_an_int8_add(tmp_path, kernels):
    model = network("h = HardSwish(t) y = Add(h, little)")
    engine = built(model, tmp_path)
    assert kernels(engine).count("QLinearAdd") == 1
    want, got = (ran(m, ["out"], tmp_path)[0] for m in (model, engine))
    assert np.abs(want - got).max() < 0.03 * np.ptp(want)


def test_an_offset_before_a_relu_is_no_part_of_the_gate(tmp_path, kernels):
    nodes = "h = HardSwish(t) a = Add(h, minus) y = Relu(a)"
    assert kernels(built(network(nodes), tmp_path)).count("QLinearAdd") == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_kept_float_is_the_operator_that_is_fused(form, tmp_path):
    shift, top, gain, offset = NUMBERS_OF.get(form, (3, 6, 1 / 6, 0))
    last = parse_nodes(FORMS[form])[-1].name
    engine = built(network(FORMS[form]), tmp_path, "--effort", "0", "--keep-float", last)
    left = [node.op_type for node in engine.graph.node]
    assert not {"Clip", "Div"} & set(left)
    assert len(set(left) & {"HardSwish", "HardSigmoid"}) == 1
    source = "g" if form == "squeeze-excite" else "t"
    given, factor, got = ran(engine, [source, "t", "y/float"], tmp_path)
    want = factor * gain * np.clip(given + np.float32(shift), 0, top) + offset
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["div last", "hard sigmoid", "halved and shifted"])
def test_a_float_gate_is_computed_inside_the_layer_before(form, kernels):
    model = load(network(FORMS[form])).model
    fused = gates_fused(model)
    x = np.random.default_rng(6).normal(size=(1, 8, 12, 12)).astype(np.float32)
    before, after = (run_net(m, x)[0] for m in (model, fused))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-6)
    assert not {"HardSwish", "Clip", "Div", "Add"} & set(kernels(fused))


def test_a_gate_without_known_channels_is_scaled_and_shifted_by_numbers():
    model = load(network(FORMS["div before the mul, then halved"])).model
    graph = Graph(model)
    graph.shapes.clear()
    fused = gates_fused(model, graph)
    kinds = [node.op_type for node in fused.graph.node]
    assert kinds.count("HardSwish") == 1
    assert "BatchNormalization" not in kinds
    onnx.checker.check_model(fused, full_check=True)


def test_a_model_of_an_older_opset_is_lifted_to_that_of_the_operator():
    model = load(network(FORMS["div last"])).model
    model.opset_import[0].version = 13
    fused = gates_fused(model)
    assert fused.opset_import[0].version == 14
    onnx.checker.check_model(fused, full_check=True)


def test_what_is_an_operator_already_stays_as_it_is():
    model = load(network(FORMS["hard swish"])).model
    assert gates_fused(model) == model


def net(*, keepdims: int, axes=(2, 3), opset: int = 17, behind: str = "") -> onnx.ModelProto:
    """x -> Conv -> r -> mean m: of a squeeze-excite where it keeps its axes, else before a Gemm."""
    rng = np.random.default_rng(7)
    held = {
        "w": rng.normal(scale=0.3, size=(16, 16, 3, 3)),
        "v": rng.normal(scale=0.5, size=(16, 16, 1, 1)),
        "g": rng.normal(size=(16, 10)),
        "b": rng.normal(size=10),
    }
    where = {"axes": list(axes)} if opset < 18 else {}
    mean = ("ReduceMean", "r" if opset < 18 else "r axes", "m", {"keepdims": keepdims, **where})
    last = "y = Conv <pads = [1, 1, 1, 1]> (p, w)"
    excite = f"e = Conv(m, v) s = Sigmoid(e) p = Mul(r, s) {last}"
    behind = f"{behind} {last}" if behind else excite if keepdims else "y = Gemm(m, g, b)"
    nodes = [("Conv", "x w", "c", PADS), ("Relu", "c", "r"), mean, *parse_nodes(behind)]
    weights = as_float32(held) | {"axes": np.array(axes, np.int64)}
    model = make_model(nodes, {"x": ["n", 16, 12, 12]}, {"y": None}, weights, opset=opset)
    drop_unread(model.graph)
    return model


def built_means(model: onnx.ModelProto, folder: Path, *words: str) -> tuple[Path, dict[str, str]]:
    """The engine that the command writes, and what it says of the mean."""
    x = np.random.default_rng(8).normal(size=(8, 16, 12, 12))
    out = build_net(model, x, folder, "--effort", 0, "--accept", *words)
    (mean,) = (one for one in read_target(out)["nodes"] if one["op"] == "ReduceMean")
    return out / INT8, mean


def sqnr(engine: Path, folder: Path) -> float:
    x = np.load(folder / "x.npy")
    want, got = (run_net(path, x)[0] for path in (folder / "net.onnx", engine))
    assert want.shape == got.shape
    return float(10 * np.log10(np.square(want).sum() / np.square(want - got).sum()))


MEANS = {
    "squeeze-excite": {"keepdims": 1},
    "axes from the end": {"keepdims": 1, "axes": (-1, -2)},
    "axes in an input": {"keepdims": 1, "opset": 18},
    "flat": {"keepdims": 0},
    "flat, axes in an input": {"keepdims": 0, "axes": (-2, -1), "opset": 18},
}


@pytest.mark.parametrize("form", MEANS)
def test_a_mean_over_a_picture_is_an_integer_pool(form, tmp_path, kernels):
    engine, mean = built_means(net(**MEANS[form]), tmp_path)
    assert mean["precision"] == "uint8"
    found = kernels(engine)
    assert found.count("QLinearGlobalAveragePool") == 1
    assert not {"ReduceMean", "GlobalAveragePool", "Conv", "Gemm"} & set(found)
    assert found.count("QuantizeLinear") == 1
    assert found.count("DequantizeLinear") == ("flat" not in form)
    assert sqnr(engine, tmp_path) > 25


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_mean_that_stays_float_is_a_float_pool(keepdims, tmp_path, kernels):
    engine, mean = built_means(net(keepdims=keepdims), tmp_path, "--keep-float", "op:ReduceMean")
    assert mean["reason"] == "kept float as asked"
    found = kernels(engine)
    assert found.count("GlobalAveragePool") == 1
    assert "ReduceMean" not in found
    assert sqnr(engine, tmp_path) > 25


@pytest.mark.parametrize("axes", [(1,), (1, 2, 3), (3,)])
def test_a_mean_over_other_axes_is_no_pool(axes, tmp_path, kernels):
    engine, mean = built_means(net(keepdims=1, axes=axes, behind="p = Add(r, m)"), tmp_path)
    assert mean["reason"] == "it is the mean over other axes than a picture's"
    assert "ReduceMean" in kernels(engine)
    assert sqnr(engine, tmp_path) > 25


IN_A_ROW = [((2, 3, 4, 5), 1), ((2, 3, 4, 5), -3), ((2, 3, 4, 5), 0), ((1, 2, 3, 4, 5), 2)]
AS_IT_IS = [((2, 3, 4, 5), 2), ((2, 3, 4, 5), -1), ((2, 3, 4), 1), ((2, 3), 0)]


def net_softmax(shape, axis, kind="Softmax") -> onnx.ModelProto:
    node = (kind, "x", "y", {} if axis is None else {"axis": axis})
    return make_model([node], {"x": shape}, {"y": shape})


def written_softmax(plain: onnx.ModelProto) -> onnx.ModelProto:
    written = copy_message(plain)
    write_softmax(written, RewriteContext(float_graph=Graph(plain)))
    return written


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opened", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize(("shape", "axis"), IN_A_ROW)
def test_one_with_several_axes_behind_its_own_goes_over_one_row(shape, axis, opened, kind):
    sizes = [f"d{n}" for n in range(len(shape))] if opened else shape
    plain = net_softmax(sizes, axis, kind)
    written = written_softmax(plain)
    onnx.checker.check_model(written, full_check=True)
    assert [n.op_type for n in written.graph.node] == ["Shape", "Reshape", kind, "Reshape"]
    x = np.random.default_rng(0).normal(0, 5, shape).astype(np.float32)
    own, wanted = (run_net(one, x)[0].tobytes() for one in (written, plain))
    assert own == wanted


@pytest.mark.parametrize(("shape", "axis"), [*AS_IT_IS, ((2, 3, 4, 5), None)])
def test_others_stay_as_they_are(shape, axis):
    plain = net_softmax(shape, axis)
    assert written_softmax(plain) == plain


@pytest.mark.parametrize("effort", ["0", "1"])
def test_what_is_built_has_the_quick_form_between_int8_layers(effort, tmp_path):
    rng = np.random.default_rng(1)
    weights = {"v": rng.normal(size=(16, 8, 3, 3)), "w": rng.normal(size=(16, 16, 3, 3))}
    nodes = [("Conv", "x v", "t", PADS), ("Softmax", "t", "s", {"axis": 1})]
    nodes.append(("Conv", "s w", "y", PADS))
    model = make_model(nodes, {"x": ["n", 8, "h", "w"]}, {"y": None}, as_float32(weights))
    x = rng.normal(size=(8, 8, 6, 5)).astype(np.float32)
    (path,) = build_net(model, x, tmp_path, "--effort", effort, "--accept").glob("net.*.onnx")
    engine = onnx.load(path)
    kinds = [node.op_type for node in engine.graph.node]
    assert kinds.count("Softmax") == 1
    assert kinds.count("Reshape") == 2
    wanted, found = (run_net(one, x[:1])[0].ravel() for one in (model, engine))
    assert np.corrcoef(wanted, found)[0, 1] > 0.99


def network_pad(middle, constants):
    """x -> Conv -> t, of which zero is not the lowest value -> the nodes -> y -> Conv -> out."""
    rng = np.random.default_rng(5)
    weights = {"w": rng.normal(scale=0.3, size=(8, 8, 3, 3)), "b": rng.normal(size=8)}
    held = {n: np.asarray(v, np.float32) for n, v in weights.items()} | constants
    ends = (("Conv", "x w b", "t", PADS), ("Conv", "y w b", "out", PADS))
    nodes = [ends[0], *parse_nodes(middle), ends[1]]
    return make_model(nodes, {"x": ["n", 8, 12, 12]}, {"out": ["n", 8, None, None]}, held)


SPATIAL = {"p": np.int64([0, 0, 0, 0, 0, 0, 1, 1]), "zero": np.float32(0)}
CUT = {"one": np.int64([1]), "nine": np.int64([9]), "two": np.int64([2])}
SKIP = {
    "p": np.int64([0, 4, 0, 0, 0, 4, 0, 0]),
    "v": np.ones((8, 16, 1, 1), np.float32) / 8,
    "u": np.ones((16, 8, 1, 1), np.float32) / 8,
}
MODELS = {
    "before a conv": ("y = Pad(t, p, zero)", SPATIAL),
    "without a value": ("y = Pad(t, p)", SPATIAL),
    "on a skip branch": ("s = Pad(t, p) c = Conv(t, u) a = Add(c, s) y = Conv(a, v)", SKIP),
    "slice": ("y = Slice(t, one, nine, two)", CUT),
}


@pytest.mark.parametrize("kind", MODELS)
def test_between_int8_it_runs_on_integers(kind, tmp_path, kernels):
    model = network_pad(*MODELS[kind])
    engine = built(model, tmp_path)
    found = kernels(engine)
    assert found.count("Slice" if kind == "slice" else "Pad") == 1
    assert (found.count("QuantizeLinear"), found.count("DequantizeLinear")) == (1, 1)
    want, got = (ran(m, ["out"], tmp_path)[0] for m in (model, engine))
    assert 10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()) > 30


@pytest.mark.parametrize(
    ("node", "constants"),
    [
        ('y = Pad <mode = "reflect"> (t, p)', SPATIAL),
        ("y = Pad(t, p, one)", {**SPATIAL, "one": np.float32(1)}),
    ],
)
def test_a_pad_with_anything_but_zeros_stays_float(node, constants):
    plan = analyse(load(network_pad(node, constants)).model, ONNXRUNTIME)
    (pad,) = [d for d in plan.decisions if d.op_type == "Pad"]
    assert pad.reason == "it pads with a value other than 0"
    assert plan.int8_pads == ()


def attention() -> onnx.ModelProto:
    """One head over x [n, 12, 32]: scores of Q and K, Softmax, V, a projection, a skip."""
    rng = np.random.default_rng(2)
    weights = {n: rng.normal(scale=0.2, size=(32, 32)) for n in ("wq", "wk", "wv", "wo")}
    weights["wo"][:, 3] *= 40  # one column far larger than the others
    nodes = parse_nodes(
        "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
        "kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul(q, kt) p = Softmax <axis = -1> (s)"
        "z = MatMul(p, v) o = MatMul(z, wo) y = Add(o, x)"
    )
    return make_model(nodes, {"x": ["n", 12, 32]}, {"y": ["n", 12, 32]}, as_float32(weights))


def built_dynamic(folder, *options):
    """SQNR in dB over inputs of very different size, the engine, the decisions."""
    x = np.random.default_rng(3).normal(size=(8, 12, 32)).astype(np.float32)
    x *= np.geomspace(0.05, 3, 8, dtype=np.float32)[:, None, None]
    model = attention()
    engine = onnx.load(build_net(model, x, folder, "--effort", 0, "--accept", *options) / INT8)
    noise = []
    for one in x:
        want, got = (run_net(m, one[None])[0] for m in (model, engine))
        noise.append(((want - got) ** 2).sum() / (want**2).sum())
    nodes = read_target(folder / "out")["nodes"]
    return -10 * np.log10(np.max(noise)), engine, {n["name"]: n["precision"] for n in nodes}


def test_an_input_of_another_size_keeps_its_accuracy(tmp_path, kernels):
    static, _, _ = built_dynamic(tmp_path / "static")
    dynamic, engine, precision = built_dynamic(tmp_path / "dynamic", "--dynamic-matmul")
    assert dynamic > 19 > 0 > static
    found = Counter(kernels(engine))
    assert found["MatMulIntegerToFloat"] + found["DynamicQuantizeMatMul"] == 4
    assert found["MatMul"] + found["FusedMatMul"] == 2
    assert found["DynamicQuantizeLinear"] <= 2  # one for the three that read x
    assert [precision[f"MatMul_{n}"] for n in "qkvoz"] == ["uint8"] * 4 + ["float32"]


def test_a_matmul_kept_float_stays_float(tmp_path, kernels):
    words = ("--dynamic-matmul", "--keep-float", "MatMul_o")
    _, engine, precision = built_dynamic(tmp_path / "a", *words)
    assert precision["MatMul_o"] == "float32"
    assert kernels(engine).count("MatMul") >= 1
    constants = {t.name for t in engine.graph.initializer}
    assert "wo" in constants
    assert "wq" not in constants


def test_inspect_shows_the_matmuls_as_they_will_be_built(tmp_path, run):
    onnx.save(attention(), tmp_path / "net.onnx")
    given = ("inspect", tmp_path / "net.onnx", "--all")
    static, dynamic = (run.ok(*given, *more) for more in ((), ("--dynamic-matmul",)))
    assert static != dynamic
    assert "MatMul_q" in dynamic


def test_seven_bit_weights_hold_for_dynamic_matmuls_too(tmp_path):
    _, engine, _ = built_dynamic(tmp_path / "a", "--dynamic-matmul", "--weight-bits", "7")
    held = engine.graph.initializer
    weights = [numpy_helper.to_array(t) for t in held if t.name.endswith("/dynamic/quantized")]
    assert len(weights) == 4
    assert max(np.abs(w.astype(int)).max() for w in weights) == 63
