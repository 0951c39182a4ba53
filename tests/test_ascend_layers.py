"""Ascend layers that share a weight, and batches of more than one image."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calib8 import build
from deploy.calibration.observation import CalibrationSubject
from deploy.frontends import load
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.config import read_config
from deploy.targets.ascend.config_keys import QuantConfig
from deploy.targets.ascend.layers import SHARED_WEIGHT, find_layers
from deploy.targets.ascend.preparation import make_default_plan, prepare_model, unfuse_batchnorms
from deploy.targets.ascend.record import read_record
from deploy.tuning.search_options import Tuning
from tests import models
from tests.models import as_float32, make_model, make_node, make_value, parse_nodes, read_markdown
from tests.vendor_models import build_net


def two_pictures(*, tied=False):
    """Both inputs through the same Conv and Gemm; `tied`: an Add reads the Gemm's weight too."""
    rng = np.random.default_rng(5)
    nodes = []
    for word in ("left", "right"):
        nodes += [
            ("Conv", f"{word} w b", f"{word}_c", f"{word}/conv"),
            ("Relu", f"{word}_c", f"{word}_r", f"{word}/relu"),
            ("GlobalAveragePool", f"{word}_r", f"{word}_p", f"{word}/m"),
            ("Flatten", f"{word}_p", f"{word}_f", f"{word}/flat"),
            ("Gemm", f"{word}_f v", f"{word}_g", f"{word}/gemm"),
        ]
    nodes.append(("Sub", "left_g right_g", "d" if tied else "y", "sub"))
    if tied:
        nodes += [("ReduceMean", "v", "t", "mean", {"axes": [0]}), ("Add", "d t", "y", "add")]
    shapes = {"w": (8, 3, 3, 3), "b": (8,), "v": (8, 6)}
    constants = {name: rng.normal(0, 0.4, shape) for name, shape in shapes.items()}
    inputs = {word: ["N", 3, 8, 8] for word in ("left", "right")}
    return build_net(nodes, inputs, {"y": ["N", 6]}, constants)


def computed(model, feed):
    return OrtSession.open(model, threads=1).run(feed)["y"]


def samples(count=8):
    left_images = np.random.default_rng(1).normal(size=(count, 3, 8, 8)).astype(np.float32)
    return {"left": left_images, "right": (left_images * 0.2).astype(np.float32)}


@pytest.fixture
def pictures_built(command, tmp_path):
    """(model, target, effort) -> the report of its build; the model and the files it wrote."""

    def build(model, target="ascend", effort=0):
        onnx.save(model, tmp_path / "net.onnx")
        np.savez(tmp_path / "x.npz", **samples())
        arguments = (
            "--target",
            target,
            "--effort",
            effort,
            "--duration",
            0,
            "--out",
            tmp_path / "o",
        )
        command("build", tmp_path / "net.onnx", "--images", tmp_path / "x.npz", *arguments)
        return read_markdown(tmp_path / "o"), lambda ending: tmp_path / "o" / f"net{ending}"

    return build


def loss(model, file_of):
    """The squared error of the fake-quant model, over the squares of the float model's output."""
    fake = onnx.load(file_of("_fake_quant_model.onnx"))
    expected, actual = computed(model, samples()), computed(fake, samples())
    return np.square(expected - actual).mean() / np.square(expected).mean()


@pytest.mark.parametrize("effort", [0, 1])
def test_layers_sharing_a_weight_are_int8(pictures_built, effort):
    """AMCT refuses all of them; two pictures through one network were no model for Ascend."""
    model = two_pictures()
    out, file_of = pictures_built(model, effort=effort)
    deploy = onnx.load(file_of("_deploy_model.onnx"))
    layers = [node for node in deploy.graph.node if node.op_type in ("Conv", "Gemm")]
    tensors = {tensor.name: tensor for tensor in deploy.graph.initializer}
    stored = [tensors[n.input[1]].data_type for n in layers]
    among = slice(0, None, 1 + effort)  # a search leaves the Gemms in float, which costs nothing
    assert stored[among] == [TensorProto.INT8] * len(stored[among])
    assert len({n.input[1] for n in layers}) == 4  # atc gets what it gets from AMCT
    assert loss(model, file_of) < 1e-3
    assert "share" in out
    assert "net_modified_model.onnx" in out
    # AMCT itself gets a model whose layers share nothing: it refuses a configuration or a record
    # that names a layer which shares its weight
    modified = onnx.load(file_of("_modified_model.onnx"))
    config = json.loads(file_of("_config.json").read_text())
    named = {name for name, value in config.items() if isinstance(value, dict)}
    assert named == {"left/conv", "right/conv", "left/gemm", "right/gemm"}
    assert find_layers(modified).layers.keys() == named
    np.testing.assert_array_equal(*(computed(network, samples(2)) for network in (model, modified)))


@pytest.mark.parametrize("which", ["net.onnx", "o/net_modified_model.onnx"])
def test_record_reproduces_models_of_both_forms(pictures_built, command, tmp_path, which):
    _, file_of = pictures_built(two_pictures())
    record = file_of("_record.txt")
    command("ascend", "deploy", tmp_path / which, record, "--out", tmp_path / "again")
    (redeployed,) = (tmp_path / "again").glob("*_deploy_model.onnx")
    original_weights, redeployed_weights = (
        weights_of(onnx.load(path)) for path in (file_of("_deploy_model.onnx"), redeployed)
    )
    assert original_weights.keys() == redeployed_weights.keys()
    assert all(
        np.array_equal(original_weights[name], redeployed_weights[name])
        for name in original_weights
    )


def weights_of(model):
    """Node -> its second input, where that is a constant."""
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    read = {node.name: node.input[1] for node in model.graph.node if len(node.input) > 1}
    return {node: constants[name] for node, name in read.items() if name in constants}


def test_other_weight_readers_get_float_values(pictures_built):
    model = two_pictures(tied=True)
    _, file_of = pictures_built(model)
    assert loss(model, file_of) < 1e-3


def test_shared_weights_avoid_large_copies(monkeypatch):
    model = two_pictures()
    prepared, graph = prepare_model(model)
    weight_names = {tensor.name for tensor in model.graph.initializer}
    assert len({layer.weight for layer in graph.layers.values()}) == 4
    assert {plan.name for plan in make_default_plan(model).weights} == {"w", "v"} < weight_names
    assert (
        len(prepared.graph.initializer) == len(model.graph.initializer) + 2
    )  # one keeps what there is
    # All layers of one weight stay as they are then, and say why.
    monkeypatch.setattr("deploy.targets.ascend.preparation._MAX_COPY_BYTES", 4 * 2 * 8 * 6)
    _, graph = prepare_model(two_pictures())
    assert graph.layers.keys() == {"left/gemm", "right/gemm"}
    assert {graph.float_reasons[f"{word}/conv"] for word in ("left", "right")} == {SHARED_WEIGHT}


def test_model_without_shared_weights_is_not_copied(small_cnn):
    model = load(small_cnn).model
    assert prepare_model(model)[0] is model


def test_unfusing_leaves_the_unfolded_model_alone():
    weights = {"w": np.ones((2, 3, 1, 1), np.float32)}
    weights |= dict.fromkeys("gbmv", np.ones(2, np.float32))
    nodes = "c = Conv (x, w) y = BatchNormalization (c, g, b, m, v)"
    model = make_model(nodes, {"x": (1, 3, 4, 4)}, {"y": (1, 2, 4, 4)}, weights)
    subject = CalibrationSubject(loaded=load(model), sample_count=1, user_model=model)
    fused, _ = unfuse_batchnorms(subject, QuantConfig())
    assert len(fused.graph.node) == 1
    assert len(subject.unfolded.model.graph.node) == 2


def test_qdq_model_keeps_shared_weight_layers(pictures_built, command, tmp_path):
    _, file_of = pictures_built(two_pictures(), target="tensorrt")
    command("ascend", "convert", file_of(".tensorrt.qdq.onnx"), "--out", tmp_path / "again")
    (file_of,) = (tmp_path / "again").glob("*_deploy_model.onnx")
    assert [n.op_type for n in onnx.load(file_of).graph.node].count("AscendDequant") == 4


HFMG = "common_config { hfmg_quantize { num_of_bins: 1024 } }\n"
DMQ = "common_config { ifmr_quantize { } dmq_balancer { migration_strength: 0.5 } }\n"


@pytest.fixture(scope="module")
def fixed(small_cnn, tmp_path_factory):
    """The same model with a batch of 4."""
    return models.save_fixed_batch(small_cnn, tmp_path_factory.mktemp("fixed") / "small_cnn.onnx")


@pytest.fixture
def ascend_record(run, tmp_path):
    """(model, rows, arguments, configuration) -> record, config, output; each in its folder."""

    def build(model, rows, *arguments, config="", reuse_folder=False):
        folder = tmp_path / str(len(list(tmp_path.iterdir())) - reuse_folder)
        folder.mkdir(exist_ok=True)
        # brighter from image to image, so that it shows which of them make up a batch
        size = np.geomspace(1, 30, 12).reshape(12, 1, 1, 1)
        x = np.random.default_rng(1).normal(size=(12, 3, 16, 16)) * size
        np.save(folder / "x.npy", x[:rows].astype(np.float32))
        (folder / "a.cfg").write_text(config)
        config_option = ("--ascend-config", folder / "a.cfg") if config else ()
        out, target = folder / "out", ("--target", "ascend", "--effort", 0, "--duration", 0)
        images = ("--images", folder / "x.npy", "--out", out)
        code, output, err = run("build", model, *images, *target, *config_option, *arguments)
        if code:
            return None, None, err
        record = read_record((out / "small_cnn_record.txt").read_text())
        settled = read_config((out / "small_cnn_config.json").read_text())
        return record, settled, " ".join((out / "report.md").read_text().split()) + output

    return build


def scales(record):
    return [float(layer.scale_d) for layer in record.values()]


@pytest.mark.parametrize("config", [HFMG, DMQ])
def test_fixed_batch_uses_four_images(config, ascend_record, small_cnn, fixed):
    text = "batch_num: 2\n" + config
    joined, _, output = ascend_record(small_cnn, 8, "--amct-batch", 4, config=text)
    fixed_record, _, _ = ascend_record(fixed, 8, config=text)
    single, _, _ = ascend_record(small_cnn, 8, config=text.replace("2", "8", 1))
    assert scales(joined) == pytest.approx(scales(fixed_record), rel=1e-5)
    for name, layer in joined.items():
        np.testing.assert_allclose(layer.dmq_factors, fixed_record[name].dmq_factors, rtol=1e-5)
        assert layer.offset_d == fixed_record[name].offset_d
    assert scales(joined) != pytest.approx(scales(single), rel=1e-3)
    assert "over 8 samples in 2 batches of 4." in output


@pytest.mark.parametrize("exact", [(), ("--exact-ifmr",)])
def test_batch_num_counts_batches(exact, ascend_record, small_cnn):
    text = "batch_num: 2\ncommon_config { ifmr_quantize { } }\n"
    two_batches, _, output = ascend_record(small_cnn, 8, "--amct-batch", 3, *exact, config=text)
    single_images, _, _ = ascend_record(small_cnn, 6, *exact, config=text.replace("2", "6", 1))
    assert scales(two_batches) == scales(
        single_images
    )  # IFMR sees all values at once, however they came
    assert "6 samples in 2 batches of 3" in output
    assert "6 of 8 samples were used" in output
    assert "AMCT's default" not in output
    few = "activation_offset: true\n"  # batch_num is 1
    _, _, output = ascend_record(small_cnn, 8, *exact, "--accept", config=few)
    assert "Warning       ascend: batch_num of the configuration is 1" in output
    assert "IFMR over 1 sample." in output
    _, _, err = ascend_record(small_cnn, 8, "--amct-batch", 5, config=text.replace("2", "3", 1))
    assert "needs batch_num batches, 3, got 2 of 5 images" in err


@pytest.mark.slow
def test_a_last_batch_may_be_smaller(ascend_record, small_cnn):
    _, config, output = ascend_record(small_cnn, 10, "--amct-batch", 4)
    assert config.batch_num == 3
    assert "10 samples in 3 batches of 4, the last one of 2." in output
    text = "batch_num: 3\n" + HFMG
    partial, _, _ = ascend_record(small_cnn, 10, "--amct-batch", 4, config=text)
    short, _, _ = ascend_record(small_cnn, 8, "--amct-batch", 4, config=text.replace("3", "2", 1))
    assert scales(partial) != pytest.approx(scales(short), rel=1e-3)  # its images count
    threads, _, _ = ascend_record(small_cnn, 10, "--amct-batch", 4, "--threads", 3, config=text)
    assert scales(threads) == scales(partial)


def test_fixed_batch_model_takes_full_batches(ascend_record, fixed):
    _, _, err = ascend_record(fixed, 8, "--amct-batch", 6)
    assert "the model's batch size, 4, got 6" in err
    _, config, output = ascend_record(fixed, 8, "--amct-batch", 8)
    assert config.batch_num == 1
    assert "8 samples in 1 batch of 8" in output
    _, config, output = ascend_record(fixed, 8)
    assert config.batch_num == 2
    assert "8 samples in 2 batches of 4" in output


@pytest.mark.parametrize("config", [HFMG, DMQ])
def test_a_cache_knows_the_batches(config, ascend_record, small_cnn):
    text = "batch_num: 2\n" + config
    first_record, _, _ = ascend_record(small_cnn, 8, "--amct-batch", 4, config=text)
    arguments = ("--amct-batch", 4, "--require-cache")
    cached_record, _, _ = ascend_record(small_cnn, 8, *arguments, config=text, reuse_folder=True)
    assert scales(cached_record) == scales(first_record)
    arguments = ("--amct-batch", 2, "--require-cache")
    _, _, err = ascend_record(
        small_cnn, 8, *arguments, config=text.replace("2", "4", 1), reuse_folder=True
    )
    assert "cache must fit" in err


def branch(text, output):
    return helper.make_graph(parse_nodes(text), output, [], [make_value(output, None)])


@pytest.mark.parametrize("reader", ["output", "branch"])
def test_weight_read_by_outputs_stays_unchanged(reader, tmp_path):
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(0, 0.3, (4, 1, 3, 3)), "k": rng.normal(0, 0.3, (4, 4, 1, 1))}
    weights = {**as_float32(weights), "yes": np.array(True)}
    nodes = parse_nodes("c = Conv(x, w) r = Relu(c) b = Conv(r, k)")
    if reader == "branch":
        two = {
            "then_branch": branch("t = Conv(b, k)", "t"),
            "else_branch": branch("e = Relu(b)", "e"),
        }
        nodes = [*nodes, make_node("If", "yes", "y", "if", **two)]
    else:
        nodes = [*nodes, *parse_nodes("y = Relu(b)")]
    outputs = {"y": None, **({"k": None} if reader == "output" else {})}
    model = make_model(nodes, {"x": [1, 1, 8, 8]}, outputs, weights)
    samples = [{"x": rng.normal(size=(1, 1, 8, 8)).astype(np.float32)} for _ in range(4)]
    targets = ["onnxruntime", "tensorrt", "ascend"]
    quick = {"duration_s": 0, "tuning": Tuning(effort=0)}
    report = build(model, samples, targets=targets, out=tmp_path, **quick)
    assert not report.failed
    assert not report.unusable
