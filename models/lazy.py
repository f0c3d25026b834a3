"""Modules whose parameters take their shapes from the first input: when functions may be applied to them.

torch's own `LazyModuleMixin` lets `apply` meet parameters that are not there yet, so that an initialisation is lost or
fails; here it raises, and `lazy_apply` waits for the first forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.hooks import RemovableHandle

M = TypeVar("M", bound=nn.Module)


class LazyModuleExtensionMixin(LazyModuleMixin):
    """`torch.nn.modules.lazy.LazyModuleMixin` whose `apply` raises until the first forward has been."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[misc]

    def apply(self, fn: Callable[[nn.Module], None]) -> nn.Module:
        """`nn.Module.apply`.

        Raises:
            RuntimeError: the parameters have no shapes yet.
        """
        if hasattr(self, "_initialize_hook"):
            raise RuntimeError(
                f"Module {type(self).__name__} has not been initialized. Its parameters have no shapes: run a forward"
                " first, or use lazy_apply, which applies the function after it"
            )
        applied: nn.Module = super().apply(fn)  # type: ignore[misc]
        return applied


def lazy_apply(module: M, fn: Callable[[nn.Module], None]) -> M:
    """Apply `fn` to the module and all its children after the first forward from now on, once; returns the module."""
    once = _Once(fn)
    once.handle = module.register_forward_hook(once)
    return module


class _Once:
    """A forward hook that applies a function and is gone; a class, so that a module with it can be copied."""

    def __init__(self, fn: Callable[[nn.Module], None]) -> None:
        self.fn = fn
        self.handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        assert self.handle is not None
        self.handle.remove()
        module.apply(self.fn)
