"""Layouts: how each strategy cuts a table, and that a plan is exact: every cell once, whatever the cuts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from lines_run import lines_run

from shardwise.planner import layout
from shardwise.planner.layout import TableOptions
from shardwise.sharding import Shard

# (strategy, its arguments after rows and dim, rows, dim, what it makes: rank, rows, columns)
Cells = tuple[int, tuple[int, int], tuple[int, int]]
CUTS: dict[str, tuple[Callable[..., list[Shard]], tuple[Any, ...], int, int, list[Cells]]] = {
    "table_wise": (layout.table_wise, (2,), 7, 4, [(2, (0, 7), (0, 4))]),
    "row_wise": (layout.row_wise, (range(2),), 7, 4, [(0, (0, 4), (0, 4)), (1, (4, 7), (0, 4))]),
    "row_wise, the last rank has nothing": (
        layout.row_wise, ((0, 1, 2, 3),), 5, 4,
        [(0, (0, 2), (0, 4)), (1, (2, 4), (0, 4)), (2, (4, 5), (0, 4)), (3, (5, 5), (0, 4))],
    ),
    "row_wise, fewer rows than ranks": (
        layout.row_wise, ((0, 1, 2),), 1, 4, [(0, (0, 1), (0, 4)), (1, (1, 1), (0, 4)), (2, (1, 1), (0, 4))],
    ),
    "row_wise, sizes and ranks as wanted": (
        layout.row_wise, ((3, 0), (1, 6)), 7, 4, [(3, (0, 1), (0, 4)), (0, (1, 7), (0, 4))],
    ),
    "column_wise": (layout.column_wise, ((1, 0),), 7, 4, [(1, (0, 7), (0, 2)), (0, (0, 7), (2, 4))]),
    "column_wise, widths as wanted, a rank twice": (
        layout.column_wise, ((0, 1, 0), (1, 3, 2)), 7, 6,
        [(0, (0, 7), (0, 1)), (1, (0, 7), (1, 4)), (0, (0, 7), (4, 6))],
    ),
    "table_row_wise": (layout.table_row_wise, ((2, 3),), 7, 4, [(2, (0, 4), (0, 4)), (3, (4, 7), (0, 4))]),
    "table_column_wise": (layout.table_column_wise, ((2, 3),), 7, 4, [(2, (0, 7), (0, 2)), (3, (0, 7), (2, 4))]),
    "table_column_wise, widths": (
        layout.table_column_wise, ((2, 3), (3, 1)), 7, 4, [(2, (0, 7), (0, 3)), (3, (0, 7), (3, 4))],
    ),
    "grid": (
        layout.grid, (((0, 1), (2, 3)),), 7, 4,
        [(0, (0, 4), (0, 2)), (1, (4, 7), (0, 2)), (2, (0, 4), (2, 4)), (3, (4, 7), (2, 4))],
    ),
    "grid, widths as wanted, hosts of other sizes": (
        layout.grid, (((2, 3), (0,)), (1, 3)), 7, 4,
        [(2, (0, 4), (0, 1)), (3, (4, 7), (0, 1)), (0, (0, 7), (1, 4))],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "arguments", "rows", "dim", "cells"), CUTS.values(), ids=CUTS)
def test_a_strategy_lists_its_shards_in_order(
    strategy: Callable[..., list[Shard]], arguments: tuple[Any, ...], rows: int, dim: int, cells: list[Cells]
) -> None:
    shards = strategy("t", rows, dim, *arguments)
    assert shards == [Shard("t", *cell) for cell in cells]
    layout.validate(shards, {"t": (rows, dim)}, 4)


def test_replicas_are_whole() -> None:
    shards = layout.data_parallel("t", 7, 4, 2)
    assert shards == [Shard("t", rank, (0, 7), (0, 4), replica=True) for rank in range(2)]
    layout.validate(shards, {"t": (7, 4)}, 2)


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (7, 2, [4, 3]), (9, 4, [3, 3, 3, 0]), (2, 4, [1, 1, 0, 0]), (5, 1, [5]), (5, 0, [])],
)
def test_rows_split_in_blocks_of_the_same_size_and_a_remainder(rows: int, parts: int, sizes: list[int]) -> None:
    assert layout.split_rows(rows, parts) == sizes


@pytest.mark.parametrize(
    ("dim", "min_partition", "widths"),
    [
        (64, 32, [32, 32]), (128, 32, [32] * 4), (100, 32, [100]), (96, 32, [32] * 3), (80, 32, [40] * 2),
        (32, 32, [32]), (16, 32, [16]), (64, 64, [64]), (64, 17, [32, 32]), (64, 1, [4] * 16),
        (63, 1, [63]), (24, 5, [8] * 3),
    ],
)  # fmt: skip
def test_columns_split_in_the_narrowest_equal_multiples_of_four(
    dim: int, min_partition: int, widths: list[int]
) -> None:
    assert layout.split_columns(dim, min_partition) == widths
    if min_partition == 32:
        assert layout.split_columns(dim) == widths


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layout.row_wise("t", 7, 4, []), "table 't': there are no ranks for its rows"),
        (
            lambda: layout.row_wise("t", 7, 4, [0, 1], [3, 3]),
            r"table 't': \[3, 3\] rows must be 2 numbers.* add up to 7",
        ),
        (lambda: layout.row_wise("t", 7, 4, [0, 1], [7]), r"table 't': \[7\] rows must be 2 numbers"),
        (lambda: layout.row_wise("t", 7, 4, [0, 1], [8, -1]), r"table 't': \[8, -1\] rows must be 2 numbers"),
        (lambda: layout.column_wise("t", 7, 4, [0, 1, 2]), "table 't': 4 columns do not divide by 3: say the width of"),
        (lambda: layout.column_wise("t", 7, 4, []), "table 't': there are no ranks for its columns"),
        (
            lambda: layout.column_wise("t", 7, 4, [0, 1], [3, 2]),
            r"table 't': \[3, 2\] columns must be 2 .* add up to 4",
        ),
        (lambda: layout.grid("t", 7, 4, [[0], [1], [2]]), "table 't': 4 columns do not divide by 3"),
        (lambda: layout.grid("t", 7, 4, [[0, 1], []]), "table 't': there are no ranks for its rows"),
        (lambda: layout.split_columns(64, 0), "min_partition must be positive, got 0"),
        (lambda: TableOptions(reduction="sum"), r"reduction must be one of \['partial', 'ordered'\], got 'sum'"),
        (lambda: TableOptions(row_state="row"), r"row_state must be one of \['shard', 'table'\], got 'row'"),
        (lambda: TableOptions(None), r"reduction must be one of \['partial', 'ordered'\], got None"),  # type: ignore[arg-type]
    ],
)
def test_a_cut_that_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_options_have_the_defaults_of_torchrec() -> None:
    assert TableOptions() == TableOptions(reduction="partial", row_state="shard")


def test_consecutive_ranks_are_a_host() -> None:
    assert [layout.host_of(rank, 2) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert [list(layout.ranks_of(host, 3)) for host in range(2)] == [[0, 1, 2], [3, 4, 5]]


WHOLE = Shard("t", 0, (0, 7), (0, 4))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], r"table 't': shards hold 0 of 28 cells, none holds rows \[0, 7\) of columns \[0, 4\)$"),
        ([Shard("t", 0, (0, 5), (0, 4))], r"shards hold 20 of 28 cells, none holds rows \[5, 7\) of columns \[0, 4\)$"),
        ([Shard("t", 0, (2, 2), (0, 4))], r"hold 0 of 28 cells, none holds rows \[0, 7\) of columns \[0, 4\)$"),
        (
            [Shard("t", 0, (0, 7), (0, 2)), Shard("t", 0, (2, 3), (2, 4)), Shard("t", 1, (4, 7), (2, 4))],
            r"table 't': shards hold 22 of 28 cells, none holds rows \[0, 2\) of columns \[2, 4\)$",
        ),
        (
            [Shard("t", 0, (0, 7), (0, 1)), Shard("t", 1, (0, 7), (2, 4))],
            r"table 't': shards hold 21 of 28 cells, none holds rows \[0, 7\) of columns \[1, 2\)$",
        ),
        (
            [WHOLE, Shard("t", 1, (6, 7), (3, 4))],
            r"shards hold 29 of 28 cells, some twice: rows \[6, 7\) of columns \[3, 4\) are on ranks 0 and 1$",
        ),
        (
            [Shard("t", 0, (0, 4), (0, 4)), Shard("t", 1, (3, 6), (0, 4))],
            r"28 of 28 cells, some twice: rows \[3, 4\) of columns \[0, 4\) are on ranks 0 and 1$",
        ),
        ([WHOLE, Shard("u", 0, (0, 7), (0, 4))], r"the plan places table 'u', the module has \['t'\]"),
        ([Shard("t", 2, (0, 7), (0, 4))], "table 't': rank 2 is not one of 2"),
        ([Shard("t", -1, (0, 7), (0, 4))], "table 't': rank -1 is not one of 2"),
        ([Shard("t", 0, (0, 8), (0, 4))], r"table 't': rows \[0, 8\) leave the table's 7"),
        ([Shard("t", 0, (0, 7), (-1, 4))], r"table 't': columns \[-1, 4\) leave the table's 4"),
        (
            layout.data_parallel("t", 7, 4, 1),
            "a replicated table needs one whole replica on each of 2 ranks",
        ),
        ([*layout.data_parallel("t", 7, 4, 2), WHOLE], "table 't': a replicated table needs one whole replica"),
        (layout.data_parallel("t", 5, 4, 2), "table 't': a replicated table needs one whole replica"),
    ],
)
def test_a_layout_with_gaps_overlaps_or_strangers_is_refused(shards: list[Shard], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.validate(shards, {"t": (7, 4)}, 2)


def cut_anywhere(data: st.DataObject, size: int) -> Sequence[tuple[int, int]]:
    """Spans of at least one row or column, that follow each other."""
    return list(pairwise([0, *sorted(data.draw(st.sets(st.integers(1, size - 1)) if size > 1 else st.just(()))), size]))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.randoms(use_true_random=False), st.data())
def test_a_table_cut_anywhere_is_covered_until_a_shard_is_missing_doubled_or_moved(
    rows: int, dim: int, columns_first: bool, shuffler: Any, data: st.DataObject
) -> None:
    """Columns are cut differently in each block of rows, or rows in each block of columns; some shards are empty."""
    shards = [
        Shard("t", data.draw(st.integers(0, 2)), *((inner, outer) if columns_first else (outer, inner)))
        for outer in cut_anywhere(data, dim if columns_first else rows)
        for inner in cut_anywhere(data, rows if columns_first else dim)
    ]
    empty = [Shard("t", 1, (row, row), (0, dim)) for row in data.draw(st.lists(st.integers(0, rows), max_size=2))]
    shuffler.shuffle(shards)
    layout.validate([*empty, *shards], {"t": (rows, dim)}, 3)
    position = data.draw(st.integers(0, len(shards) - 1))
    others, lost = [*empty, *shards[:position], *shards[position + 1 :]], shards[position]
    moved = [
        replace(lost, rows=(lost.rows[0] + by, lost.rows[1] + by))
        for by in (-1, 1)
        if lost.rows[0] + by >= 0 and lost.rows[1] + by <= rows
    ]
    for wrong, message in [([], "none holds"), ([lost, lost], "some twice"), *(([shard], "") for shard in moved)]:
        with pytest.raises(ValueError, match=f"table 't': shards hold .* cells, .*{message}"):
            layout.validate([*others, *wrong], {"t": (rows, dim)}, 3)


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 4)] * 4), max_size=6))
def test_the_sweep_agrees_with_counting_each_cell(corners: list[tuple[int, int, int, int]]) -> None:
    shards = [
        Shard("t", 0, (min(top, bottom), max(top, bottom)), (min(left, right), max(left, right)))
        for top, bottom, left, right in corners
    ]
    held = [[sum(_holds(s, row, col) for s in shards) for col in range(4)] for row in range(4)]
    if held == [[1] * 4] * 4:
        layout.validate(shards, {"t": (4, 4)}, 1)
    else:
        with pytest.raises(ValueError, match="table 't': shards hold"):
            layout.validate(shards, {"t": (4, 4)}, 1)


def _holds(shard: Shard, row: int, col: int) -> bool:
    return shard.rows[0] <= row < shard.rows[1] and shard.cols[0] <= col < shard.cols[1]


def test_a_plan_of_hundreds_of_ranks_is_checked_at_once() -> None:
    """Every pair of shards was compared: 26 tables over 512 ranks took more than three million comparisons."""
    sizes = {f"t{n}": (10**6 + n, 64) for n in range(26)}
    shards = [shard for name, size in sizes.items() for shard in layout.row_wise(name, *size, range(512))]
    _, lines = lines_run(lambda: layout.validate(shards, sizes, 512))
    # 37 a shard; by pairs there are 256 and more
    assert lines < 60 * len(shards)


def test_a_fingerprint_is_stable_over_processes_and_orders_and_tells_plans_apart() -> None:
    shards = [WHOLE, Shard("u", 1, (0, 5), (0, 4))]
    fingerprint = layout.fingerprint(shards, ["a", 1])
    code = (
        "from shardwise.planner.layout import Shard, fingerprint\n"
        "print(fingerprint([Shard('u', 1, (0, 5), (0, 4)), Shard('t', 0, (0, 7), (0, 4))], ['a', 1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == fingerprint
    assert 0 <= fingerprint < 2**63
    others = [
        layout.fingerprint(shards, [1, "a"]),
        layout.fingerprint(shards, ["a"]),
        layout.fingerprint(shards[:1], ["a", 1]),
        layout.fingerprint([WHOLE, Shard("u", 0, (0, 5), (0, 4))], ["a", 1]),
        layout.fingerprint([WHOLE, Shard("u", 1, (0, 5), (0, 4), replica=True)], ["a", 1]),
    ]
    assert len({fingerprint, *others}) == 6
