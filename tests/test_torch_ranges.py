"""Ranges of activations in PyTorch come from the searches of `build`, to the bit."""
# ruff: noqa: E402 (torch may be missing)

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn
from torch.nn import functional as F

from calibrators.amct.ifmr import IfmrParams
from calibrators.grids import INT8, UINT8
from calibrators.scales import Scale
from calibrators.searches import SEARCHES
from deploy.errors import CalibrationError, ConfigError, FeedError, ModelError
from deploy.fx.convert import calibrate, convert, scale_table, set_phase
from deploy.fx.fakequant import FakeQuant
from deploy.fx.prepare import grid_with_bits, prepare
from deploy.fx.range_search import IfmrSearch, scale_on_grid, search_for
from deploy.targets import TARGETS
from deploy.targets.ascend.config_keys import ActivationParams
from deploy.targets.ascend.record import ifmr_params
from tests.models import run_command
from tests.torch_placed import observers_of
from tests.torch_shapes import module

torch.set_num_threads(1)


def layer(network, seed, draw):
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(draw(p.shape))
    return network


def whole_numbers(shape, below=4):
    """Sums of products of whole numbers are exact in float32, in whatever order they are added."""
    return torch.randint(1 - below, below, shape).float()


def net(draw=whole_numbers):
    return nn.Sequential(
        layer(nn.Conv2d(4, 8, 3), 1, draw),
        nn.ReLU(),
        layer(nn.Conv2d(8, 4, 3), 2, draw),
        nn.ReLU(),
        nn.Flatten(),
        layer(nn.Linear(64, 5), 3, draw),
    ).eval()


def real():
    return net(torch.randn)


def gated():
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        wide = self.other(x * self.gate(x).sigmoid() * F.hardsigmoid(self.mask(x)))
        x = self.join(torch.cat([x, wide], 1))
        pooled = F.adaptive_avg_pool2d(F.relu(x), 1).flatten(1)
        return self.head(pooled), F.silu(self.soft(x)).softmax(1)

    layers = {name: nn.Conv2d(4, 4, 1) for name in ("stem", "gate", "mask", "other", "soft")}
    model = module(forward, **layers, join=nn.Conv2d(8, 4, 1), head=nn.Linear(4, 5))
    return layer(model, 0, partial(whole_numbers, below=3))


METHOD_OPTIONS = {
    "percentile": ("--percent", "99.5"),
    "lp": ("--power", "2.4"),
    "entropy-tensorrt": ("--batch-size", "4"),
}


def images(count=17):
    x = np.rint(np.random.default_rng(0).normal(size=(count, 4, 8, 8)) * 6).astype(np.float32)
    x[2, 0, 0, 0] = 61
    return x


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("net")
    np.save(path / "x.npy", images())
    return path


def pairs(path):
    """(scale, zero_point) of every quantized activation, in the order of the graph."""
    graph = onnx.load(path).graph
    constants = {t.name: numpy_helper.to_array(t).reshape(-1) for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t).reshape(-1)
    nodes = [n for n in graph.node if n.op_type == "QuantizeLinear" and n.input[0] not in constants]
    return [(constants[n.input[1]].item(), constants[n.input[2]].item()) for n in nodes]


def export_pairs(folder, *options, net="net"):
    out = folder / "exported.onnx"
    feed = ("--input", "3x4x8x8", "--images", folder / "x.npy")
    shown = run_command("export", f"{__file__}:{net}", *feed, "--qdq", *options, "-o", out)
    return pairs(out), shown


def build_file(folder, name, *options, net="net"):
    feed = ("--input", "1x4x8x8", "--images", folder / "x.npy")
    quick = ("--effort", "0", "--duration", "0", "--out", folder / f"built-{net}")
    run_command("build", f"{__file__}:{net}", *feed, *quick, *options)
    return folder / f"built-{net}" / f"{Path(__file__).stem}-{net}{name}"


@pytest.mark.slow
@pytest.mark.parametrize("method", list(SEARCHES))
def test_export_and_build_scales_are_equal(folder, method):
    options = ("--method", method, *METHOD_OPTIONS.get(method, ()))
    ours, shown = export_pairs(folder, *options)
    assert f"ranges by {method}" in shown
    assert ours == pairs(build_file(folder, ".int8.onnx", *options))
    assert len(ours) == 4


@pytest.mark.slow
@pytest.mark.parametrize("method", [(), ("--method", "entropy")])
def test_symmetric_scales_equal_the_builds(folder, method):
    options = ("--target", "tensorrt", *method)
    ours, _ = export_pairs(folder, *options)
    assert ours == pairs(build_file(folder, ".tensorrt.qdq.onnx", *options))
    assert len(ours) == 3
    assert {zero for _, zero in ours} == {0}


@pytest.mark.slow
def test_ascend_scales_equal_the_builds(folder):
    ours, shown = export_pairs(folder, "--target", "ascend")
    assert "AMCT's IFMR" in shown
    lines = build_file(folder, "_record.txt", "--target", "ascend").read_text().splitlines()
    scales = [np.float32(line.split()[1]) for line in lines if "scale_d:" in line]
    zeros = [int(line.split()[1]) for line in lines if "offset_d:" in line]
    assert scales[0] == ours[0][0]  # the input; behind it weights are rounded otherwise
    assert zeros == [zero for _, zero in ours]
    assert scales == pytest.approx([s for s, _ in ours], rel=0.02)
    mse_scales, shown = export_pairs(folder, "--target", "ascend", "--method", "mse")
    assert "ranges by mse" in shown
    assert mse_scales != ours


@pytest.mark.slow
@pytest.mark.parametrize("method", ["minmax", "mse", "percentile"])
@pytest.mark.parametrize(
    ("target", "name"), [("onnxruntime", ".int8.onnx"), ("tensorrt", ".tensorrt.qdq.onnx")]
)
def test_ranges_of_gates_equal_the_builds(folder, target, name, method):
    options = ("--target", target, "--method", method)
    ours, _ = export_pairs(folder, *options, net="gated")
    theirs = pairs(build_file(folder, name, *options, net="gated"))
    zeros = [zero for _, zero in ours]
    if target == "onnxruntime":  # the 3 of a HardSigmoid is in the bias of the Conv before it
        assert zeros[6] == 128
        assert ours[6][0] == pytest.approx(6 / 255, rel=1e-4)
        zeros[6] = 0
    assert zeros == [zero for _, zero in theirs]
    # a Sigmoid is rounded otherwise in torch
    assert [s for s, _ in ours] == pytest.approx([s for s, _ in theirs], rel=1e-5)
    ends = [s * 255 for s, _ in ours]
    if (target, method) == ("onnxruntime", "minmax"):  # the inputs of Sigmoid and HardSigmoid
        assert {16, 6} <= {round(end, 4) for end in ends}
        assert ends[0] > 16


@pytest.mark.slow
def test_following_ranges_stay_in_bounds():
    model, x = gated(), torch.from_numpy(images())
    prepared = prepare(model, [x[:2]])
    calibrate(prepared, [x])
    set_phase(prepared, observe=True, quantize=False)
    prepared(x)
    bounded = [q for q in observers_of(prepared).values() if q.saturation_limits is not None]
    assert {tuple(np.round(q.saturation_limits[:2], 4)) for q in bounded} >= {
        (-8, 8),
        (-3, 3),
        (-10, np.inf),
    }
    for quant in bounded:
        low, high, _ = quant.saturation_limits
        step = float(quant.scale)  # an exact 0 moves the ends by less than one
        assert low - step <= float(quant.lo)
        assert float(quant.hi) <= high + step
    assert [name for name, _ in prepared.named_modules() if "watch" in name]
    assert not [name for name, _ in convert(prepared).named_modules() if "watch" in name]


@pytest.mark.slow
def test_real_ranges_differ_only_by_rounding(folder):
    for options in (("--method", "minmax"), ("--method", "percentile"), ()):
        ours, _ = export_pairs(folder, *options, net="real")
        theirs = pairs(build_file(folder, ".int8.onnx", *options, net="real"))
        assert ours[0] == theirs[0]
        # a value that falls into the next bin may move a search to the next of its candidates
        assert [s for s, _ in ours] == pytest.approx([s for s, _ in theirs], rel=0.011)


def test_default_search_equals_the_builds(wording):
    for name, target in TARGETS.items():
        assert bool(target.own_method) == isinstance(search_for(name), IfmrSearch)
    params = ifmr_params(ActivationParams(asymmetric=True))
    assert params == IfmrParams(with_offset=True)
    assert search_for("onnxruntime").label == "mse"
    assert search_for("ascend", "percentile 99.5").label == "percentile 99.5"
    with pytest.raises(ConfigError) as raised:
        search_for("onnxruntime", "ema")
    wording.check(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*SEARCHES, "entropy-tensorrt 4"])
def test_batch_size_keeps_the_scales(method):
    x, target = torch.from_numpy(images(16)), "onnxruntime"
    tables = []
    for size in (1, 3, 16):
        prepared = prepare(net(), [x[:2]], target=target)
        runs = calibrate(prepared, x.split(size), search=search_for(target, method))
        assert runs == (16 if str(method).startswith("entropy-t") else -(-16 // size))
        tables.append(scale_table(prepared))
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.slow
def test_batch_size_keeps_amcts_scales():
    x, scale_lists = torch.from_numpy(images(16)), []
    for size in (1, 16):
        prepared = prepare(net(), [x[:2]], target="ascend")
        calibrate(prepared, x.split(size), search=search_for("ascend"))
        scale_lists.append([scale for _, scale, _ in scale_table(prepared)])
    # to the bit of what is the same to the bit, which sums with rounded weights are not
    assert scale_lists[0][0] == scale_lists[1][0]
    assert scale_lists[0] == pytest.approx(scale_lists[1], rel=1e-5)


@pytest.mark.slow
def test_two_inputs_count_alike():

    layers = {"a": nn.Linear(40, 9), "b": nn.Linear(40, 9)}
    model, x = module(lambda self, x, y: self.a(x) + self.b(y), **layers), torch.randn(6, 40)
    tables = []
    for size in (2, 6):
        prepared = prepare(model, [x, x.clone()], target="tensorrt")
        batches = [(a, 5 * a) for a in x.split(size)]
        calibrate(prepared, batches, search=search_for("tensorrt", "entropy-tensorrt"))
        tables.append([scale for _, scale, _ in scale_table(prepared)])
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][1] == pytest.approx(5 * tables[0][0], rel=1e-5), scale_table(prepared)


@pytest.mark.slow
def test_first_batch_needs_full_batches(wording):
    x, search = torch.from_numpy(images(9)), search_for("onnxruntime", "entropy-tensorrt 4")
    tables = []
    for count in (8, 9):  # the ninth fills none
        prepared = prepare(net(), [x[:2]])
        assert calibrate(prepared, [x[:count]], search=search) == 8
        tables.append(scale_table(prepared))
    assert tables[0] == tables[1]
    with pytest.raises(FeedError) as raised:
        calibrate(prepared, [x[:3]], search=search)
    wording.check(raised.value)

    fixed = module(lambda self, x: self.layer(x.reshape(2, 64)), layer=nn.Linear(64, 2))
    prepared = prepare(fixed, [x[:2, :1]])
    with pytest.raises(ModelError) as raised:
        calibrate(prepared, [x[:2, :1]], search=search_for("tensorrt", "entropy-tensorrt"))
    wording.check(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "ascend"])
def test_tensors_of_bad_data_are_named(target, wording):
    x, search = torch.from_numpy(images(4)), search_for(target)
    for wrong in (float("inf"), float("nan")):
        bad = x.clone()
        bad[3, 1, 2, 3] = wrong
        prepared = prepare(net(), [x[:2]], target=target)
        with pytest.raises(CalibrationError) as raised:
            calibrate(prepared, [x, bad], search=search)
        wording.check(raised.value)

    layers = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
    overflows = module(lambda self, x: self.b(torch.relu(self.a(x)).exp()), **layers)
    prepared = prepare(overflows, [torch.ones(2, 3)], target=target)
    with pytest.raises(CalibrationError) as raised:
        calibrate(prepared, [1e4 * torch.eye(3), -1e4 * torch.eye(3)], search=search)
    wording.check(raised.value)
    prepared = prepare(net(), [x[:2]], target=target)
    prepared.add_module("idle", FakeQuant(UINT8, "idle"))
    with pytest.raises(CalibrationError) as raised:
        calibrate(prepared, [x], search=search)
    wording.check(raised.value)
    prepared = prepare(net(), [x[:2]], target=target)
    calibrate(prepared, [torch.zeros(2, 4, 8, 8), torch.zeros(0, 4, 8, 8)], search=search)
    lowest = -128 if target == "ascend" else 0
    assert scale_table(prepared)[0][1:] == (1.0, lowest)  # what was always 0 stays an exact 0


def test_grid_scale_equals_the_calibrators():
    rng = np.random.default_rng(3)
    for _ in range(300):
        eight = (UINT8, INT8, replace(INT8, symmetric=False))[rng.integers(3)]
        grid = grid_with_bits(eight, int(rng.integers(2, 9)))
        lo, hi = np.sort(rng.normal(size=2) * 10.0 ** rng.integers(-6, 6))
        amax = float(max(-lo, hi))
        scale = Scale(lo=lo, hi=hi, amax=amax, observed_min=lo, observed_max=hi, method="")
        ends = (-amax, amax) if grid.symmetric else (lo, hi)
        assert scale_on_grid(*ends, grid) == scale.on(grid)


@pytest.mark.slow
def test_fewer_bits_use_their_grid(wording):
    x = torch.from_numpy(images(8))
    for target in ("onnxruntime", "tensorrt"):
        widths = []
        for bits in (8, 4, 2):
            prepared = prepare(net(), [x[:2]], target=target, bits=bits)
            calibrate(prepared, [x], search=search_for(target, "mse"))
            widths.append(scale_table(prepared)[0][1] * 2**bits)
        assert widths[0] > 1.1 * widths[1] > 1.2 * widths[2]  # coarser steps are worth clipping for
    prepared = prepare(net(), [x[:2]], bits=4)
    with pytest.raises(ConfigError) as raised:
        calibrate(prepared, [x], search=search_for("onnxruntime", "entropy"))
    wording.check(raised.value)


def test_export_refuses_a_useless_method(run, refusal):
    base = ["export", f"{__file__}:net", "--input", "2x4x8x8", "-o", "x.onnx"]
    for options, message in (
        (["--method", "mse"], "--method goes with --qdq"),
        (["--qdq", "--mode", "dynamic", "--percent", "99"], "belongs to --method percentile"),
        (["--qdq", "--mode", "dynamic", "--method", "mse"], "--method goes with --mode static"),
    ):
        assert message in refusal(*base, *options)
    code, _, message = run(*base, "--qdq", "--method", "ema")
    assert code == 2
    assert all(name in message for name in SEARCHES)
