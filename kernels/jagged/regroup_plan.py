"""Plans of regroup.py, which columns of which tensors go where, made once and kept. Pure Python.

A piece (tensor, first column, columns) names columns side by side. Runs are how ops read a plan: flat ints, for each
run of columns that the outputs hold: (output, column, columns, then `repeats` pairs: tensor, column), what is added
there in that order; tensor -1 stands for nothing, and is last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

Piece = tuple[int, int, int]


class Runs(NamedTuple):
    """Runs as above, pairs of each run, and the columns of each output."""

    flat: tuple[int, ...]
    repeats: int
    widths: tuple[int, ...]

    def rows(self) -> list[tuple[int, ...]]:
        """The runs one by one."""
        size = 3 + 2 * self.repeats
        return [self.flat[i : i + size] for i in range(0, len(self.flat), size)]


@dataclass(frozen=True)
class RegroupPlan:
    """Inputs of `widths` columns to outputs that each hold `pieces` side by side, neighbours joined.

    The rest follows from these: the same as runs; and how to split each input into `sizes` so that pieces are made of
    whole parts, numbered through all inputs, and the `parts` of each output in order; whether one of them `repeats`.
    """

    widths: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    runs: Runs = field(repr=False)
    sizes: tuple[tuple[int, ...], ...] = field(repr=False)
    parts: tuple[tuple[int, ...], ...] = field(repr=False)
    repeats: bool = field(repr=False)

    @property
    def output_widths(self) -> tuple[int, ...]:
        """Columns of each output."""
        return self.runs.widths

    def transposed(self) -> Runs:
        """The runs of the gradient: outputs that are the inputs here."""
        return transposed(self.runs, self.widths)


def plan_regroup(
    keys: Sequence[Sequence[str]], dims: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]
) -> RegroupPlan:
    """How `regroup` makes one tensor per group of keys from tensors in which `keys` of `dims` lie side by side.

    Keys may be left out, and may be in several groups. A plan is kept for the next call with the same arguments.

    Raises:
        KeyError: a group has a key that no input has.
        ValueError: several inputs have a key of a group (which one is meant?), or keys and dims differ in number.
    """
    return _plan_regroup(tuple(map(tuple, keys)), tuple(map(tuple, dims)), tuple(map(tuple, groups)))


@lru_cache(maxsize=128)
def _plan_regroup(
    keys: tuple[tuple[str, ...], ...], dims: tuple[tuple[int, ...], ...], groups: tuple[tuple[str, ...], ...]
) -> RegroupPlan:
    owners: dict[str, list[Piece]] = {}
    if len(keys) != len(dims):
        raise ValueError(f"keys of {len(keys)} inputs but dims of {len(dims)}")
    for tensor, (names, columns) in enumerate(zip(keys, dims, strict=True)):
        if len(names) != len(columns):
            raise ValueError(f"input {tensor} has {len(names)} keys {_listed(names)} but {len(columns)} dims")
        for name, end, dim in zip(names, accumulate(columns), columns, strict=True):
            first = end - dim
            owners.setdefault(name, []).append((tensor, first, dim))
    for name in (name for group in groups for name in group):
        count = len(owners.get(name, ()))
        if count == 0:
            raise KeyError(f"unknown key {name!r}, keys are {_listed(owners)}")
        if count > 1:
            raise ValueError(f"key {name!r} is in {count} of the KeyedTensors: rename it or leave all but one out")
    return plan_pieces([sum(columns) for columns in dims], [[owners[name][0] for name in group] for group in groups])


def plan_pieces(widths: Sequence[int], pieces: Sequence[Sequence[Piece]]) -> RegroupPlan:
    """How `regroup` makes outputs of `pieces` (tensor, first column, columns) from tensors of `widths` columns.

    Raises:
        ValueError: a piece is not inside its tensor.
    """
    for output, listed in enumerate(pieces):
        for tensor, first, columns in listed:
            if not 0 <= tensor < len(widths):
                raise ValueError(f"output {output}: there is no tensor {tensor}, only {len(widths)}")
            if min(first, columns) < 0 or first + columns > widths[tensor]:
                raise ValueError(
                    f"output {output}: columns {first} to {first + columns} are outside tensor {tensor}, "
                    f"which has {widths[tensor]}"
                )
    joined = tuple(tuple(_joined(listed)) for listed in pieces)
    sizes, parts = _split(widths, joined)
    used = [part for output in parts for part in output]
    return RegroupPlan(tuple(widths), joined, _runs(joined), sizes, parts, len(set(used)) < len(used))


def _runs(pieces: Sequence[Sequence[Piece]]) -> Runs:
    """The runs of each output: one piece a run."""
    flat: list[int] = []
    widths = []
    for output, listed in enumerate(pieces):
        column = 0
        for tensor, first, columns in listed:
            flat += (output, column, columns, tensor, first)
            column += columns
        widths.append(column)
    return Runs(tuple(flat), 1, tuple(widths))


def _split(
    widths: Sequence[int], pieces: Sequence[Sequence[Piece]]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Sizes of the parts of each input, and the parts of each output."""
    cuts = _cuts(widths, [piece for listed in pieces for piece in listed])
    number: dict[tuple[int, int], int] = {}
    parts = 0
    for tensor, borders in enumerate(cuts):
        number |= {(tensor, border): parts + i for i, border in enumerate(borders)}
        parts += len(borders) - 1
    outputs = tuple(
        tuple(part for t, first, n in listed for part in range(number[t, first], number[t, first + n]))
        for listed in pieces
    )
    return tuple(tuple(high - low for low, high in pairwise(borders)) for borders in cuts), outputs


def transposed(runs: Runs, widths: Sequence[int]) -> Runs:
    """The runs of the gradient of tensors of `widths` columns: where each of their columns went, in order."""
    uses = [
        (tensor, first, columns, output, column)
        for output, column, columns, *pairs in runs.rows()
        for tensor, first in zip(pairs[::2], pairs[1::2], strict=True)
        if tensor >= 0
    ]
    cuts = _cuts(widths, [use[:3] for use in uses])
    targets: dict[tuple[int, int], list[tuple[int, int]]] = {
        (tensor, low): [] for tensor, borders in enumerate(cuts) for low in borders[:-1]
    }
    after = {(tensor, low): high for tensor, borders in enumerate(cuts) for low, high in pairwise(borders)}
    for tensor, first, columns, output, column in uses:
        low = first
        while low < first + columns:
            targets[tensor, low].append((output, column + low - first))
            low = after[tensor, low]
    repeats = max([1, *map(len, targets.values())])
    flat: list[int] = []
    for (tensor, low), places in targets.items():
        flat += (tensor, low, after[tensor, low] - low)
        for place in [*places, *[(-1, 0)] * (repeats - len(places))]:
            flat += place
    return Runs(tuple(flat), repeats, tuple(widths))


def _cuts(widths: Sequence[int], pieces: Iterable[Piece]) -> list[list[int]]:
    """Columns of each tensor at which a piece or the tensor begins or ends, in order."""
    cuts = [{0, width} for width in widths]
    for tensor, first, columns in pieces:
        cuts[tensor] |= {first, first + columns}
    return [sorted(borders) for borders in cuts]


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same columns with neighbours of neighbours in one piece, and no piece of no columns."""
    joined: list[Piece] = []
    for tensor, first, columns in pieces:
        if columns == 0:
            continue
        if joined and joined[-1][0] == tensor and joined[-1][1] + joined[-1][2] == first:
            first, columns = joined[-1][1], joined[-1][2] + columns
            joined.pop()
        joined.append((tensor, first, columns))
    return joined


def _listed(keys: Iterable[str]) -> str:
    keys = list(keys)
    shown = ", ".join(map(repr, keys[:10]))
    return f"[{shown}, ... {len(keys)} keys]" if len(keys) > 10 else f"[{shown}]"
