"""Functions of tensors: lookups, their fused backwards and the checks before them. No state, no modules, no processes.

Every op is a Triton kernel beside a torch twin; importing this package registers them as `torch.ops.shardwise.*`.
"""

from . import rules as _built_in
from .bounds import BoundsCheckMode, check_ids, is_clean, new_guard, raise_from_guard, require_ids
from .bucketize import Bucketized, block_bucketize
from .calibration import (
    Calibrated,
    generic_histogram_binning_calibration_by_feature,
    histogram_binning_calibration,
    histogram_binning_calibration_by_feature,
)
from .features import Feature, Segment, flatten_segments, pack_features, table_rows
from .finite import check_gradient, describe_gradient, describe_weight
from .pooled import pooled_lookup
from .rule import RULES, Rule, define_rule, rule_named
from .sequence import sequence_lookup
from .unique import JaggedUnique, Unique, jagged_unique, unique_ids
from .update import DECAYS, fused_update
from .weight_gradient import per_id_weight_gradient

__all__ = [
    "DECAYS",
    "RULES",
    "BoundsCheckMode",
    "Bucketized",
    "Calibrated",
    "Feature",
    "JaggedUnique",
    "Rule",
    "Segment",
    "Unique",
    "block_bucketize",
    "check_gradient",
    "check_ids",
    "define_rule",
    "describe_gradient",
    "describe_weight",
    "flatten_segments",
    "fused_update",
    "generic_histogram_binning_calibration_by_feature",
    "histogram_binning_calibration",
    "histogram_binning_calibration_by_feature",
    "is_clean",
    "jagged_unique",
    "new_guard",
    "pack_features",
    "per_id_weight_gradient",
    "pooled_lookup",
    "raise_from_guard",
    "require_ids",
    "rule_named",
    "sequence_lookup",
    "table_rows",
    "unique_ids",
]

# imported for the rules that it defines
del _built_in
