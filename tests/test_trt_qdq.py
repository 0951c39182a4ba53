"""Q/DQ models for TensorRT: where pairs stand, from a cache and back, scales for DLA."""

import random
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from calib8 import build, calibrate
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.trt_cache import from_scales, parse
from deploy.errors import CacheError, Calib8Error, ConfigError
from deploy.frontends import load
from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import analyse
from deploy.runtimes.ort import OrtSession
from deploy.targets import TensorRT
from deploy.targets.tensorrt.cache_contents import trt_tensors
from deploy.targets.tensorrt.cache_match import match_cache
from deploy.targets.tensorrt.cache_qdq import concat_scales, from_qdq
from deploy.targets.tensorrt.cache_tools import cache_to_qdq, qdq_to_cache
from deploy.targets.tensorrt.float_types import round_scales
from deploy.targets.tensorrt.infer_scales import infer_missing_scales
from deploy.tuning.search_options import Tuning
from tests.vendor_models import build_net, parse_nodes, save_net, scale_nodes

PAD = {"pads": [1, 1, 1, 1]}
FEED = {"x": np.random.default_rng(11).standard_normal((2, 3, 8, 8)).astype(np.float32)}


def residual(*, batchnorm=False):
    """stem -> (a -> b) + skip -> concat with a branch -> pool -> Gemm."""
    rng, weights = np.random.default_rng(12), {}
    for name, channels in {"stem": 3, "a": 4, "b": 4, "side": 4, "last": 8}.items():
        weights[f"{name}.w"] = rng.standard_normal((4, channels, 3, 3))
        weights[f"{name}.b"] = rng.standard_normal(4)
        if batchnorm:
            weights |= {f"{name}.n{key}": rng.random(4) + 0.5 for key in "sbmv"}
    weights |= {"fc.w": rng.standard_normal((5, 4)), "fc.b": rng.standard_normal(5)}
    end = "bn" if batchnorm else "out"

    def conv(source, name):
        text = f"Conv {source} {name}.w {name}.b -> {name}_out"
        norm = f"BatchNormalization {name}_out {name}.ns {name}.nb {name}.nm {name}.nv -> {name}_bn"
        return f"{text} | {norm}" if batchnorm else text

    nodes = parse_nodes(
        f"{conv('x', 'stem')} | Relu stem_{end} -> stem_relu",
        f"{conv('stem_relu', 'a')} | Relu a_{end} -> a_relu",
        f"{conv('a_relu', 'b')} | Add b_{end} stem_relu -> added | Relu added -> body",
        f"{conv('body', 'side')} | Relu side_{end} -> side_relu | Concat body side_relu -> both",
        f"{conv('both', 'last')} | Relu last_{end} -> last_relu",
        "GlobalAveragePool last_relu -> pooled | Flatten pooled -> flat | Gemm flat fc.w fc.b -> y",
        **{"name": "/{out}", "Conv": PAD, "Concat": {"axis": 1}, "Gemm": {"transB": 1}},
    )
    return build_net(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5]}, weights, producer_name="test")


def cache_of(model, version="8.5.3"):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.cache"
        policy = CachePolicy(path=path, trt_version=version)
        calibrate(model, [FEED], targets=["tensorrt"], method="entropy-tensorrt", cache=policy)
        return parse(path.read_bytes(), origin="m.cache")


def outputs(model):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, FEED)[0])


@pytest.mark.parametrize(
    ("batchnorm", "version"), [(False, "8.5.3"), (True, "8.5.3"), (False, "10.3.0")]
)
def test_cache_survives_conversion_to_qdq(tmp_path, batchnorm, version):
    model = residual(batchnorm=batchnorm)
    cache = cache_of(model, version)
    quantized, matched = cache_to_qdq(model, cache, keep_batchnorm=batchnorm)
    onnx.checker.check_model(quantized)
    assert matched.covered_tensor_count == len(matched.tensors)
    path = tmp_path / "m.qdq.onnx"
    path.write_bytes(quantized.SerializeToString())
    plain, second_cache = qdq_to_cache(path, version=version)
    onnx.checker.check_model(plain.model)
    assert {e.name: e.bits for e in second_cache.entries} == {
        name: int(scale.view(np.uint32)) for name, scale in scale_nodes(quantized)
    }
    assert np.array_equal(outputs(plain.model), outputs(model))
    error = np.abs(outputs(quantized) - outputs(model)).max()
    assert 0 < error < 0.2 * np.abs(outputs(model)).max()


def test_scales_equal_cache_but_at_concat():
    model = residual()
    cache = cache_of(model)
    scales = cache.scales()
    shared, _ = cache_to_qdq(model, cache)
    for name, scale in scale_nodes(shared):
        assert scale == scales[name] or name in ("both", "body")
    text = "Relu x -> a | Relu x -> b | Concat a b -> c | Conv c w -> d | Conv a w2 -> e"
    nodes = parse_nodes(f"{text} | Add d e -> y", c={"axis": 1})
    weights = {"w": np.ones((2, 4, 1, 1)), "w2": np.ones((2, 2, 1, 1))}
    model = build_net(nodes, {"x": [1, 2, 4, 4]}, {"y": [1, 2, 4, 4]}, weights)
    loaded = load(model).model
    scale_by_tensor = {name: np.float32(s) for s, name in enumerate(trt_tensors(loaded), start=1)}
    matched = match_cache(from_scales(scale_by_tensor, version="8.5.3"), loaded)
    shared = concat_scales(loaded, matched.plan, matched.scales)
    assert shared["a"] == shared["c"] == max(scale_by_tensor["a"], scale_by_tensor["c"])


def pairs(model):
    return {name for name, _ in scale_nodes(model)}


def test_pairs_are_where_tensorrt_needs_them():
    model = residual()
    quantized, _ = cache_to_qdq(model, cache_of(model))
    # inputs of Conv, pool and Gemm, and the Add's skip branch; nothing between a Conv and its Relu
    assert pairs(quantized) == {"x", "stem_relu", "a_relu", "body", "both", "last_relu", "flat"}
    add = next(node for node in quantized.graph.node if node.op_type == "Add")
    makers = {out: n for n in quantized.graph.node for out in n.output}
    assert [makers[name].op_type for name in add.input] == ["Conv", "DequantizeLinear"]
    for node in quantized.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = next(t for t in quantized.graph.initializer if t.name == node.input[2])
            assert not numpy_helper.to_array(zero).any()
            assert zero.data_type == TensorProto.INT8
        if node.op_type == "Conv":
            weight = makers[node.input[1]]
            assert weight.op_type == "DequantizeLinear"
            assert helper.get_attribute_value(weight.attribute[0]) == 0
            assert node.input[2] not in makers


def test_conversion_accounts_for_all_entries():
    model = residual(batchnorm=True)
    scales = dict(cache_of(model).scales())
    del scales["both"]
    scales["stem_relu"] = np.float32(0)
    scales["elsewhere"] = np.float32(1)
    scales["(Unnamed Layer* 9) [Constant]_output"] = np.float32(1)
    scales["(Unnamed Layer* 9) [Shuffle]_output"] = np.float32(1)
    matched = match_cache(from_scales(scales, version="8.5.3"), load(model).model, original=model)
    assert len(matched.entries) == len(scales)
    reason_by_entry = {entry.name: entry.reason for entry in matched.entries if not entry.is_used}
    assert "zero" in reason_by_entry["stem_relu"]
    assert "no tensor" in reason_by_entry["elsewhere"]
    assert "parser" in reason_by_entry["(Unnamed Layer* 9) [Constant]_output"]
    assert "parser" in reason_by_entry["(Unnamed Layer* 9) [Shuffle]_output"]
    assert "folding" in reason_by_entry["stem_out"]
    gaps = {tensor.tensor: tensor.reason for tensor in matched.tensors if not tensor.has_scale}
    assert set(gaps) == {"both", "stem_relu", "last_relu"}
    assert "zero" in gaps["stem_relu"]
    assert "no entry" in gaps["both"]
    assert "stays float" in gaps["last_relu"]  # the pool behind the Conv that reads `both`


def test_entries_of_folded_tensors_are_explained(tmp_path):
    model = residual(batchnorm=True)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    cache = from_scales({**cache_of(model).scales(), "a_out": np.float32(1)}, version="8.5.3")
    for source in (model, path):
        _, matched = cache_to_qdq(source, cache)
        (entry,) = [entry for entry in matched.entries if entry.name == "a_out"]
        assert not entry.is_used
        assert "not after folding" in entry.reason


ZERO = np.int8(0)


PAIR = "QuantizeLinear x s z -> q | DequantizeLinear q s2 z -> d"
INTEGER = "QuantizeLinear x s z -> q | QLinearMatMul q s z w s z s z -> d8"
INTEGER += " | DequantizeLinear d8 s z -> d | Relu d -> y"
LONE = "Cast x -> x8 | DequantizeLinear x8 s z -> d | Relu d -> y"
WEIGHT = f"{PAIR} | DequantizeLinear w ws wz -> wd | Gemm d wd -> y"


def qdq_model(scale=0.1, zero=ZERO, second=None, text=f"{PAIR} | Relu d -> y", **constants):
    """x -> Q -> DQ -> Relu, as small as it gets, or other nodes of the same scales."""
    constants["s"], constants["z"] = np.asarray(scale, np.float32), np.asarray(zero)
    constants["s2"] = np.asarray(scale if second is None else second, np.float32)
    nodes = parse_nodes(text, x8={"to": TensorProto.INT8}, wd={"axis": 0})
    return build_net(nodes, {"x": [1, 3]}, {"y": [1, 3]}, constants)


def test_smallest_qdq_model_and_unrelated_cache(wording):
    plain = from_qdq(qdq_model())
    assert plain.scales == {"x": np.float32(0.1)}
    assert [node.op_type for node in plain.model.graph.node] == ["Relu"]
    assert list(plain.model.graph.node[0].input) == ["x"]
    foreign = from_scales({"elsewhere": np.float32(1)}, version="8.5.3")
    with pytest.raises(CacheError) as raised:
        cache_to_qdq(residual(), foreign)
    wording.check(raised.value)


EIGHTS = {"w": np.ones((2, 3), np.int8), "ws": np.ones(5), "wz": np.zeros(5, np.int8)}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (qdq_model(zero=np.uint8(3)), "uint8 with zero-point 3"),
        (qdq_model(zero=np.int8(5)), "zero-point 5"),
        (qdq_model(scale=[0.1, 0.2, 0.3], zero=np.zeros(3, np.int8)), "a scale a channel"),
        (qdq_model(second=0.2), "another scale or zero point"),
        (qdq_model(scale=0.0), "above 0 and finite"),
        (qdq_model(scale=np.nan), "above 0 and finite"),
        (qdq_model(text=INTEGER, w=np.ones((3, 3), np.int8)), "integer operator QLinearMatMul"),
        (qdq_model(text=LONE), "no QuantizeLinear stands before it"),
        (qdq_model(text=WEIGHT, **EIGHTS), "pairs on float tensors"),
        (residual(), "got none"),
    ],
)
def test_qdq_beyond_cache_format_is_refused(model, reason):
    with pytest.raises(Calib8Error, match=reason):
        from_qdq(model)


@pytest.mark.parametrize("own_domain", [False, True])
def test_onnxruntime_qdq_models_convert_to_cache(own_domain, tmp_path):
    """Symmetric Q/DQ as onnxruntime writes it: int8 weights, int32 biases, pairs on outputs."""
    from onnxruntime import quantization as ortq

    class Reader(ortq.CalibrationDataReader):
        get_next = partial(next, iter([FEED]), None)  # type: ignore[assignment]

    source, target = tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(residual(), source)
    ortq.quantize_static(
        source,
        target,
        Reader(),
        quant_format=ortq.QuantFormat.QDQ,
        per_channel=True,
        activation_type=ortq.QuantType.QInt8,
        weight_type=ortq.QuantType.QInt8,
        extra_options={
            "ActivationSymmetric": True,
            "WeightSymmetric": True,
            "UseQDQContribOps": own_domain,
        },
    )
    plain, cache = qdq_to_cache(target, version="8.5.3")
    onnx.checker.check_model(plain.model)
    assert not [n for n in plain.model.graph.node if "Quantize" in n.op_type]
    read_tensors = {name for node in plain.model.graph.node for name in node.input}
    assert {tensor.name for tensor in plain.model.graph.initializer} <= read_tensors
    assert {"x", "stem_relu", "y"} <= set(cache.scales())
    assert np.isfinite(outputs(plain.model)).all()


def test_damaged_models_raise_a_clear_error(tmp_path):
    model = residual()
    quantized, _ = cache_to_qdq(model, cache_of(model))
    model_bytes = quantized.SerializeToString()
    path = tmp_path / "m.onnx"
    dice = random.Random(6)
    refused = 0
    for _ in range(80):
        damaged = bytearray(model_bytes)
        for _ in range(dice.randint(1, 5)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            qdq_to_cache(path, version="8.5.3")
        except Calib8Error as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused


def node(op, inputs, output, **attributes):
    """A node named after its output; the input _ is left out."""
    reads = [name.strip("_") for name in inputs.split()]
    return helper.make_node(op, reads, output.split(), name=output, **attributes)


def silu(tensor, out):
    return f"Sigmoid {tensor} -> {out}_s | Mul {tensor} {out}_s -> {out}"


OF_OPERATORS = {"Conv": PAD, "Gemm": {"transB": 1}, "Concat": {"axis": 1}}
OF_OPERATORS |= {"MaxPool": {"kernel_shape": [2, 2]}, "ConvTranspose": {"strides": [2, 2]}}


def net(text, tmp_path, **attributes):
    rng, nodes = np.random.default_rng(1), parse_nodes(text, **OF_OPERATORS | attributes)
    shapes = {"w": (4, 4, 3, 3), "w2": (4, 8, 3, 3), "g": (5, 4), "t": (4, 4, 2, 2)}
    shapes |= {"m": (8, 8), "bias": (8,)}
    constants = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    constants |= {"shape": np.array([4, 8, 8]), "two": 2.0, "sizes": np.array([1, 4, 16, 16])}
    used_constants = {name: constants[name] for n in nodes for name in n.input if name in constants}
    path = tmp_path / "net.onnx"
    return load(save_net(path, nodes, {"x": [1, 4, 8, 8]}, {"y": None}, used_constants)).model


def explain(model, placement=TENSORRT, **options):
    plan = analyse(model, placement, **options)
    reasons = {d.node: d.reason for d in plan.decisions}
    return reasons, {p.tensor: p.consumers for p in plan.pairs}


STEM = f"Conv x w -> a | {silu('a', 'as')}"
BLOCK = f"{STEM} | Conv as w -> b | {silu('b', 'bs')} | Conv bs w -> c"
BOTTLENECK = f"{BLOCK} | {silu('c', 'cs')} | Add as cs -> sum"


@pytest.mark.parametrize(
    "reader",
    [
        "Conv sum w -> y",
        "MaxPool sum -> p | Conv p w -> y",
        "GlobalAveragePool sum -> p | Flatten p -> f | Gemm f g -> y",
    ],
)
def test_add_after_silu_quantizes_skip_branch(reader, tmp_path):
    reasons, pairs = explain(net(f"{BOTTLENECK} | {reader}", tmp_path))
    assert reasons["sum"] == ""
    assert "cs" not in pairs
    assert pairs["as"] == ("b", "sum")  # one pair for the convolution and the Add


@pytest.mark.parametrize("operands", ["d s", "s d"])
def test_add_of_convolutions_quantizes_the_shortcut(operands, tmp_path):
    block = "Conv x w -> a | Relu a -> r | Conv r w -> c | Relu c -> q | Conv q w -> d"
    text = f"{block} | Conv r w -> s | Add {operands} -> sum | Relu sum -> u | Conv u w -> y"
    reasons, pairs = explain(net(text, tmp_path))
    assert reasons["sum"] == ""
    assert "d" not in pairs
    assert pairs["s"] == ("sum",)


def test_add_stays_float_without_int8_neighbours(tmp_path, wording):
    reasons, pairs = explain(net(f"{BOTTLENECK} | Softmax sum -> y", tmp_path))
    wording.check(reasons["sum"])
    assert pairs["as"] == ("b",)
    text = f"{BLOCK} | Exp c -> e | Add as e -> sum | Conv sum w -> y"
    reasons, _ = explain(net(text, tmp_path))
    wording.check(reasons["sum"])
    reasons, pairs = explain(net(f"{BOTTLENECK} | Conv sum w -> y", tmp_path), float_nodes=["c"])
    wording.check(reasons["sum"])
    assert pairs["as"] == ("b",)
    assert not ONNXRUNTIME.passes_int8
    assert TENSORRT.passes_int8 > {"Sigmoid", "Mul", "Concat", "GlobalAveragePool"}


def test_concat_reuses_existing_pairs(tmp_path):
    text = f"{BOTTLENECK} | Concat as sum -> cat"
    reasons, pairs = explain(net(f"{text} | Conv cat w2 -> y", tmp_path))
    assert reasons["sum"] == ""
    assert pairs["as"] == ("b", "sum", "cat")
    assert pairs["cat"] == ("y",)
    text += " | Conv cat w2 -> k | Exp cat -> e | Concat k e -> y"
    _, pairs = explain(net(text, tmp_path))
    assert pairs["as"] == ("b", "sum")  # a float node reads the Concat, and gets float values


# A linear layer beside a residual stream, behind a norm, as in a transformer: [N, T, 8].
NORM = "ReduceMean {0} -> mean{1} | Sub {0} mean{1} -> centred{1}"
NORM += " | Mul centred{1} bias -> scaled{1} | Add scaled{1} bias -> normed{1}"
VIT = f"Reshape x shape -> s | MatMul s m -> p | Exp p -> stream | {NORM.format('stream', '')}"
VIT += " | MatMul normed m -> q | Add q bias -> qb | Mul bias qb -> qs | Add qs stream -> sum"
LAST_AXIS = {"ReduceMean": {"axes": [-1]}}


def test_transformer_adds_quantize_the_residual_stream(tmp_path, wording):
    text = f"{VIT} | {NORM.format('sum', '2')} | MatMul normed2 m -> y"
    reasons, pairs = explain(net(text, tmp_path, **LAST_AXIS))
    assert reasons["sum"] == ""
    assert pairs["stream"] == ("sum",)
    assert "qs" not in pairs
    assert "picture" in reasons["mean"]
    assert "picture" in reasons["mean2"]
    reasons, pairs = explain(net(f"{VIT} | Softmax sum -> y", tmp_path, **LAST_AXIS))
    wording.check(reasons["sum"])
    assert "stream" not in pairs


GEMM = "Flatten p -> f | Gemm f g -> y"


@pytest.mark.parametrize(
    ("pool", "attributes"),
    [
        ("GlobalAveragePool", {}),
        ("AveragePool", {"kernel_shape": [8, 8]}),
        ("MaxPool", {"kernel_shape": [8, 8]}),
        ("ReduceMean", {"axes": [2, 3]}),
        ("ReduceMean", {"axes": [-1, -2]}),
    ],
)
def test_pool_between_int8_nodes_is_int8(pool, attributes, tmp_path):
    reasons, pairs = explain(net(f"{STEM} | {pool} as -> p | {GEMM}", tmp_path, p=attributes))
    assert reasons["p"] == ""
    assert pairs["as"] == ("p",)
    assert pairs["f"] == ("y",)


def test_pool_next_to_float_is_float(tmp_path, wording):
    pooled = f"{STEM} | GlobalAveragePool as -> p"
    reasons, pairs = explain(net(f"{pooled} | Softmax p -> y", tmp_path))
    wording.check(reasons["p"])
    assert "as" not in pairs
    large = {"kernel_shape": [8, 8]}
    text = f"{STEM} | Exp as -> e | MaxPool e -> p | {GEMM}"
    reasons, _ = explain(net(text, tmp_path, p=large))
    wording.check(reasons["p"])
    gate = "Conv p w -> c | Sigmoid c -> s | Mul as s -> y"
    reasons, pairs = explain(net(f"{pooled} | {gate}", tmp_path))
    wording.check(reasons["p"])
    assert "as" not in pairs
    rows = f"{STEM} | ReduceMean as -> p | Tanh p -> y"
    reasons, _ = explain(net(rows, tmp_path, p={"axes": [1, 3]}))
    wording.check(reasons["p"])


def test_readers_of_float_concat_stay_float(tmp_path, wording):
    behind_concat = TensorRT(float_behind_concat=True).placement
    text = "Conv x w -> a | Conv a w -> b | Concat a b -> cat | Conv cat w2 -> y"
    reasons, _ = explain(net(text, tmp_path), behind_concat)
    assert reasons["y"] == ""
    text = "Conv x w -> a | Exp a -> e | Concat a e -> cat | MaxPool cat -> p | Conv p w2 -> y"
    model = net(text, tmp_path)
    reasons, pairs = explain(model, behind_concat)
    wording.check(reasons["y"])
    assert set(pairs) == {"x"}
    assert explain(model)[0]["y"] == ""
    for word in ("float_behind_concat", "pair_behind_deconv"):
        with pytest.raises(ConfigError) as raised:
            TensorRT(form="cache", **{word: True})
        wording.check(raised.value)
    with pytest.raises(ConfigError) as raised:
        TensorRT(precision="fp8", pair_behind_deconv=True)
    wording.check(raised.value)


def test_transposed_convolution_has_pair_before_activation(tmp_path):
    text = "Conv x w -> a | ConvTranspose a t -> d | Relu d -> r | Conv r w -> y"
    model = net(text, tmp_path)
    assert set(explain(model)[1]) == {"x", "a", "r"}
    rng = np.random.default_rng(0)
    samples = [{"x": rng.normal(size=(1, 4, 8, 8)).astype(np.float32)} for _ in range(4)]
    target = TensorRT(pair_behind_deconv=True, rest="fp32")
    build(
        model,
        samples,
        out=tmp_path / "out",
        targets=[target],
        duration_s=0,
        tuning=Tuning(effort=0),
    )
    (written,) = (tmp_path / "out").glob("*.qdq.onnx")
    readers = {name: n.op_type for n in onnx.load(written).graph.node for name in n.input}
    assert readers["d"] == "QuantizeLinear"
    assert readers["d/dequantized"] == "Relu"
    outputs = OrtSession.open(written).run(samples[0])["y"]
    exact = OrtSession.open(tmp_path / "net.onnx").run(samples[0])["y"]
    assert np.corrcoef(outputs.ravel(), exact.ravel())[0, 1] > 0.99


@pytest.mark.slow
def test_dla_pairs_have_the_cache_scales(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(residual(), path)
    build(
        path,
        [FEED],
        out=tmp_path / "out",
        targets=[TensorRT(dla=True)],
        duration_s=0,
        tuning=Tuning(effort=0),
    )
    stem = tmp_path / "out" / "m.tensorrt"
    cache = parse(stem.with_suffix(".tensorrt.cache").read_bytes(), origin="").scales()
    exact = OrtSession.open(path).run(FEED)["y"]
    concat = {"body", "side_relu", "both"}
    shared = max(cache[name] for name in concat)
    for suffix, float_type in (("qdq", "fp32"), ("typed", "fp16")):
        written = stem.with_suffix(f".tensorrt.{suffix}.onnx")
        model = onnx.load(written)
        onnx.checker.check_model(model, full_check=True)
        constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        makers = {name: n for n in model.graph.node for name in n.output}
        pairs = {
            n.input[0].removesuffix("/float"): constants[n.input[1]].astype(np.float32)
            for n in model.graph.node
            if n.op_type == "QuantizeLinear" and n.input[0] not in constants
        }
        assert list(pairs) == trt_tensors(load(path).model)
        scales = cache | dict.fromkeys(concat, shared)
        assert all(
            scale == round_scales(np.atleast_1d(scales[name]), float_type)[0]
            for name, scale in pairs.items()
        )
        for n in model.graph.node:
            if n.op_type in ("QuantizeLinear", "DequantizeLinear"):
                continue
            activations = [name for name in n.input[:2] if name not in constants]
            assert {makers[name].op_type for name in activations} == {"DequantizeLinear"}
            if n.op_type == "Conv":
                weight = makers[n.input[1]]
                assert constants[weight.input[1]].shape == (4,)
                assert weight.attribute[0].i == 0
        outputs = OrtSession.open(written, int8_kernels=False).run(FEED)["y"]
        assert np.abs(outputs - exact).max() < 0.06 * np.abs(exact).max()
    build(
        stem.with_suffix(".tensorrt.qdq.onnx"),
        [FEED],
        out=tmp_path / "again",
        duration_s=0,
        targets=[TensorRT(dla=True)],
    )
    (second_model,) = (tmp_path / "again").glob("*.typed.onnx")
    nodes = onnx.load(second_model).graph.node
    reads = {n.input[0] for n in nodes if n.op_type == "QuantizeLinear"}
    assert {name.removesuffix("/float") for name in reads} >= set(pairs)


@pytest.mark.parametrize(
    ("text", "attributes", "reason"),
    [
        ("Softmax a -> y", {}, "Softmax is not run in int8 on DLA"),
        ("MatMul a a -> y", {}, "DLA multiplies by constant matrices only"),
        ("Reshape a shape -> r | Relu r -> y", {}, "DLA runs it on tensors [N, C, H, W] only"),
        ("Concat a a -> y", {"y": {"axis": 2}}, "DLA concatenates channels only"),
        ("Resize a _ _ sizes -> y", {"y": {"mode": "cubic"}}, "DLA has no cubic Resize"),
        (
            "ConvTranspose a t -> y",
            {"y": {"pads": [1, 1, 0, 0]}},
            "DLA runs a ConvTranspose without groups, dilations and pads only",
        ),
        (
            "ConvTranspose a t -> y",
            {"y": {"group": 2}},
            "DLA runs a ConvTranspose without groups, dilations and pads only",
        ),
        (
            "ConvTranspose a t -> y",
            {"y": {"dilations": [2, 1]}},
            "DLA runs a ConvTranspose without groups, dilations and pads only",
        ),
        ("Tanh a -> h | Mul h two -> y", {}, ""),
        ("Max a x -> y", {}, ""),
        ("ConvTranspose a t -> y", {}, ""),
    ],
)
def test_layers_unsupported_by_dla_stay_float(text, attributes, reason, tmp_path):
    model = net(f"Conv x w -> a | {text}", tmp_path, **attributes)
    reasons, pairs = explain(model, TensorRT(dla=True).placement)
    assert reasons["a"] == ""
    assert reasons["y"] == reason
    assert {"x", "a"} <= set(pairs)
    assert ("y" in pairs) == (reason == "")


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"precision": "fp8"}, "--precision fp8"),
        ({"form": "cache"}, "--engine-from cache"),
        ({"rest": "bf16"}, "--rest bf16"),
        ({"calibrator": "minmax"}, "--calibrator"),
        ({"float_behind_concat": True}, "--float-behind-concat"),
    ],
)
def test_options_incompatible_with_dla_are_refused(options, got):
    with pytest.raises(ConfigError, match=f"got {got} with --dla"):
        TensorRT(dla=True, **options)


FASHION = Path(__file__).parents[1] / "datasets" / "fashion"


def model_of(nodes, shape, weights, outputs="y"):
    opsets = {"": 18, "of.others": 1}
    return build_net(nodes, {"x": shape}, dict.fromkeys(outputs.split()), weights, opset=opsets)


@pytest.fixture(scope="module")
def efficient(tmp_path_factory):
    """A small EfficientNet: SiLU, depthwise, squeeze-excite, residual, Concat, pools; and data."""
    rng, weights, attributes = np.random.default_rng(5), {}, {}

    shapes = {"c1": (4, 3, 3, 3), "c2": (4, 1, 3, 3), "se1": (2, 4, 1, 1), "se3": (4, 2, 1, 1)}
    shapes |= {"c3": (4, 4, 1, 1), "c4": (4, 4, 3, 3), "c5": (8, 8, 3, 3)}
    for out, shape in shapes.items():
        weights[f"{out}.w"] = rng.normal(scale=0.4, size=shape)
        attributes[out] = {"pads": [shape[2] // 2] * 4, "group": 4 if out == "c2" else 1}
    weights |= {"fc.w": rng.normal(size=(5, 8)), "lo": np.float32(0), "hi": np.float32(6)}
    attributes |= {"both": {"axis": 1}, "logits": {"transB": 1}}
    attributes["small"] = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = parse_nodes(
        "Conv x c1.w -> c1 | Sigmoid c1 -> a1.s | Mul c1 a1.s -> a1",
        "Conv a1 c2.w -> c2 | Sigmoid c2 -> a2.s | Mul c2 a2.s -> a2",
        "GlobalAveragePool a2 -> pool | Conv pool se1.w -> se1 | Relu se1 -> se2",
        "Conv se2 se3.w -> se3 | Sigmoid se3 -> se4 | Mul a2 se4 -> scaled",
        "Conv scaled c3.w -> c3 | Add c3 a1 -> sum | Conv sum c4.w -> c4 | Clip c4 lo hi -> a4",
        "Concat a4 sum -> both | MaxPool both -> small | Conv small c5.w -> c5 | Relu c5 -> a5",
        "GlobalAveragePool a5 -> mean | Flatten mean -> flat | Gemm flat fc.w -> logits",
        **attributes,
    )
    folder = tmp_path_factory.mktemp("efficient")
    onnx.save(model_of(nodes, ["n", 3, 8, 8], weights, "logits"), folder / "m.onnx")
    np.save(folder / "x.npy", rng.standard_normal((8, 3, 8, 8)).astype(np.float32))
    return folder / "m.onnx"


def round_trip(run, model, images, folder, *options):
    """Return the full cache of a model, that of its pairs, that for DLA, and the last output."""
    full, qdq = folder / "full.cache", folder / "q.onnx"
    feed = ("--images", images, "--target", "tensorrt", "-o", full, *options)
    code, _, err = run("calibrate", model, *feed)
    assert code == 0, err
    assert run("cache", "to-qdq", model, full, "-o", qdq)[0] == 0
    caches, output = [full], ""
    for name, dla_option in (("pairs", ()), ("dla", ("--dla",))):
        files = folder / f"{name}.onnx", folder / f"{name}.cache"
        code, output, err = run("cache", "from-qdq", qdq, "-o", *files, *dla_option)
        assert code == 0, err
        caches.append(files[1])
    assert (folder / "pairs.onnx").read_bytes() == (folder / "dla.onnx").read_bytes()
    return (*(parse(path.read_bytes(), origin="").scales() for path in caches), output)


def test_efficientnet_scales_cover_all_but_logits(efficient, run, tmp_path):
    images = efficient.with_name("x.npy")
    full, pairs, dla, output = round_trip(run, efficient, images, tmp_path, "--method", "minmax")
    assert set(full) - set(dla) == {"logits"}
    assert set(dla) <= set(full)
    lines = output.splitlines()
    assert any(line.startswith("1 tensor has no ") for line in lines)
    assert any(line.strip().endswith("int8: logits") for line in lines)
    assert all(dla[name] == scale for name, scale in pairs.items())
    equal_names = {"se1": "se2", "c4": "a4", "both": "small", "mean": "flat", "c5": "a5"}
    assert all(dla[name] == dla[equal_name] for name, equal_name in equal_names.items())
    assert dla["c4"] == full["a4"]
    assert dla["se1"] == full["se2"]
    assert dla["mean"] == full["mean"] < full["a5"]
    assert dla["pool"] == full["pool"] < full["a2"]
    assert "guesses" in output
    bounds = ("se4", "a1.s", "sum", "c3", "a4", "se3")
    assert all(dla[name] >= np.float32(0.999) * full[name] for name in bounds)
    assert dla["se4"] == dla["a1.s"] == np.float32(1 / 127)


def test_demo_scales_cover_all_but_logits(run, tmp_path):
    model = next(FASHION.glob("*.onnx"))
    arguments = (run, model, FASHION / "calib.txt", tmp_path, "--limit", "8")
    full, pairs, dla, output = round_trip(*arguments)
    missing = set(full) - set(dla)
    assert len(missing) == 1
    assert output.rstrip().endswith(next(iter(missing)))
    assert len(pairs) < len(dla)
    assert "guesses" not in output
    equal = sum(dla[name] == full[name] for name in dla)
    assert equal >= 0.7 * len(dla)


def test_default_writes_only_the_pairs(efficient, run, command, refusal, tmp_path, wording):
    _, pairs, _, _ = round_trip(run, efficient, efficient.with_name("x.npy"), tmp_path)
    assert {"x", "a1", "pool", "scaled", "sum"} <= set(pairs)
    assert "c1" not in pairs
    arguments = ("cache", "from-qdq", tmp_path / "q.onnx", "-o", tmp_path / "p", tmp_path / "c")
    assert "--dla infers them" in command(*arguments)
    code, output, _ = run(*arguments, "--dla", "--no-guesses")
    assert code == 0
    assert "guesses" not in output
    assert all(f" {name}" in output.splitlines()[-1] for name in ("c1", "c2", "a2", "logits"))
    wording.check(refusal(*arguments, "--no-guesses"))


CONSTANTS = {
    "two": np.float32(2),
    "zero": np.float32(0),
    "six": np.float32(6),
    "half": np.float32(-0.5),
    "seven": np.float32(7),
    "row": np.array([1, -5, 2, 3], np.float32),
    "shape": np.array([1, -1]),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "halves": np.array([2, 2]),
    "sizes": np.array([1, 4, 8, 8]),
    "w": np.ones((4, 4, 1, 1), np.float32),
    "ends": np.array([2]),
    "axis": np.array([1]),
    "starts": np.array([0]),
}

TABLE = [  # nodes, ranges that are known, tensor, its range, how sure
    ([node("Reshape", "x shape", "y")], "x=4", "y", 4, "equal"),
    ([node("Transpose", "x", "y", perm=[0, 2, 3, 1])], "y=4", "x", 4, "equal"),
    ([node("GlobalAveragePool", "x", "y")], "x=4", "y", 4, "bound"),
    ([node("GlobalAveragePool", "x", "y")], "y=4", "x", 4, "guess"),
    ([node("MaxPool", "x", "y", kernel_shape=[2, 2])], "y=4", "x", 4, "equal"),
    ([node("Relu", "x", "y")], "y=4", "x", 4, "equal"),
    ([node("Relu", "x", "y")], "x=4", "y", 4, "bound"),
    ([node("Clip", "x zero six", "y")], "x=9", "y", 6, "bound"),
    ([node("Clip", "x zero six", "y")], "y=5", "x", 5, "equal"),
    ([node("Clip", "x zero six", "y"), node("Conv", "y w", "z")], "z=1", "x", 6, "bound"),
    ([node("Conv", "x w", "c"), node("Clip", "c zero six", "y")], "", "y", 6, "bound"),
    ([node("LeakyRelu", "x", "y")], "y=4", "x", 4, "guess"),
    ([node("LeakyRelu", "x", "y", alpha=3.0)], "x=4", "y", None, ""),
    ([node("Slice", "x starts ends axis", "y")], "y=4", "x", 4, "equal"),
    ([node("Split", "x halves", "y z", axis=1)], "y=4 z=5", "x", 5, "equal"),
    ([node("Split", "x halves", "y z", axis=1), node("Relu", "z", "r")], "y=4", "x", None, ""),
    ([node("Pad", "x pads", "y")], "x=4", "y", 4, "bound"),
    ([node("Pad", "x pads seven", "y")], "x=4", "y", None, ""),
    ([node("Resize", "x _ _ sizes", "y", mode="cubic")], "x=4", "y", None, ""),
    ([node("Resize", "x _ _ sizes", "y", mode="linear")], "y=4", "x", 4, "guess"),
    ([node("Resize", "x _ _ sizes", "y", mode="linear")], "x=4", "y", 4, "bound"),
    ([node("Resize", "x _ _ sizes", "y")], "y=4", "x", 4, "equal"),
    ([node("Relu", "x", "y", domain="of.others")], "y=4", "x", None, ""),
    ([node("Sigmoid", "x", "y", domain="of.others")], "x=4", "y", None, ""),
    ([node("Sigmoid", "x", "y")], "", "y", 1, "bound"),
    ([node("Sigmoid", "x", "y")], "", "x", 8, "bound"),
    ([node("Softmax", "x", "y")], "", "y", 1, "bound"),
    ([node("Concat", "x x", "y", axis=1)], "x=4", "y", 4, "equal"),
    ([node("Relu", "x", "r"), node("Concat", "x r", "y", axis=1)], "x=4 r=3", "y", 4, "bound"),
    ([node("Relu", "x", "r"), node("Concat", "x r", "y", axis=1)], "x=4 y=9", "r", 4, "bound"),
    ([node("Conv", "x w", "c"), node("Add", "c x", "y")], "x=4 y=3", "c", 7, "bound"),
    ([node("Conv", "x w", "c"), node("Sub", "c x", "y")], "x=4 c=3", "y", 7, "bound"),
    ([node("Add", "x row", "y")], "x=4", "y", 9, "bound"),
    ([node("Mul", "x half", "y")], "x=4", "y", 2, "equal"),
    ([node("Mul", "x half", "y")], "y=4", "x", 8, "equal"),
    ([node("Div", "x half", "y")], "x=4", "y", 8, "equal"),
    ([node("Div", "x half", "y")], "y=4", "x", 2, "equal"),
    ([node("Div", "half x", "y")], "y=4", "x", None, ""),
    ([node("Conv", "x w", "c"), node("Mul", "c x", "y")], "x=4 c=3", "y", 12, "bound"),
    ([node("Conv", "x w", "c"), node("Mul", "c x", "y")], "x=4 y=3", "c", None, ""),
    ([node("Sigmoid", "x", "s"), node("Mul", "x s", "y")], "y=9", "x", 9.375, "guess"),
    ([node("Sigmoid", "x", "s"), node("Mul", "x s", "y")], "x=9", "y", 9, "bound"),
    ([node("HardSwish", "x", "y")], "y=4", "x", 4.375, "guess"),
    ([node("HardSwish", "x", "y")], "x=4", "y", 4, "bound"),
    (
        [node("HardSigmoid", "x", "s", alpha=1 / 6), node("Mul", "x s", "y")],
        "y=4",
        "x",
        4.375,
        "guess",
    ),
    (
        [node("Conv", "x w", "c"), node("Sigmoid", "x", "s"), node("Mul", "c s", "y")],
        "y=4",
        "c",
        4,
        "guess",
    ),
    ([node("Relu", "x", "y"), node("Exp", "x", "z")], "y=4", "x", 4, "guess"),
    ([node("Relu", "x", "y"), node("Clip", "x zero six", "z")], "y=4 z=5", "x", 5, "bound"),
    ([node("Exp", "x", "y")], "x=4", "y", None, ""),
    ([node("Conv", "x w", "y")], "x=4", "y", None, ""),
]


def describe_row(row):
    nodes, known_ranges, tensor, *_ = row
    operators = " ".join(node.op_type for node in nodes)
    return f"{operators} {known_ranges} -> {tensor}"


@pytest.mark.parametrize(
    ("nodes", "known_ranges", "tensor", "amax", "sure"),
    TABLE,
    ids=map(describe_row, TABLE),
)
def test_missing_scale_rules(nodes, known_ranges, tensor, amax, sure):
    used = {name for n in nodes for name in n.input}
    weights = {name: value for name, value in CONSTANTS.items() if name in used}
    read = used | {"x"}
    ends = " ".join(out for n in nodes for out in n.output if out not in read)
    if tensor in ends.split() or tensor == "r":
        ends = ends or tensor
    model = model_of(nodes, [1, 4, 4, 4], weights, ends)
    range_by_tensor = dict(word.split("=") for word in known_ranges.split())
    scales = {name: np.float32(float(value) / 127) for name, value in range_by_tensor.items()}
    inferred = infer_missing_scales(model, scales)
    if amax is None:
        assert tensor in inferred.missing
        return
    assert inferred.scales[tensor] * 127 == pytest.approx(amax, rel=1e-6)
    assert inferred.levels[tensor] == sure
    assert all(inferred.scales[name] == scale for name, scale in scales.items())
