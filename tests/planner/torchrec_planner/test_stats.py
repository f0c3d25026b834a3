"""What the log tells of a plan: the numbers, and that they are those of the plan."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwise.perf.evidence.planner_cases import Module, Weight
from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.torchrec.stats import (
    EmbeddingStats,
    NoopEmbeddingStats,
    critical_path,
    imbalance,
    optimizer_bytes,
    round_to_one_sigfig,
    shard_io_bytes,
)
from shardwise.planner.torchrec.types import (
    Perf,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)

GIB = 2**30


def option(table: str, kind: str, ranks: list[int], hbm_gib: float, perf: Perf, **more: Any) -> ShardingOption:
    """Shards of 4 of 8 columns, or of all."""
    columns = 4 if kind == "column_wise" else 8
    shards = [Shard([100, columns], [0, 0], Storage(int(hbm_gib * GIB), GIB // 4), perf, rank) for rank in ranks]
    module = ("sparse", Module())
    kernel = more.pop("kernel", "fused")
    return ShardingOption(table, Weight((100, 8)), module, [2.0, 0.5], 6400, kind, "device", kernel, shards, **more)


PLAN = [
    option("user", "table_wise", [0], 6.0, Perf(1.0, 2.0, 3.0, 4.0), is_pooled=True),
    option("item", "column_wise", [0, 1], 1.0, Perf(0.5, 0.25, 0.125, 0.125), is_pooled=True),
    option("page", "row_wise", [0, 1], 0.5, Perf(0.25, 0.5, 0.25, 1.0), is_pooled=False, kernel="fused_uvm"),
]
TOPOLOGY = Topology(2, "cuda", hbm_cap=20 * GIB, ddr_cap=10 * GIB)
NAMED = SimpleNamespace(plan={"sparse": {"user": None, "item": None, "page": None}})
RESERVATION: Any = SimpleNamespace(_percentage=0.15, _dense_storage=Storage(GIB, 0), _kjt_storage=Storage(GIB // 2, 0))


def stats_lines(plan: Any = NAMED, **more: Any) -> list[str]:
    text = EmbeddingStats().render(plan, TOPOLOGY, 64, RESERVATION, 7, 3, 1.25, PLAN, **more)
    return [" ".join(line.split()) for line in text.splitlines()]


LINES = {
    "proposals and time": "--- Evaluated 7 proposal(s), found 3 possible plan(s), ran for 1.25s ---",
    # 9 GiB of 17 that 15 % of 20 leave; 1.5 GiB are reserved
    "a slow rank": "0 9.0 (53%) 0.75 (8%) 13.0 (2,3,3,5,0) 0.61 1.37 CW: 1 RW: 1 TW: 1",
    "another rank": "1 3.0 (18%) 0.5 (5%) 3.0 (0.8,0.8,0.4,1,0) 0.37 0.78 CW: 1 RW: 1 TW: 0",
    "a table": "sparse.item CW fused 2.0 (1,0.5,0.2,0.2,0) (2.0 GB, 0.5 GB, 0.0 GB) None 2.5 2.0 2.5"
    " pooled unweighted None 2 8 (4) 100 0-1",
    "batch size": "Batch Size: 64",
    "kernels": "fused: 2",
    "memory of a kernel": "fused_uvm: HBM: 1.0 GB, DDR: 0.5 GB, SSD: 0.0 GB",
    "constraints": "Hardcoded: 0, Auto-selected: 3",
    "slowest": "Maximum of Total Perf: 13.0 ms on rank 0",
    "slowest by kind": "Maximum of Backward Comms: 5.125 ms on rank 0",
    "maxima": "Sum of Maxima: 13.0 ms",
    "above the mean": "Max Total Perf is 62.5% greater than the mean",
    "fullest without reserved": "Sparse only Max HBM: 7.5 GB on rank 0",
    "mean": "Mean HBM: 6.0 GB on no rank",
    "tier": "Top Tier #2 Estimated Peak HBM Pressure: 3.0 GB on rank 1",
    "reserved": "HBM: 3.0 GB",
    "to plan with": "HBM: 17.0 GB, DDR: 10.0 GB",
    "dense": "HBM: 1.0 GB, DDR: 0.0 GB",
    "worst table": "user: 6.0 GB on rank 0",
}


@pytest.mark.parametrize("what", LINES)
def test_the_text_tells(what: str) -> None:
    assert LINES[what] in stats_lines()


def test_sections_stand_in_torchrecs_order() -> None:
    titles = [
        "--- Planner Statistics ---", "Parameter Info:", "Batch Size: 64", "Compute Kernels Count:",
        "Compute Kernels Embedding Weights:", "Compute Kernels Optimizer State:",
        "Compute Kernels Total Estimated Memory (weights + optimizer + IO + pipeline):", "Compute Kernel Constraints:",
        "Total Perf Imbalance Statistics", "HBM Imbalance Statistics", "DDR Imbalance Statistics",
        "Imbalance stats range 0-1, higher means more imbalanced", "Estimated Sharding Distribution",
        "Top HBM Memory Usage Estimation: 9.0 GB", "Reserved Memory:", "Planning Memory:",
        "Dense Storage (per rank):", "KJT Storage (per rank):", "Top 5 Tables Causing Max Perf:",
        "Top 5 Tables Causing Max HBM:",
    ]  # fmt: skip
    lines = stats_lines()
    places = [lines.index(title) for title in titles]
    assert places == sorted(places)


def test_without_debug_there_are_ranks_and_kernels_only() -> None:
    lines = stats_lines(debug=False)
    assert LINES["a slow rank"] in lines and LINES["kernels"] in lines
    assert not {"Parameter Info:", "Reserved Memory:", LINES["slowest"]} & set(lines)


def test_options_without_a_plan_have_no_ranks() -> None:
    lines = stats_lines(SimpleNamespace(plan={}))
    assert "World Size: 2" in lines
    assert LINES["a slow rank"] not in lines
    assert any(line.startswith("sparse.user TW") and line.endswith("100 None") for line in lines)


def test_constraints_show_in_counts_batch_sizes_and_indices() -> None:
    given = {"item": ParameterConstraints(compute_kernels=["fused"], batch_sizes=[64, 64], num_poolings=[3.0, 1.0])}
    lines = stats_lines(constraints=given)
    assert "Hardcoded: 1, Auto-selected: 2" in lines and "Hardcoded fused: 1" in lines
    # 2 * 3 + 0.5 * 1 indices of a sample
    assert any("2.5 4.0 6.5 pooled" in line and line.endswith("0-1 64 * 2") for line in lines)
    assert any(line.endswith("0-1 n/a") for line in lines)


def test_the_log_has_the_text_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    arguments: Any = (NAMED, TOPOLOGY, 64, RESERVATION, 7, 3, 1.25, PLAN)
    with caplog.at_level(logging.INFO, "shardwise.planner.torchrec.stats"):
        NoopEmbeddingStats().log(*arguments)
        assert not caplog.messages
        EmbeddingStats().log(*arguments)
    assert caplog.messages == EmbeddingStats().render(*arguments).splitlines()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_imbalance_is_0_for_equal_shares_and_1_where_one_rank_has_everything(ranks: int) -> None:
    assert set(imbalance([3.0] * ranks).values()) == {0.0}
    if ranks > 1:
        worst = imbalance([5.0] + [0.0] * (ranks - 1))
        assert worst["Chi Divergence"] == pytest.approx(1) and worst["KL Divergence"] == pytest.approx(1)
        assert worst["Total Variation"] == pytest.approx(1 - 1 / ranks)
        assert worst["Total Distance"] == pytest.approx(2 - 2 / ranks)


def test_imbalance_of_known_shares() -> None:
    p, q = np.array([0.5, 0.25, 0.25, 0.0]), 0.25
    assert imbalance([2, 1, 1, 0]) == pytest.approx(
        {
            "Total Variation": 0.25,
            "Total Distance": 0.5,
            "Chi Divergence": float(((p - q) ** 2 / q).sum()) / 3,
            "KL Divergence": 0.5 * np.log(2) / np.log(4),
        }
    )


def test_the_critical_path_adds_the_slowest_of_each_phase() -> None:
    """Exchanges wait for each other in each sharding type and direction, computations in each direction."""
    path = critical_path(PLAN)
    assert path.comms_estimate == pytest.approx((2.0 + 4.0) + (0.25 + 0.125) + (0.5 + 1.0))
    assert path.comp_estimate == pytest.approx((1.0 + 0.5 + 0.25) + (3.0 + 0.125 + 0.25))
    assert path.total() == pytest.approx(path.comms_estimate + path.comp_estimate)


IO = {
    # ids: 64 * (2 + 0.5) of each of 2 ranks, 8 bytes; bags that are not empty: 64 * (1 + 0.5)
    "table_wise": (64 * 2.5 * 2 * 8, 64 * 1.5 * 2 * 8 * 4),
    "row_wise": (64 * 2.5 * 8, 64 * 1.5 * 2 * 8 * 4),
    "data_parallel": (64 * 2.5 * 8, 64 * 1.5 * 8 * 4),
    "column_wise": (64 * 2.5 * 2 * 8, 64 * 1.5 * 2 * 4 * 4),
}


@pytest.mark.parametrize("kind", IO)
def test_bytes_in_and_out_of_a_shard(kind: str) -> None:
    sharding_option = option("t", kind, [0], 1.0, Perf(0, 0, 0, 0), is_pooled=True)
    assert shard_io_bytes(sharding_option, TOPOLOGY, [64, 64], [1.0, 1.0]) == [IO[kind]]


@pytest.mark.parametrize("name, share", [(None, 0), ("SGD", 0), ("Adam", 2), ("RowWiseAdagrad", 1 / 8), ("Other", 1)])
def test_optimizers_keep_their_share_of_the_weights(name: str | None, share: float) -> None:
    tensor = SimpleNamespace(shape=(100, 8), element_size=lambda: 4)
    if name is not None:
        tensor._optimizer_classes = [type(name, (), {})]
    sharding_option = ShardingOption("t", tensor, ("m", Module()), [1.0], 8, "table_wise", "device", "fused", [])
    assert optimizer_bytes(sharding_option) == 3200 * share


@pytest.mark.parametrize("value, text", [(0.0123, "0.01"), (0.95, "0.9"), (0.00096, "0.001"), (0.0, "0")])
def test_small_numbers_have_one_figure(value: float, text: str) -> None:
    assert round_to_one_sigfig(value) == text
