"""Differences of behaviour to TorchRec: the rows of docs/reference/differences.md, read from differences.json.

The page is printed from them by `python docs/reference/differences.py`; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

__all__ = ["WORDS", "Difference", "Word", "differences", "differences_of"]

Word: TypeAlias = Literal["numbers", "error", "looks"]
# the gravest first; of a difference that is several the first is said
WORDS: Mapping[Word, str] = {
    "numbers": "results differ in value",
    "error": "one raises or refuses where the other does not, or does it otherwise",
    "looks": "names, types, texts, logs or the plan differ",
}


@dataclass(frozen=True)
class Difference:
    """A row of the page: what TorchRec does, what shardwise does and why; `names` are TorchRec's that it is about.

    `quant.X` is X as `torchrec.quant` has it.
    """

    section: str
    word: Word
    torchrec: str
    shardwise: str
    why: str
    names: Sequence[str]

    @property
    def link(self) -> str:
        """Where it stands in the repository."""
        return f"docs/reference/differences.md#{self.section.lower().replace(' ', '-')}"


@cache
def differences() -> Sequence[Difference]:
    """All of them, in the order of the page."""
    sections = json.loads(Path(__file__).with_name("differences.json").read_text(encoding="utf-8"))
    return tuple(
        Difference(section, row["word"], row["torchrec"], row["shardwise"], row["why"], tuple(row["names"].split()))
        for section, rows in sections.items()
        for row in rows
    )


@cache
def differences_of(name: str) -> Sequence[Difference]:
    """Those that are about one name, the gravest first."""
    return tuple(sorted((row for row in differences() if name in row.names), key=lambda row: [*WORDS].index(row.word)))
