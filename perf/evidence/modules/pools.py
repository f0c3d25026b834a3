"""Pools beside TorchRec's: the same random updates and lookups in, the same rows and states out, bit for bit.

Ids of an update may come twice. Prints one row for each kind. (Pruned tables TorchRec has on a GPU alone.)
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.perf.evidence.report import Report
from shardwise.perf.suite import libraries

CPU, STEPS, SIZES = torch.device("cpu"), 12, (1, 5, 40)
DTYPES = (torch.float32, torch.float16, torch.int64, torch.int32)
LENGTHS = ({"a": 1}, {"a": 3, "b": 2}, {"x": 2, "b": 4, "a": 1})


def ids_of(draw: torch.Generator, size: int, step: int) -> Tensor:
    """Up to 9 ids, of int32 and int64 in turn; often none."""
    count = int(torch.randint(10, (1,), generator=draw))
    return torch.randint(size, (count,), generator=draw).to((torch.int32, torch.int64)[step % 2])


def tensor_pools(size: int, dtype: torch.dtype) -> Iterator[list[list[Tensor]]]:
    """What each library has after each update of a `TensorPool`, and finds."""
    draw = torch.Generator().manual_seed(size)
    pools = [library.TensorPool(size, 3, dtype, CPU) for library in (libraries.ours(), libraries.torchrec())]
    for step in range(STEPS):
        ids, asked = ids_of(draw, size, step), ids_of(draw, size, step)
        values = (torch.rand(ids.numel(), 3, generator=draw) * 100).to(dtype)
        for pool in pools:
            pool.update(ids, values)
        yield [[pool.lookup(asked), *pool.state_dict().values()] for pool in pools]


def ragged_pools(
    size: int, dtype: torch.dtype, limits: dict[str, int], weighted: bool
) -> Iterator[list[list[Tensor | None]]]:
    """What each library has after each update of a `KeyedJaggedTensorPool`, and finds; batches have another order."""
    draw = torch.Generator().manual_seed(size)
    pair = [
        (library.KeyedJaggedTensorPool(size, limits, dtype, weighted, CPU), library.KeyedJaggedTensor)
        for library in (libraries.ours(), libraries.torchrec())
    ]
    keys = ["other", *reversed(limits)]
    for step in range(STEPS):
        # TorchRec takes no update without ids
        ids = torch.cat([ids_of(draw, size, step), torch.tensor([0])])
        asked = ids_of(draw, size, step)
        lengths = torch.cat([torch.randint(limits.get(key, 2) + 1, (ids.numel(),), generator=draw) for key in keys])
        values = (torch.rand(int(lengths.sum()), generator=draw) * 100).to(dtype)
        weights = torch.rand(values.numel(), generator=draw) if weighted else None
        seen: list[list[Tensor | None]] = []
        for pool, batch in pair:
            pool.update(ids, batch(keys, values, weights, lengths))
            rows: list[Tensor | None] = []
            if not weighted:
                # a weighted pool of TorchRec 1.8.0 cannot be looked up: it asks for an attribute that it has not
                found = pool.lookup(asked)
                rows = [found.lengths(), found.values()]
            seen.append([*rows, *pool.state_dict().values()])
        yield seen


def same(a: list[Any], b: list[Any]) -> bool:
    """Whether all tensors are the same bits and dtypes."""
    return len(a) == len(b) and all(
        x is y or (x is not None and y is not None and x.dtype is y.dtype and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def run(options: argparse.Namespace) -> Report:
    """Compare and print.

    Raises:
        ImportError: TorchRec is not installed.
    """
    kinds: dict[str, list[Iterator[Any]]] = {
        "TensorPool": [tensor_pools(*case) for case in itertools.product(SIZES, DTYPES)],
        "KeyedJaggedTensorPool": [
            ragged_pools(*case) for case in itertools.product(SIZES, DTYPES, LENGTHS, (False, True))
        ],
    }
    lines, bad = [f"{'kind':28}{'runs':>6}{'steps':>8}{'differ':>8}"], 0
    for kind, runs in kinds.items():
        steps = [same(*seen) for one in runs for seen in one]
        lines.append(f"{kind:28}{len(runs):6}{len(steps):8}{steps.count(False):8}")
        bad += steps.count(False)
    return Report("\n".join(lines) + "\n", not bad)
