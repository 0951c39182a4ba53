"""Scales that are trained with the weights: their gradient, and training with them."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn  # noqa: E402

from deploy.cli import cli  # noqa: E402
from deploy.errors import CacheError, CalibrationError  # noqa: E402
from deploy.fx.convert import calibrate, observers_of, scale_table  # noqa: E402
from deploy.fx.export import compare, to_onnx  # noqa: E402
from deploy.fx.fakequant import rounded  # noqa: E402
from deploy.fx.int8_layers import WeightQuant  # noqa: E402
from deploy.fx.prepare import prepare  # noqa: E402
from deploy.fx.qat import Task, hold, learn, train, values_of  # noqa: E402
from deploy.targets import OnnxRuntime  # noqa: E402

torch.set_num_threads(1)
TRAINING = Path(__file__).parent / "torch_training.py"
STEM = OnnxRuntime(int8_stem=True)  # for networks whose first layer is small


def gradients(x, scale, zero, ends, grad, shared):
    x, scale = x.clone().requires_grad_(), scale.clone().requires_grad_()
    y = rounded(x, scale, torch.tensor(zero, dtype=torch.int32), ends, shared=shared)
    y.backward(grad)
    return y.detach(), x.grad, scale.grad


GRIDS = [((-8, 7), 0), ((0, 15), 0), ((0, 15), 6), ((0, 255), 250), ((-128, 127), -128)]


@pytest.mark.parametrize(("ends", "zero"), GRIDS)
def test_the_gradient_is_the_papers(ends, zero):
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
def test_the_gradient_is_that_of_differences_with_the_rounding_held(ends, zero):
    """The smoothed form: what rounding adds to each value is held, the rest is as it is."""
    rng = np.random.default_rng(1)
    below, above, scale = ends[0] - zero, ends[1] - zero, 0.37
    x = rng.uniform(1.5 * below - 2, 1.5 * above + 2, 500) * scale
    x = x.astype(np.float32).astype(np.float64)
    grad = rng.normal(size=x.size)
    held = np.rint(x / np.float32(scale)) - x / scale

    def smooth(s):
        v = x / s
        inside = (x / scale > below) & (x / scale < above)
        return float((grad * s * np.where(inside, v + held, np.clip(v, below, above))).sum())

    step = 1e-6
    differences = (smooth(scale + step) - smooth(scale - step)) / (2 * step)
    positive = above if above >= (ends[1] - ends[0]) // 2 else -below
    found = gradients(
        torch.from_numpy(x).float(), torch.tensor(scale), zero, ends,
        torch.from_numpy(grad).float(), 1,
    )[2]  # fmt: skip
    assert float(found) * math.sqrt(positive) == pytest.approx(differences, rel=1e-3)


def test_each_channel_of_a_weight_has_the_gradient_of_its_own():
    torch.manual_seed(0)
    weight, grad = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2)
    quant = WeightQuant(0, bits=3)
    scale = quant.learn(weight)
    assert scale.tolist() == pytest.approx([float(w.abs().max()) / 3 for w in weight])
    quant.enabled = True
    quant(weight).backward(grad)
    assert scale.grad is not None
    for channel in range(3):
        alone = gradients(
            weight[channel], scale[channel].detach(), 0, (-3, 3), grad[channel], weight[0].numel()
        )
        assert float(scale.grad[channel]) == pytest.approx(float(alone[2]), rel=1e-5)
    assert quant.learn(10 * weight) is scale  # what is learned starts once


def outliers(epoch, count=20):
    """Batches whose last feature is wide and says nothing of the label."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(count):
        x = 0.5 * torch.randn(64, 8, generator=generator)
        x[:, 7] *= 5
        yield x, x[:, :7].sum(1, keepdim=True)


def summing():
    model = nn.Sequential(nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0] * 7 + [0.0]]))
        model[0].bias.zero_()
    return model.eval()


def task_of(**options):
    settings = {
        "model": summing(),
        "inputs": [torch.zeros(2, 8)],
        "batches": outliers,
        "loss": nn.functional.mse_loss,
        "epochs": 6,
    }
    return Task(**(settings | options))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [3, 4])
def test_learned_scales_reach_a_lower_loss_than_fixed_ones_of_least_error(bits):
    kept, learned = (train(task_of(ranges=ranges), bits=bits) for ranges in ("kept", "learned"))
    assert learned.losses[-1] < 0.4 * kept.losses[-1]
    assert scale_table(learned.converted)[0][1] < 0.6 * scale_table(kept.converted)[0][1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.side, self.head = nn.ConvTranspose2d(6, 4, 1), nn.Linear(4 * 64, 3)

    def forward(self, x):
        return self.head(torch.flatten(self.side(torch.relu(self.norm(self.conv(x)))), 1))


def pictures(epoch):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(4):
        y = torch.randint(0, 3, (16,), generator=generator)
        yield torch.randn(16, 1, 8, 8, generator=generator) + y[:, None, None, None], y


def picture_task(**options):
    settings = {
        "model": Net(),
        "inputs": [torch.zeros(2, 1, 8, 8)],
        "batches": pictures,
        "loss": nn.functional.cross_entropy,
        "epochs": 4,
        "ranges": "learned",
    }
    return Task(**(settings | options))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"amp": True}, {"norms": "train"}])
def test_resuming_with_learned_scales_ends_as_the_unbroken_training_does(options, tmp_path):
    class Stop(Exception):
        pass

    def stop_in_third_epoch(epoch):
        if epoch == 2:
            raise Stop
        return pictures(epoch)

    path = tmp_path / "qat.pt"
    whole = train(picture_task(**options), bits=4, target=STEM)
    with pytest.raises(Stop):
        train(
            picture_task(batches=stop_in_third_epoch, **options),
            bits=4,
            target=STEM,
            checkpoint=path,
        )
    resumed = train(picture_task(**options), bits=4, target=STEM, checkpoint=path)
    assert resumed.losses == whole.losses
    for name, value in whole.converted.state_dict().items():
        assert torch.equal(value, resumed.converted.state_dict()[name]), name
    with pytest.raises(CacheError, match="is of another form of the model, kind of ranges;"):
        train(picture_task(ranges="kept", **options), bits=4, target=STEM, checkpoint=path)
    with pytest.raises(CacheError, match="is of another method of ranges;"):
        train(picture_task(method="minmax", **options), bits=4, target=STEM, checkpoint=path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_what_was_learned_is_frozen_and_exported(target):
    result = train(picture_task(), bits=4, target=target)
    assert result.losses[-1] < result.losses[0]
    moved = train(picture_task(epochs=0), bits=4, target=target)
    ends, starts = scale_table(result.converted), scale_table(moved.converted)
    assert [zero for _, _, zero in ends] == [zero for _, _, zero in starts]  # as calibration said
    assert all(a != b for (_, a, _), (_, b, _) in zip(ends, starts, strict=True))
    before = moved.converted.state_dict()
    for name, value in result.converted.state_dict().items():
        assert not value.requires_grad
        if name.endswith("weight_scale"):
            assert bool((value > 0).all()) and not torch.equal(value, before[name])
    x = torch.randn(5, 1, 8, 8)
    exported = to_onnx(result.converted, [x])
    assert compare(exported, result.converted, [(x,)], optimized=False).codes <= 1.001


def learned_model():
    prepared = prepare(Net().eval(), [torch.zeros(2, 1, 8, 8)], target=STEM)
    calibrate(prepared, [torch.randn(4, 1, 8, 8)])
    return prepared, learn(prepared)


@pytest.mark.slow
def test_a_scale_is_never_negative_nor_lost():
    prepared, scales = learned_model()
    assert len(scales) == len(observers_of(prepared)) + 2
    before = values_of(scales)
    with torch.no_grad():
        for scale in scales.values():
            scale.sub_(1e9)
    hold(scales, before)
    for scale, old in zip(scales.values(), before, strict=True):
        assert torch.equal(scale.detach(), old / 2)
    name, first = next(iter(scales.items()))
    with torch.no_grad():
        first.fill_(math.nan)
    with pytest.raises(CalibrationError, match=f"got nan of {name}; train slower"):
        hold(scales, values_of(scales))
    with torch.no_grad():
        first.fill_(0)
    with pytest.raises(CalibrationError, match="must stay a positive number, got 0 of"):
        hold(scales, values_of(scales))


def test_a_rate_that_is_far_too_high_is_said_or_survived():
    def fast(parameters):
        return torch.optim.Adam(parameters, 0.5)

    result = train(picture_task(optimizer=fast, epochs=2), bits=4, target=STEM)
    assert all(scale > 0 for _, scale, _ in scale_table(result.converted))


def test_learned_scales_are_where_the_model_is():
    prepared, _ = learned_model()
    there = prepared.to("meta")
    kinds = {name.rpartition(".")[2] for name, p in there.named_parameters() if p.device.type}
    assert "scale" in kinds and {p.device.type for p in there.parameters()} == {"meta"}
    assert there(torch.zeros(2, 1, 8, 8, device="meta")).device.type == "meta"


@pytest.mark.slow
def test_the_command_trains_scales(tmp_path):
    tables = {}
    for ranges in ("kept", "learned"):
        words = [
            "--ranges",
            ranges,
            "--bits",
            "4",
            "--int8-stem",
            "--scales",
            "-o",
            str(tmp_path / "q.onnx"),
        ]
        done = CliRunner().invoke(cli, ["qat", f"{TRAINING}:twice", *words])
        assert done.exit_code == 0, (done.output, done.exception)
        assert f"ranges by mse, {ranges}" in done.output
        tables[ranges] = re.findall(r"^(\w+) +([\d.e-]+) +\d+$", done.output, re.M)
    names = [[name for name, _ in table] for table in tables.values()]
    assert names[0] == names[1] and len(names[0]) == 2
    assert all(a != b for a, b in zip(*tables.values(), strict=True))
