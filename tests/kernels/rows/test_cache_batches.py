"""What a device does for a batch of a cache, op by op; whole histories of caches are in embeddings/tiers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICES
from torch import Tensor

from shardwise.kernels.rows import LRU, slots, wanted
from shardwise.perf.selftest.rows_checks import ROWS, Cache

OPS = torch.ops.shardwise
CALLS = [
    each for each in ROWS if each.op in {
        "claim_rows", "expect_rows", "link_rows", "list_rows", "make_rows", "mark_rows", "pick_lowest", "place_rows",
        "release_slots", "take_slots",
    }
]  # fmt: skip
NAMES = [f"{each.op} {each.words}" for each in CALLS]


def on(where: torch.device, given: Sequence[Any]) -> list[Any]:
    return [
        value.to(where) if isinstance(value, Tensor) else on(where, value) if isinstance(value, list) else value
        for value in given
    ]


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_does_what_its_reference_does(where: torch.device, call: Any) -> None:
    given, expected = on(where, call.inputs()), call.inputs()
    results = [call.call(*given), call.call_reference(*expected)]
    got, want = ([one] if isinstance(one, Tensor) else one for one in results)
    for one, other in zip(flat(got), flat(want), strict=True):
        assert torch.equal(one.cpu(), other)


def flat(values: Any) -> list[Tensor]:
    return [leaf for value in values for leaf in (flat(value) if isinstance(value, (list, tuple)) else [value])]


@pytest.mark.parametrize("call", {each.op: each for each in CALLS}.values(), ids=lambda each: each.op)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(where: torch.device, call: Any) -> None:
    given = on(where, call.inputs())
    torch.library.opcheck(getattr(OPS, call.op).default, tuple(given))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_many_ids_want_is_held_once(where: torch.device) -> None:
    """Ids of both samples, of two features of one table, and out of their table."""
    rng = random.Random(3)
    cache = Cache((50, 70), (20, 30))
    ids = [rng.choice([-3, 50, *range(50)]) for _ in range(300)] + [rng.randrange(70) for _ in range(100)]
    cache.ids = torch.tensor(ids, dtype=torch.int32)
    cache.offsets = torch.tensor([0, 17, 300, 300, 400])
    before = cache.slot_of.tolist()
    given = on(where, cache.claim(LRU, keeps=False))
    places, held = OPS.claim_rows(*given)
    rows = [
        -1 if t == 0 and not 0 <= id < 50 else id + 50 * t for t, id in zip([0] * 300 + [1] * 100, ids, strict=True)
    ]
    first = [0] * 300 + [20] * 100
    assert places.tolist() == [
        -1 if row < 0 else before[row] - start if before[row] >= 0 else -2 - row
        for row, start in zip(rows, first, strict=True)
    ]
    found = {before[row] for row in rows if row >= 0 and before[row] >= 0}
    assert sorted(slot for slot in held.tolist() if slot >= 0) == sorted(found)
    assert (held[400:] == -1).all()
    assert given[6].tolist() == [int(slot in found) for slot in range(50)]
    missing = sorted({row for row in rows if row >= 0 and before[row] < 0})
    assert given[12][:2].tolist() == [
        [sum(slot < 20 for slot in found), sum(slot >= 20 for slot in found)],
        [sum(row < 50 for row in missing), sum(row >= 50 for row in missing)],
    ]
    assert wanted.list_rows(given[10], given[11], len(missing) + 9).tolist() == missing + [-1] * 9
    assert not given[10].any()


@pytest.mark.parametrize("words", [1, 16, 17, 70])
@pytest.mark.parametrize("device", DEVICES)
def test_marked_rows_come_ascending_whatever_their_chunks(where: torch.device, words: int) -> None:
    rng = random.Random(words)
    for count in (0, 1, 3 * words, 31 * words):
        rows = sorted(rng.sample(range(32 * words), count))
        bits = torch.zeros(words, dtype=torch.int32)
        tallies = torch.zeros(wanted.chunk_count(words), dtype=torch.int64)
        wanted._set_bits(bits, tallies, torch.tensor(rows, dtype=torch.int64))
        for capacity in {max(0, count - 1), count + 40}:
            given = bits.to(where, copy=True)
            got = wanted.list_rows(given, tallies.to(where), capacity)
            assert got.tolist() == (rows + [-1] * capacity)[:capacity]
            assert not given.any()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_comes_of_nothing(where: torch.device) -> None:
    cache = Cache((5,), (3,))
    cache.ids, cache.offsets = cache.ids[:0], torch.zeros(2, dtype=torch.int64)
    given = on(where, cache.claim(LRU, keeps=False))
    places, held = OPS.claim_rows(*given)
    assert places.shape == held.shape == (0,)
    OPS.mark_rows(*on(where, cache.mark()))
    assert wanted.list_rows(given[10], given[11], 0).shape == (0,)
    none = given[0].long()
    saves, fresh = slots.take_slots(
        none, none, given[5], given[4], given[4].long(), given[6], given[6] > 0, given[6] > 0, given[8], given[9],
        given[12], given[13], LRU, 1, 0,
    )  # fmt: skip
    assert saves.shape == fresh.shape == (0,) and fresh.dtype == torch.bool
    spare = torch.ones(3, dtype=torch.int64, device=where)
    slots.place_rows(none, given[1], given[3], given[4], spare)
    # of no use to this batch, but to the next one
    assert not spare.any()
    slots.release_slots(none, given[6], given[6] > 0, True)
    assert not given[12].any() and not given[6].any()
