"""Times of kernels, counted to the nodes that they came from."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from deploy.frontends import load
from deploy.runtimes import ort
from deploy.tuning import timing
from deploy.tuning.timing import KernelTimes, attribute_kernels, kernel_times, least_kernel_times
from tests.vendor_models import build_net

FEEDS = [{"x": np.ones((1, 16, 64, 64), np.float32)}]


def model_of(*nodes):
    """Relus by (name, output)."""
    relus = [("Relu", "x", output, name) for name, output in nodes]
    return build_net(relus, {"x": [1]}, {nodes[-1][1]: [1]})


@pytest.mark.parametrize(
    ("kernel", "node"),
    [
        ("/c1_output_0_nchwc", "/c1"),  # its output's name, and what the optimizer added
        ("/c1_token_19", "/c1"),
        ("/c1/conv/Conv_token_3", "/c1/conv/Conv"),  # the longest of two that fit
        ("/c1/other/Conv_token_3", "/c1"),
        ("fused /c1/conv/Conv", "/c1/conv/Conv"),
        ("logits", "/fc/Gemm"),
        *((of_none, "") for of_none in ("/c10_token_3", "/c12", "ReorderOutput_token_3", "")),
    ],
)
def test_kernel_belongs_to_longest_name_prefix(kernel, node):
    outputs = {"/c1": "/c1_output_0", "/c1/conv/Conv": "/c1/conv/y", "/fc/Gemm": "logits"}
    times = attribute_kernels({kernel: 5.0}, model_of(*outputs.items()))
    assert times.nodes == {name: 5.0 * (name == node) for name in outputs}
    assert times.unattributed == (0.0 if node else 5.0)
    assert times.total == 5.0


def test_pairs_take_only_their_kernels():
    model = model_of(("/c1", "t"))
    time_by_kernel = {"/c1_nchwc": 2.0, "t/Q_token_1": 3.0, "/c1_token_2": 4.0, "Reorder": 1.0}
    times = attribute_kernels(time_by_kernel, model, ["t/Q", "t/DQ"])
    assert times.nodes == {"/c1": 6.0, "t/Q": 3.0, "t/DQ": 0.0}
    assert (times.unattributed, times.total) == (1.0, 10.0)
    times = attribute_kernels({"_token_1": 2.0}, model_of(("", "t")))
    assert times.unattributed == 2.0


def turned_model():
    """Conv, Transpose, Relu and back; an Add of what two Convs give."""
    nodes = [
        ("Conv", "x w", "c", "/c"),
        ("Transpose", "c", "t", "/t", {"perm": [0, 2, 3, 1]}),
        ("Relu", "t", "r", "/r"),
        ("Transpose", "r", "u", "/u", {"perm": [0, 3, 1, 2]}),
        ("Conv", "u w", "d", "/d"),
        ("Add", "d u", "y", "/a"),
    ]
    shape, weight = [1, 16, 64, 64], np.random.default_rng(0).normal(size=(16, 16, 1, 1))
    return build_net(nodes, {"x": shape}, {"y": shape}, {"w": weight}, opset=17)


@pytest.mark.parametrize(
    ("kernel", "kind", "node"),
    [
        ("/r_nchwc", "Conv", "/c"),
        ("r_nchwc", "FusedConv", "/c"),
        ("/r_token_1", "Relu", "/r"),
        ("/d_nchwc", "Conv", "/d"),
        ("/a_nchwc", "Conv", "/a"),  # either of two
    ],
)
def test_layer_named_by_reader_is_timed(kernel, kind, node):
    layers = [kernel] if "Conv" in kind else []
    times = attribute_kernels({kernel: 5.0}, turned_model(), weighted=layers)
    assert [name for name, time in times.nodes.items() if time] == [node]


def chain(*kinds):
    """Nodes /0, /1 ... of these operators after one another; an Add reads another Conv too."""
    nodes, tensor = [("Conv", "x w", "b", "/beside")], "x"
    for index, kind in enumerate(kinds):
        second_input = {"Conv": " w", "Add": " b"}.get(kind, "")
        nodes.append((kind, tensor + second_input, f"t{index}", f"/{index}"))
        tensor = f"t{index}"
    return build_net(nodes, {"x": None}, {tensor: None}, opset=17)


@pytest.mark.parametrize(
    ("kinds", "time_by_kernel", "owner"),
    [
        (("Conv", "LeakyRelu"), {"t1_nchwc": 5.0}, "/0"),
        (("Conv", "Add", "Relu"), {"t2_nchwc": 5.0, "b_nchwc": 1.0}, "/0"),
        (("Conv", "Add", "Relu"), {"t2_nchwc": 5.0}, "/2"),  # of two Convs nobody knows which
        (("Conv", "Relu", "BatchNormalization"), {"t2_bn_nchwc": 5.0, "t1_nchwc": 1.0}, "/2"),
        (("Relu", "Conv"), {"t1_nchwc": 5.0}, "/1"),
    ],
)
def test_fused_kernel_counts_for_its_layer(kinds, time_by_kernel, owner):
    model = chain(*kinds)
    times = attribute_kernels(time_by_kernel, model, weighted=time_by_kernel)
    assert times.nodes[owner] == 5.0
    assert times.total == sum(time_by_kernel.values())
    other_times = attribute_kernels(time_by_kernel, model)  # these stay where they are
    assert other_times.nodes.get("/0", 0.0) == 0.0


def test_float_layer_keeps_its_time():
    weight = np.random.default_rng(0).normal(size=(16, 16, 3, 3))
    nodes = [("Conv", "x w", "c", "/conv"), ("LeakyRelu", "c", "l", "/act")]
    nodes.append(("Tanh", "l", "y", "/tanh"))
    model = build_net(nodes, {"x": [1, 16, 64, 64]}, {"y": None}, {"w": weight}, opset=17)
    times = kernel_times(model, FEEDS, float_model=model, runs=2)
    assert times.nodes["/conv"] > 0
    assert times.nodes["/act"] == 0


def test_kernel_time_skips_two_warmup_runs(monkeypatch, tmp_path):
    def end_trace():
        kernel = {"name": "/c1_kernel_time", "args": {"op_name": "Conv"}}
        events = [{"cat": "Node", "dur": time, **kernel} for time in [1, 1, 9, 7, 8][: len(runs)]]
        events += [{"cat": "Node", "name": "/c1_fence_before", "dur": 0}]
        events += [{"cat": "Session", "name": "/c1_kernel_time", "dur": 0}]
        (tmp_path / "trace.json").write_text(json.dumps(events))
        return str(tmp_path / "trace.json")

    runs = []
    session = SimpleNamespace(run=runs.append, end_trace=end_trace)
    monkeypatch.setattr(ort.OrtSession, "open", lambda *_, **__: session)
    model = model_of(("/c1", "t"))
    assert kernel_times(model, [{}], float_model=model, runs=3).nodes == {"/c1": 7.0}


def test_small_model_is_run_more_often(monkeypatch):
    counted = []

    def profiled(*args, **named):
        events = ort.profile_kernels(*args, **named)
        counted.append(Counter(name for name, _, _ in events))
        return events

    monkeypatch.setattr(timing, "profile_kernels", profiled)
    model = turned_model()
    kernel_times(model, FEEDS, float_model=model, runs=2)
    kernel_times(model, FEEDS, float_model=model, runs=2, seconds=1e9)
    assert [set(counts.values()) for counts in counted] == [{4}, {64}]


def test_least_times_of_two_profiles_count():
    first_times = KernelTimes({"a": 1.0, "b": 4.0}, 2.0)
    second_times = KernelTimes({"a": 3.0, "b": 2.0}, 1.0)
    assert least_kernel_times(first_times, second_times) == KernelTimes({"a": 1.0, "b": 2.0}, 1.0)


# In float a layer's kernel has the name of the Relu fused into it, in int8 its own.
LAYERS = [("Conv_c1", "Relu_r1"), ("Conv_c2", "Add_a"), ("Conv_c3", "Relu_r3"), ("Gemm_logits",)]


def assert_layers_are_timed(times):
    for layer in LAYERS:
        assert sum(times.nodes[name] for name in layer) > 0


def test_real_profile_times_every_layer(small_cnn):
    model = load(small_cnn).model
    feeds = [{"x": np.ones((1, 3, 16, 16), np.float32)}]
    times = kernel_times(model, feeds, float_model=model, runs=2)
    assert set(times.nodes) == {node.name for node in model.graph.node}
    assert_layers_are_timed(times)
    model = turned_model()
    times = kernel_times(model, FEEDS, float_model=model, runs=2)
    assert times.nodes["/c"] > 0
    assert times.nodes["/d"] > 0


def test_int8_profile_times_pairs_and_layers(small_cnn, tmp_path):
    from calib8 import build
    from deploy.tuning.search_options import Tuning

    feed = [np.ones((1, 3, 16, 16), np.float32) * step for step in (1, 2)]
    build(small_cnn, feed, out=tmp_path, duration_s=0, tuning=Tuning(effort=0))
    int8 = onnx.load(tmp_path / "small_cnn.int8.onnx")
    times = kernel_times(int8, [{"x": feed[0]}], float_model=load(small_cnn).model, runs=2)
    pairs = {node.name for node in int8.graph.node if node.op_type in timing.PAIRS}
    assert pairs
    assert pairs < set(times.nodes)
    assert any(times.nodes[name] > 0 for name in pairs)
    assert_layers_are_timed(times)
