"""Training for int8 with samples that are dicts, or tuples of several inputs."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from deploy.errors import ConfigError, FeedError  # noqa: E402
from deploy.fx.qat import Task  # noqa: E402
from deploy.fx.task import Arguments, in_order  # noqa: E402

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
def tasks(tmp_path: Path, monkeypatch) -> Path:
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    return path


def drawn(epoch):
    """The samples of the task file, of which the trained model is to tell the sign."""
    found: dict = {}
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
        ("more", "has what its inputs have, image, scale, got image, scale, label; leave out"),
        ("nested", "tensors, or one dict of tensors, got tuple; name what lies"),
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
    arguments = Arguments.of(Net(), ["d", "b", "a"])
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
    inner = Arguments.of(Of(), ["a"])
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
    ordered = in_order(task)
    assert type(model) is Net and type(ordered.model) is not Net
    assert ordered.model.weight is model.weight and torch.equal(ordered.model(x), model({"x": x}))
    assert in_order(ordered) is ordered
    with pytest.raises(ConfigError, match=r"forward\(input\)"):
        in_order(Task(model=torch.nn.Linear(2, 2), inputs=[{"y": x}], batches=None, loss=None))
