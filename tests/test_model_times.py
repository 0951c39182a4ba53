"""How often models are timed, on a clock that is put in place of the machine's."""

from types import SimpleNamespace

import onnx
import pytest

from deploy.tuning import timing


@pytest.mark.parametrize(
    ("times", "runs", "best"),
    [
        ([5.0] * 12, 4, 5.0),  # nothing to wait for
        ([9.0, 9.0, 8.0, 9.0, 5.0, 5.05, 5.05, 4.95, 3.0], 8, 4.95),  # 5 to 4.95 is noise
        ([8.0 - number for number in range(8)], 8, 1.0),  # never calm: at most 8
    ],
)
def test_splits_are_timed_until_stable(times, runs, best, monkeypatch):
    remaining_times = iter(times)
    monkeypatch.setattr(timing, "quickest_ms", lambda *_, **__: next(remaining_times))
    (model_time,) = timing.time_models([onnx.ModelProto()], [{}], threads=1)
    assert model_time.ms == best
    assert len(list(remaining_times)) == len(times) - runs


@pytest.mark.parametrize(
    ("int8", "float32", "faster"),
    [
        ([8.0] * 4, [10.0] * 4, True),
        ([9.9] * 4, [10.0] * 4, False),  # no more than clocks differ by
        ([8.0, 9.9] * 2, [10.0] * 4, False),  # nor than the same model's times differ by
    ],
)
def test_int8_is_faster_beyond_the_spread(int8, float32, faster, monkeypatch):
    remaining_times = iter([ms for pair in zip(int8, float32, strict=True) for ms in pair])
    monkeypatch.setattr(timing, "quickest_ms", lambda *_, **__: next(remaining_times))
    models = onnx.ModelProto(), onnx.ModelProto()
    assert timing.int8_is_faster(*models, [{}], threads=1) == faster


@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, 8), (1.75, 5), (4.0, 2), (100.0, 2)])
def test_slow_models_limit_the_timing_rounds(seconds, rounds, monkeypatch):
    now, took = [0.0], []

    def quickest(model, feeds, *, threads):
        now[0] += seconds
        took.append(0.5 ** len(took))  # quicker each time
        return took[-1]

    monkeypatch.setattr(timing, "quickest_ms", quickest)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    timing.time_models([onnx.ModelProto()] * 2, [{}], threads=1)
    assert len(took) == 2 * rounds
