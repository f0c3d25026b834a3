"""Sharded collections over real gloo ranks against one process that sees the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharding_steps import local_tensors
from torch import Tensor

from shardwise import (
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.sharding import construct_module_sharding_plan, data_parallel, table_wise

pytestmark = pytest.mark.ranks

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
FEATURES = ("f1", "f2", "f3", "f4")


@dataclass(frozen=True)
class Case:
    """Tables as (name, rows, dim, features, mean, dtype); where[t] is a rank, or None for every rank."""

    tables: tuple[tuple[Any, ...], ...]
    where: tuple[int | None, ...]
    # samples of each rank; the last ranks get those of the list's end
    batches: tuple[int, ...] = (3, 3, 3, 3)
    weighted: bool = False
    empty_features: tuple[str, ...] = field(default=())
    # ids past each rank's last bag, of no table, with weights that are NaN
    spare: int = 0


T = DataType
ALL_FOUR = (("a", 40, 8, ("f1",)), ("b", 30, 8, ("f2",)), ("c", 20, 8, ("f3", "f4")))
THREE = (("a", 40, 8, ("f1",)), ("b", 30, 8, ("f2",)), ("c", 9, 8, ("f3",)))
CASES = {
    "table_wise": Case(ALL_FOUR, (0, 1, 0)),
    "all on one rank": Case((("a", 40, 8, ("f1",)), ("b", 30, 8, ("f2",))), (1, 1)),
    "mixed dims and pooling": Case(
        (("a", 40, 8, ("f1",), True), ("b", 30, 3, ("f2",)), ("c", 20, 16, ("f3",), True), ("d", 9, 1, ("f4",))),
        (1, 0, 1, 1),
    ),
    "shared features": Case((("a", 40, 8, ("f1", "f2")), ("b", 40, 8, ("f1",)), ("c", 40, 4, ("f2",))), (0, 1, 1)),
    "replicated": Case((("a", 40, 8, ("f1",)), ("b", 30, 8, ("f2",)), ("c", 5, 8, ("f3",), True)), (None, 1, None)),
    "mixed dtypes": Case((("a", 40, 8, ("f1",), False, T.FP16), ("b", 30, 8, ("f2",), False, T.BF16)), (0, 1)),
    "weighted": Case(THREE, (1, 0, None), weighted=True),
    "uneven batches": Case(THREE, (1, 0, None), (5, 2, 1, 3)),
    "one empty rank": Case(THREE, (1, 0, None), (4, 0, 2, 0)),
    "all ranks empty": Case(THREE, (1, 0, None), (0, 0, 0, 0)),
    "empty features": Case(THREE, (1, 0, 1), empty_features=("f1", "f2", "f3")),
    "capacity": Case(ALL_FOUR, (1, 0, None), spare=3),
    "capacity and weights": Case(ALL_FOUR, (1, 0, None), (4, 0, 2, 0), weighted=True, spare=3),
    "one row": Case((("a", 1, 8, ("f1",)), ("b", 1, 8, ("f2",))), (1, None)),
}  # fmt: skip


def build(case: Case, *, sequence: bool = False, meta: bool = False) -> Any:
    torch.manual_seed(3)
    tables = []
    for name, rows, dim, features, *rest in case.tables:
        mean, dtype = [*rest, False, T.FP32][0], [*rest, T.FP32][1] if len(rest) > 1 else T.FP32
        if sequence:
            tables.append(EmbeddingConfig(rows, 8, name, dtype, list(features)))
        else:
            pooling = PoolingType.MEAN if mean else PoolingType.SUM
            tables.append(EmbeddingBagConfig(rows, dim, name, dtype, list(features), pooling=pooling))
    device = "meta" if meta else "cpu"
    return EmbeddingCollection(tables, device) if sequence else EmbeddingBagCollection(tables, case.weighted, device)


def batch_of(case: Case, samples: int, step: int) -> KeyedJaggedTensor:
    """Samples of the whole world at one step; a rank takes its slice."""
    generator = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(0, 4, (len(FEATURES), samples), generator=generator)
    for feature in case.empty_features:
        lengths[FEATURES.index(feature)] = 0
    rows: dict[str, int] = {}
    for _, table_rows, _, features, *_ in case.tables:
        rows.update({feature: min(rows.get(feature, table_rows), table_rows) for feature in features})
    values = [
        torch.randint(0, rows.get(f, 50), (int(lengths[k].sum()),), generator=generator) for k, f in enumerate(FEATURES)
    ]
    ids = torch.cat(values)
    weights = torch.rand(len(ids), generator=generator)
    return KeyedJaggedTensor(list(FEATURES), ids, weights, lengths.flatten())


def samples_of(kjt: KeyedJaggedTensor, begin: int, end: int) -> KeyedJaggedTensor:
    ids, weights, lengths = [], [], []
    for key in FEATURES:
        one = kjt[key]
        offsets = one.offsets().tolist() if kjt.stride() else [0]
        ids.append(one.values()[offsets[begin] : offsets[end]])
        weights.append(one.weights()[offsets[begin] : offsets[end]])
        lengths.append(one.lengths()[begin:end])
    return KeyedJaggedTensor(list(FEATURES), torch.cat(ids), torch.cat(weights), torch.cat(lengths))


def with_spare(kjt: KeyedJaggedTensor, spare: int) -> KeyedJaggedTensor:
    ids = torch.cat([kjt.values(), kjt.values().new_full((spare,), 2**62)])
    weights = torch.cat([kjt.weights(), kjt.weights().new_full((spare,), float("nan"))])
    return KeyedJaggedTensor(kjt.keys(), ids, weights, kjt.lengths(), capacity=len(ids))


def plan_for(case: Case, module: Any, world: int) -> ShardingPlan:
    generators = {
        table[0]: data_parallel() if where is None else table_wise(where % world)
        for table, where in zip(case.tables, case.where, strict=True)
    }
    return ShardingPlan({"": construct_module_sharding_plan(module, generators, world_size=world)})


def flat(output: Any) -> Tensor:
    """Pooled output as it is; sequence output as one matrix of rows, lookup by lookup."""
    return torch.cat([jagged.values() for jagged in output.values()]) if isinstance(output, dict) else output.values()


def train_alone(case: Case, optimizer: str, *, sequence: bool, steps: int) -> tuple[list[Any], dict[str, Tensor]]:
    """One process on the whole batch: outputs of each step, weights and states at the end."""
    module = build(case, sequence=sequence)
    apply_optimizer_in_backward(OPTIMIZERS[optimizer], module.parameters(), {"lr": 0.1})
    outputs = []
    for step in range(steps):
        output = module(batch_of(case, sum(case.batches), step))
        outputs.append(output)
        upstream_of(output, step).backward()
    return outputs, final_state(module)


def upstream_of(output: Any, step: int) -> Tensor:
    """A loss whose gradient is fixed by (step, row): every row of the output has its own upstream gradient."""
    values = flat(output)
    generator = torch.Generator().manual_seed(step)
    return (values * torch.randn(values.shape, generator=generator)).sum()


def final_state(module: Any) -> dict[str, Tensor]:
    """Weights and optimizer states that this process holds, by name."""
    state = {
        name: param.detach().clone() for name, param in local_tensors(module.state_dict()).items() if param.numel()
    }
    fused = module.fused_optimizer if isinstance(module, DistributedModelParallel) else module.fused_optimizer()
    for name, states in fused.state_dict()["state"].items():
        state.update({f"{name}/{key}": value.clone() for key, value in local_tensors(states).items()})
    return state


def train_sharded(
    case: Case, optimizer: str, sequence: bool, steps: int
) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """One rank of several; its upstream gradients are its rows of those of `train_alone`, times the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = build(case, sequence=sequence)
    apply_optimizer_in_backward(OPTIMIZERS[optimizer], module.parameters(), {"lr": 0.1})
    alone = build(case, sequence=sequence)
    model = DistributedModelParallel(module, plan=plan_for(case, module, world))
    batches = [sum(case.batches[r::world]) for r in range(world)]
    begin, total = sum(batches[:rank]), sum(batches)
    outputs = []
    for step in range(steps):
        whole = batch_of(case, total, step)
        mine = samples_of(whole, begin, begin + batches[rank])
        if case.spare:
            mine = with_spare(mine, case.spare)
        output = model(mine)
        outputs.append(flat(output).detach().clone())
        shape_of_whole = flat(alone(whole))
        upstream = torch.randn(shape_of_whole.shape, generator=torch.Generator().manual_seed(step))
        values = flat(output)
        mine_of_whole = rows_of_rank(alone(whole), begin, begin + batches[rank], upstream)
        (values * mine_of_whole * world).sum().backward()
    return outputs, final_state(model), model._sharded[""].collectives


def rows_of_rank(whole: Any, begin: int, end: int, upstream: Tensor) -> Tensor:
    """The rows of `upstream` (laid out like `flat(whole)`) that belong to samples [begin, end)."""
    if not isinstance(whole, dict):
        return upstream[begin:end]
    pieces, at = [], 0
    for jagged in whole.values():
        offsets = jagged.offsets().tolist()
        first, last = (offsets[begin], offsets[end]) if len(offsets) > end else (0, 0)
        pieces.append(upstream[at + first : at + last])
        at += jagged.values().shape[0]
    return torch.cat(pieces)


def expect_equal(case: Case, optimizer: str, world: int, *, sequence: bool) -> None:
    steps = 3
    wanted_outputs, wanted = train_alone(case, optimizer, sequence=sequence, steps=steps)
    ranks = run_ranks(world, train_sharded, case, optimizer, sequence, steps)
    batches = [sum(case.batches[r::world]) for r in range(world)]
    for step in range(steps):
        whole = wanted_outputs[step]
        for rank, (outputs, _, _) in enumerate(ranks):
            begin = sum(batches[:rank])
            assert torch.equal(outputs[step], rows_of_rank(whole, begin, begin + batches[rank], flat(whole).detach()))
    held: dict[str, Tensor] = {}
    for _, state, _ in ranks:
        for name, value in state.items():
            assert torch.equal(held.setdefault(name, value), value), f"replicas of {name} differ"
    assert held.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(held[name], value), f"{name} differs by {(held[name] - value).abs().max()}"


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_pooled_training_has_the_bits_of_one_process(name: str, world: int) -> None:
    expect_equal(CASES[name], "rowwise_adagrad", world, sequence=False)


@pytest.mark.parametrize("optimizer", [o for o in OPTIMIZERS if o != "rowwise_adagrad"])
def test_every_optimizer_has_the_bits_of_one_process(optimizer: str) -> None:
    expect_equal(CASES["replicated"], optimizer, 2, sequence=False)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.weighted])
def test_sequence_training_has_the_bits_of_one_process(name: str, world: int) -> None:
    expect_equal(CASES[name], "adagrad", world, sequence=True)


def test_a_step_costs_four_collectives_whatever_the_number_of_tables() -> None:
    few = CASES["table_wise"]
    many = Case(tuple((f"t{n}", 9, 8, ("f1",)) for n in range(40)), tuple(None if n % 5 == 0 else n for n in range(40)))
    for case, replicas in ((few, 0), (many, 8)):
        for _, _, calls in run_ranks(2, train_sharded, case, "sgd", False, 5):
            # at construction: one to compare plans, one broadcast for each replicated table
            assert calls - 1 - replicas == 4 * 5


def train_with_a_frozen_table() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    case = CASES["replicated"]
    module = build(case)
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(module, plan=plan_for(case, module, dist.get_world_size()))
    model.get_parameter("_dmp_wrapped_module.embedding_bags.a.weight").requires_grad_(False)
    model.get_parameter("_dmp_wrapped_module.embedding_bags.b.weight").requires_grad_(False)
    before = final_state(model)
    model(batch_of(case, 3, dist.get_rank())).values().sum().backward()
    return before, final_state(model)


def test_tables_frozen_after_sharding_stay_as_they_are() -> None:
    """The backward used to go on training them: marks were read when the tables were sharded and never again."""
    for before, after in run_ranks(2, train_with_a_frozen_table):
        moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert moved == {"embedding_bags.c.weight", "embedding_bags.c.weight/c.momentum1"}


def two_in_flight() -> tuple[list[Tensor], bool]:
    case, rank = CASES["replicated"], dist.get_rank()
    module = build(case)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(module, plan=plan_for(case, module, dist.get_world_size()))
    engine: Any = model.module
    mine = [samples_of(batch_of(case, 6, step), 3 * rank, 3 * rank + 3) for step in range(2)]
    flights = [engine.begin(batch) for batch in mine]
    values = [engine.finish(flight).values().detach() for flight in flights]
    with torch.no_grad():
        third = engine.begin(mine[0])
    return values, engine.finish(third).values().requires_grad


def test_two_batches_can_be_in_flight_and_one_begun_without_gradients_has_none() -> None:
    case = CASES["replicated"]
    module = build(case)
    ranks = run_ranks(2, two_in_flight)
    for step in range(2):
        wanted = module(batch_of(case, 6, step)).values()
        assert torch.equal(torch.cat([values[step] for values, _ in ranks]), wanted)
    assert not any(requires_grad for _, requires_grad in ranks)


def call_in_own_order() -> str:
    case, rank = CASES["table_wise"], dist.get_rank()
    twins = []
    for _ in range(2):
        module = build(case)
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        twins.append(DistributedModelParallel(module, plan=plan_for(case, module, 2)))
    batch = batch_of(case, 3, 0)
    with pytest.raises(RuntimeError) as caught:
        [model(batch) for model in (twins if rank == 0 else reversed(twins))]
    return str(caught.value)


def test_ranks_that_call_equal_collections_in_different_orders_find_out() -> None:
    """Equal plans have equal fingerprints, so the ranks mixed the rows of two collections without a word."""
    for rank, message in enumerate(run_ranks(2, call_in_own_order)):
        assert f"ranks [{1 - rank}] differ from this one" in message and "order of lookups" in message
