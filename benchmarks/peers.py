"""Quantizers beside one another: each in a process, and the peers in a virtual environment, apart.

The environments are made once under $CALIB8_BENCHMARKS or ~/.cache/calib8-benchmarks, by pip, with
the versions below. Every tool gets the same samples, one .npz each, and leaves a folder whose file
`engine` names the model to run and whose made.json says what making it came to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import checkouts
import numpy as np
from model_feeds import Sample

HERE = Path(__file__).resolve().parent

# tool -> what its environment holds; calib8 runs in this one
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "calib8": (),
    "ort": ("onnxruntime==1.31.1", "onnx", "sympy"),
    "nncf": ("nncf==3.4.0", "onnx", "openvino==2026.4.1", "onnxruntime==1.31.1"),
    "modelopt": (
        *("torch==2.13.0", "onnx==1.21.0", "onnxruntime==1.24.4", "onnx-graphsurgeon==0.6.1"),
        *("onnxconverter-common==1.16.0", "onnxscript==0.7.2", "onnxslim==0.1.98", "lief==1.0.0"),
        *("polygraphy==0.53.6", "ml_dtypes", "cppimport", "scipy", "tqdm", "pydantic", "omegaconf"),
        *("PyYAML", "rich", "safetensors", "regex", "pulp", "ninja", "nvidia-ml-py"),
    ),
}
# tool -> what is installed without all that it asks for: CUDA's ONNX Runtime and cupy run on a GPU
ALONE: Mapping[str, tuple[str, ...]] = {"modelopt": ("nvidia-modelopt==0.47.0",)}
# tool -> the environment and script it shares with its neighbour, and its options
TOOLS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "calib8": ("calib8", ()),
    "ort": ("ort", ()),  # Conv, Gemm and MatMul alone
    "ort-all": ("ort", ("--ops",)),  # whatever the quantizer knows, its own default
    "ort-reduce": ("ort", ("--ops", "--reduce-range")),  # the same with 7 bits for weights
    "nncf": ("nncf", ()),
    "modelopt": ("modelopt", ()),  # for TensorRT alone: it quantizes on a signed grid
}

KEPT = "made.json"


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a tool left: the model to run, or the sentence it ended with; CPU seconds either way."""

    tool: str
    engine: Path | None
    says: str
    cpu_s: float


def environments() -> Path:
    """Where the peers' environments stand."""
    return Path(os.environ.get("CALIB8_BENCHMARKS") or Path.home() / ".cache/calib8-benchmarks")


def python_of(tool: str, folder: Path) -> str:
    """The interpreter of an environment, which is made where it is not there yet.

    Raises:
        RuntimeError: pip could not fill it; its last line is in the message.
    """
    if not PACKAGES[tool]:
        return sys.executable
    home = folder / tool
    python, whole = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join((*PACKAGES[tool], *ALONE.get(tool, ())))
    if whole.is_file() and whole.read_text() == wanted:
        return str(python)
    venv.create(home, with_pip=True, clear=True)
    for packages in (PACKAGES[tool], ("--no-deps", *ALONE.get(tool, ()))):
        if packages == ("--no-deps",):
            continue
        command = [str(python), "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            why = (said or ["it said nothing"])[-1]
            raise RuntimeError(f"pip could not install {packages!r}: {why}")
    whole.write_text(wanted)
    return str(python)


def write_samples(samples: Iterable[Sample], folder: Path) -> Path:
    """One .npz a sample, in order; files of an earlier run are taken away."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.npz"):
        old.unlink()
    for number, sample in enumerate(samples):
        np.savez(folder / f"{number:05d}.npz", **sample)  # type: ignore[arg-type]
    return folder


def quantize(
    tool: str, model: Path, samples: Path, out: Path, environments: Path, *words: str
) -> Made:
    """Run one tool on a model; `words` are further options of its script."""
    home, own = TOOLS[tool]
    try:
        python = python_of(home, environments)
    except RuntimeError as error:
        return Made(tool=tool, engine=None, says=str(error), cpu_s=0.0)
    script = HERE / f"quantize_{home}.py"
    command = [
        python,
        str(script),
        str(model),
        str(samples.resolve()),
        str(out.resolve()),
        *own,
        *words,
    ]
    out.mkdir(parents=True, exist_ok=True)
    told, kept = out / "engine", out / KEPT
    for old in (told, kept):
        old.unlink(missing_ok=True)
    run = checkouts.run(command, checkouts.OWN, out)
    engine = Path(told.read_text()) if run.code == 0 and told.is_file() else None
    says = "" if engine else run.last_line
    made = Made(tool=tool, engine=engine, says=says, cpu_s=run.cpu_s)
    kept.write_text(json.dumps({**asdict(made), "engine": engine and str(engine)}) + "\n")
    return made


def made_before(out: Path) -> Made | None:
    """What an earlier run left in the folder; None where no tool ended there."""
    kept = out / KEPT
    if not kept.is_file():
        return None
    told = json.loads(kept.read_text())
    return Made(**{**told, "engine": told["engine"] and Path(told["engine"])})


def layers_in_int8(model: Path) -> tuple[int, int]:
    """(Conv, ConvTranspose, Gemm and MatMul nodes computed in int8, all of them), in any form.

    A node is in int8 where every float input but the bias comes from a DequantizeLinear, or where
    the node is itself an integer operator.
    """
    import onnx

    graph = onnx.load(model, load_external_data=False).graph
    made_by = {name: node for node in graph.node for name in node.output}
    small = all_ = 0
    for node in graph.node:
        integer = node.op_type in ("QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger")
        if not integer and node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            continue
        makers = [made_by.get(name) for name in node.input[:2]]
        all_ += 1
        small += integer or all(m is not None and m.op_type == "DequantizeLinear" for m in makers)
    return small, all_
