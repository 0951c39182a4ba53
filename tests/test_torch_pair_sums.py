"""No x86 CPU saturates the products of weights that PyTorch models are quantized to."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from torch import nn  # noqa: E402

from calibrators.weights import FIT, pair_scales, pair_sums  # noqa: E402
from deploy.fx.int8_layers import quant_of  # noqa: E402
from deploy.targets.stored import stored_in  # noqa: E402

NET = """
import torch
from torch import nn

def make():
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )
    for layer in (net[2], net[6]):
        nn.init.uniform_(layer.weight, 0.8, 1.0)
    return net
"""


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
def test_scales_are_those_of_a_build(layer, depthwise):
    weight = layer.weight.detach()
    turned = isinstance(layer, nn.ConvTranspose2d)
    for axis in (None, 1 if turned else 0):
        full = quant_of(layer, axis, 8, fits_pairs=False).scales(weight)
        fitted = quant_of(layer, axis, 8, fits_pairs=True).scales(weight)
        rows = weight.transpose(0, 1) if turned else weight
        expected = full if depthwise else pair_scales(rows.numpy(), full.numpy())
        assert np.allclose(fitted, expected, rtol=1e-7) and fitted.shape == full.shape
    assert quant_of(layer, 0, 7, fits_pairs=True).least is None


def test_a_learned_scale_does_not_fall_below():
    layer = nn.Linear(8, 3)
    nn.init.constant_(layer.weight, 1.0)
    quant = quant_of(layer, 0, 8, fits_pairs=True)
    scale = quant.learn(layer.weight)
    with torch.no_grad():
        scale.copy_(scale / 2)
    assert quant.scales(layer.weight).tolist() == pytest.approx([2 / 126] * 3)
    quant.enabled = True
    quant(layer.weight).sum().backward()
    steps = quant(layer.weight).detach() / (2 / 126)
    assert steps.round().abs().max() == 63 and scale.grad.abs().max() == 0  # it is not used


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "fits"),
    [
        ((), True),
        (("--mode", "dynamic"), True),
        (("--mode", "weight-only"), False),
        (("--target", "tensorrt"), False),
    ],
)
def test_an_exported_model_fits(words, fits, run, tmp_path):
    (tmp_path / "net.py").write_text(NET)
    np.save(tmp_path / "x.npy", np.random.default_rng(2).normal(size=(6, 3, 8, 8)).astype("f4"))
    out = tmp_path / "net.onnx"
    given = ("export", f"{tmp_path / 'net.py'}:make", "--input", "1x3x8x8", "-o", out, "--qdq")
    code, _, err = run(*given, "--images", tmp_path / "x.npy", *words)
    assert code == 0, err
    held = onnx.load(out)
    arrays = [numpy_helper.to_array(tensor) for tensor in held.graph.initializer]
    sums = [pair_sums(one).max() for one in arrays if one.dtype == np.int8 and one.ndim > 1]
    assert sums and (max(sums) <= FIT) == fits
    if not words:
        assert not any(one.saturates for one in stored_in(held, on_cpus=True))
