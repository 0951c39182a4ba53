"""Real models through calib8, ONNX Runtime's quantizer and NNCF: how near, how fast, at what cost.

    python benchmarks/real_models.py [NAME ...] [--tools calib8 ort ort-all nncf] [--venvs FOLDER]
    python benchmarks/real_models.py --out FOLDER --again
    python benchmarks/real_models.py --acceptance

The first prints one line a model and tool, and writes the table as real_models.md and
real_models.json. The second judges and times anew what an earlier run left in FOLDER, and makes
only what is not there. The third builds with calib8 alone and prints what has to be reached beside
what was (acceptance.py). Every tool has the same calibration samples and its defaults; what is
judged did not calibrate. FP32 and all int8 models of a row are timed in turns in one process. CPU
is user and system time of the tool's whole process. It wants Pillow and DejaVu fonts (see
rendered_text.py), and espeak-ng for real speech; EfficientNet-Lite0 must have been exported once
by export_efficientnet.py, which needs torch. Models that must not be built are in the list too:
they have to end in one sentence.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import peers  # noqa: E402
from acceptance import accepted  # noqa: E402
from cases import Case, cases  # noqa: E402
from fetch_models import FetchError  # noqa: E402
from trial import Row, Trial, table  # noqa: E402

from deploy.errors import Calib8Error  # noqa: E402

CPU_TOOLS = [tool for tool in peers.TOOLS if tool != "modelopt"]
HEAD = ["model", "tool", "int8", "task figure FP32 -> int8", "worst dB", "speed-up", "CPU s"]


def made_by(
    tool: str, name: str, model: Path, samples: Path, folder: Path, asked: argparse.Namespace
) -> peers.Made:
    """What a tool makes of a model, or what it made of it in an earlier run."""
    out = folder / f"{name}-{tool}"
    before = peers.made_before(out) if asked.again else None
    return before or peers.quantize(tool, model, samples, out, asked.venvs)


def refused(name: str, case: Case, folder: Path, asked: argparse.Namespace) -> Row:
    """A model that calib8 must refuse in one sentence."""
    feed = case.calibration(folder)
    samples = peers.write_samples(feed, folder / f"{name}-calibration")  # type: ignore[arg-type]
    made = made_by("calib8", name, case.model(), samples, folder, asked)
    says = "FAILED: it should have been refused" if made.engine else f"refused: {made.says}"
    return Row(model=name, tool="calib8", says=says, cpu_s=made.cpu_s)


def run(name: str, case: Case, folder: Path, asked: argparse.Namespace) -> list[Row]:
    """One model through every tool."""
    try:
        if case.refused:
            return [refused(name, case, folder, asked)]
        trial = Trial(name=name, case=case, folder=folder, threads=asked.threads)
    except (Calib8Error, FetchError, OSError, ImportError) as error:
        return [Row(model=name, tool="none", says=f"left out: {error}")]
    made = [
        made_by(tool, name, trial.model, trial.calibration, folder, asked) for tool in asked.tools
    ]
    rows = [trial.row(one) for one in made]
    engines = {
        one.tool: one.engine
        for one, row in zip(made, rows, strict=True)
        if one.engine and row.worst_db is not None
    }
    faster = trial.speed_ups(engines, asked.duration) if engines and asked.duration else {}
    return [Row(**{**asdict(row), "speed_up": faster.get(row.tool)}) for row in rows]


def main() -> int:
    """Run the cases that were named, or all; 1 where calib8 failed one of them."""
    every = cases()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *every], default=[])
    parser.add_argument("--tools", nargs="+", choices=[*peers.TOOLS], default=CPU_TOOLS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--duration", type=float, default=3.0, help="seconds a model is timed")
    parser.add_argument("--out", type=Path, default=None, help="folder to keep everything in")
    parser.add_argument(
        "--again", action="store_true", help="take what an earlier run into --out made"
    )
    parser.add_argument(
        "--venvs", type=Path, default=peers.environments(), help="environments of the peers"
    )
    parser.add_argument(
        "--acceptance", action="store_true", help="what must be reached, and whether it was"
    )
    asked = parser.parse_args()
    if asked.again and asked.out is None:
        parser.error("--again needs --out, the folder of the earlier run")
    folder = (
        asked.out.resolve() if asked.out else Path(tempfile.mkdtemp(prefix="calib8-real-models-"))
    )
    folder.mkdir(parents=True, exist_ok=True)
    if asked.acceptance:
        return accepted(asked.names, folder, asked.threads, asked.duration, asked.venvs)
    rows: list[Row] = []
    for name in asked.names or every:
        for row in run(name, every[name], folder, asked):
            rows.append(row)
            print(" | ".join(row.cells()), flush=True)
    text = table(HEAD, [row.cells() for row in rows])
    (folder / "real_models.md").write_text(text)
    kept = [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()}
        for r in map(asdict, rows)
    ]
    (folder / "real_models.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"\n{text}\n{folder}")
    return int(any(row.tool == "calib8" and row.says.startswith("FAILED") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
