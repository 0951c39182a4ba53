"""A training as a user's script says it: which of two means a small picture has."""

import torch
from torch import nn

from deploy.fx.qat import Task


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()


def batches(epoch):
    torch.manual_seed(epoch)
    for _ in range(4):
        y = torch.randint(0, 2, (16,))
        yield torch.randn(16, 1, 8, 8) + y[:, None, None, None], y


def task(epochs):
    return Task(
        model=net(),
        inputs=[torch.zeros(2, 1, 8, 8)],
        batches=batches,
        loss=nn.functional.cross_entropy,
        epochs=epochs,
    )


def once():
    return task(epochs=1)


def twice():
    return task(epochs=2)
