"""Shell scripts beside the files that they are about."""

from __future__ import annotations

from pathlib import Path

from deploy.files import atomic


def write_script(path: Path, body: str) -> Path:
    """Write a script that runs from any folder, in its own; names in it keep their own bytes.

    Args:
        path: of the script.
        body: lines of a shell, quoted.

    Raises:
        ExportError: the folder is not writable.
    """
    text = f'#!/bin/sh\ncd "$(dirname "$0")" || exit\n{body}\n'
    return atomic.write_bytes(path, text.encode("utf-8", "surrogateescape"))
