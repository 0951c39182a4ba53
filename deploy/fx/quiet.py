"""Without what torch.export and its exporter write on stderr: notes, warnings, and whole graphs.

What goes wrong arrives as an exception, which becomes a sentence.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any


@contextmanager
def quiet() -> Iterator[None]:
    """Until the block ends, nothing that this thread logs, warns of or prints on stderr shows."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch's loggers have handlers and levels of their own
    try:
        with warnings.catch_warnings(), redirect_stderr(_Elsewhere()):
            for kind in (DeprecationWarning, FutureWarning, UserWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        logging.disable(before)


class _Elsewhere:
    """Stderr for all threads but the one that made this: progress is told by another."""

    def __init__(self) -> None:
        self._hushed, self._stream = threading.get_ident(), sys.stderr

    def write(self, text: str) -> int:
        """Nothing, or what stderr does."""
        return len(text) if threading.get_ident() == self._hushed else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        """All else of stderr."""
        return getattr(self._stream, name)
