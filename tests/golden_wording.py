"""The wording of messages: one golden file for all tests, which `scripts/wording` renews.

A test asserts the class of an error and the names in its message, and hands the sentence to the
fixture `wording`. A plainer sentence then changes tests/golden/wording.json and no test.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from calibrators.searches import SEARCHES

GOLDEN_FILE = Path(__file__).parent / "golden" / "wording.json"
# pytest numbers the folders of a session in the order in which the tests come
NUMBERED_FOLDER = re.compile(r"(<session>/[A-Za-z_-]+)\d+")
# the text of an exception from elsewhere changes with Python, its library and the line that raises
FOREIGN_TEXT = re.compile(r"\b(\w+(?:Error|SymNode)): [^;]*")
RENEWED_MESSAGES = os.environ.get("CALIB8_RENEWED_WORDING")  # file that takes messages, a line each


class Wording:
    """The golden messages of one test, in the order in which it checks them."""

    def __init__(self, test_id: str, folders: dict[str, str]) -> None:
        self.test_id = test_id
        self.folders = folders  # path -> the word that stands for it in the golden file
        self.golden_messages: list[str] = golden_messages().get(test_id, [])
        self.messages: list[str] = []

    def check(self, message: object) -> None:
        """Compare a message, or the text of an exception, with the golden one."""
        text = " ".join(str(message).split())
        for folder, word in self.folders.items():
            text = text.replace(folder, word)
        text = text.replace(", ".join(SEARCHES), "<methods>")  # a new one changes no message
        text = NUMBERED_FOLDER.sub(r"\1", text)
        text = FOREIGN_TEXT.sub(r"\1: ...", text)
        self.messages.append(text)
        if RENEWED_MESSAGES:
            return
        position = len(self.messages) - 1
        golden = self.golden_messages[position : position + 1]
        assert golden == [text], "scripts/wording renews tests/golden/wording.json"

    def store_renewed(self) -> None:
        """Write the messages for `scripts/wording`, if it runs the test."""
        if RENEWED_MESSAGES:
            with Path(RENEWED_MESSAGES).open("a", encoding="utf-8") as file:
                file.write(json.dumps([self.test_id, self.messages]) + "\n")


def golden_messages() -> dict[str, list[str]]:
    """Test -> its messages."""
    messages: dict[str, list[str]] = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))
    return messages


def renew(lines: list[str]) -> None:
    """Put the messages of the tests that ran into the golden file; drop tests that are gone."""
    messages = golden_messages() | dict(json.loads(line) for line in lines)
    remaining = {test: texts for test, texts in messages.items() if texts and is_defined(test)}
    text = json.dumps(dict(sorted(remaining.items())), indent=1)
    GOLDEN_FILE.write_text(f"{text}\n", encoding="utf-8")


def is_defined(test_id: str) -> bool:
    """Whether the file of a test defines it."""
    file_name, _, name = test_id.partition("::")
    path = Path(__file__).parent / file_name
    function = re.escape(name.partition("[")[0])
    return path.is_file() and bool(re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE))
