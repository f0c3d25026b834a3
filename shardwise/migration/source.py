"""Reader of programs: the names of TorchRec in a source file, and the file with its imports rewritten.

Programs are not run; only their import statements are touched, and names inside strings are left alone. Needs libcst,
the extra `migrate`.
"""

from __future__ import annotations

import ast
import codecs
import io
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as match
from libcst import metadata

from .imports import Edit, aliases_of, dotted, rewrites
from .names import OPS_ROOT, finding, is_module, name_at

__all__ = ["Body", "Edit", "Program", "Unreadable", "Use", "edited", "parsed", "read_body", "read_program"]


@dataclass(frozen=True)
class Use:
    """A name of TorchRec at a line, of a notebook at a line of a cell; both count from 1.

    The name ends with `.*` where a module is imported with a star.
    """

    name: str
    line: int
    cell: int | None = None

    @property
    def place(self) -> str:
        """As a report has it: the line, or `cell 3:2`."""
        return str(self.line) if self.cell is None else f"cell {self.cell}:{self.line}"


@dataclass(frozen=True)
class Program:
    """What a program uses, in the order of lines, and its source with the imports rewritten: statements that change."""

    uses: Sequence[Use]
    rewritten: bytes
    imports: int = 0


@dataclass(frozen=True)
class Body:
    """The uses in a program in UTF-8, in the order of lines, what rewrites its imports, and how many that changes."""

    uses: Sequence[Use]
    edits: Sequence[Edit]
    imports: int


class Unreadable(ValueError):
    """A file that is no Python; `line`, of a notebook in `cell`, counts from 1."""

    def __init__(self, line: int, message: str, cell: int | None = None) -> None:
        super().__init__(message)
        self.line, self.cell = line, cell

    @property
    def place(self) -> str:
        """As a report has it: the line, or `cell 3:2`."""
        return str(self.line) if self.cell is None else f"cell {self.cell}:{self.line}"


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
    program = read_body(body)
    body = edited(body, program.edits)
    return Program(program.uses, mark + (body.decode().encode(encoding) if encoding else body), program.imports)


def read_body(body: bytes, starts: Sequence[int] = ()) -> Body:
    """A program in UTF-8; `starts` are the bytes at which the cells of a notebook begin.

    Raises:
        Unreadable: it is not UTF-8, or no Python.
    """
    try:
        read = _Reading(parsed(body))
        uses = {*read.imported(), *read.accessed()}
        names_ops = any(use.name.startswith(OPS_ROOT) and finding(use.name).ours for use in uses)
        edits, changed = rewrites(read.tree, body, read.spans, starts, names_ops=names_ops)
        return Body(tuple(sorted(uses, key=lambda use: (use.line, use.name))), edits, changed)
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

    def __init__(self, tree: cst.Module) -> None:
        # a tree fresh from the parser has no node twice, so it need not be copied
        wrapper = metadata.MetadataWrapper(tree, unsafe_skip_copy=True)
        self.tree = tree
        self.lines = wrapper.resolve(metadata.PositionProvider)
        self.spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
        self.parents = wrapper.resolve(metadata.ParentNodeProvider)
        scopes = {scope for scope in wrapper.resolve(metadata.ScopeProvider).values() if scope is not None}
        bindings = (binding for scope in scopes for binding in scope.assignments)
        self.bindings = [binding for binding in bindings if isinstance(binding, metadata.ImportAssignment)]
        self.statements = match.findall(tree, match.Import() | match.ImportFrom())

    def imported(self) -> Iterator[Use]:
        """The names in import statements, each at its own line."""
        for statement in self.statements:
            for alias in aliases_of(statement):
                name = name_at(alias.module, alias.taken)
                if name is not None:
                    yield Use(name, self._line(alias.node or statement))

    def accessed(self) -> Iterator[Use]:
        """The names wherever what was imported is used, which scopes tell from others that are called the same."""
        for binding in self.bindings:
            for alias in aliases_of(binding.node):
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

    def _chain(self, node: cst.CSTNode) -> list[str]:
        """The names of the longest `a.b.c` that `node` begins; empty if it is no name."""
        while isinstance(above := self.parents.get(node), cst.Attribute) and above.value is node:
            node = above
        return dotted(node).split(".") if isinstance(node, cst.Name | cst.Attribute) else []

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.lines[node].start.line)


def _bound(alias: cst.ImportAlias) -> str:
    """What an alias binds; of `import a.b` libcst has bindings a.b and a."""
    return dotted(alias.asname.name) if alias.asname else dotted(alias.name)
