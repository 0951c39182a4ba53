"""Averages that ONNX Runtime's integer kernel counts otherwise, written so that it does not.

With ceil_mode the last windows may reach beyond the padding. count_include_pad counts the padding,
but not what is beyond it; the integer kernel counts that too (ONNX Runtime 1.32; windows of 3 in
steps of 2: 15.5 dB). Without padding there is nothing to count, and what is there is counted
rightly. With some, the average stays float.

Source: ONNX operator AveragePool-11, ceil_mode and count_include_pad.
"""

from __future__ import annotations

import onnx

from deploy.graph.flow import counts_beyond
from deploy.graph.index import attributes


def write_averages(model: onnx.ModelProto) -> None:
    """Let an AveragePool without padding count none, in place."""
    for node in model.graph.node:
        if counts_beyond(node) and not any(attributes(node).get("pads", [])):
            left = [one for one in node.attribute if one.name != "count_include_pad"]
            del node.attribute[:]
            node.attribute.extend(left)
