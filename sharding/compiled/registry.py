"""Names of live modules, by which ops in a graph find the module that they were traced for.

A graph holds no module. A name is of one object: a copy gets another, and torch.compile compiles anew for it.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

_numbers = count()
_modules: WeakValueDictionary[str, Any] = WeakValueDictionary()


def name_for_graphs(module: object) -> str:
    """A name of this object, of no other in this process."""
    name = f"{type(module).__name__} {next(_numbers)}"
    _modules[name] = module
    return name


def module_of(name: str) -> Any:
    """The module of a name.

    Raises:
        RuntimeError: it is gone; a graph that was traced for it outlived it.
    """
    module = _modules.get(name)
    if module is None:
        raise RuntimeError(f"{name!r}, for which this graph was compiled, is gone: compile the model again")
    return module


class NamedInGraphs(nn.Module):
    """A module that ops in a graph find by `graph_name`, which its constructor sets; a copy is compiled by itself."""

    graph_name: str

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.graph_name = name_for_graphs(self)
