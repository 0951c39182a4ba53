"""ARQ, IFMR and HFMG against vectors that the real AMCT computed (tests/golden/amct)."""

import hashlib
import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from calibrators.amct.arq import arq, arq_fake_quantize, arq_integers, ascend_scale_offset
from calibrators.amct.hfmg import HfmgHistogram, HfmgParams, cuts, hfmg
from calibrators.amct.ifmr import IfmrParams, ifmr
from calibrators.errors import CalibrationError

GOLDEN = Path(__file__).parent / "golden" / "amct"
WORDS = json.loads((GOLDEN / "vectors.json").read_text())
ARRAYS = np.load(GOLDEN / "vectors.npz")
CASES = {
    kernel: [c for c in WORDS["cases"] if c["kernel"] == kernel]
    for kernel in ("arq", "ifmr", "hfmg")
}


@cache
def values(name):
    spec = WORDS["inputs"][name]
    if spec["stored"]:
        return ARRAYS[f"x/{name}"]
    rng = np.random.default_rng(spec["seed"])
    if name == "big_normal":
        return rng.standard_normal(spec["shape"]).astype("f4")
    return np.maximum(rng.laplace(0, 1, spec["shape"]), 0).astype("f4")


def bits(x):
    return np.asarray(x, np.float32).reshape(-1).view(np.uint32).tolist()


def run(kernel, case):
    x, p = values(case["input"]), case["params"]
    if kernel == "arq":
        weight = x.reshape(-1)[: int(np.prod(p["shape"]))].reshape(p["shape"])
        kind = {"bits": p["num_bits"]}
        scale, offset = arq(
            weight, channel_wise=p["channel_wise"], with_offset=p["with_offset"], **kind
        )
        return weight, scale, offset
    if kernel == "ifmr":
        params = IfmrParams(
            max_percentile=p["max_percentile"],
            min_percentile=p["min_percentile"],
            search_range=(p["search_start"], p["search_end"]),
            search_step=p["search_step"],
            bits=p["num_bits"],
            with_offset=p["with_offset"],
        )
        return ifmr(x, params)
    histogram = HfmgHistogram(p["num_of_bins"])
    for batch in np.array_split(x.reshape(-1), case["batch_num"]):
        histogram.observe(batch)
    params = HfmgParams(nbins=p["num_of_bins"], bits=p["num_bits"], with_offset=p["with_offset"])
    return histogram, hfmg(histogram, params)


def same_answer(result, out):
    assert bits(result.scale) == out["scale"]["f32_bits"]
    assert [result.offset] == out["offset"]
    assert bits(result.clip_max) == out["clip_max"]["f32_bits"]
    assert bits(result.clip_min) == out["clip_min"]["f32_bits"]
    assert result.candidate == out["argmin"]
    assert len(result.losses) == out["n_candidates"]


@pytest.mark.parametrize("kernel", ["arq", "ifmr", "hfmg"])
def test_amct_errors_are_errors_here(kernel):
    refused = [c for c in CASES[kernel] if "error" in c["out"]]
    assert len(refused) == {"arq": 36, "ifmr": 36, "hfmg": 44}[kernel]
    for case in refused:
        with pytest.raises(CalibrationError):
            run(kernel, case)


def test_scale_offset_table():
    rows = WORDS["calculate_scale_offset"]["rows"]
    assert len(rows) == 1032
    for top, bottom, with_offset, kind, scale, offset in rows:
        hi, lo = np.array([top], np.uint32).view("f4"), np.array([bottom], np.uint32).view("f4")
        if isinstance(scale, str):
            with pytest.raises(CalibrationError):
                ascend_scale_offset(hi, lo, with_offset=with_offset, bits=int(kind[3:]))
            continue
        s, o = ascend_scale_offset(hi, lo, with_offset=with_offset, bits=int(kind[3:]))
        assert (bits(s), o.tolist()) == ([scale], [offset])


def test_arq_to_the_bit():
    good = [c for c in CASES["arq"] if "error" not in c["out"]]
    for case in good:
        weight, scale, offset = run("arq", case)
        out, b = case["out"], case["params"]["num_bits"]
        assert (bits(scale), offset.tolist()) == (out["scale"]["f32_bits"], out["offset"])
        fake = arq_fake_quantize(weight, scale, offset, bits=b)
        assert hashlib.sha256(fake.tobytes()).hexdigest() == out["fake_sha256"]
        if "int_sha256" in out:
            integers = arq_integers(weight, scale, offset, bits=b)
            assert hashlib.sha256(integers.tobytes()).hexdigest() == out["int_sha256"]
    assert len(good) == 300


@pytest.mark.slow
def test_ifmr_to_the_bit():
    good = [c for c in CASES["ifmr"] if "error" not in c["out"]]
    compared = Counter()
    for case in good:
        result = run("ifmr", case)
        same_answer(result, case["out"])
        key = f"loss/{case['id']}"
        if key in ARRAYS and np.isfinite(ARRAYS[key]).all():
            np.testing.assert_allclose(result.losses, ARRAYS[key], rtol=1e-4)
            compared["losses"] += 1
    assert len(good) == 452 and compared["losses"] > 40


@pytest.mark.slow
def test_hfmg_to_the_bit():
    good = [c for c in CASES["hfmg"] if "error" not in c["out"]]
    compared = Counter()
    for case in good:
        histogram, result = run("hfmg", case)
        out, name = case["out"], case["id"]
        same_answer(result, out)
        assert bits([histogram.lo, histogram.hi]) == out["hist_range"]["f32_bits"]
        runs = cuts(histogram.counts)
        assert runs[result.candidate].tolist() == out["best_left_right"]
        assert (runs[0].tolist(), runs[-1].tolist()) == (out["range_first"], out["range_last"])
        if f"hist/{name}" in ARRAYS:
            np.testing.assert_array_equal(histogram.counts, ARRAYS[f"hist/{name}"])
            compared["histograms"] += 1
        if f"range/{name}" in ARRAYS:
            np.testing.assert_array_equal(runs, ARRAYS[f"range/{name}"])
        if f"loss/{name}" in ARRAYS:
            finite = np.isfinite(ARRAYS[f"loss/{name}"])
            wanted = ARRAYS[f"loss/{name}"][finite]
            np.testing.assert_allclose(result.losses[finite], wanted, rtol=1e-4)
            compared["losses"] += 1
    assert len(good) == 381 and compared["histograms"] > 60 and compared["losses"] > 40
