"""Results that are still on their way: `wait()` gives them, and a lazy one waits when it is first used.

Names and behaviour are TorchRec's (torchrec.distributed.types), with four differences: every awaitable waits once and
remembers the result or the error; printing, `len`, `in` and loops use the result too; an awaitable of a known type is
an instance of that type; and the wait runs with gradients enabled, or not, as they were when the awaitable was made.
"""

from __future__ import annotations

import abc
import copy
import operator
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

from shardwise.jagged.tracing import Traceable

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
    _modes: tuple[bool, bool] | None = None

    def __init__(self) -> None:
        # whoever waits first may be printing under no_grad; the result must not lose its gradient by that
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    @abc.abstractmethod
    def _wait_impl(self) -> W: ...

    def wait(self) -> W:
        """The result, after its callbacks. The first call waits; an error of that call is raised by every call."""
        result = self._result
        if result is _NOT_YET:
            return self._first_wait()
        if result is _WAITING:
            raise self._error or RuntimeError(f"{type(self).__name__} waits for itself")
        return cast(W, result)

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions of the result that run in this order when it is there; what the last one returns is the result.

        Raises:
            RuntimeError: the result is there already: a callback added now would never run.
        """
        if self._result is not _NOT_YET:
            raise RuntimeError(f"{type(self).__name__} was waited for already: add callbacks before that")
        if self._callbacks is None:
            self._callbacks = []
        return self._callbacks

    def _first_wait(self) -> W:
        now = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        grad, inference = self._modes or now
        if (grad, inference) != now:
            # this order: leaving inference mode also enables gradients
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return self._first_wait()
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
        flatten_with_keys_fn=lambda lazy: ([(cast(Any, pytree.GetAttrKey("result")), lazy.wait())], None),
    )


def _of_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method: `function` of the result and of the other operands, which are waited for too."""
    return lambda self, *operands: function(self.wait(), *[_waited(operand) for operand in operands])


def _both_ways(function: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """The methods of a binary operator: with the awaitable to its left, and to its right."""
    return _of_result(function), _of_result(lambda result, left: function(left, result))


class LazyAwaitable(Traceable, Awaitable[W]):
    """A result that is waited for when it is first used: an attribute, an operator, a torch function, `print`, a loop.

    A subclass that sets `awaited_type` passes `isinstance` for that type without waiting. Copies, pickles and
    `torch.utils._pytree` wait, and see the plain result.
    """

    # the type of the result, where a subclass knows it
    awaited_type: type | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # not super(): the property below takes the name that it reads
        super(LazyAwaitable, cls).__init_subclass__(**kwargs)  # noqa: UP008
        _register(cls)

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
        if result is _NOT_YET or result is _WAITING:
            if result is _WAITING and self._error is None:
                # of the awaitable itself: asking the result would wait for ever
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            result = self.wait()
        return getattr(result, name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _waited, (self.wait(),)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.wait())})

    __copy__ = _of_result(copy.copy)
    __repr__ = _of_result(repr)
    __str__ = _of_result(str)
    __format__ = _of_result(format)
    __bool__ = _of_result(bool)
    __len__ = _of_result(lambda result: len(_sized(result, "__len__")))
    __iter__ = _of_result(lambda result: iter(_sized(result, "__iter__")))
    __contains__ = _of_result(lambda result, item: item in _sized(result, "__contains__"))
    __getitem__ = _of_result(operator.getitem)
    __setitem__ = _of_result(operator.setitem)

    __neg__ = _of_result(operator.neg)
    __pos__ = _of_result(operator.pos)
    __invert__ = _of_result(operator.invert)
    __abs__ = _of_result(operator.abs)
    __index__ = _of_result(operator.index)
    __int__ = _of_result(int)
    __float__ = _of_result(float)
    __complex__ = _of_result(complex)

    __eq__ = _of_result(operator.eq)
    __ne__ = _of_result(operator.ne)
    __lt__ = _of_result(operator.lt)
    __le__ = _of_result(operator.le)
    __gt__ = _of_result(operator.gt)
    __ge__ = _of_result(operator.ge)
    __add__, __radd__ = _both_ways(operator.add)
    __sub__, __rsub__ = _both_ways(operator.sub)
    __mul__, __rmul__ = _both_ways(operator.mul)
    __truediv__, __rtruediv__ = _both_ways(operator.truediv)
    __floordiv__, __rfloordiv__ = _both_ways(operator.floordiv)
    __mod__, __rmod__ = _both_ways(operator.mod)
    __pow__, __rpow__ = _both_ways(operator.pow)
    __matmul__, __rmatmul__ = _both_ways(operator.matmul)
    __lshift__, __rlshift__ = _both_ways(operator.lshift)
    __rshift__, __rrshift__ = _both_ways(operator.rshift)
    __and__, __rand__ = _both_ways(operator.and_)
    __or__, __ror__ = _both_ways(operator.or_)
    __xor__, __rxor__ = _both_ways(operator.xor)

    # the awaitable's own, so that one in a set need not be there yet
    __hash__ = object.__hash__


class LazyNoWait(NoWait[W], LazyAwaitable[W]):
    """A result that is there already, for code that expects a lazy one."""

    def __init__(self, obj: W) -> None:
        NoWait.__init__(self, obj)
        self.awaited_type = type(obj)


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


_register(LazyAwaitable)
