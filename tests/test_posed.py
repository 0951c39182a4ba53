"""Boxes with key points, as of YOLO's pose form, through the command."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.metrics.tasks.yolo import Grid

SIZE, STRIDES = (96, 128), (8, 16)
GRID = Grid(STRIDES, 1, False)
WIDE = 24  # of every box


def level(stride, weights):
    """Scores and what moves boxes and points, of the cells of one stride."""
    spot = np.zeros((1, 4, stride, stride))
    spot[:, 0] = 12 / stride**2
    far = np.zeros((8, 4, stride, stride))
    far[4:, 1] = 4 / stride**2  # the second colour moves the points
    count = SIZE[0] * SIZE[1] // stride**2
    weights |= {f"w{stride}": spot, f"v{stride}": far}
    weights |= {f"b{stride}": np.full(1, -6.0 if stride == 8 else -9.0)}
    weights |= {f"s{stride}": np.array([0, 1, count]), f"f{stride}": np.array([0, 8, count])}
    steps = {"strides": [stride, stride]}
    return [
        helper.make_node("Conv", ["x", f"w{stride}", f"b{stride}"], [f"c{stride}"], **steps),
        helper.make_node("Reshape", [f"c{stride}", f"s{stride}"], [f"scores{stride}"]),
        helper.make_node("Conv", ["x", f"v{stride}"], [f"d{stride}"], **steps),
        helper.make_node("Reshape", [f"d{stride}", f"f{stride}"], [f"far{stride}"]),
    ]


def saved(path):
    """Bright cells are objects; their two points lie at the box's corners, and further off."""
    cells, strides = GRID.cells(SIZE)
    middle = ((cells + 0.5) * strides[:, None]).T
    places = np.concatenate([middle, np.full_like(middle, WIDE), middle - 8, middle + 8])[None]
    weights = {"places": places, "borders": np.array([4, 4])}
    nodes = [node for stride in STRIDES for node in level(stride, weights)]
    nodes += [
        helper.make_node("Concat", [f"scores{s}" for s in STRIDES], ["raw"], axis=2),
        helper.make_node("Sigmoid", ["raw"], ["scores"]),
        helper.make_node("Concat", [f"far{s}" for s in STRIDES], ["far"], axis=2),
        helper.make_node("Add", ["far", "places"], ["moved"]),
        helper.make_node("Split", ["moved", "borders"], ["boxes", "points"], axis=1),
        helper.make_node("Concat", ["boxes", "scores", "points"], ["y"], axis=1),
    ]
    for number, node in enumerate(nodes):
        node.name = f"{node.op_type}_{number}"
    kinds = {"s": np.int64, "f": np.int64, "borders": np.int64}
    graph = helper.make_graph(
        nodes,
        "posed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, *SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 9, len(strides)])],
        [
            numpy_helper.from_array(
                np.asarray(value, kinds.get(name, kinds.get(name[0], np.float32))), name
            )
            for name, value in weights.items()
        ],
    )
    opset = helper.make_opsetid("", 13)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


@pytest.mark.parametrize("glare", [1.0, 1000.0])
def test_a_build_counts_boxes_with_their_points(judged_build, tmp_path, glare):
    made = np.random.default_rng(1)
    pictures = made.uniform(0, 0.1, (16, 4, *SIZE)).astype(np.float32)
    for picture in pictures:
        for cell in 1 + made.choice(40, 2, replace=False) * 4:
            row, column = (8 * int(side) for side in divmod(cell, 16))
            picture[:2, row : row + 8, column : column + 8] = 1
        picture[2, 0, 0] = glare  # what decides nothing takes the steps of int8
    code, _, told = judged_build(saved(tmp_path / "m.onnx"), pictures)
    task = told["task"]
    assert task["form"] == "y: boxes by centre and 1 classes, 2 key points an anchor"
    assert (task["value"] == 1, code) == ((True, 0) if glare == 1 else (False, 3))
