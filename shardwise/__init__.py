"""shardwise: sharded embedding tables for PyTorch recommender models. This file is the whole public API.

Each name is loaded at first use (PEP 562), so `import shardwise` costs nothing beyond Python itself.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

from ._version import __version__

# The sub-packages are folders beside this one, linked here. A checkout without symlinks finds them through the root.
if not (_Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(_Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from .jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "__version__",
]

# name -> the module that defines it; a test keeps this, __all__ and the imports above in step
_HOME = {
    "JaggedTensor": "jagged",
    "KeyedJaggedTensor": "jagged",
    "KeyedTensor": "jagged",
}
_FOLDERS = ("data", "embeddings", "jagged", "kernels", "models", "perf", "planner", "sharding", "torchrec")


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(_import_module(f".{_HOME[name]}", __name__), name)
    elif name in _FOLDERS:
        value = _import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FOLDERS})
