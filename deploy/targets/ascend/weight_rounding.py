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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from deploy.calibration.observation import Observation, ObservedStatistics, Variant
from deploy.errors import ConfigError
from deploy.graph.bounds import make_window
from deploy.graph.index import Graph, attributes
from deploy.machine import worker_threads
from deploy.targets.ascend.config_keys import ADA, QuantConfig, WeightParams
from deploy.targets.ascend.layers import Layer
from deploy.targets.ascend.quant_layer import read_constant, to_rows
from deploy.terminal import Step, phase

MAX_SAMPLES = 64
MAX_POSITIONS = 4096  # sampled positions of a layer
_LEAST, _BYTES = 256, 32 * 2**20  # positions always kept; bytes of the inputs of further ones

Float32Array = NDArray[np.float32]
# (observed, rounded layers, last tensor) -> model whose other AdaRound layers are float
Prepared = Callable[[ObservedStatistics, Collection[str], str], "onnx.ModelProto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaStep:
    """One layer that AdaRound rounds.

    Attributes:
        bias: float32 [G, M], zeros without bias.
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
    used = {uses_adaround(config, name) for name in config.enabled()} or {False}
    return " and ".join({False: "ARQ", True: "AdaRound"}[one] for one in sorted(used))


def find_padless_deconvs(model: onnx.ModelProto) -> Iterator[str]:
    """Yield the ConvTransposes without explicit pads, which torch, and so AMCT, cannot express."""
    for node in model.graph.node:
        if node.op_type == "ConvTranspose":
            given = attributes(node)
            if given.get("auto_pad", b"NOTSET") != b"NOTSET" or "output_shape" in given:
                yield node.name


def refuse_padless_deconvs(
    model: onnx.ModelProto, layers: Mapping[str, Layer], config: QuantConfig
) -> None:
    """Refuse AdaRound for the layers of `find_padless_deconvs`."""
    for name in find_padless_deconvs(model):
        if name in layers and uses_adaround(config, name):
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

    `key`: text that contains all that the observed models depend on.
    """
    index = Graph(model)
    nodes = {node.name: node for node in model.graph.node}
    steps: dict[str, AdaStep] = {}
    for name, layer in layers.items():
        if uses_adaround(config, name):
            balanced = any(need.layer == name for need in needs)
            earlier = tuple(steps.values())
            steps[name] = _step(
                layer, nodes[name], index, config,
                key=key, samples=samples, needs=needs, balanced=balanced,
                earlier=earlier, prepared=prepared,
            )  # fmt: skip
    return steps


def _step(
    layer: Layer,
    node: onnx.NodeProto,
    index: Graph,
    config: QuantConfig,
    *,
    key: str,
    samples: int,
    needs: tuple[Observation, ...],
    balanced: bool,
    earlier: tuple[AdaStep, ...],
    prepared: Prepared,
) -> AdaStep:
    rows = to_rows(read_constant(index, layer.weight), layer)
    weight = config.layers[layer.name].weight
    shape = (layer.group, rows.shape[0] // layer.group, prod(rows.shape[1:]))
    samples = min(samples, MAX_SAMPLES)
    total = min(max(_BYTES // (4 * shape[0] * shape[2]), _LEAST), MAX_POSITIONS)
    most = -(-total // samples)
    names = tuple(one.layer.name for one in earlier)
    before = (*needs, *(one.inputs for one in earlier))
    end = str(node.output[0])

    def variant(words: str, rounded: Collection[str], needs: tuple[Observation, ...]) -> Variant:
        def make(observed: ObservedStatistics) -> onnx.ModelProto:
            return prepared(observed, rounded, end)

        return Variant(f"{key}, {words} up to {layer.name}", make, needs)

    last = layer.kind in ("Gemm", "MatMul")
    targets = Observation(
        variant("float", (), before),
        end,
        TargetsOf(samples=samples, most=most, last=last),
        layer.name,
    )
    window = None
    if not last:
        transposed = layer.kind == "ConvTranspose"
        window = make_window(attributes(node), rows.shape[2:], transposed=transposed)
    inputs = Observation(
        variant("rounded", names, (*before, targets)),
        f"{layer.name}.mul.output0" if balanced else layer.input,
        RoundedWeightsOf(
            samples=samples,
            most=most,
            window=window,
            shape=shape,
            scales=rows.shape[0] if weight.channel_wise else 1,
            params=_params(weight),
        ),
        layer.name,
    )
    bias = np.zeros(rows.shape[0], np.float32)
    if layer.bias and not layer.bias_add:
        bias = read_constant(index, layer.bias).reshape(-1)
    return AdaStep(
        layer=layer,
        params=_params(weight),
        bias=bias.reshape(shape[:2]),
        activation=_activation(index, end, shape),
        targets=targets,
        inputs=inputs,
    )


def _params(weight: WeightParams) -> AdaParams:
    return AdaParams(**{key: getattr(weight, key) for key in ADA})


def _activation(index: Graph, tensor: str, shape: tuple[int, int, int]) -> AdaActivation:
    """Return the activation that is the only reader of a tensor, if AMCT's AdaRound knows it."""
    node = index.only_reader(tensor)
    if node is None or node.input[0] != tensor:
        return AdaActivation()
    plain = {"Relu": RELU, "Sigmoid": SIGMOID, "Tanh": TANH}
    if node.op_type in plain:
        return AdaActivation(plain[node.op_type])
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
    step: AdaStep, weight: Float32Array, observed: ObservedStatistics, *, place: str
) -> RoundedWeights:
    """Return a layer's rounding; search it unless it is known.

    `weight`: its weight times DMQ factors, output channels first.

    Raises:
        CalibrationError: weights or outputs are too large.
    """
    rounded = observed.recorder(step.inputs)
    assert isinstance(rounded, RoundedWeights)
    if rounded.integers is None:
        targets = observed.recorder(step.targets)
        assert isinstance(targets, Targets)
        statistic = step.inputs.statistic
        assert isinstance(statistic, RoundedWeightsOf)
        scale = kl_scale(weight, channel_wise=statistic.scales > 1)
        problem = _problem(step, weight.reshape(statistic.shape), scale, rounded, targets)
        steps = len(problem.blocks()) * step.params.num_iteration
        with phase(f"AdaRound {place}", steps, "steps") as progress:
            integers = join_blocks(problem, _search_blocks(problem, step.params, progress))
        errors = output_error(problem, round_to_nearest(problem)), output_error(problem, integers)
        rounded.keep(integers, scale, errors)
    return rounded


def _problem(
    step: AdaStep,
    weight: Float32Array,
    scale: Float32Array,
    rounded: RoundedWeights,
    targets: Targets,
) -> AdaProblem:
    groups, rows, _ = weight.shape
    scales = np.broadcast_to(scale, groups * rows) if scale.size == 1 else scale
    outputs = targets.taken()
    return AdaProblem(
        weight=weight,
        scale=np.asarray(scales, np.float32).reshape(groups, rows, 1),
        inputs=rounded.taken(),
        targets=outputs.reshape(len(outputs), groups, rows),
        bias=step.bias,
        activation=step.activation,
        share=targets.share,
    )


def _search_blocks(
    problem: AdaProblem, params: AdaParams, progress: Step
) -> list[NDArray[np.int8]]:
    """Search the blocks of a problem in threads, which stop if the run is interrupted."""
    stopped = Event()

    def step() -> None:
        if stopped.is_set():
            raise InterruptedError("the run has ended")
        progress()

    with ThreadPoolExecutor(worker_threads()) as pool:
        try:
            jobs = [
                pool.submit(round_block, block, params, step=step) for block in problem.blocks()
            ]
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            for error in filter(None, (job.exception() for job in done)):
                raise error
            return [job.result() for job in jobs]
        except BaseException:
            stopped.set()
            raise


def error_ratio_range(roundings: Iterable[RoundedWeights]) -> tuple[float, float] | None:
    """Return (least, greatest) ratio of a layer's output error to that of nearest rounding."""
    shares = [after / before for before, after in (r.errors for r in roundings) if before > 0]
    return (min(shares), max(shares)) if shares else None
