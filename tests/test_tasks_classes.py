"""Classes, labels, embeddings and other vectors among a model's outputs."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from deploy.errors import FeedError
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.levels import DOUBTFUL, GOOD, UNUSABLE, judge_accuracy
from deploy.metrics.output_errors import SAMPLE_MEAN, OutputAccuracy
from deploy.metrics.output_form import SliceAccuracy, derive_form
from deploy.report import Report, to_screen
from deploy.report.parts import EngineRow
from deploy.report.verdict import Verdict
from deploy.tasks import Metric
from deploy.tasks.evaluation_task import TaskFigure
from deploy.tasks.indices import NO_CLASS, PlaceCounts
from deploy.tasks.vectors import are_features, has_unit_length
from deploy.tensors import TensorSpec
from deploy.tuning.plan_file import read_plan
from deploy.tuning.probe import add_source_outputs, find_pick_sources
from tests import outputs as forms
from tests.models import (
    as_float32,
    build_net,
    make_model,
    make_value,
    parse_nodes,
    run_net,
    save_net,
)
from tests.outputs import change_all, compare, compare_outputs, fed, figure, rng, same_task, softmax


def test_equal_best_classes_are_counted():
    made = rng()
    references = [{"y": softmax(made.standard_normal((1, 20)) * 4)} for _ in range(10)]
    candidates = [{"y": one["y"].copy()} for one in references]
    for one in candidates[:3]:
        one["y"][0, (one["y"].argmax() + 1) % 20] = 1
    _, found = figure(references, candidates)
    assert found.task == "classes" and found.value == 0.7
    assert found.words == "7 of 10 samples keep FP32's top-1 class"


def task_of_four(make):
    """The task of a model that makes these outputs of four samples."""
    return same_task([{"y": make().astype(np.float32)} for _ in range(4)])


def test_outputs_are_compared_with_each_other_only_where_they_are_few():
    raw = [rng().standard_normal((1, 20)) * 4 for _ in range(4)]
    for copies, task in ((63, "classes"), (64, None)):
        names = [f"raw{n}" for n in range(copies)]
        outputs = [{"y": softmax(x), **dict.fromkeys(names, x)} for x in raw]
        assert same_task(outputs) == task


def test_logits_are_classes_and_other_vectors_are_not():
    made = rng()

    def peaked(worst):
        scores = made.standard_normal((1, 1000))
        scores[0, [17, 23]] = 12, worst
        return scores

    assert task_of_four(lambda: made.standard_normal((1, 10)) * 4) == "classes"
    assert task_of_four(lambda: peaked(-9.7)) == "classes"
    assert task_of_four(lambda: peaked(-10.3)) is None  # the worst is as far off
    assert task_of_four(lambda: made.uniform(0.1, 0.9, (1, 8))) is None  # places
    assert task_of_four(lambda: made.uniform(0, 1, (1, 196))) is None  # landmarks


@pytest.mark.parametrize(("form", "on"), [((1, 100, 1), 1), ((1, 100, 1), 3), ((1, 100), 1)])
def test_steps_of_a_film_after_a_sigmoid_are_no_classes(form, on):
    made = rng()

    def cuts():
        shares = made.uniform(0, 0.01, 100)
        shares[made.choice(100, on, replace=False)] = 0.97
        return {"cuts": shares.reshape(form).astype(np.float32)}

    film = [{"frames": np.zeros((1, 100, 27, 48, 3), np.uint8)}] * 4
    assert same_task([cuts() for _ in range(4)], film, {"cuts": "sigmoid"}) == "labels"
    one = [{"word": np.eye(100)[[n]].reshape(form).astype(np.float32)} for n in range(4)]
    assert same_task(one, film) == "classes"  # behind a Softmax


def test_few_raw_scores_in_several_outputs_are_classes_where_all_are_sure():
    made = rng()

    def plates(heads=5, sure=8.0, **others):
        def head():
            scores = made.standard_normal((1, 26)) + sure * np.eye(26)[[made.integers(26)]]
            return (scores - scores.mean()).astype(np.float32)

        return {**{f"c{n}": head() for n in range(heads)}, **others}

    references = [plates() for _ in range(8)]
    form, same = figure(references, references)
    assert form.task.name == "classes" and same.value == 1 and same.count == "40 of 40"
    other = {**references[0], "c3": np.roll(references[0]["c3"], 1)}
    assert figure(references, [other, *references[1:]])[1].count == "39 of 40"
    accuracy = compare_outputs(references, [other, *references[1:]])
    assert accuracy.top1_agreement is None  # of the first output alone it would be 1
    assert same_task([plates(sure=0) for _ in range(4)]) is None  # shapes of a body, maybe
    places = [plates(place=made.uniform(0, 1, (1, 4))) for _ in range(4)]
    assert same_task(places) is None  # of what has these classes


def test_angles_places_and_steering_are_neither_classes_nor_embeddings():
    made = rng()

    assert task_of_four(lambda: made.normal(0, [[25, 12, 8]])) is None  # of a head, in degrees
    assert task_of_four(lambda: made.uniform(-1, 1, (1, 6))) is None  # behind a Tanh
    turn = np.linspace(0, 2 * np.pi, 49)[:-1]
    line = np.stack([np.sin(turn), np.cos(turn)], axis=1)
    for points in (line.reshape(1, -1), line.T.reshape(1, -1)):  # x, y, x, y; or all x before y
        found = task_of_four(lambda p=points: p + made.normal(0, 0.05, p.shape))
        assert found in (None, "key points")
    turned = np.full((4, 4), [[0.8], [0.5], [-1.0], [0.5]])  # a page's, by a trained model
    turned += np.diag([4.4, 4.2, 4.6, 4.4]) + made.normal(0, 0.1, (4, 4))
    assert same_task([{"y": row[None]} for row in turned]) == "classes"


def test_seven_raw_scores_are_more_than_a_pose_has_numbers():
    """A pose has up to six: its usual values differ as scores of sure classes do."""
    usual = np.float32([20, -20, 10, -10, 5, -5, 0])
    for count, task in ((6, None), (7, "classes")):
        outputs = [{"y": usual[None, :count] + np.float32(turn)} for turn in (-2, 0, 1, 3)]
        assert same_task(outputs) == task


@pytest.mark.parametrize(("name", "task"), [("logits", "classes"), ("y", None)])
def test_name_logits_says_that_scores_are_classes(name, task):
    """Scores of a page's orientation, which move together as the angles of a pose do."""
    rows = [[-1.05, -1.16, 3.31, -1.19], [0.57, 4.95, 0.48, 0.58], [0.62, 0.83, 0.84, 5.15]]
    assert same_task([{name: np.float32([row])} for row in rows]) == task


def task_of_rows(rows):
    return same_task([{"y": row[None].astype(np.float32)} for row in rows])


def test_angles_with_usual_values_are_seldom_taken_for_classes():
    """Three raw scores may be classes as well: what each usually is tells nothing of either."""
    generator = rng()
    poses = generator.normal([[[3, -18, 1]]], [[[20, 10, 8]]], (100, 4, 3))
    tasks = [task_of_rows(angles) for angles in poses]
    assert tasks.count(None) >= 65 and set(tasks) <= {None, "classes"}
    scores = generator.normal(0, 6, (100, 8, 3))
    scores -= scores.mean(axis=2, keepdims=True)
    assert [task_of_rows(rows) for rows in scores] == ["classes"] * 100


def test_embeddings_keep_their_neighbours():
    made = rng()
    centres = made.standard_normal((4, 64))
    vectors = [centres[n % 4] + 0.1 * made.standard_normal(64) for n in range(12)]
    references = [{"e": v[None].astype(np.float32)} for v in vectors]
    form, same = figure(references, references)
    assert form.task.name == "embeddings" and same.value == 1
    _, found = figure(references, [*references[:11], {"e": -references[11]["e"]}])
    assert found.figure == "neighbours alike" and found.value < 1
    assert found.words.startswith(f"{round(found.value * 12)} of 12 nearest neighbours")
    _, few = figure(references[:4], references[:4])
    assert few.figure == "mean cosine" and few.value == pytest.approx(1)


@pytest.mark.parametrize("set_task", ["", "embeddings"])
def test_screen_questions_only_recognised_embeddings(set_task):
    vectors = rng().standard_normal((12, 64)).astype(np.float32)
    outputs = [{"e": vector[None]} for vector in vectors]
    form = derive_form(outputs, inputs=[fed()] * 12, metric=Metric(None, task=set_task))
    accuracy = Accuracy(samples=12, outputs=(), why=form.reason)
    engine = EngineRow(label="int8", accuracy=accuracy, verdict=Verdict(GOOD, ()))
    assert ("--task classes" in to_screen(Report(engines=(engine,)))) == (not set_task)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("classes", [10, 200])
@pytest.mark.parametrize("pictures", [False, True])
def test_classes_and_labels_are_known_beside_an_embedding(classes, pictures, labels):
    made, outputs = rng(), []
    for number in range(8):
        scores = made.standard_normal((1, classes))
        scores[0, [number, number + 1]] = 9, 9 if labels else 0
        if labels:
            scores = 1 / (1 + np.exp(6 - scores))
        embedding = made.standard_normal((1, 64))
        outputs.append({"e": np.float32(embedding), "y": np.float32(scores)})
    sound = [{"x": np.zeros((1, 4000), np.float32)}] * 8
    ends = {"y": "sigmoid"} if labels else {}
    form, same = figure(outputs, outputs, None if pictures else sound, ends)
    assert form.task.name == ("labels" if labels else "classes") and same.value == 1
    assert form.uncovered == ("e",) and form.task.covered == ("y",)


def skewed(number, *, positive=False):
    """A vector of length 1 whose largest number stands out as a best class does."""
    vector = np.random.default_rng(number).gamma(0.6, size=512) - (0 if positive else 0.5)
    return (vector / np.linalg.norm(vector))[None].astype(np.float32)


@pytest.mark.parametrize("positive", [False, True])
def test_vectors_of_length_one_are_embeddings_whatever_stands_out_in_them(positive):
    outputs = [{"e": skewed(n, positive=positive)} for n in range(4)]
    sound = [{"x": np.zeros((1, 64), np.float32)}] * 4
    longer = [{"e": 7 * one["e"]} for one in outputs]
    assert same_task(longer, sound) == "classes"  # each else like scores
    assert same_task(outputs) == same_task(outputs, sound) == "embeddings"


@pytest.mark.parametrize("least", [0.0, -0.25])
def test_features_of_a_picture_are_embeddings_and_scores_of_a_thousand_are_classes(least):
    """The mean of each channel behind a ReLU or a SiLU: some stand out, none is far below zero."""
    features = [{"f": 7 * skewed(n, positive=True) + np.float32(least)} for n in range(12)]
    form, same = figure(features, features)
    assert form.task.form == "f: embeddings of 512 numbers" and same.value == 1
    assert same_task([{"f": one["f"] - 1} for one in features]) == "classes"
    squeezed = [{"f": np.concatenate([one["f"], one["f"][:, :488]], axis=1)} for one in features]
    assert squeezed[0]["f"].shape == (1, 1000) and same_task(squeezed) == "classes"
    small = [{"f": (one["f"] - np.float32(least)) / 100} for one in features]
    assert same_task(small) != "embeddings"


@pytest.mark.parametrize(
    ("vector", "unit"),
    [
        (np.full(16, 0.25), True),
        (np.full(16, 0.25 * 1.009), True),
        (np.full(16, 0.25 * 1.011), False),
        (np.full(16, 0.25 * 0.991), True),
        (np.full(16, 0.25 * 0.989), False),
        (np.full(4, 0.5), False),
        (-np.full(5, 0.2**0.5), True),
    ],
)
def test_a_vector_of_length_one_is_not_of_a_few_numbers(vector, unit):
    assert has_unit_length(vector) == unit


@pytest.mark.parametrize(
    ("size", "least", "most", "features"),
    [
        (32, 0, 2, True),
        (16, 0, 2, False),
        (72, 0, 2, False),
        (80, 0, 2, True),
        (64, -0.375, 2, True),
        (64, -0.376, 2, False),
        (64, 0, 1.02, True),
        (64, 0, 1.0, False),
    ],
)
def test_features_are_many_none_far_below_zero_and_some_above_one(size, least, most, features):
    rows = np.stack([np.linspace(least, high, size) for high in (most, most + 1)])
    assert are_features(rows) == features


@pytest.mark.parametrize(("counts", "embedding"), [
    (((1, 16), (-1, 16)), True), (((1, 15), (-1, 16)), False),  # 32 numbers
    (((1.55, 1), (1, 31), (-1, 32)), True), (((1.65, 1), (1, 31), (-1, 32)), False),
    (((1, 39), (-1, 25)), True), (((1, 40), (-1, 24)), False),
    (((1, 1), (-1, 1), (0.2, 31), (-0.2, 31)), True),
    (((1, 1), (-1, 1), (0.1, 31), (-0.1, 31)), False),
])  # fmt: skip
def test_an_embedding_is_long_and_lies_about_zero(counts, embedding):
    values = np.concatenate([np.full(count, value, np.float32) for value, count in counts])
    shuffled = rng().permutation(values)[None]  # in order they were points
    outputs = [{"e": shuffled}, {"e": -shuffled}]
    sound = [{"x": np.zeros((1, 99), np.float32)}] * 2
    assert (same_task(outputs, sound) == "embeddings") == embedding
    rebuilt = [{"x": np.zeros_like(shuffled)}] * 2  # as by an autoencoder of one vector
    assert same_task(outputs, rebuilt) != "embeddings"


def test_sure_classes_are_no_vectors_of_length_one():
    made = rng()
    own = np.eye(64)[:4, None]
    sure = [{"y": softmax(made.standard_normal((1, 64)) + 40 * one)} for one in own]
    assert same_task(sure) == "classes"
    linear = [{"y": one + made.normal(0, 0.01, (1, 64))} for one in own]
    assert same_task(linear) == "classes"  # trained to be one at its own class, and zero elsewhere
    value = softmax(made.standard_normal((len(forms.CELLS), 9)) * 4)
    assert same_task([{"y": value[None]}] * 4) == "steps"  # and no raw boxes


def anything(made):
    """Outputs of five samples, of shapes and values that no model is known by."""
    sides = [0, 1, 2, 4, 6, 7, 16, 20, 32, 85]
    shapes = [made.choice(sides, made.integers(0, 5)).tolist() for _ in range(made.integers(1, 4))]
    kinds = made.choice(["normal", "share", "whole", "flag", "nan", "zero", "large"], len(shapes))
    makers = {
        "normal": lambda shape: made.standard_normal(shape) * 3,
        "share": lambda shape: made.uniform(0, 1, shape),
        "whole": lambda shape: made.integers(0, 20, shape),
        "flag": lambda shape: made.uniform(0, 1, shape) > 0.5,
        "nan": lambda shape: np.full(shape, np.nan),
        "zero": np.zeros,
        "large": lambda shape: made.uniform(0, 640, shape),
    }
    varies = made.random() < 0.2

    def one(shape, kind):
        shape = [1, *shape[1:]] if shape and made.random() < 0.7 else list(shape)
        if varies and len(shape) > 1:
            shape[1] = int(made.integers(0, 6))
        return np.asarray(makers[kind](tuple(shape)))

    pairs = list(zip(shapes, kinds, strict=True))
    samples = []
    for _ in range(5):
        samples.append({f"o{number}": one(*pair) for number, pair in enumerate(pairs)})
    return samples


FORMS = {
    "levels": forms.gated,
    "maps": lambda n: forms.gated(n, raw=True, maps=True, classes=4),
    "split": forms.split_yolo,
    "turned": lambda n: forms.split_yolo(n, "turned", "turned"),
    "posed": forms.posed,
    "queries": forms.queries,
    "text": lambda n: forms.steps([3, 3, 4, 5 + n]),
    "steps": lambda n: {"y": softmax(forms.framed(forms.spoken(n, 6)))[None]},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_candidate_of_other_shapes_keeps_nothing(form):
    references = [FORMS[form](n) for n in range(4)]
    for cut in (np.s_[:, :0], np.s_[..., :0], np.s_[:0], np.s_[:, 1:, 1:]):
        others = change_all(references, lambda value, cut=cut: value[cut])
        assert figure(references, others)[1].value == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_outputs_make_it_fail(seed):
    made = np.random.default_rng(seed)

    def spoiled(value):
        if made.random() < 0.2:
            return value * np.nan
        return value[..., :1] if value.ndim else value

    for _ in range(60):
        references = anything(made)
        form = derive_form(references, inputs=[fed((64, 64))] * 5)
        if form.task is None:
            continue
        tally = form.task.tally()
        for one in references:
            tally.add(fed((64, 64)), one, {name: spoiled(value) for name, value in one.items()})
        found = tally.result()
        assert found is None or 0 <= found.value <= 1 or found.task == "embeddings"


SAMPLES = 24
ROWS = np.random.default_rng(3).normal(size=(SAMPLES, 3, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def ranking(small_cnn, tmp_path_factory):
    """(outputs, k) -> the small CNN with its logits ranked, which gives these outputs."""
    folder = tmp_path_factory.mktemp("ranking")

    def made(outputs, k=3):
        model = onnx.load(small_cnn)
        graph = model.graph
        graph.initializer.append(numpy_helper.from_array(np.array([k], np.int64), "k"))
        ranked = """
            values, places = TopK (logits, k) best = ArgMax <axis = 1, keepdims = 0> (logits)
            most = ReduceMax <axes = [1], keepdims = 0> (logits) features = Flatten (r1)
        """
        graph.node.extend(parse_nodes(ranked))
        kinds = {"values": (1, k), "places": (7, k), "best": (7,), "most": (1,), "logits": (1, 10)}
        del graph.output[:]
        for name in outputs.split():
            kind, *sides = kinds[name]
            graph.output.append(make_value(name, ["batch", *sides], kind))
        return save_net(model, folder / f"{outputs.replace(' ', '-')}-{k}.onnx")

    return made


@pytest.fixture
def judged(build_with_accuracy, tmp_path):
    """(model, labels or None) -> code, stdout, int8's accuracy."""

    def build(model, labels):
        np.save(tmp_path / "eval.npy", ROWS)
        asked = ["--eval-images", tmp_path / "eval.npy"]
        if labels is not None:
            (tmp_path / "labels.txt").write_text("\n".join(map(str, labels)))
            asked += ["--labels", tmp_path / "labels.txt"]
        return build_with_accuracy(model, ROWS, *asked)

    return build


@pytest.fixture(scope="module")
def said(small_cnn):
    """What the float model says of these samples."""
    return run_net(small_cnn, ROWS)[0].argmax(axis=1).tolist()


@pytest.mark.parametrize(
    ("outputs", "k"),
    [
        ("values places", 3),
        ("places values", 3),
        ("places", 3),
        ("values places", 1),
        ("values places", 2),
        ("best", 1),
        ("most best", 1),
        ("logits values places", 3),
    ],
)
def test_labels_of_a_model_that_ranks_its_classes(ranking, judged, said, outputs, k):
    wrong = [(label + 1) % 10 for label in said[:6]] + [*said[6:]]
    _, _, found = judged(ranking(outputs, k), wrong)
    assert found["top1_reference"] == pytest.approx((SAMPLES - 6) / SAMPLES)
    assert abs(found["top1_candidate"] - found["top1_reference"]) <= 3 / SAMPLES
    assert found["classes"] == 1 + max(*said, *wrong)


@pytest.mark.parametrize(
    ("outputs", "k"), [("values places", 3), ("places", 3), ("best", 1), ("most best", 1)]
)
def test_without_labels_the_places_tell_how_many_are_alike(ranking, judged, outputs, k):
    _, out, found = judged(ranking(outputs, k), None)
    name = "best" if "best" in outputs else "places"
    best = "the best class" if k == 1 else f"the best {k} classes"
    assert found["reading"] == f"{name}: {best}"
    assert found["task"]["value"] == found["top1_agreement"] > 0.5
    assert f"of {SAMPLES} samples keep FP32's top-1 class" in out
    assert all(part["output"] != "places" for part in found["parts"])


@pytest.mark.parametrize(("names", "by", "alike"), [("vi", 0, True), ("vi", 1, False), ("i", 0, 0)])
def test_samples_of_other_places_are_not_alike_though_all_values_are_sure(names, by, alike):
    rows = []
    for n in range(8):
        row = {"v": np.float32([[1, 0]]), "i": np.array([[9, n * by]])}
        rows.append({name: row[name] for name in names})
    assert compare_outputs(rows, rows).alike == alike


def test_integers_are_equal_or_not_and_selected_rows_come_in_any_order():
    """A class next to another is as wrong as any, though its number has 60 dB."""
    made = np.random.default_rng(0)
    numbers = [{"y": made.integers(900, 999, (1, 40))} for _ in range(8)]
    form, found = figure(numbers, [{"y": one["y"] + (np.arange(40) < 4)} for one in numbers])
    assert not form.parts and found.value == 0.9
    assert found.words == "288 of 320 indices of FP32 kept, 32 new"
    rows = [{"y": np.stack([[0] * n, range(n), range(n)], axis=1)} for n in range(2, 10)]
    _, found = figure(rows, [{"y": one["y"][:0:-1]} for one in rows])
    assert found.words == "36 of 44 indices of FP32 kept, 0 new"
    silence = [{"y": np.where(np.arange(40) < n + 1, 7, 0)[None]} for n in range(8)]
    _, found = figure(silence, [{"y": one["y"] * 0} for one in silence])
    assert found.value == 0 and "without 0, the usual one" in found.words
    assert figure([{"y": np.zeros((1, 9), int)}] * 8, numbers)[1] is None


@pytest.mark.parametrize("seed", range(4))
def test_place_counts_add_up_over_samples(seed):
    made = np.random.default_rng(seed)
    reference = made.choice([NO_CLASS, 0, 1, 7], (6, 50), p=[0.1, 0.2, 0.5, 0.2])
    candidate = np.where(made.random((6, 50)) < 0.8, reference, 1)
    by_sample, at_once = PlaceCounts(), PlaceCounts()
    equal = sum(by_sample.add(*pair) for pair in zip(reference, candidate, strict=True))
    assert at_once.add(reference, candidate) == equal and at_once == by_sample
    has_class = reference != NO_CLASS
    assert at_once.reference.total() == has_class.sum()
    assert equal == (has_class & (reference == candidate)).sum() == at_once.equal.total()


def test_usual_class_counts_only_where_models_differ():
    counts = PlaceCounts()
    assert counts.count_agreement() is None
    reference = np.repeat([3, 5], [90, 10])
    counts.add(reference, np.where(np.arange(100) < 2, 5, reference))
    assert counts.count_agreement()[:2] == (10, 12) and " 3, " in counts.count_agreement()[2]
    counts.add(reference, reference[:5])  # of another shape: no class anywhere
    assert counts.count_agreement()[:2] == (10, 112)
    balanced = PlaceCounts()
    balanced.add(np.array([0, 1]), np.array([0, 0]))
    assert balanced.count_agreement() == (1, 2, "")


def test_best_of_a_set_decides():
    best = [{"y": made.permutation(50)[None, :5]} for made in map(np.random.default_rng, range(8))]
    ends = {"y": "ranked"}
    others = [{"y": np.where(np.arange(5), 60, one["y"])} for one in best]
    form, found = figure(best, others, ends=ends)
    assert form.task.name == "classes"
    assert found.value == 1
    _, found = figure(best, [{"y": one["y"][:, ::-1]} for one in best], ends=ends)
    assert found.value == 0


@pytest.mark.parametrize(
    ("task", "shape", "words"),
    [
        ("text", (1, 9, 12), "text of 11 symbols, blank 0"),
        ("labels", (1, 6), "scores of steps or labels"),
        ("segmentation", (1, 4, 9, 9), "4 classes a pixel"),
        ("masks", (1, 2, 9, 9), "masks of 0 to 1"),
        ("segmentation", (1, 9, 9, 4), "4 classes a pixel"),
        ("classes", (1, 6), "6 classes"),
        ("heatmaps", (1, 3, 9, 9), "3 heat maps"),
        ("keypoints", (1, 7, 3), "7 key points"),
        ("keypoints", (1, 8), "4 key points"),
        ("embeddings", (1, 40), "embeddings of 40 numbers"),
        ("steps", (1, 9, 5), "5 classes a step"),
        ("labels", (1, 9, 1), "scores of steps or labels"),
    ],
)
def test_a_task_that_is_set_takes_outputs_of_its_shape(task, shape, words):
    made = np.random.default_rng(0)
    outputs = [{"y": made.normal(0, 2, shape).astype(np.float32)} for _ in range(8)]
    found = derive_form(outputs, inputs=[fed()] * 8, metric=Metric(None, task=task)).task
    same, lost = found.tally(), found.tally()
    for one in outputs:
        same.add(fed(), one, one)
        lost.add(fed(), one, {"y": one["y"][..., :1] * np.nan})
    assert f"y: {words}" in found.form and same.result().value == 1 and lost.result().value < 0.5


def test_a_class_without_a_picture_and_one_beside_numbers_are_compared_too():
    sound, made = {"x": np.zeros((1, 1, 99), np.float32)}, np.random.default_rng(0)
    classes = [{"y": np.array([n])} for n in range(8)]
    assert figure(classes, classes, [sound] * 8)[0].task.name == "classes"
    beside = [{**one, "far": np.float32(made.normal(0, 1, (1, 7, 5, 2)))} for one in classes]
    form, _ = figure(beside, beside, [sound] * 8)
    assert form.task.name == "indices" and form.uncovered == ("far",)


@pytest.fixture
def refused(run, tmp_path):
    """(model, labels) -> why a build with them is refused."""

    def call(model, labels):
        np.save(tmp_path / "x.npy", ROWS)
        (tmp_path / "labels.txt").write_text("\n".join(map(str, labels)))
        asked = ("--images", tmp_path / "x.npy", "--eval-images", tmp_path / "x.npy")
        asked += ("--labels", tmp_path / "labels.txt", "--effort", 0, "--duration", 0)
        return run.fails("build", model, *asked, "--out", tmp_path / "o")

    return call


def test_labels_that_no_output_can_tell_are_refused_with_a_way_out(ranking, refused, said):
    error = refused(ranking("values"), [9, *said[1:]])
    assert "3 classes, got 9" in error
    assert "[N, classes]" in refused(ranking("most"), said)


def test_labels_below_0_are_told_a_way_out(ranking, run, refused, tmp_path, said):
    np.savez(tmp_path / "x.npz", x=ROWS, labels=np.array([-1, *said[1:]]))
    asked = ("--images", tmp_path / "x.npz", "--eval-images", tmp_path / "x.npz", "--effort", 0)
    error = run.fails("build", ranking("best"), *asked, "--out", tmp_path / "o")
    assert "'labels' must be whole numbers from 0, got -1" in error
    assert "-1" in error
    assert "line 1" in refused(ranking("best"), [-1, *said[1:]])


def test_numbers_of_something_else_are_no_classes(build_with_accuracy, small_cnn, tmp_path):
    model = onnx.load(small_cnn)
    graph = model.graph
    del graph.output[:]
    graph.node.extend(parse_nodes("whole = Cast <to = 7> (logits)"))
    graph.output.append(make_value("whole", ["batch", 10], TensorProto.INT64))
    _, _, found = build_with_accuracy(save_net(model, tmp_path / "whole.onnx"), ROWS)
    assert found["task"] is None and found["top1_agreement"] is None


def spoiled(end):
    """A classifier with a layer `bad` that int8 spoils, which ranks its classes itself."""
    rng = np.random.default_rng(1)
    size = np.where(np.arange(8) == 0, 1000.0, 1.0).reshape(1, 8, 1, 1)
    weights = {
        "w1": rng.normal(0, 0.3, (8, 3, 3, 3)),
        "size": size,
        "w2": rng.normal(0, 0.3, (8, 8, 1, 1)) / size,
        "w3": rng.normal(0, 0.3, (16, 8, 3, 3)),
        "w4": rng.normal(0, 1.0, (1024, 10)),
    }
    weights["w2"][:, 0] = 0
    ranked, outputs = {
        "ArgMax": (
            "raw = ArgMax <axis = 1, keepdims = 0> (logits) class = Cast <to = 6> (raw)",
            {"class": TensorProto.INT32},
        ),
        "TopK": (
            "values, places = TopK (logits, k)",
            {"values": TensorProto.FLOAT, "places": TensorProto.INT64},
        ),
    }[end]
    nodes = f"""
        a = Conv <pads = [1, 1, 1, 1]> (x, w1) t = Tanh (a) m = Mul (t, size)
        bad = Conv (m, w2) r = Relu (bad)
        c = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (r, w3) q = Relu (c)
        f = Flatten (q) logits = MatMul (f, w4) {ranked}
    """
    ends = [make_value(name, None, kind) for name, kind in outputs.items()]
    weights = as_float32(weights) | {"k": [3]}
    return make_model(nodes, {"x": ["batch", 3, 16, 16]}, ends, weights)


LONGER = np.random.default_rng(3).normal(size=(48, 3, 16, 16)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "end"), [("onnxruntime", "ArgMax"), ("tensorrt", "TopK"), ("ascend", "ArgMax")]
)
def test_the_search_hears_the_scores_before_they_are_ranked(target, end, tmp_path):
    alike, words = {}, ("--target", target, "--accept", "--effort")
    for effort in (0, 1):
        out = build_net(spoiled(end), LONGER, tmp_path / str(effort), *words, effort)
        report = json.loads((out / "report.json").read_text())
        alike[effort] = report["engines"][1]["accuracy"]["task"]["value"]
    assert alike[0] < 0.9 < 0.93 < alike[1]
    plan = read_plan(out / "calib8/net.plan.toml").targets[target]
    assert plan.choices.float_nodes["Conv_bad"].endswith("dB of logits")


def test_picked_outputs_are_compared_where_they_are_picked():
    model = spoiled("ArgMax")
    assert set(find_pick_sources(model).values()) == {"logits"}
    model.graph.output.append(make_value("q", None))
    assert find_pick_sources(model) == {}
    assert set(find_pick_sources(spoiled("TopK")).values()) == {"logits"}


BOX_ENDS = {
    "TopK": """
        best = ReduceMax <axes = [2], keepdims = 0> (scores) values, places = TopK (best, k)
        places3 = Unsqueeze (places, last) tiled = Tile (places3, four)
        some = GatherElements <axis = 1> (boxes, tiled) values3 = Unsqueeze (values, last)
        y = Concat <axis = 2> (some, values3)
    """,
    "NonMaxSuppression": """
        by_class = Transpose <perm = [0, 2, 1]> (scores)
        kept = NonMaxSuppression (boxes, by_class, k)
        place = Gather <axis = 1> (kept, two) flat = Reshape (boxes, fours)
        y = Gather <axis = 0> (flat, place)
    """,
}


@pytest.mark.parametrize(
    ("end", "compared"),
    [("TopK", {"best", "boxes"}), ("NonMaxSuppression", {"boxes", "by_class", "flat"})],
)
def test_boxes_are_compared_before_they_are_picked(end, compared):
    constants = {"k": [3], "last": [2], "four": [1, 1, 4], "two": 2, "fours": [-1, 4]}
    constants = {name: np.array(value) for name, value in constants.items()}
    nodes = f"boxes = Tanh (x) scores = Sigmoid (z) {BOX_ENDS[end]}"
    inputs = {"x": [1, 9, 4], "z": [1, 9, 5]}
    model = make_model(nodes, inputs, {"y": None}, constants, opset=17)
    sources = find_pick_sources(model)
    assert set(sources.values()) == compared
    # a trial may have other names, as behind a Q/DQ pair
    trial = onnx.compose.add_prefix(model, "t/", rename_nodes=False)
    outputs = [value.name for value in add_source_outputs(trial, sources).graph.output]
    assert outputs == ["t/y", *dict.fromkeys(sources.values())]
    model.graph.node.append(onnx.helper.make_node("Identity", ["boxes"], ["other"]))
    model.graph.output.append(make_value("other", None))
    assert find_pick_sources(model) == {}


def test_a_figure_of_ones_own_gets_what_the_model_ranked(tmp_path):
    (own := tmp_path / "own.py").write_text(
        "def same(fp32, int8, label):\n    return float((fp32['class'] == int8['class']).all())\n"
    )
    build_net(spoiled("ArgMax"), LONGER, tmp_path, "--metric", f"{own}:same", "--max-loss", 0.03)


LABELS, SIDE = 12, 32


def shares(raw):
    return 1 / (1 + np.exp(-raw))


def scores(number, count=40, on=3, rest=-5.0):
    """Raw scores of which `on` are above 0."""
    made = np.random.default_rng(number)
    values = made.normal(rest, 0.8, (1, count))
    values[0, made.choice(count, on, replace=False)] = made.uniform(1, 4, on)
    return values


def task_of(rows, inputs=None):
    return same_task([{"y": row} for row in rows], inputs)


def figure_labels(references, candidates):
    samples = [[{"y": array} for array in arrays] for arrays in (references, candidates)]
    form, found = figure(*samples, ends={"y": "sigmoid"})
    return form.task, found


@pytest.mark.parametrize("count", [14, 40, 527])
def test_labels_of_both_are_counted(count):
    rows = [scores(n, count) for n in range(10)]
    fewer = [row.copy() for row in rows]
    for row in fewer[:6]:
        row[0, row.argmax()] = -6
    rows, fewer = list(map(shares, rows)), list(map(shares, fewer))
    task, same = figure_labels(rows, rows)
    assert task.name == "labels" and same.value == 1 and not task.activation
    _, found = figure_labels(rows, fewer)
    assert found.words.startswith("24 of 30 scores on FP32's side of 0.5, without 0, the usual one")
    assert found.value == pytest.approx(24 / 30)
    assert figure_labels(rows, [row * np.nan for row in rows])[1].value == 0


def test_raw_scores_are_labels_only_if_set():
    rows = [{"y": scores(n)} for n in range(10)]
    assert same_task(rows) == "classes"
    task = derive_form(rows, inputs=[fed()] * 10, metric=Metric(None, task="labels")).task
    assert task.activation == "sigmoid"
    tally = task.tally()
    for row in rows:
        tally.add(fed(), row, row)
    assert tally.result().count == "30 of 30"


@pytest.mark.parametrize("shape", [(1, 16, 7, 7), (1, 30, 16)])
def test_user_labels_are_no_features_beside_them(shape):
    made = np.random.default_rng(0)
    rows = [{"y": scores(n), "features": made.normal(size=shape)} for n in range(4)]
    task = derive_form(rows, inputs=[fed()] * 4, metric=Metric(None, task="labels")).task
    assert task.output == "y"


@pytest.mark.parametrize(("counts", "labels"), [
    (((0.95, 2), (0.05, 2)), True), (((0.95, 2), (0.05, 1)), False),  # four labels
    (((0.95, 1), (0.05, 3)), True), (((0.5, 2), (0.05, 8)), False),  # none above a half
    (((0.95, 3), (0.5, 2), (0.05, 5)), True), (((0.95, 3), (0.5, 4), (0.05, 6)), False),
    (((0.95, 6), (0.05, 5)), True), (((0.95, 6), (0.11, 5)), False),  # none near 0
])  # fmt: skip
def test_labels_are_four_or_more_and_seldom_in_between(counts, labels):
    row = np.concatenate([np.full(count, share) for share, count in counts])[None]
    outputs = [{"y": row}, {"y": row[:, ::-1]}]
    assert (same_task(outputs, ends={"y": "sigmoid"}) == "labels") == labels
    assert same_task(outputs) is None  # the graph does not show a Sigmoid


def test_one_class_a_sample_is_no_label():
    made = np.random.default_rng(3)

    assert task_of([scores(n, 200, on=1) for n in range(4)]) == "classes"
    assert task_of([shares(scores(n, 200, on=1)) for n in range(4)]) == "classes"
    assert task_of_four(lambda: made.normal(0, 6, (1, 10))) == "classes"
    assert task_of_four(lambda: np.eye(100)[made.integers(0, 100, 1)] * 30) == "classes"
    assert task_of_four(lambda: made.uniform(0, 1, (1, 136))) is None  # places


def saved(path):
    """Twelve tags of a picture: how bright each of twelve stripes is."""
    made = np.random.default_rng(0)
    weights = np.zeros((LABELS, 3, SIDE, SIDE), np.float32)
    for label in range(LABELS):
        weights[label, label % 2, :, 2 * label : 2 * label + 2] = 1
    weights *= 10 / weights[0].sum()
    weights[:, :2] += made.normal(0, 1e-4, (LABELS, 2, SIDE, SIDE))
    nodes = "c = Conv (x, w, b) f = Flatten (c) y = Sigmoid (f)"
    weights = {"w": weights, "b": np.full(LABELS, -6, np.float32)}
    model = make_model(nodes, {"x": ["n", 3, SIDE, SIDE]}, {"y": ["n", LABELS]}, weights)
    return save_net(model, path)


@pytest.mark.parametrize("glare", [1.0, 1000.0])
def test_a_build_counts_the_labels(build_with_accuracy, tmp_path, glare):
    made = np.random.default_rng(1)
    pictures = made.uniform(0, 0.1, (24, 3, SIDE, SIDE)).astype(np.float32)
    for picture in pictures:
        for label in made.choice(LABELS, 3, replace=False):
            picture[label % 2, :, 2 * label : 2 * label + 2] = 1
        picture[2, 0, 0] = glare  # what decides nothing takes the steps of int8
    code, out, told = build_with_accuracy(saved(tmp_path / "m.onnx"), pictures)
    task = told["task"]
    assert task["task"] == "labels" and task["count"].endswith(" of 72")
    assert (task["value"] == 1, code) == ((True, 0) if glare == 1 else (False, 3))
    assert f"{task['count']} scores on FP32's side of 0.5" in out and "Labels kept" in out
    assert "Top-1 agreement" not in out and told["top1_agreement"] is None


FED = {"x": np.zeros((1, 3, 24, 24), np.float32)}


def shares_heads(number, classes=2, sure=3.0):
    power = np.exp(np.random.default_rng(number).normal(0, sure, (1, classes)))
    return np.float32(power / power.sum())


def face(number):
    """A box, key points and whether it is a face, as MTCNN's last net tells them."""
    made = np.random.default_rng(70 + number)
    box, points = made.normal(0, 0.1, (1, 4)), made.uniform(0.1, 0.9, (1, 10))
    return {"box": np.float32(box), "points": np.float32(points), "face": shares_heads(number)}


def task_of_heads(outputs, fed=FED):
    return derive_form(outputs, inputs=[fed] * len(outputs)).task


def test_probabilities_beside_numbers_are_classes():
    outputs = [face(n) for n in range(4)]
    form, same = figure(outputs, outputs, [FED] * 4)
    assert form.task.form == "face: 2 classes" and form.uncovered == ("box", "points")
    assert same.count == "4 of 4"
    ages = [{"age": np.float32([[age]])} for age in (52, 25, 8, 6)]
    outputs = [{**age, "a": shares_heads(n), "b": shares_heads(n, 7)} for n, age in enumerate(ages)]
    form = derive_form(outputs, inputs=[FED] * 4)
    assert form.task.form == "a, b: 2 and 7 classes" and form.uncovered == ("age",)


@pytest.mark.parametrize("what", ["a map", "no picture", "raw"])
def test_others_are_no_classes(what):
    outputs = [face(n) for n in range(4)]
    for one in outputs:
        if what == "a map":
            one["box"] = np.zeros((1, 4, 12, 12), np.float32)
        if what == "raw":
            one["face"] = one["face"] * 9
    fed = {"x": np.zeros((1, 40), np.float32)} if what == "no picture" else FED
    assert task_of_heads(outputs, fed) is None


class Heads:
    """A session of a box and of shares of two classes, by the mean of the picture."""

    inputs = (TensorSpec("x", "float32", ("n", 3, 24, 24)),)
    outputs = (TensorSpec("box", "float32", ("n", 4)), TensorSpec("face", "float32", ("n", 2)))

    def run(self, feed):
        mean = feed["x"].mean(axis=(1, 2, 3))
        box = np.stack([mean, mean * 0, -mean, mean + 3], axis=1)
        yes = 1 / (1 + np.exp(-9 * mean))
        return {"box": np.float32(box), "face": np.float32(np.stack([1 - yes, yes], axis=1))}


def test_labels_are_of_the_output_that_tells_classes(wording):
    means = np.random.default_rng(2).choice([-1.0, 1.0], 30)
    x = np.broadcast_to(means[:, None, None, None], (30, 3, 24, 24)).astype(np.float32)
    labels = (means > 0).astype(int).tolist()
    found = compare(Heads(), Heads(), [{"x": one[None]} for one in x], labels=labels)
    assert found.classes == 2 and found.top1_reference == found.top1_candidate == 1
    wrong = [label + 2 for label in labels]
    with pytest.raises(FeedError) as refusal:
        compare(Heads(), Heads(), [{"x": one[None]} for one in x], labels=wrong)
    wording.check(refusal.value)


def part(output, db, **more):
    return SliceAccuracy(
        label=output,
        output=output,
        sqnr_db=db,
        cosine_mean=1,
        cosine_min=1,
        max_abs_error=0,
        **more,
    )


@pytest.mark.parametrize(
    ("db", "beside", "level"), [(30, 20, GOOD), (4, 20, GOOD), (30, 9, DOUBTFUL), (30, 3, UNUSABLE)]
)
def test_what_the_classes_do_not_tell_is_judged_by_its_noise(db, beside, level):
    task = TaskFigure(
        task="classes",
        figure="top-1 agreement",
        value=1.0,
        words="9 of 9 samples keep FP32's top-1 class",
        count="9 of 9",
        samples=9,
        beside=("box",),
    )
    parts = tuple(sorted([part("face", db), part("box", beside)], key=lambda one: one.sqnr_db))
    found = dict(judge_accuracy(Accuracy(samples=9, outputs=(), parts=parts, task=task), None))
    assert set(found) == {level, GOOD}
    assert level == GOOD or "(worst: box" in found[level]


@pytest.mark.parametrize(
    ("less", "db", "level"),
    [
        (SAMPLE_MEAN, 15, GOOD),
        (SAMPLE_MEAN, 14, DOUBTFUL),
        (SAMPLE_MEAN, -10, DOUBTFUL),
        (SAMPLE_MEAN, -11, UNUSABLE),
        ("x", 5, GOOD),
        ("x", -11, UNUSABLE),
    ],
)
def test_numbers_say_as_much_with_an_offset_as_without(less, db, level):
    """A third of what varies was lost, and called good since the mean was large."""
    whole = OutputAccuracy(name="age", sqnr_db=30, cosine_mean=1, cosine_min=1, max_abs_error=0)
    figures = Accuracy(samples=9, outputs=(whole,), parts=(part("age", db, less=less),))
    assert {*dict(judge_accuracy(figures, None))} == {level}


def test_text_beside_four_scores_is_no_output_of_a_task():
    """Four scores and a name could be a box and its class."""
    made = rng()
    outputs = []
    for _ in range(8):
        scores = softmax(made.normal(0, 3, (1, 4))).astype(np.float32)
        outputs.append({"scores": scores, "label": np.array(["cat"], object)})
    form = derive_form(outputs, inputs=[fed()] * 8)
    assert form.task.name == "classes" and [part.output for part in form.parts] == ["scores"]


def test_slice_without_noise_is_exact():
    figures = Accuracy(samples=9, outputs=(), parts=(part("fgr", np.inf),))
    assert [*judge_accuracy(figures, None)] == [(GOOD, "exact (worst: fgr)")]


def features(path):
    """64 channels behind a ReLU, of which few are far above 0."""
    made = np.random.default_rng(1)
    weights = {"w": made.normal(0, 1, (64, 3, 3, 3)), "b": made.normal(-9, 2, 64)}
    nodes = "c = Conv (x, w, b) r = Relu (c) p = GlobalAveragePool (r) y = Flatten (p)"
    shapes = {"x": [1, 3, 12, 12]}, {"y": [1, 64]}
    return save_net(make_model(nodes, *shapes, as_float32(weights), opset=17), path)


def cuts(path):
    """A probability for each of 40 frames, whether it is high; exactly 0 where not."""
    weights = as_float32({"w": np.full((4, 1), 10), "b": [-20]}) | {"first": [1, 40, 4]}
    nodes = "flat = Reshape (x, first) m = MatMul (flat, w) a = Add (m, b) y = Sigmoid (a)"
    shapes = {"x": [1, 40, 2, 2, 1]}, {"y": [1, 40, 1]}
    return save_net(make_model(nodes, *shapes, weights, opset=17), path)


def pictures():
    made = np.random.default_rng(2)
    tints = made.uniform(-3, 3, (24, 3, 1, 1))
    return (tints + made.normal(0, 0.5, (24, 3, 12, 12))).astype(np.float32)


def films():
    made = np.random.default_rng(3)
    frames = made.uniform(0, 0.02, (24, 40, 2, 2, 1))
    for film in frames:
        film[made.choice(40, 2, replace=False)] += 1
    return frames.astype(np.float32)


@pytest.mark.parametrize(
    ("make", "fed", "form", "words"),
    [
        (features, pictures, "y: embeddings of 64 numbers", "nearest neighbours as FP32's"),
        (
            cuts,
            films,
            "y: scores of steps or labels, each its own",
            "48 of 48 scores on FP32's side of 0.5, without 0",
        ),
    ],
)
def test_what_stands_out_is_not_always_a_class(
    make, fed, form, words, build_with_accuracy, tmp_path
):
    code, out, found = build_with_accuracy(make(tmp_path / "m.onnx"), fed())
    assert code == 0 and found["reading"] == form
    assert words in found["task"]["words"] and words.split(",")[0] in " ".join(out.split())
    assert found["top1_agreement"] is None and "top-1 class" not in out
