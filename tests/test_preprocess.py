import dataclasses
import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.cli import cli
from deploy.errors import ConfigError, FeedError
from deploy.feed.pixels import apply, fit, letterbox_size, short_side_size
from deploy.feed.preprocess import PRESETS, Preprocess, preset, resolve, with_options
from deploy.tensors import TensorSpec


def spec(*shape, dtype="float32"):
    return TensorSpec("image", dtype, shape)


def pixels(height=40, width=60, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def ready(**options):
    base = {"size": (24, 32), "color": "rgb", "layout": "nchw"}
    return with_options(Preprocess(), {**base, **options})


def test_the_arithmetic_is_three_separate_float32_roundings():
    how = ready(size=(40, 60), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    image = pixels()
    got = apply(image, how)
    assert got.shape == (1, 3, 40, 60)
    assert got.dtype == np.float32
    for channel, bgr in enumerate((2, 1, 0)):
        for y, x in ((0, 0), (7, 13), (39, 59)):
            value = np.float32(image[y, x, bgr]) * np.float32(1 / 255)
            value = np.float32(value - np.float32(how.mean[channel]))
            value = np.float32(value / np.float32(how.std[channel]))
            assert got[0, channel, y, x].tobytes() == value.tobytes()


def test_layouts_and_channel_orders_hold_the_same_numbers():
    image = pixels()
    rgb = apply(image, ready())
    assert np.array_equal(apply(image, ready(layout="nhwc")), rgb.transpose(0, 2, 3, 1))
    assert np.array_equal(apply(image, ready(color="bgr")), rgb[:, ::-1])
    grey = apply(image[:, :, :1], ready(color="grey"))
    assert grey.shape == (1, 1, 24, 32)
    assert np.array_equal(grey[0, 0], apply(image, ready(color="bgr"))[0, 0])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_letterbox_keeps_the_aspect_and_pads_through_the_same_arithmetic(layout):
    how = ready(size=(32, 32), resize="letterbox", pad=(114.0,), mean=(0.5,), layout=layout)
    image = np.full((40, 80, 3), 200, np.uint8)
    out = apply(image, how)[0]
    plane = out[0] if layout == "nchw" else out[:, :, 0]
    pad = np.float32(np.float32(114) * np.float32(1 / 255)) - np.float32(0.5)
    body = np.float32(np.float32(200) * np.float32(1 / 255)) - np.float32(0.5)
    assert np.all(plane[:8] == pad)
    assert np.all(plane[24:] == pad)
    assert np.all(plane[8:24] == body)
    top = apply(image, dataclasses.replace(how, anchor="top-left"))[0]
    top_plane = top[0] if layout == "nchw" else top[:, :, 0]
    assert np.all(top_plane[:16] == body)
    assert np.all(top_plane[16:] == pad)


def test_text_lines_are_fitted_to_the_height_and_padded_with_exact_zero():
    how, _ = resolve(preset("ppocr-rec"), spec("n", 3, 48, "w"))
    out = apply(np.full((24, 50, 3), 255, np.uint8), how)[0]
    assert out.shape == (3, 48, 320)
    assert np.all(out[:, :, :100] == 1)
    assert np.all(out[:, :, 100:] == 0)
    assert fit(np.zeros((10, 500, 3), np.uint8), how)[0].shape == (48, 320, 3)


def test_imagenet_resizes_256_and_crops_the_centre_224():
    how, notes = resolve(preset("imagenet"), spec(1, 3, 224, 224))
    assert notes == ()
    assert how.short == 256
    image = pixels(300, 500)
    placed, corner = fit(image, how)
    whole = cv2.resize(image, (426, 256), interpolation=cv2.INTER_AREA)
    assert corner == (0, 0)
    assert np.array_equal(placed, whole[16:240, 101:325])


def test_area_becomes_linear_where_a_side_grows():
    image = pixels(10, 10)
    area = apply(image, ready(interpolation="area"))
    assert np.array_equal(area, apply(image, ready(interpolation="linear")))
    small = apply(pixels(100, 100), ready(interpolation="area"))
    assert not np.array_equal(small, apply(pixels(100, 100), ready(interpolation="linear")))


side = st.integers(1, 5000)


@given(side, side, side, side)
def test_letterbox_touches_the_box_and_stays_inside(height, width, box_h, box_w):
    inner = letterbox_size((height, width), (box_h, box_w))
    assert 1 <= inner[0] <= box_h
    assert 1 <= inner[1] <= box_w
    assert inner[0] == box_h or inner[1] == box_w
    ratio = min(box_h / height, box_w / width)
    assert abs(inner[0] - max(1, height * ratio)) <= 0.5 + 1e-6
    assert abs(inner[1] - max(1, width * ratio)) <= 0.5 + 1e-6


@given(side, side, side)
def test_short_side_has_its_length_and_the_other_is_not_shorter(height, width, short):
    size = short_side_size((height, width), short)
    assert min(size) == short
    assert (size[0] <= size[1]) == (height <= width) or size[0] == size[1]


sizes = st.tuples(st.integers(1, 64), st.integers(1, 64))


@settings(max_examples=60)
@given(
    sizes,
    sizes,
    st.sampled_from(["stretch", "letterbox", "short-side", "fit-height"]),
    st.sampled_from(["nearest", "linear", "cubic", "area", "lanczos"]),
    st.sampled_from(["rgb", "bgr", "grey"]),
    st.sampled_from(["nchw", "nhwc"]),
)
def test_every_combination_fills_the_whole_input(
    source, size, resize, interpolation, color, layout
):
    image = pixels(*source, 1 if color == "grey" else 3)
    how = Preprocess(
        size=size, resize=resize, interpolation=interpolation, color=color, layout=layout
    )
    out = apply(image, how)
    shape = (how.channels, *size) if layout == "nchw" else (*size, how.channels)
    assert out.shape == (1, *shape)
    assert np.isfinite(out).all()
    assert out.min() >= 0
    assert out.max() <= 1
    assert out.tobytes() == apply(image, how).tobytes()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_json_and_resolve_against_a_model(name):
    how = PRESETS[name]
    assert Preprocess.from_json(json.loads(json.dumps(how.to_json()))) == how
    channels = 1 if how.color == "grey" else 3
    resolved, notes = resolve(how, spec("n", channels, 64, 96))
    assert resolved.size == (64, 96)
    assert notes == ()
    assert resolve(resolved, spec("n", channels, 64, 96))[0] == resolved


def test_without_any_option_the_model_decides_and_the_note_says_so():
    how, notes = resolve(None, spec(1, 1, 28, 28))
    assert (how.color, how.size, how.layout, how.scale) == ("grey", (28, 28), "nchw", 1 / 255)
    assert "28x28" in notes[0]
    assert "grey" in notes[0]
    how, _ = resolve(None, spec(None, 224, 200, 3))
    assert (how.color, how.size, how.layout) == ("rgb", (224, 200), "nhwc")


def test_options_override_a_preset_and_none_leaves_it():
    how = with_options(preset("imagenet"), {"size": (192, 192), "color": "bgr", "mean": None})
    assert how.size == (192, 192)
    assert how.color == "bgr"
    assert how.mean == preset("imagenet").mean


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": "leterbox"}, "resize must be one of .*did you mean 'letterbox'"),
        ({"interpolation": "bicubic"}, "interpolation must be one of"),
        ({"color": "gray"}, "color must be one of"),
        ({"layout": "chw"}, "layout must be one of"),
        ({"anchor": "left"}, "anchor must be one of"),
        ({"size": (0, 224)}, "size must be whole pixels"),
        ({"size": (224,)}, r"size must be \(height, width\)"),
        ({"size": (224, 2.5)}, "size must be whole pixels"),
        ({"short_side": True}, "short_side must be whole pixels"),
        ({"mean": (0.1, 0.2)}, "mean must have one value or one per channel"),
        ({"color": "grey", "std": (1, 1, 1)}, "std must have one value .*got 3"),
        ({"std": (1.0, 0.0, 1.0)}, "above 0"),
        ({"std": (1e-60,)}, "above 0"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"mean": ("0.5",)}, "mean must be finite numbers"),
        ({"men": (0.5,)}, "'men' is no preprocessing option.*'mean'"),
    ],
)
def test_wrong_options_are_told_by_name_and_rule(options, message):
    with pytest.raises(ConfigError, match=message):
        with_options(Preprocess(), options)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'imagenet'"):
        preset("imagnet")


@pytest.mark.parametrize(
    ("how", "target", "message"),
    [
        (Preprocess(size=(32, 32)), spec(1, 3, 224, 224), "size must fit .*32x32"),
        (Preprocess(color="grey"), spec(1, 3, 8, 8), "grey images have 1 channels.*with 3"),
        (None, spec(1, 4, 8, 8), "rgb images have 3 channels.*with 4"),
        (
            None,
            spec(1, 3, "h", "w"),
            "leaves its size open; give a size, such as 224x224, or 224x\\* or native",
        ),
        (None, spec(1, 3, 64, "w"), "size open; give a size, such as 64x224, or 64x\\* for"),
        (None, spec(1, "h", 48, 3), "size open; give a size, such as 224x48, or \\*x48 for"),
        (None, spec(1, 16), "need an input of 4 dimensions"),
        (Preprocess(mean=(1, 2, 3)), spec(1, 1, 8, 8), "mean must have one value"),
    ],
)
def test_options_that_contradict_the_model_are_told(how, target, message):
    with pytest.raises(FeedError, match=message):
        resolve(how, target)


def test_a_crop_larger_than_the_short_side_is_refused():
    how = Preprocess(resize="short-side", short_side=200)
    with pytest.raises(ConfigError, match="short_side must reach the crop of 224x224"):
        resolve(how, spec(1, 3, 224, 224))


@pytest.mark.parametrize(
    ("scale", "mean", "way_out"),
    [(1 / 255, (127.5,), "scale 1 .* such as 0.5$"), (1 / 127.5, (103.9, 116.8, 123.7), "0 to 2,")],
)
def test_a_mean_that_no_scaled_pixel_reaches_is_refused(scale, mean, way_out):
    how = Preprocess(scale=scale, mean=mean)
    with pytest.raises(ConfigError, match=f"mean is taken from scaled pixels.*{way_out}"):
        resolve(how, spec(1, 3, 8, 8))
    assert resolve(replace(how, scale=1.0), spec(1, 3, 8, 8))[0].mean == mean


def test_means_at_the_ends_of_scaled_pixels_and_below_them_are_taken():
    for mean in (1.0, 0.0, -1.0):
        assert resolve(Preprocess(mean=(mean,)), spec(1, 3, 8, 8))[0].mean == (mean,)


def test_the_command_says_in_which_unit_a_mean_is(small_cnn, pictures, tmp_path):
    asked = ["build", str(small_cnn), "--images", str(pictures), "--out", str(tmp_path / "out")]
    run = CliRunner().invoke(cli, [*asked, "--mean", "127.5", "--std", "127.5"])
    assert run.exit_code == 1 and "give scale 1" in str(run.exception)
    said = ["--effort", "0", "--duration", "0", "--mean", "127.5", "--std", "127.5", "--scale", "1"]
    assert CliRunner().invoke(cli, [*asked, *said]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--short-side 16", "short_side is for resize short-side, got it with resize stretch"),
        ("--resize letterbox --short-side 16", "got it with resize letterbox; give resize short-"),
        ("--pad 114", "pad is for resize letterbox and fit-height, got it with resize stretch"),
        ("--preprocess imagenet --pad 114", "got it with resize short-side; give resize letterbox"),
        ("--preprocess imagenet --short-side 16", None),
        ("--resize short-side --short-side 16", None),
        ("--resize letterbox --pad 114", None),
    ],
)
def test_an_option_of_another_way_to_the_size_is_refused(
    words, message, small_cnn, pictures, tmp_path
):
    asked = ["calibrate", str(small_cnn), "--images", str(pictures)]
    run = CliRunner().invoke(cli, [*asked, "--out", str(tmp_path / "c.cache"), *words.split()])
    assert run.exit_code == (1 if message else 0), run.output
    assert message is None or message in str(run.exception)
