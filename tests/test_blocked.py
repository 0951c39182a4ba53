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

    tensor, in_channels = "x", 3
    for count in channels:
        tensor = add("Conv", tensor, weights=(count, in_channels, 3, 3), pads=[1] * 4)
        tensor = add(ends, tensor)
        depthwise = add("Conv", tensor, weights=(count, 1, 3, 3), pads=[1] * 4, group=count)
        tensor = add("Add", add("Sigmoid", depthwise), tensor)
        tensor, in_channels = add("MaxPool", tensor, kernel_shape=[3, 3], pads=[1] * 4), count
    grouped = add("Conv", tensor, weights=(16, in_channels, 1, 1))
    grouped = add("Relu", add("Conv", grouped, weights=(32, 8, 1, 1), group=2))
    grouped = add("Concat", grouped, grouped, axis=1)
    add("Flatten", grouped)  # reads what it reads in the ordinary layout
    model = make_model(nodes, {"x": ["n", 3, 9, 7]}, {tensor: None}, constants, opset=17)
    return model, [node.name for node in nodes]


def batches(*sizes):
    rng = np.random.default_rng(2)
    return [{"x": rng.normal(size=(n, 3, 9, 7)).astype(np.float32)} for n in sizes]


def state(model, tensors, samples, *statistics, threads=1):
    variant = Variant("float", lambda _: model)
    observations = [
        Observation(variant, name, statistic) for name in tensors for statistic in statistics
    ]
    observed = observe(observations, samples, threads=threads)
    states = []
    for observation in observations:
        arrays = observed.recorder(observation).to_arrays()
        states.append({name: values.tolist() for name, values in arrays.items()})
    return states


@pytest.fixture
def ordinary(monkeypatch):
    """Calls what follows without blocks."""

    def call(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(taps, "expose_blocked", lambda *_: {})
            return function(*arguments, **options)

    return call


def has_blocks():
    try:
        return taps.block_size() > 1
    except BackendError:
        return False


needs_blocks = pytest.mark.skipif(not has_blocks(), reason="ONNX Runtime has no blocks here")


@pytest.mark.parametrize("channels", [*((n,) for n in ODD), ODD, (8, 16, 32)])
@pytest.mark.parametrize("sizes", [(1, 1), (2,), (3, 3, 1), (5, 4, 2)])
def test_blocked_statistics_equal_ordinary_ones(ordinary, channels, sizes):
    model, tensors = network(channels)
    samples = batches(*sizes)
    for statistic in (HistogramOf(), AmaxOf(len(samples))):
        expected = ordinary(state, model, tensors, samples, statistic)
        assert state(model, tensors, samples, statistic) == expected
    expected = ordinary(state, model, tensors, samples, HistogramOf())
    assert state(model, tensors, samples, HistogramOf(), threads=3) == expected


@needs_blocks
@pytest.mark.parametrize("ends", ["Relu", "Sigmoid"])  # what fills a block is 0, or 0.5
def test_only_full_blocks_stay_blocked(ends):
    block = taps.block_size()
    model, tensors = network((*ODD, block, 2 * block), ends=ends)
    tap = Tap(model, tensors, in_any_order=tensors)
    (sample,) = batches(2)
    expected = dict(Tap(model, tensors).run(sample))
    blocked_tensors = tap.blocked
    assert len(blocked_tensors) > 4
    assert any(t.startswith("conv") for t in blocked_tensors)
    assert all(expected[t].shape[1] % block == 0 for t in blocked_tensors)
    for name, values in tap.run(sample).items():
        assert np.array_equal(np.sort(values, axis=None), np.sort(expected[name], axis=None))


@needs_blocks
def test_shared_and_ordered_tensors_are_ordinary():
    model, tensors = network((16, 32))
    opened = Tap(model, tensors, in_any_order=tensors)
    assert opened.blocked.keys().isdisjoint({t for t in tensors if t[:4] in ("conc", "flat")})
    assert set(Tap(model, tensors, in_any_order=["conv0"]).blocked) <= {"conv0"}
    assert Tap(model, tensors).blocked == {}


def test_ordered_statistics_see_ordinary_tensors(ordinary):
    model, tensors = network((16, 32))
    convolved = [name for name in tensors if name.startswith("conv")]
    samples = batches(2, 2, 1)
    for statistic in (HistogramOf(2), ChannelMaxOf(axis=1)):
        expected = ordinary(state, model, convolved, samples, statistic)
        assert state(model, convolved, samples, statistic) == expected


def test_both_kinds_of_statistics_agree(ordinary):
    model, tensors = network((16,))
    arguments = (model, tensors, batches(2, 1), HistogramOf(), HistogramOf(1))
    assert state(*arguments, threads=2) == ordinary(state, *arguments, threads=2)


def test_nan_names_its_tensor(wording):
    model, tensors = network((16,))
    bad = [{"x": np.full((1, 3, 9, 7), np.nan, np.float32)}]
    with pytest.raises(CalibrationError) as refusal:
        state(model, tensors, bad, HistogramOf())
    wording.check(refusal.value)


@pytest.mark.parametrize("error", [BackendError("no"), OSError("disk full")])
def test_failed_blocks_fall_back_to_ordinary(ordinary, monkeypatch, error):
    model, tensors = network((16,))
    samples = batches(1)
    expected = ordinary(state, model, tensors, samples, HistogramOf())

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(taps, "read_bytes", fails)
    assert Tap(model, tensors, in_any_order=tensors).blocked == {}
    assert state(model, tensors, samples, HistogramOf()) == expected


def test_temporary_folder_is_emptied(monkeypatch, tmp_path):
    monkeypatch.setattr(taps.tempfile, "tempdir", str(tmp_path))
    model, tensors = network((16,))
    Tap(model, tensors, in_any_order=tensors)
    assert list(tmp_path.iterdir()) == []


def test_blocked_cache_equals_ordinary_one(ordinary, run, small_cnn, pictures, tmp_path):
    def calibrated(name):
        options = ("--images", pictures, "--size", "16x16", "--out", tmp_path / name)
        assert run("calibrate", small_cnn, *options)[0] == 0
        with np.load(tmp_path / f"{name}.npz") as stored:
            arrays = {key: stored[key].tobytes() for key in stored.files}
        return (tmp_path / name).read_bytes(), arrays

    assert calibrated("blocked.cache") == ordinary(calibrated, "ordinary.cache")
