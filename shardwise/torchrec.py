"""TorchRec's import paths, served by shardwise: one table, read by `shardwise.torchrec.<path>` and by `install()`.

    from shardwise.torchrec.modules.embedding_modules import EmbeddingBagCollection   # one name, nothing else changes

    import shardwise.torchrec
    shardwise.torchrec.install()                                                      # once, before the first import
    from torchrec.distributed.model_parallel import DistributedModelParallel

A name that the table lacks raises ImportError or AttributeError with that name in the message.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from .torchrec_names import TABLE

__all__ = ["TABLE", "install"]


# the modules of the table and the packages they lie in
_MODULES = {".".join(path.split(".")[:end]) for path in TABLE for end in range(1, path.count(".") + 2)}


def install() -> None:
    """Serve `import torchrec` and everything below it from shardwise, for this process.

    Raises ImportError when the real TorchRec has been imported: half a program would keep its classes.
    """
    if "torchrec" in sys.modules and not isinstance(sys.modules["torchrec"], _Mirror):
        raise ImportError(
            "the real torchrec is already imported: call shardwise.torchrec.install() before the first import of it"
        )
    _Finder.roots["torchrec"] = "torchrec"


def _resolve(path: str, name: str, *, served_as: str) -> object:
    """What TorchRec's `path` calls `name`: ours, or a module of the table; AttributeError if it is neither."""
    if name in TABLE.get(path, {}):
        home, _, ours = TABLE[path][name].partition(":")
        return getattr(import_module(home), ours)
    if f"{path}.{name}" in _MODULES:
        return import_module(f"{served_as}.{name}")
    raise AttributeError(f"shardwise has no counterpart of {path}.{name}")


def _names(path: str) -> list[str]:
    below = {module[len(path) + 1 :].split(".")[0] for module in _MODULES if module.startswith(f"{path}.")}
    return sorted({*TABLE.get(path, {}), *below})


class _Mirror(ModuleType):
    """A module of TorchRec whose names are looked up in the table at first use."""

    path: str

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _resolve(self.path, name, served_as=self.__name__)
        ModuleType.__setattr__(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # torchrec.optim.apply_optimizer_in_backward is a function and a module; as an attribute it is the function
        if isinstance(value, _Mirror) and name in TABLE.get(self.path, {}):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return _names(self.path)


class _Finder(MetaPathFinder, Loader):
    """Makes a `_Mirror` for each module of the table, below this module and, once installed, under TorchRec's name."""

    # the first part of a module's name as imported -> TorchRec's path for it
    roots = {__name__: "torchrec"}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        theirs = self._theirs(fullname)
        if theirs is None:
            return None
        if theirs not in _MODULES:
            # raised here, because `from module import name` drops the message of an AttributeError
            raise ModuleNotFoundError(f"shardwise has no counterpart of {theirs}")
        return ModuleSpec(fullname, self, origin=__file__, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Mirror(spec.name)
        module.path = self._theirs(spec.name) or spec.name
        module.__doc__ = f"What shardwise has of {module.path}."
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are looked up at first use."""

    def _theirs(self, fullname: str) -> str | None:
        for root, theirs in self.roots.items():
            if fullname == root or fullname.startswith(f"{root}."):
                return theirs + fullname[len(root) :]
        return None


# this module is the root of the mirror under our own name
__path__: list[str] = []
if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _resolve("torchrec", name, served_as=__name__)


def __dir__() -> list[str]:
    return sorted({*__all__, *_names("torchrec")})
