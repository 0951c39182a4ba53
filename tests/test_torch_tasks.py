"""Training with samples that are dicts or tuples; what was trained goes through `build`."""
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

from deploy.errors import ConfigError, FeedError
from deploy.fx.qat import Task
from deploy.fx.task import ForwardArguments, order_inputs
from tests.models import run_command
from tests.torch_shapes import module

torch.set_num_threads(1)


def samples(epoch, count=4):
    rng = torch.Generator().manual_seed(epoch)
    for index in range(count):
        if index and epoch == 1 and os.path.exists("broken"):
            raise RuntimeError("the machine went down")
        image, scale = torch.randn(8, 3, 8, 8, generator=rng), torch.rand(8, generator=rng) + 1
        yield image, scale, (image.mean((1, 2, 3)) * scale > 0).long()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, batch):
        return {"logits": self.compute(batch["image.rgb"], batch["scale"])}

    def compute(self, image, scale):
        x = torch.relu(self.norm(self.conv(image)))
        x = torch.relu(self.conv2(x)) * scale.reshape(-1, 1, 1, 1)
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


def share(pairs):
    hits = [(out.argmax(1) == y).float().mean() for out, y in pairs]
    return float(sum(hits) / len(hits))


def task_of(model, batches, evaluate, loss=nn.functional.cross_entropy, **options):
    """A task whose first batch has its inputs."""
    example = next(iter(batches(0)))[0]
    feed = {
        "inputs": list(example) if isinstance(example, tuple) else [example],
        "batches": batches,
    }
    return Task(model=model, evaluate=evaluate, loss=loss, epochs=2, **feed, **options)


def pair():
    def batches(epoch):
        return [({"scale": s, "image.rgb": x}, y) for x, s, y in samples(epoch)]

    return task_of(
        Pair(),
        batches,
        lambda model: share((model(b)["logits"], y) for b, y in batches(7)),
        loss=lambda out, y: nn.functional.cross_entropy(out["logits"], y),
        calibration=lambda: [b for b, _ in batches(0)],
    )


def words():
    def batches(epoch):
        return (({"scale": s, "image": x}, y) for x, s, y in samples(epoch))

    def evaluate(model):
        results = [(model(**b), model(b["image"], None, b["scale"]), y) for b, y in batches(7)]
        assert all(torch.equal(a, b) for a, b, _ in results)
        return share((out, y) for out, _, y in results)

    return task_of(Words(), batches, evaluate, teacher=Other())


def both():
    def batches(epoch):
        return (((x, s), y) for x, s, y in samples(epoch))

    return task_of(Both(), batches, lambda model: share((model(*b), y) for b, y in batches(7)))


def with_labels():
    task, of_words = words(), words().batches
    task.batches = lambda epoch: (({**b, "label": y}, y) for b, y in of_words(epoch))
    return task


def nested():
    task = words()
    task.inputs = [(torch.zeros(2, 3, 8, 8), torch.ones(2))]
    return task


NAMES = {"pair": ["scale", "image_rgb"], "words": ["image", "scale"], "both": ["image", "scale"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_named_and_tuple_samples_train(run, tmp_path, monkeypatch, name, wording):
    monkeypatch.chdir(tmp_path)
    uninterrupted = tmp_path / "w.onnx"
    resumed = tmp_path / "b.onnx"
    checkpoint = tmp_path / "kept.pt"
    arguments = ("qat", f"{__file__}:{name}", "--int8-stem", "-o")
    output = run.ok(*arguments, uninterrupted)
    assert "int8: 3 of 3 layers" in output
    assert "same arg-max 100.00%" in output
    assert ("dict of scale, image_rgb" in output) is (name == "pair")
    session = onnxruntime.InferenceSession(str(uninterrupted), providers=["CPUExecutionProvider"])
    assert [spec.name for spec in session.get_inputs()] == NAMES[name]
    image = max(NAMES[name], key=lambda spec: spec.startswith("image"))
    figure = share(
        (torch.from_numpy(session.run(None, {image: x.numpy(), "scale": s.numpy()})[0]), y)
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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "with_labels",
            "has the names of its inputs, image, scale, got scale, image, label; leave other",
        ),
        ("nested", "tensors, or one dict of tensors, got tuple; give each"),
    ],
)
def test_samples_of_other_names_are_refused(refusal, tmp_path, name, reason):
    assert reason in refusal("qat", f"{__file__}:{name}", "--int8-stem", "-o", tmp_path / "n.onnx")


def test_arguments_match_the_users_forward():
    a, b, d = (torch.full((1,), float(value)) for value in (1, 2, 3))
    net = module(lambda self, a, b=None, *, c=1.5, **with_labels: a)
    arguments = ForwardArguments.match(net, ["d", "b", "a"])
    assert arguments.names == ("a", "b", "d")
    assert arguments.dict_argument is None
    assert arguments.tensors(a, b, d=d) == arguments.tensors(a, d=d, b=b, c=1.5) == (a, b, d)
    assert arguments.tensors({"d": d, "b": b, "a": a}) == (a, b, d)
    for args, kwargs in (((a,), {"d": d}), ((a, b), {"d": d, "c": 2.0}), ((), {}), ((a, b, d), {})):
        with pytest.raises(FeedError, match=r"got"):
            arguments.tensors(*args, **kwargs)
    inner = ForwardArguments.match(module(lambda self, batch, scale=2: batch["a"]), ["a"])
    assert inner.dict_argument == "batch"
    for args, kwargs in ((({"a": a},), {}), ((), {"batch": {"a": a}}), (({"a": a}, 2), {})):
        assert inner.tensors(*args, **kwargs) == (a,)
    with pytest.raises(FeedError, match="got a, scale"):
        inner.tensors({"a": a}, scale=3)


def test_ordered_model_shares_its_weights():
    class Net(torch.nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"])

    model, x = Net(2, 2), torch.zeros(1, 2)
    task = Task(model=model, inputs=[{"x": x}], batches=lambda epoch: [], loss=lambda o, y: o)
    ordered = order_inputs(task)
    assert type(model) is Net
    assert type(ordered.model) is not Net
    assert ordered.model.weight is model.weight
    assert torch.equal(ordered.model(x), model({"x": x}))
    assert order_inputs(ordered).model is ordered.model
    with pytest.raises(ConfigError, match=r"forward\(input\)"):
        order_inputs(Task(model=torch.nn.Linear(2, 2), inputs=[{"y": x}], batches=None, loss=None))


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
