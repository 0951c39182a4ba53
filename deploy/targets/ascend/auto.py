"""Automatic accuracy: leave the worst layers in float until the user's budget holds.

::

    similarity  0.91  0.97 | 0.985  0.99  0.999      worst first; a prefix goes back to float,
                float      | int8                    the shortest that holds, by binary search

Layers are ranked one by one, each on its own float input, so no error of another layer counts:
0.5 + 0.5 * cosine of float and fake-quantized output, averaged over the samples. Files and their
layout are AMCT's. Source: hicann/amct, common/auto_calibration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ConfigError
from deploy.graph.edit import copied
from deploy.graph.index import Graph
from deploy.metrics.output_errors import cosine
from deploy.targets.ascend.config_json import write_config
from deploy.targets.ascend.config_types import QuantConfig
from deploy.targets.ascend.record import LayerRecord

if TYPE_CHECKING:
    import onnx

    from deploy.targets.ascend.auto_layers import Biases
    from deploy.targets.ascend.quant_layer import QuantLayer

RANKING = "accuracy_based_auto_calibration_ranking_information.json"
HISTORY = "accuracy_based_auto_calibration_record.json"
FINAL = "accuracy_based_auto_calibration_final_config.json"

Judge = Callable[[Mapping[str, LayerRecord]], tuple[bool, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What the search found.

    Attributes:
        ranking: (layer, similarity), worst first.
        history: one entry a trial: the layers in float, whether the budget held, the loss.
        records: the layers that stay in int8; None where only float holds the budget.
        config: the quant config with the others disabled.
        biases: layer in int8 -> its bias where it was corrected.
        notes: sentences on what that costs and where it is kept.
    """

    ranking: tuple[tuple[str, float], ...]
    history: tuple[dict[str, Any], ...]
    records: dict[str, LayerRecord] | None
    config: QuantConfig
    biases: Biases = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def files(self) -> dict[str, str]:
        """File name -> text, as AMCT writes them."""
        return {
            RANKING: json.dumps([list(entry) for entry in self.ranking], indent=4),
            HISTORY: json.dumps(list(self.history), indent=4),
            FINAL: write_config(self.config),
        }


def search(
    records: Mapping[str, LayerRecord],
    ranking: Iterable[tuple[str, float]],
    config: QuantConfig,
    judge: Judge,
) -> Searched:
    """Roll the worst layers back to float, as few as the budget allows.

    Args:
        records: every calibrated layer.
        ranking: from `rank`, worst first.
        config: the config that gave the records.
        judge: records of the int8 layers -> (the budget holds, loss against float).

    Raises:
        ConfigError: the budget does not hold for the float model against itself.
    """
    order = tuple(ranking)
    if not judge({})[0]:
        raise ConfigError(
            "the accuracy budget must hold for the float model against itself, and does not;"
            " widen the budget"
        )
    history: list[dict[str, Any]] = []

    def holds(count: int) -> bool:
        back = {name for name, _ in order[:count]}
        kept = {name: record for name, record in records.items() if name not in back}
        good, loss = judge(kept)
        rolled = {name: name in back for name, _ in order}
        history.append({"roll_back_config": rolled, "metric_eval": [bool(good), float(loss)]})
        return good

    best = 0 if holds(0) else _shortest(len(order), holds)
    back = {name for name, _ in order[:best]}
    left = {name: record for name, record in records.items() if name not in back}
    layers = {
        name: replace(layer, quant_enable=False) if name in back else layer
        for name, layer in config.layers.items()
    }
    tensors = tuple(one for one in config.tensors if one.key not in back)
    return Searched(
        ranking=order,
        history=tuple(history),
        records=left or None,
        config=replace(config, layers=layers, tensors=tensors),
    )


def _shortest(size: int, holds: Callable[[int], bool]) -> int:
    """Shortest prefix that holds; `size` (everything in float) holds by definition."""
    left, right, best = 0, size - 1, size
    while left <= right:
        middle = (left + right) // 2
        if middle + 1 < size and not holds(middle + 1):
            left = middle + 1
        else:
            best, right = middle + 1, middle - 1
    return best


def rank(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    samples: Iterable[Mapping[str, NDArray[Any]]],
) -> list[tuple[str, float]]:
    """(layer, similarity in [0, 1]) of every layer, worst first; ties in the model's order."""
    from deploy.calibration.taps import Tap

    outputs = {name: q.layer.output for name, q in layers.items()}
    names = [*outputs.values(), *(f"{name}.isolated" for name in layers)]
    tap = Tap(isolated_model(model, layers), sorted(set(names)), threads=None)
    scores: dict[str, list[float]] = {name: [] for name in layers}
    for sample in samples:
        values = dict(tap.run(sample))
        for name, output in outputs.items():
            scores[name].append(similarity(values[output], values[f"{name}.isolated"]))
    means = {name: float(np.mean(found)) for name, found in scores.items()}
    return sorted(means.items(), key=lambda entry: entry[1])


def similarity(original: NDArray[Any], fake: NDArray[Any]) -> float:
    """0.5 + 0.5 * cosine; 1 if the original is all zero, 0 if only the other is."""
    if not original.any():
        return 1.0
    return 0.5 + 0.5 * cosine(original, fake) if fake.any() else 0.0


def isolated_model(model: onnx.ModelProto, layers: Mapping[str, QuantLayer]) -> onnx.ModelProto:
    """The float model with, beside each layer, its fake-quantized twin on the same float input.

    The twin's output is '<layer>.isolated'.
    """
    from deploy.targets.ascend.fake_quant import fake_quant_model

    out = copied(model)
    for name, q in layers.items():
        twin = _alone(model, q)
        quantized = fake_quant_model(twin, {name: q})
        for tensor in quantized.graph.initializer:
            tensor.name = f"{name}.twin.{tensor.name}"
        _prefix(quantized.graph, name, q)
        out.graph.node.extend(quantized.graph.node)
        out.graph.initializer.extend(quantized.graph.initializer)
    return out


def _alone(model: onnx.ModelProto, q: QuantLayer) -> onnx.ModelProto:
    """A model of one layer only, with the Add of a MatMul's bias."""
    from onnx import ValueInfoProto

    wanted = {q.layer.node, q.layer.bias_add} - {""}
    index = Graph(model)
    out = type(model)()
    out.opset_import.extend(model.opset_import)
    out.ir_version = model.ir_version
    out.graph.node.extend(n for n in model.graph.node if n.name in wanted)
    read = {name for node in out.graph.node for name in node.input}
    for name in sorted(read & set(index.constants)):
        tensor = out.graph.initializer.add()
        tensor.CopyFrom(index.constants[name])
        tensor.name = name
    activations = dict.fromkeys((q.layer.input, *q.layer.others))
    out.graph.input.extend(ValueInfoProto(name=tensor) for tensor in activations)
    out.graph.output.append(ValueInfoProto(name=q.layer.output))
    return out


def _prefix(graph: onnx.GraphProto, name: str, q: QuantLayer) -> None:
    """Give every tensor and node of a twin names of its own, its ends excepted."""
    read = (q.layer.input, *q.layer.others)
    ends = {**{one: one for one in read}, q.layer.output: f"{name}.isolated", "": ""}
    for node in graph.node:
        node.name = f"{name}.twin.{node.name}"
        for names in (node.input, node.output):
            for place, tensor in enumerate(names):
                names[place] = ends.get(tensor, f"{name}.twin.{tensor}")
