"""AdaRound of the configured layers, one after the other in the model's order, as in AMCT.

::

    float model ----------------------> outputs of layer k ----.
    the same, layers 1 .. k-1 rounded -> inputs of layer k ----+--> weights of layer k rounded
                                                                    --> k + 1 ...

Each layer takes two passes over at most 64 samples, which record inputs and outputs at sampled
positions: at most 4096 and 32 MiB, for one layer at a time. The result is an observation like any
other, so a store keeps it. The search itself is `calibrators.amct.adaround`.

Unlike AMCT, calib8 does not include a GELU that follows a layer in the error: the layer's own
output is compared there, as with all activations that AMCT does not know.
"""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from threading import Event

import numpy as np
import onnx

from calibrators.amct.adaround import (
    LEAKY,
    RELU,
    RELU6,
    SIGMOID,
    TANH,
    AdaActivation,
    AdaParams,
    AdaProblem,
    join_blocks,
    round_block,
)
from calibrators.amct.arq import kl_scale
from calibrators.amct.recorders import RoundedWeights, RoundedWeightsOf, Targets, TargetsOf
from calibrators.grids import Float32Array, Int8Array
from deploy.calibration.observation import Observation, ObservedStatistics, Variant
from deploy.errors import ConfigError
from deploy.graph.bounds import make_window
from deploy.graph.index import Graph, attributes, by_name
from deploy.machine import worker_threads
from deploy.targets.ascend.config_keys import QuantConfig
from deploy.targets.ascend.layers import Layer
from deploy.targets.ascend.quant_layer import read_constant, read_weight_rows
from deploy.terminal import Step, phase

MAX_SAMPLES = 64
MAX_POSITIONS = 4096  # sampled positions of a layer
_MIN_POSITIONS = 256  # whatever memory they take
_MAX_INPUT_BYTES = 32 * 2**20  # of the inputs at the sampled positions, if these are more

# (observed statistics, names of the layers to round, last tensor) -> model up to that tensor, in
# which the other AdaRound layers are float
MakeModel = Callable[[ObservedStatistics, Collection[str], str], "onnx.ModelProto"]

_KIND_BY_OP = {"Relu": RELU, "Sigmoid": SIGMOID, "Tanh": TANH}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaStep:
    """One layer that AdaRound rounds: G groups of M output channels, each a sum of K products.

    Attributes:
        layer: the layer.
        params: parameters of the search.
        bias: float32 [G, M], zeros without bias.
        activation: the activation that follows, which counts in the error.
        targets: observation of the layer's outputs in the float model.
        inputs: observation of its inputs with the earlier layers rounded; a `RoundedWeights`.
    """

    layer: Layer
    params: AdaParams
    bias: Float32Array
    activation: AdaActivation
    targets: Observation
    inputs: Observation


def observed_input(layer: Layer, balanced_layers: Collection[str]) -> str:
    """Return the tensor that a layer reads in the observed model.

    `balanced_layers`: names of the layers that DMQ balances; a Mul by the inverse of its factors
    precedes these, see `multiply_input`.
    """
    return f"{layer.name}.mul.output0" if layer.name in balanced_layers else layer.input


def uses_adaround(config: QuantConfig, name: str) -> bool:
    """Whether a layer's weights are rounded by AdaRound."""
    return name in config.layers and config.layers[name].weight.wts_algo == "ada_quantize"


def weight_algorithms(config: QuantConfig) -> str:
    """Return the names of the weight algorithms in use, such as "ARQ and AdaRound"."""
    algorithms = set()
    for name in config.enabled_layers():
        algorithms.add("AdaRound" if uses_adaround(config, name) else "ARQ")
    return " and ".join(sorted(algorithms)) or "ARQ"


def refuse_padless_deconvs(
    model: onnx.ModelProto, layers: Mapping[str, Layer], config: QuantConfig
) -> None:
    """Refuse AdaRound for ConvTransposes without explicit pads.

    torch, and so AMCT, cannot express them.
    """
    for node in model.graph.node:
        name = node.name
        if node.op_type != "ConvTranspose" or name not in layers:
            continue
        options = attributes(node)
        has_pads = options.get("auto_pad", b"NOTSET") == b"NOTSET" and "output_shape" not in options
        if uses_adaround(config, name) and not has_pads:
            raise ConfigError(
                "ada_quantize is for a ConvTranspose with pads, got auto_pad or output_shape in"
                f" layer {name!r}; give that layer arq_quantize"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaRoundSteps:
    """What the AdaRound steps of all layers share.

    Attributes:
        float_graph: the float model, in which each layer has a weight of its own.
        config: the config, with every setting filled in.
        key: text that contains all that the observed models depend on.
        samples: number of samples in use, at most `MAX_SAMPLES`.
        channel_maxima: layer that DMQ balances -> observation of its input's channel maxima.
        make_model: makes the model that a step observes.
    """

    float_graph: Graph
    config: QuantConfig
    key: str
    samples: int
    channel_maxima: Mapping[str, Observation]
    make_model: MakeModel

    def make(self, layers: Mapping[str, Layer]) -> dict[str, AdaStep]:
        """Return layer name -> its step, for the AdaRound layers among `layers`, in their order."""
        node_by_name = by_name(self.float_graph.nodes)
        steps: dict[str, AdaStep] = {}
        for name, layer in layers.items():
            if uses_adaround(self.config, name):
                steps[name] = self._make_step(layer, node_by_name[name], steps)
        return steps

    def _make_step(
        self, layer: Layer, node: onnx.NodeProto, earlier_steps: Mapping[str, AdaStep]
    ) -> AdaStep:
        """Return the AdaRound step of a layer: what to observe, and with which values to search.

        The step rounds the weights up or down so that the layer's outputs come close to those of
        the float model, the targets.

        Args:
            layer: the layer.
            node: its node.
            earlier_steps: name -> step of the layers before it in the model, which are rounded
                first.
        """
        weight_rows = read_weight_rows(self.float_graph, layer)  # output channels first
        channels = len(weight_rows)  # output channels
        group_channels = channels // layer.group
        patch_size = prod(weight_rows.shape[1:])  # input values that one output value is made of
        params = self.config.layers[layer.name].weight
        is_matrix = layer.kind in ("Gemm", "MatMul")
        window = None  # how the kernel moves over the input; a matrix has none
        if not is_matrix:
            is_transposed = layer.kind == "ConvTranspose"
            window = make_window(attributes(node), weight_rows.shape[2:], transposed=is_transposed)

        # the search reads outputs and inputs at so many positions of a sample, the same for both;
        # the layer has `layer.group * patch_size` inputs at a position
        max_positions = self._count_positions(layer.group * patch_size)
        target_statistic = TargetsOf(
            samples=self.samples, max_positions=max_positions, channels_last=is_matrix
        )
        input_statistic = RoundedWeightsOf(
            samples=self.samples,
            max_positions=max_positions,
            window=window,
            shape=(layer.group, group_channels, patch_size),  # of the weight, for the search
            scale_count=channels if params.channel_wise else 1,
            params=params,
        )
        output = node.output[0]
        targets, inputs = self._make_observations(
            layer, output, target_statistic, input_statistic, earlier_steps
        )
        return AdaStep(
            layer=layer,
            params=params,
            bias=self._read_bias(layer, channels).reshape(layer.group, group_channels),
            activation=_find_activation(self.float_graph, output, (layer.group, group_channels)),
            targets=targets,
            inputs=inputs,
        )

    def _make_observations(
        self,
        layer: Layer,
        output: str,
        target_statistic: TargetsOf,
        input_statistic: RoundedWeightsOf,
        earlier_steps: Mapping[str, AdaStep],
    ) -> tuple[Observation, Observation]:
        """Return (observation of a layer's targets, observation of its inputs).

        The targets are the layer's outputs in the float model. Its inputs are those in the model in
        which the layers before it have AdaRound's weights.

        A variant is run after the observations that it needs. Here it needs all earlier ones, also
        those that its model does not depend on: so one layer's values are in memory at a time.

        Args:
            layer: the layer.
            output: the output of its node.
            target_statistic: statistic that records the targets.
            input_statistic: statistic that records the inputs.
            earlier_steps: name -> step of the layers before it.
        """
        name = layer.name
        inputs_of_earlier_layers = [step.inputs for step in earlier_steps.values()]
        earlier_observations = (*self.channel_maxima.values(), *inputs_of_earlier_layers)
        # a variant is a model to observe: its key, the function that makes it, and what it needs
        float_variant = Variant(
            f"{self.key}, float up to {name}",
            lambda observed: self.make_model(observed, (), output),  # (): no layer is rounded
            needs=earlier_observations,
        )
        targets = Observation(float_variant, output, target_statistic, name)
        rounded_names = tuple(earlier_steps)
        rounded_variant = Variant(
            f"{self.key}, rounded up to {name}",
            lambda observed: self.make_model(observed, rounded_names, output),
            needs=(*earlier_observations, targets),
        )
        tensor = observed_input(layer, self.channel_maxima)
        return targets, Observation(rounded_variant, tensor, input_statistic, name)

    def _count_positions(self, input_count: int) -> int:
        """Return the sampled positions of a sample, for a layer with so many inputs at each."""
        positions = max(_MAX_INPUT_BYTES // (4 * input_count), _MIN_POSITIONS)  # 4 bytes: float32
        return -(-min(positions, MAX_POSITIONS) // self.samples)

    def _read_bias(self, layer: Layer, channels: int) -> Float32Array:
        """Return the bias in a layer's own output, [C_out]; a MatMul's is in an Add after it."""
        if layer.bias and not layer.bias_add:
            return read_constant(self.float_graph, layer.bias).reshape(-1)
        return np.zeros(channels, np.float32)


def _find_activation(float_graph: Graph, tensor: str, channels: tuple[int, int]) -> AdaActivation:
    """Return the activation that is the only reader of a layer's output, if AMCT's AdaRound has it.

    Else the result is the activation that changes nothing, `AdaActivation()`.

    Args:
        float_graph: the float model.
        tensor: the layer's output.
        channels: (groups, output channels of a group) of the layer.
    """
    node = float_graph.only_reader(tensor)
    if node is None or node.input[0] != tensor:  # such as a PRelu's slope
        return AdaActivation()
    if node.op_type in _KIND_BY_OP:
        return AdaActivation(_KIND_BY_OP[node.op_type])
    if node.op_type == "LeakyRelu":
        alpha = attributes(node).get("alpha", 0.01)
        return AdaActivation(LEAKY, np.full((1, 1), alpha, np.float32))
    if node.op_type == "PRelu" and node.input[1] in float_graph.constants:
        slope = read_constant(float_graph, node.input[1])
        if slope.size == 1:
            return AdaActivation(LEAKY, slope.reshape(1, 1))
        if slope.size == prod(channels):
            return AdaActivation(LEAKY, slope.reshape(channels))
    if node.op_type == "Clip":
        limits = [float_graph.scalar(name) for name in node.input[1:]]
        if limits == [0.0, 6.0]:
            return AdaActivation(RELU6)
    return AdaActivation()


def round_layer(
    step: AdaStep, weight: Float32Array, observed: ObservedStatistics, *, progress: str
) -> RoundedWeights:
    """Round a layer's weight by AdaRound; return the recorder of its inputs, with the integers.

    The recorder stores the integers, so that they are computed once. If it has them already, such
    as from the statistics of an earlier run, it is returned as it is.

    Args:
        step: the layer's step.
        weight: its weight times DMQ factors, float32, output channels first.
        observed: the recorders of the step's observations.
        progress: number and name of the layer for the progress display.

    Raises:
        CalibrationError: weights or outputs are too large.
    """
    input_recorder = observed.recorder(step.inputs)
    assert isinstance(input_recorder, RoundedWeights)
    if input_recorder.integers is not None:
        return input_recorder
    target_recorder = observed.recorder(step.targets)
    statistic = step.inputs.statistic
    assert isinstance(target_recorder, Targets)
    assert isinstance(statistic, RoundedWeightsOf)

    scale = kl_scale(weight, channel_wise=statistic.scale_count > 1)
    grouped_weight = weight.reshape(statistic.shape)
    problem = _make_problem(step, grouped_weight, scale, input_recorder, target_recorder)
    # blocks of output channels are searched separately, each in as many iterations
    iterations = len(problem.blocks()) * step.params.num_iteration
    with phase(f"AdaRound {progress}", iterations, "iterations of channel blocks") as count_step:
        integers = join_blocks(problem, _search_blocks(problem, step.params, count_step))

    input_recorder.integers = integers
    input_recorder.scale = scale
    return input_recorder


def _make_problem(
    step: AdaStep,
    weight: Float32Array,
    scale: Float32Array,
    input_recorder: RoundedWeights,
    target_recorder: Targets,
) -> AdaProblem:
    """Return the problem that AdaRound solves for a layer: which weights are rounded up.

    The sampled values are moved out of both recorders, which are empty then.

    Args:
        step: the layer's step.
        weight: [G, M, K]: groups, output channels of a group, values of an input patch.
        scale: scales of the weight, [G * M] or [1].
        input_recorder: has the layer's inputs.
        target_recorder: has its outputs in the float model.
    """
    groups, group_channels, _ = weight.shape
    channel_scales = np.asarray(np.broadcast_to(scale, groups * group_channels), np.float32)
    outputs = target_recorder.take_outputs()
    return AdaProblem(
        weight=weight,
        scale=channel_scales.reshape(groups, group_channels, 1),
        inputs=input_recorder.take_patches(),
        targets=outputs.reshape(len(outputs), groups, group_channels),
        bias=step.bias,
        activation=step.activation,
        error_factor=target_recorder.error_factor,  # of each squared error, as in AMCT's mean
    )


def _search_blocks(problem: AdaProblem, params: AdaParams, progress: Step) -> list[Int8Array]:
    """Return the integers of each block of a problem, searched in threads.

    If a block fails or the run is interrupted, the other threads stop at their next iteration.
    """
    stop_request = Event()

    def count_step() -> None:
        """Count an iteration of a block; end its thread if another block has failed."""
        if stop_request.is_set():
            raise InterruptedError("the run has ended")
        progress()

    with ThreadPoolExecutor(worker_threads()) as pool:
        try:
            jobs = [
                pool.submit(round_block, block, params, step=count_step)
                for block in problem.blocks()
            ]
            # returns as soon as any block fails, or if all are done
            ended_jobs, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            for job in ended_jobs:
                job.result()  # raises the error of a block
            return [job.result() for job in jobs]
        except BaseException:
            stop_request.set()
            pool.shutdown(wait=False, cancel_futures=True)  # drops blocks that have not begun
            raise
