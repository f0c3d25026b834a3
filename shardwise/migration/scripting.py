"""TorchScript while the alias is installed: what holds KJTs or tables comes back as it is, with one warning.

Programs script their models and functions in passing, to serve them later or for a little speed, and train and
evaluate what they get. TorchScript cannot take ours, so `torch.jit.script` and `torch.jit.trace` hand the eager
callable back; it has `save` and `save_to_buffer`, which raise and name the way to export. All else torch scripts and
traces itself.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = ["leave_torchscript_alone", "pass_torchscript"]

# torch's own functions while ours stand in their places, by name
_ORIGINAL: dict[str, Callable[..., Any]] = {}
# what a callable that was handed back has besides
_SAVES = ("save", "save_to_buffer")
_MARK = "_shardwise_handed_back"


def pass_torchscript() -> None:
    """Put ours in the place of torch.jit's `script`, `trace`, `trace_module`, `save`, `freeze` and its optimizer."""
    import torch

    if not _ORIGINAL:
        for name, ours in _OURS.items():
            _ORIGINAL[name] = getattr(torch.jit, name)
            setattr(torch.jit, name, functools.wraps(_ORIGINAL[name])(ours))


def leave_torchscript_alone() -> None:
    """Undo `pass_torchscript`; what was handed back keeps its `save`, which raises."""
    global _warned
    _warned = False
    if _ORIGINAL:
        import torch

        for name, original in _ORIGINAL.items():
            setattr(torch.jit, name, original)
        _ORIGINAL.clear()


def _script(obj: Any, optimize: None = None, _frames_up: int = 0, _rcb: Any = None, example_inputs: Any = None) -> Any:
    if _holds_tables(obj) or (inspect.isclass(obj) and _is_jagged(obj)):
        return _hand_back(obj, "script")
    try:
        # one frame up from where torch looks for names: this one
        return _ORIGINAL["script"](obj, optimize, _frames_up + 1, _rcb, example_inputs)
    except (NotImplementedError, RuntimeError) as error:
        if not _is_for_us(error, obj):
            raise
        return _hand_back(obj, "script")


def _trace(func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    jagged = (example_inputs, kwargs.get("example_kwarg_inputs"))
    if _holds_tables(func) or _holds_jagged(jagged):
        return _hand_back(func, "trace")
    try:
        return _ORIGINAL["trace"](func, example_inputs, *args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not _is_for_us(error, func):
            raise
        return _hand_back(func, "trace")


def _trace_module(mod: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    if _holds_tables(mod) or _holds_jagged(inputs):
        return _hand_back(mod, "trace_module")
    return _ORIGINAL["trace_module"](mod, inputs, *args, **kwargs)


def _save(m: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    if hasattr(m, _MARK) or _holds_tables(m):
        _refuse_to_save()
    _ORIGINAL["save"](m, f, *args, **kwargs)


def _freeze(mod: Any, *args: Any, **kwargs: Any) -> Any:
    return mod if hasattr(mod, _MARK) else _ORIGINAL["freeze"](mod, *args, **kwargs)


def _optimize_for_inference(mod: Any, *args: Any, **kwargs: Any) -> Any:
    return mod if hasattr(mod, _MARK) else _ORIGINAL["optimize_for_inference"](mod, *args, **kwargs)


_OURS: Mapping[str, Callable[..., Any]] = {
    "script": _script,
    "trace": _trace,
    "trace_module": _trace_module,
    "save": _save,
    "freeze": _freeze,
    "optimize_for_inference": _optimize_for_inference,
}
_warned = False
# of modules that were handed back after torch had begun to compile them
_refused_types: set[type] = set()


def _hand_back(obj: Any, function: str) -> Any:
    """The eager callable, with saves that raise; a bound method as a function, which can have attributes."""
    from shardwise.jagged.scripting import EXPORT_ROUTE

    global _warned
    if not _warned:
        _warned = True
        name = getattr(obj, "__qualname__", type(obj).__name__)
        warnings.warn(
            f"torch.jit.{function} returns {name} as it is: TorchScript cannot take jagged tensors or tables. It"
            f" trains and evaluates; to save it, {EXPORT_ROUTE}",
            stacklevel=_frames_to_the_program(),
        )
    if inspect.isclass(obj):
        return obj
    if inspect.ismethod(obj):
        bound = obj
        obj = functools.wraps(bound)(lambda *args, **kwargs: bound(*args, **kwargs))
    object.__setattr__(obj, _MARK, True)
    for name in _SAVES:
        # a program's own save is none of torch's
        if not hasattr(obj, name):
            object.__setattr__(obj, name, _refuse_to_save)
    return obj


def _refuse_to_save(*args: Any, **kwargs: Any) -> NoReturn:
    from shardwise.jagged.scripting import EXPORT_ROUTE

    raise NotImplementedError(
        f"this is the eager callable, which TorchScript could not take and cannot save: {EXPORT_ROUTE}"
    )


def _frames_to_the_program() -> int:
    """How many frames above `_hand_back` the first one stands that is neither ours here nor torch's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame, level = frame.f_back, level + 1
    return level


def _holds_tables(obj: Any) -> bool:
    """Whether `obj` is a module of ours that has tables, or holds one."""
    import torch

    from shardwise.jagged.scripting import NotScriptable

    if not isinstance(obj, torch.nn.Module) or isinstance(obj, torch.jit.ScriptModule):
        return False
    return any(isinstance(module, NotScriptable) for module in obj.modules())


def _holds_jagged(inputs: Any) -> bool:
    if isinstance(inputs, Mapping):
        return any(map(_holds_jagged, inputs.values()))
    if isinstance(inputs, (tuple, list)):
        return any(map(_holds_jagged, inputs))
    return _is_jagged(type(inputs))


def _is_jagged(cls: type) -> bool:
    from shardwise.jagged.tracing import Traceable

    return issubclass(cls, Traceable)


def _is_for_us(error: Exception, obj: Any) -> bool:
    """Whether `obj` was refused because of a type of ours, now or at an earlier try on a module of one of its types."""
    from shardwise.jagged.scripting import TorchScriptError

    types = _types_in(obj)
    if isinstance(error, TorchScriptError):
        _refused_types.update(types)
        return True
    # what torch says of a type whose first compilation ended halfway
    return "Can't redefine method" in str(error) and not _refused_types.isdisjoint(types)


def _types_in(obj: Any) -> set[type]:
    from torch import nn

    return {type(module) for module in obj.modules()} if isinstance(obj, nn.Module) else set()
