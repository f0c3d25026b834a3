"""What the interpreter records of moves of rows, of victims and of first values, and what they declare."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from recorded_calls import Call, assert_sound

from shardwise.kernels import initial_rows, lowest, move_rows
from shardwise.perf.compile.recorded import SECTOR
from shardwise.perf.selftest.rows_checks import PARTS, ROWS, moves, victims
from shardwise.perf.selftest.served_checks import Served
from shardwise.perf.suite.declared_rows import initial_rows_bytes, lowest_bytes, move_rows_bytes

# bytes of the counts of a digit, and digits
COUNTS, DIGITS = 1024, 4


def move(words: str) -> Call:
    parts, records, *numbers = moves(PARTS[words])
    traffic = move_rows_bytes(parts, *numbers, sector=SECTOR)
    move_rows(parts, records, *numbers)
    memory = {f"X{i}": part for i, part in enumerate(parts)} | {"R": records}
    # numbers of rows lie side by side; two blocks of columns of an odd row share the sector between them
    arrays = " ".join(f"X{i}" for i, part in enumerate(parts) if part.dim() == 1 or part.shape[1] % 256 == 255)
    return Call([*parts, records], traffic, memory, arrays, 16, 4)


def pick(*sizes: int) -> Call:
    keys, held, borders, counts, capacity = victims(sizes, 40)
    out = lowest(keys, held, borders, counts, capacity)
    traffic = lowest_bytes(keys, capacity, DIGITS + 1)
    # a program of a pass reads the counts of all passes before
    rest = (DIGITS * COUNTS + 8 * (2 * len(sizes) + 2)) // SECTOR + 8
    return Call([out], traffic, {"K": keys, "H": held, "Y": out}, "KHY", 16, rest)


def first_values(kind: str, columns: int, dtype: torch.dtype) -> Call:
    rows = torch.arange(40) * 2**33
    out = initial_rows(rows, torch.tensor([3]), 1, columns, kind, 0.0, 1.0, dtype)
    # a value of the normal distribution has two places of the table, which caches hold
    rest = 4 if kind == "uniform" else 2 * 2050 * 4 // SECTOR + 8
    return Call([out], initial_rows_bytes(rows, out, sector=SECTOR), {"I": rows, "Y": out}, "I", 2, rest)


def batch_of_cache(served: Served) -> Call:
    """Rows with slots come once, so that which id finds one does not hang on the order of programs."""
    result = served.call(*served.inputs())
    return Call([*result] if isinstance(result, tuple) else [result])


OF_CACHES = {
    "claim_rows",
    "expect_rows",
    "link_rows",
    "list_rows",
    "make_rows",
    "mark_rows",
    "pick_lowest",
    "place_rows",
    "release_slots",
    "take_slots",
}
CALLS: dict[str, Callable[[], Call]] = {
    **{f"move {words}": partial(move, words) for words in PARTS},
    "victims of a table": partial(pick, 150),
    "victims of tables": partial(pick, 20, 0, 70),
    "uniform": partial(first_values, "uniform", 128, torch.float32),
    "normal": partial(first_values, "normal", 20, torch.float32),
    "normal halves": partial(first_values, "normal", 7, torch.float16),
    **{f"{each.op} {each.words}": partial(batch_of_cache, each) for each in ROWS if each.op in OF_CACHES},
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CALLS)
def test_programs_do_not_race_in_any_order_and_move_the_declared_bytes(name: str) -> None:
    assert_sound(CALLS[name])
