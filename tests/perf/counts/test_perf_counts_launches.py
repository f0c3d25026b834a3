"""Launches, copies and host syncs of the path that CUDA takes, counted without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.perf.counts.launches import (
    CUDA,
    Counted,
    launches,
    use_fake_cuda,
)

pytestmark = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton, not its interpreter")


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory is not filled: that would be more launches."""
    yield


def test_operations_count_as_many_kernels_as_torch_launches_for_them() -> None:
    x, mask = torch.randn(8, 4), torch.tensor([True, False] * 4)
    with use_fake_cuda(counts := Counted()):
        on = x.to(CUDA)
        on_mask = mask.to(CUDA)
        assert counts.copies == {"to device": 2}
        counts.clear()
        assert on.is_cuda
        assert on.device == CUDA
        torch.testing.assert_close((on + 1).cpu(), x + 1)
        assert counts.kernels == {"torch add": 1}
        assert counts.copies == {"to host": 1}
        assert [*counts.syncs] == ["copy to host in the caller"]
        for run, kernels in (
            (lambda: on.view(4, 8)[1:].t(), {}),
            (lambda: torch.empty(3, device=CUDA), {}),
            (lambda: torch.zeros(3, device=CUDA), {"torch zero_": 1}),
            (lambda: on.cumsum(0), {"torch cumsum": 1}),
            (lambda: on[:, 0].cumsum(0), {"torch cumsum": 2}),
            (lambda: torch.where(on_mask[:, None], on, 0), {"torch where": 1, "torch fill_": 1}),
            (lambda: torch.cat([on, on]), {"torch cat": 1}),
            (lambda: on.to(CUDA), {}),
            (lambda: on.half(), {"torch _to_copy": 1}),
            (lambda: on[:0] + 1, {}),
        ):
            counts.clear()
            run()
            assert counts.kernels == Counter(kernels)
            assert not counts.syncs
        for run in (lambda: on[on_mask], lambda: bool(on_mask.any()), lambda: on.tolist(), lambda: on_mask.nonzero()):
            counts.clear()
            run()
            assert counts.syncs.total() == 1


def test_launches_are_counted_by_name() -> None:
    assert launches(lambda: torch.ones(3, device=CUDA).cumsum(0)) == {"torch fill_": 1, "torch cumsum": 2}


def test_a_step_counts_the_same_whatever_its_ids_and_changes_the_tables() -> None:
    from shardwise import apply_optimizer_in_backward

    steps = []
    with use_fake_cuda(counts := Counted()):
        tables = [EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=8, feature_names=["f"])]
        model = EmbeddingBagCollection(tables=tables, device=CUDA)
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        before = next(model.parameters()).detach().clone()
        for seed in range(3):
            ids = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(seed)).to(CUDA)
            batch = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.full((20,), 2).to(CUDA))
            counts.clear()
            model(batch).values().sum().backward()
            steps.append((Counter(counts.kernels), Counter(counts.syncs)))
        changed = bool((before != next(model.parameters())).any())
    assert changed
    assert steps[1] == steps[2]
    assert steps[2][0]["pooled_lookup"] == steps[2][0]["check_ids"] == 1
    assert steps[2][0]["update"] > 0
    assert not steps[2][1]


@pytest.mark.parametrize(("length", "backward"), [(1, 8), (32, 14)], ids=["1 id a bag", "32 ids a bag"])
@pytest.mark.parametrize("rule", ["SGD", "RowWiseAdagrad"])
def test_a_step_of_26_tables_at_batch_64_launches_few_kernels(rule: str, length: int, backward: int) -> None:
    """A forward launched 7 kernels and a backward 195 or 252: torch made the index of the update.

    torch's sort is 4 of them up to 4096 ids, and 7 of more.
    """
    from shardwise import RowWiseAdagrad, apply_optimizer_in_backward

    names = [f"f{t}" for t in range(26)]
    with use_fake_cuda(counts := Counted()):
        tables = [EmbeddingBagConfig(100, 128, f"t{name}", feature_names=[name]) for name in names]
        model = EmbeddingBagCollection(tables=tables, device=CUDA)
        chosen = torch.optim.SGD if rule == "SGD" else RowWiseAdagrad
        apply_optimizer_in_backward(chosen, model.parameters(), {"lr": 0.1})
        ids = torch.zeros(26 * 64 * length, dtype=torch.int64).to(CUDA)
        offsets = torch.arange(0, len(ids) + 1, length).to(CUDA)
        model(KeyedJaggedTensor(keys=names, values=ids, offsets=offsets))
        counts.clear()
        out = model(KeyedJaggedTensor(keys=names, values=ids, offsets=offsets)).values()
        assert counts.kernels == {"check_ids": 1, "pooled_lookup": 1}
        assert counts.copies == {"to host": 1}
        grad = torch.ones_like(out)
        counts.clear()
        out.backward(grad)
    assert counts.kernels.total() == backward
    assert counts.kernels["torch sort"] == (4 if length == 1 else 7)
    assert backward - counts.kernels["torch sort"] <= 10
    assert not counts.syncs and not counts.copies
