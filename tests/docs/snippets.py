"""Pages of docs/ whose snippets run: each expression gives what stands behind `# ->`."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# line of the page, statement, what is said of it: None where nothing is
Step = tuple[int, ast.stmt, str | None]


def steps(page: str) -> Iterator[Step]:
    """Every statement of the page's snippets, with the `# ->` behind it or on the lines below it."""
    for block in re.finditer(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        code, before = block[1], page[: block.start(1)].count("\n")
        lines, body = code.splitlines(), ast.parse(code).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            assert node.end_lineno is not None
            comments = re.findall(r"  # -> (.*)$", lines[node.end_lineno - 1])
            for line in lines[node.end_lineno : after.lineno - 1 if after else None]:
                comments += re.findall(r"^# -> (.*)$", line)
            ast.increment_lineno(node, before)
            yield node.lineno, node, " ".join(comments) if comments else None


def outcome(node: ast.stmt, names: dict[str, Any], fails: bool) -> str | None:
    """What an expression prints, or else its repr, or where it `fails` the error; None of other statements."""
    printed = io.StringIO()
    if not isinstance(node, ast.Expr):
        exec(compile(ast.Module([node], []), "<snippet>", "exec", dont_inherit=True), names)
        return None
    code = compile(ast.Expression(node.value), "<snippet>", "eval", dont_inherit=True)
    try:
        with contextlib.redirect_stdout(printed):
            value = eval(code, names)
    except Exception as error:
        if not fails:
            raise
        return "".join(traceback.format_exception_only(error))
    return printed.getvalue() or repr(value)


def plain(text: str) -> str:
    """Without the white space by which torch lines numbers up."""
    return re.sub(r"\s+", " ", text).strip().replace("[ ", "[")


def wrong_snippets(page: Path) -> tuple[list[str], int]:
    """What a page's snippets, run one after another, do not give as it says, and how many give something."""
    module = ModuleType(f"page_{page.stem}")
    # a compiler looks names up in the module that a function says it is of (torch 2.9)
    sys.modules[module.__name__] = module
    names: dict[str, Any] = module.__dict__
    wrong, num_checked = [], 0
    for line, node, expected in steps(page.read_text()):
        result = outcome(node, names, fails=re.match(r"[\w.]+Error: ", expected or "") is not None)
        # backward() and its like have nothing to say
        if result != "None" or expected is not None:
            num_checked += expected is not None
            if plain(result or "") != plain(expected or ""):
                wrong.append(f"line {line}: {plain(result or '')!r} is not {plain(expected or '')!r}")
    return wrong, num_checked
