"""Files of an Ascend deployment, read from disk and told apart by what they hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deploy.errors import ConfigError, ModelError
from deploy.files.reading import read_text
from deploy.graph.index import Graph, attributes
from deploy.targets.ascend.config import settled
from deploy.targets.ascend.config_json import read_config
from deploy.targets.ascend.config_types import QuantConfig
from deploy.targets.ascend.layers import LayerGraph
from deploy.targets.ascend.proto import parse_text
from deploy.targets.ascend.simple_config import read_simple_config

if TYPE_CHECKING:
    import onnx

_WHAT = "a text file of an Ascend deployment"


def read_any_config(path: Path, graph: LayerGraph) -> QuantConfig:
    """Quant config JSON or simplified configuration, by its suffix or first character.

    Raises:
        ConfigError: the file cannot be read or breaks a rule.
    """
    text = read_text(path, what=_WHAT, error=ConfigError)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return settled(read_config(text, str(path)), graph)
    return read_simple_config(text, graph, str(path))


def check_file(path: Path, graph: LayerGraph | None = None) -> str:
    """Check a file of any of the kinds that `calib8 build --target ascend` writes.

    Args:
        path: record, quant config JSON, simplified .cfg, AIPP configuration or deploy model.
        graph: layers of the float model that it is for.

    Returns:
        One sentence on what it holds.

    Raises:
        ConfigError, ModelError: what is wrong with it.
    """
    from deploy.targets.ascend.mapping import is_mapping
    from deploy.targets.ascend.record import check_record, others, read_record

    if path.suffix == ".onnx":
        return check_deploy(path)
    text = read_text(path, what=_WHAT, error=ConfigError)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        if is_mapping(text):
            return "a fusion mapping, by which CANN's accuracy comparison pairs nodes"
        config = read_config(text, str(path))
        config = settled(config, graph) if graph else config
        return f"a sound quant config, {_wanted(config)}"
    key = _first_key(text)
    if key in ("record", "prune_record"):
        records, more = read_record(text, str(path)), others(text, str(path))
        if graph is not None:
            check_record(records, graph)
        beside = f"; beside them, which calib8 does not deploy: {', '.join(more)}" if more else ""
        inputs = sum(one.tensor for one in records.values())
        said = f" and {inputs} inputs of tensor_quantize" if inputs else ""
        return f"a sound record of {len(records) - inputs} layers{said}{beside}"
    if key in ("aipp_op", "multi_shape_op"):
        parse_text("InsertNewOps", text, str(path))
        return "a sound AIPP configuration"
    if graph is not None:
        config = read_simple_config(text, graph, str(path))
        return f"a sound simplified configuration, {_wanted(config)}"
    parse_text("AMCTConfig", text, str(path))
    return "a simplified configuration that parses; --model checks its layers"


def _wanted(config: QuantConfig) -> str:
    """How much it quantizes, and what it asks for in vain."""
    count = _count(len(config.enabled()), len(config.tensors))
    return ". ".join([count, *config.told]).rstrip(".")


def _count(layers: int, inputs: int, grid: str = "int8") -> str:
    """How much is quantized, in words."""
    return f"{layers} layers in {grid}" + (f", {inputs} inputs moved in int8" if inputs else "")


def _first_key(text: str) -> str:
    """The first key of protobuf text, behind comments; "" where there is none."""
    said = (line.partition("#")[0].strip() for line in text.splitlines())
    first = next((line for line in said if line), "")
    found = re.match(r"\w+", first)
    return found[0] if found else ""


def check_deploy(path: Path) -> str:
    """Check a deploy model: every AscendQuant and AscendDequant as ATC reads them.

    Raises:
        ModelError: not an ONNX file, no quantized layer, or one that is not as it must be.
    """
    from deploy.frontends.reader import read_model
    from deploy.targets.ascend.executor import executable, malformed

    model = read_model(path)
    ops = Counter(node.op_type for node in model.graph.node)
    back = ops["AscendDequant"] + ops["AscendAntiQuant"]
    if not ops["AscendQuant"] or not back:
        raise ModelError(
            f"{path} must hold AscendQuant and AscendDequant nodes, got {ops['AscendQuant']} and"
            f" {back}; give the deploy model"
        )
    constants = Graph(model).initializers
    with malformed():
        for node in model.graph.node:
            if node.op_type == "AscendDequant":
                _check_parameter(node, constants)
    executable(model)
    count = _count(ops["AscendDequant"], ops["AscendAntiQuant"], _grids(model))
    return f"a sound deploy model, {count}"


def _grids(model: onnx.ModelProto) -> str:
    """Types that AscendQuant makes, such as int8 or int8 and int16."""
    made = {_made_by(node) for node in model.graph.node if node.op_type == "AscendQuant"}
    return " and ".join(sorted(made, key=lambda name: int(name[3:])))


def _made_by(node: onnx.NodeProto) -> str:
    kind: bytes = attributes(node).get("dst_type", b"INT8")
    return kind.decode().lower()


def _check_parameter(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> None:
    from onnx import numpy_helper

    found = constants.get(node.input[-1])
    if len(node.input) != 2 or found is None or found.data_type != 13:
        raise ModelError(f"{node.name!r} must have a uint64 parameter as its second input")
    values = numpy_helper.to_array(found)
    scales = (values & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise ModelError(f"{node.name!r} must have finite scales above 0, got {scales.min()}")
    if (values >> np.uint64(40)).any():
        raise ModelError(f"{node.name!r} must have offset_w 0, got another")
