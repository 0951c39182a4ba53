"""The input shape that an OM is built for."""

import json

import numpy as np
import onnx
import pytest

from tests.models import as_float32, make_model


@pytest.mark.parametrize("lengths", [(20, 31, 24, 26), (20, 20, 20, 20)])
def test_om_shape_is_largest_sample(lengths, run, tmp_path):
    rng = np.random.default_rng(4)
    weights = {"w1": rng.normal(size=(16, 8, 3)), "w2": rng.normal(size=(4, 16, 1))}
    nodes = [("Conv", "x w1", "c", {"pads": [1, 1]}), ("Relu", "c", "r"), ("Conv", "r w2", "y")]
    inputs_and_outputs = {"x": [1, 8, "length"]}, {"y": [1, 4, "length"]}
    onnx.save(make_model(nodes, *inputs_and_outputs, as_float32(weights)), tmp_path / "m.onnx")
    (tmp_path / "rows").mkdir()
    for number, length in enumerate(lengths):
        sample = rng.normal(size=(1, 8, length)).astype(np.float32)
        np.save(tmp_path / "rows" / f"{number}.npy", sample)
    arguments = ["build", tmp_path / "m.onnx", "--images", tmp_path / "rows", "--effort", 0]
    run.ok(*arguments, "--target", "ascend", "--duration", 0, "--out", tmp_path / "o")
    (target,) = json.loads((tmp_path / "o" / "report.json").read_text())["targets"]
    command, notes = (tmp_path / "o" / "m_atc.sh").read_text(), " ".join(target["notes"])
    assert f"--input_shape=x:1,8,{max(lengths)} " in command
    assert ("takes one shape" in notes) == ("x of 1x8x20 to 1x8x31" in notes) == (31 in lengths)
