"""Functions of tensors: lookups, their fused backwards and the checks before them. No state, no modules, no processes.

Every op is a Triton kernel beside a torch twin; importing this package registers them as `torch.ops.shardwise.*`.
"""

from . import rules as _built_in
from .bounds import BoundsCheckMode, check_ids, is_clean, new_guard, raise_from_guard, require_ids
from .features import Feature, Segment, flatten_segments, pack_features, table_rows
from .finite import check_gradient, describe_gradient, describe_weight
from .index_add import jagged_index_add
from .index_select import jagged_index_select
from .keyed_select import keyed_jagged_index_select
from .permute import permute_segments
from .pooled import pooled_lookup
from .regroup_plan import RegroupPlan, plan_pieces, plan_regroup
from .regrouping import permute_pooled, regroup
from .rule import RULES, Rule, define_rule, rule_named
from .sequence import sequence_lookup
from .update import DECAYS, fused_update
from .weight_gradient import per_id_weight_gradient

__all__ = [
    "DECAYS",
    "RULES",
    "BoundsCheckMode",
    "Feature",
    "RegroupPlan",
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
    "jagged_index_add",
    "jagged_index_select",
    "keyed_jagged_index_select",
    "new_guard",
    "pack_features",
    "per_id_weight_gradient",
    "permute_pooled",
    "plan_pieces",
    "plan_regroup",
    "permute_segments",
    "pooled_lookup",
    "raise_from_guard",
    "regroup",
    "require_ids",
    "rule_named",
    "sequence_lookup",
    "table_rows",
]

# imported for the rules that it defines
del _built_in
