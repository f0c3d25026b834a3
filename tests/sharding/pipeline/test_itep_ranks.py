"""Pruned collections over ranks: addresses, rows and states of one process, or of one process for each range of ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.pruning import GenericITEPModule, ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from shardwise.planner.topology import Topology
from shardwise.sharding import (
    EmbeddingShardingPlanner,
    ShardingEnv,
    TrainPipelineSparseDist,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.modules.default_sharders import get_default_sharders
from shardwise.sharding.modules.itep import (
    ITEPEmbeddingBagCollectionSharder,
    ITEPEmbeddingCollectionSharder,
    ShardedITEPEmbeddingBagCollection,
    ShardedITEPEmbeddingCollection,
)

ROWS, IDS, DIM, SAMPLES, STEPS, INTERVAL = {"a": 12, "b": 8}, {"a": 90, "b": 60}, 64, 8, 13, 6
FEATURES = {"a": ["f", "g"], "b": ["h"]}
SHARDERS: list[Any] = [ITEPEmbeddingBagCollectionSharder(), ITEPEmbeddingCollectionSharder()]
ADDRESSES = "itep._itep_module.{}_itp_address_lookup"


class Net(nn.Module):
    """Two pruned tables; in `parts` each of them is as many tables, as row shards have it, of ranges of its ids."""

    def __init__(self, pooled: bool, parts: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
        whole = {name: torch.randn(rows, DIM) / 8 for name, rows in ROWS.items()}
        tables, sizes = [], {}
        for name, rows in ROWS.items():
            for suffix in parts_of(parts):
                features = [feature + suffix for feature in FEATURES[name]]
                tables.append(config(rows // parts, DIM, name + suffix, feature_names=features))
                sizes[name + suffix] = IDS[name] // parts
        collection: Any = EmbeddingBagCollection(tables) if pooled else EmbeddingCollection(tables)
        values = [piece for rows in whole.values() for piece in rows.chunk(parts)]
        with torch.no_grad():
            for param, piece in zip(collection.parameters(), values, strict=True):
                param.copy_(piece)
        apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
        make: Any = ITEPEmbeddingBagCollection if pooled else ITEPEmbeddingCollection
        self.itep = make(collection, GenericITEPModule(sizes, pruning_interval=INTERVAL))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        output = self.itep(features)
        values = {name: output[name] for name in output.keys()}  # noqa: SIM118
        return {name: value if isinstance(value, Tensor) else value.values() for name, value in values.items()}


def batch_of(step: int, begin: int = 0, end: int = SAMPLES) -> KeyedJaggedTensor:
    """Samples [begin, end) of a batch whose hot ids drift, with a feature that nothing looks up."""
    draw = torch.Generator().manual_seed(step)
    keys = ["h", "x", "g", "f"]
    lengths = torch.randint(0, 5, (len(keys), SAMPLES), generator=draw)
    hot = (torch.rand(len(keys), SAMPLES, 5, generator=draw) ** 3 * 60).long()
    limits = torch.tensor([IDS["b"], 5, IDS["a"], IDS["a"]])[:, None, None]
    ids = (hot * 7 + step) % limits
    values = [ids[k, b, : int(lengths[k, b])] for k in range(len(keys)) for b in range(begin, end)]
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=lengths[:, begin:end].flatten())


def in_ranges(batch: KeyedJaggedTensor, parts: int) -> KeyedJaggedTensor:
    """Each feature as several, of the ids of a range, counted from its first."""
    keys, values, lengths = [], [], []
    for table, features in FEATURES.items():
        block = IDS[table] // parts
        for feature in features:
            bags = batch[feature].to_dense()
            for part in range(parts):
                kept = [bag[bag // block == part] - part * block for bag in bags]
                keys.append(f"{feature}{part}")
                values.append(torch.cat(kept))
                lengths += [bag.numel() for bag in kept]
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.tensor(lengths))


def loss_of(outputs: dict[str, Tensor]) -> Tensor:
    return torch.stack([value.pow(2).sum() + value.sum() for value in outputs.values()]).sum()


def train(model: Any, pooled: bool, steps: range, part: tuple[int, int], ranks: int = 1) -> list[dict[str, Tensor]]:
    """Outputs in training steps, whose loss is that of the whole batch."""
    outputs = []
    for step in steps:
        output = model(batch_of(step, *part))
        (loss_of(output) * ranks).backward()
        outputs.append({name: value.detach().clone() for name, value in output.items()})
    return outputs


def span() -> tuple[int, int]:
    per_rank = SAMPLES // dist.get_world_size()
    return dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank


KINDS: dict[str, Any] = {
    "columns": lambda: {"a": column_wise([0, 1]), "b": table_wise(1)},
    "row_wise": lambda: {"a": row_wise(), "b": row_wise()},
    "table_row_wise": lambda: {"a": table_row_wise(0), "b": table_row_wise(0)},
    "replicas": lambda: {"a": data_parallel(), "b": table_wise(0)},
}


def sharded(pooled: bool, kind: str) -> Any:
    model = Net(pooled)
    cut = construct_module_sharding_plan(
        model.itep, KINDS[kind](), sharder=SHARDERS[not pooled], world_size=dist.get_world_size(), device_type="cpu"
    )
    dmp = DistributedModelParallel(model, plan=ShardingPlan({"itep": cut}), sharders=SHARDERS)
    assert isinstance(model.itep, ShardedITEPEmbeddingBagCollection if pooled else ShardedITEPEmbeddingCollection)
    # it did not know its path, which every sharded module says
    assert model.itep.module_fqn == "itep"
    return dmp


def whole_of(value: Any) -> Tensor:
    """A value of a state dict as one tensor, from the pieces of all ranks."""
    if not hasattr(value, "local_shards"):
        return value.clone()  # type: ignore[no-any-return]
    pieces: list[Any] = [None] * dist.get_world_size()
    local = [(piece.metadata.shard_offsets, piece.tensor.clone()) for piece in value.local_shards()]
    dist.all_gather_object(pieces, local)
    whole = torch.zeros(value.size(), dtype=value.dtype)
    for offsets, piece in (one for of_rank in pieces for one in of_rank):
        whole[tuple(slice(at, at + n) for at, n in zip(offsets, piece.shape, strict=True))] = piece
    return whole


def parts_of(parts: int) -> list[str]:
    return [f"{part}" for part in range(parts)] if parts > 1 else [""]


def check_one_plan(pooled: bool, kind: str, reload: bool) -> None:
    """Outputs of this rank's samples, tables, addresses and utilizations after all steps."""
    dmp, world = sharded(pooled, kind), dist.get_world_size()
    half = range(STEPS // 2)
    outputs = train(dmp, pooled, half, span(), world)
    if reload:
        other = sharded(pooled, kind)
        train(other, pooled, range(3), span(), world)
        other.load_state_dict(dmp.state_dict())
        other.fused_optimizer.load_state_dict(dmp.fused_optimizer.state_dict())
        dmp = other
    outputs += train(dmp, pooled, range(half.stop, STEPS), span(), world)
    state = {name: whole_of(value) for name, value in dmp.state_dict().items()}
    assert int(state["itep._iter"]) == STEPS
    parts = world if "row" in kind else 1
    reference = Net(pooled, parts)
    for step in range(STEPS):
        whole = batch_of(step)
        features = in_ranges(whole, parts) if parts > 1 else whole
        found = reference(features)
        if pooled:
            # of a bag whose ids lie in several ranges each has a part of the sum
            by_name = {name: [found[name + part] for part in parts_of(parts)] for name in "fgh"}
            found = {name: torch.stack(tensors).sum(0) for name, tensors in by_name.items()}
            for name, value in found.items():
                assert_close(outputs[step][name], value[slice(*span())], rtol=1e-5, atol=1e-6)
        loss_of(found).backward()
    check_state(state, reference.state_dict(), pooled, parts)


def check_state(state: dict[str, Tensor], wanted: dict[str, Tensor], pooled: bool, parts: int) -> None:
    where = "itep._embedding_bag_collection.embedding_bags" if pooled else "itep._embedding_collection.embeddings"
    for name in ROWS:
        names = [name + part for part in parts_of(parts)]
        rows = torch.cat([wanted[f"{where}.{one}.weight"] for one in names])
        assert_close(state[f"{where}.{name}.weight"], rows, rtol=1e-5, atol=1e-6)
        # addresses are rows of the whole table
        addresses = [wanted[ADDRESSES.format(one)] + number * (ROWS[name] // parts) for number, one in enumerate(names)]
        key = ADDRESSES.format(name)
        # column blocks of a table have one copy each
        for copy in state[key].split(IDS[name]):
            assert copy.tolist() == torch.cat(addresses).tolist()
        used = torch.cat([wanted[ADDRESSES.format(one).replace("address_lookup", "row_util")] for one in names])
        for copy in state[key.replace("address_lookup", "row_util")].split(IDS[name]):
            assert_close(copy, used, rtol=0, atol=0)
        assert (torch.cat(addresses) != torch.arange(IDS[name])).any()


def check_pipeline() -> None:
    """A pipeline gives steps their rows as a loop does, though ids of a batch come before the last one's update."""
    plain, piped = sharded(True, "row_wise"), sharded(True, "row_wise")
    train(plain, True, range(9), span(), 1)

    class WithLoss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
            output = self.model(batch)
            loss = loss_of(output)
            return loss, loss.detach()

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    pipeline: Any = TrainPipelineSparseDist(WithLoss(piped), optimizer, torch.device("cpu"))
    batches = iter([batch_of(step, *span()) for step in range(9)])
    for _ in range(9):
        pipeline.progress(batches)
    for (name, value), other in zip(plain.state_dict().items(), piped.state_dict().values(), strict=True):
        assert_close(whole_of(other), whole_of(value), rtol=0, atol=0, msg=name)


def on_ranks() -> dict[str, str]:
    world = dist.get_world_size()
    for pooled, kind in ((True, "columns"), (True, "row_wise"), (True, "table_row_wise"), (False, "row_wise")):
        check_one_plan(pooled, kind, reload=kind != "table_row_wise")
    check_pipeline()
    model, planned = Net(True), EmbeddingShardingPlanner(topology=Topology(world_size=world, compute_device="cpu"))
    dmp = DistributedModelParallel(
        model, plan=planned.collective_plan(model, SHARDERS), sharders=[*SHARDERS, *get_default_sharders()]
    )
    dmp(batch_of(0, *span()))
    bad = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([IDS["a"]]), lengths=torch.tensor([1, 0, 0]))
    whole = Net(True)
    train(whole, True, range(4), (0, SAMPLES))
    rows = sharded(True, "row_wise")
    state = {**dmp.state_dict(), **whole.state_dict()}
    return {
        "an id outside": error_of(dmp, bad if dist.get_rank() == world - 1 else batch_of(0)),
        "replicas": error_of(sharded, True, "replicas"),
        "addresses of one process for row shards": error_of(rows.load_state_dict, state),
    }


@pytest.mark.ranks
def test_pruned_tables_over_two_ranks_are_those_of_one_process() -> None:
    """Every plan, pooled rows and rows by id, a state that is loaded, a pipeline, a planner; and what is refused."""
    for errors in run_ranks(2, on_ranks):
        assert "rank 1: feature 'f' (table 'a'), sample 0: id 90 is outside [0, 90)" in errors["an id outside"]
        assert "replicas of it would be pruned apart" in errors["replicas"]
        assert "has rows outside of" in errors["addresses of one process for row shards"]


def test_a_trained_pruning_goes_on_where_its_table_stays_whole() -> None:
    """A process that is sharded later: tables that stay whole keep their addresses, utilizations and iteration."""
    model, wanted = Net(True), Net(True)
    for one in (model, wanted):
        for step in range(6):
            # without an update: states of optimizers begin anew where a table is sharded
            one(batch_of(step))
    env = ShardingEnv.from_local(1, 0)
    cut = construct_module_sharding_plan(
        model.itep, {"a": table_wise(0), "b": row_wise()}, sharder=SHARDERS[0], world_size=1, device_type="cpu"
    )
    dmp = DistributedModelParallel(model, env=env, plan=ShardingPlan({"itep": cut}), sharders=SHARDERS)
    for one in (dmp, wanted):
        train(one, True, range(6, STEPS), (0, SAMPLES))
    state, expected = dmp.state_dict(), wanted.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_a_collection_that_is_sharded_without_its_pruning_is_refused() -> None:
    """The default sharders know the collection inside alone, which would take rows for ids."""
    model = Net(True)
    dmp = DistributedModelParallel(model, env=ShardingEnv.from_local(1, 0), sharders=get_default_sharders())
    with pytest.raises(TypeError, match="give DistributedModelParallel the ITEPEmbeddingBagCollectionSharder too"):
        dmp(batch_of(0))


def test_sharders_say_what_they_serve() -> None:
    bags = SHARDERS[0]
    assert bags.module_type is ITEPEmbeddingBagCollection
    assert bags.sharded_module_type is ShardedITEPEmbeddingBagCollection
    served = ["table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise"]
    assert sorted(bags.sharding_types("cpu")) == sorted(served)
    assert list(bags.shardable_parameters(Net(True).itep)) == ["a", "b"]
