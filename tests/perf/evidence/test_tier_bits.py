"""Forty of the runs of `make evidence NAME=tier_bits`: tables over caches have the bits of resident ones.

Takes most of a minute: each run trains a model twice."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

from shardwise.perf.evidence.same_bits.worker import OPTIMIZERS, STRATEGIES
from shardwise.perf.evidence.tiers.bit_cases import BELOW, PIPELINES, SLOTS, Outcome, case_of, compare
from shardwise.perf.evidence.tiers.bits import CASES, WORLDS, outcomes_of, section_of


def test_the_cases_have_all_pipelines_with_all_slots_and_files_every_rule_and_strategy() -> None:
    cases = [case_of(seed) for seed in range(CASES)]
    assert len({(case.pipeline, case.slots, case.below) for case in cases}) == len(PIPELINES) * len(SLOTS) * len(BELOW)
    tables = [table for case in cases for table in case.mix.tables]
    assert {table.optimizer for table in tables} == set(OPTIMIZERS)
    assert {table.strategy for table in tables} == set(STRATEGIES)
    assert {table.dtype for table in tables} == {"fp32", "fp16", "bf16"}
    assert any(case.mix.way == "accumulated" for case in cases) and any(case.mix.clipped for case in cases)
    assert CASES * len(WORLDS) >= 500


def outcomes(seeds: range, folder: str) -> list[Outcome]:
    warnings.simplefilter("ignore")
    return [compare(case_of(seed), dist.get_rank(), dist.get_world_size(), Path(folder)) for seed in seeds]


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(("world", "seeds"), [(1, range(0, 72, 3)), (2, range(1, 72, 6)), (4, range(4, 72, 17))])
def test_forty_cases_train_to_the_bits_of_resident_tables(world: int, seeds: range, tmp_path: Path) -> None:
    by_rank = run_ranks(world, outcomes, seeds, str(tmp_path))
    assert [outcome.differs for rank in by_rank for outcome in rank] == [[]] * world * len(seeds)
    assert all(outcome.compared > 10 for rank in by_rank for outcome in rank)
    total = [outcome for rank in by_rank for outcome in rank]
    # caches were used: rows came again, and others came and went
    assert 0 < sum(o.saves for o in total) < sum(o.misses for o in total) < sum(o.wanted for o in total)


@pytest.mark.full
@pytest.mark.ranks
def test_a_difference_is_named_with_its_case() -> None:
    (outcome,) = outcomes_of(1, range(1, 2))
    section = section_of({1: [outcome]})
    assert section.bad == [] and section.lines[2].startswith("| 1 | 1 | ")
    told = section_of({1: [{"1": {**outcome["1"], "differs": ["output of step 3"]}}]})
    assert [fault.partition(";")[0] for fault in told.bad] == ["case 1 on 1 ranks, rank 0: output of step 3"]
    assert replace(case_of(1), pipeline="none") != case_of(1)
