"""A detector whose scores lie across, [N, C, A] beside boxes [N, A, 4], through the command."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

SIZE, STRIDE, CLASSES = (96, 128), 8, 2
CELLS = (SIZE[0] // STRIDE, SIZE[1] // STRIDE)
COUNT = CELLS[0] * CELLS[1]


def saved(path):
    """Bright cells, red and green, are objects of two classes, a little larger than their cells."""
    spots = np.zeros((CLASSES, 3, STRIDE, STRIDE))
    spots[0, 0] = spots[1, 1] = 12 / STRIDE**2
    far = np.random.default_rng(0).normal(0, 0.05, (4, 3, STRIDE, STRIDE))
    rows, columns = np.divmod(np.arange(COUNT), CELLS[1])
    low = np.stack([columns, rows], axis=1) * STRIDE
    places = np.concatenate([low - 2, low + STRIDE + 2], axis=1)[None]
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="spots", strides=[STRIDE] * 2),
        helper.make_node("Reshape", ["c1", "across"], ["r1"], name="across"),
        helper.make_node("Sigmoid", ["r1"], ["scores"], name="shares"),
        helper.make_node("Conv", ["x", "w2"], ["c2"], name="sides", strides=[STRIDE] * 2),
        helper.make_node("Reshape", ["c2", "four"], ["r2"], name="four"),
        helper.make_node("Transpose", ["r2"], ["t2"], name="rows", perm=[0, 2, 1]),
        helper.make_node("Add", ["t2", "places"], ["boxes"], name="places"),
    ]
    weights = {"w1": spots, "b1": [-6] * CLASSES, "w2": far, "places": places}
    shapes = {"across": [-1, CLASSES, COUNT], "four": [-1, 4, COUNT]}
    graph = helper.make_graph(
        nodes,
        "turned",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, *SIZE])],
        [
            helper.make_tensor_value_info("boxes", TensorProto.FLOAT, ["n", COUNT, 4]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", CLASSES, COUNT]),
        ],
        [numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()]
        + [numpy_helper.from_array(np.int64(value), name) for name, value in shapes.items()],
    )
    opset = helper.make_opsetid("", 13)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


@pytest.mark.parametrize("glare", [1.0, 1000.0])
def test_a_build_counts_the_boxes(judged_build, tmp_path, glare):
    made = np.random.default_rng(1)
    pictures = made.uniform(0, 0.1, (16, 3, *SIZE)).astype(np.float32)
    for picture in pictures:
        for kind, cell in enumerate(made.choice(COUNT - 1, 4, replace=False)):
            row, column = (STRIDE * int(side) for side in divmod(cell + 1, CELLS[1]))
            picture[kind % 2, row : row + STRIDE, column : column + STRIDE] = 1
        picture[2, 0, 0] = glare  # what decides nothing takes the steps of int8
    code, out, told = judged_build(saved(tmp_path / "m.onnx"), pictures)
    task = told["task"]
    assert task["form"] == "scores: scores of anchors, boxes by corners"
    assert task["count"].endswith(" of 64") and f"{task['count']} boxes of FP32 kept" in out
    assert (task["value"] == 1, code) == ((True, 0) if glare == 1 else (False, 3))
