"""Rows written from outside into sharded tables: `DistributedModelParallel.write` and the sharded module's own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks, world_group
from torch import Tensor, nn

from shardwise import (
    DataType,
    DistributedModelParallel,
    DMPCollection,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.embeddings.managed_collision import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from shardwise.sharding import column_wise, data_parallel, grid_shard, row_wise, table_wise

pytestmark = pytest.mark.ranks

ROWS, DIM, STEPS = 10, 8, 3
# of every strategy a table; "frozen" may not be written, and "f" is of two tables
FEATURES = {"rw": "f", "tw": "f", "cw": "g", "dp": "h", "dense": "i", "frozen": "j"}
NAMES = {"rw": "f@rw", "tw": "f@tw", "cw": "g", "dp": "h", "dense": "i"}


class Net(nn.Module):
    """A sequence collection and a pooled one of the same tables, of which one is bf16; all but one are written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        for kind, make in ((EmbeddingConfig, EmbeddingCollection), (EmbeddingBagConfig, EmbeddingBagCollection)):
            tables: list[Any] = [
                kind(ROWS, DIM, name, DataType.BF16 if name == "cw" else DataType.FP32, feature_names=[feature],
                     enable_embedding_update=name != "frozen")
                for name, feature in FEATURES.items()
            ]  # fmt: skip
            made: Any = make(tables, device="cpu")
            optimized = [made.get_parameter(f"{made._children_name}.{name}.weight") for name in FEATURES]
            apply_optimizer_in_backward(RowWiseAdagrad, optimized[:4], {"lr": 0.1})
            setattr(self, "ec" if kind is EmbeddingConfig else "ebc", made)


def sharded() -> Any:
    model, world = Net(), dist.get_world_size()
    ways: dict[str, Any] = {
        "rw": row_wise(), "tw": table_wise(world - 1), "cw": column_wise([0, world - 1]), "dp": data_parallel(),
        "dense": row_wise(compute_kernel="dense"), "frozen": table_wise(0),
    }  # fmt: skip
    if world == 4:
        ways["tw"] = grid_shard([0, 1])
    plans = {
        path: construct_module_sharding_plan(
            getattr(model, path), ways, world_size=world, local_size=min(world, 2), device_type="cpu"
        )
        for path in ("ec", "ebc")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tables .* have no optimizer")
        return DistributedModelParallel(model, plan=ShardingPlan(plans), init_data_parallel=False)


def written(step: int, rank: int) -> KeyedJaggedTensor:
    """What a rank writes in a step: ids that other ranks write too and that repeat; in the second step rank 0 nothing.

    Rows are small halves, so that a table of bf16 has them as they are.
    """
    draw = torch.Generator().manual_seed(100 * step + rank)
    names = [] if step == 1 and rank == 0 else list(NAMES.values())[: 5 - step]
    sizes = [int(torch.randint(0, 6, (), generator=draw)) for _ in names]
    ids = torch.randint(0, ROWS, (sum(sizes),), generator=draw).to(torch.int32 if step else torch.int64)
    rows = torch.randint(-100, 100, (sum(sizes), DIM), generator=draw) / 2
    return KeyedJaggedTensor(names, ids, rows, lengths=torch.tensor(sizes, dtype=torch.int64))


def looked_up(model: Any) -> dict[str, Tensor]:
    """All rows of all tables of both collections, as this rank sees them."""
    keys = list(dict.fromkeys(FEATURES.values()))
    every = KeyedJaggedTensor(keys, torch.arange(ROWS).repeat(len(keys)), lengths=torch.ones(len(keys) * ROWS).long())
    with torch.no_grad():
        of_ids, of_bags = model.module.ec(every), model.module.ebc(every)
        return {**{f"ec.{n}": of_ids[n].values() for n in of_ids}, **{f"ebc.{n}": of_bags[n] for n in of_bags.keys()}}  # noqa: SIM118


def states_of(model: Any) -> list[list[float]]:
    states = model.fused_optimizer.state_dict()["state"]
    found = []
    for name in sorted(states):
        for value in states[name].values():
            local = [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else [value]
            found += [part.flatten().tolist() for part in local]
    return found


def writes() -> dict[str, Any]:
    model, rank = sharded(), dist.get_rank()
    keys = list(dict.fromkeys(FEATURES.values()))
    ids = KeyedJaggedTensor(keys, torch.arange(len(keys)), lengths=torch.ones(len(keys)).long())
    model.module.ebc(ids).values().sum().backward()
    before, states, steps = looked_up(model), states_of(model), []
    for step in range(STEPS):
        model.write(written(step, rank))
        steps.append(looked_up(model))
    # of one collection alone, by its stages
    module = model.module.ec
    context = module.create_context()
    batch = KeyedJaggedTensor(["g"], torch.tensor([3]), torch.full((1, DIM), 4.0), lengths=torch.tensor([1]))
    module.update(context, module.write_dist(context, batch).wait().wait())
    module.write(KeyedJaggedTensor(["h"], torch.tensor([4]), torch.full((1, DIM), float(rank)), torch.tensor([1])))
    apart = looked_up(model)
    kept = states == states_of(model)
    # a batch trains what was written
    model.module.ebc(ids).values().sum().backward()
    errors = refusals(model, apart)
    return {"before": before, "steps": steps, "apart": apart, "kept": kept, "after": looked_up(model), **errors}


def refusals(model: Any, at: dict[str, Tensor]) -> dict[str, Any]:
    """What every rank raises where one of them writes what cannot be written, and that nothing was written."""
    good = KeyedJaggedTensor(["g"], torch.tensor([1]), torch.ones(1, DIM), lengths=torch.tensor([1]))

    def bad(name: str = "g", id: int = 1, rows: Any = None, what: Any = KeyedJaggedTensor) -> Any:
        rows = torch.ones(1, DIM) if rows is None else rows
        weights = {} if isinstance(rows, str) else {"weights": rows}
        return what([name], torch.tensor([id]), lengths=torch.tensor([1]), **weights)

    cases = {
        "high": bad(id=ROWS), "negative": bad(id=-1), "narrow": bad(rows=torch.ones(1, DIM - 1)),
        "flat": bad(rows=torch.ones(1)), "none": bad(rows="none"), "integers": bad(rows=torch.ones(1, DIM).long()),
        "name": bad("j"), "feature": bad("f"), "kind": "rows",
    }  # fmt: skip
    before, last = looked_up(model), dist.get_world_size() - 1
    errors = {case: error_of(model.write, batch if dist.get_rank() == last else good) for case, batch in cases.items()}
    after = looked_up(model)
    return {"errors": errors, "untouched": all(torch.equal(after[name], before[name]) for name in before)}


def expected(before: dict[str, Tensor], step: int, world: int) -> dict[str, Tensor]:
    """The plain formula: every row in the order of ranks and of their batches, the last one stays."""
    rows = {name: values.clone() for name, values in before.items()}
    for rank in range(world):
        batch = written(step, rank)
        for name in batch.keys():  # noqa: SIM118
            for row_id, row in zip(batch[name].values().tolist(), batch[name].weights(), strict=True):
                for module in ("ec", "ebc"):
                    rows[f"{module}.{name}"][row_id] = row
    return rows


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_that_ranks_write_are_there_whatever_the_plan_and_the_last_one_counts(world: int) -> None:
    ranks = run_ranks(world, writes)
    for found in ranks:
        rows = found["before"]
        for step, seen in enumerate(found["steps"]):
            rows = expected(rows, step, world)
            assert all(torch.equal(seen[name], rows[name]) for name in rows)
            assert not torch.equal(rows["ec.f@rw"], found["before"]["ec.f@rw"])
        rows["ec.g"][3], rows["ec.h"][4] = 4.0, float(world - 1)
        assert all(torch.equal(found["apart"][name], rows[name]) for name in rows)
        # states of rows are not written
        assert found["kept"]
        moved = [name for name in rows if not torch.equal(found["after"][name], rows[name])]
        assert moved == [f"ebc.{name}" for name in ("f@rw", "f@tw", "g", "h")]


@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_be_written_is_a_valueerror_on_all_ranks_and_nothing_is_written(world: int) -> None:
    for found in run_ranks(world, writes):
        errors = found["errors"]
        assert found["untouched"]
        begin = "" if world == 1 else "rank 1: "
        outside = "table 'cw': id {} is outside [0, 10): nothing is written"
        width = "table 'cw': weights must be a row of 8 numbers for each id, got "
        assert errors["high"] == f"ValueError: {begin}{outside.format(10)}"
        assert errors["negative"] == f"ValueError: {begin}{outside.format(-1)}"
        assert errors["narrow"] == f"ValueError: {begin}{width}torch.float32 [1, 7]"
        assert errors["flat"] == f"ValueError: {begin}{width}torch.float32 [1]"
        assert errors["none"] == f"ValueError: {begin}{width}none"
        assert errors["integers"] == f"ValueError: {begin}{width}torch.int64 [1, 8]"
        assert errors["name"].startswith(f"ValueError: {begin}'j' is no writable table's: enable_embedding_update")
        assert errors["feature"].startswith(f"ValueError: {begin}'f' is no writable table's")
        assert errors["kind"].startswith(f"TypeError: {begin}rows to write come as a KeyedJaggedTensor")


def test_a_model_without_a_writable_table_says_how_to_make_one() -> None:
    table = EmbeddingConfig(4, 4, "t")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tables .* have no optimizer")
        model: Any = DistributedModelParallel(EmbeddingCollection([table], device="cpu"), ShardingEnv.from_local(1, 0))
    batch = KeyedJaggedTensor(["t"], torch.tensor([1]), torch.ones(1, 4), lengths=torch.tensor([1]))
    with pytest.raises(RuntimeError, match="no table of the model is writable: set enable_embedding_update=True"):
        model.write(batch)
    with pytest.raises(ValueError, match="'t' is no writable table's"):
        model.module.write(batch)


def test_rows_behind_a_managed_collision_module_are_not_written() -> None:
    table = EmbeddingConfig(4, 4, "t", enable_embedding_update=True)
    ids = MCHManagedCollisionModule(4, torch.device("cpu"), LRU_EvictionPolicy(), 1, 100)
    collection = ManagedCollisionCollection({"t": ids}, [table])
    module = ManagedCollisionEmbeddingCollection(EmbeddingCollection([table], device="cpu"), collection)
    env = ShardingEnv.from_local(1, 0)
    plan = construct_module_sharding_plan(module, {"t": table_wise(0)}, world_size=1, device_type="cpu")
    model = DistributedModelParallel(module, env, plan=ShardingPlan({"": plan}))
    batch = KeyedJaggedTensor(["t"], torch.tensor([1]), torch.ones(1, 4), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match="table 't': ids behind a managed collision module have no rows to write yet"):
        model.write(batch)


def written_twice() -> str:
    table = EmbeddingConfig(4, 4, "t", enable_embedding_update=True)
    module = EmbeddingCollection([table], device="cpu")
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    cut = construct_module_sharding_plan(module, {"t": table_wise(0)}, world_size=1, local_size=1, device_type="cpu")
    model = DMPCollection(module, "cpu", ShardingPlan({"": cut}), 2, 1, world_group())
    batch = KeyedJaggedTensor(["t"], torch.tensor([1]), torch.ones(1, 4), lengths=torch.tensor([1]))
    return error_of(model.write, batch)


def test_rows_of_tables_with_replicas_are_not_written() -> None:
    for error in run_ranks(2, written_twice):
        assert "rows cannot be written where tables have replicas (2D): a sync would average them away" in error
