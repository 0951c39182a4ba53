"""Nothing silently wrong: hooks, computed weights, wrappers, checkpoints, checks that can fail."""

import random
from functools import partial

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, prune, spectral_norm  # noqa: E402

from deploy.cli import cli  # noqa: E402
from deploy.errors import CacheError, ExportError, ModelError  # noqa: E402
from deploy.fx import device  # noqa: E402
from deploy.fx.convert import calibrate, float_form, observers_of  # noqa: E402
from deploy.fx.export import check_float, other_batch, to_onnx  # noqa: E402
from deploy.fx.fakequant import on_grid, search_for  # noqa: E402
from deploy.fx.fuse import fuse  # noqa: E402
from deploy.fx.int8_layers import QatLayer, WeightQuant, coverage, refuse_float  # noqa: E402
from deploy.fx.modes import measure, quantized, report  # noqa: E402
from deploy.fx.prepare import prepare, prepare_only  # noqa: E402
from deploy.fx.profile import check_same  # noqa: E402
from deploy.fx.qat import Task, train  # noqa: E402
from deploy.fx.source import computed_weights, load_module, plain_copy, unwrapped  # noqa: E402
from deploy.fx.trace import trace  # noqa: E402
from deploy.targets import OnnxRuntime  # noqa: E402

torch.set_num_threads(1)
STEM = OnnxRuntime(int8_stem=True)  # for networks whose first Conv is small
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def run(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).eval()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    return model


def doubled(module, inputs, output):
    return output * 2


def one_more(module, inputs, named):
    return (inputs[0] + 1,), named


def test_hooks_of_layers_are_part_of_the_graph():
    model = net()
    model[0].register_forward_hook(doubled)
    model[3].register_forward_pre_hook(one_more, with_kwargs=True)
    wanted = model(X)
    for made in (trace(model), prepare(model, [X]), fuse(model)[0]):
        assert torch.allclose(made(X), wanted, atol=1e-5)
    assert torch.equal(model(X), wanted) and model[0]._forward_hooks  # the user's keeps its own
    with pytest.raises(ModelError, match="got a forward hook on it"):
        QatLayer(model[0], WeightQuant(0))


def test_a_leaf_of_the_users_keeps_its_hook():
    class Part(nn.Module):
        def forward(self, x):
            return x.clamp(min=0)

    model = nn.Sequential(Part(), nn.ReLU())
    model[0].register_forward_hook(doubled)
    assert torch.equal(trace(model, leaves=[Part])(X), model(X))


COMPUTED = {
    "weight_norm": lambda m: parametrizations.weight_norm(m[0]),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m[3]),
    "older spectral_norm": lambda m: spectral_norm(m[0]),
    "pruning": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_weights_that_are_computed_are_taken_as_they_are_now(kind):
    model = net()
    COMPUTED[kind](model)
    model.eval()
    (name,) = computed_weights(model)
    wanted = model(X)
    for _ in range(2):  # a copy leaves nothing behind in the model
        own = plain_copy(model)
        assert not computed_weights(own) and name in dict(own.named_parameters())
        assert torch.allclose(own(X), wanted, atol=1e-6)
    assert torch.equal(model(X), wanted) and computed_weights(model)
    converted = quantized(model, [X], [(X,)], mode="static", target=STEM)
    assert coverage(converted, model).quantized == ("0", "3")


def test_a_computed_weight_in_a_training_is_said():
    model = net()
    parametrizations.weight_norm(model[0])
    lines = []
    train(task_of(model, epochs=0), report=lines.append)
    assert any(line.startswith("0.weight is computed in the model") for line in lines)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_are_taken_off_and_torchscript_is_named(tmp_path):
    model = net()
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        assert unwrapped(wrapped) is model
        whole = nn.Sequential(wrapped, nn.ReLU())
        assert torch.allclose(plain_copy(whole)(X), torch.relu(model(X)))
        assert isinstance(whole[0], type(wrapped))
    source = tmp_path / "net.py"
    source.write_text(
        "import torch\nfrom torch import nn\n"
        "def wrapped(): return torch.compile(nn.Linear(2, 1), backend='eager')\n"
        "def script(): return torch.jit.script(nn.Linear(2, 1))\n"
    )
    assert type(load_module(f"{source}:wrapped")) is nn.Linear
    shown = run("fuse", f"{source}:script")
    assert "TorchScript" in str(shown.exception)
    with pytest.raises(ModelError, match="1 is TorchScript"):
        plain_copy(nn.Sequential(model, torch.jit.script(nn.ReLU())))


def test_a_model_that_cannot_be_copied_is_said():
    model = net()
    model.lock = __import__("threading").Lock()
    with pytest.raises(ModelError, match="must be copied before it is changed, got TypeError"):
        prepare(model, [X])


def test_a_part_that_runs_several_times_has_one_range_for_all_its_runs():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Sequential(nn.Conv2d(3, 2, 1))

        def forward(self, x):
            return self.head(x), self.head(10 * x)

    prepared = prepare_only(Twice().eval(), "head", [X], target=STEM)
    calibrate(prepared, [X, X], search=search_for("onnxruntime", "minmax"))
    (seen, _) = observers_of(prepared).values()
    wide = on_grid(float(10 * X.min()), float(10 * X.max()), seen.grid)
    assert (float(seen.scale), int(seen.zero_point)) == wide


def test_what_a_pass_must_not_change_is_checked_by_more_than_a_tolerance():
    model, same = net(), plain_copy(net())
    assert check_same(model, same, [X], "copying") == 0
    with torch.no_grad():
        same[3].bias += 1e-2
    with pytest.raises(ModelError, match="copying must not change what the model computes"):
        check_same(model, same, [X], "copying")

    class Cancels(nn.Module):  # float32 leaves only noise of it
        def __init__(self, last):
            super().__init__()
            self.last = last

        def forward(self, x):
            big = x + 1e4
            return (big * 3 - big - big - big if self.last else big - big + big - big) + x * 1e-6

    assert check_same(Cancels(True), Cancels(False), [X], "rewriting") > 1e-4


def task_of(model, **options):
    def batches(epoch):
        generator = torch.Generator().manual_seed(epoch)
        for _ in range(2):
            yield torch.randn(4, 3, 8, 8, generator=generator), torch.zeros(4, dtype=torch.int64)

    def loss(output, label):
        return nn.functional.cross_entropy(output.flatten(1), label)

    settings = {"inputs": [X], "batches": batches, "loss": loss, "epochs": 1}
    return Task(model=model, **(settings | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("weights", "another float weights;"),
        ("teacher", "another teacher;"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.5)}, "another optimizer;"),
        ({"clip_gradient": 2.0}, "another limit of gradients;"),
        ({"distil_weight": 2.0}, "another distillation;"),
        ({"skip": ["3"]}, "another form of the model;"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path, changed, said):
    path, model, options = tmp_path / "qat.pt", net(), {}
    train(task_of(model), checkpoint=path)
    if changed == "weights":
        nn.init.zeros_(model[0].weight)
    elif changed == "teacher":
        options = {"teacher": net()}
    else:
        options = changed
    with pytest.raises(CacheError, match=said):
        train(task_of(model, **options), checkpoint=path)
    path.unlink()


@pytest.mark.slow
def test_a_checkpoint_holds_the_state_of_every_generator(tmp_path):
    def batches(epoch):
        for _ in range(2):
            x = torch.randn(4, 3, 8, 8) + np.random.rand() + random.random()  # noqa: NPY002
            yield x.float(), torch.zeros(4, dtype=torch.int64)

    def stop_in_second(epoch):
        if epoch == 1:
            raise KeyboardInterrupt
        return batches(epoch)

    def seeded():
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        return {"calibration": lambda: [X], "epochs": 2}

    path = tmp_path / "qat.pt"
    whole = train(task_of(net(), batches=batches, **seeded()))
    with pytest.raises(KeyboardInterrupt):
        train(task_of(net(), batches=stop_in_second, **seeded()), checkpoint=path)
    resumed = train(task_of(net(), batches=batches, **seeded()), checkpoint=path)
    assert resumed.losses == whole.losses
    kept = device.state()
    drawn = np.random.rand(), random.random()  # noqa: NPY002
    device.restore(kept)
    assert (np.random.rand(), random.random()) == drawn  # noqa: NPY002


@pytest.mark.slow
def test_what_stays_float_is_said_and_nothing_in_int8_is_refused(tmp_path):
    source = tmp_path / "net.py"
    source.write_text(
        "from torch import nn\n"
        "class Attends(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)\n"
        "        self.head = nn.Linear(8, 3)\n"
        "    def forward(self, x):\n"
        "        return self.head(self.attend(x, x, x)[0])\n"
        "def make():\n"
        "    return Attends().eval()\n"
    )
    words = ("export", f"{source}:make", "--input", "2x4x8", "--qdq", "--mode", "weight-only")
    shown = run(*words, "--leaf", "attend", "-o", tmp_path / "q.onnx")
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert "int8: 1 of 3 layers with weights, 0 activations; in float: attend" in shown.output
    kept = ("--leaf", "attend", "--keep-float", "head", "-o", tmp_path / "none.onnx")
    shown = run(*words, *kept)
    assert "must have layers in int8, and none of 3" in str(shown.exception)
    assert not (tmp_path / "none.onnx").exists()
    with pytest.raises(ExportError, match="there are no weights"):
        refuse_float(coverage(nn.ReLU(), nn.ReLU()))


def tiny(factor):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
    with torch.no_grad():
        model[2].weight *= factor
        model[2].bias *= 0
    return model


def test_an_export_is_checked_by_outputs_of_any_size_and_two_batches():
    torch.manual_seed(0)
    model = tiny(1e-6)
    exported = to_onnx(model, [X])
    found = check_float(exported, model, [X])
    assert found.batches == (2, 3) and found.telling and found.max_output < 1e-5
    assert [len(x) for x in other_batch([X[:1]])] == [3]
    with torch.no_grad():
        model[2].weight *= 1.01
    with pytest.raises(ExportError, match="must compute what torch computes"):
        check_float(exported, model, [X])
    for tensor in exported.graph.initializer:  # a file whose batch only looks open
        if tensor.dims == [2] and tensor.data_type == 7:
            tensor.CopyFrom(__import__("onnx").numpy_helper.from_array(np.array([2, 144]),
                                                                       tensor.name))  # fmt: skip
    with pytest.raises(ExportError, match=r"--static-batch|what torch computes"):
        check_float(exported, model, [X])


@pytest.mark.slow
def test_outputs_that_do_not_depend_on_the_input_prove_nothing(tmp_path):
    source = tmp_path / "net.py"
    source.write_text(
        "import torch\nfrom torch import nn\ndef make():\n    m = nn.Linear(3, 2)\n"
        "    nn.init.zeros_(m.weight)\n    return m\n"
    )
    shown = run("export", f"{source}:make", "--input", "1x3", "-o", tmp_path / "n.onnx")
    assert shown.exit_code == 0 and "this proves nothing; load --weights" in shown.output
    shown = run("inspect", f"{source}:make", "--input", "1x3")
    assert "proves nothing" in " ".join(shown.output.split())


def test_an_export_that_fails_shows_a_sentence_and_no_graph(tmp_path, capfd):
    source = tmp_path / "net.py"
    source.write_text(
        "from torch import nn\nclass If(nn.Module):\n    def forward(self, x):\n"
        "        return x * 2 if x.sum() > 0 else x - 1\n"
        "class Fixed(nn.Module):\n    def forward(self, x):\n        return x.reshape(1, 3) * 2\n"
    )
    shown = run("export", f"{source}:If", "--input", "2x3", "-o", tmp_path / "n.onnx")
    assert "net.py:4" in str(shown.exception) and "--static-batch" not in str(shown.exception)
    shown = run("inspect", f"{source}:Fixed", "--input", "1x3")
    assert "inconsistencies were found: Eq(" in str(shown.exception)
    assert "calib8 export --static-batch" in str(shown.exception)
    written = capfd.readouterr()
    assert "GraphModule" not in written.err + written.out + shown.output


def test_a_trained_model_is_measured_against_its_own_weights():
    result = train(task_of(net(), epochs=2))
    found = measure("qat", float_form(result.prepared), result.converted, [(X,)])
    assert found.sqnr_db > 25
    zero = tiny(0.0)
    assert "all 0" in report([measure("float", zero, zero, [(X,)])])


def test_trace_says_why_the_model_does_not_run_for_its_input(tmp_path):
    source = tmp_path / "net.py"
    source.write_text("from torch import nn\ndef make(): return nn.Conv2d(3, 4, 1)\n")
    shown = run("trace", f"{source}:make", "--input", "1x5x8x8")
    assert "for inputs (1, 5, 8, 8) torch.float32, got: " in str(shown.exception)
    assert "5 channels" in str(shown.exception)
