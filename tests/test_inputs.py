"""No output ever destroys what calib8 did not make; a signal ends a run in order."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy import cli
from deploy.calibration.store import sidecars
from deploy.cli import Terminated
from deploy.errors import ExportError
from deploy.files import atomic
from deploy.files.reading import guarded, is_read, refuse
from deploy.pipeline import build, calibrate

WORDS = {130: "interrupted", 143: "terminated"}
FOREIGN = b"TRT-100300-EntropyCalibration2\nimages: 3c010a14\n"


@pytest.fixture
def run(run):
    def call(*words):
        code, _, err = run(*words)
        return code, err

    return call


@pytest.fixture
def model(small_cnn, tmp_path):
    """A copy that a test may lose."""
    return Path(shutil.copy(small_cnn, tmp_path / "m.onnx"))


@pytest.mark.parametrize("way", ["itself", "hard link", "symbolic link", "other spelling"])
def test_a_calibration_over_its_model_is_refused(way, run, model, pictures, tmp_path):
    before = model.read_bytes()
    output = tmp_path / "other"
    if way == "hard link":
        os.link(model, output)
    elif way == "symbolic link":
        output.symlink_to(model)
    else:
        output = model if way == "itself" else tmp_path / "x" / ".." / "m.onnx"
        (tmp_path / "x").mkdir()
    code, said = run("calibrate", model, "--images", pictures, "-o", output)
    assert code == 1 and "an output must not be an input" in said
    assert model.read_bytes() == before


PLACES = ("model", "photo", "text", "foreign cache", "fifo")


@pytest.mark.parametrize(
    ("command", "what"),
    [("build", "labels"), *((c, what) for c in ("build", "calibrate") for what in PLACES)],
)
def test_a_cache_replaces_nothing_that_calib8_did_not_write(
    command, what, run, model, pictures, tmp_path
):
    photos = tmp_path / "photos"
    shutil.copytree(pictures, photos)
    victims = {"model": model, "photo": next(photos.iterdir())}
    victim = victims.get(what, tmp_path / "victim")
    if what in ("text", "labels", "foreign cache"):
        victim.write_bytes(FOREIGN if what == "foreign cache" else b"3\n" * 20)
    elif what == "fifo":
        os.mkfifo(victim)
    before = None if what == "fifo" else victim.read_bytes()
    words = ["--images", photos]
    words += ["--cache", victim, "--out", tmp_path / "o"] if command == "build" else ["-o", victim]
    words += ["--eval-images", photos, "--labels", victim] if what == "labels" else []
    code, said = run(command, model, *words)
    assert code == 1, said
    assert ("got a device" in said) == (what == "fifo")
    assert ("--force" in said) == (what in ("text", "foreign cache"))
    assert before is None or victim.read_bytes() == before
    assert not list(tmp_path.glob("victim.*"))


def test_arrays_beside_a_cache_of_their_name_are_not_replaced(run, model, tmp_path):
    data = tmp_path / "data.npz"
    np.savez(data, image=np.ones((8, 3, 16, 16), np.float32))
    before = data.read_bytes()
    for words in ((), ("--force",)):  # nothing forces an input
        code, said = run(
            "build", model, "--images", data, "--cache", tmp_path / "data",
            "--out", tmp_path / "o", *words,
        )  # fmt: skip
        assert code == 1 and "an output must not be an input" in said
    assert data.read_bytes() == before


def test_force_replaces_a_foreign_file_and_what_a_crash_left_is_replaced_anyhow(
    run, model, pictures, tmp_path
):
    cache = tmp_path / "c.cache"
    cache.write_bytes(FOREIGN)
    words = ("calibrate", model, "--images", pictures, "-o", cache)
    assert run(*words)[0] == 1
    assert run(*words, "--force")[0] == 0 and cache.read_bytes() != FOREIGN
    whole = cache.read_bytes()
    for lost in ((0,), (1,), (0, 1)):  # killed between the writes of the three files
        files = (cache, *sidecars(cache))
        for place in lost:
            files[(0, 1)[place]].unlink()
        assert run(*words)[0] == 0 and cache.read_bytes() == whole
    cache.write_bytes(b"")  # as mktemp leaves it
    for sidecar in sidecars(cache):
        sidecar.unlink()
    assert run(*words)[0] == 0 and cache.read_bytes() == whole


def test_a_report_does_not_replace_the_model_it_is_of(run, model):
    before = model.read_bytes()
    for words in (("bench", model, "--json", model), ("bench", model, "--html", model)):
        code, said = run(*words, "--duration", 0, "--warmup", 0)
        assert code == 1 and "an output must not be an input" in said
    assert model.read_bytes() == before


def test_permissions_of_the_old_file_stay(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o600)
    atomic.write_text(path, "new")
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == "new"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_device_or_a_folder_is_never_replaced(make, tmp_path):
    path = tmp_path / "a"
    make(path)
    with pytest.raises(ExportError, match="must be a file to write to"):
        atomic.write_text(path, "new")
    with pytest.raises(ExportError, match="/dev/null must be a file to write to, got a device"):
        refuse("/dev/null")


def test_what_stands_in_dev_is_a_device_wherever_it_leads(tmp_path):
    """`-o /dev/stdout > file` leads to a plain file; a rename would put one in the link's place."""
    with (tmp_path / "said").open("w") as file:
        program = "from deploy.files.reading import refuse; refuse('/dev/stdout')"
        root = Path(__file__).parents[1]
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            stdout=file,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert b"/dev/stdout must be a file to write to, got a device" in done.stderr


def test_what_one_run_reads_another_may_write(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    is_read(path)  # in no run
    with guarded():
        is_read(path)
        with guarded(), pytest.raises(ExportError, match="must not be an input"):
            atomic.write_text(path, "new")
    assert atomic.write_text(path, "new").read_text() == "new"


def test_the_functions_of_python_guard_as_the_commands_do(model, pictures, tmp_path):
    before = model.read_bytes()
    with pytest.raises(ExportError, match="must not be an input"):
        calibrate(model, pictures, cache=model)
    with pytest.raises(ExportError, match="must not be an input"):
        build(model, pictures, cache=model, out=tmp_path / "o")
    assert model.read_bytes() == before


@pytest.fixture
def slow(tmp_path):
    """A model and inputs that take tens of seconds."""
    rng = np.random.default_rng(0)
    weights = {
        "sizes": np.float32([1, 1, 4, 4]), "w1": rng.normal(0, 0.1, (128, 3, 3, 3)),
        "w2": rng.normal(0, 0.05, (128, 128, 3, 3)), "w3": rng.normal(0, 0.05, (8, 128, 3, 3)),
    }  # fmt: skip
    same = {"pads": [1, 1, 1, 1]}
    graph = helper.make_graph(
        [
            helper.make_node("Resize", ["x", "", "sizes"], ["r"], name="/r"),
            helper.make_node("Conv", ["r", "w1"], ["a"], name="/a", **same),
            helper.make_node("Conv", ["a", "w2"], ["b"], name="/b", **same),
            helper.make_node("Conv", ["b", "w3"], ["y"], name="/y", **same),
        ],
        "slow",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, tmp_path / "slow.onnx")
    np.save(tmp_path / "x.npy", rng.normal(size=(4000, 3, 16, 16)).astype(np.float32))
    return tmp_path / "slow.onnx", tmp_path / "x.npy"


TELLING = """
from deploy import cli, progress
progress.LASTING_S = progress.TICK_S = progress.EVERY_S = 0.01
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "threads"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)]
)
def test_a_signal_ends_a_run_with_one_sentence_and_nothing_half_written(
    number, code, threads, slow, tmp_path
):
    model, x = slow
    out = tmp_path / "out"
    words = ["build", model, "--images", x, "--out", out, "--threads", threads]
    started = subprocess.Popen(
        [sys.executable, "-c", TELLING, *map(str, words)],
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may ignore it
    )
    said = b""
    try:
        while not re.search(rb"observing: \d+ of", said):
            piece = os.read(started.stderr.fileno(), 1000)
            assert piece, said
            said += piece
        started.send_signal(number)
        _, rest = started.communicate(timeout=300)
    finally:
        started.kill()
    last = (said + rest).decode().strip().splitlines()[-1]
    assert started.returncode == code
    word = "interrupted" if number == signal.SIGINT else "terminated"
    left = out / "slow.cache.checkpoint"
    assert re.fullmatch(
        f"calib8: {word}; nothing half-written was left behind; [0-9,]+ of 4,000 samples are kept"
        f" in {left}: --resume goes on from there",
        last,
    )
    assert list(out.iterdir()) == [left]


@pytest.mark.parametrize(("kind", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
@pytest.mark.parametrize("deep", [1, 2])
def test_a_signal_that_a_library_made_an_error_of_is_a_signal(kind, code, deep, run, monkeypatch):
    def command(**_):
        try:
            try:
                raise kind
            except BaseException as signal:
                raise ImportError("initialization failed") from (signal if deep == 1 else None)
        except ImportError as error:
            raise ValueError("a second one") from error

    monkeypatch.setattr(cli.cli, "main", command)
    assert run() == (code, f"calib8: {WORDS[code]}; nothing half-written was left behind\n")


def test_a_sentence_that_quotes_a_whole_file_has_a_gap_and_still_the_way_out(
    run, model, pictures, tmp_path
):
    (tmp_path / "list.txt").write_text("n" * 30_000 + ".png\n")
    code, said = run("build", model, "--images", tmp_path / "list.txt", "--out", tmp_path / "o")
    assert code == 1 and 3000 < len(said) < 4500
    assert "nnn ... nnn" in said and said.endswith("skip bad ones (--skip-bad)\n")
    code, said = run("build", model, "--images", pictures, "--duration", "1" * 30_000 + "x")
    assert code == 2 and len(said) < 4500 and said.endswith("--help` tells more)\n")


@pytest.mark.parametrize("name", ["labels.txt", "labels.json"])
def test_labels_of_a_pipe_are_not_waited_for(name, run, model, pictures, tmp_path):
    os.mkfifo(tmp_path / name)
    words = ("--images", pictures, "--eval-images", pictures, "--out", tmp_path / "o")
    code, said = run("build", model, *words, "--labels", tmp_path / name)
    assert code == 1 and "a device or pipe" in said


def test_an_input_that_another_run_replaced_hides_no_output(tmp_path):
    read, output, new = (tmp_path / name for name in ("read", "output", "new"))
    read.write_text("old")
    os.link(read, output)
    with guarded():
        is_read(read)
        with pytest.raises(ExportError, match="must not be an input"):
            refuse(output)
        new.write_text("new")
        os.replace(new, read)  # a file made later may get the inode of what stood here
        refuse(output)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.raw"])
@pytest.mark.parametrize("place", ["", "folder"])
def test_arrays_of_a_pipe_are_not_waited_for(name, place, run, model, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / place / name)
    arrays = tmp_path / place if place else tmp_path / name
    code, said = run("calibrate", model, "--images", arrays, "-o", tmp_path / "c.cache")
    assert code == 1 and "a device or pipe" in said


def test_a_label_of_thirty_digits_is_refused(run, model, pictures, tmp_path):
    labels = tmp_path / "labels.txt"
    labels.write_text("1\n" * 19 + f"{10**30}\n")
    words = ("--images", pictures, "--eval-images", pictures, "--out", tmp_path / "o")
    code, said = run("build", model, *words, "--labels", labels)
    assert code == 1 and "line 20" in said


def test_names_of_files_and_tensors_run_nothing_when_a_printed_line_is_pasted(run, model, tmp_path):
    hostile = onnx.load(model)
    for node in hostile.graph.node:
        node.input[:] = ["in;touch Y" if name == "x" else name for name in node.input]
    hostile.graph.input[0].name = "in;touch Y"
    path = tmp_path / "m $(touch X).onnx"
    onnx.save(hostile, path)
    x = tmp_path / "x.npy"
    np.save(x, np.random.default_rng(0).normal(size=(8, 3, 16, 16)).astype(np.float32))
    out = tmp_path / "o"
    words = ("--target", "tensorrt", "--out", out, "--duration", 0, "--effort", 0, "--accept")
    assert run("build", path, "--images", x, *words)[0] == 0
    notes = json.loads((out / "report.json").read_text())["targets"][0]["notes"]
    lines = [note.split(": ", 1)[1] for note in notes if ": trtexec " in note]
    assert len(lines) == 4
    for line in lines:
        (tmp_path / "bin").mkdir(exist_ok=True)
        trtexec = tmp_path / "bin" / "trtexec"
        trtexec.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
        trtexec.chmod(0o755)
        own = {"PATH": f"{trtexec.parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=own, capture_output=True, text=True, check=True
        )
        words = done.stdout.splitlines()
        assert any(word.startswith("--onnx=m $(touch X).tensorrt") for word in words)
        assert "--shapes=in;touch Y:1x3x16x16" in words
    assert not (tmp_path / "X").exists() and not (tmp_path / "Y").exists()


def test_only_the_text_of_tensorrt_minds_a_line_break_in_a_name(run, model, pictures, tmp_path):
    hostile = onnx.load(model)
    for node in hostile.graph.node:
        node.input[:] = ["r\n2" if name == "r2" else name for name in node.input]
        node.output[:] = ["r\n2" if name == "r2" else name for name in node.output]
    onnx.save(hostile, model)
    feed = ("--images", pictures, "--size", "16x16", "--duration", 0, "--effort", 0, "--accept")
    words = ("build", model, *feed, "--out", tmp_path / "o")
    assert run(*words, "--target", "onnxruntime,tensorrt,ascend")[0] == 1
    found = json.loads((tmp_path / "o" / "report.json").read_text())["targets"]
    errors = {target["name"]: target.get("error") for target in found}
    assert "got 'r\\n2'" in errors["tensorrt"]
    assert not errors["onnxruntime"] and not errors["ascend"]
    assert "r3: " in (tmp_path / "o" / "m.cache").read_text()
    assert run(*words, "--target", "onnxruntime,ascend", "--require-cache")[0] == 0
    code, said = run(*words, "--target", "tensorrt", "--out", tmp_path / "p")
    assert code == 1 and "rename the tensor" in said and not list((tmp_path / "p").glob("*.cache"))


def test_a_name_in_a_remedy_is_quoted(run, tmp_path):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["in;touch Y"], ["y"])], "g",
        [value("in;touch Y", TensorProto.FLOAT, [1, "h"])], [value("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    code, said = run("bench", tmp_path / "m.onnx", "--duration", 0)
    assert code == 1 and "--shape 'in;touch Y:1x224'" in said
