"""Optimizer rules: a rule is one small function, traced into the Triton kernel and run by torch as its own twin.

A rule sees distinct rows of a table: w and g [U, D] fp32 (the rows, and their gradients added up), its states, [U, D]
for an "element" state and [U, 1] for a "row" state, then numbers such as lr. It returns the new w and the new states.
Arithmetic, comparisons and the functions below are all it may use; `row` is what `row_sum` and `row_mean` ask for.

    @define_rule(total="row")
    def rowwise_adagrad(w, g, total, row, lr=0.01, eps=1e-8):
        total = total + row_mean(g * g, row)
        return w - lr / (sqrt(total) + eps) * g, total

Letters: U rows that a batch touched, D columns, H hyper-parameters (fp64, on the device), K numbers (fp32).
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._op import direct, loaded, tl, triton

DECAYS = ("none", "l2", "decoupled")
"""How weight decay enters a step: not at all; `g + decay * w`; `w - lr * decay * w`."""
# Parameters of a rule that are neither states nor hyper-parameters
_ROW, _STEP = "row", "step"
_serial = count()


def sqrt(x: Tensor) -> Tensor:
    """Square root, rounded correctly."""
    if x.dtype is not torch.float32 or not direct(x):
        return x.sqrt()
    # torch's own on a CPU is one unit in the last place off for one number in six, and takes longer
    root = torch.empty_like(x)
    with np.errstate(invalid="ignore"):
        np.sqrt(x.numpy(), out=root.numpy())
    return root


def exp(x: Tensor) -> Tensor:
    """e to the power of x."""
    return x.exp()


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return x.log()


def absolute(x: Tensor) -> Tensor:
    """|x|."""
    return x.abs()


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1."""
    return x.sign()


def where(condition: Any, x: Any, y: Any) -> Tensor:
    """x where the condition holds, else y; both are evaluated."""
    return torch.where(condition, x, y)


def maximum(x: Tensor, y: Any) -> Tensor:
    """The larger of both; NaN where one of them is."""
    return x.clamp(min=y)


def minimum(x: Tensor, y: Any) -> Tensor:
    """The smaller of both; NaN where one of them is."""
    return x.clamp(max=y)


def row_sum(x: Tensor, row: Any) -> Tensor:
    """Sum over the columns of each row: [U, D] -> [U, 1]."""
    return x.sum(1, keepdim=True)


def row_mean(x: Tensor, row: Any) -> Tensor:
    """Mean over the columns of each row: [U, D] -> [U, 1]."""
    return x.mean(1, keepdim=True)


# functions of a rule that every machine rounds alike
_EXACT = (sqrt, absolute, sign, where, maximum, minimum)


@triton.jit
def _sqrt(x):  # type: ignore[no-untyped-def]
    return tl.sqrt_rn(x)


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    return tl.exp(x)


@triton.jit
def _log(x):  # type: ignore[no-untyped-def]
    return tl.log(x)


@triton.jit
def _absolute(x):  # type: ignore[no-untyped-def]
    return tl.abs(x)


@triton.jit
def _sign(x):  # type: ignore[no-untyped-def]
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x * 0))


@triton.jit
def _where(condition, x, y):  # type: ignore[no-untyped-def]
    return tl.where(condition, x, y)


@triton.jit
def _maximum(x, y):  # type: ignore[no-untyped-def]
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def _minimum(x, y):  # type: ignore[no-untyped-def]
    return tl.where((x < y) | (x != x), x, y)


@triton.jit
def _row_sum(x, row):  # type: ignore[no-untyped-def]
    # a tile is wider than the row: what a rule makes of the columns past its end counts for nothing
    return tl.sum(tl.where(row[0], x, 0.0), 1, keep_dims=True)


@triton.jit
def _row_mean(x, row):  # type: ignore[no-untyped-def]
    return tl.sum(tl.where(row[0], x, 0.0), 1, keep_dims=True) / row[1]


# what each function of a rule becomes in the kernel
_IN_TRITON: dict[Any, Any] = {
    sqrt: _sqrt, exp: _exp, log: _log, absolute: _absolute, sign: _sign, where: _where, maximum: _maximum,
    minimum: _minimum, row_sum: _row_sum, row_mean: _row_mean,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Rule:
    """An optimizer rule: its function, the states it keeps and the hyper-parameters it takes.

    `states` maps a state's name to "element" or "row", `hyper` a hyper-parameter's name to its default. `scalars`
    computes further numbers from the step count and the hyper-parameters, once per update and in fp64; `accumulator`
    names the state that starts at `initial_accumulator_value`; the others start at 0.
    """

    name: str
    function: Callable[..., Any]
    states: Mapping[str, str]
    hyper: Mapping[str, float]
    numbers: tuple[str, ...]
    takes_row: bool
    scalars: Callable[..., Mapping[str, Any]] | None = field(default=None, repr=False)
    accumulator: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """ "element" or "row" for each state, in the order of the function's arguments."""
        return tuple(self.states.values())

    @property
    def counts_steps(self) -> bool:
        """Whether an update depends on how many came before."""
        return self.scalars is not None or _STEP in self.numbers

    @cached_property
    def takes_hyper(self) -> bool:
        """Whether an update's numbers are the hyper-parameters themselves."""
        return not self.counts_steps and self.numbers == tuple(self.hyper)

    @cached_property
    def is_exact(self) -> bool:
        """Whether every step of the function is rounded correctly, so that all ways to run it on a CPU have its bits.

        Sums over a row, exp, log and powers are not: their order or last digit depends on who computes, and with what.
        """
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body[0]
        except OSError:
            # typed into an interpreter: nobody knows what it does
            return False
        assert isinstance(tree, ast.FunctionDef)
        used = inspect.getclosurevars(self.function)
        outer = [*used.globals.values(), *used.nonlocals.values()]
        others = any(value not in _EXACT if callable(value) else not isinstance(value, (int, float)) for value in outer)
        steps = [node for statement in tree.body for node in ast.walk(statement)]
        inexact = (ast.Attribute, ast.Pow, ast.Mod, ast.FloorDiv, ast.MatMult)
        return not others and not any(isinstance(node, inexact) for node in steps)

    @cached_property
    def in_triton(self) -> Any:
        """The function as a device function of Triton."""
        twins = {function: loaded(twin) for function, twin in _IN_TRITON.items()}
        return loaded(triton.jit(_traced(self.function, twins)))

    def values(self, hyper: Tensor, step: Tensor) -> Tensor:
        """The numbers [K] fp32 of one update from hyper-parameters [H] fp64 and step count [1], all on one device."""
        return hyper.float() if self.takes_hyper else torch.stack(self.exact_values(hyper, step)).float()

    def exact_values(self, hyper: Tensor, step: Tensor) -> list[Tensor]:
        """The numbers [] of `values`, in fp64."""
        values: dict[str, Tensor] = dict(zip(self.hyper, hyper.unbind(), strict=True))
        count = step[0].double()
        if self.scalars is not None:
            values.update(self.scalars(count, **values))
        values[_STEP] = count
        return [values[name] for name in self.numbers]

    def apply(self, w: Tensor, g: Tensor, states: list[Tensor], numbers: Sequence[Tensor]) -> list[Tensor]:
        """The rule by torch: new rows and new states of w, g [U, D] and states [U, D] or [U, 1]."""
        row = [None] if self.takes_row else []
        updated = self.function(w, g, *states, *row, *numbers)
        return list(updated) if self.states else [updated]


class Update(NamedTuple):
    """One optimizer step: what it changes in place, its rule, and whether it is taken at all."""

    weights: Tensor
    states: Sequence[Tensor]
    step: Tensor  # [1] int64, steps so far
    guard: Tensor  # [3]: a batch with a fault is no step
    rule: Rule
    hyper: Tensor  # [H + 1] fp64, the last one the weight decay
    decay: str  # of DECAYS
    seed: Tensor | None  # by which rows are rounded to a dtype of 16 bits


RULES: dict[str, Rule] = {}
"""Name -> rule, of the rules defined so far."""


def define_rule(
    *,
    scalars: Callable[..., Mapping[str, Any]] | None = None,
    accumulator: str | None = None,
    **states: str,
) -> Callable[[Callable[..., Any]], Rule]:
    """Make a rule of a function `f(w, g, <states>, [row], <numbers>)`; keywords declare its states.

    Numbers with a default are hyper-parameters; `step` is the count of updates; others come from `scalars`, a function
    of the step count and the hyper-parameters that returns them by name.

    Raises:
        ValueError: the function's arguments do not fit the declaration; names them.
    """

    def define(function: Callable[..., Any]) -> Rule:
        name = getattr(function, "__name__", "<lambda>")
        # a second rule of a name does not change the first under the tables that it trains
        number = 2
        while name in RULES:
            name = f"{function.__name__}:{number}"
            number += 1
        rule = _read(name, function, states, scalars, accumulator)
        RULES[name] = rule
        return rule

    return define


def rule_named(name: str) -> Rule:
    """The rule of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in RULES:
        raise ValueError(f"unknown optimizer rule {name!r}: expected one of {', '.join(RULES)}")
    return RULES[name]


def _read(
    name: str,
    function: Callable[..., Any],
    states: Mapping[str, str],
    scalars: Callable[..., Mapping[str, Any]] | None,
    accumulator: str | None,
) -> Rule:
    wrong = {state: kind for state, kind in states.items() if kind not in ("element", "row")}
    if wrong:
        raise ValueError(f"rule {name!r}: a state is kept per 'element' or per 'row', got {wrong}")
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise ValueError(f"rule {name!r} must be a function defined with `def`: Triton reads its source")
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters]
    if names[2 : 2 + len(states)] != list(states) or names[:2] != ["w", "g"]:
        raise ValueError(f"rule {name!r}: its arguments must begin with {['w', 'g', *states]}, got {names}")
    numbers = parameters[2 + len(states) :]
    takes_row = bool(numbers) and numbers[0].name == _ROW
    numbers = numbers[1:] if takes_row else numbers
    hyper = {p.name: p.default for p in numbers if p.default is not p.empty}
    if scalars is not None:
        hyper = {p.name: p.default for p in list(inspect.signature(scalars).parameters.values())[1:]} | hyper
        made = set(scalars(torch.ones((), dtype=torch.float64), **{k: torch.tensor(v) for k, v in hyper.items()}))
    else:
        made = set()
    unknown = [p.name for p in numbers if p.name not in hyper and p.name not in made and p.name != _STEP]
    if unknown:
        raise ValueError(f"rule {name!r}: arguments {unknown} have neither a default nor a place among the states")
    if not all(isinstance(value, (int, float)) for value in hyper.values()):
        raise ValueError(f"rule {name!r}: hyper-parameters must be numbers, got {hyper}")
    return Rule(
        name, function, dict(states), hyper, tuple(p.name for p in numbers), takes_row, scalars, accumulator
    )  # fmt: skip


def _traced(function: Any, twins: Mapping[Any, Any]) -> Any:
    """The function again, without what Triton cannot read (annotations, decorators), its twins behind its names."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list, definition.returns = [], None
    for argument in definition.args.args:
        argument.annotation = None
    source = ast.unparse(definition)
    file = f"<rule {function.__module__}.{function.__qualname__} {next(_serial)}>"
    # where inspect, and through it Triton, looks a source up
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    names = {name: twins.get(value, value) if callable(value) else value for name, value in names.items()}
    names["tl"] = tl
    exec(compile(source, file, "exec"), names)
    return names[function.__name__]
