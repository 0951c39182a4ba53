"""Times of splits on the device that runs the engine: this CPU, or a connected accelerator."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.errors import BackendError, SdkMissingError
from deploy.method import Choices
from deploy.metrics.latency import measure as measure_latencies
from deploy.targets.base import BuildRequest, Target
from deploy.tensors import Array, Session
from deploy.terminal import phase
from deploy.tuning.search_options import Trial

_SPLIT_S = 0.1  # of timing a split
_MIN_ROUNDS = 5  # of timing splits, in each of which every split is timed once


def has_device(target: Target) -> bool:
    """Whether the SDK of a target and its device are in this machine."""
    try:
        target.describe_sdk()
    except SdkMissingError:
        return False
    return True


@dataclass(slots=True)
class SplitTimer:
    """Times the engines of trials beside the float model's, in turns.

    Attributes:
        target: the target.
        request: its build request.
        float_choices: choices with all in float.
        samples: inputs of the runs, all of one shape.
    """

    target: Target
    request: BuildRequest
    float_choices: Choices
    samples: Sequence[Mapping[str, Array]]
    # built once for all calls; it stays loaded when the folder of its engine is deleted
    _float_session: Session | None = None

    @phase("timing splits")
    def measure(self, trials: Sequence[Trial]) -> list[float]:
        """Return the times of the trials, as shares of the float model's.

        On this CPU the sessions have one thread, however many the build has: then CPU time is
        measured, which other programs disturb least. The quickest inference of each counts, since a
        disturbance only makes one longer.

        Raises:
            BackendError: an engine cannot be built or run here.
        """
        with tempfile.TemporaryDirectory(dir=self.request.folder) as folder:
            if self._float_session is None:
                self._float_session = self._open(self.float_choices, Path(folder) / "float")
            sessions = {"float": self._float_session}
            for number, trial in enumerate(trials):
                name = f"split {number}"
                sessions[name] = self._open(trial.choices, Path(folder) / name)
            measurements = measure_latencies(
                sessions,
                self.samples,
                warmup_ms=0,
                duration_s=_SPLIT_S,
                min_iterations=_MIN_ROUNDS,
            )
        # in the order of `sessions`, the float model first
        float_ms, *times_ms = (measurements[name].latency.min for name in sessions)
        return [trial_ms / float_ms for trial_ms in times_ms]

    def _open(self, choices: Choices, folder: Path) -> Session:
        """Build the engine of a split in a new folder, and load it."""
        folder.mkdir()
        request = self.request.with_added_choices(choices)
        result = self.target.build(replace(request, folder=folder))
        if result.engine is None:
            raise BackendError(result.error or f"{self.target.name} built no engine here")
        return self.target.open(result.engine, threads=1)
