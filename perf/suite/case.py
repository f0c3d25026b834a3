"""A case of the regression suite: what is called, what shows that its result is right, and the bytes it declares.

A case is made for a `Setting` and gives a `Ready`, which the runner (perf/suite/measure.py) checks first and then
times: ours and every peer in turn, one call each, so that what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise._names import did_you_mean, did_you_mean_of

Call = Callable[[], object]
# seconds (or bytes, where the case says so) of each of so many rounds, by who: "shardwise" and the peers
Series = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Fresh:
    """A call on a state of its own, which is made anew for each call and outside of its time."""

    make: Callable[[], Call]

    def __call__(self) -> object:
        return self.make()()


def with_states(calls: Iterable[Call]) -> list[Call]:
    """The calls with their states made."""
    return [call.make() if isinstance(call, Fresh) else call for call in calls]


OURS = "shardwise"
# torch.nn.EmbeddingBag, torch.optim, plain torch: always there; the others where they are importable
PEERS = ("torch", "fbgemm", "torchrec")
DEVICES = ("cpu", "cuda")
# cpu: in under 10 minutes on two cores; cuda: in 5 on a GPU; full: what memory allows; ebc: TorchRec's own benchmark;
# operations: each of the jagged types and ops by itself at six sizes
SUITES = ("cpu", "cuda", "full", "ebc", "operations")


@dataclass(frozen=True)
class Setting:
    """Where and how large a case is made; `small` is a proof that it runs, at sizes that Triton's interpreter bears."""

    device: str = "cpu"
    small: bool = False
    peers: frozenset[str] = frozenset({"torch"})
    memory_bytes: int = 8 << 30


@dataclass(frozen=True)
class Ready:
    """A case set up.

    Attributes:
        calls: one call for each of a few distinct inputs, taken in turn.
        check: raises AssertionError unless ours gives what the reference and the peers give. It runs before any timing.
        bytes_moved: bytes that a call declares, the mean over the inputs; None where bytes are not what bounds it.
        floor: which of "ids" (every id moves its row) and "distinct rows" the bytes count, and what else is left out.
        peers: the same of each peer that the setting names and that can do this.
        graph: a CUDA graph can record the calls.
        rounds: measures so many rounds by itself instead of `calls` and `peers` (other processes, sizes of files).
        close: frees what has to be freed.
        notes: facts for the record, e.g. by how much a table was cut to fit the memory.
    """

    calls: Sequence[Call] = ()
    check: Call = lambda: None
    bytes_moved: float | None = None
    floor: str = ""
    peers: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    graph: bool = True
    rounds: Callable[[int], Series] | None = None
    close: Call = lambda: None
    notes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One line of the suite.

    Attributes:
        name: unique, the op, then its workload and what is special: "pooled_lookup, fbgemm default".
        group: what it belongs to in the report: "lookup", "update", "rows", "quantized", "jagged", "keyed", "module",
            "sharded", "planner", "package", "operations".
        make: sets it up.
        suites: which of SUITES it belongs to.
        devices: where it can run.
        unit: "s", or "bytes" of a size.
        slow: a call takes so long that few rounds have to do.
    """

    name: str
    group: str
    make: Callable[[Setting], Ready]
    suites: frozenset[str] = frozenset({"cpu", "cuda", "full"})
    devices: frozenset[str] = frozenset(DEVICES)
    unit: str = "s"
    slow: bool = False


def chosen(cases: Sequence[Case], suites: Sequence[str], device: str, only: str = "") -> list[Case]:
    """The cases of any of these suites that run on the device and whose group and name hold the expression.

    Raises:
        ValueError: an unknown suite, a bad expression, or no case is left.
    """
    unknown = [suite for suite in suites if suite not in SUITES]
    if unknown:
        near = did_you_mean(unknown[0], SUITES) or f"; there are {', '.join(SUITES)}"
        raise ValueError(f"there is no suite {unknown[0]!r}{near}")
    try:
        wanted = re.compile(only)
    except re.error as error:
        raise ValueError(f"{only!r} is no regular expression: {error}") from None
    there = [case for case in cases if case.suites & {*suites} and device in case.devices]
    matching = [case for case in there if wanted.search(f"{case.group}: {case.name}")]
    if not matching:
        having = f" has {only!r} in its group and name" if only else " is there"
        near = did_you_mean_of(only, (f"{case.group}: {case.name}" for case in there))
        raise ValueError(f"of the suites {', '.join(suites)} no case for {device}{having}{near}")
    return matching


def in_a_line(error: Exception) -> str:
    """The kind of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
