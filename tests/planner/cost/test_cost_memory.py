"""Bytes that the cost model predicts against those that a sharded model allocates on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from shardwise import DataType, ShardingEnv
from shardwise.kernels import rule_named
from shardwise.planner.cost.shardwise import STATES, block_bytes, step_bytes
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import Topology
from shardwise.sharding.calibration.calibrate import way_of
from shardwise.sharding.calibration.trial import Placed, Step

B, WORLD = 512, 2
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def _tables(optimizer: str | None, pooled: bool = True, dtype: DataType = DataType.FP32) -> list[Table]:
    """Rows that do not divide by the ranks; elements that fill whole boundaries of 64 bytes."""
    features = (Feature("a", 12.0),), (Feature("b", 3.0), Feature("c", 7.0))
    # rows of sequences share a buffer where they have one width
    dims = (64, 32) if pooled else (64, 64)
    return [
        Table(f"t{n}", 2001 + n, dim, dtype, mine, pooled, optimizer=optimizer)
        for n, (dim, mine) in enumerate(zip(dims, features, strict=True))
    ]


def _placed(tables: list[Table], kind: str, first: int | None = None) -> list[Placed]:
    found = []
    for number, table in enumerate(tables):
        way = way_of(table, kind, Topology(WORLD, "cpu"))
        start = number if first is None else first
        starts = (0,) if way.span > 1 else tuple((start + k) % WORLD for k in range(len(way.widths)))
        found.append(Placed(table, way, starts))
    return found


def _predicted(placed: list[Placed], *, step: bool) -> list[int]:
    total = np.zeros(WORLD, np.int64)
    for one in placed:
        for width, start in zip(one.way.widths, one.starts, strict=True):
            ours = step_bytes(one.table, one.way, width, WORLD, B)
            if not step:
                ours = block_bytes(one.table, one.way, width, WORLD, B) - ours
            total[start : start + one.way.span] += ours
    found: list[int] = total.tolist()
    return found


def _held(placed: list[Placed]) -> int:
    """Bytes of rows and states on this rank."""
    assert dist.group.WORLD is not None
    step = Step(placed, 4, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"))
    groups = [group for one in step.collections() for group in one._held.all_groups()]
    tensors = [tensor for group in groups for tensor in (group.flat, *group.states)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["SGD", "RowWiseAdagrad", "Adagrad", "Adam", "LAMB"])
def test_rows_and_states_take_the_bytes_that_are_predicted(kind: str, optimizer: str) -> None:
    placed = _placed(_tables(optimizer), kind)
    boundaries = 64 * len(placed) * len(placed[0].way.widths)
    for real, predicted in zip(run_ranks(WORLD, _held, placed), _predicted(placed, step=False), strict=True):
        assert predicted <= real <= predicted + boundaries


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [DataType.FP16, DataType.BF16])
def test_half_rows_keep_whole_states(dtype: DataType) -> None:
    placed = _placed(_tables("Adagrad", dtype=dtype), "row_wise")
    for real, predicted in zip(run_ranks(WORLD, _held, placed), _predicted(placed, step=False), strict=True):
        assert predicted <= real <= predicted + 256


def _peak(placed: list[Placed]) -> int:
    """The most bytes that this rank allocates in a step, over those that it holds."""
    assert dist.group.WORLD is not None
    step = Step(placed, B, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"))
    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    found: list[Any] = list(profile.profiler.kineto_results.events())
    events = [one for one in found if one.name() == "[memory]"]
    changes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
    return int(np.cumsum(changes).max())


@pytest.mark.ranks
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_about_the_memory_that_is_predicted(kind: str, pooled: bool) -> None:
    placed = _placed(_tables("RowWiseAdagrad", pooled), kind)
    for real, predicted in zip(run_ranks(WORLD, _peak, placed), _predicted(placed, step=True), strict=True):
        # the rank that looks up less also has its own batch to put together
        assert predicted / 2.5 < real < 1.5 * predicted


def test_an_optimizer_keeps_what_its_rule_says() -> None:
    for name, rule_name in RULES.items():
        kinds = list(rule_named(rule_name).kinds)
        assert STATES[name] == (kinds.count("element"), kinds.count("row"))
    assert set(RULES) == set(STATES)


RULES = {
    "SGD": "sgd", "RowWiseAdagrad": "rowwise_adagrad", "Adagrad": "adagrad", "Adam": "adam", "AdamW": "adam",
    "SparseAdam": "adam", "LAMB": "lamb", "LarsSGD": "lars_sgd", "PartialRowWiseAdam": "partial_rowwise_adam",
    "PartialRowWiseLAMB": "partial_rowwise_lamb", "FTRL": "ftrl",
}  # fmt: skip


def test_dense_replicas_also_hold_their_gradient_and_its_bucket() -> None:
    (table, _) = _tables(None)
    way = way_of(table, "data_parallel", Topology(WORLD, "cpu"))
    assert block_bytes(table, way, 64, WORLD, B).tolist() == [3 * 4 * 2001 * 64] * WORLD


def test_int4_rows_take_half_a_byte_an_element() -> None:
    table = replace(_tables("SGD")[0], data_type=DataType.INT4)
    way = way_of(table, "table_wise", Topology(WORLD, "cpu"))
    held = block_bytes(table, way, 64, WORLD, B) - step_bytes(table, way, 64, WORLD, B)
    assert held.tolist() == [2001 * 32]
