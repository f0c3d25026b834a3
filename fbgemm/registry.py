"""What an op of FBGEMM's is here, the table of them, and how they become `torch.ops.fbgemm.*`.

An op is a function with upstream's schema above it, registered for CPU, CUDA and Meta. One that is differentiable is
registered for autograd too: there the same function runs on tensors that want gradients, and those of the ops that it
calls are its own.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

from shardwise._installed import installed_fbgemm
from shardwise.kernels._op import on_own_device, outside_graphs, tensor_places

__all__ = ["OPS", "Op", "load_ops", "op", "register_ops", "registered_ops"]

NAMESPACE = "fbgemm"
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Op:
    """One op: `schema` is upstream's without the namespace, `function` computes it, `fake` gives shapes alone.

    `tensors` is false of an op that takes none and is found by no tensor's device: it runs for all devices.
    `across_devices` is true of one whose tensors may be on several devices, `autocast` of one that `torch.autocast`
    may run in fewer bits.
    """

    name: str
    schema: str
    function: Callable[..., Any]
    fake: Callable[..., Any]
    differentiable: bool
    tensors: bool
    across_devices: bool
    autocast: bool


OPS: dict[str, Op] = {}
"""Name -> op: all that this library serves."""
_libraries: list[torch.library.Library] = []
_registered: dict[str, Op] = {}


def op(
    schema: str,
    *,
    fake: Callable[..., Any] | None = None,
    differentiable: bool = False,
    across_devices: bool = False,
    autocast: bool = False,
    words: Mapping[str, str] | None = None,
) -> Callable[[Function], Function]:
    """Put the decorated function into `OPS`. Its defaults have to be the schema's.

    Args:
        schema: upstream's, character for character, without `fbgemm::`.
        fake: gives outputs of the right shape, dtype and device for compilers. Default: the function itself, which has
            to read no values then.
        differentiable: whether outputs have gradients. The function then runs as it is under autograd.
        across_devices: whether tensors may be on several devices. The function then picks none as the current one.
        autocast: whether `torch.autocast` reaches what the function calls. Upstream's kernels compute in the dtypes of
            their arguments wherever they are not made of torch's own ops.
        words: what errors of the function call arguments -> what the schema calls them.
    """

    def define(function: Function) -> Function:
        name = schema.split("(")[0]
        if name in OPS:
            raise AssertionError(f"fbgemm::{name} is defined twice")
        function = in_words(function, words) if words else function
        tensors = any(tensor_places(schema))
        OPS[name] = Op(name, schema, function, fake or function, differentiable, tensors, across_devices, autocast)
        return function

    return define


def in_words(function: Function, words: Mapping[str, str]) -> Function:
    """The function, whose errors say the second word of each pair for the first."""
    longest_first = sorted(words, key=len, reverse=True)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (pattern.sub(lambda match: words[match[1]], error.args[0]), *error.args[1:])
            raise

    return cast("Function", call)


def load_ops() -> list[str]:
    """Have `torch.ops.fbgemm.*`: FBGEMM's own where it is installed, else ours. Gives the names of ours, if any.

    An FBGEMM that cannot be loaded (it is built for one torch release) is named in a RuntimeWarning, and ours are
    registered where it has left none.
    """
    real = installed_fbgemm()
    if real is not None:
        try:
            import_module("fbgemm_gpu")
        except Exception as error:
            warnings.warn(
                f"fbgemm_gpu at {real.origin} cannot be loaded ({type(error).__name__}: {error}): ops of"
                " torch.ops.fbgemm that it has not registered are shardwise's",
                RuntimeWarning,
                stacklevel=2,
            )
            return register_ops()
    return register_ops() if real is None else []


def register_ops() -> list[str]:
    """Register as `torch.ops.fbgemm.*` the ops of `OPS` that nobody has registered; gives their names.

    Ops stay until the process ends. FBGEMM's own cannot be loaded beside them: its import raises ImportError from then
    on, which says so.
    """
    missing = [each for name, each in OPS.items() if not _exists(name)]
    if not missing:
        return []
    library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    # a library that is let go takes its ops along
    _libraries.append(library)
    for each in missing:
        _register(library, each)
        _registered[each.name] = each
    if not any(isinstance(finder, _Refusal) for finder in sys.meta_path):
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(place, _Refusal())
    return [each.name for each in missing]


class _Refusal(MetaPathFinder):
    """Refuses to import FBGEMM's own once its ops are ours: torch would say that one of them is defined twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None of what is not FBGEMM's; raises ImportError of what is."""
        if fullname == "fbgemm_gpu" and (real := installed_fbgemm()) is not None:
            raise ImportError(
                f"fbgemm_gpu at {real.origin} cannot be loaded any more: shardwise has registered {len(_registered)}"
                " ops of torch.ops.fbgemm in this process, as it was not installed then. Import it before"
                " shardwise.torchrec.install() and shardwise.fbgemm; they use it where it is",
                name=fullname,
            )
        return None


def registered_ops() -> list[str]:
    """Names of the ops that `register_ops` registered in this process; empty where FBGEMM's own are used."""
    return sorted(_registered)


def _exists(name: str) -> bool:
    return bool(torch._C._jit_get_schemas_for_operator(f"{NAMESPACE}::{name}"))


def _register(library: torch.library.Library, each: Op) -> None:
    outside_graphs(each.function)
    library.define(each.schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    if not each.tensors:
        library.impl(each.name, each.function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{each.name}", each.fake, lib=library)
        return
    library.impl(each.name, each.function, "CPU")  # type: ignore[no-untyped-call]
    on_cuda = each.function if each.across_devices else on_own_device(each.schema, each.function)
    library.impl(each.name, on_cuda, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{each.name}", each.fake, lib=library)
    overload = getattr(getattr(torch.ops, NAMESPACE), each.name).default
    if not each.autocast:
        for key in ("AutocastCPU", "AutocastCUDA"):
            library.impl(each.name, _below_autocast(overload), key)  # type: ignore[no-untyped-call]
    if each.differentiable:
        library.impl(each.name, _with_gradients(each, overload), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def _below_autocast(overload: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    """What runs under `torch.autocast`: the op, for which there is none."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def call(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return overload(*args)

    return outside_graphs(call)


def _with_gradients(each: Op, overload: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    """What runs for autograd: the function where a gradient is wanted; otherwise the op, which a trace then names.

    Where no mode listens below autograd and no other device can be current, the function is called in the op's place,
    as a second way through the dispatcher costs 10 us of an op with many arguments. Whether a gradient is wanted makes
    no difference then, and is not asked: that would take 2 us of such an op.
    """
    below = torch._C._after_autograd_keyset
    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    function, grad_enabled, modes = each.function, torch.is_grad_enabled, torch._C._len_torch_dispatch_stack
    tensors, lists = tensor_places(each.schema)
    # keys of a call as a number -> whether plain CPU tensors are all there is below autograd
    plain: dict[int, bool] = {}

    def call(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        keys = keyset.raw_repr()
        on_cpu_alone = plain.get(keys)
        if on_cpu_alone is None:
            on_cpu_alone = plain[keys] = (keyset & below) == on_cpu
        if on_cpu_alone and not modes():
            return function(*args)
        if grad_enabled():
            given = len(args)
            for place in tensors:
                # torch leaves out last arguments that are their defaults
                if place < given and (tensor := args[place]) is not None and tensor.requires_grad:
                    return function(*args)
            for place in lists:
                for tensor in (args[place] or ()) if place < given else ():
                    if tensor.requires_grad:
                        return function(*args)
        return overload.redispatch(keyset & below, *args)

    return outside_graphs(call)
