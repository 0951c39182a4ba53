"""What reaches a terminal: escaped names, whole lines, one module that prints."""

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnx
import pytest

from deploy import terminal
from deploy.errors import Calib8Error
from tests.models import make_node, rename_tensor, save_net

ROOT = Path(__file__).parent.parent


@pytest.fixture
def model_and_images(small_cnn, pictures):
    """A model and a few of its pictures."""
    return (small_cnn, "--images", pictures, "--size", "16x16", "--limit", 4)


@pytest.mark.slow
def test_closed_stdout_ends_without_message(small_cnn):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "deploy", "inspect", str(small_cnn), "--json", "-"]
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert process.returncode == 1
    for line in process.stderr.splitlines():
        assert line.startswith(b"calib8: working: ")  # as it may on a busy machine


HOSTILE = "a\x1b[31m\x07\x9b1m\u202e\u2066\rb\nVerdict  good\x00\u2028c"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢", "plain é 漢"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\r", "a\\nb\\r"),
        ("\u202egnp.x", "\\u202egnp.x"),
        ("\x9b", "\\x9b"),
        ("\U000e0041", "\\U000e0041"),
        (os.fsdecode(b"a\xff"), "a\\xff"),
        ("\ud800", "\\ud800"),
        ("\t", "\\t"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert terminal.visible(text) == shown
    assert shown.isprintable()


def test_long_message_keeps_beginning_and_end():
    """The beginning says what is wrong, the end what to do."""
    beginning = "a" * 3100
    end = "b" * 900
    assert str(Calib8Error(beginning + end)) == beginning + end
    assert str(Calib8Error(f"{beginning}?{end}")) == f"{beginning} ... {end}"


def test_printed_lines_end_once(capsys):
    terminal.say("a\nb")
    terminal.say("c", err=True)
    terminal.say_lines(terminal.join_visible(["d\ne", "f"]))
    terminal.say_lines("g\x1b\n\nh\n")
    out, err = capsys.readouterr()
    assert out == "a\\nb\nd\\ne\nf\ng\\x1b\n\nh\n"
    assert err == "c\n"


SCREEN = (
    "a title\n\nVerdict       net: good: 9 dB\n              b: unusable: x\x1b[0m\nSize     1 B\n"
)


@pytest.mark.parametrize(
    ("variables", "is_colored"),
    [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({}, False)],
)
def test_colors_follow_the_environment(variables, is_colored, monkeypatch, capsys):
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal.say_screen(SCREEN)
    text = capsys.readouterr().out
    plain = SCREEN.replace("\x1b", "\\x1b")
    assert click.unstyle(text) == plain
    assert (text != plain) == is_colored
    for level, color in (("good", "green"), ("unusable", "red")):
        assert (click.style(level, fg=color, bold=True) in text) == is_colored


def test_unencodable_characters_are_escaped(monkeypatch):
    stream_bytes = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream_bytes, encoding="latin-1"))
    terminal.say("é漢")
    sys.stdout.flush()
    assert stream_bytes.getvalue() == b"\xe9\\u6f22\n"


def printing_calls(module):
    prints = {"click.echo", "click.secho", "print", "sys.stdout.write", "sys.stderr.write"}
    function_names = {call.rpartition(".")[2] for call in prints}
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in function_names and ast.unparse(node) in prints:
            yield f"{name} in line {node.lineno}"


@pytest.mark.slow
def test_only_terminal_module_prints():
    for path in (ROOT / "deploy").rglob("*.py"):
        module = str(path.relative_to(ROOT))
        assert module == "deploy/terminal.py" or not list(printing_calls(path)), module


@pytest.fixture
def safe_output(run):
    """(arguments) -> exit code, stdout and stderr, checked to be printable lines."""

    def call(*arguments):
        code, out, err = run(*arguments)
        assert all(line.isprintable() for line in (out + err).split("\n")), (arguments, out, err)
        assert not any(line.startswith("Verdict  good") for line in out.split("\n")), arguments
        return code, out, err

    return call


@pytest.fixture
def hostile(small_cnn, tmp_path):
    """The small model with hostile names of a tensor, of nodes and of its file."""
    model = onnx.load(small_cnn)
    tensor = HOSTILE.replace("\x00", "")
    rename_tensor(model, "r2", tensor)
    for node in model.graph.node:
        node.name = f"{node.name}{tensor}"
    return save_net(model, tmp_path / f"m{tensor}.onnx")


@pytest.mark.slow
def test_hostile_model_names_are_escaped(hostile, model_and_images, safe_output, tmp_path):
    out = tmp_path / f"o{HOSTILE[:5]}"
    feed = model_and_images[1:]
    arguments = ("--target", "onnxruntime,ascend", "--duration", 0, "--effort", 0, "--accept")
    assert safe_output("build", hostile, *feed, *arguments, "--out", out, "--verbose")[0] == 0
    engine = next(out.glob("*.int8.onnx"))
    assert safe_output("inspect", hostile, "--all")[0] == 0
    assert safe_output("explain", out, "--all")[0] == 0
    assert safe_output("compare", hostile, engine, *feed)[0] == 0
    assert (
        safe_output("bench", hostile, "--against", engine, "--duration", 0, "--warm-up", 0)[0] == 0
    )
    assert safe_output("ascend", "config", hostile, "-o", out / "q.json")[0] == 0
    for file in out.iterdir():
        safe_output("ascend", "check", file, "--model", hostile)


def test_hostile_cache_names_are_escaped(small_cnn, safe_output, tmp_path):
    name = HOSTILE.replace("\n", "").replace("\x00", "")
    for number, bits in enumerate(("3c010a14", "3c010a15")):
        text = f"TRT-8503-EntropyCalibration2\n{name}: {bits}\nNaN{name}: 7fc00000\n"
        (tmp_path / f"{number}.cache").write_text(text, newline="")
    first_cache, second_cache = tmp_path / "0.cache", tmp_path / "1.cache"
    assert "\\x1b[31m" in safe_output("cache", "show", first_cache)[1]
    assert "\\x1b[31m" in safe_output("cache", "diff", first_cache, second_cache)[1]
    safe_output("cache", "check", first_cache, "--model", small_cnn, "--verbose")


def test_hostile_labels_and_lists_are_escaped(small_cnn, pictures, safe_output, tmp_path):
    listing = tmp_path / "l.txt"
    listing.write_bytes(HOSTILE.replace("\x00", "").encode())
    assert safe_output("build", small_cnn, "--images", listing, "--out", tmp_path / "o")[0] == 1
    np.savez(tmp_path / "x.npz", **{f"x{HOSTILE[:5]}": np.zeros(3), "y\x1b": np.zeros(3)})
    assert safe_output("build", small_cnn, "--images", tmp_path / "x.npz", "--out", tmp_path / "o")[
        0
    ]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("build", "m.onnx", "photos/"), "(photos/); images go after --images (`"),
        (("bench", "m.int8.onnx", "m.onnx"), "(m.onnx); a second model goes after --against (`"),
        (
            ("build", "m.onnx", "--images", "p", "--target", "onnxruntime", "tensorrt"),
            "(tensorrt); several targets are separated by commas (`",
        ),
        (("build", "m.onnx", "--images", ".", "more"), "(more) (`calib8 build --help` tells more)"),
        (("build", "m.onnx", "--images", "my", "p"), "(p); a path with blanks must be quoted (`"),
        (("build", "m.onnx", "--images", "p", "-q", "x"), "(x) (`calib8 build --help`"),
        (("build", "m.onnx", "--images", "p", "a  b"), "(a b) (`calib8 build --help`"),
        (
            ("build", "m.onnx", "--images", ".", "--mean", "0.4", "0.5", "0.6"),
            "(0.5 0.6); several numbers are separated by commas (`",
        ),
        (("verify", "a", "b"), "(b) (`calib8 verify --help` tells more)"),
    ],
)
def test_extra_argument_names_its_option(arguments, advice, run):
    code, _, err = run(*arguments)
    assert code == 2
    assert "Got unexpected extra argument" in err
    assert advice in err


@pytest.mark.parametrize("again", [("--eval-images", "."), ("--eval-images=.",)])
def test_second_folder_of_images_is_refused(again, run, small_cnn):
    code, _, err = run("build", small_cnn, "--images", ".", "--eval-images", ".", *again)
    assert code == 2
    assert "--eval-images takes one path" in err


def test_expanded_pattern_is_advised_to_quote(pictures, run):
    code, _, err = run("build", "m.onnx", "--images", *sorted(pictures.glob("*.png"))[:3])
    assert code == 2
    assert "'photos/*.jpg'" in err


def test_model_for_atc_names_its_substitute(small_cnn, run, pictures, tmp_path):
    model = onnx.load(small_cnn)
    model.graph.node[0].input[0] = "q"
    model.graph.node.insert(0, make_node("AscendQuant", "x", "q", name="q", scale=1.0, offset=0.0))
    onnx.save(model, path := tmp_path / "net_deploy_model.onnx")
    for command in (("build", path, "--images", pictures), ("inspect", path), ("bench", path)):
        err = run.fails(*command)
        assert "its fake-quant model" in err
        assert "only Ascend's atc reads" in err
