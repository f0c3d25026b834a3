"""2D parallelism on four ranks: two replicas of tables that two ranks hold together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from jagged_batches import random_kjt
from model_zoo import bag_tables
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.sharding import (
    ShardingType,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from shardwise.sharding.comms.env import ShardingEnv2D, ShardingStrategy, intra_and_cross_node_pg_2D
from shardwise.sharding.dmp.dmp_collection import DMPCollection, DMPCollectionConfig

pytestmark = pytest.mark.ranks

ROWS = {"a": 13, "b": 11, "c": 7, "d": 6, "e": 5}
SAMPLES, WORLD, GROUP, STEPS = 8, 4, 2, 4
# ranks of each sharding group
APART, TOGETHER = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


class Net(nn.Module):
    """Tables of two dtypes, `te` without an optimizer, sequences, and a dense layer."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = bag_tables(ROWS)
        tables[2].data_type = DataType.FP16
        self.ebc = EmbeddingBagCollection(tables)
        self.ec = EmbeddingCollection([EmbeddingConfig(ROWS["a"], 8, "sa", feature_names=["a"])])
        self.dense = nn.Linear(40, 3)
        kind, kwargs = OPTIMIZERS[optimizer]
        for name, param in self.named_parameters():
            if "te" not in name and "dense" not in name:
                apply_optimizer_in_backward(kind, [param], {**kwargs, "stochastic_rounding": False})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.dense(self.ebc(features).values()).tanh().sum(1)
        # the first id of a bag, or none
        rows = self.ec(features)["a"].to_padded_dense(1).flatten(1).sum(1)
        return (pooled + rows.sin()).square().mean()


def batch_of(step: int, ranks: Sequence[int] | None = None) -> KeyedJaggedTensor:
    """The samples of some ranks, of this one unless told."""
    chosen = [dist.get_rank()] if ranks is None else ranks
    return random_kjt(ROWS, SAMPLES, seed=step, of=[2 * rank + n for rank in chosen for n in range(2)])


def plan_for(model: Net) -> ShardingPlan:
    """For the two ranks of a sharding group."""
    where = {
        "ta": row_wise(), "tb": column_wise([1, 0]), "tc": table_wise(1), "td": data_parallel(), "te": data_parallel(),
    }  # fmt: skip
    size: dict[str, Any] = {"world_size": GROUP, "local_size": GROUP, "device_type": "cpu"}
    return ShardingPlan({
        "ebc": construct_module_sharding_plan(model.ebc, where, **size),
        "ec": construct_module_sharding_plan(model.ec, {"sa": row_wise()}, **size),
    })  # fmt: skip


def build(optimizer: str = "sgd", seed: int | None = None, **settings: Any) -> DMPCollection:
    model = Net(optimizer)
    if seed is not None:
        torch.manual_seed(seed)
        for param in model.parameters():
            nn.init.normal_(param)
    assert dist.group.WORLD is not None
    options = {"sharding_group_size": GROUP, **settings}
    return DMPCollection(model, "cpu", plan_for(model), WORLD, global_pg=dist.group.WORLD, **options)


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if "dense" in name or "te" in name]


def state_of(model: Any) -> dict[str, Tensor]:
    """Weights, and optimizer states of tables, that this rank holds."""
    state = {name: param.detach().clone() for name, param in model.named_parameters()}
    for path, sharded in model._sharded.items():
        for group in sharded._tables.groups:
            for number, table in enumerate(group.tables):
                states = group.state_views(number)
                state.update({f"{path}.{table.name}.{number}.{key}": value.clone() for key, value in states.items()})
    return state


def train(optimizer: str, sync: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, list[Any]], int]:
    """Each rank's state in the end, where its shards of tables lie, and its number in its sharding group."""
    dmp = build(optimizer, **settings)
    dense = torch.optim.SGD(dense_parameters(dmp), lr=0.1)
    for step in range(STEPS):
        dense.zero_grad()
        dmp(batch_of(step)).backward()
        dense.step()
        if sync != "never":
            dmp.sync(include_optimizer_state=sync == "all")
    shards = {
        f"{path}.{shard.table}": [shard.rows, shard.cols]
        for path, sharded in dmp._sharded.items()
        for part in sharded._tables.members
        for shard in part.shards
    }
    assert isinstance(dmp._env, ShardingEnv2D)
    return state_of(dmp), shards, dmp._env.rank


def replicas(
    optimizer: str, sync: str, groups: list[list[int]], steps: int = STEPS, dense_lr: float = 0.1
) -> list[dict[str, Tensor]]:
    """The weights of one process for each replica, which the test averages itself."""
    models = [Net(optimizer) for _ in groups]
    dense = [torch.optim.SGD(dense_parameters(model), lr=dense_lr) for model in models]
    for step in range(steps):
        for model, ranks in zip(models, groups, strict=True):
            model.zero_grad()
            model(batch_of(step, ranks)).backward()
        average([[param.grad for param in dense_parameters(model)] for model in models])
        for sgd in dense:
            sgd.step()
        if sync != "never":
            collections = [[model.ebc, model.ec] for model in models]
            average(
                [
                    [group.flat for collection in of_model for group in collection._groups if group.optimizer]
                    for of_model in collections
                ]
            )
            if sync == "all":
                average(
                    [
                        [state for collection in of_model for group in collection._groups for state in group.states]
                        for of_model in collections
                    ]
                )
    return [dict(model.state_dict()) for model in models]


def tolerance(name: str) -> float:
    """The fp16 table is rounded once more where replicas are averaged, and the others see its rows."""
    return 2e-3 if "tc" in name else 2e-5


@torch.no_grad()
def average(of_models: list[list[Any]]) -> None:
    for tensors in zip(*of_models, strict=True):
        mean = torch.stack([tensor.float() for tensor in tensors]).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)


def expect_replicas(optimizer: str, sync: str, settings: dict[str, Any], groups: list[list[int]]) -> list[Any]:
    ranks = run_ranks(WORLD, train, optimizer, sync, settings)
    for members, wanted in zip(groups, replicas(optimizer, sync, groups), strict=True):
        for number, rank in enumerate(members):
            state, shards, place = ranks[rank]
            assert place == number
            for name, value in wanted.items():
                collection, _, table = name.removesuffix(".weight").rpartition(".")
                key = f"{collection.split('.')[0]}.{table}"
                if "embedding" in name and key not in shards:
                    assert state[name].numel() == 0
                    continue
                whole = [(0, value.shape[0]), (0, value.shape[-1])]
                rows, cols = shards.get(key, whole) if "embedding" in name else whole
                cut = value[slice(*rows), slice(*cols)] if value.dim() == 2 else value
                assert (state[name].float() - cut.float()).abs().max() <= tolerance(name), name
    return ranks


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sync", ["all", "weights", "never"])
def test_replicas_train_apart_and_are_averaged(optimizer: str, sync: str) -> None:
    ranks = expect_replicas(optimizer, sync, {}, APART)
    for rank, peer in zip(*APART, strict=True):
        state, twin = ranks[rank][0], ranks[peer][0]
        differ = {name for name, value in state.items() if not torch.equal(value, twin[name])}
        if sync == "all":
            assert differ == set()
        elif sync == "weights" and optimizer == "adagrad":
            assert differ
            assert all("momentum" in name for name in differ)
        elif sync == "never":
            assert any("embedding" in name for name in differ)
            assert not any("dense" in name or "te.weight" in name for name in differ)


def test_with_sgd_and_a_sync_each_step_the_replicas_are_one_process() -> None:
    """The mean of W - lr g over replicas is one step by the mean of g."""
    together = replicas("sgd", "all", [[0, 1, 2, 3]])[0]
    apart = replicas("sgd", "all", APART)[0]
    for name, value in together.items():
        assert (value.float() - apart[name].float()).abs().max() <= tolerance(name), name
    expect_replicas("sgd", "all", {}, APART)


def test_groups_of_consecutive_ranks_average_over_hosts() -> None:
    expect_replicas("adagrad", "all", {"use_inter_host_allreduce": True}, TOGETHER)


def layout(inter_host: bool) -> list[Any]:
    dmp = build(use_inter_host_allreduce=inter_host, node_group_size=1)
    env = dmp._env
    assert isinstance(env, ShardingEnv2D)
    assert (env.world_size, env.global_world_size, env.global_rank) == (2, 4, dist.get_rank())
    assert env.num_sharding_groups() == 2
    # every rank's place in its own sharding group
    assert env.remap_rank(env.global_rank, ShardingType.TABLE_WISE) == env.rank
    places = [env.remap_rank(rank, "grid_shard") for rank in range(4)]
    assert places == ([0, 1, 0, 1] if inter_host else [0, 0, 1, 1])
    with pytest.raises(ValueError, match="for table_wise, column_wise and grid_shard, got 'row_wise'"):
        env.remap_rank(0, ShardingType.ROW_WISE)
    with pytest.raises(ValueError, match="rank must be one of 4, got 4"):
        env.remap_rank(4, "column_wise")
    # the plan that was given is that of every group, with the ranks of a group
    assert dmp.plan.plan["ebc"]["ta"].ranks == [0, 1]
    pairs = [env.sharding_pg, env.replica_pg, *intra_and_cross_node_pg_2D(env), env.data_parallel_group]
    assert env.device_mesh is not None
    return [env.device_mesh.mesh.tolist(), *(dist.get_process_group_ranks(pg) for pg in pairs)]


@pytest.mark.parametrize("inter_host", [False, True])
def test_ranks_of_sharding_and_replica_groups(inter_host: bool) -> None:
    groups = TOGETHER if inter_host else APART
    twins = [list(pair) for pair in zip(*groups, strict=True)]
    for rank, (mesh, sharding, replica, intra, cross, everyone) in enumerate(run_ranks(WORLD, layout, inter_host)):
        assert mesh == groups
        assert sharding == cross == next(group for group in groups if rank in group)
        assert replica == next(pair for pair in twins if rank in pair)
        assert (intra, everyone) == ([rank], [0, 1, 2, 3])


def unequal() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    dmp = build(seed=dist.get_rank())
    before = state_of(dmp)
    dmp.sync()
    return before, state_of(dmp)


def test_replicas_begin_equal_whatever_the_seeds() -> None:
    ranks = run_ranks(WORLD, unequal)
    for rank, twin in ((0, 1), (2, 3)):
        for name, value in ranks[rank][0].items():
            assert torch.equal(value, ranks[twin][0][name]), name
            assert torch.equal(value, ranks[rank][1][name]), name


def hooked() -> tuple[list[list[str]], bool]:
    calls: list[list[str]] = []

    def only_look(tensors: list[Tensor]) -> None:
        calls.append(sorted({str(tensor.dtype) for tensor in tensors}))

    dmp = build("adagrad", custom_all_reduce=only_look)
    dmp(batch_of(0)).backward()
    before = state_of(dmp)
    dmp.sync()
    same = all(torch.equal(value, before[name]) for name, value in state_of(dmp).items())

    def forget(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.zero_()

    dmp.set_all_reduce_hook(forget)
    dmp.sync()
    tables = [value for name, value in state_of(dmp).items() if "embedding" in name and "te.weight" not in name]
    assert not any(value.any() for value in tables)
    return calls, same


def test_a_hook_takes_the_place_of_the_all_reduce() -> None:
    for rank, (calls, same) in enumerate(run_ranks(WORLD, hooked)):
        # of the second rank of each group, which has the fp16 table
        halves = [["torch.float16"]] if rank in (2, 3) else []
        assert sorted(calls) == sorted([["torch.float32"], *halves, ["torch.float32"]])
        assert same


def by_class() -> tuple[list[int], dict[str, Tensor]]:
    model = Net("sgd")
    plan = plan_for(model)
    del plan.plan["ec"]
    whole = construct_module_sharding_plan(model.ec, {"sa": row_wise()}, world_size=4, local_size=4, device_type="cpu")
    assert dist.group.WORLD is not None
    config = DMPCollectionConfig(EmbeddingCollection, ShardingPlan({"ec": whole}), sharding_group_size=4)
    dmp = DMPCollection(model, "cpu", plan, WORLD, GROUP, dist.group.WORLD, submodule_configs=[config])
    dmp(batch_of(0)).backward()
    dmp.sync()
    sizes = [module._env.world_size for module in dmp._sharded.values()]
    return sizes, state_of(dmp)


def test_a_class_of_modules_can_have_groups_of_its_own() -> None:
    model = Net("sgd")
    model(batch_of(0, range(WORLD))).backward()
    wanted = model.ec.state_dict()["embeddings.sa.weight"]
    ranks = run_ranks(WORLD, by_class)
    assert [sizes for sizes, _ in ranks] == [[2, 4]] * 4
    weight = torch.cat([state["ec.embeddings.sa.weight"] for _, state in ranks])
    assert (weight - wanted).abs().max() <= 1e-5


def checkpoint(folder: str) -> dict[str, Tensor]:
    """Trained and saved by all four ranks; read again by one process."""
    dmp = build()
    dmp(batch_of(0)).backward()
    dmp.sync()
    torch.distributed.checkpoint.save(dmp.state_dict(), checkpoint_id=folder)
    model: Any = Net("sgd")
    for param in model.parameters():
        nn.init.zeros_(param)
    state = model.state_dict()
    torch.distributed.checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    restored = build(seed=7)
    loaded = restored.state_dict()
    torch.distributed.checkpoint.load(loaded, checkpoint_id=folder)
    restored.load_state_dict(loaded)
    assert all(torch.equal(param, dict(dmp.named_parameters())[name]) for name, param in restored.named_parameters())
    return state


def test_replicas_are_saved_once_and_loaded_by_all(tmp_path: Path) -> None:
    wanted = replicas("sgd", "all", APART, steps=1, dense_lr=0.0)[0]
    for state in run_ranks(WORLD, checkpoint, str(tmp_path)):
        for name, value in wanted.items():
            assert (state[name].float() - value.float()).abs().max() <= tolerance(name), name


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "group": ({"sharding_group_size": 3}, "sharding_group_size 3 does not divide 4 ranks"),
    "host": ({"node_group_size": 3}, "node_group_size 3 does not divide sharding_group_size 2"),
    "hook without means": ({"rs_awaitable_hook_module": "dense"}, "'dense': nothing is reduce-scattered"),
    "hook of nothing": ({"rs_awaitable_hook_module": "ebc.ta"}, "'ebc.ta' is none of the model's children ['ebc'"),
    "relay": ({"use_sharded_relay": True}, "use_sharded_relay is not served"),
}


def refuse() -> list[str]:
    messages = []
    for settings, _ in REFUSED.values():
        with pytest.raises(ValueError) as error:
            build(**settings)
        messages.append(str(error.value))
    model = Net("sgd")
    assert dist.group.WORLD is not None
    with pytest.raises(ValueError, match="world_size 8 is not that of global_pg, 4"):
        DMPCollection(model, "cpu", plan_for(model), 8, 2, dist.group.WORLD)
    # PER_MODULE is what submodule_configs say
    build(sharding_strategy=ShardingStrategy.PER_MODULE)
    return messages


def test_what_is_not_served_is_refused_by_name() -> None:
    for messages in run_ranks(WORLD, refuse):
        for message, (_, wanted) in zip(messages, REFUSED.values(), strict=True):
            assert wanted in message
