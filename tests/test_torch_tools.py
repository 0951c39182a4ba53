"""fuse -o, profile as JSON and page, devices: through the commands."""

import io
import json

import onnx
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn  # noqa: E402

from deploy.cli import cli  # noqa: E402
from deploy.errors import ConfigError, SdkMissingError  # noqa: E402
from deploy.fx.convert import calibrate, observers_of  # noqa: E402
from deploy.fx.device import Reached, device_of, find_device, moved  # noqa: E402
from deploy.fx.prepare import prepare  # noqa: E402
from deploy.fx.profile import profile  # noqa: E402
from deploy.fx.qat import Task, train  # noqa: E402
from deploy.fx.trace import trace  # noqa: E402

torch.set_num_threads(1)
NET = """
import torch
from torch import nn
from deploy.fx.qat import Task

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))) + x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts, self.head = nn.Sequential(Part(), Part()), nn.Linear(192, 2)
    def forward(self, x):
        return self.head(self.parts(x).flatten(1))

def net():
    torch.manual_seed(0)
    return Net().eval()

def batches(epoch):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(2):
        yield torch.randn(4, 3, 8, 8, generator=generator), torch.zeros(4, dtype=torch.int64)

def setup():
    return Task(model=net(), inputs=[torch.zeros(2, 3, 8, 8)], batches=batches,
                loss=nn.functional.cross_entropy, epochs=1)
"""
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def invoke(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def run(*words):
    done = invoke(*words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


@pytest.mark.slow
def test_a_fused_model_is_written_and_agrees(source, tmp_path):
    words = ("fuse", f"{source}:net", "--input", "2x3x8x8", "--leaf", "parts.1")
    shown = run(*words, "-o", tmp_path / "f.onnx")
    assert "Conv+BN+ReLU: 1 fused" in shown and "in batches of 2 and 3" in shown
    operators = [node.op_type for node in onnx.load(tmp_path / "f.onnx").graph.node]
    assert operators.count("Conv") == 2
    shown = run(*words[:-2], "-o", tmp_path / "f.pt2")
    assert "Conv+BN+ReLU: 2 fused" in shown and "the program against the model" in shown
    data = (tmp_path / "f.pt2").read_bytes()
    program = torch.export.load(io.BytesIO(data)).module()
    scope = {}
    exec(compile(NET, "net", "exec"), scope)
    for batch in (X, X[:1]):
        assert torch.allclose(program(batch), scope["net"]()(batch), atol=1e-5)
    assert str(tmp_path).encode() not in data
    for wrong, said in (
        (("-o", tmp_path / "f.pt"), "written as .onnx or .pt2"),
        (("--device", "meta", "--bench"), "needs values, and the meta device holds none"),
    ):
        assert said in str(invoke(*words, *wrong).exception)
    assert "--out runs the model" in str(invoke("fuse", f"{source}:net", "-o", "f.onnx").exception)
    assert "--device goes with" in str(
        invoke("fuse", f"{source}:net", "--device", "meta").exception
    )


def test_a_profile_as_json_and_as_a_page(source, tmp_path):
    page = tmp_path / "p.html"
    words = ("profile", f"{source}:net", "--input", "2x3x8x8", "--runs", 2, "--warm-up", 0)
    shown = run(*words, "--json", "-", "--html", page)
    found = json.loads(shown)
    assert found["schema"] == "calib8-profile/1" and found["macs"] * 2 == found["flops"] > 0
    by = {node["name"]: node for node in found["nodes"]}
    assert by["parts_0_conv"]["module"] == "parts.0.conv" and by["parts_0_conv"]["parameters"] == 84
    assert by["relu"]["module"] == "parts.0" and by["flatten"]["module"] == ""
    assert sum(node["flops"] for node in found["nodes"]) == found["flops"]
    text = page.read_text()
    assert "Time by module" in text and ">conv</text>" in text and "Content-Security" in text
    assert "style=" not in text and "onclick" not in text
    assert "2 runs on cpu, of inputs 2x3x8x8:float32" in text
    assert "total" in run(*words) and run(*words, "--quiet", "--html", page) == ""
    assert "--quiet goes with --json or --html" in str(invoke(*words, "-q").exception)


def test_profile_and_trace_on_the_meta_device_compute_nothing(source):
    inputs = ("--input", "2x3x8x8", "--device", "meta")
    shown = run("profile", f"{source}:net", *inputs, "--runs", 1, "--warm-up", 0)
    assert "nothing was computed on the meta device" in shown and "parts_0_conv" in shown
    assert "(2, 2)" in run("trace", f"{source}:net", *inputs)
    assert "--device goes with" in str(
        invoke("trace", f"{source}:net", "--device", "meta").exception
    )


def test_a_device_is_known_and_here(source, tmp_path):
    assert find_device("cpu").type == "cpu" and find_device("meta").type == "meta"
    with pytest.raises(ConfigError, match="a device is cpu, cuda, cuda:1 or meta, got 'gpu'"):
        find_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(SdkMissingError, match="torch has no cuda here"):
            find_device("cuda")
    for command, given in (
        ("export", (f"{source}:net", "--input", "2x3x8x8")),
        ("qat", (f"{source}:setup",)),
    ):
        shown = invoke(command, *given, "--device", "meta", "-o", tmp_path / "o.onnx")
        assert "the meta device holds none" in str(shown.exception)


@pytest.mark.slow
def test_observers_are_where_the_model_is():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval().to("meta")
    prepared = prepare(model, [X.to("meta")], target="tensorrt")
    assert {quant.lo.device.type for quant in observers_of(prepared).values()} == {"meta"}
    assert prepared(X.to("meta")).device.type == "meta"
    assert device_of(nn.ReLU()).type == "cpu" and device_of(model).type == "meta"
    own = prepare(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), [X], target="tensorrt")
    assert calibrate(own, [X, (X,)]) == 2


def test_batches_are_brought_to_the_model_and_results_back():
    nested = moved({"a": [X, (X, 3)], "b": "text"}, torch.device("meta"))
    assert nested["a"][0].device.type == nested["a"][1][0].device.type == "meta"
    assert nested["a"][1][1] == 3 and nested["b"] == "text"

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2, device="meta")

        def forward(self, x):
            assert x.device.type == "meta"
            return {"y": torch.zeros(2)}

    assert Reached(Asks())(torch.zeros(1, 2))["y"].device.type == "cpu"


@pytest.mark.slow
def test_training_in_bfloat16_and_on_a_named_device(source, tmp_path):
    scope = {}
    exec(compile(NET, "net", "exec"), scope)
    kept = scope["setup"]()
    seen = []

    def loss(output, label):
        seen.append(output.dtype)
        return nn.functional.cross_entropy(output.float(), label)

    kept.loss = loss
    kept.amp = True
    kept.evaluate = lambda model: float(model(X).sum())
    result = train(kept, device=torch.device("cpu"))
    assert torch.bfloat16 in seen and all(p.dtype == torch.float32 for p in
                                          result.prepared.parameters())  # fmt: skip
    assert isinstance(kept, Task) and result.end is not None
    out = tmp_path / "q.onnx"
    shown = run("qat", f"{source}:setup", "--amp", "--device", "cpu", "--int8-stem", "-o", out)
    assert "int8: 3 of 3 layers with weights" in shown and "same arg-max" in shown
    assert "against its own weights in float" in shown


def test_profile_of_a_graph_without_modules():
    class Plain(nn.Module):
        def forward(self, x):
            return x + 1

    found = profile(trace(Plain()), [X], warm_up=0, runs=1)
    assert {node.module for node in found.nodes} == {""} and found.parameters == 0
