"""What a file that is not a TensorRT calibration cache most likely is: the end of a sentence."""

from __future__ import annotations

import re

# First bytes -> what follows the file's name in the error.
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\xef\xbb\xbfTRT-", "starts with a UTF-8 byte order mark; save it as UTF-8 without BOM"),
    (b"\xff\xfe", "is UTF-16 text (a Windows redirect?); save it as plain UTF-8"),
    (b"\xfe\xff", "is UTF-16 text (a Windows redirect?); save it as plain UTF-8"),
    (b"version https://git-lfs", "is a Git LFS pointer; run `git lfs pull` to get the file itself"),
    (b"\x80\x02", "is a Python pickle, which is never opened here"),
    (b"\x80\x03", "is a Python pickle, which is never opened here"),
    (b"\x80\x04", "is a Python pickle, which is never opened here"),
    (b"\x80\x05", "is a Python pickle, which is never opened here"),
    (b"\x93NUMPY", "is a numpy array; give it as calibration data instead"),
    (b"PK\x03\x04", "is a zip archive (an .npz or a torch checkpoint?)"),
    (b"ptrt", "is a TensorRT engine, not the cache it was built from"),
    (b"ftrt", "is a TensorRT engine, not the cache it was built from"),
    (b"\x1f\x8b", "is gzip-compressed; unpack it first"),
)
_ORT_LINE = re.compile(rb"\S.* [-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_HEX_LINE = re.compile(rb".+: [0-9A-Fa-f]{1,8}")
_RECORD = re.compile(rb"\s*record\s*\{")
_UNPRINTABLE = re.compile(rb"[\x00-\x08\x0e-\x1f]")


def likely_origin(data: bytes) -> str:
    """A clause that tells the likely origin of `data` and, where there is one, the way out."""
    for magic, clause in _MAGIC:
        if data.startswith(magic):
            return clause
    if _UNPRINTABLE.search(data[:4096]):
        return _binary_origin(data)
    return _text_origin(data)


def _binary_origin(data: bytes) -> str:
    # A flatbuffer starts with the offset of its root table, little endian, inside the file.
    root = int.from_bytes(data[:4], "little")
    if 4 <= root < min(len(data), 4096) and root % 4 == 0:
        return "looks like onnxruntime's calibration.flatbuffers, which TensorRT itself cannot read"
    if data[:1] == b"\x08" and b"\x12" in data[:64]:
        return "looks like an ONNX model; the cache is the text file beside it"
    return "is a binary file of another kind"


def _text_origin(data: bytes) -> str:
    first = data.split(b"\n", 1)[0].rstrip(b"\r")
    start = data.lstrip()[:1]
    if start in (b"{", b"["):
        return (
            "is JSON (onnxruntime's calibration.json, or a table of another tool), which TensorRT"
            " itself cannot read"
        )
    if data.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "is a web page; download the raw file instead"
    if _RECORD.match(data):
        return "looks like a quantization record of Ascend's AMCT"
    if _HEX_LINE.fullmatch(first):
        return f"has entries but no header (it begins with {_shown(first)}); put the header back"
    if _ORT_LINE.fullmatch(first):
        return (
            "looks like onnxruntime's own calibration table (name and range, in decimal), which"
            " bears the same file name but is another format; calibrate again with"
            " --target tensorrt"
        )
    if first.startswith(b"TRT-") or b"TRT-".startswith(first):
        return f"has the damaged first line {_shown(first)}; write it again"
    return f"begins with {_shown(first)}, which no known calibration tool writes"


def _shown(first: bytes) -> str:
    return repr(first[:60].decode("utf-8", "replace"))
