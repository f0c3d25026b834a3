"""Record what every program of a launch reads and writes in Triton's interpreter, to find what a GPU would not forgive:
races, accesses outside the arguments, false alignment hints, more bytes moved than declared.

    with recorded(order=7) as launches:
        pooled_lookup(...)
    assert not any(races(launch) for launch in launches)

The interpreter runs programs one after another on the host. What is wrong only between the threads of one program (a
missing barrier), or in what the compiler makes of a kernel, does not show here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.kernels._op import INTERPRETED

SECTOR = 32  # bytes that a GPU moves at least

Kind = Literal["read", "write", "atomic"]
Program = tuple[int, int, int]
Bytes = npt.NDArray[np.int64]


class Fault(AssertionError):
    """A kernel told the compiler that a value is a multiple of a number and it is not, or left its arguments."""


class Access(NamedTuple):
    """One load, store or atomic of one program: where the elements of its unmasked lanes begin, and their size."""

    program: int  # place in Launch.programs
    kind: Kind
    addresses: Bytes  # [lanes]
    itemsize: int


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its programs in the order they ran, its tensor arguments by name, and all it accessed."""

    kernel: str
    grid: Program
    programs: list[Program]
    tensors: dict[str, Tensor]
    accesses: list[Access]

    def place(self, address: int) -> str:
        """Where an address lies: an argument and the number of an element, counted in memory from its first."""
        for name, tensor in self.tensors.items():
            begin, end = span(tensor)
            if begin <= address < end:
                return f"{name}[{(address - begin) // tensor.itemsize}]"
        return f"{address:#x} in no argument"


def span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the byte after its last."""
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + (reach * tensor.itemsize if tensor.numel() else 0)


@contextmanager
def recorded(order: int | Sequence[int] | None = None) -> Iterator[list[Launch]]:
    """Record every launch in the context; its programs run as `order` says.

    None is the order of the interpreter, an int the seed of a shuffle. A list names the programs to run of each launch,
    others are left out; programs are numbered with the last axis of the grid the fastest, -1 is the last.

    Raises:
        RuntimeError: kernels are not interpreted in this process.
        Fault: a value is not the multiple that `tl.multiple_of` or `kernels._op.multiple` says, or a load, store or
            atomic does not lie in one tensor argument of the launch; raised before memory is touched.
    """
    if not INTERPRETED:
        raise RuntimeError("launches are recorded in the interpreter: set TRITON_INTERPRET=1 before triton is imported")
    interpreter = import_module("triton.runtime.interpreter")
    recorder = _Recorder(order)
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    hooks: list[tuple[Any, str, Callable[..., None]]] = [
        (builder, "create_masked_load", recorder.load),
        (builder, "create_masked_store", recorder.store),
        (builder, "create_atomic_rmw", recorder.atomic),
        (builder, "create_atomic_cas", recorder.compare_and_swap),
        (interpreter.TensorHandle, "set_attr", recorder.attribute),
        (interpreter.InterpretedFunction, "__call__", recorder.device_function),
    ]
    run = executor.__call__
    with ExitStack() as patches:
        for owner, name, hook in hooks:
            patches.enter_context(patch.object(owner, name, _preceded(getattr(owner, name), hook)))
        patches.enter_context(patch.object(executor, "__call__", lambda *a, **k: recorder.run(run, *a, **k)))
        patches.enter_context(patch.object(builder, "set_grid_idx", lambda *a: recorder.begin(*a)))
        yield recorder.launches


def _preceded(function: Callable[..., Any], hook: Callable[..., None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return function(*args, **kwargs)

    return both


class _Recorder:
    """The launch and the program that the interpreter is at, and what it calls on its way."""

    def __init__(self, order: int | Sequence[int] | None) -> None:
        self.order = order
        self.launches: list[Launch] = []
        self.program = 0

    def run(self, launch: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> Any:
        """A launch: the interpreter counts along a grid of one axis, as many programs as the order names."""
        grid, tensors = executor.grid, dict[str, Tensor]()

        def note(*on_host: Any, **named: Any) -> None:
            tensors.update(_tensors(inspect.getcallargs(executor.fn, *on_host, **named)))

        def programs(arguments: Any) -> tuple[int]:
            axes: Any = grid(arguments) if callable(grid) else grid
            x, y, z = (*axes, 1, 1)[:3]
            chosen = [(n // (y * z), n // z % y, n % z) for n in _numbers(x * y * z, self.order)]
            self.launches.append(Launch(executor.fn.__name__, (x, y, z), chosen, tensors, []))
            return (len(chosen),)

        executor.grid, executor.pre_run_hooks = programs, [*executor.pre_run_hooks, note]
        try:
            return launch(executor, *args, **kwargs)
        except Exception as error:
            # the interpreter wraps an error for the kernel and for each device function that it passes through
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, Fault):
                cause = cause.__cause__
            if cause is not None:
                raise cause from None
            raise

    def begin(self, builder: Any, number: int, *_: int) -> None:
        launch = self.launches[-1]
        self.program = number
        builder.grid_dim, builder.grid_idx = launch.grid, launch.programs[number]

    def load(self, builder: Any, pointers: Any, mask: Any, *_: Any, **__: Any) -> None:
        self.access("read", pointers, mask.data)

    def store(self, builder: Any, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
        self.access("write", pointers, mask.data)

    def atomic(self, builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
        self.access("atomic", pointers, mask.data)

    def compare_and_swap(self, builder: Any, pointers: Any, *_: Any) -> None:
        self.access("atomic", pointers, True)

    def access(self, kind: Kind, pointers: Any, mask: Any) -> None:
        live = np.broadcast_to(np.asarray(mask), pointers.data.shape)
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = pointers.data[live].astype(np.int64)
        if addresses.size:
            launch = self.launches[-1]
            inside = np.zeros(addresses.shape, np.bool_)
            # lanes may lie in several of the arguments
            for begin, end in map(span, launch.tensors.values()):
                inside |= (addresses >= begin) & (addresses + itemsize <= end)
            if not inside.all():
                low, high = int(addresses.min()), int(addresses.max()) + itemsize
                self.fault(f"{kind} from {launch.place(low)} to {launch.place(high - 1)}")
            launch.accesses.append(Access(self.program, kind, addresses, itemsize))

    def attribute(self, handle: Any, name: str, values: Sequence[int]) -> None:
        if name == "tt.divisibility":
            for value in values:
                self.hint("tl.multiple_of", handle.data, value)

    def device_function(self, function: Any, *args: Any, **kwargs: Any) -> None:
        if function.__name__ == "multiple":
            x, align = inspect.signature(function.fn).bind(*args, **kwargs).args
            self.hint("multiple", x.handle.data if hasattr(x, "handle") else x, getattr(align, "value", align))

    def hint(self, how: str, data: Any, align: int) -> None:
        values = np.atleast_1d(np.asarray(data))
        false = values[values % align != 0]
        if false.size:
            self.fault(f"{how} says a multiple of {align}, but the value is {false[0]}")

    def fault(self, text: str) -> None:
        launch = self.launches[-1]
        raise Fault(f"{launch.kernel}, program {launch.programs[self.program]}: {text}")


def _tensors(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Tensor arguments by name; those of a tuple by name and place."""
    tensors: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, tuple):
            tensors |= _tensors({f"{name}[{i}]": part for i, part in enumerate(value)})
    return tensors


def _numbers(count: int, order: int | Sequence[int] | None) -> Sequence[int]:
    if order is None:
        return range(count)
    if isinstance(order, int):
        return torch.randperm(count, generator=torch.Generator().manual_seed(order)).tolist()
    return [range(count)[number] for number in order]


class Race(NamedTuple):
    """Two programs of a launch that touch the same byte, at least one of which writes it; or two lanes of one store."""

    kernel: str
    place: str  # the first byte they share
    kinds: tuple[Kind, Kind]
    programs: tuple[Program, Program]


_CLASHES: list[tuple[Kind, Kind]] = [("write", "write"), ("read", "write"), ("atomic", "write"), ("read", "atomic")]


def races(launch: Launch) -> list[Race]:
    """Each pair of programs that races, once for each pair of kinds, at the lowest address where they do.

    Where more than two programs meet at a byte only two of them are named. Atomics do not race each other. A store that
    writes an address twice leaves open which value stays: a race of a program with itself.
    """
    all_races = []
    for access in launch.accesses:
        places, times = np.unique(access.addresses, return_counts=True)
        if access.kind == "write" and (times > 1).any():
            own = launch.programs[access.program]
            all_races.append(
                Race(launch.kernel, launch.place(int(places[times > 1][0])), ("write", "write"), (own, own))
            )
    touched: dict[Kind, tuple[Bytes, Bytes]] = {kind: _bytes(launch, kind) for kind in ("read", "write", "atomic")}
    places = np.unique(np.concatenate([addresses for addresses, _ in touched.values()]))  # [bytes touched]
    lowest: dict[Kind, Bytes] = {}
    highest: dict[Kind, Bytes] = {}
    for kind, (addresses, programs) in touched.items():
        at = np.searchsorted(places, addresses)
        lowest[kind], highest[kind] = np.full(len(places), len(launch.programs)), np.full(len(places), -1)
        np.minimum.at(lowest[kind], at, programs)
        np.maximum.at(highest[kind], at, programs)
    for first_kind, second_kind in _CLASHES:
        both = (highest[first_kind] >= 0) & (highest[second_kind] >= 0)
        # one program alone touches the byte if the lowest and the highest of both kinds are the same
        crossed = lowest[first_kind] != highest[second_kind]
        clash = np.flatnonzero(both & (crossed | (highest[first_kind] != lowest[second_kind])))
        pairs = np.where(
            crossed, (lowest[first_kind], highest[second_kind]), (highest[first_kind], lowest[second_kind])
        )[:, clash]
        for i in sorted(np.unique(pairs, axis=1, return_index=True)[1].tolist()):
            first, second = (launch.programs[p] for p in pairs[:, i].tolist())
            all_races.append(
                Race(launch.kernel, launch.place(int(places[clash[i]])), (first_kind, second_kind), (first, second))
            )
    return all_races


def _bytes(launch: Launch, kind: Kind) -> tuple[Bytes, Bytes]:
    """Address and program of each byte that the launch accessed in this way."""
    accesses = [access for access in launch.accesses if access.kind == kind]
    addresses = [(a.addresses[:, None] + np.arange(a.itemsize)).ravel() for a in accesses]  # of [elements * itemsize]
    programs = [np.full(a.addresses.size * a.itemsize, a.program) for a in accesses]
    return np.concatenate([np.empty(0, np.int64), *addresses]), np.concatenate([np.empty(0, np.int64), *programs])


class Sectors(NamedTuple):
    """32-byte sectors, counted three ways; none counts a sector twice that one load or store touches twice."""

    requested: int  # a sector counts for every load or store that touches it
    fetched: int  # once for every program: what moves if a program's second touch is served by a cache
    distinct: int  # once


def sectors(launch: Launch, kind: Kind, of: Tensor | None = None) -> Sectors:
    """Sectors that a launch reads or writes, in all memory or in that of one tensor."""
    begin, end = span(of) if of is not None else (0, np.iinfo(np.int64).max)
    requested, per_program = 0, [[np.empty(0, np.int64)] for _ in launch.programs]
    for access in launch.accesses:
        if access.kind == kind:
            # an element lies in one sector: it is no larger, and aligned to its size
            inside = (access.addresses >= begin) & (access.addresses < end)
            touched = np.unique(access.addresses[inside] // SECTOR)
            requested += touched.size
            per_program[access.program].append(touched)
    fetched = [np.unique(np.concatenate(touched)) for touched in per_program]
    everything = np.unique(np.concatenate([np.empty(0, np.int64), *fetched]))
    return Sectors(requested, sum(touched.size for touched in fetched), everything.size)
