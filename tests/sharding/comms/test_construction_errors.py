"""Ranks that do not share their plan, configs or versions refuse at construction, and say in what they differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lone_ranks import lone_ranks
from ranks import error_of, run_ranks
from torch import nn

from shardwise import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig
from shardwise.embeddings import DataType, PoolingType
from shardwise.sharding.comms.agreement import differences

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self, *configs: EmbeddingBagConfig, width: int = 3, collections: int = 1) -> None:
        super().__init__()
        tables = list(configs) or [user(), item()]
        self.all = nn.ModuleList([EmbeddingBagCollection(tables) for _ in range(collections)])
        self.dense = nn.Linear(width, 1)


def table(name: str, rows: int, **others: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(**{"name": name, "num_embeddings": rows, "embedding_dim": 16, **others})


user, item = partial(table, "user", 9), partial(table, "item", 7)


# what rank 1 makes instead of Net(), and what all ranks say of it
CASES: dict[str, tuple[Callable[[], Net], str]] = {
    "width": (
        lambda: Net(user(embedding_dim=32), item()),
        "embedding_dim of table 'user' of module 'all.0': rank 0 has 16, rank 1 has 32",
    ),
    "pooling": (
        lambda: Net(user(pooling=PoolingType.MEAN), item()),
        "pooling of table 'user' of module 'all.0': rank 0 has SUM, rank 1 has MEAN",
    ),
    "data type": (
        lambda: Net(user(), item(data_type=DataType.BF16)),
        "data_type of table 'item' of module 'all.0': rank 0 has FP32, rank 1 has BF16",
    ),
    "features": (
        lambda: Net(user(feature_names=["seen"]), item()),
        "feature_names of table 'user' of module 'all.0': rank 0 has ['user'], rank 1 has ['seen']",
    ),
    "order of features": (
        lambda: Net(item(), user()),
        "tables of module 'all.0': rank 0 has ['user', 'item'], rank 1 has ['item', 'user']",
    ),
    "number of collections": (
        lambda: Net(collections=2),
        "modules with tables: rank 0 has ['all.0'], rank 1 has ['all.0', 'all.1']",
    ),
    "dense layer": (
        lambda: Net(width=4),
        "dense parameter 'dense.weight': rank 0 has [1, 3] torch.float32, rank 1 has [1, 4] torch.float32",
    ),
}


def disagree() -> list[str]:
    """What this rank says to each of CASES, to another version of torch, and to other arguments."""
    rank = dist.get_rank()
    models = [other() if rank else Net() for other, _ in CASES.values()]
    found = [error_of(DistributedModelParallel, model) for model in models]
    with patch.object(torch, "__version__", "2.12.0" if rank else "2.13.0"):
        found.append(error_of(DistributedModelParallel, Net()))
    found.append(error_of(DistributedModelParallel, Net(), init_data_parallel=rank == 1))
    # all ranks raised, so the group goes on
    DistributedModelParallel(Net())
    return found


def test_38_ranks_say_in_what_they_differ() -> None:
    """Fault 38: plans, configs, library versions or key order differ: refused at start, with both values."""
    expected = [said for _, said in CASES.values()] + [
        "version of torch: rank 0 has 2.13.0, rank 1 has 2.12.0",
        "init_data_parallel: rank 0 has False, rank 1 has True",
    ]
    for found in run_ranks(2, disagree):
        for text, said in zip(found, expected, strict=True):
            assert text.startswith(f"RuntimeError: ranks differ in what all must share: {said}"), text


def test_ranks_that_agree_stand_together() -> None:
    facts = [{"width": "16"}, {"width": "32"}, {"width": "16"}, {}]
    assert differences(facts).endswith("width: ranks [0, 2] have 16, rank 1 has 32, rank 3 has nothing")


def test_no_more_than_four_differences_are_listed() -> None:
    found = differences([{str(n): "a" for n in range(9)}, {str(n): "b" * 500 for n in range(9)}])
    assert found.endswith("; and 5 more")
    assert len(found) < 1000


def construct_alone() -> None:
    if dist.get_rank() == 0:
        DistributedModelParallel(Net(), timeout_s=4)
    else:
        time.sleep(30)


def test_a_rank_that_constructs_nothing_is_waited_for_no_longer_than_timeout_s() -> None:
    first, _ = lone_ranks(2, construct_alone, stopped=1, deadline=25)
    assert first.error == "RankFailure"
    assert "timeout_s" in first.text
    assert first.ranks == (1,)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        said = error_of(DistributedModelParallel, Net(), timeout_s=timeout_s)
    finally:
        dist.destroy_process_group()
    assert said.startswith("ValueError") and "timeout_s must be positive" in said
