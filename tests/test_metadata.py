"""Preprocessing of pictures from a model's metadata or from a file beside it."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest

from deploy.errors import ConfigError
from deploy.feed.feed import Dataset
from deploy.feed.model_preprocess import MetadataPreprocess, resolve_preprocess
from deploy.feed.preprocess import PRESETS, Preprocess
from deploy.frontends.metadata import read_class_names, read_metadata_preprocess
from deploy.frontends.metadata.exporters import parse_operators
from deploy.tensors import TensorSpec
from tests.models import make_model, make_value, read_markdown, save_net

OPEN = ("n", 3, "h", "w")
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
YOLO = {"author": "Ultralytics", "version": "8.1.0", "task": "detect", "imgsz": "[320, 320]"}


def save_with_metadata(model, properties):
    for key, value in properties.items():
        model.metadata_props.add(key=key.replace("__", " "), value=value)
    return model


def make_metadata(shape=OPEN, path=None, **properties):
    """Return the preprocessing from the metadata of x -> Relu -> y."""
    ends = [make_value(name, shape) for name in "xy"]
    model = make_model([("Relu", "x", "y")], ends[:1], ends[1:])
    return read_metadata_preprocess(save_with_metadata(model, properties), path)


def resolve(metadata, shape=OPEN, options=None):
    return resolve_preprocess(options, metadata, TensorSpec("x", "float32", shape)).preprocess


@pytest.mark.parametrize("task", ["detect", "segment", "pose", "obb"])
def test_ultralytics_boxes_are_letterboxed(task):
    metadata = make_metadata(**(YOLO | {"task": task, "description": "Ultralytics YOLOv8n model"}))
    assert metadata.source == "the model's metadata (Ultralytics 8.1.0, imgsz 320)"
    preprocess = resolve(metadata)
    assert (preprocess.size, preprocess.resize, preprocess.pad) == (
        (320, 320),
        "letterbox",
        (114.0,),
    )
    assert (preprocess.color, preprocess.scale) == ("rgb", 1 / 255)


def test_ultralytics_other_tasks_channels_and_versions():
    classes = resolve(make_metadata(**(YOLO | {"task": "classify", "imgsz": "224"})))
    assert (classes.resize, classes.resized_short_side, classes.size) == (
        "short-side",
        224,
        (224, 224),
    )
    assert classes.mean == (0.0,)
    detr = make_metadata(**(YOLO | {"description": "Ultralytics rtdetr-l model"}))
    assert resolve(detr).resize == "stretch"
    grey = resolve(
        make_metadata(("n", 1, "h", "w"), **(YOLO | {"channels": "1"})), ("n", 1, "h", "w")
    )
    assert grey.color == "grey"
    wide = make_metadata(**(YOLO | {"imgsz": "[480, 640]", "version": "\x1b[31m"}))
    assert wide.source == "the model's metadata (Ultralytics, imgsz 480x640)"
    assert resolve(wide).size == (480, 640)
    v5 = make_metadata(stride="32", names="{0: 'face'}")
    assert "YOLOv5" in v5.source
    assert resolve(v5).resize == "letterbox"
    assert (
        make_metadata(names="{0: 'face'}") is make_metadata(stride="32", names="", other="") is None
    )


def test_yolov5_classifier_is_cropped_and_normalized():
    ends = [make_value("x", ("n", 3, 160, 160)), make_value("y", ("n", 3))]
    names = {"stride": "32", "names": "{0: 'cat', 1: 'dog', 2: 'hen'}"}
    model = save_with_metadata(make_model([("Relu", "x", "y")], ends[:1], ends[1:]), names)
    preprocess = resolve(read_metadata_preprocess(model, None), ("n", 3, 160, 160))
    assert (preprocess.resize, preprocess.resized_short_side, preprocess.interpolation) == (
        "short-side",
        160,
        "linear",
    )
    assert (preprocess.mean, preprocess.color) == (PRESETS["imagenet"].mean, "rgb")


def test_yolov5_classifier_may_have_an_input_without_shape():
    ends = [make_value("x", None), make_value("y", ("n", 3))]
    names = {"stride": "32", "names": "['cat', 'dog', 'hen']"}
    model = save_with_metadata(make_model([("Relu", "x", "y")], ends[:1], ends[1:]), names)
    assert read_metadata_preprocess(model, None).preprocess.short_side == 224


def test_openvino_model_info_is_read():
    entries = {
        "model_info__mean_values": "123.675 116.28 103.53",
        "model_info__scale_values": "58.395 57.12 57.375",
        "model_info__resize_type": "fit_to_window_letterbox",
        "model_info__pad_value": "114",
        "model_info__reverse_input_channels": "True",
    }
    preprocess = resolve(make_metadata(**entries), ("n", 3, 64, 64))
    assert (preprocess.resize, preprocess.anchor, preprocess.pad) == (
        "letterbox",
        "centre",
        (114.0,),
    )
    assert (preprocess.scale, preprocess.mean[0], preprocess.std[2], preprocess.color) == (
        1,
        123.675,
        57.375,
        "rgb",
    )
    bare = resolve(make_metadata(model_info__mean_values="0"), ("n", 3, 64, 64))
    assert (bare.resize, bare.color) == ("stretch", "bgr")
    unit = entries | {"model_info__intensity_mode": "scale_to_unit"}
    assert resolve(make_metadata(**unit), ("n", 3, 64, 64)).scale == 1 / 255
    for name, value in (
        ("resize_type", "crop"),
        ("embedded_processing", "True"),
        ("intensity_mode", "window"),
    ):
        assert make_metadata(**entries | {f"model_info__{name}": value}).preprocess is None


def test_timm_configuration_is_read(tmp_path):
    mean, std = IMAGENET.values()
    cfg = {"input_size": [3, 288, 288], "crop_pct": 0.95, "crop_mode": "center"}
    cfg |= {"mean": mean, "std": std, "interpolation": "bicubic"}
    from_config = resolve(make_metadata(pretrained_cfg=json.dumps(cfg)))
    two = resolve(make_metadata(**{name: str(value) for name, value in cfg.items()}))
    config = {"architecture": "resnet50", "pretrained_cfg": cfg}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = make_metadata(path=tmp_path / "net.onnx")
    assert file.source == "the config.json beside the model (timm, resnet50)"
    assert from_config == two == resolve(file)
    assert (from_config.size, from_config.resize, from_config.short_side) == (
        (288, 288),
        "short-side",
        303,
    )
    from_entries = resolve(make_metadata(mean="0.5", std="(0.5, 0.5, 0.5)"), ("n", 3, 224, 224))
    assert (from_entries.resized_short_side, from_entries.mean, from_entries.std) == (
        256,
        (0.5,),
        (0.5, 0.5, 0.5),
    )
    squash = cfg | {"crop_mode": "squash", "crop_pct": 1.0}
    assert resolve(make_metadata(pretrained_cfg=json.dumps(squash))).resize == "stretch"
    for strange in (
        {"crop_mode": "border"},
        {"mean": [123.7] * 3},
        {"input_size": [3, 9, 8]},
        {"crop_pct": 0},
        {"crop_pct": 1e-320},  # the resized side would be infinite
        {"interpolation": ["x"]},
        {"input_size": None},
    ):
        assert make_metadata(pretrained_cfg=json.dumps(cfg | strange)).preprocess is None
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert make_metadata(path=tmp_path / "net.onnx") is None


def square(side):
    return {"height": side, "width": side}


@pytest.mark.parametrize(
    ("config", "expected"),
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
        (
            {"size": 224, "feature_extractor_type": "ConvNextFeatureExtractor"},
            ("short-side", (224, 224), 256),
        ),
        (
            {"size": 8, "crop_pct": 1e-320, "feature_extractor_type": "ConvNextFeatureExtractor"},
            None,
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
def test_hugging_face_processors_are_read(config, expected, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(IMAGENET | config))
    metadata = make_metadata(path=tmp_path / "net.onnx")
    assert metadata.source.startswith("the preprocessor_config.json beside the model (Hugging Face")
    if expected is None:
        assert metadata.preprocess is None
        assert metadata.reason
        return
    preprocess, preset = resolve(metadata), PRESETS["imagenet"]
    assert (preprocess.resize, preprocess.size, preprocess.short_side) == expected
    assert (preprocess.mean, preprocess.std) == (preset.mean, preset.std)
    assert (preprocess.color, preprocess.interpolation) == ("rgb", "area")


def test_processor_without_resize_is_refused_by_its_flag(tmp_path):
    config = IMAGENET | {"size": {"height": 8, "width": 8}, "do_resize": False}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    assert "do_resize" in make_metadata(path=tmp_path / "net.onnx").reason


def test_hugging_face_config_beside_onnx_folder(tmp_path):
    (tmp_path / "onnx").mkdir()
    config = {
        "size": {"height": 8, "width": 8},
        "do_normalize": False,
        "resample": 0,
        "rescale_factor": 0.5,
        "do_flip_channel_order": True,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    preprocess = resolve(make_metadata(path=tmp_path / "onnx" / "model.onnx"))
    assert (preprocess.scale, preprocess.mean, preprocess.std) == (0.5, (0.0,), (1.0,))
    assert (preprocess.color, preprocess.interpolation) == ("bgr", "nearest")
    assert make_metadata(path=tmp_path / "other" / "model.onnx") is None


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
- 'it''s "anything": {'
"""


def test_paddledetection_infer_cfg_is_read(tmp_path, wording):
    (tmp_path / "infer_cfg.yml").write_text(INFER_CFG)
    preprocess, preset = resolve(make_metadata(path=tmp_path / "net.onnx")), PRESETS["picodet"]
    assert (preprocess.size, preprocess.resize, preprocess.interpolation) == (
        (320, 416),
        "stretch",
        "cubic",
    )
    assert (preprocess.mean, preprocess.std, preprocess.scale) == (preset.mean, preset.std, 1 / 255)
    for old, new in (
        ("keep_ratio: false", "keep_ratio: true"),
        ("is_scale: true", "is_scale: 2"),
        ("Permute", "PadStride"),
        ("interp: 2", "interp: [2, 3]"),
        ("- 320", "- [320]"),
        ("- type: Permute", "- Permute"),
        ("  keep_ratio: false", "  keep_ratio: !!python/object:os.system"),
        ("std: [0.229, ", "std: [[" * 5000),
    ):
        (tmp_path / "infer_cfg.yml").write_text(INFER_CFG.replace(old, new))
        metadata = make_metadata(path=tmp_path / "net.onnx")
        assert metadata.preprocess is None, new
        assert len(metadata.reason) < 250, new
    assert parse_operators("a: 1\n") == []
    with pytest.raises(ConfigError) as refusal:
        parse_operators("Preprocess:\n  type: x\n")
    wording.check(refusal.value)


def test_recogniser_characters_are_not_classes():
    characters = "\n".join("0123456789abcdefghijklmnopqrstuvwxyz")
    line = resolve(make_metadata(character=characters))
    assert (line.resize, line.size, line.color) == ("fit-height", (48, 320), "bgr")
    old = ("n", 3, 32, "w")
    assert resolve(make_metadata(old, character=characters), old).size == (32, 320)
    assert make_metadata((1, 3, 640, 640), character=characters) is None
    assert make_metadata(character="\n".join(["text", "title", "figure"] * 9)) is None


def test_options_override_metadata(wording):
    spec = TensorSpec("x", "float32", OPEN)
    metadata = make_metadata(**YOLO)
    plain = resolve_preprocess(None, metadata, spec)
    assert plain.origin == metadata.source
    assert plain.notes == ()
    with_options = resolve_preprocess({"size": (64, 64), "mean": 0.5, "pad": None}, metadata, spec)
    assert (
        with_options.preprocess.size,
        with_options.preprocess.mean,
        with_options.preprocess.pad,
    ) == (
        (64, 64),
        (0.5,),
        (114.0,),
    )
    assert with_options.origin == f"{metadata.source}, but for size, mean"
    assert not resolve_preprocess({"size": (64, 64)}, None, spec).origin  # half the user's own
    with_preset = resolve_preprocess(PRESETS["imagenet"], metadata, spec)
    assert (with_preset.origin, with_preset.preprocess.resize) == ("", "short-side")
    assert with_preset.notes == (
        "the model's metadata (Ultralytics 8.1.0, imgsz 320) says yolo: rgb 320x320, letterbox"
        " (linear), pixels / 255, mean 0, std 1, nchw, although other options were given, which"
        " are used",
    )
    expected = Preprocess(size=(320, 320), resize="letterbox", pad=(114,), scale=1, std=(255,))
    assert resolve_preprocess(expected, metadata, spec).notes == ()  # however it is written
    assert resolve_preprocess("imagenet", metadata, spec).preprocess == with_preset.preprocess
    with pytest.raises(ConfigError) as refusal:
        resolve_preprocess(5, None, spec)
    wording.check(refusal.value)
    bare = resolve_preprocess({}, None, TensorSpec("x", "float32", (1, 3, 8, 8)))
    assert bare.notes[0].startswith("no preprocessing was given")


@pytest.mark.parametrize(
    ("requested", "dtype", "is_assumed"),
    [
        (None, "float32", True),
        ({"size": (8, 8)}, "float32", True),
        (None, "uint8", False),
        ("unit", "float32", False),
        ({"mean": (0.5,)}, "float32", False),
    ],
)
def test_scale_is_assumed_unless_given(requested, dtype, is_assumed):
    spec = TensorSpec("x", dtype, (1, 3, 8, 8))
    resolved = resolve_preprocess(requested, None, spec)
    assert resolved.has_assumed_scale == is_assumed


@pytest.mark.parametrize(
    "difference",
    [{"pad": (7,)}, {"resize": "stretch"}, {"resize": "letterbox", "anchor": "top-left"}],
)
def test_other_border_of_text_lines_is_noted(difference):
    line = Preprocess(size=(48, 320), resize="fit-height", color="bgr")
    metadata = MetadataPreprocess("the metadata", replace(line, layout="nchw", **difference))
    spec = TensorSpec("x", "float32", (1, 3, 48, 320))
    assert resolve_preprocess(line, metadata, spec).notes


def test_size_unlike_input_is_noted():
    fixed = TensorSpec("x", "float32", (1, 3, 640, 640))
    boxes = resolve_preprocess(None, make_metadata(**YOLO), fixed)
    assert (boxes.preprocess.size, boxes.preprocess.resize) == ((640, 640), "letterbox")
    assert "320x320 pixels, the input is of 640x640" in (boxes.notes[0])
    cropped = make_metadata(**(YOLO | {"task": "classify", "imgsz": "700"}))
    classes = resolve_preprocess(None, cropped, fixed)
    assert classes.preprocess.resize == "stretch"
    assert classes.origin == "calib8's default"
    assert "700x700 pixels" in classes.notes[0]
    wrong = resolve_preprocess(None, MetadataPreprocess("it", Preprocess(color="grey")), fixed)
    assert "not followed: grey images" in wrong.notes[0]


HOSTILE = [
    *("", "\0", "[" * 3000, "9" * 3000, "nan", "1e999", "-5", "x" * 100_000, "[1, 2, 3, 4, 5, 6]"),
    *("{}", "null", "true", "[]", "[[]]", '{"a": 1}', "\x1b[31m", "\u202e0.5", "0", "1" * 400),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_metadata_gives_a_note(text, tmp_path):
    spec = TensorSpec("x", "float32", (1, 3, 8, 8))
    hostile_entries = [
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
        resolved = resolve_preprocess(None, make_metadata(path=folder / "net.onnx"), spec)
        assert resolved.preprocess.size == (8, 8)
    for entry in hostile_entries:
        if "\0" in text and "author" in entry:
            continue
        resolved = resolve_preprocess(None, make_metadata(**entry), spec)
        assert resolved.preprocess.size == (8, 8)
        assert all(len(note) < 500 and note.isprintable() for note in resolved.notes)


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
def test_values_of_other_types_are_noted(key, tmp_path):
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
        resolve = resolve_preprocess(
            None, make_metadata(path=tmp_path / "net.onnx"), spec
        ).preprocess
        assert resolve.size == (8, 8), value


def test_unreadable_config_file_is_ignored(tmp_path):
    (tmp_path / "preprocessor_config.json").mkdir()
    assert make_metadata(path=tmp_path / "net.onnx") is None
    (tmp_path / "config.json").write_text('{"pretrained_cfg": {}}' + " " * (1 << 19))
    assert "at most 256 KiB" in make_metadata(path=tmp_path / "net.onnx").reason


@pytest.fixture
def yolo_model(small_cnn, tmp_path):
    """The small network as Ultralytics exports."""
    model = save_with_metadata(onnx.load(small_cnn), YOLO | {"imgsz": "[16, 16]"})
    return save_net(model, tmp_path / "yolo.onnx")


QUICK = ("--effort", 0, "--duration", 0, "--accept")


@pytest.mark.slow
def test_screen_names_source_of_preset(yolo_model, pictures, tmp_path, command):
    arguments = "build", yolo_model, "--images", pictures, *QUICK, "--out"
    output = command(*arguments, tmp_path / "a")
    assert f"20 samples from {pictures}: yolo: rgb 16x16, letterbox" in output
    assert "; from the model's metadata (Ultralytics 8.1.0, imgsz 16)" in output
    assert "metadata" not in command(*arguments, tmp_path / "b", "--preprocess", "yolo")
    caches = [(tmp_path / name / "calib8/yolo.cache").read_bytes() for name in "ab"]
    assert caches[0] == caches[1]
    output = command(*arguments, tmp_path / "b", "--preprocess", "imagenet")
    assert "imgsz 16) says yolo: rgb 16x16, letterbox" in read_markdown(tmp_path / "b")
    assert "the preprocessing changed" in output  # and the cache is not used again
    assert "imgsz 16), but for pad" in command(*arguments, tmp_path / "c", "--pad", 3)
    built = onnx.load(tmp_path / "a" / "yolo.int8.onnx")
    assert {entry.key for entry in built.metadata_props} >= set(YOLO)


@pytest.mark.slow
def test_other_commands_follow_metadata(yolo_model, pictures, tmp_path, command):
    out = tmp_path / "o"
    command("build", yolo_model, "--images", pictures, *QUICK, "--out", out)
    engine = out / "yolo.int8.onnx"
    cache = "calibrate", yolo_model, "--out", tmp_path / "c.cache"
    for arguments in (cache, ("bench", engine, "--duration", 0), ("compare", yolo_model, engine)):
        assert "from the model's metadata (Ultralytics" in command(*arguments, "--images", pictures)
    report = json.loads((out / "report.json").read_text())
    assert report["feed"]["preprocess"]["resize"] == "letterbox"
    command("explain", out, "--images", pictures, "--limit", 2, "--pad", 3)


def test_metadata_does_not_change_arrays(yolo_model):
    spec = TensorSpec("x", "float32", ("batch", 3, 16, 16))
    dataset = Dataset(source=np.zeros((2, 3, 16, 16), np.float32))
    feed = dataset.open([spec], metadata_preprocess=make_metadata(**YOLO))
    assert feed.preprocess is None
    assert feed.origin == ""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{0: 'face', 2: 'hand'}", {0: "face", 2: "hand"}),
        ("['face', 'hand']", {0: "face", 1: "hand"}),
        ("{0: 1, 'a': 'b', 3: ''}", {}),
        ("__import__('os')", {}),
        ("(" * 9999, {}),
        ("{[]: 'face'}", {}),
        ("3", {}),
        ("", {}),
        (f"['{'x' * 70000}']", {}),
    ],
)
def test_plain_class_names_are_read(text, names):
    model = make_model("y = Relu (x)", {"x": [1]}, {"y": [1]})
    model.metadata_props.add(key="names", value=text)
    assert read_class_names(model) == names
