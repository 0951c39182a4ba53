"""What a user loses, through the command: parts, tasks, a metric of one's own, annotations."""

import json
import re
import shutil
import struct

import cv2
import numpy as np
import pytest

import calib8
from deploy.errors import ConfigError, FeedError
from deploy.feed.annotations import read_coco
from deploy.feed.file_list import ImageFile
from deploy.feed.pixels import boxes_to_input, preprocess_image
from deploy.feed.preprocess import Preprocess
from deploy.feed.sources import decoded_size
from deploy.metrics import output_form
from deploy.runtimes.ort import OrtSession
from deploy.tasks.metric import MetricTally, metric_of

SIDE = 32  # of what the fixture `detector` is fed


@pytest.fixture
def build(run, pictures, tmp_path):
    """(model, words) -> exit code and output of a build on the pictures, its report."""

    def call(model, *arguments):
        arguments = ("--duration", 0, "--out", tmp_path / "o", *arguments)
        if "--images" not in arguments:
            arguments = ("--images", pictures, *arguments)
        code, out, error = run("build", model, *arguments)
        assert code in (0, 3), error
        return code, out, json.loads((tmp_path / "o" / "report.json").read_text())

    return call


@pytest.fixture
def accuracy(build):
    """(model, words) -> int8's accuracy in a build that is no failure, and its output."""

    def call(model, *arguments):
        code, out, report = build(model, *arguments)
        assert code == 0
        return report["engines"][1]["accuracy"], out

    return call


@pytest.fixture
def refused(run, pictures, tmp_path):
    arguments = ("--images", pictures, "--duration", 0, "--out", tmp_path / "o")
    return lambda model, *extra_arguments: run.fails("build", model, *arguments, *extra_arguments)


@pytest.mark.slow
def test_boxes_and_the_worst_part_lead_the_report(accuracy, detector, tmp_path):
    result, out = accuracy(detector)
    lines = {line[:16].strip(): line for line in out.splitlines()}
    assert result["task"]["task"] == "boxes" and result["task"]["count"] in lines["Boxes kept"]
    assert "SQNR, worst part" not in lines  # one screen has the figures of the task
    assert [part["label"] for part in result["parts"]].count("y[4:6]") == 1
    assert result["parts"][0]["sqnr_db"] <= result["parts"][1]["sqnr_db"]
    page = (tmp_path / "o" / "report.html").read_text()
    text = (tmp_path / "o" / "report.md").read_text()
    assert "Boxes kept, int8" in page and "SQNR, worst part" in page and "y[4:6]" in page
    assert "boxes of FP32 kept" in text and "y\\[4:6\\]" in text
    (worst,) = (line for line in text.splitlines() if line.startswith("| SQNR, worst part |"))
    assert "of y\\[" in worst


SMALL = ("--size", "16x16")


@pytest.mark.slow
def test_a_classifier_has_its_lines_as_ever(accuracy, small_cnn, tmp_path):
    result, out = accuracy(small_cnn, *SMALL)
    text = (tmp_path / "o" / "report.md").read_text()
    assert "Top-1 agreement" in out and "Top-1 agreement" in text
    assert "SQNR, worst part" not in text and result["task"]["task"] == "classes"


SCORE = """
def score(fp32, int8, label):
    assert set(fp32) == {"logits"} and fp32["logits"].shape == (1, 10)
    return 1.0 if label is None else 10.0 * (int8["logits"].argmax() == label)

def broken(fp32, int8, label):
    return 1 / 0

def word(fp32, int8, label):
    return "well"

def silent(fp32, int8, label):
    return float("nan")
"""


@pytest.fixture
def score(tmp_path):
    (tmp_path / "own.py").write_text(SCORE)
    return tmp_path / "own.py"


def test_a_metric_of_ones_own_decides(accuracy, small_cnn, pictures, score, tmp_path):
    labels = tmp_path / "labels.txt"
    session = OrtSession.open(small_cnn, threads=1)
    preprocess = Preprocess(size=(16, 16), color="rgb", layout="nchw")
    best = [
        int(session.run({"x": preprocess_image(cv2.imread(str(p)), preprocess)})["logits"].argmax())
        for p in sorted(pictures.iterdir())
    ]
    wrong = [(one + 1) % 10 for one in best[15:]]
    labels.write_text("".join(f"{one}\n" for one in [*best[:15], *wrong]))
    arguments = (*SMALL, "--eval-images", pictures, "--labels", labels)
    result, out = accuracy(small_cnn, *arguments, "--metric", f"{score}:score")
    task = result["task"]
    assert task["task"] == "metric" and task["reference"] == 7.5 and task["figure"] == "score"
    (line,) = [line for line in out.splitlines() if line.startswith("Score")]
    assert line.split()[1:] == ["7.5", task["count"]]


@pytest.mark.slow
def test_the_report_says_by_what_a_task_was_recognised(accuracy, small_cnn, tmp_path):
    result, out = accuracy(small_cnn, "--effort", 0)
    assert result["why"].startswith("classes, by ") and "classes, by" not in out
    pages = [(tmp_path / "o" / page).read_text() for page in ("report.md", "report.html")]
    verbose = accuracy(small_cnn, "--effort", 0, "-v")[1]
    assert all("classes, by " in text for text in (*pages, verbose))


@pytest.mark.slow
def test_a_task_that_is_set_holds_for_the_search_and_the_verdict(
    accuracy, small_cnn, tmp_path, monkeypatch, run, pictures
):
    asked, recognise = set(), output_form.recognise_task

    def spy(seen, task=""):
        asked.add(task)
        return recognise(seen, task)

    monkeypatch.setattr(output_form, "recognise_task", spy)
    result, out = accuracy(small_cnn, "--task", "embeddings", "--repair", "adaround")
    calib8.explain(tmp_path / "o", images=pictures)
    assert asked == {"embeddings"} and "Neighbours alike" in out
    assert result["why"] == "embeddings, as set by --task"
    assert result["top1_agreement"] is None
    run.ok("build", "--config", tmp_path / "o" / "calib8.toml")
    assert asked == {"embeddings"}
    result, out = accuracy(small_cnn, "--task", "none")
    assert asked == {"embeddings", "none"} and result["task"] is None and "SQNR" in out
    report = calib8.build(small_cnn, pictures, out=tmp_path / "p", task="none", duration_s=0)
    assert report.engines[1].accuracy.task is None


@pytest.mark.parametrize(
    ("task", "rule"),
    [
        (
            "cats",
            "a task is one of boxes, text, segmentation, masks, heatmaps, keypoints, classes,"
            " embeddings, labels, steps, indices, none, got 'cats'",
        ),
        ("boxes", "boxes [N, A, 4 or more] and scores [N, A, C]"),
        ("text", "got logits [1, 10]; set another, or none to compare values"),
        ("indices", "the task indices needs int32 or int64 outputs, got logits [1, 10]"),
    ],
)
def test_a_task_that_does_not_fit_is_refused_in_one_sentence(refused, small_cnn, task, rule):
    assert rule in refused(small_cnn, "--task", task)


@pytest.mark.slow
def test_a_metric_of_percent_is_judged_by_the_share_that_is_lost(build, small_cnn, score):
    """One point of a hundred is one in a hundred, not a hundred times that."""
    score.write_text(
        "def score(fp32, int8, label):\n"
        "    return 99.0 + (fp32['logits'] == int8['logits']).all()\n"
    )
    arguments = (*SMALL, "--metric", f"{score}:score", "--effort", "0")
    limits = ((), ("--max-loss", 0.005), ("--max-loss", 0.02))
    assert [build(small_cnn, *arguments, *limit)[0] for limit in limits] == [0, 3, 0]


def worst_db(report):
    """Target -> SQNR of its engine's worst part."""
    worst = {}
    for engine in report["engines"]:
        if "accuracy" in engine:
            worst[engine["target"]] = engine["accuracy"]["parts"][0]["sqnr_db"]
    assert len(worst) == 2
    return worst


@pytest.mark.slow
def test_metric_cannot_change_arrays_of_other_engines(build, small_cnn, score):
    score.write_text(
        "def score(fp32, int8, label):\n"
        "    for values in (*fp32.values(), *int8.values()):\n"
        "        values *= 0\n"
        "    return 1.0\n"
    )
    arguments = (*SMALL, "--target", "onnxruntime,tensorrt", "--effort", "0")
    plain, own = (
        build(small_cnn, *arguments, *extra_arguments)
        for extra_arguments in ((), ("--metric", f"{score}:score"))
    )
    assert own[0] == 0
    assert worst_db(plain[2]) == pytest.approx(worst_db(own[2]), abs=0.01)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("own.py:broken", "must run without error, got ZeroDivisionError"),
        ("own.py:broken", "own.py:7: return 1 / 0"),
        ("own.py:word", "must return a finite number, got 'well'"),
        ("own.py:silent", "must return a finite number, got nan"),
        ("own.py:scor", "has no function 'scor'; it has broken, score, silent, word"),
        ("gone.py:score", "nothing there"),
        ("own.py", "given as file.py:function"),
    ],
)
def test_what_is_wrong_with_a_metric_is_one_sentence(refused, small_cnn, score, name, rule):
    assert rule in refused(small_cnn, *SMALL, "--metric", score.parent / name)


class Unread(float):
    def __float__(self):
        raise OSError("no disk")


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("1", "must return a finite number, got '1' from"),
        (10**400, "must return a finite number, got 1000"),
        ([10**5000], "metric .* must run without error, got ValueError"),  # Python prints no such
        (np.ones(2), "must return a finite number, got array"),
        (None, "must return a finite number, got None"),
        (Unread(1), "metric .* must run without error, got OSError: no disk"),
    ],
)
def test_a_metric_gives_a_number(value, rule):
    tally = MetricTally(metric_of(lambda fp32, int8, label: value), labels=None)
    with pytest.raises(ConfigError, match=rule):
        tally.add({}, {}, {})


def test_a_metric_takes_one_label_a_sample(wording):
    def right(fp32, int8, label):
        return label == int8["y"][0, 0]

    tally = MetricTally(metric_of(right), labels=[0, 1, 7])
    outputs = [{"y": np.float32([[number]])} for number in range(4)]
    for output in outputs[:3]:
        tally.add({}, outputs[0], output)
    result = tally.result()
    assert (result.value, result.reference, result.samples) == (2 / 3, 1 / 3, 3)
    with pytest.raises(FeedError) as refusal:
        tally.add({}, outputs[0], outputs[3])
    wording.check(refusal.value)


@pytest.fixture
def annotations(detector, pictures, tmp_path):
    """A COCO json of what the float model sees in the pictures, in the pictures' own pixels."""
    session = OrtSession.open(detector, threads=1)
    preprocess = Preprocess(size=(SIDE, SIDE), color="rgb", layout="nchw")
    images, objects = [], []
    for number, file in enumerate(sorted(pictures.iterdir())):
        pixels = cv2.imread(str(file))
        height, width = pixels.shape[:2]
        rows = session.run({"x": preprocess_image(pixels, preprocess)})["y"][0]
        images.append({"id": number, "file_name": file.name, "height": height, "width": width})
        for column in np.flatnonzero(rows[4:].max(axis=0) > 0.05):
            cx, cy, w, h = rows[:4, column].tolist()
            box = [(cx - w / 2) * width / SIDE, (cy - h / 2) * height / SIDE]
            box += [w * width / SIDE, h * height / SIDE]
            kind = 3 + 4 * int(rows[4:, column].argmax())  # categories 3 and 7
            objects.append({"image_id": number, "bbox": box, "category_id": kind})
    kinds = [{"id": 7, "name": "b"}, {"id": 3, "name": "a"}]
    path = tmp_path / "objects.json"
    path.write_text(json.dumps({"images": images, "annotations": objects, "categories": kinds}))
    return path


@pytest.fixture
def labelled(pictures, annotations):
    return ("--eval-images", pictures, "--labels", annotations)


@pytest.mark.slow
def test_a_coco_json_gives_both_precisions(accuracy, detector, labelled, annotations, tmp_path):
    report_accuracy, out = accuracy(detector, *labelled)
    report_accuracy = report_accuracy["precision"]
    # the model's own suppression leaves out some that the annotations have
    assert report_accuracy["reference_50"] > 0.5 and report_accuracy["reference"] > 0.5
    assert 0 < report_accuracy["candidate_50"] <= 1
    lost = 100 * (report_accuracy["candidate"] - report_accuracy["reference"])
    assert f"mAP .50:.95 {lost:+.2f} points" in " ".join(out.split())
    text = (tmp_path / "o" / "report.md").read_text()
    assert f"{100 * report_accuracy['reference']:.2f} %" in out
    assert f"| mAP .50 | {100 * report_accuracy['reference_50']:.2f} % |" in text
    data = json.loads(annotations.read_text())
    for annotation in data["annotations"][:100]:
        annotation["bbox"][0] += 500
    annotations.write_text(json.dumps(data))
    worse, _ = accuracy(detector, *labelled)
    assert worse["precision"]["reference_50"] < report_accuracy["reference_50"]


@pytest.mark.slow
def test_data_yaml_calibrates_and_judges(accuracy, detector, pictures, annotations, tmp_path):
    for split, files in (("train", range(8)), ("val", range(8, 20))):
        for part in ("images", "labels"):
            (tmp_path / "set" / part / split).mkdir(parents=True)
        for number in files:
            shutil.copy(pictures / f"{number:02}.png", tmp_path / "set" / "images" / split)
    for row in json.loads(annotations.read_text())["annotations"]:
        corners = np.reshape(row["bbox"], (2, 2)) / (20, 18)
        corners[1] += corners[0]
        low, high = corners.clip(0, 1)
        center, sides = (low + high) / 2, high - low
        line = f"{(row['category_id'] - 3) // 4} {center[0]} {center[1]} {sides[0]} {sides[1]}\n"
        if row["image_id"] >= 8:
            path = tmp_path / "set" / "labels" / "val" / f"{row['image_id']:02}.txt"
            with path.open("a") as file:
                file.write(line)
    path = tmp_path / "set" / "data.yaml"
    path.write_text("train: images/train\nval: images/val\nnames: [a, b]\n")
    options = ("--images", path, "--eval-images", path, "--labels", path, "--effort", 0)
    result, out = accuracy(detector, *options)
    assert result["precision"]["reference_50"] > 0.5 and "8 samples from" in out
    assert result["samples"] == 12


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"bbox": [1, 2, -3, 4]}, "a bbox of '00.png' that is no x, y, width and height"),
        ({"bbox": [1, 2, float("nan"), 4]}, "a bbox of '00.png'"),
        ({"bbox": [1, 2, float("inf"), 4]}, "a bbox of '00.png'"),
        ({"bbox": [1, 2, 0, -0.5]}, "a bbox of '00.png'"),
        ({"category_id": 5}, "a category_id that no category has, 5"),
        ({"image_id": 99}, "an image_id that no image has, 99"),
        ({"id": 77}, "got annotations of 00.png, 00.png for 00.png"),
        ({"id": 0}, "an id that two images have, 0"),
    ],
)
def test_objects_that_cannot_be_are_refused(
    broken, reason, refused, detector, labelled, annotations
):
    """Counted as they stand they would lower the precision of both models in silence."""
    data = json.loads(annotations.read_text())
    if "id" in broken:
        data["images"].append(data["images"][0] | broken)
    else:
        annotation = {"image_id": 0, "bbox": [1, 2, 3, 4], "category_id": 3}
        data["annotations"].append(annotation | broken)
    annotations.write_text(json.dumps(data))
    assert reason in refused(detector, *labelled)


def test_a_box_of_no_size_in_a_picture_of_a_pixel_is_an_object(tmp_path, wording):
    def read(category=3, **sides):
        image = {"id": 7, "file_name": "a/0.png", "width": 1, "height": 1} | sides
        box = {"image_id": 7, "bbox": [1, 2, 0, 0], "category_id": category, "iscrowd": 1}
        data = {"images": [image], "annotations": [box], "categories": [{"id": category}]}
        (tmp_path / "objects.json").write_text(json.dumps(data))
        return read_coco(tmp_path / "objects.json").pictures["a/0.png"]

    result = read()
    assert result.boxes.tolist() == [[1, 2, 1, 2]] and result.size == (1, 1)
    with pytest.raises(FeedError, match="must be a COCO json"):
        read(category=1 << 63)
    for side in ("width", "height"):
        with pytest.raises(FeedError) as refusal:
            read(**{side: 0})
        wording.check(refusal.value)


@pytest.mark.slow
def test_annotations_of_others_are_refused(
    refused, detector, small_cnn, labelled, annotations, wording
):
    assert "give --eval-images" in refused(detector, "--labels", annotations)
    wording.check(refused(small_cnn, *SMALL, *labelled))
    data = json.loads(annotations.read_text())
    fewer = {"images": data["images"][:-1]}
    known_annotations = {"annotations": [a for a in data["annotations"] if a["image_id"] != 19]}
    more_categories = {"categories": [*data["categories"], {"id": 900, "name": "c"}]}
    for change, reason in [
        (fewer, "COCO json"),
        (fewer | known_annotations, "'19.png' is not"),
        (known_annotations | more_categories, "3 categories and 2 classes (y: "),
        (known_annotations | more_categories, "boxes by centre"),
        (
            known_annotations | more_categories,
            "list all that it learned as categories, or leave the labels out",
        ),
    ]:
        annotations.write_text(json.dumps(data | change))
        assert reason in refused(detector, *labelled)
    for text in ("[1, 2", "[]", '{"images": [{}], "annotations": [], "categories": []}', "7"):
        annotations.write_text(text)
        assert "COCO json" in refused(detector, *labelled)


def resaved(pictures, folder, change):
    """The pictures, changed, under their own names."""
    folder.mkdir()
    for file in pictures.iterdir():
        cv2.imwrite(str(folder / file.name), change(cv2.imread(str(file))))
    return folder


@pytest.mark.slow
def test_boxes_are_scaled_to_other_pictures(build, detector, pictures, annotations, tmp_path):
    """Three times as large they are the same for the model, which reads 32 x 32 of them."""
    larger = resaved(pictures, tmp_path / "x3", lambda picture: picture.repeat(3, 0).repeat(3, 1))
    options = ("--resize", "letterbox", "--labels", annotations, "--eval-images")
    precisions = []
    for folder in (pictures, larger):
        _, _, report = build(detector, *options, folder)
        precisions.append(report["engines"][1]["accuracy"]["precision"]["reference_50"])
    assert precisions[1] == pytest.approx(precisions[0], abs=0.1) and precisions[1] > 0.3


def test_pictures_of_another_shape_are_refused(
    refused, detector, pictures, annotations, tmp_path, wording
):
    options = (detector, "--labels", annotations, "--eval-images")
    cut = resaved(pictures, tmp_path / "cut", lambda picture: picture[:, :9])
    wording.check(refused(*options, cut))
    error = refused(*options, resaved(pictures, tmp_path / "turned", np.rot90))
    assert "of 18x20 and 20x18 in the annotations; give the images" in error
    data = json.loads(annotations.read_text())
    data["images"][0]["width"] = 0
    annotations.write_text(json.dumps(data))
    wording.check(refused(*options, pictures))


@pytest.mark.parametrize("order", [b"II", b"MM"])
@pytest.mark.parametrize("turn", [1, 3, 6, 8, 9])
def test_a_picture_that_its_exif_turns_is_as_large_as_it_is_decoded(order, turn, tmp_path):
    _, data = cv2.imencode(".jpg", np.zeros((18, 26, 3), np.uint8))
    form = "<" if order == b"II" else ">"
    tags = order + struct.pack(f"{form}HIHHHIHH", 42, 8, 1, 274, 3, 1, turn, 0) + bytes(4)
    exif = b"Exif\0\0" + tags
    jpeg_bytes = data.tobytes()
    jpeg_bytes = (
        jpeg_bytes[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg_bytes[2:]
    )
    (path := tmp_path / "a.jpg").write_bytes(jpeg_bytes)
    turned = (26, 18) if turn in (6, 8) else (18, 26)
    assert decoded_size(ImageFile(path, "a.jpg")) == cv2.imread(str(path)).shape[:2] == turned


@pytest.mark.parametrize("resize", ["stretch", "letterbox", "short-side", "fit-height"])
@pytest.mark.parametrize("size", [(40, 80), (100, 60)])
def test_boxes_land_where_their_pixels_do(resize, size):
    preprocess = Preprocess(
        size=(64, 96), resize=resize, color="grey", layout="nchw", scale=1, pad=(0,)
    )
    picture = np.zeros((*size, 1), np.uint8)
    low, high = [int(0.4 * side) for side in size], [int(0.6 * side) for side in size]
    picture[low[0] : high[0], low[1] : high[1]] = 255
    bright_pixels = np.argwhere(preprocess_image(picture, preprocess)[0, 0] > 127)
    (top, left_edge), (bottom, right) = bright_pixels.min(axis=0), bright_pixels.max(axis=0) + 1
    box = boxes_to_input(
        np.array([[low[1], low[0], high[1], high[0]]], np.float64), size, preprocess
    )[0]
    box = np.clip(box, 0, [96, 64, 96, 64])
    np.testing.assert_allclose(box, [left_edge, top, right, bottom], atol=1.1)


@pytest.mark.parametrize(
    ("evaluation", "calibrated"),
    [
        (None, "(on calibration images)"),
        (slice(10), "(on calibration images)"),
        (slice(5, 15), "(5 of 10 calibrated)"),
        (slice(10, 20), ""),
    ],
)
def test_verdict_says_when_its_images_calibrated(
    evaluation, calibrated, small_cnn, pictures, tmp_path, run
):
    paths = [f"{path}\n" for path in sorted(pictures.glob("*.png"))]
    (tmp_path / "calibration.txt").write_text("".join(paths[:10]))
    options = ["--size", "16x16", "--effort", 0, "--duration", 0, "--out", tmp_path / "out"]
    if evaluation is not None:
        (tmp_path / "evaluation.txt").write_text("".join(paths[evaluation]))
        options += ["--eval-images", tmp_path / "evaluation.txt"]
    out = run.ok("build", small_cnn, "--images", tmp_path / "calibration.txt", *options)
    notes = re.findall(r"\((?:on|\d+ of \d+) calibrat[^()]*\)", " ".join(out.split()))
    assert set(notes) == ({calibrated} if calibrated else set())
