"""Batches that travel otherwise: several batch sizes, ids once, compressed rows; and numbers that stop a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from model_zoo import bag_tables, fused
from ranks import error_of, run_ranks
from sharding_mixes import (
    Mix,
    TableCase,
    batch_of,
    batches_of_rank,
    build,
    environment,
    held,
    mix_of,
    same_tensors,
    samples_of,
    shard,
)
from torch import Tensor, nn

from shardwise import (
    CommType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    GradientCheckMode,
    KeyedJaggedTensor,
    KeyedTensor,
    LookupPolicy,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from shardwise.planner.layout import TableOptions

pytestmark = pytest.mark.ranks


def flat(output: Any) -> Tensor:
    """Pooled output as it is; sequence output as one matrix of rows, lookup by lookup."""
    return torch.cat([jagged.values() for jagged in output.values()]) if isinstance(output, dict) else output.values()


def batch_of_rank(mix: Mix, samples: int, step: int) -> KeyedJaggedTensor:
    """`samples` of each rank, this rank's."""
    whole = replace(mix, batches=(samples,) * dist.get_world_size())
    return samples_of(batch_of(whole, step), samples * dist.get_rank(), samples * (dist.get_rank() + 1))


TABLES = (
    TableCase("t0", 20, 8, ("f0", "f1"), "table_wise", seed=1),
    TableCase("t1", 21, 8, ("f1",), "row_wise", mean=True, seed=2),
    TableCase("t2", 9, 8, ("f2",), "column_wise", seed=3),
    TableCase("t3", 7, 8, ("f3",), "data_parallel", seed=4),
)
POOLED = Mix(TABLES)
ROWS = Mix(tuple(replace(table, mean=False) for table in TABLES), pooled=False)


# samples of three that each feature keeps
KEEP = {"f0": [0, 2], "f1": [1], "f2": [0, 1, 2], "f3": [2, 0]}


def kept_once(kjt: KeyedJaggedTensor, full: int = 6) -> KeyedJaggedTensor:
    """The samples that each feature keeps, and inverse indices that cycle through them."""
    keys = list(KEEP)
    bags = [samples_of(kjt, s, s + 1)[key] for key in keys for s in KEEP[key]]
    inverse = [[s % len(KEEP[key]) for s in range(full)] for key in keys]
    return KeyedJaggedTensor(
        keys, torch.cat([bag.values() for bag in bags]), lengths=torch.cat([bag.lengths() for bag in bags]),
        stride_per_key_per_rank=[[len(KEEP[key])] for key in keys], inverse_indices=(keys, torch.tensor(inverse)),
    )  # fmt: skip


def in_full(kjt: KeyedJaggedTensor, full: int = 6) -> KeyedJaggedTensor:
    """The same batch written out."""
    kept = [(key, KEEP[key][s % len(KEEP[key])]) for key in KEEP for s in range(full)]
    bags = [samples_of(kjt, s, s + 1)[key] for key, s in kept]
    ids, lengths = torch.cat([bag.values() for bag in bags]), torch.cat([bag.lengths() for bag in bags])
    return KeyedJaggedTensor(list(KEEP), ids, lengths=lengths)


def train_on(model: Any, batches: Iterable[KeyedJaggedTensor]) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Outputs of each step, weights after all of them, and bytes that were sent."""
    outputs = []
    for step, batch in enumerate(batches):
        values = flat(model(batch))
        outputs.append(values.detach())
        (values * torch.randn(values.shape, generator=torch.Generator().manual_seed(step))).sum().backward()
    return outputs, held(model)[0], model._exchange.sent


def expect_close(
    actual: tuple[list[Tensor], dict[str, Tensor]],
    expected: tuple[list[Tensor], dict[str, Tensor]],
    tolerance: float = 1e-5,
) -> None:
    """Outputs and weights."""
    for a, b in zip([*actual[0], *actual[1].values()], [*expected[0], *expected[1].values()], strict=True):
        assert a.numel() == 0 or (a - b).abs().max() <= tolerance
    assert actual[1].keys() == expected[1].keys()


def train_both_ways(mix: Mix) -> list[tuple[list[Tensor], dict[str, Tensor], int]]:
    batches = [batch_of_rank(mix, 3, step) for step in range(3)]
    return [
        train_on(shard(mix, build(mix, "adam"), environment()), map(form, batches)) for form in (kept_once, in_full)
    ]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mix", [POOLED, ROWS], ids=["pooled", "rows"])
def test_features_with_batch_sizes_of_their_own_train_as_the_batch_written_out(mix: Mix, world: int) -> None:
    for kept, full in run_ranks(world, train_both_ways, mix):
        expect_close(kept[:2], full[:2])


def train_with_and_without_dedup(mix: Mix) -> list[tuple[list[Tensor], dict[str, Tensor], int]]:
    batches = [batch for batch, _ in batches_of_rank(mix, range(3))]
    return [train_on(shard(mix, build(mix, "adam"), environment(), dedup=dedup), batches) for dedup in (True, False)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ids_that_travel_once_give_the_same_rows_and_updates_in_fewer_bytes(world: int) -> None:
    few = tuple(replace(table, rows=3) for table in ROWS.tables)
    mix = Mix(few, pooled=False, batches=(9, 9, 9, 9))
    for deduplicated, plain in run_ranks(world, train_with_and_without_dedup, mix):
        assert torch.equal(deduplicated[0][0], plain[0][0])
        expect_close(deduplicated[:2], plain[:2])
        assert deduplicated[2] < plain[2] or world == 1


def compressed(mix: Mix, ways: Sequence[tuple[str, str]]) -> list[tuple[list[Tensor], dict[str, Tensor], int]]:
    """Two steps with each pair of formats, forward and back."""
    runs = []
    for forward, backward in ways:
        codecs = get_qcomm_codecs_registry(QCommsConfig(CommType[forward], CommType[backward]))
        model = shard(mix, build(mix, "sgd"), environment(), codecs=codecs)
        runs.append(train_on(model, (batch_of_rank(mix, 8, step) for step in range(2))))
    return runs


# format -> error of a number in units of the largest
PRECISION = {"FP16": 1e-3, "BF16": 8e-3, "INT8": 8e-3, "FP8": 7e-2}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mix", [POOLED, ROWS], ids=["pooled", "rows"])
def test_compressed_rows_are_close_and_take_fewer_bytes(mix: Mix, world: int) -> None:
    ways = [(forward, backward) for forward in PRECISION for backward in ("FP32", "BF16")]
    for plain, *runs in run_ranks(world, compressed, mix, [("FP32", "FP32"), *ways]):
        for (forward, _), (outputs, state, sent) in zip(ways, runs, strict=True):
            bound = max(PRECISION[forward], PRECISION["BF16"]) * 4
            for a, b in zip(outputs, plain[0], strict=True):
                assert (a - b).abs().max() <= bound * b.abs().max(), forward
            expect_close(([], state), ([], plain[1]), 2 * bound)
            assert world == 1 or (sent < plain[2] and not torch.equal(outputs[0], plain[0][0])), forward


def trained_by_small_gradients(mix: Mix) -> list[dict[str, Tensor]]:
    """Weights that begin at 0, after a step with fp32 and one with fp16 on the way back."""
    weights = []
    for backward in ("FP32", "FP16"):
        module = build(mix, "sgd")
        with torch.no_grad():
            for weight in module.parameters():
                weight.zero_()
        codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP32, CommType[backward]))
        model = shard(mix, module, environment(), codecs=codecs)
        values = flat(model(batch_of_rank(mix, 3, 0)))
        # fp16 has these, and not all their halves: below 2 ** -14 it has fewer bits
        numbers = 2.0**-14 * (1 + torch.arange(values.numel()) % 16 / 1024)
        values.backward(numbers.view_as(values))
        weights.append(held(model)[0])
    return weights


@pytest.mark.parametrize("mix", [POOLED, ROWS], ids=["pooled", "rows"])
def test_a_compressed_gradient_is_divided_by_the_number_of_ranks_where_it_arrives(mix: Mix) -> None:
    tables = tuple(replace(table, mean=False) for table in mix.tables)
    for plain, compressed in run_ranks(2, trained_by_small_gradients, replace(mix, tables=tables)):
        assert any(weight.any() for weight in plain.values())
        assert same_tensors(compressed, plain)


def overflow(where: str) -> tuple[str, bool]:
    """Rank 1 has a number that fp16 cannot carry; then all go on."""
    codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.FP16))
    model = shard(POOLED, build(POOLED, "sgd"), environment(), codecs=codecs)
    batch = batch_of_rank(POOLED, 3, 0)
    large = next(g for g, part in zip(model._tables.groups, model._tables.members, strict=False) if not part.is_replica)
    weights = large.flat.clone()
    if where == "forward" and dist.get_rank() == 1:
        large.flat.fill_(1e5)
    before = {name: value.clone() for name, value in held(model)[0].items()}
    factor = 1e6 if where == "backward" and dist.get_rank() == 1 else 1.0
    error = error_of(lambda: (model(batch).values() * factor).sum().backward())
    same = same_tensors(held(model)[0], before)
    large.flat.copy_(weights)
    model(batch).values().sum().backward()
    return error, same


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_29_a_number_that_overflows_a_compressed_exchange_raises_on_all_ranks(where: str) -> None:
    text = r"OverflowError: rank 1: feature 'f\d' \(table 't\d'\): a number is too large for the compressed exchange"
    for message, unchanged in run_ranks(2, overflow, where):
        assert unchanged
        assert re.match(text, message)


def overflow_together() -> str:
    """Two lookups whose values share a scale that they overflow together, and neither alone."""
    mix = Mix((TableCase("t0", 20, 4, ("f0", "f1"), "table_wise"),))
    model = shard(mix, build(mix, "sgd"), environment(), codecs=get_qcomm_codecs_registry(QCommsConfig(CommType.INT8)))
    with torch.no_grad():
        weight = model.embedding_bags["t0"].weight
        weight[:1], weight[1:] = 3e38, -3e38
    ids, lengths = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, dtype=torch.int64)
    return error_of(lambda: model(KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths)).values())


def test_numbers_that_share_a_scale_and_overflow_together_raise_on_all_ranks() -> None:
    """Their rank raised alone ("min() arg is an empty sequence"), while the others waited for its rows."""
    first, second = run_ranks(2, overflow_together)
    assert first == second and first.startswith("OverflowError") and "is too large for the compressed exchange" in first


def not_finite(mix: Mix, weight: bool) -> tuple[str, bool]:
    module, bad = build(mix, "sgd"), dist.get_rank() == 1
    module._policy = LookupPolicy(gradient_check=GradientCheckMode.RAISE)
    model, batch = shard(mix, module, environment()), batch_of_rank(mix, 3, 0)
    if weight and bad:
        batch.weights()[0] = float("nan")
    before = {name: value.clone() for name, value in held(model)[0].items()}
    values = flat(model(batch))
    upstream = torch.ones_like(values)
    if not weight and bad:
        upstream[0, 0] = float("inf")
    loss = (values * upstream).nan_to_num(0, 0, 0) if weight else values * upstream
    return error_of(lambda: loss.sum().backward()), same_tensors(held(model)[0], before)


@pytest.mark.parametrize("mix", [POOLED, ROWS], ids=["pooled", "rows"])
def test_28_a_gradient_that_is_not_finite_raises_on_all_ranks(mix: Mix) -> None:
    """One rank raised alone, while the others waited for it: the mode was refused sharded."""
    for message, unchanged in run_ranks(2, not_finite, mix, False):
        assert unchanged
        text = r"FloatingPointError: rank 1: feature 'f\d' \(table 't\d'\): its gradient is not finite; no table of its"
        assert re.match(text, message)


def test_13_a_weight_that_is_not_finite_raises_on_all_ranks() -> None:
    mix = replace(POOLED, weighted=True)
    for message, unchanged in run_ranks(2, not_finite, mix, True):
        assert unchanged
        assert (
            message == "FloatingPointError: rank 1: a per-id weight is not finite; no table of its collection changed"
        )


def lazily() -> tuple[bool, bool, str, int]:
    mix = mix_of(3, pooled=True)
    model = shard(mix, build(mix, "sgd"), environment())
    batch = batches_of_rank(mix, [0])[0][0]
    before = model.collectives
    output: Any = model(batch)
    calls = model.collectives - before
    is_one = isinstance(output, KeyedTensor)
    return is_one, output.wait() is output.wait(), str(output), calls


def test_an_output_is_lazy_and_prints_its_values() -> None:
    for is_one, same, text, calls in run_ranks(2, lazily):
        assert is_one
        assert same
        assert text.startswith("KeyedTensor({")
        # everything that other ranks wait for has left before the output is used; hosts of 2 ranks add sums first
        assert calls in (3, 4)


def freeze_on_one_rank() -> str:
    mix = Mix((TableCase("t0", 20, 8, ("f0",), "column_wise", options=TableOptions(row_state="table"), seed=3),))
    model = shard(mix, build(mix, "rowwise_adagrad"), environment())
    model.embedding_bags["t0"].weight.requires_grad_(dist.get_rank() == 0)
    return error_of(lambda: model(batch_of_rank(mix, 3, 0)).values().sum().backward())


def test_a_table_frozen_on_one_rank_alone_is_refused_where_ranks_update_rows_together() -> None:
    """The other ranks would have waited for the frozen shard's part of each row."""
    for rank, message in enumerate(run_ranks(2, freeze_on_one_rank)):
        assert message.startswith(f"RuntimeError: ranks [{1 - rank}] differ from this one")


def by_stages(mix: Mix) -> bool:
    """Two batches under way, stage by stage, as a pipeline has them."""
    model, plain = (shard(mix, build(mix, "sgd"), environment()) for _ in range(2))
    contexts, batches = [model.create_context() for _ in range(2)], [batch_of_rank(mix, 3, step) for step in range(2)]
    arrived = [model.input_dist(ctx, batch).wait().wait() for ctx, batch in zip(contexts, batches, strict=True)]
    outputs = [model.compute_and_output_dist(ctx, step) for ctx, step in zip(contexts, arrived, strict=True)]
    same = all(torch.equal(flat(out), flat(plain(batch))) for out, batch in zip(outputs, batches, strict=True))
    return same and set(model.sharded_parameter_names("m")) == {f"m.{name}" for name in model.fused_parameter_names()}


@pytest.mark.parametrize("mix", [POOLED, ROWS], ids=["pooled", "rows"])
def test_stages_by_torchrecs_names_give_the_rows_of_a_forward(mix: Mix) -> None:
    assert run_ranks(2, by_stages, mix) == [True, True]


class Net(nn.Module):
    """A collection beside dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ebc = fused(EmbeddingBagCollection(bag_tables({"a": 50, "b": 50})))
        self.first, self.last = nn.Linear(4, 8), nn.Linear(24, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor, factor: float) -> Tensor:
        hidden = torch.cat([self.first(dense), self.ebc(features).values()], dim=1)
        return (self.last(hidden) * factor).mean()


def step_that_overflows() -> list[str]:
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.FP16))
    dmp = DistributedModelParallel(Net(), sharders=[EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)])
    errors = []
    for step in range(5):
        batch = random_kjt({"a": 50, "b": 50}, 4, seed=10 * step + dist.get_rank())
        factor = 1e8 if (step, dist.get_rank()) == (2, 1) else 1.0
        errors.append(error_of(lambda batch=batch, factor=factor: dmp(torch.rand(4, 4), batch, factor).backward()))  # type: ignore[misc]
    return errors


@pytest.mark.filterwarnings("ignore:tables")
def test_dense_layers_go_on_after_a_step_whose_gradient_overflowed() -> None:
    """DistributedDataParallel refused every later step: the error had ended its backward before its averages."""
    for errors in run_ranks(2, step_that_overflows):
        assert errors[2].startswith("OverflowError: rank 1: feature")
        assert [*errors[:2], *errors[3:]] == [""] * 4


WHOLE = Mix(tuple(TableCase(f"t{n}", 20, 8, (f"f{n}",), "table_wise", seed=n) for n in range(3)))


@pytest.mark.parametrize(("forward", "backward"), [("FP16", "FP32"), ("FP16", "BF16"), ("FP32", "FP16")])
def test_the_bytes_on_the_wire_are_half_those_of_fp32_for_16_bits(forward: str, backward: str) -> None:
    steps, samples, columns, world = 2, 8, 24, 2
    ranks = run_ranks(world, compressed, WHOLE, [("FP32", "FP32"), (forward, backward)])
    plain, small = ([sent for _, _, sent in way] for way in zip(*ranks, strict=True))
    for codec in (forward, backward):
        if codec != "FP32":
            # rows of all samples of all ranks, 2 bytes less for each number, and a flag of 4 bytes from rank to rank
            plain = [plain[0] + plain[1] - steps * (2 * samples * columns * world - 4 * world * world), 0]
    assert sum(small) == sum(plain)
