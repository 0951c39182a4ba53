"""Pictures in another color order or scale than the model learned from."""

import re
from pathlib import Path
from shutil import copytree

import cv2
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from deploy.pipeline.readings import is_beyond_chance, is_much_surer
from tests.models import save_net

METADATA = {"author": "Ultralytics", "version": "8.2.46", "task": "detect", "stride": "16"}
METADATA |= {"imgsz": "[32, 32]", "names": "{0: 'tomato', 1: 'apple'}"}


@pytest.fixture(scope="module")
def red_squares(tmp_path_factory):
    """A folder of 20 pictures of red squares on grey."""
    folder = tmp_path_factory.mktemp("squares")
    rng = np.random.default_rng(0)
    for number in range(20):
        picture = rng.integers(100, 156, (32, 32, 1)).repeat(3, axis=2).astype(np.uint8)
        row, column = rng.integers(0, 4, 2) * 8
        picture[row : row + 8, column : column + 8] = (40, 40, 230)  # OpenCV's order is BGR
        cv2.imwrite(str(folder / f"{number:02}.png"), picture)
    return folder


@pytest.fixture
def red_detector(detector, tmp_path):
    """(scale, metadata) -> a detector whose scores are high where red exceeds blue."""

    def make(scale=1.0, metadata=None):
        model = onnx.load(detector)
        for tensor in model.graph.initializer:
            weights = numpy_helper.to_array(tensor).copy()
            if tensor.name in ("w8", "w16"):
                weights[4:] = np.reshape([12, 0, -12], (3, 1, 1)) / weights[0, 0].size
                weights[5] *= 0.3
                tensor.CopyFrom(numpy_helper.from_array(weights * np.float32(scale), tensor.name))
        if metadata:
            onnx.helper.set_model_props(model, metadata)
        return save_net(model, tmp_path / "red.onnx")

    return make


@pytest.fixture
def warnings_of(run, red_squares, tmp_path):
    """(model, *options) -> the warnings and the verdict of a build, in one line."""

    def call(model, *options):
        if "--images" not in options:
            options = ("--images", red_squares, *options)
        arguments = ("--effort", 0, "--duration", 0, "--out", tmp_path / "o", *options)
        _, out, error = run("build", model, *arguments)
        return " ".join((out + error).split())

    return call


def test_right_colors_are_no_warning(red_detector, warnings_of):
    assert "FP32 finds" not in warnings_of(red_detector())


def test_swapped_colors_are_named(red_detector, warnings_of):
    text = warnings_of(red_detector(), "--color", "bgr")
    doubt = "FP32 finds 16 boxes as RGB, but 0 as BGR; check --color rgb"
    assert f"Verdict doubtful: the float model's inputs are in question: {doubt}" in text
    assert text.count(doubt) == 1


def test_reading_without_more_boxes_is_unnamed(red_detector, warnings_of):
    assert "FP32 finds" not in warnings_of(red_detector(scale=0.3), "--color", "bgr")


@pytest.mark.slow
def test_readings_compare_only_readable_pictures(
    red_detector, red_squares, run, warnings_of, tmp_path
):
    model, cache = red_detector(), tmp_path / "red.cache"
    run("calibrate", model, "--images", red_squares, "--target", "tensorrt", "-o", cache)
    pictures = tmp_path / "pictures"
    copytree(red_squares, pictures)
    cut_picture = pictures / "13.png"
    cut_picture.write_bytes(cut_picture.read_bytes()[:200])  # its header is good

    # a trusted cache does not read the pictures, so that this one is bad shows when readings are
    trust = ("--target", "tensorrt", "--cache", cache, "--trust-cache")
    other = ("--images", pictures, "--skip-bad", "--eval-images", red_squares, "--color", "bgr")
    assert "FP32 finds 15 boxes as RGB, but 0" in warnings_of(model, *trust, *other)


def test_metadata_that_fits_better_is_named(red_detector, warnings_of):
    text = warnings_of(red_detector(metadata=METADATA), "--color", "bgr")
    assert "FP32 finds 16 boxes as the model's metadata (Ultralytics 8.2.46" in text


def test_pixels_that_are_divided_needlessly_are_named(red_detector, warnings_of):
    text = warnings_of(red_detector(scale=1 / 255), "--preprocess", "unit")
    assert (
        "FP32 finds 16 boxes with pixels of 0 to 255, but 0 with the present preprocessing" in text
    )
    assert "check --preprocess raw" in text


@pytest.fixture
def build_fashion(run, tmp_path):
    """(*options) -> the screen of a build of the bundled classifier with labels, in one line."""

    def call(*options):
        folder = Path(__file__).parent.parent / "datasets" / "fashion"
        evaluation_lines = (folder / "eval.txt").read_text().splitlines()[:60]
        evaluation = tmp_path / "eval.txt"
        evaluation.write_text("".join(f"{folder}/{line}\n" for line in evaluation_lines))
        images = ("--images", folder / "calib.txt", "--eval-images", evaluation)
        usual = ("--limit", 8, "--effort", 0, "--duration", 0, "--out", tmp_path / "o")
        _, out, _ = run("build", folder / "fashion.onnx", *images, *usual, *options)
        return " ".join(out.split())

    return call


def test_crop_of_pictures_that_fit_the_input_is_named(build_fashion):
    normalized = ("--mean", 0.5, "--std", 0.5)
    text = build_fashion(*normalized, "--resize", "short-side", "--short-side", 56)
    assert "28x28 already, and are resized to 56 and cropped; check --resize stretch" in text
    assert "check --resize" not in build_fashion(*normalized, "--resize", "stretch", "--force")


@pytest.mark.slow
def test_preset_that_is_right_by_labels_is_named(build_fashion):
    text = build_fashion()
    assert (
        "FP32 gets 13 of 16 images right with values of -1 to 1, but 3 with the present"
        " preprocessing" in text
    )
    (repair,) = re.findall(r"check (--preprocess [\w-]+)", text)
    assert "Verdict good" in build_fashion(*repair.split())


@pytest.mark.parametrize(
    ("wins", "losses", "better"), [(13, 3, True), (12, 4, False), (6, 0, True), (5, 0, False)]
)
def test_better_reading_wins_a_sign_test(wins, losses, better):
    assert is_beyond_chance(wins, losses) is better


@pytest.mark.parametrize(("score", "better"), [(0.99, True), (0.74, False), (0.7, False)])
def test_small_gain_is_not_better(score, better):
    assert is_much_surer([np.array([score])] * 16, [np.array([0.7])] * 16) is better
