"""Record of the kernels that passed the whole check as they are now: `checked.json`, fingerprints for each Triton.

A fingerprint covers what decides the compiled form and whether it is accepted: the syntax of the kernel and of every
function it calls (comments, docstrings and line breaks change nothing, nor does the file that a function stands in),
what each of its cases asks of the compiler (types, alignment, constants and so the tile, warps, registers), the
targets, and what is promised. A kernel whose fingerprint is not in the table is compiled again by the
tests; `shardwise kernels check --record` writes those into the table that have passed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .cases import Case
from .checks import promised
from .compiled import TARGETS, has_case

TABLE = Path(__file__).resolve().parent / "checked.json"
_NO_TABLE = "is no table of kernels by version of triton"
_MENDED = "take it from git, or delete it and have `make kernels-check` write it anew"


def fingerprints(cases: Sequence[Case]) -> dict[str, str]:
    """Kernel, of an update with its rule -> fingerprint of all its cases, which do not depend on their order."""
    sources: dict[int, str] = {}
    lines: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        asked = [case.name, case.types, case.aligned, case.num_warps, case.registers, case.fuses, case.rows, case.small]
        constants = {name: _plain(value, sources) for name, value in case.constants.items()}
        targets = {target: promised(case, target) for target in TARGETS if has_case(target, case)}
        lines[group(case)].append(repr([asked, constants, targets, _source(case.kernel, sources)]))
    return {name: _digest("\n".join(sorted(described))) for name, described in sorted(lines.items())}


def group(case: Case) -> str:
    """The name of a case's line of the table: of its kernel, or of an update with its rule."""
    return " ".join(case.name.split()[: 2 if case.kernel_name == "update" else 1])


def changed(cases: Sequence[Case], table: Mapping[str, Mapping[str, str]], version: str) -> list[Case]:
    """Cases of kernels that are not as the whole check passed them on this version of Triton."""
    known = table.get(version, {})
    differing = {name for name, fingerprint in fingerprints(cases).items() if known.get(name) != fingerprint}
    return [case for case in cases if group(case) in differing]


def read_table(path: Path = TABLE) -> dict[str, dict[str, str]]:
    """Version of Triton -> kernel -> fingerprint; nothing where no check was recorded yet.

    Raises:
        ValueError: the file is no such table.
    """
    if not path.exists():
        return {}
    try:
        content: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} {_NO_TABLE} ({error}); {_MENDED}") from None
    tables = content.values() if isinstance(content, dict) else [None]
    if not all(isinstance(table, dict) and all(isinstance(known, str) for known in table.values()) for table in tables):
        raise ValueError(f"{path} {_NO_TABLE}; {_MENDED}")
    return dict(content)


def record(passed: Mapping[str, str], version: str, path: Path = TABLE) -> None:
    """Write the fingerprints of kernels that passed on this version of Triton, taken before they were compiled."""
    table = {**read_table(path), version: dict(passed)}
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def _plain(value: Any, sources: dict[int, str]) -> Any:
    """A constant as text that says the same on every machine: a function by its source."""
    return _source(value, sources) if hasattr(value, "fn") else repr(value)


def _source(kernel: Any, sources: dict[int, str]) -> str:
    """Digest of a kernel's syntax, of the functions that it calls, and of the values that it reads beside arguments."""
    if id(kernel) not in sources:
        sources[id(kernel)] = ""  # one that calls itself
        parts = [syntax(inspect.getsource(kernel.fn)), *_read_beside(kernel.fn, sources)]
        sources[id(kernel)] = _digest("\n".join(parts))
    return sources[id(kernel)]


def syntax(source: str) -> str:
    """A function's syntax tree as text, without its docstring: the same from every version of Python."""
    function = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(function, ast.FunctionDef), source
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return _dumped(function)


def _dumped(node: Any) -> str:
    """As `ast.dump`, which writes empty fields in some versions of Python and not in others."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dumped, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    # names of fields, because a field that is empty is left out
    fields = [f"{name}={_dumped(value)}" for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({', '.join(fields)})"


def _read_beside(function: Any, sources: dict[int, str]) -> Iterator[str]:
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if hasattr(value, "fn"):
            yield f"{name} {_source(value, sources)}"
        elif isinstance(value, (bool, int, float, str, tuple)) or type(value).__name__ == "constexpr":
            yield f"{name} {value!r}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
