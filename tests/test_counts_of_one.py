"""Texts with a count of one: their noun and verb are singular."""

import cv2
import numpy as np
import pytest

import calib8
from calibrators.histogram import Histogram
from calibrators.statistics import find_trouble
from deploy.calibration.sample_checks import HalvesAgreement
from deploy.calibration.trt_cache import parse
from deploy.errors import ExportError, FeedError
from deploy.feed.evaluation import apply_labels, read_labels
from deploy.feed.feed import open_feed
from deploy.feed.paths import resolve_files
from deploy.frontends import load
from deploy.graph.placement import ONNXRUNTIME
from deploy.graph.plan import analyse
from deploy.targets.onnxruntime.qdq import write_qdq
from deploy.targets.tensorrt.cache_tools import check_cache
from deploy.tensors import TensorSpec
from tests.models import make_model, make_node, run_command, save_net

ROW = TensorSpec("x", "float32", (None, 3))
IMAGE = TensorSpec("image", "float32", (None, 3, 8, 8))


@pytest.fixture(scope="module")
def small_net(tmp_path_factory):
    """A model of one layer."""
    weight = {"w": np.ones((3, 3), np.float32)}
    model = make_model([make_node("Gemm", ["x", "w"], ["y"])], {"x": [1, 3]}, {"y": [1, 3]}, weight)
    return save_net(model, tmp_path_factory.mktemp("net") / "net.onnx")


def test_calibration_of_one_image(small_net, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((1, 3), np.float32))
    result = calib8.calibrate(small_net, tmp_path / "x.npy")
    text = result.to_screen(everything=True)
    assert "1 statistic of tensors from 1 image\n" in text
    assert "decoded 1 image, ran 1 inference of the model folded" in text


def test_inspection_of_one_tensor(small_net):
    text = calib8.inspect(small_net).to_screen()
    assert ": 1 node on onnxruntime" in text
    assert "\n1 tensor needs a scale\n" in text


def test_one_tensor_without_a_scale(small_net):
    model = load(small_net).model
    with pytest.raises(ExportError, match=r"needs a scale, 1 has none \(x\)"):
        write_qdq(model, analyse(model, ONNXRUNTIME), {})


def test_folder_with_one_unfed_file(tmp_path):
    for name in ("a.png", "b.heic", "c.npy"):
        (tmp_path / name).touch()
    arrays_note, unsupported_note = resolve_files(tmp_path).notes
    assert "1 file of arrays" in arrays_note
    assert "is not fed" in arrays_note
    assert "is 1 picture" in unsupported_note


def test_one_infinite_value():
    histogram = Histogram()
    histogram.observe(np.array([1, np.inf], np.float32))
    assert find_trouble(histogram) == "held 1 infinite value"


def test_one_scale_of_a_kind():
    cache = parse(b"TRT-8503-MinMaxCalibration\na: 7fc00000\na: 7fc00000\n", origin="x")
    texts = [finding.text for finding in check_cache(cache, version="8.5.3")]
    assert any(text.startswith("1 NaN scale (a)") for text in texts)
    assert any(text.startswith("1 name occurs twice: a") for text in texts)


def test_one_copied_and_one_unlabelled_image(tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name, value in ("a", 0), ("b", 1), ("c", 1):
        cv2.imwrite(str(pictures / f"{name}.png"), np.full((8, 8, 3), value, np.uint8))
    labels = tmp_path / "labels"
    labels.mkdir()
    for name in "ab":
        (labels / f"{name}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    feed = open_feed(pictures, [IMAGE])
    list(feed.samples())
    assert "1 of the 3 images is a copy of another and counts once more" in feed.notes
    truth = apply_labels(read_labels(labels), feed)
    assert truth.notes == (
        "1 of 3 evaluation images has no label file and counts as an image without objects: c.png",
    )


def test_one_label():
    feed = open_feed(np.ones((2, 3), np.float32), [ROW])
    with pytest.raises(FeedError, match=r"got 1 label for 2"):
        feed.set_labels([0])


def test_one_file_of_no_use(tmp_path):
    (tmp_path / "a.gif").write_bytes(b"GIF")
    with pytest.raises(FeedError, match="none of 1 file;"):
        resolve_files(tmp_path / "*.gif")


def test_one_inferred_scale(tmp_path):
    nodes = """
        q = QuantizeLinear(x, scale, zero)
        d = DequantizeLinear(q, scale, zero)
        y = Identity(d)
    """
    weights = {"scale": np.float32(0.1), "zero": np.int8(0)}
    model = make_model(nodes, {"x": [1, 3]}, {"y": [1, 3]}, weights)
    files = (tmp_path / "float.onnx", tmp_path / "float.cache")
    path = save_net(model, tmp_path / "net.onnx")
    text = run_command("cache", "from-qdq", path, "-o", *files, "--dla")
    assert "1 scale without a pair is " in text


def test_one_range():
    agreement = HalvesAgreement(samples=8, within=0.2, tensors=1)
    assert agreement.sentence.startswith("none of 1 range differs by")
