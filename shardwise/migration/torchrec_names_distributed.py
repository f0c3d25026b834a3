"""Where ours is for each name of `torchrec.distributed`: data read by `shardwise.migration.torchrec_names`."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DISTRIBUTED"]

# as NAMES in shardwise.migration.torchrec_names
DISTRIBUTED: Mapping[str, Mapping[str, str]] = {
    "torchrec.distributed": {
        "torchrec.distributed.model_parallel": "DistributedModelParallel",
        "torchrec.distributed.types": "Awaitable ModuleSharder NoWait ParameterSharding ShardingEnv",
        "torchrec.distributed.comm": "get_local_rank get_local_size",
        "torchrec.distributed.utils": "get_unsharded_module_names sharded_model_copy",
        "torch.distributed._shard.sharded_tensor": "ShardedTensor",
        "torchrec.distributed.train_pipeline.utils": "DataLoadingThread",
        "torchrec.distributed.train_pipeline.train_pipelines": (
            "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist TrainPipeline TrainPipelineBase "
            "TrainPipelineSparseDist"
        ),
    },
    "torchrec.distributed.collective_utils": {
        "shardwise.sharding.comms.collective_utils": "invoke_on_rank_and_broadcast_result is_leader run_on_leader",
    },
    "torchrec.distributed.comm": {
        "shardwise.sharding.comms.env": (
            "get_group_rank get_local_rank get_local_size get_num_groups intra_and_cross_node_pg "
            "intra_and_cross_node_pg_2D"
        ),
    },
    "torchrec.distributed.comm_ops": {
        "shardwise.sharding.torchrec.comm_ops": (
            "all_gather_base_pooled alltoall_pooled alltoall_sequence get_gradient_division "
            "get_use_sync_collectives reduce_scatter_base_pooled reduce_scatter_pooled "
            "reduce_scatter_v_per_feature_pooled reduce_scatter_v_pooled set_gradient_division "
            "set_use_sync_collectives torchrec_use_sync_collectives variable_batch_alltoall_pooled"
        ),
    },
    "torchrec.distributed.composable.table_batched_embedding_slice": {
        "shardwise.embeddings.tables.table_layout": "TableBatchedEmbeddingSlice",
    },
    "torchrec.distributed.dist_data": {
        "shardwise.sharding.torchrec.dist_data": (
            "JaggedTensorAllToAll KJTAllToAll KJTAllToAllSplitsAwaitable KJTAllToAllTensorsAwaitable KJTOneToAll "
            "SplitsAllToAllAwaitable TensorAllToAll"
        ),
        "shardwise.sharding.torchrec.pooled_dist": (
            "EmbeddingsAllToOne EmbeddingsAllToOneReduce PooledEmbeddingsAllGather PooledEmbeddingsAllToAll "
            "PooledEmbeddingsReduceScatter SeqEmbeddingsAllToOne SequenceEmbeddingsAllToAll "
            "VariableBatchPooledEmbeddingsAllToAll VariableBatchPooledEmbeddingsReduceScatter"
        ),
    },
    "torchrec.distributed.embedding": {
        "shardwise.sharding.modules.sharders": "EmbeddingCollectionSharder",
        "shardwise.sharding.modules.sharded_collections": "EmbeddingCollectionAwaitable ShardedEmbeddingCollection",
    },
    "torchrec.distributed.embedding_lookup": {
        "torchrec.distributed.embedding_types": "EmbeddingComputeKernel",
    },
    "torchrec.distributed.embedding_sharding": {
        "shardwise.sharding.torchrec.bucketize": "bucketize_kjt_before_all2all",
    },
    "torchrec.distributed.embedding_tower_sharding": {
        "shardwise.sharding.modules.nested": (
            "EmbeddingTowerCollectionSharder EmbeddingTowerSharder ShardedEmbeddingTower "
            "ShardedEmbeddingTowerCollection"
        ),
    },
    "torchrec.distributed.embedding_types": {
        "shardwise.sharding.plan.plan": "EmbeddingComputeKernel",
        "shardwise.sharding.modules.sharders": "BaseEmbeddingSharder",
        "torchrec.modules.embedding_configs": "EmbeddingTableConfig",
        "shardwise.sharding.quant": "BaseQuantEmbeddingSharder",
    },
    "torchrec.distributed.embeddingbag": {
        "shardwise.sharding.modules.sharders": "EmbeddingBagCollectionSharder",
        "shardwise.sharding.modules.embedding_bag": "EmbeddingBagSharder ShardedEmbeddingBag",
        "shardwise.sharding.modules.sharded_collections": "EmbeddingBagCollectionAwaitable ShardedEmbeddingBagCollection logger",
    },
    "torchrec.distributed.fbgemm_qcomm_codec": {
        "shardwise.sharding.comms.qcomms": "CommType QCommsConfig get_qcomm_codecs get_qcomm_codecs_registry",
    },
    "torchrec.distributed.fp_embeddingbag": {
        "shardwise.sharding.modules.nested": (
            "FeatureProcessedEmbeddingBagCollectionSharder ShardedFeatureProcessedEmbeddingBagCollection"
        ),
    },
    "torchrec.distributed.fused_embedding": {
        "shardwise.sharding.modules.sharders": "FusedEmbeddingCollectionSharder",
    },
    "torchrec.distributed.fused_embeddingbag": {
        "shardwise.sharding.modules.sharders": "FusedEmbeddingBagCollectionSharder",
        "shardwise.sharding.modules.sharded_collections": "ShardedFusedEmbeddingBagCollection",
    },
    "torchrec.distributed.fused_params": {
        "shardwise.sharding.quant": (
            "FUSED_PARAM_BOUNDS_CHECK_MODE FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP "
            "FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS FUSED_PARAM_REGISTER_TBE_BOOL "
            "FUSED_PARAM_TBE_ROW_ALIGNMENT"
        ),
        "shardwise.sharding.quant.fused_params": (
            "fused_param_bounds_check_mode fused_param_lengths_to_offsets_lookup get_fused_param_tbe_row_alignment "
            "is_fused_param_quant_state_dict_split_scale_bias is_fused_param_register_tbe"
        ),
    },
    "torchrec.distributed.global_settings": {
        "shardwise.sharding.torchrec.global_settings": "get_propogate_device set_propogate_device",
    },
    "torchrec.distributed.infer_utils": {
        "shardwise.sharding.quant": (
            "get_all_torchrec_modules get_path_device_tuples get_tbe_specs_from_sharded_module "
            "get_tbes_from_sharded_module"
        ),
        "shardwise.sharding.quant.inspect": "get_non_scriptable_trec_module",
    },
    "torchrec.distributed.mc_embedding": {
        "shardwise.sharding.modules.managed_collision": (
            "ManagedCollisionEmbeddingCollectionSharder ShardedManagedCollisionEmbeddingCollection"
        ),
    },
    "torchrec.distributed.mc_embeddingbag": {
        "shardwise.sharding.modules.managed_collision": (
            "ManagedCollisionEmbeddingBagCollectionSharder ShardedManagedCollisionEmbeddingBagCollection"
        ),
    },
    "torchrec.distributed.mc_modules": {
        "shardwise.sharding.modules.managed_collision": "ManagedCollisionCollectionSharder ShardedManagedCollisionCollection",
        "shardwise.sharding.quant.managed_collision": "InferManagedCollisionCollectionSharder",
    },
    "torchrec.distributed.model_parallel": {
        "shardwise.sharding.dmp.dmp": "DistributedModelParallel",
        "shardwise.sharding.dmp.data_parallel": "DataParallelWrapper DefaultDataParallelWrapper",
        "torchrec.distributed.sharding_plan": "get_default_sharders",
        "shardwise.sharding.dmp.dmp_collection": "DMPCollection",
        "shardwise.sharding.dmp.unwrap": "get_module get_unwrapped_module",
    },
    "torchrec.distributed.planner": {
        "torchrec.distributed.planner.planners": "EmbeddingPlannerBase EmbeddingShardingPlanner",
        "torchrec.distributed.planner.types": "ParameterConstraints Topology",
        "torchrec.distributed.planner.utils": "bytes_to_gb sharder_name",
    },
    "torchrec.distributed.planner.constants": {
        "shardwise.planner.torchrec.constants": (
            "kernel_bw_lookup BATCH_SIZE CROSS_NODE_BANDWIDTH DDR_MEM_BW HBM_MEM_BW HBM_TO_DDR_MEM_BW "
            "INTRA_NODE_BANDWIDTH"
        ),
    },
    "torchrec.distributed.planner.enumerators": {
        "shardwise.planner.torchrec.enumerators": "EmbeddingEnumerator get_partition_by_type",
    },
    "torchrec.distributed.planner.partitioners": {
        "shardwise.planner.torchrec.partitioners": "GreedyPerfPartitioner MemoryBalancedPartitioner ShardingOptionGroup SortBy",
    },
    "torchrec.distributed.planner.perf_models": {
        "shardwise.planner.torchrec.perf_models": "NoopPerfModel NoopStorageModel",
    },
    "torchrec.distributed.planner.planners": {
        "shardwise.sharding.planning.planners": "EmbeddingPlannerBase EmbeddingShardingPlanner",
        "shardwise.sharding.planning.options": (
            "extract_plan to_sharding_plan validate_compute_kernels validate_modules_inclusion_in_sharding_plan "
            "validate_rank_assignment"
        ),
    },
    "torchrec.distributed.planner.proposers": {
        "shardwise.planner.torchrec.proposers": (
            "DynamicProgrammingProposer EmbeddingOffloadScaleupProposer GreedyProposer GridSearchProposer "
            "UniformProposer proposers_to_proposals_list"
        ),
    },
    "torchrec.distributed.planner.shard_estimators": {
        "shardwise.planner.torchrec.estimators": (
            "EmbeddingOffloadStats EmbeddingPerfEstimator EmbeddingStorageEstimator calculate_shard_storages "
            "get_num_poolings"
        ),
    },
    "torchrec.distributed.planner.stats": {
        "shardwise.planner.torchrec.stats": "EmbeddingStats NoopEmbeddingStats",
    },
    "torchrec.distributed.planner.storage_reservations": {
        "shardwise.planner.torchrec.reservations": (
            "FixedAbsoluteStorageReservation FixedPercentageStorageReservation HeuristicalStorageReservation "
            "InferenceStorageReservation StorageReservationType"
        ),
    },
    "torchrec.distributed.planner.types": {
        "torchrec.distributed.types": "ShardingPlan",
        "shardwise.planner.torchrec.types": (
            "BasicCommsBandwidths CacheStatistics CollectiveType CriticalPathEstimate CustomTopologyData "
            "DeviceHardware Enumerator GeneralizedCommsBandwidth HardwareConfig KernelConfig ParameterConstraints "
            "PartitionByType Partitioner Perf PerfModel PipelineType PlanDebugStats PlanLoader PlannerError "
            "PlannerErrorType Proposer Shard ShardEstimator SharderData ShardingOption Stats Storage "
            "StorageReservation Topology TopologyConfigBase TopologyFactory TrainerConfig "
            "hash_planner_context_inputs hash_planner_context_inputs_str hash_sha256_str hash_sha256_to_int "
            "round_to_nearest"
        ),
    },
    "torchrec.distributed.planner.utils": {
        "shardwise.planner.torchrec.utils": (
            "BinarySearchPredicate LuusJaakolaSearch bytes_to_gb bytes_to_mb gb_to_bytes mb_to_bytes placement prod "
            "reset_shard_rank sharder_name storage_repr_in_gb"
        ),
    },
    "torchrec.distributed.quant_embedding": {
        "shardwise.quant": "QuantEmbeddingCollection=EmbeddingCollection",
        "shardwise.sharding.quant": "QuantEmbeddingCollectionSharder ShardedQuantEmbeddingCollection",
        "shardwise.sharding.quant.managed_collision": (
            "QuantManagedCollisionEmbeddingCollectionSharder ShardedQuantManagedCollisionEmbeddingCollection"
        ),
    },
    "torchrec.distributed.quant_embeddingbag": {
        "shardwise.quant": (
            "QuantEmbeddingBagCollection=EmbeddingBagCollection "
            "QuantFeatureProcessedEmbeddingBagCollection=FeatureProcessedEmbeddingBagCollection"
        ),
        "shardwise.sharding.quant": (
            "QuantEmbeddingBagCollectionSharder QuantFeatureProcessedEmbeddingBagCollectionSharder "
            "ShardedQuantEmbeddingBagCollection ShardedQuantFeatureProcessedEmbeddingBagCollection"
        ),
        "shardwise.sharding.quant.managed_collision": (
            "QuantManagedCollisionEmbeddingBagCollectionSharder ShardedQuantManagedCollisionEmbeddingBagCollection"
        ),
    },
    "torchrec.distributed.quant_state": {
        "shardwise.sharding.quant": "WeightSpec sharded_tbes_weights_spec",
    },
    "torchrec.distributed.shard": {
        "shardwise.sharding.dmp.composable": "shard shard_modules _shard_modules",
    },
    "torchrec.distributed.sharding.dynamic_sharding": {
        "shardwise.sharding.torchrec.plan_delta": "output_sharding_plan_delta_single output_sharding_plans_delta",
    },
    "torchrec.distributed.sharding_plan": {
        "shardwise.sharding.modules.generators": (
            "ParameterShardingGenerator apply_to_all calculate_shard_sizes_and_offsets column_wise "
            "construct_module_sharding_plan data_parallel get_module_to_default_sharders "
            "get_sharding_constructor_from_type grid_shard placement placement_helper row_wise table_row_wise "
            "table_wise"
        ),
        "shardwise.sharding.modules.default_sharders": "get_default_sharders",
        "torchrec.distributed.embeddingbag": "EmbeddingBagCollectionSharder",
        "torchrec.distributed.embedding": "EmbeddingCollectionSharder",
        "torchrec.distributed.fused_embeddingbag": "FusedEmbeddingBagCollectionSharder",
        "torchrec.distributed.fp_embeddingbag": "FeatureProcessedEmbeddingBagCollectionSharder",
        "torchrec.distributed.quant_embeddingbag": "QuantEmbeddingBagCollectionSharder",
        "torchrec.distributed.quant_embedding": (
            "QuantEmbeddingCollectionSharder QuantManagedCollisionEmbeddingCollectionSharder"
        ),
        "torchrec.distributed.mc_embeddingbag": "ManagedCollisionEmbeddingBagCollectionSharder",
        "torchrec.distributed.mc_embedding": "ManagedCollisionEmbeddingCollectionSharder",
    },
    "torchrec.distributed.train_pipeline": {
        "torchrec.distributed.train_pipeline.train_pipelines": (
            "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist StagedTrainPipeline TrainPipeline "
            "TrainPipelineBase TrainPipelineSparseDist"
        ),
        "torchrec.distributed.train_pipeline.pipeline_stage": "SparseDataDistUtil",
        "torchrec.distributed.train_pipeline.utils": "DataLoadingThread",
        "torchrec.distributed.train_pipeline.gradient_accumulation": (
            "GradientAccumulationConfig GradientAccumulationWrapper"
        ),
    },
    "torchrec.distributed.train_pipeline.gradient_accumulation": {
        "shardwise.sharding.engine.accumulation": "GradientAccumulationConfig GradientAccumulationWrapper",
    },
    "torchrec.distributed.train_pipeline.pipeline_context": {
        "shardwise.sharding.pipeline.arguments": "PrefetchTrainPipelineContext TrainPipelineContext",
    },
    "torchrec.distributed.train_pipeline.pipeline_stage": {
        "shardwise.sharding.pipeline": "PipelineStage SparseDataDistUtil",
    },
    "torchrec.distributed.train_pipeline.runtime_forwards": {
        "shardwise.sharding.pipeline.forwards": (
            "BaseForward PipelinedForward PrefetchEmbeddingPipelinedForward PrefetchPipelinedForward"
        ),
    },
    "torchrec.distributed.train_pipeline.tracing": {
        "torchrec.distributed.train_pipeline.types": "ArgInfo CallArgs",
        "shardwise.sharding.pipeline.arguments": (
            "ArgInfoStepFactory DictArgInfoStep GetAttrArgInfoStep GetItemArgInfoStep ListArgInfoStep "
            "NoopArgInfoStep PostprocArgInfoStep ScalarArgInfoStep NodeArgsHelper"
        ),
        "shardwise.sharding.dmp.tracing": "Tracer",
    },
    "torchrec.distributed.train_pipeline.train_pipelines": {
        "shardwise.sharding.pipeline": (
            "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist StagedTrainPipeline TrainPipeline "
            "TrainPipelineBase TrainPipelineSparseDist"
        ),
    },
    "torchrec.distributed.train_pipeline.types": {
        "shardwise.sharding.pipeline.arguments": "ArgInfo BaseArgInfoStep CallArgs",
    },
    "torchrec.distributed.train_pipeline.utils": {
        "shardwise.sharding.pipeline": "DataLoadingThread",
        "torchrec.distributed.train_pipeline.pipeline_context": "TrainPipelineContext",
    },
    "torchrec.distributed.types": {
        "shardwise.kernels.lookup.bounds": "BoundsCheckMode",
        "shardwise.sharding.plan.plan": (
            "CacheParams EmbeddingModuleShardingPlan ParameterSharding ShardingPlan ShardingType"
        ),
        "torchrec.types": "DataType",
        "shardwise.sharding.comms.env": "ShardingEnv ShardingEnv2D ShardingStrategy",
        "shardwise.sharding.plan.module_sharder": "ModuleSharder",
        "shardwise.sharding.comms.awaitable": (
            "Awaitable GetItemLazyAwaitable LazyAwaitable LazyGetItemMixin LazyNoWait NoWait"
        ),
        "shardwise.sharding.comms.qcomms": "CommOp NoOpQuantizedCommCodec QuantizedCommCodec QuantizedCommCodecs",
        "shardwise.sharding.dmp.dmp_collection": "DMPCollectionConfig",
        "torch.distributed._shard.sharded_tensor": "ShardedTensor",
        "torch.distributed._shard.metadata": "ShardMetadata",
        "torch.distributed._shard.sharding_spec": "EnumerableShardingSpec",
        "shardwise.embeddings.optim.fbgemm_types": "CacheAlgorithm MultiPassPrefetchConfig",
        "shardwise.sharding.torchrec.fused_params": "KeyValueParams",
        "shardwise.sharding.torchrec.bucketize": "ShardingBucketMetadata",
        "shardwise.planner.torchrec.types": "CacheStatistics PipelineType",
    },
    "torchrec.distributed.utils": {
        "shardwise.sharding.dmp.unwrap": "CopyableMixin copy_to_device get_unsharded_module_names sharded_model_copy",
        "shardwise.sharding.torchrec.fused_params": (
            "add_params_from_parameter_sharding convert_to_fbgemm_types merge_fused_params"
        ),
        "shardwise.sharding.torchrec.bucketize": "get_bucket_metadata_from_shard_metadata",
        "shardwise.embeddings.tables.table_layout": "weights_bytes_in_emb_kernel",
    },
}
