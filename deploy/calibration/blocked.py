"""Inner tensors in the layout in which ONNX Runtime computes them.

On many CPUs ONNX Runtime computes convolutions on blocks of channels (NCHWc). What is to be seen
from outside is put in order again by a `ReorderOutput`, which costs as much as counting it::

    Conv --> [N, C/16, H, W, 16] --> Conv --> ...
                   |
                   '--> ReorderOutput --> [N, C, H, W]     an ordinary tap
                   |
                   '--------------------> all of it        a blocked tap

A statistic without an order does not care where a value stands. So the model is saved as ONNX
Runtime would run it, every `ReorderOutput` that nothing reads but a tap is taken out, and what
remains is run as it is. Channels that only fill the last block hold what they like, and are left
out of the values. Where there is no such operator, the taps are ordinary ones; the values are the
same.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto, helper

from deploy.errors import BackendError
from deploy.graph.edit import replace, replace_nodes, with_outputs
from deploy.graph.index import attributes, users
from deploy.ort import OrtSession
from deploy.reading import read_bytes

_DOMAIN = "com.microsoft.nchwc"


@dataclass(frozen=True, slots=True)
class Blocked:
    """Where a tensor comes out in blocks.

    Attributes:
        output: of the model, [N, channels filled up to whole blocks, H, W] by its shape.
        channels: that the tensor has; the first ones of the output.
    """

    output: str
    channels: int

    def filled(self, x: NDArray[np.float32]) -> bool:
        """Whether the output holds more than the tensor."""
        return bool(x.shape[1] != self.channels)

    def values(
        self, x: NDArray[np.float32], into: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """The tensor's values in some order, any shape.

        Args:
            x: the output as it came.
            into: what this gave of an output of this shape, to be written again; None is made anew.
        """
        if not self.filled(x):
            return x
        return real_values(x, self.channels, block_size(), into)


@dataclass(frozen=True, slots=True)
class Tapped:
    """A model that is open, with inner tensors among its outputs.

    Attributes:
        session: what is run.
        blocked: tensor -> where it comes out, of those that do so in blocks.
    """

    session: OrtSession
    blocked: Mapping[str, Blocked]


def tapped(
    model: onnx.ModelProto,
    tensors: Sequence[str],
    *,
    in_any_order: Collection[str] = (),
    threads: int | None = 1,
) -> Tapped:
    """Open a model with these tensors as outputs.

    Args:
        model: as it is calibrated.
        tensors: that nodes of it make.
        in_any_order: those of which only the values matter, not where they stand; the model's own
            outputs come as they are.
        threads: threads inside one operator.

    Raises:
        BackendError: ONNX Runtime cannot load the model.
    """
    whole = with_outputs(model, tensors)
    wanted = set(in_any_order).difference(o.name for o in model.graph.output)
    if wanted and _may_block(model):
        try:
            return _blocked(whole, wanted, threads)
        except (BackendError, OSError):  # no room for a file, or a form that it cannot read again
            pass
    return Tapped(OrtSession.open(whole, threads=threads, spin=False), {})


def _may_block(model: onnx.ModelProto) -> bool:
    """Whether it is worth a look: blocks begin at convolutions."""
    return any(node.op_type == "Conv" for node in model.graph.node)


def _blocked(model: onnx.ModelProto, wanted: Collection[str], threads: int | None) -> Tapped:
    with tempfile.TemporaryDirectory(prefix="calib8-", ignore_cleanup_errors=True) as folder:
        saved = Path(folder) / "model.onnx"
        session = OrtSession.open(model, threads=threads, spin=False, saved=saved)
        form = onnx.ModelProto.FromString(
            read_bytes(saved, what="a model", error=BackendError, own=True)
        )
        found = unordered(form.graph, wanted)
        if not found:
            return Tapped(session, {})
        del session
        saved.write_bytes(form.SerializeToString())
        return Tapped(OrtSession.open(saved, threads=threads, optimize=False, spin=False), found)


def unordered(graph: onnx.GraphProto, wanted: Collection[str]) -> dict[str, Blocked]:
    """Let the wanted outputs of an optimized graph stay in blocks where they can; gives these."""
    read = users(graph)
    found = {
        node.output[0]: Blocked(node.input[0], int(attributes(node)["channels"]))
        for node in graph.node
        if (node.domain, node.op_type) == (_DOMAIN, "ReorderOutput")
        and node.output[0] in wanted
        and read[node.output[0]] == 1  # as an output of the graph
    }
    replace_nodes(graph, (n for n in graph.node if n.output[0] not in found))
    outputs = [
        ValueInfoProto(name=found[o.name].output) if o.name in found else o for o in graph.output
    ]
    replace(graph.output, outputs)
    return found


def real_values(
    x: NDArray[np.float32], channels: int, block: int, into: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """The first channels of a blocked tensor, one after the other in no particular order.

    Args:
        x: [N, C, ...], in memory [N, C / block, ..., block].
        channels: that are wanted, at most C.
        block: channels that stand side by side.
        into: where they are written; None is made anew.

    Returns:
        1-D, `channels` / C of the values.
    """
    batch, filled = x.shape[:2]
    blocks = x.reshape(batch, filled // block, math.prod(x.shape[2:]), block)
    whole, rest = divmod(channels, block)
    parts = (blocks[:, :whole], blocks[:, whole : whole + 1, :, :rest])
    return np.concatenate([part.reshape(-1) for part in parts], out=into)


@cache
def block_size() -> int:
    """How many channels ONNX Runtime puts side by side on this CPU, seen from what it does.

    Raises:
        BackendError: it has no blocks here.
    """
    channels = 64
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, 1, 2])
    reorder = helper.make_node("ReorderInput", ["x"], ["y"], domain=_DOMAIN)
    graph = helper.make_graph([reorder], "blocks", [x], [ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    pairs = np.arange(2 * channels, dtype=np.float32).reshape(1, channels, 1, 2)
    y = OrtSession.open(model, threads=1, spin=False).run({"x": pairs})["y"].reshape(-1)
    return int(np.flatnonzero(y == 1)[0])  # the second place of the first channel
