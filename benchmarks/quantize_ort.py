"""ONNX Runtime's own quantizer, in a virtual environment of its own: knows nothing of calib8.

    python benchmarks/quantize_ort.py MODEL SAMPLES OUT [--ops Conv Gemm MatMul]

quantize_static: QDQ, MinMax, per channel, uint8 activations, int8 weights, after the preparation
(shapes, float optimizations) that its documentation asks for where the model allows it.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import version_converter
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """The samples of a folder, one .npz each."""

    def __init__(self, folder: Path) -> None:
        self.left = self._walk(folder)

    @staticmethod
    def _walk(folder: Path) -> Iterator[dict[str, np.ndarray]]:
        for file in sorted(folder.glob("*.npz")):
            with np.load(file, allow_pickle=False) as arrays:
                yield {name: arrays[name] for name in arrays.files}

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next sample; None after the last."""
        return next(self.left, None)


def lifted(model: Path, folder: Path) -> Path:
    """The model in opset 13 or later: before it no file with a scale a channel can be loaded."""
    loaded = onnx.load(model)
    version = next(o.version for o in loaded.opset_import if o.domain in ("", "ai.onnx"))
    if version >= 13:
        return model
    path = folder / "lifted.onnx"
    onnx.save(version_converter.convert_version(loaded, 13), path)
    return path


def prepared(model: Path, folder: Path) -> Path:
    """The model after the quantizer's own preparation, or as it is where that fails."""
    path = folder / "prepared.onnx"
    try:
        quant_pre_process(str(lifted(model, folder)), str(path), skip_symbolic_shape=True)
    except Exception as error:  # whatever it raises, the model itself may still do
        print(f"preparation left out: {str(error).splitlines()[:1]}")
        return model
    return path


def main() -> None:
    """Quantize, and leave the engine's path in OUT/engine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ops", nargs="*", default=["Conv", "Gemm", "MatMul"])
    given = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    given.out.mkdir(parents=True, exist_ok=True)
    engine = given.out / "model.int8.onnx"
    quantize_static(
        str(prepared(given.model, given.out)),
        str(engine),
        Reader(given.samples),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=given.ops or None,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax,
    )
    (given.out / "engine").write_text(str(engine.resolve()))


if __name__ == "__main__":
    main()
