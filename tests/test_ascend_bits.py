"""Integers of 4, 6 and 16 bits, float16 and FORCE_FP16_QUANT, beside files of the real AMCT."""

import json
import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibrators.amct.arq import ascend_half, ascend_s19
from deploy.calibration.observation import CalibrationSubject
from deploy.frontends import load
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.deploy_model import pack_int4, unpack_int4
from deploy.targets.ascend.executor import open_deploy
from deploy.targets.ascend.float16 import find_float16_tensors, to_float16
from deploy.targets.ascend.recipe import bit_width_notes
from deploy.targets.ascend.record import read_record
from tests.models import make_model, make_value, read_markdown, rename_tensor
from tests.test_ascend_models import CASES as MODEL_CASES
from tests.test_ascend_models import ulps
from tests.vendor_models import save_net

WIDTHS = MODEL_CASES.parent / "widths"
FLOAT, X = WIDTHS / "float.onnx", np.load(WIDTHS / "x.npy")
INT16 = "ifmr_quantize { dst_type: INT16 }"
BITS = {"w4": "arq_quantize { quant_bits: 4 }", "w6": "arq_quantize { quant_bits: 6 }"}
BITS |= {"a16": INT16, "a16h": "hfmg_quantize { dst_type: INT16 }"}
CASES = {name: f"batch_num: 2 common_config {{ {inner} }}" for name, inner in BITS.items()}
CASES["a4w4"] = (WIDTHS / "a4w4" / "config.json").read_text()
CASES["force"] = "batch_num: 2 fakequant_precision_mode: FORCE_FP16_QUANT"

BUILT = {}


@pytest.fixture
def built(run, tmp_path_factory):
    """(text, suffix of the configuration, model) -> exit code, what was said, folder; made once."""

    def build(text, suffix=".cfg", model=FLOAT):
        key = (text, suffix, str(model))
        if key not in BUILT:
            folder = tmp_path_factory.mktemp("widths")
            config, out = folder / f"my{suffix}", folder / "o"
            config.write_text(text)
            arguments = ("--target", "ascend", "--effort", 0, "--duration", 0, "--out", out)
            images = ("--images", WIDTHS / "x.npy")
            code, output, err = run("build", model, *images, *arguments, "--ascend-config", config)
            report = read_markdown(out) if (out / "report.md").exists() else ""
            BUILT[key] = code, " ".join([*(output + err).split(), report]), out
        return BUILT[key]

    return build


def refused(built, *arguments):
    """The sentence of a build that ends in an error."""
    code, message, out = built(*arguments)
    assert code == 1
    assert not list(out.glob("*_record.txt"))
    assert "Traceback" not in message
    return message


def tensors(model):
    """(node, place) -> the constant that it reads there."""
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    read = [(n.name, *position) for n in model.graph.node for position in enumerate(n.input)]
    return {(node, position): constants[name] for node, position, name in read if name in constants}


def kinds(model):
    """node -> operator and, of an AscendQuant, type."""
    kind_by_node = {}
    for node in model.graph.node:
        if node.op_type != "Constant":
            types = [a.s for a in node.attribute if a.name == "dst_type"]
            kind_by_node[node.name] = (node.op_type, *types)
    return kind_by_node


@pytest.mark.parametrize("case", CASES)
def test_a_build_is_amcts(case, built):
    """Same types and offsets; scales and what follows from them within AMCT's float32 sums."""
    code, output, out = built(CASES[case], ".json" if case == "a4w4" else ".cfg")
    # four bits for weights and activations leave nothing of this network: "unusable", exit code 3
    assert code == (3 if case == "a4w4" else 0), output
    records = read_record((out / "float_record.txt").read_text())
    expected = read_record((WIDTHS / case / "record.txt").read_text())
    assert list(records) == list(expected)
    for name, record in expected.items():
        mine = records[name]
        assert (mine.act_bits, mine.weight_bits) == (record.act_bits, record.weight_bits), name
        assert mine.offset_d == record.offset_d
        assert mine.force_fp16 == record.force_fp16
        assert max(ulps(mine.scale_d, record.scale_d), ulps(mine.scale_w, record.scale_w)) <= 8
    deployed = onnx.load(out / "float_deploy_model.onnx")
    amct = onnx.load(WIDTHS / case / "res_deploy_model.onnx")
    assert kinds(deployed) == kinds(amct)
    expected = tensors(amct)
    for key, parameter in tensors(deployed).items():
        if parameter.dtype == np.uint64:  # the bits of scale_w * scale_d
            assert np.abs(parameter - expected[key].astype(np.int64)).max() <= 8, key
    config = json.loads((out / "float_config.json").read_text())
    expected_config = json.loads((WIDTHS / case / "config.json").read_text())
    assert config == expected_config
    assert list(config) == list(expected_config)
    (fake,) = OrtSession.open(out / "float_fake_quant_model.onnx").run({"x": X[:1]}).values()
    reference = np.load(WIDTHS / case / "y.npy")[:1]
    assert np.abs(fake - reference).max() <= 4e-3 * np.abs(reference).max()


@pytest.mark.parametrize("case", (*CASES, "s19"))
def test_files_from_amcts_record_are_amcts(case, command, tmp_path):
    """Every tensor of the deploy model equal, packed weights and cut scales too."""
    arguments = ("-o", tmp_path, "--images", WIDTHS / "x.npy")
    command("ascend", "deploy", FLOAT, WIDTHS / case / "record.txt", *arguments)
    mine = onnx.load(tmp_path / "float_deploy_model.onnx")
    amct = onnx.load(WIDTHS / case / "res_deploy_model.onnx")
    assert kinds(mine) == kinds(amct)
    tensors_found, expected = tensors(mine), tensors(amct)
    assert set(tensors_found) == set(expected)
    for key, value in expected.items():
        got = tensors_found[key]
        assert got.dtype == value.dtype, key
        assert got.shape == value.shape, key
        if key != ("conv1", 2):  # of a bias that AMCT folded, and here the exporter
            np.testing.assert_array_equal(got, value, err_msg=str(key))
    fakes = OrtSession.open(tmp_path / "float_fake_quant_model.onnx")
    reference = np.load(WIDTHS / case / "y.npy")
    for x, y in zip(X, reference, strict=True):
        np.testing.assert_allclose(fakes.run({"x": x[None]})["y"][0], y, rtol=1e-5, atol=1e-7)
    report = read_markdown(tmp_path)
    assert "within 0 of the fake-quant model with AscendQuant's rounding" in report
    out = command("ascend", "check", tmp_path / "float_deploy_model.onnx")
    grids = {"a16": "int8 and int16", "a16h": "int8 and int16", "a4w4": "int4"}
    assert out.endswith(f"7 layers in {grids.get(case, 'int8')}")


def test_record_widths_round_trip_exactly(built, command, tmp_path):
    _, _, out = built(CASES["w4"])
    redeployed = tmp_path / "again"
    command("ascend", "deploy", FLOAT, out / "float_record.txt", "-o", redeployed)
    for name in ("record.txt", "deploy_model.onnx", "fake_quant_model.onnx", "amct_qdq.onnx"):
        assert (redeployed / f"float_{name}").read_bytes() == (out / f"float_{name}").read_bytes()


# -- what goes back to 8 bits, and is told
def test_layers_without_4_bits_keep_8(built):
    _, output, out = built(CASES["w4"])
    assert "The weights of 2 layers (conv1, dw) have 8 bits, not 4: only layers" in output
    assert "Weights of 4 layers (conv2, up, fc1, ...) are of 4 bits" in output
    used = json.loads((out / "float_config.json").read_text())
    bits = {name: used[name]["weight_quant_params"]["num_bits"] for name in ("conv1", "dw", "up")}
    assert bits == {"conv1": 8, "dw": 8, "up": 4}
    _, output, _ = built(CASES["w6"])
    assert "The weights of 3 layers (fc1, fc2, up) have 8 bits, not 6" in output
    _, output, _ = built('skip_layers: "dw" common_config { arq_quantize { quant_bits: 4 } }')
    assert "The weights of 1 layer (conv1) have 8 bits, not 4" in output


@pytest.mark.parametrize("case", ["a16", "a16h"])
def test_common_16_bits_reach_suitable_layers(case, built):
    _, output, out = built(CASES[case])
    assert "The activations of 2 layers (fc2, pool) have 8 bits, not 16" in output
    assert "of 16 bits, which atc takes for Nano chips (Ascend035) alone" in output
    assert re.search(r"Sums of 16-bit activations reached 0\.0\d+ of int32's end, in fc1\.", output)
    assert "The Q/DQ model has those layers in float" in output
    qdq = onnx.load(out / "float_amct_qdq.onnx")
    quantizers = {n.name for n in qdq.graph.node if n.op_type == "QuantizeLinear"}
    assert quantizers == {"pool.input.quantize", "fc2.input.quantize"}


def test_other_commands_report_wide_layers(run, command, tmp_path):
    config = tmp_path / "my.cfg"
    config.write_text(CASES["w4"])
    sentence = "The weights of 2 layers (conv1, dw) have 8 bits, not 4"
    config_path = tmp_path / "made.json"
    auto = ("--images", WIDTHS / "x.npy", "--max-loss", 0.9, "--ascend-config", config)
    for arguments in (
        ("config", FLOAT, "--from", config, "-o", config_path),
        ("check", config, "--model", FLOAT),
        ("auto", FLOAT, *auto, "-o", tmp_path / "auto"),
    ):
        code, out, err = run("ascend", *arguments)
        assert code == 0, (arguments, out, err)
        assert sentence in " ".join((out + err).split()), (arguments, out, err)
    # 8 bits are what it asks for
    assert command("ascend", "check", config_path, "--model", FLOAT).endswith("7 layers in int8")
    record = read_record((tmp_path / "auto" / "float_record.txt").read_text())
    of_four = {name for name, layer in record.items() if layer.weight_bits == 4}
    assert of_four == {"conv2", "up", "fc1", "fc2"}


def override(key, value, inner):
    word = "override_layer_types" if key == "layer_type" else "override_layer_configs"
    return f'{word} {{ {key}: "{value}" calibration_config {{ {inner} }} }}'


IN_JSON = {"fc2": {"activation_quant_params": {"num_bits": 16}}, "conv1": {"quant_enable": True}}


@pytest.mark.parametrize(
    ("text", "suffix", "who"),
    [
        (override("layer_type", "AveragePool", INT16), ".cfg", "AveragePool in layer 'pool'"),
        (override("layer_type", "Linear", INT16), ".cfg", "MatMul in layer 'fc2'"),
        (override("layer_name", "fc2", INT16), ".cfg", "MatMul in layer 'fc2'"),
        (json.dumps({"version": 1, "batch_num": 2, **IN_JSON}), ".json", "MatMul in layer 'fc2'"),
    ],
)
def test_unsuitable_named_16_bits_are_refused(text, suffix, who, built, no_pass):
    message = "16-bit activations are for Conv and ConvTranspose with a 1-D or 2-D kernel, and Gemm"
    assert f"{message}, got {who}" in refused(built, text, suffix)


def test_unsuitable_named_7_bits_are_refused(built, no_pass):
    text = override("layer_type", "Linear", "arq_quantize { quant_bits: 7 }")
    message = "quant_bits 7 is for Conv with a 2-D kernel, got Gemm; leave it out (in layer 'fc1')"
    assert message in refused(built, text, ".cfg")


def test_3d_convolution_takes_4_bit_weights(tmp_path, built, request, rng):
    """A Conv with a 3-D kernel and two input channels."""
    nodes = [("Reshape", "x to", "v", "shape"), ("Conv", "v w", "y", "deep")]
    constants = {"w": rng.normal(size=(4, 2, 1, 3, 3)), "to": np.array([1, 2, 3, 4, 8])}
    ends = {"x": [1, 3, 8, 8]}, {"y": [1, 4, 3, 2, 6]}
    model = save_net(tmp_path / "volume.onnx", nodes, *ends, constants)
    text = f"common_config {{ {INT16} arq_quantize {{ quant_bits: 4 }} }}"
    code, output, out = built(text, ".cfg", model)
    assert code == 0
    assert "activations of 1 layer (deep) have 8 bits, not 16" in output
    record = read_record((out / "volume_record.txt").read_text())["deep"]
    assert (record.act_bits, record.weight_bits, record.offset_d) == (8, 4, 0)
    request.getfixturevalue("no_pass")
    output = refused(built, override("layer_name", "deep", INT16), ".cfg", model)
    assert "got Conv in layer 'deep'" in output


def test_batched_matmul_takes_four_bits(command, rng, tmp_path):
    """Its weight [2, 6, 5] is packed along the 6 input channels, behind an Add with a Cast too."""
    constants = {"w": rng.normal(size=(2, 6, 5)), "b": rng.normal(size=5)}
    nodes = [("MatMul", "x w", "m", "mm"), ("Add", "m b", "y", "add")]
    model = save_net(tmp_path / "mm.onnx", nodes, {"x": [2, 3, 6]}, {"y": [2, 3, 5]}, constants)
    record = tmp_path / "r.txt"
    fields = {"act_type": "INT4", "wts_type": "INT4", "scale_d": 0.25, "scale_w": 0.3}
    record.write_text(entry("mm", **fields))
    output = command("ascend", "deploy", model, record, "-o", tmp_path / "o")
    assert "within 0 of the fake-quant model" in output
    deploy = onnx.load(tmp_path / "o" / "mm_deploy_model.onnx")
    assert tensors(deploy)["mm", 1].shape == (2, 3, 5)
    assert kinds(deploy)["mm.bias_quant"] == ("Cast",)


# -- values
def test_pairs_are_packed_low_half_first():
    weight = np.array([[-8, 7, 0, -1], [1, 2, 3, -4]], np.int8)
    packed = pack_int4(weight, 1)
    assert packed.view(np.uint8).tolist() == [[0x78, 0xF0], [0x21, 0xC3]]
    np.testing.assert_array_equal(unpack_int4(packed, 1), weight)
    deep = np.random.default_rng(1).integers(-8, 8, size=(6, 5, 3), dtype=np.int8)
    assert pack_int4(deep, 0).shape == (3, 5, 3)
    np.testing.assert_array_equal(unpack_int4(pack_int4(deep, 0), 0), deep)


# value: bits of AMCT's cast_fp16_precision and cast_to_s19, run on it
PRECISIONS = {
    1e-6: (897995656, 897982464), 3.7e-5: (941311588, 941301760), 6.1e-5: (947896324, 947896320),
    0.0123456: (1011499008, 1011499008), 65504.0: (1199562752, 1199562752),
    123456.0: (1206974536, 1206984704), 3e8: (1301228744, 1301217280),
}  # fmt: skip


@pytest.mark.parametrize("value", PRECISIONS)
def test_nano_scales_equal_amct(value):
    scales = ascend_half(np.float32(value)), ascend_s19(np.float32([value]))[0]
    assert tuple(int(scale.view(np.uint32)) for scale in scales) == PRECISIONS[value]


def test_sums_beyond_int32_are_told(command, tmp_path):
    """16-bit codes at their end against 600 weights at theirs: 32767 * 127 * 600 > 2^31."""
    nodes, ends = [("Gemm", "x w", "y", "fc")], ({"x": [1, 600]}, {"y": [1, 2]})
    model = save_net(tmp_path / "wide.onnx", nodes, *ends, {"w": np.ones((600, 2))})
    x, record = np.ones((1, 600), np.float32), tmp_path / "r.txt"
    np.save(tmp_path / "x.npy", x)
    record.write_text(entry("fc", act_type="INT16", scale_d=1 / 32767, scale_w=1 / 127))
    arguments = ("-o", tmp_path / "o", "--images", tmp_path / "x.npy")
    command("ascend", "deploy", model, record, *arguments)
    report = read_markdown(tmp_path / "o")
    assert "reached 1.16 of int32's end, in fc, and are wrong wherever" in report
    deployed = open_deploy(onnx.load(tmp_path / "o" / "wide_deploy_model.onnx"))
    np.testing.assert_allclose(deployed.run({"x": x})["y"], 600, rtol=1e-4)  # added in int64


def entry(key, **fields):
    values = {"scale_d": 0.1, "offset_d": 0, "scale_w": 0.01, "offset_w": 0, **fields}
    text = " ".join(f"{name}: {json.dumps(value)}" for name, value in values.items())
    return f'record {{ key: "{key}" value {{ {text} }} }}'


@pytest.mark.parametrize(
    ("layer", "fields", "message"),
    [
        ("fc2", {"act_type": "INT16"}, "act_type INT16 is for Conv and ConvTranspose with"),
        ("conv1", {"wts_type": "INT4"}, "with 3 input channels and 1 groups in layer 'conv1'"),
        ("dw", {"wts_type": "INT4"}, "with 16 input channels and 16 groups in layer 'dw'"),
        ("fc1", {"wts_type": "INT6"}, "wts_type INT6 is for Conv with a 2-D kernel, got Gemm"),
        ("fc1", {"wts_type": "INT16"}, "wts_type must be one of INT4, INT6, INT7, INT8"),
        ("fc1", {"dst_type": "INT16"}, "dst_type must be one of INT4, INT8, got 'INT16'"),
        ("fc1", {"act_type": "INT4", "offset_d": 8}, "offset_d must be in [-8, 7] with 4 bits"),
        ("fc1", {"fakequant_precision_mode": "FP8"}, "must be FORCE_FP16_QUANT or DEFAULT"),
        ("conv1", {"scale_w": [0.01] * 2, "offset_w": [0] * 2}, "scale_w are needed, got 2"),
        ("conv1", {"tensor_balance_factor": [1.0, 2.0]}, "3 DMQ factors are needed, got 2"),
        ("fc1", {"scale_d": 1e-12, "act_type": "INT16"}, "1 / scale_d must be in [2^-14, 4.29"),
    ],
)
def test_record_without_matching_layer_is_refused(layer, fields, message, refusal, tmp_path):
    record = tmp_path / "r.txt"
    record.write_text(entry(layer, **fields))
    err = refusal("ascend", "deploy", FLOAT, record, "-o", tmp_path / "o")
    assert message in err
    assert not (tmp_path / "o").exists()
    assert message in refusal("ascend", "check", record, "--model", FLOAT)


def test_widths_of_a_record():
    types = {"eight": ("INT8", "INT8"), "wide": ("INT16", "INT8"), "four": ("INT4", "INT4")}
    texts = (entry(name, act_type=a, wts_type=w) for name, (a, w) in types.items())
    eight, wide, four = map(read_record, texts)
    assert [*bit_width_notes(eight)] == []
    of_wide, _ = bit_width_notes(eight | wide)
    assert of_wide.startswith("Activations of 1 layer (wide) are of 16 bits, which atc takes")
    of_four, _, weights = bit_width_notes(eight | four)
    assert of_four.startswith("Activations of 1 layer (four) are of 4 bits, for which atc makes")
    assert " no .om on chips" in of_four
    assert weights.startswith("Weights of 1 layer (four) are of 4 bits")
    (layer,) = read_record(entry("fc1", dst_type="INT4", act_type="INT8")).values()
    assert (layer.act_bits, layer.weight_bits) == (4, 4)


HALF, HALF_X = WIDTHS / "float16.onnx", X.astype(np.float16)
F16, F32 = TensorProto.FLOAT16, TensorProto.FLOAT


@pytest.fixture
def files(command, tmp_path):
    """(arguments of `calib8 ...`, the model first) -> the report, deploy and fake-quant models."""

    def make(command_words, model, *arguments, dtype=np.float16):
        np.save(tmp_path / "x.npy", HALF_X.astype(dtype))
        out = tmp_path / "o"
        command(*command_words, model, *arguments, "--images", tmp_path / "x.npy", "--out", out)
        ends = ("deploy_model.onnx", "fake_quant_model.onnx")
        return read_markdown(out), *(out / f"{model.stem}_{end}" for end in ends)

    return make


BUILD = ("--target", "ascend", "--effort", 0, "--duration", 0)


def types(model):
    """Tensor -> its element type, constants too."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    values = (*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info)
    type_by_name = {v.name: v.type.tensor_type.elem_type for v in values}
    return type_by_name | {t.name: t.data_type for t in inferred.graph.initializer}


def dtypes(path):
    nodes = [n for n in onnx.load(path).graph.node if n.op_type == "AscendDequant"]
    return {n.name: helper.get_node_attr_value(n, "dtype") for n in nodes}


def test_amct_record_gives_its_files(files):
    """Integers and scales equal; conv1's bias was folded by AMCT there, here by the exporter."""
    report, deploy, fake = files(("ascend", "deploy"), HALF, WIDTHS / "half" / "record.txt")
    assert "7 layers (conv1, conv2, dw, ...) read and give float16, as in the file" in report
    assert set(dtypes(deploy).values()) == {1}
    mine, amct = onnx.load(deploy), onnx.load(WIDTHS / "half" / "res_deploy_model.onnx")
    assert [n.op_type for n in mine.graph.node] == [n.op_type for n in amct.graph.node]
    tensors_found, expected = tensors(mine), tensors(amct)
    assert set(tensors_found) == set(expected)
    for key in set(tensors_found) - {("conv1", 2)}:
        np.testing.assert_array_equal(tensors_found[key], expected[key], err_msg=str(key))
    model = onnx.load(fake)
    assert types(model)["conv1_output0"] == F32
    assert types(model)["/Relu_output_0"] == F16
    session, expected = OrtSession.open(fake), np.load(WIDTHS / "half" / "y.npy")
    for x, y in zip(HALF_X, expected, strict=True):
        got = session.run({"x": x[None]})["y"]
        assert got.dtype == np.float16
        assert np.abs(got[0] - y).max() <= 4e-3 * np.abs(expected).max()


def test_a_build_keeps_float16(files):
    _, deploy, fake = files(("build",), HALF, *BUILD, "--keep-float", "conv2")
    record = deploy.with_name("float16_record.txt").read_text()
    assert record.count('op_data_type: "FLOAT16"') == record.count("act_type") == 6
    type_by_name = {t.name: t.data_type for t in onnx.load(deploy).graph.initializer}
    assert type_by_name["conv2.weight"] == type_by_name["conv2.bias"] == F16
    assert type_by_name["dw.weight"] == TensorProto.INT8
    assert set(dtypes(deploy).values()) == {1}
    assert "Cast" not in [n.op_type for n in onnx.load(deploy).graph.node]
    deviation, largest = run_both(deploy, fake, HALF_X[:1])
    assert deviation <= 4e-3 * largest


def run_both(deploy, fake, x):
    """How far the float16 outputs of both models are apart, and the largest of them."""
    a = open_deploy(onnx.load(deploy)).run({"x": x})["y"]
    b = OrtSession.open(fake).run({"x": x})["y"]
    assert a.dtype == b.dtype == np.float16
    return np.abs(a - b).max(), np.abs(b).max()


def network():
    """float16 in between: operators whose other inputs are float32, bool or whole, and twins."""
    filled = numpy_helper.from_array(np.float16([0.5]))
    nodes = [
        ("Cast", "x", "h", {"to": F16}),
        ("Conv", "h w", "c", {"pads": [1] * 4}),
        ("Relu", "c", "r"),
        ("Resize", ["r", "", "twice"], "u", {"mode": "nearest"}),
        ("Greater", "u half", "g"),
        ("Where", "g u half", "v"),
        ("Shape", "v", "s"),
        ("ConstantOfShape", "s", "k", {"value": filled}),
        ("Add", "v k", "a"),
        ("Cast", "a", "f", {"to": F32}),
        ("Softmax", "f", "p", {"axis": 1}),
        ("Cast", "p", "q", {"to": F16}),
        ("Mul", "q a", "y"),
    ]
    weight = np.random.default_rng(0).normal(scale=0.3, size=(4, 3, 3, 3))
    constants = {"w": np.float16(weight), "half": np.float16(0.5)}
    constants["twice"] = np.float32([1, 1, 2, 2])
    ends = [make_value("x", [1, 3, 8, 8]), make_value("y", [1, 4, 16, 16], F16)]
    return make_model(nodes, ends[:1], ends[1:], constants)


def test_float16_types_are_restored_by_name():
    model = network()
    loaded = load(model)
    halves = find_float16_tensors(
        CalibrationSubject(loaded=loaded, sample_count=1, user_model=model)
    )
    restored = to_float16(loaded.model, halves)
    onnx.checker.check_model(restored, full_check=True)
    types_before, types_after = types(model), types(restored)
    assert all(
        types_after[name] == kind for name, kind in types_before.items() if name in types_after
    )
    assert {types_after[name] for name in "cruva"} == {F16}
    assert types_after["twice"] == F32
    x = {"x": np.random.default_rng(1).normal(size=(1, 3, 8, 8)).astype(np.float32)}
    (got,), (expected,) = (OrtSession.open(m).run(x).values() for m in (restored, model))
    np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), atol=2e-3)
    assert (
        find_float16_tensors(CalibrationSubject(loaded=load(model), sample_count=1)) == frozenset()
    )


def test_float16_outputs_may_be_one_tensor():
    nodes = [("Conv", "x w", "c"), ("Cast", "c", "y", {"to": F16}), ("Identity", "c", "z")]
    weight = np.ones((4, 3, 3, 3), np.float16)
    ends = [make_value(name, [1, 4, 6, 6], F16) for name in "yz"]
    model = make_model(nodes, [make_value("x", [1, 3, 8, 8], F16)], ends, {"w": weight})
    loaded = load(model)
    halves = find_float16_tensors(
        CalibrationSubject(loaded=loaded, sample_count=1, user_model=model)
    )
    restored = to_float16(loaded.model, halves)
    onnx.checker.check_model(restored, full_check=True)
    assert types(restored)["y"] == types(restored)["z"] == F16


@pytest.mark.parametrize(
    ("text", "max_deviation"),
    [("", 2e-3), ('tensor_quantize { layer_name: "Add_a" input_index: 0 }', 4e-3)],
)
def test_a_mixed_model_is_built(text, max_deviation, files, tmp_path):
    """AscendAntiQuant gives what AscendQuant read: dtype 1, and no Cast in front of the Add."""
    config = tmp_path / "my.cfg"
    config.write_text(f"batch_num: 2 {text}")
    onnx.save(network(), tmp_path / "mixed.onnx")
    arguments = (*BUILD, "--ascend-config", config)
    _, deploy, fake = files(("build",), tmp_path / "mixed.onnx", *arguments, dtype=np.float32)
    assert dtypes(deploy) == {"Conv_c.dequant": 1}
    deviation, _ = run_both(deploy, fake, HALF_X[:1].astype(np.float32))
    assert deviation <= max_deviation
    if text:
        nodes = {n.name: n for n in onnx.load(deploy).graph.node}
        back = nodes["Add_a.0.anti_quant"]
        assert helper.get_node_attr_value(back, "dtype") == 1
        assert nodes["Add_a"].input[0] == back.output[0]


def test_bias_add_of_float16_matmul_reads_integers(files, tmp_path):
    """No Cast between AscendQuant and AscendDequant; the sums, beyond float16, are float32."""
    side = HALF_X.shape[-1]
    weight = np.random.default_rng(0).normal(size=(side, side)).astype(np.float16)
    nodes = [("MatMul", "x w", "m"), ("Add", "m b", "y")]
    ends = [make_value("x", HALF_X.shape[1:], F16), make_value("y", HALF_X.shape[1:], F16)]
    constants = {"w": weight, "b": weight[0]}
    onnx.save(make_model(nodes, ends[:1], ends[1:], constants), tmp_path / "biased.onnx")
    _, deploy, fake = files(("build",), tmp_path / "biased.onnx", *BUILD)
    assert "Cast" not in [node.op_type for node in onnx.load(deploy).graph.node]
    assert types(onnx.load(fake))["m"] == F32
    deviation, largest = run_both(deploy, fake, HALF_X[0])
    assert deviation <= 2e-3 * largest


def test_final_cast_may_share_input_name(files, tmp_path):
    """As onnxconverter_common names it with keep_io_types: the fake-quant model did not load."""
    model = onnx.load(HALF)
    (end,) = model.graph.output
    rename_tensor(model, end.name, "end")
    model.graph.node.append(helper.make_node("Cast", ["end"], [end.name], name="end", to=F32))
    end.type.tensor_type.elem_type = F32
    onnx.save(model, tmp_path / "cast.onnx")
    _, deploy, fake = files(("build",), tmp_path / "cast.onnx", *BUILD)
    for path in (deploy, fake):
        names = [node.name for node in onnx.load(path).graph.node]
        assert len(names) == len(set(names))
        assert "end" in names
    assert OrtSession.open(fake).run({"x": HALF_X[:1]})[end.name].dtype == np.float32
