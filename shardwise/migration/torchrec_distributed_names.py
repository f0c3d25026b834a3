"""Names of TorchRec below `torchrec.distributed`, part of the table in torchrec_names.py: where ours are."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DISTRIBUTED"]

DISTRIBUTED: Mapping[str, Mapping[str, str]] = {
    "torchrec.distributed": {
        "torchrec.distributed.model_parallel": "DistributedModelParallel",
        "torchrec.distributed.types": "Awaitable ModuleSharder NoWait ParameterSharding ShardedModule ShardingEnv",
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
        "shardwise.sharding.torchrec.collective_utils": "invoke_on_rank_and_broadcast_result is_leader run_on_leader",
    },
    "torchrec.distributed.comm": {
        "shardwise.sharding.comms.env": (
            "get_group_rank get_local_rank get_local_size get_node_group_size get_num_groups "
            "get_topology_domain_multiple get_topology_group_world_size intra_and_cross_node_pg "
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
        "shardwise.sharding.modules.sharders": "EmbeddingCollectionSharder get_ec_index_dedup set_ec_index_dedup",
        "shardwise.sharding.modules.sharded_collections": "EmbeddingCollectionAwaitable ShardedEmbeddingCollection",
        "torchrec.distributed.embedding_sharding": "EmbeddingSharding EmbeddingShardingInfo KJTListSplitsAwaitable",
        "shardwise.sharding.torchrec.embedding_sharding": (
            "create_sharding_infos_by_sharding_device_group=infos_of_rows"
        ),
    },
    "torchrec.distributed.embedding_lookup": {
        "torchrec.distributed.embedding_types": "BaseEmbeddingLookup EmbeddingComputeKernel GroupedEmbeddingConfig",
        "shardwise.sharding.torchrec.grouped_lookup": (
            "CommOpGradientScaling GroupedEmbeddingsLookup GroupedPooledEmbeddingsLookup"
        ),
    },
    "torchrec.distributed.embedding_sharding": {
        "torchrec.distributed.embedding_types": "GroupedEmbeddingConfig KJTList ListOfKJTList ShardedEmbeddingTable",
        "shardwise.sharding.torchrec.embedding_sharding": (
            "BaseEmbeddingDist BaseSparseFeaturesDist EmbeddingSharding EmbeddingShardingContext "
            "EmbeddingShardingInfo KJTListAwaitable KJTListSplitsAwaitable ListOfKJTListAwaitable "
            "ListOfKJTListSplitsAwaitable group_tables"
        ),
        "shardwise.sharding.torchrec.bucketize": "bucketize_kjt_before_all2all",
    },
    "torchrec.distributed.embedding_tower_sharding": {
        "shardwise.sharding.modules.nested": (
            "EmbeddingTowerCollectionSharder EmbeddingTowerSharder ShardedEmbeddingTower "
            "ShardedEmbeddingTowerCollection"
        ),
    },
    "torchrec.distributed.embedding_types": {
        "torchrec.modules.feature_processor": "BaseGroupedFeatureProcessor",
        "shardwise.sharding.torchrec.embedding_types": (
            "BaseEmbeddingLookup DTensorMetadata EmbeddingAttributes "
            "FeatureShardingMixIn GroupedEmbeddingConfig InputDistOutputs KJTList ListOfKJTList ModuleShardingMixIn "
            "ShardedConfig ShardedEmbeddingModule ShardedEmbeddingTable ShardedMetaConfig "
            "compute_kernel_to_embedding_location"
        ),
        "shardwise.sharding.plan.plan": "EmbeddingComputeKernel",
        "shardwise.sharding.modules.sharders": "BaseEmbeddingSharder",
        "torchrec.modules.embedding_configs": "EmbeddingTableConfig",
        "shardwise.sharding.quant": "BaseQuantEmbeddingSharder",
    },
    "torchrec.distributed.embeddingbag": {
        "torchrec.distributed.embedding_sharding": "EmbeddingSharding EmbeddingShardingInfo KJTListSplitsAwaitable",
        "shardwise.sharding.torchrec.embedding_sharding": (
            "create_sharding_infos_by_sharding_device_group=infos_of_bags"
        ),
        "shardwise.sharding.torchrec.mean_pooling": "_apply_mean_pooling _create_mean_pooling_divisor",
        "shardwise.sharding.modules.sharders": "EmbeddingBagCollectionSharder",
        "shardwise.sharding.modules.embedding_bag": "EmbeddingBagSharder ShardedEmbeddingBag",
        "shardwise.sharding.modules.sharded_collections": (
            "EmbeddingBagCollectionAwaitable ShardedEmbeddingBagCollection logger"
        ),
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
        "shardwise.sharding.modules.sharded_collections": "ShardedFusedEmbeddingCollection",
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
    "torchrec.distributed.itep_embeddingbag": {
        "shardwise.sharding.modules.itep": (
            "ITEPEmbeddingBagCollectionSharder ITEPEmbeddingCollectionSharder ShardedITEPEmbeddingBagCollection "
            "ShardedITEPEmbeddingCollection"
        ),
    },
    "torchrec.distributed.keyed_jagged_tensor_pool": {
        "shardwise.sharding.pools": (
            "KeyedJaggedTensorPoolAwaitable KeyedJaggedTensorPoolSharder ShardedInferenceKeyedJaggedTensorPool "
            "ShardedKeyedJaggedTensorPool"
        ),
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
        "shardwise.sharding.modules.managed_collision": (
            "ManagedCollisionCollectionSharder ShardedManagedCollisionCollection"
        ),
        "shardwise.sharding.quant.managed_collision": "InferManagedCollisionCollectionSharder",
    },
    "torchrec.distributed.model_parallel": {
        "shardwise.sharding.dmp.dmp": "DistributedModelParallel",
        "shardwise.sharding.plan.sharded_module": "ShardedModule",
        "shardwise.sharding.dmp.data_parallel": "DataParallelWrapper DefaultDataParallelWrapper",
        "torchrec.distributed.sharding_plan": "get_default_sharders",
        "shardwise.sharding.dmp.dmp_collection": "DMPCollection",
        "shardwise.sharding.dmp.unwrap": "get_module get_unwrapped_module",
    },
    "torchrec.distributed.object_pool": {
        "shardwise.sharding.pools": "ShardedObjectPool",
    },
    "torchrec.distributed.planner": {
        "torchrec.distributed.planner.planners": "EmbeddingPlannerBase EmbeddingShardingPlanner",
        "torchrec.distributed.planner.types": "ParameterConstraints Topology",
        "torchrec.distributed.planner.utils": "bytes_to_gb sharder_name",
    },
    "torchrec.distributed.planner.constants": {
        "shardwise.planner.constants": (
            "kernel_bw_lookup BATCHED_COPY_PERF_FACTOR BATCH_SIZE BIGINT_DTYPE BWD_COMPUTE_MULTIPLIER "
            "CROSS_NODE_BANDWIDTH DDR_CAP DDR_MEM_BW DEFAULT_PERF_ESTIMATOR DP_ELEMENTWISE_KERNELS_PERF_FACTOR "
            "FULL_BLOCK_EMB_DIM HALF_BLOCK_PENALTY HBM_CAP HBM_MEM_BW HBM_TO_DDR_MEM_BW HUNDRED_GB "
            "INTRA_NODE_BANDWIDTH KV_CACHING_RATIO MAX_SIZE MIN_CW_DIM NUM_POOLINGS POOLING_FACTOR "
            "QUARTER_BLOCK_PENALTY SSD_CAP SSD_MEM_BW UVM_CACHING_RATIO WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER "
            "WEIGHTED_KERNEL_MULTIPLIER"
        ),
        "torchrec.distributed.embedding_types": "EmbeddingComputeKernel",
    },
    "torchrec.distributed.planner.enumerators": {
        "shardwise.planner.torchrec.enumerators": (
            "EmbeddingEnumerator GUARDED_SHARDING_TYPES_FOR_FP_MODULES=GUARDED_TYPES_OF_PROCESSED get_partition_by_type"
        ),
        "shardwise.sharding.planning.options": "GUARDED_COMPUTE_KERNELS",
        "torchrec.distributed.embedding_types": "EmbeddingComputeKernel",
        "torchrec.distributed.planner.constants": "DEFAULT_PERF_ESTIMATOR POOLING_FACTOR",
        "torchrec.distributed.planner.estimator.estimator": "EmbeddingPerfEstimatorFactory",
        "torchrec.distributed.planner.shard_estimators": "EmbeddingStorageEstimator",
        "torchrec.distributed.planner.types": (
            "Enumerator ParameterConstraints PartitionByType Shard ShardEstimator ShardingOption Topology"
        ),
        "torchrec.distributed.planner.utils": "build_sharder_data_map sharder_name",
        "torchrec.distributed.sharding_plan": "calculate_shard_sizes_and_offsets",
        "torchrec.distributed.types": "BoundsCheckMode CacheParams KeyValueParams ModuleSharder ShardingType",
        "torchrec.modules.embedding_configs": "DataType",
        "torchrec.modules.embedding_modules": "EmbeddingBagCollection EmbeddingCollection",
        "torchrec.modules.embedding_tower": "EmbeddingTower EmbeddingTowerCollection",
        "torchrec.modules.mc_embedding_modules": "BaseManagedCollisionEmbeddingCollection",
    },
    "torchrec.distributed.planner.estimator": {
        "torchrec.distributed.planner.estimator.annotations": (
            "backward_compute bwd_coefficient device_bw forward_compute fwd_coefficient output_write_size "
            "prefetch_coefficient ssd_mem_bw supported_sharding_types"
        ),
        "torchrec.distributed.planner.estimator.config": "EmbeddingPerfEstimatorConfig",
        "torchrec.distributed.planner.estimator.estimator": "EmbeddingPerfEstimatorFactory EmbeddingPerfEstimatorV2",
        "torchrec.distributed.planner.estimator.types": (
            "EstimatorPerfCoefficients HardwarePerfConfig PerfCoefficient PerfCoefficientConfig PrefetchCoefficients "
            "ShardPerfContext"
        ),
    },
    "torchrec.distributed.planner.estimator.annotations": {
        "shardwise.planner.torchrec.annotations": (
            "backward_compute bwd_coefficient bwd_comms ddr_mem_bw device_bw forward_compute fwd_coefficient fwd_comms "
            "get_backward_compute get_bwd_coefficient get_bwd_comms get_forward_compute get_fwd_coefficient "
            "get_fwd_comms get_input_dist_comms get_output_write_size get_prefetch_coefficient get_prefetch_compute "
            "hbm_mem_bw hbm_to_ddr_mem_bw input_data_type_size input_dist_comms inter_host_bw intra_host_bw "
            "output_write_size prefetch_coefficient prefetch_compute ssd_mem_bw supported_sharding_types "
            "use_block_usage_penalty use_bytes_for_input_read_size use_min_dim_for_lookup"
        ),
    },
    "torchrec.distributed.planner.estimator.config": {
        "shardwise.planner.torchrec.hardware": "EmbeddingPerfEstimatorConfig",
    },
    "torchrec.distributed.planner.estimator.estimator": {
        "shardwise.planner.torchrec.evaluators": (
            "ColumnWiseEvaluator DataParallelEvaluator EmbeddingShardingPerfEvaluator GridShardEvaluator "
            "INFERENCE_EVALUATORS RowWiseEvaluator TRAINING_EVALUATORS TableColumnWiseEvaluator "
            "TableRowWiseEvaluator TableWiseEvaluator compute_block_usage_penalty "
            "get_embedding_perf_sharding_evaluator"
        ),
        "shardwise.planner.torchrec.perf_estimators": (
            "EmbeddingPerfEstimator EmbeddingPerfEstimatorFactory EmbeddingPerfEstimatorV2=EmbeddingPerfEstimator"
        ),
    },
    "torchrec.distributed.planner.estimator.types": {
        "shardwise.planner.torchrec.hardware": (
            "EstimatorPerfCoefficients HardwarePerfConfig PerfCoefficient PerfCoefficientConfig PrefetchCoefficients"
        ),
        "shardwise.planner.torchrec.shard_context": "ShardPerfContext",
    },
    "torchrec.distributed.planner.partitioners": {
        "shardwise.planner.torchrec.partitioners": (
            "GreedyPerfPartitioner MemoryBalancedPartitioner ShardingOptionGroup SortBy"
        ),
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
        "torchrec.distributed.collective_utils": "invoke_on_rank_and_broadcast_result",
        "torchrec.distributed.comm": "get_local_size",
        "torchrec.distributed.embedding_types": "EmbeddingComputeKernel",
        "torchrec.distributed.planner.constants": "BATCH_SIZE MAX_SIZE",
        "torchrec.distributed.planner.enumerators": "EmbeddingEnumerator",
        "torchrec.distributed.planner.partitioners": "GreedyPerfPartitioner",
        "torchrec.distributed.planner.perf_models": "NoopPerfModel",
        "torchrec.distributed.planner.proposers": "GreedyProposer GridSearchProposer UniformProposer",
        "torchrec.distributed.planner.stats": "EmbeddingStats",
        "torchrec.distributed.planner.storage_reservations": (
            "FixedAbsoluteStorageReservation HeuristicalStorageReservation"
        ),
        "torchrec.distributed.planner.types": (
            "Enumerator ParameterConstraints Partitioner PerfModel PlanDebugStats PlanLoader PlannerError "
            "PlannerErrorType Proposer ShardingOption Stats Storage StorageReservation Topology "
            "hash_planner_context_inputs hash_planner_context_inputs_str"
        ),
        "torchrec.distributed.planner.utils": "bytes_to_gb reset_shard_rank sharder_name storage_repr_in_gb",
        "torchrec.distributed.sharding_plan": "get_default_sharders placement",
        "torchrec.distributed.types": (
            "EmbeddingModuleShardingPlan EnumerableShardingSpec ModuleSharder ParameterSharding ShardMetadata "
            "ShardingPlan ShardingType"
        ),
    },
    "torchrec.distributed.planner.proposers": {
        "shardwise.planner.torchrec.proposers": (
            "DynamicProgrammingProposer EmbeddingOffloadScaleupProposer GreedyProposer GridSearchProposer "
            "MAX_PROPOSALS UniformProposer proposers_to_proposals_list"
        ),
    },
    "torchrec.distributed.planner.shard_estimators": {
        "torchrec.distributed.planner.estimator.estimator": "EmbeddingPerfEstimator",
        "shardwise.planner.torchrec.storage_estimators": (
            "EmbeddingOffloadStats EmbeddingStorageEstimator calculate_pipeline_io_cost calculate_shard_storages"
        ),
        "torchrec.distributed.planner.constants": (
            "BIGINT_DTYPE DEFAULT_PERF_ESTIMATOR KV_CACHING_RATIO NUM_POOLINGS UVM_CACHING_RATIO"
        ),
        "torchrec.distributed.planner.utils": "get_num_poolings prod",
    },
    "torchrec.distributed.planner.stats": {
        "shardwise.planner.torchrec.stats": "EmbeddingStats NoopEmbeddingStats",
    },
    "torchrec.distributed.planner.storage_reservations": {
        "shardwise.planner.torchrec.reservations": (
            "FixedAbsoluteStorageReservation FixedPercentageStorageReservation HeuristicalStorageReservation "
            "InferenceStorageReservation SKUAwareStorageReservation StorageReservationType"
        ),
    },
    "torchrec.distributed.planner.types": {
        "torchrec.distributed.planner.constants": (
            "BATCH_SIZE BWD_COMPUTE_MULTIPLIER CROSS_NODE_BANDWIDTH DDR_CAP DDR_MEM_BW HBM_CAP HBM_MEM_BW "
            "HBM_TO_DDR_MEM_BW HUNDRED_GB INTRA_NODE_BANDWIDTH POOLING_FACTOR SSD_CAP SSD_MEM_BW "
            "WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER"
        ),
        "torchrec.distributed.types": "BoundsCheckMode CacheParams KeyValueParams ModuleSharder ShardingPlan",
        "torchrec.modules.embedding_configs": "DataType",
        "torchrec.modules.embedding_modules": "EmbeddingBagCollectionInterface EmbeddingCollectionInterface",
        "torchrec.modules.mc_embedding_modules": "ManagedCollisionEmbeddingCollection",
        "shardwise.planner.torchrec.types": (
            "BasicCommsBandwidths CacheStatistics CollectiveType CriticalPathEstimate CustomTopologyData "
            "DeviceHardware Enumerator GeneralizedCommsBandwidth HardwareConfig KernelConfig ParameterConstraints "
            "PartitionByType Partitioner Perf PerfModel PipelineType PlanDebugStats PlanLoader PlannerError "
            "PlannerErrorType Proposer Shard ShardEstimator SharderData ShardingOption Stats Storage "
            "StorageReservation StorageUsageType Topology TopologyConfigBase TopologyFactory TrainerConfig "
            "hash_planner_context_inputs hash_planner_context_inputs_str hash_sha256_str hash_sha256_to_int "
            "round_to_nearest"
        ),
    },
    "torchrec.distributed.planner.utils": {
        "shardwise.planner.torchrec.utils": (
            "BinarySearchPredicate LuusJaakolaSearch build_sharder_data build_sharder_data_map bytes_to_gb bytes_to_mb "
            "extract_comm_data_type_size gb_to_bytes get_num_poolings is_prefetch_pipelined mb_to_bytes placement prod "
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
    "torchrec.distributed.shards_wrapper": {
        "shardwise.sharding.plan.local_shards": "LocalShardsWrapper",
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
    "torchrec.distributed.test_utils.emb_sharder": {
        "shardwise.sharding.testing.one_way_sharders": (
            "TestEBCSharder TestEBCSharderMCH TestEBSharder TestECSharder TestETCSharder TestETSharder "
            "TestFusedEBCSharder TestFusedECSharder TestMCSharder"
        ),
    },
    "torchrec.distributed.test_utils.multi_process": {
        "shardwise.sharding.testing.processes": "MultiProcessContext MultiProcessTestBase run_multi_process_func",
        "torchrec.test_utils": "get_free_port init_distributed_single_host seed_and_log",
    },
    "torchrec.distributed.test_utils.process_runner": {
        "shardwise.sharding.testing.processes": (
            "REQUIRED_ENV_VARS SingleProcessContext check_required_env_vars run_local_multi_process_func "
            "run_single_process_func"
        ),
    },
    "torchrec.distributed.test_utils.test_model": {
        "shardwise.sharding.testing.model_input": "ModelInput",
        "shardwise.sharding.testing.sparse_model": (
            "DENSE_LAYER_OUT_SIZE OVER_ARCH_OUT_SIZE TestDHNArch TestDenseArch TestEBCSparseArch TestNegSamplingModule "
            "TestOverArch TestOverArchRegroupModule TestPositionWeightedPreprocModule TestSparseNN TestSparseNNBase "
            "TestTowerCollectionSparseNN TestTowerInteraction TestTowerSparseNN"
        ),
        # where they were before 1.8
        "torchrec.distributed.test_utils.emb_sharder": (
            "TestEBCSharder TestEBCSharderMCH TestEBSharder TestECSharder TestETCSharder TestETSharder "
            "TestFusedEBCSharder TestFusedECSharder TestMCSharder"
        ),
    },
    "torchrec.distributed.test_utils.test_sharding": {
        "shardwise.sharding.testing.one_way_sharders": "SharderType create_test_sharder",
        "shardwise.sharding.testing.state": "copy_state_dict",
    },
    "torchrec.distributed.train_pipeline": {
        "torchrec.distributed.train_pipeline.train_pipelines": (
            "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist StagedTrainPipeline TorchCompileConfig "
            "TrainPipeline TrainPipelineBase TrainPipelineFusedSparseDist TrainPipelinePT2 TrainPipelineSparseDist "
            "TrainPipelineSparseDistCompAutograd"
        ),
        "torchrec.distributed.train_pipeline.pipeline_context": "In Out TrainPipelineContext",
        "torchrec.distributed.train_pipeline.pipeline_stage": "SparseDataDistUtil StageOut",
        "torchrec.distributed.train_pipeline.tracing": "ArgInfoStepFactory Tracer",
        "torchrec.distributed.train_pipeline.types": "ArgInfo CallArgs",
        "torchrec.distributed.train_pipeline.utils": "DataLoadingThread",
        "torchrec.distributed.train_pipeline.gradient_accumulation": (
            "GradientAccumulationConfig GradientAccumulationWrapper"
        ),
    },
    "torchrec.distributed.train_pipeline.gradient_accumulation": {
        "shardwise.sharding.pipeline.accumulation": "GradientAccumulationConfig GradientAccumulationWrapper",
    },
    "torchrec.distributed.train_pipeline.pipeline_context": {
        "shardwise.sharding.pipeline.arguments": (
            "EmbeddingTrainPipelineContext PrefetchTrainPipelineContext TrainPipelineContext"
        ),
        "shardwise.sharding.pipeline.base": "In Out",
    },
    "torchrec.distributed.train_pipeline.pipeline_stage": {
        "shardwise.sharding.pipeline": "PipelineStage SparseDataDistUtil",
        "shardwise.sharding.pipeline.staged": "StageOut",
    },
    "torchrec.distributed.train_pipeline.postproc": {
        "shardwise.sharding.pipeline.postproc": "NoOpStream PipelinedPostproc",
    },
    "torchrec.distributed.train_pipeline.runtime_forwards": {
        "shardwise.sharding.pipeline.forwards": (
            "BaseForward EmbeddingPipelinedForward InSyncEmbeddingPipelinedForward PipelinedForward "
            "PrefetchEmbeddingPipelinedForward PrefetchPipelinedForward"
        ),
    },
    "torchrec.distributed.train_pipeline.tracing": {
        "torchrec.distributed.train_pipeline.types": "ArgInfo CallArgs",
        "shardwise.sharding.pipeline.arguments": (
            "ArgInfoStepFactory DictArgInfoStep GetAttrArgInfoStep GetItemArgInfoStep ListArgInfoStep "
            "NoopArgInfoStep PostprocArgInfoStep ScalarArgInfoStep NodeArgsHelper"
        ),
        "shardwise.sharding.pipeline.tracing": "Tracer",
    },
    "torchrec.distributed.train_pipeline.train_pipelines": {
        "shardwise.sharding.pipeline": (
            "EvalPipelineFusedSparseDist EvalPipelineSparseDist PrefetchTrainPipelineSparseDist StagedTrainPipeline "
            "TorchCompileConfig TrainPipeline TrainPipelineBase TrainPipelineFusedSparseDist TrainPipelinePT2 "
            "TrainPipelineSemiSync TrainPipelineSparseDist TrainPipelineSparseDistCompAutograd "
            "TrainPipelineSparseDistLite"
        ),
    },
    "torchrec.distributed.train_pipeline.types": {
        "shardwise.sharding.pipeline.arguments": "ArgInfo BaseArgInfoStep CallArgs",
    },
    "torchrec.distributed.train_pipeline.utils": {
        "shardwise.sharding.pipeline": "DataLoadingThread",
        "torchrec.distributed.train_pipeline.pipeline_context": "In Out TrainPipelineContext",
        "torchrec.distributed.train_pipeline.tracing": "Tracer",
    },
    "torchrec.distributed.tensor_pool": {
        "shardwise.sharding.pools": (
            "LocalShardPool ShardedInferenceTensorPool ShardedTensorPool TensorPoolAwaitable TensorPoolSharder"
        ),
    },
    "torchrec.distributed.types": {
        "shardwise.kernels.lookup.bounds": "BoundsCheckMode",
        "shardwise.sharding.plan.plan": (
            "CacheParams EmbeddingModuleShardingPlan ParameterSharding ShardingPlan ShardingType"
        ),
        "torchrec.types": "DataType",
        "shardwise.sharding.comms.env": "ShardingEnv ShardingEnv2D ShardingStrategy",
        "shardwise.sharding.plan.module_sharder": "ModuleSharder",
        "shardwise.sharding.plan.sharded_module": "NullShardedModuleContext ShardedModule",
        "shardwise.sharding.comms.awaitable": (
            "Awaitable GetItemLazyAwaitable LazyAwaitable LazyGetItemMixin LazyNoWait NoWait"
        ),
        "shardwise.sharding.comms.qcomms": "CommOp NoOpQuantizedCommCodec QuantizedCommCodec QuantizedCommCodecs",
        "shardwise.sharding.dmp.dmp_collection": "DMPCollectionConfig",
        "torch.distributed._shard.sharded_tensor": "ShardedTensor",
        "torch.distributed._shard.metadata": "ShardMetadata",
        "torch.distributed._shard.sharded_tensor.metadata": "ShardedTensorMetadata",
        "torch.distributed._shard.sharding_spec": "EnumerableShardingSpec",
        "shardwise.embeddings.optim.fbgemm_types": "CacheAlgorithm MultiPassPrefetchConfig",
        "shardwise.sharding.torchrec.fused_params": "KeyValueParams",
        "shardwise.sharding.torchrec.bucketize": "ShardingBucketMetadata",
        "shardwise.planner.torchrec.types": "CacheStatistics PipelineType",
        "shardwise.sharding.pools": "ObjectPoolShardingPlan ObjectPoolShardingType",
    },
    "torchrec.distributed.utils": {
        "shardwise.sharding.dmp.unwrap": "CopyableMixin copy_to_device get_unsharded_module_names sharded_model_copy",
        "shardwise.sharding.torchrec.fused_params": (
            "add_params_from_parameter_sharding convert_to_fbgemm_types emb_opt_type_to_optimizer_class "
            "merge_fused_params optimizer_type_to_emb_opt_type"
        ),
        "shardwise.sharding.torchrec.bucketize": "get_bucket_metadata_from_shard_metadata",
        "shardwise.embeddings.tables.table_layout": "weights_bytes_in_emb_kernel",
    },
}
