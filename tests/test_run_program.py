"""X_run.py, the program beside an engine: what it feeds, decodes, draws and prints."""

from __future__ import annotations

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from deploy.feed.pixels import decode_image, preprocess_image
from deploy.feed.preprocess import Preprocess
from deploy.targets.onnxruntime.run_script import read_characters, run_program
from deploy.tasks.boxes import BoxDetection
from deploy.tasks.detections import suppress_overlaps
from deploy.tasks.detector import (
    COLUMNS,
    LIST,
    MAP,
    NUMBER_PER_BOX,
    ROWS,
    Columns,
    RowDecoder,
)
from deploy.tasks.keypoints import Points, SimccPoints
from deploy.tasks.maps import HeatMaps, MaskMaps, Pixels
from deploy.tasks.sequences import Text
from deploy.tasks.vectors import Classes, Labels
from deploy.tensors import TensorSpec
from tests.models import make_model, save_net

PREPROCESS = Preprocess(size=(32, 48), layout="nchw", resize="letterbox", pad=(114.0,))
INPUTS = [TensorSpec("x", "float32", (1, 3, 32, 48))]
CANVAS = np.zeros((64, 96, 3), np.uint8)  # twice the input
CONF = 0.3


def load_program(task, outputs, folder, classes=None):
    """Return the names of the program that shows a task's outputs."""
    text = run_program("a.onnx", INPUTS, PREPROCESS, classes or {}, task, outputs)
    (folder / "a_run.py").write_text(text)
    return runpy.run_path(str(folder / "a_run.py"))


def show(task, outputs, folder, classes=None):
    """Return the lines and the picture of a task's outputs."""
    canvas = CANVAS.copy()
    lines = load_program(task, outputs, folder, classes)["show"](outputs, canvas, CONF)
    return lines, canvas


@pytest.mark.parametrize(
    "preprocess",
    [
        {"size": (20, 30), "color": "rgb", "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)},
        {"size": (20, 30), "color": "grey", "interpolation": "area"},
        {"size": (20, 30), "color": "grey", "scale": 1.0},
        {"size": (90, 80), "color": "bgr", "interpolation": "area", "layout": "nhwc"},
        {"size": (32, 32), "color": "rgb", "resize": "letterbox", "pad": (114.0,)},
        {"size": (48, 32), "color": "rgb", "resize": "letterbox", "anchor": "top-left"},
        {"size": (24, 24), "color": "rgb", "resize": "short-side", "interpolation": "cubic"},
        {"size": (24, 64), "color": "bgr", "resize": "fit-height", "pad": (1.0, 2.0, 3.0)},
    ],
)
@pytest.mark.parametrize("shape", [(37, 51), (51, 37)])
def test_run_program_feeds_calibration_input(preprocess, shape, tmp_path):
    preprocess = Preprocess(**{"layout": "nchw"} | preprocess)
    colors = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    if preprocess.deep:
        colors = np.random.default_rng(0).integers(0, 65536, (*shape, 1), np.uint16)
    path = str(tmp_path / "picture.png")
    cv2.imwrite(path, colors)
    engine = 'it\'s """ a.onnx'  # a file's name is not code
    save_net(make_model("y = Relu (x)", {"x": [1]}, {"y": [1]}), tmp_path / engine)
    text = run_program(
        engine, [TensorSpec("x", "float32", (1, 3, None, None))], preprocess, {0: engine}
    )
    (tmp_path / "a_run.py").write_text(text)
    data = Path(path).read_bytes()
    grey = preprocess.color == "grey"
    expected = preprocess_image(
        decode_image(data, path, grey=grey, deep=preprocess.deep), preprocess
    )
    cv2.ipp.setUseIPP(True)  # as in a new process
    program = runpy.run_path(str(tmp_path / "a_run.py"))
    assert program["CLASSES"] == {0: engine}
    ((name, picture, _),) = program["read"](path)
    assert name == "picture.png"
    np.testing.assert_array_equal(program["prepare"](picture), expected, strict=True)


def test_run_program_refuses_picture_below_crop(tmp_path):
    preprocess = Preprocess(
        size=(24, 26), color="rgb", layout="nchw", resize="short-side", short_side=24
    )
    text = run_program("a.onnx", [TensorSpec("x", "float32", (1, 3, 24, 26))], preprocess, {})
    (tmp_path / "a_run.py").write_text(text)
    program = runpy.run_path(str(tmp_path / "a_run.py"))
    with pytest.raises(SystemExit, match="24x26, got 24x24"):
        program["prepare"](np.zeros((30, 30, 3), np.uint8))


CELLS = 24 + 6  # of 8 and of 16 pixels over 32 x 48


def draw_rows(rng, coding, width):
    """Return numbers of boxes as a coding has them, [CELLS, width]."""
    if coding == "distribution":
        return rng.normal(size=(CELLS, 4 * width), scale=2)
    if coding == "cell":
        return rng.normal(size=(CELLS, 4), scale=0.5)
    low = rng.uniform(0, 24, (CELLS, 2))
    return np.concatenate([low, low + rng.uniform(4, 20, (CELLS, 2))], axis=1)


@pytest.mark.parametrize("coding", ["corners", "centre", "cell", "distribution"])
@pytest.mark.parametrize("layout", [ROWS, COLUMNS, MAP])
@pytest.mark.parametrize("extra", ["", "gate", "background", "points", "masks", "relative"])
def test_program_finds_the_boxes_that_are_judged(coding, layout, extra, rng, tmp_path):
    box_width = 4 * 5 if coding == "distribution" else 4
    class_count = 3 + (extra == "background")
    boxes = draw_rows(rng, coding, 5)
    if extra == "relative" and coding in ("corners", "centre"):
        boxes = boxes / [48, 32, 48, 32]
    scores = rng.uniform(0, 1, (CELLS, class_count)) ** 3
    extra_width = {"gate": 1, "points": 6, "masks": 4}.get(extra, 0)
    extras = rng.uniform(0, 1, (CELLS, extra_width))
    table = np.concatenate([boxes, scores, extras], axis=1).astype(np.float32)
    shape = {ROWS: table, COLUMNS: table.T, MAP: table.T.reshape(table.shape[1], 5, -1)}
    outputs = {"y": shape[layout][None], "maps": rng.normal(size=(1, 4, 8, 12))}

    end = box_width + class_count
    tail = Columns("y", layout, end, end + extra_width) if extra_width else None
    decoder = RowDecoder(
        scores=(Columns("y", layout, box_width, end),),
        box_columns=(Columns("y", layout, 0, box_width),),
        gates=(tail,) if tail is not None and extra == "gate" else (),
        shape_columns=(tail,) if tail is not None and extra != "gate" else (),
        strides=(8, 16),
        coding=coding,
        class_count=3,
        gate_activation="sigmoid",
        background=1 if extra == "background" else None,
        point_width=2 if extra == "points" else 0,
        mask_maps="maps" if extra == "masks" else "",
    )
    program = load_program(BoxDetection(decoder), outputs, tmp_path)
    corners, found_scores, kinds, _ = program["find_boxes"](outputs, CONF)
    judged = decoder.boxes({"x": np.zeros((1, 3, 32, 48))}, outputs)
    judged = suppress_overlaps(judged).above(CONF)
    order, judged_order = np.argsort(found_scores), np.argsort(judged.scores)
    np.testing.assert_allclose(found_scores[order], judged.scores[judged_order], rtol=1e-5)
    np.testing.assert_array_equal(kinds[order], judged.classes[judged_order])
    scale = 1.0
    if extra == "relative" and coding in ("corners", "centre"):
        scale = [48, 32, 48, 32]
    np.testing.assert_allclose(corners[order], judged.boxes[judged_order] * scale, rtol=1e-4)

    canvas = CANVAS.copy()
    lines = program["show"](outputs, canvas, CONF)
    assert len(lines) == len(judged.scores)
    assert canvas.any()
    assert program["show"](outputs, canvas, 1.1) == ["no boxes above 1.1"]


ROWS_OF_LIST = np.array([[4, 5, 20, 25, 0.9, 1], [1, 1, 8, 8, 0.2, 0]], np.float32)


@pytest.mark.parametrize(
    ("decoder", "outputs"),
    [
        (
            RowDecoder(
                scores=(Columns("y", LIST, 4, 5),),
                box_columns=(Columns("y", LIST, 0, 4),),
                class_columns=(Columns("y", LIST, 5, 6),),
                coding="corners",
                is_list=True,
            ),
            {"y": ROWS_OF_LIST[None]},
        ),
        (
            RowDecoder(
                scores=(Columns("s", NUMBER_PER_BOX),),
                box_columns=(Columns("y", LIST, 0, 4),),
                class_columns=(Columns("k", NUMBER_PER_BOX),),
                coding="corners",
                is_list=True,
            ),
            {"y": ROWS_OF_LIST[:, :4], "s": ROWS_OF_LIST[:, 4], "k": ROWS_OF_LIST[:, 5]},
        ),
    ],
)
def test_program_draws_a_list_of_boxes(decoder, outputs, tmp_path):
    lines, canvas = show(BoxDetection(decoder), outputs, tmp_path, {1: "cat"})
    assert lines == ["cat 0.90 [8.0, 10.0, 40.0, 50.0]"]
    assert canvas[10:50, 8:10].any()
    rotated = BoxDetection(replace(decoder, coding="centre"))  # is not drawn as corners
    assert run_program("a.onnx", INPUTS, PREPROCESS, {}, rotated, outputs) == run_program(
        "a.onnx", INPUTS, PREPROCESS, {}
    )


def one_hot(shape, places):
    values = np.zeros(shape, np.float32)
    for place in places:
        values[place] = 1
    return values


@pytest.mark.parametrize(
    ("task", "outputs", "expected"),
    [
        (
            Classes(("y",), (4,)),
            {"y": np.float32([[0, 0, 9, 1]])},
            "y class dog 1.00, class 3 0.00",
        ),
        (Labels("y", activation="sigmoid"), {"y": np.float32([[-9, -9, 9]])}, "dog 1.00"),
        (Classes(("y",), (1,), are_numbers=True), {"y": np.int64([[2]])}, "class dog"),
        (Text("y", 4, 0), {"y": np.eye(4)[[2, 2, 0, 2]][None]}, "dogdog"),
        (
            Pixels("y", 4),
            {"y": one_hot((1, 4, 8, 12), [np.s_[:, 2]])},
            "dog 100.0 % of the picture",
        ),
        (
            Pixels("y", 4, axis=-1),
            {"y": one_hot((1, 8, 12, 4), [np.s_[..., 2]])},
            "dog 100.0 % of the picture",
        ),
        (
            MaskMaps(("y",)),
            {"y": one_hot((1, 1, 32, 48), [np.s_[..., 4:8, 4:8]])},
            "region 0 [8, 8",
        ),
        (
            HeatMaps(("y",), 1),
            {"y": one_hot((1, 1, 8, 12), [(0, 0, 3, 5)])},
            "point 0 [44.0, 28.0]",
        ),
        (Points({"y": 2}, 1), {"y": np.float32([[0.5, 0.5]])}, "point 0 [48.0, 32.0]"),
        (
            SimccPoints(("x", "y"), 1),
            {"x": one_hot((1, 1, 96), [(0, 0, 40)]), "y": one_hot((1, 1, 64), [(0, 0, 20)])},
            "point 0 [40.0, 20.0]",
        ),
        (None, {"y": np.float32([[1, 2]])}, "y float32 [1, 2], 1 to 2"),
        (Labels("y"), {"y": np.float32([[0.9]])}, "y float32 [1, 1], 0.9 to 0.9"),
    ],
)
def test_program_shows_each_task(task, outputs, expected, tmp_path):
    if isinstance(task, Pixels):
        outputs = {"y": np.where(outputs["y"], 1.0, 0.0)}
    lines, canvas = show(task, outputs, tmp_path, {2: "dog"})
    assert lines[0].startswith(expected)
    assert canvas.any() == ("float32" not in expected)


@pytest.mark.parametrize(("symbols", "characters"), [(4, {1: "d", 2: "o", 3: " "}), (5, {})])
def test_characters_of_metadata_are_those_of_the_symbols(symbols, characters):
    model = make_model([], {"x": (1,)}, {"x": (1,)})
    model.metadata_props.add(key="character", value="d\no")
    assert read_characters(model, Text("y", symbols, 0)) == characters
    assert read_characters(model, Text("y", symbols, symbols - 1)) == {}


@pytest.mark.slow
def test_program_reads_folders_and_videos(tmp_path):
    model = make_model("y = GlobalAveragePool (x)", {"x": [1, 3, 32, 48]}, {"y": [1, 3, 1, 1]})
    save_net(model, tmp_path / "a.onnx")
    (tmp_path / "a_run.py").write_text(run_program("a.onnx", INPUTS, PREPROCESS, {}))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "notes.txt").write_text("no picture")
    for name in ("0.png", "1.jpg"):
        cv2.imwrite(str(tmp_path / "photos" / name), CANVAS)
    video = cv2.VideoWriter(
        str(tmp_path / "clip.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 5, CANVAS.shape[1::-1]
    )
    for _ in range(3):
        video.write(CANVAS)
    video.release()

    def run_it(*arguments):
        command = [sys.executable, "a_run.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    ended = run_it("photos", "clip.avi", "--out", "drawn")
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [
        "0.png",
        "1.jpg",
        "clip.mp4",
    ]
    assert ended.stdout.count(" ms\n") == 5
    assert "5 pictures" in ended.stdout
    (tmp_path / "albums" / "photos").mkdir(parents=True)
    ended = run_it("albums")
    assert ended.returncode == 1
    assert "no picture was read from albums" in ended.stderr
    (tmp_path / "drawn" / "0.png").unlink()
    (tmp_path / "drawn" / "0.png").mkdir()  # where the picture would be written
    for out in ("a.onnx", "drawn"):
        ended = run_it("photos", "--out", out)
        assert ended.returncode == 1
        assert "give another folder" in ended.stderr
        assert "Traceback" not in ended.stderr
    for arguments, code in (((), 2), (("nothing.png",), 1)):
        ended = run_it(*arguments)
        assert ended.returncode == code
        assert "Traceback" not in ended.stderr
    assert "nothing.png" in ended.stderr
    (tmp_path / "a.onnx").unlink()
    ended = run_it("photos")
    assert ended.returncode == 1
    assert "a.onnx is missing" in ended.stderr
    assert "Traceback" not in ended.stderr
