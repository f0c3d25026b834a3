"""`tiered` and what is seen of caches: tables larger than the device in one process, without a plan."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PrefetchTrainPipelineSparseDist,
    RowWiseAdagrad,
    Tier,
    TrainPipelineSparseDist,
    apply_optimizer_in_backward,
    cache_metrics,
    cache_regret,
    tiered,
    trace_caches,
)
from shardwise.kernels import _op

ROWS, DIM, BAGS, STEPS = {"item": 60, "user": 40}, 8, 6, 8
SMALL = Tier(slots=20, max_slots=1.0)


class Net(nn.Module):
    """Two collections that both have a table "item"."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(rows, DIM, name, feature_names=[name]) for name, rows in ROWS.items()], device=device
        )
        self.rows = EmbeddingCollection(
            [EmbeddingConfig(ROWS["item"], DIM, "item", feature_names=["item"])], device=device
        )
        self.over = nn.Linear(DIM, 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.bags(batch)
        rows = self.rows(batch)["item"].values().sum(0)
        out = self.over((pooled["item"] + pooled["user"] + rows).tanh()).squeeze(1)
        return out.square().sum(), out.detach()


def fused(net: Net) -> Net:
    tables = [*net.bags.parameters(), *net.rows.parameters()]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.1})
    return net


def batches() -> list[KeyedJaggedTensor]:
    """Items at random, of the first ten users."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS):
        ids = [torch.randint(0, rows, (2 * BAGS,), generator=draw) for rows in (ROWS["item"], 10)]
        made.append(KeyedJaggedTensor([*ROWS], torch.cat(ids), lengths=torch.full((2 * BAGS,), 2)))
    return made


def train(net: nn.Module, pipeline: Callable[..., Any] | None = None) -> list[Tensor]:
    """Outputs of all steps."""
    dense = torch.optim.SGD(net.get_submodule("over").parameters(), lr=0.1)
    if pipeline is not None:
        loop, given = pipeline(net, dense, torch.device("cpu")), iter(batches())
        return [loop.progress(given) for _ in range(STEPS)]
    outputs = []
    for batch in batches():
        dense.zero_grad()
        loss, out = net(batch)
        loss.backward()
        dense.step()
        outputs.append(out)
    return outputs


def same(some: Any, others: Any) -> bool:
    return all(map(torch.equal, some, others))


@pytest.mark.parametrize("pipeline", [None, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist])
@pytest.mark.parametrize("below", ["ram", "file"])
def test_tiered_tables_of_several_collections_train_to_the_same_bits(pipeline: Any, below: str, tmp_path: Path) -> None:
    whole = fused(Net())
    outputs = train(whole)
    tier = Tier(20, below, str(tmp_path) if below == "file" else None, max_slots=1.0)
    net = tiered(fused(Net()), {"item": tier})
    assert same(train(net, pipeline), outputs)
    expected, state = whole.state_dict(), net.state_dict()
    assert [*state] == [*expected]
    for name, weight in expected.items():
        value = state[name]
        parts = [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]
        assert same([torch.cat(parts)], [weight]), name


def test_other_tables_stay_on_the_device_as_a_whole() -> None:
    net = tiered(fused(Net()), {"user": SMALL})
    assert isinstance(net.rows, EmbeddingCollection)
    assert [*cache_metrics(net)] == ["user"]


def test_a_collection_by_itself_becomes_another() -> None:
    made, whole = tiered(fused(Net()).bags, {"item": SMALL}), fused(Net()).bags
    assert same([made(batch).values() for batch in batches()], [whole(batch).values() for batch in batches()])
    assert cache_metrics(made)["item"].misses > 0


def test_tables_on_meta_get_memory_and_their_first_values() -> None:
    net = tiered(fused(Net("meta")), {"item": SMALL})
    outputs = train(net)
    assert all(output.isfinite().all() for output in outputs) and outputs[0].abs().sum() > 0
    assert cache_metrics(net)["bags.item"].wanted > 0


def test_an_unknown_table_is_named_with_its_neighbours() -> None:
    with pytest.raises(KeyError, match="no table 'itme' in the module, it has \\['item', 'user'\\].*item"):
        tiered(fused(Net()), {"itme": SMALL})


def test_a_table_gets_its_tier_once() -> None:
    net = tiered(fused(Net()), {"item": SMALL})
    with pytest.raises(
        ValueError, match="table 'item' is sharded, .*: give all tiers in one call, and those of a plan"
    ):
        tiered(net, {"item": SMALL})


def test_an_ordinary_optimizer_has_no_gradient_of_rows_below() -> None:
    with pytest.raises(
        ValueError, match="table 'user': a table with a tier is trained by an optimizer in its backward"
    ):
        tiered(Net(), {"user": SMALL})
    frozen = Net()
    frozen.bags.requires_grad_(False)
    assert cache_metrics(tiered(frozen, {"user": SMALL}))["user"].slots == 20


def test_bits_are_the_same_on_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "NUMBA", False)
    expected = train(fused(Net()))
    assert same(train(tiered(fused(Net()), {"item": SMALL, "user": SMALL})), expected)


def test_metrics_count_what_an_obvious_cache_counts() -> None:
    net = tiered(fused(Net()), {"user": Tier(slots=0.5)})
    last, held = cache_metrics(net), set[int]()
    for batch in batches():
        net(batch)[0].backward()
        now = cache_metrics(net)
        step, users = cache_metrics(net, since=last)["user"], set(batch["user"].values().tolist())
        # ten users are wanted at all, and there are twenty slots
        assert (step.wanted, step.misses, step.batches) == (len(users), len(users - held), 1)
        assert step.bytes_moved == (step.loads + step.saves) * 64
        last, held = now, held | users
    total = cache_metrics(net)["user"]
    assert (total.rows, total.slots, total.below) == (40, 20, "ram")
    assert total.as_dict()["hit_rate"] == total.hits / total.wanted
    assert f"user: 20 slots of 40 rows over ram, hit rate {total.hit_rate:.1%} of {total.wanted} rows" in str(net)


def test_tables_of_one_name_are_told_apart_by_their_path() -> None:
    net = tiered(fused(Net()), {"item": SMALL, "user": SMALL})
    train(net)
    metrics = cache_metrics(net)
    assert [*metrics] == ["bags.item", "user", "rows.item"]
    # both collections want the same items
    assert metrics["bags.item"].wanted == metrics["rows.item"].wanted > metrics["user"].wanted > 0


def test_regret_is_none_where_all_fits_and_some_where_it_does_not() -> None:
    net = tiered(fused(Net()), {"item": SMALL, "user": Tier(slots=20)})
    assert cache_regret(net) == {}
    trace_caches(net)
    train(net)
    regret, metrics = cache_regret(net), cache_metrics(net)
    assert regret["user"] == 0
    assert 0 < regret["bags.item"] <= 1 - metrics["bags.item"].hit_rate
    before = deepcopy(regret)
    trace_caches(net)
    assert cache_regret(net) == before


def test_a_model_without_tiers_has_no_metrics() -> None:
    assert cache_metrics(fused(Net())) == {} == cache_regret(fused(Net()))
