"""The batches of the tests, by hand and random, and what collections must make of them by `F.embedding_bag`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn

from shardwise import KeyedJaggedTensor, PoolingType
from shardwise.embeddings.collections.collection import TableCollection

Bags = Mapping[str, Sequence[Sequence[int]]]


def kjt(
    bags: Bags,
    *,
    weights: Tensor | None = None,
    dtype: torch.dtype = torch.int64,
    device: torch.device | str = "cpu",
) -> KeyedJaggedTensor:
    """The batch in the order of the dict; `weights` one per id in that order."""
    flat = [i for feature in bags.values() for bag in feature for i in bag]
    lengths = [len(bag) for feature in bags.values() for bag in feature]
    return KeyedJaggedTensor(
        list(bags),
        torch.tensor(flat, dtype=dtype, device=device),
        weights,
        lengths=torch.tensor(lengths, dtype=torch.int64, device=device),
    )


def draw(rows: Mapping[str, int], samples: int, *, longest: int = 4, seed: int = 0) -> dict[str, list[list[int]]]:
    """Random bags of 0 to `longest` ids for features over tables of so many rows."""
    generator = torch.Generator().manual_seed(seed)
    bags: dict[str, list[list[int]]] = {}
    for feature, count in rows.items():
        lengths = torch.randint(0, longest + 1, (samples,), generator=generator).tolist()
        bags[feature] = [torch.randint(0, count, (n,), generator=generator).tolist() for n in lengths]
    return bags


def random_kjt(
    rows: Mapping[str, int],
    samples: int,
    *,
    seed: int = 0,
    longest: int = 3,
    weighted: bool = False,
    of: Sequence[int] | None = None,
    dtype: torch.dtype = torch.int64,
    device: torch.device | str = "cpu",
) -> KeyedJaggedTensor:
    """Bags of 0 to `longest` ids of features over tables of so many rows; `of` are the samples that are kept of it.

    Shares of one seed make up its whole batch, weights too.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (len(rows), samples), generator=generator)
    flat = lengths.flatten().tolist()
    counts = [count for count in rows.values() for _ in range(samples)]
    ids = [torch.randint(0, count, (n,), generator=generator) for count, n in zip(counts, flat, strict=True)]
    weights = torch.rand(sum(flat), generator=generator).split(flat)
    chosen = range(samples) if of is None else of
    kept = [k * samples + sample for k in range(len(rows)) for sample in chosen]
    none = torch.zeros(0)
    return KeyedJaggedTensor(
        list(rows),
        torch.cat([none.to(dtype), *(ids[bag].to(dtype) for bag in kept)]).to(device),
        torch.cat([none, *(weights[bag] for bag in kept)]).to(device) if weighted else None,
        lengths.flatten()[kept].to(device),
    )


def share(samples: int) -> range:
    """This rank's samples of a batch that all ranks share, each as many as the next."""
    each = samples // dist.get_world_size()
    return range(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def split_weights(bags: Bags, weights: Tensor) -> dict[str, Tensor]:
    """Each feature's part of per-id weights that follow the order of the dict."""
    counts = [sum(len(bag) for bag in feature) for feature in bags.values()]
    return dict(zip(bags, torch.split(weights, counts), strict=True))


def pooled(configs: Sequence[Any], tables: Mapping[str, Tensor], bags: Bags, weights: Tensor | None = None) -> Tensor:
    """[B, sum of dims] in fp32, differentiable in the tables and the weights."""
    parts = None if weights is None else split_weights(bags, weights)
    columns = []
    for config in configs:
        for feature in config.feature_names:
            part = None if parts is None else parts[feature]
            columns.append(pooled_feature(tables[config.name], bags[feature], config.pooling, part))
    return torch.cat(columns, dim=1)


def pooled_feature(
    table: Tensor, bags: Sequence[Sequence[int]], pooling: PoolingType, weights: Tensor | None
) -> Tensor:
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64, device=table.device)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64, device=table.device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    mode = "mean" if pooling is PoolingType.MEAN and weights is None else "sum"
    out = nnf.embedding_bag(
        ids, table.float(), offsets, mode=mode, include_last_offset=True,
        per_sample_weights=None if weights is None else weights.float(),
    )  # fmt: skip
    if pooling is PoolingType.MEAN and weights is not None:
        # embedding_bag knows no weighted mean: the weighted sum over the number of ids
        out = out / lengths.clamp(min=1)[:, None]
    return out


def tables_of(collection: nn.Module) -> dict[str, Tensor]:
    """Detached copies of a collection's tables by name."""
    assert isinstance(collection, TableCollection)
    tables = collection.get_submodule(collection._children_name)
    return {name.removesuffix(".weight"): value.clone() for name, value in tables.state_dict().items()}


def weight(collection: nn.Module, table: str) -> nn.Parameter:
    """The parameter of a table."""
    assert isinstance(collection, TableCollection)
    return collection.get_parameter(f"{collection._children_name}.{table}.weight")


def gradient(collection: nn.Module, table: str) -> Tensor:
    """The gradient that a table got."""
    return gradient_of(weight(collection, table))


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient that a tensor got."""
    assert tensor.grad is not None
    return tensor.grad


def upstream(*shape: int, seed: int = 1) -> Tensor:
    """A fixed gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
