"""What we have of each name of TorchRec: where ours is, how it differs, or the nearest thing. For `shardwise migrate`.

A *name* is a module of TorchRec and what is taken from it, as `torchrec.distributed.types.ShardingType`. A program that
was rewritten has the same names below `shardwise.torchrec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Literal

import shardwise

from .hints import advice
from .mirror import MODULES, OWN_NAMES
from .torchrec_names import FBGEMM, TABLE

__all__ = ["DIFFERENCES", "MIRROR", "Finding", "Row", "finding", "home_of", "is_module", "mirrored", "name_at"]

MIRROR = "shardwise.torchrec"
# where TorchRec's names and FBGEMM's begin
_ROOTS = ("torchrec", "fbgemm_gpu", "torch.ops.fbgemm")
_NAMES = {**TABLE, **FBGEMM}


@dataclass(frozen=True)
class Row:
    """A row of docs/differences.md, by the words that it begins with."""

    section: str
    begins: str

    @property
    def link(self) -> str:
        return f"docs/differences.md#{self.section.lower().replace(' ', '-')}"


@dataclass(frozen=True)
class Finding:
    """What became of a name: `ours` is where it is; `hint` says why it is missing and what is near, if we know."""

    name: str
    status: Literal["mapped", "differs", "missing"]
    ours: str = ""
    hint: str = ""
    differences: Sequence[Row] = ()


@cache
def finding(name: str) -> Finding:
    """What we have of TorchRec's `name`."""
    module, _, last = name.rpartition(".")
    if last not in _NAMES.get(module, {}):
        if not is_module(name):
            return Finding(name, "missing", hint=advice(name).partition("; ")[2])
        if mirrored(name) == name:
            return Finding(name, "missing", hint="import what is used of it by name")
        return Finding(name, "mapped", ours=mirrored(name))
    ours = _NAMES[module][last].replace(":", ".")
    if home_of(module, last) == module:
        return Finding(name, "missing", hint=f"ours is {ours}")
    if _in_facade(module, last):
        ours = f"shardwise.{last}"
    called = f"quant.{last}" if name.startswith("torchrec.quant.") else last
    rows = tuple(
        Row(section, begins)
        for section, table in DIFFERENCES.items()
        for begins, names in table.items()
        if called in names.split()
    )
    return Finding(name, "differs" if rows else "mapped", ours=ours, differences=rows)


def is_module(name: str) -> bool:
    """Whether `name` is a module of TorchRec of which we have something."""
    return name in MODULES


def name_at(module: str, rest: Sequence[str]) -> str | None:
    """The name that begins what a program finds at the attributes `rest` of `module`; None if it is not TorchRec's.

    `ShardingType.ROW_WISE.value` of `torchrec.distributed.types` is `torchrec.distributed.types.ShardingType`.
    """
    parts = [*module.split("."), *rest]
    end = module.count(".") + 1
    if parts[:2] == MIRROR.split("."):
        parts, end = parts[1:], max(end - 1, 1)
        if parts[1:] and parts[1] in OWN_NAMES:
            return None
    if not any(f"{'.'.join(parts)}.".startswith(f"{root}.") for root in _ROOTS):
        return None
    while end < len(parts):
        module, name = ".".join(parts[:end]), parts[end]
        if name in _NAMES.get(module, {}):
            return f"{module}.{name}"
        if name.startswith("__"):
            # every module has those
            return module
        if not is_module(f"{module}.{name}"):
            # of what we lack we do not know where modules end: at the first capital
            ends = (at for at in range(end, len(parts)) if parts[at][0].isupper())
            return ".".join(parts[: next(ends, len(parts)) + 1])
        end += 1
    return ".".join(parts)


def home_of(module: str, name: str) -> str:
    """The module of ours to import `name` of TorchRec's `module` from."""
    if name not in _NAMES.get(module, {}):
        return mirrored(module)
    if _in_facade(module, name):
        return "shardwise"
    home, _, ours = _NAMES[module][name].partition(":")
    # FBGEMM's modules are not served below `shardwise`
    return home if module in FBGEMM and ours == name else mirrored(module)


def mirrored(module: str) -> str:
    """Where a module is served with every name that we have of it; other libraries' modules stay where they are."""
    return f"shardwise.{module}" if module.split(".")[0] == "torchrec" else module


def _in_facade(module: str, name: str) -> bool:
    """Whether `shardwise` has that very object: `torchrec.quant` has other classes by the same names."""
    if name not in shardwise.__all__:
        return False
    home, _, ours = _NAMES[module][name].partition(":")
    return getattr(shardwise, name) is getattr(import_module(home), ours)


# Which names the rows of docs/differences.md are about; tests hold it to the file. Section -> how a row begins -> the
# names, as TorchRec calls them. `quant.X` is X as `torchrec.quant` has it.
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
