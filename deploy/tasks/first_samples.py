"""The float model's first samples, from which its task is recognised."""

import itertools
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

_PICTURE = 4  # dimensions of a picture
_CHANNELS = frozenset((1, 3, 4))


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The float model's first samples, at least one, from which a task is recognised.

    Attributes:
        inputs: one mapping per sample, with a batch of 1.
        outputs: the same for floating-point and integer outputs.
        declared: what the model's file declares.
        is_set: whether the user or the model's file says which task the outputs have.
    """

    inputs: Sequence[Outputs]
    outputs: Sequence[Outputs]
    declared: Declaration = field(default_factory=Declaration)
    is_set: bool = False

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


def find_states(samples: FirstSamples) -> dict[str, str]:
    """Return output -> input that takes it at the next call, for the states of a recurrent model.

    An output is taken for a state if it has an input's shape and type. If that holds for all
    outputs or for all inputs, the model may rebuild its input, as an autoencoder does: then the
    result is empty.
    """
    input_by_state: dict[str, str] = {}
    input_names = samples.inputs[0]
    for name, input_name in itertools.product(samples.names, input_names):
        is_paired = name in input_by_state or input_name in input_by_state.values()
        if not is_paired and _is_state(name, input_name, samples):
            input_by_state[name] = input_name
    has_other_outputs = len(input_by_state) < len(samples.output_names)
    has_other_inputs = len(input_by_state) < len(input_names)
    if has_other_outputs and has_other_inputs:
        return input_by_state
    return {}


def _is_state(name: str, source: str, samples: FirstSamples) -> bool:
    """Whether an output has an input's shape and type in every sample; no scalars, no pictures."""
    for value, inputs in zip(samples.arrays(name), samples.inputs, strict=False):
        state = inputs.get(source)
        if state is None or state.shape != value.shape or state.dtype != value.dtype:
            return False
        if value.dtype.kind != "f" or value.size < 2:
            return False
        if value.ndim == _PICTURE and {value.shape[1], value.shape[3]} & _CHANNELS:
            return False
    return True
