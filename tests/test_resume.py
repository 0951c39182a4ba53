"""A calibration in parts: checkpoints that go on, shards that are merged, to the same bytes."""

import gc
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib8 import calibrate, merge
from calibrators.statistics import HistogramOf
from deploy import signals
from deploy.calibration import checkpoint, shards
from deploy.calibration.checkpoint import Checkpoint, checkpoint_path
from deploy.calibration.shards import write_shard
from deploy.calibration.store import cache_files
from deploy.calibration.taps import VariantRunner
from deploy.cli import main
from deploy.errors import CacheError, ConfigError, ExportError
from deploy.feed.parallel import _OrderedRun
from deploy.feed.sampling import Choice, create_share
from tests.models import save_fixed_batch, save_net

HFMG_CONFIG = "batch_num: 3\ncommon_config { hfmg_quantize { num_of_bins: 1024 } }\n"
DMQ_CONFIG = (
    "batch_num: 16\ncommon_config { ifmr_quantize {} dmq_balancer { migration_strength: 0.5 } }\n"
)
TENSORRT_OPTIONS = ("--target", "tensorrt", "--method", "entropy-tensorrt", "--batch-size")
RUN_OPTIONS = {  # name -> (threads, *options)
    "histograms": (3, "--target", "onnxruntime,tensorrt", "--trt-version", "8.6.1"),
    "first batch": (2, *TENSORRT_OPTIONS, 3),
    "ifmr": (3, "--target", "ascend,onnxruntime"),
    "hfmg": (2, "--target", "ascend", "--amct-batch", 4, "--ascend-config", HFMG_CONFIG),
    "dmq": (1, "--target", "ascend", "--ascend-config", DMQ_CONFIG),
    "bad ones": (3, "--skip-bad"),
}


class KilledError(BaseException):
    """The process is gone."""


@pytest.fixture(scope="module")
def odd_pictures(pictures, tmp_path_factory):
    """20 pictures, 05.png far brighter than the rest."""
    folder = shutil.copytree(pictures, tmp_path_factory.mktemp("odd") / "pictures")
    for path in folder.iterdir():
        cv2.imwrite(str(path), cv2.imread(str(path)) // 12)
    cv2.imwrite(str(folder / "05.png"), np.full((18, 20, 3), 255, np.uint8))
    return folder


@pytest.fixture
def folder(odd_pictures, tmp_path):
    """A copy of the odd pictures that a test may change."""
    return shutil.copytree(odd_pictures, tmp_path / "pictures")


@pytest.fixture
def frequent_checkpoints(monkeypatch):
    """A checkpoint between any two samples."""
    monkeypatch.setattr(checkpoint, "MIN_INTERVAL_S", 0)
    monkeypatch.setattr(checkpoint, "INTERVAL_RATIO", 0)


@pytest.fixture
def run_until_killed(run, frequent_checkpoints, monkeypatch, capfd):
    """(samples, *arguments) -> stderr of a run that dies once a checkpoint has so many samples."""

    def call(samples, *arguments):
        save = Checkpoint.save

        def save_and_kill(self, number, observed):
            save(self, number, observed)
            if number >= samples:
                raise KilledError

        with monkeypatch.context() as patched:
            patched.setattr(Checkpoint, "save", save_and_kill)
            with pytest.raises(KilledError):
                run(*arguments)
        return capfd.readouterr().err

    return call


def signal_at_sample(sample, send, patched):
    """Send a signal while a sample is inferred; this and later ones wait until none is drawn.

    Returns a list that gets the numbers of the samples that ran.
    """
    run_numbers = []
    count = itertools.count(1)
    is_finished = threading.Event()
    run = VariantRunner.run
    finish = _OrderedRun.stop_drawing

    def run_and_signal(self, *args):
        number = next(count)
        run_numbers.append(number)
        if number == sample:
            send()
        assert number < sample or is_finished.wait(300)
        return run(self, *args)

    def finish_and_release(self):
        finish(self)
        is_finished.set()

    patched.setattr(signals, "GRACE_S", 300)  # for which an inference that was begun may last
    patched.setattr(VariantRunner, "run", run_and_signal)
    patched.setattr(_OrderedRun, "stop_drawing", finish_and_release)
    return run_numbers


@pytest.fixture
def run_until_signal(monkeypatch, capfd):
    """(sample, signal, *arguments) -> exit code, lines of stderr and samples run.

    The signal comes while that sample is inferred.
    """

    def call(sample, number, *arguments):
        gc.disable()  # hypothesis has a callback there, in which what a signal raises is lost
        try:
            with monkeypatch.context() as patched, pytest.raises(SystemExit) as stop:
                send = partial(os.kill, os.getpid(), number)
                run_numbers = signal_at_sample(sample, send, patched)
                main([str(argument) for argument in arguments])
        finally:
            gc.enable()
        lines = [line for line in capfd.readouterr().err.splitlines() if line]  # click ends a ^C's
        return stop.value.code, lines, len(run_numbers)

    return call


@pytest.fixture(scope="module")
def checkpoint_bytes(small_cnn, odd_pictures, tmp_path_factory):
    """The checkpoint of a calibration that was ended after some samples."""
    path = tmp_path_factory.mktemp("state") / "c"
    with pytest.MonkeyPatch.context() as patched:
        # to the thread of a worker; the main one acts on it
        signal_at_sample(5, partial(signal.raise_signal, signal.SIGINT), patched)
        with pytest.raises(KeyboardInterrupt, match="--resume goes on from there"):
            calibrate(small_cnn, odd_pictures, checkpoint=path, threads=2)
    return path.read_bytes()


@pytest.fixture
def saved_checkpoint(checkpoint_bytes, tmp_path):
    """The path of that checkpoint, beside the cache of `calibrate_arguments`."""
    path = checkpoint_path(tmp_path / "m.cache")
    path.write_bytes(checkpoint_bytes)
    return path


def contents(cache):
    return [path.read_bytes() for path in cache_files(cache)]


def with_config_file(arguments, folder):
    """Return the arguments with the text of a configuration replaced by a file of it."""
    path = folder / "a.cfg"
    replaced = []
    for argument in arguments:
        is_config = "batch_num" in str(argument)
        if is_config:
            path.write_text(argument)
        replaced.append(path if is_config else argument)
    return replaced


@pytest.fixture
def calibrate_arguments(small_cnn, folder, tmp_path):
    """The command line of a calibration of a copy of the model into m.cache beside it."""
    model = shutil.copy(small_cnn, tmp_path / "small_cnn.onnx")
    return ("calibrate", model, "--images", folder, "-o", tmp_path / "m.cache", "--threads", 2)


def break_three_pictures(folder):
    for name in ("00", "09", "19"):
        (folder / f"{name}.png").write_bytes(b"no picture")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_OPTIONS)
def test_resumed_run_gives_the_same_bytes(name, run, run_until_killed, small_cnn, folder, tmp_path):
    threads, *options = RUN_OPTIONS[name]
    if name == "bad ones":
        break_three_pictures(folder)
    options = with_config_file(options, tmp_path)
    arguments = ["calibrate", small_cnn, "--images", folder, *options, "-q"]
    whole_cache, cache = tmp_path / "whole.cache", tmp_path / "m.cache"
    assert run(*arguments, "-o", whole_cache, "--threads", 2)[0] == 0
    resume_arguments = (*arguments, "-o", cache, "--threads", threads)
    run_until_killed(3, *resume_arguments)
    assert not cache.exists()
    assert checkpoint_path(cache).exists()
    run_until_killed(11, *resume_arguments, "--resume")  # and once more
    assert shards.load_shard(checkpoint_path(cache)).counted >= 11
    assert run(*resume_arguments, "--resume")[0] == 0
    assert contents(cache) == contents(whole_cache)
    assert not checkpoint_path(cache).exists()


@pytest.mark.parametrize("samples", [1, 4, 5])
def test_fixed_and_padded_batches_resume(
    samples, run, run_until_killed, small_cnn, pictures, tmp_path
):
    folder = shutil.copytree(pictures, tmp_path / "pictures")
    model = save_fixed_batch(small_cnn, tmp_path / "four.onnx")
    # 17 pictures remain: 4 batches, and one picture that three of the first ones fill up
    break_three_pictures(folder)
    arguments = ("calibrate", model, "--images", folder, "--skip-bad", "-q", "-o")
    assert run(*arguments, tmp_path / "whole.cache")[0] == 0
    run_until_killed(samples, *arguments, tmp_path / "m.cache")
    assert run(*arguments, tmp_path / "m.cache", "--resume")[0] == 0
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "whole.cache")


def test_shard_resumes_from_its_checkpoint(run, run_until_killed, small_cnn, folder, tmp_path):
    break_three_pictures(folder)
    options = ("--shard", "2/3", "--skip-bad", "-q", "-o")
    arguments = ("calibrate", small_cnn, "--images", folder, *options)
    assert run(*arguments, tmp_path / "whole.shard")[0] == 0
    run_until_killed(2, *arguments, tmp_path / "m.shard")
    checkpoint_file = checkpoint_path(tmp_path / "m.shard")
    err = run.fails("merge", small_cnn, checkpoint_file, "-o", tmp_path / "m.cache")
    assert "m.shard.checkpoint" in err
    assert "--resume" in err
    err = run.fails(*arguments, tmp_path / "m.shard", "--resume", "--shard", "1/3")
    assert "the shard changed (2/3 -> 1/3)" in err
    assert run(*arguments, tmp_path / "m.shard", "--resume")[0] == 0
    assert (tmp_path / "m.shard").read_bytes() == (tmp_path / "whole.shard").read_bytes()
    assert not checkpoint_file.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("threads", [1, 3])
def test_signal_names_checkpoint_and_resume(
    number, code, threads, run, run_until_signal, small_cnn, tmp_path
):
    samples = np.random.default_rng(0).normal(size=(500, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", samples)
    arguments = ("calibrate", small_cnn, "--images", tmp_path / "x.npy", "-q", "--threads", threads)
    exit_code, (message,), run_count = run_until_signal(
        7, number, *arguments, "-o", tmp_path / "m.cache"
    )
    assert exit_code == code
    assert run_count < 7 + threads
    counted = shards.load_shard(checkpoint_path(tmp_path / "m.cache")).counted
    assert counted == run_count  # all that were begun are counted
    kept_note = f"; {counted:,} of 500 samples are kept in {checkpoint_path(tmp_path / 'm.cache')}"
    assert kept_note in message
    assert "--resume" in message
    assert run(*arguments, "-o", tmp_path / "m.cache", "--resume")[0] == 0
    assert run(*arguments, "-o", tmp_path / "whole.cache")[0] == 0
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "whole.cache")


def test_checkpoint_keeps_whole_batches_only(
    run, frequent_checkpoints, run_until_signal, calibrate_arguments, tmp_path
):
    options = with_config_file(RUN_OPTIONS["hfmg"][1:], tmp_path)
    code, (message,), _ = run_until_signal(
        7, signal.SIGINT, *calibrate_arguments, *options, "--threads", 1, "-q"
    )
    assert code == 130
    assert "; 4 of 20 samples" in message


def test_unstorable_statistics_are_named_when_interrupted(
    run, frequent_checkpoints, run_until_signal, calibrate_arguments, tmp_path
):
    text = HFMG_CONFIG.replace("hfmg_quantize { num_of_bins: 1024 }", "ifmr_quantize { }")
    options = ("--target", "ascend", "--exact-ifmr", "-q", "--ascend-config", text)
    calibrate_arguments = (*calibrate_arguments, *with_config_file(options, tmp_path))
    code, (message,), _ = run_until_signal(2, signal.SIGINT, *calibrate_arguments)
    assert code == 130
    assert "starts over" in message
    assert "'all values" in message
    assert not checkpoint_path(tmp_path / "m.cache").exists()
    assert run(*calibrate_arguments, "--resume")[0] == 0


@pytest.mark.slow
def test_killed_build_continues_from_checkpoint(run, run_until_killed, small_cnn, folder, tmp_path):
    out, whole_folder = tmp_path / "out", tmp_path / "whole"
    quick = ("--effort", 0, "--duration", 0)
    arguments = ("build", small_cnn, "--images", folder, *quick, "--out")
    assert run(*arguments, whole_folder)[0] == 0
    run_until_killed(5, *arguments, out)
    assert [path.name for path in out.rglob("*.*")] == ["small_cnn.cache.checkpoint"]
    assert run(*arguments, out, "--resume")[0] == 0
    timed = ("report.", "calib8/manifest.json", "calib8.toml")
    names = {path.relative_to(out).as_posix() for path in out.rglob("*.*")}
    assert names == {
        path.relative_to(whole_folder).as_posix() for path in whole_folder.rglob("*.*")
    }
    comparable = [name for name in names if not name.startswith(timed)]
    assert comparable
    assert all((out / n).read_bytes() == (whole_folder / n).read_bytes() for n in comparable)
    assert "resume" not in (out / "calib8.toml").read_text()
    assert "went on from" in (out / "report.md").read_text()


def change_model(tmp_path):
    model = onnx.load(tmp_path / "small_cnn.onnx")
    values = onnx.numpy_helper.to_array(model.graph.initializer[0]) * 2
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "w1"))
    return save_net(model, tmp_path / "small_cnn.onnx")


def change_image(tmp_path):
    cv2.imwrite(str(tmp_path / "pictures" / "01.png"), np.zeros((18, 20, 3), np.uint8))


def add_image(tmp_path):
    shutil.copy(tmp_path / "pictures" / "01.png", tmp_path / "pictures" / "20.png")


def changed_members(change):
    """Return a function that changes the members of a shard or checkpoint."""

    def call(path):
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        change(members)
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)

    return call


def changed_document(change, stamp=True):
    """Return a function that changes the document of a shard; with `stamp`, its digest fits."""

    def in_members(members):
        document = json.loads(members["shard.json"])
        change(document)
        if stamp:
            document["sha256"] = shards._digest(document)
        members["shard.json"] = json.dumps(document).encode()

    return changed_members(in_members)


def change_version(tmp_path):
    def older(document):
        document["made_from"]["made_by"]["numbers"].update(calib8="0.0.1")

    changed_document(older)(checkpoint_path(tmp_path / "m.cache"))


@pytest.mark.parametrize(
    ("message", "change", "options"),
    [
        ("the model (weights or graph) changed", change_model, ()),
        ("got another 01.png", change_image, ()),
        ("the images changed (count 20 -> 21", add_image, ()),
        ("the preprocessing changed", None, ("--preprocess", "imagenet")),
        ("skip_bad False -> True", None, ("--skip-bad",)),
        ("the method changed (not both have histogram", None, (*TENSORRT_OPTIONS, 2)),
        ("the method changed (not both have histogram of 'c2'", None, ("--keep-float", "*c2")),
        ("a version changed (calib8 0.0.1 -> ", change_version, ()),
    ],
)
def test_foreign_checkpoint_names_the_difference(
    message, change, options, run, saved_checkpoint, calibrate_arguments, tmp_path
):
    if change:
        change(tmp_path)
    old_bytes = saved_checkpoint.read_bytes()
    err = run.fails(*calibrate_arguments, *options, "--resume")
    assert message in err
    assert "--resume" in err
    assert saved_checkpoint.read_bytes() == old_bytes
    assert not (tmp_path / "m.cache").exists()


def test_another_search_resumes_the_histograms(
    run, saved_checkpoint, calibrate_arguments, tmp_path
):
    assert run(*calibrate_arguments, "--method", "entropy", "--resume")[0] == 0
    cache = contents(tmp_path / "m.cache")
    assert run(*calibrate_arguments, "--method", "entropy", "--refresh")[0] == 0
    assert contents(tmp_path / "m.cache") == cache


def test_new_run_keeps_the_larger_checkpoint(
    run, run_until_killed, run_until_signal, calibrate_arguments, tmp_path
):
    run_until_killed(9, *calibrate_arguments)
    checkpoint_file = checkpoint_path(tmp_path / "m.cache")
    old_bytes = checkpoint_file.read_bytes()
    message = run_until_killed(
        9, *calibrate_arguments, "--limit", 12
    )  # of another run, which has as many
    assert message.startswith(f"calib8: note: {checkpoint_file} holds 9 samples")
    assert "--resume" in message
    assert checkpoint_file.read_bytes() != old_bytes
    old_bytes = checkpoint_file.read_bytes()
    code, (note, message), _ = run_until_signal(2, signal.SIGINT, *calibrate_arguments)
    assert code == 130
    assert "note" in note
    assert message.endswith("left behind")
    assert checkpoint_file.read_bytes() == old_bytes  # with fewer samples it replaced nothing
    assert run(*calibrate_arguments)[0] == 0
    assert not checkpoint_file.exists()


def test_resume_without_checkpoint_starts_over(run, calibrate_arguments, tmp_path):
    assert run(*calibrate_arguments, "--resume", "-q", "--json", tmp_path / "found.json")[0] == 0
    notes = json.loads((tmp_path / "found.json").read_text())["notes"]
    assert any("m.cache.checkpoint" in note for note in notes)


def test_resumed_run_compares_no_halves(
    run, checkpoint_bytes, saved_checkpoint, calibrate_arguments, tmp_path
):
    report_path = tmp_path / "found.json"
    assert run(*calibrate_arguments, "--resume", "--json", report_path)[0] == 0
    assert not saved_checkpoint.exists()
    result = json.loads(report_path.read_text())
    assert result["agreement"] is None
    assert any("two halves" in note for note in result["notes"])
    saved_checkpoint.write_bytes(checkpoint_bytes)  # as if killed just before it was removed
    assert "reused" in run.ok(*calibrate_arguments, "--resume")
    assert not saved_checkpoint.exists()


@pytest.mark.parametrize("flag", ["--require-cache", "--trust-cache", "--until-stable"])
def test_resume_excludes_partial_observation(flag, run, calibrate_arguments):
    err = run.fails(*calibrate_arguments, "--resume", flag)
    assert flag in err
    assert "--resume" in err


BROKEN_CHECKPOINTS = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "no archive": lambda path: path.write_bytes(b"my notes"),
    "complete shard": changed_document(lambda document: document.pop("counted")),
    "too many": changed_document(lambda document: document.update(counted=20)),
    "too few": changed_document(lambda document: document.update(counted=document["counted"] - 1)),
    "skipped elsewhere": changed_document(
        lambda document: document["skipped"].update({"19": "why"})
    ),
    "peaks elsewhere": changed_document(lambda document: document["peaks"][0][3].append([1.0, 19])),
    "other schema": changed_document(lambda document: document.update(schema="calib8-shard/9")),
}


@pytest.mark.parametrize("change", BROKEN_CHECKPOINTS.values(), ids=BROKEN_CHECKPOINTS)
def test_broken_checkpoint_is_refused(change, run, saved_checkpoint, calibrate_arguments, tmp_path):
    change(saved_checkpoint)
    old_bytes = saved_checkpoint.read_bytes()
    err = run.fails(*calibrate_arguments, "--resume")
    assert str(saved_checkpoint) in err
    assert "remove it" in err
    assert saved_checkpoint.read_bytes() == old_bytes
    assert not (tmp_path / "m.cache").exists()


def test_foreign_file_at_checkpoint_is_kept(run, calibrate_arguments, tmp_path):
    notes = checkpoint_path(tmp_path / "m.cache")
    notes.write_text("mine")
    assert "--force" in run.fails(*calibrate_arguments)
    assert notes.read_text() == "mine"
    assert run(*calibrate_arguments, "--force")[0] == 0
    notes.mkdir()
    assert "a folder" in run.fails(*calibrate_arguments, "--refresh")


def test_full_disk_only_skips_checkpoints(
    run, frequent_checkpoints, calibrate_arguments, tmp_path, monkeypatch
):
    def full(path, data):
        raise ExportError(f"{path} must be writable, got: No space left on device")

    monkeypatch.setattr(checkpoint, "atomic", SimpleNamespace(write_bytes=full))
    assert run.ok(*calibrate_arguments).count("No space left") == 1


def test_until_stable_keeps_no_checkpoint(run_until_signal, calibrate_arguments, tmp_path):
    code, (message,), _ = run_until_signal(
        5, signal.SIGINT, *calibrate_arguments, "--until-stable", "-q"
    )
    assert code == 130
    assert message.endswith("left behind")
    assert not checkpoint_path(tmp_path / "m.cache").exists()


def test_python_calibration_resumes(small_cnn, folder, checkpoint_bytes, tmp_path):
    with pytest.raises(ConfigError, match="got neither"):
        calibrate(small_cnn, folder, resume=True)
    (tmp_path / "here").write_bytes(checkpoint_bytes)
    result = calibrate(small_cnn, folder, checkpoint=tmp_path / "here", resume=True)
    assert result.checkpoint == tmp_path / "here"  # to be removed by who keeps what was found
    assert result.range_set.scales == calibrate(small_cnn, folder).range_set.scales


# Runs a command line (arguments 2 and on) and kills itself before the flush that argument 1 counts.
KILLED_AT_FLUSH = """
import os, signal, sys
from deploy.calibration import checkpoint
from deploy.cli import main

checkpoint.MIN_INTERVAL_S = checkpoint.INTERVAL_RATIO = 0
remaining_flushes = int(sys.argv[1])
flush = os.fsync

def flush_or_die(handle):
    global remaining_flushes
    remaining_flushes -= 1
    if not remaining_flushes:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(handle)

os.fsync = flush_or_die
main(sys.argv[2:])
"""


@pytest.mark.slow
def test_sigkill_while_writing_loses_nothing(run, small_cnn, tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(40, 3, 16, 16)).astype(np.float32))
    arguments = ("calibrate", small_cnn, "--images", tmp_path / "x.npy", "-q", "-o")
    resume_arguments = [*map(str, (*arguments, tmp_path / "m.cache")), "--resume"]
    for writes in (8, 9):  # a file is flushed, and then the names in its folder
        command = [sys.executable, "-c", KILLED_AT_FLUSH, str(writes), *resume_arguments]
        process = subprocess.run(command, cwd=Path(__file__).parent.parent)
        assert process.returncode == -signal.SIGKILL
        assert checkpoint_path(tmp_path / "m.cache").exists()
    assert run(*arguments, tmp_path / "m.cache", "--resume")[0] == 0
    assert run(*arguments, tmp_path / "whole.cache")[0] == 0
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "whole.cache")


TARGET_OPTIONS = ("--target", "onnxruntime,tensorrt", "--trt-version", "8.6.1")


@pytest.fixture
def calibrate_base(small_cnn, pictures):
    """The command line of a calibration, without options."""
    return ("calibrate", small_cnn, "--images", pictures)


@pytest.fixture
def shard(run, small_cnn, pictures, tmp_path):
    """(number, count, *options) -> the file of shard number/count."""

    def make(number, count, *options, model=small_cnn, images=pictures, name=""):
        path = tmp_path / (name or f"{number}-{count}.shard")
        options = ("--shard", f"{number}/{count}", "-o", path, *options)
        run.ok("calibrate", model, "--images", images, *options)
        return path

    return make


@pytest.mark.slow
def test_merged_shards_equal_a_whole_run(run, shard, calibrate_base, small_cnn, tmp_path):
    whole_cache, merged = tmp_path / "whole.cache", tmp_path / "merged.cache"
    run(*calibrate_base, *TARGET_OPTIONS, "-o", whole_cache)
    for order in itertools.permutations(
        [shard(number, 3, *TARGET_OPTIONS) for number in (1, 2, 3)]
    ):
        out = run.ok("merge", small_cnn, *order, *TARGET_OPTIONS, "-o", merged, "--refresh")
        assert "from 20 images" in out
        assert contents(merged) == contents(whole_cache)
    arguments = ("merge", small_cnn, *order, *TARGET_OPTIONS, "-o", order[0], "--force")
    assert f"an input, got {order[0]}" in run.fails(*arguments)


def test_build_reuses_a_merged_cache(run, shard, calibrate_base, small_cnn, tmp_path):
    run("merge", small_cnn, *[shard(number, 2) for number in (1, 2)], "-o", tmp_path / "m.cache")
    options = ("--require-cache", "--effort", 0, "--duration", 0, "--out", tmp_path / "out")
    run.ok("build", *calibrate_base[1:], "--cache", tmp_path / "m.cache", *options)


def test_merged_shards_find_the_same_outliers(run, shard, small_cnn, odd_pictures, tmp_path):
    options = ("--limit", 18)
    run("calibrate", small_cnn, "--images", odd_pictures, *options, "-o", tmp_path / "w.cache")
    assert json.loads((tmp_path / "w.cache.json").read_text())["outliers"]
    parts = [shard(number, 4, *options, images=odd_pictures) for number in (3, 1, 4, 2)]
    out = run.ok("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "w.cache")
    assert "far above" in out


def test_bad_picture_is_skipped_in_shard(run, shard, small_cnn, pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "bad")
    (folder / "04.png").write_bytes(b"no picture")
    run("calibrate", small_cnn, "--images", folder, "--skip-bad", "-o", tmp_path / "w.cache")
    parts = [shard(number, 3, "--skip-bad", images=folder) for number in (1, 2, 3)]
    out = run.ok("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "w.cache")
    assert "from 19 images" in out
    assert "1 skipped" in out


def test_shard_of_bad_pictures_is_empty(run, shard, small_cnn, pictures, tmp_path):
    folder = tmp_path / "bad"
    folder.mkdir()
    for path in sorted(pictures.iterdir())[:3]:
        shutil.copy(path, folder)
    bad_picture = sorted(folder.iterdir())[1]
    bad_picture.write_bytes(b"no picture")
    run.ok("calibrate", small_cnn, "--images", folder, "--skip-bad", "-o", tmp_path / "w.cache")
    parts = [shard(number, 3, "--skip-bad", images=folder) for number in (1, 2, 3)]
    run.ok("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "w.cache")
    for path in folder.iterdir():
        path.write_bytes(b"no picture")
    parts = [shard(number, 3, "--skip-bad", images=folder) for number in (1, 2, 3)]
    assert "at least one sample" in run.fails(
        "merge", small_cnn, *parts, "-o", tmp_path / "n.cache"
    )


def test_shard_needs_only_its_own_pictures(run, shard, small_cnn, pictures, tmp_path):
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{path}\n" for path in sorted(pictures.iterdir())) + "gone.png\n")
    shard(2, 3, images=listing)  # gone.png is the 21st, of 3/3
    options = ("--images", listing, "--shard", "3/3", "-o", tmp_path / "3.shard")
    assert "gone.png" in run.fails("calibrate", small_cnn, *options)


@pytest.mark.parametrize(
    ("parts", "named_parts"),
    [
        ([(2, 4), (3, 4)], ["got 2 of 4; missing: 1/4, 4/4"]),
        ([(1, 2), (1, 2, "again.shard")], ["got 1/2 twice", "again.shard"]),
        ([(1, 2), (2, 3)], ["1/2", "2/3"]),
    ],
)
def test_incomplete_shard_set_is_refused(parts, named_parts, run, shard, small_cnn, tmp_path):
    paths = [shard(number, count, name="".join(name)) for number, count, *name in parts]
    err = run.fails("merge", small_cnn, *paths, "-o", tmp_path / "m.cache")
    assert all(part in err for part in named_parts)
    assert not (tmp_path / "m.cache").exists()


def rename_image(tmp_path):
    (tmp_path / "pictures" / "19.png").rename(tmp_path / "pictures" / "99.png")


@pytest.mark.parametrize(
    ("pattern", "options", "change"),
    [
        (r"the images changed \(names\)", (), rename_image),
        ("count (20 -> 10|10 -> 20)", ("--limit", 10), None),  # whichever is taken for the first
        ("the preprocessing changed", ("--preprocess", "imagenet"), None),
        (r"the model \(weights or graph\) changed", (), change_model),
    ],
)
def test_foreign_shard_is_refused(
    pattern, options, change, run, shard, small_cnn, pictures, tmp_path
):
    images = shutil.copytree(pictures, tmp_path / "pictures")
    model = shutil.copy(small_cnn, tmp_path / "small_cnn.onnx")
    if change:
        change(tmp_path)
    foreign = shard(2, 2, *options, model=model, images=images, name="foreign.shard")
    err = run.fails("merge", small_cnn, shard(1, 2), foreign, "-o", tmp_path / "m.cache")
    assert "foreign.shard" in err, err
    assert re.search(pattern, err), err


def test_shard_for_other_targets_is_refused(run, shard, small_cnn, tmp_path):
    parts = [shard(number, 2, "--keep-float", "Conv_c1") for number in (1, 2)]
    err = run.fails("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    assert "1-2.shard lacks" in err
    assert "the targets" in err
    run.ok("merge", small_cnn, *parts, "--keep-float", "Conv_c1", "-o", tmp_path / "m.cache")


@pytest.mark.parametrize(
    ("shard_option", "pattern"),
    [
        ("1/2 --target ascend", "ifmr histogram.* in one run"),
        ("1/2 --target tensorrt --method entropy-tensorrt", "first batch of.* in one run"),
        ("3/2", "i from 1 to n"),
        ("0/2", "i from 1 to n"),
        ("two", "must read I/N"),
        ("1/", "must read I/N"),
        ("-1/2", "must read I/N"),
        ("21/40", "every shard must have a sample, got 40 shards of 20"),
        *((f"1/2 {flag}", flag) for flag in ("--refresh", "--require-cache", "--trust-cache")),
    ],
)
def test_impossible_shard_is_refused_first(shard_option, pattern, run, calibrate_base, tmp_path):
    err = run.fails(*calibrate_base, *f"--shard={shard_option}".split(), "-o", tmp_path / "s")
    assert re.search(pattern, err)
    assert not (tmp_path / "s").exists()


def test_merge_excludes_trust_cache(run, shard, small_cnn, tmp_path):
    options = ("--trust-cache", "-o", tmp_path / "m")
    assert "--trust-cache" in run.fails("merge", small_cnn, shard(1, 1), *options)


def test_fixed_batch_model_has_no_shards(run, small_cnn, pictures, tmp_path):
    model = save_fixed_batch(small_cnn, tmp_path / "four.onnx")
    options = ("--images", pictures, "--shard", "1/2", "-o", tmp_path / "s")
    assert "fixed batch of 4" in run.fails("calibrate", model, *options)


def test_shard_replaces_only_a_shard(run, shard, calibrate_base, tmp_path, wording):
    first_shard = shard(1, 2).read_bytes()
    assert shard(1, 2).read_bytes() == first_shard  # over itself, the same bytes
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    arguments = (*calibrate_base, "--shard", "1/2", "-o", notes)
    wording.check(run.fails(*arguments))
    assert notes.read_text() == "mine"
    wording.check(run.fails(*arguments[:-1], notes / "a"))
    assert run(*arguments, "--force")[0] == 0
    assert notes.read_bytes() == first_shard


def test_shard_is_named_after_its_model(run, calibrate_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*calibrate_base, "--shard", "2/3")[0] == 0
    assert (tmp_path / "small_cnn.2-of-3.shard").exists()


BROKEN_SHARDS = {
    "more samples": changed_document(lambda d: d.update(digests=2 * d["digests"]), stamp=False),
    "no statistics": changed_members(lambda members: members.pop("statistics.npz")),
    "more statistics": changed_members(
        lambda m: m.update({"statistics.npz": m["statistics.npz"] + b" "})
    ),
    "no json": changed_members(lambda members: members.update({"shard.json": b"[" * 100_000})),
    "peaks of others": changed_document(lambda d: d["peaks"][0][3].append([1.0, 99])),
    "other peaks": changed_document(lambda d: d["peaks"].append([{}, [], "x"])),
    "digest of no hex": changed_document(lambda d: d["digests"].__setitem__(0, "z" * 64)),
    "short digest": changed_document(lambda d: d["digests"].__setitem__(0, "ab")),
    "shard of -1": changed_document(lambda d: d["share"].update(number=20, of=-1, count=-1)),
    "no kind": changed_document(lambda d: d["made_from"]["made_from"]["images"].pop("kind")),
}


@pytest.mark.parametrize("change", BROKEN_SHARDS.values(), ids=BROKEN_SHARDS)
def test_broken_shard_is_refused(change, run, shard, small_cnn, tmp_path):
    path = shard(1, 1)
    change(path)
    assert str(path) in run.fails("merge", small_cnn, path, "-o", tmp_path / "m.cache")
    assert not (tmp_path / "m.cache").exists()


def test_shards_of_different_counts_are_refused(run, shard, small_cnn, tmp_path):
    paths = [shard(1, 2), shard(2, 2)]
    changed_document(lambda d: d["share"].update(count=19))(paths[0])  # of 20: 10 images too
    err = run.fails("merge", small_cnn, *paths, "-o", tmp_path / "m.cache")
    assert "1-2.shard, 1/2 of 19 samples, and" in err


def test_vast_number_of_missing_shards_is_not_listed(run, shard, small_cnn, tmp_path):
    def claim_to_be_of_many(document):
        document["share"].update(of=10**18, count=10**18)
        document |= {"digests": document["digests"][:1], "peaks": []}

    path = shard(1, 2)
    changed_document(claim_to_be_of_many)(path)
    err = run.fails("merge", small_cnn, path, "-o", tmp_path / "m.cache")
    assert f"missing: 2/{10**18}, 3/" in err


@pytest.fixture(scope="module")
def intact_shard(small_cnn, pictures, tmp_path_factory):
    path = tmp_path_factory.mktemp("changed") / "one.shard"
    write_shard(calibrate(small_cnn, pictures, limit=Choice(limit=2, shard=(1, 2))), path)
    return path, path.read_bytes(), shards.load_shard(path)


@settings(max_examples=200)
@given(data=st.binary(max_size=400), position=st.integers(0, 10**6))
def test_changed_shard_bytes_never_load(data, position, intact_shard):
    path, intact_bytes, intact = intact_shard
    offset = position % len(intact_bytes)
    path.write_bytes(intact_bytes[:offset] + data + intact_bytes[offset + len(data) :])
    try:
        loaded = shards.load_shard(path)
    except CacheError:
        return
    for part in ("share", "made_from", "digests"):
        assert getattr(loaded, part) == getattr(intact, part)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 5))
def test_shards_partition_the_chosen_samples(count, shard_count, every):
    positions, _ = Choice(every=every).choose(count)
    if shard_count > len(positions):
        return
    shares = [
        create_share((number, shard_count), len(positions), "")
        for number in range(1, shard_count + 1)
    ]
    assert sorted([position for share in shares for position in share.positions]) == list(
        range(len(positions))
    )
    assert max(len(s.positions) for s in shares) - min(len(s.positions) for s in shares) <= 1


@pytest.mark.parametrize("count", [1, 2])
def test_python_merge_equals_a_whole_run(small_cnn, pictures, tmp_path, count):
    paths = [tmp_path / f"{number}.shard" for number in range(count)]
    for number, path in enumerate(paths, 1):
        write_shard(calibrate(small_cnn, pictures, limit=Choice(shard=(number, count))), path)
    merged = merge(small_cnn, paths)
    whole_cache = calibrate(small_cnn, pictures)
    assert merged.range_set.scales == whole_cache.range_set.scales
    assert not merged.runs
    assert merged.feed.manifest() == whole_cache.feed.manifest()
    assert HistogramOf().key in {key[2] for key in merged.ranges.observed}
