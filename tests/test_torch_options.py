"""Options of the commands on PyTorch models that no other test gives."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from deploy.cli import cli  # noqa: E402

torch.set_num_threads(1)
NET = """
import torch
from torch import nn
from deploy.fx.qat import Task

def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()

def batches(epoch):
    yield torch.randn(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)

def setup():
    return Task(model=net(), inputs=[torch.zeros(2, 1, 8, 8)], batches=batches,
                loss=nn.functional.cross_entropy, epochs=9)
"""
SHAPE = ("--input", "2x1x8x8")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET)
    torch.manual_seed(1)
    layers = torch.nn.Conv2d(1, 4, 3), torch.nn.Linear(144, 2)
    conv, linear = (layer.state_dict() for layer in layers)
    state = {f"0.{k}": v for k, v in conv.items()} | {f"3.{k}": v for k, v in linear.items()}
    torch.save(state, tmp_path / "w.pt")
    return path


def run(*words):
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def constants(path):
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@pytest.mark.slow
def test_weights_are_loaded_by_every_command(script, tmp_path):
    given = (f"{script}:net", "--weights", tmp_path / "w.pt")
    out = tmp_path / "net.onnx"
    assert "opset 19" in run("export", *given, *SHAPE, "--opset", "19", "-o", out)
    held = torch.load(tmp_path / "w.pt", weights_only=True)["0.weight"].numpy()
    assert any(np.array_equal(value, held) for value in constants(out).values())
    for command in ("trace", "fuse"):
        run(command, *given)
    run("profile", *given, *SHAPE, "--runs", "1", "--warm-up", "0")
    assert "Conv" in run("inspect", *given, *SHAPE)


def test_trace_replaces_an_operation(script):
    script.write_text("from torch import nn\nclass N(nn.Module):\n"
                      "    def forward(self, x): return x + x\nnet = N\n")  # fmt: skip
    shown = run("trace", f"{script}:net", "--replace", "add=torch.mul", "--code")
    assert "torch.mul" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "layers"), [((), 2), (("op:Conv*",), 1), (("[13]",), 1), (("0", "op:Conv2d"), 1)]
)
def test_export_keeps_layers_in_float_by_name_pattern_and_type(script, tmp_path, kept, layers):
    out = tmp_path / "q.onnx"
    words = [word for one in kept for word in ("--keep-float", one)]
    mode = ("--qdq", "--mode", "weight-only", "--int8-stem")
    run("export", f"{script}:net", *SHAPE, *mode, *words, "-o", out)
    quantized = [
        value for value in constants(out).values() if value.dtype == np.int8 and value.ndim
    ]
    assert sum(value.ndim > 1 for value in quantized) == layers


@pytest.mark.slow
def test_export_calibrates_on_raw_files(script, tmp_path):
    (tmp_path / "raw").mkdir()
    batch = np.random.default_rng(2).normal(size=(4, 1, 8, 8)).astype("<f2")
    for number, one in enumerate(batch):
        one.tofile(tmp_path / "raw" / f"{number}.bin")
    np.save(tmp_path / "x.npy", batch.astype(np.float32))
    weights = "--weights", tmp_path / "w.pt"
    words = "export", f"{script}:net", *SHAPE, *weights, "--qdq", "--images"
    raw = tmp_path / "raw", "--raw-shape", "1x8x8", "--raw-dtype", "float16"
    run(*words, *raw, "-o", tmp_path / "a.onnx")
    run(*words, tmp_path / "x.npy", "-o", tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_export_refuses_what_it_would_ignore(script):
    for words, said in (
        (("--keep-float", "0", "--mode", "static"), "--mode and --keep-float go with --qdq"),
        (("--size", "8x8"), "--size goes with --qdq"),
        (("--int8-stem",), "--int8-stem goes with --qdq"),
        (("--qdq", "--target", "ascend", "--int8-stem"), "--int8-stem belongs to --target"),
        (("--qdq", "--mode", "dynamic", "--raw-dtype", "uint8"), "--raw-dtype goes with --images"),
        (("--qdq", "--mode", "dynamic", "--limit", "3"), "--limit goes with --images"),
        (("--qdq", "--mode", "dynamic", "--keep-float", "conv*"), "got 'conv*'"),
    ):
        shown = CliRunner().invoke(
            cli, ["export", f"{script}:net", *SHAPE, *words, "-o", str(script.with_suffix(".onnx"))]
        )
        assert said in str(shown.exception)
    shown = CliRunner().invoke(cli, ["fuse", f"{script}:net", "--device", "cpu"])
    assert "--device goes with --input or --sample" in str(shown.exception)
    teacher = ("--teacher-weights", "w.pt", "-o", "x.onnx")
    shown = CliRunner().invoke(cli, ["qat", f"{script}:setup", *teacher])
    assert "--teacher-weights goes with --teacher" in str(shown.exception)


@pytest.mark.slow
def test_qat_takes_another_teacher_length_and_grid(script, tmp_path):
    teacher = ("--teacher", f"{script}:net", "--teacher-weights", tmp_path / "w.pt")
    words = ("--bits", "6", "--ranges", "follow", "--epochs", "1", "--distil", "0")
    shown = run("qat", f"{script}:setup", *teacher, *words, "-o", tmp_path / "q.onnx")
    assert "epoch 1/1" in shown and "ranges by mse, follow" in shown
    method = ("--method", "percentile", "--percent", "99.5", "--epochs", "0")
    shown = run("qat", f"{script}:setup", *method, "-o", tmp_path / "q.onnx")
    assert "ranges by percentile 99.5, kept" in shown
