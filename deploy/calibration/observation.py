"""`Observation`: which statistic of which tensor of which variant of the model.

The one value in the middle. A target says which observations it needs; one pass fills them; one
store keeps them; each is judged by itself when a cache is used again::

    OnnxRuntime   (folded,               tensor, histogram)
    TensorRT      (folded,               tensor, histogram)  or, by TensorRT's own rule,
                  (as its parser reads,  tensor, histogram of the first batch's range)
    Ascend        (weights fake-quantized, tensor, ifmr or hfmg histogram)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from calibrators.statistics import Recorder, Statistic

if TYPE_CHECKING:
    import onnx

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Variant:
    """A form of the model that is run.

    Attributes:
        key: names the form with everything it depends on beside the model itself; equal keys are
            equal models.
        make: gives the model from what `needs` found; called only where it must be run.
        needs: observations of other variants, of the first samples, that it is made from; these
            may need others in their turn.
    """

    key: str
    make: Callable[[Observed], onnx.ModelProto] = field(compare=False, repr=False)
    needs: tuple[Observation, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Observation:
    """A statistic of a tensor of a variant.

    Attributes:
        whose: the layer that wants it, for an error; "" names the tensor alone.
    """

    variant: Variant
    tensor: str
    statistic: Statistic
    whose: str = field(default="", compare=False)

    @property
    def key(self) -> Key:
        """What names it in a store."""
        return self.variant.key, self.tensor, self.statistic.key

    @property
    def by_order(self) -> bool:
        """Whether the same samples in another order would give other numbers."""
        return self.statistic.ordered or self.statistic.samples is not None

    @property
    def lead(self) -> Observation | None:
        """What must be known of the first samples before this can begin."""
        lead = self.statistic.lead
        return None if lead is None else Observation(self.variant, self.tensor, lead, self.whose)


class Observed(Mapping[Key, Recorder]):
    """Observation key -> what was recorded, in the order of the observations."""

    def __init__(self, recorders: Mapping[Key, Recorder]) -> None:
        self._recorders = dict(recorders)

    def __getitem__(self, key: Key) -> Recorder:
        return self._recorders[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._recorders)

    def __len__(self) -> int:
        return len(self._recorders)

    def of(self, observation: Observation) -> Recorder:
        """The recorder of one observation."""
        return self._recorders[observation.key]

    def missing(self, wanted: Iterable[Observation]) -> tuple[Observation, ...]:
        """Those that are not here, each once."""
        return tuple(dict.fromkeys(o for o in wanted if o.key not in self._recorders))

    def and_also(self, other: Mapping[Key, Recorder]) -> Observed:
        """Both; what `other` holds wins."""
        return Observed({**self._recorders, **other})


def each_once(wanted: Mapping[str, Iterable[Observation]]) -> tuple[Observation, ...]:
    """What all targets want."""
    return tuple(dict.fromkeys(o for own in wanted.values() for o in own))


def with_needs(
    wanted: Iterable[Observation], known: Mapping[Key, Recorder] | None = None
) -> tuple[Observation, ...]:
    """The observations with all that their variants are made from, each once, needs first.

    Of what is known nothing is needed any more.
    """
    before = known or {}
    found: dict[Observation, None] = {}

    def add(observation: Observation) -> None:
        if observation in found:
            return
        for need in () if observation.key in before else observation.variant.needs:
            add(need)
        found[observation] = None

    for observation in wanted:
        add(observation)
    return tuple(found)
