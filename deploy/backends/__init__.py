"""One file per runtime; `BACKENDS` is the table of targets."""
