"""One calib8 build with its defaults, in a process of its own.

    python benchmarks/quantize_calib8.py MODEL SAMPLES OUT [--target T] [--method M] [--threads N]
                                         [--effort N] [--duration S] [--int8-stem]

SAMPLES holds one .npz a sample, as peers.py writes them. The engine's path is left in OUT/engine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from calib8 import build
from deploy.errors import Calib8Error
from deploy.targets.onnxruntime.target import OnnxRuntime
from deploy.tuning.search_options import Tuning

# The model that says what another target computes, where ONNX Runtime is to run it.
RUNS_AS = {"tensorrt": "*.qdq.onnx", "ascend": "*_fake_quant_model.onnx"}


class Samples:
    """The samples of a folder, read anew at every walk."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.npz"))

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Any:
        for file in self.files:
            with np.load(file, allow_pickle=False) as arrays:
                yield {name: arrays[name] for name in arrays.files}


def main() -> int:
    """Build; 1 with one sentence where calib8 refuses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="onnxruntime")
    parser.add_argument("--method", default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--effort", type=int, default=None)
    parser.add_argument("--duration", type=float, default=0.5)  # time may decide what stays float
    parser.add_argument("--int8-stem", action="store_true")
    given = parser.parse_args()
    try:
        report = build(
            given.model,
            list(Samples(given.samples)),
            out=given.out,
            targets=(OnnxRuntime(int8_stem=True) if given.int8_stem else given.target,),
            method=given.method,
            threads=given.threads,
            duration_s=given.duration,
            tuning=None if given.effort is None else Tuning(effort=given.effort),
        )
    except Calib8Error as error:
        print(error)
        return 1
    int8 = (row for row in report.engines if not (row.reference or row.baseline))
    engine = next((row.path for row in int8 if row.path), None)
    if given.target in RUNS_AS:
        engine = str(next(iter(given.out.glob(RUNS_AS[given.target]))))
    (given.out / "engine").write_text(str(Path(engine or given.model).resolve()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
