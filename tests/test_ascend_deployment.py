"""`calib8 ascend deploy` and `calib8 ascend convert`: files from scales that were found before."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from deploy.calibration import trt_cache
from deploy.feed.bench_inputs import random_feeds
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.executor import open_deploy
from deploy.targets.ascend.recipe import recipe_from_qdq
from deploy.targets.ascend.record import read_record, write_record
from tests.models import make_value, read_markdown, save_net
from tests.test_ascend_backend import path_with_atc
from tests.test_ascend_models import CASES, NAMES, float_model, ulps
from tests.vendor_models import build_net

FASHION = Path(__file__).parent.parent / "datasets" / "fashion"
DATA = np.random.default_rng(5).normal(size=(6, 3, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.npy"
    np.save(path, DATA)
    return path


@pytest.fixture(scope="module")
def built(small_cnn, data, tmp_path_factory):
    """A build of every target without a search."""
    from calib8 import build
    from deploy.tuning.search_options import Tuning

    out = tmp_path_factory.mktemp("built")
    targets = ["onnxruntime", "tensorrt", "ascend"]
    build(small_cnn, data, out=out, targets=targets, duration_s=0, tuning=Tuning(effort=0))
    return out


@pytest.fixture
def ended(refusal):
    """(arguments) -> the one sentence of a command that must end in an error."""
    return partial(refusal, "ascend")


@pytest.fixture
def done(command):
    """(arguments) -> what a command prints that must work, its lines joined."""
    return partial(command, "ascend")


def model(nodes, weights, inputs, opset=13):
    """A model of these nodes; its output is that of the last one."""
    return build_net(nodes, inputs, {nodes[-1][2]: None}, weights, opset=opset, ir=10)


POINTWISE = ("Conv", "x w", "c", "c", {"kernel_shape": [1, 1]})
ONES = {"w": np.ones((2, 3, 1, 1))}


def constants(model):
    array_by_name = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            array_by_name[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return array_by_name


def nodes_by_name(model):
    return {node.name: node for node in model.graph.node}


def accuracy_of(folder):
    return json.loads((folder / "report.json").read_text())["engines"][1]["accuracy"]


# -- deploy: AMCT's own records
@pytest.mark.parametrize("case", NAMES)
def test_amcts_records_give_amcts_models(case, done, tmp_path):
    """The same nodes, attributes and values; only constants of the float model are folded.

    AMCT leaves BatchNormalization behind a ConvTranspose, and small_mixed one behind a Conv, which
    nothing but the scales of the record says.
    """
    path = save_net(float_model(case), tmp_path / "m.onnx")
    out = tmp_path / "out"
    output = done("deploy", path, CASES / case / "record.txt", "-o", out)
    assert "up" in re.search(r"stays apart: ([^.]*)\.", output)[1].split(", ")
    for kind in ("deploy", "fake_quant"):
        mine = onnx.load(out / f"m_{kind}_model.onnx")
        amct = onnx.load(CASES / case / f"res_{kind}_model.onnx")
        ours, theirs = nodes_by_name(mine), nodes_by_name(amct)
        assert ran(amct) == ran(mine)
        assert set(ours) < set(theirs)
        values = constants(mine), constants(amct)
        compared = 0
        for name, node in ours.items():
            assert describe_node(node) == describe_node(theirs[name])
            for a, b in zip(node.input, theirs[name].input, strict=True):
                assert (a in values[0]) == (b in values[1])
                if a in values[0]:
                    same_array(values[0][a], values[1][b])
                    compared += 1
        assert compared > 15


@pytest.mark.slow
def test_modified_model_has_the_records_weights(small_cnn, data, done, command, tmp_path):
    """A search rounds weights; on the model's own weights the record gives other integers."""
    arguments = ("--target", "ascend", "--duration", 0, "--effort", 1)
    folder = tmp_path / "o"
    command("build", small_cnn, "--images", data, "--out", folder, *arguments)
    modified, record = folder / "small_cnn_modified_model.onnx", folder / "small_cnn_record.txt"
    assert modified.name in (folder / "small_cnn_README.txt").read_text()
    expected = (folder / "small_cnn_deploy_model.onnx").read_bytes()
    for path in (small_cnn, modified):
        output = done("deploy", path, record, "--images", data, "-o", tmp_path / path.stem)
        (deployed,) = (tmp_path / path.stem).glob("*_deploy_model.onnx")
        assert (deployed.read_bytes() == expected) == (path == modified)
        assert ("_modified_model.onnx that was written" in output) == (path == small_cnn)


def test_deploy_model_is_the_file_to_ship(small_cnn, built, data, done, tmp_path):
    arguments = ("--images", data, "-o", tmp_path)
    output = done("deploy", small_cnn, built / "small_cnn_record.txt", *arguments)
    assert f"Ship {tmp_path / 'small_cnn_deploy_model.onnx'}" in output


FORMS = [(case, "config.json") for case in NAMES]


@pytest.mark.parametrize(("case", "form"), [*FORMS, ("small_mixed", "simple.cfg")])
def test_configuration_alone_determines_the_build(case, form, command, tmp_path):
    """The search switched layers off that the configuration enables, and rounded weights again."""
    path = save_net(float_model(case), tmp_path / "m.onnx")
    arrays = np.load(CASES / case / "io.npz")
    inputs = [arrays[name] for name in sorted(arrays.files) if re.fullmatch(r"in\d+", name)]
    np.save(tmp_path / "x.npy", np.concatenate(inputs))
    arguments = ("build", path, "--images", tmp_path / "x.npy", "--target", "ascend", "--accept")
    arguments += ("--amct-batch", len(inputs[0]), "--ascend-config", CASES / case / form)
    command(*arguments, "--duration", 0, "--out", tmp_path / "out")
    if form == "config.json":
        expected = json.loads((CASES / case / "config.json").read_text())
        assert json.loads((tmp_path / "out/m_config.json").read_text()) == expected
    records, expected = (
        read_record(file.read_text())
        for file in (tmp_path / "out/m_record.txt", CASES / case / "record.txt")
    )
    assert list(records) == list(expected)
    for name, record in expected.items():
        assert records[name].offset_d == record.offset_d
        assert ulps(records[name].scale_d, record.scale_d) <= 8
        assert ulps(records[name].scale_w, record.scale_w) <= 8
    if case == "small_mixed" and form == "config.json":
        command(*arguments, "--effort", 1, "--duration", 0, "--out", tmp_path / "searched")
        (target,) = json.loads((tmp_path / "searched/report.json").read_text())["targets"]
        notes = target["notes"]
        assert any("so the configuration of ascend is a start only" in note for note in notes)


def ran(model):
    return [node.name for node in model.graph.node if node.op_type != "Constant"]


def describe_node(node):
    """Operator and attributes; of an attribute that is a tensor, its bytes, whatever its form."""
    bytes_by_attribute = {}
    for attribute in node.attribute:
        if attribute.t.ByteSize():
            attribute_bytes = numpy_helper.to_array(attribute.t).tobytes()
        else:
            attribute_bytes = attribute.SerializeToString()
        bytes_by_attribute[attribute.name] = attribute_bytes
    return node.op_type, bytes_by_attribute


def same_array(a, b):
    assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_configuration_selects_the_record_form(done, ended, tmp_path):
    path = save_net(float_model("small_mixed"), tmp_path / "m.onnx")
    case, out = CASES / "small_mixed", tmp_path / "out"
    arguments = ("deploy", path, case / "record.txt", "-o", out)
    done(*arguments, "--ascend-config", case / "config.json")
    expected = json.loads((case / "config.json").read_text())
    assert json.loads((out / "m_config.json").read_text()) == expected
    off = tmp_path / "off.cfg"
    off.write_text('skip_layers: "conv1"')
    assert "'conv1' disabled" in ended(*arguments, "--ascend-config", off)


# -- deploy: calib8's own, and edited
def test_build_record_reproduces_its_files(small_cnn, built, done, tmp_path):
    stem = small_cnn.stem
    output = done(
        "deploy", small_cnn, built / f"{stem}_record.txt", "-o", tmp_path, "--threads", "1"
    )
    assert "nothing was calibrated" in output
    assert "random samples" in output
    for ending in ("deploy_model.onnx", "fake_quant_model.onnx", "record.txt", "amct_qdq.onnx"):
        name = f"{stem}_{ending}"
        assert (tmp_path / name).read_bytes() == (built / name).read_bytes(), name
    manifest = json.loads((tmp_path / "calib8/manifest.json").read_text())
    assert manifest["made_from"]["scales"]["name"] == f"{stem}_record.txt"
    assert {f"{stem}_deploy_model.onnx", "report.html"} <= set(manifest["files"])


@pytest.mark.parametrize(
    ("operator", "text", "is_folded"),
    [
        ("Conv", "", True),
        ("Conv", "do_fusion: false", False),
        ("Conv", 'skip_fusion_layers: "layer"', False),
        ("Gemm", "", False),  # AMCT folds into a Conv only
    ],
)
def test_fusion_follows_configuration_and_record(
    operator, text, is_folded, ascend_build, done, rng, tmp_path
):
    """A BatchNormalization is left where either says so; the record gives the files again."""
    sides = (1, 1) if operator == "Conv" else ()
    options = {} if operator == "Conv" else {"transB": 1}
    weights = {"w": rng.normal(size=(4, 3, *sides)), "s": rng.uniform(2, 3, 4)}
    weights |= {"b": rng.normal(size=4), "m": rng.normal(size=4), "v": rng.uniform(4, 9, 4)}
    norm = ("BatchNormalization", "c s b m v", "y", "bn")
    nodes = [(operator, "x w", "c", "layer", options), norm]
    path = save_net(model(nodes, weights, {"x": [1, 3, *sides]}), tmp_path / "bn.onnx")
    np.save(tmp_path / "x.npy", rng.normal(size=(2, 3, *sides)).astype(np.float32))
    _, out = ascend_build(path, tmp_path / "x.npy", text)
    record = out / "bn_record.txt"
    done("deploy", path, record, "-o", tmp_path / "d")
    for ending in ("deploy_model.onnx", "fake_quant_model.onnx"):
        model_path = tmp_path / "d" / f"bn_{ending}"
        assert model_path.read_bytes() == (out / f"bn_{ending}").read_bytes()
        norms = [n for n in onnx.load(model_path).graph.node if n.op_type == "BatchNormalization"]
        assert len(norms) == (not is_folded)
        assert all(n.domain == "" for n in norms)
    if text:  # the record may say so by itself, as AMCT's does
        record_text = record.read_text().replace("  value {", "  value {\n    skip_fusion: true")
        (tmp_path / "said.txt").write_text(record_text)
        done("deploy", path, tmp_path / "said.txt", "-o", tmp_path / "s")
        assert (tmp_path / "s" / model_path.name).read_bytes() == model_path.read_bytes()
        assert "skip_fusion: true" in (tmp_path / "s" / "bn_record.txt").read_text()


def test_edited_record_changes_only_its_layer(small_cnn, built, done, data, tmp_path):
    stem = small_cnn.stem
    text = (built / f"{stem}_record.txt").read_text()
    first_layer, second, *_ = records = list(read_record(text))
    entries = re.split(r"(?=^record )", text, flags=re.MULTILINE)[1:]
    entries[0] = re.sub(r"scale_d: \S+", "scale_d: 0.5", entries[0])
    record = tmp_path / "edited.txt"
    record.write_text("# by hand\n" + entries[0] + "".join(entries[2:]))
    done("deploy", small_cnn, record, "-o", tmp_path / "o", "--images", data)
    report = read_markdown(tmp_path / "o")
    assert f"| {second} | the record has no scales for it" in report
    assert "Cosine" in report
    deploy_models = [onnx.load(f / f"{stem}_deploy_model.onnx") for f in (built, tmp_path / "o")]
    original_nodes, edited_nodes = map(nodes_by_name, deploy_models)
    assert set(original_nodes) - set(edited_nodes) == {f"{second}.quant", f"{second}.dequant"}
    assert (
        next(a.f for a in edited_nodes[f"{first_layer}.quant"].attribute if a.name == "scale")
        == 2.0
    )
    values = [constants(model) for model in deploy_models]
    for name in records[2:]:
        assert original_nodes[f"{name}.quant"].attribute == edited_nodes[f"{name}.quant"].attribute
        for tensor in edited_nodes[name].input:
            if tensor in values[1]:
                same_array(values[0][tensor], values[1][tensor])


def record_of(key, extra_fields="", *, offset=0, scale="1"):
    fields = f"scale_d: {scale} offset_d: {offset} scale_w: 1 offset_w: 0 {extra_fields}"
    return f'record {{ key: "{key}" value {{ {fields} }} }}'


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "at least one layer"),
        ("\x00\xff", "must"),
        ('record { key: "Conv_c1" value { scale_w: 1 offset_w: 0 } }', "scale_d"),
        (record_of("Conv_c1", scale="1e6"), "1 / scale_d"),
        (record_of("Conv_c1", "scale_w: 1 offset_w: 0"), "8 scale_w"),
        (record_of("Conv_c1", "tensor_balance_factor: 1 " * 2), "3 DMQ factors"),
        (record_of("Conv_c1", 'fakequant_precision_mode: "FORCE_FP32"'), "FP16_QUANT or DEFAULT"),
        ('record { key: "k" kv_cache_value { scale: 1 offset: 0 } }', "got only 1 x KV cache"),
        ('prune_record { producer { name: "Conv_c1" } }', "got only 1 x pruning"),
    ],
)
def test_broken_record_is_refused(text, match, small_cnn, ended, tmp_path):
    record = tmp_path / "r.txt"
    record.write_bytes(text.encode("latin-1"))
    assert match in ended("deploy", small_cnn, record, "-o", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_undeployed_record_entries_are_reported(small_cnn, built, done, tmp_path):
    record = tmp_path / "r.txt"
    pruning = 'prune_record { producer { name: "Conv_c1" } }'
    record.write_text((built / f"{small_cnn.stem}_record.txt").read_text() + pruning)
    assert "not deployed: 1 x pruning" in done("deploy", small_cnn, record, "-o", tmp_path / "o")


# -- deploy: a TensorRT cache
def test_a_tensorrt_cache_gives_symmetric_scales(small_cnn, built, done, data, tmp_path):
    """Layers whose inputs it knows; the first, whose line is taken out, stays float."""
    lines = (built / f"{small_cnn.stem}.tensorrt.cache").read_text().splitlines(keepends=True)
    cache = tmp_path / "c.cache"
    cache.write_text("".join(line for line in lines if not line.startswith("x: ")))
    arguments = ("-o", tmp_path / "o", "--images", data)
    done("deploy", small_cnn, "--cache", cache, *arguments)
    report = read_markdown(tmp_path / "o")
    assert "3 of 4 layers, symmetric" in report
    assert "| Conv | Conv_c1 | its input" in report
    records = read_record((tmp_path / "o" / f"{small_cnn.stem}_record.txt").read_text())
    bits = dict(line.strip().rsplit(": ", 1) for line in lines[1:])
    inputs = {n.name: n.input[0] for n in onnx.load(small_cnn).graph.node}
    assert "Conv_c1" not in records
    assert len(records) == 3
    for name in ("Conv_c2", "Conv_c3"):
        expected = np.uint32(int(bits[inputs[name]], 16)).view(np.float32)
        assert records[name].scale_d == expected
        assert records[name].offset_d == 0
    assert records["Conv_c2"].scale_w.size == 8
    assert records["Gemm_logits"].scale_w.size == 1


def test_a_tensorrt_cache_serves_every_layer_type(done, tmp_path):
    """A pool has a scale, but no weight."""
    pool = ("AveragePool", "c", "p", "p", {"kernel_shape": [2, 2]})
    path = save_net(model([POINTWISE, pool], ONES, {"x": (1, 3, 8, 8)}), tmp_path / "net.onnx")
    scales = {name: np.float32(0.5) for name in ("x", "c", "p")}
    cache = tmp_path / "c.cache"
    cache.write_bytes(trt_cache.dump(trt_cache.from_scales(scales, version="8.6.1")))
    done("deploy", path, "--cache", cache, "-o", tmp_path / "o")
    records = read_record((tmp_path / "o" / "net_record.txt").read_text())
    assert {name: record.has_weight for name, record in records.items()} == {"c": True, "p": False}
    assert {record.scale_d for record in records.values()} == {0.5}


def test_scales_come_from_one_matching_file(small_cnn, built, ended, tmp_path):
    record = built / f"{small_cnn.stem}_record.txt"
    cache = built / "calib8" / f"{small_cnn.stem}.cache"
    out = ("-o", tmp_path / "o")
    assert "got neither" in ended("deploy", small_cnn, *out)
    assert "leave one" in ended("deploy", small_cnn, record, "--cache", cache, *out)
    config = ("--ascend-config", record)
    assert "leave the conf" in ended("deploy", small_cnn, "--cache", cache, *config, *out)
    cache = tmp_path / "c.cache"
    foreign_cache = trt_cache.from_scales({"other": np.float32(1)}, version="8.6.1")
    cache.write_bytes(trt_cache.dump(foreign_cache))
    error = ended("deploy", small_cnn, "--cache", cache, *out)
    assert "none of 4" in error
    assert "calib8 cache check" in error
    cache.write_text("no cache")
    assert "TRT-8503" in ended("deploy", small_cnn, "--cache", cache, *out)


# -- what both commands share
def test_ascend_options_apply_to_pictures(small_cnn, built, pictures, done, ended, tmp_path):
    record = built / f"{small_cnn.stem}_record.txt"
    arguments = ("deploy", small_cnn, record, "-o", tmp_path / "o")
    assert "give --images" in ended(*arguments, "--aipp")
    feed = ("--images", pictures, "--size", "16x16", "--limit", 3)
    flags = ("--soc", "Ascend310P3", "--first-layer-int8", "--source-color", "nv12")
    flags += ("--csc", "bt709-narrow", "--source-size", "32x32", "--cann", "7.0")
    flags += ("--resize", "short-side", "--short-side", 32)
    done(*arguments, *feed, *flags, "--aipp", "--atc-flag=--log=error")
    script = (tmp_path / "o" / f"{small_cnn.stem}_atc.sh").read_text()
    for part in ("--soc_version=Ascend310P3", "--log=error", "--insert_op_conf", "_compression"):
        assert part in script
    aipp = (tmp_path / "o" / f"{small_cnn.stem}_aipp.cfg").read_text()
    assert "YUV420SP_U8" in aipp
    assert "crop: true" in aipp
    assert "matrix_r0c0" in aipp
    assert "CANN 7.0" in (tmp_path / "o" / f"{small_cnn.stem}_README.txt").read_text()


def test_open_shapes_are_given_by_name(ended, done, tmp_path):
    path = save_net(model([POINTWISE], ONES, {"x": [1, 3, "h", "w"]}), tmp_path / "open.onnx")
    record = tmp_path / "r.txt"
    record.write_text(record_of("c", offset=3, scale="0.1"))
    arguments = ("deploy", path, record, "-o", tmp_path / "o")
    assert "--shape" in ended(*arguments)
    done(*arguments, "--shape", "x:1x3x5x7")
    assert "--input_shape=x:1,3,5,7" in (tmp_path / "o" / "open_atc.sh").read_text()
    np.save(tmp_path / "x.npy", np.ones((1, 3, 5, 7), np.float32))
    feed = ("--images", tmp_path / "x.npy")
    assert "leave one of them out" in ended(*arguments, "--shape", "x:1x3x5x7", *feed)


@pytest.mark.parametrize(
    ("flags", "smallest", "is_reported"),
    [
        ((), 1e-9, True),
        ((), 1e-3, False),
        (("--atc-flag=--keep_dtype=wide.cfg",), 1e-9, False),
    ],
)
def test_float16_underflow_in_om_is_reported(flags, smallest, is_reported, command, tmp_path):
    nodes = [POINTWISE, ("Relu", "c", "r", "r"), ("Add", "r least", "g", "guard")]
    nodes.append(("Log", "g", "y", "log"))
    net = model(nodes, ONES | {"least": smallest}, {"x": [1, 3, 5, 7]})
    path = save_net(net, tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", DATA[:4, :, :5, :7])
    arguments = ("--images", tmp_path / "x.npy", "--effort", 0, "--duration", 0, "--accept")
    command("build", path, *arguments, "--target", "ascend", *flags, "--out", tmp_path / "o")
    (target,) = json.loads((tmp_path / "o" / "report.json").read_text())["targets"]
    alerts = " ".join(target.get("alerts", ()))
    text = "in float16 what is not int8, which is too narrow for guard, log: least, 1e-09, which"
    assert (text in alerts) == is_reported
    assert ("give --atc-flag=--keep_dtype=FILE" in alerts) == is_reported


def test_atc_gets_no_scalar_shape(done, tmp_path):
    net = model([POINTWISE, ("Max", "c least", "y", "m")], ONES, {"least": [], "x": [1, 3, 5, 7]})
    record = tmp_path / "r.txt"
    record.write_text(record_of("c", offset=3, scale="0.1"))
    done("deploy", save_net(net, tmp_path / "net.onnx"), record, "-o", tmp_path / "o")
    arguments = (tmp_path / "o" / "net_atc.sh").read_text().split()
    assert "--input_shape=x:1,3,5,7" in arguments


def test_foreign_files_and_inputs_are_protected(small_cnn, built, ended, done, tmp_path):
    record = tmp_path / f"{small_cnn.stem}_record.txt"
    shutil.copyfile(built / record.name, record)
    mine = tmp_path / f"{small_cnn.stem}_deploy_model.onnx"
    mine.write_text("mine")
    assert "did not write" in ended("deploy", small_cnn, record, "-o", tmp_path)
    error = ended("deploy", small_cnn, record, "-o", tmp_path, "--force")
    assert "an output must not be an input" in error
    assert mine.read_text() == "mine"
    renamed_record = tmp_path / "other.txt"
    record.rename(renamed_record)
    done("deploy", small_cnn, renamed_record, "-o", tmp_path, "--force")
    assert mine.read_bytes() == (built / mine.name).read_bytes()


def test_json_output_is_complete_and_alone(small_cnn, built, run, tmp_path):
    record = built / f"{small_cnn.stem}_record.txt"
    arguments = ("deploy", small_cnn, record, "-o", tmp_path / "d")
    code, out, _ = run("ascend", *arguments, "--json", "-")
    assert code == 0
    assert json.loads(out)["targets"][0]["method"] == "a record"
    arguments = ("convert", built / f"{small_cnn.stem}.int8.onnx", "-o", tmp_path / "c")
    assert run("ascend", *arguments, "--quiet", "--json", tmp_path / "c.json")[:2] == (0, "")
    assert json.loads((tmp_path / "c.json").read_text())["targets"][0]["name"] == "ascend"
    assert (tmp_path / "c" / f"{small_cnn.stem}.int8_deploy_model.onnx").is_file()


@pytest.mark.parametrize("images", [(), ("--images",)])
@pytest.mark.parametrize("source", ["record", "Q/DQ model"])
def test_failed_atc_fails_the_command(
    source, images, small_cnn, built, data, run, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", path_with_atc(tmp_path, "echo E40000 no such chip; exit 7"))
    out = tmp_path / "o"
    arguments = ["-o", out, "--soc", "Ascend310P3", *images, *[data] * len(images)]
    if source == "record":
        arguments = ["deploy", small_cnn, built / f"{small_cnn.stem}_record.txt", *arguments]
    else:
        arguments = ["convert", built / f"{small_cnn.stem}.int8.onnx", *arguments]
    code, printed, _ = run("ascend", *arguments)
    assert code == 1
    assert "Failed        ascend: " in printed and "E40000 no such chip" in printed
    assert "E40000" in json.loads((out / "report.json").read_text())["targets"][0]["error"]
    assert [*out.glob("*_deploy_model.onnx")]
    code, printed, error = run("ascend", *arguments, "--quiet")
    assert (code, printed) == (1, "") and "E40000 no such chip" in error


def test_names_that_are_no_utf_8(small_cnn, built, done, tmp_path):
    folder = tmp_path / os.fsdecode(b"n\xff")
    folder.mkdir()
    path, record = folder / os.fsdecode(b"m\xe9.onnx"), folder / os.fsdecode(b"r\xe9.txt")
    shutil.copyfile(small_cnn, path)
    shutil.copyfile(built / f"{small_cnn.stem}_record.txt", record)
    done("deploy", path, record, "-o", folder / "d")
    shutil.copyfile(built / f"{small_cnn.stem}.int8.onnx", path)
    done("convert", path, "-o", folder / "c")
    for out in ("c", "d"):
        assert (folder / out / f"{path.stem}_deploy_model.onnx").is_file()


# -- convert: models that tools write
@pytest.fixture(scope="module")
def ort_fashion(tmp_path_factory):
    """The demo as ONNX Runtime's quantize_static leaves it: uint8 activations, Relus gone."""
    import cv2
    from onnxruntime import quantization

    paths = sorted((FASHION / "calib").glob("*.png"))[:20]
    pixels = [cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) for path in paths]
    feeds = [{"image": ((p / np.float32(255) - 0.5) / 0.5)[None, None]} for p in pixels]

    class Reader(quantization.CalibrationDataReader):
        def get_next(self):
            return feeds.pop() if feeds else None

    path = tmp_path_factory.mktemp("ort") / "ort.onnx"
    options = {"quant_format": quantization.QuantFormat.QDQ, "per_channel": True}
    options["activation_type"] = quantization.QuantType.QUInt8
    quantization.quantize_static(str(FASHION / "fashion.onnx"), str(path), Reader(), **options)
    return path


FED = ("--images", FASHION / "eval.txt", "--mean", 0.5, "--std", 0.5)


@pytest.mark.slow
def test_onnxruntime_model_keeps_its_decisions(ort_fashion, done, tmp_path):
    output = done("convert", ort_fashion, "-o", tmp_path / "o", *FED)
    accuracy = accuracy_of(tmp_path / "o")
    assert accuracy["samples"] == 400
    assert accuracy["top1_agreement"] >= 0.999
    assert "Here FP32 means ort.onnx" in output
    assert "12 of 12 layers" in output
    assert "rounded again: 1: /fc/Gemm." in output
    source_model = onnx.load(ort_fashion)
    deployed = onnx.load(tmp_path / "o" / "ort_deploy_model.onnx")
    values = constants(source_model), constants(deployed)
    source = {n.output[0]: n for n in source_model.graph.node}
    records = read_record((tmp_path / "o" / "ort_record.txt").read_text())
    ours = nodes_by_name(deployed)
    for node in source_model.graph.node:
        if node.op_type in ("Conv", "Gemm"):
            quantizer = source[source[node.input[0]].input[0]]
            assert records[node.name].offset_d == int(values[0][quantizer.input[2]]) - 128
        if node.op_type == "Conv":
            weight = values[0][source[node.input[1]].input[0]]
            same_array(weight, values[1][ours[node.name].input[1]])
    assert ran_types(source_model).count("Conv") == 11


def test_removed_relus_return_without_rounding(ort_fashion, done, tmp_path):
    arguments = ("-o", tmp_path / "o", *FED, "--limit", 40)
    output = done("convert", ort_fashion, "--no-keep-rounding", *arguments)
    ops = ran_types(onnx.load(tmp_path / "o" / "ort_deploy_model.onnx"))
    assert ops.count("Clip") == 3
    assert "Round" not in ops
    assert "Their rounding was removed" in output
    assert accuracy_of(tmp_path / "o")["outputs"][0]["sqnr_db"] > 30


@pytest.mark.parametrize("ending", [".int8.onnx", ".tensorrt.qdq.onnx", "_amct_qdq.onnx"])
def test_calib8_models_are_converted(ending, small_cnn, built, data, done, tmp_path):
    path = built / f"{small_cnn.stem}{ending}"
    done("convert", path, "-o", tmp_path / "o", "--images", data)
    assert accuracy_of(tmp_path / "o")["outputs"][0]["sqnr_db"] > 35
    records = read_record((tmp_path / "o" / f"{path.stem}_record.txt").read_text())
    assert {"Conv_c2", "Conv_c3", "Gemm_logits"} <= set(records)
    if ending == "_amct_qdq.onnx":  # its pairs are the record's: the same numbers come back
        expected = read_record((built / f"{small_cnn.stem}_record.txt").read_text())
        for name, record in expected.items():
            mine = records[name]
            assert (mine.scale_d, mine.offset_d) == (record.scale_d, record.offset_d)
            np.testing.assert_array_equal(mine.scale_w, record.scale_w)


@pytest.mark.parametrize("imports", [1, 0])  # ONNX Runtime loads both
def test_pairs_of_onnxruntimes_domain_give_equal_records(imports, small_cnn, built):
    path = built / f"{small_cnn.stem}.int8.onnx"
    model = onnx.load(path)
    _, expected = recipe_from_qdq(model, path)
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.domain = "com.microsoft"
    model.opset_import.extend([onnx.helper.make_opsetid("com.microsoft", 1)] * imports)
    _, recipe = recipe_from_qdq(model, path)
    assert write_record(recipe.records) == write_record(expected.records)


# -- convert: what Ascend can take over, and what it cannot
MIDDLE, ZERO = np.uint8(128), np.int8(0)
INTEGERS = np.random.default_rng(5).integers(-127, 128, (4, 3, 3, 3)).astype(np.int8)
FLOATS = INTEGERS * np.float32(0.02)


class Pairs:
    """A model of pairs, the first from x to xd, and of what else is put into it, in order."""

    def __init__(self, *, scale=0.05, **weights):
        self.nodes, self.weights = [], weights
        self.pair("x", "xd", scale=scale)

    def add(self, *node):
        self.nodes.append(node)

    def pair(self, tensor, name, *, scale=0.05, zero=MIDDLE):
        """Put a pair on a tensor; `name` is that of its output."""
        self.weights |= {f"{name}.s": np.float32(scale), f"{name}.z": zero}
        parts = (("Quantize", tensor, f"{name}.q"), ("Dequantize", f"{name}.q", name))
        for op, start, end in parts:
            self.add(f"{op}Linear", f"{start} {name}.s {name}.z", end, end + op)

    def int8(self, integers, name, *, scale=0.02, zero=None, axis=None):
        """Put in a weight behind a DequantizeLinear."""
        self.weights |= {f"{name}.int": integers, f"{name}.scale": np.asarray(scale, np.float32)}
        if zero is not None:
            self.weights[f"{name}.zero"] = zero
        inputs = [f"{name}.int", f"{name}.scale", f"{name}.zero"][: 2 if zero is None else 3]
        attributes = {} if axis is None else {"axis": axis}
        self.add("DequantizeLinear", inputs, name, f"{name}/DQ", attributes)

    def model(self, *shape, opset=13):
        return model(self.nodes, self.weights, {"x": shape}, opset)


def two_convs(*, weight=lambda net: net.int8(INTEGERS, "v"), zero=MIDDLE, opset=21, **scales):
    """One layer that can be taken over, "sound", and "other", as the arguments have it."""
    net = Pairs()
    net.int8(INTEGERS, "w", zero=ZERO)
    net.add("Conv", "xd w", "h", "sound", {"pads": [1] * 4})
    net.pair("x", "other", zero=zero, **scales)
    weight(net)
    net.add("Conv", "other v", "o", "other", {"pads": [1] * 4})
    net.add("Add", "h o", "y", "add")
    return net.model(1, 3, 6, 6, opset=opset)


@pytest.fixture
def converted(done, tmp_path):
    """(model, arguments) -> what `convert` said and reports, the deploy model, and its record.

    `deviation`: how far that model in integers is from the model of pairs, over its largest output.
    """

    def convert(model, *arguments):
        path, out = save_net(model, tmp_path / "m.onnx"), tmp_path / "o"
        output = done("convert", path, *arguments, "-o", out)
        deploy = onnx.load(out / "m_deploy_model.onnx")
        record = read_record((out / "m_record.txt").read_text())
        reference = OrtSession.open(model, threads=1, optimize=False)
        integers, deviation = open_deploy(deploy, threads=1), 0.0
        for feed in random_feeds(OrtSession.open(model, threads=1).inputs, count=3):
            (a,), (b,) = reference.run(feed).values(), integers.run(feed).values()
            deviation = max(deviation, float(np.abs(a - b).max() / np.abs(a).max()))
        report = read_markdown(out)
        return SimpleNamespace(
            output=output, report=report, deploy=deploy, record=record, deviation=deviation
        )

    return convert


def weight_of(conversion, name):
    return constants(conversion.deploy)[nodes_by_name(conversion.deploy)[name].input[1]]


def stored(integers=INTEGERS, **options):
    """A weight "v" for `two_convs`."""
    return lambda net: net.int8(integers, "v", **{"zero": ZERO, **options})


def floats(net):
    net.weights["f"] = FLOATS
    net.pair("f", "v", scale=0.02, zero=ZERO)


SHIFTED = (INTEGERS.astype(int) + 128).astype(np.uint8)
BY_CHANNEL = {"scale": [0.01, 0.02, 0.03, 0.04], "zero": np.zeros(4, np.int8), "axis": 0}


@pytest.mark.parametrize(
    "weight",
    [
        stored(),
        stored(SHIFTED, zero=MIDDLE),
        stored(**BY_CHANNEL),
        floats,
    ],
    ids=["int8", "uint8 around 128", "a scale a channel", "float with a pair"],
)
def test_weights_keep_their_integers(weight, converted):
    conversion = converted(two_convs(weight=weight))
    for name in ("sound", "other"):
        same_array(weight_of(conversion, name), INTEGERS)
    assert "2 of 2 layers" in conversion.output
    assert conversion.deviation < 1e-5


@pytest.mark.parametrize("zero", [np.uint8(0), np.uint8(131), np.int8(-7), np.int8(0)])
def test_zero_points_become_offsets(zero, converted):
    record = converted(two_convs(zero=zero)).record["other"]
    assert record.offset_d == int(zero) - (128 if zero.dtype == np.uint8 else 0)
    assert record.scale_d == np.float32(0.05)


UNSIGNED = INTEGERS.view(np.uint8)
WRONG_AXIS = {"scale": [0.1] * 3, "zero": np.zeros(3, np.int8), "axis": 1}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weight": stored(UNSIGNED, zero=np.uint8(3))}, "zero point"),
        ({"weight": stored(UNSIGNED, zero=None)}, "zero point"),
        ({"weight": stored(**WRONG_AXIS)}, "no scale by output channel"),
        ({"weight": stored(INTEGERS.astype(np.int16), zero=np.int16(0))}, "quantized to int16"),
        ({"weight": lambda net: net.weights.update(v=FLOATS)}, "weight is not quantized"),
        ({"zero": np.uint16(30000)}, "quantized to uint16"),
        ({"scale": 1e-6}, "1 / scale_d"),
    ],
)
def test_unconvertible_layers_stay_float(options, reason, converted):
    conversion = converted(two_convs(**options))
    assert "1 of 2 layers" in conversion.output
    assert re.search(rf"\| other \| [^|]*{re.escape(reason)}", conversion.report)
    assert weight_of(conversion, "other").dtype == np.float32
    assert conversion.deviation < (0.01 if "scale" not in options else 2)


def test_matrices_get_one_scale(converted, rng):
    """Equal scales stay; others are rounded again to one, and it is told; a Transpose is undone."""
    net, square = Pairs(), rng.integers(-127, 128, (4, 4)).astype(np.int8)
    net.int8(square, "a", **BY_CHANNEL | {"scale": [0.01] * 4})
    net.add("Gemm", "xd a", "g", "equal", {"transB": 1})
    net.pair("g", "gd", scale=0.1)
    net.int8(square, "b", **BY_CHANNEL)
    net.add("Transpose", "b", "bt", "turn", {"perm": [1, 0]})
    net.add("MatMul", "gd bt", "y", "several")
    conversion = converted(net.model(2, 4))
    assert "rounded again: 1: several." in conversion.output
    assert "keep their integers" in conversion.output
    same_array(weight_of(conversion, "equal"), np.ascontiguousarray(square.T))
    assert all(record.scale_w.size == 1 for record in conversion.record.values())
    assert conversion.deviation < 0.02


def test_extreme_bias_leaves_room_for_sums(converted):
    """As quantizers write a channel whose weights are next to nothing."""
    net, scales = Pairs(scale=0.01), np.float32([0.02, 1e-9, 0.02, 0.02])
    net.int8(INTEGERS, "w", **BY_CHANNEL | {"scale": scales})
    net.int8(np.int32([5, 2**31 - 1, -7, 0]), "b", scale=scales * np.float32(0.01), axis=0)
    net.add("Conv", "xd w b", "y", "conv")
    conversion = converted(net.model(1, 3, 6, 6))
    assert "no room for the sums of products" in conversion.output
    same_array(weight_of(conversion, "conv")[[0, 2, 3]], INTEGERS[[0, 2, 3]])
    bias = constants(conversion.deploy)[nodes_by_name(conversion.deploy)["conv"].input[2]]
    assert bias.tolist() == [5, 2**30, -7, 0]
    assert conversion.deviation < 1e-5


def test_a_grouped_transposed_convolution(converted, rng):
    net, integers = Pairs(), rng.integers(-127, 128, (4, 2, 3, 3)).astype(np.int8)
    net.int8(integers, "w", scale=[0.01, 0.05], zero=np.zeros(2, np.int8), axis=1)
    net.add("ConvTranspose", "xd w", "y", "up", {"group": 2})
    conversion = converted(net.model(1, 4, 3, 3))
    scales = np.float32([0.01, 0.05, 0.01, 0.05])
    np.testing.assert_array_equal(conversion.record["up"].scale_w, scales)
    assert conversion.deviation < 1e-5


def ran_types(model):
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_removed_relu_applies_to_float_readers(kind, converted):
    """Conv, its pair from 0 on, then a float Sub that sees no negative value, with or without."""
    net = Pairs(c=np.float32([1.0]))
    net.int8(INTEGERS, "w", zero=ZERO)
    net.add("Conv", "xd w", "h", "conv")
    net.pair("h", "hd", scale=0.031, zero=kind(0))
    net.add("Sub", "hd c", "y", "sub")
    rounded_form = ("--keep-rounding", ["Div", "Round", "Clip", "Mul"], 1e-5)
    for flag, ops, limit in (rounded_form, ("--no-keep-rounding", ["Clip"], 0.01)):
        conversion = converted(net.model(1, 3, 8, 8, opset=21), flag)
        assert ran_types(conversion.deploy) == ["AscendQuant", "Conv", "AscendDequant", *ops, "Sub"]
        assert conversion.deviation < limit
        assert "read through a pair: 1." in conversion.output


def test_pairs_around_pool_and_output_vanish(converted, rng):
    """MaxPool and Flatten hand codes on; the output keeps its name without an Identity."""
    net = Pairs()
    net.add("MaxPool", "xd", "p", "pool", {"kernel_shape": [2, 2]})
    net.add("Flatten", "p", "f", "flat")
    net.int8(rng.integers(-127, 128, (24, 4)).astype(np.int8), "w", zero=ZERO)
    net.add("MatMul", "f w", "h", "mm")
    net.pair("h", "y", scale=0.5)
    deployed = converted(net.model(1, 3, 3, 5), "--no-keep-rounding").deploy
    expected = ["MaxPool", "Flatten", "AscendQuant", "MatMul", "AscendDequant"]
    assert ran_types(deployed) == expected
    assert deployed.graph.output[0].name == "y"


def behind_a_pair(*node):
    net = Pairs()
    net.add(*node)
    return net.model(1)


def a_scale_a_channel():
    net = Pairs()
    net.pair("xd", "y", scale=[1.0] * 3, zero=np.zeros(3, np.uint8))
    return net.model(1, 3)


def weight_of_shape(operator, shape, attributes=()):
    """A layer whose int8 weight has a scale for each of 4 channels."""
    net = Pairs()
    axis = min(len(shape) - 1, 1)
    net.int8(np.ones(shape, np.int8), "w", scale=[0.1] * 4, zero=np.zeros(4, np.int8), axis=axis)
    net.add(operator, "xd w", "y", "layer", dict(attributes))
    return net.model(1, 4, 2, 2)


def codes_as_an_output():
    model = two_convs()
    model.graph.output.append(make_value("xd.q", [1, 3, 6, 6], TensorProto.UINT8))
    return model


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (model([("Relu", "x", "y")], {}, {"x": [1]}), "got none"),
        (behind_a_pair("Relu", "xd", "y"), "give the float model"),
        (behind_a_pair("Cast", "xd.q", "y", {"to": 1}), "read by Cast"),
        (a_scale_a_channel(), "one constant scale"),
        (codes_as_an_output(), "as an output"),
        (
            model([("DequantizeLinear", "x s", "y")], {"s": 1.0}, {"x": (TensorProto.UINT8, [1])}),
            "must form pairs",
        ),
        (two_convs(opset=10), "opset 11 or newer"),
        (weight_of_shape("Gemm", [4]), "must load the model"),
        (weight_of_shape("ConvTranspose", [4]), "must load the model"),
        (weight_of_shape("ConvTranspose", [4, 4, 1, 1], {"group": -1}), "must load the model"),
        (weight_of_shape("ConvTranspose", [4, 4, 1, 1], {"group": 1 << 40}), "must load the model"),
    ],
    ids=[
        *("none", "no layer", "integers", "a channel", "output", "alone", "old"),
        *("Gemm of a vector", "ConvTranspose of a vector", "negative groups", "countless groups"),
    ],
)
def test_invalid_qdq_model_is_refused(model, match, ended, tmp_path):
    path = save_net(model, tmp_path / "m.onnx")
    assert match in ended("convert", path, "-o", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_missing_and_broken_models_are_refused(ended, tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"\x08\x00no")
    for path in ("m.onnx", "absent.onnx"):
        ended("convert", tmp_path / path, "-o", tmp_path / "o")
        ended("deploy", tmp_path / path, tmp_path / path, "-o", tmp_path / "o")
