"""Dispatch and registration of ops: which path one runs on. Nothing else in shardwise reads the environment.

A CUDA tensor goes to the Triton kernel; a CPU tensor to the torch twin, or to the interpreted kernel under
TRITON_INTERPRET=1. Without triton everything runs on the torch twins, with one warning where a GPU is present.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
# a file or folder of tuned configs that come before those of shardwise (configs.py)
TUNED = os.environ.get("SHARDWISE_TUNED")


def _switch(name: str) -> bool:
    """Whether a variable of the environment that may turn something off leaves it on, as it does where it is not set.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    value = os.environ.get(name) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"environment variable {name}={value!r}: expected 0 (off) or 1 (on, as where it is not set)")
    return value == "1"


# whether loops that numba compiles may do the CPU's work where numba is installed (kernels/numba_loops.py)
NUMBA = _switch("SHARDWISE_NUMBA")


class _Deferred(ModuleType):
    """A module of triton that is imported when something of it is asked for: triton takes longer than all the rest
    of shardwise, and on a CPU nothing of it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


class _Kernel:
    """A function that becomes Triton's when it, or any other kernel, is first used: the name of the one stays that of
    the other, in its own file and in all of this package."""

    def __init__(self, fn: Any, options: dict[str, Any]) -> None:
        self.fn, self._options = fn, options
        _waiting.append(self)

    @cached_property
    def made(self) -> Any:
        return importlib.import_module("triton").jit(**self._options)(self.fn)

    def __getitem__(self, grid: Any) -> Any:
        load_kernels()
        return self.made[grid]

    def __getattr__(self, name: str) -> Any:
        load_kernels()
        return getattr(self.made, name)


_waiting: list[_Kernel] = []
_loading = RLock()


def _later(fn: Any = None, **options: Any) -> Any:
    """`triton.jit` without triton."""
    return _Kernel(fn, options) if fn is not None else lambda f: _Kernel(f, options)


if TYPE_CHECKING:

    class _Anything(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Anything):
        """To type checkers a class: what a variable holds is no annotation."""

        constexpr: TypeAlias = Any

    triton: Any = tl
elif INTERPRETED:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
elif HAS_TRITON:
    triton, tl = _Deferred("triton"), _Deferred("triton.language")
    triton.jit = _later
else:

    class _Missing:
        """Stands in for triton so that kernel files can be read without it; nothing of it is ever called."""

        @staticmethod
        def jit(fn: Any = None, **_: Any) -> Any:
            return fn if fn is not None else lambda f: f

        def __getattr__(self, name: str) -> Any:
            return None

    triton = tl = _Missing()


def load_kernels() -> None:
    """Import triton and make all kernels that were defined so far Triton's; after that they are as `triton.jit` has
    them. A kernel finds triton's language and the functions that it calls by names in its file, so these change too."""
    with _loading:
        if not _waiting:
            return
        package = [vars(module) for name, module in [*sys.modules.items()] if name.startswith(str(__package__))]
        for names in [*package, *(kernel.fn.__globals__ for kernel in _waiting)]:
            for name, value in [*names.items()]:
                if isinstance(value, _Kernel):
                    names[name] = value.made
                elif isinstance(value, _Deferred):
                    names[name] = importlib.import_module(value.__name__)
        _waiting.clear()


def loaded(kernel: Any) -> Any:
    """A kernel that is held by something else than a name of a file, as Triton has it."""
    load_kernels()
    return kernel.made if isinstance(kernel, _Kernel) else kernel


_PARAMETER = torch.nn.Parameter
_PLAIN = (Tensor, _PARAMETER)
_compiling, _modes = torch.compiler.is_compiling, torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing

# whether torch.compile traces, which looks into what is cached and sees True; all others get the cached False, without
# a call of Python
in_graph = lru_cache(maxsize=1)(torch.compiler.is_dynamo_compiling)
in_graph()

_library = torch.library.Library("shardwise", "DEF")  # type: ignore[no-untyped-call]

Function = TypeVar("Function", bound=Callable[..., Any])
# what `torch.compiler.disable` asks for, at no cost for each call; where a torch has no such thing, frames are compiled
_eval_frame: Any = importlib.import_module("torch._C._dynamo.eval_frame")
_SKIPPED = (
    _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
    if hasattr(_eval_frame, "set_code_exec_strategy")
    else None
)


def runs_kernel(tensor: Tensor) -> bool:
    """Whether an op on `tensor` launches its Triton kernel; otherwise its torch twin runs."""
    if tensor.is_cuda and not HAS_TRITON:
        _warn_no_triton()
        return False
    return tensor.is_cuda or INTERPRETED


def unwatched() -> bool:
    """Whether nothing traces, wraps or records operations, and kernels are not interpreted.

    Then an op on ids, which want no gradient, may run past torch's dispatcher where these are plain CPU tensors.
    """
    # names of this file: what is looked up in torch each time would double the time of this
    return not (INTERPRETED or _compiling() or _modes() or _transforms() or _tracing())


def capturing() -> bool:
    """Whether what runs now is recorded as a CUDA graph: then nothing may wait for the device."""
    # asked without a device, a CUDA build of torch 2.15 raises; before CUDA is first used nothing records
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def direct(*tensors: Tensor | None) -> bool:
    """Whether an op may be called past torch's dispatcher, which costs more than small batches do.

    So it may where all are plain CPU tensors that want no gradient, and nothing traces, wraps or records operations.
    """
    if INTERPRETED or _compiling() or _modes() or _transforms() or _tracing():
        return False
    for tensor in tensors:
        if tensor is not None:
            kind = type(tensor)
            if (kind is not Tensor and kind is not _PARAMETER) or not tensor.is_cpu:
                return False
            if tensor.requires_grad and _grad_enabled():
                return False
    return True


def eager(*tensors: Tensor | None) -> bool:
    """As `direct`, but gradients may be wanted: then autograd's own Function costs least."""
    others = []
    for tensor in tensors:
        if tensor is None or not tensor.requires_grad:
            others.append(tensor)
        elif type(tensor) not in _PLAIN or not tensor.is_cpu:
            return False
    return direct(*others)


def register(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload[..., Any]:
    """Define `shardwise::<schema>` with one implementation for CPU and CUDA and a fake one for compilers."""
    name = schema.split("(")[0]
    outside_graphs(implementation)
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, implementation, "CPU")  # type: ignore[no-untyped-call]
    _library.impl(name, on_own_device(schema, implementation), "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"shardwise::{name}", fake, lib=_library)
    return getattr(torch.ops.shardwise, name).default  # type: ignore[no-any-return]


def outside_graphs(function: Function) -> Function:
    """The function; torch.compile will not look into it, nor into what it calls, where an op is called in Python.

    An op whose output has a size that depends on data ends a graph. It is called between two graphs then, and every
    Python function of its implementation would be compiled in turn. What is traced into a graph is not changed by this.
    """
    code = getattr(function, "__code__", None)
    if code is not None and _SKIPPED is not None:
        _eval_frame.set_code_exec_strategy(code, _SKIPPED)
    return function


def tensor_places(schema: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which of an op's arguments are tensors, or none, and which are lists of them."""
    kinds = [str(argument.type) for argument in torch._C.parse_schema(schema).arguments]
    tensors = tuple(place for place, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]"))
    lists = tuple(place for place, kind in enumerate(kinds) if kind in ("List[Tensor]", "Optional[List[Tensor]]"))
    return tensors, lists


def on_own_device(schema: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation, with the device of its CUDA tensors as the current one.

    Triton launches on the current device and its stream, whatever its arguments are, and torch makes no device current
    for an implementation in Python. Tensors in host memory are left to the implementation.

    Raises:
        ValueError: tensors are on several devices; names the op and two of the arguments.
    """
    arguments = torch._C.parse_schema(schema).arguments
    tensors, lists = tensor_places(schema)

    def guarded(*args: Any) -> Any:
        index, given = -1, len(args)
        for place in tensors:
            # torch leaves out last arguments that are their defaults
            if place < given and (tensor := args[place]) is not None:
                here = tensor.get_device()
                if here != index and here >= 0:
                    if index >= 0:
                        raise ValueError(_several_devices(schema, arguments, args))
                    index = here
        for place in lists:
            for tensor in (args[place] or ()) if place < given else ():
                here = tensor.get_device()
                if here != index and here >= 0:
                    if index >= 0:
                        raise ValueError(_several_devices(schema, arguments, args))
                    index = here
        if index < 0 or index == torch.cuda.current_device():
            return implementation(*args)
        with torch.cuda.device(index):
            return implementation(*args)

    return outside_graphs(guarded)


def _several_devices(schema: str, arguments: Sequence[Any], args: Sequence[Any]) -> str:
    """Names the first CUDA tensor of an op's arguments and the first one elsewhere."""
    named: list[tuple[str, Tensor]] = []
    for argument, value in zip(arguments, args, strict=False):
        listed = isinstance(value, (list, tuple))
        for place, tensor in enumerate(value if listed else [value]):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                named.append((f"{argument.name}[{place}]" if listed else argument.name, tensor))
    (first, at), *others = named
    other, there = next((name, tensor.device) for name, tensor in others if tensor.device != at.device)
    return f"{schema.split('(')[0]}: {other} is on {there}, {first} on {at.device}: move one of them"


def register_autograd(
    op: torch._ops.OpOverload[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Give `op` a backward that follows `torch.library.register_autograd`."""
    torch.library.register_autograd(op._name, backward, setup_context=setup_context, lib=_library)


def no_second_derivative(
    what: str, backward: Callable[..., tuple[Tensor | None, ...]], ctx: Any, upstream: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of a `backward` that is to be differentiated no further: whoever does gets a RuntimeError.

    For a backward that runs with `create_graph`, which is where gradients are enabled in it.
    """
    with torch.no_grad():
        grads = backward(ctx, *upstream)
    if not any(grad is not None and grad.requires_grad for grad in upstream):
        return grads
    text = f"{what}: a second derivative through its backward is not implemented"
    return tuple(None if grad is None else no_gradient(text, grad) for grad in grads)


def no_gradient(text: str, tensor: Tensor) -> Tensor:
    """The tensor, through which a backward raises RuntimeError with this text."""
    refusing: Tensor = _Refused.apply(text, tensor.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return refusing


class _Refused(torch.autograd.Function):
    """Passes a tensor on, and has no derivative."""

    @staticmethod
    def forward(ctx: Any, text: str, tensor: Tensor) -> Tensor:
        ctx.text = text
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise RuntimeError(ctx.text)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def multiple(x, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, declared to be a multiple of ALIGN: the compiler ignores tl.multiple_of on an argument."""
    return x // ALIGN * ALIGN


def launch_options(warps: int, registers: int) -> dict[str, int]:
    """Options of a launch: warps, and the registers of a thread at most where a compiler takes a limit (not AMD's).

    Left alone (0 registers), ptxas spills a value or two to fit one more program on a multiprocessor.
    """
    if torch.version.hip:
        return {"num_warps": warps_on_amd(warps)}
    return {"num_warps": warps, "maxnreg": registers} if registers else {"num_warps": warps}


def warps_on_amd(warps: int) -> int:
    """Warps of 64 threads in place of so many of 32: at most 16 fit a program, and all of those spill its scalars."""
    return warps if warps <= 16 else 8


def gather_tile(dim: int, itemsize: int, align: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile in which every thread holds 16 bytes of a table row of this dim.

    Wider rows are cut into column blocks; `align` is what elements the rows are aligned to.
    """
    vector = 16 // itemsize
    block_d = min(next_power_of_2(dim), 64 * vector)
    # one warp that shares a row among threads would pass the ids of 32 rows around through shared memory
    most = 16 if align < block_d <= vector else 32
    rows = max(1, min(most, 128 * vector // block_d))
    return rows, block_d, max(1, min(4, rows * block_d // (32 * vector)))


@cache
def _warn_no_triton() -> None:
    warnings.warn("shardwise: triton is not installed, CUDA tensors run on the slower torch path", stacklevel=4)
