"""`torchrec.distributed.planner.estimator`: configs of hardware, whose numbers and formulas our planner goes by."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from checkout import golden, run_python
from hardware_configs import computed

from shardwise.planner.topology import Perf, Topology
from shardwise.planner.torchrec.annotations import (
    device_bw,
    forward_compute,
    hbm_mem_bw,
    input_data_type_size,
    supported_sharding_types,
)
from shardwise.planner.torchrec.evaluators import get_embedding_perf_sharding_evaluator
from shardwise.planner.torchrec.hardware import HardwarePerfConfig
from shardwise.planner.torchrec.perf_estimators import EmbeddingPerfEstimator, EmbeddingPerfEstimatorFactory
from shardwise.planner.torchrec.shard_context import ShardPerfContext
from shardwise.planner.torchrec.sharding_option import Shard, SharderData, ShardingOption, StorageUsageType


def test_formulas_and_coefficients_of_a_config_give_torchrecs_numbers() -> None:
    ours, theirs = computed("shardwise.torchrec"), golden("torchrec_hardware_configs")
    assert ours == theirs
    # no config is without effect
    usual = theirs["usual pooled table_wise"]
    assert all(theirs[f"{name} pooled table_wise"] != usual for name in ("numbers", "coefficients", "kernels"))


PROGRAM = """
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import (
    EmbeddingPerfEstimatorFactory, HardwarePerfConfig, ShardPerfContext, forward_compute, supported_sharding_types,
)
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

topology = Topology(world_size=2, compute_device="cpu")
tables = [
    EmbeddingBagConfig(name=f"t{n}", num_embeddings=100, embedding_dim=64, feature_names=[f"f{n}"]) for n in range(4)
]
model = EmbeddingBagCollection(tables=tables, device="meta")
kinds = ["table_wise", "row_wise", "column_wise"]
constraints = {table.name: ParameterConstraints(sharding_types=kinds, min_partition=32) for table in tables}

@EmbeddingPerfEstimatorFactory.register("Board")
class Board(HardwarePerfConfig):
    slow = ("table_wise", "column_wise")

    @forward_compute
    def milliseconds(self, ctx: ShardPerfContext) -> float:
        return 100.0 if ctx.sharding_type in self.slow else 1.0

@EmbeddingPerfEstimatorFactory.register("cut by columns")
class Columns(Board):
    slow = ("table_wise", "row_wise")

def types_of(estimator):
    enumerator = EmbeddingEnumerator(
        topology, 64, constraints, [estimator, EmbeddingStorageEstimator(topology, constraints)])
    planner = EmbeddingShardingPlanner(topology, 64, enumerator, constraints=constraints)
    plan = planner.plan(model, [EmbeddingBagCollectionSharder()])
    return {sharding.sharding_type for sharding in plan.plan[""].values()}

def made(name):
    return EmbeddingPerfEstimatorFactory.create(name, topology=topology, constraints=constraints)

print(types_of(EmbeddingPerfEstimator(topology, constraints)))
print(types_of(made("board")))
print(types_of(made("cut by columns")))
# the default of programs that name no config, and of the enumerator
EmbeddingPerfEstimatorFactory.register("default_estimator")(Columns)
print(types_of(EmbeddingPerfEstimator(topology, constraints)))
option = EmbeddingEnumerator(topology, 64, constraints).enumerate(model, [EmbeddingBagCollectionSharder()])[0]
print(option.sharding_type, [shard.perf.fwd_compute for shard in option.shards])
"""


def test_a_program_with_a_config_of_its_own_gets_the_plan_that_its_numbers_ask_for() -> None:
    """`torchrec.distributed.planner.estimator` was no module: TorchEasyRec's planner stopped at its import."""
    printed = run_python("-c", "import shardwise.torchrec\nshardwise.torchrec.install()\n" + PROGRAM).stdout
    assert printed.splitlines() == [
        "{'table_wise'}", "{'row_wise'}", "{'column_wise'}", "{'column_wise'}", "table_wise [100.0]",
    ]  # fmt: skip


def estimated(config: HardwarePerfConfig, *, sizes: tuple[tuple[int, int], ...] = ((60, 64), (40, 64))) -> list[Perf]:
    """What an estimator with this config writes into the shards of a row-wise table of 100 rows."""
    option = ShardingOption(
        name="t",
        tensor=torch.empty(100, 64, device="meta"),
        module=("bags", torch.nn.Module()),
        input_lengths=[3.0],
        batch_size=64,
        sharding_type="row_wise",
        partition_by="uniform",
        compute_kernel="fused",
        shards=[Shard(list(size), [0, 0]) for size in sizes],
    )
    data = {option.module_type_key: SharderData({}, {}, StorageUsageType.BASE)}
    topology = Topology(2, "cuda", uneven_sharding_perf_multiplier=3.0)
    EmbeddingPerfEstimator(topology, config=config).estimate([option], data)
    assert all(shard.perf is not None for shard in option.shards)
    return [shard.perf for shard in option.shards if shard.perf is not None]


def test_shards_of_an_option_are_changed_together() -> None:
    """The multiplier of the topology reaches the config, and what that gives is kept, shard by shard."""

    class Uneven(HardwarePerfConfig):
        def post_process_perfs(
            self, shard_perfs: list[Perf], shard_sizes: list[list[int]], sharding_type: str,
            uneven_sharding_perf_multiplier: float = 1.0,
        ) -> list[Perf]:  # fmt: skip
            most = max(rows for rows, _ in shard_sizes)
            for perf, (rows, _) in zip(shard_perfs, shard_sizes, strict=True):
                perf.fwd_compute *= uneven_sharding_perf_multiplier * rows / most
            return shard_perfs

    even, uneven = estimated(HardwarePerfConfig()), estimated(Uneven())
    assert even[0] == even[1]
    assert [perf.fwd_compute / even[0].fwd_compute for perf in uneven] == pytest.approx([3.0, 2.0])


def test_an_annotated_number_reaches_the_estimate() -> None:
    """By hand: 3 ids of 64 samples of 2 ranks, halved among ranks, of 4 bytes each and 64 columns of 4 bytes."""

    @device_bw(1000.0, device="cuda", compute_kernel="fused")
    @input_data_type_size(4)
    class Card(HardwarePerfConfig):
        pass

    class Inherits(Card):
        pass

    ids = 3 * 64
    size = ids * 4 + ids * 64 * 4 + 64 * 2 * 64 * 4
    for config in (Card(), Inherits()):
        assert estimated(config)[0].fwd_compute == size / 1000.0
    assert HardwarePerfConfig.kernel_device_bandwidths == {}
    # of two methods for one type the first in the alphabet counts, and a method for another type does not
    card = Inherits()
    card.b = forward_compute(lambda context: 2.0)  # type: ignore[attr-defined]
    card.a = forward_compute(["table_wise"])(lambda context: 1.0)  # type: ignore[attr-defined]
    assert estimated(card)[0].fwd_compute == 2.0


def test_what_a_config_leaves_out_or_cannot_do_is_said() -> None:
    @supported_sharding_types("table_wise", "column_wise")
    class Whole(HardwarePerfConfig):
        pass

    with pytest.raises(ValueError, match="Whole estimates column_wise, table_wise, not 'row_wise'"):
        estimated(Whole())
    with pytest.raises(ValueError, match="'row_wize' is not one of data_parallel"):
        supported_sharding_types("row_wize")
    with pytest.raises(ValueError, match="'twrw' is not one of"):
        forward_compute("twrw")
    with pytest.raises(ValueError, match="give device and compute_kernel together, got 'cuda' and None"):
        device_bw(1.0, device="cuda")
    with pytest.raises(ValueError, match="hbm_mem_bw must be positive"):
        hbm_mem_bw(0.0)
    with pytest.raises(ValueError, match="hardware 'mystery' is not registered; there is .*default_estimator"):
        EmbeddingPerfEstimatorFactory.create("mystery", topology=Topology(2, "cpu"))
    with pytest.raises(ValueError, match="topology is None"):
        EmbeddingPerfEstimatorFactory.create("default_estimator")
    context = ShardPerfContext("row_wise", "fused", use_linear_regression_prefetch_estimate=True)
    with pytest.raises(ValueError, match="HardwarePerfConfig has no coefficients for use_linear_regression"):
        get_embedding_perf_sharding_evaluator("row_wise").compute_prefetch_comp(context, HardwarePerfConfig())
    with pytest.raises(ValueError, match="'twrw' is not one of table_wise"):
        get_embedding_perf_sharding_evaluator("twrw")


def test_a_bandwidth_that_nothing_reads_is_said() -> None:
    """TorchRec keeps the number and estimates with the topology's, without a word."""

    @hbm_mem_bw(5e9)
    class Fast(HardwarePerfConfig):
        pass

    with pytest.warns(UserWarning, match="Fast sets hbm_mem_bw, which only formulas of its own could read"):
        EmbeddingPerfEstimator(Topology(2, "cuda"), config=Fast())

    class Reads(Fast):
        @forward_compute
        def lookup(self, context: ShardPerfContext) -> float:
            return context.emb_dim / self.hbm_mem_bw

    assert estimated(Reads())[0].fwd_compute == 64 / 5e9


def test_constants_are_upstreams() -> None:
    """As torchrec.distributed.planner.constants of 1.8.0 has them."""
    constants = import_module("shardwise.torchrec.distributed.planner.constants")
    gib = 1024**3
    values = {
        "BATCHED_COPY_PERF_FACTOR": 2.455, "BATCH_SIZE": 512, "BIGINT_DTYPE": 8, "BWD_COMPUTE_MULTIPLIER": 2,
        "CROSS_NODE_BANDWIDTH": 13421772.8, "DDR_CAP": 128 * gib, "DDR_MEM_BW": 54760833.024,
        "DEFAULT_PERF_ESTIMATOR": "default_estimator", "DP_ELEMENTWISE_KERNELS_PERF_FACTOR": 9.22,
        "FULL_BLOCK_EMB_DIM": 128, "HALF_BLOCK_PENALTY": 1.15, "HBM_CAP": 32 * gib, "HBM_MEM_BW": 963146416.128,
        "HBM_TO_DDR_MEM_BW": 34359738.368, "HUNDRED_GB": 100 * gib, "INTRA_NODE_BANDWIDTH": 644245094.4,
        "KV_CACHING_RATIO": 0.2, "MAX_SIZE": 2**63 - 1, "MIN_CW_DIM": 128, "NUM_POOLINGS": 1.0, "POOLING_FACTOR": 1.0,
        "QUARTER_BLOCK_PENALTY": 1.75, "SSD_CAP": 2048 * gib, "SSD_MEM_BW": 104857.6, "UVM_CACHING_RATIO": 0.2,
        "WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER": 1, "WEIGHTED_KERNEL_MULTIPLIER": 1.1,
    }  # fmt: skip
    assert {name: getattr(constants, name) for name in values} == values
    enumerators = import_module("shardwise.torchrec.distributed.planner.enumerators")
    assert {kernel.value for kernel in enumerators.GUARDED_COMPUTE_KERNELS} == {
        "key_value", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table",
    }  # fmt: skip
    assert {"row_wise", "table_row_wise", "grid_shard"} == enumerators.GUARDED_SHARDING_TYPES_FOR_FP_MODULES
