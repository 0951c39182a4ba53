"""Annotated objects as trainers store them: COCO json, YOLO's label files, Pascal VOC's XML."""

import json
import shutil
from types import SimpleNamespace
from xml.sax.saxutils import escape

import cv2
import numpy as np
import pytest

from deploy.errors import FeedError
from deploy.feed.evaluation import apply_labels, read_labels
from deploy.feed.feed import Dataset, open_feed
from deploy.feed.paths import resolve_files
from deploy.feed.preprocess import Preprocess
from deploy.metrics.precision import GroundTruth, PrecisionTally
from deploy.tensors import TensorSpec

X = TensorSpec("x", "float32", (1, 3, 32, 32))
LETTERBOX = Preprocess(size=(32, 32), resize="letterbox", scale=1 / 255)
NAMES = ["cat", "dog & <co>", "2"]


def draw_scenes(rng, folder):
    """Write pictures of drawn sizes; return {stem: (size, boxes as shares, classes, crowds)}."""
    (folder / "images" / "val").mkdir(parents=True)
    scenes = {}
    for number in range(8):
        size = tuple(int(side) for side in rng.integers(9, 60, 2))
        cv2.imwrite(
            str(folder / "images" / "val" / f"{number}.a.png"), np.zeros((*size, 3), np.uint8)
        )
        count = int(rng.integers(0, 4)) if number else 2
        corners = np.sort(rng.uniform(size=(count, 2, 2)), axis=1).reshape(count, 4)
        scenes[f"{number}.a"] = size, corners, rng.integers(0, 3, count), rng.random(count) < 0.3
    return scenes


def write_coco(folder, scenes):
    images, objects = [], []
    for number, (name, (size, corners, classes, crowds)) in enumerate(scenes.items()):
        height, width = size
        images.append({"id": number, "file_name": f"{name}.png", "height": height, "width": width})
        for (x1, y1, x2, y2), kind, crowd in zip(corners, classes, crowds, strict=True):
            box = [x1 * width, y1 * height, (x2 - x1) * width, (y2 - y1) * height]
            objects.append(
                {"image_id": number, "bbox": box, "category_id": int(kind), "iscrowd": int(crowd)}
            )
    path = folder / "objects.json"
    kinds = [{"id": number, "name": name} for number, name in enumerate(NAMES)]
    path.write_text(json.dumps({"images": images, "annotations": objects, "categories": kinds}))
    return path


def write_yolo(folder, scenes):
    labels = folder / "labels" / "val"
    labels.mkdir(parents=True)
    for name, (_, corners, classes, _) in scenes.items():
        lines = []
        for (x1, y1, x2, y2), kind in zip(corners, classes, strict=True):
            lines.append(f"{kind} {(x1 + x2) / 2} {(y1 + y2) / 2} {x2 - x1} {y2 - y1}\n")
        if lines:
            (labels / f"{name}.txt").write_text("".join(lines))
    (labels / "classes.txt").write_text("\n".join(NAMES))
    return labels


def write_outlines(folder, scenes):
    labels = write_yolo(folder, scenes)
    for name, (_, corners, classes, _) in scenes.items():
        lines = []
        for (x1, y1, x2, y2), kind in zip(corners, classes, strict=True):
            lines.append(f"{kind} {x1} {(y1 + y2) / 2} {(x1 + x2) / 2} {y1} {x2} {y2}\n")
        if lines:
            (labels / f"{name}.txt").write_text("\n".join(lines))
    return labels


def write_yaml(folder, scenes):
    write_yolo(folder, scenes)
    path = folder / "data.yaml"
    path.write_text(f"train: images/train\nval: images/val\nnames: {json.dumps(NAMES)}\n")
    return path


def write_voc(folder, scenes):
    labels = folder / "Annotations"
    labels.mkdir()
    for name, (size, corners, classes, crowds) in scenes.items():
        boxes = ""
        for box, kind, crowd in zip(corners * np.tile(size[::-1], 2), classes, crowds, strict=True):
            sides = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
            corner_texts = "".join(f"<{key}>{value}</{key}>" for key, value in sides)
            boxes += f"<object><name>{escape(NAMES[kind])}</name><difficult>{int(crowd)}"
            boxes += f"</difficult><bndbox>{corner_texts}</bndbox></object>"
        sides = f"<width>{size[1]}</width><height>{size[0]}</height>"
        text = f"<annotation><size>{sides}</size>{boxes}</annotation>"
        (labels / f"{name}.xml").write_text(text)
    (folder / "classes.txt").write_text("\n".join(NAMES))
    return labels


WRITERS = {
    writer.__name__: writer for writer in (write_yolo, write_outlines, write_yaml, write_voc)
}


def read_truth(path, images, class_names=None):
    feed = open_feed(images, [X], preprocess=LETTERBOX)
    return apply_labels(read_labels(path), feed, class_names)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", WRITERS)
def test_all_forms_give_the_objects_of_coco(form, seed, tmp_path):
    scenes = draw_scenes(np.random.default_rng(seed), tmp_path)
    images = tmp_path / "images" / "val"
    expected = read_truth(write_coco(tmp_path, scenes), images)
    truth = read_truth(WRITERS[form](tmp_path, scenes), images)
    assert truth.categories is None
    for number in range(len(scenes)):
        objects, expected_objects = truth.objects(number), expected.objects(number)
        assert np.allclose(objects.boxes, expected_objects.boxes, atol=1e-9)
        assert np.array_equal(objects.categories, expected_objects.categories)
        assert objects.size == expected_objects.size
        if form == "write_voc":
            assert np.array_equal(objects.crowds, expected_objects.crowds)


@pytest.fixture
def scenes(tmp_path):
    return draw_scenes(np.random.default_rng(5), tmp_path)


@pytest.mark.parametrize("known_names", [NAMES, NAMES[:2]])
def test_categories_are_the_classes_of_their_names(known_names, tmp_path, scenes):
    path, images = write_coco(tmp_path, scenes), tmp_path / "images" / "val"
    expected = read_truth(path, images)
    truth = read_truth(path, images, {9: "car", **{7 - i: n for i, n in enumerate(known_names)}})
    has_all_names = known_names == NAMES
    assert truth.categories == (None if has_all_names else expected.categories)
    for number in range(len(scenes)):
        ids = expected.objects(number).categories
        classes = truth.objects(number).categories
        assert np.array_equal(classes, 7 - ids if has_all_names else ids)


def test_picture_without_label_file_is_empty(tmp_path, scenes, wording):
    labels, images = write_yolo(tmp_path, scenes), tmp_path / "images" / "val"
    (labels / "0.a.txt").unlink()
    truth = read_truth(labels, images)
    assert len(truth.objects(0).boxes) == 0
    wording.check(*truth.notes)
    for path in labels.glob("*.a.txt"):
        path.rename(path.with_stem(f"x{path.stem}"))
    with pytest.raises(FeedError) as refusal:
        read_truth(labels, images)
    wording.check(refusal.value)


def test_annotations_without_objects_are_refused(tmp_path, scenes):
    """Such as COCO's image_info_test-dev2017.json, with which nothing would be measured."""
    labels = write_coco(tmp_path, scenes)
    document = json.loads(labels.read_text())
    labels.write_text(json.dumps(document | {"annotations": []}))
    with pytest.raises(FeedError, match="got none on all 8 images"):
        read_truth(labels, tmp_path / "images" / "val")


def test_label_files_of_one_name_are_ambiguous(tmp_path, scenes, wording):
    labels = write_yolo(tmp_path, scenes)
    shutil.copytree(labels, tmp_path / "labels" / "train")
    with pytest.raises(FeedError, match=r"train/0\.a, val/0\.a for 0\.a") as refusal:
        read_truth(tmp_path / "labels", tmp_path / "images" / "val")
    wording.check(refusal.value)
    read_truth(tmp_path / "labels", tmp_path / "images")  # val/0.a.png has the labels val/0.a.txt


def object_counts(labels, image_names, folder, limit=None):
    """Return image -> number of objects, of annotations whose n-th image has n + 1 objects.

    `labels`: paths of the annotated images in a COCO json; a path without suffix is a label file.
    """
    for name in image_names:
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / "images" / name), np.zeros((9, 9, 3), np.uint8))
    path = write_coco(
        folder,
        {
            name.removesuffix(".png"): ((9, 9), np.zeros((count, 4)), [0] * count, [0] * count)
            for count, name in enumerate(labels, 1)
        },
    )
    if not labels[0].endswith(".png"):
        path = folder / "labels"
        for count, name in enumerate(labels, 1):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / f"{name}.txt").write_text("0 0.5 0.5 0.1 0.1\n" * count)
    feed = open_feed(folder / "images", [X], preprocess=LETTERBOX, limit=limit)
    truth = apply_labels(read_labels(path), feed)
    return {name: len(truth.objects(n).boxes) for n, name in enumerate(feed.names)}


@pytest.mark.parametrize(
    ("labels", "counts"),
    [
        (("a/0.png", "b/0.png"), {"a/0.png": 1, "b/0.png": 2}),
        (("x\\b\\0.png", "x\\a\\0.png"), {"a/0.png": 2, "b/0.png": 1}),
        (("/x/a/0.png", "/x/b/0.png", "/x/b/1.png"), {"b/0.png": 2, "1.png": 3}),
        (("0.png", "a/0.png"), {"0.png": 1, "a/0.png": 2}),
        (("b/0", "a/0"), {"a/0.png": 2, "b/0.png": 1}),
        (("val/b/0", "train/0"), {"a/0.png": 0, "b/0.png": 1, "train/0.png": 2}),
    ],
)
def test_folders_distinguish_images_of_one_name(labels, counts, tmp_path):
    assert object_counts(labels, counts, tmp_path) == counts


@pytest.mark.parametrize(
    ("labels", "limit"),
    [
        (("0.png",), None),
        (("0.png",), 1),  # the image that is not chosen may be the annotated one
        (("0",), None),
        (("x/0.png", "y/0.png"), None),
        (("b/0.png", "x/0.png"), None),
    ],
)
def test_annotations_that_fit_several_images_are_refused(labels, limit, tmp_path):
    """Both images would have the same objects, or each those of another image."""
    with pytest.raises(FeedError, match=r"for a/0\.png, b/0\.png; name"):
        object_counts(labels, ("a/0.png", "b/0.png"), tmp_path, limit)


@pytest.mark.parametrize("name", [".json", "..json", "a.JSON"])
def test_coco_file_is_known_by_suffix(name, tmp_path):
    image = {"id": 1, "file_name": "a.png", "height": 9, "width": 9}
    document = {"images": [image], "annotations": [], "categories": []}
    (tmp_path / name).write_text(json.dumps(document))
    assert read_labels(tmp_path / name).pictures
    assert resolve_files(tmp_path / name).file_list.names == ["a.png"]


def test_first_of_several_ambiguous_images_is_named(tmp_path):
    labels = [f"{folder}/0.png" for folder in "stuvwxyz"]
    names = [f"{root}/{label}" for root in "ab" for label in labels]
    with pytest.raises(FeedError, match=r"for a/s/0\.png, b/s/0\.png; name"):
        object_counts(labels, names, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        *("0 0.5 0.5 0.1", "0 0.5 0.5 0.1 0.1 0.9", "x 0.5 0.5 0.1 0.1", "0.5 0.5 0.5 0.1 0.1"),
        *("-1 0.5 0.5 0.1 0.1", "0 nan 0.5 0.1 0.1", "0 320 240 64 48", "0 0.5 0.5 -0.1 0.1"),
        *("0", "1e999 0.5 0.5 0.1 0.1", "1e30 0.5 0.5 0.1 0.1", "\0", "0 0.1 0.1 0.9 0.1 0.5 1.5"),
    ],
)
def test_malformed_yolo_line_is_named(line, tmp_path, scenes):
    labels = write_yolo(tmp_path, scenes)
    (labels / "0.a.txt").write_text(f"0 0.5 0.5 0.1 0.1\n\n{line}\n")
    with pytest.raises(FeedError, match=r"line 3 of .*0\.a\.txt"):
        read_labels(labels)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<annotation>", '<!DOCTYPE a [<!ENTITY b "b">]><annotation>'),
        ("</annotation>", ""),
        ("<xmin>", "<xmin>nan"),
        ("<ymax>", "<ymax>-"),
        ("<width>", "<width>x"),
        ("<height>", "<height>0."),
        ("<size>", "<other>"),
        ("bndbox>", "box>"),
        ("<name>", "<name>bird"),
    ],
)
def test_malformed_voc_file_is_named(old, new, tmp_path, scenes):
    path = write_voc(tmp_path, scenes) / "0.a.xml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(FeedError, match=r"0\.a\.xml"):
        read_labels(path.parent)


def test_voc_needs_the_order_of_classes(tmp_path, scenes, wording):
    labels = write_voc(tmp_path, scenes)
    (tmp_path / "classes.txt").unlink()
    with pytest.raises(FeedError) as refusal:
        read_labels(labels)
    wording.check(refusal.value)


@pytest.mark.parametrize("names", [(), ("a.txt", "a.xml"), ("classes.txt",)])
def test_folder_of_other_labels_is_refused(names, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(FeedError, match=r"YOLO's \.txt or VOC's \.xml"):
        read_labels(tmp_path)


def test_class_beyond_the_model_is_refused(tmp_path, scenes):
    truth = read_truth(write_yolo(tmp_path, scenes), tmp_path / "images" / "val")
    decoder = SimpleNamespace(class_count=1, form="boxes", boxes=lambda inputs, outputs: None)
    tally = PrecisionTally(decoder, GroundTruth(truth.objects, None))
    with pytest.raises(FeedError, match=r"0 to 0 .boxes., got class [12]"):
        for _ in scenes:
            tally.add({"x": np.zeros((1, 3, 32, 32), np.float32)}, {}, {})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("train: images/train\nval: images/val\n", "train"),
        ("path: .\ntrain: ./images/train\nval: images/val/\nnames: [no, 1]\n", "train"),
        ("path: ../set\ntrain: images/train\nval: [images/val]\n", "train"),
        ("path: /nowhere/set\ntrain: images/train\nval: images/val\n", "train"),
        ("train: ../images/train\nval: ../images/val\nnc: 2\n", "train"),
        ("train: [images/train, images/val]\nval: val.txt\nnames: {0: a}\n", ""),
    ],
)
def test_data_yaml_names_its_images(text, place, tmp_path, monkeypatch):
    folder = tmp_path / "set"
    for split, count in (("train", 2), ("val", 3)):
        (folder / "images" / split).mkdir(parents=True)
        for number in range(count):
            path = folder / "images" / split / f"{number}.png"
            cv2.imwrite(str(path), np.zeros((9, 9, 3), np.uint8))
    (folder / "val.txt").write_text("".join(f"./images/val/{number}.png\n" for number in range(3)))
    (folder / "data.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    val_names = tuple(f"images/val/{number}.png" for number in range(3))
    train_names = tuple(f"images/train/{number}.png" for number in range(2))
    train = open_feed("set/data.yaml", [X], preprocess=LETTERBOX)
    assert train.names == (train_names if place else (*train_names, *val_names))
    val = Dataset(source="set/data.yaml", preprocess=LETTERBOX, split="val")
    assert val.open([X]).names == val_names


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "- a", "train", "train:\nval: images", "train: {a: b}", "train: [[images]]"),
        *(
            "train: data.yaml",
            "train: nowhere",
            'train: "a\\0"',
            'train: "\\ud800"',
            "train: [7, 8]",
        ),
        *("[" * 2000, "- " * 9999, "train: &a [*a]", "train: 'a", '"\\UFFFFFFFF"', "%YAML 9.9\n"),
        *("train: a\nnc: many", "train: a\nnames: 7", "%YAML 1." + "9" * 9999, "#" * (1 << 19)),
        "\x07",
    ],
)
def test_other_yaml_is_refused(text, tmp_path):
    (tmp_path / "images").mkdir()
    path = tmp_path / "data.yaml"
    path.write_text(text)
    with pytest.raises(FeedError, match=r"data\.yaml must"):
        open_feed(path, [X])


def test_tags_of_yaml_make_no_objects(tmp_path):
    command = f"touch {tmp_path / 'made'}"
    path = tmp_path / "data.yaml"
    path.write_text(f"train: !!python/object/apply:os.system [{json.dumps(command)}]\n")
    with pytest.raises(FeedError, match="folders or list files"):
        open_feed(path, [X])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ("names: [a]", r"0\.a\.txt has [12]"),
        ("kpt_shape: [17, 3]", "key points"),
        ("val: labels", "must hold images"),
    ],
)
def test_labels_unlike_their_yaml_are_refused(change, got, tmp_path, scenes):
    path = write_yaml(tmp_path, scenes)
    path.write_text(f"{path.read_text()}{change}\n")
    (tmp_path / "labels" / "val" / "0.a.txt").write_text("2 0.5 0.5 0.1 0.1\n")
    with pytest.raises(FeedError, match=got):
        read_labels(path)


def test_picture_named_twice_has_its_labels(tmp_path, scenes):
    path = write_yaml(tmp_path, scenes)
    path.write_text(path.read_text().replace("val: images/val", "val: [images/val, images/val]"))
    assert len(read_labels(path).pictures) == len(list((tmp_path / "labels").rglob("?.a.txt")))
    read_truth(path, tmp_path / "images")


def test_yaml_without_label_files_is_refused(tmp_path, scenes, wording):
    path = write_yaml(tmp_path, scenes)
    shutil.rmtree(tmp_path / "labels")
    with pytest.raises(FeedError) as refusal:
        read_labels(path)
    wording.check(refusal.value)
