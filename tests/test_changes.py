"""Models that give their input back but for a small change: what is left of it, by the command."""

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli


def weight(name, values):
    return numpy_helper.from_array(np.asarray(values, np.float32), name)


def two_convs(change):
    """Weights of two Convs that change a picture so much, and of one that leaves it as it is."""
    rng = np.random.default_rng(2)
    return [
        weight("w1", 0.3 * rng.normal(size=(8, 3, 3, 3))),
        weight("w2", change * rng.normal(size=(3, 8, 3, 3))),
        weight("w3", np.eye(3)[:, :, None, None]),
    ]


def retouching(path, change):
    """x plus so much of what two Convs make of it, through a Conv that leaves it as it is."""
    weights = two_convs(change)
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "w2"], ["c"], pads=[1] * 4),
        helper.make_node("Add", ["x", "c"], ["s"]),
        helper.make_node("Conv", ["s", "w3"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, 32, 32]) for n in "xy")
    graph = helper.make_graph(nodes, "retouching", [x], [y], weights)
    imports = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def denoiser(path):
    """x less a small noise, found by two layers of which one has channels that int8 spoils.

    The whole output has 40 dB with all in int8, and what was taken out of x is lost.
    """
    rng = np.random.default_rng(1)
    size = np.where(np.arange(8) == 0, 1000.0, 1.0).reshape(1, 8, 1, 1)
    weights = {
        "w1": rng.normal(0, 0.3, (8, 3, 3, 3)), "size": size,
        "w2": rng.normal(0, 0.3, (8, 8, 1, 1)) / size, "w3": rng.normal(0, 0.1, (8, 8, 3, 3)),
        "w4": rng.normal(0, 0.004, (3, 8, 3, 3)),
    }  # fmt: skip
    weights["w2"][:, 0] = 0
    nodes = [
        helper.make_node(op, inputs.split(), [out], name=f"/{out}/{op}", **attributes)
        for op, inputs, out, attributes in [
            ("Conv", "x w1", "a", {"pads": [1] * 4}), ("Tanh", "a", "t", {}),
            ("Mul", "t size", "m", {}), ("Conv", "m w2", "bad", {}), ("Relu", "bad", "r", {}),
            ("Conv", "r w3", "mid", {"pads": [1] * 4}), ("Relu", "mid", "q", {}),
            ("Conv", "q w4", "noise", {"pads": [1] * 4}), ("Sub", "x noise", "y", {}),
        ]
    ]  # fmt: skip
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, 16, 16]) for n in "xy")
    held = [numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "denoiser", [x], [y], held)
    imports = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_the_search_hears_the_noise_beside_the_change(target, tmp_path):
    samples = np.random.default_rng(1).uniform(-1, 1, (24, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", samples)
    asked = ["--images", tmp_path / "x.npy", "--duration", 0, "--target", target]
    model, found = denoiser(tmp_path / "net.onnx"), {}
    for effort in (0, 1):
        out = tmp_path / str(effort)
        words = ["build", model, *asked, "--effort", effort, "--out", out]
        run = CliRunner().invoke(cli, [str(word) for word in words])
        assert run.exit_code == 0, run.output
        found[effort] = json.loads((out / "report.json").read_text())["engines"][1]["accuracy"]
    plain, searched = (found[effort]["parts"][0] for effort in (0, 1))
    assert plain["label"] == searched["label"] == "y - x"
    assert found[0]["outputs"][0]["sqnr_db"] > 30 > plain["sqnr_db"] + 15
    assert searched["sqnr_db"] > plain["sqnr_db"] + 10
    assert "/bad/Conv" in (tmp_path / "1" / "net.plan.toml").read_text()


def enlarging(path, change, last):
    """x at twice the size by its nearest pixels, plus so much of what two Convs make of it."""
    weights = [*two_convs(change), weight("twice", [1, 1, 2, 2])]
    sizes = [[1, 3, 32, 32], [1, 3, 64, 64]]
    first, end = ("t", "s3") if last else ("x", "y")
    nodes = [
        helper.make_node("Resize", [first, "", "twice"], ["l"], mode="linear"),
        helper.make_node("Conv", ["l", "w1"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "w2"], ["c"], pads=[1] * 4),
        helper.make_node("Add", ["l", "c"], ["s"]),
        helper.make_node("Conv", ["s", "w3"], [end]),
    ]
    if last:
        nodes.insert(0, helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]))
        nodes.append(helper.make_node("Transpose", ["s3"], ["y"], perm=[0, 2, 3, 1]))
        sizes = [[1, *size[2:], 3] for size in sizes]
    x, y = map(helper.make_tensor_value_info, "xy", [TensorProto.FLOAT] * 2, sizes)
    graph = helper.make_graph(nodes, "enlarging", [x], [y], weights)
    imports = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def verdict_on(model):
    """What the command says of a model, fed what stands beside it."""
    images, out = model.parent / "x.npy", model.parent / "out"
    asked = ["--images", str(images), "--out", str(out), "--effort", "0", "--duration", "0"]
    run = CliRunner().invoke(cli, ["build", str(model), *asked])
    assert run.exit_code == 0, run.output
    (said,) = (
        one["verdict"] for one in json.loads((out / "report.json").read_text())["engines"][1:]
    )
    return said


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("change", "level"), [(0.0004, "doubtful"), (0.05, "good")])
def test_what_super_resolution_adds_must_be_left(change, level, last, tmp_path):
    turn = np.arange(32) / 8
    rng = np.random.default_rng(1)
    smooth = [np.outer(np.sin(turn + rng.uniform(0, 6)), np.cos(turn)) for _ in range(72)]
    samples = np.stack(smooth).reshape(24, 3, 32, 32).astype(np.float32)
    np.save(tmp_path / "x.npy", np.moveaxis(samples, 1, 3) if last else samples)
    said = verdict_on(enlarging(tmp_path / "net.onnx", change, last))
    assert said["level"] == level
    assert ("x itself, resized" in str(said)) == (level == "doubtful")


@pytest.mark.parametrize(("change", "level"), [(0.0004, "doubtful"), (0.01, "good")])
def test_a_change_that_int8_is_too_coarse_for_is_doubtful(change, level, tmp_path):
    samples = np.random.default_rng(1).uniform(-1, 1, (24, 3, 32, 32)).astype(np.float32)
    np.save(tmp_path / "x.npy", samples)
    said = verdict_on(retouching(tmp_path / "net.onnx", change))
    assert said["level"] == level
    assert ("what the model changes of x in y" in str(said)) == (level == "doubtful")
