"""Ranks know ahead of the lookup that a batch fits: then none tells the others whether it had slots, else all do.

Takes half a minute: histories of random calls on up to four processes, each beside tables that lie there whole.
"""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import sharding_mixes as mixes
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks
from sharding_steps import with_tier
from torch import Tensor

from shardwise import KeyedJaggedTensor
from shardwise.planner.layout import TableOptions, Tier
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.engine.collection import ShardedCollection
from shardwise.sharding.engine.tiers import reserved_numbers

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:table .* of the rows that a batch wants")]
ROWS = {"a": 240, "b": 480, "c": 200, "d": 30}
CUTS = {"a": "table_wise", "b": "row_wise", "c": "column_wise", "d": "data_parallel"}
# which give each table a store of its own
POLICIES = {"a": "aged_lfu", "b": "lru", "c": "lfu"}


def mix_of(tier: Tier, *, pooled: bool, replica: Tier | None = None) -> mixes.Mix:
    """Tables that are cut, with a tier, and one that every rank holds."""
    tiers = {**{name: replace(tier, policy=policy) for name, policy in POLICIES.items()}, "d": replica}
    cases = [
        mixes.TableCase(f"t{name}", rows, 8, (name,), CUTS[name], options=TableOptions(tier=tiers[name]))
        for name, rows in ROWS.items()
    ]
    return mixes.Mix(tuple(cases), pooled=pooled, settings=())


def models_of(mix: mixes.Mix) -> tuple[Any, Any]:
    """The collection, and the same with all rows on the device."""
    env = mixes.environment()
    return tuple(mixes.shard(one, mixes.build(mix, "rowwise_adagrad"), env) for one in (mix, with_tier(mix, None)))  # type: ignore[return-value]


def batch_of(values: list[Tensor]) -> KeyedJaggedTensor:
    """Two samples, the first of which has these ids of each table."""
    lengths = [[ids.shape[0], 0] for ids in values]
    return KeyedJaggedTensor(list(ROWS), torch.cat(values), lengths=torch.tensor(lengths).flatten())


def few_rows(ids: int) -> KeyedJaggedTensor:
    """So many ids of each table, of few rows."""
    return batch_of([torch.arange(ids) % 12 for _ in ROWS])


@contextmanager
def watched(collection: Any) -> Iterator[tuple[list[tuple[int, bool]], list[bool]]]:
    """Number of each batch at its lookup and whether it fits; and whether a flag leaves with its rows."""
    looked_up: list[tuple[int, bool]] = []
    flags: list[bool] = []
    look_up, rows = ShardedCollection.look_up, Exchange.rows

    def look_up_watched(self: Any, step: Any, **settings: Any) -> None:
        if self is collection and not step.is_stale(self._routes) and not hasattr(step, "rows"):
            looked_up.append((0 if step.reservation is None else step.reservation.number, step.fits))
        look_up(self, step, **settings)

    def rows_watched(self: Any, *args: Any, **settings: Any) -> Any:
        if self is collection._exchange:
            flags.append(settings.get("flag") is not None)
        return rows(self, *args, **settings)

    with patch.object(ShardedCollection, "look_up", look_up_watched), patch.object(Exchange, "rows", rows_watched):
        yield looked_up, flags


def bytes_sent(pooled: bool) -> tuple[list[int], list[bool], int]:
    """Of a batch that fits and one that may not: bytes more than without a tier, and whether it fits; the header's."""
    cached, whole = models_of(mix_of(Tier(24), pooled=pooled))
    more, fits = [], []
    for ids in (1, 13):
        sent = []
        for model in (cached, whole):
            before = model._exchange.sent
            step = model.begin(few_rows(ids))
            model.look_up(step)
            fits += [step.fits] * (model is cached)
            step.rows.wait()
            assert any(step.rows.flags) is False and len(step.rows.flags) == (
                0 if step.fits or model is whole else dist.get_world_size()
            )
            sent.append(model._exchange.sent - before)
            model.drop(step)
        more.append(sent[0] - sent[1])
    assert reserved_numbers(cached._routes) > 0
    return more, fits, 8 * (cached._header_width - whole._header_width)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_batch_that_fits_for_sure_carries_no_flag(pooled: bool) -> None:
    for more, fits, numbers in run_ranks(2, bytes_sent, pooled):
        assert fits == [True, False] and numbers > 0
        assert more == [2 * numbers, 2 * numbers + 2 * 4]


def replicas_may_lack() -> list[bool]:
    found = []
    for replica in (None, Tier(30), Tier(20)):
        cached, _ = models_of(mix_of(Tier(24), pooled=True, replica=replica))
        with watched(cached) as (looked_up, flags):
            mixes.by_lookup(mix_of(Tier(24), pooled=True), cached(few_rows(1)))
        assert flags == [not fits for _, fits in looked_up]
        found += flags
    return found


def test_ranks_tell_each_other_always_where_replicas_may_lack_slots() -> None:
    """Each rank looks its own batch up there besides, of which others know nothing."""
    assert run_ranks(2, replicas_may_lack) == [[False, False, True]] * 2


def overtaken() -> list[str]:
    """A batch that fits, until a later one is looked up before it, and the header of a third comes."""
    mix = mix_of(Tier(4, max_slots=0.3), pooled=True)
    cached, _ = models_of(mix)
    nothing = torch.empty(0, dtype=torch.int64)

    def begun(first: int, ids: int) -> Any:
        # rows of the first table alone, of which 72 may have slots
        rows = (torch.arange(ids) + first) * dist.get_world_size() + dist.get_rank()
        return cached.start(batch_of([rows, nothing, nothing, nothing]))

    def received(step: Any) -> Any:
        cached.send_ids(step)
        cached.receive_ids(step)
        return step

    first, second = received(begun(0, 20)), received(begun(20, 20))
    assert first.fits and not second.fits
    third = begun(40, 1)
    cached.look_up(second)
    received(third)
    assert not first.fits and not third.fits
    cached.look_up(first)
    # one more header, which knows what is held by now
    assert received(begun(50, 1)).fits and third.fits
    return [error_of(cached.exchanged, step) for step in (second, first)]


def test_a_batch_that_is_looked_up_before_its_turn_has_others_sure_of_their_slots_no_more() -> None:
    """What a header says of room is of the time when it left: it counts for these no more either."""
    for good, bad in run_ranks(2, overtaken):
        assert not good
        assert re.search("RuntimeError: rank .: .*80 slots are needed beside those of batches under way", bad), bad


class History:
    """Random calls on a collection, the same on all ranks, and what they did on one of tables that lie there whole."""

    def __init__(self, seed: int, *, pooled: bool) -> None:
        # what all ranks do, and what one alone
        self.rng, self.own = random.Random(seed), random.Random(97 * seed + dist.get_rank())
        self.mix = mix_of(Tier(4, max_slots=self.rng.choice([0.3, 0.4, 0.6])), pooled=pooled)
        self.cached, self.whole = models_of(self.mix)
        self.ahead: list[tuple[KeyedJaggedTensor, bool, Any]] = []
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.errors: list[str] = []
        self.rows = 0

    def batch(self) -> KeyedJaggedTensor:
        """Rows that no other rank has nor, mostly, a batch shortly before: all that it may take is taken."""
        rank, world = dist.get_rank(), dist.get_world_size()
        most = self.rng.choice([2, 8, 24, 48, 48, 400]) // world
        first, self.rows = self.rng.choice([self.rows, self.rows, self.rng.randrange(500)]), self.rows + most
        rows = [(torch.arange(count // world) + first) % (count // world) * world + rank for count in ROWS.values()]
        return batch_of([some[: self.own.randint(most // 2, most)] for some in rows])

    def run(self, batch: KeyedJaggedTensor, *, trains: bool, keeps: bool = False) -> None:
        with torch.set_grad_enabled(trains):
            mine: list[Tensor] = []
            error = error_of(lambda: mine.extend(mixes.by_lookup(self.mix, self.cached(batch))))
            if error:
                assert "no table of its collection changed" in error, error
                self.errors.append(error)
                return
            theirs = mixes.by_lookup(self.mix, self.whole(batch))
        assert all(map(torch.equal, mine, theirs))
        if trains:
            self.kept.append(tuple(sum(out.square().sum() for out in some) for some in (mine, theirs)))  # type: ignore[arg-type]
            if not keeps:
                self.back(-1)

    def back(self, which: int) -> None:
        for total in self.kept.pop(which):
            total.backward()  # type: ignore[no-untyped-call]

    def receive(self, step: Any) -> None:
        self.cached.send_ids(step)
        self.cached.receive_ids(step)

    def call(self, name: str) -> None:
        if name in ("train", "keep", "evaluate"):
            self.run(self.batch(), trains=name != "evaluate", keeps=name == "keep")
        elif name == "back" and self.kept:
            self.back(self.rng.randrange(len(self.kept)))
        elif name == "begin" and len(self.ahead) < 4:
            batch, trains = self.batch(), self.rng.random() < 0.8
            with torch.set_grad_enabled(trains):
                self.ahead.append((batch, trains, self.cached.start(batch)))
        elif name == "receive":
            # now and then not in the order in which they began
            ahead = self.ahead if self.rng.random() < 0.8 else self.ahead[::-1]
            for _, _, step in ahead:
                self.receive(step)
        elif name == "prefetch":
            for _, _, step in self.ahead:
                if step.phase and self.own.random() < 0.6:
                    self.cached.prefetch(step)
        elif name == "take" and self.ahead:
            batch, trains, step = self.ahead.pop(0 if self.rng.random() < 0.7 else -1)
            self.receive(step)
            self.cached.routed_ahead.append(step)
            del step
            self.run(batch, trains=trains, keeps=self.rng.random() < 0.3)
        elif name == "drop" and self.ahead:
            _, _, step = self.ahead.pop(self.rng.randrange(len(self.ahead)))
            if self.rng.random() < 0.5:
                self.cached.drop(step)
            else:
                # nobody has it any more
                self.receive(step)
                del step
                gc.collect()

    def end(self) -> None:
        while self.kept:
            self.back(0)
        for _, _, step in self.ahead:
            self.cached.drop(step)
        self.ahead = []
        gc.collect()
        assert not any(store.residency.leases for store in self.cached.cached_stores())
        with self.cached.shards.whole():
            (weights, states), (expected, of_expected) = mixes.held(self.cached), mixes.held(self.whole)
        assert mixes.same_tensors(weights, expected) and mixes.same_tensors(states, of_expected)


CALLS = {"train": 3, "keep": 2, "evaluate": 2, "back": 3, "begin": 4, "receive": 3, "prefetch": 3, "take": 4, "drop": 1}


def histories(seeds: range, *, calls: int) -> list[tuple[list[tuple[int, bool]], list[str]]]:
    found = []
    for seed in seeds:
        history = History(seed, pooled=seed % 2 == 0)
        with watched(history.cached) as (looked_up, flags):
            for name in history.rng.choices(list(CALLS), list(CALLS.values()), k=calls):
                history.call(name)
        assert flags == [not fits for _, fits in looked_up] or history.cached._exchange.alone
        history.end()
        found.append((looked_up, history.errors))
    return found


def expect_one_answer(world: int, seeds: range, calls: int) -> None:
    of_ranks = run_ranks(world, _histories, seeds, calls)
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    fits = [fits for looked_up, _ in of_ranks[0] for _, fits in looked_up]
    errors = [error for _, of_history in of_ranks[0] for error in of_history]
    assert any("distinct rows" in error for error in errors)
    assert any("batches under way" in error for error in errors)
    assert world == 1 or 0.2 < sum(fits) / len(fits) < 0.95


def _histories(seeds: range, calls: int) -> Any:
    return histories(seeds, calls=calls)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_answer_alike_whatever_was_called_before(world: int) -> None:
    """And no call hangs, no row differs by a bit, and what does not fit raises on all ranks in its own step."""
    expect_one_answer(world, range(10, 14), 120)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_answer_alike_in_long_histories(world: int) -> None:
    expect_one_answer(world, range(20, 40), 200)
