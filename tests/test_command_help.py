"""Help, completion and documentation of the commands."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from deploy.cli import COMMANDS, cli, main
from deploy.commands import base
from deploy.feed.preprocess import PRESETS
from deploy.targets import TARGETS
from tests.command_tree import click_options, commands

# Commands whose options come from the tables of targets and searches.
TABLE_COMMANDS = ("build", "calibrate", "inspect", "bench")


def test_help_names_presets_and_number_letters(run):
    from deploy.commands.image_options import PRESET_NAMES

    assert re.split(", | or ", PRESET_NAMES) == list(PRESETS)
    help_text = run("build", "--help-all")[1]
    assert "ppocr-rec" in help_text
    assert "--limit N " in help_text
    assert "--power X " in help_text
    assert not re.search(r"INTEGER|FLOAT|<=None", help_text)


def test_every_option_has_a_help_sentence():
    for path, command in commands():
        for param in click_options(command):
            sentence = param.help.partition("  [default")[0]
            assert re.fullmatch(r"[A-Z].*\.", sentence, re.DOTALL), (path, param.opts[-1])


def test_every_option_is_on_a_page():
    root = Path(__file__).parent.parent
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for path, command in commands():
        for param in click_options(command):
            # an option with a negative form stands there in either form
            flags = [flag for flag in param.opts + param.secondary_opts if flag.startswith("--")]
            assert any(re.search(rf"{flag}(?![\w-])", text) for flag in flags), (path, flags)


@pytest.mark.parametrize("name", TABLE_COMMANDS)
def test_help_sections_follow_the_workflow(name, run):
    command = dict(commands())[name,]
    _, out, _ = run(name, "--help-all" if command.short_help_flags else "--help")
    for param in command.params:
        if isinstance(param, base.SectionOption):
            section = out.split(f"\n{param.section}:\n")[1].split("\n\n")[0]
            assert re.search(rf"^ +(-\w, )?{param.opts[-1]}\b", section, re.MULTILINE), param.opts
    assert "None]" not in out  # a bound that an option lacks
    titles = re.findall(r"^([A-Z][\w ]+):$", out, re.MULTILINE)
    target_titles = [f"Target {target}" for target in TARGETS]
    order = ["Model", "Images", "Calibration", "Cache", "Targets", *target_titles]
    order += ["Measuring", "General"]
    ordered_titles = [title for title in order if title in titles]
    assert [title for title in titles if title in order] == ordered_titles
    assert titles[-1] == "General"


def test_group_without_command_shows_its_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["ascend"])
    assert stop.value.code == 2
    assert "Usage: " in capsys.readouterr().err


ROOT = Path(__file__).parent.parent


# Shows the help of calib8, then of every command, and looks at what was imported for it.
SHOW_EVERY_HELP = """
import sys
from deploy.cli import COMMANDS, main

for arguments in [], *([name] for name in COMMANDS):
    try:
        main([*arguments, "--help"])
    except SystemExit as stop:
        assert not stop.code
    heavy = {"numpy", "onnx", "onnxruntime", "cv2", "torch", "tensorrt"} & sys.modules.keys()
    command_modules = [name for name in sys.modules if name.startswith("deploy.commands.")]
    assert not heavy, (arguments, heavy)
    assert arguments or not command_modules, command_modules
"""


def test_help_imports_no_heavy_library():
    command = [sys.executable, "-c", SHOW_EVERY_HELP]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    for name, (_, summary) in COMMANDS.items():
        assert f"  {name} " in process.stdout
        assert summary.split()[0] in process.stdout
        assert f"Usage: calib8 {name} " in process.stdout
        assert cli.get_command(click.Context(cli), name).help
    assert "\\b" not in process.stdout
    assert "\b" not in process.stdout  # click's mark for kept lines


def documented_lines():
    """Return the commands in code blocks and in code spans of the pages, not lines of prose."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text("utf-8").replace("\\\n", "") for page in pages)
    blocks = re.findall(r"^```.*?^```$", text, re.DOTALL | re.MULTILINE)
    indented_lines = re.findall(r"^    calib8 .*$", text, re.MULTILINE)
    spans = re.findall(r"(?<!`)`(calib8 [^`]+)`", text)
    lines = [*"\n".join(blocks).splitlines(), *indented_lines]
    lines = [line.strip().removeprefix("$ ") for line in lines]
    lines += [" ".join(span.split()) for span in spans]
    return [line.partition(" #")[0].strip() for line in lines if line.startswith("calib8 ")]


def unknown_words(line):
    """Return what in a command line names no command or option."""
    names = line.split()[1:]
    command = cli
    while isinstance(command, click.Group) and names[:1] != ["--version"]:
        context = click.Context(command)
        if not names or names[0] not in command.list_commands(context):
            return set(names[:1]) or {"no command"}
        command = command.get_command(context, names.pop(0))
    known_options = {option for parameter in command.params for option in parameter.opts}
    known_options |= {"--help", "--help-all", "--version"}
    return {word.partition("=")[0] for word in names if word[:1] == "-"} - known_options


def test_documented_commands_and_options_exist():
    lines = documented_lines()
    assert len(lines) > 100
    for line in lines:
        assert not unknown_words(line), line


def names_from(registry, prefix):
    return [name for name in registry if name.startswith(prefix)]


def complete(*arguments, prefix=""):
    shell = ShellComplete(cli, {}, "calib8", "_CALIB8_COMPLETE")
    return [item.value for item in shell.get_completions(list(arguments), prefix)]


def test_completion_of_commands_and_options():
    assert complete(prefix="do") == names_from(COMMANDS, "do")
    assert "--config" in complete("build", prefix="--c")


def test_each_flag_belongs_to_one_option():
    for path, command in commands():
        flags = [flag for option in click_options(command) for flag in option.opts]
        assert len(flags) == len(set(flags)), path


def test_completion_script_for_zsh(monkeypatch, run):
    monkeypatch.setenv("_CALIB8_COMPLETE", "zsh_source")
    assert "#compdef calib8" in run.ok()


def test_long_help_shows_common_options_first(run):
    for path, command in commands():
        options = click_options(command)
        common = getattr(command, "short_help_flags", [])
        assert bool(common) == (len(options) > 16), path
        if not common:
            continue
        short_help = run.ok(*path, "--help")
        full_help = run.ok(*path, "--help-all")
        assert 6 <= len(common) <= 12
        assert short_help.endswith(f"lists all {len(options) + 2} options.\n")
        short_list = short_help.partition("\nOptions:\n")[2]
        assert re.findall(r"^  (?:-\w, )?(--[\w-]+)", short_list, re.MULTILINE) == common
        for option in options:
            assert re.search(rf"^  .*{option.opts[-1]}\b", full_help, re.MULTILINE)
