"""Check ids and offsets before anything is read or written through them.

Letters: I [N] ids, O [F*B + 1] bag offsets, FT [F, 8] feature tensor (see features.py), guard [3] int64.
guard[0] is the position of the first id outside its table, guard[1] the first bad offset, guard[2] the first element of
a gradient that is not finite (finite.py); OK where there is none.
Update kernels read the guard before their first write, so a bad batch changes no row.
Bytes moved: N * itemsize(I) + (F*B + 1) * itemsize(O), and one search over F feature boundaries per id.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from shardwise.errors import RefusedIndexError

from .._op import (
    INTERPRETED,
    direct,
    register,
    runs_kernel,
    tl,
    triton,
)
from ..cpu.lookup import ids_are_good
from ..features import (
    FIELDS,
    ROWS,
    batch_size,
    feature_of_position,
    locate_ids,
)

OK = torch.iinfo(torch.int64).max
_INDEX = (torch.int32, torch.int64)

# an id a thread: words that lanes beside one another read are beside one another
_BLOCK = 64 if INTERPRETED else 256


class BoundsCheckMode(IntEnum):
    """The effect of an id outside its table: raise, warn once and count as no id, or silently count as no id.

    Members and values are FBGEMM's. NONE is its name for reads that nobody checks, and V2 another of its kernels; here
    each of them is one of the three (`effect`).
    """

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_IGNORE = 4
    V2_WARNING = 5
    V2_FATAL = 6

    @property
    def effect(self) -> BoundsCheckMode:
        """The one of FATAL, WARNING and IGNORE that it is here."""
        if self is BoundsCheckMode.NONE:
            return BoundsCheckMode.IGNORE
        return BoundsCheckMode[self.name.removeprefix("V2_")]


def new_guard(device: torch.device | str = "cpu") -> Tensor:
    """A guard that reports nothing: int64 [3]."""
    return torch.full((3,), OK, dtype=torch.int64, device=device)


def is_clean(guard: Tensor) -> bool:
    """Whether a guard [3] reports nothing; waits for a GPU."""
    return guard.tolist() == [OK] * 3


def check_ids_ref(
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    guard: Tensor,
    padded: bool = False,
    step_guard: Tensor | None = None,
    fatal: bool = True,
) -> None:
    """Lower guard[0] to the first bad id's position and guard[1] to the first bad offset's; `step_guard` as below."""
    fallen = torch.cat([offsets[:1] != 0, offsets[1:] < offsets[:-1]])  # [F*B + 1]
    ids = indices.shape[0]
    fallen[-1] |= offsets[-1] > ids if padded else offsets[-1] != ids
    guard[1] = torch.minimum(guard[1], first_true(fallen))
    if ids and len(features):
        bag, _, valid = locate_ids(indices, offsets, features)
        # past the last offset no id is looked up
        guard[0] = torch.minimum(guard[0], first_true(~valid & (bag < offsets.shape[0] - 1)))
    if step_guard is not None:
        first = 0 if fatal else 1
        step_guard[first:2] = torch.minimum(step_guard[first:2], guard[first:2])
        guard[2] = step_guard[2]


@triton.jit(do_not_specialize=["N", "B"], do_not_specialize_on_alignment=["I", "O"])
def _check_ids_kernel(  # type: ignore[no-untyped-def]
    I,
    O,
    FT,
    guard,
    step_guard,
    N,
    F,
    B,
    MASKS: tl.constexpr,
    FATAL: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    NONE: tl.constexpr,
    PADDED: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bags = tl.cast(F, tl.int64) * B
    end = tl.load(O + bags)
    live = (position < N) & (position < end)
    index = tl.load(I + position, mask=live, other=0).to(tl.int64)
    f = feature_of_position(O, position, F, B, STEPS)
    rows = tl.load(FT + f.to(tl.int64) * FIELDS + ROWS, mask=live, other=1)
    bad = live & ((index < 0) | (index >= rows))
    first = tl.min(tl.where(bad, position, NONE), 0)
    tl.atomic_min(guard, first, mask=first != NONE)
    if MASKS and FATAL:
        tl.atomic_min(step_guard, first, mask=first != NONE)

    here = position <= bags
    begins = tl.load(O + position, mask=here, other=0).to(tl.int64)
    before = tl.load(O + position - 1, mask=here & (position > 0), other=0).to(tl.int64)
    beyond = (begins > N) if PADDED else (begins != N)
    fallen = (begins < before) | ((position == 0) & (begins != 0)) | ((position == bags) & beyond)
    first = tl.min(tl.where(here & fallen, position, NONE), 0)
    tl.atomic_min(guard + 1, first, mask=first != NONE)
    if MASKS:
        tl.atomic_min(step_guard + 1, first, mask=first != NONE)
        here = tl.program_id(0) == 0
        tl.store(guard + 2, tl.load(step_guard + 2, mask=here, other=0), mask=here)


def ids_pass(indices: Tensor, offsets: Tensor, features: Tensor, *, padded: bool = False) -> bool:
    """Whether `check_ids` is known to find nothing, without an op and a guard; False says nothing. Reads on the CPU.

    Shapes: indices [N], offsets [F*B + 1], features [F, 8].
    """
    if indices.dtype not in _INDEX or offsets.dtype not in _INDEX or not direct(indices, offsets, features):
        return False
    return ids_are_good(indices, offsets, features, padded)


def check_ids(
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    guard: Tensor,
    *,
    names: Sequence[str],
    fatal: bool = True,
    padded: bool = False,
    step_guard: Tensor | None = None,
) -> None:
    """Raise for the first id outside its table or offset out of order, or leave it in `guard` on a GPU.

    Shapes: indices [N] int32/int64, offsets [F*B + 1], features [F, 8], guard [3] int64; `names` describes each
    feature in messages. Offsets end at N, or with `padded` at N or before: ids past their end are nobody's and may be
    anything. On CPU a fault raises here; on CUDA it is left in the guard, which masks every update, and
    `raise_from_guard` raises it later without a sync in this step. There `step_guard` [3], which updates read, is
    lowered as well, by bad ids only if they are `fatal`, and what it says of gradients is copied to guard[2].

    Raises:
        TypeError: ids or offsets are not int32 or int64.
        IndexError: names feature, table, sample, the id and the rows of the table (CPU).
        ValueError: names the first bad offset (CPU).
    """
    if ids_pass(indices, offsets, features, padded=padded):
        return
    require_ids("feature ids", indices)
    require_ids("offsets", offsets)
    batch_size(offsets, len(names))
    # a kernel has no use for names, and hundreds take the dispatcher longer than a launch
    feature_names = [] if indices.is_cuda and runs_kernel(indices) else list(names)
    torch.ops.shardwise.check_ids(indices, offsets, features, guard, feature_names, fatal, padded, step_guard)
    if torch.compiler.is_compiling() and not indices.is_cuda:
        # a compiler leaves out what writes a guard that nobody reads, and with it the check
        torch._assert_async((guard == OK).all(), "ids or offsets are bad")


def require_ids(what: str, tensor: Tensor) -> None:
    """Nothing, if ids or offsets, of any shape, are int32 or int64.

    Raises:
        TypeError: they are not.
    """
    if tensor.dtype not in _INDEX:
        raise TypeError(f"{what} must be int32 or int64, got {str(tensor.dtype).removeprefix('torch.')}")


def _check_ids(
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    guard: Tensor,
    names: list[str],
    fatal: bool,
    padded: bool,
    step_guard: Tensor | None = None,
) -> None:
    if runs_kernel(indices):
        count = features.shape[0]
        batch = batch_size(offsets, count)
        work = max(indices.shape[0], offsets.shape[0])
        grid = (triton.cdiv(work, _BLOCK),)
        _check_ids_kernel[grid](
            indices.contiguous(), offsets.contiguous(), features, guard, guard if step_guard is None else step_guard,
            indices.shape[0], count, batch, step_guard is not None, fatal,
            _BLOCK, count.bit_length() + 1, FIELDS, ROWS, OK, padded, num_warps=8,
        )  # fmt: skip
    elif indices.is_cuda:
        # it raises at once, so nobody would clear a step's guard
        check_ids_ref(indices, offsets, features, guard, padded)
    elif ids_are_good(indices, offsets, features, padded):
        return
    else:
        # raised at once, so it need not go through a guard that other threads may be checking into
        guard = new_guard()
        check_ids_ref(indices, offsets, features, guard, padded)
    if not indices.is_cuda or not runs_kernel(indices):
        # on CPU this reads host memory; on CUDA without triton it is the sync that the slow path costs
        raise_from_guard(guard, indices, offsets, features, names, fatal=fatal)


def raise_from_guard(
    guard: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    names: Sequence[str],
    *,
    fatal: bool = True,
    numbers: Sequence[int] | None = None,
) -> None:
    """Turn what `guard` holds into an exception and reset it; `fatal=False` warns about ids instead.

    `numbers` is what it holds, where that was read already. Shapes as in `check_ids`: guard [3], indices [N], offsets
    [F*B + 1], features [F, 8].

    Raises:
        IndexError, ValueError: as `check_ids` describes.
    """
    # host sync on CUDA: the caller asked for the error now
    bad_id, bad_offset, _ = guard.tolist() if numbers is None else numbers
    if bad_id == OK and bad_offset == OK:
        return
    guard.fill_(OK)
    if bad_offset != OK:
        raise ValueError(_describe_offset(bad_offset, indices, offsets, names))
    message = describe_id(bad_id, indices, offsets, features, names)
    if fatal:
        raise RefusedIndexError(message)
    warnings.warn(f"{message}; it counts as no id", stacklevel=3)


def describe_id(position: int, indices: Tensor, offsets: Tensor, features: Tensor, names: Sequence[str]) -> str:
    """Feature, table, sample, id and rows of the id at `position`, for people."""
    batch = batch_size(offsets, len(names))
    bag = int(torch.searchsorted(offsets[1:].contiguous(), position, right=True))
    f, sample = divmod(bag, batch)
    rows = int(features[f, ROWS])
    return f"{names[f]}, sample {sample}: id {int(indices[position])} is outside [0, {rows})"


def _describe_offset(position: int, indices: Tensor, offsets: Tensor, names: Sequence[str]) -> str:
    ids, batch, value = indices.shape[0], batch_size(offsets, len(names)), int(offsets[position])
    if value and position == 0:
        return f"offsets must start at 0, got {value}"
    if batch == 0:
        return f"offsets hold no samples but there are {ids} ids"
    name, sample = names[(position - 1) // batch], (position - 1) % batch
    before = int(offsets[position - 1])
    if value < before:
        return f"{name}, sample {sample}: offsets must not decrease, got {before} and then {value}"
    padding = f"; if the rest is padding, say so: KeyedJaggedTensor(..., capacity={ids})" if value < ids else ""
    return f"offsets end at {value} but there are {ids} ids (last feature: {name}){padding}"


def first_true(mask: Tensor) -> Tensor:
    position = torch.arange(mask.shape[0], device=mask.device)
    return torch.where(mask, position, OK).min()


register(
    "check_ids(Tensor indices, Tensor offsets, Tensor features, Tensor(a!) guard, str[] names, bool fatal,"
    " bool padded, Tensor(b!)? step_guard=None) -> ()",
    _check_ids,
    lambda *args, **kwargs: None,
)
