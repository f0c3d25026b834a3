"""The most bytes of a device that a step has at a time stay within their budget, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.embeddings.tables.table_group import TableGroup
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.kernels.jagged.offsets import complete_cumsum
from shardwise.perf.counts import baseline
from shardwise.perf.counts.baseline import Change
from shardwise.perf.counts.device_memory import BASELINE, BUDGETS, Peak, counts_of, ids_of_a_batch
from shardwise.perf.counts.launches import CUDA, use_fake_cuda
from shardwise.perf.counts.steps import Count

pytestmark = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton, not its interpreter")
SGD = "EBC step, SGD"


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory is not filled: what fills it has memory of its own."""
    yield


def peak_of(name: str) -> Count:
    (peak,) = counts_of(name).values()
    return peak


def over_budget(name: str, peak: Count) -> str:
    """By how much a step is over its budget, and what changed beside the repository's numbers; else nothing."""
    budget = BUDGETS[name].bytes_an_id
    if (each := peak.total / ids_of_a_batch()) <= budget:
        return ""
    kept = baseline.read(BASELINE).get(baseline.versions(), {}).get(name, {})
    changes = [str(Change(name, what, count, peak)) for what, count in kept.items()]
    return "\n".join([f"{name}: {each:.1f} bytes an id at a time, the budget is {budget}", *changes])


@pytest.mark.parametrize("name", BUDGETS)
def test_bytes_that_a_step_has_at_a_time_stay_within_their_budget(name: str) -> None:
    over = over_budget(name, peak_of(name))
    assert not over, over


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_is_what_the_repository_counted_rounded_up(name: str) -> None:
    counts = baseline.read(BASELINE)
    if (here := baseline.versions()) not in counts:
        pytest.skip(f"no counts of {here}: python -m shardwise.perf.counts.device_memory --update")
    (kept,) = counts[here][name].values()
    assert BUDGETS[name].bytes_an_id - 1 < kept.total / ids_of_a_batch() <= BUDGETS[name].bytes_an_id


def test_memory_that_is_kept_over_the_backward_is_over_the_budget_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kept = TableGroup.pooled, list[Tensor]()

    def keeps(self: TableGroup, *args: Any, **kwargs: Any) -> Any:
        kept.append(torch.empty(ids_of_a_batch(), device=CUDA))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(TableGroup, "pooled", keeps)
    over = over_budget(SGD, peak_of(SGD))
    assert over.startswith(f"{SGD}: 102.4 bytes an id at a time, the budget is 99")
    if baseline.versions() in baseline.read(BASELINE):
        assert f"rose by {4 * ids_of_a_batch():,}" in over and "empty float32 0 -> 214776" in over


def test_tensors_that_view_memory_share_it_and_the_last_gives_it_back() -> None:
    with use_fake_cuda(seen := Peak()):
        whole = torch.empty(1000, device=CUDA)
        part = whole[10:].view(10, 99).t()
        assert seen.live == 4000
        del whole
        assert seen.live == 4000
        total = part.sum() + 1
        assert (seen.live, seen.bytes) == (4004, 4008)
        del part
        assert seen.live == 4
        alias = total.new_empty(0).set_(total.untyped_storage(), 0, (1,), (1,))
        del total
        assert seen.live == 4
        del alias
        assert (seen.live, seen.bytes) == (0, 4008)


def test_memory_from_before_is_neither_counted_nor_given_back() -> None:
    with use_fake_cuda(seen := Peak()):
        before = torch.ones(5).to(CUDA)
        assert seen.live == 20
        seen.clear()
        after = before + 1
        del before
        assert (seen.live, seen.bytes, seen.causes) == (20, 20, {"the caller: add float32": 20})
        assert after.tolist() == [2.0] * 5
        saved = after.clone().requires_grad_()
        loss = (saved * saved).sum()
        del saved
        assert seen.live == 20 + 20 + 4, "the graph has it"
        del loss
        assert seen.live == 20


def test_an_op_of_ours_has_the_memory_of_its_cuda_implementation() -> None:
    """Its arguments once, whatever stands for them inside; what it returns lives on."""
    with use_fake_cuda(seen := Peak()):
        lengths = torch.ones(100, dtype=torch.int64).to(CUDA)
        seen.clear()
        offsets = complete_cumsum(lengths)
        assert offsets.tolist() == list(range(101))
        assert seen.live == 101 * 8
        assert seen.bytes >= seen.live and all("kernels/jagged/offsets.py" in cause for cause in seen.causes)
        del offsets
        assert seen.live == 0
