"""Public objects of sharding, planner and configs are pickled, copied and sent to spawned processes whole.

Every public class stands in one of the tables below: how to make one, or why it is no data to send.
"""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch

import shardwise.embeddings as embeddings
import shardwise.planner as planner
import shardwise.sharding as sharding
from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig
from shardwise.planner import EmbeddingPerfEstimator, ParameterConstraints, Topology
from shardwise.sharding import (
    CommType,
    QCommsConfig,
    ShardingPlan,
    construct_module_sharding_plan,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
    row_wise,
)
from shardwise.sharding.comms.qcomms import codecs_of

CODECS = [
    QCommsConfig(CommType.FP16, CommType.BF16, forward_loss_scale=2.0),
    QCommsConfig(CommType.FP8, CommType.FP8),
    QCommsConfig(CommType.INT8, CommType.MX4),
    QCommsConfig(CommType.MX4, CommType.FP32),
]


def registry(config: QCommsConfig = CODECS[0]) -> Any:
    return get_qcomm_codecs_registry(config)


def topology() -> Topology:
    return Topology(2, "cpu", local_world_size=2)


def plan() -> Any:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t", feature_names=["f"])])
    return construct_module_sharding_plan(ebc, {"t": row_wise()}, world_size=2, local_size=2, device_type="cpu")


def option() -> Any:
    lengths, shards = [1.0], [planner.Shard([8, 4], [0, 0], planner.Storage(1, 2), planner.Perf(1, 2, 3, 4), 0)]
    return planner.ShardingOption("t", torch.zeros(8, 4), ("", None), lengths, 4, "row_wise", "host", "fused", shards)


# by module and class: how to make one
MADE: dict[str, dict[str, Callable[[], Any]]] = {
    "sharding": {
        "Tier": lambda: sharding.Tier(0.1, max_slots=0.5),
        "TorchCompileConfig": lambda: sharding.TorchCompileConfig(fullgraph=True, backend="eager", compile_on_iter=1),
        "CacheParams": lambda: sharding.CacheParams(load_factor=0.25),
        "DefaultDataParallelWrapper": lambda: sharding.DefaultDataParallelWrapper(allreduce_comm_precision="bf16"),
        "DMPCollectionConfig": lambda: sharding.DMPCollectionConfig(
            EmbeddingBagCollection, ShardingPlan({"": plan()}), 2
        ),
        "EmbeddingModuleShardingPlan": plan,
        "EmbeddingShardingPlanner": lambda: sharding.EmbeddingShardingPlanner(
            topology(), 4, constraints={"t": ParameterConstraints(sharding_types=["row_wise"])}
        ),
        "GradientAccumulationConfig": lambda: sharding.GradientAccumulationConfig(is_enabled=True, num_steps=3),
        "NoOpQuantizedCommCodec": lambda: sharding.NoOpQuantizedCommCodec(),
        "NoWait": lambda: sharding.NoWait(3),
        "ParameterSharding": lambda: plan()["t"],
        "QCommsConfig": lambda: CODECS[1],
        "QuantizedCommCodec": lambda: sharding.QuantizedCommCodec(),
        "QuantizedCommCodecs": lambda: get_qcomm_codecs(CODECS[2]),
        "Shard": lambda: sharding.Shard("t", 1, (0, 4), (0, 8)),
        "ShardingPlan": lambda: ShardingPlan({"": plan()}),
        "TableOptions": lambda: sharding.TableOptions(),
        **{
            name: lambda name=name: getattr(sharding, name)(qcomm_codecs_registry=registry())
            for name in (
                "EmbeddingBagCollectionSharder", "EmbeddingCollectionSharder", "EmbeddingTowerCollectionSharder",
                "EmbeddingTowerSharder", "FeatureProcessedEmbeddingBagCollectionSharder",
                "FusedEmbeddingBagCollectionSharder", "FusedEmbeddingCollectionSharder",
            )
        },
    },
    "planner": {
        "Tier": lambda: planner.Tier(slots=100, policy="lru"),
        "CustomTopologyData": lambda: planner.CustomTopologyData({"hbm_cap": [1, 2]}, 2),
        "EmbeddingEnumerator": lambda: planner.EmbeddingEnumerator(topology(), 4),
        "EmbeddingOffloadStats": lambda: planner.EmbeddingOffloadStats(0.5, 10, [1, 2], 4),
        "EmbeddingPerfEstimator": lambda: EmbeddingPerfEstimator(topology()),
        "EmbeddingStorageEstimator": lambda: planner.EmbeddingStorageEstimator(topology()),
        "Feature": lambda: planner.Feature("f", 3.0),
        "FixedAbsoluteStorageReservation": lambda: planner.FixedAbsoluteStorageReservation(7),
        "FixedPercentageStorageReservation": lambda: planner.FixedPercentageStorageReservation(0.25),
        "HeuristicalStorageReservation": lambda: planner.HeuristicalStorageReservation(0.25),
        "InferenceStorageReservation": lambda: planner.InferenceStorageReservation(0.25),
        "NoopPerfModel": lambda: planner.NoopPerfModel(topology()),
        "NoopStorageModel": lambda: planner.NoopStorageModel(topology()),
        "ParameterConstraints": lambda: ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[2.0]),
        "Perf": lambda: planner.Perf(1, 2, 3, 4),
        "Planned": lambda: planner.plan_tables(
            [planner.Table("t", 8, 4, features=(planner.Feature("f"),))], topology(), 4
        ),
        "Shard": lambda: option().shards[0],
        "ShardingOption": option,
        "ShardwiseCost": lambda: planner.ShardwiseCost(topology(), 4),
        "Skew": lambda: planner.Skew(1.5),
        "Storage": lambda: planner.Storage(1, 2, 3),
        "Table": lambda: planner.Table("t", 8, 4),
        "Topology": topology,
        "TorchRecCost": lambda: planner.TorchRecCost(topology(), 4),
        **{
            name: lambda name=name: getattr(planner, name)()
            for name in (
                "DynamicProgrammingProposer", "EmbeddingOffloadScaleupProposer", "EmbeddingStats",
                "GreedyPerfPartitioner", "GreedyProposer", "GridSearchProposer", "MemoryBalancedPartitioner",
                "ModelStorageReservation", "NoopEmbeddingStats", "TopologyFactory", "UniformProposer",
            )
        },
    },
    "embeddings": {
        "BaseEmbeddingConfig": lambda: embeddings.BaseEmbeddingConfig(8, 4, "t", feature_names=["f"]),
        "EmbeddingBagConfig": lambda: EmbeddingBagConfig(8, 4, "t", feature_names=["f"]),
        "EmbeddingConfig": lambda: EmbeddingConfig(8, 4, "t", feature_names=["f"]),
        "LookupFeature": lambda: embeddings.LookupFeature("f", 1, True),
        "LookupPolicy": lambda: embeddings.LookupPolicy(strict=True),
        "OptimizerSpec": lambda: embeddings.OptimizerSpec("adam", 0.5),
        "TableShape": lambda: embeddings.TableShape("t", 8, 4),
        "WarmupStage": lambda: embeddings.WarmupStage(max_iters=7),
    },
}  # fmt: skip

_LIVE = "lives in one process: it holds a model, its process group, threads or memory"
_STATE = "modules and optimizers go by state_dict"
# by module and class: why none is sent
LEFT_OUT: dict[str, dict[str, str]] = {
    "sharding": dict.fromkeys((
        "DMPCollection", "DataLoadingThread", "DistributedModelParallel", "EvalPipelineFusedSparseDist",
        "EvalPipelineSparseDist",
        "GradientAccumulationWrapper", "PipelineStage", "PrefetchTrainPipelineSparseDist",
        "ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection", "ShardingEnv", "ShardingEnv2D",
        "SparseDataDistUtil", "StagedTrainPipeline", "TrainPipelineBase", "TrainPipelineFusedSparseDist",
        "TrainPipelinePT2", "TrainPipelineSemiSync", "TrainPipelineSparseDist", "TrainPipelineSparseDistCompAutograd",
        "TrainPipelineSparseDistLite",
    ), _LIVE),
    "planner": {"Suggestion": "holds a request, which holds what `plan` was given"},
    "embeddings": dict.fromkeys((
        "CombinedOptimizer", "EmbeddingBagCollection", "EmbeddingCollection", "EmbeddingTower",
        "EmbeddingTowerCollection", "EmptyFusedOptimizer", "FTRL", "FeatureProcessedEmbeddingBagCollection",
        "FeatureProcessorDictWrapper", "FusedEmbeddingBagCollection", "FusedEmbeddingCollection", "FusedOptimizer",
        "GradientClippingOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "LAMB", "LarsSGD", "OptimizerWrapper",
        "PartialRowWiseAdam", "PartialRowWiseLAMB", "PositionWeightedModule", "PositionWeightedModuleCollection",
        "PositionWeightedProcessor", "ResidentRows", "RowWiseAdagrad", "RuleOptimizer", "SemisyncOptimizer",
        "TableGroup", "WarmupOptimizer",
    ), _STATE),
}  # fmt: skip
MODULES = {"sharding": sharding, "planner": planner, "embeddings": embeddings}
EVERY = [(module, name) for module, makers in MADE.items() for name in makers]


def data_of(value: Any, depth: int = 8) -> Any:
    """What an object is made of, as something that compares."""
    if isinstance(value, torch.Tensor):
        return ["tensor", value.dtype, value.shape, value.tolist()]
    if depth == 0 or isinstance(value, str | int | float | bytes | Enum | type | torch.dtype | torch.device | None):
        return value if not callable(value) or isinstance(value, type) else "function"
    if isinstance(value, dict):
        return [(repr(key), data_of(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [type(value).__name__, [data_of(item, depth - 1) for item in value]]
    named = getattr(value, "__dict__", None)
    if named is None:
        named = {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
    return [type(value).__qualname__, [(name, data_of(item, depth - 1)) for name, item in named.items()]]


def make(module: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MADE[module][name]()


def test_every_public_class_is_made_here_or_left_out_for_a_reason() -> None:
    for module, of_module in MODULES.items():
        public = {name for name in of_module.__all__ if isinstance(getattr(of_module, name), type)}
        data = {
            name
            for name in public
            if not issubclass(cls := getattr(of_module, name), BaseException | Enum)
            and not inspect.isabstract(cls)
            and not getattr(cls, "_is_protocol", False)
        }
        assert data == {*MADE[module], *LEFT_OUT[module]} and not {*MADE[module]} & {*LEFT_OUT[module]}


@pytest.mark.parametrize(("module", "name"), EVERY, ids=[f"{module}.{name}" for module, name in EVERY])
def test_a_copy_is_made_of_the_same_data(module: str, name: str) -> None:
    original = make(module, name)
    for copied in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
        assert type(copied) is type(original)
        assert data_of(copied) == data_of(original)


@pytest.mark.parametrize("config", CODECS, ids=lambda config: f"{config.forward_precision} {config.backward_precision}")
def test_codecs_that_were_pickled_make_the_same_bytes(config: QCommsConfig) -> None:
    """Quantizers were local functions, so a sharder with codecs could not go through `mp.spawn`."""
    before = registry(config)
    values = torch.randn(200)
    for after in (pickle.loads(pickle.dumps(before)), copy.deepcopy(before)):
        for codec, copied_codec in zip(codecs_of(before), codecs_of(after), strict=True):
            assert (codec.name, codec.compresses) == (copied_codec.name, copied_codec.compresses)
            data = codec.encode(values)
            assert torch.equal(data, copied_codec.encode(values))
            assert torch.equal(codec.decode(data, 200), copied_codec.decode(data, 200))


def _reply(values: list[Any], queue: Any) -> None:
    queue.put([data_of(value) for value in values])


def test_all_of_them_arrive_in_a_spawned_process() -> None:
    values = [make(module, name) for module, name in EVERY]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_reply, args=(values, queue))
    process.start()
    try:
        arrived = queue.get(timeout=120)
    finally:
        process.join(timeout=60)
    for (module, name), expected, data in zip(EVERY, map(data_of, values), arrived, strict=True):
        assert expected == data, f"{module}.{name}"
