"""Functions of tensors: lookups, their fused backwards and the checks before them. No state, no modules, no processes.

Every op is a Triton kernel beside a torch twin; importing this package registers them as `torch.ops.shardwise.*`.
"""

if __name__ == "kernels":
    raise ImportError("import shardwise.kernels: 'kernels' alone would be a second copy of it")

from . import pieces as _pieces
from ._op import capturing
from .configs import use_configs
from .features import Feature, Segment, flatten_segments, origin_of, pack_features, table_rows
from .files.rows import ask_file_rows, read_file_rows, write_file_rows
from .jagged import requests as _requests
from .jagged.bmm import jagged_dense_bmm, jagged_jagged_bmm
from .jagged.bucketize import Bucketized, block_bucketize
from .jagged.calibration import (
    Calibrated,
    generic_histogram_binning_calibration_by_feature,
    histogram_binning_calibration,
    histogram_binning_calibration_by_feature,
)
from .jagged.elementwise import (
    jagged_dense_add,
    jagged_dense_add_jagged,
    jagged_dense_mul,
    jagged_jagged_mul,
)
from .jagged.index_add import jagged_index_add
from .jagged.index_select import jagged_index_select, keyed_jagged_index_select
from .jagged.offsets import (
    complete_cumsum,
    invert_permute,
    offsets_range,
    offsets_to_lengths,
    pack_segments,
    segment_sum,
    unpack_segments,
)
from .jagged.padded import jagged_to_padded_dense, padded_dense_to_jagged
from .jagged.permute import (
    expand_into_jagged_permute,
    permute_1d,
    permute_2d,
    permute_segments,
)
from .jagged.regroup import permute_pooled, regroup
from .jagged.regroup_plan import RegroupPlan, plan_pieces, plan_regroup
from .jagged.softmax import jagged_softmax
from .jagged.unary_embeddings import batched_unary_embeddings
from .jagged.unique import (
    JaggedUnique,
    Unique,
    jagged_unique,
    unique_ids,
)
from .jagged.vector_product import jagged_vector_product
from .lookup import bound_ids as _bound_ids, pruned as _pruned
from .lookup.bounds import (
    BoundsCheckMode,
    check_ids,
    ids_pass,
    is_clean,
    new_guard,
    raise_from_guard,
    require_ids,
)
from .lookup.finite import check_gradient, describe_gradient, describe_weight
from .lookup.pooled import pooled_lookup
from .lookup.sequence import sequence_lookup
from .lookup.weight_gradient import per_id_weight_gradient
from .quantized import fp8_rows as _fp8_rows
from .quantized.fused_lookup import (
    MINIFLOAT,
    FusedTable,
    FusedTables,
    fused_pooled_lookup,
    fused_rows,
    fused_sequence_lookup,
)
from .quantized.pooled import dequantize_pooled, quantize_pooled
from .quantized.pooled_lookup import quantized_pooled_lookup
from .quantized.rows import dequantize_rows, quantize_rows
from .quantized.sequence_lookup import quantized_sequence_lookup
from .row_formats import ROW_FORMATS, RowFormat, row_format
from .rows.initial_rows import initial_rows
from .rows.lowest import lowest
from .rows.move_rows import RecordLayout, move_rows, record_layout
from .rows.reuse import ReuseStack
from .rule import DECAYS, RULES, Rule, define_rule, rule_named
from .update import rules as _built_in
from .update.index_op import update_index
from .update.update import fused_update, lookup_gradient

__all__ = [
    "DECAYS",
    "MINIFLOAT",
    "ROW_FORMATS",
    "RULES",
    "BoundsCheckMode",
    "Bucketized",
    "Calibrated",
    "Feature",
    "FusedTable",
    "FusedTables",
    "JaggedUnique",
    "RecordLayout",
    "RegroupPlan",
    "ReuseStack",
    "RowFormat",
    "Rule",
    "Segment",
    "Unique",
    "ask_file_rows",
    "batched_unary_embeddings",
    "block_bucketize",
    "capturing",
    "check_gradient",
    "check_ids",
    "complete_cumsum",
    "define_rule",
    "dequantize_pooled",
    "dequantize_rows",
    "describe_gradient",
    "describe_weight",
    "expand_into_jagged_permute",
    "flatten_segments",
    "fused_pooled_lookup",
    "fused_rows",
    "fused_sequence_lookup",
    "fused_update",
    "generic_histogram_binning_calibration_by_feature",
    "histogram_binning_calibration",
    "histogram_binning_calibration_by_feature",
    "ids_pass",
    "initial_rows",
    "invert_permute",
    "is_clean",
    "jagged_dense_add",
    "jagged_dense_add_jagged",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_index_add",
    "jagged_index_select",
    "jagged_jagged_bmm",
    "jagged_jagged_mul",
    "jagged_softmax",
    "jagged_to_padded_dense",
    "jagged_unique",
    "jagged_vector_product",
    "keyed_jagged_index_select",
    "lookup_gradient",
    "lowest",
    "move_rows",
    "new_guard",
    "offsets_range",
    "offsets_to_lengths",
    "origin_of",
    "pack_features",
    "pack_segments",
    "padded_dense_to_jagged",
    "per_id_weight_gradient",
    "permute_1d",
    "permute_2d",
    "permute_pooled",
    "permute_segments",
    "plan_pieces",
    "plan_regroup",
    "pooled_lookup",
    "quantize_pooled",
    "quantize_rows",
    "quantized_pooled_lookup",
    "quantized_sequence_lookup",
    "raise_from_guard",
    "read_file_rows",
    "record_layout",
    "regroup",
    "require_ids",
    "row_format",
    "rule_named",
    "segment_sum",
    "sequence_lookup",
    "table_rows",
    "unique_ids",
    "unpack_segments",
    "update_index",
    "use_configs",
    "write_file_rows",
]

# imported for the rules that it defines, and for ops that no function here calls
del _bound_ids, _built_in, _fp8_rows, _pieces, _pruned, _requests
