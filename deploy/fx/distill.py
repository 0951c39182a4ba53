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
from deploy.fx.trace import submodule

_TEMPERATURE = 4.0  # T of the formulas


def channel_wise_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the channel-wise loss of [N, C, ...] maps of equal shape: a scalar, 0 if equal."""
    map_count = student.shape[0] * student.shape[1]
    return logit_loss(student.reshape(map_count, -1), teacher.reshape(map_count, -1))


def logit_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the loss of [N, C] logits: T^2 times the mean KL divergence of the classes."""
    student_log = functional.log_softmax(student / _TEMPERATURE, dim=1)
    teacher_log = functional.log_softmax(teacher / _TEMPERATURE, dim=1)
    divergence = functional.kl_div(student_log, teacher_log, reduction="batchmean", log_target=True)
    return divergence * _TEMPERATURE**2


class Distiller:
    """Runs the teacher on the student's inputs and computes the distillation loss.

    Args:
        student: the prepared model.
        teacher: a float model; its norms are folded, so that layers of equal name compare.
        layers: (student's module, teacher's module) pairs to compare; by default the student's last
            convolution and the teacher's layer of that name.
        inputs: example inputs to capture the teacher with; None to trace it symbolically.

    Attributes:
        teacher: the folded teacher, which is not trained.
        layer_pairs: modules whose outputs are compared: (student's, teacher's).

    Raises:
        ConfigError: one of the models has no such layer, or the name is that of a block.
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
        folded_teacher, _report = fold_batch_norms(teacher, inputs)
        self.teacher = folded_teacher.requires_grad_(False)
        self.layer_pairs: list[tuple[nn.Module, nn.Module]] = []
        # module of student or teacher -> its output in the last forward of that model
        self._output_by_layer: dict[nn.Module, torch.Tensor] = {}
        self._hooks: list[Any] = []
        layers = layers or _last_convolution(student, self.teacher)
        for student_name, teacher_name in layers:
            pair = (submodule(student, student_name), submodule(self.teacher, teacher_name))
            if any(type(layer) is nn.Module for layer in pair):  # a block, in a graph
                raise ConfigError(
                    "distil compares the outputs of layers, and a block is run layer by layer, got"
                    f" {student_name}={teacher_name}; name the last layer in it"
                )
            self._hooks += [layer.register_forward_hook(self._store_output) for layer in pair]
            self.layer_pairs.append(pair)

    def loss(self, inputs: tuple[Any, ...], output: Any) -> torch.Tensor:
        """Return the loss of the student's last forward against the teacher's, as a scalar.

        It is the sum over the compared layers and all outputs.

        Args:
            inputs: tensors of that forward.
            output: what the student returned.

        Raises:
            ModelError: maps or logits have different shapes.
        """
        with torch.no_grad():
            teacher_output = self.teacher(*inputs)
        # tensors to compare: first the outputs of the layers, then those of the models
        student_tensors = [self._output_by_layer[layer] for layer, _ in self.layer_pairs]
        student_tensors += tensors_of(output)
        teacher_tensors = [self._output_by_layer[layer] for _, layer in self.layer_pairs]
        teacher_tensors += tensors_of(teacher_output)

        total = torch.zeros(())
        for student, teacher in zip(student_tensors, teacher_tensors, strict=True):
            if student.shape != teacher.shape:
                raise ModelError(
                    f"student and teacher must give equal shapes, got {tuple(student.shape)} and"
                    f" {tuple(teacher.shape)}; choose other layers"
                )
            is_logits = student.dim() == 2  # else maps
            loss = logit_loss if is_logits else channel_wise_loss
            total = total + loss(student, teacher)
        return total

    def close(self) -> None:
        """Remove the hooks from both models."""
        for hook in self._hooks:
            hook.remove()

    def _store_output(self, layer: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        self._output_by_layer[layer] = output


def _last_convolution(student: nn.Module, teacher: nn.Module) -> list[tuple[str, str]]:
    """Return the student's last quantized convolution that the teacher has too, as a pair."""
    teacher_modules = dict(teacher.named_modules())
    for name, module in reversed(list(student.named_modules())):
        is_convolution = isinstance(module, QatLayer) and isinstance(module.layer, CONVS)
        if is_convolution and name in teacher_modules:
            return [(name, name)]
    return []
