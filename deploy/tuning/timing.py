"""Time of models on this machine: of each kernel by the node it came from, and of whole inferences.

Kernel times are the least of a few runs of ONNX Runtime's own profile, since a disturbance only
makes a run longer. An optimizer that fuses nodes names the kernel after one of them, or after its
output, with something before or after it::

    Conv "/c1", Relu "/r1"   -->  kernel "/r1_output_0_nchwc"   (the tensor's name)
    the same in int8         -->  kernel "/c1_token_19"         (the node's name)
    inserted by it           -->  kernel "ReorderOutput_token_3"

so a kernel belongs to the node with the longest name, or output name, that its name starts with.
For a Conv with nodes fused into it that is the last node. The time is counted to the Conv: a
LeakyRelu fused into a float Conv stays float where nothing after it is int8.
"""

import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from deploy.errors import BackendError, SdkMissingError
from deploy.graph.placement import WEIGHTED
from deploy.method import Choices
from deploy.metrics.latency import measure as measure_latencies
from deploy.runtimes.ort import OrtSession, profile_kernels
from deploy.targets.base import BuildRequest, Target
from deploy.tensors import Array, Session
from deploy.terminal import phase
from deploy.tuning.search_options import Trial

PAIRS = frozenset({"QuantizeLinear", "DequantizeLinear"})

_WARM_PROFILES = 2  # profiled runs that do not count
_SPLIT_S = 0.2  # of timing a split on this CPU
_MIN_ROUNDS = 5  # of timing splits, in each of which every split runs twice
_DEVICE_SPLIT_S = 1.0  # of timing a split on a device


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Least time of each kernel of a model, in microseconds.

    Attributes:
        nodes: node of the model -> time of its kernel; 0 for a node that was folded away.
        unattributed: time of kernels that belong to no node.
    """

    nodes: Mapping[str, float]
    unattributed: float

    @property
    def total(self) -> float:
        """Time of all kernels of one inference."""
        return sum(self.nodes.values()) + self.unattributed


def least_kernel_times(times: KernelTimes, other_times: KernelTimes) -> KernelTimes:
    """Return the lesser of two times of each kernel of one model."""
    nodes = {name: min(time, other_times.nodes[name]) for name, time in times.nodes.items()}
    return KernelTimes(nodes, min(times.unattributed, other_times.unattributed))


def kernel_times(
    model: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Array]],
    *,
    float_model: onnx.ModelProto,
    runs: int,
    seconds: float = 0.0,
) -> KernelTimes:
    """Return the least time of each node in a few runs under ONNX Runtime's profiler.

    The runs have one thread; with several the times would depend on other processes.

    Args:
        model: as it would be deployed.
        feeds: inputs, used in turn.
        float_model: the time is counted to its nodes; Q/DQ nodes count for themselves.
        runs: least number of runs, after two that do not count.
        seconds: least time; a small model runs more often.
    """
    times_by_kernel: dict[str, list[float]] = defaultdict(list)
    weighted_kernels = set()
    for kernel, op_type, microseconds in profile_kernels(
        model, feeds, runs=runs + _WARM_PROFILES, seconds=seconds
    ):
        times_by_kernel[kernel].append(microseconds)
        if op_type.removeprefix("Fused") in WEIGHTED:  # such as FusedConv: with its Relu
            weighted_kernels.add(kernel)
    least_times = {}
    for kernel, times in times_by_kernel.items():
        least_times[kernel] = min(times[_WARM_PROFILES:] or times)  # all, if it ran so rarely
    pair_nodes = [node.name for node in model.graph.node if node.op_type in PAIRS]
    return attribute_kernels(least_times, float_model, pair_nodes, weighted=weighted_kernels)


def attribute_kernels(
    kernels: Mapping[str, float],
    model: onnx.ModelProto,
    extra_names: Iterable[str] = (),
    *,
    weighted: Collection[str] = (),
) -> KernelTimes:
    """Return the time of each node of a model: that of the kernels that run it.

    A kernel's name starts with the name of its node, or of an output of that node; of several such
    names the longest counts. A kernel that multiplies with weights counts to its layer, even if a
    fused node gave it the name.

    Args:
        kernels: name of a kernel -> its time.
        model: its nodes are counted to.
        extra_names: names of other nodes, such as Q/DQ nodes that the model has not.
        weighted: the kernels that multiply with weights, whatever else they compute.
    """
    # name that a kernel's name may start with -> name of the node
    node_by_prefix = {name: name for name in extra_names}
    maker_by_tensor: dict[str, onnx.NodeProto] = {}
    unweighted: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node:
        node_by_prefix |= dict.fromkeys((*node.output, node.name), node.name)
        maker_by_tensor |= dict.fromkeys(node.output, node)
        if node.op_type not in WEIGHTED:
            unweighted[node.name] = node
    node_by_prefix.pop("", None)  # an optional output without a name

    # a kernel without an owner was inserted by the optimizer, such as a change of layout
    owner_by_kernel = {kernel: _find_owner(kernel, node_by_prefix) for kernel in kernels}
    owners = set(owner_by_kernel.values())
    times = dict.fromkeys(node_by_prefix.values(), 0.0)
    unattributed = 0.0
    for kernel, owner in owner_by_kernel.items():
        if kernel in weighted and owner in unweighted:
            owner = _find_layer_inside(unweighted[owner], maker_by_tensor, owners) or owner
        if owner is None:
            unattributed += kernels[kernel]
        else:
            times[owner] += kernels[kernel]
    return KernelTimes(times, unattributed)


def _find_layer_inside(
    end: onnx.NodeProto,
    maker_by_tensor: Mapping[str, onnx.NodeProto],
    kernel_owners: Collection[str | None],
) -> str | None:
    """Return the only layer that may be fused into a kernel; None without one, or with several.

    It is searched for upstream of the node that gave the kernel its name.

    Args:
        end: the node that the kernel is named after, the last of the fused ones.
        maker_by_tensor: tensor -> the node that makes it.
        kernel_owners: nodes with a kernel of their own, past which nothing is fused.
    """
    layers: set[str] = set()
    visited = {end.name}
    waiting = [end]
    for node in waiting:  # grows inside the loop
        for name in node.input:
            maker = maker_by_tensor.get(name)
            if maker is None or maker.name in kernel_owners:
                continue
            if maker.op_type in WEIGHTED:
                layers.add(maker.name)
            elif maker.name not in visited:
                visited.add(maker.name)
                waiting.append(maker)
    return layers.pop() if len(layers) == 1 else None


def _find_owner(kernel: str, node_by_prefix: Mapping[str, str]) -> str | None:
    """Return the node of the longest name that a kernel's name starts with, whole words only."""
    name = kernel.removeprefix("fused ")
    while name not in node_by_prefix:
        end = max(name.rfind("_"), name.rfind("/"))
        if end <= 0:
            return None
        name = name[:end]
    return node_by_prefix[name]


def time_models(
    models: Sequence[onnx.ModelProto], feeds: Sequence[Mapping[str, Array]], *, threads: int
) -> list[float]:
    """Return the milliseconds of the quickest inference of each model, timed in turns.

    Which split is the cheapest would depend on the disturbances of a busy machine, so the quickest
    runs count.
    """
    sessions = {}
    for number, model in enumerate(models):
        sessions[str(number)] = OrtSession.open(model, threads=threads)
    with phase("timing splits"):
        measurements = measure_latencies(
            sessions, feeds, warmup_ms=0, duration_s=_SPLIT_S, min_iterations=_MIN_ROUNDS
        )
    return [measurement.run_time.min for measurement in measurements.values()]


def has_device(target: Target) -> bool:
    """Whether the SDK of a target and its device are in this machine."""
    try:
        target.describe_sdk()
    except SdkMissingError:
        return False
    return True


@dataclass(slots=True)
class DeviceTimer:
    """Times trials beside the float model on a target's device.

    Attributes:
        target: the target.
        request: its build request.
        float_choices: choices with all in float.
        samples: inputs of the runs.
    """

    target: Target
    request: BuildRequest
    float_choices: Choices
    samples: Sequence[Mapping[str, Array]]
    _float_session: Session | None = None  # built once for all calls

    @phase("timing splits")
    def measure(self, trials: Sequence[Trial]) -> list[float]:
        """Return the times of the trials, as shares of the float model's.

        Raises:
            BackendError: an engine cannot be built or run here.
        """
        with tempfile.TemporaryDirectory(dir=self.request.folder) as folder:
            if self._float_session is None:
                self._float_session = self._open(self.float_choices, Path(folder) / "float")
            sessions = {"float": self._float_session}
            for number, trial in enumerate(trials):
                name = f"split {number}"
                sessions[name] = self._open(trial.choices, Path(folder) / name)
            measurements = measure_latencies(sessions, self.samples, duration_s=_DEVICE_SPLIT_S)
        # in the order of `sessions`, the float model first
        float_ms, *times_ms = (measurements[name].latency.p50 for name in sessions)
        return [trial_ms / float_ms for trial_ms in times_ms]

    def _open(self, choices: Choices, folder: Path) -> Session:
        """Build the engine of a split in a new folder, and load it."""
        folder.mkdir()
        request = self.request.with_added_choices(choices)
        result = self.target.build(replace(request, folder=folder))
        if result.engine is None:
            raise BackendError(result.error or f"{self.target.name} built no engine here")
        return self.target.open(result.engine, threads=request.threads)
