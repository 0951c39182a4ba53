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
# dask loads this file twice
_real = getattr(cluster_jobs, "_unwatched", cluster_jobs._until_stopped)
cluster_jobs._unwatched = _real
_name = ""


def dask_setup(worker):
    global _name
    _name = worker.name


def _claimed(word):
    """Whether this is the worker to do it: the one that takes the file away."""
    try:
        (FOLDER / word).unlink()
    except FileNotFoundError:
        return False
    return True


def watched(samples, key):
    for number, sample in enumerate(_real(samples, key)):
        with (FOLDER / "samples").open("a") as file:
            file.write(f"{_name} {key}\n")
        if number == 1 and _claimed("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if _claimed("fail"):
            raise OSError("the share does not answer")
        if (FOLDER / "slow").exists():
            time.sleep(0.25)
        yield sample


cluster_jobs._until_stopped = watched
