"""`calib8 ascend deploy` and `calib8 ascend convert`: files from scales that were found before."""

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.trt_cache import dump as cache_text
from deploy.calibration.trt_cache import from_scales
from deploy.metrics.bench_inputs import random_feeds
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.executor import open_deploy
from deploy.targets.ascend.record import read_record

TESTS = Path(__file__).parent
CASES = TESTS / "golden" / "amct" / "cases"
FASHION = TESTS.parent / "datasets" / "fashion"
NAMES = ["small_default", "small_dmq", "small_hfmg_sym", "small_ifmr_asym", "small_mixed"]
DATA = np.random.default_rng(5).normal(size=(6, 3, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.npy"
    np.save(path, DATA)
    return path


@pytest.fixture(scope="module")
def built(small_cnn, data, tmp_path_factory):
    """A build of every target without a search."""
    from deploy.pipeline import build
    from deploy.tuning.search_options import Tuning

    out = tmp_path_factory.mktemp("built")
    targets = ["onnxruntime", "tensorrt", "ascend"]
    build(small_cnn, data, out=out, targets=targets, duration_s=0, tuning=Tuning(effort=0))
    return out


@pytest.fixture
def ended(run):
    """(words) -> the one sentence of a command that must end in an error."""

    def call(*words):
        code, out, error = run("ascend", *words)
        assert code == 1 and not out, (code, out)
        return error

    return call


@pytest.fixture
def done(run):
    """(words) -> what a command prints that must work, its lines joined."""

    def call(*words):
        code, out, error = run("ascend", *words)
        assert code == 0, error
        return " ".join(out.split())

    return call


def model(nodes, weights, inputs, outputs=None, opset=13):
    """A model of these nodes; outputs are those of the last node."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "made",
        [value(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [value(n, TensorProto.FLOAT, None) for n in outputs or nodes[-1].output],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def saved(made, path):
    onnx.save(made, path)
    return path


def constants(made):
    found = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    for node in made.graph.node:
        if node.op_type == "Constant":
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return found


def named(made):
    return {node.name: node for node in made.graph.node}


# -- deploy: AMCT's own records -----------------------------------------------------------------


@pytest.fixture(scope="module")
def golden_model():
    """(case, path) -> the float model of one of AMCT's runs, in a file."""
    spec = importlib.util.spec_from_file_location("amct_cases", TESTS / "test_ascend_models.py")
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    return lambda case, path: saved(cases.float_model(case), path)


@pytest.mark.parametrize("case", NAMES)
def test_amcts_records_give_amcts_models(case, golden_model, done, tmp_path):
    """The same nodes, attributes and values; only constants of the float model are folded.

    AMCT leaves BatchNormalization behind a ConvTranspose, and small_mixed one behind a Conv, which
    nothing but the scales of the record says.
    """
    path = golden_model(case, tmp_path / "m.onnx")
    out = tmp_path / "out"
    said = done("deploy", path, CASES / case / "record.txt", "-o", out)
    assert "up" in re.search(r"stays apart: ([^.]*)\.", said)[1].split(", ")
    for kind in ("deploy", "fake_quant"):
        mine = onnx.load(out / f"m_{kind}_model.onnx")
        amct = onnx.load(CASES / case / f"res_{kind}_model.onnx")
        ours, theirs = named(mine), named(amct)
        assert ran(amct) == ran(mine) and set(ours) < set(theirs)
        assert {theirs[n].op_type for n in theirs if n not in ours} == {"Constant"}
        values = constants(mine), constants(amct)
        compared = 0
        for name, node in ours.items():
            assert node.op_type == theirs[name].op_type
            assert told(node) == told(theirs[name])
            for a, b in zip(node.input, theirs[name].input, strict=True):
                assert (a in values[0]) == (b in values[1])
                if a in values[0]:
                    same_array(values[0][a], values[1][b])
                    compared += 1
        assert compared > 15


def ran(made):
    return [node.name for node in made.graph.node if node.op_type != "Constant"]


def told(node):
    return {a.name: (a.f, a.i, a.s, tuple(a.ints)) for a in node.attribute}


def same_array(a, b):
    assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_a_configuration_says_which_form_the_record_is_of(golden_model, done, ended, tmp_path):
    path = golden_model("small_mixed", tmp_path / "m.onnx")
    case = CASES / "small_mixed"
    out = tmp_path / "out"
    words = ("deploy", path, case / "record.txt", "-o", out)
    done(*words, "--ascend-config", case / "config.json")
    wanted = json.loads((case / "config.json").read_text())
    assert json.loads((out / "m_config.json").read_text()) == wanted
    off = tmp_path / "off.cfg"
    off.write_text('skip_layers: "conv1"')
    assert "'conv1' disabled" in ended(*words, "--ascend-config", off)


# -- deploy: calib8's own, and edited -----------------------------------------------------------


def test_a_builds_record_gives_its_files_again(small_cnn, built, done, tmp_path):
    stem = small_cnn.stem
    said = done("deploy", small_cnn, built / f"{stem}_record.txt", "-o", tmp_path, "--threads", "1")
    assert "nothing was calibrated" in said and "made-up samples" in said
    for ending in ("deploy_model.onnx", "fake_quant_model.onnx", "record.txt", "amct_qdq.onnx"):
        name = f"{stem}_{ending}"
        assert (tmp_path / name).read_bytes() == (built / name).read_bytes(), name
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["made_from"]["scales"]["name"] == f"{stem}_record.txt"
    assert {f"{stem}_deploy_model.onnx", "report.html"} <= set(manifest["files"])


@pytest.mark.parametrize("text", ["do_fusion: false", 'skip_fusion_layers: "conv"'])
def test_a_record_without_fusion_gives_its_files_again(text, run, rng, tmp_path):
    weights = {"w": rng.normal(size=(4, 3, 1, 1)), "s": rng.uniform(2, 3, 4)}
    weights |= {"b": rng.normal(size=4), "m": rng.normal(size=4), "v": rng.uniform(4, 9, 4)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", kernel_shape=[1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["y"], name="bn"),
    ]
    floats = {k: v.astype(np.float32) for k, v in weights.items()}
    path = saved(model(nodes, floats, {"x": [1, 3, 4, 4]}), tmp_path / "bn.onnx")
    (tmp_path / "c.cfg").write_text(text)
    np.save(tmp_path / "x.npy", rng.normal(size=(2, 3, 4, 4)).astype(np.float32))
    words = ("--images", tmp_path / "x.npy", "--target", "ascend", "--effort", 0, "--duration", 0)
    code, _, error = run(
        "build", path, *words, "--ascend-config", tmp_path / "c.cfg", "--out", tmp_path / "b"
    )
    assert code == 0, error
    record = tmp_path / "b" / "bn_record.txt"
    assert run("ascend", "deploy", path, record, "-o", tmp_path / "d")[0] == 0
    for ending in ("deploy_model.onnx", "fake_quant_model.onnx"):
        made = tmp_path / "d" / f"bn_{ending}"
        assert made.read_bytes() == (tmp_path / "b" / f"bn_{ending}").read_bytes()
    assert "BatchNormalization" in {n.op_type for n in onnx.load(made).graph.node}
    # the record may say so by itself, as AMCT's does
    said = record.read_text().replace("  value {", "  value {\n    skip_fusion: true")
    (tmp_path / "said.txt").write_text(said)
    assert run("ascend", "deploy", path, tmp_path / "said.txt", "-o", tmp_path / "s")[0] == 0
    assert (tmp_path / "s" / made.name).read_bytes() == made.read_bytes()
    assert "skip_fusion: true" in (tmp_path / "s" / "bn_record.txt").read_text()


def test_an_edited_record_changes_its_layer_alone(small_cnn, built, done, data, tmp_path):
    stem = small_cnn.stem
    text = (built / f"{stem}_record.txt").read_text()
    first, second, *_ = records = list(read_record(text))
    entries = re.split(r"(?=^record )", text, flags=re.MULTILINE)[1:]
    entries[0] = re.sub(r"scale_d: \S+", "scale_d: 0.5", entries[0])
    record = tmp_path / "edited.txt"
    record.write_text("# by hand\n" + entries[0] + "".join(entries[2:]))
    said = done("deploy", small_cnn, record, "-o", tmp_path / "o", "--images", data)
    assert f"{second}): the record has no scales for it" in said and "Cosine" in said
    made = [onnx.load(f / f"{stem}_deploy_model.onnx") for f in (built, tmp_path / "o")]
    before, after = map(named, made)
    assert set(before) - set(after) == {f"{second}.quant", f"{second}.dequant"}
    assert next(a.f for a in after[f"{first}.quant"].attribute if a.name == "scale") == 2.0
    values = [constants(one) for one in made]
    for name in records[2:]:
        assert before[f"{name}.quant"].attribute == after[f"{name}.quant"].attribute
        for tensor in after[name].input:
            if tensor in values[1]:
                same_array(values[0][tensor], values[1][tensor])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "at least one layer"),
        ("record {", "must"),
        ("\x00\xff", "must"),
        (
            'record { key: "nowhere" value { scale_d: 1 offset_d: 0 scale_w: 1 offset_w: 0 } }',
            "not",
        ),
        ('record { key: "Conv_c1" value { scale_w: 1 offset_w: 0 } }', "scale_d"),
        ('record { key: "Conv_c1" value { scale_d: 1 offset_d: 0 } }', "scale_w"),
        (
            'record { key: "Conv_c1" value { scale_d: nan offset_d: 0 scale_w: 1 offset_w: 0 } }',
            "scale",
        ),
        (
            'record { key: "Conv_c1" value { scale_d: 1e6 offset_d: 0 scale_w: 1 offset_w: 0 } }',
            "1 / scale_d",
        ),
        (
            'record { key: "Conv_c1" value { scale_d: 1 offset_d: 200 scale_w: 1 offset_w: 0 } }',
            "offset_d",
        ),
        (
            'record { key: "Conv_c1" value { scale_d: 1 offset_d: 0 scale_w: 1 scale_w: 1'
            " offset_w: 0 offset_w: 0 } }",
            "8 scale_w",
        ),
        (
            'record { key: "Conv_c1" value { scale_d: 1 offset_d: 0 scale_w: 1 offset_w: 0'
            " tensor_balance_factor: 1 tensor_balance_factor: 2 } }",
            "3 DMQ factors",
        ),
        (
            'record { key: "Conv_c1" value { scale_d: 1 offset_d: 0 scale_w: 1 offset_w: 0'
            ' fakequant_precision_mode: "FORCE_FP32" } }',
            "FORCE_FP16_QUANT or DEFAULT",
        ),
        ('record { key: "k" kv_cache_value { scale: 1 offset: 0 } }', "got only 1 x KV cache"),
        ('prune_record { producer { name: "Conv_c1" } }', "got only 1 x pruning"),
    ],
)
def test_a_broken_record_is_one_sentence(text, match, small_cnn, ended, tmp_path):
    record = tmp_path / "r.txt"
    record.write_bytes(text.encode("latin-1"))
    assert match in ended("deploy", small_cnn, record, "-o", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_what_the_record_holds_beside_layers_is_told(small_cnn, built, done, tmp_path):
    record = tmp_path / "r.txt"
    more = 'prune_record { producer { name: "Conv_c1" } }'
    record.write_text((built / f"{small_cnn.stem}_record.txt").read_text() + more)
    assert "not deployed: 1 x pruning" in done("deploy", small_cnn, record, "-o", tmp_path / "o")


# -- deploy: a TensorRT cache -------------------------------------------------------------------


def test_a_tensorrt_cache_gives_symmetric_scales(small_cnn, built, done, data, tmp_path):
    """Layers whose inputs it knows; the first, whose line is taken out, stays float."""
    lines = (built / f"{small_cnn.stem}.tensorrt.cache").read_text().splitlines(keepends=True)
    cache = tmp_path / "c.cache"
    cache.write_text("".join(line for line in lines if not line.startswith("x: ")))
    words = ("-o", tmp_path / "o", "--images", data)
    said = done("deploy", small_cnn, "--cache", cache, *words)
    assert "3 of 4 layers, symmetric" in said and "Conv (Conv_c1): its input" in said
    found = read_record((tmp_path / "o" / f"{small_cnn.stem}_record.txt").read_text())
    bits = dict(line.strip().rsplit(": ", 1) for line in lines[1:])
    inputs = {n.name: n.input[0] for n in onnx.load(small_cnn).graph.node}
    assert "Conv_c1" not in found and len(found) == 3
    for name in ("Conv_c2", "Conv_c3"):
        wanted = np.uint32(int(bits[inputs[name]], 16)).view(np.float32)
        assert found[name].scale_d == wanted and found[name].offset_d == 0
    assert found["Conv_c2"].scale_w.size == 8 and found["Gemm_logits"].scale_w.size == 1


def test_a_foreign_cache_is_told(small_cnn, ended, tmp_path):
    cache = tmp_path / "c.cache"
    cache.write_bytes(cache_text(from_scales({"other": np.float32(1)}, version="8.6.1")))
    error = ended("deploy", small_cnn, "--cache", cache, "-o", tmp_path / "o")
    assert "none of 4" in error and "calib8 cache check" in error
    cache.write_text("no cache")
    assert "TRT-8503" in ended("deploy", small_cnn, "--cache", cache, "-o", tmp_path / "o")


def test_scales_come_from_one_file(small_cnn, built, ended, tmp_path):
    record, cache = (built / f"{small_cnn.stem}{e}" for e in ("_record.txt", ".cache"))
    out = ("-o", tmp_path / "o")
    assert "got neither" in ended("deploy", small_cnn, *out)
    assert "leave one" in ended("deploy", small_cnn, record, "--cache", cache, *out)
    config = ("--ascend-config", record)
    assert "leave the conf" in ended("deploy", small_cnn, "--cache", cache, *config, *out)


# -- what both commands share -------------------------------------------------------------------


def test_ascends_options_and_pictures(small_cnn, built, pictures, done, ended, tmp_path):
    record = built / f"{small_cnn.stem}_record.txt"
    words = ("deploy", small_cnn, record, "-o", tmp_path / "o")
    assert "give --images" in ended(*words, "--aipp")
    feed = ("--images", pictures, "--size", "16x16", "--limit", 3)
    flags = ("--soc", "Ascend310P3", "--first-layer-int8", "--source-color", "nv12")
    flags += ("--csc", "bt709-narrow", "--source-size", "32x32", "--cann", "7.0")
    done(*words, *feed, *flags, "--aipp", "--atc-flag=--log=error")
    script = (tmp_path / "o" / f"{small_cnn.stem}_atc.sh").read_text()
    for part in ("--soc_version=Ascend310P3", "--log=error", "--insert_op_conf", "_compression"):
        assert part in script
    aipp = (tmp_path / "o" / f"{small_cnn.stem}_aipp.cfg").read_text()
    assert "YUV420SP_U8" in aipp and "crop: true" in aipp and "matrix_r0c0" in aipp
    assert "CANN 7.0" in (tmp_path / "o" / f"{small_cnn.stem}_README.txt").read_text()
    done(*words, *feed, "--aipp", "--dynamic-aipp")
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert report["engines"][1]["accuracy"]["samples"] == 3


def test_open_shapes_are_given_by_name(ended, done, tmp_path):
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="c", kernel_shape=[1, 1])
    weights = {"w": np.ones((2, 3, 1, 1), np.float32)}
    path = saved(model([node], weights, {"x": [1, 3, "h", "w"]}), tmp_path / "open.onnx")
    record = tmp_path / "r.txt"
    value = "scale_d: 0.1 offset_d: 3 scale_w: 0.1 offset_w: 0"
    record.write_text(f'record {{ key: "c" value {{ {value} }} }}')
    words = ("deploy", path, record, "-o", tmp_path / "o")
    assert "--shape" in ended(*words)
    done(*words, "--shape", "x:1x3x5x7")
    assert "--input_shape=x:1,3,5,7" in (tmp_path / "o" / "open_atc.sh").read_text()
    np.save(tmp_path / "x.npy", np.ones((1, 3, 5, 7), np.float32))
    feed = ("--images", tmp_path / "x.npy")
    assert "leave one of them away" in ended(*words, "--shape", "x:1x3x5x7", *feed)


@pytest.mark.parametrize(
    ("flags", "least", "told"),
    [
        ((), 1e-9, True),
        ((), 1e-3, False),
        (("--atc-flag=--keep_dtype=wide.cfg",), 1e-9, False),
    ],
)
def test_what_float16_makes_0_in_an_om_is_told(flags, least, told, run, tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="c", kernel_shape=[1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="r"),
        helper.make_node("Add", ["r", "least"], ["g"], name="guard"),
        helper.make_node("Log", ["g"], ["y"], name="log"),
    ]
    weights = {"w": np.ones((2, 3, 1, 1), np.float32), "least": np.float32(least)}
    path = saved(model(nodes, weights, {"x": [1, 3, 5, 7]}), tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", DATA[:4, :, :5, :7])
    words = ("--images", tmp_path / "x.npy", "--effort", 0, "--duration", 0, "--accept")
    code, _, error = run(
        "build", path, *words, "--target", "ascend", *flags, "--out", tmp_path / "o"
    )
    assert code == 0, error
    notes = (tmp_path / "o" / "report.md").read_text().replace("\\_", "_")
    said = "in float16 what is not int8, which is too narrow for guard, log: least, 1e-09, which"
    assert (said in notes) == told
    assert ("give --atc-flag=--keep_dtype=FILE" in notes) == told


def test_atc_is_told_no_shape_of_a_scalar(done, tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="c", kernel_shape=[1, 1]),
        helper.make_node("Max", ["c", "least"], ["y"], name="m"),
    ]
    weights = {"w": np.ones((2, 3, 1, 1), np.float32)}
    path = saved(model(nodes, weights, {"least": [], "x": [1, 3, 5, 7]}), tmp_path / "net.onnx")
    record = tmp_path / "r.txt"
    value = "scale_d: 0.1 offset_d: 3 scale_w: 0.1 offset_w: 0"
    record.write_text(f'record {{ key: "c" value {{ {value} }} }}')
    done("deploy", path, record, "-o", tmp_path / "o")
    words = (tmp_path / "o" / "net_atc.sh").read_text().split()
    assert "--input_shape=x:1,3,5,7" in words


def test_nothing_foreign_and_no_input_is_written_over(small_cnn, built, ended, done, tmp_path):
    record = tmp_path / f"{small_cnn.stem}_record.txt"
    shutil.copyfile(built / record.name, record)
    mine = tmp_path / f"{small_cnn.stem}_deploy_model.onnx"
    mine.write_text("mine")
    assert "did not write" in ended("deploy", small_cnn, record, "-o", tmp_path)
    error = ended("deploy", small_cnn, record, "-o", tmp_path, "--force")
    assert "an output must not be an input" in error and mine.read_text() == "mine"
    other = tmp_path / "other.txt"
    record.rename(other)
    done("deploy", small_cnn, other, "-o", tmp_path, "--force")
    assert mine.read_bytes() == (built / mine.name).read_bytes()


def test_what_was_found_as_json_and_nothing_else(small_cnn, built, run, tmp_path):
    record = built / f"{small_cnn.stem}_record.txt"
    words = ("deploy", small_cnn, record, "-o", tmp_path / "d")
    code, out, _ = run("ascend", *words, "--json", "-")
    assert code == 0 and json.loads(out)["targets"][0]["method"] == "a record"
    words = ("convert", built / f"{small_cnn.stem}.int8.onnx", "-o", tmp_path / "c")
    assert run("ascend", *words, "--quiet", "--json", tmp_path / "c.json")[:2] == (0, "")
    assert json.loads((tmp_path / "c.json").read_text())["targets"][0]["name"] == "ascend"
    assert (tmp_path / "c" / f"{small_cnn.stem}.int8_deploy_model.onnx").is_file()


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


# -- convert: models that tools write -----------------------------------------------------------


@pytest.fixture(scope="module")
def ort_fashion(tmp_path_factory):
    """The demo as ONNX Runtime's quantize_static leaves it: uint8 activations, Relus gone."""
    import cv2
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):
        def __init__(self):
            paths = sorted((FASHION / "calib").glob("*.png"))[:20]
            pixels = [cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) for path in paths]
            self.left = [{"image": ((p / np.float32(255) - 0.5) / 0.5)[None, None]} for p in pixels]

        def get_next(self):
            return self.left.pop() if self.left else None

    path = tmp_path_factory.mktemp("ort") / "ort.onnx"
    words = {"quant_format": QuantFormat.QDQ, "per_channel": True}
    words["activation_type"] = QuantType.QUInt8
    quantize_static(str(FASHION / "fashion.onnx"), str(path), Reader(), **words)
    return path


FED = ("--images", FASHION / "eval.txt", "--mean", 0.5, "--std", 0.5)


@pytest.mark.slow
def test_onnxruntimes_model_decides_the_same_on_the_npu(ort_fashion, done, tmp_path):
    said = done("convert", ort_fashion, "-o", tmp_path / "o", *FED)
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    accuracy = report["engines"][1]["accuracy"]
    assert accuracy["samples"] == 400 and accuracy["top1_agreement"] >= 0.999
    assert "FP32's here is that of ort.onnx" in said
    assert "12 of 12 layers" in said and "rounded again: 1: /fc/Gemm." in said
    given, made = onnx.load(ort_fashion), onnx.load(tmp_path / "o" / "ort_deploy_model.onnx")
    values = constants(given), constants(made)
    source = {n.output[0]: n for n in given.graph.node}
    records = read_record((tmp_path / "o" / "ort_record.txt").read_text())
    ours, kept = named(made), 0
    for node in given.graph.node:
        if node.op_type in ("Conv", "Gemm"):
            quantizer = source[source[node.input[0]].input[0]]
            offset = int(values[0][quantizer.input[2]]) - 128
            assert records[node.name].offset_d == offset
        if node.op_type == "Conv":
            same_array(
                values[0][source[node.input[1]].input[0]], values[1][ours[node.name].input[1]]
            )
            kept += 1
    assert kept == 11


def test_without_rounding_the_relus_that_were_taken_out_come_back(ort_fashion, done, tmp_path):
    words = ("-o", tmp_path / "o", *FED, "--limit", 40)
    said = done("convert", ort_fashion, "--no-keep-rounding", *words)
    made = onnx.load(tmp_path / "o" / "ort_deploy_model.onnx")
    ops = [node.op_type for node in made.graph.node]
    assert ops.count("Clip") == 3 and "Round" not in ops and "Their rounding was removed" in said
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert report["engines"][1]["accuracy"]["outputs"][0]["sqnr_db"] > 30


@pytest.mark.parametrize("ending", [".int8.onnx", ".tensorrt.qdq.onnx", "_amct_qdq.onnx"])
def test_calib8s_own_models(ending, small_cnn, built, data, done, tmp_path):
    path = built / f"{small_cnn.stem}{ending}"
    done("convert", path, "-o", tmp_path / "o", "--images", data)
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert report["engines"][1]["accuracy"]["outputs"][0]["sqnr_db"] > 35
    records = read_record((tmp_path / "o" / f"{path.stem}_record.txt").read_text())
    assert {"Conv_c2", "Conv_c3", "Gemm_logits"} <= set(records)
    if ending == "_amct_qdq.onnx":  # its pairs are the record's: the same numbers come back
        wanted = read_record((built / f"{small_cnn.stem}_record.txt").read_text())
        for name, one in wanted.items():
            assert records[name].scale_d == one.scale_d and records[name].offset_d == one.offset_d
            np.testing.assert_array_equal(records[name].scale_w, one.scale_w)


# -- convert: what Ascend can take over, and what it cannot ---------------------------------------


MIDDLE = np.uint8(128)


def pair(nodes, weights, tensor, name, *, scale=0.05, zero=MIDDLE):
    """Put a pair on a tensor; gives the name of its output."""
    weights[f"{name}.s"], weights[f"{name}.z"] = np.float32(scale), zero
    parameters = [f"{name}.s", f"{name}.z"]
    for op, start, end in (("Quantize", tensor, f"{name}.q"), ("Dequantize", f"{name}.q", name)):
        nodes.append(helper.make_node(f"{op}Linear", [start, *parameters], [end], name=end + op))
    return name


def int8_weight(nodes, weights, integers, name, *, scale=0.02, zero=None, axis=None):
    """A weight behind a DequantizeLinear; gives the name of its output."""
    weights[f"{name}.int"] = integers
    weights[f"{name}.scale"] = np.asarray(scale, np.float32)
    inputs = [f"{name}.int", f"{name}.scale"]
    if zero is not None:
        weights[f"{name}.zero"] = zero
        inputs.append(f"{name}.zero")
    given = {} if axis is None else {"axis": axis}
    nodes.append(helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}/DQ", **given))
    return name


INTEGERS = np.random.default_rng(5).integers(-127, 128, (4, 3, 3, 3)).astype(np.int8)
FLOATS = (INTEGERS * np.float32(0.02)).astype(np.float32)


def two_convs(*, weight=None, zero=MIDDLE, opset=21, **scales):
    """One layer that can be taken over, "sound", and "other", as the arguments have it."""
    nodes, weights = [], {}
    x = pair(nodes, weights, "x", "xd")
    int8_weight(nodes, weights, INTEGERS, "w", zero=np.int8(0))
    nodes.append(helper.make_node("Conv", [x, "w"], ["h"], name="sound", pads=[1] * 4))
    other = pair(nodes, weights, "x", "other", zero=zero, **scales)
    (weight or (lambda *to: int8_weight(*to, INTEGERS, "v")))(nodes, weights)
    nodes.append(helper.make_node("Conv", [other, "v"], ["o"], name="other", pads=[1] * 4))
    nodes.append(helper.make_node("Add", ["h", "o"], ["y"], name="add"))
    return model(nodes, weights, {"x": [1, 3, 6, 6]}, opset=opset)


def near(path, out):
    """How far the deploy model in integers is from a Q/DQ model, over its largest output."""
    given = onnx.load(path)
    feeds = random_feeds(OrtSession.open(given, threads=1).inputs, count=3)
    made = open_deploy(onnx.load(out / f"{path.stem}_deploy_model.onnx"), threads=1)
    reference = OrtSession.open(given, threads=1, optimize=False)
    worst = 0.0
    for feed in feeds:
        (a,), (b,) = reference.run(feed).values(), made.run(feed).values()
        worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
    return worst


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(lambda *to: int8_weight(*to, INTEGERS, "v", zero=np.int8(0)), id="int8"),
        pytest.param(
            lambda *to: int8_weight(
                *to, (INTEGERS.astype(int) + 128).astype(np.uint8), "v", zero=np.uint8(128)
            ),
            id="uint8 around 128",
        ),
        pytest.param(
            lambda *to: int8_weight(
                *to,
                INTEGERS,
                "v",
                scale=[0.01, 0.02, 0.03, 0.04],
                zero=np.zeros(4, np.int8),
                axis=0,
            ),
            id="a scale a channel",
        ),
        pytest.param(
            lambda nodes, weights: (
                weights.update(f=FLOATS),
                pair(nodes, weights, "f", "v", scale=0.02, zero=np.int8(0)),
            ),
            id="float with a pair",
        ),
    ],
)
def test_weights_keep_their_integers(weight, done, tmp_path):
    path = saved(two_convs(weight=weight), tmp_path / "m.onnx")
    assert "2 of 2 layers" in done("convert", path, "-o", tmp_path / "o")
    made = onnx.load(tmp_path / "o" / "m_deploy_model.onnx")
    for name in ("sound", "other"):
        same_array(constants(made)[named(made)[name].input[1]], INTEGERS)
    assert near(path, tmp_path / "o") < 1e-5


@pytest.mark.parametrize("zero", [np.uint8(0), np.uint8(131), np.int8(-7), np.int8(0)])
def test_zero_points_become_offsets(zero, done, tmp_path):
    path = saved(two_convs(zero=zero), tmp_path / "m.onnx")
    done("convert", path, "-o", tmp_path / "o")
    record = read_record((tmp_path / "o" / "m_record.txt").read_text())["other"]
    assert record.offset_d == int(zero) - (128 if zero.dtype == np.uint8 else 0)
    assert record.scale_d == np.float32(0.05)


UNSIGNED = INTEGERS.view(np.uint8)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"weight": lambda *to: int8_weight(*to, UNSIGNED, "v", zero=np.uint8(3))}, "zero point"),
        ({"weight": lambda *to: int8_weight(*to, UNSIGNED, "v")}, "zero point"),
        (
            {
                "weight": lambda *to: int8_weight(
                    *to, INTEGERS, "v", scale=[0.1] * 3, zero=np.zeros(3, np.int8), axis=1
                )
            },
            "no scale by output channel",
        ),
        (
            {
                "weight": lambda *to: int8_weight(
                    *to, INTEGERS.astype(np.int16), "v", zero=np.int16(0)
                )
            },
            "quantized to int16",
        ),
        ({"weight": lambda nodes, weights: weights.update(v=FLOATS)}, "weight is not quantized"),
        ({"zero": np.uint16(30000)}, "quantized to uint16"),
        ({"scale": 1e-6}, "1 / scale_d"),
    ],
)
def test_what_cannot_be_taken_over_stays_float_and_is_told(made, reason, done, tmp_path):
    path = saved(two_convs(**made), tmp_path / "m.onnx")
    said = done("convert", path, "-o", tmp_path / "o")
    assert "1 of 2 layers" in said and reason in said and "(other)" in said
    found = onnx.load(tmp_path / "o" / "m_deploy_model.onnx")
    assert constants(found)[named(found)["other"].input[1]].dtype == np.float32
    assert near(path, tmp_path / "o") < (0.01 if "scale" not in made else 2)


def test_matrices_get_one_scale(done, rng, tmp_path):
    """Equal scales stay; others are rounded again to one, and it is told; a Transpose is undone."""
    nodes, weights = [], {}
    x = pair(nodes, weights, "x", "xd")
    square = rng.integers(-127, 128, (4, 4)).astype(np.int8)
    zeros = np.zeros(4, np.int8)
    int8_weight(nodes, weights, square, "a", scale=[0.01] * 4, zero=zeros, axis=0)
    nodes.append(helper.make_node("Gemm", [x, "a"], ["g"], name="equal", transB=1))
    gd = pair(nodes, weights, "g", "gd", scale=0.1)
    int8_weight(nodes, weights, square, "b", scale=[0.01, 0.02, 0.03, 0.04], zero=zeros, axis=0)
    nodes.append(helper.make_node("Transpose", ["b"], ["bt"], name="turn", perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", [gd, "bt"], ["y"], name="several"))
    path = saved(model(nodes, weights, {"x": [2, 4]}), tmp_path / "m.onnx")
    said = done("convert", path, "-o", tmp_path / "o")
    assert "rounded again: 1: several." in said and "keep their integers" in said
    made = onnx.load(tmp_path / "o" / "m_deploy_model.onnx")
    same_array(constants(made)[named(made)["equal"].input[1]], np.ascontiguousarray(square.T))
    assert all(r.scale_w.size == 1 for r in read_record(
        (tmp_path / "o" / "m_record.txt").read_text()).values())  # fmt: skip
    assert near(path, tmp_path / "o") < 0.02


def test_a_bias_at_the_end_of_int32_leaves_room_for_the_sums(done, tmp_path):
    """As quantizers write a channel whose weights are next to nothing."""
    nodes, weights = [], {}
    x = pair(nodes, weights, "x", "xd", scale=0.01)
    scales = np.float32([0.02, 1e-9, 0.02, 0.02])
    zeros = np.zeros(4, np.int8)
    int8_weight(nodes, weights, INTEGERS, "w", scale=scales, zero=zeros, axis=0)
    codes = np.int32([5, 2**31 - 1, -7, 0])
    int8_weight(nodes, weights, codes, "b", scale=scales * np.float32(0.01), axis=0)
    nodes.append(helper.make_node("Conv", [x, "w", "b"], ["y"], name="conv"))
    path = saved(model(nodes, weights, {"x": [1, 3, 6, 6]}), tmp_path / "m.onnx")
    assert "no room for the sums of products" in done("convert", path, "-o", tmp_path / "o")
    made = onnx.load(tmp_path / "o" / "m_deploy_model.onnx")
    conv, values = named(made)["conv"], constants(made)
    same_array(values[conv.input[1]][[0, 2, 3]], INTEGERS[[0, 2, 3]])
    assert values[conv.input[2]].tolist() == [5, 2**30, -7, 0]
    assert near(path, tmp_path / "o") < 1e-5


def test_a_grouped_transposed_convolution(done, rng, tmp_path):
    nodes, weights = [], {}
    x = pair(nodes, weights, "x", "xd")
    integers = rng.integers(-127, 128, (4, 2, 3, 3)).astype(np.int8)
    int8_weight(
        nodes, weights, integers, "w", scale=[0.01, 0.05], zero=np.zeros(2, np.int8), axis=1
    )
    nodes.append(helper.make_node("ConvTranspose", [x, "w"], ["y"], name="up", group=2))
    path = saved(model(nodes, weights, {"x": [1, 4, 3, 3]}), tmp_path / "m.onnx")
    done("convert", path, "-o", tmp_path / "o")
    record = read_record((tmp_path / "o" / "m_record.txt").read_text())["up"]
    np.testing.assert_array_equal(record.scale_w, np.float32([0.01, 0.05, 0.01, 0.05]))
    assert near(path, tmp_path / "o") < 1e-5


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_relu_that_the_quantizer_took_out_holds_for_float_readers(kind, done, tmp_path):
    """Conv, its pair from 0 on, then a float Sub that sees no negative value, with or without."""
    nodes, weights = [], {"c": np.float32([1.0])}
    x = pair(nodes, weights, "x", "xd")
    int8_weight(nodes, weights, INTEGERS, "w", zero=np.int8(0))
    nodes.append(helper.make_node("Conv", [x, "w"], ["h"], name="conv"))
    h = pair(nodes, weights, "h", "hd", scale=0.031, zero=kind(0))
    nodes.append(helper.make_node("Sub", [h, "c"], ["y"], name="sub"))
    path = saved(model(nodes, weights, {"x": [1, 3, 8, 8]}, opset=21), tmp_path / "m.onnx")
    for flag, ops, limit in (
        ("--keep-rounding", ["Div", "Round", "Clip", "Mul"], 1e-5),
        ("--no-keep-rounding", ["Clip"], 0.01),
    ):
        said = done("convert", path, flag, "-o", tmp_path / "o")
        made = onnx.load(tmp_path / "o" / "m_deploy_model.onnx")
        between = ran_types(made)
        assert between == ["AscendQuant", "Conv", "AscendDequant", *ops, "Sub"]
        assert near(path, tmp_path / "o") < limit and "read through a pair: 1." in said


def ran_types(made):
    return [node.op_type for node in made.graph.node]


def test_pairs_before_a_pool_and_on_the_output_leave_no_trace(done, rng, tmp_path):
    """MaxPool and Flatten hand codes on; the output keeps its name without an Identity."""
    nodes, weights = [], {}
    x = pair(nodes, weights, "x", "xd", zero=np.uint8(128))
    nodes.append(helper.make_node("MaxPool", [x], ["p"], name="pool", kernel_shape=[2, 2]))
    nodes.append(helper.make_node("Flatten", ["p"], ["f"], name="flat"))
    matrix = rng.integers(-127, 128, (24, 4)).astype(np.int8)
    int8_weight(nodes, weights, matrix, "w", zero=np.int8(0))
    nodes.append(helper.make_node("MatMul", ["f", "w"], ["h"], name="mm"))
    pair(nodes, weights, "h", "y", scale=0.5)
    path = saved(model(nodes, weights, {"x": [1, 3, 3, 5]}, ["y"]), tmp_path / "m.onnx")
    done("convert", path, "--no-keep-rounding", "-o", tmp_path / "o")
    made = onnx.load(tmp_path / "o" / "m_deploy_model.onnx")
    wanted = ["MaxPool", "Flatten", "AscendQuant", "MatMul", "AscendDequant"]
    assert ran_types(made) == wanted and made.graph.output[0].name == "y"


def broken(kind):
    """A model that is in no form to be converted, and what is said of it."""
    made = two_convs()
    if kind == "none":
        return model([helper.make_node("Relu", ["x"], ["y"])], {}, {"x": [1]}), "got none"
    if kind == "no layer":
        nodes, weights = [], {}
        x = pair(nodes, weights, "x", "xd")
        nodes.append(helper.make_node("Relu", [x], ["y"]))
        return model(nodes, weights, {"x": [1]}), "give the float model"
    if kind == "integers":
        nodes, weights = [], {}
        pair(nodes, weights, "x", "xd")
        nodes.append(helper.make_node("Cast", ["xd.q"], ["y"], to=1))
        return model(nodes, weights, {"x": [1]}), "read by Cast"
    if kind == "a channel":
        nodes, weights = [], {}
        pair(nodes, weights, "x", "y", scale=[1.0] * 3, zero=np.zeros(3, np.uint8))
        return model(nodes, weights, {"x": [1, 3]}), "one constant scale"
    if kind == "output":
        made.graph.output.append(
            helper.make_tensor_value_info("xd.q", TensorProto.UINT8, [1, 3, 6, 6])
        )
        return made, "as an output"
    if kind == "alone":
        nodes, weights = [], {"s": np.float32(1)}
        nodes.append(helper.make_node("DequantizeLinear", ["x", "s"], ["y"], name="dq"))
        made = model(nodes, weights, {"x": [1]})
        made.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
        return made, "must form pairs"
    return two_convs(opset=10), "opset 11 or newer"


@pytest.mark.parametrize(
    "kind", ["none", "no layer", "integers", "a channel", "output", "alone", "old"]
)
def test_what_is_no_qdq_model_is_one_sentence(kind, ended, tmp_path):
    made, match = broken(kind)
    path = saved(made, tmp_path / "m.onnx")
    assert match in ended("convert", path, "-o", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_no_file_and_no_model(ended, tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"\x08\x00no")
    for path in ("m.onnx", "absent.onnx"):
        ended("convert", tmp_path / path, "-o", tmp_path / "o")
        ended("deploy", tmp_path / path, tmp_path / path, "-o", tmp_path / "o")
