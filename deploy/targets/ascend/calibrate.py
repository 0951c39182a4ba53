"""The calibration pass: weights by ARQ, channels by DMQ, activations by IFMR or HFMG.

As in AMCT the activations are those of the float model with fake-quantized weights (those of
ConvTranspose stay as they are), and each algorithm sees `batch_num` batches::

    float model -> DMQ factors (first batch) -> weights: ARQ -> batches -> IFMR, HFMG -> record
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.arq import arq, arq_fake_quantize
from calibrators.amct.dmq import balance_factors, channel_max, weight_channel_max
from deploy.errors import ConfigError, FeedError
from deploy.graph.index import Graph
from deploy.targets.ascend.config_types import QuantConfig
from deploy.targets.ascend.layers import Layer, LayerGraph
from deploy.targets.ascend.observers import Guard, Plan
from deploy.targets.ascend.record import LayerRecord
from deploy.targets.ascend.runner import Batch, Runner

if TYPE_CHECKING:
    import onnx

EXACT_BYTES = 1 << 30  # exact IFMR keeps every activation; beyond this it streams

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What the pass found.

    Attributes:
        records: layer name -> scales, in the model's order.
        failed: layer name -> why it stays in float.
        kept_bytes: activations that exact IFMR held.
        streamed: layers whose IFMR ran on histograms, because that would not fit.
        batches: batches seen.
        dead: layers whose input was zero throughout; their scale is 1 and means nothing.
    """

    records: dict[str, LayerRecord]
    failed: dict[str, str]
    kept_bytes: int
    streamed: tuple[str, ...]
    batches: int
    dead: tuple[str, ...] = ()


def calibrate(
    model: onnx.ModelProto,
    graph: LayerGraph,
    batches: Iterable[Batch],
    config: QuantConfig,
    *,
    exact_bytes: int = EXACT_BYTES,
    strict: bool = True,
    say: Callable[[str], None] = lambda sentence: None,
) -> Calibrated:
    """Calibrate every enabled layer of a settled config.

    Args:
        model: float model, nodes named.
        graph: its layers.
        batches: input name -> array, one dict a batch; `config.batch_num` of them are used.
        config: from `deploy.targets.ascend.config.settled`.
        exact_bytes: cap on the activations that exact IFMR keeps.
        strict: a layer without sound scales is an error, else it stays in float.
        say: told how many bytes will be kept, before they are.

    Raises:
        CalibrationError: activations or weights with NaN or Inf, or scales that are not finite.
        ConfigError: an algorithm that calib8 does not compute.
        FeedError: fewer batches than batch_num.
    """
    layers = {n: graph.layers[n] for n in graph.layers if n in config.enabled()}
    _refuse_unsupported(layers, config)
    stream = iter(islice(batches, config.batch_num))
    first = next(stream, None)
    if first is None:
        raise FeedError("the calibration needs at least one batch, got none")
    failed: dict[str, str] = {}
    guard = Guard(failed, strict)
    factors = _balance(model, layers, config, first, guard)
    weights = _weights(model, layers, config, factors, guard)
    layers = {name: layer for name, layer in layers.items() if name not in failed}
    tensors = {n: _observed(layer, factors) for n, layer in layers.items()}
    prepared = prepared_model(model, layers, config, weights, factors)
    session = Runner(prepared, sorted(set(tensors.values())))
    values = session.run(first)
    plan = Plan.of(layers, config, tensors, values, exact_bytes)
    say(plan.sentence(config.batch_num))
    seen = 1
    plan.observe(values, guard)
    for batch in stream:
        plan.observe(session.run(batch), guard)
        seen += 1
    if seen < config.batch_num:
        raise FeedError(
            f"the calibration needs batch_num batches, {config.batch_num}, got {seen};"
            " give more data or lower batch_num"
        )
    records: dict[str, LayerRecord] = {}
    for name in sorted(layers, key=lambda name: name not in factors):  # AMCT's order, stable
        record = guard.call(name, partial(plan.record, name, weights[name], factors))
        if record is not None:
            records[name] = record
    dead = tuple(name for name in records if plan.keys[name] not in plan.alive)
    return Calibrated(records, failed, plan.bytes * seen, plan.streamed, seen, dead)


def prepared_model(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    weights: Mapping[str, tuple[NDArray[np.float32], NDArray[np.int32]]],
    factors: Mapping[str, NDArray[np.float32]],
) -> onnx.ModelProto:
    """The float model to observe: weights fake-quantized, inputs divided by DMQ factors."""
    from onnx import numpy_helper

    from deploy.targets.ascend.quant_layer import array_of, balanced_weight, rows_of
    from deploy.targets.ascend.rewrite import rewrite_inputs

    index = Graph(model)
    arrays = {}
    for name, layer in layers.items():
        if not layer.weight:
            continue
        weight = balanced_weight(array_of(index, layer.weight), layer, factors.get(name, _NONE))
        if layer.kind != "ConvTranspose":  # AMCT leaves it, measured on its modified model
            rows = rows_of(weight, layer)
            bits = config.layers[name].weight.num_bits
            fake = arq_fake_quantize(rows, *weights[name], bits=bits)
            turned = layer.kind == "MatMul" or (layer.kind == "Gemm" and not layer.trans_b)
            weight = np.asarray(fake.T if turned else fake, np.float32)
        arrays[layer.weight] = numpy_helper.from_array(np.ascontiguousarray(weight), layer.weight)
    inverse = {n: np.float32(1) / f for n, f in factors.items() if n in layers}
    return rewrite_inputs(model, layers, arrays, inverse)


_NONE = np.zeros(0, np.float32)


def _observed(layer: Layer, factors: Mapping[str, Array]) -> str:
    return f"{layer.name}.mul.output0" if layer.name in factors else layer.input


def _refuse_unsupported(layers: Mapping[str, Layer], config: QuantConfig) -> None:
    for name in layers:
        entry = config.layers[name]
        if entry.weight.wts_algo != "arq_quantize":
            raise ConfigError(
                f"calib8 computes arq_quantize, got ada_quantize in layer {name!r}; AdaRound needs"
                " AMCT itself"
            )
        if entry.activation.num_bits != 8 or entry.weight.num_bits == 4:
            raise ConfigError(
                "calib8 deploys 8-bit activations and 6 to 8-bit weights, got"
                f" {entry.activation.num_bits} and {entry.weight.num_bits} bits in layer {name!r}"
            )
    if config.fakequant_precision_mode:
        raise ConfigError(
            "fakequant_precision_mode FORCE_FP16_QUANT is for Nano chips, whose files calib8 does"
            " not write; take it out"
        )


def _balance(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    first: Batch,
    guard: Guard,
) -> dict[str, NDArray[np.float32]]:
    """DMQ factors from the first batch of the float model, as AMCT's preprocess pass has it."""
    from deploy.targets.ascend.quant_layer import array_of

    wanted = {n: s for n in layers if (s := config.layers[n].dmq_balancer_param) is not None}
    if not wanted:
        return {}
    values = Runner(model, sorted({layers[n].input for n in wanted})).run(first)
    index = Graph(model)
    factors = {}
    for name, strength in wanted.items():
        layer = layers[name]

        def find(layer: Layer = layer, strength: float = strength) -> NDArray[np.float32]:
            axis = 1 if layer.rank else -1
            act = channel_max(values[layer.input], axis)
            weight = _weight_max(array_of(index, layer.weight), layer)
            return balance_factors(act, weight, strength=strength)

        found = guard.call(name, find)
        if found is not None:
            factors[name] = found
    return factors


def _weight_max(weight: NDArray[np.float32], layer: Layer) -> NDArray[np.float32]:
    if layer.kind == "Conv":
        return weight_channel_max(weight, layer.group)
    return channel_max(weight, 1 if layer.trans_b else 0)


def _weights(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    factors: Mapping[str, NDArray[np.float32]],
    guard: Guard,
) -> dict[str, tuple[NDArray[np.float32], NDArray[np.int32]]]:
    """Weight (scale, offset) by layer; a pool has scale 1, as AMCT records it."""
    from deploy.targets.ascend.quant_layer import array_of, balanced_weight, rows_of

    index = Graph(model)
    found = {}
    for name, layer in layers.items():
        if not layer.weight:
            found[name] = (np.ones(1, np.float32), np.zeros(1, np.int32))
            continue
        wanted = config.layers[name].weight

        def search(layer: Layer = layer, wanted: Any = wanted) -> Any:
            weight = array_of(index, layer.weight)
            rows = rows_of(balanced_weight(weight, layer, factors.get(layer.name, _NONE)), layer)
            return arq(rows, bits=wanted.num_bits, channel_wise=bool(wanted.channel_wise))

        result = guard.call(name, search)
        if result is not None:
            found[name] = result
    return found
