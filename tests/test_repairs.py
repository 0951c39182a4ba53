"""Repairs: small networks that each need one, through the command and for every target."""

import json
import math

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calib8 import build, calibrate
from calibrators.amct.arq import arq, arq_integers
from calibrators.errors import CalibrationError
from calibrators.grids import quantize_weight, weight_scales
from calibrators.rounding import block_products, gram, round_by_output
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.errors import ConfigError
from deploy.frontends import load
from deploy.method import Choices, Method
from deploy.runtimes.ort import OrtSession
from deploy.targets import TARGETS
from deploy.targets.base import BuildRequest
from deploy.tuning.repairs import TITLE
from deploy.tuning.repairs.apply import trial_builder
from deploy.tuning.repairs.output_rounding import LayerInputs, round_weight
from deploy.tuning.repairs.repair_layers import find_weighted_layers
from deploy.tuning.repairs.sample_runs import patches
from tests.models import as_float32, built_files, make_model, parse_nodes, save_net

ALL = "onnxruntime,tensorrt,ascend"


def output_error(steps, integers, products):
    """Return each row's squared error of the output (rows, groups)."""
    error = integers - steps
    return (block_products(error, products) * error).sum(axis=2)


def saved(folder, nodes, constants, *, shape=("batch", 3, 12, 12), name="net"):
    """A model x -> y of ONNX's text; PADS pads its layers."""
    nodes = parse_nodes(nodes.replace("PADS", "pads = [1, 1, 1, 1]"))
    model = make_model(nodes, {"x": list(shape)}, {"y": None}, as_float32(constants), opset=17)
    return save_net(model, folder / f"{name}.onnx")


def lopsided(folder):
    """Weights that all round down: every layer gives less than it should."""
    rng = np.random.default_rng(2)

    def weight(*shape):
        steps = rng.integers(-20, 21, shape) + 0.45
        steps[:, 0, 0, 0] = 127
        return steps / 127 / np.prod(shape[1:]) * 8

    constants = {"w1": weight(16, 3, 3, 3), "w2": weight(16, 16, 3, 3), "w3": weight(8, 16, 3, 3)}
    nodes = (
        "c1 = Conv <PADS> (x, w1) r1 = Relu(c1) c2 = Conv <PADS> (r1, w2) r2 = Relu(c2)"
        "y = Conv <PADS> (r2, w3)"
    )
    return saved(folder, nodes, constants, name="lopsided")


@pytest.fixture
def feed(tmp_path):
    """20 samples of noise, positive for a picture."""

    def save(shape):
        x = np.random.default_rng(6).normal(size=(20, *shape)).astype(np.float32)
        path = tmp_path / "feed.npy"
        np.save(path, np.abs(x) if len(shape) == 3 else x)
        return path

    return save


@pytest.fixture
def built(tmp_path, run, feed):
    """`calib8 build` -> its report; `refused` gives the one sentence of a build that is refused."""

    def call(model, *arguments, out="o"):
        shape = onnx.load(model).graph.input[0].type.tensor_type.shape.dim[1:]
        if "--images" not in arguments:
            arguments = ("--images", feed(tuple(d.dim_value for d in shape)), *arguments)
        plain = ("--duration", 0, "--effort", 0, "--accept")  # a repair alone, whatever is left
        return run("build", model, *plain, "--out", tmp_path / out, *arguments)

    def report(model, *arguments, out="o"):
        code, _, error = call(model, *arguments, out=out)
        assert code == 0, error
        assert "Warning" not in error, error
        return json.loads((tmp_path / out / "report.json").read_text())

    def refused(model, *arguments):
        code, _, error = call(model, *arguments)
        assert code in (1, 2), error
        assert error.count("\n") == 1, error
        return error

    report.refused = refused
    return report


def worst(report):
    """Target -> SQNR of its worst output, over all 20 samples."""
    worst_db = {}
    for row in report["engines"]:
        if row.get("accuracy"):
            outputs = row["accuracy"]["outputs"]
            worst_db[row["target"]] = min(output["sqnr_db"] for output in outputs)
    return worst_db


def notes_with(report, text=""):
    """Notes that hold the words."""
    target_notes = (note for target in report["targets"] for note in target.get("notes", ()))
    return [note for note in (*report.get("notes", ()), *target_notes) if text in note]


@pytest.mark.slow
def test_repair_improves_every_target(tmp_path, built):
    arguments = ("--target", ALL)
    plain_report = built(lopsided(tmp_path), *arguments, out="plain")
    repaired_report = built(lopsided(tmp_path), *arguments, "--repair", "adaround", out="repaired")
    kept_notes = [note for note in notes_with(repaired_report, TITLE) if note.endswith(", kept")]
    assert len(kept_notes) == len(ALL.split(",")), notes_with(repaired_report)
    old, new = worst(plain_report), worst(repaired_report)
    assert set(old) == set(ALL.split(","))
    assert all(new[target] > old[target] + 3 for target in old), (old, new)


@pytest.mark.slow
def test_huge_inputs_are_rounded_to_nearest(tmp_path, built):
    """As of values of 1e30: their products are not finite."""
    x = np.abs(np.random.default_rng(6).normal(size=(20, 3, 12, 12))).astype(np.float32)
    np.save(tmp_path / "huge.npy", x * 1e30)
    arguments = (
        "--effort",
        1,
        "--target",
        "onnxruntime,tensorrt",
        "--images",
        tmp_path / "huge.npy",
    )
    report = built(lopsided(tmp_path), *arguments)
    assert not notes_with(report, "nothing was searched")
    assert all(target["search"]["probes"] for target in report["targets"])


@pytest.mark.slow
def test_search_tries_rounding_unless_refused(tmp_path, built):
    model, note_text = lopsided(tmp_path), TITLE
    searched = ("--effort", 1)
    assert notes_with(built(model, *searched), note_text)
    assert not notes_with(built(model, out="plain"), note_text)
    assert not notes_with(built(model, *searched, "--repair", "none", out="none"), note_text)


def requests(folder, feed, target):
    """A target, and what gives a request of `lopsided` for it that nothing was kept of."""
    loaded = calibrate(lopsided(folder), feed((3, 12, 12)), targets=(target,))

    def fresh():
        ranges = Ranges(loaded.ranges.observed, loaded.ranges.method, loaded.ranges.range_limits)
        return BuildRequest(
            subject=loaded.subject,
            folder=folder,
            ranges=ranges,
            feed=loaded.feed,
            manifest={},
            evaluation_set=make_evaluation_set(loaded.feed, loaded.subject.model, 16),
        )

    return TARGETS[target](), fresh


@pytest.mark.parametrize("target", ALL.split(","))
def test_search_tries_rounding_without_float_layers(target, tmp_path, feed):
    made_for, fresh = requests(tmp_path, feed, target)
    request = fresh()
    trial = trial_builder(made_for, request, rounds_weights=True)
    plain = trial_builder(made_for, request, rounds_weights=False)
    name = next(n.name for n in request.model.graph.node if n.output[0] == "c2")
    choice_request = request.with_choices(Choices(float_nodes={name: "tried"}))
    original_weights = {layer.name: layer.array for layer in find_weighted_layers(request.model)}
    trial_weights = {
        layer.name: layer.array for layer in find_weighted_layers(trial(choice_request))
    }
    assert np.array_equal(trial_weights[name], original_weights[name])  # in float, and not rounded
    sample = request.feed.first_samples(1)[0]
    expected = OrtSession.open(request.model).run(sample)["y"]
    errors = [
        np.square(OrtSession.open(make(choice_request)).run(sample)["y"] - expected).sum()
        for make in (plain, trial)
    ]
    assert errors[1] < 0.7 * errors[0]


def test_repair_is_named_or_refused(wording):
    with pytest.raises(ConfigError) as refusal:
        build("model.onnx", repairs="bias")
    wording.check(refusal.value)


@pytest.mark.slow
def test_repairs_are_equal_for_any_threads(tmp_path, built):
    model, arguments = lopsided(tmp_path), ("--target", ALL, "--repair", "adaround")
    built(model, *arguments, "--threads", 1, out="one")
    built(model, *arguments, "--threads", 3, out="three")
    assert built_files(tmp_path / "one") == built_files(tmp_path / "three")
    assert built_files(tmp_path / "one")


seeds = st.integers(0, 10_000)
calm = settings(max_examples=30)


@calm
@given(seeds, st.integers(1, 3), st.integers(1, 5), st.integers(2, 24))
def test_output_rounding_never_exceeds_nearest_error(seed, g, c, k):
    rng = np.random.default_rng(seed)
    steps, x = rng.normal(0, 20, (g, c, k)), rng.uniform(0, 1, (g, k, 200))
    fixed = rng.random((g, c, k)) < 0.2
    products = gram(x)
    codes = round_by_output(steps, products, fixed=fixed)
    assert np.isin(codes - np.floor(steps), (0, 1)).all()
    assert (codes == np.rint(steps))[fixed].all()
    damped = products + 0.2 * np.einsum("gkk->gk", products).mean(1)[:, None, None] * np.eye(k)
    nearest_error, rounded_error = (output_error(steps, q, damped) for q in (np.rint(steps), codes))
    assert (rounded_error <= nearest_error + 1e-9).all()


def test_output_rounding_wins_for_correlated_inputs():
    steps = np.full((1, 1, 40), 3.4)
    x = np.random.default_rng(0).uniform(0.5, 1, (1, 40, 500))
    codes = round_by_output(steps, gram(x), fixed=np.zeros(steps.shape, bool))
    assert abs(codes.sum() - steps.sum()) < 1
    assert np.rint(steps).sum() == steps.sum() - 16


@pytest.mark.parametrize(("weight", "expected_sum"), [(0.265, 0), (0.28, 1)])
def test_damping_holds_weights_at_nearest(weight, expected_sum):
    """Of two that one input reads, one goes up where 4 w - 1 is more than 0.2 (1 - 2 w)."""
    steps = np.full((1, 1, 2), weight)
    codes = round_by_output(steps, np.ones((1, 2, 2)), fixed=np.zeros(steps.shape, bool))
    assert codes.sum() == expected_sum


def test_unsound_weights_are_refused():
    fixed = np.zeros((1, 1, 2), bool)
    with pytest.raises(CalibrationError, match="must be finite"):
        round_by_output(np.full((1, 1, 2), np.nan), np.ones((1, 2, 2)), fixed=fixed)


@calm
@given(seeds, st.integers(1, 3), st.integers(1, 150), st.integers(1, 300))
def test_products_in_blocks_are_the_products(seed, g, m, k):
    rng = np.random.default_rng(seed)
    left_matrix, right_matrix = rng.normal(size=(g, m, k)), rng.normal(size=(g, k, 70))
    np.testing.assert_allclose(
        block_products(left_matrix, right_matrix), left_matrix @ right_matrix, atol=1e-9
    )
    np.testing.assert_allclose(
        gram(left_matrix), left_matrix @ left_matrix.swapaxes(1, 2) / k, rtol=1e-3, atol=1e-4
    )


def lone(weight, kind, **attributes):
    """The one layer of a model that has no more."""
    model = make_model([(kind, "x w", "y", attributes)], {"x": None}, {"y": None}, {"w": weight})
    (layer,) = find_weighted_layers(model)
    return layer


def test_overfitted_channel_is_rounded_to_nearest():
    """What was rounded for patches of one kind is worse on patches of another: taken back."""
    rng = np.random.default_rng(6)
    weight = np.concatenate([np.full((2, 24), 3.4), rng.normal(0, 20, (2, 24))]).astype(np.float32)
    weight[:, 0] = 127
    layer = lone(weight, "Gemm", transB=1)
    inputs = rng.uniform(0.5, 1, (1, 24, 300)).astype(np.float32)
    turns = np.where(np.arange(24) % 2, 1, -1)[None, :, None]
    similar = rng.uniform(0.5, 1, (1, 24, 50)).astype(np.float32)
    dissimilar = inputs[:, :, :50] * turns
    free, confirmed, back = (
        round_weight(layer, np.ones((4, 1)), LayerInputs(inputs, check_inputs))
        for check_inputs in (None, similar, dissimilar)
    )
    assert math.isnan(free.error_ratio)
    assert confirmed.error_ratio < 0.2
    assert np.array_equal(free.weight, confirmed.weight)
    has_moved = (back.weight != weight).any(axis=1)
    wrong = np.square((np.rint(back.weight) - weight) @ dissimilar[0]).sum(axis=1)
    plain = np.square((np.rint(weight) - weight) @ dissimilar[0]).sum(axis=1)
    assert not has_moved.all()
    assert (wrong <= plain * (1 + 1e-6)).all()
    assert back.error_ratio <= 1


CONVS = [
    {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]},
    {"group": 2},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [2, 3]},
    {"auto_pad": "VALID"},
]
TRANSPOSED = [{}, {"strides": [2, 1], "pads": [1, 0, 0, 1], "output_padding": [1, 0]}, {"group": 2}]


@pytest.mark.parametrize(
    ("kind", "layer_attributes"),
    [
        *(("Conv", attributes) for attributes in CONVS),
        *(("ConvTranspose", attributes) for attributes in TRANSPOSED),
    ],
)
def test_weights_times_patches_are_the_layer(kind, layer_attributes):
    rng = np.random.default_rng(7)
    first_channels, second_channels = (4, 6) if kind == "ConvTranspose" else (6, 4)
    w = rng.normal(size=(first_channels, second_channels // layer_attributes.get("group", 1), 3, 2))
    ends = {"x": [2, 4, 9, 10]}, {"y": None}
    model = load(
        make_model([(kind, "x w", "y", layer_attributes)], *ends, as_float32({"w": w}))
    ).model
    x = rng.normal(size=(2, 4, 9, 10)).astype(np.float32)
    y = OrtSession.open(model).run({"x": x})["y"]
    (layer,) = find_weighted_layers(model)
    products = block_products(layer.to_rows(layer.array), patches(layer, x, 1, 10_000))
    want = y.reshape(2, products.shape[0], -1, *y.shape[2:]).transpose(1, 2, 0, 3, 4)
    np.testing.assert_allclose(products, want.reshape(products.shape), atol=1e-4)


@pytest.mark.parametrize(("given_", "gains"), [("", True), (', auto_pad = "SAME_UPPER"', False)])
def test_transposed_layer_with_pads_is_rounded(given_, gains, tmp_path, built):
    rng = np.random.default_rng(9)
    w = rng.integers(-20, 21, (3, 8, 2, 2)) + 0.45
    w[0, :, 0, 0] = 127
    v = rng.integers(-126, 127, (3, 3, 1, 1))
    v[:, 0] = 127  # whole steps: nothing of it can be rounded
    nodes = f"c = Conv(x, v) r = Relu(c) y = ConvTranspose <strides = [2, 2]{given_}> (r, w)"
    model = saved(tmp_path, nodes, {"v": v / 127, "w": w / 127}, name="up")
    report = built(model, "--target", "onnxruntime,tensorrt", "--repair", "adaround")
    notes = notes_with(report, TITLE)
    assert notes, notes
    assert all(("1 layer, " in note and " -" in note) == gains for note in notes), notes


@calm
@example(seed=45, kind="Conv", is_transposed=False)  # a value reaches the extreme of the other sign
@given(seeds, st.sampled_from(["Conv", "Gemm", "MatMul"]), st.booleans())
def test_targets_write_the_chosen_integers(seed, kind, is_transposed):
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(5, 2, 3, 3) if kind == "Conv" else (5, 18)).astype(np.float32)
    layer_attributes = {"group": 1} if kind == "Conv" else {"transB": 1}
    if kind == "MatMul" or (kind == "Gemm" and is_transposed):
        weight, layer_attributes = np.ascontiguousarray(weight.T), {}
    layer = lone(weight, kind, **layer_attributes)
    inputs = rng.uniform(0, 1, (1, 18, 100)).astype(np.float32)
    axis = 0 if kind == "Conv" or layer_attributes else 1
    scales = weight_scales(weight, axis)
    other_axes = [other for other in range(weight.ndim) if other != axis]
    wide = np.expand_dims(scales.astype(np.float64), other_axes)
    rounded_weight = round_weight(layer, wide, LayerInputs(inputs)).weight
    assert weight_scales(rounded_weight, axis).tobytes() == scales.tobytes()
    steps = layer.to_rows((weight / wide).astype(np.float32))
    target_codes = quantize_weight(rounded_weight, scales, axis)
    assert np.abs(target_codes - weight / wide).max() < 1 + 1e-4
    got = layer.to_rows(target_codes.astype(np.float32))
    products = gram(inputs)
    nearest = np.rint(steps)
    damp = 0.2 * np.trace(products[0]) / 18 * np.eye(18)
    nearest_error, rounded_error = (
        output_error(steps, q, products + damp).sum() for q in (nearest, got)
    )
    assert rounded_error <= nearest_error * (1 + 1e-4)
    assert rounded_error < nearest_error or (got == nearest).all()
    if kind == "Conv":  # AMCT's own scales, of 128 steps where the least value is the extreme
        arq_scales = arq(weight)
        ascend = round_weight(
            layer, arq_scales.reshape(-1, 1, 1, 1).astype(np.float64), LayerInputs(inputs)
        ).weight
        arq_scales_again = arq(ascend)
        assert arq_scales_again.tobytes() == arq_scales.tobytes()
        codes = arq_integers(ascend, arq_scales)
        assert np.abs(codes - weight / arq_scales.reshape(-1, 1, 1, 1)).max() < 1 + 1e-4


def test_trials_do_not_depend_on_order(tmp_path, feed):
    made_for, fresh = requests(tmp_path, feed, "onnxruntime")
    shared_request = fresh()
    names = [n.name for n in shared_request.model.graph.node]
    choice_list = [
        Choices(),
        Choices(float_nodes={names[0]: "tried"}),
        Choices(method=Method.of("minmax")),
        Choices(float_nodes={names[0]: "as asked"}, rounded=False),
        Choices(),
    ]
    shared_builder = trial_builder(made_for, shared_request, rounds_weights=True)
    for choices in choice_list:
        fresh_request = fresh()
        fresh_builder = trial_builder(made_for, fresh_request, rounds_weights=True)
        fresh_trial = fresh_builder(fresh_request.with_choices(choices))
        assert (
            shared_builder(shared_request.with_choices(choices)).SerializeToString()
            == fresh_trial.SerializeToString()
        )


@pytest.mark.parametrize("shape", [(1, 200, 130), (3, 64, 257), (2, 9, 70), (1, 130, 1)])
def test_block_products_sum_to_the_matrix(shape):
    groups, rows, inner = shape
    rng = np.random.default_rng(3)
    matrix = rng.integers(-9, 9, shape).astype(np.float32)
    gram_matrix = block_products(matrix, matrix.swapaxes(1, 2).copy(), symmetric=True)
    assert np.array_equal(gram_matrix, matrix.astype(np.float64) @ matrix.swapaxes(1, 2))
    left_matrix, right_matrix = rng.normal(size=shape), rng.normal(size=(groups, inner, 150))
    expected = np.zeros((groups, rows, 150))
    step = max(64, 64**3 // (min(rows, 64) * 64))
    for k in range(0, inner, step):
        for a in range(0, rows, 64):
            for b in range(0, 150, 64):
                block = (
                    left_matrix[:, a : a + 64, k : k + step]
                    @ right_matrix[:, k : k + step, b : b + 64]
                )
                expected[:, a : a + 64, b : b + 64] += block
    assert block_products(left_matrix, right_matrix).tobytes() == expected.tobytes()
