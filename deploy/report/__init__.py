"""A run's results as JSON, Markdown, an HTML page and one screen of text.

`Findings` (in `model`, made of `parts`) holds plain values. `sections` turns them into blocks,
which `documents` writes as a page and as Markdown; `Report` adds `repr` and the notebook's display.
"""

from deploy.report.documents import Report, to_html, to_markdown
from deploy.report.model import to_json
from deploy.report.screen import to_screen

__all__ = ["Report", "to_html", "to_json", "to_markdown", "to_screen"]
