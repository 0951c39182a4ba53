"""CONTRIBUTING's recipes as patches: a toy target and a toy search, used from the command line.

What a newcomer writes is tests/recipes/*.patch and nothing else: one file and one row each. They
are applied to a copy of the packages, whose imports must still keep to the floors.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import house
from tests.test_layout import check_imports

ROOT = Path(__file__).parent.parent
RECIPES = sorted((Path(__file__).parent / "recipes").glob("*.patch"))
DATA = ROOT / "datasets" / "fashion"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the packages with the recipes applied."""
    copy = tmp_path_factory.mktemp("recipes") / "calib8"
    for name in ("calib8", "deploy", "calibrators"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", copy)
    for patch in RECIPES:
        run(["git", "apply", "--whitespace=nowarn", str(patch)], copy)
    return copy


FEED = (DATA / "fashion.onnx", "--images", DATA / "calib.txt")
UNIT = (*FEED, "--limit", 20, "--mean", 0.5, "--std", 0.5, "--target", "toy")
KSIGMA = ("--method", "ksigma", "--sigma", 4)


@pytest.fixture(scope="module")
def built(tree) -> Path:
    """The demo, built for the toy target with the toy search."""
    words = ("--effort", 0, "--duration", 0, "--out", "out", "--toy-label", "greeting")
    calib8(tree, "build", *UNIT, *KSIGMA, *words)
    return tree / "out"


def calib8(tree: Path, *words: object) -> str:
    return run([sys.executable, "-m", "deploy", *map(str, words)], tree)


def run(command: list[str], folder: Path) -> str:
    around = {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # a repository there is none of ours
    environment = {**os.environ, "PYTHONPATH": str(folder), **around}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_a_recipe_is_one_new_file_and_changes_in_one_table():
    assert [patch.stem for patch in RECIPES] == ["search", "target"]
    for patch in RECIPES:
        text = patch.read_text()
        assert text.count("\n--- /dev/null") == 1
        assert text.count("\n--- a/") == 1
        assert not [line for line in text.splitlines() if line[:1] == "-" and line[:3] != "---"]


def test_the_command_line_offers_what_the_recipes_add(tree):
    text = calib8(tree, "build", "--help-all")
    for word in ("toy", "--toy-label", "ksigma", "--sigma"):
        assert word in text


def test_the_toy_target_is_built_with_the_toy_search(built):
    engine = json.loads((built / "fashion.toy").read_text())
    assert engine["label"] == "greeting"
    assert len(engine["scales"]) > 10
    report = (built / "report.json").read_text()
    assert '"ksigma 4"' in report
    assert "fashion.toy" in report
    (toy,) = [one for one in json.loads(report)["engines"] if one.get("target") == "toy"]
    assert toy["accuracy"]["samples"] == 20
    assert toy["accuracy"]["outputs"][0]["cosine_mean"] > 0.9


def test_a_second_build_reuses_what_the_first_observed(tree, built):
    cache = ("--require-cache", "-o", built / "calib8/fashion.cache")
    calib8(tree, "calibrate", *UNIT, *KSIGMA, *cache)


def test_the_toy_engine_is_benched_like_any_other(tree, built):
    assert "fashion.toy" in calib8(tree, "bench", built / "fashion.toy", "--duration", 0.1)


def test_the_parameter_of_the_toy_search_is_refused_elsewhere(tree):
    with pytest.raises(AssertionError, match="--sigma"):
        calib8(tree, "build", *FEED, "--method", "mse", "--sigma", 4)


def test_imports_keep_to_the_contracts_with_the_additions(tree):
    known = house.modules(tree)
    assert set(known) - set(house.modules(ROOT)) == {"calibrators.ksigma", "deploy.targets.toy"}
    assert check_imports(tree).returncode == 0
