"""The distinct ids of a batch, and for each id which of them it is: rows are fetched once and handed out by `inverse`.

Shapes: I [N] ids, O [F*B + 1] bag offsets, U distinct ids, N the inverse [N]; T tables, each of one or more features.
Bytes moved by the kernels: N * itemsize(I) + N * itemsize(key) for the keys, a sort of N keys with positions (four
passes of 12 bytes each way, for int32 keys), then N * (2 itemsize(key) + 8 + 8 + 8) and U * 2 itemsize(I).
Keys are int32 where all tables together have fewer than 2**31 rows: they sort in half the passes of int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
    direct,
    register,
    runs_kernel,
    tl,
    triton,
)
from ..cpu import buckets as cpu_buckets
from ..features import batch_size, feature_of_position
from ..lookup.bounds import require_ids
from ..memory import require_sortable
from ..transpose import key_dtype, run_begins

# a thread has one id: of more, gathers and what is read in order would want different tiles
_BLOCK = 64 if INTERPRETED else 128


class Unique(NamedTuple):
    """Distinct ids [U] in ascending order, the place [N] of each id among them, and how often each occurs."""

    ids: Tensor
    inverse: Tensor
    counts: Tensor | None


class JaggedUnique(NamedTuple):
    """Distinct ids [U] of each table as a batch of the same features, and the place [N] of each id among them."""

    lengths: Tensor  # [F*B]
    offsets: Tensor  # [F*B + 1]
    ids: Tensor
    inverse: Tensor


def unique_ids(ids: Tensor, *, return_counts: bool = False) -> Unique:
    """The distinct ids of `ids` [N] int32 or int64, sorted; `unique.ids[unique.inverse]` are the ids again.

    `torch.unique` is the implementation, but for the CPU with numba, where a radix sort of pairs (id, position), or a
    mark for each row where ids are dense, is several times as fast. Waits for the device: the size depends on values.

    Returns:
        ids [U] in their type, inverse [N] int64, counts [U] int64 or None.

    Raises:
        TypeError: ids are not integers.
        ValueError: ids have more than one dimension.
    """
    require_ids("ids", ids)
    _require_flat("ids", ids)
    call = _unique_ids if direct(ids) else torch.ops.shardwise.unique_ids
    distinct, inverse, counts = call(ids, return_counts)
    return Unique(distinct, inverse, counts if return_counts else None)


def _unique_ids(ids: Tensor, return_counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    loop = cpu_buckets.loops() if ids.is_cpu and ids.shape[0] else None
    if loop is not None:
        counts = torch.empty(ids.shape[0], dtype=torch.int64, device="cpu") if return_counts else None
        done = cpu_buckets.unique(loop, ids.contiguous(), counts)
        if done is not None:
            return *done, torch.empty(0, dtype=torch.int64, device="cpu") if counts is None else counts
    if return_counts:
        return torch.unique(ids, return_inverse=True, return_counts=True)  # type: ignore[no-any-return]
    return *torch.unique(ids, return_inverse=True), torch.empty(0, dtype=torch.int64, device=ids.device)


def jagged_unique_ref(
    ids: Tensor, offsets: Tensor, hash_sizes: Sequence[int], feature_to_table: Sequence[int] | None = None
) -> JaggedUnique:
    """torch.unique of ids counted on from table to table; a table's distinct ids are spread evenly over its bags."""
    table_of = list(range(len(hash_sizes))) if feature_to_table is None else list(feature_to_table)
    batch, base = batch_size(offsets, len(table_of)), list(accumulate(hash_sizes, initial=0))
    table = torch.tensor(table_of, device=ids.device).repeat_interleave(batch).repeat_interleave(offsets.diff())  # [N]
    first_row = torch.tensor(base, device=ids.device)
    keys, inverse = torch.unique(ids + first_row[table], return_inverse=True)  # [U], [N]
    table_of_key = torch.searchsorted(first_row, keys, right=True) - 1  # [U]
    lengths = []
    for t in range(len(hash_sizes)):
        number, bags = int((table_of_key == t).sum()), table_of.count(t) * batch
        lengths += [number // bags + (i < number % bags) for i in range(bags)]
    counts = torch.tensor(lengths, dtype=offsets.dtype, device=ids.device)
    ends = torch.tensor(list(accumulate(lengths, initial=0)), dtype=offsets.dtype, device=ids.device)
    return JaggedUnique(counts, ends, (keys - first_row[table_of_key]).to(ids.dtype), inverse)


@triton.jit(do_not_specialize=["N", "B"], do_not_specialize_on_alignment=["I", "O"])
def _unique_key_kernel(  # type: ignore[no-untyped-def]
    I,
    O,
    first_rows,
    hash_sizes,
    keys,
    N,
    F,
    B,
    padding,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < N
    # a position before the first offset is in no bag, one past the last neither
    live = here & (position >= tl.load(O)) & (position < tl.load(O + tl.cast(F, tl.int64) * B))
    id = tl.load(I + position, mask=here, other=-1).to(tl.int64)
    f = feature_of_position(O, position, F, B, STEPS)
    good = live & (id >= 0) & (id < tl.load(hash_sizes + f, mask=live, other=0))
    key = tl.where(good, tl.load(first_rows + f, mask=good, other=0) + id, padding)
    tl.store(keys + position, key.to(keys.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["I"])
def _number_unique_kernel(I, source, number, unique, inverse, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < N
    k = tl.load(number + place, mask=here, other=1).to(tl.int64) - 1
    s = tl.load(source + place, mask=here, other=0)
    tl.store(inverse + s, k, mask=here)
    before = tl.load(number + place - 1, mask=here & (place > 0), other=0).to(tl.int64)
    first = here & (k == before)
    tl.store(unique + k, tl.load(I + s, mask=first, other=0), mask=first)


def jagged_unique(
    ids: Tensor, offsets: Tensor, hash_sizes: Sequence[int], feature_to_table: Sequence[int] | None = None
) -> JaggedUnique:
    """The distinct ids of each table of a batch; several features may share a table.

    The result is a batch of the same features: the distinct ids of a table, sorted, are spread evenly over the bags of
    its features, so that a sequence lookup of it fetches each row once, and `rows[inverse]` are the rows of all ids.
    Waits for the device: the size depends on values.

    Shapes: ids [N], offsets [F*B + 1], both int32 or int64; hash_sizes [T] rows of each table; feature_to_table [F]
    each feature's table, 0 ... T - 1 without a gap and in order; as many features as tables if it is not given.

    Returns:
        lengths [F*B] and offsets [F*B + 1] in offsets' type, ids [U] in theirs, inverse [N] int64.

    Raises:
        TypeError: ids or offsets that are not integers.
        ValueError: shapes or tables that do not fit, offsets that do not begin at 0, decrease or do not end at N, an id
            outside its table.
    """
    require_ids("ids", ids)
    require_ids("offsets", offsets)
    _require_flat("ids", ids)
    _require_flat("offsets", offsets)
    if ids.device != offsets.device:
        raise ValueError(f"offsets is on {offsets.device}, ids on {ids.device}")
    tables = tuple(range(len(hash_sizes))) if feature_to_table is None else tuple(feature_to_table)
    if tables:
        batch_size(offsets, len(tables))
    elif offsets.shape[0] != 1 or ids.shape[0]:
        raise ValueError(f"{ids.shape[0]} ids and {offsets.shape[0]} offsets of no tables: expected 0 and 1")
    if direct(ids, offsets):
        return JaggedUnique(*_jagged_unique(ids, offsets, hash_sizes, tables))
    return JaggedUnique(*torch.ops.shardwise.jagged_unique(ids, offsets, list(hash_sizes), list(tables)))


def _require_flat(what: str, tensor: Tensor) -> None:
    if tensor.dim() != 1:
        raise ValueError(f"{what} must have one dimension, got shape {tuple(tensor.shape)}")


@cache
def _check_tables(hash_sizes: tuple[int, ...], tables: tuple[int, ...]) -> None:
    if [table for table, _ in groupby(tables)] != list(range(len(hash_sizes))):
        raise ValueError(
            f"feature_to_table must name tables 0 to {len(hash_sizes) - 1} in order, got {list(tables)[:20]}"
        )
    for table, rows in enumerate(hash_sizes):
        if rows < 0:
            raise ValueError(f"hash_sizes[{table}] must not be negative, got {rows}")
    if sum(hash_sizes) >= 2**63:
        raise ValueError(f"hash_sizes add up to {sum(hash_sizes)}, more than an int64 can count")


@cache
def _of_tables(hash_sizes: tuple[int, ...], tables: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hash_sizes [T], the first feature of each table [T + 1], and the hash size and first row of each feature [F]."""
    first_features = [tables.index(table) for table in range(len(hash_sizes))] + [len(tables)]
    base = list(accumulate(hash_sizes, initial=0))
    numbers = (list(hash_sizes), first_features, [hash_sizes[t] for t in tables], [base[t] for t in tables])
    return tuple(torch.tensor(row, dtype=torch.int64) for row in numbers)  # type: ignore[return-value]


def _jagged_unique(
    ids: Tensor, offsets: Tensor, hash_sizes: Sequence[int], tables: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_tables(tuple(hash_sizes), tuple(tables))
    ids, offsets = ids.contiguous(), offsets.contiguous()
    n, bags, features, device = ids.shape[0], offsets.shape[0] - 1, len(tables), ids.device
    if n == 0 or bags == 0:
        _check_ends(offsets, n)
        inverse = torch.empty(0, dtype=torch.int64, device=device)
        return torch.zeros_like(offsets[1:]), torch.zeros_like(offsets), torch.empty_like(ids), inverse
    if runs_kernel(ids):
        return _jagged_unique_kernels(ids, offsets, hash_sizes, tables)
    sizes, first_features, _, first_rows = _of_tables(tuple(hash_sizes), tuple(tables))
    loop = cpu_buckets.loops() if ids.is_cpu else None
    if loop is not None and max(hash_sizes).bit_length() + n.bit_length() <= 63:
        done = cpu_buckets.unique_per_table(loop, ids, offsets, sizes, first_features)
        if not isinstance(done, int):
            return done
        _raise_bad_values(ids, offsets, hash_sizes, tables)
    _raise_bad_values(ids, offsets, hash_sizes, tables)
    batch = bags // features
    bases = first_rows.to(device).repeat_interleave(offsets[::batch].diff(), output_size=n)  # [N]
    keys, inverse = torch.unique(ids + bases, return_inverse=True)  # [U], [N]
    bounds = torch.tensor(list(accumulate(hash_sizes, initial=0)), device=device)
    starts = torch.searchsorted(keys, bounds)  # [T + 1] places in keys
    numbers = starts.diff()  # [T]
    distinct = (keys - bounds[:-1].repeat_interleave(numbers, output_size=keys.shape[0])).to(ids.dtype)
    return *_spread(numbers, first_features, batch, offsets.dtype), distinct, inverse


def _jagged_unique_kernels(
    ids: Tensor, offsets: Tensor, hash_sizes: Sequence[int], tables: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require_sortable("jagged_unique", "ids", ids)
    n, features, device = ids.shape[0], len(tables), ids.device
    batch = (offsets.shape[0] - 1) // features
    padding = sum(hash_sizes)
    _, first_features, sizes, first_rows = _of_tables(tuple(hash_sizes), tuple(tables))
    keys = torch.empty(n, dtype=key_dtype(padding + 1), device=device)
    grid = (triton.cdiv(n, _BLOCK),)
    _unique_key_kernel[grid](
        ids, offsets, first_rows.to(device), sizes.to(device), keys, n, features, batch, padding,
        features.bit_length() + 1, _BLOCK,
    )  # fmt: skip
    keys, source = torch.sort(keys, stable=True)
    number = run_begins(keys).cumsum(0)  # [N] counts distinct ids up to each place, from 1
    # a sync: the size of the result must be known, and with it comes whether an id or an offset is bad
    count, largest = torch.stack([number[-1], keys[-1].long()]).tolist()
    if largest == padding:
        _raise_bad_values(ids, offsets, hash_sizes, tables)
        raise ValueError("offsets must begin at 0, not decrease and end at the number of ids")
    distinct, inverse = torch.empty(count, dtype=ids.dtype, device=device), torch.empty_like(source)
    _number_unique_kernel[grid](ids, source, number, distinct, inverse, n, _BLOCK)
    bounds = torch.tensor(list(accumulate(hash_sizes, initial=0)), dtype=keys.dtype, device=device)
    at = torch.searchsorted(keys, bounds)  # [T + 1]
    numbers = torch.where(at > 0, number[at - 1], 0).diff()  # [T]
    return *_spread(numbers, first_features, batch, offsets.dtype), distinct, inverse


def _spread(numbers: Tensor, first_features: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lengths and offsets of bags among which the `numbers` [T] of tables are divided, the first have one more."""
    device, bags = numbers.device, int(first_features[-1]) * batch
    first_bags = (first_features * batch).to(device)  # [T + 1]
    share = first_bags.diff()  # [T] bags of a table
    table = torch.arange(len(numbers), device=device).repeat_interleave(share, output_size=bags)  # [F*B]
    place = torch.arange(bags, device=device) - first_bags[table]  # [F*B] of a bag in its table
    offsets = torch.zeros(bags + 1, dtype=dtype, device=device)
    lengths = ((numbers // share)[table] + (place < (numbers % share)[table])).to(dtype)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return lengths, offsets


def _check_ends(offsets: Tensor, n: int) -> None:
    """ValueError where offsets do not go from 0 to n; on the CPU."""
    if offsets.is_cpu and (int(offsets[0]) != 0 or int(offsets[-1]) != n):
        raise ValueError(f"offsets must go from 0 to {n} ids, got {int(offsets[0])} to {int(offsets[-1])}")


def _raise_bad_values(ids: Tensor, offsets: Tensor, hash_sizes: Sequence[int], tables: Sequence[int]) -> None:
    """ValueError for offsets that are none or for an id outside its table; looks at values."""
    _check_ends(offsets.cpu(), ids.shape[0])
    fallen = offsets[1:] < offsets[:-1]
    if bool(fallen.any()):
        bag = int(fallen.nonzero()[0])
        raise ValueError(f"offsets[{bag + 1}] is {int(offsets[bag + 1])} after {int(offsets[bag])}")
    batch = (offsets.shape[0] - 1) // len(tables)
    sizes = torch.tensor([hash_sizes[table] for table in tables], device=ids.device)
    rows = sizes.repeat_interleave(offsets[::batch].diff(), output_size=ids.shape[0])  # [N]
    bad = (ids < 0) | (ids >= rows)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        f = int(torch.searchsorted(offsets[batch::batch].contiguous(), at, right=True))
        raise ValueError(
            f"ids[{at}] of feature {f} is {int(ids[at])}, outside table {tables[f]} of {int(rows[at])} rows"
        )


def _fake_unique(ids: Tensor, return_counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    index = ids.new_empty(ids.shape, dtype=torch.int64)
    return ids.new_empty(size), index, ids.new_empty(size if return_counts else 0, dtype=torch.int64)


def _fake_jagged_unique(
    ids: Tensor, offsets: Tensor, hash_sizes: Sequence[int], tables: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    distinct = ids.new_empty(torch.library.get_ctx().new_dynamic_size())
    lengths = offsets.new_empty(offsets.shape[0] - 1)
    return lengths, torch.empty_like(offsets), distinct, ids.new_empty(ids.shape, dtype=torch.int64)


register("unique_ids(Tensor ids, bool return_counts) -> (Tensor, Tensor, Tensor)", _unique_ids, _fake_unique)
register(
    "jagged_unique(Tensor ids, Tensor offsets, int[] hash_sizes, int[] tables) -> (Tensor, Tensor, Tensor, Tensor)",
    _jagged_unique,
    _fake_jagged_unique,
)
