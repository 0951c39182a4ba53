"""Pictures of a report as Chromium shows it: light, at the widths of a desk and of a phone.

python scripts/pictures.py REPORT.html FILE.png      writes FILE.png and FILE-narrow.png, and for
                                                     a detector FILE-boxes.jpg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from chromium import browser

SHAPES = {"": (1280, 1900), "-narrow": (400, 1500)}  # ending of the name -> px across and down
MOST_BYTES = 200_000  # of a picture in the docs
BOXES = "document.querySelector('h2[id^=boxes-of]')?.closest('section')"  # the first engine's


def main() -> None:
    """Take the pictures; one that would be too large is cut shorter."""
    parser = argparse.ArgumentParser(description="Pictures of a report.")
    parser.add_argument("report", type=Path)
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    with browser() as page:
        for ending, (width, height) in SHAPES.items():
            page.show(asked.report, width=width)
            data = page.picture(height)
            while len(data) > MOST_BYTES:
                height -= 100
                data = page.picture(height)
            path = asked.file.with_name(f"{asked.file.stem}{ending}.png")
            path.write_bytes(data)
            print(f"{path}  {width}x{height}, {len(data):,} bytes, faults: {page.faults or 'none'}")
        page.show(asked.report, width=SHAPES[""][0])
        boxes = page.part(BOXES)
        if boxes is not None:
            path = asked.file.with_name(f"{asked.file.stem}-boxes.jpg")
            path.write_bytes(boxes)
            print(f"{path}  {len(boxes):,} bytes")


if __name__ == "__main__":
    main()
