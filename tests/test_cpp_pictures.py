"""Pictures of every kind, damaged and whole, in C++ and here: the same pixels, the same words."""

import struct
import subprocess
import zlib
from functools import partial

import cv2
import numpy as np
import pytest

from deploy.feed import file_list, images
from tests.test_cpp_parity import outcome

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


# ---- files that OpenCV does not write -------------------------------------------------------
def png_chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(pixels, *, depth=8, kind=2, chunks=(), interlaced=False):
    """A PNG of rows of bytes; `kind` is its colour type."""
    height = len(pixels)
    width = len(pixels[0]) * 8 // depth // {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced)
    rows = b"".join(b"\0" + bytes(row) for row in pixels)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*part) for part in parts)


def block(*fields, order="<"):
    """A TIFF block of (tag, type, count, value) fields."""
    mark = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(fields))
    return mark + b"".join(struct.pack(order + "HHII", *one) for one in fields) + bytes(4)


def turned(value, order="<"):
    return (274, 3, 1, value if order == "<" else value << 16)


def exif(orientation, order="<"):
    return block(turned(orientation, order), order=order)


def jpeg_with(marker, body):
    data = encoded(".jpg")
    return data[:2] + b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body + data[2:]


def riff(body):
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def riff_chunk(kind, body):
    return kind + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)


def three(value):
    return struct.pack("<I", value)[:3]


def webp_with(flags, width, height, body):
    size = three(width - 1) + three(height - 1)
    return riff(riff_chunk(b"VP8X", bytes([flags, 0, 0, 0]) + size) + body)


def webp(pixels, quality):
    return encoded(".webp", pixels, cv2.IMWRITE_WEBP_QUALITY, quality)


def webp_turned(orientation, head=b"", order="<", flags=8):
    still = webp(PHOTO, 90)[12:]
    return webp_with(flags, 126, 81, still + riff_chunk(b"EXIF", head + exif(orientation, order)))


def animated(*frames, canvas=(126, 81), flags=2, tail=b""):
    """An animation of (left, top, a still WebP of PHOTO's size or less)."""
    body = riff_chunk(b"ANIM", b"\x10\x20\x30\xff\0\0")
    for left, top, (width, height), still in frames:
        parts = still[12:] if still[12:16] != b"VP8X" else still[30:]
        head = b"".join(map(three, (left // 2, top // 2, width - 1, height - 1, 100))) + b"\0"
        body += riff_chunk(b"ANMF", head + parts)
    return webp_with(flags, *canvas, body + tail)


def bmp(rows, *, bits, palette=(), height=None):
    colours = b"".join(bytes((*one, 0)) for one in palette)
    data = b"".join(bytes(row) + bytes(-len(row) % 4) for row in rows)
    width = len(rows[0]) * 8 // bits
    sizes = (40, width, height or len(rows), 1, bits, 0, 0, 0, 0, len(palette), 0)
    info = struct.pack("<IiiHHIIiiII", *sizes)
    start = 14 + len(info) + len(colours)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + info + colours + data


def kinds():
    """Name -> bytes of a picture, over 60 of them."""
    rng = np.random.default_rng(1)
    palette = rng.integers(0, 256, (16, 3), dtype=np.uint8)
    indices = rng.integers(0, 16, (20, 24), dtype=np.uint8)
    found = {}
    for name in ("411", "420", "422", "440", "444"):
        factor = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}")
        found[f"jpeg {name}"] = encoded(".jpg", PHOTO, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor)
    for name, value in (("QUALITY", 1), ("QUALITY", 100), ("PROGRESSIVE", 1), ("OPTIMIZE", 1)):
        option = getattr(cv2, f"IMWRITE_JPEG_{name}")
        found[f"jpeg {name.lower()} {value}"] = encoded(".jpg", PHOTO, option, value)
    found["jpeg restarts"] = encoded(".jpg", PHOTO, cv2.IMWRITE_JPEG_RST_INTERVAL, 3)
    found["jpeg grey"] = encoded(".jpg", GREY)
    found["jpeg of one pixel"] = encoded(".jpg", PHOTO[:1, :1])
    found["jpeg of a row"] = encoded(".jpg", PHOTO[:1])
    found["jpeg with a comment"] = jpeg_with(0xFE, b"hello")
    found["jpeg of another revision"] = encoded(".jpg").replace(b"JFIF\0\1", b"JFIF\0\7", 1)
    found["jpeg and what is behind it"] = encoded(".jpg") + b"behind" * 40 + b"\xff\xd9"
    for number in range(1, 9):
        found[f"jpeg orientation {number}"] = jpeg_with(0xE1, b"Exif\0\0" + exif(number))
        found[f"webp orientation {number}"] = webp_turned(number)
    found["jpeg orientation 6, big endian"] = jpeg_with(0xE1, b"Exif\0\0" + exif(6, ">"))
    found["jpeg orientation 9"] = jpeg_with(0xE1, b"Exif\0\0" + exif(9))
    found["webp orientation 6, big endian"] = webp_turned(6, order=">")
    found["webp orientation 9"] = webp_turned(9)
    found["webp orientation 6, with a jpeg's name"] = webp_turned(6, b"Exif\0\0")
    found["webp orientation, cut"] = webp_turned(6)[:-8]
    found["webp orientation 6, without its flag"] = webp_turned(6, flags=0)
    found["webp"], found["webp lossless"] = webp(PHOTO, 60), webp(PHOTO, 101)
    found["webp alpha"], found["webp lossless alpha"] = webp(ALPHA, 80), webp(ALPHA, 101)
    size = (60, 40)
    whole = [(0, 0, (126, 81), found["webp"]), (0, 0, (126, 81), found["webp lossless"])]
    found["webp animation"] = animated(*whole)
    found["webp animation lossless"] = animated(*reversed(whole))
    corner = (20, 10, size, encoded(".webp", PHOTO[:40, :60]))
    found["webp animation of a corner"] = animated(corner, *whole)
    for name, quality in (("with alpha", 80), ("lossless with alpha", 101)):
        frame = (4, 2, size, webp(ALPHA[:40, :60], quality))
        found[f"webp animation {name}"] = animated(frame, flags=0x12)
    found["webp animation turned"] = animated(*whole, flags=10, tail=riff_chunk(b"EXIF", exif(6)))
    found["png"] = encoded(".png")
    found["png alpha"] = encoded(".png", ALPHA)
    found["png grey"] = encoded(".png", GREY)
    found["png 16 bits"] = encoded(".png", DEEP)
    found["png 16 bits grey"] = encoded(".png", DEEP[:, :, 0].copy())
    for name, depth in (("one bit", 1), ("two bits", 2), ("four bits", 4)):
        found[f"png of {name}"] = png(rng.integers(0, 256, (9, 4), np.uint8), depth=depth, kind=0)
    found["png grey alpha"] = png(rng.integers(0, 256, (9, 14), np.uint8), kind=4)
    colours = (b"PLTE", palette.tobytes())
    found["png palette"] = png(indices, kind=3, chunks=[colours])
    narrow = rng.integers(0, 256, (9, 4), np.uint8)
    found["png palette of four bits"] = png(narrow, depth=4, kind=3, chunks=[colours])
    found["png palette alpha"] = png(indices, kind=3, chunks=[colours, (b"tRNS", bytes(range(16)))])
    three_inks = rng.integers(0, 3, (9, 12), np.uint8)
    found["png transparent colour"] = png(three_inks, chunks=[(b"tRNS", bytes(6))])
    flat = PHOTO.reshape(81, -1)
    found["png gamma"] = png(flat, chunks=[(b"gAMA", struct.pack(">I", 100000))])
    found["png text"] = png(flat, chunks=[(b"tEXt", b"a\0b")])
    profile = b"x\0\0" + zlib.compress(b"junk" * 40)
    found["png of an odd profile"] = png(flat, chunks=[(b"iCCP", profile)])
    found["png of no compression"] = encoded(".png", PHOTO, cv2.IMWRITE_PNG_COMPRESSION, 0)
    found["bmp"] = encoded(".bmp")
    found["bmp grey"] = encoded(".bmp", GREY)
    found["bmp alpha"] = encoded(".bmp", ALPHA)
    found["bmp palette"] = bmp(indices, bits=8, palette=palette)
    found["bmp of one bit"] = bmp(indices, bits=1, palette=palette[:2])
    found["bmp of four bits"] = bmp(indices, bits=4, palette=palette)
    found["bmp upside down"] = bmp(flat[:, :60], bits=24, height=-81)
    for suffix in (".ppm", ".pgm", ".pbm"):
        pixels = PHOTO if suffix == ".ppm" else GREY
        for binary in (0, 1):
            data = encoded(suffix, pixels, cv2.IMWRITE_PXM_BINARY, binary)
            found[f"{suffix[1:]} {binary}"] = data
    found["pgm 16 bits"] = encoded(".pgm", DEEP[:, :, 0].copy())
    for name in ("NONE", "LZW", "ADOBE_DEFLATE", "PACKBITS"):
        option = cv2.IMWRITE_TIFF_COMPRESSION, getattr(cv2, f"IMWRITE_TIFF_COMPRESSION_{name}")
        found[f"tiff {name.lower()}"] = encoded(".tiff", PHOTO, *option)
    found["tiff grey"] = encoded(".tiff", GREY)
    found["tiff alpha"] = encoded(".tiff", ALPHA)
    found["tiff 16 bits"] = encoded(".tiff", DEEP)
    return found


KINDS = kinds()


def ours(data, grey=False):
    return outcome(lambda: images.decode_image(data, "it", grey=grey))


def decode(cpp, folder, data, grey=False):
    """The pixels of the C++ library, or its error."""
    (folder / "it").write_bytes(data)
    asked = {"path": str(folder / "it"), "name": "it", "out": str(folder / "out")}
    answer = cpp("decode", grey=grey, **asked)
    if "error" in answer:
        return answer
    return np.fromfile(folder / "out", np.uint8).reshape(answer["shape"])


@pytest.fixture
def theirs(cpp, tmp_path):
    """(bytes, grey) -> the pixels of the C++ library, or its error."""
    signs = (b"\xff\xd8", b"\x89PNG", b"RIFF") if not cpp.reads_all else b""
    decoder = partial(decode, cpp, tmp_path)
    decoder.reads = lambda data: data.startswith(signs)
    return decoder


def apart(left, right):
    """What two outcomes differ in; empty where they agree."""
    if isinstance(left, dict) or isinstance(right, dict):
        shown = [one if isinstance(one, dict) else one.shape for one in (left, right)]
        return "" if shown[0] == shown[1] and isinstance(left, dict) else f"{shown}"
    if left.shape != right.shape:
        return f"{left.shape} {right.shape}"
    most = int(np.abs(left.astype(int) - right).max())
    return f"by {most} in {int((left != right).sum())}" if most else ""


@pytest.mark.parametrize("grey", [False, True])
def test_pixels_of_every_kind_agree(theirs, grey):
    assert len(KINDS) >= 60
    differing = {kind: apart(ours(data, grey), theirs(data, grey)) for kind, data in KINDS.items()}
    for kind in [kind for kind, data in KINDS.items() if not theirs.reads(data)]:
        assert "this build reads JPEG, PNG and WebP alone" in differing.pop(kind)
    # a newer OpenCV cuts the grey of such a file off where an older one rounds it
    if grey and differing.get("bmp alpha", "").startswith("by 1 "):
        del differing["bmp alpha"]
    assert not any(differing.values()), {k: v for k, v in differing.items() if v}


def test_animations_that_are_broken_are_no_pictures(theirs):
    still = KINDS["webp"]
    outside = animated((20, 10, (126, 81), still))
    short = animated((0, 0, (126, 81), still))
    behind = animated(*[(0, 0, (126, 81), still)] * 2)
    broken = [outside, short[:60], short[:200], behind[:-20], behind.replace(b"ANIM", b"ANIX")]
    broken += [webp_with(2, 126, 81, riff_chunk(b"ANMF", b"x"))]
    for data in broken:
        assert "cannot be decoded" in theirs(data)["message"]
        assert "cannot be decoded" in ours(data)["message"]


# ---- damage ---------------------------------------------------------------------------------
def zeroed(data, share, count=400):
    at = int(len(data) * share)
    return data[:at] + bytes(count) + data[at + count :]


LARGE = cv2.resize(NOISE, (600, 400), interpolation=cv2.INTER_CUBIC)
JPEGS = {
    "sequential": encoded(".jpg", LARGE),
    "progressive": encoded(".jpg", LARGE, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "restarts": encoded(".jpg", LARGE, cv2.IMWRITE_JPEG_RST_INTERVAL, 8),
    "optimized": encoded(".jpg", LARGE, cv2.IMWRITE_JPEG_OPTIMIZE, 1),
    "grey": encoded(".jpg", LARGE[:, :, 1].copy()),
}


@pytest.mark.parametrize("kind", JPEGS)
def test_damage_inside_a_jpeg_is_told_in_the_same_words(theirs, kind):
    data = JPEGS[kind]
    refused = 0
    for share in np.linspace(0.15, 0.95, 17):
        damaged = zeroed(data, share)
        mine = ours(damaged)
        assert not apart(mine, theirs(damaged)), share
        refused += isinstance(mine, dict)
    assert refused > 8
    half = data[: len(data) // 2]
    for short in (half, half + b"\xff\xd9", data[:30], data[:3]):
        assert isinstance(ours(short), dict)
        assert not apart(ours(short), theirs(short))


def test_flat_pictures_whose_code_is_zeros_are_whole(theirs):
    flat = np.full((1000, 1500, 3), 128, np.uint8)
    flat[300:500, 300:500] = NOISE[0, 0]
    for option in (cv2.IMWRITE_JPEG_OPTIMIZE, cv2.IMWRITE_JPEG_PROGRESSIVE):
        data = encoded(".jpg", flat, option, 1)
        assert bytes(64) in data
        assert theirs(data).shape == flat.shape


def test_damage_of_other_kinds_is_told_in_the_same_words(theirs):
    rows = PHOTO.reshape(81, -1)
    header = png(rows)[:33]
    pixels = b"".join(b"\x09" + bytes(row) for row in rows)
    wrong_filter = header + png_chunk(b"IDAT", zlib.compress(pixels)) + png_chunk(b"IEND", b"")
    short = header + png_chunk(b"IDAT", zlib.compress(pixels[:900])) + png_chunk(b"IEND", b"")
    for data in (wrong_filter, short, KINDS["webp"][:-300], KINDS["bmp"][:80], b"hello", b"RIFF"):
        mine, its = ours(data), theirs(data)
        assert isinstance(mine, dict) and isinstance(its, dict), data[:40]
        if not data.startswith(b"\x89PNG") and (theirs.reads(data) or data == b"hello"):
            assert mine == its  # a PNG's decoder's words are not every version's
        assert mine["message"].split(":")[0].rstrip(")") == its["message"].split(":")[0].rstrip(")")
    assert "libpng error: bad adaptive filter value" in theirs(wrong_filter)["message"]


def vast():
    """Headers of pictures of 30000 x 20000 pixels, of every kind that tells."""
    wide, high = 30000, 20000
    sides = struct.pack(">II", wide, high)
    yield b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", sides + b"\x08\2\0\0\0")
    yield b"\xff\xd8\xff\xe0\0\4ab\xff\xc2\0\x0b\x08" + struct.pack(">HH", high, wide) + bytes(6)
    yield riff(riff_chunk(b"VP8X", bytes(4) + three(wide - 1) + three(high - 1)))
    yield b"BM" + bytes(12) + struct.pack("<Iii", 40, wide, -high) + bytes(24)
    yield b"BM" + bytes(12) + struct.pack("<IHH", 12, wide, high) + bytes(24)
    yield b"GIF89a" + struct.pack("<HH", wide, high)
    for order, mark in (("<", b"II"), (">", b"MM")):
        yield block((256, 4, 1, wide), (257, 4, 1, high), order=order)
        large = [struct.pack(f"{order}HHQQ", 256 + k, 16, 1, v) for k, v in enumerate((wide, high))]
        start = struct.pack(f"{order}HHHQQ", 43, 8, 0, 16, 2)
        yield mark + start + b"".join(large) + bytes(8)
    for kind in range(1, 7):
        yield b"P%d# a\n 30000\n#b\n20000 255\n" % kind
    yield b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(8) + b"ihdr" + struct.pack(">II", high, wide)
    yield b"\0\0\0\x1cftypavif" + bytes(30) + b"ispe" + struct.pack(">III", 0, wide, high)
    yield b"\xff\x4f\xff\x51" + bytes(4) + struct.pack(">IIII", wide + 5, high + 7, 5, 7)


def test_pictures_that_are_too_large_are_refused_by_their_header(theirs):
    seen = 0
    for data in vast():
        mine = ours(data)
        assert "268,435,456 pixels, got 30000x20000; give a" in mine["message"], data
        assert theirs(data) == mine
        seen += 1
        for length in range(2, len(data) if theirs.reads(data) else 2):
            assert not apart(ours(data[:length]), theirs(data[:length])), data[:length]
    assert seen == 19


def test_a_vast_file_is_refused_before_it_is_read(cpp, tmp_path):
    with (tmp_path / "it.png").open("wb") as file:
        file.truncate(50 << 30)
    picture = file_list.ImageFile(tmp_path / "it.png", "it.png")
    answer = cpp("decode", path=str(picture.path), name="it.png", out="", grey=False)
    assert answer == outcome(lambda: images.read_image_file(picture))
    assert "at most 1 GB, got 50.0 GB" in answer["message"]


def test_decoders_print_nothing(calib8_cache, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, data in enumerate([*JPEGS.values(), KINDS["png of an odd profile"]]):
        (folder / f"{number}.jpg").write_bytes(zeroed(data, 0.5) if number < 5 else data)
    (folder / "cut.pgm").write_bytes(KINDS["pgm 16 bits"][:200])
    (folder / "good.jpg").write_bytes(KINDS["jpeg of another revision"])
    command = [
        *calib8_cache, "feed", folder, "--input", "x:1x3x8x8", "--skip-bad", "-o", tmp_path / "out",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"samples": 2,' in done.stdout


# ---- lists ----------------------------------------------------------------------------------
SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]


def test_white_space_in_lists_is_unicodes(cpp, tmp_path):
    (tmp_path / "a b.png").write_bytes(KINDS["png"])
    listing = tmp_path / "list.txt"
    for space in [*SPACES, "\u200b", "\x1b"]:
        whole = f"{space}a b.png{space}\n"
        texts = f"a b.png{space}7\n", f"{space}\n{space}# a\n{whole}", f"a{space}b.png"
        for text in (whole, *texts):
            listing.write_text(text, encoding="utf-8", newline="")
            answer = cpp("list", path=str(listing))
            mine = outcome(lambda: [[one.name, one.label] for one in images.read_list(listing)])
            assert answer == (mine if isinstance(mine, dict) else {"pictures": mine}), repr(text)
