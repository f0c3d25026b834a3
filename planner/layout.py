"""The layout of tables, which rank holds which cells, as plain data: no tensors, no processes.

A plan is a list of shards. A strategy is a function from a table to its shards and nothing else: routing, exchange and
assembly read shards, never strategies. Row shards add, column shards sit side by side, replicas hold the same cells.
Ranks r of one host share r // local_size.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

Span = tuple[int, int]

# Where no width is asked for, column shards are at least this wide.
MIN_COLUMNS = 32
# What the engine runs: device type -> sharding type -> compute kernels, the usual one first. "dense" is a gradient for
# an ordinary optimizer; "fused" the optimizer in the backward, by Triton kernels where there is a GPU, so
# "fused_triton" is the same. Pooled and sequence collections alike run all of it.
_FUSED = ("fused", "fused_triton")
# as "fused", with rows below the device (`Tier`): no table gets them unless a constraint or a plan names them
TIERED_KERNELS = ("fused_uvm", "fused_uvm_caching", "key_value")
# those whose rows on the device are a cache of some size, and those whose rows are in files
CACHED_KERNELS, _STORED_KERNELS = TIERED_KERNELS[1:], TIERED_KERNELS[2:]
_CUT = (*_FUSED, "dense", *TIERED_KERNELS)
_BY_TYPE = {
    "data_parallel": ("dense", *_FUSED, *TIERED_KERNELS),
    "table_wise": _CUT,
    "column_wise": _CUT,
    "row_wise": _CUT,
    "table_row_wise": _CUT,
    "table_column_wise": _CUT,
    "grid_shard": _CUT,
}
# A plan for "mtia" is one for machines that are not here.
CAPABILITIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {"cpu": _BY_TYPE, "cuda": _BY_TYPE, "mtia": _BY_TYPE}
# The same of quantized tables, which one process serves: "quant" on the device of a shard, the others in the memory of
# the host.
_ON_GPU = ("quant", "quant_uvm", "quant_uvm_caching")
SERVING: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cpu": dict.fromkeys(_BY_TYPE, _ON_GPU[:1]),
    "cuda": dict.fromkeys(_BY_TYPE, _ON_GPU),
    "mtia": dict.fromkeys(_BY_TYPE, _ON_GPU[:1]),
}
# what may lie below the rows of a table on its device, and which of these go first
TIERS_BELOW = ("ram", "file")
CACHE_POLICIES = ("aged_lfu", "lru", "lfu")
REDUCTIONS = ("partial", "ordered")
ROW_STATES = ("shard", "table")
# types of the rows and outputs of tables that train, and modes of the check of ids, by TorchRec's names
TRAINED_TYPES = ("FP32", "FP16", "BF16")
_TORCH_TYPES = {"FLOAT32": "FP32", "FLOAT": "FP32", "FLOAT16": "FP16", "HALF": "FP16", "BFLOAT16": "BF16"}
BOUNDS_CHECKS = ("FATAL", "WARNING", "IGNORE")
_BOUNDS_CHECKS = (*BOUNDS_CHECKS, "NONE", *(f"V2_{mode}" for mode in BOUNDS_CHECKS))


@dataclass(frozen=True)
class Setting:
    """The engine's reading of a TorchRec setting that says nothing of where the cells of a table are.

    Args:
        refused: of these values a plan raises; `instead` says where it is set.
        idle: these values have no effect, which a warning says; `reason` says why. What is in neither is so.
        kernels: compute kernels with which they have one.
    """

    refused: Callable[[Any], bool] = lambda value: False
    instead: str = ""
    idle: Callable[[Any], bool] = lambda value: False
    reason: str = ""
    kernels: tuple[str, ...] = ()


def _is_given(value: Any) -> bool:
    return value is not None


def type_name(kind: object) -> str:
    """The name of a type of numbers, as `DataType`, FBGEMM's `SparseType`, torch or text has it: FP16, say."""
    name = str(getattr(kind, "name", kind)).removeprefix("torch.").upper()
    return _TORCH_TYPES.get(name, name)


def bounds_check_name(mode: object) -> str:
    """The name of a mode of the check of ids, of ours or of FBGEMM's: one of BOUNDS_CHECKS, if there is such a mode."""
    name = str(getattr(mode, "name", mode)).upper()
    return "IGNORE" if name == "NONE" else name.removeprefix("V2_") if name in _BOUNDS_CHECKS else name


_OF_TIERS = "Tier(...) of shardwise.planner.layout"
_ON_DEVICE = "rows are kept in the memory of the device"
_CACHED = f"the compute kernels {' and '.join(CACHED_KERNELS)} read it, and none is asked for"
_STORED = "the compute kernel key_value reads it, which is not asked for"

_BOUNDS_CHECK = Setting(
    lambda value: _is_given(value) and bounds_check_name(value) not in BOUNDS_CHECKS,
    f"BoundsCheckMode {', '.join(BOUNDS_CHECKS[:-1])} or {BOUNDS_CHECKS[-1]}",
)
_VIRTUAL = Setting(bool, "table a fixed num_embeddings: no table here makes its rows as ids come")
# of tables that train, and of quantized ones
TRAINED_SETTINGS: Mapping[str, Setting] = {
    "cache_params": Setting(idle=_is_given, reason=_CACHED, kernels=CACHED_KERNELS),
    "enforce_hbm": Setting(idle=lambda value: value is False, reason=_ON_DEVICE, kernels=TIERED_KERNELS),
    "stochastic_rounding": Setting(lambda value: value not in (None, True, False), "value True or False"),
    "bounds_check_mode": _BOUNDS_CHECK,
    "output_dtype": Setting(
        lambda value: _is_given(value) and type_name(value) not in TRAINED_TYPES,
        f"DataType {', '.join(TRAINED_TYPES[:-1])} or {TRAINED_TYPES[-1]}",
    ),
    "key_value_params": Setting(idle=_is_given, reason=_STORED, kernels=_STORED_KERNELS),
    "use_virtual_table": _VIRTUAL,
    "tier": Setting(lambda value: not isinstance(value, Tier | None), _OF_TIERS),
}
_SAME_BITS = "outputs of a quantized table always have the bits of the unsharded one"
_BY_KERNEL = "the compute_kernel of a quantized table says where its rows are"
SERVED_SETTINGS: Mapping[str, Setting] = {
    "cache_params": Setting(idle=_is_given, reason=_BY_KERNEL),
    "enforce_hbm": Setting(idle=_is_given, reason=_BY_KERNEL),
    "stochastic_rounding": Setting(idle=_is_given, reason=_SAME_BITS),
    "bounds_check_mode": _BOUNDS_CHECK,
    "output_dtype": Setting(_is_given, "call that quantizes output_dtype=..., which holds for the collection"),
    "key_value_params": Setting(idle=_is_given, reason=_BY_KERNEL),
    "reduction": Setting(idle=_is_given, reason=_SAME_BITS),
    "row_state": Setting(idle=_is_given, reason=_SAME_BITS),
    "use_virtual_table": _VIRTUAL,
    "tier": Setting(lambda value: not isinstance(value, Tier | None), _OF_TIERS, _is_given, _BY_KERNEL),
}


def check_settings(table: str, given: object, settings: Mapping[str, Setting]) -> dict[str, str]:
    """Settings of `given` without effect, by name, with the reason; `given` has them as attributes, not all of them.

    Raises:
        ValueError: a value that no plan can have; names table, setting, value and where it is set instead.
    """
    without = {}
    tier = getattr(given, "tier", None)
    kernels = {getattr(given, "compute_kernel", None), *(getattr(given, "compute_kernels", None) or ())}
    if tier is not None and getattr(given, "enforce_hbm", None):
        raise ValueError(f"table {table!r}: enforce_hbm=True keeps all rows on the device, tier={tier} does not")
    for name, setting in settings.items():
        value = getattr(given, name, None)
        if setting.refused(value):
            raise ValueError(
                f"table {table!r}: a plan does not set {name} (here {value!r}): give the {setting.instead}"
            )
        if not setting.idle(value):
            continue
        if tier is not None and setting.kernels:
            without[name] = f"tier={tier} says so"
        elif kernels.isdisjoint(setting.kernels):
            without[name] = setting.reason
    return without


@dataclass(frozen=True)
class Shard:
    """Rows [lo, hi) and columns [lo, hi) of a table on one rank; `replica` if every rank holds these same cells."""

    table: str
    rank: int
    rows: Span
    cols: Span
    replica: bool = False


@dataclass(frozen=True)
class Tier:
    """Where rows of a table lie that are not on its device, and how many are: weights and optimizer states together.

    Results have the same bits as with all rows on the device.

    Args:
        slots: rows on the device at a time, all shards of a row range together: a number, or as a float a share of the
            rows. None is as few as the batches in flight need; in a constraint of our search, as many as pay best in
            the memory that there is.
        below: "ram" (the host's memory, pinned where the device is CUDA), "file" (a scratch file in `folder`), or a
            function of (table name, rows, bytes of a record) that makes a `Backing`.
        folder: of scratch files, made where it is missing; on a local disk.
        max_slots: up to so many slots grow, as `slots`, where a batch needs more. None is no bound where `slots` is
            None, and else, as fewer than `slots` are, that they do not grow.
        ram_rows: rows of a file that are in the host's memory too, as `slots`; None is none.
        policy: which rows go first of those that no known batch needs: "aged_lfu" (those that were used least, a use of
            `half_life` batches ago counting a half), "lru" (longest ago), "lfu" (least often) or a function of (scores
            [n], batch) that gives the new scores of rows that are used, integers; lowest scores go first, and a score
            begins at 0.
        half_life: batches, of "aged_lfu".

    Raises:
        ValueError: a value is not one of these.
    """

    slots: int | float | None = None
    below: str | Callable[..., Any] = "ram"
    folder: str | None = None
    max_slots: int | float | None = None
    ram_rows: int | float | None = None
    policy: str | Callable[..., Any] = "aged_lfu"
    half_life: int = 64

    def __post_init__(self) -> None:
        for what in ("slots", "max_slots", "ram_rows"):
            value = getattr(self, what)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"Tier: {what} must be a positive number of rows or a share of them, got {value!r}")
            if isinstance(value, float) and value > 1:
                raise ValueError(f"Tier: {what} as a float is a share of the rows, at most 1.0, got {value!r}")
        if not callable(self.below) and self.below not in TIERS_BELOW:
            raise ValueError(f"Tier: below must be one of {list(TIERS_BELOW)} or a function, got {self.below!r}")
        if self.below == "file" and self.folder is None:
            raise ValueError("Tier: below='file' takes a folder for its scratch files, one on a local disk")
        if isinstance(self.folder, os.PathLike):
            object.__setattr__(self, "folder", os.fspath(self.folder))
        if self.folder is not None and (not isinstance(self.folder, str) or not self.folder or "\0" in self.folder):
            raise ValueError(f"Tier: folder must be the path of one, got {self.folder!r}")
        if self.below != "file" and (self.folder is not None or self.ram_rows is not None):
            raise ValueError(f"Tier: folder and ram_rows are of below='file', got below={self.below!r}")
        if not callable(self.policy) and self.policy not in CACHE_POLICIES:
            raise ValueError(f"Tier: policy must be one of {list(CACHE_POLICIES)} or a function, got {self.policy!r}")
        if type(self.half_life) is not int or not 0 < self.half_life < 2**31:
            raise ValueError(
                f"Tier: half_life must be a positive number of batches, below 2^31, got {self.half_life!r}"
            )

    @staticmethod
    def rows_of(given: int | float | None, rows: int, share: float = 1.0) -> int | None:
        """`slots`, `max_slots` or `ram_rows` of a shard with `rows` rows, which is `share` of its table's rows."""
        if given is None:
            return None
        wanted = math.ceil(given * rows) if isinstance(given, float) else math.ceil(given * share)
        return min(max(1, wanted), rows)

    def __str__(self) -> str:
        below = self.below if isinstance(self.below, str) else getattr(self.below, "__name__", "a function")
        slots = (
            "as few slots as needed"
            if self.slots is None
            else f"{self.slots:.3g} of the rows"
            if isinstance(self.slots, float)
            else f"{self.slots} slots"
        )
        return f"{slots} over {below}"


@dataclass(frozen=True)
class TableOptions:
    """How the shards of one table work together, and what of the table's lookups and updates a plan sets.

    Args:
        reduction: how row shards add up: "partial" (each owner pools its rows and partial sums travel) or "ordered"
            (rows travel and the source pools them in the order of the bag: the bits of one process).
        row_state: what a rule that keeps one number a row (rowwise Adagrad, LAMB) sees of a table cut by columns:
            "shard" (each column shard has its own number) or "table" (one number over all columns, that of the uncut
            table).
        output_dtype: the type of the table's lookups, FP32, FP16 or BF16; None is that of the collection.
        bounds_check_mode: what an id outside the table does, FATAL, WARNING or IGNORE; None is the collection's.
        stochastic_rounding: whether rows of FP16 and BF16 are rounded so; None is what the table's optimizer says.
        weights_precision: the type of the table's rows, FP32, FP16 or BF16; None is that of the unsharded table.
        dense: the shards train by their gradients, which reach their parameters, and not by an optimizer in the
            backward. Says nothing of replicated tables.
        tier: where rows lie that are not on the device; None is that all are.

    Raises:
        ValueError: a value is not one of these.
    """

    reduction: str = "partial"
    row_state: str = "shard"
    output_dtype: str | None = None
    bounds_check_mode: str | None = None
    stochastic_rounding: bool | None = None
    weights_precision: str | None = None
    dense: bool = False
    tier: Tier | None = None

    def __post_init__(self) -> None:
        for what, known in (
            ("reduction", REDUCTIONS), ("row_state", ROW_STATES), ("output_dtype", (None, *TRAINED_TYPES)),
            ("bounds_check_mode", (None, *BOUNDS_CHECKS)), ("stochastic_rounding", (None, True, False)),
            ("weights_precision", (None, *TRAINED_TYPES)),
        ):  # fmt: skip
            value = getattr(self, what)
            if value not in known:
                raise ValueError(f"{what} must be one of {list(known)}, got {value!r}")

    def over(self, others: TableOptions) -> TableOptions:
        """These, and those of `others` where these say nothing (None)."""
        silent = [field.name for field in fields(self) if getattr(self, field.name) is None]
        return replace(self, **{name: getattr(others, name) for name in silent})


def table_wise(table: str, rows: int, dim: int, rank: int) -> list[Shard]:
    """The whole table on one rank."""
    return [Shard(table, rank, (0, rows), (0, dim))]


def data_parallel(table: str, rows: int, dim: int, world_size: int) -> list[Shard]:
    """The whole table on every rank."""
    return [Shard(table, rank, (0, rows), (0, dim), replica=True) for rank in range(world_size)]


def row_wise(table: str, rows: int, dim: int, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Shard]:
    """A block of rows on each of `ranks`: `sizes` rows, or `split_rows` of them. A rank may get none.

    Raises:
        ValueError: the sizes are not one for each rank or do not add up to `rows`.
    """
    cuts = _spans(table, "rows", rows, len(ranks), split_rows(rows, len(ranks)) if sizes is None else sizes)
    return [Shard(table, rank, cut, (0, dim)) for rank, cut in zip(ranks, cuts, strict=True)]


def column_wise(
    table: str, rows: int, dim: int, ranks: Sequence[int], widths: Sequence[int] | None = None
) -> list[Shard]:
    """A block of columns on each of `ranks` (which may repeat): `widths` columns, or the same number on each.

    Raises:
        ValueError: the widths are not one for each rank or do not add up to `dim`, or `dim` does not divide.
    """
    cuts = _spans(table, "columns", dim, len(ranks), _even(table, dim, len(ranks)) if widths is None else widths)
    return [Shard(table, rank, (0, rows), cut) for rank, cut in zip(ranks, cuts, strict=True)]


def table_row_wise(table: str, rows: int, dim: int, ranks_of_host: Sequence[int]) -> list[Shard]:
    """A block of rows on each rank of one host."""
    return row_wise(table, rows, dim, ranks_of_host)


def table_column_wise(
    table: str, rows: int, dim: int, ranks_of_host: Sequence[int], widths: Sequence[int] | None = None
) -> list[Shard]:
    """A block of columns on each of `ranks_of_host`, ranks of one host (which may repeat). Raises as `column_wise`."""
    return column_wise(table, rows, dim, ranks_of_host, widths)


def grid(
    table: str, rows: int, dim: int, hosts: Sequence[Sequence[int]], widths: Sequence[int] | None = None
) -> list[Shard]:
    """A block of columns on each host, given as its ranks, and of it a block of rows on each rank.

    Raises:
        ValueError: the widths are not one for each host or do not add up to `dim`, or `dim` does not divide.
    """
    cuts = _spans(table, "columns", dim, len(hosts), _even(table, dim, len(hosts)) if widths is None else widths)
    return [
        Shard(table, shard.rank, shard.rows, cut)
        for ranks, cut in zip(hosts, cuts, strict=True)
        for shard in row_wise(table, rows, dim, ranks)
    ]


def split_rows(rows: int, parts: int) -> list[int]:
    """Blocks of ceil(rows / parts) rows; the last that is not empty has the remainder, those after it have none."""
    block = -(-rows // parts) if parts else 0
    return [max(0, min(block, rows - block * part)) for part in range(parts)]


def split_columns(dim: int, min_partition: int = MIN_COLUMNS) -> list[int]:
    """Equal widths, as narrow as they can be at `min_partition` columns or more and multiples of 4; else one of `dim`.

    Raises:
        ValueError: `min_partition` is not positive.
    """
    if min_partition < 1:
        raise ValueError(f"min_partition must be positive, got {min_partition}")
    width = next((w for w in range(-(-min_partition // 4) * 4, dim, 4) if dim % w == 0), dim)
    return [width] * (dim // width)


def host_of(rank: int, local_size: int) -> int:
    """The host of a rank: `local_size` consecutive ranks are one."""
    return rank // local_size


def ranks_of(host: int, local_size: int) -> range:
    """The ranks of a host."""
    return range(host * local_size, (host + 1) * local_size)


def validate(shards: Iterable[Shard], sizes: Mapping[str, tuple[int, int]], world_size: int) -> None:
    """Check that the shards cover each table of `sizes` (name -> (rows, dim)) exactly; empty shards are fine.

    Raises:
        ValueError: a shard names an unknown table or rank or leaves its table; cells are missing or held twice.
    """
    by_table: dict[str, list[Shard]] = {name: [] for name in sizes}
    for shard in shards:
        if shard.table not in by_table:
            raise ValueError(f"the plan places table {shard.table!r}, the module has {sorted(by_table)}")
        rows, dim = sizes[shard.table]
        if not 0 <= shard.rank < world_size:
            raise ValueError(f"table {shard.table!r}: rank {shard.rank} is not one of {world_size}")
        for what, (low, high), size in (("rows", shard.rows, rows), ("columns", shard.cols, dim)):
            if not 0 <= low <= high <= size:
                raise ValueError(f"table {shard.table!r}: {what} [{low}, {high}) leave the table's {size}")
        by_table[shard.table].append(shard)
    for name, table_shards in by_table.items():
        rows, dim = sizes[name]
        replicas = [shard for shard in table_shards if shard.replica]
        if replicas:
            ranks = sorted(shard.rank for shard in replicas if (shard.rows, shard.cols) == ((0, rows), (0, dim)))
            if len(replicas) != len(table_shards) or ranks != list(range(world_size)):
                raise ValueError(
                    f"table {name!r}: a replicated table needs one whole replica on each of {world_size} ranks"
                )
            continue
        fault = _fault(table_shards, rows, dim)
        if fault:
            cells = sum((s.rows[1] - s.rows[0]) * (s.cols[1] - s.cols[0]) for s in table_shards)
            raise ValueError(f"table {name!r}: shards hold {cells} of {rows * dim} cells, {fault}")


def fingerprint(shards: Iterable[Shard], tables: Iterable[object]) -> int:
    """A number that is equal on two ranks only if they hold the same plan for the same tables (63 bits, stable)."""
    text = repr((sorted(map(repr, shards)), list(map(repr, tables))))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _fault(shards: Sequence[Shard], rows: int, dim: int) -> str | None:
    """The first cells that two shards hold or that none does, by a sweep down the rows; None if there are none."""
    full = [s for s in shards if s.rows[0] < s.rows[1] and s.cols[0] < s.cols[1]]
    begins = sorted(full, key=lambda s: s.rows[0], reverse=True)
    ends = sorted(full, key=lambda s: s.rows[1], reverse=True)
    # what holds row `at`, by columns; starts has their first columns alone, for bisect
    here: list[Shard] = []
    starts: list[int] = []
    edges = sorted({0, *(edge for s in full for edge in s.rows)})
    for at, below in zip(edges, [*edges[1:], rows], strict=True):
        while ends and ends[-1].rows[1] == at:
            place = bisect_left(starts, ends.pop().cols[0])
            del here[place], starts[place]
        while begins and begins[-1].rows[0] == at:
            shard = begins.pop()
            place = bisect_left(starts, shard.cols[0])
            for other in here[max(0, place - 1) : place + 1]:
                low, high = max(other.cols[0], shard.cols[0]), min(other.cols[1], shard.cols[1])
                if low < high:
                    end = min(other.rows[1], shard.rows[1])
                    cells = f"rows [{at}, {end}) of columns [{low}, {high})"
                    return f"some twice: {cells} are on ranks {other.rank} and {shard.rank}"
            here.insert(place, shard)
            starts.insert(place, shard.cols[0])
        # gaps can only be where the row is new to a shard, so this walk is paid for by those that begin or end here
        gaps = zip([0, *(s.cols[1] for s in here)], [*starts, dim], strict=True)
        gap = next(((low, high) for low, high in gaps if low < high), None)
        if gap and at < below:
            return f"none holds rows [{at}, {below}) of columns [{gap[0]}, {gap[1]})"
    return None


def _spans(table: str, what: str, size: int, parts: int, sizes: Sequence[int]) -> list[Span]:
    """[lo, hi) of consecutive blocks."""
    if not parts:
        raise ValueError(f"table {table!r}: there are no ranks for its {what}")
    if len(sizes) != parts or sum(sizes) != size or min(sizes) < 0:
        raise ValueError(
            f"table {table!r}: {list(sizes)} {what} must be {parts} numbers, one for each part, that add up to {size}"
        )
    edges = list(accumulate(sizes, initial=0))
    return list(zip(edges, edges[1:], strict=False))


def _even(table: str, dim: int, parts: int) -> list[int]:
    if parts and dim % parts:
        raise ValueError(f"table {table!r}: {dim} columns do not divide by {parts}: say the width of each part")
    return [dim // parts] * parts if parts else []
