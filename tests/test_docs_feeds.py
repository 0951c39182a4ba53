"""Every source of `docs/feeds.md` and every need of `docs/needs.md` has a test that is there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "feeds.md").read_text("utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ")]
TABLE_HEADS = ("| From", "| What is read", "| `--labels` | What")


def default_test_file(row: int) -> str:
    """The file whose tests a row names where it names none: of its table."""
    heads = [line for line in ROWS[: row + 1] if line.startswith(TABLE_HEADS)]
    named_file = re.search(r"tests/(\w+\.py)", heads[-1])
    return named_file[1] if named_file else "test_sources.py"


def test_every_source_names_existing_tests():
    for index, row in enumerate(ROWS):
        named_tests = re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", row)
        assert named_tests or row.startswith(TABLE_HEADS), row
        for file, test in named_tests:
            text = (TESTS / (file or default_test_file(index))).read_text("utf-8")
            assert re.search(rf"^def {test}\(", text, re.MULTILINE), (file, test)


def test_text_names_existing_tests():
    for test in re.findall(r"`(?:test_\w+\.py::)?(test_\w+)`", TEXT):
        defining_files = (
            path for path in TESTS.glob("test_*.py") if f"def {test}(" in path.read_text()
        )
        assert any(defining_files), test


def test_every_need_names_existing_tests():
    text = (TESTS.parent / "docs" / "needs.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*)", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [*range(1, 26)]
    for number, row in rows:
        named_tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named_tests or "not yet" in row, number
        for file, test in named_tests:
            assert f"\ndef {test}(" in (TESTS / file).read_text("utf-8"), (file, test)
