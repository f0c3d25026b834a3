"""What a step of a sharded collection calls, counted as beside TorchRec (perf/evidence/compare_sharding.py)."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
from poison import ALLOCATORS
from ranks import run_ranks

from shardwise.perf.counts.calls import listed
from shardwise.perf.evidence.compare_sharding import calls_of_forward, collectives_of_step
from shardwise.perf.suite.cases.sharded_sides import Shape, Stepper
from shardwise.perf.suite.libraries import ours

pytestmark = pytest.mark.ranks

SMALL = Shape(26, 50, 8, 16, 1)


def _counts(strategy: str) -> tuple[dict[str, int], int, int, list[str]]:
    stepper = Stepper(ours(), SMALL, strategy, "rowwise_adagrad")
    with ExitStack() as stack:
        for owner, name in ALLOCATORS:
            # poison calls functions of its own
            stack.enter_context(patch.object(owner, name, getattr(owner, name).__wrapped__))
        called = dict(collectives_of_step(stepper))
        everything, own = calls_of_forward(stepper)
    return called, everything.total(), own.total(), listed(own, 20)


def test_a_third_forward_calls_at_most_300_functions_of_python_and_150_of_our_own() -> None:
    for called, everything, own, most in run_ranks(2, _counts, "table_wise"):
        assert called == {"all_to_all_single": 4}
        assert everything <= 300, most
        assert own <= 150, most
