"""Enough samples, the right ones, and those that stand out."""

import json
import shutil
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

import calib8
from calib8 import calibrate
from calibrators.scales import Scale
from calibrators.statistics import HistogramOf
from deploy.calibration import sample_checks, store
from deploy.calibration.input_checks import check_input_samples, find_first_layer
from deploy.calibration.observation import Observation, Variant
from deploy.calibration.one_pass import alternate_halves, observe
from deploy.calibration.sample_checks import Outlier, Peaks
from deploy.calibration.stability import compare_halves, range_difference
from deploy.errors import CacheError, ConfigError
from deploy.feed.feed import open_feed
from deploy.feed.preprocess import Preprocess
from deploy.feed.sampling import Choice, next_check, sampling_order, to_sampling_order
from deploy.targets import find_target
from deploy.tensors import TensorSpec
from tests.models import as_float32, make_model, make_node, make_value, read_markdown, save_net
from tests.test_calibrator_script import PYCUDA, written

COUNT = 100


@pytest.fixture(scope="module")
def arrays(tmp_path_factory) -> Path:
    """Inputs of small_cnn in the order of two classes, the second far brighter."""
    path = tmp_path_factory.mktemp("arrays") / "x.npy"
    made = np.random.default_rng(5)
    x = made.normal(size=(1, 3, 16, 16)) + 0.05 * made.normal(size=(COUNT, 3, 16, 16))
    x[COUNT // 2 :] *= 4
    np.save(path, x.astype(np.float32))
    return path


@pytest.fixture
def calibrated(run, small_cnn, arrays, tmp_path):
    """(cache's name, *words) -> stdout; `fails` gives stderr of what must be refused."""

    def words(name, *words, images=arrays, model=small_cnn):
        feed = () if images is None else ("--images", images)
        return ("calibrate", model, *feed, "-o", tmp_path / name, "--verbose", *words)

    def call(*given, **named):
        return run.ok(*words(*given, **named))

    call.fails = lambda *given, **named: run.fails(*words(*given, **named))
    return call


def used(cache: Path) -> int:
    """How many images a cache is of."""
    document = json.loads(cache.with_name(cache.name + ".json").read_text())
    return document["fingerprint"]["made_from"]["images"]["count"]


def statistics(cache: Path) -> list[bytes]:
    return [cache.read_bytes(), cache.with_name(cache.name + ".npz").read_bytes()]


@given(st.integers(1, 700))
def test_the_first_of_every_point_are_those_that_a_limit_takes(count):
    order = to_sampling_order(range(count))
    assert sorted(order) == list(range(count))
    point = next_check(0)
    while point < count:
        assert sorted(order[:point]) == Choice(limit=point).choose(count)[0]
        point = next_check(point)


def scale(lo: float, hi: float, amax: float) -> Scale:
    return Scale(lo=lo, hi=hi, amax=amax, observed_min=lo, observed_max=hi, method="x")


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ((-1, 3, 3), (-1, 3, 3), 0), (None, None, 0), ((0, 0, 0), (0, 0, 0), 0),
        ((-1, 3, 3), (-1, 4, 3), 1 / 5), ((-1, 3, 3), (-2, 3, 3), 1 / 5),
        ((-1, 3, 3), (-1, 3, 4), 1 / 4), ((-1, 3, 3), None, 1),
    ],
)  # fmt: skip
def test_how_far_ranges_are_apart_is_a_share_of_the_wider_one(one, other, share):
    pair = [found and scale(*found) for found in (one, other)]
    assert range_difference(*pair) == range_difference(*pair[::-1]) == pytest.approx(share)


def test_all_but_a_twentieth_must_agree():
    def found(count, off):
        return {("folded", f"t{n}", "h"): scale(0, 2 if n < off else 1, 1) for n in range(count)}

    for count, able in ((9, 0), (10, 1), (29, 1), (30, 2), (100, 5)):
        for off in (able, able + 1):
            told = compare_halves(found(count, 0), found(count, off), samples=32, within=0.2)
            assert told.is_enough is (off <= able) and len(told.differences) == off
            assert ("more images" in told.sentence) is (off > able)


def watched(small_cnn) -> list[Observation]:
    variant = Variant("folded", lambda _: onnx.load(small_cnn))
    return [Observation(variant, name, HistogramOf()) for name in ("x", "r1", "logits")]


def same(one, other) -> bool:
    held = [[recorder.to_arrays() for recorder in found.values()] for found in (one, other)]
    pairs = ((a[name], b[name]) for a, b in zip(*held, strict=True) for name in a)
    return one.keys() == other.keys() and all(np.array_equal(*pair) for pair in pairs)


def slowly(samples):
    """Samples that take their time, some longer, so that workers overtake each other."""
    lock = threading.Lock()
    for number, sample in enumerate(samples):
        with lock:
            time.sleep(0.004 * (number % 3 == 0))
        yield sample


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_halves_have_one_of_every_two_samples_each(threads, small_cnn, arrays):
    samples = [{"x": row[None]} for row in np.load(arrays)[:21]]
    wanted, halves = watched(small_cnn), []
    whole = observe(wanted, slowly(samples), threads=threads, halves=halves)
    assert same(whole, observe(wanted, samples, threads=1))
    for half, odd in zip(halves, (1, 0), strict=True):
        own = [one for number, one in enumerate(samples, 1) if alternate_halves(number) % 2 == odd]
        assert same(half, observe(wanted, own, threads=1))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stop", [8, 16, 32, 64])
def test_points_are_of_just_so_many_samples(threads, stop, small_cnn, arrays):
    samples = [{"x": row[None]} for row in np.load(arrays)[:40]]
    wanted, seen = watched(small_cnn), []

    def enough(count, new, whole):
        before = seen[-1] if seen else 0
        assert same(new, observe(wanted, samples[before:count], threads=1))
        assert same(whole, observe(wanted, samples[:count], threads=1))
        seen.append(count)
        return count == stop

    found = observe(wanted, slowly(samples), threads=threads, should_stop=enough)
    assert seen == [point for point in (8, 16, 32) if point <= stop]
    assert same(found, observe(wanted, samples[:stop], threads=1))


def test_it_stops_where_a_limit_would_have_given_the_same_bytes(calibrated, tmp_path):
    out = calibrated("until.cache", "--until-stable")
    assert used(tmp_path / "until.cache") == 32 and "32 of 100 samples are used" in out
    assert "halves of 32 samples" in out and "ran 32 inferences" in out
    calibrated("limit.cache", "--limit", 32)
    calibrated("other.cache", "--until-stable", "--threads", 1)
    made = [statistics(tmp_path / f"{name}.cache") for name in ("until", "limit", "other")]
    assert made[0] == made[1] == made[2]


def test_a_cache_is_used_again_for_its_own_samples_alone(calibrated, tmp_path):
    calibrated("a.cache", "--until-stable")
    made = [path.read_bytes() for path in store.cache_files(tmp_path / "a.cache")]
    out = calibrated("a.cache", "--until-stable", "--require-cache")
    assert "ran no inference" in out and "observations of 32 images" in out
    assert "within 20 % by mse" in out
    assert [path.read_bytes() for path in store.cache_files(tmp_path / "a.cache")] == made
    assert "count 32 -> 100" in calibrated.fails("a.cache", "--require-cache")
    for words in (("--stable-within", 0.3), ("--method", "percentile")):
        err = calibrated.fails("a.cache", "--until-stable", *words, "--require-cache")
        assert "agreed within 20 % by mse, not until" in err
    out = calibrated("a.cache", "--limit", 32, "--require-cache")  # the same samples
    assert "ran no inference" in out
    calibrated("b.cache", "--limit", 32)
    err = calibrated.fails("b.cache", "--until-stable", "--require-cache")
    assert "chosen beforehand" in err


def test_what_a_target_lacks_is_observed_with_all_the_rest(calibrated, tmp_path):
    calibrated("a.cache", "--until-stable", "--target", "onnxruntime")
    words = ("--until-stable", "--target", "tensorrt", "--trt-version", "8.6.1")
    out = calibrated("a.cache", *words)
    assert "ran 32 inferences" in out and "observed at once" in out
    calibrated("b.cache", *words)
    assert statistics(tmp_path / "a.cache") == statistics(tmp_path / "b.cache")


def test_all_are_looked_at_where_halves_never_agree_or_there_are_few(calibrated, tmp_path):
    out = calibrated("a.cache", "--until-stable", "--stable-within", 0.0001)
    assert used(tmp_path / "a.cache") == COUNT
    assert "halves of 64 samples" in out and "calibrate with more images" in out
    assert "ran no inference" in calibrated("a.cache", "--require-cache")  # the same samples
    calibrated("b.cache")
    assert statistics(tmp_path / "a.cache") == statistics(tmp_path / "b.cache")
    out = calibrated("c.cache", "--until-stable", "--limit", 10)
    assert "from 16 on: there were 10" in out and "halves" not in out


def test_a_bad_picture_counts_for_nothing(calibrated, tmp_path, rng):
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels = rng.integers(0, 256, (16, 16, 3))
    for number in range(50):
        noisy = (pixels + rng.integers(-9, 10, pixels.shape)).clip(0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"{number:02}.png"), noisy)
    for place in sampling_order(50)[[0, -1]]:  # the first is among those that are looked at
        (folder / f"{place:02}.png").write_bytes(b"no picture")
    words = ("a.cache", "--until-stable", "--skip-bad")
    out = calibrated(*words, images=folder)
    assert "ran 32 inferences" in out and "1 skipped" in out
    assert used(tmp_path / "a.cache") == 33  # the bad one counts by its bytes
    calibrated(*words, "--require-cache", images=folder)


def test_what_stands_out_is_named_as_without(calibrated, arrays, tmp_path):
    x = np.load(arrays)
    place = sampling_order(100)[4]  # the fifth that is looked at
    x[place] *= 90
    np.save(tmp_path / "x.npy", x)
    for words in ((), ("--until-stable",)):
        out = calibrated("a.cache", "--refresh", *words, images=tmp_path / "x.npy")
        assert f"int8 steps: sample {place} of x.npy" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--stable-within 0.1", "give --until-stable too"),
        ("--until-stable --stable-within 1.5", "over 0 and below 1, got 1.5"),
        ("--until-stable --shard 1/2", "shard 1/2"),
        ("--until-stable --target ascend", "defined by the order of all images"),
        ("--until-stable --target tensorrt --method entropy-tensorrt", "the order of all images"),
        ("--until-stable --trust-cache", "--trust-cache"),
    ],
)
def test_what_cannot_be_is_refused(words, said, calibrated):
    assert said in calibrated.fails("a.cache", *words.split())


def test_a_fixed_batch_is_refused(calibrated, small_cnn, tmp_path):
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    path = save_net(model, tmp_path / "four.onnx")
    assert "fixed batch of 4" in calibrated.fails("a.cache", "--until-stable", model=path)


def test_a_calibrators_script_is_stopped_too(calibrated, arrays, tmp_path):
    shutil.copy(arrays, tmp_path / "x.npy")
    script = ("--calibrator-script", written(PYCUDA, tmp_path), "--target", "tensorrt")
    out = calibrated("a.cache", "--until-stable", *script, images=None)
    count = used(tmp_path / "a.cache")
    assert count < COUNT and f"{count} of 100 samples are used" in out
    calibrated("b.cache", "--limit", count, "--target", "tensorrt", "--method", "entropy")
    assert statistics(tmp_path / "a.cache") == statistics(tmp_path / "b.cache")


def test_a_build_is_that_of_the_images_that_were_used(run, small_cnn, arrays, tmp_path):
    words = ("build", small_cnn, "--images", arrays, "--effort", 0, "--duration", 0)
    code, out, err = run(*words, "--until-stable", "--out", tmp_path / "a")
    assert code in (0, 3), err
    assert "32 samples from" in out and "enough twice in a row" in read_markdown(tmp_path / "a")
    assert run(*words, "--limit", 32, "--out", tmp_path / "b")[0] == code
    for name in ("small_cnn.int8.onnx", "calib8/small_cnn.cache", "calib8/small_cnn.cache.npz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in "ab"]
    one, other = (report["engines"][1]["accuracy"] for report in reports)
    assert one["samples"] == other["samples"] == 32
    figures = [outputs["outputs"][0]["sqnr_db"] for outputs in (one, other)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)  # of one float model, run in two forms
    assert reports[0]["calibration"]["agreement"]["stopped"] is True


def test_every_report_says_whether_the_images_were_enough(command, small_cnn, arrays, tmp_path):
    words = ("build", small_cnn, "--images", arrays, "--effort", 0, "--duration", 0, "--accept")
    words += ("--limit", 2, "--out", tmp_path)
    command(*words)
    told, said = read_markdown(tmp_path), "or more between the halves of 2 samples"
    assert said in told and "calibrate with more images" in told
    part = json.loads((tmp_path / "report.json").read_text())["calibration"]["agreement"]
    assert part["samples"] == 2 and part["apart"] and min(part["apart"].values()) >= part["within"]
    page = (tmp_path / "report.html").read_text()
    assert said in page and "halves differ by" in page and all(n in page for n in part["apart"])
    command(*words)
    assert "halves" not in read_markdown(tmp_path)  # nothing was observed, so nothing is told


def test_from_python(small_cnn, arrays):
    rows = list(np.load(arrays))
    found = calib8.calibrate(small_cnn, rows, until_stable=0.2)
    assert found.feed.count == 32 and found.agreement.stopped
    assert found.to_json()["agreement"]["samples"] == 32
    found = calib8.calibrate(small_cnn, rows)
    assert found.feed.count == COUNT and found.agreement.samples == COUNT
    with pytest.raises(ConfigError, match="such as"):
        calib8.calibrate(small_cnn, rows, until_stable=float("nan"))
    targets = ["onnxruntime", find_target("tensorrt")()]
    found = calib8.calibrate(small_cnn, rows, targets=targets, until_stable=0.2)
    assert found.agreement.tensors == len(found.observations)


def test_a_cache_that_does_not_say_how_is_broken(calibrated, tmp_path, wording):
    calibrated("a.cache", "--until-stable")
    path = tmp_path / "a.cache.json"
    document = json.loads(path.read_text())
    for wrong in ({"within": 2.0, "method": "mse"}, {"within": 0.2}, [1], "x"):
        path.write_bytes(store.seal_json({**document, "until": wrong}))
        with pytest.raises(CacheError) as refusal:
            store.load_calibration(tmp_path / "a.cache")
        wording.check(refusal.value)


FASHION = Path(__file__).parent.parent / "datasets" / "fashion"
HALF = Preprocess(size=(16, 16), color="rgb", mean=(0.5,), std=(0.5,), layout="nchw")


def smooth(count=6):
    """uint8 pictures [1, 3, 16, 16] that are as smooth as photos."""
    coarse = np.random.default_rng(3).integers(0, 256, (count, 1, 3, 4, 4))
    return [np.kron(one, np.ones((1, 1, 4, 4))) for one in coarse]


def fed(how, found=None):
    held = [(one * how.scale - how.mean[0]) / how.std[0] for one in found or smooth()]
    return [{"x": one.astype(np.float32)} for one in held]


def network(before=(), *, norm=True, bias=True):
    """x -> `before` -> Conv -> BatchNormalization (with the moments of `HALF`) or a bias -> y."""
    weight = np.random.default_rng(5).normal(size=(4, 3, 3, 3)) * 0.3
    held = {"w": weight, "half": 0.5, "most": 255, "b": [0.4, -0.7, 0.5, -0.3]}
    held |= {"one": np.ones(4), "zero": np.zeros(4)}
    held |= dict(zip(("mean", "var"), moments(weight.astype(np.float32)), strict=True))
    nodes, at = [], "x"
    for op, constant in before:
        nodes.append((op, [at, constant], f"{at}_"))
        at += "_"
    last = " b" if bias and not norm else ""
    nodes.append(("Conv", f"{at} w{last}", "c", {"name": "c"}))
    if norm:
        nodes.append(("BatchNormalization", "c one zero mean var", "n", {"name": "norm"}))
    nodes.append(("Relu", "n" if norm else "c", "y"))
    ends = {"x": [1, 3, 16, 16]}, {"y": [1, 4, 14, 14]}
    return make_model(nodes, *ends, as_float32(held))


def moments(weight):
    """Mean and variance of each channel behind the Conv, of pictures fed as `HALF` has it."""
    rows = []
    for sample in fed(HALF):
        windows = np.lib.stride_tricks.sliding_window_view(sample["x"][0], (3, 3), axis=(1, 2))
        rows.append(np.einsum("chwij,ocij->ohw", windows, weight).reshape(4, -1))
    values = np.concatenate(rows, axis=1)
    return values.mean(axis=1).astype(np.float32), values.var(axis=1).astype(np.float32)


def changed(**options):
    return Preprocess.from_json({**HALF.to_json(), **options})


UNIT, RAW = changed(mean=[0.0], std=[1.0]), changed(mean=[0.0], std=[1.0], scale=1.0)


def test_a_batchnormalization_tells_the_mean_and_std_that_it_learned_with():
    assert check_input_samples(fed(HALF), HALF, network()) == []
    for how in (UNIT, RAW):
        (said,) = check_input_samples(fed(how), how, network())
        assert "pixels / 255 with mean 0.5 and std 0.5" in said and "(norm)" in said
        assert "--mean" in said


def test_arrays_of_another_unit_are_told_without_a_guess_which():
    for less, scale in ((20, 1), (0, 1 / 9e4)):
        samples = [{"x": (one["x"] - less) * np.float32(scale)} for one in fed(RAW)]
        (said,) = check_input_samples(samples, None, network())
        assert "has another unit" in said and "how the arrays were made" in said
    (said,) = check_input_samples(fed(UNIT), None, network())
    assert "does not match the training data, but pixels / 255 with mean 0.5" in said
    odd = [{"x": one["x"] * 2 + 0.5} for one in fed(UNIT)]  # other images may explain as much
    assert check_input_samples(odd, None, network()) == []


def test_a_model_that_normalises_by_itself_is_fed_pixels_as_they_are():
    net = network([("Div", "most"), ("Sub", "half"), ("Div", "half")])
    assert check_input_samples(fed(RAW), RAW, net) == []
    assert check_input_samples(fed(HALF), None, net) != []


def before_conv(op, inputs, name, **values):
    """`network` without a norm, behind a node that reads x and these constants of each channel."""
    net = network(norm=False)
    net.graph.node.insert(0, make_node(op, inputs, "x0", name))
    net.graph.node[1].input[0] = "x0"
    for k, v in values.items():
        net.graph.initializer.append(numpy_helper.from_array(np.full(3, v, np.float32), k))
    return net


def test_a_batchnormalization_at_the_input_tells_too():
    values = {"s": 1, "z": 0, "m": 127.5, "v": 5400}
    net = before_conv("BatchNormalization", "x s z m v", "data", **values)
    assert check_input_samples(fed(RAW), RAW, net) == []
    (said,) = check_input_samples(fed(UNIT), UNIT, net)
    assert "(data)" in said


def test_a_bias_tells_pixels_that_are_not_normalised_and_what_hardly_counts():
    net = network(norm=False)
    for how in (HALF, UNIT):
        assert check_input_samples(fed(how), how, net) == []
    (said,) = check_input_samples(fed(RAW), RAW, net)
    assert "pixels of 0 to 255 as they are" in said and "(c)" in said
    assert "pixels of 0 to 255" in check_input_samples(fed(RAW), None, net)[0]
    (said,) = check_input_samples([{"x": one["x"] / 255} for one in fed(UNIT)], None, net)
    assert "calibration data is too small" in said
    for less in (0.5, 7.5, 120):  # resized in float, or a mean alone
        (said,) = check_input_samples([{"x": one["x"] - less} for one in fed(RAW)], None, net)
        assert f"values of {0 - less:g} to " in said
    wide = [{"x": one["x"] / 5 - 7.5} for one in fed(RAW)]  # no pixels, whatever they are
    assert check_input_samples(wide, None, net) == []


@pytest.mark.parametrize("odd", ["x", "right", "sound", "vector", ""])
def test_every_input_is_compared_with_its_own_norm(odd):
    shapes = {"x": [1, 1, 8, 8], "right": [1, 1, 8, 8], "sound": [1, 400], "vector": [1, 2]}
    held = as_float32({"one": [1], "zero": [0], "w": [[1], [1]]}) | {"at": np.array([1])}
    nodes = [("Unsqueeze", "sound at", "s"), ("Gemm", "vector w", "v")]
    for name, read in {"x": "x", "right": "right", "sound": "s", "vector": "v"}.items():
        nodes.append(("BatchNormalization", f"{read} one zero zero one", f"{name}/n"))
    net = make_model(nodes, shapes, {f"{name}/n": None for name in shapes}, held)
    made = np.random.default_rng(0).normal
    rows = [{k: made(0, 1000 if k == odd else 1, shapes[k]) for k in shapes} for _ in range(4)]
    said = check_input_samples([as_float32(row) for row in rows], None, net)
    assert len(said) == (odd != "") and all("has another unit" in one for one in said)


def space_to_depth():
    """YOLOX's first nodes: x sliced into every second row and column, joined, a Conv."""
    held = {
        "w": np.random.default_rng(5).normal(size=(4, 12, 3, 3)).astype(np.float32) * 0.3,
        "b": np.array([0.4, -0.7, 0.5, -0.3], np.float32) * 255,
        "end": np.array([2**31]),
        "two": [2],
        "rows": [2],
        "columns": [3],
        "at0": [0],
        "at1": [1],
    }
    nodes, found = [], []
    for column in range(2):
        for row in range(2):
            tall, both = f"r{row}{column}", f"p{row}{column}"
            nodes.append(("Slice", f"x at{row} end rows two", tall))
            nodes.append(("Slice", f"{tall} at{column} end columns two", both))
            found.append(both)
    nodes.append(("Concat", found, "j", {"axis": 1}))
    nodes.append(("Conv", "j w b", "c", {"name": "c"}))
    nodes.append(("Relu", "c", "y"))
    return make_model(nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 4, 6, 6]}, held)


@pytest.mark.parametrize("reader", ["Mul", "Sub"])
def test_a_constant_may_stand_before_what_it_scales_or_shifts(reader):
    found = find_first_layer(before_conv(reader, "most x", "scaled"), "x")
    assert found is not None and found.node == "c"


@pytest.mark.parametrize(
    ("op", "reads", "place"),
    [
        *(("Relu", name, 11) for name in ("r10", "p01", "j")),
        *(("Conv", "p00 v", n) for n in (2, 11)),
    ],
)
def test_slices_that_something_else_reads_too_are_no_way_to_the_first_conv(op, reads, place):
    net = space_to_depth()
    assert find_first_layer(net, "x") is not None and len(net.graph.node) == 11
    net.graph.initializer.append(numpy_helper.from_array(np.ones((1, 3, 1, 1), np.float32), "v"))
    net.graph.node.insert(place, make_node(op, reads, "z", "z"))
    net.graph.output.append(make_value("z", None))
    assert find_first_layer(net, "x") is None


def test_a_build_that_feeds_a_sliced_stem_shares_in_place_of_pixels_says_so(run, tmp_path):
    for number, picture in enumerate(smooth()):
        cv2.imwrite(str(tmp_path / f"{number}.png"), picture[0].transpose(1, 2, 0))
    path, report = save_net(space_to_depth(), tmp_path / "net.onnx"), tmp_path / "a.json"
    words = ("build", path, "--images", tmp_path, "--duration", 0, "--effort", 0, "--accept")
    for preset, odd in (((), True), (("--preprocess", "raw"), False)):
        run.ok(*words, *preset, "--out", tmp_path, "--json", report)
        text = report.read_text()
        assert ("calibration data is too small" in text) == ("(c)" in text) == odd
        (found,) = (one["verdict"] for one in json.loads(text)["engines"] if one.get("verdict"))
        assert ("the float model's inputs are in question: " in found["reasons"][0]) == odd


@pytest.mark.parametrize("how", [HALF, None])
def test_samples_of_one_value_are_told(how):
    flat = [{"x": np.full((1, 3, 16, 16), value, np.float32)} for value in (0.5, -1)]
    assert check_input_samples([*flat, *fed(HALF)], how, network(norm=False)) == []
    nearly = [{"x": one["x"] + 1e-4 * fed(HALF)[0]["x"]} for one in flat]
    for samples in (flat, nearly):
        assert "alone, such as 0.5" in check_input_samples(samples, how, network())[0]


@pytest.mark.parametrize(
    ("rows", "few"),
    [
        ([0] * 16, True),
        ([0], True),
        ([0, 1, 2], True),
        ([0, 1, 2, 3] * 4, True),
        ([*range(4)], False),
        ([*range(8)] * 4, False),
        ([0, 1, 2, 3, 0, 1, 2], False),
        ([], True),
    ],
)
def test_too_few_different_samples_are_doubtful(run, small_cnn, tmp_path, rows, few):
    made = np.random.default_rng(0).normal(size=(8, 3, 16, 16)).astype(np.float32)
    still = made[:1] + 0.01 * made  # a scene of a camera that does not move
    np.save(tmp_path / "x.npy", made[rows] if rows else still)
    asked = ("--images", tmp_path / "x.npy", "--duration", 0, "--effort", 0, "--out", tmp_path)
    run.ok("build", small_cnn, *asked, "--accept")
    report = json.loads((tmp_path / "report.json").read_text())
    found = report["engines"][1]["verdict"]
    said = "4 samples that were looked at hardly differ"
    said = f"for ranges that hold for others ({len({*rows})} of {len(rows)})" if rows else said
    assert (found["level"] == "doubtful" and said in found["reasons"][0]) == few
    assert any(said in alert for alert in report.get("alerts", [])) == few


@pytest.mark.parametrize("silent", [False, True])
def test_a_state_at_its_start_is_no_picture_without_content(command, tmp_path, silent):
    nodes = [("Concat", "cache sound", "both", {"axis": 2}), ("Conv", "both w", "y")]
    inputs = {"cache": [1, 4, 3, 1], "sound": [1, 4, 9, 1]}
    weight = np.random.default_rng(0).normal(size=(2, 4, 2, 1)).astype(np.float32)
    onnx.save(make_model(nodes, inputs, {"y": [1, 2, 11, 1]}, {"w": weight}), tmp_path / "m.onnx")
    (tmp_path / "fed").mkdir()
    for number in range(4):
        sound = np.random.default_rng(number).normal(size=inputs["sound"]) * (not silent)
        arrays = as_float32({"cache": np.zeros(inputs["cache"]), "sound": sound})
        np.savez(tmp_path / "fed" / f"{number}.npz", **arrays)
    words = ("calibrate", tmp_path / "m.onnx", "--images", tmp_path / "fed", "-o", tmp_path / "c")
    assert ("one value alone, such as 0;" in command(*words)) == silent


def test_pictures_of_nearly_one_colour_are_told():
    dark = [one // 24 for one in smooth()]  # as 12 bits in the upper byte of 16
    (said,) = check_input_samples(fed(HALF, dark), HALF, network())
    assert "16 of 255" in said and "16-bit" in said


def test_inputs_that_are_no_pictures_and_layers_that_are_no_conv_say_nothing():
    rows = [{"x": np.arange(40, dtype=np.float32)[None], "rate": np.float32(3)}]
    assert check_input_samples(rows, None, network()) == []
    (said,) = check_input_samples([{**rows[0], "x": np.zeros((1, 40))}], None, network())
    assert "1 samples that were looked at holds one value alone, such as 0" in said
    tokens = {"ids": np.zeros((1, 9), np.int64), "mask": np.arange(9)[None] // 5}
    (said,) = check_input_samples([tokens], None, network())
    assert "one value alone, such as 0;" in said
    assert check_input_samples([{**tokens, "ids": tokens["mask"]}], None, network()) == []
    assert check_input_samples([], None, network()) == []
    assert check_input_samples(fed(RAW), RAW, network(norm=False, bias=False)) == []
    net = network()
    assert find_first_layer(net, "other") is None
    net.graph.output.append(onnx.ValueInfoProto(name="c"))
    assert find_first_layer(net, "x") is None  # somebody else reads the Conv as well
    foreign = network()  # a node of another domain may be named like a standard one
    foreign.graph.node[1].domain, foreign.graph.node[1].input[1:] = "my", []
    assert find_first_layer(foreign, "x") is None
    far = network()
    far.graph.initializer[0].data_location = TensorProto.EXTERNAL
    assert find_first_layer(far, "x") is None


@pytest.mark.parametrize(("words", "odd"), [(("--mean", 0.5, "--std", 0.5), False), ((), True)])
def test_the_demo_without_mean_and_std_is_told_by_its_norm(command, tmp_path, words, odd):
    feed = ("--images", FASHION / "calib.txt", "--limit", 20, "--duration", 0, "--effort", 0)
    words += (*feed, "--out", tmp_path, "--accept")
    said = "pixels / 255 with mean 0.5 and std 0.5"
    assert (said in command("build", FASHION / "fashion_bn.onnx", *words)) == odd
    alerts = json.loads((tmp_path / "report.json").read_text()).get("alerts", [])
    assert any(said in alert for alert in alerts) == odd
    assert (said in (tmp_path / "report.html").read_text()) == odd


SMALL = Preprocess(size=(16, 16))
ROWS = np.random.default_rng(5).standard_normal((24, 3, 16, 16)).astype(np.float32)
ODD = ROWS.copy()
ODD[7] *= 1e4
WHERE = ("v", "t")


def of(*amaxes: float) -> list[tuple[int, float]]:
    peaks = Peaks()
    for number, amax in enumerate(amaxes, 1):
        largest = sample_checks.largest_magnitude(np.array([[amax / 2, -amax]], np.float32))
        peaks.add(WHERE, number, largest)
    return [(number, times) for _, number, times in peaks.outliers()]


def test_what_stands_out_is_found():
    assert of(1, 1, 1, 1, 80) == [(5, 80)]
    at_the_limit = of(1, 1, 1, 1, sample_checks.OUTLIER_RATIO)
    assert at_the_limit == of(1, 1, 1, 80) == of(0, 0, 0, 0, 0, 80) == of() == []
    assert of(*[1] * 38, 1000, 10) == [(39, 1000), (40, 10)]  # one in twenty
    assert of(*[1] * 18, 1000, 10) == [(19, 100)]
    assert of(*[1] * 18, 1000, 1000) == []  # two of twenty are a kind of image
    assert of(1, 1, np.inf, 1, 1, 80, np.nan) == [(6, 80)]
    assert len(of(*[1] * 400, *[100] * 8)) == 8 and not of(*[1] * 400, *[100] * 9)


def test_parts_of_a_pass_find_what_one_finds():
    values = np.exp(np.random.default_rng(1).normal(size=200) * 2).astype(np.float32)
    whole = of(*values)
    for parts in (2, 3, 7):
        split = [Peaks() for _ in range(parts)]
        for number, value in enumerate(values, 1):
            split[number % parts].add(WHERE, number, float(value))
        for other in split[1:]:
            split[0].merge(other)
        assert [(n, t) for _, n, t in split[0].outliers()] == whole


def test_the_worst_are_told_first_and_the_rest_counted():
    found = {"ax": 9.0, "bx": 99.0, "by": 1234.5, "cx": 50.0, "dx": 8.5}  # digest and tensor
    outliers = [Outlier("v", tensor, (digest,), found[digest + tensor]) for digest, tensor in found]
    assert sample_checks.describe_outliers(outliers, {d: f"image {d}.png" for d in "abcd"}) == (
        "4 of the calibration samples stand far above the others, which costs the others int8"
        " steps: image b.png, whose largest |x| in 'y' is 1,234 times the others' (and far off in 1"
        " other tensor); image c.png, whose largest |x| in 'x' is 50 times the others'; image"
        " a.png, whose largest |x| in 'x' is 9 times the others'; and 1 more; check them, or leave"
        " them out"
    )


@pytest.mark.parametrize("targets", [["onnxruntime"], ["ascend"], ["onnxruntime", "tensorrt"]])
def test_an_outlier_is_named_now_and_when_the_cache_is_used_again(small_cnn, tmp_path, targets):
    cache = tmp_path / "c"
    first = calibrate(small_cnn, list(ODD), cache=cache, targets=targets)
    (said,) = first.warnings
    assert said.startswith("1 of the calibration samples stands far above the others")
    assert "sample 7 of the iterable" in said and "other tensor" in said
    again = calibrate(small_cnn, list(ODD), cache=cache, targets=targets)
    assert again.reused and again.warnings == first.warnings
    turned = calibrate(small_cnn, list(ODD[::-1]), cache=cache, targets=targets)
    assert turned.warnings == (said.replace("sample 7", "sample 16"),)


def test_it_is_the_same_for_any_number_of_threads(small_cnn, tmp_path):
    seen = set()
    for threads in (1, 2, 3):
        cache = tmp_path / str(threads)
        calibrate(small_cnn, list(ODD), cache=cache, threads=threads)
        seen.add(store.sidecars(cache)[0].read_bytes())
    assert len(seen) == 1 and json.loads(seen.pop())["outliers"]


def test_what_another_target_adds_is_told_beside_what_was_kept(small_cnn, tmp_path):
    cache = tmp_path / "c"
    both = calibrate(small_cnn, list(ODD), targets=["onnxruntime", "ascend"]).warnings
    calibrate(small_cnn, list(ODD), cache=cache, targets=["ascend"])
    added = calibrate(small_cnn, list(ODD), cache=cache, targets=["onnxruntime", "ascend"])
    assert not added.reused and added.warnings == both


def test_of_a_fixed_batch_all_that_it_holds_are_named():
    feed = open_feed(list(ODD[:10]), [TensorSpec("x", "float32", (4, 3, 16, 16))])
    with feed.samples() as samples:
        list(samples)
    feed.manifest()
    names = feed.name_by_digest()
    (said,) = [
        sample_checks.describe_outliers([Outlier("v", "t", feed.sample_digests(2), 90.0)], names)
    ]
    assert all(f"sample {number} of" in said for number in (4, 5, 6, 7))
    assert [names[d][:8] for d in feed.sample_digests(3)] == ["sample 8", "sample 9"]


def test_ordinary_feeds_hear_nothing(small_cnn, pictures):
    assert calibrate(small_cnn, pictures, preprocess=SMALL).warnings == ()
    assert calibrate(small_cnn, list(ROWS)).warnings == ()


@pytest.mark.parametrize("lengths", [(20, 31, 24, 26), (20, 20, 20, 20)])
def test_an_om_is_made_for_the_largest_sample_and_takes_no_other(lengths, run, tmp_path):
    made = np.random.default_rng(4)
    weights = {"w1": made.normal(size=(16, 8, 3)), "w2": made.normal(size=(4, 16, 1))}
    nodes = [("Conv", "x w1", "c", {"pads": [1, 1]}), ("Relu", "c", "r"), ("Conv", "r w2", "y")]
    ends = {"x": [1, 8, "length"]}, {"y": [1, 4, "length"]}
    onnx.save(make_model(nodes, *ends, as_float32(weights)), tmp_path / "m.onnx")
    (tmp_path / "rows").mkdir()
    for number, length in enumerate(lengths):
        sound = made.normal(size=(1, 8, length)).astype(np.float32)
        np.save(tmp_path / "rows" / f"{number}.npy", sound)
    words = ["build", tmp_path / "m.onnx", "--images", tmp_path / "rows", "--effort", 0]
    run.ok(*words, "--target", "ascend", "--duration", 0, "--out", tmp_path / "o")
    (target,) = json.loads((tmp_path / "o" / "report.json").read_text())["targets"]
    command, notes = (tmp_path / "o" / "m_atc.sh").read_text(), " ".join(target["notes"])
    assert f"--input_shape=x:1,8,{max(lengths)} " in command
    assert ("takes one shape" in notes) == ("x of 1x8x20 to 1x8x31" in notes) == (31 in lengths)
