"""FBGEMM's modules beside tables: orders of pooled embeddings, and tables of one column for several tasks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.fbgemm.tables import (
    BatchedUnaryEmbeddingBag,
    PermutePooledEmbeddings,
    PermutePooledEmbeddingsSplit,
    wrap_weight_to_parameter,
)

DIMS, ORDER = [2, 1, 3], [2, 0, 1]
COLUMNS = [3, 4, 5, 0, 1, 2]


def test_they_are_at_upstreams_paths() -> None:
    for kind, module in (
        (BatchedUnaryEmbeddingBag, "batched_unary_embeddings_ops"),
        (PermutePooledEmbeddings, "permute_pooled_embedding_modules"),
        (PermutePooledEmbeddingsSplit, "permute_pooled_embedding_modules_split"),
    ):
        assert getattr(import_module(f"shardwise.fbgemm_gpu.{module}"), kind.__name__) is kind


@pytest.mark.parametrize("kind", [PermutePooledEmbeddings, PermutePooledEmbeddingsSplit])
@pytest.mark.parametrize("dims", [DIMS, torch.tensor(DIMS)], ids=["list", "tensor"])
def test_features_come_in_the_order_and_gradients_back(kind: Any, dims: Any) -> None:
    pooled = torch.randn(4, 6, requires_grad=True)
    permuted = kind(dims, ORDER)(pooled)
    assert torch.equal(permuted, pooled[:, COLUMNS])
    upstream = torch.randn(4, 6)
    (grad,) = torch.autograd.grad(permuted, pooled, upstream)
    assert torch.equal(grad[:, COLUMNS], upstream)


def test_the_module_of_an_order_has_upstreams_state() -> None:
    module = PermutePooledEmbeddingsSplit(DIMS, ORDER)
    assert {name: numbers.tolist() for name, numbers in module.state_dict().items()} == {
        "_offset_dim_list": [0, 2, 3, 6],
        "_permute": [2, 0, 1],
        "_inv_permute": [1, 2, 0],
        "_inv_offset_dim_list": [0, 3, 5, 6],
    }
    other = PermutePooledEmbeddingsSplit(DIMS, [0, 1, 2])
    other.load_state_dict(module.state_dict())
    pooled = torch.randn(4, 6)
    assert torch.equal(other(pooled), pooled[:, COLUMNS])
    assert not isinstance(PermutePooledEmbeddings(DIMS, ORDER), torch.nn.Module), "upstream's is none either"


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1]])
def test_an_order_that_is_no_permutation_is_named(order: list[int]) -> None:
    with pytest.raises(ValueError, match="permute must have each of the 3 features of embs_dims once"):
        PermutePooledEmbeddings(DIMS, order)
    with pytest.raises(ValueError, match="embs_dims must not be negative"):
        PermutePooledEmbeddingsSplit([2, -1], [1, 0])


def sums(weight: Tensor, sizes: list[int], offsets: Tensor, ids: Tensor) -> Tensor:
    """[N, B, T] by plain loops."""
    batch = (offsets.numel() - 1) // len(sizes)
    out = []
    for task in weight:
        for b in range(batch):
            for t, size in enumerate(sizes):
                begin, end = offsets[t * batch + b], offsets[t * batch + b + 1]
                out.append(task[sum(sizes[:t]) : sum(sizes[:t]) + size, 0][ids[begin:end].long()].sum())
    return torch.stack(out).view(weight.shape[0], batch, len(sizes))


@pytest.mark.parametrize("long_index", [False, True])
def test_unary_bags_are_summed_for_every_task(long_index: bool) -> None:
    sizes, index = [3, 5], torch.int64 if long_index else torch.int32
    module = BatchedUnaryEmbeddingBag(2, sizes, long_index)
    assert module.table_offsets_tensor.dtype == index and module.table_offsets_tensor.tolist() == [0, 3, 8]
    offsets, ids = torch.tensor([0, 2, 2, 3, 5], dtype=index), torch.tensor([2, 0, 4, 1, 1], dtype=index)
    output = module(offsets, ids)
    wanted = sums(module.weight, sizes, offsets, ids)
    torch.testing.assert_close(output, wanted)
    upstream = torch.randn_like(output)
    torch.testing.assert_close(*(torch.autograd.grad(each, module.weight, upstream)[0] for each in (output, wanted)))


def test_unary_tables_are_views_that_are_filled_by_their_rows() -> None:
    """Seeded, rows are upstream's: a normal number for each, then uniform ones table by table."""
    torch.manual_seed(3)
    module = BatchedUnaryEmbeddingBag(2, [4, 100])
    torch.manual_seed(3)
    torch.randn(2, 104, 1)
    for table, rows in zip(module.split_embedding_weights(), [4, 100, 4, 100], strict=True):
        assert torch.equal(table, torch.empty(rows, 1).uniform_(-(rows**-0.5), rows**-0.5))
    module.split_embedding_weights()[2].fill_(7)
    assert bool((module.weight[1, :4] == 7).all()) and not bool((module.weight[0] == 7).any())
    assert [*module.state_dict()] == ["weight", "table_offsets_tensor"]


def test_unary_settings_that_do_not_do_are_named() -> None:
    with pytest.raises(ValueError, match=r"hash_sizes be positive, got 1 and \[3, 0\]"):
        BatchedUnaryEmbeddingBag(1, [3, 0])
    tensors = [torch.ones(1), torch.nn.Parameter(torch.zeros(1))]
    wrapped = wrap_weight_to_parameter(tensors)
    assert wrapped is tensors and all(isinstance(each, torch.nn.Parameter) for each in wrapped)
