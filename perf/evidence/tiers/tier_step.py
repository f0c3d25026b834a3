"""A training step of a table behind a cache over one that lies in memory whole, by the share of rows that hit.

A table of R rows and D columns, fp32, row-wise Adagrad; batches of B samples with L ids each, by Zipf's law over rows
in random order, from a pool that comes again and again. Slots are chosen so that 100, 90 and 55 % of the distinct rows
of a batch hit. Records lie in memory, nothing overlaps, one thread; CPU time of that thread, as other jobs share the
machine. Steps of all tables take turns; a ratio is of medians, its spread the quartiles over turns. `--write` keeps the
numbers in perf/results/cpu/tier_step.json. A ratio above its bound is not as it has to be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import date
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from shardwise._version import __version__
from shardwise.embeddings import LookupFeature, OptimizerSpec, TableGroup, TableShape
from shardwise.embeddings.tiers import CachedRows, CacheSpec, HostRecords, policy_named
from shardwise.embeddings.tiers.residency import Residency, Span
from shardwise.perf.evidence.report import ROOT, Report
from shardwise.perf.suite.options import Options
from shardwise.perf.suite.timing import spread

RESULT = ROOT / "perf/results/cpu/tier_step.json"
R, D, B, L, EXPONENT, POOL = 1_000_000, 128, 2048, 20, 1.05, 24
# share of rows that hit -> what a step may take, of one with all rows in memory
BOUNDS = {1.0: 1.15, 0.9: 1.5, 0.55: 2.5}
# steps of a turn, and those before them that are left out: the turn of another table took the caches
STEPS, SKIPPED = 6, 2
POLICY = "aged_lfu"
CPU = torch.device("cpu")


def pool(generator: torch.Generator) -> list[Tensor]:
    """Ids [B * L] of some batches."""
    shares = torch.arange(1, R + 1, dtype=torch.float64).pow(-EXPONENT).cumsum(0)
    rows = torch.randperm(R, generator=generator)
    uniform = torch.rand(POOL, B * L, generator=generator, dtype=torch.float64) * shares[-1]
    return [rows[places.clamp(max=R - 1)] for places in torch.searchsorted(shares, uniform)]


def steady_hits(distinct: list[Tensor], slots: int) -> float:
    """The share of rows that hit once the pool has come twice."""
    residency = Residency([Span("t", 0, R, 0, slots)], policy_named(POLICY))
    hits = wanted = 0
    for turn in range(4):
        for rows in distinct:
            lease = residency.want(rows)
            residency.release(lease, changed=True)
            if turn >= 2:
                hits, wanted = hits + int(lease.counts[0, 0]), wanted + rows.shape[0]
    return hits / wanted


def slots_for(distinct: list[Tensor], share: float) -> int:
    """The fewest slots with this share of hits, to a hundredth of them."""
    if share == 1.0:
        return R
    low, high = max(rows.shape[0] for rows in distinct), int(torch.unique(torch.cat(distinct)).shape[0])
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if steady_hits(distinct, middle) >= share else (middle, high)
    return high


def table(slots: int | None) -> TableGroup:
    """The table, with so many rows on the device; None is all, without a cache."""
    spec, lookups = OptimizerSpec("rowwise_adagrad", lr=0.01), [LookupFeature("f", 0)]
    store = None if slots is None else CachedRows([CacheSpec(slots, slots, HostRecords)], policy_named(POLICY))
    group = TableGroup(
        [TableShape("t", R, D, slots=slots)], lookups, dtype=torch.float32, device=CPU, optimizer=spec, store=store
    )
    if store is None:
        group.flat.fill_(0.01)
        return group
    store.attach(group)
    for begin, end in store.chunks(0):
        store.write(0, begin, [torch.full((end - begin, D), 0.01), torch.zeros(end - begin)])
    return group


def measured(turns: int) -> dict[str, Any]:
    """Times of all tables in turn, and what comes of them."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ids, offsets, grad = pool(generator), torch.arange(0, B * L + 1, L), torch.randn(B, D, generator=generator)
    distinct = [torch.unique(batch) for batch in ids]
    slots = {share: slots_for(distinct, share) for share in BOUNDS}
    # 0 is the table without a cache
    groups = {0.0: table(None), **{share: table(count) for share, count in slots.items()}}
    batches = {share: cycle(ids) for share in groups}
    times: dict[float, list[list[float]]] = {share: [] for share in groups}
    counts = {share: group.store.counts[0] for share, group in groups.items() if isinstance(group.store, CachedRows)}
    for share, group in groups.items():
        for _ in range(2 * POOL):
            torch.autograd.backward(group.pooled(next(batches[share]), offsets), grad)
    before = {share: (count.hits, count.wanted) for share, count in counts.items()}
    for _ in range(turns):
        for share, group in groups.items():
            taken = []
            for _ in range(STEPS + SKIPPED):
                batch, begin = next(batches[share]), time.thread_time()
                torch.autograd.backward(group.pooled(batch, offsets), grad)
                taken.append(1e3 * (time.thread_time() - begin))
            times[share].append(taken[SKIPPED:])
    whole = [statistics.median(turn) for turn in times[0.0]]
    ms = {share: spread([t for turn in of_turns for t in turn]) for share, of_turns in times.items()}
    cached = []
    for share, bound in BOUNDS.items():
        ratios = [statistics.median(turn) / base for turn, base in zip(times[share], whole, strict=True)]
        hits, wanted = counts[share].hits - before[share][0], counts[share].wanted - before[share][1]
        cached.append({
            "slots": slots[share], "hit_rate": round(hits / wanted, 4), "ms": ms[share],
            "ratio": round(ms[share]["median"] / ms[0.0]["median"], 3),
            "ratio_quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)], "bound": bound,
        })  # fmt: skip
    return {
        "versions": (
            f"shardwise {__version__}, torch {torch.__version__}, Python {platform.python_version()},"
            f" {os.cpu_count()} CPUs, load {os.getloadavg()[1]:.1f}, {date.today()}"
        ),
        "shape": {"R": R, "D": D, "B": B, "L": L, "exponent": EXPONENT, "pool": POOL, "policy": POLICY},
        "distinct": round(statistics.mean(rows.shape[0] for rows in distinct)),
        "turns": turns,
        "whole_ms": ms[0.0],
        "cached": cached,
    }


OPTIONS: Options = {"--turns": {"type": int, "default": 25}}


def run(options: argparse.Namespace) -> Report:
    """Measure, print, and keep what was measured if asked to."""
    result = measured(options.turns)
    text = json.dumps(result, indent=1) + "\n"
    if options.write:
        RESULT.write_text(text, encoding="utf-8")
    return Report(text, all(one["ratio"] <= one["bound"] for one in result["cached"]))
