"""The report of engines on a GPU, by the fake TensorRT: what int8 is held against, and its head."""

import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from deploy.errors import BackendError, SdkMissingError
from deploy.graph.plan import Decision
from deploy.metrics import latency as timing
from deploy.metrics.kernels import EngineLayer
from deploy.metrics.latency import DeviceTimes
from deploy.pipeline import measure
from deploy.report.figures import compare_with_plan, engine_layers_text, quantized_layers
from deploy.targets.tensorrt import builder, sdk, session
from deploy.targets.tensorrt.inspector import parse_layers
from deploy.targets.tensorrt.session import TensorrtSession

pytestmark = pytest.mark.slow

EIGHT, TEN, ELEVEN = "8.5.3.1", "10.13.0.35", "11.1.0"
COMPUTE_MS = {"int8": 1.0, "float16": 2.0, "float32": 4.0}
COPY_MS = {"h2d_ms": 0.3, "d2h_ms": 0.2}


@pytest.fixture
def clock(monkeypatch):
    """A GPU that takes as long as an engine's narrowest type, and half a millisecond to copy.

    Nothing is warmed up, for speed.
    """

    def times(self):
        kinds = {layer.precision for layer in self.layers()}
        compute = next((ms for kind, ms in COMPUTE_MS.items() if kind in kinds), 8.0)
        return DeviceTimes(compute_ms=compute, enqueue_ms=0.125, **COPY_MS)

    monkeypatch.setattr(TensorrtSession, "device_times", times)
    monkeypatch.setattr(measure, "measure", partial(timing.measure, warmup_ms=0))


@pytest.fixture
def build(run, small_cnn, pictures, tmp_path, clock):
    """(options) -> report, pages and output of a timed TensorRT build into tmp_path/out."""

    def call(*options, target="tensorrt", model=small_cnn, images=pictures):
        arguments = ["build", model, "--images", images, "--preprocess", "unit", "--effort", 0]
        arguments += ["--target", target, "--out", tmp_path / "out", "--method", "minmax"]
        arguments += ["--limit", 8, "--threads", 1]
        arguments += [] if "--duration" in options else ["--duration", "0.01"]
        code, printed, err = run(*arguments, *options)
        assert code in (0, 3), err
        pages = {kind: (tmp_path / f"out/report.{kind}").read_text() for kind in ("md", "html")}
        report = json.loads((tmp_path / "out/report.json").read_text())
        rows = {row["label"]: row for row in report["engines"]}
        return SimpleNamespace(code=code, printed=printed, report=report, rows=rows, **pages)

    return call


def flags(config):
    return {flag.name for flag in config.chosen}


def notes(result):
    return " / ".join(result.report["targets"][-1].get("notes", []))


def line(result, label):
    """Cells of a line of the engines' table."""
    (row,) = (line for line in result.md.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


@pytest.mark.parametrize("version", [EIGHT, TEN])
def test_float_engines_use_trtexec_flags(tensorrt, build, version):
    trt = tensorrt(version)
    result = build("--engine-from", "cache")
    assert list(result.rows) == ["FP32 on the CPU", "TensorRT FP32", "TensorRT FP16", "int8"]
    assert [row["baseline"] for row in result.rows.values()] == [False, True, True, False]
    assert ["verdict" in row for row in result.rows.values()] == [False, False, False, True]
    assert all("accuracy" in row for row in list(result.rows.values())[1:])
    assert "\n- int8: the engine " in result.md
    int8, fp32, fp16 = map(flags, trt.STORY.configs)
    assert (int8, fp32, fp16) == ({"INT8", "FP16", "TF32"}, {"TF32"}, {"FP16", "TF32"})
    assert all(c.int8_calibrator is None for c in trt.STORY.configs[1:])
    profile_shapes = {tuple(c.profile.shapes.items()) for c in trt.STORY.configs}
    assert len(profile_shapes) == 1  # of the same inputs
    build("--engine-from", "cache")
    assert len(trt.STORY.configs) == 3  # all three are used again


def test_engines_share_the_timing_cache(tensorrt, build, tmp_path, monkeypatch):
    trt = tensorrt(TEN)
    longer = lambda cache: trt.IHostMemory(cache.data + b"+")  # noqa: E731
    monkeypatch.setattr(trt.ITimingCache, "serialize", longer)
    build()
    assert (tmp_path / "out/tensorrt.timing").read_bytes() == b"timing\0+++"


def test_refused_timing_cache_stays_when_float_engines_follow(tensorrt, build, tmp_path):
    tensorrt(TEN)
    path = tmp_path / "all.timing"
    path.write_bytes(b"another version's\0")
    result = build("--timing-cache", path)
    assert len(result.rows) > 2  # the float engines were built too
    assert path.read_bytes() == b"another version's\0"
    assert notes(result).count(f"{path} is not a timing cache") == 1


@pytest.mark.parametrize("version", [TEN, ELEVEN])
def test_float16_engine_is_typed_like_int8(tensorrt, build, tmp_path, version):
    trt = tensorrt(version)
    build()
    int8, fp32, fp16 = trt.STORY.networks
    assert int8.typed
    assert fp16.typed
    assert fp32.typed == (version == ELEVEN)
    assert flags(trt.STORY.configs[0]) == {"TF32"}
    has_float16 = []
    for network in trt.STORY.networks:
        types = {tensor.data_type for tensor in network.model.graph.initializer}
        has_float16.append(onnx.TensorProto.FLOAT16 in types)
    assert has_float16 == [True, False, True]
    operators = {node.op_type for node in fp16.model.graph.node}
    assert "Cast" in operators
    assert "QuantizeLinear" not in operators
    assert "DequantizeLinear" in {node.op_type for node in int8.model.graph.node}
    assert (tmp_path / "out/small_cnn.tensorrt.fp16.onnx").is_file()


@pytest.mark.parametrize("version", [TEN, ELEVEN])
def test_float_engines_use_the_unrepaired_model(tensorrt, build, tmp_path, version):
    trt = tensorrt(version)
    result = build("--repair", "adaround")
    sentences = notes(result).split(" / ")
    assert any("adaptive rounding" in sentence and "kept" in sentence for sentence in sentences)
    (output,) = result.rows["TensorRT FP32"]["accuracy"]["outputs"]
    assert float(output["sqnr_db"]) > 100
    plain = (tmp_path / "out/small_cnn.tensorrt.fp32.onnx").read_bytes()
    assert plain != (tmp_path / "out/small_cnn.tensorrt.onnx").read_bytes()
    assert trt.STORY.networks[1].model.SerializeToString() == plain
    narrow = result.rows["TensorRT FP16"]["accuracy"]["outputs"][0]
    assert float(narrow["sqnr_db"]) > 50  # of float16 alone


def test_fp8_is_compared_with_float_engines(tensorrt, build, tmp_path):
    trt = tensorrt(TEN)
    folder = Path(__file__).parents[1] / "datasets/fashion"
    data = {"model": folder / "fashion.onnx", "images": folder / "calib.txt"}
    result = build("--precision", "fp8", **data)
    assert list(result.rows)[1:] == ["TensorRT FP32", "TensorRT FP16", "fp8"]
    assert "of TensorRT FP16" in result.printed
    assert "planned nodes in fp8" in result.printed or "planned node in fp8" in result.printed
    fp32, fp16 = (n.model for n in trt.STORY.networks[1:])
    assert not any(n.op_type == "QuantizeLinear" for m in (fp32, fp16) for n in m.graph.node)
    assert (tmp_path / "out/fashion.tensorrt.fp32.onnx").is_file()


@pytest.mark.parametrize(
    ("baselines", "labels"),
    [("none", []), ("fp16", ["TensorRT FP16"]), ("fp32", ["TensorRT FP32"])],
)
def test_float_engines_can_be_left_out(tensorrt, build, tmp_path, baselines, labels):
    trt = tensorrt(TEN)
    result = build("--baselines", baselines)
    assert list(result.rows)[1:-1] == labels
    assert len(trt.STORY.configs) == 1 + len(labels)
    assert len(list(tmp_path.glob("out/*.engine"))) == 1 + len(labels)
    assert ("speed of TensorRT" in result.printed) == bool(labels)


def test_no_float_engines_without_timing(tensorrt, build):
    trt = tensorrt(TEN)
    result = build("--duration", "0")
    assert len(trt.STORY.configs) == 1
    assert list(result.rows) == ["FP32 on the CPU", "int8"]
    assert "to compare with" not in notes(result)
    result = build("--duration", "0", "--baselines", "fp16")
    assert "no fp16 engine" in notes(result)
    assert "no speed is measured" in notes(result)


def test_failed_float_engine_becomes_a_note(tensorrt, build, monkeypatch):
    tensorrt(TEN)
    build_unchanged = builder.build_engine

    def fail_float16(model, settings, **options):
        if not settings.int8 and settings.fp16:
            raise BackendError("no tactic was found")
        return build_unchanged(model, settings, **options)

    monkeypatch.setattr(builder, "build_engine", fail_float16)
    result = build()
    assert "no TensorRT FP16 engine" in notes(result)
    assert "no tactic was found" in notes(result)
    ratio = "3.00x (3.00 to 3.00)"
    assert f"{ratio} the speed of TensorRT FP32" in result.md
    assert line(result, "Latency p50")[-1] == f"{ratio} of TensorRT FP32"


def test_unopenable_float_engine_becomes_a_note(tensorrt, build, monkeypatch):
    tensorrt(TEN)
    open_session = TensorrtSession.open

    def fail_float16(path, **options):
        if path.name.endswith(".fp16.engine"):
            raise BackendError("out of memory")
        return open_session(path, **options)

    monkeypatch.setattr(TensorrtSession, "open", fail_float16)
    result = build()
    assert result.rows["TensorRT FP16"]["notes"] == ["out of memory"]
    assert "latency" not in result.rows["TensorRT FP16"]
    assert "latency" in result.rows["int8"]
    assert not result.report["targets"][0]["error"]
    assert result.code == 0


def test_speedup_and_stages_in_every_report(tensorrt, build):
    tensorrt(TEN)
    result = build()
    change = "1.67x (1.67 to 1.67) of TensorRT FP16, 3.00x of TensorRT FP32"
    assert line(result, "Latency p50")[-1] == change
    assert change in result.printed
    assert change in result.html
    assert f"<span>Latency p50, int8: {change}</span>" in result.html
    assert result.html.count('class="wide"') == 2  # an axis for the CPU, one for the GPU
    assert "speed of FP32" not in result.md + result.html + result.printed
    for label, value in {"Enqueue": "0.125 ms", "H2D": "0.300 ms", "D2H": "0.200 ms"}.items():
        assert line(result, label)[:4] == ["-", value, value, value]
        assert f"<td>{label}</td>" in result.html
        assert label not in result.printed
    assert line(result, "GPU compute")[:4] == ["-", "4.00 ms", "2.00 ms", "1.00 ms"]
    latency = result.rows["int8"]["latency"]
    assert (latency["h2d"]["median"], latency["enqueue"]["median"]) == (0.3, 0.125)


def test_check_times_the_built_engine_on_its_gpu(tensorrt, build, run, pictures, tmp_path):
    tensorrt(TEN)
    build()
    out = tmp_path / "out"
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    arguments = ("check", out, "--images", pictures, "--duration", "0.01", "--min-speedup", 2)
    code, printed, err = run(*arguments)
    assert code == 3, err
    assert "1.67x (1.67 to 1.67) the speed of TensorRT FP16, below the limit of 2x" in " ".join(
        printed.split()
    )
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    ("min_speedup", "options", "code", "start"),
    [
        (1.5, (), 0, "1.67x (1.67 to 1.67) the speed of TensorRT FP16, within the limit of 1.5x"),
        (2, (), 3, "1.67x (1.67 to 1.67) the speed of TensorRT FP16, below the limit of 2x"),
        (2, ("--baselines", "fp32"), 0, "3.00x (3.00 to 3.00) the speed of TensorRT FP32, "),
        (2, ("--baselines", "none"), 0, "its speed, 2x that of a float engine on its device at"),
    ],
)
def test_required_speedup_is_over_gpu_float16(tensorrt, build, min_speedup, options, code, start):
    tensorrt(TEN)
    result = build("--min-speedup", min_speedup, "--max-loss", 0.9, *options)
    reasons = result.rows["int8"]["verdict"]["reasons"]
    assert result.code == code
    assert any(reason.startswith(start) for reason in reasons)


def test_gpu_verdict_names_float16_and_size(tensorrt, build, monkeypatch):
    tensorrt(TEN)
    for times in (COMPUTE_MS, COPY_MS):
        for key in times:
            monkeypatch.setitem(times, key, 0.01)
    monkeypatch.setitem(COMPUTE_MS, "int8", 0.02)
    verdict = build().rows["int8"]["verdict"]
    assert verdict["level"] == "keep FP32"
    reason = "int8 has 0.75x (0.75 to 0.75) the speed of TensorRT FP16 on this device"
    assert verdict["reasons"][0] == f"{reason}, and its file is 1.41x smaller"


def test_gpu_and_cpu_speedups_are_independent(tensorrt, build, monkeypatch):
    tensorrt(TEN)
    result = build("--min-speedup", "1000", "--accept", target="onnxruntime,tensorrt")
    for name, rival in (("onnxruntime", "FP32"), ("tensorrt", "TensorRT FP16")):
        end = f" the speed of {rival}, below the limit of 1000x"
        assert any(reason.endswith(end) for reason in result.rows[name]["verdict"]["reasons"])
    assert line(result, "Latency p50")[-1] == ""  # several ratios: each verdict tells its own
    rounds, measure_rounds = [], timing.measure
    list_rounds = lambda s, *a, **k: rounds.append(list(s)) or measure_rounds(s, *a, **k)  # noqa: E731
    monkeypatch.setattr(measure, "measure", list_rounds)
    build()
    assert rounds == [["FP32"], ["TensorRT FP32", "TensorRT FP16", "tensorrt"]]


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """nvidia-smi, for those who ask for the driver."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n[ $1 = --query-gpu=driver_version ] && echo 550.54.15\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    session.driver_version.cache_clear()
    yield
    session.driver_version.cache_clear()


def test_report_head_names_gpu_and_versions(smi, tensorrt, build, run, tmp_path):
    tensorrt(TEN)
    result = build("--baselines", "none")
    (device,) = result.report["machine"]["devices"]
    assert device["driver"] == "550.54.15"
    assert device["runtime"] == f"TensorRT {TEN}"
    device_line = f"Fake H200 sm_90, driver 550.54.15, CUDA 13.0, TensorRT {TEN}"
    heads = result.md.index("Device: "), result.html.index(device_line)
    tables = result.md.index("## "), result.html.index("<table")
    assert all(head < table for head, table in zip(heads, tables, strict=True))
    assert f"\nDevice        {device_line}\n" in result.printed
    assert device_line in result.md.replace("\\", "")
    code, output, _ = run(
        "bench", tmp_path / "out/small_cnn.engine", "--duration", 0, "--warm-up", 0
    )
    assert code == 0
    assert device_line in output
    assert "H2D" in output
    assert "Machine" in output


def test_float_engines_use_the_same_gpu(tensorrt, build, tmp_path):
    trt = tensorrt(TEN)
    result = build("--device", 1)
    key = json.loads((tmp_path / "out/small_cnn.fp16.engine.json").read_text())
    assert key["gpu"] == "Fake L4 sm_90"
    assert trt.STORY.devices == [1, 1, 1]
    assert set(trt.STORY.runs) == {1}
    assert result.report["machine"]["devices"][0]["name"] == "Fake L4 sm_90"


def test_unknown_driver_version_is_omitted(tensorrt, build, tmp_path, monkeypatch):
    tensorrt(TEN, "cuda-python")
    session.driver_version.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"Fake H200 sm_90, CUDA 13.0, TensorRT {TEN}" in build("--duration", "0").printed
    session.driver_version.cache_clear()


def test_report_omits_gpu_without_one(build, monkeypatch):
    def missing(*_):
        raise SdkMissingError("no GPU in this test")

    monkeypatch.setattr(sdk, "find_sdk", missing)
    result = build()
    assert list(result.rows) == ["FP32", "int8"]
    assert result.report["machine"]["devices"] == []
    for word in ("Device", "H2D", "Reformats", "In the engine", "TensorRT FP16", "the speed of"):
        assert word not in result.md
        assert word not in result.printed


@pytest.mark.parametrize("version", [EIGHT, TEN, ELEVEN])
def test_report_compares_plan_and_engine_precision(tensorrt, build, version):
    tensorrt(version)
    result = build()
    ran = result.rows["int8"]["ran"]
    assert (ran["planned"], ran["precisions"]["int8"]) == (9, 4)
    assert {row["node"]: row["ran"] for row in ran["lost"]} == {
        "Add_a": "float16",
        "Relu_r2": "float16",
        "MaxPool_p": "float16",
    }
    assert "planned" not in result.rows["TensorRT FP16"]["ran"]
    summary = f"6 of 9 planned nodes in int8; {ran['reformats']} reformats"
    assert all(summary in page for page in (result.printed, result.md, result.html))
    assert "| Add_a | Add | int8 | float16 |" in result.md
    assert "Add_a" not in result.printed
    cells = re.sub(r' data-head="[^"]*"', "", result.html)
    assert "<td>Add_a</td><td>Add</td><td>int8</td><td>float16</td>" in cells
    assert line(result, "Quantized layers")[1:4] == [
        f"0 of {result.rows['TensorRT FP32']['ran']['layers']}",
        f"0 of {result.rows['TensorRT FP16']['ran']['layers']}",
        f"4 of {ran['layers']}",
    ]
    assert line(result, "Reformats")[3] == str(ran["reformats"]) != "0"


def test_engine_of_layer_names_is_unchecked(tensorrt, build, run, tmp_path):
    tensorrt(TEN)
    build("--duration", "0")
    path = tmp_path / "out/small_cnn.engine"
    output = run("bench", path, "--duration", 0, "--warm-up", 0)[1]
    assert "Quantized layers" in output
    assert re.search(r"Quantized layers +4 of \d+", output)
    path.write_bytes(path.read_bytes().replace(b'"detailed": true', b'"detailed": false', 1))
    output = run("bench", path, "--duration", 0, "--warm-up", 0)[1]
    assert "GPU compute" in output
    assert "Quantized layers" not in output


def layer(name, kind, form, **fields):
    tensors = [{"Name": "x", "Format/Datatype": form}] if form else []
    return {"Name": name, "LayerType": kind, "Inputs": tensors, "Outputs": [], **fields}


def test_inspector_output_is_parsed():
    layers = parse_layers(
        json.dumps(
            {
                "Layers": [
                    layer(
                        "w + Q_1 + /a/Conv + /b/Add",
                        "CaskConvolution",
                        "Thirty-two wide channel vectorized row major Int8 format",
                    ),
                    layer(
                        "c || d + e",
                        "CaskConvolution",
                        "Channel major FP16 format where channel % 8 == 0.",
                    ),
                    layer("PWN(PWN(s), m)", "PointWiseV2", "Row major linear BFloat16 format"),
                    layer(
                        "__myl_Fc",
                        "fusion",
                        "Half",
                        Metadata="[ONNX Layer: g[0]/MatMul][ONNX Layer: h]",
                    ),
                    layer("i", "gemm", "FP8", Metadata="[ONNX Layer: i]\u001e[ONNX Layer: j]"),
                    layer(
                        "Reformatting CopyNode for x",
                        "Reformat",
                        "Row major linear FP32",
                        Metadata="",
                    ),
                    layer("n", "NoOp", "Float"),
                    layer("k", "Constant", ""),
                    layer("u", "Shuffle", "Row major linear UInt8 format"),
                    layer("t", "gemm", "")
                    | {"Inputs": [{"Format": "Row major", "Datatype": "Int8"}]},
                    layer("p", "PluginV2", "Unknown"),
                    layer("{ForeignNode[/a/Conv.../b/Add + r]}", "DLA", "Int8"),
                    layer("{ForeignNode[c]}", "DLA", ""),
                    layer(
                        "{ForeignNode[d...f]}",
                        "Myelin",
                        "Half",
                        Metadata="[ONNX Layer: d][ONNX Layer: f]",
                    ),
                ],
                "Bindings": ["x"],
            }
        )
    )
    assert [(row.precision, row.nodes, row.reformat) for row in layers] == [
        ("int8", ("w", "Q_1", "/a/Conv", "/b/Add"), False),
        ("float16", ("c", "d", "e"), False),
        ("bfloat16", ("s", "m"), False),
        ("float16", ("g[0]/MatMul", "h"), False),
        ("fp8", ("i", "j"), False),
        ("float32", ("Reformatting CopyNode for x",), True),
        ("uint8", ("u",), False),
        ("int8", ("t",), False),
        ("", ("p",), False),
        ("", (), False),
        ("", ("c",), False),
        ("", ("d", "f"), False),
    ]
    blocks = [(row.block, row.end_nodes) for row in layers[-3:]]
    assert blocks == [("DLA", ("/a/Conv", "r")), ("DLA", None), ("Myelin", None)]
    assert {parse_layers(text) for text in ('{"Layers": ["a", "b"]}', "no JSON", "[]")} == {()}


def test_nodes_are_sorted_by_engine_outcome(wording):
    plan = [Decision(*text.split(), "int8") for text in ("a Conv", "r Relu", "b Add")]
    plan += [Decision(*text.split(), "float32", "why") for text in ("p MaxPool", "s Softmax")]
    ran = {"a": "int8", "b": "float16", "p": "int8", "s": "float32"}
    layers = [EngineLayer(name=n, precision=kind, nodes=(n,)) for n, kind in ran.items()]
    layers.append(EngineLayer(name="copy", precision="float32", reformat=True))
    part = compare_with_plan(layers, plan)
    assert (part.as_planned, part.planned, part.unnamed) == (1, 3, ("r",))
    assert [row.node for row in part.lost] == ["b"]
    assert [row.node for row in part.gained] == ["p"]
    assert part.layers == 4
    assert part.reformats == 1
    wording.check(engine_layers_text(part))
    assert compare_with_plan((), plan) is None
    assert engine_layers_text(compare_with_plan(layers)) == ""
    blocks = [replace(layers[0], block="DLA", precision="", nodes=(), end_nodes=("a", "r"))]
    part = compare_with_plan([*blocks, *layers[1:3]], plan)  # b in float16, p in int8
    assert (part.as_planned, part.inside, part.unnamed) == (0, ("a", "r"), ())
    wording.check(engine_layers_text(part))
    assert quantized_layers(part) == "1 of 2, and 1 DLA loadable"
    blocks = [*blocks, replace(blocks[0], end_nodes=("b", "b_QuantizeLinear"))]
    part = compare_with_plan(blocks, plan)
    wording.check(engine_layers_text(part))
    assert part.inside == ("a", "r", "b")
    wording.check(quantized_layers(part))
    silent = compare_with_plan([replace(row, precision="") for row in layers], plan)
    assert engine_layers_text(silent) == ""
    assert quantized_layers(silent) == quantized_layers(part)
