"""Calibration, deploy and fake-quant models against complete outputs of the real AMCT."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from calibrators.errors import CalibrationError
from deploy.errors import BackendError, ExportError, FeedError
from deploy.targets.ascend.amct_calibration import calibrate, prepared_model
from deploy.targets.ascend.config import default_config, read_config, settled
from deploy.targets.ascend.deploy_model import deploy_model, pack, unpack
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import find_layers, name_nodes
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import LayerRecord, read_record

CASES = Path(__file__).parent / "golden" / "amct" / "cases"
WHOLE = ["small_default", "small_dmq", "small_hfmg_sym", "small_ifmr_asym"]
NAMES = [*WHOLE, "small_mixed"]


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
        wanted = [t for t in modified.graph.initializer if t.name.startswith(("conv2.", "bn2."))]
        model.graph.initializer.extend(wanted)
        norm = next(n for n in modified.graph.node if n.name == "bn2")
        place = next(i for i, n in enumerate(model.graph.node) if n.name == "conv2")
        conv = model.graph.node[place]
        conv.input[1:] = ["conv2.sub_module.weight", "conv2.sub_module.bias"]
        old, conv.output[0] = conv.output[0], "conv2_out"
        norm.input[0], norm.output[0] = "conv2_out", old
        model.graph.node.insert(place + 1, norm)
    return name_nodes(model)


def inputs(case):
    arrays = np.load(CASES / case / "io.npz")
    return [
        {"input.1": arrays[k]}
        for k in sorted(arrays.files)
        if k.startswith("in") and k[2:].isdigit()
    ]


def run(model, feed):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options)
    return session.run(None, {session.get_inputs()[0].name: feed})[0]


def config_of(case, graph):
    return settled(read_config((CASES / case / "config.json").read_text()), graph)


def ulps(a, b):
    a, b = np.atleast_1d(np.float32(a)), np.atleast_1d(np.float32(b))
    return int(np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)).max())


@pytest.mark.parametrize("case", NAMES)
def test_records_are_amcts(case):
    """Layers and offsets equal. Scales equal to the bit where nothing was summed before them.

    Elsewhere they differ by the order of float32 sums: in the exporter's own folding of
    BatchNormalization (weights of conv1, conv2, dw), and in torch's convolutions against ONNX
    Runtime's (activations behind them). Both stay within 8 units in the last place.
    """
    model = float_model(case)
    graph = find_layers(model)
    found = calibrate(model, graph, inputs(case), config_of(case, graph)).records
    wanted = read_record((CASES / case / "record.txt").read_text())
    assert list(found) == list(wanted)
    balanced = case == "small_dmq"
    for name, record in wanted.items():
        assert found[name].offset_d == record.offset_d
        assert ulps(found[name].scale_d, record.scale_d) <= 8
        assert found[name].scale_w.size == record.scale_w.size
        assert ulps(found[name].scale_w, record.scale_w) <= 8
        if name in ("pw", "up", "fc1", "fc2", "pool") and not balanced:
            assert ulps(found[name].scale_w, record.scale_w) == 0
        if balanced and record.factors.size:
            assert ulps(found[name].factors, record.factors) <= 8
    if not balanced:
        assert ulps(found["conv1"].scale_d, wanted["conv1"].scale_d) == 0


def test_the_model_to_observe_is_amcts():
    """Weights that BatchNormalization did not touch are those of AMCT's modified model."""
    model = float_model("small_default")
    graph = find_layers(model)
    config = config_of("small_default", graph)
    records = read_record((CASES / "small_default" / "record.txt").read_text())
    weights = {n: (r.scale_w, np.zeros(r.scale_w.size, np.int32)) for n, r in records.items()}
    mine = prepared_model(model, graph.layers, config, weights, {})
    amct = onnx.load(CASES / "small_default" / "modified.onnx")
    tensors = [{t.name: t for t in m.graph.initializer} for m in (mine, amct)]
    nodes = {n.name: n for n in amct.graph.node}
    for name in ("pw", "up", "fc1", "fc2"):
        a = numpy_helper.to_array(tensors[0][graph.layers[name].weight])
        b = numpy_helper.to_array(tensors[1][nodes[name].input[1]])
        np.testing.assert_array_equal(a, b)


def test_a_dead_input_is_told():
    model = float_model("small_default")
    graph = find_layers(model)
    batch = {"input.1": np.zeros((2, 3, 32, 32), np.float32)}
    found = calibrate(model, graph, [batch], default_config(graph))
    assert found.dead == ("conv1",)
    assert (found.records["conv1"].scale_d, found.records["conv1"].offset_d) == (1, -128)


@pytest.mark.parametrize("kind", ["deploy", "fake_quant"])
@pytest.mark.parametrize("case", NAMES)
def test_models_are_amcts(case, kind):
    model = float_model(case)
    records = read_record((CASES / case / "record.txt").read_text())
    layers = quantize_layers(model, find_layers(model), records)
    mine = (deploy_model if kind == "deploy" else fake_quant_model)(model, layers)
    amct = onnx.load(CASES / case / f"res_{kind}_model.onnx")
    assert [n.op_type for n in mine.graph.node] == [n.op_type for n in amct.graph.node]
    tensors = [{t.name: t for t in m.graph.initializer} for m in (mine, amct)]
    theirs = {n.name: n for n in amct.graph.node}
    compared = 0
    for node in mine.graph.node:
        other = theirs[node.name]
        same_attributes(node, other)
        for ours, amcts in zip(node.input, other.input, strict=True):
            if ours in tensors[0] or amcts in tensors[1]:
                a = numpy_helper.to_array(tensors[0][ours])
                b = numpy_helper.to_array(tensors[1][amcts])
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), ours
                compared += 1
    assert compared > 15


def same_attributes(node, other):
    def plain(n):
        return {
            a.name: numpy_helper.to_array(a.t).tobytes()
            if a.t.ByteSize()
            else a.SerializeToString()
            for a in n.attribute
        }

    assert (node.op_type, plain(node)) == (other.op_type, plain(other)), node.name


@pytest.mark.parametrize("case", NAMES)
def test_fake_quant_runs_as_amcts(case):
    model = float_model(case)
    records = read_record((CASES / case / "record.txt").read_text())
    mine = fake_quant_model(model, quantize_layers(model, find_layers(model), records))
    onnx.checker.check_model(mine)
    arrays = np.load(CASES / case / "io.npz")
    wanted = run(onnx.load(CASES / case / "res_fake_quant_model.onnx"), arrays["in0"])
    np.testing.assert_allclose(run(mine, arrays["in0"]), wanted, rtol=1e-5)
    np.testing.assert_allclose(wanted, arrays["res_fake_quant_model"], rtol=1e-5)


def test_fake_quant_end_to_end_is_near_amcts():
    """From calibration to output, nothing borrowed: small_default."""
    case = "small_default"
    model = float_model(case)
    graph = find_layers(model)
    records = calibrate(model, graph, inputs(case), config_of(case, graph)).records
    mine = fake_quant_model(model, quantize_layers(model, graph, records))
    arrays = np.load(CASES / case / "io.npz")
    wanted = arrays["res_fake_quant_model"]
    error = np.abs(run(mine, arrays["in0"]) - wanted).max()
    assert error <= 2e-2 * np.abs(wanted).max()


# -- what cannot be done is said --------------------------------------------------------------


def test_too_few_batches():
    model = float_model("small_default")
    graph = find_layers(model)
    config = default_config(graph, batch_num=3)
    with pytest.raises(FeedError, match="3, got 2"):
        calibrate(model, graph, inputs("small_default"), config)
    with pytest.raises(FeedError, match="3, got 0"):
        calibrate(model, graph, [], config)


def test_nan_names_the_layer():
    model = float_model("small_default")
    graph = find_layers(model)
    batch = {"input.1": np.full((2, 3, 32, 32), np.nan, np.float32)}
    config = default_config(graph)
    with pytest.raises(CalibrationError, match=r"'conv1'.*NaN"):
        calibrate(model, graph, [batch], config)


def test_a_wrong_feed_is_told():
    model = float_model("small_default")
    graph = find_layers(model)
    with pytest.raises(BackendError, match="could not run a sample"):
        calibrate(model, graph, [{"input.1": np.zeros((1, 2), np.float32)}], default_config(graph))


def test_all_values_are_kept_only_on_request():
    model = float_model("small_default")
    graph = find_layers(model)
    config = config_of("small_default", graph)
    exact = calibrate(model, graph, inputs("small_default"), config, exact=True)
    streamed = calibrate(model, graph, inputs("small_default"), config)
    assert exact.kept_bytes > 500_000 and not streamed.kept_bytes
    for name, record in exact.records.items():
        assert streamed.records[name].scale_d == pytest.approx(float(record.scale_d), rel=0.016)


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"scale_d": 1e6}, "1 / scale_d"),
        ({"scale_d": 1e-6}, "1 / scale_d"),
        ({"scale_w": [1e-12]}, "int32"),
        ({"factors": [1.0, 2.0]}, "512 DMQ factors"),
    ],
)
def test_hardware_limits(record, match):
    model = float_model("small_default")
    fields = {"scale_d": 0.1, "scale_w": [0.01], "factors": [], **record}
    layer = LayerRecord(
        scale_d=np.float32(fields["scale_d"]),
        scale_w=np.array(fields["scale_w"], np.float32),
        factors=np.array(fields["factors"], np.float32),
    )
    with pytest.raises(ExportError, match=match):
        quantize_layers(model, find_layers(model), {"fc1": layer})


def test_sums_beyond_int32_are_told():
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="wide")],
        "g",
        [value("x", 1, [1, 70_000])],
        [value("y", 1, [1, 1])],
        [numpy_helper.from_array(np.ones((70_000, 1), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    record = LayerRecord(scale_d=np.float32(1), scale_w=np.array([1 / 127], np.float32))
    with pytest.raises(ExportError, match="int32"):
        quantize_layers(model, find_layers(model), {"wide": record})


def test_packing_round_trip():
    scales = np.float32([1e-6, 1.0, 3.5e4])
    assert (pack(scales) >> np.uint64(32) == 0).all()
    np.testing.assert_array_equal(unpack(pack(scales)), scales)


def test_a_tensor_two_layers_read_is_quantized_once_and_outputs_keep_their_names():
    value = helper.make_tensor_value_info
    weights = {k: np.random.default_rng(1).normal(size=(4, 4)).astype("f4") for k in "ab"}
    bias = np.ones(4, np.float32)
    nodes = [
        helper.make_node("Gemm", ["x", "a", "c"], ["y"], name="one"),
        helper.make_node("Gemm", ["x", "b", "c"], ["h"], name="two"),
        helper.make_node("Add", ["y", "h"], ["z"], name="add"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", 1, [1, 4])],
        [value("y", 1, [1, 4]), value("z", 1, [1, 4])],
        [numpy_helper.from_array(v, k) for k, v in [*weights.items(), ("c", bias)]],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    layers = find_layers(model)
    batch = {"x": np.linspace(-1, 1, 4, dtype=np.float32).reshape(1, 4)}
    records = calibrate(model, layers, [batch], default_config(layers)).records
    quantized = quantize_layers(model, layers, records)
    deploy = deploy_model(model, quantized)
    assert [n.op_type for n in deploy.graph.node].count("AscendQuant") == 1
    assert [o.name for o in deploy.graph.output] == ["y", "z"]
    fake = fake_quant_model(model, quantized)
    np.testing.assert_allclose(run(fake, batch["x"]), run(model, batch["x"]), atol=0.05)
