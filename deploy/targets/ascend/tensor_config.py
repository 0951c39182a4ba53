"""tensor_quantize: inputs of Add and MaxPool that a configuration wants in int8, checked.

AMCT's open source has how it is written (a list in the quant config JSON, before the layers), its
documentation that it takes MaxPool and Add. The sentences are ours.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from deploy.errors import ConfigError
from deploy.targets.ascend.config_types import QuantConfig, TensorConfig
from deploy.targets.ascend.layers import POINTS, LayerGraph
from deploy.targets.ascend.proto import near


def settled_tensors(config: QuantConfig, graph: LayerGraph) -> tuple[TensorConfig, ...]:
    """The inputs with `asymmetric` chosen, by activation_offset where nothing else says it.

    Raises:
        ConfigError: an input that the model lacks or that cannot be quantized by itself.
    """
    twice = [key for key, times in Counter(one.key for one in config.tensors).items() if times > 1]
    if twice:
        raise ConfigError(f"tensor_quantize must name each input once, got {twice[0]!r} again")
    return tuple(_settled(one, config, graph) for one in config.tensors)


def _settled(one: TensorConfig, config: QuantConfig, graph: LayerGraph) -> TensorConfig:
    refuse_unknown(one.layer_name, one.input_index, graph)
    act = one.activation
    if act.num_bits != 8:
        raise ConfigError(
            f"tensor_quantize is 8-bit, got {act.num_bits} bits for {one.layer_name!r}; leave the"
            " type out"
        )
    if act.asymmetric is None:
        act = replace(act, asymmetric=config.activation_offset)
    return replace(one, activation=act)


def refuse_unknown(name: str, index: int, graph: LayerGraph) -> None:
    """Refuse an input that cannot be quantized by itself.

    Raises:
        ConfigError: no such node or input, or one of another type or of no use.
    """
    op, key = graph.ops.get(name), f"{name}:{index}"
    if op is None:
        known = [node for node, kind in graph.ops.items() if kind in POINTS]
        raise ConfigError(
            f"node {name!r} of tensor_quantize does not exist in the model; {near(name, known)}"
        )
    if op not in POINTS:
        raise ConfigError(
            f"tensor_quantize takes inputs of {' and '.join(POINTS)}, got {name!r} of type {op}"
        )
    if key in graph.unfit:
        raise ConfigError(
            f"input {index} of {name!r} cannot be quantized: {graph.unfit[key]}; take it out of"
            " tensor_quantize"
        )
    if key not in graph.offered:
        raise ConfigError(
            f"input_index of {name!r}, of type {op}, must be below {POINTS[op]}, got {index}"
        )
    if key in graph.ops:
        raise ConfigError(
            f"a record cannot tell input {index} of {name!r} from the node {key!r}; rename one"
        )
