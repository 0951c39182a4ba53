"""Time of every kernel of a model on this machine, by the node that it came from.

ONNX Runtime's own profile of a few runs: the least time of each kernel, since whatever disturbs a
run makes it longer. An optimizer that fuses nodes keeps the name of one of them, or of its output,
with something before or behind it::

    Conv "/c1", Relu "/r1"   -->  kernel "/r1_output_0_nchwc"   (the tensor's name)
    the same in int8         -->  kernel "/c1_token_19"         (the node's name)
    what it put in between   -->  kernel "ReorderOutput_token_3"

so a kernel belongs to the node whose name, or whose output's, is the longest at its beginning. Only
its operator tells where a layer has taken the name of what was fused into it from behind::

    Conv "/c1", Transpose, Relu "/r1", Transpose  -->  kernel "/r1_nchwc" of a Conv: the time of /c1
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.ort import kernel_events, profiled

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Array

# What an operator of ONNX Runtime is called -> nodes that become it: FusedConv, QLinearConv, ...
_LAYERS = {
    "ConvTranspose": ("ConvTranspose",),
    "Conv": ("Conv",),
    "Gemm": ("Gemm", "MatMul"),
    "MatMul": ("MatMul",),
}
PAIRS = frozenset({"QuantizeLinear", "DequantizeLinear"})


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Least time of each kernel of a model, in microseconds.

    Attributes:
        nodes: node of the model -> time of what it became; 0 for what was folded away.
        rest: time of kernels that belong to no node.
    """

    nodes: Mapping[str, float]
    rest: float

    @property
    def total(self) -> float:
        """One inference, without what lies between its kernels."""
        return sum(self.nodes.values()) + self.rest


def kernel_times(
    model: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Array]],
    *,
    made_from: onnx.ModelProto,
    runs: int,
) -> KernelTimes:
    """Run a model a few times under ONNX Runtime's profiler.

    Args:
        model: as it would be deployed.
        made_from: the float model, whose nodes the time is counted to; pairs count themselves.
        feeds: inputs, used in turn.
        runs: how often it is run, after two runs that do not count; with one thread, since what
            several take depends on who else wants the cores.

    Raises:
        BackendError: ONNX Runtime refused the model or a sample.
    """
    with tempfile.TemporaryDirectory(prefix="calib8-") as folder:
        trace = profiled(model, feeds, runs=runs + 2, folder=Path(folder))
        events = list(kernel_events(trace))
    pairs = [node.name for node in model.graph.node if node.op_type in PAIRS]
    kinds = {name: kind for name, kind, _ in events}
    return attributed(_least(events, skip=2), made_from, pairs, kinds)


def _least(events: Iterable[tuple[str, str, float]], *, skip: int) -> dict[str, float]:
    """Kernel -> least microseconds, its first runs left out."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, _, taken in events:
        found[name].append(taken)
    return {name: min(times[skip:] or times) for name, times in found.items()}


def attributed(
    kernels: Mapping[str, float],
    model: onnx.ModelProto,
    others: Iterable[str] = (),
    kinds: Mapping[str, str] | None = None,
) -> KernelTimes:
    """Kernels -> nodes of a model, or other names, by the longest one at a kernel's beginning.

    Args:
        kernels: name -> time.
        model: whose nodes they are.
        others: names that count themselves.
        kinds: name of a kernel -> its operator.
    """
    layers = _Layers(model)
    known = {name: node.name for node in model.graph.node for name in (*node.output, node.name)}
    known |= {name: name for name in others}
    known.pop("", None)
    nodes = dict.fromkeys(known.values(), 0.0)
    rest = 0.0
    for kernel, time in kernels.items():
        name = _known(kernel, known)
        if name is None:
            rest += time
        else:
            nodes[layers.before(known[name], (kinds or {}).get(kernel, ""))] += time
    return KernelTimes(nodes, rest)


class _Layers:
    """Finds the layer whose kernel has the name of a node behind it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._nodes = {node.name: node for node in model.graph.node if node.name}
        self._makers = {name: node for node in model.graph.node for name in node.output if name}

    def before(self, name: str, kind: str) -> str:
        """The layer of a kernel's operator before a node, alone on its way; else the node."""
        wanted = next((ops for word, ops in _LAYERS.items() if word in kind), None)
        node = self._nodes.get(name)
        while wanted and node is not None and node.op_type not in wanted:
            varying = [one for one in node.input if one in self._makers]
            node = self._makers[varying[0]] if len(varying) == 1 else None
        return node.name if wanted and node is not None and node.name else name


def _known(kernel: str, known: Mapping[str, str]) -> str | None:
    """The longest known name that the kernel's begins with, whole words only."""
    name = kernel.removeprefix("fused ")
    while name:
        if name in known:
            return name
        cut = max(name.rfind(mark) for mark in "_/")
        name = name[:cut] if cut > 0 else ""
    return None
