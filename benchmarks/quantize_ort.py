"""ONNX Runtime's own quantizer, in a virtual environment of its own: knows nothing of calib8.

    python benchmarks/quantize_ort.py MODEL SAMPLES OUT [--ops Conv Gemm MatMul] [--signs us]
                                      [--plain] [--reduce-range]

quantize_static: QDQ, MinMax, per channel, uint8 activations, int8 weights, after the preparation
(shapes, float optimizations) that its documentation asks for where the model allows it. `--signs`
says what activations and weights are, u or s; `--plain` leaves the preparation out;
`--reduce-range` takes 7 bits for weights, which its documentation advises for CPUs without VNNI.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
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


def forms(model: Path, folder: Path) -> Iterator[Path]:
    """The model after the quantizer's own preparation, then without it: either may fail later."""
    plain = lifted(model, folder)
    ready = folder / "prepared.onnx"
    try:
        quant_pre_process(str(plain), str(ready), skip_symbolic_shape=True)
        yield ready
    except Exception as error:  # whatever it raises, the model itself may still do
        print(f"preparation left out: {error}")
    yield plain


def main() -> None:
    """Quantize the first form that can be, and leave the engine's path in OUT/engine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ops", nargs="*", default=["Conv", "Gemm", "MatMul"])
    parser.add_argument("--signs", choices=["us", "uu", "ss"], default="us")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--reduce-range", action="store_true")
    given = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    given.out.mkdir(parents=True, exist_ok=True)
    engine = given.out / "model.int8.onnx"
    failures: list[Exception] = []
    for form in [*forms(given.model, given.out)][-1 if given.plain else 0 :]:
        try:
            quantize(form, given.samples, engine, given.ops, given.signs, given.reduce_range)
        except Exception as error:  # the quantizer's own; the other form may do
            failures.append(error)
            continue
        (given.out / "engine").write_text(str(engine.resolve()))
        return
    raise failures[-1]


def quantize(
    model: Path, samples: Path, engine: Path, ops: list[str], signs: str, reduce_range: bool
) -> None:
    """Write the int8 model of one form, and load it once: not all that is written can be."""
    kinds = {"u": QuantType.QUInt8, "s": QuantType.QInt8}
    quantize_static(
        str(model),
        str(engine),
        Reader(samples),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=ops or None,
        per_channel=True,
        activation_type=kinds[signs[0]],
        weight_type=kinds[signs[1]],
        reduce_range=reduce_range,
        calibrate_method=CalibrationMethod.MinMax,
    )
    onnxruntime.InferenceSession(str(engine), providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    main()
