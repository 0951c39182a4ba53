"""Enough samples, the right ones, and those that stand out."""

import json
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

import deploy
from calibrators.scales import Scale
from calibrators.statistics import HistogramOf
from deploy.calibration import store
from deploy.calibration.input_checks import check_input_samples, find_first_layer
from deploy.calibration.observation import Observation, Variant
from deploy.calibration.one_pass import alternate_halves, observe
from deploy.calibration.sample_checks import (
    OUTLIER_RATIO,
    Outlier,
    Peaks,
    describe_outliers,
    largest_magnitude,
)
from deploy.calibration.stability import compare_halves, range_difference
from deploy.calibration.store import sidecars
from deploy.errors import CacheError, ConfigError
from deploy.feed.feed import open_feed
from deploy.feed.preprocess import Preprocess
from deploy.feed.sampling import Choice, in_sampling_order, next_check, sampling_order
from deploy.pipeline import calibrate
from deploy.targets import find_target
from deploy.tensors import TensorSpec
from tests.models import as_float32, make_model, make_node, make_value

# --- Enough images? What halves of them say, and a run that ends where they agree.
COUNT = 100
SCRIPT = """
import os

import numpy as np
import pycuda.autoinit
import pycuda.driver as cuda
import tensorrt as trt


class Calibrator(trt.IInt8EntropyCalibrator2):
    def __init__(self):
        trt.IInt8EntropyCalibrator2.__init__(self)
        self.rows = iter(np.load(os.path.join(os.path.dirname(__file__), "x.npy")))
        self.device = cuda.mem_alloc(3 * 16 * 16 * 4)

    def get_batch_size(self):
        return 1

    def get_batch(self, names):
        row = next(self.rows, None)
        if row is None:
            return None
        cuda.memcpy_htod(self.device, np.ascontiguousarray(row).ravel())
        return [int(self.device)]

    def read_calibration_cache(self):
        return None

    def write_calibration_cache(self, cache):
        pass
"""


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
    """(cache's name, *words) -> exit code, stdout, stderr."""

    def call(name, *words, images=arrays, model=small_cnn):
        feed = () if images is None else ("--images", images)
        return run("calibrate", model, *feed, "-o", tmp_path / name, "--verbose", *words)

    return call


def used(cache: Path) -> int:
    """How many images a cache is of."""
    document = json.loads(cache.with_name(cache.name + ".json").read_text())
    return document["fingerprint"]["made_from"]["images"]["count"]


def statistics(cache: Path) -> list[bytes]:
    return [cache.read_bytes(), cache.with_name(cache.name + ".npz").read_bytes()]


@given(st.integers(1, 700))
def test_the_first_of_every_point_are_those_that_a_limit_takes(count):
    order = in_sampling_order(range(count))
    assert sorted(order) == list(range(count))
    point = next_check(0)
    while point < count:
        assert sorted(order[:point]) == Choice(most=point).of(count)[0]
        point = next_check(point)


def scale(lo: float, hi: float, amax: float) -> Scale:
    return Scale(lo=lo, hi=hi, amax=amax, observed_min=lo, observed_max=hi, method="x")


def test_how_far_ranges_are_apart_is_a_share_of_the_wider_one():
    one = scale(-1, 3, 3)
    assert range_difference(one, one) == 0 == range_difference(None, None)
    assert (
        range_difference(one, scale(-1, 4, 3))
        == pytest.approx(1 / 5)
        == range_difference(scale(-1, 4, 3), one)
    )
    assert range_difference(one, scale(-2, 3, 3)) == pytest.approx(1 / 5)
    assert range_difference(one, scale(-1, 3, 4)) == pytest.approx(1 / 4)
    assert range_difference(scale(0, 0, 0), scale(0, 0, 0)) == 0
    assert range_difference(one, None) == 1 == range_difference(None, one)


def test_all_but_a_twentieth_must_agree():
    def found(count, off):
        return {("folded", f"t{n}", "h"): scale(0, 2 if n < off else 1, 1) for n in range(count)}

    for count, able in ((9, 0), (10, 1), (29, 1), (30, 2), (100, 5)):
        for off in (able, able + 1):
            told = compare_halves(found(count, 0), found(count, off), samples=32, within=0.2)
            assert told.enough is (off <= able) and len(told.apart) == off
            assert ("more images" in told.words) is (off > able)


def watched(small_cnn) -> list[Observation]:
    variant = Variant("folded", lambda _: onnx.load(small_cnn))
    return [Observation(variant, name, HistogramOf()) for name in ("x", "r1", "logits")]


def same(one, other) -> bool:
    held = [[recorder.to_arrays() for recorder in found.values()] for found in (one, other)]
    return one.keys() == other.keys() and all(
        np.array_equal(a[name], b[name]) for a, b in zip(*held, strict=True) for name in a
    )


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

    found = observe(wanted, slowly(samples), threads=threads, enough=enough)
    assert seen == [point for point in (8, 16, 32) if point <= stop]
    assert same(found, observe(wanted, samples[:stop], threads=1))


def test_it_stops_where_a_limit_would_have_given_the_same_bytes(calibrated, tmp_path):
    code, out, err = calibrated("until.cache", "--until-stable")
    assert code == 0, err
    assert used(tmp_path / "until.cache") == 32
    assert "32 of 100 samples are used" in out
    assert "halves of 32 samples" in out
    assert "ran 32 inferences" in out
    assert calibrated("limit.cache", "--limit", 32)[0] == 0
    assert statistics(tmp_path / "until.cache") == statistics(tmp_path / "limit.cache")
    calibrated("other.cache", "--until-stable", "--threads", 1)
    assert statistics(tmp_path / "other.cache") == statistics(tmp_path / "until.cache")


def test_the_same_command_uses_its_cache_again(calibrated, tmp_path):
    calibrated("a.cache", "--until-stable")
    made = [path.read_bytes() for path in store.cache_files(tmp_path / "a.cache")]
    code, out, _ = calibrated("a.cache", "--until-stable", "--require-cache")
    assert code == 0 and "ran no inference" in out and "observations of 32 images" in out
    assert "within 20 % by mse" in out
    assert [path.read_bytes() for path in store.cache_files(tmp_path / "a.cache")] == made


def test_a_cache_is_of_its_own_samples_alone(calibrated, tmp_path):
    calibrated("a.cache", "--until-stable")
    code, _, err = calibrated("a.cache", "--require-cache")
    assert code == 1 and "count 32 -> 100" in err
    for words in (("--stable-within", 0.3), ("--method", "percentile")):
        code, _, err = calibrated("a.cache", "--until-stable", *words, "--require-cache")
        assert code == 1 and "agreed within 20 % by mse, not until" in err
    code, out, _ = calibrated("a.cache", "--limit", 32, "--require-cache")  # the same samples
    assert code == 0 and "ran no inference" in out
    calibrated("b.cache", "--limit", 32)
    code, _, err = calibrated("b.cache", "--until-stable", "--require-cache")
    assert code == 1 and "chosen beforehand" in err


def test_what_a_target_lacks_is_observed_with_all_the_rest(calibrated, tmp_path):
    calibrated("a.cache", "--until-stable", "--target", "onnxruntime")
    words = ("--until-stable", "--target", "tensorrt", "--trt-version", "8.6.1")
    code, out, _ = calibrated("a.cache", *words)
    assert code == 0 and "ran 32 inferences" in out and "observed at once" in out
    calibrated("b.cache", *words)
    assert statistics(tmp_path / "a.cache") == statistics(tmp_path / "b.cache")


def test_all_are_looked_at_where_halves_never_agree(calibrated, tmp_path):
    code, out, _ = calibrated("a.cache", "--until-stable", "--stable-within", 0.0001)
    assert code == 0 and used(tmp_path / "a.cache") == COUNT
    assert "halves of 64 samples" in out and "calibrate with more images" in out
    code, out, _ = calibrated("a.cache", "--require-cache")  # the same samples
    assert code == 0 and "ran no inference" in out
    calibrated("b.cache")
    assert statistics(tmp_path / "a.cache") == statistics(tmp_path / "b.cache")


def test_few_samples_tell_nothing(calibrated):
    code, out, _ = calibrated("a.cache", "--until-stable", "--limit", 10)
    assert code == 0 and "from 16 on: there were 10" in out and "halves" not in out


def test_a_bad_picture_counts_for_nothing(calibrated, run, small_cnn, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    made = np.random.default_rng(3)
    pixels = made.integers(0, 256, (16, 16, 3))
    for number in range(50):
        noisy = (pixels + made.integers(-9, 10, pixels.shape)).clip(0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"{number:02}.png"), noisy)
    for place in sampling_order(50)[[0, -1]]:  # the first is among those that are looked at
        (folder / f"{place:02}.png").write_bytes(b"no picture")
    code, out, _ = calibrated("a.cache", "--until-stable", "--skip-bad", images=folder)
    assert code == 0 and "ran 32 inferences" in out and "1 skipped" in out
    assert used(tmp_path / "a.cache") == 33  # the bad one counts by its bytes
    words = ("--until-stable", "--skip-bad", "--require-cache")
    assert calibrated("a.cache", *words, images=folder)[0] == 0


def test_what_stands_out_is_named_as_without(calibrated, arrays, tmp_path):
    x = np.load(arrays)
    place = sampling_order(100)[4]  # the fifth that is looked at
    x[place] *= 90
    np.save(tmp_path / "x.npy", x)
    for words in ((), ("--until-stable",)):
        code, out, _ = calibrated("a.cache", "--refresh", *words, images=tmp_path / "x.npy")
        assert code == 0 and f"int8 steps: sample {place} of x.npy" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stable-within", 0.1), "give --until-stable too"),
        (("--until-stable", "--stable-within", 1.5), "over 0 and below 1, got 1.5"),
        (("--until-stable", "--shard", "1/2"), "shard 1/2"),
        (("--until-stable", "--target", "ascend"), "defined by the order of all images"),
        (
            ("--until-stable", "--target", "tensorrt", "--method", "entropy-tensorrt"),
            "defined by the order of all images",
        ),
        (("--until-stable", "--trust-cache"), "--trust-cache"),
    ],
)
def test_what_cannot_be_is_refused(words, said, calibrated):
    code, _, err = calibrated("a.cache", *words)
    assert code == 1 and said in err


def test_a_fixed_batch_is_refused(calibrated, small_cnn, tmp_path):
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, tmp_path / "four.onnx")
    code, _, err = calibrated("a.cache", "--until-stable", model=tmp_path / "four.onnx")
    assert code == 1 and "fixed batch of 4" in err


def test_a_calibrators_script_is_stopped_too(calibrated, arrays, tmp_path):
    np.save(tmp_path / "x.npy", np.load(arrays))
    (tmp_path / "old.py").write_text(SCRIPT)
    script = ("--calibrator-script", f"{tmp_path}/old.py:Calibrator", "--target", "tensorrt")
    code, out, err = calibrated("a.cache", "--until-stable", *script, images=None)
    assert code == 0, err
    count = used(tmp_path / "a.cache")
    assert count < COUNT and f"{count} of 100 samples are used" in out
    calibrated("b.cache", "--limit", count, "--target", "tensorrt", "--method", "entropy")
    assert statistics(tmp_path / "a.cache") == statistics(tmp_path / "b.cache")


def test_a_build_is_that_of_the_images_that_were_used(run, small_cnn, arrays, tmp_path):
    words = ("build", small_cnn, "--images", arrays, "--effort", 0, "--duration", 0)
    code, out, err = run(*words, "--until-stable", "--out", tmp_path / "a")
    assert code in (0, 3), err
    assert "32 samples from" in out and "enough twice in a row" in " ".join(out.split())
    assert run(*words, "--limit", 32, "--out", tmp_path / "b")[0] == code
    for name in ("small_cnn.int8.onnx", "small_cnn.cache", "small_cnn.cache.npz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in "ab"]
    one, other = (report["engines"][1]["accuracy"] for report in reports)
    assert one["samples"] == other["samples"] == 32
    figures = [outputs["outputs"][0]["sqnr_db"] for outputs in (one, other)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)  # of one float model, run in two forms
    assert reports[0]["calibration"]["agreement"]["stopped"] is True


def test_every_report_says_whether_the_images_were_enough(run, small_cnn, arrays, tmp_path):
    words = ("build", small_cnn, "--images", arrays, "--effort", 0, "--duration", 0)
    code, out, err = run(*words, "--limit", 2, "--out", tmp_path / "few")
    assert code in (0, 3), err
    said = "or more between the halves of 2 samples"
    assert said in " ".join(out.split()) and "calibrate with more images" in " ".join(out.split())
    part = json.loads((tmp_path / "few" / "report.json").read_text())["calibration"]["agreement"]
    assert part["samples"] == 2 and part["apart"] and min(part["apart"].values()) >= part["within"]
    page = (tmp_path / "few" / "report.html").read_text()
    assert said in page and "halves differ by" in page and all(n in page for n in part["apart"])
    assert said in (tmp_path / "few" / "report.md").read_text()
    code, out, _ = run(*words, "--limit", 2, "--out", tmp_path / "few")
    assert "halves" not in out  # nothing was observed, so nothing is told


def test_from_python(small_cnn, arrays):
    rows = list(np.load(arrays))
    found = deploy.calibrate(small_cnn, rows, until_stable=0.2)
    assert found.feed.count == 32 and found.agreement.stopped
    assert found.to_json()["agreement"]["samples"] == 32
    found = deploy.calibrate(small_cnn, rows)
    assert found.feed.count == COUNT and found.agreement.samples == COUNT
    with pytest.raises(ConfigError, match="such as"):
        deploy.calibrate(small_cnn, rows, until_stable=float("nan"))


def test_two_targets_are_looked_at_together(small_cnn, arrays):
    targets = ["onnxruntime", find_target("tensorrt")()]
    found = deploy.calibrate(small_cnn, list(np.load(arrays)), targets=targets, until_stable=0.2)
    assert found.agreement.tensors == len(found.observations)


def test_a_cache_that_does_not_say_how_is_broken(calibrated, tmp_path):
    calibrated("a.cache", "--until-stable")
    path = tmp_path / "a.cache.json"
    document = json.loads(path.read_text())
    for wrong in ({"within": 2.0, "method": "mse"}, {"within": 0.2}, [1], "x"):
        path.write_bytes(store.seal_json({**document, "until": wrong}))
        with pytest.raises(CacheError, match="until when it was observed"):
            store.load_calibration(tmp_path / "a.cache")


# --- What is fed, held against what the model's first layer learned from.
FASHION = Path(__file__).parent.parent / "datasets" / "fashion"
HALF = Preprocess(size=(16, 16), color="rgb", mean=(0.5,), std=(0.5,), layout="nchw")


def smooth(count=6):
    """uint8 pictures [1, 3, 16, 16] that are as smooth as photos."""
    coarse = np.random.default_rng(3).integers(0, 256, (count, 1, 3, 4, 4))
    return [np.kron(one, np.ones((1, 1, 4, 4))) for one in coarse]


def fed(how, found=None):
    return [
        {"x": ((p * how.scale - how.mean[0]) / how.std[0]).astype(np.float32)}
        for p in (found or smooth())
    ]


def network(before=(), *, norm=True, bias=True, layout="nchw"):
    """x -> `before` -> Conv -> BatchNormalization (with the moments of `HALF`) or a bias -> y."""
    weight = np.random.default_rng(5).normal(size=(4, 3, 3, 3)).astype(np.float32) * 0.3
    held = {"w": weight, "half": np.float32(0.5), "most": np.float32(255)}
    held |= {"b": np.array([0.4, -0.7, 0.5, -0.3], np.float32)}
    nodes, at = [], "x"
    for op, constant in before:
        nodes.append(make_node(op, [at, constant], f"{at}_", name=op))
        at += "_"
    with_bias = bias and not norm
    nodes.append(make_node("Conv", [at, "w", *(["b"] if with_bias else [])], "c", name="c"))
    if norm:
        held |= dict(zip(("mean", "var"), moments(weight), strict=True))
        held |= {"one": np.ones(4, np.float32), "zero": np.zeros(4, np.float32)}
        nodes.append(make_node("BatchNormalization", "c one zero mean var", "n", "norm"))
    nodes.append(make_node("Relu", [nodes[-1].output[0]], "y", name="r"))
    return make_model(nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 4, 14, 14]}, held)


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
    (said,) = check_input_samples(fed(RAW), None, network())
    assert "has another unit" in said and "how the arrays were made" in said
    (said,) = check_input_samples([{"x": one["x"] / 1000} for one in fed(HALF)], None, network())
    assert "has another unit" in said
    assert check_input_samples(fed(UNIT), None, network()) == []  # other images may explain as much


def test_a_model_that_normalises_by_itself_is_fed_pixels_as_they_are():
    net = network([("Div", "most"), ("Sub", "half"), ("Div", "half")])
    assert check_input_samples(fed(RAW), RAW, net) == []
    assert check_input_samples(fed(HALF), None, net) != []


def test_a_batchnormalization_at_the_input_tells_too():
    net = network(norm=False)
    net.graph.node.insert(0, make_node("BatchNormalization", "x s z m v", "x0", "data"))
    net.graph.node[1].input[0] = "x0"
    values = {"s": 1, "z": 0, "m": 127.5, "v": 5400}
    net.graph.initializer.extend(
        numpy_helper.from_array(np.full(3, v, np.float32), k) for k, v in values.items()
    )
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
    wide = [{"x": one["x"] * 200 - 7.5} for one in fed(UNIT)]  # no pixels, whatever they are
    assert check_input_samples(wide, None, net) == []


def space_to_depth(parts=2):
    """YOLOX's first nodes: x sliced into `parts` of every second row and column, joined, a Conv."""
    made = np.random.default_rng(5)
    held = {
        "w": made.normal(size=(4, 3 * parts**2, 3, 3)).astype(np.float32) * 0.3,
        "b": np.array([0.4, -0.7, 0.5, -0.3], np.float32) * 255, "end": np.array([2**31]),
        "two": np.array([parts]), "rows": np.array([2]), "columns": np.array([3]),
    }  # fmt: skip
    held |= {f"at{n}": np.array([n]) for n in range(parts)}
    nodes, found = [], []
    for column in range(parts):
        for row in range(parts):
            tall, both = f"r{row}{column}", f"p{row}{column}"
            for axes, start, one, other in (
                ("rows", row, "x", tall),
                ("columns", column, tall, both),
            ):
                reads = [one, f"at{start}", "end", axes, "two"]
                nodes.append(make_node("Slice", reads, [other], name=f"{other}"))
            found.append(both)
    nodes.append(make_node("Concat", found, "j", "j", axis=1))
    nodes.append(make_node("Conv", "j w b", "c", "c"))
    nodes.append(make_node("Relu", "c", "y", "r"))
    return make_model(nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 4, 6, 6]}, held)


def test_the_first_conv_is_found_behind_a_space_to_depth_of_slices():
    net = space_to_depth()
    assert check_input_samples(fed(RAW), RAW, net) == []
    (said,) = check_input_samples(fed(UNIT), UNIT, net)
    assert "calibration data is too small" in said and "(c)" in said


@pytest.mark.parametrize("reader", ["Mul", "Sub"])
def test_a_constant_may_stand_before_what_it_scales_or_shifts(reader):
    net = network(norm=False)
    net.graph.node.insert(0, make_node(reader, "most x", "x0", "scaled"))
    net.graph.node[1].input[0] = "x0"
    found = find_first_layer(net, "x")
    assert found is not None and found.node == "c"


@pytest.mark.parametrize("tensor", ["r10", "p01", "j"])
def test_slices_that_something_else_reads_too_are_no_way_to_the_first_conv(tensor):
    net = space_to_depth()
    assert find_first_layer(net, "x") is not None
    net.graph.node.append(make_node("Relu", [tensor], "z", "z"))
    net.graph.output.append(make_value("z", None))
    assert find_first_layer(net, "x") is None


@pytest.mark.parametrize("reader", ["first", "last"])
def test_a_conv_that_reads_one_slice_alone_says_nothing_of_the_input(reader):
    net = space_to_depth()
    beside = make_node("Conv", "p00 v", "z", "beside")
    net.graph.initializer.append(numpy_helper.from_array(np.ones((1, 3, 1, 1), np.float32), "v"))
    net.graph.node.insert(2 if reader == "first" else len(net.graph.node), beside)
    net.graph.output.append(make_value("z", None))
    assert find_first_layer(net, "x") is None


def verdict_of(report):
    """Level and reasons of the one int8 engine."""
    engines = json.loads(report.read_text())["engines"]
    (found,) = (one["verdict"] for one in engines if one.get("verdict"))
    return " ".join([found["level"], *found["reasons"]])


def test_a_build_that_feeds_a_sliced_stem_shares_in_place_of_pixels_says_so(run, tmp_path):
    import cv2

    for number, picture in enumerate(smooth()):
        cv2.imwrite(str(tmp_path / f"{number}.png"), picture[0].transpose(1, 2, 0))
    onnx.save(space_to_depth(), tmp_path / "net.onnx")
    words = ("build", tmp_path / "net.onnx", "--images", tmp_path, "--duration", 0, "--effort", 0)
    code, _, _ = run(*words, "--accept", "--out", tmp_path / "a", "--json", tmp_path / "a.json")
    assert code == 0 and "calibration data is too small" in (tmp_path / "a.json").read_text()
    assert "what it did not learn from" in verdict_of(tmp_path / "a.json")
    words = (*words, "--accept", "--preprocess", "raw", "--out", tmp_path / "b")
    code, _, _ = run(*words, "--json", tmp_path / "b.json")
    assert code == 0 and "calibration data is too small" not in (tmp_path / "b.json").read_text()
    assert "what it did not learn from" not in verdict_of(tmp_path / "b.json")


def test_without_bias_and_norm_nothing_is_said():
    assert check_input_samples(fed(RAW), RAW, network(norm=False, bias=False)) == []


@pytest.mark.parametrize("how", [HALF, None])
def test_samples_of_one_value_are_told(how):
    flat = [{"x": np.full((1, 3, 16, 16), value, np.float32)} for value in (0.5, -1)]
    (said,) = check_input_samples(flat, how, network())
    assert "one value alone, such as 0.5" in said
    assert check_input_samples([*flat, *fed(HALF)], how, network(norm=False)) == []


@pytest.mark.parametrize("silent", [False, True])
def test_a_state_at_its_start_is_no_picture_without_content(run, tmp_path, silent):
    nodes = [
        make_node("Concat", "cache sound", "both", name="j", axis=2),
        make_node("Conv", "both w", "y", name="c"),
    ]
    forms = {"cache": [1, 4, 3, 1], "sound": [1, 4, 9, 1], "y": [1, 2, 11, 1]}
    values = {n: make_value(n, s) for n, s in forms.items()}
    weight = np.random.default_rng(0).normal(size=(2, 4, 2, 1)).astype(np.float32)
    model = make_model(nodes, [values["cache"], values["sound"]], [values["y"]], {"w": weight})
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "fed").mkdir()
    for number in range(4):
        sound = np.random.default_rng(number).normal(size=forms["sound"]) * (not silent)
        fed = {"cache": np.zeros(forms["cache"]), "sound": sound}
        np.savez(
            tmp_path / "fed" / f"{number}.npz",
            **{name: value.astype(np.float32) for name, value in fed.items()},
        )
    code, out, error = run(
        "calibrate", tmp_path / "m.onnx", "--images", tmp_path / "fed", "-o", tmp_path / "c"
    )
    assert code == 0, error
    assert ("one value alone, such as 0;" in " ".join((out + error).split())) == silent


def test_pictures_of_nearly_one_colour_are_told():
    dark = [one // 24 for one in smooth()]  # as 12 bits in the upper byte of 16
    (said,) = check_input_samples(fed(HALF, dark), HALF, network())
    assert "16 of 255" in said and "16-bit" in said


def test_inputs_that_are_no_pictures_and_layers_that_are_no_conv_say_nothing():
    assert check_input_samples([{"x": np.zeros((1, 40), np.float32)}], None, network()) == []
    assert check_input_samples([], None, network()) == []
    net = network()
    assert find_first_layer(net, "other") is None
    net.graph.output.append(onnx.ValueInfoProto(name="c"))
    assert find_first_layer(net, "x") is None  # somebody else reads the Conv as well
    far = network()
    far.graph.initializer[0].data_location = TensorProto.EXTERNAL
    assert find_first_layer(far, "x") is None


@pytest.mark.parametrize(("words", "odd"), [(("--mean", 0.5, "--std", 0.5), False), ((), True)])
def test_the_demo_without_mean_and_std_is_told_by_its_batchnormalization(run, tmp_path, words, odd):
    code, out, error = run(
        "build", FASHION / "fashion_bn.onnx", "--images", FASHION / "calib.txt", "--limit", 20,
        "--duration", 0, "--effort", 0, "--out", tmp_path / "o", "--accept", *words,
    )  # fmt: skip
    assert code == 0, error
    said = "pixels / 255 with mean 0.5 and std 0.5"
    assert (said in " ".join(out.split())) == odd
    notes = json.loads((tmp_path / "o" / "report.json").read_text()).get("notes", [])
    assert any(said in note for note in notes) == odd
    assert (said in (tmp_path / "o" / "report.html").read_text()) == odd


# --- Samples that stand far above the others are named, with the tensor.
SMALL = Preprocess(size=(16, 16))
ROWS = np.random.default_rng(5).standard_normal((24, 3, 16, 16)).astype(np.float32)
ODD = ROWS.copy()
ODD[7] *= 1e4
WHERE = ("v", "t")


def of(*amaxes: float) -> list[tuple[int, float]]:
    peaks = Peaks()
    for number, amax in enumerate(amaxes, 1):
        peaks.add(WHERE, number, largest_magnitude(np.array([[amax / 2, -amax]], np.float32)))
    return [(number, times) for _, number, times in peaks.outliers()]


def test_what_stands_out_is_found():
    assert of(1, 1, 1, 1, 80) == [(5, 80)]
    assert of(1, 1, 1, 1, OUTLIER_RATIO) == of(1, 1, 1, 80) == of(0, 0, 0, 0, 0, 80) == of() == []
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
    outliers = [
        Outlier("v", tensor, (digest,), times)
        for digest, tensor, times in [
            ("a", "x", 9.0), ("b", "x", 99.0), ("b", "y", 1234.5), ("c", "x", 50.0), ("d", "x", 8.5)
        ]
    ]  # fmt: skip
    said = describe_outliers(outliers, {d: f"image {d}.png" for d in "abcd"})
    assert said == (
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
        seen.add(sidecars(cache)[0].read_bytes())
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
    names = feed.called()
    (said,) = [describe_outliers([Outlier("v", "t", feed.digests(2), 90.0)], names)]
    assert all(f"sample {number} of" in said for number in (4, 5, 6, 7))
    assert [names[d][:8] for d in feed.digests(3)] == ["sample 8", "sample 9"]


def test_ordinary_feeds_hear_nothing(small_cnn, pictures):
    assert calibrate(small_cnn, pictures, preprocess=SMALL).warnings == ()
    assert calibrate(small_cnn, list(ROWS)).warnings == ()


# --- Samples of several lengths: what an engine that is built for fixed ones is built for.
@pytest.fixture
def build(run, tmp_path):
    """(lengths) -> the command of atc and the notes of a build for Ascend."""

    def call(*lengths):
        made = np.random.default_rng(4)
        weights = {"w1": made.normal(size=(16, 8, 3)), "w2": made.normal(size=(4, 16, 1))}
        nodes = [
            make_node("Conv", "x w1", "c", name="first", pads=[1, 1]),
            make_node("Relu", "c", "r", name="relu"),
            make_node("Conv", "r w2", "y", name="second"),
        ]
        inputs = {"x": [1, 8, "length"]}
        model = make_model(nodes, inputs, {"y": [1, 4, "length"]}, as_float32(weights))
        onnx.save(model, tmp_path / "m.onnx")
        (tmp_path / "rows").mkdir()
        for number, length in enumerate(lengths):
            sound = made.normal(size=(1, 8, length)).astype(np.float32)
            np.save(tmp_path / "rows" / f"{number}.npy", sound)
        words = ["build", tmp_path / "m.onnx", "--images", tmp_path / "rows", "--effort", 0]
        run.ok(*words, "--target", "ascend", "--duration", 0, "--out", tmp_path / "o")
        (target,) = json.loads((tmp_path / "o" / "report.json").read_text())["targets"]
        return (tmp_path / "o" / "m_atc.sh").read_text(), " ".join(target["notes"])

    return call


def test_the_largest_sample_is_what_an_om_is_made_for_and_that_it_takes_no_other_is_said(build):
    command, notes = build(20, 31, 24, 26)
    assert "--input_shape=x:1,8,31 " in command
    assert "x of 1x8x20 to 1x8x31" in notes


def test_of_samples_of_one_length_nothing_is_said(build):
    command, notes = build(20, 20, 20, 20)
    assert "--input_shape=x:1,8,20 " in command and "takes one shape" not in notes
