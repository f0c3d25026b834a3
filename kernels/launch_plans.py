"""Launch plans: all that follows from features' widths alone, computed once, as a step asks for the same ones again.

A plan is a pure function of widths and sizes of elements and holds no tensor. Letters as in features.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from ._op import next_power_of_2
from .features import column_offsets, launch_order, row_alignment

# plans that are kept of each kind: more than the collections of a process have groups
PLANS = 512


class Launch(NamedTuple):
    """Features that one launch serves: so many `features` from the `first` in the order of launches on."""

    first: int
    features: int
    # the class of their widths: as many units as fit in a power of two
    width: int
    # units to which all their rows are aligned, in tables that begin on 16 bytes
    align: int
    # elements to which their columns are aligned, in a matrix of all columns that begins on 16 bytes
    column_align: int
    # elements, up to 16, that divide all their widths
    dim_align: int


class Plan(NamedTuple):
    """Columns of all features together, and the launches."""

    columns: int
    launches: tuple[Launch, ...]


@lru_cache(maxsize=PLANS)
def lookup_plan(dims: tuple[int, ...], itemsize: int, out_itemsize: int) -> Plan:
    """Launches of a pooled lookup: one for each class of widths."""
    return plan_launches(
        dims, lambda f: next_power_of_2(dims[f]), lambda f: row_alignment(dims[f], itemsize), out_itemsize
    )


@lru_cache(maxsize=PLANS)
def gradient_plan(dims: tuple[int, ...], itemsize: int, grad_itemsize: int) -> Plan:
    """Launches of a gradient by per-id weights: one for each class of widths and alignment.

    The alignment decides in which order the columns of a row are added.
    """

    def class_of(f: int) -> tuple[int, int]:
        return next_power_of_2(dims[f]), row_alignment(dims[f], itemsize)

    return plan_launches(dims, class_of, lambda f: class_of(f)[1], grad_itemsize)


@lru_cache(maxsize=PLANS)
def source_alignment(dims: tuple[int, ...], dim: int) -> int:
    """Elements, up to 4, to which the gradient rows of features of this dim are aligned, other dims beside them."""
    columns = column_offsets(dims)
    starts = [columns[f] for f, other in enumerate(dims) if other == dim and columns[f]]
    return min(row_alignment(n, 4) for n in (dim, columns[-1], *starts))


def plan_launches(
    dims: tuple[int, ...], class_of: Callable[[int], Any], align_of: Callable[[int], int], out_itemsize: int
) -> Plan:
    """Neighbours in the order of launches of one class, which is a width or begins with one, share a launch."""
    columns, launches, first = column_offsets(dims), [], 0
    for kind, members in groupby(launch_order(dims), key=class_of):
        fs = list(members)
        starts = (columns[-1], *(columns[f] for f in fs if columns[f]))
        launches.append(
            Launch(
                first, len(fs), kind[0] if isinstance(kind, tuple) else kind, min(map(align_of, fs)),
                min(row_alignment(n, out_itemsize) for n in starts), min(row_alignment(dims[f], 1) for f in fs),
            )
        )  # fmt: skip
        first += len(fs)
    return Plan(columns[-1], tuple(launches))
