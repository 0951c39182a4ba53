import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from calibrators.amct.recorders import ChannelMaxOf, HfmgOf, IfmrOf
from calibrators.errors import CalibrationError
from calibrators.statistics import AmaxOf, HistogramOf
from deploy.calibration import store
from deploy.calibration.fingerprint import Fingerprint
from deploy.calibration.observation import Observation, ObservedStatistics, Variant
from deploy.calibration.reuse import CachePolicy, check_cache
from deploy.calibration.sample_checks import Outlier
from deploy.errors import CacheError

STATISTICS = [
    HistogramOf(),
    HistogramOf(first_batch=2),
    AmaxOf(2),
    IfmrOf(),
    IfmrOf(samples=3),
    HfmgOf(nbins=1024),
    ChannelMaxOf(axis=1),
]
FOLDED = Variant("folded", lambda _: None)
TEXT = b"TRT-8503-EntropyCalibration2\nx: 3c008912\n"
MARK = Fingerprint(
    model={"graph": "m"},
    images={"count": 2},
    order="ab",
    preprocess={},
    decoder={},
    program="calib8",
    rule="histogram",
    method="mse",
    numbers={"a": 1},
    versions={"b": "1"},
)
VALUES = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)
BATCHES = st.lists(arrays.arrays(np.float32, (1, 3, 4), elements=VALUES), min_size=1, max_size=4)


def recorded(statistic, batches):
    lead = None if statistic.lead is None else recorded(statistic.lead, batches)
    recorder = statistic.recorder(lead)
    for batch in batches:
        recorder.observe(batch)
    return recorder


def are_equal(left, right):
    a, b = left.to_arrays(), right.to_arrays()
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("statistic", STATISTICS, ids=lambda s: s.key)
@settings(max_examples=30)
@given(batches=BATCHES)
def test_statistics_survive_saving(statistic, batches):
    recorder = recorded(statistic, batches)
    restored = statistic.restore(recorder.to_arrays())
    assert are_equal(restored, recorder)
    if statistic.samples is None:  # it goes on from there as if it had never been stored
        recorder.observe(batches[0])
        restored.observe(batches[0])
        assert are_equal(restored, recorder)


def test_many_values_are_restored_as_counts():
    rng = np.random.default_rng(2)
    recorder = recorded(IfmrOf(), [rng.standard_normal((1, 70_000)).astype(np.float32)])
    assert recorder.counts.size
    assert are_equal(IfmrOf().restore(recorder.to_arrays()), recorder)


@pytest.mark.parametrize("count", [9, 70_000])
@pytest.mark.parametrize(("place", "value"), [(0, np.nan), (0, 5.0), (1, np.inf), (2, -1.0)])
def test_values_beyond_their_range_are_refused(count, place, value):
    """The kernel counts them without a check, and would write beyond its bins."""
    data = np.linspace(-1, 1, count, dtype=np.float32)[None]
    arrays = recorded(IfmrOf(), [data]).to_arrays()
    arrays["reals"][place] = value
    with pytest.raises(CalibrationError, match="must lie within"):
        IfmrOf().restore(arrays)


def observation(statistic, tensor="x", variant=FOLDED):
    return Observation(variant, tensor, statistic)


ONE = [observation(HistogramOf())]


def save_and_load(path: Path, observations) -> None:
    batches = [np.arange(12, dtype=np.float32).reshape(1, 3, 4)]
    observed = ObservedStatistics({o.key: recorded(o.statistic, batches) for o in observations})
    store.save_calibration(
        store.Calibration(observed=observed, fingerprint=MARK), path, cache_text=TEXT
    )


@pytest.mark.parametrize("part", ["fingerprint", "observations", "sha256"])
def test_changed_json_is_refused(part, tmp_path, wording):
    save_and_load(tmp_path / "c", ONE)
    side = store.sidecars(tmp_path / "c")[0]
    document = json.loads(side.read_text())
    parts = {"fingerprint": {"method": "minmax"}, "observations": [], "sha256": {"this": "0" * 64}}
    document[part] = parts[part] and document[part] | parts[part]
    side.write_text(json.dumps(document))
    with pytest.raises(CacheError) as refusal:
        store.load_calibration(tmp_path / "c")
    wording.check(refusal.value)


def test_observations_are_reused_separately(tmp_path):
    path = tmp_path / "c"
    other_variant = Variant("other", lambda _: None)
    here = [observation(HistogramOf()), observation(IfmrOf(), "y", other_variant)]
    save_and_load(path, here)
    more_observations = [
        *here,
        observation(HistogramOf(), "z"),
        observation(HistogramOf(first_batch=2)),
    ]
    verdict = check_cache(CachePolicy(path=path), lambda _: MARK, more_observations)
    assert set(verdict.observed) == {o.key for o in here}
    assert verdict.missing == tuple(more_observations[2:])
    assert "lacks 2 observations" in verdict.reason
    with pytest.raises(CacheError, match="lacks 2 observations"):
        check_cache(CachePolicy(path=path, require=True), lambda _: MARK, more_observations)
    assert not check_cache(CachePolicy(path=path, require=True), lambda _: MARK, here).missing


def test_unrequested_observations_are_carried_unchanged(tmp_path):
    path = tmp_path / "c"
    save_and_load(path, [observation(HistogramOf()), observation(HfmgOf(), "y")])
    stored = store.load_calibration(path)
    of_y = stored.read_arrays([("folded", "y", HfmgOf().key)])
    calibration = store.Calibration(observed=stored.observed(ONE), fingerprint=MARK)
    store.save_calibration(calibration, path, cache_text=TEXT, retained=of_y)
    assert set(store.load_calibration(path).keys) == set(stored.keys)


def test_outliers_are_kept_with_observations(tmp_path):
    there, gone = (Outlier("folded", tensor, ("ab",), 9.5) for tensor in "xy")
    observed = ObservedStatistics({o.key: recorded(o.statistic, [np.ones((1, 3, 4))]) for o in ONE})
    calibration = store.Calibration(observed=observed, fingerprint=MARK, outliers=(there, gone))
    store.save_calibration(calibration, tmp_path / "c", cache_text=TEXT)
    assert store.load_calibration(tmp_path / "c").outliers == (there,)


def test_stored_bytes_ignore_observation_order(tmp_path):
    observations = [observation(s, t) for s in (HistogramOf(), IfmrOf()) for t in "abc"]
    save_and_load(tmp_path / "one", observations)
    save_and_load(tmp_path / "two", observations[::-1])
    sorted_bytes = [path.read_bytes() for path in store.sidecars(tmp_path / "one")]
    reversed_bytes = [path.read_bytes() for path in store.sidecars(tmp_path / "two")]
    assert sorted_bytes == reversed_bytes


def test_complete_values_are_not_stored(tmp_path):
    save_and_load(tmp_path / "c", [observation(IfmrOf(exact=True)), *ONE])
    assert store.load_calibration(tmp_path / "c").keys == (ONE[0].key,)


@pytest.mark.parametrize("statistic", STATISTICS, ids=lambda s: s.key)
def test_arrays_of_other_statistic_are_refused(tmp_path, statistic, wording):
    other_statistic = HfmgOf(nbins=2048) if not isinstance(statistic, HfmgOf) else HistogramOf()
    save_and_load(tmp_path / "c", [observation(other_statistic)])
    side = store.sidecars(tmp_path / "c")[0]
    document = json.loads(side.read_text())
    document["observations"] = [["folded", "x", statistic.key]]
    side.write_bytes(store.seal_json(document))
    with pytest.raises(CacheError) as refusal:
        store.load_calibration(tmp_path / "c").observed([observation(statistic)])
    wording.check(refusal.value)


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {},
        {"schema": 1},
        {"schema": 2, "observations": 3},
        {"schema": 2, "observations": [[1]]},
    ],
)
def test_sidecar_of_other_form_is_refused(tmp_path, wrong, wording):
    save_and_load(tmp_path / "c", ONE)
    store.sidecars(tmp_path / "c")[0].write_text(json.dumps(wrong))
    with pytest.raises(CacheError) as refusal:
        store.load_calibration(tmp_path / "c")
    wording.check(refusal.value)
