"""Batches for the comparison with TorchRec: the same tensors for both libraries, made once per size.

Shapes: F keys, B bags of each, N values; lengths [F * B], three values a bag on average.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .operation import Size

IDS = 1_000_000
# values of a jagged tensor are rows of so many floats where they are rows
ROW = 16

# makes a fresh state
Make = Callable[[Any, Size], Any]


@dataclass(frozen=True)
class Batch:
    """The parts of a KeyedJaggedTensor."""

    keys: list[str]
    values: Tensor
    weights: Tensor
    lengths: Tensor
    offsets: Tensor
    strides: list[list[int]]
    inverse: Tensor

    @property
    def bags(self) -> list[int]:
        """Bags of each key."""
        return [sum(ranks) for ranks in self.strides]


@lru_cache(maxsize=2)
def batch(size: Size, *, variable: bool = False) -> Batch:
    """Every key with `size.batch` bags, or `variable`: with a quarter to a half of them on each of two ranks."""
    F, B = size
    g = torch.Generator().manual_seed(F * B)
    strides = torch.full((F, 1), B)
    if variable:
        strides = torch.randint(B // 4, B // 2 + 1, (F, 2), generator=g)
    bags = strides.sum(1)
    lengths = torch.randint(0, 7, (int(bags.sum()),), generator=g)
    n = int(lengths.sum())
    # a bag of every sample, for batches of which only the distinct samples are sent
    inverse = (torch.rand(F, B, generator=g) * bags[:, None]).long()
    return Batch(
        [f"f{f}" for f in range(F)],
        torch.randint(0, IDS, (n,), generator=g),
        torch.rand(n, generator=g),
        lengths,
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        strides.tolist(),
        inverse,
    )


def kjt(
    lib: Any,
    size: Size,
    *,
    weighted: bool = False,
    variable: bool = False,
    synced: bool = False,
    by_offsets: bool = False,
    inverse: bool = False,
    int32: bool = False,
    prefix: str = "",
) -> Any:
    """A KeyedJaggedTensor that has computed nothing yet, or only what `sync` does."""
    b = batch(size, variable=variable)
    keys = [prefix + key for key in b.keys] if prefix else b.keys
    given: dict[str, Any] = {"offsets": b.offsets} if by_offsets else {"lengths": b.lengths}
    if int32:
        given = {name: tensor.int() for name, tensor in given.items()}
    if variable:
        given["stride_per_key_per_rank"] = b.strides
    if inverse:
        given["inverse_indices"] = (keys, b.inverse)
    made = lib.KeyedJaggedTensor(keys, b.values, b.weights if weighted else None, **given)
    return made.sync() if synced else made


def fresh(argument: Callable[[Size], Any] | None = None, **options: Any) -> Make:
    """Makes a KJT, or a pair of it and an argument."""
    if argument is None:
        return lambda lib, size: kjt(lib, size, **options)
    return lambda lib, size: (kjt(lib, size, **options), argument(size))


@lru_cache(maxsize=4)
def pieces(size: Size, variable: bool = False) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Key, values, weights and lengths of each key."""
    b = batch(size, variable=variable)
    lengths = list(torch.split(b.lengths, b.bags))
    counts = [int(length.sum()) for length in lengths]
    columns = (b.keys, torch.split(b.values, counts), torch.split(b.weights, counts), lengths)
    return list(zip(*columns, strict=True))


def tensor_dict(lib: Any, size: Size) -> Any:
    """A TensorDict of torch's nested tensors."""
    nested = {}
    for key, values, _, lengths in pieces(size):
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        nested[key] = torch.nested.nested_tensor_from_jagged(values, offsets)
    return importlib.import_module("tensordict").TensorDict(nested, batch_size=[size.batch])


def jt_dict(weighted: bool = False, variable: bool = False) -> Make:
    """Makes a dict of JaggedTensors."""
    return lambda lib, size: {
        key: lib.JaggedTensor(values, weights if weighted else None, lengths)
        for key, values, weights, lengths in pieces(size, variable)
    }


def jt(*, weighted: bool = False, rows: bool = False, by_offsets: bool = False) -> Make:
    """Makes a JaggedTensor of the ids of all keys, or of `rows` of floats."""

    def make(lib: Any, size: Size) -> Any:
        b = batch(size)
        values = rows_of(size) if rows else b.values
        given = {"offsets": b.offsets} if by_offsets else {"lengths": b.lengths}
        return lib.JaggedTensor(values, b.weights if weighted else None, **given)

    return make


@lru_cache(maxsize=2)
def rows_of(size: Size, dim: int = ROW) -> Tensor:
    """A row of floats for each value."""
    return torch.randn(len(batch(size).values), dim, generator=torch.Generator().manual_seed(1))


@lru_cache(maxsize=2)
def samples(size: Size) -> tuple[list[Tensor], list[Tensor]]:
    """Values and weights of each bag."""
    b = batch(size)
    lengths = b.lengths.tolist()
    return list(torch.split(b.values, lengths)), list(torch.split(b.weights, lengths))


@lru_cache(maxsize=2)
def dense(size: Size) -> Tensor:
    """Values of bags that are all of the largest length."""
    return torch.randint(0, IDS, (size.keys * size.batch, 6), generator=torch.Generator().manual_seed(2))


def dims(size: Size) -> list[int]:
    """Width of each key of a KeyedTensor: mixed, and narrow where there are many keys."""
    return [(16, 64, 32, 128)[f % 4] if size.keys <= 26 else (4, 8, 4)[f % 3] for f in range(size.keys)]


@lru_cache(maxsize=2)
def columns(size: Size, seed: int) -> Tensor:
    """Values of a KeyedTensor."""
    return torch.randn(size.batch, sum(dims(size)), generator=torch.Generator().manual_seed(seed))


def kt(lib: Any, size: Size, seed: int = 0, *, leaf: bool = False) -> Any:
    """A KeyedTensor whose keys begin with the seed's letter."""
    values = columns(size, seed)
    if leaf:
        values = values.detach().requires_grad_()
    return lib.KeyedTensor([f"{'fgh'[seed]}{f}" for f in range(size.keys)], dims(size), values)


def groups(size: Size, repeats: bool = False) -> list[list[str]]:
    """Keys of two KeyedTensors in up to four groups by turns; with `repeats` the first keys are in every group."""
    count = min(4, size.keys)
    dealt = [[f"{letter}{f}" for f in range(g, size.keys, count) for letter in "fg"] for g in range(count)]
    return [["f0", "g0", *group] for group in dealt] if repeats else dealt


def ranked(
    ranks: int, *, weighted: bool = False, uneven: bool = False, variable: bool = False, stagger: int = 1
) -> Make:
    """Makes the arguments of `dist_init`: what `ranks` ranks have sent, and the order to bring it into."""
    return lambda lib, size: list(_ranked(size, ranks, weighted, uneven, variable, stagger))


@lru_cache(maxsize=2)
def _ranked(size: Size, ranks: int, weighted: bool, uneven: bool, variable: bool, stagger: int) -> tuple[Any, ...]:
    F, B = size
    b = batch(size)
    # bags of each rank, the same for all keys but where they are variable
    per_rank = [B // ranks] * ranks
    if uneven:
        per_rank[0] -= 1
        per_rank[1] += 1
    tensors = [b.lengths, b.values]
    turned = torch.arange(ranks).view(stagger, -1).T.flatten()
    segments = torch.arange(ranks * F).view(ranks, F)[turned].T.flatten()
    if variable:
        g = torch.Generator().manual_seed(3)
        moved = torch.randint(0, B // ranks, (ranks // 2, F), generator=g)
        strides = B // ranks + torch.stack([-moved, moved], 1)
        tensors.append(strides.flatten())
    elif uneven:
        # with batches of different sizes each bag is moved by itself
        sizes = [n for n in per_rank for _ in range(F)]
        starts = [0, *accumulate(sizes)]
        segments = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in segments.tolist()])
    if weighted:
        tensors.append(b.weights)
    return b.keys, tensors, variable, ranks, segments.int(), None if variable else per_rank, stagger
