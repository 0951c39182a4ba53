"""Samples of several lengths: what an engine that is built for fixed ones is built for."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


@pytest.fixture
def build(run, tmp_path):
    """(lengths) -> the command of atc and the notes of a build for Ascend."""

    def call(*lengths):
        made = np.random.default_rng(4)
        weights = {"w1": made.normal(size=(16, 8, 3)), "w2": made.normal(size=(4, 16, 1))}
        nodes = [
            helper.make_node("Conv", ["x", "w1"], ["c"], name="first", pads=[1, 1]),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("Conv", ["r", "w2"], ["y"], name="second"),
        ]
        graph = helper.make_graph(
            nodes,
            "sound",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, "length"])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, "length"])],
            [numpy_helper.from_array(np.float32(array), name) for name, array in weights.items()],
        )
        opset = [helper.make_opsetid("", 13)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "m.onnx")
        (tmp_path / "rows").mkdir()
        for number, length in enumerate(lengths):
            sound = made.normal(size=(1, 8, length)).astype(np.float32)
            np.save(tmp_path / "rows" / f"{number}.npy", sound)
        words = ["build", tmp_path / "m.onnx", "--images", tmp_path / "rows", "--effort", 0]
        code, _, error = run(*words, "--target", "ascend", "--duration", 0, "--out", tmp_path / "o")
        assert code == 0, error
        (target,) = json.loads((tmp_path / "o" / "report.json").read_text())["targets"]
        return (tmp_path / "o" / "m_atc.sh").read_text(), " ".join(target["notes"])

    return call


def test_the_largest_sample_is_what_an_om_is_made_for_and_that_it_takes_no_other_is_said(build):
    command, notes = build(20, 31, 24, 26)
    assert "--input_shape=x:1,8,31 " in command
    assert "x of 1x8x20 to 1x8x31" in notes


def test_of_samples_of_one_length_nothing_is_said(build):
    command, notes = build(20, 20, 20, 20)
    assert "--input_shape=x:1,8,20 " in command and "takes one shape" not in notes
