"""`calib8 build` of a Q/DQ model: its own scales, in every spelling, for every target."""

import json
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.frontends import load_float_or_qdq
from deploy.graph.placement import ONNXRUNTIME
from deploy.runtimes.ort import OrtSession
from deploy.targets.prequantized import qdq_decisions
from tests.models import make_model, make_node, run_command, save_net

ALL = ("--target", "onnxruntime,tensorrt,ascend")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.npy"
    np.save(path, np.random.default_rng(5).normal(size=(6, 3, 16, 16)).astype(np.float32))
    return path


@pytest.fixture(scope="module")
def made(small_cnn, data, tmp_path_factory):
    """The Q/DQ models that calib8 makes of a float one, one a target."""
    out = tmp_path_factory.mktemp("made")
    files = {
        "onnxruntime": "small_cnn.int8.onnx",
        "tensorrt": "small_cnn.tensorrt.qdq.onnx",
        "ascend": "small_cnn_amct_qdq.onnx",
    }
    words = ("--images", data, "--out", out, "--duration", 0, "--effort", 0, *ALL)
    run_command("build", small_cnn, *words)
    return {target: out / file for target, file in files.items()}


def as_path(model, folder):
    return save_net(model, folder / "net.onnx") if isinstance(model, onnx.ModelProto) else model


@pytest.fixture
def built(run, data, tmp_path):
    """(model, further words) -> its folder, report and the notes of each target."""

    def call(model, *words, images=True):
        fed, out = ("--images", data) if images else (), tmp_path / "out"
        run.ok("build", as_path(model, tmp_path), *fed, "--out", out, "--duration", 0, *words)
        report = json.loads((out / "report.json").read_text())
        return out, report, {one["name"]: " ".join(one["notes"]) for one in report["targets"]}

    return call


@pytest.fixture
def refused(run, data, tmp_path):
    """(model, further words) -> the one sentence of a build that must be refused."""

    def call(model, *words, images=True):
        out = tmp_path / "no"
        words = (*(("--images", data) if images else ()), "--out", out, "--duration", 0, *words)
        code, said, err = run("build", as_path(model, tmp_path), *words)
        assert code and not said and err.count("\n") == 1 and not out.exists(), (said, err)
        return err

    return call


def grids(model):
    """Activation tensor -> (scale, zero point) of its pair."""
    index = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    return {
        n.input[0].removesuffix("/float"): (index[n.input[1]].item(), index[n.input[2]].item())
        for n in model.graph.node
        if n.op_type == "QuantizeLinear" and n.input[0] not in index
    }


def integers(model):
    """Layer -> its stored integers and scales, of weights behind a DequantizeLinear."""
    tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    makers = {n.output[0]: n for n in model.graph.node}
    found = {}
    for node in model.graph.node:
        pair = makers.get(node.input[1]) if node.op_type in ("Conv", "Gemm", "MatMul") else None
        if pair is None:
            continue
        scale = tensors[pair.input[1]]
        stored = tensors.get(pair.input[0])
        if stored is None:  # a float weight with a pair
            weight = tensors[makers[pair.input[0]].input[0]]
            axis = next((a.i for a in pair.attribute if a.name == "axis"), 1)
            shape = [-1 if a == axis and scale.size > 1 else 1 for a in range(weight.ndim)]
            stored = np.rint(weight / scale.reshape(shape)).astype(np.int8)
        found[node.name] = (stored, scale)
    return found


def test_a_layer_whose_output_has_no_pair_computes_in_float(small_cnn):
    model = load_float_or_qdq(small_cnn).model
    convs = [node.name for node in model.graph.node if node.op_type == "Conv"]
    floats = {convs[0]: "why"}
    trained = SimpleNamespace(
        name="a/m.onnx", float_reasons=floats, nodes_with_output_pair={convs[1]}
    )
    found = {d.node: d.reason for d in qdq_decisions(trained, model, ONNXRUNTIME)}
    missing = "no pair stands on what it makes in m.onnx"
    assert [found[name] for name in convs] == ["why", "", missing]


def test_the_own_grid_of_onnxruntime_is_kept_to_the_bit(built, made):
    out, report, notes = built(made["onnxruntime"], *ALL)
    assert (out / "small_cnn.int8.int8.onnx").read_bytes() == made["onnxruntime"].read_bytes()
    assert "Kept to the bit" in notes["onnxruntime"] and "Kept" not in notes["tensorrt"]
    assert not (out / "small_cnn.int8.cache").exists()
    assert report["calibration"]["reason"].startswith("the model is quantized already")
    assert "calibration_runs" not in report["work"]
    assert any(node["precision"] == "uint8" for node in report["targets"][0]["nodes"])


def test_the_own_grid_of_tensorrt_is_kept_with_its_cache_and_typed_model(built, made):
    out, _, notes = built(made["tensorrt"], *ALL)
    own = onnx.load(out / "small_cnn.tensorrt.qdq.tensorrt.qdq.onnx")
    theirs = onnx.load(made["tensorrt"])
    assert grids(own) == grids(theirs)
    ours, given = integers(own), integers(theirs)
    assert ours.keys() == given.keys()
    assert all(np.array_equal(ours[n][0], given[n][0]) for n in ours)
    assert "Kept to the bit" in notes["tensorrt"]
    cache = (out / "small_cnn.tensorrt.qdq.tensorrt.cache").read_text()
    for tensor, (scale, _) in grids(theirs).items():
        assert f"{tensor}: {np.float32(scale).view(np.uint32):08x}" in cache
    typed = onnx.load(out / "small_cnn.tensorrt.qdq.tensorrt.typed.onnx")
    assert {t.data_type for t in typed.graph.initializer} & {TensorProto.FLOAT16}
    assert "narrow type" in notes["tensorrt"]


def test_uint8_becomes_symmetric_int8_of_the_same_real_range_and_integers(built, made):
    out, _, notes = built(made["onnxruntime"], "--target", "tensorrt")
    theirs = grids(onnx.load(made["onnxruntime"]))
    own = onnx.load(out / "small_cnn.int8.tensorrt.qdq.onnx")
    assert grids(own)
    for tensor, (scale, zero) in grids(own).items():
        step, offset = theirs[tensor]
        farther = max(offset, 255 - offset) * step
        assert zero == 0 and scale == pytest.approx(farther / 127, rel=1e-6)
    assert "TensorRT's are int8 with zero point 0" in notes["tensorrt"]
    given, ours = integers(onnx.load(made["onnxruntime"])), integers(own)
    shared = ours.keys() & given.keys()
    assert shared
    for layer in shared:
        assert all(np.array_equal(*pair) for pair in zip(ours[layer], given[layer], strict=True))
    assert "rounded again" not in notes["tensorrt"]


def test_symmetric_int8_becomes_uint8_of_the_same_real_range(built, made):
    out, _, notes = built(made["tensorrt"], "--target", "onnxruntime")
    theirs = grids(onnx.load(made["tensorrt"]))
    own = grids(onnx.load(out / "small_cnn.tensorrt.qdq.int8.onnx"))
    assert {"x", "r1", "r2", "r3"} <= own.keys() & theirs.keys()
    assert own["x"] == (theirs["x"][0], 128)
    for tensor in ("r1", "r2", "r3"):  # never negative
        assert own[tensor] == (pytest.approx(theirs[tensor][0] * 127 / 255, rel=1e-6), 0)
    assert "128 higher" in notes["onnxruntime"]


def test_ascend_takes_codes_and_integers_over(built, made):
    out, _, notes = built(made["onnxruntime"], "--target", "ascend")
    from deploy.targets.ascend.record import read_record

    records = read_record((out / "small_cnn.int8_record.txt").read_text())
    given = onnx.load(made["onnxruntime"])
    reads = {n.name: n.input[0].removesuffix("/dequantized") for n in given.graph.node}
    own = grids(given)
    assert records
    for layer, one in records.items():
        scale, zero = own[reads[layer]]
        assert (one.scale_d, one.offset_d) == (np.float32(scale), zero - 128)
    assert "those of" in notes["ascend"]


def test_images_measure_beside_the_model_itself_or_the_one_that_is_named(built, made, small_cnn):
    _, report, _ = built(made["onnxruntime"])
    assert any("extracted from small_cnn.int8.onnx" in note for note in report["notes"])
    own = report["engines"][1]["accuracy"]
    _, report, _ = built(made["onnxruntime"], "--float", small_cnn, "--force")
    assert any(f"FP32 is {small_cnn}" in note for note in report["notes"])
    assert report["engines"][0]["path"] == str(small_cnn)
    assert report["engines"][1]["accuracy"] != own
    assert not any("calibration images" in note for note in report["notes"])


def test_without_images_files_are_written_and_nothing_is_measured(built, made):
    out, report, _ = built(made["onnxruntime"], *ALL, images=False)
    assert any("No images were given" in note for note in report["notes"])
    assert not any({"accuracy", "latency"} & set(one) for one in report["engines"])
    assert (out / "small_cnn.int8_deploy_model.onnx").exists()
    assert (out / "small_cnn.int8.tensorrt.cache").exists()


def test_what_was_built_is_verified_explained_and_reported(built, made, run, data):
    out, _, _ = built(made["tensorrt"], "--target", "onnxruntime")
    run.ok("verify", out)
    run.ok("report", out)
    assert "Images" in run.ok("explain", out, "--images", data, "--limit", 2)
    run.ok("build", "--config", out / "calib8.toml", "--out", out.with_name("again"))
    one, other = (f / "small_cnn.tensorrt.qdq.int8.onnx" for f in (out, out.with_name("again")))
    assert one.read_bytes() == other.read_bytes()


def test_in_python_a_model_in_memory_is_built_alike(made, data, tmp_path):
    import calib8

    given = onnx.load(made["onnxruntime"])
    before = given.SerializeToString(deterministic=True)
    report = calib8.build(given, np.load(data)[:2, None], out=tmp_path / "out", duration_s=0)
    assert report.engines[1].accuracy is not None
    assert given.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    "words",
    [
        ("--method", "minmax"),
        ("--cache", "c.cache"),
        ("--require-cache",),
        ("--trust-cache",),
        ("--refresh",),
        ("--resume",),
        ("--keep-float", "op:Conv"),
        ("--effort", "2"),
        ("--plan", __file__),
        ("--repair", "bias"),
        ("--until-stable",),
        ("--scheduler", "host:8786"),
    ],
)
def test_options_of_a_calibration_are_refused(refused, made, words):
    said = refused(made["onnxruntime"], *words)
    assert words[0] in said and "is quantized already" in said


def test_a_calibrators_script_is_refused(refused, made, tmp_path):
    (tmp_path / "old.py").write_text("def make():\n    return None\n")
    words = ("--calibrator-script", f"{tmp_path / 'old.py'}:make")
    assert "old.py" in refused(made["onnxruntime"], *words, images=False)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("onnxruntime", ("--int8-stem",)),
        ("onnxruntime", ("--weight-bits", "7")),
        ("onnxruntime", ("--dynamic-matmul",)),
        ("tensorrt", ("--precision", "fp8")),
        ("tensorrt", ("--calibrator", "entropy2")),
        ("tensorrt", ("--float-behind-concat",)),
        ("tensorrt", ("--pair-behind-deconv",)),
        ("ascend", ("--exact-ifmr",)),
        ("ascend", ("--amct-batch", "2")),
        ("ascend", ("--ascend-config", __file__)),
    ],
)
def test_options_of_a_target_that_quantize_are_refused(refused, made, target, words):
    said = refused(made["onnxruntime"], "--target", target, *words)
    assert words[0] in said and "decides how" in said and "quantized already" in said


def test_float_is_of_a_quantized_model_with_the_same_ends(
    refused, made, small_cnn, detector, wording
):
    assert "leave it out" in refused(small_cnn, "--float", small_cnn)
    wording.check(refused(made["onnxruntime"], "--float", detector))
    assert "give --images too" in refused(made["onnxruntime"], "--float", small_cnn, images=False)
    assert "quantized already" in refused(made["onnxruntime"], "--float", made["onnxruntime"])


@pytest.mark.parametrize("flag", ["--eval-images", "--labels", "--metric"])
def test_what_is_measured_on_images_needs_some(flag, refused, made, data, tmp_path):
    (tmp_path / "labels.txt").write_text("1\n" * 6)
    (tmp_path / "own.py").write_text("def score(fp32, int8, label):\n    return 1.0\n")
    metric = f"{tmp_path / 'own.py'}:score"
    given = {"--eval-images": data, "--labels": tmp_path / "labels.txt", "--metric": metric}
    said = refused(made["onnxruntime"], flag, given[flag], images=False)
    assert f"{flag} is for what is measured on images" in said and "give --images too" in said


_RNG = np.random.default_rng(8)  # of these alone
W1 = _RNG.normal(size=(8, 3, 3, 3)).astype(np.float32) * 0.2
W2 = _RNG.normal(size=(4, 8, 3, 3)).astype(np.float32) * 0.2
B1, B2 = (_RNG.normal(size=n).astype(np.float32) * 0.1 for n in (8, 4))
M = _RNG.integers(-127, 128, (5, 8)).astype(np.int8)
M[0, 0] = -128  # a code that calib8's own weights leave out


class Writer:
    """A Q/DQ model of two Convs, spelled as told."""

    def __init__(self, *, constants=False):
        self.nodes, self.tensors, self.constants = [], [], constants

    def hold(self, name, value):
        if self.constants:
            tensor = numpy_helper.from_array(np.asarray(value), f"{name}_value")
            self.nodes.append(make_node("Constant", "", [name], value=tensor))
        else:
            self.tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op, inputs, output, **given):
        self.nodes.append(make_node(op, inputs, [output], name=f"n_{output}", **given))
        return output

    def pair(self, tensor, scale, zero, **given):
        own = [self.hold(f"{tensor}_s", np.asarray(scale, np.float32))]
        own += [] if zero is None else [self.hold(f"{tensor}_z", zero)]
        q = self.node("QuantizeLinear", [tensor, *own], f"{tensor}_q", **given)
        return self.node("DequantizeLinear", [q, *own], f"{tensor}_dq", **given)

    def weight(self, name, value):
        """A float weight with a pair a channel, of seven bits, whose products no CPU saturates."""
        scale, zeros = per_channel(value), np.zeros(len(value), np.int8)
        return self.pair(self.hold(name, value), scale, zeros, axis=0)

    def conv(self, *inputs, to="y"):
        return self.node("Conv", inputs, to, pads=[1] * 4)

    def first(self, x):
        """Conv and Relu of W1 and B1."""
        made = self.conv(x, self.weight("w1", W1), self.hold("b1", B1), to="c1")
        return self.node("Relu", [made], "r1")

    def model(self, output, opset=17, shape=(1, 4, 16, 16)):
        ends = {"x": [1, 3, 16, 16]}, {output: shape}
        return make_model(self.nodes, *ends, self.tensors, opset=opset, ir=9 if opset < 21 else 10)


def per_channel(weight):
    return (np.abs(weight).reshape(len(weight), -1).max(1) / 63).astype(np.float32)


def modelopt():
    """Per-tensor int8 with zero point 0, Constant nodes, float weights with a pair."""
    w = Writer(constants=True)
    a = w.pair(w.first(w.pair("x", 0.03, np.int8(0))), 0.02, np.int8(0))
    return w.model(w.conv(a, w.weight("w2", W2), w.hold("b2", B2)))


def onnxruntime():
    """Affine uint8, the Relu gone into its pair, int8 weights and int32 biases as integers."""
    w = Writer()
    x, scale = w.pair("x", 0.03, np.uint8(120)), 0.03
    for place, (weight, bias) in enumerate(((W1, B1), (W2, B2)), start=1):
        own = per_channel(weight)
        stored = np.rint(weight / own.reshape((-1, 1, 1, 1))).astype(np.int8)
        held = [w.hold(f"w{place}", stored), w.hold(f"w{place}_s", own)]
        held.append(w.hold(f"w{place}_z", np.zeros(len(own), np.int8)))
        dq = w.node("DequantizeLinear", held, f"w{place}_dq", axis=0)
        steps = (own * np.float32(scale)).astype(np.float32)
        told = np.rint(bias / steps).astype(np.int32)
        held = [w.hold(f"b{place}", told), w.hold(f"b{place}_s", steps)]
        b = w.node("DequantizeLinear", held, f"b{place}_dq", axis=0)
        zero, scale = (np.uint8(0), 0.012) if place == 1 else (np.uint8(128), 0.06)
        x = w.pair(w.conv(x, dq, b, to=f"c{place}"), scale, zero)
    return w.model(x)


def nncf():
    """Asymmetric uint8, weights per channel behind FakeQuantize's pair, int8 with offset too."""
    w = Writer()
    a = w.pair(w.first(w.pair("x", 0.025, np.uint8(131))), 0.01, np.int8(-128))
    w2 = w.pair(w.hold("w2", W2), np.float32(0.01), np.int8(0))
    return w.model(w.conv(a, w2, w.hold("b2", B2)))


def torchao():
    """The zero point left out where it is 0 of uint8, a Linear whose weight is transposed."""
    w = Writer()
    a = w.first(w.pair("x", 0.03, np.uint8(128)))
    a = w.pair(w.node("GlobalAveragePool", [a], "p"), 0.02, None)
    a = w.node("Flatten", [a], "f")
    dq = [w.hold("m", M), w.hold("m_s", np.full(5, 0.01, np.float32))]
    dq.append(w.hold("m_z", np.zeros(5, np.int8)))
    m = w.node("Transpose", [w.node("DequantizeLinear", dq, "m_dq", axis=0)], "mt", perm=[1, 0])
    return w.model(w.node("MatMul", [a, m], "y"), shape=(1, 5))


def tflite():
    """Codes that are padded and transposed between the two nodes of a pair."""
    w = Writer()
    own = [w.hold("x_s", np.float32(0.03)), w.hold("x_z", np.uint8(120))]
    q = w.node("QuantizeLinear", ["x", *own], "x_q")
    edges = w.hold("edges", np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    padded = w.node("Pad", [q, edges, own[1]], "x_p")
    a = w.node("Transpose", [padded], "x_t", perm=[0, 1, 3, 2])
    a = w.pair(w.first(w.node("DequantizeLinear", [a, *own], "x_dq")), 0.02, np.int8(0))
    return w.model(w.conv(a, w.weight("w2", W2), w.hold("b2", B2)), shape=(1, 4, 18, 18))


SPELLED = [modelopt, onnxruntime, nncf, torchao, tflite]


@pytest.mark.parametrize("spelled", SPELLED, ids=lambda one: one.__name__)
def test_every_spelling_goes_to_every_target(built, spelled, tmp_path):
    out, report, _ = built(save_net(spelled(), tmp_path / "net.qdq.onnx"), *ALL)
    assert not any(one["error"] for one in report["targets"])
    for one in report["targets"]:
        assert sum(n["precision"] in ("int8", "uint8") for n in one["nodes"]) >= 1, one["name"]
    accuracy = [one["accuracy"] for one in report["engines"][1:]]
    assert all(part["sqnr_db"] > 20 for one in accuracy for part in one["parts"])
    assert (out / "net.qdq_deploy_model.onnx").exists()


@pytest.mark.parametrize("spelled", SPELLED, ids=lambda one: one.__name__)
def test_the_float_model_is_the_quantized_one_without_its_rounding(spelled, data):
    loaded = load_float_or_qdq(spelled())
    fed = {"x": np.load(data)[:1].clip(-2, 2)}
    plain = OrtSession.open(loaded.model, threads=1).run(fed)
    for name, value in OrtSession.open(spelled(), threads=1).run(fed).items():
        assert not [n for n in loaded.model.graph.node if n.op_type.endswith("quantizeLinear")]
        error = np.square(plain[name] - value).mean() / np.square(value).mean()
        assert error < 0.01, name


@pytest.mark.parametrize("version", ["8.6.1.6", "10.13.0.35", "11.0.0.10"])
def test_an_engine_is_built_from_the_pairs_and_not_from_the_cache(built, made, tensorrt, version):
    trt = tensorrt(version)
    built(made["tensorrt"], "--target", "tensorrt")
    (network,) = trt.STORY.networks
    assert any(node.op_type == "DequantizeLinear" for node in network.model.graph.node)


def half():
    """`modelopt` with float16 for what is not quantized, its scales too."""
    model = modelopt()
    held = [a.t for n in model.graph.node for a in n.attribute if a.name == "value"]
    for tensor in (one for one in held if one.data_type == TensorProto.FLOAT):
        array = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    model.opset_import[0].version = 19
    return model


def test_a_float16_model_is_kept_for_tensorrt_and_float32_elsewhere(built, data, tmp_path):
    np.save(tmp_path / "x.npy", np.load(data).astype(np.float16))
    out, report, _ = built(half(), "--images", tmp_path / "x.npy", *ALL, images=False)
    own, trt, _ = report["targets"]
    for one in (own, trt):
        assert {n["name"]: n for n in one["nodes"]}["n_c1"]["precision"] in ("int8", "uint8")
    assert any("Kept to the bit" in note for note in trt["notes"])
    assert (out / "net.tensorrt.typed.onnx").exists()


WIDE = (1, 8, 16, 16)


def test_int32_biases_are_float_in_tensorrts_model(built):
    w = Writer()
    x, w1 = w.pair("x", 0.03, np.int8(0)), w.weight("w1", W1)
    steps = (per_channel(W1) * np.float32(0.03)).astype(np.float32)
    told = np.rint(B1 / steps).astype(np.int32)
    b = w.node("DequantizeLinear", [w.hold("b", told), w.hold("b_s", steps)], "b_dq", axis=0)
    out, _, notes = built(w.model(w.conv(x, w1, b), shape=WIDE), "--target", "tensorrt")
    own = onnx.load(out / "net.tensorrt.qdq.onnx")
    assert "Kept to the bit" in notes["tensorrt"]
    assert not [t for t in own.graph.initializer if t.data_type == TensorProto.INT32]
    held = {t.name: numpy_helper.to_array(t) for t in own.graph.initializer}
    assert np.array_equal(held["b_dq"], told.astype(np.float32) * steps)


def test_a_depthwise_layer_that_gets_more_channels_keeps_its_integers(built):
    w, rng = Writer(), np.random.default_rng(3)
    x = w.pair(w.first(w.pair("x", 0.03, np.int8(0))), 0.02, np.int8(-128))
    for name, shape, group in (("a", (20, 8, 1, 1), 1), ("b", (20, 1, 3, 3), 20)):
        held = w.weight(f"w{name}", rng.normal(size=shape).astype(np.float32))
        x = w.node("Conv", [x, held], name, group=group, pads=[shape[2] // 2] * 4)
        x = w.pair(x, 0.05, np.int8(0))
    last = w.weight("wc", rng.normal(size=(4, 20, 3, 3)).astype(np.float32))
    model = w.model(w.conv(x, last))
    out, _, notes = built(model, "--target", "onnxruntime", "--for", "vnni")
    given, own = integers(model)["n_b"], integers(onnx.load(out / "net.int8.onnx"))["n_b"]
    assert len(own[0]) == 32
    assert all(np.array_equal(o[:20], g) for o, g in zip(own, given, strict=True))
    assert "rounded again" not in notes["onnxruntime"]


def test_the_lowest_code_of_a_weight_is_kept(built):
    out, _, notes = built(torchao(), "--target", "tensorrt")
    own = integers(onnx.load(out / "net.tensorrt.qdq.onnx"))
    assert own["n_y"][0].min() == -128 and "rounded again" not in notes["tensorrt"]


def test_weights_with_a_zero_point_are_rounded_again_and_said_so(built):
    w = Writer()
    x = w.pair("x", 0.03, np.uint8(128))
    w1 = w.pair(w.hold("w1", W1), np.float32(0.01), np.uint8(130))
    _, _, notes = built(w.model(w.conv(x, w1), shape=WIDE), "--target", "tensorrt,onnxruntime")
    assert "a bias that fills int32): 1 (n_y)" in notes["tensorrt"]
    assert "Kept to the bit" in notes["onnxruntime"]


def test_a_layer_that_is_float_there_stays_float(built):
    w = Writer()
    c = w.conv(w.pair("x", 0.03, np.uint8(128)), w.weight("w1", W1), to="c1")
    _, report, _ = built(w.model(w.conv(c, w.hold("w2", W2))), "--target", "tensorrt,ascend")
    for one in report["targets"]:
        (node,) = (n for n in one["nodes"] if n["name"] == "n_y")
        assert node["precision"] == "float32" and node["reason"]
    assert "float in net.onnx" in report["targets"][0]["nodes"][1]["reason"]


def test_several_scales_of_a_tensor_are_said(built):
    w = Writer()
    one = w.pair("x", 0.03, np.uint8(128))
    own = [w.hold("s2", np.float32(0.02)), w.hold("z2", np.uint8(128))]
    q = w.node("QuantizeLinear", ["x", *own], "x_q2")
    other = w.node("DequantizeLinear", [q, *own], "x_dq2")
    w1 = w.weight("w1", W1)
    sides = [w.conv(one, w1, to="a"), w.conv(other, w1, to="b")]
    out, report, _ = built(w.model(w.node("Add", sides, "y"), shape=WIDE), "--target", "tensorrt")
    assert any("1 tensors have pairs" in n for n in report["model"]["notes"])
    scale, _ = grids(onnx.load(out / "net.tensorrt.qdq.onnx"))["x"]
    assert scale == pytest.approx(0.03, rel=0.02)


def spoiled(kind):
    """A Q/DQ model with one fault."""
    w, types = Writer(), {"int4": TensorProto.INT4, "fp8": TensorProto.FLOAT8E4M3FN}
    each = kind == "a channel"
    scale = {"scale 0": 0, "NaN": np.nan, "below 0": -1}.get(kind, 0.03)
    zero = np.full(3 if each else (), 128, np.uint16 if kind == "16 bits" else np.uint8)
    if kind in types:
        w.tensors.append(helper.make_tensor("z", types[kind], [], b"\0", raw=True))
    else:
        w.hold("z", zero)
    w.hold("s", np.full(3 if each else (), scale, np.float32))
    own = [w.node("ReduceMax", ["x"], "top", keepdims=0) if kind == "computed" else "s", "z"]
    axis = {"axis": 1} if each else {}
    q = w.node("QuantizeLinear", ["x", *own], "x_q", **axis)
    if kind == "other":
        own = [w.hold("s2", np.float32(0.04)), "z"]
    x = "x" if kind == "alone" else w.node("DequantizeLinear", [q, *own], "x_dq", **axis)
    opset = 21 if kind in ("16 bits", *types) else 17
    return w.model(w.conv(x, w.weight("w1", W1)), opset=opset, shape=WIDE)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("scale 0", "a scale is not above 0 and finite"),
        ("NaN", "a scale is not above 0 and finite"),
        ("below 0", "a scale is not above 0 and finite"),
        ("a channel", "it has a scale a channel"),
        ("alone", "no DequantizeLinear reads it"),
        ("other", "the QuantizeLinear before it has another scale or zero point"),
        ("16 bits", "it is quantized to uint16"),
        ("computed", "its scale is computed"),
        ("int4", "it is quantized to int4"),
        ("fp8", "it is quantized to float8"),
    ],
)
def test_a_pair_that_no_target_has_is_one_sentence(refused, kind, told):
    said = refused(spoiled(kind), *ALL)
    assert told in said and "quantize it again" in said


def test_integer_operators_are_one_sentence(refused, wording):
    w = Writer()
    own = [w.hold("s", np.float32(0.1)), w.hold("z", np.uint8(0))]
    q = w.node("QuantizeLinear", ["x", *own], "x_q")
    i = w.node("ConvInteger", [q, w.hold("w", np.ones((8, 3, 1, 1), np.uint8))], "i")
    model = w.model(w.node("Cast", [i], "y", to=1), shape=WIDE)
    wording.check(refused(model))


def test_a_file_that_is_no_model_stays_one_sentence(refused, tmp_path, wording):
    (tmp_path / "net.qdq.onnx").write_bytes(b"\x08\x07" * 40)
    wording.check(refused(tmp_path / "net.qdq.onnx"))
