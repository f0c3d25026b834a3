"""Whether modules with equal tables give equal outputs and rows: the computation in plain torch, ours and the peers.

Shapes: T tables of R_t rows x D columns, B samples, N ids; outputs Y and their gradients G [B, T * D] or [N, D].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.perf.evidence.module_sides import (
    RULES,
    Batch,
    Setup,
    Side,
    forward_of,
    step_of,
    touched_rows,
)
from shardwise.perf.suite.case import OURS

# of the largest element: sums of tens of rows in another order
TOLERANCE = 2e-5


def assert_close(mine: Tensor, other: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError if an element differs by more than `tolerance` of the largest of `other`."""
    if mine.shape != other.shape:
        raise AssertionError(f"{what}: shape {list(mine.shape)}, expected {list(other.shape)}")
    if mine.numel() == 0:
        return
    apart, largest = float((mine.float() - other.float()).abs().max()), float(other.float().abs().max())
    if not apart <= tolerance * largest:
        raise AssertionError(f"{what}: {apart:g} from what is expected, whose largest element is {largest:g}")


def assert_forwards(setup: Setup, sides: Mapping[str, Side], batch: Batch) -> None:
    """Each side's output of a batch is the one of plain torch."""
    expected = expected_output(setup, sides[OURS].tables, batch)
    for who, side in sides.items():
        assert_close(forward_of(side, batch), expected, f"output of {who}")


def assert_steps(setup: Setup, sides: Mapping[str, Side], batch: Batch, grad: Tensor | None) -> None:
    """Each side's first step, from equal tables, gives the output and the rows of plain torch; it is taken."""
    touched = touched_rows(batch)
    expected = expected_output(setup, sides[OURS].tables, batch)
    upstream = torch.ones_like(expected) if grad is None else grad
    rows = expected_rows(setup, sides[OURS].tables, batch, upstream, touched)
    for who, side in sides.items():
        assert_close(step_of(side, batch, grad), expected, f"output of {who}")
        if not side.own_rule:
            for t, (table, named, row) in enumerate(zip(side.tables, touched, rows, strict=True)):
                assert_close(table[named], row, f"rows of table {t} of {who} after a step")


@torch.no_grad()
def expected_output(setup: Setup, tables: Sequence[Tensor], batch: Batch) -> Tensor:
    """The lookup in plain torch."""
    found = []
    for table, (ids, offsets) in zip(tables, batch.by_table, strict=True):
        rows = table[ids.to(table.device)].float()
        if setup.pooled:
            bags = _bags(offsets).to(table.device)
            rows = rows.new_zeros(setup.workload.batch, rows.shape[1]).index_add_(0, bags, rows)
        found.append(rows)
    return torch.cat(found, dim=1 if setup.pooled else 0)


@torch.no_grad()
def expected_rows(
    setup: Setup, tables: Sequence[Tensor], batch: Batch, grad: Tensor, touched: Sequence[Tensor]
) -> list[Tensor]:
    """The `touched` rows of each table after the first step of the rule."""
    dim, found, start = setup.workload.dim, [], 0
    lr = RULES[setup.rule]["lr"]
    for t, (table, (ids, offsets), named) in enumerate(zip(tables, batch.by_table, touched, strict=True)):
        ids, named = ids.to(table.device), named.to(table.device)
        if setup.pooled:
            of_ids = grad[:, t * dim : (t + 1) * dim][_bags(offsets).to(table.device)]
        else:
            of_ids = grad[start : start + ids.shape[0]]
            start += ids.shape[0]
        of_rows = torch.zeros(named.shape[0], dim, device=table.device)
        of_rows.index_add_(0, torch.searchsorted(named, ids), of_ids)
        if setup.rule == "rowwise_adagrad":
            # the state begins at 0, and is the mean of the squares after one step
            of_rows /= of_rows.square().mean(1, keepdim=True).sqrt() + RULES[setup.rule]["eps"]
        found.append(table[named].float() - lr * of_rows)
    return found


def _bags(offsets: Tensor) -> Tensor:
    """The bag of each id, [N]."""
    return torch.repeat_interleave(torch.arange(offsets.shape[0] - 1, device=offsets.device), offsets.diff())
