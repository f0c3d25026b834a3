"""The jagged types in plain Python, as lists of lists: what every operation on tensors is compared with.

A batch has features in order, each a key and its bags; a bag is a list of items, an item an id and its weight. How a
batch is written as tensors (dtypes, lengths or offsets, padding) is its `Form`, on which no result depends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor

Item = tuple[int, float]
Bags = list[list[Item]]

KEYS = ("a", "b", "c", "d", "e")


@dataclass(frozen=True)
class Batch:
    """Features in order; a key may come twice, with the same bags.

    `stride` is the batch size of the whole, which pieces keep. `ranks` [features][ranks] sums to each feature's batch
    size; None says that it is `stride` for all. `inverse` maps each sample of the whole to one of the key's bags.
    """

    features: tuple[tuple[str, Bags], ...]
    stride: int
    weighted: bool = False
    ranks: tuple[tuple[int, ...], ...] | None = None
    inverse: Mapping[str, list[int]] | None = None

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.features]

    @property
    def bags(self) -> Bags:
        """All bags, key by key."""
        return [bag for _, bags in self.features for bag in bags]

    @property
    def items(self) -> list[Item]:
        return [item for bag in self.bags for item in bag]

    @property
    def ids(self) -> list[int]:
        return [number for number, _ in self.items]

    @property
    def weights(self) -> list[float]:
        return [weight for _, weight in self.items]

    @property
    def lengths(self) -> list[int]:
        return [len(bag) for bag in self.bags]

    @property
    def batch_sizes(self) -> list[int]:
        """Of each feature."""
        return [len(bags) for _, bags in self.features]

    @property
    def counts(self) -> list[int]:
        """Number of ids of each feature."""
        return [sum(map(len, bags)) for _, bags in self.features]


@dataclass(frozen=True)
class Form:
    """How a batch is written as tensors; `padding` None gives no capacity, any number that many values in no bag.

    With `knows` the number of ids of each key is given as well.
    """

    ids: torch.dtype = torch.int64
    lengths: torch.dtype = torch.int64
    given: str = "lengths"
    padding: int | None = None
    says_stride: bool = False
    knows: bool = False


def starts(sizes: Sequence[int]) -> list[int]:
    """Running sum with a leading 0."""
    return list(accumulate(sizes, initial=0))


# The operations.


def pick(batch: Batch, indices: Sequence[int]) -> Batch:
    """The features at `indices`, in that order: `permute`, and each piece of `split`."""
    features = tuple(batch.features[i] for i in indices)
    ranks = None if batch.ranks is None else tuple(batch.ranks[i] for i in indices)
    inverse = None if batch.inverse is None else {key: batch.inverse[key] for key, _ in features}
    return replace(batch, features=features, ranks=ranks, inverse=inverse)


def split(batch: Batch, segments: Sequence[int]) -> list[Batch]:
    """Consecutive features, so many for each segment."""
    edges = starts(segments)
    return [pick(batch, range(a, b)) for a, b in zip(edges, edges[1:], strict=False)]


def concat(batches: Sequence[Batch]) -> Batch:
    """All features in order; members without features have no say. A fixed batch beside others is of one rank."""
    members = [batch for batch in batches if batch.features] or list(batches[:1])
    features = tuple(feature for batch in members for feature in batch.features)
    ranks = None
    if any(batch.ranks is not None for batch in members):
        ranks = tuple(row for batch in members for row in (batch.ranks or [(n,) for n in batch.batch_sizes]))
    inverse = None
    if all(batch.inverse is not None for batch in members):
        inverse = {key: row for batch in members for key, row in (batch.inverse or {}).items()}
    return Batch(features, max(batch.stride for batch in members), members[0].weighted, ranks, inverse)


def from_bags(bags: Mapping[str, Bags], weighted: bool = False) -> Batch:
    """Of a dict: `from_jt_dict`, `from_lists`. Keys have batch sizes of their own where they differ."""
    sizes = [len(one) for one in bags.values()]
    ranks = tuple((n,) for n in sizes) if len(set(sizes)) > 1 else None
    return Batch(tuple(bags.items()), max(sizes, default=0), weighted and bool(bags), ranks)


def padded(rows: Sequence[Sequence[Any]], width: int, fill: Any) -> list[list[Any]]:
    """Each row cut or filled to `width`."""
    return [[*row, *[fill] * width][:width] for row in rows]


def exchange(batches: Sequence[Batch], owners: Sequence[Sequence[str]], order: Sequence[int]) -> list[Batch]:
    """Each rank sends every key to its owner, which joins the bags of the ranks, in `order`, key by key."""
    received = []
    for keys in owners:
        parts = [[dict(batches[rank].features)[key] for rank in order] for key in keys]
        features = tuple((key, [bag for bags in part for bag in bags]) for key, part in zip(keys, parts, strict=True))
        if any(batch.ranks is not None for batch in batches):
            ranks = tuple(tuple(len(bags) for bags in part) for part in parts)
            received.append(Batch(features, max(map(sum, ranks), default=0), batches[0].weighted, ranks))
        else:
            received.append(Batch(features, sum(batch.stride for batch in batches), batches[0].weighted))
    return received


def by_position(batch: Batch) -> Batch:
    """The batch in which each id is its own position: what an operation makes of it says where every item went."""
    positions = iter(range(len(batch.items)))
    features = tuple((key, [[(next(positions), w) for _, w in bag] for bag in bags]) for key, bags in batch.features)
    return replace(batch, features=features)


def gradient(moved: Sequence[int], upstream: Sequence[float], size: int) -> list[float]:
    """Gradient of sum(upstream * x[moved]) with respect to x [size]."""
    total = [0.0] * size
    for position, factor in zip(moved, upstream, strict=True):
        total[position] += factor
    return total


# Between lists and tensors.


def build(batch: Batch, form: Form | None = None, *, values: Tensor | None = None, **given: Any) -> KeyedJaggedTensor:
    """The batch as tensors; what pads it are ids and weights that no result may show."""
    form = form or Form()
    extra = form.padding or 0
    lengths = torch.tensor(batch.lengths, dtype=form.lengths)
    offsets = torch.tensor(starts(batch.lengths), dtype=form.lengths)
    if batch.inverse is not None:
        rows = torch.tensor(list(batch.inverse.values()), dtype=torch.int64).view(len(batch.inverse), -1)
        given["inverse_indices"] = (list(batch.inverse), rows)
    if batch.ranks is None and (form.says_stride or not batch.features):
        given["stride"] = batch.stride
    if form.knows:
        given["length_per_key"] = batch.counts
    return KeyedJaggedTensor(
        batch.keys,
        torch.tensor([*batch.ids, *[-7] * extra], dtype=form.ids) if values is None else values,
        torch.tensor([*batch.weights, *[math.nan] * extra]) if batch.weighted else None,
        lengths if form.given in ("lengths", "both") else None,
        offsets if form.given in ("offsets", "both") else None,
        stride_per_key_per_rank=None if batch.ranks is None else [list(row) for row in batch.ranks],
        capacity=None if form.padding is None else len(batch.items) + extra,
        **given,
    )


def check(kjt: KeyedJaggedTensor, batch: Batch, form: Form | None = None) -> None:
    """Everything that can be asked of `kjt` is what the batch says, padding apart; dtypes are those of `form`."""
    own = len(batch.items)
    assert kjt.keys() == batch.keys
    assert kjt.stride() == batch.stride
    assert kjt.stride_per_key() == batch.batch_sizes
    if batch.features:
        assert kjt.variable_stride_per_key() == (batch.ranks is not None)
        assert [list(row) for row in kjt.stride_per_key_per_rank()] == [list(row) for row in batch.ranks or ()]
    assert kjt.index_per_key() == {key: i for i, key in enumerate(batch.keys)}
    assert kjt.lengths().tolist() == batch.lengths
    assert kjt.offsets().tolist() == starts(batch.lengths)
    assert kjt.lengths_offset_per_key() == starts(batch.batch_sizes)
    assert kjt.length_per_key() == batch.counts == kjt.length_per_key_or_none()
    assert kjt.offset_per_key() == starts(batch.counts) == kjt.offset_per_key_or_none()
    assert kjt.values()[:own].tolist() == batch.ids
    if kjt.capacity() is None:
        assert kjt.values().shape == (own,)
    else:
        assert kjt.values().shape == (kjt.capacity(),)
    check_weights(kjt.weights_or_none(), batch.weights, batch.weighted)
    if form is not None:
        assert (kjt.values().dtype, kjt.lengths().dtype) == (form.ids, form.lengths)
    check_inverse(kjt, batch)
    check_dict(kjt.to_dict(), batch)
    for key, bags in batch.features:
        check_bags(kjt[key], bags, batch.weighted)


def check_inverse(kjt: KeyedJaggedTensor, batch: Batch) -> None:
    if batch.features and (batch.inverse is not None or hasattr(kjt, "inverse_indices_or_none")):
        found = kjt.inverse_indices_or_none()
        assert (found is not None) == (batch.inverse is not None)
        if found is not None:
            keys, rows = found
            assert dict(zip(keys, rows.tolist(), strict=True)) == batch.inverse


def check_dict(jts: Mapping[str, JaggedTensor], batch: Batch) -> None:
    """`to_dict`: of keys that come twice, one entry."""
    assert list(jts) == list(dict(batch.features))
    for key, bags in batch.features:
        check_bags(jts[key], bags, batch.weighted)


def check_bags(jt: JaggedTensor, bags: Bags, weighted: bool) -> None:
    items = [item for bag in bags for item in bag]
    assert jt.values().tolist() == [number for number, _ in items]
    assert jt.lengths().tolist() == [len(bag) for bag in bags]
    assert jt.offsets().tolist() == starts([len(bag) for bag in bags])
    check_weights(jt.weights_or_none(), [weight for _, weight in items], weighted)


def check_weights(found: Tensor | None, weights: list[float], weighted: bool) -> None:
    assert (found is not None) == weighted
    if found is not None:
        assert found[: len(weights)].tolist() == weights


# Batches to draw.

# of 32 bits and more, and few enough to meet again
IDS = st.sampled_from([0, 1, 2, 3, 2**31 - 1])
# sums of few of them are exact in fp32
WEIGHTS = st.sampled_from([0.25, -1.5, 2.0])
ITEMS = st.tuples(IDS, WEIGHTS)
BAGS = st.lists(ITEMS, max_size=3)


def forms(*, padding: bool = True) -> st.SearchStrategy[Form]:
    """Every dtype, lengths or offsets or both, with and without padding."""
    dtypes = st.sampled_from([torch.int64, torch.int32])
    given = st.sampled_from(["lengths", "offsets", "both"])
    extra = st.sampled_from([None, None, 0, 2]) if padding else st.none()
    return st.builds(Form, dtypes, dtypes, given, extra, st.booleans(), st.booleans())


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    keys: Sequence[str] = KEYS,
    fewest: int = 0,
    samples: int | None = None,
    weighted: bool | None = None,
    variable: bool | None = None,
    world: int | None = None,
) -> Batch:
    """Up to all `keys`; batch sizes from 0, of one size or each key its own; many bags empty. None leaves it open."""
    weighted = draw(st.booleans()) if weighted is None else weighted
    variable = draw(st.booleans()) if variable is None else variable
    own = list(keys[: draw(st.integers(fewest, len(keys)))])
    if not variable or not own:
        stride = draw(st.integers(0, 3)) if samples is None else samples
        features = [(key, draw(st.lists(BAGS, min_size=stride, max_size=stride))) for key in own]
        return Batch(tuple(features), stride, weighted)
    world = draw(st.integers(1, 2)) if world is None else world
    ranks = tuple(tuple(draw(st.integers(0, 2)) for _ in range(world)) for _ in own)
    features = [
        (key, draw(st.lists(BAGS, min_size=sum(row), max_size=sum(row)))) for key, row in zip(own, ranks, strict=True)
    ]
    return Batch(tuple(features), max(map(sum, ranks)), weighted, ranks)


@st.composite
def deduplicated(draw: st.DrawFn, *, keys: Sequence[str] = KEYS, samples: int | None = None) -> Batch:
    """Batches whose samples share bags: each key has its own batch size and a map from the whole to it."""
    stride = draw(st.integers(0, 3)) if samples is None else samples
    own = list(keys[: draw(st.integers(1, len(keys)))])
    ranks = tuple((draw(st.integers(1, stride)) if stride else 0,) for _ in own)
    features = [(key, draw(st.lists(BAGS, min_size=n, max_size=n))) for key, (n,) in zip(own, ranks, strict=True)]
    sizes = dict(zip(own, ranks, strict=True))
    # their keys may come in an order of their own
    inverse = {
        key: draw(st.lists(st.integers(0, sizes[key][0] - 1), min_size=stride, max_size=stride)) if stride else []
        for key in draw(st.permutations(own))
    }
    return Batch(tuple(features), stride, draw(st.booleans()), ranks, inverse)


def any_batches() -> st.SearchStrategy[Batch]:
    return batches() | deduplicated()
