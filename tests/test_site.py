"""The pages of the site that are made from the code, and its menu."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import click
import pytest

import deploy
from calibrators.searches import SEARCHES
from deploy.cli import COMMANDS, cli
from deploy.feed.preprocess import PRESETS
from deploy.targets import TARGETS
from deploy.targets.options import options_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


def below(command: click.Command, path: str) -> list[tuple[str, click.Command]]:
    """(words of the command line, command) of a command and all below it."""
    found = [(path, command)]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found += below(command.get_command(context, name), f"{path} {name}")
    return found


def test_every_command_has_its_page_with_every_option(made):
    for name in COMMANDS:
        page = made[f"reference/cli/{name}.md"]
        assert f"({name}.md)" in made["reference/cli/index.md"]
        for path, command in below(cli.get_command(click.Context(cli), name), f"calib8 {name}"):
            assert re.search(rf"^#+ {path}$", page, re.MULTILINE)
            for param in command.params:
                if isinstance(param, click.Option) and not param.hidden:
                    row = rf"^`.*{re.escape(param.opts[-1])}\b.*`$"
                    assert re.search(row, page, re.MULTILINE), (path, param.opts)


def test_every_public_name_has_its_entry(made):
    page = made["reference/api.md"]
    for name in deploy.__all__:
        value = getattr(deploy, name)
        assert not callable(value) or f"::: {value.__module__}.{name}" in page, name


def test_the_changelog_links_to_pages(made):
    page = made["changelog.md"]
    assert page.startswith("# Changelog") and "[feeds.md](feeds.md)" in page
    assert "`docs/" not in page


def test_the_menu_has_every_page_once(made):
    """`mkdocs build --strict` says so too, where mkdocs is."""
    menu = re.findall(r"^ +- .*?([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} | set(made)
    commands = {f"reference/cli/{name}.md" for name in COMMANDS}  # put there by the hook
    assert sorted(menu) == sorted(pages - commands)


def test_every_preset_method_and_target_option_is_in_its_table():
    pages = {page.stem: page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md")}
    tables = {"preprocessing": PRESETS, "methods": SEARCHES, "onnxruntime": flags("onnxruntime")}
    for page, names in tables.items():
        rows = [line for line in pages[page].splitlines() if line.startswith("| `")]
        missing = [name for name in names if not any(f"`{name}" in row for row in rows)]
        assert not missing, f"docs/**/{page}.md has no row of {missing}"


def flags(target: str) -> list[str]:
    return [option.flag for option in options_of(TARGETS[target])]


def test_links_between_pages_lead_somewhere(made):
    docs = ROOT / "docs"
    for page in [*docs.rglob("*.md"), ROOT / "README.md"]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text("utf-8")):
            end = (page.parent / link).resolve()
            assert end.exists() or str(end.relative_to(docs)) in made, f"{page}: {link}"
