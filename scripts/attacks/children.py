"""calib8 in a forked child, which may be killed, starved or made to fail."""

from __future__ import annotations

import os
import selectors
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

from deploy import cli
from scripts.attacks.inside import as_terminal
from scripts.attacks.outcome import Ended

_FAULT = 99  # exit code of a child whose preparation failed


@dataclass(slots=True)
class Child:
    """A run that has begun.

    Attributes:
        number: of its process.
    """

    number: int
    _streams: tuple[int, int]
    _ready: int

    def wait_ready(self) -> None:
        """Until the command itself begins, with its handlers of signals in place; or it ended."""
        os.read(self._ready, 1)

    def send(self, number: int) -> None:
        """A signal."""
        os.kill(self.number, number)

    def ended(self) -> Ended:
        """Its end; waits for it."""
        out, err = _drained(self._streams)
        _, status = os.waitpid(self.number, 0)
        os.close(self._ready)
        return Ended(os.waitstatus_to_exitcode(status), out, err)


def start(words: list[str], *, before: Callable[[], object] | None = None) -> Child:
    """Begin `calib8 WORDS`.

    Args:
        words: of the command line.
        before: called in the child first, to prepare what shall go wrong.
    """
    pipes = os.pipe(), os.pipe()  # no files, since some children may write none
    ready, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    number = os.fork()
    if number:
        for handle in (tell, *(end for _, end in pipes)):
            os.close(handle)
        return Child(number, (pipes[0][0], pipes[1][0]), ready)
    code = _FAULT
    try:
        for place, (mine, end) in enumerate(pipes, 1):
            os.dup2(end, place)
            os.close(mine)
            os.close(end)
        os.close(ready)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        as_terminal()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = _main(words, tell, before)
    finally:
        os._exit(code)


def run(words: list[str], *, before: Callable[[], object] | None = None) -> Ended:
    """`calib8 WORDS` from its beginning to its end."""
    return start(words, before=before).ended()


def _main(words: list[str], tell: int, before: Callable[[], object] | None) -> int:
    """What `sys.exit` would have ended with."""
    if before is not None:
        before()
    command = cli.cli.main

    def told(**options: object) -> object:
        os.write(tell, b"1")
        try:
            return command(**options)
        finally:  # what comes now came too late to matter
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

    with patch.object(cli.cli, "main", told):
        try:
            cli.main(words)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
        else:
            code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _drained(handles: tuple[int, int]) -> tuple[bytes, bytes]:
    """All that comes out of two pipes; closes them."""
    held = {handle: b"" for handle in handles}
    with selectors.DefaultSelector() as ready:
        for handle in handles:
            ready.register(handle, selectors.EVENT_READ)
        while ready.get_map():
            for key, _ in ready.select():
                piece = os.read(key.fd, 1 << 16)
                held[key.fd] += piece
                if not piece:
                    ready.unregister(key.fd)
                    os.close(key.fd)
    return held[handles[0]], held[handles[1]]
