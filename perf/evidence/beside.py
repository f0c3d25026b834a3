"""Run one operation on two libraries: do they give the same, and how do their times compare?

A Case names the operation once for both; `compare` runs it on two libraries and measures a Row. Each timed call gets a
state of its own, made untimed, because both libraries keep what they computed.

Sizes: keys x batch, the batch being bags of each key.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..suite.timing import collector_off

# a batch of calls takes about so long, making their states at most so long, and a size of a case about so long (s)
CALLS_S, STATES_S, CASE_S = 1e-3, 10e-3, 0.25
MOST_CALLS, ROUNDS, MOST_ROUNDS, WARM_UP = 100, 7, 25, 2
# calls that take so long (s) are repeated least often
SLOW_S, SLOW_ROUNDS = 0.2, 3


class Size(NamedTuple):
    """Keys and bags of each key."""

    keys: int
    batch: int

    def __str__(self) -> str:
        return f"{self.keys} x {self.batch}"


SIZES = [Size(keys, batch) for keys in (1, 26, 856) for batch in (64, 8192)]


class Library:
    """Names of several modules in one place; each is looked up once, so that the look-up is not timed."""

    def __init__(self, label: str, modules: Sequence[Any], *, peer: bool = False) -> None:
        self.label, self.modules, self.peer = label, modules, peer

    def __getattr__(self, name: str) -> Any:
        for module in self.__dict__.get("modules", ()):
            try:
                found = getattr(module, name)
            except (AttributeError, ImportError):
                continue
            setattr(self, name, found)
            return found
        raise AttributeError(f"{self.__dict__.get('label')} has no attribute {name}")


def missing(error: Exception) -> bool:
    """Whether this is what Python raises for a name or an argument that is not there."""
    if isinstance(error, (AttributeError, ImportError, NotImplementedError)):
        return True
    return isinstance(error, TypeError) and "unexpected keyword argument" in str(error)


def _everywhere(size: Size) -> bool:
    return True


def _itself(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Case:
    """One operation for both libraries.

    `make(lib, size)` prepares a state that nothing was done with yet, `call(lib, state)` is the operation, `read` takes
    from its result what is compared, at the sizes that `fits` accepts. Floats may differ by `tolerance` of the largest.
    """

    name: str
    make: Callable[[Any, Size], Any]
    call: Callable[[Any, Any], Any]
    read: Callable[[Any], Any] = _itself
    fits: Callable[[Size], bool] = _everywhere
    tolerance: float = 0.0
    needs_cuda: bool = False


@dataclass(frozen=True)
class Row:
    """What one case gave at one size. `found` is "" where the results are equal; times are medians, in us."""

    case: str
    size: Size
    found: str = ""
    ours_us: float = math.nan
    theirs_us: float = math.nan
    ratios: tuple[float, float, float] = (math.nan, math.nan, math.nan)

    @property
    def ratio(self) -> float:
        """Median of our time over theirs."""
        return self.ratios[1]

    @property
    def timed(self) -> bool:
        return not math.isnan(self.ratio)


class Raised(NamedTuple):
    """An exception in the place of a result."""

    error: Exception

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {' '.join(str(self.error).split())[:120]}"


def compare(case: Case, ours: Library, theirs: Library, size: Size) -> Row:
    """Run the case on both, compare, and time both unless one of them raises."""
    mine, their = (_run(case, lib, size) for lib in (ours, theirs))
    if isinstance(mine, Raised) and missing(mine.error):
        return Row(case.name, size, f"missing: {mine}")
    if isinstance(mine, Raised) and isinstance(their, Raised):
        return Row(case.name, size)
    if isinstance(mine, Raised) or isinstance(their, Raised):
        who, raised = (ours, mine) if isinstance(mine, Raised) else (theirs, their)
        return Row(case.name, size, f"only {who.label} raises {raised}")
    found = difference(mine, their, case.tolerance)
    del mine, their
    times = time_beside(case, ours, theirs, size)
    ratios = [a / b for a, b in times]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = [statistics.median(side) * 1e6 for side in zip(*times, strict=True)]
    return Row(case.name, size, found, medians[0], medians[1], (low, middle, high))


def _run(case: Case, lib: Library, size: Size) -> Any:
    try:
        return contents(case.read(case.call(lib, case.make(lib, size))))
    except Exception as error:
        return Raised(error)


def time_beside(case: Case, ours: Library, theirs: Library, size: Size) -> list[tuple[float, float]]:
    """Seconds of one call of ours and of theirs in each of some rounds, who is first changing from round to round."""
    pilot = [_time(case, lib, size, 1) for lib in (ours, theirs)]
    made, slowest = (max(max(side), 1e-7) for side in zip(*pilot, strict=True))
    calls = max(1, min(MOST_CALLS, round(CALLS_S / slowest), int(STATES_S / made)))
    rounds, warm_up = max(ROUNDS, min(MOST_ROUNDS, int(CASE_S / (2 * calls * (made + slowest))))), WARM_UP
    if slowest > SLOW_S:
        rounds, warm_up = SLOW_ROUNDS, 0
    times = []
    with collector_off():
        for turn in range(warm_up + rounds):
            taken = {lib.label: _time(case, lib, size, calls)[1] for lib in ((ours, theirs), (theirs, ours))[turn % 2]}
            if turn >= warm_up:
                times.append((taken[ours.label], taken[theirs.label]))
    return times


def clock_of(threads: int) -> Callable[[], float]:
    """A single thread's own time, which other programs on the machine change least; else what a clock says."""
    return time.thread_time if threads == 1 else time.perf_counter


def _time(case: Case, lib: Library, size: Size, calls: int) -> tuple[float, float]:
    """Seconds to make a state and to do one call, of so many in a row."""
    clock = clock_of(torch.get_num_threads())
    begin = clock()
    states = [case.make(lib, size) for _ in range(calls)]
    middle = clock()
    for state in states:
        case.call(lib, state)
    end = clock()
    return (middle - begin) / calls, (end - middle) / calls


# What a jagged type holds, by the names of its methods that read it out. A library that lacks one holds nothing there.
KEYED_JAGGED = (
    "keys", "values", "weights_or_none", "stride", "stride_per_key", "stride_per_key_per_rank",
    "variable_stride_per_key", "inverse_indices_or_none", "lengths", "offsets", "length_per_key", "offset_per_key",
    "lengths_offset_per_key", "index_per_key",
)  # fmt: skip
JAGGED = ("values", "weights_or_none", "lengths", "offsets")
KEYED = ("keys", "values", "key_dim", "length_per_key", "offset_per_key")
TYPES = {"KeyedJaggedTensor": KEYED_JAGGED, "JaggedTensor": JAGGED, "KeyedTensor": KEYED}


def contents(result: Any) -> Any:
    """The result as tensors, numbers and strings in dicts and lists, whatever library made it."""
    if isinstance(result, (Tensor, str, int, float)) or result is None:
        return result
    if isinstance(result, Mapping):
        return {key: contents(value) for key, value in result.items()}
    names = TYPES.get(type(result).__name__)
    if names is not None:
        return {name: _read_out(result, name) for name in names}
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {f.name: contents(getattr(result, f.name)) for f in dataclasses.fields(result)}
    if isinstance(result, Iterable):
        return [contents(value) for value in result]
    return result


def _read_out(result: Any, name: str) -> Any:
    method = getattr(result, name, None)
    try:
        return None if method is None else contents(method())
    except Exception as error:
        return Raised(error)


def difference(ours: Any, theirs: Any, tolerance: float = 0.0, where: str = "") -> str:
    """The first place where two contents differ, with both sides; "" if they are equal.

    Dtypes and shapes are compared too; a tensor's floats may differ by `tolerance` of the largest.
    """
    at = f"{where}: " if where else ""
    if isinstance(ours, Raised) or isinstance(theirs, Raised):
        both = isinstance(ours, Raised) and isinstance(theirs, Raised)
        return "" if both else f"{at}ours {_short(ours)}, theirs {_short(theirs)}"
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return "" if (found := _unlike(ours, theirs, tolerance)) == "" else f"{at}{found}"
    if isinstance(ours, dict) and isinstance(theirs, dict) and list(ours) == list(theirs):
        inside = (difference(ours[key], theirs[key], tolerance, f"{where}[{key}]") for key in ours)
        return next(filter(None, inside), "")
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        inside = (
            difference(a, b, tolerance, f"{where}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
        )
        return next(filter(None, inside), "")
    if type(ours) is type(theirs) and not isinstance(ours, (Tensor, dict, list)) and ours == theirs:
        return ""
    return f"{at}ours {_short(ours)}, theirs {_short(theirs)}"


def _unlike(ours: Tensor, theirs: Tensor, tolerance: float) -> str:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"ours {_short(ours)}, theirs {_short(theirs)}"
    if ours.numel() == 0 or torch.equal(ours, theirs):
        return ""
    if not ours.is_floating_point():
        return f"{int((ours != theirs).sum())} of {ours.numel()} elements differ"
    same_nan = torch.equal(ours.isnan(), theirs.isnan())
    largest = theirs.nan_to_num(0.0).abs().max().clamp(min=1e-30)
    off = float((ours - theirs).nan_to_num(0.0).abs().max() / largest)
    return "" if same_nan and off <= tolerance else f"off by {off:.1e} of the largest"


def _short(content: Any) -> str:
    if isinstance(content, Tensor):
        return f"{str(content.dtype).removeprefix('torch.')} {list(content.shape)}"
    if isinstance(content, Raised):
        return f"raises {content}"
    if isinstance(content, (dict, list)):
        text = f"{type(content).__name__} of {len(content)}: {list(content)}" if content else repr(content)
        return text if len(text) < 60 else f"{text[:60]} ..."
    return repr(content)[:80]
