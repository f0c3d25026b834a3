"""Ranks find keys of their own in a store that other groups used before them."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from shardwise.sharding.comms.watch import Rendezvous


def meet(store: dist.Store, looks: list[int], world_size: int) -> list[Rendezvous]:
    """A generation of ranks that look in this order."""
    ranks = [Rendezvous(rank, world_size) for rank in range(world_size)]
    for rank in looks:
        ranks[rank].advance(store)
    return ranks


@pytest.mark.parametrize("looks", list(itertools.permutations(range(3))))
def test_ranks_agree_on_keys_in_whatever_order_they_come(looks: tuple[int, ...]) -> None:
    ranks = meet(dist.HashStore(), [*looks, 0, 1, 2, 0], 3)
    assert len({rank.prefix for rank in ranks}) == 1
    assert all(rank.over for rank in ranks)


# who of the first generation lived long enough to look, and how often
@pytest.mark.parametrize("before", [[], [0], [1], [1, 0], [0, 1, 0, 1, 0], [1, 0, 1]], ids=str)
@pytest.mark.parametrize("looks", [[0, 1, 0, 1, 0], [1, 1, 0, 1, 0]], ids=str)
def test_a_restarted_group_does_not_take_keys_of_the_dead_for_its_own(before: list[int], looks: list[int]) -> None:
    """torchrun keeps the store: ranks that had been made unequally often had different keys, with old alarms in them.

    Each restart then failed by an alarm of the one before, for ever.
    """
    store = dist.HashStore()
    old = {rank.prefix for rank in meet(store, before, 2)}
    first, second = meet(store, looks, 2)
    assert first.prefix == second.prefix
    assert first.prefix not in old
    assert first.over and second.over


def test_a_rank_whose_rank_0_has_not_come_has_no_keys() -> None:
    store = dist.HashStore()
    meet(store, [0, 1, 0, 1, 0], 2)
    late = Rendezvous(1, 2)
    for _ in range(3):
        late.advance(store)
    assert late.prefix is None
    assert not late.over
