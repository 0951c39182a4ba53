"""Outputs that stand out as classes do and are none: a picture's features, a film's cuts."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


def saved(path, nodes, constants, x, y):
    graph = helper.make_graph(
        [helper.make_node(kind, fed.split(), [out], **how) for kind, fed, out, how in nodes],
        path.stem,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, path)
    return path


def features(path):
    """64 channels behind a ReLU, of which few are far above 0."""
    made = np.random.default_rng(1)
    constants = {
        "w": made.normal(0, 1, (64, 3, 3, 3)).astype(np.float32),
        "b": made.normal(-9, 2, 64).astype(np.float32),
    }
    nodes = [
        ("Conv", "x w b", "c", {}), ("Relu", "c", "r", {}), ("GlobalAveragePool", "r", "p", {}),
        ("Flatten", "p", "y", {}),
    ]  # fmt: skip
    return saved(path, nodes, constants, [1, 3, 12, 12], [1, 64])


def cuts(path):
    """A probability for each of 40 frames, whether it is high; exactly 0 where not."""
    constants = {
        "w": np.full((4, 1), 10, np.float32), "b": np.float32([-20]), "first": np.int64([1, 40, 4]),
    }  # fmt: skip
    nodes = [
        ("Reshape", "x first", "flat", {}), ("MatMul", "flat w", "m", {}),
        ("Add", "m b", "a", {}), ("Sigmoid", "a", "y", {}),
    ]  # fmt: skip
    return saved(path, nodes, constants, [1, 40, 2, 2, 1], [1, 40, 1])


def pictures():
    made = np.random.default_rng(2)
    tints = made.uniform(-3, 3, (24, 3, 1, 1))
    return (tints + made.normal(0, 0.5, (24, 3, 12, 12))).astype(np.float32)


def films():
    made = np.random.default_rng(3)
    frames = made.uniform(0, 0.02, (24, 40, 2, 2, 1))
    for film in frames:
        film[made.choice(40, 2, replace=False)] += 1
    return frames.astype(np.float32)


@pytest.mark.parametrize(
    ("make", "fed", "form", "words"),
    [(features, pictures, "y: embeddings of 64 numbers", "nearest neighbours as FP32's"),
     (cuts, films, "y: probabilities of steps or labels, each its own",
      "960 of 960 probabilities on FP32's side of 0.5, 48 of 48")],
)  # fmt: skip
def test_what_stands_out_is_not_always_a_class(make, fed, form, words, judged_build, tmp_path):
    code, out, found = judged_build(make(tmp_path / "m.onnx"), fed())
    assert code == 0 and found["reading"] == form
    assert words in found["task"]["words"] and words.split(",")[0] in " ".join(out.split())
    assert found["top1_agreement"] is None and "best classes" not in out
