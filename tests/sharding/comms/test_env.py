"""Environments whose hosts are an axis of a mesh or a part of a sharding group, and means over ranks."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from model_zoo import bag_tables
from ranks import error_of, run_ranks, world_group
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import EmbeddingBagCollection, KeyedJaggedTensor, ShardingEnv, ShardingPlan
from shardwise.sharding import (
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.comms.env import (
    ShardingEnv2D,
    get_node_group_size,
    get_topology_domain_multiple,
    get_topology_group_world_size,
    intra_and_cross_node_pg,
    intra_and_cross_node_pg_2D,
)
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.dmp.composable import shard
from shardwise.sharding.dmp.dmp_collection import DMPCollection
from shardwise.sharding.modules.sharded_collections import ShardedEmbeddingBagCollection

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:tables")]

ROWS = {"a": 13, "b": 11, "c": 7, "d": 6, "e": 5}
WORLD = 4
# on two hosts of two ranks
WHERE: dict[str, Any] = {
    "ta": table_row_wise(1), "tb": grid_shard([0, 1]), "tc": row_wise(), "td": data_parallel(), "te": table_wise(3),
}  # fmt: skip


def bags() -> EmbeddingBagCollection:
    torch.manual_seed(3)
    return EmbeddingBagCollection(bag_tables(ROWS))


def batch_of(rank: int) -> KeyedJaggedTensor:
    return random_kjt(ROWS, 2, seed=rank)


def on_mesh() -> list[Tensor]:
    outputs = []
    mesh_env = ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local")))
    assert (mesh_env.world_size, mesh_env.rank, mesh_env.local_world_size) == (4, dist.get_rank(), 2)
    for env in (mesh_env, ShardingEnv.from_process_group(mesh_env.process_group, local_world_size=2)):  # type: ignore[arg-type]
        sharded = shard(bags(), WHERE, env, "cpu")
        assert isinstance(sharded, ShardedEmbeddingBagCollection)
        assert sharded._routes.has_host_sums
        outputs.append(sharded(batch_of(dist.get_rank())).values())
        outputs[-1].sum().backward()
    return [output.detach() for output in outputs]


def test_hosts_can_be_an_axis_of_a_mesh() -> None:
    for rank, (by_mesh, by_size) in enumerate(run_ranks(4, on_mesh)):
        wanted = bags()(batch_of(rank)).values()
        assert torch.equal(by_mesh, by_size)
        assert (by_mesh - wanted).abs().max() <= 1e-6


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    assert group is not None
    return dist.get_process_group_ranks(group)


def part_of_mesh() -> tuple[list[int], list[int], int, str, str]:
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replica", "host", "local"))
    env = ShardingEnv.from_mesh(cube["host", "local"])
    swapped = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("host", "local"))
    axes, order = (error_of(ShardingEnv.from_mesh, mesh) for mesh in (cube, swapped))
    return ranks_of(env.process_group), ranks_of(env.local_group()), env.rank, axes, order


def test_an_env_can_be_part_of_a_larger_mesh() -> None:
    for rank, (group, local, number, axes, order) in enumerate(run_ranks(4, part_of_mesh)):
        assert group == ([0, 1] if rank < 2 else [2, 3])
        assert (local, number) == ([rank], rank % 2)
        assert axes.startswith("ValueError") and order.startswith("ValueError")
        assert "has the axes ('host', 'local'), got ('replica', 'host', 'local')" in axes
        assert "must list ranks as they rise" in order


def hosts_inside(inter_host: bool) -> tuple[Tensor, list[int]]:
    model = bags()
    of_module = construct_module_sharding_plan(model, WHERE, world_size=4, local_size=2, device_type="cpu")
    dmp = DMPCollection(
        model, "cpu", ShardingPlan({"": of_module}), WORLD, 4, world_group(), node_group_size=2,
        use_inter_host_allreduce=inter_host,
    )  # fmt: skip
    assert dmp._sharded[""]._routes.has_host_sums
    dmp.sync()
    return dmp(batch_of(dist.get_rank())).values().detach(), ranks_of(dmp._env.local_group())


@pytest.mark.parametrize("inter_host", [False, True])
def test_a_sharding_group_has_hosts(inter_host: bool) -> None:
    for rank, (output, host) in enumerate(run_ranks(WORLD, hosts_inside, inter_host)):
        assert host == ([0, 1] if rank < 2 else [2, 3])
        assert (output - bags()(batch_of(rank)).values()).abs().max() <= 1e-6


def means() -> tuple[list[Tensor], int]:
    rank = dist.get_rank()
    exchange = Exchange(dist.group.WORLD)
    matrix = torch.arange(12.0).view(3, 4)
    tensors = [
        torch.full((2, 3), float(rank)), matrix.t() * rank, torch.full((5,), 60000.0 + 32 * rank, dtype=torch.float16),
        torch.empty(0), torch.tensor([1.5 * rank], dtype=torch.float64),
    ]  # fmt: skip
    copies = copy.deepcopy(tensors)
    exchange.mean(tensors)
    Exchange(None).mean(copies)
    return tensors, exchange.calls


def test_means_are_packed_by_dtype_and_halves_do_not_overflow() -> None:
    """The sum of four fp16 numbers near 60,000 is infinite in fp16, their mean is not."""
    for tensors, calls in run_ranks(WORLD, means):
        assert calls == 3
        assert tensors[0].tolist() == [[1.5] * 3] * 2
        assert torch.equal(tensors[1], torch.arange(12.0).view(3, 4).t() * 1.5)
        assert tensors[2].tolist() == [60032.0] * 5 or tensors[2].tolist() == [60064.0] * 5
        assert tensors[4].tolist() == [2.25]


POD, HOST = "TORCHREC_RESOLVED_POD_SIZE", "LOCAL_WORLD_SIZE"


def test_a_pod_is_as_many_hosts_as_the_scheduler_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (POD, "TOPOLOGY_DOMAIN_MULTIPLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(HOST, "2")
    assert (get_topology_group_world_size(8), get_topology_domain_multiple()) == (2, None)
    monkeypatch.setenv(POD, "2")
    monkeypatch.setenv("TOPOLOGY_DOMAIN_MULTIPLE", "3")
    assert (get_topology_group_world_size(8), get_topology_domain_multiple()) == (4, 3)
    with pytest.raises(
        ValueError, match=r"World size 6 is not a multiple of the topology group: 2 hosts .* of 2 ranks"
    ):
        get_topology_group_world_size(6)
    monkeypatch.setenv(POD, "0")
    with pytest.raises(ValueError, match="number of hosts above 0, got '0'"):
        get_topology_group_world_size(8)


def groups_of_pods() -> tuple[list[list[int]], list[int]]:
    """On hosts of one rank, two of them a pod: its groups, and the ranks of a host before and after those of 2D."""
    of_2d = patch("shardwise.sharding.comms.env._node_group_size", None)
    with of_2d, patch.dict("os.environ", {HOST: "1", POD: "2"}):
        pods = [ranks_of(group) for group in intra_and_cross_node_pg()]
        before = get_node_group_size()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
        env = ShardingEnv2D(mesh.get_group(1), mesh.get_group(0), world_group(), mesh, 2)
        intra_and_cross_node_pg_2D(env)
        return pods, [before, get_node_group_size()]


def test_groups_of_hosts_are_those_of_pods() -> None:
    assert run_ranks(WORLD, groups_of_pods) == [
        ([[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]], [1, 2]) for rank in range(WORLD)
    ]
