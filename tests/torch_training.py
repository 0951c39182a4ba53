"""Trainings as a user's script says them: which of two means a small picture has."""

from functools import partial

import torch
from torch import nn

from deploy.fx.qat import Task
from tests.torch_shapes import module


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()


def part():
    return module(
        lambda self, x: torch.relu(self.norm(self.conv(x))) + x,
        conv=nn.Conv2d(3, 3, 3, padding=1), norm=nn.BatchNorm2d(3),
    )  # fmt: skip


def parts():
    """Modules in modules, and functions between them."""
    torch.manual_seed(0)
    inside = {"parts": nn.Sequential(part(), part()), "head": nn.Linear(192, 2)}
    return module(lambda self, x: self.head(self.parts(x).flatten(1)), **inside)


def batches(epoch, channels=1):
    torch.manual_seed(epoch)
    for _ in range(4):
        y = torch.randint(0, 2, (16,))
        yield torch.randn(16, channels, 8, 8) + y[:, None, None, None], y


def task(epochs, model=net, channels=1):
    return Task(
        model=model(),
        inputs=[torch.zeros(2, channels, 8, 8)],
        batches=partial(batches, channels=channels),
        loss=nn.functional.cross_entropy,
        epochs=epochs,
    )


once, twice, of_parts = partial(task, 1), partial(task, 2), partial(task, 1, parts, 3)
