"""Convs, ConvTransposes and Resizes as they are rewritten for ONNX Runtime's int8 models."""

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
from tests.models import as_float32, build_net, make_model, make_node, read_target, run_net

pytestmark = pytest.mark.slow

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
    """Return the sizes behind the batch in the shape of the input."""
    return [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim][1:]


def build_folder(model: onnx.ModelProto, folder: Path, *arguments: str) -> Path:
    """The folder of a build."""
    x = np.random.default_rng(1).normal(size=(16, *sizes_of(model)))
    return build_net(model, x, folder, "--accept", *arguments)


def load_engine(folder: Path) -> onnx.ModelProto:
    (path,) = folder.glob("net.*.onnx")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def find_node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    (node,) = (node for node in model.graph.node if node.name == name)
    return node


def stem_channels(model: onnx.ModelProto) -> int:
    """Channels that the stem reads."""
    producers = {name: node for node in model.graph.node for name in node.output}
    weight = find_node(model, "stem").input[1]
    return constants(model)[producers[weight].input[0] if weight in producers else weight].shape[1]


def output_bytes(model: onnx.ModelProto) -> list[bytes]:
    x = np.random.default_rng(2).normal(size=(2, *sizes_of(model))).astype(np.float32)
    return [value.tobytes() for value in run_net(model, x)]


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
def test_picture_padded_where_kernel_is_faster(inner, outer, window, padded, tmp_path):
    """By the kernels of the CPU that runs it, whatever CPU builds."""
    model = net(inner, outer, window=window, twice=outer == 24)
    engines = {
        cpu: load_engine(build_folder(model, tmp_path / cpu, "--effort", 0, "--for", cpu))
        for cpu in {"vnni", "avx2", "arm", "any", cpu_kind()}
    }
    assert {cpu for cpu, engine in engines.items() if stem_channels(engine) == 4} == set(
        padded.split()
    )
    assert all(
        count_nodes(m.graph.node, "Pad") == (stem_channels(m) == 4) for m in engines.values()
    )
    assert len({tuple(output_bytes(engine)) for engine in engines.values()}) == 1


def test_picture_is_padded_for_the_building_cpu(tmp_path):
    model = net(1, 64)  # with padding for vnni alone
    named_folder = build_folder(model, tmp_path / "named", "--effort", 0, "--for", cpu_kind())
    local_folder = build_folder(model, tmp_path / "here", "--effort", 0)
    assert load_engine(local_folder) == load_engine(named_folder)


@pytest.mark.parametrize(("sums", "kind"), [(255 * 127 * 64, "vnni"), (32767 * 32, "avx2")])
def test_cpu_kind_follows_its_kernels(sums, kind, monkeypatch):
    session = SimpleNamespace(run=lambda feed: {"y": np.full((1, 16), sums)})
    monkeypatch.setattr(OrtSession, "open", lambda model, **options: session)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert cpu_kind.__wrapped__() == kind


@pytest.mark.parametrize(
    ("sizes", "arguments"),
    [
        ({"inner": 4, "outer": 32}, ()),  # has them
        ({"inner": 3, "outer": 32, "window": 1}, ("--int8-stem",)),  # gathers nothing
        ({"inner": 3, "outer": 8}, ("--int8-stem",)),  # a small layer
        ({"inner": 3, "outer": 32}, ("--keep-float", "stem")),
    ],
)
def test_others_stay_as_they_are(sizes, arguments, tmp_path):
    engine = load_engine(build_folder(net(**sizes), tmp_path / "net", "--effort", 0, *arguments))
    assert stem_channels(engine) == sizes["inner"]
    assert count_nodes(engine.graph.node, "Pad") == 0


def test_layer_may_share_its_outputs_name(tmp_path):
    """tf2onnx gives two names to the picture's new channels and to the layer's own."""
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
    engine = load_engine(build_folder(model, tmp_path / "net", *VNNI))
    assert stem_channels(engine) == 4
    assert "stem/wide" in [name for n in engine.graph.node for name in n.output]


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
def test_first_conv_precision_follows_its_size(inner, outer, stride, in_float):
    plan = analyse(net(inner, outer, stride=stride), ONNXRUNTIME)
    (reason,) = (decision.reason for decision in plan.decisions if decision.node == "stem")
    assert (f"only {9 * inner} multiplications" in reason) is in_float
    full_plan = analyse(net(inner, outer, stride=stride), replace(ONNXRUNTIME, min_products=0))
    assert not any(decision.reason for decision in full_plan.decisions)


EDGE = 12
VNNI = ("--effort", "0", "--for", "vnni")


def inverted(channels: int, *, squeeze: str = "", end: str = "project", window: int = 3):
    """Expand, depthwise, squeeze-and-excite where asked for, and an end."""
    rng, nodes, weights = np.random.default_rng(0), [], {}

    def add(op_type, inputs, name, **attributes):
        nodes.append(make_node(op_type, inputs, [f"{name}_y"], name=name, **attributes))
        return f"{name}_y"

    def conv(source, name, outer, inner, window=1, group=1):
        shape = (outer, inner // group, window, window)
        weights[f"{name}_w"] = rng.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape)
        weights[f"{name}_b"] = rng.normal(0, 0.1, outer)
        return add("Conv", f"{source} {name}_w {name}_b", name, group=group, pads=[window // 2] * 4)

    stem_output = add("Relu", conv("x", "stem", 8, 8, 3), "stem_relu")
    wide = add("Relu", conv(stem_output, "expand", channels, 8), "expand_relu")
    features = add("Relu", conv(wide, "deep", channels, channels, window, channels), "deep_relu")
    if squeeze:
        mean = add(squeeze, features, "mean", **{"axes": [2, 3]} if squeeze == "ReduceMean" else {})
        less = add("Relu", conv(mean, "squeeze", 8, channels), "less")
        gate = add("HardSigmoid", conv(less, "excite", channels, 8), "gate")
        features = add("Mul", f"{features} {gate}", "gated")
    readable = [features] if end == "output" else []
    if end == "concat":
        output = conv(
            add("Concat", f"{features} {features}", "both", axis=1), "project", 8, 2 * channels
        )
    elif end == "dense":
        output = conv(features, "project", 256, channels, 3)
    else:
        if end == "mean":
            mean = add("ReduceMean", features, "mean", axes=[1])
            features = add("Mul", f"{features} {mean}", "weighed")
        output = conv(features, "project", 8, channels)
        if end == "residual":
            output = add("Add", f"{output} {stem_output}", "sum")
        output = output if readable else conv(output, "last", 4, 8)
    inputs, outputs = {"x": ["n", 8, EDGE, EDGE]}, dict.fromkeys([output, *readable])
    return make_model(nodes, inputs, outputs, as_float32(weights), opset=17)


def depthwise_groups(model: onnx.ModelProto) -> int:
    return next(a.i for a in find_node(model, "deep").attribute if a.name == "group")


@pytest.fixture
def wide_window_build(tmp_path) -> Path:
    """The build of a network whose depthwise layer has 24 channels and a window of 5."""
    return build_folder(inverted(24, window=5), tmp_path / "net", *VNNI)


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
def test_slow_layer_channels_padded_when_faster(
    channels, wide, avx2, squeeze, tmp_path, monkeypatch
):
    model = inverted(channels, squeeze=squeeze, end="residual")
    padded = load_engine(build_folder(model, tmp_path / "wide", *VNNI))
    avx2_engine = load_engine(
        build_folder(model, tmp_path / "avx2", "--effort", "0", "--for", "avx2")
    )
    assert (depthwise_groups(padded), depthwise_groups(avx2_engine)) == (wide, avx2)
    monkeypatch.setattr("deploy.targets.onnxruntime.depthwise_rewrite.CHANNELS_AT_ONCE", 1)
    plain = load_engine(build_folder(model, tmp_path / "plain", "--effort", "0"))
    assert depthwise_groups(plain) == channels
    assert output_bytes(padded) == output_bytes(plain)


@pytest.mark.parametrize(
    ("end", "arguments"),
    [
        ("output", []),  # the user reads it
        ("concat", []),  # channels stand behind others there
        ("mean", []),  # zeros would count in a mean over channels
        ("dense", []),  # what reads it would lose more
        ("project", ["--keep-float", "deep"]),  # float kernels do not mind
    ],
)
def test_channels_stay_where_padding_is_useless(end, arguments, tmp_path):
    folder = build_folder(inverted(24, end=end), tmp_path / "net", "--effort", "0", *arguments)
    assert depthwise_groups(load_engine(folder)) == 24


def test_float_neighbours_widen_and_keep_weights(tmp_path):
    model = inverted(24, window=5)
    plan = tmp_path / "all.plan.toml"  # leaves all else in int8
    plan.write_text('schema = "calib8-plan/1"\nfloat = []\n\n[onnxruntime]\nprecision = "int8"\n')
    arguments = ("--keep-float", "expand", "--keep-float", "project", "--plan", plan, *VNNI[2:])
    engine = load_engine(build_folder(model, tmp_path / "net", *arguments))
    assert depthwise_groups(engine) == 32
    tensors, weights = constants(engine), constants(model)
    expand, project = tensors["expand_w/expand/wide"], tensors["project_w/project/wide"]
    assert expand.shape == (32, 8, 1, 1)
    assert project.shape == (8, 32, 1, 1)
    assert (expand[:24] == weights["expand_w"]).all()
    assert not expand[24:].any()
    assert (project[:, :24] == weights["project_w"]).all()
    assert not project[:, 24:].any()


def test_search_restores_weights_of_float_layers(tmp_path, monkeypatch):
    """Trials round every weight, and a layer in float is to have its own, as wide as it is."""
    from deploy.tuning.repairs import output_rounding

    matches, wide = [], "expand_w/expand/wide"

    def give_back(engine, weights, layers):
        original(engine, weights, layers)
        tensors = constants(engine)
        if wide in tensors:
            weight = numpy_helper.to_array(weights["expand"])
            matches.append(np.array_equal(tensors[wide][:24], weight))

    original = output_rounding.restore_weights
    monkeypatch.setattr(output_rounding, "restore_weights", give_back)
    monkeypatch.setattr("deploy.tuning.search.QUIET_LOSS", 0.0)  # layers are looked at alone, too
    build_folder(inverted(24, window=5), tmp_path / "net", "--effort", "1", *VNNI[2:])
    assert matches
    assert all(matches)


def test_inner_tensors_reported_with_own_channels(wide_window_build):
    assert depthwise_groups(load_engine(wide_window_build)) == 32
    layers = {row["name"]: row for row in read_target(wide_window_build)["layers"]}
    for name in ("expand_relu_y", "deep_relu_y"):
        assert layers[name]["sqnr_db"] > 25
        assert not layers[name]["other_shape"]


def test_compare_and_explain_read_it(wide_window_build, tmp_path, run):
    path, source = wide_window_build / INT8, tmp_path / "net" / "net.onnx"
    for arguments in (
        ["compare", source, path],
        ["compare", path, path],
        ["explain", wide_window_build],
    ):
        stdout = run.ok(*arguments, "--images", tmp_path / "net" / "x.npy")
        assert "deep_relu_y" in stdout or "nowhere" in stdout, stdout


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

    def build(shape, attributes, *arguments, **options) -> onnx.ModelProto:
        sizes = []
        for size in options.get("sizes", (6, 5)):
            sizes.append(size if isinstance(size, int) else 7)
        x = np.random.default_rng(4).normal(size=(6, 16, *sizes))
        build_arguments = ("--effort", 0, "--accept", *arguments)
        return onnx.load(
            build_net(network(shape, attributes, **options), x, tmp_path, *build_arguments) / INT8
        )

    def plain(*attributes, **options) -> onnx.ModelProto:
        with monkeypatch.context() as patch:
            patch.setattr(rewrites, "REWRITES", rewrites.REWRITES[:-1])
            return build(*attributes, **options)

    build.plain = plain
    return build


def network(shape, attributes, *, relu=True, bias=True, end="Conv", sizes=(6, 5)):
    """The float model."""
    rng = np.random.default_rng(3)
    channels, rank = shape[1] * attributes.get("group", 1), len(shape) - 2
    weights = {
        "v": rng.normal(size=(16, 16, *[3] * rank)),
        "w": rng.normal(size=shape),
        "b": rng.normal(size=channels),
        "u": rng.normal(size=(8, channels, *[1] * rank)),
    }
    nodes = [
        ("Conv", "x v", "a", {"pads": [1] * 2 * rank}),
        ("Relu", "a", "t"),
        (
            "ConvTranspose",
            ["t", "w", *["b"] * bias],
            "c" if relu else "y",
            {"name": "up", **attributes},
        ),
        *[("Relu", "c", "y", {"name": "relu"})] * relu,
        (end, ["y", *["u"] * (end == "Conv")], ["out"]),
    ]
    return make_model(nodes, {"x": ["n", 16, *sizes]}, {"out": None}, as_float32(weights))


def count_nodes(nodes, op) -> int:
    return [node.op_type for node in nodes].count(op)


def tensors(engine, names, folder):
    return run_net(engine, np.load(folder / "x.npy"), names)


@pytest.mark.parametrize("sizes", [(6, 5), ("h", "w")], ids=["fixed", "open"])
@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_side_by_side_windows_become_conv(kind, sizes, tiled_net, tmp_path, optimized):
    engine = tiled_net(*SIDE_BY_SIDE[kind], sizes=sizes)
    assert count_nodes(engine.graph.node, "ConvTranspose") == 0
    nodes_run = optimized(engine)
    assert count_nodes(nodes_run, "QLinearConv") == 3
    assert (
        count_nodes(nodes_run, "QuantizeLinear") == count_nodes(nodes_run, "DequantizeLinear") == 1
    )
    plain = tiled_net.plain(*SIDE_BY_SIDE[kind], sizes=sizes)
    assert count_nodes(plain.graph.node, "ConvTranspose") == 1
    names = ["t/quantized", "y/quantized", "y", "out"]
    (float_inputs, float_codes, _, float_output), (int8_inputs, int8_codes, y, int8_output) = (
        tensors(one, names, tmp_path) for one in (plain, engine)
    )
    assert np.array_equal(float_inputs, int8_inputs)
    assert float_codes.shape == int8_codes.shape == y.shape
    steps = np.abs(float_codes.astype(int) - int8_codes)
    assert steps.max() <= 1
    assert (steps > 0).mean() < 0.001
    assert np.unique(int8_codes).size > 20
    assert np.linalg.norm(float_output - int8_output) < 0.01 * np.linalg.norm(float_output)


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_pixel_conv_matches_the_float_layer(kind, tmp_path):
    shape, attributes = SIDE_BY_SIDE[kind]
    channels, *tile = shape[1:]
    model = network(shape, attributes, relu=False, bias=False, end="Identity")
    x = np.random.default_rng(4).normal(size=(2, 16, 6, 5))
    np.save(tmp_path / "x.npy", x.astype(np.float32))
    t, expected = tensors(model, ["t", "y"], tmp_path)
    weight = tile_rewrite.tiled(constants(model)["w"], tuple(tile))[:, :, 0, 0]
    pixels = np.einsum("nchw,oc->nohw", t.astype(float), weight)
    tiles = pixels.reshape(2, *tile, channels, 6, 5).transpose(0, 3, 4, 1, 5, 2)
    output = tiles.reshape(2, channels, 6 * tile[0], 5 * tile[1])
    np.testing.assert_allclose(output, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    "options", [{"relu": False}, {"bias": False}, {"relu": False, "bias": False}]
)
@pytest.mark.parametrize("end", ["Conv", "Sigmoid"])
def test_with_and_without_activation_and_bias(options, end, tiled_net, tmp_path, optimized):
    engine = tiled_net((16, 1, 2, 2), {"strides": [2, 2]}, end=end, **options)
    assert count_nodes(optimized(engine), "QLinearConv") == 2 + (end == "Conv")
    (expected,) = tensors(onnx.load(tmp_path / "net.onnx"), ["out"], tmp_path)
    (output,) = tensors(engine, ["out"], tmp_path)
    assert np.linalg.norm(expected - output) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", OTHER)
def test_other_windows_stay_in_float(kind, tiled_net, tmp_path, optimized, command):
    shape, attributes = OTHER[kind]
    engine = tiled_net(shape, attributes, sizes=(6, 5, 4)[: len(shape) - 2])
    assert count_nodes(engine.graph.node, "ConvTranspose") == 1
    assert count_nodes(optimized(engine), "QLinearConv") == 2
    assert not any(name.startswith("w/") for name in constants(engine))
    message = command("inspect", tmp_path / "net.onnx", "--target", "onnxruntime")
    assert "ConvTranspose: it has no int8 kernel" in message


def test_layer_with_computed_bias_stays_float(tmp_path, command):
    model = network(*SIDE_BY_SIDE["square"])
    (bias,) = [tensor for tensor in model.graph.initializer if tensor.name == "b"]
    model.graph.initializer.remove(bias)
    model.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [12]))
    onnx.save(model, tmp_path / "net.onnx")
    message = command("inspect", tmp_path / "net.onnx", "--target", "onnxruntime")
    assert "ConvTranspose: its bias is not constant" in message


def test_layer_kept_in_float_is_unchanged(tiled_net, optimized):
    engine = tiled_net(*SIDE_BY_SIDE["square"], "--keep-float", "up")
    node = find_node(engine, "up")
    assert node.op_type == "ConvTranspose"
    assert list(node.input)[1:] == ["w", "b"]
    assert count_nodes(optimized(engine), "QLinearConv") == 2


def test_other_targets_leave_layer_unchanged(tiled_net, tmp_path):
    tiled_net(*SIDE_BY_SIDE["square"], "--target", "onnxruntime,tensorrt,ascend")
    for file in ("net.tensorrt.qdq.onnx", "net_fake_quant_model.onnx"):
        assert count_nodes(onnx.load(tmp_path / "out" / file).graph.node, "ConvTranspose") == 1


@pytest.mark.parametrize("sizes", [(6, 5), ("h", "w")], ids=["fixed", "open"])
def test_tile_kernels_are_priced_as_layer(sizes, tiled_net, tmp_path, optimized):
    durations = {
        node.name: 1.0 for node in optimized(tiled_net(*SIDE_BY_SIDE["square"], sizes=sizes))
    }
    kernel_names = [name for name in durations if name.startswith("up")]
    assert len(kernel_names) >= 4
    assert (
        len([name for name in kernel_names if "token" in name]) == 1
    )  # the Conv, fused with its Relu


def test_report_names_layer_and_compares_output(tiled_net, tmp_path, run):
    tiled_net(*SIDE_BY_SIDE["square"])
    target = read_target(tmp_path / "out")
    assert {"t", "y"} <= {row["name"] for row in target["layers"]}
    models = (tmp_path / "net.onnx", tmp_path / "out" / INT8)
    comparison = run.ok("compare", *models, "--images", tmp_path / "x.npy")
    assert " y  (Relu relu)" in comparison
    assert "The models agree" in comparison
    reverse_comparison = run.ok("compare", *reversed(models), "--images", tmp_path / "x.npy")
    assert " y  (Transpose up/whole)" in reverse_comparison


def test_model_with_pairs_keeps_its_values(tiled_net, tmp_path, optimized):
    plain = tiled_net.plain(*SIDE_BY_SIDE["square"])
    x = np.load(tmp_path / "x.npy")
    engine = onnx.load(build_net(plain, x, tmp_path / "paired", "--accept") / INT8)
    assert count_nodes(optimized(engine), "QLinearConv") == 3
    assert np.array_equal(*(tensors(model, ["t"], tmp_path)[0] for model in (plain, engine)))


def test_overlapping_layer_between_pairs_is_float(tiled_net, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("deploy.graph.refusal.tile_shape", lambda node, sizes: (3, 3))
        plain = tiled_net(*OTHER["overlapping"])
    assert "w/quantized" in constants(plain)
    out = build_net(plain, np.load(tmp_path / "x.npy"), tmp_path / "paired", "--accept")
    (up,) = [node for node in read_target(out)["nodes"] if node["name"] == "up"]
    assert up["precision"] == "float32"
    assert up["reason"].startswith("it has no int8 kernel")


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
def resize_engine(tmp_path):
    """The engine of x -> Conv -> t -> Resize -> y -> Conv, with or without known sizes."""

    def build(factors, attributes, sizes=(6, 5), *, expose_copy=False) -> onnx.ModelProto:
        rng = np.random.default_rng(3)
        weights = {
            "v": rng.normal(size=(16, 8, 3, 3)),
            "w": rng.normal(size=(16, 16, 3, 3)),
            "scales": np.array([1, 1, *factors]),
        }
        nodes = [("Conv", "x v", "t", PADS), ("Resize", ["t", "", "scales"], "y", attributes)]
        nodes.append(("Conv", "y w", ["out"], PADS))
        outputs = dict.fromkeys(("out", "y")[: 1 + expose_copy])
        model = make_model(nodes, {"x": ["n", 8, *sizes]}, outputs, as_float32(weights))
        x = rng.normal(size=(6, 8, 6, 5))
        return onnx.load(build_net(model, x, tmp_path, "--effort", 0, "--accept") / INT8)

    return build


@pytest.mark.parametrize("sizes", [(6, 5), ("h", "w")], ids=["fixed", "open"])
@pytest.mark.parametrize(("factors", "attributes"), REPEATING)
def test_a_repeating_resize_becomes_copies(
    factors, attributes, sizes, resize_engine, tmp_path, kernels
):
    engine = resize_engine(factors, attributes, sizes)
    assert count_nodes(engine.graph.node, "Resize") == 0
    codes, copies, output = tensors(engine, ["t/quantized", "y/quantized", "out"], tmp_path)
    assert np.array_equal(copies, codes.repeat(factors[0], 2).repeat(factors[1], 3))
    expected = run_net(tmp_path / "net.onnx", np.load(tmp_path / "x.npy"))[0]
    assert np.linalg.norm(expected - output) < 0.05 * np.linalg.norm(expected)
    if (factors, attributes) == ((2, 2), {}):  # layers around copies are turned once
        nodes_run = kernels(engine)
        assert nodes_run.count("QLinearConv") == 2
        assert nodes_run.count("Tile") == 1
        assert nodes_run.count("Transpose") == 2  # of what comes in and what goes out


@pytest.mark.parametrize(("factors", "attributes"), STAYING)
def test_non_repeating_resize_stays(factors, attributes, resize_engine):
    assert count_nodes(resize_engine(factors, attributes).graph.node, "Resize") == 1


def test_resize_output_is_repeated_too(resize_engine, tmp_path):
    engine = resize_engine((2, 2), {}, expose_copy=True)
    assert count_nodes(engine.graph.node, "Resize") == 0
    codes, copies, output = tensors(engine, ["t/quantized", "y/quantized", "y"], tmp_path)
    assert np.array_equal(copies, codes.repeat(2, 2).repeat(2, 3))
    assert np.unique(output).size == np.unique(copies).size


@pytest.mark.parametrize(("scale", "remaining"), [(0.5, 0), (0.25, 1)])
def test_grids_compare_by_value_however_stored(scale, remaining):
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
    assert count_nodes(model.graph.node, "Resize") == remaining
