"""Whether tables with rows below the device train to the bits of tables that are there as a whole, on 1, 2 and 4 ranks.

Random cases (bit_cases.py): every rule, fp32, fp16 and bf16 with stochastic rounding, every strategy, pipelines that
look up to 64 batches ahead and bring the rows of up to four, slots that are just enough for a batch, for 10 % of the
rows and for all, rows in memory and in files. Compared are losses and outputs of every step, an evaluation, weights and
optimizer states, rank by rank, with those of a plain loop over resident tables, which may diverge: then both end in the
same step and for the same reason. Not as it has to be: one differs, which is named with its case; or a run fails.
`--write` keeps the result beside the others of `perf/results`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.perf.evidence.report import ROOT, Report, Section, grid, report_of, versions
from shardwise.perf.evidence.same_bits.ranks import results_of
from shardwise.perf.evidence.tiers.bit_cases import Case, case_of
from shardwise.perf.suite.options import Options

RESULT = ROOT / "perf" / "results" / "tier_bits.json"
# 216 cases on each number of ranks; so many in a process, which a failure ends
WORLDS, CASES, AT_ONCE, LIMIT_S = (1, 2, 4), 216, 24, 900
# by seed, of one rank
Outcomes = Mapping[str, Mapping[str, Any]]


def outcomes_of(world: int, seeds: range) -> list[Outcomes]:
    """Of each rank.

    Raises:
        RuntimeError: a rank failed, or all took longer than LIMIT_S.
    """
    program = ["-m", "shardwise.perf.evidence.tiers.bit_cases", "--seeds", str(seeds.start), str(seeds.stop)]
    try:
        return results_of(program, world, path=ROOT, limit_s=LIMIT_S)
    except RuntimeError as error:
        raise RuntimeError(f"cases {seeds}, {error}") from None


def section_of(runs: Mapping[int, Sequence[Outcomes]]) -> Section:
    """What of the runs differs, and how many runs there were with each setting."""
    bad, rows = [], []
    counts: dict[str, Counter[str]] = {}
    for world, ranks in runs.items():
        total: Counter[str] = Counter()
        for seed in ranks[0]:
            case = case_of(int(seed))
            for rank, outcome in enumerate(one[seed] for one in ranks):
                first = outcome["differs"][:1]
                bad += [f"case {seed} on {world} ranks, rank {rank}: {name}; {case}" for name in first]
                total.update({name: value for name, value in outcome.items() if isinstance(value, int)})
                total["differ"] += len(outcome["differs"])
            total["runs"] += 1
            for what, values in settings_of(case).items():
                counts.setdefault(what, Counter()).update(values)
        total["ended"] //= world
        names = ("runs", "ended", "compared", "differ", "wanted", "misses", "saves", "grown")
        rows.append([world, *(f"{total[name]:,}" for name in names)])
    header = ["ranks", "runs", "ended early", "tensors", "that differ", "rows wanted", "misses", "saves", "times grown"]
    settings = [
        [what, ", ".join(f"{value} {count}" for value, count in sorted(some.items()))] for what, some in counts.items()
    ]
    return Section([*grid(header, rows), "", *grid(["setting", "runs with it"], settings), ""], bad)


def settings_of(case: Case) -> dict[str, set[str]]:
    """What a case has, by kind."""
    tables = case.mix.tables
    return {
        "pipeline": {case.pipeline if case.mix.way == "plain" else "micro-batches"},
        "slots": {case.slots},
        "below": {case.below},
        "policy": {case.policy},
        "rule": {table.optimizer for table in tables},
        "dtype": {table.dtype for table in tables},
        "strategy": {table.strategy for table in tables},
        "kind": {"pooled" if case.mix.pooled else "sequences", *(["weighted"] if case.mix.weighted else [])},
    }


OPTIONS: Options = {
    "--cases": {"type": int, "default": CASES, "help": f"how many on each number of ranks (default {CASES})"},
    "--first": {"type": int, "default": 0, "help": "the first of them (default 0)"},
    "--worlds": {"type": int, "nargs": "+", "default": WORLDS, "help": "numbers of ranks (default 1 2 4)"},
}


def run(options: argparse.Namespace) -> Report:
    """Train all cases both ways and compare."""
    begin, failed = time.monotonic(), []
    runs: dict[int, list[dict[str, Any]]] = {}
    for world in options.worlds:
        merged: list[dict[str, Any]] = [{} for _ in range(world)]
        for start in range(options.first, options.first + options.cases, AT_ONCE):
            try:
                stop = min(start + AT_ONCE, options.first + options.cases)
                for whole, part in zip(merged, outcomes_of(world, range(start, stop)), strict=True):
                    whole.update(part)
            except RuntimeError as error:
                failed.append(str(error))
        runs[world] = merged
    section = section_of(runs)
    report = report_of([section, Section([], failed)], f"{time.monotonic() - begin:.0f} s")
    if options.write:
        kept = {"versions": versions(), "good": report.good, "table": section.lines, "bad": [*section.bad, *failed]}
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    return report
