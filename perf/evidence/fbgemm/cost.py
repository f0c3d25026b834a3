"""What a call of `torch.ops.fbgemm.X` costs over a call of our function: the dispatcher, and autograd's check.

docs/reference/fbgemm.md keeps what is printed. Runs where FBGEMM is not installed. Not as it has to be: an op that
costs more than 15 us over its function.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.fbgemm import OPS, registered_ops
from shardwise.perf.evidence.report import Report, Section, grid, report_of
from shardwise.perf.suite.options import Options

from .calls import draw_call
from .outcome import flat, outcome

# seconds that one timing takes at least, and timings of each side, which take turns; the fastest counts, as what else
# the machine does can only add to one
LEAST, TURNS = 1e-3, 150
MOST_US = 15.0

OPTIONS: Options = {"--only": {"default": "", "help": "names of ops, between commas; all of them if left out"}}


def run(options: argparse.Namespace) -> Report:
    """Time both of every op."""
    if set(registered_ops()) != set(OPS):
        raise RuntimeError("ops of FBGEMM's own are registered here: run it where fbgemm_gpu is not installed")
    names = [name for name in OPS if not options.only or name in options.only.split(",")]
    rows, bad = [], []
    for name in names:
        args = _arguments(name)
        function_us, extra_us = _extra_us(getattr(torch.ops.fbgemm, name), OPS[name].function, args)
        rows.append([name, "yes" if _wants_gradient(args) else "", f"{function_us:.1f}", f"{extra_us:.1f}"])
        if extra_us > MOST_US:
            bad.append(f"{name}: {extra_us:.1f} us over our function, {MOST_US:g} at most")
    lines = [f"The fastest of {TURNS} timings of each side, in turns, one thread, small arguments, in us.", ""]
    lines += grid(["op", "gradients wanted", "our function", "the op, over that"], rows)
    return report_of([Section(lines, bad)])


def _arguments(name: str) -> Sequence[Any]:
    """Those of the first call that gives a result, the costlier with gradients before others."""
    calls = [call for seed in range(20) if not (call := draw_call(name, seed)).difference]
    good = [call.args for call in calls if not outcome(OPS[name].function, call).error]
    return max(good, key=_wants_gradient)


def _wants_gradient(args: Sequence[Any]) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in flat(args))


def _extra_us(op: Callable[..., Any], function: Callable[..., Any], args: Sequence[Any]) -> tuple[float, float]:
    """The time of our function, and how much longer the op takes."""
    torch.set_num_threads(1)
    number, seconds = 1, 0.0
    while seconds < LEAST:
        number *= 2
        seconds = _seconds(function, args, number)
    pairs = [(_seconds(function, args, number), _seconds(op, args, number)) for _ in range(TURNS)]
    alone, whole = (min(side) / number * 1e6 for side in zip(*pairs, strict=True))
    return alone, whole - alone


def _seconds(call: Callable[..., Any], args: Sequence[Any], number: int) -> float:
    began = time.perf_counter()
    for _ in range(number):
        call(*args)
    return time.perf_counter() - began
