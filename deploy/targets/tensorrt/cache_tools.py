"""Tools for TensorRT calibration caches: compare, merge, check, convert (`calib8 cache`).

With model, cache and the note that a build writes next to it, the C++ `calib8-build` can build an
engine on a device without the calibration data.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from calibrators.percentile import QUANTILE
from calibrators.tensorrt import CLASSES
from deploy.calibration import store, trt_cache
from deploy.calibration.reuse import make_fingerprint
from deploy.calibration.trt_cache import CalibrationCache, Entry
from deploy.errors import CacheError, ModelError
from deploy.feed.calibrator import CalibratorScript
from deploy.files import atomic
from deploy.files.manifest import sha256
from deploy.files.reading import MAX_TEXT_BYTES, read_bytes
from deploy.frontends import load
from deploy.frontends.base import model_digest
from deploy.frontends.onnx_reader import read_model
from deploy.graph.placement import TENSORRT_BY_GRID
from deploy.method import Method
from deploy.targets.base import BuildRequest
from deploy.targets.tensorrt.cache_match import CacheMatch, EntryUse, match_cache
from deploy.targets.tensorrt.cache_qdq import PlainModel, from_qdq, to_qdq, to_typed
from deploy.targets.tensorrt.infer_scales import InferredScales, infer_missing_scales
from deploy.targets.tensorrt.trt_options import FP32, INT8


def read_cache(path: Path) -> CalibrationCache:
    """Read a cache file.

    Raises:
        CacheError: the file cannot be read, or is not a TensorRT calibration cache.
    """
    data = read_bytes(path, what="a calibration cache", error=CacheError, max_bytes=MAX_TEXT_BYTES)
    return trt_cache.parse(data, origin=str(path))


@dataclass(frozen=True, slots=True)
class ScaleDifference:
    """A tensor whose scale differs between two caches; None where a cache has no scale for it."""

    name: str
    first: np.float32 | None
    second: np.float32 | None

    @property
    def ratio(self) -> float | None:
        """Ratio second / first; None unless both are positive and finite."""
        if self.first is None or self.second is None:
            return None
        valid = all(np.isfinite(v) and v > 0 for v in (self.first, self.second))
        return float(self.second) / float(self.first) if valid else None


def compare_caches(first: CalibrationCache, second: CalibrationCache) -> list[ScaleDifference]:
    """List tensors with different scales, largest change first, then those in one cache only."""
    a, b = first.scales(), second.scales()
    bits = [{e.name: e.bits for e in cache.entries} for cache in (first, second)]
    changed = [ScaleDifference(n, a[n], b[n]) for n in a if n in b and bits[0][n] != bits[1][n]]
    changed.sort(key=lambda d: -abs(np.log(d.ratio)) if d.ratio else -np.inf)
    removed = [ScaleDifference(n, a[n], None) for n in a if n not in b]
    added = [ScaleDifference(n, None, b[n]) for n in b if n not in a]
    return [*changed, *removed, *added]


def merge_caches(
    caches: Sequence[CalibrationCache], *, on_conflict: str = "error"
) -> CalibrationCache:
    """Return the union of caches, in order of first occurrence, with the first cache's header.

    `caches`: at least one. `on_conflict`: which of two different scales of a tensor to take:
    "first", "last" or "max"; "error" raises.

    Raises:
        CacheError: the headers differ, or a conflict with "error".
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
        cache.scales()  # raises if one file has two scales for a tensor
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
class CacheFinding:
    """A finding of `check_cache`; `harmful` if TensorRT would not behave as expected."""

    text: str
    harmful: bool


_FLAWS = {
    "zero": "always zero while calibrating",
    "inf": "infinite while calibrating, such as the mask of an attention; TensorRT keeps it in"
    " float",
    "NaN": "not a number; calibrate again",
    "negative": "a scale cannot be negative; calibrate again",
}


def check_cache(
    cache: CalibrationCache,
    *,
    version: str | None = None,
    algorithm: str | None = None,
    matched: CacheMatch | None = None,
) -> list[CacheFinding]:
    """Check a cache before a build.

    `version`: "X.Y.Z" of the TensorRT that will read it. `algorithm`: of the calibrator that will
    read it; `trtexec --calib` needs ENTROPY2.
    """
    flaws = cache.flaws()
    findings = []
    for kind in dict.fromkeys(flaws.values()):
        names = [name for name, flaw in flaws.items() if flaw == kind]
        text = f"{len(names)} {kind} scales ({', '.join(names[:3])}): {_FLAWS[kind]}"
        findings.append(CacheFinding(text, kind in ("NaN", "negative")))
    if cache.duplicates():
        conflict = True
        with suppress(CacheError):
            cache.scales()
            conflict = False
        twice = ", ".join(cache.duplicates()[:3])
        text = f"{len(cache.duplicates())} names occur twice: {twice}"
        findings.append(CacheFinding(text, conflict))
    findings += _header_findings(cache, version, algorithm)
    if matched is not None:
        findings += _match_findings(matched)
    return findings


def _header_findings(
    cache: CalibrationCache, version: str | None, algorithm: str | None
) -> list[CacheFinding]:
    header, texts = cache.header, []
    if version is not None and header.label not in (None, trt_cache.version_label(version)):
        texts.append(
            f"TensorRT {version} ignores a cache of {header.version} and calibrates anew, with"
            f" nothing but a log line; run: calib8 cache relabel --trt-version {version}"
        )
    if algorithm is not None and header.algorithm != algorithm:
        texts.append(
            f"a calibrator of {algorithm} ignores a cache of {header.algorithm}; run:"
            f" calib8 cache relabel --algorithm {algorithm}"
        )
    return [CacheFinding(text, harmful=True) for text in texts]


def _match_findings(matched: CacheMatch) -> list[CacheFinding]:
    missing = [t for t in matched.tensors if not t.covered]
    text = (
        f"{matched.covered} of {len(matched.tensors)} tensors to be quantized have a scale,"
        f" from {matched.used} of {len(matched.entries)} entries"
    )
    findings = [CacheFinding(text, harmful=False)]
    findings += [CacheFinding(f"{t.tensor}: {t.reason}", harmful=True) for t in missing]
    if foreign := _foreign(matched):
        names = ", ".join(e.name for e in foreign[:3])
        text = (
            f"{len(foreign)} entries are of tensors that the model does not have ({names}):"
            " was the cache made from another model?"
        )
        findings.append(CacheFinding(text, harmful=len(foreign) == len(matched.entries)))
    return findings


def _foreign(matched: CacheMatch) -> list[EntryUse]:
    """Return the entries of tensors that the model does not have."""
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
) -> tuple[onnx.ModelProto, CacheMatch]:
    """Return the Q/DQ model of a float model and its cache, and how the cache matched.

    Args:
        model: path of the ONNX file, or the model.
        cache: its calibration cache.
        keep_batchnorm: do not fold BatchNormalization, so that the float model which
            `qdq_to_cache` recovers gives bit-exact outputs of `model`.
        own_concat_scales: see `deploy.targets.tensorrt.cache_qdq`.
        parser: see `deploy.targets.tensorrt.cache_contents.cache_tensors`.
        rest: type of the float part, "fp16", "bf16" or "fp32"
            (`deploy.targets.tensorrt.float_types`).
        precision: grid of the pairs, "int8" or "fp8"; both use the clip ranges of the cache.

    Raises:
        ModelError: the model cannot be read, or is already quantized.
        CacheError: most entries of the cache do not belong to the model.
        ExportError: the model cannot be converted to the opset that `rest` or fp8 needs.
    """
    loaded = load(model, fold_batchnorm=not keep_batchnorm)
    matched = match_cache(
        cache,
        loaded.model,
        original=load_uncleaned_graph(model),
        parser=parser,
        placement=TENSORRT_BY_GRID[precision],
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
    parts = loaded.model, matched.plan, matched.scales
    if rest == FP32:
        return loaded.with_cut_off(to_qdq(*parts, own_concat_scales=own_concat_scales)), matched
    scales = cache.scales()
    entries = ((entry.tensor, entry.name) for entry in matched.entries)
    largest = {tensor: 127 * float(scales[name]) for tensor, name in entries if tensor is not None}
    typed, _ = to_typed(*parts, rest=rest, largest=largest, own_concat_scales=own_concat_scales)
    return loaded.with_cut_off(typed), matched


def qdq_to_cache(model: Path, *, version: str) -> tuple[PlainModel, CalibrationCache]:
    """Return the float model of a Q/DQ model, and the cache with the scales of its pairs.

    Raises:
        ModelError: the file cannot be read.
        ExportError: the model is not quantized, or in a way that a cache cannot express.
    """
    plain = from_qdq(read_model(Path(model)))
    return plain, trt_cache.from_scales(plain.scales, version=version)


def dla_cache(
    plain: PlainModel, *, version: str, guesses: bool = True
) -> tuple[CalibrationCache, InferredScales]:
    """Return the cache for DLA: the scales of the pairs and those inferred from them.

    `guesses` includes inferred scales that may clip values.

    Raises:
        ModelError: shapes in the model contradict each other.
    """
    scales = infer_missing_scales(plain.model, plain.scales, guesses=guesses)
    return trt_cache.from_scales(scales.scales, version=version), scales


def load_uncleaned_graph(model: Path | str | onnx.ModelProto | None) -> onnx.ModelProto | None:
    """Return the uncleaned graph without external weights; None if the file cannot be parsed."""
    if model is None or isinstance(model, onnx.ModelProto):
        return model
    if Path(model).suffix.lower() != ".onnx":
        return None
    try:
        data = read_bytes(model, what="an ONNX file", error=ModelError)
        return onnx.load_model_from_string(data)
    except Exception:  # DecodeError and similar: the frontend reports what is wrong with the file
        return None


_METHODS = {"entropy2": "entropy", "entropy": "entropy", "minmax": "minmax", "legacy": "legacy"}


def method_of_calibrator(script: CalibratorScript) -> tuple[Method, str] | None:
    """Return (method, note) for the script's calibrator base class; None if it has none.

    ==========================  ==================================================================
    IInt8EntropyCalibrator2     entropy
    IInt8EntropyCalibrator      entropy: the search of this older class is not documented
    IInt8MinMaxCalibrator       minmax
    IInt8LegacyCalibrator       legacy, or percentile if the script overrides `get_quantile`;
                                how it uses `get_regression_cutoff` is not documented
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


def compare_with_script_cache(known: bytes, made: trt_cache.CalibrationCache) -> str:
    """Compare the cache that a script reads with the new one; return one sentence."""
    try:
        old = trt_cache.parse(known, origin="the cache that the script reads")
        differences = compare_caches(old, made)
    except CacheError as error:
        return f"the script's own cache was not compared: {error}"
    changed = [d for d in differences if d.first is not None and d.second is not None]
    removed = sum(d.second is None for d in differences)
    count = len(old.scales())
    parts = [f"{count - len(changed) - removed} of its {count} scales are equal to the bit"]
    if changed:
        ratios = [d.ratio for d in changed]
        parts.append(f"{len(changed)} differ{_largest_change(ratios, changed[0].name)}")
    if removed:
        parts.append(f"{removed} are of tensors that are not in the new one")
    return (
        f"the cache that the script reads ({old.header.text}) was compared and not used:"
        f" {', '.join(parts)}"
    )


def _largest_change(ratios: list[float | None], first: str) -> str:
    """Describe by how much the scales changed; `ratios` start with the largest change, `first`."""
    changes = [abs(float(np.log2(ratio))) for ratio in ratios if ratio]
    if not changes or not ratios[0]:
        return ""
    median = 2 ** float(np.median(changes)) - 1
    return f", by {100 * median:.2g} % in the median, most {first} ({ratios[0]:.4g} times)"


def write_cache_note(
    request: BuildRequest, cache: Path, text: bytes, model: onnx.ModelProto, wide: Mapping[str, str]
) -> Path | None:
    """Write the sidecar note of a cache: its model and what the calibration depended on.

    `wide` is node -> output tensor of nodes that must run in float32; C++ binds them too.

    Returns:
        Path of the note; None if the ranges came from a file whose origin is unknown.
    """
    if request.ranges.trusted is not None:
        return None
    file = sha256(model.SerializeToString(deterministic=True))
    made = replace(
        make_fingerprint(request.subject, request.manifest),
        model={"graph": model_digest(model), "file": file},
        method=request.chosen_ranges.chosen_by,
    )
    note = store.make_text_only_json(text, made, float32_layers=wide)
    return atomic.write_bytes(store.sidecars(cache)[0], note)
