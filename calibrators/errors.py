"""Errors of the numeric half; `deploy.errors` draws the whole tree."""


class Calib8Error(Exception):
    """Root of every error that calib8 raises on purpose.

    The message states the rule, then what was got, then the way out, and is fit to be shown to
    a user as it stands.
    """


class CalibrationError(Calib8Error):
    """Statistics or a search that cannot give a sound scale: NaN, Inf, nothing observed."""
