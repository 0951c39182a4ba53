"""Tensors in two runtimes, each computed by models that are cut off behind it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deploy.comparison.sums import Figures, Sums
from deploy.errors import BackendError
from deploy.graph.edit import cut
from deploy.progress import phase
from deploy.runtimes.openvino import run_apart
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array, Samples

if TYPE_CHECKING:
    from onnx import ModelProto


class _Cuts:
    """Tensors one by one, each by models cut off behind it; the second's run in OpenVINO."""

    def __init__(
        self,
        first: ModelProto,
        second: ModelProto,
        samples: Sequence[Path],
        *,
        folder: Path,
        threads: int | None,
        min_sqnr_db: float,
    ) -> None:
        self._models = first, second
        self._samples = samples
        self._folder, self._threads, self._limit = folder, threads, min_sqnr_db
        self.figures: Figures = {}
        self.notes: list[str] = []

    def whole(self, outputs: Mapping[str, str]) -> bool:
        """Whether the outputs of the models as they are agree.

        Raises:
            BackendError: OpenVINO cannot run the second model.
        """
        self.figures |= (found := self._look(*self._models, outputs))
        return self._above(found)

    def agrees(self, name: str, other: str) -> bool:
        """Whether a tensor agrees; one that cannot be compared, or holds no floats, does."""
        first, second = self._models
        try:
            found = self._look(cut(first, name), cut(second, other), {name: other})
        except BackendError as error:
            self.notes.append(f"{name!r} could not be compared: {error}.")
            return True
        self.figures |= found
        return self._above(found)

    def close(self, outputs: Mapping[str, str]) -> None:
        """Tell, where the model leaves dimensions open, what closing them changes."""
        if not _is_open(self._models[1]):
            return
        try:
            found = self._look(*self._models, outputs, closed=True)
        except BackendError:  # as it is the model runs, so closing it is no way out
            return
        worst = min((one.sqnr_db for one in found.values()), default=math.nan)
        words = "agree" if self._above(found) else "part as well"
        self.notes.append(
            f"With the input's open dimensions closed the outputs {words} ({worst:.1f} dB)."
        )

    def _above(self, found: Figures) -> bool:
        return all(one.sqnr_db >= self._limit for one in found.values())

    def _look(
        self,
        first: ModelProto,
        second: ModelProto,
        pairs: Mapping[str, str],
        *,
        closed: bool = False,
    ) -> Figures:
        left = OrtSession.open(first, threads=self._threads)
        results = run_apart(
            second, self._samples, self._folder, threads=self._threads, closed=closed
        )
        names = [value.name for value in second.graph.output]
        sums = Sums(pairs)
        for file, result in zip(self._samples, results, strict=True):
            sample = _arrays(file)
            values = _arrays(result).values()
            sums.add(sample, left.run(sample), dict(zip(names, values, strict=True)))
        return sums.result()


def _is_open(model: ModelProto) -> bool:
    """Whether an input has a dimension without a number."""
    dims = (d for value in model.graph.input for d in value.type.tensor_type.shape.dim)
    return any(not dim.HasField("dim_value") for dim in dims)


def _arrays(file: Path) -> dict[str, Array]:
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def by_cuts(
    first: ModelProto,
    second: ModelProto,
    pairs: Mapping[str, str],
    feed: Samples,
    threads: int | None,
    *,
    min_sqnr_db: float,
    every: bool,
) -> tuple[Figures, list[str]]:
    """Figures by cut models, and what could not be compared."""
    ends = {value.name for value in first.graph.output}
    inner = [name for name in pairs if name not in ends]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        files = []
        with feed.samples() as samples:
            for number, sample in enumerate(samples):
                files.append(folder / f"sample-{number}.npz")
                np.savez(files[-1], **sample)
        cuts = _Cuts(first, second, files, folder=folder, threads=threads, min_sqnr_db=min_sqnr_db)
        outputs = {name: other for name, other in pairs.items() if name in ends}
        agree = cuts.whole(outputs)
        if not agree:
            cuts.close(outputs)
        steps = len(inner) if every else len(inner).bit_length()
        with phase("comparing", steps, "tensors") as step:

            def look(name: str) -> bool:
                step()
                return cuts.agrees(name, pairs[name])

            if every:
                for name in inner:
                    look(name)
            elif not agree:
                _halved(inner, look)
    return {name: cuts.figures[name] for name in pairs if name in cuts.figures}, cuts.notes


def _halved(names: Sequence[str], agrees: Callable[[str], bool]) -> None:
    """Look for neighbours of which the first agrees and the second does not, by halves.

    ::

        agrees  ?  ?  ?  ?  ?  ?  ?  parted         what is before the first agrees,
                         agrees                     what is behind the last has parted
                               parted
                            agrees ^
    """
    low, high = -1, len(names)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if agrees(names[middle]) else (low, middle)
