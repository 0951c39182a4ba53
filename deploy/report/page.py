"""The frame of every page: its policy, its style, its script."""

from __future__ import annotations

from html import escape

from deploy.report.figures import encodable
from deploy.report.script import POLICY, SCRIPT
from deploy.report.style import STYLE


def page(title: str, body: str) -> str:
    """A whole page.

    Args:
        title: plain text.
        body: HTML.
    """
    return encodable(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
