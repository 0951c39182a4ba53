"""A quant config for a model: the default one, and any other with its open choices settled.

Ranges and defaults are AMCT's; what AMCT would refuse is refused here, before anything is written.
"""

from __future__ import annotations

from dataclasses import replace

from deploy.errors import ConfigError
from deploy.targets.ascend.bits import (
    INT16_LAYERS,
    takes_activations,
    takes_weights,
    told_of_weights,
)
from deploy.targets.ascend.config_keys import GLOBAL
from deploy.targets.ascend.config_types import LayerConfig, QuantConfig
from deploy.targets.ascend.layers import POINTS, Layer, LayerGraph
from deploy.targets.ascend.proto import near
from deploy.targets.ascend.tensor_config import settled_tensors


def default_config(
    graph: LayerGraph, *, batch_num: int = 1, activation_offset: bool = True
) -> QuantConfig:
    """What AMCT's create_quant_config gives for a model without a simplified configuration.

    Raises:
        ConfigError: the model has no layer that can be quantized.
    """
    if not graph.layers:
        raise ConfigError(_no_layers(graph))
    config = QuantConfig(
        batch_num=batch_num,
        activation_offset=activation_offset,
        layers={name: LayerConfig() for name in sorted(graph.layers)},
    )
    return settled(config, graph)


def settled(config: QuantConfig, graph: LayerGraph) -> QuantConfig:
    """The config with every open choice made as AMCT makes it, and checked against the model.

    Raises:
        ConfigError: a layer that the model lacks or that does not take what is asked of it.
    """
    if config.enabled() and not graph.known:
        raise ConfigError(_no_layers(graph))
    clashes = sorted(set(config.layers) & set(GLOBAL))
    if clashes:
        raise ConfigError(
            f"a layer must not be named like a key of the quant config, got {clashes};"
            " rename the node"
        )
    for name in config.skip_fusion_layers:
        if name not in graph.layers and name not in graph.refused:
            raise ConfigError(_unknown_layer(name, graph))
        layer = graph.layers.get(name)
        if layer is not None and layer.kind != "Conv":
            raise ConfigError(
                f"skip_fusion_layers takes Conv layers, got {name!r} of type {layer.kind}"
            )
    layers = {name: _settled(name, entry, config, graph) for name, entry in config.layers.items()}
    return replace(
        config,
        layers=layers,
        tensors=settled_tensors(config, graph),
        told=(*config.told, *told_of_weights(config.layers, layers)),
    )


def _settled(name: str, entry: LayerConfig, config: QuantConfig, graph: LayerGraph) -> LayerConfig:
    if name not in graph.names:
        raise ConfigError(_unknown_layer(name, graph))
    layer = graph.known[name]
    _refuse_combination(entry, layer)
    asymmetric, channel_wise = entry.activation.asymmetric, entry.weight.channel_wise
    if asymmetric is None:
        asymmetric = config.activation_offset and not layer.symmetric_only
    bits = entry.weight.num_bits
    return replace(
        entry,
        activation=replace(entry.activation, asymmetric=asymmetric),
        weight=replace(
            entry.weight,
            num_bits=bits if takes_weights(layer, bits) else 8,
            channel_wise=layer.channel_wise if channel_wise is None else channel_wise,
        ),
    )


def _refuse_combination(entry: LayerConfig, layer: Layer) -> None:
    if entry.weight.channel_wise and not layer.channel_wise:
        raise ConfigError(
            f"channel_wise must be false for layer type {layer.kind}, got true in layer"
            f" {layer.name!r}; leave channel_wise out of common_config and each type gets its own"
        )
    if entry.activation.asymmetric and layer.symmetric_only:
        raise ConfigError(
            f"{_what(layer)} takes symmetric activations only, got asymmetric true in layer"
            f" {layer.name!r}; set it to false"
        )
    if layer.two_activations and entry.activation.num_bits != 8:
        raise ConfigError(
            f"{_what(layer)} takes 8-bit activations, got {entry.activation.num_bits} bits in layer"
            f" {layer.name!r}"
        )
    if not takes_activations(layer, entry.activation.num_bits):
        raise ConfigError(
            f"16-bit activations are for {INT16_LAYERS}, got {layer.kind} in layer {layer.name!r};"
            " give it 8"
        )
    if entry.dmq_balancer_param is not None and not layer.weight:
        raise ConfigError(
            f"dmq_balancer_param does not apply to {_what(layer)}, got it in layer {layer.name!r};"
            " leave it out"
        )
    if entry.weight.wts_algo == "ada_quantize" and not layer.adaptive:
        raise ConfigError(
            "ada_quantize is for 2-D convolutions, transposed ones, Gemms, and MatMuls with a 2-D"
            f" weight, got it in layer {layer.name!r}, {_what(layer)}; give that layer arq_quantize"
        )
    if entry.weight.wts_algo == "ada_quantize" and entry.weight.num_bits != 8:
        raise ConfigError(
            f"ada_quantize rounds weights to 8 bits, got num_bits {entry.weight.num_bits} in layer"
            f" {layer.name!r}; take num_bits out, or give it arq_quantize"
        )


def _what(layer: Layer) -> str:
    """The layer's type, in words."""
    if layer.two_activations:
        return "a MatMul of two activations"
    if layer.stacked:
        return "a MatMul with a 3-D weight"
    return f"a {layer.rank}-D convolution" if layer.kind == "Conv" else layer.kind


def _no_layers(graph: LayerGraph) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in list(graph.refused.items())[:3])
    return "a model needs a layer that Ascend can quantize (Conv, ConvTranspose, Gemm, MatMul," + (
        f" AveragePool), got none{': ' + why if why else ''}"
    )


def _unknown_layer(name: str, graph: LayerGraph) -> str:
    return f"layer {name!r} {why_not(name, graph)}"


def why_not(name: str, graph: LayerGraph) -> str:
    """Why a name stands for no layer; to be read after it."""
    if name in graph.refused:
        return f"cannot be quantized: {graph.refused[name]}; take it out"
    if name in graph.ops:
        op = graph.ops[name]
        inputs = ", but for its inputs, by tensor_quantize" if op in POINTS else ""
        return f"of type {op} cannot be quantized{inputs}; take it out"
    return f"does not exist in the model; {near(name, graph.names)}"
