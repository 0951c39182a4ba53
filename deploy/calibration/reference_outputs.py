"""Reference outputs: the float model's outputs for the evaluation samples, computed once.

::

    observing        1 2 3 4 5 6 7 ...     every sample is run, and its inner tensors counted
    stored           o     o     o         outputs of the evaluation samples, on disk
    search, repairs, accuracy  <-- read these; a missing one is computed, then stored

So memory use does not depend on the outputs' size or the number of samples.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx

from deploy.feed.evaluation import EvaluationSubset
from deploy.feed.sample_reader import SampleCache
from deploy.feed.samples import Feed
from deploy.graph.index import PROTOBUF, RANDOM, all_nodes
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array, Session, TensorSpec

MOST_BYTES = 1 << 30  # on disk; outputs beyond this are computed again
_SAME = 1e-6  # noise / signal, 60 dB: largest difference after a repair of a float model
_NUMBERS = "biuf"  # kinds of arrays that are stored; text has no noise
_TWICE = 8  # samples that are run twice: random numbers may give the same class in some

Sample = Mapping[str, Array]


class ReferenceOutputs:
    """Outputs of one float model for the samples of one feed, by sample key.

    Attributes:
        runs: number of inferences for samples whose outputs were not stored.
    """

    def __init__(
        self, open_session: Callable[[], Session], names: Sequence[str], keys: Collection[int] = ()
    ) -> None:
        """Start with nothing stored.

        `keys`: samples whose outputs are stored; those of others are computed each time.
        """
        self.runs = 0
        self._open = open_session
        self._names = tuple(names)
        self._wanted = frozenset(keys)
        self._spool = SampleCache(self._wanted, max_bytes=MOST_BYTES)
        self._session: Session | None = None
        self._specs: Sequence[TensorSpec] | None = None
        self._using = threading.Lock()

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs; of one stored sample, if there is one."""
        return self._specs if self._specs is not None else self._opened().outputs

    def add(self, key: int, values: Mapping[str, Array]) -> None:
        """Store a sample's outputs.

        `values`: name -> array of a run; tensors that are not outputs are ignored.
        """
        own = {name: values[name] for name in self._names if name in values}
        plain = all(value.dtype.kind in _NUMBERS for value in own.values())
        if key in self._wanted and plain and len(own) == len(self._names):
            self._specs = [TensorSpec(n, str(v.dtype), v.shape) for n, v in own.items()]
            self._spool.add(key, own)

    def __contains__(self, key: object) -> bool:
        """Whether a sample's outputs are stored."""
        return key in self._spool

    def get(self, key: int, sample: Sample) -> Mapping[str, Array]:
        """Return a sample's outputs; thread-safe.

        Raises:
            BackendError: ONNX Runtime refused the model or the sample.
        """
        known = self._spool.get(key)
        if known is not None:
            return known
        values = self._opened().run(sample)
        with self._using:
            self.runs += 1
        self.add(key, values)
        return values

    def recompute(self, sample: Sample) -> Mapping[str, Array]:
        """Return a sample's outputs, computed whatever is stored."""
        return self._opened().run(sample)

    def _opened(self) -> Session:
        with self._using, PROTOBUF:
            if self._session is None:
                self._session = self._open()
            return self._session


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """The evaluation samples and the float model's outputs for them."""

    subset: EvaluationSubset
    outputs: ReferenceOutputs

    def samples_with_outputs(self, most: int) -> Iterator[tuple[Sample, Mapping[str, Array]]]:
        """Yield (sample, its float outputs) of at most `most` samples, spread over all."""
        return (
            (sample, self.outputs.get(key, sample))
            for key, sample in self.subset.spread_with_keys(most)
        )


def make_evaluation_set(feed: Feed, model: onnx.ModelProto, most: int) -> EvaluationSet:
    """Return the evaluation samples of a feed, at most `most` images, with a float model's outputs.

    Nothing is read or run before it is used.
    """
    part = EvaluationSubset(feed, most)
    names = [value.name for value in model.graph.output]
    opened = partial(OrtSession.open, model, threads=1, spin=False)
    return EvaluationSet(part, ReferenceOutputs(opened, names, part.keys))


def find_random_outputs(model: onnx.ModelProto, judges: EvaluationSet) -> str:
    """Return a sentence on outputs that differ between two runs of the float model; "" if none.

    It is run again only if it draws random numbers or has operators that ONNX does not define; at
    most on 8 samples, until one differs.
    """
    nodes = all_nodes(model.graph)
    if not any(node.op_type in RANDOM or node.domain not in ("", "ai.onnx") for node in nodes):
        return ""
    for sample, known in judges.samples_with_outputs(_TWICE):
        # the first run may draw what the session that calibrated drew
        judges.outputs.recompute(sample)
        again = judges.outputs.recompute(sample)
        other = [name for name in known if not outputs_match({name: known[name]}, again)]
        if other:
            return (
                f"the float model itself gives another {', '.join(other)} at each run: it draws"
                " random numbers, which every figure of accuracy includes"
            )
    return ""


def outputs_match(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Whether two outputs of a sample are equal up to float rounding."""
    return all(
        name in other
        and value.shape == other[name].shape
        and (value.dtype.kind != "f" or _near(value, other[name]))
        for name, value in one.items()
    )


def _near(one: Array, other: Array) -> bool:
    left, right = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        noise = np.nan_to_num(left - right)
    return float((noise * noise).sum()) <= _SAME * float((left * left).sum())
