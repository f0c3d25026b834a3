"""One rank's step among 64 and 512 is counted as the repository says, and its calls do not grow with the ranks.

Takes some 20 s and more: plans of 856 tables for 512 ranks are made, and steps of them run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.distributed as dist

from shardwise.kernels import numba_loops
from shardwise.kernels._op import INTERPRETED
from shardwise.perf.counts import baseline, many_ranks
from shardwise.perf.counts.calls import Called, peak_bytes
from shardwise.perf.counts.many_ranks import CASES, Case, counted, fake_ranks, grown
from shardwise.perf.counts.steps import Counts
from shardwise.perf.evidence.report import ROOT

pytestmark = pytest.mark.skipif(
    INTERPRETED or not numba_loops.compiles(), reason="counts are of the path of the CPU with numba"
)
BY_TABLES = [pytest.param(tables, marks=[pytest.mark.full] if tables > 26 else []) for tables in (26, 856)]
BY_CASE = [pytest.param(case, marks=[pytest.mark.full] if case.tables > 26 else [], id=str(case)) for case in CASES]

of_case = cache(counted)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory is not filled: that would be more calls."""
    yield


def kept() -> dict[str, Counts]:
    """The repository's counts of these versions."""
    counts = baseline.read(many_ranks.BASELINE)
    if (here := baseline.versions()) not in counts:
        pytest.skip(f"the repository has no counts of {here}: python -m shardwise.perf.counts.many_ranks --update")
    return counts[here]


@pytest.mark.parametrize("case", BY_CASE)
def test_a_step_among_many_ranks_counts_as_the_repository_says(case: Case) -> None:
    """Messages have exactly these bytes; calls and live bytes may fall, and then `--update` keeps it."""
    wanted, (counts, _) = kept()[str(case)], of_case(case)
    for name in ("header bytes", "bytes sent", "bytes received"):
        assert counts[name] == wanted[name]
    rose = [change for change in baseline.changes({"step": wanted}, {"step": counts}) if change.rose]
    assert not rose, "\n".join(map(str, rose))


@pytest.mark.parametrize("tables", BY_TABLES)
def test_python_calls_do_not_grow_with_ranks(tables: int) -> None:
    few, many = (calls for _, calls in (of_case(Case(world, tables)) for world in (64, 512)))
    rises = grown(few, many)
    assert not rises, "\n".join(rises)


def test_a_function_that_more_ranks_call_more_often_is_named() -> None:
    route, op = (
        Called(str(ROOT / "sharding/engine/route.py"), 7, "route"),
        Called(str(ROOT / "kernels/_op.py"), 1, "op"),
    )
    link = Called(str(ROOT / "shardwise/sharding/engine/shards.py"), 9, "look_up")
    few = Counter({route: 64, link: 1, op: 3})
    assert grown(few, few) == grown(few, Counter({route: 60, op: 5})) == []
    assert grown(few, Counter({route: 512, link: 1000, op: 5})) == [
        "sharding/engine/shards.py:9 look_up 1 -> 1,000",
        "sharding/engine/route.py:7 route 64 -> 512",
    ]


def test_most_bytes_at_a_time_are_those_that_live_together() -> None:
    def run() -> None:
        for _ in range(3):
            torch.empty(1000)
        kept = torch.empty(500)
        torch.empty(2000)
        del kept
        torch.empty(2400)

    assert peak_bytes(run) == 4 * 2500


def test_a_fake_rank_receives_what_it_sends_to_itself_where_sizes_allow_and_zeros_else() -> None:
    with fake_ranks(4) as messages:
        even, uneven = torch.empty(4, 2), torch.ones(6)
        dist.all_to_all_single(even, torch.arange(8.0).view(4, 2))
        dist.all_to_all_single(uneven, torch.arange(4.0), [1, 2, 2, 1], [1, 1, 1, 1])
        assert even.tolist() == [[0.0, 1.0]] * 4 and uneven.tolist() == [0.0] * 6
    assert messages.sent == {"1: float32 among 4": 32, "2: float32 among 4": 16}
    assert messages.received == {"1: float32 among 4": 32, "2: float32 among 4": 24}
