"""Batches without ids, with int keys, and with rows for ids, through sharded lookups: as in one process, on all ranks.

What TorchRec asserts keeps its type of error on the way to the other ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from shardwise.errors import RefusedValueError
from shardwise.sharding import row_wise, table_wise
from shardwise.sharding.dmp.composable import shard

pytestmark = pytest.mark.ranks

NOTHING, NO_IDS = tensor([]), torch.empty(0, dtype=torch.int64)
KEYS: Any = [3, 7]


def bags(is_weighted: bool = False) -> EmbeddingBagCollection:
    torch.manual_seed(1)
    tables = [EmbeddingBagConfig(12, 4, f"t{key}", feature_names=[key]) for key in KEYS]
    return EmbeddingBagCollection(tables, is_weighted)


def rows() -> EmbeddingCollection:
    torch.manual_seed(1)
    return EmbeddingCollection([EmbeddingConfig(12, 4, f"t{key}", feature_names=[key]) for key in KEYS])


def batches(rank: int) -> list[KeyedJaggedTensor]:
    """With ids, without ids on one rank or on all, and without samples."""
    full = KeyedJaggedTensor(KEYS, torch.arange(6) + rank, lengths=tensor([2, 0, 1, 3]))
    zeros = torch.zeros(4, dtype=torch.int64)
    return [
        full,
        full if rank else KeyedJaggedTensor(KEYS, NOTHING, lengths=zeros),
        KeyedJaggedTensor(KEYS, NO_IDS if rank else NOTHING, lengths=zeros),
        full if rank else KeyedJaggedTensor.from_lengths_sync(KEYS, NOTHING, NOTHING),
        KeyedJaggedTensor.from_offsets_sync(KEYS, NOTHING, NOTHING),
    ]


def lookups() -> list[list[Tensor]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = {f"t{KEYS[0]}": row_wise(), f"t{KEYS[1]}": table_wise(world - 1)}
    pooled, sequence = shard(bags(), plan, device="cpu"), shard(rows(), plan, device="cpu")
    outputs = []
    for batch in batches(rank):
        found = pooled(batch)
        assert list(found.keys()) == KEYS
        each = sequence(batch)
        outputs.append([found.values().detach(), *(each[key].values().detach() for key in KEYS)])
    return outputs


@pytest.mark.parametrize("world", [1, 2])
def test_int_keys_and_batches_without_ids_are_looked_up_as_in_one_process(world: int) -> None:
    pooled, sequence = bags(), rows()
    for rank, outputs in enumerate(run_ranks(world, lookups)):
        for batch, found in zip(batches(rank), outputs, strict=True):
            each: Any = sequence(batch)
            wanted = [pooled(batch).values(), *(each[key].values() for key in KEYS)]
            for actual, other in zip(found, wanted, strict=True):
                assert torch.allclose(actual, other, atol=1e-6)
                assert actual.shape == other.shape


def refused() -> list[tuple[list[str], str]]:
    """Bases and text of what each rank gets where one of them has a batch that no lookup takes."""
    weighted = shard(bags(is_weighted=True), row_wise(), device="cpu")
    good = KeyedJaggedTensor(KEYS, torch.arange(6), torch.ones(6), tensor([2, 0, 1, 3]))
    bad = [
        KeyedJaggedTensor(KEYS, torch.arange(6), lengths=good.lengths()),
        KeyedJaggedTensor(KEYS, torch.arange(12).view(6, 2), torch.ones(6), good.lengths()),
        KeyedJaggedTensor(KEYS, torch.arange(6), torch.ones(6, 2), good.lengths()),
        KeyedJaggedTensor(KEYS, torch.arange(8), torch.ones(8), good.lengths()),
    ]
    last = dist.get_rank() == dist.get_world_size() - 1
    errors = []
    for batch in bad:
        with pytest.raises(Exception) as error:  # noqa: PT011
            weighted(batch if last else good)
        errors.append(([base.__name__ for base in type(error.value).__mro__], str(error.value)))
    assert weighted(good).values().shape == (2, 8)
    return errors


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_that_no_lookup_takes_is_refused_on_all_ranks_by_the_types_of_one_process(world: int) -> None:
    for errors in run_ranks(world, refused):
        (weights, text), (_, of_rows), (_, of_weights), (_, of_padding) = errors
        assert RefusedValueError.__name__ in weights
        assert "AssertionError" in weights
        assert "This (Keyed)JaggedTensor doesn't have weights" in text
        assert "got values of shape [6, 2]" in of_rows
        assert "got weights of shape [6, 2]" in of_weights
        assert "capacity=8" in of_padding
