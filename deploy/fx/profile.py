"""Measure the time, FLOPs and parameters of each node of a traced model.

FLOPs are from torch's `FlopCounterMode` on the meta device, which computes nothing and counts
exactly; `FLOPS_NOTE` states what.
"""

import copy
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from deploy.errors import ModelError, check_whole_number, first_line
from deploy.fx.capture import as_inputs, graph_of
from deploy.fx.device import move_tensors
from deploy.fx.graph_text import format_columns, target_name
from deploy.fx.operations import called_module
from deploy.fx.plain_copy import plain_copy, tensor_of
from deploy.fx.trace import Leaves
from deploy.terminal import PrintedResult, phase

SCHEMA = "calib8-profile/1"


FLOPS_NOTE = (
    "FLOPs are those of convolutions and matrix products, two a multiply-accumulate; norms,"
    " activations and other arithmetic are not counted"
)


_NOT_COMPUTING = ("placeholder", "output")  # opcodes of nodes that only pass values on
_CALL_NUMBER = re.compile(r"@[0-9]+")  # torch.export numbers the calls of a module


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Cost of one node of the graph.

    Attributes:
        opcode: as in the table of `calib8 trace`.
        name: as in that table.
        target: as in that table.
        module: qualified name of the module that it belongs to; "" for the model itself.
        seconds: mean of the timed runs.
        percent: share of `GraphProfile.seconds`.
        flops: floating-point operations, two per multiply-accumulate.
        parameters: number of parameters that it uses; shared ones count for the first node.
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


@dataclass(frozen=True, slots=True, repr=False)
class GraphProfile(PrintedResult):
    """Costs of a model.

    Attributes:
        nodes: costs of the nodes that compute, in the graph's order.
        seconds: mean time of these nodes in a run.
    """

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
        return {
            "schema": SCHEMA,
            "seconds": self.seconds,
            "flops": self.flops,
            "macs": self.macs,
            "parameters": self.parameters,
            "nodes": [{**asdict(node), "macs": node.macs} for node in self.nodes],
        }

    def to_screen(self) -> str:
        """Return the nodes, slowest first, a line of totals, and what the FLOPs count."""
        heading = ("Op type", "Op", "Average runtime (s)", "Pct", "MFLOPs", "MMACs", "Parameters")
        slowest_first = sorted(self.nodes, key=lambda node: -node.seconds)
        total = NodeCost("total", "", "", "", self.seconds, 100.0, self.flops, self.parameters)
        return format_columns([heading, *map(_row, [*slowest_first, total])]) + FLOPS_NOTE


class NodeMeter(fx.Interpreter):
    """Runs a graph and adds up, for each node, by how much a meter advances.

    Attributes:
        read_meter: returns the present reading, such as that of a clock.
        amounts: node name -> by how much the meter advanced in all runs.
    """

    def __init__(self, graph_module: fx.GraphModule, read_meter: Callable[[], float]):
        super().__init__(graph_module)
        self.read_meter = read_meter
        self.amounts: dict[str, Any] = defaultdict(int)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and add the advance of the meter."""
        before = self.read_meter()
        result = super().run_node(n)
        self.amounts[n.name] += self.read_meter() - before
        return result


def _read_clock() -> float:
    """Return the seconds of a clock, after the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@phase("profiling")
def profile(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    leaves: Leaves = (),
    warm_up: int = 5,
    runs: int = 20,
) -> GraphProfile:
    """Measure the mean time of each node.

    Args:
        model: in any mode; it runs in eval mode.
        inputs: example inputs, or a loader whose first item holds them.
        leaves: modules to keep as one node, by name, class name or class.
        warm_up: number of untimed runs before the timed ones.
        runs: number of timed runs.

    Raises:
        ConfigError: a number of runs is no whole number, or no run is timed.
        ModelError: the model cannot be traced or run.
    """
    check_whole_number("runs", runs, 1)
    check_whole_number("warm_up", warm_up, 0)
    inputs = as_inputs(inputs, model)
    # in train mode, norms would use the statistics of the batch
    graph_module = graph_of(plain_copy(model).eval(), inputs, leaves=leaves)
    timed_graph = NodeMeter(graph_module, _read_clock)  # its `amounts` are seconds
    with torch.no_grad():
        for _ in range(warm_up):
            timed_graph.run(*inputs)
        timed_graph.amounts.clear()
        for _ in range(runs):
            timed_graph.run(*inputs)
    computing_nodes = [node for node in graph_module.graph.nodes if node.op not in _NOT_COMPUTING]
    total_seconds = sum(timed_graph.amounts[node.name] for node in computing_nodes) / runs
    flops_by_name = count_flops(graph_module, inputs)
    parameters_by_name = _count_parameters(graph_module)
    costs = []
    for node in computing_nodes:
        seconds = timed_graph.amounts[node.name] / runs
        cost = NodeCost(
            opcode=node.op,
            name=node.name,
            target=target_name(node.target),
            module=owner_of(node),
            seconds=seconds,
            percent=100 * seconds / total_seconds,
            flops=flops_by_name[node.name],
            parameters=parameters_by_name[node.name],
        )
        costs.append(cost)
    return GraphProfile(tuple(costs), total_seconds)


def count_flops(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return node name -> FLOPs for inputs of these shapes; nothing is computed.

    Raises:
        ModelError: an operator, such as torch's int8 ones, does not run on the meta device.
    """
    try:
        return _run_on_meta(graph_module, inputs)
    except Exception as error:  # torch's, or that of a user's operator
        raise ModelError(
            "FLOPs are counted on torch's meta device, which has neither values nor int8 kernels,"
            f" and the model does not run there: {first_line(error)}; profile the float model, and"
            " read no value of a tensor in a leaf"
        ) from error


def _run_on_meta(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return node name -> FLOPs of a run on the meta device."""
    meta_device = torch.device("meta")
    on_meta = copy.deepcopy(graph_module).to(meta_device)
    for node in on_meta.graph.nodes:  # captured nodes name the device of tensors they create
        node.args, node.kwargs = pytree.tree_map_only(
            torch.device, lambda _device: meta_device, (node.args, node.kwargs)
        )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        meter = NodeMeter(on_meta, counter.get_total_flops)
        meter.run(*move_tensors(tuple(inputs), meta_device))
    return meter.amounts


def _count_parameters(graph_module: fx.GraphModule) -> dict[str, int]:
    """Return node name -> number of parameters that it uses and no node before it does."""
    counted_ids: set[int] = set()
    counts: dict[str, int] = {}
    for node in graph_module.graph.nodes:
        parameters: list[nn.Parameter] = []
        module = called_module(graph_module, node)
        if module is not None:
            parameters += module.parameters()
        elif node.op == "get_attr":
            value = tensor_of(graph_module, node.target)
            if isinstance(value, nn.Parameter):
                parameters.append(value)
        counts[node.name] = 0
        for parameter in parameters:
            if id(parameter) not in counted_ids:
                counts[node.name] += parameter.numel()
                counted_ids.add(id(parameter))
    return counts


def owner_of(node: fx.Node) -> str:
    """Return the name of the module that a node calls or was traced in, "" for the model."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    innermost_path, _ = list(stack.values())[-1]
    path = str(innermost_path).removeprefix("L['self']").lstrip(".")
    return _CALL_NUMBER.sub("", path)


def _row(node: NodeCost) -> tuple[str, ...]:
    return (
        node.opcode,
        node.name,
        f"{node.seconds:.6f}",
        f"{node.percent:.2f}",
        _millions(node.flops),
        _millions(node.macs),
        str(node.parameters),
    )


def _millions(count: int) -> str:
    return f"{count / 1e6:.3f}"
