"""Tables larger than the device on a GPU: cached steps, moves over the link and lookups from host memory, beside goals.

Goals were written down before any of this ran on a card: for an H100 whose host is at 55 GB/s each way. What others
take, as they published it on an H100: a step of 1.05 M ids, 434,000 rows of 128 columns by Adam, all rows of the run
cached, dynamicemb 12.3 and FBGEMM 14.4 ms; with slots for 0.8 of them 24.3 and 15.0; by SGD 10.9 and 4.1, 20.8 and 4.8;
over the link without a cache FBGEMM 24.1 and 13.6. Their tables have 10 x 27 M rows, these have what a host holds: a
step depends on the rows that a batch wants.

Letters as in the kernels: T tables, R rows, D dim, B samples, L ids a bag, N ids of a step.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PrefetchTrainPipelineSparseDist,
    Tier,
    apply_optimizer_in_backward,
    cache_metrics,
    tiered,
)
from shardwise.embeddings.tiers import HostRecords
from shardwise.kernels import move_rows
from shardwise.perf.gpu_scripts.gpu_sizes import Sizes
from shardwise.perf.suite.batches import lookup_bytes, make
from shardwise.perf.suite.timing import gb_per_s, spread, times_us

D = 128
LINK_BYTES_PER_MS = 45e6
RULES: dict[str, type[torch.optim.Optimizer]] = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}
# of a row and its states
RECORD_BYTES = {"Adam": 3 * 4 * D, "SGD": 4 * D}
# shares of the rows that the run touches which have slots; 0 is as few as a batch needs
ALL, SOME, NONE = 1.0, 0.8, 0.0
# under dense layers: with these, three batches held and a window of 8, some 97 % of the rows hit
HIDDEN_SLOTS = 0.99
# ms of a step by rule and share; with slots for some rows by Adam, misses that cross the link may be what it waits for
STEP_MS = {
    ("Adam", ALL): 4.0, ("Adam", SOME): 4.0, ("Adam", NONE): 15.0,
    ("SGD", ALL): 3.0, ("SGD", SOME): 4.5, ("SGD", NONE): 6.0,
}  # fmt: skip
# of a copy's bandwidth; of a step with all rows on the device, where so many rows hit; of a lookup over the link
GATHER_SHARE, STEP_RATIO, AT_HITS, LOOKUP_RATIO = 0.75, 1.05, 0.95, 1.5


@dataclass(frozen=True)
class Workload:
    """T tables of R rows, B bags of L ids of each; `pool` batches come again and again.

    Args:
        distinct: rows of a table that a batch wants.
        moved: rows of a call that moves them.
        hidden: width of the dense layers above the tables.
        repeats: steps that are timed.
    """

    tables: int
    rows: int
    batch: int
    length: int
    distinct: int
    pool: int
    moved: int
    hidden: int
    repeats: int


LARGE = Workload(10, 500_000, 6554, 16, 43_400, pool=4, moved=1 << 18, hidden=4096, repeats=12)
TINY = Workload(2, 60, 4, 3, 8, pool=3, moved=32, hidden=8, repeats=3)


class HostMemory:
    """Pinned host memory as an array that CUDA tensors can be made of."""

    def __init__(self, tensor: Tensor) -> None:
        kind = {torch.float32: "<f4", torch.float16: "<f2"}[tensor.dtype]
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "typestr": kind, "data": (tensor.data_ptr(), False), "version": 2,
        }  # fmt: skip


def pinned_table(device: str, sizes: Sizes) -> dict[str, Any]:
    """The lookup kernel reads a table that lies in pinned host memory."""
    dim, rows = sizes.dims[1], min(sizes.rows, 1 << 20)
    batch = make(device, [(rows, dim)], sizes.batch, sizes.length)
    if device == "cpu":
        return {"note": "no device memory here: the lookup read ordinary memory", "sum": float(batch.lookup().sum())}
    host = batch.weights.cpu().pin_memory()
    remote = replace(batch, weights=torch.as_tensor(HostMemory(host), device="cuda"))
    assert remote.weights.data_ptr() == host.data_ptr(), "torch copied the table"
    assert torch.equal(remote.lookup(), batch.lookup()), "differs from the table in device memory"
    moved = lookup_bytes(batch)
    times = {
        where: spread(times_us([b.lookup], device, sizes.repeats)) for where, b in (("host", remote), ("device", batch))
    }
    return {"bytes": int(moved), "us": times, "host_gb_per_s": gb_per_s(moved, times["host"]["median"])}


def tiers(device: str, sizes: Sizes) -> dict[str, Any]:
    """Each goal with what was measured; `failed` if outputs differ that depend on the number of slots alone."""
    work = TINY if sizes.small else LARGE
    batches = batches_of(work, device)
    touched = [
        torch.unique(torch.cat([batch[f"t{t}"].values() for batch in batches])).numel() for t in range(work.tables)
    ]
    goals: list[dict[str, Any]] = []
    failed: list[str] = []
    for rule in RULES:
        outputs = {}
        for share in (ALL, SOME, NONE):
            slots = [max(1, math.ceil(share * count)) for count in touched]
            goal, outputs[share] = cached_step(work, rule, share, slots, batches, device)
            goals.append(goal)
        failed += [
            f"{rule}: outputs with slots for {share} of the rows are not those with slots for all"
            for share in (SOME, NONE)
            if not torch.equal(outputs[share], outputs[ALL])
        ]
        goals.append({**resident_step(work, rule, batches, device), "goal": None, "met": None})
        # tables of gigabytes, which hooks hold in circles
        gc.collect()
    goals += [
        *moves(work, device),
        overlapped_step(work, [math.ceil(HIDDEN_SLOTS * count) for count in touched], batches, device),
        lookup_over_link(work, [math.ceil(SOME * count) for count in touched], batches, device),
    ]
    note = {"note": "no link here: times say nothing about the goals"} if device == "cpu" else {}
    return {"workload": vars(work), "touched": sum(touched), "goals": goals, "failed": failed, **note}


def batches_of(work: Workload, device: str) -> list[KeyedJaggedTensor]:
    """A pool of batches; ids R u^a, with the a that gives about so many distinct rows of a table."""
    count, generator = work.batch * work.length, torch.Generator().manual_seed(0)
    low, high = 1.0, 64.0
    for _ in range(24):
        a = (low + high) / 2
        drawn = torch.unique((work.rows * torch.rand(count, generator=generator) ** a).long()).numel()
        low, high = (a, high) if drawn > work.distinct else (low, a)
    a = (low + high) / 2
    lengths = torch.full((work.tables * work.batch,), work.length, device=device)
    keys = [f"t{t}" for t in range(work.tables)]
    draws = [torch.rand(work.tables * count, generator=generator) for _ in range(work.pool)]
    # a float of 1 - 2^-25 times the rows may be all of them
    ids = [(work.rows * draw**a).long().clamp(max=work.rows - 1) for draw in draws]
    return [KeyedJaggedTensor(keys, values.to(device), lengths=lengths) for values in ids]


def tables_of(work: Workload, rule: str, device: str, slots: Sequence[int] | None) -> nn.Module:
    """A collection of the tables, with so many slots each; None is all rows on the device."""
    torch.manual_seed(0)
    configs = [EmbeddingBagConfig(work.rows, D, f"t{t}", feature_names=[f"t{t}"]) for t in range(work.tables)]
    # rows of meta tables are made when they are first wanted
    ebc = EmbeddingBagCollection(configs, device=_place(device) if slots is None else torch.device("meta"))
    apply_optimizer_in_backward(RULES[rule], ebc.parameters(), {"lr": 0.01})
    if slots is None:
        return ebc
    return tiered(ebc, {f"t{t}": Tier(count, max_slots=1.0) for t, count in enumerate(slots)}, device=_place(device))


def cached_step(
    work: Workload, rule: str, share: float, slots: Sequence[int], batches: Sequence[KeyedJaggedTensor], device: str
) -> tuple[dict[str, Any], Tensor]:
    """A plain loop's step, forward, backward and update, once all rows were wanted; and the output of its last."""
    model = tables_of(work, rule, device, slots)
    step, twice = steps_of(model, batches), 2 * len(batches)
    for call in islice(cycle(step), twice):
        call()
    before = cache_metrics(model)
    ms = spread([us / 1e3 for us in times_us(step, device, work.repeats)])
    steps, moved = work.repeats + len(batches), cache_metrics(model, since=before).values()
    loads = sum(table.loads for table in moved) / steps
    goal = STEP_MS[rule, share]
    if (rule, share) == ("Adam", SOME):
        goal = max(goal, loads * RECORD_BYTES[rule] / LINK_BYTES_PER_MS)
    name = f"{rule}, cached step, slots for {f'{share:g} of the rows' if share else 'a batch'}"
    measured = {"wanted": sum(table.wanted for table in moved) / steps, "loads": loads, "spread_ms": ms}
    return {**_goal(name, "ms", ms["median"], goal), **measured}, step[0]()


def resident_step(work: Workload, rule: str, batches: Sequence[KeyedJaggedTensor], device: str) -> dict[str, Any]:
    """The same step with all rows on the device."""
    step = steps_of(tables_of(work, rule, device, None), batches)
    ms = spread([us / 1e3 for us in times_us(step, device, work.repeats)])
    return {"name": f"{rule}, step, all rows on the device", "unit": "ms", "measured": ms["median"], "spread_ms": ms}


def steps_of(model: nn.Module, batches: Sequence[KeyedJaggedTensor]) -> list[Callable[[], Tensor]]:
    """A training step for each batch, which gives its output."""

    def step(batch: KeyedJaggedTensor) -> Tensor:
        values: Tensor = model(batch).values()
        torch.autograd.backward(values, torch.ones_like(values))
        return values.detach()

    return [partial(step, batch) for batch in batches]


def moves(work: Workload, device: str) -> list[dict[str, Any]]:
    """Rows gathered from pinned records into slots, and saved there, beside copies of as many bytes in one piece."""
    goals = []
    for rule, nbytes in RECORD_BYTES.items():
        # pinned as long as it lives
        below = HostRecords(4 * work.moved, nbytes, pinned=device == "cuda")
        records = below.records
        parts = [torch.zeros(work.moved, D, device=device) for _ in range(nbytes // (4 * D))]
        slots = torch.arange(work.moved, device=device)
        rows = [torch.randperm(4 * work.moved, device=device)[: work.moved] for _ in range(3)]
        none = torch.full_like(slots, -1)
        beside = torch.zeros(work.moved * nbytes, dtype=torch.uint8, device=device)
        host = records.view(-1)[: beside.numel()]
        calls: dict[str, tuple[list[Callable[[], object]], Callable[[], object]]] = {
            "gathered": (
                [partial(move_rows, parts, records, slots, none, at) for at in rows],
                partial(beside.copy_, host, non_blocking=True),
            ),
            "saved": (
                [partial(move_rows, parts, records, slots, at, none) for at in rows],
                partial(host.copy_, beside, non_blocking=True),
            ),
        }
        for what, (move, copy) in calls.items():
            rows_us, copy_us = (spread(times_us(c, device, work.repeats))["median"] for c in (move, [copy]))
            gb = {"gb_per_s": gb_per_s(beside.numel(), rows_us), "copy_gb_per_s": gb_per_s(beside.numel(), copy_us)}
            name = f"{rule}, records of {nbytes} bytes {what}, of a copy's bandwidth"
            goals.append({**_goal(name, "", copy_us / rows_us, GATHER_SHARE, least=True), **gb})
    return goals


class Model(nn.Module):
    """The tables below dense layers, whose work hides moves of rows."""

    def __init__(self, ebc: nn.Module, work: Workload, device: torch.device) -> None:
        super().__init__()
        self.ebc = ebc
        widths = [work.tables * D, work.hidden, work.hidden, 1]
        layers = [nn.Linear(a, b, device=device) for a, b in zip(widths, widths[1:], strict=False)]
        self.over = nn.Sequential(*layers)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        loss = self.over(self.ebc(features).values()).square().mean()
        return loss, loss.detach()


def overlapped_step(
    work: Workload, slots: Sequence[int], batches: Sequence[KeyedJaggedTensor], device: str
) -> dict[str, Any]:
    """A step under dense layers, rows of two batches prefetched, over the same with all rows on the device."""
    ms, hits = {}, 1.0
    for what, count in (("cached", slots), ("resident", None)):
        model = Model(tables_of(work, "Adam", device, count), work, _place(device))
        dense = torch.optim.SGD(model.over.parameters(), lr=1e-3)
        pipeline: PrefetchTrainPipelineSparseDist[KeyedJaggedTensor, Tensor] = PrefetchTrainPipelineSparseDist(
            model, dense, _place(device), ahead=8, prefetch=2
        )
        endless = cycle(batches)
        for _ in range(3 * len(batches)):
            pipeline.progress(endless)
        before = cache_metrics(model)
        ms[what] = spread([us / 1e3 for us in times_us([partial(pipeline.progress, endless)], device, work.repeats)])
        if count is not None:
            moved = cache_metrics(model, since=before).values()
            hits = sum(table.hits for table in moved) / max(1, sum(table.wanted for table in moved))
    ratio = ms["cached"]["median"] / ms["resident"]["median"]
    name = "step with prefetch=2 over one with all rows on the device"
    said = {} if hits >= AT_HITS else {"met": None, "note": f"the goal is for {AT_HITS:.0%} of hits"}
    return {**_goal(name, "", ratio, STEP_RATIO), "hit_rate": hits, "spread_ms": ms, **said}


def lookup_over_link(
    work: Workload, slots: Sequence[int], batches: Sequence[KeyedJaggedTensor], device: str
) -> dict[str, Any]:
    """A lookup that reads a table in pinned host memory, over one of cached rows, both without a gradient."""
    model = tables_of(work, "SGD", device, slots)
    plain = make(device, [(work.rows, D)] * work.tables, work.batch, work.length)
    if device == "cuda":
        plain = replace(plain, weights=torch.as_tensor(HostMemory(plain.weights.cpu().pin_memory()), device="cuda"))
    reads = [replace(plain, indices=batch.values(), offsets=batch.offsets()).lookup for batch in batches]
    with torch.no_grad():
        lookups = [partial(model, batch) for batch in batches]
        for lookup in lookups:
            lookup()
        ms = {
            what: spread([us / 1e3 for us in times_us(calls, device, work.repeats)])
            for what, calls in (("over the link", reads), ("cached", lookups))
        }
    ratio = ms["over the link"]["median"] / ms["cached"]["median"]
    return {**_goal("lookup over the link over a cached one", "", ratio, LOOKUP_RATIO, least=True), "spread_ms": ms}


def _place(device: str) -> torch.device:
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def _goal(name: str, unit: str, measured: float, goal: float, *, least: bool = False) -> dict[str, Any]:
    """A goal that is the most, or the least, that should be measured."""
    met = measured >= goal if least else measured <= goal
    bound = {"at": "least" if least else "most", "goal": round(goal, 3), "met": met}
    return {"name": name, "unit": unit, "measured": round(measured, 3), **bound}
