"""dist_labels, dist_splits, dist_tensors and dist_init: what ranks send each other, and what an owner makes of it.

The model: every rank sends each key's bags to the owner of the key, who joins them key by key, in the order of the
ranks. Here the ranks are a loop; real ones are in tests/test_sharding_*.py.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jagged_model import KEYS, Batch, Form, batches, build, check, exchange, forms, pick, starts
from torch import Tensor

from shardwise.jagged import KeyedJaggedTensor

same = settings(max_examples=50, deadline=None)


@st.composite
def worlds(draw: st.DrawFn, kind: str) -> tuple[list[Batch], list[list[str]]]:
    """The batches of one to four ranks, which have the same keys in the same order, and the keys of each owner.

    Fixed batches of one size on all ranks ("even") or of any ("uneven"), or keys with batch sizes of their own.
    """
    world = draw(st.integers(1, 4))
    variable = kind == "own sizes"
    keys = KEYS[: draw(st.integers(1 if variable else 0, len(KEYS)))]
    same: dict[str, Any] = {"weighted": draw(st.booleans()), "samples": draw(st.integers(0, 3))}
    if kind != "even":
        del same["samples"]
    ranks = [draw(batches(keys=keys, fewest=len(keys), variable=variable, world=1, **same)) for _ in range(world)]
    edges = [0, *sorted(draw(st.lists(st.integers(0, len(keys)), min_size=world - 1, max_size=world - 1))), len(keys)]
    return ranks, [list(keys[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def order_of(world: int, stagger: int) -> list[int]:
    """Ranks as they are joined: those of a host lie `stagger` apart."""
    return [x + world // stagger * y for x in range(world // stagger) for y in range(stagger)]


def recat(keys: int, strides: list[int] | None, order: list[int]) -> Tensor:
    """Places, in what arrived rank by rank, of what is wanted key by key.

    Of (rank, key) pairs; where fixed batches of different ranks differ in size (`strides`), of bags.
    """
    pairs = [key + keys * rank for key in range(keys) for rank in order]
    if strides is None or len(set(strides)) < 2:
        return torch.tensor(pairs, dtype=torch.int32)
    sizes = [n for n in strides for _ in range(keys)]
    begins = starts(sizes)
    bags = chain.from_iterable(range(begins[pair], begins[pair] + sizes[pair]) for pair in pairs)
    return torch.tensor(list(bags), dtype=torch.int32)


def send_and_join(
    ranks: list[KeyedJaggedTensor], owners: list[list[str]], order: list[int], stagger: int
) -> list[KeyedJaggedTensor]:
    splits = [len(keys) for keys in owners]
    pieces = [
        [torch.split(tensor, sizes) for tensor, sizes in zip(kjt.dist_tensors(), kjt.dist_splits(splits), strict=True)]
        for kjt in ranks
    ]
    received = []
    for owner, keys in enumerate(owners):
        tensors = [torch.cat([rank[i][owner] for rank in pieces]) for i in range(len(pieces[0]))]
        variable = ranks[0].variable_stride_per_key()
        strides = None if variable else [kjt.stride() for kjt in ranks]
        permutation = recat(len(keys), strides, order)
        received.append(
            KeyedJaggedTensor.dist_init(keys, tensors, variable, len(ranks), permutation, strides, stagger=stagger)
        )
    return received


@pytest.mark.parametrize("kind", ["even", "uneven", "own sizes"])
@given(forms(), st.data())
@same
def test_owners_get_their_keys_of_every_rank(kind: str, form: Form, data: st.DataObject) -> None:
    ranks, owners = data.draw(worlds(kind))
    stagger = data.draw(st.sampled_from([n for n in (1, 2) if len(ranks) % n == 0]))
    order = order_of(len(ranks), stagger)
    received = send_and_join([build(batch, form) for batch in ranks], owners, order, stagger)
    for kjt, wanted in zip(received, exchange(ranks, owners, order), strict=True):
        check(kjt, wanted, form if wanted.features else None)


@given(batches(fewest=1), forms(), st.data())
@same
def test_splits_are_sizes_of_what_labels_name(batch: Batch, form: Form, data: st.DataObject) -> None:
    kjt, count = build(batch, form), len(batch.features)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, count), max_size=2))), count]
    segments = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    bags = [sum(pick(batch, range(a, b)).batch_sizes) for a, b in zip(edges, edges[1:], strict=False)]
    ids = [sum(pick(batch, range(a, b)).counts) for a, b in zip(edges, edges[1:], strict=False)]
    wanted = {"lengths": (bags, batch.lengths), "values": (ids, batch.ids)}
    if batch.ranks is not None:
        wanted["strides"] = (segments, batch.batch_sizes)
    if batch.weighted:
        wanted["weights"] = (ids, batch.weights)  # type: ignore[assignment]
    assert kjt.dist_labels() == list(wanted)
    assert kjt.dist_splits(segments) == [splits for splits, _ in wanted.values()]
    # padding stays at home
    assert [tensor.tolist() for tensor in kjt.dist_tensors()] == [numbers for _, numbers in wanted.values()]


@given(batches(fewest=1, variable=False), forms())
@same
def test_without_a_permutation_nothing_moves(batch: Batch, form: Form) -> None:
    kjt = build(batch, form)
    alone = KeyedJaggedTensor.dist_init(batch.keys, kjt.dist_tensors(), False, 1, None, [batch.stride])
    check(alone, batch, form)


@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "own sizes"])
@pytest.mark.parametrize("samples", [(0, 0), (0, 2), (2, 0)], ids=str)
def test_15_ranks_without_samples_are_ordinary_ranks(samples: tuple[int, ...], variable: bool) -> None:
    ranks = [
        Batch(
            tuple((key, [[(rank, 1.0)]] * n) for key in "ab"), n, True, ((n,), (n,)) if variable else None
        )
        for rank, n in enumerate(samples)
    ]  # fmt: skip
    owners = [["a"], ["b"]]
    received = send_and_join([build(batch) for batch in ranks], owners, [0, 1], 1)
    for kjt, wanted in zip(received, exchange(ranks, owners, [0, 1]), strict=True):
        check(kjt, wanted)
