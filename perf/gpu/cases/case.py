"""A case for the executor: an op run twice, by torch and by its compiled kernels, one result held to the other.

A case makes its inputs anew each time from seeds of its own, so both runs start from the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.perf.gpu import Fault
from shardwise.perf.gpu.launches import Cut, Log, executed, torch_alone
from shardwise.perf.selftest.agreement import Tolerance, compare


@dataclass(frozen=True)
class Case:
    """An op on one set of inputs.

    `kernels` are those that the case is there for ("lookup.pooled.pooled_lookup"); `run` makes the inputs, calls the
    op and returns all that it wrote: tensors, and what is compared as it is. `reference` stands in for `run` where the
    path of CPU tensors is no reference. `programs` is the size of persistent grids, small where loops shall go around;
    unless it `fuses`, the compiler rounds each product and sum by itself.
    """

    name: str
    kernels: tuple[str, ...]
    run: Callable[[], Sequence[Any]]
    tolerance: Tolerance
    quick: bool = False
    programs: int | None = None
    reference: Callable[[], Sequence[Any]] | None = None
    fuses: bool = True


@dataclass(frozen=True)
class Result:
    """How a case went: its launches, the largest difference as a part of the largest value, and what is wrong."""

    case: Case
    log: Log
    difference: float
    wrong: tuple[str, ...]


def name_of(dtype: torch.dtype) -> str:
    """As cases are called: fp16, bf16, int64."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def run_case(case: Case, *, cut: Cut | None = None, shuffle: int | None = None) -> Result:
    """Run a case; with a barrier `cut` out, or with CTAs in another order, as `executed` says."""
    wrong: list[str] = []
    got: Sequence[Any] | None = None
    # the loops of one program for everything go around most often: a barrier may be there for the second time alone
    with executed(programs=1 if cut else case.programs, fuses=case.fuses, cut=cut, shuffle=shuffle) as log:
        try:
            got = case.run()
        except Fault:
            # is in the log
            pass
        except Exception as error:
            # what follows a launch reads what it wrote: without a barrier that may be anything
            first = (str(error).splitlines() or [""])[0]
            wrong.append(f"{type(error).__name__}: {first[:200]}")
    wrong += log.faults
    difference = 0.0
    # what a cut changed is known where it made a fault
    if got is not None and not (cut and wrong):
        with torch_alone():
            expected = (case.reference or case.run)()
        difference, unlike = compare(got, expected, case.tolerance)
        wrong += unlike
    missing = [kernel for kernel in case.kernels if not log.of(kernel)]
    if missing and not wrong:
        wrong.append(f"was not launched: {', '.join(missing)}")
    return Result(case, log, difference, tuple(wrong))
