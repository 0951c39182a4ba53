"""Where a traced model spends its time, and what it computes: seconds, FLOPs, MACs, parameters.

Time is measured node by node with an `fx.Interpreter`; FLOPs are counted by torch's own
`FlopCounterMode` on the meta device, where nothing is computed and the count is exact. It counts
what papers and other counters do, which `COUNTED` says with every profile.

The traced graph as text: an IR table and Python code, equal on every run and machine.

Whether two forms of a model compute the same: not by a tolerance alone, which proves little.

What rounding explains is found by rounding less: where two float32 forms differ by more than a
thousandth of the largest output, both are run in float64, in which they must agree to a millionth.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from deploy.errors import ModelError
from deploy.fx.device import seeded
from deploy.fx.fuse import called_module
from deploy.terminal import page, phase

COLUMNS = ("opcode", "name", "target", "args", "kwargs")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_HOMES = {"_operator": "operator", "torch._C._nn": "torch.nn.functional", None: "torch"}


def table(graph_module: fx.GraphModule) -> str:
    """One line a node: opcode, name, target, args, kwargs, in the graph's order."""
    rows = [
        (node.op, node.name, target_name(node.target), _text(node.args), _text(node.kwargs))
        for node in graph_module.graph.nodes
    ]
    return columns([COLUMNS, *rows])


def code(graph_module: fx.GraphModule) -> str:
    """The Python source of the graph's forward."""
    return _ADDRESS.sub("", graph_module.code.strip()) + "\n"


def target_name(target: Any) -> str:
    """A module's or method's name as it is; a function's as package.name, with no address."""
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return _ADDRESS.sub("", repr(target))
    home = getattr(target, "__module__", None)
    return f"{_HOMES.get(home, home)}.{name.rpartition('.')[2]}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, the first a heading, in aligned columns with a rule under the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return page(line.rstrip() for line in lines) + "\n"


def _text(value: Any) -> str:
    """Like repr, with a node as its name and a function as its dotted name."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_text, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    if callable(value) and hasattr(value, "__name__"):
        return target_name(value)
    return _ADDRESS.sub("", repr(value))


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


NEAR = 1e-3  # of the largest output, in float32
EXACT = 1e-6  # of the largest output, in float64


def check_same(
    before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor], what: str
) -> float:
    """The largest difference of the outputs of two forms of a model, in eval mode.

    Args:
        before: the user's model.
        after: what was made of it.
        inputs: of one run.
        what: was made, as "folding BatchNorm".

    Raises:
        ModelError: they differ by more than rounding explains.
    """
    found, largest = _differ(before, after, inputs)
    if not found <= NEAR * largest and not _same_in_float64(before, after, inputs):
        raise ModelError(
            f"{what} must not change what the model computes, and changes its outputs by up to"
            f" {found:.3g} (largest output {largest:.3g}); look in the model's forward for what"
            " depends on more than its inputs, and report it where there is nothing"
        )
    return found


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference; 0 where both are NaN or the same infinity."""
    left, right = left.detach().cpu().double(), right.detach().cpu().double()
    equal = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs()[~equal]
    return float(apart.max()) if apart.numel() else 0.0


def largest_of(output: Any) -> float:
    """Largest finite absolute value of an output's tensors; 0 where there is none."""
    values = [tensor.detach().double().nan_to_num(0, 0, 0).abs() for tensor in tensors_of(output)]
    return max((float(value.max()) for value in values if value.numel()), default=0.0)


def _differ(
    before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """(largest difference, largest output) of one run of each."""
    with evaluating(before), evaluating(after), torch.no_grad():
        wanted, got = _run(before, inputs), _run(after, inputs)
    pairs = zip(tensors_of(wanted), tensors_of(got), strict=True)
    return max((difference(a, b) for a, b in pairs), default=0.0), largest_of(wanted)


def _run(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """The output, with the random values that both forms draw."""
    with seeded():
        return model(*inputs)


def _same_in_float64(before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether they agree where nothing is rounded; not where either runs in its own dtype alone."""
    doubled = [x.double() if x.is_floating_point() else x for x in inputs]
    try:
        forms = [copy.deepcopy(model).double() for model in (before, after)]
        found, largest = _differ(forms[0], forms[1], doubled)
    except Exception:  # a forward that names its dtype; what it raises is anything
        return False
    return found <= EXACT * largest


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode until the block ends, each module then in its own again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
