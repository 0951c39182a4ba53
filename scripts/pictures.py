"""Pictures of a report as Chromium shows it: light, at the widths of a desk and of a phone.

python scripts/pictures.py REPORT.html FILE.png      writes FILE.png and FILE-narrow.png,
                                                     FILE-splits.jpg after a search, and for a
                                                     detector FILE-boxes.jpg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from chromium import open_tab

SHAPES = {"": (1280, 1900), "-narrow": (400, 1500)}  # ending of the name -> px across and down
MOST_BYTES = 200_000  # of a picture in the docs
# ending of the name -> selector of the first such section
SECTIONS = {
    "-boxes": "section:has(h2[id^=boxes-of])",
    "-splits": "section:has(h2[id^=splits])",
}


def main() -> None:
    """Take the pictures; one that would be too large is cut shorter."""
    parser = argparse.ArgumentParser(description="Pictures of a report.")
    parser.add_argument("report", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    with open_tab() as tab:
        for ending, (width, height) in SHAPES.items():
            tab.show(arguments.report, width=width)
            data = tab.picture(height)
            while len(data) > MOST_BYTES:
                height -= 100
                data = tab.picture(height)
            path = arguments.file.with_name(f"{arguments.file.stem}{ending}.png")
            path.write_bytes(data)
            print(f"{path}  {width}x{height}, {len(data):,} bytes, errors: {tab.errors or 'none'}")
        tab.show(arguments.report, width=SHAPES[""][0])
        for ending, selector in SECTIONS.items():
            section = tab.element_picture(selector)
            if section is not None:
                path = arguments.file.with_name(f"{arguments.file.stem}{ending}.jpg")
                path.write_bytes(section)
                print(f"{path}  {len(section):,} bytes")


if __name__ == "__main__":
    main()
