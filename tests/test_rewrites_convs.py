"""What ONNX Runtime's int8 models are rewritten to: Convs, ConvTransposes and Resizes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.graph.index import Graph
from deploy.graph.placement import ONNXRUNTIME
from deploy.graph.plan import analyse
from deploy.runtimes.ort import OrtSession, cpu_kind
from deploy.targets.onnxruntime import rewrites, tile_rewrite
from deploy.targets.onnxruntime.resize_rewrite import write_upsampling
from deploy.targets.onnxruntime.rewrite_base import RewriteContext
from deploy.tuning.timing import attribute_kernels
from tests.models import as_float32, build_net, make_model, make_node, read_target, run_net

SIDE = 16
INT8 = "net.int8.onnx"
PADS = {"pads": [1] * 4}


def net(inner: int, outer: int, *, window: int = 3, stride: int = 1, twice: bool = False):
    """A stem, a layer behind it and, where asked for, another one that reads the input."""
    rng = np.random.default_rng(0)
    shapes = {"w": (outer, inner, window, window), "v": (8, outer, 3, 3), "u": (8, inner, 1, 1)}
    weights = {name: rng.normal(0, 0.2, shapes[name]) for name in "wvu"[: 2 + twice]}
    stem = {"name": "stem", "pads": [window // 2] * 4, "strides": [stride] * 2}
    nodes = [("Conv", "x w", "a", stem), ("Relu", "a", "r"), ("Conv", "r v", "y", PADS)]
    nodes += [("Conv", "x u", "z")] * twice
    ends = dict.fromkeys("yz"[: 1 + twice])
    return make_model(nodes, {"x": ["n", inner, SIDE, SIDE]}, ends, as_float32(weights))


def sizes_of(model):
    """What stands behind the batch in the shape of the input."""
    return [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim][1:]


def built(model: onnx.ModelProto, folder: Path, *words: str) -> Path:
    """The folder of a build."""
    x = np.random.default_rng(1).normal(size=(16, *sizes_of(model)))
    return build_net(model, x, folder, "--accept", *words)


def engine(out: Path) -> onnx.ModelProto:
    (path,) = out.glob("net.*.onnx")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def named(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    (node,) = (node for node in model.graph.node if node.name == name)
    return node


def seen(model: onnx.ModelProto) -> int:
    """Channels that the stem reads."""
    made = {name: node for node in model.graph.node for name in node.output}
    weight = named(model, "stem").input[1]
    return constants(model)[made[weight].input[0] if weight in made else weight].shape[1]


def ran(model: onnx.ModelProto) -> list[bytes]:
    x = np.random.default_rng(2).normal(size=(2, *sizes_of(model))).astype(np.float32)
    return [value.tobytes() for value in run_net(model, x)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "outer", "window", "padded"),
    [
        (3, 32, 3, "vnni avx2 arm any"),
        (3, 32, 7, ""),
        (2, 24, 5, "vnni"),
        (1, 64, 3, "vnni"),
        (1, 16, 3, ""),
    ],
)
def test_a_picture_gets_four_channels_where_its_kernel_is_faster(
    inner, outer, window, padded, tmp_path
):
    """By the kernels of the CPU that runs it, whatever CPU builds."""
    model = net(inner, outer, window=window, twice=outer == 24)
    found = {
        cpu: engine(built(model, tmp_path / cpu, "--effort", 0, "--for", cpu))
        for cpu in ("vnni", "avx2", "arm", "any", cpu_kind())
    }
    assert {cpu for cpu, one in found.items() if seen(one) == 4} == set(padded.split())
    assert all(counted(m.graph.node, "Pad") == (seen(m) == 4) for m in found.values())
    assert len({tuple(ran(one)) for one in found.values()}) == 1
    here = built(model, tmp_path / "here", "--effort", 0)
    assert engine(here) == found[cpu_kind()]


@pytest.mark.parametrize(("sums", "kind"), [(255 * 127 * 64, "vnni"), (32767 * 32, "avx2")])
def test_the_kind_of_cpu_is_what_its_kernels_do(sums, kind, monkeypatch):
    ran = SimpleNamespace(run=lambda feed: {"y": np.full((1, 16), sums)})
    monkeypatch.setattr(OrtSession, "open", lambda model, **options: ran)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert cpu_kind.__wrapped__() == kind


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"inner": 4, "outer": 32}, ()),  # has them
        ({"inner": 3, "outer": 32, "window": 1}, ("--int8-stem",)),  # gathers nothing
        ({"inner": 3, "outer": 8}, ("--int8-stem",)),  # a small layer
        ({"inner": 3, "outer": 32}, ("--keep-float", "stem")),
    ],
)
def test_others_stay_as_they_are(given, words, tmp_path):
    found = engine(built(net(**given), tmp_path / "net", "--effort", 0, *words))
    assert seen(found) == given["inner"] and counted(found.graph.node, "Pad") == 0


def test_a_layer_may_be_called_as_what_it_makes(tmp_path):
    """As tf2onnx calls them: the picture's new channels and the layer's own have two names."""
    rng = np.random.default_rng(0)
    shapes = {"w": (24, 3, 3, 3), "d": (24, 1, 3, 3), "v": (8, 24, 1, 1)}
    nodes = [
        make_node("Conv", "x w", ["stem"], name="stem", **PADS),
        make_node("Clip", "stem least most", ["six"], name="six"),
        make_node("Conv", "six d", ["deep"], name="deep", group=24, **PADS),
        make_node("Conv", "deep v", "y", name="y"),
    ]
    weights = {name: rng.normal(0, 0.2, shape) for name, shape in shapes.items()}
    weights |= {"least": 0, "most": 6}
    model = make_model(nodes, {"x": ["n", 3, SIDE, SIDE]}, {"y": None}, as_float32(weights))
    found = engine(built(model, tmp_path / "net", *VNNI))
    assert seen(found) == 4 and "stem/wide" in [name for n in found.graph.node for name in n.output]


@pytest.mark.parametrize(
    ("inner", "outer", "stride", "in_float"),
    [
        (3, 32, 1, False),
        (3, 24, 1, False),
        (3, 16, 1, True),
        (3, 24, 2, False),
        (3, 16, 2, True),
        (1, 32, 1, True),
        (1, 32, 2, True),
        (1, 64, 1, False),
    ],
)
def test_a_first_conv_of_many_values_is_in_int8(inner, outer, stride, in_float):
    plan = analyse(net(inner, outer, stride=stride), ONNXRUNTIME)
    (reason,) = (one.reason for one in plan.decisions if one.node == "stem")
    assert (f"only {9 * inner} products" in reason) is in_float
    every = analyse(net(inner, outer, stride=stride), replace(ONNXRUNTIME, min_products=0))
    assert not any(one.reason for one in every.decisions)


EDGE = 12
VNNI = ("--effort", "0", "--for", "vnni")


def inverted(channels: int, *, squeeze: str = "", end: str = "project", window: int = 3):
    """Expand, depthwise, squeeze-and-excite where asked for, and an end."""
    rng, nodes, weights = np.random.default_rng(0), [], {}

    def add(op_type, inputs, name, **given):
        nodes.append(make_node(op_type, inputs, [f"{name}_y"], name=name, **given))
        return f"{name}_y"

    def conv(source, name, outer, inner, window=1, group=1):
        shape = (outer, inner // group, window, window)
        weights[f"{name}_w"] = rng.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape)
        weights[f"{name}_b"] = rng.normal(0, 0.1, outer)
        return add("Conv", f"{source} {name}_w {name}_b", name, group=group, pads=[window // 2] * 4)

    into = add("Relu", conv("x", "stem", 8, 8, 3), "stem_relu")
    wide = add("Relu", conv(into, "expand", channels, 8), "expand_relu")
    own = add("Relu", conv(wide, "deep", channels, channels, window, channels), "deep_relu")
    if squeeze:
        mean = add(squeeze, own, "mean", **{"axes": [2, 3]} if squeeze == "ReduceMean" else {})
        less = add("Relu", conv(mean, "squeeze", 8, channels), "less")
        gate = add("HardSigmoid", conv(less, "excite", channels, 8), "gate")
        own = add("Mul", f"{own} {gate}", "gated")
    read = [own] if end == "output" else []
    if end == "concat":
        last = conv(add("Concat", f"{own} {own}", "both", axis=1), "project", 8, 2 * channels)
    elif end == "dense":
        last = conv(own, "project", 256, channels, 3)
    else:
        if end == "mean":
            mean = add("ReduceMean", own, "mean", axes=[1])
            own = add("Mul", f"{own} {mean}", "weighed")
        last = conv(own, "project", 8, channels)
        if end == "residual":
            last = add("Add", f"{last} {into}", "sum")
        last = last if read else conv(last, "last", 4, 8)
    inputs, outputs = {"x": ["n", 8, EDGE, EDGE]}, dict.fromkeys([last, *read])
    return make_model(nodes, inputs, outputs, as_float32(weights), opset=17)


def groups(model: onnx.ModelProto) -> int:
    return next(a.i for a in named(model, "deep").attribute if a.name == "group")


@pytest.fixture
def fives(tmp_path) -> Path:
    """The build of a network whose depthwise layer has 24 channels and a window of 5."""
    return built(inverted(24, window=5), tmp_path / "net", *VNNI)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "wide", "avx2", "squeeze"),
    [
        (24, 32, 24, ""),
        (40, 48, 48, "GlobalAveragePool"),
        (20, 32, 20, "ReduceMean"),
        (32, 32, 32, "GlobalAveragePool"),
        (48, 48, 48, ""),
    ],
)
def test_the_channels_of_a_slow_layer_are_filled_up_where_that_pays(
    channels, wide, avx2, squeeze, tmp_path, monkeypatch
):
    model = inverted(channels, squeeze=squeeze, end="residual")
    found = engine(built(model, tmp_path / "wide", *VNNI))
    other = engine(built(model, tmp_path / "avx2", "--effort", "0", "--for", "avx2"))
    assert (groups(found), groups(other)) == (wide, avx2)
    monkeypatch.setattr("deploy.targets.onnxruntime.depthwise_rewrite.CHANNELS_AT_ONCE", 1)
    plain = engine(built(model, tmp_path / "plain", "--effort", "0"))
    assert groups(plain) == channels and ran(found) == ran(plain)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("output", []),  # the user reads it
        ("concat", []),  # channels stand behind others there
        ("mean", []),  # zeros would count in a mean over channels
        ("dense", []),  # what reads it would lose more
        ("project", ["--keep-float", "deep"]),  # float kernels do not mind
    ],
)
def test_where_it_cannot_be_or_does_not_pay_channels_stay(end, words, tmp_path):
    found = built(inverted(24, end=end), tmp_path / "net", "--effort", "0", *words)
    assert groups(engine(found)) == 24


def test_layers_in_float_around_it_get_wider_too_and_keep_their_own_weights(tmp_path):
    model = inverted(24, window=5)
    plan = tmp_path / "all.plan.toml"  # leaves all else in int8
    plan.write_text('schema = "calib8-plan/1"\nfloat = []\n\n[onnxruntime]\nprecision = "int8"\n')
    words = ("--keep-float", "expand", "--keep-float", "project", "--plan", plan, *VNNI[2:])
    found = engine(built(model, tmp_path / "net", *words))
    assert groups(found) == 32
    held, own = constants(found), constants(model)
    expand, project = held["expand_w/expand/wide"], held["project_w/project/wide"]
    assert expand.shape == (32, 8, 1, 1) and project.shape == (8, 32, 1, 1)
    assert (expand[:24] == own["expand_w"]).all() and not expand[24:].any()
    assert (project[:, :24] == own["project_w"]).all() and not project[:, 24:].any()


def test_the_search_gives_float_layers_back_their_weights(tmp_path, monkeypatch):
    """Trials round every weight, and a layer in float is to have its own, as wide as it is."""
    from deploy.tuning.repairs import output_rounding

    seen, wide = [], "expand_w/expand/wide"

    def give_back(made, layers, own):
        real(made, layers, own)
        held = constants(made)
        if wide in held:
            mine = numpy_helper.to_array(own["expand_w"])
            seen.append(np.array_equal(held[wide][:24], mine))

    real = output_rounding._give_back
    monkeypatch.setattr(output_rounding, "_give_back", give_back)
    monkeypatch.setattr("deploy.tuning.search._NEAR", 0.0)  # layers are looked at alone, too
    built(inverted(24, window=5), tmp_path / "net", "--effort", "1", *VNNI[2:])
    assert seen and all(seen)


def test_inner_tensors_are_told_by_their_own_channels(fives):
    assert groups(engine(fives)) == 32
    layers = {row["name"]: row for row in read_target(fives)["layers"]}
    for name in ("expand_relu_y", "deep_relu_y"):
        assert layers[name]["sqnr_db"] > 25 and not layers[name]["other_shape"]


def test_compare_and_explain_read_it(fives, tmp_path, run):
    path, source = fives / INT8, tmp_path / "net" / "net.onnx"
    for words in (["compare", source, path], ["compare", path, path], ["explain", fives]):
        said = run.ok(*words, "--images", tmp_path / "net" / "x.npy")
        assert "deep_relu_y" in said or "nowhere" in said, said


SIDE_BY_SIDE = {
    "square": ((16, 12, 2, 2), {"strides": [2, 2]}),
    "oblong": ((16, 12, 2, 3), {"strides": [2, 3]}),
    "row": ((16, 12, 1, 4), {"strides": [1, 4]}),
    "one channel": ((16, 1, 2, 2), {"strides": [2, 2], "pads": [0] * 4, "group": 1}),
    "said": ((16, 12, 2, 2), {"strides": [2, 2], "kernel_shape": [2, 2], "dilations": [1, 1]}),
}
OTHER = {
    "cut off": ((16, 12, 2, 2), {"strides": [2, 2], "pads": [1, 0, 0, 1]}),
    "wider": ((16, 12, 2, 2), {"strides": [2, 2], "output_padding": [1, 1]}),
    "apart": ((16, 12, 2, 2), {"strides": [3, 3]}),
    "overlapping": ((16, 12, 3, 3), {"strides": [2, 2]}),
    "overlapping in columns": ((16, 12, 2, 2), {"strides": [2, 1]}),
    "dilated": ((16, 12, 2, 2), {"strides": [2, 2], "dilations": [2, 2]}),
    "in groups": ((16, 6, 2, 2), {"strides": [2, 2], "group": 2}),
    "said how": ((16, 12, 2, 2), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "of one size": ((16, 12, 2, 2), {"strides": [2, 2], "output_shape": [11, 9]}),
    "of one pixel": ((16, 12, 1, 1), {}),
    "of a line": ((16, 12, 2), {"strides": [2]}),
    "of a volume": ((16, 12, 2, 2, 2), {"strides": [2, 2, 2]}),
}


@pytest.fixture
def tiled_net(tmp_path, monkeypatch):
    """The engine of x -> Conv, Relu -> t -> ConvTranspose, [Relu] -> y -> Conv or Sigmoid -> out.

    By `calib8 build`; net.onnx and x.npy lie beside it. `plain`: without the rewrite of the layer.
    """

    def build(shape, given, *more, **how) -> onnx.ModelProto:
        sizes = [s if isinstance(s, int) else 7 for s in how.get("sizes", (6, 5))]
        x = np.random.default_rng(4).normal(size=(6, 16, *sizes))
        words = ("--effort", 0, "--accept", *more)
        return onnx.load(build_net(network(shape, given, **how), x, tmp_path, *words) / INT8)

    def plain(*given, **how) -> onnx.ModelProto:
        with monkeypatch.context() as patch:
            patch.setattr(rewrites, "REWRITES", rewrites.REWRITES[:-1])
            return build(*given, **how)

    build.plain = plain
    return build


def network(shape, given, *, relu=True, bias=True, end="Conv", sizes=(6, 5), lopsided=False):
    """The float model; lopsided weights of the ConvTranspose all round down."""
    rng = np.random.default_rng(3)
    channels, rank = shape[1] * given.get("group", 1), len(shape) - 2
    held = {
        "v": rng.normal(size=(16, 16, *[3] * rank)),
        "w": rng.normal(size=shape),
        "b": rng.normal(size=channels),
        "u": rng.normal(size=(8, channels, *[1] * rank)),
    }
    if lopsided:
        held["w"] = (rng.integers(-20, 21, shape) + 0.45) / 126  # the steps of a pair
        held["w"][0], held["w"][1] = 1, 0
    nodes = [
        ("Conv", "x v", "a", {"pads": [1] * 2 * rank}),
        ("Relu", "a", "t"),
        ("ConvTranspose", ["t", "w", *["b"] * bias], "c" if relu else "y", {"name": "up", **given}),
        *[("Relu", "c", "y", {"name": "relu"})] * relu,
        (end, ["y", *["u"] * (end == "Conv")], ["out"]),
    ]
    return make_model(nodes, {"x": ["n", 16, *sizes]}, {"out": None}, as_float32(held))


def counted(nodes, op) -> int:
    return [node.op_type for node in nodes].count(op)


def tensors(engine, names, folder):
    return run_net(engine, np.load(folder / "x.npy"), names)


@pytest.mark.parametrize("sizes", [(6, 5), ("h", "w")], ids=["fixed", "open"])
@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_windows_in_rows_are_an_int8_conv(kind, sizes, tiled_net, tmp_path, optimized):
    engine = tiled_net(*SIDE_BY_SIDE[kind], sizes=sizes)
    assert counted(engine.graph.node, "ConvTranspose") == 0
    ran = optimized(engine)
    assert counted(ran, "QLinearConv") == 3
    assert counted(ran, "QuantizeLinear") == counted(ran, "DequantizeLinear") == 1
    plain = tiled_net.plain(*SIDE_BY_SIDE[kind], sizes=sizes)
    assert counted(plain.graph.node, "ConvTranspose") == 1
    names = ["t/quantized", "y/quantized", "y", "out"]
    (before, wanted, _, far), (same, found, y, out) = (
        tensors(one, names, tmp_path) for one in (plain, engine)
    )
    assert np.array_equal(before, same) and wanted.shape == found.shape == y.shape
    steps = np.abs(wanted.astype(int) - found)
    assert steps.max() <= 1 and (steps > 0).mean() < 0.001
    assert np.unique(found).size > 20 and np.linalg.norm(far - out) < 0.01 * np.linalg.norm(far)


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_a_conv_of_one_pixel_makes_what_the_float_layer_makes(kind, tmp_path):
    shape, given = SIDE_BY_SIDE[kind]
    channels, *tile = shape[1:]
    model = network(shape, given, relu=False, bias=False, end="Identity")
    x = np.random.default_rng(4).normal(size=(2, 16, 6, 5))
    np.save(tmp_path / "x.npy", x.astype(np.float32))
    t, want = tensors(model, ["t", "y"], tmp_path)
    weight = tile_rewrite.tiled(constants(model)["w"], tuple(tile))[:, :, 0, 0]
    pixels = np.einsum("nchw,oc->nohw", t.astype(float), weight)
    moved = pixels.reshape(2, *tile, channels, 6, 5).transpose(0, 3, 4, 1, 5, 2)
    made = moved.reshape(2, channels, 6 * tile[0], 5 * tile[1])
    np.testing.assert_allclose(made, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("how", [{"relu": False}, {"bias": False}, {"relu": False, "bias": False}])
@pytest.mark.parametrize("end", ["Conv", "Sigmoid"])
def test_with_and_without_activation_and_bias(how, end, tiled_net, tmp_path, optimized):
    engine = tiled_net((16, 1, 2, 2), {"strides": [2, 2]}, end=end, **how)
    assert counted(optimized(engine), "QLinearConv") == 2 + (end == "Conv")
    (want,) = tensors(onnx.load(tmp_path / "net.onnx"), ["out"], tmp_path)
    (found,) = tensors(engine, ["out"], tmp_path)
    assert np.linalg.norm(want - found) < 0.05 * np.linalg.norm(want)


@pytest.mark.parametrize("kind", OTHER)
def test_other_windows_stay_in_float(kind, tiled_net, tmp_path, optimized, command):
    shape, given = OTHER[kind]
    engine = tiled_net(shape, given, sizes=(6, 5, 4)[: len(shape) - 2])
    assert counted(engine.graph.node, "ConvTranspose") == 1
    assert counted(optimized(engine), "QLinearConv") == 2
    assert not any(name.startswith("w/") for name in constants(engine))
    said = command("inspect", tmp_path / "net.onnx", "--target", "onnxruntime")
    assert "ConvTranspose: it has no int8 kernel" in said


def test_a_layer_whose_bias_is_computed_stays_in_float(tmp_path, command):
    model = network(*SIDE_BY_SIDE["square"])
    (bias,) = [tensor for tensor in model.graph.initializer if tensor.name == "b"]
    model.graph.initializer.remove(bias)
    model.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [12]))
    onnx.save(model, tmp_path / "net.onnx")
    said = command("inspect", tmp_path / "net.onnx", "--target", "onnxruntime")
    assert "ConvTranspose: its bias is not constant" in said


def test_what_is_kept_in_float_is_the_layer_as_it_was(tiled_net, optimized):
    engine = tiled_net(*SIDE_BY_SIDE["square"], "--keep-float", "up")
    node = named(engine, "up")
    assert node.op_type == "ConvTranspose" and list(node.input)[1:] == ["w", "b"]
    assert counted(optimized(engine), "QLinearConv") == 2


def test_other_targets_have_the_layer_as_it_was(tiled_net, tmp_path):
    tiled_net(*SIDE_BY_SIDE["square"], "--target", "onnxruntime,tensorrt,ascend")
    for file in ("net.tensorrt.qdq.onnx", "net_fake_quant_model.onnx"):
        assert counted(onnx.load(tmp_path / "out" / file).graph.node, "ConvTranspose") == 1


@pytest.mark.parametrize("sizes", [(6, 5), ("h", "w")], ids=["fixed", "open"])
def test_every_kernel_of_tiles_is_priced_as_the_layer(sizes, tiled_net, tmp_path, optimized):
    ran = {node.name: 1.0 for node in optimized(tiled_net(*SIDE_BY_SIDE["square"], sizes=sizes))}
    found = attribute_kernels(ran, onnx.load(tmp_path / "net.onnx"))
    own = [name for name in ran if name.startswith("up")]
    assert found.nodes["up"] == len(own) >= 4
    assert len([name for name in own if "token" in name]) == 1  # the Conv, fused with its Relu


def test_the_report_tells_the_layer_and_compares_what_it_makes(tiled_net, tmp_path, run):
    tiled_net(*SIDE_BY_SIDE["square"])
    target = read_target(tmp_path / "out")
    (row,) = [row for row in target["weights"] if row["node"] == "up"]
    assert (row["channels"], row["scales"]) == (12, 12)
    assert {"t", "y"} <= {row["name"] for row in target["layers"]}
    models = (tmp_path / "net.onnx", tmp_path / "out" / INT8)
    said = run.ok("compare", *models, "--images", tmp_path / "x.npy")
    assert " y  (Relu relu)" in said and "They do not part" in said
    back = run.ok("compare", *reversed(models), "--images", tmp_path / "x.npy")
    assert " y  (Transpose up/whole)" in back


def test_biases_before_an_output_are_corrected_alike(tiled_net, tmp_path):
    given = ((16, 3, 2, 2), {"strides": [2, 2]})
    how = {"relu": False, "end": "Sigmoid", "lopsided": True}

    def bias(name, engine):
        held = constants(engine)
        return held[f"{name}/quantized"] * held[f"{name}/scale"].astype(float)

    engine = tiled_net(*given, "--repair", "bias", **how)
    notes = read_target(tmp_path / "out")["notes"]
    assert any("bias correction" in note and note.endswith(", kept") for note in notes)
    found = bias("up/bias", engine).reshape(4, 3)
    plain = tiled_net.plain(*given, "--repair", "bias", **how)
    own = constants(network(*given, **how))["b"]
    assert np.array_equal(found, found[[0] * 4]) and np.abs(found[0] - own).min() > 1e-3
    assert np.abs(found[0] - bias("b/up", plain)).max() < 0.02 * np.abs(found[0] - own).min()


def test_a_model_with_pairs_is_kept_but_for_them(tiled_net, tmp_path, optimized):
    plain = tiled_net.plain(*SIDE_BY_SIDE["square"])
    x = np.load(tmp_path / "x.npy")
    engine = onnx.load(build_net(plain, x, tmp_path / "paired", "--accept") / INT8)
    assert counted(optimized(engine), "QLinearConv") == 3
    assert np.array_equal(*(tensors(one, ["t"], tmp_path)[0] for one in (plain, engine)))


def test_another_layer_between_pairs_of_a_model_is_called_float(tiled_net, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("deploy.graph.refusal.tile_shape", lambda node, sizes: (3, 3))
        plain = tiled_net(*OTHER["overlapping"])
    assert "w/quantized" in constants(plain)
    out = build_net(plain, np.load(tmp_path / "x.npy"), tmp_path / "paired", "--accept")
    (up,) = [node for node in read_target(out)["nodes"] if node["name"] == "up"]
    assert up["precision"] == "float32" and up["reason"].startswith("it has no int8 kernel")


FLOOR = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
ASYMMETRIC = {"coordinate_transformation_mode": "asymmetric"}
REPEATING = [
    ((2, 2), {}),
    ((3, 3), {}),
    ((4, 2), {"coordinate_transformation_mode": "pytorch_half_pixel"}),
    ((2, 2), ASYMMETRIC),
    ((1, 3), FLOOR),
    ((8, 8), FLOOR | {"mode": "nearest"}),
]
STAYING = [
    ((3, 3), ASYMMETRIC),  # the third of three comes from the next
    ((2, 2), {"nearest_mode": "ceil"}),
    ((2, 2), {"nearest_mode": "floor"}),
    ((2, 2), {"coordinate_transformation_mode": "align_corners"}),
    ((1.5, 1.5), FLOOR),
    ((2, 2), {"mode": "linear"}),
]


@pytest.fixture
def upsampled(tmp_path):
    """The engine of x -> Conv -> t -> Resize -> y -> Conv, with or without known sizes."""

    def build(factors, given, sizes=(6, 5), *, read=False) -> onnx.ModelProto:
        rng = np.random.default_rng(3)
        weights = {
            "v": rng.normal(size=(16, 8, 3, 3)),
            "w": rng.normal(size=(16, 16, 3, 3)),
            "scales": np.array([1, 1, *factors]),
        }
        nodes = [("Conv", "x v", "t", PADS), ("Resize", ["t", "", "scales"], "y", given)]
        nodes.append(("Conv", "y w", ["out"], PADS))
        outputs = dict.fromkeys(("out", "y")[: 1 + read])
        model = make_model(nodes, {"x": ["n", 8, *sizes]}, outputs, as_float32(weights))
        x = rng.normal(size=(6, 8, 6, 5))
        return onnx.load(build_net(model, x, tmp_path, "--effort", 0, "--accept") / INT8)

    return build


@pytest.mark.parametrize("sizes", [(6, 5), ("h", "w")], ids=["fixed", "open"])
@pytest.mark.parametrize(("factors", "given"), REPEATING)
def test_a_repeating_resize_becomes_copies(factors, given, sizes, upsampled, tmp_path, kernels):
    engine = upsampled(factors, given, sizes)
    assert counted(engine.graph.node, "Resize") == 0
    before, after, got = tensors(engine, ["t/quantized", "y/quantized", "out"], tmp_path)
    assert np.array_equal(after, before.repeat(factors[0], 2).repeat(factors[1], 3))
    want = run_net(tmp_path / "net.onnx", np.load(tmp_path / "x.npy"))[0]
    assert np.linalg.norm(want - got) < 0.05 * np.linalg.norm(want)
    if (factors, given) == ((2, 2), {}):  # layers around copies are turned once
        ran = kernels(engine)
        assert ran.count("QLinearConv") == 2 and ran.count("Tile") == 1
        assert ran.count("Transpose") == 2  # of what comes in and what goes out


@pytest.mark.parametrize(("factors", "given"), STAYING)
def test_a_resize_that_does_more_stays(factors, given, upsampled):
    assert counted(upsampled(factors, given).graph.node, "Resize") == 1


def test_what_the_user_reads_is_repeated_too(upsampled, tmp_path):
    engine = upsampled((2, 2), {}, read=True)
    assert counted(engine.graph.node, "Resize") == 0
    before, after, read = tensors(engine, ["t/quantized", "y/quantized", "y"], tmp_path)
    assert np.array_equal(after, before.repeat(2, 2).repeat(2, 3))
    assert np.unique(read).size == np.unique(after).size


@pytest.mark.parametrize(("scale", "left"), [(0.5, 0), (0.25, 1)])
def test_pairs_are_of_one_grid_by_their_numbers_however_stored(scale, left):
    floats = {"s": (TensorProto.FLOAT, 0.5), "r": (TensorProto.FLOAT, scale)}
    numbers = [
        helper.make_tensor(name, kind, [], [value])  # in float_data, and not in raw_data
        for name, (kind, value) in (floats | {"z": (TensorProto.UINT8, 3)}).items()
    ]
    nodes = [
        ("DequantizeLinear", "q s z", "t"),
        ("Resize", ["t", "", "scales"], "y"),
        ("QuantizeLinear", "y r z", ["out"]),
    ]
    sizes = {"q": [1, 2, 3, 3], "out": [1, 2, 6, 6]}
    ends = [helper.make_tensor_value_info(n, TensorProto.UINT8, s) for n, s in sizes.items()]
    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")
    model = make_model(nodes, ends[:1], ends[1:], [*numbers, scales])
    model.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, sizes["q"]))
    write_upsampling(model, RewriteContext(float_graph=Graph(model)))
    assert counted(model.graph.node, "Resize") == left
