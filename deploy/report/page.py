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

BOX = 120  # side of a sample picture's square, in px
LONG = 250  # longer side of a drawing, in px

_FILTERED = 12  # rows above which a table gets a filter box

STYLE = f":root {{ --box: {BOX}px; --long: {LONG}px; }}\n" + (
    read_package_text(__package__, "page.css").replace("PRINTED", str(PRINTED + 1))
)
SCRIPT = f"""
"use strict";
const PRINTED = {PRINTED}, FILTERED = {_FILTERED};
""" + read_package_text(__package__, "page.js")


def _hash(text: str) -> str:
    """Return the hash of a text as a policy source."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


POLICY = (
    f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; img-src data:;"
    " base-uri 'none'; form-action 'none'"
)

_MARKS = {GOOD: "good", FLOAT: "float", DOUBTFUL: "doubtful", UNUSABLE: "unusable"}


def verdicts(judged: Iterable[tuple[str, Verdict]]) -> str:
    """Return one line per engine: the level as a mark, its label, the reasons; "" without any."""
    rows = "".join(
        f'<p class="verdict {_MARKS[one.level]}"><b>{escape(one.level)}</b>'
        f" {escape(label)}: {escape('; '.join(one.reasons))}</p>"
        for label, one in judged
    )
    return f'<div class="verdicts">{rows}</div>' if rows else ""


def tiles(main_figures: Iterable[tuple[str, str]]) -> str:
    """Return the main figures, each a value over its label; "" without any."""
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
        for value, label in main_figures
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def page(title: str, body: str) -> str:
    """Return a complete HTML page.

    `title`: plain text. `body`: HTML.
    """
    return encodable(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="generator" content="calib8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
