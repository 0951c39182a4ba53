"""Training for int8: a task, its checkpoints, distillation, learned scales, the commands."""
# ruff: noqa: E402 (torch may be missing)

import gzip
import json
import math
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn

from deploy import errors
from deploy.fx.convert import calibrate, convert, scale_table
from deploy.fx.distill import Distiller, channel_wise_loss, logit_loss
from deploy.fx.export import compare_with_torch, to_onnx
from deploy.fx.fakequant import lsq_round
from deploy.fx.int8_layers import WeightQuant
from deploy.fx.prepare import prepare
from deploy.fx.qat import Task, clamp_scales, copy_scales, learn_scales, train
from deploy.fx.trace import trace
from deploy.targets import OnnxRuntime
from tests.models import run_net
from tests.torch_placed import observers_of
from tests.torch_shapes import module

torch.set_num_threads(1)

HERE = Path(__file__).parent

BENCHMARKS = HERE.parent / "benchmarks"

TRAINING = HERE / "torch_training.py"

STEM = OnnxRuntime(int8_stem=True)  # for networks whose first layer is small


def blobs(epoch, count=6, seed=0):
    """Batches of an easy problem: which of four corners is bright."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    for _ in range(count):
        y = torch.randint(0, 4, (32,), generator=generator)
        x = 1.5 * torch.randn(32, 1, 8, 8, generator=generator)
        for i, corner in enumerate(y.tolist()):
            x[i, 0, 4 * (corner // 2) :, 4 * (corner % 2) :][:4, :4] += 1.0
        yield x, y


def accuracy(model):
    hits = total = 0
    for x, y in blobs(0, count=20, seed=9):
        hits, total = hits + int((model(x).argmax(1) == y).sum()), total + len(y)
    return hits / total


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    features = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    )
    parts = {"features": features, "head": nn.Linear(16 * 16, 4)}
    model = module(lambda self, x: self.head(torch.flatten(self.features(x), 1)), **parts).train()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(8):
        for x, y in blobs(epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def task_of(model, **options):
    settings = {
        "inputs": [torch.zeros(2, 1, 8, 8)],
        "batches": blobs,
        "loss": nn.functional.cross_entropy,
        "evaluate": accuracy,
        "epochs": 2,
    }
    return Task(model=model, **(settings | options))


@pytest.mark.slow
def test_training_lowers_the_loss(small):
    state_before = {k: v.clone() for k, v in small.state_dict().items()}
    lines = []
    batches = [*blobs(0, count=20)]  # as a loader
    task = task_of(small, epochs=6, batches=batches, clip_gradient=0)
    result = train(task, bits=2, report=lines.append)
    assert result.losses[-1] < result.losses[0]
    assert result.score_after > result.score_before + 0.03
    assert lines[0].endswith("by mse, kept")
    assert len(lines) == 8
    assert lines[1].startswith("before training (PTQ, 2 ")
    assert all(torch.equal(v, state_before[k]) for k, v in small.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_8_bits_keep_the_accuracy(small, target):
    assert train(task_of(small, epochs=1), target=target).score_after >= accuracy(small) - 0.02


@pytest.mark.slow
def test_only_following_ranges_change(small, wording):
    start, end, followed = (
        train(task_of(small, epochs=epochs, ranges=ranges), bits=3).converted
        for epochs, ranges in ((0, "kept"), (2, "kept"), (2, "follow"))
    )
    assert scale_table(start) == scale_table(end) != scale_table(followed)
    with pytest.raises(errors.ConfigError) as raised:
        train(task_of(small, ranges="mse"))
    wording.check(raised.value)
    with pytest.raises(errors.ConfigError) as raised:
        train(task_of(small, method="best"))
    wording.check(raised.value)


@pytest.mark.slow
def test_submodule_is_trained_and_norms_fold(small):
    result = train(task_of(small, epochs=1, only="features"))
    assert type(result.converted.head) is nn.Linear
    assert result.score_after >= accuracy(small) - 0.02
    result = train(task_of(small, epochs=3, norms="train"), bits=8)
    assert result.score_after >= accuracy(small) - 0.03
    exported = to_onnx(result.converted, [torch.zeros(2, 1, 8, 8)])
    assert not {"BatchNormalization", "Div"} & {node.op_type for node in exported.graph.node}
    agreement = compare_with_torch(exported, result.converted, [(x,) for x, _ in blobs(0)])
    assert agreement.argmax >= 0.999
    assert agreement.codes <= 1.0


@pytest.mark.slow
def test_unfit_checkpoint_is_refused(small, tmp_path, wording):
    path, training = tmp_path / "qat.pt", task_of(small, epochs=1)
    train(training, checkpoint=path)
    with pytest.raises(errors.CacheError) as raised:
        train(training, target="tensorrt", checkpoint=path)
    wording.check(raised.value)
    checkpoint_bytes = path.read_bytes()
    for broken in (b"", b"not a checkpoint", checkpoint_bytes[: len(checkpoint_bytes) // 2]):
        path.write_bytes(broken)
        with pytest.raises(errors.CacheError) as raised:
            train(training, checkpoint=path)
        wording.check(raised.value)
    torch.save({"epoch": 1}, path)
    with pytest.raises(errors.CacheError) as raised:
        train(training, checkpoint=path)
    wording.check(raised.value)
    with pytest.raises(errors.ExportError) as raised:
        train(training, checkpoint=path / "below")
    wording.check(raised.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["qat.pt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        (
            {"loss": lambda output, label: output.sum() * float("nan")},
            errors.CalibrationError,
            "must stay finite, got nan in epoch 1",
        ),
        (
            {"batches": lambda epoch: [], "calibration": lambda: [torch.zeros(1, 1, 8, 8)]},
            errors.FeedError,
            "none in epoch 1",
        ),
        ({"batches": lambda epoch: []}, errors.FeedError, "at least one batch"),
        ({"batches": [torch.zeros(2, 1, 8, 8)]}, errors.FeedError, "got Tensor"),
        ({"batches": [{"x": 1, "label": 2}]}, errors.FeedError, "got dict"),
        ({"batches": [(1, 2, 3)]}, errors.FeedError, "got tuple of 3"),
        ({"loss": lambda output, label: 0.5}, errors.ConfigError, "got float"),
        ({"loss": lambda output, label: output}, errors.ConfigError, "got shape"),
        ({"loss": lambda output, label: output.detach().sum()}, errors.ConfigError, "gradient"),
        ({"loss": lambda output, label: label.nothing}, errors.ModelError, "loss .* label.nothing"),
        ({"optimizer": torch.optim.LBFGS}, errors.ModelError, "step .* 'closure'"),
        ({"evaluate": lambda model: None}, errors.ModelError, "evaluate .*NoneType"),
        ({"epochs": 1.5}, errors.ConfigError, "whole number"),
        ({"clip_gradient": -1}, errors.ConfigError, "clip_gradient .* 0 or more, got -1"),
        ({"distil": 3}, errors.ConfigError, "distil takes a list .*got 3"),
        ({"convert": {nn.Conv2d: nn.Conv2d}}, errors.ConfigError, "from_observed"),
        ({"amp": 3}, errors.ConfigError, "amp .*got 3"),
        ({"skip": ["features.0", "features.4", "head"]}, errors.ExportError, "none of 3 layers"),
        ({"distil": ["head"]}, errors.ConfigError, "pairs .*got 'head'"),
        ({"optimizer": lambda parameters: 3}, errors.ConfigError, "torch optimizer, got int"),
        ({"inputs": 3}, errors.FeedError, "got int"),
        ({"calibration": 3}, errors.FeedError, "got int"),
        ({"batches": 3}, errors.FeedError, "got int"),
        ({"batches": lambda: []}, errors.FeedError, "batches of the task .*argument"),
        (
            {"batches": lambda epoch: (1 / number for number in range(2))},
            errors.FeedError,
            r"ZeroDivisionError.*\(1 / number",
        ),
        (
            {
                "batches": [(torch.zeros(2, 3, 8, 8), torch.zeros(2))],
                "calibration": lambda: [torch.zeros(1, 1, 8, 8)],
            },
            errors.ModelError,
            "forward .* 1 channels",
        ),
    ],
)
def test_unfit_tasks_are_refused(small, options, error, reason):
    with pytest.raises(error, match=reason):
        train(task_of(small, **options))


@pytest.mark.parametrize("device", ["gpu", "meta", []])
def test_unfit_device_is_refused(device):
    with pytest.raises(errors.ConfigError, match=r"meta"):
        train(task_of(nn.Linear(1, 1)), device=device)


def test_channel_wise_loss_is_its_formula():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 3, 4, 4, generator=generator)
    assert channel_wise_loss(teacher, teacher).item() == pytest.approx(0, abs=1e-6)
    assert channel_wise_loss(teacher + 7.0, teacher).item() == pytest.approx(0, abs=1e-5)
    t, total = 4.0, 0.0
    for n in range(2):
        for c in range(3):
            p = np.exp(teacher[n, c].double().numpy().ravel() / t)
            q = np.exp(student[n, c].double().numpy().ravel() / t)
            p, q = p / p.sum(), q / q.sum()
            total += t**2 / 6 * (p * np.log(p / q)).sum()
    assert channel_wise_loss(student, teacher).item() == pytest.approx(total, rel=1e-4)
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert logit_loss(logits, logits).item() == pytest.approx(0, abs=1e-6)
    assert logit_loss(logits, logits.flip(1)).item() > 0.1


@pytest.mark.slow
def test_distillation_approaches_the_teacher(small):
    def distance(prepared):
        distiller = Distiller(prepared, small)
        total = 0.0
        for x, _ in blobs(50):
            with torch.no_grad():
                total += float(distiller.loss((x,), prepared(x)))
        distiller.close()
        return total

    none = task_of(small, epochs=0)
    with_teacher = task_of(small, epochs=4, teacher=small, loss=lambda o, y: o.sum() * 0)
    distance_before = distance(train(none, bits=2).prepared)
    assert distance(train(with_teacher, bits=2).prepared) < 0.8 * distance_before


def test_teacher_alone_trains_on_float64_arrays(small):
    options = {
        "teacher": small,
        "loss": lambda output, label: 0.0,
        "epochs": np.int64(1),
        "inputs": [torch.zeros(2, 1, 8, 8, dtype=torch.float64)],
        "batches": [(np.ones((2, 1, 8, 8)), None)],
    }
    assert train(task_of(small, evaluate=None, **options), bits=2).losses[0] > 0


def test_different_teacher_needs_layer_pairs(small, wording):
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2)).eval()
    prepared = prepare(small, [torch.zeros(2, 1, 8, 8)])
    x = torch.randn(2, 1, 8, 8)
    distiller = Distiller(
        prepared, nn.Sequential(wide, nn.Flatten(), nn.Linear(256, 4)), [("features.4", "0.1")]
    )
    assert float(distiller.loss((x,), prepared(x)).detach()) > 0
    with pytest.raises(errors.ConfigError) as raised:
        Distiller(prepared, wide, [("features.4", "nowhere")])
    wording.check(raised.value)
    unfit_distiller = Distiller(prepared, nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))
    with pytest.raises(errors.ModelError, match="equal shapes"):
        unfit_distiller.loss((x,), prepared(x))


def test_distilled_block_is_refused(small):
    with pytest.raises(errors.ConfigError, match="features=features"):
        Distiller(trace(small), small, [("features", "features")])


@pytest.mark.slow
def test_qat_command_exports_an_equal_model(tmp_path, command, refusal):
    out = tmp_path / "net.qdq.onnx"
    options = ("--teacher", f"{TRAINING}:net", "--scales", "--checkpoint", tmp_path / "c.pt")
    shown = command("qat", f"{TRAINING}:once", *options, "-o", out)
    assert "epoch 1/1: loss" in shown
    assert "same arg-max 100.00%" in shown
    assert "zero_point" in shown
    for batch in (1, 5):
        assert run_net(out, np.zeros((batch, 1, 8, 8), "f4"))[0].shape == (batch, 2)
    script = tmp_path / "train.py"
    text = TRAINING.read_text().replace("y = torch.randint", "y = 1 / 0 * torch.randint")
    script.write_text(text)
    message = refusal("qat", f"{script}:once", "-o", out)
    line = text[: text.index("y = 1 / 0")].count("\n") + 1
    assert "ZeroDivisionError: division by zero" in message
    assert f"train.py:{line}: y = 1" in message
    message = refusal("qat", f"{TRAINING}:net", "-o", out)
    assert "calib8.torch.Task, got Sequential" in message


@pytest.mark.slow
def test_export_command_in_float_and_int8(tmp_path, run, command, refusal):
    base = ["export", f"{TRAINING}:net", "--input", "2x1x8x8"]
    shown = command(*base, "-o", tmp_path / "float.onnx")
    assert "same arg-max 100.00%" in shown
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(9, 1, 8, 8)).astype("f4"))
    qdq = [*base, "--qdq", "--images", tmp_path / "x.npy", "-o", tmp_path / "q.onnx"]
    shown = run.ok(*qdq, "--modes", "--scales", "--target", "tensorrt")
    modes = [line.split()[0] for line in shown.splitlines()[5:9]]
    assert modes == ["float", "weight-only", "dynamic", "static"]
    assert "zero_point" in shown
    model = onnx.load(tmp_path / "q.onnx")
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in model.graph.node}
    for wrong, reason in (
        ([*base, "--qdq", "-o", "x.onnx"], "give --images"),
        ([*base, "--images", ".", "-o", "x.onnx"], "goes with --qdq"),
        (["export", f"{TRAINING}:net", "-o", "x.onnx"], "needs its --input"),
    ):
        assert reason in refusal(*wrong)


@pytest.mark.slow
def test_exporter_refuses_fallbacks(wording):
    def branch(self, x):
        return x * 2 if x.sum() > 0 else x - 1

    with pytest.raises(errors.ModelError, match=r"torch\.where"):
        to_onnx(module(branch), [torch.ones(2, 3)])
    fixed = module(lambda self, x: x.reshape(2, 3) * 2)
    with pytest.raises(errors.ModelError, match="--static-batch"):
        to_onnx(fixed, [torch.ones(2, 3)])
    assert to_onnx(fixed, [torch.ones(2, 3)], dynamic_batch=False).graph.node
    with pytest.raises(errors.ExportError) as raised:
        to_onnx(nn.Sequential(nn.AdaptiveAvgPool2d(1)), [torch.ones(2, 3, 4, 4)], opset=17)
    wording.check(raised.value)


def test_arguments_of_other_types_are_refused(small):
    with pytest.raises(errors.ConfigError, match="opset must be a whole number"):
        to_onnx(small, [torch.ones(2, 1, 8, 8)], opset="a")
    for options in ({"report": 3}, {"checkpoint": 3}):
        with pytest.raises(errors.ConfigError, match=f"{next(iter(options))} takes .*got 3"):
            train(task_of(small), **options)


def fashion_module():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import fashion
    finally:
        sys.path.remove(str(BENCHMARKS))
    return fashion


@pytest.mark.slow
def test_demo_network_in_int8():
    """Without any training data: 400 labelled images, 100 to calibrate with."""
    fashion = fashion_module()
    model, (x, y) = fashion.make().eval(), fashion.bundled()
    prepared = prepare(model, [x[:2]])
    calibrate(prepared, x[:100].split(50))
    converted = convert(prepared)
    assert fashion.accuracy(converted, x, y) >= fashion.accuracy(model, x, y) - 0.01
    parts = [(part,) for part in x.split(100)]
    agreement = compare_with_torch(to_onnx(converted, [x[:2]]), converted, parts)
    assert agreement.samples == 400
    assert agreement.argmax == 1.0


def demo(**options):
    """Label-free, from the float teacher on the demo's 100 calibration images."""
    import cv2

    fashion = fashion_module()
    paths = sorted((fashion.FOLDER / "calib").glob("*.png"))
    pixels = [cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) for path in paths]
    x, model = fashion.normalized(np.stack(pixels)[:, None]), fashion.make()
    settings = {
        "inputs": [x[:2]],
        "loss": lambda output, label: output.sum() * 0,
        "epochs": 1,
        "batches": lambda epoch: fashion.shuffled(x, torch.zeros(len(x)), epoch, size=25),
        "calibration": lambda: [x],
        "teacher": model,
    }
    return Task(model=model, **(settings | options))


@pytest.mark.slow
def test_4_bit_training_beats_calibration():
    """Full figures are in the docs."""
    fashion = fashion_module()
    test = fashion.bundled()
    task = demo(evaluate=lambda model: fashion.accuracy(model, *test), epochs=12)
    result = train(task, bits=4, target=STEM)  # the first Conv too
    assert (
        result.score_after >= result.score_before + 0.005
    )  # 0.0075 to 0.02, by the CPU's order of sums


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ascend", "onnxruntime", "tensorrt"])
def test_trained_model_agrees_on_the_npu(target, tmp_path, command):
    """`calib8 qat`, then `calib8 ascend convert`, run in integers on all 400 images."""
    path, stem = tmp_path / "net.qdq.onnx", ["--int8-stem"] * (target == "onnxruntime")
    command("qat", f"{__file__}:demo", "--target", target, *stem, "-o", path)
    feed = ("--images", HERE.parent / "datasets" / "fashion" / "eval.txt")
    feed += ("--mean", "0.5", "--std", "0.5")
    assert "12 of 12 layers" in command("ascend", "convert", path, "-o", tmp_path / "o", *feed)
    accuracy = json.loads((tmp_path / "o" / "report.json").read_text())["engines"][1]["accuracy"]
    assert accuracy["samples"] == 400
    # pixels of the demo lie at exact halves of a step, which the NPU rounds after its offset
    assert accuracy["top1_agreement"] >= (0.999 if target == "ascend" else 0.995)


def test_fashion_files_of_debian_are_read(tmp_path, monkeypatch):
    fashion = fashion_module()
    pixels = np.arange(2 * 784, dtype=np.uint8)
    for name, data in (
        ("images-idx3", bytes(16) + pixels.tobytes()),
        ("labels-idx1", bytes(8) + b"\3\4"),
    ):
        with gzip.open(tmp_path / f"t10k-{name}-ubyte.gz", "wb") as file:
            file.write(data)
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path)
    x, y = fashion.images("t10k")
    assert x.shape == (2, 1, 28, 28)
    assert y.tolist() == [3, 4]
    assert float(x[0, 0, 0, 0]) == -1.0


def gradients(x, scale, zero, ends, grad, shared):
    x, scale = x.clone().requires_grad_(), scale.clone().requires_grad_()
    y = lsq_round(x, scale, torch.tensor(zero, dtype=torch.int32), ends, shared=shared)
    y.backward(grad)
    return y.detach(), x.grad, scale.grad


GRIDS = [((-8, 7), 0), ((0, 15), 0), ((0, 15), 6), ((0, 255), 250), ((-128, 127), -128)]


@pytest.mark.parametrize(("ends", "zero"), GRIDS)
def test_gradient_equals_the_papers(ends, zero):
    """Equations 1, 2, 3 and 5, value by value; section 2.2 for the factor."""
    rng = np.random.default_rng(0)
    scale = np.float32(0.37)
    below, above = ends[0] - zero, ends[1] - zero
    x = (rng.uniform(1.5 * below - 2, 1.5 * above + 2, 4000) * scale).astype(np.float32)
    grad = rng.normal(size=x.size).astype(np.float32)
    y, to_x, to_scale = gradients(
        torch.from_numpy(x), torch.tensor(scale), zero, ends, torch.from_numpy(grad), 50
    )
    v = x / scale
    assert np.array_equal(y.numpy(), np.rint(np.clip(v, below, above)) * scale)
    slope = np.where(v <= below, below, np.where(v >= above, above, np.rint(v) - v))
    positive = above if above >= (ends[1] - ends[0]) // 2 else -below
    expected = (slope.astype(np.float64) * grad).sum() / math.sqrt(50 * positive)
    assert float(to_scale) == pytest.approx(expected, rel=1e-4)
    assert np.array_equal(to_x.numpy(), np.where((v > below) & (v < above), grad, 0))


@pytest.mark.parametrize(("ends", "zero"), GRIDS)
def test_gradient_equals_finite_differences(ends, zero):
    """The smoothed form: what rounding adds to each value is held, the rest is as it is."""
    rng = np.random.default_rng(1)
    below, above, scale = ends[0] - zero, ends[1] - zero, 0.37
    x = rng.uniform(1.5 * below - 2, 1.5 * above + 2, 500) * scale
    x = x.astype(np.float32).astype(np.float64)
    grad = rng.normal(size=x.size)
    rounding = np.rint(x / np.float32(scale)) - x / scale

    def smooth(s):
        v = x / s
        is_inside = (x / scale > below) & (x / scale < above)
        return float((grad * s * np.where(is_inside, v + rounding, np.clip(v, below, above))).sum())

    step = 1e-6
    differences = (smooth(scale + step) - smooth(scale - step)) / (2 * step)
    positive = above if above >= (ends[1] - ends[0]) // 2 else -below
    gradient = gradients(
        torch.from_numpy(x).float(),
        torch.tensor(scale),
        zero,
        ends,
        torch.from_numpy(grad).float(),
        1,
    )[2]
    assert float(gradient) * math.sqrt(positive) == pytest.approx(differences, rel=1e-3)


def test_each_channel_has_its_gradient():
    torch.manual_seed(0)
    weight, grad = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2)
    quant = WeightQuant(0, bits=3)
    scale = quant.learn(weight)
    assert scale.tolist() == pytest.approx([float(w.abs().max()) / 3 for w in weight])
    quant.enabled = True
    quant(weight).backward(grad)
    assert scale.grad is not None
    for channel in range(3):
        channel_gradients = gradients(
            weight[channel], scale[channel].detach(), 0, (-3, 3), grad[channel], weight[0].numel()
        )
        assert float(scale.grad[channel]) == pytest.approx(float(channel_gradients[2]), rel=1e-5)
    assert quant.learn(10 * weight) is scale  # what is learned starts once


def outliers(epoch, count=20):
    """Batches whose last feature is wide and says nothing of the label."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(count):
        x = 0.5 * torch.randn(64, 8, generator=generator)
        x[:, 7] *= 5
        yield x, x[:, :7].sum(1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [3, 4])
def test_learned_scales_lower_the_loss(bits):
    model = nn.Sequential(nn.Linear(8, 1)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0] * 7 + [0.0]]))
        model[0].bias.zero_()
    settings = {
        "inputs": [torch.zeros(2, 8)],
        "batches": outliers,
        "loss": nn.functional.mse_loss,
        "evaluate": None,
        "epochs": 6,
    }
    fixed, learned = (
        train(task_of(model, ranges=ranges, **settings), bits=bits)
        for ranges in ("kept", "learned")
    )
    assert learned.losses[-1] < 0.4 * fixed.losses[-1]
    assert scale_table(learned.converted)[0][1] < 0.6 * scale_table(fixed.converted)[0][1]


def net():
    torch.manual_seed(0)
    return module(
        lambda self, x: self.head(torch.flatten(self.side(self.norm(self.conv(x)).relu()), 1)),
        conv=nn.Conv2d(1, 6, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(6),
        side=nn.ConvTranspose2d(6, 4, 1),
        head=nn.Linear(4 * 64, 3),
    )


def pictures(epoch):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(4):
        y = torch.randint(0, 3, (16,), generator=generator)
        yield torch.randn(16, 1, 8, 8, generator=generator) + y[:, None, None, None], y


def picture_task(**options):
    settings = {"batches": pictures, "evaluate": None, "epochs": 4, "ranges": "learned"}
    return task_of(net(), **(settings | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"amp": True}, {"norms": "train"}, {"norms": "train", "ranges": "kept"}]
)
def test_resumed_training_equals_unbroken_training(options, tmp_path, wording):
    class Stop(Exception):
        pass

    def stop_in_third_epoch(epoch):
        if epoch == 2:
            raise Stop
        return pictures(epoch)

    def trained(checkpoint=None, **changes):
        task = picture_task(**(options | changes))
        return train(task, bits=4, target=STEM, checkpoint=checkpoint, report=lines.append)

    path, lines = tmp_path / "qat.pt", []
    unbroken = trained()
    with pytest.raises(errors.FeedError, match="got Stop at"):
        trained(path, batches=stop_in_third_epoch)
    assert not any("going on" in line for line in lines)
    resumed = trained(path)
    assert any("after epoch 2" in line for line in lines)
    assert resumed.losses == unbroken.losses
    for name, value in unbroken.converted.state_dict().items():
        assert torch.equal(value, resumed.converted.state_dict()[name]), name
    other_ranges = "learned" if "ranges" in options else "kept"
    with pytest.raises(errors.CacheError) as raised:
        trained(path, ranges=other_ranges)
    wording.check(raised.value)
    with pytest.raises(errors.CacheError) as raised:
        trained(path, method="minmax")
    wording.check(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_learned_scales_are_frozen_and_exported(target):
    result = train(picture_task(), bits=4, target=target)
    assert result.losses[-1] < result.losses[0]
    untrained = train(picture_task(epochs=0), bits=4, target=target)
    ends, starts = scale_table(result.converted), scale_table(untrained.converted)
    assert [zero for _, _, zero in ends] == [zero for _, _, zero in starts]  # as calibration said
    assert all(a != b for (_, a, _), (_, b, _) in zip(ends, starts, strict=True))
    state_before = untrained.converted.state_dict()
    for name, value in result.converted.state_dict().items():
        assert not value.requires_grad
        if name.endswith("weight_scale"):
            assert bool((value > 0).all())
            assert not torch.equal(value, state_before[name])
    x = torch.randn(5, 1, 8, 8)
    exported = to_onnx(result.converted, [x])
    assert compare_with_torch(exported, result.converted, [(x,)], optimized=False).codes <= 1.001


def learned_model():
    prepared = prepare(net(), [torch.zeros(2, 1, 8, 8)], target=STEM)
    calibrate(prepared, [torch.randn(4, 1, 8, 8)])
    return prepared, learn_scales(prepared)


def test_merged_float_layer_learns_no_scale():
    grouped = nn.ConvTranspose2d(4, 4, 2, groups=2)  # stays in float
    x = torch.randn(2, 4, 4, 4)
    model = nn.Sequential(grouped, nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    prepared = prepare(model, [x], norms="train", target=STEM)
    calibrate(prepared, [x])
    assert "the weight of 0" not in learn_scales(prepared)


@pytest.mark.slow
def test_scales_stay_positive_numbers():
    prepared, scales = learned_model()
    assert len(scales) == len(observers_of(prepared)) + 2
    previous_scales = copy_scales(scales)
    with torch.no_grad():
        for scale in scales.values():
            scale.sub_(1e9)
    clamp_scales(scales, previous_scales)
    for scale, old in zip(scales.values(), previous_scales, strict=True):
        assert torch.equal(scale.detach(), old / 2)
    name, first_scale = next(iter(scales.items()))
    for lost, reason in (
        (math.nan, f"got nan of {name}; train slower"),
        (0, "must stay a positive number, got 0 of"),
    ):
        with torch.no_grad():
            first_scale.fill_(lost)
        with pytest.raises(errors.CalibrationError, match=reason):
            clamp_scales(scales, copy_scales(scales))


def test_learned_scales_share_the_device():
    prepared, _ = learned_model()
    meta_model = prepared.to("meta")
    kinds = {name.rpartition(".")[2] for name, p in meta_model.named_parameters() if p.device.type}
    assert "scale" in kinds
    assert {p.device.type for p in meta_model.parameters()} == {"meta"}
    assert meta_model(torch.zeros(2, 1, 8, 8, device="meta")).device.type == "meta"


def test_scales_stay_positive_at_high_rates():
    fast = partial(torch.optim.Adam, lr=0.5)
    result = train(picture_task(optimizer=fast, epochs=2), bits=4, target=STEM)
    assert all(scale > 0 for _, scale, _ in scale_table(result.converted))


@pytest.mark.slow
def test_qat_command_trains_scales(tmp_path, run):
    tables = {}
    for ranges in ("kept", "learned"):
        options = ("--bits", "4", "--int8-stem", "--scales", "-o", tmp_path / "q.onnx")
        done = run.ok("qat", f"{TRAINING}:twice", "--ranges", ranges, *options)
        assert f"ranges by mse, {ranges}" in done
        tables[ranges] = re.findall(r"^(\w+) +([\d.e-]+) +\d+$", done, re.M)
    kept, learned = (dict(table) for table in tables.values())
    assert [*kept] == [*learned]
    assert len(kept) == 2
    assert all(kept[name] != learned[name] for name in kept)
