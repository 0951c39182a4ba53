"""What a model's metadata, or a file beside it, says of how pictures become its input."""

import json

import numpy as np
import onnx
import pytest

from deploy.errors import ConfigError
from deploy.feed.feed import open_feed
from deploy.feed.model_preprocess import MetadataPreprocess, resolve_preprocess
from deploy.feed.preprocess import PRESETS, Preprocess
from deploy.frontends.metadata import read_class_names, read_metadata_preprocess
from deploy.frontends.metadata.exporters import parse_operators
from deploy.tensors import TensorSpec
from tests.models import make_model, make_value, read_markdown, save_net

OPEN = ("n", 3, "h", "w")
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
YOLO = {"author": "Ultralytics", "version": "8.1.0", "task": "detect", "imgsz": "[320, 320]"}


def with_metadata(model, properties):
    for key, value in properties.items():
        model.metadata_props.add(key=key.replace("__", " "), value=value)
    return model


def carried(shape=OPEN, path=None, **properties):
    """What the metadata of x -> Relu -> y says."""
    ends = [make_value(name, shape) for name in "xy"]
    model = make_model([("Relu", "x", "y")], ends[:1], ends[1:])
    return read_metadata_preprocess(with_metadata(model, properties), path)


def how(said, shape=OPEN, asked=None):
    return resolve_preprocess(asked, said, TensorSpec("x", "float32", shape)).preprocess


@pytest.mark.parametrize("task", ["detect", "segment", "pose", "obb"])
def test_ultralytics_boxes_are_letterboxed(task):
    said = carried(**(YOLO | {"task": task, "description": "Ultralytics YOLOv8n model"}))
    assert said.source == "the model's metadata (Ultralytics 8.1.0, imgsz 320)"
    found = how(said)
    assert (found.size, found.resize, found.pad) == ((320, 320), "letterbox", (114.0,))
    assert (found.color, found.scale) == ("rgb", 1 / 255)


def test_ultralytics_other_tasks_channels_and_versions():
    classes = how(carried(**(YOLO | {"task": "classify", "imgsz": "224"})))
    assert (classes.resize, classes.short, classes.size) == ("short-side", 224, (224, 224))
    assert classes.mean == (0.0,)
    detr = carried(**(YOLO | {"description": "Ultralytics rtdetr-l model"}))
    assert how(detr).resize == "stretch"
    grey = how(carried(("n", 1, "h", "w"), **(YOLO | {"channels": "1"})), ("n", 1, "h", "w"))
    assert grey.color == "grey"
    wide = carried(**(YOLO | {"imgsz": "[480, 640]", "version": "\x1b[31m"}))
    assert wide.source == "the model's metadata (Ultralytics, imgsz 480x640)"
    assert how(wide).size == (480, 640)
    v5 = carried(stride="32", names="{0: 'face'}")
    assert "YOLOv5" in v5.source and how(v5).resize == "letterbox"
    assert carried(names="{0: 'face'}") is carried(stride="32", names="", other="") is None


def test_openvinos_model_info():
    given = {
        "model_info__mean_values": "123.675 116.28 103.53",
        "model_info__scale_values": "58.395 57.12 57.375",
        "model_info__resize_type": "fit_to_window_letterbox",
        "model_info__pad_value": "114",
        "model_info__reverse_input_channels": "True",
    }
    found = how(carried(**given), ("n", 3, 64, 64))
    assert (found.resize, found.anchor, found.pad) == ("letterbox", "centre", (114.0,))
    assert (found.scale, found.mean[0], found.std[2], found.color) == (1, 123.675, 57.375, "rgb")
    bare = how(carried(model_info__mean_values="0"), ("n", 3, 64, 64))
    assert (bare.resize, bare.color) == ("stretch", "bgr")
    unit = given | {"model_info__intensity_mode": "scale_to_unit"}
    assert how(carried(**unit), ("n", 3, 64, 64)).scale == 1 / 255
    for name, value in (
        ("resize_type", "crop"),
        ("embedded_processing", "True"),
        ("intensity_mode", "window"),
    ):
        assert carried(**given | {f"model_info__{name}": value}).preprocess is None


def test_timms_configuration_in_metadata_and_in_its_file(tmp_path):
    mean, std = IMAGENET.values()
    cfg = {"input_size": [3, 288, 288], "crop_pct": 0.95, "crop_mode": "center"}
    cfg |= {"mean": mean, "std": std, "interpolation": "bicubic"}
    one = how(carried(pretrained_cfg=json.dumps(cfg)))
    two = how(carried(**{name: str(value) for name, value in cfg.items()}))
    config = {"architecture": "resnet50", "pretrained_cfg": cfg}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = carried(path=tmp_path / "net.onnx")
    assert file.source == "the config.json beside the model (timm, resnet50)"
    assert one == two == how(file)
    assert (one.size, one.resize, one.short_side) == ((288, 288), "short-side", 303)
    usual = how(carried(mean="0.5", std="(0.5, 0.5, 0.5)"), ("n", 3, 224, 224))
    assert (usual.short, usual.mean, usual.std) == (256, (0.5,), (0.5, 0.5, 0.5))
    squash = cfg | {"crop_mode": "squash", "crop_pct": 1.0}
    assert how(carried(pretrained_cfg=json.dumps(squash))).resize == "stretch"
    for strange in (
        {"crop_mode": "border"},
        {"mean": [123.7] * 3},
        {"input_size": [3, 9, 8]},
        {"crop_pct": 0},
        {"interpolation": ["x"]},
        {"input_size": None},
    ):
        assert carried(pretrained_cfg=json.dumps(cfg | strange)).preprocess is None
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert carried(path=tmp_path / "net.onnx") is None


def square(side):
    return {"height": side, "width": side}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"size": {"height": 224, "width": 192}}, ("stretch", (224, 192), None)),
        (
            {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": square(224)},
            ("short-side", (224, 224), 256),
        ),
        (
            {
                "size": {"shortest_edge": 224},
                "crop_pct": 0.875,
                "image_processor_type": "ConvNextImageProcessor",
            },
            ("short-side", (224, 224), 256),
        ),
        (
            {"size": {"shortest_edge": 384}, "image_processor_type": "ConvNextFeatureExtractor"},
            ("stretch", (384, 384), None),
        ),
        ({"size": 224, "do_center_crop": False}, ("stretch", (224, 224), None)),
        ({"size": {"shortest_edge": 800, "longest_edge": 1333}, "do_pad": True}, None),
        ({"size": square(256), "do_center_crop": True, "crop_size": 224}, None),
        ({"size": square(8), "max_image_tiles": 4}, None),
        ({"size": square(8), "resample": 9}, None),
        ({"size": square(8), "do_resize": False}, None),
        ({"size": square(8), "do_rescale": "yes"}, None),
        ({"size": {"height": [], "width": {}}}, None),
        ({"size": {"shortest_edge": 256}, "image_processor_type": "LevitImageProcessor"}, None),
    ],
)
def test_hugging_faces_processors(given, wanted, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(IMAGENET | given))
    said = carried(path=tmp_path / "net.onnx")
    assert said.source.startswith("the preprocessor_config.json beside the model (Hugging Face")
    if wanted is None:
        assert said.preprocess is None and said.reason
        return
    found, preset = how(said), PRESETS["imagenet"]
    assert (found.resize, found.size, found.short_side) == wanted
    assert (found.mean, found.std) == (preset.mean, preset.std)
    assert (found.color, found.interpolation) == ("rgb", "area")


def test_hugging_faces_arithmetic_and_the_folder_onnx(tmp_path):
    (tmp_path / "onnx").mkdir()
    given = {
        "size": {"height": 8, "width": 8},
        "do_normalize": False,
        "resample": 0,
        "rescale_factor": 0.5,
        "do_flip_channel_order": True,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    found = how(carried(path=tmp_path / "onnx" / "model.onnx"))
    assert (found.scale, found.mean, found.std) == (0.5, (0.0,), (1.0,))
    assert (found.color, found.interpolation) == ("bgr", "nearest")
    assert carried(path=tmp_path / "other" / "model.onnx") is None


INFER_CFG = """\
mode: paddle
Preprocess:
- interp: 2
  keep_ratio: false
  target_size:
  - 320
  - 416
  type: Resize
- is_scale: true
  mean: [0.485, 0.456, 0.406]
  std: [0.229, 0.224, 0.225]
  type: NormalizeImage
- type: Permute
label_list:
- it's "anything": {
"""


def test_paddledetections_infer_cfg(tmp_path, wording):
    (tmp_path / "infer_cfg.yml").write_text(INFER_CFG)
    found, preset = how(carried(path=tmp_path / "net.onnx")), PRESETS["picodet"]
    assert (found.size, found.resize, found.interpolation) == ((320, 416), "stretch", "cubic")
    assert (found.mean, found.std, found.scale) == (preset.mean, preset.std, 1 / 255)
    for old, new in (
        ("keep_ratio: false", "keep_ratio: true"),
        ("Permute", "PadStride"),
        ("interp: 2", "interp: [2, 3]"),
        ("- 320", "- &a 320"),
        ("  keep_ratio: false", "  keep_ratio: !!python/object:os.system"),
        ("std: [0.229, ", "std: [[" * 5000),
    ):
        (tmp_path / "infer_cfg.yml").write_text(INFER_CFG.replace(old, new))
        said = carried(path=tmp_path / "net.onnx")
        assert said.preprocess is None and len(said.reason) < 250, new
    assert parse_operators("a: 1\n") == []
    with pytest.raises(ConfigError) as refusal:
        parse_operators("Preprocess:\n  type: x\n")
    wording.check(refusal.value)


def test_characters_of_a_recogniser_are_not_names_of_classes():
    characters = "\n".join("0123456789abcdefghijklmnopqrstuvwxyz")
    line = how(carried(character=characters))
    assert (line.resize, line.size, line.color) == ("fit-height", (48, 320), "bgr")
    old = ("n", 3, 32, "w")
    assert how(carried(old, character=characters), old).size == (32, 320)
    assert carried((1, 3, 640, 640), character=characters) is None
    assert carried(character="\n".join(["text", "title", "figure"] * 9)) is None


def test_what_is_asked_stands_before_what_is_carried(wording):
    spec = TensorSpec("x", "float32", OPEN)
    said = carried(**YOLO)
    plain = resolve_preprocess(None, said, spec)
    assert plain.origin == said.source and plain.notes == ()
    some = resolve_preprocess({"size": (64, 64), "mean": 0.5, "pad": None}, said, spec)
    assert (some.preprocess.size, some.preprocess.mean, some.preprocess.pad) == (
        (64, 64),
        (0.5,),
        (114.0,),
    )
    assert some.origin == f"{said.source}, but for size and mean"
    other = resolve_preprocess(PRESETS["imagenet"], said, spec)
    assert (other.origin, other.preprocess.resize) == ("", "short-side")
    assert other.notes == (
        "the model's metadata (Ultralytics 8.1.0, imgsz 320) says resize letterbox, anchor centre,"
        " pad 114, a black pixel as 0 and a white one as 1 although other options were given,"
        " which are used",
    )
    same = Preprocess(size=(320, 320), resize="letterbox", pad=(114,), scale=1, std=(255,))
    assert resolve_preprocess(same, said, spec).notes == ()  # however it is written
    assert resolve_preprocess("imagenet", said, spec).preprocess == other.preprocess
    with pytest.raises(ConfigError) as refusal:
        resolve_preprocess(5, None, spec)
    wording.check(refusal.value)
    bare = resolve_preprocess({}, None, TensorSpec("x", "float32", (1, 3, 8, 8)))
    assert bare.notes[0].startswith("no preprocessing was given")


def test_a_size_that_is_not_the_inputs():
    fixed = TensorSpec("x", "float32", (1, 3, 640, 640))
    boxes = resolve_preprocess(None, carried(**YOLO), fixed)
    assert (boxes.preprocess.size, boxes.preprocess.resize) == ((640, 640), "letterbox")
    assert "320x320 pixels, the input is of 640x640" in (boxes.notes[0])
    cropped = carried(**(YOLO | {"task": "classify", "imgsz": "700"}))
    classes = resolve_preprocess(None, cropped, fixed)
    assert classes.preprocess.resize == "stretch" and not classes.origin
    assert "700x700 pixels" in classes.notes[0]
    wrong = resolve_preprocess(None, MetadataPreprocess("it", Preprocess(color="grey")), fixed)
    assert "not followed: grey images" in wrong.notes[0]


HOSTILE = [
    *("", "\0", "[" * 3000, "9" * 3000, "nan", "1e999", "-5", "x" * 100_000, "[1, 2, 3, 4, 5, 6]"),
    *("{}", "null", "true", "[]", "[[]]", '{"a": 1}', "\x1b[31m", "\u202e0.5", "0", "1" * 400),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_metadata_is_a_note(text, tmp_path):
    spec = TensorSpec("x", "float32", (1, 3, 8, 8))
    given = [
        *(YOLO | {key: text} for key in ("author", "task", "imgsz", "version", "channels")),
        *({f"model_info__{key}": text} for key in ("mean_values", "scale_values", "pad_value")),
        *({"mean": "0.5", "std": "0.5"} | {key: text} for key in ("mean", "std", "crop_pct")),
        {"pretrained_cfg": text},
        {"character": text},
    ]
    for name in ("preprocessor_config.json", "config.json", "infer_cfg.yml"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(text)
        found = resolve_preprocess(None, carried(path=folder / "net.onnx"), spec)
        assert found.preprocess.size == (8, 8)
    for one in given:
        if "\0" in text and "author" in one:
            continue
        found = resolve_preprocess(None, carried(**one), spec)
        assert found.preprocess.size == (8, 8)
        assert all(len(note) < 500 and note.isprintable() for note in found.notes)


@pytest.mark.parametrize(
    "key",
    [
        "size",
        "image_mean",
        "image_std",
        "resample",
        "crop_size",
        "rescale_factor",
        "do_resize",
        "crop_pct",
        "pretrained_cfg",
        "image_processor_type",
    ],
)
def test_values_of_another_kind_are_a_note(key, tmp_path):
    good = IMAGENET | {"size": {"shortest_edge": 9}, "do_center_crop": True, "crop_size": 8}
    spec = TensorSpec("x", "float32", (1, 3, 8, 8))
    for value in (
        None,
        [],
        {},
        "x",
        10**400,
        -1,
        1e300,
        [[1]],
        {"height": []},
        {"shortest_edge": 0},
        True,
        [None] * 3,
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(good | {key: value}))
        how = resolve_preprocess(None, carried(path=tmp_path / "net.onnx"), spec).preprocess
        assert how.size == (8, 8), value


def test_what_is_no_file_or_too_large_beside_the_model(tmp_path):
    (tmp_path / "preprocessor_config.json").mkdir()
    assert carried(path=tmp_path / "net.onnx") is None
    (tmp_path / "config.json").write_text('{"pretrained_cfg": {}}' + " " * (1 << 19))
    assert "at most 256 KiB" in carried(path=tmp_path / "net.onnx").reason


@pytest.fixture
def yolo(small_cnn, tmp_path):
    """The small network as Ultralytics exports."""
    model = with_metadata(onnx.load(small_cnn), YOLO | {"imgsz": "[16, 16]"})
    return save_net(model, tmp_path / "yolo.onnx")


QUICK = ("--effort", 0, "--duration", 0, "--accept")


@pytest.mark.slow
def test_the_first_screen_says_where_the_preset_came_from(yolo, pictures, tmp_path, command):
    words = "build", yolo, "--images", pictures, *QUICK, "--out"
    said = command(*words, tmp_path / "a")
    assert f"20 samples from {pictures}: yolo: rgb 16x16, letterbox" in said
    assert "; from the model's metadata (Ultralytics 8.1.0, imgsz 16)" in said
    assert "metadata" not in command(*words, tmp_path / "b", "--preprocess", "yolo")
    caches = [(tmp_path / name / "calib8/yolo.cache").read_bytes() for name in "ab"]
    assert caches[0] == caches[1]
    said = command(*words, tmp_path / "b", "--preprocess", "imagenet")
    assert "says resize letterbox, anchor centre, pad 114" in read_markdown(tmp_path / "b")
    assert "the preprocessing changed" in said  # and the cache is not used again
    assert "imgsz 16), but for pad" in command(*words, tmp_path / "c", "--pad", 3)
    built = onnx.load(tmp_path / "a" / "yolo.int8.onnx")
    assert {one.key for one in built.metadata_props} >= set(YOLO)


@pytest.mark.slow
def test_the_other_commands_follow_it_too(yolo, pictures, tmp_path, command):
    out = tmp_path / "o"
    command("build", yolo, "--images", pictures, *QUICK, "--out", out)
    engine = out / "yolo.int8.onnx"
    cache = "calibrate", yolo, "--out", tmp_path / "c.cache"
    for words in (cache, ("bench", engine, "--duration", 0), ("compare", yolo, engine)):
        assert "from the model's metadata (Ultralytics" in command(*words, "--images", pictures)
    report = json.loads((out / "report.json").read_text())
    assert report["feed"]["preprocess"]["resize"] == "letterbox"
    command("explain", out, "--images", pictures, "--limit", 2, "--pad", 3)


def test_arrays_are_fed_as_they_are(yolo):
    spec = TensorSpec("x", "float32", ("batch", 3, 16, 16))
    feed = open_feed(
        np.zeros((2, 3, 16, 16), np.float32), [spec], metadata_preprocess=carried(**YOLO)
    )
    assert feed.preprocess is None and feed.origin == ""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{0: 'face', 2: 'hand'}", {0: "face", 2: "hand"}),
        ("['face', 'hand']", {0: "face", 1: "hand"}),
        ("{0: 1, 'a': 'b', 3: ''}", {}),
        ("__import__('os')", {}),
        ("(" * 9999, {}),
        ("3", {}),
        ("", {}),
        (f"['{'x' * 70000}']", {}),
    ],
)
def test_class_names_are_read_where_they_are_plain(text, names):
    model = make_model("y = Relu (x)", {"x": [1]}, {"y": [1]})
    model.metadata_props.add(key="names", value=text)
    assert read_class_names(model) == names
