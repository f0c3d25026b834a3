"""Calibration: the fit finds constants that made the times, and a tiny one on real ranks says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from shardwise import ShardingEnv
from shardwise.planner.constants_measured import CARDS, NUMBERS, Constants
from shardwise.planner.cost.shardwise import ShardwiseCost
from shardwise.planner.search.problem import PARTS
from shardwise.planner.tables import Skew
from shardwise.planner.topology import Topology
from shardwise.sharding.calibration.calibrate import (
    NOTHING,
    Case,
    Measured,
    calibrate,
    cases,
    fit,
    least_squares,
    measure,
    rank_ms,
)
from shardwise.sharding.calibration.trial import batches_of, draw

WORLD = 2
TOPOLOGY = Topology(WORLD, "cpu")
# one of each kind
PICKED = (NOTHING, "one id, row_wise", "bags, table_wise", "sequences, column_wise", "hot, data_parallel")


def _few() -> list[Case]:
    return [case for case in cases() if case.name in PICKED]


def _predicted(constants: Constants) -> list[Measured]:
    """What a machine with these constants would measure."""
    measured = []
    for n in (1, 1 << 12, 1 << 18):
        received = 4 * n * (WORLD - 1)
        measured.append(
            Measured(
                "exchange", f"{n} numbers", constants.exchange_us * 1e-3 + received * 1e-6 / constants.intra_gb_s, n
            )
        )
    for case in cases():
        parts = rank_ms(case.placed(TOPOLOGY), ShardwiseCost(TOPOLOGY, case.batch_size, constants))
        measured.append(Measured("step", case.name, float(parts.sum(axis=0).max())))
        for what, part in (("lookup", "fwd_compute"), ("update", "bwd_compute")) if case.is_apart else ():
            # 0.2 ms for the call
            measured.append(Measured(what, case.name, 0.2 + float(parts[PARTS.index(part)].max())))
    return measured


def expect_steps(estimate: Constants, truth: Constants, rel: float) -> None:
    """Both predict the same steps."""
    for case in cases():
        real, fitted = (
            rank_ms(case.placed(TOPOLOGY), ShardwiseCost(TOPOLOGY, case.batch_size, constants)).sum(axis=0).max()
            for constants in (truth, estimate)
        )
        assert fitted == pytest.approx(real, rel=rel), case.name


def test_the_fit_finds_the_constants_that_made_the_times() -> None:
    truth = CARDS["cpu"].constants.with_(row_gb_s=2.0, id_ns=17.0, intra_gb_s=0.7, inter_gb_s=0.7, step_us=4000.0)
    constants = fit(_predicted(truth), TOPOLOGY, "made up")
    # the times of calls are subtracted with the little that an id takes, and small constants hide behind large ones
    for name in ("intra_gb_s", "exchange_us", "step_us", "copy_gb_s", "update_id_ns", "feature_us"):
        assert getattr(constants, name) == pytest.approx(getattr(truth, name), rel=0.1), name
    expect_steps(constants, truth, 0.03)


def test_the_fit_bears_noise() -> None:
    """Times off by up to 20 % leave predictions of whole steps within 15 %."""
    truth, generator = CARDS["cpu"].constants, np.random.default_rng(3)
    noisy = [
        Measured(entry.what, entry.name, entry.ms * float(generator.uniform(0.8, 1.2)), entry.numbers)
        for entry in _predicted(truth)
    ]
    constants = fit(noisy, TOPOLOGY, "made up")
    expect_steps(constants, truth, 0.15)


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_stays_positive_and_optimal(seed: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: no slope at what is positive, none downwards at what is 0."""
    generator = np.random.default_rng(seed)
    rows, target = generator.uniform(-1, 1, (12, 5)), generator.uniform(-1, 1, 12)
    solution = least_squares(rows, target)
    slope = rows.T @ (rows @ solution - target)
    assert (solution >= 0).all()
    assert np.abs(slope[solution > 0]).max(initial=0) < 1e-9
    assert slope[solution == 0].min(initial=0) > -1e-9


def _measured(few: list[Case]) -> tuple[list[Measured], list[tuple[int, int]]]:
    assert dist.group.WORLD is not None
    progress_calls: list[tuple[int, int]] = []
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    measured = measure(
        env, torch.device("cpu"), seconds=0, progress=lambda *done: progress_calls.append(done), chosen=few
    )
    return measured, progress_calls


@pytest.mark.ranks
def test_all_ranks_measure_the_same_times_of_every_case() -> None:
    few = _few()
    (measured, progress_calls), (other, _) = run_ranks(WORLD, _measured, few)
    assert measured == other and all(entry.ms > 0 for entry in measured)
    assert [entry.name for entry in measured if entry.what == "step"] == [case.name for case in few]
    apart = [case.name for case in few if case.is_apart]
    assert [entry.name for entry in measured if entry.what in ("lookup", "update")] == [
        n for n in apart for _ in range(2)
    ]
    assert progress_calls == [(n, 3) for n in (1, 2, 3)]
    constants = fit(measured, TOPOLOGY, "this machine", few)
    assert all(np.isfinite(getattr(constants, name)) for name in NUMBERS)


@pytest.mark.full
def test_processes_are_started_and_leave_a_file(tmp_path: Path) -> None:
    progress_calls: list[tuple[int, int]] = []
    out = tmp_path / "constants.json"
    constants = calibrate(
        WORLD, "cpu", seconds=0, out=out, progress=lambda *done: progress_calls.append(done), chosen=_few()
    )
    assert Constants.load(out) == constants and constants.source.startswith("measured: 2 cpu ranks")
    assert {entry["what"] for entry in json.loads(out.read_text())["measured"]["times"]} == {
        "exchange", "step", "lookup", "update",
    }  # fmt: skip
    assert progress_calls[-1] == (3, 3)


def test_calibration_needs_two_processes_and_their_gpus() -> None:
    with pytest.raises(ValueError, match="needs 2 processes or more, got 1"):
        calibrate(1)
    with pytest.raises(ValueError, match="as many GPUs"):
        calibrate(torch.cuda.device_count() + 2, "cuda")


def test_cases_have_names_of_their_own_and_fit_any_number_of_ranks() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    for world in (2, 4, 8):
        for case in cases():
            shards = [shard for placed in case.placed(Topology(world, "cpu")) for shard in placed.shards(world)]
            assert shards and all(0 <= shard.rank < world for shard in shards)


def test_batches_have_the_lengths_and_skew_that_tables_say() -> None:
    by_name = {case.name: case for case in cases()}
    case = by_name["hot, table_wise"]
    tables = [table for table, _ in case.tables]
    first, other = batches_of(tables, case.batch_size, 0, torch.device("cpu"))[:2]
    assert first.keys() == [feature.name for table in tables for feature in table.features]
    assert not torch.equal(first.lengths(), other.lengths())
    assert float(first.lengths().float().mean()) == pytest.approx(tables[0].features[0].pooling_factor, rel=0.03)
    most = int(first.values().bincount().max())
    assert most > 20 * first.values().numel() / tables[0].num_embeddings


def test_drawn_ids_follow_the_power_law() -> None:
    ids = draw(1000, 100_000, Skew(1.0, 2.0, sorted_ids=True), torch.Generator().manual_seed(1))
    mass = 1 / (torch.arange(1, 1001) + 2.0)
    expected = 100_000 * mass / mass.sum()
    counts = ids.bincount(minlength=1000).float()
    assert float(((counts - expected) ** 2 / expected).sum()) < 1000 + 6 * (2 * 1000) ** 0.5
    spread = draw(1000, 100_000, Skew(1.0, 2.0), torch.Generator().manual_seed(1))
    assert torch.equal(spread.bincount().sort().values, ids.bincount(minlength=1000).sort().values)
    assert int(spread.bincount().argmax()) != 0
