"""Segmentation, masks, heat maps and changed pictures among a model's outputs."""

import json

import numpy as np
import pytest

from deploy.tasks.maps import HeatMaps, MaskMaps, Pixels
from deploy.tasks.rows import are_probabilities, are_probabilities_or_logs, sums_to_one
from tests.models import as_float32, build_net, make_model
from tests.outputs import fed, figure, peaked, rng, same_task, softmax


def smooth(classes, number, side=32):
    """Scores of each class: the one of the nearest of a few places wins."""
    places = np.random.default_rng(number).uniform(0, side, (classes, 2))
    rows, columns = np.mgrid[:side, :side]
    far = (rows - places[:, :1, None]) ** 2 + (columns - places[:, 1:, None]) ** 2
    scores = -far / 20
    return (scores - scores.mean(axis=0))[None].astype(np.float32)


@pytest.mark.parametrize(
    ("form", "last"),
    [
        ("raw", False),
        ("raw", True),
        ("shares", False),
        ("shares", True),
        ("numbers", False),
    ],
)
def test_classes_of_pixels(form, last):
    def output(number):
        raw = smooth(5, number)
        if form == "numbers":
            return {"seg": raw.argmax(axis=1)}
        value = softmax(raw) if form == "shares" else raw
        return {"seg": np.moveaxis(value, 1, 3) if last else value}

    references = [output(n) for n in range(4)]
    inputs = [fed((32, 32))] * 4
    ends = {"seg": "classes"} if form == "numbers" else {}
    assert figure(references, references, inputs, ends)[1].value == 1
    axis = 2 if last else -1
    candidates = [{"seg": np.roll(one["seg"], 3, axis=axis)} for one in references]
    task, found = figure(references, candidates, inputs, ends)
    assert task.task.name == "segmentation" and 0.4 < found.value < 0.95
    assert "% of pixels of FP32's class" in found.words


def specks(number, *, side, kinds=3):
    """Shares of classes a pixel: all background but for so many pixels in the middle."""
    raw = np.zeros((1, kinds, 128, 128), np.float32)
    raw[0, -1] = 6
    middle = slice(60 - number, 60 - number + side)
    raw[0, 0, middle, middle] = 12
    return softmax(raw)


def test_a_class_of_few_pixels_counts_where_all_others_are_background():
    inputs = [fed((128, 128))] * 6
    references = [{"seg": specks(n, side=3)} for n in range(6)]  # 0.05 % of the pixels
    form, same = figure(references, references, inputs)
    assert form.task.name == "segmentation" and same.value == 1 and "of 2 classes" in same.words
    silent = [{"seg": specks(n, side=0)} for n in range(6)]
    _, found = figure(references, silent, inputs)
    assert found.value == pytest.approx(0.5, abs=1e-3)  # all of the class is gone
    form, found = figure(silent, silent, inputs)  # to agree on nothing but background
    assert form.task.name == "segmentation" and found is None


@pytest.mark.parametrize(("pixels", "classes"), [(20, 2), (21, 3)])  # of 20,480: a thousandth
def test_mean_iou_leaves_rare_classes_out(pixels, classes):
    tally = Pixels("y", 3).tally()
    numbers = np.repeat([0, 1, 2], [10_240, 10_240 - pixels, pixels]).reshape(1, 128, 160)
    tally.add({}, {"y": numbers}, {"y": numbers})
    assert f"of {classes} classes" in tally.result().words


@pytest.mark.parametrize(("side", "task"), [(0, "masks"), (9, "segmentation")])
def test_a_map_of_kinds_that_is_all_background_leaves_the_task_to_other_outputs(side, task):
    def output(number):
        seen = np.zeros((1, 1, 128, 128), np.float32)
        seen[..., 40 + number : 60, 40:60] = 0.9
        return {"kinds": specks(number, side=side), "seen": seen}

    assert same_task([output(n) for n in range(4)], [fed((128, 128))] * 4) == task


def test_feature_maps_pictures_and_small_maps_are_not_segmented():
    made = rng()
    inputs = [fed((64, 64))] * 4
    noise = [{"f": made.standard_normal((1, 8, 64, 64)) * 4} for _ in range(4)]
    assert same_task(noise, inputs) is None
    assert same_task([{"f": smooth(3, n, 64) / 200 + 0.5} for n in range(4)], inputs) is None
    assert same_task([{"f": smooth(8, n, 64)} for n in range(4)], [fed((512, 512))] * 4) is None


def waves(channels, number, side=64):
    """Channels that change smoothly from place to place, each for itself."""
    made = np.random.default_rng(number)
    rows, columns = np.mgrid[:side, :side] / side
    turn = made.uniform(2, 6, (channels, 3, 1, 1))
    values = np.sin(turn[:, 0] * rows + turn[:, 1] * columns + 6 * turn[:, 2])
    return values[None].astype(np.float32)


def test_smooth_channels_that_change_each_for_itself_are_no_classes():
    inputs = [fed((64, 64))] * 4
    for channels in (2, 3):  # an optical flow; the colours of a picture of no brightness
        assert same_task([{"y": 9 * waves(channels, n)} for n in range(4)], inputs) is None
    grey = [waves(1, n) * 2 + waves(3, n + 9) / 2 for n in range(4)]
    assert same_task([{"y": one} for one in grey], inputs) is None  # a picture about its mean
    none = [{"y": smooth(3, n, 64) - 40} for n in range(4)]
    assert same_task(none, inputs) is None  # nothing is above 0 anywhere: no class of a Softmax
    assert same_task([{"y": smooth(3, n, 64)} for n in range(4)], inputs) == "segmentation"


def test_pages_made_sharper_and_small_disparities_are_no_masks():
    def page(number):
        value = np.full((1, 3, 64, 64), 0.97, np.float32)
        for row, column in np.random.default_rng(number).integers(0, 50, (30, 2)):
            value[:, :, row : row + 3, column : column + 9] = 0.04
        return value

    pages = [page(n) for n in range(4)]
    noise = np.random.default_rng(1).normal(0, 0.1, (4, 1, 3, 64, 64))
    blurred = [{"x": one + own} for one, own in zip(pages, noise, strict=True)]
    assert same_task([{"y": one} for one in pages], blurred) is None
    assert same_task([{"y": one} for one in pages], [fed((64, 64))] * 4) == "masks"
    far = [{"y": 0.05 + waves(1, n) / 20} for n in range(4)]
    assert same_task(far, [fed((64, 64))] * 4) is None


@pytest.mark.parametrize("last", [False, True])
def test_masks_are_judged_by_iou(last):
    def mask(left):
        value = np.full((1, 1, 64, 64), 0.02, np.float32)
        value[..., 10:30, left : left + 20] = 0.97
        return {"m": np.moveaxis(value, 1, 3) if last else value}

    inputs = [fed((64, 64))] * 4
    form, found = figure([mask(10)] * 4, [mask(20)] * 4, inputs)
    assert form.task.name == "masks" and found.value == pytest.approx(1 / 3)
    assert found.words == "IoU 0.333 of the pixels above 0.5"
    assert same_task([{"m": rng().uniform(0, 1, (1, 1, 64, 64))}] * 4, inputs) is None
    stages = [{**mask(10), "s": mask(20)["m"]}] * 4  # each stage has one, which all are judged
    form, found = figure(stages, [{**mask(10), "s": mask(30)["m"]}] * 4, inputs)
    assert form.task.form == "m, s: masks of 0 to 1" and found.value == pytest.approx(6 / 10)
    assert same_task([{**one, "s": one["s"][:, :, ::2, ::2]} for one in stages], inputs) is None


def shaded(*shares, side=(64, 64), channels=1, last=False):
    """A map [1, C, H, W] whose values are (value, share of the pixels), ... in order."""
    height, width = side
    ends = np.round(np.cumsum([0, *(share for _, share in shares)]) * height * width).astype(int)
    flat = np.concatenate(
        [np.full(b - a, v) for (v, _), a, b in zip(shares, ends, ends[1:], strict=False)]
    )
    value = np.broadcast_to(np.float32(flat).reshape(1, 1, *side), (1, channels, *side))
    return {"m": np.moveaxis(value, 1, 3) if last else value}


MASK = (0.95, 0.3), (0.05, 0.7)


SMALL = shaded(*MASK, side=(16, 16))


@pytest.mark.parametrize(
    ("output", "side", "masks"),
    [
        (shaded(*MASK), 64, True),
        (shaded(*MASK, channels=4), 64, True),
        (shaded(*MASK, channels=5), 64, False),
        (shaded(*MASK, channels=4, last=True), 64, True),
        (SMALL, 64, True),
        (shaded(*MASK, side=(15, 16)), 64, False),
        (shaded(*MASK, side=(16, 15)), 64, False),
        (shaded(*MASK, side=(65, 64)), 64, False),
        (shaded((0.95, 0.3), (0.5, 0.24), (0.05, 0.46)), 64, True),
        (shaded((0.95, 0.3), (0.5, 0.26), (0.05, 0.44)), 64, False),
        (shaded((0.95, 0.3), (0.11, 0.3), (0.05, 0.4)), 64, False),
        (shaded((0.95, 0.3), (0.89, 0.3), (0.05, 0.4)), 64, False),
        (shaded((0.51, 0.1), (0.05, 0.9)), 64, True),
        (shaded((0.5, 0.1), (0.05, 0.9)), 64, False),
        (shaded((1.14, 0.3), (-0.14, 0.7)), 64, True),
        (shaded((1.16, 0.3), (0.05, 0.7)), 64, False),
        (shaded((0.95, 0.3), (-0.16, 0.7)), 64, False),
        (SMALL, 128, True),
        (SMALL, 129, False),  # an eighth of the picture
    ],
)
def test_a_mask_is_near_0_or_1_and_not_much_smaller_than_the_picture(output, side, masks):
    assert (same_task([output] * 2, [fed((side, min(side, 128)))] * 2) == "masks") == masks


@pytest.mark.parametrize(
    ("share", "value", "is_judged"), [(0.0006, 0.6, True), (0.0004, 0.6, False), (0.1, 0.5, False)]
)
def test_masks_are_judged_with_enough_pixels_above_a_half(share, value, is_judged):
    tally = MaskMaps(("m",)).tally()
    seen = shaded((value, share), (0.0, 1 - share), side=(100, 100))
    tally.add({}, seen, seen)
    found = tally.result()
    assert (found and found.words) == ((is_judged and "IoU 1.000 of the pixels above 0.5") or None)


@pytest.mark.parametrize(
    ("shape", "end", "task"),
    [
        ((1, 16, 64), "classes", "segmentation"),
        ((1, 1, 64, 64), "classes", "segmentation"),
        ((1, 64, 64), "selected", "indices"),
        ((1, 64), "classes", "indices"),
        ((1, 15, 64), "classes", "indices"),
        ((1, 1), "classes", "classes"),
    ],
)
def test_maps_of_an_argmax_are_segmentation(shape, end, task):
    numbers = np.zeros(shape, np.int64)
    numbers[..., :8] = 1
    assert same_task([{"y": numbers}] * 2, [fed((64, 64))] * 2, {"y": end}) == task


def test_a_noisy_map_of_class_numbers_is_compared_as_classes():
    rng = np.random.default_rng(0)
    maps = [rng.integers(0, 5, (1, 64, 64)) for _ in range(4)]
    references, candidates = [], []
    for classes in maps:
        is_noise = rng.random(classes.shape) < 0.1
        references.append({"y": classes})
        candidates.append({"y": np.where(is_noise, 4 - classes, classes)})
    form, found = figure(references, candidates, [fed((64, 64))] * 4, {"y": "classes"})
    assert "% of pixels of FP32's class" in found.words and not form.parts


@pytest.mark.parametrize("last", [False, True])
def test_peaks_of_heat_maps_within_a_pixel(last):
    rows, columns = np.mgrid[:48, :64]

    def maps(places):
        far = [(rows - r) ** 2 + (columns - c) ** 2 for r, c in places]
        heat = np.exp(-np.array(far) / 8)[None].astype(np.float32)
        return {"heat": np.moveaxis(heat, 1, 3) if last else heat}

    places = np.random.default_rng(2).integers(5, 40, (17, 2))
    moved = places.copy()
    moved[:3, 1] += 1
    moved[3:5, 1] += 4
    form, found = figure([maps(places)] * 4, [maps(moved)] * 4, [fed((96, 128))] * 4)
    assert form.task.form == "heat: 17 heat maps"  # the picture's rows could be channels too
    assert found.words == "60 of 68 peaks of FP32 within a pixel"


@pytest.mark.parametrize(
    ("how", "heat"),
    [
        ({}, True),
        ({"channels": 3}, False),
        ({"side": 15}, False),
        ({"pixels": 13}, False),
        ({"peak": 0.21}, True),
        ({"peak": 0.2}, False),
        ({"peak": 1.5}, True),
        ({"peak": 1.51}, False),
        ({"rest": -0.29}, True),
        ({"rest": -0.31}, False),
        ({"rest": 0.44}, True),
        ({"rest": 0.46}, False),
        ({"peak": np.nan}, False),
    ],
)
def test_a_heat_map_is_low_but_for_a_narrow_peak(how, heat):
    assert (same_task([peaked(**how)] * 2, [fed((256, 256))] * 2) == "heat maps") == heat


@pytest.mark.parametrize(("lower", "heat"), [(1, True), (2, False)])
def test_most_heat_maps_have_their_peak(lower, heat):
    maps = peaked(pixels=1)
    maps["heat"][:, :lower] = 0.1
    assert (same_task([maps] * 2, [fed((256, 256))] * 2) == "heat maps") == heat
    tally = HeatMaps(("heat",), 4).tally()
    tally.add({}, maps, {"heat": np.roll(maps["heat"], (1, 1), axis=(2, 3))})
    tally.add({}, maps, {"heat": np.roll(maps["heat"], 2, axis=2)})
    assert tally.result().count == f"{4 - lower} of {2 * (4 - lower)}"


# Two Convs change a picture, and a third one leaves it as it is.
TWO_CONVS = """
    a = Conv <pads = [1, 1, 1, 1]> ({0}, w1) r = Relu (a)
    c = Conv <pads = [1, 1, 1, 1]> (r, w2) s = Add ({0}, c) {1} = Conv (s, w3)
"""


def changing(change, nodes, shapes, **weights):
    rng = np.random.default_rng(2)
    weights |= {
        "w1": 0.3 * rng.normal(size=(8, 3, 3, 3)),
        "w2": change * rng.normal(size=(3, 8, 3, 3)),
        "w3": np.eye(3)[:, :, None, None],
    }
    ends = ({name: shape} for name, shape in zip("xy", shapes, strict=True))
    return make_model(nodes, *ends, as_float32(weights))


def denoiser():
    """x less a small noise, found by two layers of which one has channels that int8 spoils.

    The whole output has 40 dB with all in int8, and what was taken out of x is lost.
    """
    rng = np.random.default_rng(1)
    size = np.where(np.arange(8) == 0, 1000.0, 1.0).reshape(1, 8, 1, 1)
    weights = {
        "w1": rng.normal(0, 0.3, (8, 3, 3, 3)),
        "size": size,
        "w2": rng.normal(0, 0.3, (8, 8, 1, 1)) / size,
        "w3": rng.normal(0, 0.1, (8, 8, 3, 3)),
        "w4": rng.normal(0, 0.004, (3, 8, 3, 3)),
    }
    weights["w2"][:, 0] = 0
    nodes = """
        a = Conv <pads = [1, 1, 1, 1]> (x, w1) t = Tanh (a) m = Mul (t, size)
        bad = Conv (m, w2) r = Relu (bad)
        mid = Conv <pads = [1, 1, 1, 1]> (r, w3) q = Relu (mid)
        noise = Conv <pads = [1, 1, 1, 1]> (q, w4) y = Sub (x, noise)
    """
    ends = ({name: [1, 3, 16, 16]} for name in "xy")
    return make_model(nodes, *ends, as_float32(weights), opset=17)


def int8_of(model, samples, folder, *words):
    """The int8 engine in the report of a build."""
    out = build_net(model, samples, folder, *words)
    return json.loads((out / "report.json").read_text())["engines"][1]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_the_search_hears_the_noise_beside_the_change(target, tmp_path):
    samples = np.random.default_rng(1).uniform(-1, 1, (24, 3, 16, 16))
    found = [
        int8_of(
            denoiser(), samples, tmp_path / str(effort), "--target", target, "--effort", effort
        )["accuracy"]
        for effort in (0, 1)
    ]
    plain, searched = (one["parts"][0] for one in found)
    assert plain["label"] == searched["label"] == "y - x"
    assert found[0]["outputs"][0]["sqnr_db"] > 30 > plain["sqnr_db"] + 15
    assert searched["sqnr_db"] > plain["sqnr_db"] + 10
    assert "Conv_bad" in (tmp_path / "1" / "out" / "calib8/net.plan.toml").read_text()


def enlarging(change, last):
    """x at twice the size by its nearest pixels, plus so much of what two Convs make of it."""
    first, end = ("t", "s3") if last else ("x", "y")
    nodes = f"""l = Resize <mode = "linear"> ({first}, , twice) {TWO_CONVS.format("l", end)}"""
    shapes = [[1, 3, 32, 32], [1, 3, 64, 64]]
    if last:
        before = "t = Transpose <perm = [0, 3, 1, 2]> (x)"
        nodes = f"{before} {nodes} y = Transpose <perm = [0, 2, 3, 1]> (s3)"
        shapes = [[1, *size[2:], 3] for size in shapes]
    return changing(change, nodes, shapes, twice=[1, 1, 2, 2])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("change", "level"), [(0.0004, "doubtful"), (0.05, "good")])
def test_what_super_resolution_adds_must_be_left(change, level, last, tmp_path):
    turn = np.arange(32) / 8
    rng = np.random.default_rng(1)
    smooth = [np.outer(np.sin(turn + rng.uniform(0, 6)), np.cos(turn)) for _ in range(72)]
    samples = np.stack(smooth).reshape(24, 3, 32, 32)
    samples = np.moveaxis(samples, 1, 3) if last else samples
    said = int8_of(enlarging(change, last), samples, tmp_path, "--effort", 0)["verdict"]
    assert said["level"] == level
    assert ("y - x resized" in str(said)) == (level == "doubtful")


@pytest.mark.parametrize(("change", "level"), [(0.0004, "doubtful"), (0.01, "good")])
def test_a_change_that_int8_is_too_coarse_for_is_doubtful(change, level, tmp_path):
    samples = np.random.default_rng(1).uniform(-1, 1, (24, 3, 32, 32))
    # x plus so much of what two Convs make of it, through a Conv that leaves it as it is
    model = changing(change, TWO_CONVS.format("x", "y"), [[1, 3, 32, 32]] * 2)
    said = int8_of(model, samples, tmp_path, "--effort", 0)["verdict"]
    assert said["level"] == level and "y - x" in str(said)


@pytest.fixture
def shares():
    power = np.exp(np.random.default_rng(0).normal(size=(7, 5)))
    return power / power.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_what_a_softmax_gives(shares, kind):
    shares = shares.astype(kind)
    assert sums_to_one(shares).shape == (7,)
    assert (
        are_probabilities(shares)
        and are_probabilities(shares.T, 0)
        and not are_probabilities(shares, 0)
    )
    assert are_probabilities_or_logs(shares) and are_probabilities_or_logs(np.log(shares))


def test_what_is_none(shares):
    assert not are_probabilities(np.log(shares)) and not are_probabilities_or_logs(shares * 1.02)
    assert not are_probabilities_or_logs(np.log(shares) + 0.02)
    # the power of a large raw score would be infinite, which numpy warns of
    assert not are_probabilities_or_logs(np.array([[-3.0, 5000.0]], np.float32))
    sums_to_1 = np.array([[-0.5, 1.5]])
    assert sums_to_one(sums_to_1).all() and not are_probabilities(sums_to_1)
    assert list(sums_to_one(np.array([[0.4, 0.6], [0.4, 0.5]]))) == [True, False]
