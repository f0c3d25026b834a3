"""Features of long bags first: the order of a launch, and the bits of a step in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.collections.bag_collection import LONGEST_FIRST, longest_first, order_features
from shardwise.embeddings.tables.table_group import TableGroup
from shardwise.kernels import configs
from shardwise.kernels.features import ORDER

DIMS = {"a": 4, "b": 4, "c": 8, "d": 3, "e": 8}
LENGTHS = {"a": 2, "b": 9, "c": 1, "d": 20, "e": 6}


def test_features_of_more_ids_come_first_within_a_class_of_dims_and_equal_ones_as_before() -> None:
    dims = [4, 4, 8, 3, 8]
    assert longest_first(dims, [0, 0, 0, 0, 0]) == [3, 0, 1, 2, 4]
    assert longest_first(dims, list(LENGTHS.values())) == [3, 1, 0, 4, 2]


def test_features_of_one_class_stay_apart_where_rows_are_aligned_differently() -> None:
    """A gradient by per-id weights has a launch for each alignment: mixed, it read rows of 48 bytes as if of 64."""
    assert longest_first([16, 12, 10, 12], [1, 20, 3, 30]) == [2, 3, 1, 0]


def step(collection: EmbeddingBagCollection) -> tuple[Tensor, list[Tensor]]:
    """The output of a lookup, and the tables after the update of its backward."""
    lengths = torch.tensor([[n // 2, n - n // 2] for n in LENGTHS.values()]).flatten()
    ids = torch.arange(sum(LENGTHS.values())) % 7
    values = collection(KeyedJaggedTensor.from_lengths_sync([*LENGTHS], ids, lengths)).values()
    values.square().sum().backward()
    return values.detach(), [table.detach().clone() for table in collection.parameters()]


def new_collection() -> EmbeddingBagCollection:
    torch.manual_seed(3)
    tables = [EmbeddingBagConfig(7, dim, f"t_{f}", feature_names=[f]) for f, dim in DIMS.items()]
    collection = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    return collection


def order_of(group: TableGroup) -> list[int]:
    return group.features[:, ORDER].tolist()


@pytest.mark.interpreted
def test_the_bits_of_a_step_are_the_same_in_whatever_order_features_are_taken() -> None:
    collection, usual = new_collection(), step(new_collection())
    with configs.variant(LONGEST_FIRST):
        found = step(collection)
        (group,) = collection._groups
        assert order_of(group) == [3, 1, 0, 4, 2]
        # of a batch of which the host knows no lengths
        order_features(group, None)
        assert order_of(group) == [3, 1, 0, 4, 2]
    assert torch.equal(found[0], usual[0])
    assert all(map(torch.equal, found[1], usual[1]))
    order_features(group, list(LENGTHS.values()))
    assert order_of(group) == [3, 0, 1, 2, 4]
