"""Check in Chromium that the site cuts no code block in a window of 1280 px.

python scripts/site_check.py SITE      SITE: the folder that mkdocs wrote

Longer lines are wrapped; a screen of calib8, 98 columns, must fit without that. Prints each block
that does not fit, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from chromium import open_tab

WIDTH_PX, COLUMNS = 1280, 98
TOO_WIDE = """Array.from(document.querySelectorAll("pre code")).map(code => {
  const longest = code.textContent.split("\\n").reduce((a, b) => a.length < b.length ? b : a);
  const cut = code.scrollWidth > code.clientWidth;
  if (longest.length <= %d) code.style.whiteSpace = "pre";
  return cut || code.scrollWidth > code.clientWidth ? longest : null;
}).filter(line => line !== null)"""


def main() -> int:
    """Look at every page; return the exit code."""
    parser = argparse.ArgumentParser(description="Find code blocks that are cut.")
    parser.add_argument("site", type=Path)
    site = parser.parse_args().site
    pages = sorted(site.rglob("*.html"))
    failed = not pages
    with open_tab() as tab:
        for page in pages:
            tab.show(page, width=WIDTH_PX)
            for line in tab.page.evaluate(TOO_WIDE % COLUMNS):
                print(f"{page.relative_to(site)}: wider than its block: {line}")
                failed = True
    print(f"{len(pages)} pages at {WIDTH_PX} px")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
