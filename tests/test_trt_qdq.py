"""Cache to Q/DQ and back: scales and float outputs to the bit, and refusals."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.reuse import CachePolicy
from deploy.calibration.trt_cache import CalibrationCache, from_scales, parse
from deploy.errors import CacheError, Calib8Error, ExportError
from deploy.frontends import load
from deploy.pipeline import calibrate
from deploy.targets.tensorrt.cache_qdq import from_qdq, scale_nodes
from deploy.targets.tensorrt.cache_tools import cache_to_qdq, qdq_to_cache
from deploy.targets.tensorrt.match import match
from deploy.targets.tensorrt.naming import trt_tensors

FEED = {"x": np.random.default_rng(11).standard_normal((2, 3, 8, 8)).astype(np.float32)}


def residual(*, batchnorm: bool = False) -> onnx.ModelProto:
    """stem -> (a -> b) + skip -> concat with a branch -> pool -> Gemm."""
    rng = np.random.default_rng(12)
    weights: dict[str, np.ndarray] = {}
    nodes: list[onnx.NodeProto] = []

    def conv(name: str, source: str, shape: tuple[int, ...]) -> str:
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

    def then(op: str, sources: list[str], out: str, **attributes: object) -> str:
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
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 13)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8, producer_name="test")


def cache_of(model: onnx.ModelProto, version: str = "8.5.3") -> CalibrationCache:
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


def outputs(model: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, FEED)[0])


@pytest.mark.parametrize(
    ("batchnorm", "version"), [(False, "8.5.3"), (True, "8.5.3"), (False, "10.3.0")]
)
def test_there_and_back(tmp_path: Path, batchnorm: bool, version: str) -> None:
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


def test_scales_of_the_model_are_those_of_the_cache_but_for_concat_groups() -> None:
    model = residual()
    cache = cache_of(model)
    scales = cache.scales()
    plain, _ = cache_to_qdq(model, cache, own_concat_scales=True)
    assert all(scales[name] == scale for name, scale in scale_nodes(plain))
    shared, _ = cache_to_qdq(model, cache)
    for name, scale in scale_nodes(shared):
        assert scale == scales[name] or name in ("both", "body")


def test_tensors_that_meet_in_a_concat_get_one_scale() -> None:
    from deploy.targets.tensorrt.cache_qdq import concat_scales

    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "/a"),
        helper.make_node("Relu", ["x"], ["b"], "/b"),
        helper.make_node("Concat", ["a", "b"], ["c"], "/c", axis=1),
        helper.make_node("Conv", ["c", "w"], ["d"], "/d"),
        helper.make_node("Conv", ["a", "w2"], ["e"], "/e"),
        helper.make_node("Add", ["d", "e"], ["y"], "/y"),
    ]
    weights = {"w": np.ones((2, 4, 1, 1), np.float32), "w2": np.ones((2, 2, 1, 1), np.float32)}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 4, 4])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    loaded = load(model).model
    given = {name: np.float32(s) for s, name in enumerate(trt_tensors(loaded), start=1)}
    matched = match(from_scales(given, version="8.5.3"), loaded)
    shared = concat_scales(loaded, matched.plan, matched.scales)
    assert shared["a"] == shared["c"] == max(given["a"], given["c"])


def pairs(model: onnx.ModelProto) -> set[str]:
    return {name for name, _ in scale_nodes(model)}


def test_pairs_stand_where_tensorrt_wants_them() -> None:
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


def test_every_entry_and_tensor_is_accounted_for() -> None:
    model = residual(batchnorm=True)
    scales = dict(cache_of(model).scales())
    del scales["both"]
    scales["stem_relu"] = np.float32(0)
    scales["elsewhere"] = np.float32(1)
    scales["(Unnamed Layer* 9) [Constant]_output"] = np.float32(1)
    scales["(Unnamed Layer* 9) [Shuffle]_output"] = np.float32(1)
    matched = match(from_scales(scales, version="8.5.3"), load(model).model, original=model)
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


def test_renamed_tensors_are_found_by_position_only_between_two_that_match() -> None:
    model = residual()
    scales = cache_of(model).scales()
    renamed = {n if n != "a_relu" else "Relu__7:0": s for n, s in scales.items()}
    matched = match(from_scales(renamed, version="7.2.2"), load(model).model, original=model)
    entry = next(e for e in matched.entries if e.name == "Relu__7:0")
    assert (entry.tensor, entry.used) == ("a_relu", True)
    assert "position" in entry.reason
    mixed = dict(sorted(renamed.items(), key=lambda item: item[0][::-1]))
    matched = match(from_scales(mixed, version="8.5.3"), load(model).model, original=model)
    assert next(e for e in matched.entries if e.name == "Relu__7:0").tensor is None
    first = {n if n != "x" else "renamed": s for n, s in scales.items()}
    matched = match(from_scales(first, version="7.2.2"), load(model).model, original=model)
    assert next(e for e in matched.entries if e.name == "renamed").tensor is None


def test_an_entry_that_only_the_file_has_is_known_from_the_file(tmp_path: Path) -> None:
    model = residual(batchnorm=True)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    cache = from_scales({**cache_of(model).scales(), "a_out": np.float32(1)}, version="8.5.3")
    for given in (model, path):
        _, matched = cache_to_qdq(given, cache)
        (entry,) = [entry for entry in matched.entries if entry.name == "a_out"]
        assert not entry.used and "in the file, but not after folding" in entry.reason


def test_a_foreign_cache_is_refused() -> None:
    foreign = from_scales({"elsewhere": np.float32(1)}, version="8.5.3")
    with pytest.raises(CacheError, match="none can be used"):
        cache_to_qdq(residual(), foreign)


def qdq_model(
    scale: object = 0.1, zero: object = np.int8(0), second: object = None
) -> onnx.ModelProto:
    """x -> Q -> DQ -> Relu, as small as it gets."""
    constants = {"s": np.asarray(scale, np.float32), "z": np.asarray(zero)}
    constants["s2"] = np.asarray(scale if second is None else second, np.float32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "s2", "z"], ["d"], "d"),
        helper.make_node("Relu", ["d"], ["y"], "r"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_the_smallest_qdq_model() -> None:
    plain = from_qdq(qdq_model())
    assert plain.scales == {"x": np.float32(0.1)}
    assert [node.op_type for node in plain.model.graph.node] == ["Relu"]
    assert list(plain.model.graph.node[0].input) == ["x"]


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
def test_what_a_cache_cannot_say_is_refused(model: onnx.ModelProto, told: str) -> None:
    with pytest.raises(ExportError, match=told):
        from_qdq(model)


def test_integer_operators_and_lone_nodes_are_refused() -> None:
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


def test_models_of_onnxruntimes_own_quantizer_come_back(tmp_path: Path) -> None:
    """Symmetric Q/DQ as onnxruntime writes it: int8 weights, int32 biases, pairs on outputs."""
    from onnxruntime import quantization as ortq

    class Reader(ortq.CalibrationDataReader):
        def __init__(self) -> None:
            self.feed = iter([FEED])

        def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
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


def residual_like(model: onnx.ModelProto) -> onnx.ModelProto:
    assert not [n for n in model.graph.node if "Quantize" in n.op_type]
    return model


def test_damaged_models_end_in_one_sentence(tmp_path: Path) -> None:
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


def test_scales_that_do_not_fit_their_weight_are_refused() -> None:
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
