"""A headless Chromium of this machine, driven by Playwright.

::

    with open_tab() as tab:
        tab.show(Path("report.html"), width=400)
        tab.page.evaluate("document.title")
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import ConsoleMessage, FloatRect, Page, Request, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--force-color-profile=srgb")
MAX_PICTURE_PX = 12000  # height of a picture
MARGIN_PX = 12  # around the picture of an element


def find_chromium() -> str | None:
    """Return the path of a Chromium of this machine."""
    for program in PROGRAMS:
        if path := shutil.which(program):
            return path
    return None


class Tab:
    """One tab of a browser.

    Attributes:
        page: Playwright's page.
        errors: errors and warnings of the console and of scripts since the last `show`.
        requests: addresses that the page asked for since the last `show`, without data: addresses.
    """

    def __init__(self, page: Page) -> None:
        """Record errors and requests of a page."""
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._record_message)
        page.on("request", self._record_request)

    def show(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file and wait until it is loaded; sizes in px."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(media="null", color_scheme="dark" if dark else "light")
        self.errors.clear()
        self.requests.clear()
        self.page.goto(path.resolve().as_uri())

    def picture(self, max_height: int = MAX_PICTURE_PX) -> bytes:
        """Return the page from its top as PNG, at most `max_height` px high."""
        size = self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        clip = FloatRect(x=0, y=0, width=size[0], height=min(size[1], max_height))
        return self.page.screenshot(clip=clip, full_page=True)

    def element_picture(self, selector: str) -> bytes | None:
        """Return the first element that a selector matches, with a margin, as JPEG."""
        element = self.page.query_selector(selector)
        if element is None:
            return None
        element.scroll_into_view_if_needed()
        box = element.bounding_box()
        assert box is not None, "the element is not visible"
        clip = FloatRect(
            x=box["x"] - MARGIN_PX,
            y=box["y"] + self.page.evaluate("window.scrollY") - MARGIN_PX,
            width=box["width"] + 2 * MARGIN_PX,
            height=box["height"] + 2 * MARGIN_PX,
        )
        return self.page.screenshot(type="jpeg", quality=85, clip=clip, full_page=True)

    def _record_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _record_request(self, request: Request) -> None:
        if not request.url.startswith("data:"):
            self.requests.append(request.url)


@contextmanager
def open_tab() -> Iterator[Tab]:
    """Start a Chromium with one tab, and end it afterwards."""
    program = find_chromium()
    if program is None:
        raise SystemExit(f"install Chromium: none of {', '.join(PROGRAMS)} is in PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield Tab(browser.new_page())
        finally:
            browser.close()
