"""Collections behind managed collision modules: rows of new ids begin anew, training goes on from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    RowWiseAdagrad,
    accumulate,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.managed_collision import (
    DistanceLFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
    fresh_rows,
)

ROWS, DIM = 6, 4


def build(*, pooled: bool = True, interval: int = 1, optimizer: Any = torch.optim.Adagrad, **given: Any) -> Any:
    """A table of ROWS rows for features f and g behind a map, and one for h."""
    torch.manual_seed(0)
    config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables = [
        config(name="a", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f", "g"]),
        config(name="b", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["h"]),
    ]
    collection: Any = EmbeddingBagCollection(tables) if pooled else EmbeddingCollection(tables)
    if optimizer is not None:
        extra = {"initial_accumulator_value": 0.5} if optimizer is torch.optim.Adagrad else {}
        apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.1, **extra})
    modules = {
        "a": MCHManagedCollisionModule(ROWS, "cpu", LRU_EvictionPolicy(), interval, name="a"),
        "b": MCHManagedCollisionModule(ROWS, "cpu", DistanceLFU_EvictionPolicy(), interval, name="b"),
    }
    make = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    return make(collection, ManagedCollisionCollection(modules, tables), **given)


def batch_of(step: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 3, (9,), generator=draw)
    ids = torch.randint(step, step + 5, (int(lengths.sum()),), generator=draw) * 2**50
    return KeyedJaggedTensor(["f", "g", "h"], ids, lengths=lengths)


def train(module: Any, step: int) -> Tensor:
    """A step; what was looked up."""
    found, _ = module(batch_of(step))
    out = found.values() if not isinstance(found, dict) else torch.cat([jt.values() for jt in found.values()])
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return out.detach()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad, torch.optim.Adam])
def test_the_row_of_a_new_id_begins_anew_with_its_optimizer_states(optimizer: Any) -> None:
    module = build(optimizer=optimizer)
    ebc = module._embedding_module
    for step in range(4):
        train(module, step)
    weights = {name: value.clone() for name, value in ebc.state_dict().items()}
    states = {t: {k: v.clone() for k, v in g.state_views(n).items()} for t, (g, n) in ebc._homes().items()}
    with torch.no_grad():
        module(batch_of(4))
    # the same ids in the same maps: which slots have changed hands
    twin = build(optimizer=optimizer)
    for step in range(4):
        twin._managed_collision_collection(batch_of(step))
        twin._managed_collision_collection.evict()
    twin._managed_collision_collection(batch_of(4))
    evicted = twin._managed_collision_collection.evict()
    for t, (name, slots) in enumerate(evicted.items()):
        assert 0 < slots.numel() < ROWS - 1
        now, before = ebc.state_dict()[f"embedding_bags.{name}.weight"], weights[f"embedding_bags.{name}.weight"]
        before[slots] = fresh_rows(ebc.embedding_bag_configs()[t], slots.numel(), 5)
        assert torch.equal(now, before)
        group, number = ebc._homes()[t]
        for state, value in group.state_views(number).items():
            expected = states[t][state]
            if state != "step":
                assert not (expected[slots] == expected[-1]).all()
                expected[slots] = 0.5 if optimizer is torch.optim.Adagrad else 0.0
            assert torch.equal(value, expected)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_rows_are_looked_up_by_slot_and_come_as_a_pair(pooled: bool) -> None:
    module, plain = build(pooled=pooled, return_remapped_features=True), build(pooled=pooled)
    for step in range(5):
        with torch.no_grad():
            found, slots = module(batch_of(step))
            expected = module._embedding_module(slots)
            again, nothing = plain(batch_of(step))
        assert nothing is None and slots.keys() == ["f", "g", "h"]
        for name in ("f", "g", "h"):
            values = [one[name] if pooled else one[name].values() for one in (found, expected, again)]
            assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


PREFIXES = {"_managed_collision_collection._managed_collision_modules", "_embedding_module.embedding_bags"}


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adam])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(optimizer: Any) -> None:
    module = build(interval=2, optimizer=optimizer)
    for step in range(4):
        train(module, step)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    assert {name.rsplit(".", 2)[0] for name in state} == PREFIXES
    fused = module._embedding_module.fused_optimizer().state_dict()
    # deep, as the states that it names are live
    fused = torch.load(_saved(fused), weights_only=False)
    other = build(interval=2, optimizer=optimizer)
    torch.manual_seed(123)
    other.load_state_dict(state)
    other._embedding_module.fused_optimizer().load_state_dict(fused)
    for step in range(4, 9):
        assert torch.equal(train(module, step), train(other, step))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in module.state_dict().items())


def _saved(value: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_new_rows_leave_the_random_generator_as_it_was() -> None:
    module = build()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train(module, 0)
    assert torch.equal(torch.rand(3), expected)


def test_gradients_of_tables_without_a_fused_optimizer_reach_the_slots() -> None:
    module = build(optimizer=None, allow_in_place_embed_weight_update=True, return_remapped_features=True)
    # two forwards before the backward
    (first, slots), (second, others) = module(batch_of(0)), module(batch_of(1))
    (first.values().sum() + second.values().sum()).backward()
    weight = module._embedding_module.embedding_bags["a"].weight
    used = torch.bincount(
        torch.cat([kjt[key].values() for kjt in (slots, others) for key in ("f", "g")]), minlength=ROWS
    )
    assert torch.equal(weight.grad, used[:, None].expand(ROWS, DIM).float())


def test_a_collection_of_other_tables_is_refused() -> None:
    table = EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=8, feature_names=["f", "g"])
    with pytest.raises(ValueError, match=r"the embedding module has tables \{'a': \(6, 8, .*the managed collision"):
        ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection([table]), build()._managed_collision_collection)


def test_gradients_that_wait_go_with_the_ids_that_had_the_row() -> None:
    """Both rows change hands between two micro-batches: the step is that of the second one alone."""
    table = EmbeddingBagConfig(3, DIM, "t", feature_names=["f"])
    ebc = EmbeddingBagCollection([table])
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    maps = {"t": MCHManagedCollisionModule(3, "cpu", LRU_EvictionPolicy(), 1)}
    module = ManagedCollisionEmbeddingBagCollection(ebc, ManagedCollisionCollection(maps, [table]))
    with accumulate(module):
        for ids in ([1, 2], [3, 4]):
            found, _ = module(KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([1, 1])))
            assert isinstance(found, KeyedTensor)
            found.values().sum().backward()
    ebc.fused_optimizer().step()
    group, number = ebc._homes()[0]
    assert torch.equal(group.state_views(number)["momentum1"], torch.tensor([[1.0], [1.0], [0.0]]).expand(3, DIM))
    # a step of Adagrad for a gradient of 1
    expected = fresh_rows(table, 2, 2) - 0.1
    assert torch.allclose(group.view(number)[:2].sort(0)[0], expected.sort(0)[0], atol=1e-6)
