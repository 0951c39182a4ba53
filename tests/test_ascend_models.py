"""Kernels, calibration, deploy and fake-quant models against outputs of the real AMCT."""

import hashlib
import json
from collections import Counter
from functools import cache
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from calibrators.amct.arq import (
    arq,
    arq_fake_quantize,
    arq_integers,
    ascend_clip_range,
    ascend_scale_offset,
)
from calibrators.amct.hfmg import HfmgHistogram, candidate_runs, hfmg
from calibrators.amct.ifmr import IfmrParams, ifmr
from calibrators.errors import CalibrationError
from deploy.calibration.one_pass import observe
from deploy.errors import BackendError, ExportError, FeedError
from deploy.frontends import load
from deploy.graph.edit import name_nodes_by_index
from deploy.targets.ascend import deploy_model
from deploy.targets.ascend.amct_calibration import observation_model
from deploy.targets.ascend.config import default_config, read_config, resolve_config
from deploy.targets.ascend.executor import compare_deploy_model
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import find_layers
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import LayerRecord, read_record
from tests.models import run_net
from tests.vendor_models import build_net, calibrate_amct, fetch_model, plan_amct

CASES = Path(__file__).parent / "golden" / "amct" / "cases"
NAMES = ["small_default", "small_dmq", "small_hfmg_sym", "small_ifmr_asym", "small_mixed"]


def float_model(case):
    """The FP32 model of a case, nodes named after the torch modules.

    The exporter had folded bn2 into conv2; small_mixed was run with the two apart, so there
    conv2 and bn2 are taken from AMCT's modified model (its weight is fake-quantized, which
    quantizes to the same integers again).
    """
    model = onnx.load(CASES / "input_fp32.onnx")
    for node in model.graph.node:
        parts = node.name.split("/")
        if len(parts) == 3:
            node.name = parts[1]
    if case == "small_mixed":
        modified = onnx.load(CASES / case / "modified.onnx")
        expected = [t for t in modified.graph.initializer if t.name.startswith(("conv2.", "bn2."))]
        model.graph.initializer.extend(expected)
        norm = next(n for n in modified.graph.node if n.name == "bn2")
        index = next(i for i, n in enumerate(model.graph.node) if n.name == "conv2")
        conv = model.graph.node[index]
        conv.input[1:] = ["conv2.sub_module.weight", "conv2.sub_module.bias"]
        old, conv.output[0] = conv.output[0], "conv2_out"
        norm.input[0], norm.output[0] = "conv2_out", old
        model.graph.node.insert(index + 1, norm)
    name_nodes_by_index(model.graph)
    return model


def inputs(case):
    arrays = np.load(CASES / case / "io.npz")
    names = sorted(k for k in arrays.files if k.startswith("in") and k[2:].isdigit())
    return [{"input.1": arrays[name]} for name in names]


def records_of(case):
    return read_record((CASES / case / "record.txt").read_text())


@pytest.fixture
def default():
    """(model, its layers) of small_default."""
    model = float_model("small_default")
    return model, find_layers(model)


def config_of(case, graph):
    return resolve_config(read_config((CASES / case / "config.json").read_text()), graph)


def ulps(a, b):
    a, b = np.atleast_1d(np.float32(a)), np.atleast_1d(np.float32(b))
    return int(np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)).max())


@pytest.mark.parametrize("case", NAMES)
def test_records_are_amcts(case):
    """Layers and offsets equal. Scales equal to the bit where nothing was summed before them.

    Elsewhere they differ by the order of float32 sums: in the exporter's own folding of
    BatchNormalization (weights of conv1, conv2, dw), and in torch's convolutions against ONNX
    Runtime's (activations behind them). Both stay within 8 units in the last place, and what the
    fake-quant model of these records computes is near what AMCT's computes.
    """
    model = float_model(case)
    graph = find_layers(model)
    records = calibrate_amct(model, graph, inputs(case), config_of(case, graph)).records
    expected = records_of(case)
    assert list(records) == list(expected)
    balanced = case == "small_dmq"
    for name, record in expected.items():
        mine, exact = records[name], name in ("pw", "up", "fc1", "fc2", "pool") and not balanced
        assert mine.offset_d == record.offset_d
        assert mine.scale_w.size == record.scale_w.size
        assert ulps(mine.scale_d, record.scale_d) <= 8
        assert ulps(mine.scale_w, record.scale_w) <= (0 if exact else 8)
        if balanced and record.dmq_factors.size:
            assert ulps(mine.dmq_factors, record.dmq_factors) <= 8
    if not balanced:
        assert ulps(records["conv1"].scale_d, expected["conv1"].scale_d) == 0
    arrays = np.load(CASES / case / "io.npz")
    fake = fake_quant_model(model, quantize_layers(model, graph, records))
    reference = arrays["res_fake_quant_model"]
    error = np.abs(run_net(fake, arrays["in0"])[0] - reference).max()
    assert error <= 2e-2 * np.abs(reference).max()


def test_the_model_to_observe_is_amcts(default):
    """Weights that BatchNormalization did not touch are those of AMCT's modified model."""
    model, graph = default
    config = config_of("small_default", graph)
    records = records_of("small_default").items()
    weights = {n: r.scale_w for n, r in records}
    mine = observation_model(model, graph.layers, config, weights, {}, {})
    amct = onnx.load(CASES / "small_default" / "modified.onnx")
    tensors = [{t.name: t for t in mine.graph.initializer}]
    tensors.append({t.name: t for t in amct.graph.initializer})
    nodes = {n.name: n for n in amct.graph.node}
    for name in ("pw", "up", "fc1", "fc2"):
        a = numpy_helper.to_array(tensors[0][graph.layers[name].weight])
        b = numpy_helper.to_array(tensors[1][nodes[name].input[1]])
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", NAMES)
def test_fake_quant_runs_as_amcts(case):
    model = float_model(case)
    mine = fake_quant_model(model, quantize_layers(model, find_layers(model), records_of(case)))
    onnx.checker.check_model(mine)
    arrays = np.load(CASES / case / "io.npz")
    (expected,) = run_net(CASES / case / "res_fake_quant_model.onnx", arrays["in0"])
    np.testing.assert_allclose(run_net(mine, arrays["in0"])[0], expected, rtol=1e-5)
    np.testing.assert_allclose(expected, arrays["res_fake_quant_model"], rtol=1e-5)


# -- what cannot be done is said
def test_calibration_refuses_unsuitable_batches(default, wording):
    model, graph = default
    config = default_config(graph, batch_num=3)
    with pytest.raises(FeedError, match="3, got 2"):
        calibrate_amct(model, graph, inputs("small_default"), config)
    with pytest.raises(FeedError, match="3, got 0"):
        calibrate_amct(model, graph, [], config)
    batch = {"input.1": np.full((2, 3, 32, 32), np.nan, np.float32)}
    config = default_config(graph)
    with pytest.raises(CalibrationError, match=r"'conv1'.*NaN"):
        calibrate_amct(model, graph, [batch], config)
    batch = {"input.1": np.zeros((1, 2), np.float32)}
    with pytest.raises(BackendError) as refusal:
        calibrate_amct(model, graph, [batch], config)
    wording.check(refusal.value)
    batch = {"input.1": np.zeros((2, 3, 32, 32), np.float32)}
    messages = calibrate_amct(model, graph, [batch], config)
    assert messages.zero_layers == ("conv1",)
    assert (messages.records["conv1"].scale_d, messages.records["conv1"].offset_d) == (1, -128)


def test_exact_values_are_kept_on_request(default, monkeypatch):
    monkeypatch.setattr("calibrators.amct.ifmr.MAX_STORED_VALUES", 1)
    model, graph = default
    config, batches = config_of("small_default", graph), inputs("small_default")
    records = {}
    for exact in (True, False):
        plan = plan_amct(model, graph, batches, config, exact=exact)
        observed = observe(plan.observations, batches, inference_counts=Counter())
        assert {not histogram.counts.size for histogram in observed.values()} == {exact}
        records[exact] = plan.record(observed).records
    for name, record in records[True].items():
        assert records[False][name].scale_d == pytest.approx(float(record.scale_d), rel=0.016)


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"scale_d": 1e6}, "1 / scale_d"),
        ({"scale_d": 1e-6}, "1 / scale_d"),
        ({"scale_w": [1e-12]}, "int32"),
        ({"dmq_factors": [1.0, 2.0]}, "512 DMQ factors"),
    ],
)
def test_hardware_limits(record, match, default):
    fields = {"scale_d": 0.1, "scale_w": [0.01], "dmq_factors": [], **record}
    layer = LayerRecord(**{name: np.float32(value) for name, value in fields.items()})
    with pytest.raises(ExportError, match=match):
        quantize_layers(*default, {"fc1": layer})


def test_int32_overflow_is_refused():
    nodes, weights = [("MatMul", "x w", "y", "wide")], {"w": np.ones((70_000, 1))}
    model = build_net(nodes, {"x": [1, 70_000]}, {"y": [1, 1]}, weights)
    record = LayerRecord(scale_d=np.float32(1), scale_w=np.float32([1 / 127]))
    with pytest.raises(ExportError, match="int32"):
        quantize_layers(model, find_layers(model), {"wide": record})
    scales = np.float32([1e-6, 1.0, 3.5e4])
    assert (deploy_model.pack_dequant_scales(scales) >> np.uint64(32) == 0).all()
    np.testing.assert_array_equal(
        deploy_model.unpack_dequant_scales(deploy_model.pack_dequant_scales(scales)), scales
    )


def test_shared_tensor_is_quantized_once():
    weights = {k: np.random.default_rng(1).normal(size=(4, 4)) for k in "ab"}
    nodes = [("Gemm", f"x {k} c", end, k) for k, end in (("a", "y"), ("b", "h"))]
    nodes.append(("Add", "y h", "z", "add"))
    ends = {"x": [1, 4]}, {"y": [1, 4], "z": [1, 4]}
    model = build_net(nodes, *ends, weights | {"c": np.ones(4)})
    layers = find_layers(model)
    batch = {"x": np.linspace(-1, 1, 4, dtype=np.float32).reshape(1, 4)}
    records = calibrate_amct(model, layers, [batch], default_config(layers)).records
    quantized = quantize_layers(model, layers, records)
    deploy = deploy_model.deploy_model(model, quantized)
    assert [n.op_type for n in deploy.graph.node].count("AscendQuant") == 1
    assert [o.name for o in deploy.graph.output] == ["y", "z"]
    fake = fake_quant_model(model, quantized)
    quantizers, expected = run_net(fake, batch["x"]), run_net(model, batch["x"])
    np.testing.assert_allclose(quantizers[0], expected[0], atol=0.05)


WORDS = json.loads((CASES.parent / "vectors.json").read_text())
ARRAYS = np.load(CASES.parent / "vectors.npz")


def cases_of(kernel, good=True):
    of_kernel = [case for case in WORDS["cases"] if case["kernel"] == kernel]
    if kernel == "arq":  # deployed weights have no offset
        of_kernel = [case for case in of_kernel if not case["params"]["with_offset"]]
    return [case for case in of_kernel if ("error" not in case["out"]) == good]


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


def run_kernel(kernel, case):
    x, p = values(case["input"]), case["params"]
    grid = {"bits": p["num_bits"], "with_offset": p["with_offset"]}
    if kernel == "arq":
        weight = x.reshape(-1)[: int(np.prod(p["shape"]))].reshape(p["shape"])
        return weight, arq(weight, channel_wise=p["channel_wise"], bits=p["num_bits"])
    if kernel == "ifmr":
        same_shape = {name: p[name] for name in ("max_percentile", "min_percentile", "search_step")}
        span = (p["search_start"], p["search_end"])
        return ifmr(x, IfmrParams(search_range=span, **same_shape, **grid))
    histogram = HfmgHistogram(p["num_of_bins"])
    for batch in np.array_split(x.reshape(-1), case["batch_num"]):
        histogram.observe(batch)
    return histogram, hfmg(histogram, **grid)


def same_answer(result, case):
    out = case["out"]
    clip_range = ascend_clip_range(result.scale, result.offset, case["params"]["num_bits"])
    assert bits(result.scale) == out["scale"]["f32_bits"]
    assert [result.offset] == out["offset"]
    assert bits(clip_range) == out["clip_min"]["f32_bits"] + out["clip_max"]["f32_bits"]
    assert np.argmin(result.losses) == out["argmin"]
    assert len(result.losses) == out["n_candidates"]


@pytest.mark.parametrize(("kernel", "count"), [("arq", 25), ("ifmr", 36), ("hfmg", 44)])
def test_amct_errors_are_errors_here(kernel, count):
    refused = cases_of(kernel, good=False)
    assert len(refused) == count
    for case in refused:
        with pytest.raises(CalibrationError):
            run_kernel(kernel, case)


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
    good = cases_of("arq")
    for case in good:
        weight, scale = run_kernel("arq", case)
        out, b = case["out"], case["params"]["num_bits"]
        assert bits(scale) == out["scale"]["f32_bits"]
        assert not any(out["offset"])
        fake = arq_fake_quantize(weight, scale, bits=b)
        assert hashlib.sha256(fake.tobytes()).hexdigest() == out["fake_sha256"]
        if "int_sha256" in out:
            integers = arq_integers(weight, scale, bits=b)
            assert hashlib.sha256(integers.tobytes()).hexdigest() == out["int_sha256"]
    assert len(good) == 215


@pytest.mark.slow
def test_ifmr_to_the_bit():
    good, compared = cases_of("ifmr"), 0
    for case in good:
        result = run_kernel("ifmr", case)
        same_answer(result, case)
        key = f"loss/{case['id']}"
        if key in ARRAYS and np.isfinite(ARRAYS[key]).all():
            np.testing.assert_allclose(result.losses, ARRAYS[key], rtol=1e-4)
            compared += 1
    assert len(good) == 452
    assert compared > 40


@pytest.mark.slow
def test_hfmg_to_the_bit():
    good, compared = cases_of("hfmg"), Counter()
    for case in good:
        histogram, result = run_kernel("hfmg", case)
        out, name = case["out"], case["id"]
        same_answer(result, case)
        assert bits([histogram.lo, histogram.hi]) == out["hist_range"]["f32_bits"]
        runs = candidate_runs(histogram.counts)
        assert runs[np.argmin(result.losses)].tolist() == out["best_left_right"]
        assert (runs[0].tolist(), runs[-1].tolist()) == (out["range_first"], out["range_last"])
        if f"hist/{name}" in ARRAYS:
            np.testing.assert_array_equal(histogram.counts, ARRAYS[f"hist/{name}"])
            compared["histograms"] += 1
        if f"range/{name}" in ARRAYS:
            np.testing.assert_array_equal(runs, ARRAYS[f"range/{name}"])
        if f"loss/{name}" in ARRAYS:
            finite = np.isfinite(ARRAYS[f"loss/{name}"])
            expected = ARRAYS[f"loss/{name}"][finite]
            np.testing.assert_allclose(result.losses[finite], expected, rtol=1e-4)
            compared["losses"] += 1
    assert len(good) == 381
    assert compared["histograms"] > 60
    assert compared["losses"] > 40


def text(size, seed):
    """A picture of two words as an input in [-1, 1], [1, 3, H, W]."""
    rng = np.random.default_rng(seed)
    image = np.full((*size, 3), rng.integers(170, 250), np.uint8)
    for line in range(1, 1 + size[0] // 40):
        color = tuple(int(v) for v in rng.integers(0, 90, 3))
        word = f"int8 {rng.integers(1000)}"
        cv2.putText(image, word, (4, 36 * line), cv2.FONT_HERSHEY_SIMPLEX, 1, color, 2)
    return (image.transpose(2, 0, 1)[None].astype(np.float32) - 127.5) / 127.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "min_similarity"),
    [
        pytest.param("ch_PP-OCRv4_det", (160, 192), 60, marks=pytest.mark.release),
        pytest.param("ch_PP-OCRv4_rec", (48, 160), 40, marks=pytest.mark.release),
        ("ch_ppocr_mobile_v2.0_cls", (48, 192), 50),
    ],
)
def test_ocr_models(name, size, min_similarity):
    file = f"rapidocr_onnxruntime/models/{name}_infer.onnx"
    loaded = load(fetch_model("rapidocr-onnxruntime", "1.4.4", file))
    model = loaded.model
    graph = find_layers(model)
    assert len(graph.layers) > min_similarity
    (spec,) = loaded.inputs
    batches = [{spec.name: text(size, seed)} for seed in range(4)]
    config = default_config(graph, batch_num=len(batches))
    exact = calibrate_amct(model, graph, batches, config, exact=True)
    streamed = calibrate_amct(model, graph, batches, config)
    one_step = 0.01 / 0.7  # a candidate is 0.01 of the range, of which 0.7 is the least
    for layer, record in exact.records.items():
        similarity = streamed.records[layer]
        assert similarity.scale_d == pytest.approx(float(record.scale_d), rel=one_step)
        assert abs(similarity.offset_d - record.offset_d) <= 2
    records = compare_deploy_model(model, quantize_layers(model, graph, exact.records), batches[:2])
    assert records.max_npu_difference <= 1e-5
    assert records.min_amct_cosine > 0.9
