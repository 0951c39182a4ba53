"""Key points, heat maps' peaks and boxes with points, through the command."""

import json
from functools import partial
from itertools import product

import numpy as np
import pytest
from onnx import TensorProto

from deploy.errors import ConfigError
from deploy.metrics.output_form import derive_form
from deploy.tasks import Metric
from deploy.tasks.declarations import Declaration
from deploy.tasks.detector import list_cells
from tests.models import as_float32, make_model, make_value, run_command, save_net
from tests.outputs import change_all, fed, same_task
from tests.outputs import figure as outputs_figure

SIZE, POINTS = (64, 48), 6  # height, width of the picture


def places(number):
    made = np.random.default_rng(number)
    return [made.uniform(5, side - 5, POINTS) for side in (SIZE[1], SIZE[0])]


def figure(references, candidates, size):
    """Task and figure of two models' outputs for a picture of this size."""
    form, found = outputs_figure(references, candidates, [fed(size)] * len(references))
    return form.task, found


def task_of(outputs, size):
    return same_task(outputs, [fed(size)] * len(outputs))


def rows(middles, side, fine, made):
    far = np.arange(int(side * fine)) / fine - middles[:, None]
    return (0.8 * np.exp(-(far**2) / 4) + made.normal(0, 0.01, far.shape))[None]


def outputs(number, *, fine=2.0, moved=0.0, among=POINTS, soft=False):
    made = np.random.default_rng(50 + number)
    named = {}
    for name, middles, side in zip("xy", places(number), SIZE[::-1], strict=True):
        value = rows(middles + moved * (np.arange(POINTS) < among), side, fine, made)
        if soft:
            power = np.exp(20 * value)
            value = power / power.sum(axis=2, keepdims=True)
        named[name] = value.astype(np.float32)
    return named


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("fine", [1.0, 2.0, 1.5])
def test_points_within_two_pixels_are_kept(fine, soft):
    def moved(**how):
        return [outputs(n, fine=fine, soft=soft, **how) for n in range(5)]

    references = moved()
    task, same = figure(references, references, SIZE)
    assert task.form == "x, y: columns and rows of 6 key points" and same.value == 1
    assert figure(references, moved(moved=1), SIZE)[1].value == 1
    far = moved(moved=5, among=2)
    _, found = figure(references, far, SIZE)
    assert found.words == "20 of 30 key points of FP32 within 2 pixels"
    broken = change_all(far, lambda value: value * np.nan)
    cut = change_all(references, lambda value: value[..., 1:])
    assert [figure(references, other, SIZE)[1].value for other in (broken, cut)] == [0, 0]


def test_points_that_fp32_does_not_see_do_not_count():
    references = [outputs(n) for n in range(4)]
    seen = (np.arange(POINTS) > 1)[:, None] * 1.0
    hidden = change_all(references, lambda value: value * seen)
    tally = derive_form(references, inputs=[fed(SIZE)] * 4).task.tally()
    for pair in zip(hidden, references, strict=True):
        tally.add(fed(SIZE), *pair)
    assert tally.result().words.startswith("16 of 16 key points")


def test_other_pairs_are_no_points():
    pairs = [outputs(n) for n in range(4)]
    turned = [{"a": one["y"], "b": one["x"]} for one in pairs]  # their order tells nothing
    assert figure(turned, turned, SIZE)[0].outputs == ("b", "a")
    assert task_of(pairs, SIZE) == "key points" and task_of(pairs, (64, 64)) is None
    assert task_of([{"x": one["x"]} for one in pairs], SIZE) != "key points"
    three_rows = change_all(pairs, lambda value: value[:, :3])
    assert task_of(three_rows, SIZE) is None


def saved(path):
    """A bright spot in each of three colours is a point: its column and its row."""
    nodes = """
        c = Conv <pads = [1, 1, 1, 1]> (x, w, b)
        columns = ReduceMax <axes = [2], keepdims = 0> (c)
        rows = ReduceMax <axes = [3], keepdims = 0> (c)
    """
    weights = np.zeros((4, 4, 3, 3), np.float32)
    weights[np.arange(4), np.arange(4)] = [[0.1, 0.2, 0.1], [0.2, 1, 0.2], [0.1, 0.2, 0.1]]
    inputs = {"x": ["n", 4, *SIZE]}
    outputs = {"columns": ["n", 4, SIZE[1]], "rows": ["n", 4, SIZE[0]]}
    model = make_model(nodes, inputs, outputs, {"w": weights, "b": np.zeros(4, np.float32)})
    return save_net(model, path)


def pictures_of_points(glare):
    made = np.random.default_rng(1)
    pictures = made.uniform(0, 0.02, (16, 4, *SIZE)).astype(np.float32)
    for number, picture in enumerate(pictures):
        row, column = made.integers(3, SIZE[0] - 3, 4), made.integers(3, SIZE[1] - 3, 4)
        picture[np.arange(4), row, column] = glare if number == 15 else 1
    return pictures


SIDE, MESH = 64, 24
PICTURE = (SIDE, SIDE)


def line(number, *, unit=SIDE):
    """Points along an outline, in their order, [K, 2]."""
    made = np.random.default_rng(number)
    turn = np.linspace(0, 5, MESH)
    outline = np.stack([np.cos(turn), np.sin(turn)], axis=1) * made.uniform(0.2, 0.3)
    return (outline + made.uniform(0.45, 0.55, 2)) * unit


def output(number, *, unit=SIDE, more=0, flat=True, moved=0.0, among=MESH):
    """One sample's, with so many numbers behind each place."""
    made = np.random.default_rng(90 + number)
    places = line(number, unit=unit)
    places[:among] += moved
    places -= unit == 2  # -1 to 1
    extra = made.normal(0, 0.05 * unit, (MESH, more))
    return {"y": laid(np.concatenate([places, extra], axis=1).astype(np.float32), flat)}


def laid(points, flat):
    """Points as a flat output, or as [1, 1, K, p]."""
    return points.reshape(1, -1) if flat else points[None, None]


@pytest.mark.parametrize("unit", [1, 2, SIDE])
@pytest.mark.parametrize(("more", "flat"), [*product([0, 1], [True, False])])
def test_points_near_those_of_fp32_are_kept(more, flat, unit):
    def moved(**how):
        return [output(n, more=more, flat=flat, unit=unit, **how) for n in range(5)]

    references = moved()
    task, same = figure(references, references, PICTURE)
    assert task.form == "y: 24 key points" and same.value == 1
    assert figure(references, moved(moved=0.003 * unit), PICTURE)[1].value == 1
    _, found = figure(references, moved(moved=0.04 * unit, among=6), PICTURE)
    assert found.words == "90 of 120 key points of FP32 within 3 % of their extent"
    broken = [{"y": one["y"] * np.nan} for one in references]
    cut = [{"y": one["y"][..., 1:]} for one in references]
    assert [figure(references, other, PICTURE)[1].value for other in (broken, cut)] == [0, 0]


@pytest.mark.parametrize(("more", "own"), [(1, True), (0, False), (1, False)])
def test_points_that_fp32_is_not_sure_of_do_not_count(more, own):
    """As MoveNet gives them: the third number, or an output, says how sure each is."""
    sure = np.where(np.arange(MESH) < 8, 0.05, 0.95)

    def outputs(number, moved=0, seen=sure):
        value = output(number, more=more, flat=False)["y"][0, 0]
        value[:8, 0] += moved
        value[:, 2:] *= 1 if own else 9  # depths that leave -2..2
        value[:, -1] = seen if own else value[:, -1]
        beside = {} if own else {"sure": np.float32(seen)[None]}
        return {"y": laid(value, flat=False), **beside}

    references = [outputs(n) for n in range(4)]
    far = [outputs(n, moved=9) for n in range(4)]
    lost = [outputs(n, seen=sure * 0 + sure[0]) for n in range(4)]
    metric = Metric(None, declared=Declaration(ends={"sure": "sigmoid"}))
    form = derive_form(references, inputs=[fed(PICTURE)] * 4, metric=metric)
    for candidates, count in ((far, "64 of 64"), (lost, "0 of 64")):
        tally = form.task.tally()
        for pair in zip(references, candidates, strict=True):
            tally.add(fed(PICTURE), *pair)
        assert tally.result().count == count
    places, scores = ("y[..., 0:2]", "y[..., 2:3]") if own else ("y", "sure")
    assert form.parts[0].label == f"{places} weighted by {scores}"
    batch = {}
    for name in references[0]:
        batch[name] = np.concatenate([sample[name] for sample in references])
    told = form.slice_values(form.parts[0], batch, {}, batch)
    weights = (told / form.parts[0].of(batch["y"])).reshape(4, MESH, -1)
    assert weights[:, :8].max() < 0.06 and weights[:, 8:].min() > 0.9
    halves = [{"y": np.float32(line(n))[None, ::2], "s": np.float32(sure)[None]} for n in range(4)]
    parts = derive_form(halves, inputs=[fed(PICTURE)] * 4).parts
    assert [part.label for part in parts] == ["y", "s"]  # scores of other points


@pytest.mark.parametrize("more", [2, 3])
@pytest.mark.parametrize("flat", [True, False])
def test_points_of_four_numbers_are_points_only_if_set(more, flat):
    """As BlazePose's are: depths, visibilities and presences beside the coordinates."""
    values = [output(n, more=more, flat=False) for n in range(4)]
    outputs = [{"y": laid(one["y"][0, 0], flat)} for one in values]
    assert task_of(outputs, PICTURE) != "key points"
    metric = Metric(None, task="keypoints")
    form = derive_form(outputs, inputs=[fed(PICTURE)] * 4, metric=metric)
    assert form.task.form == "y: 24 key points"


def test_flat_points_of_varying_length_are_refused():
    outputs = [{"y": output(n)["y"][:, : 2 * MESH - n]} for n in range(4)]
    with pytest.raises(ConfigError, match="keypoints"):
        derive_form(outputs, inputs=[fed(PICTURE)] * 4, metric=Metric(None, task="keypoints"))
    tally = derive_form([output(0)] * 4, inputs=[fed(PICTURE)] * 4).task.tally()
    tally.add(fed(PICTURE), outputs[1], outputs[1])
    assert tally.result() is None


def others():
    made = np.random.default_rng(3)
    shares = made.dirichlet([1, 1], (4, 1, 30))
    for _ in range(4):
        yield "features", [made.uniform(0, 1, (1, 256)) for _ in range(4)]
    yield "turned boxes", [made.uniform(20, 50, (1, 30, 5)) for _ in range(4)]
    yield "boxes", [made.uniform(0.1, 0.6, (1, 30, 4)) for _ in range(4)]
    yield "features of a Relu", [made.gamma(1, 0.4, (1, 256)) for _ in range(4)]
    yield "scores", [made.normal(0, 4, (1, 48)) for _ in range(4)]
    yield "shares of two classes", list(shares)
    yield "probabilities", [(made.uniform(size=(1, 30, 2)) > 0.5) * 0.99 for _ in range(4)]
    yield "sorted scores", [np.sort(made.uniform(0.2, 0.9, (1, 48)))[:, ::-1] for _ in range(4)]
    yield "about zero", [line(n).reshape(1, -1) - 32 for n in range(4)]


@pytest.mark.parametrize(("what", "values"), list(others()))
def test_other_numbers_are_no_points(what, values):
    assert task_of([{"y": np.float32(one)} for one in values], PICTURE) != "key points", what
    sure = np.random.default_rng(0).random((4, 1, values[0].size // 2)) > 0.5
    beside = [{"y": np.float32(a), "s": np.float32(b)} for a, b in zip(values, sure, strict=True)]
    assert task_of(beside, PICTURE) != "key points"
    columns = [{**one, "y": np.float32(line(n).T).reshape(1, -1)} for n, one in enumerate(beside)]
    assert len(values[0][0]) != 48 or task_of(columns, PICTURE) != "key points"
    rows = [{"y": np.float32(one).reshape(1, 2, -1)} for one in values]
    assert task_of(rows, PICTURE) != "key points"
    no_picture = [{"x": np.zeros((1, 9), np.float32)}] * 4
    assert same_task([output(n) for n in range(4)], no_picture) is None


def between(count, low, high, flat=False):
    """So many points evenly between two shares of the picture's side, in its pixels."""
    along = np.linspace(low, high, count) * SIDE
    places = np.stack([along, along if flat else np.roll(along, count // 2)], axis=1)
    return {"y": np.float32(places).reshape(1, *((-1,) if flat else (count, 2)))}


@pytest.mark.parametrize(
    ("output", "points"),
    [
        (between(4, 0.2, 0.7), True),
        (between(3, 0.2, 0.7), False),
        (between(600, 0.2, 0.7), True),
        (between(601, 0.2, 0.7), False),
        (between(8, 0.2, 0.7, flat=True), True),
        (between(7, 0.2, 0.7, flat=True), False),
        (between(50, 0.05, 0.26), True),
        (between(50, 0.04, 0.25), False),  # in the mean 0.15
        (between(50, 0.74, 0.95), True),
        (between(50, 0.75, 0.96), False),  # and 0.85
        (between(50, 0.48, 0.52), True),
        (between(50, 0.485, 0.515), False),  # 0.01 apart
        (between(50, -0.3, 1.3), True),
        (between(50, -0.4, 1.4), False),  # and 0.5
        (between(50, 0.05, 1.45), True),
        (between(50, 0.05, 1.6), False),  # half a side beyond
    ],
)
def test_points_are_places_in_and_around_the_picture(output, points):
    assert (task_of([output] * 2, PICTURE) == "key points") == points


@pytest.mark.parametrize(
    ("sure", "far", "count"),
    [
        (0.21, 0.029, "48 of 48"),
        (0.21, 0.031, "47 of 48"),
        (0.19, 0.031, "46 of 46"),
    ],
)
def test_a_point_is_near_within_three_percent_where_fp32_is_sure_of_it(sure, far, count):
    own = output(0, unit=1, more=1, flat=False)
    own["y"][..., 2] = 0.9
    own["y"][0, 0, 5, 2] = sure
    other = {"y": own["y"].copy()}
    places = np.delete(own["y"][0, 0, :, :2], 5 if sure < 0.2 else [], axis=0)
    other["y"][0, 0, 5, 0] += far * np.ptp(places, axis=0).max()
    assert figure([own] * 2, [own, other], PICTURE)[1].count == count


def screen(folder, outputs="y"):
    """What a build of 24 points prints; beside another output they are numbers about 0."""
    rng = np.random.default_rng(0)
    held = {
        "w": rng.normal(0, 0.3, (16, 3, 3, 3)),
        "v": rng.normal(0, 0.1, (2 * MESH, 16)),
        "b": line(1).reshape(-1) - (SIDE / 2 if "z" in outputs else 0),
    }
    nodes = """
        c = Conv <pads = [1, 1, 1, 1]> (x, w) r = Relu (c) g = GlobalAveragePool (r)
        f = Flatten (g) y = Gemm <transB = 1> (f, v, b)
    """
    nodes += "z = Sigmoid (g)" if "z" in outputs else ""
    model = make_model(nodes, {"x": ["n", 3, *PICTURE]}, dict.fromkeys(outputs), as_float32(held))
    x = np.random.default_rng(1).uniform(0, 1, (24, 3, *PICTURE)).astype(np.float32)
    x *= np.linspace(0.1, 1, 24, dtype=np.float32).reshape(24, 1, 1, 1)
    np.save(folder / "x.npy", x)
    words = ("--out", folder / "out", "--duration", 0, "--effort", 0, "--accept")
    model = save_net(model, folder / "net.onnx")
    return run_command("build", model, "--images", folder / "x.npy", *words)


def test_the_screen_tells_key_points_and_no_classes(tmp_path):
    said = screen(tmp_path)
    assert "576 of 576 key points of FP32 within 3 %" in said and "Top-1" not in said
    (told,) = json.loads((tmp_path / "out" / "report.json").read_text())["engines"][1:]
    assert told["accuracy"]["task"]["task"] == "key points"
    said = screen(tmp_path, "yz")  # the first of several outputs, of no task
    assert "Top-1" not in said and "dB (worst:" in said


LARGE, STRIDES = (96, 128), (8, 16)  # height, width of a larger picture
WIDE = 24  # of every box


def level(stride, weights):
    """Scores and what moves boxes and points, of the cells of one stride."""
    spot = np.zeros((1, 4, stride, stride))
    spot[:, 0] = 12 / stride**2
    far = np.zeros((8, 4, stride, stride))
    far[4:, 1] = 4 / stride**2  # the second colour moves the points
    count = LARGE[0] * LARGE[1] // stride**2
    own = {"w": spot, "v": far, "b": np.full(1, -6.0 if stride == 8 else -9.0)}
    weights |= as_float32({f"{name}{stride}": value for name, value in own.items()})
    weights |= {f"s{stride}": [0, 1, count], f"f{stride}": [0, 8, count]}
    steps = f"strides = [{stride}, {stride}]"
    nodes = f"""
        c# = Conv <{steps}> (x, w#, b#) scores# = Reshape (c#, s#)
        d# = Conv <{steps}> (x, v#) far# = Reshape (d#, f#)
    """
    return nodes.replace("#", str(stride))


def saved_posed(path):
    """Bright cells are objects; their two points lie at the box's corners, and further off."""
    cells, strides = np.hsplit(list_cells(STRIDES, LARGE), [2])
    middle = ((cells + 0.5) * strides).T
    places = np.concatenate([middle, np.full_like(middle, WIDE), middle - 8, middle + 8])[None]
    weights = {"places": np.float32(places), "borders": [4, 4]}
    nodes = f"""
        {level(8, weights)} {level(16, weights)}
        raw = Concat <axis = 2> (scores8, scores16) scores = Sigmoid (raw)
        far = Concat <axis = 2> (far8, far16) moved = Add (far, places)
        boxes, points = Split <axis = 1> (moved, borders)
        y = Concat <axis = 1> (boxes, scores, points)
    """
    inputs, outputs = {"x": ["n", 4, *LARGE]}, {"y": ["n", 9, len(strides)]}
    return save_net(make_model(nodes, inputs, outputs, weights), path)


def pictures_of_cells(glare, channels=3, objects=4, apart=1):
    """Bright cells, red and green in turn; of four colours both at once."""
    made = np.random.default_rng(1)
    pictures = made.uniform(0, 0.1, (16, channels, *LARGE)).astype(np.float32)
    for picture in pictures:
        for kind, cell in enumerate(made.choice((COUNT - 1) // apart, objects, replace=False)):
            row, column = (STRIDE * int(side) for side in divmod(1 + cell * apart, CELLS[1]))
            lit = picture[:2] if channels > 3 else picture[kind % 2]
            lit[..., row : row + STRIDE, column : column + STRIDE] = 1
        picture[2, 0, 0] = glare  # what decides nothing takes the steps of int8
    return pictures


STRIDE, CLASSES = 8, 2
CELLS = (LARGE[0] // STRIDE, LARGE[1] // STRIDE)
COUNT = CELLS[0] * CELLS[1]


def saved_turned(path, end="", ends=None):
    """Bright cells, red and green, are objects of two classes, a little larger than their cells."""
    spots = np.zeros((CLASSES, 3, STRIDE, STRIDE))
    spots[0, 0] = spots[1, 1] = 12 / STRIDE**2
    far = np.random.default_rng(0).normal(0, 0.05, (4, 3, STRIDE, STRIDE))
    rows, columns = np.divmod(np.arange(COUNT), CELLS[1])
    low = np.stack([columns, rows], axis=1) * STRIDE
    places = np.concatenate([low - 2, low + STRIDE + 2], axis=1)[None]
    nodes = f"""
        c1 = Conv <strides = [8, 8]> (x, w1, b1) r1 = Reshape (c1, across) scores = Sigmoid (r1)
        c2 = Conv <strides = [8, 8]> (x, w2) r2 = Reshape (c2, four)
        t2 = Transpose <perm = [0, 2, 1]> (r2) boxes = Add (t2, places) {end}
    """
    weights = as_float32({"w1": spots, "b1": [-6] * CLASSES, "w2": far, "places": places})
    weights |= {"across": [-1, CLASSES, COUNT], "four": [-1, 4, COUNT]}
    weights |= {"most": [20], "half": np.float32(0.5)}
    outputs = ends or {"boxes": ["n", COUNT, 4], "scores": ["n", CLASSES, COUNT]}
    return save_net(make_model(nodes, {"x": ["n", 3, *LARGE]}, outputs, weights), path)


def saved_selected(path):
    """The same boxes with their own non-maximum suppression, of which only the indices are left."""
    end = "rows = NonMaxSuppression (boxes, scores, most, half, half)"
    return saved_turned(path, end, [make_value("rows", ["many", 3], TensorProto.INT64)])


def saved_faces(path):
    """One class, [N, A], beside offsets of a box and a key point from each cell."""
    far = np.random.default_rng(0).normal(0, 0.05, (6, 3, STRIDE, STRIDE))
    nodes = """
        c1 = Conv <strides = [8, 8]> (x, w1, b1) r1 = Reshape (c1, flat) scores = Sigmoid (r1)
        c2 = Conv <strides = [8, 8]> (x, w2) r2 = Reshape (c2, six)
        t2 = Transpose <perm = [0, 2, 1]> (r2) boxes = Add (t2, usual)
    """
    spot = np.full((1, 3, STRIDE, STRIDE), 12 / STRIDE**2) * [[[[1]], [[1]], [[0]]]]
    weights = as_float32({"w1": spot, "b1": [-6], "w2": far, "usual": [0, 0, 12, 12, 2, 2]})
    weights |= {"flat": [-1, COUNT], "six": [-1, 6, COUNT]}
    outputs = {"boxes": ["n", COUNT, 6], "scores": ["n", COUNT]}
    return save_net(make_model(nodes, {"x": ["n", 3, *LARGE]}, outputs, weights), path)


@pytest.mark.parametrize("glare", [1.0, 1000.0])
@pytest.mark.parametrize(
    ("save", "pictures", "total", "form", "said"),
    [
        (
            saved,
            pictures_of_points,
            64,
            "columns, rows: columns and rows of 4 key points",
            "key points of FP32 within 2 pixels",
        ),
        (
            saved_posed,
            partial(pictures_of_cells, channels=4, objects=2, apart=4),
            32,
            "y: scores of 1 class, boxes by centre, key points",
            "boxes of FP32 kept",
        ),
        (
            saved_turned,
            pictures_of_cells,
            64,
            "scores: scores of 2 classes, boxes by corners",
            "boxes of FP32 kept",
        ),
        (
            saved_faces,
            pictures_of_cells,
            64,
            "scores: scores of 1 class, boxes matched by anchor",
            "boxes of FP32 kept",
        ),
        (
            saved_selected,
            pictures_of_cells,
            64,
            "rows: class numbers or indices",
            "indices of FP32 kept",
        ),
    ],
)
def test_a_build_counts_kept_ones(
    save, pictures, total, form, said, build_with_accuracy, tmp_path, glare
):
    code, out, told = build_with_accuracy(save(tmp_path / "m.onnx"), pictures(glare))
    task = told["task"]
    assert task["form"] == form
    assert task["count"].endswith(f" of {total}") and f"{task['count']} {said}" in out
    assert (task["value"] == 1, code) == ((True, 0) if glare == 1 else (False, 3))
