"""What a shell completes of `calib8 ...`."""

import pytest
from click.shell_completion import ShellComplete

from deploy.cli import cli, main


def completed(*words, begun=""):
    shell = ShellComplete(cli, {}, "calib8", "_CALIB8_COMPLETE")
    return [item.value for item in shell.get_completions(list(words), begun)]


@pytest.mark.parametrize(
    ("option", "begun", "found"),
    [
        ("--target", "", ["onnxruntime", "tensorrt", "ascend"]),
        ("--target", "tensorrt,", ["tensorrt,onnxruntime", "tensorrt,ascend"]),
        ("--preprocess", "ima", ["imagenet", "imagenet-tf"]),
        ("--resize", "s", ["stretch", "short-side"]),
        ("--interpolation", "l", ["linear", "lanczos"]),
        ("--color", "g", ["grey"]),
        ("--layout", "nc", ["nchw"]),
        ("--repair", "b", ["bias"]),
        ("--method", "per", ["percentile"]),
        ("--rest", "fp", ["fp16", "fp32"]),
    ],
)
def test_values_of_an_option(option, begun, found):
    assert completed("build", "net.onnx", option, begun=begun) == found


def test_commands_and_options():
    assert completed(begun="do") == ["doctor"]
    assert "--config" in completed("build", begun="--c")


def test_the_script_of_a_shell(monkeypatch, capsys):
    monkeypatch.setenv("_CALIB8_COMPLETE", "zsh_source")
    with pytest.raises(SystemExit) as stop:
        main([])
    assert not stop.value.code
    assert "#compdef calib8" in capsys.readouterr().out
