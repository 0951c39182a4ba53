"""The tables of docs/forms.md: the forms of outputs that are recognised, from the code.

    python scripts/forms.py     writes them between the page's two marks

`tests/test_tasks_declared.py` holds that the page is current.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from deploy.tasks import TASKS
from deploy.tasks.detector import CODINGS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "forms.md"
START, END = "<!-- scripts/forms.py writes this part -->", "<!-- end -->"


def write_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_forms() -> str:
    """Return the generated part of the page."""
    form_rows = []
    for name, task in TASKS.items():
        for form in task.forms:
            form_rows.append((f"`{name}`", form.shape, form.values, form.figure, form.source))
    coding_rows = [(name, coding.numbers, coding.source) for name, coding in CODINGS.items()]

    heads = ("`--task`", "outputs", "values", "agreement with FP32", "models")
    forms = write_table(heads, form_rows)
    codings = write_table(("coding", "numbers", "models"), coding_rows)
    return f"{START}\n\n{forms}\nThe numbers of a box are one of these:\n\n{codings}\n{END}"


def renew_page(page: str) -> str:
    """Return the page with its generated part made anew."""
    before, _, rest = page.partition(START)
    return before + write_forms() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(renew_page(PAGE.read_text("utf-8")), "utf-8")
