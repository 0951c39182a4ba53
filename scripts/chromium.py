"""A headless Chromium, driven through the DevTools protocol over two pipes; nothing but Python.

::

    with browser() as page:
        page.show(Path("report.html"), width=400)
        page.value("document.title")

`page.faults` are what the console says of errors, `page.fetched` what was asked of the network.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
_IN, _OUT = 3, 4  # where Chromium reads and writes the protocol
_HIGH = 20  # no descriptor that is moved to 3 or 4 lies on the other's place
_PATIENCE_S = 60.0  # for one answer
_LONGEST_PX = 12000  # of a picture
_MARGIN_PX = 12  # around a part of the page


class Silent(RuntimeError):
    """Chromium ended, or did not answer."""


def found() -> str | None:
    """Path of a Chromium of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab, shown at a width, light or dark."""

    def __init__(self, reads: int, writes: int) -> None:
        """Attach to a tab of the browser that reads and writes these pipes."""
        self._reads, self._writes = reads, writes
        self._held = b""
        self._last = 0
        self._session: str | None = None
        self.faults: list[str] = []
        self.fetched: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Ask for something, and wait for the answer.

        Raises:
            Silent: Chromium refuses, ended, or does not answer.
        """
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writes, data) :]
        while True:
            answer = self._next()
            if answer.get("id") != self._last:
                self._told(answer)
            elif "error" in answer:
                raise Silent(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def show(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file, and wait until it is there."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.faults, self.fetched, self._loaded = [], [], False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._told(self._next())

    def value(self, expression: str, *, wait: bool = False) -> Any:
        """What an expression of JavaScript gives, as plain values; `wait`: what it promises.

        Raises:
            Silent: it threw.
        """
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=wait
        )
        if "exceptionDetails" in answer:
            raise Silent(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key, such as Tab or Enter, where the focus is."""
        text = {"Enter": "\r", "Tab": ""}.get(key, key)
        for kind in ("keyDown", "keyUp"):
            own = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **own
            )

    def picture(self, most_px: int = _LONGEST_PX) -> bytes:
        """The page from its top, as PNG, at most so high."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "scale": 1}
        clip["height"] = min(size["height"], most_px)
        shot = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        return base64.b64decode(shot["data"])

    def part(self, expression: str) -> bytes | None:
        """The element that JavaScript finds, with a margin, as JPEG; None if there is none."""
        where = f"(() => {{ const one = {expression}; return one?.getBoundingClientRect(); }})()"
        box = self.value(f"JSON.stringify({where} ?? null)")
        sides = json.loads(box)
        if sides is None:
            return None
        scrolled = self.value("window.scrollY")
        clip = {"x": sides["x"] - _MARGIN_PX, "y": sides["y"] + scrolled - _MARGIN_PX, "scale": 1}
        clip |= {side: sides[side] + 2 * _MARGIN_PX for side in ("width", "height")}
        shot = self.call(
            "Page.captureScreenshot",
            format="jpeg",
            quality=85,
            clip=clip,
            captureBeyondViewport=True,
        )
        return base64.b64decode(shot["data"])

    def printed(self) -> bytes:
        """The page on paper, as PDF."""
        sheet = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(sheet["data"])

    def _next(self) -> dict[str, Any]:
        """The next message."""
        end = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._reads, 1 << 20) if ready else b""
            if not piece:
                raise Silent("Chromium ended" if ready else f"no answer in {_PATIENCE_S:g} s")
            self._held += piece
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _told(self, message: dict[str, Any]) -> None:
        """Keep what an event says of errors, of the network, or of the page being there."""
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.faults.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.faults.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.faults.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]  # of pictures inside the page it is what they hold
            self.fetched += [] if url.startswith("data:") else [url]


@contextmanager
def browser(path: str | None = None) -> Iterator[Page]:
    """A Chromium with one empty tab, ended at the end with all that it started.

    Args:
        path: of the program; None takes what `found` finds.

    Raises:
        Silent: there is none, or it does not start.
    """
    program = path or found()
    if program is None:
        raise Silent(f"pages are shown by Chromium, got none of {', '.join(NAMES)} in PATH")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        asked, answers = _pipe(), _pipe()
        said = os.path.join(profile, "stderr")
        process = os.posix_spawn(
            program,
            [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, asked[0], _IN),
                (os.POSIX_SPAWN_DUP2, answers[1], _OUT),
                (os.POSIX_SPAWN_OPEN, 2, said, os.O_WRONLY | os.O_CREAT, 0o600),
            ],
            setpgroup=0,
        )
        os.close(asked[0])
        os.close(answers[1])
        try:
            yield Page(answers[0], asked[1])
        finally:
            os.close(asked[1])  # it ends when nobody can ask any more
            os.close(answers[0])
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe, where they are in nobody's way."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _HIGH) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
