"""`calib8 quantize`: torch's own numbers by hand, and ranges that are searched."""

import json

import numpy as np
import pytest

from calibrators.errors import CalibrationError
from calibrators.grids import affine_params
from deploy.analysis.experiment import SHOWN, read_values, searched, with_scales
from deploy.errors import ConfigError, FeedError
from deploy.method import Method
from deploy.report.profile_page import Area, Tile, squarified, tree_map

VALUES = "[-1, 0, 1, 2]"


def said(run, *words):
    """JSON of the command."""
    return json.loads(run("quantize", *words, "--json", "-")[1])


def test_a_scale_and_a_zero_point_that_are_given(run):
    shown = run("quantize", VALUES, "--scale", "0.1", "--zero-point", "10")[1]
    assert "scale 0.100000001, zero point 10, quint8 (given): stores -1 to 24.5" in shown
    assert "SQNR exact, 0 of 4 values clipped" in shown
    found = said(run, VALUES, "--scale", "0.1", "--zero-point", "10")
    assert found["int_repr"] == [0, 10, 20, 30] and found["dequantized"] == [-1, 0, 1, 2]
    found = said(run, "[-1000, 100]", "--scale", "0.1", "--zero-point", "10")
    assert found["int_repr"] == [0, 255] and found["clipped"] == 2
    assert found["error"] == pytest.approx([999, -75.5])
    assert said(run, "[100]", "--scale", "0.1", "--dtype", "qint32")["int_repr"] == [1000]


def test_channels_each_have_their_own(run):
    words = ("--scale", "0.1,0.01", "--zero-point", "10,0", "--axis", "0")
    found = said(run, "[[-1, 0], [1, 2]]", *words)
    assert found["int_repr"] == [[0, 10], [100, 200]] and found["axis"] == 0
    by = said(run, "[[-1, 0], [1, 2]]", "--axis", "-1", "--method", "minmax", "--dtype", "qint8")
    assert by["scale"] == pytest.approx([1 / 127, 2 / 127]) and by["zero_point"] == [0, 0]
    shown = run("quantize", str([[0.5]] * (SHOWN + 2)), "--axis", "0")[1]
    assert "and 2 channels more" in shown and "and 2 values more" in shown


def test_ranges_are_those_of_the_searches(run, tmp_path):
    values = np.random.default_rng(0).normal(size=500).astype(np.float32)
    np.save(tmp_path / "v.npy", values)
    widest = said(run, str(tmp_path / "v.npy"), "--method", "minmax")
    scale, zero = affine_params(float(values.min()), float(values.max()))
    assert (widest["scale"], widest["zero_point"]) == ([scale], [zero])
    kept = said(run, str(tmp_path / "v.npy"), "--method", "percentile", "--percent", "95")
    assert kept["found"] == "percentile 95" and kept["clipped"] > 10
    assert kept["sqnr_db"] < widest["sqnr_db"] < 60
    assert said(run, str(tmp_path / "v.npy"), "--method", "entropy-tensorrt")["clipped"] >= 0
    zeros = searched(np.zeros(3, np.float32), Method.of(), axis=None, dtype="qint8")
    assert zeros.quantized.stored.tolist() == [0, 0, 0] and zeros.quantized.scale.tolist() == [1.0]


def test_what_is_no_experiment_is_said(run, tmp_path):
    np.save(tmp_path / "c.npy", np.array(["text"]))
    for words, message in (
        ((VALUES, "--zero-point", "3"), "--zero-point goes with --scale"),
        (
            (VALUES, "--scale", "1", "--method", "mse"),
            "given or searched, got --scale and --method",
        ),
        ((VALUES, "--scale", "a"), "must be numbers with commas"),
        ((VALUES, "--scale", "1", "--zero-point", "1.5"), "must be whole numbers"),
        ((VALUES, "--scale", "0"), "a scale must be finite and positive"),
        ((VALUES, "--dtype", "qint32"), "a search finds the scale of quint8 or qint8"),
        ((VALUES, "--scale", "1,2"), "give --axis, or one of each"),
        ((VALUES, "--axis", "4"), "one of 1 dimensions, got 4"),
        (("[1, [2]]",), "values are a JSON array of numbers"),
        (("[]",), "values are a JSON array of numbers"),
        (('["a"]',), "values are a JSON array of numbers"),
        (("3.5",), "write it as '[3.5]'"),
        (("-1, 2",), "write it as '[-1, 2]'"),
        (("-7", "--scale", "1"), "write it as '[-7]'"),
        (("-1x",), "No such option"),
        (("[1e39, 1]",), "1 of 2 values infinite in float32"),
        (("[1, -Infinity]",), "1 of 2 values infinite in float32"),
        (("absent.npy",), "absent.npy must be an .npy file"),
        ((str(tmp_path / "c.npy"),), "must be a sound .npy file"),
        ((VALUES, "-q"), "--quiet goes with --json"),
    ):
        code, _, err = run("quantize", *words)
        assert code in (1, 2) and message in err, (words, err)
    with pytest.raises(CalibrationError, match="NaN"):
        with_scales(np.array([np.nan], np.float32), [1.0], [0], axis=None, dtype="quint8")
    with pytest.raises(FeedError):
        read_values(str(tmp_path))
    with pytest.raises(ConfigError, match="brackets"):
        read_values("[" * 70)


def test_areas_of_a_tree_map_are_their_shares():
    values = [6, 6, 4, 3, 2, 2, 1]  # the example of its source: 6 x 4
    areas = squarified(values, Area(0, 0, 6, 4))
    assert [area.width * area.height for area in areas] == pytest.approx(values)
    assert areas[0] == Area(0, 0, 3, 2) and areas[1] == Area(0, 2, 3, 2)
    assert areas[2].width == pytest.approx(12 / 7) and areas[2].height == pytest.approx(7 / 3)
    assert squarified([], Area(0, 0, 1, 1)) == []


def test_a_tree_map_draws_parts_inside_and_escapes_names():
    inner = (Tile("a<b", 3, "said & done", 1), Tile("tiny", 1e-9, "unseen"))
    text = tree_map([Tile("whole", 3, "all", parts=inner), Tile("none", 0, "nothing")], "Title")
    assert text.count("<rect") == 2 and "a&lt;b" in text and "said &amp; done" in text
    assert 'class="whole"' in text and 'class="c1"' in text and "none" not in text
    assert tree_map([], "Title") == ""
