"""Which names the rows of docs/differences.md are about: data, read by `shardwise migrate`. Tests hold it to the file.

Section -> how a row begins -> the names, as TorchRec calls them. `quant.X` is X as `torchrec.quant` has it.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DIFFERENCES"]

_FUSED = "FusedEmbeddingBagCollection FusedEmbeddingCollection apply_optimizer_in_backward"
_PIPELINES = "TrainPipelineBase TrainPipelineSparseDist PrefetchTrainPipelineSparseDist StagedTrainPipeline"

DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    "Tables and collections": {
        "An unsharded table of any type but FP32": "DataType",
        "A weighted `EmbeddingBagCollection` refuses MEAN": "EmbeddingBagCollection",
        "`is_weighted=False` ignores per-id weights": "EmbeddingBagCollection",
        "`EmbeddingCollection` expands a batch": "EmbeddingCollection",
        "Position weights drop inverse indices": "PositionWeightedModule PositionWeightedModuleCollection",
        "`FeatureProcessorDictWrapper` takes only weights": "FeatureProcessorDictWrapper",
        "`device` of a tower is ignored": "EmbeddingTower EmbeddingTowerCollection tower_input_params",
        "Config fields from `input_dim` on": "EmbeddingBagConfig EmbeddingConfig",
        "`FusedEmbeddingBagCollection` over tables SUM, MEAN, SUM": "FusedEmbeddingBagCollection",
        "`weight.data = x` and `load_state_dict(assign=True)`": "EmbeddingBagCollection EmbeddingCollection",
        "The same seed draws twice per table": "EmbeddingBagCollection EmbeddingCollection",
        "`fuse_embedding_optimizer` makes each twin": "fuse_embedding_optimizer",
    },
    "Ids and offsets": {
        "In fused and sharded collections an id outside its table": f"{_FUSED} DistributedModelParallel",
        "`WARNING` and `IGNORE` map the id to row 0": "BoundsCheckMode",
    },
    "Optimizers": {
        "A fused optimizer takes `momentum=0.9` for SGD": _FUSED,
        "Fused Adam is refused on the CPU": _FUSED,
        "`KeyedOptimizer` refuses a state": "KeyedOptimizer",
        "`KeyedOptimizer.state_dict` leaves `param_groups` out": "KeyedOptimizer CombinedOptimizer",
        "A table may be marked by several optimizers": "apply_optimizer_in_backward",
        "`WarmupOptimizer` around a `CombinedOptimizer`": "WarmupOptimizer",
        "Warm-up: INVSQRT first divides by zero": "WarmupOptimizer WarmupPolicy WarmupStage",
        "Clipping runs before the closure": "GradientClippingOptimizer",
        "Clipping ignores tables trained in the backward": "GradientClippingOptimizer",
        "`SemisyncOptimizer(offload_global_model=, non_blocking=)`": "SemisyncOptimizer",
        "`GradientAccumulationWrapper` lets tables step": "GradientAccumulationWrapper",
    },
    "Sharding": {
        "Sharding re-initialises tables": "DistributedModelParallel shard shard_modules",
        "Sharded output is ordered by rank": "DistributedModelParallel shard shard_modules",
        "A sharded table without an optimizer trains with SGD": "DistributedModelParallel",
        "No row-wise types on the CPU": "EmbeddingBagCollectionSharder EmbeddingCollectionSharder",
        "`column_wise(ranks)` widens shards": "column_wise",
        "`grid_shard` fails or leaves columns out": "grid_shard",
        "Column shards are at least 128 wide": "EmbeddingShardingPlanner ParameterConstraints",
        "`EmbeddingShardingPlanner` tries proposals": "EmbeddingShardingPlanner",
        "A `Topology` assumes 32 GiB": "Topology",
        "The planner replicates small tables": "EmbeddingShardingPlanner",
        "Constraints for tables that the model does not have": "ParameterConstraints",
        "`DynamicProgrammingProposer` divides by zero": "DynamicProgrammingProposer EmbeddingOffloadScaleupProposer",
        "Kernels in host memory and on disk": "EmbeddingComputeKernel",
        "`row_wise(sizes_placement)` is always": "row_wise",
        "Feature processors run where the rows are": "FeatureProcessedEmbeddingBagCollectionSharder",
        "Compressed fp16 clamps silently": "QCommsConfig get_qcomm_codecs get_qcomm_codecs_registry",
        "bf16 becomes fp16 on gloo": "CommType",
        "A lazy output prints as an object": "LazyAwaitable",
        "`KJTAllToAll` of ranks with other keys": "KJTAllToAll",
        "A sharded `nn.EmbeddingBag` is sum only": "EmbeddingBagSharder ShardedEmbeddingBag",
        "The plan of `DMPCollection` is renumbered": "DMPCollection",
    },
    "The training loop": {
        "A pipeline rewrites the model by `torch.fx`": f"{_PIPELINES} EvalPipelineSparseDist",
    },
    "Quantized tables and inference": {
        "`quantize_inference_model` and `shard_quant_model` pass over": "quantize_inference_model shard_quant_model",
        "Rows of int8 that fp16 scales cut": "quant.EmbeddingBagCollection quant.EmbeddingCollection",
        "A quantized row has 4 bytes in front": "quant.EmbeddingBagCollection quant.EmbeddingCollection",
        "Quant sharders offer table-, row- and column-wise": "QuantEmbeddingBagCollectionSharder"
        " QuantEmbeddingCollectionSharder",
        "`WeightSpec` keys": "WeightSpec sharded_tbes_weights_spec",
        "`PredictModule` without a device": "PredictModule",
        "`quantize_dense` turns some children": "quantize_dense",
    },
    "Managed collision": {
        "Unsharded, the row of an evicted id": "ManagedCollisionEmbeddingBagCollection"
        " ManagedCollisionEmbeddingCollection",
        "History is sized by the first batch": "MCHManagedCollisionModule",
        "A feature of two tables, or modules": "ManagedCollisionCollection",
        "Sharded row-wise only": "ManagedCollisionEmbeddingBagCollectionSharder"
        " ManagedCollisionEmbeddingCollectionSharder",
    },
    "Models and data": {
        "`DLRM_DCN` leaves the cross network": "DLRM_DCN",
        "`RandomRecDataset` takes 0": "RandomRecDataset",
    },
    "Jagged types": {
        "`repr` of a KJT is the object's address": "KeyedJaggedTensor",
        "`KeyedJaggedTensor.empty()` has float32 values": "KeyedJaggedTensor",
        "`split` that does not cover all keys": "KeyedJaggedTensor",
        "`from_jt_dict` with weights on some entries": "KeyedJaggedTensor",
        "`KeyedTensor` with repeated keys": "KeyedTensor regroup_kts",
        "`KTRegroupAsDict` keeps the column order": "KTRegroupAsDict",
        "`kjt_is_equal` takes ids that are close": "kjt_is_equal jt_is_equal",
        "`validate_keyed_jagged_tensor` compares sums": "validate_keyed_jagged_tensor",
        "Shapes, dtypes and devices that do not fit": "JaggedTensor KeyedJaggedTensor KeyedTensor",
    },
}
