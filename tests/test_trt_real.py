"""The real bindings of TensorRT 8.5.3.1, 10.16.1.11 and 11.4.0.106, without a GPU.

8.5.3.1 is complete, in the environment of scripts/trt_env.sh; of the others scripts/trt_bindings.sh
has the bindings alone. TensorRT for RTX, by the same script, compiles strongly typed models without
a GPU.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from calibrators.tensorrt import CLASSES
from deploy.targets.tensorrt import builder
from tests.models import run_command

ROOT = Path(__file__).parents[1]
HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "calib8"
BINDINGS = Path(os.environ.get("CALIB8_TRT_BINDINGS", HOME / "trt-bindings"))
EIGHT, TEN, ELEVEN, RTX = "8.5.3.1", "10.16.1.11", "11.4.0.106", "rtx-1.7.1.116"
PYTHONS = dict.fromkeys((TEN, ELEVEN, RTX), Path(sys.executable))
PYTHONS[EIGHT] = Path(os.environ.get("CALIB8_TRT_ENV", HOME / f"trt-{EIGHT}")) / "bin" / "python"
# Names that our code reaches only where a TensorRT has them.
GONE = {f"BuilderFlag.{flag}" for flag in ("FP16", "INT8", "BF16", "OBEY_PRECISION_CONSTRAINTS")}
GONE |= {*CLASSES.values()}

MISSING_NAMES_PROGRAM = """import functools, json, sys, tensorrt as trt
find = lambda name: functools.reduce(lambda o, n: getattr(o, n, None), name.split("."), trt)
print(json.dumps([name for name in json.load(sys.stdin) if find(name) is None]))"""
COMPILE_PROGRAM = """import json, sys, tensorrt_rtx_libs, tensorrt_rtx_bindings as trt
logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
builder = trt.Builder(logger)
network, config = builder.create_network(0), builder.create_builder_config()
parser = trt.OnnxParser(network, logger)
parsed = parser.parse_from_file(sys.argv[1])
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM89, 0)  # Ada has fp8
profile = builder.create_optimization_profile()
for tensor in map(network.get_input, range(network.num_inputs)):
    profile.set_shape(tensor.name, *[[abs(size) for size in tensor.shape]] * 3)
config.add_optimization_profile(profile)
plan = builder.build_serialized_network(network, config) if parsed else None
errors = [parser.get_error(at).desc() for at in range(parser.num_errors)]
print(json.dumps([errors, plan.nbytes if plan else 0]))"""


def run(version, *arguments, input_text=""):
    """Return the JSON that a program prints in the Python with the real bindings of a version."""
    folder = BINDINGS / version if version != EIGHT else PYTHONS[EIGHT].parent
    if not folder.exists():
        pytest.skip(f"no TensorRT {version}: scripts/trt_env.sh and trt_bindings.sh make them")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    if version != EIGHT:
        env |= {"PYTHONPATH": f"{ROOT}:{folder}", "LD_LIBRARY_PATH": str(folder)}
    command, options = [str(PYTHONS[version]), *arguments], {"capture_output": True, "timeout": 600}
    done = subprocess.run(command, env=env, input=input_text, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def missing_names(version, names):
    """The dotted names that this TensorRT has not."""
    return set(run(version, "-c", MISSING_NAMES_PROGRAM, input_text=json.dumps(sorted(names))))


def names_in_code():
    """The dotted names of TensorRT in our code and its tables."""
    files = [*(ROOT / "deploy").rglob("*.py"), *(ROOT / "calibrators").rglob("*.py")]
    trees = [ast.parse(text) for text in map(Path.read_text, files) if "import tensorrt" in text]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    names = {text[4:] for text in map(ast.unparse, nodes) if text.startswith("trt.")}
    flags = {"INT8", "FP16", "BF16", *builder.ENGINE_FLAGS.values()}
    for flag in flags:
        names.add(f"BuilderFlag.{flag}" if flag.isupper() else f"IBuilderConfig.{flag}")
    names |= {
        f"HardwareCompatibilityLevel.{level}" for level in builder._COMPATIBILITY_LEVELS.values()
    }
    return names | set(CLASSES.values())


@pytest.mark.parametrize(("version", "gone"), [(TEN, set()), (ELEVEN, GONE)])
def test_names_in_our_code_exist(version, gone):
    names = names_in_code()
    assert {"ILogger.Severity", "Dims", "BuilderFlag.TF32", *GONE} <= names
    assert missing_names(version, names) == gone


def fake_names(fake):
    """The dotted names of the fake, but for those that only tests look at."""
    for name, value in vars(fake).items():
        if name[0] == "_" or getattr(value, "__module__", "") != fake.__name__:
            continue
        members = getattr(value, "__members__", vars(value) if isinstance(value, type) else ())
        yield name
        yield from (f"{name}.{member}" for member in members if member[0] != "_")


@pytest.mark.parametrize("version", [EIGHT, TEN, ELEVEN])
def test_fake_has_only_real_names(version, tensorrt):
    fake = tensorrt(version)
    names = {name for name in fake_names(fake) if not {*name.split(".")} & {*fake.STATE.split()}}
    assert len(names) > 80
    assert missing_names(version, names) == set()


@pytest.fixture(scope="module")
def driver_report(request):
    """The report of tests/drive_trt.py; one process for all tests of a version."""
    return run(request.param, str(ROOT / "tests" / "drive_trt.py"))


calibrating = pytest.mark.parametrize("driver_report", [EIGHT, TEN], indirect=True)


@calibrating
@pytest.mark.parametrize(
    ("name", "number"), [("legacy", 0), ("entropy", 1), ("entropy2", 2), ("minmax", 3)]
)
def test_calibrators_are_known_to_tensorrt(driver_report, name, number):
    calibrator = driver_report["algorithms"][name]
    assert calibrator["is_trt"]
    assert (calibrator["cpp"], calibrator["batch_size"]) == (number, 1)
    assert calibrator["run"].startswith("ok TRT-8503-")


@calibrating
def test_tensorrt_reads_feed_or_cache(driver_report):
    assert driver_report["bytes_seen"] is True
    assert driver_report["whole"] == "ok TRT-8503-EntropyCalibration2\ndata: 3c008912\n"
    assert driver_report["longer_feed"] == driver_report["whole"]
    assert driver_report["reused"].startswith("ok ")
    assert driver_report["reused_taken"] == 0
    assert driver_report["refused_but_fed"] == driver_report["whole"]
    assert driver_report["algorithms"]["legacy"]["legacy"] == [0.999999, 1.0]
    assert driver_report["algorithms"]["legacy"]["histogram"] is None


@calibrating
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("short", "got 2 of 3"),
        ("empty", "got 0 of 3"),
        ("raises", "OSError: the disk with the images went away"),
        ("wrong_shape", "OPT shape [2, 3, 4, 4] only, got [1, 3, 4, 4] in batch 1"),
        ("nan", "NaN or Inf in 'data' of batch 1"),
        ("no_cache_written", "wrote no cache"),
        ("refused", "must take the known cache"),
        ("unknown", "got 'kl'"),
    ],
)
def test_swallowed_errors_are_raised(driver_report, case, reason):
    assert reason in driver_report[case]


@pytest.mark.parametrize("driver_report", [EIGHT, TEN, ELEVEN], indirect=True)
def test_parts_without_gpu_work(driver_report):
    eight, parts = driver_report["version"] == EIGHT, driver_report["small_parts"]
    assert parts["dims"] == [1, -1, 3]
    dtypes = {"FLOAT": "float32", "HALF": "float16", "INT8": "int8", "INT32": "int32"}
    assert dtypes.items() <= parts["dtypes"].items()
    assert eight or {"BF16": "bfloat16", "INT4": None}.items() <= parts["dtypes"].items()
    assert parts["times"] == [["a", 1.0]]
    assert parts["shape"] == [1, 2]
    assert ("STRONGLY_TYPED" in parts["typed"]) != eight
    assert parts["log"] == [["wrong"], ["wrong", "said"]]
    assert parts["one_logger"]
    message = driver_report["without_gpu"]
    has_failed = "could not make a builder on this machine: " in message
    reason = "CUDA initialization failure" if eight else "factory function returned nullptr"
    assert (message == "built" and eight) or (has_failed and reason in message)
    assert not eight or (
        driver_report["opencv"][0].startswith("4.") and driver_report["opencv"][1] == 0
    )


def compile_model(model):
    """Return the parser errors of TensorRT for RTX for a model file, and the engine's size."""
    return run(RTX, "-c", COMPILE_PROGRAM, str(model))


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--rest", "bf16"), ("--precision", "fp8")], ids=" ".join)
def test_nvidias_compiler_takes_built_models(options, tmp_path):
    data = ROOT / "datasets" / "fashion"
    quick = ("--target", "tensorrt", "--duration", 0, "--effort", 0, "--accept", *options)
    run_command(
        "build", data / "fashion.onnx", "--images", data / "calib", "--out", tmp_path, *quick
    )
    for name in ("fashion.tensorrt.qdq.onnx", "fashion.tensorrt.typed.onnx"):
        errors, size = compile_model(tmp_path / name)
        assert not errors
        assert size > 100_000
    model = onnx.load(tmp_path / name)
    scale_names = {n.input[1] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    for tensor in model.graph.initializer:
        if tensor.name in scale_names:  # a scale of another type than what it quantizes
            tensor.CopyFrom(numpy_helper.from_array(np.float32(0.1), tensor.name))
    onnx.save(model, tmp_path / "mixed.onnx")
    assert compile_model(tmp_path / "mixed.onnx")[1] == 0
