"""Pipelines over tables of which some rows lie below the device: the bits of tables that lie there whole.

Takes 40 s: some fifteen pipelines over ranks, each beside a plain loop over whole tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from model_zoo import (
    ROWS,
    Batch,
    bag_tables,
    batch_of,
    dense_optimizer,
    drain,
    fused,
    plain_loop,
    same,
    sharded,
    state_of,
    stores_of,
)
from pipeline_runs import CPU
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingPlan,
    construct_module_sharding_plan,
)
from shardwise.embeddings.tiers import CachedRows, CacheSetting, TraceCurves, simulate
from shardwise.planner.layout import Tier
from shardwise.sharding import row_wise, table_wise
from shardwise.sharding.engine.collection import ShardedCollection
from shardwise.sharding.engine.step import LOOKED_UP
from shardwise.sharding.pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:table .* is replicated")]
STEPS = 12


def tier_of(slots: str, folder: str | None) -> Tier:
    """Rows in memory, or in files of a folder; "grown" slots become as many as a step needs."""
    sizes: dict[str, tuple[float, float]] = {"just enough": (1.0, 1.0), "grown": (0.1, 1.0), "all": (1.0, 1.0)}
    first, most = sizes[slots]
    return Tier(first, "ram" if folder is None else "file", folder, max_slots=most)


def watch_slots(model: Any) -> Callable[[], list[list[int]]]:
    """What says how many slots of each table were held at a time, at most."""
    most = [[1] * len(store.specs) for store in stores_of(model)]

    def watched(store: CachedRows, own: list[int]) -> None:
        hold = store.residency._hold

        def holding(*args: Any) -> Any:
            lease = hold(*args)
            for t, span in enumerate(store.residency.tables):
                held = store.residency.held[span.first_slot : span.first_slot + span.slots]
                own[t] = max(own[t], int((held > 0).sum()))
            return lease

        store.residency._hold = holding  # type: ignore[method-assign]

    for store, own in zip(stores_of(model), most, strict=True):
        watched(store, own)
    return lambda: most


def tighten(model: Any, slots: list[list[int]]) -> None:
    """Give tables these numbers of slots and no more."""
    for store, own in zip(stores_of(model), slots, strict=True):
        group = store.group
        assert group is not None
        store.specs = [
            replace(spec, slots=count, max_slots=count) for spec, count in zip(store.specs, own, strict=True)
        ]
        shapes = [replace(shape, slots=count) for shape, count in zip(group.tables, own, strict=True)]
        group.lay_out_anew(shapes)
        # nothing was looked up: all rows lie below
        rows = store.residency.slot_of.clone()
        store.residency = type(store.residency)(store._spans(), store.policy, group.device)
        store.residency.slot_of.copy_(rows)


def pipeline_over(model: Any, kind: str, **settings: Any) -> Callable[[Iterator[Any]], Any]:
    """What makes a step of a pipeline, or of a plain loop."""
    if kind == "plain":
        return lambda batches: plain_loop(model, iter([_next(batches)]))[0]
    maker = {"sparse_dist": TrainPipelineSparseDist, "prefetch": PrefetchTrainPipelineSparseDist}[kind]
    return maker(model, dense_optimizer(model), CPU, **settings).progress


def _next(batches: Iterator[Batch]) -> Batch:
    with suppress(StopIteration):
        return next(batches)
    raise StopIteration


RUNS: list[tuple[str, int, int, str, str]] = [
    # pipeline, ahead, prefetch, slots, below
    ("sparse_dist", 0, 0, "grown", "file"),
    ("prefetch", 0, 1, "just enough", "ram"),
    ("prefetch", 0, 4, "just enough", "file"),
    ("prefetch", 8, 1, "just enough", "file"),
    ("prefetch", 8, 4, "grown", "file"),
    ("prefetch", 64, 1, "grown", "ram"),
    ("prefetch", 64, 4, "just enough", "file"),
    ("prefetch", 64, 0, "all", "file"),
]


def different(parts: str, runs: list[tuple[str, int, int, str, str]], folder: str) -> list[Any]:
    """The runs that differ from a plain loop over whole tables in a bit, and what moved in the others."""
    whole = sharded(parts)
    expected = plain_loop(whole, map(batch_of, range(STEPS)))
    state = state_of(whole)
    counter = sharded(parts, tier=tier_of("all", None))
    held = watch_slots(counter)
    plain_loop(counter, map(batch_of, range(STEPS)))
    found: list[Any] = []
    for run in runs:
        kind, ahead, prefetch, slots, below = run
        model = sharded(parts, tier=tier_of(slots, folder if below == "file" else None))
        if slots == "just enough":
            tighten(model, held())
        settings = {"ahead": ahead, "prefetch": prefetch} if kind == "prefetch" else {}
        outputs = drain(pipeline_over(model, kind, **settings), map(batch_of, range(STEPS)))
        found += [(run, "outputs")] * (not same(expected, outputs))
        now = state_of(model)
        found += [(run, key) for key, value in state.items() if not torch.equal(value, now[key])]
        assert now.keys() == state.keys()
        found += [(run, "leases")] * any(store.residency.leases for store in stores_of(model))
        assert slots != "just enough" or sum(c.saves for store in stores_of(model) for c in store.counts) > 0
    return found


@pytest.mark.parametrize(("parts", "world"), [("ps", 1), ("ps", 2), ("w", 2)])
def test_pipelines_over_tiers_have_the_bits_of_a_plain_loop_over_whole_tables(
    parts: str, world: int, tmp_path: Path
) -> None:
    runs = RUNS if parts == "ps" else RUNS[-3:]
    assert run_ranks(world, different, parts, runs, str(tmp_path)) == [[]] * world


def moved(ahead: int, prefetch: int, slots: int, policy: str) -> tuple[Any, Any, Any]:
    """Counts of a pipeline over one table, of the simulation of its batches, and hits by Belady's rule."""
    tables = fused(EmbeddingBagCollection(bag_tables({"f0": ROWS})), RowWiseAdagrad)
    plan = construct_module_sharding_plan(
        tables, {"tf0": table_wise(rank=0)}, local_size=1, world_size=1, device_type="cpu"
    )
    plan["tf0"].tier = Tier(slots, policy=policy)
    model: Any = DistributedModelParallel(OneTable(tables), plan=ShardingPlan({"pooled": plan}))
    batches = [batch_of(n).pooled.permute([0]) for n in range(60)]
    wants = [kjt.values().unique() for kjt in batches]
    pipeline = PrefetchTrainPipelineSparseDist(
        model, torch.optim.SGD([torch.zeros(1)]), CPU, ahead=ahead, prefetch=prefetch
    )
    drain(pipeline.progress, iter(batches))
    (store,) = stores_of(model)
    (counts,) = store.counts
    found = simulate(wants, CacheSetting(ROWS, slots, policy=policy, ahead=ahead, prefetch=prefetch))
    curves = TraceCurves(ROWS)
    for rows in wants:
        curves.add(rows)
    return (
        (counts.wanted, counts.hits, counts.saves, counts.stalls),
        (found.wanted, found.hits, found.saves, found.stalls),
        int(curves.belady([slots]).hits),
    )


class OneTable(nn.Module):
    """Pooled tables and nothing else."""

    def __init__(self, pooled: EmbeddingBagCollection) -> None:
        super().__init__()
        self.pooled = pooled

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out = self.pooled(features).values()
        return out.square().sum(), out


@pytest.mark.parametrize(
    ("ahead", "prefetch", "slots"), [(0, 1, 18), (8, 0, 18), (8, 4, 18), (8, 1, 30), (64, 0, 18), (64, 2, 18)]
)
def test_what_moves_is_what_the_simulation_says(ahead: int, prefetch: int, slots: int) -> None:
    """And hits are Belady's where the window covers all batches and none holds slots of another's."""
    ((found, simulated, belady),) = run_ranks(1, moved, ahead, prefetch, slots, "aged_lfu")
    assert found == simulated
    if (ahead, prefetch) == (64, 0):
        assert found[1] == belady
    else:
        assert found[1] < belady


def fitting(kind: str, settings: dict[str, int]) -> list[bool]:
    """Of each batch of a pipeline whether ranks knew that it fits; three have room beside each other, not more."""
    tables = fused(EmbeddingBagCollection(bag_tables({"f0": 2000, "f1": 4000})), RowWiseAdagrad)
    cuts = {"tf0": table_wise(rank=0), "tf1": row_wise()}
    plan = construct_module_sharding_plan(tables, cuts, local_size=2, world_size=2, device_type="cpu")
    for each in plan.values():
        each.tier = Tier(0.2)
    model: Any = DistributedModelParallel(OneTable(tables), plan=ShardingPlan({"pooled": plan}))
    rank, batches, found = dist.get_rank(), list[KeyedJaggedTensor](), list[bool]()
    for n in range(24):
        ids = (torch.arange(40) * 50 + 2 * n + rank) % 2000
        batches.append(KeyedJaggedTensor(["f0", "f1"], torch.cat([ids, 2 * ids]), lengths=torch.full((20,), 4)))
    look_up = ShardedCollection.look_up

    def watched(self: Any, step: Any, **more: Any) -> None:
        found.extend([step.fits] * (step.phase < LOOKED_UP))
        look_up(self, step, **more)

    with patch.object(ShardedCollection, "look_up", watched):
        if kind == "plain":
            for batch in batches:
                model(batch)[0].backward()
            return found
        made: Any = {"sparse_dist": TrainPipelineSparseDist, "prefetch": PrefetchTrainPipelineSparseDist}[kind]
        drain(made(model, torch.optim.SGD([torch.zeros(1)]), CPU, **settings).progress, iter(batches))
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("plain", {}), ("sparse_dist", {}), ("prefetch", {}), ("prefetch", {"ahead": 8, "prefetch": 2})],
)
def test_ranks_know_that_each_batch_of_a_pipeline_fits(kind: str, settings: dict[str, int]) -> None:
    """However many are known ahead: those that are looked up next need room beside each other.

    But the last of many: as no batch begins any more, ranks tell each other of no room that there is by then.
    """
    last = settings.get("ahead", 0)
    for found in run_ranks(2, fitting, kind, settings):
        assert len(found) == 24 and all(found[: 24 - last - 1]) and found[-1] is (not last)
