"""Networks of the shapes that zoos have: `export --qdq` and `qat` quantize what `build` does."""
# ruff: noqa: E402 (torch may be missing)

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from deploy.fx.convert import calibrate, convert
from deploy.fx.coverage import measure_coverage
from deploy.fx.export import compare_with_torch, to_onnx
from deploy.fx.fuse import norms_in_float
from deploy.fx.modes import measure_mode, quantize_model
from deploy.fx.prepare import prepare
from deploy.targets import OnnxRuntime
from tests import torch_shapes
from tests.models import run_command
from tests.torch_shapes import module

torch.set_num_threads(1)

SHAPE = ("--input", "2x3x32x32")

NETWORKS = (
    "residual",
    "mobile",
    "detector",
    "attention",
    "pooled",
    "joined",
    "parameters",
    "causal",
)

NETS = Path(__file__).parent / "torch_placed.py"

LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}

OTHER_OPERATORS = {
    "AveragePool",
    "GlobalAveragePool",
    "MaxPool",
    "Concat",
    "Split",
    "Resize",
    "Slice",
}

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
    np.save(path, np.random.default_rng(0).normal(size=(4, 3, 32, 32)).astype(np.float32))
    return path


class QdqModel:
    """Tells which inputs and weights of a Q/DQ model's nodes are quantized, and how."""

    def __init__(self, path):
        self.graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
        values = (*self.graph.value_info, *self.graph.output)
        self.types = {value.name: value.type.tensor_type.elem_type for value in values}
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

    def is_quantized(self, name):
        node = self.maker(name, {"Pad"})
        return node is not None and node.op_type == "DequantizeLinear"

    def is_output_int8(self, name):
        """Return whether a node's output, behind its fused activation, goes into a pair."""
        next_nodes = self.readers.get(name, [])
        while len(next_nodes) == 1 and self.is_fused(next_nodes[0]):
            next_nodes = self.readers.get(next_nodes[0].output[0], [])
        return [n.op_type for n in next_nodes] == ["QuantizeLinear"]

    def is_fused(self, node):
        adds = node.op_type == "Add" and any(self.is_constant(n) for n in node.input)
        return adds or node.op_type in ("Relu", "Clip")

    def rows(self, types):
        for node in self.graph.node:
            if node.op_type not in types or self.types.get(node.output[0], 1) != 1:
                continue
            data = [n for n in node.input if n and not self.is_constant(n)]
            if node.op_type in ("Resize", "Slice"):
                data = data[:1]
            weights = [self.weight(n) for n in node.input[1:2] if n not in data]
            inputs_int8 = [self.is_quantized(n) for n in data]
            output_int8 = self.is_output_int8(node.output[0])
            kind = "Gemm" if node.op_type == "MatMul" and weights else node.op_type
            yield kind, inputs_int8, weights if node.op_type in LAYERS else [], output_int8


def rows(path, net, target):
    """The rows of every node of which a target makes no other operators."""
    gates = net == "mobile" and target == "onnxruntime"  # their own Adds and Muls
    adds = set() if gates else {"Add", "Mul", "Sigmoid"}
    # nearest upsampling between pairs is written as copies there
    copies = {"Resize"} if target == "onnxruntime" else set()
    means = {MEAN} if target == "onnxruntime" else set()
    node_rows = QdqModel(path).rows((LAYERS | OTHER_OPERATORS | adds | means) - copies)
    return with_operator(node_rows, MEAN, "GlobalAveragePool")


def with_operator(node_rows, operator, replacement):
    """The rows, those of an operator as another one's."""
    rows = []
    for row in node_rows:
        rows.append((replacement, *row[1:]) if row[0] == operator else row)
    return rows


@pytest.fixture(scope="module")
def built(images, tmp_path_factory):
    """(net, options) -> the folder of one build of it for every target."""
    builds = {}

    def call(net, *options):
        key = (net, *options)
        if key not in builds:
            out = builds[key] = tmp_path_factory.mktemp(net)
            quick = ("--target", ",".join(WRITTEN), "--effort", "0", "--duration", "0", "--quiet")
            arguments = (f"{NETS}:{net}", *SHAPE, "--images", images)
            run_command("build", *arguments, "--out", out, *quick, *options)
        return builds[key]

    return call


@pytest.mark.slow
@pytest.mark.parametrize("target", WRITTEN)
@pytest.mark.parametrize("net", NETWORKS)
def test_export_quantizes_what_build_quantizes(command, built, tmp_path, images, net, target):
    (theirs,) = built(net).glob(f"*{WRITTEN[target]}")
    ours = tmp_path / "ours.onnx"
    options = ("--qdq", "--images", images, "--target", target, "-o", ours)
    output = command("export", f"{NETS}:{net}", *SHAPE, *options)
    export_rows, build_rows = (rows(path, net, target) for path in (ours, theirs))
    if target == "onnxruntime":  # a ConvTranspose that makes tiles is a Conv and copies there
        export_rows = with_operator(export_rows, "ConvTranspose", "Conv")
    assert export_rows == build_rows
    assert any(weights for _, _, weights, _ in build_rows)
    first_is_float = net in ("mobile", "detector", "joined") and target == "onnxruntime"
    assert ("only 27 multiplications" in output) == first_is_float
    assert net != "parameters" or "int8: 4 of 4 layers" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "target", "option"),
    [
        ("mobile", "onnxruntime", "--int8-stem"),
        ("pooled", "tensorrt", "--pair-behind-deconv"),
        ("pooled", "tensorrt", "--dla"),
        ("joined", "tensorrt", "--float-behind-concat"),
    ],
)
def test_export_takes_placement_options(command, built, tmp_path, images, net, target, option):
    (theirs,) = built(net, option).glob(f"*{WRITTEN[target]}")
    ours = tmp_path / "ours.onnx"
    options = ("--qdq", "--images", images, "--target", target, option, "-o", ours)
    command("export", f"{NETS}:{net}", *SHAPE, *options)
    assert rows(ours, net, target) == rows(theirs, net, target)
    (default_build,) = built(net).glob(f"*{WRITTEN[target]}")
    assert rows(default_build, net, target) != rows(theirs, net, target)


@pytest.mark.slow
def test_unplaceable_tensors_stay_float():
    def forward(self, x):  # keys are shared between heads; no layer can have the weight
        x = self.inside(x + self.places).reshape(-1, 4, 2, 4)
        shared_heads = x[:, :2]
        x = torch.nn.functional.scaled_dot_product_attention(
            x, shared_heads, shared_heads, enable_gqa=True
        )
        return self.out(x.reshape(-1, 4, 8) @ self.weight)

    model = module(
        forward,
        inside=torch.nn.Linear(8, 8),
        out=torch.nn.Linear(8, 4),
        weight=torch.nn.Parameter(torch.eye(8)[None]),
        places=torch.nn.Parameter(torch.zeros(4, 8)),
    )
    x = torch.randn(2, 4, 8)
    prepared = prepare(model, [x], target="tensorrt")
    quants = {n.args[0].name: n for n in prepared.graph.nodes if str(n.target).startswith("quant_")}
    assert {user.name for quant in quants.values() for user in quant.users} == {"inside", "out"}
    calibrate(prepared, [x])
    converted = convert(prepared)
    coverage = measure_coverage(converted, model)
    assert coverage.quantized == ("inside", "out")
    assert coverage.float_layers == (("weight", "Parameter"),)
    agreement = compare_with_torch(to_onnx(converted, [x]), converted, [[x]], optimized=False)
    assert agreement.argmax == 1


# of norms all but the ConvTranspose, which ONNX Runtime has no int8 kernel for
INT8_LAYERS = {"detector": 17, "norms": 9, "attention": 6, "convnext": 5, "ssd": 6}


def pictures(seed, count=2):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", INT8_LAYERS)
def test_onnxruntime_equals_torch_on_every_shape(name):
    model, batches = getattr(torch_shapes, name)(), [(pictures(0),), (pictures(1),)]
    target = OnnxRuntime(int8_stem=True)
    converted = quantize_model(model, batches[0], batches, mode="static", target=target)
    assert norms_in_float(converted) == ""
    integers = [m for m in converted.modules() if type(m).__name__ == "IntLayer"]
    assert len(integers) == INT8_LAYERS[name]
    exported = to_onnx(converted, batches[0])
    agreement = compare_with_torch(
        exported, converted, [*batches, (pictures(2, 5),)], optimized=False
    )
    assert agreement.max_difference <= 0.05 * agreement.max_output
    assert measure_mode("static", model, converted, batches).sqnr_db > 15


@pytest.mark.slow
def test_functional_norms_train_with_layers():
    prepared = prepare(torch_shapes.norms().train(), [pictures(0)], norms="train")
    merged = [m for m in prepared.modules() if type(m).__name__ == "QatConvBn"]
    assert len(merged) == 10  # the frozen one is none
    mean_before = merged[0].norm.running_mean.clone()
    prepared.train()(pictures(1))
    assert not torch.equal(mean_before, merged[0].norm.running_mean)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "convs"), [("detector", 17), ("norms", 8)])
def test_build_quantizes_all_convs(command, images, tmp_path, name, convs):
    arguments = (f"{torch_shapes.__file__}:{name}", "--input", "1x3x32x32", "--images", images)
    command("build", *arguments, "--out", tmp_path / "out", "--effort", "0", "--duration", "0")
    (built,) = (tmp_path / "out").glob("*.int8.onnx")
    nodes = [node.op_type for node in onnx.load(built).graph.node]
    assert "BatchNormalization" not in nodes
    assert nodes.count("Conv") == convs


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "ascend"])  # scales by channel, and one
def test_bias_after_tiny_tensor_is_kept(target):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 5, 1),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(5, 3),
    ).eval()
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(1e-9)
    batches = [(pictures(0),), (pictures(1),)]
    converted = quantize_model(model, batches[0], batches, mode="static", target=target)
    agreement = compare_with_torch(to_onnx(converted, batches[0]), converted, batches)
    assert agreement.max_difference <= 0.01 * agreement.max_output
    assert measure_mode("static", model, converted, batches).sqnr_db > 30
