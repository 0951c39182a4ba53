"""What C++ does by itself where Python has OpenCV do it: resizing, turning, and without OpenCV
(CALIB8_CODECS=plain) all of decoding. The same bytes."""

import base64
import struct
import zlib

import cv2
import numpy as np
import pytest

from deploy.feed import images
from deploy.feed.images import opencv
from tests.test_cpp_pictures import apart, block, decode, png_chunk, turned

pytestmark = pytest.mark.slow

# 11 x 9 pixels of four inks
CMYK = base64.b64decode("""
/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwAUDg8SDw0UEhASFxUUGB4yIR4cHB49LC4kMklATEtHQEZFUFpzYlBVbVZFRmSI
ZW13e4GCgU5gjZeMfZZzfoF8/8AAFAgACQALBEMRAE0RAFkRAEsRAP/EABoAAAICAwAAAAAAAAAAAAAAAAIDBAUAAQb/
xAAxEAABAwEFAwoHAAAAAAAAAAABAgMRBAAFEiExIjRxBhM1QVFhc4GxsjNygrO0wsP/2gAOBEMATQBZAEsAAD8AMsBL
aQmnZ50QEpVTKIIIJgZAA7QMiOIiS2nZeS2olkBbC1KUzzOy8YIwiAB2ga6zGWQFhu8VpUWq1xYJBClHUiYxEQJyiDph
7dnBhbqm2loxtVJkhezjKZSAcoImCPPLqMwVi0ABm7wW9UkNOZg5jRMTYE1aXhzirwo2ySdlLBUBGWRsvNyV07TBaUZS
S8pBjvSlYAPaABwtCrWBU1bjyGH3QszjROEnriUGB3TlpZTG6v8AH9zZl/7uz4v9DaXX79U8D+PYK34Lviq+4La5PdC0
/wBXuNuevnpFz5UewWr6Dc2/P1Nre9ekXuI9Bb//2Q==""")


@pytest.fixture
def differs(cpp, tmp_path):
    """(bytes, grey) -> what differs of a file's pixels in C++ and in Python; "" for nothing."""

    def compare(data, grey):
        wanted = images.decode_image(data, "it", grey=grey)
        return apart(wanted, decode(cpp, tmp_path, data, grey))

    return compare


def resizes():
    """(pixels, new size): noise, checks and ramps; smaller, larger, by whole numbers, by little."""
    rng = np.random.default_rng(4)
    for index in range(40):
        height, width = (int(v) for v in rng.integers(1, 90 if index % 5 else 400, 2))
        channels = (1, 3)[index % 2]
        pixels = rng.integers(0, 256, (height, width, channels), np.uint8)
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
        "nearest": cv2.INTER_NEAREST, "linear": cv2.INTER_LINEAR, "cubic": cv2.INTER_CUBIC,
        "area": cv2.INTER_AREA, "lanczos": cv2.INTER_LANCZOS4,
    }  # fmt: skip
    for pixels, (height, width) in resizes():
        enlarges = height > pixels.shape[0] or width > pixels.shape[1]
        flag = flags["linear" if kind == "area" and enlarges else kind]
        wanted = opencv().resize(pixels, (width, height), interpolation=flag)
        pixels.tofile(tmp_path / "in")
        color = "grey" if pixels.shape[2] == 1 else "bgr"
        options = {"size": [height, width], "interpolation": kind, "scale": 1.0, "color": color}
        asked = {"path": str(tmp_path / "in"), "out": str(tmp_path / "out")}
        cpp("apply", shape=pixels.shape, options=options | {"layout": "nhwc"}, **asked)
        made = np.fromfile(tmp_path / "out", np.float32)
        assert (made == wanted.ravel()).all(), (kind, pixels.shape, (height, width))


# (top, left, step down, step across) of a pass
ADAM7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2)]
ADAM7 += [(1, 0, 2, 1)]


def interlaced(height, width, depth, kind, *before):
    """A PNG of noise in the seven passes of Adam7."""
    rng = np.random.default_rng(depth + kind)
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    rows = b""
    for top, left, down, across in ADAM7:
        columns, lines = -((left - width) // across), -((top - height) // down)
        if columns > 0:
            rows += b"".join(b"\0" + rng.bytes((columns * bits + 7) // 8) for _ in range(lines))
    if kind == 3:
        before = (*before, (b"PLTE", rng.bytes(3 << depth)))
    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 1)
    parts = [(b"IHDR", head), *before, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*part) for part in parts)


GAMMA = (b"gAMA", struct.pack(">I", 45455))
KINDS = [(0, d) for d in (1, 2, 4, 8, 16)] + [(3, d) for d in (1, 2, 4, 8)]
KINDS += [(kind, depth) for kind in (2, 4, 6) for depth in (8, 16)]


@pytest.mark.parametrize("grey", [False, True])
def test_interlaced_pngs_of_every_kind_agree(differs, grey):
    for kind, depth in KINDS:
        for before in ((), (GAMMA,), ((b"sRGB", b"\0"),)):
            data = interlaced(19, 21, depth, kind, *before)
            assert not differs(data, grey), (kind, depth, before)


@pytest.mark.parametrize("grey", [False, True])
def test_four_inks_agree(differs, grey):
    assert not differs(CMYK, grey)


# ---- which way up ---------------------------------------------------------------------------
SIGN = b"Exif\0\0"
XMP = b"http://ns.adobe.com/xap/1.0/\0<x/>"


UPRIGHT = {
    "after XMP": [XMP, SIGN + block(turned(6))], "before XMP": [SIGN + block(turned(5)), XMP],
    "the first of two": [SIGN + block(turned(3)), SIGN + block(turned(6))],
    "the first is broken": [SIGN + b"zz", SIGN + block(turned(6))],
    "the first is empty": [SIGN, SIGN + block(turned(8))],
    "the first does not tell": [SIGN + block((271, 2, 3, 0)), SIGN + block(turned(7))],
    "without its sign": [b"abcdef" + block(turned(6))], "cut": [SIGN + block(turned(6))[:20]],
    "more fields than there are": [SIGN + block(turned(6))[:8] + b"\5" + block(turned(6))[9:]],
    "behind a text outside": [SIGN + block((271, 2, 100, 5000), turned(6))],
    "behind a text inside": [SIGN + block((271, 2, 8, 12), turned(6))],
    "before a text outside": [SIGN + block(turned(6), (272, 2, 100, 5000))],
    "behind a fraction outside": [SIGN + block((282, 5, 1, 5000), turned(6))],
    "behind six outside": [SIGN + block((532, 5, 6, 8), turned(6))],
    "behind a field nobody reads": [SIGN + block((315, 2, 100, 5000), turned(6))],
    "twice": [SIGN + block(turned(4), turned(6))], "of no meaning": [SIGN + block(turned(77))],
    "high byte first": [SIGN + block(turned(2, ">"), order=">")],
    "of another mark": [SIGN + b"II+\0" + block(turned(6))[4:]],
}  # fmt: skip


@pytest.mark.parametrize("case", UPRIGHT)
def test_pictures_stand_the_same_way_up(differs, case):
    pixels = np.random.default_rng(2).integers(0, 256, (20, 30, 3), np.uint8)
    data = cv2.imencode(".jpg", pixels)[1].tobytes()
    segments = (b"\xff\xe1" + struct.pack(">H", len(one) + 2) + one for one in UPRIGHT[case])
    assert not differs(data[:2] + b"".join(segments) + data[2:], False)


def test_an_exif_chunk_turns_a_png(differs):
    for value in range(10):
        told = (b"eXIf", block(turned(value, ">"), order=">"))
        assert not differs(interlaced(5, 9, 8, 2, told), False), value


def test_the_decoder_tells_its_version_and_what_it_does_not_read(cpp, tmp_path):
    version = cpp("decoder")["library"]
    names = [part.split()[0] for part in version.split(", ")]
    assert names == (["OpenCV"] if cpp.reads_all else ["libjpeg-turbo", "libpng", "libwebp"])
    assert all(part.split()[1][0].isdigit() for part in version.split(", "))
    (tmp_path / "it").write_bytes(interlaced(5, 9, 8, 2, (b"acTL", struct.pack(">II", 1, 0))))
    asked = {"path": str(tmp_path / "it"), "name": "it", "out": str(tmp_path / "out")}
    answer = cpp("decode", grey=False, **asked)
    told = "this build reads no animated PNG; convert the picture, or build calib8 with"
    assert told in answer.get("message", "") or cpp.reads_all
    assert "shape" in answer or not cpp.reads_all
