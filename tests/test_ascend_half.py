"""float16 layers on Ascend: what the file has in float16 stays so, as in files of the real AMCT."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.observation import Subject
from deploy.frontends import load
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.executor import open_deploy
from deploy.targets.ascend.half import halves_of, narrowed

WIDTHS = Path(__file__).parent / "golden" / "amct" / "widths"
HALF = WIDTHS / "float16.onnx"
X = np.load(WIDTHS / "x.npy").astype(np.float16)
F16, F32 = TensorProto.FLOAT16, TensorProto.FLOAT


@pytest.fixture
def files(run, tmp_path):
    """(words of `calib8 ...`, the model first) -> what was said, deploy and fake-quant models."""

    def make(command, model, *words, dtype=np.float16):
        np.save(tmp_path / "x.npy", X.astype(dtype))
        out = tmp_path / "o"
        code, said, err = run(*command, model, *words, "--images", tmp_path / "x.npy", "--out", out)
        assert code == 0, err
        ends = ("deploy_model.onnx", "fake_quant_model.onnx")
        return " ".join(said.split()), *(out / f"{model.stem}_{end}" for end in ends)

    return make


BUILD = ("--target", "ascend", "--effort", 0, "--duration", 0)


def types(model):
    """Tensor -> its element type, constants too."""
    made = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    values = (*made.graph.input, *made.graph.output, *made.graph.value_info)
    found = {v.name: v.type.tensor_type.elem_type for v in values}
    return found | {t.name: t.data_type for t in made.graph.initializer}


def dtypes(path):
    nodes = [n for n in onnx.load(path).graph.node if n.op_type == "AscendDequant"]
    return {n.name: next(a.i for a in n.attribute if a.name == "dtype") for n in nodes}


def test_a_record_of_amct_gives_its_files(files):
    """Integers and scales equal; conv1's bias was folded by AMCT there, here by the exporter."""
    said, deploy, fake = files(("ascend", "deploy"), HALF, WIDTHS / "half" / "record.txt")
    assert "7 layers (conv1, conv2, dw, ...) read and give float16, as in the file" in said
    assert set(dtypes(deploy).values()) == {1}
    mine, amct = onnx.load(deploy), onnx.load(WIDTHS / "half" / "res_deploy_model.onnx")
    assert [n.op_type for n in mine.graph.node] == [n.op_type for n in amct.graph.node]
    held = [{t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (mine, amct)]
    for a, b in zip(mine.graph.node, amct.graph.node, strict=True):
        for i, j in zip(a.input, b.input, strict=True):
            if i in held[0] and (a.name, i) != ("conv1", a.input[2:][0] if a.input[2:] else ""):
                np.testing.assert_array_equal(held[0][i], held[1][j])
    model = onnx.load(fake)
    assert types(model)["conv1_output0"] == F32 and types(model)["/Relu_output_0"] == F16
    session, wanted = OrtSession.open(fake), np.load(WIDTHS / "half" / "y.npy")
    for x, y in zip(X, wanted, strict=True):
        got = session.run({"x": x[None]})["y"]
        assert got.dtype == np.float16 and np.abs(got[0] - y).max() <= 4e-3 * np.abs(wanted).max()


def test_a_build_keeps_float16(files):
    _, deploy, fake = files(("build",), HALF, *BUILD, "--keep-float", "conv2")
    record = deploy.with_name("float16_record.txt").read_text()
    assert record.count('op_data_type: "FLOAT16"') == record.count("act_type") == 6
    held = {t.name: t.data_type for t in onnx.load(deploy).graph.initializer}
    assert held["conv2.weight"] == held["conv2.bias"] == F16
    assert held["dw.weight"] == TensorProto.INT8 and set(dtypes(deploy).values()) == {1}
    assert "Cast" not in [n.op_type for n in onnx.load(deploy).graph.node]
    a = open_deploy(onnx.load(deploy)).run({"x": X[:1]})["y"]
    b = OrtSession.open(fake).run({"x": X[:1]})["y"]
    assert a.dtype == b.dtype == np.float16
    assert np.abs(a - b).max() <= 4e-3 * np.abs(b).max()


@pytest.mark.parametrize(
    ("model", "told", "words"),
    [("float.onnx", "FLOAT16", "that of float16"), ("float16.onnx", "FLOAT32", "that of float32")],
)
def test_a_record_of_other_floats_is_refused(model, told, words, run, tmp_path):
    text = (WIDTHS / "half" / "record.txt").read_text()
    record = tmp_path / "r.txt"
    record.write_text(text.replace("value {", f'value {{ op_data_type: "{told}"', 1))
    code, _, err = run("ascend", "deploy", WIDTHS / model, record, "-o", tmp_path / "o")
    assert code == 1 and f"got {words} for 'conv1'" in " ".join(err.split())
    assert not (tmp_path / "o").exists()


def node(op, reads, made, **given):
    return helper.make_node(op, reads.split(), [made], name=f"{op}_{made}", **given)


def network():
    """float16 in between: operators whose other inputs are float32, bool or whole, and twins."""
    nodes = [
        node("Cast", "x", "h", to=F16),
        node("Conv", "h w", "c", pads=[1] * 4),
        node("Relu", "c", "r"),
        helper.make_node("Resize", ["r", "", "twice"], ["u"], name="resize", mode="nearest"),
        node("Greater", "u half", "g"),
        node("Where", "g u half", "v"),
        node("Shape", "v", "s"),
        node("ConstantOfShape", "s", "k", value=numpy_helper.from_array(np.float16([0.5]))),
        node("Add", "v k", "a"),
        node("Cast", "a", "f", to=F32),
        node("Softmax", "f", "p", axis=1),
        node("Cast", "p", "q", to=F16),
        node("Mul", "q a", "y"),
    ]
    rng = np.random.default_rng(0)
    constants = {
        "w": rng.normal(scale=0.3, size=(4, 3, 3, 3)).astype(np.float16),
        "twice": np.float32([1, 1, 2, 2]),
        "half": np.float16(0.5),
    }
    graph = helper.make_graph(
        nodes,
        "mixed",
        [helper.make_tensor_value_info("x", F32, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", F16, [1, 4, 16, 16])],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_types_come_back_by_their_names():
    model = network()
    loaded = load(model)
    halves = halves_of(Subject(loaded=loaded, samples=1, given=model))
    made = narrowed(loaded.model, halves)
    onnx.checker.check_model(made, full_check=True)
    before, after = types(model), types(made)
    assert {n: before[n] for n in before if n in after} == {
        n: after[n] for n in after if n in before
    }
    assert {after[name] for name in "cruva"} == {F16} and after["twice"] == F32
    x = {"x": np.random.default_rng(1).normal(size=(1, 3, 8, 8)).astype(np.float32)}
    (got,), (wanted,) = (OrtSession.open(m).run(x).values() for m in (made, model))
    np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), atol=2e-3)


def test_a_mixed_model_is_built(files, tmp_path):
    onnx.save(network(), tmp_path / "mixed.onnx")
    _, deploy, fake = files(("build",), tmp_path / "mixed.onnx", *BUILD, dtype=np.float32)
    assert dtypes(deploy) == {"Conv_c.dequant": 1}
    x = {"x": X[:1].astype(np.float32)}
    a, b = open_deploy(onnx.load(deploy)).run(x)["y"], OrtSession.open(fake).run(x)["y"]
    assert a.dtype == b.dtype == np.float16 and np.abs(a - b).max() <= 2e-3


def test_a_cast_at_the_end_may_be_named_after_what_it_reads(files, tmp_path):
    """As onnxconverter_common names it with keep_io_types: the fake-quant model did not load."""
    model = onnx.load(HALF)
    (end,) = model.graph.output
    for node in model.graph.node:
        node.output[:] = ["end" if name == end.name else name for name in node.output]
        node.input[:] = ["end" if name == end.name else name for name in node.input]
    model.graph.node.append(helper.make_node("Cast", ["end"], [end.name], name="end", to=F32))
    end.type.tensor_type.elem_type = F32
    onnx.save(model, tmp_path / "cast.onnx")
    _, deploy, fake = files(("build",), tmp_path / "cast.onnx", *BUILD)
    for path in (deploy, fake):
        names = [node.name for node in onnx.load(path).graph.node]
        assert len(names) == len(set(names)) and "end" in names
    assert OrtSession.open(fake).run({"x": X[:1]})[end.name].dtype == np.float32


def test_an_input_that_is_moved_in_int8_is_float16_again(files, tmp_path):
    """AscendAntiQuant gives what AscendQuant read: dtype 1, and no Cast in front of the Add."""
    config = tmp_path / "my.cfg"
    config.write_text('batch_num: 2 tensor_quantize { layer_name: "Add_a" input_index: 0 }')
    onnx.save(network(), tmp_path / "mixed.onnx")
    words = (*BUILD, "--ascend-config", config)
    _, deploy, fake = files(("build",), tmp_path / "mixed.onnx", *words, dtype=np.float32)
    nodes = {n.name: n for n in onnx.load(deploy).graph.node}
    back = nodes["Add_a.0.anti_quant"]
    assert next(a.i for a in back.attribute if a.name == "dtype") == 1
    assert nodes["Add_a"].input[0] == back.output[0]
    x = {"x": X[:1].astype(np.float32)}
    a, b = open_deploy(onnx.load(deploy)).run(x)["y"], OrtSession.open(fake).run(x)["y"]
    assert a.dtype == b.dtype == np.float16 and np.abs(a - b).max() <= 4e-3


def test_where_no_types_are_known_the_files_are_in_float32():
    model = network()
    assert halves_of(Subject(loaded=load(model), samples=1)) == frozenset()
