"""Frame of every HTML page: style, script, content policy, verdicts and main figures.

`STYLE` is one sheet, `page.css`: colours are variables, light or dark as the reader's system asks.
On a narrow screen table rows become cards; on paper long tables are cut and folded parts stay
folded.

`SCRIPT`, `page.js`, sorts tables by their heads and filters them. The page is complete without it:
the script itself creates the buttons and boxes. The Content-Security-Policy allows only this sheet
and this script, by hash, and no requests: a `style` attribute or `onclick` would not work.
"""

import base64
import hashlib
from collections.abc import Iterable
from html import escape

from deploy.files.reading import read_package_text
from deploy.metrics.levels import DOUBTFUL, FLOAT, GOOD, UNUSABLE
from deploy.report.blocks import PRINTED
from deploy.report.figures import encodable
from deploy.report.verdict import Verdict

PICTURE_PX = 120  # side of a sample picture's square
DRAWING_PX = 250  # longer side of a drawing

_MAX_UNFILTERED_ROWS = 12  # a longer table gets a filter box

STYLE = f":root {{ --box: {PICTURE_PX}px; --long: {DRAWING_PX}px; }}\n" + (
    read_package_text(__package__, "page.css").replace("PRINTED", str(PRINTED + 1))
)
SCRIPT = f"""
"use strict";
const PRINTED = {PRINTED}, FILTERED = {_MAX_UNFILTERED_ROWS};
""" + read_package_text(__package__, "page.js")


def _hash(text: str) -> str:
    """Return the hash of a text as a policy source."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


POLICY = (
    f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; img-src data:;"
    " base-uri 'none'; form-action 'none'"
)

_LEVEL_CLASSES = {GOOD: "good", FLOAT: "float", DOUBTFUL: "doubtful", UNUSABLE: "unusable"}


def verdicts(labelled_verdicts: Iterable[tuple[str, Verdict]]) -> str:
    """Return one line per engine: the level as a mark, its label, the reasons; "" without any."""
    lines = ""
    for label, verdict in labelled_verdicts:
        lines += (
            f'<p class="verdict {_LEVEL_CLASSES[verdict.level]}"><b>{escape(verdict.level)}</b>'
            f" {escape(label)}: {escape(verdict.reasons_text)}</p>"
        )
    return f'<div class="verdicts">{lines}</div>' if lines else ""


def tiles(main_figures: Iterable[tuple[str, str]]) -> str:
    """Return the main figures, each a value over its label; "" without any."""
    cells = ""
    for value, label in main_figures:
        cells += f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
    return f'<div class="tiles">{cells}</div>' if cells else ""


def page(title: str, body: str) -> str:
    """Return a complete HTML page.

    Args:
        title: plain text.
        body: HTML.
    """
    return encodable(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="generator" content="calib8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
