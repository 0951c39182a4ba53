"""Taps in ONNX Runtime's blocks give the statistics of ordinary ones, to the last count."""

import numpy as np
import pytest

from calibrators.amct.recorders import ChannelMaxOf
from calibrators.statistics import AmaxOf, HistogramOf
from deploy.calibration import taps
from deploy.calibration.observation import Observation, Variant
from deploy.calibration.one_pass import observe
from deploy.calibration.taps import Tap
from deploy.errors import BackendError, CalibrationError
from tests.models import make_model, make_node

ODD = (3, 5, 8, 12, 17)


def network(channels, *, ends="Relu"):
    """x [n, 3, 9, 7] through convolutions of odd channels, whole, grouped and depthwise."""
    rng = np.random.default_rng(1)
    nodes, constants = [], {}

    def add(op, *inputs, weights=None, **attributes):
        name = f"{op.lower()}{len(nodes)}"
        if weights is not None:
            constants[f"{name}.w"] = rng.normal(scale=0.5, size=weights).astype(np.float32)
            inputs = [*inputs, f"{name}.w"]
        nodes.append(make_node(op, inputs, [name], name=name, **attributes))
        return name

    last, before = "x", 3
    for count in channels:
        last = add("Conv", last, weights=(count, before, 3, 3), pads=[1] * 4)
        last = add(ends, last)
        own = add("Conv", last, weights=(count, 1, 3, 3), pads=[1] * 4, group=count)
        last = add("Add", add("Sigmoid", own), last)
        last, before = add("MaxPool", last, kernel_shape=[3, 3], pads=[1] * 4), count
    grouped = add("Conv", last, weights=(16, before, 1, 1))
    grouped = add("Relu", add("Conv", grouped, weights=(32, 8, 1, 1), group=2))
    grouped = add("Concat", grouped, grouped, axis=1)
    add("Flatten", grouped)  # reads what it reads in the ordinary layout
    model = make_model(nodes, {"x": ["n", 3, 9, 7]}, {last: None}, constants, opset=17)
    return model, [node.name for node in nodes]


def batches(*sizes):
    rng = np.random.default_rng(2)
    return [{"x": rng.normal(size=(n, 3, 9, 7)).astype(np.float32)} for n in sizes]


def state(model, tensors, samples, *statistics, threads=1):
    variant = Variant("float", lambda _: model)
    wanted = [Observation(variant, name, one) for name in tensors for one in statistics]
    seen = observe(wanted, samples, threads=threads)
    return [{n: v.tolist() for n, v in seen.recorder(o).to_arrays().items()} for o in wanted]


@pytest.fixture
def ordinary(monkeypatch):
    """Calls what follows without blocks."""

    def call(function, *words, **named):
        with monkeypatch.context() as patch:
            patch.setattr(taps, "expose_blocked", lambda *_: {})
            return function(*words, **named)

    return call


def has_blocks():
    try:
        return taps.block_size() > 1
    except BackendError:
        return False


needs_blocks = pytest.mark.skipif(not has_blocks(), reason="ONNX Runtime has no blocks here")


@pytest.mark.parametrize("channels", [*((n,) for n in ODD), ODD, (8, 16, 32)])
@pytest.mark.parametrize("sizes", [(1, 1), (2,), (3, 3, 1), (5, 4, 2)])
def test_counts_and_extremes_are_those_of_ordinary_taps(ordinary, channels, sizes):
    model, tensors = network(channels)
    samples = batches(*sizes)
    for statistic in (HistogramOf(), AmaxOf(len(samples))):
        expected = ordinary(state, model, tensors, samples, statistic)
        assert state(model, tensors, samples, statistic) == expected
    expected = ordinary(state, model, tensors, samples, HistogramOf())
    assert state(model, tensors, samples, HistogramOf(), threads=3) == expected


@needs_blocks
@pytest.mark.parametrize("ends", ["Relu", "Sigmoid"])  # what fills a block is 0, or 0.5
def test_tensors_that_fill_their_blocks_stay_in_them_and_others_do_not(ends):
    block = taps.block_size()
    model, tensors = network((*ODD, block, 2 * block), ends=ends)
    tap = Tap(model, tensors, in_any_order=tensors)
    (sample,) = batches(2)
    expected = dict(Tap(model, tensors).run(sample))
    kept = tap.blocked
    assert len(kept) > 4
    assert any(t.startswith("conv") for t in kept)
    assert all(expected[t].shape[1] % block == 0 for t in kept)
    for name, values in tap.run(sample):
        assert np.array_equal(np.sort(values, axis=None), np.sort(expected[name], axis=None))


@needs_blocks
def test_what_another_node_reads_and_what_has_an_order_keeps_its_layout():
    model, tensors = network((16, 32))
    opened = Tap(model, tensors, in_any_order=tensors)
    assert opened.blocked.keys().isdisjoint({t for t in tensors if t[:4] in ("conc", "flat")})
    assert set(Tap(model, tensors, in_any_order=["conv0"]).blocked) <= {"conv0"}
    assert Tap(model, tensors).blocked == {}


def test_statistics_with_an_order_or_channels_see_the_tensor_as_it_is(ordinary):
    model, tensors = network((16, 32))
    convolved = [name for name in tensors if name.startswith("conv")]
    samples = batches(2, 2, 1)
    for statistic in (HistogramOf(2), ChannelMaxOf(axis=1)):
        expected = ordinary(state, model, convolved, samples, statistic)
        assert state(model, convolved, samples, statistic) == expected


def test_of_a_tensor_that_both_kinds_read_both_are_right(ordinary):
    model, tensors = network((16,))
    given = (model, tensors, batches(2, 1), HistogramOf(), HistogramOf(1))
    assert state(*given, threads=2) == ordinary(state, *given, threads=2)


def test_nan_is_told_with_its_tensor(wording):
    model, tensors = network((16,))
    bad = [{"x": np.full((1, 3, 9, 7), np.nan, np.float32)}]
    with pytest.raises(CalibrationError) as refusal:
        state(model, tensors, bad, HistogramOf())
    wording.check(refusal.value)


@pytest.mark.parametrize("error", [BackendError("no"), OSError("disk full")])
def test_where_the_form_cannot_be_kept_the_taps_are_ordinary(ordinary, monkeypatch, error):
    model, tensors = network((16,))
    samples = batches(1)
    expected = ordinary(state, model, tensors, samples, HistogramOf())

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(taps, "read_bytes", fails)
    assert Tap(model, tensors, in_any_order=tensors).blocked == {}
    assert state(model, tensors, samples, HistogramOf()) == expected


def test_nothing_stays_in_the_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(taps.tempfile, "tempdir", str(tmp_path))
    model, tensors = network((16,))
    Tap(model, tensors, in_any_order=tensors)
    assert list(tmp_path.iterdir()) == []


def test_caches_have_the_same_bytes_both_ways(ordinary, run, small_cnn, pictures, tmp_path):
    def calibrated(name):
        words = ("--images", pictures, "--size", "16x16", "--out", tmp_path / name)
        assert run("calibrate", small_cnn, *words)[0] == 0
        with np.load(tmp_path / f"{name}.npz") as stored:
            arrays = {key: stored[key].tobytes() for key in stored.files}
        return (tmp_path / name).read_bytes(), arrays

    assert calibrated("blocked.cache") == ordinary(calibrated, "ordinary.cache")
