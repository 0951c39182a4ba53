"""Fusing and profiling: ResNet-18, and real trained models."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from click.testing import CliRunner  # noqa: E402
from torch import nn  # noqa: E402

from deploy.cli import cli  # noqa: E402
from deploy.errors import ModelError  # noqa: E402
from deploy.fx.fuse import fold_batch_norms, fuse  # noqa: E402
from deploy.fx.profile import profile  # noqa: E402
from deploy.fx.source import load_module  # noqa: E402
from deploy.fx.trace import trace  # noqa: E402

torch.set_num_threads(1)
HERE = Path(__file__).parent
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


def test_train_mode_is_refused():
    with pytest.raises(ModelError, match="eval mode, got 1 in train mode"):
        fuse(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train())


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
    result = profile(traced, [torch.randn(1, 3, 224, 224)], warm_up=1, runs=1)
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
def test_the_commands(tmp_path):
    spec = f"{HERE / 'resnet18.py'}:small"
    shown = CliRunner().invoke(cli, ["fuse", spec, "--bench", "--input", "1x3x64x64"])
    assert shown.exit_code == 0, shown.output
    assert "Conv+BN+ReLU: 9 fused" in shown.output and "Conv+BN: 11 fused" in shown.output
    assert "x; largest difference of the outputs" in shown.output
    shown = CliRunner().invoke(
        cli, ["profile", spec, "--input", "1x3x64x64", "--runs", "1", "--warm-up", "0"]
    )
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[-2].startswith("total")
    for command in (["profile"], ["fuse", "--bench"], ["trace"]):
        shown = CliRunner().invoke(cli, [*command, spec, "--input", "1x4x64x64"])
        assert isinstance(shown.exception, ModelError), command
        assert "must run" in str(shown.exception)
    shown = CliRunner().invoke(cli, ["fuse", spec, "--bench"])
    assert "needs its --input shape" in str(shown.exception)


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
