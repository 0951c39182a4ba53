"""What every frontend gives: a float32 ONNX model that is clean, checked and known by a digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.feed.model_preprocess import Carried
from deploy.frontends.reader import Stamp
from deploy.tensors import TensorSpec

if TYPE_CHECKING:
    import onnx

    from deploy.frontends.plugins import Behind
    from deploy.frontends.trained import Trained


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready for graph analysis; made by `deploy.frontends.load`.

    Attributes:
        model: the cleaned model, with all weights inside and shapes inferred. Its activation
            tensors carry the names they have in the original; its node names are unique.
        source: the file it was read from, None for a model given in memory.
        name: the file's stem, or the graph's name.
        digest: sha256 (hex) of the original graph and its weights. How a file stores them
            (external data, raw or typed fields, order of initializers, names of nodes,
            documentation, metadata) does not count.
        notes: one plain sentence for each thing that was done or left alone.
        inputs: what must be fed, in the model's order.
        outputs: what the model gives, in the model's order.
        widened: whether the original computes in float16 what `model` computes in float32.
        renamed: whether nodes of the original share names, which ONNX Runtime does not load.
        listed: weights of the original that may be fed, since they are inputs as well: ONNX Runtime
            leaves out what it does to layers whose weights are constants.
        stamp: of the file's bytes, None for a model given in memory.
        behind: nodes that ONNX Runtime does not know and all that reads of them, which are no part
            of `model`; None where there are none.
        carried: what the file, or one beside it, says of how pictures become its input.
        trained: what the pairs of a Q/DQ model say, which were taken out of `model`; None for a
            float model.
        restored: whether the original stores weights as integers that `model` has as float ones.
    """

    model: onnx.ModelProto
    source: Path | None
    name: str
    digest: str
    notes: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    widened: bool = False
    renamed: bool = False
    listed: int = 0
    stamp: Stamp | None = None
    behind: Behind | None = None
    carried: Carried | None = None
    trained: Trained | None = None
    restored: bool = False

    @property
    def identities(self) -> dict[str, str]:
        """What the original is known by: its "graph", and the bytes of its "file" and "weights"."""
        files = {} if self.stamp is None else {"file": self.stamp.file}
        if self.stamp is not None and self.stamp.weights:
            files["weights"] = self.stamp.weights
        return {"graph": self.digest, **files}

    @property
    def cut(self) -> tuple[str, ...]:
        """A sentence on what is no part of `model`; none where all of it is."""
        if self.behind is None:
            return ()
        return (self.behind.sentence(spec.name for spec in self.outputs),)

    def whole(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """What was made of `self.model`, with the nodes that ONNX Runtime does not know put back.

        Raises:
            ExportError: they mean something else in the opset of `model`.
        """
        return model if self.behind is None else self.behind.back(model)


# (path, or "path.py:factory", or a model in memory; fold_batchnorm) -> LoadedModel
Loader = Callable[["str | Path | onnx.ModelProto", bool], LoadedModel]
