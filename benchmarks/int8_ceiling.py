"""What int8 can win here: calib8's choice beside everything in int8, by it and by its peers.

    python benchmarks/int8_ceiling.py NAME [NAME ...] [--threads 2] [--rounds 40] [--oracle 12]

Two figures a model. "kernels" is the sum of the least time of each kernel under ONNX Runtime's
profiler in one thread, which what else runs on a machine disturbs least. "least run" is the
shortest of all runs, a few of each model in turns, at the threads that were asked for. `--oracle`
adds calib8's best splits by the held-back samples themselves (best_split.py), which bound what any
choice of layers can reach.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import numpy as np  # noqa: E402
import peers  # noqa: E402
from best_split import best_splits  # noqa: E402
from cases import cases  # noqa: E402
from model_feeds import Sample  # noqa: E402
from task_scores import worst_part_db  # noqa: E402
from trial import Trial, table  # noqa: E402

from deploy.runtimes.ort import OrtSession, profile_kernels  # noqa: E402

# what it is called -> the tool and its options
FORMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "calib8": ("calib8", ()),
    "calib8, all in int8": ("calib8", ("--effort", "0")),
    "the same with the first Conv": ("calib8", ("--effort", "0", "--int8-stem")),
    "ORT, uint8 and int8": ("ort-all", ()),
    "the same without its preparation": ("ort-all", ("--plain",)),
    "ORT, uint8 and uint8": ("ort-all", ("--signs", "uu")),
    "ORT, int8 and int8": ("ort-all", ("--signs", "ss")),
    "NNCF": ("nncf", ()),
}
HEAD = ["model", "form", "int8", "task", "worst dB"]
HEAD += ["kernels", "of FP32", "least run", "of FP32"]
_PROFILED = 30  # runs under the profiler, of which two do not count
_BURST = 5  # runs of one model before it is another one's turn


def kernels_ms(model: Path, feed: Sample) -> float:
    """Sum of the least time of each kernel, in one thread."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, _, taken in profile_kernels(model, [feed], runs=_PROFILED):
        found[name].append(taken)
    return sum(min(times[2:] or times) for times in found.values()) / 1e3


def least_ms(
    models: Mapping[str, Path], feed: Sample, threads: int, rounds: int
) -> dict[str, float]:
    """The shortest run of each, in turns; the first of every turn does not count."""
    sessions = {name: OrtSession.open(path, threads=threads) for name, path in models.items()}
    best = dict.fromkeys(models, float("inf"))
    for _ in range(rounds):
        for name, session in sessions.items():
            session.run(feed)
            for _ in range(_BURST):
                start = time.perf_counter()
                session.run(feed)
                best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def run(name: str, folder: Path, asked: argparse.Namespace) -> list[list[str]]:
    """One model in every form that can be made."""
    trial = Trial(name=name, case=cases()[name], folder=folder, threads=asked.threads)
    engines, told = {"FP32": trial.model}, {"FP32": ["", "", ""]}
    score = None if trial.case.score is None else trial.case.score(trial.folder)

    def add(form: str, engine: Path) -> None:
        small, every = peers.layers_in_int8(engine)
        own = trial.outputs(engine)
        worst, _ = worst_part_db(own, trial.reference)
        task = "" if score is None else f"{score(own, trial.reference):.3f}"
        engines[form], told[form] = engine, [f"{small} of {every}", task, f"{worst:.1f}"]

    for number, form in enumerate(asked.forms):
        tool, words = FORMS[form]
        out = folder / f"{name}-{number}"
        made = peers.quantize(tool, trial.model, trial.calibration, out, asked.venvs, *words)
        if made.engine is None:
            print(f"{name} | {form} | {made.says}", flush=True)
            continue
        add(form, made.engine)
    if asked.oracle:
        (plan,) = (folder / f"{name}-0" / "calib8").glob("*.plan.toml")
        arrays = (np.load(file) for file in sorted(trial.calibration.glob("*.npz")))
        samples = [{key: one[key] for key in one.files} for one in arrays]
        for form, engine, _ in best_splits(trial, samples, plan, asked.oracle):
            add(form, engine)
            print(name, form, *told[form], sep=" | ", flush=True)
    feed = trial.held[0]
    kernels = {form: kernels_ms(path, feed) for form, path in engines.items()}
    least = least_ms(engines, feed, asked.threads, asked.rounds)
    return [_row(name, form, told[form], kernels, least) for form in engines]


def _row(
    name: str,
    form: str,
    told: Sequence[str],
    kernels: Mapping[str, float],
    least: Mapping[str, float],
) -> list[str]:
    times = []
    for found in (kernels, least):
        times += [f"{found[form]:.2f} ms", f"{found['FP32'] / found[form]:.2f}x"]
    return [name, form, *told, *times]


def main() -> int:
    """Print a table of the models that were named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", choices=[*cases()])
    parser.add_argument("--forms", nargs="+", choices=[*FORMS], default=[*FORMS][:-1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--oracle", type=int, default=0, help="layers to choose for float, at most")
    parser.add_argument("--out", type=Path, default=None, help="folder to keep everything in")
    parser.add_argument("--venvs", type=Path, default=peers.environments())
    asked = parser.parse_args()
    folder = asked.out or Path(tempfile.mkdtemp(prefix="calib8-ceiling-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in asked.names:
        rows += run(name, folder, asked)
        print(f"\n{table(HEAD, rows)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
