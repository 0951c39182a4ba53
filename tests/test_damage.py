"""Pictures that are damaged or too large, and what their decoders say of it."""

import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from deploy.errors import FeedError
from deploy.feed import headers, images
from deploy.feed.feed import open_feed
from deploy.feed.images import heard, overheard
from deploy.tensors import TensorSpec

cv2 = pytest.importorskip("cv2")
IMAGE = TensorSpec("x", "float32", ("n", 3, 16, 16))
NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
PHOTO = cv2.resize(NOISE, (600, 400), interpolation=cv2.INTER_CUBIC)


def encoded(suffix: str, pixels=PHOTO, *options: int) -> bytes:
    done, data = cv2.imencode(suffix, pixels, options)
    assert done
    return data.tobytes()


JPEG, PNG = encoded(".jpg"), encoded(".png")
PROGRESSIVE = encoded(".jpg", PHOTO, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
RESTARTS = encoded(".jpg", PHOTO, cv2.IMWRITE_JPEG_RST_INTERVAL, 8)


def zeroed(data: bytes, share: float, count: int = 400) -> bytes:
    at = int(len(data) * share)
    return data[:at] + bytes(count) + data[at + count :]


def chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


def fed(folder, data: bytes, suffix: str = ".jpg", **options):
    (folder / "good.png").write_bytes(PNG)
    (folder / f"it{suffix}").write_bytes(data)
    feed = open_feed(folder, [IMAGE], **options)
    with feed.samples() as samples:
        return feed, list(samples)


# ---- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PROGRESSIVE", "RESTARTS"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_a_jpeg_damaged_inside_is_told_in_its_decoders_words(tmp_path, capfd, kind, share):
    damaged = zeroed(globals()[kind], share)
    with pytest.raises(
        FeedError, match=r"it\.jpg .*(its decoder says: \w+ \w+|damaged: a hole of zeros)"
    ):
        fed(tmp_path, damaged)
    feed, samples = fed(tmp_path, damaged, skip_bad=True)
    assert len(samples) == 1 and "1 skipped: image it.jpg" in feed.notes[-1]
    assert capfd.readouterr().err == ""


def test_a_hole_that_libjpeg_decodes_without_a_word_is_told(tmp_path):
    silent = 0
    for share in np.linspace(0.2, 0.9, 40):
        damaged = zeroed(JPEG, share)
        with overheard() as said:
            pixels = cv2.imdecode(np.frombuffer(damaged, np.uint8), 1)
        silent += not said and pixels is not None
        with pytest.raises(FeedError):
            images.decode(damaged, "it.jpg", grey=False)
    assert silent


def test_flat_pictures_whose_code_is_zeros_are_whole():
    flat = np.full((1000, 1500, 3), 128, np.uint8)
    flat[300:500, 300:500] = NOISE[0, 0]
    for data in (
        encoded(".jpg", flat, cv2.IMWRITE_JPEG_OPTIMIZE, 1),
        encoded(".jpg", flat, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        encoded(".jpg", flat) + b"behind its end" + bytes(1000) + b"\xff\xd9",
    ):
        assert bytes(64) in data
        assert images.decode(data, "it.jpg", grey=False).shape == flat.shape


def test_a_jpeg_cut_in_its_middle_with_an_end_marker_is_told(tmp_path, capfd):
    with pytest.raises(FeedError, match=r"Corrupt JPEG data: premature end of data segment"):
        fed(tmp_path, JPEG[: len(JPEG) // 2] + b"\xff\xd9")
    assert capfd.readouterr().err == ""


def test_a_png_with_sound_checksums_and_broken_pixels_is_told(tmp_path, capfd):
    at = PNG.index(b"IDAT")
    length = int.from_bytes(PNG[at - 4 : at], "big")
    pixels = zlib.decompress(PNG[at + 4 : at + 4 + length]) if PNG.count(b"IDAT") == 1 else b""
    header = chunk(b"IHDR", (600).to_bytes(4, "big") + (400).to_bytes(4, "big") + b"\x08\2\0\0\0")
    filters = b"\x09" + (pixels or bytes(1801 * 400))[1:]
    made = PNG[:8] + header + chunk(b"IDAT", zlib.compress(filters)) + chunk(b"IEND", b"")
    with pytest.raises(FeedError, match=r"it\.png cannot be decoded .*libpng error: bad adaptive"):
        fed(tmp_path, made, ".png")
    assert capfd.readouterr().err == ""


def test_words_that_tell_of_no_pixels_refuse_nothing(tmp_path, capfd):
    profile = PNG[:33] + chunk(b"iCCP", b"x\0\0" + zlib.compress(b"junk" * 40)) + PNG[33:]
    with overheard() as said:
        cv2.imdecode(np.frombuffer(profile, np.uint8), 1)
    assert any("iCCP" in line for line in said)
    feed, samples = fed(tmp_path, profile, ".png")
    assert len(samples) == 2 and np.array_equal(samples[0]["x"], samples[1]["x"])
    revision = JPEG.replace(b"JFIF\0\1", b"JFIF\0\7", 1)
    with overheard() as said:
        cv2.imdecode(np.frombuffer(revision, np.uint8), 1)
    assert any("revision" in line for line in said)
    (tmp_path / "it.png").unlink()
    assert len(fed(tmp_path, revision)[1]) == 2
    assert feed.notes == open_feed(tmp_path, [IMAGE]).notes
    assert capfd.readouterr().err == ""


def test_only_decoders_are_overheard(capfd):
    with overheard() as said:
        print("a progress bar", file=sys.stderr, flush=True)
    assert said == [] and "a progress bar" in capfd.readouterr().err
    cv2.imdecode(np.frombuffer(JPEG[:1000] + b"\xff\xd9", np.uint8), 1)
    assert "Corrupt JPEG data" in capfd.readouterr().err  # afterwards the screen is as it was


def test_words_are_those_of_the_picture_whoever_decodes_beside_it(capfd):
    cut, sound = JPEG[: len(JPEG) // 2] + b"\xff\xd9", JPEG
    kinds = [cut if number % 7 == 0 else sound for number in range(200)]

    def words(data):
        return heard(lambda: cv2.imdecode(np.frombuffer(data, np.uint8), 1))[1]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(words, kinds))
    assert [bool(said) for said in found] == [data is cut for data in kinds]
    assert all(len(said) == 1 for said in found if said)
    assert capfd.readouterr().err == ""


def test_a_decoder_that_talks_by_itself_is_asked_once():
    calls = []

    def decode():
        calls.append(1)
        cv2.imdecode(np.frombuffer(JPEG[:1000] + b"\xff\xd9", np.uint8), 1)

    assert heard(decode)[1] and len(calls) == 1


@pytest.mark.parametrize(
    "words, damage",
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
def test_which_words_mean_damage(monkeypatch, words, damage):
    monkeypatch.setattr(images, "heard", lambda decode: (decode(), [words]))
    if not damage:
        images.decode(JPEG, "it.jpg", grey=False)
        return
    with pytest.raises(FeedError, match=words):
        images.decode(JPEG, "it.jpg", grey=False)


# ---- size -----------------------------------------------------------------------------------

KINDS = [".png", ".jpg", ".webp", ".bmp", ".tiff", ".ppm", ".pgm", ".jp2", ".avif"]


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize("size", [(37, 21), (600, 400)])
def test_sides_are_read_from_the_header(suffix, size):
    pixels = cv2.resize(PHOTO, size)
    if suffix == ".pgm":
        pixels = pixels[:, :, 0].copy()
    try:
        done, data = cv2.imencode(suffix, pixels)
    except cv2.error:
        done = False
    if not done:
        pytest.skip(f"this OpenCV writes no {suffix} of this size")
    data = data.tobytes()
    assert headers.sides(data) == size
    for length in range(0, 64):  # a header that is cut says nothing, or the truth
        assert headers.sides(data[:length]) in (None, size)


def test_sides_of_other_headers():
    lossless = encoded(".webp", PHOTO, cv2.IMWRITE_WEBP_QUALITY, 101)
    assert headers.sides(lossless) == headers.sides(PROGRESSIVE) == (600, 400)
    assert headers.sides(b"P5 # a comment\n600 400\n255\n") == (600, 400)
    assert headers.sides(b"GIF89a" + bytes([88, 2, 144, 1])) == (600, 400)
    assert headers.sides(b"hello") is headers.sides(b"") is None


def test_a_small_file_of_a_vast_picture_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    sides = (30_000).to_bytes(4, "big") * 2
    vast = PNG[:8] + chunk(b"IHDR", sides + b"\x08\0\0\0\0") + chunk(b"IEND", b"")
    monkeypatch.setattr(cv2, "imdecode", None)
    with pytest.raises(
        FeedError, match=r"it\.png must have at most 268,435,456 pixels, got 30000x30000; give a"
    ):
        images.decode(vast, "it.png", grey=False)


def test_a_vast_file_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "it.png").open("wb") as file:
        file.truncate(50 << 30)
    (tmp_path / "good.png").write_bytes(PNG)
    with pytest.raises(FeedError, match=r"image it\.png must be of at most 1 GB, got 50\.0 GB"):
        open_feed(tmp_path, [IMAGE]).manifest()
    feed = open_feed(tmp_path, [IMAGE], skip_bad=True)
    with feed.samples() as samples:
        assert len(list(samples)) == 1
    assert "at most 1 GB" in feed.notes[-1]
