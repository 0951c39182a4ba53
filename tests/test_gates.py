import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from calibrators.grids import dequantize, quantize
from deploy.cli import cli
from deploy.frontends import load
from deploy.graph.edit import copied, with_outputs
from deploy.graph.index import Graph
from deploy.graph.placement import ONNXRUNTIME, TENSORRT, gates
from deploy.graph.plan import analyse
from deploy.targets.onnxruntime.conv_rewrites import RewriteContext
from deploy.targets.onnxruntime.map_rewrites import fuse_gates

NUMBERS = {"two_and_half": 2.5, "three": 3.0, "zero": 0.0, "six": 6.0, "sixth": 1 / 6, "half": 0.5,
           "minus": -0.3, "little": 0.004}  # fmt: skip
PADS = {"pads": [1, 1, 1, 1]}
SQUEEZE = {"alpha": 0.2, "beta": 0.5}

# from t to y; the gate's shift, top and gain
FORMS = {
    "div last": (
        [("Add", "t three", "a", {}), ("Clip", "a zero six", "c", {}), ("Mul", "t c", "m", {}),
         ("Div", "m six", "y", {})],
        (3, 6, 1 / 6),
    ),
    "constant first, times a sixth": (
        [("Add", "three t", "a", {}), ("Clip", "a zero six", "c", {}), ("Mul", "c t", "m", {}),
         ("Mul", "sixth m", "y", {})],
        (3, 6, 1 / 6),
    ),
    "div before the mul, then halved": (
        [("Add", "t three", "a", {}), ("Clip", "a zero six", "c", {}), ("Div", "c six", "d", {}),
         ("Mul", "d t", "m", {}), ("Mul", "m half", "y", {})],
        (3, 6, 1 / 12),
    ),
    "hard sigmoid": (
        [("HardSigmoid", "t", "s", {"alpha": 1 / 6, "beta": 0.5}), ("Mul", "t s", "y", {})],
        (3, 6, 1 / 6),
    ),
    "hard swish": ([("HardSwish", "t", "y", {})], (3, 6, 1 / 6)),
    "slope of a fifth": (
        [("HardSigmoid", "t", "s", {}), ("Mul", "s t", "y", {})], (2.5, 5, 1 / 5)
    ),
    "shifted down": (
        [("HardSigmoid", "t", "s", {"alpha": 0.25, "beta": -0.25}), ("Mul", "s t", "y", {})],
        (-1, 4, 1 / 4),
    ),
    "halved and shifted": (
        [("HardSwish", "t", "h", {}), ("Mul", "h half", "m", {}), ("Add", "half m", "y", {})],
        (3, 6, 1 / 12, 0.5),
    ),
    "shifted the other way": (
        [("HardSwish", "t", "h", {}), ("Add", "h minus", "y", {})], (3, 6, 1 / 6, -0.3)
    ),
    "squeeze-excite": (
        [("GlobalAveragePool", "t", "p", {}), ("Conv", "p v b", "g", {}),
         ("HardSigmoid", "g", "s", SQUEEZE), ("Mul", "t s", "y", {})],
        (2.5, 5, 1 / 5),
    ),
}  # fmt: skip


def network(nodes, *, ends=("Conv", "Conv"), outputs=("out",)) -> onnx.ModelProto:
    """x -> Conv -> t -> the nodes -> y -> Conv -> out; an end that is "" is float: Sin."""
    rng = np.random.default_rng(5)
    weights = {
        "w": rng.normal(scale=0.3, size=(8, 8, 3, 3)), "b": rng.normal(size=8),
        "v": rng.normal(scale=0.5, size=(8, 8, 1, 1)), **NUMBERS,
    }  # fmt: skip
    first = ("Conv", "x w b", "t", PADS) if ends[0] else ("Sin", "x", "t", {})
    last = ("Conv", "y w b", "out", PADS) if ends[1] else ("Sin", "y", "out", {})
    graph = helper.make_graph(
        [
            helper.make_node(op, reads.split(), [made], name=f"{op}_{made}", **given)
            for op, reads, made, given in [first, *nodes, last]
        ],
        "gated",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, 12, 12])],
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 8, None, None])
            for n in outputs
        ],
        [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def precisions(model: onnx.ModelProto, placement=ONNXRUNTIME, **given) -> dict[str, str]:
    decisions = analyse(load(model).model, placement, **given).decisions
    return {d.node: d.reason if not d.int8 else "int8" for d in decisions}


def built(model: onnx.ModelProto, folder: Path, *options: str) -> onnx.ModelProto:
    """The int8 engine that the command writes."""
    rng = np.random.default_rng(6)
    onnx.save(model, folder / "net.onnx")
    np.save(folder / "x.npy", rng.normal(size=(6, 8, 12, 12)).astype(np.float32))
    given = ["build", "net.onnx", "--images", "x.npy", "--out", "out", "--duration", "0", *options]
    given = [str(folder / g) if g in ("net.onnx", "x.npy", "out") else g for g in given]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    return onnx.load(folder / "out/net.int8.onnx")


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_between_int8_is_two_int8_kernels(form, tmp_path, kernels):
    nodes, _ = FORMS[form]
    engine = built(network(nodes), tmp_path, "--effort", "0")
    found = kernels(engine)
    first = {"squeeze-excite": (0, 0), "shifted down": (1, 0)}.get(form, (0, 1))  # Add, Clip
    assert (found.count("QLinearAdd"), found.count("Clip")) == first
    assert found.count("QLinearMul") == 1
    assert not {"HardSwish", "HardSigmoid", "Add", "Mul", "Div"} & set(found)
    assert [n.input[0] for n in engine.graph.node if n.op_type == "Clip"] == [
        "t/quantized"
    ] * first[1]
    assert set(precisions(network(nodes)).values()) == {"int8"}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "squeeze-excite"])
def test_a_gate_computes_its_formula_in_int8(form, tmp_path):
    nodes, (shift, top, gain, *offset) = FORMS[form]
    engine = built(network(nodes), tmp_path, "--effort", "0")
    names = [f"{name}/quantized" for name in ("t", "y")]
    factor, got = ran(engine, names, tmp_path)
    (t_scale, t_zero), (y_scale, y_zero) = (parameters(engine, name) for name in ("t", "y"))
    shifted = dequantize(factor, t_scale, t_zero) + np.float32(shift)
    gate = quantize(shifted, np.float32(top / 255), 0, ONNXRUNTIME.grid) * (gain * top / 255)
    y = dequantize(factor, t_scale, t_zero) * gate + sum(offset)
    want = quantize(y, y_scale, y_zero, ONNXRUNTIME.grid)
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1
    assert len(np.unique(got)) > 60  # all of this is not the same value
    exact = dequantize(factor, t_scale, t_zero) * gain * np.clip(shifted, 0, top) + sum(offset)
    once = np.mean(got != quantize(exact, y_scale, y_zero, ONNXRUNTIME.grid)) < 0.01
    assert once == (form != "shifted down")  # the one whose clip is rounded as well


def smaller(model: onnx.ModelProto, times: float) -> onnx.ModelProto:
    """The network with less in t."""
    for t in model.graph.initializer:
        if t.name in ("w", "b"):
            t.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(t) * np.float32(times), t.name)
            )
    return model


@pytest.mark.parametrize(
    ("times", "kernel"),
    [(1.0, "Clip"), (0.25, ""), (0.05, "QLinearAdd")],
    ids=["clipped", "within the clip", "far from its lower end"],
)
def test_what_a_gate_reads_depends_on_the_range_of_its_source(times, kernel, tmp_path, kernels):
    model = smaller(network(FORMS["hard swish"][0]), times)
    engine = built(model, tmp_path, "--effort", "0")
    found = kernels(engine)
    assert [k for k in ("Clip", "QLinearAdd") if k in found] == [kernel] * bool(kernel)
    scale, zero = parameters(engine, "t")
    assert (-zero * scale == pytest.approx(-3, abs=1e-5)) == (kernel != "QLinearAdd")
    want, got = (
        ort.InferenceSession(m.SerializeToString()).run(None, {"x": np.load(tmp_path / "x.npy")})[0]
        for m in (model, engine)
    )
    assert np.abs(want - got).max() < 0.05 * np.ptp(want)


def ran(engine: onnx.ModelProto, names: list[str], folder: Path) -> list[np.ndarray]:
    session = ort.InferenceSession(with_outputs(engine, names).SerializeToString())
    return session.run(names, {"x": np.load(folder / "x.npy")})


EXCITES = {
    "hard sigmoid": FORMS["squeeze-excite"][0],
    "without bias": [
        ("GlobalAveragePool", "t", "p", {}), ("Conv", "p v", "g", {}),
        ("HardSigmoid", "g", "s", SQUEEZE), ("Mul", "t s", "y", {}),
    ],
    "halved": [
        ("GlobalAveragePool", "t", "p", {}), ("Conv", "p v b", "g", {}),
        ("HardSigmoid", "g", "s", SQUEEZE), ("Mul", "half s", "h", {}), ("Mul", "h t", "y", {}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", EXCITES)
def test_the_shift_of_a_squeeze_excite_is_in_the_bias_before_it(form, tmp_path, kernels):
    nodes = EXCITES[form]
    engine = built(network(nodes), tmp_path, "--effort", "0")
    found = kernels(engine)
    assert found.count("QLinearConv") == 3 and found.count("QLinearMul") == 1
    assert not {"QLinearAdd", "Add", "HardSigmoid", "Clip"} & set(found)
    (target,) = json.loads((tmp_path / "out/report.json").read_text())["targets"]
    told = {row["name"] for row in target["tensors"]}
    assert {"t", "p", "y"} <= told and "g" not in told  # what g has is no range that was found
    (one,) = gates(Graph(network(nodes)))
    names = ["t/quantized", f"{one.name}/gate/quantized", f"{one.name}/gate", "y/quantized"]
    factor, stored, gate, got = ran(engine, names, tmp_path)
    g, t = ran(network(nodes), ["g", "t"], tmp_path)
    assert np.abs(gate - one.gain * np.clip(g + one.shift, 0, one.top)).max() < 0.01
    step = np.float32(one.gain * one.top / 255)
    np.testing.assert_allclose(gate[..., :1], stored * step, rtol=1e-6)
    assert (gate == gate[..., :1]).all()
    (t_scale, t_zero), (y_scale, y_zero) = (parameters(engine, name) for name in ("t", "y"))
    own = dequantize(factor, t_scale, t_zero)  # of a Conv that has the same bias, without a shift
    assert np.abs(own - t).max() < 6 * t_scale < one.shift / 5
    want = quantize(own * gate, y_scale, y_zero, ONNXRUNTIME.grid)
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1 and len(np.unique(got)) > 60


@pytest.mark.parametrize("more", [("Add", "m g", "y", {}), ("Conv", "m w", "y", PADS)])
def test_a_source_that_others_read_keeps_its_own_values(more, tmp_path, kernels):
    nodes = [*FORMS["squeeze-excite"][0][:-1], ("Mul", "t s", "m", {}), more]
    engine = built(network(nodes, outputs=("out", "g")), tmp_path, "--effort", "0")
    found = kernels(engine)
    assert (found.count("Clip"), found.count("QLinearAdd")) == (1, more[0] == "Add")
    (own,), (want,) = (ran(model, ["g"], tmp_path) for model in (engine, network(nodes)))
    assert np.abs(own - want).max() < 0.05


def parameters(engine: onnx.ModelProto, name: str) -> tuple[np.float32, int]:
    constants = {t.name: numpy_helper.to_array(t) for t in engine.graph.initializer}
    return np.float32(constants[f"{name}/scale"]), int(constants[f"{name}/zero_point"])


def test_a_gate_is_as_near_to_float_as_its_convs_alone(tmp_path):
    nodes, _ = FORMS["div last"]
    sqnr = []
    for number, options in enumerate([(), ("--keep-float", "op:Clip")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = built(network(nodes), folder, *options)
        x = np.load(folder / "x.npy")
        float32, int8 = (
            ort.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0]
            for m in (network(nodes), engine)
        )
        sqnr.append(10 * np.log10((float32**2).sum() / ((float32 - int8) ** 2).sum()))
    assert sqnr[0] > 30 and sqnr[0] > sqnr[1] - 1.5


@pytest.mark.parametrize("ends", [("", "Conv"), ("Conv", "")], ids=["float before", "float behind"])
@pytest.mark.parametrize("form", ["div last", "hard sigmoid", "hard swish"])
def test_a_gate_beside_float_stays_float(form, ends):
    nodes, _ = FORMS[form]
    found = precisions(network(nodes, ends=ends))
    assert not [name for op, _, name, _ in nodes if found[f"{op}_{name}"] == "int8"]


@pytest.mark.parametrize("kept", ["Add_a", "Clip_c", "Mul_m", "Div_y"])
def test_one_node_kept_float_keeps_the_gate_float(kept):
    nodes, _ = FORMS["div last"]
    found = precisions(network(nodes), float_nodes=[kept])
    assert {found[f"{op}_{name}"] for op, _, name, _ in nodes} == {"kept float as asked"}


def test_only_the_ends_of_a_gate_are_observed():
    nodes, _ = FORMS["div before the mul, then halved"]
    assert analyse(load(network(nodes)).model, ONNXRUNTIME).activations == ("x", "t", "y", "out")
    assert analyse(load(network(nodes)).model, TENSORRT).gates == ()


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (FORMS["div last"][0], ("out", "c")),  # the user reads inside
        (FORMS["div last"][0], ("out", "m")),
        (
            [("Add", "t three", "a", {}), ("Clip", "a zero six", "c", {}),
             ("Mul", "t c", "m", {}), ("Add", "m c", "y", {})],
            ("out",),
        ),
        (  # its Clip does not begin at 0
            [("Add", "t three", "a", {}), ("Clip", "a half six", "c", {}), ("Mul", "t c", "y", {})],
            ("out",),
        ),
        ([("HardSigmoid", "t", "s", {}), ("Mul", "s s", "y", {})], ("out",)),
        ([("HardSigmoid", "t", "s", {"beta": 0.0}), ("Mul", "t s", "y", {})], ("out",)),
    ],
)  # fmt: skip
def test_what_is_not_a_gate_is_left_alone(nodes, outputs, tmp_path):
    model = network(nodes, outputs=outputs)
    found = gates(Graph(load(model).model))
    assert "y" not in {gate.output for gate in found}
    reference = ort.InferenceSession(model.SerializeToString())
    engine = ort.InferenceSession(built(model, tmp_path).SerializeToString())
    x = np.load(tmp_path / "x.npy")
    for want, got in zip(reference.run(None, {"x": x}), engine.run(None, {"x": x}), strict=True):
        assert np.abs(want - got).max() < 0.1 * np.abs(want).max()


def test_a_gate_ends_where_its_tensor_is_read_twice(tmp_path):
    """m leaves the model, so the division is a node of its own behind the gate."""
    (gate,) = gates(Graph(network(FORMS["div last"][0], outputs=("out", "m"))))
    assert (gate.output, gate.gain) == ("m", 1.0)


def test_a_number_divided_by_a_clip_is_no_gain():
    nodes = [("Add", "t three", "a", {}), ("Clip", "a zero six", "c", {}),
             ("Div", "six c", "d", {}), ("Mul", "t d", "y", {})]  # fmt: skip
    assert gates(Graph(network(nodes))) == ()


def test_gates_of_one_model_share_their_numbers(tmp_path, kernels):
    nodes = [
        ("HardSigmoid", "t", "s", {"alpha": 0.25, "beta": -0.25}), ("Mul", "s t", "z", {}),
        ("Conv", "z w b", "u", PADS),
        ("HardSigmoid", "u", "r", {"alpha": 0.5, "beta": -0.5}), ("Mul", "r u", "y", {}),
    ]  # fmt: skip
    engine = built(network(nodes), tmp_path)
    assert kernels(engine).count("QLinearMul") == 2
    assert len([t for t in engine.graph.initializer if t.name.startswith("calib8/number/")]) == 3


@pytest.mark.parametrize(
    ("op", "value", "kernel"),
    [("Add", 3.0, "QLinearAdd"), ("Add", -0.7, "QLinearAdd"), ("Mul", -1.3, "QLinearMul")],
)
def test_one_number_between_int8_is_held_exactly_in_int8(op, value, kernel, tmp_path, kernels):
    pool = ("MaxPool", "t", "p", {"kernel_shape": [2, 2]})  # else it is folded into the Conv
    model = network([pool, (op, "p number", "y", {})])
    model.graph.initializer.append(numpy_helper.from_array(np.float32([value]), "number"))
    engine = built(model, tmp_path)
    assert kernels(engine).count(kernel) == 1
    names = ["p/quantized", "y/quantized"]
    session = ort.InferenceSession(with_outputs(engine, names).SerializeToString())
    given, got = session.run(names, {"x": np.load(tmp_path / "x.npy")})
    t = dequantize(given, *parameters(engine, "p"))
    y = t + np.float32(value) if op == "Add" else t * np.float32(value)
    want = quantize(y, *parameters(engine, "y"), ONNXRUNTIME.grid)
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1


def test_a_number_of_higher_rank_than_its_tensor_stays_float():
    """Broadcast, it would give its tensor another rank."""
    model = network([("Flatten", "t", "f", {}), ("Add", "f wide", "y", {})], ends=("Conv", ""))
    model.graph.node[-1].CopyFrom(helper.make_node("Conv", ["y", "v", "b"], ["out"], name="end"))
    model.graph.initializer.append(
        numpy_helper.from_array(np.full((1, 1, 1, 1), 2, np.float32), "wide")
    )
    assert "constant" in precisions(model)["Add_y"]


def test_an_offset_of_less_than_three_steps_is_an_int8_add(tmp_path, kernels):
    model = network([("HardSwish", "t", "h", {}), ("Add", "h little", "y", {})])
    engine = built(model, tmp_path)
    assert kernels(engine).count("QLinearAdd") == 1
    x = np.load(tmp_path / "x.npy")
    want, got = (
        ort.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0] for m in (model, engine)
    )
    assert np.abs(want - got).max() < 0.03 * np.ptp(want)


def test_an_offset_before_a_relu_is_no_part_of_the_gate(tmp_path, kernels):
    nodes = [("HardSwish", "t", "h", {}), ("Add", "h minus", "a", {}), ("Relu", "a", "y", {})]
    (gate,) = gates(Graph(network(nodes)))
    assert (gate.output, gate.offset) == ("h", 0)
    assert kernels(built(network(nodes), tmp_path)).count("QLinearAdd") == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_kept_float_is_the_operator_that_is_fused(form, tmp_path):
    nodes, (shift, top, gain, *offset) = FORMS[form]
    last = f"{nodes[-1][0]}_y"
    engine = built(network(nodes), tmp_path, "--effort", "0", "--keep-float", last)
    left = [node.op_type for node in engine.graph.node]
    assert not {"Clip", "Div"} & set(left) and len(set(left) & {"HardSwish", "HardSigmoid"}) == 1
    source = "g" if form == "squeeze-excite" else "t"
    x = np.load(tmp_path / "x.npy")
    names = [source, "t", "y/float"]
    session = ort.InferenceSession(with_outputs(engine, names).SerializeToString())
    given, factor, got = session.run(names, {"x": x})
    want = factor * gain * np.clip(given + np.float32(shift), 0, top) + sum(offset)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["div last", "hard sigmoid", "halved and shifted"])
def test_a_float_gate_is_computed_inside_the_layer_before(form, tmp_path, kernels):
    model = load(network(FORMS[form][0])).model
    fused = copied(model)
    fuse_gates(fused, RewriteContext(like=Graph(model), float_gates=tuple(gates(Graph(model)))))
    x = np.random.default_rng(6).normal(size=(1, 8, 12, 12)).astype(np.float32)
    before, after = (
        ort.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0] for m in (model, fused)
    )
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-6)
    assert not {"HardSwish", "Clip", "Div", "Add"} & set(kernels(fused))


def test_a_gate_without_known_channels_is_scaled_and_shifted_by_numbers():
    model = load(network(FORMS["div before the mul, then halved"][0])).model
    graph = Graph(model)
    graph.shapes.clear()
    fused = copied(model)
    fuse_gates(fused, RewriteContext(like=graph, float_gates=tuple(gates(Graph(model)))))
    kinds = [node.op_type for node in fused.graph.node]
    assert kinds.count("HardSwish") == 1 and "BatchNormalization" not in kinds
    onnx.checker.check_model(fused, full_check=True)


def test_a_model_of_an_older_opset_is_lifted_to_that_of_the_operator():
    model = load(network(FORMS["div last"][0])).model
    model.opset_import[0].version = 13
    fuse_gates(model, RewriteContext(like=Graph(model), float_gates=tuple(gates(Graph(model)))))
    assert model.opset_import[0].version == 14
    onnx.checker.check_model(model, full_check=True)


def test_what_is_an_operator_already_stays_as_it_is():
    model = load(network(FORMS["hard swish"][0])).model
    before = model.SerializeToString(deterministic=True)
    fuse_gates(model, RewriteContext(like=Graph(model), float_gates=tuple(gates(Graph(model)))))
    assert model.SerializeToString(deterministic=True) == before
