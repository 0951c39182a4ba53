"""Tools for TensorRT calibration caches: compare, check, convert (`calib8 cache`).

With model, cache and the note that a build writes next to it, the C++ `calib8-build` can build an
engine on a device without the calibration data.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from calibrators.grids import INT8 as INT8_GRID
from calibrators.percentile import QUANTILE
from calibrators.tensorrt import CLASSES
from deploy.calibration import store, trt_cache
from deploy.calibration.reuse import make_fingerprint
from deploy.calibration.trt_cache import CalibrationCache
from deploy.errors import CacheError, counted, list_first
from deploy.feed.calibrator import CalibratorScript
from deploy.files.manifest import SETTINGS, sha256
from deploy.files.reading import MAX_TEXT_BYTES, read_bytes
from deploy.frontends import load
from deploy.frontends.base import model_digest, read_uncleaned_model
from deploy.frontends.onnx_reader import read_model
from deploy.graph.placement import TENSORRT_BY_GRID
from deploy.method import Method
from deploy.targets.base import BuildRequest
from deploy.targets.tensorrt.cache_match import CacheMatch, match_cache
from deploy.targets.tensorrt.cache_qdq import PlainModel, from_qdq, to_qdq, to_typed
from deploy.targets.tensorrt.infer_scales import InferredScales, infer_missing_scales
from deploy.targets.tensorrt.trt_options import FP32, INT8
from deploy.targets.tensorrt.trtexec import features_of


def read_cache(path: Path | str) -> CalibrationCache:
    """Read a cache file.

    Raises:
        CacheError: the file cannot be read, or is not a TensorRT calibration cache.
    """
    data = read_bytes(path, what="a calibration cache", error=CacheError, max_bytes=MAX_TEXT_BYTES)
    return trt_cache.parse(data, origin=str(path))


def refuse_cacheless(version: str) -> None:
    """Refuse a version "X.Y.Z" of TensorRT that has no calibrators, and so reads no cache.

    Raises:
        CacheError: it is 11 or newer.
    """
    if not features_of(version).calibrators:
        raise CacheError(
            f"TensorRT up to 10 reads calibration caches, got {version}; it takes a Q/DQ model"
            " (calib8 cache to-qdq makes one from a cache)"
        )


@dataclass(frozen=True, slots=True)
class ScaleDifference:
    """A tensor whose scale differs between two caches.

    Attributes:
        name: the tensor.
        first: its scale in the first cache; None if that has none.
        second: its scale in the second cache, likewise.
    """

    name: str
    first: np.float32 | None
    second: np.float32 | None

    @property
    def ratio(self) -> float | None:
        """Ratio second / first; None unless both are positive and finite."""
        if self.first is None or self.second is None:
            return None
        if not (0 < self.first < np.inf and 0 < self.second < np.inf):
            return None
        return float(self.second) / float(self.first)


def compare_caches(first: CalibrationCache, second: CalibrationCache) -> list[ScaleDifference]:
    """List tensors with different scales, largest change first, then those in one cache only.

    Raises:
        CacheError: a cache has two different scales for a tensor.
    """
    first_scales = first.scales()
    second_scales = second.scales()
    changed = []
    removed = []  # only in the first cache
    added = []  # only in the second
    for name in {**first_scales, **second_scales}:
        first_scale = first_scales.get(name)
        second_scale = second_scales.get(name)
        difference = ScaleDifference(name, first_scale, second_scale)
        if second_scale is None:
            removed.append(difference)
        elif first_scale is None:
            added.append(difference)
        elif first_scale.tobytes() != second_scale.tobytes():  # bit for bit: NaN equals NaN
            changed.append(difference)
    changed.sort(key=_change_key)
    return [*changed, *removed, *added]


def _change_key(difference: ScaleDifference) -> float:
    """Return a sort key: changes to or from an invalid scale (0, inf) first, then the largest."""
    ratio = difference.ratio
    return -abs(np.log(ratio)) if ratio else -np.inf


@dataclass(frozen=True, slots=True)
class CacheFinding:
    """A finding of `check_cache`.

    Attributes:
        text: the finding as a sentence.
        harmful: whether TensorRT would not behave as expected.
    """

    text: str
    harmful: bool


_CAUSE_BY_FLAW = {  # what a flawed scale says of its tensor, and what to do
    "zero": "always zero while calibrating",
    "inf": "infinite while calibrating, such as the mask of an attention; TensorRT keeps it in"
    " float",
    "NaN": "not a number; calibrate again",
    "negative": "a scale cannot be negative; calibrate again",
}
_MIN_SCALE = np.finfo(np.float32).tiny  # GPUs take a smaller one, a subnormal, for 0
_MAX_SCALE = np.finfo(np.float32).max / np.float32(127)  # the range of a larger one is infinite


def check_cache(
    cache: CalibrationCache,
    *,
    path: Path | str | None = None,
    version: str | None = None,
    algorithm: str | None = None,
    match: CacheMatch | None = None,
) -> list[CacheFinding]:
    """Return what may keep TensorRT from using a cache as expected.

    Args:
        cache: the cache.
        path: its file. It is compared with the fingerprint next to it, if there is one. The
            commands that the findings recommend name it.
        version: "X.Y.Z" of the TensorRT that will read it.
        algorithm: algorithm of the calibrator that will read it; `trtexec --calib` needs ENTROPY2.
        match: the cache matched to its model; None checks only the cache.
    """
    path = None if path is None else Path(path)
    findings = [*origin_findings(path), *_scale_findings(cache)]
    duplicates = cache.duplicates()
    if duplicates:
        verb = "occurs" if len(duplicates) == 1 else "occur"
        text = f"{counted(len(duplicates), 'name')} {verb} twice: {list_first(duplicates, 3)}"
        findings.append(CacheFinding(text, harmful=_has_conflict(cache)))
    findings += _header_findings(cache, path, version, algorithm)
    if match is not None:
        findings += _match_findings(match)
    return findings


def origin_findings(path: Path | None) -> Iterator[CacheFinding]:
    """Yield a finding if the file is not the one that its fingerprint was written with."""
    if path is None or not store.sidecars(path)[0].exists():
        return
    try:
        store.read_cache_text(path)
    except CacheError as error:
        text = f"{error}; build or calibrate again, or remove the .json if the change is yours"
        yield CacheFinding(text, harmful=True)


def _scale_findings(cache: CalibrationCache) -> Iterator[CacheFinding]:
    """Yield findings on scales that no calibration gives, or that a Q/DQ node cannot have."""
    names_by_flaw: dict[str, list[str]] = {}
    for name, flaw in cache.flaws().items():
        names_by_flaw.setdefault(flaw, []).append(name)
    for flaw, names in names_by_flaw.items():
        scales = counted(len(names), f"{flaw} scale")
        text = f"{scales} ({list_first(names, 3)}): {_CAUSE_BY_FLAW[flaw]}"
        yield CacheFinding(text, harmful=flaw in ("NaN", "negative"))
    # scales whose reciprocals, or whose products with a weight's scale, float32 cannot hold
    extreme_names = [
        entry.name
        for entry in cache.entries
        if not entry.flaw and not _MIN_SCALE <= entry.scale <= _MAX_SCALE
    ]
    if extreme_names:
        verb = "is" if len(extreme_names) == 1 else "are"
        text = (
            f"{counted(len(extreme_names), 'scale')} ({list_first(extreme_names, 3)}) {verb} too"
            " small or too large for float32; calibrate again"
        )
        yield CacheFinding(text, harmful=True)


def _has_conflict(cache: CalibrationCache) -> bool:
    """Whether the cache has two different scales for a tensor."""
    try:
        cache.scales()
    except CacheError:
        return True
    return False


def _header_findings(
    cache: CalibrationCache, path: Path | None, version: str | None, algorithm: str | None
) -> Iterator[CacheFinding]:
    """Yield findings on a cache's first line: its version and algorithm.

    TensorRT ignores the cache of another version, or of another calibrator's algorithm.

    Args:
        cache: the cache.
        path: its file, for the command that relabels it; None if it is unknown.
        version: "X.Y.Z" of the TensorRT that will read it; None to accept any.
        algorithm: algorithm of the calibrator that will read it; None to accept any.
    """
    header = cache.header
    remedy = _relabel_command(path, version or header.version or "X.Y.Z", algorithm)
    # The label is the version as a number. The cache of a legacy calibrator has none (None): every
    # version reads it.
    if version is not None and header.label not in (None, trt_cache.version_label(version)):
        text = (
            f"TensorRT {version} ignores a cache of {header.version} and calibrates again, with"
            f" nothing but a log line; run: {remedy}"
        )
        yield CacheFinding(text, harmful=True)
    if algorithm is not None and header.algorithm != algorithm:
        text = f"a calibrator of {algorithm} ignores a cache of {header.algorithm}; run: {remedy}"
        yield CacheFinding(text, harmful=True)


def _relabel_command(path: Path | None, version: str, algorithm: str | None) -> str:
    """Return the command, as text, that gives a cache another version or algorithm in its header.

    If a build made the cache, and its algorithm is kept, the command repeats the build: then all
    files are for that version.

    Args:
        path: the cache; None if it is unknown.
        version: the version for the header, "X.Y.Z".
        algorithm: the algorithm for the header; None to keep it.
    """
    cache_path = path or Path("model.cache")
    settings = cache_path.with_name(SETTINGS)  # a build writes its options next to its cache
    if settings.exists() and algorithm is None:
        return f"calib8 build --config {shlex.quote(str(settings))} --trt-version {version}"
    arguments = ["calib8", "cache", "relabel", str(cache_path), "--trt-version", version]
    if algorithm is not None:
        arguments += ["--algorithm", algorithm]
    label = "-".join(filter(None, (cache_path.stem, version, algorithm)))
    return shlex.join([*arguments, "-o", f"{label}{cache_path.suffix}"])


def _match_findings(match: CacheMatch) -> list[CacheFinding]:
    """Return findings on how much of the model the cache covers, and on another model's cache."""
    coverage_text = (
        f"{match.covered_tensor_count} of {len(match.tensors)} tensors to be quantized have a scale"
        f" (the cache has {len(match.entries)}: TensorRT's calibrators list every tensor)"
    )
    findings = [CacheFinding(coverage_text, harmful=False)]
    foreign_entries = [entry for entry in match.entries if entry.is_foreign]
    # A tensor without a scale stays in float. The model's own cache leaves it out on purpose,
    # another model's cache does not know it.
    is_other_model = bool(foreign_entries) or not match.covered_tensor_count
    for coverage in match.tensors:
        if not coverage.has_scale:
            reason_text = f"{coverage.tensor}: {coverage.reason}"
            findings.append(CacheFinding(reason_text, harmful=is_other_model))
    if foreign_entries:
        names = ", ".join(entry.name for entry in foreign_entries[:3])
        count_text = counted(len(foreign_entries), "tensor")
        foreign_text = (
            f"the model does not have {count_text} of the cache ({names}):"
            " was the cache made from another model, or for another version of TensorRT?"
        )
        are_all_foreign = len(foreign_entries) == len(match.entries)
        findings.append(CacheFinding(foreign_text, harmful=are_all_foreign))
    return findings


def cache_to_qdq(
    model: Path | str | onnx.ModelProto,
    cache: CalibrationCache,
    *,
    keep_batchnorm: bool = False,
    rest: str = FP32,
    precision: str = INT8,
) -> tuple[onnx.ModelProto, CacheMatch]:
    """Return the Q/DQ model of a float model and its cache, and how the cache matched.

    Args:
        model: path of the ONNX file, or the model.
        cache: its calibration cache.
        keep_batchnorm: do not fold BatchNormalization. With `rest` "fp32", the float model that
            `calib8.cache.from_qdq` returns then has the outputs of `model`, bit for bit.
        rest: type of the float part, "fp16", "bf16" or "fp32".
        precision: grid of the pairs, "int8" or "fp8"; both use the clip ranges of the cache.

    Raises:
        ModelError: the model cannot be read, or is already quantized.
        CacheError: most entries of the cache do not belong to the model.
        ExportError: the model cannot be converted to the opset that `rest` or fp8 needs.
    """
    loaded = load(model, fold_batchnorm=not keep_batchnorm)
    match = match_cache(
        cache,
        loaded.model,
        original=read_uncleaned_model(model, loaded),
        placement=TENSORRT_BY_GRID[precision],
    )
    _check_fit(match)
    # nodes that ONNX Runtime does not know were cut off the model; `with_cut_off` puts them back
    if rest == FP32:
        qdq_model = to_qdq(loaded.model, match.plan, match.scales)
        return loaded.with_cut_off(qdq_model), match

    # largest |x| of each tensor: a cache has no observed values, so the end of its range is taken
    scale_by_entry = cache.scales()
    largest_values = {
        entry.tensor: INT8_GRID.qmax * float(scale_by_entry[entry.name])
        for entry in match.entries
        if entry.tensor is not None
    }
    typed_model, _ = to_typed(
        loaded.model,
        match.plan,
        match.scales,
        float_type=rest,
        largest_values=largest_values,
    )
    return loaded.with_cut_off(typed_model), match


def _check_fit(match: CacheMatch) -> None:
    """Refuse a cache whose entries cannot be used, or mostly belong to another model."""
    count = len(match.entries)
    if not match.used_entry_count:
        first_entry = match.entries[0]
        raise CacheError(
            f"a cache must fit its model, got {counted(count, 'entry')} of which none can be used;"
            f" the first is {first_entry.name!r}: {first_entry.reason}"
        )
    foreign = [entry for entry in match.entries if entry.is_foreign]
    if 2 * len(foreign) > count:
        raise CacheError(
            f"a cache must be its model's, got {len(foreign)} of {counted(count, 'entry')} of"
            f" tensors that the model does not have, such as {foreign[0].name!r}; give the model's"
            " own cache (`calib8 cache check --model` tells more)"
        )


def qdq_to_cache(model: Path | str, *, version: str) -> tuple[PlainModel, CalibrationCache]:
    """Return the float model of a Q/DQ model, and the cache with the scales of its pairs.

    Raises:
        ModelError: the file cannot be read, or the model is not quantized.
        ExportError: it is quantized in a way that a cache cannot express.
    """
    plain_model = from_qdq(read_model(Path(model)))
    return plain_model, trt_cache.from_scales(plain_model.scales, version=version)


def dla_cache(
    plain: PlainModel, *, version: str, guesses: bool
) -> tuple[CalibrationCache, InferredScales]:
    """Return the cache for DLA: the scales of the pairs and those inferred from them.

    `guesses` includes inferred scales that may clip values.

    Raises:
        ModelError: shapes in the model contradict each other.
    """
    inferred = infer_missing_scales(plain.model, plain.scales, guesses=guesses)
    return trt_cache.from_scales(inferred.scales, version=version), inferred


# Algorithm of a calibrator class -> the method that stands for it, and what differs from it.
_METHOD_BY_ALGORITHM = {
    "entropy2": ("entropy", ""),
    "entropy": (
        "entropy",
        ", whose own search is not known, so that of the second one stands for it",
    ),
    "minmax": ("minmax", ""),
    "legacy": ("legacy", ", without its regression, which is not known"),
}


def method_of_calibrator(script: CalibratorScript) -> tuple[Method, str] | None:
    """Return (calib8's method, note) for the calibrator class of a script; None without one.

    The script is the user's, and derives its calibrator from one of TensorRT's classes.

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
    # `difference`: how the method differs from the calibrator, as the end of a sentence; "" if not
    method_name, difference = _METHOD_BY_ALGORITHM[script.algorithm]
    method = Method.of(method_name)
    # the method `legacy` takes the quantile that a legacy calibrator has by default, `QUANTILE`
    if script.quantile is not None and script.quantile != QUANTILE:
        method = Method.of("percentile", {"percent": 100 * script.quantile})
    base_class = CLASSES[script.algorithm]
    note = f"ranges are found by {method.label}, since {script} is an {base_class}{difference}"
    return method, note


def write_cache_note(
    request: BuildRequest,
    cache_path: Path,
    cache_bytes: bytes,
    float_model: onnx.ModelProto,
    float32_nodes: Mapping[str, str],
) -> Path | None:
    """Write the note beside a cache: its model and what the calibration depended on.

    With it calib8's C++ program on a device reuses the cache, and binds the same nodes to float32.

    Args:
        request: the build request.
        cache_path: path of the cache.
        cache_bytes: content of the cache.
        float_model: the float model as it was written.
        float32_nodes: node that must run in float32 -> its output tensor.

    Returns:
        Path of the note; None if the ranges came from a cache of the user's own.
    """
    if request.ranges.trusted is not None:  # a cache of the user's own: its origin is unknown
        return None
    file_digest = sha256(float_model.SerializeToString(deterministic=True))
    fingerprint = replace(
        make_fingerprint(request.subject, request.manifest),
        model={"graph": model_digest(float_model), "file": file_digest},
        method=request.chosen_ranges.chosen_by,
    )
    return store.write_note_without_statistics(cache_path, cache_bytes, fingerprint, float32_nodes)
