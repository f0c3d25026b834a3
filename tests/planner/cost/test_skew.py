"""Expected different ids and shares of row ranges against exact sums."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.planner.cost.shardwise import distinct_ids, shares
from shardwise.planner.tables import Skew


@pytest.mark.parametrize(("rows", "draws"), [(1, 5), (10, 3), (1000, 1), (1000, 5000), (10**9, 10**6)])
def test_uniform_ids_have_the_closed_form(rows: int, draws: int) -> None:
    expected = rows * -np.expm1(draws * np.log1p(-1 / rows)) if rows > 1 else 1.0
    assert distinct_ids(rows, draws, Skew()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 300, 5000, 100_000])
@pytest.mark.parametrize(("alpha", "shift"), [(0.5, 0.0), (1.0, 0.0), (1.0, 3.0), (1.2, 20.0), (2.0, 0.0)])
@pytest.mark.parametrize("draws", [1, 50, 300_000])
def test_a_power_law_sums_over_all_ids(rows: int, alpha: float, shift: float, draws: int) -> None:
    mass = (np.arange(1, rows + 1) + shift) ** -alpha
    mass /= mass.sum()
    seen = 1 - (1 - mass) ** draws
    block = -(-rows // 3)
    parts = tuple(max(0, min(block, rows - block * part)) for part in range(3))
    cuts = [slice(low, low + size) for low, size in zip(np.cumsum([0, *parts]), parts, strict=False)]
    skew = Skew(alpha, shift, sorted_ids=True)
    lookups, found = shares(rows, draws, skew, parts)
    assert distinct_ids(rows, draws, skew) == pytest.approx(seen.sum(), rel=2e-3)
    np.testing.assert_allclose(lookups, [mass[cut].sum() for cut in cuts], atol=2e-3)
    np.testing.assert_allclose(found, [seen[cut].sum() for cut in cuts], atol=2e-3 * seen.sum())


def test_ids_that_are_not_sorted_fall_on_rows_evenly() -> None:
    lookups, found = shares(100, 1000, Skew(1.1), (60, 40))
    np.testing.assert_allclose(lookups, [0.6, 0.4])
    np.testing.assert_allclose(found, np.array([0.6, 0.4]) * distinct_ids(100, 1000, Skew(1.1)))


def test_more_skew_means_fewer_different_ids() -> None:
    found = [distinct_ids(10_000, 20_000, Skew(alpha)) for alpha in (0.0, 0.4, 0.8, 1.2, 2.0)]
    assert found == sorted(found, reverse=True) and found[-1] < 0.1 * found[0]


def test_no_draws_and_no_rows_have_no_ids() -> None:
    assert distinct_ids(10, 0, Skew(1.0)) == distinct_ids(0, 10, Skew()) == 0
