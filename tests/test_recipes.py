"""CONTRIBUTING's recipes as patches: a toy target and a toy search, used from the command line.

What a newcomer writes is tests/recipes/*.patch and nothing else: one file and one row each. They
are applied to a copy of the packages, whose imports must still keep to the floors. The context of a
row is only the line above it (`git apply --unidiff-zero`), so that a patch fits beside rows that
are added later.
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
def patched_tree(tmp_path_factory) -> Path:
    """A copy of the packages with the recipes applied."""
    copy = tmp_path_factory.mktemp("recipes") / "calib8"
    for name in ("calib8", "deploy", "calibrators"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", copy)
    for patch in RECIPES:
        run(["git", "apply", "--unidiff-zero", "--whitespace=nowarn", str(patch)], copy)
    return copy


FEED = (DATA / "fashion.onnx", "--images", DATA / "calib.txt")
TOY_OPTIONS = (*FEED, "--limit", 20, "--mean", 0.5, "--std", 0.5, "--target", "toy")
KSIGMA_OPTIONS = ("--method", "ksigma", "--sigma", 4)


@pytest.fixture(scope="module")
def toy_build(patched_tree) -> Path:
    """The demo, built for the toy target with the toy search."""
    arguments = ("--effort", 0, "--duration", 0, "--out", "out", "--toy-label", "greeting")
    calib8(patched_tree, "build", *TOY_OPTIONS, *KSIGMA_OPTIONS, *arguments)
    return patched_tree / "out"


def calib8(patched_tree: Path, *arguments: object) -> str:
    return run([sys.executable, "-m", "deploy", *map(str, arguments)], patched_tree)


def run(command: list[str], folder: Path) -> str:
    git_limits = {
        "GIT_CEILING_DIRECTORIES": str(folder.parent)
    }  # a repository there is none of ours
    environment = {**os.environ, "PYTHONPATH": str(folder), **git_limits}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, f"{command}:\n{process.stdout}{process.stderr}"
    return process.stdout


def test_recipe_adds_one_file_and_row():
    assert [patch.stem for patch in RECIPES] == ["search", "target"]
    for patch in RECIPES:
        text = patch.read_text()
        assert text.count("\n--- /dev/null") == 1
        assert text.count("\n--- a/") == 1
        assert not [line for line in text.splitlines() if line[:1] == "-" and line[:3] != "---"]


def test_help_shows_the_added_options(patched_tree):
    text = calib8(patched_tree, "build", "--help-all")
    for word in ("toy", "--toy-label", "ksigma", "--sigma"):
        assert word in text


def test_toy_target_builds_with_toy_search(toy_build):
    engine = json.loads((toy_build / "fashion.toy").read_text())
    assert engine["label"] == "greeting"
    assert len(engine["scales"]) > 10
    report = (toy_build / "report.json").read_text()
    assert '"ksigma 4"' in report
    assert "fashion.toy" in report
    (toy,) = [row for row in json.loads(report)["engines"] if row.get("target") == "toy"]
    assert toy["accuracy"]["samples"] == 20
    assert toy["accuracy"]["outputs"][0]["cosine_mean"] > 0.9


def test_toy_builds_from_qdq_model(patched_tree, toy_build):
    arguments = ("--target", "toy", "--effort", 0, "--duration", 0, "--out", "again")
    calib8(patched_tree, "build", toy_build / "fashion.toy.onnx", *arguments)
    engine = json.loads((toy_build / "fashion.toy").read_text())
    rebuilt = json.loads((patched_tree / "again/fashion.toy.toy").read_text())
    assert rebuilt["scales"].keys() == engine["scales"].keys()
    (toy,) = json.loads((patched_tree / "again/report.json").read_text())["targets"]
    assert any("the toy's are uint8" in note for note in toy["notes"])


def test_second_build_reuses_the_cache(patched_tree, toy_build):
    cache = ("--require-cache", "-o", toy_build / "calib8/fashion.cache")
    calib8(patched_tree, "calibrate", *TOY_OPTIONS, *KSIGMA_OPTIONS, *cache)


def test_toy_engine_can_be_benched(patched_tree, toy_build):
    assert "fashion.toy" in calib8(
        patched_tree, "bench", toy_build / "fashion.toy", "--duration", 0.1
    )


def test_toy_parameter_is_refused_elsewhere(patched_tree):
    with pytest.raises(AssertionError, match="--sigma"):
        calib8(patched_tree, "build", *FEED, "--method", "mse", "--sigma", 4)


def test_added_modules_keep_import_contracts(patched_tree):
    modules = house.modules(patched_tree)
    assert set(modules) - set(house.modules(ROOT)) == {"calibrators.ksigma", "deploy.targets.toy"}
    assert check_imports(patched_tree).returncode == 0
