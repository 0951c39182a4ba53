"""Weights that a file lists as inputs, so that they may be fed: FP32 is timed as with constants."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import helper

from deploy.cli import cli
from deploy.frontends import load
from deploy.frontends.reader import parse_model
from deploy.pipeline.judge import float_model


@pytest.fixture
def listing(small_cnn, tmp_path):
    """small_cnn with its weights among the inputs, as PyTorch wrote them into IR 4."""
    return listed_in(4, small_cnn, tmp_path / "listing.onnx")


def listed_in(version, source, path):
    model = onnx.load(source)
    model.ir_version = version
    model.graph.input.extend(
        helper.make_tensor_value_info(one.name, one.data_type, one.dims)
        for one in model.graph.initializer
    )
    onnx.save(model, path)
    return path


def opened(model):
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"])


def test_what_fp32_is_timed_as_has_constants_for_weights(listing):
    given = opened(listing.read_bytes())
    assert len(given.get_overridable_initializers()) == load(listing).listed == 8
    timed = opened(float_model(load(listing)))
    assert [one.name for one in timed.get_inputs()] == ["x"]
    assert not timed.get_overridable_initializers()
    x = np.random.default_rng(1).normal(size=(2, 3, 16, 16)).astype(np.float32)
    assert np.allclose(timed.run(None, {"x": x})[0], given.run(None, {"x": x})[0], atol=1e-5)


def test_weights_that_ir_3_had_to_list_are_constants_already(small_cnn, tmp_path):
    path = listed_in(3, small_cnn, tmp_path / "old.onnx")
    assert not opened(path.read_bytes()).get_overridable_initializers()
    assert load(path).listed == 0 and float_model(load(path)) == path.read_bytes()


def test_names_that_nodes_share_and_weights_that_are_inputs(listing):
    model = onnx.load(listing)
    for node in model.graph.node:
        node.name = "one"
    onnx.save(model, listing)
    names = [node.name for node in parse_model(float_model(load(listing)), "it").graph.node]
    assert len(set(names)) == len(names)


def notes(model, images, out):
    run = CliRunner().invoke(
        cli,
        ["build", str(model), "--images", str(images), "--out", str(out), "--duration", "0.001",
         "--effort", "0"],
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    return json.loads((out / "report.json").read_text())["notes"]


@pytest.mark.slow
def test_the_report_says_so(listing, small_cnn, pictures, tmp_path):
    said = [note for note in notes(listing, pictures, tmp_path / "a") if "8 weights" in note]
    assert len(said) == 1 and "FP32" in said[0] and "constants" in said[0]
    assert not any("weights" in note for note in notes(small_cnn, pictures, tmp_path / "b"))
