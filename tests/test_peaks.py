"""Samples that stand far above the others are named, with the tensor."""

import json

import numpy as np
import pytest

from deploy.calibration.sample_checks import FAR, Outlier, Peaks, largest, standing_out
from deploy.calibration.store import sidecars
from deploy.feed.feed import open_feed
from deploy.feed.preprocess import Preprocess
from deploy.pipeline import calibrate
from deploy.tensors import TensorSpec

UNIT = Preprocess(size=(16, 16))
ROWS = np.random.default_rng(5).standard_normal((24, 3, 16, 16)).astype(np.float32)
ODD = ROWS.copy()
ODD[7] *= 1e4
WHERE = ("v", "t")


def of(*amaxes: float) -> list[tuple[int, float]]:
    peaks = Peaks()
    for number, amax in enumerate(amaxes, 1):
        peaks.add(WHERE, number, largest(np.array([[amax / 2, -amax]], np.float32)))
    return [(number, times) for _, number, times in peaks.outliers()]


def test_what_stands_out_is_found():
    assert of(1, 1, 1, 1, 80) == [(5, 80)]
    assert of(1, 1, 1, 1, FAR) == of(1, 1, 1, 80) == of(0, 0, 0, 0, 0, 80) == of() == []
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
    said = standing_out(outliers, {d: f"image {d}.png" for d in "abcd"})
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
    (said,) = [standing_out([Outlier("v", "t", feed.digests(2), 90.0)], names)]
    assert all(f"sample {number} of" in said for number in (4, 5, 6, 7))
    assert [names[d][:8] for d in feed.digests(3)] == ["sample 8", "sample 9"]


def test_ordinary_feeds_hear_nothing(small_cnn, pictures):
    assert calibrate(small_cnn, pictures, preprocess=UNIT).warnings == ()
    assert calibrate(small_cnn, list(ROWS)).warnings == ()
