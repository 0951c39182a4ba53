"""Averages that ONNX Runtime's integer kernel counts otherwise, written so that it does not.

With ceil_mode the last windows may reach beyond the padding. count_include_pad counts the padding,
but not what is beyond it; the integer kernel counts that too (ONNX Runtime 1.32; windows of 3 in
steps of 2: 15.5 dB). Without padding there is nothing to count, and what is there is counted
rightly. With some, a Sum of one tensor keeps pairs and average apart, which stays float::

    DQ -> AveragePool -> Q          DQ -> Sum -> AveragePool -> Q

Source: ONNX operator AveragePool-11, ceil_mode and count_include_pad.
"""

from __future__ import annotations

import onnx
from onnx import helper

from deploy.graph.edit import replace_nodes
from deploy.graph.flow import counts_beyond
from deploy.graph.index import attributes


def write_averages(model: onnx.ModelProto) -> None:
    """Let no AveragePool count what is beyond its padding, in place."""
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if counts_beyond(node):
            if any(attributes(node).get("pads", [])):
                nodes.append(_apart(node))
            else:
                left = [one for one in node.attribute if one.name != "count_include_pad"]
                del node.attribute[:]
                node.attribute.extend(left)
        nodes.append(node)
    if len(nodes) > len(model.graph.node):
        replace_nodes(model.graph, nodes)


def _apart(node: onnx.NodeProto) -> onnx.NodeProto:
    """What an AveragePool reads from now on: the same values, not from a DequantizeLinear."""
    source, apart = node.input[0], f"{node.output[0]}/apart"
    node.input[0] = apart
    return helper.make_node("Sum", [source], [apart], name=f"{node.name}/apart")
