"""What lies in the folder of checkpoints and is none: the options, which run of a tracker it is. Or in a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from arguments import Options

from shardwise import checkpoint


def folder_of(options: Options) -> Path | Any:
    """Where the checkpoints go: a path, or a URL, which has `/` and `name` too; None where none are saved."""
    return None if options.checkpoint_dir is None else checkpoint.locate(options.checkpoint_dir)


def read(place: Path | Any) -> bytes | None:
    """What is there; None if nothing is. OSError if the store does not say."""
    try:
        if isinstance(place, Path):
            return place.read_bytes()
        from fsspec.core import url_to_fs

        store, name = url_to_fs(str(place))
        content: bytes = store.cat_file(name)
        return content
    except FileNotFoundError:
        return None


def write(place: Path | Any, content: bytes) -> None:
    """At any moment all of it is there, or what was before."""
    if not isinstance(place, Path):
        from fsspec.core import url_to_fs

        store, name = url_to_fs(str(place))
        # stores that are folders have to have it
        store.makedirs(name.rpartition("/")[0], exist_ok=True)
        store.pipe_file(name, content)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_name(place.name + ".new")
    aside.write_bytes(content)
    os.replace(aside, place)
