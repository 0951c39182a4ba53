"""Whether this machine can hold what a run takes, told before an hour of it and not after.

Estimates are lower bounds, by the shapes that the model states: only what is clearly impossible is
refused. Where all workers together would need more memory than there is, fewer of them do the work,
which changes no result.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from calibrators.histogram import BINS
from deploy.calibration.observation import Observation
from deploy.errors import CalibrationError, ExportError
from deploy.files.reading import size
from deploy.graph.index import Graph
from deploy.machine import memory_bytes

if TYPE_CHECKING:
    import onnx

_VALUE = 4  # bytes of a float32
_HISTOGRAM = 8 * (2 * BINS + 1)  # bytes of one


def workers(wanted: Iterable[Observation], model: onnx.ModelProto, threads: int) -> int:
    """How many workers can observe at once, at most `threads`.

    Args:
        wanted: what is to be observed.
        model: the cleaned model, whose shapes are counted; tensors of other forms are not.
        threads: workers that were asked for.

    Raises:
        CalibrationError: not one of them: a sample's tensors are larger than the memory.
    """
    listed = list(wanted)
    memory = memory_bytes()
    if not listed or memory is None:
        return threads
    values = _values(listed, model)
    needed = max(
        _VALUE * sum(values.get(o.tensor, 0) for o in listed if o.variant == variant)
        for variant in {o.variant for o in listed}
    )
    if needed > memory:
        largest = max(values, key=lambda name: values[name])
        raise CalibrationError(
            f"the tensors that are observed of one sample must fit into the memory, got"
            f" {size(needed)} of them (the largest is {largest!r} with {values[largest]:,} values)"
            f" and a machine of {size(memory)}; use a smaller input, or a larger machine"
        )
    return max(1, min(threads, memory // (needed + _HISTOGRAM * len(listed))))


def refuse_full_disk(folder: Path, model: onnx.ModelProto, targets: int) -> None:
    """Refuse a folder whose disk has less room than int8 weights for each target take.

    Raises:
        ExportError: there is less.
    """
    there = next((p for p in (folder, *folder.absolute().parents) if p.is_dir()), None)
    if there is None:
        return
    needed = targets * sum(len(tensor.raw_data) for tensor in model.graph.initializer) // _VALUE
    if needed > (free := shutil.disk_usage(there).free):
        raise ExportError(
            f"{folder} must have room for {targets} int8 models of at least {size(needed)}, got"
            f" {size(free)} that are free; give another --out"
        )


def _values(wanted: Iterable[Observation], model: onnx.ModelProto) -> dict[str, int]:
    """Tensor -> how many values a sample has at least, where the model says so."""
    shapes = Graph(model).shapes
    found = {}
    for name in {o.tensor for o in wanted}:
        first, *others = shapes.get(name) or (None,)
        known = [first if isinstance(first, int) else 1, *others]
        if all(isinstance(side, int) and side > 0 for side in known):
            found[name] = prod(int(side or 0) for side in known)
    return found
