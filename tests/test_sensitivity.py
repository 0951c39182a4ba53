"""Noisy layers are found by halving groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.tuning.probe import Noise
from deploy.tuning.search import Sensitivity, sensitivity


def noise(**powers):
    """The same power in both samples."""
    return Noise({part: np.full(2, power) for part, power in powers.items()})


LAYERS = [f"/c{number}" for number in range(64)]


def found(noisy, *, layers=LAYERS, most=28, groups=8):
    """Sensitivity of layers whose noises are known, and the groups that were tried."""
    tried = []

    def alone(wanted):
        tried.extend(wanted)
        return [noise(y=sum(noisy.get(one, 0.0) for one in group)) for group in wanted]

    return sensitivity(layers, alone, groups=groups, most=most), tried


@pytest.mark.parametrize("place", [0, 21, 63])
def test_a_noisy_layer_is_found_alone_by_halving_its_group(place):
    noisy = dict.fromkeys(LAYERS, 1e-4) | {LAYERS[place]: 0.5}
    result, tried = found(noisy)
    assert result.groups[LAYERS[place],].parts["y"][0] == 0.5
    assert len(tried) == 8 + 2 * 3  # 8 layers a group are halved three times
    assert max(result.shares, key=result.shares.__getitem__) == LAYERS[place]


def test_groups_that_matter_little_are_not_halved():
    _, tried = found({LAYERS[0]: 1.0, LAYERS[1]: 1.0, LAYERS[63]: 0.0009})
    halved = {layer for group in tried[8:] for layer in group}
    assert LAYERS[0] in halved and LAYERS[63] not in halved
    _, tried = found(dict.fromkeys(LAYERS, 1e-4))
    assert len(tried) == 8


@settings(max_examples=60)
@given(
    st.integers(0, 40),
    st.integers(1, 12),
    st.integers(0, 30),
    st.dictionaries(st.sampled_from(LAYERS), st.floats(0, 10), max_size=6),
)
def test_no_more_is_tried_than_allowed_and_every_layer_stands_once_in_order(
    count, groups, most, noisy
):
    result, tried = found(noisy, layers=LAYERS[:count], groups=groups, most=most)
    assert len(tried) <= max(most, groups)
    assert [layer for group in result.groups for layer in group] == LAYERS[:count]
    assert set(result.groups) <= set(tried)


def test_what_is_left_in_int8_adds_up_part_by_part():
    groups = {("a", "b"): noise(y=0.4, z=0.01), ("c",): noise(y=0.3)}
    result = Sensitivity(groups)

    def left(*units):
        return {part: power[0] for part, power in result.without(frozenset(units)).parts.items()}

    assert left() == pytest.approx({"y": 0.7, "z": 0.01})
    assert left("a") == pytest.approx({"y": 0.5, "z": 0.005})
    assert left("a", "c") == pytest.approx({"y": 0.2, "z": 0.005})
    assert result.without(frozenset("abc")).worst == 0.0
    shares = result.shares
    assert shares["a"] == shares["b"] and shares["c"] == pytest.approx(1.5 * shares["a"])


def test_the_sum_is_scaled_to_what_was_seen_to_be_lost():
    groups = {("a",): noise(y=0.01), ("b",): noise(y=0.03)}
    found = Sensitivity(groups)
    seen = found.scaled(frozenset(), noise(y=0.01))  # together a quarter of the sum
    assert seen.without(frozenset()).worst == pytest.approx(noise(y=0.01).worst)
    assert seen.without(frozenset("b")).worst == pytest.approx(noise(y=0.0025).worst)
    assert seen.groups == groups and seen.shares["b"] == pytest.approx(3 * seen.shares["a"])
    part = found.scaled(frozenset("b"), noise(y=0.04))
    assert part.without(frozenset("b")).worst == pytest.approx(noise(y=0.04).worst)
    for odd in (noise(y=0.0), noise(y=0.5)):  # nothing, or so much that noises do not add up
        assert found.scaled(frozenset(), odd) is found
    assert found.scaled(frozenset("ab"), noise(y=0.01)) == found
