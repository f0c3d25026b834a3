"""Batches that travel otherwise: several batch sizes, ids once, compressed rows; and numbers that stop a step."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharding_mixes import Mix, TableCase, batch_of, build, environment, held, mix_of, samples_of, shard, span_of
from torch import Tensor, nn

from shardwise import (
    CommType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    GradientCheckMode,
    KeyedJaggedTensor,
    KeyedTensor,
    LookupPolicy,
    QCommsConfig,
    apply_optimizer_in_backward,
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


def kept_once(kjt: KeyedJaggedTensor, keep: dict[str, list[int]]) -> KeyedJaggedTensor:
    """A batch in which feature f has the samples keep[f] of another, and inverse indices that cycle through them."""
    keys, full = kjt.keys(), 6
    ids, lengths, inverse = [], [], []
    for key in keys:
        mine = [samples_of(kjt, s, s + 1)[key] for s in keep[key]]
        ids += [one.values() for one in mine]
        lengths += [one.lengths() for one in mine]
        inverse.append([s % len(keep[key]) for s in range(full)])
    return KeyedJaggedTensor(
        keys, torch.cat(ids), lengths=torch.cat(lengths), stride_per_key_per_rank=[[len(keep[key])] for key in keys],
        inverse_indices=(keys, torch.tensor(inverse)),
    )  # fmt: skip


def in_full(kjt: KeyedJaggedTensor, keep: dict[str, list[int]]) -> KeyedJaggedTensor:
    """The same batch written out."""
    ids, lengths = [], []
    for key in kjt.keys():  # noqa: SIM118
        for s in range(6):
            one = samples_of(kjt, keep[key][s % len(keep[key])], keep[key][s % len(keep[key])] + 1)[key]
            ids.append(one.values())
            lengths.append(one.lengths())
    return KeyedJaggedTensor(kjt.keys(), torch.cat(ids), lengths=torch.cat(lengths))


def train_both_ways(mix: Mix) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
    keep = {"f0": [0, 2], "f1": [1], "f2": [0, 1, 2], "f3": [2, 0]}
    outputs: list[list[Tensor]] = []
    states = []
    for spread in (kept_once, in_full):
        model = shard(mix, build(mix, "adam"), environment())
        outputs.append([])
        for step in range(3):
            mine = batch_of_rank(mix, 3, step)
            values = flat(model(spread(mine, keep)))
            outputs[-1].append(values.detach())
            (values * torch.randn(values.shape, generator=torch.Generator().manual_seed(step))).sum().backward()
        states.append(held(model)[0])
    return outputs[0], outputs[1], states


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mix", [POOLED, ROWS], ids=["pooled", "rows"])
def test_features_with_batch_sizes_of_their_own_train_as_the_batch_written_out(mix: Mix, world: int) -> None:
    for kept, full, states in run_ranks(world, train_both_ways, mix):
        for a, b in zip(kept, full, strict=True):
            assert (a - b).abs().max() <= 1e-5
        for name, value in states[0].items():
            assert value.numel() == 0 or (value - states[1][name]).abs().max() <= 1e-5, name


def train_with(mix: Mix, dedup: bool) -> tuple[list[Tensor], dict[str, Tensor], int]:
    model = shard(mix, build(mix, "adam"), environment(), dedup=dedup)
    outputs = []
    for step in range(3):
        mine = samples_of(batch_of(mix, step), *span_of(mix, dist.get_rank(), dist.get_world_size()))
        values = flat(model(mine))
        outputs.append(values.detach())
        (values * torch.randn(values.shape, generator=torch.Generator().manual_seed(step))).sum().backward()
    return outputs, held(model)[0], model._exchange.sent


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ids_that_travel_once_give_the_same_rows_and_updates_in_fewer_bytes(world: int) -> None:
    few = tuple(replace(table, rows=3) for table in ROWS.tables)
    mix = Mix(few, pooled=False, batches=(9, 9, 9, 9))
    for (outputs, state, sent), (wanted, other, most) in zip(
        run_ranks(world, train_with, mix, True), run_ranks(world, train_with, mix, False), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(outputs[:1], wanted[:1], strict=True))
        assert all((a - b).abs().max() <= 1e-5 for a, b in zip(outputs, wanted, strict=True))
        for name, value in state.items():
            assert value.numel() == 0 or (value - other[name]).abs().max() <= 1e-5, name
        assert sent < most or world == 1


def compressed(mix: Mix, forward: str, backward: str) -> tuple[list[Tensor], dict[str, Tensor], int]:
    config = QCommsConfig(CommType[forward], CommType[backward])
    model = shard(mix, build(mix, "sgd"), environment(), codecs=get_qcomm_codecs_registry(config))
    outputs = []
    for step in range(2):
        mine = batch_of_rank(mix, 8, step)
        values = flat(model(mine))
        outputs.append(values.detach())
        (values * torch.randn(values.shape, generator=torch.Generator().manual_seed(step))).sum().backward()
    return outputs, held(model)[0], model._exchange.sent


# format -> error of a number in units of the largest
PRECISION = {"FP16": 1e-3, "BF16": 8e-3, "INT8": 8e-3, "FP8": 7e-2}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("forward", PRECISION)
@pytest.mark.parametrize("mix", [POOLED, ROWS], ids=["pooled", "rows"])
def test_compressed_rows_are_close_and_take_fewer_bytes(mix: Mix, forward: str, world: int) -> None:
    plain = run_ranks(world, compressed, mix, "FP32", "FP32")
    for backward in ("FP32", "BF16"):
        for (outputs, state, sent), (wanted, other, most) in zip(
            run_ranks(world, compressed, mix, forward, backward), plain, strict=True
        ):
            bound = max(PRECISION[forward], PRECISION["BF16"]) * 4
            for a, b in zip(outputs, wanted, strict=True):
                assert (a - b).abs().max() <= bound * b.abs().max()
            for name, value in state.items():
                assert value.numel() == 0 or (value - other[name]).abs().max() <= 2 * bound, name
            if world > 1:
                assert sent < most
                assert not torch.equal(outputs[0], wanted[0])


def overflow(where: str) -> tuple[str, bool]:
    """Rank 1 has a number that fp16 cannot carry; then all go on."""
    both = CommType.FP16, CommType.FP16
    model = shard(POOLED, build(POOLED, "sgd"), environment(), codecs=get_qcomm_codecs_registry(QCommsConfig(*both)))
    mine = batch_of_rank(POOLED, 3, 0)
    large = next(g for g, part in zip(model._held.groups, model._held.members, strict=False) if not part.is_replica)
    kept = large.flat.clone()
    if where == "forward" and dist.get_rank() == 1:
        large.flat.fill_(1e5)
    before = {name: value.clone() for name, value in held(model)[0].items()}
    with pytest.raises(OverflowError) as caught:
        out = model(mine).values()
        factor = 1e6 if where == "backward" and dist.get_rank() == 1 else 1.0
        (out * factor).sum().backward()
    same = all(torch.equal(value, before[name]) for name, value in held(model)[0].items())
    large.flat.copy_(kept)
    model(mine).values().sum().backward()
    return str(caught.value), same


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_29_a_number_that_overflows_a_compressed_exchange_raises_on_all_ranks(where: str) -> None:
    first, second = run_ranks(2, overflow, where)
    assert first == second
    message, unchanged = first
    assert unchanged
    assert re.match(
        r"rank 1: feature 'f\d' \(table 't\d'\): a number is too large for the compressed exchange", message
    )


def overflow_together() -> str:
    """Two lookups whose values share a scale that they overflow together, and neither alone."""
    mix = Mix((TableCase("t0", 20, 4, ("f0", "f1"), "table_wise"),))
    model = shard(mix, build(mix, "sgd"), environment(), codecs=get_qcomm_codecs_registry(QCommsConfig(CommType.INT8)))
    with torch.no_grad():
        weight = model.embedding_bags["t0"].weight
        weight[:1], weight[1:] = 3e38, -3e38
    ids, lengths = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, dtype=torch.int64)
    with pytest.raises(OverflowError) as caught:
        model(KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths)).values()
    return str(caught.value)


def test_numbers_that_share_a_scale_and_overflow_together_raise_on_all_ranks() -> None:
    """Their rank raised alone ("min() arg is an empty sequence"), while the others waited for its rows."""
    first, second = run_ranks(2, overflow_together)
    assert first == second and "is too large for the compressed exchange" in first


def not_finite(mix: Mix, weight: bool) -> tuple[str, bool]:
    module = build(mix, "sgd")
    module._policy = LookupPolicy(gradient_check=GradientCheckMode.RAISE)
    model = shard(mix, module, environment())
    mine = batch_of_rank(mix, 3, 0)
    if weight and dist.get_rank() == 1:
        mine.weights()[0] = float("nan")
    before = {name: value.clone() for name, value in held(model)[0].items()}
    values = flat(model(mine))
    upstream = torch.ones_like(values)
    if not weight and dist.get_rank() == 1:
        upstream[0, 0] = float("inf")
    with pytest.raises(FloatingPointError) as caught:
        (values * upstream).nan_to_num(0, 0, 0).sum().backward() if weight else (values * upstream).sum().backward()
    same = all(torch.equal(value, before[name]) for name, value in held(model)[0].items())
    return str(caught.value), same


@pytest.mark.parametrize("mix", [POOLED, ROWS], ids=["pooled", "rows"])
def test_28_a_gradient_that_is_not_finite_raises_on_all_ranks(mix: Mix) -> None:
    """One rank raised alone, while the others waited for it: the mode was refused sharded."""
    for message, unchanged in run_ranks(2, not_finite, mix, False):
        assert unchanged
        assert re.match(r"rank 1: feature 'f\d' \(table 't\d'\): its gradient is not finite; no table of its", message)


def test_13_a_weight_that_is_not_finite_raises_on_all_ranks() -> None:
    mix = replace(POOLED, weighted=True)
    for message, unchanged in run_ranks(2, not_finite, mix, True):
        assert unchanged
        assert message == "rank 1: a per-id weight is not finite; no table of its collection changed"


def lazily() -> tuple[bool, bool, str, int]:
    mix = mix_of(3, pooled=True)
    model = shard(mix, build(mix, "sgd"), environment())
    mine = samples_of(batch_of(mix, 0), *span_of(mix, dist.get_rank(), 2))
    before = model.collectives
    output: Any = model(mine)
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
    options = TableOptions(row_state="table")
    table = TableCase("t0", 20, 8, ("f0",), "column_wise", options=options, seed=3)
    mix = Mix((table,))
    model = shard(mix, build(mix, "rowwise_adagrad"), environment())
    model.embedding_bags["t0"].weight.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(RuntimeError) as caught:
        model(batch_of_rank(mix, 3, 0)).values().sum().backward()
    return str(caught.value)


def test_a_table_frozen_on_one_rank_alone_is_refused_where_ranks_update_rows_together() -> None:
    """The other ranks would have waited for the frozen shard's part of each row."""
    for rank, message in enumerate(run_ranks(2, freeze_on_one_rank)):
        assert message.startswith(f"ranks [{1 - rank}] differ from this one")


def by_stages(mix: Mix) -> bool:
    """Two batches under way, stage by stage, as a pipeline has them."""
    model, plain = (shard(mix, build(mix, "sgd"), environment()) for _ in range(2))
    contexts, batches = [model.create_context() for _ in range(2)], [batch_of_rank(mix, 3, step) for step in range(2)]
    arrived = [model.input_dist(ctx, batch).wait().wait() for ctx, batch in zip(contexts, batches, strict=True)]
    outputs = [model.compute_and_output_dist(ctx, mine) for ctx, mine in zip(contexts, arrived, strict=True)]
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
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(50, 8, name) for name in ("a", "b")])
        apply_optimizer_in_backward(torch.optim.SGD, self.ebc.parameters(), {"lr": 0.1})
        self.first, self.last = nn.Linear(4, 8), nn.Linear(24, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor, factor: float) -> Tensor:
        found = self.ebc(features)
        loss: Tensor = (self.last(torch.cat([self.first(dense), found.values()], dim=1)) * factor).mean()
        return loss


def step_that_overflows() -> list[str]:
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.FP16))
    dmp = DistributedModelParallel(Net(), sharders=[EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)])
    said = []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(0, 50, (16,), generator=generator)
        batch = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.full((8,), 2))
        try:
            dmp(torch.rand(4, 4), batch, 1e8 if (step, dist.get_rank()) == (2, 1) else 1.0).backward()
        except OverflowError as error:
            said.append(f"{step}: {error}")
    return said


@pytest.mark.filterwarnings("ignore:tables")
def test_dense_layers_go_on_after_a_step_whose_gradient_overflowed() -> None:
    """DistributedDataParallel refused every later step: the error had ended its backward before its averages."""
    for said in run_ranks(2, step_that_overflows):
        assert len(said) == 1
        assert said[0].startswith("2: rank 1: feature")


WHOLE = Mix(tuple(TableCase(f"t{n}", 20, 8, (f"f{n}",), "table_wise", seed=n) for n in range(3)))


@pytest.mark.parametrize(("forward", "backward"), [("FP16", "FP32"), ("FP16", "BF16"), ("FP32", "FP16")])
def test_the_bytes_on_the_wire_are_half_those_of_fp32_for_16_bits(forward: str, backward: str) -> None:
    steps, samples, columns, world = 2, 8, 24, 2
    plain = [sent for *_, sent in run_ranks(world, compressed, WHOLE, "FP32", "FP32")]
    small = [sent for *_, sent in run_ranks(world, compressed, WHOLE, forward, backward)]
    for codec in (forward, backward):
        if codec != "FP32":
            # rows of all samples of all ranks, 2 bytes less for each number, and a flag of 4 bytes from rank to rank
            plain = [plain[0] + plain[1] - steps * (2 * samples * columns * world - 4 * world * world), 0]
    assert sum(small) == sum(plain)
