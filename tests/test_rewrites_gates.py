"""What ONNX Runtime's int8 models are rewritten to: gates, means, Softmax, Pad and MatMul."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from calibrators.grids import dequantize, quantize
from deploy.frontends import load
from deploy.graph.edit import copy_message
from deploy.graph.index import Graph
from deploy.graph.placement import ONNXRUNTIME, TENSORRT, find_gates
from deploy.graph.plan import analyse
from deploy.targets.onnxruntime.conv_rewrites import RewriteContext
from deploy.targets.onnxruntime.map_rewrites import fuse_gates
from deploy.targets.onnxruntime.rewrites import write_softmax
from tests.models import (
    as_float32,
    build_net,
    make_model,
    make_node,
    make_value,
    run_command,
    run_net,
)

# --- gates
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
    given = {n: ["n", 8, None, None] for n in outputs}
    nodes = [first, *nodes, last]
    return make_model(nodes, {"x": ["n", 8, 12, 12]}, given, as_float32(weights), opset=14)


def precisions(model: onnx.ModelProto, placement=ONNXRUNTIME, **given) -> dict[str, str]:
    decisions = analyse(load(model).model, placement, **given).decisions
    return {d.node: d.reason if not d.int8 else "int8" for d in decisions}


def built(model: onnx.ModelProto, folder: Path, *words: str) -> onnx.ModelProto:
    """The int8 engine that the command writes."""
    x = np.random.default_rng(6).normal(size=(6, 8, 12, 12))
    return onnx.load(build_net(model, x, folder, *words) / "net.int8.onnx")


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
    factor, got = ran(engine, [f"{name}/quantized" for name in ("t", "y")], tmp_path)
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
    want, got = (ran(m, ["out"], tmp_path)[0] for m in (model, engine))
    assert np.abs(want - got).max() < 0.05 * np.ptp(want)


def ran(engine: onnx.ModelProto, names: list[str], folder: Path) -> list[np.ndarray]:
    return run_net(engine, np.load(folder / "x.npy"), names)


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
    (one,) = find_gates(Graph(network(nodes)))
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
        float32, int8 = (ran(m, ["out"], folder)[0] for m in (network(nodes), engine))
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
    assert "y" not in {gate.output for gate in find_gates(Graph(load(model).model))}
    engine = built(model, tmp_path)
    x = np.load(tmp_path / "x.npy")
    for want, got in zip(run_net(model, x), run_net(engine, x), strict=True):
        assert np.abs(want - got).max() < 0.1 * np.abs(want).max()


def test_a_gate_ends_where_its_tensor_is_read_twice(tmp_path):
    """m leaves the model, so the division is a node of its own behind the gate."""
    (gate,) = find_gates(Graph(network(FORMS["div last"][0], outputs=("out", "m"))))
    assert (gate.output, gate.gain) == ("m", 1.0)


def test_a_number_divided_by_a_clip_is_no_gain():
    nodes = [("Add", "t three", "a", {}), ("Clip", "a zero six", "c", {}),
             ("Div", "six c", "d", {}), ("Mul", "t d", "y", {})]  # fmt: skip
    assert find_gates(Graph(network(nodes))) == ()


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
    given, got = ran(engine, ["p/quantized", "y/quantized"], tmp_path)
    t = dequantize(given, *parameters(engine, "p"))
    y = t + np.float32(value) if op == "Add" else t * np.float32(value)
    want = quantize(y, *parameters(engine, "y"), ONNXRUNTIME.grid)
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1


def test_a_number_of_higher_rank_than_its_tensor_stays_float():
    """Broadcast, it would give its tensor another rank."""
    model = network([("Flatten", "t", "f", {}), ("Add", "f wide", "y", {})], ends=("Conv", ""))
    model.graph.node[-1].CopyFrom(make_node("Conv", "y v b", "out", name="end"))
    model.graph.initializer.append(
        numpy_helper.from_array(np.full((1, 1, 1, 1), 2, np.float32), "wide")
    )
    assert "constant" in precisions(model)["Add_y"]


def test_an_offset_of_less_than_three_steps_is_an_int8_add(tmp_path, kernels):
    model = network([("HardSwish", "t", "h", {}), ("Add", "h little", "y", {})])
    engine = built(model, tmp_path)
    assert kernels(engine).count("QLinearAdd") == 1
    want, got = (ran(m, ["out"], tmp_path)[0] for m in (model, engine))
    assert np.abs(want - got).max() < 0.03 * np.ptp(want)


def test_an_offset_before_a_relu_is_no_part_of_the_gate(tmp_path, kernels):
    nodes = [("HardSwish", "t", "h", {}), ("Add", "h minus", "a", {}), ("Relu", "a", "y", {})]
    (gate,) = find_gates(Graph(network(nodes)))
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
    given, factor, got = ran(engine, [source, "t", "y/float"], tmp_path)
    want = factor * gain * np.clip(given + np.float32(shift), 0, top) + sum(offset)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["div last", "hard sigmoid", "halved and shifted"])
def test_a_float_gate_is_computed_inside_the_layer_before(form, tmp_path, kernels):
    model = load(network(FORMS[form][0])).model
    fused = copy_message(model)
    fuse_gates(
        fused, RewriteContext(like=Graph(model), float_gates=tuple(find_gates(Graph(model))))
    )
    x = np.random.default_rng(6).normal(size=(1, 8, 12, 12)).astype(np.float32)
    before, after = (run_net(m, x)[0] for m in (model, fused))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-6)
    assert not {"HardSwish", "Clip", "Div", "Add"} & set(kernels(fused))


def test_a_gate_without_known_channels_is_scaled_and_shifted_by_numbers():
    model = load(network(FORMS["div before the mul, then halved"][0])).model
    graph = Graph(model)
    graph.shapes.clear()
    fused = copy_message(model)
    fuse_gates(fused, RewriteContext(like=graph, float_gates=tuple(find_gates(Graph(model)))))
    kinds = [node.op_type for node in fused.graph.node]
    assert kinds.count("HardSwish") == 1 and "BatchNormalization" not in kinds
    onnx.checker.check_model(fused, full_check=True)


def test_a_model_of_an_older_opset_is_lifted_to_that_of_the_operator():
    model = load(network(FORMS["div last"][0])).model
    model.opset_import[0].version = 13
    fuse_gates(
        model, RewriteContext(like=Graph(model), float_gates=tuple(find_gates(Graph(model))))
    )
    assert model.opset_import[0].version == 14
    onnx.checker.check_model(model, full_check=True)


def test_what_is_an_operator_already_stays_as_it_is():
    model = load(network(FORMS["hard swish"][0])).model
    before = model.SerializeToString(deterministic=True)
    fuse_gates(
        model, RewriteContext(like=Graph(model), float_gates=tuple(find_gates(Graph(model))))
    )
    assert model.SerializeToString(deterministic=True) == before


# --- Means over a picture run in the integer kernel of the pool that they are.
def net(*, keepdims: int, axes=(2, 3), opset: int = 17) -> onnx.ModelProto:
    """x -> Conv -> r -> mean m: of a squeeze-excite where it keeps its axes, else before a Gemm."""
    rng = np.random.default_rng(7)
    held = {
        "w": rng.normal(scale=0.3, size=(16, 16, 3, 3)).astype(np.float32),
        "v": rng.normal(scale=0.5, size=(16, 16, 1, 1)).astype(np.float32),
        "g": rng.normal(size=(16, 10)).astype(np.float32),
        "b": rng.normal(size=10).astype(np.float32),
        "axes": np.array(axes, np.int64),
    }
    where = {"axes": list(axes)} if opset < 18 else {}
    reads = ["r"] if opset < 18 else ["r", "axes"]
    nodes = [
        make_node("Conv", "x w", "c", name="first", pads=[1] * 4),
        make_node("Relu", "c", "r", name="relu"),
        make_node("ReduceMean", reads, "m", name="mean", keepdims=keepdims, **where),
    ]
    if keepdims:
        nodes += [
            make_node("Conv", "m v", "e", name="excite"),
            make_node("Sigmoid", "e", "s", name="sigmoid"),
            make_node("Mul", "r s", "p", name="scale"),
            make_node("Conv", "p w", "y", name="last", pads=[1] * 4),
        ]
    else:
        nodes.append(make_node("Gemm", "m g b", "y", name="last"))
    used = {name for node in nodes for name in node.input}
    held = {name: v for name, v in held.items() if name in used}
    return make_model(nodes, {"x": ["n", 16, 12, 12]}, {"y": None}, held, opset=opset)


def built_images(model: onnx.ModelProto, folder: Path, *words: str) -> Path:
    """The engine that the command writes of a model of pictures."""
    channels = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    x = np.random.default_rng(8).normal(size=(8, channels, 12, 12))
    return build_net(model, x, folder, "--effort", 0, "--accept", *words) / "net.int8.onnx"


def built_means(model: onnx.ModelProto, folder: Path, *words: str) -> tuple[Path, dict[str, str]]:
    """The engine, and what the command says of the mean."""
    engine = built_images(model, folder, *words)
    (target,) = json.loads((folder / "out/report.json").read_text())["targets"]
    (mean,) = (node for node in target["nodes"] if node["name"] == "mean")
    return engine, mean


def sqnr(engine: Path, folder: Path) -> float:
    x = np.load(folder / "x.npy")
    want, got = (run_net(path, x)[0] for path in (folder / "net.onnx", engine))
    assert want.shape == got.shape
    return float(10 * np.log10(np.square(want).sum() / np.square(want - got).sum()))


MEANS = {
    "squeeze-excite": {"keepdims": 1}, "axes from the end": {"keepdims": 1, "axes": (-1, -2)},
    "axes in an input": {"keepdims": 1, "opset": 18}, "flat": {"keepdims": 0},
    "flat, axes in an input": {"keepdims": 0, "axes": (-2, -1), "opset": 18},
}  # fmt: skip


@pytest.mark.parametrize("form", MEANS)
def test_a_mean_over_a_picture_is_an_integer_pool(form, tmp_path, kernels):
    engine, mean = built_means(net(**MEANS[form]), tmp_path)
    assert mean["precision"] == "uint8"
    found = kernels(engine)
    assert found.count("QLinearGlobalAveragePool") == 1
    assert not {"ReduceMean", "GlobalAveragePool", "Conv", "Gemm"} & set(found)
    assert (found.count("QuantizeLinear"), found.count("DequantizeLinear")) == (
        1,
        "flat" not in form,
    )
    assert sqnr(engine, tmp_path) > 25


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_mean_that_stays_float_is_a_float_pool(keepdims, tmp_path, kernels):
    engine, mean = built_means(net(keepdims=keepdims), tmp_path, "--keep-float", "mean")
    assert mean["reason"] == "kept float as asked"
    found = kernels(engine)
    assert found.count("GlobalAveragePool") == 1 and "ReduceMean" not in found
    assert sqnr(engine, tmp_path) > 25


@pytest.mark.parametrize("axes", [(1,), (1, 2, 3), (3,)])
def test_a_mean_over_other_axes_is_no_pool(axes, tmp_path, kernels):
    model = net(keepdims=1, axes=axes)
    graph = model.graph
    del graph.node[3:]
    graph.node.append(make_node("Add", "r m", "p", name="add"))
    graph.node.append(make_node("Conv", "p w", "y", name="last", pads=[1] * 4))
    engine, mean = built_means(model, tmp_path)
    assert mean["reason"] == "it is the mean over other axes than a picture's"
    assert "ReduceMean" in kernels(engine) and sqnr(engine, tmp_path) > 25


# --- Softmax over channels: what is written for it, and that not a bit of it changes.
IN_A_ROW = [((2, 3, 4, 5), 1), ((2, 3, 4, 5), -3), ((2, 3, 4, 5), 0), ((1, 2, 3, 4, 5), 2)]
AS_IT_IS = [((2, 3, 4, 5), 2), ((2, 3, 4, 5), -1), ((2, 3, 4), 1), ((2, 3), 0)]


def net_softmax(shape, axis, kind="Softmax", declared=None) -> onnx.ModelProto:
    node = make_node(kind, "x", "y", name="soft", **{} if axis is None else {"axis": axis})
    ends = [make_value(n, declared or shape) for n in "xy"]
    return make_model([node], ends[:1], ends[1:])


def ran_softmax(model: onnx.ModelProto, x: np.ndarray) -> bytes:
    return run_net(model, x)[0].tobytes()


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opened", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize(("shape", "axis"), IN_A_ROW)
def test_one_with_several_axes_behind_its_own_goes_over_one_row(shape, axis, opened, kind):
    plain = net_softmax(shape, axis, kind, [f"d{n}" for n in range(len(shape))] if opened else None)
    written = onnx.ModelProto.FromString(plain.SerializeToString())
    write_softmax(written, RewriteContext(like=Graph(plain)))
    onnx.checker.check_model(written, full_check=True)
    assert [n.op_type for n in written.graph.node] == ["Shape", "Reshape", kind, "Reshape"]
    x = np.random.default_rng(0).normal(0, 5, shape).astype(np.float32)
    assert ran_softmax(written, x) == ran_softmax(plain, x)


@pytest.mark.parametrize(("shape", "axis"), [*AS_IT_IS, ((2, 3, 4, 5), None)])
def test_others_stay_as_they_are(shape, axis):
    plain = net_softmax(shape, axis)
    written = onnx.ModelProto.FromString(plain.SerializeToString())
    write_softmax(written, RewriteContext(like=Graph(plain)))
    assert written == plain


@pytest.mark.parametrize("effort", ["0", "1"])
def test_what_is_built_has_the_quick_form_between_int8_layers(effort, tmp_path):
    rng = np.random.default_rng(1)
    weights = {"v": rng.normal(size=(16, 8, 3, 3)), "w": rng.normal(size=(16, 16, 3, 3))}
    nodes = [
        make_node("Conv", "x v", "t", name="first", pads=[1, 1, 1, 1]),
        make_node("Softmax", "t", "s", name="soft", axis=1),
        make_node("Conv", "s w", "y", name="last", pads=[1, 1, 1, 1]),
    ]
    model = make_model(nodes, {"x": ["n", 8, "h", "w"]}, {"y": None}, as_float32(weights))
    x = rng.normal(size=(8, 8, 6, 5)).astype(np.float32)
    (path,) = build_net(model, x, tmp_path, "--effort", effort, "--accept").glob("net.*.onnx")
    engine = onnx.load(path)
    kinds = [node.op_type for node in engine.graph.node]
    assert kinds.count("Softmax") == 1 and kinds.count("Reshape") == 2
    wanted, found = (np.frombuffer(ran_softmax(one, x[:1]), np.float32) for one in (model, engine))
    assert np.corrcoef(wanted, found)[0, 1] > 0.99


# --- Pad and Slice between int8: what runs on the integers, and that zeros stay zeros.
def network_pad(middle, constants):
    """x -> Conv -> t, of which zero is not the lowest value -> the nodes -> y -> Conv -> out."""
    rng = np.random.default_rng(5)
    weights = {"w": rng.normal(scale=0.3, size=(8, 8, 3, 3)), "b": rng.normal(size=8)}
    held = {n: np.asarray(v, np.float32) for n, v in weights.items()} | constants
    nodes = [("Conv", "x w b", "t", PADS), *middle, ("Conv", "y w b", "out", PADS)]
    return make_model(nodes, {"x": ["n", 8, 12, 12]}, {"out": ["n", 8, None, None]}, held)


SPATIAL = {"p": np.int64([0, 0, 0, 0, 0, 0, 1, 1]), "zero": np.float32(0)}
CUT = {"one": np.int64([1]), "nine": np.int64([9]), "two": np.int64([2])}
SKIP = {"p": np.int64([0, 4, 0, 0, 0, 4, 0, 0]), "v": np.ones((8, 16, 1, 1), np.float32) / 8,
        "u": np.ones((16, 8, 1, 1), np.float32) / 8}  # fmt: skip
MODELS = {
    "before a conv": ([("Pad", "t p zero", "y", {})], SPATIAL, "Pad"),
    "without a value": ([("Pad", "t p", "y", {})], SPATIAL, "Pad"),
    "on a skip branch": (
        [("Pad", "t p", "s", {}), ("Conv", "t u", "c", {}), ("Add", "c s", "a", {}),
         ("Conv", "a v", "y", {})], SKIP, "Pad",
    ),
    "slice": ([("Slice", "t one nine two", "y", {})], CUT, "Slice"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_between_int8_it_runs_on_integers(kind, tmp_path, kernels):
    middle, constants, op = MODELS[kind]
    model = network_pad(middle, constants)
    engine = built(model, tmp_path)
    found = kernels(engine)
    assert found.count(op) == 1
    assert (found.count("QuantizeLinear"), found.count("DequantizeLinear")) == (1, 1)
    want, got = (ran(m, ["out"], tmp_path)[0] for m in (model, engine))
    assert 10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()) > 30


@pytest.mark.parametrize(
    ("node", "constants"),
    [
        (("Pad", "t p", "y", {"mode": "reflect"}), SPATIAL),
        (("Pad", "t p one", "y", {}), {**SPATIAL, "one": np.float32(1)}),
    ],
)
def test_a_pad_with_anything_but_zeros_stays_float(node, constants):
    plan = analyse(load(network_pad([node], constants)).model, ONNXRUNTIME)
    (pad,) = [d for d in plan.decisions if d.op_type == "Pad"]
    assert pad.reason == "it pads with a value other than 0" and plan.pads == ()


# --- `--dynamic-matmul`: scales found anew for each input.
def attention() -> onnx.ModelProto:
    """One head over x [n, 12, 32]: scores of Q and K, Softmax, V, a projection, a skip."""
    rng = np.random.default_rng(2)
    weights = {n: rng.normal(scale=0.2, size=(32, 32)) for n in ("wq", "wk", "wv", "wo")}
    weights["wo"][:, 3] *= 40  # one column far larger than the others
    nodes = [
        ("MatMul", "x wq", "q", {}), ("MatMul", "x wk", "k", {}), ("MatMul", "x wv", "v", {}),
        ("Transpose", "k", "kt", {"perm": [0, 2, 1]}), ("MatMul", "q kt", "s", {}),
        ("Softmax", "s", "p", {"axis": -1}), ("MatMul", "p v", "z", {}),
        ("MatMul", "z wo", "o", {}), ("Add", "o x", "y", {}),
    ]  # fmt: skip
    return make_model(nodes, {"x": ["n", 12, 32]}, {"y": ["n", 12, 32]}, as_float32(weights))


def built_dynamic(folder, *options):
    """SQNR in dB over inputs of very different size, the kernels that run, the decisions."""
    x = np.random.default_rng(3).normal(size=(8, 12, 32)).astype(np.float32)
    x *= np.geomspace(0.05, 3, 8, dtype=np.float32)[:, None, None]
    build_net(attention(), x, folder, "--effort", 0, "--accept", *options)
    session = ort.SessionOptions()
    session.log_severity_level = 4
    session.optimized_model_filepath = str(folder / "optimized.onnx")
    int8 = ort.InferenceSession(folder / "out/net.int8.onnx", session)
    float32 = ort.InferenceSession(folder / "net.onnx")
    noise = []
    for one in x:
        want, got = (s.run(None, {"x": one[None]})[0] for s in (float32, int8))
        noise.append(((want - got) ** 2).sum() / (want**2).sum())
    kernels = [n.op_type for n in onnx.load(folder / "optimized.onnx").graph.node]
    nodes = json.loads((folder / "out/report.json").read_text())["targets"][0]["nodes"]
    return -10 * np.log10(np.max(noise)), kernels, {n["name"]: n["precision"] for n in nodes}


def test_an_input_of_another_size_keeps_its_accuracy(tmp_path):
    static, _, _ = built_dynamic(tmp_path / "static")
    dynamic, kernels, precision = built_dynamic(tmp_path / "dynamic", "--dynamic-matmul")
    assert dynamic > 19 > 0 > static
    integer = kernels.count("MatMulIntegerToFloat") + kernels.count("DynamicQuantizeMatMul")
    assert integer == 4 and kernels.count("MatMul") + kernels.count("FusedMatMul") == 2
    assert kernels.count("DynamicQuantizeLinear") <= 2  # one for the three that read x
    assert [precision[f"MatMul_{n}"] for n in "qkvoz"] == ["uint8"] * 4 + ["float32"]


def test_a_matmul_kept_float_stays_float(tmp_path):
    _, kernels, precision = built_dynamic(
        tmp_path / "a", "--dynamic-matmul", "--keep-float", "MatMul_o"
    )
    assert precision["MatMul_o"] == "float32" and kernels.count("MatMul") >= 1
    constants = {t.name for t in onnx.load(tmp_path / "a/out/net.int8.onnx").graph.initializer}
    assert "wo" in constants and "wq" not in constants


def test_inspect_shows_the_matmuls_as_they_will_be_built(tmp_path):
    onnx.save(attention(), tmp_path / "net.onnx")
    given = ("inspect", tmp_path / "net.onnx", "--all")
    static, dynamic = (run_command(*given, *more) for more in ((), ("--dynamic-matmul",)))
    assert static != dynamic and "MatMul_q" in dynamic


def test_seven_bit_weights_hold_for_dynamic_matmuls_too(tmp_path):
    built_dynamic(tmp_path / "a", "--dynamic-matmul", "--weight-bits", "7")
    held = onnx.load(tmp_path / "a/out/net.int8.onnx").graph.initializer
    weights = [numpy_helper.to_array(t) for t in held if t.name.endswith("/dynamic/quantized")]
    assert len(weights) == 4 and max(np.abs(w.astype(int)).max() for w in weights) == 63
