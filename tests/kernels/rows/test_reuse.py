"""Reuse distances against a list that is moved by hand, with numba's loops and on torch alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from shardwise.kernels import ReuseStack, _op, numba_loops


@pytest.fixture(params=["numba", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways to count."""
    if request.param == "torch":
        monkeypatch.setattr(_op, "NUMBA", False)
    numba_loops.loops.cache_clear()
    yield request.param
    numba_loops.loops.cache_clear()


def by_hand(batches: list[list[int]]) -> list[list[int]]:
    """Depths of every batch, by a list of rows with the latest at its end."""
    stack: list[int] = []
    depths = []
    for rows in batches:
        depths.append([len(stack) - 1 - stack.index(row) if row in stack else -1 for row in rows])
        stack = [row for row in stack if row not in rows] + rows
    return depths


@pytest.mark.parametrize("seed", range(8))
def test_depths_are_those_of_a_stack_moved_by_hand(path: str, seed: int) -> None:
    random.seed(seed)
    rows = random.choice([1, 7, 60, 300])
    batches = [sorted(random.sample(range(rows), random.randint(0, min(rows, 40)))) for _ in range(60)]
    stack = ReuseStack(rows)
    assert [stack.touch(torch.tensor(batch, dtype=torch.int64)).tolist() for batch in batches] == by_hand(batches)
    assert stack.wanted == len({row for batch in batches for row in batch})


def test_times_are_renumbered_and_nothing_changes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.kernels.rows.reuse._LEAST", 4)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randperm(50, generator=generator)[:9].sort().values for _ in range(200)]
    stack = ReuseStack(50)
    assert [stack.touch(batch).tolist() for batch in batches] == by_hand([batch.tolist() for batch in batches])


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (torch.tensor([3, 10]), "row 10 is not one of the table's 10"),
        (torch.tensor([-1, 3]), "row -1"),
        (torch.tensor([1], dtype=torch.int32), "int64"),
        (torch.zeros(2, 2, dtype=torch.int64), "int64"),
    ],
)
def test_rows_that_are_none_are_refused(path: str, rows: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ReuseStack(10).touch(rows)
