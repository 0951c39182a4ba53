"""Absorption of high biases: what a Relu never cuts off moves into the next layer's bias.

A channel whose values all lie far above zero spends the int8 steps of its whole tensor on nothing::

    relu(x) = relu(x - c) + c   for x >= c       b1 - c;  b2 + W2 c

with c = max(0, mean - 3 deviations) of the channel on a few samples, so that a value in several
hundred is cut off. Where the next convolution pads with zeros its border would change: such pairs
stay as they are.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.1.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from calibrators.equalization import absorbable
from deploy.feed.parallel import Sample
from deploy.graph.index import Graph
from deploy.repairs.links import Link, links_of
from deploy.tuning.repairs.repair_layers import Layer, with_biases
from deploy.tuning.repairs.sample_runs import channel_moments

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray


def absorb(
    model: onnx.ModelProto, samples: Sequence[Sample], threads: int
) -> Iterator[onnx.ModelProto]:
    """The model with high biases absorbed; none where no channel has one."""
    links = [link for link in links_of(model) if _takes(link)]
    axes = {link.first.output: link.first.out_axis for link in links}
    if not axes:
        return
    moments = channel_moments(model, axes, samples, threads=threads)
    graph, found = Graph(model), dict[str, "tuple[Layer, NDArray[np.float64]]"]()
    for link in links:
        part = absorbable(*moments[link.first.output])
        if part.any():
            _move(found, graph, link, part)
    if found:
        yield with_biases(model, found.values())


def _move(
    found: dict[str, tuple[Layer, NDArray[np.float64]]],
    graph: Graph,
    link: Link,
    part: NDArray[np.float64],
) -> None:
    """Take [C] off the first layer's bias and put what it made into the second's."""
    first, second = link.first, link.second
    _, bias = found.get(first.name, (first, first.bias_of(graph)))
    found[first.name] = first, bias - part
    weight = second.by_channel.sum(axis=3, dtype="float64")  # [groups, C_out, C_in]
    groups, _, into = weight.shape
    made = (weight * part.reshape(groups, 1, into)).sum(axis=2).reshape(-1)
    _, bias = found.get(second.name, (second, second.bias_of(graph)))
    found[second.name] = second, bias + made


def _takes(link: Link) -> bool:
    """Relu alone between two layers that can hold a bias, the second without padding."""
    given = link.second.given
    padded = any(given.get("pads", ())) or given.get("auto_pad", b"NOTSET") not in (
        b"NOTSET",
        b"VALID",
    )
    held = all(layer.kind != "MatMul" or layer.add for layer in (link.first, link.second))
    turned = link.second.kind == "ConvTranspose"  # its border sums fewer taps
    return link.between == ("Relu",) and held and not padded and not turned
