"""What `torch.fx` records where proxies reach the jagged types, and modules that read them: one node, and no run.

A jagged type that is made of proxies is a call of its class; a module that cannot run on proxies is a call of the
module, whichever tracer runs. A recorded program does then what the eager one does.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Proxy

# a torch without this name fails here; the flag behind it became thread-local in 2.15, and looking for it found nothing
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from .scripting import Unscripted


def _recorded_or_made(cls: type, *args: Any, **kwargs: Any) -> Any:
    if is_fx_symbolic_tracing():
        for proxy in _proxies((args, kwargs)):
            return proxy.tracer.create_proxy("call_function", cls, args, kwargs)
    return object.__new__(cls)


class JaggedTensorMeta(ABCMeta):
    """The class of the jagged types: `torch.fx` records the construction of its classes from proxies.

    A class of it with a `__new__` of its own says itself what is recorded.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(name, bases, namespace, **kwargs)
        inherited: Any = cls.__new__
        if inherited is object.__new__:
            type.__setattr__(cls, "__new__", staticmethod(_recorded_or_made))


class Traceable(metaclass=JaggedTensorMeta):
    """A type whose construction from proxies `torch.fx` records instead of running it, and TorchScript refuses."""

    if TYPE_CHECKING:

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """What is made of proxies is a proxy."""

    __torch_script_interface__ = Unscripted("torch.jit.annotations")
    _jit_override_qualname = Unscripted("torch.jit._state")


class OneNode:
    """A module whose `forward` is one node in graphs of `torch.fx`: it reads data, which a trace has not.

    Its `forward` begins with

        if isinstance(features, Proxy):
            return record_forward(ThisClass.forward, self, features)

    so that the check of what it is given comes first, and costs nothing else where nothing traces.
    """

    @property
    def itself(self) -> Any:
        """This module: what a graph that is traced from it calls, since a root is nobody's child."""
        return self


def record_forward(forward: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """The proxy of `module(*args, **kwargs)`, where `forward` is what runs and some of the arguments are proxies.

    A class that derives from ours may run more around the `forward` of ours: the node is then a call of that function.
    """
    tracer = next(_proxies((args, kwargs))).tracer
    path = tracer.path_of_module(module) or "itself"
    if type(module).forward is forward:
        return tracer.create_proxy("call_module", path, args, kwargs)
    return tracer.create_proxy("call_function", forward, (tracer.create_proxy("get_attr", path, (), {}), *args), kwargs)


def holds_proxy(values: Any) -> bool:
    """Whether it is a proxy, or a list or dict with one at its top."""
    if isinstance(values, Mapping):
        values = values.values()
    return isinstance(values, Proxy) or (isinstance(values, Iterable) and any(isinstance(v, Proxy) for v in values))


def _proxies(value: Any) -> Iterator[Any]:
    """All proxies in nested arguments."""
    if isinstance(value, Proxy):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _proxies(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _proxies(part)


def is_transformed() -> bool:
    """Whether a transform of `torch.func` runs, whose tensors end with it."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
