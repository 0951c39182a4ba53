"""A build is complete or not there, and no output destroys other files."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from calib8 import build, calibrate
from deploy import cli, signals
from deploy.calibration import store
from deploy.calibration.store import cache_files, sidecars
from deploy.errors import BackendError, ExportError, Terminated
from deploy.feed.preprocess import Preprocess
from deploy.files import atomic, manifest, staging
from deploy.files.guard import add_input_file, guard_inputs, refuse_output
from deploy.files.staging import recover, stage_files
from deploy.pipeline.evaluate import InnerTensors
from deploy.targets import TARGETS
from deploy.targets.onnxruntime.target import OnnxRuntime
from deploy.tuning.search_options import Tuning
from tests.models import as_float32, make_model, read_markdown, save_net

UNIT = Preprocess(size=(16, 16))
QUICK = {"preprocess": UNIT, "duration_s": 0, "tuning": Tuning(effort=0)}
WORDS = ("--size", "16x16", "--duration", 0, "--effort", 0, "--accept", "--out")


def content(folder: Path) -> dict[str, bytes]:
    """Return name -> bytes of the files in a folder and below; none that is staged or kept."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: p.read_bytes() for name, p in files.items() if atomic.PREFIX not in name}


def write(stage, **named: str) -> None:
    for name, text in named.items():
        atomic.write_text(stage.temporary_folder / name, text)


def unchanged(folder: Path) -> bool:
    """Whether its files are those of its manifest, and no stage is left."""
    found = manifest.read_manifest(folder)
    return not manifest.find_changed_files(folder, found) and not list(folder.rglob(".*"))


def broken(self, request):
    raise BackendError("it must work, got nothing; try again")


def test_files_appear_together_and_equal_ones_stay_as_old_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(0o600)
    (tmp_path / "same").write_text("same")
    os.utime(tmp_path / "same", (1, 1))
    with stage_files(tmp_path) as stage:
        write(stage, a="new", same="same", b="b")
        assert content(tmp_path) == {"a": b"old", "same": b"same"}
        stage.publish(lambda: write(stage, last="last"))
    assert content(tmp_path) == {"a": b"new", "same": b"same", "b": b"b", "last": b"last"}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "same").stat().st_mtime == 1 and not list(tmp_path.glob(".*"))
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError))  # another user's
    with stage_files(tmp_path) as stage:
        write(stage, a="own")  # of the same size
        stage.publish()
    assert (tmp_path / "a").read_text() == "own"


def test_what_is_not_published_is_gone_and_so_is_a_folder_made_for_it(tmp_path):
    with pytest.raises(KeyError), stage_files(tmp_path / "x" / "out") as stage:
        write(stage, a="new")
        raise KeyError
    assert not (tmp_path / "x").exists()


def test_an_input_or_a_folder_in_the_way_stops_all_of_it(tmp_path):
    (tmp_path / "b").write_text("input")
    (tmp_path / "c").mkdir()
    for name in ("b", "c"):
        with guard_inputs(), stage_files(tmp_path) as stage:
            add_input_file(tmp_path / "b")
            write(stage, a="new", **{name: "new"})
            with pytest.raises(ExportError):
                stage.publish()
        assert content(tmp_path) == {"b": b"input"}


def test_records_go_below_and_never_through_a_link(tmp_path):
    """A planted link would let a build replace files of another folder."""
    (tmp_path / "out").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "out/calib8").symlink_to("../mine")
    with stage_files(tmp_path / "out") as stage:
        atomic.write_text(stage.records / "a", "new")
        with pytest.raises(ExportError, match="symbolic link"):
            stage.publish()
        (tmp_path / "out/calib8").unlink()
        stage.publish()
    assert content(tmp_path) == {"out/calib8/a": b"new"}


def precious(tmp_path, *names):
    """A folder of the user's, elsewhere, and an output folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "out/calib8").mkdir(parents=True)
    for name in names:
        (tmp_path / "mine" / name).write_text("precious")
    return tmp_path / "mine", tmp_path / "out"


CACHE = ("x.cache", "x.cache.json", "x.cache.npz")


@pytest.mark.parametrize("journal", [False, True])
def test_a_link_that_is_called_like_a_stage_leads_nowhere(journal, tmp_path):
    mine, out = precious(tmp_path, *CACHE, "notes.txt")
    if journal:
        (mine / "publishing.json").write_text('["notes.txt", "x.cache"]')
    (out / ".calib8-x").symlink_to("../mine")
    before = content(mine)
    recover(out)
    with stage_files(out) as stage:
        write(stage, a="new")
        stage.publish()
    assert content(mine) == before and content(out) == {"a": b"new"}


@pytest.mark.parametrize("where", [".calib8-kept", "calib8/.calib8-kept"])
def test_a_link_that_is_called_like_a_kept_calibration_leads_nowhere(where, tmp_path):
    mine, out = precious(tmp_path, *CACHE)
    (out / where).symlink_to(mine)
    before = content(mine)
    for publish in (False, True):
        with stage_files(out) as stage:
            folder = stage.records if "/" in where else stage.temporary_folder
            for name in CACHE:
                atomic.write_text(folder / name, "new")
            if publish:
                stage.publish()
    assert content(mine) == before
    assert staging.find_saved_calibration((out / where).parent / "x.cache") is None


def test_a_staged_link_is_not_moved_and_what_it_leads_to_is_as_it_was(tmp_path):
    mine, out = precious(tmp_path, "a")
    (mine / "a").chmod(0o600)
    (out / ".calib8-x").mkdir()
    (out / ".calib8-x/a").symlink_to(mine / "a")
    (out / ".calib8-x/publishing.json").write_text('["a"]')
    recover(out)
    assert (mine / "a").stat().st_mode & 0o777 == 0o600 and not (out / "a").exists()


def test_verify_changes_nothing_and_tells_files_of_two_builds(made, run, wording):
    out, _ = made
    stage = out / ".calib8-x"
    stage.mkdir()
    (stage / "report.md").write_text("new")
    (stage / "publishing.json").write_text('["report.md"]')
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    wording.check(run.fails("verify", out))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_rename_that_fails_is_tried_again_and_then_left_to_the_next_run(tmp_path, monkeypatch):
    whole, left = Path.replace, [1]

    def failing(self, goal):
        if Path(goal).parent == tmp_path and Path(goal).name == "b" and left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return whole(self, goal)

    monkeypatch.setattr(Path, "replace", failing)
    with stage_files(tmp_path) as stage:
        write(stage, a="1", b="1", c="1")
        stage.publish()
    assert content(tmp_path) == {"a": b"1", "b": b"1", "c": b"1"}
    left[0] = 10
    with stage_files(tmp_path) as stage:
        write(stage, a="2", b="2", c="2")
        with pytest.raises(ExportError, match="finishes the publication"):
            stage.publish()
    left[0] = 0
    recover(tmp_path)
    assert content(tmp_path) == {"a": b"2", "b": b"2", "c": b"2"}
    assert not list(tmp_path.glob(".*"))


KILLED = """
import os, sys
from pathlib import Path
from deploy.files import atomic, staging

at = calls = 0

def counted(plain):
    def call(*words, **named):
        global calls
        calls += 1
        if calls == at:
            os._exit(9)
        return plain(*words, **named)
    return call

def publish(out):
    for name in ("replace", "unlink", "mkdir", "chmod"):
        setattr(Path, name, counted(getattr(Path, name)))
    os.fsync = counted(os.fsync)
    with staging.stage_files(out) as stage:
        for name in "ab":
            atomic.write_text(stage.temporary_folder / name, "new")
        atomic.write_text(stage.records / "c", "new")
        stage.publish()
    os._exit(0)

ended = 9
while ended == 9:
    at += 1
    out = Path(sys.argv[1], str(at))
    (out / "calib8").mkdir(parents=True)
    for name in ("a", "b", "calib8/c"):
        (out / name).write_text("old")
    if os.fork() == 0:
        publish(out)
    ended = os.waitstatus_to_exitcode(os.wait()[1])
print(at, ended)
"""


@pytest.mark.slow
def test_a_process_killed_at_any_call_leaves_the_old_files_or_the_next_run_all_new(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
    )
    last, ended = map(int, done.stdout.split())
    assert ended == 0 and last > 16, done.stderr
    states = []
    for at in range(1, last + 1):
        recover(out := tmp_path / str(at))
        states += (found := set(content(out).values()))
        assert set(content(out)) == {"a", "b", "calib8/c"} and len(found) == 1, at
        assert not list(out.glob(".*"))
    assert set(states[:-1]) == {b"old", b"new"} and states[-1] == b"new"


@pytest.mark.parametrize("where", ["", "calib8"])
def test_a_living_process_keeps_its_files(where, tmp_path):
    (folder := tmp_path / where).mkdir(exist_ok=True)
    with stage_files(tmp_path) as stage:
        write(stage, a="new")
        handle, path = atomic.create_claimed_file(folder, prefix=atomic.PREFIX)
        recover(tmp_path)
        assert path.exists() and (stage.temporary_folder / "a").exists()
        os.close(handle)
        recover(tmp_path)
        assert not path.exists() and (stage.temporary_folder / "a").exists()


def test_one_run_at_a_time_changes_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_LOCK_TIMEOUT_S", 0.05)
    refused = pytest.raises(ExportError, match="one run at a time")
    with atomic.lock_folder(tmp_path), refused, atomic.lock_folder(tmp_path):
        pass


@pytest.fixture
def made(small_cnn, pictures, tmp_path):
    """A build in a folder, and a function that builds into it again."""
    again = functools.partial(build, small_cnn, pictures, out=tmp_path / "out", **QUICK)
    again()
    return tmp_path / "out", again


def test_a_build_names_its_files_and_verify_reads_them(made, run):
    out, _ = made
    found = manifest.read_manifest(out)
    assert {*content(out)} == {*found.files, manifest.MANIFEST_NAME}
    assert {*content(out)} > {*manifest.PAGES, "small_cnn.int8.onnx"} and unchanged(out)
    assert {"calib8", "onnxruntime", "opencv"} <= found.made_from["versions"].keys()
    report = json.loads((out / "report.json").read_text())
    rows = [*report["files"], *report["targets"][0]["files"]]
    digests = [row for row in rows if "sha256" in row]
    told = {Path(row["path"]).relative_to(out).as_posix(): row["sha256"] for row in digests}
    assert told.items() <= found.files.items()
    assert {"calib8/small_cnn.cache", "small_cnn.int8.onnx"} <= told.keys()
    assert all(Path(row["path"]).exists() for row in rows)
    assert f"{len(found.files)} of {len(found.files)} files are as" in run.ok("verify", out)


def test_verify_tells_a_build_that_is_not_whole(made, run, wording):
    out, again = made
    engine, listed = out / "small_cnn.int8.onnx", out / manifest.MANIFEST_NAME
    engine.write_bytes(engine.read_bytes() + b"\0")
    code, said, _ = run("verify", out)
    assert code == 1 and "small_cnn.int8.onnx was changed" in said
    engine.unlink()
    code, said, _ = run("verify", out)
    assert code == 1 and "small_cnn.int8.onnx is missing" in said
    listed.write_text('{"schema": "other", "files": {}}')
    wording.check(run.fails("verify", out))
    listed.unlink()
    wording.check(run.fails("verify", out))
    again(method="minmax")  # a build from before there were manifests is known by its report
    assert unchanged(out)


def test_verify_looks_at_a_cache_elsewhere_too(small_cnn, pictures, tmp_path, run):
    cache, out = tmp_path / "kept" / "x.cache", tmp_path / "out"
    cache.parent.mkdir()
    run.ok("build", small_cnn, "--images", pictures, *WORDS, out, "--cache", cache)
    assert f"{cache}, the cache, is as the build left it" in run.ok("verify", out)
    cache.write_text(cache.read_text() + "y: 3c010a14\n")
    code, said, _ = run("verify", out)
    assert code == 1 and f"{cache}, the cache, was changed after it was written" in said
    cache.unlink()
    assert f"{cache}, the cache, is not here" in run.ok("verify", out)


def test_an_engine_of_an_earlier_build_that_stays_is_told(made, small_cnn, pictures, command):
    """Whoever goes on with X.int8.onnx would deploy what this build did not make."""
    out, _ = made
    words = ("build", small_cnn, "--images", pictures, "--size", "16x16", "--duration", 0)
    words += ("--accept", "--out", out)
    command(*words, "--effort", 0)
    assert "of an earlier one" not in read_markdown(out)
    plan = small_cnn.parent / "float.toml"
    plan.write_text('schema = "calib8-plan/1"\nfloat = ["*"]\n')
    command(*words, "--plan", plan)
    assert (out / "small_cnn.int8.onnx").exists() and (out / "small_cnn.float.onnx").exists()
    told = f"not of this build, but of an earlier one in {out}: small_cnn.int8.onnx"
    assert told in read_markdown(out)


def test_files_of_another_model_stay_and_are_told_apart(made, small_cnn, pictures, run):
    out, again = made
    other = Path(shutil.copy(small_cnn, out.parent / "other.onnx"))
    run.ok("build", other, "--images", pictures, *WORDS, out)
    assert "small_cnn.int8.onnx is of an earlier build" in run.ok("verify", out)
    again()  # and may be built again
    earlier = manifest.read_manifest(out).earlier
    assert "other.int8.onnx" in earlier
    assert manifest.MANIFEST_NAME not in earlier  # it was replaced with the build


FOREIGN_NAMES = ["report.html", "small_cnn.int8.onnx", "calib8/manifest.json", "calib8.toml"]


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_a_build_never_replaces_foreign_files(name, small_cnn, pictures, tmp_path, run, wording):
    (tmp_path / "calib8").mkdir()
    (tmp_path / name).write_text("mine")
    words = ("build", small_cnn, "--images", pictures, *WORDS, tmp_path)
    wording.check(run.fails(*words))
    wording.check(run.fails(*words, "--out", tmp_path / name))
    assert content(tmp_path) == {name: b"mine"}
    run.ok(*words, "--force")
    assert unchanged(tmp_path)


def test_a_build_that_fails_leaves_the_old_one_and_its_calibration_to_the_next(made, monkeypatch):
    out, again = made
    before = content(out)
    with monkeypatch.context() as patched, pytest.raises(BackendError):
        patched.setattr(OnnxRuntime, "build", broken)
        again(limit=7)
    assert content(out) == before
    report = again(limit=7)
    assert report.calibration.reused and "did not end" in report.calibration.reason
    assert unchanged(out)
    assert content(out)["calib8/small_cnn.cache"] != before["calib8/small_cnn.cache"]


@pytest.mark.parametrize("where", ["build", "open", "measure"])
def test_a_target_that_fails_leaves_no_file(where, small_cnn, pictures, tmp_path, run, monkeypatch):
    """A file that no runtime opens was kept and listed, and `verify` vouched for it."""
    monkeypatch.delenv("CALIB8_TRACEBACK", raising=False)
    owner, name = (InnerTensors, "_tap") if where == "measure" else (OnnxRuntime, where)
    whole = getattr(owner, name)

    def failing(self, *words, **named):
        whole(self, *words, **named)  # its files are written
        if where == "open":
            raise BackendError("no engine")
        if where == "build" or words[1].target == "onnxruntime":
            raise TypeError("int")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        words = ("build", small_cnn, "--images", pictures, *WORDS, tmp_path, "--threads", 2)
        words += ("--target", "onnxruntime,tensorrt", "--duration", 0.01)
        assert run(*words)[0] == 1
    report = json.loads((tmp_path / "report.json").read_text())
    found = {target["name"]: target for target in report["targets"]}
    assert found["onnxruntime"]["error"] and not found["onnxruntime"].get("files")
    assert not found["tensorrt"].get("error") and found["tensorrt"]["files"]
    assert not list(tmp_path.glob("*.int8.onnx")) and not list(tmp_path.glob("*_run.py"))
    assert unchanged(tmp_path) and (tmp_path / "calib8/small_cnn.cache").exists()
    if where != "open":
        assert "TypeError: int" in (tmp_path / "calib8/small_cnn.log").read_text()


def test_a_cache_elsewhere_is_kept_as_it_is_made(small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(OnnxRuntime, "build", broken)
    cache = tmp_path / "caches" / "x.cache"
    with pytest.raises(BackendError):
        build(small_cnn, pictures, out=tmp_path / "out", cache=cache, **QUICK)
    assert all(path.exists() for path in cache_files(cache)) and not (tmp_path / "out").exists()
    assert calibrate(small_cnn, pictures, preprocess=UNIT, cache=cache).reused


@pytest.mark.slow
def test_builds_at_once_leave_one_of_them(small_cnn, pictures, tmp_path):
    out = tmp_path / "out"
    words = ("-m", "deploy", "build", small_cnn, "--images", pictures, *WORDS, out, "--limit")
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}

    def run(number: int) -> int:
        own = [*words, number + 4, "--method", ("mse", "minmax")[number % 2]]
        own = [sys.executable, *map(str, own)]
        return subprocess.run(own, env=environment, capture_output=True, check=False).returncode

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(run, range(4))) == {0}
    found = manifest.read_manifest(out)
    assert unchanged(out)
    report = json.loads((out / "report.json").read_text())
    fingerprint = json.loads((out / "calib8/small_cnn.cache.json").read_text())["fingerprint"]
    assert report["feed"]["samples"] == fingerprint["made_from"]["images"]["count"]
    method = fingerprint["made_by"]["method"]
    assert report["calibration"]["method"] == method == found.made_from["method"]
    cache = out / "calib8/small_cnn.cache"
    last = calibrate(small_cnn, pictures, preprocess=UNIT, method="entropy", cache=cache)
    assert {scale.method for scale in last.range_set.scales.values()} == {"entropy"}


def test_every_file_that_a_build_may_write_is_declared(small_cnn, pictures, tmp_path):
    targets = [kind() for kind in TARGETS.values()]
    report = build(small_cnn, pictures, out=tmp_path, targets=targets, **QUICK)
    for target, part in zip(targets, report.targets, strict=True):
        names = [Path(row.path).name for row in part.files]
        assert names and all(n.removeprefix("small_cnn") in target.writes for n in names)
    assert staging.saved_calibration_path(tmp_path / "small_cnn.cache").parent.exists() is False


def test_a_journal_that_somebody_put_there_moves_nothing_out_of_its_folder(tmp_path):
    folder = tmp_path / "o"
    (folder / ".calib8-x").mkdir(parents=True)
    for name in ("a", "b"):
        (folder / ".calib8-x" / name).write_text(name)
    (tmp_path / "victim").write_text("mine")
    names = ["../../victim", "../victim", "..", ".", "", "/etc/x", 3, "a\0", "a"]
    (folder / ".calib8-x" / "publishing.json").write_text(json.dumps(names))
    (folder / "victim").write_text("source")
    staging.recover(folder)
    assert (tmp_path / "victim").read_text() == "mine" and (folder / "victim").exists()
    assert (folder / "a").read_text() == "a" and not (folder / ".calib8-x").exists()


ROOT = Path(__file__).parent.parent
INPUT = "an output must not be an input"
INPUTS = ("model", "photo", "hard link", "symbolic link", "other spelling", "labels")
PLACES = (*INPUTS[:-1], "text", "foreign cache", "fifo", "below a file")
ENDED = {130: "interrupted", 143: "terminated"}
SIGNALS = [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)]  # the code of each, and threads
FOREIGN = b"TRT-100300-EntropyCalibration2\nimages: 3c010a14\n"


@pytest.fixture
def model(small_cnn, tmp_path):
    """A copy that a test may lose."""
    return Path(shutil.copy(small_cnn, tmp_path / "m.onnx"))


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("build", "labels"),
        *((c, what) for c in ("build", "calibrate") for what in PLACES),
    ],
)
def test_a_cache_replaces_no_foreign_file(command, what, run, model, pictures, tmp_path):
    photos = shutil.copytree(pictures, tmp_path / "photos")
    known = {"model": model, "photo": next(photos.iterdir()), "below a file": model / "x"}
    known["other spelling"] = photos / ".." / model.name
    victim = known.get(what, tmp_path / "victim")
    if what.endswith("link"):
        (victim.hardlink_to if what == "hard link" else victim.symlink_to)(model)
    elif what in ("text", "labels", "foreign cache"):
        victim.write_bytes(FOREIGN if what == "foreign cache" else b"3\n" * 20)
    elif what == "fifo":
        os.mkfifo(victim)
    before = victim.read_bytes() if victim.is_file() else None
    words = ["--images", photos]
    words += ["--cache", victim, "--out", tmp_path / "o"] if command == "build" else ["-o", victim]
    words += ["--eval-images", photos, "--labels", victim] if what == "labels" else []
    said = run.fails(command, model, *words)
    assert (INPUT in said) == (what in INPUTS)
    assert ("got a device" in said) == (what == "fifo")
    assert ("can be written to" in said) == (what == "below a file")
    assert ("--force" in said) == (what in ("text", "foreign cache"))
    assert before is None or victim.read_bytes() == before
    assert not list(tmp_path.glob("victim.*"))


def test_arrays_beside_a_cache_of_their_name_are_not_replaced(run, model, tmp_path):
    data = tmp_path / "data.npz"
    np.savez(data, image=np.ones((8, 3, 16, 16), np.float32))
    before = data.read_bytes()
    words = ("build", model, "--images", data, "--cache", tmp_path / "data", "--out", tmp_path)
    for more in ((), ("--force",)):  # nothing forces an input
        assert INPUT in run.fails(*words, *more)
    assert data.read_bytes() == before


def test_force_replaces_foreign_files_and_any_run_a_crashs(run, model, pictures, tmp_path):
    cache = tmp_path / "c.cache"
    cache.write_bytes(FOREIGN)
    words = ("calibrate", model, "--images", pictures, "-o", cache)
    run.fails(*words)
    run.ok(*words, "--force")
    whole, files = cache.read_bytes(), (cache, *sidecars(cache))
    assert whole != FOREIGN
    for lost in (files[:1], files[1:2], files[:2]):  # killed between the writes of the three files
        for path in lost:
            path.unlink()
        run.ok(*words)
        assert cache.read_bytes() == whole
    files[0].write_bytes(b"")  # as mktemp leaves it
    for sidecar in files[1:]:
        sidecar.unlink()
    run.ok(*words)
    assert cache.read_bytes() == whole


def test_a_function_of_python_does_not_replace_the_model(model, pictures, tmp_path, wording):
    before = model.read_bytes()
    with pytest.raises(ExportError) as refusal:
        calibrate(model, pictures, cache=model)
    wording.check(refusal.value)
    with pytest.raises(ExportError) as refusal:
        build(model, pictures, cache=model, out=tmp_path / "o")
    wording.check(refusal.value)
    assert model.read_bytes() == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_device_or_a_folder_is_never_replaced(make, tmp_path, wording):
    path = tmp_path / "a"
    make(path)
    with pytest.raises(ExportError) as refusal:
        atomic.write_text(path, "new")
    wording.check(refusal.value)
    with pytest.raises(ExportError) as refusal:
        store.refuse_foreign_cache(Path("/"), force=False)
    wording.check(refusal.value)
    with pytest.raises(ExportError) as refusal:
        refuse_output("/dev/null")
    wording.check(refusal.value)


def test_what_stands_in_dev_is_a_device_wherever_it_leads(tmp_path):
    """`-o /dev/stdout > file` leads to a plain file; a rename would put one in the link's place."""
    program = "from deploy.files.guard import refuse_output; refuse_output('/dev/stdout')"
    words = [sys.executable, "-c", program]
    with (tmp_path / "said").open("w") as file:
        done = subprocess.run(words, cwd=ROOT, stdout=file, stderr=subprocess.PIPE, check=False)
    assert b"/dev/stdout must be a file to write to, got a device" in done.stderr


def test_an_output_is_judged_again_before_it_is_replaced(tmp_path, wording):
    path = tmp_path / "a"
    with guard_inputs():
        manifest.name_output(path, "page")
        path.write_text("mine")  # while the run works
        with pytest.raises(ExportError) as refusal:
            atomic.write_text(path, "new")
        wording.check(refusal.value)
    assert path.read_text() == "mine"


def test_what_one_run_reads_another_may_write(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    add_input_file(path)  # in no run
    with guard_inputs():
        add_input_file(path)
        with guard_inputs(), pytest.raises(ExportError, match="must not be an input"):
            atomic.write_text(path, "new")
    assert atomic.write_text(path, "new").read_text() == "new"


@pytest.fixture
def slow(tmp_path):
    """A model and inputs that take tens of seconds."""
    rng = np.random.default_rng(0)
    weights = {
        "sizes": [1, 1, 4, 4],
        "w1": rng.normal(0, 0.1, (128, 3, 3, 3)),
        "w2": rng.normal(0, 0.05, (128, 128, 3, 3)),
        "w3": rng.normal(0, 0.05, (8, 128, 3, 3)),
    }
    convs = {"a": "r w1", "b": "a w2", "y": "b w3"}
    nodes = [("Conv", reads, out, {"pads": [1, 1, 1, 1]}) for out, reads in convs.items()]
    nodes.insert(0, ("Resize", ["x", "", "sizes"], "r"))
    inputs = {"x": ["batch", 3, 16, 16]}
    model = make_model(nodes, inputs, {"y": None}, as_float32(weights), opset=17)
    np.save(tmp_path / "x.npy", rng.normal(size=(4000, 3, 16, 16)).astype(np.float32))
    return save_net(model, tmp_path / "slow.onnx"), tmp_path / "x.npy"


@pytest.fixture
def endless(tmp_path):
    """A model whose inference never ends, and an input."""
    value = "float[n, 8, 8, 8]"
    body = f"b (int64 i, bool c, {value} s) => (bool d, {value} t) {{ d = Not(f) t = Relu(s) }}"
    weights = {"w1": np.ones((8, 3, 3, 3)), "w2": np.ones((8, 8, 3, 3))}
    nodes = [("Conv", "x w1", "a"), ("Conv", "a w2", "b"), ("Not", "f", "c")]
    nodes.append(("Loop", ["", "c", "b"], "endless", {"body": onnx.parser.parse_graph(body)}))
    constants = {**as_float32(weights), "f": np.array(False)}
    model = make_model(nodes, {"x": ["n", 3, 12, 12]}, {"endless": None}, constants, opset=17)
    np.save(tmp_path / "x.npy", np.ones((4, 3, 12, 12), np.float32))
    return save_net(model, tmp_path / "endless.onnx"), tmp_path / "x.npy"


TELLING = """
import sys
from deploy import cli, signals, terminal
from deploy.runtimes.ort import CpuSession
terminal.LASTING_S = terminal.TICK_S = terminal.EVERY_S = 0.01
def say_and_run(session, feed, run=CpuSession.run):
    said = " ".join(("runs", *(spec.name for spec in session.outputs)))
    print(said, file=sys.stderr, flush=True)  # one text: another thread prints too
    return run(session, feed)
CpuSession.run = say_and_run
signals.GRACE_S = float(sys.argv.pop(1))
cli.main()
"""
HOLDING = """
from ctypes import PyDLL
from itertools import repeat
def load():
    yield sum(map(PyDLL(None).write, repeat(2), repeat(b"no end"), repeat(6)))
"""  # C code alone runs from the first word on, and lets no other thread run


@pytest.fixture
def signalled(tmp_path):
    """(model, data, a pattern of its screen, send, words) -> a build to which `send` sends.

    `grace`: seconds in which inferences may end.
    Gives its exit code, its last line, and its files.
    """

    def call(model, data, pattern, send, *words, grace=300):
        out = tmp_path / "out"
        words = ("-c", TELLING, grace, "build", model, "--images", data, "--out", out, *words)
        started = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stderr=subprocess.PIPE,
            cwd=ROOT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it
        )
        said = b""
        try:
            while not re.search(pattern, said):
                piece = os.read(started.stderr.fileno(), 1000)
                assert piece and len(said) < 1 << 20, said[-2000:]
                said += piece
            send(started)
            _, rest = started.communicate(timeout=300)
        finally:
            started.kill()
        last = (said + rest).decode().strip().splitlines()[-1]
        return started.returncode, last, list(out.rglob("*.*"))

    return call


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "threads"), SIGNALS)
def test_a_signal_leaves_nothing_half_written(number, code, threads, slow, signalled, tmp_path):
    ended, last, files = signalled(
        *slow, rb"observing: \d+ of", lambda run: run.send_signal(number), "--threads", threads
    )
    left = tmp_path / "out/calib8/slow.cache.checkpoint"
    assert ended == code
    assert re.fullmatch(
        f"calib8: {ENDED[code]}; nothing half-written was left behind; [0-9,]+ of 4,000 samples"
        f" are kept in {left}: --resume goes on from there",
        last,
    )
    assert files == [left]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "threads"), SIGNALS)
def test_a_signal_ends_an_inference_that_never_ends(number, code, threads, endless, signalled):
    words = (*endless, b"runs .*endless", lambda run: run.send_signal(number))
    ended, last, files = signalled(*words, "--threads", threads, grace=0.1)
    assert (ended, files) == (code, [])
    assert last == f"calib8: {ENDED[code]}; nothing half-written was left behind"


@pytest.mark.slow
def test_a_second_interrupt_ends_what_no_python_code_can_end(slow, signalled, tmp_path):
    def insist(run):
        for _ in range(3000):  # two that arrive together are one
            run.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return run.wait(0.1)

    (tmp_path / "loader.py").write_text(HOLDING)
    assert signalled(slow[0], tmp_path / "loader.py:load", b"no end", insist)[0] == -signal.SIGINT


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
def test_a_signal_to_a_forked_process_stops_nothing_here():
    with signals.end_on_signals():
        child = os.fork()
        if not child:
            os._exit(signal.set_wakeup_fd(-1) != -1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("kind", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
@pytest.mark.parametrize("deep", [1, 2])
def test_a_signal_that_became_an_error_is_a_signal(kind, code, deep, run, monkeypatch):
    def command(**_):
        try:
            try:
                raise kind
            except BaseException as signal:
                raise ImportError("initialization failed") from (signal if deep == 1 else None)
        except ImportError as error:
            raise ValueError("a second one") from error

    monkeypatch.setattr(cli.cli, "main", command)
    assert run()[::2] == (code, f"calib8: {ENDED[code]}; nothing half-written was left behind\n")


def test_a_sentence_that_quotes_a_file_has_a_gap_and_the_way_out(run, model, pictures, tmp_path):
    (tmp_path / "list.txt").write_text("n" * 30_000 + ".png\n")
    said = run.fails("build", model, "--images", tmp_path / "list.txt", "--out", tmp_path / "o")
    assert 3000 < len(said) < 4500
    assert "nnn ... nnn" in said and said.endswith("skip bad ones (--skip-bad)\n")
    code, _, said = run("build", model, "--images", pictures, "--duration", "1" * 30_000 + "x")
    assert code == 2 and len(said) < 4500 and said.endswith("--help` tells more)\n")


def test_labels_of_a_pipe_or_of_thirty_digits_are_refused(run, model, pictures, tmp_path, wording):
    words = ("build", model, "--images", pictures, "--eval-images", pictures)
    words += ("--out", tmp_path / "o", "--labels")
    for name in ("pipe.txt", "pipe.json"):
        os.mkfifo(tmp_path / name)
        wording.check(run.fails(*words, tmp_path / name))
    (tmp_path / "labels.txt").write_text("1\n" * 19 + f"{10**30}\n")
    assert "line 20" in run.fails(*words, tmp_path / "labels.txt")


def test_an_input_that_another_run_replaced_hides_no_output(tmp_path, wording):
    read, output, new = (tmp_path / name for name in ("read", "output", "new"))
    read.write_text("old")
    os.link(read, output)
    with guard_inputs():
        add_input_file(read)
        with pytest.raises(ExportError) as refusal:
            refuse_output(output)
        wording.check(refusal.value)
        new.write_text("new")
        os.replace(new, read)  # a file made later may get the inode of what stood here
        refuse_output(output)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.raw"])
@pytest.mark.parametrize("place", ["", "folder"])
def test_arrays_of_a_pipe_are_not_waited_for(name, place, run, model, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / place / name)
    arrays = tmp_path / place if place else tmp_path / name
    said = run.fails("calibrate", model, "--images", arrays, "-o", tmp_path / "c.cache")
    assert "a device or pipe" in said


def renamed(model, old, new, path):
    """Save a model of which a tensor has another name."""
    changed = onnx.load(model)
    for node in changed.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in changed.graph.input:
        value.name = new if value.name == old else value.name
    return save_net(changed, path)


def test_names_run_nothing_when_a_printed_line_is_pasted(run, model, tmp_path):
    path = renamed(model, "x", "in;touch Y", tmp_path / "m $(touch X).onnx")
    x = tmp_path / "x.npy"
    np.save(x, np.random.default_rng(0).normal(size=(8, 3, 16, 16)).astype(np.float32))
    out = tmp_path / "o"
    words = ("--target", "tensorrt", "--out", out, "--duration", 0, "--effort", 0, "--accept")
    run.ok("build", path, "--images", x, *words)
    notes = json.loads((out / "report.json").read_text())["targets"][0]["notes"]
    lines = [note.split(": ", 1)[1] for note in notes if ": trtexec " in note]
    assert len(lines) == 4
    trtexec = tmp_path / "bin" / "trtexec"
    trtexec.parent.mkdir()
    trtexec.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    trtexec.chmod(0o755)
    own = {"PATH": f"{trtexec.parent}:{os.environ['PATH']}"}
    for line in lines:
        done = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=own, capture_output=True, text=True, check=True
        )
        words = done.stdout.splitlines()
        assert any(word.startswith("--onnx=m $(touch X).tensorrt") for word in words)
        assert "--optShapes=in;touch Y:1x3x16x16" in words
    assert not (tmp_path / "X").exists() and not (tmp_path / "Y").exists()


def test_only_tensorrts_text_minds_a_line_break_in_a_name(run, model, pictures, tmp_path):
    renamed(model, "r2", "r\n2", model)
    out = tmp_path / "o"
    words = ("build", model, "--images", pictures, *WORDS, out)
    run.fails(*words, "--target", "onnxruntime,tensorrt,ascend")
    found = json.loads((out / "report.json").read_text())["targets"]
    errors = {target["name"]: target.get("error") for target in found}
    assert "got 'r\\n2'" in errors["tensorrt"]
    assert not errors["onnxruntime"] and not errors["ascend"]
    assert "r3: " in (out / "calib8/m.cache").read_text()
    run.ok(*words, "--target", "onnxruntime,ascend", "--require-cache")
    said = run.fails(*words, "--target", "tensorrt", "--out", tmp_path / "p")
    assert "rename the tensor" in said and not list((tmp_path / "p").rglob("*.cache"))


def test_a_name_in_a_remedy_is_quoted(run, tmp_path):
    model = make_model([("Relu", ["in;touch Y"], "y")], {"in;touch Y": [1, "h"]}, {"y": None})
    path = save_net(model, tmp_path / "m.onnx")
    assert "--shape 'in;touch Y:1x224'" in run.fails("bench", path, "--duration", 0)
