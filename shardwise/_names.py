"""The nearest name that there is to one that is unknown: the same words wherever a person wrote the name.

The standard library alone: whatever reads what a user wrote may import this.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# names less alike than this share of their letters are not meant
_ALIKE = 0.5


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is unknown, ": did you mean 'item'?"; "" where none is alike.

    Case does not count: of "H100" the nearest is "h100".
    """
    by_lower: dict[str, str] = {}
    for name in known:
        by_lower.setdefault(name.lower(), name)
    near = get_close_matches(word.lower(), by_lower, n=1, cutoff=_ALIKE)
    return f": did you mean {by_lower[near[0]]!r}?" if near else ""
