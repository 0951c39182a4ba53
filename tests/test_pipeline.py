"""One line for every target: observed, stored, reused, built."""

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
from deploy.calibration.store import load_calibration, sidecars
from deploy.errors import CacheError, ConfigError
from deploy.feed.preprocess import Preprocess
from deploy.method import Method
from deploy.pipeline import build, calibrate
from deploy.tuning import timing
from deploy.tuning.search_options import Tuning
from tests.models import make_model, make_node, make_value, save_net

# --- pipeline
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


def test_another_method_does_not_run_the_model(
    small_cnn, pictures, calibrated, tmp_path, monkeypatch
):
    _, cache = calibrated
    fresh = tmp_path / "fresh" / "m.cache"
    calibrate(small_cnn, pictures, preprocess=UNIT, method="entropy", cache=fresh)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("deploy.pipeline.calibration_run.observe", refuse)
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
    return save_net(model, folder / "changed.onnx")


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


def test_tensors_that_a_trusted_cache_lacks_are_float(small_cnn, pictures, calibrated, tmp_path):
    _, cache = calibrated
    text = cache.read_bytes().splitlines(keepends=True)
    short = tmp_path / "short.cache"
    short.write_bytes(b"".join(line for line in text if not line.startswith(b"c2")))
    report = build(
        small_cnn, pictures, preprocess=UNIT, cache=CachePolicy(path=short, trust=True),
        out=tmp_path, duration_s=0,
    )  # fmt: skip
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
    nodes = [make_node("Conv", "x w", "c", "c")]
    nodes += [make_node("Relu", "c", f"r{place}", f"r{place}") for place in range(count)]
    nodes.append(make_node("Sum", ["x", *(f"r{place}" for place in range(count))], "y"))
    weight = numpy_helper.from_array(-np.ones((1, 1, 1, 1), np.float32), "w")
    ends = [make_value(name, [1, 1, 4, 4]) for name in "xy"]
    onnx.save(make_model(nodes, ends[:1], ends[1:], [weight]), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).uniform(1, 2, (4, 1, 4, 4)).astype("f4"))
    words = ("--target", "tensorrt", "--effort", 0, "--duration", 0, "--accept")
    run.ok("build", tmp_path / "m.onnx", "--images", tmp_path / "x.npy", *words, "--out", tmp_path)
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
    arrays = np.random.default_rng(5).normal(size=(6, 3, 16, 16)).astype(np.float32)
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
    from calibrators.entropy import search_bins

    pixels = np.load(LENET / "images.npz")["images"].astype(np.float32) / np.float32(255)
    method = Method.of("entropy-tensorrt", {"batch_size": 50})
    found = calibrate(
        LENET / "lenet.onnx", pixels[:, None], targets=["tensorrt"], method=method,
        cache=CachePolicy(trt_version="7.2.2"),
    )  # fmt: skip
    histograms = {o.tensor: found.ranges.histogram(o) for o in found.searched}
    assert {n: search_bins(h.magnitudes(2048)) for n, h in histograms.items()} == INDICES


# --- One line for every target, through the command: what is observed, kept, reused, told.
ALL = "onnxruntime,tensorrt,ascend"
METHODS = ["minmax", "mse", "percentile", "entropy", "entropy-tensorrt", "legacy"]


@pytest.fixture
def run_small(run, small_cnn, pictures):
    """A command on the small network and its pictures: (exit code, output, errors)."""

    def call(command, *words):
        feed = ("--images", pictures, "--size", "16x16")
        more = ("--duration", 0) if command == "build" else ()
        return run(command, small_cnn, *feed, *words, *more)

    return call


def report(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


def work(out: Path) -> dict:
    found = report(out)["work"]
    return {
        "decodes": found["decodes"],
        "calibration": sum(found.get("calibration_runs", {}).values()),
        "reference": found["reference_runs"],
    }


@pytest.mark.slow
def test_images_are_decoded_once_and_a_second_build_observes_nothing(run_small, pictures, tmp_path):
    held = tmp_path / "held"
    shutil.copytree(pictures, held)
    (held / "00.png").unlink()
    words = ("--target", ALL, "--eval-images", held, "--out", tmp_path / "o")
    code, _, error = run_small("build", *words)
    assert code == 0, error
    # two variants of the model, each over the 20 pictures; 19 others to judge by
    assert work(tmp_path / "o") == {"decodes": 20 + 19, "calibration": 40, "reference": 19}
    assert set(report(tmp_path / "o")["work"]["engine_runs"].values()) == {19}
    code, out, _ = run_small("build", *words, "--verbose")
    again = work(tmp_path / "o")
    assert code == 0 and again["calibration"] == 0 and again["reference"] == 19
    # a few calibration pictures, for shapes, integer checks and the rounding of weights
    assert again["decodes"] <= 20 + 19
    assert "no calibration inference" in " ".join(out.split()) or "0 calibration" in out


@pytest.mark.slow
def test_the_command_prints_what_was_counted(run_small, tmp_path):
    code, out, _ = run_small("build", "--target", ALL, "--out", tmp_path, "--verbose")
    said = " ".join(out.split())
    assert code == 0 and "40 calibration inferences" in said and "5 reference inferences" in said
    code, out, _ = run_small("calibrate", "-o", tmp_path / "c", "--verbose")
    assert "decoded 20 images, ran 20 inferences" in " ".join(out.split())


@pytest.mark.slow
def test_pictures_that_calibrate_and_judge_are_decoded_once_too(run_small, tmp_path):
    assert run_small("build", "--target", ALL, "--out", tmp_path)[0] == 0
    # the float model spoke while it was observed: its file is asked once, its layers four times
    assert work(tmp_path) == {"decodes": 20, "calibration": 40, "reference": 1 + 4}


@pytest.mark.slow
def test_an_added_target_observes_only_its_own(run_small, tmp_path):
    out = tmp_path / "o"
    seen = {}
    for targets in ("onnxruntime", "onnxruntime,ascend", "tensorrt", ALL):
        assert run_small("build", "--target", targets, "--out", out, "--effort", 0)[0] == 0
        seen[targets] = report(out)["work"].get("calibration_runs", {})
    assert seen["onnxruntime"] == {"folded": 20}
    (variant,) = seen["onnxruntime,ascend"]
    assert "ARQ" in variant and seen["onnxruntime,ascend"][variant] == 20
    assert seen["tensorrt"] == {"folded": 20}  # its cache lists tensors that the others do not
    assert seen[ALL] == {}


@pytest.mark.slow
def test_another_method_runs_the_model_only_for_another_statistic(run_small, tmp_path):
    runs = {}
    for method in ("mse", "minmax", "entropy-tensorrt", "legacy", "mse"):
        words = ("--target", ALL, "--out", tmp_path, "--method", method, "--effort", 0)
        assert run_small("build", *words)[0] == 0
        runs[method] = sum(report(tmp_path)["work"].get("calibration_runs", {}).values())
    # 20 of the cleaned model, 20 of the model as TensorRT reads it, one more each for the range
    assert runs == {"mse": 0, "minmax": 0, "entropy-tensorrt": 42, "legacy": 20}


@pytest.mark.parametrize(
    ("target", "method"),
    [("ascend", None), *((t, m) for t in ("onnxruntime", "tensorrt") for m in METHODS)],
)
def test_what_calibrate_keeps_is_what_build_requires(run_small, tmp_path, target, method):
    cache = tmp_path / "c.cache"
    words = ("--target", target, *(("--method", method) if method else ()))
    code, _, error = run_small("calibrate", *words, "-o", cache)
    assert code == 0, error
    kept = [path.read_bytes() for path in (cache, *sidecars(cache))]
    built = ("--cache", cache, "--require-cache", "--out", tmp_path / "o", "--effort", 0)
    code, out, error = run_small("build", *words, *built)
    assert code == 0, error
    assert "cache reused" in " ".join(out.split())
    assert work(tmp_path / "o")["calibration"] == 0
    assert kept == [path.read_bytes() for path in (cache, *sidecars(cache))]


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize(
    "changed", [("percentile", "--percent", "99.99", "95"), ("lp", "--power", "3", "1.2")]
)
def test_another_parameter_changes_the_files_that_depend_on_it(
    run_small, tmp_path, target, changed
):
    method, flag, *values = changed
    found = []
    for value in values:
        words = ("--method", method, flag, value, "--target", target, "--effort", "0")
        assert run_small("build", *words, "--out", tmp_path / value)[0] == 0
        found.append({path.name: path.read_bytes() for path in (tmp_path / value).iterdir()})
    same = {name for name, data in found[1].items() if found[0][name] == data}
    # the float model and the statistics are the same; the ranges, and what holds them, are not
    trt = {"small_cnn.tensorrt.onnx", "small_cnn_trtexec.sh"} if target == "tensorrt" else set()
    assert same == {"small_cnn.cache.npz"} | trt


@pytest.mark.slow
def test_nodes_stay_float_on_every_target(run_small, tmp_path):
    words = ("--target", ALL, "--keep-float", "op:Gemm", "--keep-float", "Conv_c3", "--effort", 0)
    code, _, error = run_small("build", *words, "--out", tmp_path)
    assert code == 0, error
    for target in report(tmp_path)["targets"]:
        precision = {node["name"]: node["precision"] for node in target["nodes"]}
        assert precision["Gemm_logits"] == precision["Conv_c3"] == "float32"
        assert precision["Conv_c2"] != "float32"
    config = json.loads((tmp_path / "small_cnn_config.json").read_text())
    assert not config["Conv_c3"]["quant_enable"] and config["Conv_c2"]["quant_enable"]
    quantized = onnx.load(tmp_path / "small_cnn.tensorrt.qdq.onnx")
    fed = {node.name: node.input[0] for node in quantized.graph.node}
    assert fed["Conv_c3"] == "r2" and fed["Conv_c2"] != "r1"
    notes = " ".join(
        note for target in report(tmp_path)["targets"] for note in target.get("notes", ())
    )
    assert "--layerPrecisions=Conv_c3:fp16,Gemm_logits:fp16 --precisionConstraints=obey" in notes


def test_a_pattern_that_means_nothing_is_told(run_small, tmp_path):
    code, _, error = run_small("build", "--keep-float", "op:Gem", "--out", tmp_path / "o")
    assert code == 1 and "did you mean 'op:Gemm'" in error
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())


@pytest.mark.slow
def test_a_target_that_fails_is_a_row_and_the_others_are_built(run_small, tmp_path):
    (tmp_path / "bad.cfg").write_text('skip_layers: "nowhere"')
    words = ("--target", ALL, "--ascend-config", tmp_path / "bad.cfg", "--out", tmp_path / "o")
    code, out, _ = run_small("build", *words)
    assert code == 1 and "nowhere" in out
    found = {target["name"]: target for target in report(tmp_path / "o")["targets"]}
    assert "nowhere" in found["ascend"]["error"] and "files" not in found["ascend"]
    assert (tmp_path / "o" / "small_cnn.int8.onnx").exists()
    assert (tmp_path / "o" / "small_cnn.tensorrt.cache").exists()
    code, _, error = run_small(
        "build", "--target", "ascend", "--ascend-config", tmp_path / "bad.cfg", "--out", tmp_path
    )
    assert code == 1 and "nowhere" in error  # alone, there is nothing left to report


@pytest.mark.slow
def test_the_report_says_of_each_target_what_was_used(run_small, tmp_path):
    words = ("--target", ALL, "--out", tmp_path, "--method", "minmax", "--effort", 0)
    assert run_small("build", *words)[0] == 0
    found = {target["name"]: target for target in report(tmp_path)["targets"]}
    assert {name: target["method"] for name, target in found.items()} == {
        "onnxruntime": "minmax",
        "tensorrt": "minmax",
        "ascend": "AMCT's ARQ and IFMR",
    }
    assert {row["method"] for row in found["ascend"]["tensors"]} == {"ifmr"}
    assert {row["method"] for row in found["onnxruntime"]["tensors"]} == {"minmax"}


def test_a_cache_is_written_for_ascend_alone_too(run_small, tmp_path):
    code, out, _ = run_small("calibrate", "--target", "ascend", "-o", tmp_path / "a.cache")
    assert code == 0 and "searched by" not in out
    assert (tmp_path / "a.cache").read_text().startswith("TRT-100300-MinMaxCalibration\n")
    code, _, error = run_small("build", "--target", "ascend", "--trust-cache", "--cache",
                         tmp_path / "a.cache", "--out", tmp_path)  # fmt: skip
    assert code == 1 and "makes nothing" in error


def test_a_version_that_is_asked_for_is_written_on_reuse_too(run_small, tmp_path):
    cache = tmp_path / "c"
    assert run_small("calibrate", "-o", cache)[0] == 0
    assert cache.read_text().startswith("TRT-100300-")
    code, out, _ = run_small("calibrate", "-o", cache, "--trt-version", "8.6.1")
    assert code == 0 and "reused" in out and cache.read_text().startswith("TRT-8601-")
    assert run_small("calibrate", "-o", cache)[0] == 0
    assert cache.read_text().startswith("TRT-8601-")  # no wish changes nothing


def test_the_report_says_which_options_a_target_was_given(run_small, tmp_path):
    words = "--target onnxruntime,tensorrt --int8-stem --rest fp32 --max-batch 4 --effort 0"
    assert run_small("build", *words.split(), "--out", tmp_path)[0] == 0
    found = {target["name"]: target.get("options") for target in report(tmp_path)["targets"]}
    assert found["onnxruntime"] == {"--int8-stem": ""}
    assert found["tensorrt"] == {"--rest": "fp32", "--max-batch": "4"}
    for name in ("report.md", "report.html"):
        assert "--rest fp32 --max-batch 4" in (tmp_path / name).read_text()


@pytest.mark.slow
def test_a_cache_does_not_grow_with_every_configuration_that_is_tried(run_small, tmp_path):
    out, names = tmp_path / "o", ["Conv_c1", "Conv_c2", "Conv_c3", "Gemm_logits"]
    words = ("--target", "onnxruntime,ascend", "--out", out, "--effort", 0)
    for kept in [(), *[(n,) for n in names], *[(names[0], n) for n in names[1:]]]:
        assert run_small("build", *words, *(w for n in kept for w in ("--keep-float", n)))[0] == 0
    keys = json.loads((out / "small_cnn.cache.json").read_text())["observations"]
    variants = {variant for variant, _, _ in keys}
    assert "folded" in variants and len(variants) <= 6


def test_what_was_used_last_is_what_a_cache_carries(run_small, tmp_path):
    def calibrate(target, *words):
        code, out, error = run_small("calibrate", "--target", target, "-o", tmp_path / "c", *words)
        assert code == 0, error
        return out

    kept = ["Conv_c1", "Conv_c2", "Conv_c3", "Gemm_logits"]
    for name in kept:  # each is a form of the model with other weights
        calibrate("ascend", "--keep-float", name)
    calibrate("tensorrt", "--method", "legacy")
    calibrate("ascend", "--keep-float", "Conv_c[12]")  # one form too many: the oldest goes
    assert "reused" in calibrate("tensorrt", "--method", "legacy")
    assert "written" in calibrate("ascend", "--keep-float", kept[0])


@pytest.mark.slow
def test_trtexec_is_told_the_type_of_the_rest(run_small, tmp_path):
    words = ("--target", "tensorrt", "--keep-float", "Conv_c2", "--out", tmp_path, "--effort", 0)
    code, out, _ = run_small("build", *words)
    assert code == 0 and "--int8 --fp16" in out and "Conv_c2:fp16" in out
    code, out, _ = run_small("build", *words, "--rest", "fp32")
    assert code == 0 and "--int8" in out and "--fp16" not in out and "Conv_c2:fp32" in out


def test_ranges_of_a_trusted_cache_are_said_to_be_its_own(run_small, tmp_path):
    assert run_small("calibrate", "-o", tmp_path / "c")[0] == 0
    for sidecar in sidecars(tmp_path / "c"):
        sidecar.unlink()
    words = ("--trust-cache", "--cache", tmp_path / "c", "--target", "onnxruntime,tensorrt")
    code, out, _ = run_small("build", *words, "--out", tmp_path / "o")
    assert code == 0 and "mse" not in out and "cache reused" in out
    found = report(tmp_path / "o")
    assert {target["method"] for target in found["targets"]} == {"the trusted cache"}
    assert (tmp_path / "o" / "small_cnn.tensorrt.cache").exists()
    assert not (tmp_path / "o" / "small_cnn.tensorrt.cache.json").exists()  # nobody knows of what


@pytest.mark.slow
def test_a_node_kept_float_has_one_reason_on_every_target(run_small, tmp_path):
    words = ("--target", ALL, "--keep-float", "Conv_c2", "--out", tmp_path, "--effort", 0)
    assert run_small("build", *words)[0] == 0
    reasons = {
        row["reason"]
        for target in report(tmp_path)["targets"]
        for row in target["nodes"]
        if row["name"] == "Conv_c2"
    }
    assert reasons == {"kept float as asked"}


# --- The file of a model that stays in float: cleaned, but never much larger than the one given.
LONG = 256


def spectrum(path, *behind):
    """Sound -> a spectrum by a table of cosines, which the model makes of two vectors.

    Args:
        path: of the file.
        behind: nodes that make y of same, in place of a Relu.
    """
    nodes = [
        make_node("Mul", "times tones", "angles", name="angles"),
        make_node("Cos", "angles", "table", name="table"),
        make_node("MatMul", "x table", "s", name="product"),
        make_node("Identity", "s", "same", name="same"),
        *(behind or (make_node("Relu", "same", "y", name="relu"),)),
    ]
    weights = {
        "three": np.float32(3), "zero": np.float32(0), "six": np.float32(6),
        "times": np.arange(LONG, dtype=np.float32)[:, None],
        "tones": np.linspace(0, 0.1, LONG, dtype=np.float32)[None],
    }  # fmt: skip
    return save_net(make_model(nodes, {"x": ["n", LONG]}, {"y": ["n", LONG]}, weights), path)


@pytest.fixture
def float_file(run, tmp_path, monkeypatch):
    """(model) -> the float file that is written, and the screen; int8 is slower than float."""

    def quickest(ran, feeds, *, threads):
        return 30.0 if any(node.op_type == "QuantizeLinear" for node in ran.graph.node) else 10.0

    monkeypatch.setattr(timing, "quickest_ms", quickest)

    def call(model):
        rows = np.random.default_rng(3).normal(size=(8, LONG)).astype(np.float32)
        np.save(tmp_path / "x.npy", rows)
        words = ("build", model, "--images", tmp_path / "x.npy", "--out", tmp_path / "o")
        out = run.ok(*words, "--duration", 0.01)
        (written,) = (tmp_path / "o").glob("*.float.onnx")
        return written, " ".join(out.split())

    return call


def test_a_model_that_computes_its_tables_stays_as_small_as_it_is(float_file, tmp_path):
    model = spectrum(tmp_path / "spectrum.onnx")
    written, said = float_file(model)
    assert written.read_bytes() == model.read_bytes()
    assert "float engine is the given file" in said


def test_one_whose_gates_are_made_one_kernel_is_written_with_them(float_file, tmp_path):
    gate = (
        make_node("Add", "same three", "moved", name="moved"),
        make_node("Clip", "moved zero six", "cut", name="cut"),
        make_node("Mul", "same cut", "gated", name="gated"),
        make_node("Div", "gated six", "y", name="sixth"),
    )
    written, said = float_file(spectrum(tmp_path / "spectrum.onnx", *gate))
    assert "Clip" not in {node.op_type for node in onnx.load(written).graph.node}
    assert "file that was given" not in said


def share_names(model):
    for node in model.graph.node:
        node.name = "same"


def list_weights(model):
    model.graph.input.add(name="tones").type.CopyFrom(
        helper.make_tensor_type_proto(TensorProto.FLOAT, [1, LONG])
    )


@pytest.mark.parametrize("change", [share_names, list_weights])
def test_one_that_onnxruntime_runs_otherwise_is_cleaned(float_file, tmp_path, change):
    """It loads no nodes that share a name, and computes slower with weights that are inputs."""
    model = onnx.load(spectrum(tmp_path / "spectrum.onnx"))
    change(model)
    onnx.save(model, tmp_path / "spectrum.onnx")
    written, said = float_file(tmp_path / "spectrum.onnx")
    assert "Cos" not in {node.op_type for node in onnx.load(written).graph.node}
    assert "file that was given" not in said


def test_one_that_cleaning_makes_no_larger_is_cleaned(float_file, tmp_path):
    model = onnx.load(spectrum(tmp_path / "spectrum.onnx"))
    table = np.cos(np.outer(np.arange(LONG), np.linspace(0, 0.1, LONG))).astype(np.float32)
    del model.graph.node[:2], model.graph.initializer[:]
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    onnx.save(model, tmp_path / "spectrum.onnx")
    written, said = float_file(tmp_path / "spectrum.onnx")
    assert "Identity" not in {node.op_type for node in onnx.load(written).graph.node}
    assert "file that was given" not in said
