"""`Report`: the findings, which show themselves at a prompt and in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from deploy.report.html import to_html
from deploy.report.model import Findings
from deploy.report.screen import to_screen

# A frame keeps the page's style from the notebook's, and the notebook's from the page.
_FRAME = (
    '<iframe srcdoc="{page}" title="{title}" sandbox="" width="100%" height="720"'
    ' style="border: 0"></iframe>'
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Findings):
    """Everything a run found; `repr` is one screen of text, and a notebook shows the page."""

    def __repr__(self) -> str:
        try:
            return to_screen(self).rstrip("\n")
        except Exception:  # a debugger or a traceback that shows this value must not fail on it
            return object.__repr__(self)

    def _repr_html_(self) -> str:
        """The page in a frame, or the text where the page cannot be made."""
        try:
            return _FRAME.format(page=escape(to_html(self)), title=escape(self.title))
        except Exception:  # as above
            return f"<pre>{escape(repr(self))}</pre>"
