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

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from threading import Event

import numpy as np
import onnx
from numpy.typing import NDArray

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
    output_error,
    round_block,
    round_to_nearest,
)
from calibrators.amct.arq import kl_scale
from calibrators.amct.recorders import RoundedWeights, RoundedWeightsOf, Targets, TargetsOf
from calibrators.rounding import ConvWindow
from deploy.calibration.observation import Observation, ObservedStatistics, Variant
from deploy.errors import ConfigError
from deploy.graph.bounds import make_window
from deploy.graph.index import Graph, attributes
from deploy.machine import worker_threads
from deploy.targets.ascend.config_keys import ADA, QuantConfig
from deploy.targets.ascend.layers import Layer
from deploy.targets.ascend.quant_layer import read_constant, to_rows
from deploy.terminal import Step, phase

MAX_SAMPLES = 64
MAX_POSITIONS = 4096  # sampled positions of a layer
_MIN_POSITIONS = 256  # whatever memory they take
_MAX_INPUT_BYTES = 32 * 2**20  # of the inputs at more positions than these

Float32Array = NDArray[np.float32]
# (observed, rounded layers, last tensor) -> model whose other AdaRound layers are float
Prepared = Callable[[ObservedStatistics, Collection[str], str], "onnx.ModelProto"]

_KIND_BY_OP = {"Relu": RELU, "Sigmoid": SIGMOID, "Tanh": TANH}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaStep:
    """One layer that AdaRound rounds.

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


def uses_adaround(config: QuantConfig, name: str) -> bool:
    """Whether a layer's weights are rounded by AdaRound."""
    return name in config.layers and config.layers[name].weight.wts_algo == "ada_quantize"


def weight_algorithms(config: QuantConfig) -> str:
    """Return the names of the weight algorithms in use, such as "ARQ and AdaRound"."""
    algorithms = set()
    for name in config.enabled():
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


def make_adaround_steps(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    *,
    key: str,
    samples: int,
    needs: tuple[Observation, ...],
    prepared: Prepared,
) -> dict[str, AdaStep]:
    """Return layer -> its AdaRound step, in the model's order.

    Args:
        model: the prepared float model.
        layers: its layers that are quantized.
        config: the resolved config.
        key: text that contains all that the observed models depend on.
        samples: number of samples in use.
        needs: observations of the channel maxima of the layers that DMQ balances.
        prepared: makes the model that a step observes.
    """
    builder = _StepBuilder(
        index=Graph(model),
        config=config,
        key=key,
        samples=min(samples, MAX_SAMPLES),
        needs=needs,
        prepared=prepared,
    )
    nodes = {node.name: node for node in model.graph.node}
    steps: dict[str, AdaStep] = {}
    for name, layer in layers.items():
        if uses_adaround(config, name):
            steps[name] = builder.make_step(layer, nodes[name], steps)
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepBuilder:
    """The input that the AdaRound steps of all layers share; fields as in `make_adaround_steps`."""

    index: Graph
    config: QuantConfig
    key: str
    samples: int
    needs: tuple[Observation, ...]
    prepared: Prepared

    def make_step(
        self, layer: Layer, node: onnx.NodeProto, earlier: Mapping[str, AdaStep]
    ) -> AdaStep:
        """Return the step of a layer after the steps of the earlier layers.

        Args:
            layer: the layer.
            node: its node.
            earlier: layer -> step of the layers before it in the model, which are rounded first.
        """
        rows = to_rows(read_constant(self.index, layer.weight), layer)
        shape = (layer.group, rows.shape[0] // layer.group, prod(rows.shape[1:]))
        position_bytes = 4 * shape[0] * shape[2]  # the float32 inputs at one position
        positions = min(max(_MAX_INPUT_BYTES // position_bytes, _MIN_POSITIONS), MAX_POSITIONS)
        sample_positions = -(-positions // self.samples)

        output = str(node.output[0])
        earlier_inputs = (*self.needs, *(step.inputs for step in earlier.values()))
        is_matrix = layer.kind in ("Gemm", "MatMul")
        targets = Observation(
            self._variant("float", layer.name, output, (), earlier_inputs),
            output,
            TargetsOf(
                samples=self.samples, max_positions=sample_positions, channels_last=is_matrix
            ),
            layer.name,
        )

        weight = self.config.layers[layer.name].weight
        params = AdaParams(**{key: getattr(weight, key) for key in ADA})
        is_balanced = any(need.layer == layer.name for need in self.needs)
        inputs = Observation(
            self._variant(
                "rounded", layer.name, output, tuple(earlier), (*earlier_inputs, targets)
            ),
            f"{layer.name}.mul.output0" if is_balanced else layer.input,
            RoundedWeightsOf(
                samples=self.samples,
                max_positions=sample_positions,
                window=None if is_matrix else _find_window(node, layer, rows.shape[2:]),
                shape=shape,
                scales=rows.shape[0] if weight.channel_wise else 1,
                params=params,
            ),
            layer.name,
        )
        return AdaStep(
            layer=layer,
            params=params,
            bias=self._read_bias(layer, len(rows)).reshape(shape[:2]),
            activation=_find_activation(self.index, output, shape),
            targets=targets,
            inputs=inputs,
        )

    def _read_bias(self, layer: Layer, channels: int) -> Float32Array:
        """Return the bias in a layer's own output, [C_out]; a MatMul's is in an Add after it."""
        if layer.bias and not layer.bias_add:
            return read_constant(self.index, layer.bias).reshape(-1)
        return np.zeros(channels, np.float32)

    def _variant(
        self,
        form: str,
        layer: str,
        output: str,
        rounded: Collection[str],
        needs: tuple[Observation, ...],
    ) -> Variant:
        """Return the model up to a layer, with the `rounded` layers rounded.

        Args:
            form: "float" or "rounded", for the key of the variant.
            layer: name of the layer.
            output: tensor that it makes.
            rounded: names of the layers with AdaRound's weights.
            needs: observations that these weights follow from.
        """

        def make(observed: ObservedStatistics) -> onnx.ModelProto:
            return self.prepared(observed, rounded, output)

        return Variant(f"{self.key}, {form} up to {layer}", make, needs)


def _find_window(node: onnx.NodeProto, layer: Layer, kernel: tuple[int, ...]) -> ConvWindow:
    """Return the window of a convolution whose kernel has these sizes."""
    return make_window(attributes(node), kernel, transposed=layer.kind == "ConvTranspose")


def _find_activation(index: Graph, tensor: str, shape: tuple[int, int, int]) -> AdaActivation:
    """Return the activation that is the only reader of a tensor, if AMCT's AdaRound knows it."""
    node = index.only_reader(tensor)
    if node is None or node.input[0] != tensor:
        return AdaActivation()
    if node.op_type in _KIND_BY_OP:
        return AdaActivation(_KIND_BY_OP[node.op_type])
    if node.op_type == "LeakyRelu":
        alpha = attributes(node).get("alpha", 0.01)
        return AdaActivation(LEAKY, np.full((1, 1), alpha, np.float32))
    if node.op_type == "PRelu" and node.input[1] in index.constants:
        slope = read_constant(index, node.input[1])
        if slope.size == 1:
            return AdaActivation(LEAKY, slope.reshape(1, 1))
        if slope.size == shape[0] * shape[1]:
            return AdaActivation(LEAKY, slope.reshape(shape[:2]))
    if node.op_type == "Clip" and [index.scalar(end) for end in node.input[1:]] == [0.0, 6.0]:
        return AdaActivation(RELU6)
    return AdaActivation()


def round_layer(
    step: AdaStep, weight: Float32Array, observed: ObservedStatistics, *, progress: str
) -> RoundedWeights:
    """Return a layer's rounding; search it unless it is known.

    Args:
        step: the layer's step.
        weight: its weight times DMQ factors, output channels first.
        observed: the recorders of the step's observations.
        progress: number and name of the layer for the progress display.

    Raises:
        CalibrationError: weights or outputs are too large.
    """
    rounded = observed.recorder(step.inputs)
    assert isinstance(rounded, RoundedWeights)
    if rounded.integers is not None:
        return rounded
    targets = observed.recorder(step.targets)
    statistic = step.inputs.statistic
    assert isinstance(targets, Targets)
    assert isinstance(statistic, RoundedWeightsOf)

    scale = kl_scale(weight, channel_wise=statistic.scales > 1)
    problem = _problem(step, weight.reshape(statistic.shape), scale, rounded, targets)
    iterations = len(problem.blocks()) * step.params.num_iteration
    with phase(f"AdaRound {progress}", iterations, "iterations of channel blocks") as count_step:
        integers = join_blocks(problem, _search_blocks(problem, step.params, count_step))
    nearest_error = output_error(problem, round_to_nearest(problem))
    rounded.set_result(integers, scale, (nearest_error, output_error(problem, integers)))
    return rounded


def _problem(
    step: AdaStep,
    weight: Float32Array,
    scale: Float32Array,
    rounded: RoundedWeights,
    targets: Targets,
) -> AdaProblem:
    """Return the search problem of a layer; `weight` is [G, M, K], `scale` [G * M] or [1]."""
    groups, rows, _ = weight.shape
    scales = np.asarray(np.broadcast_to(scale, groups * rows), np.float32)
    outputs = targets.take_outputs()
    return AdaProblem(
        weight=weight,
        scale=scales.reshape(groups, rows, 1),
        inputs=rounded.take_patches(),
        targets=outputs.reshape(len(outputs), groups, rows),
        bias=step.bias,
        activation=step.activation,
        share=targets.share,
    )


def _search_blocks(
    problem: AdaProblem, params: AdaParams, progress: Step
) -> list[NDArray[np.int8]]:
    """Search the blocks of a problem in threads, which stop if the run is interrupted."""
    is_stopped = Event()

    def step() -> None:
        if is_stopped.is_set():
            raise InterruptedError("the run has ended")
        progress()

    with ThreadPoolExecutor(worker_threads()) as pool:
        try:
            jobs = [
                pool.submit(round_block, block, params, step=step) for block in problem.blocks()
            ]
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            for job in done:
                job.result()  # raises the error of a block
            return [job.result() for job in jobs]
        except BaseException:
            is_stopped.set()
            raise


def error_ratio_range(roundings: Iterable[RoundedWeights]) -> tuple[float, float] | None:
    """Return (smallest, largest) ratio of a layer's output error to that of nearest rounding."""
    ratios = []
    for rounding in roundings:
        nearest_error, error = rounding.errors
        if nearest_error > 0:
            ratios.append(error / nearest_error)
    return (min(ratios), max(ratios)) if ratios else None
