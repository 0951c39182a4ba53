"""Arrays in temporary files, and threads that read arrays at once."""

import gc
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from deploy.feed.array_files import read_arrays
from deploy.feed.sample_reader import SampleCache
from deploy.feed.temporary_arrays import ItemStore
from deploy.files.archives import read_array
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
def test_temporary_array_comes_back_equal(array):
    store = ItemStore()
    for values in (np.ones(5), array, np.zeros(7)):
        store.append({"x": values})
    stored = store[1]["x"]
    assert stored.dtype == array.dtype
    assert stored.shape == array.shape
    assert stored.tolist() == array.tolist()
    stored[...] = stored  # it may be written to


def test_python_objects_are_refused():
    with pytest.raises(ValueError, match="Python objects"):
        ItemStore().append({"x": np.array([{}], object)})


class CyclicGarbage:
    """Garbage that runs Python as it is collected, in which a thread gives way to another."""

    def __init__(self):
        self.me = self

    def __del__(self):
        for _ in range(200):
            pass


@pytest.fixture
def frequent_collection():
    """Garbage is collected wherever a few objects are made, and threads change all the time."""
    thresholds = gc.get_threshold()
    interval = sys.getswitchinterval()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


def make_readers(folder):
    """Return functions that read an array from a sample cache, an archive and a file."""
    row = np.zeros((1, 10), np.float32)
    file = io.BytesIO()
    spool = SampleCache(range(1))
    np.save(file, row)
    np.save(folder / "x.npy", row)
    spool.add(0, {"x": row})
    return {
        "sample cache": lambda: spool.get(0),
        "archive": lambda: read_array(io.BytesIO(file.getvalue()), 1 << 10),
        "file": lambda: read_arrays(folder / "x.npy", (TensorSpec("x", "float32", (1, 10)),)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sample cache", "archive", "file"])
def test_threads_read_arrays_at_once(kind, tmp_path, frequent_collection):
    """Python 3.11 ended some builds by "AST constructor recursion depth mismatch"."""

    def work(read):
        for _ in range(800):
            CyclicGarbage()
            read()

    reads = [make_readers(tmp_path)[kind] for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, reads)) == [None] * 4
