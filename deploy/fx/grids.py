"""The grid of a target's activations, at fewer bits where that is asked for."""

from __future__ import annotations

from dataclasses import replace

from calibrators.grids import Grid
from deploy.errors import ConfigError

BITS = (2, 3, 4, 5, 6, 7, 8)


def at_bits(grid: Grid, bits: int) -> Grid:
    """The integers of `grid`, of 8 bits, that `bits` have; stored in the same type.

    Raises:
        ConfigError: another number of bits, or a grid of floats.
    """
    if bits not in BITS:
        raise ConfigError(f"bits are {BITS[0]} to {BITS[-1]}, got {bits}")
    if grid.kind != "integer":
        raise ConfigError(f"a PyTorch model is quantized to integers, got a grid of {grid.name}")
    low = -(2 ** (bits - 1)) if grid.qmin < 0 else 0
    name = grid.name.rstrip("0123456789") + str(bits)
    return replace(grid, name=name, bits=bits, qmin=low, qmax=low + 2**bits - 1)
