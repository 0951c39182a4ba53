"""Command lines: options that reach the pipeline, those that are refused, and exit codes."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import click
import numpy as np
import onnx
import pytest

import calib8
from calib8 import __version__
from deploy.calibration.reuse import CachePolicy
from deploy.cli import cli, main
from deploy.commands import base
from deploy.commands.image_options import parse_size_option
from deploy.errors import CacheError, ConfigError, FeedError
from deploy.feed.sampling import Choice
from deploy.report.verdict import Gates
from deploy.runtimes.ort import OrtSession
from deploy.targets import TARGETS, Ascend, OnnxRuntime, TensorRT, make_targets
from deploy.targets.base import BuildResult, Target
from deploy.targets.options import check_options, declared_options, option
from deploy.tuning.search_options import Tuning

# Commands whose options come from the tables of targets and searches.
TABLE_COMMANDS = ("build", "calibrate", "inspect", "bench")


@pytest.fixture
def build_call(monkeypatch, named_files):
    """What `build` and `calibrate` of the pipeline were called with."""
    recorded = {}

    def record(model, dataset, options):
        for value in (dataset, options, options.calibration):
            recorded.update({field.name: getattr(value, field.name) for field in fields(value)})
        return SimpleNamespace(failed=recorded.get("fails", False), unusable=False)

    monkeypatch.setattr("deploy.pipeline.build.build_with", record)

    def show_screen(report):
        recorded["verbose"] = False
        return ""

    def show_everything(report):
        recorded["verbose"] = True
        return ""

    monkeypatch.setattr("deploy.report.to_screen", show_screen)
    monkeypatch.setattr("deploy.report.to_text", show_everything)
    return recorded


BUILD = ("build", "m.onnx", "--images", "p")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", OnnxRuntime()),
        ("--int8-stem --full-weights", OnnxRuntime(int8_stem=True, full_weights=True)),
        (
            "--target tensorrt --engine-from cache --rest fp32 --workspace 64 --max-batch 4",
            TensorRT(form="cache", rest="fp32", workspace_mib=64, max_batch=4),
        ),
        (
            "--target tensorrt --rest bf16 --cuda-graph --calibrator minmax",
            TensorRT(rest="bf16", cuda_graph=True, calibrator="minmax"),
        ),
        (
            "--target tensorrt --float-behind-concat --pair-behind-deconv",
            TensorRT(float_behind_concat=True, pair_behind_deconv=True),
        ),
        ("--target tensorrt --dla", TensorRT(dla=True)),
        (
            "--target ascend --soc Ascend310P3 --ascend-config q.cfg --exact-ifmr",
            Ascend(soc="Ascend310P3", config=Path("q.cfg"), exact=True),
        ),
        (
            "--target ascend --aipp --source-color bgr --atc-flag=--log=error --atc-flag=--x=1",
            Ascend(aipp=True, source_color="bgr", atc_flags=("--log=error", "--x=1")),
        ),
        ("--target ascend --no-aipp --first-layer-int8", Ascend(first_layer_int8=True)),
    ],
)
def test_target_options_reach_the_target_fields(arguments, expected, build_call, run):
    assert run(*BUILD, *arguments.split())[0] == 0
    (built_target,) = build_call["targets"]
    assert type(built_target) is type(expected)
    assert declared_options(int) == ()
    for declared in declared_options(type(expected)):
        assert getattr(built_target, declared.name) == getattr(expected, declared.name)


@pytest.mark.parametrize(
    "arguments",
    [
        "ascend,tensorrt",
        "ascend --target tensorrt",
        "ascend,tensorrt,ascend --target tensorrt",
    ],
)
def test_targets_come_by_comma_or_repetition(arguments, build_call, run):
    assert run(*BUILD, "--target", *arguments.split())[0] == 0
    assert [target.name for target in build_call["targets"]] == ["ascend", "tensorrt"]


def test_build_options_reach_the_pipeline(build_call, tmp_path, run):
    labels = tmp_path / "labels.txt"
    labels.write_text("3\n1\n")
    arguments = (
        "--method percentile --percent 99.9 --keep-float a --keep-float /b* --cache c "
        "--require-cache --trt-version 10.3.0 --skip-bad --eval-images e --duration 0 --verbose "
        "--limit 9 --threads 1 --out o --size 8x9 --resize letterbox --interpolation area "
        "--color bgr --scale 1/255 --mean 0.5 --std 0.25,0.5,1 --pad 7 --layout nhwc"
    )
    assert run(*BUILD, *arguments.split(), "--labels", labels)[0] == 0
    assert build_call["method"].label == "percentile 99.9"
    assert build_call["float_nodes"] == ("a", "/b*")
    assert build_call["verbose"] is True
    policy = build_call["cache"]
    assert policy.path == Path("c")
    assert policy.require
    assert policy.trt_version == "10.3.0"
    assert build_call["evaluation"].source == "e"
    assert build_call["labels"].labels == (3, 1)
    assert build_call["duration_s"] == 0
    assert build_call["limit"] == Choice(limit=9)
    assert build_call["skip_bad"]
    assert (build_call["threads"], build_call["out"]) == (1, Path("o"))
    assert build_call["preprocess"] == {  # without a preset, the rest is what the model carries
        **{"size": (8, 9), "resize": "letterbox", "interpolation": "area", "color": "bgr"},
        **{"scale": 1 / 255, "mean": (0.5,), "std": (0.25, 0.5, 1), "pad": (7,), "layout": "nhwc"},
    }


def test_presets_and_policies_reach_the_pipeline(build_call, run):
    run(*BUILD, "--preprocess", "imagenet", "--short-side", "300", "--refresh")
    assert build_call["preprocess"].short_side == 300
    assert build_call["cache"].refresh
    run(*BUILD, "--trust-cache", "--for", "avx2", "--prefer", "size")
    assert build_call["cache"].trust
    assert build_call["method"] is None
    assert not build_call["verbose"]
    tuning = build_call["tuning"]
    assert (tuning.cpu, tuning.prefer, build_call["duration_s"]) == ("avx2", "size", None)


def test_method_needs_one_target_that_follows(build_call, run):
    assert run(*BUILD, "--target", "ascend,onnxruntime", "--method", "entropy")[0] == 0
    assert build_call["method"].name == "entropy"


def test_failed_target_is_exit_code_1(build_call, run):
    build_call["fails"] = True
    assert run(*BUILD)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--percent 99", "percent"),
        ("--method mse --batch-size 4", "--batch-size belongs to --method entropy-tensorrt"),
        ("--method entropy-tensorrt --percent 99", "percent"),
        ("--soc Ascend310P3", "--target ascend is needed for --soc, got --target onnxruntime"),
        (
            "--target tensorrt,ascend --int8-stem --full-weights",
            "--target onnxruntime is needed for --int8-stem and --full-weights",
        ),
        ("--target tensorrt --atc-flag=--a=b", "--target ascend is needed for --atc-flag"),
        ("--target tensorrtt", "'tensorrtt'; did you mean 'tensorrt'?"),
        ("--target tensorrt,", "got ''"),
        ("--method entropy --trust-cache", "--trust-cache"),
        ("--refresh --trust-cache", "leave one of them out"),
        ("--refresh --require-cache", "leave one of them out"),
        ("--target ascend --source-color bgr", "give --aipp too"),
        ("--target ascend --source-size 20x20", "give --aipp too"),
        ("--target ascend --source-size 8x8", "give --aipp too"),
        ("--target tensorrt --calibrator minmax --engine-from qdq", "build from the cache"),
    ],
)
def test_option_without_effect_is_refused(arguments, message, build_call, run):
    code, _, error = run(*BUILD, *arguments.split())
    assert code == 1
    assert message in error
    assert not build_call
    assert error.startswith("calib8: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("build", 2, "Missing argument 'MODEL'"),
        ("build m.onnx", 2, "Missing option '--images'"),
        ("build m.onnx --images p --methud mse", 2, "No such option"),
        ("build m.onnx --images p --method best", 2, "Invalid value for '--method'"),
        ("build m.onnx --images p --max-batch 0", 2, "Invalid value for '--max-batch'"),
        ("build m.onnx --images p --target tensorrt --engine-from x", 2, "'--engine-from'"),
        ("calibrate m.onnx --images p --soc Ascend310P3", 2, "No such option"),
        ("bench m.onnx --shape x", 2, "must look like"),
        ("biuld", 2, "No such command 'biuld'; did you mean 'build'?"),
        ("cache check x --verbose", 1, "--verbose goes with --model"),
        ("ascend config x -o y --from z --batch-num 2", 1, "--batch-num goes with"),
        ("ascend config x -o y.cfg", 1, "is JSON, got y.cfg"),
        ("ascend config x -o y --from z --symmetric", 1, "--symmetric goes with"),
    ],
)
@pytest.mark.usefixtures("named_files")
def test_wrong_command_line_is_one_line(arguments, code, message, run):
    exit_code, out, error = run(*arguments.split())
    assert exit_code == code
    assert message in error
    assert not out
    assert error.startswith("calib8: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (TensorRT, {"max_batch": 0}, "max_batch of TensorRT is 1 or more, got 0"),
        (TensorRT, {"workspace_mib": 0}, "is 1 or more"),
        (TensorRT, {"calibrator": "x"}, "is one of entropy2, entropy, minmax, legacy"),
        (Ascend, {"aipp": True, "source_color": "hsv"}, "is one of rgb, bgr, nv12, nv21"),
        (Gates, {"max_loss": 1}, "below 1, got 1; one point is 0.01"),
        (Tuning, {"max_loss": -1}, "got -1"),
        (Gates, {"min_speedup": float("nan")}, "0 or more, got nan"),
    ],
)
def test_python_value_outside_limits_is_refused(target, options, message):
    with pytest.raises(ConfigError, match=message):
        target(**options)


@pytest.mark.parametrize("version", ["10.3", "8.6", "8.10.0"])
def test_wrong_tensorrt_version_is_refused_early(version):
    with pytest.raises(CacheError, match=version):
        CachePolicy(trt_version=version)


def test_python_text_becomes_path_or_target(small_cnn, wording):
    assert Ascend(config="x.cfg").config == Path("x.cfg")  # type: ignore[arg-type]
    assert TensorRT(plugins=("a.so",)).plugins == (Path("a.so"),)  # type: ignore[arg-type]
    assert CachePolicy(path="a.cache").path == Path("a.cache")  # type: ignore[arg-type]
    assert [target.name for target in make_targets("tensorrt")] == ["tensorrt"]
    for arguments in ({"engine": onnx.ModelProto()}, {"engine": small_cnn, "against": 3}):
        with pytest.raises(ConfigError) as refusal:
            calib8.bench(**arguments)
        wording.check(refusal.value)
    images = np.zeros((4, 3, 16, 16), np.float32)
    with pytest.raises(FeedError, match="got 3 labels for 4"):  # of an array too
        calib8.build(small_cnn, images, eval_images=images, labels=np.arange(3))


def test_keep_float_takes_patterns(small_cnn, pictures, tmp_path, run):
    (tmp_path / "float.txt").write_text("# the head\nop:Gemm\n")
    arguments = ("--keep-float", "Conv_c[12]", "--keep-float", f"@{tmp_path / 'float.txt'}")
    _, out, _ = run("inspect", small_cnn, "--all", "--target", "onnxruntime,tensorrt", *arguments)
    assert "fused" not in out
    float_nodes = {line.split()[2] for line in out.splitlines() if "as asked" in line}
    assert float_nodes == {"Conv_c1", "Conv_c2", "Gemm_logits"}
    assert "on onnxruntime" in out
    assert "on tensorrt" in out
    images = ("--images", pictures, "--size", "16x16", "--limit", "4")
    run.ok("build", small_cnn, *images, "--out", tmp_path, "--duration", "0", *arguments)
    graph = onnx.load(tmp_path / "small_cnn.int8.onnx").graph
    quantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    convs = [node for node in graph.node if node.op_type == "Conv"]
    quantized_by_conv = {node.name: node.input[0] in quantized for node in convs}
    assert quantized_by_conv == {"Conv_c1": False, "Conv_c2": False, "Conv_c3": True}
    arguments = ("--target", "onnxruntime,tensorrt,ascend", "--keep-float", "op:Relu")
    documents = json.loads(run.ok("inspect", small_cnn, "--json", "-", *arguments))
    notes_by_target = {document["target"]: "".join(document["notes"]) for document in documents}
    assert "on tensorrt, --keep-float" in notes_by_target["tensorrt"]
    assert "on onnxruntime, " not in notes_by_target["tensorrt"]
    assert "fused" not in notes_by_target["ascend"]
    cache = ("-o", tmp_path / "c.cache", "--keep-float", "Convx*")
    assert "'Convx*'" in run.fails("calibrate", small_cnn, *images, *cache)


def test_options_useless_for_input_are_refused(small_cnn, run):
    arguments = ("bench", small_cnn, "--duration", "0", "--warm-up", "0", "--seed", "3")
    assert ".engine, .plan" in run.fails(*arguments, "--cuda-graph")


@dataclass(frozen=True, kw_only=True)
class Toy(Target):
    """A target as CONTRIBUTING describes it."""

    steps: int = option(
        4, help="Steps of the toy.", minimum=1, changes_placement=True, changes_observations=True
    )
    tag: tuple[str, ...] = option((), help="A tag of the toy.")
    rate: float = option(0.5, help="Rate of the toy.", minimum=0)
    turbo: bool = option(True, help="Let the toy run fast.", changes_runs=True)
    name: str = "toy"
    engines: ClassVar[tuple[str, ...]] = (".toy",)
    writes: ClassVar[tuple[str, ...]] = (".toy",)
    opened: ClassVar[list[object]] = []

    def __post_init__(self):
        check_options(self)

    plan = staticmethod(OnnxRuntime().plan)
    trial = staticmethod(OnnxRuntime().trial)

    def demand(self, subject):
        return subject.histogram_observations(
            self.scaled_tensors(subject.model, subject.float_nodes)
        )

    def build(self, request):
        path = request.folder / f"{request.name}.toy"
        path.write_bytes(request.model.SerializeToString())
        return BuildResult(
            target=self.name,
            engine=path,
            runnable=path,
            files={"toy": path},
            decisions=self.plan(request.model).decisions,
            notes=(f"{self.steps} steps, {self.tag}",),
        )

    def describe_sdk(self):
        return "toys"

    def open(self, engine, *, threads=None):
        self.opened.append(self)
        return OrtSession.open(engine.read_bytes(), threads=threads)


@pytest.fixture
def toy_target(monkeypatch, named_files):
    """Register the toy, and import the commands again: their options come from the table."""
    monkeypatch.setitem(TARGETS, "toy", Toy)
    for name in (*TABLE_COMMANDS, "diagnose"):  # the module of inspect
        monkeypatch.delitem(sys.modules, f"deploy.commands.{name}", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("toy_target")
def test_registered_target_works_in_every_command(small_cnn, tmp_path, run):
    _, out, _ = run("build", "--help-all")
    for flag in ("--steps", "--tag", "--rate", "--turbo / --no-turbo"):
        assert flag in out.split("Target toy:")[1]
    assert ",".join(TARGETS) in "".join(out.split())  # lines end at spaces and hyphens
    assert "--steps" in run("inspect", "--help")[1]
    assert "--turbo" in run("bench", "--help-all")[1]
    assert "--turbo" not in run("calibrate", "--help-all")[1]
    np.save(tmp_path / "x.npy", np.ones((2, 3, 16, 16), np.float32))
    feed = ("--images", tmp_path / "x.npy", "--target", "toy")
    arguments = ("--steps", "7", "--tag", "a", "--tag", "b", "--rate", "1", "--no-turbo")
    run.ok("build", small_cnn, *feed, *arguments, "--out", tmp_path, "--duration", "0")
    (target,) = json.loads((tmp_path / "report.json").read_text())["targets"]
    assert "7 steps, ('a', 'b')" in target["notes"]
    assert "on toy" in run.ok("inspect", small_cnn, "--target", "toy", "--steps", "2")
    assert "statistics" in run.ok("calibrate", small_cnn, *feed, "-o", tmp_path / "t.cache")
    Toy.opened.clear()
    code, out, error = run("bench", tmp_path / "small_cnn.toy", "--duration", "0", "--no-turbo")
    assert code == 0, error
    assert "small_cnn.toy" in out, error
    assert Toy.opened
    assert not Toy.opened[0].turbo


@pytest.mark.usefixtures("toy_target")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--target onnxruntime --steps 3", 1, "--target toy is needed for --steps"),
        ("--target toy --steps 0", 2, "'--steps'"),
        ("--target toyy", 1, "did you mean 'toy'?"),
    ],
)
def test_options_of_registered_target_are_checked(arguments, code, message, run):
    exit_code, _, error = run(*BUILD, *arguments.split())
    assert exit_code == code
    assert message in error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("a rule, what was got"), 1, "calib8: error: a rule, what was got\n"),
        (KeyboardInterrupt(), 130, "calib8: interrupted"),
        (click.Abort(), 130, "calib8: interrupted"),
        (click.UsageError("no"), 2, "calib8: error: no\n"),
        (MemoryError(), 1, "--threads"),
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied;"),
        (BrokenPipeError(), 1, ""),
        (ModuleNotFoundError("no", name="onnx.helper"), 1, "package onnx,"),
        (ModuleNotFoundError("no", name="deploy.gone"), 70, "fault of calib8"),
    ],
)
def test_failure_is_one_line_with_code(error, code, message, monkeypatch, capsys):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == code
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_full_output_device_is_one_line():
    with Path("/dev/full").open("w") as full:
        arguments = [sys.executable, "-m", "deploy", "--help"]
        process = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True)
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1
    assert "No space left on device" in process.stderr


@pytest.mark.parametrize("module", ["deploy", "calib8"])
def test_python_dash_m_runs_calib8(module):
    arguments = [sys.executable, "-m", module, "--version"]
    process = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert process.stdout.startswith(f"calib8, version {__version__}\ncounting: ")


@pytest.mark.parametrize("target", TARGETS)
def test_inspect_works_for_every_target(small_cnn, target, run):
    out = run.ok("inspect", small_cnn, "--target", target, "--all")
    assert "tensors need a scale" in out
    assert re.search(r"\bu?int8 +Conv\b", out)


# Runs command lines, and prints the exit code of each and which of these modules are imported then.
RUN_AND_TELL_IMPORTS = """
import sys
from deploy.cli import main

for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as stop:
        print(f"{line}:", stop.code, *{"numpy", "onnx", "cv2"} & sys.modules.keys())
"""


@pytest.mark.usefixtures("named_files")
def test_missing_path_is_refused_before_imports():
    command_lines = [
        "build nope.onnx --images p",
        "build m.onnx --images nope",
        "calibrate m.onnx --images nope/x.txt",
        "merge m.onnx nope.shard",
        "bench m.onnx --against nope.onnx",
        "compare m.onnx nope.onnx --images p",
        "explain nope",
        "ascend deploy m.onnx nope.txt --out o",
    ]
    command = [sys.executable, "-c", RUN_AND_TELL_IMPORTS, *command_lines]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.stdout.splitlines() == [f"{line}: 1" for line in command_lines]
    errors = process.stderr.splitlines()
    assert len(errors) == len(command_lines)
    for error in errors:
        assert "error: nope" in error
        assert error.endswith("got nothing there; check the path")


def test_image_source_may_be_no_path():
    for text in ("photos/*.jpg", "loader.py:make", "timm:resnet18", "p[0].png"):
        base.IMAGE_SOURCE.check(text)


@pytest.mark.parametrize("arguments", ["cache shwo", "ascend atuo"])
def test_group_command_is_suggested_once(arguments, run):
    code, _, error = run(*arguments.split())
    assert code == 2
    assert error.count("did you mean") == 1


def test_size_of_one_number_is_a_square():
    assert parse_size_option("640") == (640, 640)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_folder_that_takes_no_files_is_named(pictures, small_cnn, run):
    message = run.fails("build", small_cnn, "--images", pictures, "--out", "/proc/build")
    assert "written to, got /proc;" in message
