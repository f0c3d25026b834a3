"""TorchRec's switches of how rows come in order, and the selection of rows that has the same gradient every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import (
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingEnv,
    shard,
)
from shardwise.embeddings.collections.sorted_select import maybe_sorted_index_select, sorted_index_select
from shardwise.sharding import column_wise


def looked_up(is_sharded: bool, **switches: Any) -> tuple[EmbeddingCollection, dict[str, Tensor], list[Tensor]]:
    """The collection, its output, and its rows after a step."""
    torch.manual_seed(0)
    tables = [EmbeddingConfig(6, 4, "t", feature_names=["f", "g"]), EmbeddingConfig(5, 4, "u", feature_names=["g"])]
    module: Any = EmbeddingCollection(tables, torch.device("cpu"), False, **switches)
    model = module
    if is_sharded:
        sharder = EmbeddingCollectionSharder({"learning_rate": 0.1}, use_index_dedup=True)
        model = shard(module, column_wise([0, 0]), ShardingEnv.from_local(1, 0), "cpu", sharder=sharder)
    batch = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 1, 5, 0, 1, 4]), lengths=torch.tensor([2, 1, 0, 3]))
    output = {name: jagged.values() for name, jagged in model(batch).items()}
    torch.cat(list(output.values())).pow(2).sum().backward()
    grads = [p.grad if p.grad is not None else p.detach().clone() for p in model.parameters()]
    return module, {name: values.detach() for name, values in output.items()}, grads


@pytest.mark.parametrize("is_sharded", [False, True])
def test_no_switch_of_a_collection_changes_a_bit(is_sharded: bool) -> None:
    """They raised TypeError."""
    plain, output, grads = looked_up(is_sharded)
    assert (plain.use_gather_select(), plain.use_gather_select_per_sharding(), plain.use_sorted_select()) == (
        False, None, False
    )  # fmt: skip
    for switches in ({"use_gather_select": True}, {"use_gather_select_per_sharding": {"column_wise": True}},
                     {"use_sorted_select": True}):  # fmt: skip
        module, same, same_grads = looked_up(is_sharded, **switches)
        assert all(torch.equal(same[name], output[name]) for name in output) and len(output) == 3
        assert all(torch.equal(a, b) for a, b in zip(same_grads, grads, strict=True))
        (name, value), *_ = switches.items()
        assert getattr(module, name)() == value
    module.set_use_sorted_select(False)
    assert not module.use_sorted_select()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sorted_selection_has_the_rows_and_gradients_of_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, indices = torch.randn(7, 5).to(dtype), torch.tensor([3, 0, 3, 3, 6, 0, 3])
    upstream = torch.randn(7, 5).to(dtype)
    of_ways = []
    for select in (sorted_index_select, lambda r, i: maybe_sorted_index_select(r, i, True),
                   lambda r, i: maybe_sorted_index_select(r, i, False)):  # fmt: skip
        leaf = rows.clone().requires_grad_()
        selected = select(leaf, indices)
        selected.backward(upstream)
        assert leaf.grad is not None and torch.equal(selected, rows[indices])
        of_ways.append(leaf.grad)
    # added in fp32 and rounded once
    exact = torch.zeros(7, 5).index_add_(0, indices, upstream.float()).to(dtype)
    assert torch.equal(of_ways[0], exact) and torch.equal(of_ways[1], exact)
    torch.testing.assert_close(of_ways[2], exact, rtol=0.02, atol=0.02)
    scripted = torch.jit.script(maybe_sorted_index_select)
    assert torch.equal(scripted(rows, indices, True), rows[indices])


def test_a_gradient_of_a_gradient_goes_through_a_sorted_selection() -> None:
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([2, 0, 2])
    assert torch.autograd.gradcheck(lambda r: sorted_index_select(r, indices), rows)
    assert torch.autograd.gradgradcheck(lambda r: sorted_index_select(r, indices), rows)
    with pytest.raises(IndexError):
        sorted_index_select(rows, torch.tensor([3]))
