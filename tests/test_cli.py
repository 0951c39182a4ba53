import subprocess
import sys
from pathlib import Path

import click
import pytest

from deploy import __version__
from deploy.cli import COMMANDS, cli, main
from deploy.errors import ConfigError

ROOT = Path(__file__).parent.parent


def test_help_lists_every_command_without_importing_one():
    code = """
import sys; from deploy.cli import main
try: main(["--help"])
except SystemExit: pass
print([m for m in sys.modules if m.startswith("deploy.commands.")], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, (_, summary) in COMMANDS.items():
        assert f"  {name} " in done.stdout and summary.split()[0] in done.stdout
    assert done.stderr.strip() == "[]"


def test_the_help_of_every_command_is_whole_and_loads_nothing_heavy():
    code = """
import sys; from deploy.cli import COMMANDS, main
for name in COMMANDS:
    try: main([name, "--help"])
    except SystemExit as stop: assert not stop.code
    loaded = {"numpy", "onnx", "onnxruntime", "cv2", "torch", "tensorrt"} & sys.modules.keys()
    assert not loaded, (name, loaded)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"Usage: calib8 {name} " in done.stdout
        assert cli.get_command(click.Context(cli), name).help
    assert "\\b" not in done.stdout and "\b" not in done.stdout  # click's mark for kept lines


def test_an_unknown_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["biuld"])
    assert stop.value.code == 2 and "No such command 'biuld'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [(ConfigError("a rule, what was got"), 1, "calib8: error: a rule, what was got\n"),
     (KeyboardInterrupt(), 130, "calib8: interrupted"),
     (click.Abort(), 130, "calib8: interrupted"),
     (click.UsageError("no"), 2, "calib8: error: no\n"),
     (MemoryError(), 1, "calib8: error: memory did not suffice; use fewer --threads"),
     (PermissionError(13, "Permission denied", "/x"), 1, "refused /x: Permission denied; see to"),
     (BrokenPipeError(), 1, ""),
     (ModuleNotFoundError("no", name="onnx.helper"), 1, "needs the package onnx, which is not"),
     (ModuleNotFoundError("no", name="deploy.gone"), 70, "a fault of calib8 itself")],
)  # fmt: skip
def test_failures_are_one_sentence_and_a_code(error, code, words, monkeypatch, capsys):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == code
    assert words in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_screen_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "deploy", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("module", ["deploy", "calib8"])
def test_python_dash_m_is_calib8(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"calib8, version {__version__}\ncounting: ")


def documented() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text("utf-8").replace("\\\n", "") for page in pages)
    lines = [line.strip().removeprefix("$ ") for line in text.splitlines()]
    return [line.partition(" #")[0].strip() for line in lines if line.startswith("calib8 ")]


def unknown(line: str) -> set[str]:
    """Words of a command line that name no command or option."""
    words = line.split()[1:]
    command: click.Command | None = cli
    while isinstance(command, click.Group):
        context = click.Context(command)
        if not words or words[0] not in command.list_commands(context):
            return set(words[:1]) or {"no command"}
        command = command.get_command(context, words.pop(0))
    assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    return {word.partition("=")[0] for word in words if word[:1] == "-"} - known - {"--help"}


def test_documented_commands_and_options_exist():
    lines = documented()
    assert len(lines) > 100
    assert not {line: words for line in lines if (words := unknown(line))}


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_inspect_judges_a_model_by_every_target(small_cnn, target, capsys):
    main(["inspect", str(small_cnn), "--target", target, "--all"])
    said = capsys.readouterr().out
    word = "uint8" if target == "onnxruntime" else "int8 "
    assert "tensors need a scale" in said and f"{word} Conv" in said
