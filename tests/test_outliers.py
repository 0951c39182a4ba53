"""Calibration samples that stand far above the others."""

import json

import numpy as np
import pytest

from calib8 import calibrate
from deploy.calibration import sample_checks, store
from deploy.calibration.sample_checks import Outlier, Peaks
from deploy.feed.feed import open_feed
from deploy.feed.preprocess import Preprocess
from deploy.tensors import TensorSpec

SMALL_PICTURES = Preprocess(size=(16, 16))
ROWS = np.random.default_rng(5).standard_normal((24, 3, 16, 16)).astype(np.float32)
ROWS_WITH_OUTLIER = ROWS.copy()
ROWS_WITH_OUTLIER[7] *= 1e4
OBSERVATION_KEY = ("v", "t")


def find_outliers(*amaxes: float) -> list[tuple[int, float]]:
    peaks = Peaks()
    for number, amax in enumerate(amaxes, 1):
        largest = sample_checks.largest_magnitude(np.array([[amax / 2, -amax]], np.float32))
        peaks.add(OBSERVATION_KEY, number, largest)
    return list_outliers(peaks)


def list_outliers(peaks: Peaks) -> list[tuple[int, float]]:
    outliers = peaks.outliers(lambda number: (number,))
    return [(*outlier.digests, outlier.ratio) for outlier in outliers]


def test_outliers_are_found():
    assert find_outliers(1, 1, 1, 1, 80) == [(5, 80)]
    at_the_limit = find_outliers(1, 1, 1, 1, sample_checks.OUTLIER_RATIO)
    assert (
        at_the_limit
        == find_outliers(1, 1, 1, 80)
        == find_outliers(0, 0, 0, 0, 0, 80)
        == find_outliers()
        == []
    )
    assert find_outliers(*[1] * 38, 1000, 10) == [(39, 1000), (40, 10)]  # one in twenty
    assert find_outliers(*[1] * 18, 1000, 10) == [(19, 100)]
    assert find_outliers(*[1] * 18, 1000, 1000) == []  # two of twenty are a kind of image
    assert find_outliers(1, 1, np.inf, 1, 1, 80, np.nan) == [(6, 80)]
    assert len(find_outliers(*[1] * 400, *[100] * 8)) == 8
    assert not find_outliers(*[1] * 400, *[100] * 9)


def test_merged_peaks_find_same_outliers():
    values = np.exp(np.random.default_rng(1).normal(size=200) * 2).astype(np.float32)
    expected = find_outliers(*values)
    for part_count in (2, 3, 7):
        part_peaks = [Peaks() for _ in range(part_count)]
        for number, value in enumerate(values, 1):
            part_peaks[number % part_count].add(OBSERVATION_KEY, number, float(value))
        for peaks in part_peaks[1:]:
            part_peaks[0].merge(peaks)
        assert list_outliers(part_peaks[0]) == expected


def test_worst_outliers_are_described_first():
    ratio_by_key = {"ax": 9.0, "bx": 99.0, "by": 1234.5, "cx": 50.0, "dx": 8.5}  # digest and tensor
    outliers = [
        Outlier("v", tensor, (digest,), ratio_by_key[digest + tensor])
        for digest, tensor in ratio_by_key
    ]
    assert sample_checks.describe_outliers(outliers, {d: f"image {d}.png" for d in "abcd"}) == (
        "calibration samples that stand far above the others cost them int8 steps: image b.png"
        " (largest |x| in 'y' 1,234 times the others', far off in 1 other tensor too), image c.png"
        " (largest |x| in 'x' 50 times the others'), image a.png (largest |x| in 'x' 9 times the"
        " others') and 1 more; check these samples, or leave them out"
    )


@pytest.mark.parametrize("targets", [["onnxruntime"], ["ascend"], ["onnxruntime", "tensorrt"]])
def test_outlier_is_named_again_from_cache(small_cnn, tmp_path, targets):
    cache = tmp_path / "c"
    calibration = calibrate(small_cnn, list(ROWS_WITH_OUTLIER), cache=cache, targets=targets)
    (warning,) = calibration.warnings
    assert warning.startswith("calibration samples that stand far above the others")
    assert "sample 7 of the iterable" in warning
    assert "other tensor" in warning
    cached_calibration = calibrate(small_cnn, list(ROWS_WITH_OUTLIER), cache=cache, targets=targets)
    assert cached_calibration.reused
    assert cached_calibration.warnings == calibration.warnings
    reversed_calibration = calibrate(
        small_cnn, list(ROWS_WITH_OUTLIER[::-1]), cache=cache, targets=targets
    )
    assert reversed_calibration.warnings == (warning.replace("sample 7", "sample 16"),)


def test_outliers_do_not_depend_on_threads(small_cnn, tmp_path):
    sidecars = set()
    for threads in (1, 2, 3):
        cache = tmp_path / str(threads)
        calibrate(small_cnn, list(ROWS_WITH_OUTLIER), cache=cache, threads=threads)
        sidecars.add(store.sidecars(cache)[0].read_bytes())
    assert len(sidecars) == 1
    assert json.loads(sidecars.pop())["outliers"]


def test_added_target_keeps_cached_outliers(small_cnn, tmp_path):
    cache = tmp_path / "c"
    expected_warnings = calibrate(
        small_cnn, list(ROWS_WITH_OUTLIER), targets=["onnxruntime", "ascend"]
    ).warnings
    calibrate(small_cnn, list(ROWS_WITH_OUTLIER), cache=cache, targets=["ascend"])
    calibration = calibrate(
        small_cnn, list(ROWS_WITH_OUTLIER), cache=cache, targets=["onnxruntime", "ascend"]
    )
    assert not calibration.reused
    assert calibration.warnings == expected_warnings


def test_fixed_batch_outlier_names_its_samples():
    feed = open_feed(list(ROWS_WITH_OUTLIER[:10]), [TensorSpec("x", "float32", (4, 3, 16, 16))])
    with feed.samples() as samples:
        list(samples)
    feed.manifest()
    names = feed.name_by_digest()
    (description,) = [
        sample_checks.describe_outliers([Outlier("v", "t", feed.sample_digests(2), 90.0)], names)
    ]
    assert all(f"sample {number} of" in description for number in (4, 5, 6, 7))
    assert [names[d][:8] for d in feed.sample_digests(3)] == ["sample 8", "sample 9"]


def test_ordinary_feeds_have_no_warnings(small_cnn, pictures):
    assert calibrate(small_cnn, pictures, preprocess=SMALL_PICTURES).warnings == ()
    assert calibrate(small_cnn, list(ROWS)).warnings == ()
