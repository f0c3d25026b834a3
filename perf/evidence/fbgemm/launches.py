"""What runs on a GPU for each of `torch.ops.fbgemm.*`: launches, counted without one, and the bytes that they move.

docs/reference/fbgemm.md keeps the table, which a test compares: `python -m shardwise.perf.evidence.fbgemm.launches`
prints it. An op is counted on the costlier of its first calls, of a few small tensors each: sorts of more than 4,096
numbers and sums of more than 16,384 lengths take some launches more.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardwise.fbgemm import OPS
from shardwise.perf.counts.launches import CUDA, Counted, use_fake_cuda
from shardwise.perf.evidence.report import grid

from .calls import Call, draw_call
from .outcome import outcome

# calls that are counted of each op
CALLS = 2
# arguments of which plans are made on the host, once for as long as they live
_READ_ONCE = {
    "permute_multi_embedding": (1,),
    "permute_duplicate_pooled_embs": (1, 2),
    "permute_duplicate_pooled_embs_split": (1, 2),
    "permute_duplicate_pooled_embs_auto_grad": (1, 2),
    "permute_duplicate_pooled_embs_auto_grad_split": (1, 2),
}  # fmt: skip
# tables of the inference lookup lie on the device
_PLACEMENTS = {"int_nbit_split_embedding_codegen_lookup_function": 2}

# what is moved, or why no kernel of ours is there -> ops
MOVED: dict[str, Sequence[str]] = {
    "lengths once, offsets once; torch's for floats, as here, and above 16,384": ("asynchronous_complete_cumsum",),
    "lengths once, offsets once": (
        "asynchronous_batched_complete_cumsum", "asynchronous_exclusive_cumsum",
    ),
    "torch's scan: numbers once each way": ("asynchronous_inclusive_cumsum",),
    "each result written once; a search over offsets": ("offsets_range", "lengths_range", "repeat_arange"),
    "values and offsets once, a sum for each segment": ("segment_sum_csr",),
    "ids once, 16 bytes an id for its key, sums of keys": ("jagged_hash_size_cumsum",),
    "ids once; offsets some times: a sum of all before is torch's": ("bounds_check_indices",),
    "ids once, hashes once": ("murmur_hash3",),
    "slots written once": ("create_zch_buffer",),
    "read-only, as here: ids once, slots until theirs; taking slots: some rounds of torch's": (
        "zero_collision_hash",
    ),
    "selected rows once each way, offsets of bags": (
        "jagged_index_select", "jagged_index_select_2d_forward_v2", "keyed_jagged_index_select_dim1",
    ),
    "a sort of the ids, 24 bytes each a pass": ("jagged_unique_indices",),
    "a sort of the ids, then values once": ("jagged_acc_weights_and_counts",),
    "each position once": ("expand_into_jagged_permute",),
    "the values that stay, once each way": ("jagged_1d_to_truncated_values", "jagged_slice"),
    "the mask twice, values that stay once each way": ("masked_select_jagged_1d",),
    "a byte a value": ("get_source_mask",),
    "values of bags once, all of the result once": (
        "jagged_to_padded_dense", "jagged_1d_to_dense", "jagged_2d_to_dense", "stacked_jagged_1d_to_dense",
        "stacked_jagged_2d_to_dense", "pack_segments", "pack_segments_v2",
    ),
    "values once each way, and copies of the offsets": (
        "dense_to_jagged", "jagged_dense_elementwise_add_jagged_output", "jagged_dense_elementwise_mul",
    ),
    "values twice each way, once for each dense tensor": ("jagged_dense_dense_elementwise_add_jagged_output",),
    "the dense tensor once each way, values once": ("jagged_dense_elementwise_add",),
    "rows, matrices and results once": (
        "jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax", "batched_dense_vec_jagged_2d_mul",
    ),
    "ids once, a number for each and task": ("batched_unary_embeddings",),
    "ids once each way, an entry for each": ("pruned_array_lookup",),
    "ids once each way, entries from the hash on until their own": ("pruned_hashmap_lookup",),
    "when a model is made: rounds of torch's, more where ids are in each other's way": ("pruned_hashmap_insert",),
    "when a model is made: a number a row, then the rows that stay": ("embedding_bag_rowwise_prune",),
    "rows of the ids once, one group of tables of a format after another": (
        "int_nbit_split_embedding_codegen_lookup_function",
    ),
    "values once each way; sums of lengths": (
        "permute_1D_sparse_data", "permute_2D_sparse_data", "permute_sparse_data", "permute_sparse_features",
        "permute_2D_sparse_data_input1D", "permute_sequence_embeddings",
    ),
    "values twice each way, as they are copied to where they are wanted": ("permute_2D_sparse_preallocated_out",),
    "the order once each way": ("invert_permute",),
    "torch's batched product, on views": ("permute102_baddbmm_permute102",),
    "ids there and back by way of their bucket; a sort; torch's look after ids below 0": (
        "block_bucketize_sparse_features", "block_bucketize_sparse_features_inference",
        "block_bucketize_sparse_features_2d_weights", "bucketize_sparse_features",
    ),
    "a sort of the ids": ("populate_bucketized_permute",),
    "logits, bins and results once": (
        "histogram_binning_calibration", "histogram_binning_calibration_by_feature",
        "generic_histogram_binning_calibration_by_feature",
    ),
    "torch's copy: rows once each way": (
        "merge_pooled_embeddings", "all_to_one_device", "index_select_dim0", "group_index_select_dim0",
        "MSFPQuantizedToFloat",
    ),
    "torch's sum, in place: one tensor after another": ("sum_reduce_to_one",),
    "torch's: selected rows, then once more to stand together": (
        "batch_index_select_dim0", "batch_index_select_dim0_tensor",
    ),
    "torch's: each feature's ids as int32, then all together": (
        "tbe_input_combine", "tbe_input_combine_with_length", "padding_fused_tbe_input_combine",
        "padding_fused_tbe_input_combine_with_length",
    ),
    "torch's sorts of rows": ("bottom_k_per_row",),
    "lengths once each way": ("reorder_batched_ad_lengths",),
    "values once each way": ("reorder_batched_ad_indices",),
    "values twice each way: they are put behind one another first": ("cat_reorder_batched_ad_indices",),
    "rows once each way, 16 bytes a row for where they lie": ("reorder_batched_sequence_embeddings",),
    "columns once each way": (
        "regroup_keyed_tensor", "permute_multi_embedding", "permute_duplicate_pooled_embs",
        "permute_duplicate_pooled_embs_split", "permute_duplicate_pooled_embs_auto_grad",
        "permute_duplicate_pooled_embs_auto_grad_split",
    ),
    "columns once each way, an index for each; a plan on the CPU would be waited for": (
        "permute_pooled_embs", "permute_pooled_embs_split", "permute_pooled_embs_auto_grad",
        "permute_pooled_embs_auto_grad_split",
    ),
    "copies of a plan": ("kt_regroup_arguments",),
    "floats once, bytes once": (
        "FloatToFused8BitRowwiseQuantized", "HalfToFused8BitRowwiseQuantized", "FloatOrHalfToFused8BitRowwiseQuantized",
        "Fused8BitRowwiseQuantizedToFloat", "Fused8BitRowwiseQuantizedToHalf", "Fused8BitRowwiseQuantizedToBfloat16",
        "Fused8BitRowwiseQuantizedToFloatOrHalf", "Fused8BitRowwiseQuantizedToFloatMixedDim",
        "FloatToFusedNBitRowwiseQuantizedSBHalf", "HalfToFusedNBitRowwiseQuantizedSBHalf",
        "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf", "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalfWithRowwiseMinMax",
        "FusedNBitRowwiseQuantizedSBHalfToFloat", "FusedNBitRowwiseQuantizedSBHalfToHalf",
        "FusedNBitRowwiseQuantizedSBHalfToFloatOrHalf", "FusedNBitRowwiseQuantizedSBHalfFrontToFloatOrHalf",
        "FloatToFP8RowwiseQuantized", "FP8RowwiseQuantizedToFloat", "FloatToPaddedFP8RowwiseQuantized",
        "FloatToHFP8Quantized", "HFP8QuantizedToFloat", "FloatToBfloat16Quantized",
    ),
    "bytes once, floats once; the marks of the first row": ("PaddedFP8RowwiseQuantizedToFloat",),
    "floats once each way": ("FloatToMSFPQuantized",),
    "torch's conversion: floats once, bf16 once": ("Bfloat16QuantizedToFloat",),
}  # fmt: skip


@dataclass(frozen=True)
class Launches:
    """Of one call on a GPU: kernels by name ("torch sort" are torch's), and how often the host waits."""

    kernels: Counter[str]
    waits: int

    @property
    def count(self) -> int:
        return sum(self.kernels.values())

    @property
    def runs(self) -> str:
        """Kernels of ours by name, and "torch" where there are others."""
        ours = sorted(name for name in self.kernels if not name.startswith("torch "))
        torchs = any(name.startswith("torch ") for name in self.kernels)
        return ", ".join([*(f"`{name}`" for name in ours), *["torch"] * torchs]) or "no kernel"


def launches_of(name: str) -> Launches:
    """Those of the costlier of an op's first calls that give a result."""
    counted: list[Launches] = []
    for seed in range(20):
        call = draw_call(name, seed)
        if not call.difference and not outcome(OPS[name].function, call).error:
            counted.append(_count(name, draw_call(name, seed)))
        if len(counted) == CALLS:
            break
    return max(counted, key=lambda each: each.count)


def _count(name: str, call: Call) -> Launches:
    on_host = _READ_ONCE.get(name, ())
    with use_fake_cuda(counted := Counted(), sizes=True), warnings.catch_warnings(), _nothing_filled():
        warnings.simplefilter("ignore")
        args = [each if place in on_host else tree_map(_on_device, each) for place, each in enumerate(call.args)]
        if name in _PLACEMENTS:
            args[_PLACEMENTS[name]].zero_()
        counted.clear()
        OPS[name].function(*args)
        return Launches(Counter(counted.kernels), sum(counted.syncs.values()))


@contextmanager
def _nothing_filled() -> Iterator[None]:
    """Memory is as it is found: where torch is to be deterministic, it fills what it makes."""
    settings: Any = torch.utils.deterministic
    before, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


def _on_device(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CUDA
    return value.detach().to(CUDA) if isinstance(value, Tensor) else value


def table() -> list[str]:
    """A row for each op, as docs/reference/fbgemm.md has them."""
    moved = {name: text for text, names in MOVED.items() for name in names}
    rows = []
    for name in OPS:
        launches = launches_of(name)
        waits = f" and {launches.waits} waits" if launches.waits > 1 else " and a wait" * launches.waits
        rows.append([name, launches.runs, f"{launches.count}{waits}", moved[name]])
    return grid(["op", "what runs", "launches", "bytes moved"], rows)


if __name__ == "__main__":
    print("\n".join(table()))
