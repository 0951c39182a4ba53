"""NNCF's nncf.quantize on the ONNX model with its defaults, in a virtual environment of its own.

python benchmarks/quantize_nncf.py MODEL SAMPLES OUT
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nncf
import numpy as np
import onnx


def main() -> None:
    """Quantize, and leave the engine's path in OUT/engine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    files = sorted(given.samples.glob("*.npz"))

    def read(file: Path) -> dict[str, np.ndarray]:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}

    model = nncf.quantize(onnx.load(given.model), nncf.Dataset(files, read), subset_size=len(files))
    given.out.mkdir(parents=True, exist_ok=True)
    engine = given.out / "model.int8.onnx"
    onnx.save(model, engine)
    (given.out / "engine").write_text(str(engine.resolve()))


if __name__ == "__main__":
    main()
