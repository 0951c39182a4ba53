"""Scales for DLA: every tensor that follows from the pairs, as sure as is said; the rest named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.trt_cache import parse
from deploy.targets.tensorrt.dla import inferred

FASHION = Path(__file__).parents[1] / "datasets" / "fashion"


def node(op, inputs, output, **attributes):
    return helper.make_node(
        op, [n.strip("_") for n in inputs.split()], output.split(), name=f"/{output}", **attributes
    )


def model_of(nodes, shape, weights, outputs="y"):
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )
    opset = [helper.make_opsetid("", 18), helper.make_opsetid("of.others", 1)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


@pytest.fixture(scope="module")
def efficient(tmp_path_factory) -> Path:
    """A small EfficientNet: SiLU, depthwise, squeeze-excite, residual, Concat, pools; and data."""
    rng, weights = np.random.default_rng(5), {}

    def conv(source, out, shape, **more):
        weights[f"{out}.w"] = rng.normal(scale=0.4, size=shape).astype(np.float32)
        pads = [shape[2] // 2] * 4
        return node("Conv", f"{source} {out}.w", out, pads=pads, **more)

    def silu(source, out):
        return [node("Sigmoid", source, f"{out}.s"), node("Mul", f"{source} {out}.s", out)]

    weights |= {"fc.w": rng.normal(size=(5, 8)).astype(np.float32), "lo": np.float32(0)}
    weights["hi"] = np.float32(6)
    nodes = [
        conv("x", "c1", (4, 3, 3, 3)), *silu("c1", "a1"),
        conv("a1", "c2", (4, 1, 3, 3), group=4), *silu("c2", "a2"),
        node("GlobalAveragePool", "a2", "pool"),
        conv("pool", "se1", (2, 4, 1, 1)), node("Relu", "se1", "se2"),
        conv("se2", "se3", (4, 2, 1, 1)), node("Sigmoid", "se3", "se4"),
        node("Mul", "a2 se4", "scaled"),
        conv("scaled", "c3", (4, 4, 1, 1)), node("Add", "c3 a1", "sum"),
        conv("sum", "c4", (4, 4, 3, 3)), node("Clip", "c4 lo hi", "a4"),
        node("Concat", "a4 sum", "both", axis=1),
        node("MaxPool", "both", "small", kernel_shape=[2, 2], strides=[2, 2]),
        conv("small", "c5", (8, 8, 3, 3)), node("Relu", "c5", "a5"),
        node("GlobalAveragePool", "a5", "mean"), node("Flatten", "mean", "flat"),
        node("Gemm", "flat fc.w", "logits", transB=1),
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("efficient")
    onnx.save(model_of(nodes, ["n", 3, 8, 8], weights, "logits"), folder / "m.onnx")
    np.save(folder / "x.npy", rng.standard_normal((8, 3, 8, 8)).astype(np.float32))
    return folder / "m.onnx"


def there_and_back(run, model, images, folder, *words):
    """(full cache, cache of the pairs alone, cache for DLA, what was said) of a model."""
    full, qdq = folder / "full.cache", folder / "q.onnx"
    feed = ("--images", images, "--target", "tensorrt", "-o", full, *words)
    code, _, err = run("calibrate", model, *feed)
    assert code == 0, err
    assert run("cache", "to-qdq", model, full, "-o", qdq)[0] == 0
    caches, said = [full], ""
    for name, more in (("pairs", ()), ("dla", ("--dla",))):
        made = folder / f"{name}.onnx", folder / f"{name}.cache"
        code, said, err = run("cache", "from-qdq", qdq, "-o", *made, *more)
        assert code == 0, err
        caches.append(made[1])
    assert (folder / "pairs.onnx").read_bytes() == (folder / "dla.onnx").read_bytes()
    return (*(parse(path.read_bytes(), origin="").scales() for path in caches), said)


def test_a_small_efficientnet_gets_every_scale_but_its_logits(efficient, run, tmp_path):
    images = efficient.with_name("x.npy")
    full, pairs, dla, said = there_and_back(run, efficient, images, tmp_path, "--method", "minmax")
    assert set(full) - set(dla) == {"logits"} and set(dla) <= set(full)
    assert {"1 tensors have no scale", "int8: logits"} <= {
        part.strip() for line in said.splitlines() for part in (line[:23], line[-12:])
    }
    assert all(dla[name] == scale for name, scale in pairs.items())
    same = {"se1": "se2", "c4": "a4", "both": "small", "pool": "a2", "c5": "a5"}
    assert all(dla[name] == dla[other] for name, other in same.items())
    assert dla["c4"] == full["a4"] and dla["se1"] == full["se2"]
    assert (
        dla["mean"] == full["mean"] == full["a5"]
        and dla["flat"] == full["flat"]
        and "guesses" in said
    )
    bounds = ("se4", "a1.s", "sum", "c3", "a4", "se3")
    assert all(dla[name] >= np.float32(0.999) * full[name] for name in bounds)
    assert dla["se4"] == dla["a1.s"] == np.float32(1 / 127)


def test_the_demo_gets_every_scale_but_its_logits(run, tmp_path):
    model = next(FASHION.glob("*.onnx"))
    full, pairs, dla, said = there_and_back(
        run, model, FASHION / "calib.txt", tmp_path, "--limit", "8"
    )
    missing = set(full) - set(dla)
    assert len(missing) == 1 and said.rstrip().endswith(next(iter(missing)))
    assert len(pairs) < len(dla) and "guesses" not in said
    equal = sum(dla[name] == full[name] for name in dla)
    assert equal >= 0.7 * len(dla)


def test_without_the_option_the_pairs_alone_are_written(efficient, run, tmp_path):
    _, pairs, _, _ = there_and_back(run, efficient, efficient.with_name("x.npy"), tmp_path)
    assert {"x", "a1", "pool", "scaled", "sum"} <= set(pairs) and "c1" not in pairs
    command = ("cache", "from-qdq", tmp_path / "q.onnx", "-o", tmp_path / "p", tmp_path / "c")
    code, said, _ = run(*command)
    assert code == 0 and "--dla infers them" in said
    code, said, _ = run(*command, "--dla", "--no-guesses")
    assert code == 0 and "guesses" not in said
    assert all(f" {name}" in said.splitlines()[-1] for name in ("c1", "c2", "a2", "logits"))
    code, _, err = run(*command, "--no-guesses")
    assert code == 1 and "--no-guesses goes with --dla" in err


CONSTANTS = {
    "two": np.float32(2), "zero": np.float32(0), "six": np.float32(6), "half": np.float32(-0.5),
    "seven": np.float32(7), "row": np.array([1, -5, 2, 3], np.float32), "shape": np.array([1, -1]),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "halves": np.array([2, 2]),
    "sizes": np.array([1, 4, 8, 8]), "w": np.ones((4, 4, 1, 1), np.float32),
    "ends": np.array([2]), "axis": np.array([1]), "starts": np.array([0]),
}  # fmt: skip
TABLE = [  # nodes, ranges that are known, tensor, its range, how sure
    ([node("Reshape", "x shape", "y")], "x=4", "y", 4, "equal"),
    ([node("Transpose", "x", "y", perm=[0, 2, 3, 1])], "y=4", "x", 4, "equal"),
    ([node("GlobalAveragePool", "x", "y")], "x=4", "y", 4, "equal"),
    ([node("GlobalAveragePool", "x", "y")], "y=4", "x", 4, "guess"),
    ([node("MaxPool", "x", "y", kernel_shape=[2, 2])], "y=4", "x", 4, "equal"),
    ([node("Relu", "x", "y")], "y=4", "x", 4, "equal"),
    ([node("Relu", "x", "y")], "x=4", "y", 4, "bound"),
    ([node("Clip", "x zero six", "y")], "x=9", "y", 6, "bound"),
    ([node("Clip", "x zero six", "y")], "y=5", "x", 5, "equal"),
    ([node("Clip", "x zero six", "y"), node("Conv", "y w", "z")], "z=1", "x", 6, "bound"),
    ([node("Conv", "x w", "c"), node("Clip", "c zero six", "y")], "", "y", 6, "bound"),
    ([node("LeakyRelu", "x", "y")], "y=4", "x", 4, "guess"),
    ([node("LeakyRelu", "x", "y", alpha=3.0)], "x=4", "y", None, ""),
    ([node("Slice", "x starts ends axis", "y")], "y=4", "x", 4, "equal"),
    ([node("Split", "x halves", "y z", axis=1)], "y=4 z=5", "x", 5, "equal"),
    ([node("Split", "x halves", "y z", axis=1), node("Relu", "z", "r")], "y=4", "x", None, ""),
    ([node("Pad", "x pads", "y")], "x=4", "y", 4, "bound"),
    ([node("Pad", "x pads seven", "y")], "x=4", "y", None, ""),
    ([node("Resize", "x _ _ sizes", "y", mode="cubic")], "x=4", "y", None, ""),
    ([node("Resize", "x _ _ sizes", "y", mode="linear")], "y=4", "x", 4, "guess"),
    ([node("Resize", "x _ _ sizes", "y", mode="linear")], "x=4", "y", 4, "bound"),
    ([node("Resize", "x _ _ sizes", "y")], "y=4", "x", 4, "equal"),
    ([node("Relu", "x", "y", domain="of.others")], "y=4", "x", None, ""),
    ([node("Sigmoid", "x", "y", domain="of.others")], "x=4", "y", None, ""),
    ([node("Sigmoid", "x", "y")], "", "y", 1, "bound"),
    ([node("Sigmoid", "x", "y")], "", "x", 8, "bound"),
    ([node("Softmax", "x", "y")], "", "y", 1, "bound"),
    ([node("Concat", "x x", "y", axis=1)], "x=4", "y", 4, "equal"),
    ([node("Relu", "x", "r"), node("Concat", "x r", "y", axis=1)], "x=4 r=3", "y", 4, "bound"),
    ([node("Relu", "x", "r"), node("Concat", "x r", "y", axis=1)], "x=4 y=9", "r", 4, "bound"),
    ([node("Conv", "x w", "c"), node("Add", "c x", "y")], "x=4 y=3", "c", 7, "bound"),
    ([node("Conv", "x w", "c"), node("Sub", "c x", "y")], "x=4 c=3", "y", 7, "bound"),
    ([node("Add", "x row", "y")], "x=4", "y", 9, "bound"),
    ([node("Mul", "x half", "y")], "x=4", "y", 2, "equal"),
    ([node("Mul", "x half", "y")], "y=4", "x", 8, "equal"),
    ([node("Div", "x half", "y")], "x=4", "y", 8, "equal"),
    ([node("Div", "x half", "y")], "y=4", "x", 2, "equal"),
    ([node("Div", "half x", "y")], "y=4", "x", None, ""),
    ([node("Conv", "x w", "c"), node("Mul", "c x", "y")], "x=4 c=3", "y", 12, "bound"),
    ([node("Conv", "x w", "c"), node("Mul", "c x", "y")], "x=4 y=3", "c", None, ""),
    ([node("Sigmoid", "x", "s"), node("Mul", "x s", "y")], "y=9", "x", 9.279, "bound"),
    ([node("Sigmoid", "x", "s"), node("Mul", "x s", "y")], "y=2", "x", 2.279, "guess"),
    ([node("Sigmoid", "x", "s"), node("Mul", "x s", "y")], "x=9", "y", 9, "bound"),
    ([node("HardSwish", "x", "y")], "y=4", "x", 4.375, "bound"),
    ([node("HardSwish", "x", "y")], "x=4", "y", 4, "bound"),
    ([node("HardSigmoid", "x", "s", alpha=1 / 6), node("Mul", "x s", "y")],
     "y=4", "x", 4.375, "bound"),
    ([node("Conv", "x w", "c"), node("Sigmoid", "x", "s"), node("Mul", "c s", "y")],
     "y=4", "c", 4, "guess"),
    ([node("Relu", "x", "y"), node("Exp", "x", "z")], "y=4", "x", 4, "guess"),
    ([node("Relu", "x", "y"), node("Clip", "x zero six", "z")], "y=4 z=5", "x", 5, "bound"),
    ([node("Exp", "x", "y")], "x=4", "y", None, ""),
    ([node("Conv", "x w", "y")], "x=4", "y", None, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "known", "tensor", "amax", "sure"),
    [
        pytest.param(*row, id=f"{' '.join(n.op_type for n in row[0])} {row[1]} -> {row[2]}")
        for row in TABLE
    ],
)
def test_the_table_of_rules(nodes, known, tensor, amax, sure):
    used = {name for n in nodes for name in n.input}
    weights = {name: value for name, value in CONSTANTS.items() if name in used}
    read = used | {"x"}
    ends = " ".join(out for n in nodes for out in n.output if out not in read)
    if tensor in ends.split() or tensor == "r":
        ends = ends or tensor
    model = model_of(nodes, [1, 4, 4, 4], weights, ends)
    given = dict(word.split("=") for word in known.split())
    scales = {name: np.float32(float(value) / 127) for name, value in given.items()}
    found = inferred(model, scales)
    if amax is None:
        assert tensor in found.missing
        return
    assert found.scales[tensor] * 127 == pytest.approx(amax, rel=1e-6)
    assert found.sure[tensor] == sure
    assert all(found.scales[name] == scale for name, scale in scales.items())
