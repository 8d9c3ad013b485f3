"""Means and correlations of values that are not kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viva.view.moments import Spread, WithinCorrelation

VALUES = st.integers(-50, 50).map(lambda value: value / 8)
GROUPS = st.lists(st.lists(st.tuples(VALUES, VALUES), max_size=5), max_size=6)


@settings(deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=20))
def test_mean_and_deviation_are_those_of_all_values_together(values: list[float]) -> None:
    spread = Spread()
    for value in values:
        spread.add(value)
    assert (spread.count, spread.mean) == (len(values), pytest.approx(np.mean(values)))
    assert spread.deviation == pytest.approx(np.std(values), abs=1e-9)


def test_of_no_values_nothing_is_known() -> None:
    assert (Spread().mean, Spread().deviation, WithinCorrelation().value) == (None, None, None)


@settings(deadline=None)
@given(GROUPS)
def test_the_correlation_is_that_of_values_less_the_mean_of_their_conversation(
    groups: list[list[tuple[float, float]]],
) -> None:
    correlation = WithinCorrelation()
    for pairs in groups:
        correlation.add(pairs)
    usable = [np.array(pairs) for pairs in groups if len(pairs) > 1]
    centred = np.concatenate([group - group.mean(0) for group in usable]) if usable else np.zeros((0, 2))
    assert correlation.count == len(centred)
    if len(centred) == 0 or (np.abs(centred) < 1e-9).all(axis=0).any():
        assert correlation.value is None
    else:
        expected = (centred[:, 0] @ centred[:, 1]) / np.sqrt(np.square(centred).sum(axis=0).prod())
        assert correlation.value == pytest.approx(expected, abs=1e-9)


@settings(deadline=None)
@given(GROUPS, st.lists(VALUES, min_size=6, max_size=6))
def test_easier_problems_add_nothing_to_a_correlation(
    groups: list[list[tuple[float, float]]], ease: list[float]
) -> None:
    plain, shifted = WithinCorrelation(), WithinCorrelation()
    for pairs, more in zip(groups, ease, strict=False):
        plain.add(pairs)
        shifted.add([(x + more, y + more) for x, y in pairs])
    assert (plain.value is None) == (shifted.value is None)
    assert plain.value is None or shifted.value == pytest.approx(plain.value, abs=1e-9)
