"""A TensorRT cache made on the CPU, held against tables that TensorRT wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibrators.histogram import Histogram
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.trt_cache import CalibrationCache, dump, parse
from deploy.method import Method
from deploy.pipeline import calibrate

LENET = Path(__file__).parents[1].parent / "shared" / "golden" / "tensorrt" / "lenet"
NEEDS_LENET = pytest.mark.skipif(not LENET.exists(), reason=f"no golden LeNet at {LENET}")


@dataclass
class Made:
    """A cache and what it was made from."""

    cache: CalibrationCache
    statistics: dict[str, Histogram]
    notes: tuple[str, ...]


def made_of(
    model: Path | onnx.ModelProto,
    samples: Iterable[dict[str, np.ndarray]],
    folder: Path,
    version: str,
    method: Method,
    threads: int = 2,
) -> Made:
    path = folder / "m.cache"
    policy = CachePolicy(path=path, trt_version=version, refresh=True)
    found = calibrate(
        model, samples, targets=["tensorrt"], method=method, cache=policy, threads=threads
    )
    statistics = {o.tensor: found.ranges.histogram(o) for o in found.searched}
    return Made(parse(path.read_bytes(), origin="m.cache"), statistics, found.notes)


def lenet(folder: Path, method: Method) -> Made:
    images = np.load(LENET / "images.npz")["images"].astype(np.float32)[:, None] / np.float32(255)
    return made_of(LENET / "lenet.onnx", images, folder, "7.2.2", method)


OWN = Method.of("entropy-tensorrt", {"batch_size": 50})


def indices(calibration: Made, cache: CalibrationCache) -> list[int]:
    """Grid index of every entry, from its scale: T = (i + 0.5) * R / 2048."""
    ranges = {name: h.full_range for name, h in calibration.statistics.items()}
    sources = ["data", "conv1", "conv1", "conv2", "conv2", "fc1", "ip1", "ip2", "prob"]
    return [
        round(float(entry.scale) * 127 * 2048 / ranges[source] - 0.5)
        for entry, source in zip(cache.entries, sources, strict=True)
    ]


@NEEDS_LENET
def test_lenet_is_reproduced_entry_for_entry(tmp_path: Path) -> None:
    real = parse((LENET / "table.cache").read_bytes(), origin="table.cache")
    made = lenet(tmp_path, OWN)
    assert dump(made.cache).splitlines()[0] == b"TRT-7202-EntropyCalibration2"
    assert [e.name for e in made.cache.entries] == [e.name for e in real.entries]
    assert indices(made, made.cache) == [2040, 704, 704, 962, 962, 1153, 1155, 1289, 1081]
    assert indices(made, real) == indices(made, made.cache)
    for ours, theirs in zip(made.cache.entries, real.entries, strict=True):
        assert abs(ours.bits - theirs.bits) <= 8, ours.name  # each CPU sums in its own order


@NEEDS_LENET
def test_minmax_is_the_largest_value_and_legacy_has_its_own_form(tmp_path: Path) -> None:
    made = lenet(tmp_path, Method.of("minmax"))
    assert made.cache.header.text == "TRT-7202-MinMaxCalibration"
    assert made.cache.scales()["data"] == np.float32(1 / 127)
    legacy = lenet(tmp_path, Method.of("legacy"))
    assert legacy.cache.header.text == "03ff00000000000003feffffde7210be9"
    assert legacy.cache.scales()["data"] == np.float32(1 / 127)


@NEEDS_LENET
def test_order_independent_differs_from_tensorrts_rule_by_little(tmp_path: Path) -> None:
    faithful = lenet(tmp_path, OWN).cache.scales()
    for name, scale in lenet(tmp_path, Method.of("entropy")).cache.scales().items():
        assert abs(float(scale) / float(faithful[name]) - 1) < 0.1, name


def residual() -> onnx.ModelProto:
    """Conv + BatchNormalization, a dead branch, a mask with infinity, a Gemm."""
    rng = np.random.default_rng(3)
    weights = {
        "w": rng.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "s": np.full(4, 2, np.float32),
        "o": np.zeros(4, np.float32),
        "m": np.zeros(4, np.float32),
        "v": np.ones(4, np.float32),
        "none": np.zeros((1, 4, 1, 1), np.float32),
        "inf": np.full((1, 4, 1, 1), -np.inf, np.float32),
        "fc": rng.standard_normal((4, 2)).astype(np.float32),
        "fb": np.ones(2, np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "/conv", kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["c", "s", "o", "m", "v"], ["n"], "/bn"),
        helper.make_node("Relu", ["n"], ["r"], "/relu"),
        helper.make_node("Mul", ["r", "none"], ["dead"], "/dead"),
        helper.make_node("Min", ["dead", "inf"], ["mask"], "/mask"),
        helper.make_node("Max", ["r", "mask"], ["kept"], "/kept"),
        helper.make_node("GlobalAveragePool", ["kept"], ["p"], "/pool"),
        helper.make_node("Flatten", ["p"], ["f"], "/flat"),
        helper.make_node("Gemm", ["f", "fc", "fb"], ["y"], "/fc/Gemm"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 13)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8, producer_name="test")


def samples() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    for _ in range(6):
        yield {"x": rng.standard_normal((1, 3, 6, 6)).astype(np.float32)}


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Made]:
    def make(name: str = "entropy-tensorrt", **given: int) -> Made:
        return made_of(residual(), samples(), tmp_path, "10.3.0", Method.of(name, given))

    return make


def test_what_stands_in_a_cache_of_10(made: Callable[..., Made]) -> None:
    scales = made(batch_size=2).cache.scales()
    assert list(scales) == [
        *("x", "c", "n", "r", "dead", "mask", "kept", "p", "f", "/fc/Gemm_output", "y")
    ]
    assert scales["n"] == np.float32(2) * scales["c"] or abs(scales["n"] / scales["c"] - 2) < 1e-3
    assert scales["p"] == scales["kept"]
    assert scales["dead"] == 0
    assert np.isinf(scales["mask"])


def test_other_methods_look_at_the_cleaned_model_and_share_its_names(
    made: Callable[..., Made],
) -> None:
    assert list(made("mse").cache.scales()) == [
        "x",
        "n",
        "r",
        "dead",
        "mask",
        "kept",
        "p",
        "f",
        "y",
    ]


def test_the_product_of_a_gemm_is_what_it_gives_before_its_bias(made: Callable[..., Made]) -> None:
    found = made(batch_size=2)
    products = found.statistics["/fc/Gemm_output"]
    outputs = found.statistics["y"]
    assert np.isclose(outputs.maximum - products.maximum, 1, atol=1e-5)
    assert np.isclose(outputs.minimum - products.minimum, 1, atol=1e-5)


@pytest.mark.slow
def test_order_independent_caches_do_not_depend_on_threads_or_order(tmp_path: Path) -> None:
    feeds = (list(samples()), list(samples())[::-1])
    texts = {
        dump(made_of(residual(), f, tmp_path, "8.5.3", Method.of("entropy"), threads).cache)
        for f in feeds
        for threads in (1, 2)
    }
    assert len(texts) == 1


def test_tensorrts_own_rule_does_not_depend_on_threads(tmp_path: Path) -> None:
    own = Method.of("entropy-tensorrt", {"batch_size": 2})
    texts = {
        dump(made_of(residual(), samples(), tmp_path, "8.5.3", own, threads).cache)
        for threads in (1, 2, 3)
    }
    assert len(texts) == 1
