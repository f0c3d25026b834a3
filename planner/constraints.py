"""Constraints on tables, a user's, and their effect on tables and ranks before anything is priced.

`ParameterConstraints` has TorchRec's name and fields, and ours behind them. A constraint holds for the tables of its
name, in every module alike; the one named "*" for all that have none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shardwise._names import did_you_mean
from shardwise.embeddings.config import DataType

from .errors import PlannerError, PlannerErrorType
from .hashes import hash_sha256_to_int, text_of
from .layout import CAPABILITIES, SERVED_SETTINGS, TRAINED_SETTINGS, Tier, check_settings
from .tables import Feature, Skew, Table
from .tiers import idle_settings

# by value, as `sharding.plan.plan` has them
SHARDING_TYPES = (
    "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard",
)  # fmt: skip
COMPUTE_KERNELS = (
    "dense", "fused", "fused_uvm", "fused_uvm_caching", "quant", "quant_uvm", "quant_uvm_caching", "key_value",
    "customized_kernel", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table", "fused_triton",
)  # fmt: skip


@dataclass
class ParameterConstraints:
    """The ways that are allowed for a table, and what is known of its ids; keyed by table name, in every module alike.

    Args:
        sharding_types, compute_kernels: those allowed, by value; None allows all.
        min_partition: fewest columns of a column shard.
        pooling_factors, num_poolings, batch_sizes: for each feature of the table: ids of a lookup, lookups of a sample,
            samples of a rank's batch.
        is_weighted: ids have weights.
        ranks, not_on: the only ranks that may hold a part of the table; ranks that may not.
        same_rank: tables with the same text here lie whole on one rank together.
        skew: how ids are drawn.
        tier: where rows lie that are not on the device, whatever the kernel says.

    The others are TorchRec's and pass into the plan.

    Example:
        >>> planner = EmbeddingShardingPlanner(
        ...     Topology(world_size=2, compute_device="cpu"),
        ...     constraints={"item": ParameterConstraints(sharding_types=["row_wise"])},
        ... )
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> planner.plan(tables, get_default_sharders()).plan[""]["item"].sharding_type
        'row_wise'
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [1.0])
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: Any = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    feature_names: list[str] | None = None
    output_dtype: DataType | None = None
    device_group: str | None = None
    key_value_params: Any = None
    use_virtual_table: bool = False
    ranks: list[int] | None = field(default=None, kw_only=True)
    not_on: list[int] | None = field(default=None, kw_only=True)
    same_rank: str | None = field(default=None, kw_only=True)
    skew: Skew | None = field(default=None, kw_only=True)
    tier: Tier | None = field(default=None, kw_only=True)

    def __hash__(self) -> int:
        """A number that is the same in every process, TorchRec's where no field of ours is set."""
        lists = ("sharding_types", "compute_kernels", "pooling_factors", "num_poolings", "batch_sizes", "feature_names")
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        # as TorchRec, an empty list is none, but for pooling factors
        values |= {name: tuple(values[name]) if values[name] or name == "pooling_factors" else None for name in lists}
        own = [each.name for each in fields(self) if each.kw_only]
        is_torchrecs = all(values[name] is None for name in own)
        return hash_sha256_to_int([text_of(values[name]) for name in values if not (is_torchrecs and name in own)])


ANY = "*"
_DENSE = {"dense", "batched_dense"}


def constraint_of(constraints: Mapping[str, ParameterConstraints], name: str) -> ParameterConstraints | None:
    """The constraint for a table, or None."""
    return constraints.get(name, constraints.get(ANY))


def check_constraints(
    constraints: Mapping[str, ParameterConstraints], names: Iterable[str], world_size: int | None = None
) -> None:
    """Check that constraints name tables, sharding types, kernels and ranks that there are.

    Raises:
        PlannerError: one does not; the text names the table, the value and the nearest that there is.
    """
    known = list(dict.fromkeys(names))
    for name, constraint in constraints.items():
        if name != ANY and name not in known:
            raise _wrong(f"constraints name table {name!r}, which the model does not have{nearest(name, known)}")
        for what, values, allowed, kind in (
            ("sharding_types", constraint.sharding_types, SHARDING_TYPES, PlannerErrorType.INPUT_VALIDATION),
            ("compute_kernels", constraint.compute_kernels, COMPUTE_KERNELS, PlannerErrorType.INVALID_COMPUTE_KERNEL),
        ):
            if isinstance(values, str):
                raise _wrong(f"table {name!r}: {what} must be a list, got {values!r}: write [{values!r}]", kind)
            for value in values or ():
                if value not in allowed:
                    # an enum's member is not its value
                    word = str(getattr(value, "value", value))
                    raise _wrong(f"table {name!r}: {what} has {value!r}{nearest(word, allowed)}", kind)
        if constraint.tier is not None and constraint.compute_kernels and set(constraint.compute_kernels) <= _DENSE:
            raise _wrong(
                f"table {name!r}: tier={constraint.tier} is for an optimizer in the backward, and compute_kernels are"
                f" {constraint.compute_kernels}: allow 'fused'"
            )
        if constraint.min_partition is not None and constraint.min_partition < 1:
            raise _wrong(f"table {name!r}: min_partition must be positive, got {constraint.min_partition}")
        for what, ranks in (("ranks", constraint.ranks), ("not_on", constraint.not_on)):
            for rank in ranks or ():
                if rank < 0 or (world_size is not None and rank >= world_size):
                    has = "are 0 and more" if world_size is None else f"are 0 to {world_size - 1}"
                    raise _wrong(f"table {name!r}: {what} has rank {rank}: ranks {has}")


def check_settings_of(
    constraints: Mapping[str, ParameterConstraints], tables: Iterable[Table], compute_device: str
) -> None:
    """Check that a plan can do what constraints say of tables beside where they go; warn of what has no effect.

    Raises:
        PlannerError: a setting that sharding with the plan would refuse; names table, setting and where it is set
            instead. Or a `device_group` that is no device.
    """
    without: dict[tuple[str, str], list[str]] = {}
    for table in tables:
        constraint = constraint_of(constraints, table.name)
        if constraint is None:
            continue
        try:
            idle = check_settings(table.name, constraint, SERVED_SETTINGS if table.served else TRAINED_SETTINGS)
            of_parts = idle_settings(constraint, table.data_type.value)
        except ValueError as error:
            raise _wrong(str(error)) from error
        # of what is of no effect as a whole the parts need no word
        idle |= {what: reason for what, reason in of_parts.items() if what.partition(".")[0] not in idle}
        if constraint.device_group not in (None, *CAPABILITIES):
            raise _wrong(
                f"table {table.name!r}: device_group must be one of {', '.join(CAPABILITIES)}, got"
                f" {constraint.device_group!r}{did_you_mean(str(constraint.device_group), CAPABILITIES)}"
            )
        if constraint.device_group not in (None, compute_device):
            idle["device_group"] = f"this plan is for {compute_device}, and leaves them to another"
        features = [feature.name for feature in table.features]
        if constraint.feature_names not in (None, features):
            idle["feature_names"] = "a table's features, and their order, are those of its config"
        for what, reason in idle.items():
            without.setdefault((what, reason), []).append(table.name)
    for (what, reason), names in without.items():
        shown = f"{', '.join(map(repr, names[:8]))}{', ...' if len(names) > 8 else ''}"
        effect = "leaves them out" if what == "device_group" else "has no effect"
        warnings.warn(f"the constraint {what} of tables {shown} {effect}: {reason}", stacklevel=3)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is unknown: the one that is alike, or else those that there are."""
    every = list(known)
    listed = f": there are {', '.join(every[:12])}{', ...' if len(every) > 12 else ''}" if every else ""
    return did_you_mean(name, every) or listed


def described(table: Table, constraint: ParameterConstraints | None) -> Table:
    """The table with what its constraint says of its ids; pooling factors of [1.0], the default, say nothing.

    Raises:
        PlannerError: a list has not one number for each feature of the table.
    """
    if constraint is None:
        return table
    features = _features(table, constraint)
    weighted = table.weighted or constraint.is_weighted
    skew = table.skew if constraint.skew is None else constraint.skew
    if (features, weighted, skew) == (table.features, table.weighted, table.skew):
        return table
    return replace(table, features=features, weighted=weighted, skew=skew)


def _features(table: Table, constraint: ParameterConstraints) -> tuple[Feature, ...]:
    per_feature = {
        "pooling_factor": constraint.pooling_factors if constraint.pooling_factors != [1.0] else None,
        "num_poolings": constraint.num_poolings,
        "batch_size": constraint.batch_sizes,
    }
    features = table.features or tuple(map(Feature, constraint.feature_names or [table.name]))
    for what, values in per_feature.items():
        if values is None:
            continue
        if len(values) != len(features):
            raise _wrong(
                f"table {table.name!r}: {what}s must have one number for each of its {len(features)} features"
                f" ({', '.join(f.name for f in features)}), got {values}"
            )
        changes: list[Any] = [{what: value} for value in values]
        features = tuple(replace(f, **change) for f, change in zip(features, changes, strict=True))
    return features


def allowed_ranks(name: str, constraint: ParameterConstraints | None, world_size: int) -> tuple[int, ...] | None:
    """The ranks that may hold a part of a table, in order; None if all may.

    Raises:
        PlannerError: none may.
    """
    if constraint is None or (constraint.ranks is None and not constraint.not_on):
        return None
    only = range(world_size) if constraint.ranks is None else constraint.ranks
    left = tuple(sorted(set(only) - set(constraint.not_on or ())))
    if not left:
        given = as_given(constraint, "ranks", "not_on")
        raise PlannerError(f"table {name!r}: {given} leave no rank", PlannerErrorType.STRICT_CONSTRAINTS)
    return None if len(left) == world_size else left


@dataclass(frozen=True)
class Group:
    """Tables that must share a rank (`label` is their `same_rank`), or one that need not (None)."""

    tables: tuple[Table, ...]
    label: str | None


def groups(tables: Sequence[Table], constraints: Mapping[str, ParameterConstraints]) -> list[Group]:
    """The tables by `same_rank`, each group where its first table stands."""
    together: dict[tuple[str | None, str], list[Table]] = {}
    for table in tables:
        constraint = constraint_of(constraints, table.name)
        label = None if constraint is None else constraint.same_rank
        together.setdefault((label, table.path if label is None else ""), []).append(table)
    return [Group(tuple(members), label) for (label, _), members in together.items()]


def as_given(constraint: ParameterConstraints, *names: str) -> str:
    """The fields of a constraint that say something, or those of `names` that do, as they would be written."""
    default = ParameterConstraints()
    shown = [
        f"{field.name}={getattr(constraint, field.name)!r}"
        for field in fields(constraint)
        if (not names or field.name in names) and getattr(constraint, field.name) != getattr(default, field.name)
    ]
    return ", ".join(shown)


def _wrong(message: str, kind: PlannerErrorType = PlannerErrorType.INPUT_VALIDATION) -> PlannerError:
    return PlannerError(message, kind)
