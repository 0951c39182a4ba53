"""Training with samples that are tuples; what was trained goes through `build`."""
# ruff: noqa: E402 (torch may be missing)

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn

from deploy.fx.qat import Task
from tests.models import run_command

torch.set_num_threads(1)


def samples(epoch, count=4):
    rng = torch.Generator().manual_seed(epoch)
    for index in range(count):
        if index and epoch == 1 and os.path.exists("broken"):
            raise RuntimeError("the machine went down")
        image, scale = torch.randn(8, 3, 8, 8, generator=rng), torch.rand(8, generator=rng) + 1
        yield image, scale, (image.mean((1, 2, 3)) * scale > 0).long()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, image, scale):
        x = torch.relu(self.norm(self.conv(image)))
        x = torch.relu(self.conv2(x)) * scale.reshape(-1, 1, 1, 1)
        return self.head(x.mean((2, 3)))


def share(pairs):
    hits = [(out.argmax(1) == y).float().mean() for out, y in pairs]
    return float(sum(hits) / len(hits))


def scaled(inputs=None):
    def batches(epoch):
        return (((x, s), y) for x, s, y in samples(epoch))

    return Task(
        model=Scaled(),
        inputs=inputs or next(batches(0))[0],
        batches=batches,
        loss=nn.functional.cross_entropy,
        evaluate=lambda model: share((model(*b), y) for b, y in batches(7)),
        epochs=2,
    )


def named():
    return scaled([{"image": torch.zeros(2, 3, 8, 8), "scale": torch.ones(2)}])


@pytest.mark.slow
def test_tuple_samples_train(run, tmp_path, monkeypatch, wording):
    monkeypatch.chdir(tmp_path)
    uninterrupted = tmp_path / "w.onnx"
    resumed = tmp_path / "b.onnx"
    checkpoint = tmp_path / "kept.pt"
    arguments = ("qat", f"{__file__}:scaled", "--int8-stem", "-o")
    output = run.ok(*arguments, uninterrupted)
    assert "int8: 3 of 3 layers" in output
    assert "same arg-max 100.00%" in output
    session = onnxruntime.InferenceSession(str(uninterrupted), providers=["CPUExecutionProvider"])
    assert [spec.name for spec in session.get_inputs()] == ["image", "scale"]
    figure = share(
        (torch.from_numpy(session.run(None, {"image": x.numpy(), "scale": s.numpy()})[0]), y)
        for x, s, y in samples(7)
    )
    assert f"after training: {figure:.4f}" in output
    (tmp_path / "broken").touch()
    wording.check(run.fails(*arguments, resumed, "--checkpoint", checkpoint))
    assert not resumed.exists()
    (tmp_path / "broken").unlink()
    output = run.ok(*arguments, resumed, "--checkpoint", checkpoint)
    assert f"after epoch 1 of {checkpoint}" in output
    assert resumed.read_bytes() == uninterrupted.read_bytes()


def test_named_inputs_of_a_task_are_refused(refusal, tmp_path):
    arguments = ("qat", f"{__file__}:named", "--int8-stem", "-o", tmp_path / "n.onnx")
    assert "in the order of forward's arguments, got dict" in refusal(*arguments)


def train_arguments(target):
    stem = ["--int8-stem"] * (target == "onnxruntime")
    script = Path(__file__).parent / "torch_training.py"
    return ["qat", f"{script}:detection", "--target", target, *stem]


@pytest.fixture(scope="module")
def train_detector(tmp_path_factory):
    """(target) -> the model after 20 steps of training for it, in which the loss falls."""
    folder = tmp_path_factory.mktemp("qat")

    def call(target):
        path = folder / f"{target}.qdq.onnx"
        if not path.exists():
            output = run_command(*train_arguments(target), "-o", path)
            losses = [float(loss) for loss in re.findall(r"loss ([\d.e-]+)", output)]
            assert len(losses) == 4
            assert losses[-1] < losses[0]
            assert not any(n.op_type == "BatchNormalization" for n in onnx.load(path).graph.node)
        return path

    return call


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "x.npy"
    pictures = np.random.default_rng(1).normal(size=(4, 3, 32, 32)) * 0.1
    pictures[:, :, 8:16, 4:12] += 1
    np.save(path, pictures.astype(np.float32))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_trained_detector_builds_for_every_target(train_detector, data, command, tmp_path, target):
    out, model = tmp_path / "out", train_detector(target)
    options = ("--images", data, "--duration", 0, "--out", out, "--target")
    command("build", model, *options, "onnxruntime,tensorrt,ascend")
    report = json.loads((out / "report.json").read_text())
    for entry in report["targets"]:
        layers = [n for n in entry["nodes"] if n["op"] == "Conv"]
        int8 = [n for n in layers if n["precision"] in ("int8", "uint8")]
        if entry["name"] != "onnxruntime" or target == "onnxruntime":
            assert len(int8) == len(layers) == 17, entry["name"]
        else:  # its Convs want a pair before the SiLU, where the others have none
            assert "quantize for onnxruntime" in " ".join(entry["notes"])
    for row in report["engines"][1:]:
        assert min(float(part["sqnr_db"]) for part in row["accuracy"]["parts"]) > 20, row["target"]
    if target == "onnxruntime":
        assert (out / "onnxruntime.qdq.int8.onnx").read_bytes() == model.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_killed_training_resumes_to_same_bytes(train_detector, tmp_path, target):
    expected = train_detector(target)
    out = tmp_path / expected.name
    arguments = [*train_arguments(target), "--checkpoint", str(tmp_path / "qat.pt")]
    command = [sys.executable, "-m", "deploy", *arguments, "-o", str(out)]
    options = {"cwd": Path(__file__).parents[1], "capture_output": True, "text": True}
    broken = subprocess.run(command, env={**os.environ, "KILLED": "1"}, **options, check=False)
    assert broken.returncode == -signal.SIGKILL
    assert not out.exists()
    done = subprocess.run(command, **options, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == expected.read_bytes()
