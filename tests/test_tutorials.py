"""The pages of docs/ that show commands: each command is run, and what the page shows is compared.

A ```console block has commands behind `$ ` (a line that ends in a backslash goes on) and, below
each, lines that it prints; `...` stands for any others, or for the rest of a line. Times, sizes and
speeds are masked, figures with a decimal point may differ by a twentieth. A ```python block is run,
or is a file where it has a title. All run in one folder a page, in order, with `datasets/` in it.
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ["edge-cpu", "tensorrt-8", "nvidia-and-ascend", "pytorch"]
BLOCK = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(r"\d[\d.,]* ?(?=(?:us|ms|s|x|/s|B|KiB|MiB|GiB|times)\b)")
NUMBER = re.compile(r"\d+\.\d+")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, title, text) of every fenced block of a page."""
    return BLOCK.findall(page.read_text("utf-8"))


def has_console(page: Path) -> bool:
    return any(language == "console" for language, _, _ in blocks(page))


PAGES = [
    page.relative_to(ROOT / "docs")
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if has_console(page)
]


def steps(text: str) -> Iterator[tuple[str, list[str]]]:
    """(command, the lines shown below it) of a console block."""
    command = ""
    shown = []
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command = line[2:]
            shown = []
        else:
            shown.append(line)
    yield command, shown


def is_alike(shown: str, printed: str) -> bool:
    """Whether two lines are the same but for blanks, measured values, last digits and `...`."""
    shown = MEASURED.sub("#", " ".join(shown.split()))
    printed = MEASURED.sub("#", " ".join(printed.split()))
    pattern = re.escape(NUMBER.sub("#.#", shown)).replace(re.escape("..."), ".*")
    if not re.fullmatch(pattern, NUMBER.sub("#.#", printed)):
        return False

    shown_figures = NUMBER.findall(shown.partition("...")[0])
    pairs = zip(shown_figures, NUMBER.findall(printed), strict=False)
    return all(math.isclose(float(a), float(b), rel_tol=0.05) for a, b in pairs)


def contains_lines(shown: list[str], printed: list[str]) -> bool:
    """Whether `printed` begins with the lines shown; a shown `...` stands for any lines."""
    if not shown:
        return True
    if shown[0].strip() == "...":
        return any(contains_lines(shown[1:], printed[index:]) for index in range(len(printed) + 1))
    if not printed or not is_alike(shown[0], printed[0]):
        return False
    return contains_lines(shown[1:], printed[1:])


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_page_commands_print_what_is_shown(page, run, tmp_path, monkeypatch, capfd):
    if page.stem == "pytorch":
        pytest.importorskip("torch", reason="this page needs torch: calib8[torch]")
    (tmp_path / "datasets").symlink_to(ROOT / "datasets")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for language, title, text in blocks(ROOT / "docs" / page):
        if language == "python" and title:
            Path(title).write_text(text, "utf-8")
        elif language == "python":
            exec(compile(text, str(page), "exec"), names)
            capfd.readouterr()
        elif language == "console":
            follow(text, run)


def follow(text: str, run) -> None:
    """Run a console block; a command must end with 0, or its code be asked for and shown."""
    code, is_checked = 0, True
    for command, shown in steps(text):
        if command == "echo $?":
            printed = [str(code)]
            is_checked = True
        else:
            assert is_checked or code == 0, f"exit code {code} before: {command}"
            code, printed = run_command_line(command, run)
            is_checked = False
        report = "\n".join([f"$ {command}", *printed, "-- where the page shows:", *shown])
        assert contains_lines(["...", *shown], printed), report
    assert is_checked or code == 0, f"exit code {code} after: {command}\n" + "\n".join(printed)


def run_command_line(command: str, run) -> tuple[int, list[str]]:
    """Return the exit code of a command and the lines that it printed.

    `calib8` is that of this checkout, `python` this interpreter.
    """
    if command.startswith("calib8 "):
        code, out, err = run(*shlex.split(command, comments=True)[1:])
        return code, (out + err).splitlines()
    command = re.sub("^python ", f"{shlex.quote(sys.executable)} ", command)
    process = subprocess.run(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return process.returncode, process.stdout.splitlines()


@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_shows_only_executed_commands(name):
    """What is left to another machine or to the setup stands in ```sh blocks.

    That is `trtexec`, `atc`, and a check of an engine, which `tests/test_trt_fake.py` runs.
    """
    page = ROOT / "docs" / "tutorials" / f"{name}.md"
    assert page.relative_to(ROOT / "docs") in PAGES
    other_blocks = [
        text for language, _, text in blocks(page) if language not in ("console", "python")
    ]
    assert not re.search(
        r"^\$|^calib8 (?!--version|check \S+\.engine )", "\n".join(other_blocks), re.MULTILINE
    )


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("Load  2.6 ms   SQNR 37.4 dB", "Load 19.25 ms SQNR 37.9 dB", True),
        ("1.06 times as fast, 79.6 KiB", "0.9 times as fast, 80 KiB", True),
        ("SQNR  37.4 dB", "SQNR  13.1 dB", False),
        ("an error: ... 2 of 3", "an error: 0.5 or 2 of 3", True),
        ("25 of 27 nodes", "24 of 27 nodes", False),
        ("good: 0.25 points", "unusable: 0.25 points", False),
    ],
)
def test_line_comparison_masks_measured_values(shown, printed, expected):
    assert is_alike(shown, printed) is expected


def test_page_that_shows_other_output_fails(run):
    with pytest.raises(AssertionError, match=r"\$ echo one\s+one\s.*\s+two\s"):
        follow("$ echo one\ntwo\n", run)
    with pytest.raises(AssertionError, match="exit code 2"):
        follow("$ calib8 cache shew\n$ echo done\n", run)
    follow("$ printf 'a\\nb\\nc\\n'\na\n...\nc\n$ false\n$ echo $?\n1\n", run)
