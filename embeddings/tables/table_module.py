"""The module that shows tables: each under its name, as a child of a child, whatever memory they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise.jagged.scripting import NotScriptable
from shardwise.jagged.tracing import OneNode


class TableModule(OneNode, NotScriptable, nn.Module):
    """Base of what keeps its tables in groups and shows them as children `<_children_name>.<table>`."""

    _children_name: str

    def _children(self) -> nn.ModuleDict:
        children = self._modules[self._children_name]
        assert isinstance(children, nn.ModuleDict)
        return children

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply `fn` to what a subclass has besides the tables; the groups move the tables themselves, before."""
        children = self._children()
        self._modules[self._children_name] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._modules[self._children_name] = children
        return self
