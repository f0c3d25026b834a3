"""Advice when tables do not fit: where and by how much, what weighs most, and changes that were tried and fit.

A suggestion is made only after planning with it. They come in the order of how much they change: a constraint, one
table's dtype, what is reserved, the optimizer, several tables' dtype, the batch, more devices, another card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from shardwise.embeddings.config import DataType

from ..constants_measured import OFFERED
from ..constraints import constraint_of
from ..errors import PlannerError, PlannerErrorType
from ..search.problem import DoesNotFitError, Problem
from ..tables import Table
from ..topology import CARD_HBM_GIB, GIB
from . import whatif
from .planned import Request

# how many times a search is asked, in all and for one kind of change, and how many tables are named
MOST_TRIES, TRIES_OF_A_KIND, HEAVIEST = 32, 6, 5
# optimizers that keep a number or more for each element
_ELEMENTWISE = ("Adam", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "Adagrad", "RMSprop", "LarsSGD")


@dataclass(frozen=True, eq=False)
class Suggestion:
    """A change after which there is a plan.

    Args:
        kind: "constraint", "dtype", "reservation", "optimizer", "batch_size", "devices" or "card".
        text: the change in words.
        request: what was asked with that change: `plan_request(request)` has a plan.
    """

    kind: str
    text: str
    request: Request


@dataclass(frozen=True)
class Overload:
    """By how many bytes a rank of the nearest plan is over its limit."""

    rank: int
    memory: str
    over_bytes: int
    used_bytes: int
    limit_bytes: int


class NoRoomError(PlannerError):
    """No plan stays within memory.

    Args:
        overloads: of the ranks of the nearest plan, the worst first.
        heaviest: path and bytes, optimizer state included, of tables that weigh most.
        suggestions: changes that were planned with, and fit.
    """

    def __init__(
        self,
        message: str,
        error_type: PlannerErrorType,
        overloads: Sequence[Overload],
        heaviest: Sequence[tuple[str, int]],
        suggestions: Sequence[Suggestion],
    ) -> None:
        super().__init__(message, error_type)
        self.overloads, self.heaviest, self.suggestions = tuple(overloads), tuple(heaviest), tuple(suggestions)

    def as_dict(self) -> dict[str, Any]:
        """Plain data that json can write."""
        return {
            "error": str(self),
            "error_type": self.error_type.value,
            "overloads": [asdict(overload) for overload in self.overloads],
            "heaviest": [{"table": path, "bytes": weight} for path, weight in self.heaviest],
            "suggestions": [{"kind": suggestion.kind, "text": suggestion.text} for suggestion in self.suggestions],
        }


def no_room(
    request: Request, error: DoesNotFitError, free: Problem, has_plan: Callable[[Request], bool]
) -> NoRoomError:
    """The error that explains why a request has no plan, and what would help.

    Args:
        free: the problem of the request without its constraints, each table an item.
        has_plan: whether a request has a plan.
    """
    tries = _Tries(has_plan)
    weighed = _weigh(request, free)
    strict = bool(request.constraints) and tries.fits(whatif.without_constraints(request))
    suggestions = list(_suggestions(request, weighed, tries))
    overloads = _overloads(error, free)
    kind = PlannerErrorType.STRICT_CONSTRAINTS if strict else PlannerErrorType.INSUFFICIENT_STORAGE
    heaviest = [(table.path, weighed.bytes_of[table.path]) for table in weighed.tables]
    text = _text(request, error, strict, overloads, heaviest, weighed, suggestions)
    return NoRoomError(text, kind, overloads, heaviest, suggestions)


@dataclass(frozen=True)
class _Weighed:
    """Tables, the heaviest first, with the bytes of each as it weighs least, its optimizer's state included.

    `room_bytes` of all ranks and `each_bytes` of one count the memory that tables can lie in.
    """

    tables: tuple[Table, ...]
    bytes_of: dict[str, int]
    room_bytes: int
    each_bytes: int

    @property
    def need_bytes(self) -> int:
        return sum(self.bytes_of.values())

    @property
    def short_bytes(self) -> int:
        """By how much the room of all ranks is too small."""
        return self.need_bytes - self.room_bytes


def _weigh(request: Request, free: Problem) -> _Weighed:
    bytes_of = {
        item.names[0]: min(int(choice.hbm.sum() + choice.ddr.sum()) for choice in item.choices) for item in free.items
    }
    # tables of a GPU leave the memory of the host alone unless a kernel can use it
    memories = [
        memory
        for memory, used in ((free.hbm, "hbm"), (free.ddr, "ddr"))
        if any(getattr(choice, used).any() for item in free.items for choice in item.choices)
    ]
    here = [table for table in request.tables if table.path in bytes_of]
    heavy = sorted(here, key=lambda table: (-bytes_of[table.path], table.path))
    room, each = (
        sum(int(pick) for pick in picks) for picks in ([m.sum() for m in memories], [m[-1] for m in memories])
    )
    return _Weighed(tuple(heavy), bytes_of, room, each)


class _Tries:
    """Asks whether there is a plan, up to a number of times."""

    def __init__(self, has_plan: Callable[[Request], bool]) -> None:
        self._has_plan, self._left = has_plan, MOST_TRIES

    def fits(self, request: Request) -> bool:
        """Whether there is a plan; False too when the tries are used up."""
        if self._left <= 0:
            return False
        self._left -= 1
        try:
            return self._has_plan(request)
        except PlannerError:
            # a laxer constraint may contradict another one
            return False


def _suggestions(request: Request, weighed: _Weighed, tries: _Tries) -> Iterator[Suggestion]:
    heavy = weighed.tables
    suggested: list[str] = []
    for kind, candidates in (
        ("constraint", _laxer(request, heavy)),
        ("dtype", _one_half(request, weighed)),
        ("reservation", _less_reserved(request)),
        ("optimizer", _lighter_state(request, heavy)),
        ("dtype", _more_halves(request, weighed)),
        ("batch_size", _smaller_batches(request)),
        ("devices", _more_devices(request, weighed)),
        ("card", _bigger_cards(request)),
    ):
        for count, (text, make) in enumerate(candidates):
            # half the bytes of one table are less of a change than those of several
            if count >= TRIES_OF_A_KIND or kind in suggested:
                break
            try:
                changed = make()
            except PlannerError:
                # a cost model that cannot be asked about other machines
                break
            if tries.fits(changed):
                suggested.append(kind)
                yield Suggestion(kind, text, changed)
                break


_Candidates = Iterator[tuple[str, Callable[[], Request]]]


def _laxer(request: Request, heavy: Sequence[Table]) -> _Candidates:
    """One setting less in the constraint of one table, the heaviest first."""
    for table in heavy:
        name, constraint = table.name, constraint_of(request.constraints, table.name)
        if constraint is None:
            continue
        for kind in ("column_wise", "row_wise", "table_wise"):
            if constraint.sharding_types is not None and kind not in constraint.sharding_types:
                types = [*constraint.sharding_types, kind]
                yield f"allow {kind} for {name!r}", _bind(whatif.with_constraint, request, name, sharding_types=types)
        for field in ("same_rank", "ranks", "not_on"):
            if getattr(constraint, field):
                yield f"no {field} for {name!r}", _bind(whatif.with_constraint, request, name, **{field: None})


def _one_half(request: Request, weighed: _Weighed) -> _Candidates:
    """Half the bytes for one table, the lightest of those that could be enough first."""
    wide = [table for table in weighed.tables if table.data_type == DataType.FP32]
    enough = [table for table in wide if weighed.bytes_of[table.path] // 2 >= weighed.short_bytes]
    # the heaviest is the likeliest to be enough, so it has its try
    for table in [*enough[1:TRIES_OF_A_KIND][::-1], *enough[:1]]:
        yield _half(request, [table])


def _more_halves(request: Request, weighed: _Weighed) -> _Candidates:
    """Half the bytes for as few of the heaviest tables as could be enough, then for more."""
    wide = [table for table in weighed.tables if table.data_type == DataType.FP32]
    halves = accumulate(weighed.bytes_of[table.path] // 2 for table in wide)
    enough = next((count for count, saved in enumerate(halves, 1) if saved >= weighed.short_bytes), len(wide))
    for count in dict.fromkeys((max(2, enough), enough + 1, enough + 2, 2 * enough)):
        if 2 <= count < len(wide):
            yield _half(request, wide[:count])
    if len(wide) > 1:
        everywhere = _bind(whatif.with_data_type, request, DataType.FP16, names=[table.name for table in wide])
        yield "fp16 for all tables", everywhere


def _half(request: Request, tables: Sequence[Table]) -> tuple[str, Callable[[], Request]]:
    names = [table.name for table in tables]
    shown = names if len(names) <= HEAVIEST else names[:HEAVIEST]
    more = f" and the next {len(names) - len(shown)} by weight" if len(shown) < len(names) else ""
    text = f"fp16 for {', '.join(map(repr, shown))}{more}"
    return text, _bind(whatif.with_data_type, request, DataType.FP16, names=names)


def _less_reserved(request: Request) -> _Candidates:
    if not request.reserved:
        return
    whole = [left + kept for left, kept in zip(request.topology.hbm, request.reserved, strict=True)]
    most = max(kept / has for kept, has in zip(request.reserved, whole, strict=True) if has)
    for part in (0.75, 0.5, 0.25, 0.0):
        text = f"reserve {100 * most * part:.3g} % of each device's memory instead of {100 * most:.3g} %"
        yield text, _bind(whatif.with_reserved, request, part)


def _lighter_state(request: Request, heavy: Sequence[Table]) -> _Candidates:
    """One number a row instead of one or more an element: for the heaviest table, then for all."""
    stateful = [table for table in heavy if table.optimizer in _ELEMENTWISE]
    for tables in (stateful[:1], stateful):
        if tables:
            names = [table.name for table in tables]
            who = "all tables" if len(tables) > 1 else repr(names[0])
            text = f"RowWiseAdagrad instead of {tables[0].optimizer} for {who}"
            yield text, _bind(whatif.with_optimizer, request, "RowWiseAdagrad", names=names)


def _smaller_batches(request: Request) -> _Candidates:
    for part in (2, 4, 8):
        smaller = request.batch_size // part
        if smaller:
            text = f"batches of {smaller} instead of {request.batch_size} samples a rank"
            yield text, _bind(whatif.with_batch_size, request, smaller)


def _more_devices(request: Request, weighed: _Weighed) -> _Candidates:
    """More ranks on one host, more hosts of as many ranks where there are several: as few as bytes allow, then more."""
    world, local = request.topology.world_size, request.topology.local_world_size
    step, what = (local, "host") if world > local else (1, "device")
    least = max(1, -(-weighed.short_bytes // max(1, weighed.each_bytes * step)))
    for more in dict.fromkeys((least, least + 1, least + 2, 2 * least + 2, 4 * least + 4)):
        size = world + more * step
        text = f"{'one' if more == 1 else more} more {what}{'s' * (more > 1)} ({size} ranks instead of {world})"
        yield text, _bind(whatif.with_world, request, size)


def _bigger_cards(request: Request) -> _Candidates:
    if request.topology.compute_device != "cuda":
        return
    reserved = request.reserved or (0,) * request.topology.world_size
    has = max(left + kept for left, kept in zip(request.topology.hbm, reserved, strict=True))
    by_size: dict[int, list[str]] = {}
    for card in OFFERED:
        # one by PCIe has the memory of the other that is named
        if not card.endswith("-pcie"):
            by_size.setdefault(CARD_HBM_GIB[card], []).append(card)
    for gib, cards in sorted(by_size.items()):
        if gib * GIB > has:
            text = f"cards of {gib} GiB ({' or '.join(cards)}) instead of {has / GIB:.4g} GiB"
            yield text, _bind(whatif.with_card, request, cards[0])


def _bind(change: Callable[..., Request], *args: object, **more: object) -> Callable[[], Request]:
    return lambda: change(*args, **more)


def _overloads(error: DoesNotFitError, problem: Problem) -> list[Overload]:
    if error.over is None:
        return []
    overloads = []
    for memory, over, limit in zip(("HBM", "DDR"), error.over, (problem.hbm, problem.ddr), strict=True):
        for rank in np.flatnonzero(over).tolist():
            more, room = int(over[rank]), int(limit[rank])
            overloads.append(Overload(rank, memory, more, room + more, room))
    return sorted(overloads, key=lambda overload: (-overload.over_bytes, overload.rank, overload.memory))


def _text(
    request: Request,
    error: DoesNotFitError,
    strict: bool,
    overloads: Sequence[Overload],
    heaviest: Sequence[tuple[str, int]],
    weighed: _Weighed,
    suggestions: Sequence[Suggestion],
) -> str:
    # programs written for TorchRec look for these words
    why = "the strict constraints" if strict else "insufficient storage"
    lines = [f"Unable to find a plan for this model because of {why}."]
    if not error.proven:
        lines.append("No plan within memory was found; that there is none is not proven.")
    if overloads:
        worst = overloads[0]
        lines.append(
            f"The nearest plan is {_gib(worst.over_bytes)} over on rank {worst.rank}"
            f" ({_gib(worst.used_bytes)} of {_gib(worst.limit_bytes)} {worst.memory})"
        )
        if len(overloads) > 1:
            others = [f"{_gib(overload.over_bytes)} on rank {overload.rank}" for overload in overloads[1:HEAVIEST]]
            rest = f" and {len(overloads) - HEAVIEST} ranks more" if len(overloads) > HEAVIEST else ""
            lines[-1] += f", {', '.join(others)}{rest}"
        lines[-1] += "."
    world = request.topology.world_size
    lines.append(
        f"The tables need at least {_gib(weighed.need_bytes)} with optimizer states; {world} rank{'s' * (world > 1)}"
        f" together have {_gib(weighed.room_bytes)} for them."
    )
    lines.append(f"Heaviest: {', '.join(f'{path!r} {_gib(weight)}' for path, weight in heaviest[:HEAVIEST])}.")
    if suggestions:
        lines.append("Each of these would fit (planned with):")
        lines += [f"  {number}) {suggestion.text}" for number, suggestion in enumerate(suggestions, 1)]
    else:
        lines.append("No single change of dtype, optimizer, constraints, batch, devices or card that was tried fits.")
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / GIB:.4g} GiB"
