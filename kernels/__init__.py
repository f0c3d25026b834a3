"""Functions of tensors: lookups, their fused backwards and the checks before them. No state, no modules, no processes.

Every op is a Triton kernel beside a torch twin; importing this package registers them as `torch.ops.shardwise.*`.
"""

from . import rules as _built_in
from .bounds import BoundsCheckMode, check_ids, is_clean, new_guard, raise_from_guard, require_ids
from .features import Feature, Segment, flatten_segments, pack_features, table_rows
from .finite import check_gradient, describe_gradient, describe_weight
from .jagged_bmm import jagged_dense_bmm, jagged_jagged_bmm
from .pooled import pooled_lookup
from .rule import RULES, Rule, define_rule, rule_named
from .sequence import sequence_lookup
from .softmax import jagged_softmax
from .unary_embeddings import batched_unary_embeddings
from .update import DECAYS, fused_update
from .vector_product import jagged_vector_product
from .weight_gradient import per_id_weight_gradient

__all__ = [
    "DECAYS",
    "RULES",
    "BoundsCheckMode",
    "Feature",
    "Rule",
    "Segment",
    "batched_unary_embeddings",
    "check_gradient",
    "check_ids",
    "define_rule",
    "describe_gradient",
    "describe_weight",
    "flatten_segments",
    "fused_update",
    "is_clean",
    "jagged_dense_bmm",
    "jagged_jagged_bmm",
    "jagged_softmax",
    "jagged_vector_product",
    "new_guard",
    "pack_features",
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
