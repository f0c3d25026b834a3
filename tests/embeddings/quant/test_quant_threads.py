"""Checks of quantized tables on a GPU are read later; what threads that look up at once found is all raised, once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import BoundsCheckMode
from shardwise.embeddings.quant import QuantizedTable, QuantizedTables
from shardwise.embeddings.tables.table_layout import LookupFeature
from shardwise.kernels import new_guard
from shardwise.sharding.quant.checks import BatchCheck

TABLE = QuantizedTable("t", 10, 8, "int8")
CHECKS: dict[str, Callable[[], Any]] = {
    "tables": lambda: QuantizedTables([TABLE], [LookupFeature("f", 0, False)]).check,
    "tables in pieces": lambda: BatchCheck([("f", TABLE)], BoundsCheckMode.FATAL, strict=False)._check,
}


@dataclass
class Arrived:
    """A guard that came to the host: of a batch of one id."""

    guard: Tensor
    ids: Tensor
    offsets: Tensor

    def is_raised(self) -> bool:
        return bool(self.guard[0] == 0)


def batch_of(number: int) -> Arrived:
    guard = new_guard()
    if number >= 10:
        guard[0] = 0
    return Arrived(guard, torch.tensor([number]), torch.tensor([0, 1]))


@pytest.mark.parametrize("made", CHECKS.values(), ids=CHECKS.keys())
def test_bad_ids_of_batches_checked_at_once_are_all_raised(made: Callable[[], Any]) -> None:
    """The check kept the guard of the latest batch alone: a bad id of another thread's counted as none, in silence."""
    check = made()
    check._pending.extend(batch_of(number) for number in (3, 11, 4, 12, 5))
    for number in (11, 12):
        with pytest.raises(IndexError, match=rf"feature 'f' \(table 't'\), sample 0: id {number} is outside \[0, 10\)"):
            check.raise_pending()
    check.raise_pending()


@pytest.mark.parametrize("made", CHECKS.values(), ids=CHECKS.keys())
def test_threads_that_read_guards_at_once_raise_each_of_them_once(made: Callable[[], Any]) -> None:
    """A thread that found a guard waiting, and then none as another had taken it, failed with an AttributeError."""
    check, count = made(), 64
    check._pending.extend(batch_of(10 + number) for number in range(count))

    def found(_: int) -> str:
        with pytest.raises(IndexError) as caught:
            check.raise_pending()
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        messages = list(pool.map(found, range(count)))
    assert sorted(int(message.split("id ")[1].split(" ")[0]) for message in messages) == [*range(10, 10 + count)]
    check.raise_pending()
