"""NNCF's nncf.quantize on the ONNX model with its defaults, in a virtual environment of its own.

`python benchmarks/quantize_nncf.py MODEL SAMPLES OUT`
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import nncf
import numpy as np
import onnx
import onnxruntime
from onnx import version_converter


def read(file: Path) -> dict[str, np.ndarray]:
    """One sample: input name -> array."""
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def forms(model: Path, folder: Path) -> Iterator[onnx.ModelProto]:
    """The model as it is, then in opset 13 with its constants folded, as NNCF refuses some."""
    loaded = onnx.load(model)
    yield loaded
    version = next(o.version for o in loaded.opset_import if o.domain in ("", "ai.onnx"))
    if version < 13:
        loaded = version_converter.convert_version(loaded, 13)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "folded.onnx")
    onnxruntime.InferenceSession(
        loaded.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    yield onnx.load(folder / "folded.onnx")


def main() -> None:
    """Quantize the first form that can be, and leave the engine's path in OUT/engine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    files = sorted(given.samples.glob("*.npz"))
    given.out.mkdir(parents=True, exist_ok=True)
    engine = given.out / "model.int8.onnx"
    failures: list[Exception] = []
    for form in forms(given.model, given.out):
        try:
            small = nncf.quantize(form, nncf.Dataset(files, read), subset_size=len(files))
        except Exception as error:  # NNCF's own; the other form may do
            failures.append(error)
            continue
        onnx.save(small, engine)
        (given.out / "engine").write_text(str(engine.resolve()))
        return
    raise failures[0]


if __name__ == "__main__":
    main()
