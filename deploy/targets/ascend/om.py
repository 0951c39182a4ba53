"""From the deploy model to the .om: its command in a script, and `atc` where it is at hand."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from deploy.errors import BackendError
from deploy.files import atomic
from deploy.progress import phase
from deploy.targets.ascend.atc import atc_command, outside, shell, whole_path
from deploy.targets.ascend.readme import readme
from deploy.targets.script import write_script
from deploy.targets.spans import Span, span_of

if TYPE_CHECKING:
    from deploy.targets.ascend.atc import AtcOptions
    from deploy.targets.base import BuildRequest

NO_ATC = "`atc` (CANN) is not on the PATH"
_ATC_SECONDS = 3600


def write_om(
    request: BuildRequest, files: dict[str, Path], options: AtcOptions
) -> tuple[Path | None, list[str]]:
    """The .om, or None and a note with the command that makes it; both are added to `files`.

    Raises:
        BackendError: atc is here and failed.
    """
    span = span_of(request)
    names = {role: Path(path.name) for role, path in files.items()}  # the folder may move
    command = atc_command(
        names["deploy model"],
        Path(request.name),
        dict(span.largest),
        replace(options, extra=tuple(map(whole_path, options.extra))),
        aipp=names.get("AIPP configuration"),
        compression=names.get("compression options"),
    )
    path = request.folder / f"{request.name}_atc.sh"
    files["atc command"] = write_script(path, f"exec {shell(command)}")
    if options.soc is None:
        why = "name the chip with --soc"
    elif which("atc") is None:
        why = NO_ATC
    else:
        why = ""
    if why:
        return None, [*_one_size(span), f"No .om: {why}. The command: {shell(command)}"]
    engine = run_atc(command, request.folder / f"{request.name}.om")
    files["int8 engine"] = engine
    return engine, _one_size(span)


def write_readme(
    request: BuildRequest,
    files: dict[str, Path],
    options: AtcOptions,
    *,
    cann: str,
    host: Sequence[str],
) -> None:
    """Say what to do with the files, beside them; `host` is what the program has to do itself."""
    notes = [*host, *outside(options.extra)]
    text = readme(request.name, files, options, cann=cann, notes=notes)
    path = request.folder / f"{request.name}_README.txt"
    data = text.encode("utf-8", "surrogateescape")  # names in it keep their own bytes
    files["what to do with them"] = atomic.write_bytes(path, data)


@phase("atc")
def run_atc(command: list[str], engine: Path) -> Path:
    """Run atc in the folder of `engine`, which it writes.

    Raises:
        BackendError: atc failed, took over an hour, or wrote nothing.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ATC_SECONDS,
            cwd=engine.parent,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"atc must run, got: {error}") from error
    said = " ".join((done.stdout + done.stderr).split())[-600:]
    if done.returncode != 0:
        raise BackendError(f"atc failed with {done.returncode}, it said: {said}")
    if not engine.exists():
        raise BackendError(f"atc must write {engine}, got nothing; it said: {said}")
    return engine


def _one_size(span: Span) -> list[str]:
    """That the .om takes one size, where samples had several."""
    if not span.varies:
        return []
    said = ", ".join(
        f"{name} of {_by(span.least[name])} to {_by(span.most[name])}"
        for name in span.least
        if span.least[name] != span.most[name]
    )
    return [
        f"samples had {said}, and an int8 .om takes one shape: that of the largest sample is in"
        " the command; pad smaller ones as the model was trained with, or make one .om a shape"
        " with another --input_shape"
    ]


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
