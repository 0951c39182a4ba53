"""Engines on a fake GPU: every kind of input and output, by each of CUDA's bindings."""

import gc
import sys

import numpy as np
import pytest
from onnx import TensorProto

from deploy.errors import BackendError, ConfigError, SdkMissingError
from deploy.targets.tensorrt import sdk
from deploy.targets.tensorrt.builder import BuilderSettings, build_engine
from deploy.targets.tensorrt.cuda import CudaMemory, DeviceBuffer, open_gpu
from deploy.targets.tensorrt.profiles import InputShapeRange
from deploy.targets.tensorrt.sdk import dtype_of
from deploy.targets.tensorrt.session import TensorrtSession
from tests.vendor_models import parse_nodes, save_net

BINDINGS = ("cuda-python", "cudart", "pycuda")
EIGHT, TEN = "8.5.3.1", "10.13.0.35"
FLOATS = BuilderSettings(int8=False, fp16=False)


@pytest.fixture(params=BINDINGS)
def machine(request, tensorrt):
    """A TensorRT 10 with two GPUs, by one binding."""
    return tensorrt(TEN, request.param)


def save_model(folder, text, inputs, outputs, opset=17):
    """The file of a model of these nodes."""
    nodes = parse_nodes(text, sum={"keepdims": 0})
    return save_net(folder / "m.onnx", nodes, inputs, outputs, opset={"": opset}, ir=9)


def open_engine(model, settings=FLOATS, **options):
    path = model.with_suffix(".engine")
    path.write_bytes(build_engine(model, settings).plan)
    return TensorrtSession.open(path, **options)


def relu(folder):
    return save_model(folder, "Relu x -> y", {"x": ["n", 3]}, {"y": ["n", 3]})


PROFILES = {"x": InputShapeRange((1, 3), (2, 3), (4, 3))}
WIDE = BuilderSettings(int8=False, fp16=False, profiles=PROFILES)


def check_relu(session, *batches):
    """The session computes a Relu of batches of so many rows."""
    for rows in batches:
        x = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
        np.testing.assert_array_equal(session.run({"x": x})["y"], np.maximum(x, 0))


def test_run_and_graph_compute_the_network(machine, tmp_path, wording):
    session = open_engine(relu(tmp_path), WIDE)
    check_relu(session, 2, 4, 1)
    times = session.device_times()
    assert min(times.h2d_ms, times.compute_ms, times.d2h_ms, times.enqueue_ms) >= 0
    with pytest.raises(BackendError) as refusal:
        session.run({"x": np.zeros((5, 3), np.float32)})
    wording.check(refusal.value)
    with pytest.raises(BackendError, match="none for 'x'"):
        session.run({"z": np.zeros((1, 3), np.float32)})
    check_relu(session, 1)
    check_relu(open_engine(relu(tmp_path), WIDE, cuda_graph=True), 2, 2, 2, 3, 3)


@pytest.mark.slow
def test_memory_is_given_back(machine, tmp_path):
    cuda = sys.modules["fake_cuda"]
    session = open_engine(relu(tmp_path), WIDE)
    check_relu(session, 2, 4, 1, 2)
    gc.collect()
    assert cuda.allocated() == 2
    del session
    gc.collect()
    assert cuda.allocated() == 0


def test_output_shape_may_depend_on_values(machine, tmp_path, wording):
    ends = {"where": (TensorProto.INT64, [2, None]), "y": ["n", 3]}
    model = save_model(tmp_path, "NonZero x -> where | Relu x -> y", {"x": ["n", 3]}, ends)
    session = open_engine(model, WIDE)
    assert session.outputs[0].shape == (2, None)
    for fill in (1, 0, 1):
        x = np.full((2, 3), fill, np.float32)
        x[0, 0] = 0
        arrays = session.run({"x": x})
        np.testing.assert_array_equal(arrays["where"], np.nonzero(x))
        np.testing.assert_array_equal(arrays["y"], x)
    session = open_engine(model, WIDE, cuda_graph=True)
    with pytest.raises(BackendError) as refusal:
        session.run({"x": x})
    wording.check(refusal.value)


def test_failed_allocation_is_raised(machine, tmp_path, monkeypatch):
    where = {"where": (TensorProto.INT64, [1, None])}
    session = open_engine(save_model(tmp_path, "NonZero x -> where", {"x": [4]}, where))

    def refuses(cuda, size):
        raise BackendError("out of memory")

    x = {"x": np.ones(4, np.float32)}
    monkeypatch.setattr("deploy.targets.tensorrt.session.DeviceBuffer", refuses)
    with pytest.raises(BackendError, match=r"^out of memory$"):
        session.run(x)


def test_shape_inputs_are_in_host_memory(machine, tmp_path):
    ends = {"x": [1, 3], "shape": (TensorProto.INT64, [2])}
    model = save_model(tmp_path, "Expand x shape -> y", ends, {"y": [None, None]})
    with pytest.raises(ConfigError, match="none for 'shape'"):
        build_engine(model, FLOATS)
    session = open_engine(model, BuilderSettings(int8=False, fp16=False, values={"shape": (2, 3)}))
    x = np.float32([[1, 2, 3]])
    for rows in (2, 5, 2):
        outputs = session.run({"x": x, "shape": np.array([rows, 3])})
        np.testing.assert_array_equal(outputs["y"], np.repeat(x, rows, 0))


def test_scalars_go_in_and_out(machine, tmp_path):
    model = save_model(
        tmp_path, "ReduceSum x -> sum | Mul sum by -> y", {"x": [3], "by": []}, {"y": []}
    )
    outputs = open_engine(model).run({"x": np.float32([1, 2, 3]), "by": np.float32(2)})
    assert outputs["y"].shape == ()
    assert outputs["y"] == 12


KINDS = {
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float8": TensorProto.FLOAT8E4M3FN,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}


@pytest.mark.parametrize("dtype", KINDS)
def test_every_byte_type_is_fed(tensorrt, tmp_path, dtype):
    tensorrt(TEN)
    ends = {"x": (KINDS[dtype], [4])}, {"y": (KINDS[dtype], [4])}
    session = open_engine(save_model(tmp_path, "Identity x -> y", *ends, opset=19))
    plain = "float32" if dtype in ("bfloat16", "float8") else dtype
    assert session.inputs[0].dtype == session.outputs[0].dtype == plain
    x = np.array([1, 0, 3, 0]).astype(plain)
    output = session.run({"x": x})["y"]
    assert output.dtype == plain
    np.testing.assert_array_equal(output, x)


def test_int4_type_is_refused(tensorrt, wording):
    trt = tensorrt(TEN)
    with pytest.raises(BackendError) as refusal:
        dtype_of(trt.DataType.INT4)
    wording.check(refusal.value)


@pytest.mark.parametrize("version", [EIGHT, TEN])
def test_integers_take_the_network_type(tensorrt, tmp_path, version, wording):
    tensorrt(version)
    integers = (TensorProto.INT64, [2])
    session = open_engine(save_model(tmp_path, "Identity x -> y", {"x": integers}, {"y": integers}))
    assert session.inputs[0].dtype == ("int32" if version == EIGHT else "int64")
    for dtype in (np.int64, np.int32, np.uint8):
        np.testing.assert_array_equal(session.run({"x": np.array([3, 4], dtype)})["y"], [3, 4])
    if version == EIGHT:
        with pytest.raises(BackendError) as refusal:
            session.run({"x": np.array([1 << 32, 0])})
        wording.check(refusal.value)
    with pytest.raises(BackendError) as refusal:
        session.run({"x": np.zeros(2, np.float32)})
    wording.check(refusal.value)


def test_engine_runs_on_the_chosen_gpu(machine, tmp_path, wording):
    model, path = relu(tmp_path), tmp_path / "m.engine"
    path.write_bytes(build_engine(model, WIDE, cuda=open_gpu(1)).plan)
    x = np.ones((1, 3), np.float32)
    assert (sdk.find_sdk().gpu, sdk.find_sdk(1).gpu) == ("Fake H200 sm_90", "Fake L4 sm_90")
    assert TensorrtSession.open(path, device=1).run({"x": x})["y"].sum() == 3
    assert machine.STORY.devices == [1] == machine.STORY.runs
    assert sys.modules["fake_cuda"].current() == 0
    with pytest.raises(BackendError) as refusal:
        TensorrtSession.open(path)
    wording.check(refusal.value)
    with pytest.raises(ConfigError) as refusal:
        TensorrtSession.open(path, device=2)
    wording.check(refusal.value)


def test_calibrator_memory_is_reused(machine):
    cuda = sys.modules["fake_cuda"]
    memory = CudaMemory(open_gpu(1))
    address = memory.put("x", np.arange(4, dtype=np.float32))
    assert memory.put("x", np.arange(2, dtype=np.float32)) == address
    np.testing.assert_array_equal(cuda.at(address, 8, 1).view(np.float32), [0, 1])
    large = memory.put("x", np.arange(9, dtype=np.float32))
    np.testing.assert_array_equal(cuda.at(large, 36, 1).view(np.float32), np.arange(9))
    assert cuda.allocated() == 1
    del memory
    assert cuda.allocated() == 0
    device = open_gpu()
    with device.current():
        assert DeviceBuffer(device, 0).size == 1
        assert device.pinned((0, 3), "float32").shape == (0, 3)
    not_ready = pytest.raises(BackendError, match=r"not ready.*`nvidia-smi`")
    with not_ready, device.current():
        device.between_ms(device.event(), device.event())


def test_missing_or_broken_bindings_are_named(tensorrt, monkeypatch, tmp_path, wording):
    tensorrt(TEN, "pycuda")
    cuda = sys.modules["fake_cuda"]
    broken = cuda.cuda_python()
    runtime = broken["cuda.bindings.runtime"]
    runtime.cudaGetDeviceCount = lambda: (cuda.Code.cudaErrorInvalidValue, None)
    for name, module in broken.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert type(open_gpu()).__name__ == "_Pycuda"
    tensorrt(TEN, "")
    with pytest.raises(SdkMissingError) as refusal:
        open_gpu()
    wording.check(refusal.value)
    for binding in BINDINGS:
        tensorrt(TEN, binding)
        sys.modules["fake_cuda"].GPUS.clear()
        with pytest.raises(SdkMissingError) as refusal:
            open_gpu()
        wording.check(refusal.value)
