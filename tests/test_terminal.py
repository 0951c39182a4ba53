"""What a terminal is shown: nothing from a file steers it."""

import ast
import io
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from deploy.errors import Calib8Error
from deploy.terminal import page, say, say_lines, visible

ROOT = Path(__file__).parent.parent
HOSTILE = "a\x1b[31m\x07\x9b1m\u202e\u2066\rb\nVerdict  good\x00\u2028c"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é 漢", "plain é 漢"), ("\x1b[2J", "\\x1b[2J"), ("a\nb\r", "a\\nb\\r"),
     ("\u202egnp.x", "\\u202egnp.x"), ("\x9b", "\\x9b"), ("\U000e0041", "\\U000e0041"),
     (os.fsdecode(b"a\xff"), "a\\xff"), ("\ud800", "\\ud800"), ("\t", "\\t")],
)  # fmt: skip
def test_what_steers_a_terminal_is_written_out(text, shown):
    assert visible(text) == shown and shown.isprintable()


def test_a_long_message_keeps_its_beginning_and_its_end():
    """The beginning says what is wrong, the end what to do."""
    longest = "a" * 3100 + "b" * 900
    assert str(Calib8Error(longest)) == longest
    assert (
        str(Calib8Error(f"{longest[:3100]}?{longest[3100:]}")) == "a" * 3100 + " ... " + "b" * 900
    )


def test_a_line_is_one_line_and_lines_end_once(capsys):
    say("a\nb")
    say("c", err=True)
    say_lines(page(["d\ne", "f"]))
    say_lines("g\x1b\n\nh\n")
    out, err = capsys.readouterr()
    assert out == "a\\nb\nd\\ne\nf\ng\\x1b\n\nh\n" and err == "c\n"


def test_what_an_encoding_cannot_hold_is_written_out(monkeypatch):
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="latin-1"))
    say("é漢")
    sys.stdout.flush()
    assert held.getvalue() == b"\xe9\\u6f22\n"


def printers(module):
    prints = {"click.echo", "click.secho", "print", "sys.stdout.write", "sys.stderr.write"}
    ends = {words.rpartition(".")[2] for words in prints}
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in ends and ast.unparse(node) in prints:
            yield f"{name} in line {node.lineno}"


@pytest.mark.slow
def test_everything_is_printed_by_one_module():
    found = {
        str(path.relative_to(ROOT)): list(printers(path))
        for path in (ROOT / "deploy").rglob("*.py")
        if path.name not in {"terminal.py", "openvino.py"}  # which tells its parent process
    }
    assert not any(found.values()), {name: calls for name, calls in found.items() if calls}


@pytest.fixture
def said(run):
    """Everything that a command prints, which must be lines of printable characters."""

    def call(*words):
        code, out, err = run(*words)
        assert all(line.isprintable() for line in (out + err).split("\n")), (words, out, err)
        assert not any(line.startswith("Verdict  good") for line in out.split("\n")), words
        return code, out, err

    return call


def named(model, folder):
    """The model with a tensor, a node and an input of a hostile name, in a file of one."""
    tensor = HOSTILE.replace("\x00", "")
    for node in model.graph.node:
        node.input[:] = [tensor if name == "r2" else name for name in node.input]
        node.output[:] = [tensor if name == "r2" else name for name in node.output]
        node.name = f"{node.name}{tensor}"
    path = folder / f"m{tensor}.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def hostile(small_cnn, tmp_path):
    return named(onnx.load(small_cnn), tmp_path)


def test_names_in_a_model_steer_no_command(hostile, pictures, said, tmp_path):
    feed = ("--images", pictures, "--size", "16x16", "--limit", 4)
    out = tmp_path / f"o{HOSTILE[:5]}"
    targets = ("--target", "onnxruntime,ascend")
    quick = ("--duration", 0, "--effort", 0, "--accept")
    assert said("build", hostile, *feed, *targets, *quick, "--out", out, "--verbose")[0] == 0
    engine = next(out.glob("*.int8.onnx"))
    assert said("inspect", hostile, "--all")[0] == 0
    assert said("explain", out, "--all")[0] == 0
    assert said("compare", hostile, engine, *feed)[0] == 0
    assert said("bench", hostile, "--against", engine, "--duration", 0, "--warmup", 0)[0] == 0
    assert said("ascend", "config", hostile, "-o", out / "q.json")[0] == 0
    for file in out.iterdir():
        said("ascend", "check", file, "--model", hostile)


def test_names_in_a_cache_steer_no_command(small_cnn, said, tmp_path):
    name = HOSTILE.replace("\n", "").replace("\x00", "")
    for number, bits in enumerate(("3c010a14", "3c010a15")):
        text = f"TRT-8503-EntropyCalibration2\n{name}: {bits}\nNaN{name}: 7fc00000\n"
        (tmp_path / f"{number}.cache").write_text(text, newline="")
    a, b = tmp_path / "0.cache", tmp_path / "1.cache"
    assert "\\x1b[31m" in said("cache", "show", a)[1]
    assert "\\x1b[31m" in said("cache", "diff", a, b)[1]
    assert "\\x1b[31m" in said("inspect", a)[1]
    said("cache", "check", a, "--model", small_cnn, "--verbose")
    assert "\\x1b[31m" in said("cache", "merge", a, b, "-o", tmp_path / "c")[2]


def test_labels_and_lists_steer_nothing(small_cnn, pictures, said, tmp_path):
    listing = tmp_path / "l.txt"
    listing.write_bytes(HOSTILE.replace("\x00", "").encode())
    assert said("build", small_cnn, "--images", listing, "--out", tmp_path / "o")[0] == 1
    np.savez(tmp_path / "x.npz", **{f"x{HOSTILE[:5]}": np.zeros(3), "y\x1b": np.zeros(3)})
    assert said("build", small_cnn, "--images", tmp_path / "x.npz", "--out", tmp_path / "o")[0]
