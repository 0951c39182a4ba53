"""The one door through which bytes of files come in, and archives of arrays."""

import ast
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from deploy.errors import ConfigError, ExportError, FeedError
from deploy.files.reading import (
    MOST_NESTING,
    array_header,
    check_archive,
    from_json,
    guarded,
    is_text,
    nested,
    opened,
    read_array,
    read_bytes,
    read_json,
    read_text,
    refuse,
    refuse_irregular,
)

PLAN = {"what": "a plan", "error": ConfigError}
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("read", [read_bytes, read_text, read_json, refuse_irregular])
@pytest.mark.parametrize(
    ("kind", "said"),
    [("nothing", "nothing there"), ("folder", "got a folder"), ("pipe", "a device or pipe"),
     ("device", "a device or pipe"), ("NUL", "null"), ("long", "name too long")],
)  # fmt: skip
def test_what_is_no_regular_file_is_refused_and_never_waited_for(read, kind, said, tmp_path):
    path = {"device": "/dev/zero", "NUL": "a\0b", "long": "a" * 5000}.get(kind, tmp_path / "x")
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match="must be a plan") as caught:
        read(path, **PLAN)
    assert said in str(caught.value).lower()


def test_a_file_is_read_within_its_budget_whatever_it_claims(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_bytes(path, **PLAN, most=5) == b"12345"
    with pytest.raises(ConfigError, match="a plan of at most 4 B, got 5 B"):
        read_bytes(path, **PLAN, most=4)
    with path.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(ConfigError, match="of at most 64 MiB, got 1024 GiB"):
        read_text(path, **PLAN)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_a_file_that_tells_no_size_keeps_to_its_budget_too():
    assert b"Name" in read_bytes("/proc/self/status", **PLAN)
    with pytest.raises(ConfigError, match="of at most 3 B"):
        read_bytes("/proc/self/status", **PLAN, most=3)


def test_what_was_read_is_an_input_unless_it_is_the_runs_own(tmp_path):
    path, cache = tmp_path / "x", tmp_path / "cache"
    path.write_text("{}")
    cache.write_text("{}")
    with guarded():
        read_json(path, **PLAN)
        read_json(cache, **PLAN, own=True)
        refuse(cache)
        with pytest.raises(ExportError, match="must not be an input"):
            refuse(path)


def test_an_error_of_the_disk_while_reading_is_a_sentence(tmp_path):
    (tmp_path / "x").write_bytes(b"1")
    broken = pytest.raises(ConfigError, match="that can be read, got: Input/output error")
    with broken, opened(tmp_path / "x", **PLAN):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\xed\xa0\x80"])
def test_text_is_utf_8(data, tmp_path):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ConfigError, match="a plan in UTF-8"):
        read_text(tmp_path / "x", **PLAN)
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa")
    assert read_text(tmp_path / "x", **PLAN) == "a"


DEEP = MOST_NESTING + 1


@pytest.mark.parametrize(
    "text",
    ["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, '[{"a":' * DEEP + "}]" * DEEP,
     "[" * 1_000_000, '["\\"",' * DEEP + "1" + "]" * DEEP, "[1," * DEEP + "[],{}" + "]" * DEEP],
)  # fmt: skip
def test_json_that_is_nested_deeper_than_anything_sane_is_refused(text):
    with pytest.raises(ConfigError, match="over 64 brackets in each other"):
        from_json(text, rule="it must be", error=ConfigError)


@pytest.mark.parametrize(
    "value",
    ["[" * 1000, '\\"[' * 1000, [[]] * 1000, {"[": {"{": ["\\", '"[[']}}, 3,
     {str(i): [{"]": i}] for i in range(1000)}],
)  # fmt: skip
def test_brackets_side_by_side_and_in_strings_are_no_nesting(value):
    assert from_json(json.dumps(value), rule="", error=ConfigError) == value


def test_as_deep_as_is_allowed_is_read():
    text = "[" * MOST_NESTING + "]" * MOST_NESTING
    assert not nested(text) and nested(f"[{text}]")


@pytest.mark.parametrize("text", ["", "{", "]" * 1000, "1" * 5000, "nul", '"\\', "[1 2]"])
def test_what_is_no_json_is_one_sentence(text):
    with pytest.raises(ConfigError, match="it must be, got no sound JSON"):
        from_json(text, rule="it must be", error=ConfigError)


def npy(array):
    held = io.BytesIO()
    np.lib.format.write_array(held, array, allow_pickle=True)
    return held.getvalue()


def header(text):
    written = f"{text}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(written).to_bytes(2, "little") + written


@pytest.mark.parametrize(
    "data",
    [header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 9)}") + bytes(99),
     header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}") + bytes(4),
     header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}") + bytes(8),
     npy(np.array([print], object)), b"\x93NUMPY\x09\x00", b"", b"PK"],
)  # fmt: skip
def test_an_array_is_no_larger_than_its_bytes(data):
    with pytest.raises(ValueError):
        read_array(io.BytesIO(data), len(data))


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.eye(3)),
                                   np.zeros((0, 2), np.int8), np.array(3)])  # fmt: skip
def test_arrays_are_read_as_they_were_written(array):
    data = npy(array)
    found = read_array(io.BytesIO(data), len(data))
    assert found.dtype == array.dtype and np.array_equal(found, array)
    assert array_header(io.BytesIO(data), len(data))[0] == array.shape


def archive(entries, size=10, kind=zipfile.ZIP_DEFLATED):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", kind) as made:
        for number in range(entries):
            made.writestr(f"{number}.npy", bytes(size))
    held.seek(0)
    return held


def test_a_bomb_is_refused_before_it_is_unpacked():
    file = archive(3, size=1 << 20)
    assert len(file.getvalue()) < 10_000
    with pytest.raises(FeedError, match=r"x must be arrays of .* got 3 and 3 MiB"):
        check_archive(file, "x", what="arrays", error=FeedError, most=3 << 20 - 1)
    with pytest.raises(FeedError, match="at most 2 entries"):
        check_archive(file, "x", what="arrays", error=FeedError, entries=2)
    check_archive(file, "x", what="arrays", error=FeedError)
    assert file.tell() == 0


def test_a_table_of_contents_of_gigabytes_is_not_looked_at(monkeypatch):
    file = archive(3)
    monkeypatch.setattr("deploy.files.reading._MOST_LISTING", 100)
    monkeypatch.setattr("zipfile.ZipFile", None)
    with pytest.raises(FeedError, match="of names alone"):
        check_archive(file, "x", what="arrays", error=FeedError)


def test_a_path_that_is_no_text_is_told_from_one_that_is():
    assert is_text("a/b") and is_text(Path("é")) and not is_text(os.fsdecode(b"a\xff"))
    code = "import os; from deploy.files.reading import is_text;"
    code += " print(is_text(os.fsdecode(b'\\xc3\\xa9')))"
    for encoding, right in (("C", "False"), ("C.UTF-8", "True")):
        own = {**os.environ, "LC_ALL": encoding, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=own, capture_output=True, text=True, cwd=ROOT
        )
        assert done.stdout.strip() == right, done.stderr


# Where bytes of files come in by another door, and why: what the program made itself, the system's
# own, and the decoder's file (`deploy.feed.images`), which keeps its own rules.
ELSEWHERE = {
    "deploy.cli": "where what stdout did not take goes",
    "deploy.feed.array_files": "maps of what was opened, and of its own temporary files",
    "deploy.feed.images": "pictures",
    "deploy.files.atomic": "descriptors of what it writes, and those that hold locks",
    "deploy.machine": "the system's description of the processor",
    "deploy.runtimes.openvino": "its own temporary files, in its own process",
    "deploy.analysis.comparison": "its own temporary files",
    "deploy.pipeline.judge": "what was built a moment ago",
    "deploy.runtimes.ort": "ONNX Runtime's trace in a temporary folder",
    "deploy.files.reading": "the door itself",
    "deploy.pipeline.results": "what was built a moment ago",
    "deploy.files.staging": "its own files, as it moves them",
    "deploy.standins.memory": "the memory of this very process",
    "deploy.targets.tensorrt.engines": "what was built a moment ago",
}
DOORS = {"read_bytes", "read_text", "fromfile", "memmap"}
OPENED = {"np.load", "np.memmap", "onnx.load", "torch.load", "os.open", "io.open", "path.open"}
ENDS = DOORS | {"open", "load", "memmap"}


def doors(module):
    """Calls in a module that open files by themselves."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            last = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            called = ast.unparse(node.func) if last in ENDS else ""
            method = called.rpartition(".")[2] if "." in called else ""
            opens = called == "open" or called in OPENED
            if method in DOORS or opens:
                yield f"{called} in line {node.lineno}"


@pytest.mark.slow
def test_files_are_read_through_one_door():
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): list(doors(path))
        for path in (ROOT / "deploy").rglob("*.py")
    }
    found = {name: calls for name, calls in found.items() if calls}
    by = {"deploy.fx.source": 1}  # torch.load of a file that was opened
    wrong = {n: c for n, c in found.items() if n not in ELSEWHERE and len(c) > by.get(n, 0)}
    assert not wrong, f"read with deploy.files.reading: {wrong}"
    assert set(ELSEWHERE) <= set(found), f"excepted for nothing: {set(ELSEWHERE) - set(found)}"


@pytest.mark.parametrize("header", [b"{'descr': '<f4', (", b'{\'descr\': """', b"{" * 60, b"\\"])
def test_a_damaged_header_of_an_array_is_no_fault(header, tmp_path):
    padded = header.ljust(118) + b"\n"
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded)
    with path.open("rb") as stream, pytest.raises(ValueError):
        array_header(stream, 1 << 20)
