"""The cheapest split, against every split there is."""

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.tuning.prices import cheapest_split

PRICE = st.integers(0, 6)


@st.composite
def problems(draw):
    """(prices, what turning costs, who follows whom) of up to six units."""
    units = [f"u{number}" for number in range(draw(st.integers(1, 6)))]
    unit = st.sampled_from(units)
    prices = {name: (draw(PRICE), draw(PRICE)) for name in units}
    between = draw(st.lists(st.tuples(unit, unit, PRICE), max_size=8))
    follows = draw(st.lists(st.tuples(unit, unit), max_size=4))
    return prices, between, follows


def cost(prices, between, in_float):
    own = sum(pair[unit in in_float] for unit, pair in prices.items())
    return own + sum(price for a, b, price in between if (a in in_float) != (b in in_float))


def splits(prices, follows):
    """Every set of units in float that is allowed."""
    sizes = range(len(prices) + 1)
    for chosen in chain.from_iterable(combinations(prices, size) for size in sizes):
        if all(unit in chosen or other not in chosen for unit, other in follows):
            yield frozenset(chosen)


@pytest.mark.slow
@settings(max_examples=150)
@given(problems())
def test_no_split_is_cheaper_and_of_equals_it_is_the_one_with_least_in_float(problem):
    prices, between, follows = problem
    costs = {split: cost(prices, between, split) for split in splits(prices, follows)}
    least = min(costs.values())
    best = [split for split, paid in costs.items() if paid == least]
    assert cheapest_split(prices, between, follows) == frozenset.intersection(*best)


def test_equal_prices_stay_in_int8_and_nothing_is_split_into_nothing():
    assert cheapest_split({"a": (3.0, 3.0), "b": (0.0, 0.0)}, [("a", "b", 1.0)]) == frozenset()
    assert cheapest_split({}, []) == frozenset()


def test_a_unit_that_follows_goes_float_with_its_maker_and_its_maker_without_it():
    prices = {"conv": (9.0, 1.0), "add": (1.0, 2.0)}
    assert cheapest_split(prices, []) == {"conv"}
    assert cheapest_split(prices, [], [("add", "conv")]) == {"conv", "add"}
    assert cheapest_split({"conv": (1.0, 2.0), "add": (9.0, 1.0)}, [], [("add", "conv")]) == {"add"}


def test_turning_keeps_a_unit_on_the_side_of_its_neighbours():
    prices = {"a": (0.0, 9.0), "b": (3.0, 1.0), "c": (0.0, 9.0)}
    assert cheapest_split(prices, []) == {"b"}
    assert cheapest_split(prices, [("a", "b", 1.5), ("b", "c", 1.5)]) == frozenset()


def test_a_chain_of_thousands_of_units_is_split_exactly():
    prices = {place: (0.0, 1.0) if place % 100 else (150.0, 0.0) for place in range(3000)}
    between = [(place, place + 1, 0.25) for place in range(2999)]
    wanted = frozenset(range(0, 3000, 100))
    assert cheapest_split(prices, between) == wanted
