"""Results that are still on their way: `wait()` gives them, and a lazy one waits when it is first used.

Names and behaviour are TorchRec's (torchrec.distributed.types), with four differences: every awaitable waits once and
remembers the result or the error; printing, `len`, `in` and loops use the result too; an awaitable of a known type is
an instance of that type; and the wait runs with gradients enabled, or not, as they were when the awaitable was made.
"""

from __future__ import annotations

import abc
import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

from shardwise.jagged.streamable import Traceable

W = TypeVar("W")
ParentW = TypeVar("ParentW")
KT = TypeVar("KT")
VT_co = TypeVar("VT_co", covariant=True)

# in the place of a result, which may itself be None
_NOT_YET: Any = object()
_WAITING: Any = object()


class Awaitable(abc.ABC, Generic[W]):
    """A result of type W to come. Subclasses say in `_wait_impl` how to get it."""

    # on the class, so that a subclass that forgets super().__init__() works as well
    _result: Any = _NOT_YET
    _error: Exception | None = None

    _callbacks: list[Callable[[W], W]] | None = None

    @abc.abstractmethod
    def _wait_impl(self) -> W: ...

    def wait(self) -> W:
        """The result, after its callbacks. The first call waits; an error of that call is raised by every call."""
        result = self._result
        if result is _NOT_YET:
            return self._first_wait()
        if result is _WAITING:
            if self._error is None:
                raise RuntimeError(f"{type(self).__name__} waits for itself")
            raise self._error
        return cast(W, result)

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions of the result that run in this order when it is there; what the last one returns is the result.

        Raises RuntimeError once the result is there: a callback added now would never run.
        """
        if self._result is not _NOT_YET:
            raise RuntimeError(f"{type(self).__name__} was waited for already: add callbacks before that")
        if self._callbacks is None:
            self._callbacks = []
        return self._callbacks

    def _first_wait(self) -> W:
        self._result = _WAITING
        try:
            if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                with torch.autograd.profiler.record_function(f"## {type(self).__name__} wait() ##"):
                    result = self._wait_impl()
            else:
                result = self._wait_impl()
            for callback in self._callbacks or ():
                result = callback(result)
        except Exception as error:
            self._error = error
            raise
        except BaseException:
            # an interrupted wait has no outcome to remember
            del self._result
            raise
        self._result = result
        return result


class NoWait(Awaitable[W]):
    """A result that is there already, for code that waits."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


def _register(cls: type) -> None:
    """Make `torch.utils._pytree` see the result of `cls`: tree_map and DDP's static graph find its tensors."""
    pytree.register_pytree_node(
        cls,
        lambda lazy: ([lazy.wait()], None),
        lambda leaves, _: next(iter(leaves)),
        flatten_with_keys_fn=_flatten_with_keys,
    )


def _flatten_with_keys(lazy: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return [(pytree.GetAttrKey("result"), lazy.wait())], None


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: function(self.wait())


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(self.wait(), _waited(other))


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(_waited(other), self.wait())


class LazyAwaitable(Traceable, Awaitable[W]):
    """A result that is waited for when it is first used: an attribute, an operator, a torch function, `print`, a loop.

    A subclass that sets `awaited_type` passes `isinstance` for that type without waiting. Copies, pickles and
    `torch.utils._pytree` wait, and see the plain result.
    """

    # the type of the result, where a subclass knows it
    awaited_type: type | None = None
    _modes: tuple[bool, bool] | None = None

    def __init__(self) -> None:
        # whoever waits first may be printing under no_grad; the result must not lose its gradient by that
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # not super(): the property below takes the name that it reads
        super(LazyAwaitable, cls).__init_subclass__(**kwargs)  # noqa: UP008
        _register(cls)

    def _first_wait(self) -> W:
        now = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        grad, inference = now if self._modes is None else self._modes
        if (grad, inference) == now:
            return Awaitable._first_wait(self)
        # this order: leaving inference mode also enables gradients
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return Awaitable._first_wait(self)

    # A module's caller asks isinstance(out, KeyedTensor) as it would of the unsharded module's output; isinstance looks
    # at __class__ where type() does not fit. type() stays ours: torch asks it for __torch_function__, pytree for the
    # node, and pickle, which compares the two, is answered by __reduce_ex__.
    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        result = self._result
        if result is not _NOT_YET and result is not _WAITING:
            return type(result)
        return self.awaited_type or type(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*[_waited(arg) for arg in args], **{k: _waited(v) for k, v in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        # runs for names that neither the awaitable nor its class has
        result = self._result
        if result is _NOT_YET:
            result = self._first_wait()
        elif result is _WAITING:
            if self._error is not None:
                raise self._error
            # of the awaitable itself: asking the result would wait for ever
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(result, name)

    def __copy__(self) -> W:
        return copy.copy(self.wait())

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _same, (self.wait(),)

    def __repr__(self) -> str:
        return repr(self.wait())

    def __str__(self) -> str:
        return str(self.wait())

    def __format__(self, spec: str) -> str:
        return format(self.wait(), spec)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.wait())})

    def __bool__(self) -> bool:
        return bool(self.wait())

    def __len__(self) -> int:
        return len(_sized(self.wait(), "__len__"))

    def __iter__(self) -> Iterator[Any]:
        return iter(_sized(self.wait(), "__iter__"))

    def __contains__(self, item: object) -> bool:
        return item in _sized(self.wait(), "__contains__")

    def __setitem__(self, key: Any, value: Any) -> None:
        cast(Any, self.wait())[key] = _waited(value)

    def __getitem__(self, key: Any) -> Any:
        return cast(Any, self.wait())[_waited(key)]

    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __invert__ = _unary(operator.invert)
    __abs__ = _unary(operator.abs)
    __index__ = _unary(operator.index)
    __int__ = _unary(int)
    __float__ = _unary(float)
    __complex__ = _unary(complex)

    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __add__ = _binary(operator.add)
    __sub__ = _binary(operator.sub)
    __mul__ = _binary(operator.mul)
    __truediv__ = _binary(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __mod__ = _binary(operator.mod)
    __pow__ = _binary(operator.pow)
    __matmul__ = _binary(operator.matmul)
    __lshift__ = _binary(operator.lshift)
    __rshift__ = _binary(operator.rshift)
    __and__ = _binary(operator.and_)
    __or__ = _binary(operator.or_)
    __xor__ = _binary(operator.xor)
    __radd__ = _reflected(operator.add)
    __rsub__ = _reflected(operator.sub)
    __rmul__ = _reflected(operator.mul)
    __rtruediv__ = _reflected(operator.truediv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __rmod__ = _reflected(operator.mod)
    __rpow__ = _reflected(operator.pow)
    __rmatmul__ = _reflected(operator.matmul)
    __rlshift__ = _reflected(operator.lshift)
    __rrshift__ = _reflected(operator.rshift)
    __rand__ = _reflected(operator.and_)
    __ror__ = _reflected(operator.or_)
    __rxor__ = _reflected(operator.xor)

    # the awaitable's own, so that one in a set need not be there yet
    __hash__ = object.__hash__


class LazyNoWait(LazyAwaitable[W]):
    """A result that is there already, for code that expects a lazy one."""

    def __init__(self, obj: W) -> None:
        LazyAwaitable.__init__(self)
        self._obj = obj
        self.awaited_type = type(obj)

    def _wait_impl(self) -> W:
        return self._obj


class LazyGetItemMixin(Generic[KT, VT_co]):
    """Makes `awaitable[key]` lazy too. Comes before `LazyAwaitable` in the list of bases."""

    def __getitem__(self, key: KT) -> LazyAwaitable[VT_co]:
        return GetItemLazyAwaitable(cast(Any, self), key)


class GetItemLazyAwaitable(LazyAwaitable[W], Generic[W, ParentW, KT]):
    """`parent[key]`, when it is used: its first use waits for the parent."""

    def __init__(self, parent: LazyAwaitable[ParentW], key: KT) -> None:
        LazyAwaitable.__init__(self)
        self._parent = parent
        self._key = key

    def _wait_impl(self) -> W:
        return cast(W, cast(Any, self._parent.wait())[self._key])


def _waited(value: Any) -> Any:
    """`value` with the result in the place of each lazy awaitable, also in lists, tuples, dicts and slices."""
    # by type() first: an awaitable may pass for any other type
    kind = type(value)
    if issubclass(kind, LazyAwaitable):
        return value.wait()
    if kind is tuple or kind is list:
        return kind([_waited(item) for item in value])
    if kind is dict:
        return {key: _waited(item) for key, item in value.items()}
    if kind is slice:
        return slice(_waited(value.start), _waited(value.stop), _waited(value.step))
    return value


def _sized(result: Any, method: str) -> Any:
    """What to loop over: a KeyedTensor, which cannot be looped over itself, stands for its keys."""
    return result if hasattr(result, method) or not hasattr(result, "keys") else result.keys()


def _same(result: Any) -> Any:
    return result


_register(LazyAwaitable)
