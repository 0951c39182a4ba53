"""Errors of the numeric half; `deploy.errors` draws the whole tree."""

_LONGEST = 4000  # letters of a message; what it quotes may be as long as a file
_END = 900  # of them at the end, where the way out stands


class Calib8Error(Exception):
    """Root of every error that calib8 raises on purpose.

    The message states the rule, then what was got, then the way out, and is fit to be shown to
    a user as it stands. One that quotes more than a screen holds has a gap in its middle.
    """

    def __str__(self) -> str:
        """The message, of a length to be read."""
        return shortened(super().__str__())


class CalibrationError(Calib8Error):
    """Statistics or a search that cannot give a sound scale: NaN, Inf, nothing observed."""


def shortened(text: str) -> str:
    """A text of at most some thousand letters: its beginning and its end where it is longer."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - _END]} ... {text[-_END:]}"
