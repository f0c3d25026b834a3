"""The ways to cut a table, before anybody says what they cost: which blocks there are and how each is divided.

A way is a strategy of `planner.layout` without ranks: K blocks of columns, each over `span` consecutive ranks that
hold `rows` rows of it each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..constraints import ParameterConstraints
from ..errors import PlannerError, PlannerErrorType
from ..layout import CAPABILITIES, MIN_COLUMNS, SERVING, TIERED_KERNELS, Tier, split_rows
from ..tables import Table, state_bytes
from ..tiers import RowBytes, settings_of, tier_of
from ..topology import Topology

# what a table may have where its constraint says nothing of kernels
_USUAL = ("dense", "fused", "fused_triton", "quant", "quant_uvm", "quant_uvm_caching")
# spellings that older plans and tutorials use
_ALIASES = {"batched_fused": "fused", "batched_dense": "dense"}


@dataclass(frozen=True)
class Way:
    """K blocks of `widths` columns; place s of a block's span holds `rows[s]` rows.

    `replica`: every rank holds all rows. `one_host`: blocks lie on ranks of one host. `tier`: where rows lie that are
    not on the device, None if all are. `is_sized`: its slots are one of several numbers that the search chooses from.
    """

    sharding_type: str
    compute_kernel: str
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    one_host: bool = False
    replica: bool = False
    tier: Tier | None = None
    is_sized: bool = False

    @property
    def span(self) -> int:
        """Ranks that a block lies on."""
        return len(self.rows)

    def sized(self, slots: Sequence[int]) -> list[Way]:
        """This way with each of these numbers of slots, which grow where a batch needs more, within a bound."""
        tier = self.tier
        assert tier is not None
        most = 1.0 if tier.max_slots is None else tier.max_slots
        return [replace(self, tier=replace(tier, slots=n, max_slots=most), is_sized=True) for n in slots]


def ways_of(table: Table, topology: Topology, constraint: ParameterConstraints | None = None) -> list[Way]:
    """The ways in which the engine can train (or serve) a table here and that the constraint allows; maybe none.

    Columns are cut evenly, at every width that divides the dim, is a multiple of 4 and at least `min_partition`, into
    no more blocks than there are ranks (or, by host, ranks of a host, or hosts). Types that say "host" are ways of
    their own where there are several; on one host, and cuts into one part, they are left out unless nothing else is
    allowed. A table in cut shards trains by its gradient, kernel "dense", only where the constraint names both the type
    and that kernel: the kernel alone means replicas, as TorchRec's sharders offer it. Rows are below the device only
    where the constraint has a tier or names such a kernel, and those of replicas where it names the type too.
    """
    asked = constraint or ParameterConstraints()
    kernels = None if asked.compute_kernels is None else [_ALIASES.get(name, name) for name in asked.compute_kernels]
    served = (SERVING if table.served else CAPABILITIES).get(topology.compute_device, {})
    ways: list[Way] = []
    others: list[Way] = []
    for sharding_type, offered in served.items():
        if asked.sharding_types is not None and sharding_type not in asked.sharding_types:
            continue
        allowed = [kernel for kernel in offered if kernel in (_USUAL if kernels is None else kernels)]
        if asked.sharding_types is None:
            unwanted = ("dense",) if sharding_type != "data_parallel" else TIERED_KERNELS
            allowed = [kernel for kernel in allowed if kernel not in unwanted]
        if asked.tier is not None:
            of_replicas = sharding_type == "data_parallel"
            allowed = [kernel for kernel in allowed if kernel != "dense" and (asked.sharding_types or not of_replicas)]
        # with all rows on the device, kernels of one type do the same work here
        resident = [kernel for kernel in allowed if kernel not in TIERED_KERNELS]
        for kernel in (*resident[:1], *(kernel for kernel in allowed if kernel in TIERED_KERNELS)):
            for way, useful in _cuts(sharding_type, kernel, table, topology, asked.min_partition or MIN_COLUMNS):
                way = replace(way, tier=planned_tier(table, asked, kernel, max(way.rows), max(way.widths)))
                (ways if useful else others).append(way)
    return ways or others[:1]


def planned_tier(table: Table, constraint: ParameterConstraints, kernel: str, rows: int, width: int) -> Tier | None:
    """Where the rows of a table lie, of whose shards the largest has so many rows and columns; None is on the device.

    Raises:
        PlannerError: a setting of a cache has a value that is no good.
    """
    if constraint.tier is not None and not table.served:
        return constraint.tier
    weights = int(width * table.element_bytes)
    row = RowBytes(table.num_embeddings, rows, weights, weights + state_bytes(table.optimizer, width))
    try:
        return tier_of(kernel, settings_of(constraint), row, folder="a folder for temporary files")
    except ValueError as error:
        raise PlannerError(f"table {table.name!r}: {error}", PlannerErrorType.INPUT_VALIDATION) from error


def _cuts(kind: str, kernel: str, table: Table, topology: Topology, narrowest: int) -> Iterator[tuple[Way, bool]]:
    """The ways of one type, and whether each is another than the plainer types have."""
    world, local, rows, dim = topology.world_size, topology.local_world_size, table.num_embeddings, table.embedding_dim
    hosts = world // local
    whole = (rows,)
    if kind == "data_parallel":
        yield Way(kind, kernel, (dim,), whole * world, replica=True), world > 1
    elif kind == "table_wise":
        yield Way(kind, kernel, (dim,), whole), True
    elif kind == "row_wise":
        yield Way(kind, kernel, (dim,), _even_rows(rows, world)), world > 1
    elif kind == "table_row_wise":
        yield Way(kind, kernel, (dim,), _even_rows(rows, local)), hosts > 1 and local > 1
    elif kind == "column_wise":
        for widths in split_widths(dim, narrowest, world):
            yield Way(kind, kernel, widths, whole), len(widths) > 1
    elif kind == "table_column_wise":
        for widths in split_widths(dim, narrowest, local):
            yield Way(kind, kernel, widths, whole, one_host=True), len(widths) > 1 and hosts > 1
    elif kind == "grid_shard":
        for widths in split_widths(dim, narrowest, hosts):
            yield Way(kind, kernel, widths, _even_rows(rows, local)), len(widths) > 1 and local > 1


@lru_cache(maxsize=4096)
def _even_rows(rows: int, parts: int) -> tuple[int, ...]:
    return tuple(split_rows(rows, parts))


def split_widths(dim: int, narrowest: int, most: int) -> Sequence[tuple[int, ...]]:
    """Even cuts of `dim` columns into `most` blocks or fewer, the fewest first; the last resort is one block.

    Widths are multiples of 4 of at least `narrowest` columns.
    """
    blocks = [k for k in range(2, min(most, dim // narrowest) + 1) if dim % (4 * k) == 0]
    return [(dim // k,) * k for k in blocks] or [(dim,)]
