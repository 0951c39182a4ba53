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
def test_results_are_taken_in_order_and_one_at_a_time(threads):
    taken, busy = [], threading.Lock()

    def work(worker, number, sample):
        assert 0 <= worker < threads
        time.sleep(0.002 * (number % 3))
        return int(sample["x"][0])

    def take(number, result):
        assert busy.acquire(blocking=False)
        taken.append((number, result))
        busy.release()

    assert run_in_order(SAMPLES, work, take, threads=threads) == len(SAMPLES)
    assert taken == [(n + 1, n) for n in range(len(SAMPLES))]
    assert run_in_order([], work, take, threads=threads) == 0


@settings(max_examples=25)
@given(st.lists(st.floats(-1e6, 1e6), max_size=40), st.integers(1, 4))
def test_a_sum_of_floats_does_not_depend_on_the_threads(values, threads):
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
def test_a_failure_comes_through_and_lets_everybody_out(where, threads):
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

    before = threading.enumerate()
    with pytest.raises(ValueError, match=where):
        run_in_order(samples(), work, take, threads=threads)
    assert not {one.name for one in threading.enumerate() if one not in before}


@pytest.mark.parametrize("threads", [1, 3])
def test_nobody_works_at_a_rest_and_all_that_were_drawn_are_taken(threads):
    busy, rested, taken = [], [], []

    def work(_, number, sample):
        busy.append(number)
        time.sleep(0.001)
        busy.remove(number)
        return number

    def use(number):
        assert not busy and taken == list(range(3, number + 1))
        rested.append(number)

    rest = Pause(is_due=lambda number: number % 4 == 0, run=use)
    given = {"threads": threads, "first_number": 3, "pause": rest}
    took = run_in_order(SAMPLES, work, lambda n, _: taken.append(n), **given)
    assert took == len(SAMPLES) and taken[-1] == 14 and set(rested) == {4, 8, 12}


class Ended(BaseException):
    """The user's."""


@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupt_lets_what_was_drawn_be_taken_and_draws_nothing_more(threads, monkeypatch):
    taken, rested, begun = [], [], []

    def raised(*_):
        raise Ended

    def work(_, number, sample):
        begun.append(number)
        if number == 5:
            signal.raise_signal(signal.SIGUSR1)  # in this thread, which is not the main one
        assert number < 5 or over.wait(300)

    def finished(self):
        finish(self)
        over.set()

    over, finish = threading.Event(), _OrderedRun.finish
    monkeypatch.setattr(_OrderedRun, "finish", finished)
    rest = Pause(is_due=lambda number: False, run=rested.append)
    samples = ({"x": np.zeros(1)} for _ in range(1000))
    before = signal.signal(signal.SIGUSR1, raised)
    try:
        with pytest.raises(Ended):
            run_in_order(samples, work, lambda n, _: taken.append(n), threads=threads, pause=rest)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert 5 <= len(begun) < 5 + threads and taken == sorted(begun) and rested == [len(taken)]


def test_after_a_failure_nothing_rests_any_more():
    rested = []

    def work(_, number, sample):
        raise Ended

    rest = Pause(is_due=lambda number: False, run=rested.append)
    with pytest.raises(Ended):
        run_in_order(SAMPLES, work, lambda *_: None, threads=2, pause=rest)
    assert not rested
