"""The counters of tables that train behind caches, against those of the simulation of a trace of the same batches."""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.data import Trace, TracedTable, TraceWriter
from shardwise.embeddings import LookupFeature, OptimizerSpec, TableGroup, TableShape
from shardwise.embeddings.tiers import (
    CachedRows,
    CacheSetting,
    CacheSpec,
    HostRecords,
    policy_named,
    record_bytes,
    simulate,
)

ROWS, DIMS, SLOTS, SAMPLES = (400, 150), (8, 4), (90, 60), 12
RULE = "rowwise_adagrad"


def batches(seed: int, count: int = 40) -> list[tuple[Tensor, Tensor]]:
    """Ids and offsets of two features of two and one id a sample, drawn by a power law whose head moves."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        parts = []
        for rows, per_sample in zip(ROWS, (2, 1), strict=True):
            uniform = torch.rand(SAMPLES * per_sample, generator=generator, dtype=torch.float64)
            parts.append((rows * uniform**3 + number * rows // 200).long() % rows)
        lengths = torch.cat([torch.full((SAMPLES,), 2), torch.full((SAMPLES,), 1)])
        made.append((torch.cat(parts), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])))
    return made


def group_behind(store: CachedRows) -> TableGroup:
    shapes = [TableShape(f"t{t}", ROWS[t], DIMS[t], SLOTS[t]) for t in range(2)]
    features = [LookupFeature(f"f{t}", t) for t in range(2)]
    spec = OptimizerSpec(RULE, 0.1)
    group = TableGroup(shapes, features, dtype=torch.float32, device=torch.device("cpu"), optimizer=spec, store=store)
    store.attach(group)
    for t in range(2):
        states = store.initial_states(t)
        for begin, end in store.chunks(t):
            rows = torch.ones(end - begin, DIMS[t])
            store.write(t, begin, [rows, *(state.expand(end - begin, *state.shape[1:]) for state in states)])
    return group


def written(path: Path, given: list[tuple[Tensor, Tensor]]) -> Trace:
    with TraceWriter(path, [TracedTable(f"t{t}", ROWS[t], DIMS[t]) for t in range(2)]) as writer:
        for ids, offsets in given:
            first = int(offsets[SAMPLES])
            writer.add(SAMPLES, {"t0": ids[:first], "t1": ids[first:]})
    return Trace(path)


def simulated(path: Path, given: list[tuple[Tensor, Tensor]], setting: dict[str, Any]) -> list[tuple[int, ...]]:
    trace = written(path, given)
    found = []
    for t in range(2):
        done = simulate((batch.rows[f"t{t}"] for batch in trace), CacheSetting(ROWS[t], SLOTS[t], **setting))
        found.append((done.wanted, done.hits, done.misses, done.saves, len(done.by_batch)))
    return found


def counted(store: CachedRows) -> list[tuple[int, ...]]:
    return [(c.wanted, c.hits, c.misses, c.saves, c.batches) for c in store.counts]


def cached(policy: str) -> CachedRows:
    specs = [CacheSpec(slots, slots, partial(HostRecords, pinned=False)) for slots in SLOTS]
    return CachedRows(specs, policy_named(policy))


@pytest.mark.parametrize("policy", ["aged_lfu", "lru", "lfu"])
@pytest.mark.parametrize("seed", range(4))
def test_a_training_loop_hits_misses_and_saves_what_the_simulation_says(policy: str, seed: int, tmp_path: Path) -> None:
    store, given = cached(policy), batches(seed)
    group = group_behind(store)
    for ids, offsets in given:
        group.pooled(ids, offsets).sum().backward()
    assert counted(store) == simulated(tmp_path / "trace.npz", given, {"policy": policy})
    for t, counts in enumerate(store.counts):
        assert counts.record_bytes == record_bytes(DIMS[t], torch.float32, RULE)


@pytest.mark.parametrize("policy", ["aged_lfu", "lru"])
@pytest.mark.parametrize(("ahead", "prefetch"), [(0, 1), (0, 2), (1, 0), (8, 0), (8, 2), (100, 1)])
@pytest.mark.parametrize("seed", [7, 8])
def test_batches_known_ahead_and_fetched_ahead_hit_what_the_simulation_says(
    policy: str, ahead: int, prefetch: int, seed: int, tmp_path: Path
) -> None:
    store, given = cached(policy), batches(seed)
    group = group_behind(store)
    announced: deque[Any] = deque()
    held: deque[Any] = deque()
    coming = iter(given)
    for ids, offsets in given:
        while ahead and len(announced) <= ahead and (later := next(coming, None)) is not None:
            announced.append(store.announce(*later))
        while len(held) > prefetch:
            store.release(held.popleft())
        _, lease = store.resolve(ids, offsets, group.step, announced.popleft() if ahead else None)
        store.ready(lease)
        held.append(lease)
        if not prefetch:
            store.release(held.popleft())
    setting = {"policy": policy, "ahead": ahead, "prefetch": prefetch}
    assert counted(store) == simulated(tmp_path / "trace.npz", given, setting)
