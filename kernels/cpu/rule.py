"""An optimizer rule (rule.py) as a compiled loop over one row, and the update that applies it to rows in turn.

A rule's function is written for tensors; here it runs on one element at a time, so that nothing is allocated and the
compiler makes vectors of it. Sums over the row are cut out: the function is split before each `row_sum` and `row_mean`
into a function that gives what is to be added, and where the sum stood it reads `row[0]`, `row[1]`, ...

    def part0(w, g, total, row, lr, eps): return g * g
    def rule(w, g, total, row, lr, eps):
        total = total + row[0]
        return w - lr / (sqrt(total) + eps) * g, total
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numba import float32

from ..rule import (
    Rule,
    absolute,
    exp,
    log,
    maximum,
    minimum,
    row_mean,
    row_sum,
    sign,
    sqrt,
    where,
)
from . import update_loops
from .njit import f4
from .update_loops import work
from .vectors import compiled, prefetch, prefetch_row


@compiled()
def _sign(x: Any) -> Any:
    return float32(1) if x > 0 else float32(-1) if x < 0 else x * float32(0)


@compiled()
def _where(condition: Any, x: Any, y: Any) -> Any:
    return x if condition else y


@compiled()
def _maximum(x: Any, y: Any) -> Any:
    return x if (x > y) | (x != x) else y


@compiled()
def _minimum(x: Any, y: Any) -> Any:
    return x if (x < y) | (x != x) else y


# values from outside that a rule may read
_OUTER = (np.generic, bool, tuple, str, type(None))
# what each function of a rule becomes for one element
_OF_ELEMENTS: dict[Any, Any] = {
    sqrt: np.sqrt, exp: np.exp, log: np.log, absolute: np.abs, sign: _sign, where: _where, maximum: _maximum,
    minimum: _minimum,
}  # fmt: skip


def update_of(rule: Rule) -> int:
    """The address of `update_loops.update_buckets` with this rule, compiled.

    Raises:
        Exception: whatever numba or the split has against it: no source, helpers of its own, functions of torch.
    """
    text, names = _source(rule)
    # numba keeps code on disk under a function's name, beside its file: another rule, or another way to read rules,
    # must be a function of another name
    numbers = sorted((name, repr(value)) for name, value in names.items() if isinstance(value, _OUTER))
    digest = sha256(f"{text}{numbers}{Path(__file__).read_text()}".encode()).hexdigest()[:16]
    exec(compile(text, update_loops.__file__, "exec"), names)
    loop, name = update_loops.update_buckets, f"update_buckets_{digest}"
    made = {name: names[name] for name in ("_apply", "_prefetch_states", "_states")}
    function = FunctionType(loop.__code__, {**vars(update_loops), **made, "_STATES": len(rule.states)}, name)
    function.__qualname__ = name
    return work(function)


class _Split(ast.NodeTransformer):
    """Makes fp32 of numbers, and of each sum over the row a look at `row`, while it keeps what is to be added."""

    def __init__(self, sums: dict[str, Any]) -> None:
        self.sums = sums  # the names of row_sum and row_mean
        self.calls: list[tuple[Any, ast.expr]] = []

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
            return ast.Call(ast.Name("_fp32", ast.Load()), [node], [])
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id not in self.sums:
            return node
        self.calls.append((self.sums[node.func.id], node.args[0]))
        return ast.Subscript(ast.Name("row", ast.Load()), ast.Constant(len(self.calls) - 1), ast.Load())


def _source(rule: Rule) -> tuple[str, dict[str, Any]]:
    """Functions _part0, _part1, ..., _rule and _apply as text, and the names that they use."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(rule.function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    used = inspect.getclosurevars(rule.function)
    outer = {**used.globals, **used.nonlocals}
    split = _Split({name: value for name, value in outer.items() if value in (row_sum, row_mean)})
    arguments = ", ".join(argument.arg for argument in definition.args.args)
    done: list[ast.stmt] = []
    texts: list[str] = []
    means: list[bool] = []
    for statement in definition.body:
        before = len(split.calls)
        statement = split.visit(statement)
        for which, added in split.calls[before:]:
            if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)):
                raise ValueError(f"rule {rule.name!r} adds up a row inside of an `if` or a loop")
            texts.append(_function(f"_part{len(texts)}", arguments, [*done, ast.Return(added)]))
            means.append(which is row_mean)
        done.append(statement)
    texts += [_function("_rule", arguments, done), _row_source(rule, means)]
    names = {name: _of_element(value) for name, value in outer.items() if name not in split.sums}
    names |= {
        "_fp32": np.float32, "_inlined": compiled(), "_reordered": compiled(fastmath={"reassoc", "nsz"}),
        "_prefetch": prefetch, "_prefetch_row": prefetch_row, "_f4": f4,
    }  # fmt: skip
    return "\n".join(texts), names


def _function(name: str, arguments: str, body: list[ast.stmt]) -> str:
    return _definition(name, arguments, [ast.unparse(ast.fix_missing_locations(statement)) for statement in body])


def _definition(name: str, arguments: str, lines: Sequence[str], decorator: str = "_inlined") -> str:
    body = textwrap.indent("\n".join(lines), "    ")
    return f"@{decorator}\ndef {name}({arguments}):\n{body}\n"


def _of_element(value: Any) -> Any:
    if callable(value):
        return _OF_ELEMENTS[value]
    return np.float32(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _row_source(rule: Rule, means: Sequence[bool]) -> str:
    """_apply(w, g, states, at, number, numbers): the rule on row `number`, whose element 0 is `at`."""
    kinds, lines = rule.kinds, ["dim = w.shape[0]"]
    for k, kind in enumerate(kinds):
        lines.append(f"s{k} = states[{k}][number]" if kind == "row" else f"s{k} = states[{k}][at : at + dim]")
    lines += [f"n{i} = numbers[{i}]" for i in range(len(rule.numbers))]
    kept = [f"s{k}" if kind == "row" else f"s{k}[d]" for k, kind in enumerate(kinds)]

    def call(function: str, sums: int) -> str:
        added = [f"({''.join(f'r{j}, ' for j in range(sums))})"] if rule.takes_row else []
        return f"{function}({', '.join(['w[d]', 'g[d]', *kept, *added, *(f'n{i}' for i in range(len(rule.numbers)))])})"

    arrays = ["w", "g", *(f"s{k}" for k in range(len(kinds))), *(f"n{i}" for i in range(len(rule.numbers)))]
    texts = []
    for j, mean in enumerate(means):
        given = ", ".join([*arrays, *(f"r{i}" for i in range(j)), "dim"])
        # only this one addition may be reordered
        adding = ["total = _fp32(0)", "for d in range(dim):", f"    total += {call(f'_part{j}', j)}", "return total"]
        texts.append(_definition(f"_total{j}", given, adding, "_reordered"))
        lines.append(f"r{j} = _total{j}({given}){' / _fp32(dim)' if mean else ''}")
    targets = [f"new{k}" if kind == "row" else f"s{k}[d]" for k, kind in enumerate(kinds)]
    lines += ["for d in range(dim):", f"    {', '.join(['w[d]', *targets])} = {call('_rule', len(means))}"]
    lines += [f"states[{k}][number] = new{k}" for k, kind in enumerate(kinds) if kind == "row"]
    fetch = [
        f"_prefetch(states[{k}], number)" if kind == "row" else f"_prefetch_row(states[{k}], at, dim)"
        for k, kind in enumerate(kinds)
    ]
    texts.append(_definition("_apply", "w, g, states, at, number, numbers", lines))
    texts.append(_definition("_prefetch_states", "states, at, number, dim", fetch or ["pass"]))
    views = "".join(f"_f4(tables[{2 + 2 * k}], tables[{3 + 2 * k}]), " for k in range(len(kinds)))
    texts.append(_definition("_states", "tables", [f"return ({views})"]))
    return "".join(texts)
