"""Integers of 4, 6 and 16 bits and FORCE_FP16_QUANT, by the command, beside files of the real AMCT.

golden/amct/widths holds what AMCT wrote for one small net (conv1 3 -> 8, conv2, a depthwise dw,
a ConvTranspose up, an AveragePool, a Gemm fc1 and a MatMul fc2) and seven configurations.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from calibrators.amct.arq import ascend_half, ascend_s19
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.deploy_model import pack_fours, unpack_fours
from deploy.targets.ascend.executor import open_deploy
from deploy.targets.ascend.recipe import widths
from deploy.targets.ascend.record import read_record

WIDTHS = Path(__file__).parent / "golden" / "amct" / "widths"
FLOAT, X = WIDTHS / "float.onnx", np.load(WIDTHS / "x.npy")
W4, W6, A16, A16H = (
    f"batch_num: 2 common_config {{ {inner} }}"
    for inner in (
        "arq_quantize { quant_bits: 4 }",
        "arq_quantize { quant_bits: 6 }",
        "ifmr_quantize { dst_type: INT16 }",
        "hfmg_quantize { dst_type: INT16 }",
    )
)
CASES = {
    "w4": W4,
    "w6": W6,
    "a16": A16,
    "a16h": A16H,
    "a4w4": (WIDTHS / "a4w4" / "config.json").read_text(),
    "force": "batch_num: 2 fakequant_precision_mode: FORCE_FP16_QUANT",
}


BUILT: dict[tuple[str, ...], tuple[int, str, Path]] = {}


@pytest.fixture
def built(run, tmp_path_factory):
    """(text, suffix of the configuration, model) -> exit code, what was said, folder; made once."""

    def build(text, suffix=".cfg", model=FLOAT):
        key = (text, suffix, str(model))
        if key not in BUILT:
            folder = tmp_path_factory.mktemp("widths")
            config, out = folder / f"my{suffix}", folder / "o"
            config.write_text(text)
            words = ("--target", "ascend", "--effort", 0, "--duration", 0, "--out", out)
            images = ("--images", WIDTHS / "x.npy")
            code, said, err = run("build", model, *images, *words, "--ascend-config", config)
            report = out / "report.md"
            said += err + (report.read_text() if report.exists() else "")
            BUILT[key] = code, " ".join(said.split()), out
        return BUILT[key]

    return build


@pytest.fixture
def refused(built, monkeypatch):
    """(text, suffix, model) -> the sentence of a build that ends before any pass."""

    def end(*how):
        monkeypatch.setattr(
            "deploy.pipeline.observing.observe", lambda *a, **k: pytest.fail("a pass")
        )
        code, said, out = built(*how)
        assert code == 1 and not (out / "float_record.txt").exists() and "Traceback" not in said
        return said

    return end


def ulps(a, b):
    a, b = np.atleast_1d(np.float32(a)), np.atleast_1d(np.float32(b))
    return int(np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)).max())


def tensors(model):
    """(node, place) -> the constant that it reads there."""
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    return {
        (node.name, place): held[name]
        for node in model.graph.node
        for place, name in enumerate(node.input)
        if name in held
    }


def kinds(model):
    """node -> operator and, of an AscendQuant, type."""
    nodes = [n for n in model.graph.node if n.op_type != "Constant"]
    return {n.name: (n.op_type, *(a.s for a in n.attribute if a.name == "dst_type")) for n in nodes}


@pytest.mark.parametrize("case", CASES)
def test_a_build_is_amcts(case, built):
    """Same types and offsets; scales and what follows from them within AMCT's float32 sums."""
    code, said, out = built(CASES[case], ".json" if case == "a4w4" else ".cfg")
    assert code == 0, said
    found = read_record((out / "float_record.txt").read_text())
    wanted = read_record((WIDTHS / case / "record.txt").read_text())
    assert list(found) == list(wanted)
    for name, one in wanted.items():
        mine = found[name]
        assert (mine.act_bits, mine.weight_bits) == (one.act_bits, one.weight_bits), name
        assert mine.offset_d == one.offset_d and ulps(mine.scale_d, one.scale_d) <= 8
        assert ulps(mine.scale_w, one.scale_w) <= 8
        assert mine.force_fp16 == (case == "force")
    deploys = [onnx.load(out / "float_deploy_model.onnx")]
    deploys.append(onnx.load(WIDTHS / case / "res_deploy_model.onnx"))
    assert kinds(deploys[0]) == kinds(deploys[1])
    (fake,) = OrtSession.open(out / "float_fake_quant_model.onnx").run({"x": X[:1]}).values()
    reference = np.load(WIDTHS / case / "y.npy")[:1]
    assert np.abs(fake - reference).max() <= 4e-3 * np.abs(reference).max()


@pytest.mark.parametrize("case", (*CASES, "s19"))
def test_files_from_amcts_record_are_amcts(case, run, tmp_path):
    """Every tensor of the deploy model equal, packed weights and cut scales too."""
    words = ("-o", tmp_path, "--images", WIDTHS / "x.npy")
    code, out, err = run("ascend", "deploy", FLOAT, WIDTHS / case / "record.txt", *words)
    assert code == 0, err
    mine = onnx.load(tmp_path / "float_deploy_model.onnx")
    amct = onnx.load(WIDTHS / case / "res_deploy_model.onnx")
    assert kinds(mine) == kinds(amct)
    found, wanted = tensors(mine), tensors(amct)
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        got = found[key]
        assert got.dtype == value.dtype and got.shape == value.shape, key
        if key != ("conv1", 2):  # of a bias that AMCT folded, and here the exporter
            np.testing.assert_array_equal(got, value, err_msg=str(key))
    fakes = OrtSession.open(tmp_path / "float_fake_quant_model.onnx")
    reference = np.load(WIDTHS / case / "y.npy")
    for x, y in zip(X, reference, strict=True):
        np.testing.assert_allclose(fakes.run({"x": x[None]})["y"][0], y, rtol=1e-5, atol=1e-7)
    said = " ".join(out.split())
    assert "within 0 of the fake-quant model with AscendQuant's rounding" in said
    code, out, err = run("ascend", "check", tmp_path / "float_deploy_model.onnx")
    grids = {"a16": "int8 and int16", "a16h": "int8 and int16", "a4w4": "int4"}
    assert code == 0 and out.endswith(f"7 layers in {grids.get(case, 'int8')}\n"), (out, err)


def test_a_records_widths_come_back_byte_for_byte(built, run, tmp_path):
    _, _, out = built(W4)
    again = tmp_path / "again"
    code, _, err = run("ascend", "deploy", FLOAT, out / "float_record.txt", "-o", again)
    assert code == 0, err
    for name in ("record.txt", "deploy_model.onnx", "fake_quant_model.onnx", "amct_qdq.onnx"):
        assert (again / f"float_{name}").read_bytes() == (out / f"float_{name}").read_bytes()


# -- what goes back to 8 bits, and is told --------------------------------------------------------


def test_four_bit_weights_need_pairs_of_input_channels(built):
    _, said, out = built(W4)
    assert "The weights of 2 layers (conv1, dw) have 8 bits, not 4: only layers" in said
    assert "Weights of 4 layers (conv2, up, fc1, ...) are of 4 bits" in said
    used = json.loads((out / "float_config.json").read_text())
    bits = {name: used[name]["weight_quant_params"]["num_bits"] for name in ("conv1", "dw", "up")}
    assert bits == {"conv1": 8, "dw": 8, "up": 4}


def test_six_bit_weights_are_for_convolutions(built):
    _, said, _ = built(W6)
    assert "The weights of 3 layers (fc1, fc2, up) have 8 bits, not 6" in said


@pytest.mark.parametrize("text", [A16, A16H])
def test_sixteen_bits_in_common_are_for_whom_they_fit(text, built):
    _, said, out = built(text)
    assert "The activations of 2 layers (fc2, pool) have 8 bits, not 16" in said
    assert "of 16 bits, which atc takes for Nano chips (Ascend035) alone" in said
    assert re.search(r"Sums of 16-bit activations reached 0\.0\d+ of int32's end, in fc1\.", said)
    assert "The Q/DQ model has those layers in float" in said
    qdq = onnx.load(out / "float_amct_qdq.onnx")
    made = {n.name for n in qdq.graph.node if n.op_type == "QuantizeLinear"}
    assert made == {"pool.input.quantize", "fc2.input.quantize"}


def test_other_commands_tell_it_too(run, tmp_path):
    config = tmp_path / "my.cfg"
    config.write_text(W4)
    sentence = "The weights of 2 layers (conv1, dw) have 8 bits, not 4"
    made = tmp_path / "made.json"
    auto = ("--images", WIDTHS / "x.npy", "--max-loss", 1, "--ascend-config", config)
    for words in (
        ("config", FLOAT, "--from", config, "-o", made),
        ("check", config, "--model", FLOAT),
        ("auto", FLOAT, *auto, "-o", tmp_path / "auto"),
    ):
        code, out, err = run("ascend", *words)
        assert code == 0 and sentence in " ".join((out + err).split()), (words, out, err)
    code, out, _ = run("ascend", "check", made, "--model", FLOAT)
    assert code == 0 and out.endswith("7 layers in int8\n")  # 8 bits are what it asks for
    record = read_record((tmp_path / "auto" / "float_record.txt").read_text())
    assert {name for name, one in record.items() if one.weight_bits == 4} == {
        "conv2", "up", "fc1", "fc2",
    }  # fmt: skip


def test_a_layer_that_was_skipped_is_not_told_of(built):
    text = 'skip_layers: "dw" common_config { arq_quantize { quant_bits: 4 } }'
    _, said, _ = built(text)
    assert "The weights of 1 layer (conv1) have 8 bits, not 4" in said


def override(key, value, inner):
    word = "override_layer_types" if key == "layer_type" else "override_layer_configs"
    return f'{word} {{ {key}: "{value}" calibration_config {{ {inner} }} }}'


INT16 = "ifmr_quantize { dst_type: INT16 }"


@pytest.mark.parametrize(
    ("text", "who"),
    [
        (override("layer_type", "AveragePool", INT16), "AveragePool in layer 'pool'"),
        (override("layer_type", "Linear", INT16), "MatMul in layer 'fc2'"),
        (override("layer_name", "fc2", INT16), "MatMul in layer 'fc2'"),
    ],
)
def test_sixteen_bits_asked_for_by_name_are_refused(text, who, refused):
    assert f"16-bit activations are for Conv and ConvTranspose with a 1-D or 2-D kernel, and" \
        f" Gemm, got {who}" in refused(text)  # fmt: skip


def quant_config(**layers):
    """JSON of the net with these layers' activation_quant_params."""
    names = ("conv1", "conv2", "dw", "up", "pool", "fc1", "fc2")
    made = {n: {"quant_enable": True} for n in names}
    for name, act in layers.items():
        made[name]["activation_quant_params"] = act
    return json.dumps({"version": 1, "batch_num": 2, **made})


def test_sixteen_bits_of_a_matmul_in_json_are_refused(refused):
    assert "got MatMul in layer 'fc2'" in refused(quant_config(fc2={"num_bits": 16}), ".json")


def volume(tmp_path):
    """A Conv with a 3-D kernel and two input channels."""
    value = helper.make_tensor_value_info
    weight = np.random.default_rng(0).normal(size=(4, 2, 1, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Reshape", ["x", "to"], ["v"], name="shape"),
        helper.make_node("Conv", ["v", "w"], ["y"], name="deep"),
    ]
    constants = {"w": weight, "to": np.array([1, 2, 3, 4, 8])}
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", 1, [1, 3, 8, 8])],
        [value("y", 1, [1, 4, 3, 2, 6])],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "volume.onnx")
    return tmp_path / "volume.onnx"


def test_a_3d_convolution_takes_four_bit_weights_and_no_sixteen_bit_activations(
    tmp_path, built, refused
):
    model = volume(tmp_path)
    code, said, out = built(
        f"common_config {{ {INT16} arq_quantize {{ quant_bits: 4 }} }}", ".cfg", model
    )
    assert code == 0 and "activations of 1 layer (deep) have 8 bits, not 16" in said
    record = read_record((out / "volume_record.txt").read_text())["deep"]
    assert (record.act_bits, record.weight_bits, record.offset_d) == (8, 4, 0)
    shutil.rmtree(out)
    assert "got Conv in layer 'deep'" in refused(
        override("layer_name", "deep", INT16), ".cfg", model
    )


def test_four_bits_of_a_matmul_with_matrices_for_a_batch(run, tmp_path):
    """Its weight [2, 6, 5] is packed along the 6 input channels, behind an Add with a Cast too."""
    value, rng = helper.make_tensor_value_info, np.random.default_rng(3)
    constants = {"w": rng.normal(size=(2, 6, 5)), "b": rng.normal(size=5)}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"], name="mm"),
            helper.make_node("Add", ["m", "b"], ["y"], name="add"),
        ],
        "g",
        [value("x", 1, [2, 3, 6])],
        [value("y", 1, [2, 3, 5])],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "mm.onnx")
    record = tmp_path / "r.txt"
    text = entry(act_type="INT4", wts_type="INT4", scale_d=0.25, scale_w=0.3)
    record.write_text(f'record {{ key: "mm" value {{ {text} }} }}')
    code, out, err = run("ascend", "deploy", tmp_path / "mm.onnx", record, "-o", tmp_path / "o")
    assert code == 0 and "within 0 of the fake-quant model" in " ".join(out.split()), err
    deploy = onnx.load(tmp_path / "o" / "mm_deploy_model.onnx")
    assert tensors(deploy)["mm", 1].shape == (2, 3, 5)
    assert kinds(deploy)["mm.bias_quant"] == ("Cast",)


# -- values ----------------------------------------------------------------------------------------


def test_pairs_are_packed_low_half_first():
    weight = np.array([[-8, 7, 0, -1], [1, 2, 3, -4]], np.int8)
    packed = pack_fours(weight, 1)
    assert packed.view(np.uint8).tolist() == [[0x78, 0xF0], [0x21, 0xC3]]
    np.testing.assert_array_equal(unpack_fours(packed, 1), weight)
    deep = np.random.default_rng(1).integers(-8, 8, size=(6, 5, 3), dtype=np.int8)
    assert pack_fours(deep, 0).shape == (3, 5, 3)
    np.testing.assert_array_equal(unpack_fours(pack_fours(deep, 0), 0), deep)


# value: bits of AMCT's cast_fp16_precision and cast_to_s19, run on it
PRECISIONS = {
    1e-6: (897995656, 897982464),
    3.7e-5: (941311588, 941301760),
    6.1e-5: (947896324, 947896320),
    0.0123456: (1011499008, 1011499008),
    65504.0: (1199562752, 1199562752),
    123456.0: (1206974536, 1206984704),
    3e8: (1301228744, 1301217280),
}


@pytest.mark.parametrize("value", PRECISIONS)
def test_scales_of_nano_are_amcts_to_the_bit(value):
    held = ascend_half(np.float32(value)), ascend_s19(np.float32([value]))[0]
    assert tuple(int(one.view(np.uint32)) for one in held) == PRECISIONS[value]


def test_sums_beyond_int32_are_told(run, tmp_path):
    """16-bit codes at their end against 600 weights at theirs: 32767 * 127 * 600 > 2^31."""
    value = helper.make_tensor_value_info
    weight = np.ones((600, 2), np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w"], ["y"], name="fc")],
        "g",
        [value("x", 1, [1, 600])],
        [value("y", 1, [1, 2])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "wide.onnx")
    x = np.ones((1, 600), np.float32)
    np.save(tmp_path / "x.npy", x)
    record = tmp_path / "r.txt"
    scales = f"scale_d: {1 / 32767} offset_d: 0 scale_w: {1 / 127} offset_w: 0"
    record.write_text(f'record {{ key: "fc" value {{ {scales} act_type: "INT16" }} }}')
    words = ("-o", tmp_path / "o", "--images", tmp_path / "x.npy")
    code, out, err = run("ascend", "deploy", tmp_path / "wide.onnx", record, *words)
    said = " ".join(out.split())
    assert code == 0 and "reached 1.16 of int32's end, in fc, and are wrong wherever" in said, err
    deployed = open_deploy(onnx.load(tmp_path / "o" / "wide_deploy_model.onnx"))
    np.testing.assert_allclose(deployed.run({"x": x})["y"], 600, rtol=1e-4)  # added in int64


def entry(**fields):
    text = {"scale_d": 0.1, "offset_d": 0, "scale_w": 0.01, "offset_w": 0, **fields}
    return " ".join(f"{k}: {json.dumps(v)}" for k, v in text.items())


@pytest.mark.parametrize(
    ("layer", "fields", "said"),
    [
        ("fc2", {"act_type": "INT16"}, "act_type INT16 is for Conv and ConvTranspose with"),
        ("conv1", {"wts_type": "INT4"}, "with 3 input channels and 1 groups in layer 'conv1'"),
        ("dw", {"wts_type": "INT4"}, "with 16 input channels and 16 groups in layer 'dw'"),
        ("fc1", {"wts_type": "INT6"}, "wts_type INT6 is for Conv with a 2-D kernel, got Gemm"),
        ("fc1", {"wts_type": "INT16"}, "wts_type must be one of INT4, INT6, INT7, INT8"),
        ("fc1", {"dst_type": "INT16"}, "dst_type must be one of INT4, INT8, got 'INT16'"),
        ("fc1", {"act_type": "INT4", "offset_d": 8}, "offset_d must be in [-8, 7] with 4 bits"),
        ("fc1", {"fakequant_precision_mode": "FP8"}, "must be FORCE_FP16_QUANT or DEFAULT"),
        ("fc1", {"scale_d": 1e-12, "act_type": "INT16"}, "1 / scale_d must be in [2^-14, 4.29"),
    ],
)
def test_a_record_that_no_layer_takes_is_one_sentence(layer, fields, said, run, tmp_path):
    record = tmp_path / "r.txt"
    record.write_text(f'record {{ key: "{layer}" value {{ {entry(**fields)} }} }}')
    code, _out, err = run("ascend", "deploy", FLOAT, record, "-o", tmp_path / "o")
    assert code == 1 and said in " ".join(err.split()) and not (tmp_path / "o").exists()
    if "scale_d" not in fields:  # that is the hardware's, not the record's
        code, _, err = run("ascend", "check", record, "--model", FLOAT)
        assert code == 1 and said in " ".join(err.split())


def test_layers_of_other_widths_are_named_and_no_others():
    types = {"eight": ("INT8", "INT8"), "wide": ("INT16", "INT8"), "four": ("INT4", "INT4")}
    eight, wide, four = (
        read_record(f'record {{ key: "{name}" value {{ {entry(act_type=a, wts_type=w)} }} }}')
        for name, (a, w) in types.items()
    )
    assert [*widths(eight)] == []
    of_wide, _ = widths(eight | wide)
    assert of_wide.startswith("Activations of 1 layer (wide) are of 16 bits, which atc takes")
    of_four, _, weights = widths(eight | four)
    assert of_four.startswith(
        "Activations of 1 layer (four) are of 4 bits, for which atc makes no .om on chips"
    )
    assert weights.startswith("Weights of 1 layer (four) are of 4 bits")


def test_dst_type_is_both_widths():
    text = f'record {{ key: "fc1" value {{ {entry(dst_type="INT4", act_type="INT8")} }} }}'
    (one,) = read_record(text).values()
    assert (one.act_bits, one.weight_bits) == (4, 4)
