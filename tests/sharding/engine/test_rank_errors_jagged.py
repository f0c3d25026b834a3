"""Faults 6-9, 15, 17 and 27 over real gloo ranks: bags that do not fit, no ids, keys in another order on one of them.

A sharded collection finds a feature by its name on the rank that has the batch, before anything is sent; tables and
their features travel as numbers, so ranks must agree on their order, which construction compares.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import kjt as kjt_of, random_kjt
from ranks import error_of, run_ranks
from sharding_steps import local_tensors
from torch import Tensor

from shardwise import (
    BoundsCheckMode,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    LookupPolicy,
    RowWiseAdagrad,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.sharding import construct_module_sharding_plan, data_parallel, table_wise

pytestmark = pytest.mark.ranks

# features that share a table, tables that share a feature, one rank each and both
FEATURES = {"t1": ["f1", "f2"], "t2": ["f3", "f1"], "t3": ["f4"]}
KEYS = ["f1", "f2", "f3", "f4"]
ROWS = 9
ORDERS = {
    "turned round": ["f4", "f3", "f2", "f1"],
    "features of one table swapped": ["f2", "f1", "f3", "f4"],
    "features of two tables swapped": ["f1", "f3", "f2", "f4"],
    "others between": ["x", "f3", "y", "f1", "f4", "f2"],
}


def collection(
    kind: str, features: dict[str, list[str]] | None = None, mode: BoundsCheckMode = BoundsCheckMode.FATAL
) -> Any:
    torch.manual_seed(3)
    named, policy = (features or FEATURES).items(), LookupPolicy(mode)
    if kind == "rows":
        rows = [EmbeddingConfig(ROWS, 4, name, feature_names=list(keys)) for name, keys in named]
        return EmbeddingCollection(rows, policy=policy)
    bags = [EmbeddingBagConfig(ROWS, 4, name, feature_names=list(keys)) for name, keys in named]
    return EmbeddingBagCollection(bags, is_weighted=kind == "weighted bags", policy=policy)


def sharded(module: Any) -> DistributedModelParallel:
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.5})
    where: dict[str, Any] = {"t1": table_wise(0), "t2": table_wise(1), "t3": data_parallel()}
    plan = construct_module_sharding_plan(module, where, world_size=dist.get_world_size())
    return DistributedModelParallel(module, plan=ShardingPlan({"": plan}))


def batch_of(step: int, rank: int, samples: int = 3, longest: int = 3) -> KeyedJaggedTensor:
    """Every feature with ids of its own: had two been mixed up it would be seen."""
    return random_kjt(dict.fromkeys(KEYS, ROWS), samples, seed=100 * step + rank, longest=longest, weighted=True)


def in_order(kjt: KeyedJaggedTensor, keys: list[str]) -> KeyedJaggedTensor:
    """The batch with its keys in another order; keys that it has not get an id that no table has."""
    unknown = [key for key in keys if key not in KEYS]
    if unknown:
        others = kjt_of(
            dict.fromkeys(unknown, [[10**6]] * kjt.stride()), weights=torch.ones(kjt.stride() * len(unknown))
        )
        kjt = KeyedJaggedTensor.concat([kjt, others])
    return kjt.permute([kjt.keys().index(key) for key in keys])


def values_of(out: Any) -> Tensor:
    return torch.cat([jt.values() for jt in out.values()]) if isinstance(out, dict) else out.values()


def train(kind: str, order: list[str]) -> list[Tensor]:
    """Outputs of three steps and the tables after them; rank 1 has its keys in `order`."""
    dmp, tensors = sharded(collection(kind)), []
    for number in range(3):
        kjt = batch_of(number, dist.get_rank())
        out = dmp(in_order(kjt, order) if dist.get_rank() == 1 else kjt)
        if isinstance(out, dict):
            tensors += [out[key].lengths() for key in sorted(out)]
        values = values_of(out)
        values.backward(torch.arange(float(values.numel())).view(values.shape))
        tensors.append(values.detach())
    return [*tensors, *local_tensors(dmp.state_dict()).values()]


def train_in_each_order(kind: str) -> list[list[Tensor]]:
    return [train(kind, order) for order in (KEYS, *ORDERS.values())]


@pytest.mark.parametrize("kind", ["bags", "weighted bags", "rows"])
def test_27_the_order_of_keys_on_a_rank_changes_no_bit(kind: str) -> None:
    """Outputs, and the tables that all ranks trained together."""
    for reference, *others in run_ranks(2, train_in_each_order, kind):
        for tensors in others:
            assert len(tensors) == len(reference) >= 6
            assert all(map(torch.equal, tensors, reference))


# what rank 1 has, and what all say
TABLE_ORDERS: dict[str, tuple[dict[str, list[str]], str]] = {
    "tables": (
        {"t2": ["f3", "f1"], "t1": ["f1", "f2"], "t3": ["f4"]},
        "tables: rank 0 has ['t1', 't2', 't3'], rank 1 has ['t2', 't1', 't3']",
    ),
    "features of a table": (
        {"t1": ["f2", "f1"], "t2": ["f3", "f1"], "t3": ["f4"]},
        "feature_names of table 't1': rank 0 has ['f1', 'f2'], rank 1 has ['f2', 'f1']",
    ),
    "features of two tables": (
        {"t1": ["f1", "f3"], "t2": ["f2", "f1"], "t3": ["f4"]},
        "feature_names of table 't1': rank 0 has ['f1', 'f2'], rank 1 has ['f1', 'f3'];"
        " feature_names of table 't2': rank 0 has ['f3', 'f1'], rank 1 has ['f2', 'f1']",
    ),
}


def refused(kind: str) -> list[str]:
    """What is said to each of TABLE_ORDERS; nobody is left waiting."""
    errors = []
    for features, _ in TABLE_ORDERS.values():
        module = collection(kind, features if dist.get_rank() == 1 else None)
        errors.append(error_of(sharded, module))
        sharded(collection(kind))(batch_of(0, dist.get_rank()))
    return errors


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_27_tables_in_another_order_on_a_rank_are_refused(kind: str) -> None:
    """Lookups travel by number: number 0 of one rank would be another feature on the other."""
    prefix = "RuntimeError: ranks differ in what all must share:"
    assert run_ranks(2, refused, kind) == [[f"{prefix} {difference}" for _, difference in TABLE_ORDERS.values()]] * 2


def missing() -> list[tuple[str, Tensor]]:
    """What is raised where rank 1 lacks each key, and the values of a good batch after it."""
    dmp, outcomes = sharded(collection("weighted bags")), []
    before = [value.clone() for value in local_tensors(dmp.state_dict()).values()]
    kjt = batch_of(0, dist.get_rank())
    for key in KEYS:
        less = kjt.permute([i for i, name in enumerate(KEYS) if name != key or dist.get_rank() == 0])
        error = error_of(dmp, less)
        assert all(map(torch.equal, before, local_tensors(dmp.state_dict()).values()))
        outcomes.append((error, dmp(kjt).values().detach()))
    return outcomes


def test_27_keys_that_only_one_rank_has() -> None:
    """The features after the missing one do not move up to its place."""
    model = collection("weighted bags")
    for rank, outcomes in enumerate(run_ranks(2, missing)):
        for key, (text, values) in zip(KEYS, outcomes, strict=True):
            others = [name for name in KEYS if name != key]
            assert text == f"KeyError: rank 1: features [{key!r}] are not in the batch, which has {others}"
            assert torch.equal(values, model(batch_of(0, rank)).values())


def sequences(samples: tuple[int, ...], longest: tuple[int, ...]) -> list[Tensor]:
    """The tables after a step on the batches of all; rows of this rank's batch are those of one process."""
    rank = dist.get_rank()
    dmp, kjt = sharded(collection("rows")), batch_of(0, rank, samples[rank], longest[rank])
    out, wanted = dmp(kjt), collection("rows")(kjt)
    for key, jagged in out.items():
        assert torch.equal(jagged.values(), wanted[key].values())
        assert torch.equal(jagged.lengths(), wanted[key].lengths()) and len(jagged.lengths()) == kjt.stride()
    values_of(out).square().sum().backward()
    return [value.clone() for value in local_tensors(dmp.state_dict()).values()]


@pytest.mark.parametrize(
    ("samples", "longest"), [((0, 3), (3, 3)), ((3, 3), (0, 3)), ((0, 0), (3, 3)), ((2, 2), (0, 0))], ids=str
)
def test_15_17_sequences_of_a_rank_without_ids(samples: tuple[int, ...], longest: tuple[int, ...]) -> None:
    """A rank without samples, a rank whose samples have no ids, and all ranks so."""
    start = collection("rows").state_dict()
    for tables in run_ranks(2, sequences, samples, longest):
        assert all(table.isfinite().all() for table in tables)
        if not any(s * n for s, n in zip(samples, longest, strict=True)):
            # nobody named a row
            whole = [table for table in tables if table.numel()]
            assert all(any(torch.equal(table, value) for value in start.values()) for table in whole)


# of three samples of four features, an id each
MISFITS: dict[str, dict[str, list[int]]] = {
    "6 start": {"offsets": [1, *range(2, 13), 12]},
    "7 within a key": {"offsets": [0, 1, 2, 3, 4, 7, 6, *range(7, 13)]},
    "7 negative length": {"lengths": [1, 1, 1, 4, -1, 0, *[1] * 6]},
    "8 short": {"offsets": [*range(12), 11]},
    "9 long": {"lengths": [*[1] * 11, 2]},
}


def unfit(kind: str, mode: BoundsCheckMode) -> dict[str, str]:
    dmp, errors, ids = sharded(collection(kind, mode=mode)), {}, torch.arange(12) % ROWS
    good = KeyedJaggedTensor(KEYS, ids, lengths=torch.ones(12, dtype=torch.int64))
    before = [value.clone() for value in local_tensors(dmp.state_dict()).values()]
    for name, bags in MISFITS.items():
        arguments: dict[str, Any] = {keyword: torch.tensor(numbers) for keyword, numbers in bags.items()}
        kjt = KeyedJaggedTensor(KEYS, ids, **arguments) if dist.get_rank() == 1 else good
        errors[name] = error_of(lambda kjt=kjt: values_of(dmp(kjt)).sum().backward())  # type: ignore[misc]
        assert all(map(torch.equal, before, local_tensors(dmp.state_dict()).values())), errors
    values_of(dmp(good)).sum().backward()
    return errors


@pytest.mark.parametrize("kind", ["bags", "rows"])
@pytest.mark.parametrize("mode", list(BoundsCheckMode), ids=lambda mode: mode.name)
def test_6_7_8_9_bags_of_a_rank_that_do_not_fit_raise_on_all_in_every_mode(mode: BoundsCheckMode, kind: str) -> None:
    """Modes speak of ids: with IGNORE nobody looked at bags, and a length of -1 would travel to the other ranks."""
    for errors in run_ranks(2, unfit, kind, mode):
        for name, text in errors.items():
            assert text.startswith("ValueError: rank 1:"), name
