"""Inspect a traced model: time and FLOPs per node, text form, comparison of two forms.

FLOPs are from torch's `FlopCounterMode` on the meta device, which computes nothing and counts
exactly; `FLOPS_NOTE` states what. If two float32 forms of a model differ by more than 1/1000 of the
largest output, both run in float64 and must agree to 1/1000000.
"""

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
from deploy.fx.capture import as_inputs, graph_of
from deploy.fx.device import fixed_seed
from deploy.fx.fuse import called_module
from deploy.fx.source import tensor_of
from deploy.terminal import join_visible, phase

COLUMNS = ("opcode", "name", "target", "args", "kwargs")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PACKAGES = {"_operator": "operator", "torch._C._nn": "torch.nn.functional", None: "torch"}


def format_graph(graph_module: fx.GraphModule) -> str:
    """Format the graph, one line per node: opcode, name, target, args, kwargs."""
    rows = [
        (node.op, node.name, target_name(node.target), _text(node.args), _text(node.kwargs))
        for node in graph_module.graph.nodes
    ]
    return format_columns([COLUMNS, *rows])


def graph_source(graph_module: fx.GraphModule) -> str:
    """Return the Python source of the graph's forward."""
    return _ADDRESS.sub("", graph_module.code.strip()) + "\n"


def target_name(target: Any) -> str:
    """Return the name of a module or method, or package.name of a function, without addresses."""
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return _ADDRESS.sub("", repr(target))
    package = getattr(target, "__module__", None)
    return f"{_PACKAGES.get(package, package)}.{name.rpartition('.')[2]}"


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of text in aligned columns, with a rule under the first row, the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return join_visible(line.rstrip() for line in lines) + "\n"


def _text(value: Any) -> str:
    """Return repr of a value, with nodes and functions as their names."""
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
FLOPS_NOTE = (
    "FLOPs are those of convolutions and matrix products, two a multiply-accumulate; norms,"
    " activations and other arithmetic are not counted"
)
_CALLS = re.compile(r"@[0-9]+")  # torch.export numbers the calls of a module


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Cost of one node of the graph."""

    # opcode, name, target: as in the table of `calib8 trace`
    opcode: str
    name: str
    target: str
    module: str  # qualified name of the module that it belongs to; "" for the model itself
    seconds: float  # mean of the timed runs
    percent: float  # share of the entire run
    flops: int  # floating-point operations, two per multiply-accumulate
    parameters: int  # number of parameters that it uses; shared ones count for the first node

    @property
    def macs(self) -> int:
        """Multiply-accumulates: half the FLOPs."""
        return self.flops // 2


@dataclass(frozen=True, slots=True)
class GraphProfile:
    """Costs of the nodes, in the graph's order, and the mean time of a run in seconds."""

    nodes: tuple[NodeCost, ...]
    seconds: float

    @property
    def flops(self) -> int:
        """FLOPs of the graph."""
        return sum(node.flops for node in self.nodes)

    @property
    def macs(self) -> int:
        """MACs of the graph."""
        return sum(node.macs for node in self.nodes)

    @property
    def parameters(self) -> int:
        """Number of parameters, each counted once."""
        return sum(node.parameters for node in self.nodes)

    def to_json(self) -> dict[str, object]:
        """Return totals and nodes as plain JSON types."""
        totals = {"seconds": self.seconds, "flops": self.flops, "macs": self.macs}
        nodes = [{**asdict(node), "macs": node.macs} for node in self.nodes]
        return {"schema": SCHEMA, **totals, "parameters": self.parameters, "nodes": nodes}

    def table(self) -> str:
        """Format the nodes, slowest first, and a line of totals."""
        heading = ("Op type", "Op", "Average runtime (s)", "Pct", "MFLOPs", "MMACs", "Parameters")
        slowest = sorted(self.nodes, key=lambda node: -node.seconds)
        rows = [heading, *(_row(node) for node in slowest)]
        percent = f"{sum(node.percent for node in self.nodes):.2f}"
        parameters = str(self.parameters)
        total = (f"{self.seconds:.6f}", percent, _mega(self.flops), _mega(self.macs), parameters)
        return format_columns([*rows, ("total", "", *total)])


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
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    leaves: Sequence[str | type[nn.Module]] = (),
    warm_up: int = 5,
    runs: int = 20,
) -> GraphProfile:
    """Measure the mean time of each node over `runs` runs after `warm_up` untimed ones.

    `model`, `leaves`: as `deploy.fx.capture.graph_of` takes them.
    """
    inputs = as_inputs(inputs, model)
    graph_module = graph_of(model, inputs, leaves=leaves)
    timing = TimingInterpreter(graph_module)
    with torch.no_grad():
        for _ in range(warm_up):
            timing.run(*inputs)
        timing.seconds.clear()
        started = time.perf_counter()
        for _ in range(runs):
            timing.run(*inputs)
        total = (time.perf_counter() - started) / runs
    flops = count_flops(graph_module, inputs)
    counts = _parameters(graph_module)
    nodes = [
        _cost(node, timing.seconds[node.name] / runs, total, flops[node.name], counts.get(node, 0))
        for node in graph_module.graph.nodes
    ]
    return GraphProfile(tuple(nodes), total)


def count_flops(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return node name -> FLOPs for inputs of these shapes; nothing is computed."""
    on_meta, meta = copy.deepcopy(graph_module).to("meta"), torch.device("meta")
    for node in on_meta.graph.nodes:  # captured nodes name the device of tensors they create
        arguments = (node.args, node.kwargs)
        node.args, node.kwargs = pytree.tree_map_only(torch.device, lambda _: meta, arguments)
    counter = FlopInterpreter(on_meta)
    with torch.no_grad():
        counter.run(*(tensor.to("meta") for tensor in inputs))
    return counter.flops


def mean_seconds(model: nn.Module, inputs: Sequence[torch.Tensor]) -> float:
    """Return the mean wall-clock seconds of 20 runs of `model`, after 10 untimed ones."""
    with torch.no_grad():
        for _ in range(10):
            model(*inputs)
        _wait_for_device()
        started = time.perf_counter()
        for _ in range(20):
            model(*inputs)
        _wait_for_device()
    return (time.perf_counter() - started) / 20


@phase("timing")
def compare_speed(before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor]) -> str:
    """Compare two models; return one sentence with mean times, ratio and largest difference.

    They are timed alternately, and the best round of each counts, so that other load affects both.
    """
    turns = [(mean_seconds(before, inputs), mean_seconds(after, inputs)) for _ in range(3)]
    slow, fast = (min(times) for times in zip(*turns, strict=True))
    with torch.no_grad():
        difference = largest_difference(before(*inputs), after(*inputs))
    return (
        f"before {slow * 1e3:.2f} ms, after {fast * 1e3:.2f} ms: {slow / fast:.2f}x;"
        f" largest difference of the outputs {difference:.3g}"
    )


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def _parameters(graph_module: fx.GraphModule) -> dict[fx.Node, int]:
    """Return node -> number of parameters that it uses and no node before it does."""
    counted, counts = set[int](), dict[fx.Node, int]()
    for node in graph_module.graph.nodes:
        module = called_module(graph_module, node)
        read = list(module.parameters()) if module is not None else []
        if node.op == "get_attr":
            value = tensor_of(graph_module, node.target)
            read = [value] if isinstance(value, nn.Parameter) else []
        counts[node] = sum(p.numel() for p in read if id(p) not in counted)
        counted |= {id(p) for p in read}
    return counts


def _cost(node: fx.Node, seconds: float, total: float, flops: int, parameters: int) -> NodeCost:
    percent = 100 * seconds / total if total else 0.0
    target = target_name(node.target)
    owner = owner_of(node)
    return NodeCost(node.op, node.name, target, owner, seconds, percent, flops, parameters)


def owner_of(node: fx.Node) -> str:
    """Return the name of the module that a node calls or was traced in, "" for the model."""
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


FLOAT32_TOLERANCE = 1e-3  # of the largest output, in float32
FLOAT64_TOLERANCE = 1e-6  # of the largest output, in float64


def check_same_outputs(
    before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor], what: str
) -> float:
    """Return the largest difference of the outputs of two forms of a model, in eval mode.

    `what`: the rewriting, such as "folding BatchNorm".

    Raises:
        ModelError: they differ by more than rounding errors.
    """
    worst, largest = _compare_outputs(before, after, inputs)
    if not worst <= FLOAT32_TOLERANCE * largest and not _same_in_float64(before, after, inputs):
        raise ModelError(
            f"{what} must not change what the model computes, and changes its outputs by up to"
            f" {worst:.3g} (largest output {largest:.3g}); check whether the model's forward"
            " depends on more than its inputs, and if not, report it"
        )
    return worst


def largest_difference(left: Any, right: Any) -> float:
    """Return the largest absolute difference of two outputs: tensors, or containers of them.

    Equal infinities and two NaN count as 0.
    """
    differences = [torch.zeros(1, dtype=torch.float64)]
    for one, other in zip(tensors_of(left), tensors_of(right), strict=True):
        a, b = one.detach().cpu().double(), other.detach().cpu().double()
        equal = (a == b) | (a.isnan() & b.isnan())
        differences.append((a - b).abs()[~equal])
    return float(torch.cat(differences).max())


def largest_magnitude(output: Any) -> float:
    """Return the largest finite absolute value of an output's tensors; 0 if there is none."""
    values = [tensor.detach().double().nan_to_num(0, 0, 0).abs() for tensor in tensors_of(output)]
    return max((float(value.max()) for value in values if value.numel()), default=0.0)


def _compare_outputs(
    before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Run both; return (largest difference, largest output)."""
    with eval_mode(before), eval_mode(after), torch.no_grad():
        expected, got = _run(before, inputs), _run(after, inputs)
    return largest_difference(expected, got), largest_magnitude(expected)


def _run(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """Run the model with a fixed seed, so that both forms draw the same random values."""
    with fixed_seed():
        return model(*inputs)


def _same_in_float64(before: nn.Module, after: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether both agree in float64; False if one cannot run in float64."""
    doubled = [x.double() if x.is_floating_point() else x for x in inputs]
    try:
        forms = [copy.deepcopy(model).double() for model in (before, after)]
        worst, largest = _compare_outputs(forms[0], forms[1], doubled)
    except Exception:  # a forward with a fixed dtype may raise anything
        return False
    return worst <= FLOAT64_TOLERANCE * largest


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside the `with` block; restore each module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
