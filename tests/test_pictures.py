"""Pixels: preprocessing, damaged pictures, and pictures in the report."""

import base64
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deploy.errors import ConfigError, FeedError
from deploy.feed import decoding as decoding_module
from deploy.feed import headers, pixels, preprocess, sources
from deploy.feed.decoding import capture_decoder_output, decode_image
from deploy.feed.feed import Dataset, open_feed
from deploy.feed.pixels import input_to_image, preprocess_image, resize_to_input
from deploy.feed.preprocess import (
    PRESETS,
    Preprocess,
    complete_preprocess,
    short_side_size,
    with_options,
)
from deploy.feed.sampling import spread_evenly
from deploy.report import Report, to_html, to_json, to_markdown
from deploy.report.parts import FeedPart
from deploy.report.previews import pictures_part, raster
from deploy.tensors import TensorSpec

OPEN = "size open; give a size, such as "
side, sizes = st.integers(1, 5000), st.tuples(st.integers(1, 64), st.integers(1, 64))


def spec(*shape, dtype="float32"):
    return TensorSpec("image", dtype, shape)


def make_noise(height=40, width=60, channels=3):
    rng = np.random.default_rng(height * width)
    return rng.integers(0, 256, (height, width, channels), np.uint8)


def tiff_with_alpha(pixels, order="<"):
    """A TIFF of uint8 RGBA whose colors are not multiplied by alpha."""
    height, width, _ = pixels.shape
    shorts = {256: width, 257: height, 259: 1, 262: 2, 277: 4, 278: height, 338: 2}
    header_bytes = 8 + 2 + 12 * 10 + 4
    fields = [(tag, struct.pack(order + "HIH2x", 3, 1, value)) for tag, value in shorts.items()]
    fields.append((258, struct.pack(order + "HII", 3, 4, header_bytes)))  # bits
    fields.append((273, struct.pack(order + "HII", 4, 1, header_bytes + 8)))  # offset of the pixels
    fields.append((279, struct.pack(order + "HII", 4, 1, pixels.size)))
    magic = b"II*\0" if order == "<" else b"MM\0*"
    directory = [struct.pack(order + "H", tag) + field for tag, field in sorted(fields)]
    head = magic + struct.pack(order + "IH", 8, len(fields)) + b"".join(directory) + bytes(4)
    return head + struct.pack(order + "4H", 8, 8, 8, 8) + pixels.tobytes()


def complete_options(**options):
    base = {"size": (24, 32), "color": "rgb", "layout": "nchw"}
    return with_options(Preprocess(), {**base, **options})


def arithmetic(value, mean, std=1):
    """A pixel's value in the input: three separate roundings to float32."""
    scaled = np.float32(value) * np.float32(1 / 255)
    return np.float32(np.float32(scaled - np.float32(mean)) / np.float32(std))


def test_normalisation_rounds_three_times_in_float32():
    preprocess = complete_options(
        size=(40, 60), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    image = make_noise()
    got = preprocess_image(image, preprocess)
    assert got.shape == (1, 3, 40, 60)
    assert got.dtype == np.float32
    for channel, bgr in enumerate((2, 1, 0)):
        for y, x in ((0, 0), (7, 13), (39, 59)):
            value = arithmetic(image[y, x, bgr], preprocess.mean[channel], preprocess.std[channel])
            assert got[0, channel, y, x].tobytes() == value.tobytes()


def test_layouts_and_channel_orders_agree():
    image = make_noise()
    rgb = preprocess_image(image, complete_options())
    assert np.array_equal(
        preprocess_image(image, complete_options(layout="nhwc")), rgb.transpose(0, 2, 3, 1)
    )
    assert np.array_equal(preprocess_image(image, complete_options(color="bgr")), rgb[:, ::-1])
    grey = preprocess_image(image[:, :, :1], complete_options(color="grey"))
    assert grey.shape == (1, 1, 24, 32)
    assert np.array_equal(grey[0, 0], preprocess_image(image, complete_options(color="bgr"))[0, 0])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(("anchor", "top"), [("centre", 8), ("top-left", 0)])
def test_letterbox_pads_with_normalised_value(layout, anchor, top):
    preprocess = complete_options(
        size=(32, 32), resize="letterbox", pad=(114.0,), mean=(0.5,), layout=layout
    )
    out = preprocess_image(np.full((40, 80, 3), 200, np.uint8), replace(preprocess, anchor=anchor))[
        0
    ]
    plane = out[0] if layout == "nchw" else out[:, :, 0]
    assert np.all(plane[top : top + 16] == arithmetic(200, 0.5))
    assert np.all(np.delete(plane, range(top, top + 16), axis=0) == arithmetic(114, 0.5))


def test_text_lines_are_padded_with_zero():
    preprocess, _ = complete_preprocess(PRESETS["ppocr-rec"], spec("n", 3, 48, "w"))
    out = preprocess_image(np.full((24, 50, 3), 255, np.uint8), preprocess)[0]
    assert out.shape == (3, 48, 320)
    assert np.all(out[:, :, :100] == 1)
    assert np.all(out[:, :, 100:] == 0)
    assert resize_to_input(np.zeros((10, 500, 3), np.uint8), preprocess)[0].shape == (48, 320, 3)


@pytest.mark.parametrize("name", ["ppocr-rec", "ppocr-cls"])
def test_description_names_the_preset(name):
    completed, _ = complete_preprocess(PRESETS[name], spec("n", 3, "h", "w"))
    assert preprocess.describe_preprocess(completed).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("width", "resized_width", "left"),
    [(500, 426, 101), (400, 341, 58), (402, 343, 60)],  # torchvision's int(round(117 / 2)) is 58
)
def test_imagenet_resizes_and_crops_centre(width, resized_width, left):
    preprocess, notes = complete_preprocess(PRESETS["imagenet"], spec(1, 3, 224, 224))
    assert notes == ()
    assert preprocess.resized_short_side == 256
    image = make_noise(300, width)
    placed, corner = resize_to_input(image, preprocess)
    resized = cv2.resize(image, (resized_width, 256), interpolation=cv2.INTER_AREA)
    assert corner == (0, 0)
    assert np.array_equal(placed, resized[16:240, left : left + 224])


@pytest.mark.parametrize(("side", "equal"), [(10, True), (100, False)])
def test_area_is_linear_when_enlarging(side, equal):
    ways = [complete_options(interpolation=name) for name in ("area", "linear")]
    area, linear = (preprocess_image(make_noise(side, side), preprocess) for preprocess in ways)
    assert np.array_equal(area, linear) == equal


@given(side, side, side, side)
@example(900, 1024, 640, 640)  # half a pixel becomes the even number
def test_letterbox_touches_box_from_inside(height, width, box_h, box_w):
    inner = pixels.letterbox_size((height, width), (box_h, box_w))
    assert 1 <= inner[0] <= box_h
    assert 1 <= inner[1] <= box_w
    assert inner[0] == box_h or inner[1] == box_w
    ratio = min(box_h / height, box_w / width)  # `LetterBox` of ultralytics/data/augment.py
    assert inner == (max(1, round(height * ratio)), max(1, round(width * ratio)))


@given(side, side, side)
def test_short_side_has_requested_length(height, width, short):
    size = short_side_size((height, width), short)
    assert min(size) == short
    assert (size[0] <= size[1]) == (height <= width) or size[0] == size[1]


@settings(max_examples=60)
@given(
    sizes,
    sizes,
    st.sampled_from(["stretch", "letterbox", "short-side", "fit-height"]),
    st.sampled_from(["nearest", "linear", "cubic", "area", "lanczos"]),
    st.sampled_from(["rgb", "bgr", "grey"]),
    st.sampled_from(["nchw", "nhwc"]),
)
def test_every_option_combination_fills_input(source, size, resize, interpolation, color, layout):
    image = make_noise(*source, 1 if color == "grey" else 3)
    options = {"size": size, "resize": resize, "interpolation": interpolation}
    preprocess = Preprocess(**options, color=color, layout=layout)
    out = preprocess_image(image, preprocess)
    assert out.shape == (
        1,
        *((preprocess.channels, *size) if layout == "nchw" else (*size, preprocess.channels)),
    )
    assert np.isfinite(out).all()
    assert out.min() >= 0
    assert out.max() <= 1
    assert out.tobytes() == preprocess_image(image, preprocess).tobytes()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_json_and_resolve(name):
    preprocess = PRESETS[name]
    assert Preprocess.from_json(json.loads(json.dumps(preprocess.to_json()))) == preprocess
    channels = 1 if preprocess.color == "grey" else 3
    resolve, notes = complete_preprocess(preprocess, spec("n", channels, 64, 96))
    assert resolve.size == (64, 96)
    assert notes == ()
    assert complete_preprocess(resolve, spec("n", channels, 64, 96))[0] == resolve


def test_default_preprocess_follows_model_input():
    preprocess, notes = complete_preprocess(None, spec(1, 1, 28, 28))
    assert (preprocess.color, preprocess.size, preprocess.layout, preprocess.scale) == (
        "grey",
        (28, 28),
        "nchw",
        1 / 255,
    )
    assert "28x28" in notes[0]
    assert "grey" in notes[0]
    preprocess, _ = complete_preprocess(None, spec(None, 224, 200, 3))
    assert (preprocess.color, preprocess.size, preprocess.layout) == ("rgb", (224, 200), "nhwc")


def test_options_override_preset(wording):
    options = with_options(PRESETS["imagenet"], {"size": (192, 192), "color": "bgr", "mean": None})
    assert (options.size, options.color, options.mean) == (
        (192, 192),
        "bgr",
        PRESETS["imagenet"].mean,
    )
    with pytest.raises(ConfigError) as refusal:
        preprocess.find_preset("imagnet")
    wording.check(refusal.value)


def test_channel_values_may_be_an_array():
    assert Preprocess(mean=np.array([0.5, 0.25, 0])).mean == (0.5, 0.25, 0)


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
        ({"scale": np.array([1.0, 2.0])}, "scale must be one number"),
        ({"scale": np.array([])}, "scale must be one number"),
        ({3: (0.5,)}, "3 is no preprocessing option"),
        ({"men": (0.5,)}, "'men' is no preprocessing option.*'mean'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        with_options(Preprocess(), options)


@pytest.mark.parametrize(
    ("preprocess", "target", "message"),
    [
        (Preprocess(size=(32, 32)), spec(1, 3, 224, 224), "size must fit .*32x32"),
        (Preprocess(color="grey"), spec(1, 3, 8, 8), "grey images have 1 channels.*with 3"),
        (None, spec(1, 4, 8, 8), "rgb images have 3 channels.*with 4"),
        (None, spec(1, 3, "h", "w"), f"leaves its {OPEN}224x224, or \\*x\\* for"),
        (None, spec(1, 3, 64, "w"), f"{OPEN}64x224, or 64x\\* for"),
        (None, spec(1, "h", 48, 3), f"{OPEN}224x48, or \\*x48 for"),
        (None, spec(1, 16), "need an input of 4 dimensions"),
        (Preprocess(mean=(1, 2, 3)), spec(1, 1, 8, 8), "mean must have one value"),
    ],
)
def test_options_that_contradict_model_are_refused(preprocess, target, message):
    with pytest.raises(FeedError, match=message):
        complete_preprocess(preprocess, target)


def test_short_side_crop_needs_large_enough_image():
    options = Preprocess(resize="short-side", short_side=24)
    preprocess, _ = complete_preprocess(options, spec(1, 3, 24, 32))
    assert np.isfinite(preprocess_image(make_noise(72, 128), preprocess)).all()
    with pytest.raises(FeedError, match="of 72x72 must reach the crop of 24x32, got 24x24"):
        preprocess_image(make_noise(72, 72), preprocess)


@pytest.mark.parametrize(
    ("scale", "mean", "way_out"),
    [
        (1 / 255, (127.5,), "scale 1 .* such as 0.5$"),
        (1 / 127.5, (103.9, 116.8, 123.7), "0 to 2,"),
    ],
)
def test_mean_outside_pixel_range_is_refused(scale, mean, way_out):
    preprocess = Preprocess(scale=scale, mean=mean)
    with pytest.raises(ConfigError, match=f"mean is taken from scaled pixels.*{way_out}"):
        complete_preprocess(preprocess, spec(1, 3, 8, 8))
    for valid_preprocess in (
        replace(preprocess, scale=1.0),
        *(Preprocess(mean=(m,)) for m in (1.0, 0.0, -1.0)),
    ):
        assert (
            complete_preprocess(valid_preprocess, spec(1, 3, 8, 8))[0].mean == valid_preprocess.mean
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mean 127.5 --std 127.5", "give scale 1"),
        ("--mean 127.5 --std 127.5 --scale 1", None),
        ("--short-side 16", "short_side is for resize short-side, got it with resize stretch"),
        ("--resize letterbox --short-side 16", "got it with resize letterbox; give resize short-"),
        ("--pad 114", "pad is for resize letterbox and fit-height, got it with resize stretch"),
        ("--preprocess imagenet --pad 114", "got it with resize short-side; give resize letterbox"),
        ("--preprocess imagenet --short-side 16", None),
        ("--resize short-side --short-side 16", None),
        ("--resize letterbox --pad 114", None),
    ],
)
def test_wrong_command_options_are_refused(options, message, small_cnn, pictures, tmp_path, run):
    arguments = (
        "calibrate",
        small_cnn,
        "--images",
        pictures,
        "--out",
        tmp_path / "c",
        *options.split(),
    )
    assert message in run.fails(*arguments) if message else run.ok(*arguments)


IMAGE = TensorSpec("x", "float32", ("n", 3, 16, 16))
NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
PHOTO = cv2.resize(NOISE, (600, 400), interpolation=cv2.INTER_CUBIC)


def encode_image(suffix: str, pixels=PHOTO, *options: int) -> bytes:
    done, data = cv2.imencode(suffix, pixels, options)
    assert done
    return data.tobytes()


JPEG, PNG = encode_image(".jpg"), encode_image(".png")
PROGRESSIVE = encode_image(".jpg", PHOTO, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
RESTARTS = encode_image(".jpg", PHOTO, cv2.IMWRITE_JPEG_RST_INTERVAL, 8)


def zero_part(data: bytes, share: float, count: int = 400) -> bytes:
    index = int(len(data) * share)
    return data[:index] + bytes(count) + data[index + count :]


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


def feed_bytes(folder, data: bytes, suffix: str = ".jpg", **options):
    folder.mkdir(exist_ok=True)
    (folder / "good.png").write_bytes(PNG)
    (folder / f"it{suffix}").write_bytes(data)
    feed = open_feed(folder, [IMAGE], **options)
    with feed.samples() as samples:
        return feed, list(samples)


@pytest.mark.parametrize("kind", [JPEG, PROGRESSIVE, RESTARTS], ids=["baseline", "multi", "rst"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_damaged_jpeg_names_decoder_message(tmp_path, capfd, kind, share):
    damaged = zero_part(kind, share)
    message_pattern = r"(its decoder says: \w+ \w+|damaged: a hole of zeros)"
    with pytest.raises(FeedError, match=r"it\.jpg .*" + message_pattern):
        feed_bytes(tmp_path, damaged)
    feed, samples = feed_bytes(tmp_path, damaged, skip_bad=True)
    assert len(samples) == 1
    assert "1 skipped: image it.jpg" in feed.notes[-1]
    assert capfd.readouterr().err == ""


def test_silent_jpeg_hole_is_reported(tmp_path):
    silent = 0
    for share in np.linspace(0.2, 0.9, 40):
        damaged = zero_part(JPEG, share)
        with capture_decoder_output() as decoder_output:
            pixels = cv2.imdecode(np.frombuffer(damaged, np.uint8), 1)
        silent += not decoder_output and pixels is not None
        with pytest.raises(FeedError):
            decode_image(damaged, "it.jpg", grey=False)
    assert silent


def test_flat_pictures_are_not_damaged():
    flat = np.full((1000, 1500, 3), 128, np.uint8)
    flat[300:500, 300:500] = NOISE[0, 0]
    for data in (
        encode_image(".jpg", flat, cv2.IMWRITE_JPEG_OPTIMIZE, 1),
        encode_image(".jpg", flat, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        encode_image(".jpg", flat) + b"behind its end" + bytes(1000) + b"\xff\xd9",
    ):
        assert bytes(64) in data
        assert decode_image(data, "it.jpg", grey=False).shape == flat.shape


def test_damage_behind_valid_checksums_is_reported(tmp_path, capfd, wording):
    data_start = PNG.index(b"IDAT")
    length = int.from_bytes(PNG[data_start - 4 : data_start], "big")
    pixels = (
        zlib.decompress(PNG[data_start + 4 : data_start + 4 + length])
        if PNG.count(b"IDAT") == 1
        else b""
    )
    header = png_chunk(
        b"IHDR", (600).to_bytes(4, "big") + (400).to_bytes(4, "big") + b"\x08\2\0\0\0"
    )
    filters = b"\x09" + (pixels or bytes(1801 * 400))[1:]
    damaged_png = (
        PNG[:8] + header + png_chunk(b"IDAT", zlib.compress(filters)) + png_chunk(b"IEND", b"")
    )
    with pytest.raises(FeedError) as refusal:
        feed_bytes(tmp_path, damaged_png, ".png")
    wording.check(refusal.value)
    with pytest.raises(FeedError) as refusal:
        feed_bytes(tmp_path / "cut", JPEG[: len(JPEG) // 2] + b"\xff\xd9")
    wording.check(refusal.value)
    assert capfd.readouterr().err == ""


def test_harmless_decoder_messages_refuse_nothing(tmp_path, capfd):
    profile = PNG[:33] + png_chunk(b"iCCP", b"x\0\0" + zlib.compress(b"junk" * 40)) + PNG[33:]
    revision = JPEG.replace(b"JFIF\0\1", b"JFIF\0\7", 1)
    for data, suffix, word in ((profile, ".png", "iCCP"), (revision, ".jpg", "revision")):
        with capture_decoder_output() as lines:
            cv2.imdecode(np.frombuffer(data, np.uint8), 1)
        assert any(word in line for line in lines)
        feed, samples = feed_bytes(tmp_path, data, suffix)
        assert len(samples) == 2
        assert feed.notes == open_feed(tmp_path, [IMAGE]).notes
        assert suffix == ".jpg" or np.array_equal(samples[0]["x"], samples[1]["x"])
        (tmp_path / f"it{suffix}").unlink()
    assert capfd.readouterr().err == ""


DECODER_PROGRAM = """
import sys
import cv2, numpy
from deploy.feed.decoding import capture_decoder_output
data = numpy.fromfile(sys.argv[1], "uint8")
with capture_decoder_output() as said:
    print("a progress bar", file=sys.stderr, flush=True)
assert said == []
cv2.imdecode(data, 1)
with capture_decoder_output(exclusive=False) as said:
    cv2.imdecode(data, 1)
assert said
"""  # in a process of its own, where no thread of an earlier test still decodes


def test_only_decoder_output_is_captured(tmp_path):
    (tmp_path / "cut.jpg").write_bytes(JPEG[:1000] + b"\xff\xd9")
    arguments = [sys.executable, "-c", DECODER_PROGRAM, tmp_path / "cut.jpg"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "a progress bar" in done.stderr, done.stderr
    assert done.stderr.count("Corrupt JPEG data") == 1  # afterwards the screen is as it was


def is_damaged(data):
    try:
        decode_image(data, "it.jpg", grey=False)
    except FeedError:
        return True
    return False


@pytest.mark.slow
def test_decoder_messages_stay_with_their_picture(capfd):
    cut = JPEG[: len(JPEG) // 2] + b"\xff\xd9"
    pictures = [cut, *[JPEG] * 6] * 30
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(is_damaged, pictures)) == [data is cut for data in pictures]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "messages, damage",
    [
        ("Corrupt JPEG data: bad Huffman code", True),
        ("Corrupt JPEG data: found marker 0xd0 instead of RST3", True),
        ("Premature end of JPEG file", True),
        ("Inconsistent progression sequence for component 0 coefficient 1", True),
        ("Corrupt JPEG data: bad ICC marker", False),
        ("Unknown Adobe color transform code 7", False),
        ("Warning: unknown JFIF revision number 7.01", False),
        ("libpng warning: iCCP: known incorrect sRGB profile", False),
    ],
)
def test_decoder_messages_that_mean_damage(monkeypatch, messages, damage):
    capture = lambda exclusive=True: nullcontext([messages])  # noqa: E731
    monkeypatch.setattr(decoding_module, "capture_decoder_output", capture)
    with pytest.raises(FeedError, match=messages) if damage else nullcontext():
        decode_image(JPEG, "it.jpg", grey=False)


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "bmp", "tiff", "ppm", "pgm", "jp2", "avif"])
@pytest.mark.parametrize("size", [(37, 21), (600, 400)])
def test_sides_are_read_from_the_header(kind, size):
    picture = cv2.resize(PHOTO, size)
    try:
        data = encode_image(f".{kind}", picture[:, :, 0].copy() if kind == "pgm" else picture)
    except (cv2.error, AssertionError):
        pytest.skip(f"this OpenCV writes no {kind} of this size")
    assert headers.read_image_size(data) == size
    for length in range(0, 64):  # a header that is cut says nothing, or the truth
        assert headers.read_image_size(data[:length]) in (None, size)


def test_sides_are_read_from_other_headers():
    lossless = encode_image(".webp", PHOTO, cv2.IMWRITE_WEBP_QUALITY, 101)
    assert headers.read_image_size(lossless) == headers.read_image_size(PROGRESSIVE) == (600, 400)
    assert headers.read_image_size(b"P5 # a comment\n600 400\n255\n") == (600, 400)
    assert headers.read_image_size(b"GIF89a" + bytes([88, 2, 144, 1])) == (600, 400)
    assert headers.read_image_size(b"hello") is headers.read_image_size(b"") is None


def test_vast_picture_is_refused_before_decoding(tmp_path, monkeypatch):
    sides = (30_000).to_bytes(4, "big") * 2
    vast = PNG[:8] + png_chunk(b"IHDR", sides + b"\x08\0\0\0\0") + png_chunk(b"IEND", b"")
    monkeypatch.setattr(cv2, "imdecode", None)
    message_pattern = r"it\.png must have at most 268,435,456 pixels, got 30000x30000; give a"
    with pytest.raises(FeedError, match=message_pattern):
        decode_image(vast, "it.png", grey=False)


def test_vast_file_is_refused_before_reading(tmp_path, wording):
    with (tmp_path / "it.png").open("wb") as file:
        file.truncate(50 << 30)
    (tmp_path / "good.png").write_bytes(PNG)
    with pytest.raises(FeedError) as refusal:
        open_feed(tmp_path, [IMAGE]).manifest()
    wording.check(refusal.value)
    feed = open_feed(tmp_path, [IMAGE], skip_bad=True)
    with feed.samples() as samples:
        assert len(list(samples)) == 1
    assert "at most 1 GB" in feed.notes[-1]


SHOWN = [f"{index:02}.png" for index in spread_evenly(range(20), 4)]
HOSTILE = "\x1b[31m\udcff<script>alert('x')</script>|`*_[a](b)&\".png"


def resolve(preprocess, layout="nchw"):
    return replace(preprocess, size=(24, 32), color=preprocess.color or "rgb", layout=layout)


def undo(picture, preprocess):
    """The picture of its input, and the resized picture that the model is to see, both RGB."""
    back = input_to_image(preprocess_image(picture, preprocess), preprocess)
    placed, (top, left_edge) = resize_to_input(picture, preprocess)
    colour = placed[:, :, ::-1] if placed.shape[2] == 3 else np.repeat(placed, 3, axis=2)
    assert back.dtype == np.uint8
    assert back.shape == (24, 32, 3)
    return back[top : top + placed.shape[0], left_edge : left_edge + placed.shape[1]], colour


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_model_input_is_undone_to_pixels(name, layout):
    preprocess = resolve(PRESETS[name], layout=layout)
    np.testing.assert_array_equal(*undo(make_noise(37, 53, preprocess.channels), preprocess))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("color", preprocess.COLORS)
@pytest.mark.parametrize("resize", ["stretch", "letterbox", "short-side"])
def test_preprocessing_is_undone_within_one_level(resize, color, seed):
    rng = np.random.default_rng(seed)
    channels = 1 if color == "grey" else 3
    scale, mean = float(10 ** rng.uniform(-3, 1)), tuple(rng.uniform(-200, 200, channels))
    std = tuple(10 ** rng.uniform(-2, 2, channels))
    options = resolve(Preprocess(resize=resize, color=color, scale=scale, mean=mean, std=std))
    back, colour = undo(make_noise(*rng.integers(20, 90, 2).tolist(), channels), options)
    assert np.abs(back.astype(int) - colour).max() <= 1


def test_letterbox_border_is_its_pad():
    preprocess = resolve(PRESETS["yolo"])
    back = input_to_image(preprocess_image(make_noise(10, 40), preprocess), preprocess)
    assert (back[0] == 114).all()
    assert (back[-1] == 114).all()


def test_arrays_are_stretched_to_pictures():
    ramp = np.linspace(-3, 5, 3 * 4 * 4, dtype=np.float32).reshape(1, 3, 4, 4)
    back = input_to_image(ramp, None)
    assert back.min() == 0
    assert back.max() == 255
    assert back.shape == (4, 4, 3)
    assert input_to_image(ramp.transpose(0, 2, 3, 1), None).tolist() == back.tolist()
    assert (input_to_image(np.full((1, 1, 4, 4), 7.0), None) == 127).all()
    for array in (np.zeros((1, 6, 4, 4)), np.zeros((1, 12)), np.zeros((2, 3, 4, 4))):
        assert input_to_image(array, None) is None
    picture = pixels.find_image({"state": np.zeros((1, 12)), "image": ramp}, None)
    assert picture.tolist() == back.tolist()


@pytest.mark.parametrize(
    ("size", "expected_size"),
    [((640, 320), (160, 80)), ((20, 30), (20, 30)), ((1, 4000), (1, 160))],
)
def test_small_pictures_are_not_enlarged(size, expected_size):
    assert pixels.shrink_image(make_noise(*size)).shape[:2] == expected_size


def test_picture_uses_shorter_encoding():
    flat, rough = np.zeros((60, 90, 3), np.uint8), make_noise(60, 90)
    assert raster(flat).kind == "png"
    assert raster(rough).kind == "jpeg"
    assert raster(rough) == raster(rough.copy())
    head, data = raster(flat).uri.split(",")
    assert head == "data:image/png;base64"
    png = np.frombuffer(base64.b64decode(data), np.uint8)
    np.testing.assert_array_equal(cv2.imdecode(png, 1), flat)


def select_views(folder, count=4, **options):
    """A feed of which so many samples are to be shown."""
    feed = open_feed(str(folder), [IMAGE], preprocess=Preprocess(size=(16, 16)), **options)
    feed.cache_samples(0, preview_count=count)
    return feed


def test_views_need_no_extra_decoding(pictures):
    feed, late = select_views(pictures), select_views(pictures)
    for _ in feed.samples():
        pass
    assert feed.decodes == 20
    views = feed.previews()
    assert feed.decodes == 20
    assert [view.name for view in views] == SHOWN
    assert all(
        view.source_image.shape == (18, 20, 3) and view.input_size == (16, 16) for view in views
    )
    np.testing.assert_array_equal(
        views[0].source_image, cv2.imread(str(pictures / SHOWN[0]))[:, :, ::-1]
    )
    assert [v.input_image.tolist() for v in late.previews()] == [
        v.input_image.tolist() for v in views
    ]
    assert late.decodes == 4


def test_bad_images_are_not_shown(pictures, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no picture")
    for name in ("b", "c"):
        (tmp_path / f"{name}.png").write_bytes((pictures / "01.png").read_bytes())
    assert [v.name for v in select_views(tmp_path, skip_bad=True).previews()] == ["b.png", "c.png"]


@pytest.mark.slow
def test_threads_keep_the_shown_pictures(run, small_cnn, pictures, tmp_path):
    pages = []
    for threads in (1, 3):
        options = ("--size", "16x16", "--effort", 0, "--duration", 0, "--threads", threads)
        run.ok("build", small_cnn, "--images", pictures, *options, "--out", tmp_path / str(threads))
        pages.append((tmp_path / str(threads) / "report.html").read_text())
    uris = [re.findall(r'src="(data:image/[^"]+)"', page) for page in pages]
    assert len(uris[0]) >= 8
    assert uris[0] == uris[1]
    assert "What the model sees" in pages[0]
    assert "18x20 fed as 16x16" in pages[0]
    assert sum(map(len, uris[0])) < 150_000
    pictures_in_report = json.loads((tmp_path / "1" / "report.json").read_text())["feed"][
        "pictures"
    ]
    assert pictures_in_report["samples"] == SHOWN
    assert "scale, mean, std" in pictures_in_report["how"]
    for name in ("report.json", "report.md"):
        assert "data:image" not in (tmp_path / "1" / name).read_text()


def test_picture_names_are_escaped(pictures):
    feed = select_views(pictures, 1, limit=1)
    (view,) = feed.previews()
    object.__setattr__(view, "name", HOSTILE)
    part = pictures_part([view], feed.preprocess)
    report = Report(feed=FeedPart(source="s", samples=1, pictures=part))
    page = to_html(report)
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;" in page
    json.dumps(to_json(report), allow_nan=False).encode()
    assert "data:" not in to_markdown(report)


@pytest.mark.parametrize("kind", ["jp2", "avif"])
def test_other_formats_called_jpg_are_decoded(kind):
    """As browsers save them."""
    data = encode_image(f".{kind}", PHOTO)
    assert decode_image(data, "it.jpg", grey=False).shape == PHOTO.shape


@pytest.mark.parametrize(
    ("white", "deep", "values", "pixels"),
    [
        (1, False, [0, 1], [0, 255]),
        (100, False, [1, 50, 99, 100], [3, 128, 252, 255]),  # as Pillow
        (1023, False, [0, 300, 512, 1023], [0, 75, 128, 255]),
        (1023, True, [0, 300, 512, 1023], [0, 19218, 32800, 65535]),
        (65535, False, [255, 256, 65535], [0, 1, 255]),
    ],
)
def test_pnm_is_scaled_by_its_largest_value(white, deep, values, pixels):
    data = np.array(values, ">u2" if white > 255 else np.uint8).tobytes()
    grey = b"P5\n# made by hand\n%d 1\n%d\n" % (len(values), white) + data
    assert decode_image(grey, "a.pgm", grey=True, deep=deep).ravel().tolist() == pixels
    text = b"P2 %d 1 %d %b\n" % (len(values), white, b" ".join(b"%d" % value for value in values))
    decoded = decode_image(text, "a.pgm", grey=True, deep=deep).ravel()
    assert np.abs(decoded.astype(int) - pixels).max() <= 1  # OpenCV rounds those of 8 bits down


@pytest.mark.parametrize("order", ["<", ">"])
def test_alpha_of_tiff_is_dropped(order):
    data = tiff_with_alpha(np.full((2, 3, 4), [200, 100, 50, 20], np.uint8), order)
    assert decode_image(data, "a.tiff", grey=False)[1, 2].tolist() == [50, 100, 200]
    assert headers.read_image_size(data) == (3, 2)


def test_bigtiff_of_a_vast_offset_is_refused():
    data = b"II" + struct.pack("<HHHQ", 43, 8, 0, 2**64 - 1) + bytes(40)
    with pytest.raises(FeedError, match="cannot be decoded"):
        decode_image(data, "a.tiff", grey=False)


def test_float_pixels_are_refused():
    data = cv2.imencode(".tiff", np.zeros((4, 4, 3), np.float32))[1].tobytes()
    with pytest.raises(FeedError, match="8 or 16 bits"):
        decode_image(data, "a.tiff", grey=False)


def test_max_pixels_bounds_an_image(tmp_path):
    (tmp_path / "it.png").write_bytes(PNG)
    height, width = cv2.imdecode(np.frombuffer(PNG, np.uint8), cv2.IMREAD_COLOR).shape[:2]
    for max_pixels in (height * width, height * width - 1):
        feed = Dataset(source=tmp_path, max_pixels=max_pixels).open([IMAGE])
        if max_pixels == height * width:
            list(feed.samples())
        else:
            with pytest.raises(FeedError, match=f"{max_pixels:,} pixels.*raise --max-pixels"):
                list(feed.samples())


@pytest.mark.parametrize("large_pixels", [0, 1 << 28])
def test_large_image_is_decoded_alone(large_pixels, tmp_path, monkeypatch):
    (tmp_path / "it.png").write_bytes(PNG)
    was_locked = []

    def decode(*arguments, **options):
        was_locked.append(sources._LARGE_IMAGE.locked())
        return np.zeros((8, 8, 3), np.uint8)

    monkeypatch.setattr(sources, "decode_image", decode)
    monkeypatch.setattr(sources, "_LARGE_PIXELS", large_pixels)
    feed = select_views(tmp_path, 1)
    list(feed.samples())
    feed.previews()
    assert was_locked == [large_pixels == 0] * 2
    assert not sources._LARGE_IMAGE.locked()
