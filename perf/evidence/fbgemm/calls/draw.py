"""Random arguments of ops, the same numbers on every machine: Python's generator makes them, no torch version does.

A function of a file beside this one draws one call of an op; `CALLS` is the table of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass
class Call:
    """Arguments of one call of an op, in the order of its schema; tensors that want gradients say so themselves.

    `kind` says in a word or two what is special, for reports. `difference` is what docs/reference/differences.md says
    of such calls where results are not to be compared. `compared` picks what of the outputs is defined; all of them
    where it is None. `packed`: the peer is given contiguous copies, as its op reads views as though they were
    contiguous.
    """

    args: Sequence[Any]
    kind: str = ""
    difference: str = ""
    packed: bool = False
    compared: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    # what the op gives, in plain Python, of ops that the peer has no CPU code for
    expected: Callable[[], Sequence[Any]] | None = field(default=None, repr=False)


# op -> draws a call of it
CALLS: dict[str, Callable[[Draw], Call]] = {}


def calls(*ops: str) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    """Draw the calls of these ops by the decorated function; `draw.op` says which it is."""

    def define(function: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
        for op in ops:
            assert op not in CALLS, f"calls of {op} are drawn twice"
            CALLS[op] = function
        return function

    return define


def draw_call(op: str, seed: int) -> Call:
    """The call of `op` that has this number."""
    return CALLS[op](Draw(op, seed))


class Draw:
    """A source of arguments for a call of `op`; the same op and seed give the same numbers."""

    def __init__(self, op: str, seed: int) -> None:
        self.op, self.seed = op, seed
        self._random = random.Random(f"{op} {seed}")

    def below(self, end: int) -> int:
        """A number of 0 ... end - 1."""
        return int(self._random.random() * end)

    def between(self, low: int, high: int) -> int:
        """A number of low ... high, both included."""
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[self.below(len(options))]

    def coin(self, chance: float = 0.5) -> bool:
        """True with this chance."""
        return self._random.random() < chance

    def index_dtype(self) -> torch.dtype:
        """int32 or int64."""
        return self.choice((torch.int32, torch.int64))

    def ints(self, shape: int | Sequence[int], low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Numbers of low ... high, both included."""
        shape = [shape] if isinstance(shape, int) else list(shape)
        return torch.tensor([self.between(low, high) for _ in range(prod(shape))], dtype=dtype).view(shape)

    def lengths(self, n: int, most: int = 4, dtype: torch.dtype = torch.int64) -> Tensor:
        """n lengths of 0 ... most, a quarter of them 0; all of them once in ten calls."""
        empty = self.coin(0.1)
        return torch.tensor([0 if empty or self.coin(0.25) else self.between(0, most) for _ in range(n)], dtype=dtype)

    def offsets(self, lengths: Tensor) -> Tensor:
        """Offsets of these lengths [n + 1], in their dtype."""
        return torch.tensor([0, *torch.cumsum(lengths.long(), 0).tolist()], dtype=lengths.dtype)

    def floats(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32, *, grad: bool = False, scale: float = 2.0
    ) -> Tensor:
        """Numbers of -scale ... scale."""
        shape = [shape] if isinstance(shape, int) else list(shape)
        values = [scale * (2 * self._random.random() - 1) for _ in range(prod(shape))]
        return torch.tensor(values, dtype=torch.float64).to(dtype).view(shape).requires_grad_(grad)

    def permutation(self, n: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """0 ... n - 1 in another order."""
        return torch.tensor(sorted(range(n), key=lambda _: self._random.random()), dtype=dtype)

    def layout(self, tensor: Tensor, chance: float = 0.3) -> Tensor:
        """The same values, with this chance as a view that is not contiguous; gradients go to the view."""
        if not self.coin(chance) or tensor.dim() == 0:
            return tensor
        wide = torch.stack([tensor.detach(), torch.zeros_like(tensor)], -1)
        return wide[..., 0].requires_grad_(tensor.requires_grad)
