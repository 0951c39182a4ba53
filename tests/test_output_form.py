"""The form of a model's outputs: parts, weighting by scores, centring, the task."""

import math

import numpy as np
import pytest

from deploy.metrics.output_form import derive_form
from deploy.tasks import Metric
from deploy.tasks.declarations import Declaration
from deploy.tasks.slices import OutputSlice, split_output
from tests.models import as_float32
from tests.outputs import compare_outputs


def corners(anchors, side=640):
    return lambda rng: rng.uniform(0, side, (1, 4, anchors))


def scores(classes, anchors):
    return lambda rng: rng.uniform(0, 1, (1, classes, anchors)) ** 4


def numbers(classes, anchors):
    return lambda rng: rng.integers(0, classes, (1, 1, anchors))


def several(rng, *makers):
    """Four samples of rows below each other."""
    samples = []
    for _ in range(4):
        rows = [make(rng) for make in makers]
        samples.append(np.concatenate(rows, axis=1).astype(np.float32))
    return samples


def labels(samples):
    return [part.label for part in split_output("y", samples)]


def test_boxes_and_scores_are_two_parts(rng):
    assert labels(several(rng, corners(300), scores(18, 300))) == ["y[0:4]", "y[4:22]"]
    samples = several(rng, corners(300), scores(81, 300))
    assert labels([s.transpose(0, 2, 1) for s in samples]) == ["y[..., 0:4]", "y[..., 4:85]"]


@pytest.mark.parametrize("sure, split", [(0.005, 2), (0.0, 2), (1.0, 3)])
def test_corners_part_from_unsure_scores(rng, sure, split):
    def unsure(rng):
        return scores(1, 100)(rng) * sure

    assert len(split_output("y", several(rng, corners(100), unsure, numbers(20, 100)))) == split


@pytest.mark.parametrize("channel", [0, 31, 63])
@pytest.mark.parametrize("size", [0.0, 0.001, 40.0])
def test_odd_feature_channel_is_no_part(rng, channel, size):
    samples = [rng.standard_normal((1, 64, 8, 8)) * 3 for _ in range(4)]
    for sample in samples:
        sample[:, channel] = rng.standard_normal((8, 8)) * size
    assert labels(samples) == ["y"]


FAINT = np.array([1.0, 0.9, 1e-6, 1e-7, 0.8, 1e-6]).reshape(1, 6, 1)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda rng: rng.uniform(0, 1, (1, 6, 500)) * FAINT, id="absent classes"),
        pytest.param(lambda rng: rng.standard_normal((1, 21, 40, 40)) * 5, id="logits"),
        pytest.param(lambda rng: np.array([[900.0, 800, 700, 0.2, 0.3]]), id="a vector"),
        pytest.param(lambda rng: np.full((1, 22, 300), np.nan, np.float32), id="nan"),
    ],
)
def test_values_of_one_range_stay_together(rng, make):
    assert labels([make(rng) for _ in range(4)]) == ["y"]


def test_batch_size_keeps_the_form(rng):
    samples = several(rng, corners(300), scores(18, 300))
    odd = [s * 0 for s in samples]  # never looked at: the first four decide
    images = np.zeros((8, 3, 64, 64), np.float32)
    inputs = [{"x": images[i : i + 1]} for i in range(8)]
    single_form = derive_form([{"y": s} for s in samples + odd], inputs=inputs)
    batch_form = derive_form([{"y": np.concatenate(samples + odd)}], inputs=[{"x": images}])
    assert single_form == batch_form
    assert len(single_form.parts) == 2


def test_every_float_output_is_a_part(rng):
    sample = {"a": corners(50)(rng)[0], "count": np.array([3]), "b": scores(5, 50)(rng)[0]}
    assert [part.label for part in derive_form([sample] * 4).parts] == ["a", "b"]


def compared(references, candidates, batch, form=None):
    batches = []
    for start in range(0, len(references), batch):
        reference = np.concatenate(references[start : start + batch])
        candidate = np.concatenate(candidates[start : start + batch])
        batches.append(({"x": np.zeros((len(reference), 4))}, {"y": reference}, {"y": candidate}))
    inputs, reference_batches, candidate_batches = zip(*batches, strict=True)
    return compare_outputs(reference_batches, candidate_batches, inputs, form=form)


@pytest.mark.parametrize("preprocess", ["", "unit", "few"])
@pytest.mark.parametrize(
    ("value", "gate", "cells"),
    [
        ("1 40", "1 40", "1 40"),
        ("1 40", "1 1 40", "1 40"),
        ("1 40 1", "1 40", "1 40 1"),
        ("1 40 4", "1 40", "1 40 1"),
        ("1 4 40", "1 40", "1 1 40"),
        ("1 40 4", "1 40 1", "1 40 1"),
        ("1 2 8 8", "1 1 8 8", "1 1 8 8"),
        ("1 2 8 8", "1 8 8", "1 1 8 8"),
        ("1 8 8 2", "1 8 8 1", "1 8 8 1"),
    ],
)
def test_values_are_weighted_by_cell_scores(value, gate, cells, preprocess):
    """A pitch where nobody speaks is arbitrary: 14 dB of it said nothing, and kept layers float."""
    value, gate, cells = ([*map(int, text.split())] for text in (value, gate, cells))
    low, high = 0.001, 0.98
    # of few numbers the mean could be subtracted
    mean_value = {"unit": 0.5, "few": 200}.get(preprocess, 0)
    spread = 0.3 if preprocess == "unit" else 300 - mean_value
    rng = np.random.default_rng(0)

    def outputs(share=0.5):
        pitch = mean_value + (rng.random(value) - (preprocess != "")) * spread
        return as_float32({"score": np.where(rng.random(gate) < share, low, high), "pitch": pitch})

    references = [outputs(), outputs(0), outputs(), outputs()]  # in one all count
    inputs = [{"x": np.zeros((1, 3), np.float32)}] * 4
    form = derive_form(references, inputs=inputs, metric=ending(score="sigmoid"))
    assert [part.label for part in form.parts] == ["score", "pitch - its mean weighted by score"]
    first_sample = references[0]
    values = form.slice_values(form.parts[1], first_sample, {}, first_sample)
    message = values / (first_sample["pitch"] - sum(form.means.values()))
    closed = np.broadcast_to(first_sample["score"].reshape(cells) < 0.5, message.shape)
    assert np.abs(message[closed]).max() < 0.01
    assert np.abs(message[~closed]).min() > 0.9


def ending(probabilities=None, **ends):
    """What outputs are judged by if the graph ends in these operators."""
    return Metric(None, declared=Declaration(ends=ends, probabilities=probabilities or {}))


@pytest.mark.parametrize(
    ("ends", "raw", "weight"),
    [({"s": "sigmoid"}, {}, True), ({}, {}, False), ({"s": "sigmoid"}, {"y": "s"}, False)],
)
def test_scores_weight_values_if_the_graph_ends_in_their_sigmoid(ends, raw, weight):
    made = np.random.default_rng(0)
    scores = (np.arange(50) % 2 * 0.9).reshape(1, 50)
    outputs = [as_float32({"y": made.normal(0, 9, (1, 50, 2)), "s": scores}) for _ in range(4)]
    label = derive_form(outputs, metric=ending(raw, **ends)).parts[0].label
    assert (" weighted by " in label) == weight


def test_task_outputs_are_not_weighted(rng):
    blocks = rng.integers(0, 5, (4, 4, 4)).repeat(8, axis=1).repeat(8, axis=2)
    maps = 9 * np.eye(5)[blocks].transpose(0, 3, 1, 2)[:, None] - 1.8
    edges = rng.integers(0, 2, (4, 1, 1, 32, 32))
    outputs = [as_float32({"y": y, "edge": edge}) for y, edge in zip(maps, edges, strict=True)]
    pictures = [{"x": np.zeros((1, 3, 32, 32), np.float32)}] * 4
    form = derive_form(outputs, inputs=pictures, metric=ending(edge="sigmoid"))
    assert form.task.name == "segmentation"
    assert [output.label for output in form.parts] == [
        "y",
        "edge",
    ]
    assert form.uncovered == ("edge",)  # the classes say nothing of it


def test_signals_do_not_weight_each_other():
    time = np.arange(64) / 9
    waves = [{"y": 9 * np.sin(time + n)[None], "z": 9 * np.cos(2 * time)[None]} for n in range(4)]
    assert [part.label for part in derive_form(waves).parts] == ["y", "z"]
    faces = [{"age": np.array([[30 + n]]), "of": np.array([[n % 2.0]])} for n in range(32)]
    form = derive_form([as_float32(face) for face in faces], metric=ending(of="sigmoid"))
    assert [part.label for part in form.parts] == ["age - its mean", "of"]
    assert form.reason.startswith("labels, ")
    assert form.uncovered == ("age",)


def test_single_numbers_are_centred():
    """Ages of 35 and a spread of 17: 29 dB of the whole may be 22 of what they say."""
    ages = [{"age": np.float32([[age]])} for age in (12, 35, 60, 31)]
    assert [part.label for part in derive_form(ages).parts] == ["age - its mean"]
    two = [{"y": np.float32([[20 + n % 5, 55 + 9 * n]])} for n in range(4)]
    assert [part.label for part in derive_form(two).parts] == ["y - its mean"]
    about_zero = [{"age": np.float32([[age]])} for age in (-12, 35, 60, -31)]
    assert [part.label for part in derive_form(about_zero).parts] == ["age"]
    turns = np.random.default_rng(0).normal(0, 0.3, (4, 1, 3, 3)) + np.eye(3)  # of a head
    for values in turns, turns[:, 0, 0, 0]:
        assert (
            derive_form([as_float32({"y": number}) for number in values]).parts[0].subtracted
            == "its mean"
        )
    for low, high, label in (0.5, 0.7, "y - its mean"), (0.02, 0.03, "y"), (0.9, 1, "y"):
        shares = [{"y": np.float32([number])} for number in np.linspace(low, high, 16)]
        assert [part.label for part in derive_form(shares).parts] == [label]


def test_numbers_of_two_units_are_parts():
    """An age and a probability; a place in mm and a turn, whose best number is no class."""
    rng = np.random.default_rng(0)
    shares = 1 / (1 + np.exp(rng.normal(0, 4, (32, 1))))
    faces = np.concatenate([rng.normal(40, 9, (32, 1)), shares], axis=1)
    turns = rng.normal([1, 0, 0, 0], 0.3, (32, 4))
    vectors = np.concatenate([rng.normal([0, 0, 800], 300, (32, 3)), turns], axis=1)
    for rows, labels in (
        (faces, ["y[0:1] - its mean", "y[1:2]"]),
        (vectors, ["y[0:3] - its mean", "y[3:7] - its mean"]),
    ):
        form = derive_form([as_float32({"y": row[None]}) for row in rows])
        assert form.task is None
        assert [part.label for part in form.parts] == labels


def compared_vectors(reference, candidate):
    references = [{"y": np.float32([vector])} for vector in reference]
    candidates = [{"y": np.float32([vector])} for vector in candidate]
    return compare_outputs(references, candidates, [{"x": np.zeros((1, 4))}] * len(references))


def test_centring_uses_the_mean_of_all():
    """In a list in the order of ages the first samples are all young."""
    ages = np.stack([np.linspace(20, 60, 100), np.linspace(30, 90, 100)] * 3, axis=1)
    ages += np.random.default_rng(0).normal(0, 1, ages.shape)
    (part,) = compared_vectors(ages, ages + 5).parts
    assert part.label == "y - its mean"
    varies = np.square(ages - ages.mean(axis=0)).sum() / (25 * ages.size)
    assert part.sqnr_db == pytest.approx(10 * math.log10(varies), abs=1e-3)
    longer = [*ages, np.zeros(7)]  # a sample of another shape has another mean
    assert compared_vectors(longer, [*ages + 5, np.zeros(7)]).parts[0].sqnr_db > part.sqnr_db - 1


def test_head_logits_do_not_weight():
    """Logits of the angles of a head: one has two groups, another has not."""
    rng = np.random.default_rng(0)
    heads = rng.normal(-6, 1, (4, 2, 66))
    heads[:, 0, 20:30] += 12
    heads[:, 1] += np.linspace(0, 12, 66)
    outputs = [as_float32({"yaw": head[:1], "roll": head[1:]}) for head in heads]
    assert [part.label for part in derive_form(outputs).parts] == ["yaw", "roll"]


def test_pitch_is_weighted_and_centred():
    """28 dB about 200 Hz were two semitones of voiced frames."""
    rng = np.random.default_rng(0)
    sure = np.repeat(rng.random((4, 1, 10)) < 0.6, 10, axis=2) * 0.96 + 0.02
    pitch = np.where(sure > 0.5, rng.normal(200, 8, sure.shape), rng.uniform(60, 400, sure.shape))
    outputs = [as_float32({"y": y, "s": s}) for y, s in zip(pitch, sure, strict=True)]
    form = derive_form(outputs, metric=ending(s="sigmoid"))
    (part,) = form.means
    assert part.label == "y - its mean weighted by s"
    assert float(form.means[part][0]) == pytest.approx(200, abs=2)
    message = form.slice_values(part, outputs[0], {}, outputs[0])
    assert np.allclose(message, sure[0] * (pitch[0] - form.means[part][0]), atol=1e-3)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_worst_part_is_reported(rng, batch):
    references = several(rng, corners(300), scores(18, 300)) * 2
    candidates = [candidate.copy() for candidate in references]
    for candidate in candidates:
        candidate[:, 4:] = 0  # every score is lost
    result = compared(references, candidates, batch)
    assert result.outputs[0].sqnr_db > 50
    assert result.worst == result.parts[0]
    assert result.worst.label == "y[4:22]"
    assert result.worst.sqnr_db == pytest.approx(0)
    assert [part.label for part in result.parts] == ["y[4:22]", "y[0:4]"]
    assert result.to_json()["parts"][1]["sqnr_db"] == "inf"
    candidates[2][:, 1] = np.nan  # which is worse than any other
    result = compared(references, candidates, batch)
    assert result.worst.label == "y[0:4]"
    assert np.isnan(result.worst.sqnr_db)


def test_single_part_is_the_worst(rng):
    references = [rng.standard_normal((1, 22, 300)).astype(np.float32) for _ in range(5)]
    result = compared(references, [reference * np.float32(1.1) for reference in references], 2)
    assert result.worst.label == "y"
    assert result.worst.sqnr_db == pytest.approx(20)
    assert result.worst.sqnr_db == result.outputs[0].sqnr_db


def test_comparison_takes_a_given_form(rng):
    references = several(rng, corners(300), scores(18, 300))
    form = derive_form([{"y": reference} for reference in references])
    assert form.parts[1] == OutputSlice(output="y", axis=1, start=4, stop=22)
    assert len(compared(references[:1], references[:1], 1, form).parts) == 2


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_batch_size_keeps_the_task(rng, batch):
    references = [rng.uniform(0, 1, (1, 22, 300)).astype(np.float32) for _ in range(8)]
    references = [reference / reference.sum(axis=1, keepdims=True) for reference in references]
    references = [reference[..., 0] for reference in references]  # probabilities [1, 22]
    candidates = [reference[:, ::-1].copy() for reference in references]
    candidates[::3] = references[::3]
    result = compared(references, candidates, batch).task
    assert result == compared(references, candidates, 1).task
    assert result.task == "classes"
    assert result.samples == 8
    assert result.count == "3 of 8"
