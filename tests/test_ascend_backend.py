"""The Ascend target end to end, its executor, Q/DQ, AIPP, atc, automatic calibration, commands."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from calib8 import build
from deploy.calibration.observation import CalibrationSubject
from deploy.errors import Calib8Error, ConfigError, ExportError, ModelError, SdkMissingError
from deploy.feed.preprocess import Preprocess
from deploy.frontends import load
from deploy.pipeline.ascend_auto import FINAL, HISTORY, RANKING
from deploy.report.screen import next_steps
from deploy.runtimes.ort import OrtSession
from deploy.targets import Ascend
from deploy.targets.ascend.aipp import write_aipp
from deploy.targets.ascend.atc import CHIP, AippSource, AtcOptions, atc_command, check_flag
from deploy.targets.ascend.config import default_config
from deploy.targets.ascend.deploy_model import deploy_model
from deploy.targets.ascend.executor import compare_deploy_model, open_deploy, to_standard_model
from deploy.targets.ascend.existing_files import check_file
from deploy.targets.ascend.fake_quant import amct_qdq_model, fake_quant_model
from deploy.targets.ascend.layers import find_layers
from deploy.targets.ascend.proto import parse_text
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import LayerRecord
from deploy.tuning.search_options import Tuning
from tests.models import as_float32, make_model, parse_nodes
from tests.test_ascend_models import CASES, NAMES
from tests.vendor_models import build_net, calibrate_amct

DATA = np.random.default_rng(11).normal(size=(6, 3, 16, 16)).astype(np.float32)


def run(model, feed):
    """The one output of a model."""
    (output,) = OrtSession.open(model.SerializeToString(), threads=1).run(feed).values()
    return output


def run_integers(model, feed):
    """The same of a deploy model."""
    (output,) = open_deploy(model, threads=1).run(feed).values()
    return output


def calibrated(model, feed, **options):
    """The layers of a model, quantized with what AMCT finds on one sample."""
    graph = find_layers(model)
    records = calibrate_amct(model, graph, [feed], default_config(graph, **options)).records
    return quantize_layers(model, graph, records)


@pytest.fixture(scope="module")
def small(small_cnn):
    """The residual CNN and its quantized layers, calibrated on six samples."""
    model = load(small_cnn).model
    graph = find_layers(model)
    batches = [{"x": DATA[i : i + 1]} for i in range(6)]
    calibrated_record = calibrate_amct(model, graph, batches, default_config(graph, batch_num=6))
    return model, quantize_layers(model, graph, calibrated_record.records)


# -- executor
@pytest.mark.parametrize("case", NAMES)
def test_amct_deploy_and_fake_quant_agree(case):
    arrays = np.load(CASES / case / "io.npz")
    deploy = onnx.load(CASES / case / "res_deploy_model.onnx")
    got = run_integers(deploy, {"input": arrays["in0"]})
    np.testing.assert_allclose(got, arrays["res_fake_quant_model"], rtol=1e-5, atol=1e-6)


def test_executor_equals_fake_quant(small):
    model, layers = small
    deployed, fake = deploy_model(model, layers), fake_quant_model(model, layers)
    for sample in DATA[:3]:
        feed = {"x": sample[None]}
        integers, floats = run_integers(deployed, feed), run(fake, feed)
        np.testing.assert_allclose(integers, floats, rtol=1e-4, atol=1e-4)
    comparison = compare_deploy_model(model, layers, [{"x": sample[None]} for sample in DATA])
    assert comparison.samples == 6
    assert comparison.max_npu_difference <= 1e-6
    assert comparison.min_amct_cosine > 0.999
    assert "within" in comparison.sentence()


@pytest.mark.parametrize("bits", [8, 16])
def test_tensors_may_have_names_of_amct(bits):
    """AMCT calls the integer sums of a layer fc fc_output0."""
    nodes, ends = [("Gemm", "x w", "fc_output0", "fc")], ({"x": [1, 2]}, {"fc_output0": [1, 2]})
    model = build_net(nodes, *ends, {"w": np.eye(2)})
    record = LayerRecord(scale_d=np.float32(1), scale_w=np.float32([2**-7]), act_bits=bits)
    layers = quantize_layers(model, find_layers(model), {"fc": record})
    comparison = compare_deploy_model(model, layers, [{"x": np.float32([[2, 3]])}])
    assert comparison.max_npu_difference == 0
    assert list(comparison.int32_share_by_layer) == ["fc"] * (bits == 16)
    with pytest.raises(ModelError, match="start from the float model"):
        find_layers(fake_quant_model(model, layers))


def test_equally_overflowing_results_are_equal():
    ends, weight = ({"x": [1, 2]}, {"y": [1, 2]}), np.float32([[3e38, 1], [3e38, 1]])
    model = build_net([("MatMul", "x w", "y", "mm")], *ends, {"w": weight})
    record = LayerRecord(scale_d=np.float32(1), offset_d=0, scale_w=np.float32([3e38 / 127]))
    layers = quantize_layers(model, find_layers(model), {"mm": record})
    comparison = compare_deploy_model(model, layers, [{"x": np.float32([[2, 2]])}])
    assert comparison.max_npu_difference == 0


def test_rounding_differs_at_halves_only():
    """offset -3, x / scale = 0.5: AMCT's fake-quant model rounds to 0 - 3, the NPU -2.5 to -2."""
    ends = {"x": [1, 2]}, {"y": [1, 2]}
    model = build_net([("MatMul", "x w", "y", "mm")], *ends, {"w": np.eye(2)})
    record = LayerRecord(scale_d=np.float32(1), offset_d=-3, scale_w=np.float32([2**-7]))
    layers = quantize_layers(model, find_layers(model), {"mm": record})
    feed = {"x": np.float32([[0.5, 0.75]])}
    unit = 127 / 128  # 1 / 2^-7 saturates at 127
    for npu, expected in ((False, [0.0, unit]), (True, [unit, unit])):
        fake = fake_quant_model(model, layers, npu_rounding=npu)
        assert run(fake, feed)[0].tolist() == expected
    assert run_integers(deploy_model(model, layers), feed)[0].tolist() == expected


@pytest.mark.parametrize("swapped", [False, True])
def test_outputs_of_other_shapes_are_not_compared(swapped, monkeypatch):
    """One fake-quant model rounds 0.5 to 0, and so has one nonzero value less."""
    nodes = [("MatMul", "x w", "y", "mm"), ("NonZero", "y", "i"), ("Cast", "i", "f", {"to": 1})]
    model = build_net(nodes, {"x": [1, 2]}, {"f": [2, "n"]}, {"w": np.eye(2)})
    record = LayerRecord(scale_d=np.float32(1), offset_d=-3, scale_w=np.float32([2**-7]))
    layers = quantize_layers(model, find_layers(model), {"mm": record})

    def make_model(model, layers, *, npu_rounding):
        return fake_quant_model(model, layers, npu_rounding=npu_rounding != swapped)

    monkeypatch.setattr("deploy.targets.ascend.executor.fake_quant_model", make_model)
    comparison = compare_deploy_model(model, layers, [{"x": np.float32([[0.5, 0.75]])}])
    assert (comparison.max_npu_difference, comparison.min_amct_cosine) == (0, 1)


@pytest.mark.parametrize(
    ("first", "swapped", "is_equal"),
    [(0.5, True, False), (0.5, False, True), (0.0, False, True)],
)
def test_nan_of_one_model_is_a_difference(first, swapped, is_equal, monkeypatch):
    """The logarithm is NaN where the layer gives 0, as the model does that rounds 0.5 to it."""
    nodes = [("MatMul", "x w", "z", "mm"), ("Sub", "z h", "d"), ("Log", "d", "y")]
    constants = {"w": np.eye(2), "h": np.float32([0.5])}
    model = build_net(nodes, {"x": [1, 2]}, {"y": [1, 2]}, constants)
    record = LayerRecord(scale_d=np.float32(1), offset_d=-3, scale_w=np.float32([2**-7]))
    layers = quantize_layers(model, find_layers(model), {"mm": record})

    def make_model(model, layers, *, npu_rounding):
        return fake_quant_model(model, layers, npu_rounding=npu_rounding != swapped)

    monkeypatch.setattr("deploy.targets.ascend.executor.fake_quant_model", make_model)
    comparison = compare_deploy_model(model, layers, [{"x": np.float32([[first, 0.75]])}])
    assert (comparison.max_npu_difference == 0) == is_equal
    # AMCT's rounding differs for 0.5 alone; swapped, it is the one that the other figure compares
    assert np.isnan(comparison.min_amct_cosine) == (first == 0.5 and not swapped)
    assert ("look into" in comparison.sentence()) != is_equal


def test_executor_convolution_is_exact_integer_arithmetic():
    """Against plain int64 sums, with extreme codes that saturate where int16 pairs are added."""
    weight, feed = np.full((2, 64, 3, 3), -1.0), {"x": np.ones((1, 64, 3, 3), np.float32)}
    weight[1] = 1.0
    ends = {"x": [1, 64, 3, 3]}, {"y": [1, 2, 1, 1]}
    model = build_net([("Conv", "x w", "y", "c", {"kernel_shape": [3, 3]})], *ends, {"w": weight})
    layers = calibrated(model, feed)
    quantized, got = layers["c"], run_integers(deploy_model(model, layers), feed)
    code = int(np.clip(np.rint(quantized.quant_factor + quantized.record.offset_d), -128, 127))
    code -= quantized.record.offset_d
    sums = quantized.weight.astype(np.int64).reshape(2, -1).sum(axis=1) * code
    expected = sums.astype(np.float32) * quantized.dequant_scale
    np.testing.assert_array_equal(got.reshape(-1), expected)


def test_executor_runs_grouped_conv_transpose(rng):
    shapes = {"w": (4, 2, 3, 3), "b": 4, "m": (5, 7), "c": 7}
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    nodes = [
        ("ConvTranspose", "x w b", "t", "up", {"group": 2, "strides": [2, 2]}),
        ("MatMul", "t m", "mm", "mm"),
        ("Add", "mm c", "y", "add"),
    ]
    model = build_net(nodes, {"x": [1, 4, 2, 2]}, {"y": [1, 4, 5, 7]}, weights)
    feed = {"x": rng.normal(size=(1, 4, 2, 2)).astype("f4")}
    quantized = calibrated(model, feed)
    assert [quantized[name].record.scale_w.size for name in ("up", "mm")] == [4, 1]
    deploy = deploy_model(model, quantized)
    order = [n.op_type for n in deploy.graph.node]
    assert order[-3:] == ["MatMul", "Add", "AscendDequant"]
    floats, reference = run(fake_quant_model(model, quantized), feed), run(model, feed)
    np.testing.assert_allclose(run_integers(deploy, feed), floats, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(floats, reference, atol=0.05 * np.abs(reference).max())


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_executor_on_random_layers(data):
    """Any convolution, matrix product or pool: integers equal floats with the NPU's rounding."""
    draw = data.draw
    op = draw(st.sampled_from(["Conv", "ConvTranspose", "Gemm", "MatMul", "AveragePool"]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    weights = {}
    if op in ("Gemm", "MatMul"):
        shape, out, trans = [3, 6], 5, op == "Gemm" and draw(st.booleans())
        weights["w"] = rng.normal(size=(5, 6) if trans else (6, 5))
        attributes = {"transB": int(trans)} if op == "Gemm" else {}
    elif op == "AveragePool":
        shape = [1, 4, 8, 8]
        attributes = {"kernel_shape": [2, 2], "pads": [draw(st.integers(0, 1))] * 4}
        attributes["count_include_pad"] = draw(st.integers(0, 1))
    else:
        rank = draw(st.sampled_from([1, 2, 3])) if op == "Conv" else 2
        group, size = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
        shape, out = [1, 4, *[7] * rank], 8
        dims = (8, 4 // group) if op == "Conv" else (4, 8 // group)
        weights["w"] = rng.normal(size=(*dims, *[size] * rank))
        attributes = {
            "group": group,
            "strides": [draw(st.integers(1, 2))] * rank,
            "pads": [draw(st.integers(0, size - 1))] * (2 * rank),
            "dilations": [draw(st.integers(1, 2))] * rank,
            "kernel_shape": [size] * rank,
        }
    if op not in ("AveragePool", "MatMul") and draw(st.booleans()):
        weights["b"] = rng.normal(size=out)
    nodes = [(op, ["x", *weights], "y", "n", attributes)]
    model = build_net(nodes, {"x": shape}, {"y": None}, weights)
    feed = {"x": (rng.normal(size=shape) + rng.normal()).astype("f4")}
    quantized = calibrated(model, feed, activation_offset=draw(st.booleans()))
    assert compare_deploy_model(model, quantized, [feed]).max_npu_difference <= 1e-6
    reference, fake = run(model, feed), run(fake_quant_model(model, quantized), feed)
    assert np.abs(fake - reference).max() <= 0.06 * max(np.abs(reference).max(), 0.5)


@pytest.mark.parametrize("damage", ["dst_type", "param", "bias"])
def test_executor_refuses_a_broken_deploy_model(small, damage):
    model = deploy_model(*small)
    if damage == "dst_type":
        node = next(n for n in model.graph.node if n.op_type == "AscendQuant")
        next(a for a in node.attribute if a.name == "dst_type").s = b"INT32"
    elif damage == "param":
        node = next(n for n in model.graph.node if n.op_type == "AscendDequant")
        node.input[1] = "nowhere"
    else:
        tensor = next(t for t in model.graph.initializer if t.data_type == 6)
        tensor.CopyFrom(numpy_helper.from_array(np.zeros(8, np.float32), tensor.name))
    with pytest.raises(ModelError):
        to_standard_model(model)


def test_qdq_model_matches_fake_quant_model(small):
    model, layers = small
    qdq_model = amct_qdq_model(model, layers)
    onnx.checker.check_model(qdq_model)
    feed = {"x": DATA[:1]}
    qdq, fake = run(qdq_model, feed), run(fake_quant_model(model, layers), feed)
    assert np.abs(qdq - fake).max() <= 0.05 * np.abs(fake).max()
    constants = {t.name: numpy_helper.to_array(t) for t in qdq_model.graph.initializer}
    gemm = next(name for name, q in layers.items() if q.layer.kind == "Gemm")
    assert constants[f"{gemm}.scale_w"].shape == ()
    bias, steps = constants[f"{gemm}.bias.rounded"], layers[gemm].dequant_scale
    np.testing.assert_allclose(bias / steps, np.rint(bias / steps), atol=1e-3)


# -- AIPP and atc
def aipp_of(preprocess, pixels, **options):
    """AIPP's arithmetic on an RGB picture [H, W, 3], from the text it was written as."""
    text, _ = write_aipp(preprocess, AippSource(**options))
    fields = parse_text("InsertNewOps", text, "aipp").aipp_op[0]
    image = pixels[..., ::-1] if fields.rbuv_swap_switch else pixels
    out = np.empty(image.shape, np.float32)
    for c in range(3):
        mean, minimum = getattr(fields, f"mean_chn_{c}"), getattr(fields, f"min_chn_{c}")
        out[..., c] = (image[..., c] - mean - minimum) * getattr(fields, f"var_reci_chn_{c}")[0]
    return out.transpose(2, 0, 1)


@pytest.mark.parametrize("color", ["rgb", "bgr"])
def test_aipp_computes_the_preprocessing(rng, color):
    norms = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    preprocess = Preprocess(size=(8, 8), color=color, layout="nchw", **norms)
    pixels = rng.integers(0, 256, (8, 8, 3)).astype(np.float32)
    channels = (pixels if color == "rgb" else pixels[..., ::-1]).transpose(2, 0, 1)
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (preprocess.mean, preprocess.std))
    np.testing.assert_allclose(
        aipp_of(preprocess, pixels), (channels / 255 - mean) / std, atol=3e-3
    )


def test_aipp_center_crop_is_described():
    preprocess = Preprocess(size=(224, 224), color="rgb", layout="nchw", resize="short-side")
    text, host_notes = write_aipp(preprocess, AippSource(size=(256, 343)))
    fields = parse_text("InsertNewOps", text, "aipp").aipp_op[0]
    assert (fields.load_start_pos_h, fields.load_start_pos_w, fields.crop_size_w) == (16, 60, 224)
    assert any("cannot resize" in sentence for sentence in host_notes)


def test_atc_command_chips_and_shapes():
    options = AtcOptions(soc="Ascend310P3", extra=("--log=error",))
    files = {"aipp": Path("a.cfg"), "compression": Path("c.cfg")}
    command = atc_command(Path("m.onnx"), Path("m"), {"x": (1, 3, 8, 8)}, options, **files)
    assert command[0] == "atc"
    assert "--soc_version=Ascend310P3" in command
    assert "--input_shape=x:1,3,8,8" in command
    assert "--insert_op_conf=a.cfg" in command
    assert "--enable_small_channel=1" in command
    assert command[-1] == "--log=error"
    shapes = {"state": (1, 8), "x": (1, 3, 8, 8)}
    assert "--input_format=ND" in atc_command(Path("m"), Path("m"), shapes, options)
    assert "--input_format=NCHW" in atc_command(Path("m"), Path("m"), shapes, options, **files)
    command = atc_command(Path("m"), Path("m"), {"least": ()}, AtcOptions())
    assert f"--soc_version={CHIP}" in command
    assert not [word for word in command if word.startswith("--input_shape")]
    for chip in ("Ascend310", "Ascend910ProB", "Ascend910_9391", "Ascend910B4-1"):
        assert AtcOptions(soc=chip).soc == chip
    with pytest.raises(ConfigError, match="fixed shapes"):
        atc_command(Path("m"), Path("m"), {"x": (-1, 3)}, AtcOptions())


FORBIDDEN = {
    "fixed shapes": "--dynamic_batch_size=1,2 --dynamic_image_size=8,8 --dynamic_dims=1",
    "int8": "--precision_mode=force_fp32 --precision_mode=must_keep_origin_dtype"
    " --precision_mode_v2=origin --op_select_implmode=high_precision",
    "follows from the build": "--framework=5 --input_format=NHWC",
    "--name=value": "log=error --log=",
}


@pytest.mark.parametrize(
    ("match", "flag"), [(m, flag) for m, flags in FORBIDDEN.items() for flag in flags.split()]
)
def test_flags_that_a_quantized_model_forbids(match, flag):
    with pytest.raises(ConfigError, match=match):
        check_flag(flag)


# -- the whole line
@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.npy"
    np.save(path, DATA)
    return path


def test_build_writes_every_file(small_cnn, data, tmp_path):
    report = build(small_cnn, data, out=tmp_path, targets=[Ascend(soc="Ascend310P3")], duration_s=0)
    names = {path.name for path in tmp_path.iterdir()}
    summary = ["config.json", "record.txt", "deploy_model.onnx"]
    other_files = ["quant.json", "fake_quant_model.onnx", "amct_qdq.onnx", "atc.sh", "README.txt"]
    assert {f"{small_cnn.stem}_{ending}" for ending in summary + other_files} <= names
    subject = CalibrationSubject(loaded=load(small_cnn), sample_count=0, user_model=small_cnn)
    for ending in summary:
        assert "sound" in check_file(tmp_path / f"{small_cnn.stem}_{ending}", subject)
    row = report.engines[1]
    assert row.accuracy is not None
    assert row.accuracy.outputs[0].cosine_mean > 0.99
    notes = report.targets[0].notes
    assert any("atc" in note for note in notes)
    assert any("run on 2 samples" in note for note in notes)


def test_build_without_int8_layer_is_refused(small_cnn, tmp_path):
    options = {"targets": [Ascend()], "duration_s": 0, "effort": 0, "out": tmp_path}
    with pytest.raises(ConfigError, match=r"--keep-float.*float model with atc"):
        build(small_cnn, DATA, **options, float_nodes=["op:*"])


@pytest.mark.slow
@pytest.mark.parametrize("effort", [0, 1])
def test_layer_beyond_the_hardware_stays_float(tmp_path, data, run, effort):
    """Sums of squares, as in a mel spectrogram, are far beyond the scales that AscendQuant has."""
    nodes = [("Conv", "x w", "c", "conv"), ("Mul", "c b", "m"), ("Conv", "m w", "y", "huge")]
    weights = {"w": np.eye(3).reshape(3, 3, 1, 1), "b": np.float32(1e9)}
    ends = {"x": [1, 3, 16, 16]}, {"y": [1, 3, 16, 16]}
    onnx.save(build_net(nodes, *ends, weights), tmp_path / "net.onnx")
    options = {"targets": [Ascend()], "duration_s": 0, "effort": effort, "out": tmp_path / "o"}
    report = build(tmp_path / "net.onnx", DATA, **options)
    reasons = {node.name: node.reason for node in report.targets[0].nodes if not node.quantized}
    assert "1 / scale_d must be in" in reasons["huge"] and "conv" not in reasons
    assert any("huge: 1 / scale_d" in note for note in report.targets[0].notes)
    assert list(next_steps(report))
    auto = ("ascend", "auto", tmp_path / "net.onnx", "--images", data, "-o", tmp_path / "a")
    shown = run.ok(*auto, "--strategy", ("gain", "binary-search")[effort])
    assert shown.startswith("1 layer in int8: ")
    # a configuration of the user is followed, or refused
    text = (tmp_path / "o" / "net_config.json").read_text()
    config = tmp_path / "all.json"
    config.write_text(text.replace("false", "true"))
    with pytest.raises(ExportError, match=r"huge: .*--keep-float"):
        build(tmp_path / "net.onnx", DATA, **options | {"targets": [Ascend(config=config)]})
    with pytest.raises(ExportError, match="float model with atc"):
        build(tmp_path / "net.onnx", DATA, **options, float_nodes=["conv"])


def test_unknown_chip_is_said_before_calibrating(small_cnn, data, tmp_path, run):
    options = ("--target", "ascend", "--soc", "310p", "--effort", 0, "--duration", 0)
    code, out, err = run("build", small_cnn, "--images", data, *options, "--out", tmp_path / "o")
    assert code == 0
    assert err.startswith("calib8: ascend: --soc Ascend310P is no chip")
    assert "--soc Ascend310P is no chip" in " ".join(out.split())


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ('for a in "$@"; do case $a in --output=*) echo om > "${a#--output=}.om";; esac; done', ""),
        ("echo E40000 no such chip; exit 7", "E40000 no such chip"),
        ("exit 0", "got nothing"),
    ],
)
def test_atc_runs_where_it_is(small_cnn, data, tmp_path, monkeypatch, script, error):
    """A stand-in program named atc: what is tested is how it is called and believed."""
    monkeypatch.setenv("PATH", path_with_atc(tmp_path, script))
    out, target = tmp_path / "out", Ascend(soc="Ascend310P3")
    report = build(small_cnn, data, out=out, targets=[target], duration_s=0)
    assert error in report.targets[0].error
    assert report.failed == bool(error)
    assert (out / f"{small_cnn.stem}_deploy_model.onnx").exists()
    assert (out / f"{small_cnn.stem}.om").exists() == (report.engines[1].path is not None)
    with pytest.raises(SdkMissingError, match="NPU"):
        target.open(out / f"{small_cnn.stem}.om")


def path_with_atc(folder, script):
    """A search path that begins with a program named atc."""
    tool = folder / "bin" / "atc"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return f"{tool.parent}{os.pathsep}{os.environ['PATH']}"


def test_atc_script_runs_from_any_folder(small_cnn, data, tmp_path, monkeypatch):
    """A stand-in program named atc, which finds the model where it is called."""
    find = 'for a in "$@"; do case $a in --model=*|--op_file=*) ls "${a#*=}" || exit 3;; esac; done'
    environment = {**os.environ, "PATH": path_with_atc(tmp_path, find)}
    (tmp_path / "ops.txt").write_text("ops")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "an 'out' $(touch x)"
    target = Ascend(atc_flags=("--op_file=ops.txt",))
    build(small_cnn, data, out=out, targets=[target], duration_s=0, tuning=Tuning(effort=0))
    moved_folder = out.rename(tmp_path / "moved")
    for folder in (tmp_path, moved_folder, Path("/")):
        script = os.path.relpath(moved_folder / f"{small_cnn.stem}_atc.sh", folder)
        command = ["sh", script, "Ascend310P3"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_atc_script_takes_the_chip(small_cnn, data, tmp_path, wording):
    tools = path_with_atc(tmp_path, 'for a in "$@"; do echo "$a"; done')
    for soc, argument in ((None, "Ascend310P3"), ("Ascend310B1", None)):
        out = tmp_path / f"{soc}"
        quick = {"duration_s": 0, "tuning": Tuning(effort=0)}
        report = build(small_cnn, data, out=out, targets=[Ascend(soc=soc)], **quick)
        script = out / f"{small_cnn.stem}_atc.sh"
        commands = [["sh", script, argument or "ignored"], ["sh", script]]
        environment = {**os.environ, "PATH": tools}
        done, alone = (subprocess.run(c, env=environment, capture_output=True) for c in commands)
        assert f"--soc_version={argument or soc}\n".encode() in done.stdout
        assert (alone.returncode == 0) == (argument is None)
        steps = [step for step in next_steps(report) if "atc" in step]
        assert all(
            step.endswith(f"_atc.sh{' ' * bool(argument)}{argument or ''}") for step in steps
        )
        readme = (out / f"{small_cnn.stem}_README.txt").read_text()
        assert f"sh {script.name} {argument}" in readme or soc in readme


@pytest.mark.parametrize(("size", "is_odd"), [("1280x720", True), ("720x1280", False)])
def test_frames_higher_than_wide_are_named(size, is_odd, wording):
    alerts = Ascend(aipp=True, source_size=size)._image_format().alerts
    assert bool(alerts) == is_odd
    for alert in alerts:
        wording.check(alert)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"soc": "P3"}, "Ascend310P3"),
        ({"atc_flags": ("--dynamic_dims=1",)}, "fixed shapes"),
    ],
)
def test_wrong_options_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        Ascend(**options)


# -- commands
def test_config_and_check_commands(small_cnn, tmp_path, command, refusal, wording):
    config = tmp_path / "quant.json"
    command("ascend", "config", small_cnn, "-o", config)
    simple = tmp_path / "quant.cfg"
    simple.write_text("batch_num: 1")
    for path in (config, simple):
        assert "sound" in command("ascend", "check", path, "--model", small_cnn)
    record = CASES / "small_default" / "record.txt"
    wording.check(refusal("ascend", "check", record, "--model", small_cnn))
    deploy = CASES / "small_dmq" / "res_deploy_model.onnx"
    assert "8 layers" in command("ascend", "check", deploy)
    assert "another model" in refusal("ascend", "check", deploy, "--model", small_cnn)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"{", b"record {", b"aipp_op { x: 1 }"])
def test_check_of_broken_files(content, tmp_path, run):
    for name in ("a.txt", "a.onnx", "a.json"):
        path = tmp_path / name
        path.write_bytes(content)
        code, _, err = run("ascend", "check", path)
        right = (name, content) == ("a.txt", b"")  # an empty simplified configuration: defaults
        assert (code, err.count("\n")) == ((0, 0) if right else (1, 1))


@settings(max_examples=60)
@given(st.data())
def test_no_broken_deploy_model_breaks_check(data):
    model = onnx.load(CASES / "small_default" / "res_deploy_model.onnx")
    node = data.draw(st.sampled_from([n for n in model.graph.node if "Ascend" in n.op_type]))
    damage = data.draw(st.sampled_from(["inputs", "attributes", "nan", "outputs", "type", "param"]))
    if damage in ("inputs", "outputs"):
        del (node.input if damage == "inputs" else node.output)[data.draw(st.integers(0, 1)) :]
    elif damage == "attributes":
        del node.attribute[:]
    elif damage == "param":
        tensor = data.draw(st.sampled_from(model.graph.initializer))
        tensor.raw_data = data.draw(st.binary(max_size=9))
    else:
        for attribute in node.attribute:
            if damage == "nan":
                attribute.f = float("nan")
            else:
                attribute.type = data.draw(st.integers(1, 8))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "broken.onnx"
        path.write_bytes(model.SerializeToString())
        with suppress(Calib8Error):
            check_file(path)


@pytest.mark.slow
def test_auto_command(small_cnn, data, tmp_path, run, command, refusal, wording):
    arguments = ("ascend", "auto", small_cnn, "--images", data, "-o", tmp_path)
    assert "layers in int8" in command(*arguments, "--max-loss", 0.05)
    assert {RANKING, HISTORY, FINAL} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / f"{small_cnn.stem}_deploy_model.onnx").exists()
    assert f"build of {small_cnn.stem} wrote them" in command("verify", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / FINAL).write_text("mine")
    assert "did not write" in refusal(*arguments[:-1], tmp_path / "mine", "--refresh")
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["mine"]
    ran = "inferences of the model weights fake-quantized"
    out = command(*arguments, "--keep-float", "op:Gemm", "--verbose")
    assert "decoded" in out
    assert ran in out
    cached = ("--keep-float", "op:Gemm", "--require-cache", "--verbose")
    assert "ran no inference" in command(*arguments, *cached)
    assert ran in command(*arguments, "--refresh", "--verbose")
    wording.check(refusal(*arguments, "--refresh", "--require-cache"))
    assert run(*arguments, "--method", "mse")[0] == 2  # Ascend's own searches are AMCT's


@pytest.mark.parametrize(("bright", "code"), [(4, 0), (0, 1)])
def test_second_stage_accepts_zero_rows(bright, code, run, tmp_path):
    """A sample without rows adds no value; where no sample has any, Ascend's row alone fails."""
    nodes = parse_nodes(
        "p = Conv(x, w) r = Relu(p) m = ReduceMax <axes = [1, 2, 3], keepdims = 0> (x)"
        "k = Greater(m, one) c = Compress <axis = 0> (r, k) y = Conv(c, v) z = Conv(r, v)"
    )
    rng = np.random.default_rng(2)
    weights = as_float32({"w": rng.normal(size=(4, 3, 3, 3)), "v": rng.normal(size=(2, 4, 1, 1))})
    ends = {"x": ["n", 3, 8, 8]}, {"y": ["k", 2, 6, 6], "z": ["n", 2, 6, 6]}
    onnx.save(make_model(nodes, *ends, weights | {"one": np.float32(1)}), tmp_path / "m.onnx")
    images = rng.uniform(0, 0.9, (8, 3, 8, 8)).astype(np.float32)
    images[:bright] *= 3
    np.save(tmp_path / "x.npy", images)
    arguments = "--target", "onnxruntime,ascend", "--effort", 0, "--duration", 0
    arguments += "--images", tmp_path / "x.npy", "--out", tmp_path / "o"
    exit_code, output, err = run("build", tmp_path / "m.onnx", *arguments)
    assert exit_code == code, err or output
    assert (tmp_path / "o/m.int8.onnx").exists(), err or output
    assert (tmp_path / "o/m_deploy_model.onnx").exists() == (not code)
    assert code == 0 or "'Conv_y': the activation to be quantized must not be empty" in output
