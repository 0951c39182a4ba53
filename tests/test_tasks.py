"""What outputs are for, told from their form, and how much of it a candidate keeps."""

import numpy as np
import pytest

from deploy.metrics.tasks import detections
from deploy.metrics.tasks.detections import Detections, matched, overlaps, suppressed
from deploy.metrics.tasks.embeddings import are_features, of_unit_length
from deploy.metrics.tasks.heatmaps import HeatMaps
from deploy.metrics.tasks.segmentation import Masks
from deploy.metrics.tasks.sequences import edit_distance
from deploy.metrics.tasks.yolo import Grid
from deploy.metrics.truth import form_of

SIZE = (160, 224)  # height, width of the picture
GRID = Grid((8, 16, 32), 1, False)


def rng():
    return np.random.default_rng(5)


def fed(size=SIZE):
    return {"images": np.zeros((1, 3, *size), np.float32)}


def figure(references, candidates, inputs=None):
    """Form and figure of two models' outputs, one mapping a sample."""
    inputs = inputs or [fed()] * len(references)
    form = form_of(references, inputs=inputs)
    assert form.task is not None
    tally = form.task.tally()
    for one in zip(inputs, references, candidates, strict=True):
        tally.add(*one)
    return form, tally.result()


def same_task(outputs, inputs=None):
    task = form_of(outputs, inputs=inputs or [fed()] * len(outputs)).task
    return None if task is None else task.name


# ------------------------------------------------------------------ boxes


def scene(number, objects=6, classes=5):
    """What one picture shows: anchors of the grid that see an object, their class."""
    made = np.random.default_rng(number)
    return made.choice(GRID.count(SIZE), objects, replace=False), made.integers(0, classes, objects)


def yolo(number, *, classes=5, floor=0.001, score=0.9):
    """(cx cy w h) [A, 4] at the anchors and scores [A, C] of a picture."""
    cells, strides = GRID.cells(SIZE)
    made = np.random.default_rng(100 + number)
    places = (cells + 0.5) * strides[:, None] + made.uniform(-2, 2, cells.shape)
    boxes = np.concatenate([places, np.tile([[3.0, 3.0]], (len(cells), 1))], axis=1)
    scores = made.uniform(0, floor, (len(cells), classes))
    seen, which = scene(number, classes=classes)
    scores[seen, which] = score
    return boxes, scores


def v8(number, **options):
    boxes, scores = yolo(number, **options)
    return {"output0": np.concatenate([boxes, scores], axis=1).T[None].astype(np.float32)}


def v5(number):
    boxes, scores = yolo(number)
    best = scores.max(axis=1, keepdims=True)
    classes = np.where(scores > 0.5, 1.0, np.random.default_rng(9).uniform(0, 0.7, scores.shape))
    value = np.concatenate([boxes, best, classes], axis=1)[None]
    return {"output": value.astype(np.float32)}


def yolox(number):
    """As v5, the boxes left in their cells."""
    value = v5(number)["output"].astype(np.float64)
    cells, strides = GRID.cells(SIZE)
    value[0, :, :2] = value[0, :, :2] / strides[:, None] - cells
    value[0, :, 2:4] = np.log(value[0, :, 2:4] / strides[:, None])
    return {"output": value.astype(np.float32)}


def tall(number):
    """As YOLOX, every box taller than its cell."""
    value = yolox(number)["output"]
    value[..., 3] = np.random.default_rng(number).uniform(0.01, 0.5, value.shape[:2])
    return {"output": value}


def without(outputs, number, lost, rows):
    """The same with the first `lost` objects unseen; `rows` is where the scores are."""
    value = next(iter(outputs.values())).copy()
    anchors = scene(number)[0][:lost]
    value[(0, slice(4, None), anchors) if rows == 1 else (0, anchors, slice(4, None))] = 0
    return {next(iter(outputs)): value}


@pytest.mark.parametrize(("form", "rows"), [(v8, 1), (v5, -1), (yolox, -1), (tall, -1)])
def test_lost_boxes_are_counted_in_every_form(form, rows):
    references = [form(n) for n in range(8)]
    candidates = [without(one, n, 1, rows) for n, one in enumerate(references)]
    _, same = figure(references, references)
    assert same.value == 1 and same.task == "boxes" and same.figure == "boxes kept"
    assert same.words == "48 of 48 boxes of FP32 kept, 0 new (score above 0.25)"
    _, found = figure(references, candidates)
    assert found.words.startswith("40 of 48 boxes of FP32 kept, 0 new")
    assert found.value == pytest.approx(80 / 88) and found.samples == 8


def test_scores_are_a_part_even_where_first_samples_show_no_object():
    form, _ = figure([v8(n, score=0.0) for n in range(4)], [v8(n) for n in range(4)])
    assert [part.label for part in form.parts] == ["output0[0:4]", "output0[4:9]"]


def test_boxes_that_move_change_class_or_appear_are_told():
    references = [v8(n) for n in range(8)]
    moved = [{"output0": one["output0"].copy()} for one in references]
    for one in moved:
        one["output0"][:, :2] += 2  # of boxes 3 wide
    assert "0 of 48 boxes of FP32 kept, 48 new" in figure(references, moved)[1].words
    turned = [
        {"output0": np.concatenate([v[:, :4], np.roll(v[:, 4:], 1, axis=1)], axis=1)}
        for v in (one["output0"] for one in references)
    ]
    assert "0 of 48 boxes" in figure(references, turned)[1].words
    fewer = [without(one, n, 3, 1) for n, one in enumerate(references)]
    assert "24 of 24 boxes of FP32 kept, 24 new" in figure(fewer, references)[1].words


@pytest.mark.parametrize(("score", "said"), [(0.9, "0.25"), (0.2, "0.15"), (0.1, "0.05")])
def test_the_threshold_goes_down_until_there_are_boxes(score, said):
    references = [v8(n, score=score) for n in range(4)]
    assert figure(references, references)[1].words.endswith(f"(score above {said})")


def test_where_fp32_finds_next_to_nothing_there_is_no_figure():
    references = [v8(n, score=0.0) for n in range(4)]
    assert figure(references, [v8(n) for n in range(4)])[1] is None


def test_a_candidate_of_nan_keeps_no_box():
    references = [v8(n) for n in range(4)]
    broken = [{"output0": one["output0"] * np.nan} for one in references]
    assert figure(references, broken)[1].value == 0


def test_anchors_that_do_not_fit_the_picture_are_no_boxes():
    outputs = [v8(n) for n in range(4)]
    assert same_task(outputs) == "boxes"
    assert same_task(outputs, [fed((96, 96))] * 4) is None
    mixed = [{"output0": rng().permutation(one["output0"], axis=2)} for one in outputs]
    assert same_task(mixed) is None


def test_overlaps_by_hand():
    one = np.array([[0.0, 0, 2, 2], [5, 5, 5, 9]])
    other = np.array([[1.0, 0, 3, 2], [0, 0, 2, 2]])
    np.testing.assert_allclose(overlaps(one, other), [[1 / 3, 1], [0, 0]])


def test_suppression_is_by_class_and_matching_one_to_one():
    boxes = np.array([[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 10], [20, 20, 30, 30]])
    found = Detections.of(boxes, np.array([0.9, 0.8, 0.7, 0.6]), np.array([0, 0, 1, 0]))
    kept = suppressed(found)
    np.testing.assert_allclose(kept.scores, [0.9, 0.7, 0.6])
    assert list(map(len, matched(kept, kept, [0.05, 0.65]))) == [3, 2]
    assert len(matched(found, kept)[0]) == 3  # one box of the candidate stands for one


@pytest.mark.parametrize(("side", "same"), [(5.1, True), (5.0, False)])  # of 10: IoU 0.51, 0.5
def test_boxes_are_one_above_an_iou_of_a_half(side, same):
    both = np.array([[0.0, 0, 10, 10], [0, 0, 10, side]])
    one, other = (Detections.of(box[None], np.ones(1), np.zeros(1, np.int64)) for box in both)
    assert bool(matched(one, other)[0]) == same
    found = Detections.of(both, np.array([0.9, 0.8]), np.zeros(2, np.int64))
    assert len(suppressed(found).scores) == 2 - same


def test_detections_are_the_thousand_best_above_the_lowest_score():
    boxes = np.tile([0.0, 0, 1, 1], (1200, 1))
    scores = np.linspace(0.9, 0.1, 1200)
    found = Detections.of(boxes, scores, np.arange(1200))
    assert found.classes.tolist() == list(range(1000))
    boxes[0, 3], scores[1:] = np.nan, 0.05
    scores[[7, 3]] = 0.051, 0.052
    assert Detections.of(boxes, scores, np.arange(1200)).classes.tolist() == [3, 7]


@pytest.mark.parametrize(
    ("moved", "seen", "columns", "same"),
    [
        (1.9, 1, 20, True), (2.1, 1, 20, False), (2.1, 0.5, 20, True),  # points that are seen
        (0, 1, 16, True), (0, 1, 15, False),  # masks of more than three quarters
    ],
)  # fmt: skip
def test_boxes_are_one_where_points_and_masks_are_alike_too(moved, seen, columns, same):
    def found(moved, columns):
        points = np.array([[[5 + moved, 5, seen], [9, 9, 0.4]]])
        cells = np.broadcast_to(np.where(np.arange(20) < columns, 1.0, -1.0), (1, 20, 20))
        masks = detections.Masks(np.ones((1, 1)), cells, 1.0)
        box = np.array([[0.0, 0, 20, 20]])
        return Detections(box, np.ones(1), np.zeros(1, np.int64), points, masks)

    assert bool(matched(found(0, 20), found(moved, columns))[0]) == same


# ------------------------------------------------------------------ classes


def softmax(x):
    power = np.exp(x - x.max(axis=1, keepdims=True))
    return power / power.sum(axis=1, keepdims=True)


def test_equal_best_classes_are_counted():
    made = rng()
    references = [{"y": softmax(made.standard_normal((1, 20)) * 4)} for _ in range(10)]
    candidates = [{"y": one["y"].copy()} for one in references]
    for one in candidates[:3]:
        one["y"][0, (one["y"].argmax() + 1) % 20] = 1
    _, found = figure(references, candidates)
    assert found.task == "classes" and found.value == 0.7
    assert found.words == "7 of 10 best classes as FP32's, 10 among the best five"


def test_logits_are_classes_and_other_vectors_are_not():
    made = rng()

    def outputs(make):
        return [{"y": make().astype(np.float32)} for _ in range(4)]

    assert same_task(outputs(lambda: made.standard_normal((1, 10)) * 4)) == "classes"

    def peaked(worst):
        scores = made.standard_normal((1, 1000))
        scores[0, [17, 23]] = 12, worst
        return scores

    assert same_task(outputs(lambda: peaked(-9.7))) == "classes"
    assert same_task(outputs(lambda: peaked(-10.3))) is None  # the worst is as far off
    assert same_task(outputs(lambda: made.uniform(0.1, 0.9, (1, 8)))) is None  # places
    assert same_task(outputs(lambda: made.uniform(0, 1, (1, 196)))) is None  # landmarks


@pytest.mark.parametrize(("form", "on", "task"), [
    ((1, 100, 1), 1, "steps"), ((1, 100, 1), 3, "steps"), ((1, 100), 3, "steps"),
    ((1, 100), 1, "classes"),
])  # fmt: skip
def test_steps_of_a_film_that_are_near_1_are_no_classes(form, on, task):
    """Of a vector a single one may be the class."""
    made = rng()

    def cuts():
        shares = made.uniform(0, 0.01, 100)
        shares[made.choice(100, on, replace=False)] = 0.97
        return {"cuts": shares.reshape(form).astype(np.float32)}

    film = [{"frames": np.zeros((1, 100, 27, 48, 3), np.uint8)}] * 4
    assert same_task([cuts() for _ in range(4)], film) == task
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
    assert same_task([plates(sure=0) for _ in range(4)]) is None  # shapes of a body, maybe
    places = [plates(place=made.uniform(0, 1, (1, 4))) for _ in range(4)]
    assert same_task(places) is None  # of what has these classes


def test_angles_places_and_steering_are_neither_classes_nor_embeddings():
    made = rng()

    def task(make):
        return same_task([{"y": make().astype(np.float32)} for _ in range(4)])

    assert task(lambda: made.normal(0, [[25, 12, 8]])) is None  # of a head, in degrees
    assert task(lambda: made.uniform(-1, 1, (1, 6))) is None  # behind a Tanh
    turn = np.linspace(0, 2 * np.pi, 49)[:-1]
    line = np.stack([np.sin(turn), np.cos(turn)], axis=1)
    for points in (line.reshape(1, -1), line.T.reshape(1, -1)):  # x, y, x, y; or all x before y
        assert task(lambda points=points: points + made.normal(0, 0.05, points.shape)) is None
    turned = np.full((4, 4), [[0.8], [0.5], [-1.0], [0.5]])  # a page's, by a trained model
    turned += np.diag([4.4, 4.2, 4.6, 4.4]) + made.normal(0, 0.1, (4, 4))
    assert same_task([{"y": row[None]} for row in turned]) == "classes"


def test_seven_raw_scores_are_more_than_a_pose_has_numbers():
    """A pose has up to six: its usual values differ as scores of sure classes do."""
    usual = np.float32([20, -20, 10, -10, 5, -5, 0])
    for count, task in ((6, None), (7, "classes")):
        outputs = [{"y": usual[None, :count] + np.float32(turn)} for turn in (-2, 0, 1, 3)]
        assert same_task(outputs) == task


def test_angles_with_usual_values_are_seldom_taken_for_classes():
    """Three raw scores may be classes as well: what each usually is tells nothing of either."""
    made = rng()
    poses = made.normal([[[3, -18, 1]]], [[[20, 10, 8]]], (100, 4, 3)).astype(np.float32)
    taken = [same_task([{"y": one[None]} for one in own]) for own in poses]
    assert taken.count(None) >= 65 and set(taken) <= {None, "classes"}
    scores = made.normal(0, 6, (100, 4, 3))
    scores -= scores.mean(axis=2, keepdims=True)
    taken = [same_task([{"y": one[None].astype(np.float32)} for one in own]) for own in scores]
    assert taken == ["classes"] * 100
    sure = np.float32([[9, 1, 0.5], [5.5, 0.5, -0.2], [12, 1.2, 1], [7, 1, 0]])  # of one class
    assert same_task([{"y": one[None]} for one in sure]) == "classes"


def test_embeddings_keep_their_neighbours():
    made = rng()
    centres = made.standard_normal((4, 64))
    vectors = [centres[n % 4] + 0.1 * made.standard_normal(64) for n in range(12)]
    references = [{"e": v[None].astype(np.float32)} for v in vectors]
    form, same = figure(references, references)
    assert form.task.name == "embeddings" and same.value == 1
    candidates = [*references[:11], {"e": -references[11]["e"]}]
    _, found = figure(references, candidates)
    assert found.figure == "neighbours alike" and found.value < 1
    assert found.words.startswith(f"{round(found.value * 12)} of 12 nearest neighbours")
    _, few = figure(references[:4], references[:4])
    assert few.figure == "mean cosine" and few.value == pytest.approx(1)


def skewed(number, *, positive=False):
    """A vector of length 1 whose largest number stands out as a best class does."""
    made = np.random.default_rng(number)
    vector = made.gamma(0.6, size=512) - (0 if positive else 0.5)
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
    assert (
        same_task([{"f": one["f"] / 100 - np.float32(least / 100)} for one in features])
        != "embeddings"
    )


@pytest.mark.parametrize(
    ("vector", "unit"),
    [
        (np.full(16, 0.25), True), (np.full(16, 0.25 * 1.009), True),
        (np.full(16, 0.25 * 1.011), False), (np.full(16, 0.25 * 0.991), True),
        (np.full(16, 0.25 * 0.989), False), (np.full(4, 0.5), False), (-np.full(5, 0.2**0.5), True),
    ],
)  # fmt: skip
def test_a_vector_of_length_one_is_not_of_a_few_numbers(vector, unit):
    assert of_unit_length(vector) == unit


@pytest.mark.parametrize(
    ("size", "least", "most", "features"),
    [
        (32, 0, 2, True), (16, 0, 2, False), (72, 0, 2, False), (80, 0, 2, True),
        (64, -0.375, 2, True), (64, -0.376, 2, False), (64, 0, 1.02, True), (64, 0, 1.01, False),
    ],
)  # fmt: skip
def test_features_are_many_none_far_below_zero_and_some_above_one(size, least, most, features):
    rows = [np.linspace(least, high, size)[None] for high in (most, most + 1)]
    assert are_features(rows) == features


@pytest.mark.parametrize(
    ("counts", "embedding"),
    [
        (((1, 16), (-1, 16)), True),
        (((1, 15), (-1, 16)), False),  # 32 numbers
        (((1.55, 1), (1, 31), (-1, 32)), True),
        (((1.65, 1), (1, 31), (-1, 32)), False),
        (((1, 39), (-1, 25)), True),
        (((1, 40), (-1, 24)), False),
        (((1, 1), (-1, 1), (0.2, 31), (-0.2, 31)), True),
        (((1, 1), (-1, 1), (0.1, 31), (-0.1, 31)), False),
    ],
)
def test_an_embedding_is_long_and_lies_about_zero(counts, embedding):
    values = np.concatenate([np.full(count, value, np.float32) for value, count in counts])
    shuffled = rng().permutation(values)[None]  # in order they were points
    sound = [{"x": np.zeros((1, 64), np.float32)}] * 2
    assert (same_task([{"e": shuffled}, {"e": -shuffled}], sound) == "embeddings") == embedding


def test_sure_classes_are_no_vectors_of_length_one():
    made = rng()
    shares = [
        {"y": softmax(made.standard_normal((1, 64)) + 40 * np.eye(64)[[n]])} for n in range(4)
    ]
    assert same_task(shares) == "classes"
    linear = [{"y": np.eye(64)[[n]] + made.normal(0, 0.01, (1, 64))} for n in range(4)]
    assert same_task(linear) == "classes"  # trained to be one at its own class, and zero elsewhere


# ------------------------------------------------------------------ boxes in other outputs


def ended(number, layout=(0, 4, 5), columns=6, pad=4):
    """A list of rows in order of score, filled up with zeros."""
    made = np.random.default_rng(number)
    rows = np.zeros((10 + pad, columns), np.float32)
    low = made.uniform(0, 100, (10, 2))
    corner, score, kind = layout
    rows[:10, corner : corner + 4] = np.concatenate([low, low + made.uniform(5, 50, (10, 2))], 1)
    rows[:10, score] = np.sort(made.uniform(0.3, 1, 10))[::-1]
    rows[:10, kind] = made.integers(0, 3, 10)
    return rows


@pytest.mark.parametrize(
    ("layout", "columns"),
    [((0, 4, 5), 6), ((0, 5, 4), 6), ((2, 1, 0), 6), ((1, 6, 5), 7), ((3, 2, 1), 7)],
)
def test_lists_after_suppression_are_boxes_and_only_their_scores_are_compared(layout, columns):
    references = [{"out": ended(n, layout, columns)[None]} for n in range(4)]
    candidates = [{"out": one["out"].copy()} for one in references]
    for one in candidates:
        one["out"][0, 0, layout[1]] = 0
    form, found = figure(references, candidates)
    own = int(found.words.split(" of ")[1].split()[0])
    assert f"{own - 4} of {own} boxes of FP32 kept, 0 new" in found.words
    score = layout[1]
    assert [part.label for part in form.parts] == [f"out[..., {score}:{score + 1}]"]


def test_lists_of_changing_length_have_no_parts():
    references = [{"out": ended(n, pad=0)[: 5 + n]} for n in range(4)]
    form, found = figure(references, references)
    assert found.value == 1 and form.parts == ()


@pytest.mark.parametrize(
    ("column", "value", "task"),
    [
        (5, 0, "boxes"), (5, -1, None), (5, 1.5, None), (5, 70, "boxes"),  # classes are numbers
        (4, 1.0009, "boxes"), (4, 1.002, None), (4, np.nan, None),  # scores are shares,
        (slice(4, None, 6), 1, None),  # not all of them whole
        (slice(2, 4), -1, None), (slice(0, 2), 0, "boxes"),  # the second corner is the higher one
        (slice(12, None), 0, None), (slice(18, None), 0, "boxes"),  # three rows show the columns
    ],
)  # fmt: skip
def test_a_list_of_boxes_is_known_by_each_of_its_columns(column, value, task):
    outputs = [{"out": ended(0)[None]}]
    outputs[0]["out"].reshape(-1)[column] = value
    assert same_task(outputs) == task


def test_three_outputs_of_boxes_scores_and_classes():
    def outputs(number):
        rows = ended(number)[None]
        return {
            "num": np.array([[10]], np.int32),
            "boxes": rows[..., :4],
            "scores": rows[..., 4],
            "labels": rows[..., 5].astype(np.int32),
        }

    form, found = figure([outputs(n) for n in range(4)], [outputs(n) for n in range(4)])
    assert found.task == "boxes" and found.value == 1
    assert [part.label for part in form.parts] == ["scores"]


@pytest.mark.parametrize("batch", [True, False])
def test_boxes_with_their_scores_beside_classes(batch):
    """As MMDetection's exports give them."""

    def outputs(number, lost=0):
        rows = ended(number)
        rows[:lost, 4] = 0
        rows = rows[None] if batch else rows
        return {"dets": rows[..., :5], "labels": rows[..., 5].astype(np.int64)}

    references = [outputs(n) for n in range(4)]
    form, found = figure(references, references)
    assert "a list of boxes" in form.task.form and found.value == 1
    assert [part.label for part in form.parts] == (["dets[..., 4:5]"] if batch else [])
    assert figure(references, [outputs(n, lost=2) for n in range(4)])[1].value < 1
    turned = [{**one, "labels": one["labels"] + 1} for one in references]
    assert figure(references, turned)[1].value == 0
    cut = [{**one, "dets": one["dets"][..., :4]} for one in references]
    assert figure(references, cut)[1].value == 0


def ssd(number, classes=4):
    """Offsets from anchors that nobody told, and probabilities with a background."""
    made = np.random.default_rng(number)
    scores = made.uniform(0, 1, (1, 600, classes))
    scores[..., 0] = 12
    seen = made.choice(600, 8, replace=False)
    scores[0, seen, 1 + made.integers(0, classes - 1, 8)] = 18
    conf = softmax(scores.reshape(-1, classes)).reshape(scores.shape)
    return {"loc": made.standard_normal((1, 600, 4)), "conf": conf}, seen


def test_anchors_whose_boxes_cannot_be_told_match_by_place():
    pairs = [ssd(n) for n in range(4)]
    references = [one for one, _ in pairs]
    candidates = [{**one, "conf": one["conf"].copy()} for one in references]
    for one, (_, seen) in zip(candidates, pairs, strict=True):
        one["conf"][0, seen[:2]] = [1, 0, 0, 0]
    form, found = figure(references, candidates)
    assert "by anchor" in form.task.form
    assert found.words.startswith("24 of 32 boxes of FP32 kept, 0 new")


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_heads_of_several_anchors_a_cell_match_by_anchor(raw, joined):
    def outputs(number):
        made = np.random.default_rng(number)
        named = {}
        for stride in (8, 16, 32):
            value = made.standard_normal((1, 3, SIZE[0] // stride, SIZE[1] // stride, 5 + 4))
            value[..., 4] -= 8
            value[0, 1, 2, 1:4, 4] = 6
            value[0, 1, 2, 1:4, 7] = 5
            value = value if raw else 1 / (1 + np.exp(-value))
            if joined:
                value = value.transpose(0, 1, 4, 2, 3).reshape(1, 27, *value.shape[2:4])
            named[f"p{stride}"] = value.astype(np.float32)
        return named

    references = [outputs(n) for n in range(4)]
    candidates = [outputs(n) for n in range(4)]
    for one in candidates:
        one["p8"] *= 0 if not raw else 1
        one["p8"] -= 20 if raw else 0
    form, found = figure(references, candidates)
    assert "objectness and 4 classes of anchors" in form.task.form
    assert found.words.startswith("24 of 36 boxes of FP32 kept, 0 new")
    features = [{k: rng().standard_normal(v.shape) for k, v in one.items()} for one in references]
    assert same_task(features) is None


@pytest.mark.parametrize("softmaxed", [False, True])
def test_queries_are_boxes(softmaxed):
    def detr(number):
        made = np.random.default_rng(number)
        boxes = made.uniform(0.1, 0.3, (1, 100, 4))
        boxes[..., :2] = made.uniform(0.2, 0.8, (1, 100, 2))
        logits = made.uniform(-9, -6, (1, 100, 11))
        logits[..., 10] = 6 if softmaxed else -8
        logits[0, :7, made.integers(0, 10, 7)] = 12 if softmaxed else 2
        return {"logits": logits, "pred_boxes": boxes}

    references = [detr(n) for n in range(4)]
    form, found = figure(references, references)
    assert ("softmax" if softmaxed else "sigmoid") in form.task.form
    assert "boxes by centre" in form.task.form
    assert found.value == 1 and " of FP32 kept, 0 new" in found.words


@pytest.mark.parametrize("maps", [False, True])
def test_distributions_of_distances_are_boxes_level_by_level(maps):
    size, bins = (64, 96), 8

    def level(number, stride):
        cells = (size[0] // stride) * (size[1] // stride)
        made = np.random.default_rng(number * 1000 + stride)
        far = made.standard_normal((1, cells, 4 * bins))
        far[0, 0] = -30
        far[0, 0, [2, bins + 1, 2 * bins + 3, 3 * bins + 1]] = 30  # 2, 1, 3 and 1 strides
        scores = made.uniform(0, 0.01, (1, cells, 5))
        scores[0, 0, 2] = 0.9
        return scores, far

    def outputs(number):
        levels = {s: level(number, s) for s in (8, 16, 32)}
        named = {f"score{s}": one for s, (one, _) in levels.items()}
        named |= {f"box{s}": far for s, (_, far) in levels.items()}
        if not maps:
            return named
        sides = {one.shape[1]: (size[0] // s, size[1] // s) for s, (one, _) in levels.items()}
        return {
            name: value.transpose(0, 2, 1).reshape(1, -1, *sides[value.shape[1]])
            for name, value in named.items()
        }

    references = [outputs(n) for n in range(8)]
    form, found = figure(references, references, [fed(size)] * 8)
    assert "distribution" in form.task.form and found.words.startswith("24 of 24")
    boxes = form.task.decoder.boxes(fed(size), references[0]).boxes
    middle, far = np.full(2, 4.0), 8 * np.array([2, 1, 3, 1])  # of the first cell of stride 8
    wanted = np.concatenate([middle - far[:2], middle + far[2:]])
    assert np.abs(boxes - wanted).max(axis=1).min() < 1e-6
    moved = [{k: v for k, v in one.items()} for one in references]
    for one in moved:
        one["box8"] = np.roll(one["box8"], bins, axis=1 if maps else 2)
    assert figure(references, moved, [fed(size)] * 8)[1].value < 0.9
    silent = [{k: v * k.startswith("box") for k, v in one.items()} for one in references]
    assert figure(references, silent, [fed(size)] * 8)[1].value == 0  # nothing left of any level


def posed(number, points=5, length=3, moved=0.0):
    """YOLO with key points about each box's centre, the last of which is never visible."""
    value = v8(number, classes=1)["output0"][0]
    value[2:4] = 20
    made = np.random.default_rng(number)
    far = made.uniform(-8, 8, (points, 1, 2, 1)) + moved
    seen = np.broadcast_to(np.arange(points) < points - 1, (value.shape[1], points)).T
    rows = [value]
    for own, told in zip(far, seen, strict=True):
        rows += [value[:2] + own[0], told[None] * 0.9][: length - 1]
    return {"output0": np.concatenate(rows)[None].astype(np.float32)}


@pytest.mark.parametrize("length", [2, 3])
def test_key_points_of_a_box_are_kept_with_it(length):
    references = [posed(n, length=length) for n in range(8)]
    form, same = figure(references, references)
    assert "1 classes, 5 key points an anchor" in form.task.form and same.value == 1
    near = [posed(n, length=length, moved=1.0) for n in range(8)]
    assert figure(references, near)[1].value == 1
    far = [posed(n, length=length, moved=3.0) for n in range(8)]
    assert figure(references, far)[1].value == 0
    hidden = [{"output0": one["output0"].copy()} for one in references]
    for one in hidden:
        last = one["output0"].shape[1] - length  # the point that is not visible
        one["output0"][:, last : last + 2] += 90
    assert figure(references, hidden)[1].value == (1 if length == 3 else 0)
    others = [{"output0": v8(n, classes=1)["output0"]} for n in range(8)]
    assert "key points" not in figure(others, others)[0].task.form


def masked(number, *, maps=3, split=0.0, stride=4, turned=False):
    """YOLO with masks: what is left of a line through a box, of boxes 20 pixels wide."""
    value = v8(number, classes=1)["output0"][0]
    value[2:4] = 20
    weights = np.stack([-np.ones_like(value[0]), (value[0] + split) / 8, -value[1] / 1e4])[:maps]
    columns = np.arange(SIZE[1] // stride) * stride / 8
    ones = np.ones(tuple(side // stride for side in SIZE))
    held = np.stack([ones * columns, ones, ones])[:maps]
    rows = np.concatenate([value, weights])
    return {
        "output0": (rows.T if turned else rows)[None].astype(np.float32),
        "output1": held[None].astype(np.float32),
    }


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_masks_of_a_box_are_kept_with_it(turned, stride):
    how = {"turned": turned, "stride": stride}
    references = [masked(n, **how) for n in range(8)]
    form, same = figure(references, references)
    assert "1 classes, a mask an anchor" in form.task.form and same.value == 1
    near = [masked(n, split=0.1, **how) for n in range(8)]
    assert figure(references, near)[1].value > 0.9
    far = [masked(n, split=7.0, **how) for n in range(8)]
    assert figure(references, far)[1].value < 0.1
    lost = [{**one, "output1": -one["output1"]} for one in references]
    assert figure(references, lost)[1].value == 0
    nothing = [{**one, "output1": one["output1"] * np.nan} for one in references]
    assert figure(references, nothing)[1].value == 0
    cut = [{**one, "output1": one["output1"][:, :2]} for one in references]
    assert figure(references, cut)[1].value == 0


def blaze(number, *, columns=16, lost=0, floor=-4.0):
    """Offsets of boxes and key points from anchors, beside a raw score of each."""
    made = np.random.default_rng(number)
    scores = made.normal(floor, 0.5, (1, 896, 1))
    seen = made.choice(896, 6, replace=False)
    scores[0, seen[lost:]] = 3
    offsets = made.normal(0, 20, (1, 896, columns))
    return {"regressors": np.float32(offsets), "classificators": np.float32(scores)}


def test_boxes_with_key_points_are_matched_by_anchor():
    references = [blaze(n) for n in range(8)]
    form, same = figure(references, references)
    assert "sigmoid of anchors, boxes matched by anchor" in form.task.form and same.value == 1
    _, found = figure(references, [blaze(n, lost=2) for n in range(8)])
    assert found.words.startswith("32 of 48 boxes of FP32 kept, 0 new")
    other = {"columns": 17}, {"floor": 0.0}  # no pairs of places; scores that are sure of much
    for how in other:
        assert same_task([blaze(n, **how) for n in range(8)]) != "boxes"


def turned(number, by=0.0):
    """YOLO with an angle of each box, which is longer than it is high."""
    value = v8(number, classes=2)["output0"][0]
    value[2:4] = [[60], [15]]
    angles = np.random.default_rng(number).uniform(-0.7, 2.2, (1, value.shape[1]))
    return {"output0": np.concatenate([value, angles + by])[None].astype(np.float32)}


def test_a_turned_box_is_kept_where_its_corners_are():
    references = [turned(n) for n in range(8)]
    form, same = figure(references, references)
    assert "2 classes, an angle an anchor" in form.task.form and same.value == 1
    for by, value in ((0.03, 1), (0.2, 0)):  # 10 % of its size is 3 pixels, 0.1 of a radian
        assert figure(references, [turned(n, by) for n in range(8)])[1].value == value
    long = [{"output0": one["output0"].copy()} for one in references]
    for one in long:
        one["output0"][:, -1] *= 40
    assert "angle" not in figure(long, long)[0].task.form


def test_maps_that_are_no_masks_leave_boxes_alone():
    others = [{**masked(n), "output1": np.zeros((1, 3, 5, 5), np.float32)} for n in range(8)]
    form, same = figure(others, others)
    assert "a mask" not in form.task.form and same.value == 1


def split_yolo(number, boxes="rows", scores="rows"):
    """YOLO's boxes and scores in outputs of their own, either turned."""
    value = v8(number)["output0"]
    parts = {"boxes": value[:, :4], "scores": value[:, 4:]}
    lies = {"boxes": boxes, "scores": scores}
    return {n: v if lies[n] == "turned" else v.swapaxes(1, 2) for n, v in parts.items()}


@pytest.mark.parametrize("scores", ["rows", "turned"])
@pytest.mark.parametrize("boxes", ["rows", "turned"])
def test_boxes_and_scores_may_be_turned(boxes, scores):
    references = [split_yolo(n, boxes, scores) for n in range(8)]
    form, same = figure(references, references)
    assert form.task.form == "scores: scores of anchors, boxes by centre"
    assert same.words.startswith("48 of 48 boxes of FP32 kept, 0 new")
    moved = [{**one, "boxes": one["boxes"] + 2} for one in references]  # of boxes 3 wide
    assert figure(references, moved)[1].value == 0
    fewer = [{**one, "scores": one["scores"][..., 1:, 1:]} for one in references]
    assert figure(references, fewer)[1].value == 0  # of another form


def gated(number, raw=False, maps=False, classes=1):
    """Scores, a gate, distances and key points of each level, as of faces."""
    outputs = {}
    for stride in (8, 16, 32):
        made = np.random.default_rng(number * 100 + stride)
        sides = SIZE[0] // stride, SIZE[1] // stride
        count = sides[0] * sides[1]
        seen, which = made.choice(count, 2, replace=False), made.integers(0, classes, 2)
        gate = made.uniform(0.001, 0.01, (1, count, 1))
        scores = made.uniform(0.001, 0.04, (1, count, classes))
        gate[0, seen] = scores[0, seen, which] = 0.9
        level = {"cls": scores, "obj": gate, "bbox": made.uniform(0.5, 4, (1, count, 4))}
        if raw:
            level |= {n: np.log(level[n] / (1 - level[n])) for n in ("cls", "obj")}
        else:
            level["kps"] = made.normal(0, 2, (1, count, 10))
        for name, value in level.items():
            turned = value.transpose(0, 2, 1).reshape(1, -1, *sides)
            outputs[f"{name}_{stride}"] = (turned if maps else value).astype(np.float32)
    return outputs


GATED = [{}, {"classes": 4}, {"raw": True}, {"raw": True, "maps": True, "classes": 4}]


@pytest.mark.parametrize("how", GATED)
def test_an_objectness_of_each_level_multiplies_its_scores(how):
    references = [gated(n, **how) for n in range(4)]
    form, same = figure(references, references)
    assert form.task.form.startswith("cls_8, cls_16, cls_32") and same.value == 1
    assert same.words.startswith("24 of 24 boxes")
    silent = -20 if how.get("raw") else 0
    lost = [{**one, "obj_8": one["obj_8"] * 0 + silent} for one in references]
    assert figure(references, lost)[1].words.startswith("16 of 24 boxes of FP32 kept, 0 new")
    assert (
        figure(references, [{k: v * np.nan for k, v in one.items()} for one in lost])[1].value == 0
    )
    if how.get("maps"):  # of the cells of no stride
        assert same_task(references, [fed((96, 96))] * 4) is None


def queries(number, classes=11):
    made = np.random.default_rng(number)
    value = made.uniform(0.001, 0.02, (1, 300, 4 + classes))
    value[..., :2] = made.uniform(0.2, 0.8, (1, 300, 2))
    value[..., 2:4] = made.uniform(0.1, 0.3, (1, 300, 2))
    value[0, np.arange(7), 4 + made.integers(0, classes, 7)] = 0.8
    return {"y": value.astype(np.float32)}


def distances(number, bins=8):
    """Scores first, then distributions of 1, 2, 1 and 2 strides to each side."""
    _, scores = yolo(number)
    far = np.random.default_rng(number).normal(0, 1, (len(scores), 4, bins))
    far[:, np.arange(4), [1, 2, 1, 2]] = 30
    value = np.concatenate([scores, far.reshape(len(scores), -1)], axis=1)
    return {"y": value[None].astype(np.float32)}


@pytest.mark.parametrize("form", [queries, distances])
def test_scores_and_boxes_side_by_side(form):
    references = [form(n) for n in range(8)]
    read, same = figure(references, references)
    assert read.task.form.endswith("in a row") and same.value == 1
    assert len(read.parts) == 2
    columns = slice(0, 2) if form is queries else slice(5, 37)
    moved = [{"y": one["y"].copy()} for one in references]
    for one in moved:
        one["y"][..., columns] = np.roll(one["y"][..., columns], 1, axis=-1)
    assert figure(references, moved)[1].value < 0.5
    assert figure(references, [{"y": one["y"] * np.nan} for one in references])[1].value == 0
    loud = [{"y": np.clip(one["y"] + 0.2, None, 1)} for one in references]
    assert same_task(loud) is None
    anywhere = [{"y": np.random.default_rng(n).uniform(0, 1, (1, 300, 15))} for n in range(4)]
    assert same_task(anywhere) is None


def test_a_distribution_stands_where_its_cell_is():
    read, _ = figure([distances(n) for n in range(8)], [distances(n) for n in range(8)])
    cells, strides = GRID.cells(SIZE)
    seen = scene(0, classes=5)[0]
    found = read.task.decoder.boxes(fed(), distances(0)).boxes
    sides = np.array([-1, -2, 1, 2])
    wanted = (np.tile(cells[seen] + 0.5, 2) + sides) * strides[seen, None]
    assert all(np.abs(found - one).max(axis=1).min() < 1e-3 for one in wanted)


# ------------------------------------------------------------------ pixels


def smooth(classes, number, side=32):
    """Scores of each class: the one of the nearest of a few places wins."""
    made = np.random.default_rng(number)
    places = made.uniform(0, side, (classes, 2))
    rows, columns = np.mgrid[:side, :side]
    far = (rows - places[:, :1, None]) ** 2 + (columns - places[:, 1:, None]) ** 2
    scores = -far / 20
    return (scores - scores.mean(axis=0))[None].astype(np.float32)


@pytest.mark.parametrize("form", ["raw", "shares", "numbers", "raw last", "shares last"])
def test_classes_of_pixels(form):
    def output(number):
        raw = smooth(5, number)
        if form.endswith("last"):
            value = raw if form == "raw last" else softmax(raw)
            return {"seg": np.moveaxis(value, 1, 3)}
        if form == "raw":
            return {"seg": raw}
        return {"seg": softmax(raw) if form == "shares" else raw.argmax(axis=1)}

    references = [output(n) for n in range(4)]
    inputs = [fed((32, 32))] * 4
    assert figure(references, references, inputs)[1].value == 1
    axis = 2 if form.endswith("last") else -1
    candidates = [{"seg": np.roll(one["seg"], 3, axis=axis)} for one in references]
    task, found = figure(references, candidates, inputs)
    assert task.task.name == "segmentation" and 0.4 < found.value < 0.95
    assert "% of pixels of FP32's class" in found.words


def specks(number, *, side, kinds=3):
    """Shares of classes a pixel: all background but for so many pixels in the middle."""
    raw = np.zeros((1, kinds, 128, 128), np.float32)
    raw[0, -1] = 6
    middle = slice(60 - number, 60 - number + side)
    raw[0, 0, middle, middle] = 12
    return softmax(raw)


def test_a_class_of_few_pixels_counts_where_all_others_are_background():
    references = [{"seg": specks(n, side=3)} for n in range(6)]  # 0.05 % of the pixels
    form, same = figure(references, references, [fed((128, 128))] * 6)
    assert form.task.name == "segmentation" and same.value == 1 and "of 2 classes" in same.words
    silent = [{"seg": specks(n, side=0)} for n in range(6)]
    _, found = figure(references, silent, [fed((128, 128))] * 6)
    assert found.value == pytest.approx(0.5, abs=1e-3)  # all of the class is gone


def test_to_agree_on_nothing_but_background_is_no_figure():
    references = [{"seg": specks(n, side=0)} for n in range(4)]
    form, found = figure(references, references, [fed((128, 128))] * 4)
    assert form.task.name == "segmentation" and found is None


@pytest.mark.parametrize(("side", "task"), [(0, "masks"), (9, "segmentation")])
def test_a_map_of_kinds_that_is_all_background_leaves_the_task_to_other_outputs(side, task):
    def output(number):
        seen = np.zeros((1, 1, 128, 128), np.float32)
        seen[..., 40 + number : 60, 40:60] = 0.9
        return {"kinds": specks(number, side=side), "seen": seen}

    assert same_task([output(n) for n in range(4)], [fed((128, 128))] * 4) == task


def test_feature_maps_pictures_and_small_maps_are_not_segmented():
    made = rng()
    inputs = [fed((64, 64))] * 4
    noise = [{"f": made.standard_normal((1, 8, 64, 64)) * 4} for _ in range(4)]
    assert same_task(noise, inputs) is None
    picture = [{"f": smooth(3, n, 64) / 200 + 0.5} for n in range(4)]
    assert same_task(picture, inputs) is None
    assert same_task([{"f": smooth(8, n, 64)} for n in range(4)], [fed((512, 512))] * 4) is None


def waves(channels, number, side=64):
    """Channels that change smoothly from place to place, each for itself."""
    made = np.random.default_rng(number)
    rows, columns = np.mgrid[:side, :side] / side
    turn = made.uniform(2, 6, (channels, 3, 1, 1))
    values = np.sin(turn[:, 0] * rows + turn[:, 1] * columns + 6 * turn[:, 2])
    return values[None].astype(np.float32)


def test_smooth_channels_that_change_each_for_itself_are_no_classes():
    inputs = [fed((64, 64))] * 4
    for channels in (2, 3):  # an optical flow; the colours of a picture of no brightness
        assert same_task([{"y": 9 * waves(channels, n)} for n in range(4)], inputs) is None
    grey = [waves(1, n) * 2 + waves(3, n + 9) / 2 for n in range(4)]
    assert same_task([{"y": one} for one in grey], inputs) is None  # a picture about its mean
    none = [{"y": smooth(3, n, 64) - 40} for n in range(4)]
    assert same_task(none, inputs) is None  # nothing is above 0 anywhere: no class of a Softmax
    assert same_task([{"y": smooth(3, n, 64)} for n in range(4)], inputs) == "segmentation"


def test_pages_made_sharper_and_small_disparities_are_no_masks():
    def page(number):
        value = np.full((1, 3, 64, 64), 0.97, np.float32)
        for row, column in np.random.default_rng(number).integers(0, 50, (30, 2)):
            value[:, :, row : row + 3, column : column + 9] = 0.04
        return value

    pages = [page(n) for n in range(4)]
    noise = np.random.default_rng(1).normal(0, 0.1, (4, 1, 3, 64, 64))
    blurred = [{"x": one + own} for one, own in zip(pages, noise, strict=True)]
    assert same_task([{"y": one} for one in pages], blurred) is None
    assert same_task([{"y": one} for one in pages], [fed((64, 64))] * 4) == "masks"
    far = [{"y": 0.05 + waves(1, n) / 20} for n in range(4)]
    assert same_task(far, [fed((64, 64))] * 4) is None


@pytest.mark.parametrize("last", [False, True])
def test_masks_are_judged_by_iou(last):
    def mask(left):
        value = np.full((1, 1, 64, 64), 0.02, np.float32)
        value[..., 10:30, left : left + 20] = 0.97
        return {"m": np.moveaxis(value, 1, 3) if last else value}

    inputs = [fed((64, 64))] * 4
    form, found = figure([mask(10)] * 4, [mask(20)] * 4, inputs)
    assert form.task.name == "masks" and found.value == pytest.approx(1 / 3)
    assert found.words == "IoU 0.333 of the pixels above 0.5"
    depth = [{"m": rng().uniform(0, 1, (1, 1, 64, 64))}] * 4
    assert same_task(depth, inputs) is None
    stages = [{**mask(10), "s": mask(20)["m"]}] * 4  # each stage has one, which all are judged
    form, found = figure(stages, [{**mask(10), "s": mask(30)["m"]}] * 4, inputs)
    assert form.task.form == "m, s: maps of 0 to 1" and found.value == pytest.approx(6 / 10)
    halved = [{**one, "s": one["s"][:, :, ::2, ::2]} for one in stages]
    assert same_task(halved, inputs) is None


def shaded(*shares, side=(64, 64), channels=1, last=False):
    """A map [1, C, H, W] whose values are (value, share of the pixels), ... in order."""
    height, width = side
    ends = np.round(np.cumsum([0, *(share for _, share in shares)]) * height * width).astype(int)
    flat = np.concatenate(
        [np.full(b - a, v) for (v, _), a, b in zip(shares, ends, ends[1:], strict=False)]
    )
    value = np.broadcast_to(np.float32(flat).reshape(1, 1, *side), (1, channels, *side))
    return {"m": np.moveaxis(value, 1, 3) if last else value}


MASK = (0.95, 0.3), (0.05, 0.7)


@pytest.mark.parametrize(
    ("output", "masks"),
    [
        (shaded(*MASK), True), (shaded(*MASK, channels=4), True),
        (shaded(*MASK, channels=5), False), (shaded(*MASK, channels=4, last=True), True),
        (shaded(*MASK, side=(16, 16)), True), (shaded(*MASK, side=(15, 16)), False),
        (shaded(*MASK, side=(16, 15)), False), (shaded(*MASK, side=(65, 64)), False),
        (shaded((0.95, 0.3), (0.5, 0.24), (0.05, 0.46)), True),
        (shaded((0.95, 0.3), (0.5, 0.26), (0.05, 0.44)), False),
        (shaded((0.95, 0.3), (0.11, 0.3), (0.05, 0.4)), False),
        (shaded((0.95, 0.3), (0.89, 0.3), (0.05, 0.4)), False),
        (shaded((0.31, 0.1), (0.05, 0.9)), True), (shaded((0.29, 0.1), (0.05, 0.9)), False),
        (shaded((1.14, 0.3), (-0.14, 0.7)), True), (shaded((1.16, 0.3), (0.05, 0.7)), False),
        (shaded((0.95, 0.3), (-0.16, 0.7)), False),
    ],
)  # fmt: skip
def test_a_mask_is_near_0_or_1_and_of_the_pictures_size(output, masks):
    assert (same_task([output] * 2, [fed((64, 64))] * 2) == "masks") == masks


@pytest.mark.parametrize(
    ("output", "side", "masks"),
    [
        (shaded(*MASK, side=(16, 16)), (128, 128), True),  # an eighth of the picture
        (shaded(*MASK, side=(16, 16)), (129, 128), False),
    ],
)
def test_a_mask_is_not_much_smaller_than_the_picture(output, side, masks):
    assert (same_task([output] * 2, [fed(side)] * 2) == "masks") == masks


@pytest.mark.parametrize(
    ("share", "value", "said"),
    [
        (0.003, 0.6, "0.5"), (0.0015, 0.6, "0.3"), (0.003, 0.4, "0.3"), (0.0008, 0.4, "0.1"),
        (0.003, 0.2, "0.1"), (0.0004, 0.2, None), (0.003, 0.09, None),
    ],
)  # fmt: skip
def test_masks_are_compared_above_the_highest_threshold_with_pixels_enough(share, value, said):
    tally = Masks(("m",)).tally()
    seen = shaded((value, share), (0.0, 1 - share), side=(100, 100))
    tally.add({}, seen, seen)
    found = tally.result()
    assert (found and found.words) == (said and f"IoU 1.000 of the pixels above {said}")


@pytest.mark.parametrize(
    ("shape", "least", "most", "task"),
    [
        ((1, 16, 64), 0, 1, "segmentation"),
        ((1, 15, 64), 0, 1, None),
        ((1, 64, 65), 0, 1, None),
        ((1, 1, 64, 64), 0, 1, "segmentation"),
        ((1, 64, 64), -1, 1, None),
        ((1, 64, 64), 0, 0, None),
        ((1, 64, 64), 0, 1023, "segmentation"),
        ((1, 64, 64), 0, 1024, None),
    ],
)
def test_pictures_of_class_numbers_are_segmentation(shape, least, most, task):
    numbers = np.full(shape, least, np.int64)
    numbers[..., :8] = most
    assert same_task([{"y": numbers}] * 2, [fed((64, 64))] * 2) == task


def test_peaks_of_heat_maps_within_a_pixel():
    rows, columns = np.mgrid[:48, :64]

    def maps(places):
        far = [(rows - r) ** 2 + (columns - c) ** 2 for r, c in places]
        return {"heat": np.exp(-np.array(far) / 8)[None].astype(np.float32)}

    places = np.random.default_rng(2).integers(5, 40, (17, 2))
    moved = places.copy()
    moved[:3, 1] += 1
    moved[3:5, 1] += 4
    form, found = figure([maps(places)] * 4, [maps(moved)] * 4)
    assert form.task.name == "heat maps"
    assert found.words == "60 of 68 peaks of FP32 within a pixel"


def peaked(*, channels=4, side=16, peak=0.9, pixels=12, rest=0.0):
    """Maps [1, K, H, W], each with so many pixels of one height."""
    maps = np.full((1, channels, side * side), rest, np.float32)
    maps[..., 40 : 40 + pixels] = peak
    return {"heat": maps.reshape(1, channels, side, side)}


@pytest.mark.parametrize(
    ("how", "heat"),
    [
        ({}, True), ({"channels": 3}, False), ({"side": 15}, False), ({"pixels": 13}, False),
        ({"peak": 0.21}, True), ({"peak": 0.2}, False), ({"peak": 1.5}, True),
        ({"peak": 1.51}, False), ({"rest": -0.29}, True), ({"rest": -0.31}, False),
        ({"rest": 0.44}, True), ({"rest": 0.46}, False), ({"peak": np.nan}, False),
    ],
)  # fmt: skip
def test_a_heat_map_is_low_but_for_a_narrow_peak(how, heat):
    assert (same_task([peaked(**how)] * 2) == "heat maps") == heat


@pytest.mark.parametrize(("lower", "heat"), [(1, True), (2, False)])
def test_most_heat_maps_have_their_peak(lower, heat):
    maps = peaked(pixels=1)
    maps["heat"][:, :lower] = 0.1
    assert (same_task([maps] * 2) == "heat maps") == heat
    tally = HeatMaps("heat", 4).tally()
    tally.add({}, maps, {"heat": np.roll(maps["heat"], (1, 1), axis=(2, 3))})
    tally.add({}, maps, {"heat": np.roll(maps["heat"], 2, axis=2)})
    assert tally.result().count == f"{4 - lower} of {2 * (4 - lower)}"


# ------------------------------------------------------------------ text


def steps(text, blank=0, symbols=30, raw=False, turned=False):
    """A symbol, a blank, a symbol, ..."""
    best = [symbol for one in text for symbol in (one, one, blank)]
    scores = rng().standard_normal((len(best), symbols))
    scores[np.arange(len(best)), best] = 12
    value = scores if raw else softmax(scores)
    return {"y": (value[:, None] if turned else value[None]).astype(np.float32)}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("blank", [0, 29])
def test_texts_are_decoded_and_edits_counted(raw, turned, blank):
    how = {"raw": raw, "turned": turned, "blank": blank}
    texts = [[3, 3, 4, 5], [7, 8, 9, 7], [4, 4], [5, 6, 7, 8]]
    read = [[3, 3, 4, 5], [7, 8, 7, 7], [4, 5], [5, 6, 7, 8]]
    references = [steps(text, **how) for text in texts]
    candidates = [steps(text, **how) for text in read]
    form, found = figure(references, candidates)
    assert form.task.name == "text" and form.task.blank == blank
    assert found.value == 0.5 and found.words == "2 of 4 texts as FP32's, 2 edits in 14 symbols"


@pytest.mark.parametrize(
    ("best", "symbols", "fed_with", "text"),
    [
        ([0, 1, 0, 2], 11, 0, True), ([0, 1, 0, 2], 10, 0, False), ([0, 1, 0, 1], 11, 0, True),
        ([0, 1, 0], 11, 0, False), ([0, 0, 0, 0], 11, 0, False),
        ([0, 1, 0, 2], 11, 3, True), ([0, 1, 0, 2], 11, 4, False),  # as of tokens
        ([1, 0, 0, 2], 11, 0, True), ([1, 5, 5, 2], 11, 0, False),  # the blank is first or last
        ([0, 0, *range(1, 9), 0, 0, *range(9, 17)], 30, 0, True),  # a fifth is blank
        ([0, 0, *range(1, 9), 0, 0, *range(9, 18)], 30, 0, False),
        ([0, *range(1, 17), 0, 0, 0, 0], 30, 0, True),  # 16 steps between two blanks
        ([0, *range(1, 18), 0, 0, 0, 0], 30, 0, False),
    ],
)  # fmt: skip
def test_a_text_is_known_by_its_steps_symbols_and_blanks(best, symbols, fed_with, text):
    outputs = {"y": softmax(framed(best, symbols))[None]}
    fed_too = {"tokens": np.zeros((1, fed_with), np.int64)} if fed_with else fed()
    assert (same_task([outputs], [fed_too]) == "text") == text


def test_slots_of_a_number_plate_keep_their_repeats():
    def plate(*best):
        scores = rng().standard_normal((9, 37))
        scores[np.arange(9), [*best, *[36] * (9 - len(best))]] = 12
        return {"y": softmax(scores)[None].astype(np.float32)}

    references = [plate(1, 1, 5, 5, 30), plate(4, 4, 4, 4, 8, 9), plate(7, 2, 3, 30), plate(3, 3)]
    form, same = figure(references, references)
    assert form.task.form == "y: text of 36 symbols, blank 36, one a slot" and same.value == 1
    fewer = [plate(1, 5, 5, 30), *references[1:]]  # one 1 of two is lost
    assert figure(references, fewer)[1].words == "3 of 4 texts as FP32's, 1 edits in 17 symbols"


def test_edit_distance_by_hand():
    assert edit_distance([1, 2, 3], []) == 3
    assert edit_distance([1, 2, 3, 4], [2, 3, 5, 4]) == 2


# ------------------------------------------------------------------ steps


def framed(best, classes=6, made=None, sure=9):
    """Raw scores [T, C] of the classes of steps, about 0 in each of them."""
    made = rng() if made is None else made
    scores = made.standard_normal((len(best), classes))
    scores[np.arange(len(best)), best] += sure
    return scores - scores.mean(axis=1, keepdims=True)


def spoken(number, classes, steps=60):
    """Silence, class 0, for more than half of the time, and something else in one go."""
    made = np.random.default_rng(number)
    best = np.zeros(steps, int)
    best[10:35] = made.integers(1, classes, 25)
    return best


STEPS = {
    "shares": lambda scores: softmax(scores)[None],
    "logarithms": lambda scores: np.log(softmax(scores))[None],
    "raw": lambda scores: scores[None],
    "turned": lambda scores: softmax(scores).T[None],
    "raw turned": lambda scores: scores.T[None],
    "steps first": lambda scores: softmax(scores)[:, None],
}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("classes", [2, 6, 248])
def test_classes_of_steps_are_counted_and_the_worst_sample_told(how, classes):
    best = [spoken(n, classes) for n in range(4)]
    lost = [one.copy() for one in best]
    lost[1][10:22] = 0  # silence in the place of what was said
    references, candidates = (
        [{"y": STEPS[how](framed(one, classes)).astype(np.float32)} for one in texts]
        for texts in (best, lost)
    )
    form, found = figure(references, candidates, [{"sound": np.zeros((1, 60, 80))}] * 4)
    assert form.task.form == f"y: {classes} classes a step"
    assert found.task == "steps" and found.figure == "steps alike"
    assert found.value == 228 / 240 and found.count == "228 of 240"
    assert found.words == "228 of 240 steps of FP32's class, 80.0 % in the worst sample"
    broken = [{"y": one["y"] * np.nan} for one in references]
    assert figure(references, broken)[1].value == 0
    assert figure(references, [{"y": one["y"][..., :1]} for one in references])[1].value == 0


def test_a_candidate_that_hears_silence_alone_does_not_pass_for_good():
    best = [np.repeat([0, 2, 1, 0], [57, 2, 1, 0]) for _ in range(4)]
    references = [{"y": softmax(framed(one))[None]} for one in best]
    silent = [{"y": softmax(framed(one * 0))[None]} for one in best]
    _, found = figure(references, silent)
    assert found.value == 0 and found.figure == "steps alike but the usual"
    assert found.words.startswith("228 of 240 steps of FP32's class, 0 of 12 of those that are not")
    assert figure(references, references)[1].value == 1
    assert figure(silent, references)[1] is None  # nothing to be compared with


@pytest.mark.parametrize("classes", [12, 248])
def test_long_stretches_without_the_first_class_are_no_text(classes):
    short = [{"y": softmax(framed([0, 0, 3, 0, 0, 4, 4, 0] * 7, classes))[None]}] * 4
    assert same_task(short) == "text"
    long = [{"y": softmax(framed(spoken(n, classes), classes))[None]} for n in range(4)]
    assert same_task(long) == "steps"


def test_a_class_for_each_token_that_was_fed_is_no_text():
    tags = [{"y": softmax(framed([0, 0, 3, 0, 0, 4, 4, 0], 17))[None]}] * 4
    assert same_task(tags) == "text"
    words = [{"ids": np.arange(8)[None], "mask": np.ones((1, 8), np.int64)}] * 4
    assert same_task(tags, words) == "steps"
    letters = [{"letters": np.ones((1, 8, 5), np.int32)}] * 4
    assert same_task(tags, letters) == "steps"
    pieces = [{"ids": np.arange(11)[None]}] * 4  # some words are two tokens
    assert same_task(tags, pieces) == "steps"
    vectors = [{"vectors": np.ones((1, 8, 50), np.float32)}] * 4
    assert same_task(tags, vectors) == "steps"
    spoken_of = [{"sound": np.zeros((1, 80, 8)), "length": np.array([80])}] * 4
    assert same_task(tags, spoken_of) == "text"


def test_what_is_carried_to_the_next_call_is_no_reason_against_steps():
    def output(number, **others):
        return {"y": softmax(framed(spoken(number, 6)))[None], **others}

    state = rng().standard_normal((1, 128, 19, 1))
    assert same_task([output(n, state=state) for n in range(4)]) == "steps"
    places = rng().standard_normal((1, 60, 4))  # of what is found at each of them
    assert same_task([output(n, places=places) for n in range(4)]) is None


@pytest.mark.parametrize("shape", [(1, 50), (1, 50, 1), (1, 1, 50), (50,), (1, 25, 2)])
def test_probabilities_are_compared_by_their_side_of_a_half(shape):
    made = rng()

    def output(lost=0):
        value = np.where(np.arange(50) % 50 < 20, 0.97, 0.02) + made.uniform(-0.01, 0.01, 50)
        value[:lost] = 0.4
        return {"y": value.reshape(shape).astype(np.float32)}

    sound = [{"sound": np.zeros((1, 800), np.float32)}] * 4
    references = [output() for _ in range(4)]
    form, found = figure(references, [output(5), *references[1:]], sound)
    assert "probabilities" in form.task.form
    assert found.words == (
        "195 of 200 probabilities on FP32's side of 0.5, 90.0 % in the worst sample"
    )


def test_one_probability_a_sample_is_on_a_side_of_a_half():
    sound = [{"sound": np.zeros((1, 800), np.float32)}] * 16
    said = [{"y": np.array([[0.97 if n % 4 == 1 else 0.02]])} for n in range(16)]
    for inputs in (None, sound):  # a wake word's, or whether a picture is upside down
        form, same = figure(said, said, inputs)
        assert form.task.name == "steps" and same.value == 1
        quiet = [{"y": one["y"] * (0.5 if n == 1 else 1)} for n, one in enumerate(said)]
        _, found = figure(said, quiet, inputs)
        assert found.words == "15 of 16 probabilities on FP32's side of 0.5"
        assert figure(said, [{"y": one["y"] * np.nan} for one in said], inputs)[1].value == 0
    state = rng().normal(size=(2, 1, 16))  # is fed to the next call
    calls = [{"sound": np.zeros((1, 512)), "state": state}] * 4
    heard = [{**one, "state_n": state} for one in said[:4]]
    assert same_task(heard, calls) == "steps"
    assert same_task(heard) is None  # a probability and what it is about, maybe
    assert same_task([{"y": np.array([[0.02]])}] * 4) is None  # always near 0: a small number
    assert same_task([{"y": np.array([[0.2 * n]])} for n in range(4)]) is None


def sounding(number, keys, on=0.02, steps=60):
    """Probabilities of notes, which rest at 0.05 to 0.25."""
    made = np.random.default_rng(number)
    rest = made.uniform(0.05, 0.25, (1, steps, keys))
    return np.where(made.uniform(size=rest.shape) < on, 0.8, rest).astype(np.float32)


def test_notes_and_their_beginnings_are_decisions_of_steps():
    sound = [{"sound": np.zeros((1, 800, 1), np.float32)}] * 4

    def output(number):
        return {"notes": sounding(number, 40), "onsets": sounding(number + 9, 40, 0.01)}

    references = [output(n) for n in range(4)]
    form, same = figure(references, references, sound)
    assert form.task.form.startswith("notes, onsets: probabilities") and same.value == 1
    on = sum(int((value > 0.5).sum()) for one in references for value in one.values())
    lost = [{**one, "onsets": one["onsets"] * 0.6} for one in references]
    _, found = figure(references, lost, sound)
    kept = sum(int((one["notes"] > 0.5).sum()) for one in references)
    assert found.figure == "steps alike but the usual" and found.count == f"{kept} of {on}"
    shorter = [{**one, "onsets": one["onsets"][:, :50]} for one in references]
    assert figure(references, shorter, sound)[1].value < 0.8
    assert same_task(shorter, sound) is None
    assert same_task(references) is None  # of pictures: maps
    assert same_task([{k: v + 0.2 for k, v in one.items()} for one in references], sound) is None


def test_several_outputs_may_each_have_a_class_for_a_letter():
    """The vowel, the dot and the accent of each letter, by a model that adds them to a text."""
    kinds = {"vowel": 16, "dot": 3, "accent": 4}

    def output(number, lost=0):
        made = np.random.default_rng(number)
        best = {name: made.integers(0, count, 30) for name, count in kinds.items()}
        best["dot"] = np.where(made.uniform(size=30) < 0.9, 1, 2)
        other = {name: np.where(np.arange(30) < lost, 0, own) for name, own in best.items()}
        return {
            name: framed(own, kinds[name], made)[None].astype(np.float32)
            for name, own in other.items()
        }

    letters = [{"letters": np.ones((1, 30), np.float32)}] * 4
    references = [output(n) for n in range(4)]
    form, same = figure(references, references, letters)
    assert form.task.form == "vowel, dot, accent: 16, 3, 4 classes a step" and same.value == 1
    lost = [{**references[0], "dot": output(0, lost=6)["dot"]}, *references[1:]]
    _, found = figure(references, lost, letters)
    assert found.count == "354 of 360"
    assert found.words == "354 of 360 steps of FP32's class, 93.3 % in the worst sample"
    rare = [{**one, "vowel": one["dot"], "accent": one["dot"]} for one in references]
    _, few = figure(rare, rare, letters)
    assert few.figure == "steps alike but the usual" and few.value == 1
    broken = [{**one, "dot": one["dot"] * np.nan} for one in references]
    assert figure(references, broken, letters)[1].count == "240 of 360"
    assert same_task([{**one, "size": one["dot"][..., :1]} for one in references], letters) is None
    shorter = [{**one, "dot": one["dot"][:, :20]} for one in references]
    assert same_task(shorter, letters) is None  # not of the same letters
    vectors = [{**one, "size": rng().standard_normal((1, 30, 8))} for one in references]
    assert same_task(vectors, letters) is None  # features, or a regression of each


@pytest.mark.parametrize(
    ("fed_shape", "task"),
    [((1, 40), "steps"), ((1, 40, 80), "steps"), ((1, 3, 64, 64), "boxes")],
)
def test_scores_of_four_marks_and_of_two_cases_are_boxes_of_pictures_alone(fed_shape, task):
    def output(number):
        made = np.random.default_rng(number)
        marks = framed(made.choice(4, 40, p=[0.7, 0.1, 0.1, 0.1]), 4, made, sure=3)
        case = framed(np.where(np.arange(40) == number, 1, 0), 2, made)
        return {"marks": marks[None].astype(np.float32), "case": case[None].astype(np.float32)}

    outputs = [output(n) for n in range(4)]
    assert same_task(outputs, [{"x": np.ones(fed_shape, np.float32)}] * 4) == task


@pytest.mark.parametrize("shape", [(1, 50), (1, 50, 1), (50,), (1, 12)])
def test_raw_scores_of_steps_are_compared_by_their_sign(shape):
    sound = [{"sound": np.zeros((1, 800), np.float32)}] * 4
    count, made = int(np.prod(shape)), rng()

    def output(lost=0):
        value = np.where(np.arange(count) < 5, 4.0, -6.0) + made.normal(0, 0.5, count)
        value[:lost] = -3
        return {"y": value.reshape(shape).astype(np.float32)}

    references = [output() for _ in range(4)]
    form, found = figure(references, [output(5), *references[1:]], sound)
    assert form.task.form == "y: raw scores of steps or labels, each its own"
    assert f"{4 * count - 5} of {4 * count} scores on FP32's side of 0" in found.words
    weather = [{"y": 15 * np.sin(np.arange(96) / 8 + n)[None]} for n in range(4)]
    assert same_task(weather, sound) is None  # as many degrees above 0 as below


def test_features_pictures_and_regressions_are_no_steps():
    made = rng()

    def task(make, inputs=None):
        return same_task([{"y": make().astype(np.float32)} for _ in range(4)], inputs)

    outlier = np.zeros(384)
    outlier[7] = 40
    sound = [{"sound": np.zeros((1, 800), np.float32)}] * 4
    for inputs in (None, sound):
        assert task(lambda: made.standard_normal((1, 40, 384)), inputs) is None
        assert task(lambda: made.standard_normal((1, 40, 384)) + outlier, inputs) is None
        assert task(lambda: made.standard_normal((1, 40, 12)) * 2, inputs) is None
        assert task(lambda: made.standard_normal((1, 17, 2)) * 50, inputs) is None  # places
        assert task(lambda: made.standard_normal((1, 24, 3)) * 50, inputs) is None
        assert task(lambda: np.cumsum(made.standard_normal((1, 400, 2)), 1), inputs) is None
        assert task(lambda: made.uniform(-80, 10, (1, 100, 80)), inputs) is None  # decibels
        loud = made.uniform(0.1, 9, (1, 1, 100))
        assert task(lambda loud=loud: loud * made.exponential(1, (1, 257, 100)) ** 4) is None
        assert task(lambda loud=loud: loud * made.normal(size=(1, 257, 100)) ** 3) is None
        assert task(lambda: made.uniform(0, 1, (1, 50)), inputs) is None
    picture = np.zeros((1, 64, 64))
    picture[:, 10:30] = 1
    assert task(lambda: picture, [fed((64, 64))] * 4) is None


# ------------------------------------------------------------------ whatever comes


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
    return [{f"o{n}": one(*pair) for n, pair in enumerate(pairs)} for _ in range(5)]


FORMS = {
    "levels": gated,
    "maps": lambda n: gated(n, raw=True, maps=True, classes=4),
    "split": split_yolo,
    "turned": lambda n: split_yolo(n, "turned", "turned"),
    "posed": posed,
    "queries": queries,
    "text": lambda n: steps([3, 3, 4, 5 + n]),
    "steps": lambda n: {"y": softmax(framed(spoken(n, 6)))[None]},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_candidate_of_other_shapes_keeps_nothing(form):
    references = [FORMS[form](n) for n in range(4)]
    for cut in (np.s_[:, :0], np.s_[..., :0], np.s_[:0], np.s_[:, 1:, 1:]):
        others = [{name: value[cut] for name, value in one.items()} for one in references]
        assert figure(references, others)[1].value == 0


@pytest.mark.parametrize("seed", range(4))
def test_no_outputs_make_it_fail(seed):
    made = np.random.default_rng(seed)
    for _ in range(100):
        references = anything(made)
        form = form_of(references, inputs=[fed((64, 64))] * 5)
        if form.task is None:
            continue
        tally = form.task.tally()
        for one in references:
            other = {
                name: value * np.nan
                if made.random() < 0.2
                else value[..., :1]
                if value.ndim
                else value
                for name, value in one.items()
            }
            tally.add(fed((64, 64)), one, other)
        found = tally.result()
        assert found is None or 0 <= found.value <= 1 or found.task == "embeddings"


def test_shares_are_classes_of_steps_and_no_raw_boxes():
    made = rng()
    value = softmax(made.standard_normal((GRID.count(SIZE), 9)) * 4)
    assert same_task([{"y": value[None]}] * 4) == "steps"
