"""Faults planted in launches of the library are found when the compiled kernels are executed."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.kernels import pooled_lookup, sequence_lookup
from shardwise.kernels._op import tl, triton
from shardwise.kernels.features import ROWS
from shardwise.kernels.lookup import sequence
from shardwise.perf.gpu import Fault
from shardwise.perf.gpu.launches import Cut, Log, executed, specialize
from shardwise.perf.selftest.agreement import compare, difference_of
from shardwise.perf.selftest.flat_tables import Batch
from shardwise.perf.selftest.tolerances import RULE, SAME

pytestmark = pytest.mark.executed


def look_up(batch: Batch, *, weights: Tensor | None = None, ids: Tensor | None = None, rows: int = 0) -> Log:
    """A pooled lookup, perhaps of other weights or ids, or of features that say they have other `rows`."""
    own_ids, offsets, _ = batch.bag_ids()
    features = batch.table_features
    if rows:
        features[:, ROWS] = rows
    where = (own_ids if ids is None else ids, offsets, None, features, batch.dims, batch.segments, batch.pooling)
    with executed() as log, suppress(Fault):
        pooled_lookup(batch.weights() if weights is None else weights, *where)
    return log


def test_a_lookup_without_a_fault_has_none() -> None:
    assert look_up(Batch()).faults == look_up(Batch(shifted=True)).faults == []


def test_a_pointer_that_is_said_to_be_aligned_and_is_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton believes data_ptr: it loads 16 bytes at once from addresses 4 bytes off."""
    weights, true_address = Batch(shifted=True).weights(), Tensor.data_ptr
    monkeypatch.setattr(Tensor, "data_ptr", lambda self: true_address(self) // 16 * 16)
    faults = look_up(Batch(), weights=weights).faults
    assert any("misaligned" in fault and "lookup.pooled.pooled_lookup" in fault for fault in faults), faults


def test_an_id_outside_of_a_table_whose_size_is_wrong_is_found() -> None:
    ids = Batch().bag_ids()[0]
    ids[3] = 50_000
    assert look_up(Batch(), ids=ids).faults == []
    faults = look_up(Batch(), ids=ids, rows=10**6).faults
    assert any("outside" in fault for fault in faults), faults


@triton.jit
def _overlapping_kernel(W, at, Y, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    # each program also writes the first row of the next one
    position = tl.program_id(0).to(tl.int64) * (BLOCK_N - 1) + tl.arange(0, BLOCK_N)
    begin = tl.load(at + position, mask=position < N, other=-1)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (begin >= 0)[:, None] & (d < D)[None, :]
    rows = tl.load(W + (begin * ALIGN)[:, None] + d[None, :], mask=mask, other=0.0)
    tl.store(Y + (position * D)[:, None] + d[None, :], rows, mask=mask & (position < N)[:, None])


@triton.jit
def _unwritten_kernel(W, at, Y, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    pass


@triton.jit
def _summing_kernel(W, at, Y, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    position = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(at + position, mask=position < N, other=-1)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (begin >= 0)[:, None] & (d < D)[None, :]
    rows = tl.load(W + (begin * ALIGN)[:, None] + d[None, :], mask=mask, other=0.0)
    # of all warps
    total = tl.sum(tl.sum(rows, 1), 0)
    tl.store(Y + (position * D)[:, None] + d[None, :], rows + total, mask=mask)


def gather_by(kernel: object, dim: int = 4, cut: Cut | None = None) -> tuple[Log, Tensor]:
    """A sequence lookup of 120 rows whose kernel is another one."""
    batch = Batch(((40, dim),), ((0, False),), bags=120, lengths=(1, 1))
    ids, offsets, _ = batch.bag_ids()
    rows = torch.empty(0)
    with patch.object(sequence, "_gather_kernel", kernel), executed(cut=cut) as log, suppress(Fault):
        rows = sequence_lookup(batch.weights(), ids, offsets, batch.table_features, dim, batch.segments)
    return log, rows


def test_two_programs_that_write_the_same_words_are_found() -> None:
    assert gather_by(sequence._gather_kernel)[0].faults == []
    faults = gather_by(_overlapping_kernel)[0].faults
    assert any("shared word" in fault and "Y" in fault for fault in faults), faults


def test_what_a_kernel_leaves_unwritten_is_no_number() -> None:
    log, rows = gather_by(_unwritten_kernel)
    assert log.faults == [] and bool(rows.isnan().all())


def test_a_missing_barrier_is_found() -> None:
    log, _ = gather_by(_summing_kernel, 128)
    launch = log.launches[-1]
    assert log.faults == [] and launch.barriers
    for barrier in range(launch.barriers):
        faults = gather_by(_summing_kernel, 128, Cut(launch.kernel, launch.variant, barrier))[0].faults
        assert any("race" in fault or "unwritten" in fault for fault in faults), (barrier, faults)


def test_values_that_differ_are_found() -> None:
    values = torch.tensor([1.0, 2.0, float("nan")])
    assert difference_of(values, values.clone()) == 0
    assert difference_of(values, torch.tensor([1.0, 2.5, float("nan")])) == 0.2
    assert difference_of(values, torch.tensor([1.0, float("nan"), 2.0])) == float("inf")
    assert difference_of(values, values.double()) == difference_of(values, values[:2]) == float("inf")
    other = torch.tensor([1.0, 2.0 + 2**-22])
    assert compare([values[:2]], [other], RULE) == (pytest.approx(2**-23), [])
    worst, wrong = compare([values[:2]], [other], SAME)
    assert worst > 0 and len(wrong) == 1
    assert compare([1, "a"], [1, "b"], SAME)[1] == ["result 1 is 'a', expected 'b'"]
    assert compare([], [other], SAME)[1] == ["0 results, expected 1"]


def test_launches_are_specialised_as_tritons_launcher_does() -> None:
    """A pointer on 16 bytes and one off, a size that is a multiple of 16, one that is 1, and one that may not count."""
    kernel, rows = sequence._gather_kernel, torch.zeros(65)
    ask = partial(specialize, kernel, options={"num_warps": 1})
    aligned = ask((rows, torch.zeros(8, dtype=torch.int64), rows, 32, 1, 16, 4, 1))
    assert aligned.signature["W"] == "*fp32" and aligned.signature["BLOCK_N"] == "constexpr"
    assert (0,) in aligned.attributes
    off = ask((rows[1:], torch.zeros(8, dtype=torch.int64), rows, 32, 1, 16, 4, 1))
    assert not off.attributes.get((0,)) and off.attributes != aligned.attributes
    assert [name for name, _ in aligned.passed()][:3] == ["W", "at", "Y"]
    assert "BLOCK_D" not in dict(aligned.passed())


def test_another_order_of_programs_gives_the_same_bits() -> None:
    batch = Batch(((40, 4), (30, 4)), bags=300)
    ids, offsets, _ = batch.bag_ids()
    results = []
    for seed in (None, 1):
        with executed(shuffle=seed) as log:
            where = (ids, offsets, batch.table_features, 4, batch.segments)
            results.append(sequence_lookup(batch.weights(), *where))
        assert log.faults == [] and max(launch.grid[0] for launch in log.launches) > 3
    assert torch.equal(*results)
