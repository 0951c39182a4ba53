"""Q/DQ models: valid, close, with int8 weights, the same from memoized parts."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from calibrators.percentile import minmax
from calibrators.scales import Scale
from deploy.errors import ExportError
from deploy.frontends import load
from deploy.graph import edit
from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import ModelAnalysis, analyse
from deploy.targets.onnxruntime import qdq
from deploy.targets.onnxruntime.qdq import write_qdq
from tests.models import make_node, run_net

each_placement = pytest.mark.parametrize("placement", [ONNXRUNTIME, TENSORRT], ids=lambda p: p.name)


@pytest.fixture(scope="module")
def calibrated(histograms, small_cnn):
    model = load(small_cnn).model
    rng = np.random.default_rng(1)
    samples = [{"x": rng.normal(size=(1, 3, 16, 16)).astype(np.float32)} for _ in range(8)]
    tensors = {t for p in (ONNXRUNTIME, TENSORRT) for t in analyse(model, p).activations}
    histogram_by_tensor = histograms(model, sorted(tensors), samples)
    return (
        model,
        {name: minmax(histogram) for name, histogram in histogram_by_tensor.items()},
        samples,
    )


@pytest.fixture(scope="module")
def quantized(calibrated):
    """(model, its scales, its plan for ONNX Runtime, what is written of these)."""
    model, scales, _ = calibrated
    plan = analyse(model, ONNXRUNTIME)
    return model, scales, plan, write_qdq(model, plan, scales)


def constants(model) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@each_placement
def test_quantized_model_is_valid_and_close(calibrated, placement):
    model, scales, samples = calibrated
    original_bytes = model.SerializeToString(deterministic=True)
    quantized = write_qdq(model, analyse(model, placement), scales)
    assert model.SerializeToString(deterministic=True) == original_bytes
    onnx.checker.check_model(quantized, full_check=True)
    expected = np.concatenate([run_net(model, sample["x"])[0] for sample in samples])
    outputs = np.concatenate([run_net(quantized, sample["x"])[0] for sample in samples])
    noise = ((expected - outputs) ** 2).sum() / (expected**2).sum()
    assert 0 < noise < 10 ** (-25 / 10)


@each_placement
def test_memoized_weights_are_not_rounded_again(calibrated, placement, monkeypatch):
    model, scales, _ = calibrated
    wider = {
        name: replace(scales[name], lo=2 * scales[name].lo, hi=2 * scales[name].hi)
        for name in scales
    }
    plan, results = analyse(model, placement), {}

    def once(key, make):
        if key not in results:
            results[key] = make()
        return results[key]

    write_qdq(model, plan, scales, memoize=once)
    models = [write_qdq(model, plan, ranges).SerializeToString() for ranges in (scales, wider)]
    monkeypatch.delattr(qdq, "quantize_weight")
    for ranges, expected in zip((scales, wider), models, strict=True):
        assert write_qdq(model, plan, ranges, memoize=once).SerializeToString() == expected


@pytest.mark.parametrize("float_nodes", [(), ("Conv_c2",)])
def test_reused_analysis_writes_the_same_model(calibrated, float_nodes):
    model, scales, _ = calibrated
    analysis = ModelAnalysis(model)
    for float_names in ((), float_nodes, ()):
        plan = analyse(model, ONNXRUNTIME, float_nodes=float_names)
        reused_plan = analyse(model, ONNXRUNTIME, float_nodes=float_names, analysis=analysis)
        assert reused_plan == plan
        written = write_qdq(model, plan, scales).SerializeToString()
        assert write_qdq(model, reused_plan, scales).SerializeToString() == written


def test_shared_float_weight_keeps_its_index(calibrated):
    model, scales, _ = calibrated
    shared = edit.copy_message(model)
    weight = next(n for n in shared.graph.node if n.op_type == "Conv").input[1]
    weight_index = list(constants(shared)).index(weight)
    shared.graph.node.append(make_node("Neg", [weight], "beside", name="beside"))
    shared.graph.output.append(onnx.ValueInfoProto(name="beside"))
    written_constants = constants(write_qdq(shared, analyse(shared, ONNXRUNTIME), scales))
    assert list(written_constants).index(weight) <= weight_index
    assert f"{weight}/quantized" in written_constants
    assert written_constants[weight].dtype == np.float32


def test_int8_weights_leave_no_float_copy(quantized):
    model, *_, written = quantized
    written_constants = constants(written)
    assert not [
        name for name, v in written_constants.items() if v.dtype == np.float32 and v.size > 64
    ]
    kinds = {
        value.dtype for name, value in written_constants.items() if name.endswith("/quantized")
    }
    assert kinds == {np.dtype(np.int8), np.dtype(np.int32)}
    assert len(written.SerializeToString()) < len(model.SerializeToString()) / 2


def test_onnxruntime_fuses_every_int8_layer(quantized, kernels):
    kinds = set(kernels(quantized[-1]))
    assert {"QLinearConv", "QLinearAdd", "QGemm"} <= kinds
    assert not kinds & {"Conv", "FusedConv", "Gemm", "Add", "Relu"}


def test_quantized_model_keeps_tensor_names(quantized):
    model, _, plan, written = quantized
    assert [o.name for o in written.graph.output] == [o.name for o in model.graph.output]
    tensors = {name for n in written.graph.node for name in n.output}
    assert {p.tensor for p in plan.pairs} - {"x"} <= tensors


def test_missing_scale_is_named(quantized):
    model, scales, plan, _ = quantized
    with pytest.raises(ExportError, match=r"1 has none \(x\)"):
        write_qdq(model, plan, {n: s for n, s in scales.items() if n != "x"})


def test_bias_beyond_int32_widens_weight_scale(small_cnn):
    model = load(small_cnn).model
    weight = constants(model)["w1"].copy()
    weight[0] = 1e-9
    changed = {"w1": weight, "b1": np.full(8, 3.0, np.float32)}
    tensors = {name: numpy_helper.from_array(value, name) for name, value in changed.items()}
    edit.update_tensors(model.graph.initializer, tensors)
    plan = analyse(model, ONNXRUNTIME)
    unit_scale = Scale(lo=-1, hi=1, amax=1, observed_min=-1, observed_max=1, method="minmax")
    ints = constants(write_qdq(model, plan, dict.fromkeys(plan.activations, unit_scale)))
    (name,) = [n for n in ints if n.startswith("b1/") and n.endswith("/quantized")]
    scale = ints[name.replace("/quantized", "/scale")]
    assert np.allclose(ints[name].astype(np.float64) * scale, 3.0, rtol=2e-5)


def test_tensorrt_pairs_have_zero_point_0(calibrated):
    model, scales, _ = calibrated
    plan = analyse(model, TENSORRT)
    written = write_qdq(model, plan, scales)
    written_constants = constants(written)
    pairs = [n for n in written.graph.node if n.op_type == "QuantizeLinear"]
    assert pairs
    for node in pairs:
        tensor = node.name.removesuffix("/Q")
        assert written_constants[node.input[2]] == 0
        assert written_constants[node.input[2]].dtype == np.int8
        assert (
            written_constants[node.input[1]]
            == scales[plan.scale_owners.get(tensor, tensor)].symmetric
        )
    assert not [value for value in written_constants.values() if value.dtype == np.int32]
