"""Victims are those that a stable sort of the keys puts first, among the slots that nobody holds."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICES, UPDATES, torch_device
from torch import Tensor

from shardwise.kernels import lowest
from shardwise.kernels.rows import lowest as op
from shardwise.kernels.rows.lowest import lowest_ref

LOOPS = op, "loops"
MOST = 2**31 - 1


def inputs(
    generator: random.Random, sizes: list[int], top: int, held: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Keys below `top`, a share of the slots held; now and then slots of no table, and more wanted than there are."""
    begin = generator.randint(0, 2)
    borders = torch.tensor([begin, *sizes]).cumsum(0)
    slots = int(borders[-1]) + generator.randint(0, 2)
    keys = torch.tensor([generator.randrange(top) for _ in range(slots)], dtype=torch.int32)
    holders = torch.tensor([generator.choice([1, 5]) if generator.random() < held else 0 for _ in range(slots)])
    counts = torch.tensor([generator.randint(0, size + 1) for size in sizes], dtype=torch.int64)
    return keys, holders.int(), borders, counts, int(counts.sum()) + generator.randint(0, 2)


def sorted_first(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, capacity: int) -> list[int]:
    """What `lowest` gives, in lists of Python."""
    places: list[int] = []
    ends, wanted = borders.tolist(), counts.tolist()
    for t, count in enumerate(wanted):
        free = [s for s in range(ends[t], ends[t + 1]) if held[s] <= 0]
        picked = sorted(sorted(free, key=lambda s: (int(keys[s]), s))[:count])
        places += picked + [-1] * (count - len(picked))
    return places + [-1] * (capacity - len(places))


TOPS = [1, 3, 100, 1 << 15, 1 << 16, 1 << 20, MOST]


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("device", UPDATES)
def test_a_sort_of_lists_picks_the_same(where: torch.device, top: int) -> None:
    generator = random.Random(top)
    for _ in range(1 if where.type == "cuda" else 3):
        *tensors, capacity = inputs(generator, [generator.randint(0, 9) for _ in range(3)], top, 0.3)
        got = lowest(*[tensor.to(where) for tensor in tensors], capacity=capacity)
        assert got.tolist() == sorted_first(*tensors, capacity=capacity)
        assert got.dtype == torch.int64


def test_10_000_random_tables_equal_a_stable_sort() -> None:
    """The loop that numba compiles beside the reference."""
    pytest.importorskip("numba")
    generator = random.Random(0)
    for number in range(2500):
        sizes = [generator.choice([0, 1, 2, 7, 30]) for _ in range(4)]
        given = inputs(generator, sizes, generator.choice(TOPS), generator.choice([0, 0.2, 0.9]))
        assert torch.equal(lowest(*given), lowest_ref(*given)), (number, given)


@pytest.mark.parametrize("top", [1, 2, 7, 200, 1 << 20, MOST])
def test_large_tables_equal_a_stable_sort(top: int) -> None:
    """Of more than 512 slots the loop looks at a sample first, which may say too little or too much."""
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(top)
    for number in range(25):
        sizes = torch.randint(0, 4000, (3,), generator=generator)
        borders = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        slots = int(borders[-1])
        keys = torch.randint(0, top, (slots,), generator=generator, dtype=torch.int32)
        if number % 3 == 1:
            # as ages are: the lowest keys lie together, where a sample may have none of them
            keys = keys.sort().values
        held = (torch.rand(slots, generator=generator) < (0, 0.1, 0.95)[number % 3]).int()
        counts = (sizes * torch.rand(3, generator=generator) ** 3).long()
        given = keys, held, borders, counts, int(counts.sum())
        assert torch.equal(lowest(*given), lowest_ref(*given)), number


@pytest.mark.parametrize("device", UPDATES)
def test_what_is_held_is_never_picked(where: torch.device) -> None:
    keys = torch.tensor([5, 1, 1, 9, 0, 1, MOST, MOST], dtype=torch.int32, device=where)
    held = torch.tensor([0, 0, 2, 0, 1, 0, 0, 1], dtype=torch.int32, device=where)
    borders = torch.tensor([0, 6, 8], device=where)
    for counts, expected in (
        ([2, 0], [1, 5, -1, -1]),
        ([1, 2], [1, 6, -1, -1]),
        ([3, 1], [0, 1, 5, 6]),
        ([0, 0], [-1, -1, -1, -1]),
    ):
        assert lowest(keys, held, borders, torch.tensor(counts, device=where), 4).tolist() == expected
    assert lowest(keys, held, borders, torch.tensor([7, 0], device=where), 7).tolist() == [0, 1, 3, 5, -1, -1, -1]


@pytest.mark.parametrize("device", UPDATES)
def test_tables_of_several_chunks_are_picked_from_in_order(where: torch.device) -> None:
    """Interpreted, a program has 64 slots."""
    generator = random.Random(5)
    for top in (3, 1 << 20):
        *tensors, capacity = inputs(generator, [150, 3, 70], top, 0.2)
        got = lowest(*[tensor.to(where) for tensor in tensors], capacity=capacity)
        assert got.tolist() == sorted_first(*tensors, capacity=capacity)


@pytest.mark.parametrize("device", UPDATES)
def test_no_slots_and_no_tables_are_ordinary(where: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int32, device=where)
    zero, nothing = torch.zeros(1, dtype=torch.int64, device=where), torch.zeros(0, dtype=torch.int64, device=where)
    assert lowest(none, none, zero, nothing, 2).tolist() == [-1, -1]
    assert lowest(none, none, zero.repeat(3), zero.repeat(2) + 1, 2).tolist() == [-1, -1]
    assert lowest(none + 0, none, zero.repeat(2), zero, 0).tolist() == []


T = torch.tensor
I = T([1, 2], dtype=torch.int32)
BAD: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((I.long(), I, T([0, 2]), T([1]), 1), TypeError, "keys must be torch.int32, got torch.int64"),
    ((I, I, T([0, 2]).int(), T([1]), 1), TypeError, "borders must be torch.int64, got torch.int32"),
    ((I[:, None], I, T([0, 2]), T([1]), 1), ValueError, "keys must have one dimension, got shape [2, 1]"),
    ((I, I[:1], T([0, 2]), T([1]), 1), ValueError, "2 keys, but held has 1"),
    ((I, I, T([0, 2]), T([1, 1]), 2), ValueError, "2 counts, so borders must have one more, got 2"),
    ((I, I, T([0, 2]), T([1]).to("meta"), 1), ValueError, "counts must be on cpu as keys are, got meta"),
    ((I, I, T([0, 2]), T([1]), -1), ValueError, "capacity must not be negative, got -1"),
    ((I, I, T([0, 3]), T([1]), 1), ValueError, "borders must ascend from 0 to at most 2 slots, got [0, 3]"),
    ((I, I, T([1, 0]), T([1]), 1), ValueError, "borders must ascend"),
    ((I, I, T([0, 2]), T([-1]), 1), ValueError, "counts must be >= 0 and sum to at most 1 (capacity), got [-1]"),
    ((I, I, T([0, 2]), T([2]), 1), ValueError, "counts must be >= 0 and sum to at most 1 (capacity), got [2]"),
]


@pytest.mark.parametrize(("args", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_input_is_named(args: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        lowest(*args)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    *tensors, capacity = inputs(random.Random(1), [5, 0, 7], 9, 0.2)
    there = [tensor.to(torch_device(device)) for tensor in tensors]
    torch.library.opcheck(torch.ops.shardwise.lowest.default, (*there, capacity))
