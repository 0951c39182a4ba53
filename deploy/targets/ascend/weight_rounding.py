"""AdaRound of the layers that ask for it, one after the other in the model's order, as in AMCT.

::

    float model ----------------------> outputs of layer k ----.
    the same, layers 1 .. k-1 rounded -> inputs of layer k ----+--> weights of layer k rounded
                                                                    --> k + 1 ...

Each layer is two passes over the first samples, up to 64 of them, of which places are kept: at most
4096 and 32 MiB, of one layer at a time. What is found is an observation like any other, so a store
keeps it. The search itself is `calibrators.amct.adaround`.

Left out: AMCT looks through GELU too where it stands behind a layer; here the layer's own output
counts there, as it does before everything that AMCT knows no activation for.

One layer's AdaRound, from what was observed of it to integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.adaround import (
    LEAKY,
    RELU,
    RELU6,
    SIGMOID,
    TANH,
    Activation,
    AdaParams,
    AdaProblem,
    joined,
    nearest,
    output_error,
    searched,
)
from calibrators.amct.arq import kl_scale
from calibrators.amct.recorders import Rounded, RoundedOf, Targets, TargetsOf
from deploy.calibration.observation import Observation, Observed, Variant
from deploy.errors import ConfigError
from deploy.graph.bounds import window_of
from deploy.graph.index import Graph, attributes
from deploy.machine import default_threads
from deploy.targets.ascend.config_keys import QuantConfig, Weight
from deploy.targets.ascend.layers import Layer
from deploy.targets.ascend.quant_layer import array_of, rows_of
from deploy.terminal import Step, phase

if TYPE_CHECKING:
    import onnx


MOST_SAMPLES = 64
MOST_PLACES = 4096  # of a layer
_LEAST, _BYTES = 256, 32 * 2**20  # what their inputs may take, but for so many

Float32Array = NDArray[np.float32]
# (what was observed, layers that are rounded, last tensor) -> model, AdaRound's others in float
Prepared = Callable[[Observed, Collection[str], str], "onnx.ModelProto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaStep:
    """One layer that AdaRound rounds.

    Attributes:
        layer: it.
        params: of the search.
        bias: float32 [G, M], zeros without.
        activation: behind it.
        targets: what is observed of the float model.
        inputs: what is observed behind the rounded layers; a `Rounded`.
    """

    layer: Layer
    params: AdaParams
    bias: Float32Array
    activation: Activation
    targets: Observation
    inputs: Observation


def adaptive(config: QuantConfig, name: str) -> bool:
    """Whether a layer's weights are rounded by AdaRound."""
    return name in config.layers and config.layers[name].weight.wts_algo == "ada_quantize"


def algorithms(config: QuantConfig) -> str:
    """The algorithms that give the weights' codes, in words."""
    there = {adaptive(config, name) for name in config.enabled()} or {False}
    return " and ".join({False: "ARQ", True: "AdaRound"}[one] for one in sorted(there))


def open_layers(model: onnx.ModelProto) -> Iterator[str]:
    """ConvTransposes whose pads are not told, which torch, and so AMCT, does not have."""
    for node in model.graph.node:
        if node.op_type == "ConvTranspose":
            given = attributes(node)
            if given.get("auto_pad", b"NOTSET") != b"NOTSET" or "output_shape" in given:
                yield node.name


def refuse_open(model: onnx.ModelProto, layers: Mapping[str, Layer], config: QuantConfig) -> None:
    """Refuse a layer of `open_layers`.

    Raises:
        ConfigError: there is one that AdaRound is to round.
    """
    for name in open_layers(model):
        if name in layers and adaptive(config, name):
            raise ConfigError(
                "ada_quantize is for a ConvTranspose with pads, got auto_pad or output_shape in"
                f" layer {name!r}; give that layer arq_quantize"
            )


def steps_of(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    *,
    key: str,
    samples: int,
    needs: tuple[Observation, ...],
    prepared: Prepared,
) -> dict[str, AdaStep]:
    """Layer that AdaRound rounds -> what is observed for it, in the model's order.

    Args:
        model: float model, nodes named.
        layers: those to quantize, in the model's order.
        config: settled.
        key: names all that the models depend on.
        samples: that the configuration uses.
        needs: what the inputs are balanced by.
        prepared: makes a model.
    """
    index = Graph(model)
    nodes = {node.name: node for node in model.graph.node}
    found: dict[str, AdaStep] = {}
    for name, layer in layers.items():
        if adaptive(config, name):
            balanced = any(need.whose == name for need in needs)
            earlier = tuple(found.values())
            found[name] = _step(
                layer, nodes[name], index, config,
                key=key, samples=samples, needs=needs, balanced=balanced,
                earlier=earlier, prepared=prepared,
            )  # fmt: skip
    return found


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
    rows = rows_of(array_of(index, layer.weight), layer)
    weight = config.layers[layer.name].weight
    shape = (layer.group, rows.shape[0] // layer.group, prod(rows.shape[1:]))
    samples = min(samples, MOST_SAMPLES)
    total = min(max(_BYTES // (4 * shape[0] * shape[2]), _LEAST), MOST_PLACES)
    most = -(-total // samples)
    names = tuple(one.layer.name for one in earlier)
    before = (*needs, *(one.inputs for one in earlier))
    end = str(node.output[0])

    def variant(words: str, rounded: Collection[str], needs: tuple[Observation, ...]) -> Variant:
        def make(seen: Observed) -> onnx.ModelProto:
            return prepared(seen, rounded, end)

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
        turned = layer.kind == "ConvTranspose"
        window = window_of(attributes(node), rows.shape[2:], transposed=turned)
    inputs = Observation(
        variant("rounded", names, (*before, targets)),
        f"{layer.name}.mul.output0" if balanced else layer.input,
        RoundedOf(
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
        bias = array_of(index, layer.bias).reshape(-1)
    return AdaStep(
        layer=layer,
        params=_params(weight),
        bias=bias.reshape(shape[:2]),
        activation=_activation(index, end, shape),
        targets=targets,
        inputs=inputs,
    )


def _params(weight: Weight) -> AdaParams:
    return AdaParams(
        num_iteration=weight.num_iteration,
        reg_param=weight.reg_param,
        beta_range=weight.beta_range,
        warm_start=weight.warm_start,
    )


def _activation(index: Graph, tensor: str, shape: tuple[int, int, int]) -> Activation:
    """The activation that alone reads a tensor, of those that AMCT looks through."""
    node = index.only_reader(tensor)
    if node is None or node.input[0] != tensor:
        return Activation()
    plain = {"Relu": RELU, "Sigmoid": SIGMOID, "Tanh": TANH}
    if node.op_type in plain:
        return Activation(plain[node.op_type])
    if node.op_type == "LeakyRelu":
        alpha = attributes(node).get("alpha", 0.01)
        return Activation(LEAKY, np.full((1, 1), alpha, np.float32))
    if node.op_type == "PRelu" and node.input[1] in index.constants:
        slope = array_of(index, node.input[1])
        if slope.size == 1:
            return Activation(LEAKY, slope.reshape(1, 1))
        if slope.size == shape[0] * shape[1]:
            return Activation(LEAKY, slope.reshape(shape[:2]))
    if node.op_type == "Clip" and [index.number(end) for end in node.input[1:]] == [0.0, 6.0]:
        return Activation(RELU6)
    return Activation()


def settle(step: AdaStep, weight: Float32Array, observed: Observed, *, place: str) -> Rounded:
    """What a layer is rounded to, searched now unless it is known.

    Args:
        step: the layer.
        weight: its weight, balanced, output channels first.
        observed: holds what the step wants.
        place: of the step among the others, in words.

    Raises:
        CalibrationError: weights or outputs that are too large.
    """
    found = observed.of(step.inputs)
    assert isinstance(found, Rounded)
    if found.integers is None:
        targets = observed.of(step.targets)
        assert isinstance(targets, Targets)
        statistic = step.inputs.statistic
        assert isinstance(statistic, RoundedOf)
        scale = kl_scale(weight, channel_wise=statistic.scales > 1)
        problem = _problem(step, weight.reshape(statistic.shape), scale, found, targets)
        with phase(f"AdaRound {place}", _steps(problem, step.params), "steps") as made:
            integers = joined(problem, _beside(problem, step.params, made))
        errors = output_error(problem, nearest(problem)), output_error(problem, integers)
        found.keep(integers, scale, errors)
    return found


def _problem(
    step: AdaStep, weight: Float32Array, scale: Float32Array, found: Rounded, targets: Targets
) -> AdaProblem:
    groups, rows, _ = weight.shape
    wide = np.broadcast_to(scale, groups * rows) if scale.size == 1 else scale
    outputs = targets.taken()
    return AdaProblem(
        weight=weight,
        scale=np.asarray(wide, np.float32).reshape(groups, rows, 1),
        inputs=found.taken(),
        targets=outputs.reshape(len(outputs), groups, rows),
        bias=step.bias,
        activation=step.activation,
        share=targets.share,
    )


def _steps(problem: AdaProblem, params: AdaParams) -> int:
    return len(problem.blocks()) * params.num_iteration


def _beside(problem: AdaProblem, params: AdaParams, made: Step) -> list[NDArray[np.int8]]:
    """The blocks of a problem, searched in threads that end where the run does."""
    over = Event()

    def step() -> None:
        if over.is_set():
            raise InterruptedError("the run has ended")
        made()

    with ThreadPoolExecutor(default_threads()) as pool:
        try:
            jobs = [pool.submit(searched, part, params, step=step) for part in problem.blocks()]
            ended, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            for error in filter(None, (job.exception() for job in ended)):
                raise error
            return [job.result() for job in jobs]
        except BaseException:
            over.set()
            raise


def left(roundings: Iterable[Rounded]) -> tuple[float, float] | None:
    """(least, greatest) share of the nearest codes' error that AdaRound leaves to a layer."""
    shares = [after / before for before, after in (r.errors for r in roundings) if before > 0]
    return (min(shares), max(shares)) if shares else None
