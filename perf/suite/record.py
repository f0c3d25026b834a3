"""Records of measured cases, and what follows from them: medians, quartiles, ratios to peers, bandwidth, the floor.

A record has laps, a lap has rounds, and in a round each side has a turn. A turn that lost a core to another process is
disturbed; it is left out where enough others remain, lap by lap.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.perf.suite.case import OURS, PEERS

# what the same rounds time beside the sides, of work that no change of the library touches
YARDSTICKS = ("python", "memory")
# appended to a side's name: its calls as replays of CUDA graphs
GRAPH = ", graph"
# of a lap's turns so many, or half of them, have to be undisturbed for the others to be left out
CALM = 3


@dataclass(frozen=True)
class Lap:
    """One lap of a case.

    Attributes:
        times: seconds (bytes of a size) of each round by who; None where one had no turn.
        disturbed: rounds, by who, whose turn lost a core.
        copy_gb_s: bandwidth of a copy, reads and writes, measured at the lap's begin.
        notes: by name, what could not be measured and why.
    """

    times: Mapping[str, Sequence[float | None]]
    disturbed: Mapping[str, Sequence[int]] = field(default_factory=dict)
    copy_gb_s: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A case that was measured; names as in perf/suite/case.py."""

    name: str
    group: str
    laps: tuple[Lap, ...]
    unit: str = "s"
    device: str = "cpu"
    bytes_moved: float | None = None
    floor: str = ""
    notes: Mapping[str, object] = field(default_factory=dict)


def quantile(values: Sequence[float], part: float) -> float:
    """Of at least one value, between neighbours in proportion."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def relative_iqr(values: Sequence[float]) -> float:
    """The range between the quartiles, over the median."""
    middle = statistics.median(values)
    return (quantile(values, 0.75) - quantile(values, 0.25)) / middle if middle else 0.0


def lap_values(lap: Lap, who: str = OURS, over: str | None = None) -> tuple[list[float], bool]:
    """Times of a side's turns, or its ratios within a round to those of another; and whether they are calm ones."""
    times = lap.times.get(who, ())
    other_times = lap.times.get(over, ()) if over is not None else [1.0] * len(times)
    disturbed = {*lap.disturbed.get(who, ()), *(lap.disturbed.get(over, ()) if over is not None else ())}
    numbered = [
        (number, own / other)
        for number, (own, other) in enumerate(zip(times, other_times, strict=False))
        if own is not None and other is not None and other > 0
    ]
    calm = [value for number, value in numbered if number not in disturbed]
    if calm and len(calm) >= min(CALM, -(-len(numbered) // 2)):
        return calm, True
    return [value for _, value in numbered], False


def values(record: Record, who: str = OURS, over: str | None = None) -> list[float]:
    """The same of all laps that are calm, or of all laps where none is."""
    laps = [lap_values(lap, who, over) for lap in record.laps]
    some_calm = any(calm for _, calm in laps)
    return [value for times, calm in laps for value in times if calm or not some_calm]


def by_lap(
    record: Record, over: str | None = None, of: Callable[[Sequence[float]], float] = statistics.median
) -> list[float]:
    """A statistic of ours for each lap that is calm, or for all laps where none is."""
    laps = [pair for pair in (lap_values(lap, OURS, over) for lap in record.laps) if pair[0]]
    some_calm = any(calm for _, calm in laps)
    return [of(times) for times, calm in laps if calm or not some_calm]


def calm_laps(record: Record) -> int:
    """Laps of which enough turns of ours kept their cores."""
    return sum(calm for _, calm in (lap_values(lap) for lap in record.laps))


def sides(record: Record) -> list[str]:
    """Who was measured, ours first, yardsticks left out."""
    return [who for who in dict.fromkeys(who for lap in record.laps for who in lap.times) if who not in YARDSTICKS]


def peers(record: Record) -> list[str]:
    """The peers that were measured, in the order of PEERS."""
    present = sides(record)
    return [peer for peer in PEERS if peer in present]


def median(record: Record, who: str = OURS) -> float:
    """The median of a side."""
    return statistics.median(values(record, who))


def split(records: Iterable[Record]) -> list[Record]:
    """Each record without the replays of CUDA graphs, and these behind it as one of their own.

    A peer that could not be captured is beside the replays with its eager calls, which a note says.
    """
    parts = []
    for record in records:
        uncaptured = {
            who.removesuffix(GRAPH): why for lap in record.laps for who, why in lap.notes.items() if who.endswith(GRAPH)
        }
        eager = [who for lap in record.laps for who in lap.times if not who.endswith(GRAPH)]
        notes = {**record.notes, **({"no graph": uncaptured[OURS]} if OURS in uncaptured else {})}
        parts.append(replace(record, laps=_of(record, {who: who for who in eager}), notes=notes))
        if values(record, OURS + GRAPH):
            names = {who: who + GRAPH if values(record, who + GRAPH) else who for who in eager}
            notes = {f"no graph of {who}": uncaptured.get(who, "none") for who in PEERS if names.get(who) == who}
            parts.append(replace(record, name=record.name + GRAPH, laps=_of(record, names), notes=notes))
    return parts


def _of(record: Record, names: Mapping[str, str]) -> tuple[Lap, ...]:
    """The laps with some of the sides under other names: name -> the name they have."""
    return tuple(
        replace(
            lap,
            times={name: lap.times[who] for name, who in names.items() if who in lap.times},
            disturbed={name: lap.disturbed[who] for name, who in names.items() if who in lap.disturbed},
        )
        for lap in record.laps
    )


def best_median(record: Record, who: str = OURS) -> float:
    """The median of a side's eager calls or of its graph's replays, whichever is less."""
    return min(median(record, name) for name in (who, who + GRAPH) if values(record, name))


def ratio(record: Record, peer: str) -> tuple[float, float, float] | None:
    """Quartiles of ours over theirs within a round: first, median, third."""
    ratios = values(record, OURS, peer)
    if not ratios:
        return None
    return quantile(ratios, 0.25), statistics.median(ratios), quantile(ratios, 0.75)


def copy_gb_s(record: Record) -> float | None:
    """The copy bandwidth of the record's laps."""
    bandwidths = [lap.copy_gb_s for lap in record.laps if lap.copy_gb_s]
    return statistics.median(bandwidths) if bandwidths else None


def floor_s(record: Record) -> float | None:
    """Seconds that the declared bytes take at the bandwidth of a copy."""
    copy = copy_gb_s(record)
    return record.bytes_moved / copy / 1e9 if record.bytes_moved and copy else None


def gb_per_s(record: Record) -> float | None:
    """Declared bytes over the median, 1e9 bytes a second."""
    return record.bytes_moved / best_median(record) / 1e9 if record.bytes_moved else None


def percent_of_copy(record: Record) -> float | None:
    """The same as a part of the copy bandwidth."""
    moved, copy = gb_per_s(record), copy_gb_s(record)
    return 100 * moved / copy if moved and copy else None
