"""One model on trial: its samples, its float outputs, and the figures of an int8 model of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import peers
from cases import Case, Feed
from model_feeds import Sample
from task_scores import worst_part_db

from deploy.errors import Calib8Error
from deploy.feed.feed import open_feed
from deploy.metrics.latency import measure
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Session

_TIMED = 4  # samples that are run in turns
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; figures are None where there is no model."""

    model: str
    tool: str
    says: str = ""
    int8: str = ""
    task: tuple[float, float] | None = None
    unit: str = ""
    worst_db: float | None = None
    part: str = ""
    speed_up: float | None = None
    cpu_s: float = 0.0

    def cells(self) -> list[str]:
        """The row as text."""
        task = "" if self.task is None else f"{self.task[0]:.3f} -> {self.task[1]:.3f} {self.unit}"
        worst = "" if self.worst_db is None else f"{self.worst_db:.1f} {self.part}"
        speed = "" if self.speed_up is None else f"{self.speed_up:.2f}"
        told = [self.int8, task or self.says, worst, speed, f"{self.cpu_s:.0f}"]
        return [self.model, self.tool, *told]


@dataclass(kw_only=True)
class Trial:
    """One model with its samples and float outputs, to judge any number of int8 models by."""

    name: str
    case: Case
    folder: Path
    threads: int
    model: Path = field(init=False)
    calibration: Path = field(init=False)
    held: list[Sample] = field(init=False)
    reference: list[Sample] = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.case.model()
        float32 = OrtSession.open(self.model, threads=self.threads)
        self.calibration = peers.write_samples(
            self._samples(self.case.calibration(self.folder), float32, "calibration"),
            self.folder / f"{self.name}-calibration",
        )
        self.held = self._samples(self.case.evaluation(self.folder), float32, "held")
        self.reference = [float32.run(sample) for sample in self.held]

    def _samples(self, feed: Feed, session: Session, what: str) -> list[Sample]:
        """Samples of a feed, those of a list of paths decoded as the case says."""
        if isinstance(feed, list) and feed and isinstance(feed[0], dict):
            return feed  # type: ignore[return-value]
        source = str(feed)
        if isinstance(feed, list):
            listing = self.folder / f"{self.name}-{what}.txt"
            listing.write_text("".join(f"{path}\n" for path in feed))
            source = str(listing)
        opened = open_feed(source, session.inputs, preprocess=self.case.preprocess)
        with opened.samples() as samples:
            return [dict(sample) for sample in samples]

    def outputs(self, engine: Path, *, int8_kernels: bool = True) -> list[Sample]:
        """What an int8 model gives for the held-back samples.

        Raises:
            BackendError: it cannot be loaded or run.
        """
        session = OrtSession.open(engine, threads=self.threads, int8_kernels=int8_kernels)
        return [session.run(sample) for sample in self.held]

    def speed_ups(self, engines: Mapping[str, Path], duration_s: float) -> dict[str, float]:
        """How many times faster than FP32 each is: medians of runs in turns, the best of rounds."""
        files = {"FP32": self.model, **engines}
        sessions = {
            name: OrtSession.open(path, threads=self.threads) for name, path in files.items()
        }
        rounds = [
            measure(sessions, self.held[:_TIMED], warmup_ms=200, duration_s=duration_s / _ROUNDS)
            for _ in range(_ROUNDS)
        ]
        # the quietest round of each: a neighbour may fill another one
        medians = {name: min(r[name].latency.median for r in rounds) for name in files}
        return {name: medians["FP32"] / medians[name] for name in engines}

    def row(self, made: peers.Made) -> Row:
        """Figures of one tool's model, without its speed."""
        none = Row(model=self.name, tool=made.tool, cpu_s=made.cpu_s, says=f"FAILED: {made.says}")
        if made.engine is None:
            return none
        try:
            own = self.outputs(made.engine)
        except Calib8Error as error:
            says = str(error).replace(f"{self.folder}/", "")
            return Row(**{**asdict(none), "says": f"FAILED: {says}"})
        task = None
        if self.case.score is not None:
            score = self.case.score(self.folder)
            task = (score(self.reference, self.reference), score(own, self.reference))
        worst_db, part = worst_part_db(own, self.reference)
        small, every = peers.layers_in_int8(made.engine)
        return Row(
            model=self.name,
            tool=made.tool,
            int8=f"{small} of {every}",
            task=task,
            unit=self.case.unit,
            worst_db=worst_db,
            part=part,
            cpu_s=made.cpu_s,
        )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as Markdown."""
    texts = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in texts)
