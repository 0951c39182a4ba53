"""Units, prices, noisy layers, the cheapest split and the plan file."""

import re
from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.errors import ConfigError
from deploy.frontends import load
from deploy.graph.plan import Decision
from deploy.method import Choices, Method
from deploy.targets import TARGETS
from deploy.tuning import CPU_NAMES
from deploy.tuning.min_cut import cheapest_split
from deploy.tuning.plan_file import (
    SCHEMA,
    PlanFile,
    PlannedSplit,
    SplitRow,
    TargetPlan,
    read_plan,
    write_plan,
)
from deploy.tuning.prices import (
    CPUS,
    FLOAT_SIDE,
    Prices,
    Units,
    count_prices,
    group_units,
)
from deploy.tuning.probe import Noise
from deploy.tuning.sensitivity import Sensitivity, measure_sensitivity, split_into_groups
from tests.models import make_model, make_node

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
STRANGE = st.sampled_from(
    [
        '"',
        "\\",
        "'",
        "\n",
        "\r\n",
        "\t",
        "\x00",
        "\x7f",
        "\x85",
        "\u2028",
        "a.b",
        "a b",
        "",
        "ü/层",
        "#",
        "[x]",
        "= 1",
        '"""',
        "\U0001f600",
        "\ufeff",
    ]
)
NAME = TEXT | STRANGE
METHOD = st.sampled_from(["mse", "minmax", "percentile", "entropy"]).map(Method.of)
NUMBER = st.floats(allow_nan=False) | st.integers(-5, 5).map(float)
METHODS = st.dictionaries(NAME, METHOD, max_size=3)
SPLIT_NODES = st.lists(NAME, max_size=3).map(lambda names: dict.fromkeys(names, ""))
SPLIT = st.builds(
    PlannedSplit,
    row=st.builds(
        SplitRow,
        number=st.integers(1, 9),
        float_layers=st.integers(0, 9),
        layers=st.integers(0, 9),
        time=NUMBER,
        size=NUMBER,
        sqnr_db=NUMBER,
        is_timed=st.booleans(),
        figure=NAME,
        level=NAME,
        taken=st.booleans(),
    ),
    choices=st.builds(Choices, float_nodes=SPLIT_NODES, method=st.none() | METHOD, methods=METHODS),
)
TARGET = st.builds(
    TargetPlan,
    choices=st.builds(
        Choices,
        float_nodes=st.dictionaries(NAME, NAME, max_size=3),
        method=st.none() | METHOD,
        methods=METHODS,
    ),
    made_from=NAME,
    settled=NAME,
    front=st.lists(SPLIT, max_size=2).map(tuple),
)
OWN = ("schema", "model", "float")  # keys of the file, which no target is named after
PLAN = st.builds(
    PlanFile,
    model=NAME,
    float_nodes=st.lists(NAME, max_size=3).map(tuple),
    targets=st.dictionaries(NAME.filter(lambda name: name not in OWN), TARGET, max_size=2),
)

GOOD = f"""schema = "{SCHEMA}"
model = "abc"
float = ["/head/*"]

[onnxruntime]
made_from = "def"
method = "minmax"
float = {{ "/c1" = "alone in int8 it leaves 4.4 dB of y" }}
methods = {{ "t" = "mse" }}
[[onnxruntime.front]]
number = 1
float_layers = 1
layers = 2
time = 0.9
size = 1
sqnr_db = 4.4
float = ["/c1"]
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("plan") / "net.plan.toml"


@pytest.mark.slow
@settings(max_examples=150)
@given(plan=PLAN)
def test_written_plan_is_read_again(path, plan):
    write_plan(path, plan)
    assert read_plan(path) == plan


def test_handwritten_plan_round_trips(path):
    path.write_text(GOOD, encoding="utf-8-sig")  # as an editor on Windows leaves it
    plan = read_plan(path)
    target_plan = plan.targets["onnxruntime"]
    assert (plan.model, plan.float_nodes, target_plan.made_from) == ("abc", ("/head/*",), "def")
    assert target_plan.choices.float_nodes == {"/c1": "alone in int8 it leaves 4.4 dB of y"}
    assert target_plan.choices.method == Method.of("minmax")
    assert target_plan.choices.methods == {"t": Method.of("mse")}
    (split,) = target_plan.front
    assert (split.row.number, split.row.sqnr_db, split.row.time) == (1, 4.4, 0.9)
    assert list(split.choices.float_nodes) == ["/c1"]
    write_plan(path, plan)
    assert read_plan(path) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with schema"),
        ("float = [", "must be a TOML file"),
        (GOOD.replace("plan/1", "plan/9"), "calib8-plan/9"),
        (GOOD.replace('"calib8-plan/1"', "1"), "must begin with schema"),
        (GOOD.replace('model = "abc"', "model = 3"), "Expected `str`, got `int` - at `$.model`"),
        (GOOD.replace('["/head/*"]', '"/head/*"'), "Expected `array`, got `str` - at `$.float`"),
        (GOOD.replace('["/head/*"]', "[1]"), "Expected `str`, got `int` - at `$.float[0]`"),
        (GOOD.replace('"def"', "[]"), "Expected `str`, got `array` - at `$.made_from`"),
        (GOOD.replace('method = "minmax"', 'method = "minmix"'), "did you mean 'minmax'"),
        (GOOD.replace('method = "minmax"', "method = 5"), "`str`, got `int` - at `$.method`"),
        (GOOD.replace('"t" = "mse"', '"t" = "best"'), "a method is one of"),
        (GOOD.replace('"t" = "mse"', '"t" = []'), "got `array` - at `$.methods[...]`"),
        (re.sub("float = {.*}", 'float = ["/c1"]', GOOD), "got `array` - at `$.float`"),
        (re.sub("methods = {.*}", "methods = 1", GOOD), "got `int` - at `$.methods`"),
        (GOOD.split("[[")[0] + "front = 5\n", "`array`, got `int` - at `$.front`"),
        (GOOD.replace("number = 1", 'number = "1"'), "got `str` - at `$.front[0].number`"),
        (GOOD.replace("4.4\nfloat", "[1]\nfloat"), "got `array` - at `$.front[0].sqnr_db`"),
        (GOOD.split("\n[")[0] + "\nascend = 1\n", "must be the plan of a target, got"),
        (b"\xff\xfe" + GOOD.encode("utf-16-le"), "must be a TOML file"),
        (b"\x00" * 40, "must be a TOML file"),
        ("x = " + "[" * 100_000, "must be a TOML file"),
        (".".join("a" * 50_000) + " = 1", "keys of over 64 dots"),
        ('"a.b" . ' + " . ".join("a" * 50_000) + ' = "c"', "keys of over 64 dots"),
        ("x = {a = '''\n\" ''', " + ".".join("a" * 50_000) + ' = 1, c = "1"}', "three quotes"),
        (GOOD + GOOD, "must be a TOML file"),
    ],
)
def test_invalid_plan_is_refused(path, text, message):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        read_plan(path)
    assert "\n" not in str(refusal.value)


def test_plan_of_an_earlier_version_is_read(path):
    tables = '[[onnxruntime.tried]]\nwhat = "all in int8"\nsqnr_db = 4.4\n'
    path.write_text(GOOD.split("[[")[0] + 'unusable = "3 dB"\n' + tables)
    target_plan = read_plan(path).targets["onnxruntime"]
    assert target_plan.choices.method == Method.of("minmax")
    assert not target_plan.front


def test_missing_plan_and_folder_are_refused(tmp_path, wording):
    for plan_path in (tmp_path / "no.toml", tmp_path):
        with pytest.raises(ConfigError) as raised:
            read_plan(plan_path)
        wording.check(raised.value)


PRICE = st.integers(0, 6)


@st.composite
def problems(draw):
    """(prices, what turning costs, who follows whom) of up to six units."""
    units = [f"u{number}" for number in range(draw(st.integers(1, 6)))]
    unit = st.sampled_from(units)
    prices = {name: (draw(PRICE), draw(PRICE)) for name in units}
    between = draw(st.lists(st.tuples(unit, unit, PRICE), max_size=8))
    return prices, between, draw(st.lists(st.tuples(unit, unit), max_size=4))


def cost(prices, between, in_float):
    unit_costs = sum(pair[unit in in_float] for unit, pair in prices.items())
    return unit_costs + sum(price for a, b, price in between if (a in in_float) != (b in in_float))


def splits(prices, follows):
    """Every set of units in float that is allowed."""
    sizes = range(len(prices) + 1)
    for chosen in chain.from_iterable(combinations(prices, size) for size in sizes):
        if all(unit in chosen or producer not in chosen for unit, producer in follows):
            yield frozenset(chosen)


@pytest.mark.slow
@settings(max_examples=150)
@given(problems())
def test_cheapest_split_has_the_fewest_floats(problem):
    prices, between, follows = problem
    costs = {split: cost(prices, between, split) for split in splits(prices, follows)}
    min_cost = min(costs.values())
    best = [split for split, paid in costs.items() if paid == min_cost]
    assert cheapest_split(prices, between, follows) == frozenset.intersection(*best)


def test_equal_prices_stay_in_int8():
    assert cheapest_split({"a": (3.0, 3.0), "b": (0.0, 0.0)}, [("a", "b", 1.0)]) == frozenset()
    assert cheapest_split({}, []) == frozenset()


def test_following_unit_is_float_with_producer():
    prices = {"conv": (9.0, 1.0), "add": (1.0, 2.0)}
    assert cheapest_split(prices, []) == {"conv"}
    assert cheapest_split(prices, [], [("add", "conv")]) == {"conv", "add"}
    assert cheapest_split({"conv": (1.0, 2.0), "add": (9.0, 1.0)}, [], [("add", "conv")]) == {"add"}


def test_conversion_keeps_units_with_neighbours():
    prices = {"a": (0.0, 9.0), "b": (3.0, 1.0), "c": (0.0, 9.0)}
    assert cheapest_split(prices, []) == {"b"}
    assert cheapest_split(prices, [("a", "b", 1.5), ("b", "c", 1.5)]) == frozenset()


def test_long_chain_is_split_exactly():
    prices = dict.fromkeys(range(3000), (0.0, 1.0))
    prices |= dict.fromkeys(range(0, 3000, 100), (150.0, 0.0))
    between = [(unit, unit + 1, 0.25) for unit in range(2999)]
    assert cheapest_split(prices, between) == frozenset(range(0, 3000, 100))


def noise(**powers):
    """The same power in both samples."""
    return Noise({part: np.full(2, power) for part, power in powers.items()})


LAYERS = [f"/c{number}" for number in range(64)]


def sensitivity_of(noisy, *, layers=LAYERS, max_trials=28, groups=8):
    """Sensitivity of layers whose noises are known, and the groups that were tried."""
    tried_groups = []

    def measure(requested_groups):
        noises = []
        for group in requested_groups:
            tried_groups.append(group)
            noises.append(noise(y=sum(noisy.get(layer, 0.0) for layer in group)))
        return noises

    first_groups = split_into_groups(layers, groups)
    return measure_sensitivity(first_groups, measure, max_trials=max_trials), tried_groups


@pytest.mark.parametrize("index", [0, 21, 63])
def test_halving_finds_the_noisy_layer(index):
    result, tried_groups = sensitivity_of(dict.fromkeys(LAYERS, 2e-5) | {LAYERS[index]: 0.5})
    assert result.groups[LAYERS[index],].powers_by_slice["y"][0] == 0.5
    assert len(tried_groups) == 8 + 2 * 3  # 8 layers a group are halved three times
    assert max(result.loss_by_layer(), key=result.loss_by_layer().__getitem__) == LAYERS[index]


def test_negligible_groups_are_not_halved():
    _, tried_groups = sensitivity_of({LAYERS[0]: 1.0, LAYERS[1]: 1.0, LAYERS[63]: 0.0002})
    halved = {layer for group in tried_groups[8:] for layer in group}
    assert LAYERS[0] in halved
    assert LAYERS[63] not in halved
    _, tried_groups = sensitivity_of(dict.fromkeys(LAYERS, 2e-5))
    assert len(tried_groups) == 8


@settings(max_examples=60)
@given(
    st.integers(0, 40),
    st.integers(1, 12),
    st.integers(0, 30),
    st.dictionaries(st.sampled_from(LAYERS), st.floats(0, 10), max_size=6),
)
def test_search_respects_its_limit_of_trials(count, groups, max_trials, noisy):
    result, tried_groups = sensitivity_of(
        noisy, layers=LAYERS[:count], groups=groups, max_trials=max_trials
    )
    assert len(tried_groups) <= max(max_trials, groups)
    assert sorted(layer for group in result.groups for layer in group) == sorted(LAYERS[:count])
    assert set(result.groups) <= set(tried_groups)


def test_remaining_int8_noise_adds_by_part():
    result = Sensitivity({("a", "b"): noise(y=0.4, z=0.01), ("c",): noise(y=0.3)})

    def remaining_powers(*units):
        remaining = result.predict(frozenset(units)).powers_by_slice
        return {part: power[0] for part, power in remaining.items()}

    assert remaining_powers() == pytest.approx({"y": 0.7, "z": 0.01})
    assert remaining_powers("a") == pytest.approx({"y": 0.5, "z": 0.005})
    assert remaining_powers("a", "c") == pytest.approx({"y": 0.2, "z": 0.005})
    assert result.predict(frozenset("abc")).worst == 0.0
    shares = result.loss_by_layer()
    assert shares["a"] == shares["b"]
    assert shares["c"] == pytest.approx(1.5 * shares["a"])


def test_noise_sum_matches_measured_loss():
    groups = {("a",): noise(y=0.01), ("b",): noise(y=0.03)}
    sensitivity = Sensitivity(groups)
    scaled = sensitivity.scaled_to(frozenset(), noise(y=0.01))  # together a quarter of the sum
    assert scaled.predict(frozenset()).worst == pytest.approx(noise(y=0.01).worst)
    assert scaled.predict(frozenset("b")).worst == pytest.approx(noise(y=0.0025).worst)
    assert scaled.groups == groups
    losses = scaled.loss_by_layer()
    assert losses["b"] == pytest.approx(3 * losses["a"])
    part = sensitivity.scaled_to(frozenset("b"), noise(y=0.04))
    assert part.predict(frozenset("b")).worst == pytest.approx(noise(y=0.04).worst)
    for odd in (noise(y=0.0), noise(y=0.5)):  # nothing, or so much that noises do not add up
        assert sensitivity.scaled_to(frozenset(), odd) is sensitivity
    assert sensitivity.scaled_to(frozenset("ab"), noise(y=0.01)) == sensitivity


SAMPLE = {"x": np.ones((1, 16, 8, 8), np.float32)}


@pytest.fixture(scope="module")
def priced():
    """Three Convs in a row, as loaded, and its units on ONNX Runtime."""
    nodes = [
        make_node("Conv", "x wa", "a", name="/a", pads=[1] * 4),
        make_node("Conv", "a wb", "b", name="/b", pads=[1] * 4, group=16),
        make_node("Conv", "b wy", "y", name="/y"),
    ]
    shapes = {"wa": (16, 16, 3, 3), "wb": (16, 1, 3, 3), "wy": (8, 16, 1, 1)}
    weights = {name: np.full(shape, 0.1, np.float32) for name, shape in shapes.items()}
    model = load(make_model(nodes, {"x": [1, 16, 8, 8]}, {"y": None}, weights, opset=17)).model
    return model, group_units(model, TARGETS["onnxruntime"]().plan(model).decisions)


def test_counted_prices_are_products_without_conversion(priced):
    model, units = priced
    prices = count_prices(model, units, SAMPLE)
    assert prices.unit_prices == {
        "/a": (0.7 * (1024 * 144), 1024 * 144),  # 16 channels of 3x3 behind each of 1024 values
        "/b": (0.7 * (1024 * 9), 1024 * 9),  # one channel each: depthwise
        "/y": (0.7 * (512 * 16), 512 * 16),
    }
    assert set(prices.conversions.values()) == {0.0}
    avx2 = count_prices(model, units, SAMPLE, CPUS["avx2"])
    assert avx2.unit_prices["/a"] == (pytest.approx(0.53 * 1024 * 144), 1024 * 144)
    assert avx2.unit_prices["/b"] == (
        pytest.approx(1.5 * 2.2 * 1024 * 9),
        pytest.approx(2.2 * 1024 * 9),
    )
    assert set(avx2.conversions.values()) >= {20.0 * 1024}


def test_layer_of_few_products_costs_its_weights():
    """The Gemm of a classifier waits for its weights, of which int8 reads a fraction."""
    weight = np.ones((64, 32), np.float32)
    nodes = [make_node("Gemm", ["x", "w"], ["y"], name="/y")]
    model = make_model(nodes, {"x": [1, 64]}, {"y": [1, 32]}, {"w": weight})
    units = group_units(model, [Decision("/y", "Gemm", "int8")])
    prices = count_prices(model, units, {"x": np.ones((1, 64), np.float32)}, CPUS["vnni"])
    assert prices.unit_prices == {"/y": (0.5 * 8 * 64 * 32, 8 * 64 * 32)}


def test_values_cost_more_than_products_unless_a_layer_makes_them():
    nodes = [
        make_node("Conv", "x w", "c", name="/c"),
        make_node("Relu", "c", "r", name="/r"),  # runs in the kernel of /c
        make_node("Sigmoid", "r", "y", name="/s"),
    ]
    weight = np.ones((8, 16, 1, 1), np.float32)
    model = make_model(nodes, {"x": [1, 16, 8, 8]}, {"y": [1, 8, 8, 8]}, {"w": weight})
    units = group_units(model, [Decision(node.name, node.op_type, "int8") for node in nodes])
    prices = count_prices(model, units, SAMPLE, CPUS["avx2"])
    assert prices.unit_prices == {
        "/c": (pytest.approx(0.6 * 512 * 16), 512 * 16),
        "/s": (12 * 512, 12 * 512),
    }


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize(("groups", "outputs"), [(1, 8), (2, 3), (4, 1)])
def test_transposed_convolutions_cost_their_products(groups, outputs, kernel, stride):
    """Each of the 4 * 6 * 6 input values meets the kernel of each output channel of its group."""
    weight = np.ones((4, outputs, kernel, kernel), np.float32)
    node = make_node(
        "ConvTranspose", "x w", "/y", group=groups, strides=[stride] * 2, auto_pad="SAME_UPPER"
    )
    shape = [1, groups * outputs, 6 * stride, 6 * stride]
    model = make_model([node], {"x": [1, 4, 6, 6]}, {"/y": shape}, {"w": weight})
    units = group_units(model, [Decision(node.name, "ConvTranspose", "int8")])
    prices = count_prices(model, units, {"x": np.ones((1, 4, 6, 6), np.float32)})
    ((_, float_price),) = prices.unit_prices.values()
    assert float_price == pytest.approx(4 * 6 * 6 * outputs * kernel**2)


def test_each_priced_cpu_has_a_name():
    assert {*CPUS} < {*CPU_NAMES}


ROW = Units(
    members={name: (name,) for name in "abc"},
    borders=(
        (FLOAT_SIDE, "a", "x"),
        ("a", "b", "t"),
        ("b", "c", "u"),
        ("c", FLOAT_SIDE, "y"),
    ),
    layers=("a", "b", "c"),
)


def row(turning=1.0, units=ROW, **pairs):
    pairs = {name: (1.0, 10.0) for name in "abc"} | pairs
    conversions = dict.fromkeys("xtuy", turning)
    return Prices(units=units, unit_prices=pairs, conversions=conversions)


def test_nodes_of_units_are_in_model_order():
    assert ROW.node_names(frozenset("cab")) == ("a", "b", "c")


def test_split_price_counts_borders_once():
    prices = row()
    assert prices.total(frozenset()) == 3 + 2  # in and out
    assert prices.total(frozenset("b")) == 12 + 4
    assert prices.total(frozenset("abc")) == prices.float_total == 30
    assert prices.time_share(frozenset()) == 5 / 30
    shared_tensor = replace(ROW, borders=(("a", "b", "t"), ("a", "c", "t")))
    assert row(units=shared_tensor).total(frozenset("bc")) == 21 + 1  # two readers, one pair


def test_cheapest_split_weighs_time_and_noise():
    assert row().cheapest_float_units() == frozenset()
    assert row(b=(13.0, 10.0)).cheapest_float_units() == {"b"}  # wins 3, turns 2
    assert row(turning=2.0, b=(13.0, 10.0)).cheapest_float_units() == frozenset()
    assert row().cheapest_float_units({"b": 1.0}, 10) == frozenset()
    assert row().cheapest_float_units({"b": 1.0}, 12) == {"b"}
    assert row().cheapest_float_units(pinned=frozenset("c")) == {"c"}
    dear = row(a=(5.0, 5.5), b=(5.0, 5.5), c=(5.0, 5.5))
    assert dear.cheapest_float_units() == frozenset("abc")  # in and out count too


def test_pass_through_nodes_follow_float_layer():
    noisy, glue = {"a": 100.0}, replace(ROW, layers=("a", "c"))
    assert row(turning=0.0).cheapest_float_units(noisy, 1) == {"a"}
    assert row(turning=0.0, units=glue).cheapest_float_units(noisy, 1) == {"a", "b"}
