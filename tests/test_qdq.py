from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from calibrators.percentile import minmax
from calibrators.scales import Scale, Scales
from deploy.errors import ExportError
from deploy.frontends import load
from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import Read, analyse
from deploy.targets.onnxruntime import qdq
from deploy.targets.onnxruntime.qdq import Stored, write_qdq


@pytest.fixture(scope="module")
def calibrated(histograms, small_cnn):
    model = load(small_cnn).model
    rng = np.random.default_rng(1)
    samples = [{"x": rng.normal(size=(1, 3, 16, 16)).astype(np.float32)} for _ in range(8)]
    tensors = {t for p in (ONNXRUNTIME, TENSORRT) for t in analyse(model, p).activations}
    found = histograms(model, sorted(tensors), samples)
    scales = Scales({name: minmax(histogram) for name, histogram in found.items()})
    return model, scales, samples


def run(model: onnx.ModelProto, sample: dict, *, plain: bool = False) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if plain:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    return session.run(None, sample)[0]


@pytest.mark.parametrize("placement", [ONNXRUNTIME, TENSORRT], ids=lambda p: p.name)
def test_the_quantized_model_is_valid_and_close(calibrated, placement):
    model, scales, samples = calibrated
    before = model.SerializeToString(deterministic=True)
    quantized = write_qdq(model, analyse(model, placement), scales)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(quantized, full_check=True)
    want = np.concatenate([run(model, s) for s in samples])
    got = np.concatenate([run(quantized, s) for s in samples])
    noise = ((want - got) ** 2).sum() / (want**2).sum()
    assert 0 < noise < 10 ** (-25 / 10)


@pytest.mark.parametrize("placement", [ONNXRUNTIME, TENSORRT], ids=lambda p: p.name)
def test_weights_that_were_stored_before_are_not_rounded_again(calibrated, placement, monkeypatch):
    model, scales, _ = calibrated
    wider = {name: replace(scales[name], lo=2 * scales[name].lo, hi=2 * scales[name].hi)
             for name in scales}  # fmt: skip
    plan, stored = analyse(model, placement), Stored()
    write_qdq(model, plan, scales, stored=stored)
    plain = [write_qdq(model, plan, one).SerializeToString() for one in (scales, wider)]
    monkeypatch.delattr(qdq, "quantize_weight")
    for one, wanted in zip((scales, wider), plain, strict=True):
        assert write_qdq(model, plan, one, stored=stored).SerializeToString() == wanted


@pytest.mark.parametrize("float_nodes", [(), ("Conv_c2",)])
def test_a_model_that_was_read_before_is_written_the_same(calibrated, float_nodes):
    model, scales, _ = calibrated
    read = Read(model)
    for kept in ((), float_nodes, ()):
        one, other = (analyse(model, ONNXRUNTIME, float_nodes=kept, read=r) for r in (read, None))
        assert one == other
        written = [write_qdq(model, plan, scales).SerializeToString() for plan in (one, other)]
        assert written[0] == written[1]


def test_a_weight_that_a_float_node_reads_too_stays_where_it_was(calibrated):
    model, scales, _ = calibrated
    shared = onnx.ModelProto.FromString(model.SerializeToString())
    weight = next(n for n in shared.graph.node if n.op_type == "Conv").input[1]
    place = [t.name for t in shared.graph.initializer].index(weight)
    shared.graph.node.append(onnx.helper.make_node("Neg", [weight], ["beside"], name="beside"))
    shared.graph.output.append(onnx.ValueInfoProto(name="beside"))
    written = write_qdq(shared, analyse(shared, ONNXRUNTIME), scales)
    names = [t.name for t in written.graph.initializer]
    assert names.index(weight) <= place and f"{weight}/quantized" in names
    assert numpy_helper.to_array(written.graph.initializer[names.index(weight)]).dtype == np.float32


def test_weights_are_int8_and_no_float_copy_is_left(calibrated):
    model, scales, _ = calibrated
    quantized = write_qdq(model, analyse(model, ONNXRUNTIME), scales)
    floats = [
        t.name
        for t in quantized.graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT and np.prod(t.dims) > 64
    ]
    assert floats == []
    kinds = {t.data_type for t in quantized.graph.initializer if t.name.endswith("/quantized")}
    assert kinds == {onnx.TensorProto.INT8, onnx.TensorProto.INT32}
    assert len(quantized.SerializeToString()) < len(model.SerializeToString()) / 2


def test_onnxruntime_fuses_every_layer_into_its_int8_kernels(calibrated, kernels):
    model, scales, _samples = calibrated
    quantized = write_qdq(model, analyse(model, ONNXRUNTIME), scales)
    kinds = set(kernels(quantized))
    assert {"QLinearConv", "QLinearAdd", "QGemm"} <= kinds
    assert not kinds & {"Conv", "FusedConv", "Gemm", "Add", "Relu"}


def test_names_of_outputs_and_inner_tensors_stay(calibrated):
    model, scales, _ = calibrated
    plan = analyse(model, ONNXRUNTIME)
    quantized = write_qdq(model, plan, scales)
    assert [o.name for o in quantized.graph.output] == [o.name for o in model.graph.output]
    made = {name for n in quantized.graph.node for name in n.output}
    assert {p.tensor for p in plan.pairs} - {"x"} <= made


def test_a_missing_scale_is_named(calibrated):
    model, scales, _ = calibrated
    fewer = Scales({n: s for n, s in scales.items() if n != "x"})
    with pytest.raises(ExportError, match=r"1 have none \(x\)"):
        write_qdq(model, analyse(model, ONNXRUNTIME), fewer)


def test_a_bias_beyond_int32_widens_its_weight_scale(small_cnn):
    model = load(small_cnn).model
    for tensor in model.graph.initializer:
        if tensor.name == "w1":
            weight = numpy_helper.to_array(tensor).copy()
            weight[0] = 1e-9
            tensor.CopyFrom(numpy_helper.from_array(weight, "w1"))
        if tensor.name == "b1":
            tensor.CopyFrom(numpy_helper.from_array(np.full(8, 3.0, np.float32), "b1"))
    plan = analyse(model, ONNXRUNTIME)
    one = Scale(lo=-1, hi=1, amax=1, observed_min=-1, observed_max=1, method="minmax")
    quantized = write_qdq(model, plan, dict.fromkeys(plan.activations, one))
    ints = {t.name: numpy_helper.to_array(t) for t in quantized.graph.initializer}
    (name,) = [n for n in ints if n.startswith("b1/") and n.endswith("/quantized")]
    scale = ints[name.replace("/quantized", "/scale")]
    assert np.allclose(ints[name].astype(np.float64) * scale, 3.0, rtol=2e-5)


def test_seven_bit_weights_for_cpus_that_saturate(calibrated):
    model, scales, _ = calibrated
    quantized = write_qdq(model, analyse(model, ONNXRUNTIME), scales, weight_bits=7)
    for tensor in quantized.graph.initializer:
        if tensor.data_type == onnx.TensorProto.INT8 and tensor.dims:
            assert np.abs(numpy_helper.to_array(tensor).astype(int)).max() <= 63


def test_tensorrt_pairs_are_symmetric_with_zero_point_0(calibrated):
    model, scales, _ = calibrated
    quantized = write_qdq(model, analyse(model, TENSORRT), scales)
    constants = {t.name: numpy_helper.to_array(t) for t in quantized.graph.initializer}
    pairs = [n for n in quantized.graph.node if n.op_type == "QuantizeLinear"]
    assert pairs
    for node in pairs:
        tensor = node.name.removesuffix("/Q")
        assert constants[node.input[2]] == 0 and constants[node.input[2]].dtype == np.int8
        owner = analyse(model, TENSORRT).owners.get(tensor, tensor)
        assert constants[node.input[1]] == scales[owner].symmetric
    assert not [t for t in quantized.graph.initializer if t.data_type == onnx.TensorProto.INT32]
