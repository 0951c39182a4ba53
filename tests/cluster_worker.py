"""Preloaded by the workers of tests/test_cluster.py: a real worker that dies, fails or is slow.

Each sample that a piece runs is a line in `$CALIB8_TEST/samples`. Files there, written by a test:
`die` has one worker kill itself at its second sample, `fail` has one piece fail once, `slow` has
every sample take 250 ms.
"""

import os
import signal
import time
from pathlib import Path

from deploy.calibration import cluster_jobs

FOLDER = Path(os.environ["CALIB8_TEST"])
# dask loads this file twice: the second time, the function is already replaced
_run_samples = getattr(cluster_jobs, "_unwatched", cluster_jobs._until_cancelled)
cluster_jobs._unwatched = _run_samples
_worker_name = ""


def dask_setup(worker):
    global _worker_name
    _worker_name = worker.name


def _claims(order):
    """Return whether this worker carries out an order: the worker that removes its file does."""
    try:
        (FOLDER / order).unlink()
    except FileNotFoundError:
        return False
    return True


def record_samples(samples, key):
    for number, sample in enumerate(_run_samples(samples, key)):
        with (FOLDER / "samples").open("a") as file:
            file.write(f"{_worker_name} {key}\n")
        if number == 1 and _claims("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if _claims("fail"):
            raise OSError("the share does not answer")
        if (FOLDER / "slow").exists():
            time.sleep(0.25)
        yield sample


cluster_jobs._until_cancelled = record_samples
