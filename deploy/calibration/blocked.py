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
remains is run as it is. Channels that do not fill their last block keep theirs: leaving out what
fills it costs more than putting the tensor in order. Where there is no such operator, the taps are
ordinary ones; the values are the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto, helper

from deploy.errors import BackendError
from deploy.files.reading import read_bytes
from deploy.graph.edit import replace, replace_nodes, with_outputs
from deploy.graph.index import attributes, users
from deploy.runtimes.ort import OrtSession

_DOMAIN = "com.microsoft.nchwc"


@dataclass(frozen=True, slots=True)
class Tapped:
    """A model that is open, with inner tensors among its outputs.

    Attributes:
        session: what is run.
        blocked: tensor -> the output that holds its values in blocks, of those that do so.
    """

    session: OrtSession
    blocked: Mapping[str, str]


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


def unordered(graph: onnx.GraphProto, wanted: Collection[str]) -> dict[str, str]:
    """Let the wanted outputs of an optimized graph stay in blocks where they fill them.

    Returns:
        tensor -> the output that has its values, of those that do.
    """
    read = users(graph)
    found = {
        node.output[0]: node.input[0]
        for node in graph.node
        if (node.domain, node.op_type) == (_DOMAIN, "ReorderOutput")
        and node.output[0] in wanted
        and read[node.output[0]] == 1  # as an output of the graph
        and int(attributes(node)["channels"]) % block_size() == 0
    }
    replace_nodes(graph, (n for n in graph.node if n.output[0] not in found))
    outputs = [ValueInfoProto(name=found[o.name]) if o.name in found else o for o in graph.output]
    replace(graph.output, outputs)
    return found


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
