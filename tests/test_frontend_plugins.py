"""Models with operators of plugins: cut before them, built, cached, completed again."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.errors import ExportError, ModelError
from deploy.frontends import lift, load
from deploy.frontends.checks import check_valid
from deploy.runtimes.ort import OrtSession
from deploy.targets import TARGETS
from deploy.targets.tensorrt import builder, engines, sdk
from deploy.targets.tensorrt.session import TensorrtSession
from deploy.tensors import TensorSpec
from tests.models import make_model, make_node, make_value, save_net

F16, F32, I32, I64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
TOO_LARGE = r"below 2 GB.*, got .* one protobuf message, .* build parts"


def value(name, *shape, dtype=F32):
    return make_value(name, list(shape), dtype)


def constant(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def node(op, reads, outputs, **attributes):
    return make_node(op, reads, outputs, name=f"/{op}_{outputs.split()[0]}", **attributes)


def detector(domain="TRT", *, opset=13, kind=F32, op="EfficientNMS_TRT") -> onnx.ModelProto:
    """Convs, boxes and scores, and TensorRT's own suppression, with a Cast behind it."""
    nodes = [
        node("Conv", "x w1", "c", pads=[1, 1, 1, 1]),
        node("Relu", "c", "r"),
        node("Conv", "r w2", "d", pads=[1, 1, 1, 1]),
        node("Shape", "r", "s"),
        node("Split", "d", "boxes raw", axis=1),
        node("Sigmoid", "raw", "scores"),
        node("Constant", "", "kinds", value=constant("k", np.int64([80]))),
        node(
            op,
            "boxes scores s w1 kinds",
            "num out_boxes",
            domain=domain,
            iou_threshold=0.5,
            plugin_version="1",
        ),
        node("Cast", "num", "count", to=I64),
    ]
    rng, dtype = np.random.default_rng(4), np.float16 if kind == F16 else np.float32
    shapes = {"w1": (8, 3, 3, 3), "w2": (8, 8, 3, 3)}
    weights = {n: rng.normal(scale=0.3, size=shape).astype(dtype) for n, shape in shapes.items()}
    inputs = [value("x", "n", 3, 16, 16, dtype=kind), value("w1", 8, 3, 3, 3, dtype=kind)]
    ends = {"count": I64, "out_boxes": kind, "scores": kind}
    outputs = [make_value(name, None, element_type) for name, element_type in ends.items()]
    domains = [domain] if domain else []
    return make_model(nodes, inputs, outputs, weights, opset=opset, ir=7, domains=domains)


def with_if(model, node_count, body):
    """The model with an If of the node `body` in both branches, which is all that it gives."""
    del model.graph.node[node_count:]
    branch = helper.make_graph([body], "body", [], [make_value(body.output[0], None)])
    branches = {"then_branch": branch, "else_branch": branch}
    model.graph.node.append(make_node("If", "yes", "y", name="if", **branches))
    model.graph.initializer.append(constant("yes", np.bool_(True)))
    del model.graph.output[:]
    model.graph.output.append(make_value("y", None))
    return model


def with_node(model, op, reads, outputs, **attributes):
    """The model with one node more, whose first output it gives."""
    model.graph.node.append(node(op, reads, outputs, **attributes))
    model.graph.output.append(make_value(outputs.split()[0], None))
    return model


@pytest.fixture
def build(run, pictures, tmp_path):
    """(model, options) -> folder, report and stderr of a build."""

    def call(model, *options, out="out", code=0):
        path, out = save_net(model, tmp_path / "net.onnx"), tmp_path / out
        exit_code, _, err = run(
            "build",
            path,
            "--images",
            pictures,
            "--size",
            "16x16",
            "--duration",
            0,
            "--effort",
            0,
            "--out",
            out,
            *options,
        )
        assert exit_code == code, err
        report = out / "report.json"
        return out, json.loads(report.read_text()) if report.exists() else {}, err

    return call


def arrays(graph):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def plugin_of(graph):
    (plugin,) = [n for n in graph.node if n.op_type == "EfficientNMS_TRT"]
    return plugin


def kept_operators(path, model) -> list:
    """Return the operators of a written model from the plugin on; its nodes must be the file's."""
    written = onnx.load(path).graph
    plugin_index = next(i for i, n in enumerate(written.node) if n.op_type == "EfficientNMS_TRT")
    nodes = model.graph.node
    assert written.node[plugin_index].attribute == nodes[7].attribute
    assert written.node[plugin_index].domain == nodes[7].domain
    assert [v.name for v in written.output] == [v.name for v in model.graph.output]
    tensors = {t.name for t in written.initializer} | {n for m in written.node for n in m.output}
    assert all(name in tensors for name in written.node[plugin_index].input)
    return [n.op_type for n in written.node[plugin_index:]]


@pytest.mark.parametrize("domain", ["TRT", ""])
def test_tensorrt_keeps_the_plugin(build, domain):
    model = detector(domain)
    out, report, _ = build(model, "--target", "tensorrt")
    for name in ("net.tensorrt.onnx", "net.tensorrt.qdq.onnx", "net.tensorrt.typed.onnx"):
        assert kept_operators(out / name, model) == ["EfficientNMS_TRT", "Cast"]
    written = onnx.load(out / "net.tensorrt.qdq.onnx").graph
    assert sum(n.op_type == "QuantizeLinear" for n in written.node) == 4
    (engine,) = [e for e in report["engines"] if not (e["reference"] or e["baseline"])]
    sqnr_by_output = {o["name"]: o["sqnr_db"] for o in engine["accuracy"]["outputs"]}
    assert set(sqnr_by_output) == {"boxes", "scores", "s"}
    assert min(sqnr_by_output[name] for name in ("boxes", "scores")) > 20
    (note,) = [n for n in report["alerts"] if n.startswith("Cut before")]
    assert "EfficientNMS_TRT" in note
    assert "scores, boxes, s;" in note
    session = OrtSession.open(out / "net.tensorrt.part.onnx")
    assert [s.name for s in session.outputs] == ["scores", "boxes", "s"]
    (float_nodes,) = [t["nodes"] for t in report["targets"]]
    reasons = {n["op"]: n["reason"] for n in float_nodes}
    assert "does not know" in reasons["EfficientNMS_TRT"]
    assert "behind a node" in reasons["Cast"]
    assert b"boxes: " in (out / "net.tensorrt.cache").read_bytes()
    assert b"out_boxes: " not in (out / "net.tensorrt.cache").read_bytes()


def test_targets_keep_or_refuse_a_plugin(build):
    out, _, err = build(detector(), code=1)
    assert not out.exists()
    assert "'TRT' ('/EfficientNMS_TRT_num')" in err
    assert "--target tensorrt" in err
    options = ("--target", ",".join(TARGETS), "--soc", "Ascend310P3")
    out, report, _ = build(detector(""), *options, code=1)
    assert (out / "net.tensorrt.cache").exists()
    for target in report["targets"]:
        written = b"".join((out / file["path"]).read_bytes() for file in target.get("files", []))
        assert ("every operator" in target.get("error", "")) != (b"EfficientNMS" in written)


def test_ascend_keeps_the_plugin(build):
    model = detector("")
    out, report, _ = build(model, "--target", "ascend", "--soc", "Ascend310P3")
    for name in ("net_deploy_model.onnx", "net_amct_qdq.onnx"):
        assert kept_operators(out / name, model) == ["EfficientNMS_TRT", "Cast"]
    assert {s.name for s in OrtSession.open(out / "net_fake_quant_model.onnx").outputs} == {
        "boxes",
        "scores",
        "s",
    }
    assert "EfficientNMS_TRT" in [n["op"] for n in report["targets"][0]["nodes"]]


def test_ascend_refuses_plugin_of_other_domain(build):
    out, _, err = build(detector("mine"), "--target", "ascend", code=1)
    assert not out.exists()
    assert "EfficientNMS_TRT '/EfficientNMS_TRT_num' of the domain 'mine'" in err


def test_plugin_of_float16_model_gets_float16(build):
    model = detector(kind=F16, op="EfficientNMS_TRT")
    out, _, _ = build(model, "--target", "tensorrt")
    written = onnx.load(out / "net.tensorrt.qdq.onnx").graph
    assert kept_operators(out / "net.tensorrt.qdq.onnx", model) == ["EfficientNMS_TRT", "Cast"]
    producer = {name: n for n in written.node for name in n.output}
    assert [(a.name, a.i) for a in producer["boxes"].attribute] == [("to", F16)]
    assert written.input[0].type.tensor_type.elem_type == F16
    plugin_weight = arrays(written)[plugin_of(written).input[3]]
    assert plugin_weight.dtype == np.float16  # it reads a weight as it is in the file


def test_plugin_keeps_its_unfolded_weight(build):
    model = detector()
    model.graph.node[1].CopyFrom(node("BatchNormalization", "c g g g g", "r"))
    model.graph.initializer.append(constant("g", np.full(8, 2, np.float32)))
    out, _, _ = build(model, "--target", "tensorrt")
    written = onnx.load(out / "net.tensorrt.onnx").graph
    written_arrays, weight = arrays(written), arrays(model.graph)["w1"]
    assert (written_arrays[plugin_of(written).input[3]] == weight).all()
    (first_conv, _) = [n for n in written.node if n.op_type == "Conv"]
    assert not (written_arrays[first_conv.input[1]] == weight).any()


@pytest.mark.slow
def test_nodes_after_plugin_are_lowered(build):
    newer = with_node(detector(opset=20), "ReduceMax", "out_boxes axes", "top", keepdims=0)
    newer.graph.initializer.append(constant("axes", np.int64([1])))
    newer.graph.node[4].attribute.append(helper.make_attribute("num_outputs", 2))
    out, _, _ = build(newer, "--target", "tensorrt", "--trt-version", "8.6.1")
    written = onnx.load(out / "net.tensorrt.onnx")
    assert written.opset_import[0].version == 17
    assert list(written.graph.node[-1].input) == ["out_boxes"]
    older = with_node(detector(opset=13), "ReduceMax", "out_boxes", "top", axes=[1])
    out, report, _ = build(older, "--target", "tensorrt", out="older")
    assert not (out / "net.tensorrt.typed.onnx").exists()
    assert (out / "net.tensorrt.qdq.onnx").exists()
    assert any("ReduceMax of opset 13" in n for n in report["targets"][0]["notes"])


@pytest.mark.parametrize("opset", [18, 20, 26])
def test_nodes_after_plugin_are_lowered_for_cann(build, opset):
    model = with_node(detector("", opset=opset), "ReduceMax", "out_boxes axes", "top", keepdims=0)
    model.graph.initializer.append(constant("axes", np.int64([1])))
    model.graph.node[4].attribute.append(helper.make_attribute("num_outputs", 2))
    out, _, _ = build(model, "--target", "ascend", "--cann", "5.0")
    written = onnx.load(out / "net_deploy_model.onnx")
    assert written.opset_import[0].version == 13
    reduction = written.graph.node[-1]
    assert list(reduction.input) == ["out_boxes"]
    assert [list(a.ints) for a in reduction.attribute if a.name == "axes"] == [[1]]


def test_nodes_after_plugin_are_lifted(build, wording):
    model = detector(opset=11)
    with_node(model, "Squeeze", "out_boxes", "flat", axes=[0])
    out, _, _ = build(model, "--target", "tensorrt")
    written = onnx.load(out / "net.tensorrt.qdq.onnx")
    assert written.opset_import[0].version == 13
    assert kept_operators(out / "net.tensorrt.qdq.onnx", model)[-1] == "Squeeze"
    axes = written.graph.node[-1].input[1]
    (axes_node,) = [n for n in written.graph.node if axes in n.output]
    assert numpy_helper.to_array(axes_node.attribute[0].t).tolist() == [0]
    with_node(model, "Softmax", "out_boxes", "soft", axis="last")
    with pytest.raises(ModelError) as refusal:
        load(model)
    wording.check(refusal.value)


def test_plugin_stays_through_cache_commands(run, pictures, tmp_path):
    model, path = detector(""), tmp_path / "net.onnx"
    onnx.save(model, path)
    cache, qdq_path = tmp_path / "net.cache", tmp_path / "turned.onnx"
    output = run.ok(
        "calibrate",
        path,
        "--images",
        pictures,
        "--size",
        "16x16",
        "--target",
        "tensorrt",
        "--method",
        "entropy-tensorrt",
        "-o",
        cache,
    )
    assert "Cut before EfficientNMS_TRT ('/Eff" in output
    with cache.open("ab") as file:  # as TensorRT, which has it, would list it
        file.write(b"out_boxes: 3c010a14\n")
    cache.with_name("net.cache.json").unlink()
    assert "out_boxes: in" in run.ok("cache", "check", cache, "--model", path, "--verbose")
    run.ok("cache", "to-qdq", path, cache, "-o", qdq_path)
    assert kept_operators(qdq_path, model) == ["EfficientNMS_TRT", "Cast"]
    plain = tmp_path / "plain.onnx"
    run.ok("cache", "from-qdq", qdq_path, "-o", plain, tmp_path / "again.cache")
    assert kept_operators(plain, model) == ["EfficientNMS_TRT", "Cast"]


@pytest.mark.slow
def test_second_build_with_plugin_reuses_calibration(build, run, monkeypatch):
    build(detector(), "--target", "tensorrt")
    monkeypatch.setattr("deploy.pipeline.calibration_run.observe", None)
    out, _, _ = build(detector(), "--target", "tensorrt")
    assert "EfficientNMS_TRT" in run.ok("explain", out)
    text = run.ok("inspect", out.parent / "net.onnx", "--target", "tensorrt")
    assert "Cut before EfficientNMS_TRT" in text


class DeviceSession:
    """An engine on a device: it has the outputs behind the plugin."""

    threads = 1
    inputs = (TensorSpec("x", "float32", ("n", 3, 16, 16)),)
    outputs = (TensorSpec("count", "int64", (1, 1)),)

    def run(self, feed):
        return {"count": np.zeros((1, 1), np.int64)}


@pytest.mark.slow
def test_engine_with_plugin_is_timed(build, monkeypatch):
    here = sdk.Sdk("10.13.0.35", calibrators=True, gpu="Some GPU sm_90")
    monkeypatch.setattr(sdk, "find_sdk", lambda device=0: here)
    monkeypatch.setattr(engines, "open_gpu", lambda device: None)
    built = builder.BuiltEngine(b"plan", ())
    monkeypatch.setattr(builder, "build_engine", lambda *a, **k: built)
    monkeypatch.setattr(engines, "calibrator_from_cache", lambda settings, cache: None)
    monkeypatch.setattr(TensorrtSession, "open", lambda *a, **k: DeviceSession())
    _, report, _ = build(detector(), "--target", "tensorrt", "--duration", 0.05)
    (engine,) = [e for e in report["engines"] if not (e["reference"] or e["baseline"])]
    assert engine["latency"] is not None
    assert {o["name"] for o in engine["accuracy"]["outputs"]} == {"boxes", "scores", "s"}


def test_plugin_inside_an_if_is_cut():
    model = with_if(detector(), 7, node("Own", "boxes", "inside", domain="mine"))
    body, loaded = model.graph.node[-1].attribute[0].g, load(model)
    assert [s.name for s in loaded.outputs] == ["boxes"]
    assert loaded.cut_off.first_unknown.name == "if"
    full_graph = loaded.with_cut_off(loaded.model).graph
    (if_node,) = [n for n in full_graph.node if n.op_type == "If"]
    assert if_node.attribute[0].g == body
    assert "yes" in arrays(full_graph)


def test_node_order_keeps_the_cut():
    model, mixed = detector(), detector()
    del mixed.graph.node[:]
    mixed.graph.node.extend(reversed(model.graph.node))
    in_order, reordered = load(model), load(mixed)
    assert [n.op_type for n in reordered.cut_off.nodes] == ["EfficientNMS_TRT", "Cast"]
    assert {s.name for s in in_order.outputs} == {s.name for s in reordered.outputs}
    check_valid(reordered.with_cut_off(reordered.model))  # in the order in which they run


def test_plugin_inputs_are_not_fed(build):
    model = detector()
    model.graph.node[7].input.append("size")
    model.graph.input.append(make_value("size", [2], I32))
    out, _, _ = build(model, "--target", "tensorrt")
    assert [v.name for v in onnx.load(out / "net.tensorrt.qdq.onnx").graph.input] == ["x", "size"]
    assert [s.name for s in load(model).inputs] == ["x"]


@pytest.mark.parametrize("op", ["QuantizeLinearPlugin", "DequantizeLinear_TRT"])
def test_plugin_named_like_pair_is_kept(op):
    assert [n.op_type for n in load(detector(op=op)).cut_off.nodes] == [op, "Cast"]


def test_plugin_as_first_node_is_refused(wording):
    model = detector()
    model.graph.node.insert(0, node("Decode", "x", "image", domain="mine"))
    model.graph.node[1].input[0] = "image"
    with pytest.raises(ModelError) as refusal:
        load(model)
    wording.check(refusal.value)


def test_large_float16_model_is_refused(monkeypatch):
    monkeypatch.setattr(lift, "MESSAGE_LIMIT", 100)
    with pytest.raises(ModelError, match=rf"^a float16 model must be {TOO_LARGE}"):
        load(detector("", kind=F16, op="Concat"))


def test_nodes_after_plugin_refuse_another_opset(wording):
    model = detector(opset=17)
    model.graph.node.append(node("Split", "out_boxes", "a b"))
    loaded = load(model)
    newer = onnx.ModelProto()
    newer.CopyFrom(loaded.model)
    newer.opset_import[0].version = 19
    with pytest.raises(ExportError) as refusal:
        loaded.with_cut_off(newer)
    wording.check(refusal.value)
