"""Benchmarks print their options, and ask calib8 only what it answers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.models import make_model, save_net

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fetch_models", "int8_ceiling", "int8_kernels"])
def test_help_names_the_arguments(name):
    if name == "int8_ceiling":
        pytest.importorskip("PIL")  # draws its inputs with it
    script = str(BENCHMARKS / f"{name}.py")
    result = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "positional arguments" in result.stdout


def test_placement_knows_why_nodes_are_float(tmp_path):
    from benchmarks.placement import why_fewer

    nodes = [("Conv", "x w", "c", {"pads": [1, 1, 1, 1]}), ("Erf", "c", "y")]
    shapes = {"x": [1, 4, 8, 8]}, {"y": [1, 4, 8, 8]}
    weights = {"w": np.ones((4, 4, 3, 3), np.float32)}
    path = save_net(make_model(nodes, *shapes, weights), tmp_path / "net.onnx")
    reasons = why_fewer(path, {"Add": {}}, {"Add": {"Erf_y": True, "other": True}})
    assert reasons[0].startswith("1 Erf: ")
    assert len(reasons[0]) > len("1 Erf: ")
    assert reasons[1] == "1 Add: no reason"
