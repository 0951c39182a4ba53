"""What `build --target tensorrt` loses, without a GPU: the rest in float32 against float16.

    python benchmarks/tensorrt_models.py [NAME ...] [--effort 0 1] [--samples N] [--held N]

Builds each model at each effort (1 is the default of `calib8 build`), loads every ONNX file that
was written into ONNX Runtime, without its own int8 kernels, and prints the cosine to the float
model over held-back samples, the worst of all and the mean, of the model with the rest in float32
(`.qdq.onnx`) and of the typed one. Nodes that ONNX Runtime does not know are left out of both, with
what they make, and named. Exit code 1 where a model could not be built or a file not be loaded.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import peers  # noqa: E402
from cases import Case  # noqa: E402
from fetch_models import FetchError  # noqa: E402
from model_feeds import Sample  # noqa: E402
from tensorrt_cases import cases  # noqa: E402
from trial import Trial, table  # noqa: E402

from deploy.errors import Calib8Error  # noqa: E402

FILES = {"float": ".tensorrt.onnx", "fp32": ".tensorrt.qdq.onnx", "fp16": ".tensorrt.typed.onnx"}
HEAD = ["model", "effort", "loads", "FP32 rest: worst, mean", "FP16 rest: worst, mean", "task"]


def cosines(own: list[Sample], reference: list[Sample]) -> list[float]:
    """One a sample: of all its float outputs, the worst."""
    found = []
    for mine, exact in zip(own, reference, strict=True):
        values = []
        for name, b in exact.items():
            x, y = (array.astype(np.float64).ravel() for array in (mine[name], b))
            length = math.sqrt((x @ x) * (y @ y))
            values += [float(x @ y / length)] if b.dtype.kind == "f" and length else []
        found.append(min(values))
    return found


def unknown(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of another domain, which ONNX Runtime cannot run."""
    known = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}
    return [node for node in model.graph.node if node.domain not in known]


def without_unknown(path: Path) -> tuple[Path, str]:
    """(the file, or one beside it up to the unknown nodes; their operators in words)."""
    model = onnx.load(path)
    left_out = unknown(model)
    if not left_out:
        return path, ""
    made = {name for node in left_out for name in node.output}
    for node in left_out:
        model.graph.node.remove(node)
    for value in [value for value in model.graph.output if value.name in made]:
        model.graph.output.remove(value)
    cut = path.with_suffix(".cut.onnx")
    onnx.save(model, cut)
    return cut, ", ".join(sorted({f"{node.domain}.{node.op_type}" for node in left_out}))


def row(trial: Trial, effort: int, environments: Path) -> list[str]:
    """One build, as cells of the table."""
    case = trial.case
    out = trial.folder / f"{trial.name}-{effort}".replace(", ", "-")
    words = ("--target", "tensorrt", "--effort", str(effort))
    made = peers.quantize("calib8", trial.model, trial.calibration, out, environments, *words)
    start = [trial.name, str(effort)]
    if made.engine is None:
        return [*start, f"FAILED: {made.says}", "", "", ""]
    files = {what: next(iter(out.glob(f"*{end}")), None) for what, end in FILES.items()}
    cut = {what: without_unknown(path) for what, path in files.items() if path}
    outputs = {w: trial.outputs(path, int8_kernels=False) for w, (path, _) in cut.items()}
    missing = next((f" (without {words})" for _, words in cut.values() if words), "")
    cells, tasks = [], []
    for rest in ("fp32", "fp16"):
        found = cosines(outputs[rest], trial.reference) if rest in outputs else []
        cells.append(f"{min(found):.4f}, {np.mean(found):.4f}" if found else "not written")
        if case.score is not None and rest in outputs:
            tasks.append(f"{case.score(trial.folder)(outputs[rest], trial.reference):.3f}")
    if case.score is not None:
        whole = case.score(trial.folder)(trial.reference, trial.reference)
        tasks = [f"{case.unit}: {whole:.3f} -> {', '.join(tasks)}"]
    return [*start, f"{', '.join(outputs)}{missing}", *cells, "".join(tasks)]


def main() -> int:
    """Print the table; 1 where a row failed."""
    every = cases()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *every], default=[])
    parser.add_argument("--effort", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--samples", type=int, default=40, help="calibration samples, at most")
    parser.add_argument("--held", type=int, default=400, help="held-back samples, at most")
    parser.add_argument("--out", type=Path, default=None, help="folder to keep everything in")
    asked = parser.parse_args()
    folder = asked.out or Path(tempfile.mkdtemp(prefix="calib8-tensorrt-"))
    folder.mkdir(parents=True, exist_ok=True)
    found: list[list[str]] = []
    for name in asked.names or every:
        try:
            trial = on_trial(name, every[name], every["fashion"], folder)
            shorten(trial, asked.samples, asked.held)
            for effort in asked.effort:
                found.append(row(trial, effort, folder))
                print(" | ".join(found[-1]), flush=True)
        except (Calib8Error, FetchError, OSError) as error:
            found.append([name, "", f"FAILED: {error}", "", "", ""])
            print(" | ".join(found[-1]), flush=True)
    print(f"\n{table(HEAD, found)}")
    return int(any("FAILED" in cells[2] for cells in found))


def on_trial(name: str, case: Case, plain: Case, folder: Path) -> Trial:
    """The model with its samples; one that ONNX Runtime cannot run has those of the plain one."""
    given = case.model()
    if not unknown(onnx.load(given, load_external_data=False)):
        return Trial(name=name, case=case, folder=folder, threads=2)
    trial = Trial(name=name, case=replace(plain, score=None), folder=folder, threads=2)
    trial.model = given
    return trial


def shorten(trial: Trial, samples: int, held: int) -> None:
    """Leave so many samples at most, spread evenly over all; a task's score wants all of them."""
    files = sorted(trial.calibration.glob("*.npz"))
    kept = {files[i * len(files) // samples] for i in range(samples)} if files else set()
    for file in files if len(files) > samples else ():
        if file not in kept:
            file.unlink()
    step = -(-len(trial.held) // held)
    if step > 1:
        trial.case = replace(trial.case, score=None)
    trial.held, trial.reference = trial.held[::step], trial.reference[::step]


if __name__ == "__main__":
    sys.exit(main())
