"""Files that commands write: what they may replace."""

import os
from pathlib import Path

import pytest

from deploy.commands import base
from tests.command_tree import click_options, commands
from tests.models import run_command

QUICK_OPTIONS = ("--effort", 0, "--duration", 0, "--accept")
# Options with a rule of their own for what they replace, then those that are only read.
PATHS_WITH_OTHER_RULES = {
    "build --out",
    "build --cache",
    "calibrate --out",
    "merge --out",
    "qat --checkpoint",
    "ascend auto --out",
    "ascend auto --labels",
    "ascend convert --out",
    "ascend deploy --out",
    "build --labels",
    "check --labels",
    "build --config",
    "explain --model",
    "cache check --model",
    "ascend check --model",
    "ascend config --from",
    "qat --teacher-weights",
}


def output_options():
    """Yield (command, flag, position of the file among those that the flag takes)."""
    for path, command in commands():
        for param in command.params:
            for position, kind in enumerate(getattr(param.type, "types", [param.type])):
                if isinstance(kind, base.OutputFile):
                    yield " ".join(path), param.opts[-1], position


OUTPUTS = list(output_options())


def test_every_output_path_has_replacement_rule():
    plain_paths = set()
    for path, command in commands():
        for param in click_options(command):
            if type(param.type) is base.NamedPath:
                plain_paths.add(f"{' '.join(path)} {param.opts[-1]}")
    assert plain_paths == PATHS_WITH_OTHER_RULES
    assert len(OUTPUTS) > 20


@pytest.mark.parametrize(("command", "flag", "position"), OUTPUTS)
def test_output_never_replaces_a_user_file(command, flag, position, run, tmp_path):
    """It is refused while the command line is parsed, before its arguments are required."""
    user_file = tmp_path / "mine"
    user_file.write_text("precious\n")
    outputs = [user_file]
    if command == "cache from-qdq":  # its flag takes two files
        outputs = [tmp_path / "a", tmp_path / "b"]
        outputs[position] = user_file
    error = run.fails(*command.split(), flag, *outputs)
    assert f"none of a build, got {user_file};" in error
    outputs[position] = user_file / "below"
    error = run.fails(*command.split(), flag, *outputs)
    assert f"can be written to, got {user_file};" in error
    assert user_file.read_text() == "precious\n"


@pytest.fixture(scope="module")
def own_build(small_cnn, pictures, tmp_path_factory):
    """A folder with a build, its cache and a Q/DQ model."""
    out = tmp_path_factory.mktemp("own")
    targets = ("--target", "onnxruntime,tensorrt")
    run_command("build", small_cnn, "--images", pictures, "--out", out, *targets, *QUICK_OPTIONS)
    return out


@pytest.mark.parametrize(
    "arguments",
    [
        "inspect MODEL --json p",
        "quantize [1,2] --json p",
        "explain OUT --json p",
        "report OUT OUT --json p",
        "compare MODEL OUT/small_cnn.int8.onnx IMAGES --json p",
        "bench MODEL --duration 0 --warm-up 0 --json p --html q",
        "calibrate MODEL IMAGES --json p",
        "build MODEL IMAGES --effort 0 --duration 0 --accept --json p",
        "ascend config MODEL -o p",
        "cache to-qdq MODEL OUT/small_cnn.tensorrt.cache -o p",
        "cache from-qdq OUT/small_cnn.tensorrt.qdq.onnx -o p q",
        "cache relabel OUT/small_cnn.tensorrt.cache --trt-version 10.5.0 -o p",
    ],
)
def test_outputs_replace_calib8_files(
    arguments, own_build, run, small_cnn, pictures, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    arguments = arguments.replace("MODEL", str(small_cnn)).replace("OUT", str(own_build))
    arguments = arguments.replace("IMAGES", f"--images {pictures}").split()
    outputs = [Path(path) for path in ("p", "q") if path in arguments]
    for path in outputs:
        path.touch()  # as mktemp leaves it
    for _ in range(2):
        run.ok(*arguments)
        assert all(path.stat().st_size for path in outputs)


def test_output_never_replaces_a_build_file(
    own_build, run, small_cnn, pictures, tmp_path, monkeypatch, wording
):
    monkeypatch.chdir(tmp_path)
    build = ("build", small_cnn, "--images", pictures, "--out", "o", *QUICK_OPTIONS, "--force")
    for name in ("small_cnn.int8.onnx", "report.json", "calib8/small_cnn.cache.json"):
        wording.check(run.fails(*build, "--json", f"o/{name}"))
    Path("c.toml").write_text("[build]\njson = 'mine'\n")
    Path("mine").write_text("precious")
    assert "got mine;" in run.fails(*build, "--config", "c.toml")
    wording.check(run.fails("bench", small_cnn, "--json", "p", "--html", "./p"))
    for name in ("report.json", "calib8/manifest.json", f"../{own_build.name}/report.json"):
        wording.check(run.fails("inspect", small_cnn, "--json", own_build / name))
    assert run.ok("verify", own_build)
    assert sorted(os.listdir()) == ["c.toml", "mine"]
