"""The Ascend target end to end, its executor, Q/DQ, AIPP, atc, automatic calibration, commands."""

import os
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from deploy.errors import BackendError, Calib8Error, ConfigError, ModelError, SdkMissingError
from deploy.feed.preprocess import Preprocess
from deploy.frontends import load
from deploy.pipeline import build
from deploy.pipeline.ascend_auto import FINAL, HISTORY, RANKING
from deploy.runtimes.ort import OrtSession
from deploy.targets import Ascend
from deploy.targets.ascend.aipp import write_aipp
from deploy.targets.ascend.atc import CHIP, AippSource, AtcOptions, atc_command, check_flag
from deploy.targets.ascend.config import default_config
from deploy.targets.ascend.deploy_model import deploy_model
from deploy.targets.ascend.executor import compare_deploy_model, open_deploy, to_integer_model
from deploy.targets.ascend.existing_files import check_file
from deploy.targets.ascend.fake_quant import amct_qdq_model, fake_quant_model
from deploy.targets.ascend.layer_searches import rank_layers, similarity
from deploy.targets.ascend.layers import find_layers, name_nodes
from deploy.targets.ascend.proto import parse_text
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import LayerRecord, read_record
from deploy.tuning.search_options import Tuning
from tests.vendor_models import build_net, calibrate_amct

CASES = Path(__file__).parent / "golden" / "amct" / "cases"
DATA = np.random.default_rng(11).normal(size=(6, 3, 16, 16)).astype(np.float32)


def run(model, feed):
    session = OrtSession.open(model.SerializeToString(), threads=1)
    return session.run(feed)


@pytest.fixture(scope="module")
def small(small_cnn):
    """(model, layers, records) of the residual CNN, calibrated on six samples."""
    model = name_nodes(load(small_cnn).model)
    graph = find_layers(model)
    batches = [{"x": DATA[i : i + 1]} for i in range(6)]
    found = calibrate_amct(model, graph, batches, default_config(graph, batch_num=6))
    return model, graph, found.records


# -- executor ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["small_default", "small_dmq", "small_hfmg_sym", "small_ifmr_asym", "small_mixed"]
)
def test_amcts_deploy_models_compute_what_its_fake_quant_models_do(case):
    arrays = np.load(CASES / case / "io.npz")
    session = open_deploy(onnx.load(CASES / case / "res_deploy_model.onnx"), threads=1)
    (got,) = session.run({"input": arrays["in0"]}).values()
    np.testing.assert_allclose(got, arrays["res_fake_quant_model"], rtol=1e-5, atol=1e-6)


def test_executor_equals_fake_quant(small):
    model, graph, records = small
    layers = quantize_layers(model, graph, records)
    deployed = open_deploy(deploy_model(model, layers), threads=1)
    for sample in DATA[:3]:
        feed = {"x": sample[None]}
        (integers,) = deployed.run(feed).values()
        (floats,) = run(fake_quant_model(model, layers), feed).values()
        np.testing.assert_allclose(integers, floats, rtol=1e-4, atol=1e-4)
    found = compare_deploy_model(model, layers, ({"x": sample[None]} for sample in DATA))
    assert found.samples == 6 and found.same_rounding <= 1e-6
    assert found.amct_cosine > 0.999 and "within" in found.sentence()


def test_rounding_differs_at_halves_only():
    """offset -3, x / scale = 0.5: AMCT's fake-quant model rounds to 0 - 3, the NPU -2.5 to -2."""
    weight = np.eye(2, dtype=np.float32)
    model = build_net([("MatMul", "x w", "y", "mm")], {"x": [1, 2]}, {"y": [1, 2]}, {"w": weight})
    record = LayerRecord(scale_d=np.float32(1), offset_d=-3, scale_w=np.array([2**-7], np.float32))
    layers = quantize_layers(model, find_layers(model), {"mm": record})
    feed = {"x": np.array([[0.5, 0.75]], np.float32)}
    got = {
        npu: run(fake_quant_model(model, layers, npu_rounding=npu), feed)["y"][0].tolist()
        for npu in (False, True)
    }
    unit = 127 / 128  # 1 / 2^-7 saturates at 127
    assert got == {False: [0.0, unit], True: [unit, unit]}
    (integers,) = open_deploy(deploy_model(model, layers), threads=1).run(feed).values()
    assert integers[0].tolist() == got[True]


def test_executor_convolution_is_exact_integer_arithmetic():
    """Against plain int64 sums, with extreme codes that saturate where int16 pairs are added."""
    x = np.full((1, 64, 3, 3), 1.0, np.float32)
    weight = np.full((2, 64, 3, 3), -1.0, np.float32)
    weight[1] = 1.0
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="c", kernel_shape=[3, 3])
    model = build_net([node], {"x": list(x.shape)}, {"y": [1, 2, 1, 1]}, {"w": weight})
    layers = find_layers(model)
    records = calibrate_amct(model, layers, [{"x": x}], default_config(layers)).records
    quantized = quantize_layers(model, layers, records)["c"]
    (got,) = open_deploy(deploy_model(model, {"c": quantized}), threads=1).run({"x": x}).values()
    code = int(np.clip(np.rint(quantized.scale + quantized.record.offset_d), -128, 127))
    code -= quantized.record.offset_d
    sums = quantized.weight.astype(np.int64).reshape(2, -1).sum(axis=1) * code
    wanted = sums.astype(np.float32) * quantized.dequant
    np.testing.assert_array_equal(got.reshape(-1), wanted)


def test_executor_grouped_conv_transpose_and_matmul_bias(rng):
    weights = {
        "w": rng.normal(size=(4, 2, 3, 3)).astype("f4"),
        "b": rng.normal(size=4).astype("f4"),
        "m": rng.normal(size=(5, 7)).astype("f4"),
        "c": rng.normal(size=7).astype("f4"),
    }
    nodes = [
        ("ConvTranspose", "x w b", "t", "up", {"group": 2, "strides": [2, 2]}),
        ("MatMul", "t m", "mm", "mm"),
        ("Add", "mm c", "y", "add"),
    ]
    model = build_net(nodes, {"x": [1, 4, 2, 2]}, {"y": [1, 4, 5, 7]}, weights)
    feed = {"x": rng.normal(size=(1, 4, 2, 2)).astype("f4")}
    layers = find_layers(model)
    records = calibrate_amct(model, layers, [feed], default_config(layers)).records
    assert records["up"].scale_w.size == 4 and records["mm"].scale_w.size == 1
    quantized = quantize_layers(model, layers, records)
    deploy = deploy_model(model, quantized)
    order = [n.op_type for n in deploy.graph.node]
    assert order[-3:] == ["MatMul", "Add", "AscendDequant"]
    (floats,) = run(fake_quant_model(model, quantized), feed).values()
    (integers,) = open_deploy(deploy, threads=1).run(feed).values()
    (reference,) = run(model, feed).values()
    np.testing.assert_allclose(integers, floats, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(floats, reference, atol=0.05 * np.abs(reference).max())


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_executor_on_random_layers(data):
    """Any convolution, matrix product or pool: integers equal floats with the NPU's rounding."""
    draw = data.draw
    op = draw(st.sampled_from(["Conv", "ConvTranspose", "Gemm", "MatMul", "AveragePool"]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    group, rank = 1, 2
    weights, attributes = {}, {}
    if op in ("Gemm", "MatMul"):
        shape, trans = [3, 6], op == "Gemm" and draw(st.booleans())
        weights["w"] = rng.normal(size=(5, 6) if trans else (6, 5))
        if op == "Gemm":
            attributes = {"transB": int(trans)}
        out = 5
    elif op == "AveragePool":
        shape = [1, 4, 8, 8]
        attributes = {
            "kernel_shape": [2, 2],
            "pads": [draw(st.integers(0, 1))] * 4,
            "count_include_pad": draw(st.integers(0, 1)),
        }
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
    model = build_net(
        [(op, ["x", *weights], "y", "n", {**attributes})], {"x": shape}, {"y": None}, weights
    )
    feed = {"x": (rng.normal(size=shape) + rng.normal()).astype("f4")}
    layers = find_layers(model)
    config = default_config(layers, activation_offset=draw(st.booleans()))
    records = calibrate_amct(model, layers, [feed], config).records
    quantized = quantize_layers(model, layers, records)
    assert compare_deploy_model(model, quantized, [feed]).same_rounding <= 1e-6
    (reference,) = run(model, feed).values()
    (fake,) = run(fake_quant_model(model, quantized), feed).values()
    assert np.abs(fake - reference).max() <= 0.06 * max(np.abs(reference).max(), 0.5)


@pytest.mark.parametrize("damage", ["dst_type", "param", "bias"])
def test_executor_refuses_a_broken_deploy_model(small, damage):
    model, graph, records = small
    made = deploy_model(model, quantize_layers(model, graph, records))
    if damage == "dst_type":
        node = next(n for n in made.graph.node if n.op_type == "AscendQuant")
        next(a for a in node.attribute if a.name == "dst_type").s = b"INT32"
    elif damage == "param":
        node = next(n for n in made.graph.node if n.op_type == "AscendDequant")
        node.input[1] = "nowhere"
    else:
        tensor = next(t for t in made.graph.initializer if t.data_type == 6)
        tensor.CopyFrom(numpy_helper.from_array(np.zeros(8, np.float32), tensor.name))
    with pytest.raises(ModelError):
        to_integer_model(made)


def test_qdq_model_is_near_the_fake_quant_model(small):
    model, graph, records = small
    layers = quantize_layers(model, graph, records)
    made = amct_qdq_model(model, layers)
    onnx.checker.check_model(made)
    feed = {"x": DATA[:1]}
    (qdq,) = run(made, feed).values()
    (fake,) = run(fake_quant_model(model, layers), feed).values()
    assert np.abs(qdq - fake).max() <= 0.05 * np.abs(fake).max()
    constants = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    gemm = next(name for name, q in layers.items() if q.layer.kind == "Gemm")
    assert constants[f"{gemm}.scale_w"].shape == ()
    bias, steps = constants[f"{gemm}.bias.rounded"], layers[gemm].dequant
    np.testing.assert_allclose(bias / steps, np.rint(bias / steps), atol=1e-3)


# -- AIPP and atc -----------------------------------------------------------------------------


def aipp_of(how, pixels, **options):
    """AIPP's arithmetic on an RGB picture [H, W, 3], from the text it was written as."""
    text = write_aipp(how, AippSource(**options)).text
    fields = parse_text("InsertNewOps", text, "aipp").aipp_op[0]
    image = pixels[..., ::-1] if fields.rbuv_swap_switch else pixels
    out = np.empty(image.shape, np.float32)
    for c in range(3):
        mean, least = getattr(fields, f"mean_chn_{c}"), getattr(fields, f"min_chn_{c}")
        out[..., c] = (image[..., c] - mean - least) * getattr(fields, f"var_reci_chn_{c}")[0]
    return out.transpose(2, 0, 1)


@pytest.mark.parametrize("color", ["rgb", "bgr"])
def test_aipp_computes_the_preprocessing(rng, color):
    how = Preprocess(
        size=(8, 8),
        color=color,
        layout="nchw",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    pixels = rng.integers(0, 256, (8, 8, 3)).astype(np.float32)
    channels = (pixels if color == "rgb" else pixels[..., ::-1]).transpose(2, 0, 1)
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (how.mean, how.std))
    np.testing.assert_allclose(aipp_of(how, pixels), (channels / 255 - mean) / std, atol=3e-3)


def test_aipp_crops_the_centre_and_tells_the_host():
    how = Preprocess(size=(224, 224), color="rgb", layout="nchw", resize="short-side")
    made = write_aipp(how, AippSource(size=(256, 320)))
    fields = parse_text("InsertNewOps", made.text, "aipp").aipp_op[0]
    assert (fields.load_start_pos_h, fields.load_start_pos_w, fields.crop_size_w) == (16, 48, 224)
    assert any("cannot resize" in sentence for sentence in made.host)


def test_atc_command_chips_and_shapes():
    command = atc_command(
        Path("m_deploy_model.onnx"),
        Path("m"),
        {"x": (1, 3, 8, 8)},
        AtcOptions(soc="Ascend310P3", extra=("--log=error",)),
        aipp=Path("a.cfg"),
        compression=Path("c.cfg"),
    )
    assert command[0] == "atc" and "--soc_version=Ascend310P3" in command
    assert "--input_shape=x:1,3,8,8" in command and "--insert_op_conf=a.cfg" in command
    assert "--enable_small_channel=1" in command and command[-1] == "--log=error"
    command = atc_command(Path("m"), Path("m"), {"least": ()}, AtcOptions())
    assert f"--soc_version={CHIP}" in command
    assert not [word for word in command if word.startswith("--input_shape")]
    for wrong in ("310P3; rm -rf", "AscendXYZ"):
        with pytest.raises(ConfigError, match="Ascend310P3"):
            AtcOptions(soc=wrong)
    for known in ("Ascend310", "Ascend910ProB", "Ascend910_9391", "Ascend910B4-1"):
        assert AtcOptions(soc=known).soc == known
    with pytest.raises(ConfigError, match="--log twice"):
        AtcOptions(extra=("--log=error", "--log=info"))
    with pytest.raises(ConfigError, match="fixed shapes"):
        atc_command(Path("m"), Path("m"), {"x": (-1, 3)}, AtcOptions())


@pytest.mark.parametrize(
    ("flag", "match"),
    [
        ("--dynamic_batch_size=1,2", "fixed shapes"),
        ("--dynamic_image_size=8,8", "fixed shapes"),
        ("--precision_mode=force_fp32", "int8"),
        ("--precision_mode=must_keep_origin_dtype", "int8"),
        ("--precision_mode_v2=origin", "int8"),
        ("--op_select_implmode=high_precision", "int8"),
        ("--framework=5", "follows from the build"),
        ("--input_format=NHWC", "follows from the build"),
        ("log=error", "--name=value"),
        ("--log=", "--name=value"),
    ],
)
def test_flags_that_a_quantized_model_forbids(flag, match):
    with pytest.raises(ConfigError, match=match):
        check_flag(flag)


# -- automatic calibration --------------------------------------------------------------------


def test_similarity_ranks_isolated_layers(small):
    a = np.float32([1, 2, 3])
    assert similarity(a, a) == pytest.approx(1) and similarity(a, -a) == pytest.approx(0)
    assert similarity(0 * a, a) == 1 and similarity(a, 0 * a) == 0
    model, graph, records = small
    layers = quantize_layers(model, graph, records)
    ranking = rank_layers(model, layers, [{"x": DATA[:1]}], threads=1)
    assert [name for name, _ in ranking] != [] and len(ranking) == len(layers)
    assert [score for _, score in ranking] == sorted(score for _, score in ranking)
    assert 0.99 < ranking[0][1] <= ranking[-1][1] <= 1


# -- the whole line ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.npy"
    np.save(path, DATA)
    return path


def test_build_writes_every_file(small_cnn, data, tmp_path):
    report = build(small_cnn, data, out=tmp_path, targets=[Ascend(soc="Ascend310P3")], duration_s=0)
    names = {path.name for path in tmp_path.iterdir()}
    stem = small_cnn.stem
    for ending in (
        "config.json", "quant.json", "record.txt", "deploy_model.onnx", "fake_quant_model.onnx",
        "amct_qdq.onnx", "atc.sh", "README.txt",
    ):  # fmt: skip
        assert f"{stem}_{ending}" in names
    model = name_nodes(load(small_cnn).model)
    graph = find_layers(model)
    for ending in ("config.json", "record.txt", "deploy_model.onnx"):
        assert "sound" in check_file(tmp_path / f"{stem}_{ending}", graph)
    row = report.engines[1]
    assert row.accuracy is not None and row.accuracy.outputs[0].cosine_mean > 0.99
    notes = report.targets[0].notes
    assert any("atc" in note for note in notes)
    assert any("run in integers on 2 samples" in note for note in notes)


def test_builds_are_the_same_bytes(small_cnn, data, tmp_path):
    for folder in ("a", "b"):
        build(small_cnn, data, out=tmp_path / folder, targets=["ascend"], duration_s=0)
    for path in (tmp_path / "a").glob("*_*.onnx"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


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
    tool = tmp_path / "bin" / "atc"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    out = tmp_path / "out"
    targets = [Ascend(soc="Ascend310P3")]
    if error:
        with pytest.raises(BackendError, match=error):
            build(small_cnn, data, out=out, targets=targets, duration_s=0)
        return
    report = build(small_cnn, data, out=out, targets=targets, duration_s=0)
    assert report.engines[1].path == str(out / f"{small_cnn.stem}.om")
    with pytest.raises(SdkMissingError, match="NPU"):
        targets[0].open(out / f"{small_cnn.stem}.om")


def test_the_atc_script_runs_from_any_folder(small_cnn, data, tmp_path, monkeypatch):
    """A stand-in program named atc, which finds the model where it is called."""
    tool = tmp_path / "bin" / "atc"
    tool.parent.mkdir()
    find = 'for a in "$@"; do case $a in --model=*|--op_file=*) ls "${a#*=}" || exit 3;; esac; done'
    tool.write_text(f"#!/bin/sh\n{find}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "ops.txt").write_text("ops")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "an 'out' $(touch x)"
    target = Ascend(atc_flags=("--op_file=ops.txt",))
    build(small_cnn, data, out=out, targets=[target], duration_s=0, tuning=Tuning(effort=0))
    moved = out.rename(tmp_path / "moved")
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    for folder in (tmp_path, moved, Path("/")):
        script = os.path.relpath(moved / f"{small_cnn.stem}_atc.sh", folder)
        done = subprocess.run(["sh", script], cwd=folder, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_a_config_disables_layers_and_limits_batches(small_cnn, data, tmp_path):
    graph = find_layers(name_nodes(load(small_cnn).model))
    skipped = next(iter(graph.layers))
    config = tmp_path / "my.cfg"
    config.write_text(f'batch_num: 2 skip_layers: "{skipped}"')
    out = tmp_path / "out"
    report = build(small_cnn, data, out=out, targets=[Ascend(config=config)], duration_s=0)
    records = read_record((out / f"{small_cnn.stem}_record.txt").read_text())
    assert skipped not in records and len(records) == len(graph.layers) - 1
    assert any("2 of 6 samples" in note for note in report.targets[0].notes)


def test_refused_configs_and_options_write_nothing(small_cnn, data, tmp_path):
    config = tmp_path / "my.json"
    config.write_text('{"version": 1, "batch_nun": 3}')
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="did you mean 'batch_num'"):
        build(small_cnn, data, out=out, targets=[Ascend(config=config)], duration_s=0)
    assert not list(out.glob("*_record.txt")) and not list(out.glob("*.onnx"))
    with pytest.raises(ConfigError, match="Ascend310P3"):
        Ascend(soc="P3")
    with pytest.raises(ConfigError, match="fixed shapes"):
        Ascend(atc_flags=("--dynamic_dims=1",))


# -- commands ---------------------------------------------------------------------------------


def test_config_and_check_commands(small_cnn, tmp_path, command, refusal):
    for name in ("quant.json", "quant.cfg"):
        path = tmp_path / name
        command("ascend", "config", small_cnn, "-o", path)
        assert "sound" in command("ascend", "check", path, "--model", small_cnn)
    record = CASES / "small_default" / "record.txt"
    assert "not in the model" in refusal("ascend", "check", record, "--model", small_cnn)
    deploy = CASES / "small_dmq" / "res_deploy_model.onnx"
    assert "8 layers" in command("ascend", "check", deploy)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"{", b"record {", b"aipp_op { x: 1 }"])
def test_check_of_broken_files(content, tmp_path, run):
    for name in ("a.txt", "a.onnx", "a.json"):
        path = tmp_path / name
        path.write_bytes(content)
        code, _, err = run("ascend", "check", path)
        if (name, content) == ("a.txt", b""):
            assert code == 0  # an empty simplified configuration is all defaults
        else:
            assert code == 1 and err.count("\n") == 1


@settings(max_examples=60)
@given(st.data())
def test_no_broken_deploy_model_breaks_check(data):
    made = onnx.load(CASES / "small_default" / "res_deploy_model.onnx")
    node = data.draw(st.sampled_from([n for n in made.graph.node if "Ascend" in n.op_type]))
    damage = data.draw(st.sampled_from(["inputs", "attributes", "nan", "outputs", "type", "param"]))
    if damage in ("inputs", "outputs"):
        del (node.input if damage == "inputs" else node.output)[data.draw(st.integers(0, 1)) :]
    elif damage == "attributes":
        del node.attribute[:]
    elif damage == "param":
        tensor = data.draw(st.sampled_from(made.graph.initializer))
        tensor.raw_data = data.draw(st.binary(max_size=9))
    else:
        for attribute in node.attribute:
            if damage == "nan":
                attribute.f = float("nan")
            else:
                attribute.type = data.draw(st.integers(1, 8))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "broken.onnx"
        path.write_bytes(made.SerializeToString())
        with suppress(Calib8Error):
            check_file(path)


def test_auto_command(small_cnn, data, tmp_path, run, command, refusal):
    words = ("ascend", "auto", small_cnn, "--images", data, "-o", tmp_path)
    assert "layers in int8" in command(*words, "--max-loss", 0.05, "--strategy", "binary-search")
    assert {RANKING, HISTORY, FINAL} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / f"{small_cnn.stem}_deploy_model.onnx").exists()
    ran = "inferences of the model weights fake-quantized"
    out = command(*words, "--keep-float", "op:Gemm", "--verbose")
    assert "decoded" in out and ran in out
    cached = ("--keep-float", "op:Gemm", "--require-cache", "--verbose")
    assert "ran no inference" in command(*words, *cached)
    assert ran in command(*words, "--refresh", "--verbose")
    assert "leave one of them away" in refusal(*words, "--refresh", "--require-cache")
    assert run(*words, "--method", "mse")[0] == 2  # Ascend's own searches are AMCT's
