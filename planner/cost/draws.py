"""How many different ids a batch has, and which share of them a range of rows gets, for ids drawn by a power law.

The k-th most frequent of R ids has probability p_k proportional to (k + shift)^-alpha (Zipf; `tables.Skew`). Of N
independent draws the expected number of different ids is sum over k of 1 - (1 - p_k)^N, each id being missed by all
draws with probability (1 - p_k)^N; for alpha 0 that is R (1 - (1 - 1/R)^N). The sum is taken over blocks of ids: the
first ones each by itself, then blocks that grow by 3 %, in which all ids count as their mean; the mass of a block is
the integral of the density from half an id before its first to half an id after its last.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..search.problem import Floats
from ..tables import Skew

# ids that are a block each, and how much longer each block is than the one before
_ALONE, _GROWTH = 256, 1.03


@lru_cache(maxsize=4096)
def distinct_ids(rows: int, draws: float, skew: Skew) -> float:
    """Different ids expected among `draws` of `rows`."""
    if rows == 0 or draws <= 0:
        return 0.0
    if skew.alpha == 0:
        return float(seen(np.array([1.0 / rows]), draws)[0] * rows)
    counts, mass = blocks(rows, skew)
    return float((counts * seen(mass / counts, draws)).sum())


@lru_cache(maxsize=4096)
def shares(rows: int, draws: float, skew: Skew, parts: tuple[int, ...]) -> tuple[Floats, Floats]:
    """The share of lookups that each part of the rows gets, and different ids expected in each, [parts].

    Where ids are not sorted by frequency a part gets its share of the rows.
    """
    of_rows = np.array(parts, np.float64) / max(rows, 1)  # [parts]
    if skew.alpha == 0 or not skew.sorted_ids:
        return of_rows, of_rows * distinct_ids(rows, draws, skew)
    edges = np.cumsum([0, *parts])  # [parts + 1]
    lookups, distinct = np.zeros(len(parts)), np.zeros(len(parts))
    counts, mass = blocks(rows, skew, tuple(edges[1:-1].tolist()))  # [blocks], [blocks]
    part = np.searchsorted(edges, np.cumsum(counts) - counts / 2, side="right") - 1  # [blocks]
    np.add.at(lookups, part, mass)
    np.add.at(distinct, part, counts * seen(mass / counts, draws))
    return lookups, distinct


def seen(probability: Floats, draws: float) -> Floats:
    """1 - (1 - p)^N, exact for small p too."""
    with np.errstate(divide="ignore"):
        result: Floats = -np.expm1(draws * np.log1p(-np.minimum(probability, 1.0)))
    return result


@lru_cache(maxsize=4096)
def blocks(rows: int, skew: Skew, borders: tuple[int, ...] = ()) -> tuple[Floats, Floats]:
    """Ids of each block and the probability of all of them together; blocks do not cross `borders`."""
    alone = min(rows, _ALONE)
    steps = np.ceil(alone * _GROWTH ** np.arange(1, 1 + max(0, np.log(rows / alone) / np.log(_GROWTH))))
    edges = np.unique(np.concatenate([np.arange(alone + 1), steps[steps < rows], [rows], borders]))
    below = edges + 0.5 + skew.shift
    power = 1 - skew.alpha
    area = np.diff(np.log(below)) if power == 0 else np.diff(below**power) / power
    # where the density is steep an id alone is exact by its own formula
    counts = np.diff(edges)
    single = counts == 1
    area[single] = (edges[1:][single] + skew.shift) ** -skew.alpha
    result: tuple[Floats, Floats] = counts, area / area.sum()
    return result
