"""What a target would quantize in a model, and why not the rest; nothing is run or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from deploy.feed.feed import FeedSource
from deploy.frontends import LoadedModel, load
from deploy.graph.index import match_nodes
from deploy.pipeline.build_options import open_torch_module
from deploy.report.parts import NodeRow, node_rows
from deploy.targets import Target, make_targets
from deploy.tensors import TensorSpec
from deploy.terminal import join_visible

if TYPE_CHECKING:
    from torch import nn

_MOST = 24  # rows of nodes on one screen


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection:
    """What a target would quantize in a model; `repr` is one screen of text."""

    model: str  # its file, or its name if it was given in memory
    target: str
    nodes: tuple[NodeRow, ...]  # every node, its precision, and the reason if it is float
    tensors: tuple[str, ...]  # names of the tensors that need a scale
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.text()

    def text(self, *, everything: bool = False) -> str:
        """Return lines for a screen: nodes by operator and reason, or every node by its name."""
        if not everything:
            return join_visible([*self._head(), *self._node_groups()])
        lines = (f"  {_word(n):5} {n.op:20} {n.name}  {n.reason}".rstrip() for n in self.nodes)
        return join_visible([*self._head(), *lines])

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types; an open dimension is null or its name."""
        return {"schema": "calib8-inspection/1", **asdict(self)}

    def _head(self) -> Iterator[str]:
        counts = Counter(_word(node) for node in self.nodes)
        shares = ", ".join(f"{number} {word}" for word, number in counts.most_common())
        yield f"{self.model}: {len(self.nodes)} nodes on {self.target}, {shares or 'none'}"
        for spec in (*self.inputs, *self.outputs):
            yield f"  {spec.name} {spec.dtype} {list(spec.shape)}"
        yield from (f"  {note}" for note in self.notes)
        yield f"{len(self.tensors)} tensors need a scale"

    def _node_groups(self) -> Iterator[str]:
        counts = Counter((node.quantized, _word(node), node.op, node.reason) for node in self.nodes)
        groups = sorted(counts.items(), key=lambda item: (not item[0][0], -item[1]))
        for (_, word, op, reason), number in groups[:_MOST]:
            yield f"  {word:6} {number:4} {op}{f': {reason}' if reason else ''}"
        if len(groups) > _MOST:
            yield f"  and {sum(number for _, number in groups[_MOST:])} nodes of other kinds"


def inspect(
    model: str | Path | onnx.ModelProto | LoadedModel | nn.Module,
    images: FeedSource | None = None,
    *,
    target: str | Target = "onnxruntime",
    float_nodes: Iterable[str] = (),
) -> Inspection:
    """Apply a target's rules to a model, without a calibration.

    Args:
        model: path of an ONNX file, or a model in memory, loaded or not; or a PyTorch module.
        images: of a PyTorch module, samples as for `deploy.pipeline.build`; the first exports it.
        target: name of a target in `TARGETS`, or a target with options.
        float_nodes: nodes to keep in float: names, patterns, `op:` types, `@` files.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: no such target, or no node matches `float_nodes`.
    """
    (backend,) = make_targets([target])
    model, _ = open_torch_module(model, images)
    loaded = model if isinstance(model, LoadedModel) else load(model)
    kept = match_nodes(loaded.model, float_nodes)
    return Inspection(
        model=str(loaded.source or loaded.name),
        target=backend.name,
        nodes=node_rows(backend.plan(loaded.model, kept).decisions),
        tensors=tuple(backend.scaled_tensors(loaded.model, kept)),
        inputs=loaded.inputs,
        outputs=loaded.outputs,
        notes=(*loaded.cut_notes, *loaded.notes),
    )


def _word(node: NodeRow) -> str:
    return "float" if node.precision == "float32" else node.precision
