"""How often a build decodes images and runs models, and what a cache carries over."""

import json
import shutil
from itertools import cycle

import onnx
import pytest

from deploy.calibration.store import sidecars
from deploy.targets import TARGETS


def cache_bytes(cache):
    return [p.read_bytes() for p in (cache, *sidecars(cache))]


ALL_TARGETS = ",".join(TARGETS)


METHODS = ["minmax", "mse", "percentile", "entropy", "entropy-tensorrt", "legacy"]


@pytest.fixture
def run_small(run, small_cnn, pictures):
    """(command, *arguments) -> what it prints for the small network and its pictures, one line."""

    def call(command, *arguments, code=0):
        options = ("--images", pictures, *arguments, "--size", "16x16")
        if command == "build":
            options = (*options, "--duration", 0)
        exit_code, out, error = run(command, small_cnn, *options)
        assert exit_code == code, error
        return " ".join((out + error).split())

    return call


def read_report(out):
    return json.loads((out / "report.json").read_text())


def work_counts(out):
    counts = read_report(out)["work"]
    runs = sum(counts.get("calibration_runs", {}).values())
    return {
        "decodes": counts["decodes"],
        "calibration": runs,
        "reference": counts["reference_runs"],
    }


@pytest.mark.slow
def test_images_are_decoded_once_per_build(run_small, pictures, tmp_path):
    held_out = shutil.copytree(pictures, tmp_path / "held")
    (held_out / "00.png").unlink()
    arguments = ("--target", ALL_TARGETS, "--eval-images", held_out, "--out", tmp_path / "o")
    run_small("build", *arguments)
    # two variants of the model, each over the 20 pictures; 19 others to judge by, and the inner
    # tensors of 4 of these
    assert work_counts(tmp_path / "o") == {
        "decodes": 20 + 19,
        "calibration": 40,
        "reference": 4 + 19,
    }
    assert set(read_report(tmp_path / "o")["work"]["engine_runs"].values()) == {19}
    output = run_small("build", *arguments, "--verbose")
    second = work_counts(tmp_path / "o")
    assert second["calibration"] == 0
    assert second["reference"] == 4 + 19
    # a few calibration pictures, for shapes, integer checks and the rounding of weights
    assert second["decodes"] <= 20 + 19
    assert "no calibration inference" in output or "0 calibration" in output


@pytest.mark.slow
def test_shared_evaluation_images_are_decoded_once(run_small, tmp_path):
    output = run_small("build", "--target", ALL_TARGETS, "--out", tmp_path, "--verbose")
    # the float model spoke while it was observed: its file is asked once, its layers four times
    assert work_counts(tmp_path) == {"decodes": 20, "calibration": 40, "reference": 1 + 4}
    assert "40 calibration inferences" in output
    assert "5 reference inferences" in output
    output = run_small("calibrate", "-o", tmp_path / "c", "--verbose")
    assert "decoded 20 images, ran 20 inferences" in output


@pytest.mark.slow
def test_added_target_observes_only_its_variant(run_small, tmp_path):
    out = tmp_path / "o"
    runs_by_targets = {}
    for targets in ("onnxruntime", "onnxruntime,ascend", "tensorrt", ALL_TARGETS):
        run_small("build", "--target", targets, "--out", out, "--effort", 0)
        runs_by_targets[targets] = read_report(out)["work"].get("calibration_runs", {})
    assert runs_by_targets["onnxruntime"] == {"folded": 20}
    (variant,) = runs_by_targets["onnxruntime,ascend"]
    assert "ARQ" in variant
    assert runs_by_targets["onnxruntime,ascend"][variant] == 20
    assert runs_by_targets["tensorrt"] == {
        "folded": 20
    }  # its cache lists tensors that the others do not
    assert runs_by_targets[ALL_TARGETS] == {}


@pytest.mark.slow
def test_only_new_statistics_run_the_model(run_small, tmp_path):
    runs = {}
    for method in ("mse", "minmax", "entropy-tensorrt", "legacy", "mse"):
        run_small(
            "build", "--target", ALL_TARGETS, "--out", tmp_path, "--method", method, "--effort", 0
        )
        runs[method] = work_counts(tmp_path)["calibration"]
    # 20 of the cleaned model, 20 of the model as TensorRT reads it, one more each for the range
    assert runs == {"mse": 0, "minmax": 0, "entropy-tensorrt": 42, "legacy": 20}


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("ascend", None),
        *zip(cycle(("onnxruntime", "tensorrt")), METHODS, strict=False),
    ],
)
def test_build_accepts_the_cache_of_calibrate(run_small, tmp_path, target, method):
    cache = tmp_path / "c.cache"
    arguments = ("--target", target, *(("--method", method) if method else ()))
    run_small("calibrate", *arguments, "-o", cache)
    old_files = cache_bytes(cache)
    build_options = ("--cache", cache, "--require-cache", "--out", tmp_path / "o", "--effort", 0)
    assert "cache reused" in run_small("build", *arguments, *build_options)
    assert work_counts(tmp_path / "o")["calibration"] == 0
    assert cache_bytes(cache) == old_files


@pytest.mark.parametrize(
    ("target", "changed"),
    [
        ("onnxruntime", ("percentile", "--percent", "99.99", "95")),
        ("tensorrt", ("lp", "--power", "3", "1.2")),
    ],
)
def test_method_parameter_changes_dependent_files_only(run_small, tmp_path, target, changed):
    method, flag, *values = changed
    files_by_run = []
    for value in values:
        arguments = ("--method", method, flag, value, "--target", target, "--effort", "0")
        run_small("build", *arguments, "--out", tmp_path / value)
        paths = [path for path in (tmp_path / value).rglob("*") if path.is_file()]
        files_by_run.append({path.name: path.read_bytes() for path in paths})
    equal_names = {name for name, data in files_by_run[1].items() if files_by_run[0][name] == data}
    # the float model and the statistics are the same; the ranges, and what holds them, are not
    target_files = {
        "onnxruntime": {"small_cnn_run.py"},
        "tensorrt": {"small_cnn.tensorrt.onnx", "small_cnn_trtexec.sh"},
    }
    assert equal_names == {"small_cnn.cache.npz"} | target_files[target]


@pytest.mark.slow
def test_keep_float_works_on_every_target(run_small, tmp_path):
    float_nodes = ("--keep-float", "op:Gemm", "--keep-float", "Conv_c3")
    options = ("--target", ALL_TARGETS, "--effort", 0, "--method", "minmax", "--out", tmp_path)
    run_small("build", *float_nodes, *options)
    targets = {target["name"]: target for target in read_report(tmp_path)["targets"]}
    for target in targets.values():
        nodes = {node["name"]: node for node in target["nodes"]}
        for node in (nodes["Gemm_logits"], nodes["Conv_c3"]):
            assert (node["precision"], node["reason"]) == ("float32", "kept float as asked")
        assert nodes["Conv_c2"]["precision"] != "float32"
    config = json.loads((tmp_path / "small_cnn_config.json").read_text())
    assert not config["Conv_c3"]["quant_enable"]
    assert config["Conv_c2"]["quant_enable"]
    quantized = onnx.load(tmp_path / "small_cnn.tensorrt.qdq.onnx")
    input_by_node = {node.name: node.input[0] for node in quantized.graph.node}
    assert input_by_node["Conv_c3"] == "r2"
    assert input_by_node["Conv_c2"] != "r1"
    notes = " ".join(note for target in targets.values() for note in target.get("notes", ()))
    assert "--layerPrecisions=Conv_c3:fp16,Gemm_logits:fp16 --precisionConstraints=obey" in notes
    assert "--int8 --fp16" in (tmp_path / "small_cnn_trtexec.sh").read_text()
    methods = dict.fromkeys(TARGETS, "minmax") | {"ascend": "AMCT's ARQ and IFMR"}
    assert {name: target["method"] for name, target in targets.items()} == methods
    for name, method in (("ascend", "ifmr"), ("onnxruntime", "minmax")):
        assert {row["method"] for row in targets[name]["tensors"]} == {method}


def test_unknown_operator_pattern_is_refused(run_small, tmp_path):
    message = run_small("build", "--keep-float", "op:Gem", "--out", tmp_path / "o", code=1)
    assert "did you mean 'op:Gemm'" in message
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())


@pytest.mark.slow
def test_failed_target_leaves_the_others_built(run_small, tmp_path):
    (tmp_path / "bad.cfg").write_text('skip_layers: "nowhere"')
    arguments = ("--ascend-config", tmp_path / "bad.cfg", "--out", tmp_path / "o")
    assert "nowhere" in run_small("build", "--target", ALL_TARGETS, *arguments, code=1)
    target_by_name = {target["name"]: target for target in read_report(tmp_path / "o")["targets"]}
    assert "nowhere" in target_by_name["ascend"]["error"]
    assert "files" not in target_by_name["ascend"]
    assert (tmp_path / "o" / "small_cnn.int8.onnx").exists()
    assert (tmp_path / "o" / "small_cnn.tensorrt.cache").exists()
    output = run_small("build", "--target", "ascend", *arguments, "--out", tmp_path, code=1)
    assert output.startswith("calib8: error: ")
    assert "nowhere" in output  # nothing is left to report


def test_ascend_alone_writes_a_cache(run_small, tmp_path):
    arguments = ("--target", "ascend")
    cache = tmp_path / "a.cache"
    assert "searched by" not in run_small("calibrate", *arguments, "-o", cache)
    assert cache.read_text().startswith("TRT-100300-MinMaxCalibration\n")
    arguments = (*arguments, "--trust-cache", "--cache", cache, "--out", tmp_path)
    assert "makes nothing" in run_small("build", *arguments, code=1)


def test_cache_takes_the_requested_version(run_small, tmp_path):
    cache = tmp_path / "c"
    run_small("calibrate", "-o", cache)
    assert cache.read_text().startswith("TRT-100300-")
    assert "reused" in run_small("calibrate", "-o", cache, "--trt-version", "8.6.1")
    assert cache.read_text().startswith("TRT-8601-")
    run_small("calibrate", "-o", cache)
    assert cache.read_text().startswith("TRT-8601-")  # no wish changes nothing


def test_report_lists_options_of_targets(run_small, tmp_path):
    arguments = "--target onnxruntime,tensorrt --int8-stem --rest fp32 --max-batch 4 --effort 0"
    run_small("build", *arguments.split(), "--keep-float", "Conv_c2", "--out", tmp_path)
    script = (tmp_path / "small_cnn_trtexec.sh").read_text()
    assert "--int8 " in script
    assert "--fp16" not in script
    assert "Conv_c2:fp32" in script
    options_by_target = {
        target["name"]: target.get("options") for target in read_report(tmp_path)["targets"]
    }
    assert options_by_target["onnxruntime"] == {"--int8-stem": ""}
    assert options_by_target["tensorrt"] == {"--rest": "fp32", "--max-batch": "4"}
    for name in ("report.md", "report.html"):
        assert "--rest fp32 --max-batch 4" in (tmp_path / name).read_text()


@pytest.mark.slow
def test_cache_drops_the_oldest_variant(run_small, tmp_path):
    def calibrate(target, *options):
        return run_small("calibrate", "--target", target, "-o", tmp_path / "c", *options)

    calibrate("onnxruntime")
    nodes = ["Conv_c1", "Conv_c2", "Conv_c3", "Gemm_logits"]
    for name in nodes:  # each is a form of the model with other weights
        calibrate("ascend", "--keep-float", name)
    calibrate("tensorrt", "--method", "legacy")
    calibrate("ascend", "--keep-float", "Conv_c[12]")  # one form too many: the oldest goes
    keys = json.loads((tmp_path / "c.json").read_text())["observations"]
    variants = {variant for variant, _, _ in keys}
    assert len(variants) == 6
    assert "folded" in variants  # which every target reads
    assert "reused" in calibrate("tensorrt", "--method", "legacy")
    assert "written" in calibrate("ascend", "--keep-float", nodes[0])


@pytest.mark.slow
def test_report_names_the_trusted_cache(run_small, tmp_path):
    cache, out = tmp_path / "c", tmp_path / "o"
    run_small("calibrate", "-o", cache)
    for sidecar in sidecars(cache):
        sidecar.unlink()
    trust = ("--trust-cache", "--cache", cache)
    output = run_small("build", *trust, "--target", "onnxruntime,tensorrt", "--out", out)
    assert "mse" not in output
    assert "cache reused" in output
    assert {target["method"] for target in read_report(out)["targets"]} == {"the trusted cache"}
    assert (out / "small_cnn.tensorrt.cache").exists()
    assert not (out / "small_cnn.tensorrt.cache.json").exists()  # nobody knows of what
