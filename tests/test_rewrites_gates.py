"""Gates between int8 layers, as ONNX Runtime runs them: HardSwish, squeeze-excite, numbers."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from calibrators.grids import dequantize, quantize
from deploy.frontends import load
from deploy.graph.edit import copy_message, update_tensors
from deploy.graph.gates import find_gates
from deploy.graph.index import Graph
from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import analyse
from deploy.targets.onnxruntime.gate_rewrite import fuse_gates
from deploy.targets.onnxruntime.rewrite_base import RewriteContext
from tests.models import as_float32, build_net, make_model, parse_nodes, read_target, run_net

pytestmark = pytest.mark.slow

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
GATE_NUMBERS = {
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
    first_layer = ("Conv", "x w b", "t", PADS) if ends[0] else ("Sin", "x", "t")
    last_layer = ("Conv", "y w b", "out", PADS) if ends[1] else ("Sin", "y", "out")
    output_shapes = {n: ["n", 8, None, None] for n in outputs}
    nodes = [first_layer, *parse_nodes(nodes), last_layer]
    return make_model(nodes, {"x": ["n", 8, 12, 12]}, output_shapes, as_float32(weights), opset=14)


def with_fused_gates(model: onnx.ModelProto, graph: Graph | None = None) -> onnx.ModelProto:
    """Return a copy of the model in which every gate is one operator."""
    fused, gates = copy_message(model), tuple(find_gates(Graph(model)))
    fuse_gates(fused, RewriteContext(float_graph=graph or Graph(model), float_gates=gates))
    return fused


def precisions(model: onnx.ModelProto, placement=ONNXRUNTIME, **options) -> dict[str, str]:
    precision_by_node = {}
    for decision in analyse(load(model).model, placement, **options).decisions:
        precision_by_node[decision.node] = "int8" if decision.quantized else decision.reason
    return precision_by_node


def build_int8(model: onnx.ModelProto, folder: Path, *options: str) -> onnx.ModelProto:
    """The int8 engine that the command writes."""
    x = np.random.default_rng(6).normal(size=(6, 8, 12, 12))
    return onnx.load(build_net(model, x, folder, *options) / INT8)


@pytest.mark.parametrize("form", FORMS)
def test_gate_between_int8_is_int8_kernels(form, tmp_path, kernels):
    engine = build_int8(network(FORMS[form]), tmp_path, "--effort", "0")
    types = kernels(engine)
    add_and_clip = {"squeeze-excite": (0, 0), "shifted down": (1, 0)}.get(form, (0, 1))  # Add, Clip
    assert (types.count("QLinearAdd"), types.count("Clip")) == add_and_clip
    assert types.count("QLinearMul") == 1
    assert not {"HardSwish", "HardSigmoid", "Add", "Mul", "Div"} & set(types)
    clipped = [n.input[0] for n in engine.graph.node if n.op_type == "Clip"]
    assert clipped == ["t/quantized"] * add_and_clip[1]
    assert set(precisions(network(FORMS[form])).values()) == {"int8"}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "squeeze-excite"])
def test_int8_gate_computes_its_formula(form, tmp_path):
    shift, top, gain, offset = GATE_NUMBERS.get(form, (3, 6, 1 / 6, 0))
    engine = build_int8(network(FORMS[form]), tmp_path, "--effort", "0")
    factor, outputs = run_samples(engine, [f"{name}/quantized" for name in ("t", "y")], tmp_path)
    t = dequantize(factor, *parameters(engine, "t"))
    output_grid = (*parameters(engine, "y"), ONNXRUNTIME.grid)
    shifted = t + np.float32(shift)
    gate = quantize(shifted, np.float32(top / 255), 0, ONNXRUNTIME.grid) * (gain * top / 255)
    assert max_difference(outputs, quantize(t * gate + offset, *output_grid)) <= 1
    assert len(np.unique(outputs)) > 60  # all of this is not the same value
    exact = t * gain * np.clip(shifted, 0, top) + offset
    is_rounded_once = np.mean(outputs != quantize(exact, *output_grid)) < 0.01
    assert is_rounded_once == (form != "shifted down")  # the one whose clip is rounded as well


def max_difference(outputs, expected) -> int:
    return np.abs(outputs.astype(int) - expected.astype(int)).max()


def shrink(model: onnx.ModelProto, factor: float) -> onnx.ModelProto:
    """Scale the tensor t of the network down."""
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    scaled = {n: numpy_helper.from_array(arrays[n] * np.float32(factor), n) for n in ("w", "b")}
    update_tensors(model.graph.initializer, scaled)
    return model


@pytest.mark.parametrize(
    ("factor", "kernel"),
    [
        (1.0, "Clip"),
        (0.25, ""),
        (0.05, "QLinearAdd"),
    ],
    ids=["clipped", "within the clip", "far from its lower end"],
)
def test_gate_input_depends_on_source_range(factor, kernel, tmp_path, kernels):
    model = shrink(network(FORMS["hard swish"]), factor)
    engine = build_int8(model, tmp_path, "--effort", "0")
    types = kernels(engine)
    assert [k for k in ("Clip", "QLinearAdd") if k in types] == [kernel] * bool(kernel)
    scale, zero = parameters(engine, "t")
    assert (-zero * scale == pytest.approx(-3, abs=1e-5)) == (kernel != "QLinearAdd")
    expected, outputs = (run_samples(m, ["out"], tmp_path)[0] for m in (model, engine))
    assert np.abs(expected - outputs).max() < 0.05 * np.ptp(expected)


def run_samples(engine: onnx.ModelProto, names: list[str], folder: Path) -> list[np.ndarray]:
    return run_net(engine, np.load(folder / "x.npy"), names)


EXCITES = {
    "hard sigmoid": FORMS["squeeze-excite"],
    "without bias": FORMS["squeeze-excite"].replace(", b)", ")"),
    "halved": FORMS["squeeze-excite"].replace("y = Mul(t, s)", "h = Mul(half, s) y = Mul(h, t)"),
}


@pytest.mark.parametrize("form", EXCITES)
def test_squeeze_excite_shift_is_in_bias(form, tmp_path, kernels):
    nodes = EXCITES[form]
    engine = build_int8(network(nodes), tmp_path, "--effort", "0")
    types = kernels(engine)
    assert types.count("QLinearConv") == 3
    assert types.count("QLinearMul") == 1
    assert not {"QLinearAdd", "Add", "HardSigmoid", "Clip"} & set(types)
    reported = {row["name"] for row in read_target(tmp_path / "out")["tensors"]}
    assert {"t", "p", "y"} <= reported
    assert "g" not in reported  # what g has is no range that was found
    (float_gate,) = find_gates(Graph(network(nodes)))
    names = [
        "t/quantized",
        f"{float_gate.name}/gate/quantized",
        f"{float_gate.name}/gate",
        "y/quantized",
    ]
    factor, stored, gate, outputs = run_samples(engine, names, tmp_path)
    g, t = run_samples(network(nodes), ["g", "t"], tmp_path)
    assert (
        np.abs(gate - float_gate.gain * np.clip(g + float_gate.shift, 0, float_gate.top)).max()
        < 0.01
    )
    step = np.float32(float_gate.gain * float_gate.top / 255)
    np.testing.assert_allclose(gate[..., :1], stored * step, rtol=1e-6)
    assert (gate == gate[..., :1]).all()
    scale, zero = parameters(engine, "t")
    source = dequantize(factor, scale, zero)  # of a Conv that has the same bias, without a shift
    assert np.abs(source - t).max() < 6 * scale < float_gate.shift / 5
    expected = quantize(source * gate, *parameters(engine, "y"), ONNXRUNTIME.grid)
    assert max_difference(outputs, expected) <= 1
    assert len(np.unique(outputs)) > 60


@pytest.mark.parametrize("reader", ["Add(m, g)", "Conv <pads = [1, 1, 1, 1]> (m, w)"])
def test_shared_gate_source_keeps_its_values(reader, tmp_path, kernels):
    nodes = FORMS["squeeze-excite"].replace("y = Mul(t, s)", f"m = Mul(t, s) y = {reader}")
    engine = build_int8(network(nodes, outputs=("out", "g")), tmp_path, "--effort", "0")
    types = kernels(engine)
    assert types.count("Clip") == 1
    assert types.count("QLinearAdd") == reader.startswith("Add")
    (int8_values,), (float_values,) = (
        run_samples(model, ["g"], tmp_path) for model in (engine, network(nodes))
    )
    assert np.abs(int8_values - float_values).max() < 0.05


def parameters(engine: onnx.ModelProto, name: str) -> tuple[np.float32, int]:
    constants = {t.name: numpy_helper.to_array(t) for t in engine.graph.initializer}
    return np.float32(constants[f"{name}/scale"]), int(constants[f"{name}/zero_point"])


def test_int8_gate_keeps_the_accuracy(tmp_path):
    sqnr, model = [], network(FORMS["div last"])
    for number, options in enumerate([(), ("--keep-float", "op:Clip")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = build_int8(model, folder, *options)
        float32, int8 = (run_samples(m, ["out"], folder)[0] for m in (model, engine))
        sqnr.append(10 * np.log10((float32**2).sum() / ((float32 - int8) ** 2).sum()))
    assert sqnr[0] > 30
    assert sqnr[0] > sqnr[1] - 1.5


@pytest.mark.parametrize("ends", [("", "Conv"), ("Conv", "")], ids=["float before", "float behind"])
@pytest.mark.parametrize("form", ["div last", "hard sigmoid", "hard swish"])
def test_gate_beside_float_stays_float(form, ends):
    precision_by_node = precisions(network(FORMS[form], ends=ends))
    assert not [node for node in parse_nodes(FORMS[form]) if precision_by_node[node.name] == "int8"]


@pytest.mark.parametrize("tail", ["Relu(q)", "Clip(q, zero, six)"])
def test_gate_before_clipping_stays_float(tail, tmp_path):
    model = network(FORMS["hard swish"].replace("y =", "q =") + f" y = {tail}")
    engine = build_int8(model, tmp_path, "--effort", "0")
    expected, outputs = (run_samples(m, ["out"], tmp_path)[0] for m in (model, engine))
    assert np.abs(expected - outputs).max() < 0.05 * np.ptp(expected)


@pytest.mark.parametrize("float_node", ["Add_a", "Clip_c", "Mul_m", "Div_y"])
def test_float_node_keeps_its_gate_float(float_node, wording):
    reason_by_node = precisions(network(FORMS["div last"]), float_nodes=[float_node])
    reasons = {reason_by_node[node.name] for node in parse_nodes(FORMS["div last"])}
    assert len(reasons) == 1
    wording.check(reasons.pop())


def test_only_gate_ends_are_observed():
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
def test_similar_nodes_are_no_gate(nodes, outputs, tmp_path):
    model = network(nodes, outputs=outputs)
    assert "y" not in {gate.output for gate in find_gates(Graph(load(model).model))}
    engine = build_int8(model, tmp_path)
    x = np.load(tmp_path / "x.npy")
    for expected, outputs in zip(run_net(model, x), run_net(engine, x), strict=True):
        assert np.abs(expected - outputs).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("nodes", "outputs", "gates"),
    [
        (FORMS["div last"], ("out", "m"), [("m", 1.0, 0)]),  # the division is behind the gate
        ("a = Add(t, three) c = Clip(a, zero, six) d = Div(six, c) y = Mul(t, d)", ("out",), []),
        ("h = HardSwish(t) a = Add(h, minus) y = Relu(a)", ("out",), [("h", 1 / 6, 0)]),
    ],
)
def test_gate_ends_with_its_formula(nodes, outputs, gates):
    found_gates = find_gates(Graph(network(nodes, outputs=outputs)))
    assert [(gate.output, gate.gain, gate.offset) for gate in found_gates] == gates


def test_gates_share_their_numbers(tmp_path, kernels):
    second_gate = "HardSigmoid <alpha = 0.5, beta = -0.5>"
    layer = "u = Conv <pads = [1, 1, 1, 1]> (z, w, b)"
    nodes = f"s = {DOWN}(t) z = Mul(s, t) {layer} r = {second_gate}(u) y = Mul(r, u)"
    engine = build_int8(network(nodes), tmp_path)
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
def test_scalar_between_int8_is_exact_int8(op, value, kernel, tmp_path, kernels):
    pool = "p = MaxPool <kernel_shape = [2, 2]> (t)"  # else it is folded into the Conv
    model = network(f"{pool} y = {op}(p, number)")
    model.graph.initializer.append(numpy_helper.from_array(np.float32([value]), "number"))
    engine = build_int8(model, tmp_path)
    assert kernels(engine).count(kernel) == 1
    pooled, outputs = run_samples(engine, ["p/quantized", "y/quantized"], tmp_path)
    t = dequantize(pooled, *parameters(engine, "p"))
    y = t + np.float32(value) if op == "Add" else t * np.float32(value)
    assert max_difference(outputs, quantize(y, *parameters(engine, "y"), ONNXRUNTIME.grid)) <= 1


def test_scalar_of_higher_rank_stays_float():
    """Broadcast, it would give its tensor another rank."""
    model = network("f = Flatten(t) y = Add(f, wide)", ends=("Conv", ""))
    model.graph.node[-1].CopyFrom(*parse_nodes("out = Conv(y, v, b)"))
    wide = np.full((1, 1, 1, 1), 2, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(wide, "wide"))
    assert "constant" in precisions(model)["Add_y"]


def test_small_offset_is_an_int8_add(tmp_path, kernels):
    model = network("h = HardSwish(t) y = Add(h, little)")
    engine = build_int8(model, tmp_path)
    assert kernels(engine).count("QLinearAdd") == 1
    expected, outputs = (run_samples(m, ["out"], tmp_path)[0] for m in (model, engine))
    assert np.abs(expected - outputs).max() < 0.03 * np.ptp(expected)


def test_offset_before_relu_is_outside_gate(tmp_path, kernels):
    nodes = "h = HardSwish(t) a = Add(h, minus) y = Relu(a)"
    assert kernels(build_int8(network(nodes), tmp_path)).count("QLinearAdd") == 1


@pytest.mark.parametrize("form", FORMS)
def test_float_gate_is_one_fused_operator(form, tmp_path):
    shift, top, gain, offset = GATE_NUMBERS.get(form, (3, 6, 1 / 6, 0))
    last_node = parse_nodes(FORMS[form])[-1].name
    engine = build_int8(network(FORMS[form]), tmp_path, "--effort", "0", "--keep-float", last_node)
    operators = [node.op_type for node in engine.graph.node]
    assert not {"Clip", "Div"} & set(operators)
    assert len(set(operators) & {"HardSwish", "HardSigmoid"}) == 1
    source = "g" if form == "squeeze-excite" else "t"
    gate_input, factor, outputs = run_samples(engine, [source, "t", "y/float"], tmp_path)
    expected = factor * gain * np.clip(gate_input + np.float32(shift), 0, top) + offset
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["div last", "hard sigmoid", "halved and shifted"])
def test_float_gate_fuses_into_its_layer(form, kernels):
    model = load(network(FORMS[form])).model
    fused = with_fused_gates(model)
    x = np.random.default_rng(6).normal(size=(1, 8, 12, 12)).astype(np.float32)
    expected, outputs = (run_net(m, x)[0] for m in (model, fused))
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-6)
    assert not {"HardSwish", "Clip", "Div", "Add"} & set(kernels(fused))


def test_gate_of_unknown_channels_uses_numbers():
    model = load(network(FORMS["div before the mul, then halved"])).model
    graph = Graph(model)
    graph.shapes.clear()
    fused = with_fused_gates(model, graph)
    kinds = [node.op_type for node in fused.graph.node]
    assert kinds.count("HardSwish") == 1
    assert "BatchNormalization" not in kinds
    onnx.checker.check_model(fused, full_check=True)


def test_fused_gate_lifts_the_opset():
    model = load(network(FORMS["div last"])).model
    model.opset_import[0].version = 13
    fused = with_fused_gates(model)
    assert fused.opset_import[0].version == 14
    onnx.checker.check_model(fused, full_check=True)


def test_fused_operator_stays_unchanged():
    model = load(network(FORMS["hard swish"])).model
    assert with_fused_gates(model) == model
