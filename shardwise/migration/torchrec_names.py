"""Table of TorchRec's names and where ours are: read by `shardwise.torchrec` and by `shardwise migrate`.

A name stands at the module of TorchRec that defines it; modules that only pass it on point to that one.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["TABLE", "table"]

# our module, or the module of TorchRec that defines the names: `theirs=ours` where ours has another
NAMES: Mapping[str, Mapping[str, str]] = {
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
    "torchrec.distributed.planner": {
        "torchrec.distributed.planner.planners": "EmbeddingPlannerBase EmbeddingShardingPlanner",
        "torchrec.distributed.planner.types": "ParameterConstraints Topology",
        "torchrec.distributed.planner.utils": "bytes_to_gb sharder_name",
    },
    "torchrec.distributed.planner.constants": {
        "shardwise.planner.constants": (
            "kernel_bw_lookup BATCH_SIZE CROSS_NODE_BANDWIDTH DDR_MEM_BW HBM_MEM_BW HBM_TO_DDR_MEM_BW "
            "INTRA_NODE_BANDWIDTH"
        ),
    },
    "torchrec.distributed.planner.enumerators": {
        "shardwise.planner.torchrec.enumerators": "EmbeddingEnumerator get_partition_by_type",
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
        "shardwise.sharding.pipeline.accumulation": "GradientAccumulationConfig GradientAccumulationWrapper",
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
        "shardwise.sharding.plan.sharded_module": "NullShardedModuleContext ShardedModule",
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
    "torchrec": {
        "torchrec.sparse.jagged_tensor": "JaggedTensor KeyedJaggedTensor KeyedTensor",
        "torchrec.streamable": "Multistreamable Pipelineable",
        "torchrec.types": "DataType",
        "torchrec.modules.embedding_configs": "EmbeddingBagConfig EmbeddingConfig PoolingType",
        "torchrec.modules.embedding_modules": (
            "EmbeddingBagCollection EmbeddingBagCollectionInterface EmbeddingCollection"
        ),
    },
    "torchrec.datasets.criteo": {
        "shardwise.data.criteo_arrays": "BinaryCriteoUtils InMemoryBinaryCriteoIterDataPipe",
        "shardwise.data.torchrec.criteo_lines": (
            "COLUMN_TYPE_CASTERS CriteoIterDataPipe criteo_kaggle criteo_terabyte"
        ),
        "torchrec.datasets.utils": "Batch LoadFiles PATH_MANAGER_KEY ReadLinesFromCSV safe_cast",
        "shardwise.data.criteo": (
            "CAT_FEATURE_COUNT DAYS DEFAULT_CAT_NAMES DEFAULT_COLUMN_NAMES DEFAULT_INT_NAMES DEFAULT_LABEL_NAME "
            "FREQUENCY_THRESHOLD INT_FEATURE_COUNT TOTAL_TRAINING_SAMPLES"
        ),
    },
    "torchrec.datasets.movielens": {
        "shardwise.data.movielens": (
            "DEFAULT_COLUMN_NAMES DEFAULT_MOVIES_COLUMN_NAMES DEFAULT_RATINGS_COLUMN_NAMES MOVIES_FILENAME "
            "RATINGS_FILENAME"
        ),
        "shardwise.data.torchrec.movielens_lines": "COLUMN_TYPE_CASTERS movielens_20m movielens_25m",
    },
    "torchrec.datasets.random": {
        "shardwise.data": "RandomRecDataset",
        "shardwise.data.random_batches": "_RandomRecBatch=RandomBatches",
    },
    "torchrec.datasets.scripts.contiguous_preproc_criteo": {
        "shardwise.data.torchrec.criteo_scripts": "main=contiguous_main",
    },
    "torchrec.datasets.scripts.npy_preproc_criteo": {
        "shardwise.data.torchrec.criteo_scripts": "main=npy_main",
    },
    "torchrec.datasets.scripts.shuffle_preproc_criteo": {
        "shardwise.data.torchrec.criteo_scripts": "main=shuffle_main",
    },
    "torchrec.datasets.utils": {
        "shardwise.data": "Batch idx_split_train_val rand_split_train_val",
        "shardwise.data.paths": "PATH_MANAGER_KEY",
        "shardwise.data.splits": "train_filter val_filter",
        "shardwise.data.torchrec.pipes": "Limit LoadFiles ParallelReadConcat ReadLinesFromCSV safe_cast",
    },
    "torchrec.fx": {
        "torchrec.fx.tracer": "Tracer symbolic_trace",
    },
    "torchrec.fx.tracer": {
        "shardwise.sharding.dmp.tracing": "Tracer symbolic_trace",
    },
    "torchrec.inference.modules": {
        "shardwise.inference.quantize": (
            "quantize_embeddings quantize_feature quantize_inference_model set_pruning_data "
            "trim_torch_package_prefix_from_typename DEFAULT_QUANTIZATION_DTYPE DEFAULT_QUANT_MAPPING"
        ),
        "shardwise.inference.weights": "assign_weights_to_tbe get_table_to_weights_from_tbe",
        "shardwise.inference": "BatchingMetadata PredictFactory PredictModule QualNameMetadata quantize_dense",
        "shardwise.inference.sharded": "shard_quant_model DEFAULT_FUSED_PARAMS DEFAULT_SHARDERS",
    },
    "torchrec.inference.state_dict_transform": {
        "shardwise.sharding.torchrec.state_dict_transform": (
            "state_dict_all_gather_keys state_dict_gather state_dict_to_device"
        ),
    },
    "torchrec.models.deepfm": {
        "shardwise.models.deepfm": "DenseArch OverArch SparseArch",
        "shardwise.models": "FMInteractionArch SimpleDeepFMNN SimpleDeepFMNNWrapper",
    },
    "torchrec.models.dlrm": {
        "shardwise.models": (
            "DLRMTrain DLRMWrapper DLRM_Projection DenseArch InteractionArch InteractionDCNArch "
            "InteractionProjectionArch OverArch SparseArch choose DLRM DLRM_DCN"
        ),
    },
    "torchrec.modules.activation": {
        "shardwise.models": "SwishLayerNorm",
    },
    "torchrec.modules.crossnet": {
        "shardwise.models": "CrossNet LowRankCrossNet LowRankMixtureCrossNet VectorCrossNet",
    },
    "torchrec.modules.deepfm": {
        "shardwise.models": "DeepFM FactorizationMachine",
    },
    "torchrec.modules.embedding_configs": {
        "torchrec.types": "DataType",
        "shardwise.embeddings": (
            "BaseEmbeddingConfig EmbeddingBagConfig EmbeddingConfig PoolingType data_type_to_dtype dtype_to_data_type"
        ),
        "shardwise.quant": "QuantConfig",
        "shardwise.embeddings.config": "EmbeddingTableConfig",
        "shardwise.sharding.plan.plan": "ShardingType",
        "shardwise.embeddings.optim.fbgemm_types": (
            "data_type_to_sparse_type pooling_type_to_pooling_mode pooling_type_to_str"
        ),
    },
    "torchrec.modules.embedding_modules": {
        "shardwise.embeddings": (
            "EmbeddingBagCollection EmbeddingBagCollectionInterface EmbeddingCollection EmbeddingCollectionInterface "
            "get_embedding_names_by_table=embedding_names_by_table"
        ),
        "shardwise.embeddings.torchrec.pooled_outputs": "process_pooled_embeddings reorder_inverse_indices",
    },
    "torchrec.modules.embedding_tower": {
        "shardwise.embeddings": "EmbeddingTower EmbeddingTowerCollection tower_input_params",
    },
    "torchrec.modules.feature_processor": {
        "shardwise.embeddings.collections.position_weights": (
            "BaseFeatureProcessor BaseGroupedFeatureProcessor PositionWeightedModule"
        ),
        "shardwise.embeddings": "PositionWeightedProcessor",
    },
    "torchrec.modules.feature_processor_": {
        "shardwise.embeddings": (
            "FeatureProcessor FeatureProcessorsCollection PositionWeightedModule PositionWeightedModuleCollection"
        ),
    },
    "torchrec.modules.fp_embedding_modules": {
        "shardwise.embeddings": "FeatureProcessedEmbeddingBagCollection FeatureProcessorDictWrapper",
    },
    "torchrec.modules.fused_embedding_modules": {
        "shardwise.embeddings": "FusedEmbeddingBagCollection FusedEmbeddingCollection fuse_embedding_optimizer",
    },
    "torchrec.modules.lazy_extension": {
        "shardwise.models": "LazyModuleExtensionMixin lazy_apply",
    },
    "torchrec.modules.mc_embedding_modules": {
        "shardwise.embeddings.managed_collision": (
            "BaseManagedCollisionEmbeddingCollection ManagedCollisionEmbeddingBagCollection "
            "ManagedCollisionEmbeddingCollection"
        ),
        "torchrec.modules.mc_modules": "ManagedCollisionCollection",
    },
    "torchrec.modules.mc_modules": {
        "shardwise.embeddings.managed_collision": (
            "DistanceLFU_EvictionPolicy LFU_EvictionPolicy LRU_EvictionPolicy MCHEvictionPolicy "
            "MCHEvictionPolicyMetadataInfo MCHManagedCollisionModule ManagedCollisionCollection "
            "ManagedCollisionModule apply_mc_method_to_jt_dict average_threshold_filter dynamic_threshold_filter "
            "probabilistic_threshold_filter"
        ),
    },
    "torchrec.modules.mlp": {
        "shardwise.models": "Perceptron MLP",
    },
    "torchrec.modules.regroup": {
        "shardwise.jagged": "KTRegroupAsDict",
        "shardwise.fbgemm.regroup_module": "PermuteMultiEmbedding",
    },
    "torchrec.modules.utils": {
        "shardwise.embeddings.torchrec.dense_modules": (
            "check_module_output_dimension construct_modulelist_from_single_module "
            "convert_list_of_modules_to_modulelist extract_module_or_tensor_callable get_module_output_dimension "
            "init_mlp_weights_xavier_uniform"
        ),
        "shardwise.embeddings.torchrec.jagged_outputs": (
            "SequenceVBEContext construct_jagged_tensors construct_jagged_tensors_inference deterministic_dedup "
            "jagged_index_select_with_empty reset_module_states_post_sharding"
        ),
    },
    "torchrec.optim": {
        "torchrec.optim.apply_optimizer_in_backward": "apply_optimizer_in_backward",
        "torchrec.optim.keyed": "CombinedOptimizer KeyedOptimizer KeyedOptimizerWrapper OptimizerWrapper",
        "torchrec.optim.rowwise_adagrad": "RowWiseAdagrad",
        "torchrec.optim.optimizers": "Adagrad Adam LarsSGD PartialRowWiseAdam PartialRowWiseLAMB LAMB SGD",
        "torchrec.optim.warmup": "WarmupOptimizer WarmupPolicy WarmupStage",
        "torchrec.optim.clipping": "GradientClipping GradientClippingOptimizer",
        "shardwise.embeddings": "EmptyFusedOptimizer",
        "torchrec.optim.fused": "FusedOptimizer FusedOptimizerModule",
    },
    "torchrec.optim.apply_optimizer_in_backward": {
        "shardwise.embeddings": "apply_optimizer_in_backward",
    },
    "torchrec.optim.clipping": {
        "shardwise.embeddings": "GradientClipping GradientClippingOptimizer",
    },
    "torchrec.optim.fused": {
        "shardwise.embeddings": "EmptyFusedOptimizer FusedOptimizer FusedOptimizerModule",
    },
    "torchrec.optim.keyed": {
        "shardwise.embeddings": "CombinedOptimizer KeyedOptimizer KeyedOptimizerWrapper OptimizerWrapper",
    },
    "torchrec.optim.optimizers": {
        "torch.optim": "Adagrad Adam SGD",
        "shardwise.embeddings": "LarsSGD PartialRowWiseAdam PartialRowWiseLAMB in_backward_optimizer_filter LAMB",
    },
    "torchrec.optim.rowwise_adagrad": {
        "shardwise.embeddings": "RowWiseAdagrad",
    },
    "torchrec.optim.semi_sync": {
        "shardwise.embeddings": "SemisyncOptimizer",
    },
    "torchrec.optim.warmup": {
        "shardwise.embeddings": "WarmupOptimizer WarmupPolicy WarmupStage",
    },
    "torchrec.quant": {
        "torchrec.quant.embedding_modules": "EmbeddingBagCollection",
    },
    "torchrec.quant.embedding_modules": {
        "shardwise.quant": (
            "EmbeddingBagCollection EmbeddingCollection FeatureProcessedEmbeddingBagCollection "
            "for_each_module_of_type_do quant_prep_customize_row_alignment quant_prep_enable_cache_features_order "
            "quant_prep_enable_quant_state_dict_split_scale_bias "
            "quant_prep_enable_quant_state_dict_split_scale_bias_for_types quant_prep_enable_register_tbes "
            "quantize_state_dict"
        ),
        "shardwise.embeddings.quant": (
            "QuantManagedCollisionEmbeddingBagCollection QuantManagedCollisionEmbeddingCollection"
        ),
    },
    "torchrec.quant.utils": {
        "shardwise.quant": "meta_to_cpu_placement",
    },
    "torchrec.sparse.jagged_tensor": {
        "shardwise.jagged": (
            "ComputeJTDictToKJT ComputeKJTToJTDict JaggedTensor KeyedJaggedTensor KeyedTensor flatten_kjt_list "
            "jt_is_equal kjt_is_equal permute_multi_embedding regroup_kts unflatten_kjt_list"
        ),
    },
    "torchrec.schema.utils": {
        "shardwise.migration.signatures": "is_signature_compatible",
    },
    "torchrec.sparse.jagged_tensor_validator": {
        "shardwise.jagged": "validate_keyed_jagged_tensor",
    },
    "torchrec.sparse.tensor_dict": {
        "shardwise.jagged": "maybe_td_to_kjt",
    },
    "torchrec.streamable": {
        "shardwise.jagged": "Multistreamable Pipelineable",
    },
    "torchrec.test_utils": {
        "shardwise.sharding.testing.environment": (
            "assert_state_buffers_parameters_equal cuda_device_count get_free_port get_state_buffers_parameters "
            "init_distributed_single_host is_asan is_asan_or_tsan is_tsan seed_and_log skip_if_asan skip_if_asan_class"
        ),
    },
    "torchrec.types": {
        "shardwise.embeddings": "DataType",
        "shardwise.jagged.modules": "CacheMixin",
    },
}


def table(names: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """`names` with one entry a name, and each pointer to another module of TorchRec followed."""
    resolved_names: dict[str, dict[str, str]] = {}

    def entries(path: str) -> dict[str, str]:
        if path not in resolved_names:
            resolved = resolved_names[path] = {}
            for source, group in names[path].items():
                for torchrec_name, _, shardwise_name in (entry.partition("=") for entry in group.split()):
                    passed_on = source in names
                    resolved[torchrec_name] = (
                        entries(source)[shardwise_name or torchrec_name]
                        if passed_on
                        else f"{source}:{shardwise_name or torchrec_name}"
                    )
        return resolved_names[path]

    return {path: entries(path) for path in names}


# TorchRec's module -> its name -> where ours is, as module:name
TABLE: Mapping[str, Mapping[str, str]] = table(NAMES)
