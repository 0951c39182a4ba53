"""The notebooks of examples/: their cells run in order, and none is kept with what it printed.

The value of a cell's last expression is asked for its page, as Jupyter does.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(path: Path) -> list[str]:
    """The code of a notebook."""
    held = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in held if cell["cell_type"] == "code"]


def shown(code: str, names: dict[str, object], where: str) -> str:
    """Run a cell; the page of what it ends with, "" where that has none."""
    body = ast.parse(code, where)
    last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, where, "exec"), names)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    page = getattr(value, "_repr_html_", None)
    return page() if page else ""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_the_report(path, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, object] = {"__name__": "__main__"}
    pages = [shown(code, names, path.name) for code in cells(path)]
    assert sum("<iframe" in page for page in pages) == 1
    assert capsys.readouterr().out


def test_there_are_two_notebooks_without_outputs():
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None
