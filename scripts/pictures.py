"""The pictures of the docs: reports as Chromium shows them, and the screen of the demo.

python scripts/pictures.py                       builds the demo, and writes all of docs/
python scripts/pictures.py REPORT.html FILE.png  FILE.png as a wide window shows the report, and
                                                 FILE-narrow.png as a phone does; FILE-splits.jpg
                                                 after a search, FILE-boxes.jpg for a detector
"""

from __future__ import annotations

import argparse
import html
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from chromium import Tab, open_tab

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"": (1280, 1900), "-narrow": (400, 1500)}  # ending of the name -> px across and down
MAX_BYTES = 200_000  # of a picture in the docs
# ending of the name -> selector of the first such section
SECTIONS = {
    "-boxes": "section:has(h2[id^=boxes-of])",
    "-splits": "section:has(h2[id^=splits])",
}
SCENES = "datasets/scenes"
DEMO = (
    *("build", f"{SCENES}/scenes.onnx", "--images", f"{SCENES}/calib.txt"),
    *("--eval-images", f"{SCENES}/eval.json", "--labels", f"{SCENES}/eval.json"),
)
TARGETS = "onnxruntime,tensorrt,ascend"
# the endings of colors on a terminal -> how a page shows them
COLORS = {
    "1": "font-weight:bold",
    "32": "color:#7bd88f",
    "33": "color:#fce566",
    "31": "color:#fc618d",
}
PAGE = """<body style="margin:0;background:#222;color:#eee;width:max-content;padding:12px 18px">
<pre style="font:14px/1.45 'DejaVu Sans Mono',monospace;margin:0">{}</pre>"""


def main() -> None:
    """Take the pictures of a report, or all of the docs."""
    parser = argparse.ArgumentParser(description="Pictures of reports, and those of the docs.")
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "docs" / "report.png")
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    if arguments.report is None:
        take_docs_pictures()
        return
    with open_tab() as tab:
        take_page(tab, arguments.report, arguments.file)
        take_sections(tab, arguments.report, arguments.file, SECTIONS)


def take_docs_pictures() -> None:
    """Build the demo, for three targets and with a limit that needs splits, and picture it."""
    docs = ROOT / "docs"
    with tempfile.TemporaryDirectory() as folder, open_tab() as tab:
        os.symlink(ROOT / "datasets", f"{folder}/datasets")  # paths on the screen are short
        screen = run_calib8(folder, *DEMO, "--target", TARGETS, "--out", "calib8-out")
        limit = ("--target", "tensorrt", "--max-loss", "0")
        run_calib8(folder, *DEMO, *limit, "--out", "splits")
        demo, splits = Path(folder, "calib8-out"), Path(folder, "splits")
        take_page(tab, demo / "report.html", docs / "report.png")
        take_sections(tab, demo / "report.html", docs / "report.png", ["-boxes"])
        take_sections(tab, splits / "report.html", docs / "report.png", ["-splits"])

        page = Path(folder, "screen.html")
        page.write_text(PAGE.format(screen_html(screen)), "utf-8")
        tab.show(page, width=880, height=100)
        write(docs / "screen.png", tab.picture())


def run_calib8(folder: str, *arguments: str) -> str:
    """Return what a command in a folder prints in color; its exit code does not matter."""
    command = [sys.executable, "-m", "deploy", *arguments]
    environment = {**os.environ, "FORCE_COLOR": "1"}
    process = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    return process.stdout


def screen_html(text: str) -> str:
    """Return a terminal's text with colors as HTML."""
    marked = html.escape(text, quote=False)
    marked = re.sub(r"\x1b\[0m", "</span>", marked)
    # click writes color and weight one after the other, and one end for both
    return re.sub(r"((?:\x1b\[\d+m)+)", _open_span, marked)


def _open_span(match: re.Match[str]) -> str:
    styles = [COLORS[code] for code in re.findall(r"\d+", match[1])]
    return f'<span style="{";".join(styles)}">'


def take_page(tab: Tab, report: Path, path: Path) -> None:
    """Picture a report at both widths; one that would be too large is cut shorter."""
    for ending, (width, height) in SHAPES.items():
        tab.show(report, width=width)
        data = tab.picture(height)
        while len(data) > MAX_BYTES:
            height -= 100
            data = tab.picture(height)
        write(path.with_name(f"{path.stem}{ending}.png"), data)
        print(f"    {width}x{height}, errors: {tab.errors or 'none'}")


def take_sections(tab: Tab, report: Path, path: Path, endings: Collection[str]) -> None:
    """Picture sections of a report that it has."""
    tab.show(report, width=SHAPES[""][0])
    for ending in endings:
        section = tab.element_picture(SECTIONS[ending])
        if section is not None:
            write(path.with_name(f"{path.stem}{ending}.jpg"), section)


def write(path: Path, data: bytes) -> None:
    """Write a picture and say so."""
    path.write_bytes(data)
    print(f"{path}  {len(data):,} bytes")


if __name__ == "__main__":
    main()
