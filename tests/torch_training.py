"""Trainings as a user's script says them: which of two means a picture has, where a box is."""

import os
import signal
from functools import partial

import torch
from torch import nn

from deploy.fx.qat import Task
from tests.torch_shapes import ConvAct, Detector, module


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()


def part():
    return module(
        lambda self, x: torch.relu(self.norm(self.conv(x))) + x,
        conv=nn.Conv2d(3, 3, 3, padding=1),
        norm=nn.BatchNorm2d(3),
    )


def parts():
    """Modules in modules, and functions between them."""
    torch.manual_seed(0)
    submodules = {"parts": nn.Sequential(part(), part()), "head": nn.Linear(192, 2)}
    return module(lambda self, x: self.head(self.parts(x).flatten(1)), **submodules)


def batches(epoch, channels=1):
    torch.manual_seed(epoch)
    for _ in range(4):
        y = torch.randint(0, 2, (16,))
        yield torch.randn(16, channels, 8, 8) + y[:, None, None, None], y


def task(epochs, model=net, channels=1):
    return Task(
        model=model(),
        inputs=[torch.zeros(2, channels, 8, 8)],
        epochs=epochs,
        batches=partial(batches, channels=channels),
        loss=nn.functional.cross_entropy,
    )


once, twice, of_parts = partial(task, 1), partial(task, 2), partial(task, 1, parts, 3)


class Maps(Detector):
    """The raw maps of both scales, side by side."""

    def forward(self, x):
        return torch.cat([feature_map.flatten(2) for feature_map in super().forward(x)[1]], 2)


def boxes(epoch):
    """Pictures of one bright box; where it is, cell by cell. "KILLED" ends the third epoch."""
    if epoch == 2 and "KILLED" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    rng = torch.Generator().manual_seed(epoch)
    for _ in range(5):
        x, y = torch.randn(4, 3, 32, 32, generator=rng) * 0.1, torch.zeros(4, 6, 80)
        for index, (row, column) in enumerate(torch.randint(0, 7, (4, 2), generator=rng).tolist()):
            x[index, :, 4 * row : 4 * row + 8, 4 * column : 4 * column + 8] += 1
            y[index, :, 8 * row + column] = 1
        yield x, y


def detection():
    torch.manual_seed(0)
    model = Maps(classes=2)
    for layer in model.modules():
        if isinstance(layer, ConvAct):
            nn.init.kaiming_normal_(layer.conv.weight)  # so that values stay as large as they are
    return Task(
        model=model.eval(),
        inputs=[torch.zeros(2, 3, 32, 32)],
        batches=boxes,
        loss=nn.functional.mse_loss,
        epochs=4,
    )
