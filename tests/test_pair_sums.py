"""No x86 CPU saturates the products of weights that calib8 writes (`calibrators.weights`)."""

import json

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from calibrators.grids import INT8, quantize_weight, weight_scales
from calibrators.weights import PAIR_LIMIT, pair_scales, pair_sums, tight_pair_mask
from deploy.graph.index import Graph
from deploy.runtimes.ort import OrtSession
from deploy.targets.onnxruntime.dynamic import dynamic_weights, write_dynamic
from deploy.targets.stored_weights import read_stored_weights
from deploy.tuning.repairs.output_rounding import round_weight
from deploy.tuning.repairs.repair_layers import find_weighted_layers, with_constants
from tests.vendor_models import build_net

QUICK = ("--effort", 0, "--duration", 0, "--accept")


def saturated(stored, patches):
    """What VPMADDUBSW and 32-bit sums give: int8 [C, K], uint8 [P, K] -> [C, P]."""
    even = [(0, 0), (0, stored.shape[1] % 2)]
    products = np.pad(stored, even)[:, None].astype(int) * np.pad(patches, even)[None].astype(int)
    pairs = products[..., 0::2] + products[..., 1::2]
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=2)


def by_place(weight):
    """[C, I, ...] -> [C, K] in the order of the kernel."""
    return np.moveaxis(weight, 1, -1).reshape(len(weight), -1)


@pytest.mark.parametrize(("shape", "pairs"), [
    ((1, 4, 1, 2), [(0, 1), (2, 3), (4, 5), (6, 7)]),  # four channels a place
    ((1, 6), [(0, 1), (2, 3), (4, 5)]),
    ((1, 5), [(0, 1), (2, 3), (4,)]),  # one place: nothing can come between
    ((1, 3, 2), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5,)]),  # zeros may, after each three
])  # fmt: skip
def test_who_meets_whom(shape, pairs):
    flat = 2.0 ** np.arange(np.prod(shape))
    places = np.moveaxis(flat.reshape(*shape[2:], shape[1]), -1, 0)
    assert pair_sums(places[None]).tolist() == [[sum(flat[list(pair)]) for pair in pairs]]


def test_sums_and_scales_of_known_weights():
    assert pair_sums(np.float64([[100, -90, -60, -70, 0, -5]])).tolist() == [[100, 130, 5]]
    weight = np.array([[1.0, 1.0], [0.5, -3.0], [2.0, 2.0]])
    assert pair_scales(weight, weight_scales(weight, None)) == pytest.approx(4 / 126)
    weight = np.full((1, 4), np.finfo(np.float32).max, np.float32)
    scales = pair_scales(weight, weight_scales(weight, 0))
    assert np.isfinite(scales).all() and (scales > 0).all()
    # The arithmetic that all this is about: 127 + 127 times 255 ends at 32767.
    stored, patches = np.array([[127, 127]], np.int8), np.array([[255, 255]], np.uint8)
    assert saturated(stored, patches).item() == 32767 < 127 * 2 * 255


weights = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).standard_t(3, (3, 1 + seed % 7, 1 + seed // 7 % 3, 2))
)


@settings(max_examples=200)
@given(weights)
def test_no_input_saturates_however_weights_are_rounded(weight):
    """Given: any weight. Each rounded away from 0, all inputs that add up at their largest."""
    scales = pair_scales(weight, weight_scales(weight, 0))
    steps = by_place(weight / scales.reshape(-1, 1, 1, 1))
    assert np.abs(steps).max() <= 127.001
    away = np.sign(steps) * np.ceil(np.abs(steps) - 1e-4)
    for stored in (np.rint(steps), away):
        for one in np.clip(stored, -127, 127).astype(np.int8):
            patches = np.stack([np.where(one > 0, 255, 0), np.where(one < 0, 255, 0)])
            patches = np.append(patches, np.full((1, one.size), 255), 0).astype(np.uint8)
            got = saturated(one[None], patches)[0]
            assert np.array_equal(got, patches.astype(int) @ one.astype(int))


@settings(max_examples=50)
@given(weights)
def test_a_channel_loses_no_more_than_its_pairs_ask_for(weight):
    own = weight_scales(weight, 0)
    fitted = pair_scales(weight, own)
    assert (fitted >= own).all() and (fitted <= own * (2.02)).all()
    largest = pair_sums(weight / fitted.reshape(-1, 1, 1, 1)).max(axis=1)
    amax = np.abs(weight).max(axis=(1, 2, 3)) / fitted
    assert np.all((largest > 125.9) | (amax > 126.9))


def network(group=1, channels=8):
    """Conv, Relu, Conv, whose weights of one sign meet in pairs."""
    rng = np.random.default_rng(4)
    held = {
        "v": rng.normal(size=(channels, 3, 3, 3)) ** 3,
        "w": rng.uniform(0.8, 1.0, size=(16, channels // group, 3, 3)),
    }
    nodes = [
        ("Conv", "x v", "a", "first", {"pads": [1] * 4}),
        ("Relu", "a", "b", "relu"),
        ("Conv", "b w", "y", "last", {"pads": [1] * 4, "group": group}),
    ]
    return build_net(nodes, {"x": ["n", 3, 12, 12]}, {"y": ["n", 16, 12, 12]}, held, opset=17)


@pytest.mark.parametrize("fits", [True, False])
def test_rounded_weights_keep_their_scale_and_fit(fits):
    model = network()
    layer = find_weighted_layers(model)[1]
    inputs = np.abs(np.random.default_rng(5).normal(size=(1, 8 * 9, 400))).astype(np.float32)
    scales = pair_scales(layer.array, weight_scales(layer.array, 0))
    wide = scales.astype(np.float64).reshape(-1, 1, 1, 1)
    found = round_weight(layer, wide, inputs, fits_pairs=fits)
    assert (found.weight != layer.array).any()
    after = find_weighted_layers(with_constants(model, {"w": found.weight}))[1].array
    again = pair_scales(after, weight_scales(after, 0))
    largest = pair_sums(quantize_weight(after, again, 0)).max()
    assert np.array_equal(again, scales) == fits  # without it the scales move, and all is lost
    assert largest <= PAIR_LIMIT


def test_what_stays_is_little():
    weight = np.random.default_rng(6).normal(size=(64, 32, 3, 3))
    steps = weight / pair_scales(weight, weight_scales(weight, 0)).reshape(-1, 1, 1, 1)
    assert 0 < tight_pair_mask(steps).mean() < 0.02
    tight = pair_sums(steps) > 124
    assert tight_pair_mask(steps).any(axis=(1, 2, 3)).tolist() == tight.any(axis=1).tolist()


@pytest.fixture
def built(command, tmp_path):
    """(model, words) -> the int8 model, its notes."""
    x = np.random.default_rng(7).normal(size=(6, 3, 12, 12)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)

    def call(model, *words):
        onnx.save(model, tmp_path / "net.onnx")
        fed = ("--images", tmp_path / "x.npy", "--out", tmp_path / "out")
        command("build", tmp_path / "net.onnx", *fed, *QUICK, *words)
        report = json.loads((tmp_path / "out/report.json").read_text())
        return onnx.load(tmp_path / "out/net.int8.onnx"), report["targets"][0].get("notes", [])

    return call


def stored_weights(model):
    """Integers of the last layer, [C, K]."""
    return by_place(numpy_helper.to_array(Graph(model).constants["w/quantized"])).astype(int)


def wide_layers(model):
    return [one.node for one in read_stored_weights(model, on_cpus=True) if one.saturates]


@pytest.mark.parametrize("words", [(), ("--int8-stem",), ("--repair", "adaround")])
def test_an_int8_file_computes_the_same_on_every_x86_cpu(built, words):
    int8, notes = built(network(), *words)
    assert wide_layers(int8) == [] and not any("saturate" in note for note in notes)
    stored = stored_weights(int8)
    patches = np.full((1, stored.shape[1]), 255, np.uint8)
    assert np.array_equal(saturated(stored, patches)[:, 0], 255 * stored.sum(axis=1))


def test_full_weights_are_asked_for_and_told(built):
    int8, notes = built(network(), "--full-weights")
    assert wide_layers(int8) == ["last"]
    (note,) = [note for note in notes if "saturate" in note]
    why = "since --full-weights lets weights take all of int8"
    assert note.startswith("x86 CPUs without VNNI")
    assert note.endswith(f"can saturate in 1 layer of the int8 model, {why}")
    assert (np.abs(stored_weights(int8)).max(axis=1) == 127).all()


def test_a_depthwise_conv_takes_all_of_int8(built):
    """Its kernels sum in 32 bits: see `test_this_cpus_kernels_lose_nothing`."""
    int8, _ = built(network(group=16, channels=16))
    assert (np.abs(stored_weights(int8)).max(axis=1) == 127).all()


def test_weights_that_a_model_brings_stay_and_are_told(built, refusal, tmp_path):
    int8, _ = built(network(), "--full-weights")
    again, notes = built(int8)
    assert wide_layers(again) == ["last"]
    why = "since weights are kept as the given model has them"
    assert any(note.endswith(why) for note in notes)
    words = ("build", tmp_path / "net.onnx", "--images", tmp_path / "x.npy", "--full-weights")
    err = refusal(*words, "--out", tmp_path / "o", *QUICK)
    assert "--full-weights decides how onnxruntime quantizes a float model" in err
    words = ("build", tmp_path / "net.onnx", "--images", tmp_path, "--out", tmp_path / "o")
    err = refusal(*words, "--full-weights", "--weight-bits", "7")
    assert "leave one of them out" in err and not (tmp_path / "o").exists()


def test_matmuls_with_scales_of_their_own_inputs_fit_too():
    weight = {"w": np.random.default_rng(3).uniform(0.5, 1, size=(32, 16))}
    ends = {"x": ["n", 32]}, {"y": ["n", 16]}
    model = build_net([("MatMul", "x w", "y", "one")], *ends, weight, opset=17)
    written = (write_dynamic(model, ["one"], INT8, fits_pairs=fits) for fits in (True, False))
    found = [[one.saturates for one in dynamic_weights(made)] for made in written]
    assert found == [[False], [True]]


@pytest.mark.parametrize(("group", "channels"), [(1, 8), (1, 5), (2, 8), (16, 16), (4, 4)])
def test_this_cpus_kernels_lose_nothing(built, group, channels):
    """Whatever CPU this is: integer kernels give what the file says, at the inputs that hurt."""
    int8, _ = built(network(group=group, channels=channels))
    x = {"x": np.full((1, 3, 12, 12), 9, np.float32)}
    kernels = OrtSession.open(int8, threads=1).run(x)["y"]
    written = OrtSession.open(int8, threads=1, int8_kernels=False).run(x)["y"]
    step = np.ptp(written) / 255
    assert np.abs(kernels - written).max() <= 2 * step + 1e-6
