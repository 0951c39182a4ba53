"""Fixtures that several test files share."""

import copy
import ctypes
import fcntl
import functools
import gc
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import hypothesis
import numpy as np
import onnx
import pytest
from hypothesis.internal.conjecture import providers

from deploy.graph.index import PROTOBUF, Graph
from deploy.runtimes.ort import OrtSession
from tests.golden_wording import RENEWED_MESSAGES, Wording
from tests.models import as_float32, make_model, parse_nodes, read_markdown, save_net

# Property tests have no limit of time and draw the same values in every run;
# HYPOTHESIS_PROFILE=random draws others in each.
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
if _PROFILE == "fixed":  # constants of the modules loaded so far are drawn too: not here
    providers.is_local_module_file = lambda path: False
for _name, _fixed in (("fixed", True), ("random", False)):
    hypothesis.settings.register_profile(
        _name,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize=_fixed,
        database=None,
        print_blob=True,
    )
hypothesis.settings.load_profile(_PROFILE)


def pytest_collection_finish():
    """Keep the garbage collector from scanning thousands of collected tests again and again."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """`scripts/wording` runs only the tests that check messages."""
    if RENEWED_MESSAGES:
        items[:] = [item for item in items if "wording" in item.fixturenames]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """torch's generator starts from the same seed in every test, whatever ran before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Ctrl-C interrupts as in a terminal; a shell's background commands start with it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def rng() -> np.random.Generator:
    """A separate generator for each test, independent of what other tests draw."""
    return np.random.default_rng(3)


@pytest.fixture(scope="session")
def small_cnn(tmp_path_factory) -> Path:
    """A residual CNN of random weights: x [batch, 3, 16, 16] -> logits [batch, 10]."""
    return save_small_cnn(tmp_path_factory.mktemp("models") / "small_cnn.onnx")


def save_small_cnn(path: Path) -> Path:
    rng = np.random.default_rng(7)
    nodes = parse_nodes(
        "c1 = Conv <pads = [1, 1, 1, 2]> (x, w1, b1) r1 = Relu(c1)"
        "c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2, b2) a = Add(c2, r1) r2 = Relu(a)"
        "c3 = Conv <group = 8, pads = [1, 1, 1, 1]> (r2, w3, b3) r3 = Relu(c3)"
        "p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r3) f = Flatten(p)"
        "logits = Gemm <transB = 1> (f, w4, b4)"
    )
    shapes = {
        "w1": (8, 3, 3, 4),
        "b1": 8,
        "w2": (8, 8, 3, 3),
        "b2": 8,
        "w3": (8, 1, 3, 3),
        "b3": 8,
        "w4": (10, 512),
        "b4": 10,
    }
    weights = {}
    for name, shape in shapes.items():
        scale = 0.05 if name == "w4" else 0.3
        weights[name] = rng.normal(scale=scale, size=shape)
    ends = {"x": ["batch", 3, 16, 16]}, {"logits": ["batch", 10]}
    return save_net(make_model(nodes, *ends, as_float32(weights)), path)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """A folder of 20 small PNG pictures."""
    return save_pictures(tmp_path_factory.mktemp("pictures"))


def save_pictures(folder: Path) -> Path:
    import cv2

    rng = np.random.default_rng(11)
    for number in range(20):
        noise = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{number:02}.png"), cv2.resize(noise, (20, 18)))
    return folder


@pytest.fixture(scope="session")
def detector(tmp_path_factory) -> Path:
    """A tiny detector: x [1, 3, 32, 32] -> boxes in pixels and two scores, y [1, 6, 20]."""
    from deploy.tasks.detector import list_cells

    path = tmp_path_factory.mktemp("detector") / "tiny.onnx"
    side = 32
    rng = np.random.default_rng(4)
    cells, strides = np.hsplit(list_cells((8, 16), (side, side)), [2])
    centres = ((cells + 0.5) * strides).T
    spread = np.array([1, 1, 1, 1, 4, 4]).reshape(6, 1, 1, 1)
    weights = {
        "w8": rng.normal(size=(6, 3, 8, 8)) * spread * 0.06,
        "w16": rng.normal(size=(6, 3, 16, 16)) * spread * 0.03,
        "bias": np.array([0, 0, 0, 0, -4, -4]),
        "anchors": np.concatenate([centres, np.hstack([strides, strides]).T * 1.5])[None],
    }
    nodes = parse_nodes(
        "c8 = Conv <strides = [8, 8]> (x, w8, bias) c16 = Conv <strides = [16, 16]> (x, w16, bias)"
        "r8 = Reshape(c8, flat) r16 = Reshape(c16, flat) all = Concat <axis = 2> (r8, r16)"
        "moves, logits = Split <axis = 1> (all, cut) boxes = Add(moves, anchors)"
        "scores = Sigmoid(logits) y = Concat <axis = 1> (boxes, scores)"
    )
    for node in nodes:
        node.name = node.output[0]
    tensors = as_float32(weights) | {"flat": [1, 6, -1], "cut": [4, 2]}
    return save_net(make_model(nodes, {"x": [1, 3, side, side]}, {"y": [1, 6, 20]}, tensors), path)


@pytest.fixture
def named_files(tmp_path, monkeypatch):
    """Empty files in the folder of the test, for commands whose arguments are tested."""
    monkeypatch.chdir(tmp_path)
    for name in ("m.onnx", "n.onnx", "p", "e", "q.cfg", "build"):
        (tmp_path / name).touch()


@pytest.fixture
def run(capfd, monkeypatch):
    """(arguments) -> exit code, stdout, stderr of `calib8`: no traceback, one line of error.

    `run.ok` gives the stdout of a command that must succeed, `run.fails` the stderr of one that
    must be refused with exit code 1.
    """
    from deploy import terminal
    from deploy.cli import main

    # a slow machine prints progress where a fast one does not
    monkeypatch.setattr(terminal, "LASTING_S", math.inf)
    monkeypatch.setattr(terminal, "EVERY_S", math.inf)

    def call(*arguments):
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capfd.readouterr()
        assert code != 70, err
        assert "Traceback" not in err, err
        assert err.count("\n") <= 1, err
        return code, out, err

    def ok(*arguments):
        code, out, err = call(*arguments)
        assert code == 0, err
        return out

    def fails(*arguments):
        code, out, err = call(*arguments)
        assert code == 1, (out, err)
        return err

    call.ok = ok
    call.fails = fails
    return call


@pytest.fixture
def command(run):
    """(arguments of a command that must succeed) -> its stdout, on one line."""
    return lambda *arguments: " ".join(run.ok(*arguments).split())


@pytest.fixture
def refusal(run):
    """(arguments of a command that must be refused) -> its error message, on one line."""
    return lambda *arguments: " ".join(run.fails(*arguments).split())


@pytest.fixture
def wording(request, tmp_path, tmp_path_factory):
    """Check messages against tests/golden/wording.json: `wording.check(error.value)`."""
    name = f"{request.node.path.name}::{request.node.name}"
    folders = {str(tmp_path): "<tmp>", str(tmp_path_factory.getbasetemp()): "<session>"}
    folders[str(_ROOT)] = "<root>"
    golden = Wording(name, folders)
    yield golden
    golden.store_renewed()


@pytest.fixture
def ascend_build(run, tmp_path):
    """(model, images, configuration, arguments) -> output and report of a build, and its folder."""

    def call(model, images, text, *arguments, suffix=".cfg", code=0, out="o"):
        config = tmp_path / f"my{suffix}"
        folder = tmp_path / out
        config.write_text(text)
        quick = ("--target", "ascend", "--effort", 0, "--duration", 0, "--out", folder)
        options = ("--images", images, *quick, "--ascend-config", config)
        exit_code, output, err = run("build", model, *options, *arguments)
        assert exit_code == code, err
        report = read_markdown(folder) if (folder / "report.md").exists() else ""
        return " ".join([*(output + err).split(), report]), folder

    return call


@pytest.fixture
def no_pass(monkeypatch):
    """A calibration run that observes the model fails the test."""
    observe = "deploy.pipeline.calibration_run.observe"
    monkeypatch.setattr(observe, lambda *a, **k: pytest.fail("the model was observed"))


@pytest.fixture(scope="session")
def histograms():
    """(model, tensors, samples) -> histogram by tensor, from one pass.

    `first` is the size of the first batch, which sets the range by TensorRT's rule; 0: any order.
    """
    from calibrators.statistics import HistogramOf
    from deploy.calibration.observation import Observation, Variant
    from deploy.calibration.one_pass import observe

    def observe_histograms(model, tensors, samples, *, first=0, threads=2):
        variant = Variant("float", lambda _: model)
        observations = [Observation(variant, name, HistogramOf(first)) for name in tensors]
        observed = observe(observations, samples, threads=threads)
        return {o.tensor: observed.recorder(o) for o in observations}

    return observe_histograms


@pytest.fixture
def openvino(tmp_path, monkeypatch):
    """A fake OpenVINO."""
    folder = tmp_path / "fake"
    folder.mkdir()
    shutil.copy(Path(__file__).parent / "fake_openvino.py", folder / "openvino.py")
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("openvino", None)


@pytest.fixture
def tensorrt(monkeypatch):
    """(version, CUDA's binding) -> a fake TensorRT of that version, with two fake GPUs.

    The binding is "pycuda", "cuda-python", "cudart" (cuda-python before 12.6) or "" for none.
    """
    from deploy.targets.tensorrt.log import process_logger

    def load_module(name, file):
        path = Path(__file__).parent / f"{file}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def install(version="10.13.0.35", binding="pycuda"):
        process_logger.cache_clear()  # its class is one of the module that is replaced
        monkeypatch.setenv("FAKE_TENSORRT", version)
        cuda = load_module("fake_cuda", "fake_cuda")
        cuda.reset()
        kinds = {"pycuda": cuda.pycuda(), "cuda-python": cuda.cuda_python()}
        kinds["cudart"] = cuda.cuda_python(old=True)
        absent = {name: None for modules in kinds.values() for name in modules}  # not installed
        for name, module in (absent | kinds.get(binding, {})).items():
            monkeypatch.setitem(sys.modules, name, module)
        real = ctypes.CDLL
        driver = {"libcuda.so.1": cuda.Libcuda}
        monkeypatch.setattr(ctypes, "CDLL", lambda n, *a, **k: driver.get(n) or real(n, *a, **k))
        return load_module("tensorrt", "fake_tensorrt")

    yield install
    process_logger.cache_clear()


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch):
    """Progress lines never appear, so that a slow machine prints the same as a fast one."""
    monkeypatch.setattr("deploy.terminal.TICK_S", 1e6)


@pytest.fixture(autouse=True, scope="session")
def messages_in_one_thread():
    """A worker thread that reads a protobuf message without the lock fails its test.

    Messages of protobuf may be used by one thread at a time; a suite once died of that.
    """
    graph_init = Graph.__init__
    session_open = OrtSession.open.__func__

    def check_thread():
        if threading.current_thread().name.startswith("ThreadPoolExecutor"):
            assert PROTOBUF._is_owned(), "a model is read in a worker thread"

    def checked_init(self, *args, **options):
        check_thread()
        graph_init(self, *args, **options)

    def checked_open(cls, model, **options):
        if isinstance(model, onnx.ModelProto):
            check_thread()
        return session_open(cls, model, **options)

    Graph.__init__ = checked_init
    OrtSession.open = classmethod(checked_open)
    yield
    Graph.__init__ = graph_init
    OrtSession.open = classmethod(session_open)


@pytest.fixture(autouse=True, scope="session")
def operators_are_parsed_once():
    """torch's exporter parses its 500 operators for every model, which takes half of an export."""
    if "torch" not in sys.modules:
        yield
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read_operators = functools.cache(ONNXRegistry.from_torchlib)

    def copy_operators(*arguments, **options):
        registry = copy.copy(read_operators(*arguments, **options))
        registry.functions = {name: [*variants] for name, variants in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copy_operators))
        yield


_ROOT = Path(__file__).resolve().parents[1]
# The build of the C++ half that is compared: a preset of cpp/CMakePresets.json, with its component
# images or without (CALIB8_CPP_IMAGES=ON or OFF). CALIB8_CPP_RUNNER is the emulator that runs its
# programs, where they are for another machine.
_PRESET = os.environ.get("CALIB8_CPP_PRESET", "quick")
_IMAGES = os.environ.get("CALIB8_CPP_IMAGES", "")
_RUNNER = os.environ.get("CALIB8_CPP_RUNNER", "").split()
_BUILD = _ROOT / "build" / f"cpp-{_PRESET}"


def _in_cpp(*command):
    return subprocess.run(command, capture_output=True, text=True, cwd=_ROOT / "cpp")


def _build_parity():
    """The `parity` program, built once into a folder that git ignores."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, so the C++ library cannot be built")
    _BUILD.mkdir(parents=True, exist_ok=True)
    with (_BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several test processes builds
        images = [f"-DCALIB8_IMAGES={_IMAGES}"] if _IMAGES else []
        configure = _in_cpp("cmake", "--preset", _PRESET, *images)
        if configure.returncode and "configuration file provided by" in configure.stderr:
            package = configure.stderr.split("provided by", 1)[1].split('"')[1]
            pytest.skip(f"the C++ library needs {package}, which is not installed")
        assert configure.returncode == 0, configure.stderr
        jobs = str(os.cpu_count() or 1)
        targets = ("parity", "calib8_cache")
        compiled = _in_cpp("cmake", "--build", _BUILD, "-j", jobs, "--target", *targets)
        assert compiled.returncode == 0, compiled.stdout[-4000:] + compiled.stderr[-4000:]
    return [*_RUNNER, _BUILD / "tests" / "parity"]


@pytest.fixture(scope="module")
def cpp():
    """(op, question) -> what the C++ library answers, by cpp/tests/parity.cpp."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(_build_parity(), **pipes, text=True)

    def ask(op, **question):
        process.stdin.write(json.dumps({"op": op, **question}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"the C++ program ended on {op} {question}"
        return json.loads(line)

    ask.reads_images = "library" in ask("decoder")
    yield ask
    process.stdin.close()
    process.wait(300)
    process.stdout.close()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def calib8_cache(cpp):
    """The command of the C++ tool calib8-cache, built along with what `cpp` asks."""
    return [*_RUNNER, str(_BUILD / "calib8-cache")]


@pytest.fixture
def optimized(tmp_path):
    """(model or its file) -> the nodes that ONNX Runtime runs after its own optimization."""

    def optimized_nodes(engine):
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        source = engine if isinstance(engine, Path) else engine.SerializeToString()
        ort.InferenceSession(source, options, ["CPUExecutionProvider"])
        return list(onnx.load(tmp_path / "optimized.onnx").graph.node)

    return optimized_nodes


@pytest.fixture
def kernels(optimized):
    """(model or its file) -> the types of the nodes that ONNX Runtime runs."""
    return lambda engine: [node.op_type for node in optimized(engine)]


@pytest.fixture
def build_with_accuracy(run, tmp_path):
    """(model, samples, arguments) -> exit code, stdout, int8 accuracy of a build with no search."""

    def build(model, samples, *arguments):
        np.save(tmp_path / "x.npy", samples)
        paths = ("--images", tmp_path / "x.npy", "--out", tmp_path / "o")
        quick = ("--effort", 0, "--method", "minmax", "--duration", 0)
        code, out, error = run("build", model, *paths, *arguments, *quick)
        assert code in (0, 3), error
        report = json.loads((tmp_path / "o" / "report.json").read_text())
        return code, out, report["engines"][1]["accuracy"]

    return build
