"""What the search is checked against: what ranks do and hold under an assignment, and what is wrong with one."""

from __future__ import annotations

import numpy as np
import pytest
from planner_oracle import choice

from shardwise.planner.search.problem import (
    Assignment,
    Choice,
    Item,
    Problem,
    faults,
    loads,
)


def of(
    *choices: Choice, starts: tuple[tuple[int, ...], ...], ranks: tuple[int, ...] | None = None, hbm: int = 100
) -> tuple[Problem, Assignment]:
    """One item a choice on four ranks of two hosts, each at its ranks."""
    items = tuple(Item((f"t{i}",), (one,), ranks) for i, one in enumerate(choices))
    problem = Problem(items, 2, np.full(4, hbm), np.full(4, 50), np.array([1.0, 0.0, 0.0, 2.0]))
    return problem, Assignment((0,) * len(items), starts)


ROWS = choice(np.array([[5.0, 7.0]]), hbm=30, ddr=20, kind="row_wise")
COLUMNS = choice(np.array([[2.0], [3.0]]), hbm=40, kind="column_wise", one_host=True)


def test_every_rank_of_a_block_does_and_holds_its_own_part() -> None:
    """Bytes that counted on the first rank of a block alone failed no test: search and oracle place alike."""
    found = loads(*of(ROWS, COLUMNS, starts=((2,), (2, 3))))
    assert found.time_ms.tolist() == [1.0, 0.0, 5.0 + 2.0, 2.0 + 7.0 + 3.0]
    assert found.hbm.tolist() == [0, 0, 70, 70] and found.ddr.tolist() == [0, 0, 20, 20]


def test_two_blocks_on_one_rank_add_up() -> None:
    found = loads(*of(COLUMNS, starts=((1, 1),)))
    assert found.time_ms.tolist() == [1.0, 5.0, 0.0, 2.0] and found.hbm.tolist() == [0, 80, 0, 0]


def test_a_good_assignment_has_no_faults() -> None:
    assert faults(*of(ROWS, COLUMNS, starts=((0,), (2, 3)))) == []


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (of(COLUMNS, starts=((1, 2),)), "its blocks are on more than one host"),
        (of(COLUMNS, starts=((0,),)), "1 places for 2 blocks"),
        (of(ROWS, starts=((1,),)), "a block of 2 ranks cannot begin at rank 1"),
        (of(ROWS, starts=((4,),)), "a block of 2 ranks cannot begin at rank 4"),
        (of(ROWS, starts=((2,),), ranks=(0, 1, 2)), "ranks 2 to 3 are not allowed"),
        (of(ROWS, ROWS, starts=((2,), (2,)), hbm=59), "rank 3: 60 of 59 bytes of hbm"),
        (of(ROWS, ROWS, ROWS, starts=((0,), (0,), (0,))), "rank 1: 60 of 50 bytes of ddr"),
    ],
)
def test_what_is_wrong_is_said(problem: tuple[Problem, Assignment], said: str) -> None:
    assert any(said in fault for fault in faults(*problem)), faults(*problem)
