"""A plan changes where a step is done and nothing else: clipping, decay, weights, averages, dtypes, any batches.

Upstream gradients are given, so the tables after some steps are those of one process, bit for bit, wherever sums have
one order: everywhere but in averages of rows that are cut and added where they lie, whose gradients are divided before
they travel. There they are those of one process within the tolerance.

Takes a minute: plans of every strategy at each number of ranks, in float64 against one process.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import kjt, tables_of
from ranks import run_ranks
from sharding_mixes import (
    HYPER,
    RULES,
    STRATEGIES,
    Mix,
    Run,
    TableCase,
    address,
    batch_of,
    build,
    environment,
    held,
    modelled,
    same_tensors,
    samples_of,
    shard,
    shards_of,
    span_of,
    states_of,
    train,
)
from torch import Tensor

from shardwise import BoundsCheckMode, DataType, GradientCheckMode, KeyedJaggedTensor, LookupPolicy, WeightDecayMode
from shardwise.planner.layout import TableOptions

pytestmark = pytest.mark.ranks

WORLD, STEPS = 4, 3
HALVES = (DataType.FP16, DataType.BF16)
# of the largest number of a tensor: one rounding to another side, and what follows from it
TOLERANCE = {DataType.FP32: 1e-5, DataType.FP16: 4e-3, DataType.BF16: 3e-2}


@dataclass(frozen=True)
class Case:
    """Training of a mix with one rule; `varied` batches have features of their own batch sizes."""

    mix: Mix
    rule: str
    varied: bool = False
    learned: bool = False
    dedup: bool = False


def case_of(number: int) -> Case:
    """A random case; every strategy and every rule come round."""
    rng = random.Random(number)
    rules = list(RULES)
    pooled = rng.random() < 0.75
    weighted = pooled and rng.random() < 0.4
    settings: dict[str, Any] = {"seed": number}
    if rng.random() < 0.7:
        settings |= {"gradient_clipping": True, "max_gradient": rng.choice([0.01, 0.1, 0.5])}
    if rng.random() < 0.4:
        settings["weight_decay"] = 0.25
        if rng.random() < 0.5 and rules[number % len(rules)] not in ("lamb", "partial_rowwise_lamb", "lars_sgd"):
            settings["weight_decay_mode"] = rng.choice([WeightDecayMode.L2, WeightDecayMode.DECOUPLE])
    tables = []
    for n in range(rng.randint(1, 3)):
        dtype = rng.choice([DataType.FP32, DataType.FP16, DataType.BF16])
        options = TableOptions(rng.choice(["partial", "ordered"]), "table")
        strategy = STRATEGIES[(number + n) % len(STRATEGIES)]
        features = tuple(rng.sample(["f0", "f1", "f2"], rng.randint(1, 2)))
        tables.append(
            TableCase(
                f"t{n}", rng.choice([3, 8, 29]), rng.choice([4, 8]) if pooled else 8, features, strategy,
                pooled and rng.random() < 0.6, dtype, options, rng.randrange(1000),
            )
        )  # fmt: skip
    mix = Mix(tuple(tables), pooled, weighted, settings=tuple(settings.items()))
    # ids travel once where a table may not warn of any
    dedup = not pooled and rng.random() < 0.4
    return Case(mix, rules[number % len(rules)], pooled and rng.random() < 0.4, weighted and rng.random() < 0.5, dedup)


def batches_of(case: Case, world: int) -> tuple[list[Any], list[list[Any]]]:
    """Batches with upstream gradients for one process, and for each rank."""
    mix, whole, ranks = case.mix, [], [[] for _ in range(world)]
    for step in range(STEPS):
        batch = batch_of(mix, step)
        parts = [samples_of(batch, *span_of(mix, rank, world)) for rank in range(world)]
        if case.varied:
            generator = torch.Generator().manual_seed(step)
            parts = [varied(part, generator) for part in parts]
        upstreams = [upstream_of(case, part, 100 * step + rank) for rank, part in enumerate(parts)]
        whole.append((joined(parts), [torch.cat(pieces) for pieces in zip(*upstreams, strict=True)]))
        for rank, (part, upstream) in enumerate(zip(parts, upstreams, strict=True)):
            ranks[rank].append((part, [piece * world for piece in upstream]))
    return whole, ranks


def upstream_of(case: Case, batch: KeyedJaggedTensor, seed: int) -> list[Tensor]:
    """A gradient for every row of a rank's output, lookup by lookup."""
    generator = torch.Generator().manual_seed(seed)
    counts = dict(zip(batch.keys(), batch.length_per_key(), strict=True))
    full = batch.inverse_indices()[1].shape[1] if case.varied else batch.stride()
    sizes = [(full if case.mix.pooled else counts[feature], table.dim) for table, feature in case.mix.lookups]
    return [torch.randn(*size, generator=generator) for size in sizes]


def varied(batch: KeyedJaggedTensor, generator: torch.Generator) -> KeyedJaggedTensor:
    """Each feature keeps some samples, at least one if there are any, which those of the full batch are drawn from."""
    full, ids, weights, lengths, strides, inverse = batch.stride(), [], [], [], [], []
    for key in list(batch.keys()):
        jagged = batch[key]
        kept = int(torch.randint(1, full + 1, (1,), generator=generator)) if full else 0
        end = int(jagged.lengths()[:kept].sum())
        ids.append(jagged.values()[:end])
        weights.append(None if jagged.weights_or_none() is None else jagged.weights()[:end])
        lengths.append(jagged.lengths()[:kept])
        strides.append([kept])
        inverse.append(torch.randint(0, max(kept, 1), (full,), generator=generator))
    factors = None if weights[0] is None else torch.cat([w for w in weights if w is not None])
    return KeyedJaggedTensor(
        batch.keys(), torch.cat(ids), factors, torch.cat(lengths), stride_per_key_per_rank=strides,
        inverse_indices=(list(batch.keys()), torch.stack(inverse)),
    )  # fmt: skip


def joined(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """The batch of one process: that of rank 0, then that of rank 1, feature by feature."""
    keys = list(parts[0].keys())
    pieces = [(part.to_dict(), dict(zip(part.keys(), part.stride_per_key(), strict=True))) for part in parts]
    ids = torch.cat([jagged[key].values() for key in keys for jagged, _ in pieces])
    lengths = torch.cat([jagged[key].lengths() for key in keys for jagged, _ in pieces])
    weights = None
    if parts[0].weights_or_none() is not None:
        weights = torch.cat([jagged[key].weights() for key in keys for jagged, _ in pieces])
    if parts[0].inverse_indices_or_none() is None:
        return KeyedJaggedTensor(keys, ids, weights, lengths)
    inverse = []
    for row, key in enumerate(keys):
        firsts = accumulate((strides[key] for _, strides in pieces), initial=0)
        inverse.append(torch.cat([p.inverse_indices()[1][row] + at for p, at in zip(parts, firsts, strict=False)]))
    return KeyedJaggedTensor(
        keys, ids, weights, lengths, stride_per_key_per_rank=[[sum(s[key] for _, s in pieces)] for key in keys],
        inverse_indices=(keys, torch.stack(inverse)),
    )  # fmt: skip


def alone(case: Case, world: int) -> Run:
    """One process."""
    module = build(case.mix, case.rule)
    run = train(case.mix, module, batches_of(case, world)[0], case.learned)
    run.weights, run.states = tables_of(module), states_of(module)
    return run


def over_ranks(cases: Sequence[Case]) -> list[Run]:
    """One rank's runs."""
    runs, env = [], environment()
    for case in cases:
        model = shard(case.mix, build(case.mix, case.rule), env, dedup=case.dedup)
        run = train(case.mix, model, batches_of(case, env.world_size)[1][env.rank], case.learned)
        run.weight_gradients = [gradient / env.world_size for gradient in run.weight_gradients]
        run.weights, run.states = held(model)
        runs.append(run)
    return runs


def has_bits(case: Case, table: TableCase, world: int) -> bool:
    """Whether a table has the bits of one process."""
    if case.dedup:
        return False
    shards = [shard for shard in shards_of(table, world, min(2, world)) if not shard.replica]
    by_rows = len(shards) > len({shard.cols for shard in shards})
    partial = case.mix.pooled and by_rows and table.options.reduction == "partial"
    return not (partial and table.mean)


def faults(case: Case, world: int, want: Run, runs: Sequence[Run]) -> list[str]:
    """Where the ranks' tables and states are not those of one process."""
    diffs = []
    tables = {table.name: table for table in case.mix.tables}
    for rank, run in enumerate(runs):
        for key, tensor in [*run.weights.items(), *run.states.items()]:
            place, _, state = key.partition("/")
            name, rows, cols = address(place)
            value = want.states[f"{name}/{state}"] if state else want.weights[name]
            if rows.start == rows.stop:
                continue
            if state != "step":
                value = value[rows][:, cols] if value.dim() == 2 else value[rows]
            table = tables[name]
            if has_bits(case, table, world):
                if not torch.equal(tensor, value):
                    diffs.append(f"rank {rank}: {key}: bits differ, by up to {(tensor - value).abs().max()}")
            elif tensor.numel():
                error, most = (tensor.double() - value.double()).abs(), value.double().abs().max()
                apart = error > TOLERANCE[table.dtype] * max(most, 1e-3)
                # where cut gradients cancel, rules that divide by their size make a step of what rounding left: of few
                if apart.sum() > max(8, apart.numel() // 20):
                    diffs.append(f"rank {rank}: {key}: {apart.sum()} apart by up to {error.max()} of {most}")
    if case.learned:
        whole = want.weight_gradients
        for step in range(STEPS):
            parts = [run.weight_gradients[step] for run in runs]
            tensor = torch.cat(parts).sort().values
            if not torch.allclose(tensor, whole[step].sort().values, rtol=1e-3, atol=2e-3):
                diffs.append(f"step {step}: gradients of weights")
    return diffs


def expect_one_step(cases: Sequence[Case], world: int) -> None:
    # first, so that what is compiled for a rule is compiled once
    wanted = [alone(case, world) for case in cases]
    ranks = run_ranks(world, over_ranks, list(cases), timeout=180 + 2 * len(cases))
    for number, case in enumerate(cases):
        diffs = faults(case, world, wanted[number], [runs[number] for runs in ranks])
        assert not diffs, "\n".join([*diffs[:8], *map(str, case.mix.tables), str(replace(case, mix=Mix(())))])


@pytest.mark.parametrize("world", [2, pytest.param(WORLD, marks=pytest.mark.full)])
def test_a_step_is_that_of_one_process_under_any_plan(world: int) -> None:
    """Averaged bags were divided before their gradient was cut where rows are cut, and after it elsewhere; rows of fp16
    and bf16 were rounded by the number that they have in their shard.
    """
    expect_one_step([case_of(number) for number in range(world, world + 14)], world)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, WORLD])
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_a_step_is_that_of_one_process_in_many_cases(first: int, world: int) -> None:
    expect_one_step([case_of(1000 + number) for number in range(first, first + 50)], world)


def of_zeros(table: TableCase, check: GradientCheckMode = GradientCheckMode.IGNORE) -> Any:
    """A sharded table of zeros whose gradients are cut at 0.5."""
    settings = (("lr", 1.0), ("gradient_clipping", True), ("max_gradient", 0.5))
    mix = Mix((table,), batches=(1, 1, 0, 0), settings=settings)
    module = build(mix, "sgd")
    torch.nn.init.zeros_(module.embedding_bags["t"].weight)
    module._policy = LookupPolicy(BoundsCheckMode.FATAL, gradient_check=check)
    return shard(mix, module, environment())


def one_bag(strategy: str, reduction: str) -> Tensor:
    """Both ranks' bag is [0, 5, 2, 7] of a table of zeros, averaged; what this rank holds after one step, [8, 4]."""
    model = of_zeros(TableCase("t", 8, 4, ("f",), strategy, True, options=TableOptions(reduction), seed=1))
    model(kjt({"f": [[0, 5, 2, 7]]})).values().backward(torch.full((1, 4), 2.0))
    whole = torch.zeros(8, 4)
    for key, value in held(model)[0].items():
        _, rows, cols = address(key)
        whole[rows, cols] = value if strategy != "data_parallel" or dist.get_rank() == 0 else 0
    return whole


@pytest.mark.parametrize(
    ("strategy", "reduction"),
    [*product(STRATEGIES, ["partial"]), *product(("row_wise", "table_row_wise", "grid"), ["ordered"])],
)
def test_the_gradient_of_an_average_is_cut_before_it_is_divided(strategy: str, reduction: str) -> None:
    """Row-wise a row moved by 0.5: 2 / 2 ranks / 4 ids is below 0.5 already. It is cut to 0.5 first, of 4 ids each."""
    expected = torch.zeros(8, 4)
    expected[[0, 5, 2, 7]] = -0.25
    assert torch.equal(torch.stack(run_ranks(2, one_bag, strategy, reduction)).sum(0), expected)


def oracle_of(case: Case, world: int) -> dict[str, Tensor]:
    """The tables by the dense model, which cuts upstream gradients first."""
    settings, weights = dict(case.mix.settings), {}
    decay = settings["weight_decay_mode"].name.lower().replace("decouple", "decoupled")
    for table in case.mix.tables:
        run = modelled(
            case.mix, case.rule, batches_of(case, world)[0], table, [(0, table.dim)], most=settings["max_gradient"],
            decay=decay, weight_decay=settings["weight_decay"],
        )  # fmt: skip
        weights |= run.weights
    return weights


@pytest.mark.parametrize("rule", HYPER)
def test_cut_gradients_of_averages_train_as_the_dense_model_says(rule: str) -> None:
    mode = WeightDecayMode.DECOUPLE if rule == "adam" else WeightDecayMode.L2
    settings = (
        ("gradient_clipping", True), ("max_gradient", 0.1), ("weight_decay", 0.25), ("weight_decay_mode", mode),
    )  # fmt: skip
    tables = tuple(
        TableCase(f"t{n}", 8, 4, (f"f{n % 2}",), strategy, True, seed=n) for n, strategy in enumerate(STRATEGIES)
    )
    case = Case(Mix(tables, weighted=True, settings=settings), rule)
    want = oracle_of(case, 2)
    for run in run_ranks(2, over_ranks, [case]):
        for key, weight in run[0].weights.items():
            name, rows, cols = address(key)
            torch.testing.assert_close(weight.double(), want[name][rows, cols], rtol=2e-5, atol=2e-6)


def infinite(check: str) -> list[Tensor]:
    """Weights after a gradient with an infinite number, averaged rows that are cut."""
    model = of_zeros(TableCase("t", 8, 4, ("f",), "row_wise", True, seed=4), GradientCheckMode[check])
    out = model(kjt({"f": [[0, 5]]}))
    with pytest.raises(FloatingPointError) if check == "RAISE" else nullcontext():
        out.values().backward(torch.full((1, 4), float("inf")))
    return list(held(model)[0].values())


@pytest.mark.parametrize(("check", "moved"), [("IGNORE", True), ("SKIP", False), ("RAISE", False)])
def test_a_gradient_that_is_not_finite_is_found_before_it_is_cut(check: str, moved: bool) -> None:
    weights = torch.cat([value for run in run_ranks(2, infinite, check) for value in run])
    assert bool(weights.any()) == moved
    assert weights.abs().max() == (0.5 if moved else 0)


def resumed(case: Case) -> list[dict[str, Tensor]]:
    """Weights after four steps, uninterrupted and in a model that took over after two."""
    mix, env = case.mix, environment()
    batches = [*batches_of(case, env.world_size)[1][env.rank]] * 2
    model = shard(mix, build(mix, case.rule), env)
    train(mix, model, batches[:2], False)
    fresh = shard(mix, build(mix, case.rule), env)
    fresh.load_state_dict(model.state_dict())
    fresh.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    train(mix, model, batches[2:4], False)
    train(mix, fresh, batches[2:4], False)
    return [held(net)[0] for net in (model, fresh)]


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
def test_a_resumed_model_rounds_on_as_the_uninterrupted_one(rule: str) -> None:
    """Rounding reads the count of steps, which the state dict had for Adam and its kin alone."""
    tables = tuple(
        TableCase(f"t{n}", 12, 8, (f"f{n % 3}",), strategy, False, dtype, TableOptions("ordered", "table"), n)
        for n, (strategy, dtype) in enumerate(product(("table_wise", "row_wise", "column_wise"), HALVES))
    )
    case = Case(Mix(tables, settings=()), rule)
    for model, fresh in run_ranks(2, resumed, case):
        assert same_tensors(model, fresh)


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_a_count_of_steps_that_only_rounds_rows_need_not_be_there(rule: str) -> None:
    """State dicts of other dtypes, or from before it was kept, load; counting goes on from where it is."""
    tables = (TableCase("t0", 12, 8, ("f0",), "table_wise", dtype=DataType.BF16, seed=1),)
    half = build(Mix(tables, settings=()), rule)
    full = build(Mix((replace(tables[0], dtype=DataType.FP32),), settings=()), rule)
    half_optimizer, full_optimizer = half.fused_optimizer(), full.fused_optimizer()
    half_optimizer.set_optimizer_step(3)
    name = "embedding_bags.t0.weight"
    assert half_optimizer.state_dict()["state"][name]["t0.step"].item() == 3
    assert "t0.step" not in full_optimizer.state_dict()["state"][name]
    full_optimizer.load_state_dict(half_optimizer.state_dict())
    half_optimizer.load_state_dict(full_optimizer.state_dict())
    assert half_optimizer.state_dict()["state"][name]["t0.step"].item() == 3
