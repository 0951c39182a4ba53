"""What models hold that nothing was tuned for: tensors given twice, split parameters."""

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from deploy.cli import cli  # noqa: E402
from deploy.fx.capture import capture  # noqa: E402
from deploy.fx.fuse import fold_batch_norms, fuse, norms_in_float  # noqa: E402
from deploy.fx.opening import open_torch  # noqa: E402
from deploy.fx.prepare import prepare  # noqa: E402
from deploy.fx.profile import profile  # noqa: E402

torch.set_num_threads(1)


def run(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def quantize(tmp_path):
    """What `export --qdq` shows of a factory of a file with these lines."""

    def call(source, shape="2x3x16x16"):
        (tmp_path / "net.py").write_text(f"import torch\nfrom torch import nn\n{source}")
        sizes = [4, *map(int, shape.split("x")[1:])]
        np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=sizes).astype("f4"))
        words = ("export", f"{tmp_path}/net.py:make", "--input", shape, "-o", tmp_path / "q.onnx")
        return run(*words, "--qdq", "--images", tmp_path / "x.npy", "--int8-stem")

    return call


TWICE = """
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
    def forward(self, x):
        x = self.stem(x).relu()
        out = self.head(x)
        return {"one": out, "many": out.detach(), "maps": [x, x.detach(), out]}
make = Twice
"""


@pytest.mark.slow
def test_a_tensor_may_be_given_twice(quantize):
    shown = quantize(TWICE)
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert "int8: 2 of 2 layers with weights" in shown.output


SPLIT = """
class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.places = nn.Linear(8, 4), nn.Parameter(torch.rand(2, 8))
    def forward(self, x):
        first, second = self.places.split(1)
        return self.head(x * first + second)
make = Split
"""


PARTS = """
class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(10, 10, 1)
        self.last = nn.Conv2d(16, 4, 1)
    def forward(self, x):
        a, b = self.stem(x).sigmoid().split((6, 10), dim=1)
        return self.last(torch.cat([a, self.inner(b)], 1))
make = Parts
"""


@pytest.mark.slow
def test_parts_of_other_sizes_are_quantized_each(quantize):
    shown = quantize(PARTS)
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert "int8: 3 of 3 layers with weights" in shown.output


@pytest.mark.slow
def test_placing_shows_nothing_of_the_exporters_own_notes(quantize, caplog):
    shown = quantize(SPLIT, "2x8")
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert not [told for told in caplog.messages if "Skipping" in told]


class Tokens(nn.Module):
    """LeViT's: a Linear of tokens, its norm over all of them in a row; a head with dropout."""

    def __init__(self):
        super().__init__()
        self.linear, self.bn = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.last, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x):
        x = self.linear(x)
        x = self.bn(x.flatten(0, 1)).reshape_as(x)
        return self.head(self.drop(self.last(F.hardswish(x).mean(1))))


class Face(nn.Module):
    """A face network's end: norm, dropout, flatten, Linear, norm; and a norm of flat features."""

    def __init__(self):
        super().__init__()
        self.conv, self.act, self.bn = nn.Conv2d(6, 4, 2), nn.PReLU(4), nn.BatchNorm2d(4)
        self.drop, self.fc, self.features = nn.Dropout(0.4), nn.Linear(36, 8), nn.BatchNorm1d(8)
        self.point, self.flat = nn.Conv2d(4, 8, 3), nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.act(self.conv(x.unflatten(2, (4, 4))))
        y = self.flat(torch.flatten(self.point(x), 1))
        return self.features(self.fc(torch.flatten(self.drop(self.bn(x)), 1))) + y


class Pair(nn.Module):
    """Two pictures through the same layers, whose differences go on."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = x.unflatten(2, (4, 4))
        a, b = (self.act(self.bn(self.conv(y))) for y in (x, x.flip(3)))
        return self.head(a - b)


class Moved(nn.Module):
    """What must stay: channels that a view moves, a layer that goes to two norms."""

    def __init__(self):
        super().__init__()
        self.linear, self.bn = nn.Linear(6, 8), nn.BatchNorm1d(128)
        self.twice, self.one, self.two = nn.Conv1d(16, 4, 1), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.twice(x)
        return self.bn(self.linear(x).flatten(1)), self.one(y), self.two(self.twice(x * 2))


def drawn(model):
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.bias, -1, 1)
    return model.eval()


@pytest.mark.parametrize(("kind", "folded"), [(Tokens, 2), (Face, 3), (Pair, 1)])
def test_norms_behind_views_and_dropout_and_of_shared_layers_fold(kind, folded):
    model, x = drawn(kind()), torch.randn((3, 5, 6) if kind is Tokens else (3, 6, 16))
    found, report = fold_batch_norms(model, [x])
    assert report.norms_left == 0 and report.skipped == []
    assert sum("BN" in pattern for pattern, _ in report.fused) == folded
    assert torch.allclose(found(x), model(x), atol=1e-5)
    joined, report = fuse(model, [x])
    assert torch.allclose(joined(x), model(x), atol=1e-5) and report.skipped == []


@pytest.mark.slow
def test_build_folds_what_no_runtime_would(tmp_path):
    sizes = {"Tokens": (5, 6), "Face": (6, 16)}
    for name, shape in sizes.items():
        (tmp_path / "net.py").write_text(
            f"from tests.test_torch_others import *\ndef make():\n    return drawn({name}())\n"
        )
        model = open_torch(f"{tmp_path}/net.py:make", [(2, *shape)]).model
        assert not [n for n in model.graph.node if n.op_type == "BatchNormalization"]


def test_a_view_that_moves_channels_and_two_norms_of_a_layer_stay():
    model, x = drawn(Moved()), torch.randn(3, 16, 6)
    found, report = fold_batch_norms(model, [x])
    assert report.norms_left == 3 and dict(report.skipped) == {
        "bn": "a view behind linear moves its channels",
        "one": "twice is called at several places",
        "two": "twice is called at several places",
    }
    for ours, theirs in zip(found(x), model(x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_only_a_norm_right_behind_a_layer_is_trained_with_it():
    for kind, x in ((Tokens, torch.randn(3, 5, 6)), (Pair, torch.randn(3, 6, 16))):
        model = drawn(kind())
        prepared = prepare(model, [x], norms="train")
        assert torch.allclose(prepared.eval()(x), model(x), atol=1e-5)
        assert "bn (norms='train' trains a norm right behind its" in norms_in_float(prepared)


AUXILIARY = """
class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.aux = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4000)
        self.places, self.head = nn.Parameter(torch.rand(1, 8, 1, 1)), nn.Conv2d(8, 4, 1)
    def forward(self, x):
        x = self.stem(x).relu() + self.places.expand(-1, -1, 16, 16)
        if self.training:
            return self.head(x), self.aux(x.mean((2, 3)))
        return self.head(x), x
make = Auxiliary
"""


@pytest.mark.slow
def test_figures_are_those_of_what_runs(quantize):
    shown = quantize(AUXILIARY).output
    assert "int8: 2 of 2 layers with weights" in shown and "in float" not in shown
    assert "on 4 samples" in shown and "of 1024 positions in the last output" in shown
    assert "steps of the last scale" not in shown  # which is of one output
    ratio = float(shown.split("static")[1].split()[1].rstrip("x"))
    assert 1 < ratio < 4  # the head that trains alone is 144 KB of float weights


ODD = """
def mixed():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4).double())
def program():
    return torch.export.export(nn.Linear(8, 4), (torch.zeros(2, 8),))
def module():
    return program().module()
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixed", "Sequential must run for inputs [(2, 8)], got RuntimeError: mat1 and mat2 must"),
        ("program", "got ExportedProgram; give the module that the program was exported from"),
        ("module", "a module with an eval mode; give the module that the program was exported"),
    ],
)
def test_what_is_no_model_is_named(tmp_path, name, said):
    source = tmp_path / "net.py"
    source.write_text(f"import torch\nfrom torch import nn\n{ODD}")
    words = (f"{source}:{name}", "--input", "2x8")
    for more in (("fuse", *words), ("export", *words, "-o", tmp_path / "n.onnx", "--qdq",
                                    "--mode", "weight-only")):  # fmt: skip
        assert said in str(run(*more).exception)


class Grown(nn.Module):
    """A grid that is computed in sixty steps, and parameters of the model's own."""

    def __init__(self):
        super().__init__()
        self.conv, self.places = nn.Conv2d(6, 4, 1), nn.Parameter(torch.rand(4, 1, 1))
        self.register_buffer("grid", torch.ones(1, 4, 1, 1))

    def forward(self, x):
        grid = self.grid
        for _ in range(60):
            grid = (grid + grid) / 2
        x = x.unflatten(2, (4, 4))
        return self.conv(x) * grid + grid + self.conv(x * 2) + self.places


def test_a_norm_that_stays_says_what_stands_on_either_side():
    torch.manual_seed(0)
    first, last = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
    model = nn.Sequential(nn.BatchNorm2d(6), first, nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU(), last)
    report = fold_batch_norms(model.eval(), [torch.randn(2, 6, 4, 4)])[1]
    assert dict(report.skipped) == {
        "0": "no Conv or Linear before it, and a Conv that pads with zeros behind it",
        "3": "no Conv or Linear before it, and ReLU behind it",
    }


def test_constants_that_are_read_twice_are_computed_once():
    model, x = Grown().eval(), torch.randn(2, 6, 16)
    folded, _ = fold_batch_norms(model, [x])
    assert torch.allclose(folded(x), model(x), atol=1e-6)


def test_a_profile_counts_each_parameter_once():
    model, x = Grown().eval(), torch.randn(2, 6, 16)
    found = profile(capture(model, [x]), [x], warm_up=0, runs=1)
    assert found.parameters == sum(p.numel() for p in model.parameters())
