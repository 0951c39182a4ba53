"""Trace, see, rewrite: the graph of a PyTorch model."""

import builtins
import json.decoder
import math
import operator
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import fx, nn  # noqa: E402

from deploy.cli import cli  # noqa: E402
from deploy.errors import ConfigError, ModelError  # noqa: E402
from deploy.fx.norms import propagate_shapes, replace_op, replace_pattern  # noqa: E402
from deploy.fx.profile import code, table  # noqa: E402
from deploy.fx.source import load_module  # noqa: E402
from deploy.fx.trace import find_function, global_wrap, trace, trace_only  # noqa: E402

torch.set_num_threads(1)
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


class DataDependent(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.nt = inner

    def forward(self, x):
        return self.nt(self.first(x))


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


def test_a_traced_model_is_the_model_and_prints_its_code():
    model = load_module(f"{HERE / 'resnet18.py'}:small")
    traced = trace(model)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(traced(x), model(x))
    assert 'getattr(self.layer4, "1").conv2(' in code(traced)
    assert code(traced).startswith("def forward(self, x):\n")


def test_the_table_shows_six_opcodes_and_no_address():
    class Six(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return torch.topk(self.linear(x + self.scale).clamp(min=0.0), 2)[0]

    assert table(trace(Six())) == SIX_OPCODES


def test_constants_are_made_once_and_kept_as_get_attr():
    traced = trace(Constants())
    kept = [node.target for node in traced.graph.nodes if node.op == "get_attr"]
    assert kept == ["_tensor_constant0", "_tensor_constant1"]
    assert traced(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]


def test_all_three_spellings_of_add_become_mul():
    traced = trace(ThreeAdds())
    assert replace_op(traced, "add", torch.mul) == 3
    assert [t.item() for t in traced(torch.tensor(2), torch.tensor(5))] == [10, 10, 10]
    assert code(traced).count("torch.mul") == 3


def test_replacing_refuses_what_would_change_the_meaning():
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


def test_a_pattern_matches_every_spelling():
    class Pairs(nn.Module):
        def forward(self, x, y):
            return torch.relu(x + y) - torch.relu(torch.add(x, y)) + torch.relu(x.add(y))

    traced = trace(Pairs())
    count = replace_pattern(traced, lambda a, b: torch.relu(a + b), lambda a, b: torch.mul(a, b))
    assert count == 3
    assert traced(torch.tensor(3.0), torch.tensor(4.0)).item() == 12.0
    with pytest.raises(ConfigError, match="nowhere"):
        replace_pattern(traced, lambda a: torch.sigmoid(a), lambda a: a)


def test_shapes_along_the_graph():
    shapes = propagate_shapes(trace(Holder(nn.Flatten())), torch.randn(2, 3, 5, 5))
    assert shapes == {
        "x": (2, 3, 5, 5),
        "first": (2, 4, 5, 5),
        "nt": (2, 100),
        "output": (2, 100),
    }


def test_fx_wrap_in_the_users_own_module(tmp_path):
    source = tmp_path / "own.py"
    source.write_text(
        "import torch\nfrom torch import nn\ntorch.fx.wrap('len')\n"
        "class Own(nn.Module):\n    def forward(self, x):\n        return x * len(x)\n"
        "def make():\n    return Own()\n"
    )
    assert "len(x)" in code(trace(load_module(f"{source}:make")))


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


def test_global_wrap_is_undone_on_exception():
    before = builtins.len, json.decoder.scanstring
    with pytest.raises(RuntimeError, match="inside"), global_wrap(len, json.decoder.scanstring):
        assert builtins.len is not before[0]
        assert len([1, 2]) == 2  # untraced arguments still reach the real function
        raise RuntimeError("inside")
    assert (builtins.len, json.decoder.scanstring) == before


def test_a_function_to_wrap_must_exist():
    assert find_function("len") is len
    assert find_function("math.sqrt") is math.sqrt
    for name in ("no_such_function", "math.nothing", "nowhere.f", "math.pi", ""):
        with pytest.raises(ConfigError, match="--wrap"):
            find_function(name)


def test_data_dependent_control_flow_is_said_with_module_line_and_three_remedies():
    with pytest.raises(ModelError) as caught:
        trace(Holder(DataDependent()))
    said = str(caught.value)
    line = next(
        i
        for i, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "if x.sum() > 0" in text
    )
    assert "DataDependent (nt)" in said
    assert f"{Path(__file__).name}:{line}: if x.sum() > 0:" in said
    assert "--leaf nt" in said and "--only" in said and "torch.where" in said


def test_view_of_an_unpacked_shape_fails_with_the_hint_and_traces_when_rewritten():
    with pytest.raises(ModelError, match=r"view\(shape\) in place of view\(\*shape\)"):
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


def test_a_leaf_that_names_nothing_is_said():
    with pytest.raises(ConfigError, match="nowhere"):
        trace(Holder(DataDependent()), leaves=["nowhere"])


def test_only_a_submodule_is_traced():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = Holder(nn.ReLU())

        def forward(self, x):
            return self.backbone(x) if x.sum() > 0 else self.backbone(-x)

    model = Wrapper()
    part = trace_only(model, "backbone")
    assert isinstance(part.backbone, fx.GraphModule)
    assert not isinstance(model.backbone, fx.GraphModule)
    for x in torch.randn(4, 1, 3, 2, 2):
        assert torch.equal(part(x), model(x))
    with pytest.raises(ConfigError, match="its children: backbone"):
        trace_only(model, "head")


def test_the_command_prints_table_code_and_shapes():
    from click.testing import CliRunner

    spec = f"{HERE / 'resnet18.py'}:small"
    shown = CliRunner().invoke(cli, ["trace", spec, "--input", "1x3x64x64"])
    assert shown.exit_code == 0, shown.output
    assert "call_module    layer1_0_conv1         layer1.0.conv1" in shown.output
    assert "(1, 64, 2, 2)" in shown.output
    replaced = CliRunner().invoke(cli, ["trace", spec, "--code", "--leaf", "Block"])
    assert replaced.exit_code == 0, replaced.output
    assert 'getattr(self.layer1, "0")' in replaced.output


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
