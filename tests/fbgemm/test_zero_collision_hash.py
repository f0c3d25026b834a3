"""Slots that zero_collision_hash gives to new ids: FBGEMM gives none on the CPU, a loop in plain Python says which."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from shardwise.fbgemm import register_ops
from shardwise.perf.evidence.fbgemm.calls.ids import hash_of_words


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_ops()


def one_after_another(
    ids: list[int],
    table: list[int],
    spans: list[tuple[int, int]],
    max_probe: int,
    reserved: int,
    rands: list[int] | None,
    chance: int,
    disable_fallback: bool,
) -> list[int]:
    """What the op gives and makes of the table, for ids in `spans` of (first slot, slots)."""
    slots = []
    for place, (number, (begin, size)) in enumerate(zip(ids, spans, strict=True)):
        block = size - reserved
        hashed = hash_of_words(number, 0, 0)
        path = [begin + (hashed % block + i) % block for i in range(max_probe)]
        fallback = begin + (block + hashed % reserved if reserved else hashed % block)
        held = next((slot for slot in path if table[slot] == number), None)
        if rands is not None and held is None and rands[place] >= chance:
            slots.append(fallback)
            continue
        taken = next((slot for slot in path if table[slot] in (-1, number)), None)
        if taken is not None:
            table[taken] = number
        slots.append(taken if taken is not None else -1 if disable_fallback else fallback)
    return slots


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(40))
def test_new_ids_take_the_slots_that_one_after_another_takes(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    size, slots = draw.randrange(40), draw.randrange(4, 40)
    reserved = draw.choice([0, 0, 2])
    table = [-1] * slots
    for _ in range(2):
        ids = [draw.randrange(30) for _ in range(size)]
        spans, local = [(0, slots)] * size, draw.random() < 0.4
        if local:
            # each id in a half of the table
            spans = [draw.choice([(0, slots // 2), (slots // 2, slots - slots // 2)]) for _ in ids]
            reserved = min(reserved, slots // 2 - 1)
        chance = draw.randrange(1, 100) if reserved else -1
        rands = [draw.randrange(100) for _ in ids] if reserved and draw.random() < 0.7 else None
        max_probe, disable_fallback = draw.randrange(1, slots + 2), draw.random() < 0.3

        identities = torch.tensor(table, dtype=dtype).view(-1, 1)
        expected = one_after_another(ids, table, spans, max_probe, reserved, rands, chance, disable_fallback)
        begins, sizes = (torch.tensor([span[i] for span in spans], dtype=torch.int64) for i in range(2))
        found, evicted = torch.ops.fbgemm.zero_collision_hash(
            torch.tensor(ids, dtype=dtype),
            identities,
            max_probe,
            True,
            local_sizes=sizes if local else None,
            offsets=begins if local else None,
            disable_fallback=disable_fallback,
            opt_in_prob=chance,
            num_reserved_slots=reserved or -1,
            opt_in_rands=None if rands is None else torch.tensor(rands, dtype=torch.int32),
        )
        assert found.tolist() == expected
        assert identities.flatten().tolist() == table
        assert evicted is None


def test_an_id_keeps_the_slot_that_it_took() -> None:
    identities, _ = torch.ops.fbgemm.create_zch_buffer(64, long_type=True)
    ids = torch.randperm(1000)[:60]

    def slots(readonly: bool) -> Tensor:
        found: Tensor = torch.ops.fbgemm.zero_collision_hash(ids, identities, 64, True, readonly=readonly)[0]
        return found

    taken = slots(readonly=False)
    assert len(set(taken.tolist())) == 60
    assert torch.equal(identities[taken, 0], ids)
    assert torch.equal(slots(readonly=False), taken)
    assert torch.equal(slots(readonly=True), taken)
