"""What a GPU's self-test compares agrees: the compiled kernels, executed on the CPU, give what the references give."""

from __future__ import annotations

import pytest
import torch

from shardwise.perf.gpu.launches import executed
from shardwise.perf.selftest.agreement import compare
from shardwise.perf.selftest.run import all_checks

# those that torch alone has on every device
WITHOUT_KERNEL = {("distinct ids", "of one list")}
FAMILIES = list(dict.fromkeys(check.family for check in all_checks()))


@pytest.mark.executed
@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_kernels_pass_the_self_test(family: str) -> None:
    for check in all_checks():
        if check.family == family:
            with executed(programs=None, fuses=True, cut=None, shuffle=None) as log:
                got = check.run(torch.device("cpu"))
            assert bool(log.launches) != ((family, check.name) in WITHOUT_KERNEL), check.name
            assert log.faults == [], check.name
            assert compare(got, check.reference(), check.tolerance)[1] == [], check.name
