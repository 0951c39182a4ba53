"""One line for every target: observed, stored, reused, built."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from calib8 import build, calibrate
from calibrators.searches import SEARCHES
from deploy.calibration import trt_cache
from deploy.calibration.ranges import read_foreign_ranges
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.store import load_calibration, sidecars
from deploy.errors import CacheError, ConfigError
from deploy.feed.preprocess import Preprocess
from deploy.method import Method
from deploy.tuning.search_options import Tuning
from deploy.tuning.search_samples import GrowingComparison
from tests.models import build_net, make_model, parse_nodes, save_fixed_batch, save_net

UNIT = Preprocess(size=(16, 16))


@pytest.fixture
def observe_small(small_cnn, pictures):
    return partial(calibrate, small_cnn, pictures, preprocess=UNIT)


@pytest.fixture
def build_small(small_cnn, pictures, tmp_path):
    return partial(build, small_cnn, pictures, preprocess=UNIT, out=tmp_path, duration_s=0)


@pytest.fixture
def calibrated(observe_small, tmp_path):
    """A calibration in a fresh folder, and its cache's path."""
    cache = tmp_path / "m.cache"
    return observe_small(cache=cache), cache


def files(cache):
    return [p.read_bytes() for p in (cache, *sidecars(cache))]


@pytest.mark.parametrize("method", SEARCHES)
def test_every_method_builds_an_engine_that_is_close(build_small, tmp_path, method):
    report = build_small(method=method, tuning=Tuning(effort=0))
    (engine,) = [e for e in report.engines if not e.reference]
    assert engine.accuracy.outputs[0].sqnr_db > (6 if "entropy" in method else 20)
    onnx.checker.check_model(onnx.load(engine.path), full_check=True)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["calibration"]["method"].startswith(method)
    assert all(row["precision"] == "uint8" for row in written["targets"][0]["nodes"])


def test_threads_leave_every_byte_as_it_is(observe_small, tmp_path):
    for method in ("minmax", "entropy", "percentile", "mse"):
        caches = [tmp_path / f"{method}-{threads}" / "m.cache" for threads in (1, 2, 3)]
        for threads, cache in enumerate(caches, 1):
            observe_small(method=method, threads=threads, cache=cache)
        assert len({tuple(files(cache)) for cache in caches}) == 1, method


def test_a_fitting_cache_is_reused_and_not_touched(observe_small, calibrated):
    first, cache = calibrated
    assert not first.reused
    assert "does not exist yet" in first.reason
    before = files(cache)
    second = observe_small(cache=cache)
    assert second.reused
    assert files(cache) == before
    assert second.range_set.scales == first.range_set.scales


def test_another_method_does_not_run_the_model(observe_small, calibrated, tmp_path, request):
    _, cache = calibrated
    fresh = tmp_path / "fresh" / "m.cache"
    observe_small(method="entropy", cache=fresh)
    request.getfixturevalue("no_pass")
    again = observe_small(method="entropy", cache=cache)
    assert "the model was not run" in again.reason
    assert files(cache) == files(fresh)


def test_one_weight_one_image_or_the_mean_makes_it_stale(small_cnn, pictures, calibrated, tmp_path):
    _, cache = calibrated
    kept = files(cache)

    def stale(model, images, how):
        result = calibrate(model, images, preprocess=how, cache=cache)
        assert not result.reused
        for path, data in zip((cache, *sidecars(cache)), kept, strict=True):
            path.write_bytes(data)
        return result.reason

    model = onnx.load(small_cnn)
    tensor = model.graph.initializer[0]
    weight = numpy_helper.to_array(tensor).copy()
    weight.flat[0] = np.nextafter(weight.flat[0], np.float32(np.inf))
    tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
    assert "weights or graph" in stale(save_net(model, tmp_path / "changed.onnx"), pictures, UNIT)
    copied = shutil.copytree(pictures, tmp_path / "copied")
    first = copied / "00.png"
    first.write_bytes(first.read_bytes() + b"\0")
    assert "the images changed (sha256)" in stale(small_cnn, copied, UNIT)
    first.unlink()
    assert "count 20 -> 19" in stale(small_cnn, copied, UNIT)
    other = replace(UNIT, mean=(0.5,))
    assert "the preprocessing changed (mean" in stale(small_cnn, pictures, other)


def test_the_cache_can_be_required_refreshed_and_trusted(observe_small, calibrated):
    _, cache = calibrated
    required = CachePolicy(path=cache, require=True)
    assert observe_small(cache=required).reused
    with pytest.raises(CacheError, match=r"--require-cache.*mean"):
        observe_small(preprocess=replace(UNIT, mean=(0.5,)), cache=required)
    assert not observe_small(cache=CachePolicy(path=cache, refresh=True)).reused
    for sidecar in sidecars(cache):
        sidecar.unlink()
    with pytest.raises(CacheError, match="--force"):
        observe_small(cache=cache)
    alone = observe_small(cache=CachePolicy(path=cache, force=True))
    assert not alone.reused
    assert "no fingerprint" in alone.reason
    for sidecar in sidecars(cache):
        sidecar.unlink()
    trusted = observe_small(cache=CachePolicy(path=cache, trust=True))
    assert trusted.reused
    assert trusted.ranges.trusted is not None
    scales = trusted.range_set.scales
    assert scales["r1"].lo == 0
    assert scales["c2"].lo < 0  # a Relu's output cannot be negative
    assert not any(sidecar.exists() for sidecar in sidecars(cache))


def test_infinite_scale_of_foreign_cache_is_infinite(tmp_path):
    """TensorRT writes `inf` for a tensor that overflowed; a cache made from that one must, too."""
    path = tmp_path / "foreign.cache"
    scales = {"finite": np.float32(0.5), "infinite": np.float32(np.inf)}
    path.write_bytes(trt_cache.dump(trt_cache.from_scales(scales, version="8.6.1")))
    ranges = read_foreign_ranges(path, ("finite", "infinite"), frozenset())
    assert ranges.symmetric == scales
    assert ranges.scales.keys() == {"finite"}


def test_tensors_that_a_trusted_cache_lacks_are_float(build_small, calibrated, tmp_path):
    _, cache = calibrated
    text = cache.read_bytes().splitlines(keepends=True)
    short = tmp_path / "short.cache"
    short.write_bytes(b"".join(line for line in text if not line.startswith(b"c2")))
    report = build_small(cache=CachePolicy(path=short, trust=True))
    reasons = {n.name: n.reason for n in report.targets[0].nodes if not n.quantized}
    assert "c2" in reasons["Conv_c2"]
    assert "short.cache" in reasons["Conv_c2"]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_cache_is_told_and_made_anew(observe_small, calibrated, which, damage):
    _, cache = calibrated
    good = files(cache)
    path = (cache, *sidecars(cache))[which]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x5A
    damaged = {"cut": data[: len(data) // 3], "flipped": data, "empty": b""}
    path.write_bytes(damaged.get(damage, b'{"a": [1, 2]}'))
    result = observe_small(method="minmax", cache=cache)
    assert not result.reused
    assert result.reason
    assert load_calibration(cache).fingerprint.method == "minmax"
    observe_small(cache=cache)
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
    assert any("no scale for r1" in alert for alert in report.alerts)
    data = (tmp_path / "calib8/dead.cache").read_bytes()
    assert trt_cache.parse(data, origin="cache").scales()["r1"] == 0


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "r0: it was 0 in every sample; its nodes"),
        (2, "r0, r1: each was 0 in every sample; their nodes"),
        (5, "r0, r1, r2 and 2 more: each was 0 in every sample; their nodes"),
    ],
)
def test_dead_tensors_are_told_together(tmp_path, count, said):
    dead = [f"r{place}" for place in range(count)]
    nodes = [("Conv", "x w", "c"), *(("Relu", "c", name) for name in dead)]
    nodes.append(("Sum", ["x", *dead], "y"))
    shape = [1, 1, 4, 4]
    weight = -np.ones((1, 1, 1, 1), np.float32)
    model = make_model(nodes, {"x": shape}, {"y": shape}, {"w": weight})
    x = np.random.default_rng(0).uniform(1, 2, (4, 1, 4, 4))
    out = build_net(model, x, tmp_path, "--target", "tensorrt", "--effort", 0, "--accept")
    alerts = json.loads((out / "report.json").read_text())["alerts"]
    assert [note for note in alerts if "no scale" in note] == [f"no scale for {said} stay float"]


def test_targets_built_in_turn_share_one_cache(observe_small, tmp_path):
    calls = ["onnxruntime", "tensorrt", "onnxruntime", "tensorrt"]
    found = [observe_small(targets=[target], cache=tmp_path / "m.cache") for target in calls]
    assert [f.reused for f in found] == [False, False, True, True]
    assert "lacks" in found[1].reason


def test_arrays_and_dicts_are_a_feed_too(small_cnn, tmp_path):
    arrays = np.random.default_rng(5).normal(size=(6, 3, 16, 16)).astype(np.float32)
    one = calibrate(small_cnn, arrays)
    assert (
        one.range_set.scales
        == calibrate(small_cnn, ({"x": a[None]} for a in arrays)).range_set.scales
    )
    np.save(tmp_path / "a.npy", arrays)
    assert calibrate(small_cnn, tmp_path / "a.npy").range_set.scales == one.range_set.scales


@pytest.mark.slow
def test_a_fixed_batch_judges_every_image_once(small_cnn, tmp_path):
    arrays = np.random.default_rng(5).normal(size=(10, 3, 16, 16)).astype(np.float32)
    words = {"eval_images": arrays, "labels": [3] * 10, "duration_s": 0}
    models = {"fixed": save_fixed_batch(small_cnn, tmp_path / "m.onnx"), "free": small_cnn}
    one, other = (
        build(model, arrays, **words, out=tmp_path / name).engines[1].accuracy
        for name, model in models.items()
    )
    assert one.samples == other.samples == 10
    assert one.top1_reference == other.top1_reference
    assert one.top1_agreement == pytest.approx(other.top1_agreement, abs=0.11)
    complete = arrays[:8].reshape(2, 4, 3, 16, 16)
    report = build(models["fixed"], complete, duration_s=0, out=tmp_path / "complete")
    assert report.engines[1].accuracy.samples == 8
    model = onnx.load(models["fixed"])
    feed = calibrate(models["fixed"], complete).feed
    searched = GrowingComparison([model], make_evaluation_set(feed, model, 9), kernels=False)
    assert searched.on(9, threads=1).samples == 8


def test_a_batch_size_counts_images_where_the_model_fixes_its_batch(small_cnn, tmp_path):
    arrays = np.random.default_rng(6).normal(size=(12, 3, 16, 16)).astype(np.float32)
    arrays[4] *= 100  # in the second group of four, so not in the first batch
    method = Method.of("entropy-tensorrt", {"batch_size": 4})
    found = calibrate(save_fixed_batch(small_cnn, tmp_path / "four.onnx"), arrays, method=method)
    (histogram,) = (found.ranges.histogram(o) for o in found.searched if o.tensor == "x")
    assert histogram.base == float(np.abs(arrays[:4]).max())


def test_a_bad_evaluation_image_is_skipped_with_its_label(build_small, pictures, tmp_path):
    lines = [f"{p} {i % 10}" for i, p in enumerate(sorted(pictures.glob("*.png")))]
    (tmp_path / "bad.png").write_bytes(b"no picture")
    lines.insert(3, f"{tmp_path / 'bad.png'} 9")
    (tmp_path / "held.txt").write_text("\n".join(lines))
    report = build_small(eval_images=tmp_path / "held.txt", skip_bad=True)
    assert report.engines[1].accuracy.samples == 20
    assert report.engines[1].accuracy.top1_reference is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"float_nodes": ["Conv_c22"]}, "did you mean 'Conv_c2'"),
        ({"float_nodes": "Conv_c22"}, "did you mean 'Conv_c2'"),
        ({"threads": -1}, "got -1"),
        ({"targets": ["onnx"]}, "a target is one of"),
        ({"targets": ["tensorrt", "tensorrt"]}, "'tensorrt' twice"),
        ({"method": "kl"}, "a method is one of"),
    ],
)
def test_words_that_name_nothing_are_told(observe_small, options, said):
    with pytest.raises(ConfigError, match=said):
        observe_small(**options)


LENET = Path("../shared/golden/tensorrt/lenet")
INDICES = {
    "data": 2040,
    "conv1": 704,
    "conv2": 962,
    "fc1": 1153,
    "ip1": 1155,
    "ip2": 1289,
    "prob": 1081,
}


@pytest.mark.skipif(not LENET.exists(), reason="the LeNet triple is not beside this checkout")
def test_the_whole_line_finds_the_indices_that_tensorrt_found():
    from calibrators.entropy import search_bins

    pixels = np.load(LENET / "images.npz")["images"].astype(np.float32) / np.float32(255)
    method = Method.of("entropy-tensorrt", {"batch_size": 50})
    found = calibrate(
        LENET / "lenet.onnx",
        pixels[:, None],
        targets=["tensorrt"],
        method=method,
        cache=CachePolicy(trt_version="7.2.2"),
    )
    histograms = {o.tensor: found.ranges.histogram(o) for o in found.searched}
    assert {n: search_bins(h.magnitudes(2048)) for n, h in histograms.items()} == INDICES


ALL = "onnxruntime,tensorrt,ascend"
METHODS = ["minmax", "mse", "percentile", "entropy", "entropy-tensorrt", "legacy"]


@pytest.fixture
def run_small(run, small_cnn, pictures):
    """A command on the small network and its pictures -> all that it prints, on one line."""

    def call(command, *words, code=0):
        more = ("--size", "16x16", *(("--duration", 0) if command == "build" else ()))
        found, out, error = run(command, small_cnn, "--images", pictures, *words, *more)
        assert found == code, error
        return " ".join((out + error).split())

    return call


def report(out):
    return json.loads((out / "report.json").read_text())


def work(out):
    found = report(out)["work"]
    runs = sum(found.get("calibration_runs", {}).values())
    return {"decodes": found["decodes"], "calibration": runs, "reference": found["reference_runs"]}


@pytest.mark.slow
def test_images_are_decoded_once_and_a_second_build_observes_nothing(run_small, pictures, tmp_path):
    held = shutil.copytree(pictures, tmp_path / "held")
    (held / "00.png").unlink()
    words = ("--target", ALL, "--eval-images", held, "--out", tmp_path / "o")
    run_small("build", *words)
    # two variants of the model, each over the 20 pictures; 19 others to judge by
    assert work(tmp_path / "o") == {"decodes": 20 + 19, "calibration": 40, "reference": 19}
    assert set(report(tmp_path / "o")["work"]["engine_runs"].values()) == {19}
    said = run_small("build", *words, "--verbose")
    again = work(tmp_path / "o")
    assert again["calibration"] == 0
    assert again["reference"] == 19
    # a few calibration pictures, for shapes, integer checks and the rounding of weights
    assert again["decodes"] <= 20 + 19
    assert "no calibration inference" in said or "0 calibration" in said


@pytest.mark.slow
def test_pictures_that_calibrate_and_judge_are_decoded_once_too(run_small, tmp_path):
    said = run_small("build", "--target", ALL, "--out", tmp_path, "--verbose")
    # the float model spoke while it was observed: its file is asked once, its layers four times
    assert work(tmp_path) == {"decodes": 20, "calibration": 40, "reference": 1 + 4}
    assert "40 calibration inferences" in said
    assert "5 reference inferences" in said
    said = run_small("calibrate", "-o", tmp_path / "c", "--verbose")
    assert "decoded 20 images, ran 20 inferences" in said


@pytest.mark.slow
def test_an_added_target_observes_only_its_own(run_small, tmp_path):
    out = tmp_path / "o"
    seen = {}
    for targets in ("onnxruntime", "onnxruntime,ascend", "tensorrt", ALL):
        run_small("build", "--target", targets, "--out", out, "--effort", 0)
        seen[targets] = report(out)["work"].get("calibration_runs", {})
    assert seen["onnxruntime"] == {"folded": 20}
    (variant,) = seen["onnxruntime,ascend"]
    assert "ARQ" in variant
    assert seen["onnxruntime,ascend"][variant] == 20
    assert seen["tensorrt"] == {"folded": 20}  # its cache lists tensors that the others do not
    assert seen[ALL] == {}


@pytest.mark.slow
def test_another_method_runs_the_model_only_for_another_statistic(run_small, tmp_path):
    runs = {}
    for method in ("mse", "minmax", "entropy-tensorrt", "legacy", "mse"):
        run_small("build", "--target", ALL, "--out", tmp_path, "--method", method, "--effort", 0)
        runs[method] = work(tmp_path)["calibration"]
    # 20 of the cleaned model, 20 of the model as TensorRT reads it, one more each for the range
    assert runs == {"mse": 0, "minmax": 0, "entropy-tensorrt": 42, "legacy": 20}


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("ascend", None),
        *((t, m) for t in ("onnxruntime", "tensorrt") for m in METHODS),
    ],
)
def test_what_calibrate_keeps_is_what_build_requires(run_small, tmp_path, target, method):
    cache = tmp_path / "c.cache"
    words = ("--target", target, *(("--method", method) if method else ()))
    run_small("calibrate", *words, "-o", cache)
    kept = files(cache)
    built = ("--cache", cache, "--require-cache", "--out", tmp_path / "o", "--effort", 0)
    assert "cache reused" in run_small("build", *words, *built)
    assert work(tmp_path / "o")["calibration"] == 0
    assert files(cache) == kept


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize(
    "changed", [("percentile", "--percent", "99.99", "95"), ("lp", "--power", "3", "1.2")]
)
def test_another_parameter_changes_the_files_that_need_it(run_small, tmp_path, target, changed):
    method, flag, *values = changed
    found = []
    for value in values:
        words = ("--method", method, flag, value, "--target", target, "--effort", "0")
        run_small("build", *words, "--out", tmp_path / value)
        files = (path for path in (tmp_path / value).rglob("*") if path.is_file())
        found.append({path.name: path.read_bytes() for path in files})
    same = {name for name, data in found[1].items() if found[0][name] == data}
    # the float model and the statistics are the same; the ranges, and what holds them, are not
    own = {
        "onnxruntime": {"small_cnn_run.py"},
        "tensorrt": {"small_cnn.tensorrt.onnx", "small_cnn_trtexec.sh"},
    }
    assert same == {"small_cnn.cache.npz"} | own[target]


@pytest.mark.slow
def test_nodes_stay_float_on_every_target_and_the_report_says_what_each_used(run_small, tmp_path):
    words = ("--target", ALL, "--keep-float", "op:Gemm", "--keep-float", "Conv_c3", "--effort", 0)
    run_small("build", *words, "--method", "minmax", "--out", tmp_path)
    targets = {target["name"]: target for target in report(tmp_path)["targets"]}
    for target in targets.values():
        nodes = {node["name"]: node for node in target["nodes"]}
        for node in (nodes["Gemm_logits"], nodes["Conv_c3"]):
            assert (node["precision"], node["reason"]) == ("float32", "kept float as asked")
        assert nodes["Conv_c2"]["precision"] != "float32"
    config = json.loads((tmp_path / "small_cnn_config.json").read_text())
    assert not config["Conv_c3"]["quant_enable"]
    assert config["Conv_c2"]["quant_enable"]
    quantized = onnx.load(tmp_path / "small_cnn.tensorrt.qdq.onnx")
    fed = {node.name: node.input[0] for node in quantized.graph.node}
    assert fed["Conv_c3"] == "r2"
    assert fed["Conv_c2"] != "r1"
    notes = " ".join(note for target in targets.values() for note in target.get("notes", ()))
    assert "--layerPrecisions=Conv_c3:fp16,Gemm_logits:fp16 --precisionConstraints=obey" in notes
    assert "--int8 --fp16" in (tmp_path / "small_cnn_trtexec.sh").read_text()
    methods = {"onnxruntime": "minmax", "tensorrt": "minmax", "ascend": "AMCT's ARQ and IFMR"}
    assert {name: target["method"] for name, target in targets.items()} == methods
    for name, method in (("ascend", "ifmr"), ("onnxruntime", "minmax")):
        assert {row["method"] for row in targets[name]["tensors"]} == {method}


def test_a_pattern_that_means_nothing_is_told(run_small, tmp_path):
    said = run_small("build", "--keep-float", "op:Gem", "--out", tmp_path / "o", code=1)
    assert "did you mean 'op:Gemm'" in said
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())


@pytest.mark.slow
def test_a_target_that_fails_is_a_row_and_the_others_are_built(run_small, tmp_path):
    (tmp_path / "bad.cfg").write_text('skip_layers: "nowhere"')
    words = ("--ascend-config", tmp_path / "bad.cfg", "--out", tmp_path / "o")
    assert "nowhere" in run_small("build", "--target", ALL, *words, code=1)
    found = {target["name"]: target for target in report(tmp_path / "o")["targets"]}
    assert "nowhere" in found["ascend"]["error"]
    assert "files" not in found["ascend"]
    assert (tmp_path / "o" / "small_cnn.int8.onnx").exists()
    assert (tmp_path / "o" / "small_cnn.tensorrt.cache").exists()
    said = run_small("build", "--target", "ascend", *words, "--out", tmp_path, code=1)
    assert said.startswith("calib8: error: ")
    assert "nowhere" in said  # nothing is left to report


def test_a_cache_is_written_for_ascend_alone_too(run_small, tmp_path):
    words = ("--target", "ascend")
    cache = tmp_path / "a.cache"
    assert "searched by" not in run_small("calibrate", *words, "-o", cache)
    assert cache.read_text().startswith("TRT-100300-MinMaxCalibration\n")
    words = (*words, "--trust-cache", "--cache", cache, "--out", tmp_path)
    assert "makes nothing" in run_small("build", *words, code=1)


def test_a_version_that_is_asked_for_is_written_on_reuse_too(run_small, tmp_path):
    cache = tmp_path / "c"
    run_small("calibrate", "-o", cache)
    assert cache.read_text().startswith("TRT-100300-")
    assert "reused" in run_small("calibrate", "-o", cache, "--trt-version", "8.6.1")
    assert cache.read_text().startswith("TRT-8601-")
    run_small("calibrate", "-o", cache)
    assert cache.read_text().startswith("TRT-8601-")  # no wish changes nothing


def test_the_report_says_which_options_a_target_was_given(run_small, tmp_path):
    words = "--target onnxruntime,tensorrt --int8-stem --rest fp32 --max-batch 4 --effort 0"
    run_small("build", *words.split(), "--keep-float", "Conv_c2", "--out", tmp_path)
    script = (tmp_path / "small_cnn_trtexec.sh").read_text()
    assert "--int8 " in script
    assert "--fp16" not in script
    assert "Conv_c2:fp32" in script
    found = {target["name"]: target.get("options") for target in report(tmp_path)["targets"]}
    assert found["onnxruntime"] == {"--int8-stem": ""}
    assert found["tensorrt"] == {"--rest": "fp32", "--max-batch": "4"}
    for name in ("report.md", "report.html"):
        assert "--rest fp32 --max-batch 4" in (tmp_path / name).read_text()


@pytest.mark.slow
def test_a_cache_does_not_grow_with_every_configuration_that_is_tried(run_small, tmp_path):
    out = tmp_path / "o"
    names = ["Conv_c1", "Conv_c2", "Conv_c3", "Gemm_logits"]
    words = ("--target", "onnxruntime,ascend", "--out", out, "--effort", 0)
    for kept in [(), *[(n,) for n in names], *[(names[0], n) for n in names[1:]]]:
        run_small("build", *words, *(w for n in kept for w in ("--keep-float", n)))
    keys = json.loads((out / "calib8/small_cnn.cache.json").read_text())["observations"]
    variants = {variant for variant, _, _ in keys}
    assert "folded" in variants
    assert len(variants) <= 6


@pytest.mark.slow
def test_what_was_used_last_is_what_a_cache_carries(run_small, tmp_path):
    def calibrate(target, *words):
        return run_small("calibrate", "--target", target, "-o", tmp_path / "c", *words)

    kept = ["Conv_c1", "Conv_c2", "Conv_c3", "Gemm_logits"]
    for name in kept:  # each is a form of the model with other weights
        calibrate("ascend", "--keep-float", name)
    calibrate("tensorrt", "--method", "legacy")
    calibrate("ascend", "--keep-float", "Conv_c[12]")  # one form too many: the oldest goes
    assert "reused" in calibrate("tensorrt", "--method", "legacy")
    assert "written" in calibrate("ascend", "--keep-float", kept[0])


def test_ranges_of_a_trusted_cache_are_said_to_be_its_own(run_small, tmp_path):
    cache, out = tmp_path / "c", tmp_path / "o"
    run_small("calibrate", "-o", cache)
    for sidecar in sidecars(cache):
        sidecar.unlink()
    words = ("--trust-cache", "--cache", cache, "--target", "onnxruntime,tensorrt", "--out", out)
    said = run_small("build", *words)
    assert "mse" not in said
    assert "cache reused" in said
    assert {target["method"] for target in report(out)["targets"]} == {"the trusted cache"}
    assert (out / "small_cnn.tensorrt.cache").exists()
    assert not (out / "small_cnn.tensorrt.cache.json").exists()  # nobody knows of what


LONG = 256
TABLE = "angles = Mul (times, tones) table = Cos (angles)"
LAYERS = "c = Conv (x, w) m = Mul (c, grid) r = Relu (m) y = Conv (r, v)"
KINDS = {
    "spectrum": f"{TABLE} s = MatMul (x, table) r = Relu (s) y = MatMul (r, wide)",
    "windows": f"{TABLE} windows = Unsqueeze (table, one) s = Conv (x, windows) y = Conv (s, long)",
    "numbers": f"row = Range (zero, many, half) grid = Reshape (row, sizes) {LAYERS}",
    "expanded": f"grid = Expand (half, sizes) {LAYERS}",
    "tiled": f"grid = Tile (line, often) {LAYERS}",
    "filled": f"zeros = ConstantOfShape (sizes) grid = Add (zeros, half) {LAYERS}",
    "shared": "a = Conv (x, w) b = Conv (a, v, b1) c = Conv (b, v, b2) d = Conv (c, v, b3)"
    "e = Conv (d, v, b4) f = Conv (e, v, b5) y = Conv (f, v, b6)",
    "halves": "h = Cast <to = 10> (x) b = Add (h, grid16) c = Conv (b, w16) y = Cast <to = 1> (c)",
    "tiny": "a = Conv (x, u) b = Conv (a, u) c = Conv (b, u) y = Conv (c, u)",
}
SHAPES = {"spectrum": ["n", LONG], "windows": ["n", 1, LONG]}
WEIGHTS = {
    "u": (4, 4, 1, 1),
    "w": (32, 4, 1, 1),
    "v": (32, 32, 3, 3),
    "wide": (LONG, 16),
    "long": (64, LONG, 1),
}
CONSTANTS = {
    "times": np.arange(LONG)[:, None],
    "tones": np.linspace(0, 0.1, LONG)[None],
    "half": 0.5,
    "zero": 0,
    "many": 16384,
    "line": np.linspace(0, 1, 32).reshape(1, 1, 1, 32),
    "grid16": np.random.default_rng(0).normal(size=(4, 32, 32)),
    "w16": np.linspace(-1, 1, 1152).reshape(32, 4, 3, 3),
    **{f"b{place}": np.full(32, 4.0**place) for place in range(1, 7)},
}
NUMBERS = {"one": [1], "sizes": [1, 32, 32, 32], "often": [1, 32, 32, 1]}


@pytest.mark.parametrize("kind", KINDS)
def test_no_int8_file_is_larger_than_the_model(kind, tmp_path):
    rng = np.random.default_rng(3)
    nodes = parse_nodes(KINDS[kind])
    held = CONSTANTS | {name: rng.normal(0, 0.1, shape) for name, shape in WEIGHTS.items()}
    held = {k: (np.float16 if "16" in k else np.float32)(v) for k, v in held.items()}
    held |= {k: np.int64(NUMBERS[k]) for k in NUMBERS}
    held = {name: held[name] for node in nodes for name in node.input if name in held}
    shape = SHAPES.get(kind, ["n", 4, 32, 32])
    model = make_model(nodes, {"x": shape}, {"y": None}, held)
    words = [word for name in ("onnxruntime", "tensorrt", "ascend") for word in ("--target", name)]
    x = rng.normal(size=(8, *shape[1:]))
    out = build_net(model, x, tmp_path, "--effort", 0, "--accept", *words)
    names = ["net.int8.onnx", "net.tensorrt.typed.onnx", "net_deploy_model.onnx"]
    if kind in ("shared", "halves"):
        names.pop()  # AMCT copies a weight for each layer, and knows float32 alone
    nodes_and_names = 600 * len(nodes) if kind == "tiny" else 0  # hardly any weights to win by
    largest = max((out / name).stat().st_size for name in names)
    assert largest <= model.ByteSize() + nodes_and_names
