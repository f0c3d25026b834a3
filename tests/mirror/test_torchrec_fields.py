"""Every field of every dataclass and named tuple that stands under TorchRec's names: no setting passes silently.

The classes are those of the table of names. Each is a setting, and then each of its fields has a probe: a run with the
field changed has another result, raises or warns by the field's name. Or it is a record: what we hand out, or what a
pipeline of a user fills in, whose fields are told by equality.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from checkout import file_of_tests
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device

from shardwise import (
    BoundsCheckMode,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    ParameterSharding,
    PoolingType,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    Topology,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    get_default_sharders,
    quant,
    shard,
)
from shardwise.data import Batch
from shardwise.embeddings import WarmupOptimizer, WarmupPolicy, WarmupStage
from shardwise.embeddings.config import BaseEmbeddingConfig, EmbeddingTableConfig
from shardwise.embeddings.managed_collision import (
    LFU_EvictionPolicy,
    MCHEvictionPolicyMetadataInfo,
    MCHManagedCollisionModule,
)
from shardwise.embeddings.optim.fbgemm_types import CacheAlgorithm, MultiPassPrefetchConfig
from shardwise.embeddings.optim.keyed_optimizer import KeyedOptimizerWrapper
from shardwise.embeddings.pruning import PruningLogBase
from shardwise.embeddings.torchrec.jagged_outputs import SequenceVBEContext
from shardwise.inference import BatchingMetadata, QualNameMetadata
from shardwise.migration.torchrec_names import TABLE
from shardwise.planner import EmbeddingOffloadStats, Skew, plan_tables
from shardwise.planner.layout import Tier
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import BasicCommsBandwidths, DeviceHardware, Perf, Storage
from shardwise.planner.torchrec import hardware, topology_factory as factory
from shardwise.planner.torchrec.evaluators import get_embedding_perf_sharding_evaluator
from shardwise.planner.torchrec.partitioners import ShardingOptionGroup
from shardwise.planner.torchrec.perf_estimators import EmbeddingPerfEstimator
from shardwise.planner.torchrec.shard_context import ShardPerfContext
from shardwise.planner.torchrec.sharding_option import Shard as PlannedShard, SharderData
from shardwise.planner.torchrec.types import CriticalPathEstimate, PlanDebugStats
from shardwise.sharding import CacheParams, EmbeddingModuleShardingPlan, column_wise, table_wise
from shardwise.sharding.comms.qcomms import CommType, QCommsConfig, QuantizedCommCodecs, get_qcomm_codecs
from shardwise.sharding.dmp.dmp_collection import DMPCollectionConfig
from shardwise.sharding.pipeline import arguments
from shardwise.sharding.pipeline.accumulation import AccumulatingOptimizer, GradientAccumulationConfig
from shardwise.sharding.pipeline.compiled import TorchCompileConfig
from shardwise.sharding.pipeline.staged import PipelineStage
from shardwise.sharding.pools import ObjectPoolShardingPlan
from shardwise.sharding.quant.inspect import WeightSpec
from shardwise.sharding.testing.model_input import ModelInput
from shardwise.sharding.torchrec import embedding_sharding, embedding_types
from shardwise.sharding.torchrec.bucketize import ShardingBucketMetadata
from shardwise.sharding.torchrec.embedding_types import ShardedEmbeddingTable
from shardwise.sharding.torchrec.fused_params import KeyValueParams


@dataclass(frozen=True)
class Probe:
    """A run that takes the class's fields by name, a value of one that is not the default, and the words for it."""

    run: Callable[..., Any]
    value: Any
    # what an error or a warning says where it is not the field's name
    says: str = ""


def numbers(of: Any) -> Any:
    """Tensors as lists with their type, so that results compare."""
    if isinstance(of, Tensor):
        # rows and not what they are views of
        return str(of.dtype), of.detach().float().tolist()
    if isinstance(of, dict):
        return {key: numbers(value) for key, value in of.items()}
    return [numbers(value) for value in of] if isinstance(of, list | tuple) else of


KJT = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 2, 5, 0, 7]), lengths=torch.tensor([2, 1, 1, 2]))


def looked_up(kind: Any, made: Any, **settings: Any) -> Any:
    """A table of this config: its parameters, what it answers, and the same once it is quantized."""
    torch.manual_seed(0)
    config = kind(**{"num_embeddings": 10, "embedding_dim": 8, "name": "t", "feature_names": ["f"], **settings})
    module = made([config], device="cpu")
    quantizes: Any = quant.EmbeddingBagCollection if made is EmbeddingBagCollection else quant.EmbeddingCollection
    weighted = [False] if made is EmbeddingBagCollection else []
    served = quantizes([replace(config, data_type=DataType.INT8)], *weighted, torch.device("cpu"))
    output = module(KJT)
    pooled = made is EmbeddingBagCollection
    values = {key: output[key] if pooled else output[key].values() for key in list(output.keys())}
    return numbers([dict(module.state_dict()), values, [tuple(buffer.shape) for buffer in served.buffers()]])


def written(kind: Any, made: Any, **settings: Any) -> Any:
    """Whether rows can be written into a sharded table of this config."""
    module = made([kind(10, 8, "t", feature_names=["f"], **settings)], device="cpu")
    cut = construct_module_sharding_plan(module, {"t": table_wise(0)}, world_size=1, device_type="cpu")
    model = DistributedModelParallel(module, ShardingEnv.from_local(1, 0), plan=ShardingPlan({"": cut}))
    try:
        model.write(KeyedJaggedTensor(["f"], torch.tensor([1]), torch.ones(1, 8), lengths=torch.tensor([1])))
    except RuntimeError:
        return "refused"
    return numbers(dict(model.state_dict()))


def of_config(kind: Any, made: Any) -> dict[str, Probe]:
    values: dict[str, Any] = {
        "num_embeddings": 12, "embedding_dim": 16, "name": "u", "data_type": DataType.BF16, "feature_names": ["g"],
        "weight_init_max": 0.01, "weight_init_min": 0.01, "num_embeddings_post_pruning": 4, "init_fn": nn.init.ones_,
        "input_dim": 8, "total_num_buckets": 2, "use_virtual_table": True, "virtual_table_eviction_policy": 1,
        "stash_weights": True,
    }  # fmt: skip
    if kind is EmbeddingBagConfig:
        values["pooling"] = PoolingType.MEAN
    probes = {name: Probe(partial(looked_up, kind, made), value) for name, value in values.items()}
    return {**probes, "enable_embedding_update": Probe(partial(written, kind, made), True)}


def quantized(**settings: Any) -> Any:
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(10, 8, "t", feature_names=["f"]), EmbeddingBagConfig(10, 8, "u", feature_names=["g"])]
    module = EmbeddingBagCollection(tables, device="cpu")
    settled: Any = {"activation": torch.float32, "weight": torch.int8, **settings}
    module.qconfig = quant.QuantConfig(**settled)  # type: ignore[assignment]
    served = quant.EmbeddingBagCollection.from_float(module)
    return numbers([served(KJT).values(), [str(buffer.dtype) for buffer in served.buffers()]])


def trained(cut: Any = None, dtype: DataType = DataType.BF16, **settings: Any) -> Any:
    """A step of a table over one rank by a plan with these settings, and then a batch with a bad id."""
    torch.manual_seed(0)
    module = EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", dtype, ["f"])], device="cpu")
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.3})
    of_module = construct_module_sharding_plan(module, {"t": cut or table_wise(0)}, world_size=1, device_type="cpu")
    of_module["t"] = replace(of_module["t"], **settings)
    env, plan = ShardingEnv.from_local(1, 0), ShardingPlan({"": of_module})
    model = DistributedModelParallel(module, env, torch.device("cpu"), plan)
    output = model(KeyedJaggedTensor(["f"], torch.arange(60) % 10, lengths=torch.tensor([59, 1]))).values()
    (output.float() * torch.linspace(0.1, 2, 8)).sum().backward()
    try:
        model(KeyedJaggedTensor(["f"], torch.tensor([99]), lengths=torch.tensor([1]))).values()
        bad = "passes"
    except IndexError as error:
        bad = str(error)
    return numbers([output, [param.detach() for param in model.parameters()], bad])


def cut_at(row: int, **change: Any) -> EnumerableShardingSpec:
    """Two shards of the table's rows on rank 0; `change` is made to the first."""
    shards = [ShardMetadata([0, 0], [row, 8], "rank:0/cpu"), ShardMetadata([row, 0], [10 - row, 8], "rank:0/cpu")]
    for name, value in change.items():
        setattr(shards[0], name, value)
    return EnumerableShardingSpec(shards)


ROWS: dict[str, Any] = {"sharding_type": "row_wise", "ranks": [0, 0], "sharding_spec": cut_at(4)}


def cut(name: str, value: Any = None) -> Any:
    """What a plan makes of a table whose first shard has this change."""
    spec = cut_at(4) if value is None else cut_at(4, **{name: value})
    return trained(**{**ROWS, "sharding_spec": spec})


def of_shards(name: str, value: Any, says: str) -> Probe:
    return Probe(lambda **settings: cut(name, settings.get(name)), value, says)


def planned(sequence: bool = False, **settings: Any) -> Any:
    """The plan and the costs of two tables over two ranks, both under a constraint with these settings."""
    kinds: Any = (EmbeddingConfig, EmbeddingCollection) if sequence else (EmbeddingBagConfig, EmbeddingBagCollection)
    module = kinds[1]([kinds[0](4000, 64, name, feature_names=[f"f_{name}"]) for name in "tu"], device="meta")
    rules = {"*": ParameterConstraints(**{"sharding_types": ["table_wise", "column_wise"], **settings})}
    planner = EmbeddingShardingPlanner(Topology(2, "cpu"), batch_size=256, constraints=rules)
    plan = planner.plan(module, get_default_sharders())
    # the rest of the explanation has the time of the search
    step, bound = str(plan.explanation).splitlines()[1:3]
    return str(plan.plan), step, bound


def kept_below(
    cache_params: CacheParams | None = None, store: KeyValueParams | None = None, tier: Tier | None = None
) -> Any:
    """Where the rows of a table in files lie, and what TorchRec's formulas say of one with a cache over memory."""
    module = EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])], device="cpu")
    plan = construct_module_sharding_plan(module, {"t": table_wise(0)}, world_size=1, device_type="cpu")
    plan["t"] = replace(
        plan["t"], compute_kernel="key_value", cache_params=cache_params, key_value_params=store, tier=tier
    )
    model: Any = shard(module, plan, ShardingEnv.from_local(1, 0), "cpu")
    rules = {"t": ParameterConstraints(["table_wise"], ["fused_uvm_caching"], cache_params=cache_params)}
    table = Table("t", 10, 8, features=(Feature("f"),))
    planned = plan_tables([table], Topology(1, "cuda"), 64, cost="torchrec", constraints=rules)
    return (
        str(model.states.tables["t"].options.tier),
        repr(model.states.tables["t"].options.tier),
        float(planned.loads.time_ms.max()),
    )


def exchanged(forward: Any = CommType.FP32, backward: Any = CommType.FP32, **settings: Any) -> Any:
    config = QCommsConfig(**{"forward_precision": forward, "backward_precision": backward, **settings})
    codecs, values = get_qcomm_codecs(config), torch.linspace(-3, 70000.0, 192) / 1000
    return [numbers(codec.decode(codec.encode(values))) for codec in (codecs.forward, codecs.backward)] + [
        codec.calc_quantized_size(192) for codec in (codecs.forward, codecs.backward)
    ]


def kept(**settings: Any) -> Any:
    """A plan as its file has it, of a model that is sharded by it."""
    trained_by = construct_module_sharding_plan(
        EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])], device="cpu"),
        {"t": table_wise(0)}, world_size=1, device_type="cpu",
    )  # fmt: skip
    plan = ShardingPlan(**{"plan": {"": trained_by}, **settings})
    module = EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])], device="cpu")
    DistributedModelParallel(module, ShardingEnv.from_local(1, 0), torch.device("cpu"), plan)
    return str(plan), plan.local_world_size


MADE: dict[str, Any] = {
    "trainer_config": factory.TrainerConfig, "hardware_config": factory.HardwareConfig,
    "kernel_config": factory.KernelConfig,
}  # fmt: skip


def topology(which: str, given: dict[str, dict[str, Any]], **settings: Any) -> Any:
    """The topology of three configurations, `given` by name, of which one has these settings."""
    values: dict[str, dict[str, Any]] = {name: {} for name in MADE} | {"trainer_config": {"world_size": 4}}
    for name, more in [*given.items(), (which, settings)]:
        values[name] = {**values[name], **more}
    configs = {name: MADE[name](**values[name]) for name in MADE}
    made = factory.TopologyFactory.create_topology(**configs)
    plain = [value for _, value in sorted(vars(made).items()) if isinstance(value, float | int)]
    return repr(made), configs[which].get_param("mine"), plain, [str(device.storage) for device in made.devices]


def of_topology(which: str, values: dict[str, Any], **given: dict[str, Any]) -> dict[str, Probe]:
    return {name: Probe(partial(topology, which, given), value) for name, value in values.items()}


def warmed(**settings: Any) -> Any:
    """Rates of twelve steps."""
    param = nn.Parameter(torch.zeros(1))
    optimizer = KeyedOptimizerWrapper({"w": param}, lambda params: torch.optim.SGD(params, lr=0.1))
    warm = WarmupOptimizer(optimizer, [WarmupStage(**{"max_iters": 8, **settings})], lr=1.0)
    rates = []
    for _ in range(12):
        rates.append(warm.param_groups[0]["lr"])
        warm.step()
    return rates


def warming(policy: str, **settings: Any) -> Any:
    return partial(warmed, policy=WarmupPolicy[policy], **settings)


class OneNumber(LFU_EvictionPolicy):
    """LFU, of whose number the class says something else."""

    def __init__(self, info: MCHEvictionPolicyMetadataInfo) -> None:
        super().__init__()
        self.info = info

    @property
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        return [self.info]


def evicted(**settings: Any) -> Any:
    info = {"metadata_name": "counts", "is_mch_metadata": True, "is_history_metadata": False, **settings}
    module = MCHManagedCollisionModule(4, torch.device("cpu"), OneNumber(MCHEvictionPolicyMetadataInfo(**info)), 1)
    return sorted(name for name, _ in module.named_buffers()), sorted(module._history_metadata)


def accumulated(**settings: Any) -> Any:
    """When an optimizer steps in six micro-batches."""
    param = nn.Parameter(torch.zeros(1))
    steps, config = [], GradientAccumulationConfig(**settings)
    optimizer = AccumulatingOptimizer(torch.optim.SGD([param], lr=1.0), nn.Module(), config)
    for _ in range(6):
        optimizer.zero_grad()
        (param * 1.0).sum().backward()
        optimizer.step()
        optimizer.advance_step()
        steps.append(float(param.detach()))
    return steps, config.is_enabled


FP8, MX4, FP16 = CommType.FP8, CommType.MX4, CommType.FP16
GIB = 2**30


def priced(**fields: Any) -> Any:
    """Milliseconds of a cached, weighted shard under each sharding type, on a machine with these coefficients."""
    config = hardware.HardwarePerfConfig()
    config.coefficients = hardware.PerfCoefficientConfig(**fields)
    topology, kernel = Topology(4, "cuda"), "fused_uvm_caching"
    EmbeddingPerfEstimator(topology, config=config)
    perfs = []
    for kind in ("table_wise", "row_wise", "table_row_wise", "data_parallel", "column_wise"):
        context = ShardPerfContext(
            sharding_type=kind, compute_kernel=kernel, hash_size=1000, emb_dim=64, is_weighted=True, world_size=4,
            batch_sizes=[64], num_poolings=[1.0], input_lengths=[3.0], table_data_type_size=4.0, caching_ratio=0.25,
            device_bw=config.get_device_bw("cuda", kernel, 1e6, 1e5, 1e4, 1e5, 0.25), expected_miss_rate=0.5,
            hash_size_for_clamping=1000, comms_bandwidths=topology.comms_bandwidths, hbm_to_ddr_mem_bw=1e5,
            cache_stats_expected_lookups=500,
            use_linear_regression_prefetch_estimate=fields.get("prefetch") is not None,
        )  # fmt: skip
        perfs.append(repr(get_embedding_perf_sharding_evaluator(kind, False).compute_perf(context, config)))
    return perfs


def priced_by(part: str, kind: Callable[..., Any], **fields: Any) -> Any:
    """The same, of a part of them: coefficients of both directions, of one, or of a prefetch."""
    made = kind(**fields)
    return priced(default=hardware.EstimatorPerfCoefficients(made)) if part == "fwd" else priced(**{part: made})


TWICE = hardware.EstimatorPerfCoefficients(hardware.PerfCoefficient(lookup_size_multiplier=2.0))

SETTINGS: dict[type, dict[str, Probe]] = {
    hardware.PerfCoefficientConfig: {
        **dict.fromkeys(
            ("table_wise", "row_wise", "table_row_wise", "data_parallel", "column_wise", "default"),
            Probe(priced, TWICE),
        ),
        "by_kernel": Probe(priced, {("table_wise", "fused_uvm_caching"): TWICE}),
        "bwd_compute_multiplier": Probe(priced, 9.0),
        "weighted_kernel_multiplier": Probe(priced, 9.0),
        "weighted_feature_bwd_compute_multiplier": Probe(priced, 9.0),
        "prefetch": Probe(priced, hardware.PrefetchCoefficients(1.0, 2.0, 3.0)),
    },
    hardware.EstimatorPerfCoefficients: {
        name: Probe(partial(priced_by, "default", hardware.EstimatorPerfCoefficients), hardware.PerfCoefficient(7.0))
        for name in ("fwd", "bwd")
    },
    hardware.PerfCoefficient: {
        f"{name}_multiplier": Probe(partial(priced_by, "fwd", hardware.PerfCoefficient), 7.0)
        for name in ("input_read_size", "lookup_size", "embedding_output", "hash_size")
    },
    hardware.PrefetchCoefficients: {
        f"expected_{name}_coefficient": Probe(partial(priced_by, "prefetch", hardware.PrefetchCoefficients), 7.0)
        for name in ("num_lookups", "num_unique_lookups", "size_cache_fetches")
    },
    EmbeddingBagConfig: of_config(EmbeddingBagConfig, EmbeddingBagCollection),
    EmbeddingConfig: of_config(EmbeddingConfig, EmbeddingCollection),
    BaseEmbeddingConfig: of_config(EmbeddingConfig, EmbeddingCollection),
    quant.QuantConfig: {
        "activation": Probe(quantized, torch.float16),
        "weight": Probe(quantized, torch.quint4x2),
        "per_table_weight_dtype": Probe(quantized, {"t": torch.quint4x2}),
        "scale_dtype": Probe(quantized, torch.float32),
    },
    ParameterSharding: {
        "sharding_type": Probe(trained, "data_parallel", "a data_parallel table has no cut"),
        "compute_kernel": Probe(trained, "quant"),
        "ranks": Probe(trained, [3], r"the plan says ranks \[3\]"),
        "sharding_spec": Probe(partial(trained, dtype=DataType.FP32, **ROWS), cut_at(6)),
        "cache_params": Probe(kept_below, CacheParams(load_factor=0.5)),
        "enforce_hbm": Probe(trained, False),
        "stochastic_rounding": Probe(trained, False),
        "bounds_check_mode": Probe(trained, BoundsCheckMode.IGNORE),
        "output_dtype": Probe(trained, DataType.FP16),
        "key_value_params": Probe(trained, KeyValueParams()),
        "reduction": Probe(partial(trained, dtype=DataType.FP32, **ROWS), "ordered"),
        "row_state": Probe(partial(trained, column_wise([0, 0])), "table"),
        "tier": Probe(kept_below, Tier(3)),
    },
    EnumerableShardingSpec: {
        "shards": Probe(lambda shards=None: trained(**{**ROWS, "sharding_spec": EnumerableShardingSpec(
            cut_at(4).shards[: 1 if shards else None])}), 1, "shards hold 32 of 80 cells")
    },
    ShardMetadata: {
        "shard_offsets": of_shards("shard_offsets", [1, 0], "overlap"),
        "shard_sizes": of_shards("shard_sizes", [3, 8], "cells"),
        "placement": of_shards("placement", _remote_device("rank:1/cpu"), "the plan says ranks"),
    },
    CacheParams: {
        name: Probe(lambda **given: kept_below(CacheParams(**{"load_factor": 0.3, **given})), value)
        for name, value in {
            "algorithm": CacheAlgorithm.LFU, "load_factor": 0.5, "reserved_memory": 1.0, "precision": DataType.FP16,
            "prefetch_pipeline": True, "stats": EmbeddingOffloadStats(0.1, 9, torch.tensor([1.0, 2.0, 3.0]), 10),
            "multipass_prefetch_config": MultiPassPrefetchConfig(3),
        }.items()
    },
    # of which the planner counts buffers; training brings rows in one pass, as a warning says
    MultiPassPrefetchConfig: {
        name: Probe(lambda **given: kept_below(CacheParams(
            multipass_prefetch_config=MultiPassPrefetchConfig(**given))), 3, "multipass_prefetch_config")
        for name in MultiPassPrefetchConfig._fields
    },
    KeyValueParams: {
        field.name: Probe(lambda **given: kept_below(store=KeyValueParams(**given)), {
            "ssd_storage_directory": os.path.join(tempfile.gettempdir(), "shardwise", "rows"),
            "max_l1_cache_size": 32 / 2**20}.get(field.name, 2))
        for field in fields(KeyValueParams)
    },
    ParameterConstraints: {
        "sharding_types": Probe(planned, ["row_wise"]),
        "compute_kernels": Probe(planned, ["fused_uvm"]),
        "min_partition": Probe(partial(planned, sharding_types=["column_wise"]), 64),
        "pooling_factors": Probe(planned, [200.0]),
        "num_poolings": Probe(planned, [30.0]),
        "batch_sizes": Probe(planned, [8192]),
        "is_weighted": Probe(planned, True),
        "tier": Probe(planned, Tier(3)),
        "cache_params": Probe(planned, CacheParams(load_factor=0.5)),
        "enforce_hbm": Probe(planned, False),
        "stochastic_rounding": Probe(planned, False),
        "bounds_check_mode": Probe(planned, BoundsCheckMode.IGNORE),
        "feature_names": Probe(planned, ["other"]),
        "output_dtype": Probe(planned, DataType.FP16),
        "device_group": Probe(planned, "cuda"),
        "key_value_params": Probe(planned, KeyValueParams()),
        "use_virtual_table": Probe(planned, True),
        "ranks": Probe(planned, [1]),
        "not_on": Probe(planned, [0]),
        "same_rank": Probe(partial(planned, sharding_types=["table_wise"]), "together"),
        "skew": Probe(planned, Skew(2.0)),
    },
    QCommsConfig: {
        "forward_precision": Probe(exchanged, FP16),
        "backward_precision": Probe(exchanged, FP16),
        "forward_loss_scale": Probe(partial(exchanged, FP16), 3.0),
        "backward_loss_scale": Probe(partial(exchanged, FP16, FP16), 3.0),
        "fp8_quantize_dim": Probe(partial(exchanged, FP8), 16),
        "fp8_quantize_dim_bwd": Probe(partial(exchanged, FP8, FP8), 16),
        "fp8_bwd_uses_143": Probe(partial(exchanged, FP8, FP8), True),
        "fp8_output_dtype": Probe(partial(exchanged, FP8), torch.bfloat16),
        "mx4_quantize_dim": Probe(partial(exchanged, MX4), 64),
        "mx4_quantize_dim_bwd": Probe(partial(exchanged, MX4, MX4), 64),
        "mx4_rounding_mode": Probe(partial(exchanged, MX4), 1),
        "output_dtype": Probe(partial(exchanged, MX4), DataType.FP16),
    },
    ShardingPlan: {
        "plan": Probe(kept, {"other": EmbeddingModuleShardingPlan()}, "the plan names modules"),
        "explanation": Probe(kept, "because"),
        "world_size": Probe(kept, 3, "the plan is for 3 ranks"),
        "local_world_size": Probe(kept, 1),
    },
    factory.TrainerConfig: {
        **of_topology("trainer_config", {
            "world_size": 8, "local_world_size": 2, "hbm_cap_bytes": GIB, "ddr_cap_bytes": GIB, "ssd_cap_bytes": GIB,
            "pod_size": 2, "additional_params": {"mine": 1},
        }),
        **of_topology("trainer_config", {"is_dry_run": True}, trainer_config={"dry_run_hbm_bytes": GIB}),
        **of_topology("trainer_config", {"dry_run_hbm_bytes": GIB, "dry_run_ddr_bytes": GIB},
                      trainer_config={"is_dry_run": True}),
    },
    factory.HardwareConfig: of_topology("hardware_config", {
        "hbm_cap_bytes": GIB, "ddr_cap_bytes": GIB, "ssd_cap_bytes": GIB, "intra_host_bw": 1e9, "inter_host_bw": 1e5,
        "hbm_mem_bw": 1e9, "ddr_mem_bw": 1e9, "hbm_to_ddr_mem_bw": 1e9, "ssd_mem_bw": 1e9,
        "additional_params": {"mine": 1},
    }, kernel_config={"use_hardware_based_bandwidth": True}),
    factory.KernelConfig: of_topology("kernel_config", {
        "compute_device": "cpu", "bwd_compute_multiplier": 3.0, "weighted_feature_bwd_compute_multiplier": 3.0,
        "uneven_sharding_perf_multiplier": 2.0, "use_hardware_based_bandwidth": True,
        "generalized_comms_bandwidths": BasicCommsBandwidths(1e3, 1e4), "additional_params": {"mine": 1},
    }, hardware_config={"hbm_mem_bw": 1e9}),
    WarmupStage: {
        "policy": Probe(warmed, WarmupPolicy.INVSQRT),
        "max_iters": Probe(warming("CONSTANT", value=0.5), 4),
        "value": Probe(warming("CONSTANT"), 0.5),
        "lr_scale": Probe(warmed, 0.5),
        "decay_iters": Probe(warming("STEP", value=0.5), 3),
        "sgdr_period": Probe(warming("COSINE_ANNEALING_WARM_RESTARTS", value=0.1), 4),
        "start_interpolating_iters": Probe(
            warming("INTERPOLATE", value=0.1, end_value=1.0, start_interpolating_iters=0), 2
        ),
        "end_value": Probe(warming("INTERPOLATE", value=0.1, end_value=1.0, start_interpolating_iters=0), 0.5),
    },
    MCHEvictionPolicyMetadataInfo: {
        "metadata_name": Probe(evicted, "other"),
        "is_mch_metadata": Probe(evicted, False),
        "is_history_metadata": Probe(evicted, True),
    },
    GradientAccumulationConfig: {
        "is_enabled": Probe(accumulated, True),
        "num_steps": Probe(accumulated, 3),
        "num_warmup_steps": Probe(accumulated, 0),
    },
}  # fmt: skip
# fields that ask for what is so anyway, and why
ALWAYS = {"need_pos": "weights travel with their ids, so positions are known wherever rows are"}
# classes whose fields other tests see, and their file: it takes several processes, or they check what they hold
ELSEWHERE: dict[type, str] = {
    DMPCollectionConfig: "test_dmp_collection.py",
    PipelineStage: "test_pipeline_staged.py",
    EmbeddingTableConfig: "test_torchrec_parts.py",
    Batch: "test_data_clicks.py",
    ShardedEmbeddingTable: "test_embedding_sharding.py",
    ObjectPoolShardingPlan: "test_sharded_pools.py",
    TorchCompileConfig: "test_pipeline_compiled.py",
}


# what is handed out, or filled in by a pipeline of a user: nothing is asked for by it
RECORDS: tuple[type, ...] = (
    BatchingMetadata, QualNameMetadata, ShardingOptionGroup, CriticalPathEstimate, DeviceHardware, Perf, PlanDebugStats,
    PlannedShard, SharderData, Storage, WeightSpec, arguments.PrefetchTrainPipelineContext,
    arguments.TrainPipelineContext, arguments.ArgInfo, arguments.CallArgs, arguments.DictArgInfoStep,
    arguments.GetAttrArgInfoStep, arguments.GetItemArgInfoStep, arguments.ListArgInfoStep, arguments.NoopArgInfoStep,
    arguments.PostprocArgInfoStep, arguments.ScalarArgInfoStep, QuantizedCommCodecs, ShardingBucketMetadata,
    embedding_types.DTensorMetadata, embedding_types.EmbeddingAttributes, embedding_types.GroupedEmbeddingConfig,
    embedding_types.InputDistOutputs, embedding_types.ShardedConfig, embedding_types.ShardedMetaConfig,
    embedding_sharding.EmbeddingShardingContext, embedding_sharding.EmbeddingShardingInfo, ShardedTensorMetadata,
    ModelInput, SequenceVBEContext,
    PruningLogBase, ShardPerfContext, arguments.EmbeddingTrainPipelineContext,
)  # fmt: skip


def names_of(kind: type) -> list[str]:
    """Its fields, those that are made and not given left out."""
    named: Any = kind
    return [field.name for field in fields(kind) if field.init] if is_dataclass(kind) else list(named._fields)


def classes_of_table() -> dict[type, str]:
    """The dataclasses and named tuples that stand under TorchRec's names, each with one of its paths there."""
    found: dict[type, str] = {}
    for path, names in TABLE.items():
        for name, target in names.items():
            module, _, attribute = target.partition(":")
            value = getattr(import_module(module), attribute)
            if isinstance(value, type) and (
                is_dataclass(value) or (issubclass(value, tuple) and hasattr(value, "_fields"))
            ):
                found.setdefault(value, f"{path}.{name}")
    return found


CLASSES = classes_of_table()
PROBES = [(kind, name) for kind, probes in SETTINGS.items() for name in probes]


@pytest.mark.parametrize("kind", CLASSES, ids=CLASSES.values())
def test_every_class_under_torchrecs_names_is_a_setting_with_probes_or_a_record(kind: type) -> None:
    """A field that is added, or a class that a new name leads to, has to say here what becomes of it."""
    places = [where for where in (SETTINGS, ELSEWHERE, RECORDS) if kind in where]
    assert len(places) == 1, f"{CLASSES[kind]}: give each field a probe in SETTINGS, or list it in RECORDS"
    if kind in SETTINGS:
        known = {*SETTINGS[kind], *(name for name in ALWAYS if name in names_of(kind))}
        assert known == set(names_of(kind)), f"{CLASSES[kind]}: fields without a probe, or probes without a field"
    elif kind in ELSEWHERE:
        text = file_of_tests(ELSEWHERE[kind]).read_text()
        assert f"{kind.__name__}(" in text


def test_no_probe_is_of_a_class_that_no_name_leads_to() -> None:
    assert {*SETTINGS, *ELSEWHERE, *RECORDS} == set(CLASSES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), PROBES, ids=[f"{kind.__name__}-{name}" for kind, name in PROBES])
def test_a_changed_field_changes_a_result_raises_or_warns_by_name(kind: type, name: str) -> None:
    probe = SETTINGS[kind][name]
    before, again, says = probe.run(), probe.run(), probe.says or rf"\b{name}\b"
    assert before == again, "two runs without the change differ"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            after = probe.run(**{name: probe.value})
        except Exception as error:
            assert re.search(says, str(error)), f"{name}={probe.value!r} raises without its name: {error}"
            return
    told = any(re.search(says, str(warning.message)) for warning in caught)
    assert told or after != before, f"{kind.__name__}.{name}={probe.value!r} passes silently"


@pytest.mark.parametrize("kind", RECORDS, ids=[kind.__name__ for kind in RECORDS])
def test_records_say_what_they_were_given(kind: Any) -> None:
    """Each field holds what it was given, and two records with another value in one field differ."""
    names = names_of(kind)
    given = {name: object() for name in names}
    made = kind(**given)
    assert all(getattr(made, name) is value for name, value in given.items())
    for name in names:
        assert made != kind(**{**given, name: object()}), name
