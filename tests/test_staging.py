"""A build is whole or not there: what a stop at any moment leaves, and who notices."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.calibration.store import files
from deploy.cli import main
from deploy.errors import BackendError, ExportError
from deploy.feed.preprocess import Preprocess
from deploy.files import atomic, manifest, staging
from deploy.files.reading import guarded, is_read
from deploy.files.staging import recover, staged
from deploy.pipeline import build, calibrate
from deploy.targets.onnxruntime.target import OnnxRuntime
from deploy.tuning.search_options import Tuning

UNIT = Preprocess(size=(16, 16))


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def write(stage, **named: str) -> None:
    for name, text in named.items():
        atomic.write_text(stage.inside / name, text)


def test_files_appear_together_and_equal_ones_stay_as_old_as_they_are(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(0o600)
    (tmp_path / "same").write_text("same")
    os.utime(tmp_path / "same", (1, 1))
    with staged(tmp_path) as stage:
        write(stage, a="new", same="same", b="b")
        assert content(tmp_path) == {"a": b"old", "same": b"same"}
        stage.publish(lambda: write(stage, last="last"))
    assert content(tmp_path) == {"a": b"new", "same": b"same", "b": b"b", "last": b"last"}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "same").stat().st_mtime == 1
    assert not list(tmp_path.glob(".*"))


def test_what_is_not_published_is_gone_and_so_is_a_folder_made_for_it(tmp_path):
    out = tmp_path / "x" / "out"
    with pytest.raises(KeyError), staged(out) as stage:
        write(stage, a="new")
        raise KeyError
    assert not (tmp_path / "x").exists()


def test_an_input_or_a_folder_in_the_way_stops_all_of_it(tmp_path):
    (tmp_path / "b").write_text("input")
    (tmp_path / "c").mkdir()
    for name in ("b", "c"):
        with guarded(), staged(tmp_path) as stage:
            is_read(tmp_path / "b")
            write(stage, a="new", **{name: "new"})
            with pytest.raises(ExportError):
                stage.publish()
        assert content(tmp_path) == {"b": b"input"}


def test_a_rename_that_fails_is_tried_again_and_then_left_to_the_next_run(tmp_path, monkeypatch):
    whole, left = Path.replace, [1]

    def failing(self, goal):
        if Path(goal).parent == tmp_path and Path(goal).name == "b" and left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return whole(self, goal)

    monkeypatch.setattr(Path, "replace", failing)
    with staged(tmp_path) as stage:
        write(stage, a="1", b="1", c="1")
        stage.publish()
    assert content(tmp_path) == {"a": b"1", "b": b"1", "c": b"1"}
    left[0] = 10
    with staged(tmp_path) as stage:
        write(stage, a="2", b="2", c="2")
        with pytest.raises(ExportError, match="goes on where this one stopped"):
            stage.publish()
    left[0] = 0
    recover(tmp_path)
    assert content(tmp_path) == {"a": b"2", "b": b"2", "c": b"2"}
    assert not list(tmp_path.glob(".*"))


KILLED = """
import os, sys
from pathlib import Path
from deploy import atomic, staging

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
    with staging.staged(out) as stage:
        for name in "abc":
            atomic.write_text(stage.inside / name, "new")
        stage.publish()
    os._exit(0)

ended = 9
while ended == 9:
    at += 1
    out = Path(sys.argv[1], str(at))
    out.mkdir()
    for name in "abc":
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
        env={**os.environ, "PYTHONPATH": str(Path.cwd())}, capture_output=True, text=True,
    )  # fmt: skip
    last, ended = map(int, done.stdout.split())
    assert ended == 0 and last > 16, done.stderr
    states = []
    for at in range(1, last + 1):
        out = tmp_path / str(at)
        recover(out)
        found = set(content(out).values())
        assert set(content(out)) == {*"abc"} and len(found) == 1, at
        assert not list(out.glob(".*"))
        states += found
    assert set(states[:-1]) == {b"old", b"new"} and states[-1] == b"new"


def test_a_living_process_keeps_its_files(tmp_path):
    with staged(tmp_path) as stage:
        write(stage, a="new")
        handle, path = atomic.claimed_file(tmp_path, prefix=atomic.PREFIX)
        recover(tmp_path)
        assert path.exists() and (stage.inside / "a").exists()
        os.close(handle)
        recover(tmp_path)
        assert not path.exists() and (stage.inside / "a").exists()


def test_one_run_at_a_time_changes_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_PATIENCE", 0.05)
    with (
        atomic.alone(tmp_path),
        pytest.raises(ExportError, match="one run at a time"),
        atomic.alone(tmp_path),
    ):
        pass


@pytest.fixture
def made(small_cnn, pictures, tmp_path):
    """A build in a folder, and a function that builds into it again."""
    out = tmp_path / "out"

    def again(**named):
        options = {"preprocess": UNIT, "duration_s": 0, "tuning": Tuning(effort=0), **named}
        return build(small_cnn, pictures, out=out, **options)

    again()
    return out, again


def test_a_build_names_its_files_and_verify_reads_them(made, capsys):
    out, _ = made
    found = manifest.read_manifest(out)
    assert (
        {*content(out)} == {*found.files, manifest.NAME} > {*manifest.PAGES, "small_cnn.int8.onnx"}
    )
    assert not manifest.changed(out, found)
    assert {"calib8", "onnxruntime", "opencv"} <= found.made_from["versions"].keys()
    report = json.loads((out / "report.json").read_text())
    rows = [*report["files"], *report["targets"][0]["files"]]
    told = {Path(row["path"]).name: row["sha256"] for row in rows if "sha256" in row}
    assert told.items() <= found.files.items()
    assert {"small_cnn.cache", "small_cnn.int8.onnx"} <= told.keys()
    assert all(Path(row["path"]).exists() for row in rows)
    main(["verify", str(out)])
    assert f"{len(found.files)} of {len(found.files)} files are as" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["changed", "missing", "no manifest", "another manifest"])
def test_verify_tells_a_build_that_is_not_whole(way, made, capsys):
    out, _ = made
    engine = out / "small_cnn.int8.onnx"
    if way == "changed":
        engine.write_bytes(engine.read_bytes() + b"\0")
    elif way == "missing":
        engine.unlink()
    elif way == "no manifest":
        (out / manifest.NAME).unlink()
    else:
        (out / manifest.NAME).write_text('{"schema": "other", "files": {}}')
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(out)])
    said = capsys.readouterr()
    expected = {
        "changed": "small_cnn.int8.onnx was changed",
        "missing": "small_cnn.int8.onnx is missing",
        "no manifest": "must hold the manifest.json of a build, got none",
        "another manifest": "got another file of that name",
    }
    assert stop.value.code == 1 and expected[way] in said.out + said.err


def test_verify_looks_at_a_cache_elsewhere_too(small_cnn, pictures, tmp_path, run):
    cache, out = tmp_path / "kept" / "x.cache", tmp_path / "out"
    cache.parent.mkdir()
    words = ("--size", "16x16", "--duration", 0, "--effort", 0, "--out", out, "--cache", cache)
    assert run("build", small_cnn, "--images", pictures, *words)[0] == 0
    code, said, _ = run("verify", out)
    assert code == 0 and f"{cache}, the cache, is as the build left it" in said
    moved = cache.read_text()
    cache.write_text(moved + "y: 3c010a14\n")
    code, said, _ = run("verify", out)
    assert code == 1 and f"{cache}, the cache, was changed after it was written" in said
    cache.unlink()
    code, said, _ = run("verify", out)
    assert code == 0 and f"{cache}, the cache, is not here" in said


def test_a_model_of_an_earlier_build_that_stays_beside_the_new_one_is_told(
    made, small_cnn, pictures, capsys
):
    """Whoever goes on with X.int8.onnx would deploy what this build did not make."""
    out, _ = made
    line = ["build", str(small_cnn), "--images", str(pictures), "--size", "16x16", "--accept"]
    line += ["--duration", "0", "--out", str(out)]
    main([*line, "--effort", "0"])
    assert "of an earlier one" not in capsys.readouterr().out
    plan = small_cnn.parent / "float.toml"
    plan.write_text('schema = "calib8-plan/1"\nfloat = ["*"]\n')
    main([*line, "--plan", str(plan)])
    assert (out / "small_cnn.int8.onnx").exists() and (out / "small_cnn.float.onnx").exists()
    said = " ".join(capsys.readouterr().out.split())
    assert f"not of this build, but of an earlier one in {out}: small_cnn.int8.onnx" in said


def test_files_of_another_model_stay_and_are_told_apart(made, small_cnn, pictures, capsys):
    out, again = made
    other = small_cnn.parent / "other.onnx"
    other.write_bytes(small_cnn.read_bytes())
    words = ["--size", "16x16", "--duration", "0", "--effort", "0", "--out", str(out)]
    main(["build", str(other), "--images", str(pictures), *words])
    main(["verify", str(out)])
    assert "small_cnn.int8.onnx is of an earlier build" in capsys.readouterr().out
    again()  # and may be built again
    assert "other.int8.onnx" in manifest.read_manifest(out).earlier
    assert (
        manifest.NAME not in manifest.read_manifest(out).earlier
    )  # it was replaced with the build


@pytest.mark.parametrize("name", ["report.html", "small_cnn.int8.onnx", "manifest.json"])
def test_a_build_never_replaces_what_calib8_did_not_write(
    name, small_cnn, pictures, tmp_path, capsys
):
    (tmp_path / name).write_text("mine")
    words = ["build", str(small_cnn), "--images", str(pictures), "--size", "16x16"]
    words += ["--duration", "0", "--effort", "0", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(words)
    assert "must not replace what calib8 did not write" in capsys.readouterr().err
    assert content(tmp_path) == {name: b"mine"}
    main([*words, "--force"])
    assert not manifest.changed(tmp_path, manifest.read_manifest(tmp_path))


def test_a_build_from_before_there_were_manifests_is_known_by_its_report(made):
    out, again = made
    (out / manifest.NAME).unlink()
    again(method="minmax")
    assert not manifest.changed(out, manifest.read_manifest(out))


def test_a_build_that_fails_leaves_the_old_one_and_its_calibration_to_the_next(made, monkeypatch):
    out, again = made
    before = content(out)

    def broken(self, request):
        raise BackendError("it must work, got nothing; try again")

    with monkeypatch.context() as patched:
        patched.setattr(OnnxRuntime, "build", broken)
        with pytest.raises(BackendError):
            again(limit=7)
    assert content(out) == before
    report = again(limit=7)
    assert report.calibration.reused and "did not end" in report.calibration.reason
    assert not list(out.glob(".*")) and not manifest.changed(out, manifest.read_manifest(out))
    assert content(out)["small_cnn.cache"] != before["small_cnn.cache"]


def test_a_cache_elsewhere_is_kept_the_moment_it_is_made(
    small_cnn, pictures, tmp_path, monkeypatch
):
    def broken(self, request):
        raise BackendError("it must work, got nothing; try again")

    monkeypatch.setattr(OnnxRuntime, "build", broken)
    cache = tmp_path / "caches" / "x.cache"
    with pytest.raises(BackendError):
        build(small_cnn, pictures, preprocess=UNIT, out=tmp_path / "out", cache=cache,
              duration_s=0, tuning=Tuning(effort=0))  # fmt: skip
    assert all(path.exists() for path in files(cache)) and not (tmp_path / "out").exists()
    assert calibrate(small_cnn, pictures, preprocess=UNIT, cache=cache).reused


@pytest.mark.slow
def test_builds_at_once_leave_one_of_them(small_cnn, pictures, tmp_path):
    out = tmp_path / "out"
    words = [sys.executable, "-m", "deploy", "build", str(small_cnn), "--images", str(pictures),
             "--size", "16x16", "--duration", "0", "--effort", "0", "--out", str(out)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}

    def run(number: int) -> int:
        own = [*words, "--limit", str(number + 4), "--method", ("mse", "minmax")[number % 2]]
        return subprocess.run(own, env=environment, capture_output=True, check=False).returncode

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(run, range(4))) == {0}
    found = manifest.read_manifest(out)
    assert not manifest.changed(out, found) and not list(out.glob(".*"))
    report = json.loads((out / "report.json").read_text())
    fingerprint = json.loads((out / "small_cnn.cache.json").read_text())["fingerprint"]
    assert report["feed"]["samples"] == fingerprint["made_from"]["images"]["count"]
    method = fingerprint["made_by"]["method"]
    assert report["calibration"]["method"] == method == found.made_from["method"]
    cache = out / "small_cnn.cache"
    last = calibrate(small_cnn, pictures, preprocess=UNIT, method="entropy", cache=cache)
    assert {scale.method for scale in last.found.scales.values()} == {"entropy"}


def test_every_file_that_a_build_may_write_is_declared(small_cnn, pictures, tmp_path):
    from deploy.targets import TARGETS

    targets = [kind() for kind in TARGETS.values()]
    report = build(
        small_cnn, pictures, preprocess=UNIT, out=tmp_path, targets=targets, duration_s=0,
        tuning=Tuning(effort=0),
    )  # fmt: skip
    for target, part in zip(targets, report.targets, strict=True):
        names = [Path(row.path).name for row in part.files]
        assert names and all(n.removeprefix("small_cnn") in target.writes for n in names)
    assert staging.kept(tmp_path / "small_cnn.cache").parent.exists() is False


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
