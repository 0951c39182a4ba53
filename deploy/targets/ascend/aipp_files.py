"""A build's preprocessing as AIPP files, and how near they come to the calibration's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import ExportError
from deploy.feed.preprocess import Preprocess
from deploy.files import atomic
from deploy.targets.ascend.aipp import Aipp, write_aipp
from deploy.targets.ascend.aipp_run import judged
from deploy.targets.ascend.atc import write_compression_options

if TYPE_CHECKING:
    from deploy.targets.ascend.source import Source
    from deploy.targets.base import BuildRequest

_TRIED = 2  # samples that go through AIPP's arithmetic


def write_aipp_files(
    request: BuildRequest, files: dict[str, Path], source: Source, *, first_layer_int8: bool
) -> list[str]:
    """Write the AIPP file and, where asked, the compression options; gives notes."""
    given = request.manifest.get("preprocess")
    if not given:
        return ["No AIPP file: the calibration was fed arrays, not pictures."]
    how: Preprocess = Preprocess.from_json(given)
    try:
        made = write_aipp(how, source)
    except ExportError as error:
        return [f"No AIPP file: {error}."]
    path = request.folder / f"{request.name}_aipp.cfg"
    files["AIPP configuration"] = atomic.write_text(path, made.text)
    if first_layer_int8:
        path = request.folder / f"{request.name}_compression.cfg"
        text = write_compression_options(first_layer=True)
        files["compression options"] = atomic.write_text(path, text)
    return [*made.host, *_judged(made, how, source, request)]


def _judged(made: Aipp, how: Preprocess, source: Source, request: BuildRequest) -> Iterator[str]:
    """A sentence on how AIPP's input compares with the calibration's."""
    samples = request.feed.first(_TRIED)
    errors = [judged(made, how, source, sample) for sample in samples]
    known = [error for error in errors if error is not None]
    if known:
        yield (
            f"AIPP's arithmetic on {len(known)} samples: the .om's input is {max(known):.2g} of"
            " full scale from the calibration's, on average over a picture."
        )
