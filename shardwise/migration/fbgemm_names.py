"""What of FBGEMM's is served: where its modules' names are here, and the names of its ops."""

from __future__ import annotations

from collections.abc import Mapping

from .torchrec_names import table

__all__ = ["FBGEMM", "FBGEMM_OPS"]

# of FBGEMM's modules what programs import, for machines without it
FBGEMM_NAMES: Mapping[str, Mapping[str, str]] = {
    # its import registers ops
    "fbgemm_gpu.sparse_ops": {},
    "fbgemm_gpu.split_table_batched_embeddings_ops": {
        "shardwise.embeddings": "WeightDecayMode",
        "shardwise.embeddings.optim.fbgemm_types": (
            "CacheAlgorithm ComputeDevice EmbeddingLocation OptimType PoolingMode RecordCacheMetrics "
            "SparseType SplitState"
        ),
        "shardwise.fbgemm.tables": (
            "CounterBasedRegularizationDefinition CounterWeightDecayMode "
            "DenseTableBatchedEmbeddingBagsCodegen GradSumDecay IntNBitTableBatchedEmbeddingBagsCodegen "
            "LearningRateMode SplitTableBatchedEmbeddingBagsCodegen TailIdThreshold align_to_cacheline "
            "round_up rounded_row_size_in_bytes unpadded_row_size_in_bytes"
        ),
        "shardwise.kernels.lookup.bounds": "BoundsCheckMode",
    },
    "fbgemm_gpu.split_table_batched_embeddings_ops_training": {
        "shardwise.embeddings": "WeightDecayMode",
        "shardwise.embeddings.optim.fbgemm_types": (
            "CacheAlgorithm ComputeDevice EmbeddingLocation MultiPassPrefetchConfig OptimType PoolingMode "
            "RecordCacheMetrics SparseType SplitState get_available_compute_device"
        ),
        "shardwise.fbgemm.tables": (
            "CounterBasedRegularizationDefinition CounterWeightDecayMode CowClipDefinition "
            "DenseTableBatchedEmbeddingBagsCodegen DoesNotHavePrefix EmainplaceModeDefinition "
            "EnsembleModeDefinition GlobalWeightDecayDefinition GradSumDecay LearningRateMode "
            "SplitTableBatchedEmbeddingBagsCodegen StepMode TailIdThreshold UserEnabledConfigDefinition"
        ),
        "shardwise.kernels.lookup.bounds": "BoundsCheckMode",
    },
    "fbgemm_gpu.split_table_batched_embeddings_ops_training_common": {
        "shardwise.embeddings.optim.fbgemm_types": "PoolingMode sparse_type_int_to_dtype",
    },
    "fbgemm_gpu.split_table_batched_embeddings_ops_inference": {
        "shardwise.embeddings.optim.fbgemm_types": (
            "CacheAlgorithm EmbeddingLocation EmbeddingSpecInfo PoolingMode RecordCacheMetrics SparseType "
            "SplitState get_new_embedding_location sparse_type_to_int"
        ),
        "shardwise.fbgemm.tables": (
            "IntNBitTableBatchedEmbeddingBagsCodegen align_to_cacheline nbit_construct_split_state round_up "
            "rounded_row_size_in_bytes tensor_to_device unpadded_row_size_in_bytes"
        ),
        "shardwise.kernels.lookup.bounds": "BoundsCheckMode",
    },
    "fbgemm_gpu.split_table_batched_embeddings_ops_common": {
        "shardwise.embeddings.optim.fbgemm_types": (
            "CacheAlgorithm ComputeDevice EmbeddingLocation EmbeddingSpecInfo MultiPassPrefetchConfig "
            "PoolingMode RecordCacheMetrics SplitState get_new_embedding_location"
        ),
        "shardwise.fbgemm.tables": "round_up tensor_to_device",
        "shardwise.kernels.lookup.bounds": "BoundsCheckMode",
    },
    "fbgemm_gpu.batched_unary_embeddings_ops": {
        "shardwise.fbgemm.tables": "BatchedUnaryEmbeddingBag wrap_weight_to_parameter",
    },
    "fbgemm_gpu.permute_pooled_embedding_modules": {
        "shardwise.fbgemm.tables": "PermutePooledEmbeddings",
    },
    "fbgemm_gpu.permute_pooled_embedding_modules_split": {
        "shardwise.fbgemm.tables": "PermutePooledEmbeddingsSplit",
    },
    "fbgemm_gpu.split_embedding_configs": {
        "shardwise.embeddings.optim.fbgemm_types": (
            "EmbOptimType EmbeddingLocation SparseType SplitState sparse_type_int_to_dtype sparse_type_to_int"
        ),
    },
    "fbgemm_gpu.split_embedding_utils": {
        "shardwise.fbgemm.tables": (
            "TBERequest b_indices generate_requests get_device get_table_batched_offsets_from_dense round_up to_device"
        ),
    },
    "fbgemm_gpu.tbe.utils": {
        "shardwise.fbgemm.tables": (
            "TBERequest b_indices generate_requests get_device get_table_batched_offsets_from_dense round_up to_device"
        ),
    },
    "fbgemm_gpu.tbe.utils.common": {
        "shardwise.fbgemm.tables": "get_device round_up to_device",
    },
    "fbgemm_gpu.tbe.utils.offsets": {
        "shardwise.fbgemm.tables": "b_indices get_offsets_from_dense get_table_batched_offsets_from_dense to_device",
    },
    "fbgemm_gpu.tbe.utils.requests": {
        "shardwise.fbgemm.tables": "TBERequest generate_requests get_device get_table_batched_offsets_from_dense",
    },
    "fbgemm_gpu.tbe.config": {
        "shardwise.embeddings": "WeightDecayMode",
        "shardwise.embeddings.optim.fbgemm_types": (
            "ComputeDevice EmbeddingLocation EmbeddingSpecInfo PoolingMode RecordCacheMetrics SplitState"
        ),
        "shardwise.fbgemm.tables": (
            "CounterBasedRegularizationDefinition CounterWeightDecayMode CowClipDefinition DoesNotHavePrefix "
            "EmainplaceModeDefinition EnsembleModeDefinition GlobalWeightDecayDefinition GradSumDecay "
            "LearningRateMode StepMode TailIdThreshold UserEnabledConfigDefinition round_up tensor_to_device"
        ),
        "shardwise.kernels.lookup.bounds": "BoundsCheckMode",
    },
    "fbgemm_gpu.tbe.config.optimizer_config": {
        "shardwise.embeddings": "WeightDecayMode",
        "shardwise.fbgemm.tables": (
            "CounterBasedRegularizationDefinition CounterWeightDecayMode CowClipDefinition DoesNotHavePrefix "
            "EmainplaceModeDefinition EnsembleModeDefinition GlobalWeightDecayDefinition GradSumDecay "
            "LearningRateMode StepMode TailIdThreshold UserEnabledConfigDefinition"
        ),
    },
    "fbgemm_gpu.tbe.config.embedding_config": {
        "shardwise.embeddings.optim.fbgemm_types": (
            "ComputeDevice EmbeddingLocation EmbeddingSpecInfo PoolingMode RecordCacheMetrics SplitState "
            "get_new_embedding_location"
        ),
        "shardwise.fbgemm.tables": "round_up tensor_to_device",
        "shardwise.kernels.lookup.bounds": "BoundsCheckMode",
    },
    "fbgemm_gpu.tbe.cache.cache_config": {
        "shardwise.embeddings.optim.fbgemm_types": "CacheAlgorithm EmbeddingLocation MultiPassPrefetchConfig",
    },
    "fbgemm_gpu.tbe.cache": {
        "shardwise.embeddings.optim.fbgemm_types": "CacheAlgorithm MultiPassPrefetchConfig",
    },
}

# FBGEMM's module -> its name -> where ours is, as module:name
FBGEMM: Mapping[str, Mapping[str, str]] = table(FBGEMM_NAMES)

# served as torch.ops.fbgemm.*: the table of shardwise.fbgemm, readable without torch
FBGEMM_OPS = frozenset(
    [
        "Bfloat16QuantizedToFloat",
        "FP8RowwiseQuantizedToFloat",
        "FloatOrHalfToFused8BitRowwiseQuantized",
        "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf",
        "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalfWithRowwiseMinMax",
        "FloatToBfloat16Quantized",
        "FloatToFP8RowwiseQuantized",
        "FloatToFused8BitRowwiseQuantized",
        "FloatToFusedNBitRowwiseQuantizedSBHalf",
        "FloatToHFP8Quantized",
        "FloatToMSFPQuantized",
        "FloatToPaddedFP8RowwiseQuantized",
        "Fused8BitRowwiseQuantizedToBfloat16",
        "Fused8BitRowwiseQuantizedToFloat",
        "Fused8BitRowwiseQuantizedToFloatMixedDim",
        "Fused8BitRowwiseQuantizedToFloatOrHalf",
        "Fused8BitRowwiseQuantizedToHalf",
        "FusedNBitRowwiseQuantizedSBHalfFrontToFloatOrHalf",
        "FusedNBitRowwiseQuantizedSBHalfToFloat",
        "FusedNBitRowwiseQuantizedSBHalfToFloatOrHalf",
        "FusedNBitRowwiseQuantizedSBHalfToHalf",
        "HFP8QuantizedToFloat",
        "HalfToFused8BitRowwiseQuantized",
        "HalfToFusedNBitRowwiseQuantizedSBHalf",
        "MSFPQuantizedToFloat",
        "PaddedFP8RowwiseQuantizedToFloat",
        "all_to_one_device",
        "asynchronous_batched_complete_cumsum",
        "asynchronous_complete_cumsum",
        "asynchronous_exclusive_cumsum",
        "asynchronous_inclusive_cumsum",
        "batch_index_select_dim0",
        "batch_index_select_dim0_tensor",
        "batched_dense_vec_jagged_2d_mul",
        "batched_unary_embeddings",
        "block_bucketize_sparse_features",
        "block_bucketize_sparse_features_2d_weights",
        "block_bucketize_sparse_features_inference",
        "bottom_k_per_row",
        "bounds_check_indices",
        "bucketize_sparse_features",
        "cat_reorder_batched_ad_indices",
        "create_zch_buffer",
        "dense_to_jagged",
        "embedding_bag_rowwise_prune",
        "expand_into_jagged_permute",
        "generic_histogram_binning_calibration_by_feature",
        "get_source_mask",
        "group_index_select_dim0",
        "histogram_binning_calibration",
        "histogram_binning_calibration_by_feature",
        "index_select_dim0",
        "int_nbit_split_embedding_codegen_lookup_function",
        "invert_permute",
        "jagged_1d_to_dense",
        "jagged_1d_to_truncated_values",
        "jagged_2d_to_dense",
        "jagged_acc_weights_and_counts",
        "jagged_dense_bmm",
        "jagged_dense_dense_elementwise_add_jagged_output",
        "jagged_dense_elementwise_add",
        "jagged_dense_elementwise_add_jagged_output",
        "jagged_dense_elementwise_mul",
        "jagged_hash_size_cumsum",
        "jagged_index_select",
        "jagged_index_select_2d_forward_v2",
        "jagged_jagged_bmm",
        "jagged_slice",
        "jagged_softmax",
        "jagged_to_padded_dense",
        "jagged_unique_indices",
        "keyed_jagged_index_select_dim1",
        "kt_regroup_arguments",
        "lengths_range",
        "masked_select_jagged_1d",
        "merge_pooled_embeddings",
        "murmur_hash3",
        "offsets_range",
        "pack_segments",
        "pack_segments_v2",
        "padding_fused_tbe_input_combine",
        "padding_fused_tbe_input_combine_with_length",
        "permute102_baddbmm_permute102",
        "permute_1D_sparse_data",
        "permute_2D_sparse_data",
        "permute_2D_sparse_data_input1D",
        "permute_2D_sparse_preallocated_out",
        "permute_duplicate_pooled_embs",
        "permute_duplicate_pooled_embs_auto_grad",
        "permute_duplicate_pooled_embs_auto_grad_split",
        "permute_duplicate_pooled_embs_split",
        "permute_multi_embedding",
        "permute_pooled_embs",
        "permute_pooled_embs_auto_grad",
        "permute_pooled_embs_auto_grad_split",
        "permute_pooled_embs_split",
        "permute_sequence_embeddings",
        "permute_sparse_data",
        "permute_sparse_features",
        "populate_bucketized_permute",
        "pruned_array_lookup",
        "pruned_hashmap_insert",
        "pruned_hashmap_lookup",
        "regroup_keyed_tensor",
        "reorder_batched_ad_indices",
        "reorder_batched_ad_lengths",
        "reorder_batched_sequence_embeddings",
        "repeat_arange",
        "segment_sum_csr",
        "stacked_jagged_1d_to_dense",
        "stacked_jagged_2d_to_dense",
        "sum_reduce_to_one",
        "tbe_input_combine",
        "tbe_input_combine_with_length",
        "zero_collision_hash",
    ]
)
