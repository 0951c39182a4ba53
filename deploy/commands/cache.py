"""`calib8 cache`: show, compare, check and convert TensorRT calibration caches."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

import click

from deploy.calibration import DEFAULT_TRT_VERSION
from deploy.commands import base
from deploy.commands.base import FILE, OutputFile, out_option, shows_progress
from deploy.errors import CacheError, counted, list_first
from deploy.terminal import say, say_lines

if TYPE_CHECKING:
    from deploy.calibration.trt_cache import CalibrationCache
    from deploy.targets.tensorrt.cache_match import CacheMatch
    from deploy.targets.tensorrt.infer_scales import InferredScales

_CACHE = click.argument("path", type=FILE, metavar="CACHE")
_ALGORITHM = click.option(
    "--algorithm",
    type=click.Choice(("EntropyCalibration2", "MinMaxCalibration", "EntropyCalibration")),
    help="Calibrator named in the first line.",
)
_VERBOSE = click.option(
    "--verbose", is_flag=True, help="Print every entry and every tensor, with the reason."
)


@click.group()
def cache() -> None:
    """Show, compare, check and convert TensorRT calibration caches.

    \b
    Examples:
      calib8 cache show model.cache
      calib8 cache check model.cache --model model.onnx --trt-version 10.3.0
      calib8 cache relabel model.cache --trt-version 10.3.0 -o model-10.3.cache
      calib8 cache to-qdq model.onnx model.cache -o model.qdq.onnx
    """  # noqa: D301 (click reads the backspace)


@cache.command(short_help="Header and entries of a cache.")
@_CACHE
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def show(path: Path, as_json: bool) -> None:
    """Print what CACHE was made from, if that is known, its header, and every entry.

    The columns of an entry are scale, amax, flaw and tensor.
    """
    from deploy.targets.tensorrt.cache_tools import read_cache

    source_cache = read_cache(path)
    if as_json:
        from deploy.report.model import to_plain

        say_lines(json.dumps(to_plain(_document(source_cache)), indent=1))
        return
    _print_maker(path)
    say(_header_text(source_cache))
    for entry in source_cache.entries:
        amax = float(entry.scale) * 127
        say(f"{_scale_text(entry.scale)} {amax:12.6g}  {entry.flaw or '':8} {entry.name}")


def _print_maker(path: Path) -> None:
    """Print which model, images and program a cache is of, if a file beside it says so."""
    from deploy.calibration.store import read_cache_text

    with suppress(CacheError):  # `cache check` tells what is wrong with that file
        _, fingerprint = read_cache_text(path)
        model_digest = next(iter(fingerprint.model.values()), "unknown")
        images = fingerprint.images.get("count")
        say(f"model {model_digest[:12]}, {images} images, made by {fingerprint.by}")


@cache.command(short_help="Differences of two caches.")
@click.argument("first", type=FILE)
@click.argument("second", type=FILE)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Lines to print; 0: all.",
)
@click.pass_context
def diff(context: click.Context, first: Path, second: Path, limit: int) -> None:
    """Compare two caches, largest change first; exit code 1 if they differ."""
    from deploy.targets.tensorrt import cache_tools

    first_cache = cache_tools.read_cache(first)
    second_cache = cache_tools.read_cache(second)
    differences = cache_tools.compare_caches(first_cache, second_cache)
    first_header = first_cache.header.text
    second_header = second_cache.header.text
    if first_header != second_header:
        say(f"first line: {first_header} | {second_header}")

    shared_names = first_cache.scales().keys() & second_cache.scales().keys()
    # other differences are of tensors that only one of the caches has
    changed_count = sum(difference.name in shared_names for difference in differences)
    equal_text = counted(len(shared_names) - changed_count, "scale")
    say(f"equal: {equal_text}; different: {counted(len(differences), 'tensor')}")
    for difference in differences[: limit or None]:  # all for a limit of 0
        ratio = f"{difference.ratio:9.4f}x" if difference.ratio else f"{'':10}"
        scales = f"{_scale_text(difference.first)}  {_scale_text(difference.second)}"
        say(f"{scales} {ratio}  {difference.name}")
    if len(differences) > limit > 0:  # some are not printed
        say(f"... and {len(differences) - limit} more (--limit 0 prints all)")
    if differences or first_header != second_header:
        context.exit(1)


def _scale_text(scale: SupportsFloat | None) -> str:
    """Format a scale in a column of 14 characters."""
    return f"{'-':>14}" if scale is None else f"{float(scale):14.8g}"


@cache.command(short_help="Rewrite a cache for another TensorRT version.")
@_CACHE
@click.option(
    "--trt-version",
    required=True,
    metavar="X.Y.Z",
    help="TensorRT version that will read it.",
)
@_ALGORITHM
@out_option(type=OutputFile("cache"), help="File to write.")
def relabel(path: Path, trt_version: str, algorithm: str | None, out: Path) -> None:
    """Write CACHE under the first line of another TensorRT version or calibrator.

    TensorRT ignores a cache whose first line is not its own. The scales stay as they are: they do
    not depend on the version, as long as the model is the same.
    """
    from deploy.calibration.trt_cache import dump
    from deploy.calibration.trt_cache import relabel as relabel_cache
    from deploy.files.atomic import write_bytes
    from deploy.targets.tensorrt.cache_tools import refuse_cacheless

    refuse_cacheless(trt_version)
    source_cache = _read_with_note(path)
    relabelled_cache = relabel_cache(source_cache, version=trt_version, algorithm=algorithm)
    write_bytes(out, dump(relabelled_cache))
    say(
        f"{out}: {counted(len(relabelled_cache.entries), 'entry')}, {source_cache.header.text} ->"
        f" {relabelled_cache.header.text}"
    )
    if relabelled_cache.header.label is None:
        say("the legacy form has no version to change; it was written as it is")


@cache.command(short_help="Check a cache against a model and a TensorRT version.")
@shows_progress
@_CACHE
@click.option("--model", type=FILE, metavar="ONNX", help="Model the cache should fit.")
@click.option(
    "--trt-version",
    metavar="X.Y.Z",
    help="TensorRT version that will read it.",
)
@_ALGORITHM
@_VERBOSE
@click.pass_context
def check(
    context: click.Context,
    path: Path,
    model: Path | None,
    trt_version: str | None,
    algorithm: str | None,
    verbose: bool,
) -> None:
    """Check CACHE; exit code 1 if TensorRT would not use it as expected."""
    from deploy.targets.tensorrt import cache_tools

    if model is None:
        base.refuse_given("verbose", without="--model")
    if trt_version is not None:
        cache_tools.refuse_cacheless(trt_version)
    source_cache = cache_tools.read_cache(path)
    match = None
    if model is not None:
        match = _match_model(source_cache, model)
    findings = cache_tools.check_cache(
        source_cache, path=path, version=trt_version, algorithm=algorithm, match=match
    )

    say(_header_text(source_cache))
    for finding in findings:
        mark = "WRONG" if finding.harmful else "note "
        say(f"{mark}  {finding.text}")
    if match is not None and verbose:
        _print_match(match)
    if any(finding.harmful for finding in findings):
        say("not usable as it is")
        context.exit(1)
    say("ok")


@cache.command("to-qdq", short_help="Convert a cache to a Q/DQ model for TensorRT 10 and 11.")
@shows_progress
@click.argument("model", type=FILE, metavar="MODEL.ONNX")
@_CACHE
@out_option(type=OutputFile("model"), help="File to write.")
@click.option(
    "--keep-batchnorm",
    is_flag=True,
    help="Do not fold BatchNormalization; with --rest fp32, converting back is then exact.",
)
@click.option(
    "--rest",
    type=click.Choice(("fp16", "bf16", "fp32")),
    default="fp32",
    show_default=True,
    help="Type of layers that are not quantized; TensorRT 11 reads it from the model.",
)
@click.option(
    "--precision",
    type=click.Choice(("int8", "fp8")),
    default="int8",
    show_default=True,
    help="Type of the pairs; fp8 needs TensorRT 10.2 and an Ada or Hopper GPU or newer.",
)
@_VERBOSE
def to_qdq(
    model: Path,
    path: Path,
    out: Path,
    keep_batchnorm: bool,
    rest: str,
    precision: str,
    verbose: bool,
) -> None:
    """Write MODEL.ONNX with the scales of CACHE in QuantizeLinear/DequantizeLinear pairs."""
    from deploy.files.manifest import write_model
    from deploy.targets.tensorrt import cache_tools

    qdq_model, match = cache_tools.cache_to_qdq(
        model,
        _read_with_note(path),
        keep_batchnorm=keep_batchnorm,
        rest=rest,
        precision=precision,
    )
    write_model(out, qdq_model)
    _print_match(match, everything=verbose)
    say(f"{out}: {counted(match.covered_tensor_count, 'tensor')} quantized")


@cache.command("from-qdq", short_help="Convert a Q/DQ model to a float model and a cache.")
@shows_progress
@click.argument("model", type=FILE, metavar="MODEL.QDQ.ONNX")
@out_option(
    type=(OutputFile("model"), OutputFile("cache")),
    metavar="PLAIN.ONNX PLAIN.CACHE",
    help="Files to write.",
)
@click.option(
    "--trt-version",
    metavar="X.Y.Z",
    help="TensorRT version that will read the cache.  [default: the installed one, else"
    f" {DEFAULT_TRT_VERSION}]",
)
@click.option(
    "--dla",
    is_flag=True,
    help="Also infer the scales of tensors without a pair, which DLA needs (up to TensorRT 10.7).",
)
@click.option(
    "--no-guesses",
    is_flag=True,
    help="With --dla, infer no scale that may clip values; those layers run in float16.",
)
def from_qdq(
    model: Path, out: tuple[Path, Path], trt_version: str | None, dla: bool, no_guesses: bool
) -> None:
    """Remove the pairs of MODEL.QDQ.ONNX: write the float model and a cache for DLA and TensorRT 8.

    DLA runs a layer in int8 only if all its inputs and outputs have a scale; --dla infers the
    scales of tensors without a pair from the others.
    """
    from deploy.calibration.trt_cache import dump
    from deploy.files.atomic import write_bytes
    from deploy.files.manifest import write_model
    from deploy.targets.tensorrt import cache_tools, sdk
    from deploy.targets.tensorrt.cache_contents import trt_tensors

    if not dla:
        base.refuse_given("no_guesses", without="--dla")
    version = trt_version or sdk.cache_reading_version() or DEFAULT_TRT_VERSION
    cache_tools.refuse_cacheless(version)
    float_model, cache = cache_tools.qdq_to_cache(model, version=version)
    inferred_scales = None
    if dla:
        cache, inferred_scales = cache_tools.dla_cache(
            float_model, version=version, guesses=not no_guesses
        )
    model_path, cache_path = out
    write_model(model_path, float_model.model)
    write_bytes(cache_path, dump(cache))
    say(f"{model_path}: the float model")
    say(f"{cache_path}: {counted(len(cache.entries), 'entry')} under {cache.header.text}")
    if inferred_scales is None:
        scales = float_model.scales
        _print_unpaired([name for name in trt_tensors(float_model.model) if name not in scales])
    else:
        _print_inferred(inferred_scales)


_MAX_NAMES = 5  # tensors named in a line
_INFERENCE_TEXTS = {
    "equal": "copied from another tensor by what the operators do",
    "bound": "set to a bound that cannot be exceeded",
    "guess": "guessed, which may cut values off (--no-guesses guesses none)",
}


def _print_unpaired(names: list[str]) -> None:
    """Print the tensors at which the Q/DQ model has no pair, so that the cache lacks them."""
    if names:
        verb, pronoun = ("has", "it") if len(names) == 1 else ("have", "them")
        say(
            f"{counted(len(names), 'tensor')} {verb} no pair and so no entry; TensorRT warns of a"
            f" missing scale there and runs {pronoun} in float (--dla infers {pronoun}):"
            f" {list_first(names, _MAX_NAMES)}"
        )


def _print_inferred(inferred: InferredScales) -> None:
    """Print how the scales without a pair were inferred, and which are missing."""
    for level, meaning in _INFERENCE_TEXTS.items():
        names = [name for name, tensor_level in inferred.levels.items() if tensor_level == level]
        if names:
            verb = "is" if len(names) == 1 else "are"
            names_text = list_first(names, _MAX_NAMES)
            say(f"{counted(len(names), 'scale')} without a pair {verb} {meaning}: {names_text}")
    if inferred.missing:
        verb, pronoun = ("has", "it") if len(inferred.missing) == 1 else ("have", "them")
        say(
            f"{counted(len(inferred.missing), 'tensor')} {verb} no scale, and nothing gives"
            f" {pronoun} one; layers that read or make {pronoun} do not run in int8:"
            f" {', '.join(inferred.missing)}"
        )


def _read_with_note(path: Path) -> CalibrationCache:
    """Read a cache from which a file is made; say if it was changed after it was written."""
    from deploy.targets.tensorrt import cache_tools

    for finding in cache_tools.origin_findings(path):
        say(f"note   {finding.text}")
    return cache_tools.read_cache(path)


def _match_model(source_cache: CalibrationCache, model: Path) -> CacheMatch:
    """Return which entries of a cache belong to which tensors of the model in a file."""
    from deploy.frontends import load
    from deploy.frontends.base import read_uncleaned_model
    from deploy.targets.tensorrt.cache_match import match_cache

    loaded = load(model)
    original = read_uncleaned_model(model, loaded)
    return match_cache(source_cache, loaded.model, original=original)


def _header_text(source_cache: CalibrationCache) -> str:
    """Return the first line of a cache and what it says."""
    header = source_cache.header
    details = header.algorithm
    if header.version is None:  # the legacy form
        details += f", quantile {header.quantile}, cutoff {header.cutoff}"
    elif header.version:
        details = f"TensorRT {header.version}, {details}"
    return f"{header.text}: {details}, {counted(len(source_cache.entries), 'entry')}"


def _document(source_cache: CalibrationCache) -> dict[str, object]:
    """Return the header and the entries of a cache as plain JSON."""
    header = source_cache.header
    return {
        "header": header.text,
        "version": header.version,
        "algorithm": header.algorithm,
        "cutoff": header.cutoff,
        "quantile": header.quantile,
        "entries": [
            {
                "name": entry.name,
                "bits": entry.digits,  # of the scale, a float32, in hexadecimal
                "scale": float(entry.scale),
                "flaw": entry.flaw,
            }
            for entry in source_cache.entries
        ],
    }


def _print_match(match: CacheMatch, *, everything: bool = True) -> None:
    """Print which entries and tensors go together, all of them or only the unexpected ones."""
    say(
        f"{match.used_entry_count} of {counted(len(match.entries), 'entry')} used,"
        f" {match.covered_tensor_count} of {counted(len(match.tensors), 'tensor')} covered"
    )
    for entry in match.entries:
        # an unused entry is as expected if the model needs no pair at its tensor
        is_expected = entry.is_used or entry.reason.startswith("no pair")
        if everything or not is_expected:
            state = "used" if entry.is_used else "unused"
            say(f"  {state:6}  {entry.name}: {entry.reason}")
    for tensor in match.tensors:
        if everything or not tensor.has_scale:
            state = "covered" if tensor.has_scale else "left in float"
            say(f"  {state}  {': '.join(filter(None, (tensor.tensor, tensor.reason)))}")
