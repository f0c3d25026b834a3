"""TorchRec's import paths, served by shardwise: one table, read by `shardwise.torchrec.<path>` and by `install()`.

    from shardwise.torchrec.modules.embedding_modules import EmbeddingBagCollection   # one name, nothing else changes

    import shardwise.torchrec
    shardwise.torchrec.install()                                                      # once, before the first import
    from torchrec.distributed.model_parallel import DistributedModelParallel

A name that the table lacks raises ImportError or AttributeError with that name in the message.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["TABLE", "install"]


def _at(home: str, *names: str) -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names}


_JAGGED = _at("shardwise.jagged", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor")
_ON_JAGGED = _at(
    "shardwise.jagged", "ComputeJTDictToKJT", "ComputeKJTToJTDict", "flatten_kjt_list", "jt_is_equal", "kjt_is_equal",
    "permute_multi_embedding", "regroup_kts", "unflatten_kjt_list",
)  # fmt: skip
_STREAMABLE = _at("shardwise.jagged", "Multistreamable", "Pipelineable")
_DATA_TYPE = _at("shardwise.embeddings", "DataType")
_CONFIGS = _DATA_TYPE | _at("shardwise.embeddings", "EmbeddingBagConfig", "EmbeddingConfig", "PoolingType")
_COLLECTIONS = _at("shardwise.embeddings", "EmbeddingBagCollection", "EmbeddingCollection")
_IN_BACKWARD = _at("shardwise.embeddings", "apply_optimizer_in_backward")
_KEYED = _at("shardwise.embeddings", "CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
_IN_FUSED = _at("torch.optim", "Adagrad", "Adam", "SGD") | _at(
    "shardwise.embeddings", "LAMB", "LarsSGD", "PartialRowWiseAdam", "PartialRowWiseLAMB"
)
_WARMUP = _at("shardwise.embeddings", "WarmupOptimizer", "WarmupPolicy", "WarmupStage")
_CLIPPING = _at("shardwise.embeddings", "GradientClipping", "GradientClippingOptimizer")
_FUSED = _at("shardwise.embeddings", "EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule")
_INTERFACES = _at("shardwise.embeddings", "EmbeddingBagCollectionInterface", "EmbeddingCollectionInterface")
_ROWWISE = _at("shardwise.embeddings", "RowWiseAdagrad")
_DMP = _at("shardwise.sharding.dmp", "DistributedModelParallel")
_ENV = _at("shardwise.sharding.env", "ShardingEnv")
_KERNEL = _at("shardwise.sharding.plan", "EmbeddingComputeKernel")
_PARAMETER = _at("shardwise.sharding.plan", "ParameterSharding")
_PLAN = _at("shardwise.sharding.plan", "ShardingPlan")

_SHARDERS = "shardwise.sharding.sharders"
_DEFAULT_SHARDERS = _at(_SHARDERS, "get_default_sharders")
_EBC_SHARDER = _at(_SHARDERS, "EmbeddingBagCollectionSharder")
_EC_SHARDER = _at(_SHARDERS, "EmbeddingCollectionSharder")
_FUSED_EBC_SHARDER = _at(_SHARDERS, "FusedEmbeddingBagCollectionSharder")
_FP_SHARDER = _at("shardwise.sharding.nested", "FeatureProcessedEmbeddingBagCollectionSharder")
_MODULE_SHARDER = _at(_SHARDERS, "ModuleSharder")
_GENERATORS = _at(
    "shardwise.sharding.generators", "apply_to_all", "calculate_shard_sizes_and_offsets", "column_wise",
    "construct_module_sharding_plan", "data_parallel", "get_module_to_default_sharders",
    "get_sharding_constructor_from_type", "grid_shard", "placement", "placement_helper", "row_wise", "table_row_wise",
    "table_wise",
)  # fmt: skip
_WRAPPERS = _at("shardwise.sharding.data_parallel_wrapper", "DataParallelWrapper", "DefaultDataParallelWrapper")
_ACCUMULATION = _at("shardwise.sharding.accumulation", "GradientAccumulationConfig", "GradientAccumulationWrapper")
_2D = _at("shardwise.sharding.dmp_collection", "DMPCollectionConfig") | _at(
    "shardwise.sharding.env", "ShardingEnv2D", "ShardingStrategy"
)
_AWAITABLES = _at(
    "shardwise.sharding.awaitable", "Awaitable", "GetItemLazyAwaitable", "LazyAwaitable", "LazyGetItemMixin",
    "LazyNoWait", "NoWait",
)  # fmt: skip
_CODECS = _at(
    "shardwise.sharding.qcomms", "CommOp", "NoOpQuantizedCommCodec", "QuantizedCommCodec", "QuantizedCommCodecs"
)
_SPARSE_STAGE = _at("shardwise.sharding.pipeline", "SparseDataDistUtil")
_PIPELINES = _at(
    "shardwise.sharding.pipeline", "EvalPipelineSparseDist", "PrefetchTrainPipelineSparseDist", "StagedTrainPipeline",
    "TrainPipeline", "TrainPipelineBase", "TrainPipelineSparseDist",
)  # fmt: skip
_LOADING = _at("shardwise.sharding.pipeline", "DataLoadingThread")
_UNWRAP = "shardwise.sharding.unwrap"
_LOCAL = _at("shardwise.sharding.comm", "get_local_rank", "get_local_size")
_PLANNERS = _at("shardwise.sharding.planning.planners", "EmbeddingPlannerBase", "EmbeddingShardingPlanner")
_PLANNED_FOR = _at("shardwise.planner.types", "ParameterConstraints", "Topology")

# TorchRec's module -> its name -> where ours is, as module:name
TABLE: Mapping[str, Mapping[str, str]] = {
    "torchrec": _JAGGED | _STREAMABLE | _CONFIGS | _COLLECTIONS,
    "torchrec.datasets.utils": _at("shardwise.data", "Batch"),
    "torchrec.distributed": _DMP
    | _ENV
    | _PARAMETER
    | _MODULE_SHARDER
    | _LOCAL
    | _at("shardwise.sharding.awaitable", "Awaitable", "NoWait")
    | _at(_UNWRAP, "get_unsharded_module_names", "sharded_model_copy"),
    "torchrec.distributed.collective_utils": _at(
        "shardwise.sharding.collective_utils", "invoke_on_rank_and_broadcast_result", "is_leader", "run_on_leader"
    ),
    "torchrec.distributed.comm": _LOCAL
    | _at(
        "shardwise.sharding.comm",
        "get_group_rank",
        "get_num_groups",
        "intra_and_cross_node_pg",
        "intra_and_cross_node_pg_2D",
    ),
    "torchrec.distributed.comm_ops": _at(
        "shardwise.sharding.comm_ops",
        "all_gather_base_pooled",
        "alltoall_pooled",
        "alltoall_sequence",
        "reduce_scatter_base_pooled",
        "reduce_scatter_pooled",
        "reduce_scatter_v_per_feature_pooled",
        "reduce_scatter_v_pooled",
        "get_gradient_division",
        "get_use_sync_collectives",
        "set_gradient_division",
        "set_use_sync_collectives",
        "torchrec_use_sync_collectives",
        "variable_batch_alltoall_pooled",
    ),
    "torchrec.distributed.dist_data": _at(
        "shardwise.sharding.dist_data",
        "JaggedTensorAllToAll",
        "KJTAllToAll",
        "KJTAllToAllSplitsAwaitable",
        "KJTAllToAllTensorsAwaitable",
        "KJTOneToAll",
        "SplitsAllToAllAwaitable",
        "TensorAllToAll",
    )
    | _at(
        "shardwise.sharding.pooled_dist",
        "EmbeddingsAllToOne",
        "EmbeddingsAllToOneReduce",
        "PooledEmbeddingsAllGather",
        "PooledEmbeddingsAllToAll",
        "PooledEmbeddingsReduceScatter",
        "SeqEmbeddingsAllToOne",
        "SequenceEmbeddingsAllToAll",
        "VariableBatchPooledEmbeddingsAllToAll",
        "VariableBatchPooledEmbeddingsReduceScatter",
    ),
    "torchrec.distributed.embedding": _EC_SHARDER
    | _at("shardwise.sharding.modules", "EmbeddingCollectionAwaitable", "ShardedEmbeddingCollection"),
    "torchrec.distributed.embedding_lookup": _KERNEL,
    "torchrec.distributed.embedding_sharding": _at("shardwise.sharding.bucketize", "bucketize_kjt_before_all2all"),
    "torchrec.distributed.embedding_tower_sharding": _at(
        "shardwise.sharding.nested",
        "EmbeddingTowerCollectionSharder",
        "EmbeddingTowerSharder",
        "ShardedEmbeddingTower",
        "ShardedEmbeddingTowerCollection",
    ),
    "torchrec.distributed.embedding_types": _KERNEL | _at(_SHARDERS, "BaseEmbeddingSharder"),
    "torchrec.distributed.embeddingbag": _EBC_SHARDER
    | _at("shardwise.sharding.embedding_bag", "EmbeddingBagSharder", "ShardedEmbeddingBag")
    | _at("shardwise.sharding.modules", "EmbeddingBagCollectionAwaitable", "ShardedEmbeddingBagCollection"),
    "torchrec.distributed.fbgemm_qcomm_codec": _at(
        "shardwise.sharding.qcomms", "CommType", "QCommsConfig", "get_qcomm_codecs", "get_qcomm_codecs_registry"
    ),
    "torchrec.distributed.fp_embeddingbag": _FP_SHARDER
    | _at("shardwise.sharding.nested", "ShardedFeatureProcessedEmbeddingBagCollection"),
    "torchrec.distributed.fused_embedding": _at(_SHARDERS, "FusedEmbeddingCollectionSharder"),
    "torchrec.distributed.fused_embeddingbag": _FUSED_EBC_SHARDER,
    "torchrec.distributed.model_parallel": _DMP
    | _WRAPPERS
    | _DEFAULT_SHARDERS
    | _at("shardwise.sharding.dmp_collection", "DMPCollection")
    | _at(_UNWRAP, "get_module", "get_unwrapped_module"),
    "torchrec.distributed.planner": _PLANNERS
    | _PLANNED_FOR
    | _at("shardwise.planner.utils", "bytes_to_gb", "sharder_name"),
    "torchrec.distributed.planner.constants": _at(
        "shardwise.planner.constants",
        "BATCH_SIZE",
        "CROSS_NODE_BANDWIDTH",
        "DDR_MEM_BW",
        "HBM_MEM_BW",
        "HBM_TO_DDR_MEM_BW",
        "INTRA_NODE_BANDWIDTH",
        "kernel_bw_lookup",
    ),
    "torchrec.distributed.planner.enumerators": _at(
        "shardwise.planner.enumerators", "EmbeddingEnumerator", "get_partition_by_type"
    ),
    "torchrec.distributed.planner.partitioners": _at(
        "shardwise.planner.partitioners",
        "GreedyPerfPartitioner",
        "MemoryBalancedPartitioner",
        "ShardingOptionGroup",
        "SortBy",
    ),
    "torchrec.distributed.planner.perf_models": _at(
        "shardwise.planner.perf_models", "NoopPerfModel", "NoopStorageModel"
    ),
    "torchrec.distributed.planner.planners": _PLANNERS
    | _at(
        "shardwise.sharding.planning.options",
        "extract_plan",
        "to_sharding_plan",
        "validate_compute_kernels",
        "validate_modules_inclusion_in_sharding_plan",
        "validate_rank_assignment",
    ),
    "torchrec.distributed.planner.proposers": _at(
        "shardwise.planner.proposers",
        "DynamicProgrammingProposer",
        "EmbeddingOffloadScaleupProposer",
        "GreedyProposer",
        "GridSearchProposer",
        "UniformProposer",
        "proposers_to_proposals_list",
    ),
    "torchrec.distributed.planner.shard_estimators": _at(
        "shardwise.planner.shard_estimators",
        "EmbeddingOffloadStats",
        "EmbeddingPerfEstimator",
        "EmbeddingStorageEstimator",
        "calculate_shard_storages",
        "get_num_poolings",
    ),
    "torchrec.distributed.planner.stats": _at("shardwise.planner.stats", "EmbeddingStats", "NoopEmbeddingStats"),
    "torchrec.distributed.planner.storage_reservations": _at(
        "shardwise.planner.storage_reservations",
        "FixedAbsoluteStorageReservation",
        "FixedPercentageStorageReservation",
        "HeuristicalStorageReservation",
        "InferenceStorageReservation",
        "StorageReservationType",
    ),
    "torchrec.distributed.planner.types": _PLAN
    | _PLANNED_FOR
    | _at(
        "shardwise.planner.types",
        "BasicCommsBandwidths",
        "CacheStatistics",
        "CollectiveType",
        "CriticalPathEstimate",
        "CustomTopologyData",
        "DeviceHardware",
        "Enumerator",
        "GeneralizedCommsBandwidth",
        "HardwareConfig",
        "KernelConfig",
        "PartitionByType",
        "Partitioner",
        "Perf",
        "PerfModel",
        "PipelineType",
        "PlanDebugStats",
        "PlanLoader",
        "PlannerError",
        "PlannerErrorType",
        "Proposer",
        "Shard",
        "ShardEstimator",
        "SharderData",
        "ShardingOption",
        "Stats",
        "Storage",
        "StorageReservation",
        "TopologyConfigBase",
        "TopologyFactory",
        "TrainerConfig",
        "hash_planner_context_inputs",
        "hash_planner_context_inputs_str",
        "hash_sha256_str",
        "hash_sha256_to_int",
        "round_to_nearest",
    ),
    "torchrec.distributed.planner.utils": _at(
        "shardwise.planner.utils",
        "BinarySearchPredicate",
        "LuusJaakolaSearch",
        "bytes_to_gb",
        "bytes_to_mb",
        "gb_to_bytes",
        "mb_to_bytes",
        "placement",
        "prod",
        "reset_shard_rank",
        "sharder_name",
        "storage_repr_in_gb",
    ),
    "torchrec.distributed.shard": _at("shardwise.sharding.composable", "shard", "shard_modules"),
    "torchrec.distributed.sharding_plan": _GENERATORS
    | _DEFAULT_SHARDERS
    | _EBC_SHARDER
    | _EC_SHARDER
    | _FUSED_EBC_SHARDER
    | _FP_SHARDER,
    "torchrec.distributed.train_pipeline": _PIPELINES | _SPARSE_STAGE | _LOADING | _ACCUMULATION,
    "torchrec.distributed.train_pipeline.gradient_accumulation": _ACCUMULATION,
    "torchrec.distributed.train_pipeline.pipeline_stage": _SPARSE_STAGE
    | _at("shardwise.sharding.pipeline", "PipelineStage"),
    "torchrec.distributed.train_pipeline.train_pipelines": _PIPELINES,
    "torchrec.distributed.train_pipeline.utils": _LOADING,
    "torchrec.distributed.types": {
        **_at("shardwise.kernels.bounds", "BoundsCheckMode"),
        **_at("shardwise.sharding.plan", "CacheParams", "EmbeddingModuleShardingPlan", "ShardingType"),
        **(_DATA_TYPE | _ENV | _PARAMETER | _PLAN | _MODULE_SHARDER | _AWAITABLES | _CODECS | _2D),
    },
    "torchrec.distributed.utils": _at(_UNWRAP, "copy_to_device", "get_unsharded_module_names", "sharded_model_copy"),
    "torchrec.models.dlrm": _at(
        "shardwise.models", "DLRM", "DLRMTrain", "DenseArch", "InteractionArch", "OverArch", "SparseArch"
    ),
    "torchrec.modules.activation": _at("shardwise.models", "SwishLayerNorm"),
    "torchrec.modules.embedding_configs": _CONFIGS
    | _at("shardwise.embeddings", "BaseEmbeddingConfig", "data_type_to_dtype", "dtype_to_data_type"),
    "torchrec.modules.embedding_modules": _COLLECTIONS | _INTERFACES,
    "torchrec.modules.embedding_tower": _at(
        "shardwise.embeddings", "EmbeddingTower", "EmbeddingTowerCollection", "tower_input_params"
    ),
    "torchrec.modules.feature_processor_": _at(
        "shardwise.embeddings",
        "FeatureProcessor",
        "FeatureProcessorsCollection",
        "PositionWeightedModule",
        "PositionWeightedModuleCollection",
    ),
    "torchrec.modules.fp_embedding_modules": _at(
        "shardwise.embeddings", "FeatureProcessedEmbeddingBagCollection", "FeatureProcessorDictWrapper"
    ),
    "torchrec.modules.fused_embedding_modules": _at(
        "shardwise.embeddings", "FusedEmbeddingBagCollection", "FusedEmbeddingCollection", "fuse_embedding_optimizer"
    ),
    "torchrec.modules.mlp": _at("shardwise.models", "MLP", "Perceptron"),
    "torchrec.modules.regroup": _at("shardwise.jagged", "KTRegroupAsDict"),
    "torchrec.optim": _IN_BACKWARD | _KEYED | _ROWWISE | _IN_FUSED | _WARMUP | _CLIPPING | _FUSED,
    "torchrec.optim.apply_optimizer_in_backward": _IN_BACKWARD,
    "torchrec.optim.clipping": _CLIPPING,
    "torchrec.optim.fused": _FUSED,
    "torchrec.optim.keyed": _KEYED,
    "torchrec.optim.optimizers": _IN_FUSED | _at("shardwise.embeddings", "in_backward_optimizer_filter"),
    "torchrec.optim.rowwise_adagrad": _ROWWISE,
    "torchrec.optim.semi_sync": _at("shardwise.embeddings", "SemisyncOptimizer"),
    "torchrec.optim.warmup": _WARMUP,
    "torchrec.sparse.jagged_tensor": _JAGGED | _ON_JAGGED,
    "torchrec.sparse.jagged_tensor_validator": _at("shardwise.jagged", "validate_keyed_jagged_tensor"),
    "torchrec.sparse.tensor_dict": _at("shardwise.jagged", "maybe_td_to_kjt"),
    "torchrec.streamable": _STREAMABLE,
    "torchrec.types": _DATA_TYPE,
}

# the modules of the table and the packages they lie in
_MODULES = {".".join(path.split(".")[:end]) for path in TABLE for end in range(1, path.count(".") + 2)}


def install() -> None:
    """Serve `import torchrec` and everything below it from shardwise, for this process.

    Raises ImportError when the real TorchRec has been imported: half a program would keep its classes.
    """
    if "torchrec" in sys.modules and not isinstance(sys.modules["torchrec"], _Mirror):
        raise ImportError(
            "the real torchrec is already imported: call shardwise.torchrec.install() before the first import of it"
        )
    _Finder.roots["torchrec"] = "torchrec"


def _resolve(path: str, name: str, *, served_as: str) -> object:
    """What TorchRec's `path` calls `name`: ours, or a module of the table; AttributeError if it is neither."""
    if name in TABLE.get(path, {}):
        home, _, ours = TABLE[path][name].partition(":")
        return getattr(import_module(home), ours)
    if f"{path}.{name}" in _MODULES:
        return import_module(f"{served_as}.{name}")
    raise AttributeError(f"shardwise has no counterpart of {path}.{name}")


def _names(path: str) -> list[str]:
    below = {module[len(path) + 1 :].split(".")[0] for module in _MODULES if module.startswith(f"{path}.")}
    return sorted({*TABLE.get(path, {}), *below})


class _Mirror(ModuleType):
    """A module of TorchRec whose names are looked up in the table at first use."""

    path: str

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _resolve(self.path, name, served_as=self.__name__)
        ModuleType.__setattr__(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # torchrec.optim.apply_optimizer_in_backward is a function and a module; as an attribute it is the function
        if isinstance(value, _Mirror) and name in TABLE.get(self.path, {}):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return _names(self.path)


class _Finder(MetaPathFinder, Loader):
    """Makes a `_Mirror` for each module of the table, below this module and, once installed, under TorchRec's name."""

    # the first part of a module's name as imported -> TorchRec's path for it
    roots = {__name__: "torchrec"}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        theirs = self._theirs(fullname)
        if theirs is None:
            return None
        if theirs not in _MODULES:
            # raised here, because `from module import name` drops the message of an AttributeError
            raise ModuleNotFoundError(f"shardwise has no counterpart of {theirs}")
        return ModuleSpec(fullname, self, origin=__file__, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Mirror(spec.name)
        module.path = self._theirs(spec.name) or spec.name
        module.__doc__ = f"What shardwise has of {module.path}."
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are looked up at first use."""

    def _theirs(self, fullname: str) -> str | None:
        for root, theirs in self.roots.items():
            if fullname == root or fullname.startswith(f"{root}."):
                return theirs + fullname[len(root) :]
        return None


# this module is the root of the mirror under our own name
__path__: list[str] = []
if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _resolve("torchrec", name, served_as=__name__)


def __dir__() -> list[str]:
    return sorted({*__all__, *_names("torchrec")})
