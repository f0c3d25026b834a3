"""The one list of cases of the regression suite; the runner, the tuner's checks and pytest take them from here."""

from __future__ import annotations

from shardwise.perf.suite.case import Case
from shardwise.perf.suite.cases import (
    command_line,
    jagged,
    keyed,
    lookup,
    modules,
    operations,
    package,
    planner,
    quantized,
    rows,
    served,
    sharded,
    update,
)

CASES: tuple[Case, ...] = tuple(
    case
    for module in (
        lookup, update, rows, quantized, jagged, served, keyed, modules, sharded, planner, package, command_line,
        operations,
    )
    for case in module.CASES
)  # fmt: skip
