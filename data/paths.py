"""Files by path, or by a name that a program has taught iopath to open.

TorchRec opens its data through iopath's `PathManager` of a key. Programs that register handlers of their own (for
`s3://...`, say) have imported iopath; then, and only then, it opens the files here too. Otherwise a path is a path.
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any, Literal, cast

import numpy as np
import numpy.typing as npt

# the key of TorchRec's path manager
PATH_MANAGER_KEY = "torchrec"


def open_path(
    path: str | os.PathLike[str], mode: str = "r", *, path_manager_key: str = PATH_MANAGER_KEY, **open_kw: Any
) -> IO[Any]:
    """The opened file; `open_kw` are arguments of `open`. Text is UTF-8 unless they say otherwise."""
    manager = _path_manager(path_manager_key)
    if manager is not None:
        return cast(IO[Any], manager.open(os.fspath(path), mode, **open_kw))
    if "b" not in mode:
        # newline="": the csv module wants line ends untouched
        open_kw = {"encoding": "utf-8", "newline": "", **open_kw}
    return open(path, mode, **open_kw)


def local_path(path: str | os.PathLike[str], *, path_manager_key: str = PATH_MANAGER_KEY) -> str:
    """Where the file lies on this machine, fetched there first if iopath has to."""
    manager = _path_manager(path_manager_key)
    return os.fspath(path) if manager is None else str(manager.get_local_path(os.fspath(path)))


def load_array(
    path: str | os.PathLike[str], *, path_manager_key: str = PATH_MANAGER_KEY, mmap_mode: Literal["r"] | None = None
) -> npt.NDArray[np.generic]:
    """The array in a .npy file, in memory or mapped. ValueError, with its path, where it is none or not whole."""
    place = local_path(path, path_manager_key=path_manager_key)
    try:
        array = np.load(place, mmap_mode=mmap_mode, allow_pickle=False)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # of damaged headers Python's own parser complains. numpy goes on to say how to load without a check
        text = str(error).split(". ")[0]
        raise ValueError(f"{os.fspath(path)}: no .npy file, or not a whole one: {text}") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError(f"{os.fspath(path)}: no .npy file but an archive of several")
    return array


def _path_manager(key: str) -> Any:
    """iopath's manager of that key, in programs that use iopath."""
    iopath = sys.modules.get("iopath.common.file_io")
    return None if iopath is None else iopath.PathManagerFactory().get(key)
