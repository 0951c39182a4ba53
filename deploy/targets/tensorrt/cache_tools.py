"""What `calib8 cache` does with calibration caches: compare, merge, check, convert.

An old calibrator's search as a method of calib8's, and its own cache beside ours.

What stands beside the cache of a build: which model it is for, and what it was made from.

So model, cache and this note are enough on a device, where C++'s `calib8-build` takes the cache
without the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrators.percentile import QUANTILE
from calibrators.tensorrt import CLASSES
from deploy.calibration import store, trt_cache
from deploy.calibration.reuse import fingerprint_of
from deploy.calibration.trt_cache import CalibrationCache, Entry
from deploy.errors import CacheError, ModelError
from deploy.files import atomic
from deploy.files.manifest import sha256
from deploy.files.reading import MOST_TEXT, read_bytes
from deploy.frontends.base import model_digest
from deploy.method import Method
from deploy.targets.tensorrt.trt_options import FP32, INT8

if TYPE_CHECKING:
    import onnx

    from deploy.feed.calibrator import CalibratorScript
    from deploy.targets.base import BuildRequest
    from deploy.targets.tensorrt.cache_qdq import Plain
    from deploy.targets.tensorrt.dla import Inferred
    from deploy.targets.tensorrt.match import EntryUse, Match


def read_cache(path: Path) -> CalibrationCache:
    """Read a cache file.

    Raises:
        CacheError: it cannot be read, or is no TensorRT calibration cache.
    """
    data = read_bytes(path, what="a calibration cache", error=CacheError, most=MOST_TEXT)
    return trt_cache.parse(data, origin=str(path))


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that two caches disagree on; a scale is None where the cache lacks it."""

    name: str
    first: np.float32 | None
    second: np.float32 | None

    @property
    def ratio(self) -> float | None:
        """Quotient second / first, where both are positive and finite."""
        if self.first is None or self.second is None:
            return None
        sound = all(np.isfinite(v) and v > 0 for v in (self.first, self.second))
        return float(self.second) / float(self.first) if sound else None


def diff(first: CalibrationCache, second: CalibrationCache) -> list[Difference]:
    """Tensors with different scales, largest change first, then those that one cache lacks."""
    a, b = first.scales(), second.scales()
    bits = [{e.name: e.bits for e in cache.entries} for cache in (first, second)]
    changed = [Difference(n, a[n], b[n]) for n in a if n in b and bits[0][n] != bits[1][n]]
    changed.sort(key=lambda d: -abs(np.log(d.ratio)) if d.ratio else -np.inf)
    gone = [Difference(n, a[n], None) for n in a if n not in b]
    new = [Difference(n, None, b[n]) for n in b if n not in a]
    return [*changed, *gone, *new]


def merge(caches: Sequence[CalibrationCache], *, on_conflict: str = "error") -> CalibrationCache:
    """The union of caches, in order of first occurrence, under the first one's header.

    Args:
        caches: at least one.
        on_conflict: of two different scales of one tensor: "error", "first", "last" or "max".

    Raises:
        CacheError: different headers, or a conflict under "error".
    """
    head = caches[0].header
    for cache in caches[1:]:
        if (cache.header.label, cache.header.algorithm) != (head.label, head.algorithm):
            raise CacheError(
                f"caches of one version and algorithm can be merged, got {head.text} and"
                f" {cache.header.text}; relabel one of them first (calib8 cache relabel)"
            )
    merged: dict[str, Entry] = {}
    for cache in caches:
        cache.scales()  # refuses contradictions inside one file
        for entry in cache.entries:
            merged[entry.name] = _choose(merged.get(entry.name), entry, on_conflict)
    entries = tuple(replace(entry, end=head.end or "\n") for entry in merged.values())
    return CalibrationCache(replace(head, end=head.end or "\n"), entries)


def _choose(old: Entry | None, new: Entry, on_conflict: str) -> Entry:
    if old is None or old.bits == new.bits or on_conflict == "last":
        return new if old is None or on_conflict == "last" else old
    if on_conflict == "error":
        raise CacheError(
            f"merged caches must agree, got {old.digits} and {new.digits} for {new.name!r}; choose"
            " with --on-conflict first, last or max"
        )
    return new if on_conflict == "max" and new.scale > old.scale else old


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `check` found; `harmful` where TensorRT would not do what is expected."""

    text: str
    harmful: bool


def check(
    cache: CalibrationCache,
    *,
    version: str | None = None,
    algorithm: str | None = None,
    matched: Match | None = None,
) -> list[Finding]:
    """What a user should know before a build with this cache.

    Args:
        cache: the cache.
        version: "X.Y.Z" of the TensorRT that is to read it.
        algorithm: of the calibrator that is to read it; `trtexec --calib` wants ENTROPY2.
        matched: its match with a model.
    """
    findings = [Finding(_flaw_text(n, f), f in ("NaN", "negative")) for n, f in _grouped(cache)]
    if cache.duplicates():
        conflict = False
        try:
            cache.scales()
        except CacheError:
            conflict = True
        names = ", ".join(cache.duplicates()[:3])
        findings.append(Finding(f"{len(cache.duplicates())} names occur twice: {names}", conflict))
    findings += _header_findings(cache, version, algorithm)
    if matched is not None:
        findings += _match_findings(matched)
    return findings


def _grouped(cache: CalibrationCache) -> list[tuple[list[str], str]]:
    flaws = cache.flaws()
    kinds = dict.fromkeys(flaws.values())
    return [([name for name, flaw in flaws.items() if flaw == kind], kind) for kind in kinds]


def _flaw_text(names: list[str], kind: str) -> str:
    meaning = {
        "zero": "always zero while calibrating",
        "inf": "infinite while calibrating, such as the mask of an attention; TensorRT keeps it"
        " in float",
        "NaN": "not a number: calibrate again",
        "negative": "no scale can be negative: calibrate again",
    }[kind]
    return f"{len(names)} {kind} scales ({', '.join(names[:3])}): {meaning}"


def _header_findings(
    cache: CalibrationCache, version: str | None, algorithm: str | None
) -> list[Finding]:
    header = cache.header
    found = []
    if version is not None and header.label not in (None, trt_cache.version_label(version)):
        found.append(
            Finding(
                f"TensorRT {version} ignores a cache of {header.version} and calibrates anew, with"
                f" nothing but a log line; calib8 cache relabel --trt-version {version} mends it",
                harmful=True,
            )
        )
    if algorithm is not None and header.algorithm != algorithm:
        found.append(
            Finding(
                f"a calibrator of {algorithm} ignores a cache of {header.algorithm}; calib8 cache"
                f" relabel --algorithm {algorithm} mends it",
                harmful=True,
            )
        )
    return found


def _match_findings(matched: Match) -> list[Finding]:
    missing = [t for t in matched.tensors if not t.covered]
    found = [
        Finding(
            f"{matched.covered} of {len(matched.tensors)} tensors to be quantized have a scale,"
            f" from {matched.used} of {len(matched.entries)} entries",
            harmful=False,
        )
    ]
    found += [Finding(f"{t.tensor}: {t.reason}", harmful=True) for t in missing]
    foreign = _foreign(matched)
    if foreign:
        names = ", ".join(e.name for e in foreign[:3])
        found.append(
            Finding(
                f"{len(foreign)} entries are of tensors that the model does not have ({names}):"
                " was the cache made from another model?",
                harmful=len(foreign) == len(matched.entries),
            )
        )
    return found


def _foreign(matched: Match) -> list[EntryUse]:
    """Entries of tensors that the model does not have."""
    unused = (entry for entry in matched.entries if entry.tensor is None)
    return [entry for entry in unused if entry.reason.startswith("no tensor")]


def cache_to_qdq(
    model: Path | str | onnx.ModelProto,
    cache: CalibrationCache,
    *,
    keep_batchnorm: bool = False,
    own_concat_scales: bool = False,
    parser: str | None = None,
    rest: str = FP32,
    precision: str = INT8,
) -> tuple[onnx.ModelProto, Match]:
    """An old cache and its float model -> the Q/DQ model, and the report of the match.

    Args:
        model: path of the ONNX file, or the model.
        cache: its calibration cache.
        keep_batchnorm: leave BatchNormalization nodes as they are, so that the float outputs of
            `qdq_to_cache` are bit for bit those of `model`.
        own_concat_scales: see `deploy.targets.tensorrt.cache_qdq`.
        parser: see `deploy.targets.tensorrt.naming.cache_tensors`.
        rest: type of what is not quantized, "fp16", "bf16" or "fp32"
            (`deploy.targets.tensorrt.float_types`).
        precision: grid of the pairs, "int8" or "fp8"; the cache's thresholds stand for either.

    Raises:
        ModelError: the model cannot be read, or is quantized already.
        CacheError: most entries of the cache are not the model's.
        ExportError: the model cannot be brought to the opset of a narrow rest, or of fp8.
    """
    from deploy.frontends import load
    from deploy.graph.placement import TENSORRT_ON
    from deploy.targets.tensorrt.cache_qdq import to_qdq, to_typed
    from deploy.targets.tensorrt.match import match

    loaded = load(model, fold_batchnorm=not keep_batchnorm)
    matched = match(
        cache,
        loaded.model,
        original=original_of(model),
        parser=parser,
        placement=TENSORRT_ON[precision],
    )
    if not matched.used:
        raise CacheError(
            f"a cache must fit its model, got {len(matched.entries)} entries of which none can be"
            f" used; the first is {matched.entries[0].name!r}: {matched.entries[0].reason}"
        )
    foreign = _foreign(matched)
    if 2 * len(foreign) > len(matched.entries):
        raise CacheError(
            f"a cache must be its model's, got {len(foreign)} of {len(matched.entries)} entries of"
            f" tensors that the model does not have, such as {foreign[0].name!r}; give the model's"
            " own cache (`calib8 cache check --model` tells more)"
        )
    written = loaded.model, matched.plan, matched.scales
    if rest == FP32:
        return loaded.whole(to_qdq(*written, own_concat_scales=own_concat_scales)), matched
    largest = _sizes(cache, matched)
    made, _ = to_typed(*written, rest=rest, largest=largest, own_concat_scales=own_concat_scales)
    return loaded.whole(made), matched


def _sizes(cache: CalibrationCache, matched: Match) -> dict[str, float]:
    """Tensor -> the largest |x| that its scale stands for."""
    scales = cache.scales()
    entries = ((entry.tensor, entry.name) for entry in matched.entries)
    return {tensor: 127 * float(scales[name]) for tensor, name in entries if tensor is not None}


def qdq_to_cache(
    model: Path, *, version: str, algorithm: str = trt_cache.ENTROPY2
) -> tuple[Plain, CalibrationCache]:
    """A Q/DQ model -> its plain float model and the cache of its pairs' scales.

    Raises:
        ModelError: the file cannot be read.
        ExportError: the model is not quantized, or not in a way that a cache can say.
    """
    from deploy.frontends.reader import read_model
    from deploy.targets.tensorrt.cache_qdq import from_qdq

    plain = from_qdq(read_model(Path(model)))
    return plain, trt_cache.from_scales(plain.scales, version=version, algorithm=algorithm)


def dla_cache(
    plain: Plain, *, version: str, guesses: bool = True
) -> tuple[CalibrationCache, Inferred]:
    """The cache of a plain model with the scales that follow from those of its pairs, for DLA.

    With `guesses` those too that may cut values off.

    Raises:
        ModelError: shapes in the model contradict each other.
    """
    from deploy.targets.tensorrt.dla import inferred

    found = inferred(plain.model, plain.scales, guesses=guesses)
    return trt_cache.from_scales(found.scales, version=version), found


def original_of(model: Path | str | onnx.ModelProto | None) -> onnx.ModelProto | None:
    """The graph as the file has it, weights left on disk; None where it cannot be read so."""
    import onnx

    if model is None or isinstance(model, onnx.ModelProto):
        return model
    if Path(model).suffix.lower() != ".onnx":
        return None
    try:
        data = read_bytes(model, what="an ONNX file", error=ModelError)
        return onnx.load_model_from_string(data)
    except Exception:  # DecodeError and its like: the frontend says what is wrong with the file
        return None


_METHODS = {"entropy2": "entropy", "entropy": "entropy", "minmax": "minmax", "legacy": "legacy"}


def method_of(script: CalibratorScript) -> tuple[Method, str] | None:
    """The method that stands for the calibrator's base class, and why; None where it has none.

    ==========================  ==================================================================
    IInt8EntropyCalibrator2     entropy
    IInt8EntropyCalibrator      entropy: how the first one searched is not known
    IInt8MinMaxCalibrator       minmax
    IInt8LegacyCalibrator       legacy, or percentile where `get_quantile` is not TensorRT's own;
                                what it does with `get_regression_cutoff` is not known
    ==========================  ==================================================================
    """
    if script.algorithm is None:
        return None
    method = Method.of(_METHODS[script.algorithm])
    if script.quantile is not None and script.quantile != QUANTILE:
        method = Method.of("percentile", {"percent": 100 * script.quantile})
    why = {
        "entropy": ", whose own search is not known, so that of the second one stands for it",
        "legacy": ", without its regression, which is not known",
    }.get(script.algorithm, "")
    base = CLASSES[script.algorithm]
    return method, f"ranges are found by {method.label}, since {script} is an {base}{why}"


def agreement(known: bytes, made: trt_cache.CalibrationCache) -> str:
    """How far the cache that a script reads agrees with the one that was made, as a sentence."""
    try:
        old = trt_cache.parse(known, origin="the cache that the script reads")
        found = diff(old, made)
    except CacheError as error:
        return f"the script's own cache was not compared: {error}"
    changed = [d for d in found if d.first is not None and d.second is not None]
    alone = sum(d.second is None for d in found)
    count = len(old.scales())
    words = [f"{count - len(changed) - alone} of its {count} scales are equal to the bit"]
    if changed:
        words.append(f"{len(changed)} differ{_most([d.ratio for d in changed], changed[0].name)}")
    if alone:
        words.append(f"{alone} are of tensors that are not in the new one")
    return (
        f"the cache that the script reads ({old.header.text}) was compared and not used:"
        f" {', '.join(words)}"
    )


def _most(ratios: list[float | None], first: str) -> str:
    """By how much two caches differ; the largest change is the first."""
    known = [abs(float(np.log2(ratio))) for ratio in ratios if ratio]
    if not known or not ratios[0]:
        return ""
    median = 2 ** float(np.median(known)) - 1
    return f", by {100 * median:.2g} % in the median, most {first} ({ratios[0]:.4g} times)"


def note(request: BuildRequest, cache: Path, text: bytes, model: onnx.ModelProto) -> Path | None:
    """Write the note of a cache; None where nobody knows what it was made from.

    Args:
        request: of the build.
        cache: where its text was written.
        text: those bytes.
        model: as it was written, which the cache is for.

    Raises:
        ExportError: the folder is not writable.
    """
    if request.ranges.trusted is not None:
        return None
    file = sha256(model.SerializeToString(deterministic=True))
    made = replace(
        fingerprint_of(request.subject, request.manifest),
        model={"graph": model_digest(model), "file": file},
        method=request.chosen.chosen_by,
    )
    return atomic.write_bytes(store.sidecars(cache)[0], store.without_statistics(text, made))
