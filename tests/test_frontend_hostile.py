"""Broken, foreign and unfit models: one sentence each, never a traceback, nothing on stderr."""

import gzip
import os
import pickle
import random
import zipfile

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from onnx import TensorProto, helper, numpy_helper

from deploy.errors import ModelError
from deploy.frontends import load

F32 = TensorProto.FLOAT


def value(name, *shape, dtype=F32):
    return helper.make_tensor_value_info(name, dtype, list(shape))


def constant(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def model_of(nodes, weights=(), *, inputs=None, outputs=None, opset=13, domains=(), ir=8):
    inputs = [value("x", "n", 3, 8, 8)] if inputs is None else inputs
    outputs = [helper.make_tensor_value_info("y", F32, None)] if outputs is None else outputs
    graph = helper.make_graph(list(nodes), "g", inputs, outputs, list(weights))
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir)


def small():
    """A model with a bit of everything that the cleaning touches."""
    rng = np.random.default_rng(0)
    make = helper.make_node
    nodes = [
        make("Constant", [], ["k"], value=constant("v", np.array([0, 1, 0, 1]))),
        make("Concat", ["k", "k"], ["pads"], axis=0),
        make("Pad", ["x", "pads"], ["padded"]),
        make("Conv", ["padded", "w"], ["c"], kernel_shape=[3, 3]),
        make("BatchNormalization", ["c", "gamma", "beta", "mean", "var"], ["b"]),
        make("Identity", ["b"], ["i"]),
        make("GlobalAveragePool", ["i"], ["pooled"]),
        make("Flatten", ["pooled"], ["flat"]),
        make("Gemm", ["flat", "fc", "fc_bias"], ["y"], transB=1),
    ]
    shapes = {"w": (4, 3, 3, 3), "fc": (5, 4), "fc_bias": (5,), "gamma": 4, "beta": 4, "mean": 4}
    weights = [constant(n, rng.normal(size=s).astype(np.float32)) for n, s in shapes.items()]
    return model_of(nodes, [*weights, constant("var", np.ones(4, np.float32))])


def relu(*, inputs=None, outputs=None, weights=(), **options):
    return model_of(
        [helper.make_node("Relu", ["x"], ["y"])], weights, inputs=inputs, outputs=outputs, **options
    )


def conv(weight):
    return model_of([helper.make_node("Conv", ["x", "w"], ["y"])], [constant("w", weight)])


# ---------------------------------------------------------------- files that are no ONNX model

WHOLE = small().SerializeToString()
FILES = {
    "empty": (b"", "empty file"),
    "text": (b"hello, this is a text file\n" * 40, "text file"),
    "pickle": (pickle.dumps({"a": list(range(99))}), "pickle"),
    "gzip": (gzip.compress(WHOLE), "gzip"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "ort": (b"\x00\x01\x00\x00ORTM" + bytes(64), "ORT format"),
    "tflite": (b"\x00\x01\x00\x00TFL3" + bytes(64), "TensorFlow Lite"),
    "half": (WHOLE[: len(WHOLE) // 2], "truncated"),
    "zeros": (bytes(512), "parse"),
    "head only": (WHOLE[:2], "without graph"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_onnx_model_is_called_what_it_is(tmp_path, kind):
    data, words = FILES[kind]
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_readable_file(tmp_path):
    with pytest.raises(ModelError, match="nothing there"):
        load(tmp_path / "missing.onnx")
    with pytest.raises(ModelError, match="folder"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(ModelError, match="device or pipe"):
        load(tmp_path / "pipe.onnx")


def test_a_torch_checkpoint_is_called_one_whatever_its_suffix(tmp_path):
    path = tmp_path / "model.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    with pytest.raises(ModelError, match=r"torch\.save"):
        load(path)


# ---------------------------------------------------------------- models that are not for us


def quantized(op_type, domain=""):
    node = helper.make_node(op_type, ["x"], ["y"], name="q", domain=domain)
    return model_of([node], domains=[domain] if domain else [])


def with_function():
    body = helper.make_function(
        "own", "Inner", ["a"], ["b"], [helper.make_node("Twist", ["a"], ["b"], domain="odd")],
        [helper.make_opsetid("", 13), helper.make_opsetid("odd", 1)],
    )  # fmt: skip
    model = model_of(
        [helper.make_node("Inner", ["x"], ["y"], domain="own")], domains=["own", "odd"]
    )
    model.functions.append(body)
    return model


NAN = np.full((4, 3, 1, 1), np.nan, np.float32)
BRAIN = helper.make_tensor("w", TensorProto.BFLOAT16, [4, 3, 1, 1], [1.0] * 12)
UNFIT = {
    "opset 6": (relu(opset=6), "opset 7 or newer, got 6"),
    "no default opset": (relu(opset=1), "opset 7"),
    "Q/DQ": (quantized("QuantizeLinear"), "quantized already"),
    "QLinearConv": (quantized("QLinearConv"), "quantized already"),
    "ConvInteger": (quantized("ConvInteger"), "quantized already"),
    "contrib": (quantized("QLinearAdd", "com.microsoft"), "quantized already"),
    "custom op": (quantized("Twist", "my.domain"), "Twist of the domain 'my.domain'"),
    "unknown op": (quantized("Reluu"), "Reluu"),
    "function": (with_function(), "Twist of the domain 'odd'"),
    "no input": (relu(inputs=[], weights=[constant("x", np.float32([1]))]), "one input"),
    "no output": (relu(outputs=[]), "one output"),
    "no node": (model_of([], outputs=[value("x", 1)]), "one node"),
    "NaN": (conv(NAN), "NaN in 'w' "),
    "Inf": (conv(np.full((4, 3, 1, 1), np.inf, np.float32)), "infinity"),
    "bfloat16 weight": (
        model_of([helper.make_node("Conv", ["x", "w"], ["y"])], [BRAIN],
                 inputs=[value("x", 1, 3, 8, 8, dtype=TensorProto.BFLOAT16)],
                 outputs=[value("y", dtype=TensorProto.BFLOAT16)]), "bfloat16"),
    "bfloat16 input": (relu(inputs=[value("x", 1, dtype=TensorProto.BFLOAT16)],
                            outputs=[value("y", 1, dtype=TensorProto.BFLOAT16)]), "bfloat16"),
    "sequence": (
        model_of(
            [helper.make_node("ConcatFromSequence", ["x"], ["y"], axis=0)],
            inputs=[helper.make_tensor_sequence_value_info("x", F32, None)],
        ),
        "must be a tensor",
    ),
    "output of nothing": (relu(outputs=[value("z", 1)]), "'?z'?"),
    "read of nothing": (model_of([helper.make_node("Relu", ["q"], ["y"])]), "q"),
    "made twice": (model_of([helper.make_node("Relu", ["x"], ["y"])] * 2), "y"),
    "shapes": (
        model_of(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            [constant("w", np.ones((5, 4), np.float32))],
        ),
        "Incompatible dimensions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNFIT)
def test_an_unfit_model_is_refused_in_one_sentence(kind, capfd):
    model, words = UNFIT[kind]
    with pytest.raises(ModelError, match=words) as caught:
        load(model)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert capfd.readouterr() == ("", "")


def test_a_model_that_onnxruntime_has_no_kernel_for_is_refused_quietly(capfd):
    double = [value("x", 1, 3, 8, 8, dtype=TensorProto.DOUBLE)]
    weight = constant("w", np.ones((4, 3, 1, 1)))
    outputs = [helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)]
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    with pytest.raises(ModelError, match="onnxruntime must load the model"):
        load(model_of([node], [weight], inputs=double, outputs=outputs))
    assert capfd.readouterr() == ("", "")


def test_an_infinite_mask_constant_is_fine():
    node = helper.make_node("Max", ["x", "floor"], ["y"])
    assert load(model_of([node], [constant("floor", np.float32(-np.inf))])).notes == ()


# ---------------------------------------------------------------- external data


def external(folder, location="w.bin", **entries):
    model = small()
    onnx.save(
        model, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    stored = onnx.load(folder / "m.onnx", load_external_data=False)
    for tensor in stored.graph.initializer:
        for pair in tensor.external_data:
            changes = {"location": location, **entries}
            pair.value = changes.get(pair.key, pair.value)
    (folder / "m.onnx").write_bytes(stored.SerializeToString())
    return folder / "m.onnx"


def test_external_data_beside_the_model_is_read(tmp_path):
    assert load(external(tmp_path)).digest == load(small()).digest


def test_external_data_that_is_missing_or_truncated(tmp_path):
    path = external(tmp_path)
    whole = (tmp_path / "w.bin").read_bytes()
    (tmp_path / "w.bin").write_bytes(whole[:-4])
    with pytest.raises(ModelError, match="must lie within its file"):
        load(path)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match=r"w\.bin must be .* nothing there"):
        load(path)


@pytest.mark.parametrize(
    "location", ["../secret.bin", "/etc/hostname", "a/../../secret.bin", "", ".", "link.bin", "\0"]
)
def test_external_data_outside_the_folder_is_not_opened(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(4096))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(ModelError, match="must lie in the model's folder"):
        load(external(folder, location))


@pytest.mark.parametrize("entries", [{"offset": "-4"}, {"length": "x"}, {"offset": "9" * 30}])
def test_external_data_with_impossible_numbers(tmp_path, entries):
    with pytest.raises(ModelError, match="must lie within its file"):
        load(external(tmp_path, **entries))


def test_a_model_in_memory_with_external_data_is_refused(tmp_path):
    model = onnx.load(external(tmp_path), load_external_data=False)
    with pytest.raises(ModelError, match="in memory"):
        load(model)


# ---------------------------------------------------------------- mutations


def survives(source):
    """Load or ModelError of one line; anything else fails the test."""
    try:
        load(source)
    except ModelError as error:
        assert str(error).isprintable(), repr(str(error))
        return False
    return True


NUMBERS = [0, 1, -1, 2, 7, 16, 1000, 2**31 - 1, 2**62, -(2**62)]
OPERATORS = """
    Relu Gather Softmax Loop Shape Range Tile Expand Upsample Resize Squeeze Identity Dropout
    BatchNormalization Conv Gemm If Constant ConstantOfShape Concat Scan LSTM NonZero
"""


def parts_of(message):
    yield message
    for field, inside in message.ListFields():
        if field.message_type:
            for part in inside if hasattr(inside, "append") else [inside]:
                yield from parts_of(part)


def disturb(model, rng):
    """Change one field of one message in the model to something of the right type."""
    message = rng.choice(list(parts_of(model)))
    fields = [field for field, _ in message.ListFields()] or list(message.DESCRIPTOR.fields)
    field = rng.choice(fields)
    inside = getattr(message, field.name)
    repeated = hasattr(inside, "append")
    if rng.random() < 0.2:
        message.ClearField(field.name)
    elif field.message_type and repeated and len(inside) and rng.random() < 0.5:
        inside.add().CopyFrom(rng.choice(list(inside)))
    elif field.message_type and repeated and len(inside):
        del inside[rng.randrange(len(inside))]
    elif field.message_type:
        inside.add() if repeated else inside.SetInParent()
    else:
        put(message, field, repeated, rng)


def put(message, field, repeated, rng):
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(["x", "c", "b", "y", "w", "", *OPERATORS.split()])
        new = text if field.type == FieldDescriptor.TYPE_STRING else rng.choice([b"", b"\xff" * 16])
    elif field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        new = rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e38])
    else:
        new = rng.choice(NUMBERS)
    try:
        if not repeated:
            setattr(message, field.name, new)
        elif len(getattr(message, field.name)):
            getattr(message, field.name)[-1] = new
        else:
            getattr(message, field.name).append(new)
    except ValueError:  # the number is too large for this field
        pass


@pytest.mark.slow
def test_no_disturbed_graph_gives_a_traceback(capfd):
    loaded = 0
    for seed in range(500):
        rng, model = random.Random(seed), small()
        for _ in range(rng.choice([1, 1, 2, 4])):
            disturb(model, rng)
        loaded += survives(model)
    assert 20 < loaded < 480
    assert capfd.readouterr() == ("", "")
