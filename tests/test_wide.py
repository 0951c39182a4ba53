"""Depthwise int8 Convs in multiples of 16 channels: where, and that all else keeps its bits."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli

SIDE = 12


class Net:
    """Nodes and weights of a small model, written one behind the other."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def add(self, op_type: str, inputs: list[str], name: str, **given: object) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [f"{name}_y"], name=name, **given))
        return f"{name}_y"

    def conv(self, source: str, name: str, outer: int, inner: int, window: int = 1, group: int = 1):
        shape = (outer, inner // group, window, window)
        scale = 1 / np.sqrt(np.prod(shape[1:]))
        self.weights[f"{name}_w"] = self.rng.normal(0, scale, shape)
        self.weights[f"{name}_b"] = self.rng.normal(0, 0.1, outer)
        read = [source, f"{name}_w", f"{name}_b"]
        return self.add("Conv", read, name, group=group, pads=[window // 2] * 4)

    def model(self, output: str, *more: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "wide",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, SIDE, SIDE])],
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
                for name in (output, *more)
            ],
            [numpy_helper.from_array(np.float32(v), n) for n, v in self.weights.items()],
        )
        opset = [helper.make_opsetid("", 17)]
        return helper.make_model(graph, opset_imports=opset, ir_version=8)


def inverted(channels: int, *, squeeze: str = "", end: str = "project", window: int = 3):
    """Expand, depthwise, squeeze-and-excite where asked for, and an end."""
    net = Net()
    into = net.add("Relu", [net.conv("x", "stem", 8, 8, 3)], "stem_relu")
    wide = net.add("Relu", [net.conv(into, "expand", channels, 8)], "expand_relu")
    own = net.add(
        "Relu", [net.conv(wide, "deep", channels, channels, window, channels)], "deep_relu"
    )
    if squeeze:
        axes = {"axes": [2, 3]} if squeeze == "ReduceMean" else {}
        mean = net.add(squeeze, [own], "mean", **axes)
        less = net.add("Relu", [net.conv(mean, "squeeze", 8, channels)], "less")
        gate = net.add("HardSigmoid", [net.conv(less, "excite", channels, 8)], "gate")
        own = net.add("Mul", [own, gate], "gated")
    if end == "output":
        return net.model(net.conv(own, "project", 8, channels), own)
    if end == "concat":
        both = net.add("Concat", [own, own], "both", axis=1)
        return net.model(net.conv(both, "project", 8, 2 * channels))
    if end == "mean":
        own = net.add("Mul", [own, net.add("ReduceMean", [own], "mean", axes=[1])], "weighed")
    if end == "dense":
        return net.model(net.conv(own, "project", 256, channels, 3))
    last = net.conv(own, "project", 8, channels)
    if end == "residual":
        last = net.add("Add", [last, into], "sum")
    return net.model(net.conv(last, "last", 4, 8))


def built(model: onnx.ModelProto, folder: Path, *words: str) -> Path:
    """The folder of a build."""
    folder.mkdir()
    onnx.save(model, folder / "net.onnx")
    x = np.random.default_rng(1).normal(size=(16, 8, SIDE, SIDE)).astype(np.float32)
    np.save(folder / "x.npy", x)
    given = ["build", str(folder / "net.onnx"), "--images", str(folder / "x.npy"), "--accept"]
    given += ["--out", str(folder / "out"), "--duration", "0", *words]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    return folder / "out"


def engine(out: Path) -> onnx.ModelProto:
    (path,) = out.glob("net.*.onnx")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


def groups(model: onnx.ModelProto) -> int:
    (deep,) = (node for node in model.graph.node if node.name == "deep")
    return next(a.i for a in deep.attribute if a.name == "group")


def ran(model: onnx.ModelProto) -> list[bytes]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(2).normal(size=(2, 8, SIDE, SIDE)).astype(np.float32)
    return [value.tobytes() for value in session.run(None, {"x": x})]


@pytest.mark.parametrize("squeeze", ["", "GlobalAveragePool", "ReduceMean"])
@pytest.mark.parametrize(
    ("channels", "wide"), [(24, 32), (40, 48), (72, 80), (20, 32), (32, 32), (48, 48)]
)
def test_the_channels_of_a_slow_layer_are_filled_up(channels, wide, squeeze, tmp_path, monkeypatch):
    model = inverted(channels, squeeze=squeeze, end="residual")
    found = engine(built(model, tmp_path / "wide", "--effort", "0"))
    assert groups(found) == wide
    monkeypatch.setattr("deploy.targets.onnxruntime.conv_rewrites._AT_ONCE", 1)
    plain = engine(built(model, tmp_path / "plain", "--effort", "0"))
    assert groups(plain) == channels
    assert ran(found) == ran(plain)


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
    words = ["--keep-float", "expand", "--keep-float", "project"]
    found = engine(built(model, tmp_path / "net", *words, "--plan", str(planned(tmp_path))))
    assert groups(found) == 32
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in found.graph.initializer}
    own = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    expand, project = held["expand_w/expand/wide"], held["project_w/project/wide"]
    assert expand.shape == (32, 8, 1, 1) and project.shape == (8, 32, 1, 1)
    assert (expand[:24] == own["expand_w"]).all() and not expand[24:].any()
    assert (project[:, :24] == own["project_w"]).all() and not project[:, 24:].any()


def planned(folder: Path) -> Path:
    """A plan that leaves all else in int8."""
    path = folder / "all.plan.toml"
    path.write_text('schema = "calib8-plan/1"\nfloat = []\n\n[onnxruntime]\nprecision = "int8"\n')
    return path


def test_the_search_gives_float_layers_back_their_weights(tmp_path, monkeypatch):
    """Trials round every weight, and a layer in float is to have its own, as wide as it is."""
    from deploy.tuning.repairs import output_rounding

    seen = []

    def give_back(made, layers, own):
        real(made, layers, own)
        held = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
        seen.extend(
            np.array_equal(held[name][:24], numpy_helper.to_array(own["expand_w"]))
            for name in ("expand_w/expand/wide",)
            if name in held
        )

    real = output_rounding._give_back
    monkeypatch.setattr(output_rounding, "_give_back", give_back)
    monkeypatch.setattr("deploy.tuning.search._NEAR", 0.0)  # layers are looked at alone, too
    built(inverted(24, window=5), tmp_path / "net", "--effort", "1")
    assert seen and all(seen)


def test_inner_tensors_are_told_by_their_own_channels(tmp_path):
    out = built(inverted(24, window=5), tmp_path / "net", "--effort", "0")
    assert groups(engine(out)) == 32
    told = json.loads((out / "report.json").read_text())
    (target,) = told["targets"] if isinstance(told["targets"], list) else told["targets"].values()
    layers = {row["name"]: row for row in target["layers"]}
    for name in ("expand_relu_y", "deep_relu_y"):
        assert layers[name]["sqnr_db"] > 25 and not layers[name]["other_shape"]


def test_compare_and_explain_read_it(tmp_path):
    model = inverted(24, window=5)
    out = built(model, tmp_path / "net", "--effort", "0")
    (path,) = out.glob("net.int8.onnx")
    x = str(tmp_path / "net" / "x.npy")
    source = str(tmp_path / "net" / "net.onnx")
    for words in (
        ["compare", source, str(path), "--images", x],
        ["compare", str(path), str(path), "--images", x],
        ["explain", str(out), "--images", x],
    ):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
        assert "deep_relu_y" in done.output or "nowhere" in done.output, done.output
