"""The library's ops with every launch of a Triton kernel compiled for sm_90 and executed on this machine's CPU.

Inside `executed()` the ops take the path that CUDA tensors take, on CPU tensors: what each launch asks of the compiler
is decided by Triton's own launcher from the arguments (types, divisibility by 16, the constant 1, tuples), the PTX that
Triton makes is run by the machine of this folder, and what it wrote is there when the launch returns. So an op runs end
to end, with torch's sort between two launches done by torch on the CPU. Compiled kernels lie in Triton's cache on disk.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import shardwise.kernels
from shardwise.kernels import _op, numba_loops, persistent_grid
from shardwise.kernels._op import HAS_TRITON, INTERPRETED, load_kernels, triton

from . import Fault, Kernel, Launch, Memory
from .barriers import Around, fixed_places, pairs_at

TARGET = ("cuda", 90, 32)
# a CUDA allocation begins on so many bytes; torch's on a CPU on 64, and stays as far off as it is
_ALLOCATION = 512
# which path an op takes, by their names in _op.py, and what they say of a tensor on a GPU
_PATHS = {"runs_kernel": True, "direct": False, "eager": False, "unwatched": False}


@dataclass(frozen=True)
class Cut:
    """A barrier that is taken out: the `barrier`-th of a kernel as it was compiled to `variant`."""

    kernel: str
    variant: str
    barrier: int


@dataclass
class Execution:
    """One launch: `kernel` is its file and name, `requests` what each kind of access moved, by buffer.

    `variant` tells the programs apart that a kernel is compiled to, with `barriers` in the text of each. A request has
    "requests" of warps, the "bytes" that they asked for and the 32-byte "sectors" that they touched. `around` is the
    barrier that was taken out.
    """

    kernel: str
    grid: tuple[int, ...]
    variant: str = ""
    barriers: int = 0
    instructions: int = 0
    faults: list[str] = field(default_factory=list)
    requests: Mapping[str, Counter[str]] = field(default_factory=dict)
    around: Around | None = None


@dataclass
class Log:
    """A log of the launches, in order."""

    launches: list[Execution] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """A sentence for each fault, with the kernel that it is in."""
        return [f"{launch.kernel}: {fault}" for launch in self.launches for fault in launch.faults]

    def of(self, kernel: str) -> list[Execution]:
        """The launches of one kernel, named like "lookup.pooled.pooled_lookup"."""
        return [launch for launch in self.launches if launch.kernel == kernel]


@contextmanager
def executed(
    *, programs: int | None = None, fuses: bool = True, cut: Cut | None = None, shuffle: int | None = None
) -> Iterator[Log]:
    """Ops on CPU tensors launch their kernels here; yields the log of the launches.

    `programs` is the size of a persistent grid where it shall be another one, so that its loops go around on few ids.
    Unless it `fuses` the compiler rounds each product and sum by itself. A barrier is `cut` out of a kernel. `shuffle`
    seeds another order of the CTAs of each launch. Memory that torch allocates without writing holds NaN
    or a huge integer.

    Raises (inside):
        Fault: a launch cannot go on, as at an address outside of every buffer, or a kernel that was cut had a fault;
            other faults are in the log.
        RuntimeError: there is no triton, or it interprets.
    """
    if not HAS_TRITON or INTERPRETED:
        raise RuntimeError("compiled kernels need triton, and TRITON_INTERPRET unset")
    log = Log()
    settings = _Settings(fuses, cut, shuffle)
    with ExitStack() as patches:
        if programs is not None:
            patches.enter_context(patch.object(persistent_grid, "PERSISTENT_PROGRAMS", programs))
        for module in modules():
            for name, answer in _PATHS.items():
                if getattr(module, name, None) is getattr(_op, name):
                    patches.enter_context(patch.object(module, name, lambda *tensors, answer=answer: answer))
            for name, kernel in _kernels_in(module):
                stand_in = _Executor(name_of(kernel), kernel, log, settings)
                patches.enter_context(patch.object(module, name, stand_in))
        patches.enter_context(_unwritten_memory_filled())
        yield log


@contextmanager
def torch_alone() -> Iterator[None]:
    """CPU tensors are worked on by torch, and by no loop that numba compiles."""
    with patch.object(_op, "NUMBA", False):
        numba_loops.loops.cache_clear()
        yield
    numba_loops.loops.cache_clear()


def kernels() -> dict[str, Any]:
    """Every kernel of the library by its file and name, like "lookup.pooled.pooled_lookup"."""
    return {name_of(kernel): kernel for module in modules() for _, kernel in _kernels_in(module)}


def name_of(kernel: Any) -> str:
    """The file and the short name of a kernel."""
    return f"{kernel.__module__.removeprefix('shardwise.kernels.')}.{kernel.__name__[1 : -len('_kernel')]}"


def modules() -> list[Any]:
    """The files of kernels/ whose ops choose a path or launch."""
    # loops that numba compiles are imported where they are used, and compile when they are imported
    walked = pkgutil.walk_packages(shardwise.kernels.__path__, "shardwise.kernels.")
    every = [importlib.import_module(info.name) for info in walked if not info.name.endswith("_loops")]
    load_kernels()
    return [m for m in every if m is not _op and (_kernels_in(m) or hasattr(m, "runs_kernel"))]


def _kernels_in(module: Any) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in vars(module).items()
        if name[0] == "_" and name.endswith("_kernel") and isinstance(value, triton.JITFunction)
    ]


@contextmanager
def _unwritten_memory_filled() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


@dataclass(frozen=True)
class _Settings:
    fuses: bool
    cut: Cut | None
    shuffle: int | None


class _Executor:
    """Stands in for a kernel: its launch is compiled and executed."""

    def __init__(self, name: str, kernel: Any, log: Log, settings: _Settings) -> None:
        self.name, self.kernel, self.log, self.settings = name, kernel, log, settings

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self._launch(grid, args, options)

        return launch

    def _launch(self, grid: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        cut = self.settings.cut
        if not self.settings.fuses:
            options = {**options, "enable_fp_fusion": False}
        request = specialize(self.kernel, args, options)
        made = _compiled(self.kernel, request)
        listed: Any = grid(request.values) if callable(grid) else grid
        sizes = tuple(listed)
        entry = Execution(self.name, sizes, made.variant, len(made.program.barriers))
        self.log.launches.append(entry)
        is_cut = cut is not None and (cut.kernel, cut.variant) == (self.name, made.variant)
        program = made.program
        if cut is not None and is_cut:
            entry.around = Around(pairs_at(program, cut.barrier), fixed_places(program))
            program = program.without_barrier(cut.barrier)
        memory, places = Memory(), _Places()
        numbers = [places.number(memory, value, name) for name, value in request.passed()]
        scratch = memory.put(torch.zeros(made.scratch_bytes * prod(sizes), dtype=torch.uint8).numpy(), "scratch")
        launch = Launch(program, memory, made.shared_bytes, [*numbers, scratch, scratch], around=entry.around)
        try:
            launch.run(sizes, self.settings.shuffle)
        except Fault as fault:
            # what ends a launch is the last that was found, unless nothing could be found
            entry.faults = [] if fault.finding in launch.faults else [str(fault)]
            raise
        finally:
            entry.faults = [*map(str, launch.faults), *entry.faults]
            entry.instructions, entry.requests = sum(launch.executed.values()), launch.requests
            places.read_back(memory)
            if entry.around:
                entry.around.end_launch()
        if is_cut and launch.faults:
            # one is enough
            raise Fault(launch.faults[0])


class _Places:
    """Where the storages of tensors lie in the memory of a launch: each once, however many tensors see it."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, Any]] = {}

    def number(self, memory: Memory, value: Any, name: str) -> Any:
        """An argument as the kernel reads it: a tensor's address, or a number."""
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            start = storage.data_ptr()
            if start not in self.known:
                content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                self.known[start] = memory.put(content, name, start % _ALLOCATION), content
            return self.known[start][0] + value.storage_offset() * value.itemsize
        return value

    def read_back(self, memory: Memory) -> None:
        """Copy what the launch wrote into the tensors."""
        for address, content in self.known.values():
            content[:] = memory.get(address)


@dataclass(frozen=True)
class Request:
    """A launch's request to the compiler, as Triton's launcher reads it from the arguments.

    `signature` has a type for each parameter ("constexpr" for what is compiled in), `attributes` which of them are
    multiples of 16, `values` the arguments by name.
    """

    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any
    values: dict[str, Any]

    def passed(self) -> Iterator[tuple[str, Any]]:
        """Name and value of what the compiled kernel takes, tuples in parts."""
        for name, kind in self.signature.items():
            yield from _flat(name, kind, self.values[name])


def specialize(kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Request:
    """The request that Triton's launcher would make for these arguments on TARGET."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget(*TARGET))
    asked = {"debug": False, **options}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, known = bind(*args, **asked)
    chosen, signature, constants, attributes = kernel._pack_args(backend, asked, bound, specialization, known)
    return Request(signature, constants, attributes, chosen, bound)


@dataclass(frozen=True)
class _Compiled:
    """A program, a name of its PTX, bytes of its shared memory, and bytes of scratch for each CTA."""

    program: Kernel
    variant: str
    shared_bytes: int
    scratch_bytes: int


_COMPILED: dict[tuple[Any, ...], _Compiled] = {}


def _compiled(kernel: Any, request: Request) -> _Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # functions of rules and kernels compare by identity
    key = (kernel, *map(str, (request.signature, request.constants, request.attributes, request.options)))
    if key not in _COMPILED:
        source = ASTSource(
            fn=kernel, signature=request.signature, constexprs=request.constants, attrs=request.attributes
        )
        made = triton.compile(source, target=GPUTarget(*TARGET), options=request.options.__dict__)
        ptx = made.asm["ptx"]
        # places of source lines are no part of what runs
        text = re.sub(r"^\s*(?:\.loc|\.file|//).*$", "", ptx.split("\t.section")[0], flags=re.M)
        variant = hashlib.sha256(text.encode()).hexdigest()[:8]
        scratch = getattr(made.metadata, "global_scratch_size", 0)
        _COMPILED[key] = _Compiled(Kernel(ptx), variant, made.metadata.shared, scratch)
    return _COMPILED[key]


def _flat(name: str, kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(kind, tuple):
        for part, inner in zip(kind, value, strict=True):
            yield from _flat(name, part, inner)
    elif kind != "constexpr":
        yield name, value
