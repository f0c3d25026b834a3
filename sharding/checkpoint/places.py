"""Where a checkpoint may lie: a path, or a place in a store that a URL names. file:// is a path."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+._\-]*(::[A-Za-z0-9+._\-]+)*://")
# what pathlib makes of s3://bucket
_SCHEME_IN_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+._\-]+:")
# fsspec would write under the final name, without fsync, rename and lock
_LOCAL_SCHEMES = ("file://", "local://")


@dataclass(frozen=True)
class Url(os.PathLike[str]):
    """A place in a store, "s3://bucket/runs/7": it has a `name`, a `parent` and `/`, as a Path has."""

    text: str
    # the file system, once it was asked for, and the process that did; shared by what lies below
    opened: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        """What stands behind the last slash."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """What this lies in."""
        return Url(self.text.rpartition("/")[0], self.opened)

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.text}/{name}", self.opened)

    def __fspath__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[Url], tuple[str]]:
        return Url, (self.text,)


Place = Path | Url


def locate(place: str | os.PathLike[str]) -> Path | Any:
    """A path or file:///path as a Path, a text with another scheme as a `Url`, which has `name`, `parent` and `/` too.

    Raises:
        ValueError: it is a URL that cannot be used: a chain of several, one with a password, with white space around
            it, with "//" or ".." in it, or one that has lost a slash.
    """
    if isinstance(place, Url):
        return place
    text = os.fspath(place)
    scheme = _SCHEME.match(text.lstrip())
    if scheme is None:
        first = Path(text).parts[:1]
        if first and _SCHEME_IN_PATH.fullmatch(first[0].strip()) and not os.path.lexists(first[0]):
            raise ValueError(
                f"{text!r} was a URL before it was a Path, or lacks a slash: give it as a str, s3://bucket say;"
                f" a local folder of the name {first[0]!r} has to be there before"
            )
        return Path(text)
    if text != text.strip():
        raise ValueError(f"{text!r} is a URL with white space around it, where a store would have another place")
    after = text[scheme.end() :]
    rest = after.rstrip("/")
    if "::" in scheme[0] or "::" in rest:
        raise ValueError(f"{text!r} is a chain of URLs: checkpoints need the store itself, without a cache before it")
    if "@" in rest.split("/")[0] and ":" in rest.split("@")[0]:
        raise ValueError(f"the URL of {rest.rpartition('@')[2]!r} has a password, which messages would show")
    if scheme[0].lower() in _LOCAL_SCHEMES:
        if not after.startswith("/"):
            raise ValueError(f"{text!r} has no path from the root on: file:///folder has three slashes")
        return Path(after)
    if strange := {"", ".", ".."} & set(rest.strip("/").split("/")[1:]):
        raise ValueError(
            f"{text!r} has the part {min(strange)!r}, which a store takes for a name: leave it out, as paths do"
        )
    return Url(scheme[0].lower() + (rest or "/"))


def absolute(place: str | os.PathLike[str]) -> Place:
    """`locate`, of a path from the root on."""
    located = locate(place)
    return located if isinstance(located, Url) else located.absolute()


def resolved(place: Place) -> Place:
    """A place by the name that no other one has, links followed."""
    return place if isinstance(place, Url) else place.resolve()
