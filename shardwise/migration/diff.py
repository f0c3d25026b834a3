"""Unified diffs of rewrites, for `patch -p0` and `git apply -p0`: bytes, in the file's own encoding."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import diff_bytes, unified_diff
from io import BytesIO
from pathlib import Path

__all__ = ["folder_of", "unified"]


def folder_of(files: Iterable[Path], working: Path) -> Path:
    """Where a diff of `files` is to be applied: the working folder, or what they share if one lies outside of it."""
    places = [os.path.dirname(os.path.realpath(file)) for file in files]
    working = working.resolve()
    if all(Path(place).is_relative_to(working) for place in places):
        return working
    return Path(os.path.commonpath(places))


def unified(file: Path, before: bytes, after: bytes, folder: Path) -> bytes:
    """The diff of one file, named as `folder` sees it; of a link, the file that it leads to."""
    # neither patch nor git writes through a link
    name = _name(Path(os.path.realpath(file)).relative_to(folder).as_posix())
    lines = diff_bytes(unified_diff, _lines(before), _lines(after), name, name, lineterm=b"\n")
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def _lines(text: bytes) -> Sequence[bytes]:
    """Lines as patch has them: a carriage return is a character."""
    return BytesIO(text).readlines()


def _name(path: str) -> bytes:
    """A path as git writes it in a diff: in quotes if a character needs it, its end marked if it has spaces."""
    raw = os.fsencode(path)
    if any(byte < 32 or byte == 127 or byte in b'"\\' for byte in raw):
        plain = (f"\\{chr(b)}" if b in b'"\\' else chr(b) if 32 <= b < 127 else f"\\{b:03o}" for b in raw)
        return f'"{"".join(plain)}"'.encode()
    return raw + b"\t" if b" " in raw else raw
