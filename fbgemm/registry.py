"""What an op of FBGEMM's is here, the table of them, and how they become `torch.ops.fbgemm.*`.

An op is a function with upstream's schema above it, registered for CPU, CUDA and Meta. One that is differentiable is
registered for autograd too: there the same function runs on tensors that want gradients, and those of the ops that it
calls are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels._op import on_own_device

__all__ = ["OPS", "Op", "op", "register_ops", "registered_ops"]

NAMESPACE = "fbgemm"
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Op:
    """One op: `schema` is upstream's without the namespace, `function` computes it, `fake` gives shapes alone.

    `tensors` is false of an op that takes none and is found by no tensor's device: it runs for all devices.
    `across_devices` is true of one whose tensors may be on several devices.
    """

    name: str
    schema: str
    function: Callable[..., Any]
    fake: Callable[..., Any]
    differentiable: bool
    tensors: bool
    across_devices: bool


# name -> op: all that this library serves
OPS: dict[str, Op] = {}
_libraries: list[torch.library.Library] = []
_registered: dict[str, Op] = {}


def op(
    schema: str,
    *,
    fake: Callable[..., Any] | None = None,
    differentiable: bool = False,
    across_devices: bool = False,
) -> Callable[[Function], Function]:
    """Put the decorated function into `OPS`. Its defaults have to be the schema's.

    Args:
        schema: upstream's, character for character, without `fbgemm::`.
        fake: gives outputs of the right shape, dtype and device for compilers. Default: the function itself, which has
            to read no values then.
        differentiable: whether outputs have gradients. The function then runs as it is under autograd.
        across_devices: whether tensors may be on several devices. The function then picks none as the current one.
    """

    def define(function: Function) -> Function:
        name = schema.split("(")[0]
        if name in OPS:
            raise AssertionError(f"fbgemm::{name} is defined twice")
        kinds = [str(argument.type) for argument in torch._C.parse_schema(schema).arguments]
        tensors = any("Tensor" in kind for kind in kinds)
        OPS[name] = Op(name, schema, function, fake or function, differentiable, tensors, across_devices)
        return function

    return define


def register_ops() -> list[str]:
    """Register as `torch.ops.fbgemm.*` the ops of `OPS` that nobody has registered; gives their names.

    A second call registers what `OPS` has gained since. Ops stay until the process ends: the real FBGEMM cannot be
    loaded beside them, and `shardwise.torchrec` says so to whoever imports it.
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
    return [each.name for each in missing]


def registered_ops() -> list[str]:
    """Names of the ops that `register_ops` registered in this process; empty where FBGEMM's own are used."""
    return sorted(_registered)


def _exists(name: str) -> bool:
    return bool(torch._C._jit_get_schemas_for_operator(f"{NAMESPACE}::{name}"))


def _register(library: torch.library.Library, each: Op) -> None:
    library.define(each.schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    if not each.tensors:
        library.impl(each.name, each.function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{each.name}", each.fake, lib=library)
        return
    library.impl(each.name, each.function, "CPU")  # type: ignore[no-untyped-call]
    on_cuda = each.function if each.across_devices else on_own_device(each.schema, each.function)
    library.impl(each.name, on_cuda, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{each.name}", each.fake, lib=library)
    if each.differentiable:
        overload = getattr(getattr(torch.ops, NAMESPACE), each.name).default
        library.impl(each.name, _with_gradients(each, overload), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def _with_gradients(each: Op, overload: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    """What runs for autograd: the function where a gradient is wanted; otherwise the op, which a trace then names."""
    below = torch._C._after_autograd_keyset
    function = each.function

    def call(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled() and _wants_gradient(args):
            return function(*args)
        return overload.redispatch(keyset & below, *args)

    return call


def _wants_gradient(args: Sequence[Any]) -> bool:
    for value in args:
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple)) and _wants_gradient(value):
            return True
    return False
