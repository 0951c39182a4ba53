"""The graph of a PyTorch model: captured, traced, rewritten, fused and profiled."""
# ruff: noqa: E402 (torch may be missing)

import builtins
import copy
import json
import json.decoder
import math
import operator
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import fx, nn

from deploy.errors import ConfigError, ModelError
from deploy.fx.capture import capture, graph_of
from deploy.fx.export import compare_with_torch, to_onnx
from deploy.fx.fuse import fold_batch_norms, fuse
from deploy.fx.norms import is_norm, propagate_shapes, replace_op, replace_pattern
from deploy.fx.profile import count_flops, format_graph, graph_source, max_difference, profile_graph
from deploy.fx.source import load_factory, load_module, user_code_line
from deploy.fx.trace import (
    failing_line,
    find_function,
    global_wrap,
    replace_submodule,
    submodule,
    trace,
)

torch.set_num_threads(1)

SHAPES = Path(__file__).parent / "torch_shapes.py"

make, Detector, BatchNormAct2d = (
    load_factory(f"{SHAPES}:{name}") for name in ("make", "Detector", "BatchNormAct2d")
)

NAMES = ["detector", "all_norms", "attention", "convnext", "ssd"]


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def example():
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["detector", "norms", "attention", "convnext", "ssd"])
def test_a_captured_model_is_the_model_at_any_batch(name, example):
    model = make(name)
    captured = capture(model, [example])
    names = dict(model.named_parameters())
    assert set(dict(captured.named_parameters())) == set(names)
    for batch in (example, torch.randn(3, 3, 32, 32)):
        assert max_difference(captured(batch), model(batch)) < 1e-6  # attention has a quick form
    assert type(captured(example)) is type(model(example))
    assert count_flops(captured, [example])


def test_layers_are_nodes_of_their_own_name_and_counted(example):
    captured = capture(make("detector"), [example])
    rows = format_graph(captured)
    assert " blocks.0.cv1.conv " in rows and " torch.chunk " in rows and " stem.act " in rows
    assert "torch.ops.aten.conv" not in rows
    layers = [n.target for n in captured.graph.nodes if n.op == "call_module"]
    assert len(layers) == len(set(layers)) == 3 * 15 + 1 + 2
    traced = graph_of(nn.Conv2d(3, 4, 1), None)
    again = graph_of(traced, [example])
    assert again is not traced and format_graph(again) == format_graph(traced)
    x = torch.randn(1, 3, 4, 4)
    assert sum(count_flops(capture(Placed(), [x]), [x]).values()) == 2 * 3 * 4 * 16
    captured = capture(Detector().train(), [torch.randn(1, 3, 32, 32)])
    assert len(captured(torch.randn(2, 3, 32, 32))) == 2  # boxes and scores, and the raw maps


def test_what_train_mode_changes_still_changes():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    captured = capture(model.train(), [torch.randn(2, 8)])
    assert captured.training and all(m.training for m in captured.modules() if is_norm(m))
    captured(torch.randn(4, 8))
    assert captured.get_submodule("2").num_batches_tracked == 1
    assert model[2].num_batches_tracked == 0
    x = torch.randn(4, 8)
    assert not torch.equal(captured(x), captured(x))
    captured.eval()
    assert torch.equal(captured(x), captured(x))


def test_inputs_and_outputs_in_containers_and_one_tensor_for_two_inputs():
    class Both(nn.Module):
        def forward(self, pair, named, *more):
            total = sum(named.values()) + sum(more)
            return {
                "sum": pair[0] + pair[1] * total,
                "rows": [row * 2 for row in pair[0].unbind(1)],
            }

    inputs = [(torch.rand(1, 2), torch.rand(1, 2)), {"k": torch.rand(1, 2)}, torch.ones(1, 2)]
    captured = capture(Both(), inputs)
    assert [n.name for n in captured.graph.nodes if n.op == "placeholder"] == [
        "pair",
        "named",
        "more_0",
    ]
    wide = [(torch.rand(5, 2), torch.rand(5, 2)), {"k": torch.rand(5, 2)}, torch.ones(5, 2)]
    found, wanted = captured(*wide), Both()(*wide)
    assert torch.equal(found["sum"], wanted["sum"]) and len(found["rows"]) == 2

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x, y):
            return self.a(x) + self.b(y)

    model, x = Two().eval(), torch.randn(4, 3)
    assert torch.allclose(capture(model, [x, x])(x, 5 * x), model(x, 5 * x))
    exported = to_onnx(model, [x, x])
    assert compare_with_torch(exported, model, [(x, 5 * x)]).max_difference < 1e-5


def test_models_of_a_fixed_batch_and_changes_in_place_are_captured():
    class One(nn.Module):
        def forward(self, x):
            return x.view(1, -1) * 2

    x = torch.rand(1, 6)
    assert torch.equal(capture(One(), [x])(x), x * 2)

    class Marks(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                mask = torch.zeros(4)
                mask[1:3] = 2.0
            x = x + mask
            x[:, 0] += 1
            return x

    captured = capture(Marks(), [torch.rand(1, 4)])
    assert captured(torch.zeros(2, 4)).tolist() == [[1, 2, 2, 0]] * 2
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    x = torch.randn(1, 3, 5, 5)
    folded, report = fold_batch_norms(model, [x])
    assert report.norms_left == 1 and max_difference(folded(x), model(x)) < 1e-6
    assert folded.get_submodule("0.conv").weight.shape == (4, 3, 1, 1)


class DataDependent(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.nt = nn.Conv2d(3, 4, 1), inner

    def forward(self, x):
        return self.nt(self.first(x))


@pytest.mark.parametrize(
    ("model", "leaf"), [(DataDependent(), False), (Holder(DataDependent()), True)]
)
def test_what_cannot_be_captured_names_the_line_and_no_leaf_of_the_root(model, leaf):
    with pytest.raises(ModelError) as caught:
        graph_of(model, [torch.rand(1, 3, 4, 4)])
    said = str(caught.value)
    assert "test_torch_graph.py" in said and "if x.sum() > 0:" in said and "torch.where" in said
    assert ("--leaf nt" in said) is leaf and "--leaf Holder" not in said


def test_a_line_of_a_library_is_named_and_none_of_the_standard_library():
    path = f"{Path(torch.__file__).parent}vision/ops/boxes.py"  # its name begins as torch's folder
    code = compile("def keep(n):\n    return 4 // n\n", path, "exec")
    there = {}
    exec(code, there)
    with pytest.raises(ZeroDivisionError) as caught:
        there["keep"](0)
    error = caught.value.with_traceback(caught.tb.tb_next)  # without this test's own line
    assert failing_line(error).startswith(f"{path}:2")
    with pytest.raises(ValueError) as caught:
        json.loads("{")
    assert "test_torch_graph.py" in user_code_line(caught.value)


@pytest.mark.slow
def test_build_names_the_line_of_a_library_too(refusal, tmp_path, monkeypatch):
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
    for command, *more in (("export", "-o", tmp_path / "k.onnx"), ("inspect",)):
        err = refusal(command, f"{tmp_path / 'net.py'}:make", "--input", "1x3", *more)
        assert "boxes_of_a_zoo.py:4: return x" in err


class Placed(nn.Module):
    """EdgeNeXt's: what forward makes is moved to where the input is, with a dtype beside."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        mask = torch.zeros(x.shape[0], 4, 4).to(x.device, torch.bool)
        steps = (~mask).cumsum(1, dtype=torch.float32).unsqueeze(1)
        return self.conv(x) * steps


def test_every_spelling_of_a_norm_is_folded(example):
    model = make("norms")
    folded, report = fold_batch_norms(model, [example])
    assert report.counts() == {
        "Conv+BN": 9, "Branches": 3, "BN+Conv": 1, "ConvTranspose+BN": 1, "Linear+BN": 1,
    }  # fmt: skip
    assert report.norms_left == 0 and not any(is_norm(m) for m in folded.modules())
    x = torch.randn(4, 3, 32, 32)
    wanted = model(x)
    assert max_difference(folded(x), wanted) < 1e-5 * float(wanted.abs().max())
    convolutions = [m for m in folded.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 8  # each RepVGG block is one


def test_norms_fold_where_they_are_plain_and_in_eval_mode():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4)).eval()
    _, report = fuse(model)
    assert report.counts() == {"Conv+BN": 1} and report.norms_left == 0
    folded, report = fold_batch_norms(graph_of(model, None, leaves=["BatchNormAct2d"]))
    x = torch.randn(2, 3, 4, 4)
    assert report.fused == [] and torch.equal(folded(x), model(x))
    with pytest.raises(ModelError, match="eval mode, got 1 in train mode"):
        fuse(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train())


def test_constants_that_change_what_is_read_again_are_left_alone():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.register_buffer("by", torch.rand(4, 1, 1))

        def forward(self, x):
            x = self.conv(x)
            y = x
            y *= self.by
            return (y + self.by) * x

    x = torch.randn(1, 3, 4, 4)
    model = Twice().eval()
    folded, report = fold_batch_norms(model, [x])
    assert report.fused == [] and max_difference(folded(x), model(x)) < 1e-6


@pytest.mark.parametrize(
    "second",
    [
        nn.Conv2d(4, 4, 3, padding=0),  # another size
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Conv2d(4, 4, 5, padding=2, dilation=1, stride=2),
    ],
)
def test_branches_that_do_not_fit_are_left_alone(second):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), second

        def forward(self, x):
            wide, narrow = self.first(x), self.second(x)
            return wide[..., : narrow.shape[-2], : narrow.shape[-1]] + narrow

    x = torch.randn(1, 4, 8, 8)
    model = Two().eval()
    folded, report = fold_batch_norms(model, [x])
    assert "Branches" not in report.counts() and max_difference(folded(x), model(x)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fuse_and_profile_go_through_every_shape(run, name):
    spec = f"{SHAPES}:{name}"
    said = run("fuse", spec, "--input", "1x3x32x32", "--bench")[1]
    assert "BatchNorm left: 0" in said and "largest difference of the outputs" in said
    said = run("profile", spec, "--input", "1x3x32x32", "--runs", "1", "--warm-up", "0")[1]
    *_, total, counted = said.splitlines()
    assert total.startswith("total") and "norms, activations and other" in counted


@pytest.mark.slow
def test_a_norm_that_stays_is_counted_and_named(run, tmp_path):
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
    said = run("export", spec, *options)[1]
    assert "BatchNorm left in float: 1: 1 (no Conv or Linear before it" in said


HERE = Path(__file__).parent


class ThreeAdds(nn.Module):
    def forward(self, x, y):
        return x + y, torch.add(x, y), x.add(y)


class Constants(nn.Module):
    def forward(self, x):
        return x * torch.ones(3) + torch.full((3,), 2.0)


class TopK(nn.Module):
    def forward(self, x):
        return torch.topk(x, 3)[0] + torch.relu(x)[:, :3]


class ViewStar(nn.Module):
    def forward(self, x):
        shape = x.size()[:1] + (-1,)  # noqa: RUF005  (unpacking would iterate a proxy)
        return x.view(*shape)


class ViewWhole(nn.Module):
    def forward(self, x):
        shape = x.size()[:1] + (-1,)  # noqa: RUF005  (unpacking would iterate a proxy)
        return x.view(shape)


SIX_OPCODES = """\
opcode         name     target            args          kwargs
-------------  -------  ----------------  ------------  ----------
placeholder    x        x                 ()            {}
get_attr       scale    scale             ()            {}
call_function  add      operator.add      (%x, %scale)  {}
call_module    linear   linear            (%add,)       {}
call_method    clamp    clamp             (%linear,)    {min: 0.0}
call_function  topk     torch.topk        (%clamp, 2)   {}
call_function  getitem  operator.getitem  (%topk, 0)    {}
output         output   output            (%getitem,)   {}
"""


def test_a_traced_model_is_the_model_and_prints_its_code(run, command):
    model = load_module(f"{HERE / 'resnet18.py'}:small")
    traced = trace(model)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(traced(x), model(x))
    assert 'getattr(self.layer4, "1").conv2(' in graph_source(traced)
    assert graph_source(traced).startswith("def forward(self, x):\n")
    spec = f"{HERE / 'resnet18.py'}:small"
    shown = run("trace", spec, "--input", "1x3x64x64")[1]
    assert "call_module    layer1_0_conv1         layer1.0.conv1" in shown
    assert "(1, 64, 2, 2)" in shown
    replaced = command("trace", spec, "--code", "--leaf", "Block")
    assert 'getattr(self.layer1, "0")' in replaced


def test_the_table_shows_six_opcodes_and_no_address():
    class Six(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return torch.topk(self.linear(x + self.scale).clamp(min=0.0), 2)[0]

    assert format_graph(trace(Six())) == SIX_OPCODES


def test_constants_are_kept_and_shapes_known_along_the_graph():
    traced = trace(Constants())
    kept = [node.target for node in traced.graph.nodes if node.op == "get_attr"]
    assert kept == ["_tensor_constant0", "_tensor_constant1"]
    assert traced(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
    shapes = propagate_shapes(trace(Holder(nn.Flatten())), torch.randn(2, 3, 5, 5))
    assert shapes == {"x": (2, 3, 5, 5), "first": (2, 4, 5, 5), "nt": (2, 100), "output": (2, 100)}


def test_every_spelling_of_add_is_replaced():
    traced = trace(ThreeAdds())
    assert replace_op(traced, "add", torch.mul) == 3
    assert [t.item() for t in traced(torch.tensor(2), torch.tensor(5))] == [10, 10, 10]
    assert graph_source(traced).count("torch.mul") == 3

    class Pairs(nn.Module):
        def forward(self, x, y):
            return torch.relu(x + y) - torch.relu(torch.add(x, y)) + torch.relu(x.add(y))

    traced = trace(Pairs())
    count = replace_pattern(traced, lambda a, b: torch.relu(a + b), lambda a, b: torch.mul(a, b))
    assert count == 3
    assert traced(torch.tensor(3.0), torch.tensor(4.0)).item() == 12.0
    with pytest.raises(ConfigError, match="nowhere"):
        replace_pattern(traced, lambda a: torch.sigmoid(a), lambda a: a)

    class Alpha(nn.Module):
        def forward(self, x):
            return torch.add(x, x, alpha=2)

    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            return y.add_(1) + y

    with pytest.raises(ModelError, match="alpha"):
        replace_op(trace(Alpha()), "add", torch.mul)
    with pytest.raises(ModelError, match="used elsewhere"):
        replace_op(trace(InPlace()), "add", torch.mul)
    with pytest.raises(ConfigError, match="has no mul"):
        replace_op(trace(Alpha()), "mul", torch.add)
    with pytest.raises(ConfigError, match="an operation is one of"):
        replace_op(trace(Alpha()), "conv", torch.add)


def test_global_wrap_reaches_another_package_and_is_undone(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(
        "import math\nfrom math import sqrt\ndef scaled(x):\n    return x / sqrt(len(x))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import elsewhere

    class Uses(nn.Module):
        def forward(self, x):
            return elsewhere.scaled(x)

    before = (builtins.len, elsewhere.sqrt, math.sqrt)
    with pytest.raises(ModelError, match="--wrap len"):
        trace(Uses())
    traced = trace(Uses(), wrap=[len, math.sqrt])
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [
        len,
        math.sqrt,
        operator.truediv,
    ]
    x = torch.randn(4)
    assert torch.equal(traced(x), Uses()(x))
    assert (builtins.len, elsewhere.sqrt, math.sqrt) == before
    del sys.modules["elsewhere"]


def test_wrapped_functions_must_exist_and_come_back(tmp_path):
    before = builtins.len, json.decoder.scanstring
    with pytest.raises(RuntimeError, match="inside"), global_wrap(len, json.decoder.scanstring):
        assert builtins.len is not before[0]
        assert len([1, 2]) == 2  # untraced arguments still reach the real function
        raise RuntimeError("inside")
    assert (builtins.len, json.decoder.scanstring) == before
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


def test_what_cannot_be_traced_is_said_with_line_and_remedies():
    with pytest.raises(ModelError) as caught:
        trace(Holder(DataDependent()))
    said = str(caught.value)
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "if x.sum() > 0" in text)
    assert "DataDependent (nt)" in said
    assert f"{Path(__file__).name}:{line}: if x.sum() > 0:" in said
    assert "--leaf nt" in said and "--only" in said and "torch.where" in said
    with pytest.raises(ModelError, match=r"view\(shape\) not view\(\*shape\)"):
        trace(ViewStar())
    x = torch.randn(2, 3, 4)
    assert torch.equal(trace(ViewWhole())(x), x.view(2, -1))


@pytest.mark.parametrize("leaf", ["nt", "DataDependent", DataDependent])
def test_a_leaf_is_kept_whole_by_name_or_class(leaf):
    model = Holder(DataDependent())
    traced = trace(model, leaves=[leaf])
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["first", "nt"]
    for x in torch.randn(4, 1, 3, 2, 2):
        assert torch.equal(traced(x), model(x))


def test_only_a_submodule_is_traced_and_leaves_must_exist():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = Holder(nn.ReLU())

        def forward(self, x):
            return self.backbone(x) if x.sum() > 0 else self.backbone(-x)

    model = Wrapper()
    part = copy.deepcopy(model)
    replace_submodule(part, "backbone", trace(submodule(part, "backbone")))
    assert isinstance(part.backbone, fx.GraphModule)
    assert not isinstance(model.backbone, fx.GraphModule)
    for x in torch.randn(4, 1, 3, 2, 2):
        assert torch.equal(part(x), model(x))
    with pytest.raises(ConfigError, match="its children: backbone"):
        submodule(model, "head")
    with pytest.raises(ConfigError, match="nowhere"):
        trace(Holder(DataDependent()), leaves=["nowhere"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def make():\n    return 3\n", "must return a torch.nn.Module, got int"),
        ("def make():\n    raise ValueError('bad luck')\n", r"bad luck at .*net\.py:2"),
        ("def make(:\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", "SystemExit"),
        ("made = 1\n", "no function 'make'"),
    ],
)
def test_a_broken_users_file_is_one_sentence(tmp_path, text, said):
    source = tmp_path / "net.py"
    source.write_text(text)
    with pytest.raises((ModelError, ConfigError), match=said):
        load_module(f"{source}:make")


@pytest.mark.parametrize("spec", ["net.py", "net:make", "missing.py:make", "net.py:", "a.py:b c"])
def test_a_spec_that_is_none_is_refused(spec):
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


BENCHMARKS = HERE.parent / "benchmarks"


def with_statistics(model):
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "running_var"):
                module.running_mean.uniform_(-1, 1)
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 2)
                module.bias.uniform_(-1, 1)
    return model.eval()


PATTERNS = {
    "Conv+BN": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 8, 8)),
    "Conv+BN+ReLU": (
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        (2, 3, 8, 8),
    ),
    "Conv+ReLU": (nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU()), (2, 3, 8)),
    "Linear+ReLU": (nn.Sequential(nn.Linear(3, 4), nn.ReLU()), (2, 3)),
    "BN+ReLU": (nn.Sequential(nn.BatchNorm3d(3), nn.ReLU()), (2, 3, 4, 4, 4)),
    "Linear+BN": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (2, 3)),
    "ConvTranspose+BN": (
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.BatchNorm2d(6)),
        (2, 4, 5, 5),
    ),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_pattern_fuses_to_one_module_with_the_same_output(pattern):
    model, shape = PATTERNS[pattern]
    with_statistics(model)
    fused, report = fuse(model)
    assert report.counts() == {pattern: 1}
    assert sum(node.op == "call_module" for node in fused.graph.nodes) == 1
    x = torch.randn(shape)
    assert torch.allclose(fused(x), model(x), atol=1e-5)


def test_resnet18_loses_its_20_norms_and_keeps_its_output():
    model = load_module(f"{HERE / 'resnet18.py'}:make")
    folded, report = fold_batch_norms(model)
    assert report.counts() == {"Conv+BN": 20} and report.skipped == []
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 20
    x = torch.randn(1, 3, 96, 96)
    expected = model(x).detach()
    assert (folded(x) - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


def test_what_cannot_be_folded_is_left_alone_with_its_reason():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.two_users = nn.Conv2d(3, 3, 1)
            self.bn1 = nn.BatchNorm2d(3)
            self.twice = nn.Conv2d(3, 3, 1)
            self.bn2 = nn.BatchNorm2d(3)
            self.bn3 = nn.BatchNorm2d(3)
            self.plain = nn.Conv2d(3, 3, 3, padding=1)
            self.no_statistics = nn.BatchNorm2d(3, track_running_stats=False)

        def forward(self, x):
            x = self.two_users(x)
            y = self.bn1(x) + x
            y = self.bn3(self.twice(self.bn2(self.twice(y))))
            return self.no_statistics(self.plain(y))

    model = Odd().eval()
    folded, report = fold_batch_norms(model)
    assert report.fused == []
    assert dict(report.skipped) == {
        "bn1": "the output of two_users has 2 users",
        "bn2": "twice is called at several places",
        "bn3": "twice is called at several places",
        "no_statistics": "it keeps no running statistics",
    }
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(folded(x), model(x))


def test_functional_convolutions_fold_too():
    class Padded(nn.Conv2d):
        def forward(self, x):
            x = nn.functional.pad(x, (1, 1, 1, 1))
            return nn.functional.conv2d(x, self.weight, self.bias, self.stride)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = Padded(3, 4, 3, stride=2)
            self.bn = nn.BatchNorm2d(4)
            self.head = nn.Parameter(torch.randn(5, 4))

        def forward(self, x):
            return nn.functional.linear(self.bn(self.conv(x)).mean((2, 3)), self.head)

    model = with_statistics(Own())
    model.conv.__class__.__module__ = "own"  # as a user's class, which is traced into
    folded, report = fold_batch_norms(model)
    assert report.counts() == {"Conv+BN": 1}
    assert isinstance(folded.get_submodule("linear"), nn.Linear)
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(folded(x), model(x), atol=1e-5)


@pytest.mark.slow
def test_profile_counts_resnet18_exactly_and_times_nearly_all_of_it():
    traced = trace(load_module(f"{HERE / 'resnet18.py'}:make"))
    result = profile_graph(traced, [torch.randn(1, 3, 224, 224)], warm_up=1, runs=1)
    assert result.flops == 3_628_146_688
    assert result.macs == 1_814_073_344
    assert sum(node.parameters for node in result.nodes) == 11_689_512
    assert 90 < sum(node.percent for node in result.nodes) <= 100.1
    text = result.table()
    heading = "Op type  Op  Average runtime (s)  Pct  MFLOPs  MMACs  Parameters"
    assert text.splitlines()[0].split() == heading.split()
    times = [node.seconds for node in result.nodes]
    first = text.splitlines()[2].split()
    assert float(first[2]) == pytest.approx(max(times), abs=1e-6)


@pytest.mark.slow
def test_fuse_and_profile_of_resnet18(run, command, refusal):
    spec = f"{HERE / 'resnet18.py'}:small"
    shape = ("--input", "1x3x64x64")
    shown = command("fuse", spec, "--bench", *shape)
    assert "Conv+BN+ReLU: 9 fused" in shown and "Conv+BN: 11 fused" in shown
    assert "x; largest difference of the outputs" in shown
    code, shown, _ = run("profile", spec, *shape, "--runs", "1", "--warm-up", "0")
    assert code == 0 and shown.splitlines()[-2].startswith("total")
    for words in (["profile"], ["fuse", "--bench"], ["trace"]):
        assert "must run" in refusal(*words, spec, "--input", "1x4x64x64"), words
    assert "needs its --input shape" in refusal("fuse", spec, "--bench")


def real_model(name):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from fetch_models import FetchError
    finally:
        sys.path.remove(str(BENCHMARKS))
    try:
        return load_module(f"{BENCHMARKS / name}")
    except ModelError as error:
        if "FetchError" in str(error):
            pytest.skip(f"the model cannot be fetched: {error}")
        raise
    except FetchError as error:
        pytest.skip(str(error))


def test_efficientnet_lite0_folds_its_49_norms():
    model = real_model("efficientnet_lite0.py:make")
    fused, report = fuse(model)
    assert report.counts() == {"Conv+BN": 49} and report.skipped == []
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
