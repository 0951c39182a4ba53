"""`calib8 build` of a Q/DQ model: its own scales, in every spelling, for every target."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import calib8
from deploy.errors import ModelError
from deploy.frontends import load_float_or_qdq
from deploy.graph.placement import ONNXRUNTIME
from deploy.runtimes.ort import OrtSession
from deploy.targets import TARGETS
from deploy.targets.prequantized import qdq_decisions
from deploy.targets.stored_weights import find_saturating_layers
from tests.models import make_model, make_node, rename_tensor, run_command, save_net

pytestmark = pytest.mark.slow

ALL_TARGETS = ("--target", ",".join(TARGETS))


@pytest.fixture(scope="module")
def images_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "data.npy"
    np.save(file, np.random.default_rng(5).normal(size=(6, 3, 16, 16)).astype(np.float32))
    return file


@pytest.fixture(scope="module")
def qdq_models(small_cnn, images_file, tmp_path_factory):
    """The Q/DQ models that calib8 makes of a float one, one a target."""
    folder = tmp_path_factory.mktemp("made")
    files = {
        "onnxruntime": "small_cnn.int8.onnx",
        "tensorrt": "small_cnn.tensorrt.qdq.onnx",
        "ascend": "small_cnn_amct_qdq.onnx",
    }
    arguments = (
        "--images",
        images_file,
        "--out",
        folder,
        "--duration",
        0,
        "--effort",
        0,
        *ALL_TARGETS,
    )
    run_command("build", small_cnn, *arguments)
    return {target: folder / file for target, file in files.items()}


def model_path(model, folder):
    return save_net(model, folder / "net.onnx") if isinstance(model, onnx.ModelProto) else model


@pytest.fixture
def build_model(run, images_file, tmp_path):
    """(model, further arguments) -> its folder, report and the notes of each target."""

    def build(model, *arguments, images=True):
        image_arguments, out = ("--images", images_file) if images else (), tmp_path / "out"
        run.ok(
            "build",
            model_path(model, tmp_path),
            *image_arguments,
            "--out",
            out,
            "--duration",
            0,
            *arguments,
        )
        report = json.loads((out / "report.json").read_text())
        return (
            out,
            report,
            {target["name"]: " ".join(target.get("notes", ())) for target in report["targets"]},
        )

    return build


@pytest.fixture
def refusal(run, images_file, tmp_path):
    """(model, further arguments) -> the one sentence of a build that must be refused."""

    def build(model, *arguments, images=True):
        out = tmp_path / "no"
        arguments = (
            *(("--images", images_file) if images else ()),
            "--out",
            out,
            "--duration",
            0,
            *arguments,
        )
        code, stdout, stderr = run("build", model_path(model, tmp_path), *arguments)
        assert code, (
            stdout,
            stderr,
        )
        assert not stdout, (
            stdout,
            stderr,
        )
        assert stderr.count("\n") == 1, (
            stdout,
            stderr,
        )
        assert not out.exists(), (
            stdout,
            stderr,
        )
        return stderr

    return build


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
    layers = {}
    for node in model.graph.node:
        pair = makers.get(node.input[1]) if node.op_type in ("Conv", "Gemm", "MatMul") else None
        if pair is None:
            continue
        scale = tensors[pair.input[1]]
        stored = tensors.get(pair.input[0])
        if stored is None:  # a float weight with a pair
            weight = tensors[makers[pair.input[0]].input[0]]
            axis = next((a.i for a in pair.attribute if a.name == "axis"), 1)
            shape = [1] * weight.ndim
            shape[axis] = scale.size
            stored = np.rint(weight / scale.reshape(shape)).astype(np.int8)
        layers[node.name] = (stored, scale)
    return layers


def test_layer_without_output_pair_stays_float(small_cnn):
    model = load_float_or_qdq(small_cnn).model
    convs = [node.name for node in model.graph.node if node.op_type == "Conv"]
    floats = {convs[0]: "why"}
    trained = SimpleNamespace(
        name="a/m.onnx", float_reasons=floats, nodes_with_output_pair={convs[1]}
    )
    reasons = {d.node: d.reason for d in qdq_decisions(trained, model, ONNXRUNTIME)}
    missing = "no pair stands on what it makes in m.onnx"
    assert [reasons[name] for name in convs] == ["why", "", missing]


def test_onnxruntime_grid_kept_bit_for_bit(build_model, qdq_models):
    out, report, notes = build_model(qdq_models["onnxruntime"], *ALL_TARGETS)
    assert (out / "small_cnn.int8.int8.onnx").read_bytes() == qdq_models["onnxruntime"].read_bytes()
    assert "Kept to the bit" in notes["onnxruntime"]
    assert "Kept" not in notes["tensorrt"]
    assert not (out / "small_cnn.int8.cache").exists()
    assert report["calibration"]["reason"].startswith("the model is quantized already")
    assert "calibration_runs" not in report["work"]
    assert any(node["precision"] == "uint8" for node in report["targets"][0]["nodes"])
    (method,) = {target["method"] for target in report["targets"]}
    assert method == f"the scales of {qdq_models['onnxruntime']}"


def test_tensorrt_grid_kept_with_typed_model(build_model, qdq_models):
    out, _, notes = build_model(qdq_models["tensorrt"], *ALL_TARGETS)
    exported = onnx.load(out / "small_cnn.tensorrt.qdq.tensorrt.qdq.onnx")
    source = onnx.load(qdq_models["tensorrt"])
    assert grids(exported) == grids(source)
    exported_integers, source_integers = integers(exported), integers(source)
    assert exported_integers.keys() == source_integers.keys()
    assert all(
        np.array_equal(exported_integers[n][0], source_integers[n][0]) for n in exported_integers
    )
    assert "Kept to the bit" in notes["tensorrt"]
    cache = (out / "small_cnn.tensorrt.qdq.tensorrt.cache").read_text()
    for tensor, (scale, _) in grids(source).items():
        assert f"{tensor}: {np.float32(scale).view(np.uint32):08x}" in cache
    typed = onnx.load(out / "small_cnn.tensorrt.qdq.tensorrt.typed.onnx")
    assert {t.data_type for t in typed.graph.initializer} & {TensorProto.FLOAT16}
    assert "narrow type" in notes["tensorrt"]


def test_uint8_becomes_symmetric_int8_same_range(build_model, qdq_models):
    out, _, notes = build_model(qdq_models["onnxruntime"], "--target", "tensorrt")
    source_grids = grids(onnx.load(qdq_models["onnxruntime"]))
    exported = onnx.load(out / "small_cnn.int8.tensorrt.qdq.onnx")
    assert grids(exported)
    for tensor, (scale, zero) in grids(exported).items():
        step, offset = source_grids[tensor]
        farther = max(offset, 255 - offset) * step
        assert zero == 0
        assert scale == pytest.approx(farther / 127, rel=1e-6)
    assert "TensorRT's are int8 with zero point 0" in notes["tensorrt"]
    source_integers = integers(onnx.load(qdq_models["onnxruntime"]))
    exported_integers = integers(exported)
    shared = exported_integers.keys() & source_integers.keys()
    assert shared
    for layer in shared:
        assert all(
            np.array_equal(*pair)
            for pair in zip(exported_integers[layer], source_integers[layer], strict=True)
        )
    assert "rounded again" not in notes["tensorrt"]


def test_symmetric_int8_becomes_uint8_same_range(build_model, qdq_models):
    out, _, notes = build_model(qdq_models["tensorrt"], "--target", "onnxruntime")
    source_grids = grids(onnx.load(qdq_models["tensorrt"]))
    exported_grids = grids(onnx.load(out / "small_cnn.tensorrt.qdq.int8.onnx"))
    assert {"x", "r1", "r2", "r3"} <= exported_grids.keys() & source_grids.keys()
    assert exported_grids["x"] == (source_grids["x"][0], 128)
    for tensor in ("r1", "r2", "r3"):  # never negative
        assert exported_grids[tensor] == (
            pytest.approx(source_grids[tensor][0] * 127 / 255, rel=1e-6),
            0,
        )
    assert "plus 128" in notes["onnxruntime"]


def test_ascend_takes_codes_and_integers_over(build_model, qdq_models):
    out, _, notes = build_model(qdq_models["onnxruntime"], "--target", "ascend")
    from deploy.targets.ascend.record import read_record

    records = read_record((out / "small_cnn.int8_record.txt").read_text())
    source = onnx.load(qdq_models["onnxruntime"])
    reads = {n.name: n.input[0].removesuffix("/dequantized") for n in source.graph.node}
    source_grids = grids(source)
    assert records
    for layer, record in records.items():
        scale, zero = source_grids[reads[layer]]
        assert (record.scale_d, record.offset_d) == (np.float32(scale), zero - 128)
    assert "those of" in notes["ascend"]


def test_images_compare_extracted_or_named_float(build_model, qdq_models, small_cnn):
    _, report, _ = build_model(qdq_models["onnxruntime"])
    assert any("extracted from small_cnn.int8.onnx" in note for note in report["notes"])
    accuracy = report["engines"][1]["accuracy"]
    _, report, _ = build_model(qdq_models["onnxruntime"], "--float", small_cnn, "--force")
    assert any(f"FP32 is {small_cnn}" in note for note in report["notes"])
    assert report["engines"][0]["path"] == str(small_cnn)
    assert report["engines"][1]["accuracy"] != accuracy
    assert not any("calibration images" in note for note in report["notes"])


def test_without_images_nothing_is_measured(build_model, qdq_models):
    out, report, _ = build_model(qdq_models["onnxruntime"], *ALL_TARGETS, images=False)
    assert any("No images were given" in note for note in report["notes"])
    assert not any({"accuracy", "latency"} & set(engine) for engine in report["engines"])
    assert (out / "small_cnn.int8_deploy_model.onnx").exists()
    assert (out / "small_cnn.int8.tensorrt.cache").exists()


def test_output_is_verified_explained_and_reported(build_model, qdq_models, run, images_file):
    out, _, _ = build_model(qdq_models["tensorrt"], "--target", "onnxruntime")
    run.ok("verify", out)
    run.ok("report", out)
    assert "Images" in run.ok("explain", out, "--images", images_file, "--limit", 2)
    run.ok("build", "--config", out / "calib8.toml", "--out", out.with_name("again"))
    model, rebuilt = (
        folder / "small_cnn.tensorrt.qdq.int8.onnx" for folder in (out, out.with_name("again"))
    )
    assert model.read_bytes() == rebuilt.read_bytes()


def test_python_builds_model_in_memory(qdq_models, images_file, tmp_path):
    model = onnx.load(qdq_models["onnxruntime"])
    before = model.SerializeToString(deterministic=True)
    report = calib8.build(model, np.load(images_file)[:2, None], out=tmp_path / "out", duration_s=0)
    assert report.engines[1].accuracy is not None
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("--method", "minmax"),
        ("--cache", "c.cache"),
        ("--require-cache",),
        ("--trust-cache",),
        ("--refresh",),
        ("--resume",),
        ("--keep-float", "op:Conv"),
        ("--effort", "1"),
        ("--prefer", "size"),
        ("--plan", __file__),
        ("--split", "2"),
        ("--repair", "adaround"),
        ("--until-stable",),
        ("--scheduler", "host:8786"),
    ],
)
def test_options_of_a_calibration_are_refused(refusal, qdq_models, arguments):
    message = refusal(qdq_models["onnxruntime"], *arguments)
    assert arguments[0] in message
    assert "is quantized already" in message


def test_repairs_may_be_none(qdq_models, images_file, tmp_path):
    options = {"out": tmp_path / "out", "duration_s": 0}
    calib8.build(qdq_models["onnxruntime"], str(images_file), repairs="none", **options)


def test_a_calibrators_script_is_refused(refusal, qdq_models, tmp_path):
    (tmp_path / "old.py").write_text("def make():\n    return None\n")
    arguments = ("--calibrator-script", f"{tmp_path / 'old.py'}:make")
    assert "old.py" in refusal(qdq_models["onnxruntime"], *arguments, images=False)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("onnxruntime", ("--int8-stem",)),
        ("tensorrt", ("--precision", "fp8")),
        ("tensorrt", ("--calibrator", "entropy2")),
        ("tensorrt", ("--float-behind-concat",)),
        ("tensorrt", ("--pair-behind-deconv",)),
        ("ascend", ("--exact-ifmr",)),
        ("ascend", ("--amct-batch", "2")),
        ("ascend", ("--ascend-config", __file__)),
    ],
)
def test_quantizing_target_options_are_refused(refusal, qdq_models, target, arguments):
    message = refusal(qdq_models["onnxruntime"], "--target", target, *arguments)
    assert arguments[0] in message
    assert "decides how" in message
    assert "quantized already" in message


def test_float_option_needs_same_model_ends(refusal, qdq_models, small_cnn, detector, wording):
    assert "leave it out" in refusal(small_cnn, "--float", small_cnn)
    wording.check(refusal(qdq_models["onnxruntime"], "--float", detector))
    assert "give --images too" in refusal(
        qdq_models["onnxruntime"], "--float", small_cnn, images=False
    )
    assert "quantized already" in refusal(
        qdq_models["onnxruntime"], "--float", qdq_models["onnxruntime"]
    )


@pytest.mark.parametrize("options", [{}, {"labels": [0, 1, 2, 3, 4, 5]}])
def test_evaluation_images_alone_measure(qdq_models, small_cnn, images_file, tmp_path, options):
    options |= {"float_model": small_cnn, "duration_s": 0}
    build = partial(calib8.build, qdq_models["onnxruntime"], **options)
    report = build(out=tmp_path / "a", eval_images=images_file)
    both = build(images_file, out=tmp_path / "b", eval_images=images_file)
    assert report.engines[1].accuracy == both.engines[1].accuracy is not None


def test_limit_without_calibration_is_of_evaluation(
    qdq_models, images_file, refusal, command, tmp_path
):
    model = qdq_models["onnxruntime"]
    report = calib8.build(model, out=tmp_path / "a", eval_images=images_file, limit=2, duration_s=0)
    assert report.engines[1].accuracy.samples == 2
    options = ("--limit", 2, "--duration", 0, "--out", tmp_path / "b")
    text = command("build", model, "--eval-images", images_file, *options)
    assert "2 samples from" in text
    assert "--limit goes with --images" in refusal(model, *options, images=False)


@pytest.mark.parametrize("flag", ["--labels", "--metric"])
def test_measurement_options_need_images(flag, refusal, qdq_models, tmp_path):
    (tmp_path / "labels.txt").write_text("1\n" * 6)
    (tmp_path / "own.py").write_text("def score(fp32, int8, label):\n    return 1.0\n")
    metric = f"{tmp_path / 'own.py'}:score"
    values = {"--labels": tmp_path / "labels.txt", "--metric": metric}
    message = refusal(qdq_models["onnxruntime"], flag, values[flag], images=False)
    assert f"{flag} is for what is measured on images" in message
    assert "give --images too" in message


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

    def node(self, op, inputs, output, **attributes):
        self.nodes.append(make_node(op, inputs, [output], name=f"n_{output}", **attributes))
        return output

    def pair(self, tensor, scale, zero, *, limits=(), **attributes):
        parameters = [self.hold(f"{tensor}_s", np.asarray(scale, np.float32))]
        parameters += [] if zero is None else [self.hold(f"{tensor}_z", zero)]
        q = self.node("QuantizeLinear", [tensor, *parameters], f"{tensor}_q", **attributes)
        if limits:
            ends = [self.hold(f"{tensor}_{code}", np.asarray(code, zero.dtype)) for code in limits]
            q = self.node("Clip", [q, *ends], f"{tensor}_k")
        return self.node("DequantizeLinear", [q, *parameters], f"{tensor}_dq", **attributes)

    def weight(self, name, value):
        """A float weight with a pair a channel, of seven bits, whose products no CPU saturates."""
        scale, zeros = per_channel(value), np.zeros(len(value), np.int8)
        return self.pair(self.hold(name, value), scale, zeros, axis=0)

    def conv(self, *inputs, to="y"):
        return self.node("Conv", inputs, to, pads=[1] * 4)

    def conv_relu(self, x):
        """Conv and Relu of W1 and B1."""
        convolved = self.conv(x, self.weight("w1", W1), self.hold("b1", B1), to="c1")
        return self.node("Relu", [convolved], "r1")

    def model(self, output, opset=17, shape=(1, 4, 16, 16)):
        ends = {"x": [1, 3, 16, 16]}, {output: shape}
        return make_model(self.nodes, *ends, self.tensors, opset=opset, ir=9 if opset < 21 else 10)


def per_channel(weight):
    return (np.abs(weight).reshape(len(weight), -1).max(1) / 63).astype(np.float32)


def modelopt():
    """Per-tensor int8 with zero point 0, Constant nodes, float weights with a pair."""
    w = Writer(constants=True)
    a = w.pair(w.conv_relu(w.pair("x", 0.03, np.int8(0))), 0.02, np.int8(0))
    return w.model(w.conv(a, w.weight("w2", W2), w.hold("b2", B2)))


def onnxruntime():
    """Affine uint8, the Relu gone into its pair, int8 weights and int32 biases as integers."""
    w = Writer()
    x, scale = w.pair("x", 0.03, np.uint8(120)), 0.03
    for number, (weight, bias) in enumerate(((W1, B1), (W2, B2)), start=1):
        weight_scale = per_channel(weight)
        stored = np.rint(weight / weight_scale.reshape((-1, 1, 1, 1))).astype(np.int8)
        inputs = [w.hold(f"w{number}", stored), w.hold(f"w{number}_s", weight_scale)]
        inputs.append(w.hold(f"w{number}_z", np.zeros(len(weight_scale), np.int8)))
        dq = w.node("DequantizeLinear", inputs, f"w{number}_dq", axis=0)
        steps = (weight_scale * np.float32(scale)).astype(np.float32)
        bias_codes = np.rint(bias / steps).astype(np.int32)
        inputs = [w.hold(f"b{number}", bias_codes), w.hold(f"b{number}_s", steps)]
        b = w.node("DequantizeLinear", inputs, f"b{number}_dq", axis=0)
        zero, scale = (np.uint8(0), 0.012) if number == 1 else (np.uint8(128), 0.06)
        x = w.pair(w.conv(x, dq, b, to=f"c{number}"), scale, zero)
    return w.model(x)


def nncf():
    """Asymmetric uint8, weights per channel behind FakeQuantize's pair, int8 with offset too."""
    w = Writer()
    a = w.pair(w.conv_relu(w.pair("x", 0.025, np.uint8(131))), 0.01, np.int8(-128))
    w2 = w.pair(w.hold("w2", W2), np.float32(0.01), np.int8(0))
    return w.model(w.conv(a, w2, w.hold("b2", B2)))


def torchao():
    """The zero point left out where it is 0 of uint8, a Linear whose weight is transposed."""
    w = Writer()
    a = w.conv_relu(w.pair("x", 0.03, np.uint8(128)))
    a = w.pair(w.node("GlobalAveragePool", [a], "p"), 0.004, None)
    a = w.node("Flatten", [a], "f")
    dq = [w.hold("m", M), w.hold("m_s", np.full(5, 0.01, np.float32))]
    dq.append(w.hold("m_z", np.zeros(5, np.int8)))
    m = w.node("Transpose", [w.node("DequantizeLinear", dq, "m_dq", axis=0)], "mt", perm=[1, 0])
    return w.model(w.node("MatMul", [a, m], "y"), shape=(1, 5))


def tflite():
    """Codes that are padded and transposed between the two nodes of a pair."""
    w = Writer()
    parameters = [w.hold("x_s", np.float32(0.03)), w.hold("x_z", np.uint8(120))]
    q = w.node("QuantizeLinear", ["x", *parameters], "x_q")
    edges = w.hold("edges", np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    padded = w.node("Pad", [q, edges, parameters[1]], "x_p")
    a = w.node("Transpose", [padded], "x_t", perm=[0, 1, 3, 2])
    a = w.pair(w.conv_relu(w.node("DequantizeLinear", [a, *parameters], "x_dq")), 0.02, np.int8(0))
    return w.model(w.conv(a, w.weight("w2", W2), w.hold("b2", B2)), shape=(1, 4, 18, 18))


def brevitas(bits=8, constants=True):
    """QCDQ: the integers of activations and weights clipped before they become floats."""
    w, limits = Writer(constants=constants), (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
    top, zero = limits[1], np.int8(0)
    scales, zeros = np.full(8, 0.6 / top), np.zeros(8, np.int8)
    w1 = w.pair(w.hold("w1", W1), scales, zeros, limits=limits, axis=0)
    nibbles = w.hold("w2", (W2 / 0.1).round().astype(np.int8))  # its Clip leaves 4 bits of them
    ends = [w.hold("low", np.int8(-7)), w.hold("high", np.int8(7))]
    scale = w.hold("w2_s", np.float32(0.1))
    w2 = w.node("DequantizeLinear", [w.node("Clip", [nibbles, *ends], "w2_k"), scale], "w2_dq")
    x = w.pair("x", 4 / top, zero, limits=limits)
    a = w.node("Relu", [w.conv(x, w1, w.hold("b1", B1), to="c1")], "r1")
    a = w.pair(a, 3 / top, zero, limits=limits)
    return w.model(w.conv(a, w2, w.hold("b2", B2)))


def modelopt_float16():
    """`modelopt` in float16 behind a Cast of its float32 input, and a Cast of the output."""
    model = float16_modelopt()
    rename_tensor(model, "x", "xh")
    rename_tensor(model, "y", "yh")
    model.graph.node.insert(0, make_node("Cast", "x", "xh", name="in", to=TensorProto.FLOAT16))
    model.graph.node.append(make_node("Cast", "yh", "y", name="out", to=TensorProto.FLOAT))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    return model


def padded():
    """A Pad of some axes between pairs, which ONNX Runtime cannot run beside int8 layers."""
    w = Writer()
    a = w.pair(w.conv_relu(w.pair("x", 0.03, np.uint8(120))), 0.02, np.uint8(0))
    pads = [w.hold("pads", np.array([1, 1, 1, 1])), "", w.hold("axes", np.array([2, -1]))]
    a = w.pair(w.node("Pad", [a, *pads], "p", mode="edge"), 0.02, np.uint8(0))
    c = w.conv(a, w.weight("w2", W2), w.hold("b2", B2))
    return w.model(w.pair(c, 0.05, np.uint8(128)), opset=19, shape=(1, 4, 18, 18))


SPELLINGS = [padded, modelopt, onnxruntime, nncf, torchao, tflite, brevitas, modelopt_float16]


def test_pair_behind_cast_is_the_inputs():
    qdq = load_float_or_qdq(modelopt_float16()).qdq
    assert qdq.scales["x"].amax == pytest.approx(0.03 * 127, rel=1e-3)
    assert not {"n_c1", "n_y"} & qdq.float_reasons.keys()


@pytest.mark.parametrize("constants", [True, False])
def test_clip_of_codes_limits_the_weights(constants):
    model = brevitas(constants=constants)
    loaded = load_float_or_qdq(model)
    assert not {"n_c1", "n_y"} & loaded.qdq.float_reasons.keys()
    tensors = {t.name: numpy_helper.to_array(t) for t in loaded.model.graph.initializer}
    expected = {"n_c1.weight": W1.clip(-0.6, 0.6), "n_y.weight": W2.clip(-0.7, 0.7)}
    for name, weight in expected.items():
        assert np.abs(tensors[name] - weight).max() < 0.051
        assert np.abs(tensors[name]).max() <= np.abs(weight).max() * (1 + 1e-6)


def test_clip_to_fewer_bits_is_named(refusal):
    assert "a Clip leaves fewer than 8 bits of it" in refusal(brevitas(bits=4))


@pytest.mark.parametrize(("limits", "is_read"), [((0, 255), True), ((1, 255), False)])
def test_clip_of_uint8_codes_keeps_zero(limits, is_read):
    w = Writer()
    x = w.pair("x", 0.03, np.uint8(0), limits=limits)
    model = w.model(w.conv(x, w.weight("w1", W1)), shape=(1, 8, 16, 16))
    if is_read:
        assert load_float_or_qdq(model).qdq.grid_text == "uint8"
        return
    with pytest.raises(ModelError, match="a Clip leaves"):
        load_float_or_qdq(model)


def test_left_out_zero_point_has_any_shape():
    w = Writer()
    scale = w.hold("s", np.float32([0.03]))
    q = w.node("QuantizeLinear", ["x", scale, w.hold("z", np.int8(0))], "q")
    x = w.node("DequantizeLinear", [q, scale], "dq")
    model = w.model(w.conv(x, w.weight("w1", W1)), shape=(1, 8, 16, 16))
    assert "x" in load_float_or_qdq(model).qdq.grids


@pytest.mark.parametrize("end", ["", "top"])
def test_clip_of_codes_without_two_constants_is_refused(end):
    w = Writer()
    parameters = [w.hold("s", np.float32(0.03)), w.hold("z", np.int8(0))]
    q = w.node("QuantizeLinear", ["x", *parameters], "q")
    top = w.node("ReduceMax", [q], "top", keepdims=0)
    clipped = w.node("Clip", [q, w.hold("low", np.int8(-127)), end and top], "k")
    dq = w.node("DequantizeLinear", [clipped, *parameters], "dq")
    model = w.model(w.conv(dq, w.weight("w1", W1)), shape=(1, 8, 16, 16))
    with pytest.raises(ModelError, match="a Clip leaves"):
        load_float_or_qdq(model)


def test_unknown_type_of_codes_is_named():
    w = Writer()
    scale = w.hold("s", np.float32(0.03))
    dq = w.node("DequantizeLinear", [w.node("QuantizeLinear", ["x", scale], "q"), scale], "dq")
    model = w.model(w.conv(dq, w.weight("w1", W1)), opset=21, shape=(1, 8, 16, 16))
    model.graph.node[0].attribute.append(helper.make_attribute("output_dtype", 99))
    with pytest.raises(ModelError, match="99"):
        load_float_or_qdq(model)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda model: model.__name__)
def test_every_spelling_goes_to_every_target(build_model, spelling, tmp_path):
    out, report, _ = build_model(save_net(spelling(), tmp_path / "net.qdq.onnx"), *ALL_TARGETS)
    assert not any(target["error"] for target in report["targets"])
    for target in report["targets"]:
        assert sum(n["precision"] in ("int8", "uint8") for n in target["nodes"]) >= 1, target[
            "name"
        ]
    accuracy = [engine["accuracy"] for engine in report["engines"][1:]]
    assert all(float(part["sqnr_db"]) > 20 for value in accuracy for part in value["parts"])
    assert any("net.qdq.onnx itself; speed and size are" in n for n in report["notes"])
    assert (out / "net.qdq_deploy_model.onnx").exists()


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda model: model.__name__)
def test_float_model_matches_except_for_rounding(spelling, images_file):
    loaded = load_float_or_qdq(spelling())
    feed = {"x": np.load(images_file)[:1].clip(-2, 2)}
    float_outputs = OrtSession.open(loaded.model, threads=1).run(feed)
    for name, value in OrtSession.open(spelling(), threads=1, optimize=False).run(feed).items():
        assert not [n for n in loaded.model.graph.node if n.op_type.endswith("quantizeLinear")]
        error = np.square(float_outputs[name] - value).mean() / np.square(value).mean()
        assert error < 0.01, name


@pytest.mark.parametrize("version", ["8.6.1.6", "10.13.0.35", "11.0.0.10"])
def test_engine_uses_pairs_instead_of_cache(build_model, qdq_models, tensorrt, version):
    trt = tensorrt(version)
    build_model(qdq_models["tensorrt"], "--target", "tensorrt")
    (network,) = trt.STORY.networks
    assert any(node.op_type == "DequantizeLinear" for node in network.model.graph.node)


def float16_modelopt():
    """`modelopt` with float16 for what is not quantized, its scales too."""
    model = modelopt()
    tensors = [a.t for n in model.graph.node for a in n.attribute if a.name == "value"]
    for tensor in (
        tensor_value for tensor_value in tensors if tensor_value.data_type == TensorProto.FLOAT
    ):
        array = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    model.opset_import[0].version = 19
    return model


def test_float16_model_kept_only_for_tensorrt(build_model, images_file, tmp_path):
    np.save(tmp_path / "x.npy", np.load(images_file).astype(np.float16))
    out, report, _ = build_model(
        float16_modelopt(), "--images", tmp_path / "x.npy", *ALL_TARGETS, images=False
    )
    targets = {target["name"]: target for target in report["targets"]}
    for target in (targets["onnxruntime"], targets["tensorrt"]):
        assert {n["name"]: n for n in target["nodes"]}["n_c1"]["precision"] in ("int8", "uint8")
    assert any("Kept to the bit" in note for note in targets["tensorrt"]["notes"])
    assert (out / "net.tensorrt.typed.onnx").exists()


WIDE_SHAPE = (1, 8, 16, 16)


def test_int32_biases_become_float_for_tensorrt(build_model):
    w = Writer()
    x, w1 = w.pair("x", 0.03, np.int8(0)), w.weight("w1", W1)
    steps = (per_channel(W1) * np.float32(0.03)).astype(np.float32)
    bias_codes = np.rint(B1 / steps).astype(np.int32)
    b = w.node("DequantizeLinear", [w.hold("b", bias_codes), w.hold("b_s", steps)], "b_dq", axis=0)
    out, _, notes = build_model(w.model(w.conv(x, w1, b), shape=WIDE_SHAPE), "--target", "tensorrt")
    exported = onnx.load(out / "net.tensorrt.qdq.onnx")
    assert "Kept to the bit" in notes["tensorrt"]
    assert not [t for t in exported.graph.initializer if t.data_type == TensorProto.INT32]
    tensors = {t.name: numpy_helper.to_array(t) for t in exported.graph.initializer}
    assert np.array_equal(tensors["b_dq"], bias_codes.astype(np.float32) * steps)


def test_widened_depthwise_layer_keeps_its_integers(build_model):
    w, rng = Writer(), np.random.default_rng(3)
    x = w.pair(w.conv_relu(w.pair("x", 0.03, np.int8(0))), 0.02, np.int8(-128))
    for name, shape, group in (("a", (20, 8, 1, 1), 1), ("b", (20, 1, 3, 3), 20)):
        weight = w.weight(f"w{name}", rng.normal(size=shape).astype(np.float32))
        x = w.node("Conv", [x, weight], name, group=group, pads=[shape[2] // 2] * 4)
        x = w.pair(x, 0.05, np.int8(0))
    final_weight = w.weight("wc", rng.normal(size=(4, 20, 3, 3)).astype(np.float32))
    model = w.model(w.conv(x, final_weight))
    out, _, notes = build_model(model, "--target", "onnxruntime", "--for", "vnni")
    source, exported = integers(model)["n_b"], integers(onnx.load(out / "net.int8.onnx"))["n_b"]
    assert len(exported[0]) == 32
    assert all(np.array_equal(o[:20], g) for o, g in zip(exported, source, strict=True))
    assert "rounded again" not in notes["onnxruntime"]


@pytest.mark.parametrize(
    ("shape", "group"), [((8, 8, 3, 3), 1), ((6, 8, 1, 1), 1), ((8, 1, 3, 3), 8)]
)
def test_symmetric_weights_fit_cpus_without_vnni(build_model, shape, group):
    rng, w = np.random.default_rng(4), Writer()
    weight = rng.normal(size=shape).astype(np.float32)
    weight[:3, :, 0, 0] *= 0.1  # channels whose pairs fit as they are
    weight[:3, 0, -1, -1] = 4
    steps = np.abs(weight).reshape(len(weight), -1).max(1) / 127  # all of int8
    x = w.pair(w.conv_relu(w.pair("x", 0.03, np.int8(0))), 0.02, np.int8(0))
    stored = w.pair(w.hold("v", weight), steps, np.zeros(len(weight), np.int8), axis=0)
    output = w.pair(w.node("Conv", [x, stored], "y", group=group), 0.1, np.int8(0))
    model = w.model(output, shape=(1, len(weight), None, None))
    out, _, notes = build_model(model, "--target", "onnxruntime", "--for", "vnni")
    engine = onnx.load(out / "net.int8.onnx")
    assert not find_saturating_layers(engine)
    assert "can saturate" not in notes["onnxruntime"]

    given, written = integers(model)["n_y"], integers(engine)["n_y"]
    count = len(weight)
    is_kept = written[1][:count] == given[1]
    assert np.array_equal(written[0][:count][is_kept], given[0][is_kept])
    is_depthwise = group > 1
    assert is_kept.all() == is_depthwise
    assert ("rounded again" in notes["onnxruntime"]) == (not is_depthwise)


def test_lowest_weight_code_is_kept(build_model):
    out, _, notes = build_model(torchao(), "--target", "tensorrt")
    layers = integers(onnx.load(out / "net.tensorrt.qdq.onnx"))
    assert layers["n_y"][0].min() == -128
    assert "rounded again" not in notes["tensorrt"]


def test_weights_with_zero_point_are_rerounded(build_model):
    w = Writer()
    x = w.pair("x", 0.03, np.uint8(128))
    w1 = w.pair(w.hold("w1", W1), np.float32(0.01), np.uint8(130))
    _, _, notes = build_model(
        w.model(w.conv(x, w1), shape=WIDE_SHAPE), "--target", "tensorrt,onnxruntime"
    )
    assert "rounded again" in notes["tensorrt"]
    assert "1 (n_y)" in notes["tensorrt"]
    assert "Kept to the bit" in notes["onnxruntime"]


def test_source_float_layer_stays_float(build_model):
    w = Writer()
    c = w.conv(w.pair("x", 0.03, np.uint8(128)), w.weight("w1", W1), to="c1")
    _, report, _ = build_model(w.model(w.conv(c, w.hold("w2", W2))), "--target", "tensorrt,ascend")
    for target in report["targets"]:
        (node,) = (n for n in target["nodes"] if n["name"] == "n_y")
        assert node["precision"] == "float32"
        assert node["reason"]
    assert "float in net.onnx" in report["targets"][0]["nodes"][1]["reason"]


def test_source_float_layer_runs_as_written(build_model):
    """ONNX Runtime would round its weight, with one scale for all channels."""
    w, lopsided = Writer(), W2 * np.array([[[[1.0]]], *[[[[0.1]]]] * 3], np.float32)
    c = w.pair(w.conv_relu(w.pair("x", 0.03, np.uint8(128))), 0.03, np.uint8(0))
    y = w.pair(w.conv(c, w.hold("w2", lopsided), to="c2"), 0.03, np.uint8(128))
    out, report, notes = build_model(w.model(y), "--target", "onnxruntime,ascend")
    assert "Kept to the bit" in notes["onnxruntime"]
    assert report["targets"][0]["nodes"][-1]["precision"] == "float32"
    written_for_ascend = onnx.load(out / "net_deploy_model.onnx").graph.node
    assert not any(node.op_type == "Sum" for node in written_for_ascend)  # ONNX Runtime's own
    x = np.random.default_rng(6).normal(size=(1, 3, 16, 16)).astype(np.float32)
    engine = onnx.load(out / "net.int8.onnx")
    ran = [OrtSession.open(engine, threads=1, optimize=o).run({"x": x})[y] for o in (False, True)]
    assert np.abs(ran[0] - ran[1]).mean() < 0.001


def test_conflicting_tensor_scales_are_reported(build_model):
    w = Writer()
    coarse = w.pair("x", 0.03, np.uint8(128))
    fine_parameters = [w.hold("s2", np.float32(0.02)), w.hold("z2", np.uint8(128))]
    q = w.node("QuantizeLinear", ["x", *fine_parameters], "x_q2")
    fine = w.node("DequantizeLinear", [q, *fine_parameters], "x_dq2")
    w1 = w.weight("w1", W1)
    sides = [w.conv(coarse, w1, to="a"), w.conv(fine, w1, to="b")]
    out, report, _ = build_model(
        w.model(w.node("Add", sides, "y"), shape=WIDE_SHAPE), "--target", "tensorrt"
    )
    assert any("1 tensors have pairs" in n for n in report["model"]["notes"])
    scale, _ = grids(onnx.load(out / "net.tensorrt.qdq.onnx"))["x"]
    assert scale == pytest.approx(0.03, rel=0.02)


def faulty_model(fault):
    """A Q/DQ model with one fault."""
    w, types = Writer(), {"int4": TensorProto.INT4, "fp8": TensorProto.FLOAT8E4M3FN}
    per_channel_scale = fault == "a channel"
    scale = {"scale 0": 0, "NaN": np.nan, "below 0": -1}.get(fault, 0.03)
    zero = np.full(
        3 if per_channel_scale else (), 128, np.uint16 if fault == "16 bits" else np.uint8
    )
    if fault in types:
        w.tensors.append(helper.make_tensor("z", types[fault], [], b"\0", raw=True))
    else:
        w.hold("z", zero)
    w.hold("s", np.full(3 if per_channel_scale else (), scale, np.float32))
    parameters = [
        w.node("ReduceMax", ["x"], "top", keepdims=0) if fault == "computed" else "s",
        "z",
    ]
    axis = {"axis": 1} if per_channel_scale else {}
    q = w.node("QuantizeLinear", ["x", *parameters], "x_q", **axis)
    if fault == "other":
        parameters = [w.hold("s2", np.float32(0.04)), "z"]
    if fault == "one zero point":
        parameters = ["s"]  # ONNX's default for the DequantizeLinear is 0
    x = "x" if fault == "alone" else w.node("DequantizeLinear", [q, *parameters], "x_dq", **axis)
    opset = 21 if fault in ("16 bits", *types) else 17
    return w.model(w.conv(x, w.weight("w1", W1)), opset=opset, shape=WIDE_SHAPE)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("scale 0", "a scale is not above 0 and finite"),
        ("NaN", "a scale is not above 0 and finite"),
        ("below 0", "a scale is not above 0 and finite"),
        ("a channel", "it has a scale a channel"),
        ("alone", "no DequantizeLinear reads it"),
        ("other", "the QuantizeLinear before it has another scale or zero point"),
        ("one zero point", "the QuantizeLinear before it has another scale or zero point"),
        ("16 bits", "it is quantized to uint16"),
        ("computed", "its scale is computed"),
        ("int4", "it is quantized to int4"),
        ("fp8", "it is quantized to float8"),
    ],
)
def test_unsupported_pair_is_one_sentence(refusal, fault, reason):
    message = refusal(faulty_model(fault), *ALL_TARGETS)
    assert reason in message
    assert "quantize it again" in message


def test_integer_operators_are_one_sentence(refusal, wording):
    w = Writer()
    parameters = [w.hold("s", np.float32(0.1)), w.hold("z", np.uint8(0))]
    q = w.node("QuantizeLinear", ["x", *parameters], "x_q")
    i = w.node("ConvInteger", [q, w.hold("w", np.ones((8, 3, 1, 1), np.uint8))], "i")
    model = w.model(w.node("Cast", [i], "y", to=1), shape=WIDE_SHAPE)
    wording.check(refusal(model))


def test_invalid_model_file_is_one_sentence(refusal, tmp_path, wording):
    (tmp_path / "net.qdq.onnx").write_bytes(b"\x08\x07" * 40)
    wording.check(refusal(tmp_path / "net.qdq.onnx"))
