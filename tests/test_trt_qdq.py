"""Q/DQ models for TensorRT: where pairs stand, from a cache and back, scales for DLA."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.reuse import CachePolicy
from deploy.calibration.trt_cache import from_scales, parse
from deploy.errors import CacheError, Calib8Error, ConfigError, ExportError
from deploy.frontends import load
from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import analyse
from deploy.pipeline import build, calibrate
from deploy.runtimes.ort import OrtSession
from deploy.targets import TensorRT
from deploy.targets.tensorrt.cache_contents import trt_tensors
from deploy.targets.tensorrt.cache_match import match_cache
from deploy.targets.tensorrt.cache_qdq import from_qdq
from deploy.targets.tensorrt.cache_tools import cache_to_qdq, qdq_to_cache
from deploy.targets.tensorrt.infer_scales import infer_missing_scales
from deploy.tuning.search_options import Tuning
from tests.vendor_models import build_net, save_net, scale_nodes

FEED = {"x": np.random.default_rng(11).standard_normal((2, 3, 8, 8)).astype(np.float32)}


def residual(*, batchnorm=False):
    """stem -> (a -> b) + skip -> concat with a branch -> pool -> Gemm."""
    rng = np.random.default_rng(12)
    weights = {}
    nodes = []

    def conv(name, source, shape):
        weights[f"{name}.w"] = rng.standard_normal(shape).astype(np.float32)
        weights[f"{name}.b"] = rng.standard_normal(shape[0]).astype(np.float32)
        inputs = [source, f"{name}.w", f"{name}.b"]
        out = f"{name}_out"
        nodes.append(helper.make_node("Conv", inputs, [out], f"/{name}", pads=[1, 1, 1, 1]))
        if not batchnorm:
            return out
        for key in "sbmv":
            weights[f"{name}.n{key}"] = rng.random(shape[0]).astype(np.float32) + 0.5
        norm = [out, *(f"{name}.n{key}" for key in "sbmv")]
        nodes.append(helper.make_node("BatchNormalization", norm, [f"{name}_bn"], f"/{name}/bn"))
        return f"{name}_bn"

    def then(op, sources, out, **attributes):
        nodes.append(helper.make_node(op, sources, [out], f"/{out}", **attributes))
        return out

    stem = then("Relu", [conv("stem", "x", (4, 3, 3, 3))], "stem_relu")
    a = then("Relu", [conv("a", stem, (4, 4, 3, 3))], "a_relu")
    added = then("Add", [conv("b", a, (4, 4, 3, 3)), stem], "added")
    body = then("Relu", [added], "body")
    side = then("Relu", [conv("side", body, (4, 4, 3, 3))], "side_relu")
    both = then("Concat", [body, side], "both", axis=1)
    last = then("Relu", [conv("last", both, (4, 8, 3, 3))], "last_relu")
    then("Flatten", [then("GlobalAveragePool", [last], "pooled")], "flat")
    weights["fc.w"] = rng.standard_normal((5, 4)).astype(np.float32)
    weights["fc.b"] = rng.standard_normal(5).astype(np.float32)
    nodes.append(helper.make_node("Gemm", ["flat", "fc.w", "fc.b"], ["y"], "/fc", transB=1))
    return build_net(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5]}, weights, producer_name="test")


def cache_of(model, version="8.5.3"):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.cache"
        calibrate(
            model,
            [FEED],
            targets=["tensorrt"],
            method="entropy-tensorrt",
            cache=CachePolicy(path=path, trt_version=version),
        )
        return parse(path.read_bytes(), origin="m.cache")


def outputs(model):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, FEED)[0])


@pytest.mark.parametrize(
    ("batchnorm", "version"), [(False, "8.5.3"), (True, "8.5.3"), (False, "10.3.0")]
)
def test_there_and_back(tmp_path, batchnorm, version):
    model = residual(batchnorm=batchnorm)
    cache = cache_of(model, version)
    quantized, matched = cache_to_qdq(model, cache, keep_batchnorm=batchnorm)
    onnx.checker.check_model(quantized)
    assert matched.covered == len(matched.tensors)
    path = tmp_path / "m.qdq.onnx"
    path.write_bytes(quantized.SerializeToString())
    plain, again = qdq_to_cache(path, version=version)
    onnx.checker.check_model(plain.model)
    assert {e.name: e.bits for e in again.entries} == {
        name: int(scale.view(np.uint32)) for name, scale in scale_nodes(quantized)
    }
    assert np.array_equal(outputs(plain.model), outputs(model))
    assert plain.weights == ()
    error = np.abs(outputs(quantized) - outputs(model)).max()
    assert 0 < error < 0.2 * np.abs(outputs(model)).max()


def test_scales_are_the_caches_and_tensors_of_a_concat_share_one():
    model = residual()
    cache = cache_of(model)
    scales = cache.scales()
    plain, _ = cache_to_qdq(model, cache, own_concat_scales=True)
    assert all(scales[name] == scale for name, scale in scale_nodes(plain))
    shared, _ = cache_to_qdq(model, cache)
    for name, scale in scale_nodes(shared):
        assert scale == scales[name] or name in ("both", "body")
    from deploy.targets.tensorrt.cache_qdq import concat_scales

    nodes = [
        ("Relu", "x", "a", "/a"), ("Relu", "x", "b", "/b"),
        ("Concat", "a b", "c", "/c", {"axis": 1}), ("Conv", "c w", "d", "/d"),
        ("Conv", "a w2", "e", "/e"), ("Add", "d e", "y", "/y"),
    ]  # fmt: skip
    weights = {"w": np.ones((2, 4, 1, 1), np.float32), "w2": np.ones((2, 2, 1, 1), np.float32)}
    model = build_net(nodes, {"x": [1, 2, 4, 4]}, {"y": [1, 2, 4, 4]}, weights)
    loaded = load(model).model
    given = {name: np.float32(s) for s, name in enumerate(trt_tensors(loaded), start=1)}
    matched = match_cache(from_scales(given, version="8.5.3"), loaded)
    shared = concat_scales(loaded, matched.plan, matched.scales)
    assert shared["a"] == shared["c"] == max(given["a"], given["c"])


def pairs(model):
    return {name for name, _ in scale_nodes(model)}


def test_pairs_stand_where_tensorrt_wants_them():
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


def test_every_entry_and_tensor_is_accounted_for():
    model = residual(batchnorm=True)
    scales = dict(cache_of(model).scales())
    del scales["both"]
    scales["stem_relu"] = np.float32(0)
    scales["elsewhere"] = np.float32(1)
    scales["(Unnamed Layer* 9) [Constant]_output"] = np.float32(1)
    scales["(Unnamed Layer* 9) [Shuffle]_output"] = np.float32(1)
    matched = match_cache(from_scales(scales, version="8.5.3"), load(model).model, original=model)
    assert len(matched.entries) == len(scales)
    why = {entry.name: entry.reason for entry in matched.entries if not entry.used}
    assert "zero" in why["stem_relu"]
    assert "no tensor" in why["elsewhere"]
    assert "constant" in why["(Unnamed Layer* 9) [Constant]_output"]
    assert "layer number" in why["(Unnamed Layer* 9) [Shuffle]_output"]
    assert "folding" in why["stem_out"]
    gaps = {tensor.tensor: tensor.reason for tensor in matched.tensors if not tensor.covered}
    assert set(gaps) == {"both", "stem_relu", "last_relu"}
    assert "zero" in gaps["stem_relu"]
    assert "no entry" in gaps["both"]
    assert "stays float" in gaps["last_relu"]  # the pool behind the Conv that reads `both`


def test_entries_are_found_by_position_or_known_from_the_file(tmp_path):
    model = residual()
    scales = cache_of(model).scales()
    renamed = {n if n != "a_relu" else "Relu__7:0": s for n, s in scales.items()}
    matched = match_cache(from_scales(renamed, version="7.2.2"), load(model).model, original=model)
    entry = next(e for e in matched.entries if e.name == "Relu__7:0")
    assert (entry.tensor, entry.used) == ("a_relu", True)
    assert "position" in entry.reason
    mixed = dict(sorted(renamed.items(), key=lambda item: item[0][::-1]))
    matched = match_cache(from_scales(mixed, version="8.5.3"), load(model).model, original=model)
    assert next(e for e in matched.entries if e.name == "Relu__7:0").tensor is None
    first = {n if n != "x" else "renamed": s for n, s in scales.items()}
    matched = match_cache(from_scales(first, version="7.2.2"), load(model).model, original=model)
    assert next(e for e in matched.entries if e.name == "renamed").tensor is None
    model = residual(batchnorm=True)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    cache = from_scales({**cache_of(model).scales(), "a_out": np.float32(1)}, version="8.5.3")
    for given in (model, path):
        _, matched = cache_to_qdq(given, cache)
        (entry,) = [entry for entry in matched.entries if entry.name == "a_out"]
        assert not entry.used and "in the file, but not after folding" in entry.reason


ZERO = np.int8(0)


def qdq_model(scale=0.1, zero=ZERO, second=None):
    """x -> Q -> DQ -> Relu, as small as it gets."""
    constants = {"s": np.asarray(scale, np.float32), "z": np.asarray(zero)}
    constants["s2"] = np.asarray(scale if second is None else second, np.float32)
    nodes = [
        ("QuantizeLinear", "x s z", "q", "q"),
        ("DequantizeLinear", "q s2 z", "d", "d"),
        ("Relu", "d", "y", "r"),
    ]
    return build_net(nodes, {"x": [1, 3]}, {"y": [1, 3]}, constants)


def test_a_smallest_qdq_model_and_what_is_refused_beside_it():
    plain = from_qdq(qdq_model())
    assert plain.scales == {"x": np.float32(0.1)}
    assert [node.op_type for node in plain.model.graph.node] == ["Relu"]
    assert list(plain.model.graph.node[0].input) == ["x"]
    model = qdq_model()
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 3), np.int8), "w"))
    inputs = ["q", "s", "z", "w", "s", "z", "s", "z"]
    model.graph.node.insert(1, helper.make_node("QLinearMatMul", inputs, ["q2"], "mm"))
    model.graph.node[2].input[0] = "q2"
    with pytest.raises(ExportError, match="integer operator QLinearMatMul"):
        from_qdq(model)
    lone = qdq_model()
    del lone.graph.node[0]
    lone.graph.input[0].name = "q"
    lone.graph.node.insert(0, helper.make_node("Cast", ["q"], ["q8"], "c", to=TensorProto.INT8))
    lone.graph.node[1].input[0] = "q8"
    with pytest.raises(ExportError, match="follows its QuantizeLinear"):
        from_qdq(lone)
    model = qdq_model()
    weight = np.ones((2, 3), np.int8)
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(np.ones(5, np.float32), "ws"),
            numpy_helper.from_array(np.zeros(5, np.int8), "wz"),
        ]
    )
    inputs = ["w", "ws", "wz"]
    model.graph.node.insert(2, helper.make_node("DequantizeLinear", inputs, ["wd"], "wd", axis=0))
    model.graph.node[3].op_type = "Gemm"
    model.graph.node[3].input.append("wd")
    with pytest.raises(ExportError, match="5 on axis 0"):
        from_qdq(model)
    foreign = from_scales({"elsewhere": np.float32(1)}, version="8.5.3")
    with pytest.raises(CacheError, match="none can be used"):
        cache_to_qdq(residual(), foreign)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (qdq_model(zero=np.uint8(3)), "uint8 with zero-point 3"),
        (qdq_model(zero=np.int8(5)), "zero-point 5"),
        (qdq_model(scale=[0.1, 0.2, 0.3], zero=np.zeros(3, np.int8)), "one a channel"),
        (qdq_model(second=0.2), "must be equal"),
        (qdq_model(scale=0.0), "positive and finite"),
        (qdq_model(scale=np.nan), "positive and finite"),
        (residual(), "plain already"),
    ],
)
def test_what_a_cache_cannot_say_is_refused(model, told):
    with pytest.raises(ExportError, match=told):
        from_qdq(model)


def test_models_of_onnxruntimes_own_quantizer_come_back(tmp_path):
    """Symmetric Q/DQ as onnxruntime writes it: int8 weights, int32 biases, pairs on outputs."""
    from onnxruntime import quantization as ortq

    class Reader(ortq.CalibrationDataReader):
        def __init__(self):
            self.feed = iter([FEED])

        def get_next(self):  # type: ignore[override]
            return next(self.feed, None)

    source, target = tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(residual(), source)
    ortq.quantize_static(
        source,
        target,
        Reader(),
        quant_format=ortq.QuantFormat.QDQ,
        activation_type=ortq.QuantType.QInt8,
        weight_type=ortq.QuantType.QInt8,
        per_channel=True,
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
    )
    plain, cache = qdq_to_cache(target, version="8.5.3")
    onnx.checker.check_model(plain.model)
    assert plain.weights
    assert {"x", "stem_relu", "y"} <= set(cache.scales())
    close = np.abs(outputs(plain.model) - outputs(residual_like(plain.model))).max()
    assert close == 0


def residual_like(model):
    assert not [n for n in model.graph.node if "Quantize" in n.op_type]
    return model


def test_damaged_models_end_in_one_sentence(tmp_path):
    model = residual()
    quantized, _ = cache_to_qdq(model, cache_of(model))
    whole, path, dice = quantized.SerializeToString(), tmp_path / "m.onnx", random.Random(6)
    refused = 0
    for _ in range(80):
        damaged = bytearray(whole)
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
    return [node("Sigmoid", tensor, f"{out}_s"), node("Mul", f"{tensor} {out}_s", out)]


def conv(tensor, out, weight="w"):
    return node("Conv", f"{tensor} {weight}", out, pads=[1, 1, 1, 1])


def net(nodes, tmp_path):
    rng = np.random.default_rng(1)
    weights = {"w": rng.normal(size=(4, 4, 3, 3)), "w2": rng.normal(size=(4, 8, 3, 3)),
               "g": rng.normal(size=(5, 4)), "t": rng.normal(size=(4, 4, 2, 2)),
               "m": rng.normal(size=(8, 8)), "bias": rng.normal(size=8),
               "shape": np.array([4, 8, 8])}  # fmt: skip
    used = {name for n in nodes for name in n.input}
    path = tmp_path / "net.onnx"
    save_net(
        path,
        nodes,
        {"x": [1, 4, 8, 8]},
        {"y": None},
        [
            numpy_helper.from_array(a if n == "shape" else a.astype(np.float32), n)
            for n, a in weights.items()
            if n in used
        ],
    )
    return load(path).model


def placed(model, placement=TENSORRT, **options):
    plan = analyse(model, placement, **options)
    why = {d.node: d.reason for d in plan.decisions}
    return why, {p.tensor: p.consumers for p in plan.pairs}


BOTTLENECK = [
    conv("x", "a"), *silu("a", "as"), conv("as", "b"), *silu("b", "bs"), conv("bs", "c"),
    *silu("c", "cs"), node("Add", "as cs", "sum"),
]  # fmt: skip


@pytest.mark.parametrize(
    "after",
    [
        [conv("sum", "y")],
        [node("MaxPool", "sum", "p", kernel_shape=[2, 2]), conv("p", "y")],
        [node("GlobalAveragePool", "sum", "p"), node("Flatten", "p", "f"),
         node("Gemm", "f g", "y", transB=1)],
    ],
    ids=["Conv", "MaxPool", "the last pool"],
)  # fmt: skip
def test_a_residual_add_behind_silu_gets_a_pair_on_its_skip_branch_alone(after, tmp_path):
    why, pairs = placed(net([*BOTTLENECK, *after], tmp_path))
    assert why["sum"] == "" and "cs" not in pairs
    assert pairs["as"] == ("b", "sum")  # one pair for the convolution and the Add


def test_an_add_stays_float_where_nobody_wants_int8_or_a_branch_is_kept_so(tmp_path):
    why, pairs = placed(net([*BOTTLENECK, node("Softmax", "sum", "y")], tmp_path))
    assert why["sum"] == "nothing after it runs in int8" and pairs["as"] == ("b",)
    ends = [node("Exp", "c", "e"), node("Add", "as e", "sum"), conv("sum", "y")]
    why, _ = placed(net([*BOTTLENECK[:-3], *ends], tmp_path))
    assert why["sum"] == "an input of it is not int8"
    model = net([*BOTTLENECK, conv("sum", "y")], tmp_path)
    why, pairs = placed(model, float_nodes=["c"])
    assert why["sum"] == "an input of it is not int8" and pairs["as"] == ("b",)
    assert not ONNXRUNTIME.passes
    assert TENSORRT.passes > {"Sigmoid", "Mul", "Concat", "GlobalAveragePool"}


def test_a_concat_takes_its_inputs_from_the_pairs_there_are(tmp_path):
    after = [node("Concat", "as sum", "cat", axis=1), conv("cat", "y", "w2")]
    why, pairs = placed(net([*BOTTLENECK, *after], tmp_path))
    assert why["sum"] == "" and pairs["as"] == ("b", "sum", "cat") and pairs["cat"] == ("y",)
    after[1:] = [
        conv("cat", "k", "w2"),
        node("Exp", "cat", "e"),
        node("Concat", "k e", "y", axis=1),
    ]
    _, pairs = placed(net([*BOTTLENECK, *after], tmp_path))
    assert pairs["as"] == ("b", "sum")  # a float node reads the Concat, and gets float values


def vit(ends):
    """A linear layer beside a residual stream, behind a norm, as in a transformer: [N, T, 8]."""
    return [
        node("Reshape", "x shape", "s"), node("MatMul", "s m", "p"), node("Exp", "p", "stream"),
        node("ReduceMean", "stream", "mean", axes=[-1]), node("Sub", "stream mean", "centred"),
        node("Mul", "centred bias", "scaled"), node("Add", "scaled bias", "normed"),
        node("MatMul", "normed m", "q"), node("Add", "q bias", "qb"),
        node("Mul", "bias qb", "qs"), node("Add", "qs stream", "sum"), *ends,
    ]  # fmt: skip


def test_the_residual_adds_of_a_transformer_get_a_pair_on_the_stream(tmp_path):
    norm = [node("ReduceMean", "sum", "mean2", axes=[-1]), node("Sub", "sum mean2", "centred2"),
            node("Mul", "centred2 bias", "scaled2"), node("Add", "scaled2 bias", "normed2"),
            node("MatMul", "normed2 m", "y")]  # fmt: skip
    why, pairs = placed(net(vit(norm), tmp_path))
    assert why["sum"] == "" and pairs["stream"] == ("sum",) and "qs" not in pairs
    assert "picture" in why["mean"] and "picture" in why["mean2"]
    why, pairs = placed(net(vit([node("Softmax", "sum", "y")]), tmp_path))
    assert why["sum"] == "nothing after it runs in int8" and "stream" not in pairs


GEMM = [node("Flatten", "p", "f"), node("Gemm", "f g", "y", transB=1)]


@pytest.mark.parametrize(
    "pool",
    [
        node("GlobalAveragePool", "as", "p"),
        node("AveragePool", "as", "p", kernel_shape=[8, 8]),
        node("MaxPool", "as", "p", kernel_shape=[8, 8]),
        node("ReduceMean", "as", "p", axes=[2, 3]),
        node("ReduceMean", "as", "p", axes=[-1, -2]),
    ],
    ids=["global", "average", "max", "mean", "mean from behind"],
)
def test_a_pool_between_int8_nodes_reads_and_writes_int8(pool, tmp_path):
    why, pairs = placed(net([conv("x", "a"), *silu("a", "as"), pool, *GEMM], tmp_path))
    assert why["p"] == "" and pairs["as"] == ("p",) and pairs["f"] == ("y",)


def test_a_pool_is_float_between_float_nodes_and_beside_them(tmp_path):
    start = [conv("x", "a"), *silu("a", "as")]
    pool = node("GlobalAveragePool", "as", "p")
    why, pairs = placed(net([*start, pool, node("Softmax", "p", "y")], tmp_path))
    assert why["p"] == "nothing after it runs in int8" and "as" not in pairs
    float_made = [node("Exp", "as", "e"), node("MaxPool", "e", "p", kernel_shape=[8, 8])]
    why, _ = placed(net([*start, *float_made, *GEMM], tmp_path))
    assert why["p"] == "an input of it is not int8"
    gate = [pool, conv("p", "c"), node("Sigmoid", "c", "s"), node("Mul", "as s", "y")]
    why, pairs = placed(net([*start, *gate], tmp_path))
    assert why["p"] == "its input is read in float too" and "as" not in pairs
    rows = node("ReduceMean", "as", "p", axes=[1, 3])
    why, _ = placed(net([*start, rows, node("Tanh", "p", "y")], tmp_path))
    assert why["p"] == "it is the mean over other axes than a picture's"


def test_what_reads_a_concat_of_float_tensors_stays_float_where_that_is_asked(tmp_path):
    asked = TensorRT(float_behind_concat=True).placement
    made = [conv("x", "a"), conv("a", "b"), node("Concat", "a b", "cat", axis=1)]
    why, _ = placed(net([*made, conv("cat", "y", "w2")], tmp_path), asked)
    assert why["y"] == ""
    made[1:] = [node("Exp", "a", "e"), node("Concat", "a e", "cat", axis=1),
                node("MaxPool", "cat", "p", kernel_shape=[2, 2])]  # fmt: skip
    model = net([*made, conv("p", "y", "w2")], tmp_path)
    why, pairs = placed(model, asked)
    assert why["y"] == "it reads a Concat whose inputs are not all int8" and set(pairs) == {"x"}
    assert placed(model)[0]["y"] == ""
    for word in ("float_behind_concat", "pair_behind_deconv"):
        with pytest.raises(ConfigError, match="placed in the Q/DQ model, got engine form cache"):
            TensorRT(form="cache", **{word: True})
    with pytest.raises(ConfigError, match="no pair in fp8"):
        TensorRT(precision="fp8", pair_behind_deconv=True)


def test_a_transposed_convolution_can_have_a_pair_before_its_activation(tmp_path):
    deconv = node("ConvTranspose", "a t", "d", strides=[2, 2])
    model = net([conv("x", "a"), deconv, node("Relu", "d", "r"), conv("r", "y")], tmp_path)
    assert set(placed(model)[1]) == {"x", "a", "r"}
    rng = np.random.default_rng(0)
    samples = [{"x": rng.normal(size=(1, 4, 8, 8)).astype(np.float32)} for _ in range(4)]
    target = TensorRT(pair_behind_deconv=True, rest="fp32")
    build(model, samples, out=tmp_path / "out", targets=[target], duration_s=0,
          tuning=Tuning(effort=0))  # fmt: skip
    (written,) = (tmp_path / "out").glob("*.qdq.onnx")
    readers = {name: n.op_type for n in onnx.load(written).graph.node for name in n.input}
    assert readers["d"] == "QuantizeLinear" and readers["d/dequantized"] == "Relu"
    found = OrtSession.open(written).run(samples[0])["y"]
    exact = OrtSession.open(tmp_path / "net.onnx").run(samples[0])["y"]
    assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.99


FASHION = Path(__file__).parents[1] / "datasets" / "fashion"


def model_of(nodes, shape, weights, outputs="y"):
    opsets = {"": 18, "of.others": 1}
    return build_net(nodes, {"x": shape}, dict.fromkeys(outputs.split()), weights, opset=opsets)


@pytest.fixture(scope="module")
def efficient(tmp_path_factory):
    """A small EfficientNet: SiLU, depthwise, squeeze-excite, residual, Concat, pools; and data."""
    rng, weights = np.random.default_rng(5), {}

    def conv(source, out, shape, **more):
        weights[f"{out}.w"] = rng.normal(scale=0.4, size=shape).astype(np.float32)
        pads = [shape[2] // 2] * 4
        return node("Conv", f"{source} {out}.w", out, pads=pads, **more)

    def silu(source, out):
        return [node("Sigmoid", source, f"{out}.s"), node("Mul", f"{source} {out}.s", out)]

    weights |= {"fc.w": rng.normal(size=(5, 8)).astype(np.float32), "lo": np.float32(0)}
    weights["hi"] = np.float32(6)
    nodes = [
        conv("x", "c1", (4, 3, 3, 3)), *silu("c1", "a1"),
        conv("a1", "c2", (4, 1, 3, 3), group=4), *silu("c2", "a2"),
        node("GlobalAveragePool", "a2", "pool"),
        conv("pool", "se1", (2, 4, 1, 1)), node("Relu", "se1", "se2"),
        conv("se2", "se3", (4, 2, 1, 1)), node("Sigmoid", "se3", "se4"),
        node("Mul", "a2 se4", "scaled"),
        conv("scaled", "c3", (4, 4, 1, 1)), node("Add", "c3 a1", "sum"),
        conv("sum", "c4", (4, 4, 3, 3)), node("Clip", "c4 lo hi", "a4"),
        node("Concat", "a4 sum", "both", axis=1),
        node("MaxPool", "both", "small", kernel_shape=[2, 2], strides=[2, 2]),
        conv("small", "c5", (8, 8, 3, 3)), node("Relu", "c5", "a5"),
        node("GlobalAveragePool", "a5", "mean"), node("Flatten", "mean", "flat"),
        node("Gemm", "flat fc.w", "logits", transB=1),
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("efficient")
    onnx.save(model_of(nodes, ["n", 3, 8, 8], weights, "logits"), folder / "m.onnx")
    np.save(folder / "x.npy", rng.standard_normal((8, 3, 8, 8)).astype(np.float32))
    return folder / "m.onnx"


def there_and_back(run, model, images, folder, *words):
    """(full cache, cache of the pairs alone, cache for DLA, what was said) of a model."""
    full, qdq = folder / "full.cache", folder / "q.onnx"
    feed = ("--images", images, "--target", "tensorrt", "-o", full, *words)
    code, _, err = run("calibrate", model, *feed)
    assert code == 0, err
    assert run("cache", "to-qdq", model, full, "-o", qdq)[0] == 0
    caches, said = [full], ""
    for name, more in (("pairs", ()), ("dla", ("--dla",))):
        made = folder / f"{name}.onnx", folder / f"{name}.cache"
        code, said, err = run("cache", "from-qdq", qdq, "-o", *made, *more)
        assert code == 0, err
        caches.append(made[1])
    assert (folder / "pairs.onnx").read_bytes() == (folder / "dla.onnx").read_bytes()
    return (*(parse(path.read_bytes(), origin="").scales() for path in caches), said)


def test_a_small_efficientnet_gets_every_scale_but_its_logits(efficient, run, tmp_path):
    images = efficient.with_name("x.npy")
    full, pairs, dla, said = there_and_back(run, efficient, images, tmp_path, "--method", "minmax")
    assert set(full) - set(dla) == {"logits"} and set(dla) <= set(full)
    assert {"1 tensors have no scale", "int8: logits"} <= {
        part.strip() for line in said.splitlines() for part in (line[:23], line[-12:])
    }
    assert all(dla[name] == scale for name, scale in pairs.items())
    same = {"se1": "se2", "c4": "a4", "both": "small", "pool": "a2", "c5": "a5"}
    assert all(dla[name] == dla[other] for name, other in same.items())
    assert dla["c4"] == full["a4"] and dla["se1"] == full["se2"]
    assert (
        dla["mean"] == full["mean"] == full["a5"]
        and dla["flat"] == full["flat"]
        and "guesses" in said
    )
    bounds = ("se4", "a1.s", "sum", "c3", "a4", "se3")
    assert all(dla[name] >= np.float32(0.999) * full[name] for name in bounds)
    assert dla["se4"] == dla["a1.s"] == np.float32(1 / 127)


def test_the_demo_gets_every_scale_but_its_logits(run, tmp_path):
    model = next(FASHION.glob("*.onnx"))
    full, pairs, dla, said = there_and_back(
        run, model, FASHION / "calib.txt", tmp_path, "--limit", "8"
    )
    missing = set(full) - set(dla)
    assert len(missing) == 1 and said.rstrip().endswith(next(iter(missing)))
    assert len(pairs) < len(dla) and "guesses" not in said
    equal = sum(dla[name] == full[name] for name in dla)
    assert equal >= 0.7 * len(dla)


def test_without_the_option_the_pairs_alone_are_written(efficient, run, command, refusal, tmp_path):
    _, pairs, _, _ = there_and_back(run, efficient, efficient.with_name("x.npy"), tmp_path)
    assert {"x", "a1", "pool", "scaled", "sum"} <= set(pairs) and "c1" not in pairs
    words = ("cache", "from-qdq", tmp_path / "q.onnx", "-o", tmp_path / "p", tmp_path / "c")
    assert "--dla infers them" in command(*words)
    code, said, _ = run(*words, "--dla", "--no-guesses")
    assert code == 0 and "guesses" not in said
    assert all(f" {name}" in said.splitlines()[-1] for name in ("c1", "c2", "a2", "logits"))
    assert "--no-guesses goes with --dla" in refusal(*words, "--no-guesses")


CONSTANTS = {
    "two": np.float32(2), "zero": np.float32(0), "six": np.float32(6), "half": np.float32(-0.5),
    "seven": np.float32(7), "row": np.array([1, -5, 2, 3], np.float32), "shape": np.array([1, -1]),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "halves": np.array([2, 2]),
    "sizes": np.array([1, 4, 8, 8]), "w": np.ones((4, 4, 1, 1), np.float32),
    "ends": np.array([2]), "axis": np.array([1]), "starts": np.array([0]),
}  # fmt: skip

TABLE = [  # nodes, ranges that are known, tensor, its range, how sure
    ([node("Reshape", "x shape", "y")], "x=4", "y", 4, "equal"),
    ([node("Transpose", "x", "y", perm=[0, 2, 3, 1])], "y=4", "x", 4, "equal"),
    ([node("GlobalAveragePool", "x", "y")], "x=4", "y", 4, "equal"),
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
    ([node("Sigmoid", "x", "s"), node("Mul", "x s", "y")], "y=9", "x", 9.279, "bound"),
    ([node("Sigmoid", "x", "s"), node("Mul", "x s", "y")], "y=2", "x", 2.279, "guess"),
    ([node("Sigmoid", "x", "s"), node("Mul", "x s", "y")], "x=9", "y", 9, "bound"),
    ([node("HardSwish", "x", "y")], "y=4", "x", 4.375, "bound"),
    ([node("HardSwish", "x", "y")], "x=4", "y", 4, "bound"),
    ([node("HardSigmoid", "x", "s", alpha=1 / 6), node("Mul", "x s", "y")],
     "y=4", "x", 4.375, "bound"),
    ([node("Conv", "x w", "c"), node("Sigmoid", "x", "s"), node("Mul", "c s", "y")],
     "y=4", "c", 4, "guess"),
    ([node("Relu", "x", "y"), node("Exp", "x", "z")], "y=4", "x", 4, "guess"),
    ([node("Relu", "x", "y"), node("Clip", "x zero six", "z")], "y=4 z=5", "x", 5, "bound"),
    ([node("Exp", "x", "y")], "x=4", "y", None, ""),
    ([node("Conv", "x w", "y")], "x=4", "y", None, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "known", "tensor", "amax", "sure"),
    [
        pytest.param(*row, id=f"{' '.join(n.op_type for n in row[0])} {row[1]} -> {row[2]}")
        for row in TABLE
    ],
)
def test_the_table_of_rules(nodes, known, tensor, amax, sure):
    used = {name for n in nodes for name in n.input}
    weights = {name: value for name, value in CONSTANTS.items() if name in used}
    read = used | {"x"}
    ends = " ".join(out for n in nodes for out in n.output if out not in read)
    if tensor in ends.split() or tensor == "r":
        ends = ends or tensor
    model = model_of(nodes, [1, 4, 4, 4], weights, ends)
    given = dict(word.split("=") for word in known.split())
    scales = {name: np.float32(float(value) / 127) for name, value in given.items()}
    found = infer_missing_scales(model, scales)
    if amax is None:
        assert tensor in found.missing
        return
    assert found.scales[tensor] * 127 == pytest.approx(amax, rel=1e-6)
    assert found.sure[tensor] == sure
    assert all(found.scales[name] == scale for name, scale in scales.items())
