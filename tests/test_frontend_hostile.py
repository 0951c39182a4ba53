"""Broken, foreign and unfit models, and external data, are refused in one line."""

import gzip
import os
import pickle
import random
import struct
import zipfile

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from onnx import TensorProto, helper, numpy_helper

from deploy.errors import ModelError
from deploy.frontends import checks, load, onnx_reader
from tests.models import make_model, make_node, make_value

F16, F32, I32, I64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
BF16, F64 = TensorProto.BFLOAT16, TensorProto.DOUBLE


def value(name, *shape, dtype=F32):
    return make_value(name, list(shape), dtype)


def constant(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def model_of(nodes, weights=(), *, inputs=None, outputs=None, **options):
    inputs = [value("x", "n", 3, 8, 8)] if inputs is None else inputs
    outputs = [make_value("y", None)] if outputs is None else outputs
    return make_model(nodes, inputs, outputs, weights, **options)


def mixed_model():
    """A model with a bit of everything that the cleaning touches."""
    rng = np.random.default_rng(0)
    nodes = [
        make_node("Constant", "", "k", value=constant("v", np.array([0, 1, 0, 1]))),
        make_node("Concat", "k k", "pads", axis=0),
        make_node("Pad", "x pads", "padded"),
        make_node("Conv", "padded w", "c", kernel_shape=[3, 3]),
        make_node("BatchNormalization", "c gamma beta mean var", "b"),
        make_node("Identity", "b", "i"),
        make_node("GlobalAveragePool", "i", "pooled"),
        make_node("Flatten", "pooled", "flat"),
        make_node("Gemm", "flat fc fc_bias", "y", transB=1),
    ]
    shapes = {"w": (4, 3, 3, 3), "fc": (5, 4), "fc_bias": (5,), "gamma": 4, "beta": 4, "mean": 4}
    weights = [constant(n, rng.normal(size=s).astype(np.float32)) for n, s in shapes.items()]
    return model_of(nodes, [*weights, constant("var", np.ones(4, np.float32))])


def relu(**options):
    return model_of([make_node("Relu", "x", "y")], **options)


def conv(weight, kind=F32):
    inputs, outputs = [value("x", 1, 3, 8, 8, dtype=kind)], [make_value("y", None, kind)]
    return model_of([make_node("Conv", "x w", "y")], [weight], inputs=inputs, outputs=outputs)


def filled(number):
    return constant("w", np.full((4, 3, 1, 1), number))


MODEL_BYTES = mixed_model().SerializeToString()
FILES = {
    "empty": (b"", "empty file"),
    "text": (b"hello, this is a text file\n" * 40, "not ONNX"),
    "pickle": (pickle.dumps({"a": list(range(99))}), "pickle"),
    "torch zip": (b"PK\x03\x04" + bytes(64), "net.py:make --weights FILE"),
    "safetensors": (struct.pack("<Q", 64) + b'{"w":{"dtype"', "net.py:make --weights FILE"),
    "gzip": (gzip.compress(MODEL_BYTES), "gzip"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "ort": (b"\x00\x01\x00\x00ORTM" + bytes(64), "ORT format"),
    "tflite": (b"\x00\x01\x00\x00TFL3" + bytes(64), "TensorFlow Lite"),
    "half": (MODEL_BYTES[: len(MODEL_BYTES) // 2], "truncated"),
    "zeros": (bytes(512), "parse"),
    "head only": (MODEL_BYTES[:2], "without graph"),
}


@pytest.mark.parametrize("kind", FILES)
def test_foreign_file_is_named_by_kind(tmp_path, kind):
    data, reason = FILES[kind]
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=reason) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_unreadable_paths_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.onnx")
    with zipfile.ZipFile(tmp_path / "model.pth", "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    for name, reason in (
        ("missing.onnx", "nothing there"),
        ("", "folder"),
        ("pipe.onnx", "device or pipe"),
        ("model.pth", r"torch\.save"),
    ):
        with pytest.raises(ModelError, match=reason):
            load(tmp_path / name)


def quantized(op_type, domain="", name="q"):
    node = make_node(op_type, "x", "y", name=name, domain=domain)
    return model_of([node], domains=[domain] if domain else [])


def with_function():
    body = helper.make_function(
        "own",
        "Inner",
        ["a"],
        ["b"],
        [make_node("Twist", "a", "b", domain="odd")],
        [helper.make_opsetid("", 13), helper.make_opsetid("odd", 1)],
    )
    model = model_of([make_node("Inner", "x", "y", domain="own")], domains=["own", "odd"])
    model.functions.append(body)
    return model


def with_reference():
    model = model_of([make_node("Cast", "x", "y")])
    attribute_fields = {"name": "to", "i": 1, "type": onnx.AttributeProto.INT}
    model.graph.node[0].attribute.add(**attribute_fields, ref_attr_name="q")
    return model


NEGATIVE = TensorProto(name="w", dims=[-4, 3, 1, 1], data_type=F32, float_data=[1.0] * 12)
BRAIN = helper.make_tensor("w", BF16, [4, 3, 1, 1], [1.0] * 12)
UNFIT = {
    "opset 6": (relu(opset=6), "opset 7 or newer, got 6"),
    "no default opset": (relu(opset=1), "opset 7"),
    "Q/DQ": (quantized("QuantizeLinear"), "quantized already"),
    "QLinearConv": (quantized("QLinearConv"), "quantized already"),
    "ConvInteger": (quantized("ConvInteger"), r"quantized already \(ConvInteger 'q'\)"),
    "no name": (quantized("ConvInteger", name=""), r"quantized already \(ConvInteger 'y'\)"),
    "contrib": (quantized("QLinearAdd", "com.microsoft"), "quantized already"),
    "custom op": (quantized("Twist", "my.domain"), "Twist of the domain 'my.domain'"),
    "unknown op": (quantized("Reluu"), "Reluu"),
    "reference": (with_reference(), "must have a value, got 'to' of 'Cast'"),
    "function": (with_function(), "Twist of the domain 'odd'"),
    "no input": (relu(inputs=[], weights=[constant("x", np.float32([1]))]), "one input"),
    "no output": (relu(outputs=[]), "one output"),
    "no node": (model_of([], outputs=[value("x", 1)]), "one node"),
    "NaN": (conv(filled(np.float32(np.nan))), "NaN in 'w' "),
    "Inf": (conv(filled(np.float32(np.inf))), "infinity"),
    "negative size": (conv(NEGATIVE), r"0 or more, got \[-4, 3, 1, 1\] for 'w'"),
    "bfloat16 weight": (conv(BRAIN, BF16), "bfloat16"),
    "bfloat16 input": (
        relu(inputs=[value("x", 1, dtype=BF16)], outputs=[value("y", 1, dtype=BF16)]),
        "bfloat16",
    ),
    "sequence": (
        model_of(
            [make_node("ConcatFromSequence", "x", "y", axis=0)],
            inputs=[helper.make_tensor_sequence_value_info("x", F32, None)],
        ),
        "must be a tensor",
    ),
    "axes without scales": (
        model_of(
            [make_node("Resize", ["x", "", "s"], "y", axes=[2])],
            [constant("s", np.float32([2, 2]))],
            opset=18,
        ),
        "axes",
    ),
    "a scale of 0 in an old Resize": (
        model_of([make_node("Resize", "x s", "y")], [constant("s", np.float32([1, 0]))], opset=10),
        "a scale is not above 0",
    ),
    "only a sequence": (
        model_of(
            [make_node("SplitToSequence", "x", "y", axis=0)],
            outputs=[helper.make_tensor_sequence_value_info("y", F32, None)],
        ),
        r"tensor of numbers, got text, sequences or maps alone \(y\)",
    ),
    "only text": (
        model_of(
            [make_node("Cast", "x", "y", to=TensorProto.STRING)],
            outputs=[make_value("y", None, TensorProto.STRING)],
        ),
        "tensor of numbers, got text",
    ),
    "output of nothing": (relu(outputs=[value("z", 1)]), "'?z'?"),
    "read of nothing": (model_of([make_node("Relu", "q", "y")]), "q"),
    "made twice": (model_of([make_node("Relu", "x", "y")] * 2), "y"),
    "shapes": (
        model_of([make_node("MatMul", "x w", "y")], [constant("w", np.ones((5, 4), np.float32))]),
        "Incompatible dimensions",
    ),
    "kernel above the image": (
        model_of(
            [
                make_node("MaxPool", "x", "p", kernel_shape=[99, 99]),
                make_node("Slice", "p zero one two", "y"),
            ],
            [
                constant("zero", np.int64([0])),
                constant("one", np.int64([1])),
                constant("two", np.int64([2])),
            ],
        ),
        "a Slice of a tensor of the shape",
    ),
    "double": (conv(filled(1.0), F64), "onnxruntime must load the model"),  # which has no kernel
}


@pytest.mark.parametrize("kind", UNFIT)
def test_unfit_model_gets_one_line(kind, capfd):
    model, reason = UNFIT[kind]
    with pytest.raises(ModelError, match=reason) as caught:
        load(model)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert capfd.readouterr() == ("", "")


def test_an_infinite_mask_constant_is_fine():
    node = make_node("Max", "x floor", "y")
    assert load(model_of([node], [constant("floor", np.float32(-np.inf))])).notes == ()


@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        (["b", 3, 8, 8], ("b", 3, 8, 8)),
        ([7], ("n", 3, 8, 8)),
        ([1, 3, 8, 9], ("n", 3, 8, 8)),
    ],
)
def test_inferred_output_shape_wins_over_stored(stored, shape):
    assert load(relu(outputs=[value("y", *stored)])).outputs[0].shape == shape


def external(folder, location="w.bin", **entries):
    options = {"location": "w.bin", "size_threshold": 0}
    onnx.save(mixed_model(), folder / "m.onnx", save_as_external_data=True, **options)
    stored = onnx.load(folder / "m.onnx", load_external_data=False)
    for tensor in stored.graph.initializer:
        for pair in tensor.external_data:
            pair.value = {"location": location, **entries}.get(pair.key, pair.value)
    (folder / "m.onnx").write_bytes(stored.SerializeToString())
    return folder / "m.onnx"


def test_external_data_of_the_folder_loads(tmp_path):
    assert load(external(tmp_path)).digest == load(mixed_model()).digest


def test_missing_external_data_is_refused(tmp_path, wording):
    path = external(tmp_path)
    (tmp_path / "w.bin").write_bytes((tmp_path / "w.bin").read_bytes()[:-4])
    with pytest.raises(ModelError) as refusal:
        load(path)
    wording.check(refusal.value)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError) as refusal:
        load(path)
    wording.check(refusal.value)


@pytest.mark.parametrize(
    "location", ["../secret.bin", "/etc/hostname", "a/../../secret.bin", "", ".", "link.bin", "\0"]
)
def test_external_data_outside_is_not_opened(tmp_path, location, wording):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(4096))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(ModelError) as refusal:
        load(external(folder, location))
    wording.check(refusal.value)


@pytest.mark.parametrize(
    ("location", "reason"), [("w.bin", "must be valid ONNX"), ("../w.bin", "in the model's folder")]
)
def test_external_data_in_attributes_is_checked(tmp_path, location, reason):
    model = onnx.load(external(tmp_path, location), load_external_data=False)
    attribute = model.graph.node[0].attribute.add(name="i", type=onnx.AttributeProto.INT)
    attribute.g.initializer.append(model.graph.initializer.pop())
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=reason):
        load(tmp_path / "m.onnx")


@pytest.mark.parametrize("entries", [{"offset": "-4"}, {"length": "x"}, {"offset": "9" * 30}])
def test_impossible_external_offsets_are_refused(tmp_path, entries, wording):
    with pytest.raises(ModelError) as refusal:
        load(external(tmp_path, **entries))
    wording.check(refusal.value)


TOO_LARGE = r"below 2 GB.*, got .* one protobuf message, .* build parts"


def test_model_over_2_gb_is_refused(tmp_path, monkeypatch):
    path = external(tmp_path)
    monkeypatch.setattr(onnx_reader, "MESSAGE_LIMIT", path.stat().st_size + 100)
    with pytest.raises(ModelError, match=TOO_LARGE):
        onnx_reader.read_model(path)


def test_external_data_in_memory_is_refused(tmp_path):
    model = onnx.load(external(tmp_path), load_external_data=False)
    with pytest.raises(ModelError, match="in memory"):
        load(model)


def loads_or_refuses(source):
    """Return whether the model loads; a refusal must be a ModelError of one line."""
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
    for field, field_value in message.ListFields():
        if field.message_type:
            for part in field_value if hasattr(field_value, "append") else [field_value]:
                yield from parts_of(part)


def disturb(model, rng):
    """Change one field of one message in the model to something of the right type."""
    message = rng.choice(list(parts_of(model)))
    fields = [field for field, _ in message.ListFields()] or list(message.DESCRIPTOR.fields)
    field = rng.choice(fields)
    field_value = getattr(message, field.name)
    repeated = hasattr(field_value, "append")
    if rng.random() < 0.2:
        message.ClearField(field.name)
    elif field.message_type and repeated and len(field_value) and rng.random() < 0.5:
        field_value.add().CopyFrom(rng.choice(list(field_value)))
    elif field.message_type and repeated and len(field_value):
        del field_value[rng.randrange(len(field_value))]
    elif field.message_type:
        field_value.add() if repeated else field_value.SetInParent()
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
        rng, model = random.Random(seed), mixed_model()
        for _ in range(rng.choice([1, 1, 2, 4])):
            disturb(model, rng)
        loaded += loads_or_refuses(model)
    assert 20 < loaded < 480
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("length", [1 << 17, (1 << 17) + 1])
def test_too_long_names_are_refused(length):
    """One of 2 MB took a gigabyte: tables, files and messages repeat it."""
    name = "c" * length
    values = make_value("x", (1, 3)), make_value("y", (1, 3))
    nodes = [make_node("Relu", ["x"], [name]), make_node("Relu", [name], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "g", [values[0]], [values[1]]))
    if length <= 1 << 17:
        checks.check_fields(model)
    else:
        with pytest.raises(ModelError, match=r"131,072 characters.*131,073"):
            checks.check_fields(model)
