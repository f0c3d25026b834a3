"""Ranks that do not share their plan, configs or versions refuse at construction, and say in what they differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lone_ranks import lone_ranks
from ranks import error_of, run_ranks
from sharding_mixes import Mix, TableCase, batch_of, build, environment
from torch import nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.embeddings import DataType, PoolingType
from shardwise.planner.layout import Shard, TableOptions
from shardwise.sharding import EmbeddingModuleShardingPlan, construct_module_sharding_plan, table_wise
from shardwise.sharding.comms import agreement
from shardwise.sharding.comms.agreement import differences
from shardwise.sharding.modules.sharded_collections import ShardedEmbeddingBagCollection

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


TABLE = TableCase("t", 20, 8, ("f",), "row_wise", seed=3)


def cut(*shards: tuple[int, tuple[int, int], tuple[int, int]], local: int = 2, **more: Any) -> Any:
    """A collection of one table, placed so on its rank."""
    plan = [Shard("t", rank, rows, cols) for rank, rows, cols in shards]
    module = build(Mix((TABLE,)), "rowwise_adagrad")
    default: Any = (torch.optim.SGD, {"lr": 0.1})
    return ShardedEmbeddingBagCollection(
        module, plan, environment(local), torch.device("cpu"), default_optimizer=default, **more
    )


class Named:
    def translate(self, table: str, ids: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return ids


ROWS = ((0, (0, 10), (0, 8)), (1, (10, 20), (0, 8)))
COLUMNS = ((0, (0, 20), (0, 4)), (1, (0, 20), (4, 8)))
DIFFER = "RuntimeError: ranks differ in what all must share: {}: rank 0 has {}, rank 1 has {}"
Made = Callable[[], Any]
OTHER_ROWS = ((0, (0, 9), (0, 8)), (1, (9, 20), (0, 8)))
OTHER_COLUMNS = ((0, (0, 20), (0, 3)), (1, (0, 20), (3, 8)))
SWAPPED = tuple((1 - rank, rows, cols) for rank, rows, cols in COLUMNS)


def moved(*cuts: Sequence[tuple[int, tuple[int, int], tuple[int, int]]]) -> str:
    places = [
        " + ".join(f"rows [{r[0]}, {r[1]}) of columns [{c[0]}, {c[1]}) on rank {rank}" for rank, r, c in sorted(cut))
        for cut in cuts
    ]
    return DIFFER.format("place of table 't'", *places)


def made(*tables: EmbeddingBagConfig, **settings: Any) -> Made:
    return lambda: DistributedModelParallel(Net(*tables, **settings))


def placed(rank: int) -> DistributedModelParallel:
    where = {"user": table_wise(rank), "item": table_wise(1)}
    net = Net()
    plan = construct_module_sharding_plan(net.all[0], where, world_size=2)
    return DistributedModelParallel(net, plan=ShardingPlan({"all.0": plan}))


def trained_by(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **settings: float) -> DistributedModelParallel:
    net = Net()
    weight = net.get_parameter("all.0.embedding_bags.user.weight")
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1, **settings})
    weight._optimizer_classes[0] = optimizer  # type: ignore[attr-defined]
    return DistributedModelParallel(net)


def of_version(module: Any, version: str) -> DistributedModelParallel:
    with patch.object(module, "__version__", version):
        return DistributedModelParallel(Net())


# what rank 0 makes, what rank 1 makes, and how what both say begins
CASES: dict[str, tuple[Made, Made, str]] = {
    "width": (made(), made(user(embedding_dim=32), item()),
        DIFFER.format("embedding_dim of table 'user' of module 'all.0'", 16, 32)),
    "rows": (made(), made(user(num_embeddings=41), item()),
        DIFFER.format("num_embeddings of table 'user' of module 'all.0'", 9, 41)),
    "pooling": (made(), made(user(pooling=PoolingType.MEAN), item()),
        DIFFER.format("pooling of table 'user' of module 'all.0'", "SUM", "MEAN")),
    "data type": (made(), made(user(), item(data_type=DataType.BF16)),
        DIFFER.format("data_type of table 'item' of module 'all.0'", "FP32", "BF16")),
    "features": (made(), made(user(feature_names=["seen"]), item()),
        DIFFER.format("feature_names of table 'user' of module 'all.0'", ["user"], ["seen"])),
    "order of features": (made(), made(item(), user()),
        DIFFER.format("tables of module 'all.0'", ["user", "item"], ["item", "user"])),
    "number of collections": (made(), made(collections=2),
        DIFFER.format("modules with tables", ["all.0"], ["all.0", "all.1"])),
    "dense layer": (made(), made(width=4),
        DIFFER.format("dense parameter 'dense.weight'", "[1, 3] torch.float32", "[1, 4] torch.float32")),
    "learning rate": (trained_by, lambda: trained_by(lr=0.2),
        DIFFER.format("lr of optimizer of table 'user'", 0.1, 0.2)),
    "version of torch": (lambda: of_version(torch, "2.13.0"), lambda: of_version(torch, "2.12.0"),
        DIFFER.format("version of torch", "2.13.0", "2.12.0")),
    "version of shardwise": (lambda: of_version(agreement, "0.0.2"), lambda: of_version(agreement, "0.0.1"),
        DIFFER.format("version of shardwise", "0.0.2", "0.0.1")),
    "settings": (made(), lambda: DistributedModelParallel(Net(), init_data_parallel=False),
        DIFFER.format("init_data_parallel", True, False)),
    "place": (lambda: placed(0), lambda: placed(1),
        DIFFER.format("place of table 'user' of module 'all.0'",
            *(f"rows [0, 9) of columns [0, 16) on rank {rank}" for rank in range(2)))),
    # a rank whose plan did not fit raised alone, and the others waited for it until the group's timeout
    "an optimizer without a rule": (made(), lambda: trained_by(torch.optim.LBFGS),
        "ValueError: rank 1: table 'user': LBFGS has no fused rule"),
    "a plan for another model": (
        made(), lambda: DistributedModelParallel(Net(), plan=ShardingPlan({"nowhere": EmbeddingModuleShardingPlan()})),
        "ValueError: rank 1: the plan names modules ['nowhere'], the model has ['all.0']",
    ),
    "rows cut elsewhere": (lambda: cut(*ROWS), lambda: cut(*OTHER_ROWS), moved(ROWS, OTHER_ROWS)),
    "columns cut elsewhere": (lambda: cut(*COLUMNS), lambda: cut(*OTHER_COLUMNS), moved(COLUMNS, OTHER_COLUMNS)),
    "other ranks": (lambda: cut(*COLUMNS), lambda: cut(*SWAPPED), moved(COLUMNS, SWAPPED)),
    "rows and columns": (lambda: cut(*ROWS), lambda: cut(*COLUMNS), moved(ROWS, COLUMNS)),
    "reduction": (
        lambda: cut(*ROWS), lambda: cut(*ROWS, options={"t": TableOptions(reduction="ordered")}),
        DIFFER.format("reduction of options of table 't'", "'partial'", "'ordered'"),
    ),
    "row_state": (
        lambda: cut(*COLUMNS), lambda: cut(*COLUMNS, options={"t": TableOptions(row_state="table")}),
        DIFFER.format("row_state of options of table 't'", "'shard'", "'table'"),
    ),
    "hosts": (lambda: cut(*ROWS), lambda: cut(*ROWS, local=1), DIFFER.format("ranks of a host", 2, 1)),
    "an id map": (lambda: cut(*COLUMNS), lambda: cut(*COLUMNS, id_maps={"t": Named()}),
        DIFFER.format("mapped of table 't'", False, True)),
    "rows of nobody": (
        lambda: cut(*ROWS), lambda: cut(*ROWS[:1]),
        "ValueError: rank 1: table 't': shards hold 80 of 160 cells, none holds rows [10, 20) of columns [0, 8)",
    ),
    "rows held twice": (
        lambda: cut(*ROWS), lambda: cut(*ROWS, (0, (19, 20), (0, 8))),
        "ValueError: rank 1: table 't': shards hold 168 of 160 cells, some twice: rows [19, 20) of columns [0, 8) are"
        " on ranks 1 and 0",
    ),
    "columns of some rows": (
        lambda: cut(*ROWS), lambda: cut((0, (0, 10), (0, 8)), (1, (10, 20), (0, 4)), (0, (10, 20), (4, 8))),
        "ValueError: rank 1: table 't': columns (0, 4) are held for some rows only, other rows are cut at other"
        " columns; cut the table into columns first, and those into rows",
    ),
}  # fmt: skip


def disagree() -> list[str]:
    """What this rank says to each of CASES; all ranks raised, so a good collection after it works."""
    errors = []
    for of_first, of_second, _ in CASES.values():
        errors.append(error_of(of_second if dist.get_rank() else of_first))
        cut(*ROWS)(batch_of(Mix((TABLE,), batches=(3,)), dist.get_rank())).values().sum().backward()
    DistributedModelParallel(Net())
    return errors


def test_38_ranks_say_in_what_they_differ() -> None:
    """Fault 38: plans, configs, library versions or key order differ: refused at start, with both values."""
    for errors in run_ranks(2, disagree, timeout=120.0):
        for (name, (_, _, message)), text in zip(CASES.items(), errors, strict=True):
            # the rules that there are come after
            assert text.split("; these do: ")[0] == message, name


def test_ranks_that_agree_stand_together() -> None:
    facts = [{"width": "16"}, {"width": "32"}, {"width": "16"}, {}]
    assert differences(facts).endswith("width: ranks [0, 2] have 16, rank 1 has 32, rank 3 has nothing")


def test_no_more_than_four_differences_are_listed() -> None:
    text = differences([{str(n): "a" for n in range(9)}, {str(n): "b" * 500 for n in range(9)}])
    assert text.endswith("; and 5 more")
    assert len(text) < 1000


def construct_alone() -> None:
    if dist.get_rank() == 0:
        DistributedModelParallel(Net(), timeout_s=4)
    else:
        time.sleep(30)


@pytest.mark.full
def test_a_rank_that_constructs_nothing_is_waited_for_no_longer_than_timeout_s() -> None:
    first, _ = lone_ranks(2, construct_alone, stopped=1, deadline=25)
    assert first.error == "RankFailure"
    assert "timeout_s" in first.text
    assert first.ranks == (1,)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        text = error_of(DistributedModelParallel, Net(), timeout_s=timeout_s)
    finally:
        dist.destroy_process_group()
    assert text.startswith("ValueError") and "timeout_s must be positive" in text
