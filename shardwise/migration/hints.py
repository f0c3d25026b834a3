"""Hints for names of TorchRec's that we lack: why, and what of ours is nearest."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from .torchrec_names import FBGEMM, TABLE

__all__ = ["HINTS", "OPS", "advice", "op_hint"]

_HOST_TIERS = "rows live on the device that trains them: host memory, caches and SSD are not served"
_METRICS = "torchmetrics has most of them; shardwise.models has the AUC and normalized entropy of its examples"
_FBGEMM_KERNELS = "kernels are ops of torch.ops.shardwise, and tables are modules: EmbeddingBagCollection"

# a module or a name of TorchRec, and all below it -> why it is not here, and what to use
HINTS: Mapping[str, str] = {
    "fbgemm_gpu": _FBGEMM_KERNELS,
    "torchrec.datasets.criteo": "shardwise.data.Criteo reads its files",
    "torchrec.datasets.movielens": "shardwise.data.MovieLens reads its files",
    "torchrec.distributed.batched_embedding_kernel": _HOST_TIERS,
    "torchrec.distributed.embedding_dim_bucketer": _HOST_TIERS,
    "torchrec.distributed.embedding_sharding.group_tables": "tables are grouped by storage inside the engine",
    "torchrec.distributed.model_tracker": "changed ids are not tracked",
    "torchrec.distributed.planner.estimator": "estimators are classes: torchrec.distributed.planner.shard_estimators",
    "torchrec.distributed.test_utils": "tests/support/ranks.py of shardwise's repository spawns ranks for tests",
    "torchrec.metrics": _METRICS,
    "torchrec.ir": "torch.export takes the whole model, with its lookups as ops",
    "torchrec.modules.itep_modules": "pruning in training is not served",
}

_ROW_FORMATS = "shardwise.kernels.quantize_rows and dequantize_rows"
_CODECS = "shardwise.QCommsConfig, which compresses what ranks exchange"
_DEVICES = "shardwise.inference.shard_quant_model, whose modules gather from devices"
_TABLES = "a module, as EmbeddingBagCollection with apply_optimizer_in_backward"
_QUANTIZED = "a module, as shardwise.quant.EmbeddingBagCollection"
_COLLISION = "shardwise.embeddings.managed_collision.ManagedCollisionCollection"

# what of ours does the work -> ops of FBGEMM; a star ends the beginning of several names
OPS: Mapping[str, str] = {
    "shardwise.kernels.complete_cumsum": (
        "asynchronous_complete_cumsum asynchronous_inclusive_cumsum asynchronous_exclusive_cumsum"
    ),
    "shardwise.kernels.offsets_range": "offsets_range",
    "shardwise.kernels.segment_sum": "segment_sum_csr",
    "shardwise.kernels.jagged_to_padded_dense": "jagged_to_padded_dense jagged_1d_to_dense jagged_2d_to_dense",
    "shardwise.kernels.padded_dense_to_jagged": "dense_to_jagged",
    "shardwise.kernels.jagged_dense_add": "jagged_dense_elementwise_add",
    "shardwise.kernels.jagged_dense_add_jagged": "jagged_dense_elementwise_add_jagged_output",
    "shardwise.kernels.jagged_dense_mul": "jagged_dense_elementwise_mul",
    "shardwise.kernels.jagged_index_select": "jagged_index_select jagged_index_select_2d_forward*",
    "shardwise.kernels.keyed_jagged_index_select": "keyed_jagged_index_select_dim1",
    "shardwise.kernels.jagged_unique": "jagged_unique_indices",
    "shardwise.kernels.expand_into_jagged_permute": "expand_into_jagged_permute",
    "shardwise.kernels.jagged_dense_bmm": "jagged_dense_bmm",
    "shardwise.kernels.jagged_jagged_bmm": "jagged_jagged_bmm",
    "shardwise.kernels.jagged_softmax": "jagged_softmax",
    "shardwise.kernels.jagged_vector_product": "batched_dense_vec_jagged_2d_mul",
    "shardwise.kernels.permute_1d": "permute_1D_sparse_data",
    "shardwise.kernels.permute_2d": "permute_2D_sparse_* permute_sparse_data permute_sparse_features",
    "shardwise.kernels.invert_permute": "invert_permute",
    "shardwise.kernels.block_bucketize": "block_bucketize_sparse_features* bucketize_sparse_features",
    "shardwise.permute_multi_embedding": "permute_multi_embedding kt_regroup_arguments",
    "shardwise.regroup_kts": "regroup_keyed_tensor",
    "shardwise.kernels.permute_pooled": "permute_pooled_embs* permute_duplicate_pooled_embs*",
    "shardwise.kernels.pack_segments": "pack_segments*",
    "shardwise.kernels.histogram_binning_calibration": "histogram_binning_calibration",
    "shardwise.kernels.histogram_binning_calibration_by_feature": "histogram_binning_calibration_by_feature",
    "shardwise.kernels.generic_histogram_binning_calibration_by_feature": (
        "generic_histogram_binning_calibration_by_feature"
    ),
    "shardwise.kernels.batched_unary_embeddings": "batched_unary_embeddings",
    "shardwise.kernels.check_ids": "bounds_check_indices",
    _COLLISION: "zero_collision_hash create_zch_buffer",
    _ROW_FORMATS: (
        "FloatToFused* HalfToFused* FloatOrHalfToFused* Fused8Bit* FusedNBit* FloatToFP8RowwiseQuantized "
        "FP8RowwiseQuantizedToFloat"
    ),
    _CODECS: "FloatToBfloat16Quantized Bfloat16QuantizedToFloat quantize_mx* dequantize_mx*",
    _DEVICES: "merge_pooled_embeddings all_to_one_device sum_reduce_to_one",
    _QUANTIZED: "int_nbit_split_embedding* pruned_hashmap* pruned_array*",
    _TABLES: "split_embedding* dense_embedding* ssd_embedding* linearize_cache* lru_cache* lfu_cache*",
}
_EXACT = {op: replacement for replacement, ops in OPS.items() for op in ops.split() if not op.endswith("*")}
_BEGINNINGS = {op[:-1]: replacement for replacement, ops in OPS.items() for op in ops.split() if op.endswith("*")}
_OTHERS = "ops of ours are functions of shardwise.kernels"


def op_hint(op: str) -> str:
    """What to use in place of `torch.ops.fbgemm.<op>`."""
    replacement = _EXACT.get(op) or next(
        (replacement for begin, replacement in _BEGINNINGS.items() if op.startswith(begin)), None
    )
    if replacement is None:
        return f"nothing of ours does the same; {_OTHERS}"
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
