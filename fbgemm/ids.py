"""Checks of ids before a lookup, and hashes of ids to rows.

Shapes: ids [N], offsets [T * B + 1] of T tables, or of T tables whose batches B_offsets [T + 1] divide; a buffer of
identities [S, 1], -1 where a slot is free.
"""

from __future__ import annotations

import warnings
from itertools import pairwise

import torch
from torch import Tensor

from shardwise import kernels
from shardwise.kernels import BoundsCheckMode
from shardwise.kernels._op import runs_kernel
from shardwise.kernels.hashes import murmur_hash, unsigned_remainder

from .registry import op
from .slots import FREE, slots_in_turn

_INDEX = (torch.int32, torch.int64)
_MAX_INT32 = 2**31 - 1
# numbers of modes -> what they come to; NONE reads ids as they are
_EFFECTS = {int(mode): mode if mode is BoundsCheckMode.NONE else mode.effect for mode in BoundsCheckMode}
# slots of an id that are looked at together
_PROBES = 16


@op(
    "bounds_check_indices(Tensor rows_per_table, Tensor(a!) indices, Tensor(b!) offsets, int bounds_check_mode,"
    " Tensor(c!) warning, Tensor(d!)? weights=None, Tensor? B_offsets=None, SymInt max_B=-1, Tensor? b_t_map=None,"
    " int info_B_num_bits=-1, int info_B_mask=-1, int bounds_check_version=1, bool prefetch_pipeline=False) -> ()",
    fake=lambda *_args, **_kwargs: None,
)
def bounds_check_indices(
    rows_per_table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bounds_check_mode: int,
    warning: Tensor,
    weights: Tensor | None = None,
    B_offsets: Tensor | None = None,
    max_B: int = -1,
    b_t_map: Tensor | None = None,
    info_B_num_bits: int = -1,
    info_B_mask: int = -1,
    bounds_check_version: int = 1,
    prefetch_pipeline: bool = False,
) -> None:
    """Raise where ids or offsets are outside their tables (mode 0), or put them inside (1 counts them in `warning`, 2).

    An id outside becomes 0, -1 stays; offsets are raised to the one before and lowered to the number of ids, the last
    one becomes that. Mode 3 checks nothing; 4, 5 and 6 are 2, 1 and 0. What says how B_offsets divide bags among
    threads has no part in the result.
    """
    mode = _checked_mode(rows_per_table, indices, offsets, bounds_check_mode, warning, weights, B_offsets, max_B)
    if mode is BoundsCheckMode.NONE:
        return
    size, bags, tables = indices.shape[0], offsets.shape[0] - 1, rows_per_table.shape[0]
    inside = offsets.clamp(0, size)
    inside[-1] = size
    inside = inside.cummax(0).values
    if B_offsets is not None:
        begins = inside[B_offsets.clamp(0, bags)].cummax(0).values
        begins[-1] = size
    else:
        begins = inside[:: bags // tables] if bags else inside.expand(tables + 1)
    if runs_kernel(indices):
        _bound_on_device(mode, rows_per_table, indices, offsets, inside, begins, warning)
        return
    # rows of the table of each id; ids before the first bag are in none, and are not looked at
    rows = torch.cat([rows_per_table.new_full((1,), -1), rows_per_table])
    rows = rows.repeat_interleave(torch.cat([begins[:1], begins.diff()]), output_size=size)  # [N]
    outside = ((indices < -1) | (indices >= rows)) & (rows >= 0)
    if mode is BoundsCheckMode.FATAL:
        _require_none(offsets, inside, indices, outside, rows_per_table, begins)
        return
    if mode is BoundsCheckMode.WARNING:
        _warn(warning, outside.sum(), offsets, inside, size)
    offsets.copy_(inside)
    indices.masked_fill_(outside, 0)


def _warn(warning: Tensor, outside: Tensor, offsets: Tensor, inside: Tensor, size: int) -> None:
    """Count in `warning` what is corrected: the ids `outside`, and offsets."""
    bags = offsets.shape[0] - 1
    # FBGEMM counts bags as it corrects one after another: the begin of each is corrected, its end is not
    ends = torch.cat([offsets[1:-1], inside[-1:]])[:bags]
    fallen = (ends < inside[:-1]) | (ends > size)
    fallen[:1] |= (offsets[:1] != inside[:1])[:bags]
    wrong = fallen.sum() + (offsets[-1] != size)
    warning.zero_()
    warning[0] = outside + wrong
    # asked on the CPU alone, where it is no wait
    if warning.is_cpu and int(warning[0]):
        warnings.warn(
            f"bounds_check_indices: {int(outside)} ids outside their tables were set to 0, "
            f"{int(wrong)} offsets put within the {size} ids",
            stacklevel=3,
        )


def _bound_on_device(
    mode: BoundsCheckMode,
    rows_per_table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    inside: Tensor,
    begins: Tensor,
    warning: Tensor,
) -> None:
    """`bounds_check_indices` where a kernel goes through the ids."""
    count = torch.ops.shardwise.bound_ids(indices, rows_per_table, begins, mode is not BoundsCheckMode.FATAL)
    if mode is BoundsCheckMode.FATAL:
        _require_none(offsets, inside, indices, count, rows_per_table, begins)
        return
    if mode is BoundsCheckMode.WARNING:
        _warn(warning, count[0], offsets, inside, indices.shape[0])
    offsets.copy_(inside)


def _checked_mode(
    rows_per_table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    warning: Tensor,
    weights: Tensor | None,
    B_offsets: Tensor | None,
    max_B: int,
) -> BoundsCheckMode:
    if mode not in _EFFECTS:
        modes = ", ".join(f"{each.value} ({each.name.lower()})" for each in BoundsCheckMode)
        raise ValueError(f"bounds_check_mode must be one of {modes}, got {mode}")
    asked = _EFFECTS[mode]
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        if tensor.dtype not in _INDEX:
            raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    for name, tensor in (("rows_per_table", rows_per_table), ("warning", warning)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {tensor.dtype}")
    for name, tensor in (
        ("rows_per_table", rows_per_table),
        ("indices", indices),
        ("offsets", offsets),
        ("warning", warning),
    ):
        if tensor.dim() != 1 or (tensor.shape[0] == 0 and name != "indices"):
            raise ValueError(f"{name} must have 1 dimension and an entry, got shape {list(tensor.shape)}")
    bags, tables = offsets.shape[0] - 1, rows_per_table.shape[0]
    if weights is not None and weights.shape[:1] != indices.shape:
        raise ValueError(f"weights must be {indices.shape[0]} as indices are, got shape {list(weights.shape)}")
    if B_offsets is None:
        if bags % tables:
            raise ValueError(f"{bags + 1} offsets do not divide among {tables} tables: expected T * B + 1")
        return asked
    if max_B < 0:
        raise ValueError(f"max_B must be given with B_offsets, got {max_B}")
    if B_offsets.dtype != torch.int32:
        raise TypeError(f"B_offsets must be int32, got {B_offsets.dtype}")
    if B_offsets.shape != (tables + 1,):
        raise ValueError(f"B_offsets must have {tables + 1} entries, got shape {list(B_offsets.shape)}")
    if B_offsets.is_cpu and (
        int(B_offsets[0]) != 0 or int(B_offsets[-1]) != bags or bool((B_offsets.diff() < 0).any())
    ):
        raise ValueError(f"B_offsets must go from 0 to {bags} bags without falling, got {B_offsets.tolist()}")
    return asked


def _require_none(
    offsets: Tensor, inside: Tensor, indices: Tensor, outside: Tensor, rows_per_table: Tensor, begins: Tensor
) -> None:
    """Raise where anything is to be corrected: an offset, or an id where `outside`, or their number, is not 0."""
    differs = offsets != inside
    bad = differs.any() | outside.any()
    if kernels.capturing():
        # a CUDA graph cannot wait: the device says it, as FBGEMM's does
        torch._assert_async(~bad, "bounds_check_indices: an id or an offset is out of range")
        return
    # an error is raised by the host: it has to wait for the answer
    if not bool(bad):
        return
    if bool(differs.any()):
        at = int(differs.int().argmax())
        raise ValueError(
            f"offsets must go up to the number of indices, {indices.shape[0]}, without falling, "
            f"got offsets[{at}] = {int(offsets[at])}, where {int(inside[at])} would be in range"
        )
    ids, ends, limits = indices.tolist(), begins.tolist(), rows_per_table.tolist()
    for table, (begin, end) in enumerate(pairwise(ends)):
        for at in range(begin, end):
            if not -1 <= ids[at] < limits[table]:
                raise IndexError(f"indices[{at}] is {ids[at]}, outside its table of {limits[table]} rows")


@op("murmur_hash3(Tensor input, int y, int seed) -> Tensor")
def murmur_hash3(input: Tensor, y: int, seed: int) -> Tensor:
    """The hash of the one id in `input`, with `y` as its second half: a number without dimensions."""
    if input.dtype != torch.int64:
        raise TypeError(f"input must be int64, got {input.dtype}")
    if input.shape != (1,):
        raise ValueError(f"input must be one id, got shape {list(input.shape)}")
    return murmur_hash(input, y, seed).view(())


@op(
    "create_zch_buffer(int size, bool support_evict=False, Device? device=None, bool long_type=False)"
    " -> (Tensor, Tensor)"
)
def create_zch_buffer(
    size: int, support_evict: bool = False, device: torch.device | None = None, long_type: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Free slots: identities [size, 1] int32, or int64 with `long_type`; and int32 metadata with `support_evict`."""
    if size < 0:
        raise ValueError(f"size must not be negative, got {size}")
    dtype = torch.int64 if long_type else torch.int32
    identities = torch.full((size, 1), -1, dtype=dtype, device=device)
    metadata = torch.full((size, 1), -1, dtype=torch.int32, device=device) if support_evict else None
    return identities, metadata


def _zch_fake(input: Tensor, *_args: object, **_kwargs: object) -> tuple[Tensor, Tensor | None]:
    return input.new_empty(input.shape[0], dtype=torch.int64), None


@op(
    "zero_collision_hash(Tensor input, Tensor identities, int max_probe, bool circular_probe=False, int exp_hours=-1,"
    " bool readonly=False, Tensor? local_sizes=None, Tensor? offsets=None, Tensor? metadata=None,"
    " bool output_on_uvm=False, bool disable_fallback=False, bool _modulo_identity_DPRECATED=False,"
    " Tensor? input_metadata=None, int eviction_threshold=-1, int eviction_policy=0, int opt_in_prob=-1,"
    " int num_reserved_slots=-1, Tensor? opt_in_rands=None, Tensor? runtime_meta=None) -> (Tensor, Tensor)",
    fake=_zch_fake,
)
def zero_collision_hash(
    input: Tensor,
    identities: Tensor,
    max_probe: int,
    circular_probe: bool = False,
    exp_hours: int = -1,
    readonly: bool = False,
    local_sizes: Tensor | None = None,
    offsets: Tensor | None = None,
    metadata: Tensor | None = None,
    output_on_uvm: bool = False,
    disable_fallback: bool = False,
    _modulo_identity_DPRECATED: bool = False,
    input_metadata: Tensor | None = None,
    eviction_threshold: int = -1,
    eviction_policy: int = 0,
    opt_in_prob: int = -1,
    num_reserved_slots: int = -1,
    opt_in_rands: Tensor | None = None,
    runtime_meta: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The slot [N] of each id among identities [S, 1], looked for in `max_probe` slots from that of its hash on.

    With `readonly` slots are looked up. Otherwise an id without one takes the first free one, as ids one after another
    do; of these, with `opt_in_rands` [N], those alone whose number is below `opt_in_prob`.

    An id without a slot gets the first of these, or -1 with `disable_fallback`, or a reserved slot where some are: the
    last `num_reserved_slots`. With `local_sizes` and `offsets` [N] the slots of an id are that many from there on.

    Slots are not taken from ids that have them: what belongs to that (exp_hours, metadata, eviction_threshold) must be
    left out, and the second output is None.
    """
    _check_unused(exp_hours, metadata, input_metadata, eviction_threshold, eviction_policy, readonly)
    if input.shape[0] == 0:
        return input.new_empty(0, dtype=torch.int64), None
    _check_zch(input, identities, circular_probe, _modulo_identity_DPRECATED, local_sizes, offsets)
    _check_opt_in(input, opt_in_prob, num_reserved_slots, opt_in_rands, readonly)
    slots, reserved = identities.shape[0], num_reserved_slots if opt_in_prob != -1 else 0
    if slots <= reserved:
        raise ValueError(f"identities must have more than the {reserved} reserved slots, got {slots}")
    if readonly and runs_kernel(input):
        if local_sizes is not None and offsets is not None:
            _check_local(local_sizes, offsets, slots, reserved)
        return torch.ops.shardwise.identity_slots(
            input, identities[:, 0], local_sizes, offsets, max_probe, reserved, not disable_fallback
        ), None
    if local_sizes is None or offsets is None:
        begin = input.new_zeros(1, dtype=torch.int64).expand(input.shape)
        size = begin + slots
    else:
        _check_local(local_sizes, offsets, slots, reserved)
        # elsewhere than on the CPU slots outside are not followed
        begin = offsets.clamp(0, slots - 1 - reserved)
        size = torch.minimum(local_sizes.clamp(min=1 + reserved), slots - begin)
    ids = input.long()
    hashed = murmur_hash(ids)
    # ids are kept in fewer bits by their remainder, which has the sign of the id
    wanted = ids if identities.dtype == input.dtype else ids.fmod(_MAX_INT32)
    block = size - reserved
    home = unsigned_remainder(hashed, block)
    kept = identities[:, 0].long()
    slot = _looked_up(wanted, begin, block, home, kept, max_probe)
    fallback = begin + (block + unsigned_remainder(hashed, reserved) if reserved else home)
    if readonly:
        return torch.where(slot < 0, -1 if disable_fallback else fallback, slot), None
    # an id of -1 looks like a free slot, and takes none
    joins = wanted != FREE
    if opt_in_rands is not None:
        joins &= (slot >= 0) | (opt_in_rands < opt_in_prob)
    probes = block.clamp(max=max(max_probe, 0))
    taken = slots_in_turn(wanted, begin, block, home, kept, probes.masked_fill(~joins, 0))
    # those that take none of their own have their slot if it was there before, or an earlier one has taken it
    kept = torch.cat([kept, kept[:1]]).index_put_((torch.where(taken < 0, slots, taken),), wanted)[:slots]
    identities[:, 0] = kept.to(identities.dtype)
    if opt_in_rands is not None:
        order = torch.arange(input.shape[0], device=input.device)
        first = order.new_full((slots + 1,), input.shape[0])
        first.scatter_reduce_(0, torch.where(taken < 0, slots, taken), order, "amin")
        now = _looked_up(wanted, begin, block, home, kept, max_probe)
        slot = torch.where(joins, taken, torch.where((now >= 0) & (first[now.clamp(min=0)] < order), now, fallback))
    else:
        slot = torch.where(joins, taken, slot)
    return torch.where(slot < 0, -1 if disable_fallback else fallback, slot), None


def _looked_up(wanted: Tensor, begin: Tensor, slots: Tensor, home: Tensor, kept: Tensor, max_probe: int) -> Tensor:
    """The first slot [N] that holds what is wanted, -1 if none of those that are looked at does."""
    slot = torch.full_like(home, -1)
    wanted, begin, slots, home = (each.unsqueeze(1) for each in (wanted, begin, slots, home))  # [N, 1]
    # a table that was gone through once has nothing else to give
    for first in range(0, min(max_probe, kept.shape[0]), _PROBES):
        step = torch.arange(first, min(first + _PROBES, max_probe), device=kept.device)
        place = begin + (home + step) % slots  # [N, P]
        hit = kept[place] == wanted
        which = place.gather(1, hit.int().argmax(1, keepdim=True)).squeeze(1)
        slot = torch.where((slot < 0) & hit.any(1), which, slot)
        if slot.is_cpu and bool((slot >= 0).all()):
            break
    return slot


def _check_unused(
    exp_hours: int,
    metadata: Tensor | None,
    input_metadata: Tensor | None,
    eviction_threshold: int,
    eviction_policy: int,
    readonly: bool,
) -> None:
    for name, number in (("exp_hours", exp_hours), ("eviction_threshold", eviction_threshold)):
        if number != -1:
            raise ValueError(f"{name} must be -1, as no slot is taken from an id that has it, got {number}")
    if eviction_policy != 0 and not readonly:
        raise ValueError(
            f"eviction_policy must be 0, as no slot is taken from an id that has it, got {eviction_policy}"
        )
    for name, tensor in (("metadata", metadata), ("input_metadata", input_metadata)):
        if tensor is not None:
            raise ValueError(
                f"{name} must be None, as no slot is taken from an id that has it, got {list(tensor.shape)}"
            )


def _check_opt_in(
    input: Tensor, opt_in_prob: int, num_reserved_slots: int, opt_in_rands: Tensor | None, readonly: bool
) -> None:
    if opt_in_prob != -1 and not (0 < opt_in_prob <= 100 and num_reserved_slots > 0):
        raise ValueError(
            "opt_in_prob must be 1 to 100 and num_reserved_slots positive, or both -1, "
            f"got {opt_in_prob} and {num_reserved_slots}"
        )
    if num_reserved_slots != -1 and opt_in_prob == -1:
        raise ValueError(f"num_reserved_slots must be -1 without opt_in_prob, got {num_reserved_slots}")
    if opt_in_rands is None:
        return
    if readonly or not 0 < opt_in_prob < 100:
        raise ValueError(
            f"opt_in_rands must be None with readonly, and without opt_in_prob below 100, got {opt_in_prob}"
        )
    if opt_in_rands.dtype != torch.int32 or opt_in_rands.shape != input.shape:
        raise ValueError(
            f"opt_in_rands must be int32 for each of {input.shape[0]} ids, "
            f"got {opt_in_rands.dtype} {list(opt_in_rands.shape)}"
        )


def _check_zch(
    input: Tensor,
    identities: Tensor,
    circular_probe: bool,
    modulo_identity: bool,
    local_sizes: Tensor | None,
    offsets: Tensor | None,
) -> None:
    for name, tensor in (("input", input), ("identities", identities)):
        if tensor.dtype not in _INDEX:
            raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if input.dtype == torch.int32 != identities.dtype:
        raise TypeError(f"identities must be int32 as input is, got {identities.dtype}")
    if input.dim() != 1 or identities.dim() != 2 or identities.shape[1] < 1:
        raise ValueError(
            f"input must have 1 dimension and identities be [slots, 1], "
            f"got shapes {list(input.shape)} and {list(identities.shape)}"
        )
    if not circular_probe:
        raise ValueError("circular_probe must be true")
    if modulo_identity:
        raise ValueError("_modulo_identity_DPRECATED must be false")
    if (local_sizes is None) != (offsets is None):
        raise ValueError("local_sizes and offsets must be given together")
    for name, numbers in (("local_sizes", local_sizes), ("offsets", offsets)):
        if numbers is None:
            continue
        if numbers.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {numbers.dtype}")
        if numbers.shape != input.shape:
            raise ValueError(f"{name} must have a number for each of {input.shape[0]} ids, got {list(numbers.shape)}")


def _check_local(sizes: Tensor, begins: Tensor, slots: int, reserved: int) -> None:
    """Raise on the CPU where the slots of an id are not among all."""
    if sizes.is_cpu and bool(((sizes <= reserved) | (begins < 0) | (begins + sizes > slots)).any()):
        raise ValueError(
            f"offsets and local_sizes must name more than {reserved} of {slots} slots for each id, "
            f"got local_sizes {int(sizes.min())} ... {int(sizes.max())}"
        )
