"""Prints the tables of differences.md from shardwise/migration/differences.json: run it from anywhere."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.migration.differences import differences

PAGE = Path(__file__).with_suffix(".md")
HEAD = ("| | TorchRec | shardwise | why |", "|---|---|---|---|")


def printed(page: str) -> str:
    """The page with every table of a section of `## Different` as the data has it."""
    sections: dict[str, list[str]] = {}
    for row in differences():
        cells = (row.word, row.torchrec, row.shardwise, row.why)
        sections.setdefault(row.section, [*HEAD]).append(f"| {' | '.join(cells)} |")
    for section, lines in sections.items():
        found = re.findall(rf"(?m)^### {re.escape(section)}\n\n((?:\|.*\n)+)", page)
        if len(found) != 1:
            raise ValueError(f"{PAGE.name} has {len(found)} tables below '### {section}'")
        page = page.replace(found[0], "".join(f"{line}\n" for line in lines))
    return page


if __name__ == "__main__":
    PAGE.write_text(printed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
