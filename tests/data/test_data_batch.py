"""Batch: what a step of training takes."""

from __future__ import annotations

import pytest
import torch

from shardwise import Batch, KeyedJaggedTensor


def batch() -> Batch:
    sparse = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 1]))
    return Batch(torch.tensor([[0.5], [1.5]]), sparse, torch.tensor([1.0, 0.0]))


def test_fields_come_in_torchrecs_order() -> None:
    assert list(vars(batch())) == ["dense_features", "sparse_features", "labels"]
    assert batch().batch_size == 2


def test_to_moves_every_part() -> None:
    moved = batch().to("meta", non_blocking=True)
    devices = {t.device.type for t in (moved.dense_features, moved.sparse_features.values(), moved.labels)}
    assert devices == {"meta"}
    same = batch().to(torch.device("cpu"))
    assert same.sparse_features.values().tolist() == [1, 2, 3]
    assert same.labels.tolist() == [1.0, 0.0]


@pytest.mark.gpu
def test_pinned_batches_move_on_a_side_stream() -> None:
    stream = torch.cuda.Stream()
    pinned = batch().pin_memory()
    assert pinned.labels.is_pinned() and pinned.sparse_features.values().is_pinned()
    with torch.cuda.stream(stream):
        moved = pinned.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    moved.record_stream(torch.cuda.current_stream())
    assert moved.dense_features.tolist() == [[0.5], [1.5]]


@pytest.mark.parametrize(("dense", "labels"), [(3, 2), (2, 3)])
def test_parts_of_different_sizes_are_refused(dense: int, labels: int) -> None:
    with pytest.raises(ValueError, match=f"same number of samples, got {dense}, 2 and {labels}"):
        Batch(torch.zeros(dense, 1), batch().sparse_features, torch.zeros(labels))
