"""What stands beside the cache of a build: which model it is for, and what it was made from.

So model, cache and this note are enough on a device, where C++'s `calib8-build` takes the cache
without the images.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration import store
from deploy.calibration.reuse import fingerprint_of
from deploy.files import atomic
from deploy.frontends.digest import model_digest
from deploy.stamped import sha256

if TYPE_CHECKING:
    import onnx

    from deploy.targets.base import BuildRequest


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
