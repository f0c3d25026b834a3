"""Inputs that the tuner times: a kernel's op on batches of a workload, over tables of its own that nothing else uses.

Letters as in the kernels: D columns, L ids a bag; a `Job` is one entry of a file of tuned configs to be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import (
    ROW_FORMATS,
    jagged_index_add,
    jagged_to_padded_dense,
    padded_dense_to_jagged,
    row_format,
    segment_sum,
    sequence_lookup,
)
from shardwise.kernels._op import next_power_of_2
from shardwise.kernels.configs import DTYPES, Key, length_class, triton_version
from shardwise.kernels.quantized.pooled_lookup import unit_count
from shardwise.perf.suite.batches import Batch, of_workload, optimizer
from shardwise.perf.suite.cases import quantized_batches as gpu_quantized
from shardwise.perf.suite.workloads import (
    Workload,
    equal,
    fitted,
    tiny,
)
from shardwise.perf.tune.candidates import KERNELS, QUANTIZED
from shardwise.untrusted import read_text

# distinct batches that a measurement rotates through
INPUTS = 3
FLOATS = {name: dtype for dtype, name in DTYPES.items()}
FORMATS = tuple(name for name in ROW_FORMATS if name not in FLOATS)
# kernels whose work does not depend on how long bags are
WITHOUT_LENGTH = ("gather", "gather_values", "to_jagged", "to_padded", "index_add", "update")
Call = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """An entry to find: its key, and the workload that it is found on."""

    key: Key
    workload: Workload

    def __str__(self) -> str:
        return str(self.key)


@dataclass(frozen=True)
class Inputs:
    """Calls to time, in turn, and what one of them gives on fresh tables and states."""

    calls: Sequence[Call]
    result: Callable[[], list[Tensor]]


def workloads_of(dims: Sequence[int], lengths: Sequence[int], *, small: bool) -> list[Workload]:
    """Eight tables of a million rows, 8,192 samples, for each dim and length."""
    # of a class only whole vectors are tuned
    workloads = [equal(f"D={d} L={n}", 8, 1 << 20, next_power_of_2(d), 8192, n) for d in dims for n in lengths]
    return [tiny(workload) for workload in workloads] if small else workloads


def jobs_of(workloads: Sequence[Workload], dtypes: Sequence[str], *, together: bool = False) -> list[Job]:
    """Every entry that these workloads and dtypes can have, the lookups and updates of all of them first.

    Workloads that are looked up `together`, tables of several dims in one call, share the mean length of all bags.
    """
    every = [length for workload in workloads for length in workload.lengths]
    jobs: dict[Key, Job] = {}
    ordered = sorted(KERNELS, key=lambda kernel: kernel != "pooled_lookup" and not kernel.startswith("update "))
    for kernel in ordered:
        for dtype in dtypes:
            if (kernel in QUANTIZED) != (dtype in FORMATS):
                continue
            # where the length does not count, the most ids decide
            for workload in sorted(workloads, key=_mean_length, reverse=kernel.split()[0] in WITHOUT_LENGTH):
                key = _key(kernel, dtype, workload, every if together else workload.lengths)
                jobs.setdefault(key, Job(key, workload))
    return list(jobs.values())


def _mean_length(workload: Workload) -> float:
    return sum(workload.lengths) / len(workload.lengths)


def _key(kernel: str, dtype: str, workload: Workload, lengths: Sequence[float]) -> Key:
    mean = sum(lengths) / len(lengths)
    length = 1 if kernel.split()[0] in WITHOUT_LENGTH else length_class(ceil(1000 * mean), 1000)
    width = workload.dim
    if kernel in QUANTIZED:
        width = unit_count(workload.dim, row_format(dtype))
    elif kernel == "to_padded":
        width *= longest(workload)
    return Key(kernel, dtype, next_power_of_2(width), length, triton_version())


def fitted_job(job: Job, device: str) -> Job:
    """The same with tables that take no more than a quarter of the device's memory, an update's states beside them."""
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 8 << 30
    return replace(job, workload=fitted(job.workload, memory // 4, 12.0))


def read_workload(path: Path, batch: int, *, small: bool) -> list[Workload]:
    """Tables of a JSON file, those of one dim class a workload: {"tables": [{"name", "num_embeddings", ...}]}.

    Each table has `num_embeddings`, `embedding_dim` and `pooling_factor`, the mean ids of a bag (1 where it is not
    given); what else the file says is not read.

    Raises:
        ValueError: the file is no such JSON; the message names the table.
    """
    content = json.loads(read_text(path))
    tables = content.get("tables") if isinstance(content, dict) else None
    if not isinstance(tables, list) or not tables:
        raise ValueError("expected an object with a list of tables")
    classes: dict[int, list[tuple[int, float]]] = {}
    for number, table in enumerate(tables):
        count, columns, length = (_number(number, table, *field) for field in _FIELDS)
        classes.setdefault(next_power_of_2(int(columns)), []).append((int(count), length))
    workloads = []
    for dim, members in sorted(classes.items()):
        lengths = tuple(mean for _, mean in members)
        rows = tuple(count for count, _ in members)
        fixed = all(mean == round(mean) for mean in lengths)
        workloads.append(Workload(f"{path.stem} D={dim}", rows, dim, batch, lengths, fixed=fixed))
    return [tiny(workload) for workload in workloads] if small else workloads


# fields of a table in a workload file, and what they are where they are not given
_FIELDS = (("num_embeddings", None), ("embedding_dim", None), ("pooling_factor", 1.0))


def _number(place: int, table: Any, name: str, default: float | None) -> float:
    value = table.get(name, default) if isinstance(table, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"table {place}: {name} must be a positive number, got {value!r}")
    return value


def longest(workload: Workload) -> int:
    """Values that bags are padded to."""
    return max(1, round(max(workload.lengths)))


def checked(workload: Workload) -> Workload:
    """The same at a size at which results are compared: fewer rows, so that many ids name one."""
    return replace(workload, rows=tuple(min(rows, 2000) for rows in workload.rows), batch=min(workload.batch, 256))


def make(job: Job, device: str) -> Inputs:
    """Set a job up; `job.workload` says how large."""
    kernel, dtype = job.key.kernel, job.key.dtype
    if kernel in QUANTIZED:
        return _quantized(kernel, dtype, job.workload, device)
    batches = batches_of(job.workload, FLOATS[dtype], device)
    if kernel == "pooled_lookup":
        return _of([batch.lookup for batch in batches])
    if kernel == "gather":
        return _of([partial(_rows, batch) for batch in batches])
    if kernel.startswith("update "):
        return _update(kernel.removeprefix("update "), batches)
    return _of([_JAGGED[kernel](batch, longest(job.workload)) for batch in batches])


def _of(calls: Sequence[Callable[[], Tensor]]) -> Inputs:
    return Inputs(calls, lambda: [calls[0]()])


def batches_of(workload: Workload, dtype: torch.dtype, device: str) -> list[Batch]:
    """Distinct batches over one set of tables."""
    return of_workload(replace(workload, dtype=dtype), device, INPUTS)


def _rows(batch: Batch) -> Tensor:
    return sequence_lookup(
        batch.weights, batch.indices, batch.offsets, batch.features, batch.dims[0], batch.segments,
        batch.weights.dtype,
    )  # fmt: skip


def _update(rule: str, batches: list[Batch]) -> Inputs:
    """Steps on tables that nobody reads: whatever comes of their values, the work is the same."""
    state = optimizer(rule, batches[0])

    def result() -> list[Tensor]:
        copy = replace(batches[0], weights=batches[0].weights.clone())
        fresh = optimizer(rule, copy)
        fresh.update(copy)
        return [copy.weights, *fresh.states]

    return Inputs([partial(state.update, batch) for batch in batches], result)


def _quantized(kernel: str, format: str, workload: Workload, device: str) -> Inputs:
    rows, length = max(workload.rows), round(sum(workload.lengths) / len(workload.lengths))
    first = gpu_quantized.make(device, format, len(workload.rows), rows, workload.dim, workload.batch, max(1, length))
    generator = torch.Generator(device).manual_seed(1)
    batches = [first]
    for _ in range(INPUTS - 1):
        ids = torch.randint(0, rows, first.indices.shape, device=device, generator=generator)
        batches.append(replace(first, indices=ids))
    return _of([batch.pooled if kernel == "quantized_pooled_lookup" else batch.sequence for batch in batches])


def _values(batch: Batch, rows: int) -> Tensor:
    """So many rows out of the batch's tables, which are large enough or are repeated."""
    columns = batch.dims[0]
    table = batch.weights[: batch.weights.shape[0] // columns * columns].view(-1, columns)
    times = -(-rows // table.shape[0])
    return (table.repeat(times, 1) if times > 1 else table)[:rows]


def _to_jagged(batch: Batch, most: int) -> Callable[[], Tensor]:
    bags = batch.offsets.shape[0] - 1
    dense = _values(batch, bags * most).view(bags, most, batch.dims[0])
    return partial(padded_dense_to_jagged, dense, batch.offsets, batch.ids)


def _index_add(batch: Batch, _: int) -> Callable[[], Tensor]:
    lengths = batch.offsets.diff()
    # every bag to the place of the bag across from it
    order, there = torch.arange(lengths.shape[0], device=lengths.device).flip(0), lengths.flip(0)
    return partial(jagged_index_add, _values(batch, batch.ids), lengths, order, there, num_rows=batch.ids)


_JAGGED: dict[str, Callable[[Batch, int], Callable[[], Tensor]]] = {
    "segment_rows": lambda batch, _: partial(segment_sum, batch.offsets, _values(batch, batch.ids)),
    "to_padded": lambda batch, most: partial(jagged_to_padded_dense, _values(batch, batch.ids), batch.offsets, most),
    "to_jagged": _to_jagged,
    "index_add": _index_add,
}
