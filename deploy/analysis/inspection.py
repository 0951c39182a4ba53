"""List the nodes that a target would quantize, and why not the rest; nothing is run or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from deploy.errors import counted
from deploy.feed.feed import FeedSource
from deploy.frontends import LoadedModel, load
from deploy.graph.index import match_nodes
from deploy.graph.plan import find_unkept
from deploy.pipeline.build_options import open_torch_module
from deploy.report.parts import NodeRow, node_rows
from deploy.targets import Target, make_targets
from deploy.tensors import TensorSpec
from deploy.terminal import PrintedResult, join_visible

if TYPE_CHECKING:
    from torch import nn

_MAX_ROWS = 24  # of nodes on one screen


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInspection:
    """The nodes that one target would quantize.

    Attributes:
        name: of the target.
        nodes: every node, its precision, and the reason if it is float.
        tensors: names of the tensors that need a scale.
        notes: warnings of nodes that cannot stay float alone on this target.
    """

    name: str
    nodes: tuple[NodeRow, ...]
    tensors: tuple[str, ...]
    notes: tuple[str, ...]

    def lines(self, *, everything: bool) -> Iterator[str]:
        """Yield the nodes by operator and reason, or every node by its name."""
        verb = "needs" if len(self.tensors) == 1 else "need"
        yield f"{counted(len(self.tensors), 'tensor')} {verb} a scale"
        yield from self._all_nodes() if everything else self._node_groups()

    @property
    def shares(self) -> str:
        """Number of nodes of each precision, as text."""
        counts = Counter(map(_precision, self.nodes))
        shares = [f"{count} {precision}" for precision, count in counts.most_common()]
        return ", ".join(shares) or "none"

    def _all_nodes(self) -> Iterator[str]:
        """Yield precision, operator, name, module and reason of every node."""
        for node in self.nodes:
            module = f"  in {node.module}" if node.module else ""
            text = f"  {_precision(node):5} {node.op:20} {node.name}{module}  {node.reason}"
            yield text.rstrip()

    def _node_groups(self) -> Iterator[str]:
        """Yield the number of nodes of each precision, operator and reason."""
        groups: list[tuple[tuple[str, str, str], int]] = []
        for is_quantized in (True, False):  # quantized nodes first, then the others
            nodes = [node for node in self.nodes if node.quantized == is_quantized]
            counts = Counter((_precision(node), node.op, node.reason) for node in nodes)
            groups += counts.most_common()
        for (precision, op, reason), count in groups[:_MAX_ROWS]:
            line = f"  {precision:6} {count:4} {op}"
            if reason:
                line += f": {reason}"
            yield line
        if len(groups) > _MAX_ROWS:
            hidden_count = sum(count for _, count in groups[_MAX_ROWS:])
            yield f"  and {counted(hidden_count, 'node')} of other kinds"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection(PrintedResult):
    """The nodes of a model that targets would quantize; `repr` is a screen of text for each.

    Attributes:
        model: its file, or its name if it was given in memory.
        targets: the nodes, one entry per target.
        inputs: inputs of the model.
        outputs: outputs of the model.
        notes: sentences on how the model was read.
    """

    model: str
    targets: tuple[TargetInspection, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...]

    def to_screen(self, *, everything: bool = False) -> str:
        """Return the nodes of each target by operator and reason, or every node by its name."""
        lines: list[str] = []
        for target in self.targets:
            nodes = counted(len(target.nodes), "node")
            lines.append(f"{self.model}: {nodes} on {target.name}, {target.shares}")
            for spec in (*self.inputs, *self.outputs):
                lines.append(f"  {spec.name} {spec.dtype} {list(spec.shape)}")
            lines += [f"  {note}" for note in (*target.notes, *self.notes)]
            lines += target.lines(everything=everything)
        return join_visible(lines)

    def to_json(self) -> list[dict[str, object]]:
        """Return a document for each target, plain JSON; an open dimension is null or its name."""
        specs: dict[str, list[dict[str, Any]]] = {}
        for field_name in ("inputs", "outputs"):
            specs[field_name] = [asdict(spec) for spec in getattr(self, field_name)]
            for spec in specs[field_name]:
                del spec["has_batch"]  # calib8 derives it; the model does not declare it
        documents = []
        for target in self.targets:
            document: dict[str, object] = {
                "schema": "calib8-inspection/1",
                "model": self.model,
                "target": target.name,
                "nodes": tuple(map(asdict, target.nodes)),
                "tensors": target.tensors,
                **specs,
                "notes": (*target.notes, *self.notes),
            }
            documents.append(document)
        return documents


def inspect(
    model: str | Path | onnx.ModelProto | LoadedModel | nn.Module,
    images: FeedSource | None = None,
    *,
    targets: str | Target | Sequence[str | Target] = ("onnxruntime",),
    float_nodes: Iterable[str] = (),
) -> Inspection:
    """Return which nodes of a model targets would quantize, by their rules alone.

    Nothing is calibrated and no image is run.

    Args:
        model: path of an ONNX file, an onnx.ModelProto, a loaded model or a PyTorch module.
        images: for a PyTorch module, samples as for `build`; the first exports it.
        targets: names in `TARGETS`, or targets with options; or one of these.
        float_nodes: nodes to keep in float: names, patterns, `op:` types, `@` files.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: no such target, or no node matches `float_nodes`.
    """
    chosen_targets = make_targets(targets)
    model, _ = open_torch_module(model, images)  # exports a module; the images are not run
    loaded = load(model)
    float_names = match_nodes(loaded.model, float_nodes)
    inspections = []
    for target in chosen_targets:
        plan = target.plan(loaded.model, float_names)
        inspection = TargetInspection(
            name=target.name,
            nodes=node_rows(plan.decisions, loaded.model),
            tensors=tuple(target.scaled_tensors(loaded.model, float_names)),
            notes=tuple(find_unkept(plan, target.name, float_names)),
        )
        inspections.append(inspection)
    return Inspection(
        model=str(loaded.source or loaded.name),
        targets=tuple(inspections),
        inputs=loaded.inputs,
        outputs=loaded.outputs,
        notes=(*loaded.alerts, *loaded.notes),
    )


def _precision(node: NodeRow) -> str:
    """Return the precision of a node for the screen, on which float32 is just "float"."""
    return "float" if node.precision == "float32" else node.precision
