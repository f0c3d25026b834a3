"""Modules that stand in for TorchRec's, and for the few of FBGEMM that its programs import."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from .._installed import installed_fbgemm
from .._version import __version__
from .fbgemm_names import FBGEMM
from .hints import advice
from .scripting import leave_torchscript_alone, pass_torchscript
from .torchrec_names import TABLE

# what `torchrec.__version__` says: the version whose names these are, and whose code it is
SERVED_VERSION = f"1.8.0+shardwise.{__version__}"
# what `shardwise.torchrec` has of its own, beside the names that it serves
OWN_NAMES = ("TABLE", "install", "uninstall")

_NAMES = {**TABLE, **FBGEMM}
# names that this process asked for, there or not
TAKEN: set[str] = set()
# the modules of the tables and the packages they lie in
MODULES = {".".join(path.split(".")[:end]) for path in _NAMES for end in range(1, path.count(".") + 2)}


def install() -> None:
    """Serve `import torchrec` and everything below it from shardwise, for this process.

    `fbgemm_gpu` too, unless the real one is here: its classes and types, and its ops as `torch.ops.fbgemm.X`
    (`shardwise.fbgemm`), from the first import of either or the first use of an op on. Where the real one is here, its
    own ops are loaded then. An op that is neither's raises AttributeError with what to use.

    `torch.jit.script` and `torch.jit.trace` then return what holds jagged tensors or tables as it is, with one warning.

    Raises:
        ImportError: the real TorchRec has been imported: half a program would keep its classes.
    """
    real = sorted(name for name, module in sys.modules.items() if _is_real(name, module))
    if real:
        raise ImportError(
            f"the real torchrec is already imported ({real[0]}): call shardwise.torchrec.install() before the first"
            " import of it"
        )
    serve("torchrec", original="torchrec")
    if "fbgemm_gpu" not in sys.modules and installed_fbgemm() is None:
        serve("fbgemm_gpu", original="fbgemm_gpu")
    hint_at_ops()
    pass_torchscript()


def uninstall() -> None:
    """Undo `install()`: later imports find the real TorchRec, if there is one. What was imported stays as it is."""
    leave_ops_alone()
    leave_torchscript_alone()
    for root in ("torchrec", "fbgemm_gpu"):
        Finder.roots.pop(root, None)
        for name in [name for name in sys.modules if name == root or name.startswith(f"{root}.")]:
            if isinstance(sys.modules[name], Mirror):
                del sys.modules[name]


def hint_at_ops() -> None:
    """Have `torch.ops.fbgemm.X` load FBGEMM's ops, its own or ours, where X is not registered yet.

    X that is none of them raises AttributeError with what to use.
    """
    import torch
    from torch._ops import _OpNamespace

    class Hinting(_OpNamespace):
        """torch's namespace of the ops of FBGEMM, which loads them at need, with our words for those that are none."""

        # torch names the ops after the module of this class
        __module__ = _OpNamespace.__module__

        def __getattr__(self, op_name: str) -> Any:
            try:
                return super().__getattr__(op_name)
            except AttributeError:
                if op_name.startswith("__"):
                    raise
            import_module("shardwise.fbgemm")
            try:
                return super().__getattr__(op_name)
            except AttributeError as error:
                raise AttributeError(advice(f"torch.ops.fbgemm.{op_name}")) from error

    torch.ops.fbgemm.__class__ = Hinting


def leave_ops_alone() -> None:
    """Undo `hint_at_ops`."""
    if "torch._ops" in sys.modules:
        import torch
        from torch._ops import _OpNamespace

        torch.ops.fbgemm.__class__ = _OpNamespace


def serve(root: str, *, original: str) -> None:
    """Answer imports of `root` and what is below it with what the tables have of `original`."""
    Finder.roots[root] = original
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def resolve(path: str, name: str, *, served_as: str) -> object:
    """What their module `path` calls `name`: ours, or a module of the tables; AttributeError if it is neither."""
    if f"{path}.{name}" not in MODULES:
        TAKEN.add(f"{path}.{name}")
    if name in _NAMES.get(path, {}):
        home, _, attribute = _NAMES[path][name].partition(":")
        return getattr(import_module(home), attribute)
    if f"{path}.{name}" in MODULES:
        return import_module(f"{served_as}.{name}")
    raise AttributeError(advice(f"{path}.{name}"))


def served_names(path: str) -> list[str]:
    """Names and modules that their module `path` has here."""
    below = {module[len(path) + 1 :].split(".")[0] for module in MODULES if module.startswith(f"{path}.")}
    return sorted({*_NAMES.get(path, {}), *below})


class Mirror(ModuleType):
    """A module of theirs whose names are looked up in the table at first use."""

    path: str

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = resolve(self.path, name, served_as=self.__name__)
        ModuleType.__setattr__(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # torchrec.optim.apply_optimizer_in_backward is a function and a module; as an attribute it is the function
        if isinstance(value, Mirror) and name in _NAMES.get(self.path, {}):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return served_names(self.path)


class Finder(MetaPathFinder, Loader):
    """Makes a `Mirror` for each module of the tables."""

    # the first part of a module's name as imported -> their path for it
    roots: dict[str, str] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A mirror's spec; None for modules of others."""
        original = self._original_name(fullname)
        if original is None:
            return None
        if original not in MODULES:
            parent, _, last = original.rpartition(".")
            if last == "__main__" and "main" in _NAMES.get(parent, {}):
                return ModuleSpec(fullname, self, origin=__file__)
            TAKEN.add(original)
            # raised here and without a name, or `from module import name` says it in other words
            raise ModuleNotFoundError(advice(original))
        return ModuleSpec(fullname, self, origin=__file__, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The mirror; its names are not loaded yet."""
        module = Mirror(spec.name)
        module.path = self._original_name(spec.name) or spec.name
        module.__doc__ = f"What shardwise has of {module.path}."
        # for `from module import *`
        module.__all__ = sorted(_NAMES.get(module.path, {}))
        if module.path == "torchrec":
            module.__version__ = SERVED_VERSION
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Names are looked up at first use; ops of FBGEMM are there once either root is, as its own would be."""
        if module.__name__ in ("torchrec", "fbgemm_gpu"):
            import_module("shardwise.fbgemm")

    def get_code(self, fullname: str) -> CodeType:
        """What `python -m` runs of a script of theirs: its `main`."""
        script = fullname.removesuffix(".__main__")
        return compile(f"import sys\nfrom {script} import main\nmain(sys.argv[1:])\n", f"<{script}>", "exec")

    def _original_name(self, fullname: str) -> str | None:
        for root, original in self.roots.items():
            if fullname == root or fullname.startswith(f"{root}."):
                return original + fullname[len(root) :]
        return None


def _is_real(name: str, module: ModuleType) -> bool:
    return (name == "torchrec" or name.startswith("torchrec.")) and not isinstance(module, Mirror)
