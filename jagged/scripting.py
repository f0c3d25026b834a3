"""What TorchScript meets at our types: an error of ours that names the way out, instead of one from inside it.

`torch.jit.script` compiles a class that stands in an annotation, and a module with all of its children, and
`torch.jit.trace` wants to know what its inputs are. Ours they cannot take: keys and plans are Python. Before it does
either, torch asks a class for `__torch_script_interface__` and `_jit_override_qualname`, a module for
`__prepare_scriptable__`, and calls a module that it traces by `_slow_forward`. We answer there, so that nothing of
torch is patched.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

__all__ = ["EXPORT_ROUTE", "NotScriptable", "TorchScriptError", "Unscripted"]

EXPORT_ROUTE = (
    "export it with torch.export, and compile it for C++ with torch._inductor.aoti_compile_and_package"
    " (docs/howto/export.md has both)"
)
_ALIAS = (
    "under `python -m shardwise.torchrec` and shardwise.torchrec.install() torch.jit.script and torch.jit.trace return"
    " it as it is"
)


class TorchScriptError(NotImplementedError):
    """A jagged type or a module with tables was to be compiled or traced by TorchScript."""

    def __init__(self, name: str) -> None:
        super().__init__(f"TorchScript cannot take {name}: {EXPORT_ROUTE}; {_ALIAS}")


class Unscripted:
    """An attribute of a class that only TorchScript asks for: raises where a module of torch's, `asker`, does."""

    def __init__(self, asker: str) -> None:
        self.asker = asker

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        # for all others (dir, help, inspect, mock) there is no such attribute
        if sys._getframe(1).f_globals.get("__name__") == self.asker:
            raise TorchScriptError(owner.__name__)
        raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")


class NotScriptable:
    """Base of modules with tables: scripting or tracing one, or a module that holds one, raises TorchScriptError."""

    def __prepare_scriptable__(self) -> Any:
        raise TorchScriptError(type(self).__name__)

    # what a module's call becomes while torch.jit.trace runs
    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TorchScriptError(type(self).__name__)
