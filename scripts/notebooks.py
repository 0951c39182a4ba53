"""Run the notebooks of examples/ and store their outputs, for those who only read them.

python scripts/notebooks.py [FILE.ipynb ...]      needs Chromium, and torch for pytorch.ipynb

A notebook runs in this process, in an empty folder beside `datasets/`. A report is stored as its
text and as a picture of its page; Jupyter shows the page itself when the notebook is run.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "examples"
WIDTH_PX, HEIGHT_PX = 960, 720  # of the picture of a report; `picture_px` of a cell: its height


def run_cells(path: Path, folder: Path) -> Iterator[tuple[str, object]]:
    """Run the code cells in order; yield what each prints, and its last value or None.

    `folder`: an empty folder. The cells run in a folder inside of it, beside `datasets/`.
    """
    (folder / "datasets").symlink_to(ROOT / "datasets")
    (folder / "examples").mkdir()
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, before, modules = read_cells(path), Path.cwd(), list(sys.path)
    os.chdir(folder / "examples")
    try:
        for cell in cells:
            body = ast.parse(cell, path.name)
            last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(body, path.name, "exec"), names)
                value = None
                if isinstance(last, ast.Expr):
                    value = eval(compile(ast.Expression(last.value), path.name, "eval"), names)
            yield printed.getvalue(), value
    finally:
        os.chdir(before)
        sys.path[:] = modules


def read_cells(path: Path) -> list[str]:
    """Return the code of each code cell."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def store_outputs(path: Path) -> None:
    """Run a notebook and write its outputs into it."""
    notebook = json.loads(path.read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder:
        results = run_cells(path, Path(folder).resolve())
        for number, (cell, (printed, value)) in enumerate(zip(cells, results, strict=True), 1):
            cell["execution_count"] = number
            cell["outputs"] = []
            if printed:
                text = printed.splitlines(keepends=True)
                cell["outputs"] += [{"output_type": "stream", "name": "stdout", "text": text}]
            if value is not None:
                result = {"output_type": "execute_result", "execution_count": number}
                height = cell["metadata"].get("picture_px", HEIGHT_PX)
                cell["outputs"] += [result | {"data": show(value, height), "metadata": {}}]
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


def show(value: object, height: int) -> dict[str, Any]:
    """Return the forms of a value by media type: text, and a picture if it has a page.

    `height`: of the picture, in px.
    """
    forms: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    page = getattr(value, "_repr_html_", None)
    if page is not None:
        forms["image/png"] = base64.b64encode(draw(page(), height)).decode("ascii")
    return forms


def draw(frame: str, height: int) -> bytes:
    """Return the top of the page in `frame` (an <iframe> with the page as srcdoc) as PNG."""
    from chromium import open_tab  # beside this file

    page = unescape(frame.partition('srcdoc="')[2].partition('"')[0])
    with tempfile.TemporaryDirectory() as folder, open_tab() as tab:
        file = Path(folder, "page.html")
        file.write_text(page, "utf-8")
        tab.show(file, width=WIDTH_PX)
        return tab.picture(height)


def main() -> None:
    """Store the outputs of the notebooks that are named, or of all."""
    parser = argparse.ArgumentParser(description="Store the outputs of notebooks.")
    parser.add_argument("files", type=Path, nargs="*", default=sorted(NOTEBOOKS.glob("*.ipynb")))
    for path in parser.parse_args().files:
        store_outputs(path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
