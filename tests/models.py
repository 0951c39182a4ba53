"""Create, build and run small ONNX models in the tests."""

import html
import json
import re
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser


def _names(names):
    return names.split() if isinstance(names, str) else list(names)


def make_node(op, inputs, outputs, name=None, **attributes):
    """ONNX's make_node; the names of tensors may be one string, "x w b"."""
    return helper.make_node(op, _names(inputs), _names(outputs), name, **attributes)


def parse_nodes(text):
    """Return the nodes of ONNX's text, as "t = Add(x, b) y = Relu(t)", named "op_output"."""
    nodes = list(parser.parse_graph(f"net (x) => (y) {{ {text} }}").node)
    for node in nodes:
        node.ClearField("domain")
        node.name = f"{node.op_type}_{node.output[0]}"
    return nodes


def make_value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def _nodes(nodes):
    for node in parse_nodes(nodes) if isinstance(nodes, str) else nodes:
        if isinstance(node, tuple):  # (op, inputs, outputs, attributes): named "op_output"
            op, inputs, outputs, attributes = (*node, {})[:4]
            name = {"name": f"{op}_{_names(outputs)[0]}"}
            node = make_node(op, inputs, outputs, **name | attributes)
        yield node


def _values(values):
    if isinstance(values, dict):
        return [make_value(name, shape) for name, shape in values.items()]
    return list(values)


def make_model(nodes, inputs, outputs, weights=(), *, opset=13, ir=8, domains=()):
    """Return a ModelProto.

    Args:
        nodes: NodeProtos, tuples (op, inputs, outputs[, attributes]), or `parse_nodes`'s text.
        inputs: name -> shape of float32 inputs, or ValueInfoProtos.
        outputs: The same of the outputs.
        weights: name -> array, whose dtype stays, or TensorProtos.
        opset: The version of ONNX's operators.
        ir: The version of the file's format.
        domains: Further domains, at version 1.
    """
    if isinstance(weights, dict):
        weights = [numpy_helper.from_array(np.asarray(v), name) for name, v in weights.items()]
    graph = helper.make_graph(
        list(_nodes(nodes)), "net", _values(inputs), _values(outputs), list(weights)
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir)


def set_domain(model, op_type, domain="other"):
    """Move the nodes of an operator to another domain."""
    for node in model.graph.node:
        if node.op_type == op_type:
            node.domain = domain


def as_float32(weights):
    return {name: np.asarray(value, np.float32) for name, value in weights.items()}


def rename_tensor(model, old, new):
    """Rename a tensor wherever a node reads or writes it."""
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new


def save_net(model, path) -> Path:
    """Save the model and return its path."""
    onnx.save(model, path)
    return path


def save_fixed_batch(source, path, batch=4) -> Path:
    """Save the model of a file with the batch of its inputs and outputs fixed."""
    model = onnx.load(source)
    for value in (*model.graph.input, *model.graph.output):
        for batch_axis in value.type.tensor_type.shape.dim[:1]:
            batch_axis.dim_value = batch
    return save_net(model, path)


def run_net(model, x, names=None):
    """Run x in ONNX Runtime; return the model's outputs, or the tensors of these names."""
    import onnxruntime as ort

    from deploy.graph.edit import copy_with_outputs

    if names is not None:
        model = copy_with_outputs(model, names)
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    return session.run(names, {session.get_inputs()[0].name: x})


def run_command(*arguments) -> str:
    """Run `calib8 ARGUMENTS`, which must succeed, and return what it prints."""
    from click.testing import CliRunner

    from deploy.cli import cli

    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output or result.exception
    return result.output


def build_net(model, x, folder, *arguments) -> Path:
    """Build the model (net.onnx) for samples x (x.npy); return the folder of the build."""
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "net.onnx")
    np.save(folder / "x.npy", np.asarray(x, np.float32))
    options = ("--images", folder / "x.npy", "--out", folder / "out", "--duration", 0)
    run_command("build", folder / "net.onnx", *options, *arguments)
    return folder / "out"


def read_target(out):
    """Return the entry of the target in the report of a build for one target."""
    (target,) = json.loads((out / "report.json").read_text())["targets"]
    return target


def read_markdown(out) -> str:
    """Return the Markdown report of a build on one line, without its escapes."""
    text = re.sub(r"\\(.)", r"\1", (out / "report.md").read_text())
    return " ".join(html.unescape(text).split())


def built_files(folder) -> dict[str, bytes]:
    """Return the built files; no reports, options, calibration files or files with paths."""
    skipped = (".sh", ".json", ".md", ".html", ".cache", ".npz", "calib8.toml")
    files = (p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(skipped))
    return {p.name: p.read_bytes() for p in files}
