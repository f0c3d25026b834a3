"""Lengths and offsets whose sums or differences pass 2**63 are refused: they come back as numbers that look right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    kernels,
)
from shardwise.kernels import numba_loops

# rows that there are, and what goes to 3 with every difference >= 0 in 64 bits
ROWS, LARGEST = 3, 2**63 - 1
OFFSETS = {"rises": [0, 2**62 + 1, -(2**62), ROWS], "falls": [0, 10**12, -(2**63), ROWS]}
# what sums to 3 in 64 bits
LENGTHS = {"three": [LARGEST, LARGEST, 5], "four": [2**62, 2**62, 2**62, 2**62 + ROWS]}


@pytest.fixture(params=["numba", "torch alone"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "torch alone":
        monkeypatch.setitem(sys.modules, "numba", None)
        numba_loops.loops.cache_clear()
    yield
    numba_loops.loops.cache_clear()


def of_offsets(offsets: Tensor) -> dict[str, Callable[[], Any]]:
    k, ids = kernels, torch.arange(ROWS)
    rows, dense = torch.randn(ROWS, 2), torch.randn(ROWS, 3, 2)
    trained = rows.clone().requires_grad_()
    table: dict[str, Any] = {"name": "t", "num_embeddings": 8, "embedding_dim": 4, "feature_names": ["f"]}
    bags = EmbeddingBagCollection(tables=[EmbeddingBagConfig(**table)])
    sequences = EmbeddingCollection(tables=[EmbeddingConfig(**table)])
    kjt = KeyedJaggedTensor(keys=["f"], values=ids, offsets=offsets)
    return {
        "softmax": lambda: k.jagged_softmax(rows, offsets),
        "softmax with a gradient": lambda: k.jagged_softmax(trained, offsets),
        "bmm": lambda: k.jagged_dense_bmm(rows, offsets, torch.randn(ROWS, 2, 2)),
        "jagged bmm": lambda: k.jagged_jagged_bmm(rows, rows, offsets),
        "vector product": lambda: k.jagged_vector_product(torch.randn(ROWS, 3), rows, offsets),
        "padded": lambda: k.jagged_to_padded_dense(rows, offsets, 3),
        "add": lambda: k.jagged_dense_add(rows, offsets, dense),
        "to jagged": lambda: k.padded_dense_to_jagged(dense, offsets, ROWS),
        "segment sum": lambda: k.segment_sum(offsets, rows),
        "range": lambda: k.offsets_range(offsets, ROWS),
        "expand": lambda: k.expand_into_jagged_permute(ids, offsets, offsets, ROWS),
        "unary": lambda: k.batched_unary_embeddings(torch.randn(2, ROWS, 1), torch.tensor([0, ROWS]), offsets, ids),
        "unary tables": lambda: k.batched_unary_embeddings(
            torch.randn(2, ROWS, 1), offsets, torch.arange(ROWS + 1), torch.zeros(ROWS, dtype=torch.int64)
        ),
        "unique": lambda: k.jagged_unique(ids, offsets, [ROWS] * ROWS),
        "bags": lambda: bags(kjt),
        "sequences": lambda: sequences(kjt),
    }


def of_lengths(lengths: Tensor) -> dict[str, Callable[[], Any]]:
    k, ids, order = kernels, torch.arange(ROWS), torch.arange(len(lengths))
    rows, packed = torch.randn(ROWS, 2), torch.randn(len(lengths), 3, 2)
    trained = rows.clone().requires_grad_()
    table: dict[str, Any] = {"name": "t", "num_embeddings": 8, "embedding_dim": 4, "feature_names": ["f"]}
    bags = EmbeddingBagCollection(tables=[EmbeddingBagConfig(**table)])
    return {
        "pack": lambda: k.pack_segments(rows, lengths, 3),
        "unpack": lambda: k.unpack_segments(packed, lengths),
        "select": lambda: k.jagged_index_select(rows, lengths, order),
        "select with a gradient": lambda: k.jagged_index_select(trained, lengths, order),
        "select halves": lambda: k.jagged_index_select(rows.half().requires_grad_(), lengths, order),
        "add": lambda: k.jagged_index_add(rows, lengths, order, lengths),
        "add halves": lambda: k.jagged_index_add(rows.half(), lengths, order, lengths),
        "permute": lambda: k.permute_1d(order, lengths, rows),
        "permute with a gradient": lambda: k.permute_1d(order, lengths, trained),
        "bucketize": lambda: k.block_bucketize(lengths, ids, torch.tensor([ROWS]), 2),
        "bags": lambda: bags(KeyedJaggedTensor(keys=["f"], values=ids, lengths=lengths)),
    }


@pytest.mark.parametrize("which", OFFSETS)
@pytest.mark.parametrize("op", of_offsets(torch.tensor([0, 1, 2, 3])))
@pytest.mark.usefixtures("path")
def test_offsets_whose_differences_wrap_are_refused(op: str, which: str) -> None:
    """Falls were looked for in differences: a fall by more than 2**63 is a rise there. Ops read memory that was not
    theirs, gave what lay in their results before, or ended the process."""
    of_offsets(torch.tensor([0, 1, 2, 3]))[op]()
    with pytest.raises(ValueError, match=r"offsets|lengths"):
        of_offsets(torch.tensor(OFFSETS[which]))[op]()


@pytest.mark.parametrize("which", LENGTHS)
@pytest.mark.parametrize("op", of_lengths(torch.tensor([1, 1, 1])))
@pytest.mark.usefixtures("path")
def test_lengths_whose_sum_wraps_are_refused(op: str, which: str) -> None:
    """They add up to the values that there are in 64 bits alone: a selection of them ended the process."""
    of_lengths(torch.tensor([1, 1, 1]))[op]()
    with pytest.raises(ValueError, match=r"lengths|offsets"):
        of_lengths(torch.tensor(LENGTHS[which]))[op]()


@pytest.mark.usefixtures("path")
def test_sizes_below_zero_are_refused_by_name() -> None:
    """numba's path asked torch for a tensor of a negative size."""
    with pytest.raises(ValueError, match="range_size must be >= 0, got -5"):
        kernels.offsets_range(torch.tensor([0, 1]), -5)
    with pytest.raises(ValueError, match="output_offsets must go from 0 to -5"):
        kernels.expand_into_jagged_permute(torch.tensor([0]), torch.tensor([0, 3]), torch.tensor([0, 3]), -5)


@pytest.mark.usefixtures("path")
def test_block_borders_that_wrap_are_refused() -> None:
    borders = [torch.tensor([0, 2**62 + 1, -(2**62)])]
    with pytest.raises(ValueError, match=r"block_bucketize_pos\[0\] must begin at 0 and not decrease"):
        kernels.block_bucketize(torch.tensor([1]), torch.tensor([0]), torch.tensor([3]), 2, block_bucketize_pos=borders)
