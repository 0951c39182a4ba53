"""Pictures of the feed in the report: what the model sees, taken back to pixels."""

import base64
import itertools
import json
import re

import cv2
import numpy as np
import pytest

from deploy.feed.feed import open_feed
from deploy.feed.pixels import apply, fit, picture_in, pixels_of, small
from deploy.feed.preprocess import COLORS, PRESETS, Preprocess
from deploy.feed.sampling import some
from deploy.report import FeedPart, Report, to_html, to_json, to_markdown
from deploy.report.previews import pictures_part, raster
from deploy.tensors import TensorSpec

SPEC = (TensorSpec("x", "float32", ("n", 3, 16, 16)),)
SHOWN = [f"{place:02}.png" for place in some(range(20), 4)]
HOSTILE = "\x1b[31m\udcff<script>alert('x')</script>|`*_[a](b)&\".png"


def photo(height=37, width=53, channels=3):
    made = np.random.default_rng(height * width)
    return made.integers(0, 256, (height, width, channels), dtype=np.uint8)


def resolved(how, color=None, layout="nchw"):
    return Preprocess.from_json(
        {**how.to_json(), "size": [24, 32], "color": how.color or color or "rgb", "layout": layout}
    )


def wanted(pixels, how):
    """The resized picture that the model is to see, red, green, blue, and where it lies."""
    placed, (top, left) = fit(pixels, how)
    colour = placed[:, :, ::-1] if placed.shape[2] == 3 else np.repeat(placed, 3, axis=2)
    return colour, slice(top, top + placed.shape[0]), slice(left, left + placed.shape[1])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_what_the_model_is_fed_is_taken_back_to_the_pixels_it_was_made_of(name, layout):
    how = resolved(PRESETS[name], layout=layout)
    pixels = photo(channels=how.channels)
    back = pixels_of(apply(pixels, how), how)
    colour, rows, columns = wanted(pixels, how)
    assert back.dtype == np.uint8 and back.shape == (24, 32, 3)
    np.testing.assert_array_equal(back[rows, columns], colour)


@pytest.mark.parametrize(
    ("resize", "color", "seed"),
    list(itertools.product(("stretch", "letterbox", "short-side"), COLORS, range(3))),
)
def test_any_preprocessing_is_undone_to_a_level_of_255(resize, color, seed):
    made = np.random.default_rng(seed)
    channels = 1 if color == "grey" else 3
    how = resolved(
        Preprocess(
            resize=resize,
            color=color,
            scale=float(10 ** made.uniform(-3, 1)),
            mean=tuple(made.uniform(-200, 200, channels)),
            std=tuple(10 ** made.uniform(-2, 2, channels)),
        )
    )
    pixels = photo(*made.integers(20, 90, 2).tolist(), channels)
    back = pixels_of(apply(pixels, how), how)
    colour, rows, columns = wanted(pixels, how)
    off = back[rows, columns].astype(int) - colour
    assert np.abs(off).max() <= 1


def test_the_border_of_a_letterbox_is_its_pad():
    how = resolved(PRESETS["yolo"])
    back = pixels_of(apply(photo(10, 40), how), how)
    assert (back[0] == 114).all() and (back[-1] == 114).all()


def test_arrays_are_stretched_and_what_is_no_picture_is_none():
    ramp = np.linspace(-3, 5, 3 * 4 * 4, dtype=np.float32).reshape(1, 3, 4, 4)
    back = pixels_of(ramp, None)
    assert back.min() == 0 and back.max() == 255 and back.shape == (4, 4, 3)
    assert pixels_of(ramp.transpose(0, 2, 3, 1), None).tolist() == back.tolist()
    assert (pixels_of(np.full((1, 1, 4, 4), 7.0), None) == 127).all()
    for other in (np.zeros((1, 6, 4, 4)), np.zeros((1, 12)), np.zeros((2, 3, 4, 4))):
        assert pixels_of(other, None) is None
    assert picture_in({"state": np.zeros((1, 12)), "image": ramp}, None).tolist() == back.tolist()


@pytest.mark.parametrize(("size", "made"), [((640, 320), (160, 80)), ((20, 30), (20, 30)),
                                            ((1, 4000), (1, 160))])  # fmt: skip
def test_small_pictures_keep_their_aspect_and_are_not_enlarged(size, made):
    assert small(photo(*size)).shape[:2] == made


def test_a_picture_is_encoded_in_the_shorter_way_and_the_same_each_time():
    flat, noise = np.zeros((60, 90, 3), np.uint8), photo(60, 90)
    assert raster(flat).kind == "png" and raster(noise).kind == "jpeg"
    assert raster(noise) == raster(noise.copy())
    head, data = raster(flat).uri.split(",")
    assert head == "data:image/png;base64"
    decoded = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(decoded, flat)


def test_views_are_taken_as_samples_go_by_and_nothing_is_decoded_for_them(pictures):
    how = Preprocess(size=(16, 16))
    feed = open_feed(str(pictures), SPEC, preprocess=how)
    feed.remember(0, shown=4)
    for _ in feed.samples():
        pass
    assert feed.decodes == 20
    views = feed.views()
    assert feed.decodes == 20
    assert [view.name for view in views] == SHOWN
    assert all(view.given.shape == (18, 20, 3) and view.size == (16, 16) for view in views)
    first = cv2.imread(str(pictures / SHOWN[0]))[:, :, ::-1]
    np.testing.assert_array_equal(views[0].given, first)
    late = open_feed(str(pictures), SPEC, preprocess=how)
    late.remember(0, shown=4)
    assert [v.fed.tolist() for v in late.views()] == [v.fed.tolist() for v in views]
    assert late.decodes == 4


def test_bad_images_are_not_shown(pictures, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no picture")
    for name in ("b", "c"):
        (tmp_path / f"{name}.png").write_bytes((pictures / "01.png").read_bytes())
    feed = open_feed(str(tmp_path), SPEC, preprocess=Preprocess(size=(16, 16)), skip_bad=True)
    feed.remember(0, shown=4)
    assert [view.name for view in feed.views()] == ["b.png", "c.png"]


def test_a_build_shows_the_feed_and_the_same_pictures_with_any_threads(
    run, small_cnn, pictures, tmp_path
):
    pages = []
    for threads in (1, 3):
        out = tmp_path / str(threads)
        code, _, error = run(
            "build", small_cnn, "--images", pictures, "--size", "16x16", "--duration", 0,
            "--effort", 0, "--threads", threads, "--out", out,
        )  # fmt: skip
        assert code == 0, error
        pages.append((out / "report.html").read_text())
    uris = [re.findall(r'src="(data:image/[^"]+)"', page) for page in pages]
    assert len(uris[0]) >= 8 and uris[0] == uris[1]
    assert "What the model sees" in pages[0] and "18x20 fed as 16x16" in pages[0]
    assert sum(map(len, uris[0])) < 150_000
    told = json.loads((tmp_path / "1" / "report.json").read_text())["feed"]["pictures"]
    assert told["samples"] == SHOWN
    assert "scale, mean, std" in told["how"]
    for name in ("report.json", "report.md"):
        assert "data:image" not in (tmp_path / "1" / name).read_text()


def test_names_of_pictures_are_escaped(pictures):
    feed = open_feed(str(pictures), SPEC, preprocess=Preprocess(size=(16, 16)), limit=1)
    feed.remember(0, shown=1)
    (view,) = feed.views()
    object.__setattr__(view, "name", HOSTILE)
    part = pictures_part([view], feed.preprocess)
    report = Report(feed=FeedPart(source="s", samples=1, pictures=part))
    page = to_html(report)
    assert "<script>alert" not in page and "\x1b" not in page and "&lt;script&gt;" in page
    json.dumps(to_json(report), allow_nan=False).encode()
    assert "data:" not in to_markdown(report)
