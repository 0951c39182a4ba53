"""`Trained`: what a Q/DQ model says beside the float model that was taken out of it.

::

    Q/DQ model --.--> float model, without pairs        --.
                 |--> range of each pair                  +--> LoadedModel, as of a float file
                 '--> scales of weights; what is float  --'

The ranges restore every grid of 8 bits to the bit (`calibrators.grids`); where a target has
another grid they are what both have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray

    from calibrators.scales import Scales
    from deploy.frontends.pairs import Grid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """What the pairs of a model say, whoever trained or calibrated it.

    Attributes:
        model: the Q/DQ model, functions inlined, weights inside, nodes named.
        name: what the user calls it.
        scales: tensor of the float model -> its range; of tensors too that only hand values on.
        weights: node -> float32 scales of its symmetric weight, [C_out] or [1].
        floats: node of the float model -> why it computes in float; all others run in int8.
        written: nodes whose output, a Relu behind it included, goes through a pair.
        grids: of the pairs on activations, by tensor of the float model.
        stored: of the constants behind pairs.
    """

    model: onnx.ModelProto
    name: str
    scales: Scales
    weights: Mapping[str, NDArray[np.float32]]
    floats: Mapping[str, str]
    written: frozenset[str]
    grids: Mapping[str, tuple[Grid, ...]]
    stored: tuple[Grid, ...]

    @property
    def kinds(self) -> str:
        """The grids of its activations in words: "int8 with zero point 0"."""
        kinds = {_kind(grid) for found in self.grids.values() for grid in found}
        return " and ".join(sorted(kinds))

    def only(self, dtype: str, *, symmetric: bool = False) -> bool:
        """Whether all pairs on activations are of this type, with zero point 0 where asked."""
        listed = (grid for found in self.grids.values() for grid in found)
        return all(g.dtype == dtype and not (symmetric and g.zero.any()) for g in listed)


def _kind(grid: Grid) -> str:
    if grid.dtype == "int8" and not grid.zero.any():
        return "int8 with zero point 0"
    return grid.dtype
