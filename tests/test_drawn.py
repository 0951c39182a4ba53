"""Samples where FP32 and an engine differ: which are kept, and how the page draws them."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from deploy.feed.preview import Looks
from deploy.metrics.tasks.boxes import Boxes
from deploy.metrics.tasks.classes import Classes
from deploy.metrics.tasks.detections import Detections, in_pixels
from deploy.metrics.tasks.task import MOST, ClassExample, Foremost
from deploy.report import EngineRow, Report, to_html, to_json, to_markdown
from deploy.report.previews import box_rows

HOSTILE = "<script>alert('x')</script>&\"\udcff"


class Rows:
    """A decoder of outputs that are boxes already: [n, 6] of corners, score, class."""

    form, parts, placed, classes = "rows", {}, True, 3

    def boxes(self, inputs, outputs):
        rows = np.asarray(outputs["y"], np.float64)
        return Detections.of(rows[:, :4], rows[:, 4], rows[:, 5].astype(np.int64))


def row(at, score=0.9, kind=0):
    return [at, 10, at + 8, 18, score, kind]


def scene(*rows):
    return {"y": np.array(rows, np.float64).reshape(-1, 6)}


FED = {"x": np.zeros((1, 3, 32, 320), np.float32)}


def tallied(pairs):
    tally = Boxes(Rows()).tally()
    for left, right in pairs:
        tally.add(FED, left, right)
    return tally


def test_boxes_that_are_drawn_are_those_that_are_counted():
    full = scene(*(row(10 * n) for n in range(8)))
    pairs = [
        (full, scene(*(row(10 * n) for n in range(5)))),  # 3 lost
        (full, full),
        (full, scene(*(row(10 * n) for n in range(8)), row(100), row(120))),  # 2 new
        (full, scene(*(row(10 * n, kind=1) for n in range(8)))),  # all of another class
    ]
    tally = tallied(pairs)
    figure, shown = tally.result(), tally.shown()
    assert [one.number for one in shown] == [3, 0, 2, 1]  # what differs most first
    kept = sum(len(one.kept.scores) for one in shown)
    new = sum(len(one.new.scores) for one in shown)
    lost = sum(len(one.lost.scores) for one in shown)
    assert (
        figure.words == f"{kept} of {kept + lost} boxes of FP32 kept, {new} new (score above 0.25)"
    )
    assert all(len(one.kept.scores) == len(one.found.scores) for one in shown)
    np.testing.assert_allclose(shown[1].lost.boxes[:, 0], [50, 60, 70])


def test_one_that_agrees_is_among_those_shown_where_there_is_one():
    full = scene(*(row(10 * n) for n in range(8)))
    worse = [(full, scene(*(row(10 * n) for n in range(8 - lost)))) for lost in range(1, 7)]
    shown = tallied([(full, full), *worse]).shown()
    assert [one.number for one in shown] == [6, 5, 4, 0] and len(shown) == MOST
    assert [one.number for one in tallied(worse).shown()] == [5, 4, 3, 2]


@pytest.mark.parametrize(
    ("score", "count", "threshold"),
    [
        (0.26, 20, 0.25), (0.26, 19, 0.15), (0.24, 20, 0.15), (0.16, 5, 0.15), (0.16, 4, None),
        (0.14, 5, 0.05), (0.06, 5, 0.05), (0.06, 4, None), (0.04, 20, None),
    ],
)  # fmt: skip
def test_the_threshold_is_the_highest_with_enough_boxes(score, count, threshold):
    seen = scene(*(row(10 * n, score=score) for n in range(count)))
    assert tallied([(seen, seen)]).threshold == threshold


def test_samples_are_told_at_the_threshold_of_the_figure():
    faint = scene(*(row(10 * n, score=0.2) for n in range(6)))
    tally = tallied([(faint, scene(row(0, score=0.2)))])
    assert tally.threshold == 0.15 and tally.shown()[0].threshold == 0.15
    assert tallied([(scene(), scene())]).shown() == ()


def test_few_samples_are_kept_of_many():
    full = scene(*(row(10 * n) for n in range(8)))
    tally = tallied([(full, scene(*(row(10 * n) for n in range(k % 8)))) for k in range(200)])
    assert len(tally.watched) <= 2 * MOST * 3
    assert {one.number for one in tally.shown()} <= tally.watched


def test_boxes_in_shares_of_the_picture_become_pixels():
    found = Detections(np.array([[0.1, 0.5, 0.2, 1.0]]), np.ones(1), np.zeros(1, np.int64))
    np.testing.assert_allclose(in_pixels(found, (32, 320)).boxes, [[32, 16, 64, 32]])


def test_classes_that_change_are_kept_the_surest_first():
    tally = Classes(("logits",), (3,)).tally()
    for own, other in ((5.0, 6.0), (9.0, 2.0), (3.0, 8.0)):
        tally.add({}, {"logits": np.array([[own, 1, 0]])}, {"logits": np.array([[1, other, 0]])})
    tally.add({}, {"logits": np.array([[5.0, 1, 0]])}, {"logits": np.array([[5.0, 1, 0]])})
    assert [(one.number, one.reference, one.candidate) for one in tally.shown()] == [
        (1, (0, 9.0), (1, 2.0)), (0, (0, 5.0), (1, 6.0)), (2, (0, 3.0), (1, 8.0)),
    ]  # fmt: skip
    assert tally.watched == {0, 1, 2}


def test_order_of_equals_is_that_of_the_samples():
    kept = Foremost()
    for number in (3, 1, 2, 0, 4):
        example = ClassExample(number=number, output="y", reference=(0, 1.0), candidate=(1, 1.0))
        kept.offer(example, differs=1.0, says=0)
    assert [one.number for one in kept.result()] == [0, 1, 2, 3]


class Feed:
    names = [f"{number}.png" for number in range(100)]  # noqa: RUF012

    def picture(self, sample):
        return np.full((600, 300, 3), sample["x"].flat[0], np.uint8)


def test_pictures_are_kept_only_while_somebody_watches_them():
    looks = Looks(Feed())
    for start in range(0, 20, 2):  # batches of two
        batch = {"x": np.array([start, start + 1], np.float32).reshape(2, 1, 1, 1)}
        looks.add(batch, {0, start + 1})
        assert len(looks) <= 2
    found = looks.of([0, 19, 5, 77])
    assert list(found) == [0, 19] and found[19][0] == "19.png"
    assert found[19][1].shape == (256, 128, 3) and (found[19][1] == 19).all()


def boxes(name="a.png", number=0):
    full = scene(*(row(10 * n) for n in range(8)))
    (example,) = tallied([(full, scene(*(row(10 * n) for n in range(1, 8)), row(200)))]).shown()
    picture = np.zeros((32, 320, 3), np.uint8)
    return box_rows([example], {number: (name, picture)})


def test_the_page_draws_what_was_kept_lost_and_new_as_vectors():
    page = to_html(Report(engines=(EngineRow(label="int8", boxes=boxes()),)))
    left, right = re.findall(r'<svg class="boxes".*?</svg>', page)
    assert left.count('<rect class="kept"') == right.count('<rect class="kept"') == 7
    assert left.count('<rect class="lost"') == 1 and right.count('<rect class="new"') == 1
    assert 'class="new"' not in left and 'class="lost"' not in right
    assert left.count(">0 0.90</text>") == 8 and "7 of 8 boxes kept, 1 new" in page
    assert page.count("data:image/") == 1 and '<use href="#look-0"/>' in right


def test_a_picture_stands_once_for_several_engines():
    engines = tuple(EngineRow(label=label, boxes=boxes()) for label in ("a", "b"))
    page = to_html(Report(engines=engines))
    assert page.count("data:image/") == 1 and page.count('<use href="#look-0"/>') == 3
    assert page.count('id="look-0"') == 1


def test_names_and_labels_are_escaped_and_json_has_counts_alone():
    report = Report(engines=(EngineRow(label=HOSTILE, boxes=boxes(HOSTILE)),))
    page = to_html(report)
    assert "<script>alert" not in page
    told = to_json(report)["engines"][0]["boxes"]
    assert told[0]["kept"] == 7 and told[0]["lost"] == 1 and told[0]["new"] == 1
    assert "data:" not in json.dumps(told) and "data:" not in to_markdown(report)


def test_of_very_many_boxes_the_best_are_drawn_and_it_is_said():
    (own,) = boxes()
    drawn = replace(own.boxes, kept=own.boxes.kept * 20, found=own.boxes.found * 20)
    many = replace(own, kept=len(drawn.kept), boxes=drawn)
    page = to_html(Report(engines=(EngineRow(label="int8", boxes=(many,)),)))
    assert page.count('<rect class="kept"') == 200 and "the best 100" in page


def test_a_build_of_a_detector_draws_its_boxes(run, detector, pictures, tmp_path):
    words = ("build", detector, "--images", pictures, "--duration", 0, "--effort", 0)
    code, _, error = run(*words, "--target", "onnxruntime,ascend", "--out", tmp_path / "o")
    assert code in (0, 3), error
    page = (tmp_path / "o" / "report.html").read_text()
    told = json.loads((tmp_path / "o" / "report.json").read_text())["engines"][1]
    assert "Boxes of FP32 and onnxruntime" in page and "Boxes of FP32 and ascend" in page
    assert 1 <= len(told["boxes"]) <= MOST
    assert {"sample", "threshold", "kept", "lost", "new"} == set(told["boxes"][0])
    kept, _, new = re.search(r"(\d+) of (\d+) boxes kept, (\d+) new", page).groups()
    first = told["boxes"][0]
    assert (int(kept), int(new)) == (first["kept"], first["new"])
    code, out, error = run("report", tmp_path / "o")  # reads the words, and draws nothing
    assert code == 0 and "boxes of FP32 kept" in " ".join(out.split()), error


def test_a_build_of_a_classifier_tells_the_samples_that_change(run, small_cnn, tmp_path):
    made = np.random.default_rng(1).normal(size=(40, 3, 16, 16)).astype(np.float32)
    made[::10] *= 30  # a range that costs the others their int8 steps
    np.save(tmp_path / "a.npy", made)
    metric = tmp_path / "own.py"  # a figure of one's own takes the task's place, not its pictures
    metric.write_text("def score(fp32, int8, label):\n    return 1.0\n")
    code, _, error = run(
        "build", small_cnn, "--images", tmp_path / "a.npy", "--duration", 0, "--effort", 0,
        "--metric", f"{metric}:score", "--method", "minmax", "--out", tmp_path / "o", "--accept",
    )  # fmt: skip
    assert code == 0, error
    engine = json.loads((tmp_path / "o" / "report.json").read_text())["engines"][1]
    assert engine["accuracy"]["top1_agreement"] < 0.9
    changed = engine["changed"]
    assert len(changed) == MOST and all(one["fp32"] != one["engine"] for one in changed)
    page = (tmp_path / "o" / "report.html").read_text()
    assert f"FP32 class {changed[0]['fp32']}" in page
    assert "Samples of another class in int8" in page
