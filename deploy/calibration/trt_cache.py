"""TensorRT calibration cache: parse its text, write it byte for byte, diagnose other files.

::

    TRT-8503-EntropyCalibration2        header: version label, algorithm of the calibrator
    data: 3c008912                      tensor name, ": ", scale as float32 bits in hex
    conv/Conv2D:0: 3c60dd38             a name may hold ":", so the line splits at the LAST ": "
    (Unnamed Layer* 4) [Shuffle]_output: 0      no zero padding: zero is one digit

The scale is amax / 127. The version label is major*1000 + minor*100 + patch up to TensorRT 9 and
major*10000 + minor*100 + patch from 10. The legacy calibrator writes another first line: "0", then
the regression cutoff and the quantile as the hex digits of two float64.

Sources: NVIDIA/TensorRT samples/sampleINT8 README ("Calibration file") and the parser in
samples/common/sampleEngines.cpp; zero, infinity and the two label rules were found in caches that
TensorRT 5.1 to 10.14 wrote.
"""

import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from calibrators.percentile import QUANTILE
from deploy.errors import CacheError

# first bytes (one or several forms) -> clause that follows the file's name in the error
_CLAUSE_BY_MAGIC: Mapping[bytes | tuple[bytes, ...], str] = {
    b"\xef\xbb\xbfTRT-": "starts with a UTF-8 byte order mark; save it as UTF-8 without BOM",
    (b"\xff\xfe", b"\xfe\xff"): "is UTF-16 text (a Windows redirect?); save it as plain UTF-8",
    b"version https://git-lfs": "is a Git LFS pointer; run `git lfs pull` to get the file itself",
    (b"ptrt", b"ftrt"): "is a TensorRT engine, not the cache it was built from",
}
_ORT_LINE = re.compile(rb"\S.* [-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_HEX_LINE = re.compile(rb".+: [0-9A-Fa-f]{1,8}")
_RECORD = re.compile(rb"\s*record\s*\{")
_UNPRINTABLE = re.compile(rb"[\x00-\x08\x0e-\x1f]")
ENTROPY2 = "EntropyCalibration2"
MINMAX = "MinMaxCalibration"
LEGACY = "LegacyCalibration"
_HEADER = re.compile(r"TRT-([0-9]{4,6})-([A-Za-z]+[0-9]*)")
_LEGACY_HEADER = re.compile(r"0([0-9a-f]{32})")
_LEGACY_CUTOFF = 1.0  # regression cutoff of TensorRT's legacy calibrator by default
_HEX = re.compile(r"[0-9A-Fa-f]{1,8}")
_VERSION = re.compile(r"([0-9]{1,2})\.([0-9]{1,2})\.([0-9]{1,2})(?:\.[0-9]+)?")


def likely_origin(data: bytes) -> str:
    """Return a clause on the likely origin of `data`, with advice if there is any."""
    for magic, clause in _CLAUSE_BY_MAGIC.items():
        if data.startswith(magic):
            return clause
    if _UNPRINTABLE.search(data[:4096]):
        return "is a binary file of another kind"
    return _text_origin(data)


def _text_origin(data: bytes) -> str:
    """Return a clause on the likely origin of a text that is no cache, with advice.

    The subject of the clause is the file's name: "looks like a quantization record of ...".
    """
    content = data.lstrip()
    if content.startswith((b"{", b"[")):
        return (
            "is JSON (onnxruntime's calibration.json, or a table of another tool), which TensorRT"
            " itself cannot read"
        )
    if _RECORD.match(data):
        return "looks like a quantization record of Ascend's AMCT"
    first_line = data.split(b"\n", 1)[0].rstrip(b"\r")
    beginning = repr(first_line[:60].decode("utf-8", "replace"))
    if _HEX_LINE.fullmatch(first_line):
        return f"has entries but no header (it begins with {beginning}); put the header back"
    if _ORT_LINE.fullmatch(first_line):
        return (
            "looks like onnxruntime's own calibration table (name and range, in decimal), which"
            " bears the same file name but is another format; calibrate again with"
            " --target tensorrt"
        )
    is_cut_off_header = b"TRT-".startswith(first_line)  # "TR", for example, or an empty line
    if first_line.startswith(b"TRT-") or is_cut_off_header:
        return f"has the damaged first line {beginning}; write it again"
    return f"begins with {beginning}, which no known calibration tool writes"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a cache.

    Attributes:
        name: the tensor.
        digits: the hex digits of the scale as written.
        end: the line end.
    """

    name: str
    digits: str
    end: str = "\n"

    @property
    def bits(self) -> int:
        """The float32 bit pattern, 0 to 2**32 - 1."""
        return int(self.digits, 16)

    @property
    def scale(self) -> np.float32:
        """Real value of one int8 step: amax / 127."""
        return np.uint32(self.bits).view(np.float32)

    @property
    def flaw(self) -> str | None:
        """Why a Q/DQ node cannot have this scale (zero, inf, NaN, negative), or None."""
        if np.isnan(self.scale):
            return "NaN"
        if self.bits >> 31:
            return "negative"
        if np.isinf(self.scale):
            return "inf"
        if self.bits == 0:
            return "zero"
        return None


@dataclass(frozen=True, slots=True)
class Header:
    """The first line.

    Attributes:
        text: the line without its end.
        label: TensorRT's version label; None in the legacy form, which has none.
        algorithm: name of the calibrator, such as "EntropyCalibration2".
        cutoff, quantile: parameters of the legacy form, else None.
        end: the line end.
    """

    text: str
    label: int | None
    algorithm: str
    cutoff: float | None = None
    quantile: float | None = None
    end: str = "\n"

    @property
    def version(self) -> str | None:
        """The label as "X.Y.Z", or None in the legacy form."""
        if self.label is None:
            return None
        return label_to_version(self.label)


@dataclass(frozen=True, slots=True)
class CalibrationCache:
    """A calibration cache.

    Attributes:
        header: the first line.
        entries: the other lines in file order, duplicates included.
    """

    header: Header
    entries: tuple[Entry, ...]

    def duplicates(self) -> list[str]:
        """Names that occur more than once, in order of first occurrence."""
        counts = Counter(entry.name for entry in self.entries)
        return [name for name, count in counts.items() if count > 1]

    def flaws(self) -> dict[str, str]:
        """Name -> why its scale is unusable in a Q/DQ node (zero, inf, NaN, negative)."""
        return {entry.name: entry.flaw for entry in self.entries if entry.flaw}

    def scales(self) -> dict[str, np.float32]:
        """Name -> float32 scale, in file order.

        Raises:
            CacheError: a name has two different scales.
        """
        bits_by_name: dict[str, int] = {}
        for entry in self.entries:
            first_bits = bits_by_name.setdefault(entry.name, entry.bits)
            if first_bits != entry.bits:
                raise CacheError(
                    f"one tensor has one scale, got {entry.name!r} with {first_bits:x} and"
                    f" {entry.bits:x}; remove the wrong line"
                )
        return {entry.name: entry.scale for entry in self.entries}


def version_label(version: str) -> int:
    """Return the label of a version: 8.5.3 -> 8503, 10.14.1 -> 101401; drops a build number."""
    match = _VERSION.fullmatch(version.strip())
    if match is None or int(match[1]) == 0:
        raise CacheError(f"a TensorRT version reads X.Y.Z, such as 8.5.3, got {version!r}")
    major, minor, patch = map(int, match.groups())
    if major < 10 and minor > 9:
        raise CacheError(f"TensorRT below 10 has one-digit minor versions, got {version!r}")
    base = 1000 if major < 10 else 10000
    return major * base + minor * 100 + patch


def label_to_version(label: int) -> str:
    """Return the version of a label: 8503 -> 8.5.3, 101401 -> 10.14.1; inverts `version_label`."""
    base = 10000 if label >= 100000 else 1000
    return f"{label // base}.{label % base // 100}.{label % 100}"


def parse(data: bytes, *, origin: str) -> CalibrationCache:
    """Parse the text of a cache; `origin` names it in errors.

    Zero, infinite and NaN scales, duplicates and any order are accepted (see `flaws`,
    `duplicates`), since TensorRT writes them.

    Raises:
        CacheError: the text is not a TensorRT cache (names its likely origin), or is broken.
    """
    lines = _split_lines(data)  # (text, line break) of each
    if not lines:
        raise CacheError(f"{origin} is empty; calibrate again to write it")
    header_text, header_end = lines[0]
    header = _parse_header(header_text, header_end)
    if header is None:
        raise CacheError(
            f"a TensorRT calibration cache starts with a line such as TRT-8503-{ENTROPY2};"
            f" {origin} {likely_origin(data)}"
        )
    if len(lines) == 1:
        raise CacheError(
            f"a calibration cache holds one line a tensor; {origin} ends after its first line,"
            " so it was cut off; write it again"
        )
    entries = []
    for number, (text, end) in enumerate(lines[1:], start=2):
        entries.append(_parse_entry(text, end, line=number, origin=origin))
    return CalibrationCache(header, tuple(entries))


def dump(cache: CalibrationCache) -> bytes:
    """Return the bytes of a cache file; a cache that was read is returned byte for byte."""
    text = cache.header.text + cache.header.end
    for entry in cache.entries:
        text += f"{entry.name}: {entry.digits}{entry.end}"
    return text.encode("utf-8", "surrogateescape")


def from_scales(
    scales: Mapping[str, np.float32],
    *,
    version: str,
    algorithm: str = ENTROPY2,
) -> CalibrationCache:
    """Make a cache from the scales of tensors.

    Args:
        scales: tensor name -> scale (amax / 127), in the order of the file. A zero scale (of a
            tensor that is always zero) and infinity are written as TensorRT writes them.
        version: TensorRT version that will read the cache, "X.Y.Z".
        algorithm: name of TensorRT's calibrator, for the first line.

    Raises:
        CacheError: no scales, a NaN or negative scale, or a name that no cache line can hold.
    """
    if not scales:
        raise CacheError("a calibration cache needs at least one scale, got none")
    entries = tuple(_make_entry(name, scale) for name, scale in scales.items())
    return CalibrationCache(_make_header(version, algorithm), entries)


def relabel(
    cache: CalibrationCache, *, version: str, algorithm: str | None = None
) -> CalibrationCache:
    """Return the same entries with the header of another TensorRT version or algorithm.

    A cache in the legacy form has no version label, so without another algorithm it is returned
    unchanged.
    """
    header = _make_header(version, algorithm or cache.header.algorithm)
    if header.label is None and cache.header.label is None:  # both are in the legacy form
        return cache
    return replace(cache, header=replace(header, end=cache.header.end))


def _make_header(version: str, algorithm: str) -> Header:
    """Return the first line of a cache; that of the legacy algorithm has its default parameters."""
    label = version_label(version)
    text = f"TRT-{label}-{algorithm}"
    if algorithm == LEGACY:
        text = "0" + struct.pack(">dd", _LEGACY_CUTOFF, QUANTILE).hex()
    header = _parse_header(text, "\n")
    if header is None:
        raise CacheError(f"an algorithm is a word such as {ENTROPY2}, got {algorithm!r}")
    return header


def _parse_header(text: str, end: str) -> Header | None:
    if match := _HEADER.fullmatch(text):
        return Header(text, int(match[1]), match[2], end=end)
    if match := _LEGACY_HEADER.fullmatch(text):
        cutoff, quantile = struct.unpack(">dd", bytes.fromhex(match[1]))
        return Header(text, None, LEGACY, cutoff, quantile, end)
    return None


def _split_lines(data: bytes) -> list[tuple[str, str]]:
    """Split at LF, with CR in the line end: [(text, end)]; only the last end may be empty."""
    lines = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", data.decode("utf-8", "surrogateescape")):
        text = line.removesuffix("\n").removesuffix("\r")
        lines.append((text, line[len(text) :]))
    return lines


def _parse_entry(text: str, end: str, *, line: int, origin: str) -> Entry:
    """Return the entry of a line "name: hex", a tensor and its scale.

    Args:
        text: the line without its line break.
        end: its line break, LF with or without CR before it; a last line that was cut off has only
            the CR, or "".
        line: number of the line, for errors.
        origin: name of the file, for errors.

    Raises:
        CacheError: the line has another form, or was cut off.
    """
    name, _, digits = text.rpartition(": ")  # at the last one: a name may contain ": "
    is_valid = bool(name and _HEX.fullmatch(digits))
    # a line without line break may have lost digits, and "3d8" is still a number. It is taken as
    # complete only if it has 8 digits, or is "0": so are all usual scales
    is_complete = is_valid and (len(digits) == 8 or digits == "0")
    if "\n" not in end and not is_complete:
        raise CacheError(
            f"the last line of a calibration cache ends in a newline; {origin} stops in the midst"
            f" of line {line} ({text[:60]!r}), so it was cut off; write it again"
        )
    if not is_valid:
        raise CacheError(
            f"a cache line reads 'name: hex' with 1 to 8 hex digits; line {line} of {origin} is"
            f" {text[:60]!r}; remove that line or calibrate again"
        )
    return Entry(name, digits, end)


def can_hold_name(name: str) -> bool:
    """Whether a cache line can hold a tensor's name."""
    return bool(name) and "\n" not in name and "\r" not in name


def _make_entry(name: str, scale: np.float32) -> Entry:
    if not can_hold_name(name):
        raise CacheError(
            f"a cache holds one line a tensor, so a name has no line break and is not empty,"
            f" got {name!r}; rename the tensor in the model"
        )
    value = np.float32(scale)
    if np.isnan(value) or value < 0:
        raise CacheError(f"a scale is zero or more, got {value} for {name!r}; calibrate it again")
    return Entry(name, f"{int(abs(value).view(np.uint32)):x}")
