"""Regrouping many narrow columns on the CPU where numba is installed: row by row, not column by column.

`torch.cat` of column views pays for every row of every piece, which narrow pieces do not outweigh.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .cpu_compiled import run
from .regroup_plan import Runs

# elements below which torch.cat is as good, and columns of a run on average above which it is
_SMALL, _NARROW = 1 << 17, 48


@cache
def _loops() -> Any:
    """The compiled loop; None where numba is missing or does not work."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(".cpu_select_loops", __package__)
    except Exception as error:
        warnings.warn(f"shardwise: numba does not work here, regroup runs on torch: {error!r:.200}", stacklevel=2)
        return None


def pays(tensors: Sequence[Tensor], runs: Runs) -> bool:
    """Whether `regroup_rows` can do this, and faster than torch."""
    columns = sum(runs.widths)
    if runs.repeats > 1 or tensors[0].shape[0] * columns < _SMALL:
        return False
    if columns * 5 > _NARROW * len(runs.flat) or tensors[0].dtype != torch.float32:
        return False
    return all(tensor.is_contiguous() for tensor in tensors) and _loops() is not None


def regroup_rows(tensors: Sequence[Tensor], runs: Runs) -> list[Tensor]:
    """The outputs of runs without repeats, of contiguous fp32 tensors."""
    batch = tensors[0].shape[0]
    moves, whole = _moves(runs)
    outs = [(torch.empty if full else torch.zeros)(batch, n) for n, full in zip(runs.widths, whole, strict=True)]
    sources, targets = [x.detach().numpy() for x in tensors], [y.numpy() for y in outs]
    threads = torch.get_num_threads()
    parts = min(batch, 4 * threads if threads > 1 else 1)
    borders = [batch * part // parts for part in range(parts + 1)]

    def rows(low: int, high: int) -> None:
        # a few rows at a time, which stay in the cache while all pairs of tensors take their turn
        step = max(1, (1 << 15) // max(1, sum(runs.widths)))
        for begin in range(low, high, step):
            for tensor, output, where in moves:
                _loops().move_columns(sources[tensor], targets[output], where, begin, min(begin + step, high))

    run([partial(rows, low, high) for low, high in pairwise(borders)])
    return outs


@lru_cache(maxsize=128)
def _moves(runs: Runs) -> tuple[list[tuple[int, int, Any]], list[bool]]:
    """The runs of each pair (input, output) as an array [P, 3], and whether all of an output is written."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    whole = [True] * len(runs.widths)
    for output, column, columns, tensor, first in runs.rows():
        if tensor < 0:
            whole[output] = False
        else:
            found.setdefault((tensor, output), []).append([column, columns, first])
    return [(*pair, torch.tensor(rows).numpy()) for pair, rows in found.items()], whole
