"""`Report`: the findings with a `repr` for the prompt and a page for notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from deploy.report.html import to_html
from deploy.report.model import Findings
from deploy.report.screen import to_screen

# The frame isolates the page's style from the notebook's.
_FRAME = (
    '<iframe srcdoc="{page}" title="{title}" sandbox="" width="100%" height="720"'
    ' style="border: 0"></iframe>'
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Findings):
    """All results of a run; `repr` is one screen of text, notebooks show the page."""

    def __repr__(self) -> str:
        try:
            return to_screen(self).rstrip("\n")
        except Exception:  # a debugger or traceback that shows this value must not fail
            return object.__repr__(self)

    def _repr_html_(self) -> str:
        """Return the page in a frame, or the text if the page cannot be made."""
        try:
            return _FRAME.format(page=escape(to_html(self)), title=escape(self.title))
        except Exception:  # as above
            return f"<pre>{escape(repr(self))}</pre>"
