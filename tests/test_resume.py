"""A calibration that was ended at any moment goes on with --resume, to the same bytes."""

import gc
import itertools
import json
import os
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

from deploy.calibration import checkpoint, shards
from deploy.calibration.checkpoint import Checkpoint, beside
from deploy.calibration.store import files
from deploy.calibration.taps import Line
from deploy.cli import main
from deploy.errors import ConfigError, ExportError
from deploy.feed.parallel import _Line
from tests.conftest import save_small_cnn

HFMG = "batch_num: 3\ncommon_config { hfmg_quantize { num_of_bins: 1024 } }\n"
DMQ = (
    "batch_num: 16\ncommon_config { ifmr_quantize { } dmq_balancer { migration_strength: 0.5 } }\n"
)
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
def odd(pictures, tmp_path_factory) -> Path:
    """20 pictures, of which one outshines the others."""
    made = tmp_path_factory.mktemp("odd") / "pictures"
    shutil.copytree(pictures, made)
    for path in made.iterdir():
        cv2.imwrite(str(path), cv2.imread(str(path)) // 12)
    cv2.imwrite(str(made / "05.png"), np.full((18, 20, 3), 255, np.uint8))
    return made


@pytest.fixture
def folder(odd, tmp_path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(odd, tmp_path / "pictures"))


@pytest.fixture
def often(monkeypatch):
    """A checkpoint between any two samples."""
    monkeypatch.setattr(checkpoint, "EVERY_S", 0)
    monkeypatch.setattr(checkpoint, "_SHARE", 0)


@pytest.fixture
def killed(run, often, monkeypatch, capfd):
    """(samples, words) -> a run that is gone when the checkpoint of so many is written."""

    def call(samples, *words):
        keep = Checkpoint.keep

        def kept(self, number, observed):
            keep(self, number, observed)
            if number >= samples:
                raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(Checkpoint, "keep", kept)
            with pytest.raises(Killed):
                run(*words)
        return capfd.readouterr().err

    return call


def ended_at(sample, send, patched):
    """A signal is sent while that sample is inferred; it and later ones wait until none is drawn.

    Gives the numbers of those that ran.
    """
    ran, count, over = [], itertools.count(1), threading.Event()
    run, finish = Line.run, _Line.finish

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

    patched.setattr(Line, "run", heard)
    patched.setattr(_Line, "finish", finished)
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
def state(small_cnn, odd, tmp_path_factory) -> bytes:
    """The checkpoint of a calibration that was ended after some samples."""
    from deploy import calibrate

    path = tmp_path_factory.mktemp("state") / "c"
    with pytest.MonkeyPatch.context() as patched:
        # to the thread of a worker; the main one acts on it
        ended_at(5, lambda: signal.raise_signal(signal.SIGINT), patched)
        with pytest.raises(KeyboardInterrupt, match="--resume goes on from there"):
            calibrate(small_cnn, odd, checkpoint=path, threads=2)
    return path.read_bytes()


@pytest.fixture
def left(state, tmp_path) -> Path:
    """It, beside the cache of `words`."""
    path = beside(tmp_path / "m.cache")
    path.write_bytes(state)
    return path


def contents(cache: Path) -> list[bytes]:
    return [path.read_bytes() for path in files(cache)]


def in_files(words, folder: Path) -> list:
    """A configuration among the words as a file of it."""
    found = []
    for word in words:
        if isinstance(word, str) and "batch_num" in word:
            (folder / "a.cfg").write_text(word)
            word = folder / "a.cfg"
        found.append(word)
    return found


@pytest.fixture
def words(small_cnn, folder, tmp_path):
    """Of a calibration that writes m.cache in its folder."""
    return ("calibrate", small_cnn, "--images", folder, "-o", tmp_path / "m.cache", "--threads", 2)


def spoil(folder):
    for name in ("00", "09", "19"):
        (folder / f"{name}.png").write_bytes(b"no picture")


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_run_goes_on_to_the_bytes_of_an_unbroken_one(
    way, run, killed, small_cnn, folder, tmp_path
):
    threads, *more = WAYS[way]
    if way == "bad ones":
        spoil(folder)
    words = ["calibrate", small_cnn, "--images", folder, *in_files(more, tmp_path), "-q"]
    whole, cache = tmp_path / "whole.cache", tmp_path / "m.cache"
    assert run(*words, "-o", whole, "--threads", 2)[0] == 0
    go_on = (*words, "-o", cache, "--threads", threads)
    killed(3, *go_on)
    assert not cache.exists() and beside(cache).exists()
    killed(11, *go_on, "--resume")  # and once more
    assert shards.load(beside(cache)).counted >= 11
    assert run(*go_on, "--resume")[0] == 0
    assert contents(cache) == contents(whole)
    assert not beside(cache).exists()


@pytest.mark.parametrize("samples", [1, 4, 5])
def test_a_fixed_batch_whose_last_one_is_filled_goes_on(
    samples, run, killed, small_cnn, pictures, tmp_path
):
    folder = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, tmp_path / "four.onnx")
    spoil(folder)  # 17 are left: 4 batches, and one picture with three of the first ones
    words = ("calibrate", tmp_path / "four.onnx", "--images", folder, "--skip-bad", "-q", "-o")
    assert run(*words, tmp_path / "whole.cache")[0] == 0
    killed(samples, *words, tmp_path / "m.cache")
    assert run(*words, tmp_path / "m.cache", "--resume")[0] == 0
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "whole.cache")


def test_a_shard_goes_on_and_its_checkpoint_is_no_shard(run, killed, small_cnn, folder, tmp_path):
    spoil(folder)
    words = ("calibrate", small_cnn, "--images", folder, "--shard", "2/3", "--skip-bad", "-q", "-o")
    assert run(*words, tmp_path / "whole.shard")[0] == 0
    killed(2, *words, tmp_path / "m.shard")
    left = beside(tmp_path / "m.shard")
    code, _, err = run("merge", small_cnn, left, "-o", tmp_path / "m.cache")
    assert code == 1 and "m.shard.checkpoint" in err and "--resume" in err
    code, _, err = run(*words, tmp_path / "m.shard", "--resume", "--shard", "1/3")
    assert code == 1 and "the shard changed (2/3 -> 1/3)" in err
    assert run(*words, tmp_path / "m.shard", "--resume")[0] == 0
    assert (tmp_path / "m.shard").read_bytes() == (tmp_path / "whole.shard").read_bytes()
    assert not left.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_signal_ends_the_reading_and_says_how_to_go_on(
    number, code, threads, run, interrupted, small_cnn, tmp_path
):
    many = np.random.default_rng(0).normal(size=(500, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", many)
    words = ("calibrate", small_cnn, "--images", tmp_path / "x.npy", "-q", "--threads", threads)
    ended, (said,), ran = interrupted(7, number, *words, "-o", tmp_path / "m.cache")
    assert ended == code and ran < 7 + threads
    counted = shards.load(beside(tmp_path / "m.cache")).counted
    assert counted == ran  # all that were begun are counted
    left = f"; {counted:,} of 500 samples are kept in {beside(tmp_path / 'm.cache')}"
    assert said.endswith(f"{left}: --resume goes on from there")
    assert run(*words, "-o", tmp_path / "m.cache", "--resume")[0] == 0
    assert run(*words, "-o", tmp_path / "whole.cache")[0] == 0
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "whole.cache")


def test_in_the_middle_of_a_batch_the_last_whole_one_is_kept(
    run, often, interrupted, small_cnn, folder, tmp_path
):
    _, *more = WAYS["hfmg"]
    words = ["calibrate", small_cnn, "--images", folder, *in_files(more, tmp_path), "--threads", 1]
    words += ["-q", "-o", tmp_path / "m.cache"]
    code, (said,), _ = interrupted(7, signal.SIGINT, *words)
    assert code == 130 and "4 of 20 samples are kept" in said


def test_what_no_checkpoint_holds_is_said(run, often, interrupted, small_cnn, folder, tmp_path):
    config = in_files([HFMG.replace("hfmg_quantize { num_of_bins: 1024 }", "ifmr_quantize { }")],
                      tmp_path)  # fmt: skip
    words = ("calibrate", small_cnn, "--images", folder, "--target", "ascend", "--exact-ifmr", "-q")
    words += ("--ascend-config", *config, "-o", tmp_path / "m.cache")
    code, (said,), _ = interrupted(2, signal.SIGINT, *words)
    assert code == 130 and "begins anew, since no checkpoint holds 'all values" in said
    assert not beside(tmp_path / "m.cache").exists()
    assert run(*words, "--resume")[0] == 0


def test_a_build_goes_on(run, killed, small_cnn, folder, tmp_path):
    words = ("build", small_cnn, "--images", folder, "--effort", 0, "--duration", 0, "-q", "--out")
    assert run(*words, tmp_path / "whole")[0] == 0
    killed(5, *words, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["small_cnn.cache.checkpoint"]
    assert run(*words, tmp_path / "out", "--resume")[0] == 0
    told = ("report.", "manifest.json", "calib8.toml")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "whole").iterdir())
    for name in names:
        if not name.startswith(told):
            assert (tmp_path / "out" / name).read_bytes() == (
                tmp_path / "whole" / name
            ).read_bytes()
    assert "resume" not in (tmp_path / "out" / "calib8.toml").read_text()
    assert "went on from" in (tmp_path / "out" / "report.md").read_text()


def other_model(words, tmp_path):
    model = onnx.load(save_small_cnn(tmp_path / "small_cnn.onnx"))
    values = onnx.numpy_helper.to_array(model.graph.initializer[0]) * 2
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "w1"))
    onnx.save(model, tmp_path / "small_cnn.onnx")
    return ("calibrate", tmp_path / "small_cnn.onnx", *words[2:])


def other_image(words, tmp_path):
    cv2.imwrite(str(tmp_path / "pictures" / "01.png"), np.zeros((18, 20, 3), np.uint8))
    return words


def an_image_more(words, tmp_path):
    shutil.copy(tmp_path / "pictures" / "01.png", tmp_path / "pictures" / "20.png")
    return words


def other_version(words, tmp_path):
    rewritten(beside(tmp_path / "m.cache"), lambda document: document["made_from"]["made_by"][
        "numbers"].update(calib8="0.0.1"))  # fmt: skip
    return words


FOREIGN = {
    "the model (weights or graph) changed": other_model,
    "got another image 01.png": other_image,
    "the images changed (count 20 -> 21": an_image_more,
    "the preprocessing changed": lambda words, _: (*words, "--preprocess", "imagenet"),
    "skip_bad False -> True": lambda words, _: (*words, "--skip-bad"),
    "the method changed (it lacks histogram, first batch of 2": lambda words, _: (*words, *TRT, 2),
    "it is of histogram of 'c2' too": lambda words, _: (*words, "--keep-float", "*c2"),
    "a version changed (calib8 0.0.1 -> ": other_version,
}


@pytest.mark.parametrize("said", FOREIGN)
def test_a_foreign_checkpoint_is_named_with_what_differs(said, run, left, words, tmp_path):
    changed = FOREIGN[said](words, tmp_path)
    before = left.read_bytes()
    code, _, err = run(*changed, "--resume")
    assert code == 1 and said in err and "leave --resume away to begin anew" in err
    assert left.read_bytes() == before and not (tmp_path / "m.cache").exists()


def test_another_search_of_the_same_histograms_goes_on(run, left, words, tmp_path):
    assert run(*words, "--method", "entropy", "--resume")[0] == 0
    cache = contents(tmp_path / "m.cache")
    assert run(*words, "--method", "entropy", "--refresh")[0] == 0
    assert contents(tmp_path / "m.cache") == cache


def test_a_new_run_says_that_there_is_a_checkpoint_and_spares_it_until_it_has_as_much(
    run, killed, interrupted, words, tmp_path
):
    killed(9, *words)
    left = beside(tmp_path / "m.cache")
    before = left.read_bytes()
    said = killed(9, *words, "--limit", 12)  # of another run, which has as many
    assert said.startswith(f"calib8: note: {left} holds 9 samples") and "--resume" in said
    assert left.read_bytes() != before
    before = left.read_bytes()
    code, (note, said), _ = interrupted(2, signal.SIGINT, *words)
    assert code == 130 and "note" in note and said.endswith("nothing half-written was left behind")
    assert left.read_bytes() == before  # with fewer samples it replaced nothing
    assert run(*words)[0] == 0 and not left.exists()


def test_without_a_checkpoint_the_run_begins_anew_and_says_so(run, words, tmp_path):
    assert run(*words, "--resume", "-q", "--json", tmp_path / "found.json")[0] == 0
    notes = json.loads((tmp_path / "found.json").read_text())["notes"]
    assert any("m.cache.checkpoint is not there to go on from" in one for one in notes)


def test_what_is_left_beside_a_cache_that_fits_goes_away(run, state, left, words):
    assert run(*words, "--resume")[0] == 0 and not left.exists()
    left.write_bytes(state)  # as if killed just before it was removed
    code, out, _ = run(*words, "--resume")
    assert code == 0 and "reused" in out and not left.exists()


@pytest.mark.parametrize("flag", ["--require-cache", "--trust-cache"])
def test_what_never_observes_does_not_go_on(flag, run, words):
    code, _, err = run(*words, "--resume", flag)
    assert code == 1 and flag in err and "--resume" in err


def rewritten(path: Path, change) -> None:
    """The document changed in earnest: with the digest that belongs to it."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    document = json.loads(members["shard.json"])
    change(document)
    document["sha256"] = shards._digest(document)
    members["shard.json"] = json.dumps(document).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def no_archive(path):
    path.write_bytes(b"my notes")


def whole_shard(path):
    rewritten(path, lambda document: document.pop("counted"))


def too_many(path):
    rewritten(path, lambda document: document.update(counted=20))


def too_few(path):
    rewritten(path, lambda document: document.update(counted=document["counted"] - 1))


def skipped_elsewhere(path):
    rewritten(path, lambda document: document["skipped"].update({"19": "why"}))


def peaks_elsewhere(path):
    rewritten(path, lambda document: document["peaks"][0][3].append([1.0, 19]))


def other_schema(path):
    rewritten(path, lambda document: document.update(schema="calib8-shard/9"))


@pytest.mark.parametrize(
    "change",
    [cut, no_archive, whole_shard, too_many, too_few, skipped_elsewhere, peaks_elsewhere,
     other_schema],
)  # fmt: skip
def test_a_broken_checkpoint_is_a_sentence(change, run, left, words, tmp_path):
    change(left)
    before = left.read_bytes()
    code, _, err = run(*words, "--resume")
    assert code == 1 and str(left) in err and "remove it" in err
    assert left.read_bytes() == before and not (tmp_path / "m.cache").exists()


def test_what_calib8_did_not_write_is_not_replaced(run, words, tmp_path):
    notes = beside(tmp_path / "m.cache")
    notes.write_text("mine")
    code, _, err = run(*words)
    assert code == 1 and "--force" in err and notes.read_text() == "mine"
    assert run(*words, "--force")[0] == 0
    notes.mkdir()
    code, _, err = run(*words, "--refresh")
    assert code == 1 and "a folder" in err


def test_a_disk_that_takes_no_checkpoint_ends_no_run(run, often, words, tmp_path, monkeypatch):
    def full(path, data):
        raise ExportError(f"{path} must be writable, got: No space left on device")

    monkeypatch.setattr(checkpoint, "atomic", SimpleNamespace(write_bytes=full))
    code, out, _ = run(*words)
    assert code == 0 and out.count("no checkpoint could be kept: ") == 1


def test_a_run_over_as_few_samples_as_it_takes_keeps_no_checkpoint(
    run, interrupted, left, words, tmp_path
):
    code, _, err = run(*words, "--resume", "--until-stable")
    assert code == 1 and "--until-stable" in err and "--resume" in err
    left.unlink()
    code, (said,), _ = interrupted(5, signal.SIGINT, *words, "--until-stable", "-q")
    assert code == 130 and said.endswith("left behind") and not left.exists()


def test_halves_are_not_told_of_a_run_that_went_on(run, left, words, tmp_path):
    told = tmp_path / "found.json"
    assert run(*words, "--resume", "--json", told)[0] == 0
    found = json.loads(told.read_text())
    assert found["agreement"] is None
    assert any("how far two halves" in note for note in found["notes"])


def test_from_python(small_cnn, folder, state, tmp_path):
    from deploy import calibrate

    with pytest.raises(ConfigError, match="got neither"):
        calibrate(small_cnn, folder, resume=True)
    (tmp_path / "here").write_bytes(state)
    found = calibrate(small_cnn, folder, checkpoint=tmp_path / "here", resume=True)
    assert found.checkpoint == tmp_path / "here"  # to be removed by who keeps what was found
    assert found.found.scales == calibrate(small_cnn, folder).found.scales


_CHILD = """
import os, signal, sys
from deploy.calibration import checkpoint
from deploy.cli import main

checkpoint.EVERY_S = checkpoint._SHARE = 0
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
        ended = subprocess.run(
            [sys.executable, "-c", _CHILD, str(writes), *go_on], cwd=Path(__file__).parent.parent
        )
        assert ended.returncode == -signal.SIGKILL
        assert beside(tmp_path / "m.cache").exists()
    assert run(*words, tmp_path / "m.cache", "--resume")[0] == 0
    assert run(*words, tmp_path / "whole.cache")[0] == 0
    assert contents(tmp_path / "m.cache") == contents(tmp_path / "whole.cache")
