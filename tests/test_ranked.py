"""Models that rank their classes themselves, by TopK or ArgMax, judged by labels and without."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

SAMPLES = 24


@pytest.fixture(scope="module")
def ranking(small_cnn, tmp_path_factory):
    """(outputs, k) -> the small CNN with its logits ranked, which gives these outputs."""
    folder = tmp_path_factory.mktemp("ranking")

    def made(outputs, k=3):
        model = onnx.load(small_cnn)
        graph = model.graph
        graph.initializer.append(numpy_helper.from_array(np.array([k], np.int64), "k"))
        graph.node.extend(
            [
                helper.make_node("TopK", ["logits", "k"], ["values", "places"], name="rank"),
                helper.make_node("ArgMax", ["logits"], ["best"], name="best", axis=1, keepdims=0),
                helper.make_node("ReduceMax", ["logits"], ["most"], axes=[1], keepdims=0),
                helper.make_node("Flatten", ["r1"], ["features"]),
            ]
        )
        kinds = {"values": (1, k), "places": (7, k), "best": (7,), "most": (1,), "logits": (1, 10)}
        del graph.output[:]
        for name in outputs.split():
            kind, *sides = kinds[name]
            graph.output.append(helper.make_tensor_value_info(name, kind, ["batch", *sides]))
        onnx.save(model, path := folder / f"{outputs.replace(' ', '-')}-{k}.onnx")
        return path

    return made


@pytest.fixture
def judged(judged_build, tmp_path):
    """(model, labels or None, words) -> code, stdout, int8's accuracy."""
    samples = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)

    def build(model, labels, *words):
        np.save(tmp_path / "eval.npy", samples)
        asked = ["--eval-images", tmp_path / "eval.npy"]
        if labels is not None:
            (tmp_path / "labels.txt").write_text("\n".join(map(str, labels)))
            asked += ["--labels", tmp_path / "labels.txt"]
        return judged_build(model, samples, *asked, *words)

    return build


@pytest.fixture(scope="module")
def said(small_cnn):
    """What the float model says of these samples."""
    from deploy.ort import OrtSession

    samples = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)
    logits = OrtSession.open(small_cnn, threads=1).run({"x": samples})["logits"]
    return logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    ("outputs", "k"),
    [("values places", 3), ("places values", 3), ("places", 3), ("values places", 1),
     ("values places", 2), ("best", 1), ("most best", 1), ("logits values places", 3)],
)  # fmt: skip
def test_labels_of_a_model_that_ranks_its_classes(ranking, judged, said, outputs, k):
    wrong = [(label + 1) % 10 if n < 6 else label for n, label in enumerate(said)]
    _, _, found = judged(ranking(outputs, k), wrong)
    assert found["top1_reference"] == pytest.approx((SAMPLES - 6) / SAMPLES)
    assert abs(found["top1_candidate"] - found["top1_reference"]) <= 3 / SAMPLES
    assert found["classes"] == (10 if "logits" in outputs else 1 + max(*said, *wrong))


@pytest.mark.parametrize(("outputs", "k"), [("values places", 3), ("best", 1), ("most best", 1)])
def test_without_labels_the_places_tell_how_many_are_alike(ranking, judged, outputs, k):
    _, out, found = judged(ranking(outputs, k), None)
    name = "best" if "best" in outputs else "places"
    best = "the best class" if k == 1 else f"the best {k} classes"
    assert found["reading"] == f"{name}: {best}"
    assert found["task"]["value"] == found["top1_agreement"] > 0.5
    assert f"of {SAMPLES} best classes as FP32's" in out
    assert all(part["output"] != "places" for part in found["parts"])


def test_a_ranking_that_is_wrong_on_its_own_images_is_told_so(ranking, judged, said):
    code, out, _ = judged(ranking("best"), [(label + 1) % 10 for label in said])
    assert code == 3 and "is wrong on its own images: top-1 0.00 % of" in " ".join(out.split())


def refused(run, tmp_path, model, labels):
    samples = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", samples)
    (tmp_path / "labels.txt").write_text("\n".join(map(str, labels)))
    asked = ("--images", tmp_path / "x.npy", "--eval-images", tmp_path / "x.npy")
    asked += ("--labels", tmp_path / "labels.txt", "--effort", 0, "--duration", 0)
    code, _, error = run("build", model, *asked, "--out", tmp_path / "o")
    assert code == 1
    return error


def test_labels_that_no_output_can_tell_are_refused_with_a_way_out(ranking, run, tmp_path, said):
    error = refused(run, tmp_path, ranking("values"), [9, *said[1:]])
    assert "labels need to know which class a value is of, got 'values' of 3 values" in error
    assert "let the model give TopK's second output too, or leave the labels out" in error
    error = refused(run, tmp_path, ranking("most"), said)
    assert "labels need an output of one score a class, [N, classes], or of the number" in error


def test_labels_below_0_are_told_a_way_out(ranking, run, tmp_path, said):
    samples = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=samples, labels=np.array([-1, *said[1:]]))
    asked = ("--images", tmp_path / "x.npz", "--eval-images", tmp_path / "x.npz", "--effort", 0)
    code, _, error = run("build", ranking("best"), *asked, "--out", tmp_path / "o")
    assert code == 1 and "'labels' must be whole numbers from 0, got -1; number the" in error
    error = refused(run, tmp_path, ranking("best"), [-1, *said[1:]])
    assert "ends in '-1'; number the classes from 0, as the model's outputs are" in error


def test_numbers_of_something_else_are_no_classes(ranking, judged_build, small_cnn):
    model = onnx.load(small_cnn)
    graph = model.graph
    del graph.output[:]
    graph.node.append(helper.make_node("Cast", ["logits"], ["whole"], to=TensorProto.INT64))
    graph.output.append(helper.make_tensor_value_info("whole", TensorProto.INT64, ["batch", 10]))
    onnx.save(model, path := ranking("best").with_name("whole.onnx"))
    samples = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)
    _, _, found = judged_build(path, samples)
    assert found["task"] is None and found["top1_agreement"] is None
