"""The options of a build as a file: calib8.toml and --config."""

import os
import random
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import click
import pytest

from deploy.calibration.cluster import connect_client
from deploy.commands.build import build
from deploy.errors import Calib8Error, ConfigError, ModelError
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.loaders import call_loader
from deploy.files.toml import toml_value
from deploy.files.usercode import load_function
from deploy.targets import TensorRT
from deploy.targets.ascend.atc import AtcOptions
from deploy.targets.tensorrt.sdk import plugin_digests
from deploy.tasks.metric import metric_of
from tests.conftest import save_small_cnn

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
    options += ("--max-loss", "0.9")
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
            "max-loss": 0.9,
            "duration": 0.0,
            "accept": True,
        }
    }


@pytest.mark.slow
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
    ("file_option", "line_option"),
    [
        ("images = '.'", ("calibrator_script", "old.py:make")),
        ("calibrator-script = 'old.py:make'", ("images", ".")),
    ],
)
def test_typed_option_replaces_its_alternative(file_option, line_option, small_cnn, tmp_path):
    file = tmp_path / "calib8.toml"
    file.write_text(f"[build]\n{file_option}\n")
    name, value = line_option
    flag = f"--{name.replace('_', '-')}"
    arguments = ["--config", str(file), str(small_cnn), flag, str(value)]
    params = build.make_context("build", arguments).params
    given = {key: params[key] for key in ("images", "calibrator_script")}
    assert given == {**dict.fromkeys(given), name: value}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[build", "must be a TOML file of the options of a command"),
        ("model = 'm.onnx'", "must have its options under [build], got 'model'"),
        ("[build]\nimagse = 'p'", "'imagse' in c.toml is no option of build; did you mean"),
        ("[build]\nforce = true", "--force belongs on the command line alone, got 'force' in"),
        ("[build]\ntrust-config = 1", "--trust-config belongs on the command line alone"),
        ("[build]\nmodel = 'm.onnx'\nout = ''", "a path must not be empty"),
        ("[build]\nmodel = 'm.onnx'\nimages = ''", "a path must not be empty"),
        ("[build]\naccept = 'yes'", "accept in c.toml must be true or false, got 'yes'"),
        ("[build]\nimages = ['a', 'b']", "images in c.toml must be a text or number, got"),
        ("[build]\nkeep-float = [1, true]", "keep-float in c.toml must be texts or numbers"),
        ("[build]\nlimit = {}", "limit in c.toml must be a text or number, got {}"),
        ("[build]\nmodel = 'm.onnx'\nimages = 'p'\nlimit = 'few'", "'few' is not a valid integer"),
        ("[build]\nmodel = 'p/m.onnx'\nimages = 'p'", "check the path in the file of --config"),
        ("[build]\nx" + ".x" * 100 + " = 1", "keys of over 64 dots"),
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


def load_any_function(spec):
    load_function(spec, what="a model", form="file.py:function", error=ModelError)


def test_link_to_code_of_any_name_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "code").write_text("make = lambda: 7\n")
    (tmp_path / "link.py").symlink_to("code")
    monkeypatch.chdir(tmp_path)
    function = load_function("link.py:make", what="a model", form="f.py:f", error=ModelError)
    assert function() == 7


def connect(address):
    with connect_client(address):
        pass


# what runs code -> the code, in the folder of a test
OPENERS = {
    call_loader: ("code.py:make",),
    load_any_function: ("code.py:make",),
    CalibratorScript: ("code.py:make",),
    metric_of: ("code.py:make",),
    lambda path: plugin_digests([Path(path)]): ("code.so",),
    connect: ("tcp://127.0.0.1:1",),
    lambda flag: TensorRT(trtexec_flags=(flag,)): ("--dynamicPlugins=code.so",),
    lambda flag: AtcOptions(extra=(flag,)): ("--custom=code.so",),
}
CODE = """
from contextlib import suppress
from pathlib import Path
Path(__file__).with_name("RAN").touch()
def make(): raise ValueError
"""
# who may write the config: path -> change of its mode; None if another user owns it
OWNERS = {
    "mine": {},
    "sticky": {"a": 0o1777},
    "file of another": {"a/b/c.toml": None},
    "folder of another": {"a/b": None},
    "file of all": {"a/b/c.toml": 0o666},
    "folder of all": {"a/b": 0o777},
    "folder above of all": {"a": 0o777},
    "target of a link": {"real.toml": None},
    "target of all": {"real.toml": 0o666},
}
TEXT_OPTIONS = [
    max(param.opts, key=len).lstrip("-")
    for param in build.params
    if not getattr(param, "is_flag", False) and not hasattr(param.type, "choices")
]


@pytest.mark.parametrize("owner", OWNERS)
def test_foreign_config_runs_no_code(owner, tmp_path, monkeypatch):
    """Whichever option of the file names it, and whichever opener gets it."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "a" / "b" / "c.toml"
    config.parent.mkdir(parents=True)
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "code.so").touch()
    (tmp_path / "m.onnx").touch()
    if "real.toml" in OWNERS[owner]:
        config.symlink_to(tmp_path / "real.toml")
    config.touch()
    for path, mode in OWNERS[owner].items():
        if mode is not None:
            (tmp_path / path).chmod(mode)
    foreign_paths = {tmp_path / path for path, mode in OWNERS[owner].items() if mode is None}
    stat = os.stat

    def foreign_stat(path, *arguments, **options):
        status = stat(path, *arguments, **options)
        uid = status.st_uid + (path in foreign_paths)
        return os.stat_result((*status[:4], uid, *status[5:]))

    monkeypatch.setattr("deploy.files.usercode.os.stat", foreign_stat)
    monkeypatch.setattr("deploy.calibration.cluster.CONNECT_S", 0.0)
    rng = random.Random(owner)
    is_foreign = owner not in ("mine", "sticky")
    opened_count = 0
    for _ in range(40):
        key, opener = rng.choice(TEXT_OPTIONS), rng.choice(list(OPENERS))
        code = rng.choice(OPENERS[opener])
        config.write_text(f"[build]\n{key} = '{code}'\n")
        try:
            context = build.make_context("build", ["m.onnx", "--config", str(config)])
        except (click.ClickException, Calib8Error):  # this option takes no such text
            continue
        expected_error = pytest.raises(ConfigError, match="--trust-config")
        with context, expected_error if is_foreign else suppress(Calib8Error):
            opener(code)
        opened_count += 1
    assert (tmp_path / "RAN").exists() == (not is_foreign)
    assert opened_count > 10


def test_typed_code_runs_beside_foreign_config(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    config = tmp_path / "c.toml"
    config.write_text("[build]\nimages = 'code.py:make'\n")
    config.chmod(0o666)
    model = save_small_cnn(tmp_path / "m.onnx")
    arguments = ("build", model, "--config", config)
    error = run.fails(*arguments)
    assert "--trust-config" in error
    assert "code.py" in error
    assert not (tmp_path / "RAN").exists()
    for trusted in (["--trust-config"], ["--images", "./code.py:make"]):
        assert "ValueError" in run.fails(*arguments, *trusted)
        (tmp_path / "RAN").unlink()


@pytest.mark.parametrize("character", ["\u202e", "\x7f", "\u2028", "\U000e0001", "é", "\t", '"'])
def test_hidden_characters_are_escaped_in_toml(character):
    text = toml_value(f"a{character}b")
    assert text.isprintable()
    assert tomllib.loads(f"x = {text}") == {"x": f"a{character}b"}
