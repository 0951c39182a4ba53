"""List the nodes that a target would quantize, and why not the rest; nothing is run or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

_MAX_ROWS = 24  # of nodes on one screen


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection:
    """The nodes of a model that a target would quantize; `repr` is one screen of text.

    Attributes:
        model: its file, or its name if it was given in memory.
        target: name of the target.
        nodes: every node, its precision, and the reason if it is float.
        tensors: names of the tensors that need a scale.
        inputs: inputs of the model.
        outputs: outputs of the model.
        notes: sentences on how the model was read.
    """

    model: str
    target: str
    nodes: tuple[NodeRow, ...]
    tensors: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.text()

    def text(self, *, everything: bool = False) -> str:
        """Return lines for a screen: nodes by operator and reason, or every node by its name."""
        nodes = self._all_nodes() if everything else self._node_groups()
        return join_visible([*self._head(), *nodes])

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types; an open dimension is null or its name."""
        document: dict[str, Any] = {"schema": "calib8-inspection/1", **asdict(self)}
        for spec in (*document["inputs"], *document["outputs"]):
            del spec["first_axis"]
        return document

    def _head(self) -> Iterator[str]:
        counts = Counter(map(_precision, self.nodes))
        shares = [f"{count} {precision}" for precision, count in counts.most_common()]
        text = ", ".join(shares) or "none"
        yield f"{self.model}: {len(self.nodes)} nodes on {self.target}, {text}"
        for spec in (*self.inputs, *self.outputs):
            yield f"  {spec.name} {spec.dtype} {list(spec.shape)}"
        for note in self.notes:
            yield f"  {note}"
        yield f"{len(self.tensors)} tensors need a scale"

    def _all_nodes(self) -> Iterator[str]:
        for node in self.nodes:
            module = f"  in {node.module}" if node.module else ""
            text = f"  {_precision(node):5} {node.op:20} {node.name}{module}  {node.reason}"
            yield text.rstrip()

    def _node_groups(self) -> Iterator[str]:
        counts: Counter[tuple[bool, str, str, str]] = Counter()
        for node in self.nodes:
            counts[not node.quantized, _precision(node), node.op, node.reason] += 1
        # quantized nodes first, the most frequent kinds before the others
        groups = sorted(counts.items(), key=lambda group: (group[0][0], -group[1]))
        for (_, precision, op, reason), count in groups[:_MAX_ROWS]:
            line = f"  {precision:6} {count:4} {op}"
            if reason:
                line += f": {reason}"
            yield line
        if len(groups) > _MAX_ROWS:
            hidden_count = sum(count for _, count in groups[_MAX_ROWS:])
            yield f"  and {hidden_count} nodes of other kinds"


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
        images: for a PyTorch module, samples as for `deploy.pipeline.build`; the first exports it.
        target: name of a target in `TARGETS`, or a target with options.
        float_nodes: nodes to keep in float: names, patterns, `op:` types, `@` files.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: no such target, or no node matches `float_nodes`.
    """
    (chosen_target,) = make_targets([target])
    model, _ = open_torch_module(model, images)
    loaded = load(model)
    float_names = match_nodes(loaded.model, float_nodes)
    return Inspection(
        model=str(loaded.source or loaded.name),
        target=chosen_target.name,
        nodes=node_rows(chosen_target.plan(loaded.model, float_names).decisions, loaded.model),
        tensors=tuple(chosen_target.scaled_tensors(loaded.model, float_names)),
        inputs=loaded.inputs,
        outputs=loaded.outputs,
        notes=(*loaded.alerts, *loaded.notes),
    )


def _precision(node: NodeRow) -> str:
    return "float" if node.precision == "float32" else node.precision
