"""Embedding pruning beside a plain account of FBGEMM's kernels, id by id, and beside ordinary lookups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.pruning import (
    GenericITEPModule,
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
    PruningLogger,
    counts_at,
    prunes_at,
)

ROWS, IDS, DIM, INTERVAL, STEPS = 20, 100, 4, 12, 45


def collection(pooled: bool = True, fused: bool = True) -> Any:
    """A pruned table of two features, and one that is not."""
    torch.manual_seed(1)
    config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables = [config(ROWS, DIM, "a", feature_names=["f", "g"]), config(30, DIM, "b", feature_names=["h"])]
    made: Any = EmbeddingBagCollection(tables) if pooled else EmbeddingCollection(tables)
    if fused:
        apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.1})
    return made


def model_of(pooled: bool = True, **settings: Any) -> Any:
    make: Any = ITEPEmbeddingBagCollection if pooled else ITEPEmbeddingCollection
    return make(collection(pooled), GenericITEPModule({"a": IDS, "b": 30}, pruning_interval=INTERVAL, **settings))


def batch_of(step: int, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Ids that drift: few of them often, those of before no more."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 6, (3, 8), generator=draw)
    counts = lengths.sum(1).tolist()
    hot = (torch.rand(counts[0] + counts[1], generator=draw) ** 3 * 40 + 60 - step).long()
    values = torch.cat([hot, torch.randint(30, (counts[2],), generator=draw)])
    return KeyedJaggedTensor(["f", "g", "h"], values.to(dtype), lengths=lengths.flatten())


class Account:
    """What FBGEMM's kernels do to the ids of one table, one id at a time."""

    def __init__(self) -> None:
        self.rows = [id if id < ROWS else 0 for id in range(IDS)]
        self.used = np.zeros(IDS, dtype=np.float32)

    def prune(self, iteration: int) -> list[int]:
        if iteration > INTERVAL:
            self.used *= np.float32(0.98)
        sample = sorted(self.used[min(IDS - 1, iteration % 23 + 23 * i)] for i in range(IDS // 23))
        ratio = np.float32(1.0 - float(np.float32(ROWS) / np.float32(IDS)))
        threshold = sample[min(math.floor(ratio * np.float32(len(sample))), len(sample) - 1)]
        gaining = [id for id in range(IDS) if self.used[id] > threshold and self.rows[id] == 0]
        losing = [id for id in range(IDS) if self.used[id] <= threshold and self.rows[id] != 0]
        freed = []
        for gain, lose in zip(gaining, losing, strict=False):
            self.rows[gain], self.rows[lose] = self.rows[lose], 0
            freed.append(self.rows[gain])
        return freed

    def count(self, ids: list[int]) -> None:
        for id in ids:
            self.used[id] += 1


def ids_of(batch: KeyedJaggedTensor) -> list[int]:
    return [*batch["f"].values().tolist(), *batch["g"].values().tolist()]


def state_of(model: Any) -> tuple[Tensor, Tensor]:
    state = model.state_dict()
    return state["_itep_module.a_itp_address_lookup"], state["_itep_module.a_itp_row_util"]


def test_batches_of_the_schedule_prune_and_count() -> None:
    assert [step for step in range(1300) if prunes_at(step, 600)] == [2, 5, 8, 29, 59, 89, 299, 599, 899, 1199]
    assert [step for step in range(130) if counts_at(step)] == [*range(10), 18, 37, 38, 56, 75, 77, 94, 116]


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_go_to_the_ids_that_the_account_says(pooled: bool, dtype: torch.dtype) -> None:
    """Addresses and utilizations of every step; outputs are the rows at the addresses, bit for bit."""
    model, account, changes = model_of(pooled), Account(), 0
    for step in range(STEPS):
        batch = batch_of(step, dtype)
        given = batch.values().clone()
        if prunes_at(step, INTERVAL):
            changes += len(account.prune(step))
        if counts_at(step):
            account.count(ids_of(batch))
        output = model(batch)
        addresses, used = state_of(model)
        assert addresses.tolist() == account.rows
        assert_close(used, torch.from_numpy(account.used), rtol=0, atol=0)
        assert torch.equal(batch.values(), given)
        mapped = torch.tensor(
            [account.rows[id] for id in ids_of(batch)] + batch["h"].values().tolist(), dtype=torch.int64
        )
        plain = KeyedJaggedTensor(batch.keys(), mapped, lengths=batch.lengths())
        expected = model._embedding_bag_collection(plain) if pooled else model._embedding_collection(plain)
        outputs = [(output[key], expected[key]) for key in "fgh"]
        for found, wanted in outputs:
            pair = (found, wanted) if pooled else (found.values(), wanted.values())
            assert torch.equal(*pair)
        total = sum((found if pooled else found.values()).pow(2).sum() for found, _ in outputs)
        assert isinstance(total, Tensor)
        total.backward()
    assert changes > 10
    assert int(model.state_dict()["_iter"]) == STEPS


def test_rows_that_change_hands_begin_anew_after_the_first_interval() -> None:
    """Before, and where nothing changes hands, values and states of the optimizer stay."""
    model, account, early, late = model_of(), Account(), 0, 0
    ebc = model._embedding_bag_collection
    weight = ebc.embedding_bags["a"].weight
    for step in range(STEPS):
        sums = ebc.fused_optimizer().state_dict()["state"]["embedding_bags.a.weight"]["a.momentum1"]
        before, sums_before = weight.detach().clone(), sums.clone()
        freed = account.prune(step) if prunes_at(step, INTERVAL) else []
        if counts_at(step):
            account.count(ids_of(batch_of(step)))
        output = model(batch_of(step))
        if step > INTERVAL:
            before[freed], sums_before[freed] = 0, 0
            late += len(freed)
        else:
            early += len(freed)
        assert_close(weight.detach(), before, rtol=0, atol=0)
        sums = ebc.fused_optimizer().state_dict()["state"]["embedding_bags.a.weight"]["a.momentum1"]
        assert_close(sums, sums_before, rtol=0, atol=0)
        output.values().sum().backward()
    assert early and late


def test_eval_maps_ids_and_changes_nothing() -> None:
    model = model_of()
    for step in range(5):
        model(batch_of(step))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    outputs = [model(batch_of(5)).values() for _ in range(8)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_loaded_state_goes_on_as_the_one_that_was_saved() -> None:
    def train(model: Any, steps: range) -> None:
        for step in steps:
            model(batch_of(step)).values().sum().backward()

    model, other = model_of(), model_of()
    train(model, range(20))
    train(other, range(3))
    other.load_state_dict(model.state_dict())
    optimizers = [one._embedding_bag_collection.fused_optimizer() for one in (model, other)]
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for one in (model, other):
        train(one, range(20, STEPS))
    for name, value in model.state_dict().items():
        assert_close(other.state_dict()[name], value, rtol=0, atol=0)


def test_ids_of_smaller_batches_count_as_often_as_the_full_batch_uses_them() -> None:
    """Key f has two samples for a full batch of three: its first is used twice."""
    model = model_of()
    batch = KeyedJaggedTensor(
        ["f", "g", "h"], torch.tensor([50, 51, 52, 9, 7, 7]), lengths=torch.tensor([2, 1, 1, 0, 1, 1]),
        stride_per_key_per_rank=[[2], [2], [2]],
        inverse_indices=(["f", "g", "h"], torch.tensor([[0, 1, 0], [1, 1, 0], [0, 0, 0]])),
    )  # fmt: skip
    model(batch)
    used = state_of(model)[1]
    assert {id: used[id].item() for id in used.nonzero().flatten().tolist()} == {50: 2, 51: 2, 52: 1, 9: 1}


def test_a_small_table_is_sampled_whole() -> None:
    """Of 9 ids and 4 rows: below 23 ids FBGEMM's sample is empty, and its threshold nobody's."""
    table = EmbeddingBagConfig(4, DIM, "s", feature_names=["f"])
    model = ITEPEmbeddingBagCollection(EmbeddingBagCollection([table]), GenericITEPModule({"s": 9}))
    for _ in range(3):
        ids = torch.tensor([8, 8, 8, 7, 7, 7, 6, 6, 6, 1])
        model(KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([10])))
    # after the first two batches 6, 7 and 8 are above the others: those that had rows give them up
    addresses = model.state_dict()["_itep_module.s_itp_address_lookup"].tolist()
    assert addresses == [0, 0, 0, 0, 0, 0, 1, 2, 3]


def test_without_pruning_batches_pass() -> None:
    model = model_of(enable_pruning=False)
    batch = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([3, 19, 2]), lengths=torch.ones(3, dtype=torch.int64))
    assert torch.equal(model(batch).values(), model._embedding_bag_collection(batch).values())
    idle = GenericITEPModule({"a": IDS})
    assert idle(batch, 0) is batch
    assert idle.lookups == []


class Kept(PruningLogger):
    events: list[tuple[str, SimpleNamespace]] = []

    @classmethod
    @contextmanager
    def pruning_logger(
        cls, event: str, trainer: str | None = None, publisher: str | None = None
    ) -> Iterator[SimpleNamespace]:
        details = SimpleNamespace()
        yield details
        cls.events.append((event, details))


def test_a_logger_is_told_of_prunings() -> None:
    Kept.events.clear()
    model, account = model_of(pruning_logger_type=Kept), Account()
    account.count(ids_of(batch_of(0)) + ids_of(batch_of(1)))
    for step in range(3):
        model(batch_of(step))
    (first, settings), (second, found) = Kept.events
    assert (first, settings.enable_pruning, settings.pruning_interval) == ("ITEP_MODULE_INIT", True, INTERVAL)
    assert (second, found.table_to_pruned_ratio) == ("ITEP_EVICTION", {"a": len(account.prune(2)) / IDS})


def test_a_trace_has_a_pruned_collection_as_one_node() -> None:
    model = model_of().eval()
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(model))
    assert torch.equal(traced(batch_of(0)).values(), model(batch_of(0)).values())


def test_what_cannot_be_pruned_is_refused() -> None:
    def pruned(ids: int, *tables: tuple[str, str]) -> Any:
        configs = [EmbeddingBagConfig(ROWS, DIM, name, feature_names=[feature]) for name, feature in tables]
        return ITEPEmbeddingBagCollection(EmbeddingBagCollection(configs), GenericITEPModule({"a": ids}))

    with pytest.raises(ValueError, match="table 'a': its unpruned hash size 19 is below its 20 rows"):
        pruned(19, ("a", "f"))
    with pytest.raises(ValueError, match=r"table 'a' is pruned and shares \['f'\] with table 'b'"):
        pruned(IDS, ("a", "f"), ("b", "f"))
    with pytest.raises(ValueError, match="pruning_interval must be positive"):
        GenericITEPModule({"a": IDS}, pruning_interval=0)
    with pytest.raises(TypeError, match="got Linear"):
        GenericITEPModule({"a": IDS}, lookups=[torch.nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="two collections have a table"):
        GenericITEPModule({"a": IDS}, lookups=[collection(), collection()])
    with pytest.warns(UserWarning, match="table_name_to_sharding_type has no effect"):
        GenericITEPModule({"a": IDS}, table_name_to_sharding_type={"a": "row_wise"})
    model = pruned(IDS, ("a", "f"))
    for bad in (IDS, -1):
        with pytest.raises(IndexError, match=rf"table 'a': id {bad} is not in \[0, 100\)"):
            model(KeyedJaggedTensor(["f"], torch.tensor([bad]), lengths=torch.tensor([1])))
    state = model.state_dict()
    state["_itep_module.a_itp_address_lookup"] = torch.ones(IDS, dtype=torch.int64)
    with pytest.raises(ValueError, match="gives rows to several ids"):
        model.load_state_dict(state)


def test_a_batch_that_is_refused_counts_no_id_and_prunes_nothing() -> None:
    """Its ids before the bad one were counted, and rows changed hands, again so when the batch was given once more."""
    tables = [EmbeddingBagConfig(3, 4, name, feature_names=[name]) for name in "ab"]
    pruned = ITEPEmbeddingBagCollection(EmbeddingBagCollection(tables), GenericITEPModule({"a": 9, "b": 9}))
    good = KeyedJaggedTensor(["a", "b"], torch.tensor([8, 7]), lengths=torch.tensor([1, 1]))
    bad = KeyedJaggedTensor(["a", "b"], torch.tensor([6, 9]), lengths=torch.tensor([1, 1]))
    for _ in range(4):
        before = {name: value.clone() for name, value in pruned.state_dict().items()}
        with pytest.raises(IndexError, match="id 9 is not in"):
            pruned(bad)
        for name, value in pruned.state_dict().items():
            assert torch.equal(value, before[name]), name
        pruned(good)
