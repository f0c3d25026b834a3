"""Pools over real ranks, and over devices of one process, beside the same pool in one process."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks, world_group
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DistributedModelParallel, KeyedJaggedTensor, ShardingEnv, checkpoint
from shardwise.embeddings.pools import KeyedJaggedTensorPool, TensorPool
from shardwise.sharding import ShardingPlan
from shardwise.sharding.pools import (
    KeyedJaggedTensorPoolSharder,
    LocalShardPool,
    ObjectPoolShardingPlan,
    ObjectPoolShardingType,
    ShardedKeyedJaggedTensorPool,
    ShardedTensorPool,
    TensorPoolSharder,
)

CPU = torch.device("cpu")
LENGTHS = {"a": 2, "b": 3}
ROW_WISE = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)
REPLICATED = ObjectPoolShardingPlan(ObjectPoolShardingType.REPLICATED_ROW_WISE)
# rows that divide evenly over 2 and 4 ranks, that do not, and fewer than ranks
SIZES = [8, 7, 3]
STEPS = 3


def ids_of(rank: int, step: int, size: int) -> Tensor:
    """Ids of a rank, some of them twice; on some ranks none."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    count = (4, 0, 5, 2)[(rank + step) % 4]
    return torch.randint(size, (count,), generator=draw, dtype=torch.int32 if step % 2 else torch.int64)


def rows_of(rank: int, step: int, size: int, dtype: torch.dtype) -> Tensor:
    ids = ids_of(rank, step, size)
    return (torch.arange(ids.numel() * 2).view(-1, 2) + 100 * step + 10 * rank).to(dtype)


def batch_of(rank: int, step: int, size: int) -> KeyedJaggedTensor:
    """Rows of "b", a key of nobody's and "a"."""
    count = ids_of(rank, step, size).numel()
    draw = torch.Generator().manual_seed(step + 10 * rank)
    lengths = torch.cat([torch.randint(most + 1, (count,), generator=draw) for most in (3, 1, 2)])
    values = torch.arange(int(lengths.sum())) + 100 * step + 1000 * rank
    return KeyedJaggedTensor(["b", "x", "a"], values, values / 4, lengths, stride=count)


def whole_pools(size: int, world: int, dtype: torch.dtype) -> tuple[TensorPool, KeyedJaggedTensorPool]:
    """One process that makes the updates of all ranks, in the order of the ranks."""
    rows = TensorPool(size, 2, dtype, CPU)
    bags = KeyedJaggedTensorPool(size, LENGTHS, is_weighted=True, device=CPU)
    for step in range(STEPS):
        for rank in range(world):
            rows.update(ids_of(rank, step, size), rows_of(rank, step, size, dtype))
            bags.update(ids_of(rank, step, size), batch_of(rank, step, size))
    return rows, bags


def same_batch(found: KeyedJaggedTensor, expected: KeyedJaggedTensor) -> None:
    assert found.keys() == expected.keys()
    for part in ("lengths", "values", "weights"):
        assert_close(getattr(found, part)(), getattr(expected, part)(), rtol=0, atol=0)


def sharded(env: ShardingEnv, size: int, plan: ObjectPoolShardingPlan, dtype: torch.dtype) -> tuple[Any, Any]:
    rows = TensorPoolSharder().shard(TensorPool(size, 2, dtype), plan, env, CPU)
    whole = KeyedJaggedTensorPool(size, LENGTHS, is_weighted=True)
    return rows, KeyedJaggedTensorPoolSharder().shard(whole, plan, env, CPU)


def check_equal_to_one_process(env: ShardingEnv, size: int, plan: ObjectPoolShardingPlan, dtype: torch.dtype) -> None:
    world, rank = env.world_size, env.rank
    rows, bags = sharded(env, size, plan, dtype)
    for step in range(STEPS):
        rows.update(ids_of(rank, step, size), rows_of(rank, step, size, dtype))
        bags.update(ids_of(rank, step, size), batch_of(rank, step, size))
    whole_rows, whole_bags = whole_pools(size, world, dtype)
    # each rank asks for other rows, and one of them maybe for none
    asked = ids_of(rank, 7, size) if rank == world - 1 > 0 else torch.arange(6 + rank) % size
    coming = rows(asked), bags(asked)
    assert_close(coming[0].wait(), whole_rows(asked), rtol=0, atol=0)
    same_batch(coming[1].wait(), whole_bags(asked))
    check_state(env, size, plan, dtype, rows, bags)


def check_state(
    env: ShardingEnv, size: int, plan: ObjectPoolShardingPlan, dtype: torch.dtype, rows: Any, bags: Any
) -> None:
    """A state dict has the unsharded names, and fills new pools from itself and from that of one process."""
    whole_rows, whole_bags = whole_pools(size, env.world_size, dtype)
    fresh_rows, fresh_bags = sharded(env, size, plan, dtype)
    everything = torch.arange(size)
    for pool, fresh, whole in ((rows, fresh_rows, whole_rows), (bags, fresh_bags, whole_bags)):
        state = pool.state_dict()
        assert list(state) == list(whole.state_dict())
        for loaded in (state, whole.state_dict()):
            fresh.load_state_dict({name: torch.zeros(t.shape, dtype=t.dtype) for name, t in whole.state_dict().items()})
            fresh.load_state_dict(loaded)
            if isinstance(whole, TensorPool):
                assert_close(fresh(everything).wait(), whole(everything), rtol=0, atol=0)
            else:
                same_batch(fresh(everything).wait(), whole(everything))
        for name, tensor in state.items():
            assert tuple(tensor.size()) == tuple(whole.state_dict()[name].shape)


def on_ranks() -> dict[str, str]:
    world, rank = dist.get_world_size(), dist.get_rank()
    env = ShardingEnv.from_process_group(world_group())
    for size, dtype in zip(SIZES, (torch.float32, torch.bfloat16, torch.bool), strict=True):
        check_equal_to_one_process(env, size, ROW_WISE, dtype)
    hosts = ShardingEnv.from_process_group(world_group(), local_world_size=max(world // 2, 1))
    check_equal_to_one_process(hosts, 7, REPLICATED, torch.float64)
    check_that_it_begins_with_a_filled_pool(env)
    return errors_of_ranks(env, rank, world - 1)


def check_that_it_begins_with_a_filled_pool(env: ShardingEnv) -> None:
    loaded = torch.arange(14.0).view(7, 2)
    pool = TensorPoolSharder().shard(TensorPool(7, 2, torch.float32, CPU, loaded), ROW_WISE, env)
    assert isinstance(pool, ShardedTensorPool)
    assert_close(pool(torch.arange(7)).wait(), loaded, rtol=0, atol=0)


def errors_of_ranks(env: ShardingEnv, rank: int, last: int) -> dict[str, str]:
    """What all ranks raise for what the last one does wrong; their pools stay as they were."""
    rows, bags = sharded(env, 7, ROW_WISE, torch.float32)
    good = torch.tensor([1, 5])
    bad = rank == last
    errors = {
        "id": error_of(rows.update, torch.tensor([1, 7]) if bad else good, torch.ones(2, 2)),
        "lookup": error_of(rows.lookup, torch.tensor([-1]) if bad else good),
        "width": error_of(rows.update, good, torch.ones(2, 3 if bad else 2)),
        "dtype": error_of(rows.update, good, torch.ones(2, 2, dtype=torch.float64 if bad else torch.float32)),
        "long": error_of(
            bags.update,
            good,
            KeyedJaggedTensor(
                ["a", "b"], torch.arange(8), torch.ones(8), torch.tensor([4, 0, 2, 2] if bad else [2, 2, 2, 2])
            ),
        ),
        "ids of floats": error_of(bags.lookup, good.float() if bad else good),
    }
    with tempfile.TemporaryDirectory() as folder:
        # it has a format for tables and whole tensors: local rows of one rank would pass for all
        errors["a folder"] = error_of(checkpoint.save, folder, nn.ModuleDict({"rows": rows}), step=1)
    everything = torch.arange(7)
    assert_close(rows(everything).wait(), torch.zeros(7, 2))
    assert bags(everything).wait().values().numel() == 0
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 4])
def test_pools_over_ranks_are_the_pools_of_one_process(world: int) -> None:
    """Lookups, updates and state dicts of even, uneven and tiny pools; what one rank does wrong all of them raise."""
    words = {
        "id": "7 is not in [0, 7)", "lookup": "-1 is not in [0, 7)", "width": "must be [2, 2]", "dtype": "float64",
        "long": "'a' has 4 values", "ids of floats": "int32 or int64",
    }  # fmt: skip
    if world > 1:
        words["a folder"] = "pool 'rows': rows of a pool over several ranks"
    for errors in run_ranks(world, on_ranks):
        assert [what for what, text in errors.items() if text] == list(words)
        assert all(text in errors[what] for what, text in words.items()), errors


@pytest.mark.parametrize("capacities", [None, [1, 3, 2], [0, 1, 0]])
def test_pools_over_devices_of_a_process_are_the_whole_pool(capacities: list[int] | None) -> None:
    """Even blocks and blocks in proportion to the memory of devices, one of them with none."""
    plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE, inference=True, memory_capacity_per_rank=capacities)
    env, everything = ShardingEnv.from_local(3, 0), torch.tensor([3, 0, 6, 6, 1, 2, 4, 5])
    rows, bags = whole_pools(7, 2, torch.float32)
    over_rows = TensorPoolSharder().shard(rows, plan, env, CPU)
    over_bags = KeyedJaggedTensorPoolSharder().shard(bags, plan, env, CPU)
    assert_close(over_rows(everything), rows(everything), rtol=0, atol=0)
    same_batch(over_bags(everything), bags(everything))
    for pool in (rows, over_rows):
        pool.update(ids_of(2, 5, 7), rows_of(2, 5, 7, torch.float32))
    for bag_pool in (bags, over_bags):
        bag_pool.update(ids_of(2, 5, 7), batch_of(2, 5, 7))
    assert_close(over_rows(everything), rows(everything), rtol=0, atol=0)
    same_batch(over_bags(everything), bags(everything))
    fresh = TensorPoolSharder().shard(TensorPool(7, 2, torch.float32), plan, env, CPU)
    fresh.load_state_dict(over_rows.state_dict())
    assert_close(fresh(everything), rows(everything), rtol=0, atol=0)


def test_a_plan_of_a_model_places_its_pools() -> None:
    model = nn.ModuleDict({"rows": TensorPool(7, 2, torch.float32), "linear": nn.Linear(2, 1)})
    sharded_model = DistributedModelParallel(
        model, env=ShardingEnv.from_local(1, 0), device=CPU, plan=ShardingPlan({"rows": ROW_WISE}),
        sharders=[TensorPoolSharder()],
    )  # fmt: skip
    pool = model["rows"]
    assert isinstance(pool, ShardedTensorPool)
    pool.update(torch.tensor([3]), torch.ones(1, 2))
    assert sharded_model.state_dict()["rows._pool"][3].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="module 'rows': the file of a plan has tables alone"):
        ShardingPlan({"rows": ROW_WISE}).save("plan.json", world_size=1)


def test_a_local_shard_takes_ids_to_its_device() -> None:
    shard = LocalShardPool(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    shard.set_device("cpu")
    shard.update(torch.tensor([1]), torch.tensor([[7, 8, 9]]))
    assert shard(torch.tensor([1, 0])).tolist() == [[7, 8, 9], [1, 2, 3]]


def test_a_plan_that_does_not_fit_is_refused() -> None:
    env, pool = ShardingEnv.from_local(2, 0), TensorPool(7, 2, torch.float32, CPU)
    serving = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE, True, [1, 2])
    assert serving._serialize() == {"sharding_type": "ROW_WISE", "inference": True, "memory_capacity_per_rank": [1, 2]}
    with pytest.raises(ValueError, match="has 2 numbers for 3 devices"):
        TensorPoolSharder().shard(pool, serving, ShardingEnv.from_local(3, 0))
    with pytest.raises(ValueError, match="need a process group"):
        TensorPoolSharder().shard(pool, ROW_WISE, env)
    with pytest.raises(ValueError, match="is ROW_WISE"):
        TensorPoolSharder().shard(pool, ObjectPoolShardingPlan(REPLICATED.sharding_type, True), env)
    with pytest.raises(ValueError, match="is for inference"):
        ShardedTensorPool(ShardingEnv.from_local(1, 0), 7, 2, torch.float32, serving)
    with pytest.raises(ValueError, match="not all 0"):
        blank = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE, True, [0, 0])
        TensorPoolSharder().shard(pool, blank, env)
    with pytest.raises(TypeError, match="KeyedJaggedTensorPoolSharder shards KeyedJaggedTensorPool, got TensorPool"):
        KeyedJaggedTensorPoolSharder().shard(pool, ROW_WISE, env)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="ShardedKeyedJaggedTensorPool: enable_uvm=True"):
        ShardedKeyedJaggedTensorPool(
            7, LENGTHS, torch.int64, False, ShardingEnv.from_local(1, 0), ROW_WISE, enable_uvm=True
        )
