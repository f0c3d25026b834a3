"""Hints for names of TorchRec's that we lack: why, and what of ours is nearest."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from .fbgemm_names import FBGEMM, FBGEMM_OPS
from .torchrec_names import TABLE

__all__ = ["HINTS", "OPS", "advice", "op_hint"]

_HOST_TIERS = (
    "rows below the device are asked for by compute kernels (fused_uvm, fused_uvm_caching, key_value), by a Tier of a"
    " plan or a constraint, or by shardwise.tiered: kernels for host memory, caches and SSD are not served"
)
_OF_POOLS = "ids and rows of a pool travel inside ShardedTensorPool and ShardedKeyedJaggedTensorPool"
_METRICS = "torchmetrics has most of them; shardwise.models has the AUC and normalized entropy of its examples"
_SIZES = "sizes of all tables of a module travel in one exchange: its input_dist returns an Awaitable of them"
_FBGEMM_KERNELS = (
    "ops are torch.ops.fbgemm.* after import shardwise.fbgemm, and tables are modules: shardwise.fbgemm.tables"
)

_ONE_STEP = (
    "one step of the engine serves all sharding types: a plan says where tables go, and a ShardedModule of your own may"
    " be made of KJTAllToAll, GroupedPooledEmbeddingsLookup and PooledEmbeddingsAllToAll"
)

_CONTEXTS = "a step keeps what it needs itself: module.create_context() gives what its stages take"

# a module or a name of TorchRec, and all below it -> why it is not here, and what to use
HINTS: Mapping[str, str] = {
    "fbgemm_gpu": _FBGEMM_KERNELS,
    "torchrec.distributed.batched_embedding_kernel": _HOST_TIERS,
    "torchrec.distributed.embedding_dim_bucketer": _HOST_TIERS,
    "torchrec.distributed.embedding_sharding.FusedKJTListSplitsAwaitable": _SIZES,
    "torchrec.distributed.embedding_sharding.KJTSplitsAllToAllMeta": _SIZES,
    "torchrec.distributed.model_tracker": "changed ids are not tracked",
    "torchrec.distributed.test_utils": "what TorchRec tests itself with is served as far as programs' own tests use it",
    "torchrec.distributed.train_pipeline.backward_injection": (
        "work between two parts of a backward is a hook of the tensor there: torch.Tensor.register_hook"
    ),
    "torchrec.distributed.train_pipeline.experimental_pipelines": (
        "they swap tables and optimizer states of Meta's models; shardwise.sharding.pipeline has the others"
    ),
    "torchrec.metrics": _METRICS,
    "torchrec.ir": "not in TorchRec 1.8's wheel; torch.export takes the model, lookups as ops (docs/howto/export.md)",
    "torchrec.distributed.sharding.rw_kjt_pool_sharding": _OF_POOLS,
    "torchrec.distributed.sharding.rw_pool_sharding": _OF_POOLS,
    "torchrec.distributed.sharding.rw_tensor_pool_sharding": _OF_POOLS,
    "torchrec.distributed.tensor_sharding": _OF_POOLS,
    "torchrec.modules.object_pool_lookups": _HOST_TIERS,
    "torchrec.modules.itep_modules.RowwiseShardedITEPModule": (
        "row shards prune inside ShardedITEPEmbeddingBagCollection, whose _itep_module holds them under every plan"
    ),
    "torchrec.distributed.itep_embeddingbag": (
        "stages of a step are those of every sharded module: there is no context or group of sharding types of its own"
    ),
    "torchrec.distributed.sharded_relay_utils": (
        "the relay is an all-reduce of RCCLX, which public builds lack: DMPCollection.sync averages by torch's own"
    ),
    "torchrec.pt2.checks.pt2_guard_size_oblivious": (
        "TorchRec 1.8 has pt2_guard_or_false and pt2_guard_or_true in its place, as torch itself"
    ),
    "torchrec.distributed.embedding.create_embedding_sharding": _ONE_STEP,
    "torchrec.distributed.embedding.EmbeddingCollectionContext": _CONTEXTS,
    "torchrec.distributed.embeddingbag.EmbeddingBagCollectionContext": _CONTEXTS,
    "torchrec.distributed.embeddingbag.create_embedding_bag_sharding": _ONE_STEP,
    "torchrec.distributed.embedding_lookup": (
        "GroupedPooledEmbeddingsLookup and GroupedEmbeddingsLookup train; shardwise.quant serves quantized tables"
    ),
    "torchrec.distributed.sharding": _ONE_STEP,
    "torchrec.datasets.test_utils": "it makes files for TorchRec's own tests",
    "torchrec.distributed.benchmark": "shardwise perf measures; TorchRec's benchmarks are programs of its own",
    "torchrec.distributed.test_utils.model_input": "test_model.ModelInput beside it makes batches",
    "torchrec.distributed.test_utils.infer_utils": "shardwise.inference shards and serves quantized models",
    "torchrec.distributed.test_utils.test_model.TestEBCSparseArchZCH": "hashed ids are not served",
    "torchrec.distributed.test_utils.test_model_parallel": "tests of TorchRec's own engine",
    "torchrec.distributed.test_utils.test_model_parallel_base": "tests of TorchRec's own engine",
    "torchrec.modules.utils.make_hash_zch_buckets_non_persistent": "hashed ids are not served",
}

_CODECS = "shardwise.QCommsConfig, which compresses what ranks exchange"
_TABLES = (
    "a module, as EmbeddingBagCollection with apply_optimizer_in_backward,"
    " or shardwise.fbgemm.tables.SplitTableBatchedEmbeddingBagsCodegen"
)
_QUANTIZED = (
    "a module, as shardwise.quant.EmbeddingBagCollection,"
    " or shardwise.fbgemm.tables.IntNBitTableBatchedEmbeddingBagsCodegen"
)

# what of ours does the work -> ops of FBGEMM that are not served; a star ends the beginning of several names
OPS: Mapping[str, str] = {
    "shardwise.kernels.unique_ids": "get_unique_indices*",
    "shardwise.kernels.jagged_index_add": "jagged_index_add_2d_forward*",
    "shardwise.kernels.jagged_index_select": "jagged_index_select_2d_forward",
    _CODECS: "quantize_mx* dequantize_mx*",
    _QUANTIZED: "int_nbit_split_embedding*",
    _TABLES: (
        "split_embedding* dense_embedding* ssd_embedding* linearize_cache* lru_cache* lfu_cache* lxu_cache* "
        "direct_mapped* reset_weight_momentum transpose_embedding_input generate_vbe_metadata"
    ),
}
_BEGINNINGS = {op.rstrip("*"): replacement for replacement, ops in OPS.items() for op in ops.split()}
_OF_HOST_MEMORY = ("new_unified_tensor", "new_managed_tensor", "new_vanilla_managed_tensor", "new_host_mapped_tensor")
_OTHERS = "ops of ours are functions of shardwise.kernels"


def op_hint(op: str) -> str:
    """What to use in place of `torch.ops.fbgemm.<op>`."""
    if op in FBGEMM_OPS:
        return f"import shardwise.fbgemm registers {op}"
    # halves of an op that has gradients, and those that write into an argument
    for whole in (op.rpartition("_")[0], op.removesuffix("Out"), op.removesuffix("_out")):
        if whole != op and whole in FBGEMM_OPS:
            return f"use torch.ops.fbgemm.{whole}"
    replacement = next((replacement for begin, replacement in _BEGINNINGS.items() if op.startswith(begin)), None)
    if replacement is None:
        of_host_memory = op in _OF_HOST_MEMORY or "uvm" in op
        return _HOST_TIERS if of_host_memory else f"nothing of ours does the same; {_OTHERS}"
    return f"use {replacement}" + (
        ", whose arguments are its own" if replacement.startswith("shardwise.kernels") else ""
    )


def advice(name: str) -> str:
    """The message for a missing `torchrec.module`, `torchrec.module.Name` or op: the name, the reason, the nearest."""
    parts = name.split(".")
    if parts[:3] == ["torch", "ops", "fbgemm"] and parts[3:]:
        return f"torch.ops.fbgemm.{parts[3]} is not served; {op_hint(parts[3])}"
    clauses = [f"shardwise has no counterpart of {name}"]
    reason = next((HINTS[key] for end in range(len(parts), 0, -1) if (key := ".".join(parts[:end])) in HINTS), None)
    if reason is not None:
        clauses.append(reason)
    near = nearest(name)
    if near:
        clauses.append(f"nearest: {', '.join(near)}")
    return "; ".join(clauses)


def nearest(name: str, *, most: int = 3) -> list[str]:
    """Names that we have and that `name` may have meant, the likeliest first: the same elsewhere, or spelt alike."""
    module, _, last = name.rpartition(".")
    tables = {**TABLE, **FBGEMM}
    homes: dict[str, list[str]] = {}
    for path, names in tables.items():
        for candidate in (*names, path.rpartition(".")[2]):
            homes.setdefault(candidate, []).append(path if candidate not in names else f"{path}.{candidate}")
    alike = get_close_matches(last, homes, n=most, cutoff=0.75)
    likely = [max(homes[candidate], key=lambda home: _shared(home, module)) for candidate in alike]
    return list(dict.fromkeys(likely))


def _shared(home: str, module: str) -> int:
    """How many leading parts two paths have in common."""
    pairs = zip(home.split("."), module.split("."), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(home.count("."), module.count(".")) + 1)
