"""The demo's detector in `datasets/scenes`: what its metadata say, and what a build finds."""

import json
from pathlib import Path

import pytest

from deploy.feed.model_preprocess import resolve_preprocess
from deploy.frontends import load

SCENES = Path(__file__).parent.parent / "datasets" / "scenes"


def test_its_metadata_say_how_it_is_fed_and_what_its_classes_are_called():
    model = load(SCENES / "scenes.onnx")
    categories = json.loads((SCENES / "eval.json").read_text())["categories"]
    assert model.classes == {one["id"]: one["name"] for one in categories}
    how = resolve_preprocess(None, model.carried, model.inputs[0]).how
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
