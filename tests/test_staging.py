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
from deploy.pipeline import evaluate
from deploy.targets import TARGETS
from deploy.targets.onnxruntime.target import OnnxRuntime
from deploy.tuning.search_options import Tuning
from tests.models import as_float32, make_model, read_markdown, rename_tensor, save_net

UNIT = Preprocess(size=(16, 16))
QUICK = {"preprocess": UNIT, "duration_s": 0, "tuning": Tuning(effort=0)}
QUICK_OPTIONS = ("--size", "16x16", "--duration", 0, "--effort", 0, "--accept", "--out")


def read_contents(folder: Path) -> dict[str, bytes]:
    """Return name -> bytes of the files in a folder and below; none that is staged or kept."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: p.read_bytes() for name, p in files.items() if atomic.PREFIX not in name}


def write_stage(stage, **named: str) -> None:
    for name, text in named.items():
        atomic.write_text(stage.temporary_folder / name, text)


def matches_manifest(folder: Path) -> bool:
    """Return whether a folder's files are those of its manifest, and no stage is left."""
    contents = manifest.read_manifest(folder)
    return not manifest.find_changed_files(folder, contents) and not list(folder.rglob(".*"))


def raise_backend_error(self, request):
    raise BackendError("it must work, got nothing; try again")


def test_files_appear_together(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(0o600)
    with stage_files(tmp_path) as stage:
        write_stage(stage, a="new", b="b")
        assert read_contents(tmp_path) == {"a": b"old"}
        stage.publish(lambda: write_stage(stage, last="last"))
    assert read_contents(tmp_path) == {"a": b"new", "b": b"b", "last": b"last"}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".*"))


def test_unpublished_files_and_folder_are_removed(tmp_path):
    with pytest.raises(KeyError), stage_files(tmp_path / "x" / "out") as stage:
        write_stage(stage, a="new")
        raise KeyError
    assert not (tmp_path / "x").exists()


def test_input_or_folder_stops_publishing(tmp_path):
    (tmp_path / "b").write_text("input")
    (tmp_path / "c").mkdir()
    for name in ("b", "c"):
        with guard_inputs(), stage_files(tmp_path) as stage:
            add_input_file(tmp_path / "b")
            write_stage(stage, a="new", **{name: "new"})
            with pytest.raises(ExportError):
                stage.publish()
        assert read_contents(tmp_path) == {"b": b"input"}


def test_records_never_go_through_links(tmp_path):
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
    assert read_contents(tmp_path) == {"out/calib8/a": b"new"}


def make_precious_folder(tmp_path, *names):
    """A folder of the user's, elsewhere, and an output folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "out/calib8").mkdir(parents=True)
    for name in names:
        (tmp_path / "mine" / name).write_text("precious")
    return tmp_path / "mine", tmp_path / "out"


CACHE = ("x.cache", "x.cache.json", "x.cache.npz")


@pytest.mark.parametrize("journal", [False, True])
def test_link_named_like_stage_is_ignored(journal, tmp_path):
    mine, out = make_precious_folder(tmp_path, *CACHE, "notes.txt")
    if journal:
        (mine / "publishing.json").write_text('["notes.txt", "x.cache"]')
    (out / ".calib8-x").symlink_to("../mine")
    content_before = read_contents(mine)
    recover(out)
    with stage_files(out) as stage:
        write_stage(stage, a="new")
        stage.publish()
    assert read_contents(mine) == content_before
    assert read_contents(out) == {"a": b"new"}


@pytest.mark.parametrize("where", [".calib8-kept", "calib8/.calib8-kept"])
def test_link_named_like_calibration_is_ignored(where, tmp_path):
    mine, out = make_precious_folder(tmp_path, *CACHE)
    (out / where).symlink_to(mine)
    content_before = read_contents(mine)
    for publish in (False, True):
        with stage_files(out) as stage:
            folder = stage.records if "/" in where else stage.temporary_folder
            for name in CACHE:
                atomic.write_text(folder / name, "new")
            if publish:
                stage.publish()
    assert read_contents(mine) == content_before
    assert staging.find_saved_calibration((out / where).parent / "x.cache") is None


def test_staged_link_is_not_moved(tmp_path):
    mine, out = make_precious_folder(tmp_path, "a")
    (mine / "a").chmod(0o600)
    (out / ".calib8-x").mkdir()
    (out / ".calib8-x/a").symlink_to(mine / "a")
    (out / ".calib8-x/publishing.json").write_text('["a"]')
    recover(out)
    assert (mine / "a").stat().st_mode & 0o777 == 0o600
    assert not (out / "a").exists()


def test_verify_reports_mixed_builds_changing_nothing(built_folder, run, wording):
    out, _ = built_folder
    stage = out / ".calib8-x"
    stage.mkdir()
    (stage / "report.md").write_text("new")
    (stage / "publishing.json").write_text('["report.md"]')
    times_before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    wording.check(run.fails("verify", out))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times_before


def test_next_run_repeats_failed_rename(tmp_path, monkeypatch):
    replace_file, failures_left = Path.replace, [10]

    def failing(self, goal):
        if Path(goal).parent == tmp_path and Path(goal).name == "b" and failures_left[0]:
            failures_left[0] -= 1
            raise OSError(5, "Input/output error")
        return replace_file(self, goal)

    monkeypatch.setattr(Path, "replace", failing)
    with stage_files(tmp_path) as stage:
        write_stage(stage, a="2", b="2", c="2")
        with pytest.raises(ExportError, match="finishes the publication"):
            stage.publish()
    failures_left[0] = 0
    recover(tmp_path)
    assert read_contents(tmp_path) == {"a": b"2", "b": b"2", "c": b"2"}
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
def test_killed_process_leaves_complete_files(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
    )
    last_call, ended = map(int, done.stdout.split())
    assert ended == 0, done.stderr
    assert last_call > 16, done.stderr
    states = []
    for call_number in range(1, last_call + 1):
        recover(out := tmp_path / str(call_number))
        states += (names := set(read_contents(out).values()))
        assert set(read_contents(out)) == {"a", "b", "calib8/c"}, call_number
        assert len(names) == 1, call_number
        assert not list(out.glob(".*"))
    assert set(states[:-1]) == {b"old", b"new"}
    assert states[-1] == b"new"


@pytest.mark.parametrize("where", ["", "calib8"])
def test_living_process_keeps_its_stage(where, tmp_path):
    (folder := tmp_path / where).mkdir(exist_ok=True)
    with stage_files(tmp_path) as stage:
        write_stage(stage, a="new")
        handle, path = atomic.create_claimed_file(folder, prefix=atomic.PREFIX)
        recover(tmp_path)
        assert path.exists()
        assert (stage.temporary_folder / "a").exists()
        os.close(handle)
        recover(tmp_path)
        assert not path.exists()
        assert (stage.temporary_folder / "a").exists()


def test_folder_is_locked_by_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_LOCK_TIMEOUT_S", 0.05)
    refused = pytest.raises(ExportError, match="one run at a time")
    with atomic.lock_folder(tmp_path), refused, atomic.lock_folder(tmp_path):
        pass


@pytest.fixture
def built_folder(small_cnn, pictures, tmp_path):
    """A build in a folder, and a function that builds into it again."""
    rebuild = functools.partial(build, small_cnn, pictures, out=tmp_path / "out", **QUICK)
    rebuild()
    return tmp_path / "out", rebuild


def test_verify_reads_manifest_of_build(built_folder, run):
    out, _ = built_folder
    contents = manifest.read_manifest(out)
    assert {*read_contents(out)} == {*contents.files, manifest.MANIFEST_NAME}
    assert {*read_contents(out)} > {*manifest.PAGES, "small_cnn.int8.onnx"}
    assert matches_manifest(out)
    assert {"calib8", "onnxruntime", "opencv"} <= contents.made_from["versions"].keys()
    report = json.loads((out / "report.json").read_text())
    rows = [*report["files"], *report["targets"][0]["files"]]
    digests = [row for row in rows if "sha256" in row]
    digest_by_name = {
        Path(row["path"]).relative_to(out).as_posix(): row["sha256"] for row in digests
    }
    assert digest_by_name.items() <= contents.files.items()
    assert {"calib8/small_cnn.cache", "small_cnn.int8.onnx"} <= digest_by_name.keys()
    assert all(Path(row["path"]).exists() for row in rows)
    assert f"{len(contents.files)} of {len(contents.files)} files are as" in run.ok("verify", out)


def test_verify_reports_incomplete_build(built_folder, run, wording):
    out, rebuild = built_folder
    engine, manifest_file = out / "small_cnn.int8.onnx", out / manifest.MANIFEST_NAME
    engine.write_bytes(engine.read_bytes() + b"\0")
    code, output, _ = run("verify", out)
    assert code == 1
    assert "small_cnn.int8.onnx was changed" in output
    engine.unlink()
    code, output, _ = run("verify", out)
    assert code == 1
    assert "small_cnn.int8.onnx is missing" in output
    manifest_file.write_text('{"schema": "other", "files": {}}')
    wording.check(run.fails("verify", out))
    manifest_file.unlink()
    wording.check(run.fails("verify", out))
    with pytest.raises(ExportError, match="must not replace what calib8 did not write"):
        rebuild(method="minmax")  # nothing says any more that these files are calib8's


def test_verify_checks_cache_outside_folder(small_cnn, pictures, tmp_path, run):
    cache, out = tmp_path / "kept" / "x.cache", tmp_path / "out"
    cache.parent.mkdir()
    run.ok("build", small_cnn, "--images", pictures, *QUICK_OPTIONS, out, "--cache", cache)
    assert f"{cache}, the cache, is as the build left it" in run.ok("verify", out)
    cache.write_text(cache.read_text() + "y: 3c010a14\n")
    code, output, _ = run("verify", out)
    assert code == 1
    assert f"{cache}, the cache, was changed after it was written" in output
    cache.unlink()
    assert f"{cache}, the cache, is not here" in run.ok("verify", out)


@pytest.mark.parametrize("options", [(), ("--require-cache",), ("--refresh",)])
def test_other_builds_cache_is_only_read(built_folder, run, small_cnn, pictures, tmp_path, options):
    first, second = built_folder[0], tmp_path / "second"
    contents = read_contents(first)
    cache = first / "calib8/small_cnn.cache"
    arguments = ("build", small_cnn, "--images", pictures, *QUICK_OPTIONS, second)
    output = run.ok(*arguments, "--cache", cache, "--trt-version", "8.6.1", "--verbose", *options)
    assert ("- 0 calibration inferences" in output) == (options != ("--refresh",))
    assert read_contents(first) == contents
    assert (second / "calib8/small_cnn.cache").read_text().startswith("TRT-8601-")
    settings = (second / manifest.SETTINGS).read_text()
    assert not any(option.lstrip("-") in settings for option in options)
    assert "second: " in run.ok("verify", second)


@pytest.mark.slow
def test_own_cache_is_reused_where_other_builds_does_not_fit(
    built_folder, run, small_cnn, pictures, tmp_path
):
    cache, second = built_folder[0] / "calib8/small_cnn.cache", tmp_path / "second"
    arguments = ("build", small_cnn, "--images", pictures, *QUICK_OPTIONS, second, "--limit", 4)
    run.ok(*arguments, "--cache", cache)
    output = run.ok(*arguments, "--cache", cache, "--require-cache", "--verbose")
    assert "- 0 calibration inferences" in output
    refreshed = run.ok(*arguments, "--cache", cache, "--refresh", "--verbose")
    assert f"{second / 'calib8/small_cnn.cache'} is rebuilt" in refreshed.replace("\n", "")


def test_engine_of_earlier_build_is_reported(built_folder, small_cnn, pictures, command):
    """Whoever goes on with X.int8.onnx would deploy what this build did not make."""
    out, _ = built_folder
    arguments = ("build", small_cnn, "--images", pictures, "--size", "16x16", "--duration", 0)
    arguments += ("--accept", "--out", out)
    command(*arguments, "--effort", 0)
    assert "of an earlier one" not in read_markdown(out)
    plan = small_cnn.parent / "float.toml"
    plan.write_text('schema = "calib8-plan/1"\nfloat = ["*"]\n')
    command(*arguments, "--plan", plan)
    assert (out / "small_cnn.int8.onnx").exists()
    assert (out / "small_cnn.float.onnx").exists()
    alert = f"not of this build, but of an earlier one in {out}: small_cnn.int8.onnx"
    assert alert in read_markdown(out)


def test_files_of_other_model_stay(built_folder, small_cnn, pictures, run):
    out, rebuild = built_folder
    other_model = Path(shutil.copy(small_cnn, out.parent / "other.onnx"))
    run.ok("build", other_model, "--images", pictures, *QUICK_OPTIONS, out)
    assert "small_cnn.int8.onnx is of an earlier build" in run.ok("verify", out)
    rebuild()  # and may be built again
    earlier = manifest.read_manifest(out).earlier
    assert "other.int8.onnx" in earlier
    assert manifest.MANIFEST_NAME not in earlier  # it was replaced with the build


FOREIGN_NAMES = ["report.html", "small_cnn.int8.onnx", "calib8/manifest.json", "calib8.toml"]


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_build_never_replaces_foreign_files(name, small_cnn, pictures, tmp_path, run, wording):
    (tmp_path / "calib8").mkdir()
    (tmp_path / name).write_text("mine")
    arguments = ("build", small_cnn, "--images", pictures, *QUICK_OPTIONS, tmp_path)
    wording.check(run.fails(*arguments))
    wording.check(run.fails(*arguments, "--out", tmp_path / name))
    assert read_contents(tmp_path) == {name: b"mine"}
    run.ok(*arguments, "--force")
    assert matches_manifest(tmp_path)


def test_failed_build_keeps_old_files(built_folder, monkeypatch):
    out, rebuild = built_folder
    content_before = read_contents(out)
    with monkeypatch.context() as patched, pytest.raises(BackendError):
        patched.setattr(OnnxRuntime, "build", raise_backend_error)
        rebuild(limit=7)
    assert read_contents(out) == content_before
    report = rebuild(limit=7)
    assert report.calibration.reused
    assert "did not end" in report.calibration.reason
    assert matches_manifest(out)
    assert read_contents(out)["calib8/small_cnn.cache"] != content_before["calib8/small_cnn.cache"]


@pytest.mark.parametrize("where", ["build", "open", "measure"])
def test_failed_target_leaves_no_file(where, small_cnn, pictures, tmp_path, run, monkeypatch):
    """A file that no runtime opens was kept and listed, and `verify` vouched for it."""
    monkeypatch.delenv("CALIB8_TRACEBACK", raising=False)
    owner, name = (
        (evaluate, "_open_with_inner_tensors") if where == "measure" else (OnnxRuntime, where)
    )
    original = getattr(owner, name)

    def failing(self, *arguments, **named):
        original(self, *arguments, **named)  # its files are written
        if where == "open":
            raise BackendError("no engine")
        if where == "build" or arguments[0].target == "onnxruntime":
            raise TypeError("int")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        arguments = (
            "build",
            small_cnn,
            "--images",
            pictures,
            *QUICK_OPTIONS,
            tmp_path,
            "--threads",
            2,
        )
        arguments += ("--target", "onnxruntime,tensorrt", "--duration", 0.01)
        assert run(*arguments)[0] == 1
    report = json.loads((tmp_path / "report.json").read_text())
    target_by_name = {target["name"]: target for target in report["targets"]}
    assert target_by_name["onnxruntime"]["error"]
    assert not target_by_name["onnxruntime"].get("files")
    assert not target_by_name["tensorrt"].get("error")
    assert target_by_name["tensorrt"]["files"]
    assert not list(tmp_path.glob("*.int8.onnx"))
    assert not list(tmp_path.glob("*_run.py"))
    assert matches_manifest(tmp_path)
    assert (tmp_path / "calib8/small_cnn.cache").exists()
    if where != "open":
        assert "TypeError: int" in (tmp_path / "calib8/small_cnn.log").read_text()


def test_cache_outside_folder_survives_failure(small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(OnnxRuntime, "build", raise_backend_error)
    cache = tmp_path / "caches" / "x.cache"
    with pytest.raises(BackendError):
        build(small_cnn, pictures, out=tmp_path / "out", cache=cache, **QUICK)
    assert all(path.exists() for path in cache_files(cache))
    assert not (tmp_path / "out").exists()
    assert calibrate(small_cnn, pictures, preprocess=UNIT, cache=cache).reused


@pytest.mark.slow
def test_concurrent_builds_leave_one_complete(small_cnn, pictures, tmp_path):
    out = tmp_path / "out"
    arguments = (
        "-m",
        "deploy",
        "build",
        small_cnn,
        "--images",
        pictures,
        *QUICK_OPTIONS,
        out,
        "--limit",
    )
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}

    def run(number: int) -> int:
        build_arguments = [*arguments, number + 4, "--method", ("mse", "minmax")[number % 2]]
        build_arguments = [sys.executable, *map(str, build_arguments)]
        return subprocess.run(
            build_arguments, env=environment, capture_output=True, check=False
        ).returncode

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(run, range(3))) == {0}
    contents = manifest.read_manifest(out)
    assert matches_manifest(out)
    report = json.loads((out / "report.json").read_text())
    fingerprint = json.loads((out / "calib8/small_cnn.cache.json").read_text())["fingerprint"]
    assert report["feed"]["samples"] == fingerprint["made_from"]["images"]["count"]
    method = fingerprint["made_by"]["method"]
    assert report["calibration"]["method"] == method == contents.made_from["method"]
    cache = out / "calib8/small_cnn.cache"
    calibration = calibrate(small_cnn, pictures, preprocess=UNIT, method="entropy", cache=cache)
    assert {scale.method for scale in calibration.range_set.scales.values()} == {"entropy"}


@pytest.mark.slow
def test_target_files_are_declared(small_cnn, pictures, tmp_path):
    targets = [kind() for kind in TARGETS.values()]
    report = build(small_cnn, pictures, out=tmp_path, targets=targets, **QUICK)
    for target, part in zip(targets, report.targets, strict=True):
        names = [Path(row.path).name for row in part.files]
        assert names
        assert all(n.removeprefix("small_cnn") in target.writes for n in names)
    assert staging.saved_calibration_path(tmp_path / "small_cnn.cache").parent.exists() is False


def test_forged_journal_moves_nothing_outside(tmp_path):
    folder = tmp_path / "o"
    (folder / ".calib8-x").mkdir(parents=True)
    for name in ("a", "b"):
        (folder / ".calib8-x" / name).write_text(name)
    (tmp_path / "victim").write_text("mine")
    names = ["../../victim", "../victim", "..", ".", "", "/etc/x", 3, "a\0", "a"]
    (folder / ".calib8-x" / "publishing.json").write_text(json.dumps(names))
    (folder / "victim").write_text("source")
    staging.recover(folder)
    assert (tmp_path / "victim").read_text() == "mine"
    assert (folder / "victim").exists()
    assert (folder / "a").read_text() == "a"
    assert not (folder / ".calib8-x").exists()


ROOT = Path(__file__).parent.parent
INPUT = "an output must not be an input"
INPUTS = ("model", "photo", "hard link", "symbolic link", "other spelling", "labels")
OUTPUT_KINDS = (*INPUTS[:-1], "text", "foreign cache", "fifo", "below a file")
ENDED = {130: "interrupted", 143: "terminated"}
SIGNALS = [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)]  # the code of each, and threads
FOREIGN = b"TRT-100300-EntropyCalibration2\nimages: 3c010a14\n"


@pytest.fixture
def saved_model(small_cnn, tmp_path):
    """A copy that a test may lose."""
    return Path(shutil.copy(small_cnn, tmp_path / "m.onnx"))


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("build", "labels"),
        *((c, what) for c in ("build", "calibrate") for what in OUTPUT_KINDS),
    ],
)
def test_cache_replaces_no_foreign_file(command, what, run, saved_model, pictures, tmp_path):
    photos = shutil.copytree(pictures, tmp_path / "photos")
    path_by_kind = {
        "model": saved_model,
        "photo": next(photos.iterdir()),
        "below a file": saved_model / "x",
    }
    path_by_kind["other spelling"] = photos / ".." / saved_model.name
    victim = path_by_kind.get(what, tmp_path / "victim")
    if what.endswith("link"):
        (victim.hardlink_to if what == "hard link" else victim.symlink_to)(saved_model)
    elif what in ("text", "labels", "foreign cache"):
        victim.write_bytes(FOREIGN if what == "foreign cache" else b"3\n" * 20)
    elif what == "fifo":
        os.mkfifo(victim)
    content_before = victim.read_bytes() if victim.is_file() else None
    options = ["--images", photos]
    options += (
        ["--cache", victim, "--out", tmp_path / "o"] if command == "build" else ["-o", victim]
    )
    options += ["--eval-images", photos, "--labels", victim] if what == "labels" else []
    error = run.fails(command, saved_model, *options)
    assert (INPUT in error) == (what in INPUTS)
    assert ("got a device" in error) == (what == "fifo")
    assert ("can be written to" in error) == (what == "below a file")
    assert ("--force" in error) == (what in ("text", "foreign cache"))
    assert content_before is None or victim.read_bytes() == content_before
    assert not list(tmp_path.glob("victim.*"))


def test_cache_does_not_replace_input_arrays(run, saved_model, tmp_path):
    data = tmp_path / "data.npz"
    np.savez(data, image=np.ones((8, 3, 16, 16), np.float32))
    content_before = data.read_bytes()
    arguments = (
        "build",
        saved_model,
        "--images",
        data,
        "--cache",
        tmp_path / "data",
        "--out",
        tmp_path,
    )
    for options in ((), ("--force",)):  # nothing forces an input
        assert INPUT in run.fails(*arguments, *options)
    assert data.read_bytes() == content_before


def test_force_replaces_foreign_files(run, saved_model, pictures, tmp_path):
    cache = tmp_path / "c.cache"
    cache.write_bytes(FOREIGN)
    arguments = ("calibrate", saved_model, "--images", pictures, "-o", cache)
    run.fails(*arguments)
    run.ok(*arguments, "--force")
    cache_bytes, files = cache.read_bytes(), (cache, *sidecars(cache))
    assert cache_bytes != FOREIGN
    for lost in (files[:1], files[1:2], files[:2]):  # killed between the writes of the three files
        for path in lost:
            path.unlink()
        run.ok(*arguments)
        assert cache.read_bytes() == cache_bytes
    files[0].write_bytes(b"")  # as mktemp leaves it
    for sidecar in files[1:]:
        sidecar.unlink()
    run.ok(*arguments)
    assert cache.read_bytes() == cache_bytes


def test_python_calls_do_not_replace_model(saved_model, pictures, tmp_path, wording):
    content_before = saved_model.read_bytes()
    with pytest.raises(ExportError) as refusal:
        calibrate(saved_model, pictures, cache=saved_model)
    wording.check(refusal.value)
    with pytest.raises(ExportError) as refusal:
        build(saved_model, pictures, cache=saved_model, out=tmp_path / "o")
    wording.check(refusal.value)
    assert saved_model.read_bytes() == content_before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_device_or_folder_is_never_replaced(make, tmp_path, wording):
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


def test_links_in_dev_are_devices(tmp_path):
    """`-o /dev/stdout > file` leads to a plain file; a rename would put one in the link's place."""
    program = "from deploy.files.guard import refuse_output; refuse_output('/dev/stdout')"
    arguments = [sys.executable, "-c", program]
    with (tmp_path / "said").open("w") as file:
        done = subprocess.run(arguments, cwd=ROOT, stdout=file, stderr=subprocess.PIPE, check=False)
    assert b"/dev/stdout must be a file to write to, got a device" in done.stderr


def test_output_is_checked_again_before_replacing(tmp_path, wording):
    path = tmp_path / "a"
    with guard_inputs():
        manifest.name_output(path, "page")
        path.write_text("mine")  # while the run works
        with pytest.raises(ExportError) as refusal:
            atomic.write_text(path, "new")
        wording.check(refusal.value)
    assert path.read_text() == "mine"


def test_other_runs_may_write_inputs(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    add_input_file(path)  # in no run
    with guard_inputs():
        add_input_file(path)
        with guard_inputs(), pytest.raises(ExportError, match="must not be an input"):
            atomic.write_text(path, "new")
    assert atomic.write_text(path, "new").read_text() == "new"


@pytest.fixture
def slow_model(tmp_path):
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
    saved_model = make_model(nodes, inputs, {"y": None}, as_float32(weights), opset=17)
    np.save(tmp_path / "x.npy", rng.normal(size=(4000, 3, 16, 16)).astype(np.float32))
    return save_net(saved_model, tmp_path / "slow.onnx"), tmp_path / "x.npy"


@pytest.fixture
def endless_model(tmp_path):
    """A model whose inference never ends, and an input."""
    value = "float[n, 8, 8, 8]"
    body = f"b (int64 i, bool c, {value} s) => (bool d, {value} t) {{ d = Not(f) t = Relu(s) }}"
    weights = {"w1": np.ones((8, 3, 3, 3)), "w2": np.ones((8, 8, 3, 3))}
    nodes = [("Conv", "x w1", "a"), ("Conv", "a w2", "b"), ("Not", "f", "c")]
    nodes.append(("Loop", ["", "c", "b"], "endless", {"body": onnx.parser.parse_graph(body)}))
    constants = {**as_float32(weights), "f": np.array(False)}
    saved_model = make_model(nodes, {"x": ["n", 3, 12, 12]}, {"endless": None}, constants, opset=17)
    np.save(tmp_path / "x.npy", np.ones((4, 3, 12, 12), np.float32))
    return save_net(saved_model, tmp_path / "endless.onnx"), tmp_path / "x.npy"


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
def run_and_signal(tmp_path):
    """(model, data, a pattern of its screen, send, words) -> a build to which `send` sends.

    `grace`: seconds in which inferences may end.
    Gives its exit code, its last line, and its files.
    """

    def call(saved_model, data, pattern, send, *arguments, grace=300):
        out = tmp_path / "out"
        arguments = (
            "-c",
            TELLING,
            grace,
            "build",
            saved_model,
            "--images",
            data,
            "--out",
            out,
            *arguments,
        )
        started = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stderr=subprocess.PIPE,
            cwd=ROOT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it
        )
        output = b""
        try:
            while not re.search(pattern, output):
                piece = os.read(started.stderr.fileno(), 1000)
                assert piece, output[-2000:]
                assert len(output) < 1 << 20, output[-2000:]
                output += piece
            send(started)
            _, remaining_output = started.communicate(timeout=300)
        finally:
            started.kill()
        last_line = (output + remaining_output).decode().strip().splitlines()[-1]
        return started.returncode, last_line, list(out.rglob("*.*"))

    return call


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "threads"), SIGNALS)
def test_signal_leaves_no_partial_file(number, code, threads, slow_model, run_and_signal, tmp_path):
    ended, last_line, files = run_and_signal(
        *slow_model,
        rb"observing: \d+ of",
        lambda run: run.send_signal(number),
        "--threads",
        threads,
    )
    checkpoint = tmp_path / "out/calib8/slow.cache.checkpoint"
    assert ended == code
    assert re.fullmatch(
        f"calib8: {ENDED[code]}; nothing half-written was left behind; [0-9,]+ of 4,000 samples"
        f" are kept in {checkpoint}: --resume goes on from there",
        last_line,
    )
    assert files == [checkpoint]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "threads"), SIGNALS)
def test_signal_ends_endless_inference(number, code, threads, endless_model, run_and_signal):
    signal_arguments = (*endless_model, b"runs .*endless", lambda run: run.send_signal(number))
    ended, last_line, files = run_and_signal(*signal_arguments, "--threads", threads, grace=0.1)
    assert (ended, files) == (code, [])
    assert last_line == f"calib8: {ENDED[code]}; nothing half-written was left behind"


@pytest.mark.slow
def test_second_interrupt_ends_native_code(slow_model, run_and_signal, tmp_path):
    def insist(run):
        for _ in range(3000):  # two that arrive together are one
            run.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return run.wait(0.1)

    (tmp_path / "loader.py").write_text(HOLDING)
    assert (
        run_and_signal(slow_model[0], tmp_path / "loader.py:load", b"no end", insist)[0]
        == -signal.SIGINT
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
def test_signal_to_fork_stops_only_fork():
    with signals.end_on_signals():
        child = os.fork()
        if not child:
            os._exit(signal.set_wakeup_fd(-1) != -1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("kind", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
@pytest.mark.parametrize("deep", [1, 2])
def test_error_caused_by_signal_is_signal(kind, code, deep, run, monkeypatch):
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


def test_long_quotation_of_file_is_shortened(run, saved_model, pictures, tmp_path):
    (tmp_path / "list.txt").write_text("n" * 30_000 + ".png\n")
    error = run.fails(
        "build", saved_model, "--images", tmp_path / "list.txt", "--out", tmp_path / "o"
    )
    assert 3000 < len(error) < 4500
    assert "nnn ... nnn" in error
    assert error.endswith("skip bad ones (--skip-bad)\n")
    code, _, error = run(
        "build", saved_model, "--images", pictures, "--duration", "1" * 30_000 + "x"
    )
    assert code == 2
    assert len(error) < 4500
    assert error.endswith("--help` tells more)\n")


def test_pipe_or_huge_labels_are_refused(run, saved_model, pictures, tmp_path, wording):
    arguments = ("build", saved_model, "--images", pictures, "--eval-images", pictures)
    arguments += ("--out", tmp_path / "o", "--labels")
    for name in ("pipe.txt", "pipe.json"):
        os.mkfifo(tmp_path / name)
        wording.check(run.fails(*arguments, tmp_path / name))
    (tmp_path / "labels.txt").write_text("1\n" * 19 + f"{10**30}\n")
    assert "line 20" in run.fails(*arguments, tmp_path / "labels.txt")


def test_replaced_input_hides_no_output(tmp_path, wording):
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
@pytest.mark.parametrize("file_name", ["", "folder"])
def test_arrays_from_pipe_are_refused(name, file_name, run, saved_model, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / file_name / name)
    arrays = tmp_path / file_name if file_name else tmp_path / name
    error = run.fails("calibrate", saved_model, "--images", arrays, "-o", tmp_path / "c.cache")
    assert "a device or pipe" in error


def rename_file(saved_model, old, new, path):
    """Save a model of which a tensor has another name."""
    changed = onnx.load(saved_model)
    rename_tensor(changed, old, new)
    for value in changed.graph.input:
        value.name = new if value.name == old else value.name
    return save_net(changed, path)


def test_printed_commands_quote_names(run, saved_model, tmp_path):
    path = rename_file(saved_model, "x", "in;touch Y", tmp_path / "m $(touch X).onnx")
    x = tmp_path / "x.npy"
    np.save(x, np.random.default_rng(0).normal(size=(8, 3, 16, 16)).astype(np.float32))
    out = tmp_path / "o"
    options = ("--target", "tensorrt", "--out", out, "--duration", 0, "--effort", 0, "--accept")
    run.ok("build", path, "--images", x, *options)
    notes = json.loads((out / "report.json").read_text())["targets"][0]["notes"]
    lines = [note.split(": ", 1)[1] for note in notes if ": trtexec " in note]
    assert len(lines) == 4
    trtexec = tmp_path / "bin" / "trtexec"
    trtexec.parent.mkdir()
    trtexec.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    trtexec.chmod(0o755)
    environment = {"PATH": f"{trtexec.parent}:{os.environ['PATH']}"}
    for line in lines:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        options = done.stdout.splitlines()
        assert any(word.startswith("--onnx=m $(touch X).tensorrt") for word in options)
        assert "--optShapes=in;touch Y:1x3x16x16" in options
    assert not (tmp_path / "X").exists()
    assert not (tmp_path / "Y").exists()


@pytest.mark.slow
def test_line_break_fails_only_tensorrt(run, saved_model, pictures, tmp_path):
    rename_file(saved_model, "r2", "r\n2", saved_model)
    out = tmp_path / "o"
    arguments = ("build", saved_model, "--images", pictures, *QUICK_OPTIONS, out)
    run.fails(*arguments, "--target", "onnxruntime,tensorrt,ascend")
    targets = json.loads((out / "report.json").read_text())["targets"]
    errors = {target["name"]: target.get("error") for target in targets}
    assert "got 'r\\n2'" in errors["tensorrt"]
    assert not errors["onnxruntime"]
    assert not errors["ascend"]
    assert "r3: " in (out / "calib8/m.cache").read_text()
    run.ok(*arguments, "--target", "onnxruntime,ascend", "--require-cache")
    error = run.fails(*arguments, "--target", "tensorrt", "--out", tmp_path / "p")
    assert "rename the tensor" in error
    assert not list((tmp_path / "p").rglob("*.cache"))


def test_name_in_remedy_is_quoted(run, tmp_path):
    saved_model = make_model([("Relu", ["in;touch Y"], "y")], {"in;touch Y": [1, "h"]}, {"y": None})
    path = save_net(saved_model, tmp_path / "m.onnx")
    assert "--shape 'in;touch Y:1x224'" in run.fails("bench", path, "--duration", 0)
