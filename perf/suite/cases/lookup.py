"""Cases of the suite: lookups of rows, pooled and in sequence, and the checks of ids before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import check_ids, new_guard, sequence_lookup
from shardwise.kernels.lookup.bounds import OK
from shardwise.kernels.lookup.pooled import pooled_lookup_ref
from shardwise.kernels.lookup.sequence import sequence_lookup_ref
from shardwise.perf.suite.batches import (
    Batch,
    first_samples,
    lookup_bytes,
    of_workload,
)
from shardwise.perf.suite.case import (
    Call,
    Case,
    Ready,
    Setting,
)
from shardwise.perf.suite.declared import check_ids_bytes, sequence_lookup_bytes
from shardwise.perf.suite.libraries import fbgemm
from shardwise.perf.suite.peers import (
    TOLERANCES,
    assert_close,
    bags_of,
    fbgemm_tables,
    peer_calls,
    table_memory,
    torch_lookup,
)
from shardwise.perf.suite.workloads import (
    DCNV2,
    EBC,
    FBGEMM_CI,
    FBGEMM_DEFAULT,
    PRODUCTION,
    TRACES,
    WORKLOADS,
    Workload,
    sized,
)

# distinct batches that calls are taken from in turn
INPUTS = 3
# samples that the reference, which is slow, looks up
CHECKED = 8
EVERY, CUDA, FULL = frozenset({"cpu", "cuda", "full"}), frozenset({"cuda", "full"}), frozenset({"full"})
FLOOR = "ids: every id moves its row"

Peers = dict[str, Callable[[], Sequence[Call]]]


def batches_of(
    setting: Setting, workload: Workload, elements: float = 0.0, **options: Any
) -> tuple[list[Batch], dict[str, object]]:
    """Distinct batches of a workload as it fits the setting, and what the record says of it.

    `elements` counts the states of all sides that are as large as the tables.
    """
    memory = setting.memory_bytes
    if setting.device == "cpu" and elements:
        # their pages are new for each case
        memory = min(memory, 1 << 29)
    size = workload.dtype.itemsize + 4 * elements
    workload = sized(workload, setting.device, memory, small=setting.small, bytes_a_row_element=size)
    rows = table_memory(sum(workload.rows) * workload.dim, workload.dtype, setting.device)
    batches = of_workload(workload, setting.device, INPUTS, weights=rows, **options)
    return batches, dict(workload.notes)


def mean(numbers: Sequence[float]) -> float:
    """Of the numbers."""
    return sum(numbers) / len(numbers)


def without_gradients(call: Callable[..., object], *args: object) -> Call:
    """The call of a peer that would record for autograd."""

    def run() -> object:
        with torch.no_grad():
            return call(*args)

    return run


def _pooled(setting: Setting, workload: Workload, pooling: str = "sum", weighted: bool = False) -> Ready:
    batches, notes = batches_of(setting, workload, pooling=pooling, weighted=weighted)
    first, tolerance = batches[0], TOLERANCES[workload.dtype]

    def of_fbgemm() -> Sequence[Call]:
        tables = fbgemm_tables(first)
        return [without_gradients(tables, b.indices, b.offsets, b.per_id_weights) for b in batches]

    def of_torch() -> Sequence[Call]:
        bags = bags_of(first)
        return [without_gradients(torch_lookup(bags, b)) for b in batches]

    # torch weighs only sums
    builders: Peers = {"fbgemm": of_fbgemm} | ({} if weighted and pooling == "mean" else {"torch": of_torch})
    peers, trouble = peer_calls(setting, builders)

    def check() -> None:
        some = first_samples(first, CHECKED)
        args = (some.weights, some.indices, some.offsets, some.per_id_weights, some.features, some.dims)
        for batch, *others in zip(batches, *peers.values(), strict=True):
            pooled = batch.lookup()
            if batch is first:
                assert_close(pooled[:CHECKED], pooled_lookup_ref(*args), 1e-5, "the reference")
            for name, other in zip(peers, others, strict=True):
                peer_pooled: Any = other()
                assert_close(pooled, peer_pooled.float(), tolerance, name)

    moved = mean([lookup_bytes(batch) for batch in batches])
    return Ready([b.lookup for b in batches], check, moved, FLOOR, peers, notes=notes | trouble)


def _sequence(setting: Setting, workload: Workload) -> Ready:
    batches, notes = batches_of(setting, workload, pooling="sequence")
    first = batches[0]
    dim = first.dims[0]

    def rows_of(b: Batch) -> Tensor:
        return sequence_lookup(b.weights, b.indices, b.offsets, b.features, dim, b.segments)

    def of_fbgemm() -> Sequence[Call]:
        tables = fbgemm_tables(first)
        return [without_gradients(tables, b.indices, b.offsets) for b in batches]

    def of_torch() -> Sequence[Call]:
        tables = [bag.weight for bag in bags_of(first)]
        parts = [torch.split(b.indices, b.offsets[:: b.grad.shape[0]].diff().tolist()) for b in batches]

        def look_up(ids: Sequence[Tensor]) -> Tensor:
            return torch.cat([torch.embedding(table, i) for table, i in zip(tables, ids, strict=True)])

        return [without_gradients(look_up, ids) for ids in parts]

    peers, trouble = peer_calls(setting, {"fbgemm": of_fbgemm, "torch": of_torch})

    def check() -> None:
        rows = rows_of(first)
        args = (first.weights, first.indices, first.offsets, first.features, dim)
        # rows are copied: their bits
        assert torch.equal(rows, sequence_lookup_ref(*args)), "the reference"
        for name, calls in peers.items():
            peer_rows: Any = calls[0]()
            assert torch.equal(rows, peer_rows), name

    where = [(b.weights, b.indices, b.offsets, b.features) for b in batches]
    moved = mean([sequence_lookup_bytes(*args).bytes_moved for args in where])
    floor = f"{FLOOR}; the search for each id's feature is left out"
    return Ready([partial(rows_of, b) for b in batches], check, moved, floor, peers, notes=notes | trouble)


def _check_ids(setting: Setting, workload: Workload) -> Ready:
    batches, notes = batches_of(setting, workload)
    guard, names = new_guard(setting.device), [f"f{f}" for f in range(len(batches[0].dims))]

    def run(b: Batch) -> None:
        check_ids(b.indices, b.offsets, b.features, guard, names=names)

    def of_fbgemm() -> Sequence[Call]:
        fbgemm()
        rows = batches[0].features[:, 1].contiguous()
        warning = torch.zeros(1, dtype=torch.int64, device=setting.device)
        # 1: count what is wrong
        return [partial(torch.ops.fbgemm.bounds_check_indices, rows, b.indices, b.offsets, 1, warning) for b in batches]

    peers, trouble = peer_calls(setting, {"fbgemm": of_fbgemm})

    def check() -> None:
        run(batches[0])
        assert guard.tolist() == [OK] * 3, "good ids were found bad"
        bad, marked = batches[0].indices.clone(), new_guard(setting.device)
        bad[-1] = batches[0].features[-1, 1]
        try:
            check_ids(bad, batches[0].offsets, batches[0].features, marked, names=names)
        except IndexError:
            return
        assert marked.tolist() != [OK] * 3, "a bad id was not found"

    moved = mean([check_ids_bytes(b.indices, b.offsets).bytes_moved for b in batches])
    floor = "ids: each once; the search for its feature is left out"
    return Ready([partial(run, b) for b in batches], check, moved, floor, peers, notes=notes | trouble)


_ON_CPU = {w.name for w in (FBGEMM_DEFAULT, FBGEMM_CI, PRODUCTION, EBC[128], DCNV2, TRACES)}

CASES: Sequence[Case] = (
    *(
        Case(
            f"pooled_lookup, {workload.name}", "lookup", partial(_pooled, workload=workload),
            EVERY if workload.name in _ON_CPU else FULL if workload in (EBC[64], EBC[32]) else CUDA,
        )
        for workload in WORKLOADS
    ),
    Case(
        "pooled_lookup, fbgemm default, weighted", "lookup",
        partial(_pooled, workload=FBGEMM_DEFAULT, weighted=True), EVERY,
    ),
    Case(
        "pooled_lookup, fbgemm default, mean", "lookup",
        partial(_pooled, workload=FBGEMM_DEFAULT, pooling="mean"), CUDA,
    ),
    Case("sequence_lookup, fbgemm default", "lookup", partial(_sequence, workload=FBGEMM_DEFAULT)),
    Case("check_ids, fbgemm default", "lookup", partial(_check_ids, workload=FBGEMM_DEFAULT)),
)  # fmt: skip
