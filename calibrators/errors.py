"""Errors of `calibrators`; `deploy.errors` shows the full class tree."""

_MAX_LENGTH = 4000  # characters of a message, which may quote a file
_END_LENGTH = 900  # characters retained at the end, which holds the advice


class Calib8Error(Exception):
    """Base class of every error that calib8 raises deliberately.

    The message states the rule, the value that breaks it, and what to do.
    Long messages are shortened in the middle.
    """

    def __str__(self) -> str:
        """Return the message, shortened if it is very long."""
        return shortened(super().__str__())


class CalibrationError(Calib8Error):
    """Statistics or a search cannot give a valid scale: NaN, Inf, nothing observed."""


def shortened(text: str) -> str:
    """Return a text, or its beginning and end if it is longer than `_MAX_LENGTH` characters."""
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[: _MAX_LENGTH - _END_LENGTH]} ... {text[-_END_LENGTH:]}"
