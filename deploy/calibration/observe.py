"""Run the model once over the feed and stream every wanted tensor into its histogram.

The model is tapped: the wanted tensors become outputs of it, and ONNX Runtime still optimises
the rest. Each worker thread takes one sample at a time, runs it with one thread inside, and adds
to histograms of its own, which are merged at the end. Samples are always run alone (or in the
model's fixed batch), so neither the number of workers nor any batch size can change a bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.statistics import Statistics
from deploy.errors import BackendError, FeedError
from deploy.graph.edit import with_outputs
from deploy.ort import OrtSession
from deploy.tensors import Array

Sample = Mapping[str, Array]
Progress = Callable[[], None]


def observe(
    model: onnx.ModelProto,
    tensors: Iterable[str],
    samples: Iterable[Sample],
    *,
    threads: int = 2,
    progress: Progress = lambda: None,
) -> Statistics:
    """One pass in any order: the order-independent statistics of `tensors`.

    Args:
        model: cleaned float model.
        tensors: names of float tensors to watch, inputs included.
        samples: {input: array} of one inference each; drawn under a lock, once.
        threads: worker threads, each running whole samples.
        progress: called after every sample.

    Raises:
        FeedError: there was no sample.
        CalibrationError: a tensor held NaN, named with its sample.
        BackendError: ONNX Runtime refused the model or a sample.
    """
    names = list(tensors)
    tap = Tap(model, names)
    source = _Locked(samples)
    parts = [Statistics.empty(names) for _ in range(max(1, threads))]
    work = [(part, source, tap, progress) for part in parts]
    if len(work) == 1:
        _drain(*work[0])
    else:
        with ThreadPoolExecutor(len(work)) as pool:
            for done in [pool.submit(_drain, *w) for w in work]:
                done.result()
    if source.drawn == 0:
        raise FeedError("a calibration needs at least one sample, got none")
    for part in parts[1:]:
        parts[0].merge(part)
    return parts[0]


def observe_by_batches(
    model: onnx.ModelProto,
    tensors: Iterable[str],
    samples: Callable[[], Iterable[Sample]],
    *,
    batch_size: int,
    progress: Progress = lambda: None,
) -> Statistics:
    """TensorRT's range rule: the first `batch_size` samples set each tensor's base range.

    The first batch is run twice, once for its maxima and once to be counted; every sample is
    counted in the feed's order, since that order shows in the result.

    Raises:
        As `observe`.
    """
    names = list(tensors)
    tap = Tap(model, names)
    bases = dict.fromkeys(names, 0.0)
    for sample in islice(samples(), batch_size):
        for name, value in tap.run(sample):
            bases[name] = max(bases[name], float(np.abs(value).max(initial=0)))
    finite = {name: base if np.isfinite(base) else 0.0 for name, base in bases.items()}
    statistics = Statistics.empty(names, finite)
    source = _Locked(samples())
    _drain(statistics, source, tap, progress)
    if source.drawn == 0:
        raise FeedError("a calibration needs at least one sample, got none")
    return statistics


class Tap:
    """A model whose inner tensors can be read: a session with them as outputs."""

    def __init__(self, model: onnx.ModelProto, tensors: list[str]) -> None:
        self._inputs = {i.name for i in model.graph.input}
        self._fed = [name for name in tensors if name in self._inputs]
        self._made = [name for name in tensors if name not in self._inputs]
        self._session = OrtSession.open(with_outputs(model, self._made), threads=1)

    def run(self, sample: Sample) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Run one sample; gives each watched tensor's name and value."""
        try:
            values = self._session.run(sample)
        except BackendError as error:
            raise BackendError(f"could not run a sample: {error}") from error
        for name in self._fed:
            yield name, np.asarray(sample[name], np.float32)
        for name in self._made:
            yield name, values.pop(name)  # let go of each tensor once it is counted


class _Locked:
    """One iterator for several threads."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._iterator = iter(samples)
        self._lock = threading.Lock()
        self._stopped = False
        self.drawn = 0

    def draw(self) -> tuple[int, Sample] | None:
        with self._lock:
            if self._stopped:
                return None
            try:
                sample = next(self._iterator, None)
            except BaseException:
                self._stopped = True
                raise
            if sample is None:
                self._stopped = True
                return None
            self.drawn += 1
            return self.drawn, sample

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            close = getattr(self._iterator, "close", None)
            if close is not None:
                close()


def _drain(statistics: Statistics, source: _Locked, tap: Tap, progress: Progress) -> None:
    try:
        while (drawn := source.draw()) is not None:
            number, sample = drawn
            for name, value in tap.run(sample):
                try:
                    statistics[name].observe(value)
                except CalibrationError as error:
                    raise CalibrationError(
                        f"tensor {name} of sample {number}: {error};"
                        " check the model's weights and the preprocessing"
                    ) from error
            progress()
    except BaseException:
        source.stop()
        raise
