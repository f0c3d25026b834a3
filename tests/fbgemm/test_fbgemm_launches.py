"""What docs/reference/fbgemm.md says runs on a GPU for each op is what is launched, counted without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkout import ROOT

from shardwise.fbgemm import OPS
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.perf.evidence.fbgemm.launches import MOVED, launches_of, table


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory is not filled: that would be more launches."""
    yield


needs_triton = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="launches are noted in place of Triton's")
# ops of which each call is one kernel of ours, and reads and writes what it must once
ONE_LAUNCH = (
    "FloatToFP8RowwiseQuantized", "FloatToMSFPQuantized", "Fused8BitRowwiseQuantizedToFloat", "murmur_hash3",
    "pruned_hashmap_lookup", "reorder_batched_ad_indices", "zero_collision_hash",
)  # fmt: skip


def test_every_op_says_what_it_moves_once() -> None:
    named = [name for names in MOVED.values() for name in names]
    assert sorted(named) == sorted(OPS)


@needs_triton
@pytest.mark.full
def test_the_table_is_what_is_launched() -> None:
    """Takes 7 s: it calls every op. `python -m shardwise.perf.evidence.fbgemm.launches` prints the table."""
    page = (ROOT / "docs/reference/fbgemm.md").read_text(encoding="utf-8")
    said = page.split("## What runs on a GPU")[1].split("\n## ")[0].splitlines()
    assert [line for line in said if line.startswith("|")] == table()


@needs_triton
@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_a_call_is_one_launch(name: str) -> None:
    """These were 7 to 100 of torch's."""
    launches = launches_of(name)
    assert launches.count == 1 and "torch" not in launches.runs and launches.waits == 0
