"""Inputs by their names on the command line, and outputs by theirs."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from deploy.errors import ConfigError, FeedError  # noqa: E402
from deploy.fx.model_inputs import as_dict, read_sample, take_named  # noqa: E402
from deploy.fx.source import load_module  # noqa: E402

torch.set_num_threads(1)
NETS = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.kinds = nn.Embedding(5, 8), nn.Embedding(2, 8)
        self.head = nn.Linear(8, 3)
    def forward(self, ids, kinds=None, mask=None, *, bias=None):
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
    def forward(self, batch):
        x = self.body(batch["image.rgb"]) * batch["scale"].reshape(-1, 1, 1, 1)
        return {"image": x, "total": x.mean((1, 2, 3))}

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
WORDS = ("--input", "ids=2x6:int64", "--input", "mask=2x6")
PAIR = ("--input", "image.rgb=1x3x8x8", "--input", "scale=1")
OPEN = ("--input", "scale=1", "--input", "image=1x3x8x8")


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "inputs"), [("words", WORDS), ("pair", PAIR)])
def test_every_command_takes_inputs_by_name(nets, run, tmp_path, name, inputs):
    spec, out = f"{nets}:{name}", tmp_path / "n.onnx"
    for command, *more in (
        ("trace",),
        ("trace", "--code"),
        ("profile", "--runs", 1, "--warm-up", 0),
        ("fuse", "-o", tmp_path / "n.pt2"),
        ("export", "--qdq", "--mode", "weight-only", "--int8-stem", "-o", out),
    ):
        code, said, err = run(command, spec, *inputs, *more)
        assert code == 0, (command, err)
        assert ("a dict of image_rgb, scale" in said) is (name == "pair")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inputs", "named"),
    [
        ("words", ("--input", "2x6:int64", "--input", "mask=2x6"), ["ids", "mask"]),
        ("words", ("--input", "kinds=2x6:int64", "--input", "ids=2x6:int64"), ["ids", "kinds"]),
        ("pair", PAIR, ["image_rgb", "scale"]),
        ("open_ended", OPEN, ["scale", "image"]),
    ],
)
def test_an_exported_model_has_its_inputs_under_their_names(
    nets, run, tmp_path, name, inputs, named
):
    out = tmp_path / "n.onnx"
    assert run("export", f"{nets}:{name}", *inputs, "-o", out)[0] == 0
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == named


@pytest.mark.slow
def test_outputs_keep_the_names_they_have_in_a_dict(nets, run, tmp_path):
    out = tmp_path / "w.onnx"
    assert run("export", f"{nets}:words", *WORDS, "-o", out)[0] == 0
    found = [value.name for value in onnx.load(out).graph.output]
    assert found == ["scores", "pooled_mean", "pooled_all_0"]
    # a name that is an input's too
    assert run("export", f"{nets}:open_ended", *OPEN, "-o", out)[0] == 0
    assert [value.name for value in onnx.load(out).graph.output] == ["image_out", "total"]
    onnx.checker.check_model(onnx.load(out), full_check=True)


def test_what_an_exported_model_is_fed_by_name(nets, run, tmp_path):
    out, rng = tmp_path / "w.onnx", np.random.default_rng(0)
    run("export", f"{nets}:pair", *PAIR, "-o", out)
    image = rng.normal(size=(2, 3, 8, 8)).astype(np.float32)
    scale = np.array([2, -1], np.float32)
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    got = session.run(["total"], {"image_rgb": image, "scale": scale})[0]
    batch = {"image.rgb": torch.from_numpy(image), "scale": torch.from_numpy(scale)}
    with torch.no_grad():
        wanted = load_module(f"{nets}:pair")(batch)["total"]
    assert np.allclose(got, wanted, atol=1e-6)


@pytest.mark.slow
def test_a_sample_gives_keywords_and_the_keys_of_a_dict(nets, run, tmp_path):
    path = tmp_path / "s.npz"
    ids, mask = np.array([[4, 0, 1], [1, 3, 2]]), np.ones((2, 3), np.float32)
    np.savez(path, mask=mask, ids=ids)
    assert "(2, 3, 8)" in run("trace", f"{nets}:words", "--sample", path)[1]
    model = load_module(f"{nets}:words")
    assert torch.equal(
        model(*read_sample(path, model))["scores"],
        load_module(f"{nets}:words")(torch.from_numpy(ids), mask=torch.from_numpy(mask))["scores"],
    )
    np.savez(path, **{"image.rgb": np.zeros((1, 3, 8, 8), "f4"), "scale": np.ones(1, "f4")})
    assert (
        "a dict of" in run("export", f"{nets}:pair", "--sample", path, "-o", tmp_path / "o.onnx")[1]
    )
    np.savez(path, mask=mask)
    with pytest.raises(FeedError, match=r"s.npz cannot .* forward\(ids, kinds=None, mask=None"):
        read_sample(path, load_module(f"{nets}:words"))


@pytest.mark.slow
def test_named_inputs_are_calibrated_and_built(nets, run, tmp_path):
    images, rng = tmp_path / "many.npz", np.random.default_rng(0)
    ids, mask = rng.integers(0, 5, (6, 6)), np.ones((6, 6), np.float32)
    np.savez(images, ids=ids, mask=mask)
    code, said, err = run(
        "export", f"{nets}:words", *WORDS, "--qdq", "--images", images, "-o", tmp_path / "q.onnx"
    )
    assert code == 0 and "1 of 2 layers" in said, (said, err)
    code, said, err = run(
        "build", f"{nets}:words", *WORDS, "--images", images, "--out", tmp_path / "out",
        "--effort", "0", "--duration", "0",
    )  # fmt: skip
    assert code == 0, err


@pytest.mark.parametrize(
    ("name", "names", "said"),
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
def test_names_that_fit_nothing_are_refused(nets, run, name, names, said):
    with pytest.raises(ConfigError, match=said):
        take_named(load_module(f"{nets}:{name}"), names)
    words = [w for n in names for w in ("--input", f"{n}=1x2" if n else "1x2")]
    code, _, err = run("profile", f"{nets}:{name}", *words)
    assert code == 1 and ("forward" in err or "twice" in err)


def test_only_a_model_that_leaves_something_out_is_changed(nets):
    model = load_module(f"{nets}:words")
    kind = type(model)
    assert take_named(model, [None, None]) == [0, 1]
    assert take_named(model, ["mask", "bias", "ids", "kinds"]) == [2, 3, 0, 1]
    assert type(model) is kind and as_dict(model) is None
    take_named(model, ["ids", "bias"])
    assert type(model) is not kind and type(model).__name__ == "Words"
    assert "words.weight" in dict(model.named_parameters())
