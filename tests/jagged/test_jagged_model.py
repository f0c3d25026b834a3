"""Operations of KeyedJaggedTensor, alone and in chains, against the lists of tests/support/jagged_model.py.

Gradients, the exchange between ranks and the other two types are in the files beside this one.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings, strategies as st
from jagged_model import (
    BAGS,
    KEYS,
    WEIGHTS,
    Batch,
    Form,
    any_batches,
    batches,
    build,
    check,
    check_bags,
    check_dict,
    check_inverse,
    concat,
    deduplicated,
    forms,
    from_bags,
    pick,
    split,
)
from torch import Tensor

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor

same = settings(max_examples=40, deadline=None)


def segments(data: st.DataObject, count: int) -> list[int]:
    """Sizes >= 0 of up to four pieces that cover `count` keys."""
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, count), max_size=3))), count]
    return [b - a for a, b in zip(edges, edges[1:], strict=False)]


def places(data: st.DataObject, count: int) -> list[int]:
    """Indices of keys in any order; repeats and omissions."""
    return data.draw(st.lists(st.integers(0, count - 1), max_size=5)) if count else []


# One operation.


@given(any_batches(), forms())
@same
def test_a_batch_says_what_its_lists_say(batch: Batch, form: Form) -> None:
    check(build(batch, form), batch, form)


@given(any_batches(), forms(), st.data())
@same
def test_permute_takes_keys_with_all_that_is_theirs(batch: Batch, form: Form, data: st.DataObject) -> None:
    kjt, order = build(batch, form), places(data, len(batch.features))
    given_tensor = data.draw(st.booleans())
    permuted = kjt.permute(order, torch.tensor(order, dtype=torch.int32) if given_tensor else None)
    check(permuted, pick(batch, order), form)
    check(kjt, batch, form)


@given(any_batches(), forms(), st.data())
@same
def test_split_cuts_and_concat_joins_again(batch: Batch, form: Form, data: st.DataObject) -> None:
    kjt, sizes = build(batch, form), segments(data, len(batch.features))
    pieces = kjt.split(sizes)
    for piece, wanted in zip(pieces, split(batch, sizes), strict=True):
        check(piece, wanted, form)
    order = data.draw(st.permutations(range(len(pieces))))
    joined = KeyedJaggedTensor.concat([pieces[i] for i in order])
    check(joined, concat([split(batch, sizes)[i] for i in order]), form)
    check(kjt, batch, form)


@given(any_batches(), st.data())
@same
def test_split_refuses_to_leave_keys_out(batch: Batch, data: st.DataObject) -> None:
    kjt, count = build(batch), len(batch.features)
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=3).filter(lambda drawn: sum(drawn) != count))
    with pytest.raises(ValueError, match=rf"{count} keys .* sum to {sum(sizes)}"):
        kjt.split(sizes)


@given(st.data(), forms(), forms(), st.integers(0, 3), st.booleans())
@same
def test_concat_joins_batches_of_any_make(
    data: st.DataObject, form: Form, other: Form, samples: int, weighted: bool
) -> None:
    """Fixed batches and those of their own sizes; ids of 32 bits beside ids of 64 become ids of 64."""
    kinds = {"samples": samples, "weighted": weighted, "world": 1}
    left, right = (data.draw(batches(keys=keys, **kinds)) for keys in (KEYS[:2], KEYS[2:]))
    joined = KeyedJaggedTensor.concat([build(left, form), build(right, other)])
    check(joined.sync(), concat([left, right]))
    if left.items and right.items:
        assert joined.values().dtype == torch.promote_types(form.ids, other.ids)


@given(st.data(), forms(), st.integers(0, 3))
@same
def test_concat_joins_inverse_indices_or_refuses_where_some_lack_them(
    data: st.DataObject, form: Form, samples: int
) -> None:
    left, right = (data.draw(deduplicated(keys=keys, samples=samples)) for keys in (KEYS[:2], KEYS[2:]))
    if left.weighted == right.weighted:
        joined = KeyedJaggedTensor.concat([build(left, form), build(right, form)])
        check(joined, concat([left, right]), form)
    bare = data.draw(batches(keys=KEYS[2:], fewest=1, samples=samples, weighted=left.weighted, variable=False))
    with pytest.raises(ValueError, match="inverse"):
        KeyedJaggedTensor.concat([build(left, form), build(bare, form)])


@given(any_batches(), forms(), st.booleans())
@same
def test_to_dict_and_back(batch: Batch, form: Form, offsets: bool) -> None:
    kjt = build(batch, form)
    jts = kjt.to_dict(compute_offsets=offsets)
    back = KeyedJaggedTensor.from_jt_dict(jts)
    check(back, from_bags(dict(batch.features), batch.weighted), form if batch.features else None)
    check_dict(kjt.to_dict(), batch)


@given(any_batches(), forms())
@same
def test_one_key_is_its_bags(batch: Batch, form: Form) -> None:
    kjt = build(batch, form)
    for key, bags in batch.features:
        jt = kjt[key]
        check_bags(jt, bags, batch.weighted)
        assert [bag.tolist() for bag in jt.to_dense()] == [[number for number, _ in bag] for bag in bags]
    with pytest.raises(KeyError, match="unknown key 'nobody'"):
        kjt["nobody"]


@given(any_batches(), forms())
@same
def test_flattened_lengths_change_nothing_else(batch: Batch, form: Form) -> None:
    check(build(batch, form).flatten_lengths(), batch, form)


@given(any_batches(), forms())
@same
def test_empty_like_keeps_the_form_without_the_ids(batch: Batch, form: Form) -> None:
    """Without a device no keys, the stride and the dtypes; with one the shapes of a batch to copy into."""
    kjt = build(batch, form)
    empty = KeyedJaggedTensor.empty_like(kjt)
    assert (empty.keys(), empty.stride(), empty.values().shape, empty.lengths().shape) == ([], batch.stride, (0,), (0,))
    assert (empty.values().dtype, empty.lengths().dtype) == (form.ids, form.lengths)
    assert (empty.weights_or_none() is not None) == batch.weighted
    room = KeyedJaggedTensor.empty_like(kjt, torch.device("cpu"))
    assert (room.keys(), room.stride(), room.stride_per_key()) == (batch.keys, batch.stride, batch.batch_sizes)
    assert room.values().data_ptr() != kjt.values().data_ptr() or not batch.items
    assert room.copy_(kjt) is room
    check(room, batch, form)


@given(batches(), st.data())
@same
def test_copy_takes_a_batch_of_the_same_shape_and_forgets_the_last(batch: Batch, data: st.DataObject) -> None:
    """Bags of the new batch are other bags: what the old one had cached must not speak for it."""
    lengths = data.draw(st.permutations(batch.lengths))
    items = [(number + 1, weight) for number, weight in batch.items]
    bags = iter([[items.pop(0) for _ in range(n)] for n in lengths])
    features = tuple((key, [next(bags) for _ in old]) for key, old in batch.features)
    other = Batch(features, batch.stride, batch.weighted, batch.ranks)
    kjt, incoming = build(batch), build(other)
    warm(kjt)
    warm(incoming) if data.draw(st.booleans()) else incoming.lengths()
    kjt.copy_(incoming)
    check(kjt, other)
    check(incoming, other)
    if batch.items:
        assert kjt.values().data_ptr() != incoming.values().data_ptr()
        # the cached views are of its own tensors
        kjt.values().fill_(5)
        check(incoming, other)


@given(batches(fewest=1))
@same
def test_copy_refuses_another_shape(batch: Batch) -> None:
    kjt, features = build(batch), batch.features
    longer = Batch(((features[0][0], [*features[0][1], [(1, 1.0)]]), *features[1:]), batch.stride + 1, batch.weighted,
        tuple((len(bags) + (i == 0),) for i, (_, bags) in enumerate(features)))  # fmt: skip
    with pytest.raises((ValueError, RuntimeError)):
        kjt.copy_(build(longer))
    check(kjt, batch)


NESTED = st.lists(st.tuples(st.sampled_from(KEYS), st.lists(BAGS, max_size=3)), max_size=4, unique_by=lambda e: e[0])


@given(NESTED, st.sampled_from([torch.int32, torch.int64]), st.booleans())
@same
def test_from_lists_is_what_the_lists_say(entries: list[Any], dtype: torch.dtype, weighted: bool) -> None:
    ids = {key: [[number for number, _ in bag] for bag in bags] for key, bags in entries}
    weights = {key: [[weight for _, weight in bag] for bag in bags] for key, bags in entries}
    kjt = KeyedJaggedTensor.from_lists(ids, weights if weighted else None, dtype=dtype)
    check(kjt, from_bags(dict(entries), weighted))
    assert kjt.values().dtype == dtype


# Chains. Each link is an operation on tensors beside the same on lists.


def permuted(kjt: KeyedJaggedTensor, batch: Batch, data: st.DataObject) -> tuple[KeyedJaggedTensor, Batch]:
    order = places(data, len(batch.features))
    return kjt.permute(order), pick(batch, order)


def a_piece(kjt: KeyedJaggedTensor, batch: Batch, data: st.DataObject) -> tuple[KeyedJaggedTensor, Batch]:
    sizes = segments(data, len(batch.features))
    i = data.draw(st.integers(0, len(sizes) - 1))
    return kjt.split(sizes)[i], split(batch, sizes)[i]


def rejoined(kjt: KeyedJaggedTensor, batch: Batch, data: st.DataObject) -> tuple[KeyedJaggedTensor, Batch]:
    """Cut, and joined in another order; a batch that has a key twice cannot be joined."""
    sizes = segments(data, len(batch.features))
    if len(set(batch.keys)) < len(batch.keys):
        return kjt, batch
    order = data.draw(st.permutations(range(len(sizes))))
    pieces, wanted = kjt.split(sizes), split(batch, sizes)
    return KeyedJaggedTensor.concat([pieces[i] for i in order]), concat([wanted[i] for i in order])


def through_dict(kjt: KeyedJaggedTensor, batch: Batch, data: st.DataObject) -> tuple[KeyedJaggedTensor, Batch]:
    back = KeyedJaggedTensor.from_jt_dict(kjt.to_dict(data.draw(st.booleans())))
    return back, from_bags(dict(batch.features), batch.weighted)


def through_keys(kjt: KeyedJaggedTensor, batch: Batch, data: st.DataObject) -> tuple[KeyedJaggedTensor, Batch]:
    jts = {key: kjt[key] for key in batch.keys}
    return KeyedJaggedTensor.from_jt_dict(jts), from_bags(dict(batch.features), batch.weighted)


def through_pytree(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    leaves, spec = pytree.tree_flatten(kjt)
    assert all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves)
    return pytree.tree_unflatten(leaves, spec)


COPIES: dict[str, Callable[[KeyedJaggedTensor], KeyedJaggedTensor]] = {
    "to": lambda kjt: kjt.to("cpu"),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda kjt: pickle.loads(pickle.dumps(kjt)),
    "pytree": through_pytree,
    "flatten_lengths": lambda kjt: kjt.flatten_lengths(),
    "empty_like and copy_": lambda kjt: KeyedJaggedTensor.empty_like(kjt, kjt.device()).copy_(kjt),
    "sync": lambda kjt: kjt.sync(),
    "unsync": lambda kjt: kjt.unsync(),
}
LINKS = [permuted, a_piece, rejoined, through_dict, through_keys]


def warm(kjt: KeyedJaggedTensor) -> None:
    """Fill every cache there is."""
    kjt.sync().to_dict()
    for ask in (kjt.lengths, kjt.offsets, kjt.index_per_key, kjt.lengths_offset_per_key, kjt.stride_per_key_per_rank):
        ask()


@given(any_batches(), forms(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_chain_of_operations_is_the_chain_on_lists(batch: Batch, form: Form, data: st.DataObject) -> None:
    """Whatever was computed on the way, and whatever was not."""
    kjt = build(batch, form)
    for link in data.draw(st.lists(st.sampled_from([*LINKS, *COPIES]), min_size=1, max_size=5)):
        if data.draw(st.booleans()):
            warm(kjt)
        if isinstance(link, str):
            kjt = COPIES[link](kjt)
        else:
            kjt, batch = link(kjt, batch, data)
    check(kjt, batch)


# Copies.


@pytest.mark.parametrize("how", COPIES)
@given(any_batches(), forms(), st.booleans())
@same
def test_a_copy_is_the_batch_in_everything(how: str, batch: Batch, form: Form, warmed: bool) -> None:
    kjt = build(batch, form)
    if warmed:
        warm(kjt)
    copied = COPIES[how](kjt)
    check(copied, batch, form)
    assert copied.capacity() == kjt.capacity()
    if batch.inverse is not None:
        assert copied.inverse_indices()[0] == kjt.inverse_indices()[0]


TWO = Batch((("a", [[(1, 0.25), (2, 0.5)], []]), ("b", [[(3, 1.0)], [(4, 2.0)]])), 2, True)
OWN = Batch(
    (("a", [[(1, 0.25), (2, 0.5)], []]), ("b", [[(3, 1.0)]])), 2, True, ((2,), (1,)), {"b": [0, 0], "a": [1, 0]}
)
TAKEN = {
    **{name: make for name, make in COPIES.items() if name not in ("sync", "unsync")},
    "permute": lambda kjt: kjt.permute([0, 1]),
    "concat": lambda kjt: KeyedJaggedTensor.concat([kjt]),
    "split and concat": lambda kjt: KeyedJaggedTensor.concat(kjt.split([1, 1])),
}


@pytest.mark.parametrize("batch", [TWO, OWN], ids=["fixed", "own sizes"])
@pytest.mark.parametrize("how", TAKEN)
def test_what_happens_to_the_caches_of_a_batch_is_nothing_to_its_copies(how: str, batch: Batch) -> None:
    """TorchRec hands its cached dict on: whoever changes an entry changes the batch it was copied from."""
    kjt = build(batch)
    warm(kjt)
    copied = TAKEN[how](kjt)
    jts = kjt.to_dict()
    assert copied.to_dict() is not jts
    jts["a"] = JaggedTensor(torch.tensor([9]), lengths=torch.tensor([1]))
    jts.pop("b")
    kjt.unsync()
    check(copied, batch)
    # and the other way round
    kjt = build(batch)
    warm(kjt)
    copied = TAKEN[how](kjt)
    copied.to_dict().clear()
    copied.unsync()
    check(kjt, batch)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "permute", "empty_like and copy_", "split and concat"])
def test_a_deep_copy_shares_no_memory(how: str) -> None:
    kjt = build(OWN)
    warm(kjt)
    copied = TAKEN[how](kjt)
    for tensor in (kjt.values(), kjt.weights(), kjt.lengths(), kjt.offsets(), kjt.inverse_indices()[1]):
        tensor.fill_(0)
    check(copied, OWN)


def test_a_batch_keeps_nothing_of_the_lists_it_was_made_of() -> None:
    keys, ranks, counts = ["a", "b"], [[2], [1]], [2, 1]
    kjt = KeyedJaggedTensor(
        keys,
        torch.tensor(OWN.ids),
        torch.tensor(OWN.weights),
        torch.tensor(OWN.lengths),
        stride_per_key_per_rank=ranks,
        length_per_key=counts,
    )
    keys.append("c")
    ranks[0][0] = 5
    counts[0] = 7
    check(kjt, Batch(OWN.features, 2, True, OWN.ranks))


@pytest.mark.parametrize("how", TAKEN)
def test_lists_that_a_batch_hands_out_are_the_callers(how: str) -> None:
    """Whatever is done to them, the batch and its copies stay what they were."""
    kjt = build(OWN)
    warm(kjt)
    copied = TAKEN[how](kjt)
    for keyed in (kjt, copied):
        lists: list[list[Any]] = [
            keyed.keys(), keyed.stride_per_key(), keyed.stride_per_key_per_rank(), keyed.stride_per_key_per_rank()[0],
            keyed.length_per_key(), keyed.offset_per_key(), keyed.lengths_offset_per_key(), keyed.inverse_indices()[0],
            keyed.length_per_key_or_none() or [], keyed.offset_per_key_or_none() or [],
        ]  # fmt: skip
        for handed in lists:
            handed[0] = handed[-1]
            handed.append(handed[0])
        keyed.index_per_key().clear()
    check(copied, OWN)
    check(kjt, OWN)


@given(any_batches(), forms())
@same
def test_forgetting_what_was_given_is_to_read_it(batch: Batch, form: Form) -> None:
    kjt = build(batch, replace(form, knows=True))
    assert kjt.length_per_key_or_none() == batch.counts
    check(kjt.unsync().sync(), batch, form)
    check(build(batch, replace(form, knows=True)).sync(), batch, form)


@given(any_batches(), forms(padding=False))
@same
def test_given_facts_are_believed_and_agree_with_computed_ones(batch: Batch, form: Form) -> None:
    """All that TorchRec's constructor takes, in its order."""
    facts = build(batch, form)
    warm(facts)
    kjt = KeyedJaggedTensor(
        facts.keys(),
        facts.values(),
        facts.weights_or_none(),
        facts.lengths(),
        facts.offsets(),
        facts.stride(),
        facts.stride_per_key_per_rank(),
        facts.stride_per_key(),
        facts.length_per_key(),
        facts.lengths_offset_per_key(),
        facts.offset_per_key(),
        facts.index_per_key(),
        None,
        facts.inverse_indices_or_none(),
    )
    assert kjt.length_per_key_or_none() == batch.counts
    check(kjt, batch, form)


@given(any_batches(), forms(), st.sampled_from([torch.float16, torch.float64]))
@same
def test_a_move_casts_weights_and_leaves_the_rest(batch: Batch, form: Form, dtype: torch.dtype) -> None:
    moved = build(batch, form).to("cpu", dtype=dtype)
    check(moved, batch, form)
    assert moved.weights_or_none() is None or moved.weights().dtype == dtype
    away = build(batch, form).to("meta")
    held = [away.values(), away.weights_or_none(), away.lengths_or_none(), away.offsets_or_none()]
    assert {tensor.device.type for tensor in held if tensor is not None} == {"meta"}
    if batch.inverse is not None:
        assert away.inverse_indices()[1].device.type == "meta"


@given(deduplicated(), forms())
@same
def test_inverse_indices_expand_to_the_whole_batch(batch: Batch, form: Form) -> None:
    """Row i of the map names for each sample the bag of its key."""
    kjt = build(batch, form)
    check_inverse(kjt, batch)
    assert kjt.stride() == batch.stride
    keys, rows = kjt.inverse_indices()
    features = dict(batch.features)
    for key, row in zip(keys, rows, strict=True):
        dense = kjt[key].to_dense()
        whole = [[number for number, _ in features[key][i]] for i in (batch.inverse or {})[key]]
        assert [dense[i].tolist() for i in row.tolist()] == whole


@given(any_batches(), WEIGHTS)
@same
def test_equality_helpers_compare_everything(batch: Batch, factor: float) -> None:
    from shardwise.jagged import jt_is_equal, kjt_is_equal

    kjt, again = build(batch), build(batch, Form(given="offsets"))
    assert kjt_is_equal(kjt, again)
    if batch.items:
        changed = build(batch, values=kjt.values() + 1)
        assert not kjt_is_equal(kjt, changed)
        key = next(key for key, bags in batch.features if any(bags))
        assert jt_is_equal(kjt[key], again[key])
        assert not jt_is_equal(kjt[key], changed[key])
    if len(batch.features) > 1:
        assert not kjt_is_equal(kjt, kjt.permute([*range(len(batch.features))][::-1]))
