"""The reader for a folder, chosen by the files in it."""

from __future__ import annotations

from pathlib import Path

from .criteo import Criteo, criteo_files
from .movielens import MovieLens, find_table
from .rows import BadRowPolicy
from .source import Source


def open_folder(folder: str | Path, *, on_bad_row: BadRowPolicy = "raise") -> Source:
    """The reader for `folder`: MovieLens (ratings.csv and movies.csv) or Criteo (.tsv, .txt), plain or .gz.

    Raises:
        ValueError: it holds neither.
        FileNotFoundError: there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if find_table(folder, "ratings") is not None:
        return MovieLens(folder, on_bad_row=on_bad_row)
    if criteo_files(folder):
        return Criteo(folder, on_bad_row=on_bad_row)
    names = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise ValueError(
        f"{folder}: no data that shardwise reads. It looks for MovieLens (ratings.csv and movies.csv) and Criteo "
        f"(*.tsv or *.txt), each plain or .gz; the folder holds {shown or 'nothing'}"
    )
