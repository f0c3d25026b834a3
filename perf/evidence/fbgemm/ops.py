"""Random calls of every op that we serve by FBGEMM's name, beside FBGEMM's own on the CPU.

docs/evidence/beside_fbgemm_ops.md keeps what is printed. Not as it has to be: a result that differs where
docs/reference/differences.md names no difference. `--record` writes what FBGEMM gives for the first calls of each op
into tests/fbgemm/recorded, a file for each family of ops; the tests compare with them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shardwise.fbgemm import OPS
from shardwise.perf.evidence.report import ROOT, Report, Section, grid, report_of
from shardwise.perf.suite.options import FLAG, Options

from .calls import draw_call
from .outcome import Outcome, differences, outcome

RECORDED = ROOT / "tests" / "fbgemm" / "recorded"
# calls of each op whose results are recorded
RECORDS = 4

OPTIONS: Options = {
    "--calls": {"type": int, "default": 10_000, "help": "calls in all, divided among the ops"},
    "--first": {"type": int, "default": 0, "help": "the number of the first call of each op"},
    "--only": {"default": "", "help": "names of ops, between commas; all of them if left out"},
    "--record": {**FLAG, "help": f"write {RECORDED.relative_to(ROOT)}"},
    "--verbose": {**FLAG, "help": "print every call that differs, its arguments too"},
}


def run(options: argparse.Namespace) -> Report:
    """Compare, and record if that is asked for."""
    # registers its ops
    import_module("fbgemm_gpu")
    names = [name for name in OPS if not options.only or name in options.only.split(",")]
    each = -(-options.calls // len(names))
    rows, bad, kinds = [], [], Counter[str]()
    for name in names:
        theirs = getattr(torch.ops.fbgemm, name, None)
        row = _Row(name)
        if theirs is None or str(theirs.default._schema) != f"fbgemm::{OPS[name].schema}":
            bad.append(f"{name}: schema {'absent' if theirs is None else theirs.default._schema}")
        for seed in range(options.first, options.first + each):
            row.add(seed, theirs, options.verbose)
        rows.append(row.cells())
        kinds.update(row.named)
        bad += [f"{name}, call {seed}: {fault}" for seed, fault in row.faults[:3]]
    if options.record:
        record(names)
    header = ["op", "calls", "errors on both sides", "with gradients", "largest difference", "not compared"]
    lines = [f"{each} calls of each of {len(names)} ops, {each * len(names)} in all.", "", *grid(header, rows), ""]
    if kinds:
        lines += ["Not compared, by what [differences.md](../reference/differences.md) says:", ""]
        lines += grid(["difference", "calls"], kinds.most_common())
    return report_of([Section(lines, bad)])


class _Row:
    """What became of one op's calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = self.errors = self.gradients = 0
        self.largest = 0.0
        self.named: Counter[str] = Counter()
        self.faults: list[tuple[int, str]] = []

    def add(self, seed: int, theirs: Any, verbose: bool) -> None:
        """Make one call on both sides."""
        call = draw_call(self.name, seed)
        self.calls += 1
        ours = outcome(OPS[self.name].function, call)
        if call.difference:
            self.named[call.difference] += 1
            if ours.error:
                self.faults.append((seed, f"ours raises where {call.difference}: {ours.error}"))
            return
        if call.expected:
            ours.written, expected = [], Outcome(outputs=list(call.expected()))
        else:
            expected = outcome(theirs, call, packed=call.packed)
        faults, largest = differences(ours, expected)
        self.errors += bool(ours.error and expected.error)
        self.gradients += expected.grads is not None
        self.largest = max(self.largest, largest)
        if faults and verbose:
            print(self.name, seed, call.kind, faults, call.args, expected.outputs, ours.outputs, file=sys.stderr)
        self.faults += [(seed, fault) for fault in faults]

    def cells(self) -> list[object]:
        """The row of the table."""
        largest = f"{self.largest:.1e}" if self.largest else "0"
        skipped = ", ".join(f"{count}" for count in [sum(self.named.values())] if count)
        return [self.name, self.calls, self.errors or "", self.gradients or "", largest, skipped]


def record(names: list[str]) -> None:
    """Write what FBGEMM gives for the first calls of these ops, beside what is recorded of others."""
    from safetensors.torch import load_file, save_file

    families: dict[str, dict[str, Tensor]] = {}
    for name in names:
        tensors = families.setdefault(family(name), {})
        for seed in range(RECORDS):
            call = draw_call(name, seed)
            if call.difference or call.expected:
                continue
            result = outcome(getattr(torch.ops.fbgemm, name), call, packed=call.packed)
            if not result.error:
                tensors |= recorded(name, seed, result)
    for of, tensors in families.items():
        path = RECORDED / f"{of}.safetensors"
        before = load_file(path) if path.exists() else {}
        kept = {key: tensor for key, tensor in before.items() if key.split(" ")[0] not in names}
        save_file(dict(sorted({**kept, **tensors}.items())), path)


def family(name: str) -> str:
    """The file of shardwise/fbgemm that holds the op."""
    return str(OPS[name].function.__module__).rpartition(".")[2]


def recorded(name: str, seed: int, result: Outcome) -> dict[str, Tensor]:
    """Copies of a result's tensors by the names under which they are recorded; FBGEMM gives some arguments back."""
    named = {"output": result.outputs, "argument": result.written, "gradient": result.grads or []}
    return {
        # an op may return an argument, and a file holds no memory twice
        f"{name} {seed} {what} {place}": _as_tensor(value).clone(memory_format=torch.contiguous_format)
        for what, values in named.items()
        for place, value in enumerate(values)
        if value is not None
    }


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)
