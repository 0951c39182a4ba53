"""Inputs of every kind: dtypes, several, samples from files; models by name; nested checkpoints."""

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn  # noqa: E402

from deploy.cli import cli  # noqa: E402
from deploy.errors import ConfigError, FeedError, ModelError, SdkMissingError  # noqa: E402
from deploy.files.usercode import MODEL_LIBRARIES  # noqa: E402
from deploy.frontends import load  # noqa: E402
from deploy.frontends.torch_model import is_torch_spec, parse_input  # noqa: E402
from deploy.fx.model_inputs import example_inputs, floating_dtype, read_sample  # noqa: E402
from deploy.fx.opening import open_torch  # noqa: E402
from deploy.fx.source import _MAKERS, load_module, load_weights  # noqa: E402

torch.set_num_threads(1)
NETS = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 8), nn.Linear(8, 3)
    def forward(self, ids, mask):
        return self.head(self.words(ids) * mask.unsqueeze(-1))

def words():
    return Words().eval()

def conv(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval().to(dtype)

def half(): return conv(torch.float16)
def brain(): return conv(torch.bfloat16)
def double(): return conv(torch.float64)
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


def run(*words):
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_an_input_has_a_shape_and_perhaps_a_dtype_and_a_name():
    assert parse_input("1x3x8x8") == ((1, 3, 8, 8), None, None)
    assert parse_input("ids=1x128:int64") == ((1, 128), "int64", "ids")
    with pytest.raises(ConfigError, match="got '1x2:int46'; did you mean 'int64'"):
        parse_input("1x2:int46")
    with pytest.raises(ConfigError, match="an input is like 1x3x224x224"):
        parse_input("1x2:")
    with pytest.raises(ConfigError, match="got '=1x2'"):
        parse_input("=1x2")


def test_made_up_values_fit_their_dtype():
    shapes, dtypes = [(2, 50)] * 5, [None, "int64", "uint8", "bool", "float16"]
    real, ids, pixels, mask, half = example_inputs(shapes, dtypes, floating=torch.float64)
    assert real.dtype == torch.float64 and half.dtype == torch.float16 and mask.dtype == torch.bool
    assert set(ids.unique().tolist()) == {0, 1} and pixels.max() > 100
    again = example_inputs(shapes, dtypes, floating=torch.float64)
    assert all(map(torch.equal, again, (real, ids, pixels, mask, half)))
    assert floating_dtype(nn.Linear(1, 1).half()) == torch.float16
    assert floating_dtype(nn.ReLU()) == torch.float32


@pytest.mark.slow
def test_ids_and_several_inputs_go_through_every_command(nets, tmp_path):
    spec = f"{nets}:words"
    inputs = ("--input", "2x6:int64", "--input", "2x6")
    assert "(2, 6, 3)" in run("trace", spec, *inputs)
    assert "words" in run("profile", spec, *inputs, "--runs", 1, "--warm-up", 0)
    out = tmp_path / "w.onnx"
    assert "batches of 2 and 3" in run("export", spec, *inputs, "-o", out)
    kinds = [value.type.tensor_type.elem_type for value in onnx.load(out).graph.input]
    assert kinds == [onnx.TensorProto.INT64, onnx.TensorProto.FLOAT]
    quantized = run("export", spec, *inputs, "--qdq", "--mode", "dynamic", "-o", out)
    assert "1 of 2 layers" in quantized and "words (Embedding)" in quantized
    assert "ids" in str(open_torch(spec, [(2, 6), (2, 6)], dtypes=["int64", None]).inputs)
    with pytest.raises(ModelError, match="must be able to follow"):
        open_torch(spec, [(2, 6), (2, 6)])


def test_a_sample_is_read_by_names_by_numbers_or_alone(nets, tmp_path):
    model = load_module(f"{nets}:words")
    ids, mask = np.array([[4, 0], [1, 3], [2, 2]]), np.ones((3, 2), np.float32)
    path = tmp_path / "s.npz"
    for write in (
        lambda: np.savez(path, mask=mask, ids=ids),
        lambda: np.savez_compressed(path, ids, mask),
    ):
        write()
        read = read_sample(path, model)
        assert np.array_equal(read[0], ids) and np.array_equal(read[1], mask)
    assert "(3, 2, 3)" in run("trace", f"{nets}:words", "--sample", path)
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 8, 8), np.float32))
    for command, words in (
        ("profile", ("--runs", 1, "--warm-up", 0)),
        ("fuse", ("--bench",)),
        ("export", ("-o", tmp_path / "o.onnx")),
    ):
        run(command, f"{nets}:conv", "--sample", tmp_path / "x.npy", *words)
    np.savez(path, words=ids, other=mask)
    with pytest.raises(FeedError, match=r"\(ids, mask\), .*got words, other; .*arr_0, arr_1"):
        read_sample(path, model)
    np.save(tmp_path / "o.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "c.npy", np.array(["text"]))
    (tmp_path / "b.npz").write_bytes(b"PK")
    for name in ("o.npy", "c.npy", "b.npz", "absent.npy"):
        with pytest.raises(FeedError, match=name):
            read_sample(tmp_path / name, model)
    with pytest.raises(ConfigError, match=r"an \.npy or \.npz file"):
        read_sample(tmp_path / "x.pt", model)
    both = CliRunner().invoke(
        cli, ["trace", f"{nets}:conv", "--input", "1x3x8x8", "--sample", str(path)]
    )
    assert "got both" in str(both.exception)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["half", "brain", "double"])
def test_models_of_other_floats(nets, tmp_path, kind):
    spec, words = f"{nets}:{kind}", ("--input", "2x3x8x8")
    assert "(2, 4, 6, 6)" in run("trace", spec, *words)
    run("profile", spec, *words, "--runs", 1, "--warm-up", 0)
    assert "Conv+BN+ReLU: 1 fused" in run("fuse", spec, *words, "--bench")
    out = tmp_path / "o.onnx"
    shown = run("export", spec, *words, "-o", out)
    assert "and is taken in float32" in shown
    assert ("rounds its weights" in shown) == (kind == "double")
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].type == "tensor(float)"
    assert any("is taken in float32" in note for note in open_torch(spec, [(2, 3, 8, 8)]).notes)


def test_checkpoints_hold_their_weights_somewhere_and_under_prefixes(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}

    def under(prefix):
        return {f"{prefix}{name}": value for name, value in state.items()}

    path = tmp_path / "w.pt"
    for kept in (
        {"state_dict": state, "epoch": 3},
        {"model": under("module."), "optimizer": {"state": {}}},
        {"checkpoint": 1, "model": {"state_dict": under("_orig_mod.module.")}},
        under("net."),
        {"checkpoint": {"weights": state}, "optimizer": {"state": {0: {"step": state["0.bias"]}}}},
        {"ema": under("module."), "epoch": 3},
        {"state_dict": {**under("model."), "criterion.weight": torch.ones(3)}},
        {**under("module."), "n_averaged": torch.ones(1)},
    ):
        torch.save(kept, path)
        nn.init.zeros_(model[0].weight)
        load_weights(model, path)
        assert float(model[0].weight.detach().sum()) == 4
    for kept, said in (
        ({"epoch": 3, "ema": {"decay": 0.9}}, "got 'epoch', 'ema'"),
        ({"params": state, "params_ema": state}, "several under 'params' and 'params_ema'"),
        (under("student.") | under("teacher."), "this model's weights"),
        ({"state_dict": state, "args": Namespace()}, "an object of argparse.Namespace"),
        (model, "an object of torch.nn.modules"),
        ({}, "got nothing"),
        (under("a.") | state, "this model's weights"),
        ([1], "got list"),
    ):
        torch.save(kept, path)
        with pytest.raises(ModelError, match=said):
            load_weights(model, path)


def test_files_that_torch_save_did_not_write_are_named(tmp_path, recwarn):
    model = nn.Linear(2, 2)
    torch.jit.script(model).save(tmp_path / "s.pt")
    (tmp_path / "t.pt").write_text("hello")
    recwarn.clear()  # torch's own, of scripting
    for name, said in (
        ("s.pt", "got TorchScript, which torch.jit.load reads; save"),
        ("t.pt", "got what torch.save did not write; save"),
    ):
        with pytest.raises(ModelError, match=said):
            load_weights(model, tmp_path / name)
    assert not recwarn.list


def test_weights_of_safetensors(nets, tmp_path, monkeypatch):
    save_file = pytest.importorskip("safetensors.torch", reason="calib8[torch] has it").save_file
    spec, state = f"{nets}:conv", load_module(f"{nets}:conv").state_dict()
    state["0.weight"] = torch.full_like(state["0.weight"], 0.25)
    path = tmp_path / "w.safetensors"
    save_file({f"module.{name}": value for name, value in state.items()}, path)
    shown = run("export", spec, "--input", "1x3x8x8", "--weights", path, "-o", tmp_path / "n.onnx")
    weights = [
        onnx.numpy_helper.to_array(w) for w in onnx.load(tmp_path / "n.onnx").graph.initializer
    ]
    (kernel,) = [w for w in weights if w.ndim == 4]
    assert np.allclose(kernel, 0.25, rtol=1e-4), shown
    whole = path.read_bytes()
    for broken, said in ((whole[:-5], "got: "), (b"\x02" + bytes(7) + b"{}", "a state dict")):
        path.write_bytes(broken)
        with pytest.raises(ModelError, match=said):
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
    "        assert name == 'yolov8n.yaml'\n        self.model = nn.Linear(3, 5)\n",
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Small packages under the names of the real ones."""
    for name, text in FAKE.items():
        path = tmp_path / "packages" / Path(*name.split(".")) / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    yield
    for name in FAKE:
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_models_by_name(packages, tmp_path):
    made = {
        spec: load_module(spec).out_features
        for spec in ("timm:tiny", "torchvision:ssd", "ultralytics:yolov8n.yaml")
    }
    assert list(made.values()) == [2, 4, 5]
    assert torch.equal(load_module("timm:tiny").weight, load_module("timm:tiny").weight)
    shown = run("trace", "timm:tiny")
    assert "the weights of timm:tiny are random" in shown
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    assert "random" not in run("trace", "timm:tiny", "--weights", tmp_path / "w.pt")
    loaded = open_torch("ultralytics:yolov8n.yaml", [(1, 3)])
    assert loaded.name == "ultralytics-yolov8n" and "random" in " ".join(loaded.notes)
    assert "Gemm" in run("inspect", "timm:tiny", "--input", "1x3")
    with pytest.raises(ConfigError, match="needs the shape of its input"):
        load("timm:tiny")
    with pytest.raises(ModelError, match="timm must be able to make 'huge', got KeyError"):
        load_module("timm:huge")
    with pytest.raises(ConfigError, match=r"such as ultralytics:yolov8n\.yaml"):
        load_module("ultralytics:yolov8n.pt")


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.fx.source.find_spec", lambda name: None)
    with pytest.raises(SdkMissingError, match="not installed: pip install timm"):
        load_module("timm:resnet18")
    (tmp_path / "ultralytics.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SdkMissingError, match="cannot be imported here: RuntimeError: operator"):
        load_module("ultralytics:yolov8n.yaml")
    assert set(_MAKERS) == set(MODEL_LIBRARIES)
    assert not is_torch_spec("timm:") and not is_torch_spec("other:name")
