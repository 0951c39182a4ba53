"""Models by torch.export, as graphs of their own modules."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn  # noqa: E402

from deploy.errors import ModelError  # noqa: E402
from deploy.fx.capture import capture, graph_of  # noqa: E402
from deploy.fx.export import compare, to_onnx  # noqa: E402
from deploy.fx.fuse import fold_batch_norms, fuse  # noqa: E402
from deploy.fx.norms import is_norm  # noqa: E402
from deploy.fx.profile import count_flops, max_difference, table  # noqa: E402
from deploy.fx.source import load_factory, users_line  # noqa: E402
from deploy.fx.trace import line_of  # noqa: E402

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


def test_layers_are_nodes_of_their_own_name_and_the_rest_torch_functions(example):
    captured = capture(make("detector"), [example])
    rows = table(captured)
    assert " blocks.0.cv1.conv " in rows and " torch.chunk " in rows and " stem.act " in rows
    assert "torch.ops.aten.conv" not in rows
    layers = [n.target for n in captured.graph.nodes if n.op == "call_module"]
    assert len(layers) == len(set(layers)) == 3 * 15 + 1 + 2


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


def test_inputs_and_outputs_in_containers():
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


def test_a_model_that_fixes_its_batch_is_captured_for_it():
    class One(nn.Module):
        def forward(self, x):
            return x.view(1, -1) * 2

    x = torch.rand(1, 6)
    assert torch.equal(capture(One(), [x])(x), x * 2)


def test_changes_in_place_and_regions_without_gradient_are_kept():
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


def test_a_layer_with_a_hook_is_captured_with_what_the_hook_does():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    x = torch.randn(1, 3, 5, 5)
    folded, report = fold_batch_norms(model, [x])
    assert report.norms_left == 1 and max_difference(folded(x), model(x)) < 1e-6
    assert folded.get_submodule("0.conv").weight.shape == (4, 3, 1, 1)


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 3, 1), Branching()

    def forward(self, x):
        return self.inner(self.first(x))


@pytest.mark.parametrize(("model", "leaf"), [(Branching(), False), (Holder(), True)])
def test_what_cannot_be_captured_names_the_line_and_no_leaf_of_the_root(model, leaf):
    with pytest.raises(ModelError) as caught:
        graph_of(model, [torch.rand(1, 3, 4, 4)])
    said = str(caught.value)
    assert "test_torch_capture.py" in said and "if x.sum() > 0:" in said and "torch.where" in said
    assert ("--leaf inner" in said) is leaf and "--leaf Holder" not in said


def test_a_line_is_named_in_a_library_that_lies_beside_torch():
    path = f"{Path(torch.__file__).parent}vision/ops/boxes.py"  # its name begins as torch's folder
    code = compile("def keep(n):\n    return 4 // n\n", path, "exec")
    there: dict = {}
    exec(code, there)
    with pytest.raises(ZeroDivisionError) as caught:
        there["keep"](0)
    error = caught.value.with_traceback(caught.tb.tb_next)  # without this test's own line
    assert line_of(error).startswith(f"{path}:2")


def test_the_standard_library_is_no_line_of_the_users():
    with pytest.raises(ValueError) as caught:
        json.loads("{")
    assert "test_torch_capture.py" in users_line(caught.value)


@pytest.mark.slow
def test_build_names_the_line_of_a_library_too(run, tmp_path, monkeypatch):
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
        code, _, err = run(command, f"{tmp_path / 'net.py'}:make", "--input", "1x3", *more)
        assert code == 1 and "boxes_of_a_zoo.py:4: return x" in err


class Placed(nn.Module):
    """EdgeNeXt's: what forward makes is moved to where the input is, with a dtype beside."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        mask = torch.zeros(x.shape[0], 4, 4).to(x.device, torch.bool)
        steps = (~mask).cumsum(1, dtype=torch.float32).unsqueeze(1)
        return self.conv(x) * steps


def test_flops_are_counted_where_a_tensor_is_moved():
    x = torch.randn(1, 3, 4, 4)
    assert sum(count_flops(capture(Placed(), [x]), [x]).values()) == 2 * 3 * 4 * 16


def test_the_graph_of_a_graph_is_a_copy(example):
    traced = graph_of(nn.Conv2d(3, 4, 1), None)
    again = graph_of(traced, [example])
    assert again is not traced and table(again) == table(traced)


def test_every_spelling_of_a_norm_is_folded(example):
    model = make("norms")
    folded, report = fold_batch_norms(model, [example])
    assert report.counts() == {
        "Conv+BN": 9,
        "Branches": 3,
        "BN+Conv": 1,
        "ConvTranspose+BN": 1,
        "Linear+BN": 1,
    }
    assert report.norms_left == 0 and not any(is_norm(m) for m in folded.modules())
    x = torch.randn(4, 3, 32, 32)
    wanted = model(x)
    assert max_difference(folded(x), wanted) < 1e-5 * float(wanted.abs().max())
    convolutions = [m for m in folded.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 8  # each RepVGG block is one


def test_norms_fold_without_example_inputs_too():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4)).eval()
    _, report = fuse(model)
    assert report.counts() == {"Conv+BN": 1} and report.norms_left == 0


def test_a_derived_norm_that_is_kept_whole_is_not_folded_without_its_activation():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4)).eval()
    folded, report = fold_batch_norms(graph_of(model, None, leaves=["BatchNormAct2d"]))
    x = torch.randn(2, 3, 4, 4)
    assert report.fused == [] and torch.equal(folded(x), model(x))


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


def test_a_detector_has_one_form_in_training():
    captured = capture(Detector().train(), [torch.randn(1, 3, 32, 32)])
    assert len(captured(torch.randn(2, 3, 32, 32))) == 2  # boxes and scores, and the raw maps


def test_one_tensor_given_for_two_inputs_leaves_them_two():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x, y):
            return self.a(x) + self.b(y)

    model, x = Two().eval(), torch.randn(4, 3)
    assert torch.allclose(capture(model, [x, x])(x, 5 * x), model(x, 5 * x))
    exported = to_onnx(model, [x, x])
    assert compare(exported, model, [(x, 5 * x)]).max_difference < 1e-5
