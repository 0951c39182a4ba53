"""The site: a page of every command and name, links, menu, tables and home."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import calib8
from calibrators.searches import SEARCHES
from deploy.cli import COMMANDS, cli
from deploy.feed.preprocess import PRESETS
from deploy.targets import TARGETS
from deploy.targets.options import declared_options
from deploy.tuning.search_options import DEFAULT_EFFORT, EFFORTS
from scripts import site_pages
from tests.test_tutorials import TUTORIALS

ROOT = Path(__file__).resolve().parents[1]


def test_documented_efforts_match_the_search():
    page = (ROOT / "docs" / "search.md").read_text("utf-8")
    for number, effort in EFFORTS.items():
        row = f"{effort.isolated_trials} | {effort.split_trials} |"
        assert re.search(rf"^\| {number}( \(default\))? \| {re.escape(row)}", page, re.MULTILINE)
    assert f"| {DEFAULT_EFFORT} (default) |" in page


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return site_pages.pages()


def commands_below(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield (its name on the command line, command) for a command and all below it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from commands_below(command.get_command(context, name), f"{path} {name}")


def test_every_command_page_lists_its_options(pages):
    for name in COMMANDS:
        page = pages[f"reference/cli/{name}.md"]
        assert f"({name}.md)" in pages["reference/cli/index.md"]
        top_command = cli.get_command(click.Context(cli), name)
        for path, command in commands_below(top_command, f"calib8 {name}"):
            assert re.search(rf"^#+ {path}$", page, re.MULTILINE)
            for param in command.params:
                if isinstance(param, click.Option) and not param.hidden:
                    row = rf"^`.*{re.escape(param.opts[-1])}\b.*`$"
                    assert re.search(row, page, re.MULTILINE), (path, param.opts)


def test_every_public_name_has_its_entry(pages):
    page = pages["reference/api.md"]
    for name in public_names_of(calib8):
        value = getattr(calib8, name)
        assert not callable(value) or f"::: {value.__module__}.{name}" in page, name
    for name in (*calib8.cache.__all__, *calib8.ascend.__all__):
        assert re.search(rf"^::: calib8\.(cache|ascend)\.{name}$", page, re.MULTILINE), name


def test_changelog_links_to_pages(pages):
    page = pages["changelog.md"]
    assert page.startswith("# Changelog")
    assert "[feeds.md](feeds.md)" in page
    assert "`docs/" not in page


def test_menu_has_every_page_once(pages):
    """`mkdocs build --strict` says so too, where mkdocs is."""
    menu = re.findall(r"^ +- .*?([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} | set(pages)
    commands = {f"reference/cli/{name}.md" for name in COMMANDS}  # put there by the hook
    assert sorted(menu) == sorted(pages - commands)


def test_documented_tables_are_complete():
    pages = {page.stem: page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md")}
    flags = [option.flag for option in declared_options(TARGETS["onnxruntime"])]
    tables = {"preprocessing": PRESETS, "methods": SEARCHES, "onnxruntime": flags}
    for page, names in tables.items():
        rows = "\n".join(line for line in pages[page].splitlines() if line.startswith("| `"))
        missing = [name for name in names if f"`{name}" not in rows]
        assert not missing, f"docs/**/{page}.md has no row of {missing}"


def test_home_page_links_every_tutorial():
    home = (ROOT / "docs" / "index.md").read_text("utf-8")
    (commands,) = re.findall(r"^```sh\n(.*?)^```", home, re.DOTALL | re.MULTILINE)
    assert len(commands.splitlines()) == 3
    links = re.findall(r"^- \*\*\[.+?\]\((.+?)\)\*\*$", home, re.MULTILINE)
    assert sorted(links) == sorted(f"tutorials/{name}.md" for name in TUTORIALS)
    # a card's text with a deeper indent would be a code block
    assert not re.search(r"^ {5,}\S", home, re.MULTILINE)


def test_links_exist_on_site_and_github():
    """A page that the hook makes (`site_pages`) is no file, so a link to it is broken on GitHub."""
    for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page}: {link}"


def public_names_of(module) -> set[str]:
    return {name for name in dir(module) if not name.startswith("__")}
