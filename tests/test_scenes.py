"""The demo's detector in `datasets/scenes`: what its metadata say, and what a build finds."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from deploy.feed.model_preprocess import resolve_preprocess
from deploy.frontends import load

SCENES = Path(__file__).parent.parent / "datasets" / "scenes"


def test_its_metadata_say_how_it_is_fed_and_what_its_classes_are_called():
    model = load(SCENES / "scenes.onnx")
    categories = json.loads((SCENES / "eval.json").read_text())["categories"]
    assert model.classes == {one["id"]: one["name"] for one in categories}
    how = resolve_preprocess(None, model.metadata_preprocess, model.inputs[0]).preprocess
    assert (how.size, how.resize, how.color) == ((160, 160), "letterbox", "rgb")
    assert how.scale / how.std[0] == pytest.approx(1 / 255)


@pytest.mark.slow
def test_it_is_built_as_a_detector_that_finds_the_annotated_items(run, tmp_path):
    scenes = sorted((SCENES / "eval").iterdir())[:30]
    (tmp_path / "some.txt").write_text("\n".join(map(str, scenes)))
    judged = "--eval-images", tmp_path / "some.txt", "--labels", SCENES / "eval.json"
    words = "--images", SCENES / "calib.txt", "--limit", 30, "--effort", 0, "--duration", 0
    run.ok("build", SCENES / "scenes.onnx", *words, *judged, "--out", tmp_path / "o")
    found = json.loads((tmp_path / "o" / "report.json").read_text())["engines"][1]["accuracy"]
    assert found["task"]["task"] == "boxes"
    page = (tmp_path / "o" / "report.html").read_text()
    assert "sneaker" in page and "pullover" in page
    assert _share_right(tmp_path, scenes[:8]) > 0.6  # a wrong place would match none


def _share_right(folder, scenes):
    """Run the program beside the engine on larger scenes; return its share of true boxes."""
    truth = json.loads((SCENES / "eval.json").read_text())
    names = {one["id"]: one["name"] for one in truth["categories"]}
    files = {one["id"]: Path(one["file_name"]).name for one in truth["images"]}
    right = []
    for scene in scenes:
        wide = cv2.copyMakeBorder(cv2.imread(str(scene)), 0, 0, 0, 80, cv2.BORDER_REPLICATE)
        cv2.imwrite(str(folder / "big.png"), cv2.resize(wide, None, fx=2, fy=2))
        said = subprocess.run(
            [sys.executable, folder / "o" / "scenes_run.py", folder / "big.png"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        items = [one for one in truth["annotations"] if files[one["image_id"]] == scene.name]
        for line in said.splitlines():
            words, _, box = line.partition(" [")
            found = np.array(json.loads(f"[{box}")) / 2
            overlaps = [
                names[one["category_id"]] in words and _iou(found, one["bbox"]) for one in items
            ]
            right.append(max(overlaps) > 0.5)
    assert len(right) > len(scenes)
    return np.mean(right)


def _iou(corners, item):
    low, high = np.array(item[:2]), np.add(item[:2], item[2:])
    shared = np.prod(np.clip(np.minimum(corners[2:], high) - np.maximum(corners[:2], low), 0, None))
    return shared / (np.prod(corners[2:] - corners[:2]) + np.prod(high - low) - shared)
