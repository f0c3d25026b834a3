"""The nearest name that there is to one that is unknown: the same words wherever a person wrote the name.

The standard library alone: whatever reads what a user wrote may import this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

# names less alike than this share of their letters are not meant
_ALIKE = 0.5
# where every word of many names is one
_ALIKE_OF_MANY = 0.7


def did_you_mean(word: str, known: Iterable[str], alike: float = _ALIKE) -> str:
    """The end of a sentence about a name that is unknown, ": did you mean 'item'?"; "" where none is alike.

    Case does not count: of "H100" the nearest is "h100".
    """
    by_lower: dict[str, str] = {}
    for name in known:
        by_lower.setdefault(name.lower(), name)
    near = get_close_matches(word.lower(), by_lower, n=1, cutoff=alike)
    return f": did you mean {by_lower[near[0]]!r}?" if near else ""


def did_you_mean_of(part: str, names: Iterable[str]) -> str:
    """The same of a part of names: the word of them, or the whole name, that is nearest."""
    names = [*names]
    words = (word for name in names for word in re.findall(r"\w+", name))
    return did_you_mean(part, [*words, *names], _ALIKE_OF_MANY)
