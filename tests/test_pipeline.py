import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibrators.searches import SEARCHES
from deploy.calibration import trt_cache
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.store import load as load_calibration
from deploy.calibration.store import sidecars
from deploy.errors import CacheError, ConfigError
from deploy.feed.preprocess import Preprocess
from deploy.method import Method
from deploy.pipeline import build, calibrate
from deploy.tuning.search_options import Tuning

UNIT = Preprocess(size=(16, 16))


@pytest.fixture
def calibrated(small_cnn, pictures, tmp_path):
    """A calibration in a fresh folder, and its cache's path."""
    cache = tmp_path / "m.cache"
    return calibrate(small_cnn, pictures, preprocess=UNIT, cache=cache), cache


def files(cache: Path) -> list[bytes]:
    return [p.read_bytes() for p in (cache, *sidecars(cache))]


@pytest.mark.parametrize("method", SEARCHES)
def test_every_method_builds_an_engine_that_is_close(small_cnn, pictures, tmp_path, method):
    report = build(
        small_cnn, pictures, preprocess=UNIT, method=method, out=tmp_path, duration_s=0,
        tuning=Tuning(effort=0),
    )  # fmt: skip
    (engine,) = [e for e in report.engines if not e.reference]
    assert engine.accuracy.outputs[0].sqnr_db > (6 if "entropy" in method else 20)
    onnx.checker.check_model(onnx.load(engine.path), full_check=True)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["calibration"]["method"].startswith(method)
    assert all(row["precision"] == "uint8" for row in written["targets"][0]["nodes"])


def test_threads_leave_every_byte_as_it_is(small_cnn, pictures, tmp_path):
    for method in ("minmax", "entropy", "percentile", "mse"):
        seen = set()
        for threads in (1, 2, 3):
            cache = tmp_path / f"{method}-{threads}" / "m.cache"
            calibrate(
                small_cnn, pictures, preprocess=UNIT, method=method, threads=threads, cache=cache
            )
            seen.add(tuple(files(cache)))
        assert len(seen) == 1, method


def test_a_fitting_cache_is_reused_and_not_touched(small_cnn, pictures, calibrated):
    first, cache = calibrated
    assert not first.reused and "does not exist yet" in first.reason
    before = files(cache)
    second = calibrate(small_cnn, pictures, preprocess=UNIT, cache=cache)
    assert second.reused and files(cache) == before
    assert second.found.scales.to_json() == first.found.scales.to_json()


def test_another_method_is_searched_without_running_the_model(
    small_cnn, pictures, calibrated, tmp_path, monkeypatch
):
    _, cache = calibrated
    fresh = tmp_path / "fresh" / "m.cache"
    calibrate(small_cnn, pictures, preprocess=UNIT, method="entropy", cache=fresh)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("deploy.pipeline.observing.observe", refuse)
    again = calibrate(small_cnn, pictures, preprocess=UNIT, method="entropy", cache=cache)
    assert "the model was not run" in again.reason
    assert files(cache) == files(fresh)


def changed_weight(small_cnn: Path, folder: Path) -> Path:
    model = onnx.load(small_cnn)
    weight = numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight.flat[0] = np.nextafter(weight.flat[0], np.float32(np.inf))
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(weight, model.graph.initializer[0].name)
    )
    onnx.save(model, folder / "changed.onnx")
    return folder / "changed.onnx"


def test_one_weight_one_image_or_the_mean_makes_it_stale(small_cnn, pictures, calibrated, tmp_path):
    _, cache = calibrated
    kept = files(cache)

    def stale(model: Path, images: Path, how: Preprocess) -> str:
        result = calibrate(model, images, preprocess=how, cache=cache)
        assert not result.reused
        for path, data in zip((cache, *sidecars(cache)), kept, strict=True):
            path.write_bytes(data)
        return result.reason

    assert "weights or graph" in stale(changed_weight(small_cnn, tmp_path), pictures, UNIT)
    copied = tmp_path / "copied"
    shutil.copytree(pictures, copied)
    first = copied / "00.png"
    first.write_bytes(first.read_bytes() + b"\0")
    assert "the images changed (sha256)" in stale(small_cnn, copied, UNIT)
    (copied / "00.png").unlink()
    assert "count 20 -> 19" in stale(small_cnn, copied, UNIT)
    other = replace(UNIT, mean=(0.5,))
    assert "the preprocessing changed (mean" in stale(small_cnn, pictures, other)


def test_the_cache_can_be_required_refreshed_and_trusted(small_cnn, pictures, calibrated):
    _, cache = calibrated
    required = CachePolicy(path=cache, require=True)
    assert calibrate(small_cnn, pictures, preprocess=UNIT, cache=required).reused
    with pytest.raises(CacheError, match=r"--require-cache.*mean"):
        calibrate(small_cnn, pictures, preprocess=replace(UNIT, mean=(0.5,)), cache=required)
    refreshed = CachePolicy(path=cache, refresh=True)
    assert not calibrate(small_cnn, pictures, preprocess=UNIT, cache=refreshed).reused
    for sidecar in sidecars(cache):
        sidecar.unlink()
    with pytest.raises(CacheError, match="--force"):
        calibrate(small_cnn, pictures, preprocess=UNIT, cache=cache)
    forced = CachePolicy(path=cache, force=True)
    alone = calibrate(small_cnn, pictures, preprocess=UNIT, cache=forced)
    assert not alone.reused and "no fingerprint" in alone.reason
    for sidecar in sidecars(cache):
        sidecar.unlink()
    trusted = calibrate(
        small_cnn, pictures, preprocess=UNIT, cache=CachePolicy(path=cache, trust=True)
    )
    assert trusted.reused and trusted.ranges.trusted is not None
    scales = trusted.found.scales
    assert scales["r1"].lo == 0 and scales["c2"].lo < 0  # a Relu's output cannot be negative
    assert not any(sidecar.exists() for sidecar in sidecars(cache))


def test_a_trusted_cache_that_lacks_tensors_leaves_their_nodes_float(
    small_cnn, pictures, calibrated, tmp_path
):
    _, cache = calibrated
    text = cache.read_bytes().splitlines(keepends=True)
    short = tmp_path / "short.cache"
    short.write_bytes(b"".join(line for line in text if not line.startswith(b"c2")))
    report = build(
        small_cnn,
        pictures,
        preprocess=UNIT,
        cache=CachePolicy(path=short, trust=True),
        out=tmp_path,
        duration_s=0,
    )
    reasons = {n.name: n.reason for n in report.targets[0].nodes if not n.quantized}
    assert "c2" in reasons["Conv_c2"] and "short.cache" in reasons["Conv_c2"]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_cache_is_told_and_made_anew(small_cnn, pictures, calibrated, which, damage):
    _, cache = calibrated
    good = files(cache)
    path = (cache, *sidecars(cache))[which]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x5A
    path.write_bytes(
        {"cut": bytes(data[: len(data) // 3]), "flipped": bytes(data), "empty": b"",
         "foreign": b'{"a": [1, 2]}'}[damage]
    )  # fmt: skip
    result = calibrate(small_cnn, pictures, preprocess=UNIT, method="minmax", cache=cache)
    assert not result.reused and result.reason
    assert load_calibration(cache).fingerprint.method == "minmax"
    calibrate(small_cnn, pictures, preprocess=UNIT, cache=cache)
    assert files(cache) == good


def test_a_dead_tensor_is_told_and_its_nodes_stay_float(small_cnn, pictures, tmp_path):
    model = onnx.load(small_cnn)
    for tensor in model.graph.initializer:
        if tensor.name == "b1":  # so far down that the first Relu never opens
            tensor.CopyFrom(numpy_helper.from_array(np.full(8, -100, np.float32), "b1"))
    onnx.save(model, tmp_path / "dead.onnx")
    report = build(tmp_path / "dead.onnx", pictures, preprocess=UNIT, out=tmp_path, duration_s=0)
    reasons = {n.name: n.reason for n in report.targets[0].nodes}
    assert reasons["Conv_c1"] == "r1 was 0 in every sample"
    assert any("no scale for r1" in note for note in report.notes)
    entries = trt_cache.parse((tmp_path / "dead.cache").read_bytes(), origin="cache").scales()
    assert entries["r1"] == 0


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "no scale for r0: it was 0 in every sample; its nodes"),
        (2, "no scale for r0, r1: each was 0 in every sample; their nodes"),
        (5, "no scale for r0, r1, r2 and 2 more: each was 0 in every sample; their nodes"),
    ],
)
def test_dead_tensors_are_told_together(run, tmp_path, count, said):
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "c")]
    nodes += [helper.make_node("Relu", ["c"], [f"r{place}"], f"r{place}") for place in range(count)]
    nodes.append(helper.make_node("Sum", ["x", *(f"r{place}" for place in range(count))], ["y"]))
    weight = numpy_helper.from_array(-np.ones((1, 1, 1, 1), np.float32), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 4, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "dead", ends[:1], ends[1:], [weight])
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).uniform(1, 2, (4, 1, 4, 4)).astype("f4"))
    words = ("--target", "tensorrt", "--effort", 0, "--duration", 0, "--accept")
    code, _, error = run(
        "build", tmp_path / "m.onnx", "--images", tmp_path / "x.npy", *words, "--out", tmp_path
    )
    assert code == 0, error
    notes = json.loads((tmp_path / "report.json").read_text())["notes"]
    assert [note for note in notes if "no scale" in note] == [f"{said} stay float"]


def test_targets_built_in_turn_share_one_cache(small_cnn, pictures, tmp_path):
    cache = tmp_path / "m.cache"
    calls = ["onnxruntime", "tensorrt", "onnxruntime", "tensorrt"]
    found = [
        calibrate(small_cnn, pictures, preprocess=UNIT, targets=[t], cache=cache) for t in calls
    ]
    assert [f.reused for f in found] == [False, False, True, True]
    assert "lacks" in found[1].reason


def test_arrays_and_dicts_are_a_feed_too(small_cnn, tmp_path):
    rng = np.random.default_rng(5)
    arrays = rng.normal(size=(6, 3, 16, 16)).astype(np.float32)
    one = calibrate(small_cnn, arrays)
    two = calibrate(small_cnn, ({"x": a[None]} for a in arrays))
    assert one.found.scales.to_json() == two.found.scales.to_json()
    np.save(tmp_path / "a.npy", arrays)
    three = calibrate(small_cnn, tmp_path / "a.npy")
    assert three.found.scales.to_json() == one.found.scales.to_json()


def test_a_fixed_batch_judges_every_image_once(small_cnn, tmp_path):
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, tmp_path / "four.onnx")
    arrays = np.random.default_rng(5).normal(size=(10, 3, 16, 16)).astype(np.float32)
    fixed = build(
        tmp_path / "four.onnx", arrays, eval_images=arrays, labels=[3] * 10, duration_s=0,
        out=tmp_path / "fixed",
    )  # fmt: skip
    free = build(
        small_cnn, arrays, eval_images=arrays, labels=[3] * 10, duration_s=0, out=tmp_path / "free"
    )
    one, other = fixed.engines[1].accuracy, free.engines[1].accuracy
    assert one.samples == other.samples == 10
    assert one.top1_reference == other.top1_reference
    assert one.top1_agreement == pytest.approx(other.top1_agreement, abs=0.11)


def test_a_batch_size_counts_images_where_the_model_fixes_its_batch(small_cnn, tmp_path):
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, tmp_path / "four.onnx")
    arrays = np.random.default_rng(6).normal(size=(12, 3, 16, 16)).astype(np.float32)
    arrays[4] *= 100  # in the second group of four, so not in the first batch
    method = Method.of("entropy-tensorrt", {"batch_size": 4})
    found = calibrate(tmp_path / "four.onnx", arrays, method=method)
    (histogram,) = (found.ranges.histogram(o) for o in found.searched if o.tensor == "x")
    assert histogram.base == float(np.abs(arrays[:4]).max())


def test_a_bad_evaluation_image_is_skipped_with_its_label(small_cnn, pictures, tmp_path):
    lines = [f"{p} {i % 10}" for i, p in enumerate(sorted(pictures.glob("*.png")))]
    (tmp_path / "bad.png").write_bytes(b"no picture")
    lines.insert(3, f"{tmp_path / 'bad.png'} 9")
    (tmp_path / "held.txt").write_text("\n".join(lines))
    report = build(
        small_cnn, pictures, eval_images=tmp_path / "held.txt", preprocess=UNIT, skip_bad=True,
        out=tmp_path, duration_s=0,
    )  # fmt: skip
    assert report.engines[1].accuracy.samples == 20
    assert report.engines[1].accuracy.top1_reference is not None


def test_words_that_name_nothing_are_told(small_cnn, pictures):
    with pytest.raises(ConfigError, match="did you mean 'Conv_c2'"):
        calibrate(small_cnn, pictures, preprocess=UNIT, float_nodes=["Conv_c22"])
    with pytest.raises(ConfigError, match="a target is one of"):
        calibrate(small_cnn, pictures, preprocess=UNIT, targets=["onnx"])
    with pytest.raises(ConfigError, match="'tensorrt' twice"):
        calibrate(small_cnn, pictures, preprocess=UNIT, targets=["tensorrt", "tensorrt"])
    with pytest.raises(ConfigError, match="a method is one of"):
        calibrate(small_cnn, pictures, preprocess=UNIT, method="kl")


LENET = Path("../shared/golden/tensorrt/lenet")
INDICES = {
    "data": 2040, "conv1": 704, "conv2": 962, "fc1": 1153, "ip1": 1155, "ip2": 1289, "prob": 1081,
}  # fmt: skip


@pytest.mark.skipif(not LENET.exists(), reason="the LeNet triple is not beside this checkout")
def test_the_whole_line_finds_the_indices_that_tensorrt_found():
    from calibrators.entropy import search

    pixels = np.load(LENET / "images.npz")["images"].astype(np.float32) / np.float32(255)
    method = Method.of("entropy-tensorrt", {"batch_size": 50})
    found = calibrate(
        LENET / "lenet.onnx", pixels[:, None], targets=["tensorrt"], method=method,
        cache=CachePolicy(trt_version="7.2.2"),
    )  # fmt: skip
    histograms = {o.tensor: found.ranges.histogram(o) for o in found.searched}
    assert {n: search(h.magnitudes(2048)) for n, h in histograms.items()} == INDICES
