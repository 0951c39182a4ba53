"""Boxes and samples that a report draws: chosen, counted, escaped."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from deploy.pipeline.evaluate import CandidateImages
from deploy.report import Report, to_html, to_json, to_markdown
from deploy.report.parts import EngineRow
from deploy.report.previews import BoxPicture, example_rows
from deploy.tasks.boxes import BoxDetection
from deploy.tasks.detections import Detections, scale_to_pixels
from deploy.tasks.evaluation_task import MAX_SHOWN, ClassExample
from deploy.tasks.vectors import Classes

QUICK = ("--effort", 0, "--duration", 0, "--accept")
HOSTILE = "<script>alert('x')</script>&\"\udcff"


class Rows:
    """A decoder of outputs that are boxes already: [n, 6] of corners, score, class."""

    form, parts, coding, classes = "rows", {}, "corners", 3

    def boxes(self, inputs, outputs):
        rows = np.asarray(outputs["y"], np.float64)
        return Detections.of(rows[:, :4], rows[:, 4], rows[:, 5].astype(np.int64))


def row(left_edge, score=0.9, kind=0):
    return [left_edge, 10, left_edge + 8, 18, score, kind]


def scene(*rows):
    return {"y": np.array(rows, np.float64).reshape(-1, 6)}


FEED = {"x": np.zeros((1, 3, 32, 320), np.float32)}


def tally_pairs(pairs):
    tally = BoxDetection(Rows()).tally()
    for reference, candidate in pairs:
        tally.add(FEED, reference, candidate)
    return tally


def test_drawn_boxes_equal_the_count():
    full = scene(*(row(10 * n) for n in range(8)))
    pairs = [
        (full, scene(*(row(10 * n) for n in range(5)))),  # 3 lost
        (full, full),
        (full, scene(*(row(10 * n) for n in range(8)), row(100), row(120))),  # 2 new
        (full, scene(*(row(10 * n, kind=1) for n in range(8)))),  # all of another class
    ]
    tally = tally_pairs(pairs)
    message, shown = tally.result(), tally.shown()
    assert [sample.number for sample in shown] == [3, 0, 2, 1]  # what differs most first
    kept_count = sum(len(sample.kept.scores) for sample in shown)
    new = sum(len(sample.new.scores) for sample in shown)
    lost = sum(len(sample.lost.scores) for sample in shown)
    assert (
        message.words
        == f"{kept_count} of {kept_count + lost} boxes of FP32 kept, {new} new (score above 0.25)"
    )
    assert all(len(sample.kept.scores) == len(sample.found.scores) for sample in shown)
    np.testing.assert_allclose(shown[1].lost.boxes[:, 0], [50, 60, 70])


def test_agreeing_samples_are_shown_if_few_differ():
    full = scene(*(row(10 * n) for n in range(8)))
    rows = [row(10 * n) for n in range(8)]
    worse = [(full, scene(*rows[:-lost])) for lost in range(1, 7)]
    half = scene(*rows[:4])
    shown = tally_pairs([(half, half), (full, full), *worse[:2]]).shown()
    assert [sample.number for sample in shown] == [3, 2, 1, 0]
    assert len(shown) == MAX_SHOWN
    assert [sample.number for sample in tally_pairs(worse).shown()] == [5, 4, 3, 2]
    tally = tally_pairs([(full, full), *worse, (full, scene())] * 25)  # few are kept of many
    assert len(tally.ranked_examples) == MAX_SHOWN


@pytest.mark.parametrize(("score", "counts"), [(0.26, True), (0.24, False)])
def test_boxes_count_from_a_score_on(score, counts):
    tally = tally_pairs([(scene(row(0, score=score)), scene(row(0, score=score)))])
    assert bool(tally.shown()) == counts
    assert (tally.result() is not None) == counts


def test_relative_boxes_become_pixels():
    result = Detections(np.array([[0.1, 0.5, 0.2, 1.0]]), np.ones(1), np.zeros(1, np.int64))
    np.testing.assert_allclose(scale_to_pixels(result, (32, 320)).boxes, [[32, 16, 64, 32]])


def test_changed_classes_are_sorted_by_score():
    tally = Classes(("logits",), (3,)).tally()
    for reference_logit, candidate_logit in ((5.0, 6.0), (9.0, 2.0), (3.0, 8.0)):
        tally.add(
            {},
            {"logits": np.array([[reference_logit, 1, 0]])},
            {"logits": np.array([[1, candidate_logit, 0]])},
        )
    tally.add({}, {"logits": np.array([[5.0, 1, 0]])}, {"logits": np.array([[5.0, 1, 0]])})
    assert [(sample.number, sample.reference, sample.candidate) for sample in tally.shown()] == [
        (1, (0, 9.0), (1, 2.0)),
        (0, (0, 5.0), (1, 6.0)),
        (2, (0, 3.0), (1, 8.0)),
    ]


def test_equal_samples_keep_their_order():
    tally, classes = Classes(("y",), (2,)).tally(), {"reference": (0, 1.0), "candidate": (1, 1.0)}
    for number in (3, 1, 2, 0, 4):
        tally.offer(
            ClassExample(number=number, output="y", **classes), difference=1.0, predictions=0
        )
    assert [sample.number for sample in tally.shown()] == [0, 1, 2, 3]


class Feed:
    names = [f"{number}.png" for number in range(100)]  # noqa: RUF012

    def to_image(self, sample):
        return np.full((600, 300, 3), sample["x"].flat[0], np.uint8)


def test_only_watched_pictures_are_kept():
    looks = CandidateImages(Feed())
    for start in range(0, 20, 2):  # batches of two
        batch = {"x": np.array([start, start + 1], np.float32).reshape(2, 1, 1, 1)}
        looks.add(batch, {0, start + 1})
        assert len(looks) <= 2
    result = looks.select([0, 19, 5, 77])
    assert list(result) == [0, 19]
    assert result[19][0] == "19.png"
    assert result[19][1].shape == (256, 128, 3)
    assert (result[19][1] == 19).all()


def boxes(name="a.png", number=0, names=None):
    full = scene(*(row(10 * n) for n in range(8)))
    (example,) = tally_pairs([(full, scene(*(row(10 * n) for n in range(1, 8)), row(200)))]).shown()
    pictures = {number: (name, np.zeros((32, 320, 3), np.uint8))}
    return example_rows([example], pictures, names or {})[0]


def test_page_draws_kept_lost_new_boxes():
    page = to_html(Report(engines=(EngineRow(label="int8", boxes=boxes()),)))
    reference_figure, engine_figure = re.findall(r'<svg class="boxes".*?</svg>', page)
    assert (
        reference_figure.count('<rect class="kept"')
        == engine_figure.count('<rect class="kept"')
        == 7
    )
    assert reference_figure.count('<rect class="lost"') == 1
    assert engine_figure.count('<rect class="new"') == 1
    assert 'class="new"' not in reference_figure
    assert 'class="lost"' not in engine_figure
    assert reference_figure.count(">0 0.90</text>") == 8
    assert "7 of 8 boxes kept, 1 new" in page
    assert page.count("data:image/") == 1
    assert '<use href="#look-0"/>' in engine_figure
    engines = tuple(EngineRow(label=label, boxes=boxes()) for label in ("a", "b"))
    page = to_html(Report(engines=engines))  # a picture stands once for several engines
    assert page.count("data:image/") == 1
    assert page.count('<use href="#look-0"/>') == 3
    # a label right of the middle ends at its box, so that a long name is not cut off
    assert engine_figure.count('<text class="end"') == 1
    assert re.search(r'class="new" x="156.2" [^/]*/><text class="end" x="160.5"', engine_figure)
    assert 'class="end"' not in reference_figure
    page = to_html(Report(engines=(EngineRow(label="int8", boxes=boxes(names={0: "a<b"})),)))
    assert page.count(">a&lt;b 0.90</text>") == 16
    assert page.count('id="look-0"') == 1


def test_labels_are_escaped_in_pages():
    report = Report(engines=(EngineRow(label=HOSTILE, boxes=boxes(HOSTILE)),))
    assert "<script>alert" not in to_html(report)
    (message,) = to_json(report)["engines"][0]["boxes"]
    assert (message["kept"], message["lost"], message["new"]) == (7, 1, 1)
    assert "data:" not in json.dumps(message)
    assert "data:" not in to_markdown(report)


def test_only_the_best_boxes_are_drawn():
    (full_row,) = boxes()
    example = full_row.boxes.example
    repeated = np.tile(np.arange(7), 20)
    kept, found = example.kept.at(repeated), example.found.at(repeated)
    picture = BoxPicture(full_row.boxes.picture, replace(example, kept=kept, found=found), {})
    long_row = replace(full_row, kept=len(kept.scores), boxes=picture)
    page = to_html(Report(engines=(EngineRow(label="int8", boxes=(long_row,)),)))
    assert page.count('<rect class="kept"') == 200
    assert "the best 100" in page


def test_detector_build_draws_its_boxes(run, detector, pictures, tmp_path):
    arguments = ("build", detector, "--images", pictures, *QUICK, "--out", tmp_path)
    run.ok(*arguments, "--target", "onnxruntime,ascend")
    page = (tmp_path / "report.html").read_text()
    message = json.loads((tmp_path / "report.json").read_text())["engines"][1]
    assert "FP32 and onnxruntime" in page
    assert "FP32 and ascend" in page
    assert 1 <= len(message["boxes"]) <= MAX_SHOWN
    sample = message["boxes"][0]
    assert {"sample", "threshold", "kept", "lost", "new"} == set(sample)
    kept_count, _, new = re.search(r"(\d+) of (\d+) box(?:es)? kept, (\d+) new", page).groups()
    assert (int(kept_count), int(new)) == (sample["kept"], sample["new"])
    # reads the words, and draws nothing
    assert "boxes of FP32 kept" in " ".join(run.ok("report", tmp_path).split())


def test_classifier_build_reports_changed_samples(run, small_cnn, tmp_path):
    rng = np.random.default_rng(1).normal(size=(40, 3, 16, 16)).astype(np.float32)
    rng[::10] *= 30  # a range that costs the others their int8 steps
    np.save(tmp_path / "a.npy", rng)
    metric = tmp_path / "own.py"  # a figure of one's own takes the task's place, not its pictures
    metric.write_text("def score(fp32, int8, label):\n    return 1.0\n")
    arguments = ("build", small_cnn, "--images", tmp_path / "a.npy", *QUICK, "--out", tmp_path)
    run.ok(*arguments, "--metric", f"{metric}:score", "--method", "minmax")
    engine = json.loads((tmp_path / "report.json").read_text())["engines"][1]
    assert engine["accuracy"]["top1_agreement"] < 0.9
    changed = engine["changed"]
    assert len(changed) == MAX_SHOWN
    assert all(sample["fp32"] != sample["engine"] for sample in changed)
    page = (tmp_path / "report.html").read_text()
    assert f"FP32 class {changed[0]['fp32']}" in page
    assert "another class in int8" in page
