"""How many statements each area has, beside those of a commit before it: moved code counts where it came from.

    python perf/evidence/statements.py --base a014a2e            a table: area, statements of the base, of now, percent
    python perf/evidence/statements.py --base a014a2e --by       the same by area of origin and place of now

A statement is an `ast.stmt`: it has no length, so neither blank lines nor comments nor the length of a line count. A
class or function at the top of a module belongs to the area where the base has it: the same text, or else the most
alike of those with its name. What the base has nowhere belongs where most of its file came from, and if none of the
file did, to where the file lies. So what is moved out of an area leaves it no smaller.
Needs the standard library and git.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
AREAS: dict[str, tuple[str, ...]] = {
    "product": (
        *("kernels", "jagged", "embeddings", "fbgemm", "planner", "sharding", "models", "data"),
        *("inference", "shardwise"),
        "setup.py",
    ),
    "perf": ("perf",),
    "tests": ("tests",),
}
# of the texts of two definitions with one name: less in common than this is another definition
ALIKE = 0.3


@dataclass(frozen=True)
class Definition:
    """A class or function at the top of a module, or all else that stands there (name "")."""

    name: str
    # one line a statement, as the syntax tree writes it: formatting and comments are gone
    lines: tuple[str, ...]
    statements: int


def main() -> None:
    parser = argparse.ArgumentParser(description="Statements of each area beside those of an earlier commit.")
    parser.add_argument("--base", required=True, help="The commit before.")
    parser.add_argument("--by", action="store_true", help="Also from which area to which.")
    arguments = parser.parse_args()
    if not _has(arguments.base):
        print(f"this clone has no commit {arguments.base}: nothing to compare with (git fetch --unshallow brings it)")
        sys.exit(2)
    base, now = at_commit(arguments.base), on_disk()
    counted = by_origin(base, now)
    before = Counter({area: sum(map(statements, texts.values())) for area, texts in _by_area(base).items()})
    print(f"{'area':<8} {'base':>8} {'now':>8}  percent")
    for area in AREAS:
        after = sum(count for (origin, _), count in counted.items() if origin == area)
        print(f"{area:<8} {before[area]:>8,} {after:>8,}  {100 * (after / before[area] - 1):+7.2f} %")
    if arguments.by:
        for (origin, place), count in sorted(counted.items()):
            print(f"from {origin:<8} now in {place:<8} {count:>8,}")


def by_origin(base: Mapping[str, str], now: Mapping[str, str]) -> Counter[tuple[str, str]]:
    """Statements of `now` by the area they came from and the area they lie in.

    Args:
        base, now: the text of each Python file, by its path from the root; only those of AREAS count.
    """
    same: dict[Definition, Counter[str]] = defaultdict(Counter)
    named: dict[str, list[tuple[Definition, str]]] = defaultdict(list)
    for area, texts in _by_area(base).items():
        for path, text in texts.items():
            for definition in definitions(text):
                same[definition][path] += 1
                if definition.name:
                    named[definition.name].append((definition, area))
    counted: Counter[tuple[str, str]] = Counter()
    for place, texts in _by_area(now).items():
        for path, text in texts.items():
            stayed = area_of(path) if path in base else None
            origins: Counter[str] = Counter()
            left = 0
            for definition in definitions(text):
                origin = _origin(definition, path, stayed, same, named)
                if origin is None:
                    left += definition.statements
                else:
                    origins[origin] += definition.statements
            # a file of the base keeps its area; of a new one the majority of what is known says it
            rest = stayed or (origins.most_common(1)[0][0] if origins else place)
            origins[rest] += left
            for origin, count in origins.items():
                counted[origin, place] += count
    return counted


def _origin(
    definition: Definition,
    path: str,
    stayed: str | None,
    same: Mapping[Definition, Counter[str]],
    named: Mapping[str, list[tuple[Definition, str]]],
) -> str | None:
    """The area where the base has it; None if it has it nowhere."""
    if not definition.name:
        # constants and imports are alike in many files: they belong to their file
        return stayed
    if definition in same:
        places = same[definition]
        return area_of(path) if path in places else _most(area_of(place) for place in places.elements())
    alike = [(_common(definition, other), area) for other, area in named.get(definition.name, [])]
    # where several are as alike as this, the one that stayed
    share, _, area = max(((share, area == stayed, area) for share, area in alike), default=(0.0, False, ""))
    return area if share >= ALIKE else None


def _common(first: Definition, second: Definition) -> float:
    """Lines that both have, of those of the longer one."""
    shared = (Counter(first.lines) & Counter(second.lines)).total()
    return shared / max(len(first.lines), len(second.lines))


def _most(areas: Iterable[str | None]) -> str | None:
    return Counter(areas).most_common(1)[0][0]


def definitions(text: str) -> Iterator[Definition]:
    """Those of a module, in order, and last what else it has at its top, as one."""
    rest: list[ast.stmt] = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield _definition(node.name, [node])
        else:
            rest.append(node)
    yield _definition("", rest)


def _definition(name: str, nodes: list[ast.stmt]) -> Definition:
    lines = tuple(line.strip() for node in nodes for line in ast.unparse(node).splitlines())
    return Definition(name, lines, sum(isinstance(below, ast.stmt) for node in nodes for below in ast.walk(node)))


def statements(text: str) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def area_of(path: str) -> str | None:
    """The area that a path from the root lies in; None for examples, documents and others that are not counted."""
    return next((area for area, folders in AREAS.items() if path.split("/")[0] in folders), None)


def _by_area(texts: Mapping[str, str]) -> dict[str, dict[str, str]]:
    by_area: dict[str, dict[str, str]] = {area: {} for area in AREAS}
    for path, text in texts.items():
        if (area := area_of(path)) is not None:
            by_area[area][path] = text
    return by_area


def _has(commit: str) -> bool:
    asked = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    try:
        return subprocess.run(asked, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def at_commit(commit: str) -> dict[str, str]:
    """The text of each Python file of a commit."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-tree", "-r", "-z", commit], capture_output=True, text=True, check=True
    ).stdout
    # a link's text is a path, and no Python
    entries = [entry.split(maxsplit=3) for entry in listed.split("\0") if entry.endswith(".py")]
    blobs = {path: blob for mode, _, blob, path in entries if mode != "120000" and area_of(path) is not None}
    asked = "".join(f"{blob}\n" for blob in blobs.values()).encode()
    answer = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "--batch"], input=asked, capture_output=True, check=True
    ).stdout
    texts = {}
    for path in blobs:
        head, answer = answer.split(b"\n", 1)
        size = int(head.split()[2])
        texts[path], answer = answer[:size].decode(), answer[size + 1 :]
    return texts


def on_disk(root: Path = ROOT) -> dict[str, str]:
    """The text of each Python file that git knows or would know, as it is on the disk now."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = {path for path in listed.split("\0") if path.endswith(".py") and area_of(path) is not None}
    return {path: (root / path).read_text(encoding="utf-8") for path in paths if (root / path).is_file()}


if __name__ == "__main__":
    main()
