"""Parts of outputs: rows with a unit of their own, found from the data of the float model alone."""

from itertools import product

import numpy as np
import pytest

from deploy.metrics.accuracy import Comparison
from deploy.metrics.parts import Part, parts_of
from deploy.metrics.truth import form_of
from deploy.tensors import TensorSpec


def labels(samples):
    return [part.label for part in parts_of("y", samples)]


def boxes(anchors, side=640):
    return lambda rng: rng.uniform(0, side, (1, 4, anchors))


def scores(classes, anchors):
    return lambda rng: rng.uniform(0, 1, (1, classes, anchors)) ** 4


def numbers(classes, anchors):
    return lambda rng: rng.integers(0, classes, (1, 1, anchors))


def several(rng, *makers):
    """Four samples of rows below each other."""
    return [
        np.concatenate([make(rng) for make in makers], axis=1).astype(np.float32) for _ in range(4)
    ]


def test_boxes_and_scores_in_one_tensor_are_two_parts(rng):
    samples = several(rng, boxes(300), scores(18, 300))
    assert labels(samples) == ["y[0:4]", "y[4:22]"]


def test_rows_in_the_last_dimension_are_found_there(rng):
    samples = several(rng, boxes(300), scores(81, 300))
    assert labels([s.transpose(0, 2, 1) for s in samples]) == ["y[..., 0:4]", "y[..., 4:85]"]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_corners_a_score_and_a_class_number_are_three_parts(order):
    rows = [(4, 1, 1)[place] for place in order]
    wanted = [f"y[..., {sum(rows[:n])}:{sum(rows[: n + 1])}]" for n in range(3)]
    for side, classes, seed in product((32, 320, 640), (20, 80, 1000), range(25)):
        made = [boxes(100, side), scores(1, 100), numbers(classes, 100)]
        samples = several(np.random.default_rng(seed), *(made[place] for place in order))
        assert labels([s.transpose(0, 2, 1) for s in samples]) == wanted, (side, classes, seed)


@pytest.mark.parametrize("sure, split", [(0.005, 2), (0.0, 2), (1.0, 3)])
def test_corners_part_from_class_numbers_beside_a_score_that_is_never_sure(rng, sure, split):
    def unsure(rng):
        return scores(1, 100)(rng) * sure

    samples = several(rng, boxes(100), unsure, numbers(20, 100))
    assert len(parts_of("y", samples)) == split


def test_probabilities_of_absent_classes_are_no_part_of_their_own(rng):
    faint = np.array([1.0, 0.9, 1e-6, 1e-7, 0.8, 1e-6]).reshape(1, 6, 1)
    assert labels([rng.uniform(0, 1, (1, 6, 500)) * faint for _ in range(4)]) == ["y"]


@pytest.mark.parametrize("place", [0, 31, 63])
@pytest.mark.parametrize("size", [0.0, 0.001, 40.0])
def test_one_odd_channel_of_a_feature_map_is_no_part(rng, place, size):
    samples = [rng.standard_normal((1, 64, 8, 8)) * 3 for _ in range(4)]
    for sample in samples:
        sample[:, place] = rng.standard_normal((8, 8)) * size
    assert labels(samples) == ["y"]


def test_logits_of_one_unit_are_one_part(rng):
    assert labels([rng.standard_normal((1, 21, 40, 40)) * 5 for _ in range(4)]) == ["y"]


def test_a_vector_shows_no_ranges_of_its_numbers():
    value = np.array([[900.0, 800, 700, 0.2, 0.3]])
    assert labels([value] * 4) == ["y"]


def test_the_form_does_not_depend_on_the_batch(rng):
    samples = several(rng, boxes(300), scores(18, 300))
    odd = [s * 0 for s in samples]  # never looked at: the first four decide
    fed = np.zeros((8, 3, 64, 64), np.float32)
    alone = form_of(
        [{"y": s} for s in samples + odd], inputs=[{"x": fed[i : i + 1]} for i in range(8)]
    )
    together = form_of([{"y": np.concatenate(samples + odd)}], inputs=[{"x": fed}])
    assert alone == together and len(alone.parts) == 2


def test_every_output_is_one_part_at_least_and_integers_are_none(rng):
    one = {"a": boxes(50)(rng)[0], "count": np.array([3]), "b": scores(5, 50)(rng)[0]}
    found = form_of([one] * 4)
    assert [part.label for part in found.parts] == ["a", "b"]


def test_nan_makes_one_part():
    assert labels([np.full((1, 22, 300), np.nan, np.float32)] * 4) == ["y"]


class Net:
    """Gives what it is told to; both outputs and inputs are named y and x."""

    inputs = (TensorSpec("x", "float32", ("n", 4)),)
    outputs = (TensorSpec("y", "float32", ("n", 22, 300)),)


def compared(references, candidates, batch, form=None):
    comparison = Comparison(Net(), Net(), form=form)
    for start in range(0, len(references), batch):
        one = np.concatenate(references[start : start + batch])
        other = np.concatenate(candidates[start : start + batch])
        comparison.add({"x": np.zeros((len(one), 4))}, {"y": one}, {"y": other})
    return comparison.result()


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_worst_part_is_told_where_the_whole_output_looks_well(rng, batch):
    references = several(rng, boxes(300), scores(18, 300)) * 2
    candidates = [one.copy() for one in references]
    for one in candidates:
        one[:, 4:] = 0  # every score is lost
    found = compared(references, candidates, batch)
    assert found.outputs[0].sqnr_db > 50
    assert found.worst == found.parts[0]
    assert found.worst.label == "y[4:22]" and found.worst.sqnr_db == pytest.approx(0)
    assert [part.label for part in found.parts] == ["y[4:22]", "y[0:4]"]
    assert found.to_json()["parts"][1]["sqnr_db"] == "inf"


def test_a_model_of_one_part_has_the_output_as_its_worst(rng):
    references = [rng.standard_normal((1, 22, 300)).astype(np.float32) for _ in range(5)]
    found = compared(references, [one * np.float32(1.1) for one in references], 2)
    assert found.worst.label == "y" and found.worst.sqnr_db == pytest.approx(20)
    assert found.worst.sqnr_db == found.outputs[0].sqnr_db


def test_a_form_that_is_given_is_taken(rng):
    references = several(rng, boxes(300), scores(18, 300))
    form = form_of([{"y": one} for one in references])
    assert form.parts[1] == Part(output="y", axis=1, start=4, stop=22)
    assert len(compared(references[:1], references[:1], 1, form).parts) == 2


def test_a_broken_part_is_worse_than_any_other(rng):
    references = several(rng, boxes(300), scores(18, 300))
    candidates = [one.copy() for one in references]
    candidates[2][:, 1] = np.nan
    found = compared(references, candidates, 2)
    assert found.worst.label == "y[0:4]" and np.isnan(found.worst.sqnr_db)


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_the_task_does_not_depend_on_the_batch(rng, batch):
    references = [rng.uniform(0, 1, (1, 22, 300)).astype(np.float32) for _ in range(8)]
    references = [one / one.sum(axis=1, keepdims=True) for one in references]
    references = [one[..., 0] for one in references]  # probabilities [1, 22]
    candidates = [one[:, ::-1].copy() if n % 3 else one for n, one in enumerate(references)]
    found = compared(references, candidates, batch).task
    assert found == compared(references, candidates, 1).task
    assert found.task == "classes" and found.samples == 8 and found.count == "3 of 8"
