"""Arrays in a temporary file, and arrays that several threads read at once."""

import gc
import io
import sys
import threading

import numpy as np
import pytest

from deploy.feed.array_files import read_arrays
from deploy.feed.arrays import Scratch
from deploy.feed.reader import Spool
from deploy.files.reading import read_array
from deploy.tensors import TensorSpec


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.empty((0, 3), np.float16),
        np.array(2.5),
        np.array([True, False]),
        np.array(["a", "word"]),
    ],
    ids=["float", "big endian, turned", "empty", "one number", "flags", "text"],
)
def test_an_array_comes_back_as_it_was(array):
    scratch = Scratch("test-")
    scratch.add(np.ones(5))
    place = scratch.add(array)
    scratch.add(np.zeros(7))
    found = scratch.get(place)
    assert found.dtype == array.dtype and found.shape == array.shape
    assert found.tolist() == array.tolist()
    found[...] = found  # it may be written to


def test_python_objects_are_not_written():
    with pytest.raises(ValueError, match="Python objects"):
        Scratch("test-").add(np.array([{}], object))


class _Garbage:
    """What is collected runs Python, in which a thread gives way to another."""

    def __init__(self):
        self.me = self

    def __del__(self):
        for _ in range(200):
            pass


@pytest.fixture
def restless():
    """Garbage is collected wherever a few objects are made, and threads change all the time."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


def _spooled(folder):
    spool = Spool(range(1))
    spool.add(0, {"x": np.zeros((1, 10), np.float32)})
    return lambda: spool.get(0)


def _archived(folder):
    file = io.BytesIO()
    np.save(file, np.zeros((1, 10), np.float32))
    return lambda: read_array(io.BytesIO(file.getvalue()), 1 << 10)


def _on_disk(folder):
    np.save(folder / "x.npy", np.zeros((1, 10), np.float32))
    return lambda: read_arrays(folder / "x.npy", (TensorSpec("x", "float32", (1, 10)),))


@pytest.mark.parametrize("way", [_spooled, _archived, _on_disk])
def test_threads_that_read_at_once_do_not_disturb_each_other(way, tmp_path, restless):
    """Python 3.11 ended some builds by "AST constructor recursion depth mismatch"."""
    errors = []

    def work(read):
        for _ in range(800):
            _Garbage()
            try:
                read()
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=[way(tmp_path)]) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors
