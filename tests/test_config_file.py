"""The options of a build as a file: calib8.toml and --config."""

import os
import shutil
import sys

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


QUICK_OPTIONS = ("--effort", 0, "--duration", 0, "--accept")


def stable_files(folder):
    """Return name -> bytes of the files that hold no times."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    stable = [path for path in files if not path.name.startswith(("report.", "manifest.json"))]
    return {path.name: path.read_bytes() for path in stable}


@pytest.fixture
def built(run, small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = "--target tensorrt,ascend --keep-float Conv_c1 --keep-float op:Gemm --rest fp32"
    options = (*arguments.split(), *QUICK_OPTIONS, "--mean", "0.4", "--limit", 12, "--out", "o")
    run.ok("build", small_cnn, "--images", pictures, *options)
    return tmp_path / "o"


def test_build_writes_its_options(built, small_cnn, pictures):
    table = tomllib.loads((built / "calib8.toml").read_text("utf-8"))
    assert table == {
        "build": {
            "model": str(small_cnn),
            "images": str(pictures),
            "rest": "fp32",
            "target": ["tensorrt,ascend"],
            "keep-float": ["Conv_c1", "op:Gemm"],
            "mean": "0.4",
            "limit": 12,
            "effort": 0,
            "duration": 0.0,
            "accept": True,
        }
    }


def test_config_file_repeats_the_same_bytes(built, run):
    first_files = stable_files(built)
    run.ok("build", "--config", "o/calib8.toml", "--out", "again", "--threads", 3)
    assert stable_files(built.parent / "again") == first_files
    out = run.ok("build", "--config", "o/calib8.toml")  # over itself
    assert stable_files(built) == first_files
    assert "reused" in out
    assert run("verify", "o")[0] == 0


def test_typed_options_override_the_file(built, run):
    arguments = ("--config", "o/calib8.toml", "--out", "p", "--target", "onnxruntime", "--limit", 5)
    error = run.fails("build", *arguments)
    assert "--rest" in error
    assert "tensorrt" in error  # an option of a target left out
    file = built / "calib8.toml"
    file.write_text(file.read_text("utf-8").replace('rest = "fp32"\n', ""), "utf-8")
    out = run.ok("build", *arguments)
    table = tomllib.loads((built.parent / "p" / "calib8.toml").read_text("utf-8"))["build"]
    assert (table["target"], table["limit"]) == (["onnxruntime"], 5)
    assert "5 samples" in out


def test_split_option_replaces_the_files_effort(built, run):
    """As `Next` says it: the file has the effort of the build before."""
    error = run.fails("build", "--config", "o/calib8.toml", "--split", 9)
    assert "--split takes a split of an earlier build's plan" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[build", "must be a TOML file of the options of a command"),
        ("model = 'm.onnx'", "must have its options under [build], got 'model'"),
        ("[build]\nimagse = 'p'", "'imagse' in c.toml is no option of build; did you mean"),
        ("[build]\nforce = true", "'force' in c.toml is no option of build"),
        ("[build]\naccept = 'yes'", "accept in c.toml must be true or false, got 'yes'"),
        ("[build]\nimages = ['a', 'b']", "images in c.toml must be a text or number, got"),
        ("[build]\nkeep-float = [1, true]", "keep-float in c.toml must be texts or numbers"),
        ("[build]\nlimit = {}", "limit in c.toml must be a text or number, got {}"),
        ("[build]\nmodel = 'm.onnx'\nimages = 'p'\nlimit = 'few'", "'few' is not a valid integer"),
        ("[build]\nx" + ".x" * 100 + " = 1", "got keys of over 64 dots"),
    ],
)
def test_wrong_config_file_is_refused(text, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(text, "utf-8")
    code, _, err = run("build", "--config", "c.toml")
    assert code in (1, 2)
    assert message in err.replace("\n", " ")
    assert "none.toml" in run.fails("build", "--config", "none.toml")


def test_handwritten_config_file_builds(run, small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        f"[build]\nmodel = '{small_cnn}'\nimages = '{pictures}'\nkeep-float = 'Conv_c1'\n"
        "effort = 0\nduration = 0\naccept = true\nthreads = 1\n"
    )
    run.ok("build", "--config", "mine.toml")
    table = tomllib.loads((tmp_path / "build" / "calib8.toml").read_text("utf-8"))["build"]
    assert table["keep-float"] == ["Conv_c1"]
    assert "threads" not in table


def test_undecodable_path_stays_out_of_config(run, small_cnn, pictures, tmp_path):
    folder = tmp_path / os.fsdecode(b"im\xffages")
    shutil.copytree(pictures, folder)
    run.ok("build", small_cnn, "--images", folder, "--out", tmp_path / "o", *QUICK_OPTIONS)
    file = tmp_path / "o" / "calib8.toml"
    assert "# images" in file.read_text("utf-8")
    code, _, err = run("build", "--config", file)
    assert code == 2
    assert "'--images'" in err
    assert run("build", "--config", file, "--images", folder)[0] == 0


@pytest.mark.parametrize("foreign_path", ["theirs/c.toml", "theirs"])
def test_code_in_foreign_config_needs_trust(foreign_path, run, tmp_path, monkeypatch):
    """Also for root, who may read every file."""
    config = tmp_path / "theirs" / "c.toml"
    stat = os.stat
    config.parent.mkdir()

    def foreign_stat(path, *arguments, **options):
        status = stat(path, *arguments, **options)
        uid = status.st_uid + (path == tmp_path / foreign_path)
        return os.stat_result((*status[:4], uid, *status[5:]))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deploy.commands.settings.os.stat", foreign_stat)
    for key, value in {
        "metric": "'m.py:score'",
        "images": "'l.py:make'",
        "eval-images": "'l.py:make'",
        "calibrator-script": "'c.py:make'",
        "scheduler": "'tcp://x:1'",
        "plugin": "'a.so'",
        "model": "'net.py:make'",
    }.items():
        config.write_text(f"[build]\n{key} = {value}\n")
        error = run.fails("build", "--config", config)
        assert f"--trust-config, got {key} = {value} in {config}" in error
    for arguments in (["--trust-config"], ["none.onnx"]):  # the latter names another model
        assert "trust-config" not in run("build", *arguments, "--config", config)[2]
    monkeypatch.undo()
    assert "trust-config" not in run("build", "--config", config)[2]
