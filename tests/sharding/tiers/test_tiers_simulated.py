"""Pipelines over caches: counters of tables that share a group are simulated, and one that is left holds nothing."""

from __future__ import annotations

import gc
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PrefetchTrainPipelineSparseDist,
    RowWiseAdagrad,
    Tier,
    apply_optimizer_in_backward,
    cache_metrics,
    tiered,
)
from shardwise.embeddings.tiers import CacheSetting
from shardwise.embeddings.tiers.simulate import Simulation

SAMPLES, STEPS = 12, 40


class Model(nn.Module):
    def __init__(self, rows: dict[str, int]) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(count, 4, name, feature_names=[name]) for name, count in rows.items()],
            device=torch.device("meta"),
        )
        apply_optimizer_in_backward(RowWiseAdagrad, self.tables.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        loss = self.tables(features).values().square().sum()
        return loss, loss.detach()


def batches_of(rows: dict[str, int], draw: random.Random) -> list[KeyedJaggedTensor]:
    """Bags of up to three ids by a power law whose head moves, some batches much larger than others."""
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    made = []
    for number in range(STEPS):
        most, parts, lengths = draw.choice((1, 2, 3)), [], []
        for count in rows.values():
            lengths.append(torch.randint(0, most + 1, (SAMPLES,), generator=generator))
            uniform = torch.rand(int(lengths[-1].sum()), generator=generator, dtype=torch.float64)
            parts.append((count * uniform**3 + number * count // 150).long() % count)
        made.append(KeyedJaggedTensor([*rows], torch.cat(parts), lengths=torch.cat(lengths)))
    return made


@pytest.mark.parametrize("seed", range(20))
def test_prefetches_that_stall_in_one_table_of_a_group_are_simulated_to_the_last_row(seed: int) -> None:
    """Tables were simulated one by one: those that a prefetch of another one held up had other victims."""
    draw = random.Random(seed)
    rows = {f"t{t}": draw.randrange(150, 400) for t in range(draw.randrange(2, 5))}
    ahead, prefetch = draw.choice((0, 3, 8)), draw.choice((2, 3, 5))
    policy = draw.choice(("aged_lfu", "lru", "lfu"))
    # a batch has up to 36 rows of a table, several are held at once
    slots = {name: draw.randrange(36, 42) for name in rows}
    most = {name: draw.choice((None, None, slots[name] + 3)) for name in rows}
    tiers = {name: Tier(slots[name], max_slots=most[name], policy=policy, half_life=9) for name in rows}
    model, batches = tiered(Model(rows), tiers, device="cpu"), batches_of(rows, draw)
    dense = torch.optim.SGD([torch.zeros(1)])
    pipeline: Any = PrefetchTrainPipelineSparseDist(model, dense, "cpu", ahead=ahead, prefetch=prefetch)
    coming = iter(batches)
    for _ in batches:
        pipeline.progress(coming)

    simulation = Simulation(*(
        CacheSetting(rows[name], slots[name], most[name], policy, 9, ahead, prefetch) for name in rows
    ))  # fmt: skip
    for batch in batches:
        simulation.add(*(torch.unique(batch[name].values()) for name in rows))
    simulation.finish()
    fields = ("wanted", "hits", "misses", "fresh", "saves", "slots", "grown", "stalls")
    ran = {name: [getattr(table, field) for field in fields] for name, table in cache_metrics(model).items()}
    said = {name: [getattr(table, f) for f in fields] for name, table in zip(rows, simulation.tables, strict=True)}
    assert ran == said
    assert sum(table.stalls for table in simulation.tables) > 0


def test_a_pipeline_that_is_left_holds_no_rows_and_is_expected_no_more() -> None:
    """The rows that it had prefetched kept their slots for ever, and the window waited for its batches: with every
    pipeline there were fewer slots, and more memory."""
    rows = {"t0": 300, "t1": 200}
    model = tiered(Model(rows), {name: Tier(120) for name in rows}, device="cpu")
    batches = batches_of(rows, random.Random(1))
    tables: Any = model.get_submodule("tables")
    (store,) = tables.cached_stores()
    for _ in range(3):
        pipeline: Any = PrefetchTrainPipelineSparseDist(
            model, torch.optim.SGD([torch.zeros(1)]), "cpu", ahead=8, prefetch=2
        )
        coming = iter(batches)
        for _ in range(5):
            pipeline.progress(coming)
        assert store.is_in_use() and int(store.residency.held.sum()) > 0
        assert pickle.loads(pickle.dumps(tables.shards)).tables is not None
        del pipeline
        gc.collect()
        assert not store.is_in_use() and int(store.residency.held.sum()) == 0
