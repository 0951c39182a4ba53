"""The whole of `benchmarks/gpu_check.py`: with a fake TensorRT, and where a GPU is at hand."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gpu_check
from calibrators.tensorrt import CLASSES
from deploy.calibration.trt_cache import from_scales
from deploy.errors import BackendError, ExportError, SdkMissingError
from deploy.metrics.latency import measure
from deploy.targets.tensorrt import sdk

ROOT = Path(__file__).parents[1]


def reason():
    """Why there is nothing to check on; "" where there is."""
    try:
        sdk.find_sdk()
    except SdkMissingError as error:
        return str(error)
    return ""


NO_GPU = reason()
QUICK = partial(measure, warmup_ms=0, duration_s=0, min_iterations=1)


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
def test_tensorrt_agrees_on_this_gpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(not NO_GPU, reason="a GPU is at hand")
def test_check_without_gpu_has_code_77(tmp_path):
    assert gpu_check.main(["--out", str(tmp_path)]) == 77


def scales(share=0.0, *names, **further_scales):
    """A cache of eleven scales, those of `names` greater by `share`, and more."""
    scale_by_tensor = {
        f"t{i}": np.float32((i + 1) * (1 + share * (f"t{i}" in names))) for i in range(11)
    }
    return from_scales(
        scale_by_tensor | {n: np.float32(v) for n, v in further_scales.items()}, version="8.5.3"
    )


def compare_caches(name, theirs, ours):
    finding = gpu_check.Finding(name)
    gpu_check.hold(finding, theirs, ours)
    return finding


def test_caches_are_compared_by_entry(capsys, wording):
    equal = compare_caches("entropy2", scales(dead=0, constant_output=1), scales(dead=0))
    assert equal.scales.startswith("12 of 12 equal, median 0.0000%")
    assert not equal.wrong
    assert "constant_output" in capsys.readouterr().out
    strange = compare_caches(
        "minmax",
        scales(),
        from_scales({"made up": np.float32(1), "t0": np.float32(1)}, version="8.5.3"),
    )
    assert strange.wrong == ["1 of our names are not TensorRT's: ['made up']"]
    with pytest.raises(BackendError) as refusal:
        compare_caches("minmax", scales(), from_scales({"a": np.float32(1)}, version="8.5.3"))
    wording.check(refusal.value)
    five_names, six_names = [f"t{i}" for i in range(5)], [f"t{i}" for i in range(6)]
    finding = compare_caches("entropy2", scales(), scales(0.5, *five_names))
    assert finding.scales.startswith("6 of 11 equal, median 0.0000%, 50.000% t")
    assert not finding.wrong
    assert not compare_caches("entropy2", scales(), scales(0.0009, *six_names)).wrong
    assert (
        "scale is 0.110% off"
        in compare_caches("minmax", scales(), scales(0.0011, *six_names)).wrong[0]
    )
    assert not compare_caches("legacy", scales(), scales(0.5, *six_names)).wrong


TRTEXEC = """#!/bin/sh
case "$PWD" in *FP8*) echo "[1] [E] no fp8 here"; exit 1;; esac
for one; do case "$one" in --saveEngine=*) cp "${PWD% by trtexec}.engine" "${one#*=}";; esac; done
echo "[1] [I] Latency: min = 0.1 ms, max = 0.2 ms, mean = 0.15 ms, median = 0.125 ms"
"""


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("version", ["8.5.3.1", "10.16.1.11", "11.4.0.106"])
def test_failed_row_leaves_the_others(tensorrt, version, tmp_path, monkeypatch, capsys):
    """The fake searches no scales: it takes the largest value, and names nothing inside a Gemm."""
    tensorrt(version, "cuda-python")
    monkeypatch.setattr(gpu_check, "measure", QUICK)
    major, out = int(version.split(".")[0]), tmp_path / "out"
    gemm = "1 of our names are not TensorRT's: ['/fc/Gemm_output']"
    fp8 = "FP8 typed by trtexec: BackendError: trtexec ended with 1: no fp8 here"
    off = "entropy2: the median scale is 12."
    wrong = {
        8: [off],
        10: [fp8, f"entropy2: {gemm}", off, f"legacy: {gemm}"],
        11: ["FP16: ExportError: no float16", fp8],
    }[major]
    if major == 11:  # where FP16 needs a model of its own

        def fails(*_):
            raise ExportError("no float16\nand more")

        monkeypatch.setattr(gpu_check, "narrow_float_part", fails)
    if major > 8:
        tool = tmp_path / "bin" / "trtexec"
        tool.parent.mkdir()
        tool.write_text(TRTEXEC)
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    code = gpu_check.main(["--limit", "25", "--out", str(out)])
    text = (out / "gpu_check.md").read_text()
    assert code == 1
    assert capsys.readouterr().out.endswith(text.partition("\n\n")[2])
    assert text.startswith("Fake H200 sm_90, ")
    assert f"CUDA 13.0, TensorRT {version}; fashion.onnx, 20 images\n" in text
    rows = {}
    for line in text.splitlines():
        if line.startswith("| "):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name] = cells
    shipped = {8: ["int8 QDQ", "int8 by the cache"], 11: ["int8 typed", "FP8 typed"]}
    shipped[10] = [*shipped[11], "int8 by the cache"]
    trtexec_rows = [f"{name} by trtexec" for name in shipped[major]] if major > 8 else []
    calibrated = [*CLASSES] if major < 11 else []
    graph = [gpu_check.GRAPH] if major > 8 else []
    assert {*rows} == {
        "engine",
        "FP32",
        "FP16",
        *shipped[major],
        *trtexec_rows,
        *calibrated,
        *graph,
        gpu_check.SPLITS,
    }
    for name, (ms, speed, trtexec, cosine, *_) in list(rows.items())[1:]:
        built = not any(line.startswith((f"{name}: Ba", f"{name}: Ex")) for line in wrong)
        assert bool(ms) == bool(cosine) == built
        assert bool(speed) == (built and major < 11)
        assert trtexec == ("0.1250" if name in trtexec_rows and built else "")
    if major < 11:
        assert rows["minmax"][-1].startswith("24 of 28 equal, median 0.0000%")
    errors = [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
    assert [s[: len(w)] for s, w in zip(errors, wrong, strict=True)] == wrong
