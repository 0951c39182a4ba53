"""prepare -> calibrate -> convert -> export, on every target's grid, checked in onnxruntime."""
# ruff: noqa: E402 (torch may be missing)

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn

from calibrators.errors import CalibrationError
from calibrators.grids import UINT8, quantize_per_tensor, quantize_weight, weight_scales
from calibrators.weights import PAIR_LIMIT, pair_scales, pair_sums
from deploy.errors import ConfigError, ExportError, FeedError, ModelError
from deploy.fx.checked_export import export_float, export_quantized
from deploy.fx.convert import calibrate, convert, freeze_norms, scale_table, set_phase
from deploy.fx.export import compare_with_torch, to_onnx
from deploy.fx.fakequant import FakeQuant, FixedQuant
from deploy.fx.int8_layers import IntLayer, QatConvBn, weight_quantizer
from deploy.fx.modes import (
    compare_modes,
    format_modes,
    measure_mode,
    quantize_model,
    stored_bytes,
)
from deploy.fx.prepare import grid_with_bits, prepare, prepare_part
from deploy.fx.range_search import scale_on_grid, search_for
from deploy.fx.source import load_module
from deploy.graph.placement import ASCEND, ONNXRUNTIME, TENSORRT
from deploy.targets import TARGETS, OnnxRuntime
from deploy.targets.stored_weights import find_saturating_layers
from tests.torch_placed import observers_of, real_model
from tests.torch_shapes import module

torch.set_num_threads(1)

HERE = Path(__file__).parent

GRIDS = {placement.name: placement.grid for placement in (ONNXRUNTIME, TENSORRT, ASCEND)}

STEM = OnnxRuntime(int8_stem=True)  # for networks whose first Conv is small


@pytest.fixture(scope="module")
def resnet():
    return load_module(f"{HERE / 'resnet18.py'}:small")


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 64, 64, generator=generator),) for _ in range(3)]


def calibrated(model, batches, *, method=None, **options):
    prepared = prepare(model, batches[0], **options)
    calibrate(prepared, batches, search=search_for(options.get("target", "onnxruntime"), method))
    return prepared


class StackedChunks(nn.Module):
    """Reads all outputs of a chunk at once."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.last = nn.Conv2d(4, 4, 1)
        self.quant_last = nn.Flatten()  # the name of a quantizer, that of `last`

    def forward(self, x):
        chunks = torch.chunk(input=torch.relu(self.first(x)), chunks=2, dim=1)
        return self.quant_last(self.last(torch.stack(chunks).sum(0)))


def test_chunks_that_are_stacked_are_prepared():
    prepared = prepare(StackedChunks().eval(), [torch.randn(2, 3, 8, 8)], leaves=["quant_last"])
    assert [name for name, _, _ in scale_table(prepared)] == ["sum_1", "last"]
    assert isinstance(prepared.quant_last, nn.Flatten)


def test_leaf_keeps_its_hooks():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 1)).eval()
    model[1].register_forward_hook(lambda _act, _inputs, output: 2 * output)
    x = torch.randn(2, 3, 8, 8)
    prepared = prepare(model, [x], leaves=["SiLU"])
    assert torch.allclose(prepared(x), model(x), atol=1e-5)


@pytest.mark.parametrize(
    ("norms", "leaves"),
    [("fold", ["side"]), pytest.param("train", (), marks=pytest.mark.slow)],
)
def test_output_size_is_kept(norms, leaves):
    def upsample(self, x):
        y = self.up(self.conv(x), output_size=self.side(x).shape[2:])
        return self.last(self.bn(y))

    parts = {"conv": nn.Conv2d(3, 8, 3, stride=2), "up": nn.ConvTranspose2d(8, 4, 3, stride=2)}
    parts |= {"side": nn.ReLU(), "bn": nn.BatchNorm2d(4), "last": nn.Conv2d(4, 4, 1)}
    model = module(upsample, **parts).eval()
    batches = [(torch.randn(2, 3, 8, 8),)]
    options = {"target": "tensorrt", "norms": norms, "leaves": leaves}
    prepared = calibrated(model, batches, **options)
    outputs = prepared.train()(*batches[0])
    assert outputs.shape == model(*batches[0]).shape == (2, 4, 8, 8)
    converted = convert(prepared)
    assert isinstance(converted.up, IntLayer)
    agreement = compare_with_torch(to_onnx(converted, batches[0]), converted, batches)
    assert agreement.codes <= 1.0


def grid_of(quant):
    """Scale and zero point as plain numbers."""
    return float(quant.scale), int(quant.zero_point)


@pytest.fixture(scope="module")
def converted_and_exported(resnet, batches):
    """Target -> (converted, exported), each made once."""
    models_by_target = {}

    def make(target="onnxruntime"):
        if target not in models_by_target:
            converted = convert(calibrated(resnet, batches, target=target))
            models_by_target[target] = converted, to_onnx(converted, batches[0])
        return models_by_target[target]

    return make


def operators(model):
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.slow
def test_prepared_model_has_the_target_sites(resnet, batches):
    for target in TARGETS:
        prepared = prepare(resnet, batches[0], target=target)
        assert torch.allclose(prepared(*batches[0]), resnet(*batches[0]), atol=1e-5)
    sites_by_target = {t: sites(prepare(resnet, batches[0], target=t)) for t in TARGETS}
    assert "x" in sites_by_target["onnxruntime"]
    assert "fc" not in sites_by_target["onnxruntime"]
    assert "layer1_0_relu" in sites_by_target["onnxruntime"]  # after the ReLU, not between
    assert "layer2_0_conv2" in sites_by_target["onnxruntime"]  # feeds Add, no ReLU between
    assert "layer1_0_conv2" not in sites_by_target["tensorrt"]  # the branch that Add fuses with
    assert set(sites_by_target["ascend"]) < set(sites_by_target["tensorrt"])
    # a pool in int8, which has the scale of what it reads
    assert (
        sites_by_target["tensorrt"]["maxpool"][1]
        == sites_by_target["tensorrt"]["relu"][1]
        == "quant_relu"
    )
    assert "relu" not in sites_by_target["ascend"]
    assert sites_by_target["ascend"]["maxpool"][0] == {"layer1_0_conv1"}
    # the skip branch of Add, which is the conv's input too: one site, both readers
    readers = sites_by_target["tensorrt"]["maxpool"][0]
    assert len(readers) == 2
    assert "layer1_0_conv1" in readers
    assert readers & {"iadd", "add"}


def sites(prepared):
    """Quantized tensor -> (who reads it so, its quantizer)."""
    readers_by_tensor = {}
    for node in prepared.graph.nodes:
        if str(node.target).startswith("quant_"):
            readers = {user.name for user in node.users}
            readers_by_tensor[node.args[0].name] = readers, node.target
    return readers_by_tensor


@pytest.mark.slow
def test_scales_are_shared_by_target():
    branches = module(
        lambda self, x: self.out(self.pool(torch.cat([self.a(x), self.b(x) * 0.5], 1))),
        a=nn.Conv2d(3, 4, 1),
        b=nn.Conv2d(3, 4, 1),
        pool=nn.MaxPool2d(2),
        out=nn.Conv2d(8, 2, 1),
    )

    def groups(**options):
        prepared = prepare(branches, [x], **options)
        return prepared, {name: quant for name, (_, quant) in sites(prepared).items()}

    x = torch.randn(2, 3, 4, 4)
    prepared, quantizer_by_tensor = groups(target=STEM)
    assert quantizer_by_tensor["cat"] == quantizer_by_tensor["pool"]
    assert len(set(quantizer_by_tensor.values())) == len(quantizer_by_tensor) - 1
    calibrate(prepared, [x])
    exported = to_onnx(convert(prepared), [x])
    assert compare_with_torch(exported, convert(prepared), [[x]], optimized=False).codes <= 1.0
    _, quantizer_by_tensor = groups(target="tensorrt")
    assert set(quantizer_by_tensor) == {"x", "cat", "pool"}
    assert quantizer_by_tensor["cat"] == quantizer_by_tensor["pool"]


@pytest.mark.slow
def test_shared_range_spans_all_tensors():
    def both(self, x, y):
        return torch.cat([self.a(x), self.b(y)], 1)

    torch.manual_seed(0)
    model = module(
        lambda self, x, y: self.out(self.pool(both(self, x, y))),
        a=nn.Conv2d(3, 3, 1),
        b=nn.Conv2d(3, 3, 1),
        pool=nn.MaxPool2d(2),
        out=nn.Conv2d(6, 2, 1),
    )
    batches = [(torch.randn(2, 3, 4, 4), 50 * torch.randn(2, 3, 4, 4)) for _ in range(4)]
    prepared = calibrated(model, batches, method="minmax", target=STEM)
    shared = observers_of(prepared)["cat"]  # of its pool too
    assert shared.calls_per_batch == 2
    outputs = [both(model, *b).detach() for b in batches]
    ends = min(float(x.min()) for x in outputs), max(float(x.max()) for x in outputs)
    assert grid_of(shared) == scale_on_grid(*ends, shared.grid)
    # following goes on from there, one step a batch
    prepared = prepare(model, batches[0], target=STEM)
    calibrate(prepared, batches[:1], search=search_for("onnxruntime", "minmax"))
    set_phase(prepared, observe=True, quantize=False)
    shared = observers_of(prepared)["cat"]
    expected = float(shared.hi)
    for batch, x in zip(batches[1:], outputs[1:], strict=True):
        prepared(*batch)
        expected += 0.05 * (float(x.max()) - expected)
    assert float(shared.hi) == pytest.approx(expected, rel=1e-5)
    assert grid_of(shared) == scale_on_grid(float(shared.lo), float(shared.hi), shared.grid)
    quant = FakeQuant(UINT8, "t")
    quant.calls_per_batch = 2
    quant.update(torch.tensor([5.0]))
    quant.start_batch()  # broken off: the next tensor is the first of its batch
    quant.update(torch.tensor([1.0]))
    quant.update(torch.tensor([3.0]))
    assert float(quant.hi) == 3.0
    assert int(quant.seen) == 1


@pytest.mark.slow
def test_scales_are_equal_in_every_run(converted_and_exported, resnet, batches):
    tables = {name: scale_table(converted_and_exported(name)[0]) for name in TARGETS}
    zeros = {}
    for target, table in tables.items():
        _, scales, zero_points = zip(*table, strict=True)
        assert min(scales) > 0
        zeros[target] = {*zero_points}
    assert zeros["tensorrt"] == {0}
    assert min(len(zeros[t]) for t in ("onnxruntime", "ascend")) > 1
    relu = {name: zero for name, _, zero in tables["ascend"]}
    assert relu["layer1_0_relu"] == -128  # a ReLU starts at the lowest code
    assert scale_table(calibrated(resnet, batches)) == tables["onnxruntime"]
    input_quantizer = observers_of(calibrated(resnet, batches, method="minmax"))["x"]
    stacked = torch.cat([b[0] for b in batches])
    assert grid_of(input_quantizer) == scale_on_grid(
        float(stacked.min()), float(stacked.max()), input_quantizer.grid
    )


@pytest.mark.slow
def test_weights_equal_the_calibrators(resnet, batches):
    prepared = calibrated(resnet, batches)
    layer = convert(prepared).get_submodule("layer1.0.conv1")
    assert isinstance(layer, IntLayer)
    assert layer.weight_int.dtype == torch.int8
    weight = prepared.get_submodule("layer1.0.conv1").layer.weight.detach().numpy()
    scales = pair_scales(weight, weight_scales(weight, 0))
    assert np.allclose(layer.weight_scale.numpy(), scales, rtol=1e-7)
    expected = quantize_weight(weight, scales, 0)
    assert np.abs(layer.weight_int.numpy().astype(int) - expected).max() <= 1
    assert (layer.weight_int.numpy() == expected).mean() > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
def test_exported_model_differs_by_one_code(converted_and_exported, batches, target):
    converted, exported = converted_and_exported(target)
    onnx.checker.check_model(exported, full_check=True)
    assert {e.domain: e.version for e in exported.opset_import} == {"": 18}
    mixed = [*batches, (batches[0][0][:1],), (torch.cat([b[0] for b in batches])[:7],)]
    exact = compare_with_torch(exported, converted, mixed, optimized=False)
    assert exact.argmax == 1.0
    assert exact.codes <= 1.0
    used = compare_with_torch(exported, converted, mixed, int8_kernels=target == "onnxruntime")
    assert used.argmax == 1.0
    assert used.codes <= 1.0
    assert "steps of the last quantized tensor" in str(used)


@pytest.mark.slow
def test_export_is_int8_and_deterministic(converted_and_exported, kernels, resnet, batches):
    converted, exported = converted_and_exported()
    ran = Counter(kernels(exported))
    assert ran["QLinearConv"] == 20
    assert ran["QLinearAdd"] == 8
    assert ran["QLinearGlobalAveragePool"] == 1
    assert not {"Conv", "FusedConv", "Add", "Relu", "Clip"} & set(ran)
    sizes = Counter()
    for tensor in exported.graph.initializer:
        sizes[tensor.data_type] += int(np.prod(tensor.dims))
    parameters = sum(p.numel() for n, p in resnet.named_parameters() if p.dim() > 1)
    assert sizes[onnx.TensorProto.INT8] >= parameters
    assert sizes[onnx.TensorProto.FLOAT] < parameters / 20
    assert b"/work" not in exported.SerializeToString()
    assert not exported.graph.node[0].doc_string
    second_bytes = to_onnx(converted, batches[0]).SerializeToString(deterministic=True)
    assert second_bytes == exported.SerializeToString(deterministic=True)


def test_ema_follows_its_formula():
    quant = FakeQuant(UINT8, "t")
    for hi in (4.0, 8.0):
        quant.update(torch.tensor([0.0, hi]))
    assert float(quant.hi) == pytest.approx(4.2)
    assert float(quant.scale) == pytest.approx(4.2 / 255)


@pytest.mark.slow
def test_fewer_bits_add_a_clip():
    model, data = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)), torch.randn(2, 3, 8, 8)
    converted = convert(calibrated(model.eval(), [(data,)], bits=4, target=STEM))
    assert converted.get_submodule("0").weight_int.abs().max() == 7
    exported = to_onnx(converted, [data])
    assert operators(exported)["Clip"] == 3
    assert compare_with_torch(exported, converted, [[data * 2]], optimized=False).codes <= 1e-3
    x = torch.tensor([-1.0, 0.0, 0.26, 9.0])
    fixed = FixedQuant(grid_with_bits(UINT8, 2), "t", torch.tensor(0.5), torch.tensor(1))
    assert fixed(x).tolist() == [-0.5, 0.0, 0.5, 1.0]


def test_mode_is_measured_beside_empty_outputs():
    model = module(lambda self, x: (x, x[:, :0]))
    result = measure_mode("static", model, model, [[torch.ones(1, 3)]])
    assert result.max_error == 0
    assert result.sqnr_db == np.inf
    silent = module(lambda self, x: None)
    assert measure_mode("static", silent, silent, [[torch.ones(1, 3)]]).max_error == 0


def test_error_of_bools_and_bytes_is_measured():
    x = torch.arange(4.0).reshape(1, 4)
    model = module(lambda self, x: (x > 1, (x + 1).to(torch.uint8)))  # 0011 and 1234
    converted = module(lambda self, x: (x > 2, (x + 2).to(torch.uint8)))  # 0001 and 2345
    result = measure_mode("static", model, converted, [[x]])
    assert result.max_error == 1
    assert result.sqnr_db == pytest.approx(10 * np.log10((2 + 30) / (1 + 4)))


class MixedOutputs(nn.Module):
    """A Linear whose outputs are floats, bools, a size and a few columns."""

    def __init__(self, columns):
        super().__init__()
        self.fc = nn.Linear(64, 64)
        self.columns = columns

    def forward(self, x):
        y = self.fc(x)
        return y, y > 0, y.shape[0], y[:, : self.columns]


@pytest.mark.parametrize("columns", [0, 1])
def test_converted_model_returns_more_than_floats(columns):
    x = torch.randn(2, 64)
    result = export_quantized(MixedOutputs(columns), [x], mode="weight-only")
    assert len(result.model.graph.output) == 3  # without the size
    assert result.agreement.argmax_rows == 0
    assert "arg-max" not in result.agreement.to_screen()


def test_calibration_keeps_modes_of_modules():
    def run(self, x):
        return self.drop(self.conv(x))

    x = torch.randn(2, 3, 4, 4)
    model = module(run, conv=nn.Conv2d(3, 4, 1), drop=nn.Dropout())
    prepared = prepare(model, [x], target="tensorrt", norms="train").train()
    prepared.drop.eval()  # as fine-tuning freezes a part of a model
    calibrate(prepared, [x])
    assert prepared.training
    assert not prepared.drop.training


@pytest.mark.slow
def test_bad_data_and_options_are_refused(resnet, batches, wording):
    prepared = prepare(resnet, batches[0])
    with pytest.raises(FeedError) as refusal:
        calibrate(prepared, [])
    wording.check(refusal.value)
    with pytest.raises(CalibrationError) as refusal:
        convert(prepared)
    wording.check(refusal.value)
    with pytest.raises(CalibrationError) as refusal:
        calibrate(prepared, [torch.full((1, 3, 64, 64), torch.nan)])
    wording.check(refusal.value)
    with pytest.raises(ExportError, match="converted before export"):
        to_onnx(prepared, batches[0])
    with pytest.raises(ModelError) as refusal:
        prepare(resnet, [torch.zeros(1, 4, 64, 64)])
    wording.check(refusal.value)
    prepared = prepare(resnet, batches[0], skip=["conv1"])
    assert isinstance(prepared.get_submodule("conv1"), nn.Conv2d)
    assert "x" not in observers_of(prepared)
    for options, reason in (
        ({"skip": ["nope"]}, "got nope"),
        ({"mode": "magic"}, "a mode is one of"),
        ({"target": "tpu"}, "a target is one of"),
        ({"bits": 16}, "bits are 2 to 8"),
        ({"target": 3}, "a target is one of"),
        ({"skip": "conv1"}, "skip takes a list .*got 'conv1'"),
        ({"leaves": [3]}, r"leaves takes a list .*got \[3\]"),
        ({"custom": 3}, "from_float, got 3"),
    ):
        with pytest.raises(ConfigError, match=reason):
            prepare(resnet, batches[0], **options)


def test_model_without_int8_layers_is_refused():
    x = torch.zeros(1, 3, 4, 4)
    net = nn.Sequential(nn.Conv2d(3, 4, 1)).eval()
    with pytest.raises(ExportError, match="none of 1 layers"):
        prepare(net, [x], mode="dynamic")
    with pytest.raises(ExportError, match="none of 1 layers"):
        convert(net)  # not prepared


def failing_loader():
    yield torch.zeros(1, 3, 4, 4)
    raise LookupError("no such photo")


def test_data_that_cannot_be_read_is_refused():
    x = torch.ones(1, 3, 4, 4)
    net = nn.Sequential(nn.Conv2d(3, 4, 1)).eval()
    prepared = prepare(net, [x], target="tensorrt")
    with pytest.raises(FeedError, match=r"LookupError: no such photo at .*raise LookupError"):
        calibrate(prepared, failing_loader())
    with pytest.raises(FeedError, match="got int"):
        calibrate(prepared, 3)
    with pytest.raises(FeedError, match="got str"):
        export_float(net, ["x"])
    with pytest.raises(ConfigError, match="got 'mse'"):
        calibrate(prepared, [x], search="mse")
    assert calibrate(prepared, x) == 1  # a batch


@pytest.mark.slow
def test_modes_have_size_and_error(resnet, batches):
    results = {r.mode: r for r in compare_modes(resnet, batches[0], batches)}
    assert list(results) == ["float", "weight-only", "dynamic", "static"]
    assert results["float"].size == stored_bytes(resnet)
    assert results["float"].max_error == 0
    assert results["static"].ratio > 3.4
    assert results["weight-only"].ratio > 3.4
    assert 1.0 < results["dynamic"].ratio < 1.1  # one small Linear
    for mode in ("weight-only", "dynamic", "static"):
        assert results[mode].sqnr_db > 20
        assert 0 < results[mode].max_error < 0.01
    assert results["static"].sqnr_db < results["dynamic"].sqnr_db
    heading = format_modes(list(results.values())).splitlines()[0]
    assert heading.split() == ["Mode", "Weight", "bytes", "Smaller", "Max", "error", "SQNR", "dB"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "operator"),
    [
        ("weight-only", "DequantizeLinear"),
        ("dynamic", "DynamicQuantizeLinear"),
    ],
)
def test_modes_export_and_agree(mode, operator):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    batches = [(torch.randn(4, 3, 8, 8),)]
    converted = quantize_model(model, batches[0], batches, mode=mode)
    exported = to_onnx(converted, batches[0])
    assert operators(exported)[operator] >= 1
    assert operators(exported)["QuantizeLinear"] == 0
    agreement = compare_with_torch(exported, converted, batches, optimized=False)
    assert agreement.argmax == 1.0
    assert agreement.max_difference < 1e-5


class NonTraceable(nn.Module):
    """Control flow on data, so that it must be kept whole."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        if x.sum() > 1e9:
            return -x
        return torch.einsum("nchw,dc->ndhw", x, self.weight)


class ObservedNonTraceable(nn.Module):
    """A module as users of torch's FX quantization write it."""

    def __init__(self, float_module):
        super().__init__()
        self.weight = float_module.weight
        self.observer = float_module.qconfig.activation()

    @classmethod
    def from_float(cls, float_module):
        assert hasattr(float_module, "qconfig")
        observed = cls(float_module)
        observed.qconfig = float_module.qconfig
        return observed

    def forward(self, x):
        return torch.einsum("nchw,dc->ndhw", self.observer(x), self.weight)


class StaticQuantNonTraceable(nn.Module):
    def __init__(self, observed):
        super().__init__()
        self.register_buffer("weight", observed.weight.detach())
        scale, zero_point = observed.activation_post_process.calculate_qparams()
        self.scale, self.zero_point = float(scale), int(zero_point)

    @classmethod
    def from_observed(cls, observed):
        assert hasattr(observed, "qconfig")
        return cls(observed)

    def forward(self, x):
        return torch.einsum("nchw,dc->ndhw", x, self.weight)


class DynamicQuantNonTraceable(NonTraceable):
    @classmethod
    def from_observed(cls, module):
        quantized = cls()
        quantized.weight = module.weight
        return quantized


def net():
    parts = {"conv": nn.Conv2d(3, 4, 1), "nt": NonTraceable(), "head": nn.Conv2d(4, 2, 1)}
    return module(lambda self, x: self.head(self.nt(self.conv(x))), **parts)


@pytest.mark.slow
def test_custom_module_is_observed_and_quantized():
    model, x = net(), torch.randn(2, 3, 4, 4)
    prepared = prepare(model, [x], custom={NonTraceable: ObservedNonTraceable})
    assert isinstance(prepared.nt, ObservedNonTraceable)
    assert torch.allclose(prepared(x), model(x), atol=1e-5)
    calibrate(prepared, [x])
    converted = convert(prepared, {ObservedNonTraceable: StaticQuantNonTraceable})
    assert isinstance(converted.nt, StaticQuantNonTraceable)
    scales = {name: scale for name, scale, _ in scale_table(converted)}
    assert converted.nt.scale == pytest.approx(scales["nt"])
    assert (converted(x) - model(x)).abs().max() < 0.1


@pytest.mark.parametrize("mode", ["dynamic", "weight-only"])
def test_custom_module_without_observed_class(mode):
    model, x = net(), torch.randn(2, 3, 4, 4)
    prepared = prepare(model, [x], mode=mode, leaves=[NonTraceable])
    set_phase(prepared, observe=False, quantize=True)
    converted = convert(prepared, {NonTraceable: DynamicQuantNonTraceable})
    assert type(converted.nt) is DynamicQuantNonTraceable
    assert (converted(x) - model(x)).abs().max() < 0.1
    with pytest.raises(ConfigError, match="of classes in the prepared model, got LazyLinear"):
        convert(prepared, {nn.LazyLinear: DynamicQuantNonTraceable})


def test_leaf_stays_float():
    model, x = net(), torch.randn(2, 3, 4, 4)
    prepared = calibrated(model, [(x,)], leaves=["nt"])
    assert type(prepared.nt) is NonTraceable
    assert (prepared(x) - model(x)).abs().max() < 0.1


@pytest.mark.slow
def test_only_chosen_submodule_is_quantized(resnet):
    def twice_backbone(self, x):
        return self.backbone(x) if x.sum() > 1e9 else self.backbone(x) * 2

    model, x = module(twice_backbone, backbone=resnet), torch.randn(2, 3, 64, 64)
    quantized = quantize_model(model, [x], [(x,)], mode="static", only="backbone")
    assert isinstance(quantized.backbone.fc, IntLayer)
    prepared = prepare_part(model, "backbone", [x])
    assert torch.allclose(prepared(x), model(x), atol=1e-5)
    calibrate(prepared, [x])
    converted = convert(prepared)
    assert sum(isinstance(m, IntLayer) for m in converted.modules()) == 21
    assert 0 < (converted(x) - model(x)).abs().max() < 0.05


@pytest.mark.slow
def test_trained_norms_fold_exactly():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    )
    x = torch.randn(8, 3, 8, 8)
    prepared = prepare(model.train(), [x], norms="train", target=STEM)
    layer = prepared.get_submodule("0")
    assert isinstance(layer, QatConvBn)
    assert torch.allclose(prepared(x), model(x), atol=1e-4)  # in train mode, by the batch
    calibrate(prepared, [x])
    mean_before = layer.norm.running_mean.clone()
    prepared.train()(x)
    assert not torch.equal(layer.norm.running_mean, mean_before)
    freeze_norms(prepared)
    assert layer.frozen
    mean_before = layer.norm.running_mean.clone()
    frozen = prepared(x)
    assert torch.equal(layer.norm.running_mean, mean_before)
    converted = convert(prepared)
    assert isinstance(converted.get_submodule("0"), IntLayer)
    step = scale_table(converted)[-1][1]  # the bias is rounded too, which may move a code
    assert (converted(x) - frozen).abs().max() <= 1.001 * step
    assert ((converted(x) - frozen).abs() < 1e-5).float().mean() > 0.99


@pytest.mark.slow
def test_grouped_and_transposed_layers_are_quantized():
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=4, padding_mode="reflect"),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1),
        nn.ConvTranspose2d(6, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(4 * 20 * 20, 5),
    ).eval()
    x = torch.randn(2, 4, 8, 8)
    converted = convert(calibrated(model, [(x,)], target="tensorrt"))
    assert converted.get_submodule("2").weight_scale.shape == (6,)
    assert converted.get_submodule("3").weight_scale.shape == (1,)
    agreement = compare_with_torch(to_onnx(converted, [x]), converted, [[x]], optimized=False)
    assert agreement.codes <= 1.0
    assert (converted(x) - model(x)).abs().max() < 0.1


@pytest.mark.slow
def test_efficientnet_lite0_in_int8(kernels):
    model = real_model("efficientnet_lite0.py:make")
    x = torch.rand(2, 3, 224, 224) * 2 - 1
    converted = convert(calibrated(model, [(x,)], target=STEM))
    exported = to_onnx(converted, [x])
    assert "Pad" not in operators(exported)  # padding joined its convolution
    ran = Counter(kernels(exported))
    assert ran["QLinearConv"] == 49
    assert ran["QLinearAdd"] == 9
    assert not {"Conv", "FusedConv", "Clip", "Pad"} & set(ran)
    assert compare_with_torch(exported, converted, [[x]]).argmax == 1.0
    assert len(exported.SerializeToString()) < 0.27 * stored_bytes(model)
    assert stored_bytes(converted) < 0.27 * stored_bytes(model)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "convs"), [("pnet", 32, 5), ("rnet", 24, 3)])
def test_mtcnn_in_int8(name, size, convs, kernels):
    model = real_model(f"mtcnn.py:{name}")
    x = torch.rand(4, 3, size, size) * 2 - 1
    converted = convert(calibrated(model, [(x,)], target=STEM))
    exported = to_onnx(converted, [x])
    assert kernels(exported).count("QLinearConv") == convs
    agreement = compare_with_torch(exported, converted, [[x], [x[:1]]], optimized=False)
    assert agreement.argmax >= 0.999
    assert agreement.max_difference < 0.02


def test_model_file_imports_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("width = 3\n")
    (tmp_path / "net.py").write_text(
        "from torch import nn\nfrom neighbour import width\n"
        "def make():\n    return nn.Linear(width, 1)\n"
    )
    assert load_module(f"{tmp_path / 'net.py'}:make").in_features == 3
    sys.modules.pop("neighbour")


def test_searched_ranges_lower_the_error():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    x = torch.randn(8, 3, 16, 16)
    x[0, 0, 0, 0] = 40.0  # one outlier

    def measure_error(method, x, bits):
        prepared = calibrated(model, [(x,)], bits=bits, target="tensorrt", method=method)
        with torch.no_grad():
            error = float((prepared(x) - model(x)).square().sum())
        return error, float(next(iter(observers_of(prepared).values())).scale)

    (plain, widest), (searched, scale) = (
        measure_error(method, x, 4) for method in ("minmax", "mse")
    )
    assert searched < 0.7 * plain
    assert scale < 0.7 * widest
    flat = torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8)
    assert measure_error("mse", flat, 8)[1] == pytest.approx(
        measure_error("minmax", flat, 8)[1], rel=0.01
    )


def test_eager_mode_stubs_trace_through():
    """Stubs and FloatFunctional trace through: they are identities and plain operators here."""
    ao = pytest.importorskip("torch.ao.quantization", reason="torch has dropped torch.ao")
    from torch.ao.nn.quantized import FloatFunctional

    def eager(self, x):
        x = self.quant(x)
        main, side = self.relu(self.bn(self.conv(x))), self.side(x)
        return self.dequant(self.cat.cat([self.add.add(main, side), side], dim=1))

    model = module(
        eager,
        quant=ao.QuantStub(),
        dequant=ao.DeQuantStub(),
        conv=nn.Conv2d(3, 4, 1),
        bn=nn.BatchNorm2d(4),
        relu=nn.ReLU(),
        side=nn.Conv2d(3, 4, 1),
        add=FloatFunctional(),
        cat=FloatFunctional(),
    )
    x = torch.randn(2, 3, 8, 8)
    prepared = calibrated(model, [(x,)], target=STEM)
    assert len({id(q) for q in observers_of(prepared).values()}) == 3  # cat shares one of its
    converted = convert(prepared)
    assert (converted(x) - model(x)).abs().max() < 0.1
    agreement = compare_with_torch(to_onnx(converted, [x]), converted, [[x]], optimized=False)
    assert agreement.codes <= 1.001


@pytest.mark.parametrize("target", list(GRIDS))
def test_fixed_scales_equal_the_numpy_core(target):
    grid = GRIDS[target]
    x = np.random.default_rng(0).normal(size=10_000).astype(np.float32) * 9
    scale, zero = np.float32(0.05), 0 if grid.symmetric else grid.qmin + 100
    theirs = quantize_per_tensor(x, scale, zero, f"q{grid.dtype}").dequantize()
    ours = FixedQuant(grid, "t", torch.tensor(scale), torch.tensor(zero))(torch.from_numpy(x))
    assert np.array_equal(ours.numpy(), theirs)
    faked = torch.fake_quantize_per_tensor_affine(
        torch.from_numpy(x), float(scale), zero, grid.qmin, grid.qmax
    )
    assert np.abs(faked.numpy() - theirs).max() <= 1.001 * scale  # torch multiplies by 1 / scale
    assert (faked.numpy() == theirs).mean() > 0.99


@pytest.mark.parametrize(
    ("layer", "depthwise"),
    [
        (nn.Conv2d(4, 6, 3), False),
        (nn.Conv2d(5, 6, (1, 2)), False),
        (nn.Conv1d(8, 6, 3, groups=2), False),
        (nn.Conv2d(6, 6, 3, groups=6), True),
        (nn.ConvTranspose2d(4, 6, 2), False),
        (nn.Linear(7, 6), False),
    ],
    ids=str,
)
def test_weight_scales_equal_the_builds(layer, depthwise):
    weight = layer.weight.detach()
    is_transposed = isinstance(layer, nn.ConvTranspose2d)
    for axis in (None, 1 if is_transposed else 0):
        full = weight_quantizer(layer, axis, 8, limits_pair_sums=False).scales(weight)
        fitted = weight_quantizer(layer, axis, 8, limits_pair_sums=True).scales(weight)
        rows = weight.transpose(0, 1) if is_transposed else weight
        expected = full if depthwise else pair_scales(rows.numpy(), full.numpy())
        assert np.allclose(fitted, expected, rtol=1e-7)
        assert fitted.shape == full.shape
    assert weight_quantizer(layer, 0, 7, limits_pair_sums=True).minimum_scales is None


def test_learned_scale_has_a_minimum():
    layer = nn.Linear(8, 3)
    nn.init.constant_(layer.weight, 1.0)
    quant = weight_quantizer(layer, 0, 8, limits_pair_sums=True)
    scale = quant.learn(layer.weight)
    with torch.no_grad():
        scale.copy_(scale / 2)
    assert quant.scales(layer.weight).tolist() == pytest.approx([2 / 126] * 3)
    quant.enabled = True
    quant(layer.weight).sum().backward()
    steps = quant(layer.weight).detach() / (2 / 126)
    assert steps.round().abs().max() == 63
    assert scale.grad.abs().max() == 0  # it is not used


def heavy():
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    for layer in (net[2], net[6]):
        nn.init.uniform_(layer.weight, 0.8, 1.0)
    return net


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ((), True),
        (("--mode", "dynamic"), True),
        (("--mode", "weight-only"), False),
        (("--target", "tensorrt"), False),
    ],
)
def test_exported_pair_sums_fit(options, fits, command, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(2).normal(size=(6, 3, 8, 8)).astype("f4"))
    out = tmp_path / "net.onnx"
    arguments = ("export", f"{__file__}:heavy", "--input", "1x3x8x8", "-o", out, "--qdq")
    command(*arguments, "--images", tmp_path / "x.npy", *options)
    exported = onnx.load(out)
    arrays = [numpy_helper.to_array(tensor) for tensor in exported.graph.initializer]
    sums = [pair_sums(array).max() for array in arrays if array.dtype == np.int8 and array.ndim > 1]
    assert sums
    assert (max(sums) <= PAIR_LIMIT) == fits
    if not options:
        assert not find_saturating_layers(exported)
