"""Functions of tensors: lookups, their fused backwards and the checks before them. No state, no modules, no processes.

Every op is a Triton kernel beside a torch twin; importing this package registers them as `torch.ops.shardwise.*`.
"""

from . import rules as _built_in
from .bounds import BoundsCheckMode, check_ids, is_clean, new_guard, raise_from_guard, require_ids
from .elementwise import jagged_dense_add, jagged_dense_add_jagged, jagged_dense_mul, jagged_jagged_mul
from .features import Feature, Segment, flatten_segments, pack_features, table_rows
from .finite import check_gradient, describe_gradient, describe_weight
from .padded import jagged_to_padded_dense, padded_dense_to_jagged
from .pooled import pooled_lookup
from .rule import RULES, Rule, define_rule, rule_named
from .sequence import sequence_lookup
from .update import DECAYS, fused_update
from .weight_gradient import per_id_weight_gradient

__all__ = [
    "DECAYS",
    "RULES",
    "BoundsCheckMode",
    "Feature",
    "Rule",
    "Segment",
    "check_gradient",
    "check_ids",
    "define_rule",
    "describe_gradient",
    "describe_weight",
    "flatten_segments",
    "fused_update",
    "is_clean",
    "jagged_dense_add",
    "jagged_dense_add_jagged",
    "jagged_dense_mul",
    "jagged_jagged_mul",
    "jagged_to_padded_dense",
    "new_guard",
    "pack_features",
    "padded_dense_to_jagged",
    "per_id_weight_gradient",
    "pooled_lookup",
    "raise_from_guard",
    "require_ids",
    "rule_named",
    "sequence_lookup",
    "table_rows",
]

# imported for the rules that it defines
del _built_in
