"""AIPP, and the folder of an Ascend build on another machine."""

import json
import subprocess
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import cv2
import numpy as np
import onnx
import pytest

from deploy.errors import ExportError
from deploy.feed.pixels import preprocess_image, resize_to_input
from deploy.feed.preprocess import RESIZES, Preprocess
from deploy.targets.ascend import aipp
from deploy.targets.ascend.atc import COLORS, STANDARDS, AippSource
from deploy.targets.ascend.executor import open_deploy
from deploy.targets.ascend.proto import parse_text
from tests.aipp_hardware import (
    measure_aipp_error,
    run_aipp,
    to_source_format,
    to_yuv420,
)
from tests.models import make_model, run_command
from tests.vendor_models import build_net

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
RGB = Preprocess(size=(32, 48), color="rgb", layout="nchw")

# rows of the documents' tables for RGB: hicann/ge, atc, CSC_config
DOCUMENTED = {
    "bt601-narrow": ([(298, 0, 409), (298, -100, -208), (298, 516, 0)], 16),
    "bt601-full": ([(256, 0, 359), (256, -88, -183), (256, 454, 0)], 0),
    "bt709-narrow": ([(298, 0, 459), (298, -55, -136), (298, 541, 0)], 16),
    "bt709-full": ([(256, 0, 403), (256, -48, -120), (256, 475, 0)], 0),
}


def aipp_parameters(preprocess, source):
    """The parameters in the text of an AIPP configuration."""
    text, _ = aipp.write_aipp(preprocess, source)
    (parameters,) = parse_text("InsertNewOps", text, "it").aipp_op
    return parameters


def picture(height=32, width=48):
    """A picture without hard edges, whose chroma survives 4:2:0."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [127 + 120 * np.sin(y / 9 + c) * np.cos(x / (7 + c)) for c in range(3)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def prepared(pixels, preprocess):
    """What the calibration was fed for these pixels (RGB, of the model's size)."""
    if preprocess.color == "grey":
        pixels = pixels[..., :1]
    ordered = pixels[..., ::-1] if preprocess.color == "bgr" else pixels
    mean, std = (np.float32(v).reshape(-1, 1, 1) for v in (preprocess.mean, preprocess.std))
    values = np.float32(ordered.transpose(2, 0, 1)) * np.float32(preprocess.scale)
    return np.float32((values - mean) / std)


@pytest.mark.parametrize("standard", STANDARDS)
def test_csc_factors_follow_the_documents(standard):
    rows, bias = DOCUMENTED[standard]
    assert aipp.yuv_to_rgb_matrix(standard, "rgb") == (tuple(rows), (bias, 128, 128))
    assert aipp.yuv_to_rgb_matrix(standard, "bgr")[0] == tuple(rows[::-1])


def test_yuv_is_that_of_opencv():
    """OpenCV writes BT.601 narrow, its own rounding and its own choice of chroma aside."""
    rgb = picture()
    expected = cv2.cvtColor(rgb, cv2.COLOR_RGB2YUV_I420)
    got = to_yuv420(rgb, "bt601-narrow")
    height = rgb.shape[0]
    luma = np.abs(got[:height].astype(int) - expected[:height])
    assert luma.max() <= 1
    assert got.shape == expected.shape
    planes = (
        expected[height:].reshape(2, height // 2, -1).transpose(1, 2, 0).reshape(height // 2, -1)
    )
    assert np.abs(got[height:].astype(int) - planes).mean() < 2


@pytest.mark.parametrize("standard", STANDARDS)
@pytest.mark.parametrize("color", ["rgb", "bgr", "grey"])
@pytest.mark.parametrize("source", COLORS)
def test_om_receives_the_calibration_input(source, color, standard):
    if (source, color) == ("bgr", "grey"):
        return  # refused: test_unsupported_aipp_options_are_refused
    norms = {"mean": (0.4,), "std": (0.3,)} if color == "grey" else IMAGENET
    preprocess = replace(RGB, color=color, **norms)
    frame_source = AippSource(color=source, standard=standard)
    parameters = aipp_parameters(preprocess, frame_source)
    expected = prepared(picture(), preprocess)
    error = measure_aipp_error(parameters, preprocess, frame_source, expected)
    assert error < (0.02 if frame_source.is_yuv else 5e-4)
    if (
        frame_source.is_yuv and color != "grey"
    ):  # and not with V for U, nor with another standard's factors
        swapped_source = replace(frame_source, color={"nv12": "nv21", "nv21": "nv12"}[source])
        parameters = aipp_parameters(preprocess, swapped_source)
        swapped = measure_aipp_error(parameters, preprocess, frame_source, expected)
        assert swapped > 3 * error


@pytest.mark.parametrize("size", [None, (40, 60), (64, 96), (40, 120), (24, 36), (36, 54)])
@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("source", COLORS)
@pytest.mark.parametrize("color", ["rgb", "bgr", "grey"])
def test_host_and_aipp_reproduce_calibration_inputs(color, source, resize, size):
    preprocess = replace(RGB, color=color, resize=resize, mean=(0.4,), std=(0.3,))
    preprocess = replace(preprocess, short_side=40) if resize == "short-side" else preprocess
    if (source, color) == ("bgr", "grey"):
        return  # refused: test_unsupported_aipp_options_are_refused
    parameters = aipp_parameters(preprocess, frame_source := AippSource(color=source, size=size))
    light, tint = picture(80, 120)[..., :1] // 2, cv2.resize(picture()[:4, :6], (120, 80)) // 2
    bgr = cv2.resize((light + tint)[..., ::-1], (size or (80, 120))[::-1])
    pixels = cv2.cvtColor(bgr, cv2.COLOR_BGR2GRAY)[..., None] if color == "grey" else bgr
    expected = preprocess_image(pixels, preprocess)[0]  # a tint that changes slowly survives 4:2:0
    placed, (top, left_column), box = pixels, (0, 0), pixels.shape[:2]
    if size is None:
        placed, (top, left_column) = resize_to_input(pixels, preprocess)
        box = preprocess.input_size
    elif plan := aipp._plan_frame(preprocess, frame_source):
        (top, left_column), box = plan.corner, plan.picture_size
        placed = cv2.resize(pixels, plan.resized_size[::-1]).reshape(*plan.resized_size, -1)
        placed = placed[max(-top, 0) :, max(-left_column, 0) :][: box[0], : box[1]]
        top, left_column = max(top, 0), max(left_column, 0)
    frame = np.zeros((*box, placed.shape[2]), np.uint8)
    frame[top : top + placed.shape[0], left_column : left_column + placed.shape[1]] = placed
    rgb = np.repeat(frame, 3, axis=2) if color == "grey" else frame[..., ::-1]
    model_input = run_aipp(parameters, to_source_format(rgb, preprocess, frame_source))
    deviation = (
        np.abs(model_input - expected) * preprocess.std[0] / preprocess.scale
    )  # in pixel units
    assert deviation.mean() <= 2 if frame_source.is_yuv else deviation.max() <= 2


def test_frame_is_cropped_at_even_offsets():
    source = AippSource(color="nv12", size=(38, 54), standard="bt709-full")
    parameters = aipp_parameters(replace(RGB, resize="short-side", short_side=38), source)
    assert (parameters.load_start_pos_h, parameters.load_start_pos_w) == (2, 2)
    frame = np.zeros((38, 54, 3), np.uint8)
    frame[2:34, 2:50] = picture()
    got = run_aipp(parameters, to_yuv420(frame, "bt709-full"))
    expected = prepared(picture(), RGB)
    assert np.abs(got - expected).mean() < 0.02
    narrow, full = (AippSource(color="nv12", standard=f"bt601-{k}") for k in ("narrow", "full"))
    right, wrong = (
        measure_aipp_error(aipp_parameters(RGB, source), RGB, full, expected)
        for source in (full, narrow)
    )
    assert wrong > 2 * right


def test_arrays_get_no_aipp_file():
    files = {}
    request = SimpleNamespace(manifest={"preprocess": None})
    with pytest.raises(ExportError, match="fed arrays, not pictures"):
        aipp.write_aipp_files(request, files, AippSource(), first_layer_int8=False)
    assert not files


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for k in range(3):
        cv2.imwrite(str(folder / f"{k}.png"), np.roll(picture(40, 40), k, axis=1))
    return folder


@pytest.fixture
def build_with_aipp(run, small_cnn, pictures, tmp_path):
    """(arguments) -> exit code, stdout and stderr of a build with --aipp."""
    quick = ("--target", "ascend", "--effort", 0, "--duration", 0, "--out", tmp_path)
    return partial(run, "build", small_cnn, "--images", pictures, *quick, "--aipp")


def test_command_writes_aipp_and_its_host_steps(build_with_aipp, command, tmp_path):
    arguments = ("--source-color", "nv21", "--csc", "bt709-full", "--source-size", "20x24")
    arguments += ("--resize", "short-side", "--short-side", 20)
    code, _, err = build_with_aipp(*arguments, "--first-layer-int8")
    assert code == 0, err
    text = (tmp_path / "small_cnn_compression.cfg").read_text()
    assert parse_text("CompressionOptions", text, "it").enable_first_layer_quantization
    (op,) = parse_text("InsertNewOps", (tmp_path / "small_cnn_aipp.cfg").read_text(), "it").aipp_op
    assert (op.input_format, op.rbuv_swap_switch, op.csc_switch) == (1, True, True)
    assert (op.src_image_size_h, op.src_image_size_w, op.crop_size_w) == (20, 24, 16)
    assert op.matrix_r0c2[0] == 403
    readme = (tmp_path / "small_cnn_README.txt").read_text()
    assert "NV21" in readme
    assert "an AIPP configuration" in command("ascend", "check", tmp_path / "small_cnn_aipp.cfg")


def test_aipp_makes_the_images_and_no_state(run, pictures, tmp_path):
    nodes = "c = Conv(x, w) y = Add(c, h) h_out = Tanh(y)"
    weights = {"w": np.full((8, 3, 1, 1), 0.1, np.float32)}
    state = [1, 8, 16, 16]
    inputs = {"h": state, "x": [1, 3, 16, 16]}
    model = make_model(nodes, inputs, {"y": state, "h_out": state}, weights)
    onnx.save(model, tmp_path / "net.onnx")
    quick = ("--target", "ascend", "--effort", 0, "--duration", 0, "--out", tmp_path / "out")
    run.ok("build", tmp_path / "net.onnx", "--images", pictures, "--aipp", *quick)
    text = (tmp_path / "out" / "net_aipp.cfg").read_text()
    assert parse_text("InsertNewOps", text, "it").aipp_op[0].related_input_rank == 1


def test_missing_aipp_file_is_on_the_screen(build_with_aipp, tmp_path):
    code, out, err = build_with_aipp("--mean", -1)
    assert code == 0, err
    assert "no AIPP file: AIPP takes means of 0 to 255" in " ".join(out.split())
    assert not (tmp_path / "small_cnn_aipp.cfg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--csc", "bt709-full"), "csc is for YUV images"),
        (("--source-size", "20"), "reads HxW"),
        (("--source-color", "hsv"), "nv12"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments, message, build_with_aipp):
    code, _, err = build_with_aipp(*arguments)
    assert code != 0
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"color": "grey"}, {"color": "bgr"}, "makes grey of grey pictures"),
        ({}, {"color": "nv12", "size": (33, 48)}, "even sides"),
        ({"layout": "nhwc"}, {}, "NCHW"),
        ({"mean": (-0.5,)}, {}, "0 to 255"),
        ({"mean": (2.0,)}, {}, "0 to 255"),
        ({"scale": 1e-9}, {}, "float16|0 to 255"),
        ({"size": (1, 1)}, {}, "sides"),
    ],
)
def test_unsupported_aipp_options_are_refused(changes, options, message):
    with pytest.raises(ExportError, match=message):
        aipp.write_aipp(replace(RGB, **changes), AippSource(**options))


YOLO = {"size": (320, 320), "resize": "letterbox", "pad": (114.0,)}
ODD = {"size": (299, 299), "resize": "short-side", "short_side": 341}
NV12, RGB888 = {"color": "nv12"}, {}


EVEN = (
    ": DVPP needs even sides and rows, and columns of a multiple of 16 for pasting. Map boxes back"
    " to the frame by"
)


@pytest.mark.parametrize(
    ("changes", "options", "size", "note"),
    [
        (
            YOLO,
            NV12,
            (1080, 1920),
            "DVPP (height x width): resize 1080x1920 to 180x320 (linear), paste"
            " at row 70, column 0 of 320x320 filled with Y 114, U 128, V 128.",
        ),
        (
            YOLO,
            NV12,
            (1920, 1080),
            "DVPP (height x width): resize 1920x1080 to 320x180 (linear), paste"
            " at row 0, column 64 of 320x320 filled with Y 114, U 128, V 128. The calibration"
            f" resized to 320x180 and pasted at row 0, column 70{EVEN} x = (x - 64) * 6,"
            " y = (y - 0) * 6.",
        ),
        (
            YOLO,
            RGB888,
            (1920, 1080),
            "The host (height x width): resize 1920x1080 to 320x180 (linear),"
            " paste at row 0, column 70 of 320x320 filled with rgb 114.",
        ),
        (
            ODD,
            NV12,
            (720, 1280),
            "DVPP (height x width): resize 720x1280 to 342x606 (linear), crop"
            " 300x300 at row 20, column 154. It is 300x304 in memory; AIPP crops the upper left"
            f" 299x299. The calibration resized to 341x606 and cropped at row 21, column 154{EVEN}"
            " x = (x + 154) * 2.11221, y = (y + 20) * 2.10526.",
        ),
        ({}, RGB888, (16, 24), "The host (height x width): resize 16x24 to 32x48 (linear)."),
    ],
)
def test_host_resizing_is_described_with_sizes(changes, options, size, note):
    preprocess, frame_source = replace(RGB, **changes), AippSource(size=size, **options)
    _, host_notes = aipp.write_aipp(preprocess, frame_source)
    assert host_notes[0] == note
    parameters = aipp_parameters(preprocess, frame_source)
    assert parameters.src_image_size_w % 16 == 0 or not frame_source.is_yuv
    plan = aipp._plan_frame(preprocess, frame_source)
    assert parameters.crop == (plan.picture_size != preprocess.input_size)


SECRET = "/home/someone/secret/train.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Conv+BN, LayerNormalization, Conv+BN, MatMul+Add at opset 20, telling of its exporter."""
    nodes = [
        ("Conv", "x w1", "c1", "conv1", {"pads": [1] * 4}),
        ("BatchNormalization", ["c1", *(f"n1{k}" for k in "gbmv")], "b1"),
        ("Relu", "b1", "r1", "relu1"),
        ("LayerNormalization", "r1 lg", "l1", "norm", {"axis": -1}),
        ("Conv", "l1 w2", "c2", "conv2", {"pads": [1] * 4}),
        ("BatchNormalization", ["c2", *(f"n2{k}" for k in "gbmv")], "b2", "bn2"),
        ("Flatten", "b2", "f", "flatten"),
        ("MatMul", "f w3", "m", "fc"),
        ("Add", "m bias", "y", "plus"),
    ]
    shapes = {"w1": (4, 3, 3, 3), "w2": (4, 4, 3, 3), "w3": (256, 10), "lg": 8, "bias": 10}
    shapes |= {f"n{n}{k}": 4 for n in "12" for k in "gbmv"}
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    weights |= {name: np.abs(weights[name]) for name in ("n1v", "n2v")}
    model = build_net(nodes, {"x": ["N", 3, 8, 8]}, {"y": ["N", 10]}, weights, opset=20, ir=10)
    model.metadata_props.add(key="author", value=SECRET)
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=SECRET)
        node.doc_string = SECRET
    model.graph.initializer[0].doc_string = SECRET
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    onnx.save(model, path)
    np.save(path.with_suffix(".npy"), np.float32(rng.normal(size=(6, 3, 8, 8))))
    return path


def build(model, out, *arguments):
    """Build for Ascend, without a search."""
    quick = ("--target", "ascend", "--effort", 0, "--duration", 0, "--out", out)
    run_command("build", model, "--images", model.with_suffix(".npy"), *quick, *arguments)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """One build, for all that only reads it."""
    out = tmp_path_factory.mktemp("built")
    build(model, out, "--soc", "Ascend310P3")
    return out


@pytest.mark.parametrize(("cann", "opset", "ir"), [("5.0", 13, 7), ("7.0", 18, 8), ("8.2", 18, 8)])
def test_models_follow_the_named_cann(cann, opset, ir, model, folder, tmp_path):
    build(model, tmp_path, "--cann", cann)
    for ending in ("deploy_model", "amct_qdq"):
        written_model = onnx.load(tmp_path / f"net_{ending}.onnx")
        assert (written_model.opset_import[0].version, written_model.ir_version) == (opset, ir)
        types = Counter(node.op_type for node in written_model.graph.node)
        assert types["LayerNormalization"] == (0 if opset < 17 else 1)
    assert f"CANN {cann} or newer" in (tmp_path / "net_README.txt").read_text()
    # an older opset computes the same
    x = {"x": np.float32(np.random.default_rng(3).normal(size=(1, 3, 8, 8)))}
    old, new = (
        open_deploy(onnx.load(where / "net_deploy_model.onnx")).run(x)["y"]
        for where in (tmp_path, folder)
    )
    np.testing.assert_allclose(old, new, rtol=1e-5, atol=1e-5)
    record = "net_record.txt"
    assert (tmp_path / record).read_text() == (folder / record).read_text()


def test_files_carry_no_exporter_metadata(model, folder):
    assert SECRET.encode() in model.read_bytes()
    for path in folder.glob("net_*"):
        assert SECRET.encode() not in path.read_bytes(), path.name


def entries(path):
    """Node of the deploy model -> its entry, as CANN's comparison reads them."""
    (graph,) = json.loads(path.read_text())["graph"]
    return {entry["name"]: entry for entry in graph["op"]}


def value(entry, key):
    (attribute_value,) = [a["value"] for a in entry["attr"] if a["key"] == f"_datadump_{key}"]
    return attribute_value


def test_mapping_names_the_source_of_nodes(folder):
    entry_by_node = entries(folder / "net_quant.json")
    original_names = {
        name: value(entry, "original_op_names") for name, entry in entry_by_node.items()
    }
    originals = {name: attribute["list"].get("s", []) for name, attribute in original_names.items()}
    assert originals["conv1"] == originals["conv1.dequant"] == ["conv1", "BatchNormalization_1"]
    assert originals["conv2.dequant"] == ["conv2", "bn2"]
    assert originals["conv1.quant"] == []
    assert originals["relu1"] == ["relu1"]
    assert originals["fc"] == ["fc"]
    assert originals["fc.dequant"] == ["plus"]
    outputs = {}
    for name, entry in entry_by_node.items():
        outputs[name] = []
        for tensor in entry["output_desc"]:
            origin = value(tensor, "origin_name")["s"], value(tensor, "origin_output_index")["i"]
            outputs[name].append(origin)
    assert outputs["conv1.dequant"] == [("BatchNormalization_1", 0)]
    assert outputs["conv1"] == []
    assert outputs["fc.dequant"] == [("plus", 0)]
    assert outputs["x"] == [("x", 0)]
    deploy = onnx.load(folder / "net_deploy_model.onnx")
    moving = {node.name for node in deploy.graph.node if node.op_type != "Constant"}
    assert set(entry_by_node) == {"x", *moving}
    assert entry_by_node["conv1.quant"]["input"] == ["x:0"]
    assert entry_by_node["conv1.dequant"]["input"] == ["conv1:0"]
    assert {edge.rpartition(":")[0] for e in entry_by_node.values() for edge in e["input"]} <= set(
        entry_by_node
    )


def test_readme_names_every_file_and_command(folder, model, tmp_path):
    text = (folder / "net_README.txt").read_text()
    for command_text in (
        "sh net_atc.sh",
        "ais_bench --model net.om",
        "-om net.om -q net_quant.json",
    ):
        assert command_text in text
    names = {path.name for path in folder.glob("net_*")} - {"net_README.txt"}
    assert all(name in text for name in names)
    assert "Ascend310P3" in text
    done = subprocess.run(["sh", "-n", folder / "net_atc.sh"], capture_output=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "switch.cfg").write_text("{}")
    build(model, tmp_path / "b", f"--atc-flag=--fusion_switch_file={tmp_path / 'switch.cfg'}")
    assert "take it along" in (tmp_path / "b" / "net_README.txt").read_text()


@pytest.mark.parametrize("float_node", ["Conv_c1", "Conv_c2"])
def test_float_first_layer_is_not_fused(float_node, build_with_aipp):
    code, out, err = build_with_aipp("--first-layer-int8", "--keep-float", float_node)
    assert code == 0, err
    assert ("--first-layer-int8" in out) == (float_node == "Conv_c1")
