"""AdaRound: against AMCT's own, by finite differences, and through the command to every file."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from calibrators.amct import adaround as amct
from calibrators.amct.adaround import LEAKY, NONE, RELU, RELU6, SIGMOID, TANH
from calibrators.amct.arq import channels_first, kl_scale
from calibrators.amct.recorders import RoundedWeightsOf, TargetsOf
from calibrators.errors import CalibrationError
from calibrators.rounding import ConvWindow, extract_patches
from deploy.graph.index import Graph
from deploy.targets.ascend.layers import find_layers
from deploy.targets.ascend.quant_layer import quantize_layers
from deploy.targets.ascend.record import LayerRecord
from deploy.targets.ascend.simple_config import read_simple_config
from deploy.targets.ascend.weight_rounding import AdaRoundSteps
from tests.models import as_float32, run_command, run_net
from tests.vendor_models import build_net

# by AMCT's AdaRoundQuant, KlOptimize and loss functions in torch 2.13: random layers and inputs,
# every place in every iteration
GOLDEN = np.load(Path(__file__).parent / "golden" / "amct" / "adaround.npz")
PARAMS = amct.AdaParams(num_iteration=300, reg_param=0.02, beta_range=(12.0, 3.0), warm_start=0.3)
CONV = ConvWindow(kernel=(3, 3), strides=(2, 2), dilations=(1, 1), pads=(1, 1, 1, 1), group=2)
TURNED = replace(CONV, transposed=True, output_padding=(1, 1))


def golden(case, name):
    return GOLDEN[f"{case}.{name}"]


def golden_rows(case, window):
    weight = golden(case, "weight")
    return channels_first(weight, window.group) if window is TURNED else weight


def problem_of(case, window, activation):
    """What the recorders make of a golden case, sample by sample."""
    rows = golden_rows(case, window)
    groups = window.group if window else 1
    shape = (groups, len(rows) // groups, rows[0].size)
    limits = {"samples": 99, "max_positions": 999}
    params = {"shape": shape, "scale_count": len(rows) if window else 1, "params": PARAMS}
    inputs = RoundedWeightsOf(window=window, **limits, **params).recorder(None)
    targets = TargetsOf(channels_last=window is None, **limits).recorder(None)
    for x, y in zip(golden(case, "x"), golden(case, "outputs"), strict=True):
        inputs.observe(x[None])
        targets.observe(y[None])
    scale = np.broadcast_to(golden(case, "scale"), len(rows)).reshape(groups, -1, 1)
    values = {"weight": rows.reshape(shape), "scale": scale, "inputs": inputs.take_patches()}
    values["targets"] = targets.take_outputs().reshape(-1, *shape[:2])
    values["bias"] = golden(case, "bias").reshape(shape[:2])
    return amct.AdaProblem(**values, activation=activation, error_factor=targets.error_factor)


def adaround(problem, params, **options):
    parts = [amct.round_block(part, params, **options) for part in problem.blocks()]
    return amct.join_blocks(problem, parts)


def round_to_nearest(problem):
    return np.clip(np.rint(problem.weight / problem.scale), -128, 127)


def output_error(problem, codes):
    """Return the mean squared error of the outputs; without an activation."""
    outputs = np.einsum("pgk,gmk->pgm", problem.inputs, codes * problem.scale) + problem.bias
    return float(np.square(outputs - problem.targets).mean())


LEAK = np.full((1, 1), 0.2, np.float32)
CASES = {
    "conv": (CONV, amct.AdaActivation(RELU)),
    "turned": (TURNED, amct.AdaActivation(NONE)),
    "matrix": (None, amct.AdaActivation(TANH)),  # 70 channels: two blocks
    "tokens": (None, amct.AdaActivation(LEAKY, LEAK)),  # [N, T, C]: AMCT sums along T
}


@pytest.mark.parametrize("case", CASES)
def test_the_integers_are_amcts(case):
    problem = problem_of(case, *CASES[case])
    expected = golden(case, "integers").reshape(problem.weight.shape)
    np.testing.assert_array_equal(adaround(problem, PARAMS), expected)
    assert (expected != round_to_nearest(problem)).any()


@pytest.mark.parametrize("case", CASES)
def test_the_scales_are_amcts(case):
    window, _ = CASES[case]
    result = kl_scale(golden_rows(case, window), channel_wise=window is not None)
    np.testing.assert_array_equal(result, golden(case, "scale"))


def test_zero_channel_has_scale_one():
    assert kl_scale(np.zeros((2, 3), np.float32)).tolist() == [1, 1]
    with pytest.raises(CalibrationError, match="at most"):
        kl_scale(np.full((1, 3), 3e38, np.float32))


def test_iteration_positions_are_all_or_drawn():
    rng = np.random.default_rng(0)
    for position_count, drawn in ((6, False), (100_000, True)):
        shapes = (
            (1, 2, 3),
            (1, 2, 1),
            (1, 2),
            (position_count, 1, 3),
        )  # weight, scale, bias, inputs
        got = amct.Tiles(*(np.ones(shape, np.float32) for shape in shapes)).draw_positions(rng)
        assert got.size == np.unique(got).size <= position_count
        assert 0 <= got.min() <= got.max() < position_count
        assert (
            (got.size < position_count) == drawn == (not np.array_equal(got, np.arange(got.size)))
        )


@pytest.mark.parametrize("kind", [NONE, RELU, SIGMOID, TANH, LEAKY, RELU6])
def test_slope_is_the_derivative_of_loss(kind):
    rng = np.random.default_rng(4)
    groups, rows, width, count = 2, 3, 70, 96
    shapes = {"weight": (groups, rows, width), "inputs": (count, groups, width)}
    shapes |= {"targets": (count, groups, rows), "bias": (groups, rows)}
    values = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    values["scale"] = rng.uniform(0.01, 0.03, (groups, rows, 1))
    activation = amct.AdaActivation(kind, np.float32(rng.uniform(size=(groups, rows))))
    problem = amct.AdaProblem(**as_float32(values), activation=activation, error_factor=0.5)
    tiles = amct.Tiles(problem.weight, problem.scale, problem.bias, problem.inputs)
    expected = problem.activated_targets()
    low, alpha = amct.initial_alpha(tiles.weight, tiles.scale)
    positions = tiles.draw_positions(np.random.default_rng(0))
    up, rise = amct.heights_of(alpha)
    slope = amct.error_slope(problem, tiles, low + up, expected, positions)
    slope = (slope + amct.regularizer_slope(up, 0.1, 7.0)) * rise

    def loss(alpha_values):
        h = np.clip(1.2 / (1 + np.exp(-alpha_values.astype(np.float64))) - 0.1, 0, 1)
        codes = tiles.untile(np.clip(low + h, -128, 127)) * problem.scale.astype(np.float64)
        outputs = np.einsum("pgk,gmk->gmp", problem.inputs[positions], codes)
        outputs += problem.bias.astype(np.float64)[:, :, None]
        activations = problem.activation.value(outputs[:, None])[:, 0]
        error = 0.5 * np.square(activations - expected[:, :, positions]).sum() / len(positions)
        return error + 0.1 * (1 - np.abs(2 * h - 1) ** 7).sum()

    flat = np.flatnonzero(rise)[::37]
    for index in flat:
        ends = [alpha.astype(np.float64).copy() for _ in range(2)]
        ends[0].flat[index] -= 1e-4
        ends[1].flat[index] += 1e-4
        measured = (loss(ends[1]) - loss(ends[0])) / 2e-4
        assert slope.flat[index] == pytest.approx(measured, rel=2e-3, abs=2e-5)


def test_the_exponent_falls_by_a_cosine():
    params = amct.AdaParams(num_iteration=100, beta_range=(20.0, 2.0), warm_start=0.2)
    assert [
        amct.regularizer_exponent(params, iteration) for iteration in (20, 60, 100)
    ] == pytest.approx([20, 11, 2])


def test_adaround_reduces_the_nearest_error():
    problem = problem_of("conv", *CASES["conv"])
    codes = adaround(problem, amct.AdaParams(num_iteration=0))
    np.testing.assert_array_equal(codes, round_to_nearest(problem))
    rng = np.random.default_rng(2)
    mixed = rng.normal(size=(300, 1, 5)) @ rng.normal(size=(5, 20))  # inputs that go together
    weight = rng.normal(size=(1, 4, 20)).astype(np.float32)
    values = {"weight": weight, "scale": np.full((1, 4, 1), 0.05), "bias": np.zeros((1, 4))}
    values |= {"inputs": mixed, "targets": np.einsum("pgk,gmk->pgm", mixed, weight)}
    problem = amct.AdaProblem(**as_float32(values))
    codes = adaround(problem, amct.AdaParams(num_iteration=1500))
    nearest = output_error(problem, round_to_nearest(problem))
    assert output_error(problem, codes) < 0.3 * nearest
    assert np.abs(codes * 0.05 - weight).max() < 0.05  # up or down, no further


@pytest.mark.parametrize("iterations", [1, PARAMS.num_iteration])
def test_overflowing_squares_are_refused(iterations):
    problem = problem_of("conv", *CASES["conv"])
    huge = replace(
        problem, targets=problem.targets * np.float32(1e30), activation=amct.AdaActivation()
    )
    steps = []
    with pytest.raises(CalibrationError, match="must be finite"):
        params = replace(PARAMS, num_iteration=iterations)
        adaround(huge, params, step=lambda: steps.append(1))
    assert len(steps) < 10  # not after all of them


@pytest.mark.parametrize(
    "attributes",
    [
        {"strides": [2, 1], "pads": [1, 0, 2, 1], "group": 2},
        {"strides": [3, 2], "pads": [0, 1, 1, 0], "output_padding": [1, 0], "dilations": [1, 2]},
    ],
)
def test_patch_products_equal_transposed_convolution(attributes):
    from deploy.graph.bounds import make_window

    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 4, 5, 6)).astype(np.float32)
    weight = rng.normal(size=(4, 3, 3, 2)).astype(np.float32)
    group = attributes.get("group", 1)
    net = model_of([("ConvTranspose", "x w", "y", attributes)], {"w": weight}, [2, 4, 5, 6])
    (output,) = run_net(net, x)
    window = make_window(attributes, weight.shape[2:], transposed=True)
    rows = channels_first(weight, group).reshape(group, -1, 4 // group * 6)
    products = np.einsum("gmk,gkp->pgm", rows, extract_patches(x, window, 1, 10_000))
    expected_products = np.moveaxis(output, 1, -1).reshape(products.shape[0], group, -1)
    np.testing.assert_allclose(products, expected_products, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "channels_last", "factor"),
    [((2, 3, 5), True, 0.6), ((2, 5), True, 1), ((2, 3, 5), False, 1)],
)
def test_token_loss_averages_axis_1(shape, channels_last, factor):
    targets = TargetsOf(samples=1, max_positions=9, channels_last=channels_last).recorder(None)
    targets.observe(np.zeros(shape, np.float32))
    assert targets.error_factor == factor


def test_rounded_weights_are_restored_from_store(wording):
    options = {"window": None, "shape": (1, 2, 3), "scale_count": 2, "params": amct.AdaParams()}
    statistic = RoundedWeightsOf(samples=1, max_positions=9, **options)
    recorder = statistic.recorder(None)
    assert recorder.to_arrays() == {}  # nothing is found yet
    integers = np.arange(-3, 3, dtype=np.int8).reshape(1, 2, 3)
    recorder.integers = integers
    recorder.scale = np.float32([1, 2])
    restored = statistic.restore(recorder.to_arrays())
    np.testing.assert_array_equal(restored.integers, integers)
    assert restored.scale.tolist() == [1, 2]
    with pytest.raises(CalibrationError) as raised:
        statistic.restore({**recorder.to_arrays(), "integers": np.zeros(5, np.int8)})
    wording.check(raised.value)


# -- through the command
def model_of(nodes, weights, shape):
    return build_net(nodes, {"x": shape}, {"y": None}, as_float32(weights))


@pytest.mark.parametrize(
    ("following_nodes", "kind", "slope"),
    [
        ([("Relu", "c", "y")], RELU, None),
        ([("Sigmoid", "c", "y")], SIGMOID, None),
        ([("Tanh", "c", "y")], TANH, None),
        ([("LeakyRelu", "c", "y")], LEAKY, [[0.01]]),
        ([("LeakyRelu", "c", "y", {"alpha": 0.25})], LEAKY, [[0.25]]),
        ([("PRelu", "c half", "y")], LEAKY, [[0.5]]),
        ([("PRelu", "c four", "y")], LEAKY, [[1, 2], [3, 4]]),
        ([("PRelu", "c grid", "y")], NONE, None),
        ([("Clip", "c zero six", "y")], RELU6, None),
        ([("Clip", "c zero half", "y")], NONE, None),
        ([("Neg", "c", "y")], NONE, None),
        ([("Relu", "c", "r"), ("Add", "r c", "y")], NONE, None),
    ],
)
def test_sole_following_activation_enters_the_loss(following_nodes, kind, slope):
    weights = {"w": np.ones((4, 2, 1, 1)), "zero": 0, "six": 6, "half": 0.5}
    weights |= {"four": np.arange(1, 5).reshape(4, 1, 1), "grid": np.ones((4, 3, 3))}
    nodes = [("Conv", "x w", "c", "conv", {"group": 2}), *following_nodes]
    model = model_of(nodes, weights, [1, 4, 3, 3])
    graph = find_layers(model)
    config = read_simple_config("common_config { ada_quantize { } }", graph)
    options = {
        "key": "",
        "samples": 1,
        "channel_maxima": {},
        "make_model": lambda observed, rounded, end: model,
    }
    steps = AdaRoundSteps(float_graph=Graph(model), config=config, **options)
    (step,) = steps.make(graph.layers).values()
    assert step.activation.kind == kind
    assert slope is None or step.activation.slope.tolist() == np.float32(slope).tolist()


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    """A Conv before a ReLU6, a depthwise one, a pool, a ConvTranspose, a Gemm and a MatMul."""
    rng = np.random.default_rng(5)
    nodes = [
        ("Conv", "x w1 b1", "c1", "first", {"pads": [1] * 4, "strides": [2, 2]}),
        ("Clip", "c1 zero six", "r1", "relu6"),
        ("Conv", "r1 w2 b2", "c2", "apart", {"pads": [1] * 4, "group": 6}),
        ("PRelu", "c2 slope", "r2", "prelu"),
        ("ConvTranspose", "r2 w3 b3", "c3", "turned", {"strides": [2, 2], "group": 2}),
        ("Relu", "c3", "r3", "relu"),
        ("AveragePool", "r3", "p", "pool", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Flatten", "p", "f", "flat"),
        ("Gemm", "f w4 b4", "g", "fc", {"transB": 1}),
        ("Tanh", "g", "t", "tanh"),
        ("MatMul", "t w5", "m", "mm"),
        ("Add", "m b5", "y", "add"),
    ]
    shapes = {
        "w1": (6, 3, 3, 3),
        "b1": (6,),
        "w2": (6, 1, 3, 3),
        "b2": (6,),
        "w3": (6, 4, 2, 2),
        "b3": (8,),
        "w4": (20, 512),
        "b4": (20,),
        "w5": (20, 7),
        "b5": (7,),
    }
    weights = {k: rng.normal(size=s) / math.sqrt(max(np.prod(s[1:]), 1)) for k, s in shapes.items()}
    weights |= {"zero": np.zeros(()), "six": np.full((), 6.0), "slope": rng.uniform(size=(6, 1, 1))}
    path = tmp_path_factory.mktemp("kinds") / "kinds.onnx"
    onnx.save(model_of(nodes, weights, ["N", 3, 16, 16]), path)
    flat = rng.normal(size=(48, 3, 4, 4)).repeat(4, axis=2).repeat(4, axis=3)
    images = flat + 0.3 * rng.normal(size=(48, 3, 16, 16))
    np.save(path.with_suffix(".npy"), images.astype(np.float32))
    return path


@pytest.fixture
def built(all_kinds, ascend_build):
    """(text, arguments; suffix, out) -> what was said, and the folder."""
    return partial(ascend_build, all_kinds, all_kinds.with_suffix(".npy"))


ARQ = "batch_num: 48"
LAYERS = ("first", "apart", "turned", "fc", "mm")
ITERATIONS = 200  # enough to move weights of every layer


def ada(iterations, extra_text=""):
    return f"{ARQ} common_config {{ ada_quantize {{ num_iteration: {iterations} }} {extra_text} }}"


def build_for_ascend(model, folder, text):
    config = folder / "my.cfg"
    config.write_text(text)
    arguments = ("--target", "ascend", "--effort", 0, "--duration", 0, "--ascend-config", config)
    run_command("build", model, "--images", model.with_suffix(".npy"), *arguments, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def arq_build(all_kinds, tmp_path_factory):
    return build_for_ascend(all_kinds, tmp_path_factory.mktemp("arq"), ARQ)


@pytest.fixture(scope="module")
def adaround_build(all_kinds, tmp_path_factory):
    """The folder of a build with AdaRound, and the problem of each layer, by name."""
    from deploy.targets.ascend import weight_rounding

    problem_by_layer, make_problem = {}, weight_rounding._make_problem

    def spy(step, *arguments):
        problem_by_layer[step.layer.name] = (problem := make_problem(step, *arguments))
        return problem

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_rounding, "_make_problem", spy)
        folder = build_for_ascend(all_kinds, tmp_path_factory.mktemp("ada"), ada(ITERATIONS))
    return folder, problem_by_layer


def away(path, out, kind="fake_quant"):
    """Mean squared error of a built model against the float one, on the images of the fixture."""
    x = np.load(path.with_suffix(".npy"))
    (actual,), (expected,) = run_net(out / f"kinds_{kind}_model.onnx", x), run_net(path, x)
    return float(np.square(actual - expected).mean())


def integers(out):
    """The weights of a deploy model that are int8, by name."""
    tensors = onnx.load(out / "kinds_deploy_model.onnx").graph.initializer
    return {t.name: numpy_helper.to_array(t) for t in tensors if t.data_type == TensorProto.INT8}


@pytest.mark.slow
def test_adaround_reduces_error_of_all_kinds(all_kinds, arq_build, built):
    output, out = built(ada(2000), out="ada")
    assert "AdaRound rounded the weights of 5 layers" in output
    assert "first 48 samples" in output
    assert "AMCT's ARQ and AdaRound and IFMR" in output  # the pool's is ARQ's
    assert away(all_kinds, out) < 0.7 * away(all_kinds, arq_build)
    assert (out / "kinds_modified_model.onnx").exists()
    assert not (arq_build / "kinds_modified_model.onnx").exists()
    config = json.loads((out / "kinds_config.json").read_text())
    algorithms = {n: config[n]["weight_quant_params"]["wts_algo"] for n in (*LAYERS, "pool")}
    assert algorithms == {**dict.fromkeys(LAYERS, "ada_quantize"), "pool": "arq_quantize"}


@pytest.mark.slow
def test_the_rounding_is_in_every_file(adaround_build, built):
    """Deploy, fake-quant and Q/DQ model hold the same codes, which are not the nearest."""
    out, _ = adaround_build
    codes = integers(out)
    fake_quant_tensors = {
        t.name: t for t in onnx.load(out / "kinds_fake_quant_model.onnx").graph.initializer
    }
    qdq = {t.name: t for t in onnx.load(out / "kinds_amct_qdq.onnx").graph.initializer}
    _, plain = built(ada(0), out="plain")
    for name, layer in zip(("w1", "w2", "w4", "w5"), ("first", "apart", "fc", "mm"), strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(fake_quant_tensors[name]), codes[name])
        qdq_codes = numpy_helper.to_array(qdq[f"{layer}.weight.int8"])
        np.testing.assert_array_equal(qdq_codes, codes[name])
        code_steps = codes[name].astype(int) - integers(plain)[name]
        assert np.abs(code_steps).max() == 1, name  # a weight goes to its other neighbour at most
    assert np.abs(codes["w3"].astype(int) - integers(plain)["w3"]).max() == 1


@pytest.mark.slow
def test_record_alone_lacks_the_rounding(all_kinds, built, command, tmp_path):
    _, out = built(ada(100, "dmq_balancer { }"), out="ada")
    record, modified = out / "kinds_record.txt", out / "kinds_modified_model.onnx"
    output = command("ascend", "deploy", all_kinds, record, "-o", tmp_path / "a")
    assert "biases of 5 layers" in output
    assert "AdaRound" not in command("ascend", "deploy", modified, record, "-o", tmp_path / "b")
    for kind in ("deploy", "fake_quant"):
        expected = (out / f"kinds_{kind}_model.onnx").read_bytes()
        assert (tmp_path / "a" / f"kinds_{kind}_model.onnx").read_bytes() != expected
        assert (tmp_path / "b" / f"kinds_modified_model_{kind}_model.onnx").read_bytes() == expected


def document(layers=LAYERS, **weight):
    """A quant config JSON in which these layers ask for AdaRound."""
    weight_params = {"wts_algo": "ada_quantize", **weight}
    layer_config = {"quant_enable": True, "weight_quant_params": weight_params}
    config = {"version": 1, "batch_num": 48, "pool": {"quant_enable": True}}
    return json.dumps(config | dict.fromkeys(layers, layer_config))


@pytest.mark.slow
def test_forms_threads_and_cache_agree(adaround_build, built, monkeypatch):
    first_folder, _ = adaround_build
    output, two = built(
        document(num_iteration=ITERATIONS), "--threads", 1, suffix=".json", out="two"
    )
    assert "calibrated" in output
    assert "within 0 of the fake-quant model" in output  # the integer executor on the deploy model
    files = [
        path.name for path in first_folder.iterdir() if path.suffix in (".onnx", ".txt", ".npz")
    ]
    assert len(files) > 5
    for name in files:
        if "README" not in name:
            assert (first_folder / name).read_bytes() == (two / name).read_bytes(), name
    search = "deploy.targets.ascend.weight_rounding.round_block"
    monkeypatch.setattr(search, lambda *a, **k: pytest.fail("a search"))
    bytes_by_name = {name: (two / name).read_bytes() for name in files}
    output, two = built(ada(ITERATIONS), out="two")
    assert "cache reused" in output
    assert all((two / name).read_bytes() == data for name, data in bytes_by_name.items())


@pytest.mark.slow
def test_other_layers_keep_their_arq_weights(arq_build, built):
    fc = "calibration_config { ada_quantize { num_iteration: 100 } }"
    output, out = built(f'{ARQ} override_layer_configs {{ layer_name: "fc" {fc} }}', out="ada")
    assert "of 1 layer," in output
    assert "ARQ and AdaRound" in output
    changed = {n for n, codes in integers(out).items() if (codes != integers(arq_build)[n]).any()}
    assert changed == {"w4"}


@pytest.mark.slow
def test_layers_are_rounded_in_order(all_kinds, adaround_build):
    """The inputs of a layer are those behind the rounded layers before it, as in AMCT."""
    out, problem_by_layer = adaround_build
    assert list(problem_by_layer) == list(LAYERS)
    x = np.load(all_kinds.with_suffix(".npy"))
    # the pool keeps its place, and its own codes do not show: activations stay float
    (expected,) = run_net(onnx.load(out / "kinds_modified_model.onnx"), x, ["f"])
    np.testing.assert_allclose(
        problem_by_layer["fc"].inputs[:, 0, :512], expected, rtol=1e-4, atol=1e-5
    )
    (expected,) = run_net(onnx.load(all_kinds), x, ["g"])
    np.testing.assert_allclose(problem_by_layer["fc"].targets[:, 0], expected, rtol=1e-4, atol=1e-5)
    kinds = {name: problem.activation.kind for name, problem in problem_by_layer.items()}
    assert kinds == {"first": RELU6, "apart": LEAKY, "turned": RELU, "fc": TANH, "mm": NONE}


@pytest.mark.slow
def test_auto_takes_such_a_configuration(all_kinds, command, tmp_path):
    config, out = tmp_path / "ada.cfg", tmp_path / "auto"
    config.write_text(ada(50))
    arguments = ("--images", all_kinds.with_suffix(".npy"), "--ascend-config", config, "-o", out)
    output = command("ascend", "auto", all_kinds, *arguments, "--max-loss", 0.5)
    assert (out / "kinds_modified_model.onnx").exists(), output


@pytest.mark.slow
def test_repairs_keep_adaround_layers(adaround_build, built):
    out, _ = adaround_build
    output, repaired = built(ada(ITERATIONS), "--repair", "adaround", out="more")
    assert "adaptive rounding: nothing to repair" in output
    name = "kinds_deploy_model.onnx"
    assert (out / name).read_bytes() == (repaired / name).read_bytes()


@pytest.mark.parametrize(
    ("layers", "weight_params", "expected"),
    [
        (["pool"], {}, "AveragePool; give that layer arq_quantize"),
        (LAYERS, {"num_bits": 7}, "rounds weights to 8 bits, got num_bits 7"),
        (LAYERS, {"num_iteration": 10**7}, "at most 1000000"),
        (LAYERS, {"channel_wise": True}, "channel_wise"),
    ],
)
def test_unroundable_layers_are_refused_before_observing(
    layers, weight_params, expected, built, no_pass
):
    assert expected in built(document(layers, **weight_params), suffix=".json", code=1)[0]


@pytest.mark.parametrize(
    ("op", "attributes", "shape", "expected"),
    [
        ("Conv", {}, [2, 3, 3], "a 1-D convolution"),
        ("ConvTranspose", {"auto_pad": "SAME_UPPER"}, [3, 2, 3, 3], "auto_pad or output_shape"),
        ("MatMul", {}, [3, 8, 2], "a 3-D weight"),
    ],
)
def test_convolutions_that_amct_does_not_round(
    op, attributes, shape, expected, ascend_build, tmp_path
):
    weight, sides = np.random.default_rng(0).normal(size=shape), [8] * (len(shape) - 2)
    path, images = tmp_path / "c.onnx", tmp_path / "x.npy"
    onnx.save(model_of([(op, "x w", "y", "c", attributes)], {"w": weight}, [1, 3, *sides]), path)
    np.save(images, np.ones((2, 3, *sides), np.float32))
    weight_params = {"wts_algo": "ada_quantize", "num_iteration": 1}
    layer = {"quant_enable": True, "weight_quant_params": weight_params}
    text = json.dumps({"version": 1, "c": layer})
    assert expected in ascend_build(path, images, text, suffix=".json", code=1)[0]


def test_block_error_ends_other_blocks():
    from deploy.targets.ascend.weight_rounding import _search_blocks

    problem, calls = problem_of("matrix", *CASES["matrix"]), []

    def step():
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        _search_blocks(problem, amct.AdaParams(num_iteration=20_000), step)
    assert len(calls) < 10_000


def test_record_integers_are_used_unchanged():
    model = model_of([("Gemm", "x w", "y", "g")], {"w": np.eye(3)}, [1, 3])
    codes = np.arange(9, dtype=np.int8).reshape(1, 3, 3)
    record = LayerRecord(
        scale_d=np.float32(1), scale_w=np.ones(1, np.float32), rounded_weight=codes
    )
    quantized = quantize_layers(model, find_layers(model), {"g": record})["g"]
    np.testing.assert_array_equal(quantized.weight, codes[0].T)  # stored [C_in, C_out]
