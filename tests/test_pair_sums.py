"""No x86 CPU saturates the products of weights that calib8 writes (`calibrators.weights`)."""

import json

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from calibrators.grids import quantize_weight, weight_scales
from calibrators.weights import PAIR_LIMIT, pair_scales, pair_sums, tight_pair_mask
from deploy.graph.index import Graph
from deploy.runtimes.ort import OrtSession
from deploy.targets.stored_weights import find_saturating_layers
from deploy.tuning.repairs.output_rounding import LayerInputs, round_weight
from deploy.tuning.repairs.repair_layers import find_weighted_layers, with_constants
from tests.vendor_models import build_net

QUICK = ("--effort", 0, "--duration", 0, "--accept")


def saturated_sums(stored, patches):
    """Return sums of VPMADDUBSW and 32 bits: int8 [C, K], uint8 [P, K] -> [C, P]."""
    padding = [(0, 0), (0, stored.shape[1] % 2)]
    products = np.pad(stored, padding)[:, None].astype(int) * np.pad(patches, padding)[None].astype(
        int
    )
    pairs = products[..., 0::2] + products[..., 1::2]
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=2)


def kernel_order(weight):
    """[C, I, ...] -> [C, K] in the order of the kernel."""
    return np.moveaxis(weight, 1, -1).reshape(len(weight), -1)


@pytest.mark.parametrize(("shape", "pairs"), [
    ((1, 4, 1, 2), [(0, 1), (2, 3), (4, 5), (6, 7)]),  # four channels a place
    ((1, 6), [(0, 1), (2, 3), (4, 5)]),
    ((1, 5), [(0, 1), (2, 3), (4,)]),  # one place: nothing can come between
    ((1, 3, 2), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5,)]),  # zeros may, after each three
])  # fmt: skip
def test_places_that_share_a_pair(shape, pairs):
    flat = 2.0 ** np.arange(np.prod(shape))
    places = np.moveaxis(flat.reshape(*shape[2:], shape[1]), -1, 0)
    assert pair_sums(places[None]).tolist() == [[sum(flat[list(pair)]) for pair in pairs]]


def test_sums_and_scales_of_known_weights():
    assert pair_sums(np.float64([[100, -90, -60, -70, 0, -5]])).tolist() == [[100, 130, 5]]
    weight = np.array([[1.0, 1.0], [0.5, -3.0], [2.0, 2.0]])
    assert pair_scales(weight, weight_scales(weight, None)) == pytest.approx(4 / 126)
    weight = np.full((1, 4), np.finfo(np.float32).max, np.float32)
    scales = pair_scales(weight, weight_scales(weight, 0))
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    # The arithmetic that all this is about: 127 + 127 times 255 ends at 32767.
    stored, patches = np.array([[127, 127]], np.int8), np.array([[255, 255]], np.uint8)
    assert saturated_sums(stored, patches).item() == 32767 < 127 * 2 * 255


weights = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).standard_t(3, (3, 1 + seed % 7, 1 + seed // 7 % 3, 2))
)


@pytest.mark.slow
@settings(max_examples=200)
@given(weights)
def test_no_input_saturates_rounded_weights(weight):
    """Given: any weight. Each rounded away from 0, all inputs that add up at their largest."""
    scales = pair_scales(weight, weight_scales(weight, 0))
    steps = kernel_order(weight / scales.reshape(-1, 1, 1, 1))
    assert np.abs(steps).max() <= 127.001
    rounded_up = np.sign(steps) * np.ceil(np.abs(steps) - 1e-4)
    for stored in (np.rint(steps), rounded_up):
        for channel in np.clip(stored, -127, 127).astype(np.int8):
            patches = np.stack([np.where(channel > 0, 255, 0), np.where(channel < 0, 255, 0)])
            patches = np.append(patches, np.full((1, channel.size), 255), 0).astype(np.uint8)
            sums = saturated_sums(channel[None], patches)[0]
            assert np.array_equal(sums, patches.astype(int) @ channel.astype(int))


@settings(max_examples=50)
@given(weights)
def test_channel_scale_fits_its_largest_pair(weight):
    plain_scales = weight_scales(weight, 0)
    fitted_scales = pair_scales(weight, plain_scales)
    assert (fitted_scales >= plain_scales).all()
    assert (fitted_scales <= plain_scales * (2.02)).all()
    largest = pair_sums(weight / fitted_scales.reshape(-1, 1, 1, 1)).max(axis=1)
    amax = np.abs(weight).max(axis=(1, 2, 3)) / fitted_scales
    assert np.all((largest > 125.9) | (amax > 126.9))


def network(group=1, channels=8):
    """Conv, Relu, Conv, whose weights of one sign meet in pairs."""
    rng = np.random.default_rng(4)
    arrays = {
        "v": rng.normal(size=(channels, 3, 3, 3)) ** 3,
        "w": rng.uniform(0.8, 1.0, size=(16, channels // group, 3, 3)),
    }
    nodes = [
        ("Conv", "x v", "a", "first", {"pads": [1] * 4}),
        ("Relu", "a", "b", "relu"),
        ("Conv", "b w", "y", "last", {"pads": [1] * 4, "group": group}),
    ]
    return build_net(nodes, {"x": ["n", 3, 12, 12]}, {"y": ["n", 16, 12, 12]}, arrays, opset=17)


@pytest.mark.parametrize("fits", [True, False])
def test_rounded_weights_keep_scale_and_fit(fits):
    model = network()
    layer = find_weighted_layers(model)[1]
    inputs = np.abs(np.random.default_rng(5).normal(size=(1, 8 * 9, 400))).astype(np.float32)
    scales = pair_scales(layer.array, weight_scales(layer.array, 0))
    broadcast_scales = scales.astype(np.float64).reshape(-1, 1, 1, 1)
    rounding = round_weight(layer, broadcast_scales, LayerInputs(inputs), limits_pair_sums=fits)
    assert (rounding.weight != layer.array).any()
    rounded = find_weighted_layers(with_constants(model, {"w": rounding.weight}))[1].array
    new_scales = pair_scales(rounded, weight_scales(rounded, 0))
    largest = pair_sums(quantize_weight(rounded, new_scales, 0)).max()
    assert np.array_equal(new_scales, scales) == fits  # without it the scales move, and all is lost
    assert largest <= PAIR_LIMIT


def test_tight_pairs_are_few():
    weight = np.random.default_rng(6).normal(size=(64, 32, 3, 3))
    steps = weight / pair_scales(weight, weight_scales(weight, 0)).reshape(-1, 1, 1, 1)
    assert 0 < tight_pair_mask(steps).mean() < 0.02
    tight = pair_sums(steps) > 124
    assert tight_pair_mask(steps).any(axis=(1, 2, 3)).tolist() == tight.any(axis=1).tolist()


@pytest.fixture
def build_int8(command, tmp_path):
    """(model, arguments) -> the int8 model, its notes."""
    x = np.random.default_rng(7).normal(size=(6, 3, 12, 12)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)

    def call(model, *arguments):
        onnx.save(model, tmp_path / "net.onnx")
        paths = ("--images", tmp_path / "x.npy", "--out", tmp_path / "out")
        command("build", tmp_path / "net.onnx", *paths, *QUICK, *arguments)
        report = json.loads((tmp_path / "out/report.json").read_text())
        return onnx.load(tmp_path / "out/net.int8.onnx"), report["targets"][0].get("notes", [])

    return call


def stored_weights(model):
    """Integers of the last layer, [C, K]."""
    return kernel_order(numpy_helper.to_array(Graph(model).constants["w/quantized"])).astype(int)


@pytest.mark.parametrize("arguments", [(), ("--int8-stem",), ("--repair", "adaround")])
def test_int8_file_saturates_on_no_cpu(build_int8, arguments):
    int8, notes = build_int8(network(), *arguments)
    assert find_saturating_layers(int8) == []
    assert not any("saturate" in note for note in notes)
    stored = stored_weights(int8)
    patches = np.full((1, stored.shape[1]), 255, np.uint8)
    assert np.array_equal(saturated_sums(stored, patches)[:, 0], 255 * stored.sum(axis=1))


def test_full_weights_are_noted(build_int8):
    int8, notes = build_int8(network(), "--full-weights")
    assert find_saturating_layers(int8) == ["last"]
    (note,) = [note for note in notes if "saturate" in note]
    reason = "since --full-weights lets weights take all of int8"
    assert note.startswith("x86 CPUs without VNNI")
    assert note.endswith(f"can saturate in 1 layer of the int8 model, {reason}")
    assert (np.abs(stored_weights(int8)).max(axis=1) == 127).all()


def test_depthwise_conv_uses_all_of_int8(build_int8):
    """Its kernels sum in 32 bits: see `test_local_kernels_match_the_file`."""
    int8, _ = build_int8(network(group=16, channels=16))
    assert (np.abs(stored_weights(int8)).max(axis=1) == 127).all()


def test_stored_weights_stay_and_are_noted(build_int8, refusal, tmp_path):
    int8, _ = build_int8(network(), "--full-weights")
    rebuilt, notes = build_int8(int8)
    assert find_saturating_layers(rebuilt) == ["last"]
    reason = "since weights are kept as the given model has them"
    assert any(note.endswith(reason) for note in notes)
    arguments = ("build", tmp_path / "net.onnx", "--images", tmp_path / "x.npy", "--full-weights")
    message = refusal(*arguments, "--out", tmp_path / "o", *QUICK)
    assert "--full-weights decides how onnxruntime quantizes a float model" in message
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("group", "channels"), [(1, 8), (1, 5), (2, 8), (16, 16), (4, 4)])
def test_local_kernels_match_the_file(build_int8, group, channels):
    """Whatever CPU this is: integer kernels give what the file says, at the inputs that hurt."""
    int8, _ = build_int8(network(group=group, channels=channels))
    x = {"x": np.full((1, 3, 12, 12), 9, np.float32)}
    kernels = OrtSession.open(int8, threads=1).run(x)["y"]
    written = OrtSession.open(int8, threads=1, int8_kernels=False).run(x)["y"]
    step = np.ptp(written) / 255
    assert np.abs(kernels - written).max() <= 2 * step + 1e-6
