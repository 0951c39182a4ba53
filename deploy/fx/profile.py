"""Where a traced model spends its time, and what it computes: seconds, FLOPs, MACs, parameters.

Time is measured node by node with an `fx.Interpreter`; FLOPs are counted by torch's own
`FlopCounterMode` on the meta device, where nothing is computed and the count is exact. It counts
what papers and other counters do, which `COUNTED` says with every profile.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from deploy.fx.fuse import called_module
from deploy.fx.table import columns, target_name
from deploy.progress import phase

SCHEMA = "calib8-profile/1"
COUNTED = (
    "FLOPs are those of convolutions and matrix products, two a multiply-accumulate; norms,"
    " activations and other arithmetic are not counted"
)
_CALLS = re.compile(r"@[0-9]+")  # counts the calls of a module, in torch.export


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one node of the graph costs.

    Attributes:
        opcode, name, target: as in the table of `calib8 trace`.
        module: qualified name of the module that it belongs to; "" for the model itself.
        seconds: mean of the timed runs.
        percent: of the whole run.
        flops: floating-point operations, two a multiply-accumulate.
        parameters: of the module that it calls, or the one that it reads; of several nodes with
            the same ones, the first's.
    """

    opcode: str
    name: str
    target: str
    module: str
    seconds: float
    percent: float
    flops: int
    parameters: int

    @property
    def macs(self) -> int:
        """Multiply-accumulates: half the FLOPs."""
        return self.flops // 2


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs by node, in the graph's order, and the mean time of one whole run in seconds."""

    nodes: tuple[NodeCost, ...]
    seconds: float

    @property
    def flops(self) -> int:
        """FLOPs of the whole graph."""
        return sum(node.flops for node in self.nodes)

    @property
    def macs(self) -> int:
        """MACs of the whole graph."""
        return sum(node.macs for node in self.nodes)

    @property
    def parameters(self) -> int:
        """Parameters of the modules that are called, each call counted."""
        return sum(node.parameters for node in self.nodes)

    def to_json(self) -> dict[str, object]:
        """Plain JSON types: the whole, and every node in the graph's order."""
        whole = {"seconds": self.seconds, "flops": self.flops, "macs": self.macs}
        nodes = [{**asdict(node), "macs": node.macs} for node in self.nodes]
        return {"schema": SCHEMA, **whole, "parameters": self.parameters, "nodes": nodes}

    def table(self) -> str:
        """The nodes, slowest first, and a line of totals."""
        heading = ("Op type", "Op", "Average runtime (s)", "Pct", "MFLOPs", "MMACs", "Parameters")
        slowest = sorted(self.nodes, key=lambda node: -node.seconds)
        rows = [heading, *(_row(node) for node in slowest)]
        percent = f"{sum(node.percent for node in self.nodes):.2f}"
        parameters = str(self.parameters)
        total = (f"{self.seconds:.6f}", percent, _mega(self.flops), _mega(self.macs), parameters)
        return columns([*rows, ("total", "", *total)])


class TimingInterpreter(fx.Interpreter):
    """Runs a graph and adds up each node's seconds in `seconds`, by node name."""

    def __init__(self, graph_module: fx.GraphModule):
        super().__init__(graph_module)
        self.seconds: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and add its wall-clock time."""
        started = time.perf_counter()
        result = super().run_node(n)
        _wait_for_device()
        self.seconds[n.name] = self.seconds.get(n.name, 0.0) + time.perf_counter() - started
        return result


class FlopInterpreter(fx.Interpreter):
    """Runs a graph on the meta device and counts each node's FLOPs in `flops`."""

    def __init__(self, graph_module: fx.GraphModule):
        super().__init__(graph_module)
        self.flops: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node under a FLOP counter."""
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        self.flops[n.name] = counter.get_total_flops()
        return result


@phase("profiling")
def profile(
    graph_module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    *,
    warm_up: int = 5,
    runs: int = 20,
) -> Profile:
    """Mean time of each node over `runs` runs after `warm_up` untimed ones, and its FLOPs."""
    timing = TimingInterpreter(graph_module)
    with torch.no_grad():
        for _ in range(warm_up):
            timing.run(*inputs)
        timing.seconds.clear()
        started = time.perf_counter()
        for _ in range(runs):
            timing.run(*inputs)
        whole = (time.perf_counter() - started) / runs
    flops = count_flops(graph_module, inputs)
    counted = _parameters(graph_module)
    nodes = [
        _cost(node, timing.seconds[node.name] / runs, whole, flops[node.name], counted.get(node, 0))
        for node in graph_module.graph.nodes
    ]
    return Profile(tuple(nodes), whole)


def count_flops(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """FLOPs by node name, for inputs of these shapes; no number is computed."""
    on_meta, meta = copy.deepcopy(graph_module).to("meta"), torch.device("meta")
    for node in on_meta.graph.nodes:  # what makes or moves a tensor names a device, as captured
        arguments = (node.args, node.kwargs)
        node.args, node.kwargs = pytree.tree_map_only(torch.device, lambda _: meta, arguments)
    counter = FlopInterpreter(on_meta)
    with torch.no_grad():
        counter.run(*(tensor.to("meta") for tensor in inputs))
    return counter.flops


def mean_seconds(
    model: nn.Module, inputs: Sequence[torch.Tensor], *, warm_up: int = 10, runs: int = 20
) -> float:
    """Mean wall-clock time of one run of `model`, after `warm_up` untimed runs."""
    with torch.no_grad():
        for _ in range(warm_up):
            model(*inputs)
        _wait_for_device()
        started = time.perf_counter()
        for _ in range(runs):
            model(*inputs)
        _wait_for_device()
    return (time.perf_counter() - started) / runs


@phase("timing")
def compare_speed(
    before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor], *, rounds: int = 3
) -> str:
    """One sentence: mean time before and after, their ratio, and the outputs' largest difference.

    The two are timed in turns, and the best round of each counts, so that a busy machine weighs
    on both alike.
    """
    turns = [(mean_seconds(before, inputs), mean_seconds(after, inputs)) for _ in range(rounds)]
    slow, fast = (min(times) for times in zip(*turns, strict=True))
    with torch.no_grad():
        difference = max_difference(before(*inputs), after(*inputs))
    return (
        f"before {slow * 1e3:.2f} ms, after {fast * 1e3:.2f} ms: {slow / fast:.2f}x;"
        f" largest difference of the outputs {difference:.3g}"
    )


def max_difference(left: Any, right: Any) -> float:
    """Largest absolute difference of two outputs: tensors, or tuples, lists and dicts of them."""
    pairs = zip(tensors_of(left), tensors_of(right), strict=True)
    return max(
        (float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()), default=0.0
    )


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def _parameters(graph_module: fx.GraphModule) -> dict[fx.Node, int]:
    """How many parameters a node brings that none before it did, each counted once."""
    seen, found = set[int](), dict[fx.Node, int]()
    for node in graph_module.graph.nodes:
        module = called_module(graph_module, node)
        read = list(module.parameters()) if module is not None else []
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            value = getattr(graph_module.get_submodule(owner), name)
            read = [value] if isinstance(value, nn.Parameter) else []
        found[node] = sum(p.numel() for p in read if id(p) not in seen)
        seen |= {id(p) for p in read}
    return found


def _cost(node: fx.Node, seconds: float, whole: float, flops: int, parameters: int) -> NodeCost:
    percent = 100 * seconds / whole if whole else 0.0
    target = target_name(node.target)
    owner = owner_of(node)
    return NodeCost(node.op, node.name, target, owner, seconds, percent, flops, parameters)


def owner_of(node: fx.Node) -> str:
    """Qualified name of the innermost module that the node was traced in, "" for the model.

    Of a call of a module it is that module.
    """
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    path = str([*stack.values()][-1][0]) if stack else ""
    return _CALLS.sub("", path.removeprefix("L['self']").lstrip("."))


def _row(node: NodeCost) -> tuple[str, ...]:
    numbers = (f"{node.seconds:.6f}", f"{node.percent:.2f}", _mega(node.flops), _mega(node.macs))
    return (node.opcode, node.name, *numbers, str(node.parameters))


def _mega(count: int) -> str:
    return f"{count / 1e6:.3f}"


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
