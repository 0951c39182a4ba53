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

HFMG = "batch_num: 3\ncommon_config { hfmg_quantize { num_of_bins: 1024 } }\n"
DMQ = "batch_num: 16\ncommon_config { ifmr_quantize {} dmq_balancer { migration_strength: 0.5 } }\n"
TRT = ("--target", "tensorrt", "--method", "entropy-tensorrt", "--batch-size")
WAYS = {  # threads and words
    "histograms": (3, "--target", "onnxruntime,tensorrt", "--trt-version", "8.6.1"),
    "first batch": (2, *TRT, 3),
    "ifmr": (3, "--target", "ascend,onnxruntime"),
    "hfmg": (2, "--target", "ascend", "--amct-batch", 4, "--ascend-config", HFMG),
    "dmq": (1, "--target", "ascend", "--ascend-config", DMQ),
    "bad ones": (3, "--skip-bad"),
}


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture(scope="module")
def odd(pictures, tmp_path_factory):
    """20 pictures, of which one outshines the others."""
    made = shutil.copytree(pictures, tmp_path_factory.mktemp("odd") / "pictures")
    for path in made.iterdir():
        cv2.imwrite(str(path), cv2.imread(str(path)) // 12)
    cv2.imwrite(str(made / "05.png"), np.full((18, 20, 3), 255, np.uint8))
    return made


@pytest.fixture
def folder(odd, tmp_path):
    """A copy of them."""
    return shutil.copytree(odd, tmp_path / "pictures")


@pytest.fixture
def often(monkeypatch):
    """A checkpoint between any two samples."""
    monkeypatch.setattr(checkpoint, "MIN_INTERVAL_S", 0)
    monkeypatch.setattr(checkpoint, "INTERVAL_RATIO", 0)


@pytest.fixture
def killed(run, often, monkeypatch, capfd):
    """(samples, words) -> a run that is gone when the checkpoint of so many is written."""

    def call(samples, *words):
        keep = Checkpoint.save

        def kept(self, number, observed):
            keep(self, number, observed)
            if number >= samples:
                raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(Checkpoint, "save", kept)
            with pytest.raises(Killed):
                run(*words)
        return capfd.readouterr().err

    return call


def ended_at(sample, send, patched):
    """A signal is sent while that sample is inferred; it and later ones wait until none is drawn.

    Gives the numbers of those that ran.
    """
    ran = []
    count = itertools.count(1)
    over = threading.Event()
    run = VariantRunner.run
    finish = _OrderedRun.finish

    def heard(self, *words):
        place = next(count)
        ran.append(place)
        if place == sample:
            send()
        assert place < sample or over.wait(300)
        return run(self, *words)

    def finished(self):
        finish(self)
        over.set()

    patched.setattr(signals, "GRACE_S", 300)  # for which an inference that was begun may last
    patched.setattr(VariantRunner, "run", heard)
    patched.setattr(_OrderedRun, "finish", finished)
    return ran


@pytest.fixture
def interrupted(monkeypatch, capfd):
    """(sample, signal, words) -> a run that the signal reaches while that sample is inferred."""

    def call(sample, number, *words):
        gc.disable()  # hypothesis has a callback there, in which what a signal raises is lost
        try:
            with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
                ran = ended_at(sample, lambda: os.kill(os.getpid(), number), patched)
                main([str(word) for word in words])
        finally:
            gc.enable()
        said = [line for line in capfd.readouterr().err.splitlines() if line]  # click ends a ^C's
        return ended.value.code, said, len(ran)

    return call


@pytest.fixture(scope="module")
def state(small_cnn, odd, tmp_path_factory):
    """The checkpoint of a calibration that was ended after some samples."""
    path = tmp_path_factory.mktemp("state") / "c"
    with pytest.MonkeyPatch.context() as patched:
        # to the thread of a worker; the main one acts on it
        ended_at(5, lambda: signal.raise_signal(signal.SIGINT), patched)
        with pytest.raises(KeyboardInterrupt, match="--resume goes on from there"):
            calibrate(small_cnn, odd, checkpoint=path, threads=2)
    return path.read_bytes()


@pytest.fixture
def left(state, tmp_path):
    """It, beside the cache of `words`."""
    path = checkpoint_path(tmp_path / "m.cache")
    path.write_bytes(state)
    return path


def contents(cache):
    return [path.read_bytes() for path in cache_files(cache)]


def in_files(words, folder):
    """A configuration among the words as a file of it."""
    path = folder / "a.cfg"
    return [path if "batch_num" in str(word) and path.write_text(word) else word for word in words]


@pytest.fixture
def words(small_cnn, folder, tmp_path):
    """Of a calibration of a copy of the model that writes m.cache in its folder."""
    model = shutil.copy(small_cnn, tmp_path / "small_cnn.onnx")
    return ("calibrate", model, "--images", folder, "-o", tmp_path / "m.cache", "--threads", 2)


def spoil(folder):
    for name in ("00", "09", "19"):
        (folder / f"{name}.png").write_bytes(b"no picture")


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_run_goes_on_to_the_same_bytes(way, run, killed, small_cnn, folder, tmp_path):
    threads, *more = WAYS[way]
    if way == "bad ones":
        spoil(folder)
    words = ["calibrate", small_cnn, "--images", folder, *in_files(more, tmp_path), "-q"]
    whole, cache = tmp_path / "whole.cache", tmp_path / "m.cache"
    assert run(*words, "-o", whole, "--threads", 2)[0] == 0
    go_on = (*words, "-o", cache, "--threads", threads)
    killed(3, *go_on)
    assert not cache.exists()
    assert checkpoint_path(cache).exists()
    killed(11, *go_on, "--resume")  # and once more
    assert shards.load_shard(checkpoint_path(cache)).counted >= 11
    assert run(*go_on, "--resume")[0] == 0
    assert contents(cache) == contents(whole)
    assert not checkpoint_path(cache).exists()


@pytest.mark.parametrize("samples", [1, 4, 5])
def test_a_fixed_batch_and_a_filled_one_go_on(samples, run, killed, small_cnn, pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "pictures")
    model = save_fixed_batch(small_cnn, tmp_path / "four.onnx")
    spoil(folder)  # 17 are left: 4 batches, and one picture with three of the first ones
    words = ("calibrate", model, "--images", folder, "--skip-bad", "-q", "-o")
    assert run(*words, tmp_path / "whole.cache")[0] == 0
    killed(samples, *words, tmp_path / "m.cache")
    assert run(*words, tmp_path / "m.cache", "--resume")[0] == 0
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "whole.cache")


def test_a_shard_goes_on_and_its_checkpoint_is_no_shard(run, killed, small_cnn, folder, tmp_path):
    spoil(folder)
    words = ("calibrate", small_cnn, "--images", folder, "--shard", "2/3", "--skip-bad", "-q", "-o")
    assert run(*words, tmp_path / "whole.shard")[0] == 0
    killed(2, *words, tmp_path / "m.shard")
    left = checkpoint_path(tmp_path / "m.shard")
    err = run.fails("merge", small_cnn, left, "-o", tmp_path / "m.cache")
    assert "m.shard.checkpoint" in err
    assert "--resume" in err
    err = run.fails(*words, tmp_path / "m.shard", "--resume", "--shard", "1/3")
    assert "the shard changed (2/3 -> 1/3)" in err
    assert run(*words, tmp_path / "m.shard", "--resume")[0] == 0
    assert (tmp_path / "m.shard").read_bytes() == (tmp_path / "whole.shard").read_bytes()
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_signal_says_how_to_go_on(number, code, threads, run, interrupted, small_cnn, tmp_path):
    many = np.random.default_rng(0).normal(size=(500, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", many)
    words = ("calibrate", small_cnn, "--images", tmp_path / "x.npy", "-q", "--threads", threads)
    ended, (said,), ran = interrupted(7, number, *words, "-o", tmp_path / "m.cache")
    assert ended == code
    assert ran < 7 + threads
    counted = shards.load_shard(checkpoint_path(tmp_path / "m.cache")).counted
    assert counted == ran  # all that were begun are counted
    left = f"; {counted:,} of 500 samples are kept in {checkpoint_path(tmp_path / 'm.cache')}"
    assert said.endswith(f"{left}: --resume goes on from there")
    assert run(*words, "-o", tmp_path / "m.cache", "--resume")[0] == 0
    assert run(*words, "-o", tmp_path / "whole.cache")[0] == 0
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "whole.cache")


def test_in_a_batch_the_last_whole_one_is_kept(run, often, interrupted, words, tmp_path):
    more = in_files(WAYS["hfmg"][1:], tmp_path)
    code, (said,), _ = interrupted(7, signal.SIGINT, *words, *more, "--threads", 1, "-q")
    assert code == 130
    assert "4 of 20 samples are kept" in said


def test_what_no_checkpoint_holds_is_said(run, often, interrupted, words, tmp_path):
    text = HFMG.replace("hfmg_quantize { num_of_bins: 1024 }", "ifmr_quantize { }")
    more = ("--target", "ascend", "--exact-ifmr", "-q", "--ascend-config", text)
    words = (*words, *in_files(more, tmp_path))
    code, (said,), _ = interrupted(2, signal.SIGINT, *words)
    assert code == 130
    assert "starts over, since no checkpoint holds 'all values" in said
    assert not checkpoint_path(tmp_path / "m.cache").exists()
    assert run(*words, "--resume")[0] == 0


def test_a_build_goes_on(run, killed, small_cnn, folder, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = ("build", small_cnn, "--images", folder, "--effort", 0, "--duration", 0, "-q", "--out")
    assert run(*words, whole)[0] == 0
    killed(5, *words, out)
    assert [path.name for path in out.rglob("*.*")] == ["small_cnn.cache.checkpoint"]
    assert run(*words, out, "--resume")[0] == 0
    told = ("report.", "calib8/manifest.json", "calib8.toml")
    names = {path.relative_to(out).as_posix() for path in out.rglob("*.*")}
    assert names == {path.relative_to(whole).as_posix() for path in whole.rglob("*.*")}
    same = [name for name in names if not name.startswith(told)]
    assert same
    assert all((out / n).read_bytes() == (whole / n).read_bytes() for n in same)
    assert "resume" not in (out / "calib8.toml").read_text()
    assert "went on from" in (out / "report.md").read_text()


def other_model(tmp_path):
    model = onnx.load(tmp_path / "small_cnn.onnx")
    values = onnx.numpy_helper.to_array(model.graph.initializer[0]) * 2
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "w1"))
    return save_net(model, tmp_path / "small_cnn.onnx")


def other_image(tmp_path):
    cv2.imwrite(str(tmp_path / "pictures" / "01.png"), np.zeros((18, 20, 3), np.uint8))


def an_image_more(tmp_path):
    shutil.copy(tmp_path / "pictures" / "01.png", tmp_path / "pictures" / "20.png")


def rezipped(change):
    """What changes the members of a shard or checkpoint."""

    def call(path):
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        change(members)
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)

    return call


def rewritten(change, stamp=True):
    """What changes its document, in earnest: with the digest that belongs to it."""

    def in_members(members):
        document = json.loads(members["shard.json"])
        change(document)
        if stamp:
            document["sha256"] = shards._digest(document)
        members["shard.json"] = json.dumps(document).encode()

    return rezipped(in_members)


def other_version(tmp_path):
    def older(document):
        document["made_from"]["made_by"]["numbers"].update(calib8="0.0.1")

    rewritten(older)(checkpoint_path(tmp_path / "m.cache"))


@pytest.mark.parametrize(
    ("said", "change", "more"),
    [
        ("the model (weights or graph) changed", other_model, ()),
        ("got another image 01.png", other_image, ()),
        ("the images changed (count 20 -> 21", an_image_more, ()),
        ("the preprocessing changed", None, ("--preprocess", "imagenet")),
        ("skip_bad False -> True", None, ("--skip-bad",)),
        ("the method changed (it lacks histogram, first batch of 2", None, (*TRT, 2)),
        ("it is of histogram of 'c2' too", None, ("--keep-float", "*c2")),
        ("a version changed (calib8 0.0.1 -> ", other_version, ()),
    ],
)
def test_a_foreign_checkpoint_tells_what_differs(said, change, more, run, left, words, tmp_path):
    if change:
        change(tmp_path)
    before = left.read_bytes()
    err = run.fails(*words, *more, "--resume")
    assert said in err
    assert "leave --resume out to begin anew" in err
    assert left.read_bytes() == before
    assert not (tmp_path / "m.cache").exists()


def test_another_search_of_the_same_histograms_goes_on(run, left, words, tmp_path):
    assert run(*words, "--method", "entropy", "--resume")[0] == 0
    cache = contents(tmp_path / "m.cache")
    assert run(*words, "--method", "entropy", "--refresh")[0] == 0
    assert contents(tmp_path / "m.cache") == cache


def test_a_new_run_names_the_checkpoint_and_spares_it(run, killed, interrupted, words, tmp_path):
    killed(9, *words)
    left = checkpoint_path(tmp_path / "m.cache")
    before = left.read_bytes()
    said = killed(9, *words, "--limit", 12)  # of another run, which has as many
    assert said.startswith(f"calib8: note: {left} holds 9 samples")
    assert "--resume" in said
    assert left.read_bytes() != before
    before = left.read_bytes()
    code, (note, said), _ = interrupted(2, signal.SIGINT, *words)
    assert code == 130
    assert "note" in note
    assert said.endswith("nothing half-written was left behind")
    assert left.read_bytes() == before  # with fewer samples it replaced nothing
    assert run(*words)[0] == 0
    assert not left.exists()


def test_without_a_checkpoint_the_run_begins_anew_and_says_so(run, words, tmp_path):
    assert run(*words, "--resume", "-q", "--json", tmp_path / "found.json")[0] == 0
    notes = json.loads((tmp_path / "found.json").read_text())["notes"]
    assert any("m.cache.checkpoint is not there to go on from" in one for one in notes)


def test_a_run_that_went_on_tells_of_no_halves(run, state, left, words, tmp_path):
    told = tmp_path / "found.json"
    assert run(*words, "--resume", "--json", told)[0] == 0
    assert not left.exists()
    found = json.loads(told.read_text())
    assert found["agreement"] is None
    assert any("how far two halves" in note for note in found["notes"])
    left.write_bytes(state)  # as if killed just before it was removed
    assert "reused" in run.ok(*words, "--resume")
    assert not left.exists()


@pytest.mark.parametrize("flag", ["--require-cache", "--trust-cache", "--until-stable"])
def test_what_never_observes_all_does_not_go_on(flag, run, words):
    err = run.fails(*words, "--resume", flag)
    assert flag in err
    assert "--resume" in err


BROKEN_CHECKPOINTS = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "no archive": lambda path: path.write_bytes(b"my notes"),
    "complete shard": rewritten(lambda document: document.pop("counted")),
    "too many": rewritten(lambda document: document.update(counted=20)),
    "too few": rewritten(lambda document: document.update(counted=document["counted"] - 1)),
    "skipped elsewhere": rewritten(lambda document: document["skipped"].update({"19": "why"})),
    "peaks elsewhere": rewritten(lambda document: document["peaks"][0][3].append([1.0, 19])),
    "other schema": rewritten(lambda document: document.update(schema="calib8-shard/9")),
}


@pytest.mark.parametrize("change", BROKEN_CHECKPOINTS.values(), ids=BROKEN_CHECKPOINTS)
def test_a_broken_checkpoint_is_a_sentence(change, run, left, words, tmp_path):
    change(left)
    before = left.read_bytes()
    err = run.fails(*words, "--resume")
    assert str(left) in err
    assert "remove it" in err
    assert left.read_bytes() == before
    assert not (tmp_path / "m.cache").exists()


def test_what_calib8_did_not_write_is_not_replaced(run, words, tmp_path):
    notes = checkpoint_path(tmp_path / "m.cache")
    notes.write_text("mine")
    assert "--force" in run.fails(*words)
    assert notes.read_text() == "mine"
    assert run(*words, "--force")[0] == 0
    notes.mkdir()
    assert "a folder" in run.fails(*words, "--refresh")


def test_a_disk_that_takes_no_checkpoint_ends_no_run(run, often, words, tmp_path, monkeypatch):
    def full(path, data):
        raise ExportError(f"{path} must be writable, got: No space left on device")

    monkeypatch.setattr(checkpoint, "atomic", SimpleNamespace(write_bytes=full))
    assert run.ok(*words).count("no checkpoint could be kept: ") == 1


def test_a_run_over_few_samples_keeps_no_checkpoint(interrupted, words, tmp_path):
    code, (said,), _ = interrupted(5, signal.SIGINT, *words, "--until-stable", "-q")
    assert code == 130
    assert said.endswith("left behind")
    assert not checkpoint_path(tmp_path / "m.cache").exists()


def test_from_python(small_cnn, folder, state, tmp_path):
    with pytest.raises(ConfigError, match="got neither"):
        calibrate(small_cnn, folder, resume=True)
    (tmp_path / "here").write_bytes(state)
    found = calibrate(small_cnn, folder, checkpoint=tmp_path / "here", resume=True)
    assert found.checkpoint == tmp_path / "here"  # to be removed by who keeps what was found
    assert found.range_set.scales == calibrate(small_cnn, folder).range_set.scales


_CHILD = """
import os, signal, sys
from deploy.calibration import checkpoint
from deploy.cli import main

checkpoint.MIN_INTERVAL_S = checkpoint.INTERVAL_RATIO = 0
left, plain = int(sys.argv[1]), os.fsync

def counted(handle):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(handle)

os.fsync = counted
main(sys.argv[2:])
"""


@pytest.mark.slow
def test_kill_9_at_any_write(run, small_cnn, tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(40, 3, 16, 16)).astype(np.float32))
    words = ("calibrate", small_cnn, "--images", tmp_path / "x.npy", "-q", "-o")
    go_on = [*map(str, (*words, tmp_path / "m.cache")), "--resume"]
    for writes in (8, 9):  # a file is flushed, and then the names in its folder
        command = [sys.executable, "-c", _CHILD, str(writes), *go_on]
        ended = subprocess.run(command, cwd=Path(__file__).parent.parent)
        assert ended.returncode == -signal.SIGKILL
        assert checkpoint_path(tmp_path / "m.cache").exists()
    assert run(*words, tmp_path / "m.cache", "--resume")[0] == 0
    assert run(*words, tmp_path / "whole.cache")[0] == 0
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "whole.cache")


TARGETS = ("--target", "onnxruntime,tensorrt", "--trt-version", "8.6.1")


@pytest.fixture
def observed(small_cnn, pictures):
    """The words of a calibration."""
    return ("calibrate", small_cnn, "--images", pictures)


@pytest.fixture
def shard(run, small_cnn, pictures, tmp_path):
    """(number, of, *words) -> the file of a shard."""

    def made(number, of, *words, model=small_cnn, images=pictures, name=""):
        path = tmp_path / (name or f"{number}-{of}.shard")
        words = ("--shard", f"{number}/{of}", "-o", path, *words)
        run.ok("calibrate", model, "--images", images, *words)
        return path

    return made


@pytest.mark.slow
def test_shards_in_any_order_give_the_bytes_of_one_run(run, shard, observed, small_cnn, tmp_path):
    whole, merged = tmp_path / "whole.cache", tmp_path / "merged.cache"
    run(*observed, *TARGETS, "-o", whole)
    for order in itertools.permutations([shard(number, 3, *TARGETS) for number in (1, 2, 3)]):
        out = run.ok("merge", small_cnn, *order, *TARGETS, "-o", merged, "--refresh")
        assert "of 20 images" in out
        assert contents(merged) == contents(whole)
    words = ("merge", small_cnn, *order, *TARGETS, "-o", order[0], "--force")
    assert f"must not be an input, got {order[0]}" in run.fails(*words)


def test_build_uses_a_merged_cache_without_observing(run, shard, observed, small_cnn, tmp_path):
    run("merge", small_cnn, *[shard(number, 2) for number in (1, 2)], "-o", tmp_path / "m.cache")
    words = ("--require-cache", "--effort", 0, "--duration", 0, "--out", tmp_path / "out")
    run.ok("build", *observed[1:], "--cache", tmp_path / "m.cache", *words)


def test_outliers_are_told_of_shards_as_of_one_run(run, shard, small_cnn, odd, tmp_path):
    words = ("--limit", 18)
    run("calibrate", small_cnn, "--images", odd, *words, "-o", tmp_path / "w.cache")
    assert json.loads((tmp_path / "w.cache.json").read_text())["outliers"]
    parts = [shard(number, 4, *words, images=odd) for number in (3, 1, 4, 2)]
    out = run.ok("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "w.cache")
    assert "stands far above the others" in out


def test_a_skipped_picture_is_skipped_in_its_shard(run, shard, small_cnn, pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "bad")
    (folder / "04.png").write_bytes(b"no picture")
    run("calibrate", small_cnn, "--images", folder, "--skip-bad", "-o", tmp_path / "w.cache")
    parts = [shard(number, 3, "--skip-bad", images=folder) for number in (1, 2, 3)]
    out = run.ok("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "w.cache")
    assert "of 19 images" in out
    assert "1 skipped" in out


def test_only_the_pictures_of_the_shard_must_be_there(run, shard, small_cnn, pictures, tmp_path):
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{path}\n" for path in sorted(pictures.iterdir())) + "gone.png\n")
    shard(2, 3, images=listed)  # gone.png is the 21st, of 3/3
    words = ("--images", listed, "--shard", "3/3", "-o", tmp_path / "3.shard")
    assert "gone.png" in run.fails("calibrate", small_cnn, *words)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([(2, 4), (3, 4)], ["got 2 of 4; missing: 1/4, 4/4"]),
        ([(1, 2), (1, 2, "again.shard")], ["got 1/2 twice", "again.shard"]),
        ([(1, 2), (2, 3)], ["1/2", "2/3"]),
    ],
)
def test_a_set_of_shards_that_is_not_one_is_named(parts, said, run, shard, small_cnn, tmp_path):
    paths = [shard(number, of, name="".join(name)) for number, of, *name in parts]
    err = run.fails("merge", small_cnn, *paths, "-o", tmp_path / "m.cache")
    assert all(words in err for words in said)
    assert not (tmp_path / "m.cache").exists()


def renamed_image(tmp_path):
    (tmp_path / "pictures" / "19.png").rename(tmp_path / "pictures" / "99.png")


@pytest.mark.parametrize(
    ("said", "words", "change"),
    [
        (r"the images changed \(names\)", (), renamed_image),
        ("count (20 -> 10|10 -> 20)", ("--limit", 10), None),  # whichever is taken for the first
        ("the preprocessing changed", ("--preprocess", "imagenet"), None),
        (r"the model \(weights or graph\) changed", (), other_model),
    ],
)
def test_a_foreign_shard_is_named(said, words, change, run, shard, small_cnn, pictures, tmp_path):
    images = shutil.copytree(pictures, tmp_path / "pictures")
    model = shutil.copy(small_cnn, tmp_path / "small_cnn.onnx")
    if change:
        change(tmp_path)
    foreign = shard(2, 2, *words, model=model, images=images, name="foreign.shard")
    err = run.fails("merge", small_cnn, shard(1, 2), foreign, "-o", tmp_path / "m.cache")
    assert "foreign.shard" in err, err
    assert re.search(said, err), err


def test_a_shard_for_other_targets_is_named(run, shard, small_cnn, tmp_path):
    parts = [shard(number, 2, "--keep-float", "Conv_c1") for number in (1, 2)]
    err = run.fails("merge", small_cnn, *parts, "-o", tmp_path / "m.cache")
    assert "1-2.shard lacks" in err
    assert "merge for the targets" in err
    run.ok("merge", small_cnn, *parts, "--keep-float", "Conv_c1", "-o", tmp_path / "m.cache")


@pytest.mark.parametrize(
    ("words", "said"),
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
def test_what_gives_no_shard_is_refused_before_any_run(words, said, run, observed, tmp_path):
    err = run.fails(*observed, *f"--shard={words}".split(), "-o", tmp_path / "s")
    assert re.search(said, err)
    assert not (tmp_path / "s").exists()


def test_merging_and_trusting_exclude_each_other(run, shard, small_cnn, tmp_path):
    words = ("--trust-cache", "-o", tmp_path / "m")
    assert "--trust-cache" in run.fails("merge", small_cnn, shard(1, 1), *words)


def test_a_model_with_a_fixed_batch_has_no_shards(run, small_cnn, pictures, tmp_path):
    model = save_fixed_batch(small_cnn, tmp_path / "four.onnx")
    words = ("--images", pictures, "--shard", "1/2", "-o", tmp_path / "s")
    assert "fixed batch of 4" in run.fails("calibrate", model, *words)


def test_a_shard_replaces_a_shard_and_nothing_else(run, shard, observed, tmp_path, wording):
    first = shard(1, 2).read_bytes()
    assert shard(1, 2).read_bytes() == first  # over itself, the same bytes
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    words = (*observed, "--shard", "1/2", "-o", notes)
    wording.check(run.fails(*words))
    assert notes.read_text() == "mine"
    wording.check(run.fails(*words[:-1], notes / "a"))
    assert run(*words, "--force")[0] == 0
    assert notes.read_bytes() == first


def test_a_shard_is_called_after_its_model(run, observed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*observed, "--shard", "2/3")[0] == 0
    assert (tmp_path / "small_cnn.2-of-3.shard").exists()


BROKEN_SHARDS = {
    "more samples": rewritten(lambda d: d.update(digests=2 * d["digests"]), stamp=False),
    "no statistics": rezipped(lambda members: members.pop("statistics.npz")),
    "more statistics": rezipped(lambda m: m.update({"statistics.npz": m["statistics.npz"] + b" "})),
    "no json": rezipped(lambda members: members.update({"shard.json": b"[" * 100_000})),
    "peaks of others": rewritten(lambda d: d["peaks"][0][3].append([1.0, 99])),
    "other peaks": rewritten(lambda d: d["peaks"].append([{}, [], "x"])),
    "no kind": rewritten(lambda d: d["made_from"]["made_from"]["images"].pop("kind")),
}


@pytest.mark.parametrize("change", BROKEN_SHARDS.values(), ids=BROKEN_SHARDS)
def test_a_broken_shard_is_a_sentence(change, run, shard, small_cnn, tmp_path):
    path = shard(1, 1)
    change(path)
    assert str(path) in run.fails("merge", small_cnn, path, "-o", tmp_path / "m.cache")
    assert not (tmp_path / "m.cache").exists()


@pytest.fixture(scope="module")
def sound_shard(small_cnn, pictures, tmp_path_factory):
    path = tmp_path_factory.mktemp("changed") / "one.shard"
    write_shard(calibrate(small_cnn, pictures, limit=Choice(limit=2, shard=(1, 2))), path)
    return path, path.read_bytes(), shards.load_shard(path)


@settings(max_examples=200)
@given(data=st.binary(max_size=400), place=st.integers(0, 10**6))
def test_no_change_of_a_shard_passes(data, place, sound_shard):
    path, whole, sound = sound_shard
    at = place % len(whole)
    path.write_bytes(whole[:at] + data + whole[at + len(data) :])
    try:
        found = shards.load_shard(path)
    except CacheError:
        return
    for part in ("share", "made_from", "digests"):
        assert getattr(found, part) == getattr(sound, part)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 5))
def test_shards_share_the_choice_out(count, of, every):
    places, _ = Choice(every=every).choose(count)
    if of > len(places):
        return
    shares = [create_share((number, of), len(places), "") for number in range(1, of + 1)]
    assert sorted([place for share in shares for place in share.positions]) == list(
        range(len(places))
    )
    assert max(len(s.positions) for s in shares) - min(len(s.positions) for s in shares) <= 1


@pytest.mark.parametrize("count", [1, 2])
def test_from_python_shards(small_cnn, pictures, tmp_path, count):
    paths = [tmp_path / f"{number}.shard" for number in range(count)]
    for number, path in enumerate(paths, 1):
        write_shard(calibrate(small_cnn, pictures, limit=Choice(shard=(number, count))), path)
    merged = merge(small_cnn, paths)
    whole = calibrate(small_cnn, pictures)
    assert merged.range_set.scales == whole.range_set.scales
    assert not merged.runs
    assert merged.feed.manifest() == whole.feed.manifest()
    assert HistogramOf().key in {key[2] for key in merged.ranges.observed}
