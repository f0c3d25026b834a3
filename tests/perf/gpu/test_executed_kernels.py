"""Every kernel, compiled for sm_90 and executed through the op that launches it, gives its reference's values.

The quick cases of `shardwise kernels run`, which has many more with --all.
"""

from __future__ import annotations

import pytest

from shardwise.kernels import ROW_FORMATS
from shardwise.kernels.update.rules import BUILT_IN
from shardwise.perf.gpu.cases import CASES, TOLERANCES, Case, run_case
from shardwise.perf.gpu.launches import kernels

pytestmark = pytest.mark.executed
QUICK = [case for case in CASES if case.quick]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_a_case_has_no_fault_and_the_values_of_its_reference(case: Case) -> None:
    result = run_case(case)
    assert result.wrong == ()
    assert {launch.kernel for launch in result.log.launches} >= {*case.kernels}
    assert all(launch.instructions for launch in result.log.launches)


def test_every_kernel_has_a_quick_case() -> None:
    """A kernel without one would be executed by nobody."""
    covered = {kernel for case in QUICK for kernel in case.kernels}
    assert {*kernels()} - covered == set(), "give each of these a quick case in perf/gpu/cases/"
    assert covered - {*kernels()} == set(), "no kernels are named so; cases say what they are there for"


def test_every_rule_and_format_has_cases() -> None:
    names = [case.name for case in CASES]
    assert len({*names}) == len(names)
    for rule in BUILT_IN:
        assert any(f"update by {rule}, " in name for name in names), rule
    for format in ROW_FORMATS:
        assert any(f"pooled lookup of {format} rows, " in name for name in names), format
        assert any(f"{format} rows in sequence, " in name for name in names), format


def test_every_tolerance_says_why() -> None:
    assert {case.tolerance.name for case in CASES} == {tolerance.name for tolerance in TOLERANCES}
    assert all(len(tolerance.reason) > 20 for tolerance in TOLERANCES)
