"""Nothing silently wrong: hooks, computed weights, wrappers, checkpoints, odd modules."""
# ruff: noqa: E402 (torch may be missing)

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm

import calib8
from deploy.errors import CacheError, ExportError, FeedError, ModelError
from deploy.fx import device
from deploy.fx.capture import capture
from deploy.fx.checked_export import export_quantized
from deploy.fx.comparison import check_same_outputs
from deploy.fx.convert import calibrate, convert, float_form
from deploy.fx.coverage import measure_coverage, refuse_unquantized
from deploy.fx.export import check_float_export, to_onnx, with_more_samples
from deploy.fx.fuse import fold_batch_norms, fuse, norms_in_float
from deploy.fx.int8_layers import QatLayer, WeightQuant
from deploy.fx.modes import format_modes, measure_mode, quantize_model
from deploy.fx.open_model import export, open_module, open_torch
from deploy.fx.plain_copy import computed_weights, plain_copy, unwrap
from deploy.fx.prepare import prepare, prepare_part
from deploy.fx.profile import profile
from deploy.fx.qat import Task, train
from deploy.fx.range_search import scale_on_grid, search_for
from deploy.fx.source import load_module
from deploy.fx.trace import trace
from deploy.runtimes.ort import OrtSession
from deploy.targets import OnnxRuntime
from tests.models import run_command
from tests.torch_placed import observers_of
from tests.torch_shapes import module, with_statistics

torch.set_num_threads(1)

STEM = OnnxRuntime(int8_stem=True)  # for networks whose first Conv is small

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    return with_statistics(nn.Sequential(*layers))


def test_hooks_are_part_of_the_graph(wording):
    model = net()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    add_one = lambda module, inputs, named: ((inputs[0] + 1,), named)  # noqa: E731
    model[3].register_forward_pre_hook(add_one, with_kwargs=True)
    expected = model(X)
    for graph in (trace(model), prepare(model, [X]), fuse(model)[0]):
        assert torch.allclose(graph(X), expected, atol=1e-5)
    assert torch.equal(model(X), expected)
    assert model[0]._forward_hooks  # the user's keeps its own
    with pytest.raises(ModelError) as raised:
        QatLayer(model[0], WeightQuant(0))
    wording.check(raised.value)

    part = module(lambda self, x: x.clamp(min=0))
    part.register_forward_hook(lambda module, inputs, output: output * 2)
    model = nn.Sequential(part, nn.ReLU())
    assert torch.equal(trace(model, leaves=[type(part)])(X), model(X))


COMPUTED = {
    "weight_norm": lambda m: parametrizations.weight_norm(m[0]),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m[3]),
    "older spectral_norm": lambda m: spectral_norm(m[0]),
    "pruning": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_computed_weights_keep_their_values(kind):
    model = net()
    COMPUTED[kind](model)
    model.eval()
    (name,) = computed_weights(model)
    expected, own_weight = model(X), model[0].__dict__.get("weight")
    for _ in range(2):  # a copy leaves nothing behind in the model
        copy = plain_copy(model)
        assert not computed_weights(copy)
        assert name in dict(copy.named_parameters())
        assert torch.allclose(copy(X), expected, atol=1e-6)
        assert model[0].__dict__.get("weight") is own_weight
    assert torch.equal(model(X), expected)
    assert computed_weights(model)
    converted = quantize_model(model, [X], [(X,)], mode="static", target=STEM)
    assert measure_coverage(converted, model).quantized == ("0", "3")


def test_computed_weights_are_reported(wording):
    model = net()
    parametrizations.weight_norm(model[0])
    lines = []
    train(task_of(model, epochs=0), report=lines.append)
    assert any(line.startswith("0.weight is computed ") for line in lines)
    model.lock = __import__("threading").Lock()
    with pytest.raises(ModelError) as raised:
        prepare(model, [X])
    wording.check(raised.value)
    with pytest.raises(ModelError, match="must be copied"):
        to_onnx(model.eval(), [X])


def wrapped():
    return torch.compile(nn.Linear(2, 1), backend="eager")


def script():
    return torch.jit.script(nn.Linear(2, 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_are_removed_and_torchscript_named(refusal):
    model = net()
    for wrapper in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        assert unwrap(wrapper) is model
        wrapped_model = nn.Sequential(wrapper, nn.ReLU())
        assert torch.allclose(plain_copy(wrapped_model)(X), torch.relu(model(X)))
        assert isinstance(wrapped_model[0], type(wrapper))
    assert type(load_module(f"{__file__}:wrapped")) is nn.Linear
    assert "TorchScript" in refusal("fuse", f"{__file__}:script")
    with pytest.raises(ModelError, match="1 is TorchScript"):
        plain_copy(nn.Sequential(model, torch.jit.script(nn.ReLU())))


@pytest.mark.parametrize("use", [trace, plain_copy, lambda model: export(model, [X])])
def test_names_of_torch_fx_are_refused(use):
    model = module(lambda self, x: self.meta(x), meta=net())
    with pytest.raises(ModelError, match="a part 'meta'"):
        use(model)


def test_reused_layer_has_one_range():
    head = nn.Sequential(nn.Conv2d(3, 2, 1))
    model = module(lambda self, x: (self.head(x), self.head(10 * x)), head=head)
    prepared = prepare_part(model, "head", [X], target=STEM)
    calibrate(prepared, [X, X], search=search_for("onnxruntime", "minmax"))
    (observer, _) = observers_of(prepared).values()
    expected = scale_on_grid(float(10 * X.min()), float(10 * X.max()), observer.grid)
    assert (float(observer.scale), int(observer.zero_point)) == expected


def test_changed_outputs_of_passes_are_refused(wording):
    model, copy = net(), plain_copy(net())
    assert check_same_outputs(model, copy, [X], "copying") == 0
    with torch.no_grad():
        copy[3].bias += 1e-2
    with pytest.raises(ModelError) as raised:
        check_same_outputs(model, copy, [X], "copying")
    wording.check(raised.value)

    def cancels(self, x):  # float32 leaves only noise of it
        big = x + 1e4
        return (big * 3 - big - big - big if self.is_last else big - big + big - big) + x * 1e-6

    first_model, second_model = (module(cancels, is_last=is_last) for is_last in (True, False))
    assert check_same_outputs(first_model, second_model, [X], "rewriting") > 1e-4


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
    ("change", "reason"),
    [
        ("weights", "another float weights;"),
        ("teacher", "another teacher;"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.5)}, "another optimizer;"),
        ({"clip_gradient": 2.0}, "another limit of gradients;"),
        ({"distil_weight": 2.0}, "another distillation;"),
        ({"skip": ["3"]}, "another form of the model;"),
    ],
)
def test_checkpoint_of_another_training_is_refused(tmp_path, change, reason):
    path, model, options = tmp_path / "qat.pt", net(), {}
    train(task_of(model), checkpoint=path, target="tensorrt")
    if change == "weights":
        nn.init.zeros_(model[0].weight)
    elif change == "teacher":
        options = {"teacher": net()}
    else:
        options = change
    with pytest.raises(CacheError, match=reason):
        train(task_of(model, **options), checkpoint=path, target="tensorrt")


@pytest.mark.slow
def test_checkpoint_holds_every_random_generator(tmp_path):
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
    uninterrupted = train(task_of(net(), batches=batches, **seeded()))
    with pytest.raises(KeyboardInterrupt):
        train(task_of(net(), batches=stop_in_second, **seeded()), checkpoint=path)
    resumed = train(task_of(net(), batches=batches, **seeded()), checkpoint=path)
    assert resumed.losses == uninterrupted.losses
    stored_state = device.random_state()
    drawn = np.random.rand(), random.random()  # noqa: NPY002
    device.restore_random_state(stored_state)
    assert (np.random.rand(), random.random()) == drawn  # noqa: NPY002


def attends():
    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    parts = {"attend": attend, "head": nn.Linear(8, 3)}
    return module(lambda self, x: self.head(self.attend(x, x, x)[0]), **parts)


@pytest.mark.slow
def test_export_lists_float_layers(tmp_path, command, refusal, wording):
    arguments = (
        "export",
        f"{__file__}:attends",
        "--input",
        "2x4x8",
        "--qdq",
        "--mode",
        "weight-only",
    )
    shown = command(*arguments, "--leaf", "attend", "-o", tmp_path / "q.onnx")
    assert "int8: 1 of 3 layers" in shown
    assert "0 activations; in float: attend" in shown
    float_options = ("--leaf", "attend", "--keep-float", "head", "-o", tmp_path / "none.onnx")
    wording.check(refusal(*arguments, *float_options))
    assert not (tmp_path / "none.onnx").exists()
    with pytest.raises(ExportError) as raised:
        refuse_unquantized(measure_coverage(nn.ReLU(), nn.ReLU()))
    wording.check(raised.value)


def tiny(factor):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
    with torch.no_grad():
        model[2].weight *= factor
        model[2].bias *= 0
    return model


def test_export_is_checked_in_two_batches():
    torch.manual_seed(0)
    model = tiny(1e-6)
    exported = to_onnx(model, [X])
    agreement = check_float_export(exported, model, [X])
    assert agreement.batches == (2, 3)
    assert agreement.depends_on_input
    assert agreement.max_output < 1e-5
    assert [len(x) for x in with_more_samples([X[:1]])] == [3]
    with torch.no_grad():
        model[2].weight *= 1.01
    with pytest.raises(ExportError, match="what torch computes"):
        check_float_export(exported, model, [X])
    for tensor in exported.graph.initializer:  # a file whose batch only looks open
        if tensor.dims == [2] and tensor.data_type == 7:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array([2, 144]), tensor.name))
    with pytest.raises(ExportError, match=r"--static-batch|what torch computes"):
        check_float_export(exported, model, [X])


def test_file_that_does_not_load_needs_no_fixed_batch():
    model = tiny(1)
    exported = to_onnx(model, [X])
    exported.graph.node[0].op_type = "Unheard"
    with pytest.raises(ExportError, match="rewrite what ONNX Runtime cannot run"):
        check_float_export(exported, model, [X])


def test_nan_outputs_of_one_form_are_reported():
    model, broken = tiny(1), tiny(1)
    exported = to_onnx(model, [X])
    for tensor in exported.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            nan = np.full(tensor.dims, np.nan, np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(nan, tensor.name))
    with pytest.raises(ExportError, match="nan"):
        check_float_export(exported, model, [X])
    with torch.no_grad():
        broken[2].bias += float("nan")
    result = measure_mode("static", model, broken, [(X,)])
    assert np.isnan(result.max_error)
    assert "all 0" not in format_modes([result])


def zeros():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    return model


@pytest.mark.slow
def test_constant_outputs_prove_nothing(tmp_path, command):
    arguments = (f"{__file__}:zeros", "--input", "1x3")
    shown = command("export", *arguments, "-o", tmp_path / "n.onnx")
    assert "proves nothing; load --weights" in shown
    assert "proves nothing" in command("inspect", *arguments)


def test_nan_weights_and_odd_inputs_fail(wording):
    assert len(export(tiny(1), [X.numpy()]).graph.input) == 1
    with pytest.raises(FeedError) as raised:
        export(tiny(1), [{"x": X}])
    wording.check(raised.value)
    for opened in (partial(export, inputs=[X]), partial(calib8.build, images=[X])):
        with pytest.raises(ModelError) as raised:
            opened(tiny(float("nan")))
        wording.check(raised.value)
    with pytest.raises(ModelError, match="of a lazy module"):
        export(nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), [X])
    with pytest.raises(ModelError, match="'weight' is on the meta"):
        open_module(nn.Linear(8, 2, device="meta"), X)
    logarithm = module(lambda self, x: self.c(x).log(), c=nn.Conv2d(3, 4, 3))  # NaN in outputs
    assert capture(logarithm.eval(), [X])(X).isnan().any()


def test_numbers_and_buffers_are_no_outputs():
    def forward(self, x):
        self.calls += 1
        x = self.c(x)
        return {"rows": x.shape[0], "width": x.shape[3], "named": x}

    counting = module(forward, c=nn.Conv2d(3, 4, 3))
    counting.register_buffer("calls", torch.zeros(()))
    assert [value.name for value in export(counting, [X]).graph.output] == ["named"]


def test_failed_export_prints_no_graph(tmp_path, run):
    source = tmp_path / "net.py"
    source.write_text(
        "from torch import nn\nclass If(nn.Module):\n    def forward(self, x):\n"
        "        return x * 2 if x.sum() > 0 else x - 1\n"
        "class Fixed(nn.Module):\n    def forward(self, x):\n        return x.reshape(1, 3) * 2\n"
    )
    _, *streams = run("export", f"{source}:If", "--input", "2x3", "-o", tmp_path / "n.onnx")
    assert "net.py:4" in streams[1]
    assert "--static-batch" not in streams[1]
    streams += run("inspect", f"{source}:Fixed", "--input", "1x3")[1:]
    assert "were found: Eq(" in streams[3]
    assert "calib8 export --static-batch" in streams[3]
    assert not any("GraphModule" in text for text in streams)


def test_trained_model_is_measured_in_float():
    result = train(task_of(net(), epochs=2))
    assert measure_mode("qat", float_form(result.prepared), result.converted, [(X,)]).sqnr_db > 25
    zero = tiny(0.0)
    assert "all 0" in format_modes([measure_mode("float", zero, zero, [(X,)])])


def test_trace_names_unfit_inputs(refusal):
    message = refusal("trace", f"{__file__}:net", "--input", "1x5x8x8")
    assert "(1, 5, 8, 8) torch.float32, got: " in message
    assert "5 channels" in message


def twice():
    def forward(self, x):
        x = self.stem(x).relu()
        out = self.head(x)
        return {"one": out, "many": out.detach(), "maps": [x, x.detach(), out]}

    return module(forward, stem=nn.Conv2d(3, 8, 3, padding=1), head=nn.Conv2d(8, 4, 1))


def split():
    def forward(self, x):
        scale, shift = self.positions.split(1)
        return self.head(x * scale + shift)

    return module(forward, head=nn.Linear(8, 4), positions=nn.Parameter(torch.rand(2, 8)))


def parts():
    def forward(self, x):
        a, b = self.stem(x).sigmoid().split((6, 10), dim=1)
        return self.last(torch.cat([a, self.inner(b)], 1))

    stem, inner = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(10, 10, 1)
    return module(forward, stem=stem, inner=inner, last=nn.Conv2d(16, 4, 1))


def tokens():
    """LeViT's: a Linear of tokens, and its norm over all of them in a row."""

    def forward(self, x):
        x = self.linear(x)
        x = self.bn(x.flatten(0, 1)).reshape_as(x)
        return self.head(F.hardswish(x).mean(1))

    return with_statistics(
        module(
            forward,
            linear=nn.Linear(6, 8, bias=False),
            bn=nn.BatchNorm1d(8),
            head=nn.Linear(8, 3),
        )
    )


def pair():
    """Two pictures through the same layers, whose differences go on."""

    def forward(self, x):
        x = x.unflatten(2, (4, 4))
        a, b = (self.act(self.bn(self.conv(y))) for y in (x, x.flip(3)))
        return self.head(a - b)

    layers = {"conv": nn.Conv2d(6, 8, 3), "bn": nn.BatchNorm2d(8), "act": nn.ReLU()}
    return with_statistics(module(forward, **layers, head=nn.Conv2d(8, 2, 1)))


def moved():
    """Norms that must stay: behind a view that moves channels, two behind one layer."""

    def forward(self, x):
        y = self.twice(x)
        return self.bn(self.linear(x).flatten(1)), self.one(y), self.two(self.twice(x * 2))

    layers = {"linear": nn.Linear(6, 8), "bn": nn.BatchNorm1d(128), "twice": nn.Conv1d(16, 4, 1)}
    return with_statistics(module(forward, **layers, one=nn.BatchNorm1d(4), two=nn.BatchNorm1d(4)))


@pytest.mark.parametrize(("kind", "folded"), [(tokens, 1), (pair, 1)])
def test_norms_fold_through_views_and_dropout(kind, folded):
    model, x = kind(), torch.randn((3, 5, 6) if kind is tokens else (3, 6, 16))
    folded_model, report = fold_batch_norms(model, [x])
    assert report.norms_left == 0
    assert report.skipped == []
    assert sum("BN" in pattern for pattern, _ in report.fused) == folded
    assert torch.allclose(folded_model(x), model(x), atol=1e-5)
    joined, report = fuse(model, [x])
    assert torch.allclose(joined(x), model(x), atol=1e-5)
    assert report.skipped == []


@pytest.mark.slow
def test_build_folds_norms_after_views():
    model = open_torch(f"{__file__}:tokens", [(2, 5, 6)]).model
    assert not [n for n in model.graph.node if n.op_type == "BatchNormalization"]


def test_unfolded_norms_give_reasons(wording):
    model, x = moved(), torch.randn(3, 16, 6)
    folded_model, report = fold_batch_norms(model, [x])
    assert report.norms_left == 3
    check_skipped(report, ["bn", "one", "two"], wording)
    for ours, theirs in zip(folded_model(x), model(x), strict=True):
        assert torch.equal(ours, theirs)
    torch.manual_seed(0)
    conv, head = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
    model = nn.Sequential(nn.BatchNorm2d(6), conv, nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU(), head)
    report = fold_batch_norms(model.eval(), [torch.randn(2, 6, 4, 4)])[1]
    check_skipped(report, ["0", "3"], wording)


def check_skipped(report, names, wording):
    reason_by_norm = dict(report.skipped)
    assert list(reason_by_norm) == names
    for reason in reason_by_norm.values():
        wording.check(reason)


@pytest.mark.slow
def test_distant_norms_are_not_trained():
    for kind, x in ((tokens, torch.randn(3, 5, 6)), (pair, torch.randn(3, 6, 16))):
        model = kind()
        prepared = prepare(model, [x], norms="train")
        assert torch.allclose(prepared.eval()(x), model(x), atol=1e-5)
        assert "bn (norms='train' needs" in norms_in_float(prepared)


def auxiliary():
    def forward(self, x):
        x = self.stem(x).relu() + self.positions.expand(-1, -1, 16, 16)
        if self.training:
            return self.head(x), self.aux(x.mean((2, 3)))
        return self.head(x), x

    layers = {"stem": nn.Conv2d(3, 8, 3, padding=1), "aux": nn.Linear(8, 4000)}
    positions = nn.Parameter(torch.rand(1, 8, 1, 1))
    return module(forward, **layers, positions=positions, head=nn.Conv2d(8, 4, 1))


@pytest.mark.slow
def test_repeated_and_split_tensors_are_quantized(tmp_path, caplog):
    def quantize(name, shape="2x3x16x16"):
        sizes, images = [4, *map(int, shape.split("x")[1:])], tmp_path / "x.npy"
        np.save(images, np.random.default_rng(0).normal(size=sizes).astype("f4"))
        arguments = ("export", f"{__file__}:{name}", "--input", shape, "-o", tmp_path / "q.onnx")
        return run_command(*arguments, "--qdq", "--images", images, "--int8-stem")

    shown = quantize("auxiliary")
    assert "int8: 2 of 2 layers" in shown
    assert "in float" not in shown
    assert "on 4 samples" in shown
    assert "of 1024 positions" in shown
    assert "of the last scale" not in shown  # which is of one output
    ratio = float(shown.split("static")[1].split()[1].rstrip("x"))
    assert 1 < ratio < 4  # the head that trains alone is 144 KB of float weights
    assert "int8: 2 of 2 layers" in quantize("twice")
    assert "int8: 3 of 3 layers" in quantize("parts")
    quantize("split", "2x8")
    assert not [message for message in caplog.messages if "Skipping" in message]


def mixed():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4).double())


def program():
    return torch.export.export(nn.Linear(8, 4), (torch.zeros(2, 8),))


def of_program():
    return program().module()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixed", "Sequential must run for inputs [(2, 8)], got RuntimeError: mat1 and mat2 must"),
        ("program", "got ExportedProgram; give the module that the program was exported from"),
        ("of_program", "a module with an eval mode; give the module that the program was exported"),
    ],
)
def test_bad_models_are_named(tmp_path, name, reason, refusal):
    model_arguments = (f"{__file__}:{name}", "--input", "2x8")
    for arguments in (
        ("fuse", *model_arguments),
        ("export", *model_arguments, "-o", tmp_path / "n.onnx", "--qdq", "--mode", "weight-only"),
    ):
        assert reason in refusal(*arguments)


def test_shared_parameters_are_counted_once():
    def forward(self, x):
        grid = self.grid
        for _ in range(60):
            grid = (grid + grid) / 2
        x = x.unflatten(2, (4, 4))
        return self.conv(x) * grid + grid + self.conv(x * 2) + self.positions

    positions, grid = nn.Parameter(torch.rand(4, 1, 1)), nn.Buffer(torch.ones(1, 4, 1, 1))
    model = module(forward, conv=nn.Conv2d(6, 4, 1), positions=positions, grid=grid)
    x = torch.randn(2, 6, 16)
    folded, _ = fold_batch_norms(model, [x])
    assert torch.allclose(folded(x), model(x), atol=1e-6)
    result = profile(capture(model, [x]), [x], warm_up=0, runs=1)
    assert result.parameters == sum(p.numel() for p in model.parameters())


def test_inputs_and_buffers_are_not_changed(tmp_path):
    def counting(self, x):
        self.calls += 1
        return self.own(x.mul_(2))

    model = module(counting, own=net())
    model.register_buffer("calls", torch.zeros(()))
    x = X.clone()
    exported = calib8.torch.export(model, [x])
    prepared = prepare(model, [x], target=STEM)
    calibrate(prepared, [x, (x,)])
    profile(model, [x], runs=1)
    fuse(model, [x])
    export_quantized(model, [x], mode="weight-only", target=STEM)
    open_module(model, [x])
    task = Task(model=model, inputs=[x], batches=[(x, x)], epochs=1, loss=lambda y, _: y.mean())
    train(task, target=STEM)
    assert torch.equal(x, X)
    assert model.calls == 0
    (output,) = OrtSession.open(exported).run({"x": X.numpy()}).values()
    assert np.allclose(output, model(X.clone()).detach(), atol=1e-5)


@pytest.mark.parametrize("kind", ["dropout", "noise"])
def test_random_model_is_not_exported(kind):
    forwards = {
        "dropout": lambda self, x: self.own(F.dropout(x, 0.5)),
        "noise": lambda self, x: self.own(x + torch.randn_like(x)),
    }
    with pytest.raises(ExportError, match="same in each run"):
        calib8.torch.export(module(forwards[kind], own=net()), [X])


@dataclass
class Maps:
    first: Any
    last: Any = None


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


RETURNED = {
    "dataclass": (lambda y: Maps(y, y + 1), "first last"),
    "nested": (lambda y: {"a": Maps(y), "b": y + 1}, "a_first b"),
    "in a tuple": (lambda y: (y, Maps(y + 1, Maps(y + 2))), "3"),
    "numbers": (lambda y: {"y": y, "size": y.shape[2:], "batch": y.shape[0]}, "y"),
}


@pytest.mark.parametrize("kind", RETURNED)
def test_every_tensor_is_an_output(kind):
    returned, names = RETURNED[kind]
    model = module(lambda self, x: returned(self.own(x)), own=net())
    prepared = prepare(model, [X], target=STEM)
    calibrate(prepared, [X])
    exports = export(model, [X]), export(convert(prepared), [X])
    outputs, int8_outputs = ([value.name for value in model.graph.output] for model in exports)
    assert outputs == int8_outputs
    assert len(outputs) == int(names) if names.isdigit() else outputs == names.split()


def test_tensors_in_unknown_objects_are_refused():
    model = module(lambda self, x: (self.own(x), Opaque(x)), own=net())
    with pytest.raises(ModelError, match="got Opaque"):
        export(model, [X])


def test_returned_weight_is_an_output():
    model = module(lambda self, x: (self.own(x), self.own[3].weight), own=net())
    assert len(export(model, [X]).graph.output) == 2


@pytest.mark.parametrize("norms", ["fold", "train"])
def test_layer_tied_to_an_embedding_is_quantized(norms):
    def forward(self, ids):
        return self.head(self.norm(self.inner(self.words(ids))))

    words, head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
    head.weight = words.weight
    parts = {"inner": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}
    model = module(forward, words=words, head=head, **parts)
    ids = torch.tensor([[0, 1, 4], [2, 3, 0]])
    prepared = prepare(model, [ids], norms=norms)
    assert torch.equal(prepared(ids), model(ids))
    calibrate(prepared, [ids])
    prepared.get_submodule("head").layer.weight.data[0] += 1  # training changes both
    assert not torch.allclose(convert(prepared)(ids), model(ids), atol=0.5)
    exported = export(convert(prepared), [ids])
    assert [node.op_type for node in exported.graph.node].count("DequantizeLinear") > 2


@pytest.mark.parametrize("function", [F.conv2d, F.conv_transpose2d])
def test_layer_whose_weight_others_read_is_fused(function):
    def forward(self, x):
        return function(F.relu(self.own(x)), self.own[0].weight, padding=1)

    own = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
    model = module(forward, own=with_statistics(own))
    assert torch.allclose(fuse(model, [X])[0](X), model(X), atol=1e-5)
    assert torch.allclose(prepare(model, [X], target=STEM)(X), model(X), atol=1e-5)


def test_weight_of_a_layer_and_of_a_function_is_quantized_in_both():
    model = module(lambda self, x: F.linear(self.own(x), self.own.weight), own=nn.Linear(4, 4))
    batch = torch.randn(3, 4)
    prepared = prepare(model, [batch])
    assert torch.equal(prepared(batch), model(batch))
    calibrate(prepared, [batch])
    layers = export(convert(prepared), [batch]).graph.node
    assert [node.op_type for node in layers].count("DequantizeLinear") > 2


@pytest.mark.parametrize("norms", ["fold", "train"])
def test_frozen_weights_stay_frozen(norms):
    model = net()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    prepared = prepare(model, [X], norms=norms, target=STEM)
    trained = {name for name, value in prepared.named_parameters() if value.requires_grad}
    assert trained == {"3.layer.weight", "3.layer.bias"}


@pytest.mark.parametrize(
    ("forward", "inputs"),
    [
        (lambda self, x, factor: self.own(x) * factor, [X, torch.tensor(2.0)]),
        (lambda self, factor, x: self.own(x) * factor, [torch.tensor(2.0), X]),
        (lambda self, *pair: self.own(pair[0] + pair[1]), [X, X + 1]),
    ],
    ids=["scalar", "scalar first", "variadic"],
)
def test_scalars_and_variadic_inputs_are_exported(forward, inputs):
    model = module(forward, own=net())
    exported = export(model, inputs)
    larger = with_more_samples(inputs)
    arrays = [tensor.numpy() for tensor in larger]
    names = [value.name for value in exported.graph.input]
    (output,) = OrtSession.open(exported).run(dict(zip(names, arrays, strict=True))).values()
    assert np.allclose(output, model(*larger).detach(), atol=1e-5)
    assert len(output) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_dtypes_are_prepared(dtype):
    model = net().to(dtype)
    prepared = prepare(model, [X.to(dtype)], target=STEM)
    calibrate(prepared, [X.to(dtype), X])
    output = convert(prepared)(X)
    assert output.dtype == torch.float32
    assert torch.allclose(output, net()(X), atol=0.1)
    assert model[0].weight.dtype == dtype


@pytest.mark.parametrize("batch", [X[:, :2], {"x": X}], ids=["channels", "dict"])
def test_unfit_calibration_batch_is_refused(batch, capfd):
    with pytest.raises(ModelError, match="must run for inputs"):
        calibrate(prepare(net(), [X]), [batch])
    assert not capfd.readouterr().err
