"""A trial of the search that cannot be run is no choice, and is told once.

The failures are made where a trial's session is opened: by what the trial has in int8, so that
they are the same with any number of threads.
"""

import json

import numpy as np
import pytest

from deploy.errors import BackendError
from deploy.runtimes.ort import OrtSession
from deploy.tuning import downstream, probe, tune
from tests.test_tuning import ran, spoiled

WHY = "the model must be what this test lets through, got another"


def layers_in_int8(model):
    """Convs of a trial whose weights are read from a pair."""
    made = {output: node.op_type for node in model.graph.node for output in node.output}
    convs = [node for node in model.graph.node if node.op_type == "Conv"]
    return {conv.name for conv in convs if made.get(conv.input[1]) == "DequantizeLinear"}


def refusing(refused):
    """ONNX Runtime, which does not load what is refused."""

    class Refusing(OrtSession):
        @classmethod
        def open(cls, model, **options):
            if refused(model):
                raise BackendError(WHY)
            return super().open(model, **options)

    return Refusing


def one_alone(model):
    """A trial of one layer: those that are tried whole have more in int8."""
    return len(layers_in_int8(model)) == 1


def always(_):
    return True


@pytest.fixture
def build(tmp_path, feed):
    def run(*words, out="o"):
        model = spoiled(tmp_path)
        return ran(model, "--images", feed, "--duration", 0, *words, out=tmp_path / out)

    return run


@pytest.fixture(scope="module")
def feed(tmp_path_factory):
    path = tmp_path_factory.mktemp("feed") / "feed.npy"
    np.save(path, np.random.default_rng(0).normal(size=(8, 3, 12, 12)).astype(np.float32))
    return path


def notes(built):
    (row,) = built.report["targets"]
    return [note for note in row["notes"] if "could not be run" in note]


def nameless(built):
    """Reasons of a build that name no part of the outputs."""
    said = built.plan.targets["onnxruntime"].choices.float_nodes.values()
    rows = [node["reason"] for row in built.report["targets"] for node in row["nodes"]]
    return [reason for reason in (*said, *rows) if reason.endswith("dB of ")]


def test_without_a_failure_nothing_is_said_of_one(build):
    built = build()
    assert built.code == 0 and notes(built) == []
    assert "failed =" not in (built.out / "spoiled.plan.toml").read_text()


def test_a_layer_that_cannot_be_tried_alone_is_not_blamed_for_noise(build, monkeypatch):
    def middle_alone(model):
        return layers_in_int8(model) == {"/mid/Conv"}

    monkeypatch.setattr(probe, "OrtSession", refusing(middle_alone))
    built = build()
    assert built.code == 0 and nameless(built) == []
    layers = {name for name in built.float_of("onnxruntime") if name.endswith("/Conv")}
    assert layers == {"/bad/Conv"}
    (note,) = notes(built)
    (row,) = built.report["targets"]
    probes = row["search"]["probes"]
    assert f": 1 of {probes} trials could not be run; the first: {WHY}" in note
    assert " ".join(note.split()) in " ".join(built.said.split())


@pytest.mark.parametrize("where", [probe, downstream])
def test_where_no_layer_can_be_tried_alone_the_search_goes_on(where, build, monkeypatch):
    """Either the trials themselves are refused, or the float model that tells what goes in."""
    refused = one_alone if where is probe else always
    monkeypatch.setattr(where, "OrtSession", refusing(refused))
    built = build("--accept")
    assert built.code == 0 and nameless(built) == []
    (note,) = notes(built)
    assert WHY in note and ": 3 of " in note
    tried = built.plan.targets["onnxruntime"].tried
    assert tried and all(one["sqnr_db"] > -28 for one in tried)


def test_a_method_whose_whole_trial_cannot_be_run_is_not_chosen(build, monkeypatch):
    wanted = build("--threads", 1)
    seen = []

    def second(model):
        seen.append(model)
        return len(seen) == 2

    monkeypatch.setattr(probe, "OrtSession", refusing(second))
    built = build("--threads", 1, out="other")
    assert built.code == 0 and "1 of " in notes(built)[0]
    names = [[one["what"] for one in b.plan.targets["onnxruntime"].tried] for b in (wanted, built)]
    assert names[0][1] not in names[1] and names[0][0] in names[1]


def test_where_nothing_can_be_run_in_int8_the_report_says_why_nothing_was_searched(
    build, monkeypatch
):
    monkeypatch.setattr(probe, "OrtSession", refusing(layers_in_int8))
    built = build("--accept")
    (note,) = [n for n in built.report["targets"][0]["notes"] if "nothing was searched" in n]
    assert "with all in int8" in note and WHY in note and "--keep-float" in note
    assert json.dumps(note).count(WHY) == 1


@pytest.mark.slow
@pytest.mark.parametrize("duration", [0, 0.01])
def test_a_layer_that_cannot_be_run_in_int8_stays_float_and_the_search_goes_on(
    duration, build, monkeypatch
):
    def with_the_middle(model):
        return "/mid/Conv" in layers_in_int8(model)

    def profiled(*_):
        raise BackendError(WHY)

    monkeypatch.setattr(probe, "OrtSession", refusing(with_the_middle))
    monkeypatch.setattr(tune, "measured", profiled)
    built = build("--accept", "--duration", duration)
    assert built.code == 0 and "nothing was searched" not in built.said
    reasons = built.plan.targets["onnxruntime"].choices.float_nodes
    assert reasons["/mid/Conv"] == "it cannot be run in int8"
    assert "leaves" in reasons["/bad/Conv"]
    (note,) = notes(built)
    assert WHY in note
