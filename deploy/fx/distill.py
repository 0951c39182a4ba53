"""Knowledge distillation from a float teacher.

Channel-wise distillation compares each channel's map, as a distribution over positions::

    phi(y)[n, c, i] = softmax over i of y[n, c, i] / T
    loss = T^2 / (N * C) * sum over n, c of KL(phi(teacher) || phi(student))

Sources: C. Shu et al., 2021, "Channel-wise Knowledge Distillation for Dense Prediction", equations
4-5; logits: G. Hinton et al., 2015, "Distilling the Knowledge in a Neural Network".
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deploy.errors import ConfigError, ModelError
from deploy.fx.comparison import tensors_of
from deploy.fx.fuse import CONVS, fold_batch_norms
from deploy.fx.int8_layers import QatLayer

_TEMPERATURE = 4.0


def channel_wise_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the channel-wise loss of [N, C, ...] maps of equal shape: a scalar, 0 if equal."""
    rows = student.shape[0] * student.shape[1], -1
    return logit_loss(student.reshape(rows), teacher.reshape(rows))


def logit_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the loss of [N, C] logits: T^2 times the mean KL divergence of the classes."""
    ours = functional.log_softmax(student / _TEMPERATURE, dim=1)
    theirs = functional.log_softmax(teacher / _TEMPERATURE, dim=1)
    divergence = functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    return divergence * _TEMPERATURE**2


class Distiller:
    """Runs the teacher on the student's inputs and computes the distillation loss.

    `teacher`: a float model; its norms are folded, so that layers of equal name compare. `layers`:
    (student's module, teacher's module) pairs to compare; by default the student's last convolution
    and the teacher's layer of that name.

    Raises:
        ConfigError: one of the models has no such layer.
        ModelError: the teacher cannot be captured.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        layers: Sequence[tuple[str, str]] = (),
        *,
        inputs: Sequence[Any] | None = None,
    ):
        self.teacher = fold_batch_norms(teacher.eval(), inputs)[0].requires_grad_(False)
        self.pairs = list(layers) or _last_convolution(student, self.teacher)
        self._maps: dict[tuple[str, str], torch.Tensor] = {}
        self._hooks = [
            hook
            for ours, theirs in self.pairs
            for hook in (
                self._record("student", student, ours),
                self._record("teacher", self.teacher, theirs),
            )
        ]

    def loss(self, inputs: tuple[Any, ...], output: Any) -> torch.Tensor:
        """Return the loss of the student's last forward, which returned `output`.

        Raises:
            ModelError: maps or logits have different shapes.
        """
        with torch.no_grad():
            expected = self.teacher(*inputs)
        pairs = [(self._maps["student", a], self._maps["teacher", b]) for a, b in self.pairs]
        total = torch.zeros(())
        for ours, theirs in [*pairs, *zip(tensors_of(output), tensors_of(expected), strict=True)]:
            if ours.shape != theirs.shape:
                raise ModelError(
                    f"student and teacher must give equal shapes, got {tuple(ours.shape)} and"
                    f" {tuple(theirs.shape)}; choose other layers"
                )
            measure = logit_loss if ours.dim() == 2 else channel_wise_loss
            total = total + measure(ours, theirs)
        return total

    def close(self) -> None:
        """Remove the hooks from both models."""
        for hook in self._hooks:
            hook.remove()

    def _record(self, whose: str, model: nn.Module, name: str) -> Any:
        if name not in dict(model.named_modules()):
            raise ConfigError(f"the {whose} has no module {name!r} to distil")

        def keep(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            self._maps[whose, name] = output

        return model.get_submodule(name).register_forward_hook(keep)


def _last_convolution(student: nn.Module, teacher: nn.Module) -> list[tuple[str, str]]:
    theirs = dict(teacher.named_modules())
    names = [
        name
        for name, module in student.named_modules()
        if isinstance(module, QatLayer) and isinstance(module.layer, CONVS) and name in theirs
    ]
    return [(names[-1], names[-1])] if names else []
