"""`build --config`: a build leaves its options as TOML, which repeats it; flags stand before."""

import os
import shutil
import sys

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

QUICK = "--effort", 0, "--duration", 0, "--accept"


def files_of(folder):
    """Name -> bytes, but for what tells the time."""
    timed = "report.", "manifest.json"
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(timed)}


@pytest.fixture
def built(run, small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "--target", "tensorrt,ascend", "--keep-float", "Conv_c1", "--keep-float", "op:Gemm"
    code, _, err = run(
        "build", small_cnn, "--images", pictures, "--out", "o", *words, *QUICK, "--mean", "0.4",
        "--rest", "fp32", "--limit", 12,
    )  # fmt: skip
    assert code == 0, err
    return tmp_path / "o"


def test_a_build_leaves_its_options(built, small_cnn, pictures):
    table = tomllib.loads((built / "calib8.toml").read_text("utf-8"))
    assert table == {
        "build": {
            "model": str(small_cnn), "images": str(pictures), "rest": "fp32",
            "target": ["tensorrt,ascend"], "keep-float": ["Conv_c1", "op:Gemm"], "mean": "0.4",
            "limit": 12, "effort": 0, "duration": 0.0, "accept": True,
        }
    }  # fmt: skip


def test_the_file_repeats_the_same_bytes(built, run):
    before = files_of(built)
    code, _, err = run("build", "--config", "o/calib8.toml", "--out", "again", "--threads", 3)
    assert code == 0, err
    again = files_of(built.parent / "again")
    assert again == before
    code, out, err = run("build", "--config", "o/calib8.toml")  # over itself
    assert code == 0, err
    assert files_of(built) == before and "reused" in out
    assert run("verify", "o")[0] == 0


def test_what_is_typed_stands_before_the_file(built, run):
    code, out, err = run(
        "build", "--config", "o/calib8.toml", "--out", "p", "--target", "onnxruntime", "--limit", 5
    )
    assert code == 1 and "--rest" in err and "tensorrt" in err  # an option of a target left out
    (built / "calib8.toml").write_text(
        (built / "calib8.toml").read_text("utf-8").replace('rest = "fp32"\n', ""), "utf-8"
    )
    code, out, err = run(
        "build", "--config", "o/calib8.toml", "--out", "p", "--target", "onnxruntime", "--limit", 5
    )
    assert code == 0, err
    table = tomllib.loads((built.parent / "p" / "calib8.toml").read_text("utf-8"))["build"]
    assert (table["target"], table["limit"]) == (["onnxruntime"], 5)
    assert "5 samples" in out


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
def test_a_wrong_file_is_told(text, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(text, "utf-8")
    code, _, err = run("build", "--config", "c.toml")
    assert code in (1, 2) and message in err.replace("\n", " ")
    code, _, err = run("build", "--config", "none.toml")
    assert code == 1 and "none.toml" in err


def test_a_file_of_ones_own_builds_where_build_does(
    run, small_cnn, pictures, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        f"[build]\nmodel = '{small_cnn}'\nimages = '{pictures}'\nkeep-float = 'Conv_c1'\n"
        "effort = 0\nduration = 0\naccept = true\nthreads = 1\n"
    )
    code, _, err = run("build", "--config", "mine.toml")
    assert code == 0, err
    table = tomllib.loads((tmp_path / "build" / "calib8.toml").read_text("utf-8"))["build"]
    assert table["keep-float"] == ["Conv_c1"] and "threads" not in table


def test_a_name_that_is_no_text_is_left_to_be_typed(run, small_cnn, pictures, tmp_path):
    folder = tmp_path / os.fsdecode(b"im\xffages")
    shutil.copytree(pictures, folder)
    code, _, err = run("build", small_cnn, "--images", folder, "--out", tmp_path / "o", *QUICK)
    assert code == 0, err
    file = tmp_path / "o" / "calib8.toml"
    assert "# images" in file.read_text("utf-8")
    code, _, err = run("build", "--config", file)
    assert code == 2 and "'--images'" in err
    assert run("build", "--config", file, "--images", folder)[0] == 0


def test_a_calib8_toml_of_the_users_is_not_replaced(run, small_cnn, pictures, tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "calib8.toml").write_text("# mine\n")
    code, _, err = run("build", small_cnn, "--images", pictures, "--out", tmp_path / "o", *QUICK)
    assert code == 1 and "must not replace" in err
