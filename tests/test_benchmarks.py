"""Benchmarks explain themselves: `--help` prints their options."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fetch_models", "int8_ceiling", "int8_kernels"])
def test_help_names_the_arguments(name):
    script = str(BENCHMARKS / f"{name}.py")
    result = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "positional arguments" in result.stdout
