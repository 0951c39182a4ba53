"""The float model's first samples, from which its task is recognised."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from deploy.tasks.declarations import Declaration
from deploy.tasks.rows import (
    ImageSize,
    Outputs,
    image_size,
    is_floating,
)
from deploy.tensors import Array


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The float model's first samples, at least one, from which a task is recognised.

    Attributes:
        inputs: one mapping per sample, with a batch of 1.
        outputs: the same for floating-point and integer outputs.
        declared: what the model's file declares.
        are_known_boxes: whether the user or the model's file says that the outputs are boxes.
    """

    inputs: Sequence[Outputs]
    outputs: Sequence[Outputs]
    declared: Declaration = field(default_factory=Declaration)
    are_known_boxes: bool = False

    def arrays(self, name: str) -> list[Array]:
        """Return one output's array of every sample."""
        return [sample[name] for sample in self.outputs]

    @property
    def has_pictures(self) -> bool:
        """Whether a sample has a picture among its inputs."""
        return any(image_size(sample) is not None for sample in self.inputs)

    @property
    def picture_size(self) -> ImageSize | None:
        """Size that the pictures of all samples have; None if they differ."""
        sizes = {image_size(sample) for sample in self.inputs}
        if len(sizes) != 1:
            return None
        return sizes.pop()

    @property
    def names(self) -> tuple[str, ...]:
        """Outputs that have values in every sample."""
        return tuple(name for name in self.output_names if all(map(np.size, self.arrays(name))))

    @property
    def float_outputs(self) -> dict[str, list[Array]]:
        """Outputs that are finite floating-point numbers in every sample -> their arrays."""
        floats = {}
        for name in self.names:
            arrays = self.arrays(name)
            if all(map(is_floating, arrays)):
                floats[name] = arrays
        return floats

    @property
    def sigmoid_outputs(self) -> frozenset[str]:
        """Outputs that a Sigmoid computes, of scores that are no output themselves."""
        ends = self.declared.ends
        repeats = {*self.declared.probabilities.values()}
        return frozenset(name for name in ends if ends[name] == "sigmoid" and name not in repeats)

    @property
    def output_names(self) -> tuple[str, ...]:
        """All outputs, also those without values."""
        return tuple(self.outputs[0])


def sort_by_size(samples: FirstSamples) -> list[str]:
    """Return the floating-point outputs, the largest first."""
    return sorted(samples.float_outputs, key=lambda name: -samples.outputs[0][name].size)


def drop_outputs(samples: FirstSamples, names: Collection[str]) -> FirstSamples:
    """Return the samples without these outputs."""
    outputs = []
    for sample in samples.outputs:
        outputs.append({name: sample[name] for name in sample if name not in names})
    return replace(samples, outputs=outputs)
