"""Findings of a check-up as data: a mark, what it is about, what is so, and how to mend it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OK, NOTE, PROBLEM, UNTESTED = "ok", "note", "problem", "not tested"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    `mark` is OK, NOTE (works, and could be better or should be known), PROBLEM (something needed is broken: the status
    is 1) or UNTESTED. `mend` is what to do, a command where there is one; all but OK have it. `data` is for programs.
    """

    mark: str
    what: str
    text: str
    mend: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it; what is empty is left out."""
        content: dict[str, Any] = {"mark": self.mark, "what": self.what, "text": self.text}
        return {
            **content,
            **({"mend": self.mend} if self.mend else {}),
            **({"data": {**self.data}} if self.data else {}),
        }


@dataclass(frozen=True)
class Section:
    """Findings on one subject."""

    name: str
    findings: Sequence[Finding]

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"name": self.name, "findings": [finding.to_json() for finding in self.findings]}


def count(sections: Sequence[Section], mark: str) -> int:
    """How many findings of all sections have this mark."""
    return sum(finding.mark == mark for section in sections for finding in section.findings)
