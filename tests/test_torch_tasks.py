"""Training with samples that are dicts or tuples; what was trained goes through `build`."""
# ruff: noqa: E402 (torch may be missing)

import json
import os
import signal
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from deploy.errors import ConfigError, FeedError
from deploy.fx.qat import Task
from deploy.fx.task import ForwardArguments, order_inputs

torch.set_num_threads(1)

TASKS = """
import os
import torch
from torch import nn
from deploy.fx.qat import Task

def samples(epoch, count=4):
    drawn = torch.Generator().manual_seed(epoch)
    for at in range(count):
        if at and epoch == 1 and os.path.exists("broken"):
            raise RuntimeError("the machine went down")
        image, scale = torch.randn(8, 3, 8, 8, generator=drawn), torch.rand(8, generator=drawn) + 1
        yield image, scale, (image.mean((1, 2, 3)) * scale > 0).long()

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 2)
    def forward(self, batch):
        return {"logits": self.compute(batch["image.rgb"], batch["scale"])}
    def compute(self, image, scale):
        x = torch.relu(self.norm(self.first(image)))
        x = torch.relu(self.second(x)) * scale.reshape(-1, 1, 1, 1)
        return self.head(x.mean((2, 3)))

class Words(Pair):  # by keywords, one of which has its default
    def forward(self, image, weight=None, scale=None, *, plain=True):
        return self.compute(image if weight is None else image * weight, scale)

class Both(Pair):  # in order
    def forward(self, image, scale):
        return self.compute(image, scale)

class Other(Pair):  # a teacher with its names in another order
    def forward(self, scale, image):
        return self.compute(image, scale)

def share(found):
    hits = [(out.argmax(1) == y).float().mean() for out, y in found]
    return float(sum(hits) / len(hits))

def setting(model, inputs, batches, evaluate, **more):
    loss = nn.functional.cross_entropy
    return Task(model=model, inputs=inputs, batches=batches, evaluate=evaluate, epochs=2,
                **({"loss": loss} | more))

def pair():
    def batches(epoch):
        return [({"scale": s, "image.rgb": x}, y) for x, s, y in samples(epoch)]
    return setting(
        Pair(), [batches(0)[0][0]], batches,
        lambda model: share((model(b)["logits"], y) for b, y in batches(7)),
        loss=lambda out, y: nn.functional.cross_entropy(out["logits"], y),
        calibration=lambda: [b for b, _ in batches(0)],
    )

def words():
    def batches(epoch):
        return (({"scale": s, "image": x}, y) for x, s, y in samples(epoch))
    def evaluate(model):
        found = [model(**b) for b, _ in batches(7)]
        assert all(torch.equal(a, model(x, None, s)) for a, (x, s, _) in zip(found, samples(7)))
        return share(zip(found, (y for _, y in batches(7))))
    return setting(Words(), [next(batches(0))[0]], batches, evaluate, teacher=Other())

def both():
    def batches(epoch):
        return (((x, s), y) for x, s, y in samples(epoch))
    return setting(
        Both(), next(batches(0))[0], batches,
        lambda model: share((model(*b), y) for b, y in batches(7)),
    )

def more():
    task = words()
    task.batches = lambda epoch: (({"image": x, "scale": s, "label": y}, y)
                                  for x, s, y in samples(epoch))
    return task

def nested():
    task = words()
    task.inputs = [(torch.zeros(2, 3, 8, 8), torch.ones(2))]
    return task
"""

NAMES = {"pair": ["scale", "image_rgb"], "words": ["image", "scale"], "both": ["image", "scale"]}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    return path


def drawn(epoch):
    """The samples of the task file, of which the trained model is to tell the sign."""
    found = {}
    exec(TASKS, found)
    return found["samples"](epoch)


def trained(run, tasks, name, out, *more):
    return run("qat", f"{tasks}:{name}", "--int8-stem", "-o", out, *more)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_samples_by_name_and_in_tuples_train_resume_and_export(tasks, run, tmp_path, name):
    whole, broken, kept = tmp_path / "w.onnx", tmp_path / "b.onnx", tmp_path / "kept.pt"
    code, said, err = trained(run, tasks, name, whole)
    assert code == 0, err
    assert "int8: 3 of 3 layers" in said and "same arg-max 100.00%" in said
    assert ("is given a dict of scale, image_rgb" in said) is (name == "pair")
    session = onnxruntime.InferenceSession(str(whole), providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == NAMES[name]
    image = max(NAMES[name], key=lambda one: one.startswith("image"))
    hits = [
        (session.run(None, {image: x.numpy(), "scale": s.numpy()})[0], y) for x, s, y in drawn(7)
    ]
    figure = np.mean([(out.argmax(1) == y.numpy()).mean() for out, y in hits])
    assert f"after training (8 bits): {figure:.4f}" in said
    (tmp_path / "broken").touch()
    code, _, err = trained(run, tasks, name, broken, "--checkpoint", kept)
    assert code == 1 and "the machine went down" in err and not broken.exists()
    (tmp_path / "broken").unlink()
    code, said, err = trained(run, tasks, name, broken, "--checkpoint", kept)
    assert code == 0 and f"going on after epoch 1 of {kept}" in said, err
    assert broken.read_bytes() == whole.read_bytes()


def test_samples_with_other_names_than_the_inputs_are_refused(tasks, run, tmp_path):
    for name, words in (
        (
            "more",
            "has the names of its inputs, image, scale, got image, scale, label; leave other"
            " names out",
        ),
        ("nested", "tensors, or one dict of tensors, got tuple; give each"),
    ):
        code, _, err = trained(run, tasks, name, tmp_path / "n.onnx")
        assert code == 1 and words in " ".join(err.split()), err


def test_a_call_is_read_as_the_users_forward_would():
    class Net(torch.nn.Module):
        def forward(self, a, b=None, *, c=1.5, **more):
            return a

    class Of(torch.nn.Module):
        def forward(self, batch, scale=2):
            return batch["a"]

    a, b, d = (torch.full((1,), float(value)) for value in (1, 2, 3))
    arguments = ForwardArguments.of(Net(), ["d", "b", "a"])
    assert arguments.names == ("a", "b", "d") and arguments.into is None
    calls = [
        ((a, b), {"d": d}),
        ((a,), {"d": d, "b": b, "c": 1.5}),
        (({"d": d, "b": b, "a": a},), {}),
    ]
    for args, kwargs in calls:
        assert arguments.tensors(*args, **kwargs) == (a, b, d)
    for args, kwargs in (((a,), {"d": d}), ((a, b), {"d": d, "c": 2.0}), ((), {}), ((a, b, d), {})):
        with pytest.raises(FeedError, match=r"got"):
            arguments.tensors(*args, **kwargs)
    inner = ForwardArguments.of(Of(), ["a"])
    assert inner.into == "batch"
    assert (
        inner.tensors({"a": a})
        == inner.tensors(batch={"a": a})
        == inner.tensors({"a": a}, 2)
        == (a,)
    )
    with pytest.raises(FeedError, match="got a, scale"):
        inner.tensors({"a": a}, scale=3)


def test_the_users_models_keep_their_class_and_share_their_weights():
    class Net(torch.nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"])

    model, x = Net(2, 2), torch.zeros(1, 2)
    task = Task(model=model, inputs=[{"x": x}], batches=lambda epoch: [], loss=lambda o, y: o)
    ordered = order_inputs(task)
    assert type(model) is Net and type(ordered.model) is not Net
    assert ordered.model.weight is model.weight and torch.equal(ordered.model(x), model({"x": x}))
    assert order_inputs(ordered) is ordered
    with pytest.raises(ConfigError, match=r"forward\(input\)"):
        order_inputs(Task(model=torch.nn.Linear(2, 2), inputs=[{"y": x}], batches=None, loss=None))


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
def trained_for(tmp_path_factory):
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
def test_a_trained_detector_goes_to_every_target(trained_for, data, command, tmp_path, target):
    out, model = tmp_path / "out", trained_for(target)
    words = ("--images", data, "--duration", 0, "--out", out, "--target")
    command("build", model, *words, "onnxruntime,tensorrt,ascend")
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
def test_training_that_was_killed_goes_on_to_the_same_bytes(trained_for, tmp_path, target):
    whole = trained_for(target)
    out = tmp_path / whole.name
    words = [*words_for(whole.parent, target), "--checkpoint", str(tmp_path / "qat.pt")]
    command = [sys.executable, "-m", "deploy", *words, "-o", str(out)]
    killed = {**os.environ, "KILLED": "1"}
    broken = subprocess.run(command, env=killed, capture_output=True, check=False)
    assert broken.returncode == -signal.SIGKILL and not out.exists()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == whole.read_bytes()
