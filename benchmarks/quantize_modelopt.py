"""NVIDIA ModelOpt's int8 Q/DQ model with its defaults, in a virtual environment of its own.

`python benchmarks/quantize_modelopt.py MODEL SAMPLES OUT`

Only the rest's type is not its default: float32, so that the model runs on any CPU.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
from modelopt.onnx.quantization import quantize
from onnxruntime.quantization.calibrate import CalibrationDataReader


class Reader(CalibrationDataReader):
    """The samples of a folder, one .npz each, in order."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.rewind()

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Input name -> array, or None at the end."""
        file = next(self.left, None)
        return None if file is None else read(file)

    def get_first(self) -> dict[str, np.ndarray]:
        """The first sample, whose shapes ModelOpt looks at."""
        return read(self.files[0])

    def rewind(self) -> None:
        """Begin anew."""
        self.left = iter(self.files)


def read(file: Path) -> dict[str, np.ndarray]:
    """One sample: input name -> array."""
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def main() -> None:
    """Quantize, and leave the engine's path in OUT/engine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model = given.out / "model.onnx"  # ModelOpt writes beside it
    shutil.copyfile(given.model, model)
    engine = given.out / "model.int8.onnx"
    quantize(
        str(model),
        quantize_mode="int8",
        calibration_data_reader=Reader(sorted(given.samples.glob("*.npz"))),
        calibration_eps=["cpu"],
        output_path=str(engine),
        high_precision_dtype="fp32",
    )
    (given.out / "engine").write_text(str(engine.resolve()))


if __name__ == "__main__":
    main()
