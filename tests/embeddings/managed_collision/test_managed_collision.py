"""Managed collision modules: which ids have slots, against a slow model in Python lists, and the rows of ids."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    RowWiseAdagrad,
    accumulate,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.managed_collision import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    ManagedCollisionModule,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
    apply_mc_method_to_jt_dict,
    average_threshold_filter,
    dynamic_threshold_filter,
    fresh_rows,
    probabilistic_threshold_filter,
)

FREE = 2**63 - 1


@dataclass
class Entry:
    """An id and its slot; a free slot's id is the largest."""

    id: int
    slot: int
    count: int = 0
    last: int = 0


class Slow:
    """The module in lists: `worth(entry, batch)` scores entries, an interval ends every `interval` batches."""

    def __init__(self, slots: int, interval: int, worth: Callable[[Entry, int], float]) -> None:
        self.entries = [Entry(FREE, slot) for slot in range(slots)]
        self.interval, self.worth, self.batch = interval, worth, 0
        self.history: list[tuple[int, int]] = []

    def __call__(self, ids: list[int]) -> tuple[list[int], list[int] | None]:
        """Slots of a batch, and those that got an id."""
        self.batch += 1
        self.history += [(id_, self.batch) for id_ in ids]
        given = self._end() if self.batch % self.interval == 0 else None
        slots = {entry.id: entry.slot for entry in self.entries if entry.id != FREE}
        return [slots.get(id_, len(self.entries) - 1) for id_ in ids], given

    def _end(self) -> list[int]:
        counts, last = Counter(id_ for id_, _ in self.history), dict(self.history)
        self.history = []
        known = {entry.id: entry for entry in self.entries if entry.id != FREE}
        for id_ in counts.keys() & known.keys():
            known[id_].count += counts[id_]
            known[id_].last = last[id_]
        self.entries[-1].count, self.entries[-1].last = FREE, self.batch
        new = sorted(counts.keys() - known.keys(), key=lambda id_: (-counts[id_], id_))
        both = self.entries + [Entry(id_, -1, counts[id_], last[id_]) for id_ in new]
        size = len(self.entries)
        ranked = sorted(range(len(both)), key=lambda n: -self.worth(both[n], self.batch))
        leave, come = [n for n in ranked[size:] if n < size], [n for n in ranked[:size] if n >= size]
        slots = [self.entries[n].slot for n in leave]
        for n, other in zip(leave, come, strict=True):
            both[other].slot = self.entries[n].slot
            self.entries[n] = both[other]
        self.entries.sort(key=lambda entry: entry.id)
        return slots


POLICIES: dict[str, tuple[Callable[[], MCHEvictionPolicy], Callable[[Entry, int], float]]] = {
    "LFU": (LFU_EvictionPolicy, lambda entry, batch: entry.count),
    "LRU": (LRU_EvictionPolicy, lambda entry, batch: entry.last - batch),
    "DistanceLFU": (DistanceLFU_EvictionPolicy, lambda entry, batch: entry.count / (batch - entry.last + 1)),
}


def batch_of(step: int, *, size: int = 20) -> list[int]:
    """Ids of a batch: a few that come always, some that drift; batches have different sizes."""
    draw = torch.Generator().manual_seed(step)
    often = torch.randint(0, 5, (size // 2,), generator=draw) * 2**55
    rare = torch.randint(0, 12, (size // 2 + step % 3,), generator=draw) + 4 * step - 10
    return [*often.tolist(), *rare.tolist()]


def remap(module: MCHManagedCollisionModule, ids: list[int]) -> list[int]:
    """Slots of ids."""
    jagged = JaggedTensor(torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor([len(ids)]))
    return module({"t": jagged})["t"].values().tolist()


@pytest.mark.parametrize("slots", [1, 2, 9, 40])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_ids_get_the_slots_that_a_slow_model_gives_them(policy: str, interval: int, slots: int) -> None:
    make, worth = POLICIES[policy]
    module, slow = MCHManagedCollisionModule(slots, "cpu", make(), interval), Slow(slots, interval, worth)
    for step in range(12):
        ids = batch_of(step)
        expected, given = slow(ids)
        assert remap(module, ids) == expected
        evicted = module.evict()
        assert (None if evicted is None else evicted.tolist()) == given
        assert module._mch_sorted_raw_ids.tolist() == [entry.id for entry in slow.entries]
        assert module._mch_remapped_ids_mapping.tolist() == [entry.slot for entry in slow.entries]
        assert module.open_slots().tolist() == [sum(entry.id == FREE for entry in slow.entries) - 1]
        metadata = {"counts": [e.count for e in slow.entries], "last_access_iter": [e.last for e in slow.entries]}
        for name, values in module._metadata().items():
            assert values.tolist() == metadata[name]


def test_ids_without_a_slot_share_the_last_one_and_evaluation_learns_nothing() -> None:
    module = MCHManagedCollisionModule(4, "cpu", LFU_EvictionPolicy(), 1)
    assert remap(module, [5, 5, 5, 6, 6, 7, 8]) == [0, 0, 0, 1, 1, 2, 3]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.eval()
    assert remap(module, [8, 8, 8, 8, 9, 6]) == [3, 3, 3, 3, 3, 1]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.batches_seen() == 1


def test_a_batch_larger_than_the_first_is_noted_whole() -> None:
    """The history was sized by the first batch, and an empty one left nothing to be learned ever after (TorchRec)."""
    module = MCHManagedCollisionModule(100, "cpu", LFU_EvictionPolicy(), 2)
    remap(module, [])
    assert remap(module, list(range(60))) == list(range(39, 99))


def test_the_id_that_marks_free_slots_gets_none() -> None:
    """It equalled the mark of a free slot, and was given the row of the next id to come (TorchRec)."""
    module = MCHManagedCollisionModule(4, "cpu", DistanceLFU_EvictionPolicy(), 1)
    for _ in range(2):
        assert remap(module, [FREE, 3, FREE]) == [3, 2, 3]
    assert module.open_slots().tolist() == [2]


def test_int32_ids_stay_int32() -> None:
    module = MCHManagedCollisionModule(4, "cpu", LFU_EvictionPolicy(), 1)
    ids = torch.tensor([9, -4, 9], dtype=torch.int32)
    slots = module({"t": JaggedTensor(ids, lengths=torch.tensor([3]))})["t"].values()
    assert slots.dtype == torch.int32 and slots.tolist() == [1, 2, 1]


def test_filters_let_ids_pass_by_their_counts() -> None:
    counts = torch.tensor([1, 2, 3, 30])
    assert average_threshold_filter(counts)[0].tolist() == [False, False, False, True]
    assert dynamic_threshold_filter(counts, 0.25)[0].tolist() == [False, False, True, True]
    assert float(dynamic_threshold_filter(counts, 0.25)[1]) == 2.25
    torch.manual_seed(0)
    passed, draw = probabilistic_threshold_filter(counts, 0.2)
    assert passed.tolist() == [1 - 0.8**n > p for n, p in zip(counts.tolist(), draw.tolist(), strict=True)]
    nothing = torch.empty(0, dtype=torch.int64)
    assert all(keep(nothing)[0].shape == (0,) for keep in (average_threshold_filter, dynamic_threshold_filter))
    module = MCHManagedCollisionModule(
        4, "cpu", LRU_EvictionPolicy(threshold_filtering_func=average_threshold_filter), 1
    )
    assert remap(module, [1, 2, 2, 2, 3]) == [3, 2, 2, 2, 3]


def test_evictions_of_several_intervals_come_together_once() -> None:
    module = MCHManagedCollisionModule(3, "cpu", LRU_EvictionPolicy(), 1)
    for ids in ([1, 2], [3], [4]):
        remap(module, ids)
    evicted = module.evict()
    assert evicted is not None and evicted.tolist() == [0, 1] and module.evict() is None
    remap(module, [5])
    module.reset_inference_mode()
    assert module.evict() is None


def test_ids_are_told_apart_by_their_hash() -> None:
    module = MCHManagedCollisionModule(8, "cpu", LFU_EvictionPolicy(), 1, 10, lambda ids, size: ids % size)
    assert remap(module, [3, 13, 24]) == [5, 5, 6] and module.input_size() == 10
    features = {"t": JaggedTensor(torch.tensor([13, 24]), lengths=torch.tensor([2]))}
    assert apply_mc_method_to_jt_dict(module, "preprocess", features)["t"].values().tolist() == [3, 4]


STATE = [
    *("_output_segments_tensor", "_current_iter_tensor", "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"),
    *("_mch_counts", "_mch_last_access_iter"),
]


@pytest.mark.parametrize("how", ["load", "copy", "pickle"])
def test_training_goes_on_from_a_state_with_the_same_slots(how: str) -> None:
    module = MCHManagedCollisionModule(9, "cpu", DistanceLFU_EvictionPolicy(), 2)
    assert list(module.state_dict()) == STATE and module.state_dict()[STATE[0]].shape == (1025,)
    for step in range(4):
        remap(module, batch_of(step))
    module.evict()
    if how == "load":
        other = MCHManagedCollisionModule(9, "cpu", DistanceLFU_EvictionPolicy(), 2)
        # one that has learned already: it forgets that
        for step in range(7, 10):
            remap(other, batch_of(step))
        other.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    else:
        other = copy.deepcopy(module) if how == "copy" else pickle.loads(pickle.dumps(module))
    for step in range(4, 9):
        assert remap(other, batch_of(step)) == remap(module, batch_of(step))
        assert str(other.evict()) == str(module.evict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in module.state_dict().items())


def test_a_row_shard_gives_out_its_own_slots() -> None:
    whole = MCHManagedCollisionModule(10, "cpu", LFU_EvictionPolicy(), 1, input_hash_size=100, name="t")
    module = whole.rebuild_with_output_id_range((6, 10), [0, 6, 10])
    assert remap(module, [1, 2, 2, 3, 4]) == [7, 6, 6, 8, 9]
    assert (module.output_size(), module.buckets(), module.input_size()) == (4, 2, 100)
    evicted = module.evict()
    assert evicted is not None and sorted(evicted.tolist()) == [6, 7, 8]
    again = whole.rebuild_with_output_id_range((6, 10), [0, 3, 6, 10])
    again.load_state_dict(module.state_dict())
    assert again._output_segments_tensor[:5].tolist() == [0, 3, 6, 10, -1]
    with pytest.raises(ValueError, match=r"its slots \[5, 10\) are no whole segments .* borders are \[0, 6, 10\]"):
        whole.rebuild_with_output_id_range((5, 10), [0, 5, 10]).load_state_dict({**_cut(module.state_dict(), 5)})


def _cut(state: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    return {n: torch.cat([v, v[-1:]])[:size] if n.startswith("_mch") else v for n, v in state.items()}


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="a", num_embeddings=4, embedding_dim=2, feature_names=["f", "g"]),
        EmbeddingBagConfig(name="b", num_embeddings=8, embedding_dim=2, feature_names=["h"]),
    ]


def modules() -> dict[str, Any]:
    # not in the order of the tables
    return {
        "b": MCHManagedCollisionModule(8, "cpu", LFU_EvictionPolicy(), 2),
        "a": MCHManagedCollisionModule(4, "cpu", LFU_EvictionPolicy(), 1),
    }


def test_a_collection_maps_the_features_of_a_table_together() -> None:
    collection = ManagedCollisionCollection(modules(), tables())
    keys, ids = ["h", "other", "g", "f"], [[8, 9], [1], [70, 80], [90, 80]]
    batch = KeyedJaggedTensor(
        keys, torch.tensor(sum(ids, [])), torch.arange(7.0), torch.tensor([1, 1, 1, 0, 0, 2, 2, 0])
    )
    mapped = collection(batch)
    assert mapped.keys() == ["f", "g", "h"] and mapped.lengths().tolist() == [2, 0, 0, 2, 1, 1]
    # 80 came most often, then the smaller; the interval of "b" has not ended
    assert mapped.values().tolist() == [2, 0, 1, 0, 7, 7]
    assert mapped.weights().tolist() == [5, 6, 3, 4, 0, 1]
    evicted, free = collection.evict(), collection.open_slots()
    assert evicted["a"] is not None and sorted(evicted["a"].tolist()) == [0, 1, 2] and evicted["b"] is None
    assert {name: int(count) for name, count in free.items()} == {"a": 0, "b": 7}
    assert collection.table_to_number_buckets() == {"a": 1, "b": 1}


def test_features_may_differ_in_batch_size() -> None:
    collection = ManagedCollisionCollection(modules(), tables())
    batch = KeyedJaggedTensor(
        ["f", "g", "h"], torch.tensor([5, 6, 5, 7]), lengths=torch.tensor([2, 1, 0, 1]),
        stride_per_key_per_rank=[[1], [2], [1]],
    )  # fmt: skip
    mapped = collection(batch)
    assert mapped.stride_per_key() == [1, 2, 1] and mapped.values().tolist() == [1, 2, 1, 7]


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none given for \['a'\], no such table \['c'\]"):
        ManagedCollisionCollection({"b": modules()["b"], "c": modules()["a"]}, tables())
    with pytest.raises(ValueError, match="for a must match 4, the rows of the table: the module has 8 slots"):
        ManagedCollisionCollection({"a": modules()["b"], "b": modules()["b"]}, tables())
    for what in ({"zch_size": 0}, {"eviction_interval": 0}):
        given: dict[str, Any] = {
            "zch_size": 4,
            "eviction_interval": 1,
            "eviction_policy": LFU_EvictionPolicy(),
            "device": "cpu",
        } | what
        with pytest.raises(ValueError, match=f"needs a positive {next(iter(what))}, got 0"):
            MCHManagedCollisionModule(**given)
    with pytest.raises(ValueError, match="limited to 1024 shards, got 1025 segments"):
        MCHManagedCollisionModule(4, "cpu", LFU_EvictionPolicy(), 1, output_segments=list(range(1026)))
    with pytest.warns(UserWarning, match="mch_size and mch_hash_func have no effect"):
        MCHManagedCollisionModule(4, "cpu", LFU_EvictionPolicy(), 1, mch_size=3)
    with pytest.raises(KeyError, match=r"features \['h'\] are not in the batch"):
        ManagedCollisionCollection(modules(), tables())(
            KeyedJaggedTensor(["f", "g"], torch.tensor([1]), lengths=torch.tensor([1, 0]))
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


def features_of(step: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 3, (9,), generator=draw)
    ids = torch.randint(step, step + 5, (int(lengths.sum()),), generator=draw) * 2**50
    return KeyedJaggedTensor(["f", "g", "h"], ids, lengths=lengths)


def train(module: Any, step: int) -> Tensor:
    """A step; what was looked up."""
    rows, _ = module(features_of(step))
    out = rows.values() if not isinstance(rows, dict) else torch.cat([jt.values() for jt in rows.values()])
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
        module(features_of(4))
    # the same ids in the same maps: which slots have changed hands
    twin = build(optimizer=optimizer)
    for step in range(4):
        twin._managed_collision_collection(features_of(step))
        twin._managed_collision_collection.evict()
    twin._managed_collision_collection(features_of(4))
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
            rows, slots = module(features_of(step))
            expected = module._embedding_module(slots)
            again, nothing = plain(features_of(step))
        assert nothing is None and slots.keys() == ["f", "g", "h"]
        for name in ("f", "g", "h"):
            values = [output[name] if pooled else output[name].values() for output in (rows, expected, again)]
            assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


def test_a_mask_says_which_bags_have_ids_and_their_ids_are_learned() -> None:
    module, other = build(pooled=True), build(pooled=True)
    mask = torch.ones(1)
    for step in range(3):
        features = features_of(step)
        mask = module.lookup_remapped_lengths_mask(features)
        other._managed_collision_collection(features)
        assert mask.tolist() == [length > 0 for key in ("f", "g", "h") for length in features[key].lengths().tolist()]
    states = [one._managed_collision_collection.state_dict() for one in (module, other)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items()) and not mask.all()


PREFIXES = {"_managed_collision_collection._managed_collision_modules", "_embedding_module.embedding_bags"}


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adam])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(optimizer: Any) -> None:
    module = build(interval=2, optimizer=optimizer)
    for step in range(4):
        train(module, step)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    assert {name.rsplit(".", 2)[0] for name in state} == PREFIXES
    # deep, as the states that it names are live
    fused = copy.deepcopy(module._embedding_module.fused_optimizer().state_dict())
    other = build(interval=2, optimizer=optimizer)
    torch.manual_seed(123)
    other.load_state_dict(state)
    other._embedding_module.fused_optimizer().load_state_dict(fused)
    for step in range(4, 9):
        assert torch.equal(train(module, step), train(other, step))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in module.state_dict().items())


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
    (first, slots), (second, others) = module(features_of(0)), module(features_of(1))
    (first.values().sum() + second.values().sum()).backward()
    weight = module._embedding_module.embedding_bags["a"].weight
    used = torch.bincount(
        torch.cat([kjt[key].values() for kjt in (slots, others) for key in ("f", "g")]), minlength=ROWS
    )
    assert torch.equal(weight.grad, used[:, None].expand(ROWS, DIM).float())


def test_a_collection_of_other_tables_is_refused() -> None:
    table = EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=8, feature_names=["f", "g"])
    with pytest.raises(ValueError, match=r"Configs of the same tables: \{'a': \(6, 8, .* and "):
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
            rows, _ = module(KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([1, 1])))
            assert isinstance(rows, KeyedTensor)
            rows.values().sum().backward()
    ebc.fused_optimizer().step()
    group, number = ebc._homes()[0]
    assert torch.equal(group.state_views(number)["momentum1"], torch.tensor([[1.0], [1.0], [0.0]]).expand(3, DIM))
    # a step of Adagrad for a gradient of 1
    expected = fresh_rows(table, 2, 2) - 0.1
    assert torch.allclose(group.view(number)[:2].sort(0)[0], expected.sort(0)[0], atol=1e-6)


class Modulo(ManagedCollisionModule):
    """A module of a program's own: an id's slot is its remainder."""

    def __init__(self, slots: int, segments: list[int] | None = None) -> None:
        super().__init__(torch.device("cpu"), output_segments=segments or [0, slots])
        self.slots, self.profiled = slots, 0

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return features

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        self.profiled += 1
        return features

    def remap(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True, write_weights: Tensor | None = None
    ) -> dict[str, JaggedTensor]:
        return {name: JaggedTensor(jt.values() % self.slots, lengths=jt.lengths()) for name, jt in features.items()}

    def forward(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        return self.remap(self.profile(self.preprocess(features)))

    def evict(self) -> Tensor | None:
        return None

    def output_size(self) -> int:
        return self.slots

    def buckets(self) -> int:
        return 1

    def input_size(self) -> int:
        return 1000

    def open_slots(self) -> Tensor:
        return torch.empty(0)

    def validate_state(self) -> None:
        return None

    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | str | None = None
    ) -> Modulo:
        return Modulo(output_id_range[1] - output_id_range[0], output_segments)


def test_a_module_of_ones_own_gives_out_slots_that_are_looked_up_and_trained() -> None:
    """Programs derive from the base class: nothing tested that a collection calls what they override."""
    config, module = EmbeddingBagConfig(5, 4, "t", feature_names=["f"]), Modulo(5)
    tables = EmbeddingBagCollection([config])
    collection = ManagedCollisionEmbeddingBagCollection(
        tables, ManagedCollisionCollection({"t": module}, [config]), return_remapped_features=True
    )
    out, slots = collection(KeyedJaggedTensor(["f"], torch.tensor([3, 7, 12]), lengths=torch.tensor([2, 1])))
    assert slots is not None and slots["f"].values().tolist() == [3, 2, 2]
    rows = tables.embedding_bags["t"].get_parameter("weight")
    assert torch.equal(out.values(), torch.stack([rows[3] + rows[2], rows[2]]))
    out.values().sum().backward()
    assert rows.grad is not None and rows.grad[:, 0].tolist() == [0.0, 0.0, 2.0, 1.0, 0.0]
    assert module.profiled == 1
    segments = module.state_dict()["_output_segments_tensor"]
    assert segments.shape == (1025,) and segments[:3].tolist() == [0, 5, -1]
