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


def test_metadata_name_preprocess_and_classes():
    model = load(SCENES / "scenes.onnx")
    categories = json.loads((SCENES / "eval.json").read_text())["categories"]
    assert model.classes == {category["id"]: category["name"] for category in categories}
    preprocess = resolve_preprocess(None, model.metadata_preprocess, model.inputs[0]).preprocess
    assert (preprocess.size, preprocess.resize, preprocess.color) == (
        (160, 160),
        "letterbox",
        "rgb",
    )
    assert preprocess.scale / preprocess.std[0] == pytest.approx(1 / 255)


@pytest.mark.slow
def test_built_detector_finds_annotated_items(run, tmp_path):
    scenes = sorted((SCENES / "eval").iterdir())[:30]
    (tmp_path / "some.txt").write_text("\n".join(map(str, scenes)))
    evaluation_options = "--eval-images", tmp_path / "some.txt", "--labels", SCENES / "eval.json"
    feed_options = "--images", SCENES / "calib.txt", "--limit", 30, "--effort", 0, "--duration", 0
    run.ok(
        "build", SCENES / "scenes.onnx", *feed_options, *evaluation_options, "--out", tmp_path / "o"
    )
    accuracy = json.loads((tmp_path / "o" / "report.json").read_text())["engines"][1]["accuracy"]
    assert accuracy["task"]["task"] == "boxes"
    page = (tmp_path / "o" / "report.html").read_text()
    assert "sneaker" in page
    assert "pullover" in page
    assert _share_right(tmp_path, scenes[:4]) > 0.6  # a wrong place would match none


def _share_right(folder, scenes):
    """Run the program beside the engine on larger scenes; return its share of true boxes."""
    truth = json.loads((SCENES / "eval.json").read_text())
    names = {category["id"]: category["name"] for category in truth["categories"]}
    files = {category["id"]: Path(category["file_name"]).name for category in truth["images"]}
    right = []
    for scene in scenes:
        wide = cv2.copyMakeBorder(cv2.imread(str(scene)), 0, 0, 0, 80, cv2.BORDER_REPLICATE)
        cv2.imwrite(str(folder / "big.png"), cv2.resize(wide, None, fx=2, fy=2))
        process = subprocess.run(
            [sys.executable, folder / "o" / "scenes_run.py", folder / "big.png"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        items = [
            category
            for category in truth["annotations"]
            if files[category["image_id"]] == scene.name
        ]
        for line in process.splitlines()[1:]:
            label_and_score, _, box = line.partition(" [")
            box_corners = np.array(json.loads(f"[{box}")) / 2
            overlaps = [
                names[category["category_id"]] in label_and_score
                and _iou(box_corners, category["bbox"])
                for category in items
            ]
            right.append(max(overlaps) > 0.5)
    assert len(right) > len(scenes)
    return np.mean(right)


def _iou(corners, item):
    low, high = np.array(item[:2]), np.add(item[:2], item[2:])
    shared = np.prod(np.clip(np.minimum(corners[2:], high) - np.maximum(corners[:2], low), 0, None))
    return shared / (np.prod(corners[2:] - corners[:2]) + np.prod(high - low) - shared)
