"""Old TensorRT calibrators, driven without TensorRT: the same bytes as from the same arrays."""

import ctypes
import json
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import calib8
from deploy.cli import main
from deploy.errors import FeedError
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.feed import open_feed
from deploy.standins.cuda_modules import make_cdll
from deploy.standins.install import shared_stand_ins
from deploy.standins.memory import Memory
from deploy.tensors import TensorSpec
from tests.models import read_markdown
from tests.vendor_models import save_net

ROWS, BATCH = 19, 4

PYCUDA = """
    import os

    import numpy as np
    import pycuda.autoinit  # noqa: F401
    import pycuda.driver as cuda
    import tensorrt as trt

    TRT_LOGGER = trt.Logger(trt.Logger.WARNING)
    EXPLICIT_BATCH = 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)

    def build_engine(network: trt.INetworkDefinition, path: str) -> trt.ICudaEngine:
        with trt.Builder(TRT_LOGGER) as builder:
            return builder.build_engine(network)

    class Calibrator(trt.IInt8EntropyCalibrator2):
        def __init__(self, images, batch, cache_file):
            trt.IInt8EntropyCalibrator2.__init__(self)
            self.images, self.batch, self.cache_file, self.at = images, batch, cache_file, 0
            self.stream = cuda.Stream()
            self.host = cuda.pagelocked_empty((batch, *images.shape[1:]), np.float32)
            self.device = cuda.mem_alloc(batch * images[0].nbytes)

        def get_batch_size(self):
            return self.batch

        def get_batch(self, names):
            rows = self.images[self.at : self.at + self.batch]
            if not len(rows):
                return None
            self.at += len(rows)
            self.host[: len(rows)] = rows
            cuda.memcpy_htod_async(self.device, self.host[: len(rows)].ravel(), self.stream)
            self.stream.synchronize()
            return [int(self.device)]

        def read_calibration_cache(self):
            if os.path.exists(self.cache_file):
                with open(self.cache_file, "rb") as f:
                    return f.read()

        def write_calibration_cache(self, cache):
            with open(self.cache_file, "wb") as f:
                f.write(cache)

    def make_calibrator():
        here = os.path.dirname(os.path.abspath(__file__))
        images = np.load(os.path.join(here, "x.npy"))
        return Calibrator(images, 4, os.path.join(here, "calibration.cache"))
"""

CUDART = """
    from pathlib import Path

    import numpy as np
    import tensorrt as trt
    from cuda import cudart

    def check(answer):
        assert answer[0] == cudart.cudaError_t.cudaSuccess, cudart.cudaGetErrorName(answer[0])
        return answer[1:] if len(answer) > 2 else (answer[1] if len(answer) > 1 else None)

    class Calibrator(trt.IInt8MinMaxCalibrator):
        def __init__(self):
            super().__init__()
            images = np.load(Path(__file__).parent / "x.npy")
            self.batches = iter(np.array_split(images[:16], 4) + [images[16:]])
            self.stream = check(cudart.cudaStreamCreate())
            self.device = check(cudart.cudaMalloc(4 * images[0].nbytes))

        def get_batch_size(self):
            return 4

        def get_batch(self, names):
            try:
                data = np.ascontiguousarray(next(self.batches))
            except StopIteration:
                check(cudart.cudaFree(self.device))
                return []
            kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
            copied = (self.device, data.ctypes.data, data.nbytes, kind)
            check(cudart.cudaMemcpyAsync(*copied, self.stream))
            check(cudart.cudaStreamSynchronize(self.stream))
            return [self.device]

        def read_calibration_cache(self):
            return None

        def write_calibration_cache(self, cache):
            raise AssertionError("never called")

    make_calibrator = Calibrator
"""

CTYPES = """
    import ctypes
    from pathlib import Path

    import tensorrt as trt

    cudart = ctypes.CDLL("libcudart.so")
    cudart.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    SIZE, BATCH = 3 * 16 * 16 * 4, 4

    class Calibrator(trt.IInt8LegacyCalibrator):
        def __init__(self):
            trt.IInt8LegacyCalibrator.__init__(self)
            self.file = open(Path(__file__).parent / "x.raw", "rb")
            self.device = ctypes.c_void_p()
            assert cudart.cudaMalloc(ctypes.byref(self.device), SIZE * BATCH) == 0

        def get_batch_size(self):
            return 1

        def get_batch(self, names):
            data = self.file.read(SIZE)
            if len(data) < SIZE:
                self.file.close()
                return []
            host = (ctypes.c_float * (SIZE // 4)).from_buffer_copy(data)
            assert cudart.cudaMemcpy(self.device, host, ctypes.c_size_t(SIZE), 1) == 0
            return [self.device.value]

        def get_quantile(self):
            return 0.999

        def get_regression_cutoff(self):
            return 1.0

        def read_histogram_cache(self, length):
            return None

    make_calibrator = Calibrator
"""
SCRIPTS = {
    "pycuda": (PYCUDA, ("--method", "entropy")),
    "cuda-python": (CUDART, ("--method", "minmax")),
    "ctypes": (CTYPES, ("--method", "percentile", "--percent", "99.9")),
}


def written(text, folder):
    path = folder / "old.py"
    path.write_text(dedent(text))
    return f"{path}:make_calibrator"


@pytest.fixture
def rows(tmp_path):
    """The samples, as an .npy and as bare bytes."""
    array = np.random.default_rng(3).standard_normal((ROWS, 3, 16, 16)).astype(np.float32)
    array.tofile(tmp_path / "x.raw")
    np.save(tmp_path / "x.npy", array)
    return tmp_path / "x.npy"


@pytest.fixture
def calibrate(small_cnn, rows, tmp_path, run):
    """(*words) -> stdout of a calibration for TensorRT into out.cache; `fails`: its refusal."""

    def build_arguments(*options, out="out.cache"):
        return ("calibrate", small_cnn, "--target", "tensorrt", "-o", tmp_path / out, *options)

    def run_calibrate(*arguments, **named):
        return run.ok(*build_arguments(*arguments, **named))

    run_calibrate.fails = lambda *arguments: run.fails(*build_arguments(*arguments))
    return run_calibrate


def content(folder, name):
    return [(folder / f"{name}.cache{end}").read_bytes() for end in ("", ".json", ".npz")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_cache_equals_arrays_cache(name, calibrate, rows, tmp_path):
    text, method = SCRIPTS[name]
    calibrate("--images", rows, *method, out="arrays.cache")
    out = calibrate("--calibrator-script", written(text, tmp_path))
    assert content(tmp_path, "out") == content(tmp_path, "arrays")
    assert f"{ROWS} images" in out
    message = "entropy, since" if name == "pycuda" else f"{method[1]}"
    assert f"found by {message}" in out
    if name != "ctypes":  # a batch a sample
        assert f"{BATCH} samples for 1 of its 5 batches ({ROWS % BATCH} for" in out
    gone = {"tensorrt", "pycuda", "cuda"} & {module.split(".")[0] for module in sys.modules}
    assert not gone


def test_calibrator_class_chooses_method_in_python(small_cnn, rows, tmp_path):
    text = CUDART.replace("trt.IInt8", "trt.tensorrt.IInt8")  # as older scripts name it
    script = CalibratorScript(written(text, tmp_path))
    calibrated = calib8.calibrate(small_cnn, script, targets="tensorrt")
    assert calibrated.method.name == "minmax"
    options = {"out": tmp_path / "build", "effort": 0, "duration_s": 0}
    report = calib8.build(small_cnn, script, **options)
    assert "since the calibrator" in " ".join(report.notes)
    report = calib8.build(small_cnn, script, method="mse", **options)
    assert "since the calibrator" not in " ".join(report.notes)


def test_existing_script_cache_is_not_used(calibrate, tmp_path):
    script_cache, script = tmp_path / "calibration.cache", written(PYCUDA, tmp_path)
    calibrate("--calibrator-script", script)
    cache_bytes = (tmp_path / "out.cache").read_bytes()
    script_cache.write_bytes(b"no cache")
    calibrate("--calibrator-script", script, "--refresh")
    assert script_cache.read_bytes() == b"no cache"
    assert (tmp_path / "out.cache").read_bytes() == cache_bytes


def test_shard_of_a_script_names_the_method_to_merge(calibrate, small_cnn, run, tmp_path):
    script = ("--calibrator-script", written(CUDART, tmp_path))
    out = calibrate(*script, "--shard", "1/1", out="a.shard")
    assert "found by minmax" in out and "give that --method to merge" in out
    calibrate(*script)
    arguments = ("--target", "tensorrt", "--method", "minmax", "-o", tmp_path / "merged.cache")
    run.ok("merge", small_cnn, tmp_path / "a.shard", *arguments)
    assert content(tmp_path, "merged") == content(tmp_path, "out")


def test_script_does_not_get_the_arguments_of_the_command(small_cnn, rows, tmp_path, monkeypatch):
    """A script that parses arguments at its top takes its own defaults."""
    parsing = "import argparse, os; argparse.ArgumentParser().parse_args()"
    script = written(PYCUDA.replace("import os", parsing, 1), tmp_path)
    arguments = ["calibrate", str(small_cnn), "-o", str(tmp_path / "c"), "--calibrator-script"]
    monkeypatch.setattr(sys, "argv", ["calib8", *arguments, script])
    main()


def test_build_takes_a_script(small_cnn, rows, tmp_path, command):
    arguments = ("build", small_cnn, "--effort", 0, "--duration", 0, "--accept")
    script = ("--calibrator-script", written(CUDART, tmp_path))
    command(*arguments, *script, "--out", tmp_path / "a")
    assert "is an IInt8MinMaxCalibrator" in read_markdown(tmp_path / "a")
    command(*arguments, "--images", rows, "--method", "minmax", "--out", tmp_path / "b")
    models = [(tmp_path / name / "small_cnn.int8.onnx").read_bytes() for name in "ab"]
    assert models[0] == models[1]


@pytest.mark.parametrize("source_kind", ["script", "arrays", "judged by arrays"])
def test_preprocessing_is_of_the_pictures(
    source_kind, small_cnn, rows, pictures, tmp_path, command
):
    """Preprocessing options go to the photos, of a script's batches and the photos that judge."""
    feed, judge = (pictures, rows) if source_kind == "judged by arrays" else (rows, pictures)
    feeds = ("--images", feed, "--eval-images", judge)
    if source_kind == "script":
        feeds = ("--calibrator-script", written(CUDART, tmp_path), "--eval-images", judge)
    arguments = ("build", small_cnn, "--effort", 0, "--duration", 0, "--accept", "--size", "16x16")
    accuracies = []
    for mean in (0.2, 0.7):
        out = tmp_path / str(mean)
        command(*arguments, *feeds, "--mean", mean, "--out", out)
        accuracies.append(json.loads((out / "report.json").read_text())["engines"][1]["accuracy"])
    assert accuracies[0]["outputs"] != accuracies[1]["outputs"]


def test_script_allows_method_but_no_preprocessing(calibrate, rows, tmp_path):
    calibrate("--images", rows, "--method", "minmax", out="arrays.cache")
    script = ("--calibrator-script", written(PYCUDA, tmp_path))
    assert "since the calibrator" not in calibrate(*script, "--method", "minmax")
    assert content(tmp_path, "out")[0] == content(tmp_path, "arrays")[0]
    err = calibrate.fails(*script, "--preprocess", "imagenet")
    assert "as they are" in err


@pytest.mark.slow
def test_endless_script_needs_a_limit(calibrate, rows, tmp_path, monkeypatch):
    endless = PYCUDA.replace("return None", "self.at = 0; rows = self.images[:4]")
    script = ("--calibrator-script", written(endless, tmp_path))
    monkeypatch.setattr("deploy.feed.loaders.MAX_SAMPLES", 50)
    err = calibrate.fails(*script)
    assert "must end, got 5" in err
    assert "--limit" in err
    assert "the first 11 samples" in calibrate(*script, "--limit", 6, "--stride", 2)
    assert "the first 6 samples" in calibrate(*script, "--limit", 6)
    np.save(tmp_path / "first.npy", np.load(rows)[:6])
    calibrate("--images", tmp_path / "first.npy", "--method", "entropy", out="arrays.cache")
    assert content(tmp_path, "out")[0] == content(tmp_path, "arrays")[0]


COPY = "cuda.memcpy_htod_async(self.device, self.host[: len(rows)].ravel(), self.stream)"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.at += len(rows)", "raise KeyError('no images')", "KeyError: 'no images' at"),
        ("return [int(self.device)]", "return [int(self.device)] * 2", "one address for each"),
        ("return [int(self.device)]", "return int(self.device)", "one address for each"),
        ("return [int(self.device)]", "return ['device']", "got str for the input 'x' in batch 0"),
        ("return [int(self.device)]", "return [np.zeros(2)]", "got ndarray for the input 'x'"),
        ("return [int(self.device)]", "return [type('T', (), {'__int__': len})()]", "got T for"),
        ("return [int(self.device)]", "return [self.host.ctypes.data]", "not freed, got address"),
        ("return [int(self.device)]", "return [12345]", "got address 0x3039"),
        ("return [int(self.device)]", "return [int(self.device) + 4]", "got copied"),
        ("batch * images[0].nbytes", "images[0].nbytes", "must fit its allocation"),
        (COPY, "pass", "got copied"),
        ("np.load(os.path.join(here, 'x.npy'))", "None", "NoneType"),
        ("np.float32", "np.float64", "got float64 in batch 0; convert it with"),
        ("np.float32", "np.uint8", "got uint8 in batch 0; convert it with"),
        (COPY, "cuda.memcpy_htod(self.device, self.host[0, 0])", "got copied 1024 bytes"),
        (COPY, "cuda.memcpy_htod(self.device, self.host[:, ::2])", "contiguous"),
        (COPY, "cuda.memcpy_htod(12, self.host)", "which is not"),
        ("return self.batch", "return 0", "must give 1 or more, got 0"),
        ("return self.batch", "return 3", "got copied"),
        ("return self.batch", "return 'four'", "must give 1 or more, got 'four'"),
        ("if not len(rows):", "if True:", "got none; get_batch returned no batch"),
        ("return Calibrator(", "return slice(", "without get_batch_size"),
        ("def make_calibrator():", "def make_calibrator(path):", "missing 1 required"),
        ("return Calibrator(", "build_engine(None, '')\n    return Calibrator(", "without a GPU"),
        ("import pycuda.driver as cuda", "import pycuda.elsewhere", "pycuda.elsewhere"),
        ("import os", "import os, sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_broken_script_is_reported(old, new, message, calibrate, tmp_path):
    text = dedent(PYCUDA).replace('"', "'")
    assert old in text
    broken = text.replace(old, new)
    if new == "np.float64":
        broken = broken.replace("batch * images[0].nbytes", "2 * batch * images[0].nbytes")
    if new == "pass":  # the allocation itself is then looked at
        broken = broken.replace("batch * images[0].nbytes", "images[0].nbytes")
        message = "got an allocation of"
    err = calibrate.fails("--calibrator-script", written(broken, tmp_path))
    assert message in err, err
    assert err.startswith("calib8: error: "), err
    assert not (tmp_path / "out.cache").exists()


def test_caught_wrong_copy_is_reported(calibrate, tmp_path):
    text = dedent(PYCUDA).replace("batch * images[0].nbytes", "images[0].nbytes")
    caught = f"try: {COPY}\n        except Exception: return None"
    assert COPY in text
    script = written(text.replace(COPY, caught), tmp_path)
    assert "its allocation" in calibrate.fails("--calibrator-script", script)


TWO = """
    import numpy as np
    import tensorrt as trt
    {imports}

    class Calibrator(trt.IInt8EntropyCalibrator):
        def __init__(self):
            trt.IInt8EntropyCalibrator.__init__(self)
            rng = np.random.default_rng(8)
            self.left = []
            for _ in range(3):
                ids = rng.integers(0, 5, (2, 6)).astype(np.int32)
                x = rng.standard_normal((2, 4)).astype(np.float32)
                self.left.append({{"ids": ids, "x": x}})

        def get_batch_size(self):
            return 2

        def get_batch(self, names):
            if not self.left:
                return None
            batch = self.left.pop()
            return [self.put(name, batch[name]) for name in names]

        def put(self, name, array):
            {put}

    make_calibrator = Calibrator
"""
PUTS = {
    "to_device": (
        "import pycuda.autoinit, pycuda.driver as cuda",
        "setattr(self, name, cuda.to_device(array)); return getattr(self, name)",
    ),
    "a local allocation": (
        "import pycuda.autoprimaryctx, pycuda.driver as cuda",
        "return int(cuda.to_device(array))",
    ),
    "gpuarray": (
        "from pycuda import autoinit, gpuarray",
        "setattr(self, name, gpuarray.to_gpu(array)); return getattr(self, name).ptr",
    ),
    "row by row": (
        "import pycuda.driver as cuda; cuda.init(); context = cuda.Device(0).make_context()",
        "held = cuda.mem_alloc(array.nbytes); size = array[0].nbytes; setattr(self, name, held)"
        "; [cuda.memcpy_htod(int(held) + i * size, row) for i, row in enumerate(array)]"
        "; return held",
    ),
    "bindings": (
        "from cuda.bindings import runtime as cudart",
        "_, at = cudart.cudaMallocManaged(array.nbytes, 1)"
        "; cudart.cudaMemcpy(at, array, array.nbytes, 1); return at",
    ),
    "pinned": (
        "from cuda.bindings import runtime as cudart; import ctypes",
        "_, pinned = cudart.cudaMallocHost(array.nbytes)"
        "; ctypes.memmove(pinned, array.ctypes.data, array.nbytes)"
        "; _, at = cudart.cudaMalloc(array.nbytes); cudart.cudaMemcpy(at, pinned, array.nbytes, 1)"
        "; return at",
    ),
    "driver": (
        "from cuda import cuda, cudart; cuda.cuInit(0)",
        "_, at = cuda.cuMemAlloc(array.nbytes)"
        "; cuda.cuMemcpyHtoD(at, array.ctypes.data, array.nbytes); return int(at)",
    ),
    "ctypes": (
        "import ctypes; lib = ctypes.cdll.LoadLibrary('/usr/local/cuda/lib64/libcudart.so.11.0')",
        "at = ctypes.c_void_p(); lib.cudaMalloc(ctypes.byref(at), array.nbytes)"
        "; lib.cudaMemcpy(at, array.ctypes.data_as(ctypes.c_void_p), array.nbytes, 1)"
        "; return at.value",
    ),
}


@pytest.fixture(scope="module")
def two_inputs(tmp_path_factory):
    """ids int64 [n, 6] and x [n, 4] -> y [n, 3]."""
    nodes = [
        ("Cast", "ids", "f", "/cast", {"to": TensorProto.FLOAT}),
        ("Concat", "f x", "both", "/concat", {"axis": 1}),
        ("Gemm", "both w", "y", "/fc"),
    ]
    inputs = {"ids": (TensorProto.INT64, ["n", 6]), "x": ["n", 4]}
    weight = np.random.default_rng(0).standard_normal((10, 3))
    path = tmp_path_factory.mktemp("two") / "m.onnx"
    return save_net(path, nodes, inputs, {"y": ["n", 3]}, {"w": weight})


SPECS_OF_TWO = [TensorSpec("x", "float32", ("n", 4)), TensorSpec("ids", "int64", ("n", 6))]


def of_two(imports, put, folder):
    """The samples of a script of two inputs."""
    script = CalibratorScript(written(TWO.format(imports=imports, put=put), folder))
    return samples_of(script, *SPECS_OF_TWO[::-1])[0]


def of_two_sizes(sizes, put, folder):
    """Samples and notes of a script of two inputs, whose batches have these sizes, last first."""
    text = TWO.format(imports=PUTS["pinned"][0], put=put)
    text = text.replace("(2, ", "(size, ").replace("_ in range(3)", f"size in {sizes}")
    return samples_of(CalibratorScript(written(text, folder)), *SPECS_OF_TWO)


def test_short_batch_of_two_inputs_counts_once(tmp_path):
    samples, notes = of_two_sizes((1, 2, 2), PUTS["bindings"][1], tmp_path)
    assert len(samples) == 5
    assert any("1 of its 3 batches" in note for note in notes)


def test_short_untyped_input_ends_the_batches(tmp_path):
    put = f"if name == 'x': {PUTS['pinned'][1]}\n            {PUTS['bindings'][1]}"
    with pytest.raises(FeedError, match="only the last batch"):
        of_two_sizes((2, 1, 2), put, tmp_path)


def expected_of_two():
    """The same samples, as the script makes them: the last batch first."""
    rng, samples = np.random.default_rng(8), []
    for _ in range(3):
        ids, x = rng.integers(0, 5, (2, 6)), rng.standard_normal((2, 4)).astype(np.float32)
        samples = [{"ids": ids[row][None], "x": x[row][None]} for row in range(2)] + samples
    return samples


def values(samples):
    contents = []
    for sample in samples:
        contents.append({name: (a.dtype, a.tobytes()) for name, a in sample.items()})
    return contents


@pytest.mark.parametrize("put", PUTS)
def test_every_device_copy_gives_equal_values(put, tmp_path):
    assert values(of_two(*PUTS[put], tmp_path)) == values(expected_of_two())


@pytest.mark.parametrize("put", ["bindings", "driver"])
def test_float16_input_takes_float32_batches(put, tmp_path):
    """TensorRT calibrates float inputs of any precision with float32 values."""
    script = CalibratorScript(written(TWO.format(imports=PUTS[put][0], put=PUTS[put][1]), tmp_path))
    spec = TensorSpec("x", "float16", ("n", 4))
    samples, _ = samples_of(script, SPECS_OF_TWO[1], spec)
    expected = [{**sample, "x": sample["x"].astype(np.float16)} for sample in expected_of_two()]
    assert values(samples) == values(expected)


def test_scripts_share_a_module_that_they_import_late(tmp_path):
    """It keeps the stand-ins that it has imported for the first of the scripts."""
    (tmp_path / "late_module.py").write_text(PUTS["bindings"][0])
    put = f"from late_module import cudart; {PUTS['bindings'][1]}"
    for _ in range(2):
        assert values(of_two("", put, tmp_path)) == values(expected_of_two())


@pytest.mark.parametrize(
    ("put", "copy_call", "message"),
    [
        (
            "bindings",
            "_, at = cudart.cudaMalloc(48); cudart.cudaMemcpy(at, 4096, 48, 1)",
            "must read mapped memory",
        ),
        (
            "bindings",
            "_, at = cudart.cudaMalloc(48); cudart.cudaMemcpy(at, array, 4000, 1)",
            "read beyond its array, got 4000 bytes of",
        ),
        (
            "bindings",
            "_, at = cudart.cudaMalloc(8); cudart.cudaMemcpyAsync(at, at, 16, 3, 0)",
            "read beyond its allocation, got 16 bytes of 8",
        ),
        ("bindings", "at = 0; cudart.cudaMalloc(-1)", "an allocation is a number of bytes"),
        (
            "bindings",
            "self.at = getattr(self, 'at', 0) or cudart.cudaMalloc(9999)[1];"
            " cudart.cudaFree(self.at); at = self.at",
            "not freed",
        ),
        ("driver", "at = 0; cuda.cuLaunchKernel()", "cuda.cuda.cuLaunchKernel is not available"),
        ("ctypes", "at = 0; lib.cudaBindTexture()", "libcudart.cudaBindTexture is not available"),
        ("gpuarray", "at = 0; gpuarray.sum(array)", "pycuda.gpuarray.sum is not available"),
    ],
)
def test_wrong_addresses_are_reported(put, copy_call, message, two_inputs, refusal, tmp_path):
    if "mapped memory" in message and not Path("/proc/self/mem").exists():
        pytest.skip("a wrong address is a crash without /proc")
    script = written(TWO.format(imports=PUTS[put][0], put=f"{copy_call}; return at"), tmp_path)
    arguments = ("calibrate", two_inputs, "-o", tmp_path / "c", "--calibrator-script", script)
    assert message in refusal(*arguments)


IMAGES = TensorSpec("x", "float32", ("n", 3, 16, 16))


def samples_of(source, *specs):
    feed = open_feed(source, specs or [IMAGES])
    with feed.samples() as samples:
        return list(samples), feed.notes


@pytest.mark.parametrize("fixed", [1, 4])
@pytest.mark.parametrize("batch", ["1", "self.batch"])
def test_fixed_batch_is_filled_like_arrays(fixed, batch, rows, tmp_path):
    spec = TensorSpec("x", "float32", (fixed, 3, 16, 16))
    text = PYCUDA.replace("return self.batch", f"return {batch}")
    samples, _ = samples_of(CalibratorScript(written(text, tmp_path)), spec)
    expected, _ = samples_of(rows, spec)
    assert values(samples) == values(expected)
    assert len(samples) == -(-ROWS // fixed)


def test_script_gives_equal_samples_again(rows, tmp_path):
    script = CalibratorScript(written(PYCUDA, tmp_path))
    first_samples, notes = samples_of(script)
    faulty = PYCUDA.replace("batch * images[0].nbytes", "images[0].nbytes")
    with pytest.raises(FeedError, match="fit its allocation"):
        samples_of(CalibratorScript(written(faulty, tmp_path)))
    second, second_notes = samples_of(script)
    assert values(first_samples) == values(second)
    assert notes == second_notes
    text = PYCUDA.replace("return self.batch", "return 1")
    samples, _ = samples_of(CalibratorScript(written(text, tmp_path)))
    assert values(samples) == values(samples_of(rows)[0])
    with pytest.raises(FeedError, match="plain numbers"):
        open_feed(script, [TensorSpec("x", "object", ("n", 3, 16, 16))])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ("[images[:4], images[4:6], images[6:10]]", "only the last batch"),
        ("[images[:2]]", r"must hold 4 samples \(get_batch_size\)"),
        ("[images[:4].astype(np.float64)]", "must fit its allocation"),
        ("[images[:4], images[4:6, :2]]", "must hold 4 samples"),
    ],
)
def test_untyped_bytes_must_be_full_batches(batches, message, rows, tmp_path):
    old = "np.array_split(images[:16], 4) + [images[16:]]"
    assert old in CUDART
    script = CalibratorScript(written(CUDART.replace(old, batches), tmp_path))
    with pytest.raises(FeedError, match=message):
        open_feed(script, [IMAGES])


def test_open_size_is_the_arrays_size(small_cnn, tmp_path, command, refusal):
    model = onnx.load(small_cnn)
    del model.graph.node[-2:], model.graph.output[:]
    for axis, name in enumerate(("h", "w"), start=2):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    model.graph.output.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, None))
    onnx.save(model, tmp_path / "open.onnx")
    np.save(tmp_path / "x.npy", np.ones((4, 3, 12, 20), np.float32))
    arguments = ("calibrate", tmp_path / "open.onnx", "-o", tmp_path / "c", "--calibrator-script")
    error = refusal(*arguments, written(PYCUDA, tmp_path))
    assert "must be fixed" in error
    command(*arguments, written(PYCUDA.replace(".ravel()", ""), tmp_path))


def test_installed_modules_are_restored(calibrate, tmp_path, monkeypatch):
    real, part = type(sys)("tensorrt"), type(sys)("cuda.core")
    monkeypatch.setitem(sys.modules, "tensorrt", real)
    monkeypatch.setitem(sys.modules, "cuda.core", part)
    calibrate("--calibrator-script", written(CUDART, tmp_path))
    assert sys.modules["tensorrt"] is real
    assert sys.modules["cuda.core"] is part
    assert "cuda.cudart" not in sys.modules


def test_scripts_in_two_threads_leave_no_stand_ins():
    has_entered, may_leave = threading.Event(), threading.Event()

    def overlap():
        with shared_stand_ins().installed():
            has_entered.set()
            may_leave.wait(9)

    thread = threading.Thread(target=overlap)
    with shared_stand_ins().installed():
        thread.start()
        has_entered.wait(0.2)
    may_leave.set()
    thread.join()
    assert "tensorrt" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option"),
        (("--calibrator-script", "old.py:make", "--images", "."), "leave one of them out"),
        (("--calibrator-script", "old.py"), "file.py:function"),
        (("--calibrator-script", "elsewhere.py:make"), "elsewhere.py"),
    ],
)
def test_script_excludes_images(arguments, message, small_cnn, run):
    code, _, err = run("calibrate", small_cnn, *arguments)
    assert code in (1, 2)
    assert message in err


@pytest.mark.parametrize(
    "put",
    [
        "return torch.from_numpy(array).cuda().data_ptr()",
        "held = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device='cuda')"
        "; held.copy_(torch.from_numpy(array)); setattr(self, name, held); return held.data_ptr()",
        "return int(torch.as_tensor(array).to('cuda:0').contiguous().data_ptr())",
        "torch.cuda.set_device(0); held = torch.from_numpy(array).pin_memory().cuda()"
        "; torch.cuda.synchronize(); return held.data_ptr()",
    ],
)
def test_torch_gpu_tensors_are_fed(put, tmp_path, wording):
    pytest.importorskip("torch")
    assert values(of_two("import torch", put, tmp_path)) == values(expected_of_two())
    put = "return torch.from_numpy(array).double().cuda().data_ptr()"
    with pytest.raises(FeedError) as raised:
        of_two("import torch", put, tmp_path)
    wording.check(raised.value)


@pytest.mark.slow
def test_torch_imported_by_the_script_is_on_the_cpu(tmp_path):
    """In a process of its own, where nothing else has imported torch before."""
    pytest.importorskip("torch")
    imports = "import torch; DEVICE = torch.zeros(1, device='cuda').device"
    put = "held = torch.from_numpy(array).cuda(); return held.data_ptr()"
    script = written(TWO.format(imports=imports, put=put), tmp_path)
    code = (
        f"from tests.test_calibrator_script import *; x = samples_of(CalibratorScript({script!r})"
    )
    code += ", *SPECS_OF_TWO[::-1])[0]; assert values(x) == values(expected_of_two())"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["libcudart.so", Path("/usr/lib/libcudart.so.12")])
def test_libcudart_writes_results_through_pointers(name: str | Path) -> None:
    library = make_cdll(Memory())(name)
    count, address = ctypes.c_int(0), ctypes.c_void_p()
    assert library.cudaGetDeviceCount(ctypes.byref(count)) == 0
    assert library.cudaMalloc(ctypes.pointer(address), ctypes.c_size_t(4)) == 0
    assert library.cudaMemset(address, 7, ctypes.c_size_t(4)) == 0
    assert count.value == 1
    assert ctypes.string_at(address.value or 0, 4) == bytes([7] * 4)
