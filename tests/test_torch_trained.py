"""What `calib8 qat` trained goes through `calib8 build`, to every target."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

torch.set_num_threads(1)
SIDE = 32
TRAIN = '''
import os
import signal

import torch
from torch import nn

from deploy.fx.qat import Task


class Block(nn.Module):
    def __init__(self, i, o, s=1):
        super().__init__()
        self.conv = nn.Conv2d(i, o, 3, s, 1, bias=False)
        nn.init.kaiming_normal_(self.conv.weight)  # so that values stay as large as they are
        self.bn = nn.BatchNorm2d(o)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Split(nn.Module):
    """Half of the channels go through a residual block, as in YOLOv8's C2f."""

    def __init__(self, c):
        super().__init__()
        self.a, self.b = Block(c, c), Block(c // 2, c // 2)
        self.c = Block(c + c // 2, c)

    def forward(self, x):
        x = self.a(x)
        left, right = torch.chunk(x, 2, 1)
        return self.c(torch.cat([left, right, right + self.b(right)], 1))


class Detector(nn.Module):
    """YOLOv8's shape in small: stem, C2f, pooling, two scales that meet, a head each."""

    def __init__(self):
        super().__init__()
        self.stem, self.down = Block(3, 8, 2), Block(8, 16, 2)
        self.first, self.lower = Split(16), Block(16, 16, 2)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.mix = Block(32, 16)
        self.up = nn.Upsample(scale_factor=2)
        self.join = Block(32, 16)
        self.heads = nn.ModuleList([nn.Conv2d(16, 6, 1), nn.Conv2d(16, 6, 1)])

    def forward(self, x):
        high = self.first(self.down(self.stem(x)))
        low = self.lower(high)
        low = self.mix(torch.cat([low, self.pool(low)], 1))
        high = self.join(torch.cat([self.up(low), high], 1))
        found = [self.heads[0](high).flatten(2), self.heads[1](low).flatten(2)]
        return torch.cat(found, 2)


def boxes(epoch):
    """Pictures of one bright box; where it is, cell by cell."""
    if epoch == 2 and "KILLED" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    made = torch.Generator().manual_seed(epoch)
    for _ in range(5):
        x, y = torch.randn(4, 3, 32, 32, generator=made) * 0.1, torch.zeros(4, 6, 80)
        for one, (row, column) in enumerate(torch.randint(0, 7, (4, 2), generator=made).tolist()):
            x[one, :, 4 * row : 4 * row + 8, 4 * column : 4 * column + 8] += 1
            y[one, :, 8 * row + column] = 1
        yield x, y


def setup():
    torch.manual_seed(0)
    return Task(
        model=Detector().eval(),
        inputs=[torch.zeros(2, 3, 32, 32)],
        batches=boxes,
        loss=nn.functional.mse_loss,
        epochs=4,
    )


def make():
    torch.manual_seed(0)
    return Detector().eval()
'''


def words_for(folder, target):
    stem = ["--int8-stem"] * (target == "onnxruntime")
    return ["qat", f"{folder / 'train.py'}:setup", "--target", target, *stem, "--quiet"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(target) -> what 20 steps of training for it leave."""
    from deploy.cli import main

    folder = tmp_path_factory.mktemp("qat")
    (folder / "train.py").write_text(TRAIN)
    made = {}

    def call(target):
        if target not in made:
            made[target] = folder / f"{target}.qdq.onnx"
            try:
                main([*words_for(folder, target), "-o", str(made[target])])
            except SystemExit as stop:
                assert not stop.code
        return made[target]

    return call


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "x.npy"
    held = np.random.default_rng(1).normal(size=(4, 3, SIDE, SIDE)) * 0.1
    held[:, :, 8:16, 4:12] += 1
    np.save(path, held.astype(np.float32))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_a_trained_detector_goes_to_every_target(trained, data, run, tmp_path, target):
    out, model = tmp_path / "out", trained(target)
    words = ("--images", data, "--duration", 0, "--out", out, "--target")
    code, _, err = run("build", model, *words, "onnxruntime,tensorrt,ascend")
    assert code == 0, err
    report = json.loads((out / "report.json").read_text())
    for one in report["targets"]:
        layers = [n for n in one["nodes"] if n["op"] == "Conv"]
        int8 = [n for n in layers if n["precision"] in ("int8", "uint8")]
        if one["name"] != "onnxruntime" or target == "onnxruntime":
            assert len(int8) == len(layers) == 10, one["name"]
        else:  # its Convs want a pair before the SiLU, where the others have none
            assert "quantize for onnxruntime to have them in int8" in " ".join(one["notes"])
    for row in report["engines"][1:]:
        assert min(float(part["sqnr_db"]) for part in row["accuracy"]["parts"]) > 20, row["target"]
    if target == "onnxruntime":
        assert (out / "onnxruntime.qdq.int8.onnx").read_bytes() == model.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_training_that_was_killed_goes_on_to_the_same_bytes(trained, tmp_path, target):
    whole = trained(target)
    out = tmp_path / whole.name
    words = [*words_for(whole.parent, target), "--checkpoint", str(tmp_path / "qat.pt")]
    command = [sys.executable, "-m", "deploy", *words, "-o", str(out)]
    killed = {**os.environ, "KILLED": "1"}
    broken = subprocess.run(command, env=killed, capture_output=True, check=False)
    assert broken.returncode == -signal.SIGKILL and not out.exists()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == whole.read_bytes()
