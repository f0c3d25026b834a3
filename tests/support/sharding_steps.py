"""Steps of one rank: some that began elsewhere, against those of one process; and some without process groups.

And what the tests of tiers share: mixes with a tier, tables in small chunks, what two sharded collections hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from sharding_mixes import (
    Mix,
    Run,
    address,
    batch_of,
    batches_of_rank,
    held,
    rows_of_rank,
    same_tensors,
    span_of,
    train,
)
from torch import Tensor

from shardwise import KeyedJaggedTensor
from shardwise.embeddings.tiers import cached_rows
from shardwise.planner.layout import Tier
from shardwise.sharding.engine import reshard
from shardwise.sharding.engine.route import Division, Sending, route
from shardwise.sharding.engine.routes import Routes
from shardwise.sharding.engine.step import Step
from shardwise.sharding.engine.wire import Receiving, pack_ids, pack_sizes, unpack_ids, unpack_sizes


def train_on(mix: Mix, model: Any, steps: Iterable[int]) -> list[list[Tensor]]:
    """This rank's outputs of these steps; its upstream gradients are its rows of those of one process, times ranks."""
    return train(mix, model, batches_of_rank(mix, steps), False).outputs


def expect_outputs(mix: Mix, run: Run, ranks: Sequence[Sequence[Sequence[Tensor]]], steps: Iterable[int]) -> None:
    """The outputs of all ranks are their rows of those of one process, bit for bit."""
    for rank, outputs in enumerate(ranks):
        begin, end = span_of(mix, rank, len(ranks))
        for step, found in zip(steps, outputs, strict=True):
            wanted = rows_of_rank(mix, batch_of(mix, step), run.outputs[step], begin, end)
            assert all(map(torch.equal, found, wanted)), f"rank {rank}, step {step}"


def expect_held(run: Run, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None:
    """What a rank holds is its part of what one process has, bit for bit."""
    for key, value in weights.items():
        table, rows, cols = address(key)
        assert torch.equal(value, run.weights[table][rows, cols]), key
    for key, value in states.items():
        where, state = key.split("/")
        table, rows, cols = address(where)
        if rows.start == rows.stop:
            # nobody asks for a shard without rows, so it may count no steps
            continue
        whole = run.states[f"{table}/{state}"]
        part = whole if state == "step" else whole[rows]
        if value.numel():
            assert torch.equal(value, part[:, cols] if part.dim() == 2 else part), key


def local_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Each value's live part on this rank: of a cut one its rows, several column blocks side by side, or none [0]."""
    return {name: local_part(value) for name, value in state.items()}


def local_part(value: Any) -> Tensor:
    """One value of `local_tensors`."""
    if hasattr(value, "local_shards"):
        shards = [shard.tensor for shard in value.local_shards()]
        return torch.cat(shards, dim=shards[0].dim() - 1) if len(shards) > 1 else (*shards, torch.empty(0))[0]
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local


def routed_step(
    kjt: KeyedJaggedTensor,
    routes: Routes,
    sending: Sending,
    weights: Tensor | None = None,
    *,
    lenient: bool = False,
    divided: Division | None = None,
) -> Step:
    """A step whose ids are lined up and whose sizes are known."""
    nobody: Any = None
    step = Step(True, nobody)
    step.routed, step.sending = kjt, sending
    route(step, routes, weights, lenient=lenient, divided=divided)
    pack_sizes(step)
    return step


def blocks_of(step: Step) -> list[Tensor]:
    """What goes to each rank."""
    data, sizes = pack_ids(step)
    return list(torch.split(data, sizes))


def handed_over(steps: Sequence[Step], receiving: Receiving, rank: int, blocks: Sequence[Tensor] | None = None) -> Step:
    """What `rank` gets of the steps of all ranks; `blocks` from each, if they were made before."""
    step = Step(True, receiving)
    sizes = [pack_sizes(one)[rank] for one in steps]
    groups = max(len(of_rank) for of_rank in sizes)
    unpack_sizes(step, [[*of_rank, *[0] * (groups - len(of_rank))] for of_rank in sizes])
    blocks = [blocks_of(one)[rank] for one in steps] if blocks is None else blocks
    # what is expected is what was sent
    assert [block.shape[0] for block in blocks] == step.id_sizes
    assert all(block.dtype == torch.int32 for block in blocks)
    own = steps[rank]
    step.sent_ids, step.sent_lengths, step.sent_weights = own.sent_ids, own.sent_lengths, own.sent_weights
    unpack_ids(step, torch.cat(list(blocks)))
    return step


def with_tier(mix: Mix, tier: Tier | None) -> Mix:
    """The same tables with a tier, or without."""
    tables = tuple(replace(table, options=replace(table.options, tier=tier)) for table in mix.tables)
    return replace(mix, tables=tables)


def with_strategy(mix: Mix, strategy: str) -> Mix:
    """The same tables cut otherwise."""
    return replace(mix, tables=tuple(replace(table, strategy=strategy) for table in mix.tables))


@contextmanager
def small_chunks() -> Iterator[None]:
    """A block in which tables of some rows have several chunks."""
    with patch.object(cached_rows, "_CHUNK_BYTES", 64 * 5), patch.object(reshard, "_CHUNK_BYTES", 64 * 5):
        yield


def held_of(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`mixes.held` of a collection whose tables may have tiers."""
    with model.shards.whole():
        return held(model)


def expect_equal(one: Any, other: Any) -> None:
    """Two sharded collections hold the same numbers, in whatever tier."""
    for mine, theirs in zip(held_of(one), held_of(other), strict=True):
        assert same_tensors(mine, theirs)


def misses(model: Any) -> int:
    """Rows that came to slots of this rank."""
    return sum(counts.misses for store in model._tables.stores() for counts in store.counts)
