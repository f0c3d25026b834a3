"""Ids of tables whose rows were pruned, and of tables whose ids are hashed: which row each id has now.

Shapes: ids [N] in bags of T tables, offsets [T * B + 1]; a remapping of ids [P], or a hash table of ids and rows
[P, 2], for each table behind one another, which ends [T + 1] divide: a table whose part is empty is not pruned, and its
ids stay. Identities [S] are the ids that slots have, -1 where one is free.
Bytes moved: each id and its row once, and an entry of the remapping, or the entries of a hash table from the slot of
its hash on until its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._op import INTERPRETED, register, runs_kernel, tl, triton
from ..features import feature_of_position
from ..hashes import mix32, mix64, mixed32, mixed64, murmur_hash_ref, murmured, second_of, unsigned_remainder

FREE = -1
_MAX_INT32 = 2**31 - 1
_BLOCK = 64 if INTERPRETED else 128
# entries of an id that are read together
_PROBES = 4


def _tables(ids: Tensor, offsets: Tensor, tables: int) -> Tensor:
    """The table [N] of each id."""
    batch = (offsets.shape[0] - 1) // tables
    place = torch.arange(ids.shape[0], device=ids.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[batch : tables * batch : batch].contiguous(), place, right=True)


def remapped_rows_ref(ids: Tensor, offsets: Tensor, remapping: Tensor, ends: Tensor) -> Tensor:
    """What the remapping of its table says of each id; -1 where it says nothing."""
    table = _tables(ids, offsets, ends.shape[0] - 1)
    begin, rows = ends[table], ends[table + 1] - ends[table]
    inside = (ids >= 0) & (ids < rows)
    if not remapping.shape[0]:
        return torch.where(rows > 0, FREE, ids)
    row = remapping[torch.where(inside, begin + ids, 0).clamp(0, remapping.shape[0] - 1)].to(ids.dtype)
    return torch.where(rows > 0, torch.where(inside, row, FREE), ids)


def hashed_rows_ref(ids: Tensor, offsets: Tensor, hash_table: Tensor, ends: Tensor) -> Tensor:
    """The row that stands beside each id in the hash table of its table; -1 where it is not in it."""
    hashed = mix32(ids.long()) if ids.dtype == torch.int32 else mix64(ids)
    table, rows = _tables(ids, offsets, ends.shape[0] - 1).tolist(), ids.clone()
    for n, (t, wanted) in enumerate(zip(table, ids.tolist(), strict=True)):
        begin, slots = int(ends[t]), int(ends[t + 1] - ends[t])
        home = int(unsigned_remainder(hashed[n], max(slots, 1)))
        key = row = FREE
        for step in range(slots):
            key, row = hash_table[begin + (home + step) % slots].tolist()
            if key in (wanted, FREE):
                break
        if slots:
            rows[n] = row if key == wanted != FREE else FREE
    return rows


def identity_slots_ref(
    ids: Tensor,
    identities: Tensor,
    sizes: Tensor | None,
    begins: Tensor | None,
    max_probe: int,
    reserved: int,
    fallback: bool,
) -> Tensor:
    """The slot [N] of each id, looked for in `max_probe` of its slots from that of its hash on.

    The slots of id n are begins[n] ... begins[n] + sizes[n] - 1, the last `reserved` of them apart, or all. An id that
    is in none gets the first that was looked at, or a reserved one where some are; without `fallback` -1.
    """
    slots, hashed = identities.shape[0], murmur_hash_ref(ids)
    wanted = ids.long() if identities.dtype == ids.dtype else ids.fmod(_MAX_INT32)
    out = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    for n, id in enumerate(wanted.tolist()):
        begin = min(max(0 if begins is None else int(begins[n]), 0), slots - 1 - reserved)
        size = min(max(slots if sizes is None else int(sizes[n]), 1 + reserved), slots - begin)
        home = int(unsigned_remainder(hashed[n], size - reserved))
        places = [begin + (home + step) % (size - reserved) for step in range(min(max_probe, size - reserved))]
        missing = begin + (size - reserved + int(unsigned_remainder(hashed[n], reserved)) if reserved else home)
        hit = (place for place in places if int(identities[place]) == id)
        out[n] = next(hit, missing if fallback else FREE)
    return out


@triton.jit(do_not_specialize=["N", "P", "B"], do_not_specialize_on_alignment=["I", "O"])
def _remapped_rows_kernel(I, O, M, E, Y, N, P, T, B, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < N
    id = tl.load(I + i, mask=here, other=0)
    t = feature_of_position(O, i, T, B, STEPS)
    begin = tl.load(E + t, mask=here, other=0)
    rows = tl.load(E + t + 1, mask=here, other=0) - begin
    at = begin + id
    inside = here & (id >= 0) & (id < rows) & (at < P)
    row = tl.load(M + at, mask=inside, other=-1).to(I.dtype.element_ty)
    tl.store(Y + i, tl.where(rows > 0, row, id), mask=here)


@triton.jit(do_not_specialize=["N", "P", "B"], do_not_specialize_on_alignment=["I", "O"])
def _hashed_rows_kernel(  # type: ignore[no-untyped-def]
    I,
    O,
    H,
    E,
    Y,
    N,
    P,
    T,
    B,
    STEPS: tl.constexpr,
    PROBES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < N
    id = tl.load(I + i, mask=here, other=0)
    t = feature_of_position(O, i, T, B, STEPS)
    begin = tl.load(E + t, mask=here, other=0)
    slots = tl.load(E + t + 1, mask=here, other=0) - begin
    bits = id.to(tl.int64).to(tl.uint64, bitcast=True)
    hashed = mixed32(bits) if I.dtype.element_ty == tl.int32 else mixed64(bits)
    home = (hashed % tl.maximum(slots, 1).to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    place = tl.full((BLOCK,), -1, tl.int64)
    step = tl.zeros((BLOCK,), tl.int64)
    looks = here & (slots > 0) & (id != -1)
    ahead = tl.arange(0, PROBES)
    while tl.max(looks.to(tl.int32), 0) > 0:
        steps = step[:, None] + ahead[None, :]
        at = begin[:, None] + (home[:, None] + steps) % tl.maximum(slots, 1)[:, None]
        live = looks[:, None] & (steps < slots[:, None]) & (at >= 0) & (at < P)
        key = tl.load(H + at * 2, mask=live, other=-1).to(tl.int64)
        # the first that is free or the id's; one past the last slot counts as free
        first = tl.min(tl.where((key == -1) | (key == id[:, None]), ahead[None, :], PROBES), 1)
        hit = live & (ahead[None, :] == first[:, None]) & (key == id[:, None])
        place = tl.maximum(place, tl.max(tl.where(hit, at, -1), 1))
        step += PROBES
        looks = looks & (first == PROBES)
    row = tl.load(H + place * 2 + 1, mask=here & (place >= 0), other=-1).to(I.dtype.element_ty)
    tl.store(Y + i, tl.where(slots > 0, row, id), mask=here)


@triton.jit(
    do_not_specialize=["N", "S", "max_probe", "reserved", "second"], do_not_specialize_on_alignment=["I", "L", "F"]
)
def _identity_slots_kernel(  # type: ignore[no-untyped-def]
    I,
    K,
    L,
    F,
    Y,
    N,
    S,
    stride,
    max_probe,
    reserved,
    second,
    LOCAL: tl.constexpr,
    NARROW: tl.constexpr,
    FALLBACK: tl.constexpr,
    PROBES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < N
    id = tl.load(I + i, mask=here, other=0).to(tl.int64)
    hashed = murmured(id, second, 0 * second)
    # ids are kept in fewer bits by their remainder, which has the sign of the id
    if NARROW:
        id = id % 2147483647
    begin = i * 0
    size = begin + S
    if LOCAL:
        begin = tl.load(F + i, mask=here, other=0)
        size = tl.load(L + i, mask=here, other=1)
        begin = tl.minimum(tl.maximum(begin, 0), S - 1 - reserved)
        size = tl.minimum(tl.maximum(size, 1 + reserved), S - begin)
    block = size - reserved
    home = (hashed % block.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    slot = tl.full((BLOCK,), -1, tl.int64)
    step = tl.zeros((BLOCK,), tl.int64)
    most = tl.minimum(block, max_probe)
    looks = here & (most > 0)
    ahead = tl.arange(0, PROBES)
    while tl.max(looks.to(tl.int32), 0) > 0:
        steps = step[:, None] + ahead[None, :]
        at = begin[:, None] + (home[:, None] + steps) % block[:, None]
        live = looks[:, None] & (steps < most[:, None])
        key = tl.load(K + at * stride, mask=live, other=0).to(tl.int64)
        hit = live & (key == id[:, None])
        first = tl.min(tl.where(hit, ahead[None, :], PROBES), 1)
        slot = tl.maximum(slot, tl.max(tl.where(hit & (ahead[None, :] == first[:, None]), at, -1), 1))
        step += PROBES
        looks = looks & (first == PROBES) & (step < most)
    if FALLBACK:
        spare = tl.maximum(begin * 0 + reserved, 1).to(tl.uint64, bitcast=True)
        spare = block + (hashed % spare).to(tl.int64, bitcast=True)
        slot = tl.where(slot < 0, begin + tl.where(reserved > 0, spare, home), slot)
    tl.store(Y + i, slot, mask=here)


def _remapped_rows(ids: Tensor, offsets: Tensor, remapping: Tensor, ends: Tensor) -> Tensor:
    if not runs_kernel(ids):
        return remapped_rows_ref(ids, offsets, remapping, ends)
    out, tables = torch.empty(ids.shape, dtype=ids.dtype, device=ids.device), ends.shape[0] - 1
    if n := ids.shape[0]:
        batch = (offsets.shape[0] - 1) // tables
        _remapped_rows_kernel[(triton.cdiv(n, _BLOCK),)](
            ids.contiguous(), offsets.contiguous(), remapping.contiguous(), ends.contiguous(), out, n,
            remapping.shape[0], tables, batch, tables.bit_length() + 1, _BLOCK,
        )  # fmt: skip
    return out


def _hashed_rows(ids: Tensor, offsets: Tensor, hash_table: Tensor, ends: Tensor) -> Tensor:
    if not runs_kernel(ids):
        return hashed_rows_ref(ids, offsets, hash_table, ends)
    out, tables = torch.empty(ids.shape, dtype=ids.dtype, device=ids.device), ends.shape[0] - 1
    if n := ids.shape[0]:
        batch = (offsets.shape[0] - 1) // tables
        _hashed_rows_kernel[(triton.cdiv(n, _BLOCK),)](
            ids.contiguous(), offsets.contiguous(), hash_table.contiguous(), ends.contiguous(), out, n,
            hash_table.shape[0], tables, batch, tables.bit_length() + 1, _PROBES, _BLOCK,
        )  # fmt: skip
    return out


def _identity_slots(
    ids: Tensor,
    identities: Tensor,
    sizes: Tensor | None,
    begins: Tensor | None,
    max_probe: int,
    reserved: int,
    fallback: bool,
) -> Tensor:
    if not runs_kernel(ids):
        return identity_slots_ref(ids, identities, sizes, begins, max_probe, reserved, fallback)
    out = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    if n := ids.shape[0]:
        local = begins is not None and sizes is not None
        _identity_slots_kernel[(triton.cdiv(n, _BLOCK),)](
            ids.contiguous(), identities, sizes.contiguous() if local and sizes is not None else ids,
            begins.contiguous() if local and begins is not None else ids, out, n, identities.shape[0],
            identities.stride(0), max(max_probe, 0), reserved, second_of(0, 0), local,
            identities.dtype != ids.dtype, fallback, _PROBES, _BLOCK,
        )  # fmt: skip
    return out


register(
    "remapped_rows(Tensor ids, Tensor offsets, Tensor remapping, Tensor ends) -> Tensor",
    _remapped_rows,
    lambda ids, *_: ids.new_empty(ids.shape),
)
register(
    "hashed_rows(Tensor ids, Tensor offsets, Tensor hash_table, Tensor ends) -> Tensor",
    _hashed_rows,
    lambda ids, *_: ids.new_empty(ids.shape),
)
register(
    "identity_slots(Tensor ids, Tensor identities, Tensor? sizes, Tensor? begins, SymInt max_probe, int reserved,"
    " bool fallback) -> Tensor",
    _identity_slots,
    lambda ids, *_: ids.new_empty(ids.shape, dtype=torch.int64),
)
