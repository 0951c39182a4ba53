"""The graph of a PyTorch model: captured, traced, rewritten, fused and profiled."""
# ruff: noqa: E402 (torch may be missing)

import builtins
import copy
import json
import json.decoder
import math
import operator
import sys
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import fx, nn
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node

from deploy.errors import ConfigError, ModelError
from deploy.fx.capture import capture, graph_of
from deploy.fx.checked_export import export_float, export_quantized
from deploy.fx.comparison import largest_difference
from deploy.fx.export import compare_with_torch, to_onnx
from deploy.fx.fuse import fold_batch_norms, fuse
from deploy.fx.graph_text import format_graph, graph_source
from deploy.fx.norms import is_norm
from deploy.fx.open_model import export
from deploy.fx.operations import propagate_shapes, replace_op
from deploy.fx.prepare import prepare, prepare_part
from deploy.fx.profile import count_flops, profile
from deploy.fx.source import load_module, user_code_line
from deploy.fx.trace import (
    failing_line,
    find_function,
    replace_submodule,
    submodule,
    trace,
)
from tests import torch_shapes
from tests.torch_placed import real_model
from tests.torch_shapes import BatchNormAct2d, module, with_statistics

torch.set_num_threads(1)

HERE = Path(__file__).parent

NAMES = ["detector", "norms", "attention", "convnext", "ssd"]

RESNET = f"{HERE / 'resnet18.py'}:small"


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def example():
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_captured_model_takes_any_batch(name, example):
    model = getattr(torch_shapes, name)()
    captured = capture(model, [example])
    assert set(dict(captured.named_parameters())) == set(dict(model.named_parameters()))
    for batch in (example, torch.randn(3, 3, 32, 32)):
        # attention has a quick form
        assert largest_difference(captured(batch), model(batch)) < 1e-6
    assert type(captured(example)) is type(model(example))
    assert count_flops(captured, [example])


def test_captured_layers_keep_their_names(example):
    captured = capture(torch_shapes.detector(), [example])
    rows = format_graph(captured)
    assert " blocks.0.cv1.conv " in rows
    assert " torch.chunk " in rows
    assert " stem.act " in rows
    assert "torch.ops.aten.conv" not in rows
    layers = [n.target for n in captured.graph.nodes if n.op == "call_module"]
    assert len(layers) == len(set(layers)) == 3 * 15 + 2 + 2
    traced = graph_of(nn.Conv2d(3, 4, 1), None)
    captured_again = graph_of(traced, [example])
    assert captured_again is not traced
    assert format_graph(captured_again) == format_graph(traced)

    def move_mask(self, x):
        """Move a tensor that forward creates to the input's device, as EdgeNeXt does."""
        mask = torch.zeros(x.shape[0], 4, 4).to(x.device, torch.bool)
        return self.conv(x) * (~mask).cumsum(1, dtype=torch.float32).unsqueeze(1)

    x, model = torch.randn(1, 3, 4, 4), module(move_mask, conv=nn.Conv2d(3, 4, 1))
    assert sum(count_flops(capture(model, [x]), [x]).values()) == 2 * 3 * 4 * 16
    captured = capture(torch_shapes.detector().train(), [torch.randn(1, 3, 32, 32)])
    assert len(captured(torch.randn(2, 3, 32, 32))) == 2  # boxes and scores, and the raw maps


def test_captured_model_keeps_train_mode():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    captured = capture(model.train(), [torch.randn(2, 8)])
    assert captured.training
    assert all(m.training for m in captured.modules() if is_norm(m))
    captured(torch.randn(4, 8))
    assert captured.get_submodule("2").num_batches_tracked == 1
    assert model[2].num_batches_tracked == 0
    x = torch.randn(4, 8)
    assert not torch.equal(captured(x), captured(x))
    captured.eval()
    assert torch.equal(captured(x), captured(x))


def test_containers_of_inputs_are_captured():
    def add_pair(self, pair, named, *further_inputs):
        total = sum(named.values()) + sum(further_inputs)
        rows = [row * 2 for row in pair[0].unbind(1)]
        return {"sum": pair[0] + pair[1] * total, "rows": rows}

    def inputs(n):
        return [(torch.rand(n, 2), torch.rand(n, 2)), {"k": torch.rand(n, 2)}, torch.ones(n, 2)]

    model = module(add_pair)
    captured = capture(model, inputs(1))
    input_names = [n.name for n in captured.graph.nodes if n.op == "placeholder"]
    assert input_names == ["pair", "named", "further_inputs_0"]
    wide = inputs(5)
    outputs, expected = captured(*wide), model(*wide)
    assert torch.equal(outputs["sum"], expected["sum"])
    assert len(outputs["rows"]) == 2
    parts = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}
    model = module(lambda self, batch: self.a(batch["x"]) + self.b(batch["y"]), **parts)
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 3)}
    assert torch.equal(prepare(model, [batch])(batch), model(batch))
    assert profile(model, [batch], warm_up=0, runs=1).macs == 2 * 4 * 3 * 2
    model, x = module(lambda self, x, y: self.a(x) + self.b(y), **parts), torch.randn(4, 3)
    assert torch.allclose(capture(model, [x, x])(x, 5 * x), model(x, 5 * x))
    assert compare_with_torch(to_onnx(model, [x, x]), model, [(x, 5 * x)]).max_difference < 1e-5


@dataclass
class Returned:
    first: torch.Tensor
    rows: list


@dataclass
class AttributeDict(OrderedDict):  # such as ModelOutput of transformers
    logits: torch.Tensor = None
    loss: torch.Tensor = None

    def __post_init__(self):
        self.update({field.name: getattr(self, field.name) for field in fields(self)})


@pytest.mark.parametrize("is_registered", [False, True])
def test_returned_dict_keeps_its_attributes(is_registered):
    returned_class = type("Returned", (AttributeDict,), {})
    if is_registered:
        register_pytree_node(
            returned_class, lambda d: ([*d.values()], [*d]), lambda v, keys: returned_class(*v)
        )
    parts = {"a": nn.Linear(3, 2), "n": nn.BatchNorm1d(2)}
    model = module(lambda self, x: returned_class(self.n(self.a(x))), **parts).eval()
    x = torch.randn(4, 3)
    for captured in (trace(model), fuse(model)[0], fuse(model, [x])[0], prepare(model, [x])):
        returned = captured(x)
        assert type(returned) is returned_class
        assert returned.loss is None
        assert torch.allclose(returned.logits, model(x).logits, atol=1e-6)
        assert returned["logits"] is returned.logits
    assert [output.name for output in export(model, [x]).graph.output] == ["logits"]


def test_returned_dataclass_is_captured():
    # symbolic tracing, which is tried next, cannot follow unbind
    model = module(lambda self, x: {"out": Returned(self.a(x), [*x.unbind(1)])}, a=nn.Linear(3, 2))
    x = torch.randn(4, 3)
    for captured in (capture(model, [x]), prepare(model, [x])):
        returned, expected = captured(x)["out"], model(x)["out"]
        assert torch.equal(returned.first, expected.first)
        assert len(returned.rows) == 3


def with_loss(self, x, labels=None):
    logits = self.a(x)
    return AttributeDict(logits, None if labels is None else F.cross_entropy(logits, labels))


def test_optional_argument_keeps_its_default():
    x = torch.randn(4, 3)
    assert prepare(module(with_loss, a=nn.Linear(3, 2)), [x])(x).loss is None


@pytest.mark.parametrize(
    "forward",
    [with_loss, lambda self, x, labels=None: x if labels is None else (x, x + 1)],
    ids=["loss", "more outputs"],
)
def test_traced_default_is_checked(forward, monkeypatch):
    # only symbolic tracing follows this branch, as one node, and it takes labels for a tensor
    monkeypatch.setattr(DataDependent, "__module__", "torch.nn")
    model = module(
        lambda self, x, labels=None: forward(self, self.b(x), labels),
        a=nn.Linear(3, 2),
        b=DataDependent(),
    )
    with pytest.raises(ModelError, match=r"torch\.where"):
        graph_of(model, [torch.randn(4, 3)])


def test_changes_in_place_are_captured():
    x = torch.rand(1, 6)
    assert torch.equal(capture(module(lambda self, x: x.view(1, -1) * 2), [x])(x), x * 2)

    def marks(self, x):
        with torch.no_grad():
            mask = torch.zeros(4)
            mask[1:3] = 2.0
        x = x + mask
        x[:, 0] += 1
        return x

    captured = capture(module(marks), [torch.rand(1, 4)])
    assert captured(torch.zeros(2, 4)).tolist() == [[1, 2, 2, 0]] * 2
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    x = torch.randn(1, 3, 5, 5)
    folded, report = fold_batch_norms(model, [x])
    assert report.norms_left == 1
    assert largest_difference(folded(x), model(x)) < 1e-6
    assert folded.get_submodule("0.conv").weight.shape == (4, 3, 1, 1)


class DataDependent(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


def holder(inner):
    return module(lambda self, x: self.nt(self.first(x)), first=nn.Conv2d(3, 4, 1), nt=inner)


@pytest.mark.parametrize("is_root", [True, False])
def test_failed_capture_names_the_line(is_root):
    model = DataDependent() if is_root else holder(DataDependent())
    with pytest.raises(ModelError) as caught:
        graph_of(model, [torch.rand(1, 3, 4, 4)])
    message = str(caught.value)
    assert "test_torch_graph.py" in message
    assert "if x.sum() > 0:" in message
    assert "torch.where" in message
    assert ("--leaf nt" in message) is not is_root
    assert "--leaf Net" not in message


def test_failing_line_may_be_a_librarys():
    path = f"{Path(torch.__file__).parent}vision/ops/boxes.py"  # its name begins as torch's folder
    code = compile("def keep(n):\n    return 4 // n\n", path, "exec")
    namespace = {}
    exec(code, namespace)
    with pytest.raises(ZeroDivisionError) as caught:
        namespace["keep"](0)
    error = caught.value.with_traceback(caught.tb.tb_next)  # without this test's own line
    assert failing_line(error).startswith(f"{path}:2")
    with pytest.raises(ValueError) as caught:
        json.loads("{")
    assert "test_torch_graph.py" in user_code_line(caught.value)


@pytest.mark.slow
def test_commands_name_a_librarys_line(refusal, tmp_path, monkeypatch):
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "boxes_of_a_zoo.py").write_text(
        "import torch\n"
        "class Keep(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x[: x.argmax()] if x.sum() > 0 else x\n"
    )
    (tmp_path / "net.py").write_text("from boxes_of_a_zoo import Keep as make\n")
    monkeypatch.syspath_prepend(str(package))
    for command, *options in (("export", "-o", tmp_path / "k.onnx"), ("inspect",)):
        err = refusal(command, f"{tmp_path / 'net.py'}:make", "--input", "1x3", *options)
        assert "boxes_of_a_zoo.py:4: return x" in err


def test_every_kind_of_norm_folds(example):
    model = torch_shapes.norms()
    folded, report = fold_batch_norms(model, [example])
    assert report.counts() == {
        "Conv+BN": 9,
        "Branches": 3,
        "ConvTranspose+BN": 1,
        "Linear+BN": 1,
    }
    assert report.norms_left == 0
    assert not any(is_norm(m) for m in folded.modules())
    x = torch.randn(4, 3, 32, 32)
    expected = model(x)
    assert largest_difference(folded(x), expected) < 1e-5 * float(expected.abs().max())
    convolutions = [m for m in folded.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 8  # each RepVGG block is one


@pytest.mark.parametrize("follow", [graph_of, to_onnx])
def test_missing_batch_is_said_with_the_shape(follow):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    with pytest.raises(ModelError, match=r"batch.* 1x3x8x8$"):
        follow(net, [torch.zeros(3, 8, 8)])
    with pytest.raises(ModelError, match=r"must run for inputs \[\(1, 2, 8, 8\)\]"):
        follow(net, [torch.zeros(1, 2, 8, 8)])


def test_norm_inside_a_leaf_stays():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4)).eval()
    _, report = fuse(model)
    assert report.counts() == {"Conv+BN": 1}
    assert report.norms_left == 0
    folded, report = fold_batch_norms(graph_of(model, None, leaves=["BatchNormAct2d"]))
    x = torch.randn(2, 3, 4, 4)
    assert report.fused == []
    assert torch.equal(folded(x), model(x))


@pytest.mark.parametrize(
    "step", ["fuse", "fold", "prepare", "part", "float", "quantized", "profile"]
)
def test_train_mode_is_computed_in_eval(step):
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 4, 1)]
    net = nn.Sequential(nn.Sequential(*layers)).eval()
    x = torch.randn(2, 3, 4, 4)
    reference, statistics = net(x), net[0][1].running_mean.clone()
    net.train()
    if step == "float":
        assert export_float(net, [x])[1].samples
    elif step == "quantized":
        (mode,) = export_quantized(net, [x], [x, x]).modes
        assert mode.sqnr_db > 20
    elif step == "profile":
        assert profile(net, [x], warm_up=0, runs=1).nodes
    else:
        rewrite = {
            "fuse": lambda: fuse(net, [x])[0],
            "fold": lambda: fold_batch_norms(net)[0],
            "prepare": lambda: prepare(net, [x]),
            "part": lambda: prepare_part(net, "0", [x]).eval(),
        }
        assert torch.allclose(rewrite[step]()(x), reference, atol=1e-5)
    assert all(module.training for module in net.modules())
    assert torch.equal(net[0][1].running_mean, statistics)


def test_norm_after_merged_branches_folds():
    convs = {"wide": nn.Conv2d(3, 4, 3, padding=1), "narrow": nn.Conv2d(3, 4, 1)}
    forward = lambda self, x: self.norm(self.wide(x) + self.narrow(x))  # noqa: E731
    model = torch_shapes.with_statistics(module(forward, **convs, norm=nn.BatchNorm2d(4)))
    x = torch.randn(2, 3, 8, 8)
    folded, report = fold_batch_norms(model, [x])
    assert report.counts() == {"Branches": 1, "Conv+BN": 1}
    assert largest_difference(folded(x), model(x)) < 1e-5


@pytest.mark.parametrize(
    "second",
    [
        nn.Conv2d(4, 4, 3, padding=0),  # another size
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Conv2d(4, 4, 5, padding=2, dilation=1, stride=2),
    ],
)
def test_unfitting_branches_are_not_merged(second):
    def two(self, x):
        wide, narrow = self.first(x), self.second(x)
        return wide[..., : narrow.shape[-2], : narrow.shape[-1]] + narrow

    x = torch.randn(1, 4, 8, 8)
    model = module(two, first=nn.Conv2d(4, 4, 3, padding=1), second=second)
    folded, report = fold_batch_norms(model, [x])
    assert "Branches" not in report.counts()
    assert largest_difference(folded(x), model(x)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fuse_and_profile_take_every_model(run, name):
    arguments = f"{HERE / 'torch_shapes.py'}:{name}", "--input", "1x3x32x32"
    output = run.ok("fuse", *arguments, "--bench")
    assert "BatchNorm left: 0" in output
    assert "largest difference" in output
    *_, total, counted = run.ok("profile", *arguments, "--runs", 1, "--warm-up", 0).splitlines()
    assert total.startswith("total")
    assert "activations and other" in counted


@pytest.mark.slow
def test_remaining_norms_are_named(run, tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 1))\n"
    )
    spec = f"{tmp_path / 'net.py'}:make"
    assert "BatchNorm left: 1" in run("fuse", spec, "--input", "1x3x8x8")[1]
    assert "BatchNorm left: 1" in run("fuse", spec)[1]
    out = tmp_path / "net.onnx"
    options = ("--input", "1x3x8x8", "--qdq", "--mode", "weight-only", "-o", str(out))
    output = run("export", spec, *options)[1]
    assert "BatchNorm left in float: 1: 1 (" in output


SIX_OPCODES = """\
opcode         name     target            args          kwargs
-------------  -------  ----------------  ------------  ------------
placeholder    x        x                 ()            {}
get_attr       scale    scale             ()            {}
call_function  add      operator.add      (%x, %scale)  {}
call_module    linear   linear            (%add,)       {}
call_method    clamp    clamp             (%linear,)    {'min': 0.0}
call_function  topk     torch.topk        (%clamp, 2)   {}
call_function  getitem  operator.getitem  (%topk, 0)    {}
output         output   output            (%getitem,)   {}
"""


def test_traced_model_equals_model_and_prints(run, command):
    model = load_module(RESNET)
    traced = trace(model)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(traced(x), model(x))
    assert 'getattr(self.layer4, "1").conv2(' in graph_source(traced)
    assert graph_source(traced).startswith("def forward(self, x):\n")
    shown = run.ok("trace", RESNET, "--input", "1x3x64x64")
    assert "call_module    layer1_0_conv1         layer1.0.conv1" in shown
    assert "(1, 64, 2, 2)" in shown
    assert 'getattr(self.layer1, "0")' in command("trace", RESNET, "--code", "--leaf", "Block")


def test_table_shows_all_six_opcodes():
    six = module(
        lambda self, x: torch.topk(self.linear(x + self.scale).clamp(min=0.0), 2)[0],
        scale=nn.Parameter(torch.ones(3)),
        linear=nn.Linear(3, 3),
    )
    assert format_graph(trace(six)) == SIX_OPCODES


def test_traced_constants_and_shapes():
    traced = trace(module(lambda self, x: x * torch.ones(3) + torch.full((3,), 2.0)))
    constant_names = [node.target for node in traced.graph.nodes if node.op == "get_attr"]
    assert constant_names == ["_tensor_constant0", "_tensor_constant1"]
    assert traced(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
    shapes = propagate_shapes(trace(holder(nn.Flatten())), torch.randn(2, 3, 5, 5))
    assert shapes == {"x": (2, 3, 5, 5), "first": (2, 4, 5, 5), "nt": (2, 100), "output": (2, 100)}


def test_every_form_of_add_is_replaced():
    traced = trace(module(lambda self, x, y: (x + y, torch.add(x, y), x.add(y))))
    assert replace_op(traced, "add", torch.mul) == 3
    assert [t.item() for t in traced(torch.tensor(2), torch.tensor(5))] == [10, 10, 10]
    assert graph_source(traced).count("torch.mul") == 3


@pytest.mark.parametrize(
    ("forward", "op", "reason"),
    [
        (lambda self, x: torch.add(x, x, alpha=2), "add", "alpha"),
        (lambda self, x: (y := x * 2).add_(1) + y, "add", "used elsewhere"),
        (lambda self, x: torch.relu_(input=(y := x * 2)) + y, "relu", "used elsewhere"),
        (lambda self, x: torch.add(x, x), "mul", "has no mul"),
        (lambda self, x: torch.add(x, x), "conv", "an operation is one of"),
    ],
)
def test_irreplaceable_operation_is_named(forward, op, reason):
    with pytest.raises((ModelError, ConfigError), match=reason):
        replace_op(trace(module(forward)), op, torch.mul)


def test_wrapping_is_undone(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(
        "import math\nfrom math import sqrt\ndef scaled(x):\n    return x / sqrt(len(x))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import elsewhere

    model, originals = module(lambda self, x: elsewhere.scaled(x)), (len, elsewhere.sqrt, math.sqrt)
    with pytest.raises(ModelError, match="--wrap len"):
        trace(model)
    traced = trace(model, wrap=[len, math.sqrt])
    called = [n.target for n in traced.graph.nodes if n.op == "call_function"]
    assert called == [len, math.sqrt, operator.truediv]
    x = torch.randn(4)
    assert torch.equal(traced(x), model(x))
    assert (builtins.len, elsewhere.sqrt, math.sqrt) == originals
    del sys.modules["elsewhere"]


def test_wrapped_functions_must_exist(tmp_path):
    original = builtins.len

    def fail_inside(self, x):
        assert builtins.len is not original
        assert len([1, 2]) == 2  # untraced arguments still reach the real function
        raise RuntimeError("inside")

    with pytest.raises(ModelError, match="inside"):
        trace(module(fail_inside), wrap=[len, json.decoder.scanstring])
    assert builtins.len is original
    assert find_function("len") is len
    assert find_function("math.sqrt") is math.sqrt
    for name in ("no_such_function", "math.nothing", "nowhere.f", "math.pi", ""):
        with pytest.raises(ConfigError, match="--wrap"):
            find_function(name)
    source = tmp_path / "own.py"
    source.write_text(
        "import torch\nfrom torch import nn\ntorch.fx.wrap('len')\n"
        "class Own(nn.Module):\n    def forward(self, x):\n        return x * len(x)\n"
        "def make():\n    return Own()\n"
    )
    assert "len(x)" in graph_source(trace(load_module(f"{source}:make")))


def test_failed_trace_names_line_and_remedies():
    with pytest.raises(ModelError) as caught:
        trace(holder(DataDependent()))
    message = str(caught.value)
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "if x.sum() > 0" in text)
    assert "DataDependent (nt)" in message
    assert f"{Path(__file__).name}:{line}: if x.sum() > 0:" in message
    assert "--leaf nt" in message
    assert "--only" in message
    assert "torch.where" in message
    # (*sizes, -1) would iterate a proxy
    starred = module(lambda self, x: x.view(*(x.size()[:1] + (-1,))))  # noqa: RUF005
    with pytest.raises(ModelError, match=r"view\(shape\) not view\(\*shape\)"):
        trace(starred)
    with_size_tuple = module(lambda self, x: x.view(x.size()[:1] + (-1,)))  # noqa: RUF005
    x = torch.randn(2, 3, 4)
    assert torch.equal(trace(with_size_tuple)(x), x.view(2, -1))


@pytest.mark.parametrize("leaf", ["nt", "DataDependent", DataDependent])
def test_leaf_stays_whole(leaf):
    model = holder(DataDependent())
    traced = trace(model, leaves=[leaf])
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["first", "nt"]
    for x in torch.randn(4, 1, 3, 2, 2):
        assert torch.equal(traced(x), model(x))


def test_submodule_is_traced_alone():
    def wrapper(self, x):
        return self.backbone(x) if x.sum() > 0 else self.backbone(-x)

    model = module(wrapper, backbone=holder(nn.ReLU()))
    part = copy.deepcopy(model)
    replace_submodule(part, "backbone", trace(submodule(part, "backbone")))
    assert isinstance(part.backbone, fx.GraphModule)
    assert not isinstance(model.backbone, fx.GraphModule)
    for x in torch.randn(4, 1, 3, 2, 2):
        assert torch.equal(part(x), model(x))
    with pytest.raises(ConfigError, match="its children: backbone"):
        submodule(model, "head")
    with pytest.raises(ConfigError, match="nowhere"):
        trace(holder(DataDependent()), leaves=["nowhere"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def make():\n    return 3\n", "must return a torch.nn.Module, got int"),
        ("def make():\n    raise ValueError('bad luck')\n", r"bad luck at .*net\.py:2"),
        ("def make(:\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", "SystemExit"),
        ("made = 1\n", "no function 'make'"),
    ],
)
def test_broken_model_file_is_named(tmp_path, text, reason):
    source = tmp_path / "net.py"
    source.write_text(text)
    with pytest.raises((ModelError, ConfigError), match=reason):
        load_module(f"{source}:make")


@pytest.mark.parametrize("spec", ["net.py", "net:make", "missing.py:make", "net.py:", "a.py:b c"])
def test_bad_model_spec_is_refused(spec):
    with pytest.raises(ConfigError, match=r"file\.py:factory"):
        load_module(spec)


def test_weights_are_loaded_without_running_code(tmp_path):
    import os
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was run"),)

    source = tmp_path / "net.py"
    source.write_text("from torch import nn\ndef make():\n    return nn.Linear(2, 1)\n")
    spec = f"{source}:make"
    good = tmp_path / "good.pt"
    torch.save({"state_dict": {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}}, good)
    assert load_module(spec, good)(torch.ones(1, 2)).item() == 2.0
    torch.save({"weight": torch.ones(3, 3)}, tmp_path / "other.pt")
    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"weight": Evil()}))
    torch.save({"weight": Evil()}, tmp_path / "evil_zip.pt")
    (tmp_path / "short.pt").write_bytes(good.read_bytes()[:100])
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("other", "evil", "evil_zip", "short", "empty", "absent"):
        with pytest.raises(ModelError, match=f"{name}.pt must"):
            load_module(spec, tmp_path / f"{name}.pt")
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize(
    ("pattern", "shape", "layers"),
    [
        ("Conv+BN", (2, 3, 8, 8), [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)]),
        (
            "Conv+BN+ReLU",
            (2, 3, 8, 8),
            [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()],
        ),
        ("Conv+ReLU", (2, 3, 8), [nn.Conv1d(3, 4, 3), nn.ReLU()]),
        ("Linear+ReLU", (2, 3), [nn.Linear(3, 4), nn.ReLU()]),
        ("BN+ReLU", (2, 3, 4, 4, 4), [nn.BatchNorm3d(3), nn.ReLU()]),
        ("Linear+BN", (2, 3), [nn.Linear(3, 4), nn.BatchNorm1d(4)]),
        (
            "ConvTranspose+BN",
            (2, 4, 5, 5),
            [nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.BatchNorm2d(6)],
        ),
    ],
)
def test_pattern_fuses_to_one_module(pattern, shape, layers):
    model = with_statistics(nn.Sequential(*layers))
    fused, report = fuse(model)
    assert report.counts() == {pattern: 1}
    assert sum(node.op == "call_module" for node in fused.graph.nodes) == 1
    x = torch.randn(shape)
    assert torch.allclose(fused(x), model(x), atol=1e-5)


def test_all_norms_of_resnet18_fold():
    model = load_module(f"{HERE / 'resnet18.py'}:make")
    folded, report = fold_batch_norms(model)
    assert report.counts() == {"Conv+BN": 20}
    assert report.skipped == []
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 20
    x = torch.randn(1, 3, 96, 96)
    expected = model(x).detach()
    assert (folded(x) - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


def test_unfolded_norms_have_a_reason(wording):
    def odd(self, x):
        x = self.two_users(x)
        y = self.bn1(x) + x
        y = self.bn3(self.twice(self.bn2(self.twice(y))))
        return self.no_statistics(self.plain(y))

    norms = {name: nn.BatchNorm2d(3) for name in ("bn1", "bn2", "bn3")}
    model = module(
        odd,
        two_users=nn.Conv2d(3, 3, 1),
        twice=nn.Conv2d(3, 3, 1),
        **norms,
        plain=nn.Conv2d(3, 3, 3, padding=1),
        no_statistics=nn.BatchNorm2d(3, track_running_stats=False),
    )
    folded, report = fold_batch_norms(model)
    assert report.fused == []
    reason_by_norm = dict(report.skipped)
    assert list(reason_by_norm) == ["bn1", "bn2", "bn3", "no_statistics"]
    for reason in reason_by_norm.values():
        wording.check(reason)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(folded(x), model(x))


def test_functional_convolutions_fold_too():
    class Padded(nn.Conv2d):
        def forward(self, x):
            x = nn.functional.pad(x, (1, 1, 1, 1))
            return nn.functional.conv2d(x, self.weight, self.bias, self.stride)

    def pool_and_head(self, x):
        return nn.functional.linear(self.bn(self.conv(x)).mean((2, 3)), self.head)

    parts = {"conv": Padded(3, 4, 3, stride=2), "bn": nn.BatchNorm2d(4)}
    model = with_statistics(module(pool_and_head, **parts, head=nn.Parameter(torch.randn(5, 4))))
    model.conv.__class__.__module__ = "own"  # as a user's class, which is traced into
    folded, report = fold_batch_norms(model)
    assert report.counts() == {"Conv+BN": 1}
    assert isinstance(folded.get_submodule("linear"), nn.Linear)
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(folded(x), model(x), atol=1e-5)


@pytest.mark.parametrize(
    "change", [lambda y: y.clamp_(0, 1), lambda y: F.relu(y, inplace=True), nn.ReLU(inplace=True)]
)
def test_unread_change_in_place_stays(change):
    def change_and_go_on(self, x):
        y = self.bn(self.conv(x))
        self.change(y)
        return 2 * y

    change_module = change if isinstance(change, nn.Module) else module(lambda _, y: change(y))
    parts = {"conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4), "change": change_module}
    model = with_statistics(module(change_and_go_on, **parts))
    folded, _ = fold_batch_norms(model)
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(folded(x), model(x), atol=1e-5)


@pytest.mark.parametrize(
    "captured",
    [lambda model: model, fx.symbolic_trace, lambda model: trace(model, leaves=["conv", "deconv"])],
)
def test_inputs_passed_by_name_fold(captured):
    def by_name(self, x):
        x = self.bn(input=F.dropout(input=self.conv(input=x), training=False))
        x = F.relu(input=self.deconv(input=x, output_size=(14, 14)))
        return self.bn1(input=self.head(input=torch.flatten(input=x, start_dim=1)))

    parts = {"conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4), "bn1": nn.BatchNorm1d(5)}
    parts |= {"deconv": nn.ConvTranspose2d(4, 2, 3, stride=2), "head": nn.Linear(2 * 196, 5)}
    model = with_statistics(module(by_name, **parts))
    fused, report = fuse(captured(model))
    assert report.counts() == {"Conv+BN": 1, "ConvTranspose+ReLU": 1, "Linear+BN": 1}
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(fused(x), model(x), atol=1e-5)


@pytest.mark.parametrize("has_forward_hook", [False, True])
@pytest.mark.parametrize(
    "make_computed",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        lambda conv: nn.utils.prune.l1_unstructured(conv, "weight", 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_computed_weights_are_traced(make_computed, has_forward_hook):
    with torch.enable_grad():
        conv = make_computed(nn.Conv2d(3, 4, 3))
    model = with_statistics(nn.Sequential(conv, nn.BatchNorm2d(4)))
    if has_forward_hook:
        conv.register_forward_hook(lambda _conv, _inputs, output: 2 * output)
    x = torch.randn(2, 3, 8, 8)
    traced = trace(model)
    assert torch.equal(traced(x), model(x))
    assert isinstance(conv.weight, torch.Tensor)
    assert torch.allclose(fuse(traced)[0](x), model(x), atol=1e-5)


@pytest.mark.parametrize("name", ["conv", "drop", "bn", "act", "left", "right"])
def test_hooked_layers_stay(name):
    def branch(self, x):
        x = self.act(self.last(self.bn(self.drop(self.conv(x)))))
        return self.left(x) + self.right(x)

    parts = {"conv": nn.Conv2d(3, 4, 3), "drop": nn.Dropout(), "bn": nn.BatchNorm2d(4)}
    parts |= {"last": nn.Conv2d(4, 4, 1), "act": nn.ReLU()}
    parts |= {"left": nn.Conv2d(4, 4, 1), "right": nn.BatchNorm2d(4)}
    model = with_statistics(module(branch, **parts))
    hooked_layer = model.get_submodule(name)
    hooked_layer.register_forward_hook(lambda _layer, _inputs, output: 1 - 2 * output)
    fused, _ = fuse(trace(model, leaves=[name]))
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(fused(x), model(x), atol=1e-5)


def test_leaf_that_overrides_forward_does_not_fold():
    class Halved(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) / 2

    model = with_statistics(nn.Sequential(Halved(3, 4, 3), nn.BatchNorm2d(4)))
    folded, report = fold_batch_norms(model, leaves=["Halved"])
    assert "overrides forward" in report.skipped[0][1]
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(folded(x), model(x))


def test_functional_layer_with_computed_padding_stays():
    def pad_by_size(self, x):
        return F.conv2d(x, self.weight, padding=x.shape[-1] // 8)

    model = module(pad_by_size, weight=nn.Parameter(torch.randn(4, 3, 3, 3)))
    folded, _ = fold_batch_norms(model)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(folded(x), model(x))


def test_profile_takes_numbers_of_numpy():
    cost = profile(nn.ReLU(), [torch.zeros(1)], runs=np.int64(2), warm_up=np.uint8(0))
    assert cost.seconds > 0


def test_profile_refuses_operators_without_meta_kernel():
    leaf = module(lambda self, x: x * x.max().item())  # torch.ao's int8 layers fail in this way
    model = module(lambda self, x: self.leaf(x), leaf=leaf)
    with pytest.raises(ModelError, match="profile the float model"):
        profile(model, [torch.ones(2)], leaves=["leaf"], runs=1)


@pytest.mark.parametrize("runs", [{"runs": "a"}, {"runs": 0}, {"warm_up": 0.5}, {"warm_up": -1}])
def test_profile_refuses_bad_numbers_of_runs(runs):
    with pytest.raises(ConfigError, match=f"{next(iter(runs))} must be a whole number"):
        profile(nn.ReLU(), [torch.zeros(1)], **runs)


@pytest.mark.slow
def test_profile_counts_and_times_resnet18(monkeypatch):
    clock, seconds, run_node = [0.0], iter(range(1, 10_000)), fx.Interpreter.run_node

    def timed(self, node):  # each node takes longer than the one before, and nothing else does
        clock[0] += next(seconds)
        return run_node(self, node)

    monkeypatch.setattr(fx.Interpreter, "run_node", timed)
    monkeypatch.setattr("deploy.fx.profile.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    traced = trace(load_module(f"{HERE / 'resnet18.py'}:make"))
    result = profile(traced, [torch.randn(1, 3, 224, 224)], warm_up=1, runs=2)
    assert result.flops == 3_628_146_688
    assert result.macs == 1_814_073_344
    assert sum(node.parameters for node in result.nodes) == 11_689_512
    times = [node.seconds for node in result.nodes]
    count = len(traced.graph.nodes)  # the first and last are the input and the output
    assert times == [1.5 * count + position for position in range(2, count)]
    assert result.seconds == sum(times)
    assert sum(node.percent for node in result.nodes) == pytest.approx(100)
    text = result.to_screen()
    heading = "Op type  Op  Average runtime (s)  Pct  MFLOPs  MMACs  Parameters"
    assert text.splitlines()[0].split() == heading.split()
    assert float(text.splitlines()[2].split()[2]) == max(times)
    assert repr(result) == text
    assert [row["seconds"] for row in result.rows("nodes")] == times


@pytest.mark.slow
def test_fuse_and_profile_of_resnet18(run, command, refusal, wording):
    shape = ("--input", "1x3x64x64")
    shown = command("fuse", RESNET, "--bench", *shape)
    assert "Conv+BN+ReLU: 9 fused" in shown
    assert "Conv+BN: 11 fused" in shown
    assert "x; largest difference" in shown
    shown = run.ok("profile", RESNET, *shape, "--runs", 1, "--warm-up", 0)
    assert shown.splitlines()[-2].startswith("total")
    for arguments in (["profile"], ["fuse", "--bench"], ["trace"]):
        assert "must run" in refusal(*arguments, RESNET, "--input", "1x4x64x64"), arguments
    wording.check(refusal("fuse", RESNET, "--bench"))


def test_efficientnet_lite0_folds_its_49_norms():
    model = real_model("efficientnet_lite0.py:make")
    fused, report = fuse(model)
    assert report.counts() == {"Conv+BN": 49}
    assert report.skipped == []
    x = torch.randn(1, 3, 224, 224)
    assert (fused(x) - model(x)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "size", "nodes"), [("pnet", 48, 12), ("rnet", 24, 20), ("onet", 48, 24)]
)
def test_mtcnn_traces_with_several_outputs(name, size, nodes):
    model = real_model(f"mtcnn.py:{name}")
    traced = trace(model)
    assert len(traced.graph.nodes) in (nodes, nodes + 1)
    x = torch.randn(2, 3, size, size)
    for ours, theirs in zip(traced(x), model(x), strict=True):
        assert torch.equal(ours, theirs)
    assert len(traced(x)) == (3 if name == "onet" else 2)


@pytest.mark.parametrize("is_model_last", [False, True])
def test_channels_last_is_exported_as_usual(is_model_last, example):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    operators = [node.op_type for node in to_onnx(net, [example]).graph.node]
    if is_model_last:
        net = net.to(memory_format=torch.channels_last)
    last_example = example.contiguous(memory_format=torch.channels_last)
    exported = to_onnx(net, [last_example])
    assert [node.op_type for node in exported.graph.node] == operators


class UserNorm(nn.BatchNorm2d):
    """A user's subclass with the forward of BatchNorm."""


def test_subclass_of_norm_is_traced_whole():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), UserNorm(2)).eval()
    names = [node.target for node in trace(model).graph.nodes if node.op == "call_module"]
    assert names == ["0", "1"]
