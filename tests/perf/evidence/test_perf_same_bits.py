"""Two trees train to the same bits: a bit that is flipped in one is told, and the mixes have all that is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.kernels._op import HAS_TRITON
from shardwise.perf.evidence.report import ROOT
from shardwise.perf.evidence.same_bits.compare import (
    MIXES,
    Digests,
    Job,
    first_differences,
    lay_out,
    section_of,
    trained,
)
from shardwise.perf.evidence.same_bits.worker import CODECS, OPTIMIZERS, STRATEGIES, mix_of

ALL = [mix_of(seed) for seed in range(MIXES)]


def test_the_mixes_have_every_strategy_optimizer_codec_and_way() -> None:
    tables = [table for mix in ALL for table in mix.tables]
    assert {table.strategy for table in tables} == set(STRATEGIES)
    assert {table.optimizer for table in tables} == set(OPTIMIZERS)
    assert {table.dtype for table in tables} == {"fp32", "fp16", "bf16"}
    assert {mix.codecs for mix in ALL} == {*CODECS, None}
    assert {mix.way for mix in ALL} == {"plain", "accumulated", "pipelined"}
    for pooled in (True, False):
        assert {mix.variable for mix in ALL if mix.pooled is pooled} == {True, False}
        of_kind = [table for mix in ALL if mix.pooled is pooled for table in mix.tables]
        assert {table.reduction for table in of_kind if table.reduction} == {"partial", "ordered"}
    rowwise = [table for table in tables if "rowwise" in table.optimizer or table.optimizer == "lamb"]
    assert {table.row_state for table in rowwise if table.row_state} == {"shard", "table"}
    assert any(mix.weighted and any(table.mean for table in mix.tables) for mix in ALL)
    for what in ("dedup", "outside", "clipped", "checked", *(["on_cuda"] if HAS_TRITON else [])):
        assert {getattr(mix, what) for mix in ALL} == {True, False}, what
    assert any(mix.empty_features for mix in ALL) and any(0 in mix.batches for mix in ALL)
    sums = [(mix, table) for mix in ALL if mix.pooled for table in mix.tables if table.reduction == "partial"]
    assert {mix.local_size for mix, table in sums if table.strategy == "row_wise"} == {1, 2, 4}
    assert {mix.local_size for mix, table in sums if table.strategy == "grid"} >= {2}


# two ranks, one mix
BEFORE: Sequence[Digests] = ({"0": {"loss": "a", "weight": "b"}}, {"0": {"loss": "c"}})


@pytest.mark.parametrize(
    ("now", "sentences"),
    [
        (BEFORE, []),
        (({"0": {"loss": "x", "weight": "y"}}, {"0": {"loss": "c"}}), ["2 ranks, mix 0, rank 0: loss"]),
        (({"0": {"loss": "a", "weight": "y"}}, {"0": {"loss": "z"}}),
         ["2 ranks, mix 0, rank 0: weight", "2 ranks, mix 0, rank 1: loss"]),
        (({"0": {"loss": "a"}}, {"0": {"loss": "c"}}), ["2 ranks, mix 0, rank 0: weight"]),
        (({"0": {"loss": "a", "weight": "b"}}, {"0": {"loss": "c", "state": "d"}}), ["2 ranks, mix 0, rank 1: state"]),
    ],
    ids=["same", "first", "each rank", "lacks", "has more"],
)  # fmt: skip
def test_the_first_digest_of_a_rank_that_differs_is_named(now: Sequence[Digests], sentences: list[str]) -> None:
    assert [str(difference) for difference in first_differences(2, BEFORE, now)] == sentences
    section = section_of({2: (BEFORE, now)})
    assert section.bad == sentences
    assert ("3 the same" in section.lines[-2]) == (not sentences)


@pytest.mark.full
def test_a_bit_that_is_flipped_while_a_tree_trains_is_told() -> None:
    """Both sides are this tree: what differs is a bit of its tables after the first step, so the second loss."""
    plain, planted = trained(ROOT, Job(1, 2)), trained(ROOT, Job(1, 2, plant=1))
    assert first_differences(1, plain, plain) == []
    (difference,) = first_differences(1, plain, planted)
    assert (difference.mix, difference.rank) == ("1", 0)
    assert difference.name in ("output of step 1", "loss of step 1")
    assert any(name.startswith("weight") for name in plain[0]["1"])
    assert any(name.startswith("state") for name in plain[0]["1"])


def test_a_tree_in_which_shardwise_is_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="set PYTHONPATH to that"):
        trained(tmp_path, Job(1, 1))


def test_a_clone_without_the_commit_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no commit 0000"):
        lay_out("0" * 40, tmp_path)
