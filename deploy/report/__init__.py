"""A run's results as JSON, Markdown, an HTML page, plain text and one screen of it.

`Findings` (in `model`, made of `parts`) holds plain values. `sections` turns them into blocks,
which `documents` writes as a page, as Markdown and as text; `Report` adds `repr` and the
notebook's display.
"""

from deploy.report.documents import Report, to_html, to_markdown, to_text
from deploy.report.model import to_json
from deploy.report.screen import to_screen

__all__ = ["Report", "to_html", "to_json", "to_markdown", "to_screen", "to_text"]
