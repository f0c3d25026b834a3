"""Whole and replicated tables behind DistributedModelParallel against one process that sees the whole batch.

And replicas on ranks whose updates run by other means: with numba and without.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt, upstream
from model_zoo import bag_tables, fused
from ranks import error_of, run_ranks
from sharding_mixes import (
    RULES,
    Mix,
    TableCase,
    batch_of,
    batches_of_rank,
    build,
    dressed,
    environment,
    rows_of_rank,
    same_tensors,
    shards_of,
    span_of,
    train,
)
from sharding_steps import local_tensors
from torch import Tensor

from shardwise import DataType, DistributedModelParallel, EmbeddingBagCollection, KeyedJaggedTensor, ShardingPlan
from shardwise.kernels import _op, numba_loops
from shardwise.sharding import construct_module_sharding_plan, data_parallel, table_wise

pytestmark = pytest.mark.ranks

STEPS = 3
# seeds of rank 0, of a later one, and every rank
FIRST, LAST, ALL = ("table_wise", 1), ("table_wise", 5), ("data_parallel", 0)


def table(
    name: str, rows: int, features: Sequence[str], where: tuple[str, int], dim: int = 8, mean: bool = False,
    dtype: DataType = DataType.FP32,
) -> TableCase:  # fmt: skip
    return TableCase(name, rows, dim, tuple(features), where[0], mean, dtype, seed=where[1])


A, B = table("a", 40, ["f1"], LAST), table("b", 30, ["f2"], FIRST)
THREE = Mix((A, B, table("c", 9, ["f3"], ALL)))
FOUR = Mix((A, B, table("c", 20, ["f3", "f4"], ALL)))
CASES = {
    "table_wise": Mix((A, B, table("c", 20, ["f3", "f4"], LAST))),
    "all on one rank": Mix((A, replace(B, seed=A.seed))),
    "mixed dims and pooling": Mix((
        table("a", 40, ["f1"], LAST, 8, True), table("b", 30, ["f2"], FIRST, 3),
        table("c", 20, ["f3"], LAST, 16, True), table("d", 9, ["f4"], LAST, 1),
    )),
    "shared features": Mix((
        table("a", 40, ["f1", "f2"], FIRST), table("b", 40, ["f1"], LAST), table("c", 40, ["f2"], LAST, 4),
    )),
    "replicated": Mix((replace(A, strategy="data_parallel"), B, table("c", 5, ["f3"], ALL, 8, True))),
    "mixed dtypes": Mix((replace(A, dtype=DataType.FP16), replace(B, dtype=DataType.BF16)), settings=()),
    "weighted": replace(THREE, weighted=True),
    "uneven batches": replace(THREE, batches=(5, 2, 1, 3)),
    "one empty rank": replace(THREE, batches=(4, 0, 2, 0)),
    "all ranks empty": replace(THREE, batches=(0, 0, 0, 0)),
    "empty features": replace(THREE, empty_features=("f1", "f2", "f3")),
    # ids past each rank's last bag, of no table, with weights that are NaN
    "capacity": FOUR,
    "capacity and weights": replace(FOUR, batches=(4, 0, 2, 0), weighted=True),
    "one row": Mix((replace(A, rows=1), table("b", 1, ["f2"], ALL))),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A case that is trained by a rule."""

    name: str
    rule: str
    pooled: bool = True

    @property
    def mix(self) -> Mix:
        mix = CASES[self.name]
        return mix if self.pooled else replace(mix, pooled=False, tables=tuple(replace(t, dim=8) for t in mix.tables))


def sharded(mix: Mix, rule: str) -> DistributedModelParallel:
    env, module = environment(), build(mix, rule)
    where = {
        t.name: data_parallel()
        if t.strategy == "data_parallel"
        else table_wise(shards_of(t, env.world_size, env.local_world_size)[0].rank)
        for t in mix.tables
    }
    plan = construct_module_sharding_plan(module, where, world_size=env.world_size)
    return DistributedModelParallel(module, plan=ShardingPlan({"": plan}))


def final_state(module: Any) -> dict[str, Tensor]:
    """Weights and optimizer states that this process holds, by name."""
    weights = local_tensors(module.state_dict())
    state = {name: value.detach().clone() for name, value in weights.items() if value.numel()}
    fused = module.fused_optimizer if isinstance(module, DistributedModelParallel) else module.fused_optimizer()
    for name, states in fused.state_dict()["state"].items():
        state.update({f"{name}/{key}": value.clone() for key, value in local_tensors(states).items()})
    return state


def arriving(job: Job, kjt: KeyedJaggedTensor, rank: int) -> KeyedJaggedTensor:
    """A rank's batch with a key that nobody asks for and, where none are read, weights that are NaN."""
    if job.name == "table_wise":
        return kjt
    if not job.mix.weighted:
        nan = torch.full((len(kjt.values()),), float("nan"))
        kjt = KeyedJaggedTensor(kjt.keys(), kjt.values(), nan, kjt.lengths())
    return dressed(kjt, rank, padded="capacity" in job.name)


def train_all(jobs: Sequence[Job]) -> list[tuple[list[list[Tensor]], dict[str, Tensor], int]]:
    """One rank's outputs of each job, its state at the end, and the collectives of construction."""
    runs, rank = [], environment().rank
    for job in jobs:
        model, batches = sharded(job.mix, job.rule), batches_of_rank(job.mix, range(STEPS))
        batches = [(arriving(job, kjt, rank), upstream) for kjt, upstream in batches]
        calls = model._sharded[""].collectives
        runs.append((train(job.mix, model, batches, False).outputs, final_state(model), calls))
    return runs


def expect_bits_of_one_process(jobs: Sequence[Job], world: int) -> None:
    for n, runs in enumerate(zip(*run_ranks(world, train_all, jobs), strict=True)):
        mix, combined = jobs[n].mix, dict[str, Tensor]()
        module = build(mix, jobs[n].rule)
        wanted = train(mix, module, batches_of_rank(mix, range(STEPS), 0, 1), False).outputs
        replicas = sum(table.strategy == "data_parallel" for table in mix.tables)
        for rank, (outputs, state, calls) in enumerate(runs):
            for step, rank_outputs in enumerate(outputs):
                expected = rows_of_rank(mix, batch_of(mix, step), wanted[step], *span_of(mix, rank, world))
                assert all(map(torch.equal, rank_outputs, expected)), (jobs[n], rank, step)
            for name, value in state.items():
                assert torch.equal(combined.setdefault(name, value), value), f"{jobs[n]}: replicas of {name} differ"
            # one to compare plans, one broadcast for each replicated table; a rank alone calls none
            assert calls == (1 + replicas if world > 1 else 0), jobs[n]
        assert same_tensors(combined, final_state(module)), jobs[n]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_whole_and_replicated_tables_have_the_bits_of_one_process(world: int) -> None:
    bags = [Job(name, "rowwise_adagrad") for name in CASES]
    rows = [Job(name, "adagrad", pooled=False) for name, mix in CASES.items() if not mix.weighted]
    expect_bits_of_one_process([*bags, *rows], world)


def test_every_optimizer_has_the_bits_of_one_process() -> None:
    expect_bits_of_one_process([Job("replicated", rule) for rule in ("sgd", "adagrad", "adam")], 2)


def train_with_a_frozen_table() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = sharded(CASES["replicated"], "adagrad")
    for name in "ab":
        model.get_parameter(f"_dmp_wrapped_module.embedding_bags.{name}.weight").requires_grad_(False)
    before = final_state(model)
    model(batches_of_rank(CASES["replicated"], [0])[0][0]).values().sum().backward()
    return before, final_state(model)


def test_tables_frozen_after_sharding_stay_as_they_are() -> None:
    """The backward used to go on training them: marks were read when the tables were sharded and never again."""
    for before, after in run_ranks(2, train_with_a_frozen_table):
        moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert moved == {"embedding_bags.c.weight", "embedding_bags.c.weight/c.momentum1"}


def two_in_flight() -> tuple[list[Tensor], bool]:
    engine: Any = sharded(CASES["replicated"], "sgd").module
    flights = [engine.begin(batch) for batch, _ in batches_of_rank(CASES["replicated"], range(2))]
    values = [engine.finish(flight).values().detach() for flight in flights]
    with torch.no_grad():
        third = engine.begin(batches_of_rank(CASES["replicated"], [0])[0][0])
    return values, engine.finish(third).values().requires_grad


def test_two_batches_can_be_in_flight_and_one_begun_without_gradients_has_none() -> None:
    mix = CASES["replicated"]
    ranks = run_ranks(2, two_in_flight)
    for step in range(2):
        wanted = build(mix, "sgd")(batch_of(mix, step)).values()
        assert torch.equal(torch.cat([values[step] for values, _ in ranks]), wanted)
    assert not any(requires_grad for _, requires_grad in ranks)


def call_in_own_order() -> str:
    mix, rank = CASES["table_wise"], environment().rank
    twins = [sharded(mix, "sgd") for _ in range(2)]
    return error_of(lambda: [model(batch_of(mix, 0)) for model in (reversed(twins) if rank else twins)])


def test_ranks_that_call_equal_collections_in_different_orders_find_out() -> None:
    """Equal plans have equal fingerprints, so the ranks mixed the rows of two collections without a word."""
    for rank, message in enumerate(run_ranks(2, call_in_own_order)):
        assert f"RuntimeError: ranks [{1 - rank}] differ from this one" in message and "order of lookups" in message


def trained(optimizer: str, kind: str, processors: tuple[str, str] | None = None) -> tuple[torch.Tensor, list[str]]:
    """A table after some steps on ranks of which the second has no compiled loops, and what was warned of."""
    rank, usual = dist.get_rank(), (_op.NUMBA, numba_loops.arithmetic)
    try:
        if processors is None:
            _op.NUMBA = rank == 0
        else:
            numba_loops.arithmetic = lambda: ("numba 1", processors[rank])
        numba_loops.loops.cache_clear()
        torch.manual_seed(0)
        ebc = fused(EmbeddingBagCollection(bag_tables({"f": 60}, 16)), RULES[optimizer][0])
        strategy = {"tf": data_parallel() if kind == "replicated" else table_wise(rank=0)}
        plan = ShardingPlan({"": construct_module_sharding_plan(ebc, strategy, world_size=2)})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = DistributedModelParallel(ebc, plan=plan)
        for step in range(20):
            out = model(random_kjt({"f": 60}, 30, seed=2 * step + rank, longest=5)).values()
            (out * upstream(*out.shape, seed=2 * step + rank)).sum().backward()
        weights = model.module.state_dict()["embedding_bags.tf.weight"]
        return weights if isinstance(weights, torch.Tensor) and kind == "replicated" else torch.zeros(1), [
            str(warning.message) for warning in caught if "drift" in str(warning.message)
        ]
    finally:
        _op.NUMBA, numba_loops.arithmetic = usual
        numba_loops.loops.cache_clear()


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_replicas_of_exact_rules_keep_their_bits_with_numba_and_without(optimizer: str) -> None:
    """457 of 500 rows of two replicas differed after 20 steps: torch's square root was not rounded correctly."""
    pytest.importorskip("numba")
    (first, messages), (second, _) = run_ranks(2, trained, optimizer, "replicated")
    assert torch.equal(first, second) and not messages
    assert first.abs().max() > 0.5


def test_replicas_of_a_rule_with_sums_over_a_row_need_the_same_numba_on_all_ranks() -> None:
    """The loops and torch add up a row in other orders: nobody was told, and replicas drifted."""
    pytest.importorskip("numba")
    with pytest.raises(
        RuntimeError, match="replicated table 'tf' .rowwise_adagrad.*SHARDWISE_NUMBA=0 on all"
    ) as raised:
        run_ranks(2, trained, "rowwise_adagrad", "replicated")
    assert "rank 0 has numba " in str(raised.value) and "rank 1 has torch alone" in str(raised.value)


def test_a_table_of_one_owner_may_be_updated_with_numba_beside_ranks_without() -> None:
    pytest.importorskip("numba")
    assert [messages for _, messages in run_ranks(2, trained, "rowwise_adagrad", "sharded")] == [[], []]


def test_replicas_on_other_processors_are_warned_of_and_go_on() -> None:
    ranks = run_ranks(2, trained, "rowwise_adagrad", "replicated", ("znver5", "haswell"))
    for _, messages in ranks:
        assert len(messages) == 1 and "rank 0 has znver5, rank 1 has haswell" in messages[0] and "'tf'" in messages[0]
