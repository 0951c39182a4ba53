"""Every source of `docs/feeds.md` and every need of `docs/needs.md` has a test that is there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "feeds.md").read_text("utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ")]
HEADS = ("| From", "| What is read")


def home(row: int) -> str:
    """The file whose tests a row names where it names none: of its table."""
    heads = [line for line in ROWS[: row + 1] if line.startswith(HEADS)]
    found = re.search(r"tests/(\w+\.py)", heads[-1])
    return found[1] if found else "test_sources.py"


def test_every_source_has_its_test():
    for place, row in enumerate(ROWS):
        named = re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", row)
        assert named or row.startswith(HEADS), row
        for file, test in named:
            text = (TESTS / (file or home(place))).read_text("utf-8")
            assert re.search(rf"^def {test}\(", text, re.MULTILINE), (file, test)


def test_the_words_around_the_tables_name_tests_that_are_there():
    for test in re.findall(r"`(?:test_\w+\.py::)?(test_\w+)`", TEXT):
        found = (path for path in TESTS.glob("test_*.py") if f"def {test}(" in path.read_text())
        assert any(found), test


def test_every_need_has_its_test_or_is_not_met_yet():
    text = (TESTS.parent / "docs" / "needs.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*)", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [*range(1, 26)]
    for number, row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named or "not yet" in row, number
        for file, test in named:
            assert f"\ndef {test}(" in (TESTS / file).read_text("utf-8"), (file, test)
