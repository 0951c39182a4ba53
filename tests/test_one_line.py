"""One line for every target, through the command: what is observed, kept, reused, told."""

import json
import shutil
from pathlib import Path

import onnx
import pytest

from deploy.calibration.store import sidecars
from deploy.cli import main

ALL = "onnxruntime,tensorrt,ascend"
METHODS = ["minmax", "mse", "percentile", "entropy", "entropy-tensorrt", "legacy"]


@pytest.fixture
def run(small_cnn, pictures, capsys):
    """A command on the small network and its pictures: (exit code, output, errors)."""

    def call(command, *words):
        feed = ("--images", pictures, "--size", "16x16")
        arguments = [command, small_cnn, *feed, *words]
        arguments += ["--duration", "0"] if command == "build" else []
        code = 0
        try:
            main([str(word) for word in arguments])
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

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
def test_every_image_is_decoded_once_and_a_second_build_observes_nothing(run, pictures, tmp_path):
    held = tmp_path / "held"
    shutil.copytree(pictures, held)
    (held / "00.png").unlink()
    words = ("--target", ALL, "--eval-images", held, "--out", tmp_path / "o")
    code, _, error = run("build", *words)
    assert code == 0, error
    # two variants of the model, each over the 20 pictures; 19 others to judge by
    assert work(tmp_path / "o") == {"decodes": 20 + 19, "calibration": 40, "reference": 19}
    assert set(report(tmp_path / "o")["work"]["engine_runs"].values()) == {19}
    code, out, _ = run("build", *words, "--verbose")
    again = work(tmp_path / "o")
    assert code == 0 and again["calibration"] == 0 and again["reference"] == 19
    # a few calibration pictures, for shapes, integer checks and the rounding of weights
    assert again["decodes"] <= 20 + 19
    assert "no calibration inference" in " ".join(out.split()) or "0 calibration" in out


@pytest.mark.slow
def test_the_command_prints_what_was_counted(run, tmp_path):
    code, out, _ = run("build", "--target", ALL, "--out", tmp_path, "--verbose")
    said = " ".join(out.split())
    assert code == 0 and "40 calibration inferences" in said and "5 reference inferences" in said
    code, out, _ = run("calibrate", "-o", tmp_path / "c", "--verbose")
    assert "decoded 20 images, ran 20 inferences" in " ".join(out.split())


@pytest.mark.slow
def test_pictures_that_calibrate_and_judge_are_decoded_once_too(run, tmp_path):
    assert run("build", "--target", ALL, "--out", tmp_path)[0] == 0
    # the float model spoke while it was observed: its file is asked once, its layers four times
    assert work(tmp_path) == {"decodes": 20, "calibration": 40, "reference": 1 + 4}


@pytest.mark.slow
def test_an_added_target_observes_only_its_own(run, tmp_path):
    out = tmp_path / "o"
    seen = {}
    for targets in ("onnxruntime", "onnxruntime,ascend", "tensorrt", ALL):
        assert run("build", "--target", targets, "--out", out, "--effort", 0)[0] == 0
        seen[targets] = report(out)["work"].get("calibration_runs", {})
    assert seen["onnxruntime"] == {"folded": 20}
    (variant,) = seen["onnxruntime,ascend"]
    assert "ARQ" in variant and seen["onnxruntime,ascend"][variant] == 20
    assert seen["tensorrt"] == {"folded": 20}  # its cache lists tensors that the others do not
    assert seen[ALL] == {}


@pytest.mark.slow
def test_another_method_runs_the_model_only_where_it_wants_another_statistic(run, tmp_path):
    runs = {}
    for method in ("mse", "minmax", "entropy-tensorrt", "legacy", "mse"):
        words = ("--target", ALL, "--out", tmp_path, "--method", method, "--effort", 0)
        assert run("build", *words)[0] == 0
        runs[method] = sum(report(tmp_path)["work"].get("calibration_runs", {}).values())
    # 20 of the cleaned model, 20 of the model as TensorRT reads it, one more each for the range
    assert runs == {"mse": 0, "minmax": 0, "entropy-tensorrt": 42, "legacy": 20}


@pytest.mark.parametrize(
    ("target", "method"),
    [("ascend", None), *((t, m) for t in ("onnxruntime", "tensorrt") for m in METHODS)],
)
def test_what_calibrate_keeps_is_what_build_requires(run, tmp_path, target, method):
    cache = tmp_path / "c.cache"
    words = ("--target", target, *(("--method", method) if method else ()))
    code, _, error = run("calibrate", *words, "-o", cache)
    assert code == 0, error
    kept = [path.read_bytes() for path in (cache, *sidecars(cache))]
    built = ("--cache", cache, "--require-cache", "--out", tmp_path / "o", "--effort", 0)
    code, out, error = run("build", *words, *built)
    assert code == 0, error
    assert "cache reused" in " ".join(out.split())
    assert work(tmp_path / "o")["calibration"] == 0
    assert kept == [path.read_bytes() for path in (cache, *sidecars(cache))]


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize(
    "changed", [("percentile", "--percent", "99.99", "95"), ("lp", "--power", "3", "1.2")]
)
def test_another_parameter_changes_every_file_that_depends_on_it(run, tmp_path, target, changed):
    method, flag, *values = changed
    found = []
    for value in values:
        words = ("--method", method, flag, value, "--target", target, "--effort", "0")
        assert run("build", *words, "--out", tmp_path / value)[0] == 0
        found.append({path.name: path.read_bytes() for path in (tmp_path / value).iterdir()})
    same = {name for name, data in found[1].items() if found[0][name] == data}
    # the float model and the statistics are the same; the ranges, and what holds them, are not
    trt = {"small_cnn.tensorrt.onnx", "small_cnn_trtexec.sh"} if target == "tensorrt" else set()
    assert same == {"small_cnn.cache.npz"} | trt


@pytest.mark.slow
def test_nodes_stay_float_on_every_target(run, tmp_path):
    words = ("--target", ALL, "--keep-float", "op:Gemm", "--keep-float", "Conv_c3", "--effort", 0)
    code, _, error = run("build", *words, "--out", tmp_path)
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
    bound = "--layerPrecisions=Conv_c3:fp16,Gemm_logits:fp16 --precisionConstraints=obey"
    assert bound in notes


def test_a_pattern_that_means_nothing_is_told(run, tmp_path):
    code, _, error = run("build", "--keep-float", "op:Gem", "--out", tmp_path / "o")
    assert code == 1 and "did you mean 'op:Gemm'" in error
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())


@pytest.mark.slow
def test_a_target_that_fails_is_a_row_and_the_others_are_built(run, tmp_path):
    (tmp_path / "bad.cfg").write_text('skip_layers: "nowhere"')
    words = ("--target", ALL, "--ascend-config", tmp_path / "bad.cfg", "--out", tmp_path / "o")
    code, out, _ = run("build", *words)
    assert code == 1 and "nowhere" in out
    found = {target["name"]: target for target in report(tmp_path / "o")["targets"]}
    assert "nowhere" in found["ascend"]["error"] and "files" not in found["ascend"]
    assert (tmp_path / "o" / "small_cnn.int8.onnx").exists()
    assert (tmp_path / "o" / "small_cnn.tensorrt.cache").exists()
    code, _, error = run(
        "build", "--target", "ascend", "--ascend-config", tmp_path / "bad.cfg", "--out", tmp_path
    )
    assert code == 1 and "nowhere" in error  # alone, there is nothing left to report


@pytest.mark.slow
def test_the_report_says_of_each_target_what_was_used(run, tmp_path):
    words = ("--target", ALL, "--out", tmp_path, "--method", "minmax", "--effort", 0)
    assert run("build", *words)[0] == 0
    found = {target["name"]: target for target in report(tmp_path)["targets"]}
    assert {name: target["method"] for name, target in found.items()} == {
        "onnxruntime": "minmax",
        "tensorrt": "minmax",
        "ascend": "AMCT's ARQ and IFMR",
    }
    assert {row["method"] for row in found["ascend"]["tensors"]} == {"ifmr"}
    assert {row["method"] for row in found["onnxruntime"]["tensors"]} == {"minmax"}


def test_a_cache_is_written_for_ascend_alone_too(run, tmp_path):
    code, out, _ = run("calibrate", "--target", "ascend", "-o", tmp_path / "a.cache")
    assert code == 0 and "searched by" not in out
    assert (tmp_path / "a.cache").read_text().startswith("TRT-100300-MinMaxCalibration\n")
    code, _, error = run("build", "--target", "ascend", "--trust-cache", "--cache",
                         tmp_path / "a.cache", "--out", tmp_path)  # fmt: skip
    assert code == 1 and "makes nothing" in error


def test_a_version_that_is_asked_for_is_written_on_reuse_too(run, tmp_path):
    cache = tmp_path / "c"
    assert run("calibrate", "-o", cache)[0] == 0
    assert cache.read_text().startswith("TRT-100300-")
    code, out, _ = run("calibrate", "-o", cache, "--trt-version", "8.6.1")
    assert code == 0 and "reused" in out and cache.read_text().startswith("TRT-8601-")
    assert run("calibrate", "-o", cache)[0] == 0
    assert cache.read_text().startswith("TRT-8601-")  # no wish changes nothing


def test_the_report_says_which_options_a_target_was_given(run, tmp_path):
    words = "--target onnxruntime,tensorrt --int8-stem --rest fp32 --max-batch 4 --effort 0"
    assert run("build", *words.split(), "--out", tmp_path)[0] == 0
    found = {target["name"]: target.get("options") for target in report(tmp_path)["targets"]}
    assert found["onnxruntime"] == {"--int8-stem": ""}
    assert found["tensorrt"] == {"--rest": "fp32", "--max-batch": "4"}
    for name in ("report.md", "report.html"):
        assert "--rest fp32 --max-batch 4" in (tmp_path / name).read_text()


@pytest.mark.slow
def test_a_cache_does_not_grow_with_every_configuration_that_is_tried(run, tmp_path):
    out, names = tmp_path / "o", ["Conv_c1", "Conv_c2", "Conv_c3", "Gemm_logits"]
    words = ("--target", "onnxruntime,ascend", "--out", out, "--effort", 0)
    for kept in [(), *[(n,) for n in names], *[(names[0], n) for n in names[1:]]]:
        assert run("build", *words, *(w for n in kept for w in ("--keep-float", n)))[0] == 0
    keys = json.loads((out / "small_cnn.cache.json").read_text())["observations"]
    variants = {variant for variant, _, _ in keys}
    assert "folded" in variants and len(variants) <= 6


def test_what_was_used_last_is_what_a_cache_carries(run, tmp_path):
    def calibrate(target, *words):
        code, out, error = run("calibrate", "--target", target, "-o", tmp_path / "c", *words)
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
def test_trtexec_is_told_the_type_of_the_rest(run, tmp_path):
    words = ("--target", "tensorrt", "--keep-float", "Conv_c2", "--out", tmp_path, "--effort", 0)
    code, out, _ = run("build", *words)
    assert code == 0 and "--int8 --fp16" in out and "Conv_c2:fp16" in out
    code, out, _ = run("build", *words, "--rest", "fp32")
    assert code == 0 and "--int8" in out and "--fp16" not in out and "Conv_c2:fp32" in out


def test_ranges_of_a_trusted_cache_are_said_to_be_its_own(run, tmp_path):
    assert run("calibrate", "-o", tmp_path / "c")[0] == 0
    for sidecar in sidecars(tmp_path / "c"):
        sidecar.unlink()
    words = ("--trust-cache", "--cache", tmp_path / "c", "--target", "onnxruntime,tensorrt")
    code, out, _ = run("build", *words, "--out", tmp_path / "o")
    assert code == 0 and "mse" not in out and "cache reused" in out
    found = report(tmp_path / "o")
    assert {target["method"] for target in found["targets"]} == {"the trusted cache"}
    assert (tmp_path / "o" / "small_cnn.tensorrt.cache").exists()
    assert not (tmp_path / "o" / "small_cnn.tensorrt.cache.json").exists()  # nobody knows of what


@pytest.mark.slow
def test_a_node_kept_float_has_one_reason_on_every_target(run, tmp_path):
    words = ("--target", ALL, "--keep-float", "Conv_c2", "--out", tmp_path, "--effort", 0)
    assert run("build", *words)[0] == 0
    reasons = {
        row["reason"]
        for target in report(tmp_path)["targets"]
        for row in target["nodes"]
        if row["name"] == "Conv_c2"
    }
    assert reasons == {"kept float as asked"}
