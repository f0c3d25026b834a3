"""The feature tensor, int64 [F, 8]: all that a launch must know of each feature; and a batch's offsets by feature.

A feature looks ids up in one table; several features may share a table. Tables of one dtype lie in one flat buffer W,
tables of equal dim side by side, each dim's first table on a 16-byte boundary (`Segment`).

Letters: F features, B samples, N ids, T tables; I [N] ids, feature by feature and sample by sample within a feature;
O [F*B + 1] bag offsets into I; bag (f, b) has the number f * B + b.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ._op import next_power_of_2, tl, triton

# Columns of the feature tensor; kernels read them by these numbers.
BASE = 0  # element of W where the table begins
ROWS = 1  # rows of the table
DIM = 2  # columns of the table
COLUMN = 3  # first output column of the feature
MEAN = 4  # 1 if bags are averaged, 0 if summed
FIRST_ROW = 5  # number of the table's row 0 among all rows of W: the sort key of the update
ORDER = 6  # [j, ORDER] is the j-th feature in the order of launches (see `launch_order`)
ORIGIN = 7  # what `origin_of` says of row 0: by it and the id, rows are rounded
FIELDS = 8
# What three columns are of fused rows, which hold their scales themselves (quantized/fused_lookup.py).
STRIDE = 5  # bytes from row to row
HEAD = 6  # bytes of scale and bias in front of a row's numbers
KIND = 7  # number of the format


class Feature(NamedTuple):
    """One feature of a lookup: where its table lies and how its bags are pooled."""

    base: int
    rows: int
    dim: int
    first_row: int
    mean: bool = False
    # where the table begins in the whole one that it is a part of
    origin: int = 0


class Segment(NamedTuple):
    """Tables of equal `dim` that lie side by side: rows [first_row, end_row) of W begin at element `base`."""

    dim: int
    first_row: int
    end_row: int
    base: int


class Lookup(NamedTuple):
    """A batch and where its ids point: what a lookup reads beside rows, and the update of these rows after it."""

    indices: Tensor  # [N]
    offsets: Tensor  # [F * B + 1]
    per_id_weights: Tensor | None  # [N]
    features: Tensor  # [F, 8]
    segments: Sequence[Segment] = ()  # what an update goes by
    pooling: str = "sum"  # or "mean" or "sequence"; of sums, which bags are averaged stands in their features
    dims: Sequence[int] = ()  # [F] columns of the output; an index of rows asks for none
    ids: Tensor | None = None  # [N] what users sent, where the indices are slots that hold it


def pack_features(
    features: Sequence[Feature], device: torch.device | str = "cpu", *, boundary: int | None = None
) -> Tensor:
    """The int64 tensor [F, 8] that kernels read; columns are laid out in the order given.

    `boundary` is what a table's base must be a multiple of: by default what rows of 2 bytes an element or more need.

    Raises:
        ValueError: a table does not begin on the boundary that 128-bit loads of its rows need.
    """
    columns = column_offsets([f.dim for f in features])
    order = launch_order([f.dim for f in features])
    rows = []
    for j, (f, column) in enumerate(zip(features, columns, strict=False)):
        if f.base % (boundary or row_alignment(f.dim, itemsize=2)):
            raise ValueError(f"feature {j}: a table of dim {f.dim} cannot begin at element {f.base}")
        rows.append([f.base, f.rows, f.dim, column, int(f.mean), f.first_row, order[j], f.origin])
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(features), FIELDS).to(device)


def origin_of(row: int, column: int) -> int:
    """Where a part of a table begins in the whole one, as one number: that of a row further down is so much more."""
    return row + (column << 32)


def flatten_segments(segments: Sequence[Segment]) -> list[int]:
    """Segments as the flat `int[]` that op schemas can carry."""
    return [number for segment in segments for number in segment]


def unflatten_segments(flat: Sequence[int]) -> list[Segment]:
    """The inverse of `flatten_segments`."""
    return list(_segments(tuple(flat)))


@lru_cache(maxsize=512)
def _segments(flat: tuple[int, ...]) -> tuple[Segment, ...]:
    return tuple(Segment(*flat[i : i + 4]) for i in range(0, len(flat), 4))


def same_length(per_id_weights: Tensor | None, indices: Tensor) -> None:
    """ValueError unless there is a weight for each id, or none at all."""
    if per_id_weights is not None and per_id_weights.shape[0] != indices.shape[0]:
        raise ValueError(f"there are {per_id_weights.shape[0]} per-id weights for {indices.shape[0]} ids")


def column_offsets(dims: Sequence[int]) -> list[int]:
    """First output column of each feature, and the total: [0, d0, d0 + d1, ...]."""
    return list(accumulate(dims, initial=0))


def launch_order(dims: Sequence[int]) -> list[int]:
    """Features sorted by power-of-two class of their dim, and by its alignment: a launch serves one class, or both."""
    return sorted(range(len(dims)), key=lambda f: (next_power_of_2(dims[f]), dims[f] & -dims[f]))


def table_rows(flat: Tensor, base: int, rows: int, dim: int) -> Tensor:
    """The table (or tables of one dim, side by side) that begins at element `base`, as a view [rows, dim]."""
    return flat[base : base + rows * dim].view(rows, dim)


def row_alignment(dim: int, itemsize: int) -> int:
    """Elements to which rows of this dim are aligned: the widest power of two up to 16 bytes that divides it."""
    return min(dim & -dim, 16 // itemsize)


def batch_size(offsets: Tensor, features: int) -> int:
    """B of offsets [F*B + 1].

    Raises:
        ValueError: the offsets do not divide among the features.
    """
    bags = offsets.shape[0] - 1
    if features == 0 or bags < 0 or bags % features:
        raise ValueError(f"{bags + 1} offsets do not divide among {features} features: expected F*B + 1")
    return bags // features


def bag_of_position(offsets: Tensor, ids: int) -> Tensor:
    """Bag number of each of the `ids` positions, [N] int64; positions past offsets[-1] get the number of bags.

    No host sync. Offsets must not decrease.
    """
    position = torch.arange(ids, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), position, right=True)


def locate_ids(indices: Tensor, offsets: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bag and feature of each id, [N] int64, and whether the id lies in its table and before the last offset, [N] bool.

    No host sync. Positions past offsets[-1] get the number of bags and the last feature.
    """
    count = features.shape[0]
    batch = batch_size(offsets, count)
    bag = bag_of_position(offsets, indices.shape[0])  # [N]
    f = (bag // max(batch, 1)).clamp(max=count - 1)  # [N]
    return bag, f, (bag < count * batch) & (indices >= 0) & (indices < features[f, ROWS])


def linear_rows(
    ids: Tensor, offsets: Tensor, batch: int, features: Tensor, base: int, dim: int
) -> tuple[Tensor, Tensor]:
    """Row of each id counted from element `base` of W, and whether the id lies in its table; tables all have `dim`.

    ids are those before offsets[-1]. Unlike `locate_ids` it does not search, and waits for a device.
    """
    per_feature = offsets[::batch].diff() if batch else torch.zeros(features.shape[0], dtype=torch.int64, device="cpu")
    valid = (ids >= 0) & (ids < features[:, ROWS].repeat_interleave(per_feature))  # [N]
    return ids + ((features[:, BASE] - base) // dim).repeat_interleave(per_feature), valid


@triton.jit
def feature_of_position(O, position, F, B, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The feature that owns each id position: the last f with O[f*B] <= position. STEPS >= log2(F) + 1."""
    low = position * 0
    high = low + F
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        begins = tl.load(O + middle.to(tl.int64) * B, mask=middle < F, other=0)
        right = (begins <= position) & (middle < high)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def segment_of_position(O, position, S, steps):  # type: ignore[no-untyped-def]
    """`feature_of_position` among S segments, of which each batch has another number. steps >= log2(S) + 1."""
    low = position * 0
    high = low + S
    for _ in range(0, steps):
        middle = (low + high) // 2
        begins = tl.load(O + middle, mask=middle < S, other=0)
        right = (begins <= position) & (middle < high)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low
