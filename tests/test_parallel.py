import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.feed.parallel import Pause, _OrderedRun, run_in_order

SAMPLES = [{"x": np.full(1, n)} for n in range(12)]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_are_taken_in_order(threads):
    results, busy = [], threading.Lock()

    def work(worker, number, sample):
        assert 0 <= worker < threads
        time.sleep(0.002 * (number % 3))
        return int(sample["x"][0])

    def take(number, result):
        assert busy.acquire(blocking=False)
        results.append((number, result))
        busy.release()

    assert run_in_order(SAMPLES, work, take, threads=threads) == len(SAMPLES)
    assert results == [(n + 1, n) for n in range(len(SAMPLES))]
    assert run_in_order([], work, take, threads=threads) == 0


@settings(max_examples=25)
@given(st.lists(st.floats(-1e6, 1e6), max_size=40), st.integers(1, 4))
def test_threads_keep_the_float_sum(values, threads):
    def summed(workers):
        total = [0.0]

        def take(_, value):
            total[0] += value

        samples = ({"x": np.array([v])} for v in values)
        run_in_order(samples, lambda w, n, s: float(s["x"][0]), take, threads=workers)
        return total[0]

    assert summed(threads) == summed(1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("where", ["samples", "work", "take"])
def test_failure_ends_all_threads(where, threads):
    def samples():
        yield from SAMPLES[:3]
        if where == "samples":
            raise ValueError("samples")
        yield from SAMPLES[3:]

    def work(_, number, sample):
        if where == "work" and number == 4:
            raise ValueError("work")
        return sample

    def take(number, _):
        if where == "take" and number == 4:
            raise ValueError("take")

    threads_before = threading.enumerate()
    with pytest.raises(ValueError, match=where):
        run_in_order(samples(), work, take, threads=threads)
    assert not {thread.name for thread in threading.enumerate() if thread not in threads_before}


@pytest.mark.parametrize("threads", [1, 3])
def test_pause_waits_for_all_results(threads):
    busy, rested, results = [], [], []

    def work(_, number, sample):
        busy.append(number)
        time.sleep(0.001)
        busy.remove(number)
        return number

    def use(number):
        assert not busy
        assert results == list(range(3, number + 1))
        rested.append(number)

    pause = Pause(is_due=lambda number: number % 4 == 0, run=use)
    options = {"threads": threads, "first_number": 3, "pause": pause}
    took = run_in_order(SAMPLES, work, lambda n, _: results.append(n), **options)
    assert took == len(SAMPLES)
    assert results[-1] == 14
    assert set(rested) == {4, 8, 12}


class Ended(BaseException):
    """The user's."""


@pytest.mark.parametrize("threads", [1, 3])
def test_interrupt_takes_results_of_drawn_items(threads, monkeypatch):
    results, rested, begun = [], [], []

    def raised(*_):
        raise Ended

    def work(_, number, sample):
        begun.append(number)
        if number == 5:
            signal.raise_signal(signal.SIGUSR1)  # in this thread, which is not the main one
        assert number < 5 or has_ended.wait(300)

    def finished(self):
        finish(self)
        has_ended.set()

    has_ended, finish = threading.Event(), _OrderedRun.stop_drawing
    monkeypatch.setattr(_OrderedRun, "stop_drawing", finished)
    pause = Pause(is_due=lambda number: False, run=rested.append)
    samples = ({"x": np.zeros(1)} for _ in range(1000))
    handler_before = signal.signal(signal.SIGUSR1, raised)
    try:
        with pytest.raises(Ended):
            run_in_order(
                samples, work, lambda n, _: results.append(n), threads=threads, pause=pause
            )
    finally:
        signal.signal(signal.SIGUSR1, handler_before)
    assert 5 <= len(begun) < 5 + threads
    assert results == sorted(begun)
    assert rested == [len(results)]


def test_no_pause_after_failure():
    rested = []

    def work(_, number, sample):
        raise Ended

    pause = Pause(is_due=lambda number: False, run=rested.append)
    with pytest.raises(Ended):
        run_in_order(SAMPLES, work, lambda *_: None, threads=2, pause=pause)
    assert not rested
