"""Import statements: what they bind, and how those of TorchRec's names are rewritten and merged.

A name is imported from where we have it: of `from torchrec.optim import LAMB, SGD` the one from `shardwise`, the other
from `shardwise.torchrec.optim`. Statements of one module become one, with its names as isort sorts them, where nothing
that lies between them can notice: at the top of a program imports of the standard library, torch, numpy and TorchRec
may, elsewhere (functions, `try`, `if TYPE_CHECKING`) nothing may. A statement with a comment above it begins anew. One
that has a comment in it, shares its line, has a name that we lack, or binds what another binds to something else stays
by itself. In a program with a line such as `# isort: off` all do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import libcst as cst
import libcst.matchers as match
from libcst.metadata import CodeSpan

from .names import finding, home_of, is_module, mirrored

__all__ = ["Alias", "Edit", "aliases_of", "dotted", "rewrites"]

# of a line that we write
_WIDTH = 88
# bytes from, bytes to, and the text to put there
Edit: TypeAlias = tuple[int, int, str]

_Block: TypeAlias = cst.Module | cst.IndentedBlock
_OURS = ("torchrec", "fbgemm_gpu", "shardwise")
# its import registers the ops of FBGEMM
OPS_MODULE = "shardwise.fbgemm"
# what may be imported between two statements that become one: its import does nothing that ours could notice
_HARMLESS = frozenset({*sys.stdlib_module_names, *_OURS, "numpy", "torch", "typing_extensions"})
_HANDS_OFF = re.compile(rb"#\s*(?:isort|fmt|ruff|yapf)\s*:\s*(?:off|skip|skip_file|disable)\b")
_NEWLINE = re.compile(rb"\r\n?|\n")


@dataclass(frozen=True)
class Alias:
    """One import: of `module` itself, or of `taken` from it; both as written. A star has no node."""

    node: cst.ImportAlias | None
    module: str
    taken: Sequence[str]


@dataclass(frozen=True)
class _Part:
    """What an import takes after its rewrite: a name of a module, or with no name the module that it binds."""

    home: str
    name: str
    binds: str

    @property
    def written(self) -> str:
        return self.name if self.name == self.binds else f"{self.name} as {self.binds}"


@dataclass(frozen=True)
class _Line:
    """A statement on lines of its own, its parts, whether a rewrite changes it, and whether it may join others."""

    node: cst.SimpleStatementLine
    statement: cst.Import | cst.ImportFrom
    parts: Sequence[_Part]
    changes: bool
    joins: bool


def aliases_of(statement: cst.CSTNode) -> Iterator[Alias]:
    """What an import statement imports; nothing of a relative one, or of another statement."""
    if isinstance(statement, cst.Import):
        for alias in statement.names:
            yield Alias(alias, dotted(alias.name), [])
    elif isinstance(statement, cst.ImportFrom) and statement.module is not None and not statement.relative:
        module = dotted(statement.module)
        if isinstance(statement.names, cst.ImportStar):
            yield Alias(None, module, ["*"])
        else:
            for alias in statement.names:
                yield Alias(alias, module, [dotted(alias.name)])


def dotted(node: cst.CSTNode) -> str:
    """`a.b.c` as text."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    assert isinstance(node, cst.Name)
    return node.value


def rewrites(
    tree: cst.Module,
    body: bytes,
    spans: Mapping[cst.CSTNode, CodeSpan],
    starts: Sequence[int] = (),
    *,
    names_ops: bool = False,
) -> tuple[list[Edit], int]:
    """What rewrites the imports of a program, and how many statements that changes.

    `starts` are the bytes at which its pieces begin (the cells of a notebook): no statement leaves its piece.
    `names_ops`: whether it calls ops of FBGEMM's, which importing torchrec would have loaded.
    """
    rewriting = _Rewriting(tree, body, spans, starts)
    rewriting.run()
    if names_ops:
        rewriting.load_ops()
    return rewriting.edits, rewriting.changed


class _Rewriting:
    """A program, and the edits and the count of changed statements so far."""

    def __init__(
        self, tree: cst.Module, body: bytes, spans: Mapping[cst.CSTNode, CodeSpan], starts: Sequence[int]
    ) -> None:
        self.tree, self.body, self.spans, self.starts = tree, body, spans, starts
        self.edits: list[Edit] = []
        self.changed = 0
        self.apart = bool(_HANDS_OFF.search(body))

    def run(self) -> None:
        """Find all edits."""
        done: set[cst.CSTNode] = set()
        for block in [self.tree, *match.findall(self.tree, match.IndentedBlock())]:
            assert isinstance(block, _Block)
            for run in self._runs(block):
                done.update(line.statement for line in run)
                if any(line.changes for line in run):
                    self._rewrite(block, run)
        for statement in match.findall(self.tree, match.Import() | match.ImportFrom()):
            if statement not in done:
                assert isinstance(statement, cst.Import | cst.ImportFrom)
                self._rewrite_alone(statement)

    def load_ops(self) -> None:
        """Import what registers FBGEMM's ops above the first import of ours, unless the program imports it."""
        for statement in match.findall(self.tree, match.Import()):
            for alias in aliases_of(statement):
                if alias.module.split(".")[0] == "fbgemm_gpu" or alias.module.startswith(OPS_MODULE):
                    return
        for node in self.tree.body:
            if isinstance(node, cst.SimpleStatementLine):
                roots = {alias.module.split(".")[0] for alias in aliases_of(node.body[0])}
                if roots & {*_OURS}:
                    begin = self._line_start(self._span(node.body[0])[0])
                    self.edits.append((begin, begin, f"import {OPS_MODULE}{self.tree.default_newline}"))
                    self.changed += 1
                    return

    def _runs(self, block: _Block) -> Iterator[list[_Line]]:
        """The statements of a block that nothing keeps apart."""
        run: list[_Line] = []
        # what the imports between them bind
        others: set[str] = set()
        for node in block.body:
            line = self._line(node)
            joins = line is not None and line.joins
            passed = joins or (isinstance(block, cst.Module) and _is_harmless(node))
            if run and (not passed or _is_commented(node) or self._piece(run[-1].node) != self._piece(node)):
                yield from _agreeing(run, others)
                run, others = [], set()
            if line is not None and joins:
                run.append(line)
                continue
            if line is not None:
                yield [line]
            if isinstance(node, cst.SimpleStatementLine):
                others.update(_binds(alias) for alias in aliases_of(node.body[0]))
        yield from _agreeing(run, others)

    def _line(self, node: cst.CSTNode) -> _Line | None:
        """A statement on lines of its own without a comment, if all that it imports is TorchRec's, FBGEMM's or ours."""
        if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1 or node.trailing_whitespace.comment:
            return None
        [statement] = node.body
        if not isinstance(statement, cst.Import | cst.ImportFrom) or isinstance(statement.semicolon, cst.Semicolon):
            return None
        start, end = self._span(statement)
        aliases = [*aliases_of(statement)]
        if not aliases or b"#" in self.body[start:end]:
            return None
        if any(alias.node is None or alias.module.split(".")[0] not in _OURS for alias in aliases):
            return None
        parts = [_part(alias) for alias in aliases]
        joins = not self.apart and all(map(_is_served, aliases))
        if isinstance(statement, cst.Import):
            if len(aliases) > 1:
                return None
            return _Line(node, statement, parts, aliases[0].module.split(".")[0] in ("torchrec", "fbgemm_gpu"), joins)
        return _Line(node, statement, parts, any(part.home != aliases[0].module for part in parts), joins)

    def _rewrite(self, block: _Block, run: Sequence[_Line]) -> None:
        """Each module at the first statement that imports from it, with the names of all."""
        takers: dict[str, list[_Line]] = {}
        for line in run:
            for home in dict.fromkeys(part.home for part in line.parts):
                takers.setdefault(home, []).append(line)
        # of ours alone, what stands twice may stay so
        takers = {home: lines for home, lines in takers.items() if any(line.changes for line in lines)}
        removed: set[cst.CSTNode] = set()
        for line in run:
            homes = sorted({part.home for part in line.parts} & takers.keys())
            begins = [home for home in homes if takers[home][0] is line]
            if not homes:
                continue
            if not begins:
                removed.add(line.node)
                self.changed += 1
            elif isinstance(line.statement, cst.Import) or (len(homes) == 1 and len(takers[homes[0]]) == 1):
                self._rewrite_alone(line.statement)
            else:
                self._replace(line, {home: takers[home] for home in begins})
        self._remove(block, removed)

    def _replace(self, line: _Line, modules: Mapping[str, Sequence[_Line]]) -> None:
        """Put the statements that import from modules, with what these lines take from them, in the place of a line."""
        start, end = self._span(line.statement)
        indent = self.body[self._line_start(start) : start].decode()
        written = []
        for home, takers in modules.items():
            parts = dict.fromkeys(part for taker in takers for part in taker.parts if part.home == home)
            names = [part.written for part in (sorted(parts, key=_as_isort) if len(takers) > 1 else parts)]
            written.append(_from(home, names, indent, self.tree.default_newline, self.tree.default_indent))
        text = f"{self.tree.default_newline}{indent}".join(written)
        if text.encode() != self.body[start:end]:
            self.edits.append((start, end, text))
            self.changed += 1

    def _remove(self, block: _Block, removed: set[cst.CSTNode]) -> None:
        """Remove statements, with the blank lines above them where others follow."""
        nodes = [*block.body]
        at = 0
        while at < len(nodes):
            last = at
            while last < len(nodes) and nodes[last] in removed:
                last += 1
            if last > at:
                self._remove_together(nodes[at:last], nodes[last] if last < len(nodes) else None)
            at = last + 1

    def _remove_together(self, nodes: Sequence[cst.CSTNode], following: cst.CSTNode | None) -> None:
        begin = self._before_blanks(nodes[0])
        end = self._line_end(self._last_byte(nodes[-1]))
        blank = next((node for node in nodes if _leading(node)), None)
        goes_on = (
            following is not None
            and not _leading(following)
            and self._piece(blank or nodes[0]) == self._piece(following)
        )
        if blank is not None and goes_on:
            # the blank lines now part what is before from what follows
            self._cut(begin, self._before_blanks(blank))
            begin = self._before_newline(self._line_start(self._span(_small(blank))[0]))
        self._cut(begin, end)

    def _cut(self, begin: int, end: int) -> None:
        if begin < end:
            self.edits.append((begin, end, ""))

    def _rewrite_alone(self, statement: cst.Import | cst.ImportFrom) -> None:
        """Change the modules of a statement and nothing else of it."""
        before = len(self.edits)
        aliases = [*aliases_of(statement)]
        if isinstance(statement, cst.Import):
            for alias in aliases:
                root = alias.module.split(".")[0]
                if alias.node is not None and root in ("torchrec", "fbgemm_gpu"):
                    # what is bound without `as` is the root, and the rest is found by attribute
                    whole = alias.node.asname is not None or not is_module(alias.module)
                    written = mirrored(alias.module) if whole else f"{mirrored(root)} as {root}"
                    self.edits.append((*self._span(alias.node.name), written))
        elif aliases and aliases[0].node is not None and statement.module is not None:
            # TorchRec's own path serves all that we have of it
            homes = {home_of(alias.module, alias.taken[0]) for alias in aliases}
            home = homes.pop() if len(homes) == 1 else mirrored(aliases[0].module)
            if home != aliases[0].module:
                self.edits.append((*self._span(statement.module), home))
        self.changed += len(self.edits) > before

    def _piece(self, node: cst.CSTNode) -> int:
        """Which piece of the program a statement lies in."""
        at = self._span(node)[0]
        return sum(start <= at for start in self.starts)

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self.spans[node]
        return span.start, span.start + span.length

    def _last_byte(self, node: cst.CSTNode) -> int:
        return self._span(_small(node))[1]

    def _line_start(self, at: int) -> int:
        return max(self.body.rfind(b"\n", 0, at), self.body.rfind(b"\r", 0, at)) + 1

    def _line_end(self, at: int) -> int:
        newline = _NEWLINE.search(self.body, at)
        return newline.start() if newline else len(self.body)

    def _before_newline(self, at: int) -> int:
        """Where the line before the one that begins at `at` ends."""
        at -= self.body[at - 1 : at] in (b"\n", b"\r")
        return at - (self.body[at - 1 : at + 1] == b"\r\n")

    def _before_blanks(self, node: cst.CSTNode) -> int:
        """Where the line before a statement and the blank lines above it ends."""
        at = self._line_start(self._span(_small(node))[0])
        for _ in _leading(node):
            at = self._line_start(self._before_newline(at))
        return self._before_newline(at)


def _part(alias: Alias) -> _Part:
    assert alias.node is not None
    binds, foreign = _binds(alias), alias.module.split(".")[0] != "shardwise"
    if alias.taken:
        return _Part(home_of(alias.module, alias.taken[0]) if foreign else alias.module, alias.taken[0], binds)
    # `import torchrec.distributed` binds torchrec, whatever it names
    if alias.node.asname or not foreign:
        return _Part(f"{mirrored(alias.module)} as {binds}", "", binds)
    return _Part(f"{mirrored(binds)} as {binds}", "", binds)


def _binds(alias: Alias) -> str:
    """The name that an import gives a value; a star gives all."""
    if alias.node is None:
        return "*"
    if alias.node.asname:
        return dotted(alias.node.asname.name)
    return alias.taken[0] if alias.taken else alias.module.split(".")[0]


def _is_served(alias: Alias) -> bool:
    """Whether its import does not fail."""
    if alias.module.split(".")[0] == "shardwise":
        return True
    return finding(".".join([alias.module, *alias.taken])).status != "missing"


def _is_harmless(node: cst.CSTNode) -> bool:
    """Whether a statement may lie between two that become one: an import of names that we know, and not of all."""
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
        return False
    aliases = [*aliases_of(node.body[0])]
    return bool(aliases) and all(alias.node and alias.module.split(".")[0] in _HARMLESS for alias in aliases)


def _agreeing(run: Sequence[_Line], others: set[str]) -> Iterator[list[_Line]]:
    """The run, and each by itself the statements that bind a name that is bound otherwise there or between them."""
    meanings: dict[str, set[tuple[str, str]]] = {}
    for line in run:
        for part in line.parts:
            meanings.setdefault(part.binds, set()).add((part.home, part.name))
    unclear = {name for name, homes in meanings.items() if len(homes) > 1} | (meanings.keys() & others)
    together = []
    for line in run:
        if unclear.isdisjoint(part.binds for part in line.parts):
            together.append(line)
        else:
            yield [line]
    if together:
        yield together


def _is_commented(node: cst.CSTNode) -> bool:
    return any(line.comment for line in _leading(node))


def _leading(node: cst.CSTNode) -> Sequence[cst.EmptyLine]:
    """Blank lines and comments above a statement."""
    return node.leading_lines if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement) else ()


def _small(node: cst.CSTNode) -> cst.CSTNode:
    """The import statement of a line."""
    assert isinstance(node, cst.SimpleStatementLine)
    return node.body[0]


def _as_isort(part: _Part) -> tuple[int, list[tuple[int, int, str]], str]:
    """Constants, classes, the rest; in each by letters whatever their case, with numbers by value."""
    kind = 0 if part.name.isupper() and len(part.name) > 1 else 1 if part.name[:1].isupper() else 2
    pieces = re.split(r"(\d+)", part.name.lower())
    return kind, [(0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in pieces], part.written


def _from(home: str, names: Sequence[str], indent: str, newline: str, deeper: str) -> str:
    line = f"from {home} import {', '.join(names)}"
    if len(indent) + len(line) <= _WIDTH:
        return line
    listed = "".join(f"{indent}{deeper}{name},{newline}" for name in names)
    return f"from {home} import ({newline}{listed}{indent})"
