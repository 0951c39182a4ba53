"""Paths that are no UTF-8, and models with one name for several nodes: through every command."""

import json
import os
import shutil

import numpy as np
import onnx
import pytest

from deploy.errors import BackendError
from deploy.runtimes.ort import OrtSession

QUICK = ("--duration", 0.02, "--effort", 0, "--accept")


@pytest.fixture
def folder(tmp_path):
    """A folder whose name is no UTF-8."""
    path = tmp_path / os.fsdecode(b"n\xff")
    try:
        path.mkdir()
    except OSError:
        pytest.skip("file names are UTF-8 here")
    return path


@pytest.fixture
def x(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    return tmp_path / "x.npy"


def beside(model, path):
    """The model with its weights in a file beside it."""
    near = path.parent.parent / "near"
    near.mkdir()
    onnx.save(onnx.load(model), near / path.name, save_as_external_data=True, location="w.bin",
              size_threshold=0)  # fmt: skip
    for file in near.iterdir():
        shutil.copy(file, path.parent / file.name)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["inside", "beside"])
def test_a_path_that_is_no_utf_8_is_built_for_every_target(weights, small_cnn, x, folder, run):
    model = folder / os.fsdecode(b"m\xe9.onnx" if weights == "inside" else b"m.onnx")
    shutil.copy(small_cnn, model) if weights == "inside" else beside(small_cnn, model)
    shutil.copy(x, folder / "x.npy")
    feed, out = ("--images", folder / "x.npy"), folder / "out"
    words = ("build", model, *feed, *QUICK, "--out", out, "--target", "onnxruntime,tensorrt,ascend")
    code, _, error = run(*words)
    assert code == 0, error
    assert os.fsencode(f"={model.stem}_deploy") in next(out.glob("*_atc.sh")).read_bytes()
    json.loads((out / "report.json").read_text("utf-8"))
    engine = next(out.glob("*.int8.onnx"))
    assert run(*words, "--require-cache")[0] == 0
    assert run("explain", out, *feed)[0] == 0
    assert run("inspect", model)[0] == run("inspect", out / f"{model.stem}.cache")[0] == 0
    assert run("bench", engine, "--duration", 0, "--warmup", 0)[0] == 0
    assert run("compare", model, engine, *feed)[0] == 0


def test_weights_beside_such_a_path_are_not_taken_from_the_working_folder(
    small_cnn, folder, tmp_path, monkeypatch
):
    model = beside(small_cnn, folder / "m.onnx")
    monkeypatch.chdir(tmp_path / "near")  # which has a file of the same name
    with pytest.raises(BackendError, match="must have a path in UTF-8"):
        OrtSession.open(model)


@pytest.mark.slow
def test_nodes_that_share_a_name_are_renamed_and_said(small_cnn, x, tmp_path, run):
    model = onnx.load(small_cnn)
    for node in model.graph.node[1:]:
        node.name = "same"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(BackendError, match="same node name"):
        OrtSession.open(tmp_path / "m.onnx")
    words = ("--images", x, "--out", tmp_path / "o", *QUICK)
    targets = ("--target", "onnxruntime,tensorrt,ascend")
    code, _, error = run("build", tmp_path / "m.onnx", *words, *targets)
    assert code == 0, error
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    names = [node["name"] for node in report["targets"][0]["nodes"]]
    assert len(set(names)) == len(names)
    note = "Renamed 8 nodes whose name another node has."
    assert note in json.dumps(report)
    assert note in run("inspect", tmp_path / "m.onnx")[1]
