"""Networks of the shapes that zoos have: `export --qdq` and `qat` quantize what `build` does."""
# ruff: noqa: E402 (torch may be missing)

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from deploy.cli import main
from deploy.fx.convert import calibrate, convert
from deploy.fx.export import compare_with_torch, to_onnx
from deploy.fx.fuse import norms_in_float
from deploy.fx.int8_layers import measure_coverage
from deploy.fx.modes import measure_mode, quantize_model
from deploy.fx.prepare import prepare
from deploy.fx.qat import Task, train
from deploy.fx.source import load_factory
from deploy.targets import OnnxRuntime

torch.set_num_threads(1)

SHAPE = ("--input", "2x3x32x32")

NETWORKS = (
    "residual", "mobile", "detector", "attention", "pooled", "joined", "parameters", "causal",
)  # fmt: skip

NETS = Path(__file__).parent / "torch_placed.py"

LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}

OTHERS = {"AveragePool", "GlobalAveragePool", "MaxPool", "Concat", "Split", "Resize", "Slice"}

MEAN = "ReduceMean"  # over a picture, which `build` writes as a GlobalAveragePool for ONNX Runtime

PAIRS = {"QuantizeLinear", "DequantizeLinear"}

WRITTEN = {
    "onnxruntime": ".int8.onnx",
    "tensorrt": ".tensorrt.qdq.onnx",
    "ascend": "_amct_qdq.onnx",
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "x.npy"
    made = np.random.default_rng(0).normal(size=(4, 3, 32, 32))
    np.save(path, made.astype(np.float32))
    return path


class Read:
    """Which inputs and weights of a Q/DQ model's nodes are quantized, and how."""

    def __init__(self, path):
        self.graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
        known = (*self.graph.value_info, *self.graph.output)
        self.types = {value.name: value.type.tensor_type.elem_type for value in known}
        self.makers = {name: node for node in self.graph.node for name in node.output}
        self.readers = {}
        for node in self.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.constants = {t.name: numpy_helper.to_array(t) for t in self.graph.initializer}

    def maker(self, name, through):
        node = self.makers.get(name)
        while node is not None and node.op_type in through:
            node = self.makers.get(node.input[0])
        return node

    def is_constant(self, name):
        node = self.makers.get(name)
        return self.is_constant(node.input[0]) if node is not None else name in self.constants

    def weight(self, name):
        """Scales a weight has: "float", "tensor" or "channel"."""
        node = self.maker(name, {"Transpose"})
        if node is None or node.op_type != "DequantizeLinear":
            return "float"
        return "channel" if self.constants[node.input[1]].size > 1 else "tensor"

    def quantized(self, name):
        node = self.maker(name, {"Pad"})
        return node is not None and node.op_type == "DequantizeLinear"

    def made_int8(self, name):
        """Whether what a node makes goes into a pair, behind the activation it is fused with."""
        after = self.readers.get(name, [])
        while (
            len(after) == 1
            and after[0].op_type in ("Relu", "Clip", "Add")
            and not self.both(after[0])
        ):
            name = after[0].output[0]
            after = self.readers.get(name, [])
        return [n.op_type for n in after] == ["QuantizeLinear"]

    def both(self, node):
        return node.op_type == "Add" and not any(self.is_constant(n) for n in node.input)

    def rows(self, types):
        for node in self.graph.node:
            if node.op_type not in types or self.types.get(node.output[0], 1) != 1:
                continue
            data = [n for n in node.input if n and not self.is_constant(n)]
            if node.op_type in ("Resize", "Slice"):
                data = data[:1]
            weights = [self.weight(n) for n in node.input[1:2] if n not in data]
            made = self.made_int8(node.output[0])
            kind = "Gemm" if node.op_type == "MatMul" and weights else node.op_type
            yield (
                kind,
                [self.quantized(n) for n in data],
                weights if node.op_type in LAYERS else [],
                made,
            )


def rows(path, net, target):
    """The rows of every node of which a target makes no other operators."""
    gates = net == "mobile" and target == "onnxruntime"  # their own Adds and Muls
    adds = set() if gates else {"Add", "Mul", "Sigmoid"}
    # nearest upsampling between pairs is written as copies there
    copies = {"Resize"} if target == "onnxruntime" else set()
    means = {MEAN} if target == "onnxruntime" else set()
    found = Read(path).rows((LAYERS | OTHERS | adds | means) - copies)
    return [("GlobalAveragePool", *row[1:]) if row[0] == MEAN else row for row in found]


@pytest.fixture(scope="module")
def built(images, tmp_path_factory):
    """(net, ...) -> what one build of it for every target leaves."""
    made = {}

    def call(net, *more):
        key = (net, *more)
        if key not in made:
            out = made[key] = tmp_path_factory.mktemp(net)
            words = ["build", f"{NETS}:{net}", *SHAPE, "--images", images, "--out", out, *more]
            words += ["--target", ",".join(WRITTEN), "--effort", "0", "--duration", "0", "--quiet"]
            try:
                main([str(word) for word in words])
            except SystemExit as stop:
                assert not stop.code
        return made[key]

    return call


@pytest.mark.slow
@pytest.mark.parametrize("target", WRITTEN)
@pytest.mark.parametrize("net", NETWORKS)
def test_export_quantizes_what_build_quantizes(command, built, tmp_path, images, net, target):
    (theirs,) = built(net).glob(f"*{WRITTEN[target]}")
    ours = tmp_path / "ours.onnx"
    words = ("--qdq", "--images", images, "--target", target, "-o", ours)
    said = command("export", f"{NETS}:{net}", *SHAPE, *words)
    found, wanted = (rows(path, net, target) for path in (ours, theirs))
    if target == "onnxruntime":  # a ConvTranspose that makes tiles is a Conv and copies there
        found = [("Conv", *row[1:]) if row[0] == "ConvTranspose" else row for row in found]
    assert found == wanted
    assert any(weights for _, _, weights, _ in wanted)
    first_is_float = net in ("mobile", "detector", "joined") and target == "onnxruntime"
    assert ("the first Conv has only 27 products" in said) == first_is_float
    assert net != "parameters" or "int8: 4 of 4 layers with weights" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "target", "option"),
    [
        ("mobile", "onnxruntime", "--int8-stem"),
        ("pooled", "tensorrt", "--pair-behind-deconv"),
        ("joined", "tensorrt", "--float-behind-concat"),
    ],
)
def test_export_takes_the_targets_options_that_place(
    command, built, tmp_path, images, net, target, option
):
    (theirs,) = built(net, option).glob(f"*{WRITTEN[target]}")
    ours = tmp_path / "ours.onnx"
    words = ("--qdq", "--images", images, "--target", target, option, "-o", ours)
    command("export", f"{NETS}:{net}", *SHAPE, *words)
    assert rows(ours, net, target) == rows(theirs, net, target)
    (usual,) = built(net).glob(f"*{WRITTEN[target]}")
    assert rows(usual, net, target) != rows(theirs, net, target)


class Whole(torch.nn.Module):
    """An attention that shares keys between heads, and a parameter that no layer can have."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.weight = torch.nn.Parameter(torch.eye(8)[None])
        self.places = torch.nn.Parameter(torch.zeros(4, 8))

    def forward(self, x):
        x = self.inside(x + self.places).reshape(-1, 4, 2, 4)
        few = x[:, :2]
        x = torch.nn.functional.scaled_dot_product_attention(x, few, few, enable_gqa=True)
        return self.out(x.reshape(-1, 4, 8) @ self.weight)


@pytest.mark.slow
def test_what_the_graph_has_no_tensor_or_layer_for_stays_float():
    x = torch.randn(2, 4, 8)
    prepared = prepare(Whole().eval(), [x], target="tensorrt")
    quants = {n.args[0].name: n for n in prepared.graph.nodes if str(n.target).startswith("quant_")}
    read = {user.name for quant in quants.values() for user in quant.users}
    assert read == {"inside", "out"}
    calibrate(prepared, [x])
    converted = convert(prepared)
    found = measure_coverage(converted, Whole())
    assert found.quantized == ("inside", "out") and found.left == (("weight", "Parameter"),)
    assert (
        compare_with_torch(to_onnx(converted, [x]), converted, [[x]], optimized=False).argmax == 1
    )


SHAPES = Path(__file__).parent / "torch_shapes.py"

make = load_factory(f"{SHAPES}:make")

# of norms all but the ConvTranspose, which ONNX Runtime has no int8 kernel for
INT8_LAYERS = {"detector": 17, "norms": 9, "attention": 6, "convnext": 5, "ssd": 6}


def pictures(seed, count=2):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", INT8_LAYERS)
def test_every_shape_is_quantized_and_runs_in_onnxruntime_as_in_torch(name):
    model, batches = make(name), [(pictures(0),), (pictures(1),)]
    target = OnnxRuntime(int8_stem=True)
    converted = quantize_model(model, batches[0], batches, mode="static", target=target)
    assert norms_in_float(converted) == ""
    integers = [m for m in converted.modules() if type(m).__name__ == "IntLayer"]
    assert len(integers) == INT8_LAYERS[name]
    exported = to_onnx(converted, batches[0])
    found = compare_with_torch(exported, converted, [*batches, (pictures(2, 5),)], optimized=False)
    assert found.max_difference <= 0.05 * found.max_output
    assert measure_mode("static", model, converted, batches).sqnr_db > 15


def boxes(epoch):
    """(pictures, targets of a raw map): a bright square, where it is and of which class."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(10):
        x = 0.1 * torch.randn(2, 3, 32, 32, generator=generator)
        target = torch.zeros(2, 7, 4, 4)
        for i in range(2):
            row, column, kind = torch.randint(0, 3, (3,), generator=generator).tolist()
            x[i, kind, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 2
            target[i, :4, row, column] = 1
            target[i, 4 + kind, row, column] = 1
        yield x, target


def loss(output, target):
    return torch.nn.functional.mse_loss(output[1][1][:, :, :4, :4].sigmoid(), _fit(output, target))


def _fit(output, target):
    size = output[1][1].shape[-2:]
    return torch.nn.functional.adaptive_max_pool2d(target, size)


def task():
    return Task(model=make("detector"), inputs=[pictures(0)], batches=boxes, loss=loss, epochs=2)


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_a_detector_trains_on_each_grid_and_goes_on_after_a_break(target, tmp_path):
    whole = train(task(), target=target)
    assert whole.losses[-1] < whole.losses[0]
    assert not any(type(m).__name__ == "BatchNorm2d" for m in whole.prepared.modules())

    def stop(line):
        if line.startswith("epoch 2"):
            raise Killed

    path = tmp_path / "run.pt"
    with pytest.raises(Killed):
        train(task(), target=target, checkpoint=path, report=stop)
    again = train(task(), target=target, checkpoint=path)
    wanted, got = (trained.converted.state_dict() for trained in (whole, again))
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


@pytest.mark.slow
def test_norms_train_with_their_layers_where_they_are_functions():
    prepared = prepare(make("norms").train(), [pictures(0)], norms="train")
    merged = [m for m in prepared.modules() if type(m).__name__ == "QatConvBn"]
    assert len(merged) == 10  # the two before a layer and the frozen one are none
    before = merged[0].norm.running_mean.clone()
    prepared.train()(pictures(1))
    assert not torch.equal(before, merged[0].norm.running_mean)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detector", "all_norms"])
def test_the_commands_build_them(command, tmp_path, name):
    images = tmp_path / "images.npy"
    np.save(images, pictures(3, 4).numpy())
    out = tmp_path / "out"
    spec = f"{SHAPES}:{name}"
    command(
        "build", spec, "--input", "1x3x32x32", "--images", images, "--out", out, "--effort", "0",
        "--duration", "0",
    )  # fmt: skip
    (built,) = out.glob("*.int8.onnx")
    nodes = [node.op_type for node in onnx.load(built).graph.node]
    assert "BatchNormalization" not in nodes
    assert nodes.count("Conv") == {"detector": 17, "all_norms": 8}[name]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "ascend"])  # scales by channel, and one
def test_a_bias_after_a_tensor_of_next_to_nothing_is_kept(target):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU(), torch.nn.Conv2d(4, 5, 1),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(5, 3),
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(1e-9)
    batches = [(pictures(0),), (pictures(1),)]
    converted = quantize_model(model, batches[0], batches, mode="static", target=target)
    found = compare_with_torch(to_onnx(converted, batches[0]), converted, batches)
    assert found.max_difference <= 0.01 * found.max_output
    assert measure_mode("static", model, converted, batches).sqnr_db > 30
