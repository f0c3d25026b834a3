"""Where the tests keep the loops that numba compiles: by the hash of their sources, outside of the checkout.

Numba keeps them beside the sources, so that every clean clone compiled them anew: 20 s of a core for three files of
tests. Here they lie in ${XDG_CACHE_HOME:-~/.cache}/shardwise/loops-<hash of all that decides them>, for processes of
pytest and of ranks; the CPU is in numba's own index. Kernels of Triton lie in its cache, by source as well. What other
programs compile stays beside the sources.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from checkout import ROOT

KEPT_FOLDERS = 8
SOURCES = ROOT / "kernels"


def folder() -> Path:
    """Where the loops of these sources are kept, for this numba and this Python."""
    import numba

    parts = [numba.__version__, sys.version, *(path.read_text() for path in sorted(SOURCES.rglob("*.py")))]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "shardwise" / f"loops-{digest}"


def keep_loops() -> str:
    """Have this process keep loops in `folder()`; says where, and whether there are any yet. "" without numba."""
    try:
        from numba.core import caching
    except ImportError:
        return ""
    names = vars(caching)
    # numba 0.61 and before, and later ones
    kept: Any = names.get("CacheImpl") or names["_CacheImpl"]
    locator: Any = names["_CacheLocator"]
    place = folder()
    cold = not any(place.glob("*.nbi"))
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"loops are kept beside their sources: {error}"
    older = sorted(place.parent.glob("loops-*"), key=lambda path: path.stat().st_mtime)[:-KEPT_FOLDERS]
    for path in older:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)

    class BySource(locator):  # type: ignore[misc]
        """Loops of the checkout, by the hash that their folder is named after."""

        def __init__(self, line: int) -> None:
            self.line = line

        def get_cache_path(self) -> str:
            return str(place)

        def get_source_stamp(self) -> str:
            return place.name

        def get_disambiguator(self) -> str:
            return str(self.line)

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            if not Path(py_file).resolve().is_relative_to(SOURCES):
                return None
            return cls(py_func.__code__.co_firstlineno)

    kept._locator_classes = [BySource, *kept._locator_classes]
    return f"loops of the CPU: {'none are kept yet, this run compiles them into' if cold else 'kept in'} {place}"
