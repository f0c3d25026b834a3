"""Tables larger than their device: rows in slots, all others below, with the bits of tables that lie there whole."""

from .backing import Backing, HostRecords
from .cached_rows import CacheCounts, CachedRows, CacheLease, CacheSpec
from .files import FileRecords
from .policies import AgedLfu, Policy, lfu, lru, policy_named
from .records import RecordLayout
from .residency import Announced, Lease, Moves, Residency, Span, TooFewSlots

__all__ = [
    "AgedLfu",
    "Announced",
    "Backing",
    "CacheCounts",
    "CacheLease",
    "CacheSpec",
    "CachedRows",
    "FileRecords",
    "HostRecords",
    "Lease",
    "Moves",
    "Policy",
    "RecordLayout",
    "Residency",
    "Span",
    "TooFewSlots",
    "lfu",
    "lru",
    "policy_named",
]
