"""Named workloads: tables, ids of a batch, and how ids are drawn.

Shapes: T tables of R_t rows x D columns, B samples, bags of L_t ids on average; ids I [N] feature by feature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# rows of the 26 tables of TorchRec's EBC benchmark (its benchmarks/ebc_benchmarks.py, from DLRM's README)
CRITEO_ROWS = (
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209, 11267, 128, 4, 974, 14,
    48937457, 11316796, 40094537, 452104, 12606, 104, 35,
)  # fmt: skip
# rows and ids a bag of MLPerf's DLRM-DCNv2 on multi-hot Criteo (facebookresearch/dlrm, torchrec_dlrm/README.MD, MIT)
DCNV2_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
DCNV2_LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# share of a batch's ids whose row it names once, twice, 3 to 4 times, 5 to 8, ..., more than 32768 times
# (facebookresearch/dlrm_datasets, embedding_bag/2021/locality_stats.txt, fbgemm_t856_bs65536, MIT)
REUSE = (
    0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.050, 0.049, 0.048, 0.048, 0.043, 0.031, 0.023,
    0.019,
)  # fmt: skip
# odd and prime, so that times it no two ranks of a table meet, and neighbours lie far apart
_SCATTER = 2_654_435_761
# ranks whose probabilities are added up one by one; the sum of those behind them is an integral, exact to 1e-10
_HEAD = 1 << 16
# what tables and a batch may be on a CPU: a case is set up in seconds, a call takes some tenths of one
_CPU_TABLES_BYTES, _CPU_BATCH_ELEMENTS = 1_700_000_000, 1 << 26


@dataclass(frozen=True)
class Workload:
    """Tables and batches: `rows` and `lengths` (mean ids a bag) of each table.

    Attributes:
        ids: "uniform"; "zipf 1.15" (rank r about r ** -1.15, ranks scattered over the table); "hot" (a tenth of all
            ids name one row); "reuse" (as often again as the histogram of the traces says).
        fixed: every bag has exactly its length; else 0 to twice as many, uniformly.
        cut: what the largest tables were divided by to fit the memory.
        batch_cut: what the batch was divided by.
    """

    name: str
    rows: tuple[int, ...]
    dim: int
    batch: int
    lengths: tuple[float, ...]
    ids: str = "uniform"
    fixed: bool = True
    dtype: torch.dtype = torch.float32
    cut: int = 1
    batch_cut: int = 1

    @property
    def notes(self) -> Mapping[str, object]:
        """The notes on it in the record of a case."""
        cuts = {"largest tables divided by": self.cut, "batch divided by": self.batch_cut}
        shape = {"tables": len(self.rows), "rows": sum(self.rows), "dim": self.dim, "batch": self.batch}
        return {**shape, **{note: cut for note, cut in cuts.items() if cut > 1}}


def equal(name: str, tables: int, rows: int, dim: int, batch: int, length: int, **options: Any) -> Workload:
    """Tables that are all alike."""
    return Workload(name, (rows,) * tables, dim, batch, (float(length),) * tables, **options)


def criteo(shrink: int) -> tuple[int, ...]:
    """Rows as TorchRec's EBC benchmark shrinks them: tables of 10 million rows and more by so many times."""
    return tuple(rows if rows < 10_000_000 else rows // shrink for rows in CRITEO_ROWS)


# as TorchRec's benchmark: bags of 0 to 64 ids
EBC = {
    shrink: Workload(f"criteo shrink {shrink}", criteo(shrink), 128, 64, (32.0,) * 26, fixed=False)
    for shrink in (128, 64, 32, 1)
}
FBGEMM_DEFAULT = equal("fbgemm default", 32, 100_000, 128, 512, 20)
FBGEMM_CI = equal("fbgemm ci", 1, 10_000_000, 256, 13107, 55, ids="zipf 1.15", dtype=torch.float16)
PRODUCTION = equal("production", 32, 1_000_000, 128, 8192, 20)
DCNV2 = Workload("dcnv2 multi-hot", DCNV2_ROWS, 128, 8192, tuple(map(float, DCNV2_LENGTHS)))
HOT = equal("hot row", 32, 100_000, 128, 512, 20, ids="hot")
TRACES = equal("reuse of traces", 32, 100_000, 128, 512, 16, ids="reuse")
WORKLOADS = (FBGEMM_DEFAULT, FBGEMM_CI, PRODUCTION, *EBC.values(), DCNV2, HOT, TRACES)


def fitted(workload: Workload, memory_bytes: int, bytes_a_row_element: float = 4.0) -> Workload:
    """The same with the largest tables halved until all of them fit."""
    rows = workload.rows
    cut = 1
    while sum(rows) * workload.dim * bytes_a_row_element > memory_bytes and max(rows) > 1:
        cut *= 2
        rows = tuple(max(1, min(n, max(workload.rows) // cut)) for n in workload.rows)
    return replace(workload, rows=rows, cut=cut)


def tiny(workload: Workload) -> Workload:
    """The same kind at sizes of a proof."""
    tables = min(3, len(workload.rows))
    return replace(
        workload,
        rows=tuple(min(rows, 50) for rows in workload.rows[:tables]),
        lengths=tuple(min(length, 3.0) for length in workload.lengths[:tables]),
        dim=min(workload.dim, 16), batch=min(workload.batch, 6), name=f"{workload.name}, small",
    )  # fmt: skip


def sized(
    workload: Workload, device: str, memory_bytes: int, *, small: bool = False, bytes_a_row_element: float = 4.0
) -> Workload:
    """The workload as a case times it: tables fit the memory, and on a CPU the batch into some tenths of a second."""
    if small:
        return tiny(workload)
    if device != "cpu":
        # the rest is for batches, gradients and what sorts need
        return fitted(workload, memory_bytes * 6 // 10, bytes_a_row_element)
    workload, cut = fitted(workload, min(memory_bytes, _CPU_TABLES_BYTES), bytes_a_row_element), 1
    while sum(workload.lengths) * workload.batch // cut * workload.dim > _CPU_BATCH_ELEMENTS:
        cut *= 2
    return replace(workload, batch=max(1, workload.batch // cut), batch_cut=cut)


def draw(workload: Workload, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A batch: ids I [N] and lengths [T * B], both int64 on `device`."""
    on: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    lengths = []
    for mean in workload.lengths:
        if workload.fixed:
            lengths.append(torch.full((workload.batch,), round(mean), device=device))
        else:
            lengths.append(torch.randint(0, round(2 * mean) + 1, (workload.batch,), **on))
    counts = torch.stack(lengths).sum(1).tolist()
    ids = [draw_ids(workload.ids, rows, count, on) for rows, count in zip(workload.rows, counts, strict=True)]
    return torch.cat(ids), torch.cat(lengths)


def draw_ids(how: str, rows: int, count: int, on: dict[str, Any]) -> Tensor:
    """`count` ids of a table of `rows`, by the generator and on the device that `on` names; `how` as Workload.ids.

    Raises:
        ValueError: `how` is none of them.
    """
    if how == "uniform":
        return torch.randint(0, rows, (count,), **on)
    if how == "hot":
        ids = torch.randint(0, rows, (count,), **on)
        return torch.where(torch.rand(count, **on) < 0.1, rows // 2, ids)
    if how == "reuse":
        return _scattered(_reused(count, on) % rows, rows)
    if how.startswith("zipf "):
        return _scattered(_zipf(rows, float(how.removeprefix("zipf ")), count, on), rows)
    raise ValueError(f"ids must be 'uniform', 'zipf S', 'hot' or 'reuse', got {how!r}")


def _scattered(ranks: Tensor, rows: int) -> Tensor:
    return ranks * _SCATTER % rows


def _zipf(rows: int, s: float, count: int, on: dict[str, Any]) -> Tensor:
    """Ranks 0 ... rows - 1, rank r with a probability proportional to (r + 1) ** -s: exact, for any s, s <= 1 too."""
    head = min(rows, _HEAD)
    first = torch.arange(1, head + 1, dtype=torch.float64, device=on["device"]).pow(-s).cumsum(0)
    begin, end = head + 0.5, rows + 0.5
    # rank k behind the head has about the integral of x ** -s from k - 0.5 to k + 0.5
    tail = math.log(end / begin) if s == 1 else (end ** (1 - s) - begin ** (1 - s)) / (1 - s)
    at = torch.rand(count, dtype=torch.float64, **on) * (first[-1] + tail)
    behind = (at - first[-1]).clamp(min=0.0)
    x = begin * behind.exp() if s == 1 else (begin ** (1 - s) + (1 - s) * behind).pow(1 / (1 - s))
    ranks = torch.where(at < first[-1], torch.searchsorted(first, at, right=True), (x + 0.5).long() - 1)
    return ranks.clamp(max=rows - 1)


def _reused(count: int, on: dict[str, Any]) -> Tensor:
    """Numbers of rows in random order: of each bin of REUSE its share of the ids, its rows as often as its middle."""
    parts, row, left = [], 0, count
    for power, share in enumerate(REUSE):
        ids = left if power == len(REUSE) - 1 else min(left, round(share * count))
        times = max(1, 3 * 2**power // 4) if power != 1 else 2
        rows = max(1, round(ids / times))
        parts.append(row + torch.arange(ids, device=on["device"]) % rows)
        row, left = row + rows, left - ids
    return torch.cat(parts)[torch.randperm(count, **on)]
