"""Named workloads: tables, ids of a batch, and how ids are drawn.

Shapes: T tables of R_t rows x D columns, B samples, bags of L_t ids on average; ids I [N] feature by feature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# rows of the 26 tables of TorchRec's EBC benchmark (its benchmarks/ebc_benchmarks.py, from DLRM's README)
CRITEO_ROWS = (
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209, 11267, 128, 4, 974, 14,
    48937457, 11316796, 40094537, 452104, 12606, 104, 35,
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Tables and batches: `rows` and `lengths` (mean ids a bag) of each table.

    Attributes:
        ids: "uniform"; "zipf 1.15" (rank r about r ** -1.15, ranks scattered over the table); "hot" (a tenth of all
            ids name one row); "reuse" (as often again as the histogram of the traces says).
        fixed: every bag has exactly its length; else 0 to twice as many, uniformly.
        cut: what tables were divided by to fit the memory.
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


def fitted(workload: Workload, memory_bytes: int, bytes_a_row_element: float = 4.0) -> Workload:
    """The same with the largest tables halved until all of them fit."""
    rows = workload.rows
    cut = 1
    while sum(rows) * workload.dim * bytes_a_row_element > memory_bytes:
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


def draw(workload: Workload, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A batch: ids I [N] and lengths [T * B], both int64 on `device`."""
    on: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    lengths = []
    for mean in workload.lengths:
        if workload.fixed:
            lengths.append(torch.full((workload.batch,), round(mean), device=device))
        else:
            lengths.append(torch.randint(0, round(2 * mean) + 1, (workload.batch,), **on))
    ids = [_draw(workload.ids, rows, int(count.sum()), on) for rows, count in zip(workload.rows, lengths, strict=True)]
    return torch.cat(ids), torch.cat(lengths)


def _draw(how: str, rows: int, count: int, on: dict[str, Any]) -> Tensor:
    if how == "uniform":
        return torch.randint(0, rows, (count,), **on)
    raise ValueError(f"ids must be 'uniform', got {how!r}")
