"""TensorRT for tests: its names of one version, on host memory, ONNX Runtime inside.

The names are those of the version in FAKE_TENSORRT (8.5.3.1, 10.13.0.35, 11.1.0 and what lies
between): what a version lacks is not here either, which `test_trt_real.py` holds against the real
bindings. `STORY` says what TensorRT is to do, and keeps what was asked of it. What the real one
answers with a fault (an address that is no memory of the engine's device, a calibrator of another
class) is an error here.

Sources: NVIDIA/TensorRT python/src/infer at 8.5.3, 10.16 and 11.0, and the docstrings of the
8.5.3.1 wheel and of tensorrt-stubs 10.13.
"""

import ctypes
import enum
import json
import math
import os
import struct
import types
from typing import Any

import fake_cuda as cuda
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

__version__ = os.environ.get("FAKE_TENSORRT", "10.13.0.35")
VERSION = tuple(int(part) for part in __version__.split("."))
CALIBRATORS = VERSION < (11,)
OPSETS = ((10, 15), 24), ((10,), 20), ((9,), 19), ((8, 4), 17), ((0,), 13)
# Names that only tests look at; TensorRT has none of them.
STATE = (
    "Story STORY word chosen pools profile calibration_profile timing model inputs layers"
    " types typed"
)


class Story:
    """Orders for the fake TensorRT, and a record of its calls.

    Attributes:
        parser: errors of the parser; any makes it refuse.
        late_errors: errors that a build logs after the calibration; any makes it give None.
        loses: tensors that TensorRT finds no scale for.
        configs, networks, devices: of every build, in order.
        loggers: every logger it was given.
        runs: device of every inference.
        parser_flags: names of the flags of every parser.
    """

    def __init__(self):
        self.parser, self.late_errors, self.loses = [], [], []
        self.configs, self.networks, self.devices, self.loggers, self.runs = [], [], [], [], []
        self.parser_flags = set[str]()


STORY = Story()


class ILogger:
    class Severity(enum.IntEnum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


_global = []  # TensorRT keeps the first logger it gets


def _log_texts(severity, *texts):
    for text in texts:
        _global[0].log(severity, text)


def _error(*texts):
    _log_texts(ILogger.Severity.ERROR, *texts)


def _check_logger(logger):
    if not isinstance(logger, ILogger):
        raise TypeError("incompatible constructor arguments: a logger is wanted")
    STORY.loggers.append(logger)
    if not _global:
        _global.append(logger)


class _Word(enum.IntEnum):
    def __str__(self):
        return f"{type(self).__name__}.{self.name}"


def _enum(name, *since, gone=""):
    """An enum of this version: the names from each version on, but for those gone in 11."""
    members = [
        member
        for first_version, names in since
        if first_version <= VERSION
        for member in names.split()
        if CALIBRATORS or member not in gone.split()
    ]
    return _Word(name, {member: number for number, member in enumerate(members)})


_BINDING = "OBEY_PRECISION_CONSTRAINTS PREFER_PRECISION_CONSTRAINTS"
BuilderFlag = _enum(
    "BuilderFlag",
    ((8,), f"FP16 INT8 DEBUG GPU_FALLBACK REFIT TF32 SPARSE_WEIGHTS {_BINDING}"),
    ((8, 6), "VERSION_COMPATIBLE FP8"),
    ((9,), "BF16"),
    ((10,), "STRIP_PLAN WEIGHT_STREAMING"),
    gone=f"FP16 INT8 FP8 BF16 {_BINDING}",
)
_NETWORK_FLAGS = ((8,), "EXPLICIT_BATCH"), ((10,), "STRONGLY_TYPED")
_FLAGS = "NetworkDefinitionCreationFlag"
NetworkDefinitionCreationFlag = _enum(_FLAGS, *_NETWORK_FLAGS, gone="EXPLICIT_BATCH")
_KINDS = ((8,), "FLOAT HALF INT8 INT32 BOOL UINT8"), ((8, 6), "FP8"), ((9,), "BF16 INT64")
DataType = _enum("DataType", *_KINDS, ((10,), "INT4"))
float32 = DataType.FLOAT
float16 = DataType.HALF
int8 = DataType.INT8
int32 = DataType.INT32
bool = DataType.BOOL
if VERSION >= (9,):
    bfloat16, int64 = DataType.BF16, DataType.INT64
MemoryPoolType = _enum("MemoryPoolType", ((8,), "WORKSPACE DLA_MANAGED_SRAM"))
TensorIOMode = _enum("TensorIOMode", ((8,), "NONE INPUT OUTPUT"))
TensorLocation = _enum("TensorLocation", ((8,), "DEVICE HOST"))
_LEVELS = ((8, 6), "NONE AMPERE_PLUS"), ((10, 8), "SAME_COMPUTE_CAPABILITY")
if VERSION >= (8, 6):
    HardwareCompatibilityLevel = _enum("HardwareCompatibilityLevel", *_LEVELS)
DeviceType = _enum("DeviceType", ((8,), "GPU DLA"))
_PARSER_FLAGS = ((8,), "NATIVE_INSTANCENORM"), ((10, 16), "ADJUST_FOR_DLA")
if VERSION >= (8, 6):
    OnnxParserFlag = _enum("OnnxParserFlag", *_PARSER_FLAGS)
LayerInformationFormat = _enum("LayerInformationFormat", ((8,), "ONELINE JSON"))
ProfilingVerbosity = _enum("ProfilingVerbosity", ((8,), "LAYER_NAMES_ONLY NONE DETAILED"))


class Dims(list):  # type: ignore[type-arg]
    """A shape."""


class IHostMemory(bytes):
    """Memory of TensorRT's."""


def init_libnvinfer_plugins(logger, namespace):
    _check_logger(logger)
    return True


# Networks

_TYPES = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.INT8: "INT8",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.BOOL: "BOOL",
    TensorProto.UINT8: "UINT8",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT8E4M3FN: "FP8",
}
_BYTES = {
    "FLOAT": 4,
    "HALF": 2,
    "INT8": 1,
    "INT32": 4,
    "INT64": 8,
    "BOOL": 1,
    "UINT8": 1,
    "BF16": 2,
    "FP8": 1,
}
_FORMAT_NAMES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "INT8": "Int8",
    "INT32": "Int32",
    "INT64": "Int64",
    "BOOL": "Bool",
    "UINT8": "UInt8",
    "BF16": "BF16",
    "FP8": "FP8",
}
_SHAPES = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "ConstantOfShape": (0,),
    "Resize": (3,),
    "Slice": (1, 2, 3, 4),
}
_ON_INT8 = {"Conv", "ConvTranspose", "Gemm", "MatMul"}


def _type(elem_type):
    """A type of ONNX in this version: before 9 there is no int64, and int32 stands for it."""
    name = _TYPES[elem_type]
    return DataType["INT32" if name == "INT64" and VERSION < (9,) else name]


class ITensor:
    __slots__ = "dtype", "is_shape_tensor", "name", "shape"

    def __init__(self, info, *, is_shape_tensor=False):
        kind = info.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
        self.name, self.shape, self.dtype = info.name, Dims(dims), _type(kind.elem_type)
        self.is_shape_tensor = is_shape_tensor


class ILayer:
    __slots__ = "name", "num_outputs", "types", "_node", *(("precision",) if CALIBRATORS else ())

    def __init__(self, node):
        self.name, self._node = node.name, node
        self.types = {}
        self.num_outputs = len(node.output)
        if CALIBRATORS:
            self.precision = None

    if CALIBRATORS:

        def set_output_type(self, index, dtype):
            self.types[index] = dtype

    def get_output(self, index):
        return types.SimpleNamespace(name=self._node.output[index])


class INetworkDefinition:
    __slots__ = "_flags", "inputs", "layers", "model"

    def __init__(self, flags=0):
        self._flags = flags
        self.inputs = []
        self.layers = []

    num_inputs = property(lambda self: len(self.inputs))
    num_layers = property(lambda self: len(self.layers))

    def get_input(self, index):
        return self.inputs[index]

    def get_layer(self, index):
        return self.layers[index]

    def _has_flag(self, name):
        """Whether it was created with a flag."""
        flag = getattr(NetworkDefinitionCreationFlag, name, None)
        return flag is not None and self._flags >> int(flag) & 1 == 1

    typed = property(lambda self: not CALIBRATORS or self._has_flag("STRONGLY_TYPED"))


class OnnxParser:
    def __init__(self, network, logger):
        _check_logger(logger)
        self.network, self.errors = network, list[str]()

    if VERSION >= (8, 6):

        def set_flag(self, flag):
            STORY.parser_flags.add(flag.name)

    num_errors = property(lambda self: len(self.errors))

    def get_error(self, index):
        return self.errors[index]

    def parse_from_file(self, path):
        model = onnx.load(path)
        self.errors = [*STORY.parser, *_unreadable_nodes(model)]
        if not CALIBRATORS or VERSION >= (10,) or self.network._has_flag("EXPLICIT_BATCH"):
            self._fill(model)
        else:
            self.errors.append("This version of the parser only supports explicit batch")
        return not self.errors

    def _fill(self, model):
        weight_names = {tensor.name for tensor in model.graph.initializer}
        reads = [(n.input, index) for n in model.graph.node for index in _SHAPES.get(n.op_type, ())]
        shapes = {inputs[index] for inputs, index in reads if index < len(inputs)}
        self.network.model = model
        self.network.layers = [ILayer(node) for node in model.graph.node]
        self.network.inputs = [
            ITensor(info, is_shape_tensor=info.name in shapes)
            for info in model.graph.input
            if info.name not in weight_names
        ]


def _unreadable_nodes(model):
    """Return errors for the nodes that this version's parser does not read."""
    newest = next(opset for since, opset in OPSETS if since <= VERSION)
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    errors = [f"opset {opset} is newer than {newest}"] if opset > newest else []
    return errors + [
        f"In node {index} with name: {node.name} and operator: {node.op_type}"
        ' (checkFallbackPluginImporter): INVALID_NODE: creator && "Plugin not found, are the'
        ' plugin name, version, and namespace correct?"'
        for index, node in enumerate(model.graph.node)
        if node.domain not in ("", "ai.onnx")
        and not hasattr(ctypes.CDLL(None), f"{node.op_type}PluginCreator")
    ]


# Building


class IOptimizationProfile:
    def __init__(self):
        self.shapes = {}
        self.values = {}

    def set_shape(self, input, min, opt, max):
        self.shapes[input] = (tuple(min), tuple(opt), tuple(max))

    def set_shape_input(self, input, min, opt, max):
        self.values[input] = (tuple(min), tuple(opt), tuple(max))


_SINCE_8_6 = "builder_optimization_level", "max_aux_streams", "hardware_compatibility_level"


class ITimingCache:
    def __init__(self, data):
        self.data = data or b"timing\0"

    def serialize(self):
        return IHostMemory(self.data)


class IBuilderConfig:
    __slots__ = (
        "chosen",
        "pools",
        "profile",
        "calibration_profile",
        "timing",
        "profiling_verbosity",
        "default_device_type",
        "DLA_core",
        *(("int8_calibrator",) if CALIBRATORS else ()),
        *(_SINCE_8_6 if VERSION >= (8, 6) else ()),
    )

    def __init__(self):
        self.chosen, self.pools = {BuilderFlag.TF32}, {}
        self.profile = self.calibration_profile = self.timing = None
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        if CALIBRATORS:
            self.int8_calibrator = None
        if VERSION >= (8, 6):
            self.builder_optimization_level, self.max_aux_streams = 3, -1
            self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE

    create_timing_cache = ITimingCache

    def set_memory_pool_limit(self, pool, pool_size):
        self.pools[pool] = pool_size

    def set_flag(self, flag):
        self.chosen.add(BuilderFlag(flag))

    def clear_flag(self, flag):
        self.chosen.discard(BuilderFlag(flag))

    def add_optimization_profile(self, profile):
        self.profile = profile
        return 0

    if CALIBRATORS:

        def set_calibration_profile(self, profile):
            self.calibration_profile = profile
            return True

    def set_timing_cache(self, cache, ignore_mismatch):
        self.timing = cache
        return cache.data.startswith(b"timing\0")  # not one of another version

    def get_timing_cache(self):
        return self.timing


class Builder:
    num_DLA_cores = 0

    def __init__(self, logger):
        _check_logger(logger)
        if not cuda.GPUS:
            _error("CUDA initialization failure with error: 100")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self.device = cuda.current()

    create_network = INetworkDefinition
    create_builder_config = IBuilderConfig
    create_optimization_profile = IOptimizationProfile

    def build_serialized_network(self, network, config):
        STORY.configs.append(config)
        STORY.networks.append(network)
        STORY.devices.append(cuda.current())
        wrong = _profile_errors(network, config)
        scales = {}
        calibrator = getattr(config, "int8_calibrator", None)
        explicit = any(node.op_type == "DequantizeLinear" for node in network.model.graph.node)
        if not wrong and calibrator is not None and not explicit:
            scales, wrong = _calibrate(network, config)
            wrong = [*wrong, *STORY.late_errors]
        if wrong:
            _error(*wrong)
            return None
        return IHostMemory(_plan(network, config, scales))


def _profile_errors(network, config):
    """Inputs that lack a profile, and flags that a strongly typed network forbids."""
    profile = config.profile or IOptimizationProfile()
    wrong = [
        f"Network has dynamic or shape inputs, but no optimization profile: {tensor.name}"
        for tensor in network.inputs
        if (-1 in tensor.shape and tensor.name not in profile.shapes)
        or (tensor.is_shape_tensor and tensor.name not in profile.values)
    ]
    narrow = sorted(f.name for f in config.chosen if f.name in ("FP16", "INT8", "BF16", "FP8"))
    if network.typed and narrow:
        wrong.append(f"API Usage Error ({narrow[0]} is set on a strongly typed network)")
    return wrong


def _label():
    major, minor, patch = VERSION[:3]
    return (major * 100 if major >= 10 else major * 10) * 100 + minor * 100 + patch


def _calibrate(network, config):
    """(scales by the calibrator's cache or by its batches, what went wrong)."""
    calibrator = config.int8_calibrator
    header = f"TRT-{_label()}-{calibrator.word}"
    stored_cache = _swallow(calibrator.read_calibration_cache)
    if stored_cache is not None and bytes(stored_cache).decode().splitlines()[0] == header:
        return _read(bytes(stored_cache)), []
    largest = {}
    calibrator.get_batch_size()
    names = [tensor.name for tensor in network.inputs]
    run = _all_tensors_run(network.model)
    batch_count = 0
    while addresses := _swallow(calibrator.get_batch, names):
        assert len(addresses) == len(names), "fewer addresses than inputs are read beyond the end"
        feed = {
            tensor.name: _read_batch(tensor, address, _calibrates_with(tensor, config))
            for tensor, address in zip(network.inputs, addresses, strict=True)
        }
        for name, values in run(feed).items():
            largest[name] = max(largest.get(name, 0), float(np.abs(values).max(initial=0)))
        batch_count += 1
    if not batch_count:
        return {}, ["Calibration failure occurred with no scaling factors detected"]
    scales = {n: v / 127 for n, v in largest.items() if n not in STORY.loses}
    lines = [f"{name}: {struct.pack('>f', scale).hex()}" for name, scale in scales.items()]
    text = "\n".join([header, *lines, ""])
    _swallow(calibrator.write_calibration_cache, memoryview(text.encode()))
    return scales, []


def _swallow(call, *arguments):
    """Call and print exceptions, as the bindings do: they end nothing."""
    try:
        return call(*arguments)
    except Exception as error:
        print(f"[ERROR] Exception caught: {error}")
        return None


def _read(cache):
    lines = [line.rpartition(": ") for line in cache.decode().splitlines()[1:]]
    digits_by_name = {name: bytes.fromhex(digits.rjust(8, "0")) for name, _, digits in lines}
    return {name: struct.unpack(">f", word)[0] for name, word in digits_by_name.items()}


def _calibrates_with(tensor, config):
    profile = config.calibration_profile
    if profile is not None and tensor.name in profile.shapes:
        return profile.shapes[tensor.name][1]
    return tuple(tensor.shape)


def _read_batch(tensor, address, shape):
    """A batch, as TensorRT reads it: in the network's own type, from the device's memory."""
    size = math.prod(shape) * _BYTES[tensor.dtype.name]
    data = cuda.at(address, size, cuda.current())
    return data.copy().view(_NUMPY[tensor.dtype.name]).reshape(shape)


_NUMPY = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}


def _all_tensors_run(model):
    """Feed -> every float tensor, the inputs among them."""
    watched = onnx.ModelProto()
    watched.CopyFrom(onnx.shape_inference.infer_shapes(model))
    output_names = {info.name for info in watched.graph.output}
    floats = [i for i in watched.graph.value_info if i.type.tensor_type.elem_type == 1]
    inner_names = {output for node in model.graph.node for output in node.output} - output_names
    watched.graph.output.extend(info for info in floats if info.name in inner_names)
    session = _session(watched)
    float_outputs = [
        output.name for output in session.get_outputs() if output.type == "tensor(float)"
    ]

    def run(feed):
        converted_feed = _cast(feed, session)
        floats = {name: x for name, x in converted_feed.items() if x.dtype == np.float32}
        return floats | dict(
            zip(float_outputs, session.run(float_outputs, converted_feed), strict=True)
        )

    return run


def _session(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # nodes as they stand, fp8 too
    options.graph_optimization_level = level
    data = model.SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _cast(feed, session):
    """int32 to int64 where this version knows no int64."""
    wide = {i.name for i in session.get_inputs() if i.type == "tensor(int64)"}
    return feed | {name: feed[name].astype(np.int64) for name in feed if name in wide}


# Plans


def _plan(network, config, scales):
    for name in STORY.loses:
        _log_texts(
            ILogger.Severity.WARNING,
            f"Missing scale and zero-point for tensor {name}, expect fall back to non-int8"
            " implementation for any layer consuming or producing given tensor",
        )
    profile = config.profile or IOptimizationProfile()
    head = {
        "version": __version__,
        "gpu": cuda.GPUS[cuda.current()],
        "inputs": [[t.name, t.shape, t.dtype.name, t.is_shape_tensor] for t in network.inputs],
        "shapes": profile.shapes,
        "layers": _layers(network, config, scales),
        "detailed": config.profiling_verbosity == ProfilingVerbosity.DETAILED,
    }
    return json.dumps(head).encode() + b"\n" + network.model.SerializeToString()


def _layers(network, config, scales):
    """Return the engine inspector's layers: one a node, a Relu inside the one before it."""
    graph = network.model.graph
    constants = {tensor.name for tensor in graph.initializer}
    dequantized = {o for n in graph.node if n.op_type == "DequantizeLinear" for o in n.output}
    chosen = {flag.name for flag in config.chosen}
    float_type = "FLOAT"
    if "FP16" in chosen:
        float_type = "HALF"
    elif "BF16" in chosen:
        float_type = "BF16"
    layers = []
    for layer in network.layers:
        node = layer._node
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        if node.op_type == "Relu" and layers and layers[-1]["outputs"] == [node.input[0]]:
            layers[-1]["name"] += f" + {node.name}"
            layers[-1]["outputs"] = list(node.output)
            continue
        scaled = node.input[0] in scales and "INT8" in chosen
        scaled = scaled and layer.precision is None  # only where there are calibrators
        int8 = node.op_type in _ON_INT8 and (scaled or node.input[0] in dequantized)
        layers.append(
            {
                "name": node.name,
                "kind": {"Conv": "CaskConvolution"}.get(node.op_type, node.op_type),
                "inputs": [name for name in node.input if name and name not in constants],
                "outputs": list(node.output),
                "type": "INT8" if int8 else _float_layer_type(network, node, float_type),
            }
        )
    if getattr(config, "default_device_type", None) == DeviceType.DLA:
        ends = [layers[0] | {"outputs": layers[-1]["outputs"], "kind": "DLA"}]
        ends[0]["name"] = f"{{ForeignNode[{layers[0]['name']}...{layers[-1]['name']}]}}"
        layers = ends
    return _with_reformats(layers, graph.input[0].name)


def _float_layer_type(network, node, float_type):
    """Type of a layer that is not int8: the model's own where the network is strongly typed."""
    if not network.typed:
        return float_type
    info_by_name = {
        i.name: i for i in onnx.shape_inference.infer_shapes(network.model).graph.value_info
    }
    info = info_by_name.get(node.output[0])
    return _TYPES[info.type.tensor_type.elem_type] if info is not None else "FLOAT"


def _with_reformats(layers, input_name):
    """A reformat wherever a layer reads another type than the one before it wrote."""
    types_of = {input_name: "FLOAT"}
    out = []
    for layer in layers:
        for index, name in enumerate(layer["inputs"]):
            if types_of.get(name, layer["type"]) != layer["type"]:
                end = f"Input Tensor {index} to {layer['name']}"
                copy = {"name": f"Reformatting CopyNode for {end}", "kind": "Reformat"}
                copy |= {"inputs": [name], "outputs": [f"Reformatted {end}"]}
                out.append(copy | {"type": layer["type"]})
        types_of |= dict.fromkeys(layer["outputs"], layer["type"])
        out.append(layer)
    return out


# Running


class Runtime:
    num_DLA_cores = 2

    def __init__(self, logger):
        _check_logger(logger)

    def deserialize_cuda_engine(self, plan):
        head, _, data = plan.partition(b"\n")
        try:
            plan_head = json.loads(head)
            if plan_head["version"] != __version__:
                _error(f"Version tag does not match: current {__version__}, {plan_head['version']}")
                return None
        except (ValueError, KeyError, TypeError):
            _error("Magic tag does not match")
            return None
        if plan_head["gpu"] != cuda.GPUS[cuda.current()]:
            _error(
                f"The engine plan file is generated on an incompatible device: {plan_head['gpu']}"
            )
            return None
        return ICudaEngine(plan_head, onnx.load_from_string(data))


class EngineInspector:
    execution_context: Any = None

    def __init__(self, engine):
        self.engine = engine

    def get_engine_information(self, format):
        assert format == LayerInformationFormat.JSON
        layers = self.engine.head["layers"]
        if self.engine.head["detailed"]:
            layer_texts = [_describe_layer(layer) for layer in layers]
        else:
            layer_texts = [layer["name"] for layer in layers]
        key = "Bindings" if VERSION < (11,) else "I/O Tensors"
        return json.dumps({"Layers": layer_texts, key: [name for name, *_ in self.engine.tensors]})


def _describe_layer(layer):
    form = f"Row major linear {_FORMAT_NAMES[layer['type']]} format"
    about = {"Location": "Device", "Dimensions": [], "Format/Datatype": form}
    if VERSION >= (11,):
        del about["Format/Datatype"]
        about |= {"Format": "Row major linear", "Datatype": _FORMAT_NAMES[layer["type"]]}
    nodes = "" if layer["kind"] in ("DLA", "Reformat") else layer["name"]
    noted = "".join(f"[ONNX Layer: {name}]" for name in nodes.split(" + ") if name)
    return {
        **({"Metadata": noted} if VERSION >= (8, 6) else {}),
        "Name": layer["name"],
        "LayerType": layer["kind"],
        "Inputs": [{"Name": name, **about} for name in layer["inputs"]],
        "Outputs": [{"Name": name, **about} for name in layer["outputs"]],
        "TacticValue": "0x0",
    }


class ICudaEngine:
    def __init__(self, head, model):
        self.head, self.model, self.device = head, model, cuda.current()
        self.hosted = {name for name, _, _, is_shape in head["inputs"] if is_shape}
        ends = map(ITensor, model.graph.output)
        inputs = [(name, tuple(s), DataType[kind], True) for name, s, kind, _ in head["inputs"]]
        self.tensors = [*inputs, *((t.name, tuple(t.shape), t.dtype, False) for t in ends)]
        self.run = _evaluator(model)

    num_io_tensors = property(lambda self: len(self.tensors))

    def get_tensor_name(self, index):
        return self.tensors[index][0]

    def _of(self, name):
        return next(tensor for tensor in self.tensors if tensor[0] == name)

    def get_tensor_shape(self, name):
        return Dims(self._of(name)[1])

    def get_tensor_dtype(self, name):
        return self._of(name)[2]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if self._of(name)[3] else TensorIOMode.OUTPUT

    def get_tensor_location(self, name):
        return TensorLocation.HOST if name in self.hosted else TensorLocation.DEVICE

    def create_execution_context(self):
        return IExecutionContext(self)

    def create_engine_inspector(self):
        return EngineInspector(self)


def _evaluator(model):
    """Feed of raw arrays -> raw arrays of the outputs, bf16 and fp8 as their bits."""
    ends = [*model.graph.input, *model.graph.output]
    if not any(i.type.tensor_type.elem_type in _BITS for i in ends):
        session = _session(model)
        return lambda feed: session.run(None, _cast(feed, session))
    from onnx.reference import ReferenceEvaluator

    kinds = {i.name: helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type) for i in ends}
    evaluator = ReferenceEvaluator(model)
    return lambda feed: evaluator.run(None, {n: x.view(kinds[n]) for n, x in feed.items()})


_BITS = {TensorProto.BFLOAT16: np.uint16, TensorProto.FLOAT8E4M3FN: np.uint8}
_NUMPY |= {"BF16": np.uint16, "FP8": np.uint8}


class IOutputAllocator:
    """Base of the product's class."""


class IProfiler:
    def __init__(self):
        self.is_initialized = True  # which a class of its own has to see to


class IExecutionContext:
    profiler: Any = None

    def __init__(self, engine):
        self.engine = engine
        self.shapes = {n: s for n, s, _, is_input in engine.tensors if is_input and -1 not in s}
        self.addresses = {}
        self.allocators = {}

    def set_input_shape(self, name, shape):
        new_shape = tuple(shape)
        min_shape, _, max_shape = self.engine.head["shapes"].get(
            name, (self.engine._of(name)[1],) * 3
        )
        if len(new_shape) != len(min_shape) or any(
            not low <= dim <= high
            for low, dim, high in zip(min_shape, new_shape, max_shape, strict=True)
        ):
            _error(f"Static dimension mismatch or out of profile: {name} {list(new_shape)}")
            return False
        self.shapes[name] = new_shape
        return True

    def get_tensor_shape(self, name):
        """With -1 where it depends on values that are not known before the run."""
        return Dims(self.shapes[name] if name in self.shapes else self._inferred()[name])

    def _inferred(self):
        closed = onnx.ModelProto()
        closed.CopyFrom(self.engine.model)
        values = {name: self._hosted(name) for name in self.engine.hosted & self.addresses.keys()}
        inputs = []
        for info in closed.graph.input:
            if info.name in values:
                array = values[info.name].astype(np.int64)
                closed.graph.initializer.append(numpy_helper.from_array(array, info.name))
                continue
            if info.name in self.shapes:
                kind, shape = info.type.tensor_type.elem_type, self.shapes[info.name]
                info = helper.make_tensor_value_info(info.name, kind, shape)
            inputs.append(info)
        del closed.graph.input[:]
        closed.graph.input.extend(inputs)
        for info in closed.graph.output:
            info.type.tensor_type.ClearField("shape")
        inferred = onnx.shape_inference.infer_shapes(closed, data_prop=True)
        return {info.name: tuple(ITensor(info).shape) for info in inferred.graph.output}

    def _hosted(self, name):
        kind = self.engine.get_tensor_dtype(name).name
        shape = self.shapes[name]
        data = cuda.host(self.addresses[name], math.prod(shape) * _BYTES[kind])
        return data.view(_NUMPY[kind]).reshape(shape).copy()

    def set_tensor_address(self, name, memory):
        self.addresses[name] = memory
        return True

    def set_output_allocator(self, name, output_allocator):
        assert output_allocator is None or isinstance(output_allocator, IOutputAllocator)
        self.allocators[name] = output_allocator
        return True

    def infer_shapes(self):
        inputs = [name for name, _, _, is_input in self.engine.tensors if is_input]
        lacking = [name for name in inputs if name not in self.shapes]
        return lacking + [n for n in self.engine.hosted if n not in self.addresses]

    def execute_async_v3(self, stream_handle):
        stream = cuda.thing(stream_handle)
        lacking = [n for n, *_ in self.engine.tensors if not self._placed(n)]
        if lacking or self.infer_shapes():
            _error(f"Address is not set for tensor {(lacking or self.infer_shapes())[0]}")
            return False
        if cuda.current() != self.engine.device:
            _error("Cask: an illegal memory access was encountered (the context of another device)")
            return False
        if any(self.allocators.values()) or self.profiler is not None:
            if stream.captured is not None:
                _error("operation not permitted when stream is capturing")
                return False
            stream.wait()
        hosted = {name: self._hosted(name) for name in self.engine.hosted}  # read when enqueued
        if any(self.allocators.values()):
            try:
                self._compute(hosted)
            except MemoryError:
                _error("IOutputAllocator::reallocateOutput returned nullptr")
                return False
        else:
            stream.put(lambda: self._compute(hosted))
        if self.profiler is not None:
            stream.wait()
            self._report()
        return True

    def _report(self):
        """A millisecond for the first layer, two for the second, and so on."""
        assert isinstance(self.profiler, IProfiler)
        assert self.profiler.is_initialized
        for index, layer in enumerate(self.engine.head["layers"]):
            self.profiler.report_layer_time(layer["name"], index + 1.0)

    def _placed(self, name):
        return self.addresses.get(name) or self.allocators.get(name)

    def _compute(self, hosted):
        engine = self.engine
        feed = dict(hosted)
        for name, _, kind, is_input in engine.tensors:
            if is_input and name not in hosted:
                size = math.prod(self.shapes[name]) * _BYTES[kind.name]
                raw = cuda.at(self.addresses[name], size, engine.device).copy()
                feed[name] = raw.view(_NUMPY[kind.name]).reshape(self.shapes[name])
        STORY.runs.append(engine.device)
        outputs = [name for name, _, _, is_input in engine.tensors if not is_input]
        for name, value in zip(outputs, engine.run(feed), strict=True):
            self._write(name, np.ascontiguousarray(value))

    def _write(self, name, value):
        kind = self.engine.get_tensor_dtype(name).name
        if kind == "INT32" and value.dtype == np.int64:
            value = value.astype(np.int32)
        data = value.reshape(-1).view(np.uint8)
        address = self.addresses.get(name, 0)
        allocator = self.allocators.get(name)
        if allocator is not None:
            request = (name, address, max(data.size, 1), 256)
            ask = getattr(allocator, "reallocate_output_async", None)
            if ask is None or VERSION < (10,):
                address = allocator.reallocate_output(*request)
            else:
                address = ask(*request, 0)
            if not address:
                raise MemoryError
            allocator.notify_shape(name, Dims(value.shape))
        if data.size:
            cuda.at(address, data.size, self.engine.device)[:] = data


# Calibrators


if CALIBRATORS:

    class IInt8EntropyCalibrator2:
        word = "EntropyCalibration2"

    class IInt8EntropyCalibrator:
        word = "EntropyCalibration"

    class IInt8MinMaxCalibrator:
        word = "MinMaxCalibration"

    class IInt8LegacyCalibrator:
        word = "LegacyCalibration"
