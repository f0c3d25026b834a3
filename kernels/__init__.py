"""Functions of tensors: lookups, their fused backwards and the checks before them. No state, no modules, no processes.

Every op is a Triton kernel beside a torch twin; importing this package registers them as `torch.ops.shardwise.*`.
"""

from .bounds import BoundsCheckMode, check_ids, new_guard, raise_from_guard, require_ids
from .features import Feature, Segment, flatten_segments, pack_features, table_rows
from .pooled import pooled_lookup
from .sequence import sequence_lookup
from .update import RULES, STATES, fused_update

__all__ = [
    "RULES",
    "STATES",
    "BoundsCheckMode",
    "Feature",
    "Segment",
    "check_ids",
    "flatten_segments",
    "fused_update",
    "new_guard",
    "pack_features",
    "pooled_lookup",
    "raise_from_guard",
    "require_ids",
    "sequence_lookup",
    "table_rows",
]
