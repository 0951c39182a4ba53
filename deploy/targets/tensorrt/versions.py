"""What each TensorRT reads and runs: one row a version from which something is otherwise.

Sources: docs/operators.md of onnx-tensorrt (8.0 to 10.1, 10.15, 11.2) for opsets and operators,
where versions between two rows are taken to read what the older one does; its importers (8.6 to
10.0) for 9, which says opset 19 but reads neither the axes of a Reduce-18 nor the number of parts
of a Split-18; TensorRT's release notes and NvInfer.h for strong typing, calibrators and FP8 (matrix
products alone had it before 10.2).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.calibration.trt_cache import version_label
from deploy.frontends.checks import opset_of
from deploy.graph.index import all_nodes

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Row:
    """TensorRT from a version on.

    Attributes:
        since: first version.
        opset: the newest that its ONNX parser reads.
        calibrators: whether it has int8 calibrators and reads their caches.
        typed: whether it has strongly typed networks.
        fp8: whether it has FP8 convolutions, in such networks.
    """

    since: str
    opset: int
    calibrators: bool
    typed: bool
    fp8: bool = False


ROWS = (
    Row("8.0.0", 13, calibrators=True, typed=False),
    Row("8.4.0", 17, calibrators=True, typed=False),
    Row("10.0.0", 20, calibrators=True, typed=True),
    Row("10.2.0", 20, calibrators=True, typed=True, fp8=True),
    Row("10.15.0", 24, calibrators=True, typed=True, fp8=True),
    Row("11.0.0", 24, calibrators=False, typed=True, fp8=True),
)
# First version -> operators of its opset, or of an older one, that none before it reads. What 10.1
# does not read is taken to be unread until 10.15, of which no list of operators was at hand.
_NEW = {
    "8.2.0": "Einsum GatherND IsNaN Round Scatter ScatterElements ScatterND Sign",
    "8.4.0": "HardSwish RandomNormal RandomNormalLike Reciprocal Shrink Xor",
    "8.5.0": "GridSample MeanVarianceNormalization Mod NonMaxSuppression NonZero OneHot RoiAlign"
    " Trilu",
    "8.6.0": "GroupNormalization IsInf LayerNormalization",
    "9.3.0": "CastLike Hardmax",
    "10.0.0": "Gelu Mish",
    "10.1.0": "DeformConv",
    "10.15.0": "AffineGrid Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor"
    " BlackmanWindow CenterCropPad Col2Im Compress ConcatFromSequence ConvInteger DFT Det"
    " DynamicQuantizeLinear HammingWindow HannWindow ImageDecoder MatMulInteger MaxRoiPool"
    " MaxUnpool MelWeightMatrix Multinomial NegativeLogLikelihoodLoss Optional OptionalGetElement"
    " OptionalHasElement QLinearConv QLinearMatMul RegexFullMatch STFT SequenceAt"
    " SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap"
    " SoftmaxCrossEntropyLoss SplitToSequence StringConcat StringNormalizer StringSplit"
    " TfIdfVectorizer Unique",
}


def row(version: str) -> Row:
    """What TensorRT X.Y.Z reads and runs; of an older one than the table has, its first row.

    Raises:
        CacheError: the version does not read X.Y.Z.
    """
    label = version_label(version)
    reached = [one for one in ROWS if version_label(one.since) <= label]
    return reached[-1] if reached else ROWS[0]


def unread(version: str) -> frozenset[str]:
    """Operators that the parser of TensorRT X.Y.Z does not read although its opset may have them.

    Raises:
        CacheError: the version does not read X.Y.Z.
    """
    label = version_label(version)
    later = (names for since, names in _NEW.items() if version_label(since) > label)
    return frozenset(name for names in later for name in names.split())


@dataclass(frozen=True, slots=True)
class Needs:
    """What a parser must know to read a model.

    Attributes:
        opset: of the default domain.
        operators: of that domain; plugins are not judged.
    """

    opset: int
    operators: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: onnx.ModelProto) -> Needs:
        """Those of a model, the graphs in its nodes included."""
        standard = (n.op_type for n in all_nodes(model.graph) if n.domain in ("", "ai.onnx"))
        return cls(opset_of(model), frozenset(standard))

    def unmet(self, version: str) -> str:
        """Why TensorRT X.Y.Z does not read the model; "" where it does."""
        most = row(version).opset
        if self.opset > most:
            return f"it reads opset {most} at most, got {self.opset}"
        missing = sorted(self.operators & unread(version))
        return f"it does not read {', '.join(missing)}" if missing else ""

    def first_reading(self, *, typed: bool = False, fp8: bool = False) -> str | None:
        """The first version whose parser reads the model, and that has what is asked; or None."""
        known: Collection[str] = {*(one.since for one in ROWS), *_NEW}
        able = (
            version
            for version in sorted(known, key=version_label)
            if (row(version).typed or not typed) and (row(version).fp8 or not fp8)
        )
        return next((version for version in able if not self.unmet(version)), None)
