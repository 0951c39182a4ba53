"""The commands on a PyTorch model: build, fuse, profile, export, their options, and devices."""
# ruff: noqa: E402 (torch may be missing)

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import calib8
from deploy.cli import cli
from deploy.errors import ConfigError, FeedError, ModelError, SdkMissingError
from deploy.files.manifest import name_output
from deploy.frontends import load
from deploy.frontends.input_shapes import parse_shape
from deploy.fx.convert import calibrate
from deploy.fx.device import DeviceAdapter, device_of, find_device, move_tensors
from deploy.fx.open_model import open_module, open_torch
from deploy.fx.prepare import prepare
from deploy.fx.profile import profile
from deploy.fx.qat import train
from deploy.fx.trace import trace
from tests import torch_training
from tests.models import run_command
from tests.torch_placed import observers_of, real_model
from tests.torch_shapes import module

torch.set_num_threads(1)

HERE = Path(__file__).parent

SMALL = f"{HERE / 'resnet18.py'}:small"

LITE0 = f"{HERE.parent / 'benchmarks' / 'efficientnet_lite0.py'}:make"

TRAINING = HERE / "torch_training.py"


def outputs(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "size"), [(SMALL, 64), (LITE0, 224)], ids=["resnet", "lite0"])
def test_build_of_module_equals_its_onnx(spec, size, tmp_path):
    if spec == LITE0:
        real_model("efficientnet_lite0.py:make")
    x = np.random.default_rng(0).uniform(-1, 1, (3, 3, size, size)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    feed = ["--images", tmp_path / "x.npy", "--duration", 0]
    shape = ["--input", f"1x3x{size}x{size}"]
    run_command("build", spec, *shape, *feed, "--out", tmp_path / "torch")
    run_command("export", spec, *shape, "-o", tmp_path / "net.onnx")
    run_command("build", tmp_path / "net.onnx", *feed, "--out", tmp_path / "onnx")
    (ours,) = (tmp_path / "torch").glob("*.int8.onnx")
    (theirs,) = (tmp_path / "onnx").glob("*.int8.onnx")
    assert ours.name.endswith(("resnet18-small.int8.onnx", "efficientnet_lite0-make.int8.onnx"))
    for output, expected in zip(outputs(ours, x), outputs(theirs, x), strict=True):
        assert np.array_equal(output, expected)
    float_outputs = outputs(tmp_path / "net.onnx", x)
    assert np.corrcoef(outputs(ours, x)[0].ravel(), float_outputs[0].ravel())[0, 1] > 0.98


@pytest.mark.slow
def test_inspect_and_calibrate_take_a_module(tmp_path, command):
    loaded = open_torch(SMALL, [(1, 3, 64, 64)])
    assert loaded.digest == open_torch(SMALL, [(4, 3, 64, 64)]).digest
    assert loaded.name == "resnet18-small"
    assert loaded.inputs[0].shape == ("batch", 3, 64, 64)
    shape = ["--input", "1x3x64x64"]
    assert "20 Conv" in command("inspect", SMALL, *shape)
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 64, 64), np.float32) + 0.5)
    out = ("-o", tmp_path / "m.cache")
    command("calibrate", SMALL, *shape, "--images", tmp_path / "x.npy", *out)
    assert (tmp_path / "m.cache").is_file()


@pytest.mark.slow
def test_bad_module_arguments_are_refused(tmp_path, refusal, wording):
    with pytest.raises(ConfigError) as raised:
        load(SMALL)
    wording.check(raised.value)
    with pytest.raises(ConfigError, match=r"file\.py:factory"):
        load(str(HERE / "resnet18.py"))
    model = tmp_path / "model.onnx"
    model.touch()
    wording.check(refusal("inspect", model, "--weights", model))
    for text in ("", "3x", "0x3", "axb", "1X3", "1x-3", "1x3 "):
        with pytest.raises(ConfigError, match="like 1x3x224x224"):
            parse_shape(text)
    with pytest.raises(ModelError) as raised:
        open_torch(SMALL, [(1, 4, 64, 64)])
    wording.check(raised.value)
    (tmp_path / "broken.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(3, 2, device='meta')\n"
    )
    with pytest.raises(ModelError):
        open_torch(f"{tmp_path / 'broken.py'}:make", [(1, 3)])


NET_ARGUMENTS = (f"{TRAINING}:net", "--input", "2x1x8x8")


@pytest.fixture
def weights(tmp_path):
    """Weights of that network, other than it has."""
    state = {name: value + 0.5 for name, value in torch_training.net().state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    return tmp_path / "w.pt"


def constants(path):
    return [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]


@pytest.mark.slow
def test_weights_are_loaded_by_every_command(weights, tmp_path):
    arguments, out = (*NET_ARGUMENTS, "--weights", weights), tmp_path / "net.onnx"
    assert "opset 19" in run_command("export", *arguments, "--opset", "19", "-o", out)
    weight = torch.load(weights, weights_only=True)["0.weight"].numpy()
    assert any(np.array_equal(value, weight) for value in constants(out))
    for command in ("trace", "fuse"):
        run_command(command, NET_ARGUMENTS[0], "--weights", weights)
    run_command("profile", *arguments, "--runs", "1", "--warm-up", "0")
    assert "Conv" in run_command("inspect", *arguments)


def test_trace_replaces_an_operation():
    shown = run_command("trace", f"{TRAINING}:parts", "--replace", "add=torch.mul", "--code")
    assert shown.count("torch.mul") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patterns", "layers"), [((), 2), (("op:Conv*",), 1), (("[13]",), 1), (("0", "op:Conv2d"), 1)]
)
def test_export_keeps_chosen_layers_float(tmp_path, patterns, layers):
    out = tmp_path / "q.onnx"
    options = [argument for pattern in patterns for argument in ("--keep-float", pattern)]
    mode = ("--qdq", "--mode", "weight-only", "--int8-stem")
    run_command("export", *NET_ARGUMENTS, *mode, *options, "-o", out)
    weights = [array for array in constants(out) if array.dtype == np.int8 and array.ndim > 1]
    assert len(weights) == layers


@pytest.mark.slow
def test_export_calibrates_on_raw_files(weights, tmp_path):
    (tmp_path / "raw").mkdir()
    batch = np.random.default_rng(2).normal(size=(4, 1, 8, 8)).astype("<f2")
    for number, sample in enumerate(batch):
        sample.tofile(tmp_path / "raw" / f"{number}.bin")
    np.save(tmp_path / "x.npy", batch.astype(np.float32))
    arguments = "export", *NET_ARGUMENTS, "--weights", weights, "--qdq", "--images"
    raw = tmp_path / "raw", "--raw-shape", "1x8x8", "--raw-dtype", "float16"
    run_command(*arguments, *raw, "-o", tmp_path / "a.onnx")
    run_command(*arguments, tmp_path / "x.npy", "-o", tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_export_refuses_ignored_options(tmp_path, refusal, wording):
    for options, refused in (
        (("--keep-float", "0", "--mode", "static"), "--mode and --keep-float go with --qdq"),
        (("--size", "8x8"), "--size goes with --qdq"),
        (("--int8-stem",), "--int8-stem goes with --qdq"),
        (("--qdq", "--target", "ascend", "--int8-stem"), "is needed for --int8-stem"),
        (("--qdq", "--mode", "dynamic", "--raw-dtype", "uint8"), "--raw-dtype goes with --images"),
        (("--qdq", "--mode", "dynamic", "--limit", "3"), "--limit goes with --images"),
        (("--qdq", "--mode", "dynamic", "--keep-float", "conv*"), "got 'conv*'"),
    ):
        assert refused in refusal("export", *NET_ARGUMENTS, *options, "-o", tmp_path / "x.onnx")
    shown = CliRunner().invoke(cli, ["fuse", NET_ARGUMENTS[0], "--device", "cpu"])
    assert "--device goes with --input" in str(shown.exception)
    teacher = ("--teacher-weights", "w.pt", "-o", "x.onnx")
    wording.check(refusal("qat", f"{TRAINING}:twice", *teacher))


@pytest.mark.slow
def test_qat_options_change_the_training(weights, tmp_path):
    arguments = ("qat", f"{TRAINING}:twice", "-o", tmp_path / "q.onnx")
    teacher = ("--teacher", f"{TRAINING}:net", "--teacher-weights", weights)
    options = ("--bits", "6", "--ranges", "follow", "--epochs", "1", "--distil", "0")
    shown = run_command(*arguments, *teacher, *options)
    assert "epoch 1/1" in shown
    assert "by mse, follow" in shown
    method = ("--method", "percentile", "--percent", "99.5", "--epochs", "0")
    assert "percentile 99.5, kept" in run_command(*arguments, *method)


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))

PARTS = (f"{TRAINING}:parts", "--input", "2x3x8x8")


def test_fuse_needs_inputs_to_run(refusal, wording):
    arguments = ("fuse", *PARTS, "--device", "meta", "--bench")
    assert "needs values, and the meta device holds none" in refusal(*arguments)
    wording.check(refusal("fuse", PARTS[0], "--bench"))
    assert "--device goes with" in refusal("fuse", PARTS[0], "--device", "meta")


def test_profile_as_json_and_page(tmp_path, refusal, wording):
    page = tmp_path / "p.html"
    arguments = ("profile", *PARTS, "--runs", 2, "--warm-up", 0)
    report = json.loads(run_command(*arguments, "--json", "-", "--html", page))
    assert report["schema"] == "calib8-profile/1"
    assert report["macs"] * 2 == report["flops"] > 0
    node_by_name = {node["name"]: node for node in report["nodes"]}
    assert node_by_name["parts_0_conv"]["module"] == "parts.0.conv"
    assert node_by_name["parts_0_conv"]["parameters"] == 84
    assert node_by_name["relu"]["module"] == "parts.0"
    assert node_by_name["flatten"]["module"] == ""
    assert sum(node["flops"] for node in report["nodes"]) == report["flops"]
    assert sum(node["percent"] for node in report["nodes"]) == pytest.approx(100)
    name_output(page, "page")
    text = page.read_text()
    assert "Time by module" in text
    assert "parts.0.conv" in text
    assert "Content-Security" in text
    assert "style=" not in text
    assert "onclick" not in text
    assert "2 runs on cpu" in text
    assert "2x3x8x8:float32" in text
    *rows, total, _ = run_command(*arguments).splitlines()
    assert total.split()[2] == "100.00"
    assert not any(row.startswith(("placeholder", "output")) for row in rows)
    assert run_command(*arguments, "--quiet", "--html", page) == ""
    wording.check(refusal(*arguments, "-q"))


def test_meta_device_computes_nothing(tmp_path, refusal, wording):
    assert find_device("cpu").type == "cpu"
    assert find_device("meta").type == "meta"
    with pytest.raises(ConfigError) as raised:
        find_device("gpu")
    wording.check(raised.value)
    if not torch.cuda.is_available():
        with pytest.raises(SdkMissingError) as raised:
            find_device("cuda")
        assert "cuda" in str(raised.value)
        assert "--device cpu" in str(raised.value)
    meta = ("--device", "meta")
    for arguments in (("export", *PARTS), ("qat", f"{TRAINING}:of_parts")):
        wording.check(refusal(*arguments, *meta, "-o", tmp_path / "o.onnx"))
    shown = run_command("profile", *PARTS, *meta, "--runs", 1, "--warm-up", 0)
    assert "the meta device" in shown
    assert "parts_0_conv" in shown
    assert "(2, 2)" in run_command("trace", *PARTS, *meta)
    assert "--device goes with" in refusal("trace", PARTS[0], *meta)


@pytest.mark.slow
def test_observers_share_the_model_device():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval().to("meta")
    prepared = prepare(model, [X.to("meta")], target="tensorrt")
    assert {quant.lo.device.type for quant in observers_of(prepared).values()} == {"meta"}
    assert prepared(X.to("meta")).device.type == "meta"
    assert device_of(nn.ReLU()).type == "cpu"
    assert device_of(model).type == "meta"
    cpu_model = prepare(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), [X], target="tensorrt")
    assert calibrate(cpu_model, [X, (X,)]) == 2


def test_device_adapter_returns_results():
    nested = move_tensors({"a": [X, (X, 3)], "b": "text"}, torch.device("meta"))
    assert nested["a"][0].device.type == nested["a"][1][0].device.type == "meta"
    assert nested["a"][1][1] == 3
    assert nested["b"] == "text"

    def check_device(self, x):
        assert x.device.type == "meta"
        return {"y": torch.zeros(2)}

    adapted = DeviceAdapter(module(check_device, layer=nn.Linear(2, 2, device="meta")))
    assert adapted(torch.zeros(1, 2))["y"].device.type == "cpu"
    result = profile(trace(module(lambda self, x: x + 1)), [X], warm_up=0, runs=1)
    assert {node.module for node in result.nodes} == {""}
    assert result.parameters == 0


@pytest.mark.slow
def test_training_in_bfloat16_on_a_device(tmp_path):
    training, output_types = torch_training.of_parts(), []

    def loss(output, label):
        output_types.append(output.dtype)
        return nn.functional.cross_entropy(output.float(), label)

    training.loss = loss
    training.amp = True
    training.evaluate = lambda model: float(model(X).sum())
    result = train(training, device=torch.device("cpu"))
    assert torch.bfloat16 in output_types
    assert result.score_after is not None
    assert {p.dtype for p in result.prepared.parameters()} == {torch.float32}
    options = ("--amp", "--device", "cpu", "--int8-stem", "-o", tmp_path / "q.onnx")
    shown = run_command("qat", f"{TRAINING}:of_parts", *options)
    assert "int8: 3 of 3 layers" in shown
    assert "same arg-max" in shown
    assert "weights in float" in shown


class InMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.slow
def test_module_in_memory_is_built(tmp_path):
    torch.manual_seed(0)
    net, x = InMemory(), torch.randn(2, 3, 16, 16)
    model = calib8.torch.export(net.half(), [x])  # in train mode, and in float16
    assert net.training
    assert net.conv.weight.dtype == torch.float16
    inspection = calib8.inspect(model)
    assert inspection.inputs[0].shape[1:] == (3, 16, 16)
    assert "in_memory" in repr(inspection)
    arrays = list(np.random.default_rng(0).normal(size=(8, 1, 3, 16, 16)).astype(np.float32))
    quick = {"duration_s": 0, "tuning": calib8.Tuning(effort=0)}
    report = calib8.build(model, arrays, out=tmp_path, **quick)
    assert not report.failed
    assert (tmp_path / "in_memory.int8.onnx").is_file()
    assert "head" in {node.module for node in report.targets[0].nodes}
    assert "head" in report.targets[0].modules.values()


def test_load_refuses_a_module():
    for net in (InMemory(), trace(InMemory())):
        with pytest.raises(ModelError, match=r"calib8\.torch\.export\(module, "):
            calib8.load(net)


PIXELS = torch.from_numpy(np.random.default_rng(5).normal(size=(8, 3, 16, 16)).astype(np.float32))
CLASSES = torch.arange(8) % 4


def loader(*tensors):
    return DataLoader(TensorDataset(*tensors), batch_size=4)


def state(net):
    tensors = [(t, t.clone(), t.requires_grad) for t in (*net.parameters(), *net.buffers())]
    return tensors, [(type(layer), layer.training) for layer in net.modules()]


BUILD_PROGRAM = """
import sys
from tests.test_torch_commands import CLASSES, InMemory, PIXELS, calib8, loader, torch
torch.manual_seed(0)
quick = {"duration_s": 0, "tuning": calib8.Tuning(effort=0)}
print(calib8.build(InMemory().eval(), loader(PIXELS, CLASSES), out=sys.argv[1], **quick))
"""


@pytest.mark.slow
def test_module_and_loader_replace_files(tmp_path):
    torch.manual_seed(0)
    net, data = InMemory(), loader(PIXELS, CLASSES)
    net.conv.weight.requires_grad_(False)
    net.norm.eval()
    tensors, modes = state(net)
    quick = {"duration_s": 0, "tuning": calib8.Tuning(effort=0)}
    text = repr(calib8.build(net, data, out=tmp_path, **quick))
    now, modes_now = state(net)
    assert modes_now == modes
    for (tensor, value_before, graded), (tensor_now, _, graded_now) in zip(
        tensors, now, strict=True
    ):
        assert tensor is tensor_now
        assert torch.equal(tensor_now, value_before)
        assert graded == graded_now
    assert "in_memory in int8" in text
    assert "calibrated" in text
    result = calib8.compare(net, tmp_path / "in_memory.int8.onnx", data)
    assert result.first == "InMemory in onnxruntime"
    assert result.outputs[0].accuracy.sqnr_db > 20
    result = calib8.explain(tmp_path, images=data, model=net)
    assert result.targets[0].held.samples == 8
    first_note = result.targets[0].held.notes[0]  # one on another model would come first
    assert first_note == "labels: value 2 of each item"
    command = [sys.executable, "-c", BUILD_PROGRAM, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, check=True)
    assert "reused: model, images" in done.stdout  # one digest in every process
    assert calib8.calibrate(net, PIXELS, cache=tmp_path / "calib8" / "in_memory.cache").reason


@dataclass
class Returned:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "data", "inputs", "batch"),
    [
        (lambda net, x: net.own(x), [*PIXELS.numpy()], "x", "batch"),
        (lambda net, x: net.own(x), iter([PIXELS]), "x", "batch"),
        (lambda net, x: net.own(x), TensorDataset(PIXELS, CLASSES), "x", "batch"),
        (lambda net, x: {"logits": net.own(x)}, PIXELS[:1], "x", "batch"),
        (lambda net, x: Returned(net.own(x)), loader(PIXELS, CLASSES), "x", "batch"),
        (lambda net, x: net.own(x.reshape(4, 3, 16, 16)), loader(PIXELS), "x", 4),
        (
            lambda net, x, y, z=None: net.own(x * y),
            loader(PIXELS, PIXELS > 0, CLASSES),
            "x y",
            "batch",
        ),
        (lambda net, x, labels=None: net.own(x), [{"labels": CLASSES, "x": PIXELS}], "x", "batch"),
        (lambda net, item: net.own(item["x"]), [({"x": PIXELS, "label": CLASSES},)], "x", "batch"),
    ],
    ids=["samples", "iterator", "dataset", "dict", "class", "fixed", "several", "names", "keys"],
)
def test_first_loader_item_gives_inputs(forward, data, inputs, batch):
    net = nn.DataParallel(module(forward, own=InMemory().eval()))
    loaded, images = open_module(net, data)
    assert [spec.name for spec in loaded.inputs] == inputs.split()
    assert loaded.inputs[0].shape == (batch, 3, 16, 16)
    assert loaded.name == "net"
    assert any("fixes its batch" in note for note in loaded.notes) == (batch == 4)
    if "logits" in str(forward.__code__.co_consts + forward.__code__.co_names):
        assert loaded.outputs[0].name == "logits"
    feed = calib8.calibrate(loaded, images).feed
    assert feed.count == 8 or isinstance(data, torch.Tensor)


def broken():
    yield from ()
    raise OSError("no disk")


def branching(net, x):
    return net.own(x) if x.sum() > 0 else net.own(-x)


@pytest.mark.parametrize(
    ("net", "data", "error", "reason"),
    [
        (InMemory(), None, ConfigError, "a DataLoader, a batch or a list of tensors, got none"),
        (InMemory(), "photos/", ConfigError, "a list of tensors, got files; give one after the"),
        (InMemory(), DataLoader([]), FeedError, "must give samples, got none from a DataLoader"),
        (InMemory(), broken, FeedError, "OSError: no disk at .*: raise OSError"),
        (InMemory(), [("a.png", 1)], FeedError, "must be an array of numbers.*, got str"),
        (
            module(lambda net, x, mask: x * mask),
            loader(PIXELS),
            FeedError,
            "inputs of forward, x, mask, got 1; yield a tuple",
        ),
        (InMemory(), [{"labels": CLASSES}], FeedError, "the inputs of forward, x, got none; yield"),
        (
            InMemory(),
            loader(PIXELS[:, :2]),
            ModelError,
            r"run for inputs \[\(4, 2, 16, 16\)\].* at .*test_torch_commands.py:[0-9]+: return",
        ),
        (InMemory(), [{"image": PIXELS}], ModelError, "is given a dict of image in it: name its"),
        (
            module(branching, own=InMemory()),
            [PIXELS],
            ModelError,
            r"cannot follow Net at .*test_torch_commands.py:[0-9]+:"
            " return net.own",
        ),
        (lambda: torch.jit.script(nn.ReLU()), [PIXELS], ModelError, "is TorchScript; give"),
        (
            lambda: torch.export.export(nn.ReLU(), (PIXELS,)),
            [PIXELS],
            ModelError,
            "must be a torch.nn.Module, got ExportedProgram; give the module that the program was",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_unexportable_module_is_refused(net, data, error, reason, wording):
    net = net if isinstance(net, nn.Module) else net()
    for take in (
        calib8.inspect,
        calib8.calibrate,
        lambda *arguments: calib8.compare(arguments[0], *arguments),
    ):
        with pytest.raises(error, match=reason) as refused:
            take(net, data)
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError) as raised:
        calib8.build(net, data, preprocess="imagenet")
    wording.check(raised.value)


@pytest.mark.slow
def test_torch_functions_take_a_module(wording):
    torch.manual_seed(0)
    net, x = InMemory().eval(), torch.randn(4, 3, 16, 16)
    assert calib8.torch.trace(net).graph
    assert calib8.torch.profile(net, x, runs=1).parameters
    fused, report = calib8.torch.fuse(net, x)  # one tensor or a list
    assert report.norms_left == 0
    assert torch.allclose(fused(x), net(x), atol=1e-5)
    prepared = calib8.torch.prepare(net, x, target="tensorrt")
    assert calib8.torch.calibrate(prepared, [x]) == 1
    data = loader(PIXELS, CLASSES)  # labels are left out
    prepared = calib8.torch.prepare(net, data, target="tensorrt")
    assert calib8.torch.calibrate(prepared, data) == 2
    assert calib8.torch.profile(net, DataLoader([{"x": PIXELS[0]}]), runs=1).parameters
    with pytest.raises(FeedError) as raised:
        calib8.torch.fuse(net, DataLoader([{"image": PIXELS[0]}]))
    wording.check(raised.value)
    exported = calib8.torch.export(calib8.torch.convert(prepared), x)
    assert "QuantizeLinear" in {node.op_type for node in exported.graph.node}
