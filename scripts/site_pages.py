"""The pages of the site that are made from the code: commands, names, report.json, changelog.

`mkdocs.yml` names this file as a hook: the pages exist while mkdocs builds, and in no checkout.
A command needs nothing but its row in `COMMANDS` to have its page; a public name, its row in
`calib8`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import calib8
from deploy.cli import COMMANDS, cli
from deploy.commands.base import section_of, section_position

ROOT = Path(__file__).resolve().parents[1]
# pages that are a file of the checkout, whose links to docs/ are links between pages here
INDEX = "reference/cli/index.md"
TAKEN = {"changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}


def pages() -> dict[str, str]:
    """Path below docs/ -> Markdown."""
    if str(ROOT) not in sys.path:  # mkdocs runs this file alone
        sys.path.append(str(ROOT))
    from scripts import report_schema

    found = {f"reference/cli/{name}.md": _command_page(name) for name in COMMANDS}
    taken = {path: _linked((ROOT / source).read_text("utf-8")) for path, source in TAKEN.items()}
    report = {"reference/report.md": report_schema.page()}
    return {INDEX: _command_list(), "reference/api.md": _names()} | report | found | taken


def on_files(files: Any, config: Any) -> Any:
    """Hand the pages to mkdocs; those of single commands hang below "Commands" in its menu."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    _put_below(config["nav"], [{name: f"reference/cli/{name}.md"} for name in COMMANDS])
    return files


def _put_below(nav: list[Any], entries: list[dict[str, str]]) -> None:
    """Hang entries below that of the list of commands, wherever in the menu it stands."""
    for entry in nav:
        for name, below in entry.items() if isinstance(entry, dict) else ():
            if below == INDEX:
                entry[name] = [below, *entries]
            elif isinstance(below, list):
                _put_below(below, entries)


def _command_list() -> str:
    rows = [f"| [`{name}`]({name}.md) | {what} |" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "# Commands\n",
            "Each page has the text of `calib8 COMMAND --help-all`, with every option. Exit codes"
            " are in [What int8 loses](../../accuracy.md#the-verdict).\n",
            "| command | |",
            "| --- | --- |",
            *rows,
        ]
    )


def _command_page(name: str) -> str:
    context = click.Context(cli, info_name="calib8", **cli.context_settings)
    command = cli.get_command(context, name)
    assert command is not None
    return "\n\n".join(_told(command, click.Context(command, context, name), 1))


def _told(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    """Heading, usage, help and options of a command, then the same of those below it."""
    yield f"{'#' * level} {context.command_path}"
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{context.command_path} {usage}\n```"
    yield _prose(inspect.cleandoc(command.help or ""))
    sections: dict[str, list[str]] = {}
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None and isinstance(param, click.Option):
            sections.setdefault(section_of(param), []).append(_option(*record))
    for title in sorted(sections, key=section_position):
        if len(sections) > 1:
            yield f"{'#' * (level + 1)} {title}"
        yield "\n\n".join(sections[title])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _told(below, click.Context(below, context, name), level + 1)


def _option(flags: str, meaning: str) -> str:
    """An entry of a definition list."""
    return f"`{flags}`\n:   {_escaped(' '.join(meaning.split()))}"


def _prose(text: str) -> str:
    r"""Paragraphs of a help text; one that keeps its lines (click's \b) becomes a code block."""
    told = []
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith("\b"):
            told.append(_escaped(paragraph))
            continue
        head, *lines = paragraph.removeprefix("\b").strip("\n").splitlines()
        told.append(f"{_escaped(head)}\n\n```text\n{inspect.cleandoc(chr(10).join(lines))}\n```")
    return "\n\n".join(told)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]])", r"\\\1", text).replace("<", "&lt;")


def _names() -> str:
    """Every public name, by the module that it comes from, for mkdocstrings.

    Of a class only the fields and `of` are for users (`mkdocs.yml`), of the report some methods.
    The signature of a target would repeat its command line.
    """
    told = ["# Python"]
    for module in (calib8, calib8.torch, calib8.cache, calib8.ascend):
        told.append(f"## {module.__name__}")
        for name, path in _entries(module):
            options = []
            if name == "Report":
                options = [f"members: {_REPORT_MEMBERS}", f"inherited_members: {_REPORT_MEMBERS}"]
            if not path.endswith(name):
                options.append(f"heading: {name}")
            if name in _TARGETS:
                options.append("show_signature: false")
            lines = "".join(f"\n      {option}" for option in options)
            told.append(f"::: {path}" + (f"\n    options:{lines}" if options else ""))
    told.append(f"`calib8.TARGETS` has the targets by name: {', '.join(calib8.TARGETS)}.")
    return "\n\n".join(told)


_REPORT_MEMBERS = "[engine, failed, unusable, rows]"
_TARGETS = {target.__name__ for target in calib8.TARGETS.values()}


def _entries(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(name, path for mkdocstrings) of the functions and classes of a public module."""
    if module is calib8.torch:  # by its table, as an import would need torch
        for name, path in module._IMPORT_PATHS.items():
            yield name, path.replace(":", ".")
    elif module is calib8:
        for name in module._IMPORT_PATHS:
            value = getattr(module, name)
            if callable(value):
                yield name, f"{value.__module__}.{name}"
    else:
        for name in module.__all__:
            yield name, f"{module.__name__}.{name}"


def _linked(text: str) -> str:
    """`docs/x.md` of a file of the checkout, or a link to it, as a link to that page."""
    return re.sub(r"`docs/([\w/-]+\.md)`", r"[\1](\1)", text.replace("](docs/", "]("))
