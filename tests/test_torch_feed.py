"""Inputs of PyTorch models: loaders, tensors, files, inputs by name; models by name."""
# ruff: noqa: E402 (torch may be missing)

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn

from deploy.errors import ConfigError, FeedError, ModelError, SdkMissingError
from deploy.feed.feed import open_feed
from deploy.feed.preprocess import Preprocess
from deploy.files.usercode import MODEL_LIBRARIES, distrust_config
from deploy.frontends import load
from deploy.frontends.input_shapes import is_torch_spec, parse_input
from deploy.fx import model_inputs
from deploy.fx.open_model import open_torch
from deploy.fx.source import _MAKERS, load_module
from deploy.fx.weights import load_weights
from deploy.tensors import TensorSpec
from tests.models import run_command

torch.set_num_threads(1)

X = TensorSpec("x", "float32", ("batch", 3, 8, 8))

BATCH = np.random.default_rng(3).normal(size=(6, 3, 8, 8)).astype(np.float32)


def feed_all(source, **options):
    feed = open_feed(source, [X], **options)
    with feed.samples() as stream:
        return feed, np.concatenate([sample["x"] for sample in stream])


@pytest.mark.parametrize("labels", [True, False])
def test_data_loader_feeds_its_batches(labels):
    tensors = [torch.from_numpy(BATCH), *([torch.arange(6)] if labels else [])]
    data = torch.utils.data.TensorDataset(*tensors)
    feed, fed_batch = feed_all(torch.utils.data.DataLoader(data, batch_size=4))
    assert np.array_equal(fed_batch, BATCH)
    assert feed.labels == (tuple(range(6)) if labels else None)


def test_tensors_of_any_type_are_fed():
    tensor = torch.from_numpy(BATCH).requires_grad_()
    assert np.array_equal(feed_all(tensor)[1], BATCH)
    assert np.array_equal(feed_all([row[None] for row in tensor])[1], BATCH)
    assert np.allclose(feed_all([tensor.bfloat16()])[1], BATCH, rtol=1e-2)
    pictures = np.random.default_rng(4).integers(0, 256, (3, 8, 8, 3), np.uint8)
    _, fed_pictures = feed_all(
        [torch.from_numpy(picture) for picture in pictures], preprocess=Preprocess()
    )
    assert np.allclose(fed_pictures, pictures.transpose(0, 3, 1, 2) / np.float32(255), atol=1e-6)


NETS = """
import torch
from torch import nn

from tests.torch_shapes import module

def plain_words():
    return module(lambda self, ids, mask: self.head(self.words(ids) * mask.unsqueeze(-1)),
                  words=nn.Embedding(5, 8), head=nn.Linear(8, 3))

def conv(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval().to(dtype)

def half(): return conv(torch.float16)
def brain(): return conv(torch.bfloat16)
def double(): return conv(torch.float64)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.kinds = nn.Embedding(5, 8), nn.Embedding(2, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, ids, kinds=None, mask=None, *, bias=None):
        self.calls += 1  # what exports with the outputs, and is none
        x = self.words(ids)
        if kinds is not None:
            x = x + self.kinds(kinds)
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return {"scores": self.head(x), "pooled": {"mean": x.mean(1), "all": [x.sum(1)]}}

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.total = nn.Parameter(torch.tensor(2.0))  # of an output's name
    def forward(self, batch):
        x = self.body(batch["image.rgb"]) * batch["scale"].reshape(-1, 1, 1, 1)
        return {"image": x, "total": x.mean((1, 2, 3)) * self.total}

class Open(Pair):
    def forward(self, **batch):
        return super().forward({"image.rgb": batch["image"], "scale": batch["scale"]})

class One(nn.Conv2d):
    def forward(self, x: torch.Tensor):
        return super().forward(x)

def words(): return Words().eval()
def pair(): return Pair().eval()
def open_ended(): return Open().eval()
def one(): return One(3, 4, 1).eval()
"""


@pytest.fixture
def nets(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


def test_example_inputs_fit_shape_and_dtype():
    assert parse_input("1x3x8x8") == ((1, 3, 8, 8), None, None)
    assert parse_input("ids=1x128:int64") == ((1, 128), "int64", "ids")
    for wrong, reason in (
        ("1x2:int46", "got '1x2:int46'; did you mean 'int64'"),
        ("1x2:", "an input is like 1x3x224x224"),
        ("=1x2", "got '=1x2'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            parse_input(wrong)
    shapes, dtypes = [(2, 50)] * 5, [None, "int64", "uint8", "bool", "float16"]
    make = partial(model_inputs.example_inputs, shapes, dtypes, floating=torch.float64)
    real, ids, pixels, mask, half = make()
    assert real.dtype == torch.float64
    assert half.dtype == torch.float16
    assert mask.dtype == torch.bool
    assert set(ids.unique().tolist()) == {0, 1}
    assert pixels.max() > 100
    assert all(map(torch.equal, make(), (real, ids, pixels, mask, half)))
    assert model_inputs.floating_dtype(nn.Linear(1, 1).half()) == torch.float16
    assert model_inputs.floating_dtype(nn.ReLU()) == torch.float32


@pytest.mark.slow
def test_commands_take_several_inputs(nets, tmp_path, wording):
    spec = f"{nets}:plain_words"
    inputs = ("--input", "2x6:int64", "--input", "2x6")
    assert "(2, 6, 3)" in run_command("trace", spec, *inputs)
    assert "words" in run_command("profile", spec, *inputs, "--runs", 1, "--warm-up", 0)
    out = tmp_path / "w.onnx"
    assert "batches of 2 and 3" in run_command("export", spec, *inputs, "-o", out)
    kinds = [value.type.tensor_type.elem_type for value in onnx.load(out).graph.input]
    assert kinds == [onnx.TensorProto.INT64, onnx.TensorProto.FLOAT]
    quantized = run_command("export", spec, *inputs, "--qdq", "--mode", "dynamic", "-o", out)
    assert "1 of 2 layers" in quantized
    assert "words (Embedding)" in quantized
    assert "ids" in str(open_torch(spec, [(2, 6), (2, 6)], dtypes=["int64", None]).inputs)
    with pytest.raises(ModelError) as raised:
        open_torch(spec, [(2, 6), (2, 6)])
    wording.check(raised.value)


def test_sample_files_fill_the_inputs(nets, tmp_path, refusal, wording):
    model = load_module(f"{nets}:plain_words")
    ids, mask = np.array([[4, 0], [1, 3], [2, 2]]), np.ones((3, 2), np.float32)
    path = tmp_path / "s.npz"
    for write, arrays, named_arrays in (
        (np.savez, (), {"mask": mask, "ids": ids}),
        (np.savez_compressed, (ids, mask), {}),
    ):
        write(path, *arrays, **named_arrays)
        read = model_inputs.read_sample(path, model)
        assert np.array_equal(read[0], ids)
        assert np.array_equal(read[1], mask)
    np.savez(path, ids.astype(">i8"), mask.astype(">f4"))
    assert np.array_equal(model_inputs.read_sample(path, model)[0], ids)  # of any byte order
    assert "(3, 2, 3)" in run_command("trace", f"{nets}:plain_words", "--sample", path)
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 8, 8), np.float32))
    for command, *options in (
        ("profile", "--runs", 1, "--warm-up", 0),
        ("fuse", "--bench"),
        ("export", "-o", tmp_path / "o.onnx"),
    ):
        run_command(command, f"{nets}:conv", "--sample", tmp_path / "x.npy", *options)
    np.savez(path, words=ids, other=mask)
    with pytest.raises(FeedError) as raised:
        model_inputs.read_sample(path, model)
    wording.check(raised.value)
    np.save(tmp_path / "o.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "c.npy", np.array(["text"]))
    (tmp_path / "b.npz").write_bytes(b"PK")
    for name in ("o.npy", "c.npy", "b.npz", "absent.npy"):
        with pytest.raises(FeedError, match=name):
            model_inputs.read_sample(tmp_path / name, model)
    with pytest.raises(ConfigError) as raised:
        model_inputs.read_sample(tmp_path / "x.pt", model)
    wording.check(raised.value)
    assert "got both" in refusal("trace", f"{nets}:conv", "--input", "1x3x8x8", "--sample", path)


def session_of(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["half", "brain", "double"])
def test_models_of_other_float_types(nets, tmp_path, kind):
    spec, inputs = f"{nets}:{kind}", ("--input", "2x3x8x8")
    assert "(2, 4, 6, 6)" in run_command("trace", spec, *inputs)
    run_command("profile", spec, *inputs, "--runs", 1, "--warm-up", 0)
    assert "Conv+BN+ReLU: 1 fused" in run_command("fuse", spec, *inputs, "--bench")
    shown = run_command("export", spec, *inputs, "-o", tmp_path / "o.onnx")
    assert "converted to float32" in shown
    assert ("rounds its weights" in shown) == (kind == "double")
    assert session_of(tmp_path / "o.onnx").get_inputs()[0].type == "tensor(float)"
    assert any("converted to float32" in note for note in open_torch(spec, [(2, 3, 8, 8)]).notes)


def test_weights_are_found_in_checkpoints(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}

    def with_prefix(prefix):
        return {f"{prefix}{name}": value for name, value in state.items()}

    path = tmp_path / "w.pt"
    for content in (
        {"state_dict": state, "epoch": 3},
        {"model": with_prefix("module."), "optimizer": {"state": {}}},
        {"checkpoint": 1, "model": {"state_dict": with_prefix("_orig_mod.module.")}},
        with_prefix("net."),
        {"checkpoint": {"weights": state}, "optimizer": {"state": {0: {"step": state["0.bias"]}}}},
        {"ema": with_prefix("module."), "epoch": 3},
        {"state_dict": {**with_prefix("model."), "criterion.weight": torch.ones(3)}},
        {**with_prefix("module."), "n_averaged": torch.ones(1)},
        {"model": {"other": torch.ones(2)}, "student": state},
        {"state_dict": with_prefix("module."), "state": {"0.weight": {"step": torch.ones(1)}}},
    ):
        torch.save(content, path)
        nn.init.zeros_(model[0].weight)
        load_weights(model, path)
        assert float(model[0].weight.detach().sum()) == 4
    for content, reason in (
        ({"epoch": 3, "ema": {"decay": 0.9}}, "got 'epoch', 'ema'"),
        ({"params": state, "params_ema": state}, "several under 'params' and 'params_ema'"),
        ({"model": state, "ema": {"module": state}}, "several under 'model' and 'ema.module'"),
        (state | {"0.bias": torch.ones(2, dtype=torch.int8)}, "got 0.bias in torch.int8"),
        (state | {"0.bias": torch.ones(2, dtype=torch.cfloat)}, "got 0.bias in torch.complex64"),
        (state | {"0.bias": torch.ones(2).to(torch.float8_e5m2)}, "in torch.float8_e5m2"),
        (with_prefix("student.") | with_prefix("teacher."), "this model's weights"),
        ({"state_dict": state, "args": Namespace()}, "an object of argparse.Namespace"),
        (model, "an object of torch.nn.modules"),
        ({}, "got nothing"),
        (with_prefix("a.") | state, "this model's weights"),
        ([1], "got list"),
    ):
        torch.save(content, path)
        with pytest.raises(ModelError, match=reason):
            load_weights(model, path)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_old_norms_have_no_batch_count(tmp_path, prefix):
    model = nn.BatchNorm1d(2)
    state = {prefix + name: torch.full((2,), 3.0) for name in model.state_dict()}
    del state[f"{prefix}num_batches_tracked"]
    torch.save(state, tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    assert model.running_var.tolist() == [3, 3]


class CountedLinear(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_extra_state_is_loaded(tmp_path):
    model = CountedLinear(2, 1)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    assert model.calls == 3


def test_foreign_weight_files_are_named(tmp_path, recwarn, wording):
    model = nn.Linear(2, 2)
    torch.jit.script(model).save(tmp_path / "s.pt")
    (tmp_path / "t.pt").write_text("hello")
    recwarn.clear()  # torch's own, of scripting
    with pytest.raises(ModelError) as raised:
        load_weights(model, tmp_path / "s.pt")
    wording.check(raised.value)
    with pytest.raises(ModelError) as raised:
        load_weights(model, tmp_path / "t.pt")
    wording.check(raised.value)
    assert not recwarn.list


def test_safetensors_weights_are_loaded(nets, tmp_path, monkeypatch):
    save_file = pytest.importorskip("safetensors.torch", reason="calib8[torch] has it").save_file
    spec, state = f"{nets}:conv", load_module(f"{nets}:conv").state_dict()
    state["0.weight"] = torch.full_like(state["0.weight"], 0.25)
    path, out = tmp_path / "w.safetensors", tmp_path / "n.onnx"
    save_file({f"module.{name}": value for name, value in state.items()}, path)
    run_command("export", spec, "--input", "1x3x8x8", "--weights", path, "-o", out)
    weights = map(onnx.numpy_helper.to_array, onnx.load(out).graph.initializer)
    (kernel,) = [w for w in weights if w.ndim == 4]
    assert np.allclose(kernel, 0.25, rtol=1e-4)
    file_bytes = path.read_bytes()
    for broken, error_text in (
        (file_bytes[:-5], "got: "),
        (b"\x02" + bytes(7) + b"{}", "a state dict"),
    ):
        path.write_bytes(broken)
        with pytest.raises(ModelError, match=error_text):
            load_weights(load_module(spec), path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(SdkMissingError, match="pip install safetensors"):
        load_weights(load_module(spec), path)


FAKE = {
    "timm": "from torch import nn\ndef create_model(name, pretrained):\n"
    "    assert not pretrained\n    return {'tiny': nn.Linear(3, 2)}[name]\n",
    "torchvision": "",
    "torchvision.models": "from torch import nn\n"
    "def detector(*, weights=1, weights_backbone=1, trainable_layers=None):\n"
    "    assert weights is weights_backbone is trainable_layers is None\n"
    "    return nn.Linear(3, 4)\n"
    "def get_model_builder(name):\n    return {'ssd': detector}[name]\n",
    "ultralytics": "from torch import nn\nclass YOLO:\n    def __init__(self, name):\n"
    "        assert name.endswith('/cfg/models/v8/yolov8n.yaml') or name == 'own/net.yaml'\n"
    "        self.model = nn.Linear(3, 5)\n",
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Small packages under the names of the real ones."""
    for name, text in FAKE.items():
        path = tmp_path / "packages" / Path(*name.split(".")) / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    family = tmp_path / "packages" / "ultralytics" / "cfg" / "models" / "v8" / "yolov8.yaml"
    family.parent.mkdir(parents=True)
    family.touch()
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    yield
    for name in FAKE:
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_library_models_load_by_name(packages, tmp_path, wording):
    sizes = {
        spec: load_module(spec).out_features
        for spec in ("timm:tiny", "torchvision:ssd", "ultralytics:yolov8n.yaml")
    }
    assert list(sizes.values()) == [2, 4, 5]
    assert torch.equal(load_module("timm:tiny").weight, load_module("timm:tiny").weight)
    assert "timm:tiny are random" in run_command("trace", "timm:tiny")
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    assert "random" not in run_command("trace", "timm:tiny", "--weights", tmp_path / "w.pt")
    loaded = open_torch("ultralytics:yolov8n.yaml", [(1, 3)])
    assert loaded.name == "ultralytics-yolov8n"
    assert "random" in " ".join(loaded.notes)
    assert "Gemm" in run_command("inspect", "timm:tiny", "--input", "1x3")
    with pytest.raises(ConfigError) as raised:
        load("timm:tiny")
    wording.check(raised.value)
    with pytest.raises(ModelError) as raised:
        load_module("timm:huge")
    wording.check(raised.value)
    with pytest.raises(ConfigError, match=r"such as ultralytics:yolov8n\.yaml"):
        load_module("ultralytics:yolov8n.pt")
    for spec in ("timm:hf-hub:someone/net", "timm:local-dir:net", "torchvision:../net"):
        with pytest.raises(ConfigError, match="by its name"):
            load_module(spec)


def test_foreign_yaml_of_ultralytics_needs_trust(packages, tmp_path, monkeypatch):
    """Ultralytics evaluates a file's `activation`; the package's own file is not code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yolov8n.yaml").touch()
    config = tmp_path / "c.toml"
    config.touch(0o666)
    config.chmod(0o666)
    with distrust_config(config, ["m.onnx"]):
        assert load_module("ultralytics:yolov8n.yaml").out_features == 5
        with pytest.raises(ConfigError, match="--trust-config"):
            load_module("ultralytics:own/net.yaml")
    assert load_module("ultralytics:own/net.yaml").out_features == 5


def test_missing_package_is_named(tmp_path, monkeypatch, wording):
    monkeypatch.setattr("deploy.fx.source.find_spec", lambda name: None)
    with pytest.raises(SdkMissingError) as raised:
        load_module("timm:resnet18")
    wording.check(raised.value)
    (tmp_path / "ultralytics.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SdkMissingError, match="RuntimeError: operator nms"):
        load_module("ultralytics:yolov8n.yaml")
    assert set(_MAKERS) == set(MODEL_LIBRARIES)
    assert not is_torch_spec("timm:")
    assert not is_torch_spec("other:name")


WORD_INPUTS = ("--input", "ids=2x6:int64", "--input", "mask=2x6")
PAIR_INPUTS = ("--input", "image.rgb=1x3x8x8", "--input", "scale=1")
OPEN_INPUTS = ("--input", "scale=1", "--input", "image=1x3x8x8")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "inputs"), [("words", WORD_INPUTS), ("pair", PAIR_INPUTS)])
def test_every_command_takes_inputs_by_name(nets, command, tmp_path, name, inputs):
    spec, out = f"{nets}:{name}", tmp_path / "n.onnx"
    for command_name, *options in (
        ("trace",),
        ("trace", "--code"),
        ("profile", "--runs", 1, "--warm-up", 0),
        ("fuse",),
        ("export", "--qdq", "--mode", "weight-only", "--int8-stem", "-o", out),
    ):
        output = command(command_name, spec, *inputs, *options)
        assert ("dict of image_rgb, scale" in output) is (name == "pair")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inputs", "input_names", "output_names"),
    [
        (
            "words",
            ("--input", "2x6:int64", "--input", "mask=2x6"),
            ["ids", "mask"],
            ["scores", "pooled_mean", "pooled_all_0"],
        ),
        (
            "words",
            ("--input", "kinds=2x6:int64", "--input", "ids=2x6:int64"),
            ["ids", "kinds"],
            ["scores", "pooled_mean", "pooled_all_0"],
        ),
        ("pair", PAIR_INPUTS, ["image_rgb", "scale"], ["image", "total"]),
        (
            "open_ended",
            OPEN_INPUTS,
            ["scale", "image"],
            ["image_out", "total"],
        ),  # an input's name too
    ],
)
def test_exported_model_keeps_its_tensor_names(
    nets, tmp_path, name, inputs, input_names, output_names
):
    out = tmp_path / "n.onnx"
    run_command("export", f"{nets}:{name}", *inputs, "-o", out)
    session = session_of(out)
    assert [tensor.name for tensor in session.get_inputs()] == input_names
    assert [tensor.name for tensor in session.get_outputs()] == output_names
    onnx.checker.check_model(onnx.load(out), full_check=True)


def test_exported_model_is_fed_by_name(nets, tmp_path):
    out, rng = tmp_path / "w.onnx", np.random.default_rng(0)
    run_command("export", f"{nets}:pair", *PAIR_INPUTS, "-o", out)
    image = rng.normal(size=(2, 3, 8, 8)).astype(np.float32)
    scale = np.array([2, -1], np.float32)
    total = session_of(out).run(["total"], {"image_rgb": image, "scale": scale})[0]
    batch = {"image.rgb": torch.from_numpy(image), "scale": torch.from_numpy(scale)}
    with torch.no_grad():
        expected = load_module(f"{nets}:pair")(batch)["total"]
    assert np.allclose(total, expected, atol=1e-6)


@pytest.mark.slow
def test_sample_gives_keywords_and_dict_keys(nets, tmp_path, wording):
    path, spec = tmp_path / "s.npz", f"{nets}:words"
    ids, mask = torch.tensor([[4, 0, 1], [1, 3, 2]]), torch.ones(2, 3)
    np.savez(path, mask=mask.numpy(), ids=ids.numpy())
    assert "(2, 3, 8)" in run_command("trace", spec, "--sample", path)
    model, second_model = load_module(spec), load_module(spec)
    read = model(*model_inputs.read_sample(path, model))
    assert torch.equal(read["scores"], second_model(ids, mask=mask)["scores"])
    np.savez(path, **{"image.rgb": np.zeros((1, 3, 8, 8), "f4"), "scale": np.ones(1, "f4")})
    output = run_command("export", f"{nets}:pair", "--sample", path, "-o", tmp_path / "o.onnx")
    assert "a dict of" in output
    np.savez(path, mask=mask.numpy())
    with pytest.raises(FeedError) as raised:
        model_inputs.read_sample(path, load_module(spec))
    wording.check(raised.value)


@pytest.mark.slow
def test_named_inputs_are_calibrated_and_built(nets, command, tmp_path):
    images, rng = tmp_path / "many.npz", np.random.default_rng(0)
    np.savez(images, ids=rng.integers(0, 5, (6, 6)), mask=np.ones((6, 6), np.float32))
    arguments = (f"{nets}:words", *WORD_INPUTS, "--images", images)
    assert "1 of 2 layers" in command("export", *arguments, "--qdq", "-o", tmp_path / "q.onnx")
    command("build", *arguments, "--out", tmp_path / "out", "--effort", "0", "--duration", "0")


@pytest.mark.parametrize(
    ("name", "names", "reason"),
    [
        ("words", ["ids", "musk"], "got ids, musk; did you mean 'mask'"),
        ("words", ["mask"], r"forward\(ids, kinds=None, mask=None"),
        ("words", ["ids", "ids"], "got ids twice"),
        ("words", ["ids", None], "before those with one, got ids, no name"),
        ("words", [None, None, None, None, "x"], "are the first arguments"),
        ("one", ["image"], r"forward\(x\)"),
        ("pair", ["batch", "scale"], "the keys of a dict"),
    ],
)
def test_unknown_input_names_are_refused(nets, refusal, name, names, reason):
    with pytest.raises(ConfigError, match=reason):
        model_inputs.accept_named_inputs(load_module(f"{nets}:{name}"), names)
    arguments = []
    for name_of_input in names:
        arguments += ["--input", f"{name_of_input}=1x2" if name_of_input else "1x2"]
    err = refusal("profile", f"{nets}:{name}", *arguments)
    assert "forward" in err or "twice" in err


def test_only_models_with_omissions_change_class(nets):
    model = load_module(f"{nets}:words")
    kind = type(model)
    assert model_inputs.accept_named_inputs(model, [None, None]) == [0, 1]
    assert model_inputs.accept_named_inputs(model, ["mask", "bias", "ids", "kinds"]) == [2, 3, 0, 1]
    assert type(model) is kind
    assert model_inputs.dict_input_note(model) is None
    model_inputs.accept_named_inputs(model, ["ids", "bias"])
    assert type(model) is not kind
    assert type(model).__name__ == "Words"
    assert "words.weight" in dict(model.named_parameters())
