"""Times splits on a device: their engines are built by the vendor's SDK and run in turns.

A price list knows nothing of what a builder fuses or which kernels it picks, so where the device is
in this machine, the likely splits are measured before one is chosen, as ModelOpt's autotune does.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deploy.errors import BackendError, SdkMissingError
from deploy.method import Choices
from deploy.metrics.latency import measure
from deploy.targets.base import BuildRequest, Target
from deploy.tensors import Array, Session
from deploy.terminal import phase
from deploy.tuning.search_options import Trial

_DURATION_S = 1.0  # of measuring a split


def has_device(target: Target) -> bool:
    """Whether the SDK of a target and its device are in this machine."""
    try:
        target.describe_sdk()
    except SdkMissingError:
        return False
    return True


class DeviceTimer:
    """Times trials beside the float model on a target's device.

    Args:
        target: the target.
        request: its build request.
        float_choices: choices with all in float.
        samples: inputs of the runs.
    """

    def __init__(
        self,
        target: Target,
        request: BuildRequest,
        float_choices: Choices,
        samples: Sequence[Mapping[str, Array]],
    ) -> None:
        self._target = target
        self._request = request
        self._float_choices = float_choices
        self._samples = samples

    @phase("timing splits")
    def measure(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials with their times as a share of the float model's.

        Raises:
            BackendError: an engine cannot be built or run here.
        """
        with tempfile.TemporaryDirectory(dir=self._request.folder) as folder:
            sessions = {"float": self._open(self._float_choices, Path(folder) / "float")}
            for number, trial in enumerate(trials):
                name = f"split {number}"
                sessions[name] = self._open(trial.choices, Path(folder) / name)
            latencies = measure(sessions, self._samples, duration_s=_DURATION_S)
            float_ms, *split_ms = [latency.latency.p50 for latency in latencies.values()]
        return [
            replace(trial, time=ms / float_ms) for trial, ms in zip(trials, split_ms, strict=True)
        ]

    def _open(self, choices: Choices, folder: Path) -> Session:
        """Build the engine of a split in a folder of its own, and load it."""
        folder.mkdir()
        request = self._request.with_added_choices(choices)
        result = self._target.build(replace(request, folder=folder))
        if result.engine is None:
            raise BackendError(result.error or f"{self._target.name} built no engine here")
        return self._target.open(result.engine, threads=request.threads)
