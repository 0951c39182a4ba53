"""Trials of a search that cannot be run are no choice, and are told once."""

import itertools
import json

import onnx
import pytest

from calibrators.searches import DEFAULT_METHOD
from deploy.errors import BackendError
from deploy.method import Method, comparable_methods
from deploy.runtimes.ort import OrtSession
from deploy.tuning import float_activations, probe
from tests.test_tuning import ran, save_feed, spoiled

# The failures are made where a trial's session is opened: by what the trial has in int8, so that
# they are the same with any number of threads.
WHY = "the model must be what this test lets through, got another"


def layers_in_int8(model):
    """Convs of a trial whose weights are read from a pair."""
    op_by_tensor = {output: node.op_type for node in model.graph.node for output in node.output}
    convs = [node for node in model.graph.node if node.op_type == "Conv"]
    return {conv.name for conv in convs if op_by_tensor.get(conv.input[1]) == "DequantizeLinear"}


@pytest.fixture
def build_failing(tmp_path, monkeypatch):
    """(model -> whether ONNX Runtime refuses to load it, arguments) -> a build."""

    def run(refused, *arguments, where=probe, out="o"):
        class Refusing(OrtSession):
            @classmethod
            def open(cls, model, **options):
                read = onnx.ModelProto.FromString(model) if isinstance(model, bytes) else model
                if refused(read):
                    raise BackendError(WHY)
                return super().open(model, **options)

        monkeypatch.setattr(where, "OrtSession", Refusing)
        feed = ("--images", save_feed(tmp_path), "--duration", 0)
        built = ran(spoiled(tmp_path), *feed, *arguments, out=tmp_path / out)
        assert built.code == 0
        return built

    return run


def notes(built):
    (row,) = built.report["targets"]
    return [note for note in row["notes"] if "could not be run" in note]


def nameless(built):
    """Reasons of a build that name no part of the outputs."""
    plan_reasons = built.plan.targets["onnxruntime"].choices.float_nodes.values()
    rows = [node["reason"] for row in built.report["targets"] for node in row["nodes"]]
    return [reason for reason in (*plan_reasons, *rows) if reason.endswith("dB of ")]


def test_untestable_layer_is_not_blamed(build_failing):
    built = build_failing(lambda model: layers_in_int8(model) == {"/mid/Conv"})
    assert nameless(built) == []
    layers = {name for name in built.float_of("onnxruntime") if name.endswith("/Conv")}
    assert layers == {"/bad/Conv"}
    (note,) = notes(built)
    (row,) = built.report["targets"]
    probes = row["search"]["probes"]
    assert f" of {probes} trials could not be run; the first: {WHY}" in note


@pytest.mark.parametrize(
    ("where", "refused"),
    [
        (probe, lambda model: len(layers_in_int8(model)) == 1),  # those tried whole have more
        (float_activations, lambda model: True),  # the float model that tells what goes in
    ],
)
def test_search_continues_without_single_layer_trials(where, refused, build_failing):
    built = build_failing(refused, "--accept", where=where)
    assert nameless(built) == []
    (note,) = notes(built)
    assert WHY in note
    assert ": 3 of " in note
    front = built.plan.targets["onnxruntime"].front
    assert front
    assert all(split.row.sqnr_db > -28 for split in front)


@pytest.mark.slow
def test_method_without_runnable_trial_is_rejected(build_failing):
    unhindered = build_failing(lambda model: False, "--threads", 1)
    assert notes(unhindered) == []  # without a failure nothing is said of one
    assert "failed =" not in (unhindered.out / "calib8/spoiled.plan.toml").read_text()
    methods = [method.label for method in comparable_methods(Method.from_label(DEFAULT_METHOD))]
    best_method = methods_of_front(unhindered)[-1]
    opened = itertools.count()  # the trials of all methods come first
    refused = methods.index(best_method)
    built = build_failing(lambda model: next(opened) == refused, "--threads", 1, out="other")
    assert "1 of " in notes(built)[0]
    count = methods_of_front(built).count(best_method)
    assert count < methods_of_front(unhindered).count(best_method)


def methods_of_front(built):
    front = built.plan.targets["onnxruntime"].front
    return [split.choices.method.label for split in front if split.choices.method]


def test_report_explains_a_skipped_search(build_failing):
    built = build_failing(layers_in_int8, "--accept")
    (note,) = [n for n in built.report["targets"][0]["notes"] if "nothing was searched" in n]
    assert "with all in int8" in note
    assert WHY in note
    assert "--keep-float" in note
    assert json.dumps(note).count(WHY) == 1


@pytest.mark.slow
def test_unrunnable_int8_layer_stays_float(build_failing):
    built = build_failing(lambda model: "/mid/Conv" in layers_in_int8(model), "--accept")
    assert "nothing was searched" not in built.output
    reasons = built.plan.targets["onnxruntime"].choices.float_nodes
    assert reasons["/mid/Conv"] == "it cannot be run in int8"
    assert "leaves" in reasons["/bad/Conv"]
    (note,) = notes(built)
    assert WHY in note
