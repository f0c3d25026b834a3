"""Which names of TorchRec a program uses, and the program with its imports rewritten: from source, without running it.

Needs libcst, the extra `migrate`. Only import statements are touched, and of them only the
names of modules and, where one statement becomes two, its lines. Names inside strings are left alone.
"""

from __future__ import annotations

import ast
import codecs
import io
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import libcst as cst
import libcst.matchers as match
from libcst import metadata

from .names import (
    MIRROR,
    home_of,
    is_module,
    mirrored,
    name_at,
)

__all__ = ["Edit", "Program", "Unreadable", "Use", "edited", "parsed", "read_body", "read_program"]

# of a line that we write
_WIDTH = 88


# bytes from, bytes to, and the text to put there
Edit: TypeAlias = tuple[int, int, str]


@dataclass(frozen=True)
class Use:
    """A name of TorchRec at a line, of a notebook at a line of a cell; both count from 1.

    The name ends with `.*` where a module is imported with a star.
    """

    name: str
    line: int
    cell: int | None = None


@dataclass(frozen=True)
class Program:
    """What a program uses, in the order of lines, and its source with the imports rewritten."""

    uses: Sequence[Use]
    rewritten: bytes


class Unreadable(ValueError):
    """A file that is no Python; `line`, of a notebook in `cell`, counts from 1."""

    def __init__(self, line: int, message: str, cell: int | None = None) -> None:
        super().__init__(message)
        self.line, self.cell = line, cell


@dataclass(frozen=True)
class _Alias:
    """One import: of `module` itself, or of `taken` from it; both as written. A star has no node."""

    node: cst.ImportAlias | None
    module: str
    taken: Sequence[str]


def read_program(source: bytes) -> Program:
    """The names of TorchRec that `source`, a Python file, uses, and its text with the imports rewritten.

    Raises:
        Unreadable: it is not in its encoding, which is UTF-8 if it declares none, or no Python.
    """
    mark = codecs.BOM_UTF8 if source.startswith(codecs.BOM_UTF8) else b""
    body, encoding = source[len(mark) :], _declared(source)
    if encoding:
        try:
            body = body.decode(encoding).encode()
        except ValueError as error:
            raise Unreadable(1, f"not {encoding}, which it declares: {error}") from None
    uses, edits = read_body(body)
    body = edited(body, edits)
    return Program(tuple(uses), mark + (body.decode().encode(encoding) if encoding else body))


def read_body(body: bytes) -> tuple[list[Use], list[Edit]]:
    """The uses in a program in UTF-8, in the order of lines, and what rewrites its imports.

    Raises:
        Unreadable: it is not UTF-8, or no Python.
    """
    try:
        read = _Reading(parsed(body), body)
        uses = {*read.imported(), *read.accessed()}
        return sorted(uses, key=lambda use: (use.line, use.name)), [*read.edits()]
    except RecursionError:
        raise Unreadable(1, "an expression is nested too deeply") from None


def edited(body: bytes, edits: Iterable[Edit]) -> bytes:
    """The program with the edits made."""
    for start, end, text in sorted(edits, reverse=True):
        body = body[:start] + text.encode() + body[end:]
    return body


def _declared(source: bytes) -> str:
    """The encoding in a comment of the first two lines, if it is another than UTF-8."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    except SyntaxError as error:
        if "unknown encoding" in str(error):
            raise Unreadable(1, f"no Python: {error}") from None
        # not UTF-8: said with the line when it is read
        return ""
    return "" if encoding.startswith("utf-8") else encoding


def parsed(body: bytes) -> cst.Module:
    """The tree of a program in UTF-8.

    Raises:
        Unreadable: it is not UTF-8, or no Python.
    """
    problem = _refused(body)
    if problem and "nested" in problem.msg:
        raise Unreadable(problem.lineno or 1, "an expression is nested too deeply")
    try:
        return cst.parse_module(body.decode())
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise Unreadable(line, f"not UTF-8: byte 0x{body[error.start]:02x}") from None
    except cst.ParserSyntaxError as error:
        line, message = error.raw_line, error.message
    except RecursionError:
        raise Unreadable(1, "an expression is nested too deeply") from None
    # Python says it shorter, and where strings end
    if problem:
        line, message = problem.lineno or line, problem.msg
    raise Unreadable(line, f"no Python: {message}")


def _refused(body: bytes) -> SyntaxError | None:
    """Why this Python does not read the program; it stops at depths where the parser of libcst ends the process."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(body)
    except SyntaxError as error:
        return error
    except (RecursionError, MemoryError):
        return SyntaxError("nested too deeply")
    except ValueError as error:
        return SyntaxError(str(error))
    return None


class _Reading:
    """A parsed program with what libcst knows of its nodes: lines, bytes, parents and scopes."""

    def __init__(self, tree: cst.Module, body: bytes) -> None:
        # a tree fresh from the parser has no node twice, so it need not be copied
        wrapper = metadata.MetadataWrapper(tree, unsafe_skip_copy=True)
        self.body = body
        self.newline = tree.default_newline
        self.lines = wrapper.resolve(metadata.PositionProvider)
        self.spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
        self.parents = wrapper.resolve(metadata.ParentNodeProvider)
        scopes = {scope for scope in wrapper.resolve(metadata.ScopeProvider).values() if scope is not None}
        bindings = (one for scope in scopes for one in scope.assignments)
        self.bindings = [one for one in bindings if isinstance(one, metadata.ImportAssignment)]
        self.statements = match.findall(tree, match.Import() | match.ImportFrom())

    def imported(self) -> Iterator[Use]:
        """The names in import statements, each at its own line."""
        for statement in self.statements:
            for alias in _aliases(statement):
                name = name_at(alias.module, alias.taken)
                if name is not None:
                    yield Use(name, self._line(alias.node or statement))

    def accessed(self) -> Iterator[Use]:
        """The names wherever what was imported is used, which scopes tell from others that are called the same."""
        for binding in self.bindings:
            for alias in _aliases(binding.node):
                if alias.node is None or not f"{_bound(alias.node)}.".startswith(f"{binding.name}."):
                    continue
                for access in binding.references:
                    chain = self._chain(access.node)
                    # a string that is an annotation has no chain
                    if not chain:
                        continue
                    # `import a.b` binds a
                    start = alias.module if alias.taken or alias.node.asname else chain[0]
                    name = name_at(start, alias.taken)
                    if not alias.taken or name is None or is_module(name):
                        name = name_at(start, [*alias.taken, *chain[1:]])
                    if name is not None:
                        yield Use(name, self._line(access.node))

    def edits(self) -> Iterator[Edit]:
        """What rewrites the imports."""
        for statement in self.statements:
            if isinstance(statement, cst.ImportFrom):
                yield from self._edits_of_from(statement)
                continue
            for alias in _aliases(statement):
                if alias.node is None or alias.module.split(".")[0] != "torchrec":
                    continue
                # what is bound without `as` is the root, and the rest is found by attribute
                root = f"{MIRROR} as torchrec"
                whole = alias.node.asname is not None or not is_module(alias.module)
                yield (*self._span(alias.node.name), mirrored(alias.module) if whole else root)

    def _edits_of_from(self, statement: cst.ImportFrom) -> Iterator[Edit]:
        # home -> what is imported from it, as written
        groups: dict[str, list[str]] = {}
        for alias in _aliases(statement):
            if alias.node is None:
                return
            written = _dotted(alias.node.name)
            written += f" as {_dotted(alias.node.asname.name)}" if alias.node.asname else ""
            groups.setdefault(home_of(alias.module, _dotted(alias.node.name)), []).append(written)
        if statement.module is None or not groups:
            return
        module = _dotted(statement.module)
        start, end = self._span(statement)
        if len(groups) > 1 and self._has_its_line(statement) and b"#" not in self.body[start:end]:
            indent = self.body[self.body.rfind(b"\n", 0, start) + 1 : start].decode()
            lines = [_from(home, groups[home], indent, self.newline) for home in sorted(groups)]
            yield start, end, f"{self.newline}{indent}".join(lines)
            return
        # a statement that stays one has one home, and TorchRec's own path serves all that we have of it
        home = next(iter(groups)) if len(groups) == 1 else mirrored(module)
        if home != module:
            yield (*self._span(statement.module), home)

    def _has_its_line(self, statement: cst.ImportFrom) -> bool:
        above = self.parents[statement]
        return isinstance(above, cst.SimpleStatementLine) and len(above.body) == 1

    def _chain(self, node: cst.CSTNode) -> list[str]:
        """The names of the longest `a.b.c` that `node` begins; empty if it is no name."""
        while isinstance(above := self.parents.get(node), cst.Attribute) and above.value is node:
            node = above
        return _dotted(node).split(".") if isinstance(node, cst.Name | cst.Attribute) else []

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.lines[node].start.line)

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self.spans[node]
        return span.start, span.start + span.length


def _aliases(statement: cst.CSTNode) -> Iterator[_Alias]:
    if isinstance(statement, cst.Import):
        for alias in statement.names:
            yield _Alias(alias, _dotted(alias.name), [])
    elif isinstance(statement, cst.ImportFrom) and statement.module is not None and not statement.relative:
        module = _dotted(statement.module)
        if isinstance(statement.names, cst.ImportStar):
            yield _Alias(None, module, ["*"])
        else:
            for alias in statement.names:
                yield _Alias(alias, module, [_dotted(alias.name)])


def _bound(alias: cst.ImportAlias) -> str:
    """What an alias binds; of `import a.b` libcst has bindings a.b and a."""
    return _dotted(alias.asname.name) if alias.asname else _dotted(alias.name)


def _dotted(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    assert isinstance(node, cst.Name)
    return node.value


def _from(home: str, names: Sequence[str], indent: str, newline: str) -> str:
    line = f"from {home} import {', '.join(names)}"
    if len(indent) + len(line) <= _WIDTH:
        return line
    listed = "".join(f"{indent}    {name},{newline}" for name in names)
    return f"from {home} import ({newline}{listed}{indent})"
