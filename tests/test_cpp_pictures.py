"""Pictures in C++ and here: the same pixels, the same words for damaged ones, the same resizing."""

import json
import re
import struct
import subprocess
import zlib

import cv2
import numpy as np
import pytest

from deploy.feed import file_list, headers, images
from deploy.feed.decoding import decode_image, opencv
from deploy.feed.pixels import preprocess_image
from deploy.feed.preprocess import PRESETS, complete_preprocess
from deploy.tensors import TensorSpec
from tests.test_cpp_parity import PHOTOS, outcome
from tests.test_pictures import tiff_with_alpha

pytestmark = pytest.mark.slow

NOISE = np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8)
PHOTO = cv2.resize(NOISE, (126, 81), interpolation=cv2.INTER_CUBIC)
ALPHA = np.dstack((PHOTO, np.tile(np.arange(126, dtype=np.uint8) * 2, (81, 1))))
GREY = PHOTO[:, :, 1].copy()
DEEP = PHOTO.astype(np.uint16) * 257 + 3


def encoded(suffix, pixels=PHOTO, *options):
    done, data = cv2.imencode(suffix, pixels, options)
    assert done, (suffix, options)
    return data.tobytes()


def with_profile(data):
    """A PNG with a color profile that is none, of which libpng complains."""
    body = b"iCCPx\0\0" + zlib.compress(b"junk" * 40)
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:33] + chunk + data[33:]


def turned_jpeg(orientation, order="<"):
    """A JPEG whose EXIF block, a TIFF of one field, tells its orientation."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    field = struct.pack(order + "HHIHH", 274, 3, 1, orientation, 0)
    body = b"Exif\0\0" + mark + struct.pack(order + "IH", 8, 1) + field + bytes(4)
    data = encoded(".jpg")
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]


def kinds():
    """Name -> bytes of a picture, over 40 of them."""
    data_by_kind = {}
    for name in ("411", "420", "422", "440", "444"):
        factor = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}")
        data_by_kind[f"jpeg {name}"] = encoded(
            ".jpg", PHOTO, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor
        )
    for name, value in (("QUALITY", 1), ("QUALITY", 100), ("PROGRESSIVE", 1), ("RST_INTERVAL", 3)):
        option = getattr(cv2, f"IMWRITE_JPEG_{name}")
        data_by_kind[f"jpeg {name.lower()} {value}"] = encoded(".jpg", PHOTO, option, value)
    data_by_kind["jpeg grey"] = encoded(".jpg", GREY)
    data_by_kind["jpeg of one pixel"] = encoded(".jpg", PHOTO[:1, :1])
    data_by_kind["jpeg of another revision"] = encoded(".jpg").replace(b"JFIF\0\1", b"JFIF\0\7", 1)
    data_by_kind["jpeg and what is behind it"] = encoded(".jpg") + b"behind" * 40 + b"\xff\xd9"
    for number in range(1, 10):
        data_by_kind[f"jpeg orientation {number}"] = turned_jpeg(number)
    data_by_kind["jpeg orientation 6, big endian"] = turned_jpeg(6, ">")
    for name, pixels in (("", PHOTO), (" alpha", ALPHA)):
        for quality in (60, 101):  # with losses and without
            data = encoded(".webp", pixels, cv2.IMWRITE_WEBP_QUALITY, quality)
            data_by_kind[f"webp{name} {quality}"] = data
        for suffix in (".png", ".bmp", ".tiff"):
            data_by_kind[f"{suffix[1:]}{name}"] = encoded(suffix, pixels)
    for name, pixels in (("grey", GREY), ("16 bits", DEEP), ("16 bits grey", DEEP[:, :, 0].copy())):
        for suffix in (".png", ".tiff"):
            data_by_kind[f"{suffix[1:]} {name}"] = encoded(suffix, pixels)
    data_by_kind["png of an odd profile"] = with_profile(encoded(".png"))
    for suffix in (".ppm", ".pgm", ".pbm"):
        pixels = PHOTO if suffix == ".ppm" else GREY
        for binary in (0, 1):
            data_by_kind[f"{suffix[1:]} {binary}"] = encoded(
                suffix, pixels, cv2.IMWRITE_PXM_BINARY, binary
            )
    data_by_kind["pgm 16 bits"] = encoded(".pgm", DEEP[:, :, 0].copy())
    for white, dtype in ((100, np.uint8), (1023, ">u2")):
        values = (PHOTO.astype(int) * white // 255).astype(dtype)
        data_by_kind[f"ppm to {white}"] = b"P6 126 81 %d\n" % white + values.tobytes()
    for order in "<>":
        data_by_kind[f"tiff with alpha {order}"] = tiff_with_alpha(ALPHA, order)
    return data_by_kind


KINDS = kinds()


def ours(data, grey=False):
    return outcome(lambda: decode_image(data, "it", grey=grey))


@pytest.fixture
def theirs(cpp, tmp_path):
    """(bytes, grey) -> the pixels of the C++ library, or its error."""
    if not cpp.reads_images:
        pytest.skip("this C++ library was built without OpenCV")

    def decode(data, grey=False, **limits):
        (tmp_path / "it").write_bytes(data)
        options = {"path": str(tmp_path / "it"), "name": "it", "out": str(tmp_path / "out")}
        answer = cpp("decode", grey=grey, **options, **limits)
        if "error" in answer:
            return answer
        return np.fromfile(tmp_path / "out", np.uint8).reshape(answer["shape"])

    return decode


def difference(mine, its):
    """Return the difference of two outcomes as text; empty where they agree."""
    if isinstance(mine, dict) and isinstance(its, dict):
        return "" if mine == its else f"{mine} {its}"
    if isinstance(mine, dict) or isinstance(its, dict):  # one of them failed
        return f"{getattr(mine, 'shape', mine)} {getattr(its, 'shape', its)}"
    if mine.shape != its.shape:
        return f"{mine.shape} {its.shape}"
    max_difference = int(np.abs(mine.astype(int) - its).max())
    return f"by {max_difference} in {int((mine != its).sum())}" if max_difference else ""


@pytest.mark.parametrize("grey", [False, True])
def test_pixels_of_every_kind_agree(theirs, grey):
    assert len(KINDS) >= 40
    differing = {
        kind: difference(ours(data, grey), theirs(data, grey)) for kind, data in KINDS.items()
    }
    # a newer OpenCV cuts the grey of such a file off where an older one rounds it
    if grey and differing.get("bmp alpha", "").startswith("by 1 "):
        del differing["bmp alpha"]
    assert not any(differing.values()), {k: v for k, v in differing.items() if v}


def test_pictures_need_opencv(cpp, calib8_cache, tmp_path):
    if cpp.reads_images:
        assert cpp("decoder")["library"].startswith("OpenCV ")
        return
    rule = "images are read by OpenCV, which this calib8 was built without; install it (Debian:"
    command = [*calib8_cache, "feed", PHOTOS, "--input", "x:1x1x8x8", "-o", tmp_path / "out"]
    done = subprocess.run([*command, "--skip-bad"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"calib8-cache: {rule}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert cpp("decoder")["message"].startswith(rule)


# ---- damage ---------------------------------------------------------------------------------
def zeroed(data, share, count=400):
    position = int(len(data) * share)
    return data[:position] + bytes(count) + data[position + count :]


LARGE = cv2.resize(NOISE, (600, 400), interpolation=cv2.INTER_CUBIC)
JPEGS = {
    "sequential": encoded(".jpg", LARGE),
    "progressive": encoded(".jpg", LARGE, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "restarts": encoded(".jpg", LARGE, cv2.IMWRITE_JPEG_RST_INTERVAL, 8),
    "optimized": encoded(".jpg", LARGE, cv2.IMWRITE_JPEG_OPTIMIZE, 1),
    "grey": encoded(".jpg", LARGE[:, :, 1].copy()),
}


@pytest.mark.parametrize("kind", JPEGS)
def test_damaged_jpegs_have_equal_messages(theirs, kind):
    data = JPEGS[kind]
    refused = 0
    for share in np.linspace(0.15, 0.95, 17):
        damaged = zeroed(data, share)
        mine = ours(damaged)
        assert not difference(mine, theirs(damaged)), share
        refused += isinstance(mine, dict)
    assert refused > 8
    half = data[: len(data) // 2]
    for short in (half, half + b"\xff\xd9", data[:30], data[:3]):
        assert isinstance(ours(short), dict)
        assert not difference(ours(short), theirs(short))


def test_flat_pictures_of_zeros_are_undamaged(theirs):
    flat = np.full((1000, 1500, 3), 128, np.uint8)
    flat[300:500, 300:500] = NOISE[0, 0]
    for option in (cv2.IMWRITE_JPEG_OPTIMIZE, cv2.IMWRITE_JPEG_PROGRESSIVE):
        data = encoded(".jpg", flat, option, 1)
        assert bytes(64) in data
        assert theirs(data).shape == flat.shape


def test_other_damage_is_refused_alike(theirs):
    png, crc_position = KINDS["png"], len(KINDS["png"]) - 20
    crc = png[:crc_position] + bytes([png[crc_position] ^ 1]) + png[crc_position + 1 :]
    cut = [KINDS["webp 60"][:-300], KINDS["bmp"][:80], KINDS["pgm 16 bits"][:200]]
    for data in (crc, png[:-40], png[:-12], png[:30], *cut, b"hello", b"RIFF"):
        mine, its = ours(data), theirs(data)
        assert mine["message"].split(",")[0] == its["message"].split(",")[0]
        # the words of OpenCV's decoders are those of its version
        assert re.search(r"cannot be decoded \(\d+ bytes, damaged or of an unk", its["message"])


@pytest.mark.parametrize("height", [13500, 65000])
def test_too_large_pictures_are_refused(theirs, height):
    vast = b"P4\n20000 %d\n" % height
    answer = theirs(vast, grey=True)
    assert answer["error"] == "FeedError" and f"got 20000x{height}" in answer["message"]
    assert ours(vast) == answer


def test_size_is_read_before_decoding(theirs):
    rng = np.random.default_rng(5)
    for kind, data in KINDS.items():
        for cut in (len(data), *rng.integers(4, len(data), 8)):
            size = headers.read_image_size(data[:cut])
            message = theirs(data[:cut], max_pixels=0).get("message")
            if size is None:
                assert "cannot be decoded" in message, (kind, cut)
            else:
                width, height = size
                assert f"at most 0 pixels, got {width}x{height};" in message, (kind, cut)


def test_feed_refuses_images_over_max_pixels(theirs, calib8_cache, tmp_path):
    (tmp_path / "it.png").write_bytes(KINDS["png"])
    command = [*calib8_cache, "feed", str(tmp_path / "it.png"), "--input", "x:1x3x8x8"]
    for max_pixels, code in ((81 * 126, 0), (81 * 126 - 1, 2)):
        words = ["--max-pixels", str(max_pixels), "--out", str(tmp_path / "out")]
        answer = subprocess.run([*command, *words], capture_output=True, text=True)
        assert bool(answer.returncode) == bool(code), answer.stderr
        assert ("at most 10,205 pixels, got 126x81" in answer.stderr) == bool(code)


def test_vast_file_is_refused_unread(theirs, cpp, tmp_path):
    with (tmp_path / "it.png").open("wb") as file:
        file.truncate(50 << 30)
    picture = file_list.ImageFile(tmp_path / "it.png", "it.png")
    answer = cpp("decode", path=str(picture.path), name="it.png", out="", grey=False)
    assert answer == outcome(lambda: images.read_image_file(picture))
    assert "1 GB, got 50.0 GB" in answer["message"]


def test_decoders_print_nothing(theirs, calib8_cache, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, data in enumerate([*JPEGS.values(), KINDS["png of an odd profile"]]):
        (folder / f"{number}.jpg").write_bytes(zeroed(data, 0.5) if number < 5 else data)
    (folder / "cut.pgm").write_bytes(KINDS["pgm 16 bits"][:200])
    (folder / "good.jpg").write_bytes(KINDS["jpeg of another revision"])
    command = [
        *calib8_cache,
        "feed",
        folder,
        "--input",
        "x:1x3x8x8",
        "--skip-bad",
        "-o",
        tmp_path / "out",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["samples"] == 2


# ---- lists ----------------------------------------------------------------------------------
SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]


def test_white_space_in_lists_is_unicodes(cpp, tmp_path):
    (tmp_path / "a b.png").write_bytes(KINDS["png"])
    listing = tmp_path / "list.txt"
    for space in [*SPACES, "\u200b", "\x1b"]:
        full_listing = f"{space}a b.png{space}\n"
        texts = f"a b.png{space}7\n", f"{space}\n{space}# a\n{full_listing}", f"a{space}b.png"
        for text in (full_listing, *texts):
            listing.write_text(text, encoding="utf-8", newline="")
            answer = cpp("list", path=str(listing))
            mine = outcome(
                lambda: [
                    [picture_name.name, picture_name.label]
                    for picture_name in images.read_list(listing)
                ]
            )
            assert answer == (mine if isinstance(mine, dict) else {"pictures": mine}), repr(text)


# ---- pixels to inputs, with OpenCV and without ----------------------------------------------
def applied(cpp, folder, pixels, options):
    """The values that the C++ library makes of pixels."""
    pixels.tofile(folder / "in")
    question = {"path": str(folder / "in"), "out": str(folder / "out")}
    cpp("apply", shape=pixels.shape, options=options, **question)
    return np.fromfile(folder / "out", np.float32)


def resizes():
    """(pixels, new size): noise, checks and ramps; smaller, larger, by whole numbers, by little."""
    rng = np.random.default_rng(4)
    for index in range(40):
        max_side = 90 if index % 5 else 400
        height, width = rng.integers(1, max_side, 2).tolist()
        pixels = rng.integers(0, 256, (height, width, (1, 3)[index % 2]), np.uint8)
        if index % 4 == 1:
            pixels = (pixels // 128) * np.uint8(255)
        if index % 4 == 2:
            pixels[...] = (np.indices((height, width)).sum(0) % 2 * 255)[..., None]
        size = tuple(int(v) for v in rng.integers(1, 120, 2))
        if index % 3 == 0:
            size = tuple(max(1, side // int(rng.integers(1, 5))) for side in (height, width))
        yield pixels, size
    yield rng.integers(0, 256, (64, 96, 3), np.uint8), (32, 48)  # halves
    yield rng.integers(0, 256, (64, 96, 1), np.uint8), (16, 96)
    yield rng.integers(0, 256, (49, 98, 3), np.uint8), (1, 2)  # 1 / (1 / 49) is not 49


@pytest.mark.parametrize("kind", ["nearest", "linear", "cubic", "area", "lanczos"])
def test_resized_pixels_are_those_of_opencv(cpp, tmp_path, kind):
    flags = {
        "nearest": cv2.INTER_NEAREST,
        "linear": cv2.INTER_LINEAR,
        "cubic": cv2.INTER_CUBIC,
        "area": cv2.INTER_AREA,
        "lanczos": cv2.INTER_LANCZOS4,
    }
    for pixels, (height, width) in resizes():
        enlarges = height > pixels.shape[0] or width > pixels.shape[1]
        flag = flags["linear" if kind == "area" and enlarges else kind]
        expected = opencv().resize(pixels, (width, height), interpolation=flag)
        color = "grey" if pixels.shape[2] == 1 else "bgr"
        options = {"size": [height, width], "interpolation": kind, "scale": 1.0, "color": color}
        our_pixels = applied(cpp, tmp_path, pixels, options | {"layout": "nhwc"})
        assert (our_pixels == expected.ravel()).all(), (kind, pixels.shape, (height, width))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_compute_equal_values(cpp, tmp_path, name):
    channels = PRESETS[name].channels
    spec = TensorSpec("image", "float32", ("n", channels, 56, 64))
    preprocess = complete_preprocess(PRESETS[name], spec)[0]
    for pixels in (PHOTO, LARGE):
        pixels = pixels[:, :, :channels]
        values = applied(cpp, tmp_path, np.ascontiguousarray(pixels), preprocess.to_json())
        assert values.tobytes() == preprocess_image(pixels, preprocess).tobytes()
