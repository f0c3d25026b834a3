"""Sharding without DistributedModelParallel, and the helpers that ranks share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from jagged_batches import gradient_of, random_kjt
from model_zoo import bag_tables, fused
from ranks import error_of, run_ranks, world_group
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardingEnv,
    ShardingPlan,
    Topology,
)
from shardwise.inference import quantize_inference_model
from shardwise.sharding import (
    EmbeddingBagCollectionSharder,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from shardwise.sharding.comms.env import (
    get_group_rank,
    get_local_rank,
    get_local_size,
    get_num_groups,
    intra_and_cross_node_pg,
)
from shardwise.sharding.dmp.composable import _shard_modules, shard, shard_modules
from shardwise.sharding.dmp.unwrap import get_unsharded_module_names
from shardwise.sharding.quant import QuantEmbeddingBagCollectionSharder, ShardedQuantEmbeddingBagCollection
from shardwise.sharding.torchrec.collective_utils import invoke_on_rank_and_broadcast_result, is_leader, run_on_leader

pytestmark = pytest.mark.ranks

ROWS = {"a": 13, "b": 11}
BY_ROWS = {"ta": row_wise(), "tb": row_wise()}


def bags() -> EmbeddingBagCollection:
    torch.manual_seed(3)
    return fused(EmbeddingBagCollection(bag_tables(ROWS)))


def batch_of(rank: int) -> KeyedJaggedTensor:
    # of two ids a bag: their sum has no order
    return random_kjt(ROWS, 2, seed=rank, longest=2)


class Net(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.ebc = bags()
        self.inner = nn.ModuleDict({"ec": EmbeddingCollection([EmbeddingConfig(9, 4, "s", feature_names=["a"])])})
        self.dense = nn.Linear(16, 2, device=device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.dense(self.ebc(features).values()).sum()


def sharded_by(how: str) -> Tensor:
    module = bags()
    plan = construct_module_sharding_plan(module, {"ta": table_wise(1), "tb": row_wise()}, device_type="cpu")
    plans: dict[str, Any] = {
        "one generator": row_wise(),
        "a generator each": {"ta": column_wise([1, 0]), "tb": data_parallel()},
        "a plan": plan,
        "some of each": {"ta": plan["ta"], "tb": row_wise()},
    }
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.5}) if how == "a plan" else None
    sharded = shard(module, plans[how], device="cpu", sharder=sharder)
    assert isinstance(sharded, ShardedEmbeddingBagCollection)
    # the module itself is left as it was
    assert type(module) is EmbeddingBagCollection
    output = sharded(batch_of(dist.get_rank())).values()
    output.sum().backward()
    return output.detach()


@pytest.mark.parametrize("how", ["one generator", "a generator each", "a plan", "some of each"])
def test_one_module_is_sharded_by_a_plan_or_by_generators(how: str) -> None:
    for rank, output in enumerate(run_ranks(2, sharded_by, how)):
        assert torch.allclose(output, bags()(batch_of(rank)).values(), atol=1e-6)


def bad_plans() -> list[str]:
    good, is_bad = bags(), dist.get_rank() == 1
    plans: list[Any] = [
        {"ta": row_wise()},
        {**BY_ROWS, "tc": row_wise()},
        table_wise(7),
        {"ta": row_wise(), "tb": column_wise([0, 1, 0])},
    ]
    # the other rank's plan is good
    errors = [error_of(shard, good, plan if is_bad else row_wise(), device="cpu") for plan in plans]
    with pytest.raises(TypeError, match="Linear holds no tables"):
        shard(nn.Linear(2, 2), row_wise(), device="cpu")
    with pytest.raises(RuntimeError, match="place of table 'ta': rank 0 has "):
        shard(good, table_wise(dist.get_rank()), device="cpu")
    return errors


def test_a_plan_that_does_not_fit_on_one_rank_raises_on_all() -> None:
    for errors in run_ranks(2, bad_plans):
        assert errors == [
            "ValueError: rank 1: the plan has tables ['ta'], the module ['ta', 'tb']",
            "ValueError: rank 1: the plan names unknown tables ['tc'], the module has ['ta', 'tb']",
            "ValueError: rank 1: table 'ta': table_wise: rank 7 is not one of 2",
            "ValueError: rank 1: table 'tb': 8 columns do not divide by 3: say the width of each part",
        ]


def whole_model() -> list[str]:
    model = Net("meta")
    plan = ShardingPlan({"ebc": construct_module_sharding_plan(model.ebc, BY_ROWS, device_type="cpu")})
    assert shard_modules(model, device="cpu", plan=plan, init_params=True) is model
    assert type(model.ebc) is ShardedEmbeddingBagCollection
    # the plan says nothing of this one
    assert type(model.inner["ec"]) is EmbeddingCollection
    assert not model.dense.weight.is_meta
    model(batch_of(dist.get_rank())).backward()
    assert gradient_of(model.dense.weight).any()
    # by the default plan, without a value for what is on meta
    other = Net("meta")
    shard_modules(other, device="cpu")
    assert type(other.inner["ec"]) is ShardedEmbeddingCollection
    assert other.dense.weight.is_meta
    assert type(shard_modules(bags(), device="cpu")) is ShardedEmbeddingBagCollection
    return sorted(get_unsharded_module_names(other))


@pytest.mark.filterwarnings("ignore:tables")
def test_the_collections_of_a_model_are_replaced_and_nothing_else() -> None:
    assert run_ranks(2, whole_model) == [["dense"]] * 2


class OnRankOne(EmbeddingShardingPlanner):
    """A planner with a will of its own."""

    def plan(self, module: Any, sharders: list[Any]) -> ShardingPlan:
        assert dist.get_rank() == 0 and len(sharders) == 1
        return ShardingPlan(
            {"ebc": construct_module_sharding_plan(module.ebc, {"ta": table_wise(1), "tb": row_wise()})}
        )


def as_in_the_notebook() -> tuple[list[str], Tensor]:
    model = Net("meta")
    env = ShardingEnv.from_process_group(world_group())
    sharders, device = [EmbeddingBagCollectionSharder()], torch.device("cpu")
    planner = OnRankOne(Topology(world_size=2, compute_device="cpu"))
    assert _shard_modules(model, env, device, None, sharders, True, planner) is model
    plan = ShardingPlan({"": construct_module_sharding_plan(bags(), BY_ROWS)})
    with pytest.warns(UserWarning, match="planner has no effect beside a plan") as caught:
        alone = _shard_modules(module=bags(), env=env, device=device, plan=plan, sharders=sharders, planner=planner)
    assert caught[0].filename == __file__
    assert type(alone) is ShardedEmbeddingBagCollection
    with pytest.raises(TypeError, match=r"env must be one ShardingEnv for all modules, got a dict of \['ebc'\]"):
        _shard_modules(Net(), {"ebc": env}, plan=plan)  # type: ignore[arg-type]
    places = [
        str(piece.placement) for piece in model.ebc.state_dict()["embedding_bags.ta.weight"].metadata().shards_metadata
    ]
    assert torch.equal(model.ebc(batch_of(dist.get_rank())).values(), alone(batch_of(dist.get_rank())).values())
    return places, alone(batch_of(dist.get_rank())).values().detach()


@pytest.mark.filterwarnings("ignore:tables")
def test_the_private_name_of_the_notebook_takes_a_planner() -> None:
    """TorchRec's notebook imports `_shard_modules`, which was not there."""
    for rank, (places, output) in enumerate(run_ranks(2, as_in_the_notebook)):
        assert places == ["rank:1/cpu"]
        assert torch.allclose(output, bags()(batch_of(rank)).values(), atol=1e-6)


def test_the_private_name_shards_a_quantized_model_in_one_process() -> None:
    model: Any = quantize_inference_model(Net())
    before = model.ebc(batch_of(0)).values()
    sharders = [QuantEmbeddingBagCollectionSharder()]
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device="cpu"))
    sharded: Any = _shard_modules(
        module=model, env=ShardingEnv.from_local(2, 0), device=torch.device("cpu"), sharders=sharders, planner=planner
    )
    assert type(sharded.ebc) is ShardedQuantEmbeddingBagCollection
    assert torch.equal(sharded.ebc(batch_of(0)).values(), before)


def test_one_process_needs_no_group() -> None:
    with pytest.raises(
        RuntimeError, match="Process group is not initialized: call torch.distributed.init_process_group"
    ):
        shard(bags(), row_wise(), device="cpu")
    sharded = shard(bags(), row_wise(), ShardingEnv.from_local(1, 0), "cpu")
    assert torch.allclose(sharded(batch_of(0)).values(), bags()(batch_of(0)).values())


def test_devices_that_do_not_fit_are_refused_or_named() -> None:
    env = ShardingEnv.from_local(1, 0)
    plan = construct_module_sharding_plan(bags(), BY_ROWS, world_size=1, device_type="cuda")
    with pytest.warns(
        UserWarning, match="the plan places tables on cuda, and they are sharded for device 'cpu': there"
    ):
        model = shard_modules(bags(), env, "cpu", ShardingPlan({"": plan}))
    assert next(model.parameters()).device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="device 'cuda': there is no CUDA here, so all runs on the CPU"):
            assert shard(bags(), row_wise(), env, "cuda").device.type == "cpu"


class Odd(Exception):
    """Cannot be pickled: its constructor takes two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def collective() -> list[str]:
    rank, world, calls = dist.get_rank(), world_group(), []

    @run_on_leader(world, 1)
    def leader(number: int) -> dict[str, int]:
        calls.append(number)
        return {"rank": dist.get_rank(), "number": number}

    assert leader(7) == {"rank": 1, "number": 7}
    assert calls == ([7] if rank == 1 else [])
    assert is_leader(world, 1) == (rank == 1)
    assert is_leader(None)
    assert not is_leader(None, 1)
    # ranks of a part of the world are counted there
    part: Any = dist.new_group([1, 2])
    if rank:
        assert invoke_on_rank_and_broadcast_result(part, 1, dist.get_rank) == 2

    def fail(error: Exception) -> None:
        raise error

    failures: list[Callable[[], Any]] = [
        lambda: fail(ValueError("table 'x' is bad")), lambda: fail(Odd("a", "b")),
        # a result that cannot travel
        lambda: lambda: 1,
    ]  # fmt: skip
    errors = [error_of(invoke_on_rank_and_broadcast_result, world, 2, f) for f in failures]
    with pytest.raises(ValueError, match="rank 3 is not one of 3"):
        invoke_on_rank_and_broadcast_result(world, 3, dist.get_rank)
    return errors


def test_what_the_leader_raises_is_raised_on_all() -> None:
    """TorchRec's broadcast the result alone: where the leader raised, the others waited for ever."""
    ranks = run_ranks(3, collective)
    assert [errors[0] for errors in ranks] == ["ValueError: table 'x' is bad"] * 3
    assert [errors[1] for errors in ranks] == ["RuntimeError: Odd: a b", "RuntimeError: Odd: a b", "Odd: a b"]
    # the error of pickle, whichever it is
    assert len({errors[2].partition(":")[0] for errors in ranks}) == 1 and all(errors[2] for errors in ranks)


def hosts() -> tuple[list[int], list[int], tuple[int, ...]]:
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        os.environ.pop("LOCAL_RANK")
        intra, cross = intra_and_cross_node_pg()
        assert intra_and_cross_node_pg() == (intra, cross)
        assert intra_and_cross_node_pg(torch.device("meta")) == (None, None)
        numbers = get_local_size(), get_local_rank(), get_group_rank(), get_num_groups()
    assert intra is not None and cross is not None
    return dist.get_process_group_ranks(intra), dist.get_process_group_ranks(cross), numbers


def test_groups_inside_and_across_hosts() -> None:
    assert run_ranks(4, hosts) == [
        ([0, 1], [0, 2], (2, 0, 0, 2)), ([0, 1], [1, 3], (2, 1, 0, 2)), ([2, 3], [0, 2], (2, 0, 1, 2)),
        ([2, 3], [1, 3], (2, 1, 1, 2)),
    ]  # fmt: skip


def test_hosts_are_read_from_the_environment() -> None:
    cases: list[tuple[dict[str, str], tuple[int, int, int]]] = [
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}, (4, 3, 1)),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (4, 1, 1)),
        # does not divide 8, is no number of a rank on a host of 8
        ({"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "9"}, (8, 6, 0)),
        ({}, (8, 6, 0)),
    ]
    for variables, (size, local, group) in cases:
        with patch.dict(os.environ, variables, clear=True):
            assert (get_local_size(8), get_local_rank(8, 6), get_group_rank(8, 6)) == (size, local, group)
            assert get_num_groups(8) == 8 // size
