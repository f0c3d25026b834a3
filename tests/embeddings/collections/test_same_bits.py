"""A table trains to the same bits however it is launched: behind others, on other tiles, in another order of features,
with the index of its update made in forward.

Three steps of each rule behind others. In the first one row is hit by 100 ids, which are added in two levels, later by
40, and other rows by a few; once that row is hit by 3,000 ids, in three levels.

Takes a minute in the interpreter: every rule trains.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from jagged_batches import random_kjt, upstream
from kernel_inputs import DEFINED, RULES, UPDATES, assert_same_bits, full_if, per_rule, torch_device
from torch import Tensor

from shardwise import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    LookupPolicy,
    PoolingType,
    RowWiseAdagrad,
    RuleOptimizer,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.collections.bag_collection import LONGEST_FIRST, longest_first, order_features
from shardwise.embeddings.tables import lookup_autograd
from shardwise.embeddings.tables.table_group import TableGroup
from shardwise.kernels import configs, persistent_grid
from shardwise.kernels._op import gather_tile
from shardwise.kernels.cpu import update as cpu_update
from shardwise.kernels.features import ORDER
from shardwise.kernels.transpose import levels_for
from shardwise.kernels.update import index_op, row_chunks, update

ROWS, DIM, SAMPLES = 40, 48, 16


def tables_beside(dtype: DataType, behind: bool) -> list[EmbeddingBagConfig]:
    """The table "mine", alone or behind tables of other dims and dtypes and one that shares its sort and its launch."""
    compared = EmbeddingBagConfig(ROWS, DIM, "mine", dtype, ["f"])
    if not behind:
        return [compared]
    return [
        EmbeddingBagConfig(9, 5, "narrow", feature_names=["g"]),
        EmbeddingBagConfig(11, DIM, "twin", dtype, ["h"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(6, DIM, "other", DataType.FP16, ["g"]),
        EmbeddingBagConfig(7, 64, "wide", dtype, ["h", "g"]),
        compared,
    ]


def bags_of_mine(step: int, hot: int) -> tuple[Tensor, Tensor]:
    """Ids and lengths of feature f, spread evenly over the samples: row 7 `hot` times among 60 ids of any row."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.cat([torch.full((hot,), 7), torch.randint(0, ROWS, (60,), generator=generator)])
    ends = torch.linspace(0, len(ids), SAMPLES + 1).long()
    return ids[torch.randperm(len(ids), generator=generator)], ends.diff()


def batch_of(step: int, hot: int, behind: bool) -> KeyedJaggedTensor:
    ids, lengths = bags_of_mine(step, hot if step == 0 else 40)
    if not behind:
        return KeyedJaggedTensor(["f"], ids, lengths=lengths)
    generator = torch.Generator().manual_seed(100 + step)
    others = torch.randint(0, 6, (2 * SAMPLES,), generator=generator)
    return KeyedJaggedTensor(
        ["g", "h", "f"],
        torch.cat([others, ids]),
        lengths=torch.cat([torch.ones(2 * SAMPLES, dtype=torch.int64), lengths]),
    )


def train_mine(rule: str, dtype: DataType, hot: int, device: torch.device, *, behind: bool) -> list[Tensor]:
    """Three steps: each one's output for "mine", and its rows and states at the end."""
    policy = LookupPolicy(BoundsCheckMode.IGNORE)
    module: Any = EmbeddingBagCollection(tables_beside(dtype, behind), device=device, policy=policy)
    with torch.no_grad():
        module.embedding_bags["mine"].weight.copy_(upstream(ROWS, DIM, seed=0))
    kind: Any = type("Ruled", (RuleOptimizer,), {"rule": DEFINED[rule]})
    apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1})
    results = []
    for step in range(3):
        out = module(batch_of(step, hot, behind).to(device))
        output = out["f"]
        results.append(output.detach().clone())
        grad = upstream(SAMPLES, DIM, seed=step).to(device)
        # the other tables train too: their gradients are ones
        torch.autograd.backward([output, out.values()[:, :-DIM]], [grad, torch.ones_like(out.values()[:, :-DIM])])
    results.append(module.embedding_bags["mine"].weight.detach().clone())
    states = module.fused_optimizer().state_dict()["state"]["embedding_bags.mine.weight"]
    return results + [value.clone() for value in states.values()]


def use_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile of a launch, and every block of the torch path, in another size."""
    chosen, doubled = update.update_tile(DIM), update.update_tile(DIM, 2)
    assert doubled[0] == 2 * chosen[0] and doubled[1] == chosen[1]
    of_dim = update.update_tile
    monkeypatch.setattr(update, "update_tile", lambda dim, *_: of_dim(dim, 2))
    monkeypatch.setattr(persistent_grid, "PERSISTENT_PROGRAMS", 3)
    rows, block_d, _ = gather_tile(DIM, 4, 4)
    monkeypatch.setattr(configs, "gather_tile", lambda *_: (2 * rows, block_d // 2, 1))
    monkeypatch.setattr(cpu_update, "_BLOCK_ELEMENTS", 7 * DIM)


RUNS = [
    *((rule, DataType.FP32, 100) for rule in RULES),
    ("rowwise_adagrad", DataType.BF16, 100),
    ("adam", DataType.FP16, 100),
    ("rowwise_adagrad", DataType.FP32, 3000),
]


@pytest.mark.parametrize(
    ("device", "rule", "dtype", "hot"),
    [
        pytest.param(
            *pair.values, dtype, hot, id=f"{pair.values[0]}-{pair.values[1]}-{dtype.value}-{hot}",
            marks=[*pair.marks, *full_if(pair.values[0] == "interpreted" and hot > 1000)],
        )
        for pair in per_rule(UPDATES, ("rowwise_adagrad",)) for rule, dtype, hot in RUNS if rule == pair.values[1]
    ],
)  # fmt: skip
def test_a_table_has_the_same_bits_behind_others_and_on_other_tiles(
    device: str, rule: str, dtype: DataType, hot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of fp16 and bf16 are rounded stochastically: by their own numbers, not by their place in the buffer."""
    where = torch_device(device)
    assert levels_for(hot) == (3 if hot > 1024 else 2)
    alone = train_mine(rule, dtype, hot, where, behind=False)
    behind = train_mine(rule, dtype, hot, where, behind=True)
    use_other_tiles(monkeypatch)
    elsewhere = train_mine(rule, dtype, hot, where, behind=True)
    for expected, *others in zip(alone, behind, elsewhere, strict=True):
        for got in others:
            assert_same_bits(got, expected)


EVERYWHERE = pytest.mark.parametrize("device", UPDATES)
Collection = EmbeddingBagCollection | EmbeddingCollection
IN_FORWARD = LookupPolicy(index_in_forward=True)


def bags(policy: LookupPolicy, device: torch.device, weighted: bool = False, dtype: Any = DataType.FP32) -> Collection:
    torch.manual_seed(0)
    pooling = PoolingType.SUM if weighted else PoolingType.MEAN
    tables = [
        EmbeddingBagConfig(40, 4, "t", feature_names=["f"], pooling=pooling, data_type=dtype),
        EmbeddingBagConfig(9, 8, "u", feature_names=["g", "h"], data_type=dtype),
    ]
    return EmbeddingBagCollection(tables, weighted, device, policy=policy)


def rows(policy: LookupPolicy, device: torch.device) -> Collection:
    torch.manual_seed(0)
    return EmbeddingCollection([EmbeddingConfig(40, 4, "t", feature_names=["f", "g", "h"])], device, policy=policy)


def trained(model: Collection, optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad) -> Collection:
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
    # its groups are made anew with their optimizer
    model.fused_optimizer()
    return model


def batch_for(seed: int, device: torch.device, weighted: bool = False, samples: int = 9) -> KeyedJaggedTensor:
    return random_kjt({"f": 9, "g": 9, "h": 9}, samples, seed=seed, weighted=weighted, device=device)


def values(model: Collection, kjt: KeyedJaggedTensor) -> Tensor:
    out = model(kjt)
    return out.values() if isinstance(model, EmbeddingBagCollection) else torch.cat([j.values() for j in out.values()])


def step(model: Collection, kjt: KeyedJaggedTensor) -> None:
    out = values(model, kjt)
    out.backward(upstream(*out.shape).to(out))


def everything(model: Collection) -> list[Tensor]:
    return [tensor for group in model._groups for tensor in (group.flat, *group.states, group.step)]


def assert_same(collection: Collection, other: Collection) -> None:
    for actual, reference in zip(everything(collection), everything(other), strict=True):
        assert_same_bits(actual, reference)


MODELS: dict[str, tuple[Callable[..., Collection], bool]] = {
    "averages and sums": (bags, False),
    "weights": (lambda policy, device: bags(policy, device, weighted=True), True),
    "fp16": (lambda policy, device: bags(policy, device, dtype=DataType.FP16), False),
    "rows": (rows, False),
}


@EVERYWHERE
@pytest.mark.parametrize("kind", MODELS)
def test_training_has_the_same_bits_and_steps(device: str, kind: str) -> None:
    """Batches of one program and of several, one without ids, and two forwards before their backwards."""
    where, (make, weighted) = torch_device(device), MODELS[kind]
    optimizer = torch.optim.Adam if kind == "rows" else RowWiseAdagrad
    models = [trained(make(policy, where), optimizer) for policy in (LookupPolicy(), IN_FORWARD)]
    for model in models:
        for seed, samples in enumerate((9, 0, 65)):
            step(model, batch_for(seed, where, weighted, samples))
        outs = [values(model, batch_for(seed, where, weighted)) for seed in (7, 8)]
        for out in outs:
            out.sum().backward()
    assert_same(*models)
    assert all(group.step.item() >= 4 for group in models[1]._groups)


@EVERYWHERE
def test_a_table_that_was_frozen_after_the_forward_is_left_alone(device: str) -> None:
    where = torch_device(device)
    models = [trained(bags(policy, where)) for policy in (LookupPolicy(), IN_FORWARD)]
    for model in models:
        step(model, batch_for(0, where))
        out = values(model, batch_for(1, where))
        first = next(iter(model.parameters()))
        first.requires_grad_(False)
        before = first.detach().clone()
        out.sum().backward()
        assert_same_bits(first.detach(), before)
        step(model, batch_for(2, where))
    assert_same(*models)


@pytest.mark.interpreted
def test_an_index_in_forward_leaves_the_update_its_step_and_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward sorts nothing, counts the step, and leaves a batch_for out that the guard reports."""
    where, made = torch_device("interpreted"), list[str]()
    plain = row_chunks.row_chunks

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append("made")
        return plain(*args, **kwargs)

    monkeypatch.setattr(index_op, "row_chunks", noted)
    monkeypatch.setattr(update, "row_chunks", noted)
    model = trained(bags(IN_FORWARD, where))
    (group,) = model._groups
    out = values(model, batch_for(0, where))
    assert made == ["made"] and group.step.item() == 0
    out.sum().backward()
    assert made == ["made"] and group.step.item() == 1
    before = group.flat.clone()
    out = values(model, batch_for(1, where))
    group.check.guard[0] = 3
    out.sum().backward()
    assert group.step.item() == 1
    assert_same_bits(group.flat, before)


@pytest.mark.interpreted
def test_an_a_b_turns_it_on_and_off() -> None:
    where = torch_device("interpreted")
    model = trained(bags(LookupPolicy(), where))
    (group,) = model._groups
    slots, offsets = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2, 3])
    frozen, segments = (False, False), group._segment_numbers
    arguments: tuple[Any, ...] = (group, slots, offsets, None, None)
    assert lookup_autograd.index_ahead(*arguments, pooling="mean", frozen=frozen) is None
    with configs.variant({"index.in_forward": True}):
        ahead = lookup_autograd.index_ahead(*arguments, pooling="mean", frozen=frozen)
    assert ahead is not None and ahead.tensors(frozen, segments) and ahead.tensors((True, False), segments) is None


class Stream:
    """Stands in for a stream: notes what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.log.append(f"event of {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for the {event}")


@pytest.mark.interpreted
def test_streams_meet_before_and_after_the_index_and_keep_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    where, log = torch_device("interpreted"), list[str]()
    here, beside = Stream("main", log), Stream("side", log)
    monkeypatch.setattr(lookup_autograd, "_current", lambda device: here)
    monkeypatch.setattr(lookup_autograd, "_beside", lambda device: beside)

    def inside(stream: Stream) -> AbstractContextManager[None]:
        log.append(f"in {stream.name}")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: log.append(f"kept for {stream.name}"))
    model = trained(bags(LookupPolicy(bounds_check=BoundsCheckMode.IGNORE, index_in_forward=True), where))
    out = values(model, batch_for(0, where))
    # slots, offsets and features
    assert log == ["side waits for main", "in side", "event of side", *["kept for side"] * 3]
    log.clear()
    out.sum().backward()
    # chunks, their numbers, sources and factors
    assert log == ["main waits for the event of side", *["kept for main"] * 4]


DIMS = {"a": 4, "b": 4, "c": 8, "d": 3, "e": 8}
LENGTHS = {"a": 2, "b": 9, "c": 1, "d": 20, "e": 6}


def test_features_of_more_ids_come_first_within_a_class_of_dims_and_equal_ones_as_before() -> None:
    dims = [4, 4, 8, 3, 8]
    assert longest_first(dims, [0, 0, 0, 0, 0]) == [3, 0, 1, 2, 4]
    assert longest_first(dims, list(LENGTHS.values())) == [3, 1, 0, 4, 2]


def test_features_of_one_class_stay_apart_where_rows_are_aligned_differently() -> None:
    """A gradient by per-id weights has a launch for each alignment: mixed, it read rows of 48 bytes as if of 64."""
    assert longest_first([16, 12, 10, 12], [1, 20, 3, 30]) == [2, 3, 1, 0]


def step_of(collection: EmbeddingBagCollection) -> tuple[Tensor, list[Tensor]]:
    """The output of a lookup, and the tables after the update of its backward."""
    lengths = torch.tensor([[n // 2, n - n // 2] for n in LENGTHS.values()]).flatten()
    ids = torch.arange(sum(LENGTHS.values())) % 7
    values = collection(KeyedJaggedTensor.from_lengths_sync([*LENGTHS], ids, lengths)).values()
    values.square().sum().backward()
    return values.detach(), [table.detach().clone() for table in collection.parameters()]


def new_collection() -> EmbeddingBagCollection:
    torch.manual_seed(3)
    tables = [EmbeddingBagConfig(7, dim, f"t_{f}", feature_names=[f]) for f, dim in DIMS.items()]
    collection = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    return collection


def order_of(group: TableGroup) -> list[int]:
    return group.features[:, ORDER].tolist()


@pytest.mark.interpreted
def test_the_bits_of_a_step_are_the_same_in_whatever_order_features_are_taken() -> None:
    collection, usual = new_collection(), step_of(new_collection())
    with configs.variant(LONGEST_FIRST):
        outputs = step_of(collection)
        (group,) = collection._groups
        assert order_of(group) == [3, 1, 0, 4, 2]
        # of a batch of which the host knows no lengths
        order_features(group, None)
        assert order_of(group) == [3, 1, 0, 4, 2]
    assert torch.equal(outputs[0], usual[0])
    assert all(map(torch.equal, outputs[1], usual[1]))
    order_features(group, list(LENGTHS.values()))
    assert order_of(group) == [3, 0, 1, 2, 4]
