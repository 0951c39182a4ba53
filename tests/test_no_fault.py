"""No file, folder or screen makes a fault of calib8 itself: one sentence and its own exit code."""

import io
import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

from deploy.calibration import store
from deploy.files.manifest import sha256
from scripts import house

ROOT = Path(__file__).parent.parent


@pytest.fixture
def kept(run, small_cnn, pictures, tmp_path):
    """A calibration, and how to make it again."""
    words = ("calibrate", small_cnn, "--images", pictures, "--size", "16x16", "--limit", 4)
    assert run(*words, "-o", tmp_path / "c")[0] == 0
    return tmp_path / "c", (*words, "-o", tmp_path / "c")


def fitting(cache, statistics, **changes):
    """Write statistics and changes of the JSON with all digests as they should be."""
    note, packed = store.sidecars(cache)
    packed.write_bytes(statistics)
    document = {**json.loads(note.read_text()), **changes}
    document["sha256"] = {**document["sha256"], "statistics": sha256(statistics)}
    note.write_bytes(store.sealed(document))


def stored(*members):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return held.getvalue()


def npy(array):
    held = io.BytesIO()
    np.save(held, array)
    return held.getvalue()


def mutated(data, seed):
    rng, data = random.Random(seed), bytearray(data)
    for _ in range(rng.choice([1, 3, 20])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])


@pytest.mark.slow
def test_damaged_statistics_of_fitting_digests_are_made_again(kept, run):
    cache, words = kept
    whole = [path.read_bytes() for path in (cache, *store.sidecars(cache))]
    inf = npy(np.array([np.inf, np.nan, -np.inf, 1e308]))
    huge = npy(np.array([2**63 - 1, -(2**63)]))
    fields = [("0.counts.npy", npy(np.zeros(4097, np.int64))), ("0.reals.npy", inf),
              ("0.wholes.npy", huge)]  # fmt: skip
    forged = [
        b"",
        b"PK\5\6" + bytes(18),
        stored(),
        stored(*fields),
        stored(("0.npy", b"")),
        stored(("0.counts.npy", npy(np.array(["a"])))),
        stored(*fields[:2]),
    ]
    forged += [
        stored(*((name, inf) for name, _ in fields)),
        stored(("0.reals.npy", bytes(1 << 20))),
    ]
    for number, data in enumerate([*forged, *(mutated(whole[2], seed) for seed in range(40))]):
        fitting(cache, data)
        code, out, error = run(*words)
        assert code == 0, (number, error)
        assert [p.read_bytes() for p in (cache, *store.sidecars(cache))] == whole or "reused" in out


@pytest.mark.parametrize(
    "changes",
    [{"observations": [["a", "b", ["c"]]]}, {"observations": [[3, {}, None]] * 9},
     {"observations": []}, {"fingerprint": []}, {"fingerprint": {"model": {}}}, {"schema": [[]]},
     {"more": [[[[]]]]}],
)  # fmt: skip
def test_a_forged_fingerprint_is_no_fault(changes, kept, run):
    cache, words = kept
    fitting(cache, store.sidecars(cache)[1].read_bytes(), **changes)
    assert run(*words)[0] == 0
    run("inspect", cache)


@pytest.mark.parametrize(
    "text", ["[]", "3", '{"sha256": ["cache", "statistics", "this"]}', "[" * 10**6, "\xff", "",
             '{"fingerprint": 1, "schema": 3, "sha256": ["cache", "statistics", "this"],'
             ' "observations": []}', '{"fingerprint":' * 500, "1" * 5000],
)  # fmt: skip
def test_what_stands_beside_a_cache_is_no_fault(text, kept, run):
    cache, words = kept
    store.sidecars(cache)[0].write_text(text, encoding="latin-1")
    assert run(*words)[0] == 0
    store.sidecars(cache)[0].write_text(text, encoding="latin-1")
    run("inspect", cache)


@pytest.mark.parametrize("name", ["c", "c.json", "c.npz"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_pipe_in_place_of_a_cache_is_not_waited_for(name, kind, kept, run):
    cache, words = kept
    path = cache.parent / name
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    code, _, error = run(*words)
    assert code == 1 and "must be a file to write to" in error
    assert run("inspect", cache)[0] == (0 if name != "c" else 1)
    assert run(*words, "--require-cache")[0] == 1


@pytest.mark.slow
def test_a_folder_that_may_not_be_looked_into_is_a_sentence(
    small_cnn, pictures, tmp_path, tmp_path_factory
):
    base = tmp_path_factory.getbasetemp()
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "m.onnx").write_bytes(small_cnn.read_bytes())
    feed = ["--images", str(pictures), "--size", "16x16"]
    tries = [
        ["build", closed / "m.onnx", *feed],
        ["build", small_cnn, *feed, "--out", closed / "o"],
        ["calibrate", small_cnn, *feed, "-o", closed / "c"],
        ["build", small_cnn, "--images", closed],
        ["build", small_cnn, "--images", closed / "list.txt"],
        ["build", small_cnn, *feed, "--eval-images", str(pictures), "--labels", closed / "l.json"],
        ["build", small_cnn, *feed, "--plan", closed / "p.toml"],
        ["build", small_cnn, *feed, "--metric", f"{closed}/f.py:f"],
        ["explain", closed], ["verify", closed / "o"], ["inspect", closed / "x.cache"],
        ["cache", "show", closed / "c"], ["ascend", "check", closed / "r"],
    ]  # fmt: skip
    # What is imported late is imported before the process is nobody's, who may read no library.
    code = (
        "import importlib, os, sys\n"
        "import deploy.terminal\n"
        "deploy.terminal.TICK_S = 1e6\n"
        "from deploy.cli import main\n"
        "def call(words):\n"
        "    try: main(words)\n"
        "    except SystemExit as stop: return stop.code\n"
        "for name in eval(sys.argv[3]): importlib.import_module(name)\n"
        "good, *tries = eval(sys.argv[2])\n"
        "assert not call(good)\n"
        "os.chmod(sys.argv[1], 0)\n"
        "try: os.geteuid() or os.seteuid(65534)\n"
        "except PermissionError: sys.exit(77)\n"
        "for words in tries: print('code', call(words), words[0], flush=True)\n"
    )
    good = ["build", small_cnn, *feed, "--out", tmp_path / "o", "--duration", 0, "--effort", 0]
    tries.insert(0, [*good, "--accept"])
    apart = ("deploy.fx", "deploy.standins.torch_on_cpu", "deploy.__")  # which need torch
    modules = [name for name in house.modules(ROOT) if not name.startswith(apart)]
    tries = [[str(word) for word in words] for words in tries]
    for folder in (tmp_path, *tmp_path.parents, pictures, pictures.parent, small_cnn.parent):
        if folder.is_relative_to(base) or folder.name.startswith("pytest-"):
            folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(closed), repr(tries), repr(modules)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    closed.chmod(0o700)
    if done.returncode == 77:
        pytest.skip("root may not become another user here (CAP_SETUID), and may look anywhere")
    codes = [line for line in done.stdout.splitlines() if line.startswith("code")]
    assert len(codes) == len(tries) - 1, done.stdout + done.stderr
    assert all(line.startswith("code 1 ") for line in codes), done.stdout + done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == len(tries) - 1, done.stderr
    assert sum("ermission" in line for line in errors) >= len(errors) - 1, done.stderr  # explain


@pytest.mark.slow
def test_a_screen_that_is_full_is_no_fault(small_cnn):
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "deploy", "inspect", str(small_cnn), "--all"],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
    assert done.returncode == 1 and "No space left" in done.stderr


def test_names_as_long_as_a_protobuf_allows_are_no_fault(small_cnn, pictures, run, tmp_path):
    model = onnx.load(small_cnn)
    for node in model.graph.node:
        node.name = node.name + "n" * 100_000
    onnx.save(model, tmp_path / "m.onnx")
    assert run("inspect", tmp_path / "m.onnx", "--all")[0] == 0
