"""Tables larger than their device: rows in slots, all others below, with the bits of tables that lie there whole."""

from .backing import Backing, HostRecords
from .cached_rows import CachedRows, CacheLease, CacheSpec, TooManyRows
from .counts import CacheCounts
from .curves import TraceCurves, regret, sizes_between
from .files import FileRecords
from .io_queue import IoQueue, Job
from .metrics import CacheMetrics, metrics_of
from .policies import AgedLfu, Policy, lfu, lru, policy_named
from .ram_cache import RamOverFile
from .records import RecordLayout
from .residency import Announced, Lease, Moves, Residency, Span, TooFewSlots
from .row_parts import RowPart, chunks_of, parts_of
from .simulate import CacheSetting, Simulated, Simulation, record_bytes, rows_of_shard, simulate

__all__ = [
    "AgedLfu",
    "Announced",
    "Backing",
    "CacheCounts",
    "CacheLease",
    "CacheMetrics",
    "CacheSetting",
    "CacheSpec",
    "CachedRows",
    "FileRecords",
    "HostRecords",
    "IoQueue",
    "Job",
    "Lease",
    "Moves",
    "Policy",
    "RamOverFile",
    "RecordLayout",
    "Residency",
    "RowPart",
    "Simulated",
    "Simulation",
    "Span",
    "TooFewSlots",
    "TooManyRows",
    "TraceCurves",
    "chunks_of",
    "lfu",
    "lru",
    "metrics_of",
    "parts_of",
    "policy_named",
    "record_bytes",
    "regret",
    "rows_of_shard",
    "simulate",
    "sizes_between",
]
