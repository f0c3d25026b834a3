"""A feature of several tables behind maps: each table gives its ids slots of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver, QConfig

from shardwise import (
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.managed_collision import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from shardwise.embeddings.quant import QuantManagedCollisionEmbeddingBagCollection
from shardwise.sharding import column_wise, construct_module_sharding_plan, row_wise, table_wise

DIM, SAMPLES = 32, 4
# "a" is smaller than what the slots of "b" may be, and they tell ids apart by other hashes
TABLES = {"a": (6, ["f"]), "b": (12, ["f", "g"])}
HASHES = {"a": lambda ids, size: ids * 7 % size, "b": lambda ids, size: ids * 11 % size}


def made(pooled: bool, *, mixed: bool = False, names: Sequence[str] = ("f", "f"), **settings: Any) -> Any:
    """`names` are those by which "a" and "b" know the feature of both."""
    torch.manual_seed(1)
    kind: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables = [
        kind(rows, DIM, name, feature_names=[known, *others])
        for known, (name, (rows, (_, *others))) in zip(names, TABLES.items(), strict=True)
    ]
    if mixed:
        tables[0].data_type = DataType.FP16
    maps = {
        name: MCHManagedCollisionModule(rows, "cpu", LRU_EvictionPolicy(), 1, 1000, HASHES[name], name=name)
        for name, (rows, _) in TABLES.items()
    }
    if pooled:
        bags = EmbeddingBagCollection(tables)
        module: nn.Module = ManagedCollisionEmbeddingBagCollection(
            bags, ManagedCollisionCollection(maps, tables), **settings
        )
    else:
        rows = EmbeddingCollection(tables)
        module = ManagedCollisionEmbeddingCollection(rows, ManagedCollisionCollection(maps, tables), **settings)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    return module


def batch(step: int, begin: int = 0, end: int = SAMPLES) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 40, (2, SAMPLES, 2), generator=draw)[:, begin:end]
    return KeyedJaggedTensor(["g", "f"], ids.flatten(), lengths=torch.full((2 * (end - begin),), 2))


def tensor_of(output: Any) -> Tensor:
    """The output of all samples, [B, ...]: the two rows of each side by side where nothing is pooled."""
    if isinstance(output, dict):
        return torch.cat([rows.values().view(-1, 2 * DIM) for rows in output.values()], 1)
    return output.values()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_each_table_looks_its_own_slots_up(pooled: bool, mixed: bool) -> None:
    module = made(pooled, mixed=mixed, return_remapped_features=True)
    for step in range(3):
        output, slots = module(batch(step))
        weights = {name.split(".")[-2]: param for name, param in module.named_parameters()}
        assert slots.keys() == ["f", "f", "g"]
        rows = [
            weights[table][ids].float() for table, ids in zip("abb", slots.values().split(2 * SAMPLES), strict=True)
        ]
        wanted = [part.view(SAMPLES, 2, DIM) for part in rows]
        looked_up = tensor_of(output)
        assert torch.equal(looked_up, torch.cat([p.sum(1) if pooled else p.flatten(1) for p in wanted], 1))
        looked_up.sum().backward()
    free = module._managed_collision_collection.open_slots()
    assert int(free["a"]) == 0


def test_quantized_tables_behind_the_maps_look_their_own_slots_up() -> None:
    module = made(True, mixed=True, return_remapped_features=True)
    for step in range(2):
        module(batch(step))
    module.eval()
    wanted, slots = module(batch(1))
    served: Any = QuantManagedCollisionEmbeddingBagCollection.from_float(_configured(module))
    output, again = served(batch(1))
    assert again.values().tolist() == slots.values().tolist()
    assert (output.values() - wanted.values()).abs().max() < 0.01


def _configured(module: nn.Module) -> nn.Module:
    observers = [PlaceholderObserver.with_args(dtype=dtype) for dtype in (torch.float, torch.qint8)]
    module.qconfig = QConfig(*observers)  # type: ignore[assignment]
    return module


def test_tables_in_another_order_than_their_maps_are_refused() -> None:
    module = made(True)
    maps = module._managed_collision_collection
    other = EmbeddingBagCollection(module._embedding_module.embedding_bag_configs()[::-1])
    with pytest.raises(ValueError, match=r"give both one order, in which the slots of \['f'\] come"):
        ManagedCollisionEmbeddingBagCollection(other, maps)


# how "a" and "b" are cut over two ranks
CUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tables": lambda: {"a": table_wise(0), "b": table_wise(1)},
    "columns": lambda: {"a": column_wise([0, 1]), "b": column_wise([1, 0])},
    "rows": lambda: {"a": row_wise(), "b": row_wise()},
    "rows and columns": lambda: {"a": row_wise(), "b": column_wise([0, 1])},
    "rows and a table": lambda: {"a": table_wise(1), "b": row_wise()},
}


def trained(pooled: bool, cuts: str = "", names: Sequence[str] = ("f", "f")) -> list[Tensor]:
    """Outputs of three steps; `names` are those by which "a" and "b" know the feature of both."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    module: Any = nn.ModuleDict({"mc": made(pooled, names=names)})
    if dist.is_initialized():
        kinds: Any = CUTS[cuts]()
        cut = construct_module_sharding_plan(module["mc"], kinds, world_size=world, device_type="cpu")
        DistributedModelParallel(module, plan=ShardingPlan({"mc": cut}))
    outputs = []
    for step in range(3):
        features = batch(step, rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
        if names[0] != names[1]:
            of_name = {"g": features["g"], **dict.fromkeys(names, features["f"])}
            features = KeyedJaggedTensor.from_jt_dict(of_name)
        output, _ = module["mc"](features)
        output = output.wait() if hasattr(output, "wait") else output
        outputs.append(tensor_of(output).detach().clone())
        # the mean over ranks of gradients that each made of a part: those of the whole
        tensor_of(output).backward(torch.ones_like(outputs[-1]) * world)
    return outputs


@pytest.mark.ranks
@pytest.mark.parametrize("cuts", ["tables", "columns"])
@pytest.mark.parametrize("pooled", [False, True])
def test_ranks_look_up_what_one_process_does(pooled: bool, cuts: str) -> None:
    alone = trained(pooled)
    ranks = run_ranks(2, trained, pooled, cuts)
    for step, wanted in enumerate(alone):
        assert torch.equal(torch.cat([of_rank[step] for of_rank in ranks]), wanted)


@pytest.mark.ranks
@pytest.mark.parametrize("cuts", ["rows", "rows and columns", "rows and a table"])
@pytest.mark.parametrize("pooled", [False, True])
def test_row_shards_look_up_what_they_do_for_features_of_their_own(pooled: bool, cuts: str) -> None:
    """Row shards map their own part of the ids, so one process gives other slots: a feature of each is the oracle."""
    shared, apart = run_ranks(2, trained, pooled, cuts), run_ranks(2, trained, pooled, cuts, ("fa", "fb"))
    for own, wanted in zip(shared, apart, strict=True):
        assert len(own) == 3 and all(map(torch.equal, own, wanted))
    changed = [not torch.equal(own[0], own[2]) for own in shared]
    assert all(changed)
