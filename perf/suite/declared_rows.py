"""The bytes that the ops of rows declare, as functions of a call; `sector` as in declared.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import gcd, prod

from torch import Tensor

from shardwise.kernels.rows.move_rows import layout_of

from .declared import Traffic, _in_sectors


def move_rows_bytes(
    parts: Sequence[Tensor], slots: Tensor, saves: Tensor, loads: Tensor, *, sector: int = 1
) -> Traffic:
    """Of `move_rows`, by X0, X1, ... and R: a row once each way for each save and each load, and what says which."""
    live = slots >= 0
    saved, loaded = int((live & (saves >= 0)).sum()), int((live & (loads >= 0)).sum())
    reads, writes = Counter[str](numbers=24 * slots.shape[0]), Counter[str]()
    for i, (part, offset) in enumerate(zip(parts, layout_of(parts).offsets, strict=True)):
        nbytes = prod(part.shape[1:]) * part.itemsize
        row, of_record = _in_sectors(nbytes, sector, nbytes), _in_sectors(nbytes, sector, gcd(offset, 64))
        reads[f"X{i}"], writes[f"X{i}"] = saved * row, loaded * row
        reads["R"] += loaded * of_record
        writes["R"] += saved * of_record
    return Traffic(dict(reads), dict(writes))


def lowest_bytes(keys: Tensor, picked: int, passes: int) -> Traffic:
    """Of `lowest`: keys and holders in each pass, and the places that are picked; counts are in caches."""
    return Traffic({"K": passes * keys.nbytes, "H": passes * keys.nbytes}, {"Y": 8 * picked})


def initial_rows_bytes(rows: Tensor, out: Tensor, *, sector: int = 1) -> Traffic:
    """Of `initial_rows`: the rows' numbers, and the values once."""
    row = out.shape[1] * out.itemsize
    return Traffic({"I": rows.nbytes}, {"Y": out.shape[0] * _in_sectors(row, sector, row)})


def make_rows_bytes(parts: Sequence[Tensor], count: int, fresh: int) -> Traffic:
    """Of `make_rows`: numbers of all rows that come, whether each is fresh, and the parts of those that are."""
    row = sum(part[0].numel() * part.itemsize for part in parts)
    return Traffic({"I": 17 * count}, {"Y": fresh * row})


def cache_batch_bytes(ids: Tensor, rows: int, slots: int, hits: int, missing: int) -> Traffic:
    """Of a batch of a cache of so many rows and slots whose device decides (`want`), and its release: what each id
    reads and writes, what each slot does that is held or taken, marks of all rows once, keys and holders once.
    """
    n = ids.shape[0]
    reads = {"I": ids.nbytes, "slots of rows": 8 * n, "places": 8 * n, "keys": 8 * slots, "marks": rows // 8}
    writes = {"Y": 8 * n, "held": 16 * n, "rows": 25 * n, "stamps": 4 * n}
    reads |= {"found": 16 * hits, "taken": 18 * missing, "released": 16 * n + 4 * (hits + missing)}
    writes |= {"found": 16 * hits, "taken": 34 * missing, "released": 5 * (hits + missing)}
    return Traffic(reads, writes)
