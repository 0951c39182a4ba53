"""A PyTorch model straight through: build, calibrate and inspect take file.py:factory."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from deploy.cli import cli  # noqa: E402
from deploy.errors import ConfigError, ModelError  # noqa: E402
from deploy.frontends import load  # noqa: E402
from deploy.frontends.torch_model import parse_shape  # noqa: E402
from deploy.fx.opening import export_torch, open_torch  # noqa: E402

torch.set_num_threads(1)
HERE = Path(__file__).parent
SMALL = f"{HERE / 'resnet18.py'}:small"
LITE0 = f"{HERE.parent / 'benchmarks' / 'efficientnet_lite0.py'}:make"


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def outputs(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "size"), [(SMALL, 64), (LITE0, 224)], ids=["resnet", "lite0"])
def test_one_command_builds_what_its_onnx_builds(spec, size, tmp_path):
    x = np.random.default_rng(0).uniform(-1, 1, (3, 3, size, size)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    feed = ["--images", tmp_path / "x.npy", "--duration", 0]
    shape = ["--input", f"1x3x{size}x{size}"]
    done = run("build", spec, *shape, *feed, "--out", tmp_path / "torch")
    if "FetchError" in str(done.exception):
        pytest.skip(f"the model cannot be fetched: {done.exception}")
    assert done.exit_code == 0, (done.output, done.exception)
    assert run("export", spec, *shape, "-o", tmp_path / "net.onnx").exit_code == 0
    assert run("build", tmp_path / "net.onnx", *feed, "--out", tmp_path / "onnx").exit_code == 0
    (ours,) = (tmp_path / "torch").glob("*.int8.onnx")
    (theirs,) = (tmp_path / "onnx").glob("*.int8.onnx")
    assert ours.name.endswith(("resnet18-small.int8.onnx", "efficientnet_lite0-make.int8.onnx"))
    for left, right in zip(outputs(ours, x), outputs(theirs, x), strict=True):
        assert np.array_equal(left, right)
    float_outputs = outputs(tmp_path / "net.onnx", x)
    assert np.corrcoef(outputs(ours, x)[0].ravel(), float_outputs[0].ravel())[0, 1] > 0.98


@pytest.mark.slow
def test_the_same_model_has_the_same_digest_every_time():
    loaded = open_torch(SMALL, [(1, 3, 64, 64)])
    assert loaded.digest == open_torch(SMALL, [(4, 3, 64, 64)]).digest
    assert loaded.name == "resnet18-small" and loaded.inputs[0].shape == ("batch", 3, 64, 64)


@pytest.mark.slow
def test_inspect_and_calibrate_take_it_too(tmp_path):
    shape = ["--input", "1x3x64x64"]
    shown = run("inspect", SMALL, *shape)
    assert shown.exit_code == 0 and "20 Conv" in shown.output
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 64, 64), np.float32) + 0.5)
    shown = run("calibrate", SMALL, *shape, "--images", tmp_path / "x.npy",
                "-o", tmp_path / "m.cache")  # fmt: skip
    assert shown.exit_code == 0 and (tmp_path / "m.cache").is_file()


@pytest.mark.slow
def test_what_is_missing_or_wrong_is_said(tmp_path):
    with pytest.raises(ConfigError, match="needs the shape of its input: --input"):
        load(SMALL)
    with pytest.raises(ConfigError, match=r"file\.py:factory"):
        load(str(HERE / "resnet18.py"))
    assert "are for a model given as file.py:factory" in str(
        run("inspect", "model.onnx", "--input", "1x3").exception
    )
    for text in ("", "3x", "0x3", "axb", "1X3", "1x-3", "1x3 "):
        with pytest.raises(ConfigError, match="like 1x3x224x224"):
            parse_shape(text)
    with pytest.raises(ModelError, match="must be able to follow"):
        export_torch(SMALL, [(1, 4, 64, 64)])
    broken = tmp_path / "broken.py"
    broken.write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(3, 2, device='meta')\n"
    )
    with pytest.raises(ModelError):
        export_torch(f"{broken}:make", [(1, 3)])
